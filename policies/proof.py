"""The proof that activations wait where they are annotated to: annotations, traced program and compiled program."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from .accelerators import Target
from .activation import Placement
from .ahead import Ahead, check_options, compile_ahead, lower
from .ahead_compiler import describe
from .counted import Census, Kind
from .evidence import Evidence, HostBuffer, Transfer
from .matching import Matched, match
from .report import Table, format_bytes
from .residuals import Fault, PlacementNotApplied, census, faults
from .support import OffloadUnsupported


class OffloadNotApplied(PlacementNotApplied):
    """An activation that should wait in host memory doesn't, or something is in the way of it.

    Beside what a PlacementNotApplied has, `proof` is all that was found, other faults among it; None if the program
    couldn't be traced.
    """

    def __init__(self, fault: Fault, proof: "Proof | None" = None):
        super().__init__(fault, 0 if proof is None else len(proof.faults) - 1)
        self.proof = proof


@dataclasses.dataclass(frozen=True)
class Proof:
    """Where a program's activations wait, by three witnesses: the annotations, its jaxpr, and its compiled form.

    - `census`: what the traced program keeps (exact bytes, by name and memory).
    - `compiled`: what the compiler says; None on a CPU, where host memory is no other memory.
    - `matched`: for each array that waits on the host what the compiled program makes of it.
    - `faults`: what isn't as annotated; empty if all is.
    """

    census: Census
    compiled: Ahead | None
    matched: tuple[Matched, ...]
    faults: tuple[Fault, ...]

    @property
    def planned_bytes(self) -> int:
        """Bytes of activations that wait on the host for one device, by the annotations and the jaxpr."""
        return self.census.bytes(memory=Placement.HOST, each=True)

    @property
    def idle(self) -> tuple[str, ...]:
        """Activations outside of scans that come back from the host as soon as they have gone.

        Nothing is computed in between, so they free no memory. It happens to what is wanted right away, such as the
        last layer's, and where the compiler delays the copy until then.
        """
        return tuple(one.path for one in self.matched if one.away == 0)

    @property
    def host_bytes(self) -> int | None:
        """Bytes of host memory that the compiled program takes for them, tile padding included."""
        return None if self.compiled is None else self.compiled.evidence.host_buffer_bytes

    def table(self) -> Table:
        """A row for each activation that waits on the host; below it what the witnesses say."""
        columns = ["activation", "one device"]
        if self.compiled is not None:
            columns += ["host buffers", "out", "back", "overlapped"]
        rows: list[tuple[Any, ...]] = []
        for one in self.matched:
            row: tuple[Any, ...] = (one.path, format_bytes(one.planned))
            if self.compiled is not None:
                each = one.compiled // max(one.buffers, 1)
                row += (f"{one.buffers} x {format_bytes(each)}" if one.buffers else "none",
                        _moves(one.out), _moves(one.back), _overlapped((*one.out, *one.back)))  # fmt: skip
            rows.append(row)
        return Table(columns, rows, title="Proof of offload", footer="\n".join(self.summary()), paths=True)

    def summary(self) -> list[str]:
        """What the witnesses say, a line each, and the verdict."""
        found = self.census
        host = [path for path, placement in found.annotations.items() if placement is Placement.HOST]
        idle = [path for path in host if found.statuses[path] == "not needed"]
        lines = [
            f"annotations: {len(host)} of {len(found.annotations)} activations are placed on the host"
            + (f"; {_few(idle)} not kept at all, as the backward pass needs none of it" if idle else ""),
            f"traced program: {format_bytes(self.planned_bytes)} on the host for one device, "
            f"{format_bytes(found.bytes(memory=Placement.DEVICE, each=True))} on the device",
        ]
        lines += _compiled_lines(self.compiled) if self.compiled is not None else [
            "compiled program: this is a CPU, where all memory is host memory, so these two witnesses are all there "
            "are; target='h200' asks the compiler of a GPU (see policies.compile_ahead)"
        ]  # fmt: skip
        if self.idle:
            lines.append(
                "note: back as soon as it has gone, with nothing computed in between, so that moving it frees no "
                f"memory: {_few(self.idle)}"
            )
        lines += [f"NOT APPLIED: {fault}" for fault in self.faults[:5]]
        if len(self.faults) > 5:
            lines.append(f"and {len(self.faults) - 5} more")
        if not self.faults:
            lines.append("every annotation holds")
        return lines

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "applied": not self.faults,
            "planned_bytes": self.planned_bytes,
            "host_bytes": self.host_bytes,
            "idle": list(self.idle),
            "annotations": {path: placement.value for path, placement in self.census.annotations.items()},
            "statuses": self.census.statuses,
            "activations": [
                {"path": one.path, "planned_bytes": one.planned, "compiled_bytes": one.compiled,
                 "buffers": one.buffers, "away": one.away, "late": one.late,
                 "out": [t.name for t in one.out], "back": [t.name for t in one.back]}
                for one in self.matched
            ],
            "faults": [dataclasses.asdict(fault) for fault in self.faults],
            "compiled": None if self.compiled is None else self.compiled.as_json(),
        }  # fmt: skip

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def prove(function: Callable[..., Any], /, *args: Any, target: str | Target | None = None, **options: Any) -> Proof:
    """The proof that the activations of `function(*args)` wait where they are annotated to, or an error.

    Three witnesses must agree: the annotations; the traced program (`policies.census`); and the compiled one, whose
    buffers in host memory are matched to the activations, byte for byte, and in which nothing may compute on the host
    and XLA may not recompute of its own accord. On a CPU there are the first two, and the proof says so.

    **Arguments:**

    - `function`, `args`: a training step, a loss or a layer, and what it is called with, as for `policies.census`.
        Nothing runs; abstract arguments will do.
    - `target`: hardware that isn't here, to compile for, such as `"gb200"` (`policies.targets()`). By default the
        program is compiled for the devices that are.
    - `options`: more arguments of the function by keyword; and `flags`, `cache` and `text`, which `compile_ahead` gets.

    Raises OffloadNotApplied, naming the activation, the bytes expected and found and the probable cause, and whatever
    `compile_ahead` raises. `examine` gives the same proof with its faults instead.
    """
    compiling = _compiling(function, target, options)
    found = _census(function, args, options)
    proof = judge(found, None)
    if not proof.faults:  # else there is no need to wait for a compiler
        proof = judge(found, _compiled(function, args, target, compiling, options))
    if proof.faults:
        raise OffloadNotApplied(proof.faults[0], proof)
    return proof


def examine(function: Callable[..., Any], /, *args: Any, target: str | Target | None = None, **options: Any) -> Proof:
    """The same as `prove`, with what isn't as annotated in `faults` instead of an error.

    Raises OffloadNotApplied only where nothing can be traced, because JAX would recompute what should be offloaded.
    """
    compiling = _compiling(function, target, options)
    found = _census(function, args, options)
    return judge(found, _compiled(function, args, target, compiling, options))


def _compiling(function: Any, target: Any, options: dict[str, Any]) -> dict[str, Any]:
    """What of the options is for the compiler, taken out of them."""
    compiling = {name: options.pop(name) for name in ("flags", "cache", "text") if name in options}
    check_options(function, [*compiling, *(["target"] if target is not None else [])])
    return compiling


def _census(function: Any, args: tuple, options: dict[str, Any]) -> Census:
    try:
        return census(function, *args, **options)
    except OffloadUnsupported as error:
        raise OffloadNotApplied(Fault(error.names[0], f"{error.names[0]!r} can't be offloaded", str(error))) from None


def _compiled(function: Any, args: tuple, target: Any, compiling: dict, options: dict) -> Ahead | None:
    if target is None:
        return _compile_here(function, args, options)
    return compile_ahead(function, *args, target=target, **compiling, **options)


def judge(found: Census, compiled: Ahead | None) -> Proof:
    """The proof that a census and a compiled program make together."""
    wrong = list(faults(found))
    matched: list[Matched] = []
    host = [e for e in found.entries if e.memory is Placement.HOST and e.kind in (Kind.NAMED, Kind.UNNAMED)]
    if compiled is None or compiled.error is not None:
        matched = [Matched(e.label, e.shard_bytes, 0, 0, None, 0, ("", 0), (), ()) for e in host]
    else:
        matched, extra = match(host, compiled.evidence)
        wrong += _compiled_faults(matched, extra, compiled, found, {fault.path for fault in wrong})
    order = {path: i for i, path in enumerate(found.annotations)}
    matched.sort(key=lambda one: order.get(one.path, len(order)))
    return Proof(found, compiled, tuple(matched), tuple(wrong))


def _compile_here(function: Any, args: tuple, kwargs: dict) -> Ahead | None:
    """The program compiled for the devices of its arguments; None for CPUs."""
    device = _device(args, kwargs)
    if device.platform == "cpu":
        return None
    start = time.perf_counter()
    lowered = lower(function, args, kwargs)
    lower_seconds = time.perf_counter() - start
    start = time.perf_counter()
    executable = lowered.compile()
    seconds = time.perf_counter() - start
    said = describe(executable.memory_analysis(), executable.as_text())
    return Ahead(
        target=device.device_kind,
        platform="cuda" if device.platform == "gpu" else device.platform,
        description=device.device_kind,
        devices=len(_device_set(executable)),
        jax=jax.__version__,
        device=said["device"],
        host=said["host"],
        capacity=_capacity(device),
        error=None,
        evidence=Evidence.from_json(said["evidence"]),
        flops=None,
        compile_seconds=seconds,
        lower_seconds=lower_seconds,
        compiler_memory=0,
        flags={},
    )


def _capacity(device: Any) -> int:
    """Bytes of device memory that a program can have; 0 where the device, another process's say, doesn't tell."""
    try:
        return int((device.memory_stats() or {}).get("bytes_limit", 0))
    except jax.errors.JaxRuntimeError:
        return 0


def _device_set(executable: Any) -> set[Any]:
    return set().union(*(sharding.device_set for sharding in jax.tree.leaves(executable.input_shardings)))


def _device(args: tuple, kwargs: dict) -> Any:
    """A device that the call's arrays are on, or the default one."""
    for leaf in jax.tree.leaves((args, kwargs)):
        sharding = getattr(leaf, "sharding", None)
        mesh = getattr(sharding, "mesh", None)
        if sharding is not None and not isinstance(mesh, jax.sharding.AbstractMesh):
            return next(iter(sharding.device_set))
    return jax.devices()[0]


def _compiled_faults(
    matched: list[Matched], extra: list[HostBuffer], compiled: Ahead, found: Census, known: set[str | None]
) -> Iterator[Fault]:
    evidence, on = compiled.evidence, compiled.description
    for one in matched:
        if one.compiled < one.planned and one.path not in known:
            alike = [other.path for other in matched if other.kind == one.kind and other.path != one.path]
            yield Fault(
                one.path if one.path in found.annotations else None,
                f"{one.path!r} is offloaded in the traced program, but the program compiled for {on} has no host "
                "memory for it" + (f", or for one that is as large: {_few(alike)}" if alike else ""),
                "the compiler kept it on the device or computes it again; a value that is used on the device right "
                "away, or a loop of one step, can make it",
                one.planned,
                one.compiled,
            )
    # A state that lies on the host has its gradients and copies there too.
    if extra and not evidence.host_arguments[0]:
        size, first = sum(buffer.bytes for buffer in extra), extra[0]
        yield Fault(
            None,
            f"the program compiled for {on} keeps {len(extra)} arrays on the host that no annotation asks for, such as "
            f"{first.dtype}{list(first.shape)} of {', '.join(first.op_names) or 'unknown origin'}",
            "an offload by hand, or a copy of what is there already",
            0,
            size,
        )
    temp, peak = compiled.host["temp"], evidence.host_peak_bytes
    if not evidence.accounts_for(temp, compiled.platform):
        yield Fault(
            None,
            f"the compiler for {on} says that {temp:,} bytes of host memory are in use at most, and its program shows "
            f"{peak:,}",
            "Overspill doesn't read this program right: please report it",
            peak,
            temp,
        )
    if evidence.host_compute_count:
        yield Fault(
            None,
            f"{evidence.host_compute_count} instructions of the program compiled for {on} compute on the host, such as "
            f"{evidence.host_compute[0]}",
            "a value in host memory is computed with before it is brought back (jax.device_put to the device)",
        )
    if evidence.recomputed_count:
        yield Fault(
            None,
            f"XLA computes {evidence.recomputed_count} values again of its own accord in the program compiled for "
            f"{on}, such as {evidence.recomputed[0]}",
            "it takes the program for larger than the device: recompute or offload more; or, if it would fit, let XLA "
            "not count host memory with the device's (policies.xla_flags)",
        )


def _few(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _moves(transfers: tuple[Transfer, ...]) -> str:
    """How many of an array's transfers the device doesn't wait for."""
    times = sum(t.times * t.count for t in transfers)
    beside = sum(t.times * t.count for t in transfers if t.asynchronous)
    if not times:
        return "-"
    return "async" if beside == times else "waits" if not beside else f"{beside / times:.0%} async"


def _overlapped(transfers: tuple[Transfer, ...]) -> str:
    """The share of what is moved that has something computed beside it."""
    total = sum(t.total_bytes for t in transfers)
    beside = sum(t.total_bytes for t in transfers if t.asynchronous and t.work)
    return f"{beside / total:.0%}" if total else "-"


def _compiled_lines(compiled: Ahead) -> list[str]:
    evidence, host = compiled.evidence, compiled.host
    head = f"compiled program ({compiled.devices:,} x {compiled.description}, JAX {compiled.jax}): "
    if compiled.error is not None:
        return [head + compiled.error]
    if not evidence.transfers:
        return [head + "nothing is moved", _needs(compiled)]
    lines = [
        f"{head}{format_bytes(evidence.host_buffer_bytes)} of host buffers, {format_bytes(host['temp'])} in use at a "
        "time by its compiler",
        f"moved: {format_bytes(evidence.bytes_out)} out and {format_bytes(evidence.bytes_in)} back, "
        f"{evidence.overlapped:.0%} of it with computation beside it",
        _needs(compiled),
    ]
    if any(not t.asynchronous for t in evidence.transfers) and "XLA_FLAGS" not in compiled.flags:
        lines.append("some transfers hold up the computation: policies.xla_flags has what makes them overlap")
    return lines


def _needs(compiled: Ahead) -> str:
    room = f" of {format_bytes(compiled.capacity)} that a program can have" if compiled.capacity else ""
    fits = "" if compiled.fits or not compiled.capacity else ": it does NOT fit"
    return f"device: {format_bytes(compiled.device_bytes)} needed{room}{fits}"
