"""The state of training: arrays by path, where each of them lies, and in which memory."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding
from jaxtyping import PRNGKeyArray, PyTree

from ..policies.activation import Placement
from ..policies.axes import Layout
from ..policies.spaces import typed
from .compiled import commit, default_sharding, replicated
from .memory import StateMemory, memory_of, state_path, with_memory
from .optimizer import arrays_by_path, trainable
from .sharding import Rules, shard

# States in host memory are made in parts of about so many bytes a device, each of which is on the device for a while.
_PART = 256 * 2**20


def float32(tree: PyTree) -> PyTree:
    """`tree` with its floating-point arrays widened to float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


class TrainState(eqx.Module):
    """All that changes in training, and nothing else: arrays only, by path, without the model's structure.

    Annotations belong to the step, so placements can change from one step to the next, or on resuming, without
    touching the state.
    """

    params: dict[str, Any]  # by path in the model; master weights, if there are any
    buffers: dict[str, Any]  # what isn't trained by gradient: the routers' selection biases
    opt_state: PyTree
    step: Any  # int32 []: batches seen
    key: Any  # typed PRNG key []: of the run; a step's own is `fold_in(key, step)`
    bad_steps: Any  # int32 []: steps skipped because something wasn't finite
    consecutive: Any  # int32 []: how many of these were the last ones


def init_state(
    model: eqx.Module,
    optimizer: optax.GradientTransformation,
    *,
    key: PRNGKeyArray,
    master_dtype: Any = None,
    sharding: Sharding | None = None,
    mesh: Mesh | AbstractMesh | Layout | None = None,
    rules: Rules | None = None,
    state_memory: StateMemory | None = None,
) -> TrainState:
    """The state that training `model` starts from: copies of its arrays, committed with their memory kinds.

    **Arguments:**

    - `model`: an abstract one gives an abstract state, for ahead-of-time compilation.
    - `master_dtype`: parameters of narrower dtypes are kept in this one (`jnp.float32` for a bfloat16 model); the
        step computes in the model's dtypes all the same. Without it small updates of bfloat16 weights get lost.
    - `sharding`: where arrays go that aren't committed yet. By default the default device.
    - `mesh`, `rules`: `model` is cut over them first, as `zoo.shard` does. A model that lies over a mesh already
        gives a state that does, without. What an optimizer keeps for a parameter is cut like the parameter.
    - `state_memory`: from globs over the state's paths to `"host"` or `"device"`, such as `{"optimizer.*": "host"}`;
        paths begin with `params`, `buffers` and `optimizer`. What no glob matches is on the device.

    The optimizer's state is made for float32 parameters whatever their dtype, so that its moments are float32.
    Raises ValueError as `zoo.shard` does, and for a glob that matches nothing.
    """
    if mesh is not None:
        model = shard(model, mesh, rules)
    elif rules is not None:
        raise ValueError("rules say how to cut over a mesh: give mesh too")
    parameters, rest = trainable(model)
    params, buffers = commit((arrays_by_path(parameters), arrays_by_path(rest)), sharding)

    def widened(leaf: Any) -> Any:
        return leaf.dtype if master_dtype is None else jnp.promote_types(leaf.dtype, master_dtype)

    def make(params: dict[str, Any], buffers: dict[str, Any], key: PRNGKeyArray) -> TrainState:
        params = {path: jnp.array(leaf, widened(leaf), copy=True) for path, leaf in params.items()}
        zeros = [jnp.zeros((), jnp.int32) for _ in range(3)]
        # Copies: a donated state must not take the caller's model with it.
        return TrainState(params, jax.tree.map(jnp.copy, buffers), optimizer.init(float32(params)), zeros[0],
                          jax.random.clone(key), *zeros[1:])  # fmt: skip

    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in [*params.values(), *buffers.values()]):
        return make(params, buffers, key)  # inside `jax.eval_shape`, where nothing lies anywhere
    abstract = jax.eval_shape(make, params, buffers, key)

    def place(path: tuple, leaf: Any) -> Sharding:
        # An optimizer's moments lie where their parameter lies.
        for entry in path:
            like = {**params, **buffers}.get(getattr(entry, "key", None))
            if like is not None and like.shape == leaf.shape:
                return like.sharding
        return scalar

    first = next(iter(params.values()), None)
    scalar = replicated(first.sharding) if first is not None else sharding or default_sharding()
    shardings = jax.tree_util.tree_map_with_path(place, abstract)
    memory = memory_of(abstract, state_memory) if state_memory else {}
    shardings = jax.tree_util.tree_map_with_path(
        lambda path, s: with_memory(s, memory[state_path(path)]) if state_path(path) in memory else s, shardings
    )
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in [*params.values(), *buffers.values()]):
        return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)
    if Placement.HOST not in memory.values():
        return jax.jit(make, out_shardings=shardings)(params, buffers, key)
    return _in_parts(make, (params, buffers, key), abstract, shardings)


def _in_parts(make: Any, args: tuple, abstract: TrainState, shardings: TrainState) -> TrainState:
    """`make(*args)`, a part of it at a time: what goes to host memory passes through the device's."""
    targets, treedef = jax.tree.flatten(shardings)
    parts, room = [], 0
    for i, (leaf, target) in enumerate(zip(jax.tree.leaves(abstract), targets, strict=True)):
        size = leaf.size * leaf.dtype.itemsize
        if isinstance(target, NamedSharding):
            size = size // leaf.size * math.prod(target.shard_shape(leaf.shape)) if leaf.size else 0
        if size > room or not parts:
            parts.append([])
            room = _PART
        parts[-1].append(i)
        room -= size
    made: dict[int, Any] = {}
    for part in parts:
        pick = jax.jit(
            lambda *args, part=part: [typed(jax.tree.leaves(make(*args))[i], targets[i]) for i in part],
            out_shardings=[targets[i] for i in part],
        )
        made |= zip(part, jax.block_until_ready(pick(*args)), strict=True)
    return jax.tree.unflatten(treedef, [made[i] for i in range(len(targets))])
