import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from overspill import policies
from overspill.zoo.model import check_inputs

FAMILIES = ["llama", "llama-tied-biased", "deepseek-v3-two-depths", "deepseek-v2", "deepseek-v2-lite"]
INPUTS = ("positions", "segment_ids", "mask")


def inputs(batch):
    return {name: getattr(batch, name) for name in INPUTS}


def weighted_loss(losses):
    """As in training, with weights that nothing can hide behind."""
    total = losses.sum / losses.count
    if losses.mtp_sum.size:
        total += 0.3 * jnp.mean(losses.mtp_sum / losses.mtp_count)
    return total + 0.1 * sum(jnp.sum(stats.balance_loss) for stats in losses.stats.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_numpy(jit, make, packed, numpy_models, normwise, family):
    model = make(family)
    logits = jit(lambda model, tokens: model(tokens))(model, packed.tokens)
    assert logits.dtype == jnp.float32
    for row, (_, expected, _, _) in zip(logits, numpy_models.forward(model, packed.tokens), strict=True):
        assert normwise(row, expected) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_padded_rows_are_those_of_numpy(jit, make, packed, numpy_models, normwise, family):
    model = make(family)
    losses, (states, stats), logits = jit(
        lambda model: (
            model.losses(packed),
            model.hidden(packed.tokens, **inputs(packed)),
            model(packed.tokens, **inputs(packed)),
        )
    )(model)
    rows = numpy_models.forward(model, packed.tokens, **inputs(packed))
    total, count, depths = 0.0, 0, len(getattr(model, "mtp", ()))
    mtp_sum, mtp_count = np.zeros(depths), np.zeros(depths)
    head = np.asarray(model.head_weight, np.float64)
    for i, (expected_states, expected_logits, _, expected_depths) in enumerate(rows):
        valid = np.asarray(packed.mask[i])
        assert normwise(states[i][valid], expected_states[valid]) < 1e-5
        assert normwise(logits[i][valid], expected_logits[valid]) < 1e-5
        targets = np.asarray(packed.targets[i])
        row_sum, row_count = numpy_models.cross_entropy(expected_logits, targets)
        total, count = total + row_sum, count + row_count
        for k, (depth_states, fits, _) in enumerate(expected_depths):
            ahead = [targets[j + k + 1] if fits[j] else -100 for j in range(len(targets))]
            row_sum, row_count = numpy_models.cross_entropy(depth_states @ head.T, ahead)
            mtp_sum[k], mtp_count[k] = mtp_sum[k] + row_sum, mtp_count[k] + row_count
    np.testing.assert_allclose(losses.sum, total, rtol=1e-5)
    assert losses.count == count
    np.testing.assert_allclose(losses.mtp_sum, mtp_sum, rtol=1e-5)
    np.testing.assert_array_equal(losses.mtp_count, mtp_count)
    if stats:
        loads = np.sum([loads for _, _, loads, _ in rows], axis=0)
        np.testing.assert_array_equal(stats["moe_layers"].load, loads)
        for k in range(depths):
            np.testing.assert_array_equal(losses.stats[f"mtp.{k}"].load, sum(row[3][k][2] for row in rows))


def test_mtp_states_are_those_of_numpy(jit, make, packed, numpy_models, normwise):
    model = make("deepseek-v3-two-depths")

    @jit
    def run(model):
        states, _ = model.hidden(packed.tokens, **inputs(packed))
        return [(d.states, d.valid) for d in model.mtp_hidden(states, packed.tokens, **inputs(packed))]

    depths = run(model)
    for i, (_, _, _, expected) in enumerate(numpy_models.forward(model, packed.tokens, **inputs(packed))):
        for (states, valid), (expected_states, fits, _) in zip(depths, expected, strict=True):
            np.testing.assert_array_equal(valid[i], fits)
            assert normwise(states[i][np.array(fits)], expected_states[np.array(fits)]) < 1e-5


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_nothing_crosses_documents_or_padding(jit, make, packed, trainable, family):
    """Other tokens in one document, or in the padding, change nothing elsewhere; gradients are finite."""
    model = make(family)
    parameters, rest = trainable(model)

    @jit
    def run(parameters, tokens, targets):
        def loss(parameters):
            losses = eqx.combine(parameters, rest).losses(packed._replace(tokens=tokens, targets=targets))
            # The balance loss is a mean over rows, padding never in it.
            return weighted_loss(losses), losses

        return jax.value_and_grad(loss, has_aux=True)(parameters)

    first_document = (packed.segment_ids == 0) & (jnp.arange(2)[:, None] == 0)
    targets = jnp.where(first_document, -100, packed.targets)
    (_, losses), _ = run(parameters, packed.tokens, targets)
    (_, other), _ = run(parameters, jnp.where(first_document, (packed.tokens + 1) % 61, packed.tokens), targets)
    np.testing.assert_allclose(losses.sum, other.sum, rtol=1e-6)
    np.testing.assert_allclose(losses.mtp_sum, other.mtp_sum, rtol=1e-6)

    padded = jnp.where(packed.mask, packed.tokens, 60)
    (loss, _), grads = run(parameters, packed.tokens, packed.targets)
    (other_loss, _), other_grads = run(parameters, padded, packed.targets)
    np.testing.assert_allclose(loss, other_loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other_grads), strict=True):
        assert jnp.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=1e-6 * float(jnp.max(jnp.abs(b))))


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_a_row_of_padding_alone_changes_no_gradient(jit, make, packed, trainable, normwise, family):
    model = make(family)
    parameters, rest = trainable(model)

    @jit
    def gradient(parameters, batch):
        return jax.grad(lambda p: weighted_loss(eqx.combine(p, rest).losses(batch)))(parameters)

    more = type(packed)(*(jnp.concatenate([field, field[:1]]) for field in packed))
    more = more._replace(
        mask=more.mask.at[2].set(False), targets=more.targets.at[2].set(-100), tokens=more.tokens.at[2].set(0)
    )
    for a, b in zip(
        jax.tree.leaves(gradient(parameters, more)), jax.tree.leaves(gradient(parameters, packed)), strict=True
    ):
        assert normwise(a, b) < 3e-6  # other shapes, other roundings


@pytest.mark.parametrize("family", ["llama-tied-biased", "deepseek-v3", "deepseek-v2"])
def test_every_parameter_gets_a_gradient_and_no_buffer_does(jit, make, packed, trainable, family):
    parameters, rest = trainable(make(family))
    assert all(path[-1].name == "value" for path, _ in jax.tree_util.tree_flatten_with_path(rest)[0])
    grads = jit(jax.grad(lambda p: weighted_loss(eqx.combine(p, rest).losses(packed))))(parameters)
    for path, grad in jax.tree_util.tree_flatten_with_path(grads)[0]:
        name = jax.tree_util.keystr(path)
        if "segments" in name:  # a layer that no gradient reaches can't hide in its stack
            assert (jnp.abs(grad).reshape(grad.shape[0], -1).max(axis=1) > 0).all(), name
        assert jnp.abs(grad).max() > 0, name


def test_a_tied_embedding_is_one_leaf_with_both_gradients(jit, make, configs, packed, normwise):
    tied = make("llama-tied-biased")
    untied = make(dataclasses.replace(configs["llama-tied-biased"], tie_word_embeddings=False))
    untied = eqx.tree_at(lambda m: (m.embedding, m.head.weight), untied, (tied.embedding, tied.embedding.weight))
    untied = eqx.tree_at(lambda m: (m.layers, m.norm), untied, (tied.layers, tied.norm))
    assert len(jax.tree.leaves(untied)) == len(jax.tree.leaves(tied)) + 1
    gradient = jit(jax.grad(lambda m: weighted_loss(m.losses(packed))))
    both, separate = gradient(tied), gradient(untied)
    assert normwise(both.embedding.weight, separate.embedding.weight + separate.head.weight) < 1e-6


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_bfloat16_stays_bfloat16_and_near_float32(jit, make, packed, normwise, family):
    model = make(family)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)
    tokens = packed.tokens
    states, _ = jit(lambda m: m.hidden(tokens))(half)
    assert states.dtype == jnp.bfloat16
    if family == "llama":  # elsewhere a rounded router sends a few tokens elsewhere
        rounded = jax.tree.map(lambda x: x.astype(jnp.float32), half)
        assert normwise(states.astype(jnp.float32), jit(lambda m: m.hidden(tokens))(rounded)[0]) < 0.02
    assert jit(lambda m: m(tokens))(half).dtype == jnp.bfloat16
    losses = jit(lambda m: m.losses(packed))(half)
    assert {leaf.dtype for leaf in jax.tree.leaves(losses)} == {jnp.dtype(jnp.float32)}


# Every preset once for each family; in the other ways to run layers two of them that differ in every annotation.
WAYS = [
    *((preset, "llama", True, ()) for preset in policies.presets() if preset != "offload_latents"),
    *((preset, "deepseek-v3", True, (2,)) for preset in policies.presets()),
    ("offload_qkv", "llama", True, (1, 2)),
    ("offload_all", "llama", False, (1, 2)),
    ("offload_latents", "deepseek-v3", True, ()),
    ("offload_all", "deepseek-v3", False, ()),
    ("recompute_all", "deepseek-v3", False, ()),
]


@pytest.mark.parametrize(("preset", "family", "scan", "segments"), WAYS)
def test_every_preset_gives_the_loss_and_gradients_of_no_policy(jit, 
    make, packed, trainable, normwise, plain_gradients, preset, family, scan, segments
):
    parameters, rest = trainable(policies.place(make(family, scan=scan, segments=segments), preset))

    @jit
    def gradient(parameters):
        def loss(parameters):
            return weighted_loss(eqx.combine(parameters, rest).losses(packed, checkpoint=policies.checkpoint))

        return jax.value_and_grad(loss)(parameters)

    expected_loss, expected = plain_gradients(family, scan, segments)
    loss, grads = gradient(parameters)
    assert abs(loss - expected_loss) <= 1e-6 * abs(expected_loss)
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path(grads)[0], jax.tree.leaves(expected), strict=True
    ):
        assert normwise(a, b) < 1e-6, jax.tree_util.keystr(path)


@pytest.fixture(scope="module")
def plain_gradients(jit, make, packed, trainable):
    known = {}

    def plain(family, scan, segments):
        if (family, scan, segments) not in known:
            parameters, rest = trainable(make(family, scan=scan, segments=segments))
            known[family, scan, segments] = jit(
                jax.value_and_grad(lambda p: weighted_loss(eqx.combine(p, rest).losses(packed)))
            )(parameters)
        return known[family, scan, segments]

    return plain


@pytest.mark.parametrize("preset", list(policies.presets()))
@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_every_activation_waits_where_its_preset_puts_it(make, packed, family, preset):
    if preset == "offload_latents" and family == "llama":
        with pytest.raises(ValueError, match="doesn't fit Llama"):
            policies.place(make(family), preset)
        return
    model = policies.place(make(family, segments=(2,)), preset)
    found = policies.check(lambda m: weighted_loss(m.losses(packed, checkpoint=policies.checkpoint)), model)
    assert found.raw == ()  # no block holds on to its unnamed input
    assert not [s for s in found.statuses.values() if s.startswith(("same value", "not needed", "never tagged"))]
    if preset in ("save_all", "offload_all"):  # what is kept besides belongs to embedding, final norm and head
        unnamed = [entry for entry in found.entries if entry.kind == "unnamed"]
        assert all(entry.layers <= 2 and entry.shape[-1] in (1, 24, 70) for entry in unnamed)


def test_without_experts_or_mtp(configs, make, packed):
    config = dataclasses.replace(configs["deepseek-v3"], first_k_dense_replace=4, num_nextn_predict_layers=0)
    model = make(config)
    assert model.moe_layers is None
    assert model.losses(packed).stats == {}
    model = make(dataclasses.replace(config, first_k_dense_replace=0, n_shared_experts=None))
    assert model.dense_layers is None and model.moe_layers.segments[0].moe.shared is None
    assert set(model.losses(packed).stats) == {"moe_layers"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": jnp.zeros((2, 70))}, r"tokens must be integers \[batch, sequence\], got float32\[2, 70\]"),
        ({"tokens": jnp.zeros(70, int)}, r"tokens must be integers \[batch, sequence\], got int32\[70\]"),
        ({"positions": jnp.zeros((2, 69), int)}, r"positions must be integers, \[1 or 2, 70\]"),
        ({"positions": jnp.zeros((3, 70), int)}, r"positions must be integers"),
        ({"segment_ids": jnp.zeros((1, 70), int)}, r"segment_ids must be integers, \[2, 70\]"),
        ({"mask": jnp.ones((2, 70), int)}, r"mask must be True at real tokens, \[2, 70\] like tokens, got int32"),
    ],
)
def test_bad_inputs_are_named(make, packed, changes, message):
    arguments = {"tokens": packed.tokens} | inputs(packed) | changes
    with pytest.raises(ValueError, match=message):
        check_inputs(**arguments)
    with pytest.raises((ValueError, TypeCheckError)):
        make("llama")(**arguments)


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_equal_models_share_a_compilation_and_plain_jax_takes_them(jit, make, packed, family):
    traces = []

    @jit
    def run(model, tokens):
        traces.append(1)
        return model(tokens)

    run(make(family), packed.tokens)
    run(make(family, seed=8), packed.tokens)
    assert len(traces) == 1
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(make(family)))
