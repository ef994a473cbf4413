"""Which keys a query may look at."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..policies.axes import any_mesh, constrain


@jax.named_scope("attention_mask")
@any_mesh
def attention_mask(
    queries: int,
    *,
    segment_ids: Int[Array, "batch sequence"] | None = None,
    mask: Bool[Array, "batch sequence"] | None = None,
    window: int | None = None,
) -> Bool[Array, "rows query key"]:
    """A causal mask, True where query i may look at key j; one row when nothing in it depends on the batch.

    **Arguments:**

    - `queries`: how long the sequence is.
    - `segment_ids`: documents packed into a row; a query sees keys of its own segment only. Any integers do.
    - `mask`: True at real tokens. Padding is said by this argument alone: no segment id means padding. A query
        may be left without any key; attention answers with zeros then.
    - `window`: a query sees its own key and the `window - 1` before it.

    Over a mesh it is cut along queries, never along keys. Raises ValueError when a length or the window doesn't fit.
    """
    for name, array in (("segment_ids", segment_ids), ("mask", mask)):
        if array is not None and array.shape[-1] != queries:
            raise ValueError(f"attention_mask: {name} has length {array.shape[-1]}, the sequence {queries}")
    if window is not None and window < 1:
        raise ValueError(f"attention_mask: window must be 1 or larger, or None for no window, got {window!r}")
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(f"attention_mask: mask must be boolean, True at real tokens, got {mask.dtype}")
    query, key = jnp.arange(queries)[:, None], jnp.arange(queries)[None, :]
    visible = key <= query
    if window is not None:
        visible &= query - key < window
    visible = visible[None]
    if segment_ids is not None:
        visible = visible & (segment_ids[:, :, None] == constrain(segment_ids, "batch _")[:, None, :])
    if mask is not None:
        visible = visible & constrain(mask, "batch _")[:, None, :]
    return constrain(visible, "_ sequence _" if segment_ids is None and mask is None else "batch sequence _")


@jax.named_scope("cache_mask")
def cache_mask(
    valid: Bool[Array, "batch slots"], start: Int[Array, ""], queries: int, *, window: int | None = None
) -> Bool[Array, "batch query slot"]:
    """The causal mask of new tokens over the slots of a cache, which hold these tokens already.

    **Arguments:**

    - `valid`: which slots hold a real token.
    - `start`: the slot of the first of the `queries` new tokens.
    - `window`: as for `attention_mask`, counted in slots.
    """
    query, key = start + jnp.arange(queries)[:, None], jnp.arange(valid.shape[1])[None, :]
    visible = key <= query
    if window is not None:
        visible &= query - key < window
    return visible[None] & valid[:, None, :]


def within(
    mask: Bool[Array, "rows query key"], window: Int[Array, ""], start: Int[Array, ""] | int = 0
) -> Bool[Array, "rows query key"]:
    """`mask`, narrowed to a sliding window that may differ from layer to layer; `start` as for `cache_mask`."""
    query, key = start + jnp.arange(mask.shape[1])[:, None], jnp.arange(mask.shape[2])[None, :]
    return mask & (query - key < window)
