"""What the census says of programs over meshes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from overspill import policies, zoo
from overspill.layers import MLP
from overspill.policies import axes


@pytest.fixture
def mlp():
    return policies.place(MLP(16, 32, key=jax.random.key(0)), {"gate": "host", "hidden": "recompute"})


def test_inside_shard_map(mlp, make_mesh):
    """Values of one device stand for those of all."""
    mesh, x = make_mesh("data=8"), jnp.ones((8, 4, 16))

    def over(function):
        return jax.shard_map(function, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))

    with pytest.raises(policies.PlacementNotApplied, match="'gate' is annotated 'host' but waits as 'device'"):
        policies.check(over(lambda mlp, x: mlp(x)), mlp, x)
    census = policies.check(over(lambda mlp, x: policies.checkpoint(mlp)(x)), mlp, x)
    assert census.devices == 8 and census.statuses["hidden"] == "recomputed"
    (gate,) = census.of("gate")
    assert (gate.memory, gate.bytes, gate.shard_bytes) == ("host", 8 * 4 * 32 * 4, 4 * 32 * 4)
    assert census.unnamed_share == 0


def test_cut_by_the_layout_in_use(mlp, make_mesh):
    place = zoo.layout(make_mesh("data=2,tensor=4"))

    def run(mlp, x):
        with axes.use(place):
            return policies.checkpoint(mlp)(x)

    x = jnp.ones((8, 4, 16))
    whole, cut = policies.check(lambda mlp, x: policies.checkpoint(mlp)(x), mlp, x), policies.check(run, mlp, x)
    assert whole.devices == 1 and cut.devices == 8
    for name in ("gate", "up"):
        (one,), (other,) = whole.of(name), cut.of(name)
        assert one.bytes == one.shard_bytes == other.bytes == other.shard_bytes * 8
    assert cut.bytes(memory="host", each=True) * 8 == cut.host_bytes == whole.host_bytes
    assert "one device" in str(cut) and "one device" not in str(whole)


def test_arguments_say_how_they_are_cut(mlp, make_mesh):
    """Values without a constraint are cut like what they come from; weights as they lie."""
    mesh = make_mesh("data=8")
    x = jax.device_put(jnp.ones((8, 4, 16)), jax.NamedSharding(mesh, P("data")))
    census = policies.census(lambda x: jnp.sum(jnp.sin(x) * jnp.cos(x).sum(axis=2, keepdims=True)), x)
    kept = [entry for entry in census.entries if entry.kind != "constant"]
    assert kept and all(entry.shard_bytes * 8 == entry.bytes for entry in kept)
