"""What a plan says of itself, held against `Problem.evaluate`: no sentence may claim what that denies."""

import dataclasses
import io
import json
import math
import random
import re

import pytest
from rich.console import Console

from overspill.policies.activation import Placement
from overspill.policies.liveness import Footprint
from overspill.policies.machines import hardware
from overspill.policies.pieces import Layers
from overspill.policies.plan_reasons import NOT_NEEDED, format_seconds
from overspill.policies.plan_text import globs
from overspill.policies.plan_values import baselines, links, times
from overspill.policies.planned import Plan
from overspill.policies.problem import PLACEMENTS, Group, Item, Limits, Phase, Problem, Unit, recomputed
from overspill.policies.report import format_bytes
from overspill.policies.solving import Infeasible, marginal_seconds, solve

DEVICE, HOST, RECOMPUTE = PLACEMENTS
MIB, GIB = 2**20, 2**30
MS = 1e-3


def phase(name, groups, fixed=0.0, hosted=1.0, again=0.0):
    """All layers of what waits on the device, one of what waits on the host; `again` of one that is recomputed."""
    return Phase(
        name,
        fixed,
        tuple(tuple(float(group.layers * item.bytes) for item in group.items) for group in groups),
        tuple(tuple(hosted * item.bytes for item in group.items) for group in groups),
        tuple(tuple(again * item.bytes for item in group.items) for group in groups),
    )


def block(items, units, *, layers=8, name="blocks", forward=4 * MS, backward=8 * MS, stack="blocks", **more):
    return Group(name, stack, layers, tuple(items), tuple(units), forward, backward, **more)


def item(name, size=100 * MIB, placements=PLACEMENTS, device=0.0, host=0.0):
    return Item(f"blocks.{name}", size, placements, device, host)


def make(groups, *, decision=None, phases=None, stacks=(), fixed=None, tokens=8192, arguments=GIB, **options):
    groups = tuple(groups) if isinstance(groups, list | tuple) else (groups,)
    rate = 100 * MIB / MS  # 1 ms for 100 MiB
    options = {"out_rate": rate, "in_rate": rate} | options
    problem = Problem(groups, phases or (phase("backward of blocks", groups, 2 * GIB),), **options)
    return Plan(
        problem=problem,
        decision=solve(problem) if decision is None else decision,
        hardware=hardware("h200"),
        devices=8,
        stacks=tuple(stacks),
        fixed=fixed or {},
        tokens=tokens,
        model_flops=1e12,
        dtype="bfloat16",
        read_seconds=1.0,
        solve_seconds=0.1,
        footprint=Footprint(arguments, 0, (), ()),
        simulated_bytes=3 * GIB,
    )


def said(plan):
    return {one.path: one.why for one in plan.choices}


def test_memory_that_is_not_full_does_not_bind_a_plan_that_could_be_faster():
    assert make(block(ONE, WANTED), limits=limits(), decision=((RECOMPUTE,),)).binding == ("compute",)


def test_it_says_where_device_memory_is_known_from():
    plan = make(block(ONE, WANTED), limits=limits())
    assert "; simulated" in str(plan) and plan.as_json()["calibrated"] is False
    asked = dataclasses.replace(plan, calibrated=True)
    assert "the compiler says so (simulated: 3.00 GiB)" in " ".join(str(asked).split())
    assert asked.as_json()["calibrated"] is True and asked.as_json()["simulated_bytes"] == 3 * GIB


def limits(device=100 * GIB, host=100 * GIB, pinned=math.inf):
    return Limits(device, host, pinned)


ONE = (item("x"),)
WANTED = (Unit(0.4 * MS, wanted=True, item=0),)


# ---- sentences, each with numbers that are worked out by hand


def test_kept_on_the_device():
    plan = make(block(ONE, WANTED), limits=limits())
    # 8 layers, and 1 ms out and 1 ms in that the last one has nothing to hide behind.
    assert said(plan) == {
        "blocks.x": "on the device, which has room: computing it again, 0.40 ms a layer, is 3.2 ms slower; "
        "on the host 2.0 ms slower: nothing hides the last layer's way there and back"
    }
    (one,) = plan.choices
    assert (one.placement, one.bytes, one.layers) == (DEVICE, 100 * MIB, 8)
    assert one.again_seconds == pytest.approx(0.4 * MS)
    assert (one.out_seconds, one.in_seconds) == pytest.approx((MS, MS))
    more = {other.placement: other.seconds for other in one.alternatives}
    assert more == pytest.approx({HOST: 2 * MS, RECOMPUTE: 3.2 * MS})
    assert all(other.fits for other in one.alternatives)


def test_on_the_host():
    # Next to no room on the device: 800 MiB would be 700 more than there is.
    plan = make(block(ONE, WANTED), limits=limits(2 * GIB + 100 * MIB))
    assert said(plan)["blocks.x"] == (
        "on the host: its 1.0 ms of link hide behind 4.0 ms of forward pass; computing it again, 0.40 ms a layer, is "
        "1.2 ms slower; on the device the step would need 700 MiB more than there is"
    )


def test_on_the_host_the_backward_pass_is_the_fuller():
    plan = make(block(ONE, WANTED), limits=limits(2 * GIB + 100 * MIB), in_rate=20 * MIB / MS, decision=((HOST,),))
    assert said(plan)["blocks.x"].startswith("on the host: its 5.0 ms of link hide behind 8.0 ms of backward pass;")


def test_on_the_host_and_late():
    units = (Unit(9 * MS, wanted=True, item=0),)
    plan = make(block(ONE, units, forward=0.5 * MS), limits=limits(2 * GIB + 100 * MIB))
    assert said(plan)["blocks.x"] == (
        "on the host, though the link out takes 1.0 ms a layer, its forward pass 0.50 ms: computing it again, 9.0 ms "
        "a layer, is 66 ms slower; on the device the step would need 700 MiB more than there is"
    )  # 72 - 8 * 0.5 - 2


def test_recomputed_beside_a_full_link():
    # Out takes longer than the forward pass: 8 * (1 - 0.5) + 2 - 8 * 0.1 ms more than computing it again.
    units = (Unit(0.1 * MS, wanted=True, item=0),)
    plan = make(block(ONE, units, forward=0.5 * MS), limits=limits(2 * GIB + 100 * MIB))
    assert said(plan)["blocks.x"] == (
        "recomputed: 0.10 ms of computation is cheaper than 1.0 ms of link; on the host 5.2 ms slower: the link out "
        "takes 1.0 ms a layer, its forward pass 0.50 ms; on the device the step would need 700 MiB more than there is"
    )


def test_recomputed_where_the_way_back_is_late():
    units = (Unit(0.1 * MS, wanted=True, item=0),)
    plan = make(block(ONE, units), limits=limits(2 * GIB + 100 * MIB), in_rate=10 * MIB / MS)
    slower = "on the host 26 ms slower: the link in takes 10 ms a layer, its backward pass 8.0 ms"
    assert slower in said(plan)["blocks.x"]


def test_recomputed_because_both_memories_are_full():
    plan = make(block(ONE, WANTED), limits=limits(2 * GIB + 100 * MIB, 300 * MIB))
    assert said(plan)["blocks.x"] == (
        "recomputed, 0.40 ms a layer: on the host the step would need 500 MiB more than the host's memory has; on the "
        "device the step would need 700 MiB more than there is"
    )
    plan = make(block(ONE, WANTED), limits=limits(2 * GIB + 100 * MIB, pinned=300 * MIB))
    assert "500 MiB more than the host's pool of pinned memory has" in said(plan)["blocks.x"]


def test_recomputed_because_buffers_of_the_host_do_not_fit():
    plan = make(block(ONE, WANTED), limits=limits(2 * GIB))
    assert said(plan)["blocks.x"].startswith(
        "recomputed, 0.40 ms a layer: on the host the step would need 100 MiB of device memory more than there is;"
    )


def test_recomputed_because_keeping_costs_more():
    one = item("x", device=0.5 * MS, host=0.6 * MS)
    plan = make(block((one,), WANTED), limits=limits())
    assert said(plan)["blocks.x"] == (
        "recomputed: 0.40 ms of computation is cheaper than 1.0 ms of link; on the host 3.6 ms slower: nothing hides "
        "the last layer's way there and back; on the device 0.80 ms slower: writing and reading it takes longer"
    )
    plan = make(block((item("x", device=0.5 * MS, host=0.9 * MS),), WANTED), limits=limits())
    assert "on the host 6.0 ms slower: keeping it there takes longer" in said(plan)["blocks.x"]


def test_computing_it_again_takes_memory_too():
    groups = (block(ONE, WANTED),)
    plan = make(groups, phases=(phase("p", groups, again=30.0),), limits=limits(800 * MIB))
    needs = "computing it again the step would need 2.15 GiB of device memory more than there is"
    assert needs in said(plan)["blocks.x"]


def test_recomputed_on_the_way_to_another():
    # y is computed again from x, which costs nothing itself.
    items, units = (item("x"), item("y")), (Unit(0.0, item=0), Unit(0.4 * MS, (0,), True, 1))
    plan = make(block(items, units), limits=limits(2 * GIB), decision=((RECOMPUTE, RECOMPUTE),))
    assert said(plan)["blocks.x"] == "recomputed: on the way to y in any case, costs nothing"
    plan = make(block(ONE, (Unit(0.0, wanted=True, item=0),)), limits=limits())
    assert said(plan)["blocks.x"] == "recomputed: costs nothing"


def test_not_computed_again_where_what_follows_is_kept():
    items = (item("x"), item("y"), item("z"))
    units = (Unit(MS, item=0), Unit(MS, (0,)), Unit(MS, (1,), True, 1), Unit(MS, (1,), True, 2))
    plan = make(block(items, units), limits=limits())
    assert plan.decision == ((RECOMPUTE, DEVICE, DEVICE),)
    assert said(plan)["blocks.x"] == "not computed again: y and z, computed from it, are kept"
    alone = make(block(items[:2], units[:3]), limits=limits())
    assert said(alone)["blocks.x"] == "not computed again: y, computed from it, is kept"


def test_what_a_chain_costs_counts_what_is_computed_only_for_it():
    items, units = (item("x"), item("y")), (Unit(MS, item=0), Unit(0.5 * MS, (0,), True, 1))
    plan = make(block(items, units), limits=limits())
    # Without y, x is computed again as well.
    assert "computing it again, 1.5 ms a layer, is 12 ms slower" in said(plan)["blocks.y"]


def test_always_kept():
    carry = (item("x", placements=(DEVICE, HOST)),)
    plan = make(block(carry, (Unit(0.0, wanted=True, item=0),)), limits=limits())
    assert said(plan)["blocks.x"] == (
        "always kept, as a loop keeps its carry; on the device, which has room: on the host 2.0 ms slower: nothing "
        "hides the last layer's way there and back"
    )
    plan = make(block(carry, (Unit(0.0, wanted=True, item=0),)), limits=limits(2 * GIB + 100 * MIB))
    assert said(plan)["blocks.x"] == (
        "always kept, as a loop keeps its carry; on the host: its 1.0 ms of link hide behind 4.0 ms of forward pass; "
        "on the device the step would need 700 MiB more than there is"
    )


def test_a_single_layer_is_no_loop():
    one = (item("x", placements=(DEVICE, RECOMPUTE)),)
    plan = make(block(one, WANTED, layers=1), limits=limits())
    assert said(plan)["blocks.x"] == (
        "on the device, which has room: computing it again, 0.40 ms a layer, is 0.40 ms slower; "
        "a single layer's way to the host would free nothing"
    )


def test_not_needed():
    items, units = (item("x"), item("y")), (*WANTED, Unit(MS, (0,), False, 1))
    fixed = {"blocks.residual": RECOMPUTE, "head.out": RECOMPUTE}
    plan = make(block(items, units), limits=limits(), fixed=fixed)
    assert {path for path, why in said(plan).items() if why == NOT_NEEDED} == {"blocks.y", *fixed}
    last = plan.choices[-1]
    assert (last.path, last.placement, last.bytes, last.alternatives) == ("head.out", None, None, ())
    assert [one.path for one in plan.choices] == ["blocks.x", "blocks.y", "blocks.residual", "head.out"]
    # A decision of someone's own.
    kept = make(block(items, units), limits=limits(), decision=((DEVICE, DEVICE),))
    assert said(kept)["blocks.y"].startswith(f"on the device, which has room, though {NOT_NEEDED}: computing it again")


def test_nothing_overlaps():
    plan = make(block(ONE, WANTED), limits=limits(2 * GIB + 100 * MIB), pipelined=False)
    assert said(plan)["blocks.x"].startswith(
        "recomputed: 0.40 ms of computation is cheaper than 1.0 ms of link; on the host 13 ms slower: the step would "
        "wait for 2.0 ms of link a layer;"
    )
    plan = make(block(ONE, WANTED), limits=limits(), pipelined=False, decision=((HOST,),))
    assert said(plan)["blocks.x"] == (
        "on the host, and the step waits for 2.0 ms of link a layer: computing it again, 0.40 ms a layer, is 13 ms "
        "faster; on the device 16 ms faster"
    )


def test_a_dead_link():
    plan = make(block(ONE, WANTED), limits=limits(), out_rate=0.0)
    assert "on the host a step would never end: nothing crosses the link" in said(plan)["blocks.x"]
    plan = make(block(ONE, WANTED), limits=limits(), out_rate=0.0, decision=((HOST,),))
    assert "forever" in str(plan)
    assert said(plan)["blocks.x"] == (
        "on the host, though the link out takes forever a layer, its forward pass 4.0 ms: computing it again, 0.40 ms "
        "a layer, a step would end; on the device a step would end"
    )


def test_a_link_that_takes_no_time():
    # As fast as on the device, which is preferred where there is room.
    plan = make(block(ONE, WANTED), limits=limits(), out_rate=math.inf, in_rate=math.inf)
    assert said(plan)["blocks.x"].endswith("; on the host no faster")
    plan = make(block(ONE, WANTED), limits=limits(2 * GIB + 100 * MIB), out_rate=math.inf, in_rate=math.inf)
    assert said(plan)["blocks.x"].startswith("on the host, over a link that takes no time: computing it again")


def test_a_decision_that_does_not_fit_says_so():
    plan = make(block(ONE, WANTED), limits=limits(2 * GIB + 100 * MIB), decision=((DEVICE,),))
    assert said(plan)["blocks.x"].startswith("on the device, where the step needs 700 MiB more than there is: ")
    assert plan.binding == ("device memory",)
    assert "it does NOT fit" in str(plan)
    assert plan.as_json()["fits"] is False and plan.as_json()["marginal_seconds"] is None
    plan = make(block(ONE, WANTED), limits=limits(host=300 * MIB), decision=((HOST,),))
    assert plan.binding == ("host memory",)


# ---- sentences of any plan, their numbers computed anew


def random_plan(seed):
    draw = random.Random(seed)
    while True:
        try:
            return drawn_plan(draw)
        except Infeasible:
            continue


def drawn_plan(draw):
    groups, stacks = [], []
    for s in range(draw.randint(1, 2)):
        count = draw.randint(1, 4)
        items, units = [], []
        for u in range(draw.randint(count, 6)):
            reads = tuple(r for r in range(u) if draw.random() < 0.4)
            index = len(items) if len(items) < count and draw.random() < 0.8 else None
            units.append(Unit(draw.choice([0.0, 0.1, 0.4, 1.0, 3.0]) * MS, reads, draw.random() < 0.6, index))
            if index is not None:
                every = draw.choice([PLACEMENTS] * 4 + [(DEVICE, HOST), (DEVICE, RECOMPUTE)])
                cost = draw.choice([0.0, 0.05 * MS])
                items.append(Item(f"{s}.segments.0.item{index}", draw.randint(10, 300) * MIB, every, cost, cost))
        spans = [draw.randint(1, 6) for _ in range(draw.randint(1, 3))]
        forward, backward = draw.uniform(0.5, 5) * MS, draw.uniform(1, 10) * MS
        stacks.append(Layers(str(s), sum(stack.num_layers for stack in stacks), (sum(spans),)))
        groups += [
            Group(f"{s} part {i}", str(s), n, tuple(items), tuple(units), forward, backward)
            for i, n in enumerate(spans)
        ]
    phases = tuple(
        phase(f"phase {p}", groups, draw.uniform(0, GIB), draw.choice([0.5, 1.0, 2.0]), draw.choice([0.0, 0.5]))
        for p in range(2)
    )
    most = sum(group.layers * one.bytes for group in groups for one in group.items)
    options = dict(
        phases=phases, limits=Limits(GIB + draw.uniform(0, 1.2) * most, draw.uniform(0, 1) * most),
        outside_seconds=draw.uniform(0, 20) * MS, out_rate=100 * MIB / MS, in_rate=draw.choice([40, 130]) * MIB / MS,
        pipelined=draw.random() < 0.8, repeats=draw.choice([1, 3]),
    )  # fmt: skip
    return make(groups, stacks=stacks, **options)


def moved(plan, path, placement):
    """The outcome with one activation of a piece placed otherwise."""
    rows = []
    for piece in plan.pieces:
        names = [piece.path(rest) for rest in piece.placements]
        for _ in piece.groups:
            row = plan.decision[len(rows)]
            rows.append(tuple(placement if name == path else p for name, p in zip(names, row, strict=True)))
    return plan.problem.evaluate(tuple(rows))


WHERE = {"on the device": DEVICE, "on the host": HOST, "computing it again": RECOMPUTE}


@pytest.mark.parametrize("seed", range(80))
def test_sentences_claim_what_evaluate_says(seed):
    plan = random_plan(seed)
    before = plan.outcome
    kept_before = [piece for piece in plan.pieces for _ in piece.placements]
    assert len(plan.choices) == len(kept_before)
    for one, piece in zip(plan.choices, kept_before, strict=True):
        g = next(i for i, group in enumerate(plan.problem.groups) if group is piece.groups[0])
        group, row = plan.problem.groups[g], plan.decision[g]
        position = [piece.path(rest) for rest in piece.placements].index(one.path)
        assert one.placement is row[position] and one.bytes == group.items[position].bytes
        others = {other.placement for other in one.alternatives}
        assert others == set(group.items[position].placements) - {one.placement}
        useful = {u for u, unit in enumerate(group.units) if unit.item == position}
        useful &= set(recomputed(group, (RECOMPUTE,) * len(row)))
        for other in one.alternatives:
            outcome = moved(plan, one.path, other.placement)
            assert other.outcome == outcome and other.fits is plan.problem.fits(outcome)
            # The choice is the best one, so whatever is faster doesn't fit.
            assert not other.fits or outcome.seconds >= before.seconds * (1 - 1e-9)
            if RECOMPUTE in (other.placement, one.placement):
                again = abs(outcome.parts[g].again - before.parts[g].again)
                assert one.again_seconds == pytest.approx(again, abs=1e-12)
        check_sentence(plan, one, range(g, g + len(piece.groups)), useful, useful & set(recomputed(group, row)))


def check_sentence(plan, one, groups, useful, again):
    """`useful`: its units that the backward pass needs; `again`: those that it computes again."""
    why = one.why
    if one.placement is RECOMPUTE and not useful:
        assert why == NOT_NEEDED
    elif one.placement is RECOMPUTE and not again:
        assert why.startswith("not computed again: ")
    elif one.placement is RECOMPUTE and not one.again_seconds:
        assert why.startswith("recomputed: ") and why.endswith("costs nothing")
    else:
        assert (NOT_NEEDED in why) is (not useful)
        clauses = re.split(r"[:;] (?=on the (?:device|host) |computing)", why)
        for other in one.alternatives:
            (text,) = (text for text, place in WHERE.items() if place is other.placement)
            check_clause(plan, next(c for c in reversed(clauses) if c.startswith(text)), one, other, groups)
    if found := re.search(r"recomputed: (.+) of computation is cheaper than ([^;]+) of link", why):
        host = next(other for other in one.alternatives if other.placement is HOST)
        link = max(one.out_seconds, one.in_seconds)
        assert host.fits and host.seconds > 0 and one.again_seconds < link
        assert found.groups() == (format_seconds(one.again_seconds), format_seconds(link))
    if found := re.search(r"on the host: its (.+?) of link hide behind (.+?) of (forward|backward) pass", why):
        assert plan.problem.pipelined and one.placement is HOST
        parts = [plan.outcome.parts[g] for g in groups]
        assert all(part.out <= max(part.forward, part.fetched) and part.back <= part.backward for part in parts)
        part = parts[0]
        mine = one.out_seconds if found[3] == "forward" else one.in_seconds
        assert found.groups()[:2] == (format_seconds(mine), format_seconds(getattr(part, found[3])))


def check_clause(plan, clause, one, other, groups):
    before, outcome, limit = plan.outcome, other.outcome, plan.problem.limits
    more = outcome.seconds - before.seconds
    if outcome.device_bytes > limit.device_bytes:
        size = format_bytes(outcome.device_bytes - limit.device_bytes)
        assert f"the step would need {size}" in clause and "more than there is" in clause
    elif outcome.host_bytes > limit.host_bytes:
        size = format_bytes(outcome.host_bytes - limit.host_bytes)
        assert f"the step would need {size} more than the host's memory has" in clause
    elif abs(more) <= 1e-9 * before.seconds:
        assert "no faster" in clause or "takes as long" in clause
    else:
        assert f"{format_seconds(more)} slower" in clause
    parts = [outcome.parts[g] for g in groups]
    late = {
        "out": [(p.out, max(p.forward, p.fetched), p.layers) for p in parts],
        "in": [(p.back, p.backward, p.layers) for p in parts],
    }
    waiting = plan.problem.repeats * sum(max(a - b, 0) * n for pairs in late.values() for a, b, n in pairs)
    if found := re.search(r"the link (out|in) takes (.+) a layer, its (forward|backward) pass (.+)", clause):
        pairs = [(format_seconds(a), format_seconds(b)) for a, b, _ in late[found[1]] if a > b]
        assert (found[2], found[4]) in pairs
        # No lesser cause is named.
        assert waiting >= more / 3
    if found := re.search(r"would wait for (.+) of link a layer", clause):
        assert not plan.problem.pipelined and found[1] == format_seconds(one.out_seconds + one.in_seconds)
    if "nothing hides" in clause:
        assert plan.problem.ends_stack(groups[-1]) and plan.problem.pipelined
        assert plan.problem.repeats * (one.out_seconds + one.in_seconds) >= more / 3


# ---- the numbers beside them


@pytest.mark.parametrize("seed", range(60))
def test_times_add_up(seed):
    plan = random_plan(seed)
    spent = times(plan)
    assert sum(spent) == pytest.approx(plan.seconds, rel=1e-9)
    assert min(spent) >= 0
    parts = plan.outcome.parts
    assert spent.recomputed == pytest.approx(plan.problem.repeats * sum(p.layers * p.again for p in parts))
    for one in links(plan):
        assert 0 < one.share <= 1 + 1e-9
        name = {"out": "out", "in": "back"}[one.way]
        assert one.seconds == pytest.approx(plan.problem.repeats * sum(p.layers * getattr(p, name) for p in parts))
        assert one.fullest_share >= one.share * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(0, 60, 4))
def test_binding_by_its_definition(seed):
    plan = random_plan(seed)
    found = plan.binding
    problem = plan.problem
    assert ("device memory" in found) == (marginal_seconds(problem, float(GIB)) > 0)
    assert ("host memory" in found) == (marginal_seconds(problem, 0.0, host_bytes=float(GIB)) > 0)
    if problem.pipelined:
        if any(part.out > part.forward for part in plan.outcome.parts):
            assert "link out" in found
        if any(part.back > part.backward for part in plan.outcome.parts):
            assert "link in" in found
    assert ("compute" in found) == (found == ("compute",))
    assert plan.marginal() == (
        marginal_seconds(problem, float(GIB)),
        marginal_seconds(problem, 0.0, host_bytes=float(GIB)),
        marginal_seconds(problem, 0.0, link=1.1),
    )
    assert plan.marginal() is plan.marginal()


def test_what_binds():
    assert make(block(ONE, WANTED), limits=limits()).binding == ("compute",)
    tight = make(block(ONE, WANTED), limits=limits(2 * GIB, 0))
    assert tight.binding == ("device memory",)
    assert "1 GiB more on the device saves 3.2 ms" in str(tight)
    # No device memory would help: it may only wait on the host, and that is full for the second of two.
    pair, units = (item("x"), item("y")), (*WANTED, Unit(0.4 * MS, wanted=True, item=1))
    only = tuple(dataclasses.replace(one, placements=(HOST, RECOMPUTE)) for one in pair)
    full = make(block(only, units), limits=limits(host=800 * MIB))
    assert full.binding == ("host memory",)
    # Late out, as it has to be kept and the device has no room.
    carry = (item("x", placements=(DEVICE, HOST)),)
    late = make(block(carry, WANTED, forward=0.5 * MS), limits=limits(2 * GIB + 100 * MIB))
    assert late.binding == ("device memory", "link out")
    back = make(block(carry, WANTED, backward=0.5 * MS), limits=limits(2 * GIB + 100 * MIB))
    assert back.binding == ("device memory", "link in")
    # Full, if not late: what is left out would go too, were it faster.
    wide = tuple(dataclasses.replace(one, placements=(HOST, RECOMPUTE)) for one in (item("x"), item("y", 10 * MIB)))
    cheap = (*WANTED, Unit(0.04 * MS, wanted=True, item=1))
    filled = make(block(wide, cheap, forward=1.05 * MS, layers=40), limits=limits())
    assert filled.decision == ((HOST, RECOMPUTE),)
    assert filled.binding == ("link out",)
    # Nothing overlaps.
    waits = make(block(carry, WANTED), limits=limits(2 * GIB + 100 * MIB), pipelined=False)
    assert waits.binding == ("device memory", "link out", "link in")


def test_compute_binds_though_something_is_always_recomputed():
    units = (*WANTED, Unit(2 * MS, wanted=True))
    plan = make(block(ONE, units), limits=limits())
    assert plan.binding == ("compute",)
    assert "computed again" in str(plan) and "16 ms of it whatever is kept" in str(plan)


def test_state_on_the_host_is_in_the_link():
    plan = make(block(ONE, WANTED, in_forward_bytes=200 * MIB), limits=limits())
    (one,) = links(plan)
    assert (one.way, one.during, one.share) == ("in", "forward", pytest.approx(0.5))
    assert one.seconds == pytest.approx(16 * MS)
    plan = make(block(ONE, WANTED, in_forward_bytes=600 * MIB), limits=limits())
    assert plan.binding == ("link in",)
    assert times(plan).waiting == pytest.approx(8 * 2 * MS)


# ---- tables


def test_summary():
    plan = make(block(ONE, WANTED), limits=limits(2 * GIB + 100 * MIB, pinned=20 * GIB), outside_seconds=6 * MS)
    lines = [re.sub(r"\s{2,}", "  ", line.strip()) for line in str(plan).splitlines()]
    # 8 * 12 ms and the last layer's 2.
    assert plan.seconds == pytest.approx(104 * MS)
    for line in (
        "Plan for 8 x NVIDIA H200",
        "step  104.0 ms  predicted",
        "tokens  78,769 tokens/s  8,192 a step, on all devices",
        "device memory  2.10 GiB of 2.10 GiB  fullest in backward of blocks; simulated",
        "host memory  800 MiB of 20.0 GiB  the limit is the host's pool of pinned memory",
        "link out  25% busy  in the forward pass; most in blocks: 25% of its computation",
        "link in  12% busy  in the backward pass; most in blocks: 12% of its computation",
        "binding  device memory  1 GiB more on the device saves 2.0 ms; a 10% faster link saves 0.18 ms",
        "time: waiting for the link  2.0 ms  1.9%",
        "time: outside of the layers  6.0 ms  5.8%",
        "model = policies.place(model, plan)",
    ):
        assert line in lines
    assert f"speed of a device  {1e12 / 0.104 / 1e12:.1f} TFLOP/s  1.0% of the peak in bfloat16 (MFU)" in lines
    assert "resegment" not in str(plan)
    assert repr(plan) == str(plan)
    assert "tokens" not in str(make(block(ONE, WANTED), limits=limits(), tokens=None))
    html = plan._repr_html_()
    assert html.count("<table>") == 2 and "104.0 ms" in html
    out = io.StringIO()
    Console(file=out, width=200).print(plan)
    assert "104.0 ms" in out.getvalue() and "policies.place(model, plan)" in out.getvalue()


def test_summary_without_limits():
    text = str(make(block(ONE, WANTED)))
    assert "inf" not in text and "nan" not in text


def cut(decisions, start=4):
    """A stack of 8 layers in four groups, their activations called as in segments of their own."""
    paths = ("attention.query", "attention.key", "mlp.up")
    groups = tuple(
        block([Item(f"blocks.segments.{i}.{path}", MIB) for path in paths],
              [Unit(MS, (), True, n) for n in range(3)], layers=2, name=f"part {i}")
        for i in range(4)
    )  # fmt: skip
    return make(groups, decision=decisions, stacks=(Layers("blocks", start, (8,)),))


def test_pieces_and_code():
    on_device, split = (DEVICE,) * 3, (HOST, HOST, RECOMPUTE)
    plan = cut((split, split, split, on_device))
    lines = [re.sub(r"\s{2,}", "  ", line.strip()) for line in str(plan).splitlines()]
    assert "layers  device  host  recomputed" in lines
    assert "blocks 4 to 9  -  attention.*  mlp.up" in lines
    assert "blocks 10 to 11  *  -  -" in lines
    assert lines[-2:] == ["model = zoo.resegment(model, (10,))", "model = policies.place(model, plan)"]
    queries = [(one.path, one.layers) for one in plan.choices][::3]
    assert queries == [("blocks.segments.0.attention.query", 6), ("blocks.segments.1.attention.query", 2)]
    # What changes is the piece, not one of its groups.
    (other,) = (o for o in plan.choices[0].alternatives if o.placement is DEVICE)
    assert other.outcome == plan.problem.evaluate(((DEVICE, HOST, RECOMPUTE),) * 3 + (on_device,))
    assert "(10,))<br>model = " in plan._repr_html_()
    assert "resegment" not in str(cut((on_device,) * 4))


def test_explanation_is_a_table():
    plan = cut(((HOST, HOST, RECOMPUTE),) * 3 + ((DEVICE,) * 3,))
    table = plan.explain()
    assert table.columns == ("activation", "one layer", "waits", "why")
    assert [row[0] for row in table.rows] == [one.path for one in plan.choices]
    assert table.rows[2][1:] == ("1.00 MiB", "recomputed", plan.choices[2].why)
    # No sentence is cut short, in narrow consoles neither.
    for width in (60, 100, 200):
        out = io.StringIO()
        Console(file=out, width=width).print(table)
        assert out.getvalue().split().count("recomputed") >= 1
        assert "…" not in out.getvalue()
    words = " ".join(str(table).split())
    assert "blocks.segments.1" in words and "nothing hides the last layer's way there and back" in words
    assert "<th>why</th>" in table._repr_html_()


def test_globs():
    places = {"a.x": HOST, "a.y": HOST, "a.b.z": HOST, "c": RECOMPUTE}
    assert globs(places, HOST) == ["a.*"]
    assert globs(places, RECOMPUTE) == ["c"]
    assert globs(places, DEVICE) == []
    assert globs(places, HOST, ["a.w"]) == ["a.x", "a.y", "a.b.z"]
    assert globs(places | {"a.b.w": DEVICE}, HOST) == ["a.x", "a.y", "a.b.z"]
    assert globs(dict.fromkeys(places, HOST), HOST) == ["*"]


def test_globs_leave_out_what_may_not_be_recomputed():
    items, units = (item("a.x"), item("a.y")), (*WANTED, Unit(MS, wanted=True, item=1))
    plan = make(block(items, units), decision=((RECOMPUTE,) * 2,), fixed={"blocks.a.carry": DEVICE})
    assert "a.*" not in str(plan) and "a.x a.y" in str(plan)
    plan = make(block(items, units), decision=((RECOMPUTE,) * 2,), fixed={"blocks.a.sum": RECOMPUTE})
    assert "a.x a.y" not in str(plan)


def test_alternatives():
    carry = item("c", 50 * MIB, (DEVICE, HOST))
    plan = make(
        block((*ONE, carry), (*WANTED, Unit(0.0, wanted=True, item=1))), limits=limits(2 * GIB + 600 * MIB, 1000 * MIB)
    )
    rows = {row[0]: row[1:] for row in plan.alternatives().rows}
    mine = plan.seconds
    assert rows["this plan"][:2] == (f"{mine * 1e3:.1f} ms", "-") and rows["this plan"][-1] == "yes"
    # 8 * 0.4 ms again, and the carry is kept.
    assert rows["all recomputed"][0] == "99.2 ms" and rows["all recomputed"][2] == format_bytes(2 * GIB + 400 * MIB)
    assert rows["all recomputed"][-1] == "yes"
    assert rows["all on the device"][0] == "96.0 ms"
    assert rows["all on the device"][-1] == "does not fit: 600 MiB of device memory over"
    assert rows["all on the host"][-1] == "does not fit: 200 MiB of host memory over"
    assert rows["all recomputed"][1] == f"{0.0992 / mine - 1:.1%} longer"
    for one in baselines(plan)[1:]:
        assert one.outcome == plan.problem.evaluate(one.decision)
    alone = make(block(ONE, WANTED), limits=limits())
    assert [row[2] for row in alone.alternatives().rows] == ["-", "3.3% longer", "as long", "2.1% longer"]


def test_frontier():
    plan = make(block(ONE, WANTED), limits=limits())
    points = plan.frontier()
    assert points is plan.frontier()
    assert [size for size, _, _ in points] == sorted(size for size, _, _ in points)
    assert [seconds for _, seconds, _ in points] == sorted((s for _, s, _ in points), reverse=True)
    for size, seconds, decision in points:
        outcome = plan.problem.evaluate(decision)
        assert (outcome.device_bytes, outcome.seconds) == (size, seconds)
    assert points[-1][1] == pytest.approx(plan.seconds)


def test_as_json():
    plan = cut(((HOST, HOST, RECOMPUTE),) * 3 + ((DEVICE,) * 3,))
    found = json.loads(json.dumps(plan.as_json(), allow_nan=False))
    assert found == plan.as_json()
    assert found["hardware"] == "h200" and found["devices"] == 8
    assert found["limits"] == {"device_bytes": None, "host_bytes": None, "pinned_bytes": None}
    assert found["boundaries"] == [10]
    assert found["placements"] == {path: str(place) for path, place in plan.rules.items()}
    assert found["seconds"] == plan.seconds and found["mfu"] == plan.mfu
    assert found["phases"] == {"backward of blocks": plan.outcome.device_bytes}
    assert sum(found["times"].values()) == pytest.approx(plan.seconds)
    assert [one["why"] for one in found["choices"]] == [one.why for one in plan.choices]
    assert found["choices"][0]["alternatives"].keys() == {"device", "recompute"}
    assert found["alternatives"].keys() == {"all recomputed", "all on the device", "all on the host"}
    assert found["frontier"] is None
    points = plan.frontier()
    assert plan.as_json()["frontier"] == [[size, seconds] for size, seconds, _ in points]
    dead = make(block(ONE, WANTED), limits=limits(), out_rate=0.0, decision=((HOST,),)).as_json()
    assert dead["seconds"] is None
    json.dumps(dead, allow_nan=False)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (0.4e-3, "0.40 ms"), (1.1e-3, "1.1 ms"), (12.4e-3, "12 ms"), (9.96e-3, "10 ms"), (0.9999, "1.00 s"),
     (1.25, "1.25 s"), (48e-6, "48 µs"), (3e-6, "3.0 µs"), (0.0999e-3, "0.10 ms"), (0.4e-6, "0.40 µs"),
     (30e-9, "30 ns"), (math.inf, "forever"),
     (0.99949, "999 ms")],
)  # fmt: skip
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_every_placement_has_a_word():
    assert set(PLACEMENTS) == set(Placement)
