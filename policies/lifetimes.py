"""Which results of a program are in memory, and from where to where.

What the compilers do beyond the order of the program is told here: XLA for GPUs has a latency-hiding scheduler, which
puts collectives and matrix products where their results are needed, and fills and fetches early; for what XLA for TPUs
does see `tpu_schedule`.
"""

import collections
import dataclasses
from collections.abc import Collection
from typing import Any

from . import tpu_schedule as schedule
from .buffers import Buffers
from .gpu_schedule import filled_for_loops, gathered_for_loops, slow_exchanges, tied
from .kernels import writes_exponentials
from .operations import Op, cut_by_rows, is_fill, origin, root_of

# Elementwise but for where they put an element: what they write can't be where they read.
_MOVING = {"gather", "concatenate", "slice", "dynamic_slice", "pad", "broadcast_in_dim"}


@dataclasses.dataclass(eq=False)
class Buffer:
    """Bytes in device memory from one place in the program to another, for the result of `op` first."""

    op: Op
    bytes: int
    begin: int
    end: int


def lifetimes(program: Buffers, donated: list[Op], listed: bool = False, moves: bool | None = None) -> list[Buffer]:
    """The buffers of a program but for its arguments; results can take the place of those that are `donated`.

    For TPUs, `listed`: in the order of XLA's list scheduler rather than in that of its depth-first one; `moves`: with
    what is done for transfers in loops, by default where there are any.
    """
    ops = program.ops
    made = _made(program)
    tpu = program.platform == "tpu"
    moves = schedule.fetches(ops) if moves is None else moves
    last, begins, inside = _uses(ops, made, tpu, listed, moves, {} if tpu else slow_exchanges(program))
    carries = {
        id(root_of(op.inputs[0])): op.target
        for op in ops
        if op.kind == "yield" and op.inputs and op.target.kind == "carry"
    }
    ahead: list[Buffer] = []
    read: dict[int, int] = {}
    waiting: dict[int, tuple[int, int]] = {}
    apart: set[int] = set()
    if tpu:
        schedule.together(ops, made, begins, root_of, _read)
        apart = schedule.shifted(ops, root_of) | schedule.masked(ops, made, begins, last, root_of)
        if moves:
            for op in filter(schedule.fetched_ahead, ops):
                if id(op) in last:
                    begins[id(op)] = op.inner[0].begin
                    ahead.append(Buffer(op, op.bytes, op.inner[0].begin, op.inner[0].end))  # of the next step
            schedule.early(ops, made, begins, root_of, _read)
    else:
        read = _begin_early(program, made, begins, last)
        _keep_fills(program, made, last)
        waiting = _wait_for_the_host(ops, begins, last)
    taken = _in_place_results(program, donated)
    buffers: dict[int, Buffer] = {}
    whole = schedule.whole(ops) if tpu else {}

    def buffer_of(op: Op) -> Buffer | None:
        return buffers.get(id(root_of(op)))

    found = []
    for op in ops:
        if id(op) in waiting:
            found.append(Buffer(op, op.bytes, *waiting[id(op)]))
        if id(op) not in made or op.host or op.kind in ("argument", "alias") or not op.bytes or id(op) in taken:
            continue
        end = last.get(id(op), -1)
        if end < 0:
            continue
        begin = begins.get(id(op), op.time)
        shared = None if id(op) in apart else _shares(op, begin, buffer_of, tpu)
        carry = carries.get(id(op))
        if carry is not None and id(carry) in buffers and carry.loop in op.loops and inside.get(id(carry), -1) <= begin:
            shared = buffers[id(carry)]  # a loop's step leaves its result where it found what it began with
        if shared is not None:
            shared.end = max(shared.end, end)
            buffers[id(op)] = shared
            continue
        buffers[id(op)] = buffer = Buffer(op, whole.get(id(op), op.bytes), begin, max(begin, end))
        found.append(buffer)
        if id(op) in read:
            found.append(Buffer(op, op.bytes, begin, read[id(op)]))
    return found + ahead


def _made(program: Buffers) -> set[int]:
    """The operations whose result is in memory."""
    made: set[int] = set()
    tpu = program.platform == "tpu"

    def ask(op: Op) -> None:
        made.add(id(root_of(op)))

    def sinks(op: Op) -> bool:
        """Whether it is made inside the loop that reads it: XLA for TPUs does so with what is only spread out."""
        op = root_of(op)
        return tpu and (is_fill(op) or (op.kind == "fused" and op.bytes > 2 * sum(s.bytes for s in op.inputs)))

    for op in program.ops:
        if op.kind in ("argument", "hard", "collective", "in place", "carry", "stack", "reduce", "copy"):
            made.add(id(op))
        if op.kind in ("hard", "collective", "in place", "need", "yield", "carry", "result", "copy"):
            for source in op.inputs:
                if op.kind in ("need", "carry") and sinks(source):
                    continue
                if root_of(source).kind != "constant" or op.kind in ("need", "result"):
                    ask(source)
        elif op.loops and op.kind in ("fused", "reduce"):
            for source in op.inputs:
                if root_of(source).loops != op.loops and not is_fill(source) and not sinks(source):
                    ask(source)
    if not tpu:
        return made
    fused = schedule.added(program.ops, root_of) | schedule.taken_in(program.ops, root_of)
    return (made - fused) | schedule.shifted(program.ops, root_of)


def _uses(
    ops: list[Op], made: set[int], tpu: bool, listed: bool, moves: bool, exchanges: dict[tuple, int]
) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """For each value the last place where it is read, through all that is fused or is its alias; and of what isn't
    made in the order of the program the place where it is.

    - `exchanges`: as of `slow_exchanges`.
    """
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    begins: dict[int, int] = {}
    inside: dict[int, int] = {}  # of carries: the last place in a loop's step where what came in is read
    work = len(ops)  # where the next matrix product outside loops is, that a sum over devices can run beside
    summed = schedule.summed_at(ops)
    later = schedule.left(ops, made, root_of) if tpu and moves and not listed else set()

    def use(op: Op, time: int, early: int | None = None) -> None:
        if op.loop is not None and time < op.loop.end:
            inside[id(op)] = max(inside.get(id(op), -1), time)
        last[id(op)] = max(last.get(id(op), -1), time)
        early = time if early is None else early
        first[id(op)] = min(first.get(id(op), early), early)

    def seen_from(op: Op, reader: Op, time: int, early: int) -> tuple[int, int]:
        for loop in reader.loops:  # a loop's every step reads what was there before it
            if loop not in op.loops:
                return max(time, loop.end), min(early, loop.begin)
        return time, early

    larger: dict[tuple, list[tuple[int, int]]] = {}  # by loops, when its products are made and their sizes
    turns: dict[int, int] = {}
    beside: dict[tuple, int] = {}  # by loops, where the next collective is that a step's other work waits for
    ends: dict[tuple, int] = {}  # by loops, where a step begins to hand on what it made
    for op in reversed(ops):
        if op.kind == "yield":
            ends[op.loops] = op.time
            if id(op.target) in last or op.target.kind == "carry":
                for source in op.inputs:
                    use(source, op.time)
                last[id(op.target)] = max(last.get(id(op.target), -1), op.time)
            continue
        if op.kind in ("need", "result", "carry"):
            for source in op.inputs:
                if op.kind != "need":
                    use(source, len(ops) if op.kind == "result" else op.time)
            continue
        if id(op) not in last:
            continue
        early = time = op.time
        if id(op) not in made or op.kind == "alias":
            early, time = first[id(op)], last[id(op)]
        elif tpu and id(op) in summed:
            if listed:  # one after the other, where what takes more follows
                late = next((begin for begin, size in larger.get(op.loops, []) if size > op.inputs[0].bytes), time)
                turn = turns[late] = turns.get(late, 0) + 3
                early = time = begins[id(op)] = max(late - turn, time)
            else:
                early = time = begins[id(op)] = summed[id(op)]
        elif (schedule.waits(op, moves, listed, root_of) or id(op) in later) if tpu else _waits(op, made):
            late = first[id(op)] - 1
            if not tpu and op.kind == "collective" and op.inputs and op.bytes < op.inputs[0].bytes and not op.inner:
                late = min(late, work)
            if op.kind == "hard" and op.inner and not tpu:
                late = min(late, beside.get(op.loops, late))
            early = time = begins[id(op)] = max(late, time)
        elif listed and op.inner and op.partial and op.kind == "hard":
            early = time = begins[id(op)] = max(first[id(op)] - 1, time)
        exchange = exchanges.get(op.loops, -1)
        if op.kind in ("fused", "hard", "reduce") and id(op) in made and schedule.recomputed(op):
            if time < exchange <= first[id(op)]:
                early = time = begins[id(op)] = exchange
        if op.partial and op.inner and first[id(op)] < ends.get(op.loops, 0):
            beside[op.loops] = op.time
        if listed and op.kind == "hard" and op.inner:
            larger.setdefault(op.loops, []).insert(0, (time, op.bytes))
        if op.kind == "hard" and op.name == "dot_general" and not op.loops and not op.outside:
            work = op.time
        for source in op.inputs:
            use(source, *seen_from(source, op, time, early))
    return last, begins, inside


def _waits(op: Op, made: set[int]) -> bool:
    """Whether XLA's scheduler, which puts collectives where their result is needed, can do so past whole loops."""
    if op.kind == "collective":
        return not op.inner or (bool(op.inputs) and op.bytes < op.inputs[0].bytes)
    return (op.kind == "hard" and op.name == "dot_general") or (
        op.kind == "fused"
        and bool(op.inner)
        and op.bytes >= max((s.bytes for s in _read(op) if id(s) in made), default=0)
    )


def _begin_early(program: Buffers, made: set[int], begins: dict[int, int], last: dict[int, int]) -> dict[int, int]:
    """What begins early on GPUs, and of what loops fetch from the host the place where a step has read it.

    One kernel fills all buffers of a shape, but for what a tied embedding's gradient is scattered into where the head's
    is being summed over devices then: the fill runs beside that.
    """
    fills: dict[tuple, int] = {}
    stacks: dict[tuple, int] = {}
    both = tied(program.ops)
    # So it is where the vocabulary is cut over devices,
    both |= {
        id(root_of(op.inputs[0]))
        for op in program.ops
        if op.kind == "in place" and op.name.startswith("scatter") and not op.loops and cut_by_rows(op)
    }
    # and where a loop's last step is done before its gradients are summed: on fast devices, or over a slow network.
    waits = program.spread or writes_exponentials(program.capability)
    after = 0
    read: dict[int, int] = {}
    # What loops of a step read, such as those of experts' gradients, is fetched for the next one when they are done
    # then, not before.
    ends = {loop.end for op in program.ops for loop in op.inner[1:]}
    gathered: dict[tuple, int] = {}
    looped, first = gathered_for_loops(program.ops), dict[tuple, int]()
    shared = filled_for_loops(program.ops)
    for op in program.ops:
        if op.inner and op.inner[0].fetches:
            after = op.inner[0].end
        if op.kind == "copy" and not op.host and not op.loops and root_of(op.inputs[0]).kind == "argument":
            begins[id(op)] = 0  # what only waits for the host starts at once
        whole = op.kind == "collective" and op.name != "ragged_all_to_all"
        if whole and op.inputs and op.bytes > op.inputs[0].bytes and id(op) in last:
            # A gather runs beside what is computed before it, from where the one before it ended.
            at = op.time if op.loops else begins.get(id(op), op.time)
            begins[id(op)] = min(gathered.get(op.loops, at), at)
            if id(op) in looped:
                begins[id(op)] = first.setdefault((op.loops, op.step_of), begins[id(op)])
            gathered[op.loops] = at
        if op.kind == "copy" and not op.host and id(op) in last:
            if op.outside:
                begins[id(op)] = min(after, op.time)
            elif op.inner and op.inner[0].fetches:
                # What the next step needs is fetched while this step's still waits.
                read[id(op)] = last[id(op)]
                begins[id(op)], last[id(op)] = op.inner[0].begin, op.inner[0].end
                if waits and read[id(op)] in ends:
                    del read[id(op)]
        if op.kind == "stack" and op.loop is not None and not op.loop.first and not op.host:
            # Loops that write each slice of a stack begin with zeros: one kernel fills the equal stacks of all loops.
            begins[id(op)] = stacks.setdefault((op.loops, op.text.partition(" ")[0]), op.time)
        if id(op) in made and id(op) in both and after:
            begins[id(op)] = op.time if waits else min(after, op.time)
        elif id(op) in made and id(op) not in both and op.kind == "fused" and is_fill(op):
            begin = fills.setdefault((op.loops, str(op.aval), op.cuts), op.time)
            begins[id(op)] = shared.get(id(op), begin)
    return read


def _wait_for_the_host(
    ops: list[Op], begins: dict[int, int], last: dict[int, int]
) -> dict[int, tuple[int, int]]:
    """What a loop's steps leave to be copied to the host waits on the device for the next step, which copies it.

    The last step's waits for the loop that fetches it: it is copied only then, or copied and fetched at once. Where the
    fetching loop's first step goes before it, that has work enough beside which both copies are made when they need be.
    Returned for values without a buffer of their own (a carry changes): by the copy, from where to where it waits.
    """
    fetched: dict[int, int] = {}  # by stack: where the loop begins that fetches it, its first step included
    for op in ops:
        if op.kind == "copy" and not op.host:
            stack = origin(op)
            while stack.name == "slice":
                stack = origin(stack.inputs[0])
            fetched.setdefault(id(stack), op.inner[0].begin if op.inner and op.inner[0].fetches else 0)
    waiting = {}
    for op in ops:
        if op.kind != "yield" or op.target.kind != "stack" or not op.target.host or not op.target.loop.first:
            continue
        loop, value = op.target.loop, root_of(op.inputs[0])
        until = max(fetched.get(id(op.target), 0), loop.end)
        source = origin(value)
        if source.kind != "carry" and loop in source.loops and id(source) in last:
            begins[id(source)], last[id(source)] = loop.begin, max(until, last[id(source)])
        elif value.kind == "copy":
            waiting[id(value)] = (loop.begin, until)
    return waiting


def _keep_fills(program: Buffers, made: set[int], last: dict[int, int]) -> None:
    """Loops that read the same fill, each in its steps, read one buffer.

    One that fetches from the host ahead of time has its last step outside: it reads what is filled in there, if that
    has the same shape. It has not where scores are as the product's kernel leaves them but for dimensions of 1, which
    are left out then: a constant of the other shape is part of the kernel that reads it.
    """
    plain = {str(op.aval) for op in program.ops if op.name == "dot_general" and op.kind == "hard" and not op.merged}
    kept: dict[str, Op] = {}  # the same fill, made once
    same: dict[tuple, Op] = {}
    changed = {
        id(root_of(source))
        for op in program.ops if op.kind in ("in place", "carry", "yield", "result") for source in op.inputs
    }  # fmt: skip
    for op in program.ops:
        if op.kind == "fused" and is_fill(op):
            if not op.inner and not op.outside and id(op) in made:
                kept.setdefault(str(op.aval), op)
                # What one line of a layer fills in is the same for every segment of a stack.
                first = same.setdefault((op.loops, op.stack, op.text), op)
                if first is not op and not {id(first), id(op)} & changed:
                    made.discard(id(op))
                    last[id(first)] = max(last.get(id(first), -1), last.get(id(op), -1))
            elif id(op) not in made and (op.outside or (op.inner and op.inner[0].fetches)):
                fill = kept.get(str(op.aval))
                if fill is not None and str(op.aval) not in plain:
                    until = op.inner[0].end if op.inner else last.get(id(op), op.time)
                    last[id(fill)] = max(last.get(id(fill), -1), until)


def _shares(op: Op, time: int, buffer_of: Any, tpu: bool) -> Buffer | None:
    """The buffer of an operand that ends here, which the result can take."""
    ragged = op.name == "ragged_all_to_all" and not tpu  # which writes into its second operand
    if op.kind in ("fused", "in place", "carry") or ragged:
        sources = _read(op, _MOVING) if op.kind == "fused" else op.inputs[1:2] if ragged else op.inputs[:1]
        everything = _read(op) if op.kind == "fused" and not tpu else []
        # Where a row's sum is part of the kernel, as in softmax and its gradient, all of the row is read before.
        summed = {id(root_of(s)) for r in everything if r.kind == "reduce" and not r.apart for s in _read(r)}
        for source in sources:
            if id(root_of(source)) in summed:
                continue
            buffer = buffer_of(source)
            if buffer is not None and buffer.bytes == op.bytes and buffer.end <= time:
                return buffer
    return None


def _read(op: Op, but: Collection[str] = ()) -> list[Op]:
    """The operands in memory of everything that is fused into an operation, as far as that is plain to see."""
    found, todo, seen = [], list(op.inputs) if op.name not in but else [], set()
    while todo and len(seen) < 64:
        source = root_of(todo.pop())
        if id(source) in seen:
            continue
        seen.add(id(source))
        found.append(source)
        if source.kind == "fused" and source.name not in but:
            todo.extend(source.inputs)
    return found


def _in_place_results(program: Buffers, donated: list[Op]) -> set[int]:
    """Results that are written where a donated argument was."""
    free = collections.Counter((op.bytes, str(op.aval), op.host) for op in donated)
    taken = set()
    for result in program.results:
        key = (result.bytes, str(result.aval), result.host)
        if free[key] > 0:
            free[key] -= 1
            taken.add(id(root_of(result)))
            taken.add(id(root_of(result.inputs[0])))
    return taken
