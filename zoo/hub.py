"""Model folders: local ones as they are, and those of the Hugging Face Hub through its own library and cache."""

import difflib
import importlib
import json
import os
import pathlib
import re
from typing import Any

# Nothing that could run code: no pickles (*.bin, *.pt, *.pth) and no Python.
_WANTED = ("*.safetensors", "*.json", "*.jinja")
# Some models keep a second copy of all weights, in subfolders (original/, onnx/) or as consolidated.safetensors.
_UNWANTED = ("*/*.safetensors", "*/*.json", "consolidated*.safetensors")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def need(module: str, what: str) -> Any:
    """The optional library `module`. Raises ModuleNotFoundError saying `what` needs it and how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        package = module.partition(".")[0]
        raise ModuleNotFoundError(f"{what} needs {package}: pip install 'overspill[hub]'", name=package) from None


def one_line(error: BaseException | str, limit: int = 300) -> str:
    """What an error says, on one line of at most `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, naming the file, if it holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is damaged: it is no JSON ({one_line(error)})") from None
    except OSError as error:
        raise ValueError(f"{str(path)!r} can't be read: {error.strerror}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} is damaged: it holds a {type(content).__name__}, a JSON object is wanted")
    return content


def read_optional(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of a model folder, or an empty one without such a file. Errors as `read_json`."""
    return read_json(folder / name) if (folder / name).is_file() else {}


def model_ids(folder: pathlib.Path, name: str) -> tuple[int, ...]:
    """Such as `eos_token_id` of a model folder: what generation_config.json says, or else config.json.

    Needs no library. Raises ValueError, naming the file, unless it is an integer, a list of them, or null.
    """
    for file in ("generation_config.json", "config.json"):
        settings = read_optional(folder, file)
        value = settings.get(name)
        if value is None and isinstance(settings.get("text_config"), dict):
            value = settings["text_config"].get(name)
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
            raise ValueError(f"{str(folder / file)!r}: {name} is {value!r}, a token id or a list of them is wanted")
        # Some files say -1 for none.
        return tuple(v for v in values if v >= 0)
    return ()


def fetch(name_or_path: str | os.PathLike, *, revision: str | None = None, weights: bool = True) -> pathlib.Path:
    """The folder of a model: a local one as it is, or one from the Hugging Face Hub, downloaded where need be.

    Only *.safetensors, *.json and *.jinja files are downloaded, never pickles or code. Where they are kept, what a
    download shows and who may have what are the affair of `huggingface_hub` and its environment variables
    (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, ...). What is in the cache already is used when there is no network.

    **Arguments:**

    - `name_or_path`: a folder, or `"org/name"` or `"org/name@revision"`. A folder of that name comes first.
    - `revision`: a branch, tag or commit on the Hub; `main` by default.
    - `weights`: whether to download the weights too.

    Raises ValueError for what is neither a folder nor on the Hub, or mustn't be had; ConnectionError where the Hub
    can't be asked and the cache hasn't got the model; ModuleNotFoundError without `huggingface_hub`.
    """
    text = os.fspath(name_or_path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"a model is a folder or a name on the Hub such as 'org/name', not {text!r}")
    path = pathlib.Path(text).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"{text!r} is a local folder, which has no revisions: leave out revision={revision!r}")
        return path
    if path.exists():
        raise ValueError(f"{text!r} is a file: give the model's folder, such as {str(path.parent)!r}")
    name, at, after = text.partition("@")
    if isinstance(name_or_path, os.PathLike) or not _NAME.fullmatch(name) or (at and not after):
        raise ValueError(_not_a_name(text))
    if at and revision is not None and revision != after:
        raise ValueError(f"{text!r} asks for another revision than revision={revision!r}: give one of them")
    return _download(name, revision or after or None, weights)


def _not_a_name(text: str) -> str:
    from .registry import REGISTRY  # whose configs are read by what uses this module

    if text in REGISTRY:
        return (
            f"{text!r} is a configuration without weights: zoo.build({text!r}, key=...) makes such a model with random "
            "ones; trained ones come from a folder or a name on the Hub such as 'org/name'"
        )
    near = difflib.get_close_matches(text.lower(), REGISTRY, n=3, cutoff=0.6) if "/" not in text else []
    hint = f" (zoo.build makes {' or '.join(map(repr, near))}, with random weights)" if near else ""
    return f"{text!r} is neither a folder that exists nor a name on the Hub such as 'org/name'{hint}"


def _download(name: str, revision: str | None, weights: bool) -> pathlib.Path:
    library = need("huggingface_hub", f"to take {name!r} from the Hub, where there is no folder of that name,")
    errors, constants = (need(f"huggingface_hub.{part}", "a download") for part in ("errors", "constants"))
    shown = f"{name}@{revision}" if revision else name
    page = f"{constants.ENDPOINT}/{name}"
    try:
        folder = library.snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(_WANTED if weights else _WANTED[1:]),
            ignore_patterns=list(_UNWANTED),
        )
    except errors.GatedRepoError:
        raise ValueError(
            f"{shown!r} is given only to those who accept its conditions: do so at {page}, then log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"{shown!r} is neither a folder that exists nor a model on the Hub; if it is private, log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{name!r} has no revision {revision or 'main'!r}: {page} lists those there are") from None
    except errors.LocalEntryNotFoundError as error:
        # Newer versions of the library know what belongs to a model and refuse a cached copy that lacks any of it,
        # also of what isn't needed here.
        folder = getattr(error, "snapshot_path", None)
        if folder is None:
            what = f"isn't in the cache ({constants.HF_HUB_CACHE})"
            raise ConnectionError(_unreachable(constants, shown, what)) from None
        _check_complete(constants, pathlib.Path(folder), shown, weights)
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise ValueError(
                f"{shown!r} may not be downloaded with your login (HTTP {status}): `hf auth login` or HF_TOKEN set it, "
                f"{page} says who may"
            ) from None
        raise ConnectionError(f"the Hub didn't give {shown!r} (HTTP {status}): {one_line(error)}") from None
    except errors.HFValidationError as error:
        raise ValueError(f"{shown!r} can't be a name on the Hub: {one_line(error)}") from None
    except Exception as error:  # the network library's own errors, a full disk, ...
        raise ConnectionError(
            f"{shown!r} couldn't be downloaded: {type(error).__name__}: {one_line(error)}; what came through is kept, "
            "so try again"
        ) from None
    path = pathlib.Path(folder)
    _check_complete(constants, path, shown, weights)
    return path


def _unreachable(constants: Any, shown: str, what: str) -> str:
    if constants.HF_HUB_OFFLINE:
        why, then = "HF_HUB_OFFLINE forbids asking the Hub", "unset it"
    else:
        why, then = "the Hub can't be reached", "check the network"
    name, _, revision = shown.partition("@")
    command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    return f"{shown!r} {what} and {why}: {then}, or run `{command}` where there is one and copy the cache"


def _check_complete(constants: Any, folder: pathlib.Path, shown: str, weights: bool) -> None:
    """Raises an error if weights are wanted and some that belong to the model aren't in the folder."""
    if not weights:
        return
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map")
        # What else is wrong with an index is for the reader of the weights to say.
        files = {n for n in names.values() if isinstance(n, str)} if isinstance(names, dict) else set()
        missing = sorted(n for n in files if not (folder / n).exists())
        if missing:
            first = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            what = f"is only partly in the cache ({len(missing)} of {len(files)} files of weights are missing: {first})"
            raise ConnectionError(_unreachable(constants, shown, what))
    elif not any(folder.glob("*.safetensors")):
        if constants.HF_HUB_OFFLINE:
            raise ConnectionError(_unreachable(constants, shown, "is in the cache without its weights"))
        raise ValueError(
            f"{shown!r} has no *.safetensors file: other weights, such as pickles (*.bin, *.pt), are never read; "
            "transformers turns them into such a file by from_pretrained(...).save_pretrained(...)"
        )
