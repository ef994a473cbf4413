"""Models from names and configs: with weights, or as shapes alone; counted, and cut into other segments."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from ..layers.moe import MoE
from ..layers.stack import Stack, recut, resegment as resegment_stack
from ..policies.placing import place
from .config import Config, LlamaConfig
from .deepseek import DeepSeek
from .hf_config import from_config
from .llama import Llama
from .mixture import Mixture
from .model import LanguageModel, check_boundaries, inner_boundaries
from .moe_config import DeepSeekConfig, MoEConfig

T = TypeVar("T")

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
) -> Any:
    """A model with fresh weights.

    **Arguments:**

    - `name_or_config`: a name in `registry.REGISTRY`, the path of a config.json or of its folder, what such a file
        holds as a dictionary, or a config: what `from_config` takes.
    - `key`: decides the weights, and alone does: neither `segments` nor `scan` changes them. Without one it
        is `jax.random.key(0)`.
    - `dtype`: of the parameters. Draws are float32 whatever it is, and so are routers.
    - `segments`: the layers that begin a new segment of their stack, for placements that differ by layer.
    - `scan`: False runs layers in a Python loop.
    - `placements`: where activations wait, as for `policies.place`; by default on the device.

    Raises ValueError on a name that isn't known (near ones are listed), boundaries that are no inner layers
    and placements that `place` refuses.
    """
    make = _maker(name_or_config, dtype, segments, scan)
    # Not compiled whole: a fusion would round the draws differently from one segmentation to the next, and
    # might hold many of them in float32 at once.
    model = make(jax.random.key(0) if key is None else key)
    return model if placements is None else place(model, placements)


def abstract(
    name_or_config: str | os.PathLike | Mapping[str, Any] | Config,
    *,
    dtype: Any = jnp.float32,
    segments: Sequence[int] = (),
    scan: bool = True,
    placements: Mapping[str, Any] | str | None = None,
) -> Any:
    """The model that `build` would make, with `jax.ShapeDtypeStruct`s for arrays: no memory, whatever its size.

    It can be placed, printed, counted, resegmented, and traced with `jax.eval_shape`.
    """
    make = _maker(name_or_config, dtype, segments, scan)
    model = eqx.filter_eval_shape(make, jax.random.key(0))
    return model if placements is None else place(model, placements)


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
