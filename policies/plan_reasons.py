"""Why a plan puts each activation where it does: every choice held against its alternatives, one at a time."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .activation import Placement
from .problem import Decision, Group, Item, Number, Outcome, Part, Problem, recomputed
from .report import format_bytes

if TYPE_CHECKING:
    from .planned import Piece, Plan

NOT_NEEDED = "not needed by the backward pass"
# Of a step: sums of the same seconds in another order, and the solver's tolerance.
_SAME = 1e-9
_ORDER = (Placement.RECOMPUTE, Placement.HOST, Placement.DEVICE)


@dataclasses.dataclass(frozen=True)
class Alternative:
    """One activation placed otherwise in all layers of its piece, everything else as planned.

    - `placement`: where it would wait.
    - `seconds`: how much longer a step would take; negative where it would be faster.
    - `device_over`, `host_over`: bytes by which device memory's limit and the host's would be exceeded; 0 within them.
    - `outcome`: the whole step's time and memory.
    """

    placement: Placement
    seconds: Number
    device_over: Number
    host_over: Number
    outcome: Outcome

    @property
    def fits(self) -> bool:
        return not self.device_over and not self.host_over


@dataclasses.dataclass(frozen=True)
class Choice:
    """Where an activation of a piece waits, and why.

    - `path`: in a model that is cut at the plan's boundaries.
    - `placement`: None for one that the backward pass needs in no case.
    - `bytes`: of one layer, on one device; None where that doesn't matter.
    - `layers`: of the piece.
    - `again_seconds`: what computing it again takes in one layer: itself, and what is computed again only for it.
    - `out_seconds`, `in_seconds`: what the link takes for one layer's, to the host and back.
    - `alternatives`: wherever else it may wait.
    - `why`: a sentence.
    """

    path: str
    placement: Placement | None
    bytes: Number | None
    layers: int
    again_seconds: float = 0.0
    out_seconds: Number = 0.0
    in_seconds: Number = 0.0
    alternatives: tuple[Alternative, ...] = ()
    why: str = NOT_NEEDED


def format_seconds(seconds: Number) -> str:
    """A time with two or three digits: `0.40 ms`, `12 ms`, `1.25 s`."""
    if not math.isfinite(seconds):
        return "forever"
    if not seconds:
        return "0 ms"
    if abs(seconds) >= 0.9995:
        return f"{seconds:.2f} s"
    # The largest of which it is at least a tenth.
    scale, unit = next(
        (s, u) for s, u in ((1e3, "ms"), (1e6, "µs"), (1e9, "ns")) if abs(seconds) * s >= 0.0995 or u == "ns"
    )
    value = seconds * scale
    digits = 0 if abs(value) >= 9.95 else 1 if abs(value) >= 0.995 else 2
    return f"{value:.{digits}f} {unit}"


def host_limit(problem: Problem) -> tuple[Number, str]:
    """Bytes that the host can hold for one device, and what sets that limit."""
    limits = problem.limits
    if limits.pinned_bytes < limits.host_bytes:
        return limits.pinned_bytes, "pool of pinned memory"
    return limits.host_bytes, "memory"


def over(problem: Problem, outcome: Outcome) -> tuple[Number, Number]:
    """Bytes by which an outcome exceeds the limits of device and host memory; 0 within them."""
    device = max(outcome.device_bytes - problem.limits.device_bytes, 0.0)
    return device, max(outcome.host_bytes - host_limit(problem)[0], 0.0)


def choices(plan: "Plan") -> tuple[Choice, ...]:
    """A choice for every activation of every piece, in the order of the program."""
    found: list[Choice] = []
    seen: set[str] = set()
    first = 0
    placed = {piece.path(rest) for piece in plan.pieces for rest in piece.placements}
    for piece in plan.pieces:
        indices = range(first, first + len(piece.groups))
        first += len(piece.groups)
        # A block may hold another one, whose activations stand there already.
        own = [_Item(plan, piece, indices, i).choice() for i in range(len(piece.groups[0].items))]
        found += own
        prefix = piece.path("")
        rest = [path for path in plan.rules if path.startswith(prefix) and path not in placed | seen]
        found += [Choice(path, None, None, piece.layers) for path in rest]
        seen.update(rest)
    found += [Choice(path, None, None, 1) for path in plan.rules if path not in placed | seen]
    return tuple(found)


class _Item:
    """One activation of a piece: the item at one place in each of its groups."""

    def __init__(self, plan: "Plan", piece: "Piece", indices: range, position: int):
        self.plan, self.piece, self.indices, self.position = plan, piece, indices, position
        self.problem: Problem = plan.problem
        self.item: Item = piece.groups[0].items[position]
        self.placement: Placement = plan.decision[indices[0]][position]
        self.group: Group = piece.groups[0]
        self.row: tuple[Placement, ...] = plan.decision[indices[0]]
        self.path = list(piece.placements)[position]
        self.out, self.back = (_travel(self.item.bytes, r) for r in (self.problem.out_rate, self.problem.in_rate))
        self.again = math.fsum(
            group.layers * self._again(group, plan.decision[g]) for g, group in zip(indices, piece.groups, strict=True)
        ) / max(piece.layers, 1)

    def choice(self) -> Choice:
        alternatives = {p: self._alternative(p) for p in self.item.placements if p is not self.placement}
        return Choice(
            self.piece.path(self.path), self.placement, self.item.bytes, self.piece.layers, self.again, self.out,
            self.back, tuple(alternatives.values()), self._why(alternatives),
        )  # fmt: skip

    def _again(self, group: Group, row: Sequence[Placement]) -> float:
        """What one layer computes again only because of this item, or would."""
        without, kept = (recomputed(group, _with(row, self.position, p)) for p in (Placement.RECOMPUTE, Placement.HOST))
        return math.fsum(group.units[u].seconds for u in set(without) - set(kept))

    def _alternative(self, placement: Placement) -> Alternative:
        decision: Decision = tuple(
            _with(row, self.position, placement) if g in self.indices else row
            for g, row in enumerate(self.plan.decision)
        )
        outcome, before = self.problem.evaluate(decision), self.plan.outcome.seconds
        more = outcome.seconds - before if outcome.seconds != before else 0.0  # forever is as long as forever
        return Alternative(placement, more, *over(self.problem, outcome), outcome)

    # ---- sentences

    def _why(self, alternatives: dict[Placement, Alternative]) -> str:
        useful = set(recomputed(self.group, (Placement.RECOMPUTE,) * len(self.row)))
        own = {u for u, unit in enumerate(self.group.units) if unit.item == self.position}
        if self.placement is Placement.RECOMPUTE:
            if not own & useful:
                return NOT_NEEDED
            again = set(recomputed(self.group, self.row))
            if not own & again:
                kept = self._after(own, useful, kept=True)
                return f"not computed again: {_and(kept)}, computed from it, {'is' if len(kept) == 1 else 'are'} kept"
            if not self.again:
                after = _and(self._after(own, again, kept=False))
                return f"recomputed: {f'on the way to {after} in any case, ' if after else ''}costs nothing"
            lead = self._recomputed(alternatives.get(Placement.HOST))
        else:
            lead = self._on_host() if self.placement is Placement.HOST else self._on_device()
            if not own & useful:
                lead += f", though {NOT_NEEDED}"
            if Placement.RECOMPUTE not in self.item.placements:
                lead = f"always kept, as a loop keeps its carry; {lead}"
        against = [self._against(alternatives[p]) for p in _ORDER if p in alternatives]
        if Placement.HOST not in self.item.placements and all(group.layers == 1 for group in self.piece.groups):
            against.append("a single layer's way to the host would free nothing")
        if not against:
            return lead
        return f"{lead}{';' if ':' in lead else ':'} {'; '.join(against)}"

    def _recomputed(self, host: Alternative | None) -> str:
        again, link = format_seconds(self.again), max(self.out, self.back)
        if host is not None and host.fits and host.seconds > 0 and self.again < link < math.inf:
            return f"recomputed: {again} of computation is cheaper than {format_seconds(link)} of link"
        return f"recomputed, {again} a layer"

    def _on_device(self) -> str:
        lacking = over(self.problem, self.plan.outcome)[0]
        if lacking:
            return f"on the device, where the step needs {format_bytes(lacking)} more than there is"
        return "on the device, which has room"

    def _on_host(self) -> str:
        link = format_seconds(max(self.out, self.back))
        if not self.out and not self.back:
            return "on the host, over a link that takes no time"
        if not self.problem.pipelined:
            return f"on the host, and the step waits for {format_seconds(self.out + self.back)} of link a layer"
        parts = [self.plan.outcome.parts[g] for g in self.indices]
        late = _late(parts)
        if late is not None:
            return f"on the host, though {late[1]}"
        # Named is the pass that is fuller.
        forward = max(parts, key=lambda part: _share(part.out, part.forward))
        backward = max(parts, key=lambda part: _share(part.back, part.backward))
        if _share(forward.out, forward.forward) >= _share(backward.back, backward.backward):
            link, beside = self.out, f"{format_seconds(forward.forward)} of forward pass"
        else:
            link, beside = self.back, f"{format_seconds(backward.backward)} of backward pass"
        return f"on the host: its {format_seconds(link)} of link hide behind {beside}"

    def _against(self, one: Alternative) -> str:
        """What would come of an alternative: the limit it breaks, or how much slower it is and by what."""
        recompute = one.placement is Placement.RECOMPUTE
        where = "computing it again" if recompute else f"on the {one.placement}"
        if one.device_over:
            memory = "" if one.placement is Placement.DEVICE else " of device memory"
            return f"{where} the step would need {format_bytes(one.device_over)}{memory} more than there is"
        if one.host_over:
            name = host_limit(self.problem)[1]
            return f"{where} the step would need {format_bytes(one.host_over)} more than the host's {name} has"
        if recompute:
            where += f", {format_seconds(self.again)} a layer,"
        if one.seconds == -math.inf:
            return f"{where} a step would end"
        if abs(one.seconds) <= _SAME * abs(self.plan.seconds) or not one.seconds:
            return f"{where} {'takes as long' if recompute else 'no faster'}"
        if one.seconds == math.inf:
            return f"{where} a step would never end: nothing crosses the link"
        how = "slower" if one.seconds > 0 else "faster"
        text = f"{where} {'is ' if recompute else ''}{format_seconds(abs(one.seconds))} {how}"
        reason = self._slower(one) if one.seconds > 0 else ""
        return f"{text}: {reason}" if reason else text

    def _slower(self, one: Alternative) -> str:
        """By what an alternative is slower; nothing where that goes without saying."""
        if one.placement is Placement.RECOMPUTE:
            return ""
        if one.placement is Placement.DEVICE:
            if self.placement is not Placement.RECOMPUTE:
                return ""
            longer = self.item.device_seconds > self.again
            return "writing and reading it takes longer" if longer else "the link hides what is computed again"
        if not self.problem.pipelined:
            return f"the step would wait for {format_seconds(self.out + self.back)} of link a layer"
        before, after = ([outcome.parts[g] for g in self.indices] for outcome in (self.plan.outcome, one.outcome))
        ends = sum(self.problem.ends_stack(g) for g in self.indices)
        causes = {
            "nothing hides the last layer's way there and back": ends * (self.out + self.back),
            "keeping it there takes longer": _busy(after) - _busy(before),
        }
        late = _late(after)
        if late is not None:
            causes[late[1]] = _lateness(after) - _lateness(before)
        return max(causes, key=causes.__getitem__)

    def _after(self, own: set[int], within: set[int], *, kept: bool) -> list[str]:
        """The nearest activations computed from this one: those that are kept, or those that aren't."""
        reached, names = set(own), []
        for u, unit in enumerate(self.group.units):
            if u in own or not reached & set(unit.reads) or u not in within:
                continue
            waits = unit.item is not None and self.row[unit.item] is not Placement.RECOMPUTE
            if unit.item is not None and waits is kept:
                names.append(list(self.piece.placements)[unit.item])
            elif not waits:
                reached.add(u)
        return list(dict.fromkeys(names))


def _late(parts: Sequence[Part]) -> tuple[Number, str] | None:
    """The way of a pipelined group's transfers that its pass doesn't hide, by how much, in words."""
    found = []
    for part in parts:
        beside = max(part.forward, part.fetched)
        for extra, moved, seconds, way, name in (
            (part.out - beside, part.out, beside, "out", "forward"),
            (part.back - part.backward, part.back, part.backward, "in", "backward"),
        ):
            if extra > 0:
                takes = f"the link {way} takes {format_seconds(moved)} a layer"
                text = f"{takes}, its {name} pass {format_seconds(seconds)}"
                found.append((extra * part.layers, text))
    return max(found, default=None)


def _lateness(parts: Sequence[Part]) -> Number:
    """Seconds by which groups' transfers outlast their passes."""
    late = ((p.out - max(p.forward, p.fetched), p.back - p.backward) for p in parts)
    return sum(part.layers * sum(max(extra, 0) for extra in ways) for part, ways in zip(parts, late, strict=True))


def _busy(parts: Sequence[Part]) -> Number:
    return sum(part.layers * (part.forward + part.backward) for part in parts)


def _share(part: Number, whole: Number) -> float:
    return part / whole if whole else math.inf if part else 0.0


def _travel(count: Number, rate: Number) -> Number:
    if not count:
        return 0.0
    return count / rate if rate else math.inf


def _with(row: Sequence[Placement], position: int, placement: Placement) -> tuple[Placement, ...]:
    return tuple(placement if i == position else p for i, p in enumerate(row))


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
