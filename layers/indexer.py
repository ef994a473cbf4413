"""DeepSeek-V3.2's sparse attention: a small scorer that picks, for each query, the keys attention may look at."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ..policies.activation import Activation
from ..policies.axes import any_mesh, whole
from .linear import Linear, Untrained, check_input, check_sizes
from .local import on_each_device
from .rotary import Rotary, Tables


class LayerNorm(eqx.Module):
    """`weight * (x - mean) / sqrt(variance + eps) + bias` over the last axis (Ba et al., 2016), in float32."""

    weight: Float[Array, " features"]
    bias: Float[Array, " features"]
    axes: ClassVar[dict[str, str]] = {"weight": "_", "bias": "_"}
    eps: float = eqx.field(static=True)

    def __init__(self, size: int, *, eps: float = 1e-6, dtype: Any = jnp.float32):
        """Raises ValueError unless `size` is a positive integer."""
        check_sizes("LayerNorm", size=size)
        self.weight, self.bias, self.eps = jnp.ones((size,), dtype), jnp.zeros((size,), dtype), float(eps)

    @jax.named_scope("layer_norm")
    @any_mesh
    def __call__(self, x: Float[Array, "*axes features"]) -> Float[Array, "*axes features"]:
        """Same shape and dtype as `x`."""
        check_input("LayerNorm", x, self.weight.shape[0])
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        return (normed * self.weight.astype(jnp.float32) + self.bias.astype(jnp.float32)).astype(x.dtype)


class Indexer(Untrained):
    """Picks the `top_k` keys for each query by `sum_h weight_h relu(query_h . key)`, one key for all heads.

    Queries come from the latent of MLA's queries, keys and the heads' weights from the layer's input. The first
    features of both are rotated, in half-split order whatever order MLA's own are in. A choice has no gradient, so
    nothing here is trained with the model, as in Hugging Face's `DeepseekV32Indexer`. The Hadamard rotation and
    the float8 rounding of DeepSeek's own kernel are left out: the one changes no score, the other only precision.

    Activation: `selected`, `[batch, sequence, top_k]` int32, the keys' indices.
    """

    query_up: Linear  # wq_b
    key_projection: Linear  # wk
    key_norm: LayerNorm  # k_norm
    head_weights: Linear  # weights_proj
    selected: Activation
    num_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    top_k: int = eqx.field(static=True)

    def __init__(
        self,
        hidden_size: int,
        *,
        q_lora_rank: int,
        num_heads: int,
        head_dim: int,
        top_k: int,
        std: float = 0.02,
        dtype: Any = jnp.float32,
        key: PRNGKeyArray,
    ):
        """The weights of heads are float32 whatever `dtype` is. Raises ValueError for a size below 1."""
        check_sizes("Indexer", num_heads=num_heads, head_dim=head_dim, top_k=top_k)
        query_key, key_key, weights_key = jax.random.split(key, 3)
        self.query_up = Linear(q_lora_rank, num_heads * head_dim, axes="_ latent", std=std, dtype=dtype, key=query_key)
        self.key_projection = Linear(hidden_size, head_dim, axes="_ embed", std=std, dtype=dtype, key=key_key)
        self.key_norm = LayerNorm(head_dim, dtype=dtype)
        self.head_weights = Linear(hidden_size, num_heads, axes="_ embed", std=std, dtype=jnp.float32, key=weights_key)
        self.selected = Activation("selected", axes="batch sequence _")
        self.num_heads, self.head_dim, self.top_k = num_heads, head_dim, top_k

    def keys(
        self, x: Float[Array, "batch sequence features"], *, tables: Tables | None, rotary: Rotary | None
    ) -> Float[Array, "batch sequence head_dim"]:
        """The keys of the layer's input, normed and rotated: what a cache holds."""
        key = self.key_norm(self.key_projection(jax.lax.stop_gradient(x)))
        return key if rotary is None else rotary.half_split().apply(key[:, :, None], tables)[:, :, 0]

    @jax.named_scope("indexer")
    @any_mesh
    def __call__(
        self,
        x: Float[Array, "batch sequence features"],
        query_latent: Float[Array, "batch sequence latent"],
        keys: Float[Array, "batch keys head_dim"],
        *,
        tables: Tables | None,
        rotary: Rotary | None,
        mask: Bool[Array, "#batch sequence keys"],
    ) -> Bool[Array, "batch sequence keys"]:
        """`mask` with only the picked keys left in it; all of them where there are no more than `top_k`.

        **Arguments:**

        - `x`, `query_latent`: the layer's input, and its queries' latent after the norm.
        - `keys`: from `keys`, of these or more tokens.
        - `tables`, `rotary`, `mask`: as for `MLA`.
        """
        batch, length = x.shape[0], keys.shape[1]
        mask = jnp.broadcast_to(mask, (batch, *mask.shape[1:]))
        if length <= self.top_k:
            return mask
        x, query_latent, keys = jax.lax.stop_gradient((x, query_latent, keys))
        query = rearrange(self.query_up(query_latent), "b s (h d) -> b s h d", h=self.num_heads)
        if rotary is not None:
            query = rotary.half_split().apply(query, tables)
        keys = whole(keys, "batch sequence _", "sequence")
        query, keys = query.astype(jnp.float32), keys.astype(jnp.float32)
        weights = self.head_weights(x.astype(jnp.float32)) * self.num_heads**-0.5
        scores = jax.nn.relu(jnp.einsum("bshd,btd->bhst", query, keys) * self.head_dim**-0.5)
        scores = jnp.where(mask, jnp.einsum("bhst,bsh->bst", scores, weights), -jnp.inf)
        cut = {"takes": ("batch sequence _",), "gives": "batch sequence _"}
        best = on_each_device(self._best, jax.lax.stop_gradient(scores), **cut)
        indices = self.selected(best)

        def picked(indices: Array) -> Array:
            rows, columns = jnp.arange(indices.shape[0])[:, None, None], jnp.arange(indices.shape[1])[None, :, None]
            return jnp.zeros((*indices.shape[:2], length), bool).at[rows, columns, indices].set(True)

        return mask & on_each_device(picked, indices, **cut)

    def _best(self, scores: Float[Array, "batch sequence keys"]) -> Int[Array, "batch sequence top_k"]:
        return jax.lax.top_k(scores, self.top_k)[1]
