"""Arrays of a model as tensors of files: under Hugging Face's names, fetched from wherever they are one at a time."""

import math
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from .model import LanguageModel
from .quantized import cast
from .weights import AS_IS, Leaf, Piece, leaves

# Elements that are looked at together for infinities and NaN.
_CHUNK = 2**20


class Output(NamedTuple):
    """A tensor to be written: its name in files, dtype and shape, and what makes it."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Part(NamedTuple):
    leaf: Leaf
    piece: Piece


def check_arrays(model: LanguageModel, like: LanguageModel) -> None:
    """Raises ValueError, naming it, for an array of `model` that can't be written or isn't as in the abstract `like`.

    Abstract, traced and deleted arrays can't be, nor those of which other processes hold a part.
    """
    ours = {leaf.path: leaf.array for leaf in leaves(model)}
    wanted = {leaf.path: leaf.array for leaf in leaves(like)}
    for path in [*wanted, *(path for path in ours if path not in wanted)]:
        if path not in ours or path not in wanted:
            has, lacks = ("config", "model") if path in wanted else ("model", "config")
            raise ValueError(
                f"model and config disagree: the {has} has {path!r}, the {lacks} hasn't; nothing was written"
            )
        array, shape = ours[path], tuple(wanted[path].shape)
        if tuple(array.shape) != shape:
            raise ValueError(
                f"model and config disagree: {path!r} is {list(array.shape)}, with this config it is {list(shape)}; "
                "nothing was written"
            )
        if isinstance(array, jax.ShapeDtypeStruct | jax.core.Tracer):
            kind = "abstract" if isinstance(array, jax.ShapeDtypeStruct) else "traced"
            raise ValueError(f"{path!r} is {kind}, without numbers that could be written; nothing was written")
        if isinstance(array, jax.Array):
            if array.is_deleted():
                raise ValueError(
                    f"{path!r} has been deleted (donated to a training step?): save the model that the step's state "
                    "holds; nothing was written"
                )
            if not array.is_fully_addressable:
                raise ValueError(f"{path!r} is in part on devices of other processes; nothing was written")


def outputs(model: LanguageModel, dtype: Any = None, kept: Collection[str] = ()) -> Iterator[Output]:
    """The tensors of `model`, layer by layer; in `dtype` if given, but for those of the arrays in `kept`.

    What their functions make is checked: ValueError, naming the array, where numbers aren't finite.
    """
    tensors: dict[str, list[_Part]] = {}
    fetch = _Fetcher()
    for leaf in leaves(model):
        for piece in leaf.pieces(leaf.sources[0]):
            tensors.setdefault(piece.name, []).append(_Part(leaf, piece))
    for name in sorted(tensors, key=_order):
        parts = tensors[name]
        leaf, piece = parts[0]
        shape = piece.layout.tensor_shape(leaf.piece_shape(piece))
        stored = np.dtype(leaf.array.dtype)
        if dtype is not None and leaf.path not in kept:
            stored = np.dtype(dtype)
        yield Output(name, stored, shape, _Maker(parts, stored, shape, fetch))


def _order(name: str) -> int:
    """Embedding, layers, and what comes after them; the sort that uses it keeps the rest as it is."""
    if match := re.match(r"model\.layers\.(\d+)\.", name):
        return int(match[1])
    return -1 if name.startswith("model.embed_tokens.") else 2**31


class _Maker(NamedTuple):
    """Makes one tensor out of its parts."""

    parts: list[_Part]
    dtype: np.dtype
    shape: tuple[int, ...]
    fetch: "_Fetcher"

    def __call__(self) -> np.ndarray:
        first = self.parts[0]
        if first.piece.layout == AS_IS and np.dtype(first.leaf.array.dtype) == self.dtype:
            array = self.fetch(*first)
            _check_finite(array, first)
            return array
        out = np.empty(self.shape, self.dtype)
        for part in self.parts:
            view = part.piece.layout.view(out)
            cast(self.fetch(*part), view)
            _check_finite(view, part)
        return out


def _check_finite(array: np.ndarray, part: _Part) -> None:
    rows = max(1, _CHUNK * len(array) // max(array.size, 1))
    for i in range(0, len(array), rows):
        if not np.isfinite(array[i : i + rows]).all():
            raise ValueError(
                f"{part.piece.place} ({part.piece.name}) holds numbers that aren't finite in {array.dtype}; "
                "nothing was written"
            )


class _Fetcher:
    """Gives arrays of a model as NumPy's, keeping the one layer of a stacked array that it was last asked for."""

    def __init__(self) -> None:
        self._last: tuple[Any, np.ndarray] | None = None

    def __call__(self, leaf: Leaf, piece: Piece) -> np.ndarray:
        stacked = leaf.layers is not None
        layer = piece.index[0] if stacked else None
        if self._last is None or self._last[0] != (leaf.path, layer):
            self._last = None  # before there is another one
            self._last = (leaf.path, layer), host(leaf.array, layer)
        return self._last[1][piece.index[1:] if stacked else piece.index]


def host(array: Any, layer: int | None = None) -> np.ndarray:
    """An array, or one layer of a stacked one, as NumPy's: without a copy where a CPU's memory has it.

    Sharded ones are put together from their shards. An array that is on a device keeps no copy on the host.
    """
    if not isinstance(array, jax.Array):
        return np.asarray(array if layer is None else array[layer])
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    if array.is_fully_replicated:
        return _host(array.addressable_shards[0].data, layer)
    shape = array.shape if layer is None else array.shape[1:]
    out = np.empty(shape, array.dtype)
    for shard in shards:
        index, inner = shard.index, None
        if layer is not None:
            low, high, _ = index[0].indices(array.shape[0])
            if not low <= layer < high:
                continue
            index, inner = index[1:], layer - low
        out[index] = _host(shard.data, inner)
    return out


def _host(data: jax.Array, layer: int | None) -> np.ndarray:
    """What one device holds, or a layer of it."""
    if next(iter(data.devices())).platform == "cpu":
        array = np.asarray(data)
        return array if layer is None else array[layer]
    if layer is not None:
        return np.asarray(_layer(data, layer))
    # JAX keeps the host's copy of an array for as long as the array lives: so it is another array that is fetched.
    try:
        return np.asarray(jax.device_put(data, jax.local_devices(backend="cpu")[0]))
    except RuntimeError:  # JAX was told to know no CPU
        return np.asarray(data.copy())


@jax.jit
def _layer(data: jax.Array, layer: jax.Array) -> jax.Array:
    """A layer of a stacked array, from host memory too: one program whatever the layer."""
    return jax.device_put(jax.lax.dynamic_index_in_dim(data, layer, keepdims=False), jax.memory.Space.Device)
