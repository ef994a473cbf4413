"""Device memory read from jaxprs: programs whose buffers can be counted by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from overspill import policies
from overspill.policies.buffers import Buffers
from overspill.policies.calls import prepare
from overspill.policies.lifetimes import Buffer, lifetimes
from overspill.policies.liveness import Footprint, _heap, footprint
from overspill.policies.local_sizes import cuts_of, local_shape, reshape_cuts
from overspill.policies.tpu_orders import expected
from overspill.policies.tpu_schedule import recomputed

N = 256
SQUARE = 4 * N * N  # bytes of a float32 matrix
MESH = AbstractMesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def square(*leading):
    return jax.ShapeDtypeStruct((*leading, N, N), jnp.float32)


def of(function, *args, platform="cuda", shardings=None, donated=()):
    closed = jax.make_jaxpr(function)(*args)
    leaves = jax.tree.leaves(args)
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves] if shardings is None else shardings
    return footprint(closed, shardings, platform=platform, donated=donated)


def test_a_chain_holds_two_products_at_a_time():
    def chain(x, w):
        for _ in range(6):
            x = x @ w
        return x

    found = of(chain, square(), square())
    assert found.arguments == 2 * SQUARE
    assert found.temp == 2 * SQUARE
    assert found.device_bytes == 4 * SQUARE


def test_elementwise_operations_are_one_kernel_and_work_in_place():
    def alone(x):
        return jnp.tanh(jnp.exp(x) * 2 + 1)

    assert of(alone, square()).temp == SQUARE  # the result
    assert of(alone, square(), donated=1).temp == 0  # which takes the argument's place

    def between(x, w):
        return jnp.sin(jnp.tanh(x @ w) + 1) @ w

    # The product and what is made of it share a buffer; the second product is the result.
    assert of(between, square(), square()).temp == 2 * SQUARE


def test_a_row_sum_in_the_kernel_keeps_its_input():
    def softmax(x, w):
        return jax.nn.softmax(x @ w, axis=-1) @ w

    scores_kept = of(softmax, square(), square()).temp
    assert 2 * SQUARE <= scores_kept <= 2 * SQUARE + 4 * N * 8


def test_a_loop_stacks_what_its_backward_loop_reads():
    def loss(w, x):
        def layer(x, w):
            return jnp.sin(x @ w), None

        return jnp.sum(jax.lax.scan(layer, x, w)[0])

    found = of(jax.grad(loss), square(5), square())
    # Kept for the backward loop: the cosines' products and the inputs of products, five of each; and five gradients.
    assert found.arguments == 6 * SQUARE
    assert 15 * SQUARE <= found.temp <= 19 * SQUARE

    recomputed = of(jax.grad(lambda w, x: loss_of_remat(w, x)), square(5), square())
    assert recomputed.temp <= found.temp - 3 * SQUARE


def loss_of_remat(w, x):
    layer = jax.checkpoint(lambda x, w: jnp.sin(x @ w), prevent_cse=False)
    return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0])


def test_what_is_dead_costs_nothing():
    def dead(x, w):
        jnp.sin(x @ w) @ w
        return x @ w

    assert of(dead, square(), square()).temp == SQUARE


def test_values_on_the_host_cost_a_copy_when_they_are_fetched():
    def away(x, w):
        y = jax.device_put(x @ w, jax.memory.Space.Host)
        z = x
        for _ in range(4):
            z = z @ w
        return z @ jax.device_put(y, jax.memory.Space.Device)

    def here(x, w):
        y = x @ w
        z = x
        for _ in range(4):
            z = z @ w
        return z @ jax.lax.optimization_barrier(y)

    assert of(away, square(), square(), platform="tpu").temp <= of(here, square(), square(), platform="tpu").temp
    argument = jax.ShapeDtypeStruct((N, N), jnp.float32)
    shardings = [NamedSharding(MESH, P(), memory_kind="pinned_host"), None]
    assert of(away, argument, square(), shardings=shardings).arguments == SQUARE


def cut(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def test_parts_of_devices_are_what_counts():
    rows = NamedSharding(MESH, P("a"))
    columns = NamedSharding(MESH, P(None, "b"))
    x = jax.ShapeDtypeStruct((N, N), jnp.float32, sharding=rows)
    w = jax.ShapeDtypeStruct((N, N), jnp.float32, sharding=columns)

    found = of(lambda x, w: x @ w, x, w)
    assert found.arguments == SQUARE // 4 + SQUARE // 2
    assert found.temp == SQUARE // 8

    gathered = of(lambda x, w: x @ cut(w, None, None), x, w)
    assert gathered.temp == SQUARE + SQUARE // 4  # all of the weight, and rows of the product
    same = of(lambda x, w: x @ cut(w, None, "b"), x, w)
    assert same.temp == found.temp  # a constraint that changes nothing is no buffer


def test_a_loops_carry_is_cut_as_its_steps_leave_it():
    x = jax.ShapeDtypeStruct((8, N, N), jnp.float32, sharding=NamedSharding(MESH, P(None, "a")))

    def total(x):
        def add(total, x):
            return total + cut(jnp.sin(x), "a", None), None

        return jax.lax.scan(add, jnp.zeros((N, N)), x)[0]

    assert of(total, x).temp == SQUARE // 4


def test_shapes_inside_shard_map_are_local():
    @functools.partial(jax.shard_map, mesh=MESH, in_specs=(P("a"), P()), out_specs=P("a"))
    def local(x, w):
        return x @ w

    x = jax.ShapeDtypeStruct((N, N), jnp.float32, sharding=NamedSharding(MESH, P("a")))
    w = jax.ShapeDtypeStruct((N, N), jnp.float32, sharding=NamedSharding(MESH, P()))
    found = of(lambda x, w: local(x, w) @ w, x, w)
    assert found.arguments == SQUARE + SQUARE // 4
    assert found.temp == 2 * (SQUARE // 4)


def test_the_branch_of_the_platform_is_taken():
    def choose(x, w):
        return jax.lax.platform_dependent(x, w, tpu=lambda x, w: x @ w, default=lambda x, w: (x @ w) @ (w @ w))

    assert of(choose, square(), square(), platform="tpu").temp < of(choose, square(), square()).temp


@pytest.mark.parametrize(
    "old, new, cuts, want",
    [
        ((8, 6), (48,), (4, 1), (4,)),
        ((48,), (8, 6), (4,), (4, 1)),
        ((8, 32), (8, 4, 8), (2, 4), (2, 4, 1)),
        ((8, 4, 8), (8, 32), (2, 4, 1), (2, 4)),
        ((2, 3, 4), (2, 1, 3, 4), (2, 1, 4), (2, 1, 1, 4)),
        ((4, 1, 8), (4, 8), (2, 1, 4), (2, 4)),
    ],
)
def test_reshapes_carry_cuts_over(old, new, cuts, want):
    assert reshape_cuts(old, new, cuts) == want


def test_cuts_follow_dimensions():
    def cuts(function, args, given):
        (eqn,) = jax.make_jaxpr(function)(*args).eqns
        return cuts_of(eqn, given)[0]

    a, b = jnp.zeros((4, 6, 8)), jnp.zeros((4, 8, 10))
    assert cuts(lambda a, b: jax.lax.batch_matmul(a, b), (a, b), [(2, 3, 1), (2, 1, 5)]) == (2, 3, 5)
    assert cuts(lambda a: jnp.transpose(a, (2, 0, 1)), (a,), [(2, 3, 1)]) == (1, 2, 3)
    assert cuts(lambda a: jax.lax.reduce_sum_p.bind(a, axes=(1,), out_sharding=None), (a,), [(2, 3, 4)]) == (2, 4)
    assert local_shape(a, (3, 1, 4)) == (2, 6, 2)  # an uneven part is padded


def test_a_layer_without_a_mesh_is_read_with_its_backward_pass():
    call = prepare(lambda w, x: jnp.tanh(x @ w) @ w, (jnp.zeros((N, N)), jnp.zeros((N, N))), {})
    closed = jax.make_jaxpr(call.function)(call.inputs)
    found = footprint(closed, call.shardings, platform="cuda")
    assert isinstance(found, Footprint)
    assert found.arguments == 3 * SQUARE  # both, and the cotangent
    assert 3 * SQUARE <= found.temp <= 6 * SQUARE  # the result and two gradients at the least
    assert found.timeline and max(size for _, size in found.timeline) <= found.device_bytes


def test_tpus_place_buffers_as_they_begin():
    op = Buffers(jax.make_jaxpr(jnp.sin)(square()), [None], "tpu").ops[0]
    # What is freed first lies below a gap that the last one, which is larger, doesn't fit into.
    buffers = [Buffer(op, size, begin, end) for size, begin, end in ((2, 0, 1), (1, 1, 9), (3, 2, 9))]
    assert _heap(buffers, "tpu") == 6 and _heap(buffers, "cuda") == 4


def test_tpus_place_the_largest_buffers_first_where_room_is_short():
    op = Buffers(jax.make_jaxpr(jnp.sin)(square()), [None], "tpu").ops[0]
    buffers = [Buffer(op, size, begin, end) for size, begin, end in ((2, 0, 1), (1, 1, 9), (3, 2, 9))]
    assert _heap(buffers, "tpu", 6) == 6 and _heap(buffers, "tpu", 5) == 4


def test_tpus_are_expected_to_hold_a_loops_carry_twice_where_it_begins():
    def chain(x, w):
        return jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x @ w, length=4)[0] @ w

    program = Buffers(jax.make_jaxpr(chain)(square(), square()), [None, None], "tpu")
    buffers = lifetimes(program, [])
    alive = max(sum(b.bytes for b in buffers if b.begin <= t <= b.end) for t in range(len(program.ops)))
    assert all(expected(buffers, program.ops, listed) == alive + SQUARE for listed in (False, True))


def test_what_is_gathered_twice_outside_loops_is_there_once():
    def twice(x, w):
        return cut(w, None, None) @ x + cut(w, None, None).T @ x

    w = jax.ShapeDtypeStruct((N, N), jnp.float32, sharding=NamedSharding(MESH, P("a")))
    closed = jax.make_jaxpr(twice)(square(), w)
    gathers = {
        platform: [op for op in Buffers(closed, [None, w.sharding], platform).ops if op.kind == "collective"]
        for platform in ("tpu", "cuda")
    }
    assert len(gathers["tpu"]) == 1 and len(gathers["cuda"]) == 2


def test_tpus_add_a_product_where_it_is_computed():
    def summed(xs, w):
        return jax.lax.scan(lambda total, x: (total + x @ w, None), jnp.zeros((N, N)), xs)[0]

    # The sum, the step's x, and on GPUs the product.
    assert of(summed, square(8), square(), platform="cuda").temp == 3 * SQUARE
    assert of(summed, square(8), square(), platform="tpu").temp == 2 * SQUARE


def test_tpus_fetch_the_next_steps_values_beside_this_steps():
    def away(xs, w):
        def out(x, _):
            y = x @ w
            return y, jax.device_put(y, jax.memory.Space.Host)

        def back(x, kept):
            return (x @ jax.device_put(kept, jax.memory.Space.Device)) @ w, None

        x, kept = jax.lax.scan(out, xs, length=8)
        return jax.lax.scan(back, x, kept)[0]

    program = Buffers(jax.make_jaxpr(away)(square(), square()), [None, None], "tpu")
    fetched = [b for b in lifetimes(program, []) if b.op.kind == "copy"]
    loop = fetched[0].op.inner[0]
    assert [b.bytes for b in fetched] == [SQUARE, SQUARE] and {b.begin for b in fetched} == {loop.begin}
    assert min(b.end for b in fetched) < max(b.end for b in fetched) == loop.end


def test_tpus_compute_again_what_is_needed_last_late():
    def loss(xs, w):
        @jax.checkpoint
        def layer(x, w):
            y = jnp.tanh(x @ w)
            return jnp.tanh(jnp.tanh(y @ w) @ w)

        return jax.lax.scan(lambda x, w: (layer(x, w), None), xs, w)[0].sum()

    closed = jax.make_jaxpr(jax.grad(loss, argnums=1))(square(), square(4))
    program = Buffers(closed, [None, None], "tpu")
    again = [b for b in lifetimes(program, []) if recomputed(b.op) and b.op.kind == "hard"]
    assert all(b.begin >= b.op.time for b in again) and any(b.begin > b.op.time for b in again)


def test_buffers_never_end_before_they_begin():
    def loss(w, x):
        return loss_of_remat(w, x) ** 2

    closed = jax.make_jaxpr(jax.grad(loss))(square(3), square())
    program = Buffers(closed, [None, None], "cuda")
    found = lifetimes(program, [])
    assert found and all(0 <= buffer.begin <= buffer.end for buffer in found)


def two_loops(body):
    def loss(w, x):
        return jnp.sum(jax.lax.scan(body, jax.lax.scan(body, x, w[:3])[0], w[3:])[0])

    closed = jax.make_jaxpr(jax.grad(loss))(square(6), square())

    def read(platform):
        program = Buffers(closed, [None, None], platform)
        return program, lifetimes(program, [])

    return read


def test_equal_stacks_of_all_loops_are_filled_at_once():
    read = two_loops(lambda x, w: (jnp.sin(x @ w), None))

    def begins(platform):
        _, found = read(platform)
        gradients = [b for b in found if b.op.kind == "stack" and "transpose(" in b.op.stack]
        assert [b.bytes for b in gradients] == [3 * SQUARE] * 2
        return {b.begin for b in gradients}

    assert len(begins("cuda")) == 1
    assert len(begins("tpu")) == 2


def test_what_a_loops_last_step_moves_waits_for_the_loop_that_fetches_it():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["y"], offload_src="device", offload_dst="pinned_host"
    )

    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def layer(x, w):
        return jnp.sin(checkpoint_name(x @ w, "y")), None

    program, found = two_loops(layer)("cuda")
    loops = {op.loop.begin: op.loop for op in program.ops if op.loop is not None}
    first, second, _, last = (loops[begin] for begin in sorted(loops))
    assert first.first and second.first and last.fetches and not first.fetches
    (moved,) = [b for b in found if b.op.name == "dot_general" and b.begin == first.begin]
    assert moved.end == last.begin  # all through the other loops' passes


def test_loops_that_read_the_same_fill_share_it():
    def run(x, *weights):
        for w in weights:
            c = jnp.full((N, N), 2.0)
            x = jax.lax.scan(lambda x, w, c=c: (jnp.sin(x @ w) @ c, None), x, w)[0]
        return x

    program = Buffers(jax.make_jaxpr(run)(square(), square(3), square(3)), [None] * 3, "cuda")
    (fill,) = [b for b in lifetimes(program, []) if b.op.name == "broadcast_in_dim"]
    ends = [op.loop.end for op in program.ops if op.loop is not None]
    assert fill.bytes == SQUARE and fill.end == max(ends)


def test_gradients_that_nothing_waits_for_come_after_a_loop_over_layers():
    def step(ws, a, x):
        gradient = jax.lax.fori_loop(0, 3, lambda i, total: total + a @ a, jnp.zeros((N, N)))
        with jax.named_scope("transpose(stack)"):
            y, stacked = jax.lax.scan(lambda y, w: (y @ w, y @ w), x, ws)
        return 2 * gradient, stacked, y @ a

    def ends(platform):
        program = Buffers(jax.make_jaxpr(step)(square(3), square(), square()), [None] * 3, platform)
        assert [op.time for op in program.ops] == list(range(len(program.ops)))
        (of_layers,) = {op.loop.end for op in program.ops if op.kind == "stack"}
        (of_gradient,) = {op.loop.end for op in program.ops if op.kind == "carry" and op.loop.end != of_layers}
        return of_layers, of_gradient

    of_layers, of_gradient = ends("cuda")
    assert of_layers < of_gradient
    of_layers, of_gradient = ends("tpu")
    assert of_gradient < of_layers


def test_a_chain_needs_what_the_compiler_says(gpu):
    def both(x, w):
        return jnp.sin(jnp.tanh(x @ w) + 1) @ w

    args = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 2
    call = prepare(both, tuple(args), {})
    closed = jax.make_jaxpr(call.function)(call.inputs)
    compiled = policies.compile_ahead(both, *args, target=gpu)
    assert footprint(closed, call.shardings, platform="cuda").device_bytes == pytest.approx(
        compiled.device_bytes, rel=0.15
    )
