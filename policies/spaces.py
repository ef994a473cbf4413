"""Memory spaces as types: which memory a traced array is in."""

from typing import Any

import jax

# The only memory kind that JAX takes for host memory: any other string means the device, silently.
HOST_MEMORY = "pinned_host"


def on_host(leaf: Any) -> bool:
    """Whether an array is in host memory: by its type where it is traced, by its sharding elsewhere."""
    if isinstance(leaf, jax.core.Tracer):
        return jax.typeof(leaf).memory_space == jax.memory.Space.Host
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None) == HOST_MEMORY


def typed(leaf: Any, sharding: Any) -> Any:
    """A traced argument typed with the memory that it comes in, where JAX has forgotten it.

    It does for abstract arrays, and for results of compiled functions that only their sharding put on the host: these
    would be computed with where they lie.
    """
    if getattr(sharding, "memory_kind", None) != HOST_MEMORY or not isinstance(leaf, jax.core.Tracer) or on_host(leaf):
        return leaf
    return jax.device_put(leaf, jax.memory.Space.Host)
