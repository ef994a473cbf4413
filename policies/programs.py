"""What a plan is made for, whatever it came as: a training step, a loss or a layer, traced under any placements."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
from jax.sharding import NamedSharding

from .activation import Annotation, Placement, annotations, named
from .calls import Call, is_step, placed, plain, prepare
from .cuts import Partition
from .jaxprs import Program as Traced, is_inexact
from .pieces import Layers, find_stacks
from .remat import Checkpointed, checkpoint
from .spaces import HOST_MEMORY


class Program:
    """A call that can be traced under any placements; see `policies.plan` for what it may be.

    - `layers`: of a layer on its own, how many of its like run one after the other. Makes a loop of it.

    Raises ValueError for a layer that can't be repeated, and for a function that runs annotated layers without
    `policies.checkpoint`, where placements change nothing.
    """

    def __init__(self, function: Callable[..., Any], args: tuple, kwargs: dict, layers: int | None = None):
        self.is_step = is_step(function)
        if layers is not None and (isinstance(layers, bool) or not isinstance(layers, int) or layers < 1):
            raise ValueError(f"layers is {layers!r}: a whole number of 1 or more is needed")
        module = function.module if isinstance(function, Checkpointed) else function
        if self.is_step:
            if layers is not None:
                raise ValueError("layers is for a layer on its own: a training step has its own")
        elif annotations(module):
            if layers is not None:
                function, args, kwargs = _stacked(module, args, kwargs, layers)
            elif not isinstance(function, Checkpointed) and not find_stacks(module):
                function = checkpoint(module)
        elif layers is not None:
            raise ValueError(f"layers is for a layer on its own, and {function!r:.80} holds no Activation")
        self.function, self.args, self.kwargs = function, args, kwargs

    @functools.cached_property
    def _call(self) -> Call:
        """A loss or a layer, traced as it is."""
        return plain(self.function, self.args, self.kwargs)

    @functools.cached_property
    def rows(self) -> dict[str, Annotation]:
        """The annotated activations by the names that they have in the traced program."""
        if self.is_step:
            rows = annotations(named(self.function.annotated))
        else:
            rows = self._call.rows
        return {row.path: row for row in rows}

    @functools.cached_property
    def stacks(self) -> list[Layers]:
        """The stacks of layers that can be cut into segments."""
        trees = [self.function.annotated] if self.is_step else [self.function, *self.args, *self.kwargs.values()]
        return [found for tree in trees for found in find_stacks(tree)]

    @property
    def micro_batches(self) -> int:
        return self.function.accumulate if self.is_step else 1

    @functools.cached_property
    def forward(self) -> tuple[Any, tuple[bool, ...]]:
        """The forward pass of a micro-batch, and for each input whether its gradient is asked for."""
        if self.is_step:
            loss, moving, rest = self.function.differentiated(*self.args, **self.kwargs)
            closed = jax.make_jaxpr(loss)(moving, rest)
            count = len(jax.tree.leaves(moving))
            return closed, tuple(i < count and is_inexact(v.aval) for i, v in enumerate(closed.jaxpr.invars))
        closed = self._call.closed
        return closed, tuple(is_inexact(v.aval) for v in closed.jaxpr.invars)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes on one device of all that each name of the forward pass stands on, however often it is called."""
        closed, _ = self.forward
        if self.is_step:
            state, batch = self.function.settled(self.state, self.batch)
            inputs = jax.tree.leaves((state.params, state.buffers, batch))
        else:
            inputs = self._call.inputs
        shardings = [getattr(leaf, "sharding", None) for leaf in inputs]
        traced, partition = Traced(closed, [f"input {i}" for i in range(len(inputs))], shardings), Partition()
        sizes: dict[str, int] = {}
        for value, times in traced.tagged:
            sizes[value.name] = sizes.get(value.name, 0) + times * partition.bytes(value)
        return sizes

    def trace(self, placements: Mapping[str, Placement]) -> tuple[Any, list[Any], range]:
        """The program with both passes under `placements`, the shardings of its inputs, and which are donated."""
        if self.is_step:
            step = self.function.placed(placements)
            state, batch = step.settled(*self.args, **self.kwargs)
            shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves((state, batch))]
            return step.trace(state, batch), shardings, range(len(jax.tree.leaves(state)))
        call = prepare(*placed(self.function, self.args, self.kwargs, placements))
        closed = call.closed if call.closed is not None else jax.make_jaxpr(call.function)(call.inputs)
        return closed, call.shardings, range(0)

    @property
    def mesh(self) -> Any:
        """The largest mesh that an argument is cut over; None without one."""
        shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves((self.args, self.kwargs)))
        meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
        return max(meshes, key=lambda mesh: mesh.size, default=None)

    @property
    def state(self) -> Any:
        """The training state of a step; None for anything else."""
        return (self.args[0] if self.args else self.kwargs["state"]) if self.is_step else None

    @property
    def batch(self) -> Any:
        """The batch of a training step; None where that can't be told."""
        return next((a for a in (*self.args, *self.kwargs.values()) if hasattr(a, "tokens")), None)

    def planned(self, placements: Mapping[str, Placement], boundaries: Sequence[int]) -> tuple[Any, tuple, dict]:
        """The call under `placements`, by the paths that activations have once stacks are cut at `boundaries`."""
        if not self.is_step:
            return placed(self.function, self.args, self.kwargs, placements)
        step, state = self.function, self.state
        if self.stacks:
            step, state = step.resegmented(boundaries, state)
        return step.placed(placements), (state, self.batch), {}

    def resized(self, rows: int) -> "Program":
        """The same training step with a batch of so many sequences."""
        before = self.batch.tokens.shape[0]

        def resize(x: Any) -> Any:
            return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) if x.shape[0] == before else x

        return Program(self.function, (self.state, jax.tree.map(resize, self.batch)), {})

    def bytes_in(self, memory: str, part: str | None = None) -> int | float:
        """Bytes of arguments in one device's memory, or in host memory for it; of a part of a training state only."""
        if part is not None:
            return local_bytes(getattr(self.state, part, ()), memory)
        return local_bytes((self.args, self.kwargs, () if self.is_step else self.function), memory)

    def parameters_in(self, memory: str, prefix: str) -> int | float:
        """Bytes of a training state's parameters in one of the memories, of those whose paths begin with `prefix`."""
        return local_bytes([leaf for path, leaf in self.state.params.items() if path.startswith(prefix)], memory)

    def gradients(self, width: int) -> dict[str, float]:
        """By stack, bytes of one layer's gradients on one device, with numbers of `width` bytes."""
        if not self.is_step:
            return {}
        out = {}
        for stack in self.stacks:
            leaves = [leaf for path, leaf in self.state.params.items() if path.startswith(f"{stack.path}.")]
            out[stack.path] = sum(math.prod(_local_shape(leaf)) for leaf in leaves) * width / stack.num_layers
        return out


def _stacked(module: Any, args: tuple, kwargs: dict, layers: int) -> tuple[Any, tuple, dict]:
    """A loop over so many layers like `module`, each with weights of its own, that hands on the first argument."""
    arrays, static = eqx.partition(module, lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct))
    if not args:
        raise ValueError("layers: a layer that is repeated hands on its first positional argument, and there is none")

    def first(out: Any) -> Any:
        return out[0] if isinstance(out, tuple | list) else out

    made = eqx.filter_eval_shape(lambda module, args, kwargs: first(module(*args, **kwargs)), module, args, kwargs)
    if not hasattr(args[0], "shape"):
        raise ValueError(f"layers: a layer that is repeated hands on one array, not {type(args[0]).__name__}")
    if getattr(made, "shape", None) != args[0].shape or made.dtype != args[0].dtype:
        raise ValueError(
            f"layers: a layer that is repeated gives what it takes, {args[0].dtype}{list(args[0].shape)}, "
            f"and this one gives {made}"
        )
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((layers, *x.shape), x.dtype), arrays)

    def run(module: Any, x: Any, *rest: Any, **named_rest: Any) -> Any:
        # Annotations are in the argument, so that they can be placed; weights have a leading layer axis.
        weights, annotated = eqx.partition(module, eqx.is_array)

        def body(x: Any, weights: Any) -> tuple[Any, None]:
            layer = checkpoint(eqx.combine(weights, annotated), prevent_cse=False)
            return first(layer(x, *rest, **named_rest)), None

        return jax.lax.scan(body, x, weights)[0]

    return run, (eqx.combine(stacked, static), *args), kwargs


def local_bytes(tree: Any, memory: str) -> int | float:
    """Bytes of a tree's arrays in one device's memory, or in host memory for it."""
    sizes = 0.0
    for leaf in jax.tree.leaves(tree):
        if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
            kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
            if (HOST_MEMORY if kind == HOST_MEMORY else "device") == memory:
                sizes += math.prod(_local_shape(leaf)) * leaf.dtype.itemsize
    return sizes


def _local_shape(leaf: Any) -> tuple[int, ...]:
    """The shape of what one device has of an array."""
    sharding = getattr(leaf, "sharding", None)
    return sharding.shard_shape(leaf.shape) if isinstance(sharding, NamedSharding) else leaf.shape

