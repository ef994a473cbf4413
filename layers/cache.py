"""What attention keeps of the tokens before: filled by a prompt, then read and added to token by token."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int


def stored_dtype(dtype: Any) -> Any:
    """How a cache keeps numbers of this dtype: as they are, but on CPU those of 16 bits or less as whole numbers.

    There XLA writes a token into a bfloat16 array by way of a float32 copy of the array, whole cache and all.
    """
    size = jnp.dtype(dtype).itemsize
    return jnp.dtype(f"uint{8 * size}") if size < 4 and jax.default_backend() == "cpu" else jnp.dtype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _bits(x: Array, kept: Any) -> Array:
    return lax.bitcast_convert_type(x, kept)


@_bits.defjvp
def _bits_jvp(kept: Any, primals: Any, tangents: Any) -> Any:
    raise ValueError("there is no gradient through a cache of 16 bits or less on CPU, but through one of float32")


class LayerCache(eqx.Module):
    """One layer's part of a stack's cache, handed from layer to layer while the stack runs.

    `arrays` are those of the whole stack, `[layers, batch, ..., capacity, features]`: a layer writes into them in
    place and reads its own slice, so that nothing but the new entries is copied.
    """

    arrays: dict[str, Array]
    layer: Int[Array, ""]
    start: Int[Array, ""]  # the slot of the first new token
    # Nothing was there before: attention can stay among the new tokens.
    fresh: bool = eqx.field(static=True)
    # Of the numbers, however they are kept.
    dtype: Any = eqx.field(static=True)

    def update(self, **new: Array) -> tuple["LayerCache", dict[str, Array]]:
        """The cache with `new` entries `[batch, ..., new tokens, features]` in it, and all of this layer's,
        `[batch, ..., capacity, features]` in the cache's dtype.
        """
        arrays, mine = dict(self.arrays), {}
        for name, entry in new.items():
            kept = arrays[name].dtype
            entry = entry.astype(self.dtype)
            if kept != self.dtype:
                # Nobody reads what is fresh: there a gradient lacks nothing.
                entry = _bits(lax.stop_gradient(entry) if self.fresh else entry, kept)
            at = (self.layer, *(0,) * (entry.ndim - 2), self.start, 0)
            arrays[name] = lax.dynamic_update_slice(arrays[name], entry[None], at)
            own = lax.dynamic_index_in_dim(arrays[name], self.layer, keepdims=False)
            mine[name] = own if kept == self.dtype else lax.bitcast_convert_type(own, self.dtype)
        return dataclasses.replace(self, arrays=arrays), mine


class Cache(eqx.Module):
    """Keys and values, or latents, of the tokens so far, for all layers of a model.

    Every row has `capacity` slots, filled from the left and all rows alike: a token that isn't real (padding)
    takes up a slot and is seen by nobody. Positions, by contrast, count real tokens only, so left-padded rows
    give what they would give alone. Sliding windows count slots: with padding between real tokens, as after a
    prompt that is padded on the right, a row sees less than it would alone.
    """

    arrays: dict[str, dict[str, Array]]  # by stack, then by the attention layer's own names
    valid: Bool[Array, "batch capacity"]  # which slots hold a real token
    length: Int[Array, ""]  # how many slots are filled
    dtype: Any = eqx.field(static=True)  # of the numbers in `arrays`, which may be kept as whole ones of that size
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
        length = self.length + mask.shape[1]
        return dataclasses.replace(self, valid=valid, length=length, fresh=False), positions
