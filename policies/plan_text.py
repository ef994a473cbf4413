"""What a plan says of itself in words: a summary, a sentence for each activation, and what else there was."""

import html
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table as RichTable

from .activation import Placement
from .plan_reasons import format_seconds, host_limit
from .plan_values import Baseline, baselines, fits, links, share, times, unavoidable
from .problem import Number
from .report import Table, format_bytes

if TYPE_CHECKING:
    from .planned import Piece, Plan


class Explanation(Table):
    """A table whose columns from `wrapped` on hold sentences, which take several lines where one has no room."""

    def __init__(self, *args: Any, wrapped: int = -1, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.wrapped = wrapped

    def __rich__(self) -> Any:
        shown = super().__rich__()
        table = shown if isinstance(shown, RichTable) else shown.renderables[0]
        for column in table.columns[self.wrapped :]:
            column.no_wrap = False
        return shown

    def _repr_html_(self) -> str:
        # Lines of code stay lines.
        footer = html.escape(self.footer)
        return super()._repr_html_().replace(f"<p>{footer}</p>", f"<p>{footer.replace(chr(10), '<br>')}</p>")


def explanation(plan: "Plan") -> Table:
    """A row for each activation of each piece: where it waits, and why."""
    rows = [
        (
            one.path,
            "-" if one.bytes is None else format_bytes(one.bytes),
            "-" if one.placement is None else _WORDS[one.placement],
            one.why,
        )
        for one in plan.choices
    ]
    footer = (
        "each is held against its alternatives in all layers of its segment, everything else as planned; slower or "
        "faster is the step, other times are of a layer"
    )
    return Explanation(
        ("activation", "one layer", "waits", "why"), rows, title="Why each activation waits where it does",
        footer=footer, paths=True,
    )  # fmt: skip


def alternatives(plan: "Plan") -> Table:
    """Time and memory of simple decisions beside the plan's."""
    rows = [
        (
            one.name,
            _step(one.outcome.seconds),
            "-" if one.decision is None else _against(one.outcome.seconds, plan.seconds),
            format_bytes(one.outcome.device_bytes),
            format_bytes(one.outcome.host_bytes),
            _fits(one),
        )
        for one in baselines(plan)
    ]
    columns = ("activations", "step", "against the plan", "device memory", "host memory", "fits")
    footer = "what can't wait there waits on the device; recomputed is all but what loops keep"
    return Table(columns, rows, title="Beside the plan", footer=footer)


def _against(seconds: Number, planned: Number) -> str:
    if seconds == planned or abs(seconds - planned) <= 1e-9 * planned:
        return "as long"
    more = seconds / planned - 1 if planned else math.inf
    return f"{abs(more):.1%} {'longer' if more > 0 else 'shorter'}" if math.isfinite(more) else "never ends"


def _fits(one: Baseline) -> str:
    short = [
        f"{format_bytes(size)} of {name} over"
        for name, size in (("device memory", one.device_over), ("host memory", one.host_over))
        if size
    ]
    return f"does not fit: {', '.join(short)}" if short else "yes"


def summary(plan: "Plan") -> tuple[Table, Table]:
    """What a step takes, and the pieces with their placements."""
    outcome, limits, spent = plan.outcome, plan.problem.limits, times(plan)
    speed = f"{plan.flops_per_second / 1e12:,.1f} TFLOP/s"
    rows: list[tuple[str, str, str]] = [
        ("step", _step(plan.seconds), "predicted" if fits(plan) else "predicted; it does NOT fit"),
        ("speed of a device", speed, f"{plan.mfu:.1%} of the peak in {plan.dtype} (MFU)"),
    ]
    if plan.tokens_per_second is not None:
        rows.append(("tokens", f"{plan.tokens_per_second:,.0f} tokens/s", f"{plan.tokens:,} a step, on all devices"))
    limit, name = host_limit(plan.problem)
    host = "the limit is the host's " + name if math.isfinite(limit) else ""
    fullest = f"fullest in {outcome.phase}; {_known(plan)}"
    rows += [
        ("device memory", _of(outcome.device_bytes, limits.device_bytes), fullest),
        ("host memory", _of(outcome.host_bytes, limit), host),
    ]
    rows += [
        (
            f"link {one.way}",
            f"{_percent(one.share)} busy",
            f"in the {one.during} pass; most in {one.fullest}: {_percent(one.fullest_share)} of its computation",
        )
        for one in links(plan)
    ] or [("link", "0% busy", "nothing is moved")]
    rows.append(("binding", ", ".join(plan.binding), _binding_note(plan)))
    always = unavoidable(plan)
    notes = {"computed again": f"; {format_seconds(always)} of it whatever is kept"} if always else {}
    what = ("forward pass", "backward pass", "computed again", "waiting for the link", "outside of the layers")
    rows += [
        (f"time: {name}", format_seconds(seconds), _percent(share(seconds, plan.seconds), 1) + notes.get(name, ""))
        for name, seconds in zip(what, spent, strict=True)
    ]
    title = f"Plan for {plan.devices:,} x {plan.hardware.description}"
    kinds = (Placement.DEVICE, Placement.HOST, Placement.RECOMPUTE)
    pieces = [
        (label, *(" ".join(globs(piece.placements, kind, _others(plan, piece))) or "-" for kind in kinds))
        for piece, label in zip(plan.pieces, labels(plan), strict=True)
    ]
    columns = ("layers", *map(_WORDS.__getitem__, kinds))
    placed = Explanation(columns, pieces, title="Activations", footer=code(plan), wrapped=1)
    return Table(("of a step", "", ""), rows, title=title), placed


def _known(plan: "Plan") -> str:
    """Where device memory is known from."""
    if not plan.calibrated:
        return "simulated"
    return f"the compiler says so (simulated: {format_bytes(plan.simulated_bytes)})"


def _binding_note(plan: "Plan") -> str:
    """What a little more of what binds would save."""
    if not fits(plan) or plan.binding == ("compute",):
        return ""
    gain = plan.marginal()
    more = ("1 GiB more on the device", "1 GiB more on the host", "a 10% faster link")
    said = [f"{what} saves {format_seconds(seconds)}" for what, seconds in zip(more, gain, strict=True) if seconds]
    return "; ".join(said)


def code(plan: "Plan") -> str:
    """How a model is placed as planned: one line, or two where its layers have to be cut otherwise."""
    cut = any(
        tuple(piece.layers for piece in plan.pieces if piece.stack == stack.path) not in ((), stack.lengths)
        for stack in plan.stacks
    )
    lines = [f"model = zoo.resegment(model, {plan.boundaries})"] if cut else []
    return "\n".join([*lines, "model = policies.place(model, plan)"])


def labels(plan: "Plan") -> tuple[str, ...]:
    """What each piece is called: its stack and its layers, counted through all stacks."""
    found, done = [], {}
    for piece in plan.pieces:
        stack = next((s for s in plan.stacks if s.path == piece.stack), None)
        first = done.get(piece.stack, 0)
        done[piece.stack] = first + piece.layers
        if stack is not None:
            found.append(stack.label(stack.start + first, piece.layers))
        elif len(piece.groups) == 1:
            found.append(piece.groups[0].name)
        else:
            found.append(f"{piece.groups[0].name} to {piece.groups[-1].name}")
    return tuple(found)


def globs(placements: Mapping[str, Placement], kind: Placement, others: Iterable[str] = ()) -> list[str]:
    """The paths that are placed as `kind`, in short: `attention.*` where all under `attention` are.

    `others` are paths that are neither, and that no glob may cover.
    """
    rest = [path for path, place in placements.items() if place is kind]
    wrong = [path for path, place in placements.items() if place is not kind] + list(others)
    found: list[str] = []
    for path in rest:
        parts = path.split(".")
        for depth in range(len(parts)):
            prefix = "".join(f"{part}." for part in parts[:depth])
            covered = [other for other in rest if other.startswith(prefix)]
            if len(covered) > 1 and not any(other.startswith(prefix) for other in wrong):
                path = f"{prefix}*"
                break
        if path not in found:
            found.append(path)
    return found


def _others(plan: "Plan", piece: "Piece") -> list[str]:
    """Activations of a piece that aren't needed, and that a rule may not have recomputed."""
    prefix = piece.path("")
    kept = [path for path, place in plan.rules.items() if place is not Placement.RECOMPUTE and path.startswith(prefix)]
    return [rest for rest in (path.removeprefix(prefix) for path in kept) if rest not in piece.placements]


_WORDS = {Placement.DEVICE: "device", Placement.HOST: "host", Placement.RECOMPUTE: "recomputed"}


def _step(seconds: Number) -> str:
    return f"{1e3 * seconds:,.1f} ms" if 1e-3 <= seconds < math.inf else format_seconds(seconds)


def _percent(part: Number, digits: int = 0) -> str:
    return f"{part:.{digits}%}" if math.isfinite(part) else "more than 100%"


def _of(count: Number, limit: Number) -> str:
    return f"{format_bytes(count)} of {format_bytes(limit)}" if math.isfinite(limit) else format_bytes(count)
