"""Training steps of both families, compiled for hardware that isn't there under every preset."""

import jax
import jax.numpy as jnp
import pytest

from overspill import policies, zoo

LLAMA = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
DEEPSEEK = "overspill-deepseek-tiny"
CASES = [("h200", "llama", preset) for preset in policies.presets() if preset != "offload_latents"]
# Without save_all and recompute_all, which have nothing on the host: these programs take long to compile.
CASES += [("gb200", "deepseek", preset) for preset in policies.presets() if preset.startswith("offload")]


def step_of(family, placements, *, segments=(), state_memory=None, **options):
    config = LLAMA if family == "llama" else DEEPSEEK
    model = zoo.abstract(config, dtype=jnp.bfloat16, placements=placements, segments=segments)
    optimizer = zoo.adamw(1e-3)
    state = zoo.init_state(
        model, optimizer, key=jax.random.key(0), master_dtype=jnp.float32, state_memory=state_memory
    )
    ids, flags = (jax.ShapeDtypeStruct((4, 128), dtype) for dtype in (jnp.int32, jnp.bool_))
    batch = zoo.Batch(tokens=ids, targets=ids, segment_ids=ids, positions=ids, mask=flags)
    return zoo.make_train_step(model, optimizer, state_memory=state_memory, **options), state, batch


def host_arguments(state):
    return sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
        if leaf.sharding is not None and leaf.sharding.memory_kind == "pinned_host"
    )


@pytest.mark.parametrize(("target", "family", "preset"), CASES)
def test_every_preset_is_proved_for_gpus(gpu, target, family, preset):
    proof = policies.prove(*step_of(family, preset), target=target)
    assert proof.host_bytes == proof.planned_bytes
    assert (proof.planned_bytes > 0) == preset.startswith("offload")
    assert all(one.compiled == one.planned for one in proof.matched)
    evidence = proof.compiled.evidence
    assert evidence.bytes_out == evidence.bytes_in == proof.planned_bytes
    assert proof.compiled.host["temp"] == evidence.host_peak_bytes <= proof.planned_bytes
    if family == "llama":  # all of it in one scan: nothing shares memory
        assert proof.compiled.host["temp"] == proof.planned_bytes


def test_segments_and_micro_batches(gpu):
    rules = {"*.segments.0.*": "host", "*.segments.1.*": "device"}
    whole = policies.prove(*step_of("llama", "offload_all"), target=gpu)
    first = policies.prove(*step_of("llama", rules, segments=(2,)), target=gpu)
    assert first.host_bytes * 3 == whole.host_bytes * 2
    assert {one.path.split(".")[2] for one in first.matched} == {"0"}
    halves = policies.prove(*step_of("llama", "offload_all", accumulate=2), target=gpu)
    assert halves.host_bytes * 2 == whole.host_bytes


@pytest.mark.parametrize("memory", [{"optimizer.*": "host"}, {"params.*": "host", "optimizer.*": "host"}])
def test_a_state_in_host_memory(gpu, memory):
    step, state, batch = step_of("llama", "offload_qkv", state_memory=memory)
    proof = policies.prove(step, state, batch, target=gpu)
    here = policies.prove(*step_of("llama", "offload_qkv"), target=gpu)
    assert proof.compiled.host["argument"] == host_arguments(state) > 0
    assert proof.compiled.host["argument"] + proof.compiled.device["argument"] == here.compiled.device["argument"]
    assert proof.planned_bytes == here.planned_bytes


def test_a_step_with_the_policy_left_out_is_not_proved(gpu):
    with pytest.raises(policies.OffloadNotApplied, match="no policy is applied") as error:
        policies.prove(*step_of("llama", "offload_all", checkpoint=False), target=gpu)
    assert error.value.path.startswith("layers.segments.0.") and error.value.proof.compiled is None
    seen = policies.examine(*step_of("llama", "offload_all", checkpoint=False), target=gpu)
    assert seen.compiled.host["temp"] == 0 and seen.faults[0].path == error.value.path


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_tpus(tpu, family):
    proof = policies.prove(*step_of(family, "offload_all"), target=tpu)
    assert proof.host_bytes >= proof.planned_bytes > 0
    assert all(one.compiled >= one.planned for one in proof.matched)
