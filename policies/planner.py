"""The planner: the placement of every activation with which a step takes the least time, within the memory there is."""

import copy
import dataclasses
import functools
import math
import numbers
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .accelerators import Target
from .activation import Placement
from .ahead import Ahead, CompileError, check_options, compile_ahead
from .assembling import Assembly, products
from .blocks import read_blocks
from .calibrating import calibrated, installed
from .costs import Cost, expert_fill, total
from .flags import FRACTION, POOL, xla_flags
from .liveness import Footprint, footprint
from .machines import Hardware, hardware as find_hardware
from .planned import Plan, boundaries_of, pieces_of, rules_of
from .pricing import Prices
from .problem import Decision, Limits, Problem
from .programs import Program
from .scaling import bisected, largest, stretched
from .settling import fits, settled, shifted, smallest
from .spaces import HOST_MEMORY
from .staging import Reference, phases


@dataclasses.dataclass(frozen=True)
class Options:
    """What a plan is made for, besides the program; see `plan`."""

    hardware: Hardware
    device_bytes: int | float | None = None
    host_bytes: int | float | None = None
    pinned_bytes: int | float | None = None
    reserved_bytes: int | float = 0.0
    segments: int | None = None
    pipelined: bool = True
    dtype: str | None = None
    fused_attention: bool = False


def plan(
    function: Callable[..., Any],
    /,
    *args: Any,
    hardware: str | Hardware,
    device_bytes: int | float | None = None,
    host_bytes: int | float | None = None,
    pinned_bytes: int | float | None = None,
    reserved_bytes: int | float = 0.0,
    segments: int | None = None,
    layers: int | None = None,
    pipelined: bool = True,
    calibrate: bool | None = None,
    dtype: str | None = None,
    fused_attention: bool = False,
    **kwargs: Any,
) -> Plan:
    """Where each activation of `function(*args, **kwargs)` should wait, so that a step takes the least time.

    Everything is read from the program: what each activation weighs, what computing it again takes, from which others.
    The choice among device, host and recomputation is exact for that model of the step (`policies.problem.Problem`).
    Traces, and compiles as `calibrate` says: nothing is computed.

    **Arguments:**

    - `function`: a training step of `zoo.make_train_step`, with the mesh it was made for; or a loss, or an annotated
        layer on its own. What runs under `policies.checkpoint` is what is planned; a layer without one as a whole.
    - `args`, `kwargs`: its arguments, concrete or abstract.
    - `hardware`: a name of `policies.hardwares()`, or an entry, such as one with what `overspill selftest` measured.
    - `device_bytes`, `host_bytes`, `pinned_bytes`: limits for one device; by default what a program gets of its memory
        with `policies.xla_flags`, its share of the host's memory, and of the pool of pinned memory that those flags ask
        for.
    - `reserved_bytes`: of device memory, for what the function doesn't show: an optimizer's state, for a loss.
    - `segments`: into how many groups of layers, at most, each stack may be cut, each placed on its own. More choose
        finer and compile longer, and each that moves activations needs memory for that, up to a layer's; so few do
        better than many. By default those that there are.
    - `layers`: how often a single layer runs, one after the other, where `function` is one.
    - `pipelined`: whether a layer's transfers run beside other layers' computation, as with `policies.xla_flags`. False
        has everything wait for them.
    - `calibrate`: whether to ask the hardware's compiler for device memory: the plan is compiled, what it needs takes
        the place of what was simulated, and if another plan is the best then, that one is tried. Takes what compiling
        takes, and again as often as that. By default where the compiler is installed; if it fails then, the simulation
        stays. `Plan.calibrated` says which it was.
    - `dtype`: the number format of products, where it is another than the program's, such as `"float8"`.
    - `fused_attention`: counts attention's time as that of a fused kernel, which keeps scores on the chip and leaves
        out what the causal mask hides.

    Without a compiler device memory is simulated from the program alone, the plan's own at last, each time in seconds
    at most: four of five steps within 5 % of what XLA of JAX 0.10 says, nearly all within 10 %. Host memory for
    activations is exact.

    Raises `Infeasible`, a ValueError, when nothing fits: it says by how much. ValueError for other arguments that can't
    be, TypeError where an option might be meant for the function.
    """
    given = dict(hardware=True, device_bytes=device_bytes, host_bytes=host_bytes, pinned_bytes=pinned_bytes,
                 segments=segments, layers=layers, dtype=dtype, calibrate=calibrate)  # fmt: skip
    check_options(function, [name for name, value in given.items() if value is not None])
    options = Options(
        find_hardware(hardware), device_bytes, host_bytes, pinned_bytes, reserved_bytes, segments, pipelined,
        dtype, fused_attention,
    )  # fmt: skip
    planner = Planner(options, Program(function, args, kwargs, layers))
    return planner.best(calibrate)


class Planner:
    """A program, read once, and plans for it."""

    def __init__(self, options: Options, program: Program):
        _check(options)
        self.options, self.program, self.hardware = options, program, options.hardware
        start = time.perf_counter()
        mesh = program.mesh
        self.devices = 1 if mesh is None else mesh.size
        inner = 1 if mesh is None else [*mesh.shape.values()][-1]
        self.prices = Prices(self.hardware, self.devices, inner, options.dtype, options.fused_attention)
        blocks = read_blocks(program, devices=self.devices, platform=self.hardware.platform)
        if options.segments is not None and options.segments > 1 and not program.stacks:
            raise ValueError(f"segments is {options.segments}: the program has no stack of layers that could be cut")
        self.assembly = Assembly(program, blocks, self.prices, options.segments)
        self._whole: Cost | None = None
        self._footprints: dict[Decision, Footprint] = {}  # of whole plans
        self.read_seconds = time.perf_counter() - start

    @functools.cached_property
    def problem(self) -> Problem:
        """What is solved."""
        start = time.perf_counter()
        problem = self._build()
        self.read_seconds += time.perf_counter() - start
        return problem

    @functools.cached_property
    def references(self) -> tuple[Reference, ...]:
        """The step's memory with all recomputed, kept on the device, and moved to the host, as far as that can be."""
        found = tuple(Reference(decision, self._simulated(decision)) for decision in self._decisions())
        if len({group.stack for group in self.assembly.groups}) == len(self.assembly.groups):  # none are put together
            self._footprints.update({reference.decision: reference.footprint for reference in found})
        return found

    def plan(self) -> Plan:
        """The best plan, with the device memory that its own program is simulated to need. Raises Infeasible."""
        return self.planned(0)

    def planned(self, more: int | float) -> Plan:
        """The best plan if every program needs so many more bytes of device memory than it is simulated to need."""
        problem, start, reading = self.problem, time.perf_counter(), 0.0

        def needed(decision: Decision) -> int | float:
            nonlocal reading
            begun = time.perf_counter()
            size = self.needed(decision) + more
            reading += time.perf_counter() - begun
            return size

        decision, size = settled(problem, needed, [reference.decision for reference in self.references])
        self.read_seconds += reading
        return self.known(decision, size, time.perf_counter() - start - reading)

    def known(self, decision: Decision, size: int | float, solve_seconds: float) -> Plan:
        """A decision as a plan whose device memory is known."""
        found = self._shifted(size - self.problem.evaluate(decision).device_bytes).as_plan(decision, solve_seconds)
        return dataclasses.replace(found, simulated_bytes=math.floor(self.needed(decision)))

    def as_plan(self, decision: Decision, solve_seconds: float = 0.0) -> Plan:
        """A decision with all that follows from it."""
        return Plan(
            problem=self.problem,
            decision=decision,
            hardware=self.hardware,
            devices=self.devices,
            stacks=tuple(self.program.stacks),
            fixed=self.assembly.unneeded(),
            tokens=None if (batch := self.program.batch) is None else math.prod(batch.tokens.shape),
            model_flops=self.model_flops,
            dtype=self.options.dtype or self.assembly.format,
            solve_seconds=solve_seconds,
            read_seconds=self.read_seconds,
            footprint=self._footprints.get(decision, self.references[0].footprint),
            simulated_bytes=math.floor(self.problem.evaluate(decision).device_bytes),
        )

    def best(self, calibrate: bool | None = None) -> Plan:
        """The best plan, its device memory as the hardware's compiler says; see `policies.plan` for `calibrate`."""
        if not (installed(self.hardware) if calibrate is None else calibrate):
            return self.plan()
        try:
            return calibrated(self)
        except CompileError:
            if calibrate:
                raise
            return self.plan()

    def compiled(self, plan: Plan, target: Target) -> Ahead:
        """What the compiler of `target` says of a plan."""
        function, args, kwargs = self.program.planned(plan.rules, plan.boundaries)
        return compile_ahead(function, *args, target=target, **kwargs)

    def _shifted(self, size: int | float) -> "Planner":
        """This with so many more bytes of device memory taken at every moment."""
        new = copy.copy(self)
        new.__dict__["problem"] = shifted(self.problem, size)
        return new

    def fits(self) -> bool:
        """Whether some plan keeps to the limits."""
        return fits(self.problem, self.needed, [reference.decision for reference in self.references])

    def smallest(self) -> Plan:
        """The plan that is simulated to need the least device memory. Raises Infeasible where the host is too small."""
        decision = smallest(self.problem, self.needed, [reference.decision for reference in self.references])
        return self.known(decision, self.needed(decision), 0.0)

    def largest_batch(self) -> int:
        """The most sequences of a step, in as many micro-batches, with which some decision fits; 0 where none does.

        Looked for on the line through two batches that are read, and then read itself.
        Raises ValueError unless the program is a training step.
        """
        if not self.program.is_step:
            raise ValueError("the largest batch is a training step's: a loss or a layer doesn't say what its rows are")
        rows, unit = self.program.batch.tokens.shape[0], self.program.function.rows_at_least
        large = Planner(self.options, self.program.resized(2 * rows)).problem
        parts = largest(lambda parts: stretched(self.problem, large, parts * unit / rows - 1))

        def really(parts: int) -> bool:
            return Planner(self.options, self.program.resized(parts * unit)).fits()

        # Buffers share memory in other ways with another batch: the program that is promised to fit is read.
        if parts and not really(parts):
            parts = bisected(0, parts, really, within=max(1, parts // 50))
        return parts * unit

    def limited(
        self,
        *,
        device_bytes: int | float | None = None,
        host_bytes: int | float | None = None,
        pinned_bytes: int | float | None = None,
    ) -> "Planner":
        """This with other limits, nothing being read again; see `plan` for what None means."""
        new = copy.copy(self)
        limits = {"device_bytes": device_bytes, "host_bytes": host_bytes, "pinned_bytes": pinned_bytes}
        new.options = dataclasses.replace(self.options, **limits)
        _check(new.options)
        new.__dict__["problem"] = dataclasses.replace(self.problem, limits=new._limits())
        return new

    def state_bytes(self, part: str) -> int:
        """Bytes on one device of a part of a training state, such as `opt_state`; 0 for anything else than a step."""
        return round(self.program.bytes_in("device", part)) if self.program.is_step else 0

    def _build(self) -> Problem:
        options, assembly = self.options, self.assembly
        gradients = self.program.gradients(np.dtype(assembly.format).itemsize)
        rates = self.hardware.rates(both=False)
        return Problem(
            groups=assembly.groups,
            phases=tuple(
                dataclasses.replace(phase, fixed=phase.fixed + options.reserved_bytes)
                for phase in phases(assembly.groups, self.references, gradients, as_cut=self._as_cut)
            ),
            limits=self._limits(),
            outside_seconds=assembly.outside_seconds(self.outside),
            host_fixed_bytes=self.program.bytes_in(HOST_MEMORY),
            out_rate=rates[0],
            in_rate=rates[1],
            pipelined=options.pipelined,
            repeats=self.program.micro_batches,
        )

    def _decisions(self) -> list[Decision]:
        """The decisions that memory is simulated under: everything recomputed, kept on the device, and on the host.

        What can't be so stays on the device. The first is the base, and the number of products is counted with it.
        """
        return [
            tuple(
                tuple(place if place in item.placements else Placement.DEVICE for item in group.items)
                for group in self.assembly.groups
            )
            for place in (Placement.RECOMPUTE, Placement.DEVICE, Placement.HOST)
        ]

    def _simulated(self, decision: Decision, *, together: bool = False) -> Footprint:
        """A step's memory, from its own program: each group as a segment, or neighbours that are alike `together`."""
        program, assembly, stacks = self.program, self.assembly, self.program.stacks
        if program.is_step:
            pieces = pieces_of(assembly.groups, decision, stacks, together=together)
            boundaries, rules = boundaries_of(pieces, stacks), rules_of(pieces, stacks, assembly.unneeded())
            if boundaries != tuple(n for stack in stacks for n in stack.boundaries):
                program = Program(*program.planned({}, boundaries))
        else:
            rules = assembly.placements(decision)
        closed, shardings, donated = program.trace(rules)
        if self._whole is None:
            fill = expert_fill(closed.jaxpr)
            self._whole = total(closed.jaxpr, devices=self.devices, platform=self.hardware.platform, fill=fill)
        target = self.hardware.target
        return footprint(
            closed,
            shardings,
            platform=self.hardware.platform,
            capability=None if target is None else target.capability,
            spread=self.devices > self.hardware.scale_up_devices,
            capacity=None if target is None else target.device_bytes,
            donated=donated,
        )

    def needed(self, decision: Decision) -> int | float:
        """Bytes of device memory under a decision, as simulated; as summed for what only its owner can cut."""
        if not self._as_cut:
            return self.problem.evaluate(decision).device_bytes
        if decision not in self._footprints:
            self._footprints[decision] = self._simulated(decision, together=True)
        return self._footprints[decision].device_bytes + self.options.reserved_bytes

    @property
    def _as_cut(self) -> bool:
        """Whether steps are simulated cut into the segments that are planned."""
        return self.program.is_step or self.options.segments is None

    @property
    def outside(self) -> Cost:
        """Products of a step in no block, such as the head's."""
        decision = self.references[0].decision
        return self.assembly.outside(self._whole, decision)

    @property
    def model_flops(self) -> float:
        """Products of a step on one device, in floating-point operations, nothing computed again."""
        # Where a loss has its own derivative, as the head's in chunks, its backward pass may compute products again.
        closed, _ = self.program.forward
        fill = expert_fill(closed.jaxpr)
        forward = total(closed.jaxpr, devices=self.devices, platform=self.hardware.platform, fill=fill)
        outside = products(forward) - self.assembly.forward_flops
        return self.assembly.flops + 3 * self.program.micro_batches * max(outside, 0.0)

    def _limits(self) -> Limits:
        options, place = self.options, self.hardware
        fraction, pool = 1.0, math.inf
        if place.platform == "cuda":
            fraction = float(xla_flags(place.target).environment()[FRACTION]) if place.target else 0.92
            whole = place.host_bytes * 3 // 4
            if place.target:
                whole = int(xla_flags(place.target).environment()[POOL]) * 2**30
            pool = whole / place.devices_per_host
        return Limits(
            place.device_bytes * fraction if options.device_bytes is None else options.device_bytes,
            place.host_bytes_per_device if options.host_bytes is None else options.host_bytes,
            pool if options.pinned_bytes is None else options.pinned_bytes,
        )


def _check(options: Options) -> None:
    for name in ("device_bytes", "host_bytes", "pinned_bytes", "reserved_bytes"):
        value = getattr(options, name)
        if value is None:
            continue
        most = 2**60 if name == "reserved_bytes" else math.inf
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= value <= most:
            raise ValueError(f"{name} is {value!r:.40}: a number of bytes is needed, 0 or more")
    value = options.segments
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"segments is {value!r}: a whole number of 1 or more is needed")
    if options.dtype is not None:
        options.hardware.peak(options.dtype)  # raises for one that it has no peak for
