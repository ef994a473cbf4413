"""Cross-entropy from hidden states, a few tokens at a time, so that the full logits never exist.

Over a mesh each device does that with its own tokens and its own part of the vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Integer

from ..policies.axes import any_mesh, constrain, vary
from .vocabulary import Cuts, cuts_in_use

IGNORED = -100

# Scratch arrays are [chunk, vocab]: at most this many tokens, and at most an eighth of them, unless they are few.
_CHUNK = 1024
_SMALL_CHUNK = 128


@jax.named_scope("cross_entropy")
@any_mesh
def cross_entropy(
    hidden: Float[Array, "batch sequence features"],
    head_weight: Float[Array, "vocab features"],
    targets: Integer[Array, "batch sequence"],
    *,
    mask: Bool[Array, "batch sequence"] | None = None,
    chunk: int | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The summed cross-entropy of `targets` under the logits `hidden @ head_weight.T`, and how many there are.

    Sum and count are float32 scalars: add them over micro-batches and devices, then divide once. Logits are
    accumulated in float32 from the dtype of `hidden`; the softmax is float32. The logits are computed `chunk`
    tokens at a time in the forward pass and again in the backward pass, which keeps `hidden`, `head_weight`,
    `targets` and one number per token. Reverse-mode derivatives only.

    **Arguments:**

    - `hidden`: what the head reads, after the final norm.
    - `head_weight`: `[vocab, features]`; the embedding's weight when it is tied.
    - `targets`: what each position should predict (already shifted), -100 where there is nothing to predict.
        Another id outside the vocabulary makes the loss NaN; `check_tokens(..., ignored=-100)` finds it beforehand.
    - `mask`: False ignores a position whatever its target.
    - `chunk`: tokens per step; by default an eighth of them, between 128 and 1024. Over a mesh it is about the
        tokens of one device.

    Without any valid target the sum, the count and the gradients are zero. With a `Layout` in use tokens and
    vocabulary are cut over its mesh, the sum is over all devices, and what devices send each other is the weight,
    its gradient once, the gradient of `hidden` once, and a few numbers per token. Raises ValueError for shapes that
    don't fit, targets that aren't integers, a chunk below 1, or a vocabulary that can't be cut into equal parts.
    """
    batch, sequence, features = hidden.shape
    if head_weight.ndim != 2 or head_weight.shape[1] != features:
        raise ValueError(
            f"cross_entropy: head_weight must be [vocab, {features}], as hidden has {features} features, "
            f"got {list(head_weight.shape)}"
        )
    if targets.shape != (batch, sequence) or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(
            f"cross_entropy: targets must be integers [{batch}, {sequence}] like hidden, "
            f"got {targets.dtype}{list(targets.shape)}"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"cross_entropy: chunk must be 1 token or more, got {chunk!r}")
    if mask is not None:
        targets = jnp.where(mask, targets, IGNORED)
    count = jnp.sum(targets != IGNORED, dtype=jnp.float32)
    cuts = cuts_in_use("cross_entropy", head_weight, targets.shape)
    if cuts is not None:
        return _summed_over(cuts, chunk, hidden, head_weight, targets), count
    width, hidden, targets = _steps_of(chunk, hidden, targets)
    return _summed(width, *vary(hidden, head_weight, targets)), count


def _steps_of(chunk: int | None, hidden: Array, *per_token: Array) -> tuple:
    """How many positions of each row a step takes, and the arrays, as one long row where rows outnumber the chunk."""
    batch, sequence, features = hidden.shape
    if chunk is None:
        chunk = min(_CHUNK, max(_SMALL_CHUNK, batch * sequence // 8))
    if chunk < batch:
        hidden, per_token = hidden.reshape(1, -1, features), tuple(x.reshape(1, -1) for x in per_token)
    # Chunks run along the sequence: the batch axis stays whole, and so stays sharded over devices.
    return max(1, min(chunk // hidden.shape[0], hidden.shape[1])), hidden, *per_token


def _window(step: Array, width: int, hidden: Array, targets: Array) -> tuple[Array, Array, Array]:
    """The start, hidden states and targets of a step. The last window overlaps the one before when it must."""
    begin = step * width
    start = jnp.minimum(begin, hidden.shape[1] - width)
    states = jax.lax.dynamic_slice_in_dim(hidden, start, width, axis=1)
    labels = jax.lax.dynamic_slice_in_dim(targets, start, width, axis=1)
    labels = jnp.where(start + jnp.arange(width) >= begin, labels, IGNORED)  # no token counts twice
    return start, states, labels


def _logits(states: Array, weight: Array) -> Array:
    return jnp.einsum("bsd,vd->bsv", states, weight.astype(states.dtype), preferred_element_type=jnp.float32)


def _is_target(labels: Array, vocab: int, first: Array | int = 0) -> Array:
    # A comparison instead of a gather: nothing is read out of range.
    ids = jax.lax.broadcasted_iota(labels.dtype, (1, 1, vocab), 2)
    return labels[..., None] == (ids if isinstance(first, int) else ids + first.astype(labels.dtype))


def _steps(width: int, hidden: Array) -> Array:
    return jnp.arange(-(-hidden.shape[1] // width))


def _forward(width: int, hidden: Array, weight: Array, targets: Array) -> tuple[Array, Array]:
    vocab = weight.shape[0]

    def step(carry: tuple[Array, Array], index: Array) -> tuple[tuple[Array, Array], None]:
        total, normalisers = carry
        start, states, labels = _window(index, width, hidden, targets)
        logits = _logits(states, weight)
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.sum(jnp.where(_is_target(labels, vocab), logits, 0), axis=-1)
        chosen = jnp.where((labels >= 0) & (labels < vocab), chosen, jnp.nan)
        total += jnp.sum(jnp.where(labels == IGNORED, 0, normaliser - chosen))
        return (total, jax.lax.dynamic_update_slice_in_dim(normalisers, normaliser, start, axis=1)), None

    initial = vary(jnp.zeros((), jnp.float32), jnp.zeros(targets.shape, jnp.float32), hidden)[:2]
    (total, normalisers), _ = jax.lax.scan(step, initial, _steps(width, hidden))
    return total, normalisers


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(width: int, hidden: Array, weight: Array, targets: Array) -> Array:
    return _forward(width, hidden, weight, targets)[0]


def _summed_forward(width: int, hidden: Array, weight: Array, targets: Array) -> tuple[Array, tuple]:
    total, normalisers = _forward(width, hidden, weight, targets)
    return total, (hidden, weight, targets, normalisers)


@jax.named_scope("cross_entropy_backward")
def _summed_backward(width: int, kept: tuple, cotangent: Array) -> tuple[Array, Array, None]:
    hidden_gradient, weight_gradient = _gradients(width, *kept, cotangent)
    return hidden_gradient, weight_gradient.astype(kept[1].dtype), None


_summed.defvjp(_summed_forward, _summed_backward)


def _gradients(
    width: int,
    hidden: Array,
    weight: Array,
    targets: Array,
    normalisers: Array,
    cotangent: Array,
    first: Array | int = 0,
) -> tuple[Array, Array]:
    """The gradients of `hidden`, in its dtype, and of `weight`, in float32; `first` is the id of the weight's row 0."""
    vocab = weight.shape[0]

    def step(carry: tuple[Array, Array], index: Array) -> tuple[tuple[Array, Array], None]:
        hidden_gradient, weight_gradient = carry
        start, states, labels = _window(index, width, hidden, targets)
        normaliser = jax.lax.dynamic_slice_in_dim(normalisers, start, width, axis=1)
        probabilities = jnp.exp(_logits(states, weight) - normaliser[..., None])
        valid = jnp.where(labels == IGNORED, 0, cotangent)[..., None]
        gradient = (probabilities - _is_target(labels, vocab, first)) * valid
        gradient = jnp.where(valid == 0, 0, gradient).astype(states.dtype)
        # Ignored positions may hold anything, and zero times infinity is not zero.
        states = jnp.where(valid == 0, 0, states)
        states_gradient = jnp.einsum("bsv,vd->bsd", gradient, weight.astype(states.dtype))
        before = jax.lax.dynamic_slice_in_dim(hidden_gradient, start, width, axis=1)
        hidden_gradient = jax.lax.dynamic_update_slice_in_dim(
            hidden_gradient, before + states_gradient, start, axis=1
        )
        # Summed over chunks in float32: a bfloat16 sum would stop growing.
        weight_gradient += jnp.einsum("bsv,bsd->vd", gradient, states, preferred_element_type=jnp.float32)
        return (hidden_gradient, weight_gradient), None

    initial = vary(jnp.zeros_like(hidden), jnp.zeros(weight.shape, jnp.float32), hidden, cotangent)[:2]
    return jax.lax.scan(step, initial, _steps(width, hidden))[0]


def _forward_over(
    cuts: Cuts, chunk: int | None, hidden: Array, weight: Array, targets: Array
) -> tuple[Array, Array]:
    vocab = weight.shape[0]

    def local(hidden: Array, weight: Array, targets: Array) -> tuple[Array, Array]:
        shape, first = targets.shape, cuts.first(weight)
        width, hidden, targets = _steps_of(chunk, hidden, targets)

        def step(carry: tuple[Array, Array], index: Array) -> tuple[tuple[Array, Array], None]:
            start, states, labels = _window(index, width, hidden, targets)
            logits = _logits(states, weight)
            own = jax.nn.logsumexp(logits, axis=-1)
            chosen = jnp.sum(jnp.where(_is_target(labels, weight.shape[0], first), logits, 0), axis=-1)
            # Of the positions that the last window has a second time, the labels are gone.
            before = jax.lax.dynamic_slice_in_dim(carry[1], start, width, axis=1)
            chosen = jnp.where(labels == IGNORED, before, chosen)
            put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
            return (put(carry[0], own), put(carry[1], chosen)), None

        initial = (jnp.zeros(targets.shape, jnp.float32),) * 2
        (normalisers, chosen), _ = jax.lax.scan(step, initial, _steps(width, hidden))
        if cuts.vocab:
            highest = jax.lax.pmax(normalisers, cuts.vocab)
            total, chosen = cuts.sum_vocab((jnp.exp(normalisers - highest), chosen))
            normalisers = highest + jnp.log(total)
        chosen = jnp.where((targets >= 0) & (targets < vocab), chosen, jnp.nan)
        total = jnp.sum(jnp.where(targets == IGNORED, 0, normalisers - chosen))
        return cuts.sum_tokens(total), normalisers.reshape(shape)

    takes, gives = (cuts.tokens, cuts.weight, cuts.tokens), (PartitionSpec(), cuts.tokens)
    return cuts.run(local, hidden, _narrow(weight, hidden.dtype), targets, takes=takes, gives=gives)


def _narrow(weight: Array, dtype: Any) -> Array:
    """The weight, cast before it is gathered: pinned where it is stored, or the partitioner would gather first."""
    return constrain(weight.astype(dtype), "vocab embed")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed_over(cuts: Cuts, chunk: int | None, hidden: Array, weight: Array, targets: Array) -> Array:
    return _forward_over(cuts, chunk, hidden, weight, targets)[0]


def _summed_over_forward(
    cuts: Cuts, chunk: int | None, hidden: Array, weight: Array, targets: Array
) -> tuple[Array, tuple]:
    total, normalisers = _forward_over(cuts, chunk, hidden, weight, targets)
    return total, (hidden, weight, targets, normalisers)


@jax.named_scope("cross_entropy_backward")
def _summed_over_backward(
    cuts: Cuts, chunk: int | None, kept: tuple, cotangent: Array
) -> tuple[Array, Array, None]:
    hidden, weight, targets, normalisers = kept

    def local(hidden: Array, weight: Array, targets: Array, normalisers: Array, cotangent: Array) -> tuple:
        shape = hidden.shape
        width, *arrays = _steps_of(chunk, hidden, targets, normalisers)
        hidden, targets, normalisers = arrays
        ours, theirs = _gradients(width, hidden, weight, targets, normalisers, cotangent, cuts.first(weight))
        return cuts.sum_vocab(ours).reshape(shape), cuts.sum_gradient(theirs).astype(kept[1].dtype)

    takes = (cuts.tokens, cuts.weight, cuts.tokens, cuts.tokens, PartitionSpec())
    arrays = hidden, _narrow(weight, hidden.dtype), targets, normalisers, cotangent
    hidden_gradient, weight_gradient = cuts.run(local, *arrays, takes=takes, gives=(cuts.tokens, cuts.gradient))
    return hidden_gradient, constrain(weight_gradient, "vocab embed"), None


_summed_over.defvjp(_summed_over_forward, _summed_over_backward)
