"""Pictures of a plan: device memory over a step, and step time over device memory. They need matplotlib."""

import dataclasses
import io
import math
from typing import TYPE_CHECKING, Any

from .activation import Placement
from .problem import Number, Phase
from .solving import GIB

if TYPE_CHECKING:
    from .planned import Plan


@dataclasses.dataclass(frozen=True)
class Level:
    """Device memory at one moment of a step, in bytes; what there is adds up to `bytes`.

    - `arguments`: of the state and the batch.
    - `kept`: activations that wait on the device.
    - `passing`: what others take there: on their way to the host or back, or computed again.
    - `working`: gradients, scratch, and all else.
    """

    name: str
    arguments: Number
    kept: Number
    passing: Number
    working: Number

    @property
    def bytes(self) -> Number:
        return self.arguments + self.kept + self.passing + self.working


def levels(plan: "Plan") -> tuple[Level, ...]:
    """Device memory in the phases of a step, in the order in which they come."""
    phases = sorted(enumerate(plan.problem.phases), key=lambda pair: (*_when(plan, pair[1]), pair[0]))
    return tuple(_level(plan, phase) for _, phase in phases)


def _when(plan: "Plan", phase: Phase) -> tuple[int, int]:
    """Where in a step a phase is: forward through all layers, the loss, and back through them."""
    way, _, where = phase.name.partition(" of ")
    groups = [i for i, group in enumerate(plan.problem.groups) if where in (group.name, group.stack)]
    if way == "forward":
        return (0, groups[0]) if groups else (1, 0)
    if way == "backward":
        return (4, -groups[-1]) if groups else (3, 0)
    return {"loss": 2, "optimizer": 6}.get(way, 5), 0


def _level(plan: "Plan", phase: Phase) -> Level:
    sums = dict.fromkeys(Placement, 0.0)
    for g, row in enumerate(plan.decision):
        for i, place in enumerate(row):
            sums[place] += phase.of(place)[g][i]
    arguments = max(min(float(plan.footprint.arguments), phase.fixed), 0.0)
    passing = sums[Placement.HOST] + sums[Placement.RECOMPUTE]
    return Level(phase.name, arguments, sums[Placement.DEVICE], passing, phase.fixed - arguments)


def figure_class() -> Any:
    """Matplotlib's Figure. Raises ModuleNotFoundError, saying what to install, without it."""
    try:
        from matplotlib.figure import Figure  # not pyplot: no window system is asked for
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        text = "plots need matplotlib: pip install 'overspill[plot]'"
        raise ModuleNotFoundError(text, name="matplotlib") from None
    return Figure


def draw(plan: "Plan") -> Any:
    """A matplotlib Figure with both. Raises ModuleNotFoundError without matplotlib."""

    class Picture(figure_class()):
        """Shows itself in a notebook, which knows how to show figures of pyplot only."""

        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            self.savefig(data, format="png", dpi=80)
            return data.getvalue()

    figure = Picture(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_memory(left, plan)
    _draw_frontier(right, plan)
    # Names of devices may hold a dollar sign, which would be mathematics.
    title = f"{plan.devices:,} x {plan.hardware.description}: {_duration(plan.seconds)} a step"
    figure.suptitle(title, parse_math=False)
    return figure


def _draw_memory(axes: Any, plan: "Plan") -> None:
    shown = levels(plan)
    places = range(len(shown))
    base = [0.0] * len(shown)
    for name, label, color in (
        ("arguments", "state and batch", "0.65"), ("kept", "activations kept here", "C0"),
        ("passing", "moved or computed again", "C1"), ("working", "gradients and scratch", "0.85"),
    ):  # fmt: skip
        sizes = [getattr(level, name) / GIB for level in shown]
        axes.bar(places, sizes, bottom=base, width=0.9, label=label, color=color)
        base = [below + size for below, size in zip(base, sizes, strict=True)]
    fullest = max(places, key=base.__getitem__)
    axes.annotate(f"{base[fullest]:.1f}", (fullest, base[fullest]), ha="center", va="bottom", fontsize=8)
    limit = plan.problem.limits.device_bytes / GIB
    top = max(base)
    # One far above would leave nothing to see.
    if limit <= 4 * top:
        axes.axhline(limit, color="C3", linestyle="--", linewidth=1, label=f"limit, {limit:.1f} GiB")
        top = max(top, limit)
    # Room above for the legend.
    axes.set_ylim(0, 1.35 * top or 1)
    axes.set_xticks(list(places), [level.name for level in shown], rotation=40, ha="right", fontsize=8)
    axes.set(ylabel="device memory (GiB)", title="Memory over a step, in its order")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, loc="upper left", ncols=3)


def _draw_frontier(axes: Any, plan: "Plan") -> None:
    points = [(size, seconds) for size, seconds, _ in plan.frontier()]
    mine = (plan.outcome.device_bytes, plan.seconds)
    # The frontier is known at some points only; a plan that fits may lie between two of them.
    points = _undominated([*points, mine] if plan.problem.fits(plan.outcome) else points)
    slow = max((seconds for _, seconds in [*points, mine] if math.isfinite(seconds)), default=0.0)
    unit, scale = ("s", 1.0) if slow >= 10 else ("ms", 1e3)
    sizes, times = [size / GIB for size, _ in points], [seconds * scale for _, seconds in points]
    # Between two points nothing faster than the smaller one is known.
    axes.plot(sizes, times, "o-", drawstyle="steps-post", color="C0", markersize=4, label="fastest within it")
    if math.isfinite(plan.seconds):
        axes.plot(mine[0] / GIB, mine[1] * scale, "*", color="C1", markersize=14, label="this plan", zorder=3)
        sizes.append(mine[0] / GIB)
    limit = plan.problem.limits.device_bytes / GIB
    if sizes and limit <= 1.5 * max(sizes):
        axes.axvline(limit, color="C3", linestyle="--", linewidth=1, label=f"limit, {limit:.1f} GiB")
    # Numbers around one value would be written as differences from it.
    axes.ticklabel_format(useOffset=False)
    axes.set(xlabel="device memory (GiB)", ylabel=f"step ({unit})", title="Step time over device memory")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _undominated(points: list[tuple[Number, Number]]) -> list[tuple[Number, Number]]:
    """By memory, those that nothing in as little memory is as fast as."""
    kept: list[tuple[Number, Number]] = []
    for size, seconds in sorted(points):
        if math.isfinite(seconds) and (not kept or seconds < kept[-1][1]):
            kept.append((size, seconds))
    return kept


def _duration(seconds: Number) -> str:
    if not math.isfinite(seconds):
        return "forever"
    return f"{seconds:.2f} s" if seconds >= 10 else f"{1e3 * seconds:,.1f} ms"
