"""`overspill prove`: a training step under several placements, compiled for hardware that isn't there and proved."""

import dataclasses
import functools
import math
import os
import pathlib
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.markup import escape

from ..layers.moe import in_rounds
from ..policies.accelerators import Target, target as find_target
from ..policies.ahead import CompileError, require_compiler
from ..policies.axes import Layout
from ..policies.flags import FRACTION, LIBTPU, XLA
from ..policies.placing import presets
from ..policies.proof import examine
from .artifacts import write_text
from .building import abstract, parameters
from .config import Config
from .data import Batch
from .hf_config import from_config
from .meshes import abstract_mesh, as_option, layout_of, parse_mesh, use_cpu_only
from .optimizer import adamw
from .proving_report import Outcome, Report, fitted
from .run_options import DTYPES, check_file, idle_rules, parse_placements, parse_segments, parse_state_memory
from .sharding import ShardingWarning, shards
from .state import TrainState, init_state
from .train import Step, make_train_step

_LENGTH = 4096  # tokens of a sequence, where a model has that many positions
_EXPERT_DEVICES = 8  # tokens travel to experts within so many devices at most, where nothing else is said


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asks for; see `overspill prove --help`."""

    model: str
    target: str
    devices: int | None = None
    mesh: str = ""
    rules: tuple[str, ...] = ()
    batch_size: int | None = None
    sequence_length: int | None = None
    placements: tuple[str, ...] = ()
    segments: str = ""
    dtype: str = "bfloat16"
    accumulate: int = 1
    expert_rounds: int = 1
    state_memory: tuple[str, ...] = ()
    layers: int | None = None
    flags: bool = True
    json: pathlib.Path | None = None


def shortened(config: Config, layers: int | None) -> Config:
    """`config` with only so many layers, of which the last have experts where it has any; all of them for None.

    Raises ValueError for more layers than there are, or none.
    """
    if layers is None:
        return config
    have = config.num_hidden_layers
    if not 1 <= layers <= have:
        raise ValueError(f"{layers} layers: the model has {have}, and can be shortened to 1 to {have}")
    fewer: dict[str, Any] = {"num_hidden_layers": layers}
    for name in ("layer_types", "no_rope_layers"):
        if getattr(config, name, None) is not None:
            fewer[name] = tuple(getattr(config, name))[:layers]
    if layers < have and (dense := getattr(config, "first_k_dense_replace", 0)):
        fewer["first_k_dense_replace"] = min(dense, max(layers // 4, 1), layers - 1)
    return dataclasses.replace(config, **fewer)


def choose_mesh(config: Config, devices: int) -> str:
    """The mesh that a model is cut over where nothing else is said: weights in parts, experts apart."""
    experts = getattr(config, "n_routed_experts", 0)
    if getattr(config, "first_k_dense_replace", 0) >= config.num_hidden_layers:
        experts = 0
    common = math.gcd(devices, experts) if experts else 1
    apart = min(_EXPERT_DEVICES, common & -common)  # the greatest power of two in it
    axes = {"fsdp": devices // apart, "expert": apart}
    return ",".join(f"{name}={size}" for name, size in axes.items() if size > 1) or f"fsdp={devices}"


def one_host(place: Target) -> int:
    """The devices of a host, or of the topology that the target's name has."""
    if place.shape is None:
        return place.devices_per_host
    # Hosts of TPUs have four chips.
    return math.prod(map(int, place.shape.split("x"))) * place.devices_per_host // 4


def variants(model: Any, texts: tuple[str, ...]) -> dict[str, Any]:
    """`model` under each of the placements, by their text; without any under every preset that fits it.

    In a text, presets and `GLOB=PLACEMENT` rules are separated by commas. Raises ValueError as `parse_placements`.
    """
    family = {}
    for text in texts:
        family[text] = parse_placements(model, tuple(part.strip() for part in text.split(",")))
    if texts:
        return family
    for name in presets():
        try:
            family[name] = parse_placements(model, (name,))
        except ValueError:  # a preset that doesn't fit this model
            continue
    return family


def prepare(options: Options) -> "Family":
    """Everything that can be wrong with what is asked for, found out before anything is traced or compiled.

    Raises ValueError, and ModuleNotFoundError where the target's compiler isn't installed.
    """
    place = find_target(options.target)
    require_compiler(place.platform)
    check_file(options.json)
    return assemble(options, place, one_host(place))


def assemble(options: Options, place: Target | None, per_host: int) -> "Family":
    """The steps that are asked for, for a target or for hardware that nothing can be compiled for (None).

    Raises ValueError.
    """
    use_cpu_only()
    if options.dtype not in DTYPES:
        raise ValueError(f"dtype {options.dtype!r} is not one of {', '.join(DTYPES)}")
    config = shortened(from_config(options.model), options.layers)
    layout = _layout(options, config, per_host)
    if place is not None:
        place.topology(layout.mesh.size)  # raises for so many devices as don't come together
    length = options.sequence_length or min(_LENGTH, config.max_position_embeddings)
    if length > config.max_position_embeddings:
        raise ValueError(
            f"sequence length {length} is longer than {options.model} was made for "
            f"({config.max_position_embeddings} positions)"
        )
    rows = options.batch_size or options.accumulate * layout.size(layout.axes("batch"))
    if rows % options.accumulate:
        raise ValueError(f"batch size {rows} can't be cut into {options.accumulate} equal micro-batches")
    model = abstract(config, dtype=DTYPES[options.dtype], segments=parse_segments(options.segments))
    model = in_rounds(model, options.expert_rounds)
    try:
        shards(model, layout)
        layout.check("batch sequence", (rows // options.accumulate, length), "a batch of tokens")
    except ValueError as error:
        chosen = "" if options.mesh else f" (--mesh was chosen: {_text(layout)})"
        raise ValueError(as_option(str(error)) + chosen) from None
    family = Family(options, place, config, layout, rows, length, variants(model, options.placements))
    family.state()  # raises for state memory that matches nothing
    return family


def _layout(options: Options, config: Config, per_host: int) -> Layout:
    text = options.mesh
    if text:
        have = math.prod(parse_mesh(text).values())
        if options.devices not in (None, have):
            raise ValueError(f"--mesh {text} has {have} devices and --devices says {options.devices}: give one of both")
    else:
        text = choose_mesh(config, options.devices or per_host)
    return layout_of(abstract_mesh(text), options.rules)


def _text(layout: Layout) -> str:
    return ",".join(f"{name}={size}" for name, size in layout.mesh.shape.items())


class Family:
    """Training steps of one model that differ in their placements; calling it proves and prints them.

    - `models`: the abstract model under each of the placements, by their text.
    - `outcomes`: what was found, for those that are done.
    """

    def __init__(
        self, options: Options, place: Target | None, config: Config, layout: Layout, batch_size: int,
        sequence_length: int, models: Mapping[str, Any],
    ):  # fmt: skip
        self.options, self.place, self.config, self.layout = options, place, config, layout
        self.batch_size, self.sequence_length, self.models = batch_size, sequence_length, models
        self.state_memory = parse_state_memory(options.state_memory)
        self.outcomes: list[Outcome] = []

    @property
    def model(self) -> Any:
        """The model under the first of the placements."""
        return next(iter(self.models.values()))

    def state(self) -> TrainState:
        """The training state, abstract: float32 master weights and moments; it is the same for all placements."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardingWarning)  # `remarks` says it
            return init_state(self.model, adamw(1e-3), key=jax.random.key(0), master_dtype=jnp.float32,
                              mesh=self.layout, state_memory=self.state_memory)  # fmt: skip

    def step(self, model: Any) -> Step:
        """The training step of the model under one of the placements."""
        return make_train_step(model, adamw(1e-3), mesh=self.layout, accumulate=self.options.accumulate,
                               state_memory=self.state_memory)  # fmt: skip

    def batch(self) -> Batch:
        """An abstract batch."""
        shape = (self.batch_size, self.sequence_length)
        ids, flags = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.bool_))
        return Batch(ids, ids, ids, ids, flags)

    def examine(self, name: str) -> Outcome:
        """The proof of one variant, or why there is none.

        Raises ModuleNotFoundError where a part of the target's compiler turns out to be missing.
        """
        # What the environment says is there in any case; Overspill's own flags can be left out.
        mine = {name: os.environ[name] for name in (XLA, LIBTPU, FRACTION) if name in os.environ}
        try:
            step = self.step(self.models[name])
            proof = examine(step, self.state(), self.batch(), target=self.place,
                            flags=None if self.options.flags else mine)  # fmt: skip
        except (CompileError, ValueError, OSError) as error:  # OffloadNotApplied is a ValueError
            return Outcome(name, None, str(error))
        return Outcome(name, proof)

    def report(self) -> Report:
        """What is found so far."""
        return Report(tuple(self.outcomes), self.place, self.layout.mesh.size)

    def __call__(self, console: Console) -> int:
        say = functools.partial(console.print, markup=False, soft_wrap=not console.is_terminal)
        for line in self.head():
            say(line)
        code = 0
        try:
            for i, name in enumerate(self.models):
                what = f"{name} ({i + 1} of {len(self.models)}): compiling a training step for {self._where()}"
                with console.status(escape(what)):
                    self.outcomes.append(self.examine(name))
                if not console.is_terminal:  # who looks on sees no status, and the tables come at the end
                    print(f"{what}: {self.outcomes[-1].verdict}", file=sys.stderr)
        except KeyboardInterrupt:
            done = f"{len(self.outcomes)} of {len(self.models)} placements are done"
            say(f"interrupted: {done}", style="bold")
            code = 130
        report = self.report()
        for table in report.tables():
            # Wide, and never wrapped, where no person reads it: paths are to be found in it.
            for part in fitted(table, console) if console.is_terminal else [table]:
                console.print(part) if console.is_terminal else print(part, file=console.file)
        for line, bad in [*report.findings(), *((remark, False) for remark in self.remarks())]:
            say(line, style="bold red" if bad else None)
        if self.options.json is not None:
            write_text(self.options.json, report.json_text(self.as_json()))
            say(f"written to {self.options.json}")
        return code or int(report.failed)

    def _where(self) -> str:
        kind = "devices" if self.place is None else self.place.description
        return f"{self.layout.mesh.size:,} x {kind}"

    def head(self) -> list[str]:
        """What is compiled, and for what."""
        total, active, mtp = parameters(self.model)
        size = f"{total:,} parameters, {active:,} active a token" + (
            f", {mtp:,} more for multi-token prediction" if mtp else ""
        )
        short = f" with {self.config.num_hidden_layers} layers" if self.options.layers else ""
        chosen = "" if self.options.mesh else " (chosen; --mesh takes another)"
        parts = f" in {self.options.accumulate} micro-batches" if self.options.accumulate > 1 else ""
        if self.options.expert_rounds > 1:
            parts += f", exchanged among experts in {self.options.expert_rounds} rounds"
        host = [glob for glob, where in self.state_memory.items() if where == "host"]
        return [
            f"{self.options.model}{short}: {size}",
            f"a training step on {self.batch_size:,} x {self.sequence_length:,} tokens{parts}: AdamW, master weights "
            f"and moments in float32, {self.options.dtype} to compute in"
            + (f"; on the host: {', '.join(host)}" if host else ""),
            f"{self._where()} as {_text(self.layout)}{chosen}, JAX {jax.__version__}"
            + ("" if self.options.flags else "; without the flags of overspill env"),
        ]

    def remarks(self) -> list[str]:
        """Rules of the command line that reach nothing."""
        return idle_rules(self.options.rules, shards(self.model, self.layout), self.model)

    def as_json(self) -> dict[str, Any]:
        """What was asked for, as plain values."""
        options = self.options
        return {
            "model": options.model,
            "layers": self.config.num_hidden_layers,
            "dtype": options.dtype,
            "target": self.place.name,
            "mesh": dict(self.layout.mesh.shape),
            "mesh_chosen": not options.mesh,
            "rules": {name: list(axes) for name, axes in self.layout.rules},
            "batch_size": self.batch_size,
            "sequence_length": self.sequence_length,
            "segments": list(parse_segments(options.segments)),
            "accumulate": options.accumulate,
            "expert_rounds": options.expert_rounds,
            "state_memory": self.state_memory,
            "flags": options.flags,
            "jax": jax.__version__,
            "complete": len(self.outcomes) == len(self.models),
        }
