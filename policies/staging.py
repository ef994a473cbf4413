"""When device memory is fullest: the moments of a step, and how each depends on where activations wait."""

import dataclasses
from collections.abc import Mapping, Sequence

from .activation import Placement
from .liveness import Footprint
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
    found: list[Phase] = []
    # What waits during the loss to be copied to the host waits during other groups' passes too.
    waits = _waiting(groups, references)
    for moment in references[0].footprint.moments:
        way, _, where = moment.name.partition(" of ")
        if as_cut:
            inside = [g for g, group in enumerate(groups) if where and _covers(where, group, _segment(group))][:1]
        else:
            inside = [g for g, group in enumerate(groups) if where and _covers(where, group, group.stack)]
        if not inside:
            # In the passes everything that is kept is there, in the optimizer nothing.
            live = range(len(groups)) if way in ("loss", "forward", "backward") else ()
            found.append(_fitted(moment.name, moment.name, groups, live, None, references, 0.0, 0.0))
        for g in inside:
            live = _filled(groups, g) if way == "forward" else range(g + 1)
            less = 0.0 if as_cut or way != "backward" else _unfilled(groups, g) * gradients.get(groups[g].stack, 0.0)
            found.append(
                _fitted(f"{way} of {groups[g].name}", moment.name, groups, live, g, references, less, waits)
            )
    return tuple(found)


def _segment(group: Group) -> str:
    """What a group's activations are called by, as `moe_layers.segments.0`."""
    first = group.items[0].path.removeprefix(f"{group.stack}.").split(".") if group.items else []
    return ".".join([group.stack, *first[:2]]) if first[:1] == ["segments"] else group.stack


def _covers(where: str, group: Group, path: str) -> bool:
    return where == path or where.startswith(f"{path}.") or where == group.name


def _filled(groups: Sequence[Group], own: int) -> list[int]:
    """The groups whose stacks are there in the forward pass of `own`: equal stacks of all loops are filled at once."""
    begun = {(group.stack, group.layers) for group in groups[: own + 1]}
    return [g for g, group in enumerate(groups) if (group.stack, group.layers) in begun]


def _unfilled(groups: Sequence[Group], own: int) -> int:
    """The layers before `own` in its stack whose gradients aren't there yet in its backward pass.

    In a step whose stack is yet to be cut one loop runs all layers: the gradients of all lie there from its start on.
    """
    begun = {group.layers for group in groups[own:] if group.stack == groups[own].stack}
    before = (group for group in groups[:own] if group.stack == groups[own].stack)
    return sum(group.layers for group in before if group.layers not in begun)


def _waiting(groups: Sequence[Group], references: Sequence[Reference]) -> float:
    """How much of what one layer of each group moves is on the device between its passes: a share."""
    if not any(moment.name == "loss" for moment in references[0].footprint.moments):
        return 0.0
    loss = _fitted("loss", "loss", groups, range(len(groups)), None, references, 0.0, 0.0)
    sizes = [sum(item.bytes for item in group.items if Placement.HOST in item.placements) for group in groups]
    return min(sum(map(sum, loss.host)) / sum(sizes), 1.0) if sum(sizes) else 0.0


def _fitted(
    name: str, moment: str, groups: Sequence[Group], live: Sequence[int], own: int | None,
    references: Sequence[Reference], less: int | float, waits: float,
) -> Phase:  # fmt: skip
    tables = {
        Placement.DEVICE: _table(groups, lambda g: float(groups[g].layers) if g in live else 0.0),
        # One layer's is on its way while the next one's is computed, and two are there when it comes back.
        Placement.HOST: _table(groups, lambda g: 1.0 if g == own else waits if own is not None and g < own else 0.0),
        Placement.RECOMPUTE: _table(groups, lambda g: 0.0),
    }
    base = references[0]
    fixed = _bytes(base.footprint, moment) - _sum(tables, base.decision)
    # All layers' stacks of one kind are alike: what is left is one layer's, in the block at work.
    spread = live if own is None else [own]
    for other in references[1:]:
        found = _bytes(other.footprint, moment)
        changed = [
            (g, i) for g in range(len(groups)) for i, place in enumerate(other.decision[g])
            if place is not base.decision[g][i] and g in (live if place is Placement.DEVICE else spread)
        ]  # fmt: skip
        kinds = {other.decision[g][i] for g, i in changed}
        size = sum(groups[g].items[i].bytes for g, i in changed)
        if len(kinds) != 1 or not size:
            continue
        (kind,) = kinds
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
