
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill import policies
from overspill.layers.stack import Stack, resegment
from overspill.policies import Activation


class Toy(eqx.Module):
    """x + tanh((x * table) A) B and, as the second result, what the layer saw."""

    first: jax.Array
    second: jax.Array
    block_input: Activation
    hidden: Activation

    def __init__(self, key, size=6):
        first, second = jax.random.split(key)
        self.first = jax.random.normal(first, (size, size)) / size**0.5
        self.second = jax.random.normal(second, (size, size)) / size**0.5
        self.block_input = Activation("block_input", recomputable=False)
        self.hidden = Activation("hidden")

    def __call__(self, x, *, table):
        x = self.block_input(x)
        hidden = self.hidden(jnp.tanh((x * table) @ self.first))
        return x + hidden @ self.second, {"mean": jnp.mean(hidden)}


class Silent(Toy):
    def __call__(self, x, *, table):
        return super().__call__(x, table=table)[0], None


LAYERS = 5
TABLE = jnp.linspace(0.5, 1.5, 6)
X = jax.random.normal(jax.random.key(1), (2, 3, 6))


def build(boundaries=(), *, num_layers=LAYERS, make=Toy, **options):
    return Stack.build(make, num_layers, boundaries=boundaries, key=jax.random.key(0), **options)


def reference(stack, x):
    x, means = np.asarray(x, np.float64), []
    for block in stack:
        hidden = np.tanh(x * np.asarray(TABLE, np.float64) @ np.asarray(block.first, np.float64))
        x = x + hidden @ np.asarray(block.second, np.float64)
        means.append(hidden.mean())
    return x, means


@pytest.mark.parametrize("checkpoint", [None, policies.checkpoint])
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("boundaries", [(), (1,), (2, 4), (1, 2, 3, 4)])
def test_output_and_statistics_whatever_the_segments(boundaries, scan, checkpoint):
    stack = build(boundaries, scan=scan)
    y, stats = jax.jit(lambda stack, x: stack(x, checkpoint=checkpoint, table=TABLE))(stack, X)
    expected, means = reference(stack, X)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stats["mean"], means, rtol=1e-4, atol=1e-6)


def test_blocks_without_a_second_result():
    assert build(make=Silent)(X, table=TABLE)[1] is None
    assert build((2,), make=Silent, scan=False)(X, table=TABLE)[1] is None


@pytest.mark.parametrize("boundaries", [(1,), (2, 4), (1, 2, 3, 4)])
def test_weights_do_not_depend_on_segments_or_scan(boundaries):
    whole, cut = build(), build(boundaries, scan=False)
    assert cut.boundaries == boundaries and cut.num_layers == LAYERS
    for a, b in zip(whole, cut, strict=True):
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), a, b))
    assert not (whole.layer(0).first == whole.layer(1).first).any()


def test_gradients_of_scan_loop_segments_and_placements_agree():
    def gradient(stack, checkpoint=policies.checkpoint):
        grads, x = jax.jit(
            jax.grad(lambda stack, x: jnp.sum(stack(x, checkpoint=checkpoint, table=TABLE)[0] ** 2), argnums=(0, 1))
        )(stack, X)
        return [*jax.tree.leaves(resegment(grads, ())), x]

    expected = gradient(build(), None)
    for stack in (build(), build((2,)), build((1, 3), scan=False)):
        for rules in ("save_all", "recompute_all", "offload_all", {"*segments.0*": "host"}):
            for a, b in zip(gradient(policies.place(stack, rules)), expected, strict=True):
                assert np.linalg.norm(a - b) < 1e-6 * np.linalg.norm(b)


def gradient_program(stack):
    """The program of forward and backward pass, as text."""
    grad = jax.make_jaxpr(jax.grad(lambda s: jnp.sum(s(X, checkpoint=policies.checkpoint, table=TABLE)[0])))
    return str(grad(stack))


def test_segments_place_their_activations_apart():
    stack = build((3,))
    annotations = [row.path for row in policies.activation.annotations(stack)]
    assert annotations == [f"segments.{i}.{name}" for i in (0, 1) for name in ("block_input", "hidden")]
    assert "<host>" not in gradient_program(policies.place(stack, "save_all"))
    text = gradient_program(policies.place(stack, {"segments.0.hidden": "host"}))
    assert "<host>[3,2,3,6]" in text and "<host>[2,2,3,6]" not in text


def test_what_layers_share_is_not_kept_once_per_layer():
    table = jnp.ones((2, 3, 6))

    def loss(stack, table):
        return jnp.sum(stack(X, checkpoint=policies.checkpoint, table=table[:, :, :5].sum() * table)[0] ** 2)

    stack = policies.place(build(num_layers=7, make=Silent), "recompute_all")
    jaxpr = jax.make_jaxpr(jax.grad(loss))(stack, table)
    forward, _ = (e for e in jaxpr.eqns if e.primitive.name == "scan")
    stacked = [v.aval.shape for v in forward.outvars if v.aval.shape[:1] == (7,)]
    assert stacked == [(7, 2, 3, 6)]  # the blocks' inputs, and nothing else


def test_a_segment_of_one_layer_is_not_scanned():
    jaxpr = jax.make_jaxpr(lambda x: build((1, 2), num_layers=3)(x, table=TABLE)[0])(X)
    assert all(e.primitive.name != "scan" for e in jaxpr.eqns)
    assert any(e.primitive.name == "scan" for e in jax.make_jaxpr(lambda x: build()(x, table=TABLE)[0])(X).eqns)


@pytest.mark.parametrize(("old", "new"), [((), (2,)), ((2,), ()), ((1, 3), (2, 3, 4)), ((1,), (1,))])
def test_resegment_moves_layers_and_nothing_else(old, new):
    stack, expected = build(old), build(new)
    cut = resegment(stack, new)
    assert jax.tree.structure(cut) == jax.tree.structure(expected)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), cut, expected))
    shapes = resegment(eqx.filter_eval_shape(lambda: stack), new)
    assert jax.tree.map(lambda leaf: leaf.shape, shapes) == jax.tree.map(lambda leaf: leaf.shape, expected)
    arrays = resegment(jax.tree.map(np.asarray, stack), new)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), arrays, expected))
    inside = jax.jit(lambda stack: resegment(stack, new))(stack)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), inside, expected))


def test_resegment_keeps_memory_kinds_missing_leaves_and_placements():
    device = jax.devices()[0]
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    stack = jax.device_put(policies.place(build((2,)), {"segments.1.*": "host"}), host)
    first, _ = eqx.partition(stack, jax.tree.map(lambda _: False, stack))
    assert resegment(first, (1,)).lengths == (1, 4)
    cut = resegment(stack, (1, 2, 3))
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(cut)} == {"pinned_host"}
    np.testing.assert_array_equal(cut.layer(4).first, stack.layer(4).first)
    assert [row.placement for row in policies.activation.annotations(cut)] == ["device"] * 4 + ["host"] * 4


def test_global_indices():
    stack = build((5, 6), start=3)
    assert stack.boundaries == (5, 6) and stack.lengths == (2, 1, 2)
    np.testing.assert_array_equal(stack.layer(4).first, build().layer(1).first)
    for index in (2, 8):
        with pytest.raises(IndexError, match=f"layer {index} is not in this stack of layers 3 to 7"):
            stack.layer(index)


@pytest.mark.parametrize("boundaries", [(0,), (5,), (3, 2), (2, 2), (-1,), (True,)])
def test_boundaries_that_make_no_sense(boundaries):
    with pytest.raises(ValueError, match="segment boundaries"):
        build(boundaries)
    with pytest.raises(ValueError, match="segment boundaries"):
        resegment(build(), boundaries)


def test_a_stack_needs_layers():
    with pytest.raises(ValueError, match="at least one layer, not 0"):
        build(num_layers=0)
    with pytest.raises(ValueError, match="one layer has no place"):
        build((1,), num_layers=1)


def test_the_program_does_not_grow_with_depth():
    """XLA gets as much to compile for 60 layers as for 6; `benchmarks/compile.py` has times."""

    def size(num_layers, scan=True):
        stack = policies.place(build(num_layers=num_layers, scan=scan), "offload_all")
        loss = jax.grad(lambda s, x: jnp.sum(s(x, checkpoint=policies.checkpoint, table=TABLE)[0]))
        return len(jax.jit(loss).lower(stack, X).as_text())

    assert size(60) <= 1.05 * size(6)
    assert size(6, scan=False) > 2 * size(6)  # the measure does tell
