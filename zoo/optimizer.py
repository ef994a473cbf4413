"""What is trained, and with which optimizer."""

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from ..layers.linear import is_buffer
from ..policies.activation import path_string

T = TypeVar("T")

# How the path of arrays ends that weight decay leaves alone: norm scales, biases of any layer, attention's sinks.
_NOT_DECAYED = ("scale", "bias", "sinks")


def _is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def trainable(model: T) -> tuple[T, T]:
    """`(parameters, rest)`: `model` twice, with None for what is in the other one; `eqx.combine` joins them.

    Every array is a parameter, unless it sits in an `Untrained` module: a `Buffer` (a router's selection bias), an
    `Indexer`. Abstract models work too.
    Raises ValueError for what holds no parameter, and, naming it, for an array that can't be trained: one of integers
    outside a Buffer.
    """
    wanted = jax.tree.map(
        lambda node: jax.tree.map(lambda leaf: not is_buffer(node) and _is_array(leaf), node),
        model,
        is_leaf=is_buffer,
    )
    parameters, rest = eqx.partition(model, wanted)
    if not jax.tree.leaves(parameters):
        raise ValueError(f"{type(model).__name__} holds no array that could be trained: build or load a model first")
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameters):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"{path_string(path)!r} is an array of {leaf.dtype}, which can't be trained: hold it in a Buffer"
            )
    return parameters, rest


def arrays_by_path(tree: PyTree) -> dict[str, Any]:
    """The arrays of `tree`, concrete or abstract, by their dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_string(path): leaf for path, leaf in leaves if _is_array(leaf)}


def decayed(parameters: PyTree) -> PyTree:
    """Which parameters weight decay applies to, as booleans in the shape of `parameters`: optax's `mask`.

    Decided by name, since in a scanned stack a norm's scale has as many axes as an unstacked weight: everything
    but the scales of norms, the biases and the sinks. Embeddings and routers' weights are decayed like other
    matrices, as in GPT-3 and DeepSeek-V3. A router's selection bias is a Buffer and never gets here.
    """

    def decide(path: tuple, leaf: Any) -> bool:
        parts = path_string(path).split(".")
        return not parts[-1].endswith(_NOT_DECAYED) and not any(part.endswith("norm") for part in parts)

    return jax.tree_util.tree_map_with_path(decide, parameters)


def warmup_cosine(
    peak: float | int, *, steps: int, warmup: int | None = None, final_fraction: float | int = 0.1
) -> optax.Schedule:
    """A learning rate that rises linearly to `peak`, then falls along a cosine to `final_fraction * peak`.

    `warmup` steps (a tenth of `steps`, at most 1000, unless given) rise: the first step already learns. After
    `steps` the rate stays. Raises ValueError for numbers out of range.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps!r}")
    if warmup is None:
        warmup = min(steps // 10, 1000)
    if not 0 <= warmup <= steps:
        raise ValueError(f"warmup must be between 0 and the {steps} steps of the run, got {warmup!r}")
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction must be between 0 and 1, got {final_fraction!r}")

    def schedule(count: Any) -> Any:
        rising = peak * (count + 1) / (warmup + 1)
        progress = jnp.clip((count - warmup) / max(steps - warmup, 1), 0, 1)
        falling = peak * (final_fraction + (1 - final_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * progress)))
        return jnp.where(count < warmup, rising, falling)

    return schedule


def adamw(
    learning_rate: float | int | optax.Schedule,
    *,
    b1: float | int = 0.9,
    b2: float | int = 0.95,
    eps: float | int = 1e-8,
    weight_decay: float | int = 0.1,
) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, 2019) with weight decay where `decayed` says so.

    `learning_rate` is a number or a schedule such as `warmup_cosine`. Gradients are clipped by the training
    step, not here. The moments take the dtype of what they are initialised with: the training step hands every
    optimizer float32.
    """
    return optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decayed)
