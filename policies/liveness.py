"""How much device memory a traced program needs, without its compiler: which buffers live at the same time.

XLA keeps a buffer from the operation that writes it to the last one that reads it, and packs buffers that don't live
at the same time into the same bytes. The operations run in the order in which they were traced, as XLA's schedulers
leave them but for details. Read from a jaxpr, this takes seconds where compiling takes minutes.
"""

import bisect
import dataclasses
import os
from collections.abc import Collection, Sequence
from typing import Any

from .buffers import Buffers
from .lifetimes import Buffer, lifetimes
from .operations import Op
from .tpu_orders import taken

_LISTED = 12
_KEPT_FREE = 5 * 2**29  # bytes of a TPU that a heap in the order of the program leaves free
_SMALL = 2**-12  # buffers of a smaller part of the peak than this are added up, not placed


@dataclasses.dataclass(frozen=True)
class Moment:
    """A place in the step where memory peaks locally.

    - `name`: 'loss', 'backward of moe_layers.segments.0', 'optimizer' and so on.
    - `bytes`: device bytes in use there, arguments included.
    - `live`: the largest buffers there but for arguments, as text and bytes, largest first.
    """

    name: str
    bytes: int
    live: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes of device memory that a program needs on one device.

    - `arguments`: of state and batch.
    - `temp`: predicted scratch, and results that take no argument's place.
    - `moments`: local peaks, in the order of the program.
    - `timeline`: where in the program, and bytes in use there; for plots.
    """

    arguments: int
    temp: int
    moments: tuple[Moment, ...]
    timeline: tuple[tuple[str, int], ...]

    @property
    def device_bytes(self) -> int:
        """Comparable with `Ahead.device_bytes`."""
        return self.arguments + self.temp


def footprint(
    closed: Any,
    shardings: Sequence[Any],
    *,
    platform: str,
    capability: tuple[int, int] | None = None,
    spread: bool = False,
    capacity: int | None = None,
    donated: int | Collection[int] = (),
) -> Footprint:
    """What a program needs, by its jaxpr.

    **Arguments:**

    - `closed`: a ClosedJaxpr, of a training step say.
    - `shardings`: one per flat input: over a mesh, or None. A memory kind of "pinned_host" is not on the device.
    - `platform`: `"cuda"` or `"tpu"`.
    - `capability`: a GPU's compute capability, where it is known: which kernels there are depends on it.
    - `spread`: whether the devices are more than one fast network (NVLink's domain) has.
    - `capacity`: bytes of a TPU's memory, where they are known: how buffers are placed near it depends on them.
    - `donated`: the inputs whose memory results can take: the first so many, or their positions.
    """
    program = Buffers(closed, shardings, platform, capability, spread)
    given = range(donated) if isinstance(donated, int) else donated
    arguments = sum(op.bytes for op in program.arguments if not op.host)
    order = taken if platform == "tpu" else lifetimes
    buffers = order(program, [program.arguments[i] for i in given])
    room = None if capacity is None else capacity - arguments - _KEPT_FREE
    return _packed(program, buffers, arguments, room)


# ---- the heap


def _packed(program: Buffers, buffers: list[Buffer], arguments: int, room: int | None) -> Footprint:
    ticks = len(program.ops) + 1
    change = [0] * (ticks + 1)
    for buffer in buffers:
        change[buffer.begin] += buffer.bytes
        change[min(buffer.end, ticks - 1) + 1] -= buffer.bytes
    levels, level = [], 0
    for step in change[:ticks]:
        level += step
        levels.append(level)
    peak = max(levels, default=0)
    small = [b for b in buffers if b.bytes < peak * _SMALL]
    large = [b for b in buffers if b.bytes >= peak * _SMALL]
    temp = max(_heap(large, program.platform, room) + min(sum(b.bytes for b in small), int(peak * 0.01)), peak)
    moments = _moments(program, buffers, levels, arguments, temp / peak if peak else 1.0)
    return Footprint(arguments, temp, moments, _timeline(program, levels, arguments))


def _heap(buffers: list[Buffer], platform: str, room: int | None = None) -> int:
    """The height of a heap of these buffers, placed as XLA does: each in the tightest gap, the largest first.

    XLA for TPUs places them in the order in which they begin, and only where that takes more than its `room` the
    largest first.
    """
    if platform == "tpu":
        height = _height(sorted(buffers, key=lambda b: (b.begin, -b.bytes, b.begin - b.end)))
        if room is None or height <= room:
            return height
    return _height(sorted(buffers, key=lambda b: (-b.bytes, b.begin - b.end, b.begin)))


def _height(buffers: list[Buffer]) -> int:
    """The height of a heap in which these buffers are placed one after the other, each in the tightest gap."""
    placed: list[tuple[int, int, Buffer]] = []  # by offset
    height = 0
    for buffer in buffers:
        best, best_gap, top = None, None, 0
        for offset, end, other in placed:
            if other.end < buffer.begin or other.begin > buffer.end:
                continue
            gap = offset - top
            if gap >= buffer.bytes and (best_gap is None or gap < best_gap):
                best, best_gap = top, gap
            top = max(top, end)
        offset = top if best is None else best
        bisect.insort(placed, (offset, offset + buffer.bytes, buffer), key=lambda item: item[0])
        height = max(height, offset + buffer.bytes)
    return height


# ---- where in the program


def _section(op: Op) -> str:
    """The part of a step that an operation belongs to, in words; empty for what was written nowhere."""
    backward = "transpose(" in op.stack
    around = (*op.inner, op.step_of) if op.step_of is not None else op.inner
    loop = next((one for one in around if one.names or one.kept), None)
    if loop is not None:
        names = loop.names or loop.kept
        return f"{'backward' if backward or 'transpose(' in loop.stack else 'forward'} of {_prefix(names)}"
    if not op.stack:
        return ""
    if "cross_entropy" in op.stack:
        return "loss"
    if "optimizer" in op.stack:
        return "optimizer"
    return "backward" if backward else "forward"


def _prefix(names: Collection[str]) -> str:
    """What paths of activations begin with alike, in whole parts."""
    paths = [name.split(".") for name in names]
    common = os.path.commonprefix(paths)
    if len(paths) == 1:
        common = common[:-1] or common
    return ".".join(common) or min(names)


def _moments(
    program: Buffers, buffers: list[Buffer], levels: list[int], arguments: int, scale: float
) -> tuple[Moment, ...]:
    best: dict[str, int] = {}
    for op in program.ops:
        name = _section(op)
        if name and (name not in best or levels[op.time] > levels[best[name]]):
            best[name] = op.time
    found = []
    for name, time in best.items():
        live = sorted(((b.op.text, b.bytes) for b in buffers if b.begin <= time <= b.end), key=lambda x: -x[1])
        found.append(Moment(name, arguments + int(levels[time] * scale), tuple(live[:_LISTED])))
    return tuple(found)


def _timeline(program: Buffers, levels: list[int], arguments: int) -> tuple[tuple[str, int], ...]:
    points: list[tuple[str, int]] = []
    width = max(len(program.ops) // 400, 1)
    for start in range(0, len(program.ops), width):
        time = max(range(start, min(start + width, len(program.ops))), key=levels.__getitem__)
        name = next(
            (s for op in program.ops[time : start + width] if (s := _section(op))), points[-1][0] if points else ""
        )
        points.append((name, arguments + levels[time]))
    return tuple(points)
