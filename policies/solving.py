"""The best decision for a planner's problem, exactly, and what more memory or a faster link would buy."""

import dataclasses
import math

from .activation import Placement
from .integer_program import Program
from .problem import Decision, Limits, Number, Outcome, Problem
from .report import format_bytes

GIB = 2**30

# Of placements that take equally long: nothing is kept for nothing, and nothing moved for nothing.
_PREFERRED = (Placement.RECOMPUTE, Placement.DEVICE, Placement.HOST)
# Sums of the same seconds in another order differ by this.
_NOISE = 1e-12


class Infeasible(ValueError):
    """No decision keeps to the limits.

    - `device_shortfall`: how many more bytes of device memory would do, the host's limit staying; 0 where device
      memory isn't short, or where no amount of it would do.
    - `host_shortfall`: the same of host memory, the device's limit staying.
    - `both`: whether neither would do alone. The shortfalls then go together.
    - `least_device_bytes`, `least_host_bytes`: what such limits come to: the least that a decision needs of one memory
      within the limit of the other. Infinite where no decision keeps to that.
    - `phase`: the moment at which device memory is fullest, when as little as possible of what is short is used.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        phase: str,
        least_device_bytes: Number = math.inf,
        least_host_bytes: Number = math.inf,
        both: bool = False,
    ):
        self.limits, self.phase, self.both = limits, phase, both
        self.least_device_bytes, self.least_host_bytes = least_device_bytes, least_host_bytes
        self.device_shortfall = _shortfall(limits.device_bytes, least_device_bytes)
        self.host_shortfall = _shortfall(_host_limit(limits), least_host_bytes)
        super().__init__(self._sentence())

    def _sentence(self) -> str:
        limits, host = self.limits, _host_limit(self.limits)
        pool = "pinned host memory" if limits.pinned_bytes < limits.host_bytes else "host memory"
        device = (
            f"{format_bytes(self.least_device_bytes)} of device memory, {format_bytes(self.device_shortfall)} more "
            f"than the limit of {format_bytes(limits.device_bytes)}"
        )
        on_host = (
            f"{format_bytes(self.least_host_bytes)} of {pool}, {format_bytes(self.host_shortfall)} more than "
            f"the limit of {format_bytes(host)}"
        )
        when = f" (device memory is fullest in {self.phase})" if self.device_shortfall else ""
        if self.both:
            return f"nothing fits in both memories: it takes {on_host}, and with that {device}{when}"
        if self.device_shortfall and self.host_shortfall:
            return f"nothing fits: it takes {device}{when}, or else {on_host}"
        if self.host_shortfall:
            return f"nothing fits in host memory: it takes {on_host}, and no more device memory makes up for it"
        return f"nothing fits in device memory: it takes {device}{when}"


def solve(problem: Problem) -> Decision:
    """The decision that takes the least time within the limits, by `Problem.evaluate`.

    Exactly, but that of large problems with equal segments it may take any within a millionth of the least.

    Of placements that take equally long it prefers recomputing to keeping on the device, and that to the host, as far
    as changing them one by one finds it. So nothing is kept that the backward pass doesn't use.

    Raises `Infeasible` when no decision keeps to the limits.
    """
    problem = _without_dead_link(problem)
    program = Program(problem)
    decision = program.fastest(problem.limits.device_bytes, _host_limit(problem.limits))
    if decision is None:
        raise _infeasible(program)
    return _canonical(problem, decision)


def least_memory(problem: Problem) -> tuple[Decision, Outcome]:
    """The decision that takes the least device memory within the host's limits, and of those the fastest.

    The device's own limit doesn't matter. Raises `Infeasible` when no decision keeps to the host's.
    """
    unlimited = _limited(problem, math.inf)
    live = _without_dead_link(unlimited)
    decision = Program(live).least_device(_host_limit(problem.limits))
    if decision is None:
        raise _infeasible(Program(live))
    decision = solve(_limited(problem, problem.evaluate(decision).device_bytes))
    return decision, problem.evaluate(decision)


def frontier(problem: Problem, points: int = 12) -> list[tuple[Decision, Outcome]]:
    """Up to `points` decisions that trade device memory for time, from the smallest to the fastest.

    None takes more than another of both: each takes the least time in its memory, and the least memory for its time.
    The first is that of `least_memory`, the last is as fast as any within the host's limits; between them the memory
    grows by about equal steps. The device's own limit doesn't matter.

    Raises `Infeasible` when no decision keeps to the host's limits, and ValueError for less than two points.
    """
    if points < 2:
        raise ValueError(f"a frontier has two points at least, not {points}")
    first = least_memory(problem)
    program = Program(_without_dead_link(_limited(problem, math.inf)), nodes=200)  # a curve needn't be as exact
    last = _smallest(problem, program, math.inf)
    low, high = first[1].device_bytes, last[1].device_bytes
    found = [first]
    for k in range(1, points - 1):
        budget = low + (high - low) * k / (points - 1)
        # The budget may lie under what the decision before it takes, or buy nothing that one hasn't.
        if found[-1][1].device_bytes < budget < high:
            found.append(_smallest(problem, program, budget))
    found.append(last)
    kept = [first]
    for point in found[1:]:
        if point[1].seconds < kept[-1][1].seconds * (1 - 1e-9):
            # One of the curve may be slower than the next that takes no more: then it isn't of the curve.
            while kept and kept[-1][1].device_bytes >= point[1].device_bytes:
                kept.pop()
            kept.append(point)
    return kept


def marginal_seconds(
    problem: Problem, device_bytes: Number = GIB, *, host_bytes: Number = 0.0, link: Number = 1.0
) -> Number:
    """How many seconds faster a step gets with `device_bytes` more device memory, one GiB unless said otherwise.

    Or with `host_bytes` more host memory, pinned as well, or a link that is `link` times as fast both ways, or all of
    it. 0 where nothing of this binds. Raises `Infeasible` when no decision keeps to the limits as they are.
    """
    limits = problem.limits
    more = dataclasses.replace(
        problem,
        limits=Limits(
            limits.device_bytes + device_bytes, limits.host_bytes + host_bytes, limits.pinned_bytes + host_bytes
        ),
        out_rate=problem.out_rate * link,
        in_rate=problem.in_rate * link,
    )
    before, after = problem.evaluate(solve(problem)).seconds, more.evaluate(solve(more)).seconds
    # What is within the solver's tolerance is nothing.
    return before - after if after < before * (1 - 1e-9) else 0.0


def _smallest(problem: Problem, program: Program, budget: Number) -> tuple[Decision, Outcome]:
    """The fastest decision within `budget` bytes of device memory, and of those the one that takes the least of it."""
    host = _host_limit(problem.limits)
    fastest = program.fastest(budget, host)
    assert fastest is not None
    smallest = program.least_device(host, no_slower=fastest) or fastest
    bytes = min(problem.evaluate(d).device_bytes for d in (smallest, fastest))
    decision = _canonical(_limited(program.problem, bytes), smallest)
    return decision, problem.evaluate(decision)


def _canonical(problem: Problem, decision: Decision) -> Decision:
    """`decision` with each item where it is preferred, as far as that takes no longer and keeps to the limits."""
    outcome = problem.evaluate(decision)
    spare, parts = outcome.seconds * _NOISE, outcome.parts
    most = outcome.seconds + spare
    rows = [list(row) for row in decision]
    changed = True
    while changed:
        changed = False
        for g, group in enumerate(problem.groups):
            for i, item in enumerate(group.items):
                current = rows[g][i]
                for placement in _PREFERRED[: _PREFERRED.index(current)]:
                    if placement not in item.placements:
                        continue
                    rows[g][i] = placement
                    moved = tuple(map(tuple, rows))
                    if problem.part(g, moved).seconds <= parts[g].seconds + spare:  # or there is no need to look on
                        outcome = problem.evaluate(moved)
                        if outcome.seconds <= most and problem.fits(outcome):
                            parts, changed = outcome.parts, True
                            break
                    rows[g][i] = current
    return tuple(map(tuple, rows))


def _infeasible(program: Program) -> Infeasible:
    problem = program.problem
    limits, host = problem.limits, _host_limit(problem.limits)

    def outcome(decision: Decision) -> Outcome:
        return problem.evaluate(decision)

    smallest, lightest = program.least_device(host), program.least_host(limits.device_bytes)
    if smallest is None and lightest is None:
        # More of one memory won't do. As little as possible on the host, and then on the device.
        least_host = outcome(program.least_host(math.inf)).host_bytes
        needed = outcome(program.least_device(least_host))
        return Infeasible(
            limits,
            phase=needed.phase,
            least_device_bytes=needed.device_bytes,
            least_host_bytes=least_host,
            both=True,
        )
    needed = outcome(smallest if smallest is not None else lightest)
    return Infeasible(
        limits,
        phase=needed.phase,
        least_device_bytes=math.inf if smallest is None else needed.device_bytes,
        least_host_bytes=math.inf if lightest is None else outcome(lightest).host_bytes,
    )


def _without_dead_link(problem: Problem) -> Problem:
    """`problem` with rates that the program can be written with: over a link of rate 0 nothing is ever moved.

    Where the limits leave nothing else every decision takes forever, and the link doesn't matter.
    """
    if problem.out_rate and problem.in_rate:
        return problem
    live = dataclasses.replace(problem, out_rate=problem.out_rate or math.inf, in_rate=problem.in_rate or math.inf)
    groups = tuple(
        dataclasses.replace(
            group,
            items=tuple(
                dataclasses.replace(item, placements=tuple(p for p in item.placements if p is not Placement.HOST))
                if item.bytes
                else item
                for item in group.items
            ),
        )
        for group in live.groups
    )
    if all(item.placements for group in groups for item in group.items):
        still = dataclasses.replace(live, groups=groups)
        if Program(still).fastest(problem.limits.device_bytes, _host_limit(problem.limits)) is not None:
            return still
    return live


def _limited(problem: Problem, device_bytes: Number) -> Problem:
    return dataclasses.replace(problem, limits=dataclasses.replace(problem.limits, device_bytes=device_bytes))


def _host_limit(limits: Limits) -> Number:
    return min(limits.host_bytes, limits.pinned_bytes)


def _shortfall(limit: Number, least: Number) -> Number:
    """How much more than `limit` is needed, so that adding it does in floating point too; 0 for what nothing helps."""
    if least <= limit or least == math.inf:
        return 0.0
    more = least - limit
    return more if limit + more >= least else more + math.ulp(least)
