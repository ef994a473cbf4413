"""The small models of the self-test: six layers of each family, every parameter random, and a batch for them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..layers.loss import IGNORED
from ..policies.activation import path_string
from .building import abstract
from .config import Config, LlamaConfig
from .data import Batch
from .moe_config import DeepSeekConfig

# Six layers, scanned: of Llama in one loop, of DeepSeek two dense ones and four with experts.
FAMILIES: dict[str, Config] = {
    "llama": LlamaConfig(
        vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=500.0, attention_bias=True, max_position_embeddings=256,
    ),
    "deepseek": DeepSeekConfig(
        vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        rms_norm_eps=1e-5, rope_theta=500.0, max_position_embeddings=256, q_lora_rank=24, kv_lora_rank=16,
        qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16, moe_intermediate_size=32, n_routed_experts=8,
        num_experts_per_tok=2, n_shared_experts=1, n_group=4, topk_group=2, scoring_func="sigmoid",
        topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=1.5, first_k_dense_replace=2,
        num_nextn_predict_layers=1,
    ),
}  # fmt: skip
# Layers that begin a new segment in the second form of each model. The last layer stands alone, to be placed apart.
CUTS = {"llama": (2, 5), "deepseek": (5,)}
# With these no token is nearer than 1e-4 to another choice of experts: rounding, 1e-6, doesn't change any.
MODEL_SEED, BATCH_SEED = 9, 2
LENGTH = 96  # tokens of a row: more than the 64 from which some programs go in parts
ROWS = 2
# Weights of the loss: none so small that its part of a gradient would hide in rounding.
MTP_WEIGHT = 0.3
BALANCE_WEIGHT = 0.05


def random_model(config: Config, seed: int) -> Any:
    """A model of `config` with every array random, different in each layer: equal layers hide a wrong order."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple, leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        name = path_string(path)
        draws = rng.standard_normal(leaf.shape)
        if name.endswith("scale"):
            draws = 1 + 0.25 * draws
        elif "bias" in name:
            draws *= 0.1
        elif "router" in name:
            # Scores far apart, so that rounding doesn't send a token to another expert.
            draws *= 2 / math.sqrt(leaf.shape[-1])
        elif name.startswith("embedding"):
            draws *= 0.7
        else:
            draws /= math.sqrt(leaf.shape[-1])
        return jnp.asarray(draws, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract(config))


def random_batch(config: Config, seed: int, rows: int = ROWS, length: int = LENGTH) -> Batch:
    """NumPy arrays: two documents in each row, and padding behind the second in every other row."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (rows, length)).astype(np.int32)
    cut = rng.integers(length // 4, length // 2, (rows, 1))
    end = np.where(np.arange(rows)[:, None] % 2, length, length - length // 8)
    where = np.arange(length)[None]
    segments = ((where >= cut) + 1).astype(np.int32)
    mask = where < end
    positions = np.where(segments == 2, where - cut, where).astype(np.int32)
    last = (where == cut - 1) | (where >= end - 1)
    targets = np.where(last, IGNORED, np.roll(tokens, -1, axis=1)).astype(np.int32)
    return Batch(np.where(mask, tokens, 0), targets, np.where(mask, segments, 0), positions, mask)


def by_layer(arrays: dict[str, Any], stacks: dict[str, Any]) -> dict[tuple[str, int | None], np.ndarray]:
    """A model's arrays by name and layer, however it is cut into segments; what is in no stack has the layer None.

    `arrays` are by path, `stacks` as a model's `stacks()` gives them.
    """
    out: dict[tuple[str, int | None], np.ndarray] = {}
    for path, array in arrays.items():
        array = np.asarray(array, np.float64)
        head, *rest = path.split(".")
        if head not in stacks:
            out[path, None] = array
            continue
        stack, segment = stacks[head], int(rest[1])
        first = stack.start + sum(stack.lengths[:segment])
        for i, layer in enumerate(array):
            out[".".join([head, *rest[2:]]), first + i] = layer
    return out
