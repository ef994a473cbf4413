"""Multi-head latent attention (DeepSeek-V2 technical report, section 2.1): keys and values from one small latent."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from ..policies.activation import Activation
from ..policies.axes import any_mesh
from .attention import dot_product_attention
from .cache import LayerCache
from .indexer import Indexer
from .linear import Linear, check_input, check_sizes
from .norm import RMSNorm
from .rotary import Rotary, Tables

# The norms of the latents have it in every released model, whatever rms_norm_eps its config says.
LATENT_NORM_EPS = 1e-6


class MLA(eqx.Module):
    """Causal self-attention whose keys and values are projected up from a normalised latent.

    Each head's query and key have `qk_nope_head_dim` features without and then `qk_rope_head_dim` features
    with rotation. The rotated part of the key comes straight from `x`, is not normalised, and is one for all
    heads. Queries go through a latent of their own, or with `q_lora_rank=None` through one projection.

    Scores are multiplied by `(qk_nope_head_dim + qk_rope_head_dim) ** -0.5` and by YaRN's correction,
    `Rotary.softmax_scale_factor`, on top of what the rotary tables are multiplied by. A number given as
    `softmax_scale_factor` replaces the correction of the rotary embedding that the layer is called with.

    Activations: `query_latent` `[batch, sequence, q_lora_rank]` (absent without) and `kv_latent`
    `[batch, sequence, kv_lora_rank + qk_rope_head_dim]`, the down projections before their norms; `query` and `key`
    `[batch, sequence, heads, qk_nope_head_dim + qk_rope_head_dim]`, `value` and `context`
    `[batch, sequence, heads, v_head_dim]`, as the softmax uses them and the heads' output.

    Over a mesh that cuts the sequence, each device makes the keys and values of its own tokens, so that only those
    wait on it for the backward pass, and attention gathers them. To gather latents would send less, but each device
    would then make the keys and values of all tokens, and keep or remake them.
    """

    query_down: Linear | None  # q_a_proj
    query_norm: RMSNorm | None  # q_a_layernorm
    query_up: Linear  # q_b_proj; q_proj, from the hidden size, without a latent
    kv_down: Linear  # kv_a_proj_with_mqa: the latent, then the rotated part of the key
    kv_norm: RMSNorm  # kv_a_layernorm
    kv_up: Linear  # kv_b_proj: for each head its key, then its value
    output_projection: Linear
    indexer: Indexer | None
    query_latent: Activation | None
    kv_latent: Activation
    query: Activation
    key: Activation
    value: Activation
    context: Activation
    num_heads: int = eqx.field(static=True)
    q_lora_rank: int | None = eqx.field(static=True)
    kv_lora_rank: int = eqx.field(static=True)
    qk_nope_head_dim: int = eqx.field(static=True)
    qk_rope_head_dim: int = eqx.field(static=True)
    v_head_dim: int = eqx.field(static=True)
    softmax_scale_factor: float | None = eqx.field(static=True)

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        bias: bool = False,
        index_n_heads: int | None = None,
        index_head_dim: int | None = None,
        index_topk: int | None = None,
        softmax_scale_factor: float | None = None,
        std: float = 0.02,
        dtype: Any = jnp.float32,
        key: PRNGKeyArray,
    ):
        """`bias` is for the two down projections and the output projection; the others have none.

        With `index_topk` each query attends to that many keys only, picked by an `Indexer` of
        `index_n_heads` heads of `index_head_dim` features (DeepSeek-V3.2); it needs a `q_lora_rank`.

        Raises ValueError when a size is not a positive integer, or `softmax_scale_factor` isn't positive.
        """
        check_sizes(
            "MLA",
            hidden_size=hidden_size,
            num_heads=num_heads,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            **({} if q_lora_rank is None else {"q_lora_rank": q_lora_rank}),
        )
        if softmax_scale_factor is not None and not softmax_scale_factor > 0:
            raise ValueError(f"MLA: softmax_scale_factor must be positive, got {softmax_scale_factor!r}")
        keys = jax.random.split(key, 5)
        biased = {"use_bias": bias, "std": std, "dtype": dtype}
        plain = {"std": std, "dtype": dtype}
        query_size = num_heads * (qk_nope_head_dim + qk_rope_head_dim)
        self.query_down = self.query_norm = self.query_latent = None
        if q_lora_rank is not None:
            self.query_down = Linear(hidden_size, q_lora_rank, axes="_ embed", key=keys[0], **biased)
            self.query_norm = RMSNorm(q_lora_rank, eps=LATENT_NORM_EPS, dtype=dtype, axes="latent")
            self.query_latent = Activation("query_latent", axes="batch sequence latent")
        heads, source = f"heads={num_heads}", "embed" if q_lora_rank is None else "latent"
        self.query_up = Linear(
            q_lora_rank or hidden_size, query_size, axes=f"{heads} {source}", key=keys[1], **plain
        )
        self.kv_down = Linear(
            hidden_size, kv_lora_rank + qk_rope_head_dim, axes="_ embed", key=keys[2], **biased
        )
        self.kv_norm = RMSNorm(kv_lora_rank, eps=LATENT_NORM_EPS, dtype=dtype, axes="latent")
        self.kv_up = Linear(
            kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), axes=f"{heads} latent", key=keys[3], **plain
        )
        self.output_projection = Linear(
            num_heads * v_head_dim, hidden_size, axes=f"embed {heads}", key=keys[4], **biased
        )
        self.indexer = None
        if index_topk is not None:
            if q_lora_rank is None:
                raise ValueError("MLA: index_topk needs q_lora_rank: the indexer reads the latent of the queries")
            self.indexer = Indexer(
                hidden_size,
                q_lora_rank=q_lora_rank,
                num_heads=index_n_heads,
                head_dim=index_head_dim,
                top_k=index_topk,
                key=jax.random.fold_in(key, 5),
                **plain,
            )
        self.kv_latent = Activation("kv_latent", axes="batch sequence latent")
        self.query = Activation("query", axes="batch sequence heads head_dim")
        self.key = Activation("key", axes="batch sequence heads head_dim")
        self.value = Activation("value", axes="batch sequence heads head_dim")
        self.context = Activation("context", axes="batch sequence heads head_dim")
        self.num_heads = num_heads
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.softmax_scale_factor = None if softmax_scale_factor is None else float(softmax_scale_factor)

    def scale(self, rotary: Rotary | None = None) -> float:
        """What scores are multiplied by before the softmax."""
        factor = self.softmax_scale_factor
        if factor is None:
            factor = 1.0 if rotary is None else rotary.softmax_scale_factor
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * factor

    def cache_shapes(self, batch: int, capacity: int) -> dict[str, tuple[int, ...]]:
        """What a `LayerCache` holds for this layer: the normed latent and the rotated key, and the indexer's keys."""
        shapes = {"latent": (batch, capacity, self.kv_lora_rank + self.qk_rope_head_dim)}
        if self.indexer is not None:
            shapes["index_key"] = (batch, capacity, self.indexer.head_dim)
        return shapes

    @jax.named_scope("mla")
    @any_mesh
    def __call__(
        self,
        x: Float[Array, "batch sequence features"],
        *,
        tables: Tables | None,
        rotary: Rotary | None,
        mask: Bool[Array, "#batch sequence keys"],
        cache: LayerCache | None = None,
    ) -> Float[Array, "batch sequence features"] | tuple[Float[Array, "batch sequence features"], LayerCache]:
        """Same shape and dtype as `x`, and the cache where one is given.

        **Arguments:**

        - `tables`, from `rotary.tables`, and `mask` (see `attention_mask`) are shared by all layers; without
            `rotary` nothing is rotated.
        - `cache`: latents of earlier tokens, to which those of `x` are added. Unless it is fresh, queries are
            projected into the space of the latents and what they find is projected back, so that neither keys
            nor values are ever made (the report's section 2.1.2); the mask is then over the cache's slots.

        Raises ValueError unless `x` is floating `[batch, sequence, hidden_size]` and `rotary` is for
        `qk_rope_head_dim` features.
        """
        check_input("MLA", x, self.kv_down.weight.shape[1], rank=3)
        if rotary is not None and rotary.dim != self.qk_rope_head_dim:
            raise ValueError(f"MLA: rotary is for {rotary.dim} features, qk_rope_head_dim is {self.qk_rope_head_dim}")
        nope, rank, heads = self.qk_nope_head_dim, self.kv_lora_rank, self.num_heads

        source = x if self.query_down is None else self.query_norm(self.query_latent(self.query_down(x)))
        query = rearrange(self.query_up(source), "b s (h d) -> b s h d", h=heads)
        latent = self.kv_latent(self.kv_down(x))
        normed, shared_key = self.kv_norm(latent[..., :rank]), latent[..., None, rank:]
        rotated_query = query[..., nope:]
        if rotary is not None:
            rotated_query, shared_key = rotary.apply(rotated_query, tables), rotary.apply(shared_key, tables)

        kept = {}
        index_key = None if self.indexer is None else self.indexer.keys(x, tables=tables, rotary=rotary)
        if cache is not None:
            new = {"latent": jnp.concatenate([normed, shared_key[:, :, 0]], axis=-1)}
            if index_key is not None:
                new["index_key"] = index_key
            cache, kept = cache.update(**new)
        absorbed = cache is not None and not cache.fresh
        if self.indexer is not None:
            index_key = kept["index_key"].astype(x.dtype) if absorbed else index_key
            mask = self.indexer(x, source, index_key, tables=tables, rotary=rotary, mask=mask)

        if absorbed:
            context = self._absorbed(query[..., :nope], rotated_query, kept["latent"].astype(x.dtype), mask, rotary)
        else:
            key_value = rearrange(self.kv_up(normed), "b s (h d) -> b s h d", h=heads)
            shared_key = jnp.broadcast_to(shared_key, (*shared_key.shape[:2], heads, self.qk_rope_head_dim))
            query = self.query(jnp.concatenate([query[..., :nope], rotated_query], axis=-1))
            key = self.key(jnp.concatenate([key_value[..., :nope], shared_key], axis=-1))
            value = self.value(key_value[..., nope:])
            context = dot_product_attention(query, key, value, mask, self.scale(rotary))
        y = self.output_projection(rearrange(self.context(context), "b s h d -> b s (h d)"))
        return y if cache is None else (y, cache)

    def _absorbed(
        self,
        query: Float[Array, "batch sequence heads nope"],
        rotated_query: Float[Array, "batch sequence heads rope"],
        latent: Float[Array, "batch slots latent"],
        mask: Bool[Array, "batch sequence slots"],
        rotary: Rotary | None,
    ) -> Float[Array, "batch sequence heads value_dim"]:
        """The heads' outputs from latents: one key and one value, of the latent's width, for all heads."""
        weight = rearrange(self.kv_up.weight.astype(query.dtype), "(h d) c -> h d c", h=self.num_heads)
        query = jnp.einsum("bshd,hdc->bshc", query, weight[:, : self.qk_nope_head_dim])
        query = jnp.concatenate([query, rotated_query], axis=-1)
        # The rotated key takes part as a value and is dropped: cheaper than a copy of the latents without it.
        context = dot_product_attention(query, latent[:, :, None], latent[:, :, None], mask, self.scale(rotary))
        context = context[..., : self.kv_lora_rank]
        return jnp.einsum("bshc,hdc->bshd", context, weight[:, self.qk_nope_head_dim :])
