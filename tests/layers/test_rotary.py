import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from overspill.layers.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rotary,
    RotaryScaling,
    YarnScaling,
)


def error(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def plain(theta, dim):
    return np.array([theta ** (-2 * j / dim) for j in range(dim // 2)])


def frequencies(rotary, last_position=0):
    positions = jnp.array([[last_position]])
    return rotary.scaling.frequencies(positions, rotary.theta, rotary.dim, rotary.max_positions)


def turned(rotary, positions, scale=1.0, *, inverse):
    """Float64 cosine and sine for the inverse frequencies `inverse`."""
    phases = np.asarray(positions, np.float64)[..., None] * inverse
    return np.cos(phases) * scale, np.sin(phases) * scale


def llama3(theta, dim, factor, low, high, original):
    out = []
    for inverse in plain(theta, dim):
        wavelength = 2 * math.pi / inverse
        if wavelength < original / high:
            out.append(inverse)
        elif wavelength > original / low:
            out.append(inverse / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append((1 - smooth) * inverse / factor + smooth * inverse)
    return np.array(out)


def yarn(theta, dim, factor, low, high):
    out = []
    for j, inverse in enumerate(plain(theta, dim)):
        ramp = min(max((j - low) / (high - low), 0), 1)
        out.append(inverse / factor * ramp + inverse * (1 - ramp))
    return np.array(out)


def mscale(factor, m):
    return 0.1 * m * math.log(factor) + 1


V3 = YarnScaling(40, 4096, 32, 1, mscale=1.0, mscale_all_dim=1.0)
V2_LITE = YarnScaling(40, 4096, 32, 1, mscale=0.707, mscale_all_dim=0.707)
K2 = YarnScaling(32, 4096, 1, 1, mscale=1.0, mscale_all_dim=1.0)
GPT_OSS = YarnScaling(32, 4096, 32, 1, truncate=False)


def test_plain_and_linear():
    # Inverse frequencies are float32 at every step, so they agree with float64 to a few units in the last place.
    assert error(frequencies(Rotary(64, 1e4, 4096)), plain(1e4, 64)) < 1e-7
    assert error(frequencies(Rotary(80, 5e5, 4096)), plain(5e5, 80)) < 1e-7
    assert error(frequencies(Rotary(64, 1e4, 4096, LinearScaling(4.0))), plain(1e4, 64) / 4) < 1e-7


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3(factor):
    rotary = Rotary(64, 5e5, 131072, Llama3Scaling(factor, 1.0, 4.0, 8192))
    expected = llama3(5e5, 64, factor, 1.0, 4.0, 8192)
    got = np.asarray(frequencies(rotary))
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    # All three regimes occur: kept, interpolated, divided.
    ratio = plain(5e5, 64) / got
    assert np.isclose(ratio, 1).any() and np.isclose(ratio, factor).any()
    assert ((ratio > 1.1) & (ratio < 0.9 * factor)).any()


@pytest.mark.parametrize("last", [0, 100, 127, 128, 200, 511])
def test_dynamic(last):
    rotary = Rotary(32, 1e4, 128, DynamicScaling(4.0))
    length = max(last + 1, 128)
    theta = 1e4 * (4.0 * length / 128 - 3.0) ** (32 / 30)
    positions = jnp.array([[0, last // 2, last]])
    np.testing.assert_allclose(frequencies(rotary, last), plain(theta, 32), rtol=2e-6)
    cos, sin = jax.jit(lambda p: rotary.tables(p, jnp.float32))(positions)
    want_cos, want_sin = turned(rotary, positions, inverse=plain(theta, 32))
    assert error(cos, want_cos) < 3e-5 and (last == 0 or error(sin, want_sin) < 3e-5)
    if last < 128:
        unscaled = Rotary(32, 1e4, 128).tables(positions, jnp.float32)
        np.testing.assert_allclose(np.stack([cos, sin]), np.stack(unscaled), atol=1e-7)


@pytest.mark.parametrize(
    ("scaling", "theta", "low", "high"),
    [(V3, 1e4, 10, 23), (V2_LITE, 1e4, 10, 23), (K2, 5e4, 19, 20), (GPT_OSS, 1.5e5, 8.0928, 17.3980)],
)
def test_yarn_frequencies(scaling, theta, low, high):
    got = scaling.correction_range(theta, 64)
    assert got == pytest.approx((low, high), abs=5e-5)
    if scaling.truncate:
        assert got == (low, high)
    rotary = Rotary(64, theta, 131072, scaling)
    np.testing.assert_allclose(frequencies(rotary), yarn(theta, 64, scaling.factor, *got), rtol=1e-6)


def test_yarn_range_is_clamped():
    low, high = YarnScaling(4.0, 64, 1000, 1e-9).correction_range(1e4, 16)
    assert (low, high) == (0, 15)
    # Both ends at the same index: the ramp is a step, not a division by zero.
    same = Rotary(64, 5e4, 8192, YarnScaling(4.0, 4096, 1, 1, truncate=False))
    assert same.scaling.correction_range(5e4, 64)[0] == same.scaling.correction_range(5e4, 64)[1]
    assert np.isfinite(frequencies(same)).all()


@pytest.mark.parametrize(
    ("scaling", "attention", "softmax"),
    [
        (V3, 1.0, 1.368888**2),
        (V2_LITE, 1.0, mscale(40, 0.707) ** 2),
        (K2, 1.0, 1.346574**2),
        (YarnScaling(64, 4096, 32, 1, mscale=1.0, mscale_all_dim=1.0), 1.0, 1.415888**2),
        (GPT_OSS, 1.34657, 1.0),
        (YarnScaling(40, 4096, mscale=1.0, mscale_all_dim=0.707), mscale(40, 1) / mscale(40, 0.707), 1.590),
        (YarnScaling(40, 4096, mscale=0.707), mscale(40, 1), 1.0),
        (YarnScaling(40, 4096, mscale_all_dim=0.707), mscale(40, 1), mscale(40, 0.707) ** 2),
        (YarnScaling(40, 4096, mscale=1.0, mscale_all_dim=1.0, attention_factor=0.25), 0.25, mscale(40, 1) ** 2),
        (YarnScaling(1.0, 4096, mscale=1.0, mscale_all_dim=0.5), 1.0, 1.0),
        (YarnScaling(None, 4096), mscale(8, 1), 1.0),
        (RotaryScaling(), 1.0, 1.0),
        (LinearScaling(8.0), 1.0, 1.0),
    ],
)
def test_yarn_has_two_independent_corrections(scaling, attention, softmax):
    rotary = Rotary(64, 1e4, 32768, scaling)
    assert rotary.softmax_scale_factor == pytest.approx(softmax, rel=5e-4)
    cos, sin = rotary.tables(jnp.array([[0, 3]]), jnp.float32)
    np.testing.assert_allclose(cos[0, 0], attention, rtol=1e-5)
    np.testing.assert_allclose(cos[0, 1] ** 2 + sin[0, 1] ** 2, attention**2, rtol=1e-5)


@pytest.mark.parametrize(
    ("scaling", "width", "scale"), [(V3, 192, 0.135234), (V2_LITE, 192, 0.114721), (K2, 192, 0.130861)]
)
def test_published_softmax_scales(scaling, width, scale):
    assert width**-0.5 * Rotary(64, 1e4, 163840, scaling).softmax_scale_factor == pytest.approx(scale, abs=6e-7)


@pytest.mark.parametrize("last", [0, 63, 64, 1000])
def test_longrope_switches_for_the_whole_batch(last):
    short, long = tuple(1.0 + 0.1 * j for j in range(8)), tuple(2.0 + j for j in range(8))
    rotary = Rotary(16, 1e4, 256, LongRopeScaling(short, long, 64))
    inverse = plain(1e4, 16) / np.array(short if last + 1 <= 64 else long)
    positions = jnp.array([[0, 5], [1, last]])
    cos, sin = jax.jit(lambda p: rotary.tables(p, jnp.float32))(positions)
    scale = math.sqrt(1 + math.log(4) / math.log(64))
    want_cos, want_sin = turned(rotary, positions, scale, inverse=inverse)
    assert error(cos, want_cos) < 2e-5 and error(sin, want_sin) < 2e-5


def test_longrope_attention_scale():
    divisors = (1.0,) * 8

    def first_cosine(**kwargs):
        rotary = Rotary(16, 1e4, 256, LongRopeScaling(divisors, divisors, 64, **kwargs))
        return float(rotary.tables(jnp.array([[0]]), jnp.float32)[0][0, 0, 0])

    assert first_cosine(factor=1.0) == 1.0
    assert first_cosine(factor=8.0) == pytest.approx(math.sqrt(1 + math.log(8) / math.log(64)))
    assert first_cosine(factor=8.0, attention_factor=1.5) == 1.5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("theta", "dim"), [(1e4, 64), (5e5, 128)])
def test_phases_are_float32_up_to_long_positions(theta, dim, dtype):
    # With bfloat16 frequencies or positions the error is about 2 here.
    rotary = Rotary(dim, theta, 131072)
    positions = np.unique(np.r_[0:300, np.random.default_rng(0).integers(0, 131072, 500), 131000:131072])
    cos, sin = jax.jit(lambda p: rotary.tables(p, dtype))(positions[None])
    assert cos.dtype == sin.dtype == dtype and cos.shape == (1, len(positions), dim // 2)
    want_cos, want_sin = turned(rotary, positions[None], inverse=plain(theta, dim))
    assert np.abs(np.asarray(cos, np.float64) - want_cos).max() < 1e-2
    assert np.abs(np.asarray(sin, np.float64) - want_sin).max() < 1e-2
    near = np.asarray(cos, np.float64)[0, :300], want_cos[0, :300]
    assert np.abs(near[0] - near[1]).max() < (3e-5 if dtype == jnp.float32 else 4e-3)


def test_bfloat16_tables_are_the_rounded_float32_ones():
    rotary = Rotary(64, 1e4, 4096, V3)
    positions = jnp.arange(0, 4096, 37)[None]
    for wide, narrow in zip(rotary.tables(positions, jnp.float32), rotary.tables(positions, jnp.bfloat16)):
        np.testing.assert_array_equal(np.asarray(wide).astype(ml_dtypes.bfloat16), narrow)


def rotate_by_complex(x, positions, inverse, interleaved):
    """Float64 rotation by complex multiplication; the result in half-split order."""
    half = len(inverse)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = (first + 1j * second) * np.exp(1j * np.asarray(positions, np.float64)[:, :, None, None] * inverse)
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("extra", [0, 6])
@pytest.mark.parametrize("rows", [1, 2])
def test_apply(interleaved, extra, rows):
    rotary = Rotary(10, 1e4, 128, interleaved=interleaved)
    positions = np.random.default_rng(0).integers(0, 100, (rows, 70))
    x = jax.random.normal(jax.random.key(0), (2, 70, 3, 10 + extra))
    got = rotary.apply(x, rotary.tables(jnp.asarray(positions), jnp.float32))
    x64 = np.asarray(x, np.float64)
    expected = rotate_by_complex(x64[..., :10], np.broadcast_to(positions, (2, 70)), plain(1e4, 10), interleaved)
    assert error(got[..., :10], expected) < 2e-6
    np.testing.assert_array_equal(got[..., 10:], x[..., 10:])
    assert got.shape == x.shape


@pytest.mark.parametrize(
    ("interleaved", "hot", "cosine_at", "sine_at", "sign"),
    [
        (False, 1, 1, 5, 1),  # feature j turns into feature j + dim/2
        (False, 5, 5, 1, -1),
        (True, 2, 1, 5, 1),  # feature 2j turns with 2j + 1; written to j and j + dim/2
        (True, 3, 5, 1, -1),
    ],
)
def test_convention_by_one_hot(interleaved, hot, cosine_at, sine_at, sign):
    rotary = Rotary(8, 1e4, 128, interleaved=interleaved)
    x = jnp.zeros((1, 1, 1, 8)).at[..., hot].set(1.0)
    out = np.asarray(rotary.apply(x, rotary.tables(jnp.array([[7]]), jnp.float32)))[0, 0, 0]
    expected = np.zeros(8)
    phase = 7 * 1e4 ** (-2 / 8)
    expected[cosine_at], expected[sine_at] = math.cos(phase), sign * math.sin(phase)
    np.testing.assert_allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_distance_only(interleaved):
    rotary = Rotary(16, 1e4, 4096, interleaved=interleaved)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))

    def score(query_at, key_at):
        turn = lambda x, at: rotary.apply(x, rotary.tables(jnp.array([[at]]), jnp.float32))  # noqa: E731
        return float(jnp.sum(turn(q, query_at) * turn(k, key_at)))

    assert score(90, 60) == pytest.approx(score(30, 0), abs=1e-4)
    assert abs(score(90, 60) - score(90, 61)) > 1e-3


def test_interleaved_scores_equal_half_split_scores_of_permuted_features():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 70, 2, 16))
    order = np.r_[0:16:2, 1:16:2]
    half, pairs = Rotary(16, 1e4, 128), Rotary(16, 1e4, 128, interleaved=True)
    tables = half.tables(jnp.arange(70)[None], jnp.float32)
    scores = [
        jnp.einsum("bshd,bthd->bhst", rotary.apply(a, tables), rotary.apply(b, tables))
        for rotary, a, b in ((pairs, q, k), (half, q[..., order], k[..., order]))
    ]
    assert error(*scores) < 1e-6


def test_dtype_of_the_features_is_kept():
    rotary = Rotary(8, 1e4, 128)
    tables = rotary.tables(jnp.arange(3)[None], jnp.float32)
    x = jnp.ones((1, 3, 2, 12), jnp.bfloat16)
    assert rotary.apply(x, tables).dtype == jnp.bfloat16


def test_no_arrays_and_equal_by_value():
    build = lambda: Rotary(64, 1e4, 4096, YarnScaling(40, 4096), interleaved=True)  # noqa: E731
    assert jax.tree.leaves(build()) == [] and build() == build() and hash(build()) == hash(build())
    for scaling in (LongRopeScaling((1.0,), (2.0,), 8), V3, Llama3Scaling(8, 1, 4, 8192), DynamicScaling(2.0)):
        hash(scaling)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Rotary(7, 1e4, 128), "dim must be even and positive, got 7"),
        (lambda: Rotary(8, 0.0, 128), "theta must be larger than 1, got 0.0"),
        (lambda: Rotary(8, 1e4, 0), "max_positions must be positive, got 0"),
        (lambda: Rotary(8, 1e4, 128, LinearScaling(0.0)), "linear rotary scaling: factor must be positive, got 0.0"),
        (lambda: Rotary(2, 1e4, 128, DynamicScaling(2.0)), "the rotary dim must be 4 or more, got 2"),
        (lambda: Rotary(8, 1e4, 128, Llama3Scaling(8, 4, 1, 8192)), r"low_freq_factor \(4\) must be smaller"),
        (lambda: Rotary(8, 1e4, 128, YarnScaling(-1.0, 4096)), "yarn rotary scaling: factor must be positive"),
        (lambda: Rotary(8, 1e4, 128, LongRopeScaling((1.0,) * 3, (1.0,) * 4, 64)), "short_factor must hold 4 positive"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_heads_too_narrow():
    rotary = Rotary(8, 1e4, 128)
    with pytest.raises(ValueError, match="dim 8 does not fit into heads of 6 features"):
        rotary.apply(jnp.ones((1, 2, 1, 6)), rotary.tables(jnp.arange(2)[None], jnp.float32))
