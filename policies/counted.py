"""What a census is: entries for kept values, a status for each name, and a table of both."""

import dataclasses
import enum

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

    `shape` is that of one layer; `bytes` counts all `layers`. `label` is an activation's path, an
    argument's path, or, for other values, the operation and the line of code that made them.
    """

    kind: Kind
    label: str
    shape: tuple[int, ...]
    dtype: str
    layers: int
    bytes: int
    memory: Placement


@dataclasses.dataclass(frozen=True)
class Census:
    """What the backward pass of a program keeps, and what became of each name.

    - `entries`: everything kept, in the order in which the backward pass wants it.
    - `statuses`: for each activation and each name in the program `"device"`, `"host"`, `"recomputed"`,
      `"not needed"` (the backward pass doesn't use it), `"same value as NAME"` or `"never tagged"`.
    - `annotations`: the annotated activations, by their path.
    - `raw`: activations whose unnamed original is kept beside them.
    """

    entries: tuple[Entry, ...]
    statuses: dict[str, str]
    annotations: dict[str, Placement]
    raw: tuple[str, ...] = ()

    def bytes(self, *kinds: Kind | str, memory: Placement | str | None = None) -> int:
        """Bytes kept, of the given kinds (named and unnamed values if none is given) and memory (any)."""
        wanted = {Kind(kind) for kind in kinds} or {Kind.NAMED, Kind.UNNAMED}
        place = None if memory is None else Placement.parse(memory)
        return sum(e.bytes for e in self.entries if e.kind in wanted and place in (None, e.memory))

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
            rows += [_row(entry) for entry in self.of(name)] or [(name, Kind.NAMED, "", "", "", status)]
        others = [e for e in self.entries if e.kind not in (Kind.NAMED, Kind.ARGUMENT)]
        rows += [_row(entry) for entry in sorted(others, key=lambda e: -e.bytes)]
        read = [e for e in self.entries if e.kind is Kind.ARGUMENT]
        if arguments:
            rows += [_row(entry) for entry in read]
        elif read:
            size = format_bytes(self.bytes(Kind.ARGUMENT))
            rows.append((f"{len(read)} arguments", Kind.ARGUMENT, "", "", size, "there anyhow"))
        device, host = format_bytes(self.device_bytes), format_bytes(self.host_bytes)
        footer = (
            f"activations on the device {device}, on the host {host}; of these {self.unnamed_share:.1%} unnamed:\n"
            "computed where no annotation is, such as the embedding, the final norm and the loss"
        )
        columns = ("value", "class", "one layer", "layers", "bytes", "waits")
        return Table(columns, rows, title="Kept for the backward pass", footer=footer, paths=True)

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def array_text(dtype: str, shape: tuple[int, ...]) -> str:
    """An array's dtype and shape as text: `float32[4,128]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def _row(entry: Entry) -> tuple:
    array = array_text(entry.dtype, entry.shape)
    return (entry.label, entry.kind, array, entry.layers, format_bytes(entry.bytes), entry.memory)
