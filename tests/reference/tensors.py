"""Weights, tokens and directions from NumPy's integers alone: the same digits on every machine, with torch or without.

A tensor is a function of its Hugging Face name, its shape and the family's seed, so golden files hold no weights.
"""

import hashlib
import json
import math
import pathlib

import numpy as np
from families import FAMILIES, ROUTER_BIAS, SEEDS
from safetensors.numpy import save_file

BATCH, LENGTH, NEW_TOKENS = 2, 72, 12
# (row, position) of the logits that golden files hold.
KEPT = tuple(zip([0, 1] * 6 + [0], [0, 1, 11, 17, 22, 31, 40, 47, 55, 63, 70, 71, 71], strict=True))


def _bits(key: str, count: int) -> np.ndarray:
    digest = hashlib.sha256(key.encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(count)


def normal(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Nearly normal float32 numbers: sums of four 16-bit integers, which no library's logarithm can change."""
    parts = _bits(key, math.prod(shape)).view(np.uint16).reshape(*shape, 4)
    centred = parts.sum(axis=-1, dtype=np.int64) - 2 * 65535
    return (centred / (65536 * math.sqrt(1 / 3))).astype(np.float32)


def weight(name: str, shape: tuple[int, ...], family: str) -> np.ndarray:
    """The float32 tensor `name` of a family, far from any initial value."""
    parts = name.split(".")
    number = FAMILIES[family]["num_hidden_layers"]
    # Files of multi-token-prediction layers repeat what they share with the main model.
    shared = {f"model.layers.{number}.embed_tokens.weight": "model.embed_tokens.weight"}
    shared[f"model.layers.{number}.shared_head.head.weight"] = "lm_head.weight"
    name = shared.get(name, name)
    draw = normal(f"{SEEDS.get(family, 0)} {name}", shape)
    if parts[-2] in ("q_a_proj", "kv_a_proj_with_mqa"):
        # Latents so small that the epsilon of their norms shows; what comes after one in its matrix, the rotated key,
        # isn't part of it.
        rank = FAMILIES[family]["q_lora_rank" if parts[-2] == "q_a_proj" else "kv_lora_rank"]
        draw[:rank] *= np.float32(0.03)
    if name.endswith("e_score_correction_bias"):
        return ROUTER_BIAS.get(family, 0.0) + 0.15 * draw
    if name.endswith("bias"):
        return 0.3 * draw
    if name.endswith("sinks"):
        return 1 + draw
    if "norm" in parts[-2]:
        return 1 + 0.3 * draw
    # gpt-oss stores its experts the other way round.
    fan_in = shape[-2] if len(shape) == 3 else shape[-1]
    # Attention that prefers some keys shows where they are.
    gain = 2.0 if parts[-2] in ("q_proj", "q_b_proj", "wq_b", "embed_tokens") else 1.0
    return draw * np.float32(gain / math.sqrt(fan_in))


def tokens(family: str) -> np.ndarray:
    """int32 `[BATCH, LENGTH]`, never the padding token: torch gives its embedding no gradient."""
    config = FAMILIES[family]
    ids = np.array([i for i in range(config["vocab_size"]) if i != config.get("pad_token_id")], np.int32)
    return ids[_bits(f"{SEEDS.get(family, 0)} tokens", BATCH * LENGTH) % len(ids)].reshape(BATCH, LENGTH)


def write_folder(folder: pathlib.Path, family: str, shapes: dict[str, tuple[int, ...]], config: dict | None = None):
    """config.json and model.safetensors with the tensors in `shapes`, as on the Hub."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(FAMILIES[family] if config is None else config, indent=2))
    arrays = {name: weight(name, tuple(shape), family) for name, shape in shapes.items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})


def project(name: str, array: np.ndarray, count: int) -> np.ndarray:
    """`count` products of `array` with directions of independent entries, mean 0 and variance 1.

    The mean square of the projections of a difference estimates its squared norm.
    """
    flat = np.asarray(array, np.float64).ravel()
    return np.array([normal(f"{name} direction {i}", flat.shape).astype(np.float64) @ flat for i in range(count)])
