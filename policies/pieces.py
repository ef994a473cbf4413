"""Stacks of layers in a model, and the groups of layers that a planner may place differently."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax

from .activation import path_string


@dataclasses.dataclass(frozen=True)
class Layers:
    """A stack of equal layers, as it is cut into segments now.

    - `path`: of the stack in the model.
    - `start`: the index of its first layer, counted through all stacks of the model.
    - `lengths`: how many layers each segment has.
    """

    path: str
    start: int
    lengths: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return sum(self.lengths)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The layers, counted through all stacks of the model, that begin its segments, but for the first."""
        return tuple(self.start + n for n in itertools.accumulate(self.lengths))[:-1]

    def pieces(self, count: int | None) -> Iterator[tuple[int, int]]:
        """The first layer and the number of layers of each of `count` nearly equal groups; those of now for None.

        A group has two layers at least, as a loop of one is none, unless the stack has only one.
        """
        if count is None:
            lengths = list(self.lengths)
        else:
            count = max(1, min(count, self.num_layers // 2))
            base, more = divmod(self.num_layers, count)
            # The larger ones first: the last layers, whose activations are wanted at once, are the smaller group.
            lengths = [base + (i < more) for i in range(count)]
        first = self.start
        for length in lengths:
            yield first, length
            first += length

    def label(self, first: int, count: int) -> str:
        """What a group of layers is called."""
        if count == self.num_layers:
            return self.path
        return f"{self.path} {first} to {first + count - 1}" if count > 1 else f"{self.path} {first}"


def find_stacks(tree: Any) -> list[Layers]:
    """The stacks of a tree: what has segments, and how many layers are in each."""
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_stack)
    return [Layers(path_string(path), node.start, tuple(node.lengths)) for path, node in flat if _is_stack(node)]


def _is_stack(node: Any) -> bool:
    return all(hasattr(node, name) for name in ("segments", "lengths", "start", "boundaries"))
