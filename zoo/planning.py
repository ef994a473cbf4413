"""`overspill plan`: where each activation of a model's training step should wait, and what that gives."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
from rich.console import Console

from .. import __version__
from ..policies.accelerators import target as find_target
from ..policies.ahead import Ahead, CompileError, require_compiler
from ..policies.calibrating import calibrated, installed
from ..policies.machines import Hardware, hardware as find_hardware
from ..policies.placing import place
from ..policies.plan_plots import figure_class
from ..policies.plan_reasons import format_seconds
from ..policies.planned import Plan
from ..policies.planner import Options as PlannerOptions, Planner
from ..policies.programs import Program
from ..policies.proof import Proof, examine
from ..policies.report import Table, format_bytes
from ..policies.solving import Infeasible
from .artifacts import write_text
from .building import resegment
from .plan_search import Search
from .proving import Family, Options as ProvingOptions, assemble, one_host
from .run_options import check_file

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asks for; see `overspill plan --help`."""

    model: str
    hardware: str
    devices: int | None = None
    mesh: str = ""
    rules: tuple[str, ...] = ()
    global_batch: int | None = None
    sequence: int | None = None
    accumulate: int | None = None
    expert_rounds: int | None = None
    dtype: str = "bfloat16"
    products: str | None = None
    segments: int | None = None
    layers: int | None = None
    state_memory: tuple[str, ...] = ()
    device_gib: float | None = None
    host_gib: float | None = None
    pinned_gib: float | None = None
    pipelined: bool = True
    fused_attention: bool = False
    measured: pathlib.Path | None = None
    largest_batch: bool = False
    frontier: bool = False
    calibrate: bool | None = None
    verify: bool = False
    plot: pathlib.Path | None = None
    json: pathlib.Path | None = None


def prepare(options: Options) -> "Planning":
    """Everything that can be wrong with what is asked for, found out before anything is traced.

    Raises ValueError, and with `verify` and `calibrate` ModuleNotFoundError where the hardware's compiler isn't
    installed.
    """
    hardware = find_hardware(options.hardware)
    if options.measured is not None:
        hardware = hardware.measured(options.measured)
    target = hardware.target
    calibrates = bool(options.calibrate)
    if options.verify or calibrates:
        if target is None:
            find_target(options.hardware)  # raises, naming what can be compiled for
        require_compiler(target.platform)
    if options.calibrate is None:
        calibrates = installed(hardware)
    for path in (options.json, options.plot):
        check_file(path)
    if options.plot is not None and options.plot.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--plot {str(options.plot)!r}: a picture's name ends in .png, .pdf or .svg")
    if options.plot is not None:
        figure_class()  # raises without matplotlib
    planning = Planning(options, hardware, calibrates)
    planning.take(options.accumulate or 1, options.expert_rounds or 1)
    return planning


class Planning:
    """A plan to be made, printed and, if asked for, compiled.

    - `calibrates`: whether the hardware's compiler is asked what plans need.
    """

    family: Family

    def __init__(self, options: Options, hardware: Hardware, calibrates: bool = False):
        self.options, self.hardware, self.calibrates = options, hardware, calibrates

    def take(self, accumulate: int, expert_rounds: int) -> "Planning":
        """This with a step in so many micro-batches and rounds. Raises ValueError for a batch that can't be cut so."""
        options, target = self.options, self.hardware.target
        self.family = assemble(
            ProvingOptions(
                options.model, options.hardware, options.devices, options.mesh, options.rules, options.global_batch,
                options.sequence, ("recompute_all",), "", options.dtype, accumulate, expert_rounds,
                options.state_memory, options.layers,
            ),
            target,
            self.hardware.devices_per_host if target is None else one_host(target),
        )  # fmt: skip
        return self

    def __call__(self, console: Console) -> int:
        options = self.options
        say = lambda line, style=None: console.print(line, style=style, markup=False, soft_wrap=not console.is_terminal)
        for line in self.head():
            say(line)
        start = time.perf_counter()
        with console.status("reading the program") as status:
            search = Search(self.family, options.accumulate, options.expert_rounds, self._tried)

            def confirmed(planner: Planner, plan: Plan) -> Plan:
                if not self.calibrates:
                    return plan
                status.update(f"compiling for {self.hardware.description}")
                return self._calibrated(planner, plan, say)

            try:
                planner, plan = search(confirmed)
                self.take(*search.choice)
            except Infeasible as error:
                for line in self._unfit(search.planner, error):
                    say(line, "bold red")
                return 1
        if chosen := self.chosen():
            say(f"to make it fit: {chosen}")
        say(f"read and solved in {time.perf_counter() - start:.1f} s ({plan.solve_seconds:.2f} s to choose)")
        for part in (plan, plan.alternatives(), plan.explain()):
            console.print(part)
        out: dict[str, Any] = {}
        if self.options.frontier:
            with console.status("the frontier"):
                table = frontier_table(plan)
            console.print(table)
        if self.options.largest_batch:
            with console.status("the largest batch"):
                rows = planner.largest_batch()
            say(f"largest global batch that fits: {rows:,} x {self.family.sequence_length:,} tokens")
            out["largest_batch"] = rows
        code = 0
        if self.options.verify:
            with console.status(f"compiling for {self.hardware.description}"):
                proof = self.verify(plan)
            console.print(compared(plan, proof))
            for fault in proof.faults:
                say(str(fault), "bold red")
            code = int(bool(proof.faults))
            out["compiled"] = proof.compiled.as_json()
        if self.options.plot is not None:
            plan.plot().savefig(self.options.plot)
            say(f"drawn to {self.options.plot}")
        if self.options.json is not None:
            out = {"overspill": __version__, "asked": self._asked(), "plan": plan.as_json(), **out}
            write_text(self.options.json, json.dumps(out, indent=1, default=str) + "\n")
            say(f"written to {self.options.json}")
        return code

    def planner(self) -> Planner:
        """The training step, read."""
        options, family = self.options, self.family
        sizes = {
            name: None if value is None else value * _GIB
            for name, value in (("device_bytes", options.device_gib), ("host_bytes", options.host_gib),
                                ("pinned_bytes", options.pinned_gib))
        }  # fmt: skip
        chosen = PlannerOptions(
            self.hardware, **sizes, segments=options.segments, pipelined=options.pipelined, dtype=options.products,
            fused_attention=options.fused_attention,
        )  # fmt: skip
        program = Program(family.step(family.model), (family.state(), family.batch()), {})
        return Planner(chosen, program)

    def verify(self, plan: Plan) -> Proof:
        """The step as planned, compiled for the hardware and proved. Raises CompileError."""
        model = place(resegment(self.family.model, plan.boundaries), plan)
        family = Family(self.family.options, self.family.place, self.family.config, self.family.layout,
                        self.family.batch_size, self.family.sequence_length, {"plan": model})  # fmt: skip
        return examine(family.step(model), family.state(), family.batch(), target=self.family.place)

    def head(self) -> list[str]:
        """What is planned, and for what."""
        lines = self.family.head()
        where = f"{self.family.layout.mesh.size:,} x {self.hardware.description}"
        mesh = ",".join(f"{name}={size}" for name, size in self.family.layout.mesh.shape.items())
        lines[-1] = f"{where} as {mesh}{'' if self.options.mesh else ' (chosen; --mesh takes another)'}"
        if not self.options.fused_attention:
            lines.append("attention's scores pass through memory (--fused-attention counts a fused kernel's time)")
        if self.hardware.announced:
            lines.append("the hardware's numbers are its vendor's announcement")
        return lines

    def _tried(self, accumulate: int, expert_rounds: int) -> tuple[Planner, Plan | Infeasible]:
        planner = self.take(accumulate, expert_rounds).planner()
        try:
            return planner, planner.plan()
        except Infeasible as error:
            return planner, error

    def _calibrated(self, planner: Planner, plan: Plan, say: Callable[..., None]) -> Plan:
        """A plan with the compiler's bytes. One that nobody asked for may fail: then the simulated plan stays."""
        try:
            return calibrated(planner)
        except CompileError as error:
            if self.options.calibrate:
                raise
            say(f"device memory is simulated, because {error}", "yellow")
            return plan

    def chosen(self) -> str:
        """What wasn't asked for, of how the step is cut; nothing where it isn't."""
        options, found = self.options, self.family.options
        parts = []
        if options.accumulate is None and found.accumulate > 1:
            parts.append(f"in {found.accumulate} micro-batches (--accumulate takes another number)")
        if options.expert_rounds is None and found.expert_rounds > 1:
            parts.append(f"among experts in {found.expert_rounds} rounds (--expert-rounds takes another number)")
        return ", ".join(parts)

    def _unfit(self, planner: Planner, error: Infeasible) -> list[str]:
        """What is short, and what would make it fit."""
        cut = self.chosen()
        lines = [str(error) + (f"; that is {cut}" if cut else "")]
        rows = planner.largest_batch()
        if rows >= self.family.batch_size:
            lines.append("it was simulated to fit, and the compiler says otherwise (--no-calibrate doesn't ask it)")
        elif rows:
            lines.append(f"it fits with a global batch of {rows:,}")
        else:
            lines.append("no smaller batch fits: cut the model over more devices (--devices, --mesh)")
        state = planner.state_bytes("opt_state")
        # XLA's compilers for GPUs bring the state in early, and need as much memory all the same.
        if error.device_shortfall and state and self.hardware.platform == "tpu":
            lines.append(
                f"the optimizer's state takes {format_bytes(state)} of each device: --state-memory 'optimizer.*=host' "
                "moves it"
            )
        return lines

    def _asked(self) -> dict[str, Any]:
        family = self.family
        asked = {name: value for name, value in dataclasses.asdict(self.options).items() if value is not None}
        return asked | {
            "mesh": dict(family.layout.mesh.shape),
            "devices": family.layout.mesh.size,
            "global_batch": family.batch_size,
            "accumulate": family.options.accumulate,
            "expert_rounds": family.options.expert_rounds,
            "sequence": family.sequence_length,
            "jax": jax.__version__,
        }


def frontier_table(plan: Plan) -> Table:
    """Step time over device memory."""
    rows = [
        (format_bytes(size), format_seconds(seconds), f"{seconds / plan.seconds:.3f}")
        for size, seconds, _ in plan.frontier()
    ]
    return Table(("device memory", "step", "of the plan's"), rows, title="With less or more device memory")


def compared(plan: Plan, proof: Proof) -> Table:
    """Bytes as the plan has them, and as simulated where it asked the compiler, beside the compiler's."""
    compiled: Ahead = proof.compiled
    pairs = [
        ("device memory", plan.device_bytes, compiled.device_bytes),
        ("simulated without the compiler", plan.simulated_bytes, compiled.device_bytes),
        ("arguments of it", plan.footprint.arguments, compiled.device["argument"]),
        ("host memory: activations", plan.offloaded_bytes, compiled.evidence.host_buffer_bytes),
    ]
    rows = [
        (what, format_bytes(mine), format_bytes(theirs), _ratio(mine, theirs)) for what, mine, theirs in pairs
    ]
    footer = f"compiled in {compiled.compile_seconds:.0f} s with JAX {compiled.jax}"
    if compiled.error:
        footer += f"\n{compiled.error}"
    else:
        footer += f"; the program {'fits' if compiled.fits else 'does not fit'}"
    return Table(("one device", "predicted", "compiled", "ratio"), rows, title="Predicted and compiled", footer=footer)


def _ratio(mine: int, theirs: int) -> str:
    if not theirs:
        return "equal" if not mine else "-"
    return "equal" if mine == theirs else f"{mine / theirs:.4f}"
