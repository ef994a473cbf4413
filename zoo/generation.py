"""Text from a model: the prompt is read once, then one token after the other with a cache of keys and values."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..layers.cache import Cache
from .mesh_arrays import without_explicit
from .prompts import Controls, Request, request
from .sampling import choose

# What stands in place of a token where logits were no numbers.
_FAILED = -1
# On CPU, XLA slices layers from bfloat16 weights by way of float32 and moves that out of the loop over layers: each
# token would begin with a float32 copy of all weights.
_OPTIONS = {"cpu": {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}}


class _Rows(NamedTuple):
    """Where each row is."""

    token: Int[Array, " batch"]  # the last one chosen
    done: Bool[Array, " batch"]
    index: Int[Array, ""]  # of that token among the new ones


def _prefill(
    model: Any,
    tokens: Int[Array, "batch prompt"],
    mask: Bool[Array, "batch prompt"],
    controls: Controls,
    capacity: int,
) -> tuple[Cache, _Rows]:
    """Reads the prompt and chooses the first token."""
    batch = tokens.shape[0]
    states, _, cache = model.hidden(tokens, mask=mask, cache=model.init_cache(batch, capacity))
    before = _Rows(jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool), jnp.int32(-1))
    return cache, _next(model, states[:, -1], before, controls)


def _decode(model: Any, cache: Cache, rows: _Rows, controls: Controls) -> tuple[Cache, _Rows]:
    # Rows that are done go on for the others' sake; as padding, they cost no expert and take no position.
    tokens = jnp.where(rows.done, 0, rows.token)[:, None]
    states, _, cache = model.hidden(tokens, mask=~rows.done[:, None], cache=cache)
    return cache, _next(model, states[:, -1], rows, controls)


@jax.named_scope("next_token")
def _next(model: Any, states: Float[Array, "batch features"], rows: _Rows, controls: Controls) -> _Rows:
    head, batch = model.head_weight, len(states)
    if batch == 1 and states.dtype.itemsize < 4:
        # For one row of bfloat16, XLA makes a float32 copy of the head on CPU; for two it doesn't.
        states = jnp.concatenate([states, states])
    # Products of 16-bit numbers, but their sums in float32: rounded logits would often tie.
    logits = lax.dot_general(
        states, head.astype(states.dtype), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )[:batch]
    possible = jnp.arange(head.shape[0]) < controls.allowed
    sound = jnp.all(jnp.isfinite(logits) | ~possible, axis=-1)
    index = rows.index + 1
    keys = jax.vmap(lambda key: jax.random.fold_in(key, index))(controls.keys)
    token = choose(jnp.where(possible, logits, -jnp.inf), controls.sampler, keys)
    pad = jnp.where(controls.pad_id < 0, rows.token, controls.pad_id)
    token = jnp.where(rows.done, pad, jnp.where(sound, token, _FAILED))
    done = rows.done | jnp.any(token[:, None] == controls.stop_ids, axis=-1)
    return _Rows(token, done, index)


def _rest(
    model: Any, cache: Cache, rows: _Rows, controls: Controls, limit: Int[Array, ""]
) -> tuple[Int[Array, "batch capacity"], Cache]:
    """The tokens of all rows until there are `limit` or all are done, and padding after them."""

    def unfinished(carry: tuple[Cache, _Rows, Array]) -> Array:
        rows = carry[1]
        return (rows.index + 1 < limit) & ~jnp.all(rows.done) & ~jnp.any(rows.token == _FAILED)

    def advance(carry: tuple[Cache, _Rows, Array]) -> tuple[Cache, _Rows, Array]:
        cache, rows, out = carry
        cache, rows = _decode(model, cache, rows, controls)
        return cache, rows, lax.dynamic_update_slice(out, rows.token[:, None], (0, rows.index))

    out = jnp.zeros((rows.token.shape[0], cache.capacity), jnp.int32).at[:, 0].set(rows.token)
    cache, rows, out = lax.while_loop(unfinished, advance, (cache, rows, out))
    pad = jnp.where(controls.pad_id < 0, rows.token, controls.pad_id)
    out = jnp.where(jnp.arange(out.shape[1]) > rows.index, pad[:, None], out)
    # The cache is given back only because what is donated has to become something.
    return out, cache


class _Programs(NamedTuple):
    prefill: Any
    step: Any
    rest: Any


@functools.cache
def _compiled(platform: str) -> _Programs:
    options = _OPTIONS.get(platform)
    return _Programs(
        jax.jit(_prefill, static_argnames="capacity", compiler_options=options),
        jax.jit(_decode, donate_argnames="cache", compiler_options=options),
        jax.jit(_rest, donate_argnames="cache", compiler_options=options),
    )


def _programs(model: Any) -> tuple[Any, _Programs]:
    """The model as its programs take it, and these."""
    weight = model.head_weight
    platform = next(iter(weight.devices())).platform if isinstance(weight, jax.Array) else jax.default_backend()
    programs = _compiled(platform)
    # Over a mesh it is XLA that decides where the cache lies, and what goes from device to device.
    model, mesh = without_explicit(model)
    if mesh is None:
        return model, programs

    def over(program: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            # What was made where a mesh with Explicit axes is set lies over that.
            args, _ = without_explicit(args)
            with jax.set_mesh(mesh):
                return program(*args, **kwargs)

        return call

    return model, _Programs(*map(over, programs))


def generate(
    model: Any,
    tokens: Any,
    *,
    mask: Any = None,
    max_new_tokens: int,
    temperature: float | int = 0.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    min_p: float | int | None = None,
    stop_ids: Any = (),
    pad_id: int | None = None,
    allowed: int | None = None,
    key: Any = None,
) -> Int[Array, "batch new"]:
    """`max_new_tokens` tokens that follow each row of `tokens`, int32.

    The prompt is read in one pass, which fills a cache; each further token is one pass over one token. Greedy
    tokens are those that the model gives when it reads everything anew for each of them. A row's tokens don't
    depend on the other rows nor on padding.

    One program reads prompts and one writes the rest. Both are compiled once for each size of batch and cache;
    sizes are rounded up to a few, and no argument but these asks for another program. In models whose rotary
    embedding depends on the length (`DynamicScaling`, `LongRopeScaling`) a key stays rotated as it was when its
    token came, as in transformers.

    **Arguments:**

    - `model`: a causal language model of the zoo; after training, `step.trained(state)`. One over a mesh is run
        by all of its devices.
    - `tokens`: prompts, integers `[batch, prompt]`.
    - `mask`: True at real tokens, `[batch, prompt]`: prompts of different lengths, padded on the left or on the
        right. None: all are real.
    - `temperature`: 0 takes the most probable token, ties to the lowest id; above, logits are divided by it and
        tokens drawn.
    - `top_k`: draws from the `top_k` most probable tokens only.
    - `top_p`: draws from the smallest set of tokens whose probability reaches `top_p` (Holtzman et al., 2020).
    - `min_p`: draws from tokens of at least `min_p` times the probability of the best (Nguyen et al., 2024).
        The three are applied in this order, after the temperature.
    - `stop_ids`: one id or several; a row ends with the first of them, which is part of what is returned.
    - `pad_id`: what a row that has ended is filled up with, by default the stop id that ended it.
    - `allowed`: only ids below this are generated: a vocabulary is often padded beyond the tokenizer's.
    - `key`: needed when `temperature` is above 0. Row i draws with `jax.random.fold_in(key, i)`, or with the i-th
        of an array of `batch` keys.

    Warns where a row could grow beyond `max_position_embeddings`: the model works there, but rarely well. Raises
    ValueError for an empty prompt, ids outside the vocabulary, a mask with holes, arguments out of range, and
    when logits aren't finite.
    """
    drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    asked = request("generate", model, tokens, mask, max_new_tokens, drawing, stop_ids, pad_id, allowed, key)
    model, (prefill, _, rest) = _programs(model)
    cache, rows = prefill(model, asked.tokens, asked.mask, asked.controls, capacity=asked.capacity)
    out, _ = rest(model, cache, rows, asked.controls, np.int32(asked.limit))
    new = np.asarray(out)[:, : asked.limit]
    for index in np.flatnonzero((new == _FAILED).any(axis=0))[:1]:
        _check_sound("generate", new[:, index], int(index))
    return jnp.asarray(new)


def stream(
    model: Any,
    tokens: Any,
    *,
    mask: Any = None,
    max_new_tokens: int,
    temperature: float | int = 0.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    min_p: float | int | None = None,
    stop_ids: Any = (),
    pad_id: int | None = None,
    allowed: int | None = None,
    key: Any = None,
) -> Iterator[np.ndarray]:
    """The tokens of `generate`, one of each row at a time: arrays `[batch]` int32, each when it is there.

    Ends after `max_new_tokens`, or when every row has met a stop id. From the second token on the next step runs
    while the caller uses what the last one gave. Arguments and errors are those of `generate`; wrong arguments
    raise at once.
    """
    drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    asked = request("stream", model, tokens, mask, max_new_tokens, drawing, stop_ids, pad_id, allowed, key)
    return _stream(model, asked)


def _stream(model: Any, asked: Request) -> Iterator[np.ndarray]:
    controls, limit = asked.controls, asked.limit
    model, (prefill, step, _) = _programs(model)
    cache, rows = prefill(model, asked.tokens, asked.mask, controls, capacity=asked.capacity)
    done = np.zeros(len(asked.tokens), bool)
    for index in range(limit):
        last = index == limit - 1
        # The first token doesn't wait until the next step, which may have to be compiled, has begun.
        if index and not last:
            cache, ahead = step(model, cache, rows, controls)
        token = np.array(rows.token)
        _check_sound("stream", token, index)
        yield token
        done |= np.isin(token, controls.stop_ids)
        if last or done.all():
            return
        if not index:
            cache, ahead = step(model, cache, rows, controls)
        rows = ahead


def _check_sound(caller: str, token: np.ndarray, index: int) -> None:
    rows = np.flatnonzero(token == _FAILED)
    if len(rows):
        raise ValueError(
            f"{caller}: the model's logits for new token {index} are not finite in row "
            f"{', '.join(map(str, rows))}: its weights hold NaN or infinity, or numbers grow beyond their dtype"
        )
