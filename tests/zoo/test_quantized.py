import functools
import itertools
import threading
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from overspill.zoo.quantized import PIECE, cast, castable, dequantise_fp8, dequantise_mxfp4, pieces

BF16, E4M3, E5M2, E8M0 = (
    np.dtype(d) for d in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu)
)
F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
FLOATS = [BF16, F16, F32, F64]


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def quiet(function):
    """The comparisons may meet signalling NaNs and overflow; what they compare has to do so without a warning."""

    @functools.wraps(function)
    def run(*arguments):
        with np.errstate(all="ignore"):
            return function(*arguments)

    return run


@quiet
def numpy_cast(array, dtype):
    return array.astype(dtype)


@quiet
def same(actual, expected):
    """Equal bit for bit, but that any NaN is as good as any other."""
    nan = np.isnan(expected.astype(F64))
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert np.array_equal(np.isnan(actual.astype(F64)), nan)
    keep = ~nan.reshape(-1)
    assert np.array_equal(bits(actual)[keep], bits(expected)[keep])


@quiet
def nearest(values, dtype):
    """Rounding by search among all values of a 16-bit format: their midpoints are exact in float64."""
    positive = np.arange(2**15, dtype=np.uint16).view(dtype).astype(F64)
    positive = positive[np.isfinite(positive)]
    step = positive[-1] - positive[-2]
    middles = np.append((positive[1:] + positive[:-1]) / 2, positive[-1] + step / 2)
    size = np.abs(values.astype(F64))
    below, above = np.searchsorted(middles, size, "left"), np.searchsorted(middles, size, "right")
    codes = np.where((below != above) & (below % 2 == 1), above, below)  # on a midpoint, the even neighbour
    codes = codes.astype(np.uint16) | np.signbit(values).astype(np.uint16) << 15
    rounded = codes.view(dtype)  # one beyond the largest number is infinity
    return np.where(np.isnan(values.astype(F64)), dtype.type(np.nan), rounded)


@quiet
def awkward(dtype, rng, count=1 << 17):
    """Random bits, ties of bfloat16 and float16 and their neighbours, and what lies at the ends of the formats."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    random = rng.integers(0, 2 ** (8 * dtype.itemsize), count, unsigned).view(dtype)
    usual = (rng.normal(size=count) * 2.0 ** rng.integers(-26, 18, count)).astype(dtype)
    ends = [0.0, 1.0, 65504, 65519.996, 65520, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 2.0**-14, 3.3895314e38]
    ends += [3.39617e38, 3.4028235e38, 2.0**-126, 2.0**-133, 2.0**-134, 2.0**-149, np.inf, np.nan]
    with np.errstate(all="ignore"):
        ties = [numpy_cast(rng.integers(0, 2**15, 4096, np.uint16).view(d).astype(F64), dtype) for d in (BF16, F16)]
        ties = [t * (1 + sign * 2.0 ** -(m + 2)) for t, m in zip(ties, (7, 10), strict=True) for sign in (1, -1)]
        special = np.concatenate([np.array(ends), *ties]).astype(dtype)
    special = special[np.isfinite(special.astype(F64))]
    around = [(bits(special) + np.array(k).astype(unsigned)).view(dtype) for k in (-1, 0, 1)]
    extra = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0]).astype(dtype)
    every = np.concatenate([random, usual, *around, extra])
    return np.concatenate([every, (bits(every) ^ unsigned.type(1 << (8 * dtype.itemsize - 1))).view(dtype)])


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_cast_rounds_as_it_should(source, target):
    given = awkward(source, np.random.default_rng(0))
    if source.itemsize == 2:
        given = np.concatenate([np.arange(2**16, dtype=np.uint16).view(source), given])
    out = np.empty(given.shape, target)
    cast(given, out)
    if target.itemsize == 2:
        same(out, nearest(given, target))
    if (source, target) != (F64, BF16):  # where ml_dtypes rounds twice
        expected = numpy_cast(given, target)
        same(out, expected)
        if {source, target} == {F32, BF16}:
            assert np.array_equal(bits(out), bits(expected))  # NaNs too


def test_cast_of_pieces_without_anything_special():
    """Random bits always hold a NaN; ordinary weights never do."""
    rng = np.random.default_rng(1)
    for source, target in itertools.product(FLOATS, FLOATS):
        given = (rng.normal(size=3 * PIECE + 17) * 10.0 ** rng.integers(-8, 2, 3 * PIECE + 17)).astype(source)
        out = np.empty(given.shape, target)
        cast(given, out)
        with np.errstate(all="ignore"):
            same(out, nearest(given, target) if target.itemsize == 2 else given.astype(target))


def test_double_rounding():
    given = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8 - 2.0**-40, -(1 + 3 * 2.0**-8 - 2.0**-50)])
    out = np.empty(3, BF16)
    cast(given, out)
    assert out.astype(float).tolist() == [1 + 2.0**-7, 1, -(1 + 2.0**-7)]


SHAPES = [(), (1,), (0,), (3, 0, 2), (70_001,), (2, 70_001), (300, 401), (5, 1, 90, 301), (1, 4097), (70_001, 2)]


def arrangements(shape, dtype, rng):
    """Arrays of a shape and dtype as they can lie in memory."""

    def blank(shape):
        return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]

    yield "contiguous", blank(shape)
    yield "transposed", blank(shape[::-1]).T
    yield (
        "last two swapped",
        blank((*shape[:-2], *shape[-2:][::-1])).swapaxes(-1, -2) if len(shape) > 1 else blank(shape),
    )
    yield "every second", blank((*shape[:-1], 2 * shape[-1]))[..., 1::2] if shape else blank(())
    yield "backwards", blank(shape)[::-1] if shape else blank(())
    raw = rng.integers(0, 256, 1 + dtype.itemsize * int(np.prod(shape)), np.uint8)
    yield "unaligned", raw[1:].view(dtype).reshape(shape) if raw.size > 1 else blank(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cast_between_all_arrangements(shape):
    rng = np.random.default_rng(len(shape))
    for source, target in [(F32, BF16), (BF16, F32), (F16, BF16), (F16, F32), (F64, BF16), (BF16, BF16), (F32, F16)]:
        for (_, given), (kind, out) in itertools.product(
            arrangements(shape, source, rng), arrangements(shape, target, rng)
        ):
            cast(given, out)
            expected = nearest(given, target) if source == F64 else numpy_cast(given, target)
            same(np.array(out), np.array(expected)), kind


def test_cast_leaves_the_rest_alone():
    out = np.full((40, 300, 6), 7, BF16)
    cast(np.ones((40, 300, 2), F16), out[:, :, 2:4])
    assert (out[:, :, :2] == 7).all() and (out[:, :, 4:] == 7).all() and (out[:, :, 2:4] == 1).all()


def test_other_dtypes_are_copied_only():
    rng = np.random.default_rng(0)
    for dtype in [np.dtype(d) for d in (np.bool_, np.int8, np.uint16, np.int64, E4M3, E5M2, E8M0)]:
        given = rng.integers(0, 2, (65, 300)).astype(np.uint8).astype(dtype)
        out = np.empty((300, 65), dtype).T
        cast(given, out)
        assert np.array_equal(bits(out), bits(given)) and castable(dtype, dtype)
        for other in FLOATS:
            assert not castable(dtype, other) and not castable(other, dtype)
            with pytest.raises(ValueError, match=f"{dtype} can't be cast to {other}: equal dtypes, or two of float64"):
                cast(given, np.empty(given.shape, other))
    with pytest.raises(ValueError, match=r"shape \(3,\) can't be written into one of shape \(1, 3\)"):
        cast(np.ones(3), np.ones((1, 3)))


def test_pieces_cut_every_array():
    rng = np.random.default_rng(2)
    for _ in range(300):
        shape = tuple(rng.integers(0, 9, rng.integers(0, 5)).tolist())
        limit = int(rng.integers(1, 40))
        count = np.zeros(shape, int)
        order = []
        for index in pieces(shape, limit):
            assert 0 < count[index].size <= limit and count[index].ndim == len(shape)
            count[index] += 1
            order += np.arange(count.size).reshape(shape)[index].reshape(-1).tolist()
        assert (count == 1).all() and order == sorted(order)
    assert [i[0].stop - i[0].start for i in pieces((100,), 99)] == [50, 50]


# ---- float8


def decoded(code, exponent_bits, mantissa_bits, bias, finite):
    """A float8 from its three fields."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if finite and code & 0x7F == 0x7F:
        return np.nan
    if not finite and exponent == (1 << exponent_bits) - 1:
        return sign * np.inf if mantissa == 0 else np.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


TABLES = {
    E4M3: np.array([decoded(c, 4, 3, 7, True) for c in range(256)], F32),
    E5M2: np.array([decoded(c, 5, 2, 15, False) for c in range(256)], F32),
}


def reference_fp8(weight, scale, block, dtype):
    """Element by element: which scale is the element's, and one product in float32."""
    rows, columns = weight.shape
    scale = scale.astype(F32)
    each = scale[np.arange(rows)[:, None] // block[0], np.arange(columns)[None] // block[1]]
    with np.errstate(all="ignore"):
        product = TABLES[weight.dtype][weight.view(np.uint8)] * each
        return product.astype(dtype)


def random_fp8(shape, dtype, rng, special=False):
    codes = rng.integers(0, 256, shape, np.uint8)
    if not special:
        codes[np.isin(codes & 0x7F, np.arange(0x7C if dtype == E5M2 else 0x7F, 0x80))] = 0x81
    return codes.view(dtype)


def test_codes_of_float8():
    codes = np.array([[0x38, 0x7E, 0x7F, 0xFF, 0x01, 0x08, 0x80, 0xB8]], np.uint8)
    out = np.empty(codes.shape, F32)
    dequantise_fp8(codes.view(E4M3), np.array(1.0, F32), None, out)
    assert out[0, [0, 1, 4, 5, 7]].tolist() == [1.0, 448.0, 2.0**-9, 2.0**-6, -1.0]
    assert np.isnan(out[0, 2:4]).all() and np.signbit(out[0, 6])
    dequantise_fp8(
        np.array([[0x3C, 0x7B, 0x7C, 0xFC, 0x7D, 1, 4, 0xBC]], np.uint8).view(E5M2), np.ones(1, F32), None, out
    )
    assert out[0, [0, 1, 2, 3, 5, 6, 7]].tolist() == [1, 57344, np.inf, -np.inf, 2.0**-16, 2.0**-14, -1]
    assert np.isnan(out[0, 4])


def test_every_code_alone():
    """NaN and infinity are noticed without each other."""
    for dtype, table in TABLES.items():
        for code in range(256):
            out = np.empty((2, 3), F32)
            dequantise_fp8(np.full((2, 3), code, np.uint8).view(dtype), np.array(1.5, F32), None, out)
            same(out, np.full((2, 3), table[code] * np.float32(1.5)))
    for code in range(0x7C00, 0x7C02):
        out = np.empty(1, F32)
        cast(np.full(1, code, np.uint16).view(F16), out)
        assert np.isinf(out[0]) if code == 0x7C00 else np.isnan(out[0])


@pytest.mark.parametrize("special", [False, True], ids=["ordinary", "with NaN"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_blocks(dtype, special):
    rng = np.random.default_rng(3 + special)
    shapes = [(576, 7168, 128, 128), (1, 1, 128, 128), (130, 70_000, 64, 128), (129, 257, 128, 128), (9000, 3, 2, 2)]
    for _ in range(25):
        shapes.append(tuple(int(n) for n in (*rng.integers(1, 300, 2), *rng.integers(1, 140, 2))))
    for rows, columns, *block in shapes:
        grid = (-(-rows // block[0]), -(-columns // block[1]))
        scale = np.exp(rng.normal(size=grid) * 2).astype(rng.choice([F32, F64, F16, BF16]))
        if rng.random() < 0.3:
            scale = rng.integers(0, 255, grid, np.uint8).view(E8M0)
        weight = random_fp8((rows, columns), dtype, rng, special)
        for target in [FLOATS[rng.integers(4)]] if rows * columns < 10**5 else [F32, BF16]:
            out = np.empty((rows, columns), target)
            dequantise_fp8(weight, scale, tuple(block), out)
            same(out, reference_fp8(weight, scale, block, target))


def test_grid_of_an_uneven_matrix():
    """576 x 7168 of DeepSeek-V3: the fifth row of scales is for 64 rows only."""
    weight = np.full((576, 7168), 0x38, np.uint8).view(E4M3)
    scale = np.arange(1, 5 * 56 + 1, dtype=F32).reshape(5, 56)
    out = np.empty(weight.shape, F32)
    dequantise_fp8(weight, scale, (128, 128), out)
    for row, column in [(0, 0), (127, 127), (128, 127), (127, 128), (511, 7167), (512, 0), (575, 7167)]:
        assert out[row, column] == 56 * (row // 128) + column // 128 + 1


@pytest.mark.parametrize(
    "extreme", [0.0, 2.0**7, 2.0**15, 3e38, 2.0**-149, np.inf, np.nan, -0.25, -(2.0**9), -(2.0**30)]
)
def test_extreme_scales(extreme):
    rng = np.random.default_rng(4)
    for dtype in (E4M3, E5M2):
        weight = random_fp8((300, 300), dtype, rng)
        scale = rng.random((3, 3)).astype(F32)
        scale[1, 1] = extreme
        out = np.empty(weight.shape, F32)
        dequantise_fp8(weight, scale, (128, 128), out)
        same(out, reference_fp8(weight, scale, (128, 128), F32))


def test_one_scale_for_more_than_a_block():
    rng = np.random.default_rng(5)
    experts, rows, columns = 3, 200, 500
    weight = random_fp8((experts, rows, columns), E4M3, rng)
    wide = TABLES[E4M3][weight.view(np.uint8)]
    out = np.empty(weight.shape, F32)
    for shape in [(), (1,), (1, 1), (1, 1, 1), (experts,), (experts, 1), (experts, 1, 1)]:
        for block in (None, (128, 128), (7, 9)):
            scale = np.asarray(rng.random(shape), F32)
            dequantise_fp8(weight, scale, block, out)
            lead = scale.size > 1
            same(out, wide * (scale.reshape(experts, 1, 1) if lead else scale.reshape(1, 1, 1)))
    for shape in [(experts, rows), (experts, rows, 1)]:
        for block in (None, (64, 128)):
            scale = rng.random(shape).astype(F32)
            dequantise_fp8(weight, scale, block, out)
            same(out, wide * scale.reshape(experts, rows, 1))
    scale = rng.random((experts, 4, 4)).astype(F32)
    dequantise_fp8(weight, scale, (64, 128), out)
    for e in range(experts):
        same(out[e], reference_fp8(weight[e], scale[e], (64, 128), F32))
    for shape in [(rows,), (rows, 1)]:
        scale = rng.random(shape).astype(F32)
        dequantise_fp8(weight[0], scale, (128, 128), out[0])
        same(out[0], wide[0] * scale.reshape(rows, 1))
    vector = np.empty(rows, BF16)
    dequantise_fp8(weight[0, :, 0], np.array([0.5], F32), (128, 128), vector)
    same(vector, (wide[0, :, 0] / 2).astype(BF16))


def test_deeper_stacks_and_empty_ones():
    rng = np.random.default_rng(6)
    weight = random_fp8((2, 3, 70, 90), E5M2, rng)
    scale = rng.random((2, 3, 3, 2)).astype(F32)
    out = np.empty(weight.shape, BF16)
    dequantise_fp8(weight, scale, (32, 64), out)
    for i, j in np.ndindex(2, 3):
        same(out[i, j], reference_fp8(weight[i, j], scale[i, j], (32, 64), BF16))
    for shape, grid in [((0, 5), (0, 1)), ((5, 0), (1, 0)), ((0, 4, 4), (0, 1, 1)), ((4, 0), ())]:
        dequantise_fp8(np.empty(shape, E4M3), np.ones(grid, F32), (8, 8), np.empty(shape, F32))


def test_strided_weights_and_targets():
    rng = np.random.default_rng(7)
    for (_, weight), (kind, out), target in itertools.product(
        arrangements((150, 260), E4M3, rng), [(k, i) for i, k in enumerate(range(6))], [F32, BF16]
    ):
        out = list(arrangements((150, 260), target, rng))[kind][1]
        scale = rng.random((3, 5)).astype(F32)
        dequantise_fp8(weight, scale, (64, 64), out)
        same(np.array(out), reference_fp8(np.array(weight), scale, (64, 64), target))


def test_wrong_arguments_of_float8():
    weight, out = np.zeros((576, 7168), E4M3), np.zeros((576, 7168), BF16)
    with pytest.raises(ValueError, match=r"\[4, 56\], but a float8 weight \[576, 7168\] in blocks of 128x128 "):
        dequantise_fp8(weight, np.ones((4, 56), F32), (128, 128), out)
    for shape in [(5, 116), (56, 5), (7168,), (1, 7168), (5,), (2, 5, 56), (0, 0), (576, 2)]:
        with pytest.raises(ValueError, match=r"goes with one of \[5, 56\], \[\], \[1\], \[1, 1\], \[576\], \[576, 1\]"):
            dequantise_fp8(weight, np.ones(shape, F32), (128, 128), out)
    with pytest.raises(ValueError, match=r"\[2, 3, 4\] in .* goes with one of \[2, 1, 1\], \[2\], .* \[2, 3, 1\]"):
        dequantise_fp8(np.zeros((2, 3, 4), E4M3), np.ones((3, 1), F32), (128, 128), np.zeros((2, 3, 4), F32))
    with pytest.raises(ValueError, match=r"\[5, 56\], but .* \[576, 7168\] goes with one of \[\], \[1\]"):
        dequantise_fp8(weight, np.ones((5, 56), F32), None, out)
    for bad in (np.uint8, np.int8, BF16):
        with pytest.raises(ValueError, match=f"one of float8_e4m3fn, float8_e5m2, not {np.dtype(bad)}"):
            dequantise_fp8(weight.view(np.uint8).astype(bad), np.ones((5, 56), F32), (128, 128), out)
    for bad in (np.int32, E4M3, np.uint8):
        with pytest.raises(ValueError, match=f"the scale of a float8 weight .* not {np.dtype(bad)}"):
            dequantise_fp8(weight, np.ones((5, 56), bad), (128, 128), out)
    for bad in ((0, 128), (128,), (128, -1)):
        with pytest.raises(ValueError, match="two positive numbers"):
            dequantise_fp8(weight, np.ones((5, 56), F32), bad, out)
    for bad in (np.zeros((7168, 576), BF16), np.zeros((576, 7168), np.int16), np.zeros((576, 7168), E4M3)):
        with pytest.raises(ValueError, match=r"come out as \[576, 7168\] of one of float64"):
            dequantise_fp8(weight, np.ones((5, 56), F32), (128, 128), bad)


# ---- MXFP4


def reference_mxfp4(blocks, scales):
    """Nibble by nibble, in Python's own numbers."""
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    out = np.empty((*blocks.shape[:-1], 32))
    for place in np.ndindex(blocks.shape):
        byte, scale = int(blocks[place]), int(scales[place[:-1]])
        for half, code in enumerate((byte % 16, byte // 16)):
            value = table[code % 8] * (-1 if code >= 8 else 1)
            out[(*place[:-1], 2 * place[-1] + half)] = np.nan if scale == 255 else value * 2.0 ** (scale - 127)
    return out.reshape(*blocks.shape[:-2], 32 * blocks.shape[-2])


def random_mxfp4(shape, rng, low=90, high=140):
    return rng.integers(0, 256, (*shape, 16), np.uint8), rng.integers(low, high, shape, np.uint8)


@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_mxfp4(target):
    rng = np.random.default_rng(8)
    cases = [
        random_mxfp4(shape, rng) for shape in [(1,), (3,), (2, 3), (4, 6, 5), (2, 2, 3, 2), (5, 1), (0, 2), (2, 0)]
    ]
    cases.append((np.arange(256, dtype=np.uint8).reshape(16, 1, 16), np.full((16, 1), 127, np.uint8)))
    cases.append((np.tile(np.arange(0, 256, 16, dtype=np.uint8), (256, 1)), np.arange(256, dtype=np.uint8)))
    cases.append(random_mxfp4((4, 4), rng, 0, 256))
    for blocks, scales in cases:
        expected = reference_mxfp4(blocks, scales)
        with np.errstate(all="ignore"):
            expected = expected.astype(target) if target == F64 else expected.astype(F32).astype(target)
        for view in (np.uint8, E8M0):
            out = np.empty(expected.shape, target)
            dequantise_mxfp4(blocks, scales.view(view), out)
            if target == F64:
                with np.errstate(all="ignore"):
                    out, expected = out.astype(F32), expected.astype(F32)
            same(out, expected)


def test_order_of_nibbles():
    blocks = np.zeros((1, 1, 16), np.uint8)
    blocks[0, 0, :2] = [0x21, 0xF9]
    out = np.empty((1, 32), F32)
    dequantise_mxfp4(blocks, np.array([[128]], np.uint8), out)
    assert out[0, :5].tolist() == [1.0, 2.0, -1.0, -12.0, 0.0]


def test_mxfp4_in_many_pieces_and_strided():
    rng = np.random.default_rng(9)
    blocks, scales = random_mxfp4((3, 40, 90), rng)
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(3, 40, 90 * 32)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    with np.errstate(all="ignore"):
        expected = (table[codes] * 2.0 ** (np.repeat(scales, 32, -1).astype(int) - 127)).astype(F32)
    for target in (F32, BF16):
        whole = np.empty(expected.shape, target)
        dequantise_mxfp4(blocks, scales, whole)
        same(whole, expected.astype(target))
        for half in (0, 1):
            gates = np.empty((3, 20, 90 * 32), target)
            dequantise_mxfp4(blocks[:, half::2], scales[:, half::2], gates)
            same(gates, expected[:, half::2].astype(target))
        turned = np.empty((3, 90 * 32, 40), target)
        dequantise_mxfp4(blocks, scales, turned.swapaxes(1, 2))
        same(np.array(turned.swapaxes(1, 2)), expected.astype(target))
    long_blocks, long_scales = random_mxfp4((2, 5000), rng)
    out = np.empty((2, 160_000), BF16)
    dequantise_mxfp4(long_blocks, long_scales, out)
    part = np.empty((1, 64), BF16)
    dequantise_mxfp4(long_blocks[1:, 4998:], long_scales[1:, 4998:], part)
    same(out[1:, -64:], part)


def test_mxfp4_against_transformers():
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    rng = np.random.default_rng(10)
    blocks, scales = random_mxfp4((3, 24, 4), rng)
    theirs = mxfp4.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.bfloat16)
    out = np.empty((3, 24, 128), BF16)
    dequantise_mxfp4(blocks, scales, out)
    assert np.array_equal(out.swapaxes(1, 2).astype(F32), theirs.float().numpy())


def test_wrong_arguments_of_mxfp4():
    blocks, scales, out = np.zeros((2, 3, 4, 16), np.uint8), np.zeros((2, 3, 4), np.uint8), np.zeros((2, 3, 128), BF16)
    for bad in (blocks.astype(np.int8), blocks[..., :8], blocks[0, 0, 0], blocks.astype(np.uint16)):
        with pytest.raises(ValueError, match=r"MXFP4 blocks are uint8 \[..., groups, 16\], not"):
            dequantise_mxfp4(bad, scales, out)
    for bad in (scales[0], scales.astype(np.int32), scales[..., None], scales.swapaxes(1, 2)):
        with pytest.raises(ValueError, match=r"scales of MXFP4 blocks \[2, 3, 4, 16\] are uint8 .* \[2, 3, 4\], not"):
            dequantise_mxfp4(blocks, bad, out)
    for bad in (out.swapaxes(1, 2), out.astype(np.int16), out[..., :64]):
        with pytest.raises(ValueError, match=r"come out as \[2, 3, 128\]"):
            dequantise_mxfp4(blocks, scales, bad)


# ---- all of them


def test_memory_is_bounded():
    rng = np.random.default_rng(11)
    codes = rng.integers(0, 0x7C, (2048, 2048), np.uint8)
    half = rng.normal(size=(2048, 2048)).astype(F16)
    blocks, scales = random_mxfp4((2048, 64), rng)
    out, turned = np.empty((2048, 2048), BF16), np.empty((2048, 2048), BF16).T
    dequantise_mxfp4(blocks, scales, out)  # makes its table
    calls = {
        "fp8": lambda o: dequantise_fp8(codes.view(E4M3), np.ones((16, 16), F32), (128, 128), o),
        "mxfp4": lambda o: dequantise_mxfp4(blocks, scales, o),
        "half": lambda o: cast(half, o),
        "double": lambda o: cast(np.broadcast_to(np.float64(0.1), (2048, 2048)), o),
        "strided": lambda o: cast(np.broadcast_to(np.float32(0.1), (2048, 2048)), o),
    }
    for name, call in calls.items():
        for target in (out, turned):
            tracemalloc.start()
            call(target)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 2 << 20, (name, peak)  # the arrays have 8 MiB


def test_two_threads_do_not_disturb_each_other():
    rng = np.random.default_rng(12)
    codes, scale = random_fp8((512, 700), E4M3, rng), rng.random((4, 6)).astype(F32)
    blocks, scales = random_mxfp4((512, 20), rng)
    half = rng.normal(size=(512, 640)).astype(F16)

    def work(results):
        for _ in range(5):
            fp8, fp4, wide = np.empty((512, 700), BF16), np.empty((512, 640), BF16), np.empty((512, 640), F32)
            dequantise_fp8(codes, scale, (128, 128), fp8)
            dequantise_mxfp4(blocks, scales, fp4)
            cast(half, wide)
            results.append(b"".join(a.tobytes() for a in (fp8, fp4, wide)))

    results: list[bytes] = []
    threads = [threading.Thread(target=work, args=(results,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 15 and len(set(results)) == 1
