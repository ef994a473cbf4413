"""What `overspill prove` shows of a family of placements: tables side by side, what is wrong, and JSON."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.measure import Measurement

from .. import __version__
from ..policies.accelerators import Target
from ..policies.ahead import Ahead
from ..policies.proof import OffloadNotApplied, Proof
from ..policies.report import Table, format_bytes

_LARGEST = 12  # activations in the table; JSON has all
_WIDE = 26  # of a name at the head of a column
_STATUS = {"recomputed": "recompute"}  # as placements are spelt


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one variant: a proof, or an error instead."""

    name: str
    proof: Proof | None
    error: str | None = None

    @property
    def compiled(self) -> Ahead | None:
        """What the compiler said; None where it failed."""
        return None if self.proof is None else self.proof.compiled

    @property
    def refused(self) -> bool:
        """Whether the compiler made no program, because the device has no room for it."""
        return self.compiled is not None and self.compiled.error is not None

    @property
    def verdict(self) -> str:
        """`proved`; `not applied`; `traced`, where the device is too small for the compiler; or `error`."""
        if self.proof is None:
            return "error"
        return "not applied" if self.proof.faults else "traced" if self.refused else "proved"


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcomes of a family, for `devices` of a target."""

    outcomes: tuple[Outcome, ...]
    place: Target
    devices: int

    @property
    def failed(self) -> bool:
        """Whether a proof or a compiler failed. That a program doesn't fit is no failure."""
        return any(outcome.verdict in ("error", "not applied") for outcome in self.outcomes)

    @property
    def together(self) -> int:
        """How many of the devices share a host."""
        return min(self.devices, self.place.devices_per_host)

    def fits_host(self, compiled: Ahead) -> bool:
        """Whether a host that the target commonly has has room for what its devices want there."""
        return compiled.host_bytes * self.together <= self.place.host_bytes

    def _label(self, i: int) -> str:
        """A variant's name at the head of a column: its number, too, where it is cut short."""
        name = self.outcomes[i].name
        return name if len(name) <= _WIDE else f"({i + 1}) {name[: _WIDE - 5]}…"

    def tables(self) -> Iterator[Table]:
        """A row for each placement; then the largest activations, and where each placement puts them."""
        if not self.outcomes:
            return
        rows = [self._row(i, outcome) for i, outcome in enumerate(self.outcomes)]
        columns = ("placements", "arguments", "scratch", "needed", "fits", "host", f"host of {self.together}",
                   "planned", "found", "proved", "overlapped", "XLA recomputes", "compiled in")  # fmt: skip
        yield Table(columns, rows, title="Placements", footer="\n".join(self._footer()))
        found = self.activations()
        if not found:
            return
        rows = []
        for path, (size, placed) in list(found.items())[:_LARGEST]:
            cells = [placed.get(outcome.name, "-") for outcome in self.outcomes]
            rows.append((path, format_bytes(size), *(_STATUS.get(cell, cell).partition(" as ")[0] for cell in cells)))
        footer = "bytes of all layers on one device, wherever it waits"
        if len(found) > _LARGEST:
            footer += f"; {len(found) - _LARGEST} smaller ones are not shown"
        columns = ("activation", "one device", *map(self._label, range(len(self.outcomes))))
        yield Table(columns, rows, title="Largest activations", footer=footer)

    def _row(self, i: int, outcome: Outcome) -> tuple[str, ...]:
        label = self._label(i)
        name = outcome.name if label == outcome.name else f"({i + 1}) {outcome.name}"
        compiled, proof = outcome.compiled, outcome.proof
        if proof is None or compiled is None:
            return (name, *["-"] * 8, "ERROR", *["-"] * 3)
        sizes = compiled.device
        fits = "yes" if compiled.fits else f"NO, {format_bytes(compiled.device_bytes - compiled.capacity)} over"
        proved = {"proved": "yes", "not applied": "NO"}.get(outcome.verdict, outcome.verdict)
        took = f"{compiled.compile_seconds:.0f} s{' (kept)' if compiled.cached else ''}"
        if outcome.refused:
            # Of a program that wasn't made only its size is known.
            needed = format_bytes(compiled.device_bytes)
            return (name, "-", "-", needed, fits, "-", "-", format_bytes(proof.planned_bytes), "-", proved, "-", "-",
                    took)  # fmt: skip
        evidence = compiled.evidence
        together = format_bytes(compiled.host_bytes * self.together)
        return (
            name,
            format_bytes(sizes["argument"]),
            format_bytes(sizes["temp"]),
            format_bytes(compiled.device_bytes),
            fits,
            format_bytes(compiled.host_bytes),
            together if self.fits_host(compiled) else f"{together}, TOO MUCH",
            format_bytes(proof.planned_bytes),
            format_bytes(evidence.host_buffer_bytes),
            proved,
            f"{evidence.overlapped:.0%}" if evidence.transfers else "-",
            str(evidence.recomputed_count),
            took,
        )

    def _footer(self) -> Iterator[str]:
        place, compiled = self.place, [one.compiled for one in self.outcomes if one.compiled is not None]
        room = f"bytes of one device: it has {format_bytes(place.device_bytes)}"
        if compiled:
            room += f", of which a program can have {format_bytes(compiled[0].capacity)}"
        yield room
        yield (
            f"host: the most that one device wants there at a time, and {self.together} together; a host has "
            f"{format_bytes(place.host_bytes)}"
        )
        yield "planned: activations on the host by annotations and traced program; found: in the compiled program"
        if compiled:
            most = max(one.compiler_memory for one in compiled)
            yield f"the compiler took {format_bytes(most)} of memory at most"

    def findings(self) -> Iterator[tuple[str, bool]]:
        """What is to be said of single variants, and whether it is a failure."""
        for outcome in self.outcomes:
            if outcome.proof is None:
                yield f"{outcome.name}: {outcome.error}", True
            elif outcome.proof.faults:
                first, *more = outcome.proof.faults
                yield f"{outcome.name}: {OffloadNotApplied(first)}{f'; {len(more)} more' if more else ''}", True
            elif outcome.refused:
                yield f"{outcome.name}: the compiler refuses what doesn't fit: {outcome.compiled.error}", False

    def activations(self) -> dict[str, tuple[int, dict[str, str]]]:
        """By path, the largest first: an activation's bytes on one device, and where it waits by variant."""
        sizes: dict[str, int] = {}
        placed: dict[str, dict[str, str]] = {}
        for outcome in self.outcomes:
            if outcome.proof is None:
                continue
            found = outcome.proof.census
            for path in found.annotations:
                sizes[path] = max(sizes.get(path, 0), found.sizes.get(path, 0))
                placed.setdefault(path, {})[outcome.name] = found.statuses[path]
        return {path: (sizes[path], placed[path]) for path in sorted(sizes, key=lambda path: -sizes[path])}

    def json_text(self, asked: Mapping[str, Any]) -> str:
        """What was asked for and everything found, as JSON. Bytes are those of one device but where a host's are."""
        out = {
            "overspill": __version__,
            **asked,
            "description": self.place.description,
            "devices": self.devices,
            "devices_per_host": self.together,
            "host_capacity": self.place.host_bytes,
            "failed": self.failed,
            "variants": [self._variant(outcome) for outcome in self.outcomes],
            "activations": [
                {"path": path, "bytes": size, "waits": placed} for path, (size, placed) in self.activations().items()
            ],
        }
        return json.dumps(out, indent=1, allow_nan=False) + "\n"

    def _variant(self, outcome: Outcome) -> dict[str, Any]:
        out: dict[str, Any] = {"placements": outcome.name, "verdict": outcome.verdict, "error": outcome.error}
        if (compiled := outcome.compiled) is not None:
            out |= {
                "device_bytes": compiled.device_bytes,
                "capacity": compiled.capacity,
                "fits": compiled.fits,
                "host_bytes": compiled.host_bytes,
                "host_bytes_per_host": compiled.host_bytes * self.together,
                "fits_host": self.fits_host(compiled),
                "overlapped": compiled.evidence.overlapped,
                "recomputed": compiled.evidence.recomputed_count,
            }
        if outcome.proof is not None:
            out["proof"] = outcome.proof.as_json()
        return out


def fitted(table: Table, console: Console) -> list[Table]:
    """`table` in as many as fit the width of `console` next to each other: the first column begins each."""

    def part(indices: list[int], last: bool) -> Table:
        chosen = [0, *indices]
        rows = [[row[i] for i in chosen] for row in table.rows]
        columns = [table.columns[i] for i in chosen]
        first = not indices or indices[0] == 1
        return Table(columns, rows, title=table.title if first else "", footer=table.footer if last else "")

    parts: list[list[int]] = [[]]
    for i in range(1, len(table.columns)):
        wide = Measurement.get(console, console.options.update(width=10_000), part([*parts[-1], i], False).__rich__())
        if parts[-1] and wide.maximum > console.width:
            parts.append([])
        parts[-1].append(i)
    return [part(indices, indices is parts[-1]) for indices in parts]
