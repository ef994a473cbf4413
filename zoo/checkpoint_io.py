"""Checkpoints of a run: the training state in orbax's format, and in readable JSON what it is a state of."""

import concurrent.futures
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import shutil
import uuid
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import PyTree

from ..policies.activation import path_string
from .compiled import commit
from .data import Position
from .exporting import host

T = TypeVar("T")
S = TypeVar("S")

_FORMAT = 1
_METADATA = "metadata.json"
_ARRAYS = "arrays"
_LISTED = 5  # differences spelled out in an error


class CheckpointMismatch(ValueError):
    """A checkpoint doesn't hold what was asked for; the message lists the paths that differ."""


def save(
    path: str | os.PathLike,
    state: PyTree,
    *,
    config: Any = None,
    position: Position = Position(),
    extra: dict[str, Any] | None = None,
) -> pathlib.Path:
    """Writes `state` to the new folder `path`, and returns it. The folder appears whole or not at all.

    **Arguments:**

    - `state`: any PyTree of arrays, such as a `TrainState`, on one device or over a mesh. Typed PRNG keys are fine.
    - `config`: the model's: a dataclass or a dictionary. Compared on restoring, and there to be read.
    - `position`: where the stream of batches stands (`Batches.position`).
    - `extra`: anything else worth keeping that JSON can say.

    Works inside a running asyncio loop (notebooks). Raises ValueError if `path` exists already, and leaves nothing
    behind when it fails.
    """
    target = pathlib.Path(path).absolute()
    if target.exists():
        raise ValueError(f"checkpoint {str(path)!r} exists already: choose another folder, nothing was written")
    arrays = _by_path(state)
    metadata = {
        "format": _FORMAT,
        "step": _step(arrays),
        "position": {"epoch": int(position[0]), "index": int(position[1])},
        "config": _plain(config),
        "extra": _plain(extra or {}),
        "arrays": {name: _describe(leaf) | {"crc32": _checksum(leaf)} for name, leaf in arrays.items()},
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "orbax-checkpoint", "numpy")},
    }
    text = json.dumps(metadata, indent=1)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place and moved there at the end: what is half written never has the name of a checkpoint.
    partial = target.parent / f".{target.name}.partial-{uuid.uuid4().hex[:12]}"
    partial.mkdir()
    try:
        # orbax refuses arrays without elements; the metadata says all there is to say about them.
        _in_thread(_write, partial / _ARRAYS, {name: _data(leaf) for name, leaf in arrays.items() if leaf.size})
        (partial / _METADATA).write_text(text)
        if target.exists():
            raise ValueError(f"checkpoint {str(path)!r} has appeared meanwhile: nothing was written")
        os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def read_metadata(path: str | os.PathLike) -> dict[str, Any]:
    """What `save` noted about the checkpoint at `path`, without reading an array.

    `step`, `position` (`epoch`, `index`), `config`, `extra`, `versions`, and `arrays`: shape, dtype and memory kind
    by path. Raises ValueError when there is no checkpoint.
    """
    file = pathlib.Path(path) / _METADATA
    if not file.parent.is_dir():
        raise ValueError(f"there is no checkpoint at {str(path)!r}: no such folder")
    try:
        metadata = json.loads(file.read_text())
    except (OSError, ValueError):
        raise ValueError(f"there is no checkpoint at {str(path)!r}: {_METADATA} is missing or broken") from None
    if not isinstance(metadata, dict) or metadata.get("format") != _FORMAT:
        found = metadata.get("format") if isinstance(metadata, dict) else metadata
        raise ValueError(f"checkpoint {str(path)!r} has format {found!r}; this version reads format {_FORMAT}")
    kinds = {"position": dict, "extra": dict, "arrays": dict, "versions": dict}
    broken = [name for name, kind in kinds.items() if not isinstance(metadata.get(name), kind)]
    if broken or "step" not in metadata or set(metadata["position"]) != {"epoch", "index"}:
        missing = ", ".join(broken) or "step or position"
        raise ValueError(f"checkpoint {str(path)!r} is damaged: {_METADATA} lacks {missing}")
    return metadata


def read_position(path: str | os.PathLike) -> Position:
    """Where the stream of batches stood, for `PackedDataset.batches(..., position=)`."""
    return Position(**read_metadata(path)["position"])


def restore(path: str | os.PathLike, like: T, *, config: Any = None) -> T:
    """The state saved at `path`, in the structure of `like`, on the devices and in the memories of `like`.

    It doesn't matter on how many devices it was when it was saved, nor over which mesh.

    **Arguments:**

    - `like`: a concrete or abstract state (`init_state` of an abstract model, `jax.eval_shape`). Where a leaf
        doesn't say where it lies, it comes back in the memory kind that it was saved from, on the default device.
    - `config`: if given, it must be the one that was saved.

    Raises CheckpointMismatch (a ValueError) listing the paths that are missing, unexpected, or of another shape or
    dtype, or the fields of the config that differ; ValueError when there is no checkpoint or its data is damaged.
    """
    metadata = read_metadata(path)
    saved = metadata["arrays"]
    wanted = _by_path(like)
    if config is not None:
        _compare_configs(path, metadata["config"], _plain(config))
    _compare_arrays(path, saved, wanted)
    targets = {name: _target(leaf, saved[name]) for name, leaf in wanted.items()}
    try:
        full = {name: target for name, target in targets.items() if target.size}
        arrays = _in_thread(_read, pathlib.Path(path).absolute() / _ARRAYS, full)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"checkpoint {str(path)!r} is damaged: {first[:200]}") from error
    arrays |= {name: jnp.zeros(target.shape, target.dtype) for name, target in targets.items() if not target.size}
    changed = [name for name in wanted if saved[name].get("crc32") not in (None, _checksum(arrays[name]))]
    if changed:
        raise ValueError(f"checkpoint {str(path)!r} is damaged: {_listed([f'{n!r} has changed' for n in changed])}")
    leaves = [_finish(arrays[name], saved[name], targets[name].sharding) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _in_thread(function: Callable[..., S], *args: Any) -> S:
    # orbax runs an event loop of its own, which a thread that already runs one, a notebook's, doesn't allow.
    with concurrent.futures.ThreadPoolExecutor(1, "checkpoint") as executor:
        return executor.submit(function, *args).result()


def _write(folder: pathlib.Path, arrays: dict[str, Any]) -> None:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(_escaped(arrays)))


def _read(folder: pathlib.Path, targets: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    arguments = {
        name: ocp.ArrayRestoreArgs(sharding=t.sharding, global_shape=t.shape, dtype=t.dtype, strict=True)
        for name, t in targets.items()
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)) as checkpointer:
        restored = checkpointer.restore(
            folder, args=ocp.args.PyTreeRestore(item=_escaped(targets), restore_args=_escaped(arguments))
        )
    return {name: restored[_escape(name)] for name in targets}


def _escape(name: str) -> str:
    # orbax joins keys with dots itself, and reads them apart again.
    return name.replace(".", "|")


def _escaped(tree: dict[str, Any]) -> dict[str, Any]:
    return {_escape(name): value for name, value in tree.items()}


def _by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves by their dotted path, in the tree's order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for path, leaf in leaves:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ValueError(f"a checkpoint holds arrays only, but {path_string(path)!r} is a {type(leaf).__name__}")
    return {path_string(path): leaf for path, leaf in leaves}


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _describe(leaf: Any) -> dict[str, Any]:
    kind = leaf.sharding.memory_kind if isinstance(getattr(leaf, "sharding", None), Sharding) else None
    described = {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "memory": kind}
    if isinstance(leaf, jax.Array) and _is_key(leaf):
        described["key_impl"] = str(jax.random.key_impl(leaf))
    return described


def _checksum(leaf: Any) -> int | None:
    """The CRC-32 of an array's bytes in C order; None where this process holds only a part of it."""
    leaf = _data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return None
    # orbax doesn't notice a flipped bit. `jax.device_get` would leave a copy of all shards with the array.
    return zlib.crc32(np.ascontiguousarray(host(leaf)).reshape(-1).view(np.uint8))


def _step(arrays: dict[str, Any]) -> int | None:
    step = arrays.get("step")
    return None if step is None else int(step)


def _target(leaf: Any, saved: dict[str, Any]) -> jax.ShapeDtypeStruct:
    """The array to be read for `leaf`: the data of a key, for a key."""
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)) if _is_key(leaf) else leaf
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, Sharding):
        sharding = commit(jax.ShapeDtypeStruct(data.shape, data.dtype)).sharding
        kinds = {memory.kind for device in sharding.device_set for memory in device.addressable_memories()}
        if saved["memory"] in kinds:
            sharding = sharding.with_memory_kind(saved["memory"])
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _finish(array: Any, saved: dict[str, Any], sharding: Sharding) -> Any:
    if "key_impl" in saved:
        array = jax.random.wrap_key_data(array, impl=saved["key_impl"])
    if array.sharding != sharding or not array.committed:
        array = jax.device_put(array, sharding)
    return array


def _plain(value: Any) -> Any:
    """`value` as JSON gives it back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class": type(value).__name__} | fields
    if isinstance(value, dict):
        return {str(key): _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _compare_configs(path: Any, saved: Any, given: Any) -> None:
    if saved == given:
        return
    if not isinstance(saved, dict) or not isinstance(given, dict):
        raise CheckpointMismatch(f"checkpoint {str(path)!r} was saved with config {saved!r}, not {given!r}")
    names = [n for n in {**saved, **given} if saved.get(n) != given.get(n)]
    lines = [f"{n}: {saved.get(n)!r} in the checkpoint, {given.get(n)!r} asked for" for n in names]
    raise CheckpointMismatch(f"checkpoint {str(path)!r} is of another config: {_listed(lines)}")


def _compare_arrays(path: Any, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    lines = [f"{name!r} is not in the checkpoint" for name in wanted if name not in saved]
    lines += [f"{name!r} is only in the checkpoint" for name in saved if name not in wanted]
    for name, leaf in wanted.items():
        if name in saved:
            there, here = (f"{d['dtype']}{d['shape']}" for d in (saved[name], _describe(leaf)))
            if there != here:
                lines.append(f"{name!r} is {there} in the checkpoint, {here} asked for")
    if lines:
        raise CheckpointMismatch(f"checkpoint {str(path)!r} holds another state: {_listed(lines)}")


def _listed(lines: list[str]) -> str:
    more = len(lines) - _LISTED
    return "; ".join(lines[:_LISTED]) + (f"; and {more} more" if more > 0 else "")
