import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill import policies
from overspill.layers.indexer import Indexer, LayerNorm
from overspill.layers.linear import is_buffer
from overspill.layers.mask import attention_mask
from overspill.layers.mla import MLA
from overspill.layers.rotary import Rotary

BATCH, LENGTH, FEATURES, LATENT = 2, 70, 24, 10
HEADS, WIDTH, ROPE, TOP_K = 3, 12, 8, 9
ROTARY = Rotary(ROPE, 300.0, 128, interleaved=True)


def randomised(tree, seed):
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    return structure.unflatten([jnp.asarray(0.4 * rng.normal(size=a.shape), a.dtype) for a in leaves])


def sparse_mla(top_k=TOP_K, **options):
    layer = MLA(
        FEATURES, num_heads=2, q_lora_rank=LATENT, kv_lora_rank=6, qk_nope_head_dim=5, qk_rope_head_dim=ROPE,
        v_head_dim=7, index_n_heads=HEADS, index_head_dim=WIDTH, index_topk=top_k, key=jax.random.key(0), **options,
    )  # fmt: skip
    return randomised(layer, 3)


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(BATCH, LENGTH, FEATURES)), jnp.float32)
    latent = jnp.asarray(rng.normal(size=(BATCH, LENGTH, LATENT)), jnp.float32)
    tables = ROTARY.tables(jnp.arange(LENGTH)[None])
    real = jnp.arange(LENGTH)[None] >= jnp.asarray([0, 5])[:, None]
    return x, latent, tables, attention_mask(LENGTH, mask=real)


def f64(x):
    return np.asarray(x, np.float64)


def rotate_halves(x, position):
    half = ROPE // 2
    angle = position * 300.0 ** (-np.arange(0, ROPE, 2) / ROPE)
    z = (x[:half] + 1j * x[half:ROPE]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag, x[ROPE:]])


def scores_of(indexer, x, latent):
    """Float64, one query, key and head at a time."""
    out = np.zeros((BATCH, LENGTH, LENGTH))
    norm = indexer.key_norm
    for b in range(BATCH):
        keys, queries = [], []
        for i in range(LENGTH):
            k = f64(indexer.key_projection.weight) @ x[b, i]
            k = (k - k.mean()) / np.sqrt(k.var() + 1e-6) * f64(norm.weight) + f64(norm.bias)
            keys.append(rotate_halves(k, i))
            q = (f64(indexer.query_up.weight) @ latent[b, i]).reshape(HEADS, WIDTH)
            queries.append([rotate_halves(head, i) for head in q])
        for i in range(LENGTH):
            weights = f64(indexer.head_weights.weight) @ x[b, i] / np.sqrt(HEADS)
            for j in range(LENGTH):
                dots = [max(q @ keys[j] / np.sqrt(WIDTH), 0.0) for q in queries[i]]
                out[b, i, j] = weights @ dots
    return out


def test_picks_the_best_keys(inputs):
    x, latent, tables, mask = inputs
    indexer = randomised(
        Indexer(FEATURES, q_lora_rank=LATENT, num_heads=HEADS, head_dim=WIDTH, top_k=TOP_K, key=jax.random.key(0)), 1
    )
    keys = indexer.keys(x, tables=tables, rotary=ROTARY)
    chosen = np.asarray(indexer(x, latent, keys, tables=tables, rotary=ROTARY, mask=mask))
    scores, mask = scores_of(indexer, f64(x), f64(latent)), np.asarray(mask)
    assert (chosen <= mask).all()
    for b in range(BATCH):
        for i in range(LENGTH):
            seen = np.flatnonzero(mask[b, i])
            assert chosen[b, i].sum() == min(TOP_K, len(seen))
            if len(seen) > TOP_K:
                # Scores that are cut off at zero tie: what counts is that no better key was left out.
                left_out = [scores[b, i, j] for j in seen if not chosen[b, i, j]]
                assert min(scores[b, i, chosen[b, i]]) >= max(left_out) - 1e-6
    # The test could not fail if the choice were the last keys, or didn't depend on the query.
    assert any((chosen[0, i] != chosen[0, i - 1]).sum() > 2 for i in range(40, LENGTH))


def test_as_many_keys_as_there_are_is_dense_attention(inputs):
    x, _, tables, mask = inputs
    sparse = sparse_mla(top_k=LENGTH)
    dense = eqx.tree_at(lambda m: m.indexer, sparse, None)
    call = {"tables": tables, "rotary": ROTARY, "mask": mask}
    np.testing.assert_array_equal(sparse(x, **call), dense(x, **call))
    fewer = sparse_mla(top_k=TOP_K)(x, **call)
    np.testing.assert_array_equal(fewer[0, :TOP_K], dense(x, **call)[0, :TOP_K])
    assert np.abs(fewer[0, -1] - dense(x, **call)[0, -1]).max() > 1e-2


def test_attention_is_that_over_the_chosen_keys(inputs):
    x, _, tables, mask = inputs
    layer = sparse_mla()
    call = {"tables": tables, "rotary": ROTARY}
    source = layer.query_norm(layer.query_down(x))
    keys = layer.indexer.keys(x, **call)
    chosen = layer.indexer(x, source, keys, mask=mask, **call)
    dense = eqx.tree_at(lambda m: m.indexer, layer, None)
    np.testing.assert_array_equal(layer(x, mask=mask, **call), dense(x, mask=chosen, **call))


def test_nothing_of_it_is_trained(inputs):
    x, _, tables, mask = inputs
    layer = sparse_mla()
    assert is_buffer(layer.indexer)
    gradients = jax.grad(lambda m: jnp.sum(jnp.sin(m(x, tables=tables, rotary=ROTARY, mask=mask))))(layer)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradients.indexer))
    assert np.isfinite(gradients.kv_down.weight).all() and (np.asarray(gradients.query_down.weight) != 0).any()


@pytest.mark.parametrize("placement", ["device", "host", "recompute"])
def test_the_choice_can_wait_anywhere(inputs, placement):
    x, _, tables, mask = inputs
    layer = policies.place(sparse_mla(), {"*": "recompute", "indexer.selected": placement})
    call = {"tables": tables, "rotary": ROTARY, "mask": mask}
    census = policies.check(policies.checkpoint(layer), x, **call)
    assert census.statuses["indexer.selected"] == {"recompute": "recomputed"}.get(placement, placement)
    shapes = [entry.shape for entry in census.entries if entry.label == "indexer.selected"]
    assert shapes == ([] if placement == "recompute" else [(BATCH, LENGTH, TOP_K)])

    def loss(m, run):
        return jnp.sum(jnp.sin(run(m)(x, **call)))

    plain = jax.grad(lambda m: loss(m, lambda m: m))(layer)
    placed = jax.jit(jax.grad(lambda m: loss(m, policies.checkpoint)))(layer)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(placed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_layer_norm_is_float32_and_keeps_the_dtype():
    norm = randomised(LayerNorm(16), 5)
    x = np.random.default_rng(2).normal(3.0, 2.0, (4, 16))
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    expected = expected * f64(norm.weight) + f64(norm.bias)
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=1e-6)
    assert norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_needs_a_latent_of_queries():
    with pytest.raises(ValueError, match="index_topk needs q_lora_rank"):
        MLA(
            FEATURES, num_heads=2, q_lora_rank=None, kv_lora_rank=6, qk_nope_head_dim=5, qk_rope_head_dim=ROPE,
            v_head_dim=7, index_n_heads=HEADS, index_head_dim=WIDTH, index_topk=4, key=jax.random.key(0),
        )  # fmt: skip
