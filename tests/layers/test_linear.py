import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill.layers.linear import Buffer, Linear, check_input, is_buffer


def error(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def randomised(layer, key):
    leaves, structure = jax.tree.flatten(layer)
    keys = jax.random.split(key, len(leaves))
    return structure.unflatten([jax.random.normal(k, a.shape).astype(a.dtype) for k, a in zip(keys, leaves)])


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 7, 5)])
def test_values_and_gradients(use_bias, shape):
    layer = randomised(Linear(5, 4, use_bias=use_bias, key=jax.random.key(0)), jax.random.key(1))
    x = jax.random.normal(jax.random.key(2), shape)
    g = jax.random.normal(jax.random.key(3), (*shape[:-1], 4))
    weight, x64, g64 = (np.asarray(a, np.float64) for a in (layer.weight, x, g))
    bias = np.asarray(layer.bias, np.float64) if use_bias else 0.0
    assert error(layer(x), x64 @ weight.T + bias) < 1e-6

    gradients, x_gradient = jax.grad(lambda layer, x: jnp.sum(layer(x) * g), argnums=(0, 1))(layer, x)
    flat_x, flat_g = x64.reshape(-1, 5), g64.reshape(-1, 4)
    assert error(gradients.weight, flat_g.T @ flat_x) < 1e-6
    assert error(x_gradient, g64 @ weight) < 1e-6
    if use_bias:
        assert error(gradients.bias, flat_g.sum(0)) < 1e-6
    else:
        assert layer.bias is None


@pytest.mark.parametrize("weight_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtype_of_the_input_decides(weight_dtype, dtype):
    layer = Linear(8, 3, use_bias=True, dtype=weight_dtype, key=jax.random.key(0))
    x = jnp.ones((2, 8), dtype)
    assert layer.weight.dtype == layer.bias.dtype == weight_dtype
    assert layer(x).dtype == dtype
    gradient = jax.grad(lambda layer: layer(x).astype(jnp.float32).sum())(layer)
    assert gradient.weight.dtype == weight_dtype


def test_weights_are_drawn_in_float32():
    wide = Linear(64, 32, std=0.3, key=jax.random.key(0))
    narrow = Linear(64, 32, std=0.3, dtype=jnp.bfloat16, key=jax.random.key(0))
    np.testing.assert_array_equal(wide.weight.astype(jnp.bfloat16), narrow.weight)
    assert abs(float(wide.weight.std()) - 0.3) < 0.03
    assert abs(float(wide.weight.mean())) < 0.03


def test_weight_gradient_is_one_product_laid_out_like_the_weight():
    layer = Linear(16, 8, key=jax.random.key(0))
    x = jnp.ones((2, 3, 16))
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda layer: layer(x).sum()))(layer))
    assert "transpose[" not in jaxpr


@pytest.mark.parametrize("sizes", [(0, 4), (4, -1)])
def test_bad_sizes(sizes):
    with pytest.raises(ValueError, match=r"Linear: (in|out)_features must be a positive integer, got (0|-1)"):
        Linear(*sizes, key=jax.random.key(0))


def test_bad_input():
    layer = Linear(5, 4, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"Linear: expected floating numbers, \[..., 5\], got float32\[3, 6\]"):
        layer(jnp.ones((3, 6)))
    # Integers would turn the weights into zeros.
    with pytest.raises(ValueError, match=r"expected floating numbers.*got int32\[2, 5\]"):
        check_input("Linear", jnp.ones((2, 5), jnp.int32), 5)
    with pytest.raises(ValueError, match=r"MLP: .*\[batch, sequence, 5\], got float32\[2, 5\]"):
        check_input("MLP", jnp.ones((2, 5)), 5, rank=3)
    with pytest.raises(ValueError, match=r"got float32\[\]"):
        check_input("Linear", jnp.ones(()), 5)


def test_buffers_are_told_apart():
    tree = {"weight": jnp.ones(3), "bias": Buffer(jnp.zeros(2))}
    nodes = jax.tree.leaves(tree, is_leaf=is_buffer)
    assert [is_buffer(node) for node in nodes] == [True, False]
    parameters = jax.tree.map(lambda node: None if is_buffer(node) else node, tree, is_leaf=is_buffer)
    assert len(jax.tree.leaves(parameters)) == 1


def test_works_without_equinox_transformations():
    layers = eqx.filter_vmap(lambda key: Linear(4, 4, key=key))(jax.random.split(jax.random.key(0), 3))
    x = jnp.ones((2, 4))
    out, _ = jax.jit(lambda layers, x: jax.lax.scan(lambda x, layer: (layer(x), None), x, layers))(layers, x)
    expected = np.asarray(x, np.float64)
    for weight in np.asarray(layers.weight, np.float64):
        expected = expected @ weight.T
    assert error(out, expected) < 1e-6
