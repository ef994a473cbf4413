"""What generation is asked for: prompts of several lengths brought to one, and arguments checked before they run."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from ..layers.rotary import DynamicScaling
from .model import LanguageModel
from .sampling import Sampler, whole


class Controls(NamedTuple):
    """What steers the choice of tokens: arrays all of it, so that nothing of it asks for another program."""

    sampler: Sampler
    keys: Key[Array, " batch"]
    stop_ids: Int[np.ndarray, " stops"] | Int[Array, " stops"]
    pad_id: Int[Array, ""] | np.int32  # negative: the stop id that the row met
    allowed: Int[Array, ""] | np.int32


class Request(NamedTuple):
    tokens: Int[np.ndarray, "batch prompt"]
    mask: Bool[np.ndarray, "batch prompt"]
    capacity: int
    limit: int
    controls: Controls


def _rounded(size: int, least: int) -> int:
    """`size` rounded up to one of a few: multiples of `least`, and four to each power of two beyond."""
    step = max(least, 1 << max((size - 1).bit_length() - 3, 0))
    return -(-size // step) * step


def request(
    caller: str,
    model: Any,
    tokens: Any,
    mask: Any,
    limit: Any,
    drawing: dict[str, Any],
    stop_ids: Any,
    pad_id: Any,
    allowed: Any,
    key: Any,
) -> Request:
    """The arguments of `generate`, checked and brought into shape; `drawing` are those of `Sampler.of`.

    Raises ValueError with the name of `caller` before it, and warns as `generate` says.
    """
    if not isinstance(model, LanguageModel):
        raise ValueError(
            f"{caller}: a model is wanted, not a {type(model).__name__}; step.trained(state) gives a training state's "
            "model, and zoo.load one from a folder"
        )
    vocab = model.config.vocab_size
    if isinstance(model.norm.scale, jax.ShapeDtypeStruct):
        raise ValueError(f"{caller}: an abstract model has no weights: build or load it")
    try:
        rows = _rows(tokens, mask, vocab)
        if (limit := whole("max_new_tokens", limit)) < 1:
            raise ValueError(f"max_new_tokens must be 1 or more, got {limit}")
        sampler = Sampler.of(vocab, **drawing)
        if allowed is not None and not 1 <= whole("allowed", allowed) <= vocab:
            raise ValueError(f"allowed must be in 1..{vocab}, got {allowed}")
        if pad_id is not None and whole("pad_id", pad_id) < 0:
            raise ValueError(f"pad_id must be a token id, 0 or more, got {pad_id}")
        controls = Controls(
            sampler,
            _keys(key, len(rows), bool(sampler.temperature > 0)),
            _stops(stop_ids, vocab),
            np.int32(-1 if pad_id is None else pad_id),
            np.int32(vocab if allowed is None else allowed),
        )
    except ValueError as error:
        raise ValueError(f"{caller}: {error}") from None
    longest, config = max(map(len, rows)), model.config
    # Dynamic scaling is made for what lies beyond.
    if longest + limit > config.max_position_embeddings and not isinstance(config.rope_scaling, DynamicScaling):
        warnings.warn(
            f"{caller}: {longest} tokens and {limit} new ones may go beyond the {config.max_position_embeddings} "
            "positions that the model was made for (max_position_embeddings)",
            stacklevel=3,
        )
    # At the right edge all rows are ready for their next token at once.
    width = _rounded(longest, 16)
    padded = np.stack([np.pad(row, (width - len(row), 0)) for row in rows]).astype(np.int32)
    real = np.stack([np.arange(width) >= width - len(row) for row in rows])
    # The last token is chosen and never read.
    return Request(padded, real, _rounded(width + limit - 1, 128), limit, controls)


def _rows(tokens: Any, mask: Any, vocab: int) -> list[np.ndarray]:
    """The real tokens of each row."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or 0 in tokens.shape or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"the prompt must be integers [batch, length >= 1], got {tokens.dtype}{list(tokens.shape)}")
    mask = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask)
    if mask.shape != tokens.shape or mask.dtype != np.bool_:
        raise ValueError(
            f"mask must be boolean, True at real tokens, {list(tokens.shape)} like the prompt, "
            f"got {mask.dtype}{list(mask.shape)}"
        )
    for row, real in enumerate(mask):
        places = np.flatnonzero(real)
        if not len(places):
            raise ValueError(f"row {row} of the prompt has no real token")
        if places[-1] - places[0] >= len(places):
            raise ValueError(
                f"row {row} of mask has a hole: padding stands before or after the real tokens, not within"
            )
    low, high = int(tokens[mask].min()), int(tokens[mask].max())
    if low < 0 or high >= vocab:
        raise ValueError(f"token ids must be in 0..{vocab - 1}, the prompt has {low}..{high}")
    return [row[real] for row, real in zip(tokens, mask, strict=True)]


def _keys(key: Any, batch: int, needed: bool) -> Key[Array, " batch"]:
    if key is None:
        if needed:
            raise ValueError("sampling at a temperature above 0 needs a key")
        key = jax.random.key(0)
    if not isinstance(key, jax.Array | np.ndarray):
        raise ValueError(f"key must be a key such as jax.random.key(0), got {key!r}")
    if key.dtype == np.uint32:  # of the older kind
        key = jax.random.wrap_key_data(key)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(f"key must be a key such as jax.random.key(0), got an array of {key.dtype}")
    if key.shape == ():
        return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch))
    if key.shape != (batch,):
        raise ValueError(f"key must be one key, or an array of {batch} keys like the rows, got {list(key.shape)}")
    return key


def _stops(stop_ids: Any, vocab: int) -> Int[np.ndarray, " stops"]:
    try:
        ids = [] if stop_ids is None else list(stop_ids)
    except TypeError:  # a single one
        ids = [stop_ids]
    ids = [whole("a stop id", i) for i in ids]
    for i in ids:
        if not 0 <= i < vocab:
            raise ValueError(f"stop ids must be in 0..{vocab - 1}, got {i}")
    # Filled up with what no token is, so that one more of them doesn't ask for another program.
    return np.pad(np.asarray(ids, np.int32), (0, _rounded(max(len(ids), 1), 8) - len(ids)), constant_values=-2)
