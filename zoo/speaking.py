"""Text from a pretrained model at the command line: checked before the weights are read, shown as it comes."""

import contextlib
import dataclasses
import math
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.markup import escape

from . import generation, hf_config, pretrained
from .config import Config
from .hub import fetch, model_ids, one_line, read_optional
from .streaming import StopTexts
from .tokenizer import Tokenizer, load_tokenizer

_DTYPES = {"stored": None, "float32": jnp.float32, "bfloat16": jnp.bfloat16}
_NEW_TOKENS = 256
# What generation_config.json may ask for that changes what is generated and isn't done here, and its neutral values.
_NOT_DONE = {
    "repetition_penalty": (1.0,), "no_repeat_ngram_size": (0,), "typical_p": (1.0,), "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,), "num_beams": (1,), "penalty_alpha": (0.0,), "suppress_tokens": ([],), "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],), "encoder_repetition_penalty": (1.0,), "min_new_tokens": (0,), "min_length": (0,),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asks for; see `overspill generate --help`. None is what wasn't said."""

    model: str
    prompt: str
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    model_defaults: bool = False
    seed: int = 0
    dtype: str = "stored"
    chat: bool = False
    system: str | None = None
    stop: tuple[str, ...] = ()
    ids: bool = False


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: the arguments of `generate` of these names."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


def model_sampling(folder: pathlib.Path) -> tuple[Sampling, list[str]]:
    """What generation_config.json in a model folder recommends, and the names of what it asks for that isn't done.

    Only what it says: nothing is filled in. Raises ValueError, naming the file, for values of other types.
    """
    settings = read_optional(folder, "generation_config.json")
    missing = [name for name, neutral in _NOT_DONE.items() if settings.get(name) not in (None, *neutral)]
    if not settings.get("do_sample"):
        return Sampling(), missing
    values: dict[str, Any] = {"temperature": 1.0}
    for field in dataclasses.fields(Sampling):
        value = settings.get(field.name)
        if value is None or (field.name == "top_k" and value == 0):  # 0 there is for all of them
            continue
        if isinstance(value, bool) or not isinstance(value, int if field.name == "top_k" else int | float):
            value = repr(value)
            raise ValueError(f"{str(folder / 'generation_config.json')!r}: {field.name} is {value}, a number is wanted")
        values[field.name] = value if field.name == "top_k" else float(value)
    _check_sampling(values, f"{str(folder / 'generation_config.json')!r}: ")
    return Sampling(**values), missing


def parse_ids(text: str) -> list[int]:
    """Token ids from `1, 2, 3` or `1 2 3`. Raises ValueError for anything else."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        shown = one_line(text, 80)
        raise ValueError(f"with --ids the prompt is token ids such as '1 15043 29892', not {shown!r}") from None


def prepare(options: Options) -> "Speech":
    """Everything that can be wrong, found out before the weights are read. Raises ValueError."""
    _check(options)
    prompt = options.prompt
    if prompt == "-":
        # The newline that a shell puts at the end isn't part of what was asked.
        prompt = _standard_input().removesuffix("\n").removesuffix("\r")
    # The weights, which may have to be downloaded, wait until the rest is known to be right.
    folder = fetch(options.model, weights=False)
    config = hf_config.from_config(folder)
    notes: list[str] = []
    sampling = _sampling(options, folder, notes)
    tokenizer = None if options.ids else _tokenizer(folder)
    if tokenizer is None:
        ids, stops = parse_ids(prompt), model_ids(folder, "eos_token_id")
    else:
        stops = tokenizer.eos_ids
        if options.chat:
            system = [] if options.system is None else [{"role": "system", "content": options.system}]
            ids = tokenizer.chat([*system, {"role": "user", "content": prompt}])
        else:
            ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError("the prompt is empty: the model needs at least one token to go on from")
    beyond = next((i for i in ids if not 0 <= i < config.vocab_size), None)
    if beyond is not None:
        which = "" if options.ids else ": the tokenizer belongs to another model"
        raise ValueError(f"the prompt has token id {beyond}, and the model's are 0 to {config.vocab_size - 1}{which}")
    room = config.max_position_embeddings - len(ids)
    new = min(_NEW_TOKENS, room) if options.max_new_tokens is None else options.max_new_tokens
    if room < 1 or new > room:
        fewer = f", or at most {room} new tokens" if room > 0 else ""
        raise ValueError(
            f"the prompt has {len(ids)} tokens, which with {max(new, 1)} new ones is more than the "
            f"{config.max_position_embeddings} positions the model was made for: take a shorter prompt{fewer}"
        )
    stops = tuple(i for i in stops if i < config.vocab_size)
    return Speech(options, config, tokenizer, ids, new, stops, sampling, tuple(notes))


def _check(options: Options) -> None:
    if options.dtype not in _DTYPES:
        raise ValueError(f"dtype {options.dtype!r} is not one of {', '.join(_DTYPES)}")
    if options.max_new_tokens is not None and options.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be 1 or more, got {options.max_new_tokens}")
    _check_sampling(_given(options), "")
    for name, given, needs, present in (
        ("--system", options.system is not None, "--chat", options.chat),
        ("--chat", options.chat, "text, not --ids", not options.ids),
        ("--stop", bool(options.stop), "text, not --ids", not options.ids),
    ):
        if given and not present:
            raise ValueError(f"{name} goes with {needs}")
    StopTexts(options.stop)


def _check_sampling(values: Mapping[str, Any], where: str) -> None:
    for name, fits, wanted in (
        ("temperature", lambda t: 0 <= t < math.inf, "0 or more"),
        ("top_k", lambda k: k >= 1, "1 or more"),
        ("top_p", lambda p: 0 < p <= 1, "more than 0 and at most 1"),
        ("min_p", lambda p: 0 <= p <= 1, "between 0 and 1"),
    ):
        if name in values and not fits(values[name]):
            raise ValueError(f"{where}{name} must be {wanted}, got {values[name]}")


def _given(options: Options) -> dict[str, Any]:
    """What was said of sampling."""
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Sampling)}
    return {name: value for name, value in given.items() if value is not None}


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise ValueError("standard input is no valid text (UTF-8)") from None


def _tokenizer(folder: pathlib.Path) -> Tokenizer:
    hint = "or give token ids, with --ids"
    try:
        return load_tokenizer(folder)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; {hint}") from None
    except ValueError as error:
        raise ValueError(f"{error}; {hint}") from None


def _sampling(options: Options, folder: pathlib.Path, notes: list[str]) -> Sampling:
    given, base = _given(options), Sampling()
    if options.model_defaults:
        base, missing = model_sampling(folder)
        if not (folder / "generation_config.json").is_file():
            notes.append("there is no generation_config.json: --model-defaults changes nothing")
        if missing:
            notes.append(f"generation_config.json also asks for {', '.join(missing)}, which isn't done here")
    sampling = dataclasses.replace(base, **given)
    if sampling.temperature == 0 and given.keys() - {"temperature"}:
        unused = ", ".join("--" + name.replace("_", "-") for name in given if name != "temperature")
        notes.append(f"{unused}: of no effect at temperature 0, which takes the most probable token")
    return sampling


@dataclasses.dataclass
class Speech:
    """Text that is ready to be generated; calling it does that and gives the exit code."""

    options: Options
    config: Config
    tokenizer: Tokenizer | None
    prompt: Sequence[int]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    sampling: Sampling
    notes: tuple[str, ...] = ()
    # When the stream was asked for its first token, and when each of them came, in seconds.
    times: list[float] = dataclasses.field(default_factory=list)

    def __call__(self, notes: Console) -> int:
        """Writes the text to the standard output and what there is to say about it to `notes`."""
        for note in self.notes:
            notes.print(escape(note), soft_wrap=True)
        ended, code = f"{self.max_new_tokens} new tokens were asked for", 0
        try:
            model = self._load(notes)
            with contextlib.closing(self._tokens(model, notes)) as tokens:
                ended = self._write(tokens) or ended
        except KeyboardInterrupt:
            ended, code = "interrupted", 130
        except BrokenPipeError:
            # Who reads the output has read enough. Python would complain of what it can't write at its own end.
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ended = "nobody reads on"
        self._report(notes, ended)
        return code

    def _load(self, notes: Console) -> Any:
        folder, start = fetch(self.options.model), time.perf_counter()
        with notes.status(f"loading {escape(str(folder))}"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            model = pretrained.load(folder, dtype=_DTYPES[self.options.dtype])
        for warning in caught:
            if issubclass(warning.category, UserWarning):
                notes.print(f"note: {escape(one_line(warning.message))}", soft_wrap=True)
        notes.print(f"{escape(one_line(repr(model)))}, loaded in {time.perf_counter() - start:.1f} s", soft_wrap=True)
        return model

    def _tokens(self, model: Any, notes: Console) -> Iterator[int]:
        """The new token ids, with a note on the screen until the first is there."""
        allowed = self.config.vocab_size
        if self.tokenizer is not None:
            allowed = min(allowed, self.tokenizer.vocab_size)
        stream = generation.stream(
            model,
            np.asarray([self.prompt], np.int32),
            max_new_tokens=self.max_new_tokens,
            stop_ids=self.stop_ids,
            allowed=allowed,
            key=jax.random.key(self.options.seed),
            **dataclasses.asdict(self.sampling),
        )
        self.times.append(time.perf_counter())
        with notes.status("compiling, reading the prompt"):
            first = next(iter(stream), None)
        if first is None:
            return
        self.times.append(time.perf_counter())
        yield int(first[0])
        for row in stream:
            self.times.append(time.perf_counter())
            yield int(row[0])

    def _write(self, tokens: Iterator[int]) -> str | None:
        """Writes text, or ids, as they come; gives the reason if they end before there are enough of them."""
        if hasattr(sys.stdout, "reconfigure"):
            # In a terminal that has fewer characters than models, better a ? than an end.
            sys.stdout.reconfigure(errors="replace")
        until, ended, last = StopTexts(self.options.stop), None, "\n"
        streamer = None if self.tokenizer is None else self.tokenizer.streamer(self.prompt)

        def show(text: str) -> None:
            nonlocal last
            if text:
                last = text[-1]
                sys.stdout.write(text)
                sys.stdout.flush()

        try:
            for count, token in enumerate(tokens):
                stopped = token in self.stop_ids
                if streamer is None:
                    show(f"{' ' if count else ''}{token}")
                elif not stopped:
                    show(until.put(streamer.put(token)))
                if stopped:
                    ended = f"the model ended with token {token}"
                elif until.stopped:
                    ended = "a stop text came"
                if ended:
                    break
        finally:
            # What there is of a text that is interrupted is shown too.
            if streamer is not None:
                show(until.put(streamer.finish()) + until.finish())
            show("" if last == "\n" else "\n")
        return ended

    def _report(self, notes: Console, ended: str) -> None:
        if len(self.times) < 2:
            notes.print(escape(f"{ended}; no token was made"), soft_wrap=True)
            return
        start, first, *rest = self.times
        said = f"prompt: {_rate(len(self.prompt), first - start)} until the first token, compiling included"
        # The second token waits for its program to be compiled, so speed is counted from there.
        if len(rest) > 1:
            said += f"; then {_rate(len(rest) - 1, rest[-1] - rest[0])} after the second"
        notes.print(escape(f"{said}; {len(rest) + 1} new tokens: {ended}"), soft_wrap=True)


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens in {seconds:.2f} s ({tokens / max(seconds, 1e-9):,.1f} tokens/s)"
