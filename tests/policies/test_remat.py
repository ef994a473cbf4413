import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill.policies import Activation, checkpoint, place, policy
from overspill.policies.jaxprs import subjaxprs
from overspill.policies.support import check_support

PLACINGS = ["save_all", "recompute_all", "offload_block_inputs", "offload_all"]


def normwise(a, b):
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def host_values(jaxpr):
    """How many values of a jaxpr, at any depth, lie in host memory."""
    count = sum(v.aval.memory_space == jax.memory.Space.Host for e in jaxpr.eqns for v in e.outvars)
    return count + sum(host_values(sub) for e in jaxpr.eqns for sub in subjaxprs(e))


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("preset", PLACINGS)
def test_values_and_gradients_are_those_of_no_policy(tower, x, preset, scan):
    model = place(tower(scan=scan), preset)

    @jax.jit
    def run(model, x):
        return jax.value_and_grad(lambda m, x: jnp.sum(m(x) ** 2), argnums=(0, 1))(model, x)

    @jax.jit
    def plain(model, x):
        return jax.value_and_grad(lambda m, x: jnp.sum(m(x, None) ** 2), argnums=(0, 1))(model, x)

    value, grads = run(model, x)
    expected, expected_grads = plain(model, x)
    assert abs(value - expected) <= 1e-6 * abs(expected)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert normwise(a, b) < 1e-6


def test_one_policy_object_for_equal_annotations(cell):
    a, b = place(cell, "offload_all"), place(cell, {"*": "host"})
    assert policy(a) is policy(b)
    assert policy(a) is not policy(cell)


def test_no_retracing_for_equal_models(make_cell, x):
    traces = []

    @jax.jit
    def run(model, x):
        traces.append(1)
        return jax.grad(lambda m: checkpoint(m)(x, 1.0).sum())(model)

    for seed in range(3):
        run(place(make_cell(jax.random.key(seed)), {"*": "host"}), x)
    assert len(traces) == 1


def test_inner_checkpoint_does_nothing(cell, x):
    class Outer(eqx.Module):
        inner: eqx.Module

        def __call__(self, x):
            return checkpoint(self.inner)(x, 1.0) * 2

    model = place(Outer(cell), {"*": "host"})
    jaxpr = jax.make_jaxpr(jax.grad(lambda m: checkpoint(m)(x).sum()))(model)
    text = str(jaxpr)
    assert "inner.hidden" in text and "name=hidden" not in text
    flat = place(cell, {"*": "host"})
    alone = jax.make_jaxpr(jax.grad(lambda m: checkpoint(m)(x, 1.0).sum()))(flat)
    assert host_values(jaxpr.jaxpr) == host_values(alone.jaxpr) > 0


def test_arguments_of_every_kind_and_structured_output(cell, x):
    class Layer(eqx.Module):
        inner: eqx.Module

        def __call__(self, x, flag, *, scale, extra=None):
            out = self.inner(x, scale) if flag == "yes" else x
            return {"out": out, "flag": flag, "extra": extra}

    out = checkpoint(Layer(cell))(x, "yes", scale=jnp.float32(0.5))
    assert out["flag"] == "yes" and out["extra"] is None
    np.testing.assert_allclose(out["out"], cell(x, 0.5), rtol=1e-6)


def test_a_function_that_hides_the_module_is_refused(cell, x):
    with pytest.raises(ValueError, match="holds no Activation"):
        checkpoint(lambda x: cell(x, 1.0))(x)


def test_one_name_in_two_places_is_refused():
    tree = [Activation("a", "host", path="same"), Activation("b", "device", path="same")]
    with pytest.raises(ValueError, match="'same' is placed on host and on device"):
        policy(tree)


def test_under_vmap(cell, x):
    model = place(cell, {"*": "host"})
    batch = jnp.stack([x, 2 * x])
    grads = jax.grad(lambda m: jax.vmap(lambda x: checkpoint(m)(x, 1.0))(batch).sum())(model)
    expected = jax.grad(lambda m: jax.vmap(lambda x: m(x, 1.0))(batch).sum())(model)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert normwise(a, b) < 1e-6


def test_new_remat_that_ignores_offload_is_refused(cell, x):
    if jax.__version_info__ >= (0, 11):
        pytest.skip("this JAX offloads under jax_remat3")
    model = place(cell, {"*": "host"})
    jax.config.update("jax_remat3", True)
    try:
        with pytest.raises(RuntimeError, match="jax_remat3"):
            checkpoint(model)(x, 1.0)
        checkpoint(place(cell, "save_all"))(x, 1.0)  # nothing to offload, nothing to refuse
    finally:
        jax.config.update("jax_remat3", False)


def test_accelerator_without_pinned_host_warns_once(monkeypatch, cell, x):
    class Memory:
        kind = "device"

    class Device:
        device_kind = "Toy"

        def addressable_memories(self):
            return [Memory()]

    monkeypatch.setattr(jax, "default_backend", lambda: "toy")
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [Device()])
    with pytest.warns(RuntimeWarning, match="Toy .* offers no pinned_host") as record:
        check_support(["a"])
        check_support(["b"])
    assert len(record) == 1
