"""Weights that live in host memory and come to the device where they are used."""

from typing import Any, TypeVar

import equinox as eqx
import jax
from jaxtyping import Array

T = TypeVar("T")


class Resident(eqx.Module):
    """An array in host memory that stands where a layer has a weight; `fetched` puts the weight itself there.

    Its gradient goes back to host memory.
    """

    value: Array
    dtype: Any = eqx.field(static=True)  # what it is cast to on the device

    def fetch(self) -> Array:
        """The array in device memory."""
        return jax.device_put(self.value, jax.memory.Space.Device).astype(self.dtype)


def _is_resident(node: Any) -> bool:
    return isinstance(node, Resident)


def fetched(tree: T) -> T:
    """`tree` with every `Resident` replaced by its array in device memory."""
    return jax.tree.map(lambda node: node.fetch() if _is_resident(node) else node, tree, is_leaf=_is_resident)


class Fetching(eqx.Module):
    """A module that is fetched when it is called: inside a checkpoint, so that no copy on the device is kept."""

    module: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return fetched(self.module)(*args, **kwargs)


def waits(tree: Any) -> bool:
    """Whether anything in `tree` has to be fetched."""
    return any(map(_is_resident, jax.tree.leaves(tree, is_leaf=_is_resident)))
