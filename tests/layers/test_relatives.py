"""What tells Llama's relatives apart: sinks, windows, layers without rotation, norms behind, clipped experts."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from overspill import policies
from overspill.layers.attention import Attention, dot_product_attention
from overspill.layers.block import Block
from overspill.layers.experts import Experts
from overspill.layers.mask import attention_mask, within
from overspill.layers.mlp import MLP
from overspill.layers.rotary import Rotary
from overspill.layers.router import SoftmaxRouter
from overspill.layers.stack import Stack, resegment

LENGTH, FEATURES, HEADS, KV_HEADS, WIDTH = 70, 24, 4, 2, 8
ROTARY = Rotary(WIDTH, 300.0, 128)


def f64(x):
    return np.asarray(x, np.float64)


def randomised(tree, seed=3):
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    return structure.unflatten([jnp.asarray(0.4 * rng.normal(size=a.shape), a.dtype) for a in leaves])


def numbers(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def close(a, b, tolerance=1e-5):
    assert np.linalg.norm(f64(a) - f64(b)) <= tolerance * np.linalg.norm(f64(b))


def with_sinks(q, k, v, mask, scale, sinks):
    """Float64, one query and head at a time."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, i, h in np.ndindex(*q.shape[:3]):
        seen = np.flatnonzero(mask[b, i])
        s = np.append(f64(k)[b, seen, h // 2] @ f64(q)[b, i, h] * scale, float(sinks[h]))
        p = np.exp(s - s.max())
        out[b, i, h] = (p / p.sum())[:-1] @ f64(v)[b, seen, h // 2]
    return out


@pytest.mark.parametrize("size", [1.0, 60.0, -60.0])
def test_sinks_take_their_share(size):
    q, k, v = numbers(0, 2, 9, 4, 5), numbers(1, 2, 12, 2, 5), numbers(2, 2, 12, 2, 6)
    mask = np.random.default_rng(4).random((2, 9, 12)) < 0.5
    mask[:, 3] = False
    sinks = size * numbers(3, 4) if size == 1 else jnp.full(4, size)
    out = dot_product_attention(q, k, v, jnp.asarray(mask), 0.7, sinks)
    expected = with_sinks(q, k, v, mask, 0.7, sinks)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-7)
    gradients = jax.grad(
        lambda *a: jnp.sum(jnp.sin(3 * dot_product_attention(*a[:3], jnp.asarray(mask), 0.7, a[3]))), (0, 1, 2, 3)
    )(q, k, v, sinks)
    assert all(np.isfinite(g).all() for g in gradients)
    if size == 1:
        step = 1e-5
        for h in range(4):
            ends = [
                np.sum(np.sin(3 * with_sinks(q, k, v, mask, 0.7, f64(sinks) + s * np.eye(4)[h]))) for s in (step, -step)
            ]
            np.testing.assert_allclose(gradients[3][h], (ends[0] - ends[1]) / (2 * step), rtol=2e-4, atol=1e-5)


def test_a_window_is_a_number_of_keys():
    mask = attention_mask(LENGTH)
    narrowed = np.asarray(within(mask, jnp.int32(5)))[0]
    np.testing.assert_array_equal(narrowed, [[i - 5 < j <= i for j in range(LENGTH)] for i in range(LENGTH)])
    np.testing.assert_array_equal(within(mask, jnp.int32(5)), attention_mask(LENGTH, window=5))


def attention(seed=1, **options):
    layer = Attention(
        FEATURES, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=WIDTH, key=jax.random.key(seed), **options
    )
    return randomised(layer, seed)


def block(seed=1, **options):
    return randomised(
        Block(attention(), MLP(FEATURES, 20, key=jax.random.key(0)), FEATURES, norm_eps=1e-3, **options), seed
    )


def call(window=None):
    tables = ROTARY.tables(jnp.arange(LENGTH)[None])
    return {"tables": tables, "rotary": ROTARY, "mask": attention_mask(LENGTH, window=window)}


def test_layers_of_a_stack_differ_in_window_and_rotation():
    x = numbers(0, 2, LENGTH, FEATURES)
    windows, rotates = [5, 2**31 - 1, 5, 9], [True, True, False, True]
    per_layer = {"window": jnp.asarray(windows, jnp.int32), "rotates": jnp.asarray(rotates)}
    for scan, boundaries in ((True, ()), (True, (1, 3)), (False, ())):
        stack = Stack.build(lambda key: block(), 4, boundaries=boundaries, scan=scan, key=jax.random.key(0))
        # Drawn layer by layer, so that the cut doesn't matter.
        stack = resegment(randomised(resegment(stack, ()), 9), boundaries)
        expected = x
        for layer, window, rotated in zip(stack, windows, rotates, strict=True):
            shared = call(window if window < LENGTH else None)
            if not rotated:
                shared |= {"rotary": None, "tables": None}
            expected, _ = layer(expected, **shared)
        got, _ = stack(x, per_layer=per_layer, **call())
        close(got, expected)
    plain, _ = stack(x, **call())
    assert np.linalg.norm(plain - got) > 1e-2 * np.linalg.norm(got)


def rms(x, norm):
    return f64(norm.scale) * x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-3)


def test_norms_behind_attention_and_mlp():
    x = numbers(0, 2, LENGTH, FEATURES)
    layer = block(norm_placement="after", norm_downcast_first=False)
    y = f64(x) + rms(f64(layer.attention(x, **call())), layer.attention_norm)
    expected = y + rms(f64(layer.mlp(jnp.asarray(y, jnp.float32))), layer.feed_forward_norm)
    close(layer(x, **call())[0], expected)


@pytest.mark.parametrize("rules", ["save_all", "recompute_all", "offload_all", "offload_block_inputs"])
def test_norms_behind_with_placements(rules):
    x = numbers(0, 2, LENGTH, FEATURES)
    layer = policies.place(block(norm_placement="after"), rules)
    policies.check(policies.checkpoint(layer), x, **call())
    plain = jax.grad(lambda m: jnp.sum(jnp.sin(m(x, **call())[0])))(layer)
    placed = jax.jit(jax.grad(lambda m: jnp.sum(jnp.sin(policies.checkpoint(m)(x, **call())[0]))))(layer)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(placed), strict=True):
        close(a, b, 1e-5)


def test_norm_placement_is_one_of_two():
    with pytest.raises((ValueError, TypeCheckError), match="behind"):
        block(norm_placement="behind")


def experts_by_loops(experts, rows, sizes):
    """Float64, one row at a time; rows of no expert are zero."""
    out = np.zeros(rows.shape)
    for i, e in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        gate = f64(experts.gate_weight[e]) @ f64(rows[i]) + f64(experts.gate_bias[e])
        up = f64(experts.up_weight[e]) @ f64(rows[i]) + f64(experts.up_bias[e])
        gate, up = np.minimum(gate, experts.limit), np.clip(up, -experts.limit, experts.limit)
        hidden = (up + 1) * gate / (1 + np.exp(-experts.alpha * gate))
        out[i] = f64(experts.down_weight[e]) @ hidden + f64(experts.down_bias[e])
    return out


def test_clipped_experts_with_biases():
    experts = Experts(7, num_experts=4, expert_size=5, use_bias=True, limit=0.6, alpha=1.3, key=jax.random.key(0))
    experts, rows, sizes = randomised(experts), numbers(1, 20, 7), np.asarray([6, 0, 9, 2])
    expected = experts_by_loops(experts, rows, sizes)
    got = jax.jit(lambda e, r: e(r, jnp.asarray(sizes, jnp.int32)))(experts, rows)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert (np.asarray(got)[17:] == 0).all()  # a bias must not reach rows that no expert has
    gradients = jax.grad(lambda e: jnp.sum(jnp.sin(e(rows, jnp.asarray(sizes, jnp.int32)))))(experts)
    for name in ("gate_bias", "up_bias", "down_bias"):
        bias = f64(getattr(experts, name))
        assert (np.asarray(getattr(gradients, name))[1] == 0).all()
        for index in ((0, 1), (2, 3), (3, 0)):
            ends = []
            for step in (1e-4, -1e-4):
                moved = bias.copy()
                moved[index] += step
                other = eqx.tree_at(lambda e: getattr(e, name), experts, moved)
                ends.append(np.sin(experts_by_loops(other, rows, sizes)).sum())
            slope = (ends[0] - ends[1]) / 2e-4
            np.testing.assert_allclose(getattr(gradients, name)[index], slope, rtol=1e-3, atol=1e-4)


def test_a_bias_on_router_logits_moves_choice_and_weights():
    router = randomised(SoftmaxRouter(7, num_experts=8, top_k=3, normalize=True, use_bias=True, key=jax.random.key(0)))
    x = numbers(1, 40, 7)
    routing = router(x)
    logits = f64(x) @ f64(router.weight).T + f64(router.bias)
    for i in range(40):
        best = np.argsort(-logits[i])[:3]
        np.testing.assert_array_equal(routing.indices[i], best)
        weights = np.exp(logits[i, best] - logits[i, best].max())
        np.testing.assert_allclose(routing.weights[i], weights / weights.sum(), rtol=1e-5)
    gradient = jax.grad(lambda r: jnp.sum(jnp.sin(r(x).weights)))(router).bias
    assert (np.asarray(gradient) != 0).any()
