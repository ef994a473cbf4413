"""What a census is: entries for kept values, a status for each name, and a table of both."""

import dataclasses
import enum
from typing import Any

from .activation import Placement
from .report import Table, format_bytes


class Kind(enum.StrEnum):
    """What a kept value is."""

    NAMED = "named"  # an annotated activation
    UNNAMED = "unnamed"  # any other value that the forward pass computed
    ARGUMENT = "argument"  # a parameter or another input, there anyhow
    CAST = "cast"  # a parameter or another input in another dtype
    CONSTANT = "constant"  # computed from no floating-point input: rotary tables, masks


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of a census: values of one kind that the backward pass keeps.

    `shape` is that of one layer; `bytes` counts all `layers`, and `shard_bytes` what of them one device of a mesh
    holds: the same without a mesh. `arrays` is how many arrays that is, all layers of a scan being one. `label` is
    an activation's path, an argument's path, or, for other values, the operation and the line of code that made them.
    """

    kind: Kind
    label: str
    shape: tuple[int, ...]
    dtype: str
    layers: int
    bytes: int
    memory: Placement
    shard_bytes: int
    arrays: int = 1


@dataclasses.dataclass(frozen=True)
class Census:
    """What the backward pass of a program keeps, and what became of each name.

    - `entries`: everything kept, in the order in which the backward pass wants it.
    - `statuses`: for each activation and each name in the program `"device"`, `"host"`, `"recomputed"`,
      `"not needed"` (the backward pass doesn't use it), `"same value as NAME"` or `"never tagged"`.
    - `annotations`: the annotated activations, by their path.
    - `raw`: activations whose unnamed original is kept beside them.
    - `again_offloaded`: activations that only the backward pass, computing them again, moves to the host.
    - `sizes`: bytes on one device of what each name stands on, in all layers, kept or not, as far as it is known.
    - `outputs`: names of what a step of a loop hands on to the next, which the loop keeps by itself, on the device.
    - `devices`: of the mesh that the program is cut over; 1 without one.

    Bytes are those of all devices together, unless they are asked for `each=True`: then of one of them. Values
    that no constraint in the program cuts are counted as cut like what they are computed from, or whole.
    """

    entries: tuple[Entry, ...]
    statuses: dict[str, str]
    annotations: dict[str, Placement]
    raw: tuple[str, ...] = ()
    devices: int = 1
    again_offloaded: tuple[str, ...] = ()
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    outputs: tuple[str, ...] = ()

    def bytes(self, *kinds: Kind | str, memory: Placement | str | None = None, each: bool = False) -> int:
        """Bytes kept, of the given kinds (named and unnamed values if none is given) and memory (any).

        With `each` those on one device of the mesh.
        """
        wanted = {Kind(kind) for kind in kinds} or {Kind.NAMED, Kind.UNNAMED}
        place = None if memory is None else Placement.parse(memory)
        chosen = [e for e in self.entries if e.kind in wanted and place in (None, e.memory)]
        return sum(e.shard_bytes if each else e.bytes for e in chosen)

    @property
    def device_bytes(self) -> int:
        """Bytes of named and unnamed activations that wait in device memory."""
        return self.bytes(memory=Placement.DEVICE)

    @property
    def host_bytes(self) -> int:
        """Bytes of named and unnamed activations that wait in host memory."""
        return self.bytes(memory=Placement.HOST)

    @property
    def unnamed_share(self) -> float:
        """unnamed / (named + unnamed), in bytes; 0 when nothing is kept."""
        return self.bytes(Kind.UNNAMED) / max(self.bytes(), 1)

    def of(self, path: str) -> tuple[Entry, ...]:
        """The kept values of the activation at `path`."""
        return tuple(e for e in self.entries if e.kind is Kind.NAMED and e.label == path)

    def table(self, *, arguments: bool = False) -> Table:
        """Every activation and what became of it, in the order of the tree; then what else is kept, largest first.

        Arguments are there whether kept or not: they get one line, or one each with `arguments=True`.
        """
        rows: list[tuple] = []
        for name, status in self.statuses.items():
            kept = [self._row(entry) for entry in self.of(name)]
            rows += kept or [self._cells(name, Kind.NAMED, "", "", "", "", status)]
        others = [e for e in self.entries if e.kind not in (Kind.NAMED, Kind.ARGUMENT)]
        rows += [self._row(entry) for entry in sorted(others, key=lambda e: -e.bytes)]
        read = [e for e in self.entries if e.kind is Kind.ARGUMENT]
        if arguments:
            rows += [self._row(entry) for entry in read]
        elif read:
            size, each = (format_bytes(self.bytes(Kind.ARGUMENT, each=each)) for each in (False, True))
            rows.append(self._cells(f"{len(read)} arguments", Kind.ARGUMENT, "", "", size, each, "there anyhow"))
        device, host = format_bytes(self.device_bytes), format_bytes(self.host_bytes)
        footer = (
            f"activations on the device {device}, on the host {host}; of these {self.unnamed_share:.1%} unnamed:\n"
            "computed where no annotation is, such as the embedding, the final norm and the loss"
        )
        if self.devices > 1:
            device, host = (format_bytes(self.bytes(memory=m, each=True)) for m in (Placement.DEVICE, Placement.HOST))
            footer += f"\neach of {self.devices} devices keeps {device} of them in its own memory, {host} on the host"
        columns = self._cells("value", "class", "one layer", "layers", "bytes", "one device", "waits")
        return Table(columns, rows, title="Kept for the backward pass", footer=footer, paths=True)

    def _cells(self, *cells: Any) -> tuple:
        """The cells of a row; those for one device only over a mesh."""
        return cells if self.devices > 1 else (*cells[:5], *cells[6:])

    def _row(self, entry: Entry) -> tuple:
        sizes = format_bytes(entry.bytes), format_bytes(entry.shard_bytes)
        array = array_text(entry.dtype, entry.shape)
        return self._cells(entry.label, entry.kind, array, entry.layers, *sizes, entry.memory)

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def array_text(dtype: str, shape: tuple[int, ...]) -> str:
    """An array's dtype and shape as text: `float32[4,128]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"

