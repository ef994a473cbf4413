"""Commands that say where memory goes: `overspill mesh`, `plan`, `prove`, `env`, `selftest`. The work is elsewhere."""

import pathlib
from typing import Annotated

import typer

from ..policies.accelerators import targets
from ..policies.machines import hardwares
from .command_options import (
    ACCUMULATE,
    BATCH,
    EXPERT_ROUNDS,
    MESH,
    RULE,
    STATE,
    Dtype,
    Segments,
    console,
    plain_errors,
)  # fmt: skip

_TARGET = (
    f"What to compile for, which needn't be here: {', '.join(targets())}; those of TPUs also with the shape of a "
    "topology, such as tpu-v5p:4x4x8."
)

_HARDWARE = (
    f"What to plan for, which needn't be here: {', '.join(hardwares())}; TPUs also with a shape, such as tpu-v5p:4x4x8."
)
_CHOSEN_MESH = "By default fsdp; for mixtures of experts expert, 8 at most, and fsdp for what is left."
_FEWEST = "By default the fewest that fit."
_ROUNDS = "By default one, or where that doesn't fit as many as make the buffers as large as what is sent on average."
_LENGTH = "Tokens per sequence. By default 4096, or fewer where the model has no room."


def mesh(
    model: Annotated[str, typer.Argument(help="A model's name, or the path of a config.json or of its folder.")],
    mesh: Annotated[str, typer.Option(help=MESH)],
    rules: Annotated[list[str] | None, typer.Option("--rule", "-r", help=RULE)] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help=BATCH)] = None,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 1024,
    dtype: Dtype = "bfloat16",
    placements: Annotated[
        list[str] | None,
        typer.Option("--placements", "-p", help="As for `overspill train`: what is recomputed is gathered again."),
    ] = None,
    accumulate: Annotated[int, typer.Option(min=1, help=ACCUMULATE)] = 1,
    expert_rounds: Annotated[int, typer.Option(min=1, help=EXPERT_ROUNDS)] = 1,
    state_memory: Annotated[list[str] | None, typer.Option(help=STATE)] = None,
    compile: Annotated[
        bool, typer.Option(help="Compile a training step for that many CPU devices, to see its collectives.")
    ] = True,
    json: Annotated[pathlib.Path | None, typer.Option(help="Write everything to this file, too.")] = None,
) -> None:
    """Show what a mesh makes of a model: shards, the training state on one device, a step's collectives.

    No weights are made, so any model fits. The step is compiled for CPU devices that aren't there.
    """
    from .inspecting import Options, prepare

    with plain_errors():
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
                expert_rounds=expert_rounds,
                state_memory=tuple(state_memory or ()),
                compile=compile,
                json=json,
            )
        )
        inspection(console)


def plan(
    model: Annotated[str, typer.Argument(help="A model's name, or the path of a config.json or of its folder.")],
    hardware: Annotated[str, typer.Option(help=_HARDWARE)],
    devices: Annotated[
        int | None, typer.Option(min=1, help="How many of them. By default one host, or as many as the mesh has.")
    ] = None,
    mesh: Annotated[str, typer.Option(help=f"{MESH} {_CHOSEN_MESH}")] = "",
    rules: Annotated[list[str] | None, typer.Option("--rule", "-r", help=RULE)] = None,
    global_batch: Annotated[int | None, typer.Option("--global-batch", "--batch", min=1, help=BATCH)] = None,
    sequence: Annotated[int | None, typer.Option("--sequence", "--sequence-length", min=2, help=_LENGTH)] = None,
    accumulate: Annotated[int | None, typer.Option(min=1, help=f"{ACCUMULATE} {_FEWEST}")] = None,
    expert_rounds: Annotated[int | None, typer.Option(min=1, help=f"{EXPERT_ROUNDS} {_ROUNDS}")] = None,
    dtype: Dtype = "bfloat16",
    products: Annotated[
        str | None, typer.Option(help="The format that products run in, if another than --dtype, such as float8.")
    ] = None,
    segments: Annotated[
        int | None,
        typer.Option(min=1, help="How many groups of layers of a stack may be placed differently. By default one."),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Cut the model down to so many layers.")] = None,
    state_memory: Annotated[list[str] | None, typer.Option(help=STATE)] = None,
    device_gib: Annotated[
        float | None, typer.Option(min=0, help="Device memory to use. By default what a program gets of it.")
    ] = None,
    host_gib: Annotated[
        float | None, typer.Option(min=0, help="Host memory to use for one device. By default its share of the host's.")
    ] = None,
    pinned_gib: Annotated[
        float | None,
        typer.Option(min=0, help="Pinned host memory for one device. By default its share of `overspill env`'s pool."),
    ] = None,
    pipelined: Annotated[
        bool,
        typer.Option(
            "--pipelined/--not-pipelined", help="Whether transfers run beside the computation of other layers."
        ),
    ] = True,
    fused_attention: Annotated[
        bool, typer.Option("--fused-attention", help="Count attention's time as that of a fused kernel.")
    ] = False,
    measured: Annotated[
        pathlib.Path | None, typer.Option(help="What `overspill selftest --json` wrote on such a device.")
    ] = None,
    largest_batch: Annotated[bool, typer.Option("--largest-batch", help="Find the largest global batch.")] = False,
    frontier: Annotated[bool, typer.Option("--frontier", help="Show step times for other amounts of memory.")] = False,
    calibrate: Annotated[
        bool | None,
        typer.Option(
            "--calibrate/--no-calibrate",
            help="Ask the hardware's compiler what device memory plans need, until one fits, or simulate it only. By "
            "default it is asked where it is installed.",
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compile the planned step, and compare its memory with what was simulated.")
    ] = False,
    plot: Annotated[pathlib.Path | None, typer.Option(help="Draw memory over a step and the frontier here.")] = None,
    json: Annotated[pathlib.Path | None, typer.Option(help="Write everything to this file, too.")] = None,
) -> None:
    """Choose for every activation whether it is kept, offloaded or recomputed, and predict what that gives.

    Reads the training step's own program, and finds the placements with which a step takes the least time within the
    memory of device and host. No weights are made, so any model fits. Exit code 1 if nothing fits, which says by how
    much, and if --verify finds a placement that isn't applied.
    """
    from ..policies.ahead import CompileError
    from .planning import Options, prepare

    with plain_errors(CompileError):
        planning = prepare(
            Options(
                model=model, hardware=hardware, devices=devices, mesh=mesh, rules=tuple(rules or ()),
                global_batch=global_batch, sequence=sequence, accumulate=accumulate, expert_rounds=expert_rounds,
                dtype=dtype, products=products, segments=segments, layers=layers,
                state_memory=tuple(state_memory or ()), device_gib=device_gib, host_gib=host_gib,
                pinned_gib=pinned_gib, pipelined=pipelined, fused_attention=fused_attention, measured=measured,
                largest_batch=largest_batch, frontier=frontier, calibrate=calibrate, verify=verify, plot=plot,
                json=json,
            )
        )  # fmt: skip
        code = planning(console)
    if code:
        raise typer.Exit(code)


def prove(
    model: Annotated[str, typer.Argument(help="A model's name, or the path of a config.json or of its folder.")],
    target: Annotated[str, typer.Option(help=_TARGET)],
    devices: Annotated[
        int | None, typer.Option(min=1, help="How many of them. By default one host, or as many as the mesh has.")
    ] = None,
    mesh: Annotated[
        str,
        typer.Option(help=f"{MESH} {_CHOSEN_MESH}"),
    ] = "",
    rules: Annotated[list[str] | None, typer.Option("--rule", "-r", help=RULE)] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", "--batch", min=1, help=BATCH)] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(min=2, help=_LENGTH),
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
    segments: Segments = "",
    dtype: Dtype = "bfloat16",
    accumulate: Annotated[int, typer.Option(min=1, help=ACCUMULATE)] = 1,
    expert_rounds: Annotated[int, typer.Option(min=1, help=EXPERT_ROUNDS)] = 1,
    state_memory: Annotated[list[str] | None, typer.Option(help=STATE)] = None,
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

    with plain_errors():
        family = prepare(
            Options(model, target, devices, mesh, tuple(rules or ()), batch_size, sequence_length,
                    tuple(placements or ()), segments, dtype, accumulate, expert_rounds, tuple(state_memory or ()),
                    layers, flags, json)
        )  # fmt: skip
        code = family(console)
    if code:
        raise typer.Exit(code)


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

    with plain_errors():
        flags = prepare(target, shell=shell, host_memory_gib=host_memory_gib)
        typer.echo(text(flags, shell=shell, as_json=json), nl=False)
        for line in remarks(flags, shell=shell, as_json=json):
            typer.echo(line, err=True)


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

    with plain_errors():
        test = prepare(Options(quick=quick, only=tuple(only or ()), families=tuple(family or ()), json=json))
        code = test(console)
    if code:
        raise typer.Exit(code)
