"""Which arrays of a compiled program share memory on the host, how much of it there is, and how long it is used."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .hlo import HOST, Array, Instruction, Path, Program, Visit

# What gives on the memory of its first operand.
SAME = {"bitcast", "dynamic-update-slice", "opt-barrier", "domain", "add-dependency"}
# What only gives arrays on.
PASSES = SAME - {"dynamic-update-slice"} | {
    "parameter", "constant", "tuple", "get-tuple-element", "while", "conditional", "call", "after-all"
}  # fmt: skip
# Of what is started and waited for: these belong to the start.
ENDS = ("-done", "-update")
_MARK = f"S({HOST})"
_ALIASES = re.compile(r"output_to_operand_aliasing=\{(.*?\))\}")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")

Key = tuple[str, str, Path]  # a computation, an instruction in it, and which array of its result


class Buffer(NamedTuple):
    """Memory that the program takes on the host for itself: neither an argument's nor a result's."""

    key: Key  # of what stands for all arrays in it
    array: Array
    first: int  # when it is first and last used, by `Buffers.clock`
    last: int


def on_host(one: Instruction) -> list[tuple[Path, Array]]:
    """The arrays on the host in the result of `one`."""
    return [(path, leaf) for path, leaf in one.arrays if leaf.memory == HOST] if _MARK in one.shape else []


def moved_by(one: Instruction) -> str:
    """The computation that a fusion runs, at once or as something that is only started."""
    operation = one.operation.removesuffix("-start")
    return one.called.get("calls", [""])[0] if operation in ("fusion", "async") else ""


def scheduled(program: Program) -> dict[str, list[Visit]]:
    """The computations whose instructions run one after the other, and from where they are called."""
    found: dict[str, list[Visit]] = {}
    for visit in program.visits():
        if visit.caller is None or visit.caller.operation in ("while", "conditional", "call", "call-start"):
            found.setdefault(visit.name, []).append(visit)
    return found


class Buffers:
    """The memory on the host that a program uses. Arrays that are the same memory are one: a loop's are its body's."""

    def __init__(self, program: Program, names: list[str]):
        self.program = program
        self.above: dict[Key, Key] = {}
        self.clock: dict[tuple[str, str], tuple[int, int]] = {}  # when each instruction begins and ends
        made: list[tuple[Key, Array]] = []
        for name in names:
            for one in program.computations.get(name, ()):
                if _MARK in one.line:
                    made += self._join(name, one)
        entry = program.entry
        outside = {
            self.find((entry, one.name, path))
            for one in program.computations[entry]
            if one.operation == "parameter" or one.root
            for path, _ in on_host(one)
        }
        inside: dict[Key, Array] = {}
        for key, leaf in made:
            group = self.find(key)
            if group not in outside and (group not in inside or inside[group].bytes < leaf.bytes):
                inside[group] = leaf
        spans: dict[Key, tuple[int, int]] = {}
        for key, begin, end in self._uses(entry):
            first, last = spans.get(group := self.find(key), (begin, end))
            spans[group] = min(first, begin), max(last, end)
        self.found = [Buffer(group, leaf, *spans.get(group, (0, 0))) for group, leaf in inside.items()]
        arguments = [leaf for one in program.computations[entry] if one.operation == "parameter"
                     for _, leaf in on_host(one)]  # fmt: skip
        self.arguments = len(arguments), sum(leaf.bytes for leaf in arguments)

    @property
    def heap(self) -> int:
        """The bytes that these buffers take together, where those that are never in use together may share some."""
        # Beginnings and ends in order, as times; what ends where another begins is out of its way.
        changes = sorted([(one.first, 1, i) for i, one in enumerate(self.found)]
                         + [(one.last, 0, i) for i, one in enumerate(self.found)])  # fmt: skip
        times = np.zeros((2, len(self.found)), int)
        for at, (_, begins, i) in enumerate(changes):
            times[1 - begins, i] = at
        sizes = np.array([one.array.bytes for one in self.found], int)
        alive = np.cumsum([(2 * begins - 1) * self.found[i].array.bytes for _, begins, i in changes])
        least = int(max(alive, default=0))
        if least == sizes.sum():
            return least
        length = times[1] - times[0]
        # XLA places them by size and by time, and takes what needs less.
        orders = np.lexsort((times[0], -length, -sizes)), np.lexsort((times[0], -sizes, -length))
        return min(_packed(sizes[order], times[:, order]) for order in orders)

    def find(self, key: Key) -> Key:
        """What stands for all arrays that are the same memory as this."""
        while (above := self.above.setdefault(key, key)) != key:
            self.above[key] = self.above.setdefault(above, above)
            key = above
        return key

    def _same(self, one: Key, other: Key) -> None:
        self.above[self.find(one)] = self.find(other)

    def _join(self, name: str, one: Instruction) -> Iterator[tuple[Key, Array]]:
        """Join what `one` gives on the host with what it gives on. Yields what is new memory."""
        operands, operation, called = one.operands, one.operation, one.called
        if operation in ("call", "call-start", "conditional"):
            self._given(name, one)
        for path, leaf in on_host(one):
            key, others = (name, one.name, path), []
            if operation == "parameter":
                continue
            if operation in SAME:
                others = [(name, operands[0], path)]
            elif operation == "tuple":
                others = [(name, operands[path[0]], path[1:])]
            elif operation == "get-tuple-element":
                others = [(name, operands[0], (one.index, *path))]
            elif operation == "while":
                inner = called["body"][0], called["condition"][0]
                results = [(part, self.program.parameter(part, 0)) for part in inner]
                results.append((inner[0], self.program.root(inner[0])))
                others = [(name, operands[0], path), *((part, at.name, path) for part, at in results if at is not None)]
            elif operation in ("call", "conditional"):
                inner = [name for role, names in called.items() if role != "condition" for name in names]
                roots = [(part, self.program.root(part)) for part in inner]
                others = [(part, at.name, path) for part, at in roots if at is not None]
            elif operation == "copy-start":
                others = [(name, operands[0], ())] if path == (1,) else []
            elif operation.endswith("-start") and len(path) > 1 and path[0] == 0:
                others = [(name, operands[path[1]], path[2:])]
            elif operation.endswith("-update"):
                others = [(name, operands[0], path)]
            elif operation.endswith("-done"):
                others = [(name, operands[0], (0 if operation == "copy-done" else 1, *path))]
            elif (source := self._source(one, path[1:] if operation.endswith("-start") else path)) is not None:
                others = [(name, operands[source[0]], source[1])]
            for other in others:
                self._same(key, other)
            if not others:
                yield key, leaf

    def _given(self, name: str, one: Instruction) -> None:
        """What a called computation is given is what its caller has."""
        operands = one.operands
        inner = [part for names in one.called.values() for part in names]
        for i, operand in enumerate(operands):
            if one.operation == "conditional":
                targets = [(inner[i - 1], 0)] if 0 < i <= len(inner) else []
            else:
                targets = [(part, i) for part in inner]
            for part, number in targets:
                parameter = self.program.parameter(part, number)
                for path, _ in on_host(parameter) if parameter is not None else ():
                    self._same((part, parameter.name, path), (name, operand, path))

    def _source(self, one: Instruction, path: Path) -> tuple[int, Path] | None:
        """The operand, by its number, and the array of it that an array of the result is written over, if any."""
        if one.operation == "dynamic-update-slice-start":
            return 0, ()
        if declared := _ALIASES.search(one.line):
            for result, number, inner in _ALIAS.findall(declared[1]):
                if _path(result) == path:
                    return int(number), _path(inner)
        called = moved_by(one)
        here, names = self.program.root(called), self.program.named(called)
        while here is not None:
            if here.operation == "parameter":
                return here.index, path
            if here.operation == "tuple" and path:
                here, path = names.get(here.operands[path[0]]), path[1:]
            elif here.operation == "get-tuple-element":
                here, path = names.get(here.operands[0]), (here.index, *path)
            else:
                here = names.get(here.operands[0]) if here.operation in SAME else None
        return None

    def _uses(self, name: str) -> Iterator[tuple[Key, int, int]]:
        """When the arrays on the host are used in a computation and in those that it calls."""
        names = self.program.named(name)
        for one in self.program.computations.get(name, ()):
            begin = len(self.clock)
            self.clock[name, one.name] = begin, begin
            if one.operation in ("while", "conditional", "call", "call-start"):
                for role, parts in one.called.items():
                    for part in parts if role != "condition" else ():
                        if (part, "") not in self.clock:  # each once, also where several call it
                            self.clock[part, ""] = begin, begin
                            yield from self._uses(part)
            end = len(self.clock)
            self.clock[name, one.name] = begin, end
            # Only what reads or writes counts: a tuple is no use of what is in it.
            if one.operation not in ("get-tuple-element", "parameter", "tuple") or one.root:
                for path, _ in on_host(one):
                    yield (name, one.name, path), begin, end
                for operand in one.operands:
                    for path, _ in on_host(names[operand]) if operand in names else ():
                        yield (name, operand, path), begin, end


def _packed(sizes: np.ndarray, times: np.ndarray) -> int:
    """How much memory it takes to put each in turn into the smallest gap that is free for as long as it needs it."""
    offsets, top = np.zeros_like(sizes), 0
    for i, (size, begin, end) in enumerate(zip(sizes.tolist(), *times.tolist(), strict=True)):
        beside = (times[0, :i] < end) & (begin < times[1, :i])
        low = offsets[:i][beside]
        order = np.argsort(low)
        ends = np.maximum.accumulate(np.concatenate([[0], (low + sizes[:i][beside])[order]]))
        gaps = low[order] - ends[:-1]
        fits = np.flatnonzero(gaps >= size)
        offsets[i] = ends[fits[np.argmin(gaps[fits])]] if fits.size else ends[-1]
        top = max(top, int(offsets[i]) + size)
    return top


def _path(text: str) -> Path:
    return tuple(int(n) for n in text.split(",") if n.strip())
