"""Arrays over a mesh, put together from what its devices hold: no device has more on the way than in the end."""

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jaxtyping import Array

T = TypeVar("T")


def auto(mesh: Mesh) -> Mesh:
    """`mesh` with all of its axes Auto."""
    return Mesh(mesh.devices, mesh.axis_names)


def relabel(array: Array, sharding: NamedSharding) -> Array:
    """`array` over the very mesh of `sharding`, by which it lies already but for the kinds of its mesh's axes."""
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def without_explicit(tree: T) -> tuple[T, Mesh | None]:
    """`tree` with what lies over a mesh with Explicit axes over the same one with Auto axes; and that mesh, if any.

    Nothing is copied.
    """
    meshes: dict[Mesh, Mesh] = {}

    def change(leaf: T) -> T:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(leaf, jax.Array) or not isinstance(sharding, NamedSharding):
            return leaf
        if AxisType.Explicit not in sharding.mesh.axis_types:
            return leaf
        mesh = meshes.setdefault(sharding.mesh, auto(sharding.mesh))
        target = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.device_put(leaf, target)
        return relabel(leaf, target)

    return jax.tree.map(change, tree), next(iter(meshes.values()), None)


def from_blocks(
    shape: tuple[int, ...], sharding: Sharding, make: Callable[[tuple[slice, ...]], np.ndarray]
) -> Array:
    """The array of `shape` at `sharding`, of which `make(index)` makes blocks: each once, for all that hold it.

    `index` has a slice with plain bounds for each axis. What `make` gives is the array's from then on where a device
    can take it as it is.
    """
    holders: dict[tuple, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    parts: list[Array] = []
    for bounds, devices in holders.items():
        memory = make(tuple(slice(*pair) for pair in bounds))
        places = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
        # Nobody else has the memory and nobody writes to it again, so on CPUs it is the array's from now on, even
        # several devices'. (Donating such an array is safe: XLA then makes a copy.) Elsewhere it is let go of before
        # the next block is made.
        parts += jax.block_until_ready([jax.device_put(memory, place, may_alias=True) for place in places])
        del memory
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, parts)
