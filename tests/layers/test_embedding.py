import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill.layers.embedding import Embedding, check_tokens


def error(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_and_their_gradient(dtype):
    layer = Embedding(11, 4, std=1.0, dtype=dtype, key=jax.random.key(0))
    tokens = jnp.array([[0, 10, 3], [3, 3, 7]])
    assert layer(tokens).dtype == dtype
    np.testing.assert_array_equal(layer(tokens), np.asarray(layer.weight)[np.asarray(tokens)])
    g = jax.random.normal(jax.random.key(1), (2, 3, 4))
    gradient = jax.grad(lambda layer: jnp.sum(layer(tokens) * g))(Embedding(11, 4, key=jax.random.key(0)))
    expected = np.zeros((11, 4))
    np.add.at(expected, np.asarray(tokens), np.asarray(g, np.float64))
    assert error(gradient.weight, expected) < 1e-6


def test_tied_head_and_the_sum_of_both_gradients():
    layer = Embedding(11, 4, std=1.0, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 3, 4))
    assert error(layer.attend(x), np.asarray(x, np.float64) @ np.asarray(layer.weight, np.float64).T) < 1e-6
    assert layer.attend(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16

    tokens = jnp.array([[1, 2, 1], [0, 5, 10]])
    g = jax.random.normal(jax.random.key(2), (2, 3, 11))
    gradient = jax.grad(lambda layer: jnp.sum(layer.attend(layer(tokens)) * g))(layer)
    weight, g64 = np.asarray(layer.weight, np.float64), np.asarray(g, np.float64)
    rows = weight[np.asarray(tokens)]
    expected = np.einsum("bsv,bsd->vd", g64, rows)
    np.add.at(expected, np.asarray(tokens), g64 @ weight)
    assert len(jax.tree.leaves(layer)) == 1
    assert error(gradient.weight, expected) < 1e-6


@pytest.mark.parametrize("bad", [11, 1000, -1, -100])
def test_ids_outside_the_vocabulary_never_pass_for_another_token(bad):
    layer = Embedding(11, 4, key=jax.random.key(0))
    out = jax.jit(lambda layer, tokens: layer(tokens))(layer, jnp.array([[1, bad]]))
    assert np.isfinite(out[0, 0]).all() and np.isnan(out[0, 1]).all()
    with pytest.raises(ValueError, match=rf"token id {bad} at \[0, 1\] is outside the vocabulary: .* 0 to 10"):
        check_tokens(np.array([[1, bad]]), 11)


def test_check_tokens():
    check_tokens([[0, 10]], 11)
    check_tokens(jnp.array([[0, 10]]), 11)
    check_tokens(np.zeros((0, 4)), 11)
    check_tokens([[-100, 3]], 11, ignored=-100)
    with pytest.raises(ValueError, match="token id -1 at"):
        check_tokens([[-100, -1]], 11, ignored=-100)
    with pytest.raises(ValueError, match="must be integers, got float64"):
        check_tokens([[0.5, 1.0]], 11)


def test_bad_input():
    layer = Embedding(11, 4, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"integer token ids \[batch, sequence\], got float32\[1, 2\]"):
        layer(jnp.array([[1.0, 2.0]]))
    with pytest.raises(ValueError, match=r"\[..., 4\], got float32\[1, 2, 5\]"):
        layer.attend(jnp.ones((1, 2, 5)))
    with pytest.raises(ValueError, match="vocab_size must be a positive integer"):
        Embedding(0, 4, key=jax.random.key(0))
