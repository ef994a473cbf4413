"""Gradients in float64 NumPy, by a tape: slow, and nothing of JAX or XLA in them."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

_order = itertools.count()


class Node:
    """A float64 array, and how its gradient is passed on to what it was computed from."""

    def __init__(self, value: Any, parents: Sequence[tuple["Node", Callable[[np.ndarray], np.ndarray]]] = ()):
        self.value = np.asarray(value, np.float64)
        self.parents = tuple(parents)
        self.index = next(_order)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def __add__(self, other: Any) -> "Node":
        other = node(other)
        return Node(
            self.value + other.value,
            [(self, lambda g: _fit(g, self.shape)), (other, lambda g: _fit(g, other.shape))],
        )

    def __mul__(self, other: Any) -> "Node":
        other = node(other)
        return Node(
            self.value * other.value,
            [
                (self, lambda g: _fit(g * other.value, self.shape)),
                (other, lambda g: _fit(g * self.value, other.shape)),
            ],
        )

    def __sub__(self, other: Any) -> "Node":
        return self + node(other) * -1.0

    def __truediv__(self, other: Any) -> "Node":
        return self * node(other) ** -1.0

    def __pow__(self, exponent: float) -> "Node":
        return Node(self.value**exponent, [(self, lambda g: g * exponent * self.value ** (exponent - 1))])

    def __getitem__(self, index: Any) -> "Node":
        """Slices, or an array of rows, which may come up more than once."""

        def back(g: np.ndarray) -> np.ndarray:
            out = np.zeros(self.shape)
            np.add.at(out, index, g)
            return out

        return Node(self.value[index], [(self, back)])

    def reshape(self, *shape: int) -> "Node":
        return Node(self.value.reshape(shape), [(self, lambda g: g.reshape(self.shape))])

    def sum(self, axis: int | None = None) -> "Node":
        """Over one axis, which stays with size one, or over all of them."""
        if axis is None:
            return Node(self.value.sum(), [(self, lambda g: np.broadcast_to(g, self.shape))])
        return Node(self.value.sum(axis, keepdims=True), [(self, lambda g: np.broadcast_to(g, self.shape))])


def node(value: Any) -> Node:
    """`value` itself if it is a Node, or a constant."""
    return value if isinstance(value, Node) else Node(value)


def _fit(gradient: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The gradient of what was broadcast from `shape`."""
    gradient = np.asarray(gradient)
    gradient = gradient.sum(axis=tuple(range(gradient.ndim - len(shape))))
    stretched = tuple(i for i, size in enumerate(shape) if size == 1 and gradient.shape[i] != 1)
    return np.asarray(gradient.sum(axis=stretched, keepdims=True))


def einsum(spec: str, a: Node, b: Node) -> Node:
    """A product of two arrays. Every index is in two of its three terms at least."""
    left, result = spec.split("->")
    first, second = left.split(",")
    return Node(
        np.einsum(spec, a.value, b.value, optimize=True),
        [
            (a, lambda g: np.einsum(f"{result},{second}->{first}", g, b.value, optimize=True)),
            (b, lambda g: np.einsum(f"{result},{first}->{second}", g, a.value, optimize=True)),
        ],
    )


def exp(x: Node) -> Node:
    value = np.exp(x.value)
    return Node(value, [(x, lambda g: g * value)])


def log(x: Node) -> Node:
    return Node(np.log(x.value), [(x, lambda g: g / x.value)])


def sigmoid(x: Node) -> Node:
    value = 1 / (1 + np.exp(-x.value))
    return Node(value, [(x, lambda g: g * value * (1 - value))])


def concatenate(parts: Sequence[Node]) -> Node:
    """Along the last axis."""
    edges = np.cumsum([0, *(part.shape[-1] for part in parts)])
    backs = [lambda g, low=low, high=high: g[..., low:high] for low, high in itertools.pairwise(edges)]
    return Node(np.concatenate([part.value for part in parts], -1), list(zip(parts, backs, strict=True)))


def gradients(result: Node, leaves: Iterable[Node]) -> list[np.ndarray]:
    """The gradient of the scalar `result` with respect to each of `leaves`."""
    found, reached, waiting = {result.index: np.ones(())}, {result.index: result}, [result]
    while waiting:
        for parent, _ in waiting.pop().parents:
            if parent.index not in reached:
                reached[parent.index] = parent
                waiting.append(parent)
    # What was made later is never an input of what was made earlier.
    for index in sorted(reached, reverse=True):
        for parent, back in reached[index].parents:
            part = back(found[index])
            found[parent.index] = found[parent.index] + part if parent.index in found else part
    return [found.get(leaf.index, np.zeros(leaf.shape)) for leaf in leaves]
