"""The architectures of Hugging Face that are known here, by the `model_type` of their config.json files.

Each class of transformers has its own names for some things, its own defaults for what a file leaves out, and does
some things without a word in the file. Defaults are those of transformers 5.24, which those of transformers 4 agree
with.
"""

from typing import Any

from . import hf_readers as readers
from .config import Config, LlamaConfig
from .hf_readers import ModelType
from .moe_config import DeepSeekConfig, MoEConfig


def _nothing(config: LlamaConfig) -> dict[str, Any]:
    return {}


def _window(config: LlamaConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window}


def _kinds(config: LlamaConfig) -> list[str]:
    return ["full_attention" if window is None else "sliding_attention" for window in config.windows()]


def _flagged_window(config: LlamaConfig) -> dict[str, Any]:
    return {"use_sliding_window": config.sliding_window is not None, "sliding_window": config.sliding_window}


def _upper_windows(config: LlamaConfig) -> dict[str, Any]:
    kinds = _kinds(config)
    # For versions that don't read layer_types; right where the layers with a window are the last ones.
    first = kinds.index("sliding_attention") if "sliding_attention" in kinds else len(kinds)
    return _flagged_window(config) | {"max_window_layers": first, "layer_types": kinds}


def _smollm3(config: LlamaConfig) -> dict[str, Any]:
    rotated = [int(flag) for flag in config.rotates()]
    return _flagged_window(config) | {"no_rope_layers": rotated, "layer_types": _kinds(config)}


def _mixtral(config: MoEConfig) -> dict[str, Any]:
    experts = {"num_local_experts": config.n_routed_experts, "num_experts_per_tok": config.num_experts_per_tok}
    return _window(config) | experts


def _qwen_moe(config: MoEConfig) -> dict[str, Any]:
    return _flagged_window(config) | {
        "max_window_layers": 0 if config.sliding_window else config.num_hidden_layers,
        "num_experts": config.n_routed_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.moe_intermediate_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(config.first_k_dense_replace)),
    }


def _deepseek_experts(config: Any) -> dict[str, Any]:
    same = ("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group",
            "routed_scaling_factor", "first_k_dense_replace", "num_nextn_predict_layers")  # fmt: skip
    # The classes want a number of shared experts, and with none their MLP has no features.
    return {"n_shared_experts": config.n_shared_experts or 0} | {name: getattr(config, name) for name in same}


def _glm(config: MoEConfig) -> dict[str, Any]:
    return _deepseek_experts(config) | {"use_qk_norm": config.qk_norm is not None}


def _gpt_oss(config: MoEConfig) -> dict[str, Any]:
    return _mixtral(config) | {
        # The class wants a window even where no layer uses it.
        "sliding_window": config.sliding_window or config.max_position_embeddings,
        "layer_types": _kinds(config),
        "experts_per_token": config.num_experts_per_tok,
        "swiglu_limit": config.swiglu_limit,
        "swiglu_alpha": config.swiglu_alpha,
    }


def _deepseek(config: DeepSeekConfig) -> dict[str, Any]:
    same = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "scoring_func",
            "topk_method", "norm_topk_prob")  # fmt: skip
    return _deepseek_experts(config) | {"moe_layer_freq": 1} | {name: getattr(config, name) for name in same}


def _deepseek_v32(config: DeepSeekConfig) -> dict[str, Any]:
    same = ("index_n_heads", "index_head_dim", "index_topk")
    return _deepseek(config) | {name: getattr(config, name) for name in same}


_NO_BIAS = {"attention_bias": False, "attention_output_bias": False}
_SOFTMAX = {"scoring_func": "softmax", "topk_method": "greedy"}
_SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_SAYS_SOFTMAX = {"scoring_func": ("softmax",), "topk_method": ("greedy",)}
_SAYS_SIGMOID = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
_V3 = {
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}
_V2 = _V3 | {
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
}
_LONG = {"max_position_embeddings": 131072}
_QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32}

MODEL_TYPES: dict[str, ModelType] = {
    "llama": ModelType(
        "LlamaForCausalLM",
        LlamaConfig,
        readers.grouped_query(readers.no_window),
        _nothing,
        {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
        flags={"attention_bias": False, "mlp_bias": False},
        hidden_size_divides=True,
    ),
    "mistral": ModelType(
        "MistralForCausalLM",
        LlamaConfig,
        readers.grouped_query(readers.one_window),
        _window,
        _LONG | {"num_key_value_heads": 8, "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2},
        fields=_NO_BIAS,
    ),
    "qwen2": ModelType(
        "Qwen2ForCausalLM",
        LlamaConfig,
        readers.grouped_query(readers.upper_windows),
        _upper_windows,
        _QWEN,
        fields={"attention_bias": True, "attention_output_bias": False},
        expected={"attention_bias": (True,), "qkv_bias": (True,)},
    ),
    "qwen3": ModelType(
        "Qwen3ForCausalLM",
        LlamaConfig,
        readers.grouped_query(readers.upper_windows),
        _upper_windows,
        _QWEN | {"head_dim": 128},
        flags={"attention_bias": False},
        fields={"qk_norm": "head"},
        expected={"use_qk_norm": (True,)},
    ),
    "olmo2": ModelType(
        "Olmo2ForCausalLM",
        LlamaConfig,
        readers.grouped_query(readers.no_window),
        _nothing,
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279, "pad_token_id": 1},
        flags={"attention_bias": False},
        fields={"qk_norm": "full", "norm_placement": "after", "norm_downcast_first": False},
        expected={"use_qk_norm": (True,)},
    ),
    "smollm3": ModelType(
        "SmolLM3ForCausalLM",
        LlamaConfig,
        readers.grouped_query(readers.unrotated_layers),
        _smollm3,
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "pad_token_id": 128004,
        },
        flags={"attention_bias": False, "mlp_bias": False},
        rope_theta=2000000.0,
    ),
    "mixtral": ModelType(
        "MixtralForCausalLM",
        MoEConfig,
        readers.grouped_query(readers.one_window, readers.mixtral_experts),
        _mixtral,
        _LONG | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2},
        fields=_NO_BIAS | _SOFTMAX | {"norm_topk_prob": True},
        expected=_SAYS_SOFTMAX | {"norm_topk_prob": (True,)},
        rope_theta=1000000.0,
    ),
    "qwen3_moe": ModelType(
        "Qwen3MoeForCausalLM",
        MoEConfig,
        readers.grouped_query(readers.flagged_window, readers.qwen_experts),
        _qwen_moe,
        {"max_position_embeddings": 32768, "num_key_value_heads": 4},
        flags={"attention_bias": False, "norm_topk_prob": False},
        fields=_SOFTMAX | {"qk_norm": "head"},
        expected=_SAYS_SOFTMAX | {"use_qk_norm": (True,)},
    ),
    "glm4_moe": ModelType(
        "Glm4MoeForCausalLM",
        MoEConfig,
        readers.grouped_query(readers.no_window, readers.glm_experts),
        _glm,
        _V3
        | _LONG
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "bos_token_id": None,
            "eos_token_id": None,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
        },
        flags={"attention_bias": False, "norm_topk_prob": True},
        fields=_SIGMOID | {"attention_output_bias": False},
        expected=_SAYS_SIGMOID,
        partial_rotary_factor=0.5,
    ),
    "gpt_oss": ModelType(
        "GptOssForCausalLM",
        MoEConfig,
        readers.grouped_query(readers.listed_windows, readers.gpt_oss_experts),
        _gpt_oss,
        _LONG | {"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5},
        flags={"attention_bias": True},
        fields=_SOFTMAX
        | {
            "norm_topk_prob": True,  # softmax over the chosen experts alone comes to the same
            "router_bias": True,
            "expert_bias": True,
            "attention_sinks": True,
            "norm_downcast_first": False,
        },
        expected=_SAYS_SOFTMAX | {"norm_topk_prob": (True,)},
        rope_theta=150000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    "deepseek_v2": ModelType(
        "DeepseekV2ForCausalLM",
        DeepSeekConfig,
        readers.latent(readers.dense_attention, readers.softmax_router),
        _deepseek,
        _V2,
        flags={"attention_bias": False},
        fields={"scoring_func": "softmax"},
        # DeepSeek's own code normalises then, transformers doesn't.
        expected={"scoring_func": ("softmax",), "norm_topk_prob": (False, None), "rope_interleave": (True,)},
        hidden_size_divides=True,
    ),
    "deepseek_v3": ModelType(
        "DeepseekV3ForCausalLM",
        DeepSeekConfig,
        readers.latent(readers.dense_attention),
        _deepseek,
        _V3,
        flags={"attention_bias": False, "norm_topk_prob": True, "rope_interleave": True},
        fields=_SIGMOID,
        expected=_SAYS_SIGMOID,
    ),
    "deepseek_v32": ModelType(
        "DeepseekV32ForCausalLM",
        DeepSeekConfig,
        readers.latent(readers.sparse_attention),
        _deepseek_v32,
        # The class knows nothing of multi-token prediction; the released file does.
        _V3 | {"max_position_embeddings": 163840, "num_nextn_predict_layers": 0},
        flags={"attention_bias": False, "norm_topk_prob": True},
        fields=_SIGMOID,
        expected=_SAYS_SIGMOID | {"rope_interleave": (True,), "indexer_rope_interleave": (False,)},
    ),
}
# Names in files of models that are of another type's class.
ALIASES = {"kimi_k2": "deepseek_v3"}


def model_type_of(config: Config) -> str:
    """The `model_type` of a config: its own, or the plainest of its kind. Raises ValueError for one not known."""
    if not isinstance(config, Config):
        raise ValueError(f"a config is wanted, such as model.config, not a {type(config).__name__}")
    kind = config.model_type
    if kind is None:
        if isinstance(config, DeepSeekConfig):
            sparse = "deepseek_v3" if config.index_topk is None else "deepseek_v32"
            return "deepseek_v2" if config.scoring_func == "softmax" else sparse
        return "mixtral" if isinstance(config, MoEConfig) else "llama"
    kind = ALIASES.get(kind, kind)
    if kind not in MODEL_TYPES:
        raise ValueError(f"model_type {kind!r} is not known; there are {', '.join([*MODEL_TYPES, *ALIASES])}")
    if type(config) is not MODEL_TYPES[kind].config:
        raise ValueError(f"model_type {kind!r} goes with a {MODEL_TYPES[kind].config.__name__}, not a "
                         f"{type(config).__name__}")  # fmt: skip
    return kind
