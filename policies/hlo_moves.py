"""What a compiled program moves between the device and the host, and what it computes there."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from .hlo import HOST, Array, Instruction, Program
from .hlo_buffers import ENDS, PASSES, moved_by, on_host

# What moves arrays or parts of them, and computes nothing.
_MOVES = {"copy", "dynamic-update-slice", "dynamic-slice", "slice", "bitcast", "reshape", "parameter", "constant",
          "tuple", "get-tuple-element"}  # fmt: skip
# What takes no time of its own, or only a moment.
_IDLE = PASSES - {"while", "conditional", "call"} | {"copy", "iota", "partition-id", "replica-id", "broadcast",
                                                     "reshape", "get-dimension-size"}  # fmt: skip
_CARRIES = ("bitcast", "copy", "copy-start", "copy-done", "reshape", "transpose", "convert", "opt-barrier")
# Calls of the compiler's own that compute nothing.
_MARKS = ("AllocateBuffer", "ConcatBitcast", "Sharding", "MoveTo", "annotate_device_placement")


class Move(NamedTuple):
    """One instruction that moves `piece` from the device to the host (`out`) or back."""

    computation: str
    instruction: Instruction
    out: bool
    piece: Array
    host: str  # what is on the host: the operand that is read, or the instruction whose result is written
    done: str  # where it is waited for; empty for what isn't only started, or is waited for in a loop's next turn
    asynchronous: bool
    distance: int  # instructions between its start and where it is waited for
    work: int  # how many of them compute
    op_name: str  # the JAX operation that what goes out comes from
    source: str  # the instruction that computes it


class Moves:
    """What the scheduled computations `names` move, in order, and what they compute on the host."""

    def __init__(self, program: Program, names: list[str]):
        self.program = program
        self.found: list[Move] = []
        self.computing: list[str] = []  # the names of instructions
        for name in names:
            self._read(name)

    def _read(self, name: str) -> None:
        computation, names = self.program.computations.get(name, ()), self.program.named(name)
        ends = work = None
        for place, one in enumerate(computation):
            if one.operation in PASSES or one.operation.endswith(ENDS):
                continue
            if 'async_execution_thread="host"' in one.line:
                self.computing.append(one.name)
                continue
            operands = [names[operand] for operand in one.operands if operand in names]
            read = next((operand for operand in operands if _host(operand)), None)
            if (read is None and not on_host(one)) or '"AllocateBuffer"' in one.line:
                # What only moves may be marked so too, where it touches the host's memory.
                self.computing += [one.name] * ('_xla_compute_type="host"' in one.line)
                continue
            if ends is None:
                ends, work = self._ends(name), self._work(name)
            inside = self.program.computations.get(moved_by(one)) or [one]
            kinds = {inner.operation.removesuffix("-start") for inner in inside}
            moved = list(self._moved(one, inside, operands))
            if not moved or not kinds <= _MOVES:
                self.computing.append(one.name)
            started = one.operation.endswith("-start")
            end = ends.get(one.name) if started else None
            distance, beside = self._between(place, end, work) if started else (0, 0)
            done = computation[end].name if isinstance(end, int) else ""
            for out, piece, source in moved:
                host = one.name if out or source is None else source.name
                origin = self._origin(name, source) if out else ("", "")
                self.found.append(Move(name, one, out, piece, host, done, started, distance, beside, *origin))

    def _moved(
        self, one: Instruction, inside: list[Instruction], operands: list[Instruction]
    ) -> Iterator[tuple[bool, Array, Instruction | None]]:
        """Which way `one` moves what, and from which operand; nothing where all of it stays where it is."""
        by_name = {inner.name: inner for inner in inside}
        wrapped = inside[0] is not one

        def outside(inner: str) -> Instruction | None:
            """The operand of `one` that an instruction inside it works on."""
            if not wrapped:
                return next((operand for operand in operands if operand.name == inner), None)
            here = by_name.get(inner)
            while here is not None and here.operation != "parameter":
                here = by_name.get(here.operands[0]) if here.operands else None
            return operands[here.index] if here is not None and here.index < len(operands) else None

        result, parts = _result(one), 0
        for inner in inside:
            operation, given = inner.operation.removesuffix("-start"), inner.operands
            if operation == "dynamic-update-slice" and _host(outside(given[0])):
                parts += 1
                source = outside(given[1])
                update = by_name.get(given[1]) if wrapped else source
                if update is not None and not _host(source):
                    yield True, update.arrays[0][1], source
            elif operation in ("dynamic-slice", "slice") and _host(source := outside(given[0])):
                parts += 1
                if result.memory != HOST:
                    yield False, inner.arrays[0][1] if wrapped else result, source
        if parts:
            return
        source = next((operand for operand in operands if _host(operand)), None)
        if source is None:
            yield True, result, operands[0] if operands else None
        elif result.memory != HOST:
            yield False, result, source

    def _ends(self, name: str) -> dict[str, int | tuple[int, int]]:
        """Where what each instruction starts is waited for; (to the loop's end, from its begin) in its next turn."""
        starts: dict[str, str] = {}
        found: dict[str, int | tuple[int, int]] = {}
        carried: dict[int, str] = {}
        computation = self.program.computations[name]
        for place, one in enumerate(computation):
            if one.operation.endswith(ENDS):
                operand = one.operands[0]
                start = starts.get(operand, operand)
                if one.operation.endswith("-update"):
                    starts[one.name] = start
                else:
                    found[start] = place
        root = computation[-1]
        if root.operation == "tuple":
            carried = dict(enumerate(root.operands))
        names = self.program.named(name)
        for end, place in [item for item in found.items() if item[0] in names]:
            # What is waited for is one of the loop's values: the turn before has started it.
            given = names[end]
            if given.operation == "get-tuple-element" and names[given.operands[0]].operation == "parameter":
                if (start := carried.get(given.index)) is not None:
                    found[start] = (len(computation), place)
        return found

    def _work(self, name: str) -> list[int]:
        """How many of the first n instructions compute, for each n."""
        names, counts = self.program.named(name), [0]
        for one in self.program.computations[name]:
            counts.append(counts[-1] + _computes(one, names))
        return counts

    def _between(self, start: int, end: int | tuple[int, int] | None, work: list[int]) -> tuple[int, int]:
        if end is None:  # no one waits for it in here
            end = len(work) - 1
        if isinstance(end, tuple):
            return end[0] - start - 1 + end[1], work[end[0]] - work[start + 1] + work[end[1]]
        return end - start - 1, work[end] - work[start + 1]

    def _origin(self, name: str, one: Instruction | None) -> tuple[str, str]:
        """The JAX operation and the instruction that compute an array: what only carries it along is looked through."""
        names, index, last, source = self.program.named(name), None, "", ""
        while one is not None:
            last, source = one.op_name or last, one.name
            if one.operation == "get-tuple-element":
                index, one = one.index, names.get(one.operands[0])
            elif one.operation in _CARRIES:
                one = names.get(one.operands[0])
            elif one.operation == "fusion":
                called = moved_by(one)
                inner, here = self.program.named(called), self.program.root(called)
                if here is not None and here.operation == "tuple" and index is not None:
                    here = inner.get(here.operands[index])
                while here is not None and here.operation in _CARRIES:
                    last, here = here.op_name or last, inner.get(here.operands[0])
                return (here.op_name if here is not None else "") or last, source
            else:
                break
        return last, source


def _host(one: Instruction | None) -> bool:
    """Whether `one` is a single array on the host."""
    return one is not None and not one.shape.startswith("(") and bool(on_host(one))


def _result(one: Instruction) -> Array:
    """The array that an operation gives; of one that only starts, what it will have given."""
    leaves = dict(one.arrays)
    if one.operation.endswith("-start"):
        wanted = 0 if one.operation == "copy-start" else 1
        return next((leaf for path, leaf in leaves.items() if path[:1] == (wanted,)), next(iter(leaves.values())))
    return next(iter(leaves.values()))


def computing(program: Program, name: str) -> Iterator[Instruction]:
    """The instructions of a computation that compute on the device."""
    names = program.named(name)
    return (one for one in program.computations.get(name, ()) if _computes(one, names))


def _computes(one: Instruction, names: dict[str, Instruction]) -> bool:
    if one.operation in _IDLE or one.operation.endswith(("-start", *ENDS)):
        return False
    if one.operation == "custom-call":
        return not any(f'custom_call_target="{mark}' in one.line for mark in _MARKS)
    if one.operation in ("while", "conditional", "call"):
        return True
    # Indices and the like are no work; a sum of an array is.
    if _elements(one) > 1:
        return not on_host(one)
    return any(_elements(names[operand]) > 1 for operand in one.operands if operand in names)


def _elements(one: Instruction) -> int:
    return max((math.prod(leaf.shape) for _, leaf in one.arrays), default=0)
