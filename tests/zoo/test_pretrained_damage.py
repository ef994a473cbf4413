"""Folders that are damaged in every way we could think of: one error says all that is wrong."""

import json
import pathlib
import sys

import numpy as np
import pytest

from overspill import zoo
from overspill.zoo.pretrained import WeightMismatch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from weight_files import FAMILIES, random_model, raw, tensors_of, write_folder, write_raw

FAMILY = "llama_mlp_bias"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
INDEX = "model.safetensors.index.json"
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def sound():
    return tensors_of(random_model(FAMILY))


def rewrite(path, change):
    """Changes the bytes of a file."""
    path.write_bytes(bytes(change(bytearray(path.read_bytes()))))


def header(path, change):
    """Changes the header of a safetensors file, and nothing of what follows."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + size])
    change(entries)
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def index(folder, change):
    content = json.loads((folder / INDEX).read_text())
    change(content)
    (folder / INDEX).write_text(json.dumps(content))


def replaced(folder, name, file):
    index(folder, lambda content: content["weight_map"].update({name: file}))


def size_at(data, value):
    data[:8] = value.to_bytes(8, "little")
    return data


# What is done to a sound folder of three shards, and what the error has to name.
DAMAGE = {
    "truncated": (lambda f: rewrite(f / SHARDS[1], lambda d: d[:-100]), [SHARDS[1]]),
    "truncated in the header": (lambda f: rewrite(f / SHARDS[0], lambda d: d[:40]), [SHARDS[0]]),
    "empty": (lambda f: (f / SHARDS[2]).write_bytes(b""), [SHARDS[2]]),
    "bytes behind the end": (lambda f: rewrite(f / SHARDS[1], lambda d: d + b"more"), [SHARDS[1]]),
    "not safetensors": (lambda f: (f / SHARDS[1]).write_bytes(b"PK\x03\x04" + b"x" * 500), [SHARDS[1]]),
    "header longer than the file": (lambda f: rewrite(f / SHARDS[0], lambda d: size_at(d, 2**40)), [SHARDS[0]]),
    "header of almost all": (lambda f: rewrite(f / SHARDS[0], lambda d: size_at(d, len(d) - 8)), [SHARDS[0]]),
    "header length that overflows": (lambda f: rewrite(f / SHARDS[0], lambda d: size_at(d, 2**64 - 1)), [SHARDS[0]]),
    "offset outside": (
        lambda f: header(f / SHARDS[0], lambda h: next(iter(h.values())).update(data_offsets=[0, 10**9])), [SHARDS[0]]
    ),
    "negative offset": (
        lambda f: header(f / SHARDS[0], lambda h: next(iter(h.values())).update(data_offsets=[-8, 0])), [SHARDS[0]]
    ),
    "shape that isn't its bytes'": (
        lambda f: header(f / SHARDS[0], lambda h: next(iter(h.values())).update(shape=[3, 3])), [SHARDS[0]]
    ),
    "missing shard": (lambda f: (f / SHARDS[1]).unlink(), [SHARDS[1]]),
    "shard that is a folder": (
        lambda f: ((f / SHARDS[1]).unlink(), (f / SHARDS[1]).mkdir()), [SHARDS[1]]
    ),
    "index leads outside": (lambda f: replaced(f, QUERY, "../model.safetensors"), ["../model.safetensors"]),
    "index leads to the root": (lambda f: replaced(f, QUERY, "/etc/passwd"), ["/etc/passwd"]),
    "index leads to a pickle": (
        lambda f: ((f / "w.bin").write_bytes(b"\x80\x04."), replaced(f, QUERY, "w.bin")), ["w.bin"]
    ),
    "link that leads outside": (
        lambda f: (
            (f / SHARDS[1]).rename(f.parent / "elsewhere.safetensors"),
            (f / SHARDS[1]).symlink_to(f.parent / "elsewhere.safetensors"),
        ),
        [SHARDS[1]],
    ),
    "index that is no JSON": (lambda f: (f / INDEX).write_text("{"), [INDEX]),
    "index of the wrong kind": (lambda f: (f / INDEX).write_text('{"weight_map": ["a"]}'), ["weight_map"]),
    "index names the wrong file": (lambda f: replaced(f, "lm_head.weight", SHARDS[1]), ["lm_head.weight", SHARDS[1]]),
    "index names no file": (
        lambda f: index(f, lambda c: c["weight_map"].pop(QUERY)), [QUERY, "doesn't list it"]
    ),
    "index names a tensor too many": (lambda f: replaced(f, "model.extra", SHARDS[1]), ["model.extra", SHARDS[1]]),
    "dtype that nobody knows": (
        lambda f: header(f / SHARDS[0], lambda h: next(iter(h.values())).update(dtype="F4_E2M1X")), ["F4_E2M1X"]
    ),
    "integers": (
        lambda f: header(f / SHARDS[0], lambda h: next(iter(h.values())).update(dtype="I32")), ["I32"]
    ),
    "pickles only": (
        lambda f: ([(f / name).unlink() for name in (*SHARDS, INDEX)], (f / "pytorch_model.bin").write_bytes(b"\x80")),
        ["pytorch_model.bin", "pickle"],
    ),
    "no weights": (lambda f: [(f / name).unlink() for name in (*SHARDS, INDEX)], ["no safetensors"]),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(tmp_path, sound, kind):
    damage, expected = DAMAGE[kind]
    folder = write_folder(tmp_path / "model", FAMILIES[FAMILY], sound, shards=3)
    damage(folder)
    with pytest.raises(WeightMismatch) as error:
        zoo.load(folder)
    for text in expected:
        assert text in str(error.value)
    assert str(folder) in str(error.value)


# What is done to the tensors, and what the error has to say of it.
CHANGES = {
    "missing": (lambda t: t.pop(QUERY), f"missing (1):\n    {QUERY}, for layers.segments.0.attention.query_projection"
                                        ".weight[1] [48, 48]"),
    "unexpected": (lambda t: t.update({"model.extra.weight": np.ones((2, 3), "f4")}),
                   "unexpected (1):\n    model.extra.weight F32[2, 3] in model.safetensors"),
    "bias that the config doesn't have": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(48, "f4")}), "q_proj.bias F32[48]"
    ),
    "transposed": (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t["model.layers.2.mlp.up_proj.weight"].T}),
                   "model.layers.2.mlp.up_proj.weight F32[48, 80], for layers.segments.0.mlp.up_projection.weight[2] "
                   "[80, 48]: [80, 48] is wanted"),
    "another vocabulary": (lambda t: t.update({"model.embed_tokens.weight": np.ones((98, 48), "f4")}),
                           "model.embed_tokens.weight F32[98, 48], for embedding.weight [97, 48]"),
    "an axis more": (lambda t: t.update({"model.norm.weight": np.ones((1, 48), "f4")}), "model.norm.weight F32[1, 48]"),
    "no axis": (lambda t: t.update({"model.norm.weight": np.ones((), "f4")}), "model.norm.weight F32[]"),
    "bytes": (lambda t: t.update({QUERY: np.ones((48, 48), "u1")}), f"{QUERY} U8[48, 48]"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_tensors_that_do_not_fit_are_named_with_both_shapes(tmp_path, sound, kind):
    change, expected = CHANGES[kind]
    tensors = dict(sound)
    change(tensors)
    folder = write_folder(tmp_path, FAMILIES[FAMILY], tensors)
    with pytest.raises(WeightMismatch) as error:
        zoo.load(folder)
    assert expected in str(error.value)
    assert sum(map(len, error.value.problems.values())) == 1


def test_one_error_lists_everything(tmp_path, sound):
    tensors = dict(sound) | {"model.extra.weight": np.ones(3, "f4"), "lm_head.weight": np.ones((2, 2), "f4")}
    del tensors[QUERY]
    folder = write_folder(tmp_path, FAMILIES[FAMILY], tensors, shards=3)
    lost = json.loads((folder / INDEX).read_text())["weight_map"]
    rewrite(folder / SHARDS[1], lambda data: data[:-1])
    replaced(folder, "model.norm.weight", "../../secret.safetensors")
    with pytest.raises(WeightMismatch) as error:
        zoo.load(folder)
    problems = error.value.problems
    damaged = " ".join(problems["damaged"])
    assert SHARDS[1] in damaged and "../../secret.safetensors" in damaged
    told = " ".join(problems.get("missing", []) + problems.get("unexpected", []) + problems.get("wrong", []))
    assert (QUERY in told) and (lost["lm_head.weight"] == SHARDS[1] or "lm_head.weight" in told)
    assert lost["model.extra.weight"] == SHARDS[1] or "model.extra.weight" in told
    # What the broken file held isn't reported once more, tensor by tensor.
    assert not any(name in told for name, file in lost.items() if file == SHARDS[1])


def test_nothing_of_a_file_outside_the_folder_is_told(tmp_path, sound):
    """One that a link leads to is refused, and not looked into for the list of what else is wrong."""
    tensors = dict(sound)
    del tensors["model.norm.weight"]
    folder = write_folder(tmp_path / "model", FAMILIES[FAMILY], tensors, shards=3)
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    inside = [name for name, file in where.items() if file == SHARDS[1]]
    write_raw(tmp_path / "outside.safetensors", {name: raw(np.ones((7, 5), "f4")) for name in inside})
    (folder / SHARDS[1]).unlink()
    (folder / SHARDS[1]).symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(WeightMismatch, match="is a link out of the folder") as error:
        zoo.load(folder)
    assert "[7, 5]" not in str(error.value)
    assert [line.split(",")[0] for line in error.value.problems["missing"]] == ["model.norm.weight"]


def test_one_error_lists_everything_in_the_cache_of_the_hub_too(tmp_path, sound):
    """Where every file is a link to a blob."""
    tensors = dict(sound)
    del tensors["model.norm.weight"]
    model = tmp_path / "models--org--name"
    folder = write_folder(model / "snapshots" / "0123", FAMILIES[FAMILY], tensors, shards=3)
    (model / "blobs").mkdir()
    for path in list(folder.iterdir()):
        path.rename(model / "blobs" / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    rewrite(model / "blobs" / SHARDS[1], lambda data: data[:-1])
    with pytest.raises(WeightMismatch) as error:
        zoo.load(folder)
    problems = error.value.problems
    assert set(problems) == {"damaged", "missing"} and SHARDS[1] in problems["damaged"][0]
    assert [line.split(",")[0] for line in problems["missing"]] == ["model.norm.weight"]


def test_long_lists_are_cut_and_counted(tmp_path, sound):
    tensors = {name: array for name, array in sound.items() if ".layers." not in name}
    count = len(sound) - len(tensors)
    with pytest.raises(WeightMismatch, match=rf"missing \({count}\)(.|\n)*and {count - 20} more") as error:
        zoo.load(write_folder(tmp_path, FAMILIES[FAMILY], tensors))
    assert len(str(error.value).splitlines()) == 23
    assert len(error.value.problems["missing"]) == count


def test_values_that_are_not_finite_are_the_files_own(tmp_path, sound):
    tensors = dict(sound) | {"model.norm.weight": np.full(48, np.nan, "f4")}
    assert np.isnan(zoo.load(write_folder(tmp_path, FAMILIES[FAMILY], tensors)).norm.scale).all()


def test_no_config_and_a_broken_one(tmp_path, sound):
    folder = write_folder(tmp_path, FAMILIES[FAMILY], sound)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json"):
        zoo.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="config.json"):
        zoo.load(folder)
    assert zoo.load(folder, config=FAMILIES[FAMILY]).config == zoo.from_config(FAMILIES[FAMILY])


def test_nothing_is_left_open(tmp_path, sound):
    descriptors = pathlib.Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("open files are listed on Linux only")
    folder = write_folder(tmp_path, FAMILIES[FAMILY], sound, shards=3)
    zoo.load(folder)
    count = len(list(descriptors.iterdir()))
    zoo.load(folder)
    (folder / SHARDS[1]).unlink()
    with pytest.raises(WeightMismatch):
        zoo.load(folder)
    assert len(list(descriptors.iterdir())) == count
    maps = pathlib.Path("/proc/self/maps").read_text()
    assert str(folder) not in maps


def test_tensors_of_one_file_may_lie_anywhere_in_it(tmp_path, sound):
    # Names in another order than bytes.
    folder = write_folder(tmp_path, FAMILIES[FAMILY], {})
    turned = {name: raw(sound[name]) for name in reversed(list(sound))}

    def sort(entries):
        in_order = sorted(entries.items())
        entries.clear()
        entries.update(in_order)

    write_raw(folder / "model.safetensors", turned, header=sort)
    for name, array in tensors_of(zoo.load(folder)).items():
        np.testing.assert_array_equal(array, sound[name])
