"""How a step grows with its batch: between two sizes that were read, and beyond."""

import dataclasses
from collections.abc import Callable

from .problem import Group, Phase, Problem
from .solving import Infeasible, least_memory


def stretched(small: Problem, large: Problem, share: int | float) -> Problem:
    """The problem that lies `share` of the way from `small` to `large`, all of its numbers being affine; beyond 1, too.

    Raises ValueError for problems of different programs.
    """
    if [len(g.items) for g in small.groups] != [len(g.items) for g in large.groups]:
        raise ValueError("the program has other activations with another batch, so nothing lies between the two")

    def mix(a: int | float, b: int | float) -> int | float:
        return a + (b - a) * share

    def table(a: tuple, b: tuple) -> tuple:
        return tuple(tuple(map(mix, x, y)) for x, y in zip(a, b, strict=True))

    def group(a: Group, b: Group) -> Group:
        items = tuple(
            dataclasses.replace(
                i,
                bytes=round(mix(i.bytes, j.bytes)),
                device_seconds=mix(i.device_seconds, j.device_seconds),
                host_seconds=mix(i.host_seconds, j.host_seconds),
            )
            for i, j in zip(a.items, b.items, strict=True)
        )  # fmt: skip
        # Another batch may be written as other operations; what memory depends on are the items alone.
        alike = len(a.units) == len(b.units)
        units = tuple(
            dataclasses.replace(u, seconds=mix(u.seconds, v.seconds)) for u, v in zip(a.units, b.units, strict=True)
        ) if alike else a.units  # fmt: skip
        return dataclasses.replace(
            a, items=items, units=units, forward_seconds=mix(a.forward_seconds, b.forward_seconds),
            backward_seconds=mix(a.backward_seconds, b.backward_seconds),
        )  # fmt: skip

    phases = {phase.name: phase for phase in large.phases}

    def phase(a: Phase) -> Phase:
        b = phases.get(a.name, a)
        return Phase(a.name, mix(a.fixed, b.fixed), table(a.device, b.device), table(a.host, b.host),
                     table(a.recompute, b.recompute))  # fmt: skip

    return dataclasses.replace(
        small,
        groups=tuple(map(group, small.groups, large.groups)),
        phases=tuple(map(phase, small.phases)),
        outside_seconds=mix(small.outside_seconds, large.outside_seconds),
        host_fixed_bytes=mix(small.host_fixed_bytes, large.host_fixed_bytes),
    )


def fits(problem: Problem) -> bool:
    """Whether any decision keeps to the limits."""
    try:
        _, outcome = least_memory(problem)
    except Infeasible:  # not even on the host
        return False
    return problem.fits(outcome)


def largest(problem_of: Callable[[int], Problem], most: int = 2**20) -> int:
    """The largest number of parts whose problem fits; 0 where not even one part does."""
    if not fits(problem_of(1)):
        return 0
    low, high = 1, 2
    while high <= most and fits(problem_of(high)):
        low, high = high, 2 * high
    return bisected(low, high, lambda parts: fits(problem_of(parts)))


def bisected(low: int, high: int, works: Callable[[int], bool], within: int = 1) -> int:
    """The largest number that works, or one less by no more than `within`, where `low` does and `high` doesn't."""
    while high - low > within:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low
