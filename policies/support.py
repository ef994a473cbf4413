"""What the installed JAX and the devices at hand can do about host memory, in plain words."""

import functools
import warnings
from typing import Any

import jax

# On these versions the new implementation of jax.checkpoint turns offload into recompute, silently.
_REMAT3_FLAG = "jax_remat3"
_REMAT3_OFFLOADS_FROM = (0, 11)


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in jax.__version__.split(".")[:2])


class OffloadUnsupported(RuntimeError):
    """JAX would do something else with what should be offloaded; `names` are the activations."""

    def __init__(self, message: str, names: list[str]):
        super().__init__(message)
        self.names = names


def check_support(names: list[str]) -> None:
    """Raises OffloadUnsupported, or warns once, when activations placed on the host wouldn't get there.

    `names` are the activations that are to wait in host memory; the message names the first of them.
    """
    if getattr(jax.config, _REMAT3_FLAG, False) and _version() < _REMAT3_OFFLOADS_FROM:
        raise OffloadUnsupported(
            f"JAX {jax.__version__} with {_REMAT3_FLAG} on recomputes what should be offloaded "
            f"({names[0]!r} and {len(names) - 1} more): turn the flag off with "
            f"jax.config.update({_REMAT3_FLAG!r}, False), or use JAX 0.11.1 or newer",
            names,
        )
    _warn_without_host_memory(jax.default_backend())


def check_readable() -> None:
    """Raises RuntimeError when JAX writes programs in a form that a census can't read."""
    if getattr(jax.config, _REMAT3_FLAG, False) and _version() >= _REMAT3_OFFLOADS_FROM:
        raise RuntimeError(
            f"a census can't read what {_REMAT3_FLAG} makes of jax.checkpoint: it is off by default, so look at the "
            f"program without it, jax.config.update({_REMAT3_FLAG!r}, False)"
        )


def memory_kinds(device: Any) -> frozenset[str]:
    """The kinds of memory that `device` can address, such as `device` and `pinned_host`."""
    return frozenset(memory.kind for memory in device.addressable_memories())


@functools.cache
def _warn_without_host_memory(backend: str) -> None:
    if backend == "cpu":
        return  # everything is host memory there: the log of a run says so, a warning would only annoy
    device = jax.local_devices(backend=backend)[0]
    if "pinned_host" not in memory_kinds(device):
        warnings.warn(
            f"{device.device_kind} ({backend}) offers no pinned_host memory, only "
            f"{', '.join(sorted(memory_kinds(device)))}: activations placed on the host stay on the device",
            RuntimeWarning,
            stacklevel=2,
        )
