"""The training loop: dispatches steps without waiting for them, and stops when training has diverged."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from .data import Batch
from .train import Metrics, Step, TrainState


class TrainingDiverged(RuntimeError):
    """Too many steps in a row had to be skipped; the message says why. `state` is the last one, still good."""

    def __init__(self, message: str, state: TrainState):
        super().__init__(message)
        self.state = state


class Record(NamedTuple):
    """One step as the host sees it. `tokens_per_second` is that of the steps it was fetched with."""

    step: int
    loss: float
    mtp_loss: float
    balance_loss: float
    grad_norm: float
    tokens: int
    skipped: bool
    expert_load: dict[str, np.ndarray]
    tokens_per_second: float  # NaN for the first step, which includes compilation


def train(
    step: Step,
    state: TrainState,
    batches: Iterable[Batch],
    *,
    steps: int,
    every: int = 10,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[TrainState, list[Record]]]:
    """Trains for `steps` steps, and yields the state and the records of the steps since, every `every` of them.

    Steps are dispatched without waiting for the one before; the host fetches numbers only when it yields: after
    the first step, then every `every` steps, and at the end. The yielded state is current until the next is asked
    for, which donates it. `should_stop` is asked after each step (Ctrl-C, a time limit): the loop ends with a yield.

    Raises TrainingDiverged, which names the reason and holds the state, once `step.max_bad_steps` steps in a row
    had to be skipped.
    """
    if steps < 1 or every < 1:
        raise ValueError(f"steps and every must be at least 1, got {steps!r} and {every!r}")
    pending: list[Metrics] = []
    first, started, done = True, time.perf_counter(), int(state.step)
    iterator = iter(batches)
    for count in range(1, steps + 1):
        batch = next(iterator, None)
        last = batch is None or count == steps
        if batch is not None:
            state, metrics = step(state, batch)
            pending.append(metrics)
            last = last or should_stop()
        if pending and (last or first or len(pending) == every):
            fetched, pending = jax.device_get(pending), []
            seconds = time.perf_counter() - started
            speed = float("nan") if first else sum(float(m.tokens) for m in fetched) / max(seconds, 1e-9)
            for metrics in fetched:
                if int(metrics.consecutive) >= step.max_bad_steps:
                    raise TrainingDiverged(
                        f"training diverged: {int(metrics.consecutive)} steps in a row had to be skipped, the last "
                        f"one because {step.reason(metrics)}",
                        state,
                    )
            records = [_record(done + i, m, speed) for i, m in enumerate(fetched, start=1)]
            done += len(records)
            yield state, records
            # Work of whoever took the records doesn't count.
            first, started = False, time.perf_counter()
        if last:
            return


def _record(number: int, m: Metrics, speed: float) -> Record:
    floats = (float(x) for x in (m.loss, m.mtp_loss, m.balance_loss, m.grad_norm))
    load = {name: np.asarray(x) for name, x in m.expert_load.items()}
    return Record(number, *floats, int(m.tokens), bool(m.skipped), load, speed)
