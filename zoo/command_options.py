"""What the commands of `overspill` share: where they print, how they refuse, options that several of them have."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

if sys.stdout is None:  # closed: there is nobody to print for
    sys.stdout = open(os.devnull, "w")
# Piped or logged, lines are wide enough for the tables: rich would take 80 columns.
_WIDTH = None if sys.stdout.isatty() else 140
console = Console(highlight=False, width=_WIDTH)
errors = Console(stderr=True, highlight=False)

# Help texts of options that several commands have.
RULE = (
    "What a logical axis is cut over, such as embed=fsdp+data; kv_heads= keeps that one whole on every device. May be "
    "repeated. All others are as the names of the mesh's axes say."
)
BATCH = "Sequences per step. By default one for each part that a batch is cut in."
ACCUMULATE = "Into how many micro-batches a batch is split, one after the other."
EXPERT_ROUNDS = (
    "In how many rounds a device's tokens are exchanged with its mixtures of experts' other devices: the buffers for "
    "what arrives are so many times smaller, and what the experts compute is recomputed."
)
STATE = "Where state lives: GLOB=host or GLOB=device, such as optimizer.*=host. May be repeated."
MESH = "Axes and how many devices each has, such as data=2,fsdp=4: data, fsdp, tensor, expert and sequence."

# Whole options.
Dtype = Annotated[
    str, typer.Option(help="What the model computes in: float32 or bfloat16 (with float32 master weights).")
]
Segments = Annotated[
    str, typer.Option(help="Layers that begin a new segment, such as 8,24: activations are placed by segment.")
]


@contextlib.contextmanager
def plain_errors(*more: type[Exception]) -> Iterator[None]:
    """What the user got wrong, and `more`, as one line and exit code 2 instead of a traceback."""
    try:
        yield
    except (ValueError, OSError, ModuleNotFoundError, *more) as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2) from None
