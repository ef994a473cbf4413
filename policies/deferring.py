"""Loops of a program that XLA's scheduler for GPUs runs later than they were traced."""

from collections.abc import Sequence

from .operations import Loop, Op


def defer(ops: Sequence[Op]) -> list[Op]:
    """The operations in an order in which what only an optimizer waits for comes after a loop over layers.

    The scheduler begins at a step's end, and puts what is needed last late. That goes for single products anyway; here
    it goes for loops outside of layers' loops, such as those over the experts of a single layer (that of a multi-token
    prediction) whose results are gradients of weights. What they read waits in memory through the backward pass of
    all layers.
    """
    units = _units(ops)
    where = {id(op): i for i, unit in enumerate(units) for op in unit}
    readers: list[set[int]] = [set() for _ in units]
    for i, unit in enumerate(units):
        for op in unit:
            for source in (*op.inputs, *([op.target] if op.target is not None else [])):
                if (j := where.get(id(source), i)) != i:
                    readers[j].add(i)
    last = _before_products(units)
    late = [False] * len(units)
    moved = [False] * len(units)
    for i in range(last - 1, -1, -1):
        # What nothing reads, such as a loop's test after it, isn't there for the compiler.
        unread = not readers[i] and all(op.kind in ("fused", "alias", "reduce", "hard", "constant") for op in units[i])
        late[i] = unread or (bool(readers[i]) and all(j > last or late[j] for j in readers[i]))
    for i in range(last):
        loops = any(op.kind == "carry" for op in units[i])
        sources = {where[id(s)] for op in units[i] for s in op.inputs if id(s) in where} - {i}
        moved[i] = late[i] and (loops or any(moved[j] for j in sources))
    if not any(moved):
        return list(ops)
    stay = [unit for i, unit in enumerate(units[: last + 1]) if not moved[i]]
    go = [unit for i, unit in enumerate(units[: last + 1]) if moved[i]]
    return _renumbered(ops, [op for unit in (*stay, *go, *units[last + 1 :]) for op in unit])


def _before_products(units: Sequence[Sequence[Op]]) -> int:
    """The first backward loop over layers that products outside of loops come after, such as those of a single layer.

    Those are what sums of gradients over devices can run beside; -1 where there is none.
    """
    found = -1
    for i, unit in enumerate(units):
        if any(op.kind == "stack" for op in unit):
            found = i if "transpose(" in unit[0].stack else -1
        elif found >= 0 and unit[0].kind == "hard" and unit[0].name == "dot_general" and len(unit) == 1:
            return found
    return -1


def _units(ops: Sequence[Op]) -> list[list[Op]]:
    """Operations, but that those of a loop are together, with what it begins with and what marks its end."""
    units: list[list[Op]] = []
    inside: Loop | None = None
    for i, op in enumerate(ops):
        outer = op.inner[0] if op.inner else None
        begins = op.kind in ("carry", "stack") and outer is None
        if outer is not None:
            inside = outer
            units[-1].append(op)
        elif inside is not None and op.kind == "need" and i == inside.end:
            units[-1].append(op)
            inside = None
        elif begins and units and units[-1][-1].kind in ("carry", "stack") and units[-1][-1].loop is op.loop:
            units[-1].append(op)
        else:
            units.append([op])
    return units


def _renumbered(before: Sequence[Op], after: list[Op]) -> list[Op]:
    loops = {id(loop): loop for op in before for loop in (*op.loops, *([op.loop] if op.loop is not None else []))}
    ends = [(loop, before[loop.begin], before[loop.end]) for loop in loops.values()]
    for i, op in enumerate(after):
        op.time = i
    for loop, first, end in ends:
        loop.begin, loop.end = first.time, end.time
    return after
