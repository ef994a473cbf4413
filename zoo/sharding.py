"""Models and training states over a mesh of devices, by a plain table from logical axes to mesh axes."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..layers.stack import Stack
from ..policies.activation import Activation, annotations, path_string
from ..policies.axes import LOGICAL_AXES, Layout, parse
from ..policies.report import Table, format_bytes
from .compiled import compute_memory

T = TypeVar("T")
Rules = Mapping[str, str | Sequence[str] | None]

# What each kind of parallelism cuts, by the name of its mesh axis. Those in one mesh add up.
PRESETS: dict[str, tuple[str, ...]] = {
    "data": ("batch",),  # every device has all weights, and a part of the batch
    "fsdp": ("batch", "embed", "latent"),  # the same, but weights and optimizer state are stored in parts
    "tensor": ("vocab", "heads", "kv_heads", "mlp"),  # heads and hidden features are computed in parts
    "expert": ("batch", "experts"),  # experts are elsewhere, and tokens travel to them
    "sequence": ("sequence",),  # a part of each row; keys and values are gathered (context parallelism)
}


class ShardingWarning(UserWarning):
    """Arrays or rules that a sharding doesn't reach."""


def rules_for(mesh: Mesh | AbstractMesh, *, others: Collection[str] = ()) -> dict[str, tuple[str, ...]]:
    """The table that the names of a mesh's axes stand for, to be edited: `rules_for(mesh) | {"kv_heads": ()}`.

    An axis called `data`, `fsdp`, `tensor`, `expert` or `sequence` is that preset (see `PRESETS`); several add up.
    With `fsdp` and `expert` weights outside of experts are stored in parts over both, since both cut the batch.
    Axes of other names cut nothing if they are among `others`. Raises ValueError for the rest.
    """
    table: dict[str, tuple[str, ...]] = {name: () for name in LOGICAL_AXES}
    for axis in mesh.axis_names:
        if axis not in PRESETS and axis not in others:
            raise ValueError(
                f"mesh axis {axis!r} is no preset ({', '.join(PRESETS)}): say with a rule what is cut over it, as in "
                f"embed={axis}; in code, rules_for(mesh, others=({axis!r},)) | {{'embed': {axis!r}}}"
            )
        for name in PRESETS.get(axis, ()):
            table[name] += (axis,)
    if table["embed"] and table["experts"]:
        for name in ("embed", "latent"):
            table[name] += table["experts"]
    return table


def layout(mesh: Mesh | AbstractMesh | Layout, rules: Rules | None = None) -> Layout:
    """A mesh with its rules, checked; with a Layout and no rules, the same.

    **Arguments:**

    - `mesh`: as `jax.make_mesh` makes it, its axes Auto or Explicit.
    - `rules`: from logical axes (`policies.axes.LOGICAL_AXES`) to a mesh axis or several; `()` or None, or no entry,
        keeps that dimension whole. By default `rules_for(mesh)`.

    Raises ValueError for a logical or mesh axis that doesn't exist.
    """
    if isinstance(mesh, Layout):
        if rules is None:
            return mesh
        mesh = mesh.mesh
    if any(kind == AxisType.Manual for kind in mesh.axis_types):
        raise ValueError("a mesh with Manual axes belongs to jax.shard_map: make one with Auto or Explicit axes")
    table = {}
    for name, axes in (rules_for(mesh) if rules is None else rules).items():
        if name not in LOGICAL_AXES:
            raise ValueError(f"rule {name!r}: not one of the logical axes {', '.join(LOGICAL_AXES)}")
        axes = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        for axis in axes:
            if axis not in mesh.axis_names:
                raise ValueError(f"rule {name!r}: the mesh has no axis {axis!r}, only {', '.join(mesh.axis_names)}")
        if len(set(axes)) < len(axes):
            raise ValueError(f"rule {name!r} names a mesh axis twice: {axes}")
        if axes:
            table[name] = axes
    return Layout(mesh, tuple(sorted(table.items())))


class Row(NamedTuple):
    """How one array lies."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: str | None  # its logical axes; None where its layer declares none
    spec: PartitionSpec
    shard: tuple[int, ...]  # what one device holds
    bytes: int
    shard_bytes: int


def logical_axes(tree: PyTree) -> dict[str, str | None]:
    """The logical axes of every array of `tree`, by its path; None where the module that holds it declares none.

    A module declares them in `axes`, a dictionary by field. Arrays of a `Stack` have `layers` in front.
    Raises ValueError for declarations that are no such dictionary, that name a field which isn't there, or that
    `policies.axes.parse` refuses.
    """
    found: dict[str, str | None] = {}

    def visit(node: Any, prefix: str, declared: Mapping[str, str], stacked: bool) -> None:
        if _is_array(node):
            axes = declared.get(prefix.rpartition(".")[2])
            found[prefix] = f"layers {axes}" if axes is not None and stacked else axes
            return
        children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
        mine = _declared(node) if isinstance(node, eqx.Module) and not isinstance(node, Activation) else {}
        for key, child in children:
            if child is not node:
                path = ".".join(filter(None, (prefix, path_string(key))))
                visit(child, path, mine, stacked or isinstance(node, Stack))

    visit(tree, "", {}, False)
    return found


def _declared(module: eqx.Module) -> Mapping[str, str]:
    declared, name = getattr(module, "axes", {}), type(module).__name__
    if not isinstance(declared, Mapping):
        raise ValueError(
            f"{name}.axes must be a dictionary from fields to logical axes, such as {{'weight': 'mlp embed'}}, not "
            f"{declared!r}"
        )
    for field, axes in declared.items():
        if not hasattr(module, field):
            raise ValueError(f"{name}.axes names {field!r}, which {name} doesn't have")
        parse(axes)
    return declared


def _is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


class Shards:
    """How the arrays of a model lie over a mesh: `rows` as data, and a table when printed."""

    def __init__(self, rows: list[Row], layout: Layout):
        self.rows, self.layout = rows, layout

    def __getitem__(self, path: str) -> NamedSharding:
        """The sharding of the array at `path`."""
        return NamedSharding(self.layout.mesh, self._by_path[path].spec)

    @property
    def _by_path(self) -> dict[str, Row]:
        return {row.path: row for row in self.rows}

    @property
    def bytes(self) -> int:
        """Of all arrays, once."""
        return sum(row.bytes for row in self.rows)

    @property
    def shard_bytes(self) -> int:
        """What one device holds."""
        return sum(row.shard_bytes for row in self.rows)

    @property
    def undeclared(self) -> list[str]:
        """Paths of arrays without logical axes; every device holds all of them."""
        return [row.path for row in self.rows if row.axes is None]

    def table(self) -> Table:
        rows = [
            (row.path, f"{row.dtype}[{','.join(map(str, row.shape))}]", row.axes or "not declared", _text(row.spec),
             f"[{','.join(map(str, row.shard))}]", format_bytes(row.shard_bytes))
            for row in self.rows
        ]  # fmt: skip
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.layout.mesh.shape.items())
        footer = f"{format_bytes(self.bytes)} in all, {format_bytes(self.shard_bytes)} on each device of {sizes}"
        columns = ("array", "shape", "logical axes", "cut over", "one device", "bytes")
        return Table(columns, rows, title="Parameters", footer=footer, paths=True)

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _text(spec: PartitionSpec) -> str:
    parts = ["*".join(part) if isinstance(part, tuple) else part or "-" for part in spec]
    return " ".join(parts) if any(part != "-" for part in parts) else "whole"


def shards(model: PyTree, mesh: Mesh | AbstractMesh | Layout, rules: Rules | None = None) -> Shards:
    """How `model`, concrete or abstract, lies over `mesh`: looks, and places nothing.

    Raises ValueError, naming the array, the dimension and the mesh axis, where one can't be cut into equal parts.
    """
    place = layout(mesh, rules)
    axes, rows = logical_axes(model), []
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        if not _is_array(leaf):
            continue
        name = path_string(path)
        spec, shard = PartitionSpec(), leaf.shape
        if axes[name] is not None:
            place.check(axes[name], leaf.shape, repr(name))
            spec = place.stored(axes[name])
            shard = NamedSharding(place.mesh, spec).shard_shape(leaf.shape)
        size = leaf.dtype.itemsize
        rows.append(Row(name, leaf.shape, str(leaf.dtype), axes[name], spec, shard, leaf.size * size,
                        int(np.prod(shard)) * size))  # fmt: skip
    return Shards(rows, place)


def shard(tree: T, mesh: Mesh | AbstractMesh | Layout, rules: Rules | None = None, *, model: PyTree = None) -> T:
    """A model or a training state over a mesh: each array cut as its logical axes and the rules say.

    Abstract trees get abstract arrays with shardings, so that a step for any number of devices can be lowered: over a
    mesh without devices (`jax.sharding.AbstractMesh`) too, on which only abstract arrays can lie.

    **Arguments:**

    - `tree`: any PyTree of layers; or, when `model` is given, one that holds arrays in dictionaries by their path in
        it, such as a `TrainState`: these lie like the model's, and all others are whole on every device. Concrete
        arrays are copied to where they belong; memory kinds stay.
    - `mesh`, `rules`: as for `layout`.
    - `model`: the model, concrete or abstract, that the state `tree` goes with.

    Raises ValueError before anything is placed, naming array, dimension and mesh axis, where one can't be cut into
    equal parts, and for a state without its model. Warns with a `ShardingWarning` of arrays that no layer declares
    axes for (they are whole on every device) and of rules of one's own that reach no array and no activation.
    """
    if model is None and hasattr(tree, "opt_state"):
        raise ValueError("a training state is cut like the model that it goes with: shard(state, mesh, model=model)")
    plan = shards(tree if model is None else model, mesh, rules)
    if plan.undeclared:
        names = ", ".join(map(repr, plan.undeclared[:3])) + (" ..." if len(plan.undeclared) > 3 else "")
        warnings.warn(
            f"without logical axes, and so whole on every device: {names} ({len(plan.undeclared)} in all); declare "
            "them in the `axes` of their module",
            ShardingWarning,
            stacklevel=2,
        )
    if rules is not None:
        _warn_of_idle(plan, tree if model is None else model)
    rows = {row.path: row for row in plan.rows}
    whole = NamedSharding(plan.layout.mesh, PartitionSpec())

    def move(path: tuple, leaf: Any) -> Any:
        if not _is_array(leaf):
            return leaf
        keys = [path_string(path)] if model is None else [getattr(entry, "key", None) for entry in path]
        like = next((key for key in keys if key in rows and rows[key].shape == leaf.shape), None)
        target = whole if like is None else plan[like]
        target = target.with_memory_kind(_memory_kind(leaf, target))
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=target)
        if isinstance(target.mesh, AbstractMesh):
            raise ValueError(
                f"{path_string(path)!r} is an array, and nothing can lie on a mesh without devices but abstract ones: "
                "take zoo.abstract(...) for the model, or a mesh of devices"
            )
        return jax.device_put(leaf, target)

    return jax.tree_util.tree_map_with_path(move, tree)


def reached(plan: Shards, model: PyTree) -> set[str]:
    """The logical axes that arrays and activations of a model have: what rules can reach."""
    axes = [row.axes for row in plan.rows] + [row.activation.axes for row in annotations(model)]
    return {name for one in axes if one is not None for dim in parse(one) for name in dim.names}


def _warn_of_idle(plan: Shards, model: PyTree) -> None:
    found = reached(plan, model)
    idle = [name for name in plan.layout.table if name not in found]
    if idle:
        warnings.warn(
            f"rules that reach no array and no activation of {type(model).__name__}: {', '.join(map(repr, idle))}",
            ShardingWarning,
            stacklevel=3,
        )


def _memory_kind(leaf: Any, sharding: NamedSharding) -> str | None:
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return kind or compute_memory(sharding)
