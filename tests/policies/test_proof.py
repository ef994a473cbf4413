"""Proofs of offload: every way in which it can fail to happen is named, and nothing else is."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from overspill import policies
from overspill.policies import Activation, OffloadNotApplied
from overspill.policies.ahead import Ahead
from overspill.policies.evidence import Evidence, HostBuffer, Transfer
from overspill.policies.matching import hlo_dtype
from overspill.policies.proof import judge
from overspill.policies.support import _version


class Gate(eqx.Module):
    """x * sigmoid(x A) * (x A): a layer as a user writes one. `fault` is how its author got it wrong."""

    weight: jax.Array
    input: Activation
    score: Activation
    fault: str = eqx.field(static=True)

    def __init__(self, fault="", key=None):
        self.weight = jax.random.normal(jax.random.key(0) if key is None else key, (8, 8)) / 3
        self.input = Activation("input", "host")
        self.score = Activation("score", "host")
        self.fault = fault

    def __call__(self, x):
        raw = x
        x = self.input(x)
        score = (raw if self.fault == "raw" else x) @ self.weight
        if self.fault == "misspelt":
            score = checkpoint_name(score, "scor")
        elif self.fault != "untagged":
            score = self.score(score)
        return x * jax.nn.sigmoid(score) * score


class Loop(eqx.Module):
    """Layers one after the other."""

    layers: list

    def __call__(self, x, checkpoint=policies.checkpoint):
        for layer in policies.named(self).layers:
            x = checkpoint(layer)(x)
        return x


class Scan(eqx.Module):
    """Three layers by a scan."""

    layer: Gate

    def __init__(self):
        keys = jax.random.split(jax.random.key(1), 3)
        self.layer = eqx.filter_vmap(lambda key: Gate(key=key))(keys)

    def __call__(self, x, checkpoint=policies.checkpoint):
        arrays, static = eqx.partition(policies.named(self).layer, eqx.is_array)
        return jax.lax.scan(lambda x, a: (checkpoint(eqx.combine(a, static))(x), None), x, arrays)[0]


X = jnp.ones((4, 8))
EACH = 4 * 8 * 4  # bytes of one layer's activation


def two(fault):
    return Loop([Gate(), Gate(fault)])


BOTH = [(two(""), "layers.0.input", EACH), (Scan(), "layer.input", 3 * EACH)]


def raised(*args, **kwargs):
    with pytest.raises(OffloadNotApplied) as error:
        policies.prove(*args, **kwargs)
    return error.value


@pytest.mark.parametrize("model", [Loop([Gate(), Gate()]), Scan()], ids=["loop", "scan"])
def test_a_layer_of_ones_own_is_proved_and_a_cpu_says_what_it_cannot_show(model):
    proof = policies.prove(model, X)
    assert proof.compiled is None and proof.host_bytes is None and not proof.faults
    assert proof.planned_bytes == EACH * (4 if isinstance(model, Loop) else 6)
    text = str(proof)
    assert "all memory is host memory" in " ".join(text.split()) and "every annotation holds" in text
    assert proof.as_json()["applied"] is True and "<table>" in proof._repr_html_()


def test_a_misspelt_name_is_found_and_the_name_that_stands_there_is_told():
    error = raised(two("misspelt"), X)
    assert error.path == "layers.1.score" and error.found == 0
    assert "'scor', which no Activation declares" in str(error)


def test_one_layer_that_tags_nothing():
    error = raised(two("untagged"), X)
    assert error.path == "layers.1.score" and "never tags" in str(error)


def test_a_raw_input_used_beside_its_name():
    error = raised(two("raw"), X)
    assert (error.path, error.expected, error.found) == ("layers.1.input", 0, EACH)
    assert "rebind first" in error.cause


@pytest.mark.parametrize(("model", "path", "size"), BOTH)
def test_a_policy_that_is_not_applied(model, path, size):
    error = raised(lambda model, x: model(x, checkpoint=lambda layer: layer).sum(), model, X)
    assert (error.path, error.expected, error.found) == (path, size, 0)
    assert "no policy is applied" in error.cause


@pytest.mark.parametrize(("model", "path", "size"), BOTH)
def test_a_checkpoint_around_the_policy(model, path, size):
    def loss(model, x):
        arrays, static = eqx.partition(model, eqx.is_array)
        return jax.checkpoint(lambda arrays, x: eqx.combine(arrays, static)(x))(arrays, x).sum()

    error = raised(loss, model, X)
    assert (error.path, error.expected, error.found) == (path, size, 0)
    assert "inside each other the outer one decides" in error.cause


def test_a_policy_by_hand_with_a_name_that_is_none():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["layers.0.inputs", "layers.0.score"],
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip

    def by_hand(layer):
        arrays, static = eqx.partition(layer, eqx.is_array)
        return lambda x: jax.checkpoint(lambda a, x: eqx.combine(a, static)(x), policy=policy)(arrays, x)

    error = raised(lambda model, x: model(x, checkpoint=by_hand).sum(), Loop([Gate()]), X)
    assert (error.path, error.expected, error.found) == ("layers.0.input", EACH, 0)


def test_what_should_be_recomputed_and_is_kept():
    model = policies.place(Loop([Gate()]), {"*.score": "recompute"})
    error = raised(lambda model, x: model(x, checkpoint=lambda layer: layer).sum(), model, X)
    assert error.path == "layers.0.input"
    kept = next(fault for fault in error.proof.faults if fault.path == "layers.0.score")
    assert (kept.expected, kept.found) == (0, EACH)


def test_the_new_remat_of_jax():
    jax.config.update("jax_remat3", True)
    try:
        if _version() < (0, 11):
            error = raised(two(""), X)
            assert error.path == "layers.0.input" and "jax_remat3" in error.cause and error.proof is None
        else:
            with pytest.raises(RuntimeError, match="jax_remat3"):
                policies.prove(two(""), X)
    finally:
        jax.config.update("jax_remat3", False)


def test_all_faults_are_in_the_proof():
    error = raised(lambda model, x: model(x, checkpoint=lambda layer: layer).sum(), two(""), X)
    paths = [fault.path for fault in error.proof.faults]
    assert paths == ["layers.0.input", "layers.0.score", "layers.1.input", "layers.1.score"]
    assert "3 more in .proof.faults" in str(error)
    assert policies.examine(two("untagged"), X).faults[0].path == "layers.1.score"


# What a compiled program shows, made by hand: a program of three layers by a scan.


def buffer(elements=96, dtype="f32", count=1, op="jvp()/while/body/gate"):
    return HostBuffer(dtype, (3, elements // 3), elements * 4, count, (op,))


def evidence(**changes):
    moves = [
        Transfer(way, "f32", (1, 32), 128, 3, True, True, 9, 4, "gate", f"copy-{way}", count=2) for way in ("out", "in")
    ]
    whole = Evidence((buffer(count=2),), tuple(moves), (0, 0), (), 0, (), 0, 768)
    return dataclasses.replace(whole, **changes)


def ahead(evidence, **changes):
    sizes = {"argument": 100, "output": 50, "alias": 50, "temp": 1000, "code": 0}
    host = dict.fromkeys(sizes, 0) | {"temp": evidence.host_peak_bytes}
    made = Ahead("h200", "cuda", "NVIDIA H200", 1, "0", sizes, host, 2000, None, evidence, None, 1.0, 1.0, 1, {})
    return dataclasses.replace(made, **changes)


@pytest.fixture(scope="module")
def found():
    return policies.census(Scan(), X)


def test_a_compiled_program_that_does_as_annotated(found):
    proof = judge(found, ahead(evidence()))
    assert not proof.faults and proof.planned_bytes == proof.host_bytes == 768
    assert [(m.path, m.planned, m.compiled, m.buffers) for m in proof.matched] == [
        ("layer.input", 384, 384, 1), ("layer.score", 384, 384, 1)]  # fmt: skip
    assert {m.out[0].name for m in proof.matched} == {"copy-out"}


def test_a_host_buffer_that_the_compiler_left_out_has_a_name(found):
    kept = buffer(op="jvp()/while/body/gate/score")
    proof = judge(found, ahead(evidence(host_buffers=(kept,), host_peak_bytes=384)))
    assert [(f.path, f.expected, f.found) for f in proof.faults] == [("layer.input", 384, 0)]
    none = judge(found, ahead(evidence(host_buffers=(), host_peak_bytes=0)))
    assert [f.path for f in none.faults] == ["layer.input", "layer.score"]


def test_buffers_of_another_type_or_size_are_no_ones(found):
    for other in (buffer(dtype="bf16"), buffer(elements=48)):
        proof = judge(found, ahead(evidence(host_buffers=(buffer(), other))))
        assert [f.path for f in proof.faults][0] == "layer.score"
        assert any("no annotation asks for" in f.what for f in proof.faults)


def test_arrays_of_a_state_in_host_memory_are_no_fault(found):
    extra = (buffer(count=2), buffer(dtype="bf16"))
    assert judge(found, ahead(evidence(host_buffers=extra))).faults
    assert not judge(found, ahead(evidence(host_buffers=extra, host_arguments=(1, 384)))).faults


def test_what_fills_up_tiles_is_allowed(found):
    padded = dataclasses.replace(buffer(count=2), bytes=4096)
    proof = judge(found, ahead(evidence(host_buffers=(padded,), host_peak_bytes=8192)))
    assert not proof.faults and proof.host_bytes == 8192


def test_recomputation_and_computation_on_the_host_that_nobody_asked_for(found):
    again = judge(found, ahead(evidence(recomputed=("dot.3.remat",), recomputed_count=7)))
    assert "7 values again" in again.faults[0].what and "dot.3.remat" in again.faults[0].what
    host = judge(found, ahead(evidence(host_compute=("add.1",), host_compute_count=1)))
    assert "add.1" in host.faults[0].what


def test_a_program_that_does_not_fit_is_no_fault(found):
    proof = judge(found, ahead(evidence(), capacity=500))
    assert not proof.faults and not proof.compiled.fits and "does NOT fit" in str(proof)
    refused = judge(found, ahead(evidence(), error="RESOURCE_EXHAUSTED: Used 30G of 15G hbm"))
    assert not refused.faults and "RESOURCE_EXHAUSTED" in " ".join(str(refused).split())


def test_what_comes_back_at_once_is_noted(found):
    busy = judge(found, ahead(evidence(host_buffers=(dataclasses.replace(buffer(count=2), away=5),))))
    assert not busy.idle and "come back as soon" not in str(busy)
    idle = judge(found, ahead(evidence()))
    assert idle.idle == ("layer.input", "layer.score") and not idle.faults
    assert "layer.input, layer.score come back as soon" in " ".join(str(idle).split())


@pytest.mark.parametrize(
    ("numpy", "hlo"),
    [("bool", "pred"), ("bfloat16", "bf16"), ("float32", "f32"), ("int8", "s8"), ("uint16", "u16"),
     ("float8_e4m3fn", "f8e4m3fn"), ("complex64", "c64"), ("int4", "s4")],
)  # fmt: skip
def test_types_are_called_as_in_hlo(numpy, hlo):
    assert hlo_dtype(numpy) == hlo
