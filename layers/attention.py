"""Multi-head and grouped-query attention (Vaswani et al., 2017; Ainslie et al., 2023)."""

from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange, repeat
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ..policies.activation import Activation
from ..policies.axes import any_mesh, constrain, current, manual_axes, whole
from .cache import LayerCache
from .linear import Linear, check_input, check_sizes, normal
from .mask import within
from .norm import RMSNorm
from .rotary import Rotary, Tables


@jax.named_scope("dot_product_attention")
@any_mesh
def dot_product_attention(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads value_dim"],
    mask: Bool[Array, "#batch queries keys"],
    scale: float,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch queries heads value_dim"]:
    """`softmax(scale * query key^T) value` over the keys that `mask` shows, softmax in float32.

    Query head h reads kv head `h // (heads / kv_heads)`. The width of values may differ from that of keys. A
    query that sees no key gives exactly zero, and zero gradients. `sinks` are one more logit for each head, which
    takes its share of the softmax and has no value (gpt-oss). Raises ValueError when the heads don't divide.

    With a `Layout` in use that cuts the sequence, each device has its own queries and gets all keys and values of
    its heads. It looks at every key, hidden or not, so that devices with early and with late queries have the same
    work.
    """
    heads, kv_heads = query.shape[2], key.shape[2]
    if heads % kv_heads:
        raise ValueError(f"attention: {heads} query heads are not a multiple of {kv_heads} kv heads")
    key, value = (_for_all_queries(x, heads) for x in (key, value))
    kv_heads = key.shape[2]
    # Heads first, before the products: otherwise the backward pass transposes the probabilities, the largest array.
    q = rearrange(query, "b s (k g) d -> b k g s d", k=kv_heads)
    k = rearrange(key, "b t k d -> b k t d")
    v = rearrange(value, "b t k d -> b k t d")
    if query.shape[1] == 1:
        # Keys first: XLA turns the second operand around on CPU, and there are many keys to one query.
        scores = jnp.einsum("bktd,bkgsd->bktgs", k, q, preferred_element_type=jnp.float32) * scale
        scores = rearrange(scores, "b k t g s -> b k g s t")
    else:
        scores = jnp.einsum("bkgsd,bktd->bkgst", q, k, preferred_element_type=jnp.float32) * scale
    # The lowest finite number, not -inf: a row without keys then has finite probabilities and gradients.
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    if sinks is None:
        probabilities = jax.nn.softmax(scores, axis=-1)
    else:
        sink = rearrange(sinks.astype(jnp.float32), "(k g) -> k g 1 1", k=kv_heads)
        highest = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink))
        weights = jnp.exp(scores - highest)
        probabilities = weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - highest))
    probabilities = probabilities.astype(value.dtype)
    context = jnp.einsum("bkgst,bktd->bkgsd", probabilities, v)
    sees_any = jnp.any(mask, axis=-1)[:, None, None, :, None]
    return rearrange(jnp.where(sees_any, context, 0), "b k g s d -> b s (k g) d")


def _for_all_queries(x: Array, heads: int) -> Array:
    """Keys or values as the products read them over a mesh: the whole sequence, of the heads that a device has.

    Where there are too few of them for that, each query head gets its own copy.
    """
    layout = current()
    if layout is None or manual_axes():
        return x
    axes = "batch sequence heads head_dim"
    if x.shape[2] % layout.size(layout.parts(axes)[2]) == 0:
        # Cut before it is gathered, where heads were whole.
        return whole(constrain(x, axes), axes, "sequence")
    x = whole(x, "batch sequence kv_heads head_dim", "sequence")
    return repeat(x, "b t k d -> b t (k g) d", g=heads // x.shape[2])


class Attention(eqx.Module):
    """Causal self-attention with `num_kv_heads` keys and values shared by groups of query heads.

    `head_dim` is free: `num_heads * head_dim` may differ from the hidden size. `qk_norm="head"` normalises each
    head's query and key (Qwen3, GLM-4.5), `"full"` the whole projection before the heads are split (OLMo-2).
    `sinks` gives each head a logit that takes part in the softmax without a value (gpt-oss).

    Activations, each `[batch, sequence, heads, head_dim]`: `query`, `key` and `value` as the softmax uses them,
    after norm and rotation, and `context`, the heads' output before the output projection.
    """

    query_projection: Linear
    key_projection: Linear
    value_projection: Linear
    output_projection: Linear
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    sinks: Float[Array, " heads"] | None
    axes: ClassVar[dict[str, str]] = {"sinks": "heads"}
    query: Activation
    key: Activation
    value: Activation
    context: Activation
    num_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    qk_norm: Literal["head", "full"] | None = eqx.field(static=True)

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: Literal["head", "full"] | None = None,
        norm_eps: float = 1e-6,
        sinks: bool = False,
        std: float = 0.02,
        dtype: Any = jnp.float32,
        key: PRNGKeyArray,
    ):
        """Raises ValueError when `num_kv_heads` doesn't divide `num_heads`, or a size or `qk_norm` is wrong."""
        check_sizes(
            "Attention", hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
        if num_heads % num_kv_heads:
            raise ValueError(f"Attention: num_kv_heads ({num_kv_heads}) must divide num_heads ({num_heads})")
        if qk_norm not in (None, "head", "full"):
            raise ValueError(f"Attention: qk_norm must be None, 'head' or 'full', got {qk_norm!r}")
        query_key, key_key, value_key, output_key = jax.random.split(key, 4)
        query_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        options = {"use_bias": qkv_bias, "std": std, "dtype": dtype}
        heads, kv_heads = f"heads={num_heads}", f"kv_heads={num_kv_heads}"
        self.query_projection = Linear(hidden_size, query_size, axes=f"{heads} embed", key=query_key, **options)
        self.key_projection = Linear(hidden_size, kv_size, axes=f"{kv_heads} embed", key=key_key, **options)
        self.value_projection = Linear(hidden_size, kv_size, axes=f"{kv_heads} embed", key=value_key, **options)
        self.output_projection = Linear(
            query_size, hidden_size, axes=f"embed {heads}", use_bias=output_bias, std=std, dtype=dtype, key=output_key
        )
        # OLMo-2, the family with the norm over the whole projection, multiplies by the scale before it rounds.
        sizes = {"head": (head_dim, head_dim), "full": (query_size, kv_size), None: (None, None)}[qk_norm]
        axes = ("head_dim", "head_dim") if qk_norm == "head" else (heads, kv_heads)
        options = {"eps": norm_eps, "dtype": dtype, "downcast_first": qk_norm == "head"}
        self.query_norm, self.key_norm = (
            None if size is None else RMSNorm(size, axes=axis, **options)
            for size, axis in zip(sizes, axes, strict=True)
        )
        self.sinks = normal(jax.random.fold_in(key, 4), (num_heads,), std, dtype) if sinks else None
        self.query = Activation("query", axes="batch sequence heads head_dim")
        self.key = Activation("key", axes="batch sequence kv_heads head_dim")
        self.value = Activation("value", axes="batch sequence kv_heads head_dim")
        self.context = Activation("context", axes="batch sequence heads head_dim")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.qk_norm = qk_norm

    def _heads(self, x: Array, projection: Linear, norm: RMSNorm | None) -> Array:
        y = projection(x)
        if norm is not None and self.qk_norm == "full":
            y = norm(y)
        y = rearrange(y, "b s (h d) -> b s h d", d=self.head_dim)
        if norm is not None and self.qk_norm == "head":
            y = norm(y)
        return y

    def cache_shapes(self, batch: int, capacity: int) -> dict[str, tuple[int, ...]]:
        """What a `LayerCache` holds for this layer: rotated keys, and values."""
        # Heads first, as the products read them: to turn a whole cache around takes longer than to read it.
        shape = (batch, self.num_kv_heads, capacity, self.head_dim)
        return {"key": shape, "value": shape}

    @jax.named_scope("attention")
    @any_mesh
    def __call__(
        self,
        x: Float[Array, "batch sequence features"],
        *,
        tables: Tables | None,
        rotary: Rotary | None,
        mask: Bool[Array, "#batch sequence keys"],
        window: Int[Array, ""] | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Array, "batch sequence features"] | tuple[Float[Array, "batch sequence features"], LayerCache]:
        """Same shape and dtype as `x`, and the cache where one is given.

        **Arguments:**

        - `tables`, from `rotary.tables`, and `mask` (see `attention_mask`) are shared by all layers; without
            `rotary` nothing is rotated.
        - `window`: narrows the mask to a sliding window, for stacks whose layers differ in it.
        - `cache`: keys and values of earlier tokens, to which those of `x` are added. The mask is over the
            tokens of `x` when the cache is fresh and over its slots (see `cache_mask`) when it isn't.

        Raises ValueError unless `x` is floating `[batch, sequence, hidden_size]`.
        """
        check_input("Attention", x, self.query_projection.weight.shape[1], rank=3)
        query = self._heads(x, self.query_projection, self.query_norm)
        key = self._heads(x, self.key_projection, self.key_norm)
        if rotary is not None:
            query, key = rotary.apply(query, tables), rotary.apply(key, tables)
        query, key = self.query(query), self.key(key)
        value = self.value(self._heads(x, self.value_projection, None))
        start = 0
        if cache is not None:
            turn = "b s h d -> b h s d"
            cache, kept = cache.update(key=rearrange(key, turn), value=rearrange(value, turn))
            if not cache.fresh:
                key, value = (rearrange(kept[name].astype(x.dtype), "b h s d -> b s h d") for name in ("key", "value"))
                start = cache.start
        if window is not None:
            mask = within(mask, window, start)
        context = self.context(dot_product_attention(query, key, value, mask, self.head_dim**-0.5, self.sinks))
        y = self.output_projection(rearrange(context, "b s h d -> b s (h d)"))
        return y if cache is None else (y, cache)
