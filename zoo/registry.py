"""The models that can be built by name.

Sizes are those of the models' public config.json files; weights are not in here. Names that start with
`overspill` are small enough to train on two CPU cores, on bytes.
"""

import dataclasses
import difflib

from .config import Config, LlamaConfig
from .moe_config import DeepSeekConfig

_LLAMA_2 = LlamaConfig(
    32000, 4096, 11008, 32, 32, max_position_embeddings=4096, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2
)
_LLAMA_3 = LlamaConfig(
    128256,
    4096,
    14336,
    32,
    32,
    8,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    bos_token_id=128000,
    eos_token_id=128001,
)
_SMOLLM2 = LlamaConfig(
    49152,
    576,
    1536,
    30,
    9,
    3,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=0,
)


def _llama(base: LlamaConfig, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **changes) -> LlamaConfig:
    # head_dim=None: it follows from the new sizes unless it is given.
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": None,
    }
    return dataclasses.replace(base, **(sizes | changes))


def _llama3_scaling(factor: float) -> dict:
    return {
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


def _yarn(factor: float, beta_fast: float, mscale: float) -> dict:
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": beta_fast,
        "beta_slow": 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


# V2 and V2-Chat. Coder-V2 and V2.5 are published with mscale 1.0.
_DEEPSEEK_V2 = DeepSeekConfig(
    102400,
    5120,
    12288,
    60,
    128,
    moe_intermediate_size=1536,
    max_position_embeddings=163840,
    rope_scaling=_yarn(40.0, 32.0, 0.707),
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=160,
    num_experts_per_tok=6,
    n_shared_experts=2,
    n_group=8,
    topk_group=3,
    scoring_func="softmax",
    topk_method="group_limited_greedy",
    routed_scaling_factor=16.0,
    first_k_dense_replace=1,
    bos_token_id=100000,
    eos_token_id=100001,
)
_DEEPSEEK_V3 = DeepSeekConfig(
    129280,
    7168,
    18432,
    61,
    128,
    moe_intermediate_size=2048,
    max_position_embeddings=163840,
    rope_scaling=_yarn(40.0, 32.0, 1.0),
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=256,
    num_experts_per_tok=8,
    n_shared_experts=1,
    n_group=8,
    topk_group=4,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    first_k_dense_replace=3,
    num_nextn_predict_layers=1,
    bos_token_id=0,
    eos_token_id=1,
)
# The ids of `data.ByteTokenizer`: bytes, and 256 for the end of a document. The rest rounds the size up.
_BYTES = {"vocab_size": 260, "eos_token_id": 256}

REGISTRY: dict[str, Config] = {
    "llama-2-7b": _LLAMA_2,
    "llama-2-13b": _llama(_LLAMA_2, 5120, 13824, 40, 40, 40),
    "llama-2-70b": _llama(_LLAMA_2, 8192, 28672, 80, 64, 8),
    "llama-3-8b": _LLAMA_3,
    "llama-3-70b": _llama(_LLAMA_3, 8192, 28672, 80, 64, 8),
    "llama-3.1-8b": _llama(_LLAMA_3, 4096, 14336, 32, 32, 8, **_llama3_scaling(8.0)),
    "llama-3.1-70b": _llama(_LLAMA_3, 8192, 28672, 80, 64, 8, **_llama3_scaling(8.0)),
    "llama-3.1-405b": _llama(_LLAMA_3, 16384, 53248, 126, 128, 8, **_llama3_scaling(8.0)),
    "llama-3.2-1b": _llama(_LLAMA_3, 2048, 8192, 16, 32, 8, tie_word_embeddings=True, **_llama3_scaling(32.0)),
    "llama-3.2-3b": _llama(_LLAMA_3, 3072, 8192, 28, 24, 8, tie_word_embeddings=True, **_llama3_scaling(32.0)),
    "llama-3.3-70b": _llama(_LLAMA_3, 8192, 28672, 80, 64, 8, **_llama3_scaling(8.0)),
    "tinyllama-1.1b": _llama(_LLAMA_2, 2048, 5632, 22, 32, 4, max_position_embeddings=2048),
    "smollm2-135m": dataclasses.replace(_SMOLLM2, initializer_range=0.041666666666666664),
    "smollm2-360m": _llama(_SMOLLM2, 960, 2560, 32, 15, 5),
    "smollm2-1.7b": _llama(_SMOLLM2, 2048, 8192, 24, 32, 32, rope_theta=130000.0),
    "deepseek-v2-lite": dataclasses.replace(
        _DEEPSEEK_V2,
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        n_routed_experts=64,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        routed_scaling_factor=1.0,
    ),
    "deepseek-v2": _DEEPSEEK_V2,
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
    "moonlight-16b-a3b": dataclasses.replace(
        _DEEPSEEK_V3,
        vocab_size=163840,
        hidden_size=2048,
        intermediate_size=11264,
        moe_intermediate_size=1408,
        num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=50000.0,
        rope_scaling=None,
        q_lora_rank=None,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.446,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
        bos_token_id=163584,
        eos_token_id=163585,
    ),
    "kimi-k2": dataclasses.replace(
        _DEEPSEEK_V3,
        vocab_size=163840,
        num_attention_heads=64,
        num_key_value_heads=64,
        max_position_embeddings=131072,
        rope_theta=50000.0,
        rope_scaling=_yarn(32.0, 1.0, 1.0),
        n_routed_experts=384,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
        bos_token_id=163584,
        eos_token_id=163585,
    ),
    "overspill-llama-tiny": LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **_BYTES,
    ),
    "overspill-deepseek-tiny": DeepSeekConfig(
        hidden_size=128,
        intermediate_size=352,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=2048,
        q_lora_rank=64,
        kv_lora_rank=48,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
        **_BYTES,
    ),
}


def find_config(name_or_config: str | Config) -> Config:
    """The config of a registered model, or the config itself. Raises ValueError, with near names, on another."""
    if isinstance(name_or_config, Config):
        return name_or_config
    if name_or_config in REGISTRY:
        return REGISTRY[name_or_config]
    near = difflib.get_close_matches(str(name_or_config).lower(), REGISTRY, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(REGISTRY)}"
    raise ValueError(f"no model is called {name_or_config!r}; {hint}")
