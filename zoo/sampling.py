"""Choosing the next token from logits: the most probable one, or a draw from the best of them."""

import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

# Beyond it the reciprocal is no ordinary float32; all tokens are as probable as each other long before.
_HOTTEST = 1e30


class Sampler(NamedTuple):
    """How tokens are drawn. All of it are arrays, so that other numbers don't ask for another program."""

    temperature: Float[Array, ""] | np.float32  # 0: the most probable token
    top_k: Int[Array, ""] | np.int32  # the size of the vocabulary: no limit
    tail: Float[Array, ""] | np.float32  # 1 - top_p, the probability that is cut off; -1: none
    min_p: Float[Array, ""] | np.float32  # 0: no limit

    @classmethod
    def of(
        cls,
        vocab_size: int,
        *,
        temperature: float | int = 0.0,
        top_k: int | None = None,
        top_p: float | int | None = None,
        min_p: float | int | None = None,
    ) -> "Sampler":
        """From the arguments of `generate`. Raises ValueError, naming the argument, for one out of range."""
        heat = _number("temperature", temperature)
        if not 0 <= heat < math.inf:
            raise ValueError(f"temperature must be 0 or more, and finite, got {temperature}")
        if top_k is not None and not 1 <= whole("top_k", top_k) <= vocab_size:
            raise ValueError(f"top_k must be in 1..{vocab_size}, got {top_k}")
        share = 1.0 if top_p is None else _number("top_p", top_p)
        if not 0 < share <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
        least = 0.0 if min_p is None else _number("min_p", min_p)
        if not 0 <= least <= 1:
            raise ValueError(f"min_p must be between 0 and 1, got {min_p}")
        tail = -1.0 if share == 1 else 1 - share
        heat = min(heat, _HOTTEST)
        return cls(
            np.float32(heat), np.int32(vocab_size if top_k is None else top_k), np.float32(tail), np.float32(least)
        )


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, bool | np.bool_ | str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None


def whole(name: str, value: Any) -> int:
    """`value` as an int. Raises ValueError, naming it `name`, unless it is a whole number that fits into int32."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool | np.bool_) or not -(2**31) <= number < 2**31:
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return number


@jax.named_scope("choose")
def choose(logits: Float[Array, "batch vocab"], sampler: Sampler, keys: Key[Array, " batch"]) -> Int[Array, " batch"]:
    """One token for each row, drawn with the row's own key, or the most probable one at temperature 0.

    `logits` are float32, minus infinity for tokens that can't be had. Ties at temperature 0 go to the lowest id.
    Nothing is paid for what `sampler` doesn't ask for.
    """

    def draw(logits: Array) -> Array:
        # Relative to the best, so that next to no temperature gives 0 for it and not infinity.
        heat = jnp.maximum(sampler.temperature, jnp.finfo(jnp.float32).tiny)
        scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / heat
        limited = (sampler.top_k < logits.shape[-1]) | (sampler.tail > 0) | (sampler.min_p > 0)
        scaled = lax.cond(limited, lambda x: jnp.where(kept(x, sampler), x, -jnp.inf), lambda x: x, scaled)
        return jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)

    def best(logits: Array) -> Array:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return lax.cond(sampler.temperature > 0, draw, best, logits)


@jax.named_scope("kept")
def kept(logits: Float[Array, "batch vocab"], sampler: Sampler) -> Bool[Array, "batch vocab"]:
    """Which tokens may be drawn: transformers' top-k, top-p and min-p, one after the other.

    - The `top_k` largest logits, and all that equal the last of them.
    - Of these the smallest set whose probability reaches `1 - tail`, at least one; of equal ones those of lower
      ids (in transformers it is chance).
    - Of these the ones of at least `min_p` times the probability of the best.

    Logits are compared by bisection, bit by bit: a CPU sorts a vocabulary a hundred times slower.
    """
    order = _order(logits)
    few = order >= _largest(lambda t: jnp.sum(order >= t, axis=-1, keepdims=True) >= sampler.top_k, order)

    weights = jnp.where(few, jax.nn.softmax(jnp.where(few, logits, -jnp.inf), axis=-1), 0)

    def below(t: Array) -> Array:
        return jnp.sum(jnp.where(order < t, weights, 0), axis=-1, keepdims=True)

    # Where the set begins. Of the tokens that equal its first one, as many go as still fit into the tail.
    first = jnp.minimum(_largest(lambda t: below(t) <= sampler.tail, order), jnp.max(order, axis=-1, keepdims=True))
    equal = order == first
    spare = (sampler.tail - below(first)) / jnp.max(jnp.where(equal, weights, 0), axis=-1, keepdims=True)
    stay = jnp.maximum(jnp.sum(equal, axis=-1, keepdims=True) - jnp.floor(spare), 1)
    enough = (order > first) | (equal & (jnp.cumsum(equal, axis=-1) <= stay)) | (sampler.tail <= 0)

    probable = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)) >= sampler.min_p
    return few & enough & probable


def _order(x: Float[Array, "batch vocab"]) -> UInt32[Array, "batch vocab"]:
    """Whole numbers in the order of `x`."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # zero has two signs
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds: Any, order: UInt32[Array, "batch vocab"]) -> UInt32[Array, "batch 1"]:
    """For each row the largest number of which `holds` is true; it is true up to there, and of 0."""

    def bit(i: Array, t: Array) -> Array:
        more = t | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(holds(more), more, t)

    return lax.fori_loop(0, 32, bit, jnp.zeros((order.shape[0], 1), jnp.uint32))
