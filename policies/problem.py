"""What a planner decides, in numbers: a program's blocks, what each placement costs, and the limits."""

import dataclasses
import math
from collections.abc import Sequence

from .activation import Placement

PLACEMENTS = (Placement.DEVICE, Placement.HOST, Placement.RECOMPUTE)

Number = int | float  # of bytes or seconds: whole ones needn't be written as floats

Decision = tuple[tuple[Placement, ...], ...]
"""For each group, and for each of its items, where it waits."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """Something that the forward pass computes in one layer, as far as the backward pass may compute it again.

    - `seconds`: what computing it again takes in one layer.
    - `reads`: indices of the units that it is computed from, all before its own. What is always there (a layer's
      input, parameters, masks) is not among them.
    - `wanted`: whether the backward pass itself reads it.
    - `item`: the index of the item that it is the value of; None for what has no name and can't be kept.
    """

    seconds: Number
    reads: tuple[int, ...] = ()
    wanted: bool = False
    item: int | None = None


@dataclasses.dataclass(frozen=True)
class Item:
    """An activation to be placed: one decision for all layers of a group.

    - `path`: of its `Activation`.
    - `bytes`: of one layer, on one device.
    - `placements`: where it may wait.
    - `device_seconds`, `host_seconds`: what keeping it costs in one layer besides the link: device memory's traffic.
    """

    path: str
    bytes: int
    placements: tuple[Placement, ...] = PLACEMENTS
    device_seconds: Number = 0.0
    host_seconds: Number = 0.0


@dataclasses.dataclass(frozen=True)
class Group:
    """Equal layers that are placed alike: a segment of a stack, or a block on its own. Numbers are of one layer.

    - `stack`: groups of one stack follow each other, and their transfers with them.
    - `forward_seconds`, `backward_seconds`: the two passes, nothing computed again.
    - `out_bytes`, `in_forward_bytes`, `in_backward_bytes`: what crosses the link besides: state that lives on the host.
    """

    name: str
    stack: str
    layers: int
    items: tuple[Item, ...]
    units: tuple[Unit, ...]
    forward_seconds: Number
    backward_seconds: Number
    out_bytes: int = 0
    in_forward_bytes: int = 0
    in_backward_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Phase:
    """A moment of the step at which device memory may be fullest.

    Bytes in use are `fixed`, and for each item of each group those of where it is placed, in all its layers.
    """

    name: str
    fixed: Number
    device: tuple[tuple[Number, ...], ...]
    host: tuple[tuple[Number, ...], ...]
    recompute: tuple[tuple[Number, ...], ...]

    def of(self, placement: Placement) -> tuple[tuple[Number, ...], ...]:
        return getattr(self, placement.value)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What there is for one device: bytes of its memory, of its host's, and of the pool of pinned memory in that."""

    device_bytes: Number = math.inf
    host_bytes: Number = math.inf
    pinned_bytes: Number = math.inf


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything that a decision's time and memory depend on. All of it is of one device.

    - `groups`: in the order of the forward pass.
    - `phases`: at least one.
    - `outside_seconds`: of a step outside of the groups: embedding, head, loss, optimizer.
    - `host_fixed_bytes`: what is in host memory anyhow, in the pinned pool.
    - `out_rate`, `in_rate`: of the link from and to the device, bytes a second; infinite ones cost nothing, and over
      one of 0 nothing arrives.
    - `pipelined`: whether a layer's transfers run beside other layers' computation. If not, everything waits.
    - `repeats`: how often the groups run in a step: its micro-batches.
    """

    groups: tuple[Group, ...]
    phases: tuple[Phase, ...]
    limits: Limits = Limits()
    outside_seconds: Number = 0.0
    host_fixed_bytes: Number = 0.0
    out_rate: Number = math.inf
    in_rate: Number = math.inf
    pipelined: bool = True
    repeats: int = 1

    def evaluate(self, decision: Decision) -> "Outcome":
        """What a decision comes to. It needn't keep to the limits.

        Raises ValueError for a decision of another form, or one that puts an item where it can't wait.
        """
        _check(self.groups, decision)
        parts = [self.part(i, decision) for i in range(len(self.groups))]
        seconds = self.outside_seconds + self.repeats * sum(part.seconds for part in parts)
        needed = [self.needed(phase, decision) for phase in self.phases]
        worst = max(range(len(needed)), key=needed.__getitem__)
        return Outcome(seconds, needed[worst], self.host_bytes(decision), self.phases[worst].name, tuple(parts))

    def host_bytes(self, decision: Decision) -> Number:
        """Bytes of host memory in use."""
        return self.host_fixed_bytes + sum(
            group.layers * item.bytes
            for group, row in zip(self.groups, decision, strict=True)
            for item, placement in zip(group.items, row, strict=True)
            if placement is Placement.HOST
        )

    def needed(self, phase: Phase, decision: Decision) -> Number:
        """Bytes of device memory in use in a phase."""
        return phase.fixed + sum(
            phase.of(placement)[g][i] for g, row in enumerate(decision) for i, placement in enumerate(row)
        )

    def part(self, index: int, decision: Decision) -> "Part":
        """What group `index` takes."""
        group, row = self.groups[index], decision[index]
        again = sum(group.units[u].seconds for u in recomputed(group, row))
        kept = sum(
            {Placement.DEVICE: item.device_seconds, Placement.HOST: item.host_seconds}.get(placement, 0.0)
            for item, placement in zip(group.items, row, strict=True)
        )
        moved = sum(item.bytes for item, placement in zip(group.items, row, strict=True) if placement is Placement.HOST)
        out, back = moved + group.out_bytes, moved + group.in_backward_bytes
        # Both passes touch what is kept: written in one, read in the other.
        forward, backward = group.forward_seconds + kept / 2, group.backward_seconds + again + kept / 2
        out_seconds, in_seconds = _over_link(out, self.out_rate), _over_link(back, self.in_rate)
        first = _over_link(group.in_forward_bytes, self.in_rate)
        n = group.layers
        if self.pipelined:
            total = n * max(forward, out_seconds, first) + n * max(backward, in_seconds)
            # Nothing computes beside the last layer's way out and its way back in, which comes first.
            if self.ends_stack(index):
                total += out_seconds + in_seconds
        else:
            total = n * (forward + out_seconds + first + backward + in_seconds)
        return Part(group.name, n, forward, backward, again, out_seconds, in_seconds, first, total)

    def ends_stack(self, index: int) -> bool:
        """Whether no other group of the same stack follows group `index`."""
        return index + 1 == len(self.groups) or self.groups[index + 1].stack != self.groups[index].stack

    def fits(self, outcome: "Outcome") -> bool:
        """Whether a decision with this outcome keeps to the limits."""
        host = min(self.limits.host_bytes, self.limits.pinned_bytes)
        return outcome.device_bytes <= self.limits.device_bytes and outcome.host_bytes <= host


@dataclasses.dataclass(frozen=True)
class Part:
    """What one group takes: seconds of one layer, and `seconds` of all its layers in one micro-batch."""

    name: str
    layers: int
    forward: Number
    backward: Number  # `again` included
    again: Number
    out: Number
    back: Number
    fetched: Number  # state that the forward pass brings in
    seconds: Number


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A decision's step time, in seconds, and its memory on one device and for it on the host.

    `phase` is the moment at which device memory is fullest.
    """

    seconds: Number
    device_bytes: Number
    host_bytes: Number
    phase: str
    parts: tuple[Part, ...]


def recomputed(group: Group, row: Sequence[Placement]) -> list[int]:
    """The units of a layer that its backward pass computes again, in order.

    Those that it wants, or needs for another of them, unless they are kept: then nothing before them is needed.
    """
    kept = {i for i, placement in enumerate(row) if placement is not Placement.RECOMPUTE}
    again: list[int] = []
    wanted = {u for u, unit in enumerate(group.units) if unit.wanted}
    for u in range(len(group.units) - 1, -1, -1):
        unit = group.units[u]
        if u in wanted and unit.item not in kept:
            again.append(u)
            wanted.update(unit.reads)
    return again[::-1]


def _over_link(count: Number, rate: Number) -> Number:
    """Seconds that `count` bytes take: none for no bytes, whatever the link, and forever over one that is dead."""
    if not count:
        return 0.0
    return count / rate if rate else math.inf


def _check(groups: Sequence[Group], decision: Decision) -> None:
    if [len(row) for row in decision] != [len(group.items) for group in groups]:
        raise ValueError(
            f"a decision has a placement for each item of each group, {[len(g.items) for g in groups]} of them, "
            f"not {[len(row) for row in decision]}"
        )
    for group, row in zip(groups, decision, strict=True):
        for item, placement in zip(group.items, row, strict=True):
            if placement not in item.placements:
                raise ValueError(f"{item.path!r} can't be placed on {placement!r}, only {', '.join(item.placements)}")
