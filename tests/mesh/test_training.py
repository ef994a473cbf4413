"""The training step over meshes, in micro-batches and with its state on the host, against one device."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from overspill import policies, zoo

LENGTH = 72
ROWS = 16
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
    "moe_intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1, "max_position_embeddings": 128, "n_group": 2, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
CONFIGS = {"llama": QWEN3, "deepseek": DEEPSEEK}


def recorder():
    """An optimizer that changes nothing and whose state is the gradient, exactly."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
    )


@functools.cache
def random_model(family, **options):
    """Every parameter random: norms, and the routers' biases, which decide where tokens go."""
    model = zoo.build(zoo.from_config(CONFIGS[family]), key=jax.random.key(3), **options)
    leaves, treedef = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(4), len(leaves))
    noise = (0.05 * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True))
    return jax.tree.unflatten(treedef, [x + n for x, n in zip(leaves, noise, strict=True)])


@functools.cache
def random_batch(seed=0, rows=ROWS):
    """Rows with very different numbers of targets: one has none, and one no real token at all."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 96, (rows, LENGTH)).astype(np.int32)
    targets = rng.integers(0, 96, (rows, LENGTH)).astype(np.int32)
    mask = np.ones((rows, LENGTH), bool)
    mask[1, 50:] = False
    mask[2] = False
    targets[3] = -100
    targets[rng.random((rows, LENGTH)) < rng.random((rows, 1)) / 2] = -100
    targets[~mask] = -100
    segment_ids = np.cumsum(rng.random((rows, LENGTH)) < 0.03, axis=1).astype(np.int32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (rows, 1))
    return zoo.Batch(tokens, targets, segment_ids, positions, mask)


def run(family, optimizer=None, steps=1, batch=None, model=None, master_dtype=None, **options):
    """State, metrics and step after some steps."""
    model = random_model(family) if model is None else model
    optimizer = optimizer or recorder()
    batch = random_batch() if batch is None else batch
    shared = {name: options.get(name) for name in ("mesh", "rules", "state_memory")}
    state = zoo.init_state(model, optimizer, key=jax.random.key(0), master_dtype=master_dtype, **shared)
    step = zoo.make_train_step(model, optimizer, clip_norm=None, balance_weight=0.1, **options)
    metrics = []
    for _ in range(steps):
        state, measured = step(state, batch)
        metrics.append(jax.device_get(measured))
    assert step.compilations == 1
    return state, metrics, step


@functools.cache
def alone(family):
    return run(family)


def far(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)


def assert_same(found, wanted, tolerance=2e-6):
    """Loss, expert loads, gradients and router biases; experts must have been chosen alike first of all.

    Both sides round: the worst leaf differed by 9.6e-7 where this was measured, and other processors sum otherwise.
    """
    (state, metrics, _), (state0, metrics0, _) = found, wanted
    for name, load in metrics0[0].expert_load.items():
        np.testing.assert_array_equal(metrics[0].expert_load[name], load)
    for name in ("loss", "mtp_loss", "balance_loss", "grad_norm"):
        assert far(getattr(metrics[0], name), getattr(metrics0[0], name)) < tolerance, name
    assert metrics[0].tokens == metrics0[0].tokens
    assert set(state.opt_state) == set(state0.opt_state)
    for path, gradient in state0.opt_state.items():
        assert np.linalg.norm(gradient) > 0, path
        assert far(state.opt_state[path], gradient) < tolerance, path
    for path, bias in state0.buffers.items():
        np.testing.assert_allclose(state.buffers[path], bias, rtol=0, atol=1e-7)


MESHES = {
    "llama": ["data=8", "fsdp=4,tensor=2", "sequence=4,tensor=2", "fsdp=4,sequence=2"],
    "deepseek": ["fsdp=2,expert=4", "data=2,expert=2,tensor=2", "sequence=4"],
}


@pytest.mark.parametrize(("family", "text"), [(f, text) for f, texts in MESHES.items() for text in texts])
def test_gradients_over_a_mesh(family, text, make_mesh):
    found = run(family, mesh=make_mesh(text))
    assert_same(found, alone(family))
    state = found[0]
    for path, row in {row.path: row for row in zoo.shards(random_model(family), make_mesh(text)).rows}.items():
        leaf = state.params.get(path, state.buffers.get(path))
        assert leaf.sharding.shard_shape(leaf.shape) == row.shard, path


@pytest.mark.parametrize(
    ("family", "text"), [("llama", "data=2,fsdp=2,tensor=2"), ("deepseek", "fsdp=2,expert=2,sequence=2")]
)
def test_explicit_axes_and_micro_batches_and_host(family, text, make_mesh):
    """All at once: what each alone can't show is that they go together."""
    memory = {"optimizer.*": "host", "params.*": "host", "step": "host"}
    mesh = make_mesh(text, AxisType.Explicit)
    model = policies.place(random_model(family), "offload_all")
    found = run(family, mesh=mesh, accumulate=2, state_memory=memory, model=model)
    assert_same(found, alone(family))
    state, _, step = found
    assert {leaf.sharding.memory_kind for leaf in state.params.values()} == {"pinned_host"}
    census = policies.check(step, state, random_batch())
    assert census.devices == 8 and census.host_bytes > 0
    assert step.evaluate(state, [random_batch()]) == pytest.approx(
        alone(family)[2].evaluate(alone(family)[0], [random_batch()]), rel=1e-6
    )


@pytest.mark.parametrize("family", CONFIGS)
def test_micro_batches(family, parts=4):
    """One part has no real token, others very different numbers of targets."""
    batch = random_batch()
    rows = np.arange(ROWS).reshape(-1, parts).T  # a part takes every parts-th row
    empty = batch.mask.copy()
    empty[rows[-1]] = False
    batch = batch._replace(mask=empty)
    assert_same(run(family, accumulate=parts, batch=batch), run(family, batch=batch))


def test_micro_batches_share_parameters_that_are_rounded_once():
    """Rounded for each anew, they would be kept in float32 a second time, in the order in which XLA gathers them."""
    model = zoo.abstract(CONFIGS["llama"], dtype=jnp.bfloat16)
    state = zoo.init_state(model, optax.sgd(1e-3), key=jax.random.key(0), master_dtype=jnp.float32)
    closed = zoo.make_train_step(model, optax.sgd(1e-3), accumulate=4).trace(state, random_batch())
    (loop,) = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan" and eqn.params["length"] == 4]
    weights = [value.shape for value in state.params.values() if value.ndim > 1]
    dtypes = [v.aval.dtype for v in loop.invars if v.aval.shape in weights]
    sums, shared = dtypes.count(jnp.float32), dtypes.count(jnp.bfloat16)
    assert sums == shared == len(weights) == len(dtypes) / 2


def test_a_batch_without_any_target():
    batch = random_batch()._replace(targets=np.full((ROWS, LENGTH), -100, np.int32))
    for options in ({}, {"accumulate": 4}):
        state, metrics, _ = run("llama", batch=batch, **options)
        assert metrics[0].loss == 0 and not metrics[0].skipped
        assert all(not np.any(gradient) for gradient in state.opt_state.values())


@pytest.mark.parametrize(
    ("family", "memory"),
    [
        ("llama", {"optimizer.*": "host"}),
        ("llama", {"params.*": "host", "*.norm.*": "device"}),
        ("deepseek", {"*": "host"}),
    ],
)
def test_state_on_the_host(family, memory):
    """Three steps of AdamW: the same to the bit, every leaf where it was asked for, and one compilation."""
    optimizer = zoo.adamw(1e-2)
    model = policies.place(random_model(family), "offload_block_inputs")
    state, metrics, _ = run(family, optimizer, steps=3, model=model, state_memory=memory)
    wanted, metrics0, _ = run(family, optimizer, steps=3, model=model)
    assert [float(m.loss) for m in metrics] == [float(m.loss) for m in metrics0]
    paths = [zoo.memory.state_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    for path, leaf, other in zip(paths, jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        host = "*" in memory or path.startswith(("params" if "params.*" in memory else "optimizer") + ".")
        if host and "*.norm.*" in memory and ".norm." in path:
            host = False
        assert leaf.sharding.memory_kind == ("pinned_host" if host else "device"), path
        assert leaf.dtype == other.dtype
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other), err_msg=path)


def test_host_parameters_are_fetched_layer_by_layer():
    """The backward pass fetches a layer again: no copy of it waits on the device."""
    model = policies.place(random_model("llama"), "recompute_all")
    for memory in (None, {"params.*": "host"}):
        state, _, step = run("llama", model=model, state_memory=memory)
        census = policies.check(step, state, random_batch())
        assert census.bytes("cast") == 0
        stacked = [e for e in census.entries if e.kind == "argument" and "layers.segments" in e.label]
        assert stacked and all((e.memory == "host") == bool(memory) for e in stacked)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        assert policies.census(step, abstract, random_batch()).entries == census.entries
        assert str(step.trace(abstract, random_batch())).count("<host>") == str(
            step.trace(state, random_batch())
        ).count("<host>")


def test_master_weights_on_the_host_under_bfloat16():
    model = random_model("llama", dtype=jnp.bfloat16)
    results = [
        run("llama", zoo.adamw(1e-2), steps=2, model=model, master_dtype=jnp.float32, state_memory=memory)
        for memory in (None, {"params.*": "host", "optimizer.*": "host"})
    ]
    (state, metrics, step), (other, metrics1, _) = results
    assert [float(m.loss) for m in metrics] == [float(m.loss) for m in metrics1]
    for path, leaf in state.params.items():
        assert other.params[path].dtype == leaf.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other.params[path]))
    assert {leaf.dtype for leaf in jax.tree.leaves(step.trained(other))} == {jnp.dtype(jnp.bfloat16)}


def test_a_state_on_the_device_moves_when_the_step_says_so():
    model, optimizer = random_model("llama"), zoo.adamw(1e-2)
    state = zoo.init_state(model, optimizer, key=jax.random.key(0))
    step = zoo.make_train_step(model, optimizer, state_memory={"optimizer.*": "host"})
    for _ in range(2):
        state, _ = step(state, random_batch())
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state)} == {"pinned_host"}
    assert step.compilations == 1


@pytest.mark.parametrize("preset", ["recompute_all", "offload_all"])
def test_presets_over_a_mesh(preset, make_mesh):
    model = policies.place(random_model("deepseek"), preset)
    found = run("deepseek", model=model, mesh=make_mesh("fsdp=2,expert=2,tensor=2"))
    assert_same(found, alone("deepseek"))
    state, _, step = found
    census = policies.check(step, state, random_batch())
    assert census.devices == 8
    for entry in census.entries:
        if entry.kind == "named" and entry.label.endswith(("attention.query", "attention.key")):
            assert entry.shard_bytes * 8 == entry.bytes, entry.label
        if entry.kind == "named" and entry.label.endswith("block_input"):
            assert entry.shard_bytes * 4 == entry.bytes, entry.label


def test_kv_heads_fewer_than_the_axis(make_mesh):
    model, mesh = random_model("llama"), make_mesh("tensor=4,data=2")
    with pytest.raises(ValueError, match=r"key_projection.weight.* 2 kv_heads, which can't be cut into 4 .*'tensor'"):
        zoo.init_state(model, recorder(), key=jax.random.key(0), mesh=mesh)
    assert_same(run("llama", mesh=mesh, rules=zoo.rules_for(mesh) | {"kv_heads": ()}), alone("llama"))


def test_evaluation_counts_every_row_once(make_mesh):
    """21 rows in batches of 8 over 8 devices: the last batch is three rows of padding short."""
    rows = 21
    batch = random_batch(1, rows)
    state, _, step = run("llama")
    whole = step.evaluate(state, [batch])
    pieces = [zoo.Batch(*(x[i : i + 8] for x in batch)) for i in range(0, rows, 8)]
    pieces[-1] = zoo.pad_batch(pieces[-1], 8)
    state, _, step = run("llama", mesh=make_mesh("data=8"))
    assert step.evaluate(state, pieces) == pytest.approx(whole, rel=1e-6)


def test_sharded_and_abstract_states_are_alike(make_mesh):
    mesh = make_mesh("fsdp=2,expert=2,tensor=2")
    config = zoo.from_config(DEEPSEEK)
    options = {"key": jax.random.key(0), "mesh": mesh, "state_memory": {"optimizer.*": "host"}}
    concrete = zoo.init_state(zoo.build(config), zoo.adamw(1e-3), **options)
    abstract = zoo.init_state(zoo.abstract(config), zoo.adamw(1e-3), **options)
    for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(concrete), strict=True):
        assert a.sharding == b.sharding and a.shape == b.shape and a.dtype == b.dtype
    moment = concrete.opt_state[0].mu["moe_layers.segments.0.moe.experts.gate_weight"]
    assert moment.sharding == concrete.params[
        "moe_layers.segments.0.moe.experts.gate_weight"
    ].sharding.with_memory_kind("pinned_host")
    step = zoo.make_train_step(zoo.abstract(config), zoo.adamw(1e-3), mesh=mesh)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), random_batch())
    assert "all-to-all" in step.lower(abstract, batch).compile().as_text()


def test_a_state_is_moved_over_a_mesh(make_mesh):
    """As it would have been made there, memory kinds included, and good to go on with."""
    mesh, model, optimizer = make_mesh("fsdp=2,tensor=2"), random_model("llama"), zoo.adamw(1e-3)
    options = {"key": jax.random.key(0), "state_memory": {"optimizer.*": "host"}}
    state = zoo.init_state(model, optimizer, **options)
    moved, wanted = zoo.shard(state, mesh, model=model), zoo.init_state(model, optimizer, mesh=mesh, **options)
    for leaf, other in zip(jax.tree.leaves(moved), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding == other.sharding
    _, metrics = zoo.make_train_step(model, optimizer, mesh=mesh)(moved, random_batch())
    assert far(metrics.loss, alone("llama")[1][0].loss) < 1e-6
    with pytest.raises(ValueError, match=r"cut like the model that it goes with: shard\(state, mesh, model=model\)"):
        zoo.shard(state, mesh)


def test_resegmented_abstract_states_lie_where_they_lay(make_mesh):
    model = zoo.abstract(zoo.from_config(QWEN3), mesh=make_mesh("fsdp=2,tensor=2"))
    state = zoo.init_state(model, zoo.adamw(1e-3), key=jax.random.key(0), state_memory={"optimizer.*": "host"})
    for tree, again in ((model, zoo.resegment(model, (1,))), (state, zoo.resegment(state, (1,), model=model))):
        kinds = {(x.sharding.memory_kind, len(x.sharding.device_set)) for x in jax.tree.leaves(tree)}
        assert {(x.sharding.memory_kind, len(x.sharding.device_set)) for x in jax.tree.leaves(again)} == kinds


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"state_memory": {"optimiser.*": "host"}}, "'optimiser.*' matches nothing in the state; it has optimizer"),
            ({"state_memory": {"params.*": "recompute"}}, "on the 'device' or on the 'host', not 'recompute'"),
            ({"state_memory": {"params.*": "pinned_host"}}, "on the 'host', not 'pinned_host'"),
            ({"accumulate": 0}, "accumulate must be a whole number of micro-batches, 1 or more, got 0"),
            ({"accumulate": 3}, "16 rows can't be cut into 3 micro-batches"),
            ({"rules": {"batch": "data"}}, "give mesh too"),
        ],
    )
    def test_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            run("llama", **options)

    @pytest.mark.parametrize(
        ("text", "rules", "message"),
        [
            ("data=8", {"bach": "data"}, "rule 'bach': not one of the logical axes batch, "),
            ("data=8", {"batch": "date"}, "rule 'batch': the mesh has no axis 'date', only data"),
            ("data=8", {"batch": ("data", "data")}, "names a mesh axis twice"),
            ("rows=8", None, "mesh axis 'rows' is no preset"),
            ("tensor=8", None, r"query_projection.weight.* 4 heads, which can't be cut into 8 equal parts"),
            ("fsdp=5", None, r"'embedding.weight' \[96, 32\]: dimension 1 is 32 embed, which can't be cut into 5"),
        ],
    )
    def test_meshes(self, text, rules, message, make_mesh):
        with pytest.raises(ValueError, match=message):
            run("llama", mesh=make_mesh(text), rules=rules)

    def test_batches(self, make_mesh):
        batch = random_batch(0, 12)
        with pytest.raises(ValueError, match="12 rows can't be cut into 8 equal parts.*pad_batch"):
            run("llama", mesh=make_mesh("data=8"), batch=batch)
        with pytest.raises(ValueError, match="rows of 72 tokens can't be cut into 5 equal parts .*'sequence'"):
            run("llama", mesh=make_mesh("sequence=5"))
        with pytest.raises(ValueError, match="16 rows can't be filled up to 8"):
            zoo.pad_batch(random_batch(), 8)

    def test_a_state_elsewhere(self, make_mesh):
        state, _, _ = alone("llama")
        step = zoo.make_train_step(random_model("llama"), recorder(), mesh=make_mesh("data=8"))
        with pytest.raises(ValueError, match=r"lies on 1 device\(s\), and the step's mesh is data=8"):
            step(state, random_batch())
        state = zoo.init_state(random_model("llama"), recorder(), key=jax.random.key(0), mesh=make_mesh("fsdp=8"))
        with pytest.raises(ValueError, match="lies on a mesh of fsdp=8, and the step's mesh is data=8"):
            step(state, random_batch())

    def test_what_no_rule_reaches(self, make_mesh):
        class Odd(eqx.Module):
            weight: jax.Array

        with pytest.warns(zoo.ShardingWarning, match="without logical axes.*'weight'"):
            zoo.shard(Odd(jnp.ones(8)), make_mesh("data=8"))
        with pytest.warns(zoo.ShardingWarning, match="reach no array and no activation of Llama: 'experts'"):
            zoo.shard(random_model("llama"), make_mesh("data=8"), {"batch": "data", "experts": "data"})

    @pytest.mark.parametrize(
        ("axes", "message"),
        [
            ({"weigth": "mlp embed"}, "Odd.axes names 'weigth', which Odd doesn't have"),
            (("mlp", "embed"), "Odd.axes must be a dictionary from fields to logical axes"),
            ({"weight": "mlp embd"}, "logical axis 'embd' in 'mlp embd' is not one of batch, "),
            ({"weight": "embed"}, "'weight' has 2 dimensions, its axes 'embed' are 1"),
        ],
    )
    def test_declarations(self, axes, message, make_mesh):
        declared = axes

        class Odd(eqx.Module):
            weight: jax.Array
            axes = declared

        with pytest.raises(ValueError, match=message):
            zoo.shard(Odd(jnp.ones((8, 8))), make_mesh("data=8"))

    def test_activations(self, make_mesh):
        with pytest.raises(ValueError, match="logical axis 'foo' in 'batch foo'"):
            policies.Activation("x", axes="batch foo")
        with policies.axes.use(zoo.layout(make_mesh("data=8"))), pytest.raises(
            ValueError, match="activation 'x' has 1 dimensions, its axes 'batch embed' are 2"
        ):
            policies.Activation("x", axes="batch embed")(jnp.ones(8))
