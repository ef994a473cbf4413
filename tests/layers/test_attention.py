import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill.layers.attention import Attention, dot_product_attention
from overspill.layers.mask import attention_mask
from overspill.layers.rotary import Rotary
from overspill.policies.activation import annotations

LENGTH = 70


def error(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def randomised(layer, key):
    leaves, structure = jax.tree.flatten(layer)
    keys = jax.random.split(key, len(leaves))

    def draw(key, a):
        normal = jax.random.normal(key, a.shape)
        return (normal / math.sqrt(a.shape[-1]) if a.ndim == 2 else 1 + 0.5 * normal).astype(a.dtype)

    return structure.unflatten([draw(k, a) for k, a in zip(keys, leaves)])


def softmax_attention(q, k, v, mask, scale):
    """Float64, one head and one query at a time; a query without keys gives zeros."""
    batch, queries, heads, _ = q.shape
    group = heads // k.shape[2]
    out = np.zeros((batch, queries, heads, v.shape[-1]))
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                seen = mask[b if len(mask) > 1 else 0, i]
                if not seen.any():
                    continue
                s = k[b, seen, h // group] @ q[b, i, h] * scale
                p = np.exp(s - s.max())
                out[b, i, h] = p / p.sum() @ v[b, seen, h // group]
    return out


def float64(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


def test_function_against_loops():
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (2, 9, 6, 5))
    k = jax.random.normal(keys[1], (2, 12, 2, 5))
    v = jax.random.normal(keys[2], (2, 12, 2, 7))  # values have their own width
    mask = jax.random.bernoulli(keys[3], 0.4, (2, 9, 12)).at[:, 3].set(False)
    out = dot_product_attention(q, k, v, mask, 0.6)
    expected = softmax_attention(*float64((q, k, v)), np.asarray(mask), 0.6)
    assert error(out, expected) < 1e-6
    assert (np.asarray(out)[:, 3] == 0).all()


def test_softmax_is_float32():
    # Scores of up to 80: bfloat16 would round them to multiples of 0.5.
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (3 * jax.random.normal(key, (1, LENGTH, 2, 8)).astype(jnp.bfloat16) for key in keys)
    mask = attention_mask(LENGTH)
    out = dot_product_attention(q, k, v, mask, 1.0)
    assert out.dtype == jnp.bfloat16
    assert error(out, softmax_attention(*float64((q, k, v)), np.asarray(mask), 1.0)) < 4e-3


def test_query_without_keys_gets_zero_and_finite_gradients():
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 6, 2, 4)) for key in keys)
    mask = attention_mask(6, mask=jnp.array([[0, 0, 1, 1, 1, 1], [0] * 6]).astype(bool))

    def loss(q, k, v):
        return jnp.sum(jnp.sin(dot_product_attention(q, k, v, mask, 1e3)))

    assert (np.asarray(dot_product_attention(q, k, v, mask, 1e3))[0, :2] == 0).all()
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        assert (np.asarray(gradient)[1] == 0).all()  # the row that is padding throughout
    for gradient in gradients:
        assert (np.asarray(gradient)[0, :2] == 0).all()  # left padding: unseen keys, queries without keys
        assert (np.asarray(gradient)[0, 2:] != 0).any()


def reference(layer, x, inverse, positions, mask):
    """Float64 attention block; `layer` holds float64 arrays, `inverse` the rotary inverse frequencies or None."""

    def project(linear):
        return x @ linear.weight.T + (0.0 if linear.bias is None else linear.bias)

    def normalised(y, norm):
        return norm.scale * y / np.sqrt((y**2).mean(-1, keepdims=True) + norm.eps)

    def heads(linear, norm):
        y = project(linear)
        if norm is not None and layer.qk_norm == "full":
            y = normalised(y, norm)
        y = y.reshape(*y.shape[:2], -1, layer.head_dim)
        if norm is not None and layer.qk_norm == "head":
            y = normalised(y, norm)
        return y

    def turn(y):
        if inverse is None:
            return y
        half = len(inverse)
        z = (y[..., :half] + 1j * y[..., half : 2 * half]) * np.exp(1j * positions[..., None, None] * inverse)
        return np.concatenate([z.real, z.imag, y[..., 2 * half :]], axis=-1)

    q = turn(heads(layer.query_projection, layer.query_norm))
    k = turn(heads(layer.key_projection, layer.key_norm))
    v = heads(layer.value_projection, None)
    context = softmax_attention(q, k, v, mask, layer.head_dim**-0.5)
    flat = context.reshape(*context.shape[:2], -1)
    out = layer.output_projection
    return flat @ out.weight.T + (0.0 if out.bias is None else out.bias)


CASES = {
    "one kv head": dict(num_heads=3, num_kv_heads=1, head_dim=4),
    "groups, wide heads": dict(num_heads=4, num_kv_heads=2, head_dim=6),
    "as many kv heads": dict(num_heads=2, num_kv_heads=2, head_dim=4),
    "biases": dict(num_heads=4, num_kv_heads=2, head_dim=4, qkv_bias=True, output_bias=True),
    "qkv bias": dict(num_heads=4, num_kv_heads=2, head_dim=4, qkv_bias=True),
    "norm by head": dict(num_heads=4, num_kv_heads=2, head_dim=6, qk_norm="head", norm_eps=0.01),
    "norm of all": dict(num_heads=4, num_kv_heads=2, head_dim=4, qk_norm="full", norm_eps=0.01),
}


def inputs(batch=2):
    x = jax.random.normal(jax.random.key(2), (batch, LENGTH, 8))
    segments = np.repeat([[0, 1, 2], [4, 4, 0]], [20, 21, 29], axis=1)
    positions = np.stack([np.r_[:20, :21, :29], np.r_[:41, :29]])
    valid = np.ones((2, LENGTH), bool)
    valid[0, 60:] = False
    valid[1, :3] = False
    return x, segments, positions, valid


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dim", [None, 4, 2])
def test_layer_against_float64(case, dim):
    layer = randomised(Attention(8, **CASES[case], key=jax.random.key(0)), jax.random.key(1))
    x, segments, positions, valid = inputs()
    mask = attention_mask(LENGTH, segment_ids=jnp.asarray(segments), mask=jnp.asarray(valid), window=25)
    rotary = None if dim is None else Rotary(dim, 100.0, 128)
    tables = None if dim is None else rotary.tables(jnp.asarray(positions), jnp.float32)
    inverse = None if dim is None else 100.0 ** (-np.arange(0, dim, 2) / dim)
    out = layer(x, tables=tables, rotary=rotary, mask=mask)
    expected = reference(float64(layer), np.asarray(x, np.float64), inverse, positions, np.asarray(mask))
    assert error(out, expected) < 2e-6


@pytest.mark.parametrize("case", ["groups, wide heads", "biases", "norm by head", "norm of all"])
def test_gradients_against_float64_differences(case):
    layer = randomised(Attention(8, **CASES[case], key=jax.random.key(0)), jax.random.key(1))
    x, segments, positions, valid = inputs()
    mask = attention_mask(LENGTH, segment_ids=jnp.asarray(segments), mask=jnp.asarray(valid))
    rotary = Rotary(4, 100.0, 128)
    tables = rotary.tables(jnp.asarray(positions), jnp.float32)
    g = jax.random.normal(jax.random.key(3), x.shape)
    inverse = 100.0 ** (-np.arange(0, 4, 2) / 4)

    def loss(inputs):
        layer, x = inputs
        return jnp.sum(g * layer(x, tables=tables, rotary=rotary, mask=mask))

    def loss64(inputs):
        layer, x = inputs
        return np.sum(np.asarray(g, np.float64) * reference(layer, x, inverse, positions, np.asarray(mask)))

    point = float64((layer, x))
    gradients, structure = jax.tree.flatten(jax.jit(jax.grad(loss))((layer, x)))
    leaves = jax.tree.leaves(point)
    random = np.random.default_rng(0)
    for index, gradient in enumerate(gradients):
        direction = random.normal(size=gradient.shape)
        shifted = [
            loss64(structure.unflatten([a + step * direction if i == index else a for i, a in enumerate(leaves)]))
            for step in (1e-5, -1e-5)
        ]
        slope = (shifted[0] - shifted[1]) / 2e-5
        norm = np.linalg.norm(gradient) * np.linalg.norm(direction)
        # The key bias shifts all scores of a query alike: its gradient is zero but for the rotation.
        assert abs(np.vdot(gradient, direction) - slope) < 2e-6 * max(norm, 1.0)


def test_packed_rows_equal_separate_documents():
    layer = randomised(Attention(8, **CASES["groups, wide heads"], key=jax.random.key(0)), jax.random.key(1))
    rotary = Rotary(6, 100.0, 128)
    x, *_ = inputs(batch=1)
    segments = np.repeat([[7, 0, 7]], [20, 21, 29], axis=1)
    segments[0, 41:] = 9
    positions = np.r_[:20, :21, :29][None]
    packed = layer(
        x,
        tables=rotary.tables(jnp.asarray(positions), jnp.float32),
        rotary=rotary,
        mask=attention_mask(LENGTH, segment_ids=jnp.asarray(segments)),
    )
    for start, stop in ((0, 20), (20, 41), (41, 70)):
        alone = layer(
            x[:, start:stop],
            tables=rotary.tables(jnp.arange(stop - start)[None], jnp.float32),
            rotary=rotary,
            mask=attention_mask(stop - start),
        )
        assert error(packed[:, start:stop], alone) < 1e-6


def test_activations_are_what_attention_uses():
    layer = Attention(8, **CASES["norm by head"], key=jax.random.key(0))
    assert [a.path for a in annotations(layer)] == ["query", "key", "value", "context"]
    rotary = Rotary(6, 100.0, 128)
    tables = rotary.tables(jnp.arange(5)[None], jnp.float32)
    mask = attention_mask(5)
    jaxpr = jax.make_jaxpr(lambda x: layer(x, tables=tables, rotary=rotary, mask=mask))(jnp.ones((2, 5, 8)))
    named = {
        eqn.params["name"]: eqn.outvars[0].aval.shape for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "name"
    }
    kv = (2, 5, 2, 6)
    assert named == {"query": (2, 5, 4, 6), "key": kv, "value": kv, "context": (2, 5, 4, 6)}


@pytest.mark.parametrize("weight_dtype", [jnp.float32, jnp.bfloat16])
def test_bfloat16(weight_dtype):
    layer = Attention(8, **CASES["norm by head"], dtype=weight_dtype, key=jax.random.key(0))
    layer = randomised(layer, jax.random.key(1))
    x, *_ = inputs()
    rotary, mask = Rotary(6, 100.0, 128), attention_mask(LENGTH)

    def run(layer, x):
        tables = rotary.tables(jnp.arange(LENGTH)[None], x.dtype)
        return layer(x, tables=tables, rotary=rotary, mask=mask)

    narrow = x.astype(jnp.bfloat16)
    out = run(layer, narrow)
    assert out.dtype == jnp.bfloat16
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), layer)
    assert error(out, run(wide, narrow.astype(jnp.float32))) < 2e-2
    gradient = jax.grad(lambda layer: jnp.sum(run(layer, narrow).astype(jnp.float32)))(layer)
    assert {a.dtype for a in jax.tree.leaves(gradient)} == {jnp.dtype(weight_dtype)}


@pytest.mark.parametrize(("qk_norm", "downcast_first"), [("head", True), ("full", False)])
def test_query_and_key_norms_round_as_their_families_do(qk_norm, downcast_first):
    layer = Attention(8, num_heads=2, num_kv_heads=1, head_dim=4, qk_norm=qk_norm, key=jax.random.key(0))
    assert layer.query_norm.downcast_first == layer.key_norm.downcast_first == downcast_first


def test_bad_input():
    with pytest.raises(ValueError, match=r"num_kv_heads \(3\) must divide num_heads \(4\)"):
        Attention(8, num_heads=4, num_kv_heads=3, head_dim=2, key=jax.random.key(0))
    with pytest.raises(ValueError, match="Attention: head_dim must be a positive integer, got 0"):
        Attention(8, num_heads=4, num_kv_heads=2, head_dim=0, key=jax.random.key(0))
    layer = Attention(8, num_heads=2, num_kv_heads=1, head_dim=4, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"Attention: .*\[batch, sequence, 8\], got float32\[1, 3, 9\]"):
        layer(jnp.ones((1, 3, 9)), tables=None, rotary=None, mask=attention_mask(3))
    q, k = jnp.ones((1, 2, 3, 4)), jnp.ones((1, 2, 2, 4))
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2 kv heads"):
        dot_product_attention(q, k, k, attention_mask(2), 1.0)
