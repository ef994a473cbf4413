"""What a traced program does on one device, one operation after the other: the words in which buffers are told."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from .cuts import Cuts
from .jaxprs import subjaxprs
from .local_sizes import local_bytes, local_shape

# Sums over devices of which each keeps a part.
SCATTERS = {"psum_scatter", "reduce_scatter", "unreduced_psum_scatter"}


@dataclasses.dataclass(eq=False)
class Op:
    """One result of an operation on one device.

    - `kind`: "argument", "constant", "fused" (elementwise), "alias", "reduce", "hard", "collective", "in place",
      "carry", "stack", "yield" (what a loop's step hands on: `target`'s next value, or a part of it), "need" (a loop
      reads its operand from memory), "result".
    - `time`: its place in the order of the program.
    - `loops`: the loops around it, outermost first; `loop` is the one that a carry or a stack belongs to.
    """

    kind: str
    bytes: int
    inputs: tuple["Op", ...]
    name: str = ""
    stack: str = ""
    label: str = ""
    time: int = 0
    loops: tuple["Loop", ...] = ()
    host: bool = False
    target: "Op | None" = None
    branch: int | None = None  # of an index that says for which platform a branch is: which one is taken
    loop: "Loop | None" = None
    partial: bool = False  # of a product: each device has only a part of the sum
    merged: bool = False  # of a product: the kernel's result has several of its dimensions as one
    apart: bool = False  # of a reduction: in a kernel of its own, not in its readers'
    outside: bool = False  # of a loop's last step, after the loop
    step_of: "Loop | None" = None  # the loop whose last step, outside of it, this belongs to
    cuts: Cuts = ()
    aval: Any = None

    @property
    def text(self) -> str:
        """Dtype, shape on one device, and what makes it, in words."""
        shape = ",".join(map(str, local_shape(self.aval, self.cuts))) if hasattr(self.aval, "shape") else ""
        return f"{getattr(self.aval, 'dtype', '')}[{shape}] {self.label or self.name or self.kind}"

    @property
    def inner(self) -> "tuple[Loop, ...]":
        """The loops around it, but for those over micro-batches: they hold all that a step does."""
        return tuple(loop for loop in self.loops if not loop.holds)


@dataclasses.dataclass(eq=False)
class Loop:
    """A loop in the order of the program: `begin` and `end` are places in it."""

    begin: int = 0
    end: int = 0
    length: int = 1
    names: set[str] = dataclasses.field(default_factory=set)
    holds: bool = False  # whether loops over layers are inside: it runs over micro-batches
    fetches: bool = False  # whether its steps read what an earlier loop left in host memory
    kept: set[str] = dataclasses.field(default_factory=set)  # names of what its steps read of an earlier loop's
    stack: str = ""
    first: bool = False  # whether its first step goes before it, and what that leaves begins the stacks


def holds_layers(body: Any) -> bool:
    """Whether a loop's step has a loop that stacks something of its own steps: of layers, for their backward loop."""
    for eqn in body.eqns:
        subs = list(subjaxprs(eqn))
        if eqn.primitive.name == "scan":
            ranks = zip(eqn.outvars, subs[0].outvars, strict=True)
            if any(len(o.aval.shape) > len(i.aval.shape) for o, i in ranks):
                return True
        elif any(map(holds_layers, subs)):
            return True
    return False


def branch_of(index: Op) -> int | None:
    """Which branch an index means, if it is that of the platform, clamped or cast."""
    todo = [index]
    while todo:
        op = todo.pop()
        if op.branch is not None:
            return op.branch
        if op.kind in ("alias", "fused"):
            todo.extend(op.inputs)
    return None


def label_of(op: Op) -> str:
    """The name that stands on a value, wherever it lies; empty if none does."""
    while op.name != "name":
        if op.kind not in ("alias", "copy") and op.name not in ("reduce_precision", "convert_element_type"):
            return ""
        op = op.inputs[0]
    return op.label


def origin(op: Op) -> Op:
    while op.kind in ("alias", "copy"):
        op = op.inputs[0]
    return op


def root_of(op: Op) -> Op:
    """What an operation is another name of."""
    while op.kind == "alias":
        op = op.inputs[0]
    return op


def gather_once(ops: Sequence[Op]) -> None:
    """Makes other names of what is gathered from the same parts once more, outside of loops over layers.

    What is computed again stays so: it is behind a barrier.
    """
    first: dict[tuple, Op] = {}
    for op in ops:
        if op.kind == "collective" and not op.inner and op.inputs and op.bytes > op.inputs[0].bytes:
            source = op.inputs[0]
            while source.kind == "alias" and source.name != "optimization_barrier":
                source = source.inputs[0]
            same = first.setdefault((id(source), op.loops, op.name, str(op.aval), op.cuts), op)
            if same is not op:
                op.kind, op.inputs = "alias", (same,)


def may_be_cut(op: Op) -> bool:
    """Whether a loop's first carry can be made in parts: something filled in, whole as far as is known."""
    return max(op.cuts, default=1) == 1 and math.prod(getattr(op.aval, "shape", ())) > 1 and is_fill(op)


def recut(op: Op, cuts: Cuts) -> None:
    """Cuts a value that is filled in or spread out, and so can be made in any parts, as what it is combined with."""
    shape = getattr(op.aval, "shape", ())
    if len(shape) != len(cuts):
        return
    if op.kind == "fused" and op.name == "broadcast_in_dim" and len(op.inputs[0].cuts) == len(cuts):
        spread = [source == 1 < size for size, source in zip(shape, op.inputs[0].aval.shape, strict=True)]
        op.cuts = tuple(
            max(mine, part) if new and size % part == 0 else mine
            for mine, part, new, size in zip(op.cuts, cuts, spread, shape, strict=True)
        )
        op.bytes = local_bytes(op.aval, op.cuts)
    if not may_be_cut(op) or any(s % c for s, c in zip(shape, cuts, strict=True)):
        return
    while max(cuts, default=1) > 1:
        op.cuts, op.bytes = cuts, local_bytes(op.aval, cuts)
        if op.kind not in ("fused", "alias") or not op.inputs or op.inputs[0].aval.shape != shape:
            return
        op = op.inputs[0]


def cut_by_rows(op: Op) -> bool:
    """Whether a scatter goes to this device's own rows of an array: its indices depend on which device it is."""
    todo, seen = list(op.inputs[1:2]), set()
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.name == "axis_index":
            return True
        if node.kind in ("fused", "alias"):
            todo.extend(node.inputs)
    return False


def merges(eqn: Any, left: Op, right: Op) -> bool:
    """Whether a product's kernel has several dimensions as one: there are three, a batch, rows and columns."""
    (ours, theirs), (batch, other) = eqn.params["dimension_numbers"]
    shape, second = local_shape(left.aval, left.cuts), local_shape(right.aval, right.cuts)
    rows = [size for i, size in enumerate(shape) if i not in (*ours, *batch)]
    columns = [size for i, size in enumerate(second) if i not in (*theirs, *other)]
    return any(sum(size > 1 for size in sizes) > 1 for sizes in ([shape[i] for i in batch], rows, columns))


def is_fill(op: Op) -> bool:
    """Whether a value is computed from numbers alone."""
    todo = [op]
    for _ in range(200):
        if not todo:
            return True
        node = todo.pop()
        if node.kind in ("fused", "alias"):
            todo.extend(node.inputs)
        elif node.kind != "constant":
            return False
    return False


def platform_index(platforms: Sequence[Any], platform: str) -> int:
    names = {"cuda": ("cuda", "gpu"), "gpu": ("cuda", "gpu")}.get(platform, (platform,))
    for i, some in enumerate(platforms):
        if some is None or any(name in some for name in names):
            return i
    return len(platforms) - 1
