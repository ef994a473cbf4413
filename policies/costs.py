"""What the equations of a traced program cost one device: FLOPs by kind of work, memory traffic, and what is sent.

Nothing is compiled or measured: shapes in a jaxpr say it all but for the trips of loops that end by their data.
"""

import dataclasses
import math
import types
from collections.abc import Iterator, Mapping
from typing import Any

from .cuts import Cuts, Partition, of_sharding
from .equations import GROUPED, Cost, is_leaf, leaf, product, ring, traffic
from .jaxprs import Value, subjaxprs


def cost_of(
    eqn: Any,
    devices: int = 1,
    *,
    platform: str = "cuda",
    fill: Mapping[int, int | float] | None = None,
    scope: str = "",
    within: str = "",
) -> Cost:
    """What one equation costs each of `devices`, with all that is inside of it.

    Work outside of `jax.shard_map` is taken to be shared equally, whatever is cut. The body of a `shard_map` is what
    one device does; where it leaves mesh axes to the compiler, the devices along these share it. That holds for an
    equation out of such a body too: its types name the axes.

    Calls cost what they call, a scan its body times its length, and a `while` loop its body and test times its trips,
    where it counts from one literal to another; others count once and are `uncertain`. What a data-dependent `cond`
    costs is its dearest branch, and where a program differs by platform, that of `platform`. Grouped matmuls that are
    written differently by platform cost what the branch with `ragged_dot` says: loops over the rows of experts depend
    on the data, and in sum do that.

    **Arguments:**

    - `platform`: `"cuda"`, `"rocm"`, `"tpu"` or `"cpu"`.
    - `fill`: the share of a buffer's rows that is expected to be in use, by their number, as `expert_fill` gives it:
        FLOPs of grouped matmuls of such buffers are multiplied by it. Bytes aren't: buffers are touched in full.
    - `scope`: only what a name scope that contains this text is counted.
    - `within`: the name stack around the equation, for one out of an inner jaxpr.

    Collectives that the compiler puts in are not included: see `gathered_bytes` and `summed_bytes`. Raises ValueError
    for a collective over a mesh axis of unknown size, and where a program has no branch for `platform`.
    """
    return _Reader(devices, platform, fill or {}, scope).eqn(eqn, within, {})


def total(
    jaxpr: Any,
    devices: int = 1,
    *,
    platform: str = "cuda",
    fill: Mapping[int, int | float] | None = None,
    scope: str = "",
    within: str = "",
) -> Cost:
    """What all equations of a jaxpr, open or closed, cost each of `devices`; arguments as for `cost_of`."""
    return _Reader(devices, platform, fill or {}, scope).jaxpr(getattr(jaxpr, "jaxpr", jaxpr), within, {})


def expert_fill(jaxpr: Any) -> dict[int, float]:
    """The share of each buffer for rows from other devices that is in use when experts are equally loaded.

    By the buffer's rows, which are the most that can arrive. `ragged_all_to_all` says it: as many rows arrive on
    average as are sent. Found at any depth of a jaxpr, open or closed, whichever platform the exchange is for.
    """
    found: dict[int, float] = {}
    for eqn in _equations(getattr(jaxpr, "jaxpr", jaxpr)):
        if eqn.primitive.name == "ragged_all_to_all":
            sent, room = eqn.invars[0].aval.shape[0], eqn.outvars[0].aval.shape[0]
            if sent < room:
                found[room] = max(found.get(room, 0.0), sent / room)
    return found


def gathered_bytes(value: Value, partition: Partition) -> int | float:
    """Bytes that each device receives before it has what the equation that made `value` asks for.

    That is its part of a value under a sharding constraint, less what it holds of it already as the constraint's
    input is cut; and of the arguments of a `shard_map`, on any of its results. Zero for other equations. Results of
    one equation give the same number: count it once.
    """
    if value.primitive in ("sharding_constraint", "reshard"):
        params = value.eqn.params
        place = params["sharding"] if "sharding" in params else params["dst_sharding"]
        return _missing(value.inputs[0], partition, of_sharding(place, len(value.shape)))
    if value.primitive == "shard_map":
        if len(value.inputs) == 1 and value.body is value.inputs[0]:  # an argument, seen inside
            (outside,) = value.inputs
            cuts = tuple(a // max(b, 1) for a, b in zip(outside.shape, value.shape, strict=True))
            return _missing(outside, partition, cuts)
        mesh = value.eqn.params["mesh"]
        return sum(
            _missing(source, partition, of_sharding(types.SimpleNamespace(mesh=mesh, spec=spec), len(source.shape)))
            for source, spec in zip(value.inputs, value.eqn.params["in_specs"], strict=True)
        )
    return 0.0


def summed_bytes(value: Value, partition: Partition, *, scattered: bool = False) -> int | float:
    """Bytes that each device receives to sum `value` over the devices that hold different parts of what it sums over.

    For products of matrices and for sums whose contracted dimensions are cut; zero for others, and inside
    `shard_map`, where programs sum by themselves. That is an all-reduce of what the device holds of `value`; half of
    it with `scattered`, for a value that is cut over these devices right away.
    """
    if value.eqn is None or _manual_axes(value.eqn):
        return 0.0
    if value.primitive == "dot_general":
        (left, right), _ = value.eqn.params["dimension_numbers"]
        mine, theirs = (partition.cuts(v) for v in value.inputs)
        parts = math.prod(max(mine[i], theirs[j]) for i, j in zip(left, right, strict=True))
    elif value.primitive == "reduce_sum":
        mine = partition.cuts(value.inputs[0])
        parts = math.prod(mine[i] for i in value.eqn.params["axes"])
    else:
        return 0.0
    return (1 if scattered else 2) * ring(parts) * partition.bytes(value)


def _missing(source: Value, partition: Partition, cuts: Cuts) -> int | float:
    """Bytes of its part of `source`, cut like this, that a device doesn't hold as `source` is cut."""
    held = math.prod(min(1.0, new / old) for new, old in zip(cuts, partition.cuts(source), strict=True))
    size = math.prod(-(-n // part) for n, part in zip(source.shape, cuts, strict=True))
    return (1 - held) * size * source.aval.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class _Reader:
    devices: int
    platform: str
    fill: Mapping[int, int | float]
    scope: str

    def jaxpr(self, jaxpr: Any, within: str, manual: dict[str, int]) -> Cost:
        return sum((self.eqn(eqn, within, manual) for eqn in jaxpr.eqns), Cost())

    def eqn(self, eqn: Any, within: str, manual: dict[str, int]) -> Cost:
        # Name stacks inside of an equation begin anew.
        within = f"{within}/{eqn.source_info.name_stack}"
        manual = manual | _manual_axes(eqn)
        name, subs = eqn.primitive.name, list(subjaxprs(eqn))
        if is_leaf(eqn):
            return self._shared(leaf(eqn, within, manual, self.fill), manual) if self.scope in within else Cost()
        if name == "scan":
            return self.jaxpr(subs[0], within, manual) * int(eqn.params["length"])
        if name == "while":
            trips, once = _trips(eqn), sum((self.jaxpr(sub, within, manual) for sub in subs), Cost())
            return dataclasses.replace(once, uncertain=True) if trips is None else once * trips
        if name == "cond":
            return self._cond(eqn, subs, within, manual)
        if name == "pallas_call":
            return self._kernel(eqn, subs[0], within, manual)
        if name == "shard_map":
            mesh = eqn.params["mesh"]
            manual = manual | {a: mesh.shape[a] for a in eqn.params.get("newly_manual_axes", mesh.axis_names)}
        return sum((self.jaxpr(sub, within, manual) for sub in subs), Cost())

    def _cond(self, eqn: Any, branches: list[Any], within: str, manual: dict[str, int]) -> Cost:
        platforms = eqn.params.get("branches_platforms")
        if platforms is None:
            costs = [self.jaxpr(branch, within, manual) for branch in branches]
            return max(costs, key=lambda cost: (cost.flops, cost.bytes, cost.received))
        chosen = next((b for b, names in zip(branches, platforms, strict=True) if self.platform in (names or ())), None)
        if chosen is None:
            chosen = next((b for b, names in zip(branches, platforms, strict=True) if names is None), None)
        if chosen is None:
            raise ValueError(f"the program has branches for {', '.join(sum(platforms, ()))}, none for {self.platform}")
        if not _is_grouped(chosen):
            chosen = next(filter(_is_grouped, branches), chosen)
        return self.jaxpr(chosen, within, manual)

    def _kernel(self, eqn: Any, body: Any, within: str, manual: dict[str, int]) -> Cost:
        """A Pallas kernel: its own estimate of FLOPs, or its body at every point of the grid; operands move once."""
        if self.scope not in within:
            return Cost()
        estimate, grid = eqn.params.get("cost_estimate"), eqn.params["grid_mapping"].grid
        read, written = traffic(eqn)
        moved = self._shared(Cost(read_bytes=read, written_bytes=written), manual)
        if estimate is not None:
            return moved + self._shared(product(within, estimate.flops), manual)
        known = all(isinstance(size, int) for size in grid)
        inside = self.jaxpr(body, within, manual) * (math.prod(grid) if known else 1)
        inside = dataclasses.replace(inside, read_bytes=0, written_bytes=0, uncertain=inside.uncertain or not known)
        return moved + inside

    def _shared(self, cost: Cost, manual: dict[str, int]) -> Cost:
        """Each device's share of what all devices along the axes that aren't manual do."""
        return cost * (1 / max(1.0, self.devices / math.prod(manual.values())))


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in subjaxprs(eqn):
            yield from _equations(sub)


def _is_grouped(jaxpr: Any) -> bool:
    return any(eqn.primitive.name in GROUPED for eqn in _equations(jaxpr))


def _manual_axes(eqn: Any) -> dict[str, int]:
    """The mesh axes, and their sizes, along which an equation sees one device's part: types in `shard_map` say it."""
    for atom in (*eqn.outvars, *eqn.invars):
        mesh = getattr(getattr(atom.aval, "sharding", None), "mesh", None)
        if mesh is not None and mesh.manual_axes:
            return {axis: mesh.shape[axis] for axis in mesh.manual_axes}
    return {}


def _trips(eqn: Any) -> int | None:
    """How often a `while` loop runs that counts a carry up from one literal to another; None for others."""
    test, body = (getattr(eqn.params[key], "jaxpr", eqn.params[key]) for key in ("cond_jaxpr", "body_jaxpr"))
    outer, own = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    if len(test.eqns) != 1 or test.eqns[0].primitive.name != "lt" or test.eqns[0].outvars != list(test.outvars):
        return None
    places = {var: i for i, var in enumerate(test.invars)}

    def literal(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else None

    def carried(atom: Any) -> int | None:
        return None if hasattr(atom, "val") or places[atom] < outer else places[atom] - outer

    counter, limit = test.eqns[0].invars
    at, fixed = carried(counter), carried(limit)
    if at is None:
        return None
    if fixed is not None:
        unchanged = body.outvars[fixed] is body.invars[own + fixed]
        stop = literal(eqn.invars[outer + own + fixed]) if unchanged else None
    else:
        stop = literal(limit) if hasattr(limit, "val") else literal(eqn.invars[places[limit]])
    start, step = literal(eqn.invars[outer + own + at]), None
    for inner in body.eqns:
        if body.outvars[at] in inner.outvars and inner.primitive.name == "add":
            left, right = inner.invars
            step = literal(right) if left is body.invars[own + at] else None
    if start is None or stop is None or not step or step < 0:
        return None
    return max(0, math.ceil((stop - start) / step))
