"""Tokens exchanged in rounds: the numbers of one exchange, in less room."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill import policies
from overspill.layers import in_rounds
from overspill.layers.grid import Grid
from overspill.layers.rounds import exchanged_in_rounds
from overspill.layers.stack import Stack
from overspill.policies import axes
from overspill.policies.activation import annotations
from overspill.zoo import layout, shard

from .test_experts import (
    BATCH,
    COPIED,
    COTANGENT,
    FEATURES,
    MASK,
    SEQUENCE,
    TOP_K,
    TWISTED,
    X,
    all_close,
    check_any_load,
    check_same_as_on_one_device,
    make,
    routed,
)  # fmt: skip


@pytest.mark.parametrize(
    "mesh, rules, kind, rounds",
    [
        ("expert=8", None, "deepseek", 3),
        ("data=2,expert=4", None, "gpt-oss", 2),
        ("fsdp=2,expert=2,tensor=2", None, "deepseek", 4),
        ("fsdp=2,expert=2,tensor=2", None, "gpt-oss", 5),
        ("sequence=2,expert=4", None, "gpt-oss", 1000),
        ("tensor=8", None, "deepseek", 7),
        ("data=2,expert=4", COPIED, "gpt-oss", 3),
        ("data=2,expert=2,tensor=2", TWISTED, "gpt-oss", 2),
    ],
)
def test_same_as_on_one_device(make_mesh, mesh, rules, kind, rounds):
    text, place = check_same_as_on_one_device(make_mesh, mesh, rules, kind, lambda layer: in_rounds(layer, rounds))
    largest = max(int(n) for n in re.findall(rf"= f32\[(\d+),{FEATURES}\]", text))
    assert largest < BATCH * SEQUENCE * TOP_K or rounds < 4 or not Grid(place).traded, "a buffer for all rows at once"


@pytest.mark.parametrize("backend", ["padded", "ragged"])
@pytest.mark.parametrize(
    "mesh, rules", [("expert=8", None), ("data=2,expert=4", COPIED), ("data=2,expert=2,tensor=2", TWISTED)]
)
def test_any_load_token_by_token(make_mesh, monkeypatch, mesh, rules, backend):
    def through(grid, experts, x, indices, weights, mask):
        return exchanged_in_rounds(grid, 5, experts, x, indices, weights, token_mask=mask)

    check_any_load(make_mesh, monkeypatch, mesh, rules, backend, through)


def exchanges(text):
    """How many all-to-alls of rows of features a compiled program has."""
    lines = (line for line in text.splitlines() if " all-to-all(" in line)
    return sum(bool(re.match(rf"\s*%\S+ = \(?f32\[[\d,]*,{FEATURES}\]", line)) for line in lines)


def test_a_checkpoint_around_rounds_computes_nothing_twice(make_mesh):
    place = layout(make_mesh("expert=8"))
    block = jax.tree.map(lambda *leaves: jnp.stack(leaves) / 2, *(make("gpt-oss", seed) for seed in range(2)))
    stack = policies.place(Stack((in_rounds(block, 3),), (2,)), {"*.router.logits": "host", "*": "recompute"})

    def run(stack, place, checkpoint):
        parameters, rest = eqx.partition(stack, eqx.is_inexact_array)

        def loss(parameters, x):
            with axes.use(place):
                y, stats = eqx.combine(parameters, rest)(x, checkpoint=checkpoint, token_mask=jnp.asarray(MASK))
            return jnp.sum(y * COTANGENT), stats.load

        function = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
        program = function.lower(parameters, X).compile()
        return program(parameters, X), program.as_text()

    want, _ = run(stack, None, None)
    bare, text = run(shard(stack, place), place, None)
    kept, checkpointed = run(shard(stack, place), place, policies.checkpoint)
    for got in (bare, kept):
        np.testing.assert_array_equal(got[1], want[1])
        all_close(jax.tree.leaves(got), jax.tree.leaves(want))
    # There and back in the forward pass; in the backward pass the same anew, and the gradients' ways.
    assert 4 <= exchanges(text) == exchanges(checkpointed)


def test_gradients_of_narrow_weights_are_summed_in_float32(make_mesh):
    place = layout(make_mesh("fsdp=2,expert=4"))
    indices, weights = map(jnp.asarray, routed("uneven"))
    experts = shard(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), make("deepseek").experts), place)

    def gradients(rounds):
        @jax.jit
        @jax.grad
        def of_weights(experts):
            with axes.use(place):
                y, _ = exchanged_in_rounds(
                    Grid(place), rounds, experts, jnp.asarray(X, jnp.bfloat16), indices, weights
                )
            return jnp.sum(y.astype(jnp.float32) * COTANGENT)

        return of_weights(experts)

    for once, often in zip(*map(jax.tree.leaves, (gradients(1), gradients(12))), strict=True):
        assert often.dtype == jnp.bfloat16
        once, often = np.asarray(once, np.float64), np.asarray(often, np.float64)
        # Sums that are rounded once; rounded in each round they would differ by twice as much and more.
        assert np.linalg.norm(once - often) <= 2e-3 * np.linalg.norm(once)


@pytest.mark.parametrize("rounds", [0, -1, True])
def test_refuses(rounds):
    with pytest.raises(ValueError, match="rounds must be a positive integer"):
        in_rounds(make("deepseek"), rounds)


def test_without_a_mesh_all_are_computed_at_once():
    layer = make("gpt-oss")
    y, stats = in_rounds(layer, 4)(jnp.asarray(X))
    want, expected_stats = layer(jnp.asarray(X))
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(stats.load, expected_stats.load)
    assert in_rounds(layer, 4).rounds.count == 4 and layer.rounds.count == 1


def test_what_is_in_rounds_has_no_place():
    layer = policies.place(make("deepseek"), {"*": "host"})
    inside = {"dispatched", "expert_output", "experts.gate", "experts.up", "experts.hidden"}
    places = lambda tree: {row.path: row.placement for row in annotations(tree)}
    cut = in_rounds(layer, 4)
    assert places(cut) == {path: place for path, place in places(layer).items() if path not in inside}
    assert places(in_rounds(cut, 1)) == places(layer) | dict.fromkeys(inside, policies.Placement.DEVICE)
    assert in_rounds(layer, 1) == layer and jax.tree.leaves(cut) == jax.tree.leaves(layer)
    with pytest.raises(ValueError, match=r"experts\.gate"):
        policies.place(cut, {"experts.gate": "host"})
