"""Token embedding, and its use as the tied output head."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num, PRNGKeyArray

from ..policies.axes import any_mesh, constrain, gather
from .linear import check_input, check_sizes, normal


def check_tokens(tokens: Any, vocab_size: int, *, ignored: int | None = None) -> None:
    """Checks token ids on the host, before they reach a device that would read another row without a word.

    `tokens` is a concrete array or nested list of integers; `ignored` is one more id that may occur, such as the
    label -100. Raises ValueError naming the first id outside `0 .. vocab_size - 1` and where it stands.
    """
    array = np.asarray(tokens)
    if array.size == 0:
        return
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"token ids must be integers, got {array.dtype}")
    wrong = (array < 0) | (array >= vocab_size)
    if ignored is not None:
        wrong &= array != ignored
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"token id {int(array[place])} at {list(place)} is outside the vocabulary: "
            f"ids run from 0 to {vocab_size - 1}"
        )


class Embedding(eqx.Module):
    """One row of `weight` for each token id. Nothing is scaled."""

    weight: Float[Array, "vocab_size features"]

    axes: ClassVar[dict[str, str]] = {"weight": "vocab embed"}

    def __init__(
        self, vocab_size: int, features: int, *, std: float = 0.02, dtype: Any = jnp.float32, key: PRNGKeyArray
    ):
        """Weights N(0, std^2) drawn in float32 and stored as `dtype`. Raises ValueError for a size below 1."""
        check_sizes("Embedding", vocab_size=vocab_size, features=features)
        self.weight = normal(key, (vocab_size, features), std, dtype)

    @jax.named_scope("embedding")
    @any_mesh
    def __call__(self, tokens: Num[Array, "batch sequence"]) -> Float[Array, "batch sequence features"]:
        """The rows of `tokens`, `[batch, sequence, features]` in the weight's dtype.

        An id outside the vocabulary gives a row of NaN, so that it can't pass for another token; `check_tokens`
        finds it beforehand. Raises ValueError unless `tokens` are integers `[batch, sequence]`.
        """
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            shape = ", ".join(str(n) for n in tokens.shape)
            raise ValueError(f"Embedding: expected integer token ids [batch, sequence], got {tokens.dtype}[{shape}]")
        weight = gather(self.weight, self.axes["weight"])
        rows = weight.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return constrain(rows, "batch sequence embed")

    @jax.named_scope("tied_head")
    @any_mesh
    def attend(self, x: Float[Array, "*axes features"]) -> Float[Array, "*axes vocab_size"]:
        """Logits `x @ weight.T` in the dtype of `x`: the output head of a model with tied embeddings."""
        check_input("Embedding.attend", x, self.weight.shape[1])
        weight = gather(self.weight.astype(x.dtype), self.axes["weight"])
        return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
