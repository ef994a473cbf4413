"""Proofs of offload: every way in which it can fail to happen is named, and nothing else is."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

from overspill import policies
from overspill.policies import Activation, OffloadNotApplied, proof as proofs
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


class Handing(Gate):
    """Names what it hands on instead of what it gets."""

    def __call__(self, x):
        score = self.score(x @ self.weight)
        return self.input(x * jax.nn.sigmoid(score) * score)


@pytest.mark.parametrize("checked", [True, False])
def test_a_blocks_output_named_instead_of_its_input(checked):
    scan = eqx.tree_at(lambda scan: scan.layer, Scan(), eqx.filter_vmap(lambda key: Handing(key=key))(
        jax.random.split(jax.random.key(1), 3)))  # fmt: skip
    if checked:
        with pytest.raises(policies.PlacementNotApplied, match="hands on to the next") as error:
            policies.check(scan, X)
        error = error.value
    else:
        error = raised(scan, X)
    assert (error.path, error.expected, error.found) == ("layer.input", 3 * EACH, 0)
    assert "name the block's input instead" in error.cause
    assert not policies.examine(policies.place(scan, {"*.input": "device"}), X).faults


class Twice(Gate):
    """Two names on one value."""

    def __call__(self, x):
        score = self.score(self.input(x @ self.weight))
        return x * jax.nn.sigmoid(score) * score


def test_two_names_on_one_value_that_wait_in_different_places():
    model = policies.place(Loop([Twice()]), {"*.score": "device"})
    error = raised(model, X)
    assert error.path == "layers.0.input" and "same value as 'layers.0.score'" in str(error)
    assert not policies.examine(Loop([Twice()]), X).faults


def test_a_raw_argument_beside_a_name_on_the_device_is_no_fault():
    def loss(layer, x):
        return (policies.checkpoint(layer)(x) * (x @ layer.weight)).sum()

    assert not policies.examine(loss, policies.place(Gate(), {"input": "device"}), X).faults
    assert raised(loss, Gate(), X).path == "input"


def test_a_plain_training_step_of_optax(checkpoint=policies.checkpoint):
    optimizer = optax.adam(1e-3)

    @eqx.filter_jit
    def step(model, average, state, x):
        gradients = eqx.filter_grad(lambda model: checkpoint(model)(x).sum())(model)
        updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_array))
        model = eqx.apply_updates(model, updates)
        average = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b if eqx.is_array(a) else a, average, model)
        return model, average, state

    model = Gate()
    state = optimizer.init(eqx.filter(model, eqx.is_array))
    proof = policies.prove(step, model, model, state, X)
    assert proof.planned_bytes == 2 * EACH and set(proof.census.annotations) == {"input", "score"}
    without = eqx.filter_jit(lambda model, average, state, x: step.__wrapped__(model, average, state, x)[::2])
    assert policies.prove(without, model, Gate(key=jax.random.key(3)), state, X).planned_bytes == 2 * EACH


def test_a_model_that_is_only_carried_along_is_not_asked_for_its_names():
    def loss(model, reference, x):
        return policies.checkpoint(model)(x).sum() + reference.weight.sum()

    proof = policies.prove(loss, Gate(), Gate("untagged"), X)
    assert set(proof.census.annotations) == {"0.input", "0.score"}


def test_all_faults_are_in_the_proof():
    error = raised(lambda model, x: model(x, checkpoint=lambda layer: layer).sum(), two(""), X)
    paths = [fault.path for fault in error.proof.faults]
    assert paths == ["layers.0.input", "layers.0.score", "layers.1.input", "layers.1.score"]
    assert str(error).endswith("; and 3 more")
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
    # What a TPU's compiler has accepted fits: its sizes are an upper bound.
    assert judge(found, ahead(evidence(), capacity=500, platform="tpu")).compiled.fits
    refused = judge(found, ahead(evidence(), error="RESOURCE_EXHAUSTED: Used 30G of 15G hbm"))
    assert not refused.faults and "RESOURCE_EXHAUSTED" in " ".join(str(refused).split())


def test_what_comes_back_at_once_is_noted(found):
    assert not judge(found, ahead(evidence())).idle  # of a scan's values only the last layer's do
    loop = policies.census(Loop([Gate()]), X)
    alone = [HostBuffer("f32", (4, 8), EACH, 1, ("gate",), away) for away in (0, 5)]
    idle = judge(loop, ahead(evidence(host_buffers=tuple(alone))))
    assert len(idle.idle) == 1 and not idle.faults and "frees no memory: layers.0." in str(idle)


@pytest.mark.parametrize(
    ("numpy", "hlo"),
    [("bool", "pred"), ("bfloat16", "bf16"), ("float32", "f32"), ("int8", "s8"), ("uint16", "u16"),
     ("float8_e4m3fn", "f8e4m3fn"), ("complex64", "c64"), ("int4", "s4")],
)  # fmt: skip
def test_types_are_called_as_in_hlo(numpy, hlo):
    assert hlo_dtype(numpy) == hlo


@dataclasses.dataclass
class Pretender:
    """A CPU that calls itself a GPU: it accepts host memory, and keeps everything where it was."""

    platform: str = "gpu"
    device_kind: str = "Pretender"

    def memory_stats(self):
        return {"bytes_limit": 1000}


def test_a_device_at_hand_is_asked(monkeypatch):
    monkeypatch.setattr(proofs, "_device", lambda args, kwargs: Pretender())
    error = raised(Scan(), X)
    assert (error.path, error.expected, error.found) == ("layer.input", 3 * EACH, 0)
    assert "no host memory for it" in str(error) and "Pretender" in str(error)
    compiled = error.proof.compiled
    assert compiled.platform == "cuda" and compiled.devices == 1 and compiled.capacity == 1000
    assert compiled.device["argument"] == 3 * 8 * 8 * 4 + 2 * EACH  # weights, the input, and the output's cotangent
    saved = policies.prove(policies.place(Scan(), "save_all"), X)
    assert saved.host_bytes == 0 and not saved.compiled.fits and saved.compiled.device["temp"] > 0
