import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill.layers.loss import cross_entropy


def error(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def reference(hidden, weight, targets):
    """Float64 summed loss, count, and gradients of the sum, with the full logits."""
    hidden, weight = np.asarray(hidden, np.float64), np.asarray(weight, np.float64)
    logits = hidden @ weight.T
    top = logits.max(-1, keepdims=True)
    normaliser = top[..., 0] + np.log(np.exp(logits - top).sum(-1))
    total, gradient = 0.0, np.zeros_like(logits)
    for place in np.argwhere(targets != -100):
        place = tuple(place)
        total += normaliser[place] - logits[place][targets[place]]
        gradient[place] = np.exp(logits[place] - normaliser[place])
        gradient[place][targets[place]] -= 1
    return total, (targets != -100).sum(), gradient @ weight, np.einsum("bsv,bsd->vd", gradient, hidden)


def case(batch, sequence, features=6, vocab=17, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (batch, sequence, features)).astype(dtype)
    weight = 1.5 * jax.random.normal(keys[1], (vocab, features)).astype(dtype)
    targets = jax.random.randint(keys[2], (batch, sequence), 0, vocab)
    return hidden, weight, jnp.where(jax.random.bernoulli(keys[3], 0.3, targets.shape), -100, targets)


def with_gradients(hidden, weight, targets, **kwargs):
    run = jax.value_and_grad(lambda h, w: cross_entropy(h, w, targets, **kwargs), argnums=(0, 1), has_aux=True)
    (total, count), gradients = jax.jit(run)(hidden, weight)
    return total, count, *gradients


# Chunks that divide the tokens or don't, that are smaller than the batch, larger than everything, and the default.
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7, 9, 30, 66, 10_000, None])
@pytest.mark.parametrize("shape", [(3, 22), (1, 67)])
def test_values_and_gradients(shape, chunk):
    hidden, weight, targets = case(*shape)
    got = with_gradients(hidden, weight, targets, chunk=chunk)
    expected = reference(hidden, weight, np.asarray(targets))
    assert float(got[1]) == expected[1] < targets.size
    for a, b in zip(got, expected):
        assert error(a, b) < 1e-6
    assert got[0].dtype == got[1].dtype == jnp.float32
    ignored = np.asarray(targets) == -100
    assert (np.asarray(got[2])[ignored] == 0).all()


def test_default_chunk_of_more_than_one_step():
    hidden, weight, targets = case(2, 150)
    got = with_gradients(hidden, weight, targets)
    for a, b in zip(got, reference(hidden, weight, np.asarray(targets))):
        assert error(a, b) < 1e-6


def test_mask_ignores_positions():
    hidden, weight, targets = case(2, 11)
    mask = jax.random.bernoulli(jax.random.key(9), 0.5, targets.shape)
    got = with_gradients(hidden, weight, targets, mask=mask, chunk=4)
    for a, b in zip(got, reference(hidden, weight, np.where(mask, targets, -100))):
        assert error(a, b) < 1e-6


def test_scaled_cotangent():
    hidden, weight, targets = case(2, 11)

    def mean(h, w):
        total, count = cross_entropy(h, w, targets, chunk=5)
        return 3 * total / count

    gradients = jax.grad(mean, argnums=(0, 1))(hidden, weight)
    _, count, *expected = reference(hidden, weight, np.asarray(targets))
    for a, b in zip(gradients, expected):
        assert error(a, 3 * b / count) < 1e-6


@pytest.mark.parametrize("chunk", [3, None])
def test_nothing_to_predict(chunk):
    hidden, weight, targets = case(2, 7)
    hidden = hidden.at[0, 0].set(jnp.inf)
    total, count, *gradients = with_gradients(hidden, weight, jnp.full_like(targets, -100), chunk=chunk)
    assert float(total) == float(count) == 0
    assert all((np.asarray(gradient) == 0).all() for gradient in gradients)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_an_ignored_position_holds_is_of_no_account(value):
    hidden, weight, targets = case(2, 11)
    targets = targets.at[0, 9].set(-100)
    got = with_gradients(hidden.at[0, 9].set(value), weight, targets, chunk=6)
    for a, b in zip(got, reference(hidden, weight, np.asarray(targets))):
        assert error(a, b) < 1e-6


@pytest.mark.parametrize("bad", [17, 1000, -1, -99])
def test_targets_out_of_range_are_not_silent(bad):
    hidden, weight, targets = case(2, 7)
    total, _ = cross_entropy(hidden, weight, targets.at[1, 3].set(bad), chunk=4)
    assert np.isnan(total)


def test_large_logits_are_stable():
    hidden, weight, targets = case(2, 7)
    got = with_gradients(hidden * 100, weight * 100, targets, chunk=4)
    for a, b in zip(got, reference(hidden * 100, weight * 100, np.asarray(targets))):
        assert np.isfinite(a).all() and error(a, b) < 1e-5


def test_bfloat16_with_float32_statistics():
    hidden, weight, targets = case(2, 600, dtype=jnp.bfloat16)
    total, count, hidden_gradient, weight_gradient = with_gradients(hidden, weight, targets, chunk=64)
    assert total.dtype == count.dtype == jnp.float32
    assert hidden_gradient.dtype == weight_gradient.dtype == jnp.bfloat16
    expected = reference(hidden, weight, np.asarray(targets))
    assert error(total, expected[0]) < 1e-5  # rounded inputs, exact products, float32 sums
    assert error(hidden_gradient, expected[2]) < 1e-2
    assert error(weight_gradient, expected[3]) < 5e-3


def test_float32_weight_with_bfloat16_hidden():
    hidden, weight, targets = case(2, 9)
    _, _, hidden_gradient, weight_gradient = with_gradients(hidden.astype(jnp.bfloat16), weight, targets, chunk=4)
    assert hidden_gradient.dtype == jnp.bfloat16 and weight_gradient.dtype == jnp.float32
    expected = reference(hidden, weight, np.asarray(targets))
    assert error(weight_gradient, expected[3]) < 2e-2


@pytest.mark.parametrize("shape", [(4, 512), (2048, 1), (1, 2048)])
@pytest.mark.parametrize("chunk", [None, 64])
def test_full_logits_never_exist(shape, chunk):
    vocab, features = 4096, 16
    hidden = jax.ShapeDtypeStruct((*shape, features), jnp.float32)
    weight = jax.ShapeDtypeStruct((vocab, features), jnp.float32)
    targets = jax.ShapeDtypeStruct(shape, jnp.int32)
    full = 2048 * vocab * 4

    def total(hidden, weight, targets):
        return cross_entropy(hidden, weight, targets, chunk=chunk)[0]

    for function in (total, jax.value_and_grad(total, argnums=(0, 1))):
        memory = jax.jit(function).lower(hidden, weight, targets).compile().memory_analysis()
        # Two or three scratch arrays of a chunk, the gradients, a number per token.
        assert memory.temp_size_in_bytes < (full / 2 if chunk is None else full / 8)


def test_kept_for_the_backward_pass():
    hidden, weight, targets = case(2, 300, vocab=999)
    _, pull = jax.vjp(lambda h, w: cross_entropy(h, w, targets, chunk=64)[0], hidden, weight)
    kept = [a for a in jax.tree.leaves(pull) if hasattr(a, "size")]
    assert sum(a.size for a in kept) <= hidden.size + weight.size + 2 * targets.size + 10


def test_bad_input():
    hidden, weight, targets = case(2, 7)
    with pytest.raises(ValueError, match="chunk must be 1 token or more, got 0"):
        cross_entropy(hidden, weight, targets, chunk=0)
