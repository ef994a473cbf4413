"""One training run from the command line: checked before it starts, watched while it runs, saved when it stops."""

import dataclasses
import datetime
import importlib.util
import pathlib
import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..layers.moe import in_rounds
from ..policies.activation import Placement
from ..policies.axes import Layout
from ..policies.report import format_bytes
from ..policies.residuals import Census, activations, check
from . import artifacts, checkpoint_io
from .building import abstract, build, parameters
from .data import ByteTokenizer, PackedDataset, Position, load_corpus
from .generation import generate
from .hf_config import from_config
from .loop import Record, TrainingDiverged, train
from .meshes import layout_of, make_mesh, use_cpu_devices, use_cpu_only
from .optimizer import adamw, warmup_cosine
from .run_options import (
    DTYPES,
    Options,
    check_memory,
    check_mesh,
    check_output,
    identity,
    parse_placements,
    parse_segments,
    parse_state_memory,
    resumable,
)
from .sharding import shards
from .train import Step, TrainState, init_state, make_train_step

_VALIDATION_BATCHES = 16


def prepare(options: Options) -> "Run":
    """Everything that can be wrong, found out before anything is computed or written. Raises ValueError."""
    for extra in ("orbax.checkpoint", "matplotlib"):
        if importlib.util.find_spec(extra.partition(".")[0]) is None:
            raise ValueError(f"training needs {extra.partition('.')[0]}: pip install 'overspill[train]'")
    if options.cpu_devices:
        # Before anything asks JAX for its devices.
        use_cpu_only()
        use_cpu_devices(options.cpu_devices)
    place = None
    if options.mesh:
        place = layout_of(make_mesh(options.mesh), options.rules)
    elif options.rules:
        raise ValueError(f"rule {options.rules[0]!r} says how to cut over a mesh: give --mesh too")
    if options.dtype not in DTYPES:
        raise ValueError(f"dtype {options.dtype!r} is not one of {', '.join(DTYPES)}")
    if not 0 < options.learning_rate < float("inf"):
        raise ValueError(f"learning rate {options.learning_rate} must be more than 0")
    out = options.out
    if out is None:
        out = pathlib.Path("runs", datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S"))
    check_output(out)
    if out.exists():
        raise ValueError(f"output folder {str(out)!r} exists already: choose another with --out")
    try:
        options.prompt.encode()
    except UnicodeEncodeError:
        raise ValueError(f"prompt {options.prompt!r} is no valid text") from None
    config = from_config(options.model)
    if options.sequence_length > config.max_position_embeddings:
        raise ValueError(
            f"sequence length {options.sequence_length} is longer than {options.model} was made for "
            f"({config.max_position_embeddings} positions)"
        )
    if config.vocab_size < ByteTokenizer.vocab_size:
        raise ValueError(f"{options.model} has {config.vocab_size} token ids, bytes need {ByteTokenizer.vocab_size}")
    segments = parse_segments(options.segments)
    skeleton = in_rounds(abstract(config, segments=segments), options.expert_rounds)
    skeleton = parse_placements(skeleton, options.placements)
    training, validation = load_corpus(options.data).split()
    dataset = PackedDataset(training, options.sequence_length, vocab_size=config.vocab_size)
    held_out = PackedDataset(validation, options.sequence_length, vocab_size=config.vocab_size, padded=True)
    check_mesh(skeleton, options, place)
    check_memory(skeleton, options, place)
    memory = parse_state_memory(options.state_memory)
    init_state(skeleton, adamw(options.learning_rate), key=jax.random.key(0), state_memory=memory)
    metadata = None
    if options.resume is not None:
        metadata = resumable(options, dataset)
    return Run(options, out, config, segments, skeleton, dataset, held_out, metadata, place)


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set. A second Ctrl-C interrupts as usual."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: Any) -> None:
        stop.set()
        signal.signal(number, before[number])

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclasses.dataclass
class Run:
    """A run that is ready to go; calling it runs it and gives the exit code."""

    options: Options
    out: pathlib.Path
    config: Any
    segments: tuple[int, ...]
    skeleton: Any
    dataset: PackedDataset
    held_out: PackedDataset
    metadata: dict[str, Any] | None
    layout: Layout | None = None
    records: list[Record] = dataclasses.field(default_factory=list)
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    def __call__(self, console: Console) -> int:
        with _interruptible() as stop:
            self._introduce(console)
            step, state = self._begin()
            position = Position(**self.metadata["position"]) if self.metadata else Position()
            batches = self.dataset.batches(self.options.batch_size, seed=self.options.seed, position=position)
            start = int(state.step)
            self._validate(console, step, state, start)
            code = 0
            try:
                state = self._train(console, step, state, batches, stop)
            except TrainingDiverged as error:
                console.print(f"[bold red]stopped:[/] {escape(str(error))}")
                state, code = error.state, 1
            done = int(state.step)
            if not code:
                self._validate(console, step, state, done)
            self._save(console, step, state, batches.position, sampled=not stop.is_set() and not code)
            if stop.is_set():
                where = escape(str(self.out))
                console.print(f"interrupted after step {done} of {self.options.steps}; saved in {where}. Go on with:")
                # On a line of its own that isn't wrapped, to be pasted.
                console.print(f"overspill train --resume {escape(shlex.quote(str(self.out)))} {self._resume_options()}",
                              soft_wrap=True)  # fmt: skip
                code = code or 130
            return code

    def _resume_options(self) -> str:
        """The options that a resumed run needs to be the same run."""
        options = self.options
        parts = ["--steps", str(options.steps), "--model", options.model, "--batch-size", str(options.batch_size),
                 "--sequence-length", str(options.sequence_length), "--seed", str(options.seed),
                 "--learning-rate", str(options.learning_rate), "--dtype", options.dtype]  # fmt: skip
        parts += ["--segments", options.segments] if options.segments else []
        parts += ["--data", str(options.data)] if options.data else []
        parts += ["--mesh", options.mesh] if options.mesh else []
        parts += ["--cpu-devices", str(options.cpu_devices)] if options.cpu_devices else []
        parts += ["--accumulate", str(options.accumulate)] if options.accumulate > 1 else []
        parts += ["--expert-rounds", str(options.expert_rounds)] if options.expert_rounds > 1 else []
        for flag, texts in (("--rule", options.rules), ("--state-memory", options.state_memory),
                            ("--placements", options.placements)):  # fmt: skip
            for text in texts:
                parts += [flag, text]
        return shlex.join(parts)

    def _introduce(self, console: Console) -> None:
        total, active, mtp = parameters(self.skeleton)
        console.print(
            f"[bold]{escape(self.options.model)}[/]: {total:,} parameters, {active:,} active a token"
            + (f", {mtp:,} more for multi-token prediction" if mtp else "")
        )
        console.print(f"data: {self.dataset}\nvalidation: {self.held_out}", markup=False)
        if self.layout is not None:
            lie = shards(self.skeleton, self.layout)
            console.print(f"mesh {self.options.mesh}: {format_bytes(lie.shard_bytes)} of the parameters' "
                          f"{format_bytes(lie.bytes)} (float32) on each device", markup=False)  # fmt: skip
        table = activations(self.skeleton)
        console.print(table)
        placed = {p: sum(row[1] == p for row in table.rows) for p in Placement}
        console.print(", ".join(f"{count} on {p}" if p != Placement.RECOMPUTE else f"{count} to recompute"
                                for p, count in placed.items() if count))  # fmt: skip
        if jax.default_backend() == "cpu":
            console.print("this is a CPU: placements are in the program, not in memory, for all of it is host memory")

    def _begin(self) -> tuple[Step, TrainState]:
        options = self.options
        dtype = DTYPES[options.dtype]
        optimizer = adamw(warmup_cosine(options.learning_rate, steps=options.steps))
        weights, run_key = jax.random.split(jax.random.key(options.seed))
        # Weights are drawn once, as the state: what the step holds is the skeleton.
        model = build(self.config, key=weights, dtype=dtype, segments=self.segments, mesh=self.layout)
        model = parse_placements(in_rounds(model, options.expert_rounds), options.placements)
        master = jnp.float32 if dtype == jnp.bfloat16 else None
        memory = parse_state_memory(options.state_memory)
        state = init_state(model, optimizer, key=run_key, master_dtype=master, state_memory=memory)
        step = make_train_step(
            model, optimizer, accumulate=options.accumulate, mesh=self.layout, state_memory=memory
        )
        if self.metadata is not None:
            state = checkpoint_io.restore(options.resume / "checkpoint", state, config=self.config)
        return step, state

    def _validate(self, console: Console, step: Step, state: TrainState, done: int) -> None:
        batches = self.held_out.once(self.options.batch_size, max_batches=_VALIDATION_BATCHES)
        loss = step.evaluate(state, batches)
        self.validation.append((done, loss))
        console.print(f"validation loss after {done} steps: [bold]{loss:.3f}[/] nats a byte")

    def _train(
        self, console: Console, step: Step, state: TrainState, batches: Any, stop: threading.Event
    ) -> TrainState:
        options = self.options
        todo = options.steps - int(state.step)
        columns = (
            TextColumn("training"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s "),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        kept = check(step, state, next(self.dataset.batches(options.batch_size)))
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("training", total=todo, loss="-", speed="-")
            first = True
            for state, records in train(step, state, batches, steps=todo, every=10, should_stop=stop.is_set):
                self.records.extend(records)
                last = records[-1]
                speed = "-" if last.tokens_per_second != last.tokens_per_second else f"{last.tokens_per_second:,.0f}"
                progress.update(task, advance=len(records), loss=f"{last.loss:.3f}", speed=speed)
                if first:
                    console.print(f"compiled in {progress.tasks[0].elapsed or 0:.0f} s")
                    _show_census(console, kept)
                    first = False
        return state

    def _save(self, console: Console, step: Step, state: TrainState, position: Position, *, sampled: bool) -> None:
        self.out.mkdir(parents=True, exist_ok=False)
        extra = identity(self.options, self.dataset)
        checkpoint_io.save(self.out / "checkpoint", state, config=self.config, position=position, extra=extra)
        artifacts.write_csv(self.out / "loss.csv", self.records)
        artifacts.write_curve(self.out / "loss.png", self.records, self.validation)
        console.print(f"saved in {escape(str(self.out))}: checkpoint, loss.csv, loss.png", end="" if sampled else "\n")
        if sampled and self.options.sample:
            console.print(", sample.txt")
            tokenizer = ByteTokenizer()
            prompt = jnp.asarray(tokenizer.encode(self.options.prompt, begin=True))[None]
            new = generate(
                step.trained(state), prompt, max_new_tokens=self.options.sample, temperature=0.7,
                allowed=tokenizer.vocab_size, key=jax.random.key(self.options.seed),
            )  # fmt: skip
            text = self.options.prompt + tokenizer.decode(new[0])
            artifacts.write_text(self.out / "sample.txt", text + "\n")
            console.rule("a sample")
            console.print(text, markup=False)
            console.rule()
        elif sampled:
            console.print()


def _show_census(console: Console, kept: Census) -> None:
    console.print(kept.table())
    console.print(
        f"every annotation holds: {format_bytes(kept.host_bytes)} of activations wait on the host, "
        f"{format_bytes(kept.device_bytes)} on the device"
    )


