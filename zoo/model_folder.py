"""Folders of models on the disk: written beside their place and moved there when nothing is left to do."""

import contextlib
import ctypes
import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .exporting import Output
from .safetensors_io import write_file
from .tokenizer import FILES

# What belongs to a tokenizer in a model's folder: our own's files, and the vocabularies of other libraries.
TOKENIZER_FILES = (*FILES, "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
# What else may be in the folder of a model, and may be lost when another takes its place.
_SUFFIXES = {".json", ".jinja", ".safetensors", ".md"}
_BESIDE = {*TOKENIZER_FILES, ".gitattributes", "LICENSE", "LICENSE.txt"}
# transformers refuses files that don't say what kind of arrays they hold.
_METADATA = {"format": "pt"}


def resolve_target(folder: str | os.PathLike, overwrite: bool) -> pathlib.Path:
    """Where a model is to be written. Raises ValueError if it mustn't be."""
    target = pathlib.Path(os.path.abspath(pathlib.Path(folder).expanduser()))
    if target.is_symlink():
        target = target.resolve()
    if not target.exists():
        return target
    if not target.is_dir():
        raise ValueError(f"{str(folder)!r} is a file; a model is saved as a folder")
    there = [path.name for path in target.iterdir()]
    if there and not overwrite:
        raise ValueError(f"{str(folder)!r} isn't empty: overwrite=True puts the new model in its place")
    if there and _CONFIG not in there:
        raise ValueError(
            f"{str(folder)!r} isn't a model's folder (it has no {_CONFIG}), so it isn't overwritten: remove it "
            "yourself, or save elsewhere"
        )
    others = [
        path.name
        for path in target.iterdir()
        if path.is_dir() or not (path.suffix in _SUFFIXES or path.name in _BESIDE)
    ]
    if others:
        raise ValueError(
            f"{str(folder)!r} has more in it than a model ({', '.join(sorted(others)[:5])}), which overwriting would "
            "remove: move it away, or save elsewhere"
        )
    if os.path.ismount(target):
        raise ValueError(f"{str(folder)!r} is where a file system is mounted: save into a folder in it")
    return target


@contextlib.contextmanager
def new_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder beside `target` that takes its place at the end, when all of it is on the disk; or it disappears.

    A folder that is there changes places with it, and is removed last. Where the system can't do that in one, it is
    moved aside first: a process that is killed just then leaves it as `.NAME.replaced-*`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:12]
    partial, aside = (target.parent / f".{target.name}.{kind}-{mark}" for kind in ("partial", "replaced"))
    partial.mkdir()
    try:
        yield partial
        _sync(*partial.rglob("*"), partial)
        replaced = target.is_dir() and any(target.iterdir())
        if replaced and _exchange(partial, target):
            aside = partial
        else:
            if replaced:
                os.rename(target, aside)
            try:
                os.rename(partial, target)  # takes the place of an empty folder too
            except BaseException:
                if replaced:
                    os.rename(aside, target)
                raise
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync(target.parent)
    if replaced:
        shutil.rmtree(aside)


def _exchange(a: pathlib.Path, b: pathlib.Path) -> bool:
    """Makes two paths change places in one step. False, and nothing happens, where the system can't: only Linux can."""
    at_cwd, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE
    try:
        rename = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    return rename(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), ctypes.c_uint(exchange)) == 0


def shards(outputs: Sequence[Output], max_bytes: int) -> dict[str, list[Output]]:
    """`outputs` in files of at most `max_bytes`, or one tensor, by the files' names."""
    groups: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        if groups[-1] and size + output.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(output)
        size += output.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, start=1)}


def write_weights(folder: pathlib.Path, outputs: Sequence[Output], max_bytes: int) -> None:
    """The safetensors files of `outputs`, and their index where there are several."""
    files = shards(outputs, max_bytes)
    for name, group in files.items():
        write_file(folder / name, [(o.name, o.dtype, o.shape, o.make) for o in group], _METADATA)
    if len(files) > 1:
        size = sum(output.nbytes for output in outputs)
        where = {output.name: name for name, group in files.items() for output in group}
        write_json(folder / _INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))})


def write_config(folder: pathlib.Path, config: Mapping[str, Any]) -> None:
    """config.json: the last file of a model to be written, since nothing loads without it."""
    write_json(folder / _CONFIG, config)


def check_tokenizer(tokenizer: Any) -> None:
    """Raises ValueError unless `tokenizer` can be written: it can save itself, or is a folder with one's files."""
    if isinstance(tokenizer, str | os.PathLike):
        if not _tokenizer_files(tokenizer):
            raise ValueError(f"{str(tokenizer)!r} isn't a folder with a tokenizer: it has no {TOKENIZER_FILES[0]}")
    elif tokenizer is not None and _writer(tokenizer) is None:
        raise ValueError(f"a tokenizer is a folder or has a save(folder), got {type(tokenizer).__name__}")


def write_tokenizer(folder: pathlib.Path, tokenizer: Any) -> None:
    """The files of a tokenizer that `check_tokenizer` has seen; none for None."""
    if isinstance(tokenizer, str | os.PathLike):
        for path in _tokenizer_files(tokenizer):
            shutil.copyfile(path, folder / path.name)
    elif tokenizer is not None:
        _writer(tokenizer)(folder)


def _tokenizer_files(folder: str | os.PathLike) -> list[pathlib.Path]:
    paths = [pathlib.Path(folder).expanduser() / name for name in TOKENIZER_FILES]
    return [path for path in paths if path.is_file()]


def _writer(tokenizer: Any) -> Any:
    writers = (getattr(tokenizer, name, None) for name in ("save", "save_pretrained"))
    return next(filter(callable, writers), None)


def write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    # The text first: what can't be written leaves no file.
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _sync(*paths: pathlib.Path) -> None:
    """Waits until files, and the lists that folders are, are on the disk."""
    for path in paths:
        if path.is_dir() and os.name == "nt":  # where folders can't be opened
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
