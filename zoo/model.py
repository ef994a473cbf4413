"""What the language models of the zoo have in common: embedding, layers, final norm, head, losses."""

import abc
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..layers.embedding import Embedding
from ..layers.linear import Linear
from ..layers.loss import cross_entropy
from ..layers.mask import attention_mask
from ..layers.moe import MoEStats
from ..layers.norm import RMSNorm
from ..layers.rotary import Rotary
from ..layers.stack import Stack
from ..policies.activation import named
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
            "mask": attention_mask(tokens.shape[1], segment_ids=segment_ids, mask=mask),
            "token_mask": mask,
        }

    def hidden(
        self,
        tokens: Int[Array, "batch sequence"],
        *,
        positions: Int[Array, "#batch sequence"] | None = None,
        segment_ids: Int[Array, "batch sequence"] | None = None,
        mask: Bool[Array, "batch sequence"] | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> tuple[Float[Array, "batch sequence features"], dict[str, MoEStats]]:
        """The states after the final norm, which the head reads, and the experts' statistics by stack.

        Arguments as for the model's call.
        """
        check_inputs(tokens, positions, segment_ids, mask)
        self = named(self)
        shared = self.shared_inputs(tokens, positions, segment_ids, mask)
        x = self.embedding(tokens)
        stats = {}
        for name, stack in self.stacks().items():
            x, result = stack(x, checkpoint=checkpoint, **shared)
            if result is not None:
                stats[name] = result
        return self.norm(x), stats

    @jax.named_scope("language_model")
    def __call__(
        self,
        tokens: Int[Array, "batch sequence"],
        *,
        positions: Int[Array, "#batch sequence"] | None = None,
        segment_ids: Int[Array, "batch sequence"] | None = None,
        mask: Bool[Array, "batch sequence"] | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Float[Array, "batch sequence vocabulary"]:
        """Logits in the dtype of the parameters: position i scores the token that follows `tokens[:, i]`.

        **Arguments:**

        - `tokens`: ids below `vocab_size` (`layers.embedding.check_tokens` looks, on the host).
        - `positions`: of each token, in its row or, with one row, in all of them. By default 0, 1, 2, ...
        - `segment_ids`: equal for tokens of one document; documents packed into a row don't see each other.
        - `mask`: True at real tokens. The others are seen by nobody and go to no expert; what comes out at
            their positions means nothing, but is finite.
        - `checkpoint`: how blocks are rematerialised, `policies.checkpoint` to do as they are annotated.

        Raises ValueError on wrong shapes and dtypes.
        """
        x, _ = self.hidden(
            tokens, positions=positions, segment_ids=segment_ids, mask=mask, checkpoint=checkpoint
        )
        return self.embedding.attend(x) if self.head is None else self.head(x)

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
