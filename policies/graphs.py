"""A block's computation as a graph: what each part costs, what it is computed from, what the backward pass reads."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from .costs import Cost, cost_of, gathered_bytes, summed_bytes
from .cuts import Partition
from .jaxprs import Program, Value, subjaxprs

# What compilers compute where it is read, instead of writing it out: one number of each operand makes one of a result.
_FUSED = {
    "add", "add_any", "sub", "mul", "div", "rem", "max", "min", "pow", "integer_pow", "neg", "abs", "sign", "exp",
    "exp2", "expm1", "log", "log1p", "logistic", "tanh", "sin", "cos", "sqrt", "rsqrt", "cbrt", "erf", "erfc",
    "erf_inv", "square", "floor", "ceil", "round", "is_finite", "not", "and", "or", "xor", "eq", "ne", "lt", "le",
    "gt", "ge", "select_n", "clamp", "convert_element_type", "broadcast_in_dim", "iota", "reshape", "squeeze",
    "expand_dims", "transpose", "rev", "slice", "concatenate", "pad", "copy", "copy_p", "stop_gradient", "shift_left",
    "shift_right_logical", "shift_right_arithmetic", "bitcast_convert_type", "real", "imag", "nextafter",
    "population_count", "split", "one_minus_square", "log2", "polynomial", "tan", "sinh", "cosh", "asin", "acos",
    "atan", "atan2", "asinh", "acosh", "atanh", "lgamma", "digamma", "conj", "complex", "mulhi",
}  # fmt: skip
# What compilers read through such chains, and write: sums and their like.
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax", "argmin",
               "cumsum", "cummax", "cumlogsumexp"}  # fmt: skip
_TRANSPARENT = {"device_put", "reduce_precision", "optimization_barrier", "mesh_cast", "reshard", "pvary", "pbroadcast",
                "pcast", "copy", "copy_p"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Work:
    """What something takes of a device: operations by kind, bytes moved in device memory, and their number format.

    `memory_bytes` counts fused operations as one: what is read and written in memory, chains of elementwise operations
    being computed on the way. `attention` marks what attention does between its inputs and its result. `narrowest` is
    the narrowest number format of what is read: a fused kernel's, which rounds to it what others keep wider.
    """

    cost: Cost
    memory_bytes: int | float
    dtype: str = "float32"
    attention: bool = False
    narrowest: str = "float32"


@dataclasses.dataclass(frozen=True)
class Node:
    """One part of a block's forward pass.

    - `reads`: indices of the nodes that it is computed from.
    - `wanted`: whether the backward pass reads it.
    - `name`: the activation that it is the value of, and its `bytes` on one device.
    """

    work: Work
    reads: tuple[int, ...]
    wanted: bool
    name: str | None = None
    bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Graph:
    """Both passes of one run of a block.

    - `nodes`: what the backward pass may compute again, in an order in which it can be.
    - `forward`, `backward`: all that the passes do, without anything computed again.
    """

    nodes: tuple[Node, ...]
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]


def graph(program: Program, devices: int, platform: str, fill: Mapping[int, float]) -> Graph:
    """The graph of a program that holds both passes of a block, traced without a policy."""
    return _Reader(program, devices, platform, fill).graph()


class _Reader:
    def __init__(self, program: Program, devices: int, platform: str, fill: Mapping[int, float]):
        self.program, self.devices, self.platform, self.fill = program, devices, platform, fill
        self.partition = Partition()
        self.order: list[Value] = []  # one value for each operation, operands first
        self.operands: dict[tuple, list[tuple]] = {}  # by an operation's key, the keys of those that it reads
        self.results: dict[tuple, list[Value]] = {}
        self.readers: dict[tuple, list[tuple]] = {}
        self.primitives: dict[tuple, str] = {}
        for value in [*program.outputs, *program.kept]:
            self._visit(value)

    def _source(self, value: Value) -> Value:
        """The value that `value` is the same as, as far as what is computed goes."""
        while True:
            if value.primitive == "shard_map" and value.body is not None:
                value = value.body
            elif value.primitive in _TRANSPARENT and value.inputs:
                value = value.inputs[0]
            elif value.primitive == "sharding_constraint" and not self._gathers(value):
                value = value.inputs[0]
            else:
                return value

    def _gathers(self, value: Value) -> bool:
        return not value.backward and gathered_bytes(value, self.partition) > 0

    def _visit(self, root: Value) -> None:
        """Notes what `root` is computed from, depth first and without recursion."""
        todo: list[tuple[Value, bool]] = [(self._source(root), False)]
        while todo:
            value, done = todo.pop()
            if value.eqn is None:
                continue
            key = _key(value)
            if done:
                self.order.append(value)
                for operand in self.operands[key]:
                    self.readers.setdefault(operand, []).append(key)
                continue
            if key in self.operands:
                if all(value is not other for other in self.results[key]):
                    self.results[key].append(value)
                continue
            sources = [self._source(v) for v in value.inputs]
            self.operands[key] = list(dict.fromkeys(_key(v) for v in sources if v.eqn is not None))
            self.results[key] = [value]
            self.primitives[key] = "fused" if _fused(value.eqn) else value.primitive
            todo.append((value, True))
            todo.extend((source, False) for source in sources)

    def graph(self) -> Graph:
        wanted = {_key(source) for v in self.program.kept if (source := self._source(v)).eqn is not None}
        forward = [value for value in self.order if not value.backward]
        indices = {_key(value): i for i, value in enumerate(forward)}
        works = [self._work(value) for value in forward]
        nodes = [
            Node(
                works[i],
                tuple(sorted({indices[key] for key in self.operands[_key(value)] if key in indices})),
                _key(value) in wanted and not value.constant,
                value.name,
                self.partition.bytes(value) if value.name is not None else 0,
            )
            for i, value in enumerate(forward)
        ]
        backward = [self._work(value) for value in self.order if value.backward]
        return Graph(tuple(nodes), tuple(works), tuple(backward))

    def _work(self, value: Value) -> Work:
        if value.name is not None:
            return Work(Cost(), 0.0)
        cost = cost_of(value.eqn, devices=1 if _local(value) else self.devices, platform=self.platform, fill=self.fill)
        if not value.backward:
            cost = dataclasses.replace(
                cost,
                gathered=cost.gathered + gathered_bytes(value, self.partition),
                reduced=cost.reduced + summed_bytes(value, self.partition),
            )
        attention = "dot_product_attention" in str(value.eqn.source_info.name_stack)
        first, *others = _dtypes(value.eqn)
        narrowest = min([first, *others], key=lambda dtype: jnp.dtype(dtype).itemsize)
        return Work(cost, self._traffic(value), first, attention, narrowest)

    def _traffic(self, value: Value) -> int | float:
        """Bytes that an operation reads and writes in memory, with all that is computed on the way to it."""
        if _fused(value.eqn):
            if not self._written(value):
                return 0.0
        elif value.primitive not in _REDUCTIONS:
            return _inside(value.eqn) / (1 if _local(value) else self.devices)
        written = sum(self._bytes(result) for result in self.results[_key(value)])
        return written + sum(self._bytes(source) for source in self._read(value))

    def _read(self, value: Value) -> Iterable[Value]:
        """The values in memory that a chain of fused operations ending in `value` starts from."""
        seen: dict[int, Value] = {}
        found: dict[int, Value] = {}
        todo = [self._source(v) for v in value.inputs]
        while todo:
            source = todo.pop()
            if id(source) in seen:
                continue
            seen[id(source)] = source
            if source.eqn is not None and _fused(source.eqn) and not self._written(source):
                todo.extend(self._source(v) for v in source.inputs)
            elif source.shape:
                found[id(source)] = source
        return found.values()

    def _written(self, value: Value) -> bool:
        """Whether the result of a fused operation is written: something that can't compute it on the way reads it."""
        key = _key(value)
        readers = self.readers.get(key, [])
        ways = {"fused", *_REDUCTIONS}
        return not readers or any(self.primitives[reader] not in ways for reader in readers)

    def _bytes(self, value: Value) -> int | float:
        return value.bytes if _local(value) else value.bytes / self.devices


def _key(value: Value) -> tuple:
    """An operation in one place: the jaxpr of a function that is called twice is one object."""
    return (id(value.eqn), *map(id, value.inputs))


def _fused(eqn: Any) -> bool:
    """Whether compilers compute an operation where it is read: also a function's, such as `where`, if all of it is."""
    if eqn.primitive.name not in ("jit", "pjit", "custom_jvp_call", "closed_call"):
        return eqn.primitive.name in _FUSED
    return all(_fused(e) or e.primitive.name in _TRANSPARENT for sub in subjaxprs(eqn) for e in sub.eqns)


def _inside(eqn: Any) -> int:
    """Bytes that an operation reads and writes, one of those inside of it at a time, elementwise ones on their way."""
    name, subs = eqn.primitive.name, list(subjaxprs(eqn))
    if subs and name not in ("cond", "while"):
        times = int(eqn.params["length"]) if name == "scan" else 1
        # What one device does, on its own parts, counted for as many as share the rest.
        parts = math.prod(eqn.params["mesh"].shape.values()) if name == "shard_map" else 1
        inner = [eqn for sub in subs for eqn in sub.eqns if eqn.primitive.name not in _FUSED | _TRANSPARENT]
        return times * parts * sum(map(_inside, inner))
    # Loops over rows and choices between kernels touch their operands and results once.
    atoms = [atom for atom in (*eqn.invars, *eqn.outvars) if not hasattr(atom, "val")]
    return sum(math.prod(a.aval.shape) * a.aval.dtype.itemsize for a in atoms if getattr(a.aval, "shape", ()))


def _local(value: Value) -> bool:
    """Whether a value is what one device has, inside `jax.shard_map`."""
    mesh = getattr(getattr(value.aval, "sharding", None), "mesh", None)
    return bool(getattr(mesh, "manual_axes", ()))


def _dtypes(eqn: Any) -> list[str]:
    """The number formats of an operation's floating-point operands: the first is that of its products."""
    dtypes = [v.aval.dtype for v in eqn.invars if hasattr(v.aval, "dtype")]
    return [str(dtype) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)] or ["float32"]
