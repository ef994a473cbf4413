"""What the language models of the zoo have in common: embedding, layers, final norm, head, losses."""

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..layers.cache import Cache, LayerCache
from ..layers.embedding import Embedding
from ..layers.linear import Linear, check_sizes
from ..layers.loss import IGNORED, cross_entropy
from ..layers.mask import attention_mask, cache_mask
from ..layers.moe import MoEStats
from ..layers.norm import RMSNorm
from ..layers.rotary import Rotary
from ..layers.stack import Stack
from ..policies.activation import named
from ..policies.axes import any_mesh
from ..policies.report import format_bytes
from .config import Config

Checkpoint = Callable[..., Callable[..., Any]]


class Losses(eqx.Module):
    """The parts of a training loss, summed and not yet divided, so that they add up over micro-batches.

    The loss is `sum / count`, plus MTP's weight times the mean over depths of `mtp_sum / mtp_count`, plus
    the balance weight times the sum of `balance_loss` in `stats`.
    """

    sum: Float[Array, ""]  # float32: cross-entropy summed over the targets that count
    count: Float[Array, ""]  # float32: how many these are
    mtp_sum: Float[Array, " depths"]  # float32: the same for each depth of multi-token prediction
    mtp_count: Float[Array, " depths"]
    stats: dict[str, MoEStats]  # by the path of the stack or MTP module that has experts


class Counts(eqx.Module):
    """What the parts of a loss are divided by. Counts of micro-batches add up to those of the batch."""

    count: Float[Array, ""]  # float32: targets that count, `Losses.count`
    rows: Float[Array, ""]  # float32: rows with any real token, over which a balance loss is the mean
    mtp_count: Float[Array, " depths"]  # float32: the same two for each depth of multi-token prediction
    mtp_rows: Float[Array, " depths"]

    def share(self, part: "Counts", name: str) -> Float[Array, ""]:
        """How much of a batch's balance loss the rows of a micro-batch are, for the experts of stack `name`."""
        mine, whole = part.rows, self.rows
        if name.startswith("mtp."):
            depth = int(name.split(".")[1])
            mine, whole = part.mtp_rows[depth], self.mtp_rows[depth]
        return mine / jnp.maximum(whole, 1)


def count_rows(mask: Any, rows: int) -> Float[Array, ""]:
    """Rows with any True in `mask`; all `rows` without one."""
    return jnp.asarray(rows, jnp.float32) if mask is None else jnp.sum(jnp.any(mask, axis=1), dtype=jnp.float32)


def count_targets(targets: Int[Array, "batch sequence"], mask: Any) -> Float[Array, ""]:
    """Targets that a cross-entropy counts."""
    wanted = targets != IGNORED
    return jnp.sum(wanted if mask is None else wanted & mask, dtype=jnp.float32)


def check_inputs(tokens: Any, positions: Any = None, segment_ids: Any = None, mask: Any = None) -> None:
    """Raises a one-line ValueError unless the arguments of a model's call have the right shapes and dtypes."""
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers [batch, sequence], got {_shape(tokens)}")
    batch, sequence = tokens.shape
    for name, array, rows, kind in (
        ("positions", positions, {1, batch}, jnp.integer),
        ("segment_ids", segment_ids, {batch}, jnp.integer),
        ("mask", mask, {batch}, jnp.bool_),
    ):
        if array is None:
            continue
        fits = array.ndim == 2 and array.shape[0] in rows and array.shape[1] == sequence
        if not fits or not jnp.issubdtype(array.dtype, kind):
            what = "True at real tokens" if kind is jnp.bool_ else "integers"
            first = " or ".join(str(n) for n in sorted(rows))
            raise ValueError(f"{name} must be {what}, [{first}, {sequence}] like tokens, got {_shape(array)}")


def _shape(array: Any) -> str:
    return f"{array.dtype}[{', '.join(str(n) for n in array.shape)}]"


def check_boundaries(boundaries: Sequence[int], num_layers: int) -> None:
    """Raises ValueError unless `boundaries` are increasing layer indices in 1 .. num_layers - 1."""
    whole = all(isinstance(b, int | np.integer) and not isinstance(b, bool) for b in boundaries)
    inside = whole and all(0 < b < num_layers for b in boundaries)
    if not inside or any(low >= high for low, high in itertools.pairwise(boundaries)):
        raise ValueError(
            f"segments={tuple(boundaries)} must be increasing layer indices between 1 and {num_layers - 1}: "
            "each begins a new segment"
        )


def inner_boundaries(boundaries: Sequence[int], start: int, num_layers: int) -> tuple[int, ...]:
    """Those of a model's boundaries that lie inside a stack; where a stack begins there is one anyhow."""
    return tuple(b for b in boundaries if start < b < start + num_layers)


class LanguageModel(eqx.Module):
    """A decoder from token ids to logits. `Llama` and `DeepSeek` are its families."""

    embedding: eqx.AbstractVar[Embedding]
    norm: eqx.AbstractVar[RMSNorm]
    head: eqx.AbstractVar[Linear | None]
    rotary: eqx.AbstractVar[Rotary]
    config: eqx.AbstractVar[Config]

    @abc.abstractmethod
    def stacks(self) -> dict[str, Stack]:
        """The model's stacks in the order in which they run, by the name of their field."""

    @property
    def head_weight(self) -> Float[Array, "vocabulary features"]:
        """What logits are a product with: the head's weight, or the embedding's where they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    @property
    def window(self) -> int | None:
        """The sliding window of attention, where all layers have the same."""
        windows = set(self.config.windows())
        return windows.pop() if len(windows) == 1 else None

    def layer_inputs(self) -> dict[str, dict[str, Array]]:
        """By stack, the arguments of blocks that differ from layer to layer, `[num_layers]` each.

        They are `window` and `rotates`, each only in models whose layers differ in it.
        """
        windows, rotates = self.config.windows(), self.config.rotates()
        inputs = {}
        if len(set(windows)) > 1:
            everything = np.iinfo(np.int32).max
            inputs["window"] = np.asarray([everything if w is None else w for w in windows], np.int32)
        if not all(rotates):
            inputs["rotates"] = np.asarray(rotates)
        return {
            name: {key: jnp.asarray(x[stack.start : stack.start + stack.num_layers]) for key, x in inputs.items()}
            for name, stack in self.stacks().items()
        }

    def shared_inputs(
        self,
        tokens: Int[Array, "batch sequence"],
        positions: Int[Array, "#batch sequence"] | None,
        segment_ids: Int[Array, "batch sequence"] | None,
        mask: Bool[Array, "batch sequence"] | None,
    ) -> dict[str, Any]:
        """What all layers share: rotary tables, the attention mask and the mask of real tokens."""
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        return {
            "tables": self.rotary.tables(positions, self.embedding.weight.dtype),
            "rotary": self.rotary,
            "mask": attention_mask(tokens.shape[1], segment_ids=segment_ids, mask=mask, window=self.window),
            "token_mask": mask,
        }

    def init_cache(self, batch: int, capacity: int, dtype: Any = None) -> Cache:
        """An empty cache for `batch` rows of up to `capacity` tokens, padding included.

        `dtype` is that of the parameters by default. Grouped-query attention keeps
        `2 * num_key_value_heads * head_dim` numbers a token and layer, latent attention
        `kv_lora_rank + qk_rope_head_dim`. Raises ValueError when a size is not a positive integer.
        """
        check_sizes("init_cache", batch=batch, capacity=capacity)
        dtype = jnp.dtype(self.embedding.weight.dtype if dtype is None else dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"init_cache: dtype must be floating, got {dtype}")
        arrays = {name: stack.init_cache(batch, capacity, dtype) for name, stack in self.stacks().items()}
        return Cache(arrays, jnp.zeros((batch, capacity), bool), jnp.zeros((), jnp.int32), dtype)

    @any_mesh
    def hidden(
        self,
        tokens: Int[Array, "batch sequence"],
        *,
        positions: Int[Array, "#batch sequence"] | None = None,
        segment_ids: Int[Array, "batch sequence"] | None = None,
        mask: Bool[Array, "batch sequence"] | None = None,
        cache: Cache | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> tuple[Float[Array, "batch sequence features"], dict[str, MoEStats]] | tuple[
        Float[Array, "batch sequence features"], dict[str, MoEStats], Cache
    ]:
        """The states after the final norm, which the head reads, and the experts' statistics by stack; with
        a `cache` that too.

        Arguments as for the model's call.
        """
        check_inputs(tokens, positions, segment_ids, mask)
        self = named(self)
        x, handles = self.embedding(tokens), {}
        if cache is None:
            shared = self.shared_inputs(tokens, positions, segment_ids, mask)
        else:
            if segment_ids is not None or checkpoint is not None:
                raise ValueError("a cache is for generating: it goes with neither segment_ids nor checkpoint")
            # There is no error to raise in a compiled program: what doesn't fit must not pass for an answer.
            x = jnp.where(cache.overflows(tokens.shape[1]), jnp.nan, x)
            shared, cache, handles = self._cached_inputs(tokens, positions, mask, cache)
        per_layer, stats, arrays = self.layer_inputs(), {}, {}
        for name, stack in self.stacks().items():
            options = {"checkpoint": checkpoint, "per_layer": per_layer.get(name), "cache": handles.get(name)}
            x, result, *held = stack(x, **options, **shared)
            if result is not None:
                stats[name] = result
            if cache is not None:
                (arrays[name],) = held
        states = self.norm(x)
        return (states, stats) if cache is None else (states, stats, dataclasses.replace(cache, arrays=arrays))

    def _cached_inputs(
        self, tokens: Any, positions: Any, mask: Any, cache: Cache
    ) -> tuple[dict[str, Any], Cache, dict[str, LayerCache]]:
        """`shared_inputs` of tokens that follow those in a cache, the cache with slots for them, and its parts by
        stack."""
        batch, length = tokens.shape
        cache.check(batch, length)
        start, fresh = cache.length, cache.fresh
        real = jnp.ones(tokens.shape, bool) if mask is None else mask
        cache, own_positions = cache.admit(real)
        positions = jnp.broadcast_to(own_positions if positions is None else positions, tokens.shape)
        # Row by row: scaling that depends on the length must not depend on what else is in the batch.
        tables = jax.vmap(lambda row: self.rotary.tables(row[None], self.embedding.weight.dtype))(positions)
        shared = {
            "tables": jax.tree.map(lambda table: table[:, 0], tables),
            "rotary": self.rotary,
            "mask": attention_mask(length, mask=real, window=self.window)
            if fresh
            else cache_mask(cache.valid, start, length, window=self.window),
            "token_mask": mask,
        }
        first = jnp.zeros((), jnp.int32)
        handles = {n: LayerCache(arrays, first, start, fresh, cache.dtype) for n, arrays in cache.arrays.items()}
        return shared, cache, handles

    @jax.named_scope("language_model")
    @any_mesh
    def __call__(
        self,
        tokens: Int[Array, "batch sequence"],
        *,
        positions: Int[Array, "#batch sequence"] | None = None,
        segment_ids: Int[Array, "batch sequence"] | None = None,
        mask: Bool[Array, "batch sequence"] | None = None,
        cache: Cache | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Float[Array, "batch sequence vocabulary"] | tuple[Float[Array, "batch sequence vocabulary"], Cache]:
        """Logits in the dtype of the parameters: position i scores the token that follows `tokens[:, i]`.

        With a `cache` also the cache, with these tokens in it.

        **Arguments:**

        - `tokens`: ids below `vocab_size` (`layers.embedding.check_tokens` looks, on the host).
        - `positions`: of each token, in its row or, with one row, in all of them. By default 0, 1, 2, ...;
            with a cache they go on from the real tokens that it holds.
        - `segment_ids`: equal for tokens of one document; documents packed into a row don't see each other.
        - `mask`: True at real tokens. The others are seen by nobody and go to no expert; what comes out at
            their positions means nothing, but is finite.
        - `cache`: from `init_cache`, or from the call before, whose tokens these follow. Tokens that don't
            fit raise ValueError where the cache's length is known, and give NaN inside `jax.jit`.
        - `checkpoint`: how blocks are rematerialised, `policies.checkpoint` to do as they are annotated.

        Raises ValueError on wrong shapes and dtypes.
        """
        inputs = {"positions": positions, "segment_ids": segment_ids, "mask": mask, "checkpoint": checkpoint}
        if cache is None:
            return self.logits(self.hidden(tokens, **inputs)[0])
        states, _, cache = self.hidden(tokens, cache=cache, **inputs)
        return self.logits(states), cache

    def logits(self, states: Float[Array, "*axes features"]) -> Float[Array, "*axes vocabulary"]:
        """The head's product with `states` from `hidden`, in their dtype."""
        return self.embedding.attend(states) if self.head is None else self.head(states)

    @any_mesh
    def losses(self, batch: Any, *, mtp: bool = True, checkpoint: Checkpoint | None = None) -> Losses:
        """The parts of the training loss on a batch (see `Losses`). Full logits are never held.

        **Arguments:**

        - `batch`: has `tokens`, `targets` (the token that follows each token; -100 doesn't count),
            `positions`, `segment_ids` and `mask` (these three may be None).
        - `mtp`: whether multi-token-prediction modules run, in a model that has any.
        - `checkpoint`: as for the model's call.
        """
        del mtp
        self = named(self)
        states, stats = self.hidden(
            batch.tokens,
            positions=batch.positions,
            segment_ids=batch.segment_ids,
            mask=batch.mask,
            checkpoint=checkpoint,
        )
        total, count = cross_entropy(states, self.head_weight, batch.targets, mask=batch.mask)
        none = jnp.zeros(0, jnp.float32)
        return Losses(total, count, none, none, stats)

    def counts(self, batch: Any, *, mtp: bool = True) -> Counts:
        """What the parts of the loss on a batch are divided by; nothing is run for it. Arguments as for `losses`."""
        del mtp
        none = jnp.zeros(0, jnp.float32)
        rows = count_rows(batch.mask, batch.tokens.shape[0])
        return Counts(count_targets(batch.targets, batch.mask), rows, none, none)

    def __repr__(self) -> str:
        """One line, also of abstract, traced and deleted models; `eqx.tree_pformat` prints the whole tree."""
        leaves = [leaf for leaf in jax.tree.leaves(self) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
        sizes = [math.prod(leaf.shape) for leaf in leaves]
        by_dtype: dict[str, int] = {}
        for leaf, size in zip(leaves, sizes, strict=True):
            by_dtype[str(leaf.dtype)] = by_dtype.get(str(leaf.dtype), 0) + size
        dtypes = " and ".join(sorted(by_dtype, key=lambda name: -by_dtype[name])) or "no arrays"
        size = format_bytes(sum(n * leaf.dtype.itemsize for n, leaf in zip(sizes, leaves, strict=True)))
        config = self.config
        segments = ", ".join(
            f"{name} {stack.start} to {stack.start + stack.num_layers - 1}"
            + (f" in {len(stack.segments)} segments" if len(stack.segments) > 1 else "")
            for name, stack in self.stacks().items()
        )
        return (
            f"{type(self).__name__}({sum(sizes):,} parameters, {dtypes}, {size}; hidden_size {config.hidden_size}, "
            f"{config.num_hidden_layers} layers ({segments}), {config.num_attention_heads} heads, "
            f"vocab_size {config.vocab_size})"
        )
