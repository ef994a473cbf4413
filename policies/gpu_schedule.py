"""When XLA for GPUs makes what the loops inside a layer's step read, such as those over experts."""

from .buffers import Buffers
from .kernels import writes_exponentials
from .operations import Op, is_fill, root_of


def slow_exchanges(program: Buffers) -> dict[tuple, int]:
    """Where the last exchange of tokens of each layer's step is, by loops, if that goes over a slow network.

    The scheduler believes that it takes long, and leaves work for it to run beside: what was to be computed again for
    later use, such as attention's scores.
    """
    if not program.spread or writes_exponentials(program.capability):
        return {}
    return {op.loops: op.time for op in program.ops if op.name == "ragged_all_to_all" and op.inner}


def gathered_for_loops(ops: list[Op]) -> set[int]:
    """The gathers of a layer whose result loops inside the layer read, such as experts' weights, by id.

    The scheduler takes such a loop for little work, which hides no collective: all of them are made before the layer's
    first one.
    """
    roots = [root_of(op.inputs[0]) for op in ops if op.kind == "need" and op.inputs and (op.inner or op.outside)]
    roots = [root_of(root.inputs[0]) if root.name == "transpose" else root for root in roots]
    return {id(root) for root in roots if root.kind == "collective" and (root.inner or root.outside)}


def filled_for_loops(ops: list[Op]) -> dict[int, int]:
    """Where fills begin that more than one loop begins with, by id, inside another loop's step.

    There they are one fill, which is copied for each loop: all at once and before a layer's first one. What the last
    such loop begins with is the fill itself. (Outside of all loops the copies are fills of their own.)
    """
    found: dict[tuple, list[Op]] = {}
    for op in ops:
        if op.kind == "carry" and op.loops and is_fill(fill := root_of(op.inputs[0])) and fill.loops == op.loops:
            found.setdefault((op.loops, str(fill.aval), fill.cuts), []).append(fill)
    shared = [fills for fills in found.values() if len(fills) > 1]
    first: dict[tuple, int] = {}
    for fill in (fill for fills in shared for fill in fills):
        layer = fill.loops, fill.step_of
        first[layer] = min(first.get(layer, fill.time), fill.time)
    begins = {id(fill): first[fill.loops, fill.step_of] for fills in shared for fill in fills}
    return begins | {id(fills[-1]): begins[id(fills[0])] for fills in shared}


def tied(ops: list[Op]) -> set[int]:
    """What scatters outside loops start from, where their result is added to another gradient of the same array."""
    starts: dict[int, int] = {}  # by what is computed from a scatter alone: what the scatter starts from
    found = set()
    for op in ops:
        if op.loops:
            continue
        known = [starts[id(source)] for source in op.inputs if id(source) in starts]
        if op.kind == "in place":
            starts[id(op)] = id(root_of(op.inputs[0]))
        elif known and op.kind == "fused" and len(op.inputs) == 2:
            others = [source for source in op.inputs if id(source) not in starts]
            while others and root_of(others[0]).kind == "fused" and len(root_of(others[0]).inputs) == 1:
                others = [root_of(others[0]).inputs[0]]
            if others and root_of(others[0]).kind == "collective":
                found.add(known[0])
        elif known and op.kind in ("alias", "collective", "fused"):
            starts[id(op)] = known[0]
    return found
