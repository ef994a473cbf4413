"""Cross-entropy over meshes: equal to one device, with each device's own tokens and part of the vocabulary."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from overspill.layers.loss import cross_entropy
from overspill.policies import axes
from overspill.zoo.sharding import layout

BATCH, SEQUENCE, FEATURES, VOCAB = 8, 72, 16, 48
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (BATCH, SEQUENCE, FEATURES), dtype)
    weight = jax.random.normal(keys[1], (VOCAB, FEATURES), dtype)
    targets = jax.random.randint(keys[2], (BATCH, SEQUENCE), 0, VOCAB).at[:, -1].set(-100)
    return hidden, weight, targets, jax.random.bernoulli(keys[3], 0.8, targets.shape)


def mean_loss(hidden, weight, targets, mask, chunk=None):
    total, count = cross_entropy(hidden, weight, targets, mask=mask, chunk=chunk)
    return 3 * total / count


def apart(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def over(place, arrays, chunk=None, in_use=True):
    """Loss and gradients with arrays laid out as a layout says."""
    hidden, weight, targets, mask = arrays
    put = lambda x, names: jax.device_put(x, place.sharding(names))  # noqa: E731
    tokens = "batch sequence"
    arrays = put(hidden, f"{tokens} _"), put(weight, "vocab embed"), put(targets, tokens), put(mask, tokens)

    @jax.jit
    def run(hidden, weight, targets, mask):
        with axes.use(place if in_use else None):
            return jax.value_and_grad(mean_loss, argnums=(0, 1))(hidden, weight, targets, mask, chunk)

    with jax.set_mesh(place.mesh):
        return run(*arrays), run.lower(*arrays)


@pytest.mark.parametrize(
    ("mesh", "rules", "kind", "chunk"),
    [
        ("data=2,fsdp=2,tensor=2", None, AUTO, None),
        ("data=2,fsdp=2,tensor=2", None, EXPLICIT, 7),
        ("fsdp=2,sequence=2,tensor=2", None, AUTO, 10),
        ("fsdp=4,sequence=2", None, EXPLICIT, 1),
        ("tensor=8", None, AUTO, 100),
        ("data=8", None, AUTO, None),
        ("expert=2,sequence=4", None, AUTO, None),
        # Other names; the weight's features cut over an axis without tokens; a vocabulary over two axes.
        ("x=2,y=2,z=2", {"batch": "x", "embed": "y", "vocab": "z"}, AUTO, None),
        ("x=2,y=2,z=2", {"batch": "x", "embed": "z", "vocab": ("y", "z")}, AUTO, 9),
        ("x=2,y=2,z=2", {"batch": "x", "vocab": ("x", "y")}, AUTO, None),
        ("x=2,y=4", {"embed": ("x", "y")}, EXPLICIT, None),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(make_mesh, mesh, rules, kind, chunk):
    place, arrays = layout(make_mesh(mesh, kind), rules), inputs()
    want, gradients = jax.jit(jax.value_and_grad(mean_loss, argnums=(0, 1)))(*arrays)
    (got, (hidden, weight)), _ = over(place, arrays, chunk)
    assert abs(got - want) < 1e-6 * want
    assert apart(hidden, gradients[0]) < 1e-6
    assert apart(weight, gradients[1]) < 1e-6
    if kind == AUTO:
        assert weight.sharding.is_equivalent_to(place.sharding("vocab embed"), 2)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_without_a_layout_in_use_the_compiler_cuts(make_mesh, kind):
    place, arrays = layout(make_mesh("data=2,fsdp=2,tensor=2", kind)), inputs()
    want, gradients = jax.jit(jax.value_and_grad(mean_loss, argnums=(0, 1)))(*arrays)
    (got, got_gradients), _ = over(place, arrays, in_use=False)
    assert abs(got - want) < 1e-6 * want
    assert all(apart(a, b) < 1e-6 for a, b in zip(got_gradients, gradients, strict=True))


def test_inside_shard_map(make_mesh):
    mesh, arrays = make_mesh("data=4,other=2"), inputs()
    want, gradients = jax.value_and_grad(mean_loss, argnums=(0, 1))(*arrays)
    rows, whole = PartitionSpec("data"), PartitionSpec()

    def local(hidden, weight, targets, mask):
        def loss(hidden, weight):
            total, count = cross_entropy(hidden, weight, targets, mask=mask)
            return 3 * jax.lax.psum(total, "data") / jax.lax.psum(count, "data")

        return jax.value_and_grad(loss, argnums=(0, 1))(hidden, weight)

    run = jax.shard_map(local, mesh=mesh, in_specs=(rows, whole, rows, rows), out_specs=(whole, (rows, whole)))
    got, got_gradients = jax.jit(run)(*arrays)
    assert abs(got - want) < 1e-6 * want
    assert all(apart(a, b) < 1e-6 for a, b in zip(got_gradients, gradients, strict=True))


def test_the_weight_gradient_is_summed_once_and_logits_stay_where_they_are(make_mesh):
    place = layout(make_mesh("fsdp=2,sequence=2,tensor=2"))
    _, lowered = over(place, inputs(jnp.bfloat16), chunk=4)
    text = lowered.compile().as_text()
    # Local tokens are 4 x 36, a device's part of the vocabulary is 24: no array is as large as its logits.
    assert not re.search(r"\[(4,36|8,72|144|576),(24|48)\]", text)
    sent = re.findall(r"= (\S+) (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(", text)
    # A loop over chunks holds no collective: each of these runs once.
    loops = set(re.findall(r"body=%?([\w.-]+)", text))
    bodies = [part for part in text.split("\n\n") if part.strip().split(" ")[0].lstrip("%") in loops]
    assert len(bodies) == len(loops) >= 2
    assert sent
    assert not any(kind in body for body in bodies for kind in ("all-reduce", "all-gather", "reduce-scatter"))


def test_no_target_counts(make_mesh):
    hidden, weight, targets, mask = inputs()
    arrays = hidden.at[0].set(jnp.inf), weight, jnp.full_like(targets, -100), mask
    place = layout(make_mesh("fsdp=2,sequence=2,tensor=2"))

    def total(hidden, weight, targets):
        with axes.use(place):
            return cross_entropy(hidden, weight, targets)[0]

    value, gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(*arrays[:3])
    assert value == 0
    assert not any(jnp.any(gradient) for gradient in gradients)


def test_a_target_outside_the_vocabulary_gives_nan(make_mesh):
    hidden, weight, targets, mask = inputs()
    place = layout(make_mesh("fsdp=4,tensor=2"))
    for wrong in (VOCAB, -1, VOCAB + 5):
        arrays = hidden, weight, targets.at[3, 3].set(wrong), mask.at[3, 3].set(True)
        with axes.use(place):
            assert jnp.isnan(cross_entropy(*arrays[:3], mask=arrays[3])[0])


def test_a_vocabulary_that_does_not_divide_is_an_error(make_mesh):
    hidden, weight, targets, _ = inputs()
    message = r"cross_entropy: the weight \[47, 16\].*47 vocab.*4 equal parts over mesh axis 'tensor'"
    with axes.use(layout(make_mesh("data=2,tensor=4"))), pytest.raises(ValueError, match=message):
        cross_entropy(hidden, weight[:47], targets)
