"""The self-test's stack: what is read from a device's memory, with a device that only pretends to have some."""

import json
import types

import jax
import jax.numpy as jnp
import pytest

from overspill.zoo import selftest_stack
from overspill.zoo.config import LlamaConfig
from overspill.zoo.selftest_stack import OFFLOAD, QUICK, RECOMPUTE, SAVE, TINY, VARIANTS, Shape, StackTest, shape_for

GIB = 2**30
SMALL = Shape(
    LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, max_position_embeddings=64),
    1, 64, "float32",
)  # fmt: skip
# Bytes that each form keeps on the device, by its annotations, and the peak that its first step reaches.
PLANNED = {SAVE: 100, RECOMPUTE: 40, OFFLOAD: 10}
PEAKS = {SAVE: 150, RECOMPUTE: 90, OFFLOAD: 70}


class Device:
    """A device whose peak is what the programs that ran on it say."""

    platform, device_kind = "gpu", "pretended"

    def __init__(self, peak=50):
        self.peak = peak
        self.ran = []

    def memory_stats(self):
        return {"peak_bytes_in_use": self.peak, "bytes_limit": 1000}


def run(monkeypatch, peaks=None, raising=None, runs=0, peak=50):
    """A test of the three forms whose programs do nothing but raise the pretended peak."""
    device = Device(peak)
    peaks = PEAKS | (peaks or {})

    def compile_all(self, steps, state, batch, progress):
        for name, variant in self.variants.items():
            variant.device_bytes = PLANNED[name]
            variant.host_bytes = 90 if name == OFFLOAD else 0

            def program(state, batch, name=name):
                if name == raising:
                    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand more")
                device.ran.append(name)
                device.peak = max(device.peak, peaks[name])
                return state, types.SimpleNamespace(loss=jnp.zeros(()))

            self._compiled[name] = program

    monkeypatch.setattr(StackTest, "_compile", compile_all)
    test = StackTest(SMALL, {name: VARIANTS[name] for name in QUICK}, device=device, runs=runs)
    test()
    return test, device


def test_forms_run_from_the_smallest_on_and_the_peaks_say_what_is_freed(monkeypatch):
    test, device = run(monkeypatch)
    assert device.ran == [OFFLOAD, RECOMPUTE, SAVE]
    assert test.failures == []
    peaks = {name: (variant.peak_before, variant.peak_after) for name, variant in test.variants.items()}
    assert peaks == {OFFLOAD: (50, 70), RECOMPUTE: (70, 90), SAVE: (90, 150)}
    assert test.freed(OFFLOAD) == (90, 80) and test.freed(RECOMPUTE) == (60, 60)
    rows = {row["name"]: row for row in test.as_json()["variants"]}
    assert rows[OFFLOAD]["planned_freed_bytes"] == 90 and rows[OFFLOAD]["freed_bytes"] == 80
    json.dumps(test.as_json(), allow_nan=False)


def test_memory_that_is_not_freed_is_named(monkeypatch):
    test, _ = run(monkeypatch, peaks={OFFLOAD: 149})
    (failure,) = test.failures
    assert failure == (
        f"stack, {OFFLOAD}: offload isn't proved by the device's memory: 90 B should leave it, and its peak falls by "
        f"1 B from {SAVE}'s"
    )


def test_an_earlier_peak_is_told_from_no_offload(monkeypatch):
    test, _ = run(monkeypatch, peak=140)
    assert "falls by 10 B" in test.failures[0] and "an earlier peak may hide it" in test.failures[0]


def test_a_form_that_fails_is_named_and_the_others_are_timed(monkeypatch):
    test, device = run(monkeypatch, raising=RECOMPUTE, runs=2)
    assert test.failures == [f"stack, {RECOMPUTE}: can't be run: JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory"]
    assert device.ran == [OFFLOAD, SAVE] + [SAVE, OFFLOAD] * 2
    assert test.ratio(OFFLOAD) > 0 and test.ratio(RECOMPUTE) is None
    assert test.variants[RECOMPUTE].median is None


def test_a_device_that_says_nothing_of_its_memory_proves_nothing_by_it(monkeypatch):
    monkeypatch.setattr(Device, "memory_stats", lambda self: None)
    test, _ = run(monkeypatch)
    assert test.failures == [] and test.freed(OFFLOAD) is None

    def refuse(self):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED")

    monkeypatch.setattr(Device, "memory_stats", refuse)
    assert selftest_stack.memory_stats(Device()) is None


def test_the_real_step_is_proved_and_timed(monkeypatch):
    names = (RECOMPUTE, OFFLOAD)
    test = StackTest(SMALL, {name: VARIANTS[name] for name in names}, device=jax.devices()[0], runs=1)
    test()
    assert test.failures == []
    offload, recompute = test.variants[OFFLOAD], test.variants[RECOMPUTE]
    assert offload.host_bytes > recompute.device_bytes > offload.device_bytes
    assert len(offload.seconds) == 1 and offload.compile_seconds > 0
    assert test.ratio(OFFLOAD) is None  # there is nothing to compare with


def test_a_stack_that_cannot_be_made_is_a_failure(monkeypatch):
    def refuse(*args, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 7 bytes")

    monkeypatch.setattr(selftest_stack, "build", refuse)
    test = StackTest(SMALL, {SAVE: SAVE}, device=Device(), runs=1)
    test()
    assert test.failures == ["the stack can't be made: JaxRuntimeError: RESOURCE_EXHAUSTED: 7 bytes"]


@pytest.mark.parametrize(("memory", "layers"), [(18, 2), (36, 4), (105, 8), (200, 8)])
def test_the_stack_is_sized_to_the_device(memory, layers):
    shape = shape_for(memory * GIB, None)
    config = shape.config
    assert (config.hidden_size, config.intermediate_size) == (4096, 14336)
    assert (config.num_attention_heads, config.num_key_value_heads) == (32, 8)
    assert config.num_hidden_layers == layers and shape.dtype == "bfloat16"
    kept = 2 * (7 * 4096 + 2 * 1024 + 3 * 14336) * layers * shape.rows * shape.length
    assert kept < 0.6 * memory * GIB


def test_host_memory_bounds_the_stack_too_and_nothing_known_makes_it_tiny():
    few, many = (shape_for(105 * GIB, host * GIB) for host in (12, 30))
    assert few.rows < many.rows
    assert shape_for(None, None) == shape_for(4 * GIB, None) == shape_for(105 * GIB, GIB // 2) == TINY
    assert "2 x 128 tokens" in str(TINY)


def test_xlas_pool_and_a_container_bound_what_may_be_pinned(monkeypatch):
    monkeypatch.setattr(selftest_stack, "_available", lambda: 400 * GIB)
    monkeypatch.setattr(selftest_stack, "_left_in_container", lambda: int("max"))
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "96")
    assert selftest_stack.room_on_host() == 72 * GIB
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "many")
    assert selftest_stack.room_on_host() == 48 * GIB
    monkeypatch.setattr(selftest_stack, "_left_in_container", lambda: 8 * GIB)
    assert selftest_stack.room_on_host() == 2 * GIB
