import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill.layers.mlp import MLP
from overspill.policies.activation import annotations


def error(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def randomised(layer, key):
    leaves, structure = jax.tree.flatten(layer)
    keys = jax.random.split(key, len(leaves))
    return structure.unflatten([jax.random.normal(k, a.shape).astype(a.dtype) for k, a in zip(keys, leaves)])


def reference(layer, x):
    """Float64 SwiGLU with its gradients under the cotangent of ones."""

    def arrays(linear):
        bias = 0.0 if linear.bias is None else np.asarray(linear.bias, np.float64)
        return np.asarray(linear.weight, np.float64), bias

    (wg, bg), (wu, bu), (wd, bd) = map(arrays, (layer.gate_projection, layer.up_projection, layer.down_projection))
    gate, up = x @ wg.T + bg, x @ wu.T + bu
    sigmoid = 1 / (1 + np.exp(-gate))
    hidden = gate * sigmoid * up
    out = hidden @ wd.T + bd
    h = np.ones_like(out) @ wd
    dgate = h * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = h * gate * sigmoid
    dx = dgate @ wg + dup @ wu

    def weight(g, a):
        return g.reshape(-1, g.shape[-1]).T @ a.reshape(-1, a.shape[-1])

    gradients = [
        (weight(dgate, x), dgate.sum((0, 1))),
        (weight(dup, x), dup.sum((0, 1))),
        (weight(np.ones_like(out), hidden), np.ones_like(out).sum((0, 1))),
    ]
    return out, dx, gradients


@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients(bias):
    layer = randomised(MLP(6, 10, bias=bias, key=jax.random.key(0)), jax.random.key(1))
    x = jax.random.normal(jax.random.key(2), (2, 5, 6))
    out, dx, expected = reference(layer, np.asarray(x, np.float64))
    assert error(layer(x), out) < 1e-6
    gradients, x_gradient = jax.grad(lambda layer, x: layer(x).sum(), argnums=(0, 1))(layer, x)
    assert error(x_gradient, dx) < 2e-6
    projections = (gradients.gate_projection, gradients.up_projection, gradients.down_projection)
    for got, (weight, bias_gradient) in zip(projections, expected):
        assert error(got.weight, weight) < 2e-6
        if bias:
            assert error(got.bias, bias_gradient) < 2e-6
        else:
            assert got.bias is None


def test_activations():
    layer = MLP(6, 10, key=jax.random.key(0))
    assert [a.path for a in annotations(layer)] == ["gate", "up", "hidden"]
    text = str(jax.make_jaxpr(lambda x: layer(x))(jnp.ones((1, 2, 6))))
    for name in ("gate", "up", "hidden"):
        assert text.count(f"name={name}]") == 1


def test_dtype_and_bad_input():
    layer = MLP(6, 10, key=jax.random.key(0))
    assert layer(jnp.ones((1, 2, 6), jnp.bfloat16)).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"MLP: .*\[batch, sequence, 6\], got float32\[1, 2, 7\]"):
        layer(jnp.ones((1, 2, 7)))
    with pytest.raises(ValueError, match="MLP: intermediate_size must be a positive integer, got 0"):
        MLP(6, 0, key=jax.random.key(0))
