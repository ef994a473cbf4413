import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill.layers import grouped as module
from overspill.layers.experts import Experts, assign, combine, dispatch, grouped_matmul

ROWS, OUT, FEATURES = 29, 5, 7
SIZES = {
    "uneven": [3, 0, 17, 9],
    "empty at both ends": [0, 20, 9, 0],
    "fewer than the rows": [4, 6, 0, 8],
    "one takes everything": [0, 0, ROWS, 0],
    "one takes some, the rest nothing": [0, 11, 0, 0],
    "nobody gets anything": [0, 0, 0, 0],
    "single rows": [1, 1, 1, 1],
}


def close(a, b, tolerance=1e-5):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    assert np.all(np.isfinite(a))
    assert np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(b), 1e-30), np.abs(a - b).max()


def problem(sizes, rows=ROWS):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, FEATURES)).astype(np.float32)
    weight = rng.standard_normal((len(sizes), OUT, FEATURES)).astype(np.float32)
    cotangent = rng.standard_normal((rows, OUT)).astype(np.float32)
    return x, weight, np.array(sizes, np.int32), cotangent


def reference(x, weight, sizes, cotangent):
    """Value and both gradients, one row at a time, in float64."""
    x, weight, cotangent = (a.astype(np.float64) for a in (x, weight, cotangent))
    y, dx, dw = np.zeros((len(x), weight.shape[1])), np.zeros(x.shape), np.zeros(weight.shape)
    for row, expert in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        y[row] = weight[expert] @ x[row]
        dx[row] = weight[expert].T @ cotangent[row]
        dw[expert] += np.outer(cotangent[row], x[row])
    return y, dx, dw


def value_and_gradients(*arguments, windows=None):
    del windows  # for jit alone: a program for each
    x, weight, sizes, cotangent = map(jnp.asarray, arguments)
    y, pullback = jax.vjp(lambda x, weight: grouped_matmul(x, weight, sizes), x, weight)
    return y, *pullback(cotangent)


run = jax.jit(value_and_gradients, static_argnames="windows")


@pytest.fixture(params=[(256, 64), (8, 3)], ids=str)
def windows(request, monkeypatch):
    monkeypatch.setattr(module, "WINDOWS", request.param)
    return request.param


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_value_and_gradients(sizes, windows):
    arguments = problem(sizes)
    for got, expected in zip(run(*arguments, windows=windows), reference(*arguments), strict=True):
        close(got, expected, 1e-6)
        # What no row contributes to is zero to the last bit.
        assert np.all(np.asarray(got)[expected == 0] == 0)


@pytest.mark.parametrize("widths", [module.WINDOWS, module.GPU_WINDOWS])
def test_more_rows_than_the_windows(widths, monkeypatch):
    monkeypatch.setattr(module, "WINDOWS", widths)
    arguments = problem([1300, 0, 257, 64, 63, 1, 0, 10], rows=1700)
    for got, expected in zip(jax.jit(value_and_gradients)(*arguments), reference(*arguments), strict=True):
        close(got, expected, 1e-6)


@pytest.mark.parametrize("used", [[0, 0, 3], [2, 5, 5, 5, 8], [], [8, 8, 8], list(range(9))], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_more_rows_than_experts(used, dtype):
    """The rows have a copy of their expert each; those of nobody may hold anything and give zero."""
    sizes = np.bincount(np.asarray(used, int), minlength=9)
    x, weight, sizes, cotangent = problem(sizes, rows=9)
    x, weight, cotangent = (a.astype(dtype) for a in (x, weight, cotangent))
    expected = reference(x, weight, sizes, cotangent)
    x[len(used) :], cotangent[len(used) :] = np.nan, np.inf
    for got, wanted in zip(jax.jit(value_and_gradients)(x, weight, sizes, cotangent), expected, strict=True):
        assert got.dtype == dtype
        close(got, wanted, 1e-6 if dtype == "float32" else 4e-3)
        assert np.all(np.asarray(got)[wanted == 0] == 0)


@pytest.mark.parametrize(("rows", "experts", "sizes"), [
    (4096, 16, (256, 64)), (700, 8, (256, 64)), (256, 24, (256, 16)), (32, 24, (32, 8)), (40, 1, (40,)), (3, 2, (3,)),
])  # fmt: skip
def test_small_groups_have_narrow_windows(rows, experts, sizes):
    assert module._window_sizes(rows, experts, module.WINDOWS) == sizes
    arguments = problem(np.random.default_rng(1).multinomial(rows, np.ones(experts) / experts), rows=rows)
    for got, expected in zip(jax.jit(value_and_gradients)(*arguments), reference(*arguments), strict=True):
        close(got, expected, 1e-6)


@jax.jit
def ragged_side(x, weight, sizes, cotangent):
    y = module._rows_times_experts_ragged(x, weight, sizes, transpose=False)
    dx = module._rows_times_experts_ragged(cotangent, weight, sizes, transpose=True)
    return y, dx, module._rows_times_rows_ragged(cotangent, x, sizes)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_the_other_platforms_side(sizes):
    """What accelerators run, on this one: the same numbers and the same zeros."""
    arguments = problem(sizes)
    for got, expected in zip(ragged_side(*arguments), reference(*arguments), strict=True):
        close(got, expected, 1e-6)
        assert np.all(np.asarray(got)[expected == 0] == 0)


def test_rows_in_no_group_may_hold_anything(windows):
    x, weight, sizes, cotangent = problem(SIZES["fewer than the rows"])
    used = sizes.sum()
    clean = run(x, weight, sizes, cotangent, windows=windows)
    x[used:], cotangent[used:] = np.nan, np.inf
    for a, b in zip(run(x, weight, sizes, cotangent, windows=windows), clean, strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_rows_at_all():
    x, weight, sizes, cotangent = problem([0, 0], rows=0)
    y, dx, dw = value_and_gradients(x, weight, sizes, cotangent)
    assert y.shape == (0, OUT) and dx.shape == (0, FEATURES)
    np.testing.assert_array_equal(dw, np.zeros_like(weight))


def test_dtypes(windows):
    x, weight, sizes, cotangent = problem([3, 0, 17, 9])
    half = jnp.bfloat16
    y, dx, dw = run(x.astype(half), weight, sizes, cotangent.astype(half), windows=windows)
    assert (y.dtype, dx.dtype, dw.dtype) == (half, half, jnp.float32)
    rounded = [np.asarray(jnp.asarray(a, half), np.float32) for a in (x, weight, cotangent)]
    expected = reference(rounded[0], rounded[1], sizes, rounded[2])
    close(y, expected[0], 4e-3)
    close(dx, expected[1], 4e-3)
    close(dw, expected[2], 1e-6)  # summed in float32, and the parameter is float32
    halves = x.astype(half), weight.astype(half), sizes, cotangent.astype(half)
    assert jax.eval_shape(value_and_gradients, *halves)[2].dtype == half


def test_each_platform_gets_its_own_program():
    x, weight, sizes, cotangent = problem([3, 0, 17, 9])
    traced = jax.jit(value_and_gradients).trace(x, weight, sizes, cotangent)
    cpu = traced.lower(lowering_platforms=("cpu",)).as_text()
    cuda = traced.lower(lowering_platforms=("cuda",)).as_text()
    tpu = traced.lower(lowering_platforms=("tpu",)).as_text()
    # On a GPU ragged_dot would multiply every row with every expert.
    assert all("stablehlo.while" in text and "ragged_dot" not in text for text in (cpu, cuda))
    assert "stablehlo.while" not in tpu


def test_memory_does_not_grow_with_experts_times_rows():
    def temporary(experts):
        shapes = [(1024, 64), (experts, 32, 64), (experts,), (1024, 32)]
        types = [jnp.float32, jnp.float32, jnp.int32, jnp.float32]
        arguments = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, types, strict=True)]
        return jax.jit(value_and_gradients).lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    # 1024 rows of 64 for each of 60 more experts would be 15 MB; their weights are 0.5 MB.
    assert temporary(64) - temporary(4) < 60 * 32 * 64 * 4 * 2 + 100_000


def choices(tokens=11, top_k=3, experts=6, seed=1):
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)


@pytest.mark.parametrize("masked", [False, True])
def test_assignment(masked):
    indices = choices()
    mask = np.random.default_rng(2).random(len(indices)) < 0.6 if masked else np.ones(len(indices), bool)
    assignment = assign(jnp.asarray(indices), 6, token_mask=jnp.asarray(mask) if masked else None)
    expected = [
        token * 3 + k for e in range(6) for token in range(len(indices)) for k in range(3)
        if mask[token] and indices[token, k] == e
    ]  # fmt: skip
    expected += [token * 3 + k for token in range(len(indices)) for k in range(3) if not mask[token]]
    np.testing.assert_array_equal(assignment.order, expected)
    np.testing.assert_array_equal(np.asarray(assignment.order)[np.asarray(assignment.inverse)], np.arange(33))
    np.testing.assert_array_equal(assignment.group_sizes, np.bincount(indices[mask].ravel(), minlength=6))
    assert assignment.order.dtype == assignment.inverse.dtype == assignment.group_sizes.dtype == jnp.int32


def test_dispatch_and_combine_against_loops():
    rng = np.random.default_rng(3)
    indices = choices()
    x = rng.standard_normal((11, 4)).astype(np.float32)
    weights = rng.random((11, 3)).astype(np.float32)
    rows = rng.standard_normal((33, 4)).astype(np.float32)
    assignment = assign(jnp.asarray(indices), 6)
    order = np.asarray(assignment.order)

    y, pull_dispatch = jax.vjp(lambda x: dispatch(x, assignment), x)
    z, pull_combine = jax.vjp(lambda rows, weights: combine(rows, weights, assignment), rows, weights)
    (dx,), (drows, dweights) = pull_dispatch(rows), pull_combine(x)

    token, choice = order // 3, order % 3
    expected = {"dx": np.zeros((11, 4)), "z": np.zeros((11, 4)), "drows": np.zeros((33, 4)), "dw": np.zeros((11, 3))}
    for i in range(33):
        t, k = token[i], choice[i]
        np.testing.assert_array_equal(y[i], x[t])
        expected["dx"][t] += rows[i]
        expected["z"][t] += np.float64(weights[t, k]) * rows[i]
        expected["drows"][i] = np.float64(weights[t, k]) * x[t]
        expected["dw"][t, k] = np.float64(rows[i]) @ x[t]
    for got, name in ((dx, "dx"), (z, "z"), (drows, "drows"), (dweights, "dw")):
        close(got, expected[name], 1e-6)


def test_experts_against_numpy():
    layer = Experts(7, num_experts=4, expert_size=5, std=0.5, key=jax.random.key(0))
    x, _, sizes, _ = problem([3, 0, 17, 9])
    gate, up, down = (np.asarray(w, np.float64) for w in (layer.gate_weight, layer.up_weight, layer.down_weight))
    expected = np.zeros((ROWS, 7))
    for row, e in enumerate(np.repeat(np.arange(4), sizes)):
        g = gate[e] @ x[row]
        expected[row] = down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ x[row]))
    close(layer(jnp.asarray(x), jnp.asarray(sizes)), expected, 1e-6)


def test_experts_draws_and_errors():
    layer = Experts(64, num_experts=4, expert_size=32, dtype=jnp.bfloat16, key=jax.random.key(0))
    for weight in jax.tree.leaves(layer):
        assert eqx.is_array(weight) and weight.dtype == jnp.bfloat16
        assert abs(float(jnp.std(weight.astype(jnp.float32))) - 0.02) < 1e-3
    assert len({float(weight.ravel()[0]) for weight in jax.tree.leaves(layer)}) == 3
    with pytest.raises(ValueError, match="expert_size.*0"):
        Experts(8, num_experts=4, expert_size=0, key=jax.random.key(0))
