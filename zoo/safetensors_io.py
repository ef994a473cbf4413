"""Reading and writing safetensors files: bytes of arrays behind a JSON header, and nothing that could be executed.

The stock reader for NumPy can't read float8, and its writer scrambles arrays that aren't in C order. Format:
https://github.com/huggingface/safetensors#format. All numbers are little-endian.
"""

import contextlib
import math
import mmap
import os
import pathlib
import stat
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from .quantized import cast, castable, pieces
from .safetensors_header import DTYPES, MAX_HEADER, BadFile, TensorInfo, encode_header, parse_header, tag_of

_CHUNK = 1 << 19  # bytes read at once where they are to be converted: they stay in the cache
_SAMPLES = 8  # elements of a tensor that are compared once it is written

_Shape = tuple[int, ...]
_Ranges = tuple[range | int, ...]


class SafetensorsFile:
    """A safetensors file, open for reading. The header is read and checked in full, tensors when they are asked for.

    Usable from several threads at once. Close it, or use it as a context manager.

    **Attributes:**

    - `path`
    - `tensors`: the name of every tensor -> `TensorInfo`, in the order of the header.
    - `metadata`: what its writer noted.

    Raises `BadFile` if the header or the size of the file is wrong in any way, and OSError if it can't be opened.
    """

    path: pathlib.Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        # Without O_NONBLOCK, opening a named pipe would wait for somebody to write into it.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        self._fd = os.open(self.path, flags)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._map: mmap.mmap | None = None
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise self._bad("not a regular file")
            self._size = status.st_size
            self.tensors, self.metadata = self._header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file. Arrays that `read` gave stay valid."""
        self._map = None
        self._close()

    def dtype(self, name: str) -> np.dtype:
        """The NumPy dtype of a tensor. Raises `BadFile` for one that there is no dtype for, KeyError for no tensor."""
        tag = self._info(name).dtype
        if tag not in DTYPES:
            raise self._bad(f"tensor {name!r} is of dtype {tag!r}, which isn't one of {', '.join(DTYPES)}")
        return DTYPES[tag]

    def read(self, name: str) -> np.ndarray:
        """A tensor as a read-only view of the file: no copy, in C order, unaligned where the file is.

        Its memory is the system's cache of the file, brought in page by page as it is touched, and counted as this
        process's until `release`. To copy a tensor, `read_into` is faster. Whoever cuts the file short while it is
        being looked at kills the process (SIGBUS); `read_into` raises.
        """
        dtype, info = self.dtype(name), self._info(name)
        self._check_size()
        if info.start == info.end:
            array = np.empty(info.shape, dtype)
            array.setflags(write=False)
            return array
        if self._map is None:
            self._open()
            self._map = mmap.mmap(self._fd, self._size, access=mmap.ACCESS_READ)
        array = np.ndarray(info.shape, dtype, buffer=self._map, offset=info.start)
        self._check_bool(name, array)
        return array

    def release(self, name: str) -> None:
        """Gives back the memory that looking at `read(name)` has taken. The view stays valid."""
        info = self._info(name)
        if self._map is not None and info.end > info.start and hasattr(mmap, "MADV_DONTNEED"):
            start = info.start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, info.end - start)

    def read_into(self, name: str, out: np.ndarray, index: Sequence[slice | int] = ()) -> None:
        """Writes `tensor[index]` into `out`, without room for a second tensor in between.

        **Arguments:**

        - `out`: of the shape of `tensor[index]` and any strides. Its dtype is the tensor's, or both are of float64,
          float32, bfloat16 and float16: see `quantized.cast`. Bytes go straight from the file into it where it is
          contiguous, of the tensor's dtype, and `index` selects whole rows.
        - `index`: slices with positive steps and integers, for the first axes or all of them.

        Raises `BadFile` if the file has become shorter, ValueError for another shape or dtype of `out`.
        """
        dtype, info = self.dtype(name), self._info(name)
        if len(index) > len(info.shape):
            raise ValueError(f"tensor {name!r} has shape {list(info.shape)}: no place for the index {tuple(index)}")
        full = tuple(index) + (slice(None),) * (len(info.shape) - len(index))
        ranges = tuple(_range(i, size, name) for i, size in zip(full, info.shape, strict=True))
        shape = tuple(len(r) for r in ranges if isinstance(r, range))
        if out.shape != shape or not castable(dtype, out.dtype):
            raise ValueError(
                f"tensor {name!r} gives {dtype} {list(shape)}, but what it is to be written into is "
                f"{out.dtype} {list(out.shape)}"
            )
        if out.size:
            self._check_size()
            self._fill(info.start, info.shape, ranges, dtype, out)
            self._check_bool(name, out)

    def _fill(self, start: int, shape: _Shape, ranges: _Ranges, dtype: np.dtype, out: np.ndarray) -> None:
        """Reads what `ranges` select of the array of `shape` that begins at `start`."""
        while ranges and isinstance(ranges[0], int):
            start, shape, ranges = start + ranges[0] * math.prod(shape[1:]) * dtype.itemsize, shape[1:], ranges[1:]
        row = math.prod(shape[1:]) * dtype.itemsize
        if out.dtype == dtype and out.flags.c_contiguous and _is_run(shape, ranges):
            self._pread(out.reshape(-1).view(np.uint8), start + (ranges[0].start * row if ranges else 0))
        elif not ranges:
            cast(self._array(start, shape, dtype), out)
        elif row > _CHUNK:
            for i, which in enumerate(ranges[0]):
                self._fill(start + which * row, shape[1:], ranges[1:], dtype, out[i, ...])
        else:
            rest = tuple(_index(r) for r in ranges[1:])
            step = max(_CHUNK // row // ranges[0].step, 1)
            for i in range(0, len(ranges[0]), step):
                few = ranges[0][i : i + step]
                array = self._array(start + few[0] * row, (few[-1] - few[0] + 1, *shape[1:]), dtype)
                cast(array[(slice(None, None, few.step), *rest)], out[i : i + step])

    def _array(self, start: int, shape: _Shape, dtype: np.dtype) -> np.ndarray:
        array = np.empty(shape, dtype)
        self._pread(array.reshape(-1).view(np.uint8), start)
        return array

    def _pread(self, out: np.ndarray, start: int) -> None:
        """Fills an array of bytes from the file, wherever other threads are reading."""
        fd, done = self._open(), 0
        if not hasattr(os, "preadv"):
            with mmap.mmap(fd, self._size, access=mmap.ACCESS_READ) as mapped:
                out[:] = np.frombuffer(mapped[start : start + out.size], np.uint8)
            return
        while done < out.size:
            count = os.preadv(fd, [memoryview(out)[done:]], start + done)
            if count == 0:
                raise self._bad(f"it ends at byte {start + done}, but had {self._size} when it was opened")
            done += count

    def _header(self) -> tuple[dict[str, TensorInfo], dict[str, str]]:
        if self._size < 8:
            raise self._bad(f"{self._size} bytes are no safetensors file: the length of its header alone takes 8")
        first = self._array(0, (8,), np.dtype(np.uint8)).tobytes()
        if first == b"version ":
            raise self._bad("only a pointer of Git LFS to the file, which wasn't downloaded itself: git lfs pull")
        length = int.from_bytes(first, "little")
        if length > min(self._size - 8, MAX_HEADER):
            raise self._bad(
                f"its header should have {length} bytes, but the file has {self._size}, and {MAX_HEADER} is the most "
                "there may be: cut short, or not a safetensors file"
            )
        text = self._array(8, (length,), np.dtype(np.uint8)).tobytes()
        try:
            return parse_header(text, self._size)
        except ValueError as error:
            raise self._bad(str(error)) from None

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise KeyError(f"{str(self.path)!r} has no tensor {name!r}")
        return self.tensors[name]

    def _open(self) -> int:
        if not self._close.alive:
            raise ValueError(f"{str(self.path)!r} is closed")
        return self._fd

    def _check_size(self) -> None:
        size = os.fstat(self._open()).st_size
        if size < self._size:
            raise self._bad(f"it has {size} bytes, but had {self._size} when it was opened")

    def _check_bool(self, name: str, array: np.ndarray) -> None:
        # NumPy takes a byte of 2 for true in one place and for false in another.
        if array.dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
            raise self._bad(f"tensor {name!r} is BOOL, but has bytes other than 0 and 1")

    def _bad(self, reason: str) -> BadFile:
        return BadFile(f"{str(self.path)!r}: {reason}")


def open_file(path: str | os.PathLike) -> SafetensorsFile:
    """The safetensors file at `path`, open for reading: `with open_file(path) as file: file.read(name)`."""
    return SafetensorsFile(path)


def write_file(
    path: str | os.PathLike,
    tensors: Iterable[tuple[str, Any, Sequence[int], Callable[[], Any]]],
    metadata: Mapping | None = None,
) -> None:
    """Writes a safetensors file, which appears whole or not at all, and replaces one that is there.

    **Arguments:**

    - `tensors`: of each, its name, dtype (NumPy's, or a tag such as "BF16"), shape, and a function that makes it: a
      NumPy or JAX array of any strides, written in C order. One is in memory at a time. Wider dtypes come first in the
      file, so that every tensor is aligned, and within those the order given here stays.
    - `metadata`: strings to note; `{"format": "pt"}` is what transformers looks for.

    Before the file takes its name, the header and some elements of every tensor are read back and compared. Raises
    ValueError for a name given twice, a dtype that the format lacks, and an array that isn't as announced; whatever
    goes wrong, nothing is left behind.
    """
    path = pathlib.Path(path)
    plan = [(name, tag_of(name, dtype), tuple(map(int, shape)), make) for name, dtype, shape, make in tensors]
    # The sort is stable.
    plan.sort(key=lambda entry: -DTYPES[entry[1]].itemsize)
    header = encode_header([entry[:3] for entry in plan], metadata or {})
    # Not a name that a reader takes, whatever becomes of this process.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "xb") as file:
            file.write(header)
            samples = {name: _write(file, name, DTYPES[tag], shape, make()) for name, tag, shape, make in plan}
            file.flush()
            os.fsync(file.fileno())
        _verify(partial, samples)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        raise
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        # The new name reaches the disk, too. Some file systems can't be asked that.
        with contextlib.suppress(OSError):
            os.fsync(folder)
        os.close(folder)


def _write(file: BinaryIO, name: str, dtype: np.dtype, shape: _Shape, given: Any) -> dict[tuple[int, ...], bytes]:
    """Writes an array, and returns a few of its elements by their index."""
    array = np.asarray(given)
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(
            f"tensor {name!r} was announced as {dtype} {list(shape)}, but is {array.dtype} {list(array.shape)}"
        )
    if array.flags.c_contiguous:
        file.write(memoryview(array.reshape(-1).view(np.uint8)))
    else:
        for index in pieces(shape, 1 << 20):
            file.write(memoryview(np.ascontiguousarray(array[index]).reshape(-1).view(np.uint8)))
    positions = np.linspace(0, array.size - 1, min(array.size, _SAMPLES), dtype=np.int64).tolist()
    places = [tuple(int(axis) for axis in np.unravel_index(p, shape)) if shape else () for p in positions]
    return {place: array[place].tobytes() for place in places}


def _verify(path: pathlib.Path, samples: dict[str, dict[tuple[int, ...], bytes]]) -> None:
    with open_file(path) as file:
        for name, places in samples.items():
            array = file.read(name)
            if any(array[place].tobytes() != expected for place, expected in places.items()):
                raise ValueError(f"tensor {name!r} wasn't written as it is: nothing has been kept")
            file.release(name)


def _range(index: slice | int, size: int, name: str) -> range | int:
    """What an index selects of an axis."""
    if isinstance(index, slice):
        chosen = range(*index.indices(size))
        if chosen.step > 0:
            return chosen
    elif -size <= index < size:
        return int(index) % size
    raise ValueError(f"tensor {name!r} can't be read at {index}: an axis of {size} wants an upward slice or a position")


def _index(chosen: range | int) -> slice | int:
    return chosen if isinstance(chosen, int) else slice(chosen.start, chosen.stop, chosen.step)


def _is_run(shape: _Shape, ranges: _Ranges) -> bool:
    """Whether the chosen elements follow each other in the file."""
    if ranges and ranges[0].step != 1:
        return False
    return all(r == range(size) for r, size in zip(ranges[1:], shape[1:], strict=True))
