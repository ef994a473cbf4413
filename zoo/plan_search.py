"""How to cut a training step so that it fits: in micro-batches, and among experts in rounds."""

from collections.abc import Callable

import jax

from ..layers.grid import Grid
from ..layers.moe import MoE
from ..layers.rounds import balanced_rounds
from ..policies.planned import Plan
from ..policies.planner import Planner
from ..policies.solving import Infeasible, least_memory
from .proving import Family

Tried = tuple[Planner, Plan | Infeasible]

# Memory between two numbers of micro-batches goes with their size but for this share: more short isn't read.
_SLACK = 0.1


class Search:
    """The fewest micro-batches that fit, with tokens exchanged among experts in rounds where they don't at once.

    - `planner`: that of the step in the fewest micro-batches, to say more where nothing fits.
    - `choice`: the numbers of micro-batches and rounds that are chosen; the last that were tried, where nothing fits.
    """

    planner: Planner
    choice: tuple[int, int]

    def __init__(
        self,
        family: Family,
        accumulate: int | None,
        expert_rounds: int | None,
        trial: Callable[[int, int], Tried],
    ):
        """`accumulate` and `expert_rounds` are given or None; `trial` plans a step for two such numbers."""
        self._trial = trial
        self.rounds = [expert_rounds or 1]
        if expert_rounds is None and (more := _balanced(family)) > 1:
            self.rounds.append(more)
        rows = family.batch_size // family.layout.size(family.layout.axes("batch"))
        self.parts = [accumulate] if accumulate else [n for n in range(1, rows + 1) if rows % n == 0]

    def __call__(self, confirmed: Callable[[Planner, Plan], Plan] | None = None) -> tuple[Planner, Plan]:
        """The planner and the plan of the step that is chosen. Raises Infeasible.

        Where it takes more micro-batches anyway, and so many fit with and without rounds, the faster plan is taken.

        - `confirmed`: what makes of a planner and its plan the one that is kept. It may raise Infeasible: then more
          micro-batches are tried.
        """
        while True:
            planner, found = self._chosen()
            if confirmed is None:
                return planner, found
            try:
                return planner, confirmed(planner, found)
            except Infeasible:
                self.parts = [parts for parts in self.parts if parts > self.choice[0]]
                if not self.parts:
                    self.planner = planner
                    raise

    def _chosen(self) -> tuple[Planner, Plan]:
        for rounds in self.rounds:
            self.planner, found = self._tried(self.parts[0], rounds)
            if isinstance(found, Plan):
                return self.planner, found
        rounds = self.rounds[-1]
        if len(self.parts) > 1:
            parts, (planner, found) = self._fewest(rounds)
        if isinstance(found, Infeasible):
            raise found
        if len(self.rounds) > 1:
            other, at_once = self._tried(parts, 1)
            if isinstance(at_once, Plan) and at_once.seconds <= found.seconds:
                return other, at_once
            self.choice = parts, rounds
        return planner, found

    def _tried(self, accumulate: int, rounds: int) -> Tried:
        self.choice = accumulate, rounds
        return self._trial(accumulate, rounds)

    def _fewest(self, rounds: int) -> tuple[int, Tried]:
        """The fewest micro-batches, above the first number, that fit, and what came of them; the most if none does."""
        most = self.parts[-1]
        last = self._tried(most, rounds)
        if isinstance(last[1], Infeasible):
            return most, last
        limit = last[0].problem.limits.device_bytes
        whole, least = (_least_bytes(planner) for planner in (self.planner, last[0]))
        first = self.parts[0]
        for parts in self.parts[1:-1]:
            share = (1 / parts - 1 / most) / (1 / first - 1 / most)
            if least + share * (whole - least) > (1 + _SLACK) * limit:
                continue
            tried = self._tried(parts, rounds)
            if isinstance(tried[1], Plan):
                return parts, tried
        self.choice = most, rounds
        return most, last


def _least_bytes(planner: Planner) -> float:
    """The least device memory that any decision needs."""
    try:
        return float(least_memory(planner.problem)[1].device_bytes)
    except Infeasible:  # not even on the host
        return float("inf")


def _balanced(family: Family) -> int:
    """The rounds in which the model's mixtures of experts need no more room than is sent on average."""
    grid = Grid(family.layout)
    nodes = jax.tree.leaves(family.model, is_leaf=lambda node: isinstance(node, MoE))
    routers = [node.router for node in nodes if isinstance(node, MoE)]
    return max((balanced_rounds(grid, router.num_experts, router.top_k) for router in routers), default=1)
