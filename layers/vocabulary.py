"""How an embedding's or a head's weight is cut over a mesh while it is used: rows over vocabulary, features whole."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ..policies.axes import Layout, current, manual_axes
from .local import by_specs


class Cuts(NamedTuple):
    """Which mesh axes cut what."""

    layout: Layout
    batch: tuple[str, ...]
    sequence: tuple[str, ...]
    vocab: tuple[str, ...]  # of the weight as it is used; none that cuts tokens
    scatter: tuple[str, ...]  # axes with tokens over which the weight's gradient is cut along its features

    @property
    def tokens(self) -> PartitionSpec:
        """Of an array `[batch, sequence, ...]`."""
        return PartitionSpec(self.batch or None, self.sequence or None)

    @property
    def weight(self) -> PartitionSpec:
        return PartitionSpec(self.vocab or None)

    @property
    def gradient(self) -> PartitionSpec:
        """Of what `sum_gradient` gives, and of a weight whose features stay in parts."""
        return PartitionSpec(self.vocab or None, self.scatter or None)

    def run(self, function: Callable[..., Any], *args: Array, takes: Any, gives: Any) -> Any:
        """`function` on what each device holds of `args` (see `by_specs`)."""
        return by_specs(self.layout, function, *args, takes=takes, gives=gives)

    def first(self, weight: Array) -> Array | int:
        """The id of row 0 of this device's part of the weight."""
        return jax.lax.axis_index(self.vocab) * weight.shape[0] if self.vocab else 0

    def sum_vocab(self, x: Any) -> Any:
        """The sum over the devices that hold different parts of the vocabulary."""
        return jax.lax.psum(x, self.vocab) if self.vocab else x

    def sum_tokens(self, x: Array) -> Array:
        """The sum over the devices that hold different tokens."""
        axes = self.batch + self.sequence
        return jax.lax.psum(x, axes) if axes else x

    def sum_gradient(self, gradient: Array) -> Array:
        """The weight's gradient, summed over devices with different tokens and cut where it is stored in parts."""
        if self.scatter:
            gradient = jax.lax.psum_scatter(gradient, self.scatter, scatter_dimension=1, tiled=True)
        rest = tuple(axis for axis in self.batch + self.sequence if axis not in self.scatter)
        return jax.lax.psum(gradient, rest) if rest else gradient


def cuts_in_use(owner: str, weight: Array, tokens: tuple[int, ...]) -> Cuts | None:
    """How the layout in use cuts `weight` and tokens of this shape; None where there is none, or it is done already.

    Raises ValueError, naming `owner`, where one of them can't be cut into equal parts.
    """
    layout = current()
    if layout is None or manual_axes():
        return None
    layout.check("batch sequence", tokens, f"{owner}: tokens")
    layout.check("vocab embed", weight.shape, f"{owner}: the weight")
    batch, sequence = layout.parts("batch sequence")
    (vocab,) = layout.parts("vocab", whole=batch + sequence)
    stored_vocab, stored_features = layout.parts("vocab embed")
    # Summed and cut in one step where what a device stores is its part of the vocabulary, cut once more.
    scatter = stored_features if stored_vocab == vocab and set(stored_features) <= {*batch, *sequence} else ()
    return Cuts(layout, batch, sequence, vocab, scatter)
