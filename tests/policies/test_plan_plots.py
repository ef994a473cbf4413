import builtins
import dataclasses
import sys

import pytest

from overspill.policies.liveness import Footprint
from overspill.policies.machines import hardware
from overspill.policies.plan_plots import levels
from overspill.policies.planned import Plan
from overspill.policies.problem import PLACEMENTS, Group, Item, Limits, Phase, Problem, Unit
from overspill.policies.solving import solve

DEVICE, HOST, RECOMPUTE = PLACEMENTS
GIB = 2**30
MS = 1e-3
GROUPS = tuple(
    Group(
        f"blocks {4 * i} to {4 * i + 3}", "blocks", 4, (Item("blocks.x", GIB), Item("blocks.y", GIB // 2)),
        (Unit(2 * MS, wanted=True, item=0), Unit(MS, (0,), True, 1)), 10 * MS, 20 * MS,
    )
    for i in range(2)
)  # fmt: skip


def phase(name, fixed, live):
    table = lambda times: tuple(tuple(times(g) * item.bytes for item in group.items) for g, group in enumerate(GROUPS))
    inside = [g for g, group in enumerate(GROUPS) if name.endswith(group.name)]
    return Phase(
        name,
        fixed * GIB,
        table(lambda g: 4.0 if g in live else 0.0),
        table(lambda g: 1.5 if g in inside else 0.0),
        table(lambda g: 0.25 if g in inside else 0.0),
    )


# As they are found: not in the order of a step.
PHASES = (
    phase("optimizer", 3, ()),
    phase("loss", 6, (0, 1)),
    phase("forward of blocks 0 to 3", 4, (0,)),
    phase("forward of blocks 4 to 7", 4, (0, 1)),
    phase("forward", 5, (0, 1)),
    phase("backward of blocks 0 to 3", 7, (0,)),
    phase("backward", 5, (0, 1)),
    phase("backward of blocks 4 to 7", 6, (0, 1)),
)
ORDER = [
    "forward of blocks 0 to 3", "forward of blocks 4 to 7", "forward", "loss", "backward",
    "backward of blocks 4 to 7", "backward of blocks 0 to 3", "optimizer",
]  # fmt: skip


def make(limit=20 * GIB, *, decision=None, **options):
    problem = Problem(GROUPS, PHASES, Limits(limit), out_rate=GIB / (9 * MS), in_rate=GIB / (9 * MS), **options)
    return Plan(
        problem=problem, decision=solve(problem) if decision is None else decision, hardware=hardware("h200"),
        devices=8, stacks=(), fixed={}, tokens=None, model_flops=1e12, dtype="bfloat16", read_seconds=0.0,
        solve_seconds=0.0, footprint=Footprint(2 * GIB, GIB, (), ()), simulated_bytes=3 * GIB,
    )  # fmt: skip


def test_levels_are_a_step_in_its_order():
    plan = make(decision=((HOST, DEVICE), (DEVICE, RECOMPUTE)))
    found = levels(plan)
    assert [level.name for level in found] == ORDER
    needed = {phase.name: plan.problem.needed(phase, plan.decision) for phase in plan.problem.phases}
    assert {level.name: level.bytes for level in found} == pytest.approx(needed)
    by = {level.name: level for level in found}
    in_gib = lambda name: tuple(
        getattr(by[name], part) / GIB for part in ("arguments", "kept", "passing", "working")
    )  # fmt: skip
    # 4 layers of y, and 1.5 of x on its way.
    assert in_gib("forward of blocks 0 to 3") == (2, 2, 1.5, 2)
    # And of the second group 4 layers of x, and a quarter of y that is computed again.
    assert in_gib("backward of blocks 4 to 7") == (2, 6, 0.125, 4)
    assert in_gib("optimizer") == (2, 0, 0, 1)


def test_less_than_all_arguments():
    # A phase may be simulated as smaller than the arguments: gradients that aren't there yet are taken off.
    tiny = Phase("loss", 1.0 * GIB, *((((0.0, 0.0),) * 2,) * 3))
    problem = Problem(GROUPS, (tiny,))
    plan = make()
    (level,) = levels(dataclasses.replace(plan, problem=problem))
    assert (level.arguments, level.working, level.bytes) == (GIB, 0, GIB)


def test_unknown_phases_keep_their_place_before_the_optimizer():
    other = phase("something else", 1, ())
    plan = make()
    problem = Problem(GROUPS, (*PHASES[:2], other))
    found = levels(dataclasses.replace(plan, problem=problem))
    assert [level.name for level in found] == ["loss", "something else", "optimizer"]


def test_figure(monkeypatch):
    figure_module = pytest.importorskip("matplotlib.figure")
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    plan = make()
    figure = plan.plot()
    assert isinstance(figure, figure_module.Figure)
    assert figure._repr_png_().startswith(b"\x89PNG")  # in a notebook
    # No window system, and no list of figures that are never freed.
    assert "matplotlib.pyplot" not in sys.modules
    memory, frontier = figure.axes
    assert [label.get_text() for label in memory.get_xticklabels()] == ORDER
    assert memory.get_ylabel() == "device memory (GiB)"
    bars = memory.containers
    assert [bar.get_label() for bar in bars] == [
        "state and batch", "activations kept here", "moved or computed again", "gradients and scratch",
    ]  # fmt: skip
    tops = [sum(bar.patches[i].get_height() for bar in bars) for i in range(len(ORDER))]
    assert tops == pytest.approx([level.bytes / GIB for level in levels(plan)])
    assert max(tops) == pytest.approx(plan.device_bytes / GIB)
    (limit,) = memory.lines
    assert list(limit.get_ydata()) == [20, 20] and limit.get_label() == "limit, 20.0 GiB"
    assert frontier.get_xlabel() == "device memory (GiB)" and frontier.get_ylabel() == "step (ms)"
    curve, mine, _ = frontier.lines
    mine_too = [*plan.frontier(), (plan.outcome.device_bytes, plan.seconds, plan.decision)]
    points = sorted({(size, seconds) for size, seconds, _ in mine_too})
    best = [(size, seconds) for size, seconds in points if not any(s < size and t <= seconds for s, t in points)]
    assert len(best) > 3
    assert list(curve.get_xdata()) == pytest.approx([size / GIB for size, _ in best])
    assert list(curve.get_ydata()) == pytest.approx([1e3 * seconds for _, seconds in best])
    assert (*mine.get_xdata(), *mine.get_ydata()) == pytest.approx((plan.device_bytes / GIB, 1e3 * plan.seconds))
    assert f"{1e3 * plan.seconds:,.1f} ms" in figure.get_suptitle()


def test_figure_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    for name, plan in {
        "limited": make(),
        "unlimited": make(float("inf")),
        "far": make(1000 * GIB),
        "slow": make(repeats=400),
        "dead link": make(decision=((HOST, HOST),) * 2, pipelined=False),
    }.items():
        figure = plan.plot()
        figure.savefig(tmp_path / name, format="png", dpi=50)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    labels = lambda plan: {line.get_label() for axes in plan.plot().axes for line in axes.lines}
    assert not any(label.startswith("limit") for label in labels(make(1000 * GIB)) | labels(make(float("inf"))))
    assert make(repeats=400).plot().axes[1].get_ylabel() == "step (s)"


def test_without_matplotlib(monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"plots need matplotlib: pip install 'overspill\[plot\]'"):
        make().plot()


def test_another_module_that_is_missing_is_named(monkeypatch):
    found = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'PIL'", name="PIL")
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match="PIL"):
        make().plot()
