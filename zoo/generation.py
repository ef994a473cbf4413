"""Sampling text from a model."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


def _choose(
    logits: Float[Array, "batch vocab"], temperature: Array, top_k: int | None, key: PRNGKeyArray
) -> Int[Array, " batch"]:
    best = jnp.argmax(logits, axis=-1)
    if top_k is not None:
        lowest = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < lowest, -jnp.inf, logits)
    sampled = jax.random.categorical(key, logits / jnp.where(temperature > 0, temperature, 1.0))
    return jnp.where(temperature > 0, sampled, best).astype(jnp.int32)


@eqx.filter_jit
def _generate(
    model: Any,
    buffer: Int[Array, "batch length"],
    start: Array,
    temperature: Array,
    key: PRNGKeyArray,
    top_k: int | None,
    allowed: int,
) -> Int[Array, "batch length"]:
    batch, length = buffer.shape
    head = model.head_weight

    def step(index: Array, buffer: Array) -> Array:
        # What lies beyond `index` is not there yet: neither attention nor routing may see it.
        mask = jnp.broadcast_to(jnp.arange(length) < index, (batch, length))
        states, _ = model.hidden(buffer, mask=mask)
        last = jax.lax.dynamic_index_in_dim(states, index - 1, axis=1, keepdims=False)
        logits = jnp.einsum("bd,vd->bv", last.astype(jnp.float32), head.astype(jnp.float32))
        logits = jnp.where(jnp.arange(logits.shape[-1]) < allowed, logits, -jnp.inf)
        token = _choose(logits, temperature, top_k, jax.random.fold_in(key, index))
        return jax.lax.dynamic_update_slice_in_dim(buffer, token[:, None], index, axis=1)

    return jax.lax.fori_loop(start, length, step, buffer)


def generate(
    model: Any,
    tokens: Int[Array, "batch prompt"],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    allowed: int | None = None,
    key: PRNGKeyArray | None = None,
) -> Int[Array, "batch new"]:
    """`max_new_tokens` tokens that follow `tokens`, one at a time.

    Each token is computed from the whole sequence so far, without a cache of keys and values: exact, meant
    for samples of a few hundred tokens. Compiled once for each total length.

    **Arguments:**

    - `model`: a causal language model of the zoo; after training, `step.trained(state)`.
    - `tokens`: prompts of one length, `[batch, prompt]`.
    - `temperature`: 0 takes the most probable token, ties to the lowest id; above, samples.
    - `top_k`: samples from the `top_k` most probable tokens only.
    - `allowed`: only ids below this are generated: a vocabulary is often padded beyond the tokenizer's.
    - `key`: needed when `temperature` is above 0.

    Raises ValueError for an empty prompt, ids outside the vocabulary, or arguments out of range.
    """
    vocab = model.head_weight.shape[0]
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or 0 in tokens.shape or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"generate: the prompt must be integers [batch, length >= 1], got {tokens.dtype}{list(tokens.shape)}"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab:
        raise ValueError(f"generate: token ids must be in 0..{vocab - 1}, the prompt has {low}..{high}")
    if max_new_tokens < 1:
        raise ValueError(f"generate: max_new_tokens must be 1 or more, got {max_new_tokens}")
    if not temperature >= 0:
        raise ValueError(f"generate: temperature must be 0 or more, got {temperature}")
    if top_k is not None and not 1 <= top_k <= vocab:
        raise ValueError(f"generate: top_k must be in 1..{vocab}, got {top_k}")
    if allowed is not None and not 1 <= allowed <= vocab:
        raise ValueError(f"generate: allowed must be in 1..{vocab}, got {allowed}")
    if key is None:
        if temperature > 0:
            raise ValueError("generate: sampling at a temperature above 0 needs a key")
        key = jax.random.key(0)
    start = tokens.shape[1]
    buffer = jnp.pad(tokens.astype(jnp.int32), ((0, 0), (0, max_new_tokens)))
    out = _generate(
        model, buffer, jnp.int32(start), jnp.float32(temperature), key, top_k, vocab if allowed is None else allowed
    )
    return out[:, start:]
