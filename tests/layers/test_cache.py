"""The cache by itself: who sees what, what is written where, and attention token by token."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill.layers.attention import Attention
from overspill.layers.cache import Cache, LayerCache, stored_dtype
from overspill.layers.mask import attention_mask, cache_mask, within
from overspill.layers.mla import MLA
from overspill.layers.rotary import Rotary, YarnScaling

VALID = np.array([[0, 0, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 1, 0, 0, 0], [0] * 9]).astype(bool)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize(("start", "queries"), [(0, 4), (3, 4), (6, 1)])
def test_what_new_tokens_see_of_a_cache(start, queries, window):
    expected = np.zeros((3, queries, 9), bool)
    for row, query, slot in np.ndindex(*expected.shape):
        place = start + query
        near = window is None or place - slot < window
        expected[row, query, slot] = VALID[row, slot] and slot <= place and near
    got = jax.jit(lambda valid, start: cache_mask(valid, start, queries, window=window))(VALID, start)
    np.testing.assert_array_equal(got, expected)
    if window is not None:  # a window that may differ from layer to layer narrows what all share
        wide = cache_mask(jnp.asarray(VALID), jnp.int32(start), queries)
        np.testing.assert_array_equal(jax.jit(within)(wide, jnp.int32(window), jnp.int32(start)), expected)


def empty(batch=2, capacity=6, dtype=np.float32):
    return Cache({}, jnp.zeros((batch, capacity), bool), jnp.zeros((), jnp.int32), np.dtype(dtype))


def test_positions_count_real_tokens():
    cache = empty()
    assert cache.fresh and cache.capacity == 6
    cache, positions = cache.admit(jnp.array([[False, False, True], [True, True, True]]))
    np.testing.assert_array_equal(positions, [[0, 0, 0], [0, 1, 2]])
    cache, positions = jax.jit(Cache.admit)(cache, jnp.array([[True, True], [False, True]]))
    np.testing.assert_array_equal(positions, [[1, 2], [2, 3]])
    np.testing.assert_array_equal(cache.valid, [[0, 0, 1, 1, 1, 0], [1, 1, 1, 0, 1, 0]])
    assert int(cache.length) == 5 and not cache.fresh
    assert not cache.overflows(1) and cache.overflows(2)
    cache.check(2, 1)
    with pytest.raises(ValueError, match="2 tokens don't fit into the cache: its capacity is 6 slots, of which 5 are"):
        cache.check(2, 2)
    with pytest.raises(ValueError, match="the cache is for 2 rows, the tokens have 3"):
        cache.check(3, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(2, 6, 5), (2, 3, 6, 5)], ids=["latents", "heads"])
def test_an_update_writes_new_entries_and_nothing_else(shape, dtype):
    """Into its own layer, from the first free slot on; what comes back are the numbers, in the cache's dtype."""
    rng = np.random.default_rng(0)
    batch, *heads, capacity, features = shape
    numbers = rng.normal(size=(4, *shape)).astype(dtype)
    kept = np.dtype(f"uint{8 * numbers.itemsize}") if numbers.itemsize < 4 else numbers.dtype
    bits = jnp.asarray(numbers.view(kept))
    cache = LayerCache({"x": bits, "y": bits}, jnp.int32(2), jnp.int32(3), False, np.dtype(dtype))
    new = rng.normal(size=(batch, *heads, 2, features)).astype(np.float32)
    cache, mine = jax.jit(lambda cache, new: cache.update(x=new))(cache, new)
    expected = numbers.copy()
    expected[2][..., 3:5, :] = new.astype(dtype)
    assert list(mine) == ["x"] and mine["x"].dtype == dtype
    np.testing.assert_array_equal(np.asarray(mine["x"]).view(kept), expected[2].view(kept))
    np.testing.assert_array_equal(np.asarray(cache.arrays["x"]).view(kept), expected.view(kept))
    np.testing.assert_array_equal(np.asarray(cache.arrays["y"]).view(kept), numbers.view(kept))


def layer(kind, key):
    if kind == "grouped":
        heads = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8}
        return Attention(20, **heads, qk_norm="head", sinks=True, qkv_bias=True, key=key)
    sparse = {"q_lora_rank": 9, "index_n_heads": 2, "index_head_dim": 12, "index_topk": 5} if kind == "sparse" else {}
    sizes = {"kv_lora_rank": 7, "qk_nope_head_dim": 5, "qk_rope_head_dim": 8, "v_head_dim": 6}
    return MLA(20, num_heads=3, **sizes, **{"q_lora_rank": None} | sparse, key=key)


@pytest.mark.parametrize("kind", ["grouped", "latent", "sparse"])
def test_attention_token_by_token(kind):
    """A layer that isn't the first of its stack, two tokens and then one at a time, with a window and padding."""
    attention, length, capacity, window = layer(kind, jax.random.key(0)), 12, 15, 6
    leaves, structure = jax.tree.flatten(attention)
    rng = np.random.default_rng(1)
    leaves = [jnp.asarray(rng.normal(size=leaf.shape) / leaf.shape[-1] ** 0.5, leaf.dtype) for leaf in leaves]
    attention = structure.unflatten(leaves)
    x = jnp.asarray(rng.normal(size=(2, length, 20)), jnp.float32)
    scaling = YarnScaling(4.0, 8, mscale=1.0, mscale_all_dim=0.7)
    rotary, real = Rotary(8, 100.0, 32, scaling), np.arange(length) >= np.array([[0], [3]])
    tables = rotary.tables(jnp.maximum(jnp.arange(length)[None] - jnp.array([[0], [3]]), 0))
    mask = attention_mask(length, mask=jnp.asarray(real), window=window)
    run = eqx.filter_jit(lambda x, tables, mask, **rest: attention(x, tables=tables, rotary=rotary, mask=mask, **rest))
    whole = np.asarray(run(x, tables, mask))

    shapes = attention.cache_shapes(2, capacity)
    arrays = {name: jnp.full((3, *shape), 7.0) for name, shape in shapes.items()}
    valid = np.zeros((2, capacity), bool)
    for start, stop in [(0, 2), *((i, i + 1) for i in range(2, length))]:
        valid[:, start:stop] = real[:, start:stop]
        piece = slice(start, stop)
        cache = LayerCache(arrays, jnp.int32(1), jnp.int32(start), start == 0, np.dtype("float32"))
        seen = cache_mask(jnp.asarray(valid), jnp.int32(start), stop - start, window=window)
        own = mask[:, piece, piece] if start == 0 else seen
        y, cache = run(x[:, piece], jax.tree.map(lambda t: t[:, piece], tables), own, cache=cache)
        arrays = cache.arrays
        for row in range(2):
            rows = real[row, piece]
            np.testing.assert_allclose(np.asarray(y)[row, rows], whole[row, piece][rows], rtol=1e-4, atol=1e-5)
    for array in arrays.values():
        assert np.all(np.asarray(array)[[0, 2]] == 7) and np.all(np.asarray(array)[1, ..., length:, :] == 7)


def test_a_layers_cache_is_handed_on_whole():
    cache = LayerCache({"x": jnp.zeros((2, 1, 4, 3))}, jnp.int32(0), jnp.int32(1), False, np.dtype("float32"))
    after, _ = cache.update(x=jnp.ones((1, 1, 3)))
    for field in dataclasses.fields(LayerCache):
        if field.name == "arrays":
            assert set(after.arrays) == set(cache.arrays)
        else:
            assert getattr(after, field.name) is getattr(cache, field.name)


def test_gradients_through_a_cache():
    """Those of float32 are right; of fewer bits, on CPU, there are none, and that is said."""
    key, rotary = jax.random.key(0), Rotary(8, 100.0, 32)
    attention, x = layer("grouped", key), jax.random.normal(key, (1, 3, 20))
    tables = rotary.tables(jnp.arange(3)[None])

    def last(x, dtype, fresh):
        def attend(part, cache, mask):
            own = jax.tree.map(lambda t: t[:, part], tables)
            return attention(x[:, part], tables=own, rotary=rotary, mask=mask, cache=cache)

        arrays = {n: jnp.zeros((1, *s), stored_dtype(dtype)) for n, s in attention.cache_shapes(1, 3).items()}
        cache = LayerCache(arrays, jnp.int32(0), jnp.int32(0), True, np.dtype(dtype))
        if fresh:
            return jnp.sum(jnp.sin(attend(slice(0, 3), cache, attention_mask(3))[0][:, -1]))
        _, cache = attend(slice(0, 2), cache, attention_mask(2))
        cache = dataclasses.replace(cache, start=jnp.int32(2), fresh=False)
        return jnp.sum(jnp.sin(attend(slice(2, 3), cache, attention_mask(3)[:, 2:])[0]))

    whole = jax.grad(last)(x, "float32", True)
    assert np.all(np.linalg.norm(whole, axis=-1) > 1e-4)
    np.testing.assert_allclose(jax.grad(last)(x, "float32", False), whole, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(jax.grad(last)(x, "bfloat16", True), whole, rtol=1e-4, atol=1e-7)
    with pytest.raises(ValueError, match="there is no gradient through a cache of 16 bits or less on CPU"):
        jax.grad(last)(x, "bfloat16", False)
