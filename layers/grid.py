"""The devices of a mesh as a mixture of experts sees them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from ..policies.axes import Layout, current, manual_axes, parse, vary


@dataclasses.dataclass(frozen=True)
class Grid:
    """The mesh axes that a mixture of experts is computed over, and what each of them cuts."""

    layout: Layout

    @functools.cached_property
    def experts(self) -> tuple[str, ...]:
        return self.layout.axes("experts")

    @functools.cached_property
    def traded(self) -> tuple[str, ...]:
        """Over these tokens travel."""
        return tuple(axis for axis in self.experts if axis in self.layout.axes("batch", "sequence"))

    @functools.cached_property
    def copied(self) -> tuple[str, ...]:
        """Over these all devices have the same tokens and each has experts of its own."""
        return tuple(axis for axis in self.experts if axis not in self.traded)

    @functools.cached_property
    def rows(self) -> tuple[str, ...]:
        """Over these each device has rows of its own."""
        return self.layout.axes("batch", "sequence", "experts")

    @functools.cached_property
    def mlp(self) -> tuple[str, ...]:
        """Over these the devices have different features of the hidden layer."""
        return tuple(axis for axis in self.layout.axes("mlp") if axis not in self.rows)

    @functools.cached_property
    def summed(self) -> tuple[str, ...]:
        """Over these each device has other tokens for the same experts."""
        return tuple(axis for axis in self.rows if axis not in self.experts)

    @property
    def tokens(self) -> PartitionSpec:
        return self.layout.stored("batch sequence")

    def weight(self, axes: str) -> tuple[tuple[str, ...], ...]:
        """For each dimension of a weight of experts the mesh axes that it is cut over where it is multiplied."""
        cuts = {("experts",): self.experts, ("mlp",): self.mlp}
        return tuple(cuts.get(dim.names, ()) for dim in parse(axes))

    def own(self, num_experts: int) -> np.ndarray:
        """The experts [copies, parts * experts] of all devices that can be sent to, by the place on `copied`."""
        sizes = [self.layout.mesh.shape[axis] for axis in self.experts]
        order = [self.experts.index(axis) for axis in (*self.copied, *self.traded)]
        grid = np.arange(num_experts).reshape(*sizes, -1).transpose(*order, len(order))
        return grid.reshape(self.layout.size(self.copied), -1)

    def map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` of what each device has. Its derivative has to be given: this one's is never taken."""
        where = {} if _bare() else {"axis_names": set(self.layout.mesh.axis_names) - set(manual_axes())}
        mesh = self.layout.mesh if _bare() else None
        local = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False, **where)

        def call(*args: Array) -> Any:
            # Unchecked results say nothing of the axes of a shard_map around this one.
            leaves, structure = jax.tree.flatten(local(*args))
            return jax.tree.unflatten(structure, vary(*leaves, *args)[: len(leaves)])

        return call

    def pin(self, x: Array, spec: PartitionSpec) -> Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.layout.mesh, spec) if _bare() else spec)


def grid_in_use() -> Grid | None:
    """The grid of the layout in use, without the axes that an enclosing `jax.shard_map` has in hand.

    None without a layout, and where no axis is left.
    """
    layout, manual = current(), manual_axes()
    if layout is None or set(manual) >= set(layout.mesh.axis_names):
        return None
    if manual:
        rules = ((name, tuple(axis for axis in mine if axis not in manual)) for name, mine in layout.rules)
        layout = Layout(layout.mesh, tuple(rules))
    return Grid(layout)


def _bare() -> bool:
    """Whether no mesh is set, and that of the layout has to be named."""
    return jax.sharding.get_abstract_mesh().empty


def cut(*parts: tuple[str, ...]) -> PartitionSpec:
    """Each dimension cut over these mesh axes."""
    return PartitionSpec(*(part or None for part in parts))


def sum_over(x: Array, axes: tuple[str, ...]) -> Array:
    """The sum over the devices along these mesh axes."""
    return lax.psum(x, axes) if axes else x
