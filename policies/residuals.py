"""The census: what a backward pass really keeps from its forward pass, read from the jaxpr."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .activation import Annotation, Placement, annotations, named, path_string
from .counted import Census, array_text
from .jaxprs import Program, has_backward
from .reading import Reader
from .remat import Checkpointed
from .report import Table, format_bytes
from .spaces import typed


class PlacementNotApplied(ValueError):
    """An activation doesn't wait where its annotation says; the message names it."""


def activations(tree: PyTree, census: Census | None = None) -> Table:
    """The annotated activations of `tree` as a table of path and placement.

    With a `census` of a program over the same tree each row also shows one layer's dtype and shape, and the
    bytes of all layers. `annotations(tree)` in `policies.activation` gives the rows as data.
    """
    columns = ["activation", "placement"]
    rows: list[tuple[Any, ...]] = []
    if census is not None:
        columns += ["one layer", "layers", "bytes", "in the program"]
    for path, activation in annotations(tree):
        row: tuple[Any, ...] = (path, activation.placement)
        if census is not None:
            entries = census.of(path)
            first = entries[0] if entries else None
            row += (
                array_text(first.dtype, first.shape) if first else "-",
                sum(e.layers for e in entries) if first else "-",
                format_bytes(sum(e.bytes for e in entries)) if first else "-",
                census.statuses.get(path, "never tagged"),
            )
        rows.append(row)
    return Table(columns, rows, title="Activations", paths=True)





def census(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Census:
    """What the backward pass of `function(*args, **kwargs)` keeps. Only traces: nothing is computed.

    **Arguments:**

    - `function`: a loss, a layer, `policies.checkpoint(layer)`, or a whole training step. One that holds
        a backward pass already is read as it is; any other is differentiated with respect to all its
        floating-point arrays, its own leaves included when it is a PyTree.
    - `args`, `kwargs`: its arguments: any PyTrees of arrays or `jax.ShapeDtypeStruct`s and of anything
        else, which is taken as static.

    Activations are listed by their path in the argument (or in `function`) that holds them; when
    several hold some, the position of the argument stands in front.

    Raises TypeError if nothing can be differentiated.
    """
    function, args, kwargs, rows = _name_arguments(function, args, kwargs)
    program = _trace(function, args, kwargs)
    return Reader(program, rows).census()


def check(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Census:
    """The census of `function(*args, **kwargs)`, once every annotation is found to hold.

    Raises PlacementNotApplied, naming the activation, when one that the backward pass needs waits
    elsewhere than annotated, when a name was never tagged, or when the raw value is kept beside its
    named copy. Names that the backward pass doesn't use, and second names of one value, are no fault.
    """
    found = census(function, *args, **kwargs)
    if not found.annotations:
        raise PlacementNotApplied(
            "no Activation is in reach: pass the annotated module as an argument of the function"
        )
    for path, placement in found.annotations.items():
        _check_one(path, placement, found)
    for path in found.raw:
        raise PlacementNotApplied(
            f"{path!r} is named, but the value before it got its name is kept as well: rebind first "
            "(`x = self.block_input(x)`) and use only the result"
        )
    return found


def _check_one(path: str, placement: Placement, found: Census) -> None:
    status = found.statuses[path]
    if status == "never tagged":
        raise PlacementNotApplied(
            f"{path!r} is annotated {placement.value!r}, but the program never tags a value with it: "
            "the layer must call the Activation on the value it stands for, and use what that returns"
        )
    if status == "not needed" or status.startswith("same value"):
        return
    actual = {e.memory.value for e in found.of(path)} or {status.replace("recomputed", "recompute")}
    if actual != {placement.value}:
        tagged = [p for p, s in found.statuses.items() if p in found.annotations and s != "never tagged"]
        applied = any(found.statuses[p] in ("host", "recomputed") for p in tagged)
        cause = (
            "another name or the code around it decides where this value waits"
            if applied
            else "no policy is applied: run the module through policies.checkpoint"
        )
        raise PlacementNotApplied(
            f"{path!r} is annotated {placement.value!r} but waits as {' and '.join(sorted(actual))!r}; {cause}"
        )


def _name_arguments(function: Any, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict, list[Annotation]]:
    """The call with every Activation in it named by its path, and the annotations by those names."""
    if hasattr(function, "raw") and hasattr(function, "annotated"):  # a training step of the zoo's
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


def _is_inexact(leaf: Any) -> bool:
    return _is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _trace(function: Any, args: tuple, kwargs: dict) -> Program:
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
        return Program(plain, labels, shardings)
    inexact = [_is_inexact(leaf) for leaf in leaves]
    outputs = [v.aval for v in plain.jaxpr.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    if not any(inexact) or not outputs:
        raise TypeError(
            "a census needs a function from floating-point arrays to floating-point arrays: "
            f"this one takes {sum(inexact)} and returns {len(outputs)}"
        )

    def both(leaves: list[Any], cotangents: list[Any]) -> Any:
        def of_inexact(moving: list[Any]) -> list[Any]:
            parts = iter(moving)
            out = call([next(parts) if is_float else leaf for is_float, leaf in zip(inexact, leaves, strict=True)])
            return [x for x in out if jnp.issubdtype(x.dtype, jnp.inexact)]

        out, pullback = jax.vjp(of_inexact, [leaf for leaf, is_float in zip(leaves, inexact, strict=True) if is_float])
        return out, pullback(cotangents)

    # Traced anew: with equal closures JAX may answer from its cache of `plain`, which is as good.
    closed = jax.make_jaxpr(both)(leaves, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in outputs])
    return Program(closed, labels + [None] * len(outputs), shardings)


def _label(path: tuple) -> str:
    """An argument's leaf as text: the position or keyword it came by, then its path in that argument."""
    part, *rest = path
    inner = path_string(tuple(rest))
    # The function's own leaves read like the activations beside them; `checkpoint`'s wrapper isn't part of it.
    return inner.removeprefix("module.") if getattr(part, "idx", None) == 0 else inner
