"""A call to be looked at: its activations named, its arrays apart from the rest, and both passes in one function."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .activation import Activation, Annotation, Placement, annotations, map_activations, named, path_string
from .jaxprs import Program, has_backward, names_in
from .remat import Checkpointed
from .spaces import typed
from .support import check_readable


@dataclasses.dataclass(frozen=True)
class Call:
    """A function with both passes and the arrays that it is called with.

    - `function`: from a list of arrays, in the order of `inputs`, to arrays.
    - `inputs`: the arrays, concrete or abstract.
    - `labels`: what each input is called; None for a cotangent, which belongs to the backward pass.
    - `rows`: the annotated activations, by the names that they have in the traced program.
    - `closed`: the jaxpr, where making this has traced it already.
    """

    function: Callable[..., Any]
    inputs: list[Any]
    labels: list[str | None]
    rows: list[Annotation]
    closed: Any = None

    @property
    def shardings(self) -> list[Any]:
        return [getattr(leaf, "sharding", None) for leaf in self.inputs]

    def trace(self) -> Program:
        """The graph of the call's values."""
        closed = self.closed if self.closed is not None else jax.make_jaxpr(self.function)(self.inputs)
        return Program(closed, self.labels, self.shardings)


def is_step(function: Any) -> bool:
    """Whether `function` is a training step, which knows its own annotated model and how it is lowered."""
    return all(hasattr(function, name) for name in ("raw", "annotated", "lower"))


def prepare(function: Callable[..., Any], args: tuple, kwargs: dict) -> Call:
    """The call `function(*args, **kwargs)` with a backward pass: its own, or that of all its floating-point arrays.

    Raises TypeError if nothing can be differentiated, and RuntimeError with JAX's flag `jax_remat3` on.
    """
    check_readable()
    try:
        return _prepare(*_name_arguments(function, args, kwargs, apart=True))
    except (TypeError, ValueError):
        # Names are a part of a tree's structure: a function that maps over two of its arguments, a model and an average
        # of it, wants theirs alike.
        *call, holders = _name_arguments(function, args, kwargs, apart=False)
        if len(holders) < 2:
            raise
        return _prepare(*call, holders)


def plain(function: Callable[..., Any], args: tuple, kwargs: dict) -> Call:
    """The call `function(*args, **kwargs)` as it is, its activations named, without a backward pass of its own."""
    function, args, kwargs, holders = _name_arguments(function, args, kwargs, apart=True)
    call, leaves, labels = _flattened(function, args, kwargs)
    closed = jax.make_jaxpr(call)(leaves)
    return Call(call, leaves, labels, _rows(holders, names_in(closed.jaxpr)), closed)


def placed(function: Any, args: tuple, kwargs: dict, placements: Mapping[str, Placement]) -> tuple[Any, tuple, dict]:
    """A call with its activations placed as `placements` say, by the names that they have in the traced program."""
    function, args, kwargs, _ = _name_arguments(function, args, kwargs, apart=True)

    def edit(path: str, node: Activation) -> Activation:
        place = placements.get(node.path or path)
        return node if place is None else dataclasses.replace(node, placement=place)

    function, args, kwargs = (map_activations(edit, part) for part in (function, args, kwargs))
    return function, args, kwargs


def _flattened(function: Any, args: tuple, kwargs: dict) -> tuple[Callable[..., Any], list[Any], list[str | None]]:
    """A call as a function of a list of arrays, these, and what each is called."""
    arrays, static = eqx.partition((function, args, kwargs), _is_array)
    flat, treedef = jax.tree_util.tree_flatten_with_path(arrays)
    leaves = [leaf for _, leaf in flat]
    labels: list[str | None] = [_label(path) for path, _ in flat]
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]

    def call(leaves: list[Any]) -> list[Any]:
        leaves = [typed(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]
        function, args, kwargs = eqx.combine(jax.tree.unflatten(treedef, leaves), static)
        return [x for x in jax.tree.leaves(function(*args, **kwargs)) if eqx.is_array(x)]

    return call, leaves, labels


def _prepare(function: Any, args: tuple, kwargs: dict, holders: list[list[Annotation]]) -> Call:
    call, leaves, labels = _flattened(function, args, kwargs)
    plain = jax.make_jaxpr(call)(leaves)
    rows = _rows(holders, names_in(plain.jaxpr))
    if has_backward(plain.jaxpr):
        return Call(call, leaves, labels, rows, plain)
    inexact = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    outputs = [v.aval for v in plain.jaxpr.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    if not any(inexact) or not outputs:
        raise TypeError(
            "a census needs a function from floating-point arrays to floating-point arrays: "
            f"this one takes {sum(inexact)} and returns {len(outputs)}"
        )

    def both(inputs: list[Any]) -> Any:
        leaves, cotangents = inputs[: len(inexact)], inputs[len(inexact) :]

        def of_inexact(moving: list[Any]) -> list[Any]:
            parts = iter(moving)
            out = call([next(parts) if is_float else leaf for is_float, leaf in zip(inexact, leaves, strict=True)])
            return [x for x in out if jnp.issubdtype(x.dtype, jnp.inexact)]

        out, pullback = jax.vjp(of_inexact, [leaf for leaf, is_float in zip(leaves, inexact, strict=True) if is_float])
        return out, pullback(cotangents)

    cotangents = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in outputs]
    return Call(both, [*leaves, *cotangents], [*labels, *[None] * len(outputs)], rows)


def _rows(holders: list[list[Annotation]], tagged: set[str]) -> list[Annotation]:
    """The annotations of what is called: not those of an average of a model, say, that is only carried along."""
    called = [rows for rows in holders if any(row.path in tagged for row in rows)]
    return list({row.path: row for rows in called or holders for row in rows}.values())


def _name_arguments(
    function: Any, args: tuple, kwargs: dict, *, apart: bool
) -> tuple[Any, tuple, dict, list[list[Annotation]]]:
    """The call with every Activation in it named by its path, and for each argument the annotations by those names.

    With `apart`, arguments with the same paths are told apart by where they stand.
    """
    if is_step(function):
        return function.raw, args, kwargs, [annotations(named(function.annotated))]
    while annotations(getattr(function, "__wrapped__", None)):
        function = function.__wrapped__  # a module under eqx.filter_jit: traced, it is all the same
    # A module wrapped by `checkpoint` is named from itself, not from its wrapper.
    wrapped = isinstance(function, Checkpointed)
    parts: dict[Any, Any] = {("function",): function.module if wrapped else function}
    parts |= {("argument", i): arg for i, arg in enumerate(args)}
    parts |= {("keyword", name): arg for name, arg in kwargs.items()}
    holding = [key for key, part in parts.items() if annotations(part)]
    # An optimizer's state holds the model's annotations as well: what a model is called decides for its mirrors.
    mirrors = {key: like for key in holding for like in holding if _mirrors(parts[key], parts[like])}
    models = [key for key in holding if key not in mirrors]
    if len(models) <= 1 or not apart:
        new = parts | {key: named(parts[key]) for key in models}
    else:
        together = named({str(key[-1]): parts[key] for key in models})
        new = parts | {key: together[str(key[-1])] for key in models}
    for key, like in mirrors.items():
        new[key] = _named_like(parts[key], parts[like], new[like])
    holders = [[Annotation(node.path or path, node) for path, node in annotations(new[key])] for key in models]
    module = new["function",]
    function = Checkpointed(module, function.prevent_cse) if wrapped else module
    args = tuple(new["argument", i] for i in range(len(args)))
    return function, args, {name: new["keyword", name] for name in kwargs}, holders


def _mirrors(part: Any, model: Any) -> bool:
    """Whether the activations of `part` are those of `model`, further down: in moments of an optimizer, say."""
    like = {row.path: row.activation for row in annotations(model)}
    ends = [(row.activation, _ending(row.path, list(like))) for row in annotations(part)]
    return not callable(part) and all(end is not None and like[end] == node for node, end in ends)


def _ending(path: str, paths: list[str]) -> str | None:
    """The one of `paths` that `path` ends with, and is longer than."""
    return next((end for end in paths if path.endswith(f".{end}")), None)


def _named_like(part: Any, model: Any, renamed: Any) -> Any:
    """`part` with its activations called as those of `model`, which it mirrors, are in `renamed`."""
    rows = zip(annotations(model), annotations(renamed), strict=True)
    names = {old.path: new.activation.path for old, new in rows}

    def give(path: str, node: Activation) -> Activation:
        return node if node.path is not None else dataclasses.replace(node, path=names[_ending(path, list(names))])

    return map_activations(give, part)


def _is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _label(path: tuple) -> str:
    """An argument's leaf as text: the position or keyword it came by, then its path in that argument."""
    part, *rest = path
    inner = path_string(tuple(rest))
    # The function's own leaves read like the activations beside them; `checkpoint`'s wrapper isn't part of it.
    return inner.removeprefix("module.") if getattr(part, "idx", None) == 0 else inner
