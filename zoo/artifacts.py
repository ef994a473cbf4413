"""What a training run leaves behind besides its checkpoint: the loss curve as CSV and PNG, and a sample of text."""

import csv
import os
import pathlib
from collections.abc import Sequence

from .loop import Record

_COLUMNS = ("step", "loss", "mtp_loss", "balance_loss", "grad_norm", "tokens", "skipped", "tokens_per_second")


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file whole or not at all; what is no plain file, such as a pipe, is written to as it is."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def write_csv(path: pathlib.Path, records: Sequence[Record]) -> None:
    """One line a step: losses in nats, the gradient norm before clipping, tokens per second on the host."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        for record in records:
            values = [getattr(record, column) for column in _COLUMNS]
            # The first step's speed is not known: it compiles.
            writer.writerow(["" if value != value else value for value in values])
    os.replace(partial, path)


def write_curve(path: pathlib.Path, records: Sequence[Record], validation: Sequence[tuple[int, float]]) -> None:
    """The loss over steps as a PNG, with `validation` as `(step, nats)` on top. Needs matplotlib."""
    from matplotlib.figure import Figure  # not pyplot: no window system is asked for

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([r.step for r in records], [r.loss for r in records], label="training", linewidth=1)
    if any(r.mtp_loss for r in records):
        axes.plot(
            [r.step for r in records], [r.mtp_loss for r in records], label="one token further (MTP)", linewidth=1
        )
    if validation:
        axes.plot(*zip(*validation, strict=True), "o", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats a byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png", dpi=120)
    os.replace(partial, path)
