"""Tokens and the experts that compute them on different devices: what travels, where to, and back.

Arrays are cut over a mesh as its `Layout` says. A row here is a copy of a token on its way to one expert. Each device
sorts the rows of its own tokens, sends them to the devices of their experts, and groups what it receives by expert:
one all-to-all there and one back, forward and backward, over the mesh axes that cut both tokens and experts. Over
mesh axes that cut experts alone every device has the same tokens; each computes those of its own experts, and what
comes of a token is summed. No row is dropped: there is room for all tokens choosing the experts of one device.
"""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from ..policies.axes import vary
from .grid import Grid, cut, sum_over


class Exchange(eqx.Module):
    """Where the rows go. The leading axis of each array is one of devices, cut over `grid.rows`.

    Each device numbers the rows of its tokens in the order in which it sends them: by device, then by expert. What it
    receives it orders by expert, then by sender.
    """

    slot: Int[Array, "devices rows"]  # the slot (`token * top_k + choice`, on this device) that each row holds
    row: Int[Array, "devices slots"]  # the row that holds each slot; of slots that go nowhere, one that isn't sent
    sent: Int[Array, "devices parts"]  # how many rows each device of `grid.traded` gets from this one
    received: Int[Array, "devices parts experts"]  # how many this one gets from each, by expert
    load: Float[Array, " all_experts"]  # how many tokens went to each expert in all; the same on every device
    grid: Grid = eqx.field(static=True)
    top_k: int = eqx.field(static=True)

    @property
    def group_sizes(self) -> Int[Array, "devices experts"]:
        """How many rows each device has for each of its experts."""
        return jnp.sum(self.received, axis=1, dtype=jnp.int32)

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.slot, self.row, self.sent, self.received


def assign(
    grid: Grid,
    indices: Int[Array, "batch sequence top_k"],
    num_experts: int,
    *,
    token_mask: Bool[Array, "batch sequence"] | None = None,
) -> Exchange:
    """Decides where the choices of a router go; stable, as `experts.assign` is.

    **Arguments:**

    - `indices`: the experts chosen for each token, each in `0 .. num_experts - 1`.
    - `token_mask`: True for tokens that count. The others go to no expert.

    Raises ValueError when batch or sequence can't be cut as the layout says.
    """
    grid.layout.check("batch sequence _", indices.shape, "the experts chosen for tokens")
    by_row = (cut(grid.rows),) * 4
    given = (indices,) if token_mask is None else (indices, token_mask)
    local = grid.map(
        functools.partial(choose, grid, num_experts), (grid.tokens,) * len(given), (*by_row, cut(grid.experts))
    )
    *arrays, load = local(*given)
    return Exchange(*arrays, grid.pin(load, PartitionSpec()), grid, indices.shape[-1])


def choose(grid: Grid, num_experts: int, indices: Array, token_mask: Array | None = None) -> tuple[Array, ...]:
    """What a device has of the `arrays` of an `Exchange` of its tokens, and the load of its experts."""
    top_k = indices.shape[-1]
    expert = indices.reshape(-1, top_k).astype(jnp.int32)
    own = grid.own(num_experts)
    parts, reached = grid.layout.size(grid.traded), own.shape[1]
    if grid.copied:
        # The place in the order of sending; the experts of copies of this device come after all places.
        place = np.full((own.shape[0], num_experts), reached, np.int32)
        np.put_along_axis(place, own, np.arange(reached, dtype=np.int32)[None], axis=1)
        expert = jnp.asarray(place)[lax.axis_index(grid.copied)][expert]
    if token_mask is not None:
        expert = jnp.where(token_mask.reshape(-1, 1), expert, reached)
    expert = expert.reshape(-1)
    slots = jnp.arange(expert.shape[0], dtype=jnp.int32)
    expert, slot = lax.sort((expert, slots), num_keys=1, is_stable=True)
    _, row = lax.sort((slot, slots), num_keys=1)
    ends = jnp.searchsorted(expert, jnp.arange(reached, dtype=jnp.int32), side="right").astype(jnp.int32)
    counts = jnp.diff(ends, prepend=0).reshape(parts, -1)
    received = lax.all_to_all(counts, grid.traded, 0, 0, tiled=True) if grid.traded else counts
    load = sum_over(jnp.sum(received, axis=0, dtype=jnp.int32), grid.summed).astype(jnp.float32)
    rows = indices.shape[0] * indices.shape[1] * min(top_k, reached)
    return slot[None, :rows], row[None], jnp.sum(counts, axis=1, dtype=jnp.int32)[None], received[None], load


def _order(received: Array, room: int) -> tuple[Array, Array]:
    """For each row in the order of experts its place in the order of arrival, and the other way round.

    Rows arrive from each sender at a multiple of `room`. Where there is no row it is one past the last place.
    """
    parts, rows = received.shape[0], received.shape[0] * room
    total, last = jnp.sum(received, axis=0), jnp.cumsum(received, axis=1)
    # By sender and expert: where its rows begin, in the order of experts and among those of the sender.
    grouped = jnp.cumsum(total) - total + jnp.cumsum(received, axis=0) - received
    i = jnp.arange(room, dtype=jnp.int32)
    expert = jax.vmap(lambda last: jnp.searchsorted(last, i, side="right"))(last)
    shift = jnp.take_along_axis(grouped - (last - received), expert, axis=1, mode="clip")
    to = jnp.where(i < last[:, -1:], shift + i, rows).reshape(parts * room).astype(jnp.int32)
    back = jnp.full(rows, rows, jnp.int32).at[to].set(jnp.arange(rows, dtype=jnp.int32), mode="drop")
    return back, to


def _take(x: Array, index: Array) -> Array:
    """Rows of `x`; zero for an index past the last."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


# Both ways of an exchange: exact in rows where the backend knows ragged ones, and padded to the most that one device
# can send another where not. The platform is chosen inside the rules below, as in `grouped`.


class _Here(NamedTuple):
    """What one device has of an `Exchange`."""

    slot: Array
    row: Array
    sent: Array
    received: Array
    top_k: int

    @property
    def starts(self) -> Array:
        """The first row for each device that rows are sent to."""
        return jnp.cumsum(self.sent) - self.sent

    @property
    def arrived(self) -> Array:
        return jnp.sum(self.received, axis=1, dtype=jnp.int32)

    @property
    def room(self) -> int:
        """The most rows that one device can send another."""
        return self.row.shape[0] // self.top_k * min(self.top_k, self.received.shape[1])


def _here(top_k: int, arrays: tuple[Array, ...]) -> _Here:
    return _Here(*(array[0] for array in arrays), top_k)


def _there(grid: Grid, here: _Here, x: Array, index: Array) -> Array:
    """Sends `x[index]`, one for each row of this device. Gives those that it receives, by expert, zero after them."""
    if not grid.traded:
        return _take(x, index)
    parts, room = here.sent.shape[0], here.room

    def padded(x, index):
        i = jnp.arange(room, dtype=jnp.int32)
        row = jnp.where(i < here.sent[:, None], here.starts[:, None] + i, index.shape[0])
        rows = _take(x, jnp.take(index, row, mode="fill", fill_value=x.shape[0]))
        return lax.all_to_all(rows, grid.traded, 0, 0, tiled=True).reshape(parts * room, -1)

    def ragged(x, index):
        place = jnp.full(parts, lax.axis_index(grid.traded) * room, jnp.int32)
        out = jnp.zeros((parts * room, x.shape[1]), x.dtype)
        return lax.ragged_all_to_all(
            _take(x, index), out, here.starts, here.sent, place, here.arrived, axis_name=grid.traded
        )

    rows = lax.platform_dependent(x, index, cpu=padded, default=ragged)
    return _take(rows, _order(here.received, room)[0])


def _back(grid: Grid, here: _Here, rows: Array) -> Array:
    """Sends rows, in the order of experts, to where they came from. Gives those that return, by slot, zero for none."""
    if not grid.traded:
        return _take(rows, here.row)
    parts, room = here.sent.shape[0], here.room
    rows = _take(rows, _order(here.received, room)[1])

    def padded(rows):
        rows = lax.all_to_all(rows.reshape(parts, room, -1), grid.traded, 0, 0, tiled=True)
        part = jnp.searchsorted(jnp.cumsum(here.sent), here.row, side="right")
        place = part * room + here.row - jnp.take(here.starts, part, mode="clip")
        return _take(rows.reshape(parts * room, -1), jnp.where(part < parts, place, parts * room))

    def ragged(rows):
        place = lax.all_to_all(here.starts, grid.traded, 0, 0, tiled=True)
        out = jnp.zeros((here.slot.shape[0], rows.shape[1]), rows.dtype)
        first = jnp.arange(parts, dtype=jnp.int32) * room
        rows = lax.ragged_all_to_all(rows, out, first, here.arrived, place, here.sent, axis_name=grid.traded)
        return _take(rows, here.row)

    return lax.platform_dependent(rows, cpu=padded, default=ragged)


# What each device does of both ways and of their derivatives, between its own tokens and the rows of its experts.


def send(grid: Grid, top_k: int, x: Array, *arrays: Array) -> Array:
    """The rows that a device receives, when its own tokens are `x` [batch, sequence, features]."""
    here = _here(top_k, arrays)
    return _there(grid, here, x.reshape(-1, x.shape[-1]), here.slot // top_k)


def send_transposed(grid: Grid, top_k: int, grad: Array, like: Array, *arrays: Array) -> Array:
    """The gradient of a device's tokens, which have the batch and sequence of `like`, by that of its rows."""
    slots = _back(grid, _here(top_k, arrays), grad).reshape(*like.shape[:2], top_k, -1)
    return sum_over(jnp.sum(slots, axis=2, dtype=jnp.float32), grid.copied).astype(grad.dtype)


def fetch(grid: Grid, rows: Array, weights: Array, *arrays: Array) -> Array:
    """What comes back for a device's tokens, weighted by `weights` [batch, sequence, top_k] and summed in float32."""
    slots = _back(grid, _here(weights.shape[-1], arrays), rows).reshape(*weights.shape, -1)
    total = jnp.sum(slots.astype(jnp.float32) * weights.astype(jnp.float32)[..., None], axis=2)
    return sum_over(total, grid.copied).astype(rows.dtype)


def fetch_transposed(grid: Grid, rows: Array, weights: Array, grad: Array, *arrays: Array) -> tuple[Array, Array]:
    """The gradients of the rows that a device computed and of the weights of its tokens."""
    # The gradient travels bare, and its product with the rows comes back: they stay where they are.
    here = _here(weights.shape[-1], arrays)
    flat = weights.astype(jnp.float32).reshape(-1, 1)
    own = _there(grid, here, grad.reshape(-1, grad.shape[-1]), here.slot // here.top_k).astype(jnp.float32)
    products = jnp.sum(own * rows.astype(jnp.float32), axis=-1, keepdims=True)
    grad_weights = sum_over(_back(grid, here, products).reshape(weights.shape), grid.copied)
    weighted = own * _there(grid, here, flat, here.slot)
    return weighted.astype(rows.dtype), grad_weights.astype(weights.dtype)


def dispatch(x: Float[Array, "batch sequence features"], exchange: Exchange) -> Float[Array, "rows features"]:
    """A copy of each token for each expert it goes to, where that expert is. Each device has equally many rows."""
    x, *arrays = vary(x, *exchange.arrays)
    return _dispatch(exchange.grid, exchange.top_k, x, tuple(arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dispatch(grid, top_k, x, arrays):
    by_row = cut(grid.rows)
    local = functools.partial(send, grid, top_k)
    return grid.map(local, (grid.tokens, *(by_row,) * len(arrays)), by_row)(x, *arrays)


def _dispatch_forward(grid, top_k, x, arrays):
    return _dispatch(grid, top_k, x, arrays), (arrays, jnp.zeros((*x.shape[:2], 0), x.dtype))


def _dispatch_backward(grid, top_k, residuals, grad):
    arrays, like = residuals
    by_row = cut(grid.rows)
    local = functools.partial(send_transposed, grid, top_k)
    return grid.map(local, (by_row, grid.tokens, *(by_row,) * len(arrays)), grid.tokens)(grad, like, *arrays), None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


def combine(
    rows: Float[Array, "rows features"], weights: Float[Array, "batch sequence top_k"], exchange: Exchange
) -> Float[Array, "batch sequence features"]:
    """The sum of each token's rows, weighted, where the token is; in float32, returned in the dtype of `rows`."""
    rows, weights, *arrays = vary(rows, weights, *exchange.arrays)
    return _combine(exchange.grid, rows, weights, tuple(arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(grid, rows, weights, arrays):
    by_row = cut(grid.rows)
    local = functools.partial(fetch, grid)
    return grid.map(local, (by_row, grid.tokens, *(by_row,) * len(arrays)), grid.tokens)(rows, weights, *arrays)


def _combine_forward(grid, rows, weights, arrays):
    return _combine(grid, rows, weights, arrays), (rows, weights, arrays)


def _combine_backward(grid, residuals, grad):
    rows, weights, arrays = residuals
    by_row, tokens = cut(grid.rows), grid.tokens
    local = functools.partial(fetch_transposed, grid)
    local = grid.map(local, (by_row, tokens, tokens, *(by_row,) * len(arrays)), (by_row, tokens))
    return *local(rows, weights, grad, *arrays), None


_combine.defvjp(_combine_forward, _combine_backward)
