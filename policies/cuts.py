"""Into how many parts a traced value is cut over a mesh: what of it one device holds."""

import math
from typing import Any

from .jaxprs import Value

Cuts = tuple[int, ...]


def of_sharding(sharding: Any, ndim: int) -> Cuts:
    """For each dimension of an array at `sharding` how many parts it has; one each without a mesh."""
    mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", None)
    if mesh is None or spec is None:
        return (1,) * ndim
    parts = [part if isinstance(part, tuple) else () if part is None else (part,) for part in spec]
    counts = [math.prod(mesh.shape.get(axis, 1) for axis in part) for part in parts]
    return (*counts, *(1 for _ in range(ndim - len(counts))))


class Partition:
    """Reads how values are cut from the sharding constraints of a program, from its types and its arguments.

    Between these a value is taken to be cut as what it is computed from, along the dimensions that they have in
    common from the first on. Nothing is counted smaller than that: what isn't known to be cut is whole.
    """

    def __init__(self, devices: int = 1) -> None:
        self.devices = devices  # of the largest mesh seen
        self._known: dict[int, Cuts] = {}

    def see(self, sharding: Any) -> None:
        mesh = getattr(sharding, "mesh", None)
        if mesh is not None and mesh.shape:
            self.devices = max(self.devices, math.prod(mesh.shape.values()))

    def cuts(self, value: Value) -> Cuts:
        """For each dimension of `value` how many parts it has."""
        # Iterative, since values hang on one another through whole programs.
        todo = [value]
        while todo:
            node = todo[-1]
            if id(node) not in self._known:
                wanted = [v for v in self._needs(node) if id(v) not in self._known]
                if wanted:
                    todo.extend(wanted)
                    continue
                self._known[id(node)] = self._cuts(node)
            todo.pop()
        return self._known[id(value)]

    def bytes(self, value: Value) -> int:
        """What of `value` is on one device."""
        shape = [-(-size // part) for size, part in zip(value.shape, self.cuts(value), strict=True)]
        return math.prod(shape) * value.aval.dtype.itemsize

    def _stated(self, value: Value) -> Cuts | None:
        """What the program itself says about this very value."""
        ndim = len(value.shape)
        if value.primitive == "sharding_constraint":
            self.see(value.eqn.params["sharding"])
            return of_sharding(value.eqn.params["sharding"], ndim)
        if value.primitive == "shard_map":
            at = next((i for i, v in enumerate(value.eqn.outvars) if v.aval is value.aval), None)
            if at is not None:
                place = _Place(value.eqn.params["mesh"], value.eqn.params["out_specs"][at])
                self.see(place)
                return of_sharding(place, ndim)
        sharding = value.placed or getattr(value.aval, "sharding", None)
        if sharding is not None:
            self.see(sharding)
            cuts = of_sharding(sharding, ndim)
            if max(cuts, default=1) > 1:
                return cuts
        return None

    def _needs(self, value: Value) -> list[Value]:
        if self._stated(value) is not None:
            return []
        return [value.body] if value.body is not None else list(value.inputs)

    def _cuts(self, value: Value) -> Cuts:
        stated = self._stated(value)
        if stated is not None:
            return stated
        ndim = len(value.shape)
        if value.body is not None:
            inner, theirs = self._known[id(value.body)], len(value.body.shape)
            if theirs == ndim:
                return inner
            return (1, *inner) if theirs < ndim else inner[1:]  # stacked by a loop, or a slice that a loop runs over
        counts = [1] * ndim
        for source in value.inputs:
            for i, (mine, size, part) in enumerate(
                zip(value.shape, source.shape, self._known[id(source)], strict=False)
            ):
                if mine != size:
                    break
                counts[i] = max(counts[i], part)
        return tuple(counts)


class _Place:
    def __init__(self, mesh: Any, spec: Any):
        self.mesh, self.spec = mesh, spec
