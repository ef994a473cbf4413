"""Small config.json files, one of each `model_type`: no more in them than must be."""

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 20}
MLA = SIZES | EXPERTS | {"n_routed_experts": 16, "num_key_value_heads": 4, "first_k_dense_replace": 1}
TINY = {
    "llama": SIZES,
    "mistral": SIZES,
    "qwen2": SIZES,
    "qwen3": SIZES,
    "olmo2": SIZES,
    "smollm3": SIZES,
    "mixtral": SIZES | {"num_local_experts": 8, "num_experts_per_tok": 3},
    "qwen3_moe": SIZES | EXPERTS | {"num_experts": 8},
    "glm4_moe": SIZES | EXPERTS | {"n_routed_experts": 8},
    "gpt_oss": SIZES | {"num_local_experts": 8, "num_experts_per_tok": 3},
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "deepseek_v32": MLA,
}


def tiny(model_type, without=(), **changes):
    """A small config.json of a type; the keys it must have and `changes`."""
    values = {"model_type": model_type} | TINY[model_type] | changes
    return {key: value for key, value in values.items() if key not in without}
