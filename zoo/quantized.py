"""Conversions of weights as they are read: between float formats, and from block-scaled float8 and MXFP4.

Everything here writes into an array that exists already, in pieces that stay in a core's cache: memory is bounded by
the pieces. NumPy lets go of the interpreter's lock for each, so that threads can share the work.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

# What a piece has at most, in elements: with its float32 scratch it fits into the second-level cache.
PIECE = 1 << 16
_SMALL = 1 << 12  # elements that aren't worth more than one call
_TILE = (16, 1024)  # of a transposition
_FLOATS = tuple(np.dtype(d) for d in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))
_SCALES = (*_FLOATS, np.dtype(ml_dtypes.float8_e8m0fnu))


class _Small(NamedTuple):
    """How a small float's bits sit in a float32's, once shifted there: all but the exponent's bias is then right."""

    integer: np.dtype  # signed, of the same width
    shift: int
    bias: int
    special: int  # the least magnitude that stands for infinity or NaN

    @property
    def magnitude(self) -> int:
        return int(np.iinfo(self.integer).max)

    @property
    def unit(self) -> np.float32:
        return np.float32(2.0 ** (127 - self.bias))


_HALF = _Small(np.dtype(np.int16), 13, 15, 0x7C00)
_FLOAT8 = {
    np.dtype(ml_dtypes.float8_e4m3fn): _Small(np.dtype(np.int8), 20, 7, 0x7F),
    np.dtype(ml_dtypes.float8_e5m2): _Small(np.dtype(np.int8), 21, 15, 0x7C),
}


def pieces(shape: Sequence[int], limit: int = PIECE) -> Iterator[tuple]:
    """Indices that cut an array of `shape` into pieces of at most `limit` elements, in C order, losing no axis."""
    size = math.prod(shape)
    if size <= limit:
        if size:
            # An empty index would make a scalar of an array without axes.
            yield (slice(None),) * len(shape) or (...,)
        return
    inner = size // shape[0]
    if inner > limit:
        for i in range(shape[0]):
            for rest in pieces(shape[1:], limit):
                yield (slice(i, i + 1), *rest)
        return
    count = -(-shape[0] // (limit // inner))
    step = -(-shape[0] // count)
    for i in range(0, shape[0], step):
        yield (slice(i, min(i + step, shape[0])),) + (slice(None),) * (len(shape) - 1)


def castable(source: np.dtype, target: np.dtype) -> bool:
    """Whether `cast` goes from one dtype to the other: equal ones, or two of float64, float32, bfloat16, float16."""
    return source == target or (source in _FLOATS and target in _FLOATS)


def cast(source: np.ndarray, out: np.ndarray) -> None:
    """Writes `source` into `out`, in `out`'s dtype, rounding once, to nearest and ties to even.

    **Arguments:**

    - `source`, `out`: arrays of one shape, of any strides and alignment. Their dtypes are equal, or both of float64,
      float32, bfloat16 and float16. Memory that the two share is not looked for.

    NaN stays NaN, infinities stay infinite, and what is too large becomes infinite, without a warning. A transposed
    `out` is filled three times as fast as by `np.copyto`. Raises ValueError for other shapes and dtypes: float8 has to
    meet its scales in `dequantise_fp8`.
    """
    if source.shape != out.shape:
        raise ValueError(f"an array of shape {source.shape} can't be written into one of shape {out.shape}")
    if not castable(source.dtype, out.dtype):
        raise ValueError(f"{source.dtype} can't be cast to {out.dtype}: equal dtypes, or two of {_names(_FLOATS)}, can")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if source.dtype == np.float16 and out.dtype in (_FLOATS[1], _FLOATS[3]):
            scratch = np.empty(min(source.size, PIECE), np.float32)
            for index in pieces(source.shape):
                target = out[index]
                wide = _room(target, scratch)
                _widen(source[index], _HALF, wide, _HALF.unit)
                if wide is not target:
                    _copy(wide, target)
        elif source.dtype == np.float64 and out.dtype == ml_dtypes.bfloat16:
            for index in pieces(source.shape, PIECE // 4):  # there are several temporaries
                _copy(_untied(source[index]), out[index])
        else:
            _copy(source, out)


def dequantise_fp8(weight: np.ndarray, scale: np.ndarray, block: Sequence[int] | None, out: np.ndarray) -> None:
    """Writes `float32(weight) * scale` into `out`: a float8 weight with one scale for each block.

    **Arguments:**

    - `weight`: `[..., out, in]`, float8_e4m3fn or float8_e5m2.
    - `scale`: float32, bfloat16, float16, float64 or float8_e8m0fnu. `[..., ceil(out / block[0]), ceil(in / block[1])]`
      with the leading axes of `weight`; or, whatever `block` is, one for each output, `[..., out]` or `[..., out, 1]`,
      one for each matrix, `[...]`, or a single one.
    - `block`: rows and columns that share a scale, such as (128, 128). The last block of an axis may be cut short.
      None where there are no blocks.
    - `out`: the shape of `weight`; float32, bfloat16, float16 or float64. The product is rounded to float32 first.

    The scales multiply, whatever checkpoints call them: DeepSeek-V3's `weight_scale_inv` (its README_WEIGHTS.md and
    `weight_dequant`). Raises ValueError for another dtype, and for a scale of another shape, saying which would do.
    """
    form = _FLOAT8.get(weight.dtype)
    if form is None:
        raise ValueError(f"a float8 weight is one of {_names(_FLOAT8)}, not {weight.dtype}")
    _check_out(weight.shape, out)
    if scale.dtype not in _SCALES:
        raise ValueError(f"the scale of a float8 weight is one of {_names(_SCALES)}, not {scale.dtype}")
    if block is not None and (len(block) != 2 or min(block) < 1):
        raise ValueError(f"a block is (rows, columns), two positive numbers, not {tuple(block)}")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        grid, sizes = _grid(np.atleast_2d(weight).shape, weight.shape, scale, block)
        weight, out = np.atleast_2d(weight), np.atleast_2d(out)
        for index in np.ndindex(weight.shape[:-2]):
            _dequantise_matrix(weight[index], form, grid[index], sizes, out[index])


def dequantise_mxfp4(blocks: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Writes MXFP4 weights into `out`: 4-bit floats (e2m1), of which 32 in a row share a power of two.

    **Arguments:**

    - `blocks`: `[..., groups, 16]` uint8. A byte holds two values, the first in its low half.
    - `scales`: `[..., groups]`, uint8 or float8_e8m0fnu: the exponent plus 127. 255 makes the whole group NaN.
    - `out`: `[..., groups * 32]`; float32, bfloat16, float16 or float64.

    All three may be strided: `blocks[:, 0::2]` are the gates of gpt-oss's interleaved experts, with `scales[:, 0::2]`.
    Exact but where `out`'s dtype hasn't the range. Source: OCP Microscaling Formats 1.0, and transformers'
    `convert_moe_packed_tensors`, which swaps the last two axes at its end where this doesn't. Raises ValueError for
    other shapes and dtypes.
    """
    if blocks.dtype != np.uint8 or blocks.ndim < 2 or blocks.shape[-1] != 16:
        raise ValueError(f"MXFP4 blocks are uint8 [..., groups, 16], not {blocks.dtype} {list(blocks.shape)}")
    if scales.dtype not in (np.uint8, np.dtype(ml_dtypes.float8_e8m0fnu)) or scales.shape != blocks.shape[:-1]:
        raise ValueError(
            f"the scales of MXFP4 blocks {list(blocks.shape)} are uint8 or float8_e8m0fnu {list(blocks.shape[:-1])}, "
            f"not {scales.dtype} {list(scales.shape)}"
        )
    _check_out((*blocks.shape[:-2], blocks.shape[-2] * 32), out)
    table = _pairs(out.dtype)
    scales = scales.view(np.uint8)
    size = min(scales.size, PIECE // 16)
    rows, pairs = np.empty((size, 16), np.uint16), np.empty((size, 16), table.dtype)
    for index in pieces(scales.shape, PIECE // 16):
        shape = scales[index].shape
        row, pair = _shaped(rows, (*shape, 16)), _shaped(pairs, (*shape, 16))
        exponent = np.left_shift(scales[index], 8, dtype=np.uint16)
        np.bitwise_or(blocks[index], exponent[..., None], out=row)
        np.take(table, row, out=pair, mode="clip")
        *lead, last = index
        columns = slice(None) if last.start is None else slice(32 * last.start, 32 * last.stop)
        target = out[(*lead, columns)]
        _copy(pair.view(out.dtype).reshape(target.shape), target)


def _names(dtypes: Sequence[np.dtype] | dict[np.dtype, _Small]) -> str:
    return ", ".join(str(d) for d in dtypes)


def _check_out(shape: tuple[int, ...], out: np.ndarray) -> None:
    if out.shape != tuple(shape) or out.dtype not in _FLOATS:
        raise ValueError(
            f"the weights come out as {list(shape)} of one of {_names(_FLOATS)}, "
            f"but the array for them is {out.dtype} {list(out.shape)}"
        )


def _shaped(scratch: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The beginning of `scratch`, as an array of `shape`."""
    return scratch.reshape(-1)[: math.prod(shape)].reshape(shape)


def _room(target: np.ndarray, scratch: np.ndarray) -> np.ndarray:
    """Where float32 for `target` can be made: in it, or in the beginning of `scratch`."""
    direct = target.dtype == np.float32 and target.flags.c_contiguous
    return target if direct else _shaped(scratch, target.shape)


def _fastest(array: np.ndarray) -> int | None:
    """The axis along which memory runs; None where there is at most one element."""
    axes = [axis for axis in range(array.ndim) if array.shape[axis] > 1]
    return min(reversed(axes), key=lambda axis: abs(array.strides[axis]), default=None)


def _copy(source: np.ndarray, out: np.ndarray) -> None:
    axis, along = _fastest(out), _fastest(source)
    # ml_dtypes converts element by element where there are gaps.
    gaps = source.dtype != out.dtype and along is not None and source.strides[along] != source.itemsize
    if source.size < _SMALL or not (axis != along or gaps):
        np.copyto(out, source, casting="unsafe")
        return
    turned = axis != along and source.shape[axis] * source.shape[along] >= _SMALL
    for index in _tiles(source.shape, axis, along) if turned else pieces(source.shape):
        come = source[index]
        if come.dtype != out.dtype:
            come = come.copy(order="K").astype(out.dtype)
        np.copyto(out[index], come)


def _tiles(shape: tuple[int, ...], axis: int, along: int) -> Iterator[tuple[slice, ...]]:
    """Indices of tiles that are short along the axis where the target is contiguous, and long where the source is.

    NumPy writes one element of a cache line of the target after another line's, and comes back when it is gone. Of a
    tile, the lines are still there.
    """
    steps = [1] * len(shape)
    steps[axis], steps[along] = _TILE
    for start in itertools.product(*(range(0, size, step) for size, step in zip(shape, steps, strict=True))):
        yield tuple(slice(i, i + step) for i, step in zip(start, steps, strict=True))


def _widen(raw: np.ndarray, form: _Small, out: np.ndarray, times: np.ndarray | np.float32) -> None:
    """`raw` as float32, times `times / form.unit`, into the contiguous float32 array `out`."""
    bits = raw.view(form.integer)
    special = np.bitwise_and(bits, form.integer.type(form.magnitude)).max() >= form.special
    # Small floats below their normal range become subnormal float32s on the way, which a process may have turned off.
    if special or not np.float32(2.0**-140) * np.float32(2.0**100):
        np.copyto(out, raw, casting="unsafe")
        np.multiply(out, np.divide(times, form.unit), out=out)
        return
    wide = out.view(np.int32)
    np.copyto(wide, bits)  # the sign fills the upper half
    np.left_shift(wide, form.shift, out=wide)
    np.bitwise_and(wide, np.int32(np.int64(form.magnitude << form.shift) - 2**31), out=wide)
    np.multiply(out, times, out=out)


def _untied(source: np.ndarray) -> np.ndarray:
    """Float64 as float32 that rounds on to bfloat16 as the float64 would: what only the first rounding put halfway
    between two bfloat16s goes back to its side of the middle.
    """
    source = np.asarray(source, order="C")
    near = source.astype(np.float32)
    bits = near.reshape(-1).view(np.uint32)
    ties = np.flatnonzero(np.bitwise_and(bits, 0xFFFF) == 0x8000)
    exact, rounded = (np.abs(array.reshape(-1)[ties]) for array in (source, near))
    bits[ties] += exact > rounded
    bits[ties] -= exact < rounded
    return near


def _grid(
    matrices: tuple[int, ...], shape: tuple[int, ...], scale: np.ndarray, block: Sequence[int] | None
) -> tuple[np.ndarray, tuple[int, int]]:
    """The scales in float32 as `[*lead, blocks, blocks]`, and the size of a block."""
    *lead, rows, columns = matrices
    whole = (max(rows, 1), max(columns, 1))
    fitting = {(): whole, (1,): whole, (1, 1): whole}
    if len(shape) >= 2:
        fitting |= {(rows,): (1, whole[1]), (rows, 1): (1, whole[1])}
    if block is not None:
        blocks = tuple(-(-size // step) for size, step in zip((rows, columns), block, strict=True))
        fitting = {blocks: (int(block[0]), int(block[1]))} | fitting
    wide = scale.astype(np.float32)
    if scale.size == 1:
        return np.broadcast_to(wide.reshape(1, 1), (*lead, 1, 1)), whole
    inner = scale.shape[len(lead) :]
    if scale.shape[: len(lead)] != tuple(lead) or inner not in fitting:
        wanted = ", ".join(str([*lead, *inner]) for inner in fitting)
        of = f" in blocks of {block[0]}x{block[1]}" if block is not None else ""
        raise ValueError(
            f"the scale has shape {list(scale.shape)}, but a float8 weight {list(shape)}{of} goes with one of {wanted}"
        )
    # Sizes of one block are those of the first form that fits: two forms of one shape mean the same.
    return wide.reshape(*lead, *inner, *(1,) * (2 - len(inner))), fitting[inner]


def _dequantise_matrix(
    weight: np.ndarray, form: _Small, scale: np.ndarray, block: tuple[int, int], out: np.ndarray
) -> None:
    rows, columns = weight.shape
    if not weight.size:
        return
    limit = max(PIECE // columns, 1)
    # One row of blocks after the other, in pieces; or several at once, where one is too little to be worth a call.
    span = block[0] if block[0] * columns >= PIECE // 8 else limit // block[0] * block[0]
    step = min(limit, span)
    scratch = np.empty(min(step, rows) * columns, np.float32)
    # The exponent's bias goes into the scales, where that can't overflow them.
    unit = form.unit if np.abs(scale).max() < 2.0**form.bias else np.float32(1)
    for base in range(0, rows, span):
        end = min(base + span, rows)
        times = _spread(scale[base // block[0] : -(-end // block[0])] * unit, block, end - base, columns)
        for start in range(base, end, step):
            raw, target = weight[start : min(start + step, end)], out[start : min(start + step, end)]
            wide = _room(target, scratch)
            if unit == form.unit:
                _widen(raw, form, wide, times)
            else:
                _widen(raw, form, wide, form.unit)
                np.multiply(wide, times, out=wide)
            if wide is not target:
                _copy(wide, target)


def _spread(scale: np.ndarray, block: tuple[int, int], rows: int, columns: int) -> np.ndarray:
    """The scales `[blocks, blocks]` of some rows, to be multiplied with `[rows, columns]`."""
    if scale.shape[1] > 1:
        scale = np.repeat(scale, block[1], axis=1)[:, :columns]
    return scale if scale.shape[0] == 1 else np.repeat(scale, block[0], axis=0)[:rows]


@functools.cache
def _pairs(dtype: np.dtype) -> np.ndarray:
    """The two values of every byte under every scale, `[256 * 256]`, each pair in one element twice as wide."""
    positive = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([positive, -positive])
    byte = np.arange(256)
    scale = np.ldexp(1.0, np.arange(256) - 127)
    scale[255] = np.nan
    pairs = np.stack([values[byte & 15], values[byte >> 4]], axis=-1) * scale[:, None, None]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        # Through float32, which holds all of them but the very largest.
        narrow = pairs.astype(np.float32).astype(dtype).reshape(-1)
    table = narrow.view({2: np.uint32, 4: np.uint64, 8: np.complex128}[dtype.itemsize])
    table.setflags(write=False)
    return table
