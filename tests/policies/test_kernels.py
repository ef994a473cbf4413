"""Which kernels XLA for GPUs makes of attention, and when it runs what: small programs that are counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from overspill import policies
from overspill.policies.accelerators import target
from overspill.policies.buffers import Buffers
from overspill.policies.kernels import writes_exponentials
from overspill.policies.lifetimes import Buffer, lifetimes
from overspill.policies.liveness import footprint
from overspill.policies.operations import cut_by_rows, origin

LENGTH, WIDTH = 512, 16
SCORES = 4 * LENGTH * LENGTH
MESH = AbstractMesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
BLACKWELL, HOPPER = (10, 0), (9, 0)


def array(*shape, spec=None):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=None if spec is None else NamedSharding(MESH, spec))


def cut(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def read(function, *args, **options) -> tuple[Buffers, list[Buffer]]:
    shardings = [leaf.sharding for leaf in jax.tree.leaves(args)]
    program = Buffers(jax.make_jaxpr(function)(*args), shardings, "cuda", **options)
    return program, lifetimes(program, [])


def find(buffers, name, shape):
    return [buffer for buffer in buffers if buffer.op.name == name and buffer.op.aval.shape == shape]


# ---- softmax


def attention(x, w):
    scores = (x @ w) @ x.T
    return jax.nn.softmax(scores, axis=-1) @ x


def stacked(w, x):
    layer = jax.checkpoint(lambda x, w: (attention(x, w), None))
    return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)


def test_targets_know_their_compute_capability():
    assert target("h200").capability == HOPPER and target("gb200").capability == BLACKWELL
    assert target("tpu-v5p").capability is None
    writing = [name for name in policies.targets() if writes_exponentials(target(name).capability)]
    assert writing == ["b200", "b300", "gb200", "gb300"]


def test_exponentials_are_written_where_memory_is_fast():
    args = array(3, WIDTH, WIDTH), array(LENGTH, WIDTH)
    closed = jax.make_jaxpr(jax.grad(stacked))(*args)

    def temp(capability):
        return footprint(closed, [None, None], platform="cuda", capability=capability).temp / SCORES

    # Of scores, their gradient's operand and the gradient, two at a time: the gradient takes the exponentials' place.
    assert temp(BLACKWELL) == temp((10, 3)) == pytest.approx(2.3, abs=0.1)
    # All three: its kernel starts from the scores, of which it reads whole rows.
    assert temp(HOPPER) == temp(None) == temp((12, 0)) == pytest.approx(3.2, abs=0.1)


def test_a_softmax_that_is_only_read_on_is_one_kernel():
    _, buffers = read(attention, array(LENGTH, WIDTH), array(WIDTH, WIDTH), capability=BLACKWELL)
    assert not find(buffers, "exp", (LENGTH, LENGTH))
    _, buffers = read(jax.grad(stacked), array(3, WIDTH, WIDTH), array(LENGTH, WIDTH), capability=BLACKWELL)
    assert len(find(buffers, "exp", (LENGTH, LENGTH))) == 1  # the backward pass's
    # No shift by the rows' maxima, no softmax.
    loss = lambda x, w: jnp.sum(jnp.exp(x @ w) / jnp.sum(jnp.exp(x @ w), axis=-1, keepdims=True))  # noqa: E731
    program, _ = read(jax.grad(loss), array(LENGTH, WIDTH), array(WIDTH, LENGTH), capability=BLACKWELL)
    assert not any(op.apart for op in program.ops)


# ---- products


@pytest.mark.parametrize("half, copies", [(64, 1), (32, 0)])
def test_scores_of_shared_keys_are_transposed_for_cublas(half, copies):
    def keys(scores, x, y):  # of four heads, over places
        return jnp.einsum("gst,gsd->td", scores, jnp.concatenate([x, y], axis=-1))

    args = array(4, LENGTH, LENGTH), array(4, LENGTH, half), array(4, LENGTH, half)
    _, buffers = read(keys, *args)
    assert len(find(buffers, "transpose", (4, LENGTH, LENGTH))) == copies

    def saved(scores, query):
        return jnp.einsum("gst,gsd->td", scores, query)

    _, buffers = read(saved, args[0], array(4, LENGTH, 2 * half))
    assert not find(buffers, "transpose", (4, LENGTH, LENGTH))


# ---- the order of things


def test_gradients_of_weights_are_computed_before_they_are_summed():
    def loss(w, x):
        def layer(x, w):
            hidden = jnp.tanh(x @ cut(w, None, None))
            return cut(x + jnp.sin(hidden) * hidden, "a", None), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, w)[0])

    w, x = array(3, LENGTH, LENGTH, spec=P(None, "a")), array(4 * LENGTH, LENGTH, spec=P("a"))
    program, buffers = read(lambda w, x: cut(jax.grad(loss)(w, x), None, "a", None), w, x)
    (loop,) = {op.loops[0] for op in program.ops if op.loops and "transpose" in op.loops[0].stack}
    products = [b for b in buffers if b.op.kind == "hard" and b.op.loops == (loop,)]
    of_weights = max(products, key=lambda b: b.begin)
    assert of_weights.op.partial  # over rows, of which each device has a part
    assert all(b.begin < of_weights.begin for b in products if b is not of_weights)


def test_a_fill_is_made_once_for_all_of_its_shape():
    def filled(x, i):
        first = jnp.zeros((LENGTH, LENGTH)).at[i].add(x)
        second = jnp.zeros((LENGTH, LENGTH)).at[i].add(first @ first)
        other = jnp.zeros((LENGTH // 2, 2 * LENGTH)).at[i].add(1.0)
        return second @ second, other

    rows = jax.ShapeDtypeStruct((LENGTH,), jnp.int32)
    _, buffers = read(filled, array(LENGTH, LENGTH), rows)
    same, other = (find(buffers, "broadcast_in_dim", s) for s in ((LENGTH, LENGTH), (LENGTH // 2, 2 * LENGTH)))
    assert len(same) == 2 and same[0].begin == same[1].begin  # of as many bytes, but another shape: by another kernel
    assert len(other) == 1 and other[0].begin > same[0].begin


def test_masks_spread_over_heads_are_cut_as_scores():
    def loop(scores, mask):
        spread = jnp.broadcast_to(mask[None], (8, LENGTH, LENGTH))
        return jax.lax.scan(lambda s, _: (cut(jnp.where(spread, s, 0), "a", None, None), None), scores, length=3)[0]

    mask = jax.ShapeDtypeStruct((LENGTH, LENGTH), jnp.bool_)
    _, buffers = read(loop, array(8, LENGTH, LENGTH, spec=P("a")), mask)
    (spread,) = find(buffers, "broadcast_in_dim", (8, LENGTH, LENGTH))
    assert spread.bytes == 8 * LENGTH * LENGTH // 4


def test_sums_run_beside_products_but_not_inside_loops():
    def sums(x, w, between):
        total = cut(x.T @ x, "a", None)
        return between(w), total

    def loop(w):
        return jax.lax.scan(lambda w, _: (w @ w, None), w, length=3)[0]

    args = array(4 * LENGTH, LENGTH, spec=P("a")), array(LENGTH, LENGTH)
    for between in (loop, lambda w: w @ w):
        program, buffers = read(lambda x, w: sums(x, w, between), *args)  # noqa: B023
        (product,) = [b for b in buffers if b.op.kind == "hard" and b.op.partial]
        later = [op.time for op in program.ops if op.name == "dot_general" and op.time > product.op.time]
        assert (product.end > later[-1]) is (between is loop)


@pytest.mark.parametrize("rows", [True, False])
def test_a_table_that_is_cut_by_rows_is_filled_late(rows):
    spec = P("b") if rows else P(None, "b")

    def gradient(updates, ids, w):
        @jax.shard_map(mesh=MESH, in_specs=(P() if rows else P(None, "b"), P()), out_specs=spec)
        def scatter(updates, ids):
            first = jax.lax.axis_index("b") * (LENGTH // 2) if rows else 0
            return jnp.zeros((LENGTH // 2, WIDTH) if rows else (LENGTH, WIDTH // 2)).at[ids - first].add(updates)

        before = jnp.zeros((LENGTH // 2, WIDTH) if rows else (LENGTH, WIDTH // 2)).at[ids].add(1.0)
        return before @ before.T, w @ w @ w, scatter(updates, ids)

    ids = jax.ShapeDtypeStruct((LENGTH,), jnp.int32)
    program, buffers = read(gradient, array(LENGTH, WIDTH), ids, array(LENGTH, LENGTH))
    last = [op for op in program.ops if op.kind == "in place"][-1]
    assert cut_by_rows(last) is rows
    begins = {id(b.op): b.begin for b in buffers}
    first, second = (begins[id(origin(op.inputs[0]))] for op in program.ops if op.kind == "in place")
    assert (first < second) is rows  # one kernel for both, or a late one for the table


@pytest.mark.parametrize("options", [{}, {"capability": BLACKWELL}, {"spread": True}])
def test_what_is_fetched_for_the_next_step_is_beside_what_is_read(options):
    host, device = jax.memory.Space.Host, jax.memory.Space.Device

    def step(x, w, ids):
        def forward(x, w):
            return jnp.sin(x @ w), jax.device_put(x, host)

        def backward(g, pair):
            x, w = pair
            return (g * jax.device_put(x, device)) @ w @ w, None

        first = jnp.zeros((LENGTH, LENGTH)).at[ids].add(x)
        y, kept = jax.lax.scan(forward, x, w)
        g, _ = jax.lax.scan(backward, y, (kept, w), reverse=True)
        return first, jnp.zeros((LENGTH, LENGTH)).at[ids].add(g)

    ids = jax.ShapeDtypeStruct((LENGTH,), jnp.int32)
    program, buffers = read(step, array(LENGTH, LENGTH), array(4, LENGTH, LENGTH), ids, **options)
    (loop,) = {op.loops[0] for op in program.ops if op.loops and op.loops[0].fetches}
    fetched = [b for b in buffers if b.op.name == "device_put" and b.op.loops == (loop,)]
    assert sorted(b.end == loop.end for b in fetched) == [False, True]
    assert {b.begin for b in fetched} == {loop.begin}
    # The last step is after the loop; what is scattered into then is filled by the kernel that fills the first.
    first, second = find(buffers, "broadcast_in_dim", (LENGTH, LENGTH))
    assert first.begin == second.begin < loop.begin < second.end
