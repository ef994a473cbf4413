"""Models from names and configs: with weights, or as shapes alone; counted, and cut into other segments."""

import concurrent.futures
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.extend.core
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PRNGKeyArray, PyTree

from ..layers.moe import MoE
from ..layers.stack import Stack, recut, resegment as resegment_stack
from ..policies.axes import Layout
from ..policies.placing import place
from .config import Config, LlamaConfig
from .deepseek import DeepSeek
from .hf_config import from_config
from .llama import Llama
from .mesh_arrays import auto, relabel
from .mixture import Mixture
from .model import LanguageModel, check_boundaries, inner_boundaries
from .moe_config import DeepSeekConfig, MoEConfig
from .sharding import Rules, shard

T = TypeVar("T")

_FEW = 2**24  # elements that one program draws without a thought: their float32 is 64 MiB

_FAMILIES: dict[type[Config], type[LanguageModel]] = {LlamaConfig: Llama, MoEConfig: Mixture, DeepSeekConfig: DeepSeek}


def _maker(name_or_config: Any, dtype: Any, segments: Sequence[int], scan: bool) -> Callable[..., Any]:
    config = from_config(name_or_config)
    family = _FAMILIES.get(type(config))
    if family is None:
        raise ValueError(f"no family of models is built from a {type(config).__name__}")
    try:
        floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise ValueError(f"parameters need a floating dtype such as jax.numpy.bfloat16, got {dtype!r}")
    if not isinstance(segments, Sequence):
        raise ValueError(f"segments must be a sequence of layer indices, such as (8, 24), got {segments!r}")
    return lambda key: family(config, dtype=dtype, segments=tuple(segments), scan=scan, key=key)


def build(
    name_or_config: str | os.PathLike | Mapping[str, Any] | Config,
    *,
    key: PRNGKeyArray | None = None,
    dtype: Any = jnp.float32,
    segments: Sequence[int] = (),
    scan: bool = True,
    placements: Mapping[str, Any] | str | None = None,
    mesh: Mesh | AbstractMesh | Layout | None = None,
    rules: Rules | None = None,
) -> Any:
    """A model with fresh weights.

    **Arguments:**

    - `name_or_config`: a name in `registry.REGISTRY`, the path of a config.json or of its folder, what such a file
        holds as a dictionary, or a config: what `from_config` takes.
    - `key`: decides the weights, and alone does: neither `segments`, `scan` nor `mesh` changes them. Without one
        it is `jax.random.key(0)`.
    - `dtype`: of the parameters. Draws are float32 whatever it is, and so are routers.
    - `segments`: the layers that begin a new segment of their stack, for placements that differ by layer.
    - `scan`: False runs layers in a Python loop.
    - `placements`: where activations wait, as for `policies.place`; by default on the device.
    - `mesh`, `rules`: the devices that the model is cut over, and how, as for `shard`. Each draws its part of the
        weights: none holds more than that and the draws of one array. By default all are on the default device.

    Raises ValueError on a name that isn't known (near ones are listed), boundaries that are no inner layers,
    placements that `place` refuses, rules without a mesh and what `shard` refuses.
    """
    make = _maker(name_or_config, dtype, segments, scan)
    key = jax.random.key(0) if key is None else key
    if mesh is not None or rules is not None:
        options = {"dtype": dtype, "segments": segments, "scan": scan, "placements": placements}
        check_devices(mesh)
        return _draw(make, key, abstract(name_or_config, **options, mesh=mesh, rules=rules))
    # Not compiled whole, which would hold many draws in float32 at once.
    model = make(key)
    return model if placements is None else place(model, placements)


def abstract(
    name_or_config: str | os.PathLike | Mapping[str, Any] | Config,
    *,
    dtype: Any = jnp.float32,
    segments: Sequence[int] = (),
    scan: bool = True,
    placements: Mapping[str, Any] | str | None = None,
    mesh: Mesh | AbstractMesh | Layout | None = None,
    rules: Rules | None = None,
) -> Any:
    """The model that `build` would make, with `jax.ShapeDtypeStruct`s for arrays: no memory, whatever its size.

    It can be placed, printed, counted, resegmented, and traced with `jax.eval_shape`. Over a mesh, the shapes have
    shardings. Raises ValueError as `build` does.
    """
    make = _maker(name_or_config, dtype, segments, scan)
    model = eqx.filter_eval_shape(make, jax.random.key(0))
    if placements is not None:
        model = place(model, placements)
    return over(model, mesh, rules)


def over(model: T, mesh: Mesh | AbstractMesh | Layout | None, rules: Rules | None) -> T:
    """`model` cut over `mesh` by `shard`, or as it is without one. Raises ValueError for rules without a mesh."""
    if mesh is not None:
        return shard(model, mesh, rules)
    if rules is not None:
        raise ValueError("rules say how a model is cut over a mesh: they need mesh=")
    return model


def check_devices(mesh: Mesh | AbstractMesh | Layout | None) -> None:
    """Raises ValueError for a mesh without devices, on which no weights can lie."""
    if isinstance(mesh.mesh if isinstance(mesh, Layout) else mesh, AbstractMesh):
        raise ValueError("no weights can lie on a mesh without devices: zoo.abstract makes a model without weights")


def _draw(make: Callable[..., T], key: PRNGKeyArray, skeleton: T) -> T:
    """`make(key)` as the abstract `skeleton` has it, each device making what its shardings say that it holds."""
    wanted, structure = jax.tree.flatten(skeleton)
    mesh = wanted[0].sharding.mesh
    # Where axes are Explicit, operations on a key that is everywhere would give arrays that are whole everywhere.
    plain = auto(mesh)
    with jax.set_mesh(plain):
        key = jax.device_put(key, NamedSharding(plain, PartitionSpec()))
        traced = jax.make_jaxpr(lambda key: jax.tree.leaves(eqx.filter(make(key), eqx.is_array)))(key)
        # Programs of a few arrays: one for all could hold all of their draws at once.
        programs = [_drawing(traced, group, wanted, plain).lower(key) for group in _groups(wanted)]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
            compiled = list(threads.map(lambda lowered: lowered.compile(), programs))
        arrays = [array for program in compiled for array in jax.block_until_ready(program(key))]
    return jax.tree.unflatten(structure, [relabel(a, leaf.sharding) for a, leaf in zip(arrays, wanted, strict=True)])


def _drawing(traced: Any, group: range, wanted: list[jax.ShapeDtypeStruct], mesh: Mesh) -> Any:
    """A program of the key that makes the arrays `group` of those that `traced` makes."""

    def arrays(key: PRNGKeyArray) -> list[Array]:
        made = jax.extend.core.jaxpr_as_fun(traced)(key)
        return [made[i] for i in group]

    return jax.jit(arrays, out_shardings=[NamedSharding(mesh, wanted[i].sharding.spec) for i in group])


def _groups(wanted: list[jax.ShapeDtypeStruct]) -> Iterator[range]:
    """Neighbours that together have no more elements than the largest array, or few."""
    limit, start, size = max(_FEW, *(leaf.size for leaf in wanted)), 0, 0
    for i, leaf in enumerate(wanted):
        if size + leaf.size > limit:
            yield range(start, i)
            start, size = i, 0
        size += leaf.size
    yield range(start, len(wanted))


class Parameters(NamedTuple):
    """Numbers of parameters, router biases included as in published counts.

    `total` and `active`, those that take part in one token's forward pass (embedding and head in full),
    leave out multi-token prediction; `mtp` is the total of its modules, without the shared embedding and head.
    """

    total: int
    active: int
    mtp: int


def parameters(model: LanguageModel | str | os.PathLike | Mapping[str, Any] | Config) -> Parameters:
    """Counts the parameters of a model, concrete or abstract; what `build` takes is built abstractly."""
    if not isinstance(model, LanguageModel):
        model = abstract(model)
    modules = getattr(model, "mtp", ())
    mtp = _count(modules)
    total = _count(model) - mtp
    main = eqx.tree_at(lambda m: m.mtp, model, ()) if modules else model
    idle = sum(
        # The count of one layer's experts is a multiple of their number, so this is exact.
        _count(node.experts) // node.router.num_experts * (node.router.num_experts - node.router.top_k)
        for node in jax.tree.leaves(main, is_leaf=lambda node: isinstance(node, MoE))
        if isinstance(node, MoE)
    )
    return Parameters(total, total - idle, mtp)


def _count(tree: PyTree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def resegment(tree: T, boundaries: Sequence[int], *, model: LanguageModel | None = None) -> T:
    """`tree` with its layers cut into segments at `boundaries`: a model, or a training state that goes with one.

    **Arguments:**

    - `tree`: a PyTree with `Stack`s in it, such as a model or its gradients; or, when `model` is given, one that
        holds arrays in dictionaries by their path, such as a `TrainState`. Arrays are converted one by one;
        sharding and memory kind stay.
    - `boundaries`: the layers, counted through all stacks of a model, that begin a new segment; `()` joins.
    - `model`: the model as it is cut now, concrete or abstract, that the state `tree` goes with.

    A new segment takes the placements of the layer it begins with: place again where that isn't wanted.
    Raises ValueError on boundaries that are no inner layers, when there is no stack, or when a state lacks arrays
    of a segment of `model`.
    """
    stacks = [node for node in jax.tree.leaves(tree if model is None else model, is_leaf=_is_stack) if _is_stack(node)]
    if not stacks:
        raise ValueError(
            f"{type(tree if model is None else model).__name__} holds no stack of layers to cut into segments; "
            "a training state is cut with the model it goes with: resegment(state, boundaries, model=model)"
        )
    check_boundaries(boundaries, max(stack.start + stack.num_layers for stack in stacks))
    if model is not None:
        return jax.tree.map(
            lambda node: _recut_paths(node, boundaries, model.stacks()) if isinstance(node, dict) else node,
            tree,
            is_leaf=lambda node: isinstance(node, dict),
        )

    def cut_anew(node: Any) -> Any:
        if not _is_stack(node):
            return node
        return resegment_stack(node, inner_boundaries(boundaries, node.start, node.num_layers))

    return jax.tree.map(cut_anew, tree, is_leaf=_is_stack)


def _recut_paths(arrays: dict[str, Any], boundaries: Sequence[int], stacks: dict[str, Stack]) -> dict[str, Any]:
    """`arrays`, by their path in a model, with those of stacks cut anew."""
    out = dict(arrays)
    for name, stack in stacks.items():
        inner = inner_boundaries(boundaries, stack.start, stack.num_layers)
        cuts = [0, *(b - stack.start for b in inner), stack.num_layers]
        first = f"{name}.segments.0."
        for rest in [path.removeprefix(first) for path in arrays if path.startswith(first)]:
            paths = [f"{name}.segments.{i}.{rest}" for i in range(len(stack.lengths))]
            missing = [path for path in paths if path not in arrays]
            if missing:
                raise ValueError(f"the state has no {missing[0]!r}, which the model it should go with has")
            pieces = recut([out.pop(path) for path in paths], cuts)
            out |= {f"{name}.segments.{i}.{rest}": piece for i, piece in enumerate(pieces)}
        if left := [path for path in out if path.startswith(f"{name}.segments.{len(cuts) - 1}.")]:
            raise ValueError(f"the state has {left[0]!r}, which the model it should go with lacks")
    return out


def _is_stack(node: Any) -> bool:
    return isinstance(node, Stack)
