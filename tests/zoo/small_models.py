"""Configs of small models, one for each thing that generation may get wrong."""

from overspill.zoo.config import LlamaConfig
from overspill.zoo.moe_config import DeepSeekConfig, MoEConfig

GQA = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 300.0,
    "max_position_embeddings": 64,
}
EXPERTS = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": True,
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 0.7}
MLA = {
    **{name: value for name, value in GQA.items() if name not in ("head_dim", "num_key_value_heads")},
    **EXPERTS,
    "q_lora_rank": 10,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "rope_scaling": YARN,
}
V3 = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 4, "topk_group": 2}
CONFIGS = {
    "llama": LlamaConfig(**GQA, rope_scaling=LLAMA3, attention_bias=True, mlp_bias=True),
    "one kv head, tied": LlamaConfig(**GQA | {"num_key_value_heads": 1}, tie_word_embeddings=True),
    "olmo2": LlamaConfig(**GQA, qk_norm="full", norm_placement="after", norm_downcast_first=False),
    "smollm3": LlamaConfig(**GQA, no_rope_layers=(1, 0, 1), sliding_window=7),
    "gpt-oss": MoEConfig(
        **GQA, **EXPERTS, attention_bias=True, attention_sinks=True, sliding_window=7,
        layer_types=("sliding_attention", "full_attention", "sliding_attention"), router_bias=True, expert_bias=True,
        swiglu_limit=1.5, norm_downcast_first=False, rope_scaling=YARN | {"truncate": False},
    ),
    "mixtral": MoEConfig(**GQA, **EXPERTS | {"num_experts_per_tok": 2}),
    "glm": MoEConfig(
        **GQA, **EXPERTS | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}, n_shared_experts=1,
        first_k_dense_replace=1, routed_scaling_factor=1.7, attention_bias=True, attention_output_bias=False,
        qk_norm="head", partial_rotary_factor=0.5, num_nextn_predict_layers=1,
    ),
    "deepseek-v2-lite": DeepSeekConfig(**MLA | {"q_lora_rank": None, "norm_topk_prob": False}),
    "deepseek-v3": DeepSeekConfig(**MLA | V3, routed_scaling_factor=2.5, attention_bias=True),
    "deepseek-v3.2": DeepSeekConfig(**MLA | V3, index_n_heads=2, index_head_dim=12, index_topk=6),
}  # fmt: skip
