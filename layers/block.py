"""The pre-norm transformer block that Llama and DeepSeek are made of."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..policies.activation import Activation
from .attention import Attention
from .linear import check_input
from .mla import MLA
from .mlp import MLP
from .moe import MoE, MoEStats
from .norm import RMSNorm
from .rotary import Rotary, Tables


class Block(eqx.Module):
    """`x += attention(norm(x))`, then `x += feed_forward(norm(x))`.

    The feed-forward layer is in the field `mlp` or `moe`, by its kind; the other one is None.

    Activations, each `[batch, sequence, hidden_size]`: `block_input`, which everything else is recomputed
    from and which is always kept somewhere; `attention_input` and `feed_forward_input`, the outputs of the
    norms; `attention_residual`, the sum between the two halves.
    """

    attention_norm: RMSNorm
    attention: Attention | MLA
    feed_forward_norm: RMSNorm
    mlp: MLP | None
    moe: MoE | None
    block_input: Activation
    attention_input: Activation
    attention_residual: Activation
    feed_forward_input: Activation

    def __init__(
        self,
        attention: Attention | MLA,
        feed_forward: MLP | MoE,
        hidden_size: int,
        *,
        norm_eps: float,
        dtype: Any = jnp.float32,
    ):
        """A block around layers of the same `hidden_size`; `norm_eps` is that of its two norms."""
        if not isinstance(feed_forward, MLP | MoE):
            raise ValueError(f"a block's feed_forward is an MLP or a MoE, not {type(feed_forward).__name__}")
        self.attention_norm = RMSNorm(hidden_size, eps=norm_eps, dtype=dtype)
        self.attention = attention
        self.feed_forward_norm = RMSNorm(hidden_size, eps=norm_eps, dtype=dtype)
        self.mlp = feed_forward if isinstance(feed_forward, MLP) else None
        self.moe = feed_forward if isinstance(feed_forward, MoE) else None
        self.block_input = Activation("block_input", recomputable=False)
        self.attention_input = Activation("attention_input")
        self.attention_residual = Activation("attention_residual")
        self.feed_forward_input = Activation("feed_forward_input")

    @jax.named_scope("block")
    def __call__(
        self,
        x: Float[Array, "batch sequence features"],
        *,
        tables: Tables | None,
        rotary: Rotary | None,
        mask: Bool[Array, "#batch sequence sequence"],
        token_mask: Bool[Array, "batch sequence"] | None = None,
    ) -> tuple[Float[Array, "batch sequence features"], MoEStats | None]:
        """The block's output, same shape and dtype as `x`, and the statistics of its experts (None without).

        **Arguments:**

        - `tables`, `rotary`, `mask`: as for `Attention`; shared by all blocks.
        - `token_mask`: True at real tokens. Experts get no others.
        """
        check_input("Block", x, self.attention_norm.scale.shape[0], rank=3)
        # Only this value from here on: a use of the raw argument would be kept beside it.
        x = self.block_input(x)
        attended = self.attention(self.attention_input(self.attention_norm(x)), tables=tables, rotary=rotary, mask=mask)
        x = self.attention_residual(x + attended)
        normed = self.feed_forward_input(self.feed_forward_norm(x))
        if self.mlp is not None:
            return x + self.mlp(normed), None
        update, stats = self.moe(normed, token_mask=token_mask)
        return x + update, stats
