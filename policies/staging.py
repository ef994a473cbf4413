"""When device memory is fullest: the moments of a step, and how each depends on where activations wait."""

import dataclasses
from collections.abc import Mapping, Sequence

from .activation import Placement
from .liveness import Footprint, Moment
from .problem import Decision, Group, Phase


@dataclasses.dataclass(frozen=True)
class Reference:
    """A step's memory as simulated under one decision."""

    decision: Decision
    footprint: Footprint


def phases(
    groups: Sequence[Group], references: Sequence[Reference], gradients: Mapping[str, float], *, as_cut: bool
) -> tuple[Phase, ...]:
    """The moments of a step as sums over what is placed where.

    **Arguments:**

    - `references`: simulations under other decisions. The first is the base; of each of the others the memory that the
        sums don't explain is spread over what is placed otherwise in it, by size.
    - `gradients`: by stack, bytes of the gradients of one layer, which pile up during the backward pass.
    - `as_cut`: whether the groups are the segments of the simulated step, not parts that its stacks are yet to be cut
        into.
    """
    moments = references[0].footprint.moments
    if as_cut:
        return tuple(phase for moment in moments for phase in _of_segment(moment, groups, references))
    return tuple(phase for moment in moments for phase in _of_moment(moment, groups, references, gradients))


def _of_segment(moment: Moment, groups: Sequence[Group], references: Sequence[Reference]) -> list[Phase]:
    """The phase of a moment of a step that is cut like the groups."""
    way, _, where = moment.name.partition(" of ")
    own = next((g for g, group in enumerate(groups) if where and where in (_segment(group), group.name)), None)
    if own is None:
        return [_elsewhere(moment, groups, references)]
    return [_fitted(f"{way} of {groups[own].name}", moment.name, groups, range(own + 1), own, references, 0.0)]


def _elsewhere(moment: Moment, groups: Sequence[Group], references: Sequence[Reference]) -> Phase:
    """The phase of a moment in no group: in the passes everything that is kept is there, in the optimizer nothing."""
    way = moment.name.partition(" of ")[0]
    live = range(len(groups)) if way in ("loss", "forward", "backward") else ()
    return _fitted(moment.name, moment.name, groups, live, None, references, 0.0)


def _segment(group: Group) -> str:
    """What a group's activations are called by, as `moe_layers.segments.0`."""
    first = group.items[0].path.removeprefix(f"{group.stack}.").split(".") if group.items else []
    return ".".join([group.stack, *first[:2]]) if first[:1] == ["segments"] else group.stack


def _of_moment(
    moment: Moment, groups: Sequence[Group], references: Sequence[Reference], gradients: Mapping[str, float]
) -> list[Phase]:
    """The phases of a moment: one, or for a pass over a stack one for each of its groups."""
    way, _, where = moment.name.partition(" of ")
    inside = [g for g, group in enumerate(groups) if where and _covers(where, group)]
    if not inside:
        return [_elsewhere(moment, groups, references)]
    out = []
    for g in inside:
        # In the simulated step one loop runs all layers of the stack: gradients of all lie there from its start on.
        early = sum(groups[h].layers for h in inside if h < g) if way == "backward" else 0
        less = early * gradients.get(groups[g].stack, 0.0)
        name = f"{way} of {groups[g].name}"
        out.append(_fitted(name, moment.name, groups, list(range(g + 1)), g, references, less))
    return out


def _covers(where: str, group: Group) -> bool:
    return where == group.stack or where.startswith(f"{group.stack}.") or where == group.name


def _fitted(
    name: str, moment: str, groups: Sequence[Group], live: Sequence[int], own: int | None,
    references: Sequence[Reference], less: int | float,
) -> Phase:  # fmt: skip
    tables = {
        Placement.DEVICE: _table(groups, lambda g: float(groups[g].layers) if g in live else 0.0),
        # One layer's is on its way while the next one's is computed, and two are there when it comes back.
        Placement.HOST: _table(groups, lambda g: 1.0 if g == own else 0.0),
        Placement.RECOMPUTE: _table(groups, lambda g: 0.0),
    }
    base = references[0]
    fixed = _bytes(base.footprint, moment) - _sum(tables, base.decision)
    whole = range(len(groups))
    for other in references[1:]:
        found = _bytes(other.footprint, moment)
        changed = [
            (g, i) for g in whole for i, place in enumerate(other.decision[g])
            if place is not base.decision[g][i] and (g in live if place is Placement.DEVICE else g == own)
        ]  # fmt: skip
        kinds = {other.decision[g][i] for g, i in changed}
        size = sum(groups[g].items[i].bytes for g, i in changed)
        if len(kinds) != 1 or not size:
            continue
        (kind,) = kinds
        # All layers' stacks of one kind are alike: what is left is one layer's, in the block at work.
        rest = found - fixed - _sum(tables, other.decision)
        for g, i in changed:
            row = tables[kind][g]
            row[i] = max(row[i] + rest * groups[g].items[i].bytes / size, 0.0)
    frozen = {kind: tuple(map(tuple, table)) for kind, table in tables.items()}
    return Phase(name, fixed - less, frozen[Placement.DEVICE], frozen[Placement.HOST], frozen[Placement.RECOMPUTE])


def _table(groups: Sequence[Group], times) -> list[list[float]]:
    return [[times(g) * item.bytes for item in group.items] for g, group in enumerate(groups)]


def _sum(tables: Mapping[Placement, list[list[float]]], decision: Decision) -> int | float:
    return sum(tables[place][g][i] for g, row in enumerate(decision) for i, place in enumerate(row))


def _bytes(footprint: Footprint, moment: str) -> int | float:
    """What is in use at a moment; what always is where the step has no such moment."""
    found = [m.bytes for m in footprint.moments if m.name == moment]
    return float(max(found)) if found else float(footprint.arguments)
