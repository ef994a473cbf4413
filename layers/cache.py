"""What attention keeps of the tokens before: filled by a prompt, then read and added to token by token."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int


class LayerCache(eqx.Module):
    """One layer's part of a stack's cache, handed from layer to layer while the stack runs.

    `arrays` are those of the whole stack, `[layers, batch, capacity, ...]`: a layer writes into them in place
    and reads its own slice, so that nothing but the new entries is copied.
    """

    arrays: dict[str, Array]
    layer: Int[Array, ""]
    start: Int[Array, ""]  # the slot of the first new token
    # Nothing was there before: attention can stay among the new tokens.
    fresh: bool = eqx.field(static=True)

    def update(self, **new: Array) -> tuple["LayerCache", dict[str, Array]]:
        """The cache with `new` entries `[batch, new tokens, ...]` in it, and this layer's `[batch, capacity, ...]`.

        Entries are cast to the cache's dtype.
        """
        arrays = dict(self.arrays)
        for name, entry in new.items():
            at = (self.layer, 0, self.start, *(0,) * (entry.ndim - 2))
            arrays[name] = lax.dynamic_update_slice(arrays[name], entry[None].astype(arrays[name].dtype), at)
        mine = {name: lax.dynamic_index_in_dim(arrays[name], self.layer, keepdims=False) for name in new}
        return LayerCache(arrays, self.layer, self.start, self.fresh), mine


class Cache(eqx.Module):
    """Keys and values, or latents, of the tokens so far, for all layers of a model.

    Every row has `capacity` slots, filled from the left and all rows alike: a token that isn't real (padding)
    takes up a slot and is seen by nobody. Positions, by contrast, count real tokens only, so left-padded rows
    give what they would give alone.
    """

    arrays: dict[str, dict[str, Array]]  # by stack, then by the attention layer's own names
    valid: Bool[Array, "batch capacity"]  # which slots hold a real token
    length: Int[Array, ""]  # how many slots are filled
    fresh: bool = eqx.field(static=True, default=True)

    @property
    def capacity(self) -> int:
        return self.valid.shape[1]

    def check(self, batch: int, new: int) -> None:
        """Raises ValueError unless `new` more tokens of `batch` rows fit.

        Where the length isn't known, inside `jax.jit`, `overflows` tells afterwards.
        """
        if self.valid.shape[0] != batch:
            raise ValueError(f"the cache is for {self.valid.shape[0]} rows, the tokens have {batch}")
        held = None if isinstance(self.length, jax.core.Tracer) else int(self.length)
        if (held or 0) + new > self.capacity:
            filled = "" if held is None else f", of which {held} are filled"
            raise ValueError(f"{new} tokens don't fit into the cache: its capacity is {self.capacity} slots{filled}")

    def overflows(self, new: int) -> Bool[Array, ""]:
        """Whether `new` more tokens don't fit."""
        return self.length + new > self.capacity

    def admit(self, mask: Bool[Array, "batch new"]) -> tuple["Cache", Int[Array, "batch new"]]:
        """The cache with slots taken for new tokens, real where `mask` is True, and the positions of these tokens.

        The arrays are filled by the layers; a token that isn't real has the position of the real one before it.
        """
        before = jnp.sum(self.valid, axis=1, dtype=jnp.int32)
        positions = jnp.maximum(before[:, None] + jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
        valid = lax.dynamic_update_slice(self.valid, mask, (0, self.length))
        return Cache(self.arrays, valid, self.length + mask.shape[1], False), positions
