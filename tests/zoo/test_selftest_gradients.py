"""The self-test's gradients: what they are compared with, and whether wrong ones are seen and named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill.zoo import selftest_gradients, selftest_reference, selftest_tape as tape
from overspill.zoo.objective import Objective
from overspill.zoo.optimizer import arrays_by_path
from overspill.zoo.selftest_gradients import Case, GradientTest, Result, cases
from overspill.zoo.selftest_models import (
    BATCH_SEED,
    CUTS,
    FAMILIES,
    LENGTH,
    MODEL_SEED,
    by_layer,
    random_batch,
    random_model,
)
from overspill.zoo.selftest_reference import reference
from overspill.zoo.train import Step


def make(*wanted, **options):
    return GradientTest(list(wanted), device=jax.devices()[0], **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_numpys_gradients_are_the_slope_of_numpys_loss(family):
    config = FAMILIES[family]
    model, batch = random_model(config, 5), random_batch(config, 6, rows=1, length=24)

    def moved(sign):
        rng = np.random.default_rng(7)

        def move(path, x):
            chooses = "router.bias" in jax.tree_util.keystr(path, simple=True, separator=".")
            return x if chooses else x + jnp.asarray(sign * 5e-6 * rng.standard_normal(x.shape), x.dtype)

        return jax.tree_util.tree_map_with_path(move, model)

    _, slope = reference(model, batch)
    up, down = moved(1), moved(-1)
    high, low = (by_layer(arrays_by_path(tree), tree.stacks()) for tree in (up, down))
    expected = sum(float(np.sum(slope[key] * (high[key] - low[key]))) for key in slope)
    found = reference(up, batch)[0] - reference(down, batch)[0]
    np.testing.assert_allclose(found, expected, rtol=2e-4)


def test_no_token_is_near_to_another_choice_of_experts(monkeypatch):
    right, gaps = selftest_reference._choose, []

    def choose(scores, top_k, groups, top_groups):
        split = scores.reshape(len(scores), groups, -1)
        rank = np.sort(split, -1)[..., -2:].sum(-1)
        best = np.sort(rank, -1)
        if groups > 1:
            gaps.append(best[:, -top_groups] - best[:, -top_groups - 1])
        kept = (rank >= best[:, -top_groups, None])[..., None]
        ranked = np.sort(np.where(kept, split, -9).reshape(scores.shape), -1)
        gaps.append(ranked[:, -top_k] - ranked[:, -top_k - 1])
        return right(scores, top_k, groups, top_groups)

    monkeypatch.setattr(selftest_reference, "_choose", choose)
    config = FAMILIES["deepseek"]
    batch = random_batch(config, BATCH_SEED)
    reference(random_model(config, MODEL_SEED), batch)
    assert min(gap[batch.mask.reshape(-1)].min() for gap in gaps) > 1e-4


def test_the_tape_adds_up_what_is_used_twice_and_what_was_broadcast():
    x, y = tape.Node([[1.0, 2.0], [3.0, 4.0]]), tape.Node([5.0, 6.0])
    result = (x * y + x[np.array([0, 0])] / y - x.reshape(4)[:2]).sum()
    want_x = np.array([[5.0, 6.0], [5.0, 6.0]])
    want_x[0] += 2 / y.value - 2
    want_y = x.value.sum(0) - 2 * x.value[0] / y.value**2
    got_x, got_y = tape.gradients(result, [x, y])
    np.testing.assert_allclose(got_x, want_x)
    np.testing.assert_allclose(got_y, want_y)


def test_models_and_batches_are_what_hides_nothing():
    for family, config in FAMILIES.items():
        model, batch = random_model(config, 1), random_batch(config, 2)
        assert config.num_hidden_layers == 6 and batch.tokens.shape[1] == LENGTH > 64
        assert not batch.mask.all() and len(np.unique(batch.segment_ids[batch.mask])) == 2
        arrays = by_layer(arrays_by_path(model), model.stacks())
        for (name, layer), value in arrays.items():
            assert value.std() > 0.01, name
            others = [v for (n, i), v in arrays.items() if n == name and i not in (None, layer)]
            assert all(abs(value - other).max() > 1e-3 for other in others), name
        # The same arrays, however the model is cut.
        from overspill import zoo

        cut = zoo.resegment(model, CUTS[family])
        again = by_layer(arrays_by_path(cut), cut.stacks())
        assert again.keys() == arrays.keys() and all((again[key] == arrays[key]).all() for key in arrays)
        assert cut.stacks()[list(cut.stacks())[-1]].lengths[-1] == 1


def test_every_preset_that_fits_is_tried_whole_and_in_segments():
    from overspill import policies

    wanted = cases(["llama", "deepseek"], quick=False)
    for family in FAMILIES:
        tried = {(c.preset, c.segmented) for c in wanted if c.family == family and c.dtype == "float32"}
        fitting = set(policies.presets()) - ({"offload_latents"} if family == "llama" else set())
        assert tried == {(None, False)} | {(preset, cut) for preset in fitting for cut in (False, True)}
        assert any(c.family == family and c.dtype == "bfloat16" and c.preset == "offload_all" for c in wanted)
    # The program that others are compared with comes before them.
    assert wanted[0].preset is None and wanted.index(Case("deepseek", None)) < wanted.index(
        Case("deepseek", "save_all")
    )
    quick = cases(["llama", "deepseek"], quick=True)
    assert len(quick) < 12 and set(quick) < set(wanted)


def test_right_gradients_pass_and_are_numpys():
    test = make(Case("llama", None), Case("llama", "offload_all", True))
    test()
    assert test.failures == []
    assert test.references["llama"].compared > 80 and test.references["llama"].error < 1e-5
    whole, cut = test.results
    assert cut.compared == 2 * test.references["llama"].compared  # two steps
    # All but the last layer, whose segment stays on the device.
    assert cut.host_bytes > 0 and cut.error < 1e-5


def backwards(right):
    """A step whose backward loops read what waits on the host in the wrong order, as a released compiler did."""

    def flipped(x):
        x = jnp.flip(jax.device_put(x, jax.memory.Space.Device), 0)
        return jax.device_put(x, jax.memory.Space.Host)

    def raw(self, state, batch):
        closed, shape = jax.make_jaxpr(lambda *args: right(self, *args), return_shape=True)(state, batch)
        jaxpr = closed.jaxpr
        values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        values |= dict(zip(jaxpr.invars, jax.tree.leaves((state, batch)), strict=True))
        read = lambda v: v.val if hasattr(v, "val") else values[v]
        for eqn in jaxpr.eqns:
            args = [read(v) for v in eqn.invars]
            if eqn.primitive.name == "scan" and eqn.params["reverse"]:
                host = [getattr(v.aval, "memory_space", None) == jax.memory.Space.Host for v in eqn.invars]
                args = [flipped(x) if on else x for x, on in zip(args, host, strict=True)]
            out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
            values |= zip(eqn.outvars, out if eqn.primitive.multiple_results else [out], strict=True)
        return jax.tree.unflatten(jax.tree.structure(shape), [read(v) for v in jaxpr.outvars])

    return raw


def test_layers_read_in_reverse_are_seen_and_the_activation_is_named(monkeypatch):
    monkeypatch.setattr(Step, "raw", backwards(Step.raw))
    monkeypatch.setattr(GradientTest, "_prove", lambda self, result, compiled: None)
    test = make(Case("llama", None), Case("llama", "offload_block_inputs"), steps=1)
    test()
    first, second = test.failures
    name = "llama, offload_block_inputs, one scan, float32"
    assert first.startswith(f"{name}: ") and "differ from no policy in step 1" in first
    assert "in layers 0, 1, 2, 3, 4, 5: that of layers." in first
    assert second == f"{name}: wrong with only this offloaded: block_input"


def test_no_policy_itself_is_checked(monkeypatch):
    right = Objective.gradients

    def wrong(self, params, buffers, batch):
        found, sums = right(self, params, buffers, batch)
        path = "layers.segments.0.mlp.down_projection.weight"
        return found | {path: found[path].at[3].multiply(1.001)}, sums

    monkeypatch.setattr(Objective, "gradients", wrong)
    test = make(Case("llama", None), steps=1)
    test()
    (failure,) = test.failures
    assert "1 of 81 gradients differ from float64 NumPy, in layers 3: that of layers.mlp.down_projection.weight in "
    assert "layer 3 by 0.001 of its norm (at most 5e-05)" in failure


def test_offload_that_does_not_happen_is_named(monkeypatch):
    right = selftest_gradients.make_train_step

    def wrong(*args, **options):
        return right(*args, **options | {"checkpoint": False})

    monkeypatch.setattr(selftest_gradients, "make_train_step", wrong)
    test = make(Case("llama", None), Case("llama", "offload_mlp"), steps=1)
    test()
    assert test.failures and all("offload_mlp, one scan, float32: offload isn't proved:" in f for f in test.failures)
    assert any("'layers.segments.0." in failure for failure in test.failures)


def test_a_preset_that_fails_is_named_and_the_rest_goes_on(monkeypatch):
    class Lowered:
        def compile(self, compiler_options=None):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 1 byte\n  at somewhere")

    def lower(self, case):
        if case.preset == "save_all":
            raise TypeError("not a type")
        return Lowered() if case.preset == "offload_mlp" else case

    monkeypatch.setattr(GradientTest, "_lower", lower)
    monkeypatch.setattr(Case, "compile", lambda self, compiler_options=None: self, raising=False)
    monkeypatch.setattr(GradientTest, "_prove", lambda self, result, compiled: None)
    monkeypatch.setattr(GradientTest, "_against_numpy", lambda self, case, found: Result(case))
    values = {("w", layer): np.full(3, 1.0 + layer) for layer in range(6)}
    monkeypatch.setattr(GradientTest, "_train", lambda self, case, compiled, *, steady: [dict(values)])
    test = make(*(Case("llama", preset) for preset in (None, "save_all", "offload_mlp", "offload_all")))
    test()
    assert test.failures == [
        "llama, save_all, one scan, float32: can't be traced: TypeError: not a type",
        "llama, offload_mlp, one scan, float32: can't be compiled: JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory",
    ]
    assert test.results[-1].compared == 6


def fakes(monkeypatch, found, blame=False):
    """A test whose programs give the gradients `found`, by case."""
    monkeypatch.setattr(GradientTest, "_lower", lambda self, case: case)
    monkeypatch.setattr(Case, "compile", lambda self, compiler_options=None: self, raising=False)
    monkeypatch.setattr(GradientTest, "_prove", lambda self, result, compiled: None)
    monkeypatch.setattr(GradientTest, "_against_numpy", lambda self, case, gradients: Result(case))
    if not blame:
        monkeypatch.setattr(GradientTest, "_blame", lambda self, result, progress: None)
    monkeypatch.setattr(GradientTest, "_train", lambda self, case, compiled, *, steady: [found[case]])
    test = make(*(case for case in found if case.only is None))
    test()
    return test


def rounded(gradients, seed):
    rng = np.random.default_rng(seed)
    return {key: value * (1 + 4e-3 * rng.standard_normal(value.shape)) for key, value in gradients.items()}


@pytest.mark.parametrize("swapped", [False, True])
def test_bfloat16_is_measured_by_its_own_rounding(monkeypatch, swapped):
    rng = np.random.default_rng(0)
    exact = {("w", layer): rng.standard_normal((4, 5)) for layer in range(6)} | {("norm", None): rng.standard_normal(5)}
    narrow, offloaded = rounded(exact, 1), rounded(exact, 2)
    if swapped:
        offloaded["w", 1], offloaded["w", 2] = offloaded["w", 2], offloaded["w", 1]
    plain = Case("llama", None)
    test = fakes(
        monkeypatch,
        {
            plain: exact,
            dataclasses.replace(plain, dtype="bfloat16"): narrow,
            Case("llama", "offload_all", dtype="bfloat16"): offloaded,
        },
    )
    assert test.failures == [] or swapped
    if swapped:
        assert "in layers 1, 2" in test.failures[0] and "offload_all, one scan, bfloat16" in test.failures[0]


@pytest.mark.parametrize("guilty", [("key",), ("query", "value"), ()])
def test_the_activations_at_fault_are_found_one_by_one(monkeypatch, guilty):
    right, wrong = {("w", 0): np.ones(3)}, {("w", 0): -np.ones(3)}
    whole = Case("llama", "offload_qkv")
    alone = {
        dataclasses.replace(whole, only=name): wrong if name in guilty else right for name in ("query", "key", "value")
    }
    test = fakes(monkeypatch, {Case("llama", None): right, whole: wrong, **alone}, blame=True)
    says = "wrong with only this offloaded: " + ", ".join(guilty)
    says = says if guilty else "no single offloaded activation makes it wrong: query, key, value"
    assert test.failures[1] == f"llama, offload_qkv, one scan, float32: {says}"


def test_layers_that_have_each_others_gradients_are_told(monkeypatch):
    exact = {("w", layer): np.full(3, 1.0 + layer) for layer in range(6)}
    turned = {("w", layer): exact["w", 5 - layer] for layer in range(6)}
    test = fakes(monkeypatch, {Case("llama", None): exact, Case("llama", "save_all", True): turned})
    assert "llama, save_all, segments, float32: 6 of 6 gradients differ from no policy in step 1" in test.failures[0]
    assert "layers [0, 1, 2, 3, 4, 5] have the gradients of layers [5, 4, 3, 2, 1, 0]" in test.failures[0]


def test_gradients_that_are_not_finite_differ(monkeypatch):
    exact = {("w", layer): np.ones(3) for layer in range(6)}
    test = fakes(
        monkeypatch, {Case("llama", None): exact, Case("llama", "save_all"): exact | {("w", 4): np.full(3, np.nan)}}
    )
    assert "in layers 4: that of w in layer 4 by inf" in test.failures[0]


def test_without_anything_to_compare_with_there_is_no_pass(monkeypatch):
    exact = {("w", 0): np.ones(3)}
    test = fakes(monkeypatch, {Case("llama", "save_all"): exact})
    assert test.failures == [
        "llama, save_all, one scan, float32: nothing to compare with: the program without policy failed"
    ]
