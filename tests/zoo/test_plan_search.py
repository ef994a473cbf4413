"""How `overspill plan` cuts a step that doesn't fit: into micro-batches, and among experts into rounds."""

import io
import types

import pytest
from rich.console import Console

from overspill.layers.grid import Grid
from overspill.layers.rounds import balanced_rounds
from overspill.policies.planned import Plan
from overspill.policies.planner import Planner
from overspill.policies.problem import Limits
from overspill.policies.solving import Infeasible
from overspill.zoo import plan_search, planning
from overspill.zoo.meshes import abstract_mesh, layout_of

LIMITS = Limits(100.0, 1e9, 1e9)


class Made(Plan):
    """A plan of which only the time is known."""

    seconds = 0.0

    def __init__(self, seconds):
        object.__setattr__(self, "__dict__", {"seconds": seconds})


def family(model, mesh, rows):
    options = planning.Options(model, "h200", mesh=mesh, global_batch=rows, sequence=64)
    return planning.prepare(options).family


@pytest.fixture(scope="module")
def mixture():
    return family("overspill-deepseek-tiny", "expert=8", 96)  # 12 sequences on each device


class Trials:
    """A step whose memory and time are formulas of the numbers of micro-batches and rounds."""

    def __init__(self, monkeypatch, needed, seconds=lambda parts, rounds: float(parts)):
        self.needed, self.seconds, self.tried = needed, seconds, []
        monkeypatch.setattr(plan_search, "_least_bytes", lambda planner: planner.needed)

    def __call__(self, parts, rounds):
        self.tried.append((parts, rounds))
        size = self.needed(parts, rounds)
        planner = object.__new__(Planner)
        vars(planner).update(needed=size, problem=types.SimpleNamespace(limits=LIMITS), of=(parts, rounds))
        if size > LIMITS.device_bytes:
            return planner, Infeasible(LIMITS, phase="backward", least_device_bytes=size)
        return planner, Made(self.seconds(parts, rounds))


@pytest.mark.parametrize("state", [10, 40, 80, 98])
@pytest.mark.parametrize("rows", [0, 30, 100, 700, 2000])
@pytest.mark.parametrize("bend", [-0.06, 0.0, 0.06])
def test_the_fewest_micro_batches_that_fit(monkeypatch, mixture, state, rows, bend):
    many = balanced_rounds(Grid(mixture.layout), 16, 4)
    assert many > 1

    def needed(parts, rounds):
        return (state + rows / parts / rounds) * (1 + bend if 1 < parts < 12 else 1)

    trials = Trials(monkeypatch, needed)
    search = plan_search.Search(mixture, None, None, trials)
    divisors = [1, 2, 3, 4, 6, 12]
    fitting = [n for n in divisors if needed(n, many) <= 100]
    if needed(1, 1) <= 100:
        expected = 1, 1
    elif needed(1, many) <= 100 or needed(12, many) <= 100:  # memory may bend, but not the other way
        fewest = fitting[0]
        expected = fewest, (1 if fewest > 1 and needed(fewest, 1) <= 100 else many)
    else:
        with pytest.raises(Infeasible) as caught:
            search()
        assert caught.value.least_device_bytes == needed(12, many) and search.choice == (12, many)
        assert search.planner.of == (1, many)
        return
    planner, found = search()
    assert search.choice == planner.of == expected and found.seconds == expected[0]
    assert len(trials.tried) == len(set(trials.tried)) <= 8


def test_what_is_given_stays(monkeypatch, mixture):
    trials = Trials(monkeypatch, lambda parts, rounds: 300 / parts / rounds)
    planner, _ = plan_search.Search(mixture, None, 2, trials)()
    assert planner.of == (2, 2) and {rounds for _, rounds in trials.tried} == {2}
    trials = Trials(monkeypatch, lambda parts, rounds: 300 / parts / rounds)
    planner, _ = plan_search.Search(mixture, 1, None, trials)()
    assert planner.of[0] == 1 and {parts for parts, _ in trials.tried} == {1}
    trials = Trials(monkeypatch, lambda parts, rounds: 300.0)
    with pytest.raises(Infeasible):
        plan_search.Search(mixture, 3, 5, trials)()
    assert trials.tried == [(3, 5)]


def test_a_dense_model_has_no_rounds(monkeypatch):
    trials = Trials(monkeypatch, lambda parts, rounds: 350 / parts)
    planner, _ = plan_search.Search(family("overspill-llama-tiny", "fsdp=2", 16), None, None, trials)()
    assert planner.of == (4, 1)


def test_the_faster_of_two_is_taken(monkeypatch, mixture):
    trials = Trials(monkeypatch, lambda parts, rounds: 150 / parts, lambda parts, rounds: 1.0 if rounds > 1 else 2.0)
    planner, found = plan_search.Search(mixture, None, None, trials)()
    assert planner.of[0] == 2 and planner.of[1] > 1 and found.seconds == 1


def test_what_the_compiler_finds_too_large_is_cut_finer(monkeypatch, mixture):
    trials, seen = Trials(monkeypatch, lambda parts, rounds: 290 / parts), []

    def confirmed(planner, plan):
        seen.append(planner.of)
        if planner.of[0] < 6:
            raise Infeasible(LIMITS, phase="backward", least_device_bytes=101.0)
        return Made(7.0)

    search = plan_search.Search(mixture, None, None, trials)
    planner, found = search(confirmed)
    assert [parts for parts, _ in seen] == [3, 4, 6] and search.choice == planner.of == seen[-1] and found.seconds == 7
    with pytest.raises(Infeasible):
        plan_search.Search(mixture, 4, None, trials)(confirmed)


def test_the_step_that_is_chosen_need_not_be_the_last_that_was_tried(monkeypatch):
    """The plan, what is asked and what is verified are of one step."""

    class Chosen(plan_search.Search):
        def __call__(self, confirmed=None):
            found = self._trial(4, 1)
            self._trial(2, 1)
            self.choice = 4, 1
            return found

    monkeypatch.setattr(planning, "Search", Chosen)
    options = planning.Options("overspill-llama-tiny", "h200", mesh="fsdp=2", global_batch=32, sequence=64)
    made = planning.prepare(options)
    made(Console(file=io.StringIO()))
    assert made.family.options.accumulate == 4


@pytest.mark.parametrize(
    ("mesh", "experts", "top_k", "rounds"),
    [
        ("fsdp=16,expert=8", 256, 8, 8),  # 8 senders, each with all 8 choices of a token
        ("expert=128", 256, 8, 32),  # 128 senders, each with 2 of 8
        ("fsdp=8", 256, 8, 1),
        ("expert=8", 8, 2, 4),
        ("expert=4,tensor=2", 60, 4, 4),
    ],
)
def test_rounds_make_room_for_what_is_sent_on_average(mesh, experts, top_k, rounds):
    assert balanced_rounds(Grid(layout_of(abstract_mesh(mesh), ())), experts, top_k) == rounds
