"""A sequence cut over devices, and what the compiler makes of attention, mask and embedding over a mesh."""

import dataclasses
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


@pytest.fixture(scope="module")
def one_device():
    """`one_device(name)`: the model with random parameters, and its loss and gradients."""
    made = {}

    def make(name):
        if name not in made:
            model = randomised(zoo.build(CONFIGS[name], placements="offload_all"))
            run, arrays = program(model)
            made[name] = model, run(arrays, batch())
        return made[name]

    return make


def check(got, want):
    assert abs(got[0] - want[0]) < 1e-6 * abs(want[0])
    for (path, b), a in zip(jax.tree_util.tree_leaves_with_path(want[1]), jax.tree.leaves(got[1]), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.linalg.norm(a - b)
        assert error <= 1e-6 * np.linalg.norm(b), f"{jax.tree_util.keystr(path)}: {error / np.linalg.norm(b)}"


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
def test_a_cut_sequence_is_exact(one_device, make_mesh, capfd, name, mesh, rules):
    model, want = one_device(name)
    mesh = make_mesh(mesh)
    run, args = over(model, layout(mesh, rules_for(mesh) | rules))
    check(run(*args), want)
    assert "rematerialization" not in capfd.readouterr().err


def test_a_cut_sequence_is_exact_in_a_mesh_with_explicit_axes(one_device, make_mesh):
    model, want = one_device("sinks")
    place = layout(make_mesh("fsdp=2,sequence=2,tensor=2", AxisType.Explicit))
    run, args = over(model, place)
    with jax.set_mesh(place.mesh):
        check(run(*args), want)


def gathers(text):
    """Shape and origin of what each all-gather of a compiled program gives."""
    return re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(.*?op_name=\"([^\"]*)\"", text)


@pytest.mark.parametrize(
    ("name", "mesh", "rules"),
    [
        ("sinks", "data=2,sequence=2,tensor=2", {}),
        ("one kv head", "data=2,sequence=2,tensor=2", {"kv_heads": ()}),
        ("indexer", "data=2,sequence=2,tensor=2", {}),
    ],
)
def test_only_keys_and_values_are_gathered(one_device, make_mesh, capfd, name, mesh, rules):
    model, _ = one_device(name)
    mesh = make_mesh(mesh)
    run, args = over(model, layout(mesh, rules_for(mesh) | rules))
    found = gathers(run.lower(*args).compile().as_text())
    assert "rematerialization" not in capfd.readouterr().err
    assert found
    for shape, origin in found:
        sizes = [int(n) for n in shape.split(",")]
        # A device has half of the rows; keys, values, ids and masks are the only things it has whole rows of.
        assert ROWS not in sizes or LENGTH not in sizes, (shape, origin)
        assert LENGTH not in sizes or "attention" in origin or "indexer" in origin or "mask" in origin, (shape, origin)
        # Fewer features than those of all query heads: queries stay where they are.
        assert np.prod(sizes) <= ROWS // 2 * LENGTH * 32, (shape, origin)


@pytest.mark.parametrize("name", ["sinks", "mtp"])
def test_names_hold_over_a_mesh(one_device, make_mesh, name):
    """The value that gets a name is the one that its sharding was asked for, and no other copy is kept."""
    model, _ = one_device(name)
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
        entries, wanted = found.of(path), alone.of(path)
        assert [(e.kind, e.shape, e.memory) for e in entries] == [(e.kind, e.shape, e.memory) for e in wanted], path
