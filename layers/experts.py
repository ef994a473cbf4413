"""Routed experts: rows sorted by expert, one grouped matmul per projection, and back. No capacity, no drops."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ..policies.activation import Activation
from ..policies.axes import manual_axes, vary
from .grid import Grid
from .grouped import grouped_matmul, grouped_matmul_over
from .linear import check_sizes, normal

ROWS = "batch*sequence*experts"  # the logical axes of rows


def named(activation: Activation | None, x: Array) -> Array:
    """`x` under its name, where it has one."""
    return x if activation is None else activation(x)


class Assignment(eqx.Module):
    """Which row of the sorted layout holds which slot of which token.

    A slot is one of the `top_k` choices of one token; slot `token * top_k + choice`. Rows are ordered by
    expert and, within an expert, by slot. Slots of masked tokens come last and belong to no expert.
    """

    order: Int[Array, " rows"]  # the slot that each row holds
    inverse: Int[Array, " rows"]  # the row that holds each slot: the inverse permutation
    group_sizes: Int[Array, " experts"]  # int32; sums to less than `rows` when tokens are masked
    top_k: int = eqx.field(static=True)


def assign(
    indices: Int[Array, "tokens top_k"], num_experts: int, *, token_mask: Bool[Array, " tokens"] | None = None
) -> Assignment:
    """Sorts the choices of a router by expert; stable, so equal inputs give equal layouts.

    **Arguments:**

    - `indices`: the experts chosen for each token, each in `0 .. num_experts - 1`.
    - `token_mask`: True for tokens that count. The others go to no expert.
    """
    tokens, top_k = indices.shape
    expert = indices.astype(jnp.int32)
    if token_mask is not None:
        expert = jnp.where(token_mask[:, None], expert, num_experts)
    expert = expert.reshape(tokens * top_k)
    slots = jnp.arange(tokens * top_k, dtype=jnp.int32)
    expert, order = lax.sort((expert, slots), num_keys=1, is_stable=True)
    _, inverse = lax.sort((order, slots), num_keys=1)
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    if manual_axes():
        # In a shard_map over some axes of a mesh searchsorted fails in JAX itself.
        ends = jnp.sum(expert[:, None] <= experts, axis=0, dtype=jnp.int32)
    else:
        ends = jnp.searchsorted(expert, experts, side="right").astype(jnp.int32)
    return Assignment(order, inverse, jnp.diff(ends, prepend=0), top_k)


# Each of the two copies below is a gather whose transpose is a gather as well. JAX would transpose them to
# scatter-adds, which run one row at a time on CPU and in no fixed order on GPU.


def dispatch(x: Float[Array, "tokens features"], assignment: Assignment) -> Float[Array, "rows features"]:
    """A copy of each token for each expert it goes to, in the order of `assignment`."""
    return _dispatch(assignment.top_k, *vary(x, assignment.order, assignment.inverse))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(top_k, x, order, inverse):
    return x[order // top_k]


def _dispatch_forward(top_k, x, order, inverse):
    return _dispatch(top_k, x, order, inverse), inverse


def _dispatch_backward(top_k, inverse, grad):
    slots = grad[inverse].reshape(-1, top_k, grad.shape[-1])
    return jnp.sum(slots, axis=1, dtype=jnp.float32).astype(grad.dtype), None, None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


def combine(
    rows: Float[Array, "rows features"], weights: Float[Array, "tokens top_k"], assignment: Assignment
) -> Float[Array, "tokens features"]:
    """The sum of each token's rows, weighted; in float32, returned in the dtype of `rows`.

    Rows of masked tokens must be zero, as `grouped_matmul` leaves them.
    """
    return _combine(assignment.top_k, *vary(rows, weights, assignment.order, assignment.inverse))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(top_k, rows, weights, order, inverse):
    slots = rows[inverse].reshape(-1, top_k, rows.shape[-1])
    total = jnp.sum(slots.astype(jnp.float32) * weights.astype(jnp.float32)[..., None], axis=1)
    return total.astype(rows.dtype)


def _combine_forward(top_k, rows, weights, order, inverse):
    return _combine(top_k, rows, weights, order, inverse), (rows, weights, order, inverse)


def _combine_backward(top_k, residuals, grad):
    rows, weights, order, inverse = residuals
    grad_rows = grad[order // top_k].astype(jnp.float32)
    grad_weights = jnp.sum(grad_rows * rows.astype(jnp.float32), axis=-1)[inverse].reshape(weights.shape)
    weighted = grad_rows * weights.astype(jnp.float32).reshape(-1)[order][:, None]
    return weighted.astype(rows.dtype), grad_weights.astype(weights.dtype), None, None


_combine.defvjp(_combine_forward, _combine_backward)


class Experts(eqx.Module):
    """SwiGLU experts, their weights stacked: expert `e` is `down_e(silu(gate_e x) * up_e x)`.

    `gate` and `up` are [experts, expert_size, hidden_size], `down` is [experts, hidden_size, expert_size].
    With `use_bias` each of them has a bias. With a `limit` the activation is gpt-oss's clipped one: with `g`
    the gate bounded above by the limit and `u` the other projection bounded on both sides, it is
    `(u + 1) * g * sigmoid(alpha * g)`.
    """

    gate_weight: Float[Array, "experts expert_size features"]
    up_weight: Float[Array, "experts expert_size features"]
    down_weight: Float[Array, "experts features expert_size"]
    gate_bias: Float[Array, "experts expert_size"] | None
    up_bias: Float[Array, "experts expert_size"] | None
    down_bias: Float[Array, "experts features"] | None
    axes: ClassVar[dict[str, str]] = {
        "gate_weight": "experts mlp embed",
        "up_weight": "experts mlp embed",
        "down_weight": "experts embed mlp",
        "gate_bias": "experts mlp",
        "up_bias": "experts mlp",
        "down_bias": "experts embed",
    }
    gate: Activation | None
    up: Activation | None
    hidden: Activation | None
    limit: float | None = eqx.field(static=True)
    alpha: float = eqx.field(static=True)

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        expert_size: int,
        use_bias: bool = False,
        limit: float | None = None,
        alpha: float = 1.702,
        std: float = 0.02,
        dtype: Any = jnp.float32,
        key: PRNGKeyArray,
    ):
        """Weights N(0, std^2), drawn in float32. Raises ValueError when a size is not a positive integer."""
        check_sizes("Experts", hidden_size=hidden_size, num_experts=num_experts, expert_size=expert_size)
        gate_key, up_key, down_key = jax.random.split(key, 3)
        wide, narrow = (num_experts, expert_size, hidden_size), (num_experts, hidden_size, expert_size)
        self.gate_weight = normal(gate_key, wide, std, dtype)
        self.up_weight = normal(up_key, wide, std, dtype)
        self.down_weight = normal(down_key, narrow, std, dtype)
        self.gate_bias = self.up_bias = self.down_bias = None
        if use_bias:
            self.gate_bias, self.up_bias = (jnp.zeros((num_experts, expert_size), dtype) for _ in range(2))
            self.down_bias = jnp.zeros((num_experts, hidden_size), dtype)
        self.limit, self.alpha = None if limit is None else float(limit), float(alpha)
        self.gate, self.up, self.hidden = self.activations()

    @jax.named_scope("experts")
    def __call__(
        self, rows: Float[Array, "rows features"], group_sizes: Int[Array, "*devices experts"], grid: Grid | None = None
    ) -> Float[Array, "rows features"]:
        """Rows through their experts. `rows` and `group_sizes` are as `grouped_matmul` takes them.

        With a `grid` they are those of each of its devices for its own experts, as `exchange` gives them.
        """

        def multiply(name: str, x: Array) -> Array:
            weight, axes = self.matrix(name)
            if grid is None:
                return grouped_matmul(x, weight, group_sizes)
            return grouped_matmul_over(grid, axes, x, weight, group_sizes)

        return self.formula(rows, multiply, lambda name, x: named(getattr(self, name), x))

    @staticmethod
    def activations() -> tuple[Activation, Activation, Activation]:
        """What `gate`, `up` and `hidden` are where they can be placed."""
        gate, up, hidden = (Activation(name, axes=ROWS + " mlp") for name in ("gate", "up", "hidden"))
        return gate, up, hidden

    @property
    def matrices(self) -> tuple[str, ...]:
        """The names of the weights, and of the biases that there are."""
        return tuple(name for name in self.axes if getattr(self, name) is not None)

    def matrix(self, name: str) -> tuple[Array, str]:
        """A weight, or a bias as a matrix of one column, and its logical axes."""
        array, axes = getattr(self, name), self.axes[name]
        return (array, axes) if array.ndim == 3 else (array[..., None], axes + " _")

    @property
    def formula(self) -> "Formula":
        return Formula(self.gate_bias is not None, self.limit, self.alpha)


class Formula(NamedTuple):
    """What experts compute, without their arrays."""

    biased: bool
    limit: float | None
    alpha: float

    def __call__(
        self,
        rows: Array,
        multiply: Callable[[str, Array], Array],
        name: Callable[[str, Array], Array] = lambda name, x: x,
    ) -> Array:
        """`multiply` gives rows times one of `Experts.matrices`, `name` gives the value of an activation its name."""

        def affine(matrix: str, x: Array) -> Array:
            y = multiply(f"{matrix}_weight", x)
            if not self.biased:
                return y
            # The bias as the product of a one: its gradient is then a grouped sum too, where that of a gather would
            # be a scatter-add, and rows of no expert stay zero.
            return y + multiply(f"{matrix}_bias", jnp.ones((x.shape[0], 1), x.dtype))

        gate, up = name("gate", affine("gate", rows)), name("up", affine("up", rows))
        if self.limit is None:
            hidden = jax.nn.silu(gate) * up
        else:
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
            hidden = (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)
        return affine("down", name("hidden", hidden))
