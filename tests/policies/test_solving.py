"""The solver against brute force, written from the data model's docstrings and from nothing else."""

import dataclasses
import itertools
import math
import random

import pytest

from overspill.policies.integer_program import Program, chains
from overspill.policies.problem import PLACEMENTS, Group, Item, Limits, Phase, Problem, Unit
from overspill.policies.solving import Infeasible, frontier, least_memory, marginal_seconds, solve

DEVICE, HOST, RECOMPUTE = PLACEMENTS
SEEDS = range(300)
CLOSE = 1e-6


def layer_again(group, row):
    """Seconds of what one layer computes again: walks back from what the backward pass wants."""
    done = set()

    def need(u):
        unit = group.units[u]
        if u in done or (unit.item is not None and row[unit.item] != RECOMPUTE):
            return
        done.add(u)
        for read in unit.reads:
            need(read)

    for u, unit in enumerate(group.units):
        if unit.wanted:
            need(u)
    return sum(group.units[u].seconds for u in done)


def over(count, rate):
    return 0.0 if count == 0 else math.inf if rate == 0 else count / rate


def step_seconds(problem, decision):
    total = 0.0
    for index, (group, row) in enumerate(zip(problem.groups, decision, strict=True)):
        hosted = sum(item.bytes for item, p in zip(group.items, row, strict=True) if p == HOST)
        traffic = sum(item.device_seconds for item, p in zip(group.items, row, strict=True) if p == DEVICE)
        traffic += sum(item.host_seconds for item, p in zip(group.items, row, strict=True) if p == HOST)
        leaving = over(hosted + group.out_bytes, problem.out_rate)
        coming = over(hosted + group.in_backward_bytes, problem.in_rate)
        fetched = over(group.in_forward_bytes, problem.in_rate)
        forward = group.forward_seconds + traffic / 2
        backward = group.backward_seconds + traffic / 2 + layer_again(group, row)
        if problem.pipelined:
            total += group.layers * (max(forward, leaving, fetched) + max(backward, coming))
            last = index == len(problem.groups) - 1 or problem.groups[index + 1].stack != group.stack
            total += leaving + coming if last else 0.0
        else:
            total += group.layers * (forward + backward + leaving + coming + fetched)
    return problem.outside_seconds + problem.repeats * total


def memories(problem, decision):
    places = [(g, i, p) for g, row in enumerate(decision) for i, p in enumerate(row)]
    table = {DEVICE: "device", HOST: "host", RECOMPUTE: "recompute"}
    device = max(
        phase.fixed + sum(getattr(phase, table[p])[g][i] for g, i, p in places) for phase in problem.phases
    )
    host = sum(problem.groups[g].layers * problem.groups[g].items[i].bytes for g, i, p in places if p == HOST)
    return device, host + problem.host_fixed_bytes


def brute_force(problem):
    """(seconds, device bytes, host bytes) of every decision, by decision."""
    rows = [itertools.product(*(item.placements for item in group.items)) for group in problem.groups]
    return {d: (step_seconds(problem, d), *memories(problem, d)) for d in itertools.product(*rows)}


def host_limit(problem):
    return min(problem.limits.host_bytes, problem.limits.pinned_bytes)


def fitting(problem, everything):
    device, host = problem.limits.device_bytes, host_limit(problem)
    return {d: v for d, v in everything.items() if v[1] <= device and v[2] <= host}


def seconds(rng):
    return rng.choice([0.0, 0.1, 0.25, rng.random(), rng.random() * 3])


def size(rng):
    return rng.choice([0, 1, 2, rng.randrange(1, 10), rng.randrange(1, 1000)])


def some_group(rng, index, items):
    kinds = [PLACEMENTS, PLACEMENTS, PLACEMENTS, (DEVICE, HOST), (DEVICE, RECOMPUTE), (HOST, RECOMPUTE), (RECOMPUTE,)]
    made = tuple(
        Item(f"item{i}", size(rng), rng.choice(kinds), rng.choice([0.0, 0.05]), rng.choice([0.0, 0.1]))
        for i in range(items)
    )
    units = []
    for u in range(rng.choice([0, items, items + 2, 2 * items + 3])):
        reads = tuple(sorted(rng.sample(range(u), min(u, rng.choice([0, 1, 1, 2, 3])))))
        item = rng.randrange(items) if items and rng.random() < 0.6 else None
        units.append(Unit(seconds(rng), reads, rng.random() < 0.4, item))
    return Group(
        f"group{index}",
        rng.choice(["one", "other"]),
        rng.randrange(1, 4),
        made,
        tuple(units),
        seconds(rng),
        seconds(rng),
        *(rng.choice([0, 0, size(rng)]) for _ in range(3)),
    )


def some_phase(rng, index, groups):
    whole = rng.random() < 0.6
    number = lambda: float(rng.randrange(0, 50)) if whole else rng.random() * 50

    def table(factor, chance):
        return tuple(
            tuple(
                float(group.layers * item.bytes * factor) if rng.random() < chance else number() for item in group.items
            )
            for group in groups
        )

    return Phase(f"phase{index}", number(), table(1, 0.7), table(0, 0.7), table(0, 0.7))


def some_problem(seed, *, limited=True):
    """A small problem; its limits are near what decisions come to, or infinite, or out of reach."""
    rng = random.Random(seed)
    counts = rng.choice([(3,), (5,), (2, 2), (3, 3), (1, 2, 2), (4, 0), (0,), ()])
    groups = tuple(some_group(rng, g, n) for g, n in enumerate(counts))
    if len(counts) == 2 and rng.random() < 0.3:  # equal ones, one after the other
        groups = (groups[0], dataclasses.replace(groups[0], name="again"))
    problem = Problem(
        groups,
        tuple(some_phase(rng, k, groups) for k in range(rng.randrange(1, 4))),
        Limits(),
        seconds(rng),
        rng.choice([0.0, 5.0]),
        *(rng.choice([0.0, 1.0, 20.0, 1000.0, math.inf]) if rng.random() < 0.9 else 1e-3 for _ in range(2)),
        rng.random() < 0.7,
        rng.randrange(1, 3),
    )
    if not limited:
        return problem
    everything = list(brute_force(problem).values())
    near = lambda k: rng.choice([math.inf, 0.0, *[rng.choice(everything)[k] * rng.choice([1, 1, 0.9, 1.1])] * 4])
    return dataclasses.replace(problem, limits=Limits(near(1), near(2), near(2)))


@pytest.fixture(scope="module")
def problems():
    made = [some_problem(seed) for seed in SEEDS]
    return [(problem, brute_force(problem)) for problem in made]


def solved(problem):
    try:
        return solve(problem)
    except Infeasible:
        return None


def test_evaluates_as_written(problems):
    for problem, everything in problems:
        for decision, expected in itertools.islice(everything.items(), 0, None, 7):
            outcome = problem.evaluate(decision)
            found = (outcome.seconds, outcome.device_bytes, outcome.host_bytes)
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_optimal(problems):
    feasible = 0
    for seed, (problem, everything) in enumerate(problems):
        within = fitting(problem, everything)
        decision = solved(problem)
        assert (decision is None) == (not within), seed
        if decision is not None:
            feasible += 1
            outcome = problem.evaluate(decision)
            assert problem.fits(outcome), seed
            best = min(v[0] for v in within.values())
            assert outcome.seconds == pytest.approx(best, rel=CLOSE, abs=1e-12), seed
    assert 0.4 * len(SEEDS) < feasible < 0.95 * len(SEEDS)


def test_optimal_where_times_are_close():
    """Every item may be anywhere, and keeping, moving and recomputing take about as long: each second counts."""
    for seed in range(200):
        rng = random.Random(seed)
        groups = []
        for g in range(rng.choice([1, 2])):
            items = tuple(Item(f"item{i}", rng.randrange(1, 6)) for i in range(rng.choice([3, 4]) if g == 0 else 2))
            named = rng.sample(range(8), len(items))
            units = tuple(
                Unit(
                    rng.random(),
                    tuple(sorted(rng.sample(range(u), min(u, rng.choice([1, 2]))))),
                    rng.random() < 0.4,
                    named.index(u) if u in named else None,
                )
                for u in range(8)
            )
            stack, state = rng.choice(["one", "other"]), rng.choice([0, 2])
            groups.append(Group(f"group{g}", stack, 1, items, units, rng.random(), rng.random(), 0, 0, state))
        phase = Phase(
            "phase",
            0.0,
            tuple(tuple(float(item.bytes) for item in group.items) for group in groups),
            *(tuple((0.0,) * len(group.items) for group in groups) for _ in range(2)),
        )
        limits = Limits(rng.randrange(0, 8), rng.choice([5, math.inf]))
        rates = [rng.choice([2.0, 8.0, 30.0]) for _ in range(2)]
        problem = Problem(tuple(groups), (phase,), limits, 0.0, 0.0, *rates, pipelined=rng.random() < 0.7)
        best = min(v[0] for v in fitting(problem, brute_force(problem)).values())
        assert problem.evaluate(solve(problem)).seconds == pytest.approx(best, rel=CLOSE), seed


def test_nothing_is_kept_for_nothing(problems):
    """What can be changed to a placement that is preferred, for nothing, is; what nothing reads is never kept."""
    kept = 0
    for seed, (problem, everything) in enumerate(problems):
        decision = solved(problem)
        if decision is None:
            continue
        own = step_seconds(problem, decision)
        if own == math.inf:  # over a dead link all is one
            continue
        for g, row in enumerate(decision):
            for i, placement in enumerate(row):
                kept += placement != RECOMPUTE
                for other in (RECOMPUTE, DEVICE, HOST)[: (RECOMPUTE, DEVICE, HOST).index(placement)]:
                    changed = (*decision[:g], (*row[:i], other, *row[i + 1 :]), *decision[g + 1 :])
                    free = changed in everything and everything[changed][0] <= own
                    assert not (free and changed in fitting(problem, {changed: everything[changed]})), (seed, g, i)
    assert kept > 100


def test_unread_values_are_recomputed():
    """Kept by an annotation or not, a value that nothing reads isn't there: no matter what else is free."""
    items = tuple(Item(name, 1) for name in ("read", "before", "unread"))
    units = (Unit(1.0, (), False, 1), Unit(1.0, (0,), True, 0), Unit(0.0, (1,), False, 2))
    group = Group("block", "block", 1, items, units, 1.0, 1.0)
    ones = ((1.0, 1.0, 1.0),)
    problem = Problem((group,), (Phase("only", 0.0, ones, ((0.0,) * 3,), ((0.0,) * 3,)),))
    assert solve(problem) == ((DEVICE, RECOMPUTE, RECOMPUTE),)
    # Nothing may be kept: then both are computed again, and the one that nothing reads is not.
    tight = dataclasses.replace(problem, limits=Limits(0.0, 0.0))
    assert solve(tight) == ((RECOMPUTE, RECOMPUTE, RECOMPUTE),)
    assert tight.evaluate(solve(tight)).seconds == 4.0


def test_chain_contraction_counts_shared_units_once():
    """Two named values from one unnamed: it is computed again for either, once."""
    items = (Item("a", 1), Item("b", 1))
    shared = (Unit(3.0), Unit(2.0, (0,)))
    units = (*shared, Unit(1.0, (1,), True, 0), Unit(2.0, (1,), True, 1), Unit(0.5, (3,), True))
    group = Group("block", "block", 1, items, units, 0.0, 0.0)
    found = chains(group)
    assert found.constant == 0.5
    assert found.named[2][1] == 1.0 and found.named[3][1] == 2.0
    assert found.shared == {frozenset({2, 3}): 5.0}


def test_more_never_hurts(problems):
    for seed, (problem, everything) in enumerate(problems[::3]):
        decision = solved(problem)
        before = math.inf if decision is None else problem.evaluate(decision).seconds
        limits = problem.limits
        for more in (
            {"limits": dataclasses.replace(limits, device_bytes=limits.device_bytes * 1.3 + 1)},
            {"limits": dataclasses.replace(limits, host_bytes=limits.host_bytes * 1.3 + 1)},
            {"limits": dataclasses.replace(limits, pinned_bytes=limits.pinned_bytes * 1.3 + 1)},
            {"out_rate": problem.out_rate * 1.5 + 1},
            {"in_rate": problem.in_rate * 1.5 + 1},
        ):
            richer = dataclasses.replace(problem, **more)
            other = solved(richer)
            assert decision is None or other is not None, (seed, more)
            if other is not None:
                assert richer.evaluate(other).seconds <= before * (1 + 1e-9), (seed, more)


def test_infeasible_says_what_would_do(problems):
    seen = set()
    for seed, (problem, everything) in enumerate(problems):
        if fitting(problem, everything):
            continue
        with pytest.raises(Infeasible) as raised:
            solve(problem)
        short, limits, host = raised.value, problem.limits, host_limit(problem)
        device_only = min((v[1] for v in everything.values() if v[2] <= host), default=math.inf)
        host_only = min((v[2] for v in everything.values() if v[1] <= limits.device_bytes), default=math.inf)
        assert short.both == (device_only == host_only == math.inf)
        seen.add((device_only < math.inf, host_only < math.inf))
        if not short.both:
            assert short.least_device_bytes == pytest.approx(device_only, rel=1e-9)
            assert short.least_host_bytes == pytest.approx(host_only, rel=1e-9)

        def solvable(device, host):
            return solved(dataclasses.replace(problem, limits=Limits(device, host))) is not None

        more, more_host = short.device_shortfall, short.host_shortfall
        assert more or more_host
        text = str(short)
        assert ("of device memory," in text) == (more > 0) and ("host memory," in text) == (more_host > 0)
        assert not more or short.phase in text
        if short.both:
            assert solvable(limits.device_bytes + more, host + more_host)
            assert not solvable(math.inf, host + more_host * (1 - 1e-6))
            continue
        if more:
            assert solvable(limits.device_bytes + more, host)
            assert not solvable(limits.device_bytes + more * (1 - 1e-6), host)
        if more_host:
            assert solvable(limits.device_bytes, host + more_host)
            assert not solvable(limits.device_bytes, host + more_host * (1 - 1e-6))
    assert len(seen) == 4, "an instance of each kind"


def test_a_byte_decides():
    """In a hundred GiB too, a limit holds to the byte."""
    rng = random.Random(5)
    sizes = [rng.randrange(2**30, 2**34) for _ in range(8)]
    group = Group(
        "block",
        "block",
        1,
        tuple(Item(f"item{i}", n, (DEVICE, HOST)) for i, n in enumerate(sizes)),
        tuple(Unit(0.0, (), True, i) for i in range(8)),
        1.0,
        1.0,
    )
    device, zero = (tuple(map(float, sizes)),), ((0.0,) * 8,)
    problem = Problem((group,), (Phase("backward", 2.0**36, device, zero, zero),), out_rate=1e9, in_rate=2e9)
    sums = sorted({sum(itertools.compress(sizes, keep)) for keep in itertools.product((0, 1), repeat=8)})
    for room in (sums[100], sums[101], sums[200], sums[100] - 1, sums[-1]):
        fits = max(s for s in sums if s <= room)
        limited = dataclasses.replace(problem, limits=Limits(2.0**36 + room))
        assert limited.evaluate(solve(limited)).device_bytes == 2.0**36 + fits
        host = dataclasses.replace(problem, limits=Limits(host_bytes=room))
        decision, outcome = least_memory(host)
        assert outcome.device_bytes == 2.0**36 + sum(sizes) - fits
        assert outcome.host_bytes == fits and host.evaluate(decision) == outcome
    with pytest.raises(Infeasible) as raised:
        solve(dataclasses.replace(problem, limits=Limits(2.0**36 - 1, math.inf)))
    assert raised.value.device_shortfall == 1 and raised.value.host_shortfall == 0
    with pytest.raises(Infeasible) as raised:
        solve(dataclasses.replace(problem, limits=Limits(2.0**36 + sums[7] - 1, sum(sizes) - sums[7])))
    assert raised.value.device_shortfall == 1
    assert raised.value.host_shortfall == sums[7] - sums[6]
    assert "GiB" in str(raised.value)
    assert str(raised.value).endswith(f"the limit of {(sum(sizes) - sums[7]) / 2**30:.1f} GiB")


def test_least_memory(problems):
    for seed, (problem, everything) in enumerate(problems[::2]):
        within = [v for v in everything.values() if v[2] <= host_limit(problem) and v[0] < math.inf]
        if not within:
            continue
        decision, outcome = least_memory(problem)
        least = min(v[1] for v in within)
        assert outcome.device_bytes == pytest.approx(least, rel=1e-9), seed
        assert outcome.host_bytes <= host_limit(problem)
        best = min(v[0] for v in within if v[1] <= outcome.device_bytes)
        assert outcome.seconds == pytest.approx(best, rel=CLOSE), seed


def test_frontier(problems):
    longest = 0
    for seed, (problem, everything) in enumerate(problems[::3]):
        within = [v for v in everything.values() if v[2] <= host_limit(problem) and v[0] < math.inf]
        if not within:
            continue
        points = frontier(problem, points=6)
        assert 1 <= len(points) <= 6
        longest = max(longest, len(points))
        for decision, outcome in points:
            assert outcome == problem.evaluate(decision) and outcome.host_bytes <= host_limit(problem)
            time, bytes = outcome.seconds, outcome.device_bytes
            slack = 1e-6 * max(time, 1e-6)
            assert not any(v[0] < time - slack and v[1] <= bytes for v in within), seed
            assert not any(v[0] <= time and v[1] < bytes * (1 - 1e-9) - 1e-9 for v in within), seed
        for (_, a), (_, b) in itertools.pairwise(points):
            assert a.seconds > b.seconds and a.device_bytes < b.device_bytes
        assert points[0][1].device_bytes == pytest.approx(min(v[1] for v in within), rel=1e-9)
        assert points[-1][1].seconds == pytest.approx(min(v[0] for v in within), rel=CLOSE)
    assert longest == 6
    with pytest.raises(ValueError, match="two points"):
        frontier(problems[0][0], points=1)


def test_marginal_seconds(problems):
    binding = 0
    for seed, (problem, everything) in enumerate(problems):
        now = min((v[0] for v in fitting(problem, everything).values()), default=None)
        if now is None or now == math.inf:
            continue
        limits = problem.limits
        more = dataclasses.replace(problem, limits=dataclasses.replace(limits, device_bytes=limits.device_bytes + 200))
        then = min(v[0] for v in fitting(more, everything).values())
        found = marginal_seconds(problem, 200)
        binding += found > 0
        assert found == pytest.approx(now - then, abs=2e-6 * now), seed
        assert marginal_seconds(problem, 0) == 0.0
        host = Limits(limits.device_bytes, limits.host_bytes + 200, limits.pinned_bytes + 200)
        then = min(v[0] for v in fitting(dataclasses.replace(problem, limits=host), everything).values())
        assert marginal_seconds(problem, 0, host_bytes=200) == pytest.approx(now - then, abs=2e-6 * now), seed
        faster = dataclasses.replace(problem, out_rate=problem.out_rate * 1.1, in_rate=problem.in_rate * 1.1)
        then = min(v[0] for v in fitting(faster, brute_force(faster)).values())
        assert marginal_seconds(problem, 0, link=1.1) == pytest.approx(now - then, abs=2e-6 * now), seed
    assert binding > 10
    roomy = dataclasses.replace(problems[1][0], limits=Limits())
    assert marginal_seconds(roomy) == 0.0


def large(seed=0, pipelined=True):
    """As large as DeepSeek-V3: a dense segment, four equal ones of MoE layers, and a block for MTP."""
    rng = random.Random(seed)

    def block():
        width = [rng.choice([512, 576, 1536, 2048, 7168, 16384, 24576]) * 8192 for _ in range(22)]
        items = tuple(
            Item(f"item{i}", n, PLACEMENTS if i else (DEVICE, HOST), n / 4e12, n / 4e12) for i, n in enumerate(width)
        )
        named = dict.fromkeys(rng.sample(range(150), 22))
        places = {u: i for i, u in enumerate(sorted(named))}
        units = tuple(
            Unit(
                rng.choice([0, 1e-5, 2e-4, 1e-3]) * rng.uniform(0.5, 1.5),
                tuple({rng.randrange(max(0, u - 6), u) for _ in range(rng.choice([1, 1, 2]))}) if u else (),
                rng.random() < 0.25,
                places.get(u),
            )
            for u in range(150)
        )
        return items, units

    dense, expert, extra = block(), block(), block()
    experts = [(f"moe{k}", "moe", layers, *expert) for k, layers in enumerate((15, 15, 14, 14))]
    segments = [("dense", "dense", 3, *dense), *experts, ("mtp", "mtp", 1, *extra)]
    groups = tuple(Group(*segment, 0.02, 0.04) for segment in segments)

    def phase(k):
        def table(value):
            return tuple(tuple(value(j, g, item) for item in g.items) for j, g in enumerate(groups))

        return Phase(
            f"phase{k}",
            30 * 2.0**30 + k,
            table(lambda j, g, item: g.layers * item.bytes * (j <= k)),
            table(lambda j, g, item: 2 * item.bytes * (j == k)),
            table(lambda j, g, item: item.bytes * (j == k)),
        )

    whole = sum(g.layers * item.bytes for g in groups for item in g.items)
    limits = Limits(30 * 2.0**30 + 0.3 * whole, 400 * 2.0**30)
    return Problem(groups, tuple(map(phase, range(8))), limits, 0.5, 0.0, 2e11, 2e11, pipelined)


@pytest.mark.parametrize("pipelined", [True, False])
def test_large(pipelined):
    problem = large(pipelined=pipelined)
    program = Program(problem)
    assert program.binaries == 6 * (21 * 3 + 2)
    assert all(len(chains(group).named) <= 22 for group in problem.groups)
    decision = solve(problem)
    outcome = problem.evaluate(decision)
    assert problem.fits(outcome)
    # No item alone can be moved for the better.
    for g, row in enumerate(decision):
        for i, item in enumerate(problem.groups[g].items):
            for other in item.placements:
                moved = problem.evaluate((*decision[:g], (*row[:i], other, *row[i + 1 :]), *decision[g + 1 :]))
                assert not problem.fits(moved) or moved.seconds >= outcome.seconds * (1 - 1e-6)
    roomier = dataclasses.replace(problem, limits=Limits())
    assert roomier.evaluate(solve(roomier)).seconds < outcome.seconds or pipelined
