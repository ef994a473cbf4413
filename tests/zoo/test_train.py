import dataclasses
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from overspill.layers.linear import Buffer, Linear
from overspill.layers.loss import cross_entropy
from overspill.policies import Activation, census, check, place
from overspill.zoo.building import abstract
from overspill.zoo.compiled import RecompilationWarning, commit, default_sharding
from overspill.zoo.data import Batch
from overspill.zoo.loop import TrainingDiverged, train
from overspill.zoo.model import Losses
from overspill.zoo.moe_config import DeepSeekConfig
from overspill.zoo.optimizer import adamw, arrays_by_path, trainable, warmup_cosine
from overspill.zoo.train import TrainState, init_state, make_train_step

VOCAB, FEATURES = 13, 8


class Mixer(eqx.Module):
    """x + tanh(W x + b), where the backward pass needs what tanh reads."""

    router: Linear  # by its name it computes in float32 whatever the rest does
    block_input: Activation
    hidden: Activation

    def __call__(self, x):
        x = self.block_input(x)
        return jnp.tanh(self.hidden(self.router(x.astype(jnp.float32)))).astype(x.dtype) + x


class Toy(eqx.Module):
    """The interface of a language model around one annotated layer."""

    embedding: Linear
    mixer: Mixer
    counter: Buffer
    heat: float = eqx.field(static=True)

    def __init__(self, key, dtype=jnp.float32, heat=1.0):
        keys = jax.random.split(key)
        self.embedding = Linear(FEATURES, VOCAB, std=0.5, dtype=dtype, key=keys[0])
        router = Linear(FEATURES, FEATURES, std=0.5, use_bias=True, key=keys[1])
        self.mixer = Mixer(router, Activation("block_input", recomputable=False), Activation("hidden"))
        self.counter = Buffer(jnp.full(3, 7.0))
        self.heat = heat

    def losses(self, batch, *, mtp=True, checkpoint=None):
        mixer = self.mixer if checkpoint is None else checkpoint(self.mixer)
        x = mixer(self.embedding.weight[batch.tokens])
        # A token 12 stands for a broken sample: its loss has no finite value or no finite gradient.
        broken = (batch.tokens == 12)[..., None]
        x = jnp.where(broken, jnp.sqrt(jnp.where(broken, x * 0, 1)) * self.heat, x)
        total, count = cross_entropy(x, self.embedding.weight, batch.targets, mask=batch.mask)
        return Losses(total, count, jnp.zeros(0), jnp.zeros(0), {})


def random_batch(seed=0, shape=(2, 6), vocab=12, padding=1):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, shape).astype(np.int32)
    targets = rng.integers(0, vocab, shape).astype(np.int32)
    mask = np.ones(shape, bool)
    if padding:
        mask[-1, -padding:] = False
    targets[~mask] = -100
    targets[0, 2] = -100
    segment_ids = np.zeros(shape, np.int32)
    segment_ids[0, 3:] = 1
    positions = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
    positions[0, 3:] -= 3
    return Batch(tokens, targets, segment_ids, positions, mask)


def toy(seed=0, **kwargs):
    return Toy(jax.random.key(seed), **kwargs)


def setup(model, optimizer=None, master_dtype=None, **options):
    optimizer = optimizer or adamw(1e-2)
    state = init_state(model, optimizer, key=jax.random.key(1), master_dtype=master_dtype)
    return state, make_train_step(model, optimizer, **options)


def as_numpy(tree):
    leaves = jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)
    return jax.tree.map(np.array, leaves)


def equal(a, b):
    same = jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), as_numpy(a), as_numpy(b))
    return jax.tree.all(same)


def far(a, b):
    """The largest relative normwise difference of two trees' leaves."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    pairs = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs]
    return max(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30) for x, y in pairs)


@pytest.fixture
def compiles():
    """How many programs XLA has compiled since the test began, by the event that JAX itself sends."""
    seen = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(kwargs.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def numpy_step(params, batch, clip):
    """The toy's loss, and the parameters after one step of SGD with rate 1, in float64."""
    names = ("embedding.weight", "mixer.router.weight", "mixer.router.bias")
    E, W, b = (np.asarray(params[n], np.float64) for n in names)
    x = E[batch.tokens]
    t = np.tanh(x @ W.T + b)
    h = t + x
    logits = h @ E.T
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    valid = (batch.targets != -100) & batch.mask
    count = valid.sum()
    labels = np.where(valid, batch.targets, 0)
    loss = -(np.log(np.take_along_axis(p, labels[..., None], -1))[..., 0] * valid).sum() / count
    dlogits = (p - np.eye(VOCAB)[labels]) * valid[..., None] / count
    dh = dlogits @ E
    dt = dh * (1 - t**2)
    dx = dh + dt @ W
    dE = np.einsum("bsv,bsd->vd", dlogits, h)
    np.add.at(dE, batch.tokens, dx)
    grads = dict(zip(names, (dE, np.einsum("bsf,bsd->fd", dt, x), dt.sum((0, 1))), strict=True))
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    factor = min(1.0, clip / norm)
    return loss, norm, {n: np.asarray(params[n], np.float64) - factor * g for n, g in grads.items()}, grads


@pytest.mark.parametrize("clip", [1e-2, 1e3])
def test_a_step_against_numpy(clip):
    state, step = setup(toy(), optax.sgd(1.0), clip_norm=clip, checkpoint=False)
    bias = jax.random.normal(jax.random.key(5), (FEATURES,))
    state = eqx.tree_at(lambda s: s.params["mixer.router.bias"], state, bias)
    before, batch = as_numpy(state.params), random_batch()
    loss, norm, after, grads = numpy_step(before, batch, clip)
    state, metrics = step(state, batch)
    assert float(metrics.loss) == pytest.approx(loss, rel=1e-5)
    assert float(metrics.grad_norm) == pytest.approx(norm, rel=1e-5)
    assert step.parameters == ("embedding.weight", "mixer.router.bias", "mixer.router.weight")
    norms = [np.linalg.norm(grads[name]) for name in step.parameters]
    np.testing.assert_allclose(metrics.gradient_norms, norms, rtol=1e-5)
    moved = {n: np.asarray(v) - before[n] for n, v in state.params.items()}
    assert far(moved, {n: v - before[n] for n, v in after.items()}) < (1e-4 if clip < 1 else 1e-5)
    assert int(metrics.tokens) == 10 and not metrics.skipped and float(metrics.mtp_loss) == 0
    assert int(state.step) == 1


def test_state_is_committed_arrays_by_path_and_leaves_the_model_alone():
    model = toy()
    values = as_numpy(eqx.filter(model, eqx.is_array))
    state, step = setup(model)
    assert isinstance(state, TrainState) and set(state.buffers) == {"counter.value"}
    leaves = jax.tree.leaves(state)
    assert all(isinstance(leaf, jax.Array) and leaf.committed for leaf in leaves)
    assert {leaf.sharding for leaf in leaves} == {default_sharding()}
    assert default_sharding().memory_kind == jax.devices()[0].default_memory().kind
    assert set(arrays_by_path(state.opt_state)) >= {"0.mu.mixer.router.bias", "0.nu.embedding.weight", "0.count"}
    after, metrics = step(state, random_batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))  # donated
    assert equal(eqx.filter(model, eqx.is_array), values)  # and not the model with it
    leaves = jax.tree.leaves((after, metrics))
    assert {leaf.sharding for leaf in leaves} == {default_sharding()} and all(leaf.committed for leaf in leaves)
    assert len(repr(step)) < 200


def test_one_compilation(compiles):
    state, step = setup(toy())
    jax.block_until_ready(state)
    batches = [random_batch(i) for i in range(5)]
    commit(batches[0])
    compiles.clear()
    for batch in batches:
        state, metrics = step(state, batch)
    jax.block_until_ready(state)
    assert step.compilations == 1 and len(compiles) == 1
    step.evaluate(state, batches)
    assert step.compilations == 1 and len(compiles) == 2
    message = r"training step is compiled again.*5 of its.*int32\[2, 6\].*\[2, 5\]"
    with pytest.warns(RecompilationWarning, match=message):
        step(state, random_batch(0, (2, 5)))
    assert step.compilations == 2


def test_an_uncommitted_state_is_settled_first():
    model, optimizer = toy(), adamw(1e-2)
    state = init_state(model, optimizer, key=jax.random.key(0))
    loose = jax.tree.map(lambda x: jnp.asarray(np.array(x)), dataclasses.replace(state, key=state.step))
    loose = dataclasses.replace(loose, key=jax.random.key(0))
    assert not loose.step.committed
    step = make_train_step(model, optimizer)
    for i in range(3):
        loose, _ = step(loose, random_batch(i))
    assert step.compilations == 1


def test_broken_steps_change_nothing_but_their_count():
    for heat, words in ((float("nan"), "the loss is nan"), (1.0, "not finite: the gradient of 'embedding.weight'")):
        state, step = setup(toy(heat=heat))
        state, _ = step(state, random_batch(0))
        before = as_numpy(state)
        broken = random_batch(1)
        broken.tokens[0, 0] = 12
        for i in range(1, 3):
            state, metrics = step(state, broken)
            assert bool(metrics.skipped) and words in step.reason(metrics)
            assert (int(state.bad_steps), int(state.consecutive), int(metrics.consecutive)) == (i, i, i)
            for name in ("params", "buffers", "opt_state", "key"):
                assert equal(getattr(state, name), getattr(before, name)), name
            assert int(state.step) == 1 + i
        state, metrics = step(state, random_batch(2))
        assert (int(state.bad_steps), int(state.consecutive)) == (2, 0) and not metrics.skipped
        assert step.reason(metrics) == "" and not equal(state.params, before.params)


def test_the_loop_stops_when_training_has_diverged():
    broken = random_batch(1)
    broken.tokens[0, 0] = 12
    state, step = setup(toy(heat=float("inf")), max_bad_steps=3)
    batches = [random_batch(0), broken, broken, random_batch(2), broken, broken, broken, random_batch(3)]
    records = []
    with pytest.raises(TrainingDiverged, match=r"3 steps in a row .* because the loss is nan") as error:
        for _, new in train(step, state, batches, steps=100, every=2):
            records += new
    assert [r.skipped for r in records] == [False, True, True, False, True]
    assert int(error.value.state.bad_steps) == 5
    assert np.isfinite(error.value.state.params["mixer.router.bias"]).all()


def test_the_loop_fetches_seldom_and_reports_every_step(monkeypatch):
    state, step = setup(toy())
    fetches, real = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: fetches.append(len(x)) or real(x))
    groups = [new for _, new in train(step, state, map(random_batch, itertools.count()), steps=23, every=10)]
    assert fetches == [1, 10, 10, 2]
    records = list(itertools.chain(*groups))
    assert [r.step for r in records] == list(range(1, 24))
    assert np.isnan(records[0].tokens_per_second) and all(r.tokens_per_second > 0 for r in records[1:])
    assert {type(v) for r in records for v in (r.loss, r.grad_norm)} == {float} and records[0].tokens == 10


def test_the_loop_ends_early_with_a_state_to_save():
    state, step = setup(toy())
    calls = iter(range(100))
    batches = map(random_batch, itertools.count())
    yielded = list(train(step, state, batches, steps=50, should_stop=lambda: next(calls) == 3))
    state, _ = yielded[-1]
    assert int(state.step) == 4 and not state.step.is_deleted()
    # A finite stream ends the loop, and a resumed state counts on.
    yielded = list(train(step, state, [random_batch(i) for i in range(3)], steps=50))
    assert [r.step for _, new in yielded for r in new] == [5, 6, 7]
    assert step.compilations == 1


def test_evaluate_weighs_tokens_not_batches():
    state, step = setup(toy())
    few = random_batch(1)
    few.targets[0] = -100
    few.targets[1, 1:] = -100
    none = random_batch(2)
    none.mask[:] = False
    batches = [random_batch(0), few, none]
    sums = [(numpy_step(state.params, b, 1.0)[0], (b.targets != -100).sum()) for b in batches[:2]]
    expected = sum(mean * n for mean, n in sums) / sum(n for _, n in sums)
    assert sums[0][1] == 10 and sums[1][1] == 1
    assert step.evaluate(state, batches) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="no valid target"):
        step.evaluate(state, [none])


def test_a_batch_without_targets_gives_zero_gradients():
    state, step = setup(toy(), optax.sgd(1.0))
    before = as_numpy(state.params)
    batch = random_batch(0)
    batch.mask[:] = False
    state, metrics = step(state, batch)
    assert float(metrics.loss) == float(metrics.grad_norm) == float(metrics.tokens) == 0 and not metrics.skipped
    assert equal(state.params, before)


DTYPES = [
    # model, master, compute, the parameter's dtype in the state, and in the loss
    (jnp.float32, None, None, jnp.float32, jnp.float32),
    (jnp.bfloat16, None, None, jnp.bfloat16, jnp.bfloat16),
    (jnp.bfloat16, jnp.float32, None, jnp.float32, jnp.bfloat16),
    (jnp.float32, None, jnp.bfloat16, jnp.float32, jnp.bfloat16),
]


@pytest.mark.parametrize("model_dtype, master, compute, kept, computed", DTYPES)
def test_dtypes_stay(model_dtype, master, compute, kept, computed):
    state, step = setup(toy(dtype=model_dtype), master_dtype=master, compute_dtype=compute)
    dtypes = jax.tree.map(lambda x: str(x.dtype), state)
    assert state.params["embedding.weight"].dtype == kept and state.params["mixer.router.weight"].dtype == jnp.float32
    moments = state.opt_state[0]
    assert {x.dtype for x in jax.tree.leaves((moments.mu, moments.nu))} == {jnp.dtype(jnp.float32)}
    assembled = step._objective.assemble(state.params, state.buffers)
    assert assembled.embedding.weight.dtype == computed
    assert assembled.mixer.router.weight.dtype == assembled.mixer.router.bias.dtype == jnp.float32
    for i in range(5):
        state, _ = step(state, random_batch(i))
        assert jax.tree.map(lambda x: str(x.dtype), state) == dtypes
    assert step.compilations == 1


def test_master_weights_move_by_what_bfloat16_would_lose():
    model = toy(dtype=jnp.bfloat16)
    for master, moves in ((jnp.float32, True), (None, False)):
        state, step = setup(model, optax.sgd(1e-6), master_dtype=master)
        before = as_numpy(state.params["embedding.weight"])
        for _ in range(20):
            state, _ = step(state, random_batch(0))
        assert (not equal(state.params["embedding.weight"], before)) == moves


def injected():
    return optax.inject_hyperparams(optax.adam)(learning_rate=warmup_cosine(1e-2, steps=10))


@pytest.mark.parametrize(
    "make", [injected, lambda: optax.MultiSteps(adamw(1e-2), 2).gradient_transformation(), optax.contrib.muon],
)  # fmt: skip
def test_any_optimizer(make):
    if make is optax.contrib.muon:
        make = lambda: optax.contrib.muon(1e-2)  # noqa: E731
    state, step = setup(toy(), make())
    dtypes = jax.tree.map(lambda x: str(x.dtype), state)
    losses = []
    for _ in range(6):
        state, metrics = step(state, random_batch(0))
        losses.append(float(metrics.loss))
    assert step.compilations == 1 and losses[-1] < losses[0]
    assert jax.tree.map(lambda x: str(x.dtype), state) == dtypes


def test_bad_arguments():
    state, step = setup(toy())
    other = dataclasses.replace(state, params={**state.params, "more": state.step})
    with pytest.raises(ValueError, match="another model's: parameters differ in 'more'"):
        step(other, random_batch())
    for wrong in ({"clip_norm": 0}, {"mtp_weight": -1}, {"max_bad_steps": 0}, {"compute_dtype": jnp.int32}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            setup(toy(), **wrong)
    with pytest.raises(ValueError, match="every"):
        next(train(step, state, [], steps=3, every=0))


CONFIG = DeepSeekConfig(
    vocab_size=12, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2,
    num_attention_heads=2, max_position_embeddings=64, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8,
    qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1,
    topk_group=1, scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=2.5,
    first_k_dense_replace=0, num_nextn_predict_layers=1,
)  # fmt: skip


def random_deepseek(**kwargs):
    """Every array random: scales of norms and biases too."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), abstract(CONFIG, **kwargs))


def test_deepseek_router_biases_move_by_the_sign_rule_alone():
    model = random_deepseek(segments=(1,))
    optimizer = adamw(1e-2, weight_decay=0.5)
    biases = arrays_by_path(trainable(model)[1])
    assert len(biases) == 3  # two layers in two segments, and that of MTP
    state = init_state(model, optimizer, key=jax.random.key(1))
    step = make_train_step(model, optimizer, bias_rate=0.01, balance_weight=1e-3)
    assert not any("mixer.router.bias" in path for path in (*state.params, *arrays_by_path(state.opt_state)))
    for seed in range(3):
        before = as_numpy(state.buffers)
        state, metrics = step(state, random_batch(seed))
        loads = {
            "moe_layers.segments.0": metrics.expert_load["moe_layers"][0],
            "moe_layers.segments.1": metrics.expert_load["moe_layers"][1],
            "mtp.0.block": metrics.expert_load["mtp.0"],
        }
        assert float(loads["moe_layers.segments.0"].sum()) == 2 * 11  # masked tokens go to no expert
        for prefix, load in loads.items():
            path = f"{prefix}.moe.router.bias.value"
            load = np.asarray(load, np.float64)
            expected = before[path] + 0.01 * np.sign(load.mean() - load)
            np.testing.assert_allclose(state.buffers[path], expected.reshape(before[path].shape), atol=1e-7)
    assert step.compilations == 1 and float(metrics.mtp_loss) > 0 and float(metrics.balance_loss) > 0
    frozen = make_train_step(model, optimizer, bias_rate=0)
    before = as_numpy(state.buffers)
    for seed in range(10):
        state, _ = frozen(state, random_batch(seed))
    assert equal(state.buffers, before)


def test_deepseek_loss_is_put_together_as_documented():
    model = random_deepseek()
    sgd = optax.sgd(1.0)
    batch = random_batch(3)
    state = init_state(model, sgd, key=jax.random.key(1))
    parts = eqx.filter_jit(model.losses)(commit(batch))

    def loss(model):
        parts = model.losses(commit(batch))
        balance = sum(jnp.sum(s.balance_loss) for s in parts.stats.values())
        return parts.sum / parts.count + 0.5 * parts.mtp_sum[0] / parts.mtp_count[0] + 0.25 * balance

    expected = arrays_by_path(trainable(eqx.filter_jit(eqx.filter_grad(loss))(model))[0])
    before = as_numpy(state.params)
    step = make_train_step(model, sgd, mtp_weight=0.5, balance_weight=0.25, clip_norm=None)
    state, metrics = step(state, batch)
    moved = {path: before[path] - np.asarray(value) for path, value in state.params.items()}
    for path, gradient in expected.items():
        norm = np.linalg.norm(gradient)
        # A difference of parameters is only as exact as the parameters are.
        assert np.linalg.norm(moved[path] - gradient) < 1e-5 * norm + 1e-7 * np.linalg.norm(before[path]), path
        assert norm > 0, path
    assert float(metrics.loss) == pytest.approx(float(parts.sum / parts.count), rel=1e-6)
    assert float(metrics.mtp_loss) == pytest.approx(float(parts.mtp_sum[0] / parts.mtp_count[0]), rel=1e-6)


def test_placements_change_between_steps_and_the_state_stays():
    model = toy()
    optimizer = adamw(1e-2)
    state = init_state(model, optimizer, key=jax.random.key(1))
    structure = jax.tree.structure(state)
    placed = [model, place(model, {"*": "host"}), place(model, {"*.hidden": "recompute"})]
    results = []
    for other, options in [*((m, {}) for m in placed), (model, {"checkpoint": False})]:
        copy = jax.tree.map(jnp.copy, state)
        step = make_train_step(other, optimizer, **options)
        jaxpr = str(step.trace(copy, random_batch()))
        assert ("host" in jaxpr) == (other is placed[1])
        for seed in range(3):
            copy, metrics = step(copy, random_batch(seed))
        assert step.compilations == 1 and jax.tree.structure(copy) == structure
        results.append((copy.params, metrics.loss))
    for result in results[:-1]:
        assert far(result, results[-1]) < 1e-6
    # And in the middle of a run.
    for seed, other in enumerate(placed):
        state, metrics = make_train_step(other, optimizer)(state, random_batch(seed))
    assert far((state.params, metrics.loss), results[-1]) < 1e-6 and jax.tree.structure(state) == structure


@pytest.mark.parametrize("name", ["tokens", "targets"])
@pytest.mark.parametrize("wrong", [-1, 300])
def test_ids_outside_the_vocabulary_are_found_on_the_host(name, wrong):
    model = abstract("overspill-llama-tiny")
    optimizer = adamw(1e-3)
    step = make_train_step(model, optimizer)
    state = init_state(model, optimizer, key=jax.random.key(0))
    ids = {n: np.zeros((1, 4), np.int32) for n in ("tokens", "targets")}
    ids[name][0, 2] = wrong
    batch = random_batch()._replace(**ids)
    with pytest.raises(ValueError, match=rf"token id {wrong} at \[0, 2\] is outside the vocabulary.*0 to 259"):
        step(state, batch)


def test_without_mtp_its_annotations_are_not_asked_for():
    model = place(abstract("overspill-deepseek-tiny"), "offload_latents")
    optimizer = adamw(1e-3)
    step = make_train_step(model, optimizer, mtp_weight=0)
    batch = random_batch(vocab=9)
    found = check(step, init_state(model, optimizer, key=jax.random.key(0)), batch)
    assert found.host_bytes > 0 and not any(path.startswith("mtp") for path in found.statuses)


def test_ahead_of_time_and_census():
    model = place(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), toy()), {"mixer.hidden": "host"})
    optimizer = adamw(1e-2)
    state = init_state(model, optimizer, key=jax.random.key(0))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
    step = make_train_step(model, optimizer)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), random_batch())
    concrete = init_state(toy(), optimizer, key=jax.random.key(0))
    assert jax.tree.structure(state) == jax.tree.structure(concrete)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), concrete
    )
    compiled = step.lower(state, batch).compile()
    after, _ = compiled(concrete, commit(random_batch()))
    assert int(after.step) == 1 and step.compilations == 0
    found = census(step, state, batch)
    assert found.statuses["mixer.hidden"] == "host"
    check(step, state, batch)
