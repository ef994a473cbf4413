"""Plans for layers and losses of one's own: what is read from them, and what is refused."""

import dataclasses
import math
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from overspill import policies
from overspill.policies import Activation, Infeasible, Placement, calibrating, plan
from overspill.policies.ahead import CompileError
from overspill.policies.blocks import read_blocks
from overspill.policies.machines import hardware
from overspill.policies.planner import Options, Planner
from overspill.policies.problem import recomputed
from overspill.policies.programs import Program

WIDE, NARROW, ROWS, LENGTH = 2048, 1024, 16, 80


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """Plans are simulated here, whatever is installed."""

    def missing(platform):
        raise ModuleNotFoundError(f"no compiler for {platform}")

    monkeypatch.setattr(calibrating, "require_compiler", missing)


class Feed(eqx.Module):
    """x + gelu(x W) V, with the block's input always kept somewhere."""

    up: jax.Array
    down: jax.Array
    inner: Activation
    wide: Activation
    active: Activation

    def __init__(self, key, wide=WIDE):
        a, b = jax.random.split(key)
        self.up = jax.random.normal(a, (wide, NARROW)) / NARROW**0.5
        self.down = jax.random.normal(b, (NARROW, wide)) / wide**0.5
        self.inner = Activation("inner", recomputable=False)
        self.wide = Activation("wide")
        self.active = Activation("active")

    def __call__(self, x):
        x = self.inner(x)
        return x + self.active(jax.nn.gelu(self.wide(x @ self.up.T))) @ self.down.T


class Two(eqx.Module):
    """Two layers of different size in a row, each under a checkpoint of its own."""

    first: Feed
    second: Feed

    def __call__(self, x):
        return policies.checkpoint(self.second)(policies.checkpoint(self.first)(x))


X = jax.ShapeDtypeStruct((ROWS, LENGTH, NARROW), jnp.float32)
FEED = Feed(jax.random.key(0))
PRODUCT = 2 * ROWS * LENGTH * NARROW * WIDE  # FLOPs of either projection
BYTES = ROWS * LENGTH * WIDE * 4


def read(function, *args, layers=None):
    (block,) = read_blocks(Program(function, args, {}, layers), devices=1, platform="cuda")
    return block


def test_a_layer_is_read_as_it_computes():
    block = read(FEED, X)
    graph = block.graph
    assert sum(work.cost.matmul for work in graph.forward) == 2 * PRODUCT
    assert sum(work.cost.matmul for work in graph.backward) == 4 * PRODUCT
    sizes = {node.name: node.bytes for node in graph.nodes if node.name}
    assert sizes == {"inner": BYTES * NARROW // WIDE, "wide": BYTES, "active": BYTES}
    assert block.times == 1 and set(block.names) == {"inner", "wide", "active"}


def again(which, **places):
    """FLOPs of products that are computed again in a layer, with activations as in `places`."""
    graph = read(which, X).graph
    planner = Planner(Options(hardware("h100")), Program(which, (X,), {}, 8))
    (group,) = planner.assembly.groups
    ends = [item.path.rpartition(".")[2] for item in group.items]
    row = [Placement(places.get(end, "device" if end == "inner" else "recompute")) for end in ends]
    return sum(graph.nodes[u].work.cost.matmul for u in recomputed(group, row))


def test_chains_are_recomputed_as_far_as_they_are_needed():
    assert again(FEED) == PRODUCT  # active from wide from inner
    assert again(FEED, active="host") == PRODUCT  # the nonlinearity's derivative wants wide
    assert again(FEED, wide="device") == 0
    assert again(FEED, wide="host", active="host") == 0


def test_loops_count_their_layers():
    block = read(FEED, X, layers=12)
    assert block.times == 12
    made = plan(FEED, X, hardware="h100", layers=12)
    assert made.model_flops == pytest.approx(12 * 6 * PRODUCT)
    assert made.tokens is None and made.tokens_per_second is None


@pytest.mark.parametrize("layers", [8, 30])
def test_memory_decides(layers):
    """With less and less memory ever more is moved or computed again, and the step takes ever longer."""
    free = plan(FEED, X, hardware="h100", layers=layers)
    assert set(free.rules.values()) <= {Placement.DEVICE, Placement.RECOMPUTE}
    assert free.rules["wide"] is Placement.DEVICE
    tight = plan(FEED, X, hardware="h100", layers=layers, device_bytes=free.device_bytes - layers * BYTES * 3 // 4)
    assert tight.device_bytes <= free.device_bytes - layers * BYTES * 3 // 4
    assert tight.seconds >= free.seconds
    assert tight.rules["wide"] is not Placement.DEVICE
    # A link like that of the device's own memory moves what another recomputes.
    fast = dataclasses.replace(hardware("h100"), device_to_host=1e15, host_to_device=1e15, link_bandwidth=1e15)
    moved = plan(FEED, X, hardware=fast, layers=layers, device_bytes=tight.device_bytes)
    slow = dataclasses.replace(hardware("h100"), device_to_host=1e6, host_to_device=1e6)
    still = plan(FEED, X, hardware=slow, layers=layers, device_bytes=tight.device_bytes)
    assert moved.rules["wide"] is Placement.HOST and moved.host_bytes >= layers * BYTES
    assert still.host_bytes == 0 and still.seconds >= moved.seconds


def test_a_plan_places_the_layer_it_was_made_for():
    limit = plan(FEED, X, hardware="h100", layers=16).device_bytes - 8 * BYTES
    made = plan(FEED, X, hardware="h100", layers=16, device_bytes=limit)
    layer = policies.place(FEED, made)
    assert {name: getattr(layer, name).placement for name in made.rules} == dict(made.rules)

    def loss(layer, x):
        stacked = lambda x, _: (policies.checkpoint(layer, prevent_cse=False)(x), None)
        return jnp.sum(jax.lax.scan(stacked, x, None, length=16)[0])

    found = policies.check(loss, layer, X)
    assert found.bytes("named", memory="host") == made.host_bytes


def test_a_loss_is_planned_block_by_block():
    model = Two(FEED, Feed(jax.random.key(1), wide=2 * WIDE))
    planner = Planner(Options(hardware("h100")), Program(lambda model, x: jnp.sum(model(x)), (model, X), {}))
    assert [group.name for group in planner.assembly.groups] == ["first", "second"]
    # Outside of loops nothing is moved: XLA would bring it back at once.
    assert all(Placement.HOST not in item.placements for g in planner.assembly.groups for item in g.items)
    made = planner.plan()
    assert set(made.rules) == {f"{a}.{b}" for a in ("first", "second") for b in ("inner", "wide", "active")}
    assert policies.place(model, made)


def test_what_is_shared_is_placed_once():
    def loss(layer, x):
        return jnp.sum(policies.checkpoint(layer)(policies.checkpoint(layer)(x)))

    (block,) = read_blocks(Program(loss, (FEED, X), {}), devices=1, platform="cuda")
    assert block.times == 2


def test_infeasible_limits_say_what_is_short():
    with pytest.raises(Infeasible, match="device memory") as caught:
        plan(FEED, X, hardware="h100", layers=16, device_bytes=1000)
    short = caught.value.device_shortfall
    made = plan(FEED, X, hardware="h100", layers=16, device_bytes=1000 + short)
    assert made.device_bytes <= 1000 + short
    with pytest.raises(Infeasible):
        plan(FEED, X, hardware="h100", layers=16, device_bytes=1000 + short - 4096)


def test_memory_that_is_taken_counts():
    made = plan(FEED, X, hardware="h100", layers=16)
    more = plan(FEED, X, hardware="h100", layers=16, reserved_bytes=2**30)
    assert more.device_bytes == made.device_bytes + 2**30


def test_another_format_is_another_speed():
    made, quick = (plan(FEED, X, hardware="h100", layers=4, dtype=d) for d in (None, "float8"))
    assert quick.seconds < made.seconds and quick.dtype == "float8"
    assert quick.problem.groups[0].items == made.problem.groups[0].items  # nothing is smaller


class Unnamed(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return x @ self.weight


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: plan(FEED, X, hardware="h99"), ValueError, "h100"),
        (lambda: plan(Unnamed(jnp.ones((NARROW, NARROW))), X, hardware="h100"), ValueError, "no Activation"),
        (lambda: plan(lambda m, x: m(x).sum(), FEED, X, hardware="h100"), ValueError, r"policies\.checkpoint\(layer\)"),
        (lambda: plan(lambda m, x: jax.grad(lambda m: policies.checkpoint(m)(x).sum())(m), FEED, X, hardware="h100"),
         ValueError, "differentiates"),
        (lambda: plan(FEED, X, hardware="h100", layers=0), ValueError, "layers is 0"),
        (lambda: plan(FEED, X, hardware="h100", segments=True), ValueError, "segments is True"),
        (lambda: plan(FEED, X, hardware="h100", segments=2), ValueError, "no stack of layers"),
        (lambda: plan(FEED, X, hardware="h100", device_bytes=-1), ValueError, "device_bytes is -1"),
        (lambda: plan(FEED, X, hardware="h100", device_bytes=math.nan), ValueError, "device_bytes is nan"),
        (lambda: plan(FEED, X, hardware="h100", dtype="int3"), ValueError, "no peak for int3"),
        (lambda: plan(lambda m, x: x, FEED, X, hardware="h100", layers=3), ValueError, "layers is for a layer"),
        (lambda: plan(lambda m, x, segments: x, FEED, X, hardware="h100", segments=3), TypeError, "segments="),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_one_clear_error(call, error, words):
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_layer_that_gives_another_shape_cannot_be_repeated():
    class Half(Feed):
        def __call__(self, x):
            return super().__call__(x)[:, ::2]

    with pytest.raises(ValueError, match="gives what it takes"):
        plan(Half(jax.random.key(0)), X, hardware="h100", layers=4)


def test_gradients_are_those_of_the_unplanned_layer():
    limit = plan(FEED, X, hardware="h100", layers=16).device_bytes - 8 * BYTES
    layer = policies.place(FEED, plan(FEED, X, hardware="h100", layers=16, device_bytes=limit))
    x = jax.random.normal(jax.random.key(2), X.shape)
    ours = jax.grad(lambda m: policies.checkpoint(m)(x).sum())(layer)
    plain = jax.grad(lambda m: m(x).sum())(FEED)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)


class Compiler:
    """A stand-in for `compile_ahead`, which needs more than is predicted, or refuses what is larger than `most`."""

    def __init__(self, more=0, most=math.inf):
        self.more, self.most, self.asked = more, most, []

    def __call__(self, planner, plan, target):
        predicted = math.floor(planner.problem.evaluate(plan.decision).device_bytes)
        self.asked.append((plan.decision, predicted + self.more))
        return types.SimpleNamespace(
            error="RESOURCE_EXHAUSTED" if predicted > self.most else None, device_bytes=predicted + self.more
        )


@pytest.fixture
def tight():
    """A planner whose memory is full."""
    free = Planner(Options(hardware("h100")), Program(FEED, (X,), {}, 16))
    return free.limited(device_bytes=free.plan().device_bytes - 8 * BYTES)


def compiler(monkeypatch, planner, **options):
    fake = Compiler(**options)
    monkeypatch.setattr(Planner, "compiled", lambda self, plan, target: fake(planner, plan, target))
    return fake


def test_a_calibrated_plan_needs_what_the_compiler_says(monkeypatch, tight):
    asked = compiler(monkeypatch, tight, more=9 * BYTES).asked
    made = tight.best(True)
    assert 2 <= len(asked) <= 5  # what was predicted to fit didn't
    assert (made.decision, made.device_bytes) in asked
    assert made.calibrated and made.simulated_bytes == tight.needed(made.decision) < made.device_bytes
    assert made.device_bytes <= tight.problem.limits.device_bytes
    assert made.seconds >= tight.plan().seconds


def test_a_calibrated_plan_uses_what_the_compiler_leaves(monkeypatch, tight):
    asked = compiler(monkeypatch, tight, more=-12 * BYTES).asked
    made = tight.best(True)
    assert made.seconds < tight.plan().seconds and len(asked) > 1
    assert made.device_bytes <= tight.problem.limits.device_bytes


def test_a_plan_that_fits_is_not_compiled_for_a_gain_too_small(monkeypatch, tight):
    roomy = tight.limited(device_bytes=10 * tight.plan().device_bytes)
    asked = compiler(monkeypatch, roomy, more=-BYTES).asked
    assert roomy.best(True).calibrated and len(asked) == 1
    assert not roomy.plan().calibrated


def test_the_smallest_plan_is_compiled_before_nothing_is_said_to_fit(monkeypatch, tight):
    smallest = tight.smallest().decision
    most = math.floor(tight.problem.limits.device_bytes)
    over = {"much": 2 * most, "a little": most + 1}

    def compiled(planner, plan, target):
        size = planner.needed(plan.decision) if plan.decision == smallest else over[way]
        return types.SimpleNamespace(error=None, device_bytes=size)

    monkeypatch.setattr(Planner, "compiled", compiled)
    for way in over:
        made = tight.best(True)
        assert made.decision == smallest and made.calibrated
    smallest = None
    with pytest.raises((Infeasible, CompileError)):
        tight.best(True)


def test_a_compiler_that_is_installed_is_asked(monkeypatch):
    def needs(planner, plan, target):
        return types.SimpleNamespace(error=None, device_bytes=plan.simulated_bytes + BYTES)

    def fails(planner, plan, target):
        raise CompileError("it stumbled")

    options = {"hardware": "h100", "layers": 2, "reserved_bytes": 3 * BYTES}
    assert not plan(FEED, X, **options).calibrated
    monkeypatch.setattr(calibrating, "require_compiler", lambda platform: "one")
    monkeypatch.setattr(Planner, "compiled", needs)
    made = plan(FEED, X, **options)
    assert made.calibrated and made.device_bytes == made.simulated_bytes + BYTES + 3 * BYTES
    assert not plan(FEED, X, **options, calibrate=False).calibrated
    assert not plan(FEED, X, **options | {"hardware": "rtx-4090"}).calibrated  # which can't be compiled for
    monkeypatch.setattr(Planner, "compiled", fails)
    assert not plan(FEED, X, **options).calibrated
    with pytest.raises(CompileError, match="it stumbled"):
        plan(FEED, X, **options, calibrate=True)


def test_a_compiler_that_refuses_is_given_less(monkeypatch, tight):
    before = tight.plan().device_bytes
    asked = compiler(monkeypatch, tight, most=before - 1).asked
    made = tight.best(True)
    assert len(asked) > 1 and made.device_bytes < before
    assert made.seconds >= tight.plan().seconds


def test_a_compiler_that_never_has_enough(monkeypatch, tight):
    compiler(monkeypatch, tight, most=-1)
    with pytest.raises((CompileError, Infeasible)):
        tight.best(True)
    with pytest.raises(ValueError, match="there is no target"):
        plan(FEED, X, hardware="rtx-4090", layers=2, calibrate=True)


class Twice(Feed):
    """One activation on two values."""

    def __call__(self, x):
        x = self.inner(x)
        for _ in range(2):
            x = x + self.active(jax.nn.gelu(self.wide(x @ self.up.T))) @ self.down.T
        return x


class Looped(Feed):
    """Activations within a loop of the layer's own."""

    def __call__(self, x):
        return jax.lax.scan(lambda x, _: (super(Looped, self).__call__(x), None), x, None, length=3)[0]


def test_an_activation_on_two_values_weighs_both():
    planner = Planner(Options(hardware("h100")), Program(Twice(jax.random.key(0)), (X,), {}, 8))
    (group,) = planner.assembly.groups
    sizes = {item.path: item.bytes for item in group.items}
    assert sizes["wide"] == 2 * BYTES
    found = policies.census(*planner.program.planned({"wide": Placement.HOST}, ())[:1], *planner.program.args)
    assert found.of("wide")


@pytest.mark.parametrize("spec", [P("data", None, None), P(("data", "more"), None, None), P()])
def test_what_one_device_of_a_mesh_keeps(spec):
    mesh = AbstractMesh((4, 2), ("data", "more"), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, spec))

    def loss(layer, x):
        step = lambda x, _: (policies.checkpoint(layer, prevent_cse=False)(x), None)
        return jnp.sum(jax.lax.scan(step, x, None, length=8)[0])

    planner = Planner(Options(hardware("h100")), Program(loss, (FEED, x), {}))
    kept = policies.census(loss, policies.place(FEED, "offload_all"), x)
    needed = {item.path for group in planner.assembly.groups for item in group.items}
    expected = sum(e.shard_bytes for name in needed for e in kept.of(name))
    # What is computed from others that are kept needn't be kept itself.
    sizes = {item.path: 8 * item.bytes for group in planner.assembly.groups for item in group.items}
    assert {name: sum(e.shard_bytes for e in kept.of(name)) for name in needed if kept.of(name)} == {
        name: size for name, size in sizes.items() if kept.of(name)
    }
    assert expected


@pytest.mark.parametrize(
    ("function", "args", "words"),
    [
        (Looped(jax.random.key(0)), (X,), "computed in a loop"),
        (lambda x: jnp.sum(policies.checkpoint(FEED)(x)), (X,), "in reach"),
        (lambda m, x: jnp.sum(policies.checkpoint(m)(x)) + jnp.sum(policies.checkpoint(m)(x[:2])), (FEED, X),
         "different sizes"),
    ],
)  # fmt: skip
def test_what_the_planner_cannot_see_is_refused(function, args, words):
    with pytest.raises(ValueError, match=words):
        plan(function, *args, hardware="h100")


def test_calls_outside_of_loops_are_not_moved():
    def loss(layer, x):
        return jnp.sum(policies.checkpoint(layer)(policies.checkpoint(layer)(x)))

    planner = Planner(Options(hardware("h100")), Program(loss, (FEED, X), {}))
    assert all(Placement.HOST not in item.placements for g in planner.assembly.groups for item in g.items)


def test_transfers_that_nothing_hides_take_their_time():
    # A link on which moving is worth it in either case, and takes time.
    quick = dataclasses.replace(hardware("h100"), device_to_host=1e12, host_to_device=1e12, link_bandwidth=1e12)
    free = plan(FEED, X, hardware=quick, layers=16)
    limit = free.device_bytes - 12 * BYTES
    beside, waiting = (
        plan(FEED, X, hardware=quick, layers=16, device_bytes=limit, pipelined=way) for way in (True, False)
    )
    assert beside.host_bytes > 0
    assert waiting.problem.pipelined is False and waiting.seconds > beside.seconds
