"""What training minimises: the loss of a batch and its gradient, whole or in micro-batches."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from ..layers.resident import Resident
from ..layers.stack import Stack
from ..policies.activation import named, path_string
from ..policies.axes import constrain
from ..policies.spaces import on_host
from .data import Batch
from .memory import fetch
from .sharding import logical_axes


class Sums(eqx.Module):
    """Parts of a loss; those of micro-batches add up to those of the batch."""

    total: Float[Array, ""]
    loss: Float[Array, ""]
    mtp_loss: Float[Array, ""]
    balance_loss: Float[Array, ""]
    count: Float[Array, ""]
    load: dict[str, Float[Array, "..."]]


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss of a model without its values; see `make_train_step` for what the numbers mean."""

    model: Any
    mtp_weight: float
    balance_weight: float
    compute_dtype: Any
    checkpoint: Callable[..., Any] | None
    accumulate: int

    @functools.cached_property
    def _stacks(self) -> tuple[str, ...]:
        flat = jax.tree_util.tree_leaves_with_path(self.model, is_leaf=_is_stack)
        return tuple(f"{path_string(path)}." for path, node in flat if _is_stack(node))

    @functools.cached_property
    def _axes(self) -> dict[str, str | None]:
        return logical_axes(self.model)

    def assemble(self, params: dict[str, Any], buffers: dict[str, Any]) -> Any:
        """The model with a state's values, in the dtypes that it computes in.

        What lives on the host is fetched, in stacks only where a layer is called.
        """

        def fill(path: tuple, leaf: Any) -> Any:
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            where = path_string(path)
            value = buffers[where] if where in buffers else params[where]
            if self._stays_on_host(where, value):
                return Resident(value, leaf.dtype if where in buffers else self._dtypes[where])
            value = fetch(value)
            return value if where in buffers else value.astype(self._dtypes[where])

        return named(jax.tree_util.tree_map_with_path(fill, self.model))

    @functools.cached_property
    def _dtypes(self) -> dict[str, Any]:
        """What each of the model's arrays is computed with, by path."""

        def dtype(where: str, leaf: Any) -> Any:
            # Routing decisions hang on small differences between logits.
            keep = self.compute_dtype is None or "router" in where.split(".")
            return leaf.dtype if keep else self.compute_dtype

        flat = [(path_string(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(self.model)]
        return {where: dtype(where, leaf) for where, leaf in flat if isinstance(leaf, jax.ShapeDtypeStruct)}

    def _stays_on_host(self, where: str, value: Any) -> bool:
        return on_host(value) and where.startswith(self._stacks)

    def _parts(self, params: dict, buffers: dict, batch: Batch, counts: Any) -> tuple[Array, Sums]:
        """What a micro-batch adds to the loss of a batch with these counts (None: this is all of it)."""
        model, mtp = self.assemble(params, buffers), self.mtp_weight > 0
        losses = model.losses(batch, mtp=mtp, checkpoint=self.checkpoint)
        count, mtp_count, mine = losses.count, losses.mtp_count, None
        if counts is not None:
            count, mtp_count, mine = counts.count, counts.mtp_count, model.counts(batch, mtp=mtp)
        loss = losses.sum / jnp.maximum(count, 1)
        mtp_loss = jnp.sum(losses.mtp_sum / jnp.maximum(mtp_count, 1)) / max(losses.mtp_sum.shape[0], 1)
        balance_loss = jnp.zeros((), jnp.float32)
        for name, stats in losses.stats.items():
            balance_loss += jnp.sum(stats.balance_loss) * (1 if counts is None else counts.share(mine, name))
        load = {name: jax.lax.stop_gradient(s.load) for name, s in losses.stats.items()}
        total = loss + self.mtp_weight * mtp_loss + self.balance_weight * balance_loss
        return total, Sums(total, loss, mtp_loss, balance_loss, losses.count, load)

    def loss(self, params: dict, buffers: dict, batch: Batch) -> Array:
        """The loss of a batch, or of a micro-batch on its own."""
        return self._parts(params, buffers, batch, None)[0]

    def gradients(self, params: dict, buffers: dict, batch: Batch) -> tuple[dict[str, Array], Sums]:
        """The gradient of a batch's loss, on the device and cut like the parameters, and the loss's parts.

        Raises ValueError for micro-batches of a model that doesn't say what they are divided by.
        """

        def gradient(params: dict, part: Batch, counts: Any) -> tuple[dict[str, Array], Sums]:
            found, sums = jax.grad(self._parts, has_aux=True)(params, buffers, part, counts)
            return {path: constrain(leaf, self._axes.get(path)) for path, leaf in fetch(found).items()}, sums

        if self.accumulate == 1:
            return gradient(params, batch, None)
        if not hasattr(self.model, "counts"):
            raise ValueError(
                f"accumulate={self.accumulate} needs a model with `counts`, which {type(self.model).__name__} lacks"
            )
        # Rounded once: inside of the loop XLA would turn each stack's float32 into the order that it gathers it in, and
        # hold that all along.
        params = {
            path: value if self._stays_on_host(path, value) else fetch(value).astype(self._dtypes[path])
            for path, value in params.items()
        }
        # Counted first, so that a token weighs the same in whichever micro-batch it is.
        counts = self.assemble(params, buffers).counts(batch, mtp=self.mtp_weight > 0)

        def add(carry: tuple, part: Batch) -> tuple[tuple, None]:
            found, sums = gradient(params, part, counts)
            # XLA for TPUs would take sums over devices out of the loop, and stops with a failed check of its own.
            found = {path: jax.lax.optimization_barrier(leaf) for path, leaf in found.items()}
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), carry, (found, sums)), None

        micro = jax.tree.map(lambda x: _split(x, self.accumulate, batch.tokens.shape[0]), batch)
        _, sums = jax.eval_shape(self._parts, params, buffers, jax.tree.map(lambda x: x[0], micro), counts)
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), sums)
        zeros = {path: jnp.zeros(value.shape, jnp.float32) for path, value in params.items()}
        zeros = {path: constrain(zero, self._axes.get(path)) for path, zero in zeros.items()}
        return jax.lax.scan(add, (zeros, sums), micro)[0]


def _is_stack(node: Any) -> bool:
    return isinstance(node, Stack)


def _split(x: Array, parts: int, rows: int) -> Array:
    """`x` as micro-batches, each with every `parts`-th row: with rows cut over devices, none has to move."""
    if x.shape[0] != rows:  # positions that all rows share
        return jnp.broadcast_to(x, (parts, *x.shape))
    return constrain(rearrange(x, "(n k) s -> k n s", k=parts), "_ batch sequence")
