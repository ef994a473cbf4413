"""What the device's link to host memory carries, one way and both ways at once, and what its matmuls do."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from ..policies.spaces import HOST_MEMORY
from ..policies.support import memory_kinds

MIB = 2**20
_COPIES = 2  # arrays under way at once, as a training step has them
_CHAIN = 4  # matmuls in a program


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of copies of one size, in bytes per second: each way alone, and each while the other runs."""

    size: int  # bytes of one array
    device_to_host: float
    host_to_device: float
    both_device_to_host: float
    both_host_to_device: float

    def as_json(self) -> dict[str, Any]:
        return {"size_bytes": self.size, **_keyed(self)}


_WAYS = tuple(field.name for field in dataclasses.fields(Rates))[1:]


def _keyed(rates: Rates) -> dict[str, float]:
    return {f"{way}_bytes_per_second": getattr(rates, way) for way in _WAYS}


def largest_rates(rates: Sequence[Rates]) -> dict[str, float]:
    """The best rate of each kind over all sizes: what large copies reach, in bytes per second."""
    return {key: max(_keyed(one)[key] for one in rates) for key in _keyed(rates[0])}


def measure_links(device: Any, sizes: Sequence[int], repeats: int) -> list[Rates]:
    """The rates of copies between a device's memory and pinned host memory, the best of `repeats` for each size.

    Raises ValueError for a device without pinned host memory, and where a copy didn't go where it should.
    """
    if HOST_MEMORY not in memory_kinds(device):
        raise ValueError(f"{device.device_kind} offers no {HOST_MEMORY} memory, only {sorted(memory_kinds(device))}")
    here = SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
    there = SingleDeviceSharding(device, memory_kind=HOST_MEMORY)
    return [_measure_size(here, there, size, repeats) for size in sizes]


def _measure_size(here: SingleDeviceSharding, there: SingleDeviceSharding, size: int, repeats: int) -> Rates:
    rng = np.random.default_rng(0)
    held = [jax.device_put(rng.random(size // 4, np.float32), here) for _ in range(_COPIES)]
    away = jax.block_until_ready([jax.device_put(x, there) for x in held])
    for x in away:
        if x.sharding.memory_kind != HOST_MEMORY:
            raise ValueError(f"a copy to {HOST_MEMORY} memory is in {x.sharding.memory_kind} memory")
    amount = sum(x.nbytes for x in held)

    def out() -> list[jax.Array]:
        return [jax.device_put(x, there) for x in held]

    def back() -> list[jax.Array]:
        return [jax.device_put(x, here) for x in away]

    def both() -> tuple[float, float]:
        start = time.perf_counter()
        pairs = [(jax.device_put(x, there), jax.device_put(y, here)) for x, y in zip(held, away, strict=True)]
        return _finished(start, *zip(*pairs, strict=True))

    # The one way ends sooner than the other: each is timed on its own.
    together = [both() for _ in range(2 + repeats)][2:]
    first, second = (min(seconds) for seconds in zip(*together, strict=True))
    return Rates(
        size, amount / best_seconds(out, repeats), amount / best_seconds(back, repeats), amount / first, amount / second
    )


def _finished(start: float, *groups: Sequence[jax.Array]) -> tuple[float, ...]:
    """How long after `start` all arrays of each group were there."""
    seconds: dict[int, float] = {}
    while len(seconds) < len(groups):
        for i, group in enumerate(groups):
            if i not in seconds and all(x.is_ready() for x in group):
                seconds[i] = time.perf_counter() - start
    return tuple(seconds[i] for i in range(len(groups)))


def best_seconds(function: Callable[[], Any], repeats: int, warm_up: int = 2) -> float:
    """The least that calling `function` and waiting for its arrays takes, after some calls that don't count."""
    seconds = []
    for _ in range(warm_up + repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        seconds.append(time.perf_counter() - start)
    return min(seconds[warm_up:])


def measure_matmul(device: Any, dtype: Any, size: int, repeats: int) -> float:
    """Floating-point operations per second in products of `[size, size]` matrices of `dtype`."""
    sharding = SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
    # Random: zeros take less power, and some hardware is faster then. Scaled so that products of products are finite.
    draws = np.random.default_rng(0).standard_normal((size, size), np.float32)
    a = jax.device_put(jnp.asarray(draws, dtype), sharding)
    w = jax.device_put(jnp.asarray(draws.T / np.sqrt(size), dtype), sharding)

    @jax.jit
    def chain(a: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(_CHAIN):
            a = a @ w
        return a

    return 2 * size**3 * _CHAIN / best_seconds(lambda: chain(a, w), repeats)
