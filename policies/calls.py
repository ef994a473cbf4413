"""A call to be looked at: its activations named, its arrays apart from the rest, and both passes in one function."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .activation import Annotation, annotations, named, path_string
from .jaxprs import Program, has_backward
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
    function, args, kwargs, rows = _name_arguments(function, args, kwargs)
    arrays, static = eqx.partition((function, args, kwargs), _is_array)
    flat, treedef = jax.tree_util.tree_flatten_with_path(arrays)
    leaves = [leaf for _, leaf in flat]
    labels: list[str | None] = [_label(path) for path, _ in flat]
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]

    def call(leaves: list[Any]) -> list[Any]:
        leaves = [typed(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]
        function, args, kwargs = eqx.combine(jax.tree.unflatten(treedef, leaves), static)
        return [x for x in jax.tree.leaves(function(*args, **kwargs)) if eqx.is_array(x)]

    plain = jax.make_jaxpr(call)(leaves)
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


def _name_arguments(function: Any, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict, list[Annotation]]:
    """The call with every Activation in it named by its path, and the annotations by those names."""
    if is_step(function):
        return function.raw, args, kwargs, annotations(named(function.annotated))
    while annotations(getattr(function, "__wrapped__", None)):
        function = function.__wrapped__  # a module under eqx.filter_jit: traced, it is all the same
    # A module wrapped by `checkpoint` is named from itself, not from its wrapper.
    wrapped = isinstance(function, Checkpointed)
    parts: dict[Any, Any] = {("function",): function.module if wrapped else function}
    parts |= {("argument", i): arg for i, arg in enumerate(args)}
    parts |= {("keyword", name): arg for name, arg in kwargs.items()}
    holding = [key for key, part in parts.items() if annotations(part)]
    if len(holding) <= 1:
        new = parts | {key: named(parts[key]) for key in holding}
    else:
        # Several arguments with the same paths: where they stand tells them apart.
        together = named({str(key[-1]): parts[key] for key in holding})
        new = parts | {key: together[str(key[-1])] for key in holding}
    rows = [Annotation(node.path or path, node) for key in holding for path, node in annotations(new[key])]
    module = new["function",]
    function = Checkpointed(module, function.prevent_cse) if wrapped else module
    args = tuple(new["argument", i] for i in range(len(args)))
    return function, args, {name: new["keyword", name] for name in kwargs}, rows


def _is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _label(path: tuple) -> str:
    """An argument's leaf as text: the position or keyword it came by, then its path in that argument."""
    part, *rest = path
    inner = path_string(tuple(rest))
    # The function's own leaves read like the activations beside them; `checkpoint`'s wrapper isn't part of it.
    return inner.removeprefix("module.") if getattr(part, "idx", None) == 0 else inner
