"""Checkpoints of states over a mesh: restored on any number of devices, in the memories that are asked for."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from overspill import zoo
from overspill.zoo.checkpoint_io import read_metadata

CONFIG = zoo.LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
# Alone on one device: restores what a mesh has saved, looks at it, and saves it again.
ALONE = """
import sys
import jax, numpy as np
from overspill import zoo
from overspill.zoo.checkpoint_io import read_metadata

assert jax.device_count() == 1
there, again = sys.argv[1:]
metadata = read_metadata(there)
assert metadata["step"] == 0 and metadata["arrays"]["params.embedding.weight"]["shape"] == [32, 16]
config = zoo.LlamaConfig(**{k: v for k, v in metadata["config"].items() if k in (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
)})
like = zoo.init_state(zoo.abstract(config), zoo.adamw(1e-3), key=jax.random.key(0))
state = zoo.restore_state(there, like)
assert all(x.sharding.device_set == {jax.devices()[0]} for x in jax.tree.leaves(state))
print(jax.random.key_data(state.key).tolist(), np.asarray(state.params["embedding.weight"]).sum())
zoo.save_state(again, state, config=config)
"""


def make_state(model, hosted=lambda leaf: False, key=5):
    state = zoo.init_state(model, zoo.adamw(1e-3), key=jax.random.key(key))

    def move(leaf):
        if not hosted(leaf):
            return leaf
        sharding = leaf.sharding.with_memory_kind("pinned_host")
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    return jax.tree.map(move, state)


def assert_restored(state, expected, like):
    for a, b, target in zip(*map(jax.tree.leaves, (state, expected, like)), strict=True):
        assert a.committed and a.sharding == target.sharding and a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = map(jax.random.key_data, (a, b))
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(scope="module")
def model():
    leaves, structure = jax.tree.flatten(zoo.abstract(CONFIG))
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(structure, [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in leaves])


def test_from_a_mesh_to_another_process_and_back(tmp_path, make_mesh, model):
    state = make_state(zoo.shard(model, make_mesh("fsdp=4,tensor=2")))
    zoo.save_state(tmp_path / "mesh", state, config=CONFIG)
    command = [sys.executable, "-c", ALONE, str(tmp_path / "mesh"), str(tmp_path / "alone")]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(str(jax.random.key_data(jax.random.key(5)).tolist()))
    like = make_state(zoo.abstract(CONFIG, mesh=make_mesh("data=2,fsdp=2,tensor=2", AxisType.Explicit)), key=6)
    assert_restored(zoo.restore_state(tmp_path / "alone", like, config=CONFIG), state, like)


def test_memories_are_those_of_the_state_to_restore_into(tmp_path, make_mesh, model):
    state = make_state(zoo.shard(model, make_mesh("fsdp=4,tensor=2")), lambda leaf: leaf.ndim == 2)
    zoo.save_state(tmp_path / "mesh", state, config=CONFIG)
    kinds = {array["memory"] for array in read_metadata(tmp_path / "mesh")["arrays"].values()}
    assert kinds == {"device", "pinned_host"}
    for hosted in (lambda leaf: leaf.ndim != 2, lambda leaf: False):
        like = make_state(zoo.shard(model, make_mesh("tensor=2,data=2")), hosted, key=6)
        assert_restored(zoo.restore_state(tmp_path / "mesh", like), state, like)


def test_saving_leaves_no_copy_on_the_host(tmp_path, make_mesh, model):
    state = make_state(zoo.shard(model, make_mesh("fsdp=4,tensor=2")))
    zoo.save_state(tmp_path / "mesh", state)
    assert all(getattr(leaf, "_npy_value", None) is None for leaf in jax.tree.leaves(state.params))
