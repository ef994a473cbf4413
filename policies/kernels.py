"""Attention as XLA for GPUs makes kernels of it: softmax with its gradient, and products that go to cuBLAS.

**Softmax.** One kernel writes a softmax that is only read on (the forward pass), whatever the GPU. Where its gradient
is taken too, its exponentials have several readers: their sum, the quotient, and the gradient. XLA's cost model weighs
computing them again in each reader, from the same scores, against writing them once. Where memory is fast beside
arithmetic, as on data center GPUs of compute capability 10, they are written, and sums over rows are kernels of their
own, so that the gradient can take the exponentials' place; elsewhere each reader holds all of a row and starts from the
scores. Found by compiling attention's gradient, 512 to 16384 long, with XLA of JAX 0.10.2 and 0.12: for A100, H100,
H200 and RTX PRO 6000 exponentials are computed again, for B200, B300 and GB200 they are written. It is the ratio that
decides: for a GB200 with an H200's bandwidth they are computed again, for an H200 with a GB200's they are written.
(The passes are `softmax-rewriter-triton` and `priority-fusion`; the costs are in openxla/xla, xla/service/gpu/model.)

**Products.** Triton's kernel of a matrix product takes in the concatenation that makes an operand, such as the halves
of a rotary embedding, when all parts are whole tiles of 64. It can't along the contraction of two dimensions, which
the gradient of a key that several queries share is, over its queries' heads and places. That product then goes to
cuBLAS, for which the other operand, the gradient of all scores, is written once more, transposed.
"""

from collections.abc import Sequence
from typing import Any

from .local_sizes import local_shape
from .operations import Op

_TILE = 64  # parts of a concatenation that Triton's products read in place are multiples of this
_DEPTH = 64  # operations that are looked through, at most


def writes_exponentials(capability: tuple[int, int] | None) -> bool:
    """Whether XLA for a GPU of this compute capability writes a softmax's exponentials for its gradient."""
    return capability is not None and capability[0] == 10


def write_exponentials(ops: Sequence[Op]) -> None:
    """Has the exponentials of each softmax that a gradient reads written, and sums over rows after them set apart."""
    readers: dict[int, list[Op]] = {}
    for op in ops:
        if op.kind in ("fused", "reduce"):
            for source in {id(root): root for root in map(_root, op.inputs)}.values():
                readers.setdefault(id(source), []).append(op)
    for op in ops:
        if op.kind == "fused" and op.name == "exp" and _shifted(op) and _has_gradient(readers.get(id(op), [])):
            op.kind, op.apart = "reduce", True  # it reads whole rows of scores, and what is before them is part of it
            todo, seen = [op], set()
            while todo:
                for reader in readers.get(id(todo.pop()), []):
                    if id(reader) in seen:
                        continue
                    seen.add(id(reader))
                    if reader.kind == "reduce":
                        reader.apart = True
                    else:
                        todo.append(reader)


def transposed(eqn: Any, operands: Sequence[Op]) -> Op | None:
    """The operand of a product that is transposed for cuBLAS, if any is."""
    (left, right), _ = eqn.params["dimension_numbers"]
    for one, dims, other in ((operands[0], left, operands[1]), (operands[1], right, operands[0])):
        shape = local_shape(one.aval, one.cuts)
        if sum(shape[i] > 1 for i in dims) > 1 and _concatenated(one):
            return other
    return None


def _root(op: Op) -> Op:
    while op.kind == "alias":
        op = op.inputs[0]
    return op


def _concatenated(op: Op) -> bool:
    """Whether a product's kernel would take in a concatenation of whole tiles as this operand."""
    for _ in range(_DEPTH):
        op = _root(op)
        if op.name == "concatenate":
            whole = op.aval.shape
            axes = [i for i, size in enumerate(whole) if any(part.aval.shape[i] != size for part in op.inputs)]
            return all(part.aval.shape[i] % _TILE == 0 for part in op.inputs for i in axes)
        if op.kind != "fused" or len(op.inputs) != 1:
            return False
        op = op.inputs[0]
    return False


def _shifted(op: Op) -> bool:
    """Whether it is of what is left of values less their rows' maxima."""
    less = _root(op.inputs[0])
    return less.name == "sub" and _is_row(_root(less.inputs[1]), "reduce_max")


def _is_row(op: Op, name: str) -> bool:
    """Whether it is a reduction of that name, or computed from one, spread over its rows."""
    for _ in range(_DEPTH):
        if op.name == name:
            return True
        if op.kind != "fused" or op.name not in ("broadcast_in_dim", "max", "convert_element_type"):
            return False
        op = next((root for root in map(_root, op.inputs) if root.kind != "constant"), op.inputs[0])
    return False


def _has_gradient(readers: Sequence[Op]) -> bool:
    """Whether more reads exponentials than a softmax does: their sum, and their quotient by it."""
    summed = [op for op in readers if op.name == "reduce_sum"]
    divided = [op for op in readers if op.name == "div" and _is_row(_root(op.inputs[1]), "reduce_sum")]
    return bool(summed and divided) and len(readers) > len(summed) + len(divided)
