"""Root-mean-square normalisation (Zhang and Sennrich, 2019), in both orders that released models use."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..policies.axes import any_mesh, gather
from .linear import check_input, check_sizes


class RMSNorm(eqx.Module):
    """`scale * x / sqrt(mean(x^2) + eps)` over the last axis, statistics in float32.

    Families differ in where the result is rounded to the dtype of `x`. Llama, Mistral, Qwen and DeepSeek round
    before they multiply by the scale (`downcast_first=True`); OLMo-2 and gpt-oss multiply first. In bfloat16 the
    two differ in the last bit. The result has the dtype of `x` whatever the dtype of the scale, so a float32
    scale can't turn the rest of a bfloat16 model into float32.
    """

    scale: Float[Array, " features"]
    eps: float = eqx.field(static=True)
    downcast_first: bool = eqx.field(static=True)
    scale_axes: str | None = eqx.field(static=True)

    def __init__(
        self,
        size: int,
        *,
        eps: float | int,
        dtype: Any = jnp.float32,
        downcast_first: bool = True,
        axes: str | None = "embed",
    ):
        """Scale of `size` ones, stored as `dtype`; `axes` is its logical axis.

        Raises ValueError unless `size` >= 1 and `eps` >= 0.
        """
        check_sizes("RMSNorm", size=size)
        if not eps >= 0:
            raise ValueError(f"RMSNorm: eps must be zero or positive, got {eps!r}")
        self.scale = jnp.ones((size,), dtype)
        self.eps = float(eps)
        self.downcast_first = downcast_first
        self.scale_axes = axes

    @property
    def axes(self) -> dict[str, str]:
        """The logical axes of the arrays."""
        return {} if self.scale_axes is None else {"scale": self.scale_axes}

    @jax.named_scope("rms_norm")
    @any_mesh
    def __call__(self, x: Float[Array, "*axes features"]) -> Float[Array, "*axes features"]:
        """`x` is `[..., size]`; the result has its shape and dtype. Raises ValueError for another last axis."""
        check_input("RMSNorm", x, self.scale.shape[0])
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        if self.downcast_first and x.dtype != jnp.float32:
            # A cast down and up again is something that XLA may drop inside a fusion; this rounding it may not.
            kind = jnp.finfo(x.dtype)
            normed = jax.lax.reduce_precision(normed, kind.nexp, kind.nmant)
        scale = gather(self.scale.astype(jnp.float32), self.axes.get("scale"))
        return (scale * normed).astype(x.dtype)
