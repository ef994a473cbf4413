"""What one equation of a traced program costs by itself: its FLOPs, its memory traffic, what it receives."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from .jaxprs import subjaxprs

# The scope whose products are those of queries, keys, values and probabilities.
ATTENTION = "dot_product_attention"

GROUPED = {"ragged_dot", "ragged_dot_general"}
# Nothing is computed or moved: other names, types, shapes or promises for the same bytes.
_FREE = {"name", "sharding_constraint", "reshard", "mesh_cast", "optimization_barrier", "pvary", "pbroadcast", "pcast",
         "stop_gradient", "reshape", "squeeze", "expand_dims", "bitcast_convert_type", "axis_index", "platform_index",
         "empty", "empty2", "create_token", "random_wrap", "random_unwrap"}  # fmt: skip
# Bytes are moved and nothing is computed.
_MOVES = {"broadcast_in_dim", "iota", "transpose", "rev", "concatenate", "pad", "copy", "copy_p", "device_put",
          "slice", "dynamic_slice", "split", "unstack", "gather", "dynamic_update_slice", "scatter", "get",
          "swap"}  # fmt: skip
# Of their first operand only as much is read as comes out.
_PICKS = {"slice", "dynamic_slice", "gather"}
# Written into their first operand, in place.
_WRITES = {"dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter-min",
           "scatter_min", "scatter-max", "scatter_max", "scatter-sub", "scatter_sub"}  # fmt: skip
_REDUCTIONS = {"reduce", "reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or",
               "reduce_xor", "argmax", "argmin", "top_k", "approx_top_k"}  # fmt: skip
_ALL_REDUCES = {"psum", "psum2", "psum_invariant", "unreduced_psum", "pmax", "pmin"}
_REDUCE_SCATTERS = {"reduce_scatter", "psum_scatter", "unreduced_reduce_scatter"}
_ALL_GATHERS = {"all_gather", "all_gather_invariant", "all_gather_reduced"}
_EXCHANGES = {"all_to_all", "ragged_all_to_all", "ppermute"}
_COLLECTIVES = _ALL_REDUCES | _REDUCE_SCATTERS | _ALL_GATHERS | _EXCHANGES


@dataclasses.dataclass(frozen=True)
class Cost:
    """What something costs one device. Costs add up, and can be multiplied by a number.

    - `matmul`: FLOPs of `dot_general`, 2 m n k, and of convolutions, outside of attention.
    - `attention`: those of products inside the scope `dot_product_attention`, whatever a mask hides.
    - `grouped`: those of grouped matmuls, 2 for each row and each element of its expert's matrix.
    - `elementwise`: all other FLOPs: one for each element of a result, exponentials and comparisons like sums; one
        for each element that a reduction reads; n log2 n for sorting n. None for what only moves.
    - `read_bytes`, `written_bytes`: device memory traffic if no two equations were fused: inputs and outputs, but of
        what is sliced, gathered from or updated in place only the part that is touched. Scalars don't count, nor does
        what is in host memory.
    - `gathered`, `reduced`, `exchanged`: bytes that the device receives in all-gathers; in all-reduces and
        reduce-scatters; and in all-to-alls and permutations.
    - `uncertain`: whether a loop whose trips can't be read off the program is in it, counted once.
    """

    matmul: int | float = 0
    attention: int | float = 0
    grouped: int | float = 0
    elementwise: int | float = 0
    read_bytes: int | float = 0
    written_bytes: int | float = 0
    gathered: int | float = 0
    reduced: int | float = 0
    exchanged: int | float = 0
    uncertain: bool = False

    @property
    def flops(self) -> int | float:
        return self.matmul + self.attention + self.grouped + self.elementwise

    @property
    def bytes(self) -> int | float:
        """Device memory traffic, both ways."""
        return self.read_bytes + self.written_bytes

    @property
    def received(self) -> int | float:
        """Bytes from other devices."""
        return self.gathered + self.reduced + self.exchanged

    def __add__(self, other: "Cost") -> "Cost":
        sums = {name: getattr(self, name) + getattr(other, name) for name in _NUMBERS}
        return Cost(**sums, uncertain=self.uncertain or other.uncertain)

    def __mul__(self, times: int | float) -> "Cost":
        return Cost(**{name: times * getattr(self, name) for name in _NUMBERS}, uncertain=self.uncertain)

    __rmul__ = __mul__


_NUMBERS = tuple(field.name for field in dataclasses.fields(Cost) if field.name != "uncertain")


def leaf(eqn: Any, within: str, manual: dict[str, int], fill: Mapping[int, int | float]) -> Cost:
    """What an equation costs that holds no others, on the shapes that it has.

    `within` is its full name stack, `manual` the mesh axes that its collectives may be over, with their sizes, and
    `fill` as for `costs.cost_of`.
    """
    name = eqn.primitive.name
    if name in _FREE:
        return Cost()
    read, written = traffic(eqn)
    moved = Cost(read_bytes=read, written_bytes=written)
    if name == "dot_general":
        return moved + product(within, _dot_flops(eqn))
    if name == "conv_general_dilated":
        kernel, spec = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec
        return moved + product(within, 2 * _size(eqn.outvars[0]) * math.prod(kernel) / kernel[spec[0]])
    if name in GROUPED:
        rows, flops = _grouped_flops(eqn)
        return moved + Cost(grouped=flops * fill.get(rows, 1.0))
    if name in _COLLECTIVES:
        return moved + _collective(eqn, _parts(eqn, manual))
    return moved + Cost(elementwise=_other_flops(eqn))


def product(within: str, flops: int | float) -> Cost:
    """FLOPs of a product of matrices, by the name stack that it is in."""
    return Cost(**{"attention" if ATTENTION in within else "matmul": flops})


def ring(parts: int) -> float:
    """The share of an array that a device receives in one round of a ring of `parts`: all but its own part."""
    return (parts - 1) / parts


def is_leaf(eqn: Any) -> bool:
    """Whether an equation counts as one, though it may have a jaxpr that says how it combines two elements."""
    return eqn.primitive.name in _WRITES | _REDUCTIONS or next(subjaxprs(eqn), None) is None


def _size(atom: Any) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))


def _bytes(atom: Any) -> int:
    """What device memory holds of a value; nothing for scalars, literals and what is on the host."""
    on_host = getattr(atom.aval, "memory_space", None) == jax.memory.Space.Host
    if hasattr(atom, "val") or on_host or not getattr(atom.aval, "shape", ()):
        return 0
    return _size(atom) * atom.aval.dtype.itemsize


def traffic(eqn: Any) -> tuple[int, int]:
    """Bytes that an equation reads and writes on its own."""
    name = eqn.primitive.name
    operands = {id(atom): atom for atom in eqn.invars}.values()  # one that is there twice is read once
    read, written = sum(map(_bytes, operands)), sum(map(_bytes, eqn.outvars))
    if name == "device_put" and read and written:
        return 0, 0  # where it is already
    if name in _PICKS:
        return written + sum(map(_bytes, eqn.invars[1:])), written
    if name in _WRITES:
        update = _bytes(eqn.invars[1] if name == "dynamic_update_slice" else eqn.invars[2])
        before = 0 if name in ("dynamic_update_slice", "scatter") else update
        return sum(map(_bytes, eqn.invars[1:])) + before, update
    return read, written


def _dot_flops(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    return 2 * _size(eqn.outvars[0]) * math.prod(left[i] for i in contracted)


def _grouped_flops(eqn: Any) -> tuple[int, int]:
    """The rows of a grouped matmul, and what it takes if all of them are in use."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    left, right = (atom.aval.shape for atom in eqn.invars[:2])
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    once = {*contracted, *batch, *numbers.rhs_group_dimensions}
    wide = math.prod(size for i, size in enumerate(right) if i not in once)
    return left[numbers.lhs_ragged_dimensions[0]], 2 * math.prod(left) * wide


def _other_flops(eqn: Any) -> int | float:
    name = eqn.primitive.name
    if name in _MOVES:
        return 0
    if name in _WRITES:
        return _size(eqn.invars[2])
    if name in _REDUCTIONS:
        return _size(eqn.invars[0])
    if name.startswith("reduce_window"):
        return _size(eqn.outvars[0]) * math.prod(eqn.params["window_dimensions"])
    if name == "sort":
        n = eqn.invars[0].aval.shape[eqn.params["dimension"]]
        return _size(eqn.invars[0]) * math.log2(max(n, 2))
    return sum(map(_size, eqn.outvars))


def _parts(eqn: Any, manual: dict[str, int]) -> int:
    """How many devices take part in a collective."""
    groups, size = eqn.params.get("axis_index_groups"), eqn.params.get("axis_size")
    if groups is not None or size is not None:
        return len(groups[0]) if groups is not None else int(size)
    names = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    names = names if isinstance(names, tuple) else (names,)
    unknown = [name for name in names if isinstance(name, str) and name not in manual]
    if unknown:
        raise ValueError(f"{eqn.primitive.name} over axis {unknown[0]!r}, whose size no mesh around it says")
    return math.prod(manual[name] for name in names if isinstance(name, str))


def _collective(eqn: Any, parts: int) -> Cost:
    """What a device receives if data goes around a ring, each round bringing all but one of `parts` parts."""
    name, share = eqn.primitive.name, ring(parts)
    taken, given = (sum(_size(a) * a.aval.dtype.itemsize for a in atoms) for atoms in (eqn.invars, eqn.outvars))
    if name in _ALL_REDUCES:
        return Cost(reduced=2 * share * taken)
    if name in _REDUCE_SCATTERS:
        return Cost(reduced=share * taken)
    if name in _ALL_GATHERS:
        return Cost(gathered=share * given)
    if name == "ppermute":
        return Cost(exchanged=taken)
    if name == "ragged_all_to_all":
        # One of the two buffers has room for the worst case, the other one for what is sent.
        rows, room = eqn.invars[0].aval, eqn.outvars[0].aval
        return Cost(exchanged=share * min(math.prod(rows.shape), math.prod(room.shape)) * rows.dtype.itemsize)
    return Cost(exchanged=share * taken)
