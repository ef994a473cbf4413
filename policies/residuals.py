"""The census: what a backward pass really keeps from its forward pass, read from the jaxpr."""

import collections
import dataclasses
import enum
import pathlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .activation import Annotation, Placement, annotations, is_activation, named, path_string
from .jaxprs import Program, Value, has_backward
from .report import Table, format_bytes


class PlacementNotApplied(ValueError):
    """An activation doesn't wait where its annotation says; the message names it."""


class Kind(enum.StrEnum):
    """What a kept value is."""

    NAMED = "named"  # an annotated activation
    UNNAMED = "unnamed"  # any other value that the forward pass computed
    ARGUMENT = "argument"  # a parameter or another input, there anyhow
    CAST = "cast"  # a parameter or another input in another dtype
    CONSTANT = "constant"  # computed from no floating-point input: rotary tables, masks


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of a census: values of one kind that the backward pass keeps.

    `shape` is that of one layer; `bytes` counts all `layers`. `label` is an activation's path, an
    argument's path, or, for other values, the operation and the line of code that made them.
    """

    kind: Kind
    label: str
    shape: tuple[int, ...]
    dtype: str
    layers: int
    bytes: int
    memory: Placement


@dataclasses.dataclass(frozen=True)
class Census:
    """What the backward pass of a program keeps, and what became of each name.

    - `entries`: everything kept, in the order in which the backward pass wants it.
    - `statuses`: for each activation and each name in the program `"device"`, `"host"`, `"recomputed"`,
      `"not needed"` (the backward pass doesn't use it), `"same value as NAME"` or `"never tagged"`.
    - `annotations`: the annotated activations, by their path.
    - `raw`: activations whose unnamed original is kept beside them.
    """

    entries: tuple[Entry, ...]
    statuses: dict[str, str]
    annotations: dict[str, Placement]
    raw: tuple[str, ...] = ()

    def bytes(self, *kinds: Kind | str, memory: Placement | str | None = None) -> int:
        """Bytes kept, of the given kinds (named and unnamed values if none is given) and memory (any)."""
        wanted = {Kind(kind) for kind in kinds} or {Kind.NAMED, Kind.UNNAMED}
        return sum(
            e.bytes for e in self.entries if e.kind in wanted and (memory is None or e.memory == Placement.parse(memory))
        )

    @property
    def device_bytes(self) -> int:
        """Bytes of named and unnamed activations that wait in device memory."""
        return self.bytes(memory=Placement.DEVICE)

    @property
    def host_bytes(self) -> int:
        """Bytes of named and unnamed activations that wait in host memory."""
        return self.bytes(memory=Placement.HOST)

    @property
    def unnamed_share(self) -> float:
        """unnamed / (named + unnamed), in bytes; 0 when nothing is kept."""
        return self.bytes(Kind.UNNAMED) / max(self.bytes(), 1)

    def of(self, path: str) -> tuple[Entry, ...]:
        """The kept values of the activation at `path`."""
        return tuple(e for e in self.entries if e.kind is Kind.NAMED and e.label == path)

    def table(self, *, arguments: bool = False) -> Table:
        """The kept values and the names that aren't kept, as a table.

        Arguments are there whether kept or not: they get one line, or one each with `arguments=True`.
        """
        rows = [
            (e.label, e.kind, _array(e.dtype, e.shape), e.layers, format_bytes(e.bytes), e.memory)
            for e in self.entries
            if arguments or e.kind is not Kind.ARGUMENT
        ]
        read = [e for e in self.entries if e.kind is Kind.ARGUMENT]
        if read and not arguments:
            rows.append((f"{len(read)} arguments", "argument", "", "", format_bytes(self.bytes("argument")), "device"))
        kept = {e.label for e in self.entries if e.kind is Kind.NAMED}
        rows += [
            (name, "named", "", "", "", status) for name, status in self.statuses.items() if name not in kept
        ]
        footer = (
            f"activations on the device {format_bytes(self.device_bytes)}, on the host {format_bytes(self.host_bytes)}; "
            f"unnamed {self.unnamed_share:.1%}"
        )
        columns = ("value", "class", "one layer", "layers", "bytes", "waits")
        return Table(columns, rows, title="Kept for the backward pass", footer=footer, paths=True)

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def activations(tree: PyTree, census: Census | None = None) -> Table:
    """The annotated activations of `tree` as a table of path and placement.

    With a `census` of a program over the same tree each row also shows one layer's dtype and shape, and the
    bytes of all layers. `annotations(tree)` in `policies.activation` gives the rows as data.
    """
    columns = ["activation", "placement"]
    rows: list[tuple[Any, ...]] = []
    if census is not None:
        columns += ["one layer", "layers", "bytes", "in the program"]
    for path, activation in annotations(tree):
        row: tuple[Any, ...] = (path, activation.placement)
        if census is not None:
            entries = census.of(path)
            first = entries[0] if entries else None
            row += (
                _array(first.dtype, first.shape) if first else "-",
                sum(e.layers for e in entries) if first else "-",
                format_bytes(sum(e.bytes for e in entries)) if first else "-",
                census.statuses.get(path, "never tagged"),
            )
        rows.append(row)
    return Table(columns, rows, title="Activations", paths=True)


def _array(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def census(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Census:
    """What the backward pass of `function(*args, **kwargs)` keeps. Only traces: nothing is computed.

    **Arguments:**

    - `function`: a loss, a layer, `policies.checkpoint(layer)`, or a whole training step. One that holds
        a backward pass already is read as it is; any other is differentiated with respect to all its
        floating-point arrays, its own leaves included when it is a PyTree.
    - `args`, `kwargs`: its arguments: any PyTrees of arrays or `jax.ShapeDtypeStruct`s and of anything
        else, which is taken as static.

    Activations are listed by their path in the argument (or in `function`) that holds them; when
    several hold some, the position of the argument stands in front.

    Raises TypeError if nothing can be differentiated.
    """
    function, args, kwargs, rows = _name_arguments(function, args, kwargs)
    program = _trace(function, args, kwargs)
    return _Reader(program, rows).census()


def check(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Census:
    """The census of `function(*args, **kwargs)`, once every annotation is found to hold.

    Raises PlacementNotApplied, naming the activation, when one that the backward pass needs waits
    elsewhere than annotated, when a name was never tagged, or when the raw value is kept beside its
    named copy. Names that the backward pass doesn't use, and second names of one value, are no fault.
    """
    found = census(function, *args, **kwargs)
    if not found.annotations:
        raise PlacementNotApplied(
            "no Activation is in reach: pass the annotated module as an argument of the function"
        )
    for path, placement in found.annotations.items():
        _check_one(path, placement, found)
    for path in found.raw:
        raise PlacementNotApplied(
            f"{path!r} is named, but the value before it got its name is kept as well: rebind first "
            "(`x = self.block_input(x)`) and use only the result"
        )
    return found


def _check_one(path: str, placement: Placement, found: Census) -> None:
    status = found.statuses[path]
    if status == "never tagged":
        raise PlacementNotApplied(
            f"{path!r} is annotated {placement.value!r}, but the program never tags a value with it: "
            "the layer must call the Activation on the value it stands for"
        )
    if status == "not needed" or status.startswith("same value"):
        return
    actual = {e.memory.value for e in found.of(path)} or {status.replace("recomputed", "recompute")}
    if actual != {placement.value}:
        tagged = [p for p, s in found.statuses.items() if p in found.annotations and s != "never tagged"]
        applied = any(found.statuses[p] in ("host", "recomputed") for p in tagged)
        cause = (
            "another name or the code around it decides where this value waits"
            if applied
            else "no policy is applied: run the module through policies.checkpoint"
        )
        raise PlacementNotApplied(
            f"{path!r} is annotated {placement.value!r} but waits as {' and '.join(sorted(actual))!r}; {cause}"
        )


def _name_arguments(function: Any, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict, list[Annotation]]:
    """The call with every Activation in it named by its path, and the annotations by those names."""
    model = getattr(function, "model", None)
    if model is not None and hasattr(function, "raw"):
        return function.raw, args, kwargs, annotations(named(model))
    # A module wrapped by `checkpoint` or `eqx.filter_jit` is named from itself, not from its wrapper.
    holder = function
    inner = getattr(function, "module", None)
    if inner is not None and annotations(inner):
        holder = inner
    parts = {"function": holder, **{str(i): a for i, a in enumerate(args)}, **kwargs}
    holding = [key for key, part in parts.items() if annotations(part)]
    if len(holding) <= 1:
        new = {key: named(part) if key in holding else part for key, part in parts.items()}
    else:
        new = dict(parts)
        new.update(named({key: parts[key] for key in holding}))
    if holder is not function and "function" in holding:
        new["function"] = eqx.tree_at(lambda f: f.module, function, new["function"], is_leaf=is_activation)
    elif holder is not function:
        new["function"] = function
    rows = [
        Annotation(node.path or path, node) for key in holding for path, node in annotations(new[key])
    ]
    return new["function"], tuple(new[str(i)] for i in range(len(args))), {k: new[k] for k in kwargs}, rows


def _is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _is_inexact(leaf: Any) -> bool:
    return _is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _trace(function: Any, args: tuple, kwargs: dict) -> Program:
    arrays, static = eqx.partition((function, args, kwargs), _is_array)
    flat, treedef = jax.tree_util.tree_flatten_with_path(arrays)
    leaves = [leaf for _, leaf in flat]
    labels: list[str | None] = [_label(path) for path, _ in flat]

    def call(leaves: list[Any]) -> list[Any]:
        function, args, kwargs = eqx.combine(jax.tree.unflatten(treedef, leaves), static)
        return [x for x in jax.tree.leaves(function(*args, **kwargs)) if eqx.is_array(x)]

    plain = jax.make_jaxpr(call)(leaves)
    if has_backward(plain.jaxpr):
        return Program(plain, labels)
    inexact = [_is_inexact(leaf) for leaf in leaves]
    outputs = [v.aval for v in plain.jaxpr.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    if not any(inexact) or not outputs:
        raise TypeError(
            "a census needs a function from floating-point arrays to floating-point arrays: "
            f"this one takes {sum(inexact)} and returns {len(outputs)}"
        )

    def both(leaves: list[Any], cotangents: list[Any]) -> Any:
        def of_inexact(moving: list[Any]) -> list[Any]:
            parts = iter(moving)
            out = call([next(parts) if is_float else leaf for is_float, leaf in zip(inexact, leaves, strict=True)])
            return [x for x in out if jnp.issubdtype(x.dtype, jnp.inexact)]

        out, pullback = jax.vjp(of_inexact, [leaf for leaf, is_float in zip(leaves, inexact, strict=True) if is_float])
        return out, pullback(cotangents)

    # Traced anew: with equal closures JAX may answer from its cache of `plain`, which is as good.
    closed = jax.make_jaxpr(both)(leaves, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in outputs])
    return Program(closed, labels + [None] * len(outputs))


def _label(path: tuple) -> str:
    """An argument's leaf as text: the position or keyword it came by, then its path in that argument."""
    part, *rest = path
    inner = path_string(tuple(rest))
    # The function's own leaves read like the activations beside them; `checkpoint`'s wrapper isn't part of it.
    return inner.removeprefix("module.") if getattr(part, "idx", None) == 0 else inner


class _Reader:
    """Turns a Program into a Census."""

    def __init__(self, program: Program, rows: list[Annotation]):
        self.program = program
        self.rows = rows
        self.raw_names: dict[int, list[str]] = collections.defaultdict(list)
        self.aliases: dict[str, set[str]] = collections.defaultdict(set)
        for value in program.named:
            self._link(value)

    def _link(self, value: Value) -> None:
        """Notes which values got a name directly, and which names stand on one value."""
        assert value.name is not None
        self.raw_names[id(value.inputs[0])].append(value.name)
        below: Value | None = value.inputs[0]
        while below is not None:
            if below.name is not None:
                self.aliases[value.name].add(below.name)
                self.aliases[below.name].add(value.name)
            below = below.source or below.viewed

    def census(self) -> Census:
        raw: list[str] = []
        merged: dict[tuple, list[int]] = {}
        for value in self.program.kept:
            layers = value.layers
            shape = value.shape[1:] if value.stacked else value.shape
            kind, label = self._classify(value, raw)
            memory = Placement.HOST if value.on_host else Placement.DEVICE
            key = (kind, label, shape, str(value.aval.dtype), memory)
            counts = merged.setdefault(key, [0, 0])
            counts[0] += layers
            counts[1] += value.bytes
        entries = tuple(
            Entry(kind, label, shape, dtype, layers, size, memory)
            for (kind, label, shape, dtype, memory), (layers, size) in merged.items()
        )
        annotated = {row.path: row.placement for row in self.rows}
        statuses = self._statuses(entries, [*annotated, *sorted(self._tagged() - set(annotated))])
        return Census(entries, statuses, annotated, tuple(dict.fromkeys(raw)))

    def _tagged(self) -> set[str]:
        return self.program.forward_names | self.program.backward_names

    def _statuses(self, entries: tuple[Entry, ...], names: list[str]) -> dict[str, str]:
        kept: dict[str, set[str]] = collections.defaultdict(set)
        for entry in entries:
            if entry.kind is Kind.NAMED:
                kept[entry.label].add(entry.memory.value)
        out = {}
        for name in names:
            again = name in self.program.backward_names
            partners = sorted(p for p in self.aliases[name] if p in kept or p in self.program.backward_names)
            if name in kept:
                out[name] = " and ".join(sorted(kept[name]))
            elif partners and (not again or partners[0] in kept):
                out[name] = f"same value as {partners[0]}"
            elif again:
                out[name] = "recomputed"
            elif name in self.program.forward_names:
                out[name] = "not needed"
            else:
                out[name] = "never tagged"
        return out

    def _classify(self, value: Value, raw: list[str]) -> tuple[Kind, str]:
        if value.constant:
            return Kind.CONSTANT, _made_by(value)
        inner = value
        cast = False
        while True:
            if inner.name is not None:
                return Kind.NAMED, inner.name
            if inner.argument is not None:
                return (Kind.CAST if cast else Kind.ARGUMENT), inner.argument
            if inner.carry:
                break
            if inner.stacked and inner.body is not None:
                inner = inner.body
            elif inner.body is not None and not inner.stacked and inner.layers == 1 and inner.primitive == "scan":
                # A carry's last value, or the slice of an input that a loop runs over.
                if inner.body.argument is not None:
                    inner = inner.body
                else:
                    break
            elif inner.source is not None:
                inner = inner.source
            elif self._from_argument(inner):
                # A rearranged or cast part of an input is no activation.
                cast = cast or inner.primitive == "convert_element_type"
                inner = inner.inputs[0]
            else:
                break
        names = self.raw_names.get(id(inner), [])
        raw.extend(names)
        return Kind.UNNAMED, f"raw {names[0]}" if names else _made_by(inner)

    @staticmethod
    def _from_argument(value: Value) -> bool:
        """Whether a value is an argument's elements, whatever their layout and dtype."""
        while value.argument is None:
            step = value.source or value.viewed or value.part_of
            if step is None and value.primitive in ("convert_element_type", "stack", "concatenate", "broadcast_in_dim"):
                step = value.inputs[0]
            if step is None and value.primitive == "scan" and value.body is not None and not value.stacked:
                step = value.body if value.body.argument is not None else None
            if step is None or step.name is not None or step.carry:
                return False
            value = step
        return True


def _made_by(value: Value) -> str:
    if value.carry:
        return "a loop's carry"
    if value.body is not None and value.primitive == "scan":
        return "a loop's result"
    if value.eqn is None:
        return "captured array"
    line = _user_line(value.eqn.source_info)
    return f"{value.primitive} at {line}" if line else value.primitive


def _user_line(source_info: Any) -> str:
    """The innermost line of code outside JAX and Equinox that an eqn comes from, or nothing."""
    for frame in getattr(getattr(source_info, "traceback", None), "frames", ()):
        path = pathlib.PurePath(frame.file_name)
        if not {"jax", "jaxlib", "equinox", "jaxtyping", "_src"}.intersection(path.parts) and path.suffix == ".py":
            return f"{path.name}:{frame.line_num}"
    return ""
