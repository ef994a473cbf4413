"""What a compiled program does with the host's memory: its buffers there, what moves when, and what it adds itself."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from . import hlo
from .hlo_buffers import PASSES, Buffers, Key, on_host, scheduled
from .hlo_moves import Move, Moves, computing

_REMAT = re.compile(r"\.remat\d*(?:_\w+)?(?:\.|$)")
_NAMES_KEPT = 200  # of instructions; how many there were is kept too


@dataclasses.dataclass(frozen=True)
class HostBuffer:
    """Memory on the host that a program takes for itself, so many times."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int  # of one, as laid out: with what fills up a TPU's tiles
    count: int
    op_names: tuple[str, ...]  # the operations in JAX whose results are written into it
    # How many instructions that compute are scheduled between its last write and its first read, the least of all; and
    # how many between what computes an array and its transfer to here, the most of all: until then the device has it.
    away: int = 0
    late: int = 0


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What moves an array between the device and the host; `count` of them are alike."""

    direction: str  # "out": from the device to the host; "in": back
    dtype: str
    shape: tuple[int, ...]  # of what is moved at a time
    bytes: int  # of that, as laid out
    times: int  # how often each of them runs in one run of the program
    known: bool  # whether the length of each loop around it is known
    asynchronous: bool
    distance: int  # how many instructions are scheduled between its start and where it is waited for, the least of all
    work: int  # how many of them compute, the least of all
    op_name: str  # the operation in JAX whose result is moved, where the compiler remembers; "argument" for an argument
    name: str  # the first of these instructions
    count: int = 1

    @property
    def total_bytes(self) -> int:
        """What all of them move in one run of the program."""
        return self.bytes * self.times * self.count


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What `read` finds in a compiled program. Bytes are those of one device."""

    host_buffers: tuple[HostBuffer, ...]
    transfers: tuple[Transfer, ...]
    host_arguments: tuple[int, int]  # arrays among the arguments that are on the host, and their bytes
    recomputed: tuple[str, ...]  # instructions that XLA computes again of its own accord, the first of them
    recomputed_count: int
    host_compute: tuple[str, ...]  # instructions that compute on the host or on what lies there, the first of them
    host_compute_count: int
    host_peak_bytes: int  # what `host_buffers` take together: those that are never in use together share memory

    @property
    def host_buffer_bytes(self) -> int:
        """What all host buffers weigh."""
        return sum(buffer.bytes * buffer.count for buffer in self.host_buffers)

    @property
    def bytes_out(self) -> int:
        """What goes to the host in one run of the program."""
        return sum(one.total_bytes for one in self.transfers if one.direction == "out")

    @property
    def bytes_in(self) -> int:
        """What comes back from the host in one run of the program."""
        return sum(one.total_bytes for one in self.transfers if one.direction == "in")

    @property
    def overlapped(self) -> float:
        """The share of the moved bytes whose transfer has something that computes beside it; 1 where nothing moves."""
        total = self.bytes_out + self.bytes_in
        beside = sum(one.total_bytes for one in self.transfers if one.asynchronous and one.work)
        return beside / total if total else 1.0

    def accounts_for(self, host_temp: int, platform: str) -> bool:
        """Whether a compiler's figure for the host's scratch memory is one that these buffers lead to.

        A GPU's compiler says `host_peak_bytes`, to the byte. Where arguments are on the host, any compiler may put a
        buffer into the memory of one that is donated and has been read: up to their bytes less. A TPU's compiler
        counts twice what comes to lie on the host while the arrays of an earlier loop still do, and rounds up.

        - `host_temp`: `host_temp_size_in_bytes` of the compiled program's memory analysis.
        - `platform`: `"cuda"` or `"tpu"`.
        """
        most = 2 * self.host_peak_bytes + 8192 if platform == "tpu" and self.host_peak_bytes else self.host_peak_bytes
        return self.host_peak_bytes - self.host_arguments[1] <= host_temp <= most

    def as_json(self) -> dict[str, Any]:
        """Plain values, for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Evidence":
        """What `as_json` gave, also after it has been written as JSON and read again.

        Raises ValueError for anything else.
        """
        try:
            kept = _tuples(data)
            for name, kind in (("host_buffers", HostBuffer), ("transfers", Transfer)):
                kept[name] = tuple(kind(**_tuples(entry)) for entry in kept[name])
            return cls(**kept)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"this is not what Evidence.as_json() gives: {error}") from None


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in dict(data).items()}


def read(text: str) -> Evidence:
    """The evidence in the text of a compiled program: `compiled.as_text()`, for a GPU, a TPU or a CPU.

    Takes a time in proportion to the text. Raises ValueError for text that is no compiled program's, or only the
    beginning of one.
    """
    program = hlo.parse(text)
    if not program.scheduled:
        raise ValueError("this program has no schedule: it is not compiled, or its text has lost its first line")
    visits = scheduled(program)
    buffers, moves = Buffers(program, list(visits)), Moves(program, list(visits))
    remat = [
        one.name for name in visits for one in program.computations.get(name, ())
        if _REMAT.search(one.name) and one.operation not in PASSES
    ]  # fmt: skip
    moves.found = [_named(move, visits) for move in moves.found]
    contents = _contents(buffers, moves)
    transfers = []
    for move in moves.found:
        names = contents.get(buffers.find((move.computation, move.host, ())), ()) if not move.out else ()
        for visit in visits[move.computation]:
            transfers.append(
                Transfer("out" if move.out else "in", move.piece.dtype, move.piece.shape, move.piece.bytes, visit.runs,
                         visit.known, move.asynchronous, move.distance, move.work,
                         move.op_name if move.out else ", ".join(names), move.instruction.name)
            )  # fmt: skip
    return Evidence(
        host_buffers=_buffers(program, list(visits), buffers, moves, contents),
        transfers=_alike(transfers),
        host_arguments=buffers.arguments,
        recomputed=tuple(remat[:_NAMES_KEPT]),
        recomputed_count=len(remat),
        host_compute=tuple(moves.computing[:_NAMES_KEPT]),
        host_compute_count=len(moves.computing),
        host_peak_bytes=buffers.heap,
    )


def _named(move: Move, visits: Mapping[str, list[hlo.Visit]]) -> Move:
    """With the name of the loop around it where what goes out is a value that the loop was given, which has none."""
    caller = visits[move.computation][0].caller
    return move if move.op_name or not move.out or caller is None else move._replace(op_name=caller.op_name)


def _written(move: Move) -> Iterable[Key]:
    """The arrays on the host that a transfer writes."""
    return ((move.computation, move.host, path) for path, _ in on_host(move.instruction))


def _contents(buffers: Buffers, moves: Moves) -> dict[Key, tuple[str, ...]]:
    """The JAX operations whose results are in each memory on the host; of an argument, that it is one."""
    found: dict[Key, set[str]] = {}
    for move in moves.found:
        for key in _written(move) if move.out and move.op_name else ():
            found.setdefault(buffers.find(key), set()).add(move.op_name)
    entry = buffers.program.entry
    for one in buffers.program.computations[entry]:
        if one.operation == "parameter":
            for path, _ in on_host(one):
                found[buffers.find((entry, one.name, path))] = {"argument"}
    return {key: tuple(sorted(names)) for key, names in found.items()}


def _buffers(
    program: hlo.Program, names: list[str], buffers: Buffers, moves: Moves, contents: Mapping[Key, tuple[str, ...]]
) -> tuple[HostBuffer, ...]:
    """Those that differ in nothing as one, the heaviest first."""
    work = [0] * (len(buffers.clock) + 1)
    for name in names:
        for one in computing(program, name):
            if (at := buffers.clock.get((name, one.name))) is not None and at[0] == at[1] - 1:
                work[at[0] + 1] += 1
    for i in range(1, len(work)):
        work[i] += work[i - 1]
    written: dict[Key, int] = {}
    read: dict[Key, int] = {}
    late: dict[Key, int] = {}
    for move in moves.found:
        begin, end = buffers.clock.get((move.computation, move.instruction.name), (0, 0))
        if move.out:
            _, end = buffers.clock[move.computation, move.done] if move.done else (begin, end)
            for key in _written(move):
                group = buffers.find(key)
                written[group] = max(written.get(group, 0), end)
                _, computed = buffers.clock.get((move.computation, move.source), (0, begin))
                late[group] = max(late.get(group, 0), work[begin] - work[computed])
        else:
            group = buffers.find((move.computation, move.host, ()))
            read[group] = min(read.get(group, len(work) - 1), begin)
    groups: dict[tuple[Any, ...], HostBuffer] = {}
    for buffer in buffers.found:
        leaf, names_in = buffer.array, contents.get(buffer.key, ())
        begin, end = written.get(buffer.key, buffer.first), read.get(buffer.key, buffer.last)
        away = max(work[end] - work[begin], 0)
        one = (leaf.dtype, leaf.shape, leaf.bytes, names_in)
        other = groups.get(one)
        groups[one] = HostBuffer(
            leaf.dtype, leaf.shape, leaf.bytes, other.count + 1 if other else 1, names_in,
            min(other.away, away) if other else away, max(late.get(buffer.key, 0), other.late if other else 0),
        )  # fmt: skip
    return tuple(sorted(groups.values(), key=lambda buffer: -buffer.bytes * buffer.count))


def _alike(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """Those that differ in name and distance alone as one, the heaviest first."""
    groups: dict[tuple[Any, ...], Transfer] = {}
    for one in transfers:
        key = (one.direction, one.dtype, one.shape, one.bytes, one.times, one.known, one.asynchronous, bool(one.work),
               one.op_name)  # fmt: skip
        other = groups.get(key)
        groups[key] = one if other is None else dataclasses.replace(
            other, count=other.count + 1, distance=min(one.distance, other.distance), work=min(one.work, other.work)
        )  # fmt: skip
    return tuple(sorted(groups.values(), key=lambda one: -one.total_bytes))
