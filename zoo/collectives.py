"""What the devices of a compiled program send each other: its collectives, from the program's text."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from ..policies import hlo
from ..policies.axes import Layout
from ..policies.report import Table, format_bytes

# Longer names first: each is matched as the beginning of an operation's name.
KINDS = (
    "ragged-all-to-all", "all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-broadcast",
    "collective-permute",
)  # fmt: skip

Group = tuple[int, ...]


class Collective(NamedTuple):
    """One collective operation of a program."""

    kind: str  # one of `KINDS`
    axes: tuple[str, ...] | None  # of the mesh that it goes over; None where its groups are none of the mesh's
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # dtypes and shapes of its result on one device
    bytes: int  # of that result
    runs: int  # how often it runs in one run of the program; loops of unknown length count as one turn
    known: bool  # whether the length of each loop around it is known
    group: int  # how many devices take part with each other
    source: str  # the operation in JAX that it comes from, as far as the compiler remembers


def find_collectives(compiled: Any, mesh: Mesh | AbstractMesh | Layout | None = None) -> "Collectives":
    """The collectives of a compiled program.

    **Arguments:**

    - `compiled`: what `jax.jit(f).lower(...).compile()` gives, for any backend, or its text.
    - `mesh`: the mesh that it was compiled for. Without one the axes are unknown.

    Branches of a conditional count as if each ran. Raises ValueError for text that is no compiled program's.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    mesh = mesh.mesh if isinstance(mesh, Layout) else mesh
    program = hlo.parse(text)
    axes_of = _Axes(mesh)
    found: list[Collective] = []
    for visit in program.visits():
        for one in program.computations.get(visit.name, ()):
            kind = next((k for k in KINDS if one.operation in (k, f"{k}-start")), None)
            if kind is None:
                continue
            axes, size = axes_of(kind, one.line)
            result = _result(one, kind)
            if visit.caller is not None and visit.caller.operation == "fusion":
                if visit.name.startswith("all-reduce-scatter"):
                    # How a TPU's program writes a reduce-scatter: a fusion of a sum and a slice of it.
                    kind, result = "reduce-scatter", visit.caller.shape
            shapes = _shapes(result)
            found.append(Collective(kind, axes, shapes, sum(_bytes(*s) for s in shapes), visit.runs, visit.known, size,
                                    one.op_name))  # fmt: skip
    return Collectives(found, mesh)


class Collectives:
    """The collectives of a program: `entries` as data, and a table of them by kind and axes when printed."""

    def __init__(self, entries: list[Collective], mesh: Mesh | AbstractMesh | None = None):
        self.entries, self.mesh = entries, mesh

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.entries)

    def of(self, kind: str, *axes: str) -> "Collectives":
        """Those of one kind, and over these mesh axes (in any order) when some are given."""
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is not one of {', '.join(KINDS)}")
        picked = [e for e in self.entries if e.kind == kind and (not axes or set(e.axes or ()) == set(axes))]
        return Collectives(picked, self.mesh)

    @property
    def bytes(self) -> int:
        """What all results weigh on one device in one run of the program."""
        return sum(entry.bytes * entry.runs for entry in self.entries)

    @property
    def runs(self) -> int:
        """How many collectives one run of the program has."""
        return sum(entry.runs for entry in self.entries)

    @property
    def known(self) -> bool:
        """Whether these are exact numbers: no loop of unknown length is around a collective."""
        return all(entry.known for entry in self.entries)

    def grouped(self) -> dict[tuple[str, tuple[str, ...] | None], "Collectives"]:
        """By kind and axes, the heaviest first."""
        groups: dict[tuple[str, tuple[str, ...] | None], list[Collective]] = {}
        for entry in self.entries:
            groups.setdefault((entry.kind, entry.axes), []).append(entry)
        parts = {key: Collectives(entries, self.mesh) for key, entries in groups.items()}
        return dict(sorted(parts.items(), key=lambda item: -item[1].bytes))

    def as_json(self) -> list[dict[str, Any]]:
        """Each entry as a dictionary of plain values."""
        return [
            entry._asdict()
            | {"axes": None if entry.axes is None else list(entry.axes),
               "shapes": [f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in entry.shapes]}
            for entry in self.entries
        ]  # fmt: skip

    def table(self) -> Table:
        rows = []
        for (kind, axes), part in self.grouped().items():
            least = "" if part.known else "at least "
            largest = max(part, key=lambda entry: entry.bytes)
            heaviest = sorted(largest.shapes, key=lambda shape: -_bytes(*shape))[:2]
            shapes = " ".join(f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in heaviest)
            shapes += " ..." if len(largest.shapes) > 2 else ""
            rows.append((kind, _text(axes, part), len(part), f"{least}{part.runs}", format_bytes(part.bytes), shapes,
                         format_bytes(largest.bytes)))  # fmt: skip
        columns = ("collective", "over", "in the program", "times", "bytes in all", "largest result", "bytes")
        least = "" if self.known else "at least "
        footer = (
            f"{least}{self.runs} in one run, with results of {format_bytes(self.bytes)} on each device"
            if self.entries
            else "none: the devices send each other nothing"
        )
        return Table(columns, rows, title="Collectives", footer=footer)

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _text(axes: tuple[str, ...] | None, part: Collectives) -> str:
    if axes is None:
        sizes = sorted({entry.group for entry in part})
        return f"axes unknown, groups of {' or '.join(map(str, sizes))}"
    return "*".join(axes) or "one device"


def _result(one: hlo.Instruction, kind: str) -> str:
    """The part of a shape that is the result: what an operation that only starts gives holds its operand too."""
    if one.operation == kind or not one.shape.startswith("("):
        return one.shape
    parts = hlo.elements(one.shape)
    if kind == "all-reduce" and not parts[0].startswith("("):
        return one.shape  # of several arrays at once
    return parts[1]


def _shapes(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((leaf.dtype, leaf.shape) for _, leaf in hlo.arrays(text))


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.ceil(math.prod(shape) * hlo.bits(dtype) / 8)


class _Axes:
    """From the groups of devices in a program to axes of its mesh.

    A program numbers its devices in the order of the mesh, whatever their ids.
    """

    def __init__(self, mesh: Mesh | AbstractMesh | None):
        self.sizes: Mapping[str, int] = {} if mesh is None else dict(mesh.shape)
        self.count = math.prod(self.sizes.values())
        self.known: dict[frozenset[frozenset[int]], tuple[str, ...]] = {}
        # An axis of one device makes no difference to groups: none is named.
        names = [name for name, size in self.sizes.items() if size > 1]
        for length in range(len(names) + 1) if self.sizes else ():
            for axes in itertools.combinations(names, length):
                self.known[_partition(_along(self.sizes, axes))] = axes
        self.seen: dict[str, tuple[tuple[str, ...] | None, int]] = {}

    def __call__(self, kind: str, line: str) -> tuple[tuple[str, ...] | None, int]:
        """The axes of a collective, and how many devices are in one of its groups."""
        key = "source_target_pairs=" if kind == "collective-permute" else "replica_groups="
        _, found, rest = line.partition(key)
        text = _value(rest) if found else "{}"
        if (kind, text) not in self.seen:
            self.seen[kind, text] = self._pairs(text) if found and "source" in key else self._groups(text)
        return self.seen[kind, text]

    def _groups(self, text: str) -> tuple[tuple[str, ...] | None, int]:
        groups = _expand(text) or [tuple(range(self.count))]
        return self.known.get(_partition(groups)), max(map(len, groups))

    def _pairs(self, text: str) -> tuple[tuple[str, ...] | None, int]:
        pairs = [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", text)]
        if not self.sizes or any(max(pair) >= self.count for pair in pairs):
            return None, 2
        shape = tuple(self.sizes.values())
        moved = np.zeros(len(shape), bool)
        for source, target in pairs:
            moved |= np.array(np.unravel_index(source, shape)) != np.array(np.unravel_index(target, shape))
        return tuple(name for name, moves in zip(self.sizes, moved, strict=True) if moves), 2


def _value(text: str) -> str:
    """The value of an attribute that `text` begins with: up to the comma that ends it."""
    if text.startswith("mesh["):
        return text[: text.index("}") + 1]
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "({[") - (character in ")}]")
        if character in ", " and not depth:
            return text[:i]
    return text


def _partition(groups: list[Group]) -> frozenset[frozenset[int]]:
    return frozenset(map(frozenset, groups))


def _along(sizes: Mapping[Any, int], axes: tuple[Any, ...], order: np.ndarray | None = None) -> list[Group]:
    """The groups of devices that differ only along `axes` of a mesh with these sizes."""
    names, shape = list(sizes), tuple(sizes.values())
    ids = (np.arange(math.prod(shape)) if order is None else order).reshape(shape)
    mine = [names.index(name) for name in axes]
    rest = [i for i in range(len(names)) if i not in mine]
    size = math.prod(shape[i] for i in mine)
    return [tuple(row) for row in ids.transpose(*rest, *mine).reshape(-1, size).tolist()]


def _iota(text: str) -> np.ndarray:
    """The array that `[2,4]<=[4,2]T(1,0)` stands for, or `[4,2]T(1,0)` where the transposed shape is the result's."""
    found = re.match(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?", text)
    shape, source, order = (None if part is None else [int(n) for n in part.split(",")] for part in found.groups())
    ids = np.arange(math.prod(shape)).reshape(source or shape)
    ids = ids.transpose(order) if order else ids
    return ids.reshape(shape) if source else ids


def _expand(text: str) -> list[Group]:
    """The groups that `replica_groups` lists, in any of its three forms; empty where all devices are one group."""
    if text.startswith("["):
        return [tuple(row) for row in _iota(text).tolist()]
    if not text.startswith("mesh["):
        return [tuple(int(n) for n in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", text)]
    # mesh['a'=2,'b'=8] {'a','b':(2)2}: axes of a mesh of the compiler's own, where 'b':(2)2 is a part of b, the
    # middle one of b as [2, 2, 2].
    head, _, tail = text.partition("{")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", head)}
    picked = [
        (name, int(before or 1), int(before or 1) * int(size or sizes[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", tail)
    ]
    fine = {}
    for name, size in sizes.items():
        cuts = sorted({1, size, *(cut for other, *ends in picked if other == name for cut in ends)})
        fine |= {(name, low): high // low for low, high in itertools.pairwise(cuts)} or {(name, 1): 1}
    along = [key for name, low, high in picked for key in fine if key[0] == name and low <= key[1] < high]
    order = None
    if "device_ids=" in head:
        # Devices in an order of their own: as iota, or each of them.
        text = head.partition("device_ids=")[2].strip("( ")
        order = _iota(text) if text.startswith("[") else np.array([int(n) for n in re.findall(r"\d+", text)])
        if order.size != math.prod(sizes.values()):
            return [()]
    return _along(fine, tuple(along), order)
