"""`overspill selftest`: whether offload is right on the devices at hand, whether it happens, and what it costs."""

import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.markup import escape

from .. import __version__
from ..policies.accelerators import target, targets
from ..policies.flags import xla_flags
from ..policies.report import Table, format_bytes
from .artifacts import write_text
from .run_options import check_file
from .selftest_gradients import GradientTest, cases, first_line
from .selftest_links import MIB, Rates, largest_rates, measure_links, measure_matmul
from .selftest_models import FAMILIES
from .selftest_stack import QUICK, SAVE, TINY, VARIANTS, StackTest, memory_stats, room_on_host, shape_for

PARTS = ("memory", "times", "gradients", "links")
# Variables that decide what is compiled and how much memory there is.
_PREFIXES = ("XLA_", "LIBTPU_", "JAX_", "TF_GPU_ALLOCATOR")
_SHORT = {"device_to_host": "to the host", "host_to_device": "to the device"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asks for; see `overspill selftest --help`."""

    quick: bool = False
    only: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    json: pathlib.Path | None = None


def prepare(options: Options) -> "SelfTest":
    """The test that is asked for. Raises ValueError, before anything is computed, for what can't be."""
    for what, chosen, known in (("part", options.only, PARTS), ("family", options.families, tuple(FAMILIES))):
        for name in chosen:
            if name not in known:
                raise ValueError(f"no {what} of the self-test is called {name!r}: there are {', '.join(known)}")
    check_file(options.json)
    return SelfTest(options)


class SelfTest:
    """The parts of the test, and what they found; calling it runs and prints them and gives the exit code.

    - `device`: the one that is tested, the first.
    - `gradients`, `stack`, `links`, `matmul`: results; None for parts that didn't run.
    - `failures`: everything that is wrong, a line each.
    """

    def __init__(self, options: Options, device: Any = None):
        self.options = options
        self.parts = tuple(part for part in PARTS if not options.only or part in options.only)
        self.device = jax.devices()[0] if device is None else device
        self.gradients: GradientTest | None = None
        self.stack: StackTest | None = None
        self.links: list[Rates] = []
        self.matmul: dict[str, Any] | None = None
        self.seconds: dict[str, float] = {}
        self._link_failures: list[str] = []

    @property
    def is_cpu(self) -> bool:
        return self.device.platform == "cpu"

    @property
    def failures(self) -> list[str]:
        """What is wrong, a line each; empty if nothing is."""
        found = [] if self.stack is None else self.stack.failures
        return found + ([] if self.gradients is None else self.gradients.failures) + self._link_failures

    def __call__(self, console: Console) -> int:
        show = console.print if console.is_terminal else lambda table: print(table, file=console.file)
        for line in self._head():
            console.print(line, markup=False)
        # The stack comes first: a device's peak of memory never falls, so nothing must come before that hides it.
        for name, run, tables in (
            ("stack", self._run_stack, self._stack_tables),
            ("gradients", self._run_gradients, self._gradient_tables),
            ("links", self._run_links, self._link_tables),
        ):
            start = time.perf_counter()
            with console.status(name) as status:
                ran = run(lambda text, name=name, status=status: status.update(f"{name}: {escape(text)}"))
            if ran:
                self.seconds[name] = round(time.perf_counter() - start, 2)
                for table in tables():
                    show(table)
        for failure in self.failures:
            console.print(f"FAILED: {failure}", markup=False, style="bold red")
        console.print(self.verdict, markup=False, style="bold")
        if self.options.json is not None:
            text = json.dumps(_finite(self.as_json()), indent=1, allow_nan=False)
            write_text(self.options.json, text + "\n")
            console.print(f"written to {escape(str(self.options.json))}")
        return 1 if self.failures else 0

    @property
    def verdict(self) -> str:
        """The outcome in a sentence."""
        if self.failures:
            return f"self-test failed: {len(self.failures)} findings on {self.device.device_kind}"
        proofs = []
        if self.gradients is not None:
            proofs.append("gradients are those of no policy")
        if self.stack is not None or self.gradients is not None:
            if self.is_cpu:
                proofs.append("offload is in every traced program (a CPU has no other memory to show it in)")
            elif any(v.peak_after is not None for v in (self.stack.variants.values() if self.stack else ())):
                proofs.append("offload is in every compiled program and in the device's memory")
            else:
                proofs.append("offload is in every compiled program")
        return f"self-test passed on {self.device.device_kind}" + (f": {', '.join(proofs)}" if proofs else "")

    def _head(self) -> Iterator[str]:
        count = len(jax.devices())
        yield (
            f"{self.device.device_kind} ({self.device.platform}, the first of {count}), JAX {jax.__version__}, "
            f"overspill {__version__}{', quick' if self.options.quick else ''}"
        )
        for name, value in _environment().items():
            yield f"{name}={value}"
        if missing := self.missing_flags():
            yield f"not set, and wanted for overlap: {', '.join(missing)} (see overspill env)"
        if self.is_cpu:
            yield (
                "this is a CPU: placements are in the program, not in memory, for all of it is host memory; nothing "
                "can be said of the device's memory, and times mean little"
            )

    def missing_flags(self) -> list[str]:
        """Flags that this hardware needs for overlap (`policies.xla_flags`) and that the environment hasn't."""
        kind = self.device.device_kind.lower().replace(" ", "-")
        known = [name for name in targets() if name in kind or target(name).description.lower() == kind]
        if self.is_cpu or not known:
            return []
        try:
            flags = xla_flags(max(known, key=len))
        except Exception:  # advice only: a test must not fail for want of it
            return []
        return [
            flag.name for flag in flags
            if flag.name not in os.environ and f"{flag.name}=" not in os.environ.get(flag.variable, "")
        ]  # fmt: skip

    def _run_stack(self, progress: Callable[[str], None]) -> bool:
        if not {"memory", "times"} & set(self.parts):
            return False
        stats = memory_stats(self.device) or {}
        shape = TINY if self.is_cpu else shape_for(stats.get("bytes_limit"), room_on_host())
        variants = {name: VARIANTS[name] for name in (QUICK if self.options.quick else VARIANTS)}
        runs = (3 if self.options.quick else 5) if "times" in self.parts else 0
        self.stack = StackTest(shape, variants, device=self.device, runs=runs)
        self.stack(progress)
        return True

    def _stack_tables(self) -> Iterator[Table]:
        stack = self.stack
        if "memory" in self.parts:
            rows = []
            for name, variant in stack.variants.items():
                sizes = stack.freed(name)
                rows.append((
                    name, format_bytes(variant.device_bytes), format_bytes(variant.host_bytes),
                    _size(variant.compiled_host_bytes), _size(variant.temp_bytes), _size(variant.peak_before),
                    _size(variant.peak_after), _size(sizes and sizes[0]), _size(sizes and sizes[1]),
                ))  # fmt: skip
            footer = str(stack.shape)
            if all(variant.peak_after is None for variant in stack.variants.values()):
                footer += f"\n{self.device.device_kind} says nothing of its memory (memory_stats): no peak is known"
            else:
                footer += f"\nfreed: what should wait elsewhere, and how far the peak is below that of {SAVE}"
            columns = ("step", "kept on device", "on host", "host, compiled", "scratch, compiled", "peak before",
                       "peak after", "to be freed", "freed")  # fmt: skip
            yield Table(columns, rows, title="Memory", footer=footer)
        if "times" in self.parts:
            rows = [
                (name, _seconds(variant.median), _ratio(stack.ratio(name)), _seconds(variant.compile_seconds))
                for name, variant in stack.variants.items()
            ]
            footer = f"{stack.shape}; median of {stack.runs} steps"
            yield Table(("step", "time", f"over {SAVE}", "compiled in"), rows, title="Times", footer=footer)

    def _run_gradients(self, progress: Callable[[str], None]) -> bool:
        if "gradients" not in self.parts:
            return False
        families = self.options.families or tuple(FAMILIES)
        self.gradients = GradientTest(cases(families, quick=self.options.quick), device=self.device)
        self.gradients(progress)
        return True

    def _gradient_tables(self) -> Iterator[Table]:
        forms = ("one scan", "segments", "bfloat16")
        cells: dict[tuple[str, str], dict[str, str]] = {}
        for family, result in self.gradients.references.items():
            cells[family, "no policy, against float64 NumPy"] = {"one scan": _error(result)}
        for result in self.gradients.results:
            if result.case.preset is not None:
                form = result.case.form if result.case.dtype == "float32" else result.case.dtype
                cells.setdefault((result.case.family, result.case.preset), {})[form] = _error(result)
        rows = [(*key, *(row.get(form, "-") for form in forms)) for key, row in cells.items()]
        footer = "largest error of a gradient in one layer, as a share of its norm; presets against no policy"
        yield Table(("model", "preset", *forms), rows, title="Gradients", footer=footer)

    def _run_links(self, progress: Callable[[str], None]) -> bool:
        if "links" not in self.parts:
            return False
        sizes = [1 * MIB, 16 * MIB] if self.is_cpu else [16 * MIB, 64 * MIB, 256 * MIB]
        if not self.is_cpu and not self.options.quick:
            sizes.append(1024 * MIB)
        dtype, size = ("float32", 512) if self.is_cpu else ("bfloat16", 8192)
        try:
            progress("copies")
            self.links = measure_links(self.device, sizes, repeats=3 if self.options.quick else 8)
        except Exception as error:
            self._link_failures.append(f"links can't be measured: {first_line(error)}")
        try:
            progress("matmuls")
            rate = measure_matmul(self.device, jnp.dtype(dtype), size, repeats=3 if self.options.quick else 8)
            self.matmul = {"dtype": dtype, "size": size, "flops_per_second": rate}
        except Exception as error:
            self._link_failures.append(f"matmuls can't be measured: {first_line(error)}")
        return True

    def _link_tables(self) -> Iterator[Table]:
        columns = ("copies of", *_SHORT.values(), *(f"{text}, both at once" for text in _SHORT.values()))
        rows = [
            (format_bytes(r.size), *(f"{rate / 1e9:.2f} GB/s" for rate in dataclasses.astuple(r)[1:]))
            for r in self.links
        ]
        footer = ""
        if self.matmul is not None:
            footer = f"matmuls of {self.matmul['dtype']}: {self.matmul['flops_per_second'] / 1e12:.2f} TFLOP/s"
        if self.is_cpu:
            footer += "\non a CPU both ends are the same memory"
        yield Table(columns, rows, title="Links", footer=footer)

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values. Sizes are in bytes, times in seconds, rates in bytes per second."""
        out: dict[str, Any] = {
            "verdict": "failed" if self.failures else "passed",
            "failures": self.failures,
            "overspill": __version__,
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "python": platform.python_version(),
            "platform": self.device.platform,
            "device_kind": self.device.device_kind,
            "devices": len(jax.devices()),
            "memory_stats": memory_stats(self.device),
            "environment": _environment(),
            "missing_flags": self.missing_flags(),
            "quick": self.options.quick,
            "parts": list(self.parts),
            "seconds": self.seconds,
        }
        if self.gradients is not None:
            out["gradients"] = {
                "against_numpy": [result.as_json() for result in self.gradients.references.values()],
                "against_no_policy": [r.as_json() for r in self.gradients.results if r.case.preset is not None],
            }
        if self.stack is not None:
            out["stack"] = self.stack.as_json()
        if self.links:
            out["links"] = largest_rates(self.links) | {"sizes": [rates.as_json() for rates in self.links]}
        if self.matmul is not None:
            out["matmul"] = self.matmul
        return out


def _environment() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}


def _finite(value: Any) -> Any:
    """`value` with numbers that JSON doesn't know as text."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _size(value: int | None) -> str:
    if value is None:
        return "-"
    return format_bytes(value) if value >= 0 else f"-{format_bytes(-value)}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s" if value >= 10 else f"{value * 1e3:.1f} ms"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _error(result: Any) -> str:
    if not result.failures:
        return f"{result.error:.1e}"
    return f"{result.error:.1e} WRONG" if result.share > 1 else "FAILED"
