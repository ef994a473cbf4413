"""Programs of training: arguments committed to their memories, and one compilation for a run."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from ..policies.activation import path_string


class RecompilationWarning(UserWarning):
    """A step had to be compiled again, because something about its arguments changed."""


def default_sharding() -> Sharding:
    """The default device, with the memory kind that it uses by default spelled out."""
    device = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    return SingleDeviceSharding(device, memory_kind=device.default_memory().kind)


def replicated(sharding: Sharding) -> Sharding:
    """Where a scalar goes beside an array that lies at `sharding`: on all of its devices."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
    return sharding


def settled(leaf: Any) -> bool:
    """Whether a leaf says where it is, memory kind included. One being traced has no place to say."""
    if isinstance(leaf, jax.core.Tracer):
        return True
    sharding = getattr(leaf, "sharding", None)
    committed = leaf.committed if isinstance(leaf, jax.Array) else True
    return sharding is not None and sharding.memory_kind is not None and committed


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


class Program:
    """A function of state and batch, compiled once for each set of shapes, dtypes and shardings that it meets."""

    def __init__(self, name: str, function: Callable[..., Any], donate: bool):
        self.name = name
        self.compilations = 0
        self._function = function
        self._donate = donate
        self._compiled: dict[Any, Any] = {}
        self._last: dict[str, str] = {}

    @staticmethod
    def settle(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """The arguments, committed: what isn't yet goes where the state's scalars are."""
        scalar = replicated(state.step.sharding) if settled(state.step) else None
        return commit(state, scalar), commit(batch, scalar)

    def lower(self, state: PyTree, batch: PyTree) -> jax.stages.Lowered:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, (state, batch))
        rest = replicated(state.step.sharding)
        out = (shardings[0], rest) if self._donate else rest
        donated = (0,) if self._donate else ()
        jitted = jax.jit(self._function, in_shardings=shardings, out_shardings=out, donate_argnums=donated)
        return jitted.lower(state, batch)

    def __call__(self, state: PyTree, batch: PyTree) -> Any:
        state, batch = self.settle(state, batch)
        leaves, treedef = jax.tree.flatten((state, batch))
        signature = (treedef, *((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))
        if signature not in self._compiled:
            self._explain(state, batch)
            # Compiled ahead, so that what isn't this very program can't be compiled behind our back.
            self._compiled[signature] = self.lower(state, batch).compile()
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
