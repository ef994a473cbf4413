"""The gated feed-forward layer, SwiGLU (Shazeer, 2020)."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ..policies.activation import Activation
from ..policies.axes import any_mesh
from .linear import Linear, check_input, check_sizes


class MLP(eqx.Module):
    """`down(silu(gate(x)) * up(x))`.

    Activations: `gate` and `up`, the projections before the nonlinearity, and `hidden`, what the down projection
    reads; each `[batch, sequence, intermediate_size]`.
    """

    gate_projection: Linear
    up_projection: Linear
    down_projection: Linear
    gate: Activation
    up: Activation
    hidden: Activation

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        std: float = 0.02,
        dtype: Any = jnp.float32,
        key: PRNGKeyArray,
    ):
        """Raises ValueError when a size is not a positive integer. `bias` is for all three projections."""
        check_sizes("MLP", hidden_size=hidden_size, intermediate_size=intermediate_size)
        gate_key, up_key, down_key = jax.random.split(key, 3)
        options = {"use_bias": bias, "std": std, "dtype": dtype}
        self.gate_projection = Linear(hidden_size, intermediate_size, axes="mlp embed", key=gate_key, **options)
        self.up_projection = Linear(hidden_size, intermediate_size, axes="mlp embed", key=up_key, **options)
        self.down_projection = Linear(intermediate_size, hidden_size, axes="embed mlp", key=down_key, **options)
        self.gate = Activation("gate", axes="batch sequence mlp")
        self.up = Activation("up", axes="batch sequence mlp")
        self.hidden = Activation("hidden", axes="batch sequence mlp")

    @jax.named_scope("mlp")
    @any_mesh
    def __call__(self, x: Float[Array, "batch sequence features"]) -> Float[Array, "batch sequence features"]:
        """Same shape and dtype as `x`. Raises ValueError unless `x` is floating `[batch, sequence, hidden_size]`."""
        check_input("MLP", x, self.gate_projection.weight.shape[1], rank=3)
        gate = self.gate(self.gate_projection(x))
        up = self.up(self.up_projection(x))
        return self.down_projection(self.hidden(jax.nn.silu(gate) * up))
