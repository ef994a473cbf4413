"""Into how many parts each dimension of a result is cut, given the operands: what of it one device holds.

The counts go forward through a program, as XLA's partitioner takes shardings from operands to results where nothing
else is said. A count says nothing of the mesh axis behind it, and nothing is counted smaller than is known.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from .cuts import Cuts, of_sharding


def whole(aval: Any) -> Cuts:
    """Cuts of a value that each device has all of."""
    return (1,) * len(getattr(aval, "shape", ()))


def local_shape(aval: Any, cuts: Cuts) -> tuple[int, ...]:
    """The part of a value that one device holds; the last part of an uneven cut is padded."""
    return tuple(-(-size // part) for size, part in zip(aval.shape, cuts, strict=True))


def local_bytes(aval: Any, cuts: Cuts) -> int:
    """Bytes of the part of a value that one device holds; none for what has no dtype (a token, say)."""
    dtype = getattr(aval, "dtype", None)
    itemsize = getattr(dtype, "itemsize", 0)
    return math.prod(local_shape(aval, cuts)) * itemsize if itemsize else 0


def typed_cuts(aval: Any) -> Cuts | None:
    """Cuts by a value's own type, in meshes whose axes are Explicit; None where it says nothing."""
    cuts = of_sharding(getattr(aval, "sharding", None), len(getattr(aval, "shape", ())))
    return cuts if max(cuts, default=1) > 1 else None


def reshape_cuts(old: Sequence[int], new: Sequence[int], cuts: Cuts) -> Cuts:
    """Cuts after a reshape: those of dimensions that are merged or split go to the outermost ones they divide."""
    out, i, j = [1] * len(new), 0, 0
    while i < len(old) and j < len(new):
        first, last, left, right = i, j, old[i], new[j]
        while left != right:  # the smallest groups of dimensions with as many elements on both sides
            if left < right and i + 1 < len(old):
                i += 1
                left *= old[i]
            elif left > right and j + 1 < len(new):
                j += 1
                right *= new[j]
            else:
                return tuple(out)
        parts = math.prod(cuts[first : i + 1])
        if i == first and j == last:
            out[last] = parts
        else:
            for k in range(last, j + 1):
                share = math.gcd(parts, new[k])
                out[k], parts = share, parts // share
        i, j = i + 1, j + 1
    return tuple(out)


def _joined(aval: Any, operands: Sequence[Any], cuts: Sequence[Cuts]) -> Cuts:
    """Of an operation on elements: cut as any operand of the same rank is."""
    out = [1] * len(aval.shape)
    for operand, parts in zip(operands, cuts, strict=True):
        if len(parts) == len(out):
            for i, part in enumerate(parts):
                if operand.shape[i] == aval.shape[i]:
                    out[i] = max(out[i], part)
    return tuple(out)


def _dot(eqn: Any, operands: Sequence[Any], cuts: Sequence[Cuts]) -> Cuts:
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    batch = [max(cuts[0][i], cuts[1][j]) for i, j in zip(left_batch, right_batch, strict=True)]
    free_left = [part for i, part in enumerate(cuts[0]) if i not in (*left, *left_batch)]
    free_right = [part for i, part in enumerate(cuts[1]) if i not in (*right, *right_batch)]
    return (*batch, *free_left, *free_right)


def _broadcast(eqn: Any, operands: Sequence[Any], cuts: Sequence[Cuts]) -> Cuts:
    shape = eqn.outvars[0].aval.shape
    out = [1] * len(shape)
    for source, (target, part) in enumerate(zip(eqn.params["broadcast_dimensions"], cuts[0], strict=True)):
        if operands[0].shape[source] == shape[target]:
            out[target] = part
    return tuple(out)


def _reduce(eqn: Any, operands: Sequence[Any], cuts: Sequence[Cuts]) -> Cuts:
    return tuple(part for i, part in enumerate(cuts[0]) if i not in eqn.params["axes"])


def _gather(eqn: Any, operands: Sequence[Any], cuts: Sequence[Cuts]) -> Cuts:
    numbers, shape = eqn.params["dimension_numbers"], eqn.outvars[0].aval.shape
    indices = iter(cuts[1][:-1])
    gone = {*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ())}
    kept = iter([i for i in range(len(cuts[0])) if i not in gone])
    out = []
    for i, size in enumerate(shape):
        if i in numbers.offset_dims:
            source = next(kept)
            out.append(cuts[0][source] if operands[0].shape[source] == size else 1)
        else:
            out.append(next(indices, 1))
    return tuple(out)


def _squeeze(eqn: Any, operands: Sequence[Any], cuts: Sequence[Cuts]) -> Cuts:
    return reshape_cuts(operands[0].shape, eqn.outvars[0].aval.shape, cuts[0])


def _transpose(eqn: Any, operands: Sequence[Any], cuts: Sequence[Cuts]) -> Cuts:
    return tuple(cuts[0][i] for i in eqn.params["permutation"])


_RULES: dict[str, Callable[[Any, Sequence[Any], Sequence[Cuts]], Cuts]] = {
    "dot_general": _dot,
    "broadcast_in_dim": _broadcast,
    "gather": _gather,
    "reshape": _squeeze,
    "squeeze": _squeeze,
    "expand_dims": _squeeze,
    "transpose": _transpose,
}


def cuts_of(eqn: Any, cuts: Sequence[Cuts]) -> list[Cuts]:
    """Cuts of the results of an eqn without a body, from those of its operands."""
    operands = [atom.aval for atom in eqn.invars]
    results = []
    for var in eqn.outvars:
        aval, name = var.aval, eqn.primitive.name
        if not hasattr(aval, "shape"):
            results.append(())
        elif (typed := typed_cuts(aval)) is not None:
            results.append(typed)
        elif name in ("sharding_constraint", "reshard", "mesh_cast"):
            place = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
            results.append(of_sharding(place, len(aval.shape)))
        elif name in _RULES:
            results.append(_RULES[name](eqn, operands, cuts))
        elif name.startswith(("reduce_", "argm")) and "axes" in eqn.params:
            results.append(_reduce(eqn, operands, cuts))
        else:
            results.append(_joined(aval, operands, cuts))
    return [c if len(c) == len(whole(v.aval)) else whole(v.aval) for c, v in zip(results, eqn.outvars, strict=True)]


def spec_cuts(mesh: Any, spec: Any, ndim: int) -> Cuts:
    """Cuts by a PartitionSpec over a mesh: of what goes into or comes out of a `shard_map`."""
    return of_sharding(_Place(mesh, spec), ndim)


class _Place:
    def __init__(self, mesh: Any, spec: Any):
        self.mesh, self.spec = mesh, spec
