"""Arrays filled from the tensors of a folder: in place, piece by piece, with no second copy in memory.

Reading starts from our arrays, not from the files: `Reader.read(leaf, index)` gives any block of one, so that a device
which holds only a block reads only that. Plain numbers go straight from a file to their place; quantised ones are
looked at where the system has mapped them, and let go of.
"""

import concurrent.futures
import functools
import itertools
import math
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .quantized import cast, dequantise_fp8, dequantise_mxfp4
from .safetensors_header import BadFile
from .safetensors_io import SafetensorsFile
from .weight_index import read_index
from .weight_plan import MXFP4_VALUES, PLAIN, Equal, Fill, Plan, Problems, Tensor, is_leftover

# Bytes of a tensor that one thread copies at a time.
_CHUNK = 16 * 2**20
# Arrays smaller than this aren't worth a thread.
_SMALL = 2**20
_THREADS = min(4, os.cpu_count() or 1)
# XLA takes memory of other owners as its own only where it is aligned as its own would be.
_ALIGNMENT = 64


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A new array that JAX on a CPU can adopt without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + size].view(dtype).reshape(shape)


class Files:
    """The safetensors files of a folder, opened as they are needed: a context manager.

    `tensors` are those that can be read, by their name in the files; `lost` the names of those that the folder should
    have and damage has taken. Everything that is damaged is added to `problems`.
    """

    def __init__(self, folder: pathlib.Path, problems: Problems):
        self._open: dict[str, SafetensorsFile] = {}
        self._lock = threading.Lock()
        try:
            index = read_index(folder, partial=True)
        except BadFile as error:
            problems.add("damaged", str(error))
            problems.check()
        if index.damage:
            problems.add("damaged", index.damage)
        self._paths, found = index.paths, index.tensors
        self.tensors = {name: Tensor(name, index.files[name], info.dtype, info.shape) for name, info in found.items()}
        self.lost = set(index.files) - set(found)
        for name, file in index.absent.items():
            problems.add("damaged", f"{name} isn't in {file}, where the index says it is")
        for name, files in index.unlisted.items():
            if name not in index.files and not is_leftover(name):
                problems.add("unexpected", f"{name} is in {files[0]}, and the index doesn't list it")

    def file(self, tensor: Tensor) -> SafetensorsFile:
        """The file that holds `tensor`."""
        with self._lock:
            if tensor.file not in self._open:
                self._open[tensor.file] = SafetensorsFile(self._paths[tensor.file])
            return self._open[tensor.file]

    def view(self, tensor: Tensor) -> np.ndarray:
        """The tensor in its file: no copy, not to be written to; `release` it when done."""
        return self.file(tensor).read(tensor.name)

    def release(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self.file(tensor).release(tensor.name)

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


Job = Callable[[], None]


class Reader:
    """Reads the arrays of a plan. What turns out to be wrong with values is added to `problems`."""

    def __init__(self, files: Files, plan: Plan, block: tuple[int, int] | None, problems: Problems):
        self.files, self.plan, self.block, self.problems = files, plan, block, problems
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "weights")

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: Any) -> None:
        self._threads.shutdown(cancel_futures=True)

    def read(self, path: str, shape: tuple[int, ...], dtype: Any, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The array at `path` of a model, in new memory, or the block of it that `index` says.

        `shape` is the whole array's; `index` has a slice for each axis, as `jax.make_array_from_callback` gives them.
        """
        bounds = [s.indices(n)[:2] for s, n in zip(index or (slice(None),) * len(shape), shape, strict=True)]
        out = empty(tuple(high - low for low, high in bounds), dtype)
        jobs, filled = [], 0
        for fill in self.plan.fills[path]:
            leading = list(zip(fill.index, bounds, strict=False))
            if not all(low <= i < high for i, (low, high) in leading):
                continue
            part = out[(*(i - low for i, (low, _) in leading), ...)]
            filled += part.size
            jobs += self._jobs(fill, part, bounds[len(leading) :])
        # Pieces don't overlap, each having an index of its own, so this says that each element is filled once.
        assert filled == out.size, f"{path}: {filled} of {out.size} elements are filled"
        if out.nbytes < _SMALL:
            for job in jobs:
                job()
        else:
            for _ in self._threads.map(lambda job: job(), jobs):
                pass
        return out

    def _jobs(self, fill: Fill, out: np.ndarray, bounds: list[tuple[int, int]]) -> Iterator[Job]:
        """What fills `out`, the block `bounds` of a piece, in chunks for several threads."""
        low, high = bounds[0] if bounds else (0, 1)
        rest = tuple(slice(a, b) for a, b in bounds[1:])
        unit = self.block[0] if self.block and fill.scale is not None and out.ndim == 2 else 1
        # Chunks of float8 matrices begin where blocks do.
        step = max(1, _CHUNK * (high - low) // max(out.nbytes, 1) // unit) * unit
        edges = [low, *range((low // step + 1) * step, high, step), high]
        left = _Countdown(len(edges) - 1)
        for a, b in itertools.pairwise(edges):
            part, index = (out[a - low : b - low], (slice(a, b), *rest)) if bounds else (out, ())
            yield functools.partial(self._fill, fill, part, index, left)

    def _fill(self, fill: Fill, out: np.ndarray, index: tuple[slice, ...], left: "_Countdown") -> None:
        """Fills `out` with the block `index` of a piece."""
        layout, tensor, scale = fill.layout, fill.tensor, fill.scale
        if scale is None:
            there = layout.index(index, fill.shape[1] if layout.parts > 1 else 0)
            target = out.swapaxes(-1, -2) if layout.transposed else out
            self.files.file(tensor).read_into(tensor.name, target, there)
            return
        weight, factors = self.files.view(tensor), self.files.view(scale)
        # The byte 255 is no exponent: it stands for what is no number.
        mxfp4 = weight.dtype == np.uint8
        if (factors == 255).any() if mxfp4 else not np.isfinite(factors.astype(np.float32)).all():
            self.problems.add("damaged", f"{scale} in {scale.file}, the scales of {tensor.name}, aren't all finite")
        if mxfp4:
            _fill_mxfp4(layout.view(weight), layout.view(factors), index, out)
        else:
            there = layout.index(index, fill.shape[1] if layout.parts > 1 else 0)
            target = out.swapaxes(-1, -2) if layout.transposed else out
            _fill_float8(weight, factors, self.block, there, target)
        if left.done():
            self.files.release(tensor, scale)

    def equal(self, pair: Equal) -> bool:
        """Whether two tensors hold the same numbers, compared a chunk at a time."""
        if pair.copy.shape != pair.original.shape or any(tensor.dtype not in PLAIN for tensor in pair[:2]):
            return False
        views = [self.files.view(tensor) for tensor in pair[:2]]
        rows = max(1, _CHUNK * len(views[0]) // max(views[0].nbytes, 1))
        same = all(
            np.array_equal(*(view[i : i + rows].astype(np.float32) for view in views), equal_nan=True)
            for i in range(0, len(views[0]), rows)
        )
        self.files.release(*pair[:2])
        return same


class _Countdown:
    """Tells the last of several threads that it is the last."""

    def __init__(self, count: int):
        self._count, self._lock = count, threading.Lock()

    def done(self) -> bool:
        with self._lock:
            self._count -= 1
            return self._count == 0


def _fill_float8(
    weight: np.ndarray,
    scale: np.ndarray,
    block: tuple[int, int] | None,
    index: tuple[slice, ...],
    out: np.ndarray,
) -> None:
    """Fills `out` with `weight[index]`, of a float8 matrix or a stack of them, times its scales.

    Only the blocks of scales that `index` touches are read.
    """
    if weight.ndim > 2:
        for i, expert in enumerate(range(index[0].start, index[0].stop)):
            _fill_float8(weight[expert], scale[expert], block, index[1:], out[i])
        return
    if block is None:
        dequantise_fp8(weight[index], scale[index[0]] if scale.size == len(weight) > 1 else scale, block, out)
        return
    starts = [s.start // b for s, b in zip(index, block, strict=True)]
    stops = [-(-s.stop // b) for s, b in zip(index, block, strict=True)]
    cover = tuple(slice(a * b, min(z * b, n)) for a, z, b, n in zip(starts, stops, block, weight.shape, strict=True))
    size = tuple(s.stop - s.start for s in cover)
    whole = out if size == out.shape else np.empty(size, out.dtype)
    dequantise_fp8(weight[cover], scale[tuple(map(slice, starts, stops))], block, whole)
    if whole is not out:
        inner = tuple(slice(s.start - c.start, s.stop - c.start, s.step) for s, c in zip(index, cover, strict=True))
        cast(whole[inner], out)


def _fill_mxfp4(blocks: np.ndarray, scales: np.ndarray, index: tuple[slice, ...], out: np.ndarray) -> None:
    """Fills `out` with the block `index` of stacked MXFP4 matrices, a matrix at a time."""
    experts, rows, columns = index
    groups = slice(columns.start // MXFP4_VALUES, -(-columns.stop // MXFP4_VALUES))
    start, width = groups.start * MXFP4_VALUES, (groups.stop - groups.start) * MXFP4_VALUES
    cut = width != out.shape[2]
    for i, expert in enumerate(range(experts.start, experts.stop)):
        whole = np.empty((out.shape[1], width), out.dtype) if cut else out[i]
        dequantise_mxfp4(blocks[expert, rows, groups], scales[expert, rows, groups], whole)
        if cut:
            cast(whole[:, columns.start - start : columns.stop - start], out[i])
