"""What a training run is asked for, and what can be wrong with it, before anything is computed or written."""

import dataclasses
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from ..policies.axes import Layout
from ..policies.placing import place
from . import checkpoint_io
from .building import parameters
from .data import PackedDataset
from .meshes import as_option
from .sharding import Shards, reached, shards

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}  # what a model computes in, by the option's text


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asks for; see `overspill train --help`."""

    model: str
    data: pathlib.Path | None
    out: pathlib.Path | None
    resume: pathlib.Path | None
    steps: int
    batch_size: int
    sequence_length: int
    learning_rate: float
    placements: tuple[str, ...]
    segments: str
    dtype: str
    seed: int
    prompt: str
    sample: int
    mesh: str = ""
    rules: tuple[str, ...] = ()
    cpu_devices: int = 0
    accumulate: int = 1
    state_memory: tuple[str, ...] = ()
    expert_rounds: int = 1


def parse_placements(model: Any, texts: tuple[str, ...]) -> Any:
    """`model` placed by presets and `GLOB=PLACEMENT` texts in turn. Raises ValueError as `place` does."""
    for text in texts:
        if "=" in text:
            glob, _, placement = text.rpartition("=")
            model = place(model, {glob.strip(): placement.strip()})
        elif any(c in text for c in "*.?["):
            raise ValueError(f"placement {text!r} says no place: write it as '{text}=host', or device, or recompute")
        else:
            model = place(model, text)
    return model


def parse_segments(text: str) -> tuple[int, ...]:
    """Layer indices from `8,24`. Raises ValueError for anything else."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"segments are layer indices with commas between, such as 8,24, not {text!r}") from None


def check_output(out: pathlib.Path) -> None:
    """Raises ValueError unless a folder `out` can be made: better now than after training."""
    for parent in out.absolute().parents:
        if parent.exists():
            if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
                raise ValueError(f"output folder {str(out)!r} can't be made: {str(parent)!r} is no writable folder")
            return


def check_file(path: pathlib.Path | None) -> None:
    """Raises ValueError unless a file can be written at `path`, if one is to be."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{str(path)!r} can't be written: it is a folder")
    if not (parent := path.absolute().parent).is_dir():
        raise ValueError(f"{str(path)!r} can't be written: there is no folder {str(parent)!r}")


def idle_rules(rules: tuple[str, ...], plan: Shards, model: Any) -> list[str]:
    """A line for each rule of one's own that reaches nothing: of the presets many do, in one model or another."""
    found = reached(plan, model)
    names = (rule.partition("=")[0].strip() for rule in rules)
    return [f"the rule for {name!r} reaches no array and no activation of this model" for name in names
            if name not in found]  # fmt: skip


def parse_state_memory(texts: tuple[str, ...]) -> dict[str, str]:
    """Rules from `optimizer.*=host` texts. Raises ValueError for other texts."""
    rules = {}
    for text in texts:
        glob, found, where = (part.strip() for part in text.rpartition("="))
        if not found or where not in ("device", "host"):
            raise ValueError(f"state memory {text!r}: write what lives where, such as 'optimizer.*=host'")
        rules[glob] = where
    return rules


def check_mesh(skeleton: Any, options: Options, place: Layout | None) -> None:
    """Raises ValueError for what can't be cut into equal parts."""
    parse_state_memory(options.state_memory)
    cuts = 1
    if place is not None:
        try:
            shards(skeleton, place)
        except ValueError as error:
            raise ValueError(as_option(str(error))) from None
        cuts, length = place.size(place.axes("batch")), place.size(place.axes("sequence"))
        if options.sequence_length % length:
            raise ValueError(
                f"sequence length {options.sequence_length} can't be cut into the {length} equal parts of mesh "
                f"{options.mesh}"
            )
    if options.batch_size % (options.accumulate * cuts):
        over = f" over mesh {options.mesh}" if place is not None else ""
        raise ValueError(
            f"batch size {options.batch_size} can't be cut into {options.accumulate} micro-batches of {cuts} equal "
            f"parts{over}: give a multiple of {options.accumulate * cuts}"
        )


def check_memory(skeleton: Any, options: Options, place: Layout | None) -> None:
    """Raises ValueError when the state alone is more than there is: better than to be killed."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        memory = (device.memory_stats() or {}).get("bytes_limit")
    counts = parameters(skeleton)
    # Weights, two moments and gradients in float32, and a copy of the weights to compute in.
    needed = (counts.total + counts.mtp) * (16 if options.dtype == "float32" else 18)
    if place is not None:
        # Devices of a CPU share its memory; what several hold is there several times.
        lie = shards(skeleton, place)
        needed = needed * lie.shard_bytes // lie.bytes * (place.mesh.size if device.platform == "cpu" else 1)
    if memory and needed > memory:
        raise ValueError(
            f"{options.model} needs at least {needed / 2**30:,.0f} GiB to train, and this machine has "
            f"{memory / 2**30:,.0f}: choose a smaller model"
        )


def resumable(options: Options, dataset: PackedDataset) -> dict[str, Any]:
    """The metadata of the run to resume, if this one can go on from it."""
    metadata = checkpoint_io.read_metadata(options.resume / "checkpoint")
    mine = identity(options, dataset)
    for name, value in mine.items():
        then = metadata["extra"].get(name)
        if then != value:
            raise ValueError(f"{str(options.resume)!r} is a run with {name} {then!r}, not {value!r}: ask for the same")
    if int(metadata["step"]) >= options.steps:
        raise ValueError(
            f"{str(options.resume)!r} has {metadata['step']} steps done: ask for more than that with --steps"
        )
    return metadata


def identity(options: Options, dataset: PackedDataset) -> dict[str, Any]:
    """What must be the same on resuming, for the state to fit and the data to go on where it stopped."""
    return {
        "model": options.model,
        "segments": list(parse_segments(options.segments)),
        "dtype": options.dtype,
        "sequence_length": options.sequence_length,
        "corpus_tokens": dataset.tokens,
        "seed": options.seed,
    }
