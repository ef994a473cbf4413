import asyncio
import dataclasses
import json
import subprocess
import sys
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from overspill.layers.linear import Buffer, Linear
from overspill.layers.loss import cross_entropy
from overspill.zoo import checkpoint_io
from overspill.zoo.checkpoint_io import CheckpointMismatch, read_metadata, read_position, restore, save
from overspill.zoo.compiled import commit, default_sharding
from overspill.zoo.data import Corpus, PackedDataset, Position
from overspill.zoo.model import Losses
from overspill.zoo.optimizer import adamw
from overspill.zoo.train import init_state, make_train_step


class Toy(eqx.Module):
    embedding: Linear
    bias: Buffer

    def __init__(self, key, features=4, dtype=jnp.float32):
        self.embedding = Linear(features, 260, std=0.5, dtype=dtype, key=key)
        self.bias = Buffer(jnp.arange(3.0))

    def losses(self, batch, *, mtp=True, checkpoint=None):
        weight = self.embedding.weight
        total, count = cross_entropy(jnp.tanh(weight[batch.tokens]), weight, batch.targets, mask=batch.mask)
        return Losses(total, count, jnp.zeros(0), jnp.zeros(0), {})


def bits(tree):
    def one(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()

    return jax.tree.map(one, tree)


def small_state():
    host = default_sharding().with_memory_kind("pinned_host")
    return {
        "wide": commit(jax.random.normal(jax.random.key(0), (3, 5))),
        "a.b/c|d": [commit(jnp.array([1.5, jnp.nan, -0.0], jnp.bfloat16)), commit(jnp.zeros((0, 2)))],
        "key": commit(jax.random.key(7, impl="rbg")),
        "host": jax.device_put(jnp.arange(4.0), host),
        "step": commit(jnp.int32(12)),
    }


@dataclasses.dataclass(frozen=True)
class Config:
    size: int = 3
    factors: tuple[float, ...] = (1.0, 2.0)


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@pytest.mark.parametrize("make_like", [lambda s: s, abstract, lambda s: jax.tree.map(jnp.copy, s)])
def test_round_trip(tmp_path, make_like):
    state = small_state()
    folder = save(tmp_path / "run" / "12", state, config=Config(), position=Position(2, 5), extra={"seed": 3})
    assert folder == tmp_path / "run" / "12" and [p.name for p in folder.parent.iterdir()] == ["12"]
    like = make_like(state)
    back = restore(folder, like, config=Config())
    assert bits(back) == bits(state) and jax.tree.structure(back) == jax.tree.structure(state)
    assert str(jax.random.key_impl(back["key"])) == "rbg"
    assert all(leaf.committed for leaf in jax.tree.leaves(back))
    assert {n: leaf.sharding.memory_kind for n, leaf in back.items() if n != "a.b/c|d"} == {
        "wide": "device", "key": "device", "host": "pinned_host", "step": "device",
    }  # fmt: skip
    metadata = read_metadata(folder)
    assert (metadata["step"], metadata["extra"]) == (12, {"seed": 3})
    assert read_position(folder) == Position(2, 5)
    assert metadata["config"] == {"class": "Config", "size": 3, "factors": [1.0, 2.0]}
    described = {"shape": [3, 5], "dtype": "float32", "memory": "device"}
    described["crc32"] = zlib.crc32(np.asarray(state["wide"]))
    assert metadata["arrays"]["wide"] == described
    assert metadata["versions"]["jax"] == jax.__version__


def test_memory_of_the_target_wins(tmp_path):
    state = {"a": commit(jnp.arange(4.0)), "b": commit(jnp.arange(2.0))}
    save(tmp_path / "x", state)
    host = default_sharding().with_memory_kind("pinned_host")
    back = restore(tmp_path / "x", {**state, "a": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=host)})
    assert back["a"].sharding == host and back["b"].sharding == default_sharding()


def test_inside_a_running_event_loop(tmp_path):
    state = small_state()

    async def cell():
        save(tmp_path / "x", state)
        return restore(tmp_path / "x", state)

    assert bits(asyncio.run(cell())) == bits(state)


def test_an_existing_folder_is_refused(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(ValueError, match="x' exists already"):
        save(tmp_path / "x", small_state())
    assert [p.name for p in tmp_path.iterdir()] == ["x"] and not list((tmp_path / "x").iterdir())


def test_nothing_is_left_of_a_failed_save(tmp_path, monkeypatch):
    real = checkpoint_io._write

    def fail(folder, arrays):
        real(folder, arrays)
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint_io, "_write", fail)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path / "x", small_state())
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="no checkpoint at .*x'"):
        restore(tmp_path / "x", small_state())
    with pytest.raises(ValueError, match="arrays only, but 'a' is a float"):
        save(tmp_path / "x", {"a": 1.0})


def test_differences_are_listed(tmp_path):
    model, optimizer = Toy(jax.random.key(0)), adamw(1e-2)
    state = init_state(model, optimizer, key=jax.random.key(1))
    save(tmp_path / "x", state, config=Config())

    def mismatch(like, *words, **kwargs):
        with pytest.raises(CheckpointMismatch) as error:
            restore(tmp_path / "x", like, **kwargs)
        assert all(word in str(error.value) for word in words), str(error.value)

    wider = init_state(Toy(jax.random.key(0), features=6), optimizer, key=jax.random.key(1))
    mismatch(wider, "'params.embedding.weight' is float32[260, 4] in the checkpoint, float32[260, 6] asked for")
    other = init_state(Toy(jax.random.key(0), dtype=jnp.bfloat16), optimizer, key=jax.random.key(1))
    mismatch(other, "'params.embedding.weight' is float32[260, 4]", "bfloat16[260, 4] asked for")
    sgd = init_state(model, optax.sgd(1e-2), key=jax.random.key(1))
    mismatch(sgd, "'opt_state.0.mu.embedding.weight' is only in the checkpoint", "'opt_state.0.count'")
    more = dataclasses.replace(state, buffers={**state.buffers, "new.value": state.step})
    mismatch(more, "'buffers.new.value' is not in the checkpoint")
    keyed = dataclasses.replace(state, key=commit(jax.random.key(0, impl="rbg")))
    mismatch(keyed, "'key' is key<fry>[] in the checkpoint, key<rbg>[] asked for")
    mismatch(state, "size: 3 in the checkpoint, 4 asked for", config=Config(size=4))
    mismatch({f"p{i}": state.step for i in range(9)}, "more")
    assert bits(restore(tmp_path / "x", state, config=Config())) == bits(state)


def test_damage_is_reported(tmp_path):
    state = {"a": commit(jax.random.normal(jax.random.key(0), (64, 64)))}
    save(tmp_path / "x", state)
    largest = max((p for p in (tmp_path / "x" / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(ValueError, match="x' is damaged: ") as error:
        restore(tmp_path / "x", state)
    assert "\n" not in str(error.value)
    (tmp_path / "x" / "metadata.json").write_text("{")
    with pytest.raises(ValueError, match="metadata.json is missing or broken"):
        restore(tmp_path / "x", state)
    (tmp_path / "x" / "metadata.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        restore(tmp_path / "x", state)


def test_a_flipped_bit_is_found(tmp_path):
    state = {"a": commit(jax.random.normal(jax.random.key(0), (64, 64)).astype(jnp.bfloat16)), "key": jax.random.key(1)}
    save(tmp_path / "x", state)
    assert restore(tmp_path / "x", state)["a"].dtype == jnp.bfloat16
    largest = max((p for p in (tmp_path / "x" / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="x' is damaged: "):
        restore(tmp_path / "x", state)


def test_six_steps_are_three_and_three_more(tmp_path):
    """Cut in the middle of an epoch and exactly at the end of one; the resumed run compiles once."""
    corpus = Corpus("test", ("a", "b"), (b"hello world, " * 4, b"abcdefghij" * 3))
    dataset = PackedDataset(corpus, 8)
    model, optimizer = Toy(jax.random.key(0)), adamw(1e-2)
    assert len(dataset) == 11
    for batch_size, start in ((3, 0), (4, 10)):
        batches = dataset.batches(batch_size, seed=5, position=Position(0, start))
        state = init_state(model, optimizer, key=jax.random.key(1))
        step = make_train_step(model, optimizer)
        for i in range(6):
            if i == 3:
                assert (batches.position.index == 0) == (batch_size == 4)
                save(tmp_path / str(batch_size), state, position=batches.position)
            state, metrics = step(state, next(batches))
        resumed = make_train_step(model, optimizer)
        like = jax.eval_shape(lambda: init_state(model, optimizer, key=jax.random.key(1)))
        again = restore(tmp_path / str(batch_size), like)
        batches = dataset.batches(batch_size, seed=5, position=read_position(tmp_path / str(batch_size)))
        for _ in range(3):
            again, last = resumed(again, next(batches))
        assert bits(again) == bits(state) and bits(last) == bits(metrics)
        assert resumed.compilations == 1 and int(again.step) == 6


KILLED = """
import os, pathlib, sys
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from overspill.zoo import checkpoint_io

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
sharding = NamedSharding(mesh, PartitionSpec("data"), memory_kind="device")
state = {"w": jax.device_put(jnp.arange(32.0).reshape(8, 4), sharding), "key": jax.random.key(3)}
folder = pathlib.Path(sys.argv[1])
checkpoint_io.save(folder / "1", state)
real = checkpoint_io._write
def die(path, arrays):
    real(path, arrays)
    os._exit(9)
checkpoint_io._write = die
checkpoint_io.save(folder / "2", state)
"""


def test_from_four_devices_killed_in_the_middle_of_the_next_save(tmp_path):
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu", "PATH": ""}
    result = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, capture_output=True)
    assert result.returncode == 9, result.stderr.decode()
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == ["1"]
    with pytest.raises(ValueError, match="no checkpoint"):
        read_metadata(tmp_path / "2")
    back = restore(tmp_path / "1", {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32), "key": jax.random.key(0)})
    np.testing.assert_array_equal(back["w"], np.arange(32.0).reshape(8, 4))
    assert back["w"].sharding == default_sharding()
    np.testing.assert_array_equal(jax.random.key_data(back["key"]), jax.random.key_data(jax.random.key(3)))
    save(tmp_path / "2", back)  # the broken one isn't in the way
