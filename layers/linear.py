"""Linear maps, and arrays that a model carries without training them."""

import functools
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ..policies.axes import any_mesh, gather


class Untrained(eqx.Module):
    """A module whose arrays belong to the model's state and are not trained.

    No gradient, optimizer or decay sees them.

    Every array leaf of a model is a parameter unless it sits in such a module.
    """


class Buffer(Untrained):
    """One array that is not trained, such as a router's selection bias."""

    value: Array

    axes: ClassVar[dict[str, str]] = {"value": "_"}


def is_buffer(node: Any) -> bool:
    """Whether `node` is `Untrained`: the `is_leaf` that keeps untrained arrays apart from parameters."""
    return isinstance(node, Untrained)


def normal(key: PRNGKeyArray, shape: tuple[int, ...], std: float, dtype: Any) -> Array:
    """Initial weights N(0, std^2), drawn in float32 and then cast: draws in bfloat16 are too coarse to train from.

    The same numbers wherever it is called, on its own or within a larger program, and over any mesh.
    """
    return _scaled(jax.random.normal(key, shape, jnp.float32), std, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _scaled(draws: Array, std: float, dtype: Any) -> Array:
    # Where XLA sees the constant that draws are multiplied with, it multiplies by the product of both, which rounds
    # differently.
    return (std * jax.lax.optimization_barrier(draws)).astype(dtype)


def check_sizes(owner: str, **sizes: int) -> None:
    """Raises ValueError, naming `owner` and the size, unless every one of `sizes` is a positive integer."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{owner}: {name} must be a positive integer, got {size!r}")


def check_input(owner: str, x: Array, features: int, rank: int | None = None) -> None:
    """Raises a one-line ValueError unless `x` is a floating array with `features` on its last axis.

    `rank` asks for that many axes. Nothing here looks at values, so it costs nothing in a compiled program.
    """
    axes = "[..., {}]" if rank is None else "[batch, sequence, {}]" if rank == 3 else f"{rank} axes, the last of {{}}"
    expected = f"{owner}: expected floating numbers, {axes.format(features)}"
    got = f"{x.dtype}[{', '.join(str(n) for n in x.shape)}]"
    wrong_rank = x.ndim == 0 or (rank is not None and x.ndim != rank)
    if wrong_rank or x.shape[-1] != features or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{expected}, got {got}")


class Linear(eqx.Module):
    """`x @ weight.T + bias`, in the dtype of `x`.

    `weight` is `[out_features, in_features]`, as Hugging Face files store it. Contracting both operands' last
    axes leaves the weight gradient as one product over tokens that is already laid out like the weight.
    """

    weight: Float[Array, "out_features in_features"]
    bias: Float[Array, " out_features"] | None
    weight_axes: str | None = eqx.field(static=True)  # logical axes, as `policies.axes.parse` reads them

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        axes: str | None = None,
        std: float = 0.02,
        dtype: Any = jnp.float32,
        key: PRNGKeyArray,
    ):
        """Weights N(0, std^2) drawn in float32, bias zero; both stored as `dtype`.

        `axes` are the logical axes of the weight, such as `"mlp embed"`, by which it is cut over a mesh.

        Raises ValueError when a size is not a positive integer.
        """
        check_sizes("Linear", in_features=in_features, out_features=out_features)
        self.weight = normal(key, (out_features, in_features), std, dtype)
        self.bias = jnp.zeros((out_features,), dtype) if use_bias else None
        self.weight_axes = axes

    @property
    def axes(self) -> dict[str, str]:
        """The logical axes of the arrays."""
        return {} if self.weight_axes is None else {"weight": self.weight_axes, "bias": self.weight_axes.split()[0]}

    @jax.named_scope("linear")
    @any_mesh
    def __call__(self, x: Float[Array, "*axes in_features"]) -> Float[Array, "*axes out_features"]:
        """`x` is `[..., in_features]`; the result is `[..., out_features]` in the dtype of `x`.

        Raises ValueError for another last axis, or for a dtype that isn't floating.
        """
        check_input("Linear", x, self.weight.shape[1])
        # Cast first: what is gathered from other devices is then as narrow as what is multiplied.
        weight = gather(self.weight.astype(x.dtype), self.axes.get("weight"))
        y = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
        return y if self.bias is None else y + gather(self.bias.astype(x.dtype), self.axes.get("bias"))
