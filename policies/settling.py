"""The best decision for a planner's problem by what its own program is simulated to need, not by sums alone."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from .activation import Placement
from .problem import Decision, Item, Number, Problem
from .solving import Infeasible, least_memory, solve

_STEPS = 256  # budgets from an amount of memory to twice as much


def settled(
    problem: Problem, simulated: Callable[[Decision], Number], others: Sequence[Decision] = ()
) -> tuple[Decision, Number]:
    """The fastest decision whose device memory, as simulated, keeps to the limit, and that memory in bytes.

    Sums over placements don't know what placements do to each other. So the decision is looked for among those that
    `problem` has for budgets of device memory other than the limit: more where its sums are too high, less where they
    are too low. The budgets are the same whatever the limit, 0.3 % apart, and the largest that does is taken: more
    memory never makes a step slower, as long as larger budgets need more memory. `others` are looked at besides.

    Raises `Infeasible`.
    """
    limit = problem.limits.device_bytes
    known: dict[Decision, Number] = {}

    def needed(decision: Decision) -> Number:
        if decision not in known:
            known[decision] = simulated(decision)
        return known[decision]

    def seconds(decision: Decision) -> Number:
        return problem.evaluate(decision).seconds

    free = solve(_limited(problem, math.inf))
    if needed(free) <= limit:
        return free, needed(free)
    smallest, outcome = least_memory(problem)
    candidates = [smallest, *(decision for decision in others if _on_host(problem, decision))]
    if (least := min(map(needed, candidates))) > limit:
        # With what was simulated in place of the sums, the error says how much is short.
        solve(shifted(problem, least - outcome.device_bytes))
    best = min((decision for decision in candidates if needed(decision) <= limit), key=seconds)
    # A loop that moves anything needs memory for that alone, which sums take for a part of each thing that it moves:
    # what moves nothing is looked for on its own.
    for variant in (problem, _still(problem)):
        if variant is not None:
            best = _search(variant, needed, seconds(best)) or best
    return best, needed(best)


def _search(problem: Problem, needed: Callable[[Decision], Number], seconds: Number) -> Decision | None:
    """The decision for the largest budget whose decision keeps to the limit; None where none takes under `seconds`."""
    limit, found = problem.limits.device_bytes, None
    _, least = least_memory(problem)
    free = problem.evaluate(solve(_limited(problem, math.inf)))
    # Budgets up to `low` do, or bring nothing; those from `high` on don't.
    low, high, step = _step(least.device_bytes), _step(free.device_bytes) + 2, _step(limit)
    while high - low > 1:
        step = min(max(step, low + 1), high - 1)
        decision = solve(_limited(problem, 2 ** (step / _STEPS)))
        if (its := problem.evaluate(decision).seconds) >= seconds:
            low, step = step, (step + high) // 2
            continue
        # As far again as it was off, or half of what is left.
        off = _step(limit) - _step(needed(decision))
        if needed(decision) <= limit:
            low, found, seconds = step, decision, its
            step = low + max(off, 1) if off < high - low else (low + high) // 2
        else:
            high = step
            step = high + min(off, -1) if -off < high - low else (low + high) // 2
    return found


def smallest(problem: Problem, simulated: Callable[[Decision], Number], others: Sequence[Decision] = ()) -> Decision:
    """What is simulated to need the least device memory, of the least by sums and `others`. Raises `Infeasible`."""
    least, _ = least_memory(problem)
    return min((least, *(decision for decision in others if _on_host(problem, decision))), key=simulated)


def fits(problem: Problem, simulated: Callable[[Decision], Number], others: Sequence[Decision] = ()) -> bool:
    """Whether `settled` finds anything."""
    try:
        return simulated(smallest(problem, simulated, others)) <= problem.limits.device_bytes
    except Infeasible:  # not even on the host
        return False


def shifted(problem: Problem, size: Number) -> Problem:
    """A problem with so many more bytes of device memory taken at every moment."""
    phases = tuple(dataclasses.replace(phase, fixed=phase.fixed + size) for phase in problem.phases)
    return dataclasses.replace(problem, phases=phases)


def _still(problem: Problem) -> Problem | None:
    """A problem in which nothing is moved; None where that is no other one, or something has to be."""
    movable = [item for group in problem.groups for item in group.items if Placement.HOST in item.placements]
    if not movable or any(len(item.placements) == 1 for item in movable):
        return None

    def without(item: Item) -> Item:
        return dataclasses.replace(item, placements=tuple(p for p in item.placements if p is not Placement.HOST))

    groups = (dataclasses.replace(group, items=tuple(map(without, group.items))) for group in problem.groups)
    return dataclasses.replace(problem, groups=tuple(groups))


def _on_host(problem: Problem, decision: Decision) -> bool:
    """Whether a decision keeps to the host's limits."""
    return problem.host_bytes(decision) <= min(problem.limits.host_bytes, problem.limits.pinned_bytes)


def _step(size: Number) -> int:
    """The largest budget within `size` bytes."""
    return math.floor(math.log2(max(size, 1)) * _STEPS)


def _limited(problem: Problem, device_bytes: Number) -> Problem:
    return dataclasses.replace(problem, limits=dataclasses.replace(problem.limits, device_bytes=device_bytes))
