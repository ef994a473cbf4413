"""Public decoders with one MLP in each layer: Llama and its relatives.

Each is a `LlamaConfig` that its family's first one is changed into. Names are those of repositories on the Hub, in
lower case: base models, unless the plain name there is the chat model's (Llama 3.3, Qwen3, SmolLM3).
"""

import dataclasses

from .config import LlamaConfig

_LLAMA_2 = LlamaConfig(
    32000,
    4096,
    11008,
    32,
    32,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
    model_type="llama",
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
    model_type="llama",
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
    model_type="llama",
)
_SMOLLM3 = LlamaConfig(
    128256,
    2048,
    11008,
    36,
    16,
    4,
    max_position_embeddings=65536,
    rope_theta=5000000.0,
    no_rope_layers=(1, 1, 1, 0) * 9,
    tie_word_embeddings=True,
    bos_token_id=128000,
    eos_token_id=128012,
    pad_token_id=128004,
    model_type="smollm3",
)
_MISTRAL = LlamaConfig(
    32000,
    4096,
    14336,
    32,
    32,
    8,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
    rope_theta=1000000.0,
    bos_token_id=1,
    eos_token_id=2,
    model_type="mistral",
)
_QWEN2 = LlamaConfig(
    151936,
    896,
    4864,
    24,
    14,
    2,
    max_position_embeddings=32768,
    rope_theta=1000000.0,
    attention_bias=True,
    attention_output_bias=False,
    tie_word_embeddings=True,
    bos_token_id=151643,
    eos_token_id=151643,
    model_type="qwen2",
)
_QWEN3 = LlamaConfig(
    151936,
    1024,
    3072,
    28,
    16,
    8,
    head_dim=128,
    max_position_embeddings=40960,
    rope_theta=1000000.0,
    qk_norm="head",
    tie_word_embeddings=True,
    bos_token_id=151643,
    eos_token_id=151645,
    model_type="qwen3",
)
_OLMO2 = LlamaConfig(
    100352,
    4096,
    11008,
    32,
    32,
    max_position_embeddings=4096,
    rope_theta=500000.0,
    qk_norm="full",
    norm_placement="after",
    norm_downcast_first=False,
    eos_token_id=100257,
    pad_token_id=100277,
    model_type="olmo2",
)
# Qwen2.5 from 7B on.
_LARGE = {"vocab_size": 152064, "max_position_embeddings": 131072, "tie_word_embeddings": False}


def _sized(base: LlamaConfig, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **changes) -> LlamaConfig:
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


_LLAMA_31 = dataclasses.replace(_LLAMA_3, **_llama3_scaling(8.0))
_LLAMA_32 = dataclasses.replace(_LLAMA_3, tie_word_embeddings=True, **_llama3_scaling(32.0))

DENSE: dict[str, LlamaConfig] = {
    "llama-2-7b": _LLAMA_2,
    "llama-2-13b": _sized(_LLAMA_2, 5120, 13824, 40, 40, 40),
    "llama-2-70b": _sized(_LLAMA_2, 8192, 28672, 80, 64, 8),
    "llama-3-8b": _LLAMA_3,
    "llama-3-70b": _sized(_LLAMA_3, 8192, 28672, 80, 64, 8),
    "llama-3.1-8b": _LLAMA_31,
    "llama-3.1-70b": _sized(_LLAMA_31, 8192, 28672, 80, 64, 8),
    "llama-3.1-405b": _sized(_LLAMA_31, 16384, 53248, 126, 128, 8),
    "llama-3.2-1b": _sized(_LLAMA_32, 2048, 8192, 16, 32, 8),
    "llama-3.2-3b": _sized(_LLAMA_32, 3072, 8192, 28, 24, 8),
    "llama-3.3-70b": _sized(_LLAMA_31, 8192, 28672, 80, 64, 8, eos_token_id=(128001, 128008, 128009)),
    "tinyllama-1.1b": _sized(_LLAMA_2, 2048, 5632, 22, 32, 4, max_position_embeddings=2048),
    "smollm2-135m": dataclasses.replace(_SMOLLM2, initializer_range=0.041666666666666664),
    "smollm2-360m": _sized(_SMOLLM2, 960, 2560, 32, 15, 5),
    "smollm2-1.7b": _sized(_SMOLLM2, 2048, 8192, 24, 32, 32, rope_theta=130000.0),
    "smollm3-3b": _SMOLLM3,
    "mistral-7b-v0.1": dataclasses.replace(_MISTRAL, rope_theta=10000.0, sliding_window=4096),
    "mistral-7b-v0.2": _MISTRAL,
    "mistral-7b-v0.3": dataclasses.replace(_MISTRAL, vocab_size=32768),
    "qwen2.5-0.5b": _QWEN2,
    "qwen2.5-1.5b": _sized(_QWEN2, 1536, 8960, 28, 12, 2, max_position_embeddings=131072),
    "qwen2.5-3b": _sized(_QWEN2, 2048, 11008, 36, 16, 2),
    "qwen2.5-7b": _sized(_QWEN2, 3584, 18944, 28, 28, 4, **_LARGE),
    "qwen2.5-14b": _sized(_QWEN2, 5120, 13824, 48, 40, 8, **_LARGE, rms_norm_eps=1e-5),
    "qwen2.5-32b": _sized(_QWEN2, 5120, 27648, 64, 40, 8, **_LARGE, rms_norm_eps=1e-5),
    "qwen2.5-72b": _sized(_QWEN2, 8192, 29568, 80, 64, 8, **_LARGE, rms_norm_eps=1e-5),
    "qwen3-0.6b": _QWEN3,
    "qwen3-1.7b": _sized(_QWEN3, 2048, 6144, 28, 16, 8, head_dim=128),
    "qwen3-4b": _sized(_QWEN3, 2560, 9728, 36, 32, 8, head_dim=128),
    "qwen3-8b": _sized(_QWEN3, 4096, 12288, 36, 32, 8, head_dim=128, tie_word_embeddings=False),
    "qwen3-14b": _sized(_QWEN3, 5120, 17408, 40, 40, 8, head_dim=128, tie_word_embeddings=False),
    "qwen3-32b": _sized(_QWEN3, 5120, 25600, 64, 64, 8, head_dim=128, tie_word_embeddings=False),
    "olmo-2-1b": _sized(_OLMO2, 2048, 8192, 16, 16, 16),
    "olmo-2-7b": _OLMO2,
    "olmo-2-13b": _sized(_OLMO2, 5120, 13824, 40, 40, 40),
    "olmo-2-32b": _sized(_OLMO2, 5120, 27648, 64, 40, 8),
    # The ids of `data.ByteTokenizer`: bytes, and 256 for the end of a document. The rest rounds the size up.
    "overspill-llama-tiny": LlamaConfig(
        vocab_size=260,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=256,
    ),
}
