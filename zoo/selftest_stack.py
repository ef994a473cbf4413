"""The same training step of a stack shaped like Llama 3.1 8B, saved, recomputed and offloaded: memory and time."""

import concurrent.futures
import dataclasses
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..policies.placing import place
from ..policies.proof import examine
from ..policies.report import format_bytes
from .building import build
from .compiled import commit
from .config import LlamaConfig
from .selftest_gradients import FAST, MOST_FAULTS, Ready, first_line
from .selftest_models import random_batch
from .state import init_state
from .train import Step, make_train_step

# The step under each of these. What is kept, recomputed and offloaded must be named like this in all the tables.
SAVE, RECOMPUTE, OFFLOAD = "save_all", "recompute_all", "offload_all"
VARIANTS: dict[str, Any] = {
    SAVE: SAVE,
    RECOMPUTE: RECOMPUTE,
    OFFLOAD: OFFLOAD,
    # Little enough for a slow link to hide, and nothing recomputed.
    "save_all, attention on the host": {"*": "device", "*.attention.*": "host"},
    "offload_qkv": "offload_qkv",
    "offload_block_inputs": "offload_block_inputs",
}
QUICK = (SAVE, RECOMPUTE, OFFLOAD)
# Of the bytes that offload should free, how many must be free at the peak. Not all can be: a layer or two come back
# before they are used, and at another point of the step, the update, something else is the peak.
LEAST_FREED = 0.5
_MOST_HOST_BYTES = 40 * 2**30
_MOST_TOKENS = 32 * 1024


@dataclasses.dataclass(frozen=True)
class Shape:
    """How large the stack is."""

    config: LlamaConfig
    rows: int
    length: int
    dtype: str

    def __str__(self) -> str:
        c = self.config
        return (
            f"{c.num_hidden_layers} layers of hidden size {c.hidden_size} (MLP {c.intermediate_size}, "
            f"{c.num_attention_heads} heads, {c.num_key_value_heads} kv heads), {self.rows} x {self.length} tokens, "
            f"{self.dtype}"
        )

    def as_json(self) -> dict[str, Any]:
        c = self.config
        return {
            "layers": c.num_hidden_layers, "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
            "num_attention_heads": c.num_attention_heads, "num_key_value_heads": c.num_key_value_heads,
            "vocab_size": c.vocab_size, "rows": self.rows, "length": self.length, "dtype": self.dtype,
        }  # fmt: skip


TINY = Shape(
    LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=224, num_hidden_layers=4, num_attention_heads=8,
                num_key_value_heads=2, max_position_embeddings=256, rope_theta=500000.0),
    2, 128, "float32",
)  # fmt: skip


def shape_for(device_bytes: int | None, host_bytes: int | None) -> Shape:
    """The largest stack that a device with so much memory can be asked to save whole; a tiny one where none fits.

    `host_bytes` is what may be pinned; None for either means that it isn't known.
    """
    length, vocab = 1024, 8192
    host = min(host_bytes or _MOST_HOST_BYTES, _MOST_HOST_BYTES)
    # Many layers are nothing with few tokens, which leave the device idle.
    for layers, least in ((8, 8), (4, 8), (4, 2), (2, 2)):
        config = LlamaConfig(
            vocab_size=vocab, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
            num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0,
        )  # fmt: skip
        layer = 4096 * (4096 * 2 + 1024 * 2 + 14336 * 3)
        # float32 weights and gradients, their bfloat16 copies, and room for the update.
        fixed = 16 * (layers * layer + 2 * vocab * 4096)
        # What a layer keeps of a token, and what one layer's attention has under way: float32 scores, a few times.
        kept = 2 * (7 * 4096 + 2 * 1024 + 3 * 14336)
        passing = 3 * 4 * 32 * length
        room = int(0.6 * (device_bytes or 0)) - fixed
        tokens = min(room // (layers * kept + passing), host // (layers * kept), _MOST_TOKENS)
        if tokens >= least * length:
            return Shape(config, int(tokens // length), length, "bfloat16")
    return TINY


def room_on_host() -> int:
    """Bytes of memory that may well be pinned: a quarter of what is available, and within XLA's pool for CUDA."""
    limits = []
    try:
        pool = float(os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB") or 64)
    except ValueError:
        pool = 64.0
    limits.append(int(pool * 0.75 * 2**30))
    for read in (_available, _left_in_container):
        try:
            limits.append(read() // 4)
        except (OSError, KeyError, ValueError):  # not on Linux, or no limit
            continue
    return min(limits)


def _available() -> int:
    lines = dict(line.split(":", 1) for line in pathlib.Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def _left_in_container() -> int:
    folder = pathlib.Path("/sys/fs/cgroup")
    return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())


def memory_stats(device: Any) -> dict[str, int] | None:
    """What the device says of its memory; None where it says nothing, as a CPU does."""
    try:
        return device.memory_stats() or None
    except Exception:  # backends refuse in different ways
        return None


@dataclasses.dataclass
class Variant:
    """One form of the step, and what was measured of it. Bytes and seconds; None is not known."""

    name: str
    device_bytes: int = 0  # planned, by annotations and jaxpr
    host_bytes: int = 0
    compiled_host_bytes: int | None = None  # buffers in host memory of the compiled program
    temp_bytes: int | None = None  # scratch memory of the device, as its compiler planned it
    peak_before: int | None = None  # the device's peak up to now, before the first step and after it
    peak_after: int | None = None
    compile_seconds: float | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "planned_device_bytes": self.device_bytes, "planned_host_bytes": self.host_bytes,
            "compiled_host_bytes": self.compiled_host_bytes, "compiled_temp_bytes": self.temp_bytes,
            "peak_before_bytes": self.peak_before, "peak_after_bytes": self.peak_after,
            "compile_seconds": self.compile_seconds, "median_seconds": self.median, "seconds": self.seconds,
            "failures": self.failures,
        }  # fmt: skip


class StackTest:
    """Compiles the step in each form, runs each once from the smallest on to see the peak rise, then times them."""

    def __init__(
        self, shape: Shape, variants: Mapping[str, Any], *, device: Any, runs: int, workers: int | None = None
    ):
        """`variants` are rules for `policies.place` by the name to call them; `runs` are timed, of each."""
        self.shape = shape
        self.device = device
        self.runs = runs
        self.workers = workers or max(1, min(8, os.cpu_count() or 1))
        self.variants = {name: Variant(name) for name in variants}
        self.rules = dict(variants)
        self.failures_of_test: list[str] = []
        self._compiled: dict[str, Any] = {}

    @property
    def failures(self) -> list[str]:
        return self.failures_of_test + [text for one in self.variants.values() for text in one.failures]

    def __call__(self, progress: Callable[[str], None] = lambda text: None) -> None:
        """Runs everything. What fails is in `failures`; nothing raises."""
        try:
            progress(str(self.shape))
            model = build(self.shape.config, dtype=jnp.dtype(self.shape.dtype))
            optimizer = optax.sgd(1e-4)
            state = init_state(model, optimizer, key=jax.random.key(0), master_dtype=jnp.float32)
            steps = {name: make_train_step(place(model, self.rules[name]), optimizer) for name in self.variants}
            del model
            batch = commit(random_batch(self.shape.config, 3, self.shape.rows, self.shape.length))
        except Exception as error:
            self.failures_of_test.append(f"the stack can't be made: {first_line(error)}")
            return
        self._compile(steps, state, batch, progress)
        state = self._watch(state, batch, progress)
        if state is not None:
            self._time(state, batch, progress)
        self._judge_memory()

    def _compile(self, steps: dict[str, Step], state: Any, batch: Any, progress: Callable[[str], None]) -> None:
        options = FAST if self.device.platform == "cpu" else None

        def compile_one(lowered: Any) -> tuple[Any, float]:
            start = time.perf_counter()
            return lowered.compile(compiler_options=options), time.perf_counter() - start

        with concurrent.futures.ThreadPoolExecutor(self.workers) as threads:
            waiting = {}
            for name, step in steps.items():
                progress(f"compiling {name}")
                try:
                    waiting[name] = threads.submit(compile_one, step.lower(state, batch))
                except Exception as error:
                    self.variants[name].failures.append(f"stack, {name}: can't be traced: {first_line(error)}")
            for name, future in waiting.items():
                variant = self.variants[name]
                try:
                    compiled, variant.compile_seconds = future.result()
                    memory = compiled.memory_analysis()
                    variant.temp_bytes = getattr(memory, "temp_size_in_bytes", None)
                    proof = examine(Ready(steps[name], compiled), state, batch)
                except Exception as error:
                    variant.failures.append(f"stack, {name}: can't be compiled: {first_line(error)}")
                    continue
                variant.device_bytes, variant.host_bytes = proof.census.device_bytes, proof.planned_bytes
                variant.compiled_host_bytes = proof.host_bytes
                variant.failures += [
                    f"stack, {name}: offload isn't proved: {fault}" for fault in proof.faults[:MOST_FAULTS]
                ]
                self._compiled[name] = compiled

    def _run(self, name: str, state: Any, batch: Any) -> tuple[Any, float]:
        start = time.perf_counter()
        state, metrics = self._compiled[name](state, batch)
        jax.block_until_ready((state.params, metrics.loss))
        return state, time.perf_counter() - start

    def _watch(self, state: Any, batch: Any, progress: Callable[[str], None]) -> Any:
        """The first step of each form, the one that should need least first: the peak never falls again."""
        for name in sorted(self._compiled, key=lambda name: self.variants[name].device_bytes):
            progress(f"running {name}")
            variant = self.variants[name]
            variant.peak_before = self._peak()
            try:
                state, _ = self._run(name, state, batch)
            except Exception as error:
                variant.failures.append(f"stack, {name}: can't be run: {first_line(error)}")
                del self._compiled[name]
                if _lost(state):
                    self.failures_of_test.append(f"stack: the state was lost with {name}: what follows it isn't tried")
                    return None
                continue
            variant.peak_after = self._peak()
        return state

    def _peak(self) -> int | None:
        return (memory_stats(self.device) or {}).get("peak_bytes_in_use")

    def _time(self, state: Any, batch: Any, progress: Callable[[str], None]) -> None:
        for i in range(self.runs):
            progress(f"timing {i + 1} of {self.runs}")
            for name in self._compiled:  # in turn: what slows the machine for a while slows all alike
                try:
                    state, seconds = self._run(name, state, batch)
                except Exception as error:
                    self.variants[name].failures.append(f"stack, {name}: can't be run again: {first_line(error)}")
                    return
                self.variants[name].seconds.append(seconds)

    def freed(self, name: str) -> tuple[int, int] | None:
        """Bytes that a form should free at the peak, and those that it frees at least; None where that isn't known."""
        save, other = self.variants.get(SAVE), self.variants[name]
        if save is None or save.peak_after is None or other.peak_after is None:
            return None
        # The peak after a form's step is its own, or an earlier one's that was higher.
        return save.device_bytes - other.device_bytes, save.peak_after - other.peak_after

    def _judge_memory(self) -> None:
        for name, variant in self.variants.items():
            if not variant.host_bytes or (sizes := self.freed(name)) is None:
                continue
            planned, found = sizes
            if planned > 0 and found < LEAST_FREED * planned:
                earlier = variant.peak_after == variant.peak_before
                variant.failures.append(
                    f"stack, {name}: offload isn't proved by the device's memory: {format_bytes(planned)} should leave "
                    f"it, and its peak falls by {format_bytes(max(found, 0))} from {SAVE}'s"
                    + ("; an earlier peak may hide it" if earlier else "")
                )

    def ratio(self, name: str) -> float | None:
        """The median time of a form's step over that of saving everything, in pairs of neighbouring runs."""
        save, other = self.variants.get(SAVE), self.variants[name]
        if save is None or not save.seconds or not other.seconds:
            return None
        return statistics.median(b / a for a, b in zip(save.seconds, other.seconds, strict=False))

    def as_json(self) -> dict[str, Any]:
        rows = []
        for name, variant in self.variants.items():
            row = variant.as_json() | {"time_over_save": self.ratio(name)}
            if (sizes := self.freed(name)) is not None:
                row |= {"planned_freed_bytes": sizes[0], "freed_bytes": sizes[1]}
            rows.append(row)
        return {"shape": self.shape.as_json(), "variants": rows, "failures": self.failures_of_test}


def _lost(state: Any) -> bool:
    """Whether a failed step took its state with it."""
    return any(leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))
