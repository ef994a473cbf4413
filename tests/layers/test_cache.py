"""Layers with a cache give what they give without one, and the cache holds no more than it has to."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill.layers.attention import Attention
from overspill.layers.block import Block
from overspill.layers.cache import Cache, LayerCache
from overspill.layers.mask import attention_mask, cache_mask, within
from overspill.layers.mla import MLA
from overspill.layers.mlp import MLP
from overspill.layers.rotary import Rotary
from overspill.layers.stack import Stack, resegment

LENGTH, CAPACITY, FEATURES = 70, 80, 24
F32 = jnp.dtype("float32")
ROTARY = Rotary(8, 300.0, 128)
INTERLEAVED = Rotary(8, 300.0, 128, interleaved=True)


def randomised(tree, seed=3):
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    return structure.unflatten([jnp.asarray(0.4 * rng.normal(size=a.shape), a.dtype) for a in leaves])


def gqa(**options):
    key = jax.random.key(0)
    return Attention(FEATURES, num_heads=4, num_kv_heads=2, head_dim=8, qkv_bias=True, key=key, **options)


def mla(**options):
    return MLA(
        FEATURES, num_heads=3, q_lora_rank=10, kv_lora_rank=6, qk_nope_head_dim=5, qk_rope_head_dim=8, v_head_dim=7,
        key=jax.random.key(0), **options,
    )  # fmt: skip


LAYERS = {
    "grouped": (gqa, ROTARY),
    "sinks": (lambda: gqa(sinks=True, qk_norm="head"), ROTARY),
    "latent": (mla, INTERLEAVED),
    "sparse": (lambda: mla(index_n_heads=3, index_head_dim=12, index_topk=9), INTERLEAVED),
}


def empty(layer, batch, layers=1):
    shapes = layer.cache_shapes(batch, CAPACITY)
    return {name: jnp.zeros((layers, *shape)) for name, shape in shapes.items()}


def run_in_pieces(layer, rotary, x, sizes, real):
    """The layer's output for pieces of `x`, one after the other, with a cache."""
    cache = Cache({"only": empty(layer, x.shape[0])}, jnp.zeros((x.shape[0], CAPACITY), bool), jnp.int32(0), F32)
    out, at = [], 0
    for size in sizes:
        start, fresh = cache.length, cache.fresh
        cache, positions = cache.admit(real[:, at : at + size])
        tables = rotary.tables(positions)
        mask = attention_mask(size, mask=real[:, :size]) if fresh else cache_mask(cache.valid, start, size)
        handle = LayerCache(cache.arrays["only"], jnp.int32(0), start, fresh, F32)
        y, handle = layer(x[:, at : at + size], tables=tables, rotary=rotary, mask=mask, cache=handle)
        cache = Cache({"only": handle.arrays}, cache.valid, cache.length, F32, False)
        out.append(y)
        at += size
    return jnp.concatenate(out, axis=1)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("sizes", [(66, 1, 1, 1, 1), (1, 69), (30, 33, 7)], ids=str)
def test_pieces_give_what_the_whole_gives(name, sizes):
    make, rotary = LAYERS[name]
    layer = randomised(make())
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, LENGTH, FEATURES)), jnp.float32)
    real = jnp.arange(LENGTH)[None] >= jnp.asarray([[0], [5]])  # the second row is padded on the left
    positions = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
    whole = layer(x, tables=rotary.tables(positions), rotary=rotary, mask=attention_mask(LENGTH, mask=real))
    pieces = jax.jit(lambda layer, x: run_in_pieces(layer, rotary, x, sizes, real))(layer, x)
    error = np.linalg.norm(np.asarray(pieces - whole)[np.asarray(real)])
    assert error < 2e-6 * np.linalg.norm(np.asarray(whole)[np.asarray(real)])


def test_what_is_kept_for_a_token():
    assert gqa().cache_shapes(3, 11) == {"key": (3, 2, 11, 8), "value": (3, 2, 11, 8)}
    assert mla().cache_shapes(3, 11) == {"latent": (3, 11, 6 + 8)}
    sparse = mla(index_n_heads=3, index_head_dim=12, index_topk=9)
    assert sparse.cache_shapes(3, 11) == {"latent": (3, 11, 6 + 8), "index_key": (3, 11, 12)}


def test_latent_attention_makes_no_keys_of_the_past():
    """In decoding nothing has a head and a slot but the scores: the projections are absorbed."""
    layer = randomised(mla())
    handle = LayerCache(empty(layer, 2), jnp.int32(0), jnp.int32(5), False, F32)
    mask = jnp.ones((2, 1, CAPACITY), bool)
    tables = INTERLEAVED.tables(jnp.full((2, 1), 5))

    def step(x):
        return layer(x, tables=tables, rotary=INTERLEAVED, mask=mask, cache=handle)[0]

    shapes = {v.aval.shape for e in eqns(jax.make_jaxpr(step)(jnp.ones((2, 1, FEATURES))).jaxpr) for v in e.outvars}
    per_head = {s for s in shapes if CAPACITY in s and s[-1] in (5, 7, 13) and 3 in s}
    assert not per_head, per_head
    assert any(CAPACITY in s and 3 in s for s in shapes)  # the scores


def eqns(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from eqns(inner)


@pytest.mark.parametrize(("scan", "boundaries"), [(True, ()), (True, (2, 3)), (False, ())])
def test_a_stack_writes_each_layer_into_its_own_place(scan, boundaries):
    block = lambda key: Block(gqa(), MLP(FEATURES, 20, key=key), FEATURES, norm_eps=1e-3)
    stack = Stack.build(block, 4, scan=scan, key=jax.random.key(0))
    stack = resegment(randomised(stack), boundaries)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 9, FEATURES)), jnp.float32)
    shared = {"tables": ROTARY.tables(jnp.arange(9)[None]), "rotary": ROTARY, "mask": attention_mask(9)}
    handle = LayerCache(stack.init_cache(2, CAPACITY, jnp.float32), jnp.int32(0), jnp.int32(0), True, F32)
    y, _, arrays = stack(x, cache=handle, **shared)
    expected, _ = stack(x, **shared)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    for i, layer in enumerate(stack):
        key = layer.attention.key_projection(layer.attention_norm(x)).reshape(2, 9, 2, 8)
        kept = np.swapaxes(arrays["key"][i], 1, 2)[:, :9]
        np.testing.assert_allclose(kept, ROTARY.apply(key, shared["tables"]), rtol=1e-4, atol=1e-5)
        x, _ = layer(x, **shared)
    assert not np.asarray(arrays["key"][..., 9:, :]).any()


def test_masks_over_slots():
    valid = jnp.asarray([[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0]], bool)
    mask = np.asarray(cache_mask(valid, jnp.int32(3), 2, window=3))
    for b in range(2):
        for i in range(2):
            expected = [bool(valid[b, j]) and 3 + i - 3 < j <= 3 + i for j in range(6)]
            np.testing.assert_array_equal(mask[b, i], expected)
    np.testing.assert_array_equal(within(cache_mask(valid, jnp.int32(3), 2), jnp.int32(3), jnp.int32(3)), mask)


def test_positions_count_real_tokens_only():
    cache = Cache({}, jnp.zeros((2, 6), bool), jnp.int32(0), F32)
    cache, positions = cache.admit(jnp.asarray([[0, 0, 1], [1, 1, 1]], bool))
    np.testing.assert_array_equal(positions, [[0, 0, 0], [0, 1, 2]])
    cache, positions = cache.admit(jnp.asarray([[1, 1], [0, 1]], bool))
    np.testing.assert_array_equal(positions, [[1, 2], [2, 3]])
    assert int(cache.length) == 5 and not cache.fresh


def test_what_does_not_fit():
    cache = Cache({}, jnp.zeros((2, 6), bool), jnp.int32(4), F32)
    cache.check(2, 2)
    with pytest.raises(ValueError, match="3 tokens don't fit .* capacity is 6 slots, of which 4 are filled"):
        cache.check(2, 3)
    with pytest.raises(ValueError, match="the cache is for 2 rows, the tokens have 1"):
        cache.check(1, 1)
    assert bool(cache.overflows(3)) and not bool(cache.overflows(2))
    with pytest.raises(ValueError, match="7 tokens don't fit"):
        jax.jit(lambda c: c.check(2, 7))(eqx.tree_at(lambda c: c.length, cache, jnp.int32(0)))
