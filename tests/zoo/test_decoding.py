"""Models with a cache: token by token or in pieces they give what one pass over everything gives."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill.zoo.config import LlamaConfig

LENGTH, CAPACITY = 26, 29
PIECES = (11, 7, 7, 1)
# What these do with several tokens at once, others here do alike.
ONE_BY_ONE = ("one kv head, tied", "olmo2", "mixtral", "glm", "deepseek-v2-lite")
_spec = importlib.util.spec_from_file_location("small_models", pathlib.Path(__file__).with_name("small_models.py"))
small_models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(small_models)
CONFIGS = small_models.CONFIGS
LAYOUTS = {"one scan": {}, "segments": {"segments": (1, 2)}, "loop": {"scan": False}}


@pytest.fixture(scope="module")
def ids():
    return jnp.asarray(np.random.default_rng(2).integers(0, 61, (2, LENGTH)), jnp.int32)


def close(a, b, tolerance=1e-5):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape and np.all(np.isfinite(a))
    assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), np.linalg.norm(a - b) / np.linalg.norm(b)


# Of the module, so that tests share what is compiled.


@pytest.fixture(scope="module")
def call(jit):
    @jit
    def call(model, tokens, cache, mask):
        return model(tokens, cache=cache, mask=mask)

    return lambda model, tokens, cache, mask=None: call(
        model, tokens, cache, jnp.ones(tokens.shape, bool) if mask is None else mask
    )


@pytest.fixture(scope="module")
def whole(jit):
    return jit(lambda model, tokens: model(tokens))


@pytest.mark.parametrize(
    ("family", "layout"), ({family: "one scan" for family in CONFIGS} | {"gpt-oss": "segments", "glm": "loop"}).items()
)
def test_pieces_and_single_tokens_give_what_one_pass_gives(family, layout, make, ids, whole, call):
    """The second row is shorter and padded on the left: it gives what it gives alone."""
    model = make(CONFIGS[family], **LAYOUTS[layout])
    short = 5
    expected = whole(model, ids)[0], whole(model, jnp.roll(ids, -short, axis=1))[1]
    mask = np.arange(LENGTH) >= np.array([[0], [short]])
    tokens = np.where(mask, ids, 60)
    cache, start, parts = model.init_cache(2, CAPACITY), 0, []
    for size in (11, *[1] * 15) if family in ONE_BY_ONE else PIECES:
        piece = slice(start, start + size)
        logits, cache = call(model, tokens[:, piece], cache, mask[:, piece])
        parts.append(logits)
        start += size
    logits = jnp.concatenate(parts, axis=1)
    close(logits[0], expected[0])
    close(logits[1, short:], expected[1][:-short])
    assert int(cache.length) == LENGTH and not cache.fresh
    np.testing.assert_array_equal(jnp.sum(cache.valid, axis=1), [LENGTH, LENGTH - short])


@pytest.mark.parametrize("scaling", [
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 2.0, 4.0, 8.0],
     "original_max_position_embeddings": 16},
], ids=["dynamic", "longrope"])  # fmt: skip
def test_a_rows_rotation_depends_on_its_own_length(scaling, make, ids, whole, call):
    """The longer row is beyond the length at which rotation changes, the shorter isn't."""
    model = make(LlamaConfig(**small_models.GQA | {"max_position_embeddings": 16}, rope_scaling=scaling))
    tokens = np.stack([ids[0, :20], np.pad(ids[1, :9], (11, 0))])
    mask = np.arange(20) >= np.array([[0], [11]])
    logits, _ = call(model, tokens, model.init_cache(2, 32), mask)
    for row, length in ((0, 20), (1, 9)):
        alone = whole(model, ids[row : row + 1, :length])[0]
        close(logits[row, 20 - length :], alone)
    plain = make(LlamaConfig(**small_models.GQA | {"max_position_embeddings": 16}))
    assert np.abs(np.asarray(whole(plain, ids[:1, :20])[0] - logits[0])).max() > 1e-3


def test_what_doesnt_fit_raises_or_is_nan(make, ids, jit):
    model = make(CONFIGS["deepseek-v3"])
    step = jit(lambda model, tokens, cache: model(tokens, cache=cache))
    cache = model.init_cache(2, 12)
    with pytest.raises(ValueError, match="13 tokens don't fit into the cache: its capacity is 12 slots, of which 0"):
        model(ids[:, :13], cache=cache)
    with pytest.raises(ValueError, match="13 tokens don't fit into the cache: its capacity is 12 slots"):
        step(model, ids[:, :13], cache)
    with pytest.raises(ValueError, match="the cache is for 2 rows, the tokens have 1"):
        model(ids[:1, :4], cache=cache)
    for options in ({"segment_ids": jnp.zeros((2, 4), jnp.int32)}, {"checkpoint": lambda block, **_: block}):
        with pytest.raises(ValueError, match="a cache is for generating: it goes with neither"):
            model(ids[:, :4], cache=cache, **options)
    logits, cache = step(model, ids[:, :10], cache)
    with pytest.raises(ValueError, match="3 tokens don't fit into the cache: its capacity is 12 slots, of which 10"):
        model(ids[:, :3], cache=cache)
    fits, full = step(model, ids[:, :2], cache)
    assert np.all(np.isfinite(fits))
    for held in (full, cache):  # by all, and by the last one of three
        logits, after = step(model, ids[:, :3], held)
        assert np.all(np.isnan(logits))
        assert np.all(np.isnan(step(model, ids[:, :3], after)[0]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_of_a_cache(dtype, make):
    """Keys and values for grouped queries; kv_lora_rank + qk_rope_head_dim a token and layer for latents, no more."""
    numbers = {"llama": 2 * 2 * 8, "one kv head, tied": 2 * 8, "deepseek-v2-lite": 6 + 8, "deepseek-v3.2": 6 + 8 + 12}
    for family, width in numbers.items():
        model = make(CONFIGS[family], dtype=jnp.dtype(dtype))
        cache = model.init_cache(5, 40)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.arrays))
        assert size == 3 * 5 * 40 * width * jnp.dtype(dtype).itemsize
        assert cache.dtype == dtype and cache.capacity == 40 and int(cache.length) == 0 and cache.fresh


@pytest.mark.parametrize("family", ["gpt-oss", "deepseek-v3"])
def test_a_cache_of_fewer_bits(family, make, ids, call):
    """A bfloat16 cache of a float32 model gives what the model gives with keys and values rounded, no less."""
    model = make(CONFIGS[family])
    exact, rounded = (model.init_cache(2, CAPACITY, dtype) for dtype in (None, "bfloat16"))
    sizes = [sum(x.nbytes for x in jax.tree.leaves(cache.arrays)) for cache in (exact, rounded)]
    assert sizes[0] == 2 * sizes[1]
    for part in (ids[:, :11], ids[:, 11:12]):
        a, exact = call(model, part, exact)
        b, rounded = call(model, part, rounded)
        error = np.linalg.norm(a - b) / np.linalg.norm(a)
        # The first pass stays among its own tokens.
        assert error < 1e-6 if part.shape[1] > 1 else 1e-5 < error < 0.02


def test_wrong_caches(make):
    model = make(CONFIGS["llama"])
    for dtype in ("int32", "bool"):
        with pytest.raises(ValueError, match=f"init_cache: dtype must be floating, got {dtype}"):
            model.init_cache(2, 8, dtype)
    with pytest.raises(ValueError, match="init_cache: capacity must be a positive integer, got 0"):
        model.init_cache(2, 0)


@pytest.mark.parametrize("family", ["llama", "deepseek-v2-lite"])
def test_bfloat16_models_err_no_more_with_a_cache(family, make, ids, call, whole):
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make(CONFIGS[family]))
    exact = whole(jax.tree.map(lambda x: x.astype(jnp.float32), model), ids)
    cache, parts = model.init_cache(2, CAPACITY), []
    for part in (ids[:, :11], *np.split(ids[:, 11:], 15, axis=1)):
        logits, cache = call(model, part, cache)
        assert logits.dtype == jnp.bfloat16
        parts.append(logits)
    errors = [
        np.linalg.norm(np.asarray(x[:, 11:], np.float32) - exact[:, 11:])
        for x in (jnp.concatenate(parts, axis=1), whole(model, ids))
    ]
    assert errors[0] < 1.5 * errors[1]


def test_positions_go_on_from_the_real_tokens(make, ids, jit):
    """Positions given by hand are those that the cache would have given, and others give something else."""
    model = make(CONFIGS["llama"])
    run = jit(lambda model, tokens, cache, positions: model(tokens, cache=cache, positions=positions))
    _, cache = run(model, ids[:, :9], model.init_cache(2, 16), None)
    own, _ = run(model, ids[:, 9:10], cache, None)
    close(run(model, ids[:, 9:10], cache, jnp.full((2, 1), 9))[0], own)
    other = run(model, ids[:, 9:10], cache, jnp.full((2, 1), 30))[0]
    assert np.linalg.norm(other - own) > 1e-2 * np.linalg.norm(own)
