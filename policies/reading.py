"""From a traced program to a census: which class each kept value belongs to, and what became of each name."""

import collections
import pathlib
from typing import Any

from .activation import Annotation, Placement
from .counted import Census, Entry, Kind
from .cuts import Partition
from .jaxprs import Program, Value


class Reader:
    """Turns a Program into a Census."""

    def __init__(self, program: Program, rows: list[Annotation]):
        self.program = program
        self.rows = rows
        self.partition = Partition()
        self.raw_names: dict[int, list[str]] = collections.defaultdict(list)
        self.aliases: dict[str, set[str]] = collections.defaultdict(set)
        self.raw_arguments: list[str] = []  # names on arguments, which are there anyhow
        self.outputs: set[str] = set()  # names of what a loop keeps as its carry
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
            counts = merged.setdefault(key, [0, 0, 0, 0])
            counts[0] += layers
            counts[1] += value.bytes
            counts[2] += self.partition.bytes(value)
            counts[3] += 1
        entries = tuple(
            Entry(kind, label, shape, dtype, layers, size, memory, shard, arrays)
            for (kind, label, shape, dtype, memory), (layers, size, shard, arrays) in merged.items()
        )
        annotated = {row.path: row.placement for row in self.rows}
        raw += [name for name in self.raw_arguments if annotated.get(name) is not Placement.DEVICE]
        statuses = self._statuses(entries, [*annotated, *sorted(self._tagged() - set(annotated))])
        again = tuple(sorted(self.program.again_offloaded))
        devices = self.partition.devices
        outputs = tuple(sorted(self.outputs))
        return Census(entries, statuses, annotated, tuple(dict.fromkeys(raw)), devices, again, self._sizes(), outputs)

    def _sizes(self) -> dict[str, int]:
        """What each tagged value weighs on one device."""
        sizes: dict[str, int] = collections.defaultdict(int)
        for value, times in self.program.tagged:
            sizes[value.name] += times * self.partition.bytes(value)
        if self.partition.devices == 1:  # of what only the backward pass makes no cut is known
            sizes |= {name: size for name, size in self.program.again_bytes.items() if name not in sizes}
        return dict(sizes)

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
        inner = value
        cast = False
        while True:
            # A name comes first: it may well stand on an argument or a constant.
            if inner.name is not None:
                return Kind.NAMED, inner.name
            if inner.argument is not None:
                self.raw_arguments += self.raw_names.get(id(inner), [])
                return (Kind.CAST if cast else Kind.ARGUMENT), inner.argument
            if inner.carry:
                break
            if inner.body is not None and (inner.stacked or inner.primitive in ("cond", "shard_map")):
                inner = inner.body
            elif inner.body is not None and inner.primitive == "scan":
                # The slice of an input that a loop runs over; or else a carry's last value, which is a new one.
                if inner.body.argument is None:
                    break
                inner = inner.body
            elif inner.source is not None:
                inner = inner.source
            elif _from_argument(inner):
                # A rearranged or cast part of an input is no activation.
                cast = cast or inner.primitive == "convert_element_type"
                inner = inner.inputs[0]
            else:
                break
        names = self.raw_names.get(id(inner), [])
        raw.extend(names)
        if inner.carry:
            self.outputs |= self.program.carried.get(id(inner), set())
        if value.constant:
            return Kind.CONSTANT, _made_by(value)
        return Kind.UNNAMED, f"raw {names[0]}" if names else _made_by(inner)


def _from_argument(value: Value) -> bool:
    """Whether a value is an argument's elements, whatever their layout and dtype."""
    if value.argument is not None:
        return True
    if value.name is not None or value.carry:
        return False
    if value.primitive in ("stack", "concatenate"):
        return all(map(_from_argument, value.inputs))
    step = value.source or value.viewed or value.part_of
    if step is None and value.primitive in ("convert_element_type", "broadcast_in_dim"):
        step = value.inputs[0]
    if step is None and value.primitive == "scan" and value.body is not None and not value.stacked:
        step = value.body if value.body.argument is not None else None
    return step is not None and _from_argument(step)


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
