"""A planner's problem as a mixed-integer linear program, solved by HiGHS through `scipy.optimize.milp`.

Only placements are binary. Whether a unit is computed again is a continuous variable that the rows push up to 0 or 1:
without limits on memory the program is a minimum cut, whose relaxation is integral, so that branching has only the
limits and the pipeline's maxima to settle.
"""

import contextlib
import ctypes
import dataclasses
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_array

from .activation import Placement
from .problem import Decision, Group, Number, Problem

# HiGHS takes 1e-6 for nothing, in an objective and in a row. Both are scaled so that this is far below what counts: a
# billionth of a millisecond in ten seconds, less than a byte in a hundred GiB.
_SECONDS_SCALE = 1e4
_BYTES_SCALE = 1e3
_ALWAYS = -1  # the reader that stands for the backward pass itself
_MOST_CUTS = 200

# Equal segments leave many decisions within a millionth of each other. When so many nodes of the search tree haven't
# told them apart the best one found is taken if it is known to be that close to the optimum, or after four times as
# many again. Small problems need few.
_GAP = 1e-6


@dataclasses.dataclass(frozen=True)
class Chains:
    """A group's units, contracted to what decides whether they are computed again.

    - `constant`: seconds that no decision saves.
    - `named`: for a unit that can be kept or not: its item, its seconds with those of unnamed ones that only it needs,
      and the units that need it (-1 for the backward pass itself).
    - `shared`: seconds of unnamed units that any of a set of named ones needs.
    """

    constant: Number
    named: dict[int, tuple[int, Number, frozenset[int]]]
    shared: dict[frozenset[int], Number]


def chains(group: Group) -> Chains:
    """The units of a group, with every unnamed one taken into the named ones that it is computed for."""
    readers: list[set[int]] = [{_ALWAYS} if unit.wanted else set() for unit in group.units]
    constant = 0.0
    named: dict[int, tuple[int, Number, frozenset[int]]] = {}
    shared: dict[frozenset[int], Number] = {}
    for u in range(len(group.units) - 1, -1, -1):
        unit, by = group.units[u], readers[u]
        if not by:
            continue
        if _ALWAYS in by:  # whatever else needs it adds nothing
            by = {_ALWAYS}
        placements = (Placement.RECOMPUTE,) if unit.item is None else group.items[unit.item].placements
        if Placement.RECOMPUTE not in placements:
            continue
        if set(placements) > {Placement.RECOMPUTE}:
            named[u] = unit.item, unit.seconds, frozenset(by)
            by = {u}
        elif by == {_ALWAYS}:
            constant += unit.seconds
        else:
            shared[frozenset(by)] = shared.get(frozenset(by), 0.0) + unit.seconds
        for read in unit.reads:
            readers[read] |= by
    for by in [by for by in shared if len(by) == 1]:
        (u,) = by
        item, seconds, its = named[u]
        named[u] = item, seconds + shared.pop(by), its
    return Chains(constant, named, {by: seconds for by, seconds in shared.items() if seconds})


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes in one memory at one moment: each item's smallest placement is in `base`, `weights` are what others add."""

    base: Number
    weights: dict[int, Number]
    most: Number  # that the weights can come to


class Program:
    """The program of `problem`, without its limits: each minimum is asked for under limits of its own, in bytes.

    The link's rates must not be 0. `binaries` is how many placements there are to choose from. `nodes` of the search
    tree are spent on an exact minimum.
    """

    def __init__(self, problem: Problem, nodes: int = 1000):
        self.problem = problem
        self._nodes = nodes
        self._columns = 0  # all from 0 to 1, but for those in `_long`
        self._long: list[int] = []
        self._rows: list[tuple[dict[int, Number], Number, Number]] = []
        self._cost: dict[int, Number] = {}
        self._constant = 0.0
        self._placed = {
            (g, i, placement): self._column()
            for g, group in enumerate(problem.groups)
            for i, item in enumerate(group.items)
            for placement in item.placements
        }
        self.binaries = self._columns
        self._scale = _SECONDS_SCALE / _usual_seconds(problem)
        for g, group in enumerate(problem.groups):
            for i, item in enumerate(group.items):
                self._row({self._placed[g, i, p]: 1.0 for p in item.placements}, 1.0, 1.0)
            self._time(g)
        self._device = [
            self._memory(phase.fixed, {(g, i, p): phase.of(p)[g][i] for g, i, p in self._placed})
            for phase in problem.phases
        ]
        sizes = {
            (g, i, p): problem.groups[g].layers * problem.groups[g].items[i].bytes if p is Placement.HOST else 0.0
            for g, i, p in self._placed
        }
        self._host = self._memory(problem.host_fixed_bytes, sizes)

    def fastest(self, device: Number, host: Number) -> Decision | None:
        """The decision that takes the least seconds within both limits; None where there is none."""
        return self._least(self._cost, device, host)

    def least_host(self, device: Number) -> Decision | None:
        """The decision that fills the host least within the device's limit."""
        scale = _BYTES_SCALE / (self._host.most or 1.0)
        return self._least({c: w * scale for c, w in self._host.weights.items()}, device, math.inf)

    def least_device(self, host: Number, no_slower: Decision | None = None) -> Decision | None:
        """The decision that fills the device least within the host's limit.

        With `no_slower` only among those that take no longer than that one, to the solver's tolerance.
        """
        floor = min(memory.base for memory in self._device)
        scale = _BYTES_SCALE / (max(memory.base + memory.most for memory in self._device) - floor or 1.0)
        # One more column: what the fullest phase has above the floor.
        peak = self._columns
        rows = [
            ({peak: 1.0} | {c: -w * scale for c, w in memory.weights.items()}, (memory.base - floor) * scale, math.inf)
            for memory in self._device
        ]
        if no_slower is not None:
            rows.append((self._cost, -math.inf, self._seconds_of(no_slower)))
        return self._least({peak: 1.0}, math.inf, host, rows)

    def _least(
        self, objective: Mapping[int, Number], device: Number, host: Number, rows: Sequence = ()
    ) -> Decision | None:
        rows = [*self._rows, *rows]
        limited = [(memory, device) for memory in self._device] + [(self._host, host)]
        for memory, limit in limited:
            room = limit - memory.base
            if room < -1e-9 * max(1.0, abs(limit)):
                return None
            if not memory.most and room < 0:
                return None
            if room < memory.most:
                scale = _BYTES_SCALE / memory.most
                rows.append(({c: w * scale for c, w in memory.weights.items()}, -math.inf, max(room, 0.0) * scale))
        for _ in range(_MOST_CUTS):
            decision = self._solved(objective, rows)
            if decision is None:
                return None
            over = self._over(decision, device, host)
            if not over:
                return decision
            # HiGHS keeps to limits within a tolerance. What is over one by less is cut off, and nothing else.
            chosen = [self._placed[g, i, p] for g, row in enumerate(decision) for i, p in enumerate(row)]
            for memory, limit in over:
                cover = _cover(memory, limit, chosen)
                if not cover:
                    return None
                rows.append((dict.fromkeys(cover, 1.0), -math.inf, len(cover) - 1.0))
        raise RuntimeError(f"{_MOST_CUTS} decisions in a row were over a limit by less than the solver's tolerance")

    def _solved(self, objective: Mapping[int, Number], rows: Sequence) -> Decision | None:
        """The decision with the least of `objective` that keeps to `rows` within the solver's tolerances."""
        if not self._placed:
            return tuple(() for _ in self.problem.groups)
        columns = max(self._columns, 1 + max(objective, default=0))
        cost = np.zeros(columns)
        cost[list(objective)] = list(objective.values())
        upper = np.ones(columns)
        upper[self._long + list(range(self._columns, columns))] = math.inf
        starts = np.cumsum([0] + [len(weights) for weights, _, _ in rows])
        indices = np.array([c for weights, _, _ in rows for c in weights], dtype=np.int32)
        values = np.array([w for weights, _, _ in rows for w in weights.values()], dtype=float)
        matrix = csr_array((values, indices, starts), shape=(len(rows), columns))
        found = _minimum(
            cost,
            np.arange(columns) < self.binaries,
            Bounds(0.0, upper),
            LinearConstraint(matrix, [low for _, low, _ in rows], [high for _, _, high in rows]),
            # What the objective leaves out of a step's time.
            self._constant + self.problem.outside_seconds * self._scale if objective is self._cost else 0.0,
            self._nodes,
        )
        if found is None:
            return None
        return tuple(
            tuple(
                max(item.placements, key=lambda p: found[self._placed[g, i, p]]) for i, item in enumerate(group.items)
            )
            for g, group in enumerate(self.problem.groups)
        )

    def _over(self, decision: Decision, device: Number, host: Number) -> list[tuple[Memory, Number]]:
        """The memories that a decision overfills, with their limits, added up as `Problem.evaluate` does."""
        phases = zip(self._device, self.problem.phases, strict=True)
        over = [(memory, device) for memory, phase in phases if self.problem.needed(phase, decision) > device]
        return over + [(self._host, host)] * (self.problem.host_bytes(decision) > host)

    def _seconds_of(self, decision: Decision) -> Number:
        """A decision's value in the objective of `fastest`."""
        problem = self.problem
        return (problem.evaluate(decision).seconds - problem.outside_seconds) * self._scale - self._constant

    def _column(self) -> int:
        self._columns += 1
        return self._columns - 1

    def _row(self, weights: dict[int, Number], lower: Number, upper: Number = math.inf) -> None:
        self._rows.append((weights, lower, upper))

    def _memory(self, base: Number, sizes: dict[tuple[int, int, Placement], Number]) -> Memory:
        weights: dict[int, Number] = {}
        most = 0.0
        for g, group in enumerate(self.problem.groups):
            for i, item in enumerate(group.items):
                own = {self._placed[g, i, p]: sizes[g, i, p] for p in item.placements}
                least = min(own.values())
                base += least
                most += max(own.values()) - least
                weights |= {c: size - least for c, size in own.items() if size > least}
        return Memory(base, weights, most)

    def _again(self, g: int) -> tuple[Number, dict[int, Number]]:
        """What group `g` computes again in one layer: seconds in any case, and columns with theirs."""
        found = chains(self.problem.groups[g])
        columns = {u: self._column() for u in found.named}
        seconds = {columns[u]: own for u, (_, own, _) in found.named.items()}
        for u, (item, _, readers) in found.named.items():
            gone = self._placed[g, item, Placement.RECOMPUTE]
            for reader in readers:  # needed, it is computed again or kept
                if reader == _ALWAYS:
                    self._row({columns[u]: 1.0, gone: -1.0}, 0.0)
                else:
                    self._row({columns[u]: 1.0, gone: -1.0, columns[reader]: -1.0}, -1.0)
        for readers, own in found.shared.items():
            column = self._column()
            seconds[column] = own
            for reader in readers:
                self._row({column: 1.0, columns[reader]: -1.0}, 0.0)
        return found.constant, seconds

    def _time(self, g: int) -> None:
        """Puts group `g`'s seconds into the objective, with the rows of its pipeline's maxima."""
        problem, group = self.problem, self.problem.groups[g]
        constant, again = self._again(g)
        half: dict[int, Number] = {}
        out: dict[int, Number] = {}
        back: dict[int, Number] = {}
        for i, item in enumerate(group.items):
            if Placement.DEVICE in item.placements:
                half[self._placed[g, i, Placement.DEVICE]] = item.device_seconds / 2
            if Placement.HOST in item.placements:
                column = self._placed[g, i, Placement.HOST]
                half[column] = item.host_seconds / 2
                out[column] = item.bytes / problem.out_rate
                back[column] = item.bytes / problem.in_rate
        n = problem.repeats * group.layers
        forward = (group.forward_seconds, half)
        backward = (group.backward_seconds + constant, half | again)
        outward = (group.out_bytes / problem.out_rate, out)
        inward = (group.in_backward_bytes / problem.in_rate, back)
        first = (group.in_forward_bytes / problem.in_rate, {})
        if problem.pipelined:
            self._longest(n, forward, outward, first)
            self._longest(n, backward, inward)
            if problem.ends_stack(g):
                self._longest(problem.repeats, outward)
                self._longest(problem.repeats, inward)
        else:
            for part in (forward, outward, first, backward, inward):
                self._longest(n, part)

    def _longest(self, times: int, *parts: tuple[Number, dict[int, Number]]) -> None:
        """Puts the longest of `parts`, each a constant and columns' weights in seconds, into the objective.

        Beyond the longest constant, that is: no decision changes those.
        """
        scale = times * self._scale
        least = max(constant for constant, _ in parts)
        self._constant += least * scale
        longer = [(constant, weights) for constant, weights in parts if constant + sum(weights.values()) > least]
        if len(longer) == 1 and longer[0][0] == least:
            for column, weight in longer[0][1].items():
                self._cost[column] = self._cost.get(column, 0.0) + weight * scale
        elif longer:
            column = self._column()
            self._long.append(column)
            self._cost[column] = 1.0
            for constant, weights in longer:
                self._row({column: 1.0} | {c: -w * scale for c, w in weights.items() if w}, (constant - least) * scale)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keeps what HiGHS prints of its own debugging, whatever it is told, out of standard output."""
    try:
        flush = ctypes.CDLL(None).fflush
        flush.argtypes = [ctypes.c_void_p]
        sys.stdout.flush()
        flush(None)
        kept = os.dup(1)
    except (OSError, AttributeError, TypeError, ValueError):  # no such library, or no standard output
        yield
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)


def _minimum(
    cost: np.ndarray, integrality: np.ndarray, bounds: Bounds, rows: LinearConstraint, beside: Number, nodes: int
) -> np.ndarray | None:
    """The columns of the least cost; where that takes too many nodes, about within `_GAP` of it and `beside`."""

    def run(**options: Any) -> OptimizeResult:
        with _silent():
            return milp(cost, integrality=integrality, bounds=bounds, constraints=rows, options=options)

    found = run(mip_rel_gap=0.0, node_limit=nodes)
    if found.status not in (0, 2):
        if found.x is None:  # none found yet, or presolve can't tell infeasible from unbounded
            found = run(mip_rel_gap=_GAP, presolve=False)
        else:
            gap = _GAP * (found.mip_dual_bound + beside)
            if found.fun - found.mip_dual_bound > gap:
                found = run(mip_rel_gap=gap / found.fun, node_limit=4 * nodes)
    if found.status != 2 and found.x is None:
        raise RuntimeError(f"HiGHS found no minimum: {found.message}")
    return found.x if found.status != 2 else None


def _cover(memory: Memory, limit: Number, chosen: Sequence[int]) -> list[int]:
    """Some of the `chosen` placements, few, that are over the limit whatever the others are."""
    cover: list[int] = []
    total = memory.base
    for column in sorted(chosen, key=lambda c: -memory.weights.get(c, 0.0)):
        # Beyond the noise of adding up in another order: else only this very decision is cut off.
        if total > limit + 1e-12 * abs(limit):
            return cover
        cover.append(column)
        total += memory.weights.get(column, 0.0)
    return list(chosen)


def _usual_seconds(problem: Problem) -> Number:
    """A step's time, roughly: the least that it takes, or where that is nothing what decisions can add. Never 0."""
    groups = problem.groups
    least = sum(group.layers * (group.forward_seconds + group.backward_seconds) for group in groups)
    most = sum(
        group.layers
        * (
            sum(unit.seconds for unit in group.units)
            + sum(item.device_seconds + item.host_seconds for item in group.items)
            + sum(item.bytes / problem.out_rate + item.bytes / problem.in_rate for item in group.items)
        )
        for group in groups
    )
    return problem.outside_seconds + problem.repeats * least or problem.repeats * most or 1.0
