import dataclasses
import json
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from overspill import policies
from overspill.zoo.building import abstract, build, parameters, resegment
from overspill.zoo.train import init_state, make_train_step


def test_the_largest_models_are_built_from_shapes_in_no_time():
    start = time.process_time()
    model = abstract("deepseek-v3", dtype=jnp.bfloat16, segments=(20, 40))
    assert time.process_time() - start < 5
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model))
    logits = jax.eval_shape(lambda m, t: m(t), model, jax.ShapeDtypeStruct((1, 128), jnp.int32))
    assert logits.shape == (1, 128, 129280) and logits.dtype == jnp.bfloat16
    assert model.moe_layers.segments[0].moe.router.weight.dtype == jnp.float32
    assert [s.lengths for s in model.stacks().values()] == [(3,), (17, 20, 21)]


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_a_seed_decides_the_weights_and_nothing_else_does(configs, family):
    config = configs[family]
    model = build(config, key=jax.random.key(5))
    for other in (
        build(config, key=jax.random.key(5), segments=(1, 2)),
        build(config, key=jax.random.key(5), scan=False, placements="offload_all"),
    ):
        joined = resegment(other, ())
        for (path, a), b in zip(
            jax.tree_util.tree_flatten_with_path(joined)[0], jax.tree.leaves(model), strict=True
        ):
            np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))
    different = build(config, key=jax.random.key(6))
    assert not jnp.array_equal(different.embedding.weight, model.embedding.weight)
    layers = model.layers if family == "llama" else model.moe_layers
    drawn = [leaf for leaf in jax.tree.leaves(layers) if leaf.ndim > 2]
    assert all(not jnp.array_equal(leaf[0], leaf[1]) for leaf in drawn)
    assert all(0.9 < float(leaf.std()) / config.initializer_range < 1.1 for leaf in drawn)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), abstract(config))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), model) == shapes


def test_bfloat16_weights_are_float32_draws_rounded_and_routers_stay(configs):
    model, half = (build(configs["deepseek-v3"], dtype=dtype) for dtype in (jnp.float32, jnp.bfloat16))
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(half)[0], jax.tree.leaves(model), strict=True):
        assert a.dtype == (jnp.float32 if "router" in jax.tree_util.keystr(path) else jnp.bfloat16)
        np.testing.assert_array_equal(a, b.astype(a.dtype))


def test_resegmented_models_and_states_compute_the_same(make, packed, jit, normwise):
    model = make("deepseek-v3", segments=(2,))
    tokens = packed.tokens
    parameters_, rest = eqx.partition(model, eqx.is_array)
    state = {"parameters": parameters_, "mu": jax.tree.map(lambda x: 2 * x, parameters_), "count": jnp.zeros(())}
    cut = resegment(state, (1, 3))
    again = eqx.combine(cut["parameters"], resegment(rest, (1, 3)))
    assert again.moe_layers.lengths == (2, 1) and again.dense_layers.lengths == (1,)
    assert jax.tree.structure(again) == jax.tree.structure(make("deepseek-v3", segments=(3,)))
    np.testing.assert_array_equal(
        cut["mu"].moe_layers.segments[1].moe.experts.up_weight[0], 2 * model.moe_layers.layer(3).moe.experts.up_weight
    )
    run = jit(lambda m: m(tokens))
    assert normwise(run(again), run(model)) < 1e-6
    assert resegment(abstract(model.config), (1, 2, 3)).moe_layers.lengths == (1, 1, 1)


def test_a_training_state_is_cut_with_its_model(make):
    model = make("deepseek-v3", segments=(2,))
    optimizer = optax.adam(1e-3)
    state = init_state(model, optimizer, key=jax.random.key(0))
    state = eqx.tree_at(lambda s: s.opt_state, state, jax.tree.map(lambda x: x + 1, state.opt_state))
    cut, other = resegment(state, (1, 3), model=model), resegment(model, (1, 3))
    expected = init_state(other, optimizer, key=jax.random.key(0))
    assert jax.tree.structure(cut) == jax.tree.structure(expected)
    for path, leaf in expected.params.items():
        np.testing.assert_array_equal(cut.params[path], leaf)
        assert cut.params[path].sharding == leaf.sharding and cut.params[path].committed
        assert cut.opt_state[0].mu[path].shape == leaf.shape and (cut.opt_state[0].mu[path] == 1).all()
    trained = make_train_step(other, optimizer).trained(cut)
    assert all(jnp.array_equal(a, b) for a, b in zip(jax.tree.leaves(trained), jax.tree.leaves(other), strict=True))
    back = resegment(cut, (2,), model=other)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    with pytest.raises(ValueError, match="holds no stack.*model=model"):
        resegment(state, (1,))
    with pytest.raises(ValueError, match="the state has 'moe_layers.segments.1"):
        resegment(state, (1,), model=resegment(model, ()))
    with pytest.raises(ValueError, match="the state has no 'moe_layers.segments.1"):
        resegment(resegment(state, (), model=model), (1,), model=model)


def test_one_line_of_repr(make):
    model = abstract("deepseek-v3", dtype=jnp.bfloat16, segments=range(1, 61))
    text = repr(model)
    assert "\n" not in text and len(text) < 400
    for part in ("DeepSeek(682,636,487,424 parameters", "bfloat16 and float32", "1.24 TiB", "61 layers", "58 segments"):
        assert part in text
    seen = []
    small = make("llama")
    jax.jit(lambda m: seen.append(repr(m)))(small)
    assert seen == [repr(small)] and "float32" in repr(small)
    nothing, _ = eqx.partition(small, lambda _: False)
    assert "0 parameters" in repr(nothing)
    for leaf in jax.tree.leaves(small):
        leaf.delete()
    assert repr(small) == seen[0]


def test_files_and_dictionaries_are_built_from_too(tmp_path):
    values = {"model_type": "qwen3", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "head_dim": 8,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    counts = {parameters(source) for source in (values, tmp_path, tmp_path / "config.json", abstract(values))}
    heads = 24 * 8 * (4 + 2 + 2 + 4) + 2 * 8
    assert {count.total for count in counts} == {2 * 61 * 24 + 2 * (heads + 3 * 24 * 20 + 2 * 24) + 24}
    assert build(tmp_path).config == build(values).config


def test_placements_are_given_while_building(configs):
    model = abstract(configs["deepseek-v3"], placements={"*": "device", "*.attention.*": "host", "mtp.*": "recompute",
                                                         "mtp.0.block.block_input": "host"})  # fmt: skip
    rows = {row.path: row.placement for row in policies.activation.annotations(model)}
    assert rows["moe_layers.segments.0.attention.kv_latent"] == "host"
    assert rows["mtp.0.joined"] == "recompute" and rows["mtp.0.block.block_input"] == "host"
    assert len(set(rows)) == len(policies.activation.annotations(model))
    with pytest.raises(ValueError, match="matches no activation"):
        abstract(configs["llama"], placements={"*.moe.*": "host"})


@pytest.mark.parametrize("segments", [(0,), (4,), (2, 1), (1, 1), (-1,)])
def test_segments_that_make_no_sense(configs, segments):
    for config in (configs["llama"], configs["deepseek-v3"]):
        with pytest.raises(ValueError, match="increasing layer indices between 1 and 3"):
            abstract(config, segments=segments)
        with pytest.raises(ValueError, match="increasing layer indices between 1 and 3"):
            resegment(abstract(config), segments)


def test_other_bad_arguments(configs):
    with pytest.raises(ValueError, match="no model is called 'deepseek-v33'; did you mean 'deepseek-v3'"):
        build("deepseek-v33")
    with pytest.raises(ValueError, match="need a floating dtype such as jax.numpy.bfloat16, got .*int8"):
        build(configs["llama"], dtype=jnp.int8)
    with pytest.raises(ValueError, match="holds no stack of layers"):
        resegment({"a": jnp.zeros(3)}, (1,))


def test_the_program_of_a_model_does_not_grow_with_depth(configs):
    """The program of forward and backward for 60 layers is that of 6, but for numbers in it."""

    def size(layers):
        config = dataclasses.replace(configs["llama"], num_hidden_layers=layers)
        loss = jax.grad(lambda m, t: jnp.sum(m(t, checkpoint=policies.checkpoint)))
        lowered = jax.jit(loss).lower(abstract(config, placements="offload_qkv"), jnp.zeros((1, 8), int))
        return len(lowered.as_text())

    assert size(60) <= 1.05 * size(6)
