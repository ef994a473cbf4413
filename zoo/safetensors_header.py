"""The header of a safetensors file: JSON that says where each tensor lies, believed in nothing before it is checked.

Format: https://github.com/huggingface/safetensors#format. All numbers are little-endian.
"""

import contextlib
import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    tag: np.dtype(dtype)
    for tag, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "U16": np.uint16,
        "I16": np.int16,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "U32": np.uint32,
        "I32": np.int32,
        "F32": np.float32,
        "U64": np.uint64,
        "I64": np.int64,
        "F64": np.float64,
    }.items()
}
TAGS: dict[np.dtype, str] = {dtype: tag for tag, dtype in DTYPES.items()}

MAX_HEADER = 100_000_000  # bytes; the reference implementation's limit
_MAX_AXES = 64  # NumPy's
_MAX_SIZE = 2**63 - 1
_METADATA = "__metadata__"


class BadFile(ValueError):
    """A weight file, or an index of some, is damaged or says what can't be; the message names it and the reason."""


class TensorInfo(NamedTuple):
    """What a header says about a tensor; `start` and `end` are positions in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def parse_header(text: bytes, size: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """(the tensors, the metadata) of a file of `size` bytes whose header is `text`.

    Every byte behind the header has to belong to one tensor: what nobody looks at could be anything. Dtypes that
    `DTYPES` lacks are let through, for a tensor that may not be wanted. Raises ValueError with the reason.
    """
    try:
        header = parse_json(text)
    except ValueError as error:
        raise ValueError(f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"its header is a JSON {type(header).__name__}, not an object")
    metadata = header.pop(_METADATA, None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{_METADATA} holds something else than strings")
    begin = 8 + len(text)
    tensors = {name: _entry(name, entry, begin, size) for name, entry in header.items()}
    position, before = begin, "the header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != position:
            what = "overlaps" if info.start < position else f"leaves {info.start - position} bytes free after"
            raise ValueError(f"tensor {name[:200]!r} {what} {before}")
        position, before = info.end, f"tensor {name[:200]!r}"
    if position != size:
        raise ValueError(f"{size - position} bytes follow after {before}")
    return tensors, metadata


def encode_header(tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping) -> bytes:
    """The beginning of a file, up to its data, for tensors (name, tag, shape) in the order they come in.

    Padded so that the data begins at a multiple of 8. Raises ValueError for names and metadata that can't be said.
    """
    if not all(isinstance(text, str) and _is_unicode(text) for pair in metadata.items() for text in pair):
        raise ValueError(f"the metadata of a safetensors file maps strings to strings, not {reprlib.repr(metadata)}")
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    position = 0
    for name, tag, shape in tensors:
        if name == _METADATA or not _is_unicode(name):
            raise ValueError(f"a tensor can't be called {name!r}")
        if name in header:
            raise ValueError(f"tensor {name!r} is given twice")
        end = position + math.prod(shape) * DTYPES[tag].itemsize
        header[name] = {"dtype": tag, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ValueError(
            f"the header of {len(tensors)} tensors takes {len(text)} bytes, {MAX_HEADER} at most: shard them"
        )
    return len(text).to_bytes(8, "little") + text


def parse_json(text: bytes) -> Any:
    """What `text` says in JSON and UTF-8, strictly: ValueError also for a key given twice, NaN, and endless nesting."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_distinct, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits is one, too
        raise ValueError(str(error)[:200]) from None


def tag_of(name: str, dtype: Any) -> str:
    """The format's tag for a tensor's dtype, given as NumPy's or as that. ValueError names the tensor."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype
    with contextlib.suppress(TypeError):
        if np.dtype(dtype) in TAGS:
            return TAGS[np.dtype(dtype)]
    raise ValueError(f"tensor {name!r} can't be written as {dtype}: a safetensors file has {', '.join(DTYPES)}")


def _entry(name: str, entry: Any, begin: int, size: int) -> TensorInfo:
    def bad(reason: str) -> ValueError:
        return ValueError(f"tensor {name[:200]!r}: {reason}")

    if not _is_unicode(name):
        raise bad("its name is not Unicode")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise bad("its entry has to be an object with dtype, shape and data_offsets")
    tag, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(tag, str):
        raise bad("its dtype is not a string")
    if not isinstance(shape, list) or len(shape) > _MAX_AXES or not all(map(_is_size, shape)):
        raise bad(f"its shape {reprlib.repr(shape)} is not a list of at most {_MAX_AXES} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise bad(f"its data_offsets {reprlib.repr(offsets)} are not two positions")
    start, end = offsets
    if start > end or end > size - begin:
        raise bad(f"its data_offsets {offsets} are not a range within the {size - begin} bytes of data")
    dtype = DTYPES.get(tag)
    if dtype is not None:
        wanted = math.prod(shape) * dtype.itemsize
        if wanted != end - start:
            raise bad(
                f"{tag} {reprlib.repr(shape)} takes {wanted} bytes, but data_offsets {offsets} hold {end - start}"
            )
        # An empty array, too, has to be one that NumPy can make.
        if math.prod(d for d in shape if d) * dtype.itemsize > _MAX_SIZE:
            raise bad(f"its shape {reprlib.repr(shape)} is beyond any memory")
    return TensorInfo(tag, tuple(shape), begin + start, begin + end)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{twice[:200]!r} appears twice")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SIZE  # a bool is an int, too


def _is_unicode(text: str) -> bool:
    """Whether there are no halves of surrogate pairs, which JSON can say and UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
