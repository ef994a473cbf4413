"""Logical axes: what the dimensions of arrays are called, and over which axes of a device mesh they are cut."""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

F = TypeVar("F", bound=Callable[..., Any])

LOGICAL_AXES = (
    "batch", "sequence", "vocab", "embed", "heads", "kv_heads", "head_dim", "latent", "mlp", "experts", "layers",
)  # fmt: skip
# What is cut over these holds tokens: a weight that is stored in parts over them is whole where it is used.
_TOKENS = ("batch", "sequence")


class Dim(NamedTuple):
    """One dimension of an array: the logical axes it is the product of, and how many units it is made of.

    No axis means that it is never cut; no count that each element is a unit.
    """

    names: tuple[str, ...]
    count: int | None


@functools.cache
def parse(axes: str) -> tuple[Dim, ...]:
    """The dimensions that `axes` spells, as in `"batch sequence heads head_dim"`.

    `_` is a dimension that is never cut, `heads=8` one made of 8 heads that stay whole, and `batch*sequence` one
    that holds the rows of both. Raises ValueError for an axis that isn't in `LOGICAL_AXES`.
    """
    dims = []
    for word in axes.split():
        names, _, count = word.partition("=")
        split = () if names == "_" else tuple(names.split("*"))
        for name in split:
            if name not in LOGICAL_AXES:
                raise ValueError(f"logical axis {name!r} in {axes!r} is not one of {', '.join(LOGICAL_AXES)}, or _")
        dims.append(Dim(split, int(count) if count else None))
    return tuple(dims)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and the mesh axes that each logical axis is cut over.

    `rules` is a table as a tuple of its items, so that a layout can be hashed. `zoo.layout` makes one and checks it.
    Any one array is cut over a mesh axis once: the first of its dimensions whose rule names it gets it.
    """

    mesh: Mesh | AbstractMesh  # one without devices is enough to look at shards
    rules: tuple[tuple[str, tuple[str, ...]], ...]

    @functools.cached_property
    def table(self) -> dict[str, tuple[str, ...]]:
        return dict(self.rules)

    def axes(self, *names: str) -> tuple[str, ...]:
        """The mesh axes that dimensions of these logical axes are cut over."""
        return tuple(dict.fromkeys(axis for name in names for axis in self.table.get(name, ())))

    def size(self, axes: tuple[str, ...]) -> int:
        """How many parts a dimension has that is cut over these mesh axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def parts(self, axes: str, *, whole: tuple[str, ...] = ()) -> tuple[tuple[str, ...], ...]:
        """For each dimension of `axes` the mesh axes that it is cut over; none of those in `whole`."""
        used, out = set(whole), []
        for dim in parse(axes):
            mine = tuple(axis for axis in self.axes(*dim.names) if axis not in used)
            used.update(mine)
            out.append(mine)
        return tuple(out)

    def stored(self, axes: str) -> PartitionSpec:
        """How an array of these axes is cut."""
        return _spec(self.parts(axes))

    def computed(self, axes: str) -> PartitionSpec:
        """How a weight of these axes is cut where it is multiplied: whole over the axes that cut tokens.

        Experts stay where they are: tokens come to them.
        """
        experts = self.axes("experts") if any("experts" in dim.names for dim in parse(axes)) else ()
        return _spec(self.parts(axes, whole=tuple(a for a in self.axes(*_TOKENS) if a not in experts)))

    def check(self, axes: str, shape: tuple[int, ...], what: str) -> None:
        """Raises ValueError, naming `what`, the dimension and the mesh axis, unless `shape` can be cut as it should."""
        dims, parts = parse(axes), self.parts(axes)
        if len(dims) != len(shape):
            raise ValueError(f"{what} has {len(shape)} dimensions, its axes {axes!r} are {len(dims)}")
        for i, (dim, mine) in enumerate(zip(dims, parts, strict=True)):
            units, cuts = dim.count or shape[i], self.size(mine)
            if units % cuts:
                name = "*".join(dim.names)
                over = " and ".join(repr(axis) for axis in mine)
                raise ValueError(
                    f"{what} {list(shape)}: dimension {i} is {units} {name}, which can't be cut into {cuts} equal "
                    f"parts over mesh axis {over}; another size of mesh, or the rule {{{name!r}: ()}} to keep it whole "
                    "on every device"
                )

    def sharding(self, axes: str, memory_kind: str | None = None) -> NamedSharding:
        """Where an array of these axes lies."""
        return NamedSharding(self.mesh, self.stored(axes), memory_kind=memory_kind)


def _spec(parts: tuple[tuple[str, ...], ...]) -> PartitionSpec:
    return PartitionSpec(*(part[0] if len(part) == 1 else part or None for part in parts))


_current: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("overspill_layout", default=None)


def current() -> Layout | None:
    """The layout that layers being called now are cut by, if there is one."""
    return _current.get()


@contextlib.contextmanager
def use(layout: Layout | None) -> Iterator[None]:
    """Layers called inside this context cut their activations as `layout` says.

    It is read when a function is traced. A function under `jax.jit` keeps what it was first traced with: enter the
    context inside the function.
    """
    token = _current.set(layout)
    try:
        yield
    finally:
        _current.reset(token)


def manual_axes() -> tuple[str, ...]:
    """The mesh axes that an enclosing `jax.shard_map` has taken in hand: values are local there."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def _place(layout: Layout, spec: PartitionSpec) -> Any:
    """What `jax.lax.with_sharding_constraint` takes here for `spec`; None where there is nothing left to say."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return NamedSharding(layout.mesh, spec)
    manual = set(mesh.manual_axes)
    if manual >= set(mesh.axis_names):
        return None
    parts = (part if isinstance(part, tuple) else () if part is None else (part,) for part in spec)
    return _spec(tuple(tuple(axis for axis in part if axis not in manual) for part in parts))


def constrain(x: Array, axes: str | None, what: str = "an array") -> Array:
    """`x`, cut over the mesh in use as its logical axes say; without a layout in use, `x`.

    Raises ValueError, naming it as `what`, when a dimension can't be cut that way.
    """
    layout = current()
    if layout is None or axes is None:
        return x
    place = _place(layout, layout.stored(axes))
    if place is None:
        return x
    if not manual_axes():
        layout.check(axes, x.shape, what)
    return jax.lax.with_sharding_constraint(x, place)


def gather(weight: Array, axes: str | None) -> Array:
    """`weight` as it is multiplied: gathered from the devices that hold different tokens, if it is stored in parts.

    Its gradient is cut like the weight itself right away.
    """
    layout = current()
    if layout is None or axes is None:
        return weight
    inner, outer = _place(layout, layout.computed(axes)), _place(layout, layout.stored(axes))
    return weight if inner is None else _gather(inner, outer, weight)


def whole(x: Array, axes: str, name: str) -> Array:
    """`x`, cut as `axes` say, gathered along its dimension `name`. Its gradient is summed and cut again right away."""
    layout = current()
    if layout is None:
        return x
    parts, dims = layout.parts(axes), parse(axes)
    inner = _spec(tuple(() if dim.names == (name,) else part for dim, part in zip(dims, parts, strict=True)))
    places = _place(layout, inner), _place(layout, _spec(parts))
    return x if places[0] is None else _gather(*places, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(inner: Any, outer: Any, weight: Array) -> Array:
    # Pinned as it is stored first: the partitioner would rather gather before a cast than after it.
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(weight, outer), inner)


def _gather_forward(inner: Any, outer: Any, weight: Array) -> tuple[Array, None]:
    return _gather(inner, outer, weight), None


def _gather_backward(inner: Any, outer: Any, kept: None, gradient: Array) -> tuple[Array]:
    return (jax.lax.with_sharding_constraint(gradient, outer),)


_gather.defvjp(_gather_forward, _gather_backward)


def vary(*arrays: Array) -> tuple[Array, ...]:
    """`arrays`, each marked as varying over the manual mesh axes that any of them varies over.

    Inside `jax.shard_map` the two sides of a loop's carry, and an argument and its gradient, must agree in that.
    """
    varying = [_varying(x) for x in arrays]
    names = frozenset().union(*varying)
    return tuple(
        jax.lax.pcast(x, tuple(sorted(names - mine)), to="varying") if names - mine else x
        for x, mine in zip(arrays, varying, strict=True)
    )


def _varying(x: Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def any_mesh(function: F) -> F:
    """`function`, so that it works in a mesh with Explicit axes too: inside it they are Auto ones.

    Results are cut along batch and sequence like the first array among the arguments (a layer's own aside), and
    whole along their other axes.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        explicit = tuple(axis for axis, kind in kinds.items() if kind == AxisType.Explicit)
        if not explicit:
            return function(*args, **kwargs)
        arrays, static = eqx.partition((args, kwargs), eqx.is_array)
        rest: list[Any] = []

        def run(arrays: Any) -> Any:
            args, kwargs = eqx.combine(arrays, static)
            out, other = eqx.partition(function(*args, **kwargs), eqx.is_array)
            rest[:] = [other]
            return out

        auto = mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto))
        with jax.sharding.use_abstract_mesh(auto):
            shapes = jax.eval_shape(run, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays))
        positional = arrays[0][1:] if isinstance(args[0], eqx.Module) else arrays[0]
        first = next(iter(jax.tree.leaves((positional, arrays[1]))), None)
        specs = jax.tree.map(lambda out: _spec_like(first, out), shapes)
        out = jax.sharding.auto_axes(run, axes=explicit, out_sharding=specs)(arrays)
        return eqx.combine(out, rest[-1])

    return call


def _spec_like(first: Array | None, out: Any) -> PartitionSpec:
    if first is None:
        return PartitionSpec()
    parts = []
    for mine, theirs, part in zip(out.shape, first.shape, jax.typeof(first).sharding.spec, strict=False):
        if mine != theirs or len(parts) == 2:
            break
        parts.append(part)
    return PartitionSpec(*parts)
