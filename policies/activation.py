"""Activations as nodes of a PyTree: what a layer computes, and where it waits for the backward pass."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PyTree

from .axes import constrain, parse

T = TypeVar("T")


class Placement(enum.StrEnum):
    """Where an activation waits between the forward and the backward pass."""

    DEVICE = "device"
    HOST = "host"
    RECOMPUTE = "recompute"

    @classmethod
    def parse(cls, value: Any) -> "Placement":
        """`value` itself if it is a Placement, or the one that it spells. Raises ValueError on anything else."""
        try:
            return cls(value)
        except ValueError:
            choices = ", ".join(repr(p.value) for p in cls)
            hint = "; memory kinds are chosen by Overspill: say 'host'" if "pinned" in str(value) else ""
            raise ValueError(f"placement {value!r} is not one of {choices}{hint}") from None


class Activation(eqx.Module):
    """One activation of a layer, annotated with its placement.

    A layer calls it on the value it stands for, `q = self.query(q)`, and uses only the result
    afterwards. Outside `policies.checkpoint` it is the identity. In a module it goes by its path, that is by the
    field that holds it; `name` is what presets know it by.

    `recomputable=False` marks a value that is kept wherever the rest goes: a scan keeps its carry, so
    a block's input can wait on the device or on the host but can't be recomputed.

    `axes` are the value's logical axes (`policies.axes.parse`): over a mesh it is cut as they say.
    """

    name: str = eqx.field(static=True)
    placement: Placement = eqx.field(static=True, default=Placement.DEVICE, converter=Placement.parse)
    recomputable: bool = eqx.field(static=True, default=True)
    axes: str | None = eqx.field(static=True, default=None, kw_only=True)
    # The name in the traced program, unique in the model; given by `named` for the length of a call.
    path: str | None = eqx.field(static=True, default=None)

    def __call__(self, x: Array) -> Array:
        name = self.path or self.name
        return checkpoint_name(constrain(x, self.axes, f"activation {name!r}"), name)

    def __check_init__(self) -> None:
        if self.axes is not None:
            parse(self.axes)


class Annotation(NamedTuple):
    """A row of `activations`: the activation's path in the tree, and the activation."""

    path: str
    activation: Activation

    @property
    def placement(self) -> Placement:
        return self.activation.placement


def is_activation(node: Any) -> bool:
    return isinstance(node, Activation)


def path_string(path: tuple) -> str:
    """A key path as dotted text: `layers.segments.0.attention.query`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def annotations(tree: PyTree) -> list[Annotation]:
    """Every Activation in `tree` with its path, in the tree's order.

    Raises ValueError when two have the same path, as keys with dots in them can bring about.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_activation)
    rows = [Annotation(path_string(path), node) for path, node in flat if is_activation(node)]
    paths = [row.path for row in rows]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"two activations are at the path {twice!r}: rename a key that holds a dot")
    return rows


def map_activations(function: Callable[[str, Activation], Activation], tree: T) -> T:
    """`tree` with each Activation replaced by `function(path, activation)`; nothing else is touched."""
    return jax.tree_util.tree_map_with_path(
        lambda path, node: function(path_string(path), node) if is_activation(node) else node,
        tree,
        is_leaf=is_activation,
    )


def named(tree: T) -> T:
    """`tree` with every Activation called by its path in it, so that no two names of a program collide.

    An Activation that has been given its path already keeps it: the outermost module decides. Models
    call this on themselves when they are called; `policies.checkpoint` does for what it wraps.
    """

    def give(path: str, node: Activation) -> Activation:
        if node.path is not None:
            return node
        return dataclasses.replace(node, path=path or node.name)

    return map_activations(give, tree)
