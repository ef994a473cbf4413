"""Llama's relatives in training: every placement, one compilation, nothing left out."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from overspill import policies, zoo
from overspill.zoo.config import LlamaConfig
from overspill.zoo.moe_config import MoEConfig

_GQA = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-4,
    "rope_theta": 500.0,
    "max_position_embeddings": 96,
}
_EXPERTS = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": True,
}
OLMO = LlamaConfig(**_GQA, qk_norm="full", norm_placement="after", norm_downcast_first=False)
SMOL = LlamaConfig(**_GQA, no_rope_layers=(1, 1, 0, 1), sliding_window=9)
GPT_OSS = MoEConfig(
    **_GQA,
    **_EXPERTS,
    attention_bias=True,
    attention_sinks=True,
    sliding_window=9,
    layer_types=("sliding_attention", "full_attention") * 2,
    router_bias=True,
    expert_bias=True,
    swiglu_limit=1.5,
    norm_downcast_first=False,
)
GLM = MoEConfig(
    **_GQA,
    **_EXPERTS
    | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_shared_experts": 1, "first_k_dense_replace": 1},
    attention_bias=True,
    attention_output_bias=False,
    qk_norm="head",
    partial_rotary_factor=0.5,
    num_nextn_predict_layers=1,
)


@pytest.fixture(scope="module")
def relatives(configs):
    sparse = dataclasses.replace(configs["deepseek-v3"], index_n_heads=2, index_head_dim=12, index_topk=7)
    return {"olmo": OLMO, "smol": SMOL, "gpt-oss": GPT_OSS, "glm": GLM, "sparse": sparse}


NAMES = ["olmo", "smol", "gpt-oss", "glm", "sparse"]


def total(losses):
    loss = losses.sum / losses.count
    if losses.mtp_sum.size:
        loss += 0.3 * jnp.mean(losses.mtp_sum / losses.mtp_count)
    return loss


@pytest.mark.parametrize("name", NAMES)
def test_placements_change_no_gradient(relatives, make, packed, jit, trainable, normwise, name):
    model = make(relatives[name], segments=(2,))
    parameters, rest = trainable(model)

    def gradients(parameters, rest, checkpoint):
        return jax.grad(lambda p: total(eqx.combine(p, rest).losses(packed, checkpoint=checkpoint)))(parameters)

    plain = jit(lambda p: gradients(p, rest, None))(parameters)
    for path, gradient in jax.tree_util.tree_leaves_with_path(plain):
        assert jnp.isfinite(gradient).all() and jnp.abs(gradient).max() > 0, jax.tree_util.keystr(path)
    for placements in ("recompute_all", "offload_all"):
        parameters, rest = trainable(policies.place(model, placements))
        placed = jit(lambda p, rest=rest: gradients(p, rest, policies.checkpoint))(parameters)
        for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(plain), strict=True):
            assert normwise(a, b) < 3e-6


@pytest.mark.parametrize("name", NAMES)
def test_the_step_carries_out_every_annotation_and_compiles_once(relatives, make, packed, name):
    model = policies.place(make(relatives[name]), "offload_all")
    optimizer = optax.sgd(1e-2)
    step = zoo.make_train_step(model, optimizer)
    state = zoo.init_state(model, optimizer, key=jax.random.key(0))
    census = policies.check(step, state, packed)
    assert census.bytes("named", memory="device") == 0 < census.bytes("named", memory="host")
    losses = []
    for _ in range(3):
        state, metrics = step(state, packed)
        losses.append(float(metrics.loss))
    assert step.compilations == 1 and losses[2] < losses[0]
    if name == "sparse":
        trained = step.trained(state)
        for before, after in zip(model.stacks().values(), trained.stacks().values(), strict=True):
            for a, b in zip(*(jax.tree.leaves(s.segments[0].attention.indexer) for s in (before, after)), strict=True):
                np.testing.assert_array_equal(a, b)


def test_a_window_that_all_layers_share_is_in_the_mask(relatives, make, packed, jit):
    model = make(SMOL)
    assert model.window == 9 and set(model.layer_inputs()["layers"]) == {"rotates"}
    assert make(GPT_OSS).window is None
    tokens = packed.tokens[:1]
    other = tokens.at[0, 10].set((tokens[0, 10] + 1) % 61)
    a, b = (jit(lambda m, t: m(t))(model, t)[0] for t in (tokens, other))
    # Four layers with a window of nine reach 4 * 8 tokens ahead, and no further.
    np.testing.assert_array_equal(a[43:], b[43:])
    assert (np.abs(np.asarray(a - b)).max(axis=1) > 0)[10:43].all()


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (SMOL, {"no_rope_layers": (1, 0)}, "no_rope_layers must have an entry for each of the 4 layers, got 2"),
        (SMOL, {"no_rope_layers": (1, 0, 2, 1)}, "no_rope_layers is made of 1 .* and 0 .*, got 2"),
        (GPT_OSS, {"layer_types": ("linear_attention",) * 4}, "layer_types knows .* got 'linear_attention'"),
        (GPT_OSS, {"sliding_window": None}, "sliding_window must be given"),
        (GPT_OSS, {"swiglu_limit": -1.0}, "swiglu_limit must be positive"),
        (GLM, {"router_bias": True}, "router_bias is for scoring_func 'softmax', got 'sigmoid'"),
        (GLM, {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be above 0 and at most 1, got 1.5"),
        (GLM, {"first_k_dense_replace": 5}, "first_k_dense_replace .5. must not exceed"),
    ],
)
def test_configs_that_cannot_be(config, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **changes)


def test_index_sizes_come_together(configs):
    with pytest.raises(ValueError, match="index_head_dim must be a positive whole number, got None"):
        dataclasses.replace(configs["deepseek-v3"], index_n_heads=2, index_topk=7)
    with pytest.raises(ValueError, match="index_head_dim .4. must not be smaller than qk_rope_head_dim .8."):
        dataclasses.replace(configs["deepseek-v3"], index_n_heads=2, index_topk=7, index_head_dim=4)
    with pytest.raises(ValueError, match="index_topk needs q_lora_rank"):
        dataclasses.replace(
            configs["deepseek-v3"], index_n_heads=2, index_topk=7, index_head_dim=12, q_lora_rank=None
        )
