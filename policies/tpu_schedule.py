"""When XLA for TPUs makes what a program computes: where its schedule isn't the order of the program."""

from collections.abc import Callable

from .local_sizes import local_shape
from .operations import SCATTERS, Op, is_fill


def fetches(ops: list[Op]) -> bool:
    """Whether a loop of the program reads, step by step, what an earlier one left in host memory."""
    return any(loop.fetches for op in ops for loop in op.loops)


def fetched_ahead(op: Op) -> bool:
    """Whether an array comes back from the host during the step before the one that reads it.

    The loop's first step is taken out of it then, and each step waits for what the one before it asked for and asks
    for what the next one needs, nearly at once: both are in memory.
    """
    return op.kind == "copy" and not op.host and bool(op.inner) and op.inner[0].fetches and op.inner[0].length > 1


def recomputed(op: Op) -> bool:
    """Whether a value is computed again in a loop's step: the scheduler, which begins at a step's end, does so late.

    Traced programs compute all of a layer again before its backward pass begins. What that pass needs last, such as
    attention's scores where its output has come from the host, is left until then.
    """
    return bool(op.inner) and "rematted_computation" in op.stack


def left(ops: list[Op], made: set[int], root: Callable[[Op], Op]) -> set[int]:
    """The matrix products of a layer's backward pass, by id, that can be left until their result is needed.

    They read what was computed again for another product and stays in memory: the gradient of attention's values, which
    reads its probabilities, comes after that of the scores. Only where values are fetched from the host: there the
    schedule begins with what waits for none.

    - `made`, `root`: as for `together`.
    """
    readers: dict[int, list[Op]] = {}
    for op in ops:
        if op.kind == "hard" and op.inner:
            for source in {id(root(source)): root(source) for source in op.inputs}.values():
                if id(source) in made and source.kind == "fused" and recomputed(source):
                    readers.setdefault(id(source), []).append(op)
    shared = [by for by in readers.values() if any(map(recomputed, by))]
    products = [op for by in shared for op in by if not recomputed(op)]
    return {id(op) for op in products if 4 * op.bytes <= max(source.bytes for source in op.inputs)}


def _readers(ops: list[Op], root: Callable[[Op], Op]) -> dict[int, list[Op]]:
    """By what is read, by id, the operations that do, under whichever name."""
    readers: dict[int, list[Op]] = {}
    for op in ops:
        for source in op.inputs if op.kind != "alias" else ():
            readers.setdefault(id(root(source)), []).append(op)
    return readers


def added(ops: list[Op], root: Callable[[Op], Op]) -> set[int]:
    """The matrix products, by id, that are added to something by the kernel that computes them, and so have no buffer.

    - `root`: what an operation is another name of.
    """
    readers = _readers(ops, root)
    products = [op for op in ops if op.kind == "hard" and op.name == "dot_general"]
    only = ((op, readers.get(id(op), [])) for op in products)
    return {id(op) for op, by in only if len(by) == 1 and by[0].kind == "fused" and by[0].name in ("add", "add_any")}


def taken_in(ops: list[Op], root: Callable[[Op], Op]) -> set[int]:
    """What only the kernel of a matrix product reads, which computes it on the way, by id: softmax's result.

    - `root`: what an operation is another name of.
    """
    readers = _readers(ops, root)
    found = ((op, readers.get(id(op), [])) for op in ops if op.kind == "fused" and "attention" in op.stack)
    return {id(op) for op, by in found if len(by) == 1 and by[0].name == "dot_general"}


def shifted(ops: list[Op], root: Callable[[Op], Op]) -> set[int]:
    """Scores less their rows' maxima, by id, that are in memory beside the scores: where a device has some sequences.

    With one, the kernel of the product finds the maxima as it goes.
    """
    found = set()
    for op in ops:
        if op.name == "exp" and "attention" in op.stack:
            less = root(op.inputs[0])
            shape = local_shape(less.aval, less.cuts)
            if less.name == "sub" and len(shape) > 3 and shape[0] > 1:
                found.add(id(less))
    return found


def masked(
    ops: list[Op], made: set[int], begins: dict[int, int], last: dict[int, int], root: Callable[[Op], Op]
) -> set[int]:
    """What grouped products read that rows of no group are masked from, by id: copies beside what they are of.

    One kernel makes all of a shape in a step, each once, where the last of what it reads is there; put into `begins`,
    and into `last` where that is read last for several products.
    """
    read = {id(root(source)) for op in ops if op.name == "ragged_dot_general" for source in op.inputs}
    groups: dict[tuple, list[tuple[Op, Op]]] = {}
    for op in ops:
        if op.name == "select_n" and op.inner and id(op) in made and id(op) in read:
            for source in map(root, op.inputs):
                stays = source.name == "gather" or source.kind == "copy"
                if stays and id(source) in made and source.bytes == op.bytes and source.loops == op.loops:
                    groups.setdefault((op.loops, local_shape(op.aval, op.cuts)), []).append((op, source))
    for pairs in groups.values():
        first: dict[int, Op] = {}
        for op, source in pairs:
            same = first.setdefault(id(source), op)
            if same is not op and id(op) in last:
                made.discard(id(op))
                last[id(same)] = max(last.get(id(same), -1), last[id(op)])
        shape = local_shape(pairs[0][0].aval, pairs[0][0].cuts)
        others = [
            begins.get(id(root(op)), root(op).time)
            for op in ops
            if op.name == "select_n" and op.loops == pairs[0][0].loops and local_shape(op.aval, op.cuts) == shape
            for op in op.inputs
            if id(root(op)) in made and root(op).kind == "fused" and local_shape(root(op).aval, root(op).cuts) == shape
        ]
        ready = max(others)
        for op, _ in pairs:
            begins[id(op)] = min(begins.get(id(op), op.time), ready)
    return {id(op) for pairs in groups.values() for op, _ in pairs}


def whole(ops: list[Op]) -> dict[int, int]:
    """The bytes of gradients, by the id of their sum over devices, that stay whole until another one is added to them.

    Sums over 8 and more devices are all-reduced, in bfloat16, and each device's part is taken where it is read. That is
    at once but where a head's weight is the embedding's too, whose gradient comes last.
    """
    readers: dict[int, list[Op]] = {}
    for op in ops:
        for source in op.inputs:
            readers.setdefault(id(source), []).append(op)
    found = {}
    for op in ops:
        if op.name not in SCATTERS or op.inner or op.inputs[0].bytes < 8 * op.bytes:
            continue
        by = readers.get(id(op), [])
        while len(by) == 1 and by[0].kind in ("alias", "fused") and len(by[0].inputs) == 1:
            by = readers.get(id(by[0]), [])
        if len(by) == 1 and by[0].name in ("add", "add_any"):
            source = op.inputs[0]
            found[id(op)] = source.bytes * 2 // source.aval.dtype.itemsize
    return found


def handed_on(op: Op) -> bool:
    """Whether a value is there when the depth-first order comes by, though only the optimizer needs it.

    So is what a loop leaves, and a product of experts: these follow each other in the order of the program.
    """
    todo = [op]
    while todo:
        op = todo.pop()
        if op.kind == "carry" or op.name == "ragged_dot_general":
            return True
        if op.kind in ("fused", "alias"):
            todo.extend(op.inputs)
    return False


def sums(op: Op) -> bool:
    """Whether it adds up, over devices, products of which each device has a part, and leaves each a part of the sum."""
    if op.name == "sharding_constraint" and op.kind == "collective":
        return op.inputs[0].partial and op.bytes < op.inputs[0].bytes
    return op.name in SCATTERS


def summed_at(ops: list[Op]) -> dict[int, int]:
    """Where the sums over devices in a loop's step run, by id: all of them where the last one does, combined."""
    last = {op.loops: op.time for op in ops if op.inner and sums(op)}
    return {id(op): last[op.loops] for op in ops if op.inner and sums(op)}


def early(
    ops: list[Op], made: set[int], begins: dict[int, int], root: Callable[[Op], Op], read: Callable[[Op], list[Op]]
) -> None:
    """Puts into `begins` what is fetched or computed again outside of loops before a loop that fetches, for after it.

    What comes from the host has nothing to wait for, and the scheduler starts transfers early: before the loop too, and
    with them the products of what they bring.

    - `made`, `root`, `read`: as for `together`.
    """
    starts = [op.inner[0].begin for op in ops if op.inner and op.inner[0].fetches]
    start = min(starts, default=len(ops))
    fetched: set[int] = set()
    for op in ops:
        if op.inner or op.time < start or id(op) not in made:
            continue
        if op.kind == "copy" and not op.host:
            fetched.add(id(op))
        elif recomputed_outside(op):
            sources = [source for source in map(root, read(op)) if id(source) in made]
            if sources and all(id(source) in fetched or source.time < start for source in sources):
                fetched.add(id(op))
        if id(op) in fetched:
            begins[id(op)] = min(begins.get(id(op), op.time), start)


def recomputed_outside(op: Op) -> bool:
    """Whether a product is computed again outside of loops."""
    return op.kind == "hard" and not op.inner and "rematted_computation" in op.stack


def together(
    ops: list[Op], made: set[int], begins: dict[int, int], root: Callable[[Op], Op], read: Callable[[Op], list[Op]]
) -> None:
    """Puts into `begins` where elementwise results in memory are made earlier than in the program.

    Multi-output fusion makes one kernel of elementwise operations that read the same array and have the same shape,
    such as the products of a gated layer's backward pass: it runs where the first of them does, if what the others read
    is there.

    - `made`: the operations whose result is in memory, by id.
    - `root`: what an operation is another name of.
    - `read`: the operands in memory of everything that is fused into an operation.
    """
    kernels: dict[tuple, list[int]] = {}  # by loops, shape and an array that is read: when kernels run that read it
    for op in ops:
        if op.kind != "fused" or id(op) not in made or not op.bytes or not op.loops:
            continue
        sources = [root(source) for source in read(op)]
        sources = [source for source in sources if id(source) in made and source.loops == op.loops]
        shape = local_shape(op.aval, op.cuts)
        ready = max((begins.get(id(source), source.time) for source in sources), default=op.time)
        keys = [(op.loops, shape, id(source)) for source in sources if local_shape(source.aval, source.cuts) == shape]
        alone = begins.get(id(op), op.time)
        begin = min((time for key in keys for time in kernels.get(key, ()) if ready < time <= alone), default=alone)
        if begin < alone:
            begins[id(op)] = begin
        for key in keys:
            kernels.setdefault(key, []).append(begin)


def waits(op: Op, moves: bool, listed: bool, root: Callable[[Op], Op]) -> bool:
    """Whether XLA puts an operation where its result is needed, past whole loops.

    `moves`: whether a loop's steps read what waits on the host. XLA for TPUs then has its first step before it, which a
    collective runs beside, and leaves the gradients of single layers until after it. Otherwise it sums gradients at
    once but for those that a loop leaves, such as a head's: so they lie in the depth-first order of a program. Its list
    scheduler sums them at once too.
    """
    if recomputed(op) or (op.kind == "fused" and is_fill(op)):
        return True
    if op.kind == "collective":
        if op.name in SCATTERS and not op.inner:
            waits = root(op.inputs[0]).kind != "carry" if moves else handed_on(op.inputs[0])
            return waits and not listed
        return not op.inner and not moves
    # The gradients of a layer outside of loops, for which the optimizer waits.
    return moves and op.kind == "hard" and not op.inner and op.name in ("dot_general", "ragged_dot_general")
