import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill import policies
from overspill.layers.moe import MoE
from overspill.layers.router import SigmoidRouter, SoftmaxRouter
from overspill.policies.activation import annotations

BATCH, SEQUENCE, FEATURES, EXPERTS, TOP_K = 2, 13, 6, 8, 3
KINDS = ["softmax", "grouped softmax", "sigmoid", "sigmoid without shared"]


def make(kind="sigmoid", seed=0):
    """A layer whose every parameter is random, the selection bias too."""
    router_key, key, values = jax.random.split(jax.random.key(seed), 3)
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "key": router_key}
    if kind == "softmax":
        router = SoftmaxRouter(FEATURES, normalize=False, scale=16.0, **sizes)
    elif kind == "grouped softmax":
        router = SoftmaxRouter(
            FEATURES, groups=4, top_groups=2, method="group_limited_greedy", normalize=True, **sizes
        )
    else:
        router = SigmoidRouter(FEATURES, groups=4, top_groups=2, scale=2.5, **sizes)
    shared = None if kind == "sigmoid without shared" else 4
    layer = MoE(FEATURES, router=router, num_experts=EXPERTS, expert_size=5, shared_size=shared, key=key)
    leaves, structure = jax.tree.flatten(layer)
    keys = jax.random.split(values, len(leaves))
    return jax.tree.unflatten(
        structure, [0.7 * jax.random.normal(k, a.shape) for k, a in zip(keys, leaves, strict=True)]
    )


def make_input(seed=1):
    return jax.random.normal(jax.random.key(seed), (BATCH, SEQUENCE, FEATURES))


def dense(layer, x, valid):
    """Every expert on every token in plain jnp, with the weights in a one-hot table; no masks by sorting."""
    routing = layer.router(x.reshape(-1, FEATURES))
    logits = x @ layer.router.weight.T
    scores = jax.nn.softmax(logits) if isinstance(layer.router, SoftmaxRouter) else jax.nn.sigmoid(logits)
    chosen = jax.nn.one_hot(routing.indices, EXPERTS).sum(1).reshape(*x.shape[:2], EXPERTS)
    weights = scores * chosen
    if layer.router.normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    weights = weights * layer.router.scale * valid[..., None]
    e = layer.experts
    hidden = jax.nn.silu(jnp.einsum("bsd,efd->bsef", x, e.gate_weight)) * jnp.einsum("bsd,efd->bsef", x, e.up_weight)
    y = jnp.einsum("bsef,edf,bse->bsd", hidden, e.down_weight, weights)
    if layer.shared is not None:
        m = layer.shared
        gate, up, down = m.gate_projection.weight, m.up_projection.weight, m.down_projection.weight
        y = y + (jax.nn.silu(x @ gate.T) * (x @ up.T)) @ down.T
    return y, (chosen * valid[..., None]).sum((0, 1))


def close(a, b, tolerance=1e-5):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape and np.all(np.isfinite(a))
    assert np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(b), 1e-30)


def all_close(a, b, tolerance=1e-5):
    for got, want in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        close(got, want, tolerance)


COTANGENT = np.random.default_rng(2).standard_normal((BATCH, SEQUENCE, FEATURES)).astype(np.float32)
MASKS = {
    "no mask": None,
    "some": np.random.default_rng(3).random((BATCH, SEQUENCE)) < 0.6,
    "a sequence": np.array([[True] * SEQUENCE, [False] * SEQUENCE]),
    "nothing": np.zeros((BATCH, SEQUENCE), bool),
}


@functools.cache
def both(kind, masked):
    """Compiled: loss, output, load and gradients, of the layer and of the dense one."""

    def loss(layer, x, valid):
        y, stats = layer(x, token_mask=valid if masked else None)
        return jnp.sum(y * COTANGENT), (y, stats.load)

    def dense_loss(layer, x, valid):
        y, load = dense(layer, x, valid)
        return jnp.sum(y * COTANGENT), (y, load)

    return [jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True)) for f in (loss, dense_loss)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_against_every_expert_on_every_token(kind, mask):
    layer, x = make(kind), make_input()
    valid = jnp.ones((BATCH, SEQUENCE), bool) if mask is None else jnp.asarray(mask)
    got, expected = (run(layer, x, valid) for run in both(kind, mask is not None))
    all_close(got, expected)
    assert (np.linalg.norm(expected[1][0].router.weight) > 0) == bool(np.any(valid))


def test_outside_numpy():
    """The same layer once more with no JAX in the reference, token by token in float64."""
    layer, x = make("sigmoid"), make_input()
    f64 = lambda a: np.asarray(a, np.float64)  # noqa: E731
    silu = lambda a: a / (1 + np.exp(-a))  # noqa: E731
    e, m, expected = layer.experts, layer.shared, np.zeros(x.shape)
    for at in np.ndindex(BATCH, SEQUENCE):
        token = f64(x)[at]
        score = 1 / (1 + np.exp(-f64(layer.router.weight) @ token))
        biased = score + f64(layer.router.bias.value)
        groups = sorted(range(4), key=lambda g: -biased[2 * g : 2 * g + 2].sum())[:2]
        allowed = [i for i in range(EXPERTS) if i // 2 in groups]
        chosen = sorted(allowed, key=lambda i: -biased[i])[:TOP_K]
        for i in chosen:
            hidden = silu(f64(e.gate_weight)[i] @ token) * (f64(e.up_weight)[i] @ token)
            expected[at] += 2.5 * score[i] / score[chosen].sum() * (f64(e.down_weight)[i] @ hidden)
        hidden = silu(f64(m.gate_projection.weight) @ token) * (f64(m.up_projection.weight) @ token)
        expected[at] += f64(m.down_projection.weight) @ hidden
    close(jax.jit(lambda x: layer(x)[0])(x), expected, 1e-6)


def route_to(layer, favoured):
    bias = jnp.full(EXPERTS, -100.0).at[jnp.asarray(favoured)].set(100.0)
    return eqx.tree_at(lambda m: m.router.bias.value, layer, bias)


def test_experts_without_tokens_get_no_gradient():
    layer, x = route_to(make(), [0, 1, 2]), make_input()
    
    def loss(layer):
        y, stats = layer(x)
        return jnp.sum(y * COTANGENT), stats.load

    grads, load = jax.jit(jax.grad(loss, has_aux=True))(layer)
    np.testing.assert_array_equal(load, [26, 26, 26, 0, 0, 0, 0, 0])
    for leaf in jax.tree.leaves(grads.experts):
        assert np.all(np.asarray(leaf[3:]) == 0)
        assert all(np.linalg.norm(part) > 0 for part in leaf[:3])


def test_the_bias_gets_no_gradient():
    layer, x = make(), make_input()

    def loss(layer):
        y, stats = layer(x)
        return jnp.sum(y**2) + stats.balance_loss

    grads = jax.jit(jax.grad(loss))(layer)
    np.testing.assert_array_equal(grads.router.bias.value, np.zeros(EXPERTS))


def test_padding_reaches_nothing():
    layer, mask = make(), jnp.asarray(MASKS["some"])

    def loss(layer, x):
        y, stats = layer(x, token_mask=mask)
        return jnp.sum(jnp.where(mask[..., None], y, 0) * COTANGENT) + stats.balance_loss, (y, stats)

    x = make_input()
    other = jnp.where(mask[..., None], x, 3 * make_input(9))
    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    ((_, (y, stats)), grads), ((_, (y2, stats2)), grads2) = run(layer, x), run(layer, other)
    np.testing.assert_array_equal(y[mask], y2[mask])
    np.testing.assert_array_equal(stats.load, stats2.load)
    all_close(grads, grads2, 1e-6)
    np.testing.assert_array_equal(np.asarray(grads[1])[~np.asarray(mask)], 0)
    assert float(jnp.sum(stats.load)) == TOP_K * int(mask.sum())
    without = eqx.tree_at(lambda m: m.shared, layer, None)
    np.testing.assert_array_equal(np.asarray(eqx.filter_jit(without)(x, token_mask=mask)[0])[~np.asarray(mask)], 0)


def stack(seeds=(10, 11)):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(make(seed=seed) for seed in seeds))


@functools.cache
def expected_of_a_stack():
    """Loss and gradients of two layers in a loop, every expert on every token."""
    valid = jnp.asarray(MASKS["some"])

    def loss(stacked, x):
        total = 0.0
        for i in range(2):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
            tokens = x.reshape(-1, FEATURES)
            total += layer.router.balance_loss(layer.router(tokens), batch=BATCH, token_mask=valid.reshape(-1))
            x = x + 0.3 * dense(layer, x, valid)[0]
        return jnp.sum(x * COTANGENT) + total

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(stack(), make_input())


@pytest.mark.parametrize("placement", ["device", "host", "recompute", "mixed"])
def test_any_placement_in_a_scan_over_layers(placement):
    mixed = {"*": "device", "dispatched": "host", "experts.gate": "recompute", "router.logits": "host"}
    stacked = policies.place(stack(), mixed if placement == "mixed" else {"*": placement})

    def loss(stacked, x):
        def step(x, layer):
            y, stats = policies.checkpoint(layer, prevent_cse=False)(x, token_mask=jnp.asarray(MASKS["some"]))
            return x + 0.3 * y, stats

        x, stats = jax.lax.scan(step, x, stacked)
        assert stats.load.shape == (2, EXPERTS)
        return jnp.sum(x * COTANGENT) + jnp.sum(stats.balance_loss)

    got = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(stacked, make_input())
    all_close(got, expected_of_a_stack(), 2e-6)


def test_nothing_is_scattered():
    """Gathers are transposed to gathers, not to scatters."""
    layer, x = make(), make_input()

    def loss(layer, x):
        y, stats = layer(x, token_mask=jnp.asarray(MASKS["some"]))
        return jnp.sum(y * COTANGENT) + stats.balance_loss

    assert "scatter" not in str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(layer, x))


def test_half_precision():
    layer, x = make(), make_input().astype(jnp.bfloat16)
    call = jax.jit(lambda m, x: m(x))
    y, stats = call(layer, x)
    assert y.dtype == jnp.bfloat16 and stats.load.dtype == stats.balance_loss.dtype == jnp.float32
    wide = call(layer, x.astype(jnp.float32))
    np.testing.assert_array_equal(stats.load, wide[1].load)
    close(y.astype(jnp.float32), wide[0], 0.02)
    grads = jax.eval_shape(jax.grad(lambda m: jnp.sum(m(x)[0].astype(jnp.float32))), layer)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grads))


def test_activations():
    assert [row.path for row in annotations(make())] == [
        "router.logits", "experts.gate", "experts.up", "experts.hidden",
        "shared.gate", "shared.up", "shared.hidden", "dispatched", "expert_output",
    ]  # fmt: skip


def test_errors():
    router = SoftmaxRouter(FEATURES, num_experts=4, top_k=1, key=jax.random.key(0))
    with pytest.raises(ValueError, match="router is for 4 experts.*num_experts=8"):
        MoE(FEATURES, router=router, num_experts=8, expert_size=5, key=jax.random.key(0))
    with pytest.raises(ValueError, match="expert_size.*0"):
        MoE(FEATURES, router=router, num_experts=4, expert_size=0, key=jax.random.key(0))
