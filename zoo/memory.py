"""Which memory each array of a training state lives in."""

import difflib
import fnmatch
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
from jax.sharding import Sharding

from ..policies.activation import Placement, path_string
from ..policies.spaces import HOST_MEMORY, on_host
from .compiled import compute_memory

T = TypeVar("T")
StateMemory = Mapping[str, str]

_KINDS = {Placement.DEVICE: None, Placement.HOST: HOST_MEMORY}


def state_path(path: tuple) -> str:
    """The path of an array in a training state as rules see it: `params.*`, `optimizer.*`, `buffers.*`, `step`..."""
    text = path_string(path)
    head, dot, rest = text.partition(".")
    return f"optimizer{dot}{rest}" if head == "opt_state" else text


def memory_of(state: Any, rules: StateMemory) -> dict[str, Placement]:
    """For each array of `state` that a rule matches, by its path, where it lives: `device` or `host`.

    Rules map globs over paths to one of the two; later ones win. Raises ValueError for a glob that matches nothing,
    naming near paths, and for another memory.
    """
    paths = [state_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    found: dict[str, Placement] = {}
    for glob, where in rules.items():
        if where not in tuple(_KINDS):
            raise ValueError(f"state_memory {glob!r}: a state lives on the 'device' or on the 'host', not {where!r}")
        place = Placement(where)
        matched = [path for path in paths if path == glob or fnmatch.fnmatchcase(path, glob)]
        if not matched:
            near = difflib.get_close_matches(glob, paths, n=3, cutoff=0.3) or paths[:3]
            raise ValueError(f"state_memory {glob!r} matches nothing in the state; it has {', '.join(near)} ...")
        found |= dict.fromkeys(matched, place)
    return found


def with_memory(sharding: Sharding, place: Placement) -> Sharding:
    """`sharding` in device or host memory."""
    return sharding.with_memory_kind(_KINDS[place] or compute_memory(sharding))


def settle(state: T, memory: Mapping[str, Placement]) -> T:
    """`state` with the arrays named in `memory` in theirs. What is there already isn't touched."""

    def move(path: tuple, leaf: Any) -> Any:
        place = memory.get(state_path(path))
        if place is None or isinstance(leaf, jax.core.Tracer):
            return leaf
        target = with_memory(leaf.sharding, place)
        if target.memory_kind == leaf.sharding.memory_kind:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=target)
        return jax.device_put(leaf, target)

    return jax.tree_util.tree_map_with_path(move, state)


def fetch(tree: T) -> T:
    """`tree` with what is in host memory copied to the device, to be computed with. Concrete or traced."""

    def move(leaf: Any) -> Any:
        if not on_host(leaf):
            return leaf
        if isinstance(leaf, jax.core.Tracer):
            return jax.device_put(leaf, jax.memory.Space.Device)
        return jax.device_put(leaf, with_memory(leaf.sharding, Placement.DEVICE))

    return jax.tree.map(move, tree)


def put_back(tree: T, like: T) -> T:
    """Traced `tree` with every array in the memory that the one in `like` is in."""
    return jax.tree.map(
        lambda new, old: jax.device_put(new, jax.memory.Space.Host) if on_host(old) else new, tree, like
    )
