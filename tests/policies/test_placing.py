import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill.policies import Activation, Placement, place, presets
from overspill.policies.activation import annotations, named


def placements(tree):
    return {path: activation.placement.value for path, activation in annotations(tree)}


def test_later_rules_win(cell):
    placed = place(cell, {"*": "host", "*.h*": "recompute", "hidden": Placement.DEVICE})
    assert placements(placed) == {
        "block_input": "host",
        "projected": "host",
        "hidden": "device",
        "output": "host",
    }


def test_unmatched_activations_keep_their_placement(cell):
    placed = place(place(cell, {"*": "host"}), {"*.output": "recompute"})
    assert placements(placed)["projected"] == "host"
    assert placements(placed)["output"] == "recompute"


def test_placing_touches_annotations_only(cell):
    placed = place(cell, "offload_all")
    before, after = jax.tree.leaves(cell), jax.tree.leaves(placed)
    assert len(before) == len(after) == 2
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert placed.fault == cell.fault
    assert placements(cell)["hidden"] == "device"  # the original stays as it was


def test_glob_that_matches_nothing_lists_near_matches(cell):
    with pytest.raises(ValueError, match=r"'\*\.hiden' matches no activation; did you mean '\*\.hidden'"):
        place(cell, {"*.hiden": "host"})


def test_glob_is_case_sensitive(cell):
    with pytest.raises(ValueError, match="matches no activation"):
        place(cell, {"*.Hidden": "host"})


@pytest.mark.parametrize("value", ["hots", "pinned_host", "unpinned_host", None, 3])
def test_unknown_placement_is_named(cell, value):
    with pytest.raises(ValueError, match=f"{value!r} is not one of 'device', 'host', 'recompute'"):
        place(cell, {"*.hidden": value})


def test_block_input_cannot_be_recomputed(cell):
    with pytest.raises(ValueError, match="'block_input' can't be recomputed"):
        place(cell, {"*": "recompute"})
    assert placements(place(cell, {"*": "recompute", "*.block_input": "host"}))["block_input"] == "host"


def test_unknown_preset_names_the_nearest(cell):
    with pytest.raises(ValueError, match="did you mean 'offload_qkv'"):
        place(cell, "offload_kqv")


@pytest.mark.parametrize("preset", ["offload_qkv", "offload_mlp", "offload_latents"])
def test_preset_that_does_not_fit_says_what_it_fits(preset):
    tree = [Activation("something")]
    with pytest.raises(ValueError, match=f"{preset!r} doesn't fit list.*DeepSeek"):
        place(tree, preset)


def test_every_preset_is_described():
    assert set(presets()) == {
        "save_all",
        "recompute_all",
        "offload_qkv",
        "offload_block_inputs",
        "offload_mlp",
        "offload_all",
        "offload_latents",
    }
    assert all(len(line) > 20 for line in presets().values())


def test_preset_of_ones_own(cell):
    placed = place(cell, lambda tree: {row.path: "host" for row in annotations(tree) if row.path < "i"})
    assert placements(placed) == {"block_input": "host", "projected": "device", "hidden": "host", "output": "device"}


def test_nothing_to_place():
    with pytest.raises(ValueError, match="holds no Activation"):
        place({"a": jnp.ones(2)}, "save_all")


def test_names_are_paths_and_the_outermost_decides(cell):
    tree = {"a": cell, "b": (cell, cell)}
    assert [n.path for _, n in annotations(named(tree))] == [path for path, _ in annotations(tree)]
    assert len({path for path, _ in annotations(tree)}) == 12
    inner = named(cell)
    assert [n.path for _, n in annotations(named({"a": inner}))] == [n.path for _, n in annotations(inner)]


def test_activation_is_static_data(cell):
    leaves = jax.tree.leaves(named(cell))
    assert all(eqx.is_array(leaf) for leaf in leaves)
    again = type(cell)(jax.random.key(1))
    assert jax.tree.structure(cell) == jax.tree.structure(again)
    assert hash(jax.tree.structure(cell)) == hash(jax.tree.structure(again))


def test_activation_outside_checkpoint_is_the_identity():
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(Activation("a", "host")(x), x)


def test_keys_that_look_like_globs(cell):
    tree = place({"l[0]": cell, "l*": cell}, "offload_all")
    assert set(placements(tree).values()) == {"host"}


def test_two_activations_at_one_path_are_refused():
    with pytest.raises(ValueError, match="two activations are at the path 'a.b'"):
        place({"a.b": Activation("x"), "a": {"b": Activation("y")}}, {"*": "host"})
