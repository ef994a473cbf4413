"""A plan: where each activation waits, what a step then takes, and why."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group as Renderables

from .activation import Placement, annotations
from .liveness import Footprint
from .machines import Hardware
from .pieces import Layers, find_stacks
from .plan_plots import draw
from .plan_reasons import Choice, choices
from .plan_text import alternatives, explanation, summary
from .plan_values import Marginal, as_json, binding, marginal, trade
from .problem import Decision, Group, Number, Outcome, Problem
from .report import Table


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The fastest way to place a program's activations within its memory; made by `policies.plan`.

    It can be given to `policies.place` in place of rules. Where `boundaries` are others than the model's,
    `zoo.resegment(model, plan.boundaries)` comes first.

    - `problem`, `decision`: the model of the step that was solved, and the choice (`policies.problem`).
    - `hardware`, `devices`: what it is for.
    - `tokens`: of a step, on all devices; None where the program doesn't say.
    - `model_flops`: of a step on one device, nothing computed again and attention counted in full squares.
    - `dtype`: the number format that products run in.
    - `read_seconds`, `solve_seconds`: what reading the program and choosing took.
    - `footprint`: the memory of the step, as simulated.
    - `simulated_bytes`: device memory that the step's program needs by simulation.
    - `calibrated`: whether `device_bytes` is what the hardware's compiler says of this plan; else it is simulated.
    """

    problem: Problem
    decision: Decision
    hardware: Hardware
    devices: int
    stacks: tuple[Layers, ...]
    fixed: Mapping[str, Placement]
    tokens: int | None
    model_flops: float
    dtype: str
    read_seconds: float
    solve_seconds: float
    footprint: Footprint
    simulated_bytes: int
    calibrated: bool = False

    @functools.cached_property
    def outcome(self) -> Outcome:
        """Time and memory of the choice."""
        return self.problem.evaluate(self.decision)

    @property
    def seconds(self) -> float:
        """A step's predicted time."""
        return self.outcome.seconds

    @property
    def device_bytes(self) -> int:
        """Device memory that a step needs, on each device."""
        return math.floor(self.outcome.device_bytes)

    @property
    def host_bytes(self) -> int:
        """Host memory that a step needs for each device: activations, and state that lives there."""
        return round(self.outcome.host_bytes)

    @property
    def offloaded_bytes(self) -> int:
        """Activations in host memory, for each device."""
        return round(self.outcome.host_bytes - self.problem.host_fixed_bytes)

    @property
    def flops_per_second(self) -> float:
        """Model FLOPs a second of each device."""
        return self.model_flops / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs a second as a share of the peak, in the number format that products run in."""
        return self.flops_per_second / self.hardware.peak(self.dtype)

    @property
    def tokens_per_second(self) -> float | None:
        """Of all devices together."""
        return None if self.tokens is None else self.tokens / self.seconds

    @functools.cached_property
    def pieces(self) -> tuple["Piece", ...]:
        """The groups of layers, neighbours that are placed alike as one, with the paths that their activations have."""
        return pieces_of(self.problem.groups, self.decision, self.stacks)

    @functools.cached_property
    def rules(self) -> dict[str, Placement]:
        """The placement of every activation, by its path in a model that is cut at `boundaries`."""
        return rules_of(self.pieces, self.stacks, self.fixed)

    @functools.cached_property
    def boundaries(self) -> tuple[int, ...]:
        """The layers, counted through all stacks of the model, that begin a segment: as `zoo.resegment` takes them."""
        return boundaries_of(self.pieces, self.stacks)

    def __call__(self, tree: Any) -> dict[str, Placement]:
        """The rules for `tree`, as `policies.place` asks for them.

        Raises ValueError when its stacks are cut at other layers, or it has none of the plan's activations.
        """
        for stack in find_stacks(tree):
            wanted = [piece.layers for piece in self.pieces if piece.stack == stack.path]
            if wanted and tuple(wanted) != stack.lengths:
                raise ValueError(
                    f"the plan is for segments of {_several(wanted)} layers in {stack.path!r}, and this model has "
                    f"{_several(stack.lengths)}: cut it first, model = zoo.resegment(model, {self.boundaries}), and a "
                    "training state that goes with it likewise"
                )
        paths = {row.path for row in annotations(tree)}
        rules = {path: place for path, place in self.rules.items() if path in paths}
        if missing := sorted(set(self.rules) - paths):
            raise ValueError(
                f"the plan is for another model: {type(tree).__name__} has no activation {missing[0]!r}"
                + (f", and {len(missing) - 1} more are missing" if len(missing) > 1 else "")
            )
        return rules

    # ---- what it says of itself

    @functools.cached_property
    def choices(self) -> tuple[Choice, ...]:
        """For every activation of every piece where it waits, what else there was, and why, in the program's order."""
        return choices(self)

    def explain(self) -> Table:
        """A table with a sentence for every activation: why it waits where it does."""
        return explanation(self)

    def alternatives(self) -> Table:
        """A table of simple decisions beside the plan: all recomputed, all on the device, all on the host.

        What can't be placed so waits on the device. They needn't fit: the last column says by how much they don't.
        """
        return alternatives(self)

    @functools.cached_property
    def binding(self) -> tuple[str, ...]:
        """What keeps a step from being faster: names among these, in this order.

        - `"device memory"`, `"host memory"`: with as much of it as it may want, another choice would make a step faster
          by a thousandth or more. In a plan that doesn't keep to its limits, what it has too little of.
        - `"link out"`, `"link in"`: in some group of layers the transfers to the host, or from it, take longer than
          what is computed beside them, or a link 10 % faster would make another choice the best, by as much: then the
          way that is the fuller. Without pipelining: whatever is moved that way.
        - `"compute"`: nothing of these. Only faster computation, or faster device memory, would help.
        """
        return binding(self)

    def frontier(self) -> tuple[tuple[Number, Number, Decision], ...]:
        """Bytes of device memory, seconds of a step and the decision: from the least memory to the fastest step.

        The device's own limit doesn't matter for it (`policies.solving.frontier`). Solved once. Raises `Infeasible`
        when nothing keeps to the host's limits.
        """
        return self._frontier

    def marginal(self) -> Marginal:
        """Seconds that a step would save with one more GiB of device memory, one of host memory, and 10 % more link.

        Each with the choice that is the best then. Solved once. Raises `Infeasible` when nothing keeps to the limits.
        """
        return self._marginal

    @functools.cached_property
    def _frontier(self) -> tuple[tuple[Number, Number, Decision], ...]:
        return trade(self)

    @functools.cached_property
    def _marginal(self) -> Marginal:
        return marginal(self)

    def plot(self) -> Any:
        """A matplotlib Figure: device memory over a step, and the step's time over device memory.

        Raises ModuleNotFoundError without matplotlib: pip install 'overspill[plot]'.
        """
        return draw(self)

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values that `json` can write: bytes, seconds, placements by path; None for infinity.

        The frontier is in it, as bytes and seconds, once `frontier` or `plot` has been asked for.
        """
        return as_json(self)

    def __str__(self) -> str:
        return "\n\n".join(map(str, summary(self)))

    __repr__ = __str__

    def __rich__(self) -> Any:
        return Renderables(*summary(self))

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in summary(self))


@dataclasses.dataclass(frozen=True)
class Piece:
    """Groups of layers, one after the other, that are placed alike: a segment of a stack, or a block on its own.

    `placements` are by the path within a layer.
    """

    stack: str
    segment: int | None
    groups: tuple[Group, ...]
    placements: Mapping[str, Placement]

    @property
    def layers(self) -> int:
        return sum(group.layers for group in self.groups)

    def path(self, rest: str) -> str:
        """The path of an activation in this segment."""
        where = self.stack if self.segment is None else f"{self.stack}.segments.{self.segment}"
        return f"{where}.{rest}" if where else rest


def pieces_of(
    groups: Sequence[Group], decision: Decision, stacks: Sequence[Layers], *, together: bool = True
) -> tuple[Piece, ...]:
    """The pieces that a decision makes of groups of layers: neighbours that it places alike as one, or each its own."""
    found: list[Piece] = []
    for group, row in zip(groups, decision, strict=True):
        ends = {end(item.path, group.stack): place for item, place in zip(group.items, row, strict=True)}
        before = found[-1] if found and together else None
        if before is not None and before.stack == group.stack and before.placements == ends:
            found[-1] = dataclasses.replace(before, groups=(*before.groups, group))
        else:
            index = sum(piece.stack == group.stack for piece in found)
            cut = any(group.stack == stack.path for stack in stacks)
            found.append(Piece(group.stack, index if cut else None, (group,), ends))
    return tuple(found)


def rules_of(
    pieces: Sequence[Piece], stacks: Sequence[Layers], fixed: Mapping[str, Placement]
) -> dict[str, Placement]:
    """The placement of every activation of `pieces`, and of those that are `fixed`, by its path in a segment."""
    rules = {piece.path(rest): place for piece in pieces for rest, place in piece.placements.items()}
    for path, place in fixed.items():
        stack = next((s for s in stacks if path.startswith(f"{s.path}.segments.")), None)
        if stack is None:
            rules[path] = place
            continue
        rules |= {p.path(end(path, stack.path)): place for p in pieces if p.stack == stack.path}
    return rules


def boundaries_of(pieces: Sequence[Piece], stacks: Sequence[Layers]) -> tuple[int, ...]:
    """The layers, counted through all stacks of the model, that begin a segment where each piece is one."""
    cuts: list[int] = []
    for stack in stacks:
        lengths = [piece.layers for piece in pieces if piece.stack == stack.path]
        cuts += [stack.start + n for n in itertools.accumulate(lengths)][:-1]
    return tuple(cuts)


def end(path: str, stack: str) -> str:
    """A path without its stack and its segment."""
    rest = path.removeprefix(f"{stack}.") if stack else path
    parts = rest.split(".")
    return ".".join(parts[2:]) if parts[0] == "segments" and len(parts) > 2 else rest


def _several(numbers: Any) -> str:
    return ", ".join(map(str, numbers))
