"""Which of its orders XLA for TPUs runs a program in: that of its list scheduler, or the depth-first one.

Both are of the open compiler (openxla/xla, hlo_memory_scheduler.cc), and so is how the bytes are counted that it
chooses by: without a heap's gaps, and with what is another name of a buffer as if it were one more.
"""

import itertools
from collections.abc import Sequence

from .buffers import Buffers
from .lifetimes import Buffer, lifetimes
from .operations import Op, is_fill, origin
from .tpu_schedule import fetches


def taken(program: Buffers, donated: list[Op]) -> list[Buffer]:
    """A program's buffers in the order that XLA expects to need less memory; `donated` as for `lifetimes`."""
    moves = fetches(program.ops)
    orders = [lifetimes(program, donated, listed, moves=False) for listed in (False, True)]
    plain, listed = (expected(order, program.ops, i == 1) for i, order in enumerate(orders))
    found = lifetimes(program, donated, listed=listed < plain) if moves else orders[listed < plain]
    if listed < plain and not moves:
        early = _begun_early(found, program.ops)
        for buffer in found:
            if buffer.op.kind in ("carry", "collective"):  # what is only filled in is filled in late again
                buffer.begin = min(buffer.begin, early.get(id(buffer), buffer.begin))
        _gather_first(found)
    return found


def _gather_first(buffers: Sequence[Buffer]) -> None:
    """Has weights gathered in a loop's steps before products that take more, as the list scheduler does."""
    made: dict[tuple, list[Buffer]] = {}  # by loops, the results of products
    for buffer in buffers:
        if buffer.op.inner and buffer.op.kind == "hard":
            made.setdefault(buffer.op.loops, []).append(buffer)
    for buffer in buffers:
        op = buffer.op
        if op.inner and op.kind == "collective" and op.bytes > op.inputs[0].bytes:
            larger = [other.begin - 1 for other in made.get(op.loops, ()) if other.bytes > buffer.bytes]
            buffer.begin = min([buffer.begin, *larger])


def expected(buffers: Sequence[Buffer], ops: list[Op], listed: bool) -> int:
    """The bytes that XLA expects a program's buffers to take at most, by which it takes one order or the other.

    The list scheduler runs whatever takes least first: so what needs no loop's result, such as filling in what
    gradients are added to, comes before the first loop that takes more.

    A loop's carries and stacks are expected to be there twice where it begins and ends, and one of them in its steps;
    and what is on the host as if it weren't.
    """
    begins = _begun_early(buffers, ops) if listed else {}
    spans = [(min(b.begin, begins.get(id(b), b.begin)), b.end, b.bytes) for b in buffers]
    read: dict[int, int] = {}  # by stack: where the last loop ends that reads it
    for op in ops:
        for source in op.inputs if op.inner else ():
            stack = origin(source)
            if stack.kind == "stack" and stack.host and op.inner[0] is not stack.loop:
                read[id(stack)] = max(read.get(id(stack), 0), op.inner[0].end)
    for loop in {id(op.loop): op.loop for op in ops if op.loop is not None and not op.loop.holds}.values():
        state = [op for op in ops[: loop.begin] if op.loop is loop]
        size = sum(op.bytes for op in state)
        spans += [(loop.begin, loop.begin, size), (loop.end, loop.end, size)]
        spans += [(loop.begin, read.get(id(op), loop.end), op.bytes) for op in state if op.kind == "stack" and op.host]
    spans += [(op.time, op.time, op.target.bytes) for op in ops if op.kind == "yield"]
    if listed and fetches(ops) and (first := next((op.inner[0] for op in ops if op.inner), None)) is not None:
        # A loop that moves values has its first step before it, whose weights are gathered first of all.
        gathers = [op for op in ops if op.inner and op.inner[0] is first and op.kind == "collective"]
        size = sum(op.bytes for op in gathers if op.bytes > op.inputs[0].bytes)
        spans.append((first.begin, first.begin, size))
    return _highest(spans, len(ops))


def _begun_early(buffers: Sequence[Buffer], ops: list[Op]) -> dict[int, int]:
    """Before which loop the list scheduler makes what depends on none, by the buffer's id: the first that takes more.

    A loop hands on all that it reads, which counts as taken unless nothing else reads it; and what it starts from is
    there. A loop that moves values has its first step before it, of which each result counts.
    """
    ready: set[int] = set()
    alone: set[int] = set()  # what needs no loop
    seen: set[tuple] = set()  # the same, made once
    for op in ops:
        if op.inner or op.kind in ("yield", "result"):
            continue
        if op.kind in ("carry", "stack"):
            if all(is_fill(one) for one in op.inputs):
                ready.add(id(op))
        elif all(id(one) in alone for one in op.inputs):
            alone.add(id(op))
            key = (op.name, str(op.aval), op.cuts, *(id(origin(one)) for one in op.inputs))
            if key not in seen or op.kind != "collective":
                seen.add(key)
                ready.add(id(op))
    kept = {id(b.op): b for b in buffers}
    moves = fetches(ops)
    found: dict[int, int] = {}
    for loop in {id(op.inner[0]): op.inner[0] for op in ops if len(op.inner) == 1}.values():
        around = itertools.takewhile(lambda op: op.kind in ("need", "carry", "stack"), reversed(ops[: loop.begin]))
        before = [op for op in around if op.kind == "need" or op.loop is loop]
        read = {id(origin(source)) for op in before if op.kind == "need" for source in op.inputs}
        passed = [kept[one].bytes for one in read if one in kept and kept[one].end > loop.end]
        inside = [b.bytes for b in buffers if moves and loop.begin <= b.begin <= b.end <= loop.end]
        size = max(sum(passed), *(op.bytes for op in before if op.kind == "stack"), *inside, 0)
        for buffer in buffers:
            if id(buffer.op) in ready and buffer.bytes < size:
                found.setdefault(id(buffer), loop.begin)
    return found


def _highest(spans: Sequence[tuple[int, int, int]], ticks: int) -> int:
    """The most bytes at a time, of which so many are there from one time to another."""
    change = [0] * (ticks + 2)
    for begin, end, size in spans:
        change[begin] += size
        change[min(end, ticks) + 1] -= size
    return max(itertools.accumulate(change))
