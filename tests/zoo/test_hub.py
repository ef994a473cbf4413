import fnmatch
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

from overspill.zoo import hub
from overspill.zoo.hub import fetch, model_ids, read_json

huggingface_hub = pytest.importorskip("huggingface_hub")
from huggingface_hub import errors  # noqa: E402

COMMIT = "0123456789abcdef0123456789abcdef01234567"
INDEX = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
WEIGHTS = {"model.safetensors.index.json": json.dumps(INDEX), "model-1.safetensors": "1", "model-2.safetensors": "2"}
SMALL = {"config.json": "{}", "tokenizer.json": "{}"}


def cached(cache, name="org/name", *, refs=("main",), **files):
    """A model in the layout of the Hub's cache: blobs, links to them in a snapshot, and which commit a branch is."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "refs").mkdir()
    for ref in refs:
        (folder / "refs" / ref).write_text(COMMIT)
    for i, (file, content) in enumerate(files.items()):
        (folder / "blobs" / str(i)).write_text(content)
        (snapshot / file).symlink_to(f"../../blobs/{i}")
    return snapshot


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """An empty cache, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def answer(tmp_path, monkeypatch):
    """Sets what a download gives or raises, and records with what it was asked for."""
    asked = []
    monkeypatch.chdir(tmp_path)

    def answer(result):
        def snapshot_download(*args, **kwargs):
            asked.append((args, kwargs))
            if isinstance(result, BaseException):
                raise result
            return str(result)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return asked

    return answer


def response(status):
    return types.SimpleNamespace(status_code=status, headers={}, request=None)


def test_a_folder_is_taken_as_it_is(tmp_path, monkeypatch, answer):
    answer(AssertionError("nothing is to be downloaded"))
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert fetch("org/name") == pathlib.Path("org/name")
    assert fetch(tmp_path / "org") == tmp_path / "org"
    (tmp_path / "org" / "name@v1").mkdir()
    assert fetch("org/name@v1").name == "name@v1"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch("~/org") == tmp_path / "org"
    with pytest.raises(ValueError, match="local folder, which has no revisions"):
        fetch("org/name", revision="main")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "a folder or a name on the Hub"),
        ("a\0b", "a folder or a name on the Hub"),
        ("nowhere", "neither a folder that exists nor a name on the Hub such as 'org/name'$"),
        ("./org/name", "neither a folder"),
        ("/org/name", "neither a folder"),
        ("org/name/more", "neither a folder"),
        ("../name", "neither a folder"),
        ("org/..", "neither a folder"),
        ("org/name@", "neither a folder"),
        ("https://huggingface.co/org/name", "neither a folder"),
        (pathlib.Path("org/name"), "neither a folder"),
        ("FILE", "is a file: give the model's folder"),
        ("llama-3.1-8b", r"a configuration without weights: zoo.build\('llama-3.1-8b', key=...\)"),
        ("llama-3.1-8bb", "zoo.build makes 'llama-3.1-8b'"),
    ],
)
def test_what_is_neither_folder_nor_name_is_told_apart(name, said, answer, tmp_path):
    asked = answer(tmp_path)
    (tmp_path / "FILE").write_text("x")
    with pytest.raises(ValueError, match=said) as error:
        fetch(name)
    assert "\n" not in str(error.value) and not asked


def test_only_data_is_asked_for(answer, tmp_path):
    """And the Hub's own filter lets through what a model needs and nothing else."""
    (tmp_path / "x.safetensors").write_text("x")
    asked = answer(tmp_path)
    assert fetch("org/name@refs/pr/1") == tmp_path
    (args, given), = asked
    assert args == ("org/name",) and given["revision"] == "refs/pr/1"
    assert fetch("org/name", revision="v2") == fetch("org/name@v2", revision="v2") == tmp_path
    assert [given["revision"] for _, given in asked[1:]] == ["v2", "v2"]
    with pytest.raises(ValueError, match="another revision"):
        fetch("org/name@v1", revision="v2")
    files = {
        True: ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "generation_config.json",
               "model.safetensors.index.json", "tokenizer.json", "chat_template.jinja",
               "additional_chat_templates/rag.jinja"],
        False: ["pytorch_model.bin", "model.pt", "modeling.py", "tokenizer.model", "consolidated.safetensors", "x.pkl",
                "original/model.safetensors", "onnx/config.json", "original/consolidated.00.pth", "README.md",
                "consolidated-00001.safetensors", "x.gguf", "x.json.py", "metal/model.bin"],
    }  # fmt: skip

    def wanted(file, given):
        hits = [any(fnmatch.fnmatch(file, p) for p in given[k]) for k in ("allow_patterns", "ignore_patterns")]
        return hits[0] and not hits[1]

    for expected, names in files.items():
        for name in names:
            assert wanted(name, given) == expected, name
    fetch("org/name", weights=False)
    light = [name for name in files[True] if wanted(name, asked[-1][1])]
    assert light == [name for name in files[True] if not name.endswith(".safetensors")]


@pytest.mark.parametrize("revision", ["", "@main", "@v1", f"@{COMMIT}"])
def test_offline_the_cached_copy_is_used(offline, revision):
    snapshot = cached(offline, refs=("main", "v1"), **SMALL, **WEIGHTS)
    assert fetch(f"org/name{revision}") == snapshot
    assert (fetch(f"org/name{revision}") / "model-1.safetensors").read_text() == "1"


def test_offline_it_explains_itself(offline):
    with pytest.raises(ConnectionError) as error:
        fetch("org/name")
    assert str(error.value) == (
        f"'org/name' isn't in the cache ({offline}) and HF_HUB_OFFLINE forbids asking the Hub: unset it, or run "
        "`hf download org/name` where there is one and copy the cache"
    )
    cached(offline, **SMALL, **WEIGHTS)
    with pytest.raises(ConnectionError, match="'org/name@v9' isn't in the cache .*hf download org/name --revision v9`"):
        fetch("org/name@v9")


def test_offline_half_a_model_is_not_taken_for_one(offline):
    snapshot = cached(offline, **SMALL, **WEIGHTS)
    (snapshot / "model-2.safetensors").unlink()
    missing = r"is only partly in the cache \(1 of 2 files .* missing: model-2.safetensors\)"
    with pytest.raises(ConnectionError, match=missing):
        fetch("org/name")
    assert fetch("org/name", weights=False) == snapshot
    cached(offline, "org/small", **SMALL)
    with pytest.raises(ConnectionError, match="is in the cache without its weights"):
        fetch("org/small")
    assert (fetch("org/small", weights=False) / "config.json").read_text() == "{}"


def test_a_copy_that_lacks_what_is_not_needed_will_do(answer, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    snapshot = cached(tmp_path, **SMALL, **WEIGHTS)
    incomplete = getattr(errors, "IncompleteSnapshotError", None)
    if incomplete is None:
        pytest.skip("this huggingface_hub doesn't look")
    answer(incomplete("special_tokens_map.json is missing", snapshot_path=str(snapshot)))
    assert fetch("org/name") == snapshot
    (snapshot / "model-1.safetensors").unlink()
    with pytest.raises(ConnectionError, match="only partly in the cache"):
        fetch("org/name")


def test_the_environment_variable_is_heeded(tmp_path):
    """As a user has it: in a process of its own."""
    snapshot = cached(tmp_path / "hub", **SMALL, **WEIGHTS)
    code = (
        "import sys; from overspill.zoo.hub import fetch\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(fetch(name))\n"
        "    except OSError as error: print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", code, "org/name", "org/other"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    out = done.stdout.splitlines()
    assert out[0] == str(snapshot)
    assert out[1].startswith("'org/other' isn't in the cache") and len(out) == 2


ANSWERS = [
    (errors.GatedRepoError("403\n\nlong text", response=response(403)), ValueError,
     "given only to those who accept its conditions: do so at https://huggingface.co/org/name, then log in"),
    (errors.RepositoryNotFoundError("401\n\nlong text", response=response(401)), ValueError,
     "neither a folder that exists nor a model on the Hub; if it is private, log in with `hf auth login`"),
    (errors.RevisionNotFoundError("404", response=response(404)), ValueError, "'org/name' has no revision 'v1'"),
    (errors.HfHubHTTPError("401 Unauthorized", response=response(401)), ValueError, r"with your login \(HTTP 401\)"),
    (errors.HfHubHTTPError("403 Forbidden", response=response(403)), ValueError, r"with your login \(HTTP 403\)"),
    (errors.HfHubHTTPError("503\nbusy", response=response(503)), ConnectionError, r"\(HTTP 503\): 503 busy"),
    (errors.LocalEntryNotFoundError("an error\n\nand more"), ConnectionError,
     "the Hub can't be reached: check the network"),
    (errors.HFValidationError("no --"), ValueError, "can't be a name on the Hub: no --"),
    (OSError(28, "No space left on device"), ConnectionError, "couldn't be downloaded: OSError: .*No space left"),
    (TimeoutError("slow"), ConnectionError, "couldn't be downloaded: TimeoutError: slow; .* try again"),
    (RuntimeError(), ConnectionError, "couldn't be downloaded: RuntimeError: RuntimeError"),
]  # fmt: skip


@pytest.mark.parametrize(("result", "kind", "said"), ANSWERS)
def test_what_the_hub_answers_becomes_one_line(result, kind, said, answer):
    answer(result)
    with pytest.raises(kind, match=said) as error:
        fetch("org/name@v1")
    assert "\n" not in str(error.value) and "org/name" in str(error.value)


def test_an_interrupt_is_no_error(answer):
    answer(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        fetch("org/name")


def test_a_model_of_pickles_says_why_not(answer, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    answer(tmp_path)
    with pytest.raises(ValueError, match=r"no \*.safetensors file: .* pickles .* are never read"):
        fetch("org/name")
    assert fetch("org/name", weights=False) == tmp_path


def test_no_network_at_all(tmp_path, monkeypatch):
    """The real library, which finds nobody at the other end."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    unreachable = "isn't in the cache .* the Hub can't be reached|couldn't be downloaded"
    with pytest.raises(ConnectionError, match=unreachable) as error:
        fetch("org/name")
    assert "\n" not in str(error.value)
    snapshot = cached(tmp_path / "cache", **SMALL, **WEIGHTS)
    assert fetch("org/name") == snapshot


def test_json_is_read_or_named(tmp_path):
    path = tmp_path / "x.json"
    bad = {b"{": "no JSON", b"\xff": "no JSON", b"[]": "holds a list", b"null": "holds a NoneType"}
    for content, said in bad.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"x.json' is damaged: .*{said}"):
            read_json(path)
    with pytest.raises(ValueError, match="y.json' can't be read: No such file"):
        read_json(tmp_path / "y.json")
    path.write_text('{"eos_token_id": [3, -1]}')
    (tmp_path / "config.json").write_bytes(path.read_bytes())
    assert model_ids(tmp_path, "eos_token_id") == (3,) and model_ids(tmp_path, "bos_token_id") == ()
    assert hub.one_line("a\n  b" + "c" * 500, 20) == "a b" + "c" * 14 + "..."
