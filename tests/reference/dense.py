"""Tiny members of every family, as config.json files on the Hub write them: some as transformers 4, some as 5.

Sizes differ from each other wherever they may, so that an exchanged pair can't hide; sequences of the tests are
longer than every sliding window and than the original context of most rotary scalings.
"""

# What goes into config.json beside the model's mathematics.
_V4 = {"torch_dtype": "float32", "transformers_version": "4.46.3", "use_cache": True}
_V5 = {"dtype": "float32", "transformers_version": "5.4.0", "use_cache": True}


def base(model_type, architecture, **fields):
    return {"architectures": [architecture], "model_type": model_type} | _V4 | fields


def like(base, *, without=(), v5=False, **changes):
    """A copy of `base` with `changes`, in the spelling of transformers 4 or 5."""
    kept = {key: value for key, value in base.items() if key not in without and key not in (_V4 if v5 else ())}
    return kept | (_V5 if v5 else {}) | changes


_LLAMA = base(
    "llama",
    "LlamaForCausalLM",
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    hidden_act="silu",
    max_position_embeddings=256,
    rms_norm_eps=1e-3,
    initializer_range=0.02,
    attention_dropout=0.0,
    pretraining_tp=1,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
_MISTRAL = like(
    _LLAMA, without=["pretraining_tp"], model_type="mistral", architectures=["MistralForCausalLM"], num_hidden_layers=4
)
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.05, 1.1, 1.3, 1.6, 2.0],
    "long_factor": [1.1, 1.4, 2.0, 2.9, 3.7, 4.4],
}
QWEN = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 2e-3,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 3,
}
_QWEN2 = base("qwen2", "Qwen2ForCausalLM", **QWEN)
_QWEN3 = base("qwen3", "Qwen3ForCausalLM", **QWEN, head_dim=20)
_OLMO2 = base("olmo2", "Olmo2ForCausalLM", **like(QWEN, num_hidden_layers=3, pad_token_id=1), tie_word_embeddings=False)
_SMOLLM3 = base("smollm3", "SmolLM3ForCausalLM", **QWEN, pad_token_id=4)

FAMILIES = {
    # Old files say neither how many kv heads there are, nor rope_theta, nor that nothing is tied.
    "llama": like(_LLAMA, without=["num_key_value_heads", "tie_word_embeddings", "attention_dropout"]),
    "llama_llama3": like(
        _LLAMA,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        head_dim=16,
        eos_token_id=[2, 7, 9],
        tie_word_embeddings=True,
    ),
    "llama_linear": like(_LLAMA, v5=True, rope_theta=20000.0, rope_scaling={"type": "linear", "factor": 2.5}),
    "llama_dynamic": like(_LLAMA, max_position_embeddings=48, rope_scaling={"type": "dynamic", "factor": 2.0}),
    "llama_yarn": like(
        _LLAMA,
        v5=True,
        head_dim=16,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ),
    "llama_yarn_explicit": like(
        _LLAMA,
        head_dim=20,
        max_position_embeddings=2048,
        rope_theta=5000.0,
        rope_scaling={
            "rope_type": "yarn",
            "type": "yarn",
            "factor": 4.0,
            "beta_fast": 16,
            "beta_slow": 2,
            "attention_factor": 1.3,
            "truncate": False,
            "original_max_position_embeddings": 512,
        },
    ),
    "llama_longrope_short": like(
        _LLAMA,
        v5=True,
        rope_parameters=like(_LONGROPE, rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128),
    ),
    "llama_longrope_long": like(
        _LLAMA, rope_theta=10000.0, rope_scaling=like(_LONGROPE, original_max_position_embeddings=32)
    ),
    # Both spellings of the base at once, in agreement.
    "llama_attention_bias": like(
        _LLAMA,
        v5=True,
        attention_bias=True,
        mlp_bias=False,
        head_dim=12,
        rope_theta=5000.0,
        rope_parameters={"rope_theta": 5000.0, "rope_type": "default"},
    ),
    "llama_mlp_bias": like(_LLAMA, mlp_bias=True, attention_bias=False, num_key_value_heads=1),
    "llama_head_dim": like(_LLAMA, head_dim=20, tie_word_embeddings=True, rope_scaling=None),
    "mistral": like(_MISTRAL, head_dim=16, sliding_window=None, rope_theta=1000000.0),
    "mistral_window": like(
        _MISTRAL,
        v5=True,
        head_dim=None,
        sliding_window=17,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    ),
    # The window is in the file and not used.
    "qwen2": like(
        _QWEN2,
        use_sliding_window=False,
        sliding_window=16,
        max_window_layers=2,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
    ),
    "qwen2_window": like(
        _QWEN2,
        v5=True,
        use_sliding_window=True,
        sliding_window=19,
        max_window_layers=2,
        rope_parameters={"rope_theta": 50000.0, "rope_type": "default"},
        tie_word_embeddings=False,
    ),
    "qwen3": like(
        _QWEN3,
        rope_theta=1000000,
        rope_scaling=None,
        use_sliding_window=False,
        sliding_window=None,
        max_window_layers=4,
        attention_bias=False,
        tie_word_embeddings=True,
    ),
    "qwen3_window": like(
        _QWEN3,
        v5=True,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=21,
        layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"rope_theta": 50000.0, "rope_type": "default"},
        tie_word_embeddings=False,
    ),
    "olmo2": like(_OLMO2, num_key_value_heads=4, rope_theta=500000, rope_scaling=None),
    "olmo2_grouped": like(
        _OLMO2,
        v5=True,
        num_key_value_heads=2,
        attention_bias=True,
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
        tie_word_embeddings=False,
    ),
    # Tied and without rotation in every fourth layer, both by the class's default.
    "smollm3": like(_SMOLLM3, rope_theta=5000000.0, rope_scaling=None),
    "smollm3_window": like(
        _SMOLLM3,
        v5=True,
        no_rope_layers=[1, 0, 1, 0],
        use_sliding_window=True,
        sliding_window=18,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    ),
}
