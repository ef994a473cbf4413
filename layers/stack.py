"""A stack of equal blocks: one scan over layers, or a few of them where placements differ by layer."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from ..policies.activation import named
from ..policies.axes import any_mesh
from .cache import LayerCache, stored_dtype
from .resident import Fetching, fetched, waits


def _edges(boundaries: Sequence[int], start: int, num_layers: int) -> list[int]:
    """Where segments begin, and the end of the last, as global layer indices."""
    end = start + num_layers
    edges = [start, *boundaries, end]
    if any(isinstance(b, bool) or not isinstance(b, int | np.integer) for b in boundaries):
        raise ValueError(f"segment boundaries are layer indices (whole numbers), not {tuple(boundaries)}")
    if any(low >= high for low, high in pairwise(edges)):
        if num_layers == 1:
            raise ValueError(f"a stack of one layer has no place for segment boundaries {tuple(boundaries)}")
        raise ValueError(
            f"segment boundaries {tuple(boundaries)} must increase and lie between {start + 1} and {end - 1}: "
            f"each is the global index of a layer that begins a new segment of layers {start} to {end - 1}"
        )
    return [int(edge) for edge in edges]


class Stack(eqx.Module):
    """Blocks of one kind, run one after the other.

    The blocks of a segment are stored as one block whose arrays have a leading layer axis, and a segment
    is one `jax.lax.scan`, so that compile time doesn't grow with depth. Activations are placed segment by
    segment. There is one segment unless boundaries ask for more.
    """

    segments: tuple[Any, ...]
    # How many layers each segment holds. Arrays say it too, but not in a tree without any, such as the
    # buffers of a stack that has none.
    lengths: tuple[int, ...] = eqx.field(static=True)
    # Global index of the first layer: a model may have stacks of several kinds, counted through.
    start: int = eqx.field(static=True, default=0)
    scan: bool = eqx.field(static=True, default=True)

    @classmethod
    def build(
        cls,
        make_block: Callable[[PRNGKeyArray], Any],
        num_layers: int,
        *,
        boundaries: Sequence[int] = (),
        start: int = 0,
        scan: bool = True,
        key: PRNGKeyArray,
    ) -> "Stack":
        """A stack of `num_layers` blocks, each made by `make_block(key)` with a key of its own.

        **Arguments:**

        - `boundaries`: global indices of the layers that begin a new segment, increasing. The weights
            don't depend on them.
        - `start`: global index of the first layer.
        - `scan`: False runs the layers in a Python loop: for debugging, or where unrolling is faster.

        Raises ValueError on boundaries that don't increase or lie outside the stack.
        """
        if num_layers < 1:
            raise ValueError(f"a stack needs at least one layer, not {num_layers}")
        edges = _edges(boundaries, start, num_layers)
        keys = jax.random.split(key, num_layers)
        segments = tuple(
            eqx.filter_vmap(make_block)(keys[low - start : high - start]) for low, high in pairwise(edges)
        )
        return cls(segments, tuple(high - low for low, high in pairwise(edges)), start, scan)

    @property
    def num_layers(self) -> int:
        return sum(self.lengths)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Global indices of the layers that begin a segment, without the first."""
        return tuple(int(edge) for edge in self.start + np.cumsum(self.lengths)[:-1])

    def layer(self, index: int) -> Any:
        """The block of the layer with global index `index`. Raises IndexError where there is none."""
        for first, length, segment in zip((self.start, *self.boundaries), self.lengths, self.segments, strict=True):
            if first <= index < first + length:
                return jax.tree.map(lambda leaf: leaf[index - first], segment)
        last = self.start + self.num_layers - 1
        raise IndexError(f"layer {index} is not in this stack of layers {self.start} to {last}")

    def __iter__(self) -> Iterator[Any]:
        return (self.layer(self.start + i) for i in range(self.num_layers))

    @jax.named_scope("stack")
    @any_mesh
    def __call__(
        self,
        x: Float[Array, "batch sequence features"],
        *,
        checkpoint: Callable[..., Callable[..., Any]] | None = None,
        per_layer: dict[str, Array] | None = None,
        cache: LayerCache | None = None,
        **kwargs: Any,
    ) -> tuple[Float[Array, "batch sequence features"], PyTree] | tuple[
        Float[Array, "batch sequence features"], PyTree, dict[str, Array]
    ]:
        """Runs every block on `x`.

        **Arguments:**

        - `x`: of any float dtype; a block returns the same shape and dtype.
        - `checkpoint`: wraps each block as `policies.checkpoint(block, prevent_cse=...)` does. None keeps
            whatever the backward pass wants, on the device.
        - `per_layer`: arguments of blocks that differ from layer to layer, `[num_layers, ...]` each.
        - `cache`: with this stack's arrays (see `init_cache`); goes through the blocks, which write into it.
        - `kwargs`: go to every block. What layers share (masks, rotary tables) is closed over by the scan:
            it is kept once, not once for each layer.

        **Returns:** the last block's output, the blocks' second results stacked over layers (None where
        blocks give None), and the cache's arrays where a cache is given.
        """
        # Called on its own, a stack decides the names; inside a model they are given already.
        self = named(self)

        def run(x: Array, held: PyTree, block: Any, index: Any, own: Any, prevent_cse: bool) -> tuple[Any, ...]:
            if waits(block):
                block = Fetching(block)
            if checkpoint is not None:
                block = checkpoint(block, prevent_cse=prevent_cse)
            if cache is None:
                return *block(x, **kwargs, **own), None
            handle = LayerCache(held, index, cache.start, cache.fresh, cache.dtype)
            x, result, handle = block(x, cache=handle, **kwargs, **own)
            return x, result, handle.arrays

        own = {} if per_layer is None else per_layer
        indices = None if cache is None else jnp.arange(self.num_layers)
        held, results, first = None if cache is None else cache.arrays, [], 0
        for segment, length in zip(self.segments, self.lengths, strict=True):
            slices = jax.tree.map(lambda leaf, low=first, high=first + length: leaf[low:high], (indices, own))
            first += length
            if self.scan and length > 1:
                arrays, static = eqx.partition(segment, eqx.is_array)

                def body(carry, layer, static=static):
                    leaves, (index, own) = layer
                    x, result, held = run(*carry, eqx.combine(leaves, static), index, own, False)
                    return (x, held), result

                # The loop itself keeps XLA from undoing rematerialisation, hence prevent_cse=False.
                (x, held), stacked = jax.lax.scan(body, (x, held), (arrays, slices))
                results.append(stacked)
                continue
            segment = fetched(segment)  # one by one only inside a scan
            for i in range(length):
                block, (index, mine) = jax.tree.map(lambda leaf: leaf[i], (segment, slices))
                x, result, held = run(x, held, block, index, mine, True)
                results.append(jax.tree.map(lambda leaf: leaf[None], result))
        result = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *results)
        return (x, result) if cache is None else (x, result, held)

    def init_cache(self, batch: int, capacity: int, dtype: Any) -> dict[str, Array]:
        """Empty arrays for a cache of `capacity` slots, `[num_layers, batch, ..., capacity, features]` each."""
        shapes = self.segments[0].cache_shapes(batch, capacity)
        return {name: jnp.zeros((self.num_layers, *shape), stored_dtype(dtype)) for name, shape in shapes.items()}


def resegment(stack: Stack, boundaries: Sequence[int]) -> Stack:
    """`stack` cut into segments at `boundaries`, with the same layers.

    Arrays keep their sharding and memory kind and are converted one at a time. Works on abstract stacks,
    and on stacks with only some of their leaves. A new segment takes the placements of the layer it
    begins with.

    Raises ValueError on boundaries that don't increase or lie outside the stack.
    """
    old, new = (_edges(cuts, stack.start, stack.num_layers) for cuts in (stack.boundaries, boundaries))
    if old == new:
        return stack
    flat = [jax.tree.flatten(segment) for segment in stack.segments]
    if len({len(leaves) for leaves, _ in flat}) != 1:
        raise ValueError("the segments of this stack hold different arrays, so they can't be joined")
    cuts = [edge - stack.start for edge in new]
    pieces = [recut(leaves, cuts) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)]
    segments = []
    for i, low in enumerate(new[:-1]):
        source = max(j for j, edge in enumerate(old[:-1]) if edge <= low)
        segments.append(jax.tree.unflatten(flat[source][1], [piece[i] for piece in pieces]))
    return Stack(tuple(segments), tuple(high - low for low, high in pairwise(new)), stack.start, stack.scan)


def recut(leaves: Sequence[Any], cuts: list[int]) -> list[Any]:
    """The arrays `leaves`, joined along their first axis and cut again at `cuts`, its two ends included.

    Sharding and memory kind stay. Works on abstract, NumPy and traced arrays too.
    """
    first = leaves[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        shapes = [(high - low, *first.shape[1:]) for low, high in pairwise(cuts)]
        return [jax.ShapeDtypeStruct(shape, first.dtype, sharding=first.sharding) for shape in shapes]
    if isinstance(first, np.ndarray):
        return np.split(np.concatenate(leaves), cuts[1:-1])
    if isinstance(first, jax.core.Tracer):
        return jnp.split(jnp.concatenate(leaves), cuts[1:-1])
    sharding = first.sharding
    if sharding.memory_kind in ("pinned_host", "unpinned_host"):
        # Operations on host memory are refused: join on the device, and back.
        leaves = [jax.device_put(leaf, leaf.sharding.with_memory_kind("device")) for leaf in leaves]
    parts = jnp.split(jnp.concatenate(leaves), cuts[1:-1])
    if first.committed or isinstance(sharding, NamedSharding):
        parts = [jax.device_put(part, sharding) for part in parts]
    return parts
