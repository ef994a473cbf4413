"""Which keys a query may look at."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.named_scope("attention_mask")
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

    Raises ValueError when a length or the window doesn't fit.
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
        visible = visible & (segment_ids[:, :, None] == segment_ids[:, None, :])
    if mask is not None:
        visible = visible & mask[:, None, :]
    return visible
