import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill.layers.mask import attention_mask
from overspill.layers.mla import MLA
from overspill.layers.rotary import Rotary, YarnScaling
from overspill.policies.activation import annotations

BATCH, SEQUENCE, FEATURES = 2, 70, 24
HEADS, LATENT, NOPE, ROPE, VALUE = 3, 10, 6, 8, 5
FACTOR, ORIGINAL = 40.0, 64
YARN = {
    "none": None,
    "equal": (0.707, 0.707),
    "different": (1.0, 0.707),
    "one": (1.0, 1.0),
}


def make(q_lora_rank=None, bias=False, seed=0, **options):
    """A layer whose every parameter is random, biases and norm scales too."""
    layer = MLA(
        FEATURES, num_heads=HEADS, q_lora_rank=q_lora_rank, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE, v_head_dim=VALUE, bias=bias, key=jax.random.key(seed), **options,
    )  # fmt: skip
    leaves, structure = jax.tree.flatten(layer)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    leaves = [0.4 * jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
    layer = jax.tree.unflatten(structure, leaves)
    scales = [lambda m: m.kv_norm.scale] + ([lambda m: m.query_norm.scale] if q_lora_rank else [])
    for where in scales:
        layer = eqx.tree_at(where, layer, replace_fn=lambda scale: 1 + scale)
    return layer


def make_rotary(yarn):
    scaling = {}
    if yarn is not None:
        scaling = {"scaling": YarnScaling(FACTOR, ORIGINAL, mscale=yarn[0], mscale_all_dim=yarn[1])}
    return Rotary(ROPE, 1e4, int(FACTOR * ORIGINAL), interleaved=True, **scaling)


def make_input(seed=5):
    return jax.random.normal(jax.random.key(seed), (BATCH, SEQUENCE, FEATURES))


def mscale(value):
    return 0.1 * value * math.log(FACTOR) + 1


def yarn_frequencies():
    plain = 1e4 ** (-np.arange(0, ROPE, 2) / ROPE)
    low, high = (ROPE * math.log(ORIGINAL / (n * 2 * math.pi)) / (2 * math.log(1e4)) for n in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), ROPE - 1)
    ramp = np.clip((np.arange(ROPE // 2) - low) / (high - low), 0, 1)
    return plain / FACTOR * ramp + plain * (1 - ramp)


def reference(layer, x, positions, yarn, visible):
    """In float64, head by head; the rotation as a product of complex numbers."""
    f64 = lambda a: np.asarray(a, np.float64)  # noqa: E731
    x = f64(x)

    def linear(m, y):
        return y @ f64(m.weight).T + (0 if m.bias is None else f64(m.bias))

    def norm(m, y):
        return f64(m.scale) * y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6)

    frequencies, table_scale, scale = 1e4 ** (-np.arange(0, ROPE, 2) / ROPE), 1.0, (NOPE + ROPE) ** -0.5
    if yarn is not None:
        frequencies = yarn_frequencies()
        table_scale, scale = mscale(yarn[0]) / mscale(yarn[1]), scale * mscale(yarn[1]) ** 2

    def rotate(y):
        turned = (y[..., 0::2] + 1j * y[..., 1::2]) * np.exp(1j * positions[..., None] * frequencies) * table_scale
        return np.stack([turned.real, turned.imag], axis=-1).reshape(y.shape)

    q = linear(layer.query_up, x if layer.query_down is None else norm(layer.query_norm, linear(layer.query_down, x)))
    z = linear(layer.kv_down, x)
    kv = linear(layer.kv_up, norm(layer.kv_norm, z[..., :LATENT]))
    shared = rotate(z[..., LATENT:])
    heads = []
    for h in range(HEADS):
        qh = q[..., h * (NOPE + ROPE) : (h + 1) * (NOPE + ROPE)]
        kvh = kv[..., h * (NOPE + VALUE) : (h + 1) * (NOPE + VALUE)]
        scores = np.einsum("bsd,btd->bst", qh[..., :NOPE], kvh[..., :NOPE])
        scores += np.einsum("bsd,btd->bst", rotate(qh[..., NOPE:]), shared)
        weights = np.where(visible, np.exp(scale * scores - (scale * scores).max(-1, keepdims=True)), 0)
        weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
        heads.append(weights @ kvh[..., NOPE:])
    return linear(layer.output_projection, np.concatenate(heads, -1))


def close(a, b, tolerance=1e-5):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape and np.all(np.isfinite(a))
    assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("yarn", YARN.values(), ids=YARN.keys())
@pytest.mark.parametrize("q_lora_rank,bias", [(None, False), (None, True), (7, False), (7, True)])
def test_against_numpy(q_lora_rank, bias, yarn):
    layer, rotary, x = make(q_lora_rank, bias), make_rotary(yarn), make_input()
    positions = np.arange(SEQUENCE)[None] + np.array([[0], [100]])
    causal = np.tril(np.ones((SEQUENCE, SEQUENCE), bool))[None]
    tables = rotary.tables(jnp.asarray(positions))
    got = jax.jit(lambda m, x: m(x, tables=tables, rotary=rotary, mask=attention_mask(SEQUENCE)))(layer, x)
    expected = reference(layer, x, positions, yarn, causal)
    # Phases are float32: at position 170 that alone is about 1e-5 of a turn.
    close(got, expected, 2e-5)
    close(got[:, :1], expected[:, :1], 2e-6)


def test_the_latent_norms_have_their_own_eps():
    """Latents so small that an eps of 1e-5, which some configs have for the other norms, would show."""
    layer, rotary, x = make(7), make_rotary(None), 1e-3 * make_input()
    tables, positions = rotary.tables(jnp.arange(SEQUENCE)[None]), np.arange(SEQUENCE)[None]
    got = jax.jit(lambda x: layer(x, tables=tables, rotary=rotary, mask=attention_mask(SEQUENCE)))(x)
    close(got, reference(layer, x, positions, None, np.tril(np.ones((SEQUENCE, SEQUENCE), bool))[None]))


@pytest.mark.parametrize("mscales,softmax,table", [
    ((0.707, 0.707), 1.5896, 1.0),
    ((1.0, 1.0), 1.8739, 1.0),
    ((1.0, 0.707), 1.5896, 1.368888 / 1.260803),
])  # fmt: skip
def test_both_yarn_corrections(mscales, softmax, table):
    """Hand values at factor 40, from separate fields, in a layer used on its own."""
    rotary = make_rotary(mscales)
    np.testing.assert_allclose(make().scale(rotary) / make().scale(), softmax, rtol=1e-4)
    np.testing.assert_allclose(rotary.tables(jnp.zeros((1, 1), int))[0], table, rtol=1e-5)


def test_deepseek_v3_scale():
    layer = MLA(
        16, num_heads=1, q_lora_rank=None, kv_lora_rank=4, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        key=jax.random.key(0),
    )  # fmt: skip
    scaling = YarnScaling(40.0, 4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)
    assert abs(layer.scale(Rotary(64, 1e4, 163840, scaling)) - 0.135234) < 1e-6


def test_a_given_factor_replaces_the_rotary_ones():
    rotary = make_rotary((1.0, 1.0))
    assert make(softmax_scale_factor=1.0).scale(rotary) == make().scale()
    tables = rotary.tables(jnp.arange(SEQUENCE)[None])
    call = {"tables": tables, "rotary": rotary, "mask": attention_mask(SEQUENCE)}
    given = make(softmax_scale_factor=rotary.softmax_scale_factor)(make_input(), **call)
    np.testing.assert_array_equal(given, make()(make_input(), **call))
    assert np.any(np.asarray(make(softmax_scale_factor=1.0)(make_input(), **call)) != np.asarray(given))


def test_padding_is_finite_and_reaches_nobody():
    layer, rotary, x = make(7, True), make_rotary((1.0, 0.707)), make_input()
    valid = np.ones((BATCH, SEQUENCE), bool)
    valid[0, :9], valid[1] = False, False
    tables = rotary.tables(jnp.arange(SEQUENCE)[None])

    def loss(layer, x, valid):
        y = layer(x, tables=tables, rotary=rotary, mask=attention_mask(SEQUENCE, mask=jnp.asarray(valid)))
        return jnp.sum(jnp.where(valid[..., None], y, 0) ** 2), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(layer, x, valid)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((y, grads)))
    np.testing.assert_array_equal(np.asarray(grads[1])[~valid], 0)
    visible = np.tril(np.ones((SEQUENCE, SEQUENCE), bool))[None] & valid[:, None]
    expected = reference(layer, x, np.arange(SEQUENCE)[None], (1.0, 0.707), visible)
    close(np.asarray(y)[valid], expected[valid], 2e-5)
    # The padded sequence leaves no trace in the parameters' gradients.
    alone = jax.jit(jax.grad(loss, has_aux=True))(layer, x[:1], valid[:1])[0]
    for a, b in zip(jax.tree.leaves(grads[0]), jax.tree.leaves(alone), strict=True):
        close(a, b, 1e-5)


def test_gradients_of_every_parameter():
    """Directional derivatives of the float64 reference, by central differences."""
    layer, rotary, x = make(7, True), make_rotary((1.0, 0.707)), make_input()
    causal = np.tril(np.ones((SEQUENCE, SEQUENCE), bool))[None]
    tables, positions = rotary.tables(jnp.arange(SEQUENCE)[None]), np.arange(SEQUENCE)[None]
    cotangent = np.random.default_rng(0).standard_normal((BATCH, SEQUENCE, FEATURES))

    def loss(layer):
        y = layer(x, tables=tables, rotary=rotary, mask=attention_mask(SEQUENCE))
        return jnp.sum(y * cotangent.astype(np.float32))

    leaves, structure = jax.tree.flatten(layer)
    grads = jax.tree.leaves(jax.jit(jax.grad(loss))(layer))
    rng = np.random.default_rng(1)
    for index, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
        direction = rng.standard_normal(leaf.shape)

        def at(step, index=index, leaf=leaf, direction=direction):
            moved = [np.asarray(a, np.float64) for a in leaves]
            moved[index] = np.asarray(leaf, np.float64) + step * direction
            moved = jax.tree.unflatten(structure, moved)
            return np.sum(reference(moved, x, positions, (1.0, 0.707), causal) * cotangent)

        expected = (at(1e-6) - at(-1e-6)) / 2e-6
        got = np.sum(np.asarray(grad, np.float64) * direction)
        assert abs(got - expected) <= 3e-5 * np.linalg.norm(grad) * np.linalg.norm(direction)


def test_half_precision():
    layer, rotary, x = make(7), make_rotary((1.0, 1.0)), make_input().astype(jnp.bfloat16)
    tables = rotary.tables(jnp.arange(SEQUENCE)[None], jnp.bfloat16)
    y = jax.jit(lambda x: layer(x, tables=tables, rotary=rotary, mask=attention_mask(SEQUENCE)))(x)
    assert y.dtype == jnp.bfloat16
    expected = reference(
        layer, np.asarray(x, np.float32), np.arange(SEQUENCE)[None], (1.0, 1.0), np.tril(np.ones((70, 70), bool))[None]
    )
    close(y.astype(jnp.float32), expected, 0.03)


def test_activations():
    names = ["query_latent", "kv_latent", "query", "key", "value", "context"]
    assert [row.path for row in annotations(make(7))] == names
    assert [row.path for row in annotations(make())] == names[1:]


def test_parameters_are_laid_out_as_in_the_files():
    shapes = {
        name: layer.weight.shape
        for name, layer in vars(make(7)).items()
        if name.endswith(("up", "down", "projection"))
    }
    assert shapes == {
        "query_down": (7, FEATURES),
        "query_up": (HEADS * (NOPE + ROPE), 7),
        "kv_down": (LATENT + ROPE, FEATURES),
        "kv_up": (HEADS * (NOPE + VALUE), LATENT),
        "output_projection": (FEATURES, HEADS * VALUE),
    }
    assert make().query_up.weight.shape == (HEADS * (NOPE + ROPE), FEATURES)
    biased = make(7, True)
    assert biased.query_up.bias is biased.kv_up.bias is None
    assert None not in (biased.query_down.bias, biased.kv_down.bias, biased.output_projection.bias)
    assert make(None, True).query_up.bias is None


def test_errors():
    with pytest.raises(ValueError, match="kv_lora_rank.*0"):
        MLA(
            8, num_heads=1, q_lora_rank=None, kv_lora_rank=0, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=2,
            key=jax.random.key(0),
        )  # fmt: skip
    with pytest.raises(ValueError, match="q_lora_rank.*0"):
        make(q_lora_rank=0)
    with pytest.raises(ValueError, match="softmax_scale_factor.*-1"):
        make(softmax_scale_factor=-1.0)
    rotary = Rotary(4, 1e4, 64)
    with pytest.raises(ValueError, match="4 features.*qk_rope_head_dim is 8"):
        make()(make_input(), tables=rotary.tables(jnp.arange(70)[None]), rotary=rotary, mask=attention_mask(SEQUENCE))
