"""Routed experts: rows sorted by expert, one grouped matmul per projection, and back. No capacity, no drops."""

import functools
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ..policies.activation import Activation
from .linear import check_sizes, normal

# Rows that one step of the CPU's loops multiplies: as many steps of the first size as fit in a group, the
# rest in steps of the last. Wide steps run near the speed of a plain matmul, narrow ones waste few rows.
WINDOWS = (256, 64)
# Where the mean group is smaller than that, as in generation, steps are of its size, but no narrower than this.
NARROWEST = 8


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
    ends = jnp.searchsorted(expert, jnp.arange(num_experts, dtype=jnp.int32), side="right").astype(jnp.int32)
    return Assignment(order, inverse, jnp.diff(ends, prepend=0), top_k)


# Each of the two copies below is a gather whose transpose is a gather as well. JAX would transpose them to
# scatter-adds, which run one row at a time on CPU and in no fixed order on GPU.


def dispatch(x: Float[Array, "tokens features"], assignment: Assignment) -> Float[Array, "rows features"]:
    """A copy of each token for each expert it goes to, in the order of `assignment`."""
    return _dispatch(assignment.top_k, x, assignment.order, assignment.inverse)


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
    return _combine(assignment.top_k, rows, weights, assignment.order, assignment.inverse)


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


@jax.custom_vjp
def grouped_matmul(
    x: Float[Array, "rows features"],
    weight: Float[Array, "experts out features"],
    group_sizes: Int[Array, " experts"],
) -> Float[Array, "rows out"]:
    """Each row times its expert's matrix: `x[i] @ weight[e].T` for the rows `i` of group `e`.

    The first `group_sizes[0]` rows belong to expert 0, the next `group_sizes[1]` to expert 1, and so on;
    any sizes that sum to at most `rows`. Rows after the last group give exactly zero and take no part in
    any gradient, whatever they hold, and the gradient of an expert without rows is exactly zero.

    Computed in the dtype of `x`, which the result has; gradients of `weight` are summed in float32. On
    CPU this loops over windows of rows and needs no memory beyond its result; fewer rows than experts are
    each multiplied with a copy of their expert's matrix. Elsewhere it is `jax.lax.ragged_dot`.
    """
    return _rows_times_experts(x, weight, group_sizes, transpose=False)


def _grouped_matmul_forward(x, weight, group_sizes):
    return grouped_matmul(x, weight, group_sizes), (x, weight, group_sizes)


def _grouped_matmul_backward(residuals, grad):
    x, weight, group_sizes = residuals
    grad_x = _rows_times_experts(grad, weight, group_sizes, transpose=True)
    return grad_x, _rows_times_rows(grad, x, group_sizes).astype(weight.dtype), None


grouped_matmul.defvjp(_grouped_matmul_forward, _grouped_matmul_backward)


# The platform is chosen inside the rules above, so differentiation and the names of activations never meet
# the branch, and a program compiled ahead of time for another platform gets that platform's side.


def _rows_times_experts(x, weight, group_sizes, *, transpose: bool):
    """x[i] @ weight[e].T, or x[i] @ weight[e] if `transpose`, for each row i of each group e."""
    if x.shape[0] == 0:
        return jnp.zeros((0, weight.shape[2 if transpose else 1]), x.dtype)
    return lax.platform_dependent(
        x,
        weight,
        group_sizes,
        cpu=functools.partial(_rows_times_experts_windows, transpose=transpose),
        default=functools.partial(_rows_times_experts_ragged, transpose=transpose),
    )


def _rows_times_rows(left, right, group_sizes):
    """Per group e the sum of outer products left[i] right[i]^T of its rows: [experts, out, features], float32."""
    if left.shape[0] == 0:
        return jnp.zeros((group_sizes.shape[0], left.shape[1], right.shape[1]), jnp.float32)
    return lax.platform_dependent(
        left, right, group_sizes, cpu=_rows_times_rows_windows, default=_rows_times_rows_ragged
    )


def _window_sizes(rows: int, experts: int) -> tuple[int, ...]:
    wide, narrow = WINDOWS
    mean = 1 << (-(-rows // experts) - 1).bit_length()
    # A window can't be longer than the array it slices.
    return tuple(dict.fromkeys(min(window, rows) for window in (wide, min(narrow, max(mean, NARROWEST)))))


def _window(start, end, size: int, rows: int):
    """Where to slice for rows `start .. start + size`, and which rows of the slice lie in `start .. end`."""
    at = jnp.minimum(start, rows - size)
    row = at + jnp.arange(size, dtype=jnp.int32)
    return at, ((row >= start) & (row < end))[:, None]


def _rows_times_experts_windows(x, weight, group_sizes, *, transpose: bool):
    if x.shape[0] <= weight.shape[0]:
        return _rows_times_experts_copies(x, weight, group_sizes, transpose=transpose)
    rows, sizes = x.shape[0], _window_sizes(x.shape[0], weight.shape[0])
    group_sizes = group_sizes.astype(jnp.int32)
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    contract = (((1,), (0 if transpose else 1,)), ((), ()))
    out = jnp.zeros((rows, weight.shape[2 if transpose else 1]), x.dtype)
    for size in sizes:
        left = ends - starts
        windows = -(-left // size) if size == sizes[-1] else left // size
        last = jnp.cumsum(windows)

        def step(i, out, size=size, starts=starts, windows=windows, last=last):
            expert = jnp.sum(last <= i, dtype=jnp.int32)
            start = starts[expert] + (i - (last - windows)[expert]) * size
            at, inside = _window(start, ends[expert], size, rows)
            # Without preferred_element_type bfloat16 would be accumulated as such.
            product = lax.dot_general(
                lax.dynamic_slice_in_dim(x, at, size),
                lax.dynamic_index_in_dim(weight, expert, keepdims=False).astype(x.dtype),
                contract,
                preferred_element_type=jnp.float32,
            ).astype(x.dtype)
            old = lax.dynamic_slice_in_dim(out, at, size)
            return lax.dynamic_update_slice_in_dim(out, jnp.where(inside, product, old), at, 0)

        out = lax.fori_loop(0, last[-1], step, out)
        starts = jnp.minimum(starts + windows * size, ends)
    return out


def _rows_times_experts_copies(x, weight, group_sizes, *, transpose: bool):
    # In a scan over layers this reads the experts that have rows. A loop would have all of the layer's copied first.
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    expert = jnp.sum(ends <= jnp.arange(x.shape[0], dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    own = jnp.take(weight, expert, axis=0, mode="clip").astype(x.dtype)
    contract = (((1,), (1 if transpose else 2,)), ((0,), (0,)))
    product = lax.dot_general(x, own, contract, preferred_element_type=jnp.float32).astype(x.dtype)
    return jnp.where((expert < weight.shape[0])[:, None], product, 0)


def _rows_times_rows_windows(left, right, group_sizes):
    rows, sizes = left.shape[0], _window_sizes(left.shape[0], group_sizes.shape[0])
    group_sizes = group_sizes.astype(jnp.int32)
    ends = jnp.cumsum(group_sizes)
    # Only experts that have rows are visited.
    used = jnp.argsort(group_sizes == 0, stable=True).astype(jnp.int32)

    def of_expert(i, out):
        expert = used[i]
        start, end = ends[expert] - group_sizes[expert], ends[expert]
        total = jnp.zeros(out.shape[1:], out.dtype)
        for size in sizes:
            windows = -(-(end - start) // size) if size == sizes[-1] else (end - start) // size

            def step(j, total, size=size, start=start):
                at, inside = _window(start + j * size, end, size, rows)
                # Both sides are masked: zero times a NaN outside the group would be a NaN.
                a = jnp.where(inside, lax.dynamic_slice_in_dim(left, at, size), 0)
                b = jnp.where(inside, lax.dynamic_slice_in_dim(right, at, size), 0)
                contract = (((0,), (0,)), ((), ()))
                return total + lax.dot_general(a, b, contract, preferred_element_type=out.dtype)

            total = lax.fori_loop(0, windows, step, total)
            start = start + windows * size
        return lax.dynamic_update_index_in_dim(out, total, expert, 0)

    out = jnp.zeros((group_sizes.shape[0], left.shape[1], right.shape[1]), jnp.float32)
    return lax.fori_loop(0, jnp.sum(group_sizes > 0, dtype=jnp.int32), of_expert, out)


def _in_groups(x, group_sizes):
    # What ragged_dot gives for rows that no group holds differs between its implementations.
    inside = jnp.arange(x.shape[0], dtype=jnp.int32) < jnp.sum(group_sizes, dtype=jnp.int32)
    return jnp.where(inside[:, None], x, 0)


def _rows_times_experts_ragged(x, weight, group_sizes, *, transpose: bool):
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (1 if transpose else 2,)), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(0,),
    )
    out = lax.ragged_dot_general(x, weight.astype(x.dtype), group_sizes.astype(jnp.int32), numbers)
    return _in_groups(out, group_sizes)


def _rows_times_rows_ragged(left, right, group_sizes):
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=()
    )
    left, right = _in_groups(left, group_sizes), _in_groups(right, group_sizes)
    out = lax.ragged_dot_general(
        left, right, group_sizes.astype(jnp.int32), numbers, preferred_element_type=jnp.float32
    )
    return jnp.where((group_sizes > 0)[:, None, None], out, 0)


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
    gate: Activation
    up: Activation
    hidden: Activation
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
        self.gate = Activation("gate", axes="batch*sequence mlp")
        self.up = Activation("up", axes="batch*sequence mlp")
        self.hidden = Activation("hidden", axes="batch*sequence mlp")

    @jax.named_scope("experts")
    def __call__(
        self, rows: Float[Array, "rows features"], group_sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows features"]:
        """Rows through their experts. `rows` and `group_sizes` are as `grouped_matmul` takes them."""
        gate = self.gate(_affine(rows, self.gate_weight, self.gate_bias, group_sizes))
        up = self.up(_affine(rows, self.up_weight, self.up_bias, group_sizes))
        if self.limit is None:
            hidden = jax.nn.silu(gate) * up
        else:
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
            hidden = (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)
        return _affine(self.hidden(hidden), self.down_weight, self.down_bias, group_sizes)


def _affine(x: Array, weight: Array, bias: Array | None, group_sizes: Array) -> Array:
    y = grouped_matmul(x, weight, group_sizes)
    if bias is None:
        return y
    # The bias as the product of a one: its gradient is then a grouped sum too, where that of a gather would be
    # a scatter-add, and rows of no expert stay zero.
    return y + grouped_matmul(jnp.ones((x.shape[0], 1), x.dtype), bias[..., None], group_sizes)
