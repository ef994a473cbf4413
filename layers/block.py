"""The transformer block that all models are made of."""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..policies.activation import Activation
from ..policies.axes import any_mesh, constrain
from .attention import Attention
from .cache import LayerCache
from .linear import check_input
from .mla import MLA
from .mlp import MLP
from .moe import MoE, MoEStats
from .norm import RMSNorm
from .rotary import Rotary, Tables


class Block(eqx.Module):
    """`x += attention(norm(x))`, then `x += feed_forward(norm(x))`.

    With `norm_placement="after"` the norms stand behind what they belong to (OLMo-2):
    `x += norm(attention(x))`, then `x += norm(feed_forward(x))`.

    The feed-forward layer is in the field `mlp` or `moe`, by its kind; the other one is None.

    Activations, each `[batch, sequence, hidden_size]`: `block_input`, which everything else is recomputed
    from and which is always kept somewhere; `attention_residual`, the sum between the two halves; with norms
    before, their outputs `attention_input` and `feed_forward_input`; with norms after, their inputs
    `attention_output` and `feed_forward_output`. The other two are None.
    """

    attention_norm: RMSNorm
    attention: Attention | MLA
    feed_forward_norm: RMSNorm
    mlp: MLP | None
    moe: MoE | None
    block_input: Activation
    attention_input: Activation | None
    attention_output: Activation | None
    attention_residual: Activation
    feed_forward_input: Activation | None
    feed_forward_output: Activation | None
    norm_placement: Literal["before", "after"] = eqx.field(static=True)

    def __init__(
        self,
        attention: Attention | MLA,
        feed_forward: MLP | MoE,
        hidden_size: int,
        *,
        norm_eps: float,
        norm_placement: Literal["before", "after"] = "before",
        norm_downcast_first: bool = True,
        dtype: Any = jnp.float32,
    ):
        """A block around layers of the same `hidden_size`; `norm_eps` is that of its two norms, and
        `norm_downcast_first` their order of rounding (see `RMSNorm`)."""
        if not isinstance(feed_forward, MLP | MoE):
            raise ValueError(f"a block's feed_forward is an MLP or a MoE, not {type(feed_forward).__name__}")
        if norm_placement not in ("before", "after"):
            raise ValueError(f"a block's norm_placement is 'before' or 'after', not {norm_placement!r}")
        options = {"eps": norm_eps, "dtype": dtype, "downcast_first": norm_downcast_first}
        self.attention_norm = RMSNorm(hidden_size, **options)
        self.attention = attention
        self.feed_forward_norm = RMSNorm(hidden_size, **options)
        self.mlp = feed_forward if isinstance(feed_forward, MLP) else None
        self.moe = feed_forward if isinstance(feed_forward, MoE) else None
        before = norm_placement == "before"
        self.block_input = Activation("block_input", recomputable=False, axes="batch sequence embed")
        self.attention_input = Activation("attention_input", axes="batch sequence embed") if before else None
        self.attention_output = None if before else Activation("attention_output", axes="batch sequence embed")
        self.attention_residual = Activation("attention_residual", axes="batch sequence embed")
        self.feed_forward_input = Activation("feed_forward_input", axes="batch sequence embed") if before else None
        self.feed_forward_output = None if before else Activation("feed_forward_output", axes="batch sequence embed")
        self.norm_placement = norm_placement

    def cache_shapes(self, batch: int, capacity: int) -> dict[str, tuple[int, ...]]:
        """What a `LayerCache` holds for this block's attention."""
        return self.attention.cache_shapes(batch, capacity)

    @jax.named_scope("block")
    @any_mesh
    def __call__(
        self,
        x: Float[Array, "batch sequence features"],
        *,
        tables: Tables | None,
        rotary: Rotary | None,
        mask: Bool[Array, "#batch sequence keys"],
        token_mask: Bool[Array, "batch sequence"] | None = None,
        window: Int[Array, ""] | None = None,
        rotates: Bool[Array, ""] | None = None,
        cache: LayerCache | None = None,
    ) -> (
        tuple[Float[Array, "batch sequence features"], MoEStats | None]
        | tuple[Float[Array, "batch sequence features"], MoEStats | None, LayerCache]
    ):
        """The block's output, same shape and dtype as `x`, the statistics of its experts (None without), and
        the cache where one is given.

        **Arguments:**

        - `tables`, `rotary`, `mask`, `window`, `cache`: as for `Attention`.
        - `token_mask`: True at real tokens. Experts get no others.
        - `rotates`: False leaves queries and keys as they are, for stacks whose layers differ in it.
        """
        check_input("Block", x, self.attention_norm.scale.shape[0], rank=3)
        # Only this value from here on: a use of the raw argument would be kept beside it.
        x = self.block_input(x)
        if rotates is not None:
            tables = (jnp.where(rotates, tables[0], 1), jnp.where(rotates, tables[1], 0))
        options = {"tables": tables, "rotary": rotary, "mask": mask}
        options |= {name: value for name, value in (("window", window), ("cache", cache)) if value is not None}
        before = self.norm_placement == "before"
        attended = self.attention(self.attention_input(self.attention_norm(x)) if before else x, **options)
        if cache is not None:
            attended, cache = attended
        if not before:
            attended = self.attention_norm(self.attention_output(attended))
        x = self.attention_residual(x + attended)
        normed = self.feed_forward_input(self.feed_forward_norm(x)) if before else x
        update, stats = (self.mlp(normed), None) if self.moe is None else self.moe(normed, token_mask=token_mask)
        if not before:
            update = self.feed_forward_norm(self.feed_forward_output(update))
        x = constrain(x + update, "batch sequence embed")
        return (x, stats) if cache is None else (x, stats, cache)
