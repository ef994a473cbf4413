"""Which file of a folder holds which tensor: the index of a sharded checkpoint, or the files' own headers."""

import dataclasses
import os
import pathlib
import re
import reprlib
from collections.abc import Iterable
from typing import Any

from .safetensors_header import MAX_HEADER, BadFile, TensorInfo, parse_json
from .safetensors_io import open_file

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SUFFIX = ".safetensors"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<part>\d+)-of-(?P<parts>\d+)\.safetensors")
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
_LISTED = 100  # problems spelled out in an error


class BadIndex(BadFile):
    """A folder's weights can't be found or trusted; the message names the folder and everything that is wrong."""


@dataclasses.dataclass(frozen=True)
class WeightIndex:
    """The weights of a folder.

    **Attributes:**

    - `folder`
    - `files`: the name of every tensor -> the file that it is to be read from, as the index calls it.
    - `total_size`: bytes of all tensors, where the index says so.
    - `paths`: every such file -> where it is.
    - `tensors`: what the header of its file says about every tensor in `files`, but for `absent` ones.
    - `absent`: tensors that the index expects in a file that hasn't got them -> that file.
    - `unlisted`: tensors in a file that the index doesn't expect there -> those files. Some may be in `files` as well:
      the index decides which of two is meant.
    - `damage`: what is wrong with files, where `read_index` was to go on with the others; empty if nothing is. Tensors
      in files that are damaged, missing or outside the folder are in `files` alone.
    """

    folder: pathlib.Path
    files: dict[str, str]
    total_size: int | None
    paths: dict[str, pathlib.Path]
    tensors: dict[str, TensorInfo]
    absent: dict[str, str]
    unlisted: dict[str, tuple[str, ...]]
    damage: str = ""


def read_index(folder: str | os.PathLike, *, partial: bool = False) -> WeightIndex:
    """What a folder downloaded from the Hugging Face Hub, or saved by transformers or Overspill, holds.

    `model.safetensors.index.json` (or the only `*.safetensors.index.json`) decides, and files it doesn't name are not
    looked at. Without one, `model.safetensors` is all; else the shards `model-00001-of-00002.safetensors` and so on,
    which have to be complete; else every `*.safetensors`. The header of every file is read and checked.

    A file has to lie in the folder. Symbolic links may lead out of it only as in the Hub's cache: from
    `models--org--name/snapshots/revision/` to `models--org--name/blobs/`. Files that have to be unpickled are refused.

    Raises `BadIndex`, which lists everything found wrong: files that are missing, damaged, or outside the folder, a
    malformed index, and, where there is none, a tensor that is in two files. With `partial` files that an index names
    and that are wrong don't raise: `damage` tells of them, and the others are read.
    """
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise BadIndex(f"{str(folder)!r} is not a folder with weights")
    index = _find_index(folder)
    if index is None:
        return _from_headers(folder)
    files, total_size = _parse_index(index)
    first: dict[str, str] = {}
    for tensor, file in files.items():
        first.setdefault(file, tensor)
    problems: list[str] = []
    paths, held = _open_all(folder, first, problems)
    if not partial:
        _raise(index, problems)
    sound = {tensor: file for tensor, file in files.items() if file in held}
    tensors = {tensor: held[file][tensor] for tensor, file in sound.items() if tensor in held[file]}
    absent = {tensor: file for tensor, file in sound.items() if tensor not in held[file]}
    unlisted: dict[str, tuple[str, ...]] = {}
    for file, infos in held.items():
        for tensor in infos:
            if files.get(tensor) != file:
                unlisted[tensor] = (*unlisted.get(tensor, ()), file)
    damage = _told(index, problems) if problems else ""
    return WeightIndex(folder, files, total_size, paths, tensors, absent, unlisted, damage)


def _find_index(folder: pathlib.Path) -> pathlib.Path | None:
    if os.path.lexists(folder / _INDEX):
        return folder / _INDEX
    others = sorted(p for p in folder.iterdir() if p.name.endswith(f"{_SUFFIX}.index.json"))
    if len(others) > 1 and not os.path.lexists(folder / _SINGLE):
        raise BadIndex(f"{str(folder)!r} has several indices, {_names(others)}, and none is called {_INDEX}")
    return others[0] if len(others) == 1 and not os.path.lexists(folder / _SINGLE) else None


def _parse_index(path: pathlib.Path) -> tuple[dict[str, str], int | None]:
    inside, problem = _inside(path.parent, path.name, "")
    if inside is None:
        raise BadIndex(f"{str(path)!r}: {problem}")
    if not path.is_file():
        raise BadIndex(f"{str(path)!r} is not a regular file")
    if path.stat().st_size > MAX_HEADER:
        raise BadIndex(f"{str(path)!r} has {path.stat().st_size} bytes; {MAX_HEADER} is the most an index may have")
    try:
        index = parse_json(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except ValueError as error:
        raise BadIndex(f"{str(path)!r} is not JSON: {error}") from None
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files:
        raise BadIndex(f"{str(path)!r} has no weight_map, an object that says which file holds which tensor")
    wrong = [tensor for tensor, file in files.items() if not isinstance(file, str)]
    if wrong:
        raise BadIndex(
            f"{str(path)!r}: weight_map says {reprlib.repr(files[wrong[0]])} for {wrong[0][:200]!r}, not a file's name"
            + (f", and so for {len(wrong) - 1} more" if len(wrong) > 1 else "")
        )
    metadata = index.get("metadata")
    return files, _size(metadata.get("total_size") if isinstance(metadata, dict) else None)


def _size(value: Any) -> int | None:
    # Informative only; some writers put a float there.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if number and 0 <= value < 2**63 and value == int(value) else None


def _from_headers(folder: pathlib.Path) -> WeightIndex:
    names = _choose(folder)
    problems: list[str] = []
    paths, held = _open_all(folder, dict.fromkeys(names), problems)
    files: dict[str, str] = {}
    tensors: dict[str, TensorInfo] = {}
    for file, infos in held.items():
        for tensor, info in infos.items():
            other = files.setdefault(tensor, file)
            if other != file and (paths[other].resolve(), tensors[tensor]) != (paths[file].resolve(), info):
                problems.append(f"tensor {tensor!r} is in {other!r} and in {file!r}, and no index says which counts")
            tensors.setdefault(tensor, info)
    _raise(folder, problems)
    return WeightIndex(folder, files, None, paths, tensors, {}, {})


def _choose(folder: pathlib.Path) -> list[str]:
    """The files that make up the weights of a folder without an index."""
    present = sorted(path.name for path in folder.iterdir())
    names = [name for name in present if name.endswith(_SUFFIX)]
    if not names:
        pickled = [name for name in present if pathlib.Path(name).suffix in _PICKLES]
        if pickled:
            raise BadIndex(
                f"{str(folder)!r} has no safetensors files, only {_names(pickled)}: reading a pickle runs whatever "
                "code is in it, so those are refused. Convert them (save_pretrained of transformers does), or take a "
                "revision with safetensors"
            )
        raise BadIndex(f"{str(folder)!r} has no safetensors files: it holds {_names(present) or 'nothing'}")
    if _SINGLE in names:
        return [_SINGLE]
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    stems = {match["stem"] for match in shards}
    if len(stems) > 1 and "model" in stems:
        shards = [match for match in shards if match["stem"] == "model"]
    elif len(stems) != 1:
        return names
    parts = {int(match["parts"]) for match in shards}
    there = {int(match["part"]) for match in shards}
    count = max(parts)
    if len(parts) > 1 or len(there) != count or max(there) > count:
        raise BadIndex(
            f"{str(folder)!r} has no index, and not the shards of one checkpoint, {count} of them: "
            f"there are {_names(match[0] for match in shards)}"
        )
    return [match[0] for match in shards]


def _open_all(
    folder: pathlib.Path, tensors: dict[str, Any], problems: list[str]
) -> tuple[dict[str, pathlib.Path], dict[str, dict[str, TensorInfo]]]:
    """(where each file is, what its header says), by its name. `tensors` has one that each should hold."""
    paths, held = {}, {}
    for file, tensor in tensors.items():
        path, problem = _inside(folder, file, _SUFFIX)
        if path is None:
            problems.append(f"{problem}" + (f" (for {tensor[:200]!r})" if tensor is not None else ""))
            continue
        try:
            with open_file(path) as opened:
                paths[file], held[file] = path, opened.tensors
        except (OSError, BadFile) as error:
            problems.append(str(error))
    return paths, held


def _inside(folder: pathlib.Path, file: str, suffix: str) -> tuple[pathlib.Path | None, str]:
    """(the path of a file in `folder`, ""), or (None, why it won't be touched)."""
    called = repr(file[:200])
    if not file.isprintable() or not file.endswith(suffix):
        return None, f"{called} is not the name of a {suffix or 'JSON'} file"
    pure = pathlib.PurePosixPath(file)
    # Backslashes and drives lead elsewhere on Windows only, but an index is the same everywhere.
    if pure.is_absolute() or ".." in pure.parts or re.search(r"[\\:]", file):
        return None, f"{called} leads out of the folder"
    try:
        home, real = folder.resolve(strict=True), (folder / file).resolve(strict=True)
    except FileNotFoundError:
        return None, f"{called} is missing"
    except (OSError, RuntimeError) as error:  # a loop of links
        return None, f"{called} can't be reached: {error}"
    if not (real.is_relative_to(home) or _is_blob(home, real)):
        return None, f"{called} is a link out of the folder, to {str(real)!r}"
    return folder / file, ""


def _is_blob(home: pathlib.Path, real: pathlib.Path) -> bool:
    """Whether `real` is a file of the Hub's cache that the snapshot `home` links to."""
    snapshots, model = home.parent, home.parent.parent
    return snapshots.name == "snapshots" and model.name.startswith("models--") and real.parent == model / "blobs"


def _names(names: Iterable[str | pathlib.Path]) -> str:
    listed = [repr(name if isinstance(name, str) else name.name) for name in names]
    return ", ".join(listed[:10]) + (f" and {len(listed) - 10} more" if len(listed) > 10 else "")


def _raise(where: pathlib.Path, problems: list[str]) -> None:
    if problems:
        raise BadIndex(_told(where, problems))


def _told(where: pathlib.Path, problems: list[str]) -> str:
    more = len(problems) - _LISTED
    text = "; ".join(problems[:_LISTED]) + (f"; and {more} more" if more > 0 else "")
    return f"{str(where)!r}: {text}"
