"""Models, states and steps over meshes without devices: described and lowered, never run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from overspill import policies, zoo

MEMORY = {"optimizer.*": "host"}


def batch(rows, length=32):
    ids, flags = (jax.ShapeDtypeStruct((rows, length), dtype) for dtype in (jnp.int32, jnp.bool_))
    return zoo.Batch(ids, ids, ids, ids, flags)


def over(mesh, rows=8, **options):
    model = zoo.abstract("overspill-llama-tiny", placements="offload_qkv")
    optimizer = zoo.adamw(1e-3)
    state = zoo.init_state(model, optimizer, key=jax.random.key(0), mesh=mesh, state_memory=MEMORY)
    return zoo.make_train_step(model, optimizer, mesh=mesh, state_memory=MEMORY, **options), state, batch(rows)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_step_is_lowered_for_devices_that_are_not_there(kind, platform):
    mesh = AbstractMesh((64, 2), ("fsdp", "tensor"), axis_types=(kind,) * 2)
    step, state, rows = over(mesh, rows=64)
    text = step.lower(state, rows, platform=platform).as_text()
    assert "mhlo.num_partitions = 128" in text
    moments = sum(leaf.sharding.memory_kind == "pinned_host" for leaf in jax.tree.leaves(state))
    # As arguments and as results, and each copy of an activation to the host.
    assert moments > 20 and text.count('mhlo.memory_kind = "pinned_host"') == 2 * moments
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") >= len(jax.tree.leaves(state))


def test_the_census_is_that_of_a_mesh_of_devices():
    kinds = (AxisType.Auto,) * 2
    found = policies.check(*over(AbstractMesh((4, 2), ("fsdp", "tensor"), axis_types=kinds)))
    there = policies.check(*over(jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=kinds)))
    assert found.devices == there.devices == 8 and found.host_bytes == there.host_bytes > 0
    assert found.bytes(memory="host", each=True) == there.bytes(memory="host", each=True)


def test_shardings_are_those_of_a_mesh_of_devices():
    kinds = (AxisType.Auto,) * 2
    _, state, _ = over(AbstractMesh((4, 2), ("fsdp", "tensor"), axis_types=kinds))
    _, there, _ = over(jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=kinds))
    for mine, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(there), strict=True):
        assert mine.sharding.spec == theirs.sharding.spec
        assert mine.sharding.memory_kind == theirs.sharding.memory_kind
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype


def test_nothing_that_needs_devices_is_done_without():
    mesh = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    step, state, rows = over(mesh)
    with pytest.raises(ValueError, match="compile_ahead"):
        step(state, rows)
    with pytest.raises(ValueError, match="platform='cuda'"):
        step.lower(state, rows)
    with pytest.raises(ValueError, match="zoo.abstract"):
        zoo.build("overspill-llama-tiny", mesh=mesh)
    with pytest.raises(ValueError, match="zoo.abstract"):
        zoo.shard(zoo.build("overspill-llama-tiny", key=jax.random.key(0)), mesh)
    with pytest.raises(ValueError, match="zoo.abstract"):
        zoo.load("no-such-folder", mesh=mesh)


def test_a_state_of_another_mesh_is_refused():
    step, _, rows = over(AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,)))
    _, there, _ = over(jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,)))
    with pytest.raises(ValueError, match="the step's mesh is fsdp=8"):
        step.lower(there, rows, platform="cuda")
    _, smaller, _ = over(AbstractMesh((4,), ("fsdp",), axis_types=(AxisType.Auto,)))
    with pytest.raises(ValueError, match="fsdp=4"):
        step.lower(smaller, rows, platform="cuda")


def test_a_concrete_batch_counts_by_its_shape():
    step, state, rows = over(AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,)))
    concrete = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), rows)
    assert step.lower(state, concrete, platform="cuda").as_text() == step.lower(state, rows, platform="cuda").as_text()
