import functools
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from overspill import policies, zoo
from overspill.layers.attention import dot_product_attention
from overspill.layers.linear import Linear
from overspill.layers.moe import MoE
from overspill.layers.router import SigmoidRouter
from overspill.policies import axes
from overspill.policies.costs import Cost, cost_of, expert_fill, gathered_bytes, summed_bytes, total
from overspill.policies.cuts import Partition
from overspill.policies.jaxprs import Program, Value, subjaxprs
from overspill.zoo.config import LlamaConfig
from overspill.zoo.moe_config import DeepSeekConfig, MoEConfig

BATCH, LENGTH = 2, 70
TOKENS = BATCH * LENGTH
# No two sizes alike, so that no product can stand for another.
LLAMA = LlamaConfig(
    vocab_size=61, hidden_size=24, intermediate_size=38, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, head_dim=10, rope_theta=300.0, max_position_embeddings=128,
)  # fmt: skip
EXPERTS = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 38, "moe_intermediate_size": 14, "n_routed_experts": 16,
    "num_experts_per_tok": 3, "n_shared_experts": 2, "first_k_dense_replace": 1, "num_hidden_layers": 3,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "max_position_embeddings": 128,
}  # fmt: skip
DEEPSEEK = DeepSeekConfig(
    **EXPERTS, num_attention_heads=5, q_lora_rank=11, kv_lora_rank=9, qk_nope_head_dim=7, qk_rope_head_dim=8,
    v_head_dim=13, n_group=4, topk_group=2, rope_theta=300.0,
)  # fmt: skip
GLM = MoEConfig(**EXPERTS, num_attention_heads=6, num_key_value_heads=2, head_dim=10, attention_bias=True)
PLATFORMS = ("cuda", "rocm", "tpu", "cpu")


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def traced(function, *args):
    return jax.make_jaxpr(function)(*args)


def cost(function, *args, devices=1, **options):
    return total(traced(function, *args), devices, **options)


def logits_of(config, **options):
    """A function of abstract arrays that gives a model's logits, and the arrays."""
    model = zoo.abstract(config, **options)
    arrays, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)

    def logits(arrays, tokens):
        out = eqx.combine(arrays, static)(tokens, checkpoint=policies.checkpoint if "placements" in options else None)
        return out[0] if isinstance(out, tuple) else out

    return logits, arrays, tokens


def both_passes(function):
    """The gradients of all floating arguments, and all that they take."""

    def run(arrays, tokens):
        out, pull = jax.vjp(lambda a: function(a, tokens), arrays)
        return out, pull(jnp.ones_like(out))

    return run


def products(config):
    """FLOPs of a forward pass by formula: of products, attention, and routed experts."""
    c, d, layers = config, config.hidden_size, config.num_hidden_layers
    heads = c.num_attention_heads
    if isinstance(c, DeepSeekConfig):
        wide = c.qk_nope_head_dim + c.qk_rope_head_dim
        query = c.q_lora_rank * (d + heads * wide)
        latent = d * (c.kv_lora_rank + c.qk_rope_head_dim) + c.kv_lora_rank * heads * (
            c.qk_nope_head_dim + c.v_head_dim
        )
        projections = query + latent + heads * c.v_head_dim * d
        scores = 2 * BATCH * heads * LENGTH * LENGTH * (wide + c.v_head_dim)
    else:
        projections = 2 * d * c.head_dim * (heads + c.num_key_value_heads)
        scores = 4 * BATCH * heads * LENGTH * LENGTH * c.head_dim
    experts = getattr(c, "n_routed_experts", 0)
    dense = c.first_k_dense_replace if experts else layers
    active = layers * projections + dense * 3 * d * c.intermediate_size + d * c.vocab_size
    routed = 0
    if experts:
        active += (layers - dense) * (d * experts + 3 * d * c.moe_intermediate_size * c.n_shared_experts)
        routed = (layers - dense) * 2 * TOKENS * c.num_experts_per_tok * 3 * d * c.moe_intermediate_size
    return 2 * TOKENS * active, layers * scores, routed


class TestModels:
    @pytest.mark.parametrize("config", [LLAMA, GLM, DEEPSEEK], ids=["llama", "glm", "deepseek"])
    @pytest.mark.parametrize("scan", [True, False])
    def test_forward_and_backward_are_the_formulas(self, config, scan):
        logits, *args = logits_of(config, scan=scan)
        forward, both = traced(logits, *args), traced(both_passes(logits), *args)
        wanted = products(config)
        for platform in PLATFORMS:
            there, back = total(forward, platform=platform), total(both, platform=platform)
            assert (there.matmul, there.attention, there.grouped) == wanted
            # The gradient of each operand is a product of the same size.
            assert (back.matmul, back.attention, back.grouped) == tuple(3 * flops for flops in wanted)
            assert not there.uncertain and not back.uncertain and there.received == 0
        assert expert_fill(both) == {}

    def test_products_of_parameters_are_two_flops_a_token(self):
        model = zoo.abstract(LLAMA)
        # Two norms for each layer and a last one, and the embedding, which is looked up.
        rest = LLAMA.hidden_size * (2 * LLAMA.num_hidden_layers + 1 + LLAMA.vocab_size)
        assert products(LLAMA)[0] == 2 * TOKENS * (zoo.parameters(model).total - rest)
        routed = DEEPSEEK.hidden_size * (2 * DEEPSEEK.num_hidden_layers + 1 + DEEPSEEK.vocab_size)
        routed += DEEPSEEK.num_hidden_layers * (DEEPSEEK.q_lora_rank + DEEPSEEK.kv_lora_rank)  # norms of latents
        routed += 2 * DEEPSEEK.n_routed_experts  # biases of the two routers
        matmul, _, grouped = products(DEEPSEEK)
        assert matmul + grouped == 2 * TOKENS * (zoo.parameters(zoo.abstract(DEEPSEEK)).active - routed)

    def test_recomputed_blocks_are_there_again(self):
        logits, *args = logits_of(DEEPSEEK, placements="recompute_all")
        matmul, attention, grouped = products(DEEPSEEK)
        back = cost(both_passes(logits), *args)
        head = 2 * TOKENS * DEEPSEEK.hidden_size * DEEPSEEK.vocab_size
        # All but the last product of each half of a block; the head is outside.
        assert 3.5 * (matmul - head) < back.matmul - 3 * head < 4 * (matmul - head)
        assert back.attention == 4 * attention
        assert 3 * grouped < back.grouped <= 4 * grouped

    def test_scopes(self):
        logits, *args = logits_of(DEEPSEEK)
        closed = traced(logits, *args)
        whole, experts, attention = (total(closed, scope=scope) for scope in ("", "experts", "mla"))
        assert experts.grouped == whole.grouped > 0 and experts.matmul == 0
        assert attention.attention == whole.attention and 0 < attention.matmul < whole.matmul
        assert total(closed, scope="no such scope") == Cost()


def xla_flops(function, *args):
    found = jax.jit(function).lower(*args).compile().cost_analysis()
    return (found[0] if isinstance(found, list) else found)["flops"]


class TestAgainstXLA:
    def test_a_gated_mlp_with_its_gradients(self):
        def loss(weights, x):
            gate, up, down = weights
            return jnp.sum((jax.nn.silu(x @ gate) * (x @ up)) @ down)

        args = (floats(70, 96), floats(70, 96), floats(96, 70)), floats(130, 70)
        function = jax.value_and_grad(loss, (0, 1))
        assert cost(function, *args).flops == pytest.approx(xla_flops(function, *args), rel=0.02)

    def test_attention(self):
        def attend(q, k, v):
            return dot_product_attention(q, k, v, jnp.tril(jnp.ones((1, 70, 70), bool)), 0.3)

        args = floats(2, 70, 6, 48), floats(2, 70, 2, 48), floats(2, 70, 2, 48)
        assert cost(attend, *args).flops == pytest.approx(xla_flops(attend, *args), rel=0.05)

    def test_a_whole_model_without_loops(self):
        logits, *args = logits_of(LLAMA, scan=False)
        assert cost(logits, *args).flops == pytest.approx(xla_flops(logits, *args), rel=0.1)
        # Elementwise work is a tenth of it at this size, and is counted too.
        assert cost(logits, *args).elementwise > 0.05 * cost(logits, *args).flops

    def test_elementwise_and_reductions(self):
        def function(x, y):
            return jnp.sum(x * y + x, axis=1)

        args = floats(70, 31), floats(70, 31)
        assert cost(function, *args).elementwise == 3 * 70 * 31
        assert cost(function, *args).flops == pytest.approx(xla_flops(function, *args), rel=0.02)

    def test_loops_are_counted_once_by_xla(self):
        def step(x, w):
            return jnp.tanh(x @ w), None

        def looped(x, ws):
            return lax.scan(step, x, ws)[0]

        x, ws = floats(65, 33), floats(7, 33, 33)
        once = xla_flops(lambda x, w: step(x, w)[0], x, floats(33, 33))
        assert cost(looped, x, ws).matmul == 7 * 2 * 65 * 33 * 33
        assert cost(looped, x, ws).flops == pytest.approx(7 * (once + 65 * 33), rel=0.05)


class TestEquations:
    def test_batched_products_and_convolutions(self):
        batched = cost(lambda a, b: jnp.einsum("bij,bjk->bki", a, b), floats(3, 5, 7), floats(3, 7, 11))
        assert batched.matmul == 2 * 3 * 5 * 7 * 11
        image, kernel = floats(2, 8, 70), floats(6, 4, 3)
        convolved = cost(
            lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", feature_group_count=2), image, kernel
        )
        assert convolved.matmul == 2 * (2 * 6 * 70) * 4 * 3

    @pytest.mark.parametrize("count", [70, 3])
    def test_grouped_products_in_both_directions(self, count):
        def function(x, w, sizes):
            return jnp.sum(lax.ragged_dot(x, w, sizes))

        args = floats(count, 5), floats(4, 5, 9), jax.ShapeDtypeStruct((4,), jnp.int32)
        assert cost(function, *args).grouped == 2 * count * 5 * 9
        both = cost(jax.value_and_grad(function, (0, 1)), *args)
        assert both.grouped == 3 * 2 * count * 5 * 9 and both.matmul == 0
        assert cost(function, *args, fill={count: 0.25}).grouped == 2 * count * 5 * 9 / 4
        assert cost(function, *args, fill={count + 1: 0.25}).grouped == 2 * count * 5 * 9
        assert cost(function, *args, fill={count: 0.25}).bytes == cost(function, *args).bytes

    def test_attention_is_what_the_scope_holds(self):
        scoped = jax.named_scope("dot_product_attention")(lambda a, b: jax.jit(jnp.matmul)(a, b))
        found = cost(lambda a, b: scoped(a, b) @ b, floats(7, 7), floats(7, 7))
        assert (found.attention, found.matmul) == (2 * 7**3, 2 * 7**3)
        (eqn,) = traced(jnp.matmul, floats(7, 7), floats(7, 7)).jaxpr.eqns
        assert cost_of(eqn, within="block/dot_product_attention").attention == 2 * 7**3
        assert cost_of(eqn, within="block").attention == 0

    def test_reductions_sorts_and_layouts(self):
        x = floats(16, 33)
        assert cost(lambda x: jnp.max(x, axis=0), x).elementwise == 16 * 33
        assert cost(lambda x: lax.sort(x, dimension=0), x).elementwise == 16 * 33 * 4
        assert cost(jnp.exp, x).elementwise == 16 * 33
        for layout in (jnp.transpose, lambda x: x[3:7], lambda x: jnp.broadcast_to(x, (2, 16, 33))):
            assert cost(layout, x).flops == 0 < cost(layout, x).bytes
        for same in (lambda x: x.reshape(-1), lax.stop_gradient, lambda x: policies.Activation("x")(x)):
            assert cost(same, x).flops == cost(same, x).bytes == 0

    def test_bytes_are_inputs_and_outputs(self):
        x, y = floats(16, 33), jax.ShapeDtypeStruct((16, 33), jnp.bfloat16)
        one = 16 * 33 * 4
        assert cost(lambda x: x * x * 2.0, x) == Cost(
            elementwise=2 * 16 * 33, read_bytes=2 * one, written_bytes=2 * one
        )
        widened = cost(lambda y: y.astype(jnp.float32), y)
        assert (widened.read_bytes, widened.written_bytes) == (one / 2, one)
        assert widened.bytes == 1.5 * one
        assert cost(lambda x: x[0, 0], x).written_bytes == 4  # a slice of one element, before it is a scalar

    def test_only_what_is_touched_of_a_large_array(self):
        stack, row, at = floats(100, 33), floats(1, 33), jax.ShapeDtypeStruct((), jnp.int32)
        one = 33 * 4
        read = cost(lambda s, i: lax.dynamic_index_in_dim(s, i, keepdims=True), stack, at)
        written = cost(lambda s, r: lax.dynamic_update_slice(s, r, (3, 0)), stack, row)
        added = cost(lambda s, r: s.at[jnp.array([3])].add(r), stack, row)
        assert (read.read_bytes, read.written_bytes) == (one, one)
        assert (written.read_bytes, written.written_bytes) == (one, one)
        # The index is a constant array of its own.
        assert one * 2 <= added.read_bytes <= one * 2 + 64 and added.elementwise <= 33 + 8

    def test_host_memory_is_not_device_memory(self):
        x, one = floats(16, 33), 16 * 33 * 4
        away = cost(lambda x: jax.device_put(x, jax.memory.Space.Host), x)
        assert (away.read_bytes, away.written_bytes) == (one, 0)
        there_and_back = cost(
            lambda x: jax.device_put(jax.device_put(x, jax.memory.Space.Host), jax.memory.Space.Device), x
        )
        assert (there_and_back.read_bytes, there_and_back.written_bytes) == (one, one)

    def test_a_kernel_is_its_grid_or_its_own_estimate(self):
        def kernel(x, y, out):
            out[...] = x[...] @ y[...]

        def function(estimate, x, y):
            block, whole = pl.BlockSpec((8, 16), lambda i: (i, 0)), pl.BlockSpec((16, 16), lambda i: (0, 0))
            out = jax.ShapeDtypeStruct((32, 16), jnp.float32)
            call = pl.pallas_call(
                kernel, out, grid=(4,), in_specs=[block, whole], out_specs=block, cost_estimate=estimate
            )
            return call(x, y)

        args = floats(32, 16), floats(16, 16)
        found = cost(functools.partial(function, None), *args)
        assert found == Cost(matmul=2 * 32 * 16 * 16, read_bytes=4 * (32 + 16) * 16, written_bytes=4 * 32 * 16)
        estimate = pl.CostEstimate(flops=1000, transcendentals=0, bytes_accessed=0)
        assert cost(functools.partial(function, estimate), *args).flops == 1000

    def test_costs_add_and_multiply(self):
        a, b = Cost(matmul=1, gathered=3, uncertain=True), Cost(matmul=2, elementwise=5, read_bytes=7)
        both = 2 * (a + b)
        assert both == Cost(matmul=6, gathered=6, elementwise=10, read_bytes=14, uncertain=True)
        assert (both.flops, both.bytes, both.received) == (16, 14, 6)
        assert sum([a, b], Cost()) == a + b and not b.uncertain


class TestControl:
    W, X = floats(9, 9), floats(70, 9)
    ONCE = 2 * 70 * 9 * 9

    def test_calls_are_what_they_call(self):
        @jax.custom_vjp
        def f(x, w):
            return x @ w

        f.defvjp(lambda x, w: (f(x, w), (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
        g = jax.custom_jvp(lambda x, w: x @ w)
        g.defjvp(lambda primals, tangents: (g(*primals), tangents[0] @ primals[1]))
        for call in (jax.jit(f), f, jax.checkpoint(f), g, jax.jit(jax.jit(g))):
            assert cost(call, self.X, self.W).matmul == self.ONCE
        assert cost(jax.grad(lambda x, w: jnp.sum(f(x, w)), (0, 1)), self.X, self.W).matmul == 3 * self.ONCE

    def test_remat_computes_again_what_it_needs(self):
        function = jax.checkpoint(lambda x, w: jnp.sum(jnp.sin(x @ w) @ w))
        found = cost(jax.value_and_grad(function, (0, 1)), self.X, self.W)
        assert found.matmul == (2 + 4 + 1) * self.ONCE

    def test_scans_within_scans(self):
        def function(x, w):
            inner = lambda x, _: (lax.scan(lambda x, _: (x @ w, None), x, None, length=3)[0], None)
            return lax.scan(inner, x, None, length=5)[0]

        assert cost(function, self.X, self.W).matmul == 15 * self.ONCE

    def test_loops_between_literals_run_that_often(self):
        def counted(start, stop):
            # Bounds of a dtype of their own make it a `while`, not a scan.
            start, stop = (np.int32(n) for n in (start, stop))
            return lambda x, w: lax.while_loop(
                lambda s: s[0] < stop, lambda s: (s[0] + 1, s[1] @ w), (jnp.int32(start), x)
            )[1]

        for start, stop in ((0, 6), (2, 5), (5, 2)):
            found = cost(counted(start, stop), self.X, self.W)
            assert found.matmul == max(0, stop - start) * self.ONCE and not found.uncertain
        strided = lambda x, w: lax.while_loop(lambda s: s[0] < 7, lambda s: (s[0] + 3, s[1] @ w), (0, x))[1]
        assert cost(strided, self.X, self.W).matmul == 3 * self.ONCE
        carried = lambda x, w: lax.fori_loop(jnp.int32(2), jnp.int32(6), lambda i, x: x @ w, x)
        assert cost(carried, self.X, self.W).matmul == 4 * self.ONCE
        assert not cost(carried, self.X, self.W).uncertain

    def test_other_loops_count_once_and_say_so(self):
        n = jax.ShapeDtypeStruct((), jnp.int32)
        closing = lambda x, w: lax.while_loop(
            lambda s: s[0] < s[1], lambda s: (s[0] + 1, s[1] - 1, s[2] @ w), (0, 9, x)
        )[2]
        loops = (
            lambda x, w, n: lax.fori_loop(0, n, lambda i, x: x @ w, x),
            lambda x, w, n: lax.while_loop(lambda s: s[0] < 9, lambda s: (s[0] + n, s[1] @ w), (0, x))[1],
            lambda x, w, n: lax.while_loop(lambda s: s[0] < 9, lambda s: (s[0] * 2, s[1] @ w), (1, x))[1],
            lambda x, w, n: closing(x, w),
            lambda x, w, n: lax.while_loop(lambda x: jnp.sum(x) > 0, lambda x: x @ w, x),
        )
        for loop in loops:
            found = cost(loop, self.X, self.W, n)
            assert found.matmul == self.ONCE and found.uncertain
            assert cost(lambda *args, loop=loop: loop(*args) @ args[1], self.X, self.W, n).uncertain

    def test_a_choice_costs_its_dearest_branch(self):
        def function(x, w, p):
            return lax.cond(p, lambda: x @ w @ w, lambda: jnp.sin(x))

        found = cost(function, self.X, self.W, jax.ShapeDtypeStruct((), jnp.bool_))
        assert found.matmul == 2 * self.ONCE and found.elementwise <= 1  # the index

    def test_branches_for_platforms(self):
        def function(x, w):
            own = {"cpu": lambda x, w: x @ w, "cuda": lambda x, w: x @ w @ w}
            return lax.platform_dependent(x, w, **own, default=lambda x, w: x @ w @ w @ w)

        counts = {platform: cost(jax.jit(function), self.X, self.W, platform=platform).matmul for platform in PLATFORMS}
        assert counts == {"cpu": self.ONCE, "cuda": 2 * self.ONCE, "tpu": 3 * self.ONCE, "rocm": 3 * self.ONCE}
        only = lambda x: lax.platform_dependent(x, cpu=jnp.sin, cuda=jnp.cos)
        with pytest.raises(ValueError, match="branches for cpu, cuda, none for tpu"):
            cost(only, self.X, platform="tpu")


MESH = AbstractMesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
INPUT = floats(32, 8)  # 8 rows, or 256 bytes, on each device along `a`
PART = 8 * 8 * 4


def mapped(function, out=P("a"), axis_names=("a", "b"), mesh=MESH, check=False):
    return jax.shard_map(
        function, mesh=mesh, in_specs=P("a"), out_specs=out, axis_names=set(axis_names), check_vma=check
    )


class TestDevices:
    def test_work_is_shared_but_in_a_map_it_is_one_devices(self):
        x, w = floats(32, 8), floats(8, 8)
        flops = 2 * 32 * 8 * 8
        assert cost(lambda x, w: x @ w, x, w, devices=8) == cost(lambda x, w: x @ w, x, w) * (1 / 8)
        for check in (False, True):
            local = mapped(lambda x: x @ jnp.ones((8, 8)), check=check)
            assert cost(local, x, devices=8).matmul == cost(local, x).matmul == flops / 4
        auto = mapped(lambda x: x @ jnp.ones((8, 8)), axis_names=("a",))
        assert cost(auto, x, devices=8).matmul == flops / 8
        assert cost(auto, x, devices=1).matmul == flops / 4

    def test_all_of_a_map_is_one_devices(self):
        # On some versions of JAX the types of constants in what this calls say nothing of the map.
        local = mapped(lambda x: jnp.searchsorted(x[:, 0], x[:, 1]))
        assert cost(local, INPUT, devices=8) == cost(local, INPUT)

    def test_what_is_in_a_map_knows_it(self):
        def body(x):
            return lax.scan(lambda x, _: (jnp.sin(x @ jnp.ones((8, 8))), None), x, None, length=3)[0]

        (eqn,) = traced(mapped(body), INPUT).jaxpr.eqns
        (inner,) = subjaxprs(eqn)
        one = sum((cost_of(e, 8) for e in inner.eqns), Cost())
        assert one.matmul == 3 * 2 * 8 * 8 * 8 == cost_of(eqn, 8).matmul

    def test_values_of_a_program_have_what_it_takes(self):
        @functools.partial(mapped, out=P())
        def summed(x):
            return lax.psum(policies.Activation("product")(x @ jnp.ones((8, 8))), "a")

        program = Program(traced(jax.value_and_grad(lambda x: jnp.sum(summed(x) ** 2)), INPUT), ["x"])
        (value,) = program.named
        assert cost_of(value.source.eqn, 8).matmul == 2 * 8 * 8 * 8
        doubled = next(v for v in program.kept if v.primitive == "mul")
        total_of_devices = doubled.inputs[1].body
        assert cost_of(total_of_devices.eqn, 8).reduced == pytest.approx(2 * 3 / 4 * PART)

    @pytest.mark.parametrize("check", [False, True])
    def test_collectives_are_rings(self, check):
        cases = {
            "psum": (lambda x: lax.psum(x, "a"), P(), "reduced", 2 * 3 / 4 * PART),
            "pmean": (lambda x: lax.pmean(x, "a"), P(), "reduced", 2 * 3 / 4 * PART),
            "pmax": (lambda x: lax.pmax(x, "a"), P(), "reduced", 2 * 3 / 4 * PART),
            "scatter": (lambda x: lax.psum_scatter(x, "a", tiled=True), P("a"), "reduced", 3 / 4 * PART),
            "gather": (lambda x: lax.all_gather(x, "a"), P("a"), "gathered", 3 * PART),
            "tiled gather": (lambda x: lax.all_gather(x, "a", tiled=True), P("a"), "gathered", 3 * PART),
            "all-to-all": (lambda x: lax.all_to_all(x, "a", 0, 0, tiled=True), P("a"), "exchanged", 3 / 4 * PART),
            "permute": (lambda x: lax.ppermute(x, "a", [(0, 1), (1, 0)]), P("a"), "exchanged", PART),
        }
        for name, (function, out, kind, wanted) in cases.items():
            found = cost(mapped(function, out, check=check), INPUT, devices=8)
            assert getattr(found, kind) == pytest.approx(wanted), name
            assert found.received == getattr(found, kind), name

    def test_collectives_over_several_axes_groups_and_none(self):
        both = cost(mapped(lambda x: lax.psum(x, ("a", "b")), P()), INPUT)
        assert both.reduced == pytest.approx(2 * 7 / 8 * PART)
        alone = AbstractMesh((1,), ("a",), axis_types=(AxisType.Auto,))
        assert cost(mapped(lambda x: lax.psum(x, "a"), P(), ("a",), alone), INPUT).received == 0
        grouped = mapped(lambda x: lax.all_gather(x, "a", axis_index_groups=[[0, 1], [2, 3]], tiled=True))
        assert cost(grouped, INPUT).gathered == PART
        pairs = mapped(lambda x: lax.psum(x, "a", axis_index_groups=[[0, 1], [2, 3]]))
        assert cost(pairs, INPUT).reduced == PART
        # Half of what the compiler still cuts over the other axis.
        auto = cost(mapped(lambda x: lax.psum(x, "a"), P(), ("a",)), INPUT, devices=8)
        assert auto.reduced == pytest.approx(3 / 4 * PART)
        bare = jax.make_jaxpr(lambda x: lax.psum(x, "i"), axis_env=[("i", 4)])(floats(3))
        with pytest.raises(ValueError, match="psum over axis 'i'"):
            total(bare)
        # Where types don't say it, the map around them does.
        params = {"jaxpr": bare.jaxpr, "mesh": AbstractMesh((4,), ("i",)), "newly_manual_axes": frozenset("i")}
        around = SimpleNamespace(
            primitive=SimpleNamespace(name="shard_map"), params=params, invars=[], outvars=[],
            source_info=bare.jaxpr.eqns[0].source_info,
        )  # fmt: skip
        assert cost_of(around).reduced == pytest.approx(2 * 3 / 4 * 3 * 4)

    def test_exchanges_of_rows_move_what_is_sent(self):
        def ragged(x, room):
            sizes = jnp.full(4, 2, jnp.int32)
            return lax.ragged_all_to_all(x, jnp.zeros((room, 8)), sizes, sizes, sizes, sizes, axis_name="a")

        there = traced(mapped(lambda x: ragged(x, 20)), INPUT)
        assert total(there).exchanged == pytest.approx(3 / 4 * PART)
        assert expert_fill(there) == expert_fill(there.jaxpr) == {20: 8 / 20}
        back = traced(mapped(lambda x: ragged(x, 5)), INPUT)
        assert total(back).exchanged == pytest.approx(3 / 4 * 5 * 8 * 4)
        assert expert_fill(back) == {}


def moe(hidden=24, size=14, experts=16, top_k=3):
    def make(key):
        router = SigmoidRouter(hidden, num_experts=experts, top_k=top_k, groups=2, top_groups=2, key=key)
        return MoE(hidden, router=router, num_experts=experts, expert_size=size, key=key)

    return eqx.filter_eval_shape(make, jax.random.key(0))


def over(layout, function):
    def run(*args):
        with axes.use(layout):
            return function(*args)

    return run


class TestExpertsOverAMesh:
    def test_rows_in_use_are_what_tokens_send(self):
        mesh = AbstractMesh((4, 2), ("expert", "tensor"), axis_types=(AxisType.Auto,) * 2)
        arrays, static = eqx.partition(moe(), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
        x = floats(8, LENGTH, 24)
        tokens, rows = 2 * LENGTH, 4 * 2 * LENGTH * 3  # of one device, and the most that can come to it

        def loss(arrays, x):
            return jnp.sum(eqx.combine(arrays, static)(x)[0])

        layout = zoo.layout(mesh)
        closed = traced(over(layout, jax.value_and_grad(loss, (0, 1))), arrays, x)
        fill = expert_fill(closed)
        assert fill == {rows: 1 / 4}
        # Each device has its tokens' share of the rows, and half of each expert's hidden features.
        wanted = 3 * 2 * tokens * 3 * 3 * 24 * 7
        for platform in PLATFORMS:
            found = total(closed, 8, platform=platform, fill=fill)
            assert found.grouped == wanted
            assert total(closed, 8, platform=platform).grouped == 4 * wanted
            assert not found.uncertain
        # Rows go there and back in each pass, and a few numbers with them.
        there = 3 / 4 * tokens * 3 * 24 * 4
        gpu, cpu = (total(closed, 8, platform=platform, fill=fill).exchanged for platform in ("cuda", "cpu"))
        assert 4 * there <= gpu <= 4.2 * there
        assert cpu > 3.9 * gpu  # padded

    def test_without_a_mesh_every_row_is_in_use(self):
        arrays, static = eqx.partition(moe(), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
        closed = traced(lambda arrays, x: eqx.combine(arrays, static)(x)[0], arrays, floats(2, LENGTH, 24))
        assert expert_fill(closed) == {}
        assert total(closed).grouped == 2 * TOKENS * 3 * 3 * 24 * 14


def values_of(closed, shardings):
    """Every value of a jaxpr without inner ones, calls read as if they were inlined."""
    found = []

    def run(jaxpr, inputs):
        env = dict(zip(jaxpr.invars, inputs, strict=True))
        read = lambda atom: Value(atom.aval, constant=True) if hasattr(atom, "val") else env[atom]
        for eqn in jaxpr.eqns:
            values, subs = tuple(map(read, eqn.invars)), list(subjaxprs(eqn))
            if subs and eqn.primitive.name != "shard_map" and len(subs[0].invars) == len(values):
                outs = run(subs[0], values)
            else:
                outs = [Value(v.aval, eqn, values) for v in eqn.outvars]
                found.extend(outs)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    pairs = zip(closed.jaxpr.invars, shardings, strict=True)
    run(closed.jaxpr, [Value(v.aval, placed=NamedSharding(MESH, s)) for v, s in pairs])
    return found


class TestWhatTheCompilerPutsIn:
    def test_a_constraint_gathers_what_is_missing(self):
        def gathered(stored, wanted):
            pin = lambda x, spec: lax.with_sharding_constraint(x, NamedSharding(MESH, spec))
            closed = traced(lambda x: pin(pin(x, stored), wanted), INPUT)
            first, second = values_of(closed, [stored])
            partition = Partition()
            assert gathered_bytes(first, partition) == 0
            return gathered_bytes(second, partition)

        size = 32 * 8 * 4
        assert gathered(P("a"), P()) == size * 3 / 4
        assert gathered(P(("a", "b")), P("b")) == size / 2 * 3 / 4
        assert gathered(P("a", "b"), P(None, "b")) == size / 2 * 3 / 4
        assert gathered(P(), P("a")) == gathered(P("a"), P("a")) == gathered(P("a"), P("a", "b")) == 0
        assert gathered(P("a"), P(None, "a")) == size / 4 * 3 / 4  # what it has not yet of its columns

    def test_a_linear_layer_stored_in_parts(self):
        layout = zoo.layout(MESH, {"batch": "a", "embed": "a", "mlp": "b"})
        make = lambda key: Linear(24, 16, axes="mlp embed", key=key)
        arrays, static = eqx.partition(
            eqx.filter_eval_shape(make, jax.random.key(0)), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
        )

        def gradient(arrays, x):
            return jax.grad(lambda a: jnp.sum(eqx.combine(a, static)(x) ** 2))(arrays)

        closed = traced(over(layout, gradient), arrays, floats(32, 10, 24))
        values, partition = values_of(closed, [P("b", "a"), P("a")]), Partition()
        gathered = [gathered_bytes(v, partition) for v in values]
        assert [g for g in gathered if g] == [16 * 24 * 4 / 2 * 3 / 4]
        # The gradient contracts the tokens, which are cut in four.
        (product,) = [v for v in values if v.primitive == "dot_general" and set(v.shape) == {16, 24}]
        local = partition.bytes(product)
        assert summed_bytes(product, partition) == pytest.approx(2 * 3 / 4 * local)
        assert summed_bytes(product, partition, scattered=True) == pytest.approx(3 / 4 * local)

    def test_products_over_cut_features_are_summed(self):
        closed = traced(lambda x, w: jnp.sum(x @ w, axis=0), floats(32, 8), floats(8, 6))
        product, summed = values_of(closed, [P("b", "a"), P()])
        partition = Partition()
        assert summed_bytes(product, partition) == pytest.approx(2 * 3 / 4 * 16 * 6 * 4)
        assert summed_bytes(summed, partition) == pytest.approx(2 * 1 / 2 * partition.bytes(summed))
        whole = values_of(closed, [P("b"), P()])
        assert summed_bytes(whole[0], Partition()) == 0

    def test_a_map_gathers_its_arguments_and_sums_by_itself(self):
        def function(x, w):
            body = lambda x, w: lax.psum(x.T @ x, ("a",)) @ w
            return jax.shard_map(body, mesh=MESH, in_specs=(P("a"), P()), out_specs=P(), check_vma=False)(x, w)

        closed = traced(function, floats(32, 8), floats(8, 8))
        (result,) = values_of(closed, [P("a"), P("b")])
        partition = Partition()
        assert gathered_bytes(result, partition) == 8 * 8 * 4 / 2
        assert summed_bytes(result, partition) == 0
        outside = result.inputs[1]
        (body,) = subjaxprs(result.eqn)
        inside = Value(body.invars[1].aval, result.eqn, (outside,), body=outside)
        assert gathered_bytes(inside, partition) == 8 * 8 * 4 / 2
        dot = next(eqn for eqn in body.eqns if eqn.primitive.name == "dot_general")
        assert summed_bytes(Value(dot.outvars[0].aval, dot, (inside, inside)), partition) == 0
