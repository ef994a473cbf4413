"""Token embedding, and its use as the tied output head."""

import functools
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num, PRNGKeyArray

from ..policies.axes import any_mesh, constrain, gather
from .linear import check_input, check_sizes, normal
from .vocabulary import Cuts, cuts_in_use


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
        cuts = cuts_in_use("Embedding", self.weight, tokens.shape)
        if cuts is None:
            rows = self.weight.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        else:
            # Pinned as it is stored: a weight that was cast is gathered after the cast then, and not before.
            rows = _rows_over(cuts, constrain(self.weight, self.axes["weight"]), tokens)
        return constrain(rows, "batch sequence embed")

    @jax.named_scope("tied_head")
    @any_mesh
    def attend(self, x: Float[Array, "*axes features"]) -> Float[Array, "*axes vocab_size"]:
        """Logits `x @ weight.T` in the dtype of `x`: the output head of a model with tied embeddings."""
        check_input("Embedding.attend", x, self.weight.shape[1])
        weight = gather(self.weight.astype(x.dtype), self.axes["weight"])
        return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))


# Over a mesh, each device looks up tokens among the part of the weight that it stores. Where that is a part of the
# features, it does so for all devices that have the other parts, and sends each its tokens' share: what travels is as
# large as the tokens' features, and the table is whole nowhere, nor is its gradient. Left to the compiler, the
# derivative would gather the features of all devices' tokens.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows_over(cuts: Cuts, weight: Array, tokens: Array) -> Array:
    vocab = weight.shape[0]

    def local(weight: Array, tokens: Array) -> Array:
        asked = _all_tokens(cuts, tokens) - cuts.first(weight)
        rows = weight.at[asked].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        if cuts.scatter:
            rows = jax.lax.all_to_all(rows, cuts.scatter, 0, rows.ndim - 1, tiled=True)
        rows = rows.reshape(*tokens.shape, -1)
        return jnp.where(((tokens >= 0) & (tokens < vocab))[..., None], cuts.sum_vocab(rows), jnp.nan)

    return cuts.run(local, weight, tokens, takes=(cuts.gradient, cuts.tokens), gives=cuts.tokens)


def _all_tokens(cuts: Cuts, tokens: Array) -> Array:
    """Tokens [devices, batch, sequence] of those that have other features of the same part of the vocabulary."""
    return jax.lax.all_gather(tokens, cuts.scatter) if cuts.scatter else tokens[None]


def _rows_over_forward(cuts: Cuts, weight: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return _rows_over(cuts, weight, tokens), (weight, tokens)


def _rows_over_backward(cuts: Cuts, kept: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    weight, tokens = kept
    shape = weight.shape[0] // cuts.layout.size(cuts.vocab), weight.shape[1] // cuts.layout.size(cuts.scatter)
    rest = tuple(axis for axis in cuts.batch + cuts.sequence if axis not in cuts.scatter)

    def local(tokens: Array, gradient: Array) -> Array:
        # Summed in float32: a frequent token's gradient would stop growing in bfloat16.
        zeros, gradient = jnp.zeros(shape, jnp.float32), gradient[None]
        if cuts.scatter:
            gradient = jax.lax.all_to_all(gradient, cuts.scatter, gradient.ndim - 1, 0, tiled=True)
        rows = _all_tokens(cuts, tokens) - cuts.first(zeros)
        added = zeros.at[rows].add(gradient.astype(jnp.float32), mode="drop", wrap_negative_indices=False)
        return (jax.lax.psum(added, rest) if rest else added).astype(weight.dtype)

    summed = cuts.run(local, tokens, gradient, takes=(cuts.tokens, cuts.tokens), gives=cuts.gradient)
    return constrain(summed, "vocab embed"), None


_rows_over.defvjp(_rows_over_forward, _rows_over_backward)
