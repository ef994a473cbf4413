"""Models with a mixture of experts: dense layers, layers with experts, multi-token prediction."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ..layers.block import Block
from ..layers.embedding import Embedding
from ..layers.linear import Linear
from ..layers.loss import IGNORED, cross_entropy
from ..layers.mask import attention_mask
from ..layers.moe import MoEStats
from ..layers.norm import RMSNorm
from ..layers.rotary import Rotary, Tables
from ..layers.stack import Stack
from ..policies.activation import Activation, named
from ..policies.axes import any_mesh
from . import parts
from .model import (
    Checkpoint,
    Counts,
    LanguageModel,
    Losses,
    check_boundaries,
    check_inputs,
    count_rows,
    count_targets,
    inner_boundaries,
)
from .moe_config import DeepSeekConfig, MoEConfig


def _block(config: MoEConfig | DeepSeekConfig, moe: bool, dtype: Any, key: PRNGKeyArray) -> Block:
    attention_key, feed_forward_key, router_key = jax.random.split(key, 3)
    if moe:
        feed_forward = parts.moe(config, dtype, feed_forward_key, router_key)
    else:
        feed_forward = parts.mlp(config, dtype, feed_forward_key)
    return parts.block(config, parts.attention(config, dtype, attention_key), feed_forward, dtype)


class MTP(eqx.Module):
    """One depth of multi-token prediction (DeepSeek-V3 technical report, section 2.2).

    `norm(block(projection(concat[embedding_norm(embedding), hidden_norm(states)])))`: the embedding comes
    first, as released weights have it (the report prints the other order). The model's head reads the
    result, and so does the next depth.

    Activations: `joined` `[batch, sequence, 2 * hidden_size]`, what the projection reads, `output`
    `[batch, sequence, hidden_size]`, what the last norm reads, and those of the block.
    """

    embedding_norm: RMSNorm  # enorm
    hidden_norm: RMSNorm  # hnorm
    projection: Linear  # eh_proj
    block: Block
    norm: RMSNorm  # shared_head.norm
    joined: Activation
    output: Activation

    def __init__(self, config: MoEConfig | DeepSeekConfig, *, dtype: Any = jnp.float32, key: PRNGKeyArray):
        """A module with a MoE block of its own, whatever the model's layers are."""
        projection_key, block_key = jax.random.split(key)
        size, std = config.hidden_size, config.initializer_range
        self.embedding_norm = parts.norm(config, dtype)
        self.hidden_norm = parts.norm(config, dtype)
        self.projection = Linear(2 * size, size, axes="embed _", std=std, dtype=dtype, key=projection_key)
        self.block = _block(config, True, dtype, block_key)
        self.norm = parts.norm(config, dtype)
        self.joined = Activation("joined", axes="batch sequence _")
        self.output = Activation("output", axes="batch sequence embed")

    @jax.named_scope("mtp")
    @any_mesh
    def __call__(
        self,
        states: Float[Array, "batch sequence features"],
        embeddings: Float[Array, "batch sequence features"],
        *,
        tables: Tables,
        rotary: Rotary,
        mask: Bool[Array, "#batch sequence sequence"],
        token_mask: Bool[Array, "batch sequence"] | None = None,
    ) -> tuple[Float[Array, "batch sequence features"], MoEStats]:
        """From normed `states` and the `embeddings` of later tokens to normed states, and the statistics.

        The other arguments are those of `Block`.
        """
        joined = jnp.concatenate([self.embedding_norm(embeddings), self.hidden_norm(states)], axis=-1)
        x = self.projection(self.joined(joined))
        x, stats = self.block(x, tables=tables, rotary=rotary, mask=mask, token_mask=token_mask)
        return self.norm(self.output(x)), stats


class Depth(NamedTuple):
    """What one MTP module gives: states for the head, where they mean something, and its statistics."""

    states: Float[Array, "batch sequence features"]
    valid: Bool[Array, "batch sequence"]
    stats: MoEStats


class Mixture(LanguageModel):
    """A decoder with a mixture of experts and any of the two kinds of attention.

    The dense layers come first, then those with experts; a stack is None where there are no such layers.
    `model(tokens)` gives logits, `model.hidden(tokens)` the states before the head, `model.mtp_hidden` those
    of the MTP modules. Mixtral, Qwen3-MoE, GLM-4.5 and gpt-oss are this class; `DeepSeek` is its other name
    for models with latent attention.
    """

    embedding: Embedding
    dense_layers: Stack | None
    moe_layers: Stack | None
    norm: RMSNorm
    head: Linear | None
    mtp: tuple[MTP, ...]
    rotary: Rotary
    config: MoEConfig | DeepSeekConfig = eqx.field(static=True)

    def __init__(
        self,
        config: MoEConfig | DeepSeekConfig,
        *,
        dtype: Any = jnp.float32,
        segments: Sequence[int] = (),
        scan: bool = True,
        key: PRNGKeyArray,
    ):
        """Weights N(0, initializer_range^2), norms one, biases zero; drawn in float32, stored as `dtype`,
        those of routers as float32.

        `segments` are the layers, counted through both stacks, that begin a new segment, and `scan=False`
        runs layers in a loop: neither changes the weights. Raises ValueError on boundaries that are no
        inner layers.
        """
        check_boundaries(segments, config.num_hidden_layers)
        embedding_key, dense_key, moe_key, head_key, mtp_key = jax.random.split(key, 5)
        options = {"std": config.initializer_range, "dtype": dtype}
        dense = config.first_k_dense_replace

        def stack(start: int, num_layers: int, moe: bool, key: PRNGKeyArray) -> Stack | None:
            if not num_layers:
                return None
            return Stack.build(
                lambda key: _block(config, moe, dtype, key),
                num_layers,
                boundaries=inner_boundaries(segments, start, num_layers),
                start=start,
                scan=scan,
                key=key,
            )

        self.embedding = Embedding(config.vocab_size, config.hidden_size, key=embedding_key, **options)
        self.dense_layers = stack(0, dense, False, dense_key)
        self.moe_layers = stack(dense, config.num_hidden_layers - dense, True, moe_key)
        self.norm = parts.norm(config, dtype)
        self.head = None
        if not config.tie_word_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, axes="vocab embed", key=head_key, **options)
        mtp_keys = jax.random.split(mtp_key, config.num_nextn_predict_layers)
        self.mtp = tuple(MTP(config, dtype=dtype, key=key) for key in mtp_keys)
        self.rotary = config.rotary()
        self.config = config

    def stacks(self) -> dict[str, Stack]:
        stacks = {"dense_layers": self.dense_layers, "moe_layers": self.moe_layers}
        return {name: stack for name, stack in stacks.items() if stack is not None}

    def mtp_hidden(
        self,
        states: Float[Array, "batch sequence features"],
        tokens: Int[Array, "batch sequence"],
        *,
        positions: Int[Array, "#batch sequence"] | None = None,
        segment_ids: Int[Array, "batch sequence"] | None = None,
        mask: Bool[Array, "batch sequence"] | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> list[Depth]:
        """The MTP modules' states, from `states` after the final norm, for depths k = 1, 2, ...

        At depth k position i reads token i + k and predicts token i + k + 1. It is valid where token i + k
        is a real one of the same document; elsewhere it is seen by no valid position and goes to no
        expert. Arguments as for the model's call.
        """
        check_inputs(tokens, positions, segment_ids, mask)
        self = named(self)
        shared = self.shared_inputs(tokens, positions, segment_ids, mask)
        depths = []
        for k, module in enumerate(self.mtp, start=1):
            valid = _valid(tokens, segment_ids, mask, k)
            shared["mask"] = attention_mask(
                tokens.shape[1], segment_ids=segment_ids, mask=valid, window=self.window
            )
            shared["token_mask"] = valid
            # One checkpoint around the whole module: its projection and norms are annotated too.
            run = module if checkpoint is None else checkpoint(module, prevent_cse=True)
            states, stats = run(states, self.embedding(_ahead(tokens, k, 0)), **shared)
            depths.append(Depth(states, valid, stats))
        return depths

    @any_mesh
    def losses(self, batch: Any, *, mtp: bool = True, checkpoint: Checkpoint | None = None) -> Losses:
        """As in `LanguageModel`, with multi-token prediction."""
        self = named(self)
        tokens, mask = batch.tokens, batch.mask
        inputs = {"positions": batch.positions, "segment_ids": batch.segment_ids, "mask": mask}
        states, stats = self.hidden(tokens, **inputs, checkpoint=checkpoint)
        total, count = cross_entropy(states, self.head_weight, batch.targets, mask=mask)
        sums, counts = [jnp.zeros(0, jnp.float32)], [jnp.zeros(0, jnp.float32)]
        depths = self.mtp_hidden(states, tokens, **inputs, checkpoint=checkpoint) if mtp else []
        for k, depth in enumerate(depths, start=1):
            targets = _ahead(batch.targets, k, IGNORED)
            mtp_sum, mtp_count = cross_entropy(depth.states, self.head_weight, targets, mask=depth.valid)
            sums.append(mtp_sum[None])
            counts.append(mtp_count[None])
            stats[f"mtp.{k - 1}"] = depth.stats
        return Losses(total, count, jnp.concatenate(sums), jnp.concatenate(counts), stats)

    def counts(self, batch: Any, *, mtp: bool = True) -> Counts:
        """As in `LanguageModel`, with multi-token prediction."""
        counts, rows = [jnp.zeros(0, jnp.float32)], [jnp.zeros(0, jnp.float32)]
        for k in range(1, len(self.mtp) + 1 if mtp else 1):
            valid = _valid(batch.tokens, batch.segment_ids, batch.mask, k)
            counts.append(count_targets(_ahead(batch.targets, k, IGNORED), valid)[None])
            rows.append(count_rows(valid, batch.tokens.shape[0])[None])
        main = super().counts(batch)
        return Counts(main.count, main.rows, jnp.concatenate(counts), jnp.concatenate(rows))


def _valid(tokens: Array, segment_ids: Array | None, mask: Array | None, k: int) -> Bool[Array, "batch sequence"]:
    """Where the token k places on is a real one of the same document."""
    valid = jnp.broadcast_to(jnp.arange(tokens.shape[1]) < tokens.shape[1] - k, tokens.shape)
    if segment_ids is not None:
        valid &= segment_ids == _ahead(segment_ids, k, -1)
    return valid if mask is None else valid & mask & _ahead(mask, k, False)


def _ahead(x: Int[Array, "batch sequence"] | Bool[Array, "batch sequence"], k: int, fill: Any) -> Array:
    """`x[:, i + k]` at position i, and `fill` where a row has ended."""
    k = min(k, x.shape[1])
    return jnp.pad(x[:, k:], ((0, 0), (0, k)), constant_values=fill)
