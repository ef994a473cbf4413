"""Computations that need nothing from other devices, kept from being gathered for."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ..policies.axes import Layout, current, manual_axes


def on_each_device(function: Callable[..., Any], *args: Array, takes: Sequence[str], gives: Any) -> Any:
    """`function(*args)`, by each device on what it holds, where a layout is in use.

    For operations that the compiler would rather gather whole batches for, such as a choice of the largest numbers
    in each row. There must be no gradient to compute.

    **Arguments:**

    - `takes`: the logical axes of each argument, by which it is cut.
    - `gives`: those of the result, or of each of several.
    """
    layout = current()
    if layout is None or manual_axes():
        return function(*args)
    specs = tuple(layout.stored(axes) for axes in takes)
    return by_specs(layout, function, *args, takes=specs, gives=jax.tree.map(layout.stored, gives))


def by_specs(
    layout: Layout, function: Callable[..., Any], *args: Array, takes: tuple[PartitionSpec, ...], gives: Any
) -> Any:
    """`function` on what each device of a layout holds of `args`, as the specs `takes` cut them.

    The function sees every mesh axis and may send along it; `gives` says how its results lie together.
    """
    mesh = {"mesh": layout.mesh} if jax.sharding.get_abstract_mesh().empty else {}
    # Derivatives are written by hand: no need for types that say what varies over which axis.
    return jax.shard_map(function, in_specs=takes, out_specs=gives, check_vma=False, **mesh)(*args)
