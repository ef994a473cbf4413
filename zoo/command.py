"""The command line, `overspill`: a function for each command; the work is in rooms of its own."""

import contextlib
import pathlib
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from .. import __version__
from ..policies.accelerators import targets

app = typer.Typer(
    name="overspill",
    help="Models for JAX whose layers know where their activations wait: on the device, on the host, or nowhere.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
# Piped or logged, lines are wide enough for the tables: rich would take 80 columns.
_WIDTH = None if sys.stdout.isatty() else 140
console = Console(highlight=False, width=_WIDTH)
errors = Console(stderr=True, highlight=False)
_RULE = (
    "What a logical axis is cut over, such as embed=fsdp+data; kv_heads= keeps that one whole on every device. May be "
    "repeated. All others are as the names of the mesh's axes say."
)
_ACCUMULATE = "Into how many micro-batches a batch is split, one after the other."
_STATE = "Where state lives: GLOB=host or GLOB=device, such as optimizer.*=host. May be repeated."
_MESH = "Axes and how many devices each has, such as data=2,fsdp=4: data, fsdp, tensor, expert and sequence."
_TARGET = (
    f"What to compile for, which needn't be here: {', '.join(targets())}; those of TPUs also with the shape of a "
    "topology, such as tpu-v5p:4x4x8."
)
_Dtype = Annotated[
    str, typer.Option(help="What the model computes in: float32 or bfloat16 (with float32 master weights).")
]
_Segments = Annotated[
    str, typer.Option(help="Layers that begin a new segment, such as 8,24: activations are placed by segment.")
]
_BATCH = "Sequences per step. By default one for each part that a batch is cut in."


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


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """What the user got wrong, as one line and exit code 2 instead of a traceback."""
    try:
        yield
    except (ValueError, OSError, ModuleNotFoundError) as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2) from None


@app.command()
def train(
    model: Annotated[
        str, typer.Option(help="A model's name; `overspill models` lists them.")
    ] = "overspill-deepseek-tiny",
    data: Annotated[
        pathlib.Path | None,
        typer.Option(help="A text file or a folder of them. By default the Python standard library's source."),
    ] = None,
    out: Annotated[
        pathlib.Path | None,
        typer.Option(help="The folder to write to, which must not exist. By default runs/ and the time."),
    ] = None,
    resume: Annotated[
        pathlib.Path | None,
        typer.Option(help="A run's folder to go on from, with the same model and data. Placements may differ."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="How many steps the whole run has.")] = 440,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 4,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="The highest one, after warm-up.")] = 4e-3,
    placements: Annotated[
        list[str] | None,
        typer.Option(
            "--placements",
            "-p",
            help="Where activations wait: a preset's name or GLOB=PLACEMENT, where PLACEMENT is device, host or "
            "recompute. May be repeated; later ones win over earlier ones and over the device, where all begin. "
            "By default offload_all.",
        ),
    ] = None,
    segments: _Segments = "",
    dtype: _Dtype = "float32",
    seed: Annotated[int, typer.Option(min=0, help="Decides weights and the order of the data.")] = 0,
    prompt: Annotated[str, typer.Option(help="What the sample at the end continues.")] = "def ",
    sample: Annotated[int, typer.Option(min=0, help="Tokens of sample text at the end; 0 for none.")] = 200,
    mesh: Annotated[str, typer.Option(help=f"{_MESH} By default one device.")] = "",
    cpu_devices: Annotated[
        int, typer.Option(min=0, help="Take the CPU for so many devices, to try a mesh without accelerators.")
    ] = 0,
    rules: Annotated[list[str] | None, typer.Option("--rule", "-r", help=_RULE)] = None,
    accumulate: Annotated[int, typer.Option(min=1, help=_ACCUMULATE)] = 1,
    state_memory: Annotated[list[str] | None, typer.Option(help=_STATE)] = None,
) -> None:
    """Train a model on text, its activations placed as you say.

    Shows where every activation waits before the first step, and after compiling what the backward pass really
    keeps. At the end there are a checkpoint, the loss curve (PNG and CSV) and a sample of text in the output
    folder. Ctrl-C stops after the step at hand and saves.
    """
    from .run_options import Options
    from .running import prepare

    with _plain_errors():
        run = prepare(
            Options(
                model=model,
                data=data,
                out=out,
                resume=resume,
                steps=steps,
                batch_size=batch_size,
                sequence_length=sequence_length,
                learning_rate=learning_rate,
                placements=tuple(placements or ("offload_all",)),
                segments=segments,
                dtype=dtype,
                seed=seed,
                prompt=prompt,
                sample=sample,
                mesh=mesh,
                cpu_devices=cpu_devices,
                rules=tuple(rules or ()),
                accumulate=accumulate,
                state_memory=tuple(state_memory or ()),
            )
        )
        code = run(console)
    if code:
        raise typer.Exit(code)


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(help="A folder of config.json and safetensors files, or a name on the Hub: org/name.")
    ],
    prompt: Annotated[str, typer.Argument(help="What the text continues; - reads it from the standard input.")],
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="How many tokens to make at most. By default 256, or fewer where the model has no room."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0, the default, takes the most probable token; above, tokens are drawn.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from this many most probable tokens only.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the most probable tokens that have this probability together.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Draw from tokens at least this many times as probable as the best one.")
    ] = None,
    model_defaults: Annotated[
        bool, typer.Option("--model-defaults", help="Begin with what the model's generation_config.json recommends.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Decides what is drawn.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="What to compute in: stored (as in the files), float32 or bfloat16.")
    ] = "stored",
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message, to be put into the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: a system message before it.")] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End before this text. May be repeated. Where the model ends by itself, it ends anyhow."),
    ] = None,
    ids: Annotated[
        bool, typer.Option("--ids", help="Prompt and output are token ids: for models without a tokenizer.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but the text, and errors.")] = False,
) -> None:
    """Continue a text with a pretrained model, or answer a message.

    The new text goes to the standard output as it is made, everything else to the standard error. Ctrl-C ends it.
    """
    from .speaking import Options, prepare

    with _plain_errors():
        speech = prepare(
            Options(
                model=model,
                prompt=prompt,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                model_defaults=model_defaults,
                seed=seed,
                dtype=dtype,
                chat=chat,
                system=system,
                stop=tuple(stop or ()),
                ids=ids,
            )
        )
        code = speech(Console(stderr=True, highlight=False, quiet=quiet))
    if code:
        raise typer.Exit(code)


@app.command()
def mesh(
    model: Annotated[str, typer.Argument(help="A model's name, or the path of a config.json or of its folder.")],
    mesh: Annotated[str, typer.Option(help=_MESH)],
    rules: Annotated[list[str] | None, typer.Option("--rule", "-r", help=_RULE)] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help=_BATCH)] = None,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 1024,
    dtype: _Dtype = "bfloat16",
    placements: Annotated[
        list[str] | None,
        typer.Option("--placements", "-p", help="As for `overspill train`: what is recomputed is gathered again."),
    ] = None,
    accumulate: Annotated[int, typer.Option(min=1, help=_ACCUMULATE)] = 1,
    state_memory: Annotated[list[str] | None, typer.Option(help=_STATE)] = None,
    compile: Annotated[
        bool, typer.Option(help="Compile a training step for that many CPU devices, to see its collectives.")
    ] = True,
    json: Annotated[pathlib.Path | None, typer.Option(help="Write everything to this file, too.")] = None,
) -> None:
    """Show what a mesh makes of a model: shards, the training state on one device, a step's collectives.

    No weights are made, so any model fits. The step is compiled for CPU devices that aren't there.
    """
    from .inspecting import Options, prepare

    with _plain_errors():
        inspection = prepare(
            Options(
                model=model,
                mesh=mesh,
                rules=tuple(rules or ()),
                batch_size=batch_size,
                sequence_length=sequence_length,
                dtype=dtype,
                placements=tuple(placements or ("offload_all",)),
                accumulate=accumulate,
                state_memory=tuple(state_memory or ()),
                compile=compile,
                json=json,
            )
        )
        inspection(console)


@app.command()
def prove(
    model: Annotated[str, typer.Argument(help="A model's name, or the path of a config.json or of its folder.")],
    target: Annotated[str, typer.Option(help=_TARGET)],
    devices: Annotated[
        int | None, typer.Option(min=1, help="How many of them. By default one host, or as many as the mesh has.")
    ] = None,
    mesh: Annotated[
        str,
        typer.Option(
            help=f"{_MESH} By default fsdp; for mixtures of experts expert, 8 at most, and fsdp for what is left."
        ),
    ] = "",
    rules: Annotated[list[str] | None, typer.Option("--rule", "-r", help=_RULE)] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", "--batch", min=1, help=_BATCH)] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens per sequence. By default 4096, or fewer where the model has no room."),
    ] = None,
    placements: Annotated[
        list[str] | None,
        typer.Option(
            "--placements",
            "-p",
            help="One variant: a preset, or a preset and GLOB=PLACEMENT rules with commas between. May be repeated; "
            "each is compiled by itself. By default every preset that fits the model.",
        ),
    ] = None,
    segments: _Segments = "",
    dtype: _Dtype = "bfloat16",
    accumulate: Annotated[int, typer.Option(min=1, help=_ACCUMULATE)] = 1,
    state_memory: Annotated[list[str] | None, typer.Option(help=_STATE)] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Cut the model down to so many layers.")] = None,
    flags: Annotated[
        bool, typer.Option("--flags/--no-flags", help="Compile with the flags of `overspill env`, or without.")
    ] = True,
    json: Annotated[pathlib.Path | None, typer.Option(help="Write everything to this file, too.")] = None,
) -> None:
    """Prove where activations wait on hardware that isn't here, and whether a training step fits it.

    Compiles a whole training step for the target under each of the placements and shows them side by side: bytes on
    the device and on its host, what is offloaded by annotations, traced program and compiled program, and what moves
    beside computation. No weights are made, so any model fits. Exit code 1 if a proof or a compiler fails; that a step
    doesn't fit is no failure. Ctrl-C shows what is done.
    """
    from .proving import Options, prepare

    with _plain_errors():
        family = prepare(
            Options(model, target, devices, mesh, tuple(rules or ()), batch_size, sequence_length,
                    tuple(placements or ()), segments, dtype, accumulate, tuple(state_memory or ()), layers, flags,
                    json)
        )  # fmt: skip
        code = family(console)
    if code:
        raise typer.Exit(code)


@app.command()
def env(
    target: Annotated[str, typer.Option(help="What the process will run on, such as h200, gb200 or tpu-v5p.")],
    shell: Annotated[str, typer.Option(help="Whose language to write: sh or fish.")] = "sh",
    host_memory_gib: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="GPUs: how much host memory a process may pin. By default three quarters of what a host of that kind "
            "has; where there is a process for each GPU, say its share.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON instead of lines for a shell.")] = False,
) -> None:
    """Print the environment in which activations move while the device computes.

    For a shell, before the process starts: eval "$(overspill env --target gb200)". Flags that are set already stay as
    they are, and what the installed JAX doesn't know is left out.
    """
    from .environment import prepare, remarks, text

    with _plain_errors():
        flags = prepare(target, shell=shell, host_memory_gib=host_memory_gib)
        typer.echo(text(flags, shell=shell, as_json=json), nl=False)
        for line in remarks(flags, shell=shell, as_json=json):
            typer.echo(line, err=True)


@app.command()
def selftest(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer programs, shorter measurements.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="A part to run: memory, times, gradients or links. May be repeated.")
    ] = None,
    family: Annotated[
        list[str] | None, typer.Option(help="Whose gradients: llama or deepseek. May be repeated; by default both.")
    ] = None,
    json: Annotated[pathlib.Path | None, typer.Option(help="Write everything to this file, too.")] = None,
) -> None:
    """Test offload on the device at hand: right gradients, memory really freed, and what it costs.

    Trains small models of both families under every preset and compares each layer's gradients with no policy's, and
    those with NumPy's; looks at the device's memory and the time of a step shaped like Llama 8B that is saved,
    recomputed and offloaded; and measures the link to host memory. Exit code 1 if anything is wrong.
    """
    from .selftest import Options, prepare

    with _plain_errors():
        test = prepare(Options(quick=quick, only=tuple(only or ()), families=tuple(family or ()), json=json))
        code = test(console)
    if code:
        raise typer.Exit(code)


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
