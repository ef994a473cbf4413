import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill.layers.router import Routing, SigmoidRouter, SoftmaxRouter, balance_loss, expert_load, update_bias

TOKENS, FEATURES, EXPERTS = 40, 6, 8
KEY = jax.random.key(0)
X = np.random.default_rng(0).standard_normal((TOKENS, FEATURES)).astype(np.float32)
# Distinct and all negative: a mask of zeros instead of minus infinity would choose from the wrong groups.
NEGATIVE = (-5 + 0.3 * np.random.default_rng(1).standard_normal(EXPERTS)).astype(np.float32)
MIXED = np.random.default_rng(2).standard_normal(EXPERTS).astype(np.float32)
NORMALIZE_SCALE = [(False, 1.0), (False, 2.5), (True, 1.0), (True, 2.5)]


def softmax_router(**options):
    return SoftmaxRouter(FEATURES, **({"num_experts": EXPERTS, "top_k": 3, "std": 1.0, "key": KEY} | options))


def sigmoid_router(bias=None, **options):
    router = SigmoidRouter(FEATURES, **({"num_experts": EXPERTS, "top_k": 3, "std": 1.0, "key": KEY} | options))
    return router if bias is None else eqx.tree_at(lambda r: r.bias.value, router, jnp.asarray(bias))


def brute_force(router, x, bias=None):
    """One token at a time, in float64."""
    indices, weights, scores = [], [], []
    for token in np.asarray(x, np.float64):
        logits = np.asarray(router.weight, np.float64) @ token
        if isinstance(router, SigmoidRouter):
            score = 1 / (1 + np.exp(-logits))
            biased = score + np.asarray(router.bias.value, np.float64)
            best = 2
        else:
            score = np.exp(logits - logits.max())
            score = biased = score / score.sum()
            best = 1
        allowed = list(range(router.num_experts))
        if router.groups > 1:
            size = router.num_experts // router.groups
            members = [list(range(g * size, (g + 1) * size)) for g in range(router.groups)]
            value = [sum(sorted((biased[e] for e in group), reverse=True)[:best]) for group in members]
            kept = sorted(range(router.groups), key=lambda g: -value[g])[: router.top_groups]
            allowed = [e for g in sorted(kept) for e in members[g]]
        chosen = sorted(allowed, key=lambda e: -biased[e])[: router.top_k]
        weight = score[chosen]
        if router.normalize:
            weight = weight / (weight.sum() + 1e-20)
        indices.append(chosen)
        weights.append(weight * router.scale)
        scores.append(score)
    return np.array(indices), np.array(weights), np.array(scores)


route = jax.jit(lambda router, x: router(x))


def check(router, x=X):
    routing = route(router, jnp.asarray(x))
    indices, weights, scores = brute_force(router, x)
    np.testing.assert_array_equal(routing.indices, indices)
    np.testing.assert_allclose(routing.weights, weights, rtol=3e-6)
    np.testing.assert_allclose(routing.scores, scores, rtol=3e-6)
    assert routing.indices.dtype == jnp.int32
    assert routing.weights.dtype == routing.scores.dtype == jnp.float32
    return routing


@pytest.mark.parametrize("normalize,scale", NORMALIZE_SCALE)
@pytest.mark.parametrize("groups,top_groups", [(1, 1), (2, 1), (4, 2), (4, 4), (4, 3)])
def test_softmax(groups, top_groups, normalize, scale):
    method = "greedy" if groups == 1 else "group_limited_greedy"
    routing = check(
        softmax_router(groups=groups, top_groups=top_groups, method=method, normalize=normalize, scale=scale)
    )
    if normalize:
        np.testing.assert_allclose(jnp.sum(routing.weights, axis=-1), scale, rtol=1e-6)


@pytest.mark.parametrize("bias", [None, NEGATIVE, MIXED, 3 + MIXED], ids=["zero", "negative", "mixed", "large"])
@pytest.mark.parametrize("normalize,scale", NORMALIZE_SCALE)
@pytest.mark.parametrize("groups,top_groups", [(1, 1), (2, 1), (4, 2), (4, 4)])
def test_sigmoid(groups, top_groups, normalize, scale, bias):
    routing = check(sigmoid_router(bias, groups=groups, top_groups=top_groups, normalize=normalize, scale=scale))
    if normalize:
        np.testing.assert_allclose(jnp.sum(routing.weights, axis=-1), scale, rtol=1e-6)


def test_groups_change_the_choice():
    """The brute force and the router would agree on ignoring groups too, if groups never mattered."""
    plain, grouped = sigmoid_router(NEGATIVE), sigmoid_router(NEGATIVE, groups=4, top_groups=2)
    assert np.any(np.asarray(plain(jnp.asarray(X)).indices) != np.asarray(grouped(jnp.asarray(X)).indices))
    best_two = sigmoid_router(MIXED, groups=2, top_groups=1, num_experts=8)(jnp.asarray(X))
    best_one = softmax_router(groups=2, top_groups=1, method="group_limited_greedy")(jnp.asarray(X))
    assert np.any(np.asarray(best_two.indices)[:, 0] // 4 != np.asarray(best_one.indices)[:, 0] // 4)


def test_a_constant_bias_changes_nothing():
    plain, shifted = (sigmoid_router(bias, groups=4, top_groups=2) for bias in (None, np.full(8, 3.0, np.float32)))
    a, b = plain(jnp.asarray(X)), shifted(jnp.asarray(X))
    np.testing.assert_array_equal(a.indices, b.indices)
    np.testing.assert_array_equal(a.weights, b.weights)


def test_probabilities_of_zero_do_not_open_a_masked_group():
    # Softmax underflows everywhere but in expert 7: the other choices are ties at zero, within 6 and 7's group.
    router = softmax_router(groups=4, top_groups=1, top_k=2, method="group_limited_greedy")
    router = eqx.tree_at(lambda r: r.weight, router, jnp.zeros((EXPERTS, FEATURES)).at[7].set(300.0))
    routing = router(jnp.ones((1, FEATURES)))
    np.testing.assert_array_equal(routing.indices, [[7, 6]])
    np.testing.assert_array_equal(routing.weights, [[1, 0]])


def test_ties_go_to_the_lower_index():
    for router in (softmax_router(), sigmoid_router()):
        router = eqx.tree_at(lambda r: r.weight, router, jnp.zeros((EXPERTS, FEATURES)))
        np.testing.assert_array_equal(router(jnp.asarray(X)).indices, np.tile([0, 1, 2], (TOKENS, 1)))


def test_vanishing_scores_stay_finite():
    router = sigmoid_router(normalize=True)
    router = eqx.tree_at(lambda r: r.weight, router, jnp.full((EXPERTS, FEATURES), -1e4))
    x = jnp.ones((4, FEATURES))

    def loss(router):
        routing = router(x)
        return jnp.sum(routing.weights**2) + router.balance_loss(routing, batch=1)

    value, grads = eqx.filter_value_and_grad(loss)(router)
    assert np.isfinite(value)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("make", [softmax_router, sigmoid_router])
def test_half_precision_input_is_routed_in_float32(make):
    router = make()
    half = jnp.asarray(X, jnp.bfloat16)
    check(router, np.asarray(half, np.float32))
    a, b = router(half), router(half.astype(jnp.float32))
    np.testing.assert_array_equal(a.weights, b.weights)


@pytest.mark.parametrize(
    "make,options",
    [
        (softmax_router, {"normalize": False, "scale": 16.0}),
        (softmax_router, {"normalize": True, "groups": 4, "top_groups": 2, "method": "group_limited_greedy"}),
        (sigmoid_router, {"bias": NEGATIVE, "groups": 4, "top_groups": 2, "normalize": True, "scale": 2.5}),
        (sigmoid_router, {"bias": MIXED, "normalize": False}),
    ],
)
def test_gradients_against_plain_indexing(make, options):
    router = make(**options)
    cotangent = np.random.default_rng(5).standard_normal((TOKENS, 3)).astype(np.float32)
    indices = jnp.asarray(brute_force(router, X)[0])

    def loss(router, x):
        return jnp.sum(router(x).weights * cotangent)

    def plain(router, x):
        logits = x @ router.weight.T
        scores = jax.nn.softmax(logits) if make is softmax_router else jax.nn.sigmoid(logits)
        weights = scores[jnp.arange(TOKENS)[:, None], indices]
        if router.normalize:
            weights = weights / weights.sum(-1, keepdims=True)
        return jnp.sum(weights * router.scale * cotangent)

    grads, expected = (jax.grad(f, argnums=(0, 1))(router, jnp.asarray(X)) for f in (loss, plain))
    for got, want in ((grads[0].weight, expected[0].weight), (grads[1], expected[1])):
        assert np.linalg.norm(want) > 0
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
    if make is sigmoid_router:
        assert np.all(np.asarray(grads[0].bias.value) == 0)


def balance_reference(scores, indices, batch, mask, alpha=1.0):
    num_experts, top_k = scores.shape[1], indices.shape[1]
    total, sequences = 0.0, 0
    for s, i, m in zip(*(np.split(np.asarray(a), batch) for a in (scores, indices, mask)), strict=True):
        s, i = s.astype(np.float64)[m], i[m]
        if len(s) == 0:
            continue
        f = np.array([num_experts / (top_k * len(s)) * np.sum(i == e) for e in range(num_experts)])
        p = (s / s.sum(-1, keepdims=True)).mean(0)
        total, sequences = total + f @ p, sequences + 1
    return total / max(sequences, 1)


MASKS = {
    "all": np.ones(TOKENS, bool),
    "some": np.random.default_rng(3).random(TOKENS) < 0.5,
    "a sequence of padding": np.arange(TOKENS) >= 10,
    "nothing": np.zeros(TOKENS, bool),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize(
    "router",
    [
        softmax_router(groups=4, top_groups=2, method="group_limited_greedy"),
        sigmoid_router(NEGATIVE, groups=4, top_groups=2),
    ],
    ids=["softmax", "sigmoid"],
)
def test_balance_loss(router, mask):
    indices, _, scores = brute_force(router, X)
    if isinstance(router, SigmoidRouter):
        # The best by score alone, whatever the bias chose.
        indices = np.argsort(-scores, axis=1)[:, : router.top_k]

    def loss(router, x):
        return router.balance_loss(router(x), batch=4, token_mask=jnp.asarray(mask))

    value, (grads, dx) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(router, jnp.asarray(X))
    np.testing.assert_allclose(value, balance_reference(scores, indices, 4, mask), rtol=1e-5)
    assert value.dtype == jnp.float32
    assert np.all(np.isfinite(grads.weight))
    np.testing.assert_array_equal(np.asarray(dx)[~mask], 0)
    if mask.any():
        assert np.any(np.asarray(grads.weight) != 0)


def test_balance_loss_without_mask_and_uniform():
    routing = Routing(jnp.arange(8, dtype=jnp.int32)[:, None], jnp.ones((8, 1)), jnp.full((8, 8), 0.3))
    np.testing.assert_allclose(balance_loss(routing, batch=1), 1.0, rtol=1e-6)
    with pytest.raises(ValueError, match="batch=3.*8 tokens"):
        balance_loss(routing, batch=3)


def test_balance_loss_ignores_what_padding_holds():
    router, mask = sigmoid_router(), MASKS["some"]
    a = router.balance_loss(router(jnp.asarray(X)), batch=4, token_mask=jnp.asarray(mask))
    b = router.balance_loss(router(jnp.where(mask[:, None], X, 7.0)), batch=4, token_mask=jnp.asarray(mask))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_load(mask):
    routing = softmax_router()(jnp.asarray(X))
    expected = np.bincount(np.asarray(routing.indices)[mask].ravel(), minlength=EXPERTS)
    load = expert_load(routing, jnp.asarray(mask))
    np.testing.assert_array_equal(load, expected)
    assert load.dtype == jnp.float32
    if mask.all():
        np.testing.assert_array_equal(expert_load(routing), expected)


def test_bias_update():
    bias = np.array([[0.1, 0.0, -0.2, 0.3], [0.5, 0.5, 0.5, 0.5]], np.float32)
    load = np.array([[10.0, 4.0, 6.0, 4.0], [2.0, 2.0, 2.0, 2.0]], np.float32)
    expected = bias + 0.01 * np.array([[-1, 1, 0, 1], [0, 0, 0, 0]], np.float32)
    updated = update_bias(jnp.asarray(bias), jnp.asarray(load), 0.01)
    np.testing.assert_allclose(updated, expected, atol=1e-7)
    assert updated.dtype == jnp.float32
    np.testing.assert_array_equal(update_bias(jnp.asarray(bias), jnp.asarray(load), 0.0), bias)
    assert np.all(np.asarray(jax.grad(lambda load: update_bias(jnp.asarray(bias), load, 0.1).sum())(load)) == 0)


@pytest.mark.parametrize(
    "make,options,message",
    [
        (softmax_router, {"method": "gready"}, "'gready'.*'greedy', 'group_limited_greedy'"),
        (softmax_router, {"method": "noaux_tc"}, "'noaux_tc'"),
        (softmax_router, {"groups": 4, "top_groups": 2}, "groups=4.*'group_limited_greedy'"),
        (softmax_router, {"top_k": 9}, "top_k=9.*8"),
        (softmax_router, {"top_k": 0}, "top_k.*0"),
        (sigmoid_router, {"groups": 3, "top_groups": 2}, "num_experts=8.*groups=3"),
        (sigmoid_router, {"groups": 4, "top_groups": 5}, "top_groups=5.*groups=4"),
        (sigmoid_router, {"groups": 4, "top_groups": 0}, "top_groups=0"),
        (sigmoid_router, {"groups": 4, "top_groups": 1}, "top_k=3.*more than 2"),
        (sigmoid_router, {"groups": 8, "top_groups": 4}, "one expert in a group"),
        (sigmoid_router, {"groups": 0}, "groups.*0"),
    ],
)
def test_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_leaves_are_arrays_and_settings_are_static():
    router = sigmoid_router()
    assert sorted(leaf.shape for leaf in jax.tree.leaves(router)) == [(8,), (8, 6)]
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(router))
    assert jax.tree.structure(router) == jax.tree.structure(sigmoid_router())
