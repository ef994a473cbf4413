"""A plan in numbers: what its time is spent on, what binds, what else there was, and all of it as plain values."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from .activation import Placement
from .plan_reasons import over
from .problem import Decision, Number, Outcome, Part, Problem, recomputed
from .solving import GIB, frontier, marginal_seconds, solve

if TYPE_CHECKING:
    from .planned import Plan

_FASTER_LINK = 1.1
_WORTH = 1e-3  # of a step: less is no reason to call something binding
_MEMORIES = ("device memory", "host memory")
_BASELINES = {
    "all recomputed": Placement.RECOMPUTE,
    "all on the device": Placement.DEVICE,
    "all on the host": Placement.HOST,
}


class Marginal(NamedTuple):
    """Seconds by which a step would be faster, with a new choice, for a little more of one thing; 0 for nothing.

    - `device_memory`: one GiB more of it.
    - `host_memory`: one GiB more, pinned as well.
    - `link`: 10 % more bytes a second, both ways.
    """

    device_memory: float
    host_memory: float
    link: float


class Times(NamedTuple):
    """What a step's seconds are spent on, one after the other; they add up to the step.

    - `forward`, `backward`: of the layers, with what keeping activations costs device memory.
    - `recomputed`: in the backward pass.
    - `waiting`: for transfers that no computation hides.
    - `outside`: of the layers: embedding, head, loss, optimizer.
    """

    forward: float
    backward: float
    recomputed: float
    waiting: float
    outside: float


class Link(NamedTuple):
    """How busy the link is, one way in one pass through all layers.

    - `way`: `"out"`, to the host, or `"in"`, to the device.
    - `during`: `"forward"` or `"backward"`.
    - `seconds`: of a step's transfers.
    - `share`: of the time that the pass takes, waiting included.
    - `fullest`: the name of the group of layers where it is busiest, and `fullest_share` how busy: more than 1 where
      transfers take longer than what is computed beside them.
    """

    way: str
    during: str
    seconds: float
    share: float
    fullest: str
    fullest_share: float


class Baseline(NamedTuple):
    """A simple decision beside the plan's. `decision` is None for the plan's own."""

    name: str
    decision: Decision | None
    outcome: Outcome
    device_over: float
    host_over: float


def times(plan: "Plan") -> Times:
    """What a step's time is spent on."""
    problem, parts = plan.problem, plan.outcome.parts
    forward = math.fsum(part.layers * part.forward for part in parts)
    again = math.fsum(part.layers * part.again for part in parts)
    both = math.fsum(part.layers * (part.forward + part.backward) for part in parts)
    whole = math.fsum(part.seconds for part in parts)
    # The difference of sums that are equal needn't be nothing.
    waiting = whole - both if whole > both * (1 + 1e-12) else 0.0
    once = (forward, both - forward - again, again, waiting)
    return Times(*(problem.repeats * seconds for seconds in once), problem.outside_seconds)


def unavoidable(plan: "Plan") -> Number:
    """Seconds of a step that computing again takes whatever is kept: what has no name can't be."""
    groups = plan.problem.groups
    kept = ((Placement.DEVICE,) * len(group.items) for group in groups)
    again = (math.fsum(g.units[u].seconds for u in recomputed(g, row)) for g, row in zip(groups, kept, strict=True))
    return plan.problem.repeats * math.fsum(g.layers * seconds for g, seconds in zip(groups, again, strict=True))


def links(plan: "Plan") -> tuple[Link, ...]:
    """The link's two ways in the passes that use them: out in the forward pass, in in the backward one.

    And in in the forward one as well, where state lives on the host.
    """
    found = []
    for way, during, moved in (("out", "forward", "out"), ("in", "forward", "fetched"), ("in", "backward", "back")):
        parts = [(part, getattr(part, moved), _beside(part, during)) for part in plan.outcome.parts]
        seconds = math.fsum(part.layers * travel for part, travel, _ in parts)
        if not seconds:
            continue
        whole = math.fsum(part.layers * _lasts(part, during, plan.problem.pipelined) for part in plan.outcome.parts)
        most = max(range(len(parts)), key=lambda i: share(*parts[i][1:]))
        name, fullest = parts[most][0].name, share(*parts[most][1:])
        found.append(Link(way, during, plan.problem.repeats * seconds, share(seconds, whole), name, fullest))
    return tuple(found)


def _beside(part: Part, during: str) -> Number:
    return part.forward if during == "forward" else part.backward


def _lasts(part: Part, during: str, pipelined: bool) -> Number:
    """What one layer takes in a pass."""
    ways = (part.forward, part.out, part.fetched) if during == "forward" else (part.backward, part.back)
    return max(ways) if pipelined else math.fsum(ways)


def share(part: Number, whole: Number) -> Number:
    """`part` of `whole`: 0 of nothing is none, and more of it infinitely much."""
    if part == math.inf:
        return 1.0 if whole == math.inf else math.inf
    return part / whole if whole else math.inf if part else 0.0


def marginal(plan: "Plan") -> Marginal:
    """What a little more of each thing would save. Raises Infeasible when nothing fits the plan's limits."""
    problem = plan.problem
    return Marginal(
        marginal_seconds(problem, float(GIB)),
        marginal_seconds(problem, 0.0, host_bytes=float(GIB)),
        marginal_seconds(problem, 0.0, link=_FASTER_LINK),
    )


def binding(plan: "Plan") -> tuple[str, ...]:
    """What keeps a step from being faster, as `Plan.binding` defines it."""
    problem, outcome = plan.problem, plan.outcome
    moved = links(plan)
    # Where nothing overlaps, every transfer holds a step up.
    late = {one.way for one in moved if one.fullest_share > 1 or not problem.pipelined}
    if not fits(plan):
        found = [name for name, size in zip(_MEMORIES, over(problem, outcome), strict=True) if size]
    else:
        least = problem.repeats * math.fsum(g.layers * (g.forward_seconds + g.backward_seconds) for g in problem.groups)
        if outcome.seconds <= (least + unavoidable(plan) + problem.outside_seconds) * (1 + 1e-12):
            return ("compute",)
        # The plan was simulated, and may be slower than the best by sums, which other limits are tried by.
        best = min(problem.evaluate(solve(problem)).seconds, outcome.seconds)
        found = [
            name for name, limit in zip(_MEMORIES, ("device_bytes", "host_bytes"), strict=True)
            if _without_limit(problem, limit) < best * (1 - _WORTH)
        ]  # fmt: skip
        if not late and _other_choice(plan, plan.marginal().link):
            # The fuller way; the one out, which the shorter pass has to hide, where there is none yet.
            late = {max(moved, key=lambda one: one.fullest_share).way if moved else "out"}
    found += [f"link {way}" for way in ("out", "in") if way in late]
    return tuple(found) or ("compute",)


def _other_choice(plan: "Plan", gain: Number) -> bool:
    """Whether a faster link makes another choice the best, rather than only the same one's transfers shorter."""
    problem = plan.problem
    faster = dataclasses.replace(
        problem, out_rate=problem.out_rate * _FASTER_LINK, in_rate=problem.in_rate * _FASTER_LINK
    )
    same = plan.seconds - faster.evaluate(plan.decision).seconds
    return gain > same + _WORTH * plan.seconds


def _without_limit(problem: Problem, limit: str) -> Number:
    """Seconds of the best step with as much of one memory as it may want."""
    more = {limit: math.inf} | ({"pinned_bytes": math.inf} if limit == "host_bytes" else {})
    free = dataclasses.replace(problem, limits=dataclasses.replace(problem.limits, **more))
    return free.evaluate(solve(free)).seconds


def fits(plan: "Plan") -> bool:
    """Whether a plan keeps to its limits; one that the planner chose does."""
    return plan.problem.fits(plan.outcome)


def baselines(plan: "Plan") -> tuple[Baseline, ...]:
    """The plan, and everything recomputed, on the device, and on the host. What can't wait there waits on the device.

    And what can't wait on the device either is recomputed, or on the host.
    """
    found = [Baseline("this plan", None, plan.outcome, *over(plan.problem, plan.outcome))]
    for name, place in _BASELINES.items():
        order = (place, Placement.DEVICE, Placement.RECOMPUTE, Placement.HOST)
        decision = tuple(
            tuple(next(p for p in order if p in item.placements) for item in group.items)
            for group in plan.problem.groups
        )
        outcome = plan.problem.evaluate(decision)
        found.append(Baseline(name, decision, outcome, *over(plan.problem, outcome)))
    return tuple(found)


def trade(plan: "Plan") -> tuple[tuple[Number, Number, Decision], ...]:
    """Bytes of device memory, seconds of a step and the decision, from the least memory to the fastest."""
    return tuple((found.device_bytes, found.seconds, decision) for decision, found in frontier(plan.problem))


# ---- plain values


def as_json(plan: "Plan") -> dict[str, Any]:
    """Everything that a plan says, in numbers, texts, lists and dictionaries that JSON can hold; None for infinity.

    The frontier, as bytes and seconds, is in it where `Plan.frontier` has been asked for.
    """
    problem, outcome = plan.problem, plan.outcome
    groups = zip(problem.groups, outcome.parts, plan.decision, strict=True)
    found = {
        "hardware": plan.hardware.name,
        "devices": plan.devices,
        "dtype": plan.dtype,
        "tokens": plan.tokens,
        "model_flops": plan.model_flops,
        "seconds": plan.seconds,
        "flops_per_second": plan.flops_per_second,
        "mfu": plan.mfu,
        "tokens_per_second": plan.tokens_per_second,
        "fits": fits(plan),
        "device_bytes": plan.device_bytes,
        "simulated_bytes": plan.simulated_bytes,
        "calibrated": plan.calibrated,
        "fullest_phase": outcome.phase,
        "host_bytes": plan.host_bytes,
        "limits": dataclasses.asdict(problem.limits),
        "phases": {phase.name: problem.needed(phase, plan.decision) for phase in problem.phases},
        "binding": list(plan.binding),
        "times": times(plan)._asdict(),
        "unavoidably_recomputed_seconds": unavoidable(plan),
        "links": [link._asdict() for link in links(plan)],
        # Solving for it takes a while.
        "frontier": [point[:2] for point in plan.frontier()] if "_frontier" in vars(plan) else None,
        "marginal_seconds": plan.marginal()._asdict() if fits(plan) else None,
        "boundaries": list(plan.boundaries),
        "placements": {path: str(place) for path, place in plan.rules.items()},
        "groups": [
            {
                **dataclasses.asdict(part),
                "stack": group.stack,
                "placements": {item.path: str(place) for item, place in zip(group.items, row, strict=True)},
            }
            for group, part, row in groups
        ],
        "choices": [
            {
                "path": one.path,
                "placement": None if one.placement is None else str(one.placement),
                "bytes": one.bytes,
                "layers": one.layers,
                "again_seconds": one.again_seconds,
                "out_seconds": one.out_seconds,
                "in_seconds": one.in_seconds,
                "alternatives": {
                    str(other.placement): {
                        "seconds": other.seconds, "device_over": other.device_over, "host_over": other.host_over,
                    }
                    for other in one.alternatives
                },
                "why": one.why,
            }
            for one in plan.choices
        ],
        "alternatives": {
            one.name: {
                "seconds": one.outcome.seconds,
                "device_bytes": one.outcome.device_bytes,
                "host_bytes": one.outcome.host_bytes,
                "device_over": one.device_over,
                "host_over": one.host_over,
            }
            for one in baselines(plan)
            if one.decision is not None
        },
        "read_seconds": plan.read_seconds,
        "solve_seconds": plan.solve_seconds,
    }  # fmt: skip
    return _plain(found)


def _plain(value: Any) -> Any:
    """`value` with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    # What NumPy counted would be no plain number.
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
