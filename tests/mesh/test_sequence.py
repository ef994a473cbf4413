"""A sequence cut over devices, and what the compiler makes of attention, mask and embedding over a mesh."""

import dataclasses
import functools
import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from overspill import policies, zoo
from overspill.policies import axes
from overspill.zoo.data import Batch
from overspill.zoo.sharding import layout, rules_for, shard

ROWS, LENGTH, VOCAB = 4, 72, 48
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
LATENT = SIZES | {
    "moe_intermediate_size": 24, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}  # fmt: skip
CONFIGS = {
    "window": zoo.LlamaConfig(**GROUPED, sliding_window=20, qk_norm="head"),
    # As in gpt-oss: sinks, and windows in every other layer.
    "sinks": zoo.LlamaConfig(
        **GROUPED, attention_sinks=True, sliding_window=20, layer_types=("sliding_attention", "full_attention")
    ),
    "one kv head": zoo.LlamaConfig(**GROUPED | {"num_key_value_heads": 1}, tie_word_embeddings=True),
    "mtp": dataclasses.replace(
        zoo.from_config("overspill-deepseek-tiny"), **LATENT | {"num_hidden_layers": 1}, num_nextn_predict_layers=2
    ),
    "indexer": dataclasses.replace(
        zoo.from_config("overspill-deepseek-tiny"), **LATENT, first_k_dense_replace=2, num_nextn_predict_layers=0,
        index_n_heads=2, index_head_dim=8, index_topk=10,
    ),
}  # fmt: skip


def randomised(tree, seed=3):
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    new = [
        leaf + 0.1 * jax.random.normal(key, leaf.shape, leaf.dtype) if eqx.is_inexact_array(leaf) else leaf
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(treedef, new)


def batch():
    """Packed documents that end anywhere, padding in the last row, and a few targets that don't count."""
    keys = jax.random.split(jax.random.key(0), 3)
    tokens = jax.random.randint(keys[0], (ROWS, LENGTH), 0, VOCAB)
    segments = jnp.cumsum(jax.random.bernoulli(keys[1], 0.05, tokens.shape), axis=1).astype(jnp.int32)
    mask = jnp.ones(tokens.shape, bool).at[-1, 50:].set(False)
    targets = jnp.where(jax.random.bernoulli(keys[2], 0.9, tokens.shape), jnp.roll(tokens, -1, axis=1), -100)
    return Batch(tokens, targets, None, segments, mask)


def program(model, place=None):
    """Loss and gradients of a model, its activations waiting in host memory and its blocks rematerialised."""
    arrays, static = eqx.partition(model, eqx.is_array)

    def run(arrays, batch):
        varied, rest = eqx.partition(arrays, eqx.is_inexact_array)

        def loss(varied):
            with axes.use(place):
                losses = eqx.combine(varied, rest, static).losses(batch, checkpoint=policies.checkpoint)
            balance = sum(jnp.sum(stats.balance_loss) for stats in losses.stats.values())
            return losses.sum / losses.count + jnp.sum(losses.mtp_sum) / 100 + balance

        return jax.value_and_grad(loss)(varied)

    return jax.jit(run), arrays


def over(model, place):
    """The same over a mesh: the jitted function and its arguments."""
    run, arrays = program(shard(model, place), place)
    return run, (arrays, jax.device_put(batch(), place.sharding("batch sequence")))


@functools.cache
def model_of(name):
    """The model with random parameters."""
    return randomised(zoo.build(CONFIGS[name], placements="offload_all"))


@functools.cache
def one_device(name):
    """Its loss and gradients on one device."""
    run, arrays = program(model_of(name))
    return run(arrays, batch())


def check(got, want):
    for (path, b), a in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error, name = np.linalg.norm(a - b), jax.tree_util.keystr(path)
        # The gradient of sinks is a sum whose terms cancel: another order of summing elsewhere shows in it most.
        assert error <= (3e-6 if name.endswith("sinks") else 1e-6) * np.linalg.norm(b), f"{name}: {error}"


@pytest.mark.parametrize(
    ("name", "mesh", "rules"),
    [
        ("window", "fsdp=2,sequence=4", {}),
        ("sinks", "sequence=2,tensor=2,data=2", {}),
        # Fewer kv heads than parts: each device has all of them.
        ("one kv head", "sequence=2,tensor=4", {"kv_heads": ()}),
        ("mtp", "fsdp=2,sequence=2,tensor=2", {}),
        ("indexer", "sequence=4,tensor=2", {}),
    ],
)
def test_a_cut_sequence_is_exact(make_mesh, capfd, name, mesh, rules):
    model, want = model_of(name), one_device(name)
    mesh = make_mesh(mesh)
    run, args = over(model, layout(mesh, rules_for(mesh) | rules))
    check(run(*args), want)
    assert "rematerialization" not in capfd.readouterr().err


def test_a_cut_sequence_is_exact_in_a_mesh_with_explicit_axes(make_mesh):
    model, want = model_of("sinks"), one_device("sinks")
    place = layout(make_mesh("fsdp=2,sequence=2,tensor=2", AxisType.Explicit))
    run, args = over(model, place)
    with jax.set_mesh(place.mesh):
        check(run(*args), want)


@pytest.mark.parametrize(
    ("name", "width", "rules"), [("sinks", 8, {}), ("one kv head", 8, {"kv_heads": ()}), ("indexer", 2 * 16, {})]
)
def test_only_keys_and_values_are_gathered(make_mesh, capfd, name, width, rules):
    """`width` is how many numbers a token has in the keys that belong to a device's heads."""
    mesh = make_mesh("data=2,sequence=2,tensor=2")
    run, args = over(model_of(name), layout(mesh, rules_for(mesh) | rules))
    text = run.lower(*args).compile().as_text()
    assert "rematerialization" not in capfd.readouterr().err
    shapes = [[int(n) for n in shape.split(",")] for shape in re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", text)]
    long = [shape for shape in shapes if LENGTH in shape]
    assert any(math.prod(shape) == ROWS // 2 * LENGTH * width for shape in long)
    for shape in long:
        # Of a device's own rows, and neither queries of all heads nor what a block hands on.
        assert ROWS not in shape
        assert math.prod(shape) <= ROWS // 2 * LENGTH * width
        assert SIZES["hidden_size"] not in shape


@pytest.mark.parametrize("name", ["sinks", "mtp"])
def test_names_hold_over_a_mesh(make_mesh, name):
    """The value that gets a name is the one that its sharding was asked for, and no other copy is kept."""
    model = model_of(name)
    place = layout(make_mesh("fsdp=2,sequence=2,tensor=2"))

    def loss(model, batch, place=None):
        with axes.use(place):
            losses = model.losses(batch, checkpoint=policies.checkpoint)
        return losses.sum + jnp.sum(losses.mtp_sum)

    alone = policies.check(loss, model, batch())
    found = policies.check(lambda model, batch: loss(model, batch, place), shard(model, place), batch())
    assert found.annotations == alone.annotations
    waiting = [path for path in alone.annotations if alone.of(path) and ".moe." not in path]
    assert len(waiting) > 10
    for path in waiting:
        assert found.statuses[path] == alone.statuses[path]
        entries, wanted = found.of(path), alone.of(path)
        assert [(e.kind, e.shape, e.memory) for e in entries] == [(e.kind, e.shape, e.memory) for e in wanted], path
