import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from overspill import zoo
from overspill.zoo import exporting, model_folder, pretrained

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from weight_files import FAMILIES, assert_same, random_like, random_model, read_folder, tensors_of

LLAMA, TIED, V3 = "llama_mlp_bias", "llama_llama3", "deepseek_v3_mtp"
MIXTURES = ["mixtral", "qwen3_moe_dense_prefix", "glm4_moe", "gpt_oss", "deepseek_v2_lite", V3, "deepseek_v32"]


def bits(array):
    return array.shape, array.dtype, np.ascontiguousarray(array).tobytes()


class TestRoundTrips:
    @pytest.mark.parametrize("family", [LLAMA, TIED, "olmo2_grouped", "qwen2", *MIXTURES])
    def test_float32(self, tmp_path, family):
        model = random_model(family)
        folder = zoo.save(model, tmp_path / "new")
        assert folder == tmp_path / "new"
        loaded = zoo.load(folder)
        assert_same(loaded, model)
        assert loaded.config == model.config

    @pytest.mark.parametrize("family, dtype, saved, loaded", [
        (V3, "bfloat16", {"segments": (2,)}, {"segments": (1,), "scan": False}),
        (LLAMA, "float16", {"scan": False}, {"segments": (1, 2)}),
        ("gpt_oss", "bfloat16", {"segments": (1, 3)}, {"segments": (2,)}),
    ])  # fmt: skip
    def test_other_dtypes_and_segments(self, tmp_path, family, dtype, saved, loaded):
        model = random_model(family, dtype=dtype, **saved)
        zoo.save(model, tmp_path / "new", max_shard_bytes=20_000)
        assert_same(zoo.load(tmp_path / "new", **loaded), model)

    @pytest.mark.parametrize("name", ["llama", "deepseek-v3-two-depths", "deepseek-v2", "deepseek-v2-lite"])
    def test_configs_that_came_from_no_file(self, tmp_path, make, configs, name):
        model = make(name, dtype=jnp.bfloat16)
        loaded = zoo.load(zoo.save(model, tmp_path / "new"))
        assert_same(loaded, model)
        assert dataclasses.replace(loaded.config, model_type=None) == configs[name]

    def test_twice_is_the_same_file(self, tmp_path):
        zoo.save(random_model(V3), tmp_path / "a", max_shard_bytes=50_000)
        zoo.save(zoo.load(tmp_path / "a", segments=(1,)), tmp_path / "b", max_shard_bytes=50_000)
        names = sorted(path.name for path in (tmp_path / "a").iterdir())
        assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
        for name in names:
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


class TestFiles:
    @pytest.mark.parametrize("family", [LLAMA, TIED, *MIXTURES])
    def test_names_and_numbers(self, tmp_path, family):
        model = random_model(family, dtype=jnp.bfloat16)
        zoo.save(model, tmp_path / "new", max_shard_bytes=30_000)
        expected = tensors_of(model)
        written = read_folder(tmp_path / "new")
        assert set(written) == set(expected)
        for name, array in expected.items():
            assert bits(written[name]) == bits(array), name

    def test_the_stock_reader_agrees(self, tmp_path):
        safetensors = pytest.importorskip("safetensors.numpy")
        model = random_model("gpt_oss", dtype=jnp.bfloat16)
        zoo.save(model, tmp_path / "new")
        for name, array in safetensors.load_file(tmp_path / "new" / "model.safetensors").items():
            assert bits(array) == bits(tensors_of(model)[name]), name

    def test_one_file_or_several(self, tmp_path):
        model = random_model(V3)
        tensors = tensors_of(model)
        zoo.save(model, tmp_path / "one")
        assert sorted(os.listdir(tmp_path / "one")) == ["config.json", "model.safetensors"]
        limit = 40_000
        zoo.save(model, tmp_path / "many", max_shard_bytes=limit)
        index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values())
        assert set(index["weight_map"]) == set(tensors)
        files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
        assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
        assert len(files) > 3 and set(index["weight_map"].values()) == set(files)
        for file in files:
            mine = [name for name, where in index["weight_map"].items() if where == file]
            assert sum(tensors[name].nbytes for name in mine) <= limit or len(mine) == 1
            data = (tmp_path / "many" / file).read_bytes()
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            assert header.pop("__metadata__") == {"format": "pt"}
            assert set(header) == set(mine)

    def test_layers_stay_together(self, tmp_path):
        zoo.save(random_model(LLAMA), tmp_path / "new", max_shard_bytes=50_000)
        where = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())["weight_map"]
        layers = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(3)]
        files = [where[name] for name in ("model.embed_tokens.weight", *layers, "lm_head.weight")]
        assert files == sorted(files)

    def test_a_tied_head_is_written_once(self, tmp_path):
        zoo.save(random_model(TIED), tmp_path / "new")
        assert "lm_head.weight" not in read_folder(tmp_path / "new")
        assert json.loads((tmp_path / "new" / "config.json").read_text())["tie_word_embeddings"] is True

    def test_prediction_modules_come_behind_the_layers(self, tmp_path):
        zoo.save(random_model(V3), tmp_path / "new")
        extra = {name for name in read_folder(tmp_path / "new") if name.startswith("model.layers.3.")}
        assert {f"model.layers.3.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")} < extra
        assert not any("embed_tokens" in name or "shared_head.head" in name for name in extra)
        assert json.loads((tmp_path / "new" / "config.json").read_text())["num_nextn_predict_layers"] == 1


class TestDtypes:
    @pytest.mark.parametrize("dtype", ["bfloat16", jnp.float16, np.dtype("float32"), None])
    def test_in_files_and_config(self, tmp_path, dtype):
        model = random_model(V3)
        zoo.save(model, tmp_path / "new", dtype=dtype)
        name = "float32" if dtype is None else jnp.dtype(dtype).name
        config = json.loads((tmp_path / "new" / "config.json").read_text())
        assert config["dtype"] == config["torch_dtype"] == name
        expected = tensors_of(model)
        for tensor, array in read_folder(tmp_path / "new").items():
            kept = "mlp.gate." in tensor
            kind = np.dtype(np.float32 if kept else getattr(ml_dtypes, name, name))
            assert bits(array) == bits(expected[tensor].astype(kind)), tensor

    def test_by_default_what_was_loaded(self, tmp_path):
        zoo.save(random_model(LLAMA), tmp_path / "a", dtype=jnp.bfloat16)
        zoo.save(zoo.load(tmp_path / "a"), tmp_path / "b")
        assert {array.dtype.name for array in read_folder(tmp_path / "b").values()} == {"bfloat16"}
        assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"

    @pytest.mark.parametrize("dtype", [jnp.int32, jnp.float8_e4m3fn, jnp.float64], ids=str)
    def test_others_are_refused(self, tmp_path, dtype):
        with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
            zoo.save(random_model(LLAMA), tmp_path / "new", dtype=dtype)
        assert os.listdir(tmp_path) == []


class TestArrays:
    def numpy_like(self, model, form):
        return jax.tree.map(lambda leaf: form(np.asarray(leaf)), model)

    @pytest.mark.parametrize("form", [
        lambda a: np.asfortranarray(a), lambda a: np.repeat(a, 2, axis=-1)[..., ::2], lambda a: a[::-1][::-1],
        lambda a: np.ascontiguousarray(a.T).T, lambda a: jnp.asarray(a.T).T, lambda a: np.broadcast_to(a, a.shape),
    ], ids=["fortran", "every second", "reversed", "transposed", "transposed by jax", "read-only"])  # fmt: skip
    def test_memory_in_any_order(self, tmp_path, form):
        model = random_model("gpt_oss")
        zoo.save(self.numpy_like(model, form), tmp_path / "new")
        for name, array in read_folder(tmp_path / "new").items():
            assert bits(array) == bits(tensors_of(model)[name]), name

    def test_host_memory(self, tmp_path):
        model = random_model(V3)
        kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
        for kind in kinds:
            there = jax.tree.map(lambda x, k=kind: jax.device_put(x, x.sharding.with_memory_kind(k)), model)
            zoo.save(there, tmp_path / kind)
            assert_same(zoo.load(tmp_path / kind), model)

    def test_a_layer_of_an_array_that_is_not_on_a_cpu(self):
        # What runs for other devices runs on a CPU's memories too.
        array = jnp.arange(30.0).reshape(5, 2, 3)
        for memory in jax.devices()[0].addressable_memories():
            there = jax.device_put(array, array.sharding.with_memory_kind(memory.kind))
            for layer in range(5):
                np.testing.assert_array_equal(exporting._layer(there, layer), np.asarray(array)[layer])

    def test_shards_of_several_devices(self, tmp_path):
        code = """
import sys, jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from overspill import zoo
model = zoo.load(sys.argv[1])
mesh = jax.make_mesh((2, 2), ("a", "b"))
def put(leaf):
    # The last axis that four devices can share; the one before, or all, where none can.
    spec = [None] * leaf.ndim
    for axis, name in ((leaf.ndim - 1, "a"), (0, "b")):
        if leaf.shape[axis] % 2 == 0 and spec[axis] is None:
            spec[axis] = name
    return jax.device_put(leaf, NamedSharding(mesh, P(*spec)))
sharded = jax.tree.map(put, model)
assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(sharded))
zoo.save(sharded, sys.argv[2])
"""
        model = random_model("qwen3_moe_dense_prefix")
        zoo.save(model, tmp_path / "a")
        environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
        subprocess.run(
            [sys.executable, "-c", code, tmp_path / "a", tmp_path / "b"], env=environment, check=True, timeout=120
        )
        assert_same(zoo.load(tmp_path / "b"), model)

    def test_what_cannot_be_written_is_named(self, tmp_path):
        model = random_model(LLAMA)
        path = lambda m: m.layers.segments[0].mlp.up_projection.weight
        bad = {
            "is abstract": jax.ShapeDtypeStruct((3, 80, 48), jnp.float32),
            r"\[3, 80, 47\], with this config it is \[3, 80, 48\]": path(model)[..., :-1],
            "aren't finite|isn't finite": path(model).at[1, 2, 3].set(jnp.nan),
        }
        deleted = jnp.array(path(model), copy=True)
        deleted.delete()
        bad["has been deleted"] = deleted
        for message, leaf in bad.items():
            with pytest.raises(ValueError, match=message) as error:
                zoo.save(eqx.tree_at(path, model, leaf), tmp_path / "new")
            assert "layers.segments.0.mlp.up_projection.weight" in str(error.value)
            assert os.listdir(tmp_path) == []

    def test_the_layer_that_is_not_finite_is_named(self, tmp_path):
        model = random_model("gpt_oss")
        path = lambda m: m.moe_layers.segments[0].moe.experts.up_weight
        for value in (np.inf, -np.inf, np.nan):
            changed = eqx.tree_at(path, model, path(model).at[2, 1, 0, 0].set(value))
            with pytest.raises(ValueError, match=r"experts.up_weight\[2\] \(model.layers.2.mlp.experts.gate_up_proj\)"):
                zoo.save(changed, tmp_path / "new")

    def test_numbers_beyond_a_dtype(self, tmp_path):
        model = random_model(LLAMA)
        large = eqx.tree_at(lambda m: m.norm.scale, model, model.norm.scale.at[0].set(1e6))
        zoo.save(large, tmp_path / "wide", dtype=jnp.bfloat16)
        with pytest.raises(ValueError, match="norm.scale .* aren't finite in float16"):
            zoo.save(large, tmp_path / "narrow", dtype=jnp.float16)

    def test_traced_and_other_things(self, tmp_path):
        model = random_model(LLAMA)
        with pytest.raises(ValueError, match="is traced"):
            jax.eval_shape(lambda model: zoo.save(model, tmp_path / "new") and 0, model)
        with pytest.raises(ValueError, match="a model is saved, not a dict"):
            zoo.save({"model": model}, tmp_path / "new")
        headless = eqx.tree_at(lambda m: m.head, model, None)
        with pytest.raises(ValueError, match="config has 'head.weight', the model hasn't"):
            zoo.save(headless, tmp_path / "new")
        with pytest.raises(ValueError, match="max_shard_bytes"):
            zoo.save(model, tmp_path / "new", max_shard_bytes=0)
        assert os.listdir(tmp_path) == []


class TestFolders:
    def test_a_taken_one_is_refused(self, tmp_path):
        model = random_model(LLAMA)
        zoo.save(model, tmp_path)  # empty: fine
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(ValueError, match="overwrite=True"):
            zoo.save(random_model(TIED), tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match="is a file"):
            zoo.save(model, tmp_path / "file", overwrite=True)

    def test_overwriting_replaces_all_of_it(self, tmp_path):
        zoo.save(random_model(V3), tmp_path / "new", max_shard_bytes=40_000)
        model = random_model(TIED)
        zoo.save(model, tmp_path / "new", overwrite=True)
        assert sorted(os.listdir(tmp_path / "new")) == ["config.json", "model.safetensors"]
        assert_same(zoo.load(tmp_path / "new"), model)
        assert os.listdir(tmp_path) == ["new"]

    def test_only_models_are_overwritten(self, tmp_path):
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "thesis.tex").write_text("")
        with pytest.raises(ValueError, match="isn't a model's folder"):
            zoo.save(random_model(LLAMA), tmp_path / "home", overwrite=True)
        assert os.listdir(tmp_path / "home") == ["thesis.tex"]

    def test_what_is_no_part_of_a_model_is_not_removed(self, tmp_path):
        old = random_model(TIED)
        zoo.save(old, tmp_path / "new")
        (tmp_path / "new" / "runs").mkdir()
        (tmp_path / "new" / "notes.txt").write_text("")
        with pytest.raises(ValueError, match="has more in it than a model .notes.txt, runs."):
            zoo.save(random_model(LLAMA), tmp_path / "new", overwrite=True)
        assert_same(zoo.load(tmp_path / "new"), old)

    def test_where_folders_cannot_change_places_in_one(self, tmp_path, monkeypatch):
        monkeypatch.setattr(model_folder, "_exchange", lambda *_: False)
        model = random_model(LLAMA)
        zoo.save(random_model(TIED), tmp_path / "new")
        zoo.save(model, tmp_path / "new", overwrite=True)
        assert_same(zoo.load(tmp_path / "new"), model)
        assert os.listdir(tmp_path) == ["new"]

    def test_a_model_over_its_own_source(self, tmp_path):
        model = random_model(LLAMA)
        zoo.save(model, tmp_path / "new")
        zoo.save(zoo.load(tmp_path / "new"), tmp_path / "new", overwrite=True)
        assert_same(zoo.load(tmp_path / "new"), model)

    def test_links_and_parents(self, tmp_path):
        model = random_model(LLAMA)
        zoo.save(model, tmp_path / "deep" / "down" / "new")
        (tmp_path / "link").symlink_to(tmp_path / "deep" / "down" / "new")
        zoo.save(model, tmp_path / "link", overwrite=True)
        assert (tmp_path / "link").is_symlink()
        assert_same(zoo.load(tmp_path / "link"), model)

    @pytest.mark.parametrize("where", ["write_weights", "write_config", "write_tokenizer"])
    def test_what_fails_leaves_nothing(self, tmp_path, monkeypatch, where):
        old = random_model(TIED)
        zoo.save(old, tmp_path / "new")

        def fail(*_):
            raise OSError("No space left on device")

        monkeypatch.setattr(pretrained, where, fail)
        for folder, overwrite in ((tmp_path / "new", True), (tmp_path / "other", False)):
            with pytest.raises(OSError, match="No space left"):
                zoo.save(random_model(LLAMA), folder, overwrite=overwrite)
        assert os.listdir(tmp_path) == ["new"]
        assert_same(zoo.load(tmp_path / "new"), old)

    def test_the_old_one_comes_back_if_the_swap_fails(self, tmp_path, monkeypatch):
        old = random_model(TIED)
        zoo.save(old, tmp_path / "new")
        rename = os.rename

        def fail(source, target):
            if ".partial-" in str(source):
                raise OSError("no")
            rename(source, target)

        monkeypatch.setattr(model_folder.os, "rename", fail)
        monkeypatch.setattr(model_folder, "_exchange", lambda *_: False)  # as on other systems than Linux
        with pytest.raises(OSError, match="no"):
            zoo.save(random_model(LLAMA), tmp_path / "new", overwrite=True)
        assert os.listdir(tmp_path) == ["new"]
        assert_same(zoo.load(tmp_path / "new"), old)


KILLED = """
import os, signal, sys
import jax
from overspill import zoo
from overspill.zoo import exporting, model_folder, safetensors_io
when, count = sys.argv[3], int(sys.argv[4])
seen = 0

def watch(module, name):
    original = getattr(module, name)
    def called(*args, **kwargs):
        global seen
        seen += 1
        if seen > count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    setattr(module, name, called)

model = zoo.load(sys.argv[1])
{"tensor": lambda: watch(exporting._Maker, "__call__"), "fsync": lambda: watch(os, "fsync"),
 "replace": lambda: watch(os, "replace"), "rename": lambda: watch(os, "rename"),
 "exchange": lambda: watch(model_folder, "_exchange"), "json": lambda: watch(model_folder, "write_json"),
 "remove": lambda: watch(model_folder.shutil, "rmtree")}[when]()
zoo.save(model, sys.argv[2], max_shard_bytes=30_000, overwrite=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL")
@pytest.mark.parametrize("there", [False, True], ids=["new", "overwritten"])
def test_a_killed_save_leaves_no_folder_that_loads(tmp_path, there):
    model, old = random_model(LLAMA, seed=1), random_model(TIED)
    zoo.save(model, tmp_path / "source")
    moments = [("tensor", 20), ("replace", 2), ("json", 0), ("json", 1), ("rename", 0)]
    if there:
        moments = [("fsync", 1), ("exchange", 0), ("remove", 0)]
    running = []
    for when, count in moments:
        place = tmp_path / f"{when}{count}"
        place.mkdir()
        if there:
            zoo.save(old, place / "target")
        arguments = [sys.executable, "-c", KILLED, tmp_path / "source", place / "target", when, str(count)]
        running.append((place, subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)))
        if len(running) % 3 == 0:
            running[-3][1].wait(120)
    for place, process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode in (-signal.SIGKILL, 0), errors
        whole = 0
        for folder in place.iterdir():
            try:
                loaded = zoo.load(folder)
            except ValueError:
                continue
            # What loads is all of the new model or all of the old one.
            assert_same(loaded, model if loaded.head is not None else old)
            whole += 1
        if there:
            # Under its own name: the two change places in one step, where the system can.
            assert sys.platform != "linux" or zoo.load(place / "target") is not None
            assert whole >= 1, place
        elif process.returncode:
            assert not (place / "target").exists()
    assert all(process.returncode for _, process in running)


@pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL")
def test_killed_at_any_time(tmp_path):
    model = random_model(LLAMA, seed=1)
    zoo.save(model, tmp_path / "source")
    code = """
import itertools, sys
from overspill import zoo
model = zoo.load(sys.argv[1])
print("ready", flush=True)
for i in itertools.count():
    zoo.save(model, sys.argv[2], max_shard_bytes=20_000, overwrite=True)
"""
    for i in range(2):
        place = tmp_path / str(i)
        place.mkdir()
        arguments = [sys.executable, "-c", code, tmp_path / "source", place / "target"]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.15 + 0.13 * i)
            process.kill()
        for folder in place.iterdir():
            try:
                loaded = zoo.load(folder)
            except ValueError:
                continue
            assert_same(loaded, model)


class TestTokenizers:
    def test_files_of_a_folder(self, tmp_path):
        source = tmp_path / "source"
        source.mkdir()
        files = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
        for name in (*files, "notes.txt", "model.safetensors"):
            (source / name).write_text(name)
        zoo.save(random_model(LLAMA), tmp_path / "new", tokenizer=source)
        assert set(os.listdir(tmp_path / "new")) == {"config.json", "model.safetensors", *files}
        assert (tmp_path / "new" / "tokenizer.json").read_text() == "tokenizer.json"

    def test_what_saves_itself(self, tmp_path):
        class Tokenizer:
            def save(self, folder):
                (pathlib.Path(folder) / "tokenizer.json").write_text("mine")

        class Other:
            def save_pretrained(self, folder):
                (pathlib.Path(folder) / "tokenizer.json").write_text("theirs")

        for tokenizer, text in ((Tokenizer(), "mine"), (Other(), "theirs")):
            zoo.save(random_model(LLAMA), tmp_path / text, tokenizer=tokenizer)
            assert (tmp_path / text / "tokenizer.json").read_text() == text

    @pytest.mark.parametrize("tokenizer", [7, "nowhere"])
    def test_others_are_refused(self, tmp_path, tokenizer):
        with pytest.raises(ValueError, match="tokenizer"):
            zoo.save(random_model(LLAMA), tmp_path / "new", tokenizer=tokenizer)
        assert os.listdir(tmp_path) == []


def test_transformers_reads_what_is_written(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    # Routers in float32, the rest in bfloat16, as transformers has it too.
    model = random_model("deepseek_v3", dtype=jnp.bfloat16)
    zoo.save(model, tmp_path / "ours", max_shard_bytes=60_000)
    theirs, found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.dtype == torch.bfloat16
    theirs.save_pretrained(tmp_path / "theirs")
    assert_same(zoo.load(tmp_path / "theirs"), model)


def test_arrays_are_fetched_a_layer_at_a_time(monkeypatch):
    asked = []
    original = exporting.host
    monkeypatch.setattr(exporting, "host", lambda array, layer=None: asked.append(layer) or original(array, layer))
    model = random_like(zoo.abstract(zoo.from_config(FAMILIES["qwen3_moe_dense_prefix"])))
    made = [output.make() for output in exporting.outputs(model)]
    layers = model.moe_layers.num_layers
    # Once for each layer of an array, however many experts are in it.
    stacked = sum(leaf.layers is not None for leaf in exporting.leaves(model))
    assert len(made) > len(asked)
    assert len([layer for layer in asked if layer is not None]) <= stacked * layers
