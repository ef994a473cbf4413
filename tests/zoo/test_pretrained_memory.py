"""What loading does with memory: how much at most, and whose it is afterwards."""

import gc
import itertools
import json
import math
import pathlib
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from overspill import zoo
from overspill.zoo import pretrained
from overspill.zoo.data import Batch
from overspill.zoo.weight_plan import Planner, Problems, canonical_names
from overspill.zoo.weight_reading import Files, Reader, empty
from overspill.zoo.weights import leaves

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from weight_files import FAMILIES, random_model, tensors_of, write_folder

MEASURE = """
import gc, json, pathlib, re, sys
import jax, jax.numpy as jnp
from overspill import zoo

def memory(name):
    return int(re.search(name + r":\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024

cases = json.loads(sys.argv[1])
zoo.abstract(zoo.from_config(cases[0][0]))
jax.device_put(0).block_until_ready()
out = []
for folder, options in cases:
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the highest mark starts anew
    before = memory("VmRSS")
    model = zoo.load(folder, **options)
    out.append((memory("VmHWM") - before, sum(leaf.nbytes for leaf in jax.tree.leaves(model))))
    del model
print(json.dumps(out))
"""


def big(family, dtype, path, **changes):
    """A folder with some 100 MB of zeros in it; returns it and the bytes of the largest tensor."""
    config = FAMILIES[family] | changes
    model = zoo.abstract(zoo.from_config(config))
    tensors = {}
    for leaf in leaves(model):
        for piece in leaf.pieces(leaf.sources[0]):
            shape = piece.layout.tensor_shape(leaf.piece_shape(piece))
            quantised = dtype == "float8_e4m3fn" and len(shape) == 2 and leaf.layers
            tensors[piece.name] = np.zeros(shape, getattr(ml_dtypes, dtype if quantised else "bfloat16", dtype))
            if dtype == "float32":
                tensors[piece.name] = tensors[piece.name].astype(np.float32)
            if quantised:
                grid = [math.ceil(n / 128) for n in shape]
                tensors[f"{piece.name.removesuffix('weight')}weight_scale_inv"] = np.ones(grid, np.float32)
    largest = max(array.nbytes for array in tensors.values())
    return write_folder(path, config, tensors, shards=2), largest


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read where Linux tells it")
def test_the_peak_is_the_model_and_one_tensor(tmp_path):
    dense = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192, "num_hidden_layers": 12}
    cases = [
        (*big("llama_mlp_bias", "bfloat16", tmp_path / "same", **dense), {}),
        (*big("llama_mlp_bias", "float32", tmp_path / "cast", **dense), {"dtype": "bfloat16"}),
        (*big("llama_mlp_bias", "float8_e4m3fn", tmp_path / "quantised", **dense), {}),
        (*big("gpt_oss", "bfloat16", tmp_path / "fused", hidden_size=512, intermediate_size=1024, vocab_size=512), {}),
    ]
    arguments = json.dumps([(str(folder), options) for folder, _, options in cases])
    done = subprocess.run([sys.executable, "-c", MEASURE, arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    slack = 12e6
    for (folder, largest, _), (peak, size) in zip(cases, json.loads(done.stdout), strict=True):
        assert size > 70e6
        assert size * 0.9 < peak < size + largest + slack, (folder.name, peak / size)


def test_arrays_are_the_memory_that_was_read_into(tmp_path, monkeypatch):
    if jax.devices()[0].platform != "cpu":
        pytest.skip("elsewhere memory is another")
    memories = {}

    def adopt(memory, original=pretrained._adopt):
        array = original(memory)
        memories[memory.ctypes.data] = (array.unsafe_buffer_pointer(), weakref.ref(memory.base))
        return array

    monkeypatch.setattr(pretrained, "_adopt", adopt)
    folder = write_folder(tmp_path, FAMILIES["deepseek_v3_mtp"], tensors_of(random_model("deepseek_v3_mtp")))
    model = zoo.load(folder)
    arrays = jax.tree.leaves(model)
    assert len(arrays) == len(memories) > 30
    assert all(address == theirs and owner() is not None for address, (theirs, owner) in memories.items())
    # Arrays may be on any device later on.
    assert not any(array.committed for array in arrays)
    del model, arrays
    gc.collect()
    assert all(owner() is None for _, owner in memories.values())


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7, 5, 3), (1000,)])
def test_new_memory_is_aligned(shape):
    for dtype in (np.float32, ml_dtypes.bfloat16):
        array = empty(shape, dtype)
        assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
        assert array.flags.writeable and array.flags.c_contiguous
        assert not array.size or array.ctypes.data % 64 == 0


def test_loaded_models_train_and_stay_what_they_were(tmp_path):
    # The step gives its input's memory to its output: not what the loaded model still holds.
    source = random_model("llama_llama3")
    tensors = tensors_of(source)
    model = zoo.load(write_folder(tmp_path, FAMILIES["llama_llama3"], tensors))
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 97, (2, 12)), jnp.int32)
    positions = jnp.arange(12, dtype=jnp.int32)[None].repeat(2, 0)
    batch = Batch(tokens, tokens, jnp.zeros_like(tokens), positions, jnp.ones(tokens.shape, bool))
    optimizer = zoo.adamw(1e-3)
    step = zoo.make_train_step(model, optimizer)
    trained = []
    for start in (model, source):
        state = zoo.init_state(start, optimizer, key=jax.random.key(0))
        for _ in range(2):
            state, _ = step(state, batch)
        trained.append(tensors_of(step.trained(state)))
    for name, array in trained[1].items():
        np.testing.assert_array_equal(trained[0][name], array, err_msg=name)
        assert not np.array_equal(array, tensors[name])
    for name, array in tensors_of(model).items():
        np.testing.assert_array_equal(array, tensors[name], err_msg=name)


def test_donating_the_arrays_themselves_is_safe(tmp_path):
    tensors = tensors_of(random_model("llama_mlp_bias"))
    model = zoo.load(write_folder(tmp_path, FAMILIES["llama_mlp_bias"], tensors))
    doubled = jax.jit(lambda model: jax.tree.map(lambda x: 2 * x, model), donate_argnums=0)(model)
    gc.collect()
    again = jax.jit(lambda model: jax.tree.map(lambda x: x / 2, model), donate_argnums=0)(doubled)
    for name, array in tensors_of(again).items():
        np.testing.assert_array_equal(array, tensors[name], err_msg=name)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(model))


@pytest.mark.parametrize("family", ["llama_mlp_bias", "gpt_oss", "deepseek_v3_mtp"])
def test_any_block_of_an_array_can_be_read(tmp_path, family):
    model = random_model(family)
    folder = write_folder(tmp_path, FAMILIES[family], tensors_of(model), shards=2)
    check_blocks(folder, model)


def check_blocks(folder, model, tries=6):
    """Random blocks of every array of `model` are read as its own."""
    problems, rng = Problems(str(folder)), np.random.default_rng(0)
    config = model.config
    with Files(folder, problems) as files:
        names = canonical_names(files.tensors, False)
        planner = Planner({ours: files.tensors[name] for ours, name in names.items()}, (), (128, 128), problems)
        found = leaves(model)
        depths = getattr(config, "num_nextn_predict_layers", 0)
        plan = planner.plan(found, tied=False, num_layers=config.num_hidden_layers, depths=depths, multimodal=False)
        problems.check()
        with Reader(files, plan, (128, 128), problems) as reader:
            for leaf in found:
                whole = np.asarray(leaf.array)
                for _ in range(tries):
                    bounds = [sorted(rng.choice(n + 1, 2, replace=False)) for n in whole.shape]
                    index = tuple(slice(int(a), int(b)) for a, b in bounds)
                    block = reader.read(leaf.path, whole.shape, whole.dtype, index)
                    np.testing.assert_array_equal(block, whole[index], err_msg=leaf.path)
    problems.check()


def test_any_block_of_a_quantised_array_can_be_read(tmp_path):
    from test_pretrained_load import FP8, float8_tensors, gpt_oss_mxfp4, wide

    config = wide(quantization_config=FP8)
    folder = write_folder(tmp_path / "float8", config, float8_tensors(config)[0])
    check_blocks(folder, zoo.load(folder), tries=20)
    config, tensors, _ = gpt_oss_mxfp4()
    folder = write_folder(tmp_path / "mxfp4", config, tensors)
    check_blocks(folder, zoo.load(folder), tries=20)


def test_shards_are_read_by_devices(tmp_path):
    # As sharded loading will: a callback for each device's block.
    model = random_model("llama_mlp_bias")
    folder = write_folder(tmp_path, FAMILIES["llama_mlp_bias"], tensors_of(model))
    mesh = jax.make_mesh((1,), ("d",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "d"))
    problems = Problems(str(folder))
    with Files(folder, problems) as files:
        planner = Planner(files.tensors, (), (128, 128), problems)
        plan = planner.plan(leaves(model), tied=False, num_layers=3, depths=0, multimodal=False)
        with Reader(files, plan, (128, 128), problems) as reader:
            path = "layers.segments.0.mlp.up_projection.weight"
            shape = (3, 80, 48)
            array = jax.make_array_from_callback(shape, sharding, lambda i: reader.read(path, shape, np.float32, i))
    np.testing.assert_array_equal(array, model.layers.segments[0].mlp.up_projection.weight)


def test_chunks_of_several_threads(tmp_path, monkeypatch):
    monkeypatch.setattr("overspill.zoo.weight_reading._CHUNK", 3000)
    monkeypatch.setattr("overspill.zoo.weight_reading._SMALL", 0)
    for family, shards in itertools.product(("llama_mlp_bias", "gpt_oss"), (1, 3)):
        model = random_model(family)
        folder = write_folder(tmp_path / f"{family}{shards}", FAMILIES[family], tensors_of(model), shards)
        for name, array in tensors_of(zoo.load(folder)).items():
            np.testing.assert_array_equal(array, tensors_of(model)[name], err_msg=name)
