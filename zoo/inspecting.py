"""What a mesh makes of a model, without any weights: shards, the state on one device, and a step's collectives."""

import dataclasses
import json
import math
import pathlib
import time
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.markup import escape

from ..layers.moe import in_rounds
from ..policies.activation import path_string
from ..policies.axes import Layout
from ..policies.report import Table, format_bytes
from ..policies.spaces import on_host
from .building import abstract, parameters
from .collectives import Collectives, find_collectives
from .data import Batch
from .hf_config import from_config
from .meshes import abstract_mesh, as_option, layout_of, make_mesh, parse_mesh, use_cpu_devices, use_cpu_only
from .optimizer import adamw
from .run_options import DTYPES, check_file, idle_rules, parse_placements, parse_state_memory
from .sharding import ShardingWarning, Shards, shards
from .train import init_state, make_train_step

# Nothing runs: what LLVM makes of each kernel is of no interest, XLA's own passes are.
_FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_PARTS = {"params": "parameters", "buffers": "router biases", "opt_state": "optimizer"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asks for; see `overspill mesh --help`."""

    model: str
    mesh: str
    rules: tuple[str, ...] = ()
    batch_size: int | None = None
    sequence_length: int = 1024
    dtype: str = "bfloat16"
    placements: tuple[str, ...] = ("offload_all",)
    accumulate: int = 1
    expert_rounds: int = 1
    state_memory: tuple[str, ...] = ()
    compile: bool = True
    json: pathlib.Path | None = None


class StatePart(NamedTuple):
    """A part of a training state, and what it weighs."""

    name: str
    memory: str  # device or host
    bytes: int  # in all
    shard_bytes: int  # on one device


def state_parts(state: Any, plan: Shards) -> list[StatePart]:
    """What the parts of an abstract training state weigh, its parameters and their moments cut as `plan` says."""
    rows = {row.path: row for row in plan.rows}
    sizes: dict[tuple[str, str], list[int]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        like = next((row for key in path if (row := rows.get(getattr(key, "key", None))) is not None), None)
        # Counters beside the moments have no parameter's shape.
        shape = like.shard if like is not None and like.shape == leaf.shape else leaf.shape
        width = leaf.dtype.itemsize
        name = _PARTS.get(path_string(path).partition(".")[0], "counters and key")
        part = sizes.setdefault((name, "host" if on_host(leaf) else "device"), [0, 0])
        part[0] += leaf.size * width
        part[1] += math.prod(shape) * width
    return [StatePart(*key, *pair) for key, pair in sizes.items()]


def prepare(options: Options) -> "Inspection":
    """Everything that can be wrong with what is asked for, found out before anything is compiled.

    Raises ValueError.
    """
    if options.dtype not in DTYPES:
        raise ValueError(f"dtype {options.dtype!r} is not one of {', '.join(DTYPES)}")
    check_file(options.json)
    count = math.prod(parse_mesh(options.mesh).values())
    use_cpu_only()
    if options.compile:
        try:
            use_cpu_devices(count)
        except ValueError as error:
            raise ValueError(f"mesh {options.mesh}: {error}; --no-compile shows shards on any number") from None
    mesh = (make_mesh if options.compile else abstract_mesh)(options.mesh)
    layout = layout_of(mesh, options.rules)
    dtype = DTYPES[options.dtype]
    config = from_config(options.model)
    if options.sequence_length > config.max_position_embeddings:
        raise ValueError(
            f"sequence length {options.sequence_length} is longer than {options.model} was made for "
            f"({config.max_position_embeddings} positions)"
        )
    model = in_rounds(abstract(config, dtype=dtype), options.expert_rounds)
    model = parse_placements(model, options.placements)
    rows = options.batch_size or options.accumulate * layout.size(layout.axes("batch"))
    if rows % options.accumulate:
        raise ValueError(f"batch size {rows} can't be cut into {options.accumulate} equal micro-batches")
    try:
        plan = shards(model, layout)
        layout.check("batch sequence", (rows // options.accumulate, options.sequence_length), "a batch of tokens")
    except ValueError as error:
        # The same as this command has it written.
        raise ValueError(as_option(str(error))) from None
    inspection = Inspection(options, model, layout, plan, rows, parse_state_memory(options.state_memory))
    inspection.state()  # raises for state memory that matches nothing
    return inspection


@dataclasses.dataclass
class Inspection:
    """A look at a model over a mesh; calling it prints it and gives the exit code."""

    options: Options
    model: Any
    layout: Layout
    plan: Shards
    batch_size: int
    state_memory: dict[str, str]
    collectives: Collectives | None = None
    seconds: float | None = None
    argument_bytes: int | None = None

    def __call__(self, console: Console) -> int:
        options = self.options
        total, active, mtp = parameters(self.model)
        console.print(
            f"[bold]{escape(options.model)}[/]: {total:,} parameters, {active:,} active a token"
            + (f", {mtp:,} more for multi-token prediction" if mtp else "")
        )
        devices = math.prod(self.layout.mesh.shape.values())
        cuts = "; ".join(f"{name} over {'*'.join(axes)}" for name, axes in self.layout.rules)
        console.print(f"mesh of {devices:,} devices: {cuts or 'nothing is cut'}", markup=False)
        # Wide, and never wrapped, where no person reads it: paths are to be found in it.
        show = console.print if console.is_terminal else lambda table: print(table, file=console.file)
        show(self.plan.table())
        for note in self._notes():
            console.print(note, markup=False)
        parts = self.state()
        show(self.state_table(parts))
        if options.compile:
            with console.status(f"compiling a training step for {devices:,} CPU devices"):
                self.compile()
            show(self.collectives.table())
            console.print(
                f"one training step on {self.batch_size} x {options.sequence_length} tokens, compiled in "
                f"{self.seconds:.0f} s for {devices:,} CPU devices. Compilers for GPUs and TPUs cut it the same way, "
                "but send bfloat16 where a CPU sends float32, scatter sums that a CPU gives to all devices, and may "
                "merge or split collectives"
            )
        if options.json is not None:
            options.json.write_text(json.dumps(self.as_json(parts), indent=1) + "\n")
            console.print(f"written to {escape(str(options.json))}")
        return 0

    def _notes(self) -> list[str]:
        notes = []
        if self.plan.undeclared:
            notes.append(f"no layer declares axes for {', '.join(self.plan.undeclared)}: whole on every device")
        return notes + idle_rules(self.options.rules, self.plan, self.model)

    def state(self) -> list[StatePart]:
        """What the training state weighs: that of `overspill train`, with AdamW and float32 master weights."""
        return state_parts(self._state(None), self.plan)

    def _state(self, layout: Layout | None) -> Any:
        key = jax.random.key(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardingWarning)  # `_notes` says it
            return init_state(self.model, adamw(1e-3), key=key, master_dtype=jnp.float32, mesh=layout,
                              state_memory=self.state_memory)  # fmt: skip

    def state_table(self, parts: list[StatePart]) -> Table:
        """`state()` as a table."""
        rows = [(part.name, part.memory, format_bytes(part.bytes), format_bytes(part.shard_bytes)) for part in parts]
        host = sum(part.shard_bytes for part in parts if part.memory == "host")
        device = sum(part.shard_bytes for part in parts) - host
        footer = f"{format_bytes(sum(part.bytes for part in parts))} in all, {format_bytes(device)} on each device"
        footer += f" and {format_bytes(host)} in host memory for it" if host else ""
        return Table(("training state", "memory", "bytes", "one device"), rows, title="State", footer=footer)

    def lower(self) -> Any:
        """The training step, lowered for the mesh."""
        step = make_train_step(self.model, adamw(1e-3), mesh=self.layout, accumulate=self.options.accumulate,
                               state_memory=self.state_memory)  # fmt: skip
        shape = (self.batch_size, self.options.sequence_length)
        ids, flags = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.bool_))
        return step.lower(self._state(self.layout), Batch(ids, ids, ids, ids, flags))

    def compile(self) -> None:
        """Finds the collectives of the training step."""
        begin = time.perf_counter()
        compiled = self.lower().compile(compiler_options=_FAST)
        self.seconds = time.perf_counter() - begin
        self.collectives = find_collectives(compiled, self.layout)
        memory = compiled.memory_analysis()
        self.argument_bytes = None if memory is None else memory.argument_size_in_bytes

    def as_json(self, parts: list[StatePart]) -> dict[str, Any]:
        """What is shown, as plain values."""
        out = {
            "model": self.options.model,
            "dtype": self.options.dtype,
            "mesh": dict(self.layout.mesh.shape),
            "rules": {name: list(axes) for name, axes in self.layout.rules},
            "batch_size": self.batch_size,
            "sequence_length": self.options.sequence_length,
            "placements": list(self.options.placements),
            "accumulate": self.options.accumulate,
            "expert_rounds": self.options.expert_rounds,
            "state_memory": self.state_memory,
            "jax": jax.__version__,
            "parameters": [
                {"path": row.path, "dtype": row.dtype, "shape": list(row.shape), "axes": row.axes,
                 "cut_over": [list(part) if isinstance(part, tuple) else part for part in row.spec],
                 "shard": list(row.shard), "bytes": row.bytes, "shard_bytes": row.shard_bytes}
                for row in self.plan.rows
            ],
            "state": [part._asdict() for part in parts],
        }  # fmt: skip
        if self.collectives is not None:
            out |= {
                "compiled_for": "cpu",
                "compile_seconds": round(self.seconds, 1),
                "argument_bytes": self.argument_bytes,
                "collectives": self.collectives.as_json(),
            }
        return out
