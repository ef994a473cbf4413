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
    away: int | None  # how many instructions compute while it is on the host, the least; None for what a scan makes
    late: int  # how much is computed before it goes: instructions until then, the most
    kind: tuple[str, int]  # dtype in HLO, and elements of one array on one device: by these it is matched
    out: tuple[Transfer, ...]
    back: tuple[Transfer, ...]


# The names of element types in HLO.
_HLO_TYPES = {"bool": "pred", "bfloat16": "bf16", "float": "f", "int": "s", "uint": "u", "complex": "c"}


def hlo_dtype(dtype: str) -> str:
    """What HLO calls a NumPy dtype: `bf16` for `bfloat16`, `f8e4m3fn` for `float8_e4m3fn`, `u32` for a PRNG key."""
    if dtype in _HLO_TYPES:
        return _HLO_TYPES[dtype]
    found = re.fullmatch(r"([a-z]+)(\d+)(?:_(.*))?", dtype)
    if found is None:
        return "u32"
    kind, size, rest = found.groups()
    return f"{_HLO_TYPES[kind]}{size}{rest or ''}"


def match(host: list[Entry], evidence: Evidence) -> tuple[list[Matched], list[HostBuffer]]:
    """Which host buffers of the compiled program are which activation's, and those that are none's.

    Arrays are told apart by dtype and number of elements, and where several are alike by their shapes and by what their
    operations are called: the compiler reshapes, but neither casts nor splits what is moved.
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
        missing = [i for i in group if len(taken[i]) < host[i].arrays]
        if key[0] in ("c64", "c128"):  # a TPU keeps real and imaginary parts by themselves
            parts = buffers[f"f{int(key[0][1:]) // 2}", key[1]]
            for i in missing[: len(parts) // 2]:
                taken[i] += [parts.pop(), parts.pop()]
    matched = []
    for i, (entry, key) in enumerate(zip(host, keys, strict=True)):
        dtype, elements = key
        piece = elements * entry.arrays // max(entry.layers, 1)
        moves = [t for t in evidence.transfers if t.dtype == dtype and math.prod(t.shape) in (piece, elements)]
        out, back = (tuple(t for t in moves if t.direction == way) for way in ("out", "in"))
        size = sum(buffer.bytes for buffer in taken[i])
        # The last layer's part of what a scan makes is wanted right away, and says nothing of the others.
        away = min((b.away for b in taken[i]), default=None) if entry.layers == entry.arrays else None
        late = max((b.late for b in taken[i]), default=0)
        matched.append(Matched(entry.label, entry.shard_bytes, size, len(taken[i]), away, late, key, out, back))
    return matched, [buffer for rest in buffers.values() for buffer in rest]


def _elements(entry: Entry) -> int:
    size = 4 if entry.dtype.startswith("key<") else jnp.dtype(entry.dtype).itemsize
    return entry.shard_bytes // max(entry.arrays, 1) // size


def _pair(group: list[int], host: list[Entry], buffers: list[HostBuffer]) -> Iterator[tuple[int, HostBuffer]]:
    """Pairs of activations and buffers that are alike, the best first: of one shape, with most words in common."""
    pairs = [
        (-_shaped(host[i], buffer), -len(_words(host[i].label) & _words(" ".join(buffer.op_names))), a, b)
        for a, i in enumerate(group)
        for b, buffer in enumerate(buffers)
    ]
    used: tuple[set[int], set[int]] = (set(), set())
    for _, _, a, b in sorted(pairs):
        if a not in used[0] and b not in used[1]:
            used[0].add(a)
            used[1].add(b)
            yield group[a], buffers[b]


def _shaped(entry: Entry, buffer: HostBuffer) -> int:
    """How well the shape of a buffer fits: 2 for the very dimensions, 1 for as many layers, 0 for others."""
    layers = entry.layers // max(entry.arrays, 1)
    whole = [n for n in (layers, *entry.shape) if n != 1]
    shape = [n for n in buffer.shape if n != 1]
    return 2 if shape == whole else int(layers == 1 or shape[:1] == [layers])


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))
