"""Plans for real training steps: what a planner counts is what JAX's own program does, whatever is placed where."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill import zoo
from overspill.policies import census, check, place, plan
from overspill.policies.activation import Placement, annotations
from overspill.policies.costs import Cost, expert_fill, total
from overspill.policies.liveness import footprint
from overspill.policies.machines import hardware
from overspill.policies.planner import Options, Planner
from overspill.policies.problem import recomputed
from overspill.policies.programs import Program
from overspill.policies.solving import Infeasible
from overspill.zoo.meshes import abstract_mesh, layout_of

LLAMA, DEEPSEEK = "overspill-llama-tiny", "overspill-deepseek-tiny"
KINDS = ("matmul", "attention", "grouped")
PROGRAMS = {
    "llama": (LLAMA, None, 2, {}),
    "deepseek": (DEEPSEEK, None, 2, {}),
    "micro-batches": (DEEPSEEK, None, 4, {"accumulate": 2}),
    "experts apart": (DEEPSEEK, "fsdp=2,expert=2", 8, {}),
    "tensors in parts": (LLAMA, "fsdp=2,tensor=2", 8, {}),
}


def program(name, mesh=None, rows=2, options=None, *, length=96, segments=(), state_memory=None):
    model = zoo.abstract(name, dtype=jnp.float32, segments=segments)
    layout = None if mesh is None else layout_of(abstract_mesh(mesh), ())
    optimizer = zoo.adamw(1e-3)
    state = zoo.init_state(model, optimizer, key=jax.random.key(0), mesh=layout, state_memory=state_memory)
    step = zoo.make_train_step(model, optimizer, mesh=layout, state_memory=state_memory, **(options or {}))
    ids, flags = (jax.ShapeDtypeStruct((rows, length), dtype) for dtype in (jnp.int32, jnp.bool_))
    return Program(step, (state, zoo.Batch(ids, ids, ids, ids, flags)), {})


def planner(*args, segments=1, name="h100", **options):
    return Planner(Options(hardware(name), segments=segments, **options), program(*args))


@pytest.fixture(scope="module")
def planners():
    made = {}

    def get(which):
        if which not in made:
            made[which] = planner(*PROGRAMS[which])
        return made[which]

    return get


def decisions(groups, count, seed=0):
    draw = random.Random(seed)
    for _ in range(count):
        yield tuple(tuple(draw.choice(item.placements) for item in group.items) for group in groups)


def counted(planner, decision):
    """Products of all blocks under a decision, as the planner counts them."""
    blocks = {block.prefix: block for block in planner.assembly.blocks}
    sums = Cost()
    for group, row in zip(planner.assembly.groups, decision, strict=True):
        block = next(b for p, b in blocks.items() if p == group.stack or p.startswith(f"{group.stack}."))
        parts = [*block.graph.forward, *block.graph.backward]
        parts += [block.graph.nodes[u].work for u in recomputed(group, row)]
        sums += sum((work.cost for work in parts), Cost()) * (group.layers * planner.program.micro_batches)
    return np.array([getattr(sums, kind) for kind in KINDS])


@pytest.mark.parametrize("which", PROGRAMS)
def test_what_is_computed_again_is_what_the_program_computes_again(planners, which):
    # Whatever is placed where, products that are in no block are the same: then those in blocks are counted right.
    planned = planners(which)
    rest = []
    for decision in decisions(planned.assembly.groups, 3):
        closed, *_ = planned.program.trace(planned.assembly.placements(decision))
        fill = expert_fill(closed.jaxpr)
        whole = total(closed.jaxpr, devices=planned.devices, platform="cuda", fill=fill)
        rest.append(np.array([getattr(whole, kind) for kind in KINDS]) - counted(planned, decision))
    for found in rest:
        np.testing.assert_allclose(found, rest[0], rtol=1e-9, atol=1)
    assert rest[0][0] > 0 and abs(rest[0][1]) < 1 and abs(rest[0][2]) < 1  # the head; no attention, no experts


def test_products_outside_of_blocks_are_the_heads():
    planned = Planner(Options(hardware("h100")), program(LLAMA, length=128))
    config = planned.program.function.model.config
    # Logits forward, logits again, and a product for each of the two gradients.
    assert planned.outside.matmul == 4 * 2 * 2 * 128 * config.vocab_size * config.hidden_size


@pytest.mark.parametrize("which", ["llama", "deepseek", "experts apart", "tensors in parts"])
def test_what_is_kept_is_what_the_census_finds(planners, which):
    planned = planners(which)
    groups = planned.assembly.groups
    for decision in decisions(groups, 2, seed=1):
        expected = {Placement.HOST: 0, Placement.DEVICE: 0}
        for group, row in zip(groups, decision, strict=True):
            again = recomputed(group, row)
            read = {u for u, unit in enumerate(group.units) if unit.wanted}
            read |= {r for u in again for r in group.units[u].reads}
            kept = {group.units[u].item for u in read} - {None}
            for i in kept:
                if row[i] in expected:
                    expected[row[i]] += group.layers * group.items[i].bytes
        step = planned.program.function.placed(planned.assembly.placements(decision))
        found = census(step, planned.program.state, planned.program.batch)
        for where, size in expected.items():
            assert found.bytes("named", memory=where, each=True) == size


def applied(asked, made):
    """The step, state and batch of a program, as a plan has them."""
    step, state, batch = asked.function, asked.state, asked.batch
    model = place(zoo.resegment(step.model, made.boundaries), made)
    state = zoo.resegment(state, made.boundaries, model=step.model)
    return zoo.make_train_step(model, step._optimizer, mesh=step._options.layout), state, batch


@pytest.mark.parametrize("which", ["llama", "deepseek", "experts apart"])
def test_a_plan_is_what_the_planned_step_does(which):
    asked = program(*PROGRAMS[which][:3])
    whole = Planner(Options(hardware("h100"), segments=2), asked)
    # As little memory as lets something be moved, and not all of it.
    sizes = [reference.footprint.device_bytes for reference in whole.references]
    limit = min(sizes) + 0.15 * (max(sizes) - min(sizes))
    made = whole.limited(device_bytes=limit).plan()
    assert made.device_bytes <= limit
    step, state, batch = applied(asked, made)
    found = check(step, state, batch)
    assert found.bytes("named", memory="host", each=True) == made.host_bytes == made.offloaded_bytes
    wanted = {path: where for path, where in made.rules.items() if found.statuses[path] not in ("not needed",)}
    for path, where in wanted.items():
        status = found.statuses[path]
        assert status == {"recompute": "recomputed"}.get(where.value, where.value) or "same value" in status, path
    assert set(made.rules) == {row.path for row in annotations(step.annotated)}


@pytest.mark.parametrize("segments", [1, 3])
def test_a_plans_memory_is_what_its_own_step_is_simulated_to_need(segments):
    asked = program(LLAMA)
    whole = Planner(Options(hardware("h100"), segments=segments), asked)
    sizes = [reference.footprint.device_bytes for reference in whole.references]
    limit = min(sizes) + 0.3 * (max(sizes) - min(sizes))
    made = whole.limited(device_bytes=limit).plan()
    step, state, batch = applied(asked, made)
    closed, shardings, donated = Program(step, (state, batch), {}).trace({})
    found = footprint(closed, shardings, platform="cuda", donated=donated)
    assert made.footprint == found
    assert made.device_bytes == pytest.approx(found.device_bytes, abs=1)  # rounded
    assert made.device_bytes <= limit


def test_a_plan_refuses_a_model_that_is_cut_otherwise():
    asked = program(LLAMA, segments=(3,))
    made = Planner(Options(hardware("h100"), segments=1), asked).plan()
    assert made.boundaries == ()
    with pytest.raises(ValueError, match=r"zoo\.resegment\(model, \(\)\)"):
        place(asked.function.model, made)
    assert place(zoo.resegment(asked.function.model, ()), made)
    with pytest.raises(ValueError, match="another model"):
        place(zoo.abstract(DEEPSEEK), made)


def test_more_memory_is_never_slower(planners):
    planned = planners("llama")
    sizes = [r.footprint.device_bytes for r in planned.references]
    low, high, before = min(sizes), max(sizes), float("inf")
    for share in (0.05, 0.2, 0.4, 0.7, 1.0):
        seconds = planned.limited(device_bytes=low + share * (high - low)).plan().seconds
        assert seconds <= before * (1 + 1e-9)
        before = seconds


def test_what_does_not_fit_says_what_would(planners):
    planned = planners("llama")
    least = min(r.footprint.device_bytes for r in planned.references)
    with pytest.raises(Infeasible, match="device memory") as caught:
        planned.limited(device_bytes=least / 2).plan()
    enough = least / 2 + caught.value.device_shortfall
    assert planned.limited(device_bytes=enough).plan().device_bytes <= enough


def test_the_largest_batch_fits_and_the_next_does_not(planners):
    asked = program(LLAMA, None, 4)
    limit = 6 * max(r.footprint.device_bytes for r in planner(LLAMA, None, 4).references)
    options = Options(hardware("h100"), device_bytes=limit, segments=1)
    most = Planner(options, asked).largest_batch()
    assert most > 4
    assert Planner(options, asked.resized(most)).plan().device_bytes <= limit
    with pytest.raises(Infeasible):
        Planner(options, asked.resized(most + max(most // 20, 1))).plan()


def test_state_on_the_host_counts_there():
    held = program(LLAMA, None, 2, state_memory={"optimizer.*": "host"})
    made = Planner(Options(hardware("h100")), held).plan()
    moments = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held.state.opt_state))
    assert made.problem.host_fixed_bytes == moments
    assert made.host_bytes == moments + made.offloaded_bytes


def test_a_function_that_plans_like_the_planner():
    asked = program(LLAMA)
    made = plan(asked.function, asked.state, asked.batch, hardware="h100", segments=1, calibrate=False)
    assert made.tokens == 2 * 96 and made.devices == 1
    assert made.decision == planner(LLAMA).plan().decision
    assert 0 < made.mfu < 1


def test_model_flops_leave_out_what_is_computed_again():
    planned = Planner(Options(hardware("h100"), segments=1), program(LLAMA, length=128))
    config, tokens = planned.program.function.model.config, 2 * 128
    size, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    weights = size * (2 * heads + 2 * keys + 3 * config.intermediate_size)
    # Attention in full squares; the logits' second computation in the chunked loss isn't counted.
    layer = 2 * tokens * weights + 4 * tokens * 128 * heads
    expected = 3 * (config.num_hidden_layers * layer + 2 * tokens * size * config.vocab_size)
    assert planned.plan().model_flops == pytest.approx(expected, rel=1e-9)


def test_state_on_the_host_takes_its_time_for_the_update():
    here, there = (
        Planner(Options(hardware("h100")), program(LLAMA, None, 2, state_memory=memory))
        for memory in (None, {"optimizer.*": "host"})
    )
    out, back = hardware("h100").rates(both=True)
    moved = there.problem.host_fixed_bytes / min(out, back)
    assert there.problem.outside_seconds == pytest.approx(here.problem.outside_seconds + moved)


@pytest.mark.parametrize("segments", [(), (3, 6)])
def test_sums_of_memory_are_what_was_simulated(segments):
    planned = Planner(Options(hardware("h100")), program(LLAMA, segments=segments))
    assert len(planned.assembly.groups) == len(segments) + 1
    for reference in planned.references:
        summed = planned.problem.evaluate(reference.decision).device_bytes
        assert summed == pytest.approx(reference.footprint.device_bytes, abs=2)  # rounded


def test_a_fused_kernel_spares_the_scores(planners):
    usual, fused = planners("llama"), planner(LLAMA, fused_attention=True)
    for before, after in zip(usual.assembly.groups, fused.assembly.groups, strict=True):
        assert after.forward_seconds < before.forward_seconds and after.backward_seconds < before.backward_seconds
        assert after.items == before.items  # memory is the program's all the same
