"""Programs of training: arguments committed to their memories, and one compilation for a run."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from ..policies.activation import path_string
from ..policies.axes import Layout
from ..policies.spaces import typed


class RecompilationWarning(UserWarning):
    """A step had to be compiled again, because something about its arguments changed."""


def compute_memory(place: Sharding | Mesh | AbstractMesh) -> str | None:
    """The memory that devices compute in; None for GPUs that are only described, to compile for."""
    mesh = place if isinstance(place, (Mesh, AbstractMesh)) else getattr(place, "mesh", None)
    if isinstance(mesh, AbstractMesh):
        return "device"
    device = next(iter(place.device_set)) if mesh is None else mesh.devices.flat[0]
    try:
        return device.default_memory().kind
    except jax.errors.JaxRuntimeError:
        return None


def default_sharding() -> Sharding:
    """The default device, with the memory kind that it uses by default spelled out."""
    device = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    sharding = SingleDeviceSharding(device)
    return sharding.with_memory_kind(compute_memory(sharding))


def replicated(sharding: Sharding) -> Sharding:
    """Where a scalar goes beside an array that lies at `sharding`: in the own memory of all of its devices."""
    kind = compute_memory(sharding)
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=kind)
    return sharding.with_memory_kind(kind)


def settled(leaf: Any) -> bool:
    """Whether a leaf says where it is, memory kind included. One being traced has no place to say."""
    if isinstance(leaf, jax.core.Tracer):
        return True
    sharding = getattr(leaf, "sharding", None)
    committed = leaf.committed if isinstance(leaf, jax.Array) else True
    if sharding is None or not committed:
        return False
    return sharding.memory_kind is not None or compute_memory(sharding) is None


def commit(tree: PyTree, sharding: Sharding | None = None) -> PyTree:
    """`tree` with every leaf committed to a device and a memory kind: an array that is not makes JAX compile twice.

    What is committed already stays where it is; the rest goes to `sharding`, by default the default device.
    Works on NumPy arrays and on abstract trees too.
    """
    target = sharding if sharding is not None else default_sharding()

    def settle(leaf: Any) -> Any:
        if settled(leaf):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=target)
        if isinstance(leaf, jax.Array) and leaf.committed:
            return jax.device_put(leaf, leaf.sharding.with_memory_kind(target.memory_kind))
        return jax.device_put(leaf, target)

    return jax.tree.map(settle, tree)


def over_mesh(x: Any, layout: Layout) -> Any:
    """An array `[batch, sequence]` cut over a mesh; one with a row for all has its sequence cut only."""
    if isinstance(x, jax.core.Tracer):
        return x
    axes = "batch sequence" if x.shape[0] > 1 else "_ sequence"
    sharding = layout.sharding(axes, compute_memory(layout.mesh))
    if isinstance(x, jax.ShapeDtypeStruct) or isinstance(layout.mesh, AbstractMesh):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    if isinstance(x, np.ndarray):
        # Each process makes the parts of its own devices.
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    return jax.device_put(x, sharding)


def check_mesh(state: PyTree, layout: Layout) -> None:
    """Raises ValueError, naming an array, unless `state` lies over the devices of `layout`."""
    wanted = _devices(layout.mesh)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(leaf, jax.core.Tracer) or sharding is None:
            continue
        mesh = getattr(sharding, "mesh", None)
        lies = sharding.device_set if mesh is None else _devices(mesh)
        if lies == wanted and (mesh is None or mesh.shape == layout.mesh.shape):
            continue
        where = f"a mesh of {_sizes(mesh)}" if mesh is not None else f"{len(lies)} device(s)"
        if lies and not wanted:
            where += " that are there"
        raise ValueError(
            f"{path_string(path)!r} of the state lies on {where}, and the step's mesh is {_sizes(layout.mesh)}: make "
            "the state with the same mesh, init_state(model, optimizer, mesh=mesh, ...)"
        )


def _devices(mesh: Mesh | AbstractMesh) -> set[Any]:
    return set() if isinstance(mesh, AbstractMesh) else set(mesh.devices.flat)


def _sizes(mesh: Any) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())


class Program:
    """A function of state and batch, compiled once for each set of shapes, dtypes and shardings that it meets."""

    def __init__(self, name: str, function: Callable[..., Any], donate: bool, layout: Layout | None = None):
        self.name = name
        self.compilations = 0
        self._function = function
        self._donate = donate
        self._layout = layout
        self._compiled: dict[Any, Any] = {}
        self._last: dict[str, str] = {}

    def settle(self, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """The arguments, committed: over the mesh, where there is one; what isn't yet goes where scalars are."""
        scalar = replicated(state.step.sharding) if settled(state.step) else None
        if self._layout is not None:
            batch = jax.tree.map(lambda x: over_mesh(x, self._layout), batch)
        return commit(state, scalar), commit(batch, scalar)

    def lower(self, state: PyTree, batch: PyTree, platform: str | None = None) -> jax.stages.Lowered:
        """The program for these arguments, and for another platform than theirs if one is given."""
        if platform is None and self._layout is not None and isinstance(self._layout.mesh, AbstractMesh):
            raise ValueError(f"a {self.name} over a mesh without devices is lowered for a platform: platform='cuda'")
        if self._layout is not None:
            check_mesh(state, self._layout)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, (state, batch))
        rest = replicated(state.step.sharding)
        out = (shardings[0], rest) if self._donate else rest
        donated = (0,) if self._donate else ()

        def function(*args: PyTree) -> Any:
            return self._function(*jax.tree.map(typed, args, shardings))

        jitted = jax.jit(function, in_shardings=shardings, out_shardings=out, donate_argnums=donated)
        with self._mesh():
            return jitted.trace(state, batch).lower(lowering_platforms=None if platform is None else (platform,))

    def _mesh(self) -> Any:
        """Explicit axes want their mesh to be set; Auto ones don't care."""
        if self._layout is None or AxisType.Explicit not in self._layout.mesh.axis_types:
            return contextlib.nullcontext()
        mesh = self._layout.mesh
        return jax.sharding.use_abstract_mesh(mesh) if isinstance(mesh, AbstractMesh) else jax.set_mesh(mesh)

    def __call__(self, state: PyTree, batch: PyTree) -> Any:
        if self._layout is not None and isinstance(self._layout.mesh, AbstractMesh):
            raise ValueError(
                f"a {self.name} over a mesh without devices can't run; it can be compiled for hardware that isn't "
                "there: policies.compile_ahead(step, state, batch, target=...)"
            )
        state, batch = self.settle(state, batch)
        leaves, treedef = jax.tree.flatten((state, batch))
        signature = (treedef, *((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))
        if signature not in self._compiled:
            lowered = self.lower(state, batch)
            self._explain(state, batch)
            # Compiled ahead, so that what isn't this very program can't be compiled behind our back.
            self._compiled[signature] = lowered.compile()
            self.compilations += 1
        return self._compiled[signature](state, batch)

    def _explain(self, state: PyTree, batch: PyTree) -> None:
        leaves = jax.tree_util.tree_leaves_with_path({"state": state, "batch": batch})
        now = {path_string(path): f"{x.dtype}{list(x.shape)} on {x.sharding}" for path, x in leaves}
        before, self._last = self._last, now
        if before:
            changed = [p for p in {**before, **now} if before.get(p) != now.get(p)]
            first = f": {changed[0]!r} was {before.get(changed[0])}, is {now.get(changed[0])}" if changed else ""
            warnings.warn(
                f"the {self.name} is compiled again, since {len(changed)} of its arguments changed{first}",
                RecompilationWarning,
                stacklevel=4,
            )
