"""Experts on other devices in rounds: a part of the tokens after the other, each with its own exchange.

The buffer for rows that arrive has room for the worst case, in which all devices send all they have to one. Its size
goes with the tokens that are exchanged at once; their number is all that rounds change. Nothing of a round is kept:
the backward pass computes each again, just before its gradients.
"""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from ..policies.axes import vary
from . import exchange
from .experts import Experts, Formula
from .grid import Grid, cut
from .grouped import Gathering, narrow, times_experts, times_experts_transposed


class Rounds(eqx.Module):
    """In how many parts, one after the other, a layer's tokens are exchanged over a mesh."""

    count: int = eqx.field(static=True, default=1)

    def __check_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"rounds must be a positive integer, the parts that tokens travel in, got {self.count!r}")


def balanced_rounds(grid: Grid, num_experts: int, top_k: int) -> int:
    """In how many rounds the room for rows that arrive is no more than what all rounds send, on average.

    1 where no tokens travel. Raises ValueError where the experts can't be cut over `grid`.
    """
    senders, reached = grid.layout.size(grid.traded), grid.own(num_experts).shape[1] // grid.layout.size(grid.traded)
    return -(-senders * min(top_k, reached) // top_k)


def exchanged_in_rounds(
    grid: Grid,
    rounds: int,
    experts: Experts,
    x: Float[Array, "batch sequence features"],
    indices: Int[Array, "batch sequence top_k"],
    weights: Float[Array, "batch sequence top_k"],
    *,
    token_mask: Bool[Array, "batch sequence"] | None = None,
) -> tuple[Float[Array, "batch sequence features"], Float[Array, " experts"]]:
    """The weighted sum of what a token's experts make of it, and how many tokens went to each expert.

    What `exchange.assign`, `dispatch` and `combine` give around `experts`, for `indices` and `weights` as there, but
    `ceil(tokens / rounds)` of each device's tokens at a time. Where that leaves the last round short it is padded.

    Raises ValueError when batch or sequence can't be cut as the layout says.
    """
    grid.layout.check("batch sequence _", indices.shape, "the experts chosen for tokens")
    matrices = [experts.matrix(name) for name in experts.matrices]
    plan = _Plan(grid, rounds, experts.gate_weight.shape[0], experts.formula, experts.matrices,
                 tuple(axes for _, axes in matrices))  # fmt: skip
    chosen = (indices,) if token_mask is None else (indices, token_mask)
    x, weights, *arrays = vary(x, weights, *(array for array, _ in matrices), *chosen)
    return _exchanged(plan, x, weights, tuple(arrays[: len(matrices)]), tuple(arrays[len(matrices) :]))


class _Plan(NamedTuple):
    """All that a round is but for arrays."""

    grid: Grid
    rounds: int
    num_experts: int
    formula: Formula
    names: tuple[str, ...]
    axes: tuple[str, ...]

    @property
    def cuts(self) -> list[tuple[tuple[str, ...], ...]]:
        return [self.grid.weight(axes) for axes in self.axes]

    def narrow(self, matrices: tuple[Array, ...], dtype: Any) -> list[Array]:
        return [narrow(self.grid, axes, array, dtype) for axes, array in zip(self.axes, matrices, strict=True)]

    def parts(self, *arrays: Array) -> tuple[Array, ...]:
        """A device's tokens [batch, sequence, ...] as [rounds, 1, tokens, ...], zero where they are short."""
        tokens = arrays[0].shape[0] * arrays[0].shape[1]
        size = -(-tokens // self.rounds)
        rounds = -(-tokens // size)

        def cut_up(x: Array) -> Array:
            flat = x.reshape(tokens, *x.shape[2:])
            if short := rounds * size - tokens:
                flat = jnp.pad(flat, [(0, short)] + [(0, 0)] * (flat.ndim - 1))
            return flat.reshape(rounds, 1, size, *x.shape[2:])

        return tuple(map(cut_up, arrays))


def _joined(parts: Array, like: Array) -> Array:
    """The tokens of all rounds, with the batch and sequence of `like`."""
    tokens = like.shape[0] * like.shape[1]
    return parts.reshape(-1, *parts.shape[3:])[:tokens].reshape(*like.shape[:2], *parts.shape[3:])


def _chosen(plan: _Plan, indices: Array, *mask: Array) -> tuple[Array, ...]:
    """The experts of each token by rounds, and which tokens count where not all do."""
    (parts,) = plan.parts(indices)
    if mask or parts.size > indices.size:
        return parts, *plan.parts(mask[0] if mask else jnp.ones(indices.shape[:2], bool))
    return (parts,)


def _round(plan: _Plan, x: Array, weights: Array, grads: list[Array], matrices: list[Array], *chosen: Array) -> Any:
    """One round on one device: its tokens' results, and the load of its experts.

    `grads` are the float32 sums of the gradients of `matrices` so far, and take no part but to be differentiated by.
    """
    *arrays, load = exchange.choose(plan.grid, plan.num_experts, *chosen)
    group_sizes = jnp.sum(arrays[-1][0], axis=0, dtype=jnp.int32)

    def multiply(name: str, rows: Array) -> Array:
        i = plan.names.index(name)
        return _multiply(plan.cuts[i], rows, grads[i], matrices[i], group_sizes)

    rows = _send(plan.grid, weights.shape[-1], x, tuple(arrays))
    return _fetch(plan.grid, plan.formula(rows, multiply), weights, tuple(arrays)), load


def _specs(plan: _Plan, chosen: tuple[Array, ...]) -> tuple[PartitionSpec, ...]:
    tokens = plan.grid.tokens
    return tokens, tokens, *(cut(*cuts) for cuts in plan.cuts), *(tokens,) * len(chosen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(plan, x, weights, matrices, chosen):
    def local(x, weights, *rest):
        matrices, chosen = list(rest[: len(plan.names)]), rest[len(plan.names) :]

        def body(load, parts):
            x, weights, *chosen = parts
            unused = [jnp.zeros(matrix.shape, jnp.float32) for matrix in matrices]
            y, more = _round(plan, x, weights, unused, matrices, *chosen)
            return load + more, y

        own = jnp.zeros(plan.num_experts // plan.grid.layout.size(plan.grid.experts), jnp.float32)
        load, y = lax.scan(body, own, (*plan.parts(x, weights), *_chosen(plan, *chosen)))
        return _joined(y, x), load

    grid = plan.grid
    local = grid.map(local, _specs(plan, chosen), (grid.tokens, cut(grid.experts)))
    y, load = local(x, weights, *plan.narrow(matrices, x.dtype), *chosen)
    return y, grid.pin(load, PartitionSpec())


def _exchanged_forward(plan, x, weights, matrices, chosen):
    return _exchanged(plan, x, weights, matrices, chosen), (x, weights, matrices, chosen)


def _exchanged_backward(plan, residuals, grads):
    x, weights, matrices, chosen = residuals
    gatherings = [Gathering.of(plan.grid, axes) for axes in plan.axes]

    def local(grad, x, weights, *rest):
        matrices, chosen = list(rest[: len(plan.names)]), rest[len(plan.names) :]

        def body(sums, parts):
            grad, x, weights, *chosen = parts
            of_round = lambda x, weights, sums: _round(plan, x, weights, sums, matrices, *chosen)[0]
            _, pull = jax.vjp(of_round, x, weights, sums)
            grad_x, grad_weights, more = pull(grad)
            return [a + b for a, b in zip(sums, more, strict=True)], (grad_x, grad_weights)

        sums = [jnp.zeros(matrix.shape, jnp.float32) for matrix in matrices]
        parts = (*plan.parts(grad, x, weights), *_chosen(plan, *chosen))
        sums, (grad_x, grad_weights) = lax.scan(body, sums, parts)
        sums = [gathering.summed(total) for gathering, total in zip(gatherings, sums, strict=True)]
        return _joined(grad_x, x), _joined(grad_weights, x), *sums

    grid = plan.grid
    out = grid.tokens, grid.tokens, *(cut(*gathering.out) for gathering in gatherings)
    local = grid.map(local, (grid.tokens, *_specs(plan, chosen)), out)
    grad_x, grad_weights, *sums = local(grads[0], x, weights, *plan.narrow(matrices, x.dtype), *chosen)
    stored = tuple(
        grid.pin(total.astype(array.dtype), grid.layout.stored(axes))
        for total, array, axes in zip(sums, matrices, plan.axes, strict=True)
    )
    return grad_x, grad_weights, stored, (None,) * len(chosen)


_exchanged.defvjp(_exchanged_forward, _exchanged_backward)


# The parts of a round, with the derivatives that they have outside of rounds.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _send(grid, top_k, x, arrays):
    return exchange.send(grid, top_k, x, *arrays)


def _send_forward(grid, top_k, x, arrays):
    return _send(grid, top_k, x, arrays), (arrays, jnp.zeros((*x.shape[:2], 0), x.dtype))


def _send_backward(grid, top_k, residuals, grad):
    arrays, like = residuals
    return exchange.send_transposed(grid, top_k, grad, like, *arrays), None


_send.defvjp(_send_forward, _send_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fetch(grid, rows, weights, arrays):
    return exchange.fetch(grid, rows, weights, *arrays)


def _fetch_forward(grid, rows, weights, arrays):
    return _fetch(grid, rows, weights, arrays), (rows, weights, arrays)


def _fetch_backward(grid, residuals, grad):
    rows, weights, arrays = residuals
    return *exchange.fetch_transposed(grid, rows, weights, grad, *arrays), None


_fetch.defvjp(_fetch_forward, _fetch_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(cuts, rows, total, matrix, group_sizes):
    return times_experts(cuts, rows, matrix, group_sizes)


def _multiply_forward(cuts, rows, total, matrix, group_sizes):
    return _multiply(cuts, rows, total, matrix, group_sizes), (rows, matrix, group_sizes)


def _multiply_backward(cuts, residuals, grad):
    rows, matrix, group_sizes = residuals
    # What goes to the float32 sum would be rounded, in the weight's dtype, in each round.
    return *times_experts_transposed(cuts, rows, matrix, group_sizes, grad), None, None


_multiply.defvjp(_multiply_forward, _multiply_backward)
