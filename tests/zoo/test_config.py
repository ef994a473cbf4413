import dataclasses

import pytest

from overspill.layers.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryScaling,
    YarnScaling,
)
from overspill.zoo.config import LlamaConfig
from overspill.zoo.rope_config import parse_rope_scaling, rope_scaling_dict

LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (None, RotaryScaling()),
        ({"rope_type": "default"}, RotaryScaling()),
        ({"rope_type": "linear", "factor": 2}, LinearScaling(2.0)),
        ({"type": "dynamic", "factor": 4.0}, DynamicScaling(4.0)),
        ({"type": "llama3", **LLAMA3}, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ({"rope_type": "llama3", "type": "llama3", "rope_theta": 5e5, **LLAMA3}, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ({"type": "yarn", "factor": 40, "mscale": 1}, YarnScaling(40.0, 512, mscale=1.0)),
        (
            {"type": "yarn", "factor": None, "original_max_position_embeddings": 64, "truncate": False},
            YarnScaling(None, 64, truncate=False),
        ),
        (
            {"type": "longrope", "short_factor": [1, 2.5], "long_factor": [3, 4], "factor": 2},
            LongRopeScaling((1.0, 2.5), (3.0, 4.0), 512, factor=2.0),
        ),
    ],
)
def test_rope_scaling_in_all_spellings(block, expected):
    scaling = parse_rope_scaling(block, 512)
    assert scaling == expected and hash(scaling) == hash(expected)
    assert parse_rope_scaling(rope_scaling_dict(scaling), 512) == expected
    assert parse_rope_scaling(scaling, 512) is scaling


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"rope_type": "nonsense", "factor": 2.0}, "kind 'nonsense' is not known; there are default, linear"),
        ({"factor": 2.0}, "must name one kind in 'rope_type'"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "must name one kind"),
        ({"rope_type": "linear"}, "kind 'linear' needs 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, "kind 'llama3' needs 'low_freq_factor'"),
        ({"rope_type": "llama3", **{k: v for k, v in LLAMA3.items() if k != "factor"}}, "needs 'factor'"),
        (
            {"rope_type": "llama3", **{k: v for k, v in LLAMA3.items() if k[:8] != "original"}},
            "needs 'original_max_position_embeddings'",
        ),
        ({"rope_type": "linear", "factor": 2.0, "mscale": 1.0}, "kind 'linear' has no field 'mscale'"),
        ({"rope_type": "linear", "factor": "2"}, "rope_scaling factor must be a number, got '2'"),
        ({"rope_type": "linear", "factor": None}, "needs a number for 'factor', not null"),
        ({"rope_type": "linear", "factor": -1.0}, "factor must be positive"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate must be true or false"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1.5}, "positive whole number"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "must hold 4 positive numbers"),
    ],
)
def test_rope_scaling_is_never_ignored(block, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig(10, 8, 8, 1, 1, rope_scaling=block)


def test_llama_defaults_follow_from_other_fields():
    config = LlamaConfig(10, 64, 32, 2, 4, rope_theta=500000, eos_token_id=[1, 2, 3])
    assert (config.head_dim, config.num_key_value_heads, config.eos_token_id) == (16, 4, (1, 2, 3))
    assert config.rope_theta == 500000.0 and isinstance(config.rope_theta, float)
    assert config == LlamaConfig(10, 64, 32, 2, 4, rope_theta=5e5, eos_token_id=(1, 2, 3)) and hash(config)
    assert config.rotary().dim == 16 and not config.rotary().interleaved
    assert LlamaConfig(10, 60, 32, 2, 4, head_dim=10).head_dim == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None},
            r"hidden_size \(24\) must be a multiple of num_attention_heads \(5\)",
        ),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"head_dim": 7}, "part of head_dim must be even.*got 7 of 7"),
        ({"head_dim": 0}, "head_dim must be a positive whole number, got 0"),
        ({"hidden_size": -8}, "hidden_size must be a positive whole number, got -8"),
        ({"vocab_size": 0}, "vocab_size must be a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be positive"),
        ({"rope_theta": float("nan")}, "rope_theta must be a number"),
        ({"initializer_range": -1.0}, "initializer_range must be positive"),
    ],
)
def test_llama_configs_that_cannot_be(configs, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(configs["llama"], **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 1}, r"num_key_value_heads \(1\) must equal num_attention_heads \(3\)"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        ({"first_k_dense_replace": 5}, r"first_k_dense_replace \(5\) must not exceed num_hidden_layers \(4\)"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be a whole number"),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be 1"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) must not exceed n_routed_experts \(8\)"),
        ({"num_experts_per_tok": 5}, r"must not exceed the 4 experts of topk_group \(2\) groups"),
        ({"n_group": 3}, r"n_routed_experts \(8\) must be a multiple of n_group \(3\)"),
        ({"topk_group": 5}, r"topk_group \(5\) must not exceed n_group \(4\)"),
        ({"n_group": 8, "topk_group": 4}, "at least twice n_group"),
        ({"scoring_func": "relu"}, "scoring_func 'relu' with topk_method 'noaux_tc' is no router"),
        ({"scoring_func": "softmax"}, "'softmax' with topk_method 'noaux_tc' is no router that is known; there are"),
        ({"topk_method": "greedy"}, "'sigmoid' with topk_method 'greedy' is no router"),
        ({"scoring_func": "softmax", "topk_method": "greedy"}, "'greedy' knows no groups, got n_group 4"),
        (
            {"scoring_func": "softmax", "topk_method": "group_limited_greedy"},
            "norm_topk_prob with softmax scores and routed_scaling_factor 2.5",
        ),
        ({"q_lora_rank": 0}, "q_lora_rank must be a positive"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be a whole number"),
    ],
)
def test_deepseek_configs_that_cannot_be(configs, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(configs["deepseek-v3"], **changes)


def test_the_old_misspelling_of_greedy(configs):
    config = configs["deepseek-v2-lite"]
    assert dataclasses.replace(config, topk_method="gready") == config


def test_configs_that_mean_the_same_are_equal(configs):
    llama = configs["llama"]
    layers = llama.num_hidden_layers
    full = dataclasses.replace(llama, sliding_window=16, layer_types=["full_attention"] * layers)
    assert full == llama and hash(full) == hash(llama) and full.sliding_window is None
    window = dataclasses.replace(llama, sliding_window=16)
    assert dataclasses.replace(llama, sliding_window=16, layer_types=["sliding_attention"] * layers) == window
    assert window.layer_types is None and window.windows() == (16,) * layers
    assert dataclasses.replace(llama, no_rope_layers=[1] * layers) == llama
    some = dataclasses.replace(llama, no_rope_layers=[True, False] + [True] * (layers - 2))
    assert some.no_rope_layers == (1, 0) + (1,) * (layers - 2) and set(map(type, some.no_rope_layers)) == {int}
    none_shared = dataclasses.replace(configs["deepseek-v3"], n_shared_experts=0)
    assert none_shared == dataclasses.replace(configs["deepseek-v3"], n_shared_experts=None)


def test_a_whole_number_too_long_for_a_float():
    with pytest.raises(ValueError, match="rope_theta must be a number"):
        LlamaConfig(10, 64, 32, 2, 4, rope_theta=10**400)


def test_the_output_bias_follows_the_others_unless_it_is_set(configs):
    llama = configs["llama"]
    assert not llama.output_bias
    biased = dataclasses.replace(llama, attention_bias=True)
    assert biased.output_bias and biased == dataclasses.replace(biased, attention_output_bias=True)
    assert not dataclasses.replace(biased, attention_output_bias=False).output_bias
