"""The command line, `overspill`: its commands are gathered here, and what they do is loaded when one runs."""

from typing import Annotated

import typer

from .. import __version__
from .command_memory import env, mesh, plan, prove, selftest
from .command_options import console
from .command_training import generate, train

app = typer.Typer(
    name="overspill",
    help="Models for JAX whose layers know where their activations wait: on the device, on the host, or nowhere.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(asked: bool) -> bool:
    if asked:
        typer.echo(f"overspill {__version__}")
        raise typer.Exit()
    return asked


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


# In the order in which `overspill --help` lists them; `models`, below, is the last.
for _command in (train, generate, mesh, plan, prove, env, selftest):
    app.command()(_command)


@app.command()
def models(
    names_only: Annotated[bool, typer.Option("--names", help="Only the names, one a line.")] = False,
) -> None:
    """List the models that can be built by name, with their sizes."""
    from ..policies.report import Table, format_bytes
    from .building import parameters
    from .registry import REGISTRY

    if names_only:
        for name in REGISTRY:
            typer.echo(name)
        return
    rows = []
    for name, config in REGISTRY.items():
        total, active, mtp = parameters(config)
        family = type(config).__name__.removesuffix("Config")
        rows.append(
            (name, family, config.num_hidden_layers, config.hidden_size, f"{total:,}", f"{active:,}",
             f"{mtp:,}" if mtp else "-", format_bytes(2 * (total + mtp)))
        )  # fmt: skip
    columns = ("model", "family", "layers", "hidden", "parameters", "active a token", "MTP", "bfloat16")
    console.print(Table(columns, rows))


def main() -> None:
    """The console script."""
    app()
