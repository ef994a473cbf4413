"""config.json to config: every spelling, every class's own ways, and what is refused."""

import dataclasses
import importlib.util
import json
import pathlib

import pytest

from overspill.layers.rotary import LinearScaling, Llama3Scaling, RotaryScaling, YarnScaling
from overspill.zoo.building import abstract
from overspill.zoo.config import LlamaConfig
from overspill.zoo.hf_config import from_config
from overspill.zoo.model_types import MODEL_TYPES
from overspill.zoo.registry import REGISTRY

_spec = importlib.util.spec_from_file_location("hf_files", pathlib.Path(__file__).with_name("hf_files.py"))
hf_files = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hf_files)
tiny = hf_files.tiny

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


def test_every_type_has_a_small_file():
    assert set(hf_files.TINY) == set(MODEL_TYPES)


# What our fields are called in the classes of transformers, where that differs.
ATTRIBUTES = {"n_routed_experts": "num_local_experts"}
# Keys that a file must have here though the classes of transformers have defaults for them, and what isn't theirs.
NOT_THEIRS = {"rope_scaling", "rope_theta", "partial_rotary_factor", "extra", "layer_types", "sliding_window",
              "attention_output_bias", "qk_norm", "norm_placement", "norm_downcast_first", "attention_sinks",
              "no_rope_layers", "scoring_func", "router_bias", "expert_bias", "moe_layer_freq"}  # fmt: skip


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_what_a_file_leaves_out_is_the_default_of_the_class_in_transformers(model_type):
    transformers = pytest.importorskip("transformers")
    defaults = {"num_key_value_heads", "max_position_embeddings", "first_k_dense_replace"}
    # Heads as many as the class's default of key-value heads wants; latent attention has one for each head.
    file = tiny(model_type, without=defaults, num_attention_heads=128, hidden_size=128 * 12)
    theirs = transformers.AutoConfig.for_model(**file)
    ours = from_config(file)
    compared = 0
    for field in dataclasses.fields(ours):
        name = field.name if hasattr(theirs, field.name) else ATTRIBUTES.get(field.name)
        if field.name in NOT_THEIRS or name is None or not hasattr(theirs, name):
            continue
        if field.name == "head_dim" and theirs.head_dim is None:  # Mixtral leaves that to the model
            continue
        value = getattr(theirs, name)
        if field.name == "first_k_dense_replace":
            value = min(value, 4)
        if field.name in ("n_group", "topk_group"):
            value = value or 1
        assert getattr(ours, field.name) == value, field.name
        compared += 1
    assert compared >= 13
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope["rope_theta"]
    assert getattr(ours, "partial_rotary_factor", 1.0) == rope.get("partial_rotary_factor", 1.0)
    if model_type == "gpt_oss":
        assert ours.rope_scaling == YarnScaling(32.0, 4096, 32.0, 1.0, truncate=False)
    else:
        assert ours.rope_scaling == RotaryScaling()
    window = getattr(theirs, "sliding_window", None)
    if hasattr(theirs, "layer_types") and hasattr(ours, "layer_types"):
        assert ours.windows() == tuple(window if kind == "sliding_attention" else None for kind in theirs.layer_types)
    else:
        assert ours.windows() == (window,) * 4
    if hasattr(theirs, "no_rope_layers"):
        assert ours.rotates() == tuple(map(bool, theirs.no_rope_layers)) == (True, True, True, False)


def test_the_class_settles_what_files_never_say():
    configs = {name: from_config(tiny(name)) for name in MODEL_TYPES}
    for name, config in configs.items():
        assert config.model_type == name
        assert config.norm_downcast_first is (name not in ("olmo2", "gpt_oss"))
    norms = {name: config.qk_norm for name, config in configs.items() if isinstance(config, LlamaConfig)}
    assert {name for name, norm in norms.items() if norm == "head"} == {"qwen3", "qwen3_moe"}
    assert {name for name, norm in norms.items() if norm == "full"} == {"olmo2"}
    assert configs["olmo2"].norm_placement == "after"
    biases = {name: (c.attention_bias, c.output_bias) for name, c in configs.items() if name in norms}
    assert {name for name, bias in biases.items() if bias == (True, False)} == {"qwen2"}
    assert {name for name, bias in biases.items() if bias == (True, True)} == {"gpt_oss"}
    glm = from_config(tiny("glm4_moe", attention_bias=True, use_qk_norm=True))
    assert (glm.attention_bias, glm.output_bias, glm.qk_norm) == (True, False, "head")
    for name in ("llama", "qwen3", "qwen3_moe", "olmo2", "smollm3"):
        config = from_config(tiny(name, attention_bias=True))
        assert config.attention_bias and config.output_bias
    mixtral, oss = configs["mixtral"], configs["gpt_oss"]
    assert mixtral.moe_intermediate_size == oss.moe_intermediate_size == 80
    assert mixtral.norm_topk_prob and oss.norm_topk_prob
    assert oss.router_bias and oss.expert_bias and oss.attention_sinks and oss.swiglu_limit == 7.0
    assert not (mixtral.router_bias or mixtral.expert_bias or mixtral.attention_sinks or mixtral.swiglu_limit)
    routers = {name: (c.scoring_func, c.topk_method) for name, c in configs.items() if hasattr(c, "scoring_func")}
    sigmoid = {name for name, router in routers.items() if router == ("sigmoid", "noaux_tc")}
    assert sigmoid == {"glm4_moe", "deepseek_v3", "deepseek_v32"}
    assert set(routers.values()) == {("sigmoid", "noaux_tc"), ("softmax", "greedy")}


@pytest.mark.parametrize(
    ("keys", "theta", "scaling"),
    [
        ({}, 10000.0, RotaryScaling()),
        ({"rope_theta": 500000}, 500000.0, RotaryScaling()),
        ({"rope_parameters": {"rope_theta": 500000.0}}, 500000.0, RotaryScaling()),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": 500000}, 5e5, RotaryScaling()),
        ({"rope_scaling": None, "rope_parameters": None, "rope_theta": 7.0}, 7.0, RotaryScaling()),
        ({"rope_scaling": {}, "rope_theta": 7.0}, 7.0, RotaryScaling()),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 7.0}, 7.0, LinearScaling(2.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "rope_theta": 7.0}}, 7.0, LinearScaling(2.0)),
        ({"rope_parameters": {"type": "linear", "factor": 2.0, "rope_theta": 7.0}}, 7.0, LinearScaling(2.0)),
        (
            {"rope_parameters": {"rope_type": "llama3", "type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            5e5,
            Llama3Scaling(8.0, 1.0, 4.0, 256),
        ),
        # Both forms at once, each in its own spelling.
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {"type": "llama3", **LLAMA3},
                "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000, **LLAMA3},
            },
            5e5,
            Llama3Scaling(8.0, 1.0, 4.0, 256),
        ),
        # The original length at the top, as Phi-3 has it; in both places; nowhere.
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 128},
            1e4,
            YarnScaling(4.0, 128),
        ),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
                "original_max_position_embeddings": 128,
            },
            1e4,
            YarnScaling(4.0, 128),
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": None}}, 1e4, YarnScaling(4.0, 512)),
        # One block for each type of layer, all the same.
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0},
                    "sliding_attention": {"rope_type": "linear", "factor": 2, "rope_theta": 7},
                }
            },
            7.0,
            LinearScaling(2.0),
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}, "rope_theta": 7.0}, 7.0, RotaryScaling()),
    ],
)
def test_rotary_embeddings_in_all_spellings(keys, theta, scaling):
    config = from_config(tiny("llama", **keys))
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)
    assert config == from_config(tiny("llama", rope_theta=theta, rope_scaling=None)) or scaling != RotaryScaling()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            "rope_theta 10000.0 and rope_parameters.rope_theta 500000.0 differ",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 7.0}, "rope_theta": 8}, "differ"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            r"rope_scaling and rope_parameters differ: LinearScaling\(factor=2.0\) and LinearScaling\(factor=4.0\)",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}},
            "rope_scaling and rope_parameters differ",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}},
            "rope_parameters differs between full_attention and sliding_attention",
        ),
        ({"rope_parameters": {"full_attention": {}, "rope_theta": 1e4}}, "mixes blocks of types of layers"),
        ({"rope_parameters": {"full_attention": None}}, "rope_parameters.full_attention must be an object, got None"),
        ({"rope_parameters": [1]}, r"rope_parameters must be an object such as .*, got \[1\]"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": "nonsense", "factor": 2.0}}, "rope_scaling kind 'nonsense' is not known"),
        ({"rope_parameters": {"rope_type": "nonsense"}}, "rope_parameters kind 'nonsense' is not known"),
        ({"rope_scaling": {"factor": 2.0}}, "kind 'default' has no field 'factor'"),
        ({"rope_scaling": {"type": "linear"}}, "kind 'linear' needs 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "kind 'linear' needs 'factor'"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}}, "must name one kind"),
        ({"rope_scaling": {"type": ["linear"]}}, "rope_type must be a string"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True}}, "has no field 'finetuned'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "kind 'llama3' needs 'low_freq_factor'"),
        ({"rope_scaling": {"type": "yarn", "factor": 8.0, "truncate": None}}, "truncate must be true or false"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "has no field 'mrope_section'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 2**40}}, "whole number"),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 64},
                "original_max_position_embeddings": 128,
            },
            "original_max_position_embeddings 128 and rope_scaling.original_max_position_embeddings 64 differ",
        ),
        ({"rope_theta": "10000"}, "rope_theta must be a number, got '10000'"),
        ({"rope_theta": None}, "rope_theta must be a number, got None"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta must be a number, got None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but LlamaForCausalLM rotates heads as a whole"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ],
)
def test_rotary_embeddings_that_contradict_or_are_not_known(keys, message):
    with pytest.raises(ValueError, match=f"^config: .*{message}"):
        from_config(tiny("llama", **keys))


def test_a_part_of_each_head_is_rotated():
    def share(**keys):
        return from_config(tiny("glm4_moe", head_dim=16, **keys)).partial_rotary_factor

    assert share() == share(rope_parameters={"rope_theta": 1e4}) == 0.5
    assert share(partial_rotary_factor=0.25) == share(rope_parameters={"partial_rotary_factor": 0.25}) == 0.25
    assert share(partial_rotary_factor=1, rope_parameters={"partial_rotary_factor": 1.0}) == 1.0
    with pytest.raises(ValueError, match="partial_rotary_factor 0.5 and rope_parameters.partial_rotary_factor 0.25"):
        share(partial_rotary_factor=0.5, rope_parameters={"partial_rotary_factor": 0.25})
    with pytest.raises(ValueError, match="partial_rotary_factor must be 1 in DeepseekV3ForCausalLM"):
        from_config(tiny("deepseek_v3", partial_rotary_factor=0.5))


def test_scaling_that_is_null_means_two_things_in_gpt_oss():
    with pytest.raises(ValueError, match="rope_scaling is null, which transformers 4 takes for no scaling"):
        from_config(tiny("gpt_oss", rope_scaling=None))
    plain = from_config(tiny("gpt_oss", rope_scaling=None, rope_parameters={"rope_type": "default"}))
    assert plain.rope_scaling == RotaryScaling()


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("model_type", "keys", "windows"),
    [
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("mistral", {"sliding_window": 16}, [16] * 4),
        ("mistral", {}, [4096] * 4),
        ("mistral", {"sliding_window": 16, "use_sliding_window": True, "layer_types": [SLIDING] * 4}, [16] * 4),
        ("mistral", {"sliding_window": None, "use_sliding_window": False, "layer_types": [FULL] * 4}, [None] * 4),
        ("mixtral", {}, [None] * 4),
        ("mixtral", {"sliding_window": 16}, [16] * 4),
        ("qwen2", {"sliding_window": 16, "max_window_layers": 2}, [None] * 4),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16}, [None] * 4),  # from layer 28 on
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, [16] * 4),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, [None] * 4),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}, [None, None, None, 4096]),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 16, "layer_types": [SLIDING, FULL, SLIDING, "attention"]},
            [16, None, 16, None],
        ),
        ("qwen3", {"sliding_window": -1}, [None] * 4),
        ("qwen3_moe", {"sliding_window": 16, "max_window_layers": 2}, [None] * 4),
        ("qwen3_moe", {"sliding_window": 16, "use_sliding_window": True}, [16] * 4),
        ("gpt_oss", {}, [128, None] * 2),
        ("gpt_oss", {"sliding_window": 16, "layer_types": [FULL, SLIDING, FULL, FULL]}, [None, 16, None, None]),
        ("gpt_oss", {"sliding_window": 16, "layer_types": [FULL] * 4}, [None] * 4),
        ("smollm3", {"sliding_window": 16}, [None] * 4),
        ("smollm3", {"sliding_window": 16, "use_sliding_window": True}, [None, None, None, 16]),
        (
            "smollm3",
            {"sliding_window": 16, "use_sliding_window": True, "no_rope_layers": [0, 1, 0, 1]},
            [16, None, 16, None],
        ),
        (
            "smollm3",
            {"sliding_window": 16, "use_sliding_window": True, "layer_types": [SLIDING, FULL, FULL, FULL]},
            [16, None, None, None],
        ),
        ("llama", {"sliding_window": 16, "use_sliding_window": False}, [None] * 4),
        ("olmo2", {"sliding_window": None, "layer_types": [FULL] * 4}, [None] * 4),
        ("deepseek_v2", {"sliding_window": None}, [None] * 4),
    ],
)
def test_sliding_windows_are_where_the_class_has_them(model_type, keys, windows):
    assert list(from_config(tiny(model_type, **keys)).windows()) == windows


@pytest.mark.parametrize(
    ("keys", "rotated"),
    [
        ({}, [1, 1, 1, 0]),
        ({"no_rope_layer_interval": 2}, [1, 0, 1, 0]),
        ({"no_rope_layer_interval": 5}, [1, 1, 1, 1]),
        ({"no_rope_layers": [0, 1, 1, 1], "no_rope_layer_interval": 2}, [0, 1, 1, 1]),
        ({"no_rope_layers": [0, 1, 1, 1, 0, 0]}, [0, 1, 1, 1]),
    ],
)
def test_layers_without_rotary_embeddings(keys, rotated):
    assert list(from_config(tiny("smollm3", **keys)).rotates()) == list(map(bool, rotated))


@pytest.mark.parametrize(
    ("model_type", "keys", "fields"),
    [
        ("llama", {"eos_token_id": 2}, {"eos_token_id": 2}),
        ("llama", {"eos_token_id": [1, 2, 3]}, {"eos_token_id": (1, 2, 3)}),
        ("llama", {"eos_token_id": None}, {"eos_token_id": None}),
        ("llama", {"pad_token_id": -1}, {"pad_token_id": None}),
        ("llama", {"head_dim": None}, {"head_dim": 12}),
        ("llama", {"head_dim": 20}, {"head_dim": 20}),
        ("llama", {"num_key_value_heads": None}, {"num_key_value_heads": 4}),
        ("llama", {"rms_norm_eps": 1, "initializer_range": 1}, {"rms_norm_eps": 1.0, "initializer_range": 1.0}),
        ("llama", {"hidden_act": "swish"}, {"hidden_act": "silu"}),
        ("qwen3", {}, {"head_dim": 128}),
        ("gpt_oss", {}, {"head_dim": 64}),
        ("mixtral", {"num_experts": 8}, {"n_routed_experts": 8}),
        ("mixtral", {"num_experts": None}, {"n_routed_experts": 8}),
        ("qwen3_moe", {"mlp_only_layers": [1, 0]}, {"first_k_dense_replace": 2}),
        ("qwen3_moe", {"mlp_only_layers": None, "norm_topk_prob": True}, {"norm_topk_prob": True}),
        ("gpt_oss", {"experts_per_token": 3, "swiglu_alpha": 1.5}, {"num_experts_per_tok": 3, "swiglu_alpha": 1.5}),
        ("glm4_moe", {"num_mtp_layers": 2}, {"num_nextn_predict_layers": 2}),
        ("glm4_moe", {"num_mtp_layers": 2, "num_nextn_predict_layers": 2}, {"num_nextn_predict_layers": 2}),
        ("glm4_moe", {"n_shared_experts": 0}, {"n_shared_experts": None}),
        ("glm4_moe", {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}, {"first_k_dense_replace": 2}),
        ("deepseek_v2", {"q_lora_rank": None}, {"q_lora_rank": None}),
        ("deepseek_v2", {"q_lora_rank": 16, "topk_method": "gready"}, {"q_lora_rank": 16, "topk_method": "greedy"}),
        ("deepseek_v2", {"n_group": 4, "topk_group": 2}, {"n_group": 1, "topk_group": 1}),  # greedy has no groups
        (
            "deepseek_v2",
            {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "scoring_func": "softmax"},
            {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
        ),
        ("deepseek_v2", {"num_experts": 16, "norm_topk_prob": None}, {"n_routed_experts": 16}),
        ("deepseek_v3", {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}, {"num_nextn_predict_layers": 1}),
        ("deepseek_v3", {"num_nextn_predict_layers": 0}, {"num_nextn_predict_layers": 0}),
        ("deepseek_v3", {"n_group": None, "topk_group": None}, {"n_group": 1, "topk_group": 1}),
        ("deepseek_v3", {"head_dim": 64, "qk_head_dim": 192}, {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}),
        ("deepseek_v3", {"rope_interleave": False}, {"rope_interleave": False}),
        ("deepseek_v3", {"first_k_dense_replace": 9}, {"first_k_dense_replace": 4}),
        ("deepseek_v3", {"norm_topk_prob": False, "routed_scaling_factor": 1}, {"routed_scaling_factor": 1.0}),
        ("deepseek_v32", {}, {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}),
        ("deepseek_v32", {"index_topk": 16, "num_local_experts": 16}, {"index_topk": 16, "n_routed_experts": 16}),
        (
            "deepseek_v32",
            {"layer_types": ["deepseek_sparse_attention"] * 4, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
            {"first_k_dense_replace": 1},
        ),
    ],
)
def test_spellings_and_defaults(model_type, keys, fields):
    config = from_config(tiny(model_type, **keys))
    assert {name: getattr(config, name) for name in fields} == fields
    assert from_config(json.loads(json.dumps(tiny(model_type, **keys)))) == config


def test_latent_attention_has_a_key_value_head_for_each_head():
    for file in (tiny("deepseek_v3", without=["num_key_value_heads"]), tiny("deepseek_v3", num_key_value_heads=None)):
        assert from_config(file).num_key_value_heads == 4


def test_kimi_is_deepseek_v3_alone_and_in_its_wrapper():
    v3 = from_config(tiny("deepseek_v3", num_nextn_predict_layers=0))
    kimi = tiny("deepseek_v3", num_nextn_predict_layers=0, auto_map={"AutoConfig": "x.Y"}) | {"model_type": "kimi_k2"}
    assert from_config(kimi) == v3 and from_config(kimi).model_type == "deepseek_v3"
    assert from_config(kimi).extras["auto_map"] == {"AutoConfig": "x.Y"}
    quantised = {"quant_method": "modelopt"}
    wrapper = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "vision_config": {"hidden_act": "gelu", "dropout": 0.5},
        "quantization_config": quantised,
    }
    config = from_config(wrapper | {"text_config": kimi})
    assert config == v3 and config.extras["wrapper"] == wrapper
    assert config.extras["quantization_config"] == quantised and config.extras["dtype"] == "bfloat16"
    del kimi["model_type"]
    assert from_config(wrapper | {"text_config": kimi}) == v3
    # Another wrapper, whose text model is a plain one.
    llava = {"model_type": "llava", "text_config": tiny("llama"), "projector_hidden_act": "gelu"}
    assert from_config(llava) == from_config(tiny("llama"))
    for changes, message in (
        ({"text_config": tiny("llama") | {"model_type": "mllama_text_model"}}, "text_config: model_type 'mllama_text"),
        ({"text_config": {"model_type": "llama"}}, "text_config: vocab_size is missing"),
        ({"text_config": tiny("llama"), "tie_word_embeddings": True}, None),
        (
            {"text_config": tiny("llama", tie_word_embeddings=False), "tie_word_embeddings": True},
            "tie_word_embeddings True and text_config.tie_word_embeddings False differ",
        ),
        ({"text_config": 3}, "model_type 'llava' is not known"),
    ):
        if message is None:
            assert from_config(llava | changes).tie_word_embeddings
        else:
            with pytest.raises(ValueError, match=f"^config: {message}"):
                from_config(llava | changes)


def test_what_a_file_says_beside_is_kept():
    beside = {
        "architectures": ["LlamaForCausalLM"],
        "transformers_version": "4.46.3",
        "use_cache": True,
        "my_own_notes": {"deep": [1, None, "é"]},
        "quantization_config": {"quant_method": "fp8"},
        "ep_size": 1,
        "pretraining_tp": 4,
        "temperature": 0.6,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.9,
        "layer_norm_eps": 1e-5,
    }
    config = from_config(tiny("llama", torch_dtype="torch.bfloat16", **beside))
    assert config.extras == beside | {"dtype": "bfloat16"}
    assert config == from_config(tiny("llama")) and hash(config) == hash(from_config(tiny("llama")))
    dtype = lambda **keys: from_config(tiny("llama", **keys)).extras.get("dtype")
    assert dtype(torch_dtype="float16", dtype="bfloat16") == "bfloat16"
    assert dtype(torch_dtype="float16", dtype=None) == "float16" and dtype(torch_dtype="auto") is dtype() is None


def test_a_config_comes_from_paths_dictionaries_names_and_itself(tmp_path, monkeypatch):
    file = tiny("qwen3", rope_theta=1e6)
    config = from_config(file)
    path = tmp_path / "config.json"
    path.write_text("\ufeff" + json.dumps(file), encoding="utf-8")
    for source in (path, tmp_path, str(path), str(tmp_path), config, dict(file)):
        assert from_config(source) == abstract(source).config == config
    assert from_config(config) is config
    named = from_config("llama-3.2-1b")
    assert named.head_dim == 64 and REGISTRY["llama-3.2-1b"] is named
    # A registered name goes before a folder of that name; ./ says the folder.
    monkeypatch.chdir(tmp_path)
    pathlib.Path("llama-3.2-1b").mkdir()
    pathlib.Path("llama-3.2-1b/config.json").write_text(json.dumps(file))
    assert from_config("llama-3.2-1b") is named and from_config("./llama-3.2-1b") == config
    monkeypatch.setenv("HOME", str(tmp_path))
    assert from_config("~/config.json") == config
