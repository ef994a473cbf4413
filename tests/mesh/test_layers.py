"""Every layer over a mesh, of either kind of axes, with and without a layout, and inside `jax.shard_map`."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from overspill import layers, zoo
from overspill.policies import axes
from overspill.zoo.data import Batch
from overspill.zoo.sharding import layout, shard

ROWS, LENGTH, SIZE, HEAD, VOCAB = 8, 72, 32, 8, 48
KEY = jax.random.key(0)
TOKENS = jax.random.randint(jax.random.key(1), (ROWS, LENGTH), 0, VOCAB)
ROTARY = layers.Rotary(HEAD, 1e4, 128)
ATTENTION = {"num_heads": 4, "num_kv_heads": 2, "head_dim": HEAD, "key": KEY}
LATENT = {
    "num_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": HEAD,
    "v_head_dim": 12, "key": KEY,
}  # fmt: skip


def floats(*shape, seed=2):
    return jax.random.normal(jax.random.key(seed), shape)


def randomised(tree, seed=3):
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves) + 1)[:-1]
    new = [
        leaf + 0.1 * jax.random.normal(key, leaf.shape, leaf.dtype) if eqx.is_inexact_array(leaf) else leaf
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(treedef, new)


def attend(module, x):
    return module(x, tables=ROTARY.tables(jnp.arange(LENGTH)[None]), rotary=ROTARY, mask=layers.attention_mask(LENGTH))


def blocks(module, x):
    options = {"tables": ROTARY.tables(jnp.arange(LENGTH)[None]), "rotary": ROTARY}
    options |= {"mask": layers.attention_mask(LENGTH, window=20), "token_mask": jnp.ones(x.shape[:2], bool)}
    x, stats = module(x, **options)
    return x if stats is None else (x, x.shape[0] * jnp.sum(stats.balance_loss))


def moe(module, x):
    y, stats = module(x, token_mask=jnp.ones(x.shape[:2], bool))
    return y, x.shape[0] * stats.balance_loss  # a mean over rows: devices' sums add up


def route(module, x):
    routing = module(x)
    return routing.weights, routing.scores, x.shape[0] * module.balance_loss(routing, batch=x.shape[0])


def block(feed_forward=None, key=KEY):
    feed_forward = layers.MLP(SIZE, 40, key=key) if feed_forward is None else feed_forward
    attention = layers.Attention(SIZE, qk_norm="head", sinks=True, **ATTENTION)
    return layers.Block(attention, feed_forward, SIZE, norm_eps=1e-6)


def softmax_router():
    options = {"groups": 2, "top_groups": 1, "method": "group_limited_greedy", "use_bias": True}
    return layers.SoftmaxRouter(SIZE, num_experts=8, top_k=2, key=KEY, **options)


def sigmoid_router():
    return layers.SigmoidRouter(SIZE, num_experts=8, top_k=2, groups=2, top_groups=1, normalize=True, key=KEY)


def mixture(router):
    return layers.MoE(SIZE, router=router, num_experts=8, expert_size=24, shared_size=16, expert_bias=True, key=KEY)


def embed(module, x, tokens):
    return module(tokens) + x[..., :SIZE]


def model(module, x, tokens):
    """A model's logits and losses; there is a gradient of `x` to compute beside those of weights."""
    segments = jnp.cumsum(tokens < 3, axis=1).astype(jnp.int32)
    mask = tokens > 0
    logits = module(tokens, segment_ids=segments, mask=mask)
    targets = jnp.where(tokens > 1, (tokens + 1) % VOCAB, -100)
    losses = module.losses(Batch(tokens, targets, None, segments, mask))
    return jnp.where(mask[..., None], logits + x[..., :1], 0), losses.sum, jnp.sum(losses.mtp_sum)


def llama():
    return zoo.build(zoo.from_config({
        "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": SIZE, "intermediate_size": 40, "head_dim": HEAD,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "max_position_embeddings": 128,
    }))  # fmt: skip


def deepseek():
    config = zoo.from_config("overspill-deepseek-tiny")
    sizes = {"hidden_size": SIZE, "intermediate_size": 40, "moe_intermediate_size": 24, "num_hidden_layers": 1}
    ranks = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
    return zoo.build(dataclasses.replace(config, vocab_size=VOCAB, **sizes, **ranks))


def core(module, query, key, value, sinks):
    return layers.dot_product_attention(query, key, value, layers.attention_mask(LENGTH, window=30), 0.3, sinks)


def masked(module, x, tokens):
    visible = layers.attention_mask(LENGTH, segment_ids=tokens // 20, mask=tokens > 2, window=30)
    return x[..., 0] * jnp.sum(visible, axis=-1)


X = floats(ROWS, LENGTH, SIZE)
HEADS = floats(ROWS, LENGTH, 4, HEAD), floats(ROWS, LENGTH, 2, HEAD, seed=4), floats(ROWS, LENGTH, 2, HEAD, seed=5)
# A module, how it is called, and its arguments, cut over the batch.
CASES = {
    "linear": (lambda: layers.Linear(SIZE, 24, use_bias=True, axes="mlp embed", key=KEY), lambda m, x: m(x), X),
    "norm": (lambda: layers.RMSNorm(SIZE, eps=1e-6), lambda m, x: m(x), X),
    "embedding": (lambda: layers.Embedding(VOCAB, SIZE, key=KEY), embed, X, TOKENS),
    "tied head": (lambda: layers.Embedding(VOCAB, SIZE, key=KEY), lambda m, x: m.attend(x), X),
    "rotary": (lambda: None, lambda m, x: ROTARY.apply(x, ROTARY.tables(jnp.arange(LENGTH)[None])), HEADS[0]),
    "attention core": (lambda: None, lambda m, *heads: core(m, *heads, jnp.arange(4.0)), *HEADS),
    "mask": (lambda: None, masked, X, TOKENS),
    "attention": (lambda: layers.Attention(SIZE, qkv_bias=True, qk_norm="head", **ATTENTION), attend, X),
    "full norm": (lambda: layers.Attention(SIZE, qk_norm="full", sinks=True, **ATTENTION), attend, X),
    "mla": (lambda: layers.MLA(SIZE, bias=True, **LATENT), attend, X),
    "mla without latent": (lambda: layers.MLA(SIZE, **LATENT | {"q_lora_rank": None}), attend, X),
    "indexer": (
        lambda: layers.MLA(SIZE, index_n_heads=3, index_head_dim=16, index_topk=10, **LATENT), attend, X,
    ),
    "mlp": (lambda: layers.MLP(SIZE, 40, bias=True, key=KEY), lambda m, x: m(x), X),
    "softmax router": (softmax_router, route, X),
    "sigmoid router": (sigmoid_router, route, X),
    "moe": (lambda: mixture(sigmoid_router()), moe, X),
    "block": (lambda: block(mixture(softmax_router())), blocks, X),
    "stack": (lambda: layers.Stack.build(lambda key: block(key=key), 2, key=KEY), blocks, X),
    "llama": (llama, model, X, TOKENS),
    "deepseek": (deepseek, model, X, TOKENS),
}  # fmt: skip


def weighted(call, module, args):
    """The sum of everything that `call` gives, each number with a weight of its own; and what it gives."""
    outputs = jax.tree.leaves(call(module, *args))
    total = 0.0
    for out in outputs:
        # The same for each row, so that a device with a part of them needs to know nothing.
        weights = 1 + jnp.cos(jnp.arange(np.prod(out.shape[1:]))).reshape(out.shape[1:]) if out.ndim > 1 else 1.0
        total += jnp.sum(out * weights)
    return total, outputs


def differentiated(call, inputs, add=lambda x: x):
    """Outputs, and the gradients of module and arguments. `add` sums scalars over devices."""
    varied, rest = eqx.partition(inputs, eqx.is_inexact_array)

    def loss(varied):
        total, outputs = weighted(call, *eqx.combine(varied, rest))
        return add(total), [out if out.ndim else add(out) for out in outputs]

    return jax.grad(loss, has_aux=True)(varied)


@pytest.fixture(scope="module")
def cases():
    """`cases(name)`: the module with random parameters, its call, its arguments, and what one device makes of it."""
    made = {}

    def make(name):
        if name not in made:
            build, call, *args = CASES[name]
            module, args = randomised(build()), tuple(args)
            arrays, static = eqx.partition(module, eqx.is_array)
            run = jax.jit(lambda arrays, args: differentiated(call, (eqx.combine(arrays, static), args)))
            want = run(arrays, args)
            made[name] = module, call, args, jax.tree.map(np.asarray, want)
        return made[name]

    return make


def check(got, want, tolerance=1e-6):
    wanted = jax.tree_util.tree_leaves_with_path(want)
    for (path, b), a in zip(wanted, jax.tree.leaves(got), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.linalg.norm(a - b)
        assert error <= tolerance * np.linalg.norm(b), f"{jax.tree_util.keystr(path)}: {error / np.linalg.norm(b)}"


@pytest.mark.parametrize("in_use", [True, False], ids=["layout", "no layout"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_device(cases, make_mesh, name, kind, in_use):
    module, call, args, want = cases(name)
    place = layout(make_mesh("data=2,fsdp=2,tensor=2", kind))
    # Features are cut too, over fsdp and tensor.
    arrays, static = eqx.partition(shard(module, place), eqx.is_array)
    args = jax.device_put(args, NamedSharding(place.mesh, PartitionSpec(("data", "fsdp"))))

    @jax.jit
    def run(arrays, args):
        with axes.use(place if in_use else None):
            return differentiated(call, (eqx.combine(arrays, static), args))

    with jax.set_mesh(place.mesh):
        check(run(arrays, args), want)


@pytest.mark.parametrize("name", CASES)
def test_inside_shard_map(cases, make_mesh, name):
    module, call, args, want = cases(name)
    arrays, static = eqx.partition(module, eqx.is_array)

    def local(arrays, args):
        return differentiated(call, (eqx.combine(arrays, static), args), lambda x: jax.lax.psum(x, "data"))

    whole, rows = PartitionSpec(), PartitionSpec("data")
    outputs = [rows if out.ndim else whole for out in want[1]]
    run = jax.shard_map(
        local, mesh=make_mesh("data=4,other=2"), in_specs=(whole, rows), out_specs=((whole, rows), outputs)
    )
    check(jax.jit(run)(arrays, args), want)


def test_a_token_outside_the_vocabulary_gives_nan_over_a_mesh(make_mesh):
    module, tokens = layers.Embedding(VOCAB, SIZE, key=KEY), TOKENS.at[0, :3].set(jnp.array([-1, VOCAB, 2 * VOCAB]))
    place = layout(make_mesh("fsdp=2,tensor=4"))
    with axes.use(place):
        rows = np.asarray(shard(module, place)(tokens))
    assert np.isnan(rows[0, :3]).all()
    np.testing.assert_array_equal(rows[0, 3:], np.asarray(module(TOKENS))[0, 3:])


def test_the_table_is_whole_nowhere(make_mesh):
    place = layout(make_mesh("fsdp=4,tensor=2"))
    module = shard(layers.Embedding(VOCAB, SIZE, key=KEY), place)

    def loss(module):
        with axes.use(place):
            return jnp.sum(module(TOKENS) ** 2)

    program = jax.jit(jax.grad(loss)).lower(module).compile().as_text()
    assert f"[{VOCAB // 2},{SIZE // 4}]" in program
    assert f"[{VOCAB},{SIZE}]" not in program and f"[{VOCAB // 2},{SIZE}]" not in program


def test_a_frequent_token_gets_its_whole_gradient_in_bfloat16(make_mesh):
    module = layers.Embedding(VOCAB, SIZE, dtype=jnp.bfloat16, key=KEY)
    place = layout(make_mesh("data=2,tensor=4"))
    tokens = jnp.zeros((2, 1024), jnp.int32)

    @jax.jit
    def gradient(module):
        with axes.use(place):
            return jax.grad(lambda module: jnp.sum(module(tokens).astype(jnp.float32)))(module).weight

    assert (gradient(shard(module, place))[0] == 2048).all()
