"""Grouped matmul: rows sorted by group, each times its group's matrix."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..policies.axes import vary
from .grid import Grid, cut, sum_over

# Rows that one step of the CPU's loops multiplies: as many steps of the first size as fit in a group, the
# rest in steps of the last. Wide steps run near the speed of a plain matmul, narrow ones waste few rows.
WINDOWS = (256, 64)
# On a GPU a step must be worth its launch.
GPU_WINDOWS = (1024, 128)
# Where the mean group is smaller than that, as in generation, steps are of its size, but no narrower than this.
NARROWEST = 8


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
    CPU and GPU this loops over windows of rows and needs no memory beyond its result; fewer rows than experts
    are each multiplied with a copy of their expert's matrix. Elsewhere it is `jax.lax.ragged_dot`, which XLA
    has a kernel for on TPU, and on GPU would compute for all experts at once.
    """
    return _grouped_matmul(*vary(x, weight, group_sizes))


@jax.custom_vjp
def _grouped_matmul(x, weight, group_sizes):
    return rows_times_experts(x, weight, group_sizes, transpose=False)


def _grouped_matmul_forward(x, weight, group_sizes):
    return _grouped_matmul(x, weight, group_sizes), (x, weight, group_sizes)


def _grouped_matmul_backward(residuals, grad):
    x, weight, group_sizes = residuals
    grad_x = rows_times_experts(grad, weight, group_sizes, transpose=True)
    return grad_x, rows_times_rows(grad, x, group_sizes).astype(weight.dtype), None


_grouped_matmul.defvjp(_grouped_matmul_forward, _grouped_matmul_backward)


def grouped_matmul_over(
    grid: Grid,
    axes: str,
    x: Float[Array, "rows features"],
    weight: Float[Array, "experts out features"],
    group_sizes: Int[Array, "devices its_experts"],
) -> Float[Array, "rows out"]:
    """`grouped_matmul` of each device's rows with its own experts, none of which leaves its device.

    `axes` are the logical axes of the weight. What is stored in parts over devices with other tokens is gathered in
    the dtype of `x`; the gradient is summed over them in float32, to where each part is stored. Over the mesh axes
    of `mlp` a product of parts of the hidden features is summed.
    """
    return _over(grid, axes, *vary(x, weight, group_sizes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _over(grid, axes, x, weight, group_sizes):
    cuts = grid.weight(axes)

    def local(x, weight, group_sizes):
        return times_experts(cuts, x, weight, group_sizes[0])

    specs = cut(grid.rows, cuts[2]), cut(*cuts), cut(grid.rows)
    return grid.map(local, specs, cut(grid.rows, cuts[1]))(x, narrow(grid, axes, weight, x.dtype), group_sizes)


def narrow(grid: Grid, axes: str, weight: Array, dtype: Any) -> Array:
    """A weight in the dtype that it is multiplied in, still in the parts that it is stored in."""
    # Pinned after the cast as well: the partitioner would gather first and cast then.
    return grid.pin(weight.astype(dtype), grid.layout.stored(axes))


def _over_forward(grid, axes, x, weight, group_sizes):
    return _over(grid, axes, x, weight, group_sizes), (x, weight, group_sizes)


def _over_backward(grid, axes, residuals, grad):
    x, weight, group_sizes = residuals
    cuts, gathering = grid.weight(axes), Gathering.of(grid, axes)

    def local(x, weight, group_sizes, grad):
        grad_x, grad_weight = times_experts_transposed(cuts, x, weight, group_sizes[0], grad)
        return grad_x, gathering.summed(grad_weight)

    rows, wide = cut(grid.rows, cuts[2]), cut(grid.rows, cuts[1])
    local = grid.map(local, (rows, cut(*cuts), cut(grid.rows), wide), (rows, cut(*gathering.out)))
    grad_x, grad_weight = local(x, narrow(grid, axes, weight, x.dtype), group_sizes, grad)
    return grad_x, grid.pin(grad_weight.astype(weight.dtype), grid.layout.stored(axes)), None


_over.defvjp(_over_forward, _over_backward)


@dataclasses.dataclass(frozen=True)
class Gathering:
    """Where the gradient of a weight of experts goes, that was gathered where it is multiplied.

    - `scattered`: dimensions of the weight, and the mesh axes over which their parts are stored.
    - `left`: the mesh axes over which the gradient is summed and stays whole.
    - `out`: the mesh axes that each dimension is cut over in the end.
    """

    scattered: tuple[tuple[int, tuple[str, ...]], ...]
    left: tuple[str, ...]
    out: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, grid: Grid, axes: str) -> "Gathering":
        left, scattered, out = set(grid.summed), [], []
        for dim, (mine, stored) in enumerate(zip(grid.weight(axes), grid.layout.parts(axes), strict=True)):
            more = stored[len(mine) :] if stored[: len(mine)] == mine else ()
            if more and left.issuperset(more):
                left.difference_update(more)
                scattered.append((dim, more))
                mine = stored
            out.append(mine)
        return cls(tuple(scattered), tuple(axis for axis in grid.summed if axis in left), tuple(out))

    def summed(self, grad: Array) -> Array:
        """The sum of what devices with other tokens have, each keeping the part that it stores."""
        for dim, more in self.scattered:
            grad = lax.psum_scatter(grad, more, scatter_dimension=dim, tiled=True)
        return sum_over(grad, self.left)


# What each device does, with the mesh axes that cut each dimension of the weight.


def times_experts(cuts: tuple[tuple[str, ...], ...], x: Array, weight: Array, group_sizes: Array) -> Array:
    """A device's rows times the matrices of its experts, summed over the parts of the hidden features."""
    return sum_over(rows_times_experts(x, weight, group_sizes, transpose=False), cuts[2])


def times_experts_transposed(
    cuts: tuple[tuple[str, ...], ...], x: Array, weight: Array, group_sizes: Array, grad: Array
) -> tuple[Array, Array]:
    """The gradients of rows and of the weight, that one in float32 and for the rows of this device alone."""
    grad_x = sum_over(rows_times_experts(grad, weight, group_sizes, transpose=True), cuts[1])
    return grad_x, rows_times_rows(grad, x, group_sizes)


# The platform is chosen inside the rules above, so differentiation and the names of activations never meet
# the branch, and a program compiled ahead of time for another platform gets that platform's side.


def rows_times_experts(x, weight, group_sizes, *, transpose: bool):
    """x[i] @ weight[e].T, or x[i] @ weight[e] if `transpose`, for each row i of each group e."""
    if x.shape[0] == 0:
        return jnp.zeros((0, weight.shape[2 if transpose else 1]), x.dtype)
    return _rows_times_experts(transpose, WINDOWS, x, weight, group_sizes)


# A step holds dozens of equal products: they are traced once.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _rows_times_experts(transpose: bool, widths: tuple[int, int], x, weight, group_sizes):
    on_gpu = functools.partial(_rows_times_experts_windows, transpose=transpose, widths=GPU_WINDOWS)
    return lax.platform_dependent(
        x,
        weight,
        group_sizes,
        cpu=functools.partial(_rows_times_experts_windows, transpose=transpose, widths=widths),
        cuda=on_gpu,
        rocm=on_gpu,
        default=functools.partial(_rows_times_experts_ragged, transpose=transpose),
    )


def rows_times_rows(left, right, group_sizes):
    """Per group e the sum of outer products left[i] right[i]^T of its rows: [experts, out, features], float32."""
    if left.shape[0] == 0:
        return jnp.zeros((group_sizes.shape[0], left.shape[1], right.shape[1]), jnp.float32)
    return _rows_times_rows(WINDOWS, left, right, group_sizes)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _rows_times_rows(widths: tuple[int, int], left, right, group_sizes):
    on_gpu = functools.partial(_rows_times_rows_windows, widths=GPU_WINDOWS)
    return lax.platform_dependent(
        left,
        right,
        group_sizes,
        cpu=functools.partial(_rows_times_rows_windows, widths=widths),
        cuda=on_gpu,
        rocm=on_gpu,
        default=_rows_times_rows_ragged,
    )


def _window_sizes(rows: int, experts: int, widths: tuple[int, int]) -> tuple[int, ...]:
    wide, narrow = widths
    mean = 1 << (-(-rows // experts) - 1).bit_length()
    # A window can't be longer than the array it slices.
    return tuple(dict.fromkeys(min(window, rows) for window in (wide, min(narrow, max(mean, NARROWEST)))))


def _window(start, end, size: int, rows: int):
    """Where to slice for rows `start .. start + size`, and which rows of the slice lie in `start .. end`."""
    at = jnp.minimum(start, rows - size)
    row = at + jnp.arange(size, dtype=jnp.int32)
    return at, ((row >= start) & (row < end))[:, None]


def _rows_times_experts_windows(x, weight, group_sizes, *, transpose: bool, widths: tuple[int, int]):
    if x.shape[0] <= weight.shape[0]:
        return _rows_times_experts_copies(x, weight, group_sizes, transpose=transpose)
    rows, sizes = x.shape[0], _window_sizes(x.shape[0], weight.shape[0], widths)
    group_sizes = group_sizes.astype(jnp.int32)
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    contract = (((1,), (0 if transpose else 1,)), ((), ()))
    out, _ = vary(jnp.zeros((rows, weight.shape[2 if transpose else 1]), x.dtype), x)
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


def _rows_times_rows_windows(left, right, group_sizes, *, widths: tuple[int, int]):
    rows, sizes = left.shape[0], _window_sizes(left.shape[0], group_sizes.shape[0], widths)
    group_sizes = group_sizes.astype(jnp.int32)
    ends = jnp.cumsum(group_sizes)
    # Only experts that have rows are visited.
    used = jnp.argsort(group_sizes == 0, stable=True).astype(jnp.int32)

    def of_expert(i, out):
        expert = used[i]
        start, end = ends[expert] - group_sizes[expert], ends[expert]
        total, _ = vary(jnp.zeros(out.shape[1:], out.dtype), left)
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

    out, _ = vary(jnp.zeros((group_sizes.shape[0], left.shape[1], right.shape[1]), jnp.float32), left)
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
