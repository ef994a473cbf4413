"""Commands that run a model: `overspill train` and `overspill generate`. The work is in other rooms."""

import pathlib
from typing import Annotated

import typer
from rich.console import Console

from .command_options import ACCUMULATE, EXPERT_ROUNDS, MESH, RULE, STATE, Dtype, Segments, console, plain_errors


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
    segments: Segments = "",
    dtype: Dtype = "float32",
    seed: Annotated[int, typer.Option(min=0, help="Decides weights and the order of the data.")] = 0,
    prompt: Annotated[str, typer.Option(help="What the sample at the end continues.")] = "def ",
    sample: Annotated[int, typer.Option(min=0, help="Tokens of sample text at the end; 0 for none.")] = 200,
    mesh: Annotated[str, typer.Option(help=f"{MESH} By default one device.")] = "",
    cpu_devices: Annotated[
        int, typer.Option(min=0, help="Take the CPU for so many devices, to try a mesh without accelerators.")
    ] = 0,
    rules: Annotated[list[str] | None, typer.Option("--rule", "-r", help=RULE)] = None,
    accumulate: Annotated[int, typer.Option(min=1, help=ACCUMULATE)] = 1,
    expert_rounds: Annotated[int, typer.Option(min=1, help=EXPERT_ROUNDS)] = 1,
    state_memory: Annotated[list[str] | None, typer.Option(help=STATE)] = None,
) -> None:
    """Train a model on text, its activations placed as you say.

    Shows where every activation waits before the first step, and after compiling what the backward pass really
    keeps. At the end there are a checkpoint, the loss curve (PNG and CSV) and a sample of text in the output
    folder. Ctrl-C stops after the step at hand and saves.
    """
    from .run_options import Options
    from .running import prepare

    with plain_errors():
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
                expert_rounds=expert_rounds,
                state_memory=tuple(state_memory or ()),
            )
        )
        code = run(console)
    if code:
        raise typer.Exit(code)


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

    with plain_errors():
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
