"""Reading jaxprs: one value graph through calls, loops and both passes, on every supported version of JAX.

Only what a jaxpr shows by itself is used (primitive names, avals, name stacks): the parameters of `scan`
and the classes behind jaxprs differ between versions.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

# Eqns whose single sub-jaxpr takes exactly their inputs: read as if they were inlined.
_CALLS = {"pjit", "jit", "closed_call", "core_call", "call", "remat", "remat2", "checkpoint", "custom_jvp_call",
          "custom_vjp_call", "custom_vjp_call_jaxpr", "core_closed_call"}  # fmt: skip
# Eqns that hand on the value of their first input: where it lies or how XLA may treat it is all that changes.
_SAME = {"name", "device_put", "reduce_precision", "copy", "copy_p", "optimization_barrier", "sharding_constraint",
         "mesh_cast", "reshard", "pvary", "pbroadcast", "pcast"}  # fmt: skip
# Eqns that lay the same elements out anew, or pick some of them.
_VIEWS = {"reshape", "squeeze", "expand_dims", "transpose", "rev"}
_PARTS = {"slice", "dynamic_slice", "unstack", "split"}


@dataclasses.dataclass(eq=False)
class Value:
    """A value in a traced program: what it is made by, and from what.

    `body` is set for what a forward loop stacks or hands out: the value inside the loop's body.
    """

    aval: Any
    eqn: Any = None
    inputs: tuple["Value", ...] = ()
    argument: str | None = None
    constant: bool = False  # a captured array, a literal, or computed from such and from integers alone
    backward: bool = False  # belongs to the backward pass or comes after it
    carry: bool = False  # a loop's carry, seen inside the body
    body: "Value | None" = None
    layers: int = 1
    stacked: bool = False
    placed: Any = None  # an argument's sharding, where it has one

    @property
    def primitive(self) -> str:
        return self.eqn.primitive.name if self.eqn is not None else ""

    @property
    def source(self) -> "Value | None":
        """What this value is the same as but for its name, memory or layout constraint; None if nothing."""
        return self.inputs[0] if self.primitive in _SAME and self.inputs else None

    @property
    def viewed(self) -> "Value | None":
        """What this value is a rearrangement of; None if it is none."""
        return self.inputs[0] if self.primitive in _VIEWS and self.inputs else None

    @property
    def part_of(self) -> "Value | None":
        return self.inputs[0] if self.primitive in _PARTS and self.inputs else None

    @property
    def name(self) -> str | None:
        return self.eqn.params["name"] if self.primitive == "name" else None

    @property
    def on_host(self) -> bool:
        return getattr(self.aval, "memory_space", None) == jax.memory.Space.Host

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self.aval, "shape", ()))

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.aval.dtype.itemsize


def subjaxprs(eqn: Any) -> Iterator[Any]:
    """The open jaxprs among an eqn's parameters."""
    for param in eqn.params.values():
        for item in param if isinstance(param, (tuple, list)) else (param,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item


def names_in(jaxpr: Any) -> set[str]:
    """Every name that a jaxpr tags a value with, at any depth."""
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            found.add(eqn.params["name"])
        for sub in subjaxprs(eqn):
            found |= names_in(sub)
    return found


def offloaded_in(jaxpr: Any) -> set[str]:
    """The names whose values a jaxpr moves to host memory, at any depth."""
    named, found = {}, set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            named[eqn.outvars[0]] = eqn.params["name"]
        elif eqn.primitive.name == "device_put" and not hasattr(eqn.invars[0], "val") and eqn.invars[0] in named:
            if getattr(eqn.outvars[0].aval, "memory_space", None) == jax.memory.Space.Host:
                found.add(named[eqn.invars[0]])
        for sub in subjaxprs(eqn):
            found |= offloaded_in(sub)
    return found


def named_bytes(jaxpr: Any) -> dict[str, int]:
    """The bytes that each name of a jaxpr stands on, at any depth and in all steps of its loops."""
    sizes: dict[str, int] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            size = Value(eqn.outvars[0].aval).bytes
            sizes[eqn.params["name"]] = sizes.get(eqn.params["name"], 0) + size
        times = int(eqn.params["length"]) if eqn.primitive.name == "scan" else 1
        for sub in subjaxprs(eqn):
            for name, size in named_bytes(sub).items():
                sizes[name] = sizes.get(name, 0) + times * size
    return sizes


def is_transposed(eqn: Any) -> bool:
    """Whether an eqn belongs to a backward pass: JAX writes the transformation into its name stack."""
    return "transpose(" in str(eqn.source_info.name_stack)


def has_backward(jaxpr: Any) -> bool:
    return any(is_transposed(eqn) or any(map(has_backward, subjaxprs(eqn))) for eqn in jaxpr.eqns)


def is_inexact(aval: Any) -> bool:
    """Whether a gradient can pass through values of this type."""
    return jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact)


class Program:
    """A traced function as a graph of `Value`s, with what its backward pass reads from its forward pass.

    **Arguments:**

    - `closed`: a ClosedJaxpr that holds both passes.
    - `arguments`: a label for each input; None marks one that belongs to the backward pass (a cotangent).
    - `shardings`: of the inputs, where they have one.
    """

    def __init__(self, closed: Any, arguments: list[str | None], shardings: Sequence[Any] = ()):
        self.named: list[Value] = []  # every value that a name stands on, forward
        self.tagged: list[tuple[Value, int]] = []  # the same, and how often loops around it make it
        self.again_bytes: dict[str, int] = {}  # of what the backward pass tags, computing it again
        self.carried: dict[int, set[str]] = {}  # by a loop's carry: the names of what its next step gets for it
        self._times = 1
        self.forward_names: set[str] = set()
        self.backward_names: set[str] = set()
        self.again_offloaded: set[str] = set()  # names whose value the backward pass itself moves to the host
        self._kept: dict[int, Value] = {}
        inputs = [
            Value(v.aval, argument=label, backward=label is None, placed=placed)
            for v, label, placed in itertools.zip_longest(closed.jaxpr.invars, arguments, shardings)
        ]
        consts = [Value(v.aval, constant=True) for v in closed.jaxpr.constvars]
        self.outputs = self._run(closed.jaxpr, consts, inputs, transposed=False)

    @property
    def kept(self) -> list[Value]:
        """The forward pass's values that the backward pass reads, in the order of their first use."""
        return list(self._kept.values())

    def _run(self, jaxpr: Any, consts: list[Value], inputs: list[Value], transposed: bool) -> list[Value]:
        env: dict[Any, Value] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

        def read(atom: Any) -> Value:
            return Value(atom.aval, constant=True) if hasattr(atom, "val") else env[atom]

        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            if transposed or is_transposed(eqn):
                outputs = self._backward(eqn, values)
            else:
                outputs = self._forward(eqn, values)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _backward(self, eqn: Any, values: list[Value]) -> list[Value]:
        for sub in subjaxprs(eqn):
            self.backward_names |= names_in(sub)
            self.again_offloaded |= offloaded_in(sub)
            for name, size in named_bytes(sub).items():
                self.again_bytes[name] = max(size, self.again_bytes.get(name, 0))
        if eqn.primitive.name == "name":
            self.backward_names.add(eqn.params["name"])
        for value in values:
            # A constant filled from one number is no memory: the compiler makes it where it is used.
            if not value.backward and not _is_fill(value):
                self._kept.setdefault(id(value), value)
        return [Value(v.aval, eqn, tuple(values), backward=True) for v in eqn.outvars]

    def _forward(self, eqn: Any, values: list[Value]) -> list[Value]:
        primitive = eqn.primitive.name
        subs = list(subjaxprs(eqn))
        if primitive in _CALLS and subs and len(subs[0].invars) == len(values):
            consts = [Value(v.aval, constant=True) for v in subs[0].constvars]
            return self._run(subs[0], consts, values, transposed=False)
        after = any(value.backward for value in values)
        if primitive == "scan":
            return self._scan(eqn, subs[0], values, after)
        if any(map(has_backward, subs)):
            return self._branches(eqn, subs, values)
        if primitive == "cond":
            return self._cond(eqn, subs, values, after)
        if primitive == "shard_map" and len(subs) == 1 and len(subs[0].invars) == len(values):
            return self._shard_map(eqn, subs[0], values, after)
        for sub in subs:
            self.forward_names |= names_in(sub)
        outputs = [self._made(v.aval, eqn, values, after) for v in eqn.outvars]
        if primitive == "name":
            (self.backward_names if after else self.forward_names).add(eqn.params["name"])
            self.named.extend(outputs)
            self.tagged += [(output, self._times) for output in outputs]
        return outputs

    @staticmethod
    def _made(aval: Any, eqn: Any, values: list[Value], after: bool) -> Value:
        fixed = all(v.constant or (v.argument is not None and not is_inexact(v.aval)) for v in values)
        return Value(aval, eqn, tuple(values), constant=fixed, backward=after)

    def _scan(self, eqn: Any, body: Any, values: list[Value], after: bool) -> list[Value]:
        # Stacked inputs and outputs have one axis more outside than inside; that tells them from the rest.
        num_carry = sum(len(o.aval.shape) == len(b.aval.shape) for o, b in zip(eqn.outvars, body.outvars, strict=True))
        whole = [len(o.aval.shape) == len(b.aval.shape) for o, b in zip(eqn.invars, body.invars, strict=True)]
        num_consts = sum(whole) - num_carry
        length = int(eqn.params["length"])
        inner: list[Value] = []
        for index, (value, var) in enumerate(zip(values, body.invars, strict=True)):
            if index < num_consts:
                inner.append(value)
            elif whole[index]:
                # What a carry holds depends on the loop, so it is never a constant.
                inner.append(Value(var.aval, inputs=(value,), carry=True, backward=value.backward))
            else:
                label = value.argument
                piece = Value(var.aval, eqn, (value,), label, value.constant, value.backward)
                piece.body = value  # the whole that this is a slice of
                inner.append(piece)
        consts = [Value(v.aval, constant=True) for v in body.constvars]
        before, self._times = self._times, self._times * length
        outs = self._run(body, consts, inner, transposed=False)
        self._times = before
        for value, out in zip(inner[num_consts : num_consts + num_carry], outs, strict=False):
            self.carried[id(value)] = _names_of(out)
        results = []
        for index, (var, out) in enumerate(zip(eqn.outvars, outs, strict=True)):
            stacked = index >= num_carry
            constant = stacked and out.constant
            results.append(
                Value(var.aval, eqn, tuple(values), constant=constant, backward=after or out.backward, body=out,
                      layers=length if stacked else 1, stacked=stacked)  # fmt: skip
            )
        return results

    def _cond(self, eqn: Any, subs: list[Any], values: list[Value], after: bool) -> list[Value]:
        """A choice within the forward pass. What one branch keeps, the others fill with zeros."""
        branches = [
            self._run(sub, [Value(v.aval, constant=True) for v in sub.constvars], values[1:], transposed=False)
            for sub in subs
        ]
        results = []
        for var, *outs in zip(eqn.outvars, *branches, strict=True):
            out = self._made(var.aval, eqn, values, after)
            out.constant = all(o.constant for o in outs)
            out.body = next((o for o in outs if not _is_fill(o)), outs[0])
            results.append(out)
        return results

    def _shard_map(self, eqn: Any, sub: Any, values: list[Value], after: bool) -> list[Value]:
        """What each device computes on its own part: names in it stand on parts, and so do the values behind them."""
        inner = [
            Value(var.aval, eqn, (value,), value.argument, value.constant, value.backward, body=value)
            for var, value in zip(sub.invars, values, strict=True)
        ]
        outs = self._run(sub, [Value(v.aval, constant=True) for v in sub.constvars], inner, transposed=False)
        results = []
        for var, out in zip(eqn.outvars, outs, strict=True):
            result = self._made(var.aval, eqn, values, after)
            result.body = out
            results.append(result)
        return results

    def _branches(self, eqn: Any, subs: list[Any], values: list[Value]) -> list[Value]:
        """A `cond` or `while` that holds both passes: each of its jaxprs is read on its own inputs."""
        for sub in subs:
            inputs = values[len(values) - len(sub.invars) :] if len(sub.invars) <= len(values) else None
            if inputs is None:
                inputs = [Value(v.aval, carry=True) for v in sub.invars]
            consts = [Value(v.aval, constant=True) for v in sub.constvars]
            self._run(sub, consts, inputs, transposed=False)
        return [Value(v.aval, eqn, tuple(values), backward=True) for v in eqn.outvars]


def _names_of(value: Value | None) -> set[str]:
    """The names that stand on a value, whatever its layout."""
    names = set()
    while value is not None:
        if value.name is not None:
            names.add(value.name)
        value = value.source or value.viewed
    return names


def _is_fill(value: Value) -> bool:
    if value.primitive in {"broadcast_in_dim", *_SAME, *_VIEWS, "convert_element_type"} and value.inputs:
        return _is_fill(value.inputs[0])
    return value.constant and value.shape == ()
