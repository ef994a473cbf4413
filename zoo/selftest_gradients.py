"""Gradients under every preset, layer by layer, against no policy at all and against float64 NumPy.

A released jaxlib read offloaded values of a scan in the wrong order: no error, no NaN, wrong gradients.
"""

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..policies.activation import Placement, annotations
from ..policies.placing import place, presets
from ..policies.proof import examine
from .building import abstract, resegment
from .compiled import commit
from .selftest_models import (
    BALANCE_WEIGHT,
    BATCH_SEED,
    CUTS,
    FAMILIES,
    MODEL_SEED,
    MTP_WEIGHT,
    by_layer,
    random_batch,
    random_model,
)
from .selftest_reference import reference
from .train import Step, TrainState, init_state, make_train_step

Gradients = dict[tuple[str, int | None], np.ndarray]

# Two correct float32 programs differ by rounding, 2e-6 of a gradient's norm: a wrong one by its norm.
FLOAT32_TOLERANCE = 5e-5
# In bfloat16 the measure is how far no policy is from float32: two programs may each be as far, in other directions.
BFLOAT16_FACTOR = 3.0
BFLOAT16_MOST = 0.75  # whatever rounding does: another layer's gradient is further off
MOST_FAULTS = 3  # of those that a proof lists, how many are reported
_RATE = 0.05  # of the update between two steps
# Compiling for a CPU, XLA's passes matter and LLVM's don't.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """A program: a family's model under a preset (None: no policy), whole or in segments, in a dtype."""

    family: str
    preset: str | None
    segmented: bool = False
    dtype: str = "float32"
    # Only these of the activations that the preset offloads, by name: to find the one at fault.
    only: str | None = None

    @property
    def form(self) -> str:
        return "segments" if self.segmented else "one scan"

    def __str__(self) -> str:
        what = f"{self.preset or 'no policy'}{f' ({self.only} alone)' if self.only else ''}"
        return f"{self.family}, {what}, {self.form}, {self.dtype}"


@dataclasses.dataclass
class Result:
    """What came of a case."""

    case: Case
    error: float = 0.0  # the largest, as a share of the gradient's norm in one layer
    share: float = 0.0  # the same as a share of what is allowed: above 1 is wrong
    where: str = ""  # array and layer of it
    compared: int = 0  # arrays, each layer on its own
    host_bytes: int | None = None  # planned, by annotations and jaxpr
    compiled_host_bytes: int | None = None  # what the compiled program keeps there; None on a CPU
    failures: list[str] = dataclasses.field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "family": self.case.family, "preset": self.case.preset, "form": self.case.form, "dtype": self.case.dtype,
            "largest_relative_error": self.error, "share_of_allowed_error": self.share, "where": self.where,
            "compared": self.compared, "planned_host_bytes": self.host_bytes,
            "compiled_host_bytes": self.compiled_host_bytes, "failures": self.failures,
        }  # fmt: skip


def cases(families: Iterable[str], *, quick: bool) -> list[Case]:
    """What is tried, each family's program without any policy first.

    Every preset that fits, whole and in segments, and some in bfloat16. In quick runs segments only for the preset
    that reads everything from the host, and of DeepSeek, which takes long to compile, little else.
    """
    out: list[Case] = []
    for family in families:
        fitting = [name for name in presets() if fits(family, name)]
        whole = ["offload_latents"] if quick and "offload_latents" in fitting else fitting
        cut = ["offload_all"] if quick else fitting
        out += [Case(family, None), *(Case(family, preset) for preset in whole)]
        out += [Case(family, preset, True) for preset in cut]
        if not quick:
            out += [Case(family, preset, dtype="bfloat16") for preset in (None, "offload_all")]
    return out


def fits(family: str, preset: str) -> bool:
    """Whether a preset finds in a family's model what it places."""
    try:
        place(abstract(FAMILIES[family]), preset)
    except ValueError:
        return False
    return True


class Ready:
    """A training step with the program that was compiled of it, to be proved without compiling it again."""

    def __init__(self, step: Step, compiled: Any):
        self.raw, self.annotated, self._compiled = step.raw, step.annotated, compiled

    def __call__(self, *args: Any) -> Any:
        return self._compiled(*args)

    def lower(self, *args: Any, platform: str | None = None) -> "Ready":
        return self

    def compile(self) -> Any:
        return self._compiled


class Seen(NamedTuple):
    """The state of `recording`."""

    gradients: Any


def recording(rate: float) -> optax.GradientTransformation:
    """Plain gradient descent that keeps the last gradients as its state: the training step itself shows them."""

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del state, params
        return jax.tree.map(lambda g: -rate * g, gradients), Seen(gradients)

    return optax.GradientTransformation(lambda params: Seen(jax.tree.map(jnp.zeros_like, params)), update)


def _placed(case: Case, model: Any) -> Any:
    if case.segmented:
        model = resegment(model, CUTS[case.family])
    if case.preset is None:
        return model
    model = place(model, case.preset)
    if case.only is not None:
        rules = {
            row.path: "recompute" if row.activation.recomputable else "device"
            for row in annotations(model)
            if row.placement is Placement.HOST and row.activation.name != case.only
        }
        model = place(model, rules) if rules else model
    if case.segmented:
        # What the backward pass wants at once need not leave the device.
        name, stack = list(model.stacks().items())[-1]
        model = place(model, {f"{name}.segments.{len(stack.segments) - 1}.*": "device"})
    return model


def make_step(case: Case, model: Any) -> Step:
    """The training step of a case, with the optimizer that shows its gradients."""
    return make_train_step(
        _placed(case, model), recording(_RATE), checkpoint=case.preset is not None, mtp_weight=MTP_WEIGHT,
        balance_weight=BALANCE_WEIGHT, bias_rate=0.0, clip_norm=None,
        compute_dtype=None if case.dtype == "float32" else jnp.dtype(case.dtype),
    )  # fmt: skip


class _Family:
    """A family's model and batches, and the state that training starts from, made once."""

    def __init__(self, name: str, steps: int, device: Any):
        self.config = FAMILIES[name]
        self.model = random_model(self.config, MODEL_SEED)
        self.batches = [random_batch(self.config, BATCH_SEED + i) for i in range(steps)]
        self.start = init_state(self.model, recording(_RATE), key=jax.random.key(0))
        self.device = device

    def state(self, case: Case, *, steady: bool) -> TrainState:
        """A copy, since steps take theirs over.

        A `steady` one has its routers decide by their biases alone: in bfloat16 rounding would send many a token to
        another expert, and gradients would differ for that.
        """
        state = jax.tree.map(jnp.copy, self.start)
        if steady:
            state = dataclasses.replace(state, buffers={path: 40 * x for path, x in state.buffers.items()})
        if case.segmented:
            state = resegment(state, CUTS[case.family], model=self.model)
        return commit(state)


def first_line(error: BaseException) -> str:
    """An error's kind and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


class GradientTest:
    """Compiles and runs cases, and compares their gradients; `results` has one Result for each.

    - `steps`: how many each program trains: from the second on its buffers are used again.
    """

    def __init__(self, wanted: list[Case], *, device: Any, steps: int = 2, workers: int | None = None):
        self.wanted = wanted
        self.steps = steps
        self.device = device
        self.workers = workers or max(1, min(8, (os.cpu_count() or 1)))
        self.results: list[Result] = []
        self.references: dict[str, Result] = {}  # no policy against float64 NumPy, by family
        self._families: dict[str, _Family] = {}
        self._found: dict[Case, list[Gradients]] = {}
        self._steady: dict[str, list[Gradients]] = {}  # float32 without policy, to measure bfloat16's rounding by

    @property
    def failures(self) -> list[str]:
        return [text for result in [*self.references.values(), *self.results] for text in result.failures]

    def __call__(self, progress: Callable[[str], None] = lambda text: None) -> None:
        """Runs everything. What fails is in the results; nothing raises."""
        for result, gradients in self._run(self.wanted, progress):
            self.results.append(result)
            if gradients is None:
                continue
            if result.case.preset is None:
                self._found[result.case] = gradients
                if result.case.dtype == "float32":
                    self.references[result.case.family] = self._against_numpy(result.case, gradients[0])
                continue
            self._compare(result, gradients)
            if result.share > 1 and result.case.preset.startswith("offload"):
                self._blame(result, progress)

    def family(self, name: str) -> _Family:
        if name not in self._families:
            self._families[name] = _Family(name, self.steps, self.device)
        return self._families[name]

    def _run(
        self, wanted: list[Case], progress: Callable[[str], None]
    ) -> Iterator[tuple[Result, list[Gradients] | None]]:
        """Each case with its gradients, None where it failed. Programs compile while others are traced and run."""
        options = FAST if self.device.platform == "cpu" else None
        with concurrent.futures.ThreadPoolExecutor(self.workers) as threads:
            waiting = []
            for case in wanted:
                result, future = Result(case), None
                progress(str(case))
                try:
                    lowered = self._lower(case)
                    future = threads.submit(lowered.compile, compiler_options=options)
                except Exception as error:
                    result.failures.append(f"{case}: can't be traced: {first_line(error)}")
                waiting.append((result, future))
            for result, future in waiting:
                gradients = None
                if future is not None:
                    progress(str(result.case))
                    stage = "compiled"
                    try:
                        compiled = future.result()
                        stage = "run"
                        narrow = result.case.dtype != "float32"
                        gradients = self._train(result.case, compiled, steady=narrow)
                        if result.case.preset is None and not narrow:
                            self._steady[result.case.family] = self._train(result.case, compiled, steady=True)
                        stage = "proved"
                        self._prove(result, compiled)
                    except Exception as error:
                        result.failures.append(f"{result.case}: can't be {stage}: {first_line(error)}")
                yield result, gradients

    def _lower(self, case: Case) -> jax.stages.Lowered:
        family = self.family(case.family)
        # Otherwise GPUs round what float32 matmuls read to fewer digits.
        with jax.default_matmul_precision("highest"):
            return make_step(case, family.model).lower(family.state(case, steady=False), commit(family.batches[0]))

    def _prove(self, result: Result, compiled: Any) -> None:
        """Whether activations wait where they are placed: in the traced program, and in the compiled one."""
        case = result.case
        if case.preset is None or case.only is not None:
            return
        family = self.family(case.family)
        state, batch = family.state(case, steady=False), commit(family.batches[0])
        proof = examine(Ready(make_step(case, family.model), compiled), state, batch)
        result.host_bytes, result.compiled_host_bytes = proof.planned_bytes, proof.host_bytes
        result.failures += [f"{case}: offload isn't proved: {fault}" for fault in proof.faults[:MOST_FAULTS]]

    def _train(self, case: Case, compiled: Any, *, steady: bool) -> list[Gradients]:
        family = self.family(case.family)
        state, found = family.state(case, steady=steady), []
        stacks = _placed(case, family.model).stacks()
        for batch in family.batches:
            state, metrics = compiled(state, commit(batch))
            if bool(metrics.skipped):
                raise FloatingPointError(f"step {len(found) + 1} isn't finite: its loss is {float(metrics.loss)}")
            found.append(by_layer(jax.device_get(state.opt_state.gradients), stacks))
        return found

    def _against_numpy(self, case: Case, found: Gradients) -> Result:
        family, result = self.family(case.family), Result(case)
        expected = reference(family.model, family.batches[0])[1]
        _judge(result, found, expected, dict.fromkeys(found, FLOAT32_TOLERANCE), "float64 NumPy")
        return result

    def _compare(self, result: Result, gradients: list[Gradients]) -> None:
        base = dataclasses.replace(result.case, preset=None, segmented=False, only=None)
        wide = self._steady.get(base.family)
        if base not in self._found or wide is None:
            result.failures.append(f"{result.case}: nothing to compare with: the program without policy failed")
            return
        for i, found in enumerate(gradients):
            expected = self._found[base][i]
            allowed = dict.fromkeys(found, FLOAT32_TOLERANCE)
            if base.dtype != "float32":
                allowed = _rounding(expected, wide[i])
            _judge(result, found, expected, allowed, f"no policy in step {i + 1}")

    def _blame(self, result: Result, progress: Callable[[str], None]) -> None:
        """Which of the offloaded activations makes a preset's gradients wrong, each tried alone."""
        rows = annotations(_placed(result.case, self.family(result.case.family).model))
        names = dict.fromkeys(row.activation.name for row in rows if row.placement is Placement.HOST)
        guilty = []
        for alone, gradients in self._run([dataclasses.replace(result.case, only=name) for name in names], progress):
            if gradients is not None:
                self._compare(alone, gradients)
                if alone.share > 1:
                    guilty.append(alone.case.only)
        if guilty:
            result.failures.append(f"{result.case}: wrong with only this offloaded: {', '.join(guilty)}")
        else:
            result.failures.append(f"{result.case}: no single offloaded activation makes it wrong: {', '.join(names)}")


def _norms(expected: Gradients) -> dict[tuple[str, int | None], float]:
    """What errors are measured by: a gradient's norm, or where it is much smaller than in other layers, of theirs."""
    mean: dict[str, list[float]] = {}
    own = {key: float(np.linalg.norm(value)) for key, value in expected.items()}
    for (name, _), norm in own.items():
        mean.setdefault(name, []).append(norm)
    return {key: max(norm, 0.1 * float(np.mean(mean[key[0]]))) or 1.0 for key, norm in own.items()}


def _rounding(narrow: Gradients, wide: Gradients) -> dict[tuple[str, int | None], float]:
    """For each array what rounding in bfloat16 does to it, the most of all layers."""
    norms, most = _norms(narrow), {}
    for key, value in narrow.items():
        error = float(np.linalg.norm(value - wide[key])) / norms[key]
        most[key[0]] = max(most.get(key[0], 0.0), error)
    return {key: min(BFLOAT16_FACTOR * most[key[0]], BFLOAT16_MOST) for key in narrow}


def _judge(
    result: Result, found: Gradients, expected: Gradients, allowed: dict[tuple[str, int | None], float], than: str
) -> None:
    """Compares two sets of gradients and writes down in `result` the worst pair, and each array that differs."""
    norms, wrong = _norms(expected), []
    for key, value in found.items():
        error = float(np.linalg.norm(value - expected[key])) / norms[key]
        error = error if np.isfinite(error) else float("inf")
        share = error / max(allowed[key], 1e-30)
        result.compared += 1
        if share >= result.share:
            result.error, result.share, result.where = error, share, _label(key)
        if share > 1:
            wrong.append((share, error, key))
    if not wrong:
        return
    _, error, key = max(wrong, key=lambda row: row[0])
    layers = sorted({layer for _, _, (_, layer) in wrong if layer is not None})
    hint = _order(found, expected, key[0])
    result.failures.append(
        f"{result.case}: {len(wrong)} of {len(found)} gradients differ from {than}"
        + (f", in layers {', '.join(map(str, layers))}" if layers else "")
        + f": that of {_label(key)} by {error:.2g} of its norm (at most {allowed[key]:.2g})"
        + (f"; {hint}" if hint else "")
    )


def _label(key: tuple[str, int | None]) -> str:
    return key[0] if key[1] is None else f"{key[0]} in layer {key[1]}"


def _order(found: Gradients, expected: Gradients, name: str) -> str:
    """Whether the layers of an array have each other's gradients, in words."""
    layers = [layer for other, layer in found if other == name and layer is not None]
    taken = []
    for layer in layers:
        distances = [np.linalg.norm(found[name, layer] - expected[name, other]) for other in layers]
        nearest = int(np.argmin(distances))
        if distances[nearest] > 1e-2 * np.linalg.norm(expected[name, layers[nearest]]):
            return ""
        taken.append(layers[nearest])
    return f"layers {layers} have the gradients of layers {taken}" if taken != layers else ""
