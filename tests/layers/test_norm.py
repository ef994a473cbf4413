import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from overspill.layers.norm import RMSNorm

BF16 = ml_dtypes.bfloat16


def error(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def norm_with_scale(size, **kwargs):
    norm = RMSNorm(size, **kwargs)
    scale = 1 + 0.5 * jax.random.normal(jax.random.key(7), (size,))
    return jax.tree.map(lambda a: scale.astype(a.dtype), norm)


@pytest.mark.parametrize("downcast_first", [True, False])
@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_values_and_gradients(downcast_first, eps):
    norm = norm_with_scale(9, eps=eps, downcast_first=downcast_first)
    x = jax.random.normal(jax.random.key(0), (2, 3, 9))
    g = jax.random.normal(jax.random.key(1), (2, 3, 9))
    x64, g64, w = (np.asarray(a, np.float64) for a in (x, g, norm.scale))
    r = 1 / np.sqrt((x64**2).mean(-1, keepdims=True) + eps)
    assert error(norm(x), w * x64 * r) < 1e-6
    gradient, x_gradient = jax.grad(lambda n, x: jnp.sum(n(x) * g), argnums=(0, 1))(norm, x)
    assert error(gradient.scale, (g64 * x64 * r).sum((0, 1))) < 1e-6
    gw = g64 * w
    assert error(x_gradient, r * gw - x64 * r**3 * (gw * x64).mean(-1, keepdims=True)) < 2e-6


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scale_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("downcast_first", [True, False])
def test_bfloat16_rounds_where_the_family_does(downcast_first, scale_dtype, compiled):
    norm = norm_with_scale(64, eps=1e-6, dtype=scale_dtype, downcast_first=downcast_first)
    x = jax.random.normal(jax.random.key(0), (50, 64)).astype(jnp.bfloat16)
    got = (jax.jit(lambda n, x: n(x)) if compiled else lambda n, x: n(x))(norm, x)
    assert got.dtype == jnp.bfloat16

    # Float64 statistics, rounded where float32 ones are: the same bits unless a value sits on a rounding edge.
    x64 = np.asarray(x, np.float64)
    normed = (x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6)).astype(np.float32)
    scale = np.asarray(norm.scale, np.float32)
    early = (normed.astype(BF16).astype(np.float32) * scale).astype(BF16)
    late = (normed * scale).astype(BF16)
    right, wrong = (early, late) if downcast_first else (late, early)
    assert (np.asarray(got) != right).mean() < 1e-3
    assert (np.asarray(got) != wrong).mean() > 0.05


def test_statistics_are_float32():
    # The mean of these squares overflows float16 and drowns in bfloat16.
    norm = RMSNorm(512, eps=0.0)
    x = jnp.full((1, 512), 300.0, jnp.float16)
    np.testing.assert_array_equal(norm(x), np.ones((1, 512), np.float16))
    assert norm(x).dtype == jnp.float16


def test_gradient_in_bfloat16_is_finite_and_close():
    norm = norm_with_scale(32, eps=1e-6, dtype=jnp.bfloat16)
    wide = norm_with_scale(32, eps=1e-6)
    x = jax.random.normal(jax.random.key(0), (4, 32)).astype(jnp.bfloat16)
    g = jax.random.normal(jax.random.key(1), (4, 32))
    gradient = jax.grad(lambda x: jnp.sum(norm(x).astype(jnp.float32) * g))(x)
    expected = jax.grad(lambda x: jnp.sum(wide(x) * g))(x.astype(jnp.float32))
    assert gradient.dtype == jnp.bfloat16
    assert error(gradient, expected) < 1e-2


def test_zero_input_is_finite():
    norm = RMSNorm(4, eps=1e-6)
    value, gradient = jax.value_and_grad(lambda x: norm(x).sum())(jnp.zeros((2, 4)))
    assert value == 0 and np.isfinite(gradient).all()


def test_hyperparameters_are_static_and_bad_ones_refused():
    assert len(jax.tree.leaves(RMSNorm(4, eps=1e-5))) == 1
    assert jax.tree.structure(RMSNorm(4, eps=1e-5)) == jax.tree.structure(RMSNorm(4, eps=1e-5))
    with pytest.raises(ValueError, match="eps must be zero or positive, got -1"):
        RMSNorm(4, eps=-1.0)
    with pytest.raises(ValueError, match="size must be a positive integer, got 0"):
        RMSNorm(0, eps=1e-6)
    with pytest.raises(ValueError, match=r"RMSNorm: .*\[..., 4\], got float32\[2, 5\]"):
        RMSNorm(4, eps=1e-6)(jnp.ones((2, 5)))
