"""The census: what a backward pass really keeps from its forward pass, read from the jaxpr."""

import dataclasses
import difflib
from collections.abc import Callable, Iterator
from typing import Any

from jaxtyping import PyTree

from .activation import Placement, annotations
from .calls import prepare
from .counted import Census, array_text
from .reading import Reader
from .report import Table, format_bytes


@dataclasses.dataclass(frozen=True)
class Fault:
    """An activation that doesn't wait where it is annotated to, and probably why.

    `expected` and `found` are bytes of all layers on one device, where they should be and where they shouldn't; None
    where that can't be told.
    """

    path: str | None
    what: str
    cause: str
    expected: int | None = None
    found: int | None = None

    def __str__(self) -> str:
        sizes = ""
        if self.expected is not None or self.found is not None:
            pair = ("unknown" if size is None else f"{size:,} bytes" for size in (self.expected, self.found))
            sizes = " (expected {}, found {} on one device)".format(*pair)
        return f"{self.what}{sizes}: {self.cause}"


class PlacementNotApplied(ValueError):
    """An activation doesn't wait where its annotation says.

    - `path`: the activation's; None where no single one is at fault.
    - `expected`, `found`: bytes on one device where they should be; None where that can't be told.
    - `cause`: the probable one.
    """

    def __init__(self, fault: Fault, more: int = 0):
        super().__init__(f"{fault}{f'; and {more} more' if more else ''}")
        self.path, self.expected, self.found, self.cause = fault.path, fault.expected, fault.found, fault.cause


def activations(tree: PyTree, census: Census | None = None) -> Table:
    """The annotated activations of `tree` as a table of path and placement.

    With a `census` of a program over the same tree each row also shows one layer's dtype and shape, and the
    bytes of all layers. `annotations(tree)` in `policies.activation` gives the rows as data.
    """
    columns = ["activation", "placement"]
    rows: list[tuple[Any, ...]] = []
    if census is not None:
        columns += ["one layer", "layers", "bytes", "in the program"]
    for path, activation in annotations(tree):
        row: tuple[Any, ...] = (path, activation.placement)
        if census is not None:
            entries = census.of(path)
            first = entries[0] if entries else None
            row += (
                array_text(first.dtype, first.shape) if first else "-",
                sum(e.layers for e in entries) if first else "-",
                format_bytes(sum(e.bytes for e in entries)) if first else "-",
                census.statuses.get(path, "never tagged"),
            )
        rows.append(row)
    return Table(columns, rows, title="Activations", paths=True)


def census(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Census:
    """What the backward pass of `function(*args, **kwargs)` keeps. Only traces: nothing is computed.

    **Arguments:**

    - `function`: a loss, a layer, `policies.checkpoint(layer)`, or a whole training step. One that holds
        a backward pass already is read as it is; any other is differentiated with respect to all its
        floating-point arrays, its own leaves included when it is a PyTree.
    - `args`, `kwargs`: its arguments: any PyTrees of arrays or `jax.ShapeDtypeStruct`s and of anything
        else, which is taken as static.

    Activations are listed by their path in the argument (or in `function`) that holds them; when
    several hold some, the position of the argument stands in front.

    Raises TypeError if nothing can be differentiated.
    """
    call = prepare(function, args, kwargs)
    return Reader(call.trace(), call.rows).census()


def check(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Census:
    """The census of `function(*args, **kwargs)`, once every annotation is found to hold.

    Raises PlacementNotApplied, naming the activation, when one that the backward pass needs waits
    elsewhere than annotated, when a name was never tagged, or when the raw value is kept beside its
    named copy. Names that the backward pass doesn't use, and second names of one value, are no fault.
    """
    found = census(function, *args, **kwargs)
    if wrong := list(faults(found)):
        raise PlacementNotApplied(wrong[0], len(wrong) - 1)
    return found


def faults(found: Census) -> Iterator[Fault]:
    """What in a census contradicts the annotations."""
    if not found.annotations:
        yield Fault(None, "no Activation is in reach", "pass the annotated module as an argument of the function")
    # What should be on the host comes first.
    for path, placement in sorted(found.annotations.items(), key=lambda row: row[1] is not Placement.HOST):
        if (fault := _fault(path, placement, found)) is not None:
            yield fault
    for path in found.raw:
        kept = [e for e in found.entries if e.label == f"raw {path}"]
        yield Fault(
            path,
            f"{path!r} is named, but the value before it got its name is kept as well",
            f"rebind first (`x = self.{path.rpartition('.')[2]}(x)`) and use only the result",
            expected=0,
            found=sum(e.shard_bytes for e in kept) or None,
        )


def _fault(path: str, placement: Placement, found: Census) -> Fault | None:
    status = found.statuses[path]
    if status == "never tagged":
        return Fault(
            path,
            f"{path!r} is annotated {placement.value!r}, but the program never tags a value with it",
            "the layer must call the Activation on the value it stands for, and use what that returns"
            + _misspelt(path, found),
            found=0,
        )
    if status == "not needed" and path in found.outputs and placement is not Placement.DEVICE:
        return Fault(
            path,
            f"{path!r} is annotated {placement.value!r}, but it names what a block hands on to the next, which the "
            "loop keeps on the device by itself",
            "name the block's input instead, inside of what is checkpointed, and use only the named value",
            expected=0 if placement is Placement.RECOMPUTE else found.sizes.get(path),
            found=found.sizes.get(path) if placement is Placement.RECOMPUTE else 0,
        )
    partner = status.removeprefix("same value as ")
    if partner != status and placement is Placement.HOST and found.statuses.get(partner) in ("device", "recomputed"):
        return Fault(
            path,
            f"{path!r} is annotated 'host', but is the same value as {partner!r}, which is {found.statuses[partner]}",
            "of two names on one value one decides: drop one, or place both alike",
            found.sizes.get(path),
            0,
        )
    if status == "not needed" or partner != status:
        return None
    kept = found.of(path)
    actual = {e.memory.value for e in kept} or {status.replace("recomputed", "recompute")}
    if actual == {placement.value}:
        return None
    return Fault(
        path,
        f"{path!r} is annotated {placement.value!r} but waits as {' and '.join(sorted(actual))!r}",
        _why(path, actual, found),
        expected=0 if placement is Placement.RECOMPUTE else found.sizes.get(path),
        found=sum(e.shard_bytes for e in kept if e.memory == placement or placement is Placement.RECOMPUTE),
    )


def _why(path: str, actual: set[str], found: Census) -> str:
    if path in found.again_offloaded:
        return (
            "a jax.checkpoint around policies.checkpoint recomputes it, and moves it only then: of checkpoints inside "
            "each other the outer one decides, so apply one"
        )
    tagged = [p for p, s in found.statuses.items() if p in found.annotations and s != "never tagged"]
    if actual != {"recompute"} and not any(found.statuses[p] in ("host", "recomputed") for p in tagged):
        return "no policy is applied: run the module through policies.checkpoint"
    if actual == {"device"}:
        return "it runs outside of policies.checkpoint, or another name or policy decides where this value waits"
    return "another name or the code around it decides where this value waits" + _misspelt(path, found)


def _misspelt(path: str, found: Census) -> str:
    """A hint at a name that the program tags and no Activation declares, if it reads like this one."""
    others = [name for name in found.statuses if name not in found.annotations]
    ends = {name.rpartition(".")[2]: name for name in others}
    near = difflib.get_close_matches(path.rpartition(".")[2], ends, n=1, cutoff=0.6)
    return f"; the program tags {ends[near[0]]!r}, which no Activation declares: is that this one?" if near else ""
