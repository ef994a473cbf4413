"""Which arrays on the host, in a compiled program, are which activations."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

import jax.numpy as jnp

from .counted import Entry
from .evidence import Evidence, HostBuffer, Transfer


@dataclasses.dataclass(frozen=True)
class Matched:
    """One activation that waits on the host, in the traced program and in the compiled one.

    `planned` and `compiled` are bytes on one device, `compiled` with what fills up tiles; `out` and `back` are the
    transfers that are its, or that it shares with activations of the same dtype and shape.
    """

    path: str
    planned: int
    compiled: int
    buffers: int  # of the compiled program
    away: int  # how much is computed while it is on the host: instructions between going out and coming back, the least
    late: int  # how much is computed before it goes: instructions until then, the most
    out: tuple[Transfer, ...]
    back: tuple[Transfer, ...]


# The names of element types in HLO.
_HLO_TYPES = {"bool": "pred", "bfloat16": "bf16", "float": "f", "int": "s", "uint": "u", "complex": "c"}


def hlo_dtype(dtype: str) -> str:
    """What HLO calls a NumPy dtype: `bf16` for `bfloat16`, `f8e4m3fn` for `float8_e4m3fn`."""
    if dtype in _HLO_TYPES:
        return _HLO_TYPES[dtype]
    kind, size, rest = re.fullmatch(r"([a-z]+)(\d+)(?:_(.*))?", dtype).groups()
    return f"{_HLO_TYPES[kind]}{size}{rest or ''}"


def match(host: list[Entry], evidence: Evidence) -> tuple[list[Matched], list[HostBuffer]]:
    """Which host buffers of the compiled program are which activation's, and those that are none's.

    Arrays are told apart by dtype and number of elements, and where several are alike by what their operations are
    called: the compiler reshapes, but neither casts nor splits what is moved.
    """
    buffers: dict[tuple, list[HostBuffer]] = collections.defaultdict(list)
    for buffer in evidence.host_buffers:
        buffers[buffer.dtype, math.prod(buffer.shape)] += [buffer] * buffer.count
    wanted: dict[tuple, list[int]] = collections.defaultdict(list)
    keys = [(hlo_dtype(e.dtype), _elements(e)) for e in host]
    for i, (entry, key) in enumerate(zip(host, keys, strict=True)):
        wanted[key] += [i] * entry.arrays
    taken: dict[int, list[HostBuffer]] = collections.defaultdict(list)
    for key, group in wanted.items():
        for i, buffer in list(_pair(group, host, buffers[key])):
            taken[i].append(buffer)
            buffers[key].remove(buffer)
    matched = []
    for i, (entry, (dtype, elements)) in enumerate(zip(host, keys, strict=True)):
        piece = elements * entry.arrays // max(entry.layers, 1)
        moves = [t for t in evidence.transfers if t.dtype == dtype and math.prod(t.shape) in (piece, elements)]
        out, back = (tuple(t for t in moves if t.direction == way) for way in ("out", "in"))
        size = sum(buffer.bytes for buffer in taken[i])
        away, late = min((b.away for b in taken[i]), default=0), max((b.late for b in taken[i]), default=0)
        matched.append(Matched(entry.label, entry.shard_bytes, size, len(taken[i]), away, late, out, back))
    return matched, [buffer for rest in buffers.values() for buffer in rest]


def _elements(entry: Entry) -> int:
    return entry.shard_bytes // max(entry.arrays, 1) // jnp.dtype(entry.dtype).itemsize


def _pair(group: list[int], host: list[Entry], buffers: list[HostBuffer]) -> Iterator[tuple[int, HostBuffer]]:
    """Pairs of activations and buffers that are alike, the best first: those whose names have most in common."""
    pairs = [
        (-len(_words(host[i].label) & _words(" ".join(buffer.op_names))), a, b)
        for a, i in enumerate(group)
        for b, buffer in enumerate(buffers)
    ]
    used: tuple[set[int], set[int]] = (set(), set())
    for _, a, b in sorted(pairs):
        if a not in used[0] and b not in used[1]:
            used[0].add(a)
            used[1].add(b)
            yield group[a], buffers[b]


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))
