import json
import os
import pathlib
import struct

import numpy as np
import pytest

from overspill.zoo.safetensors_io import BadFile, open_file, write_file
from overspill.zoo.weight_index import BadIndex, read_index

INDEX = "model.safetensors.index.json"


def weights(path, *names, value=1.0):
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, [(n, "F32", (2, 3), lambda: np.full((2, 3), value, np.float32)) for n in names])


def index(folder, weight_map, metadata=None):
    (folder / INDEX).write_text(json.dumps({"metadata": metadata or {}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path):
    folder = tmp_path / "model"
    weights(folder / "model-00001-of-000002.safetensors", "a", "b")
    weights(folder / "model-00002-of-000002.safetensors", "c")
    first, second = "model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"
    index(folder, {"c": second, "a": first, "b": first}, {"total_size": 72})
    return folder


def test_an_index(sharded):
    found = read_index(sharded)
    first, second = "model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"
    assert found.files == {"c": second, "a": first, "b": first} and found.total_size == 72
    assert found.folder == sharded and found.paths == {n: sharded / n for n in (first, second)}
    assert not found.absent and not found.unlisted and found.tensors.keys() == {"a", "b", "c"}
    for name, file in found.files.items():
        with open_file(found.paths[file]) as opened:
            assert opened.tensors[name] == found.tensors[name]
    assert read_index(str(sharded)).files == found.files


def test_the_index_decides(sharded):
    """Two files have the same tensor, one has more than it should and less; others are nobody's business."""
    weights(sharded / "model-00002-of-000002.safetensors", "c", "a", "extra", value=2)
    weights(sharded / "consolidated.safetensors", "a", "x")
    weights(sharded / "model.safetensors", "a", "y")
    (sharded / "damaged.safetensors").write_bytes(b"1")
    (sharded / "pytorch_model.bin").write_bytes(b"1")
    listed = json.loads((sharded / INDEX).read_text())["weight_map"]
    index(sharded, listed | {"gone": "model-00001-of-000002.safetensors"})
    found = read_index(sharded)
    assert found.files == listed | {"gone": "model-00001-of-000002.safetensors"}
    assert found.absent == {"gone": "model-00001-of-000002.safetensors"}
    assert found.unlisted == {n: ("model-00002-of-000002.safetensors",) for n in ("a", "extra")}
    assert found.tensors.keys() == {"a", "b", "c"} and len(found.paths) == 2


@pytest.mark.parametrize(
    ("metadata", "size"),
    [
        ({}, None),
        ({"total_size": 5}, 5),
        ({"total_size": 5.0, "total_parameters": 3}, 5),
        ({"total_size": "5"}, None),
        ({"total_size": -1}, None),
        ({"total_size": 1.5}, None),
        ({"total_size": True}, None),
        ({"total_size": None}, None),
        ({"total_size": 10**30}, None),
        (None, None),
        ([], None),
        ("5", None),
    ],
)
def test_the_total_size_is_only_information(sharded, metadata, size):
    content = json.loads((sharded / INDEX).read_text()) | {"metadata": metadata, "more": 1}
    (sharded / INDEX).write_text(json.dumps(content))
    assert read_index(sharded).total_size == size
    del content["metadata"]
    (sharded / INDEX).write_bytes(b"\xef\xbb\xbf" + json.dumps(content).encode())
    assert read_index(sharded).total_size is None
    (sharded / INDEX).write_text(json.dumps(content).replace('"more": 1', '"metadata": {"total_size": 1e999}'))
    assert read_index(sharded).total_size is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON: 'utf-8'"),
        (b'{"weight_map": {"a": NaN}}', "NaN is not JSON"),
        (b'{"weight_map": ' + b"[" * 100_000, "is not JSON"),
        (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' appears twice"),
        (b"[]", "has no weight_map"),
        (b"null", "has no weight_map"),
        (b'"weight_map"', "has no weight_map"),
        (b"{}", "has no weight_map"),
        (b'{"weight_map": null}', "has no weight_map"),
        (b'{"weight_map": {}}', "has no weight_map"),
        (b'{"weight_map": ["a"]}', "has no weight_map"),
        (b'{"weight_map": "model.safetensors"}', "has no weight_map"),
        (b'{"weight_map": {"a": 1}}', "says 1 for 'a', not a file's name"),
        (b'{"weight_map": {"a": null, "b": {}}}', "says None for 'a', not a file's name, and so for 1 more"),
        (b'{"weight_map": {"a": ["model.safetensors"]}}', r"says \['model.safetensors'\] for 'a'"),
    ],
)
def test_malformed_indices(sharded, content, reason):
    (sharded / INDEX).write_bytes(content)
    with pytest.raises(BadIndex, match=f"{INDEX}'.* ?{reason}") as caught:
        read_index(sharded)
    assert isinstance(caught.value, BadFile) and "\n" not in str(caught.value) and len(str(caught.value)) < 600


ESCAPES = [
    "../secret.safetensors",
    "a/../../secret.safetensors",
    "a/../secret.safetensors",
    "..",
    "/etc/secret.safetensors",
    "//etc/secret.safetensors",
    "..\\secret.safetensors",
    "C:\\secret.safetensors",
    "C:secret.safetensors",
    "\\\\host\\secret.safetensors",
    "model.safetensors\0.bin",
    "model\n.safetensors",
    "pytorch_model.bin",
    "model.safetensors.pt",
    "model.SAFETENSORS",
    "http://host/model.safetensors",
    "~/secret.safetensors:",
    "",
    ".",
    "x" * 300 + ".safetensors",
    "\ud800.safetensors",
]


@pytest.mark.parametrize("file", ESCAPES)
def test_files_outside_the_folder_are_refused(sharded, file, monkeypatch):
    (sharded / "a").mkdir()
    for secret in (sharded.parent / "secret.safetensors", sharded / "secret.safetensors"):
        weights(secret, "a")
    (sharded / "pytorch_model.bin").write_bytes(b"1")
    index(sharded, {"a": file, "b": "model-00001-of-000002.safetensors"})
    monkeypatch.chdir(sharded)  # where a relative path would be found
    with pytest.raises(BadIndex, match=r"leads out of the folder|is not the name of a|can't be reached") as caught:
        read_index(sharded)
    assert "'a'" in str(caught.value) and repr(file[:100])[1:-1] in str(caught.value)


def test_everything_wrong_is_listed(sharded):
    os.symlink(sharded.parent, sharded / "up.safetensors")
    (sharded / "damaged.safetensors").write_bytes(struct.pack("<Q", 99))
    (sharded / "folder.safetensors").mkdir()
    os.mkfifo(sharded / "pipe.safetensors")
    files = ["../x.safetensors", "gone.safetensors", "damaged.safetensors", "up.safetensors", "folder.safetensors"]
    files += ["pipe.safetensors", "z.bin"]
    index(sharded, {f"t{i}": f for i, f in enumerate(files)} | {f"u{i}": f for i, f in enumerate(files)})
    with pytest.raises(BadIndex) as caught:
        read_index(sharded)
    message = str(caught.value)
    for reason in [
        f"{INDEX}': ",
        "'../x.safetensors' leads out of the folder (for 't0')",
        "'gone.safetensors' is missing (for 't1')",
        "damaged.safetensors': its header should have 99 bytes",
        "'up.safetensors' is a link out of the folder",
        "folder.safetensors': not a regular file",
        "pipe.safetensors': not a regular file",
        "'z.bin' is not the name of a .safetensors file (for 't6')",
    ]:
        assert message.count(reason) == 1, reason
    index(sharded, {f"t{i}": f"gone{i}.safetensors" for i in range(5000)})
    with pytest.raises(BadIndex, match=r"gone99.safetensors.*; and 4900 more") as caught:
        read_index(sharded)
    assert len(str(caught.value)) < 10_000


def link(target, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    os.symlink(target, path)


def test_links_out_of_the_folder_are_refused(tmp_path):
    weights(tmp_path / "elsewhere" / "x.safetensors", "a")
    folder = tmp_path / "model"
    for target in ("../elsewhere/x.safetensors", tmp_path / "elsewhere" / "x.safetensors"):
        link(target, folder / "model.safetensors")
        with pytest.raises(BadIndex, match="'model.safetensors' is a link out of the folder, to '.*elsewhere"):
            read_index(folder)
        index(folder, {"a": "model.safetensors"})
        with pytest.raises(BadIndex, match="'model.safetensors' is a link out of the folder"):
            read_index(folder)
        (folder / INDEX).unlink()
        (folder / "model.safetensors").unlink()
    link("../elsewhere", folder / "sub")
    index(folder, {"a": "sub/x.safetensors"})
    with pytest.raises(BadIndex, match="'sub/x.safetensors' is a link out of the folder"):
        read_index(folder)
    for name, target in [("loop.safetensors", "loop.safetensors"), ("dangling.safetensors", "nothing")]:
        link(target, folder / name)
        index(folder, {"a": name})
        with pytest.raises(BadIndex, match=f"'{name}' (can't be reached|is missing)"):
            read_index(folder)
    (folder / INDEX).unlink()
    weights(tmp_path / "elsewhere" / "x.safetensors", "a")
    (tmp_path / "elsewhere" / INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    link("../elsewhere/" + INDEX, folder / INDEX)
    with pytest.raises(BadIndex, match=f"'{INDEX}' is a link out of the folder"):
        read_index(folder)
    (folder / INDEX).unlink()
    os.mkfifo(folder / INDEX)
    with pytest.raises(BadIndex, match="is not a regular file"):
        read_index(folder)


def test_links_and_folders_within_the_folder(tmp_path):
    folder = tmp_path / "model"
    weights(folder / "real" / "x.safetensors", "a")
    link("real/x.safetensors", folder / "model.safetensors")
    assert read_index(folder).files == {"a": "model.safetensors"}
    index(folder, {"a": "real/x.safetensors"})
    assert read_index(folder).paths == {"real/x.safetensors": folder / "real" / "x.safetensors"}
    link(folder, tmp_path / "alias")
    assert read_index(tmp_path / "alias").files == {"a": "real/x.safetensors"}


def hub(cache, names, revision="a1b2"):
    """A model in the layout of the Hub's cache, where a snapshot is links to blobs."""
    model = cache / "models--org--name"
    for i, (file, tensors) in enumerate(names.items()):
        blob = model / "blobs" / f"{i:064x}"
        if isinstance(tensors, dict):
            blob.parent.mkdir(parents=True, exist_ok=True)
            blob.write_text(json.dumps(tensors))
        else:
            weights(blob, *tensors)
        up = "../" * (2 + file.count("/"))
        link(f"{up}blobs/{blob.name}", model / "snapshots" / revision / file)
    return model / "snapshots" / revision


def test_the_cache_of_the_hub(tmp_path, monkeypatch):
    single = hub(tmp_path / "one", {"model.safetensors": ["a"]})
    assert read_index(single).files == {"a": "model.safetensors"}
    shards = {"a": "model-00001-of-00002.safetensors", "b": "deep/model-00002-of-00002.safetensors"}
    folder = hub(tmp_path / "two", {INDEX: {"weight_map": shards}} | {f: [t] for t, f in shards.items()})
    found = read_index(folder)
    assert found.files == shards
    with open_file(found.paths[shards["b"]]) as file:
        assert (file.read("b") == 1).all()
    link(folder, tmp_path / "here")  # a link to the snapshot
    link(tmp_path / "two", tmp_path / "cache")  # a cache that is itself somewhere else
    monkeypatch.chdir(folder.parent)
    for way in (tmp_path / "here", tmp_path / "cache" / folder.relative_to(tmp_path / "two"), pathlib.Path("a1b2")):
        assert read_index(way).files == shards


@pytest.mark.parametrize(
    ("where", "blob"),
    [
        ("models--org--name/snapshots/a1", "models--other--name/blobs/x"),  # another model's
        ("models--org--name/snapshots/a1", "models--org--name/elsewhere/x"),
        ("models--org--name/snapshots/a1", "models--org--name/blobs/deep/x"),
        ("models--org--name/snapshots/a1", "blobs/x"),
        ("models--org--name/revisions/a1", "models--org--name/blobs/x"),
        ("org--name/snapshots/a1", "org--name/blobs/x"),
        ("models--org--name/snapshots/deep/a1", "models--org--name/blobs/x"),
    ],
)
def test_links_like_the_cache_but_not_its(tmp_path, where, blob):
    weights(tmp_path / blob, "a")
    link(tmp_path / blob, tmp_path / where / "model.safetensors")
    with pytest.raises(BadIndex, match="is a link out of the folder"):
        read_index(tmp_path / where)


def test_a_folder_without_an_index(tmp_path):
    weights(tmp_path / "one" / "weights.safetensors", "a", "b")
    found = read_index(tmp_path / "one")
    assert found.files == {"a": "weights.safetensors", "b": "weights.safetensors"} and found.total_size is None
    assert found.tensors["a"].shape == (2, 3) and not found.absent and not found.unlisted
    weights(tmp_path / "one" / "model.safetensors", "c")  # then that is the model
    assert read_index(tmp_path / "one").files == {"c": "model.safetensors"}
    folder = tmp_path / "two"
    for i in (1, 2):
        weights(folder / f"model-0000{i}-of-00002.safetensors", f"t{i}", f"u{i}")
    assert read_index(folder).files == {
        f"{n}{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2) for n in ("t", "u")
    }
    weights(folder / "consolidated.safetensors", "t1")  # beside complete shards
    weights(folder / "other-00001-of-00002.safetensors", "t1")
    assert len(read_index(folder).files) == 4
    for stem in ("consolidated", "ema"):
        weights(tmp_path / "five" / f"{stem}-1-of-2.safetensors", f"{stem}.x")
    assert read_index(tmp_path / "five").files.keys() == {"consolidated.x", "ema.x"}
    weights(tmp_path / "three" / "a.safetensors", "x")
    weights(tmp_path / "three" / "b.safetensors", "y")
    assert read_index(tmp_path / "three").files == {"x": "a.safetensors", "y": "b.safetensors"}
    (tmp_path / "four").mkdir()
    weights(tmp_path / "four" / "x.safetensors", "x")
    (tmp_path / "four" / "x.safetensors.index.json").write_text('{"weight_map": {"x": "x.safetensors"}}')
    assert read_index(tmp_path / "four").total_size is None


def test_shards_that_are_not_all_there(tmp_path):
    weights(tmp_path / "model-00001-of-00003.safetensors", "a")
    weights(tmp_path / "model-00003-of-00003.safetensors", "b")
    with pytest.raises(BadIndex, match=r"not the shards of one checkpoint, 3 of them: there are '.*00001.*', '.*00003"):
        read_index(tmp_path)
    weights(tmp_path / "model-00002-of-00004.safetensors", "c")
    with pytest.raises(BadIndex, match="not the shards of one checkpoint, 4 of them"):
        read_index(tmp_path)
    mixed = tmp_path / "mixed"
    for i, count in enumerate((2, 3, 3), 1):
        weights(mixed / f"weights-{i}-of-{count}.safetensors", f"t{i}")
    with pytest.raises(BadIndex, match="not the shards of one checkpoint, 3 of them: there are 'weights-1-of-2"):
        read_index(mixed)
    other = tmp_path / "other"
    for i in (1, 3):
        weights(other / f"model-0000{i}-of-00002.safetensors", f"t{i}")
    with pytest.raises(BadIndex, match="not the shards of one checkpoint, 2 of them"):
        read_index(other)
    (other / "model-00009-of-999999999999.safetensors").write_bytes(b"")
    with pytest.raises(BadIndex, match="not the shards of one checkpoint, 999999999999 of them"):
        read_index(other)


def test_a_tensor_in_two_files(tmp_path):
    weights(tmp_path / "a.safetensors", "x", "y", "z")
    weights(tmp_path / "b.safetensors", "y", "z")
    with pytest.raises(BadIndex) as caught:
        read_index(tmp_path)
    for name in "yz":
        assert f"tensor '{name}' is in 'a.safetensors' and in 'b.safetensors', and no index says" in str(caught.value)
    (tmp_path / "b.safetensors").unlink()
    link("a.safetensors", tmp_path / "b.safetensors")  # one and the same
    assert set(read_index(tmp_path).files.values()) == {"a.safetensors"}


def test_damage_without_an_index(tmp_path):
    weights(tmp_path / "model-00001-of-00003.safetensors", "a")
    for i in (2, 3):
        weights(tmp_path / f"model-0000{i}-of-00003.safetensors", f"b{i}")
        os.truncate(tmp_path / f"model-0000{i}-of-00003.safetensors", 30 + i)
    with pytest.raises(BadIndex) as caught:
        read_index(tmp_path)
    assert "00002-of-00003.safetensors': its header" in str(caught.value) and "00003-of-00003" in str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt", "weights.pkl"])
def test_pickles_are_refused_with_the_reason(tmp_path, name):
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(BadIndex, match=f"no safetensors files, only '{name}': reading a pickle runs whatever code"):
        read_index(tmp_path)


def test_folders_without_weights(tmp_path):
    with pytest.raises(BadIndex, match="no safetensors files: it holds nothing"):
        read_index(tmp_path)
    for i in range(12):
        (tmp_path / f"{i:02}.json").write_text("{}")
    with pytest.raises(BadIndex, match="it holds '00.json', '01.json', .* and 2 more"):
        read_index(tmp_path)
    for path in (tmp_path / "nowhere", tmp_path / "00.json"):
        with pytest.raises(BadIndex, match=f"{path.name}' is not a folder with weights"):
            read_index(path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(BadIndex, match="several indices, 'a.safetensors.index.json', 'b.* and none is called model"):
        read_index(tmp_path)


def test_an_unfinished_write_is_not_seen(tmp_path):
    weights(tmp_path / "model.safetensors", "a")
    (tmp_path / "model.safetensors").rename(tmp_path / ".model.safetensors.0123.partial")
    with pytest.raises(BadIndex, match="no safetensors files"):
        read_index(tmp_path)


def test_an_index_that_is_too_large(sharded):
    os.truncate(sharded / INDEX, 10**8 + 1)
    with pytest.raises(BadIndex, match="has 100000001 bytes; 100000000 is the most"):
        read_index(sharded)
