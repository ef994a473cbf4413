"""Files that aren't what they should be, and models that aren't supported: one line that names file and key."""

import importlib.util
import json
import os
import pathlib

import pytest

from overspill.zoo.hf_config import from_config
from overspill.zoo.model_types import MODEL_TYPES

_spec = importlib.util.spec_from_file_location("hf_files", pathlib.Path(__file__).with_name("hf_files.py"))
hf_files = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hf_files)
tiny = hf_files.tiny


def refused(file, message):
    with pytest.raises(ValueError, match=message) as caught:
        from_config(file)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 900
    return text


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        # What other classes have, and these haven't.
        ("llama", {"hidden_act": "gelu"}, r"hidden_act must be 'silu' \(SwiGLU\), got 'gelu'"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1, .*: set it to 0, which changes no"),
        ("llama", {"resid_pdrop": 0.1}, "resid_pdrop is 0.1"),
        ("llama", {"hidden_dropout": 0.1}, "hidden_dropout is 0.1"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which isn't supported in llama"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0"),
        ("llama", {"residual_multiplier": 0.22}, "residual_multiplier is 0.22"),
        ("llama", {"attention_multiplier": 1.0}, "attention_multiplier is 1.0"),
        ("llama", {"logits_scaling": 8.0}, "logits_scaling is 8.0"),
        ("llama", {"logit_scale": 0.0625}, "logit_scale is 0.0625"),
        ("llama", {"scale_emb": 12}, "scale_emb is 12"),
        ("llama", {"scale_depth": 1.4}, "scale_depth is 1.4"),
        ("llama", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar is 256"),
        ("llama", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("llama", {"sliding_window": 4096}, "sliding_window is 4096, and LlamaForCausalLM has none"),
        ("llama", {"layer_types": ["sliding_attention"] * 4}, "layer_types has 'sliding_attention', but all layers"),
        ("llama", {"layer_types": ["chunked_attention"] * 4}, "layer_types has 'chunked_attention'"),
        ("llama", {"attention_chunk_size": 8192}, "attention_chunk_size is 8192"),
        ("llama", {"no_rope_layers": [1, 1, 1, 0]}, r"no_rope_layers is \[1, 1, 1, 0\]"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved is True"),
        ("llama", {"rotary_pct": 0.25}, "rotary_pct is 0.25"),
        ("llama", {"rope_local_base_freq": 1e4}, "rope_local_base_freq is 10000.0"),
        ("llama", {"use_dynamic_ntk": True}, "use_dynamic_ntk is True"),
        ("llama", {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ("llama", {"alibi": True}, "alibi is True"),
        ("llama", {"use_qk_norm": True}, "use_qk_norm is True"),
        ("llama", {"qkv_bias": True}, "qkv_bias is True"),
        ("llama", {"is_causal": False}, "is_causal is False"),
        ("llama", {"use_rope": False}, "use_rope is False"),
        ("llama", {"num_experts": 1}, "num_experts is 1"),
        ("llama", {"activation_function": "gelu"}, "activation_function is 'gelu'"),
        ("llama", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("llama", {"num_local_experts": 8}, "num_local_experts is 8"),
        ("llama", {"moe_intermediate_size": 8}, "moe_intermediate_size is 8"),
        ("llama", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1"),
        ("llama", {"kv_lora_rank": 512}, "kv_lora_rank is 512"),
        ("llama", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config is"),
        ("llama", {"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2"),
        ("llama", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("llama", {"pruned_heads": {"0": [1]}}, "pruned_heads is"),
        ("mistral", {"attention_bias": True}, "attention_bias is True, which isn't supported in mistral models"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "all layers of this MistralForCausalLM are 'sliding_atte"),
        ("mistral", {"use_sliding_window": False}, "use_sliding_window must be true beside sliding_window 4096"),
        ("qwen2", {"attention_bias": False}, "attention_bias must be true in Qwen2ForCausalLM, got False"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias is True"),
        ("qwen2", {"use_mrope": True}, "use_mrope is True"),
        ("qwen3", {"use_qk_norm": False}, "use_qk_norm must be true in Qwen3ForCausalLM"),
        ("qwen3", {"layer_types": ["full_attention"] * 3}, "layer_types must have an entry for each of the 4 layers"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 4}, "sliding_window must be given"),
        ("qwen3", {"layer_types": ["linear_attention"] * 4}, "layer_types knows .*got 'linear_attention'"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must have an entry for each of the 4 layers, got 2"),
        ("smollm3", {"no_rope_layers": [1, 2, 1, 1]}, r"no_rope_layers is made of 1 \(rotated\) and 0 \(not\), got 2"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be a whole number from 1"),
        ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob must be true in MixtralForCausalLM"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ("mixtral", {"n_shared_experts": 1}, "n_shared_experts is 1"),
        ("mixtral", {"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5"),
        ("mixtral", {"num_experts": 4}, "num_local_experts 8 and num_experts 4 are two names of one thing and differ"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step must be 1 .*got 2"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers must be the first layers or none, got \[1\]"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size is 64"),
        ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 2}, "versions of transformers disagree"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, 'scoring_func must be "softmax" in Qwen3MoeForCausalLM'),
        ("glm4_moe", {"scoring_func": "softmax"}, 'scoring_func must be "sigmoid" in Glm4MoeForCausalLM'),
        ("glm4_moe", {"num_mtp_layers": 1, "num_nextn_predict_layers": 2}, "two names of one thing and differ"),
        ("gpt_oss", {"swiglu_limit": None}, "swiglu_limit must be a number, got None"),
        ("gpt_oss", {"swiglu_alpha": "1.7"}, "swiglu_alpha must be a number, got '1.7'"),
        ("gpt_oss", {"experts_per_token": 2}, "num_experts_per_tok 3 and experts_per_token 2"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method must be 'greedy' or 'group_limited_greedy' in Deeps"),
        ("deepseek_v2", {"topk_method": ["greedy"]}, "topk_method must be"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, 'scoring_func must be "softmax" in DeepseekV2ForCausalLM'),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob must be false or null in DeepseekV2ForCausalLM"),
        ("deepseek_v2", {"rope_interleave": False}, "rope_interleave must be true in DeepseekV2ForCausalLM"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias is True"),
        ("deepseek_v3", {"scoring_func": "softmax"}, 'scoring_func must be "sigmoid" in DeepseekV3ForCausalLM'),
        ("deepseek_v3", {"topk_method": "greedy"}, 'topk_method must be "noaux_tc" in DeepseekV3ForCausalLM'),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq must be 1, as in every released model, got 2"),
        ("deepseek_v3", {"moe_layer_freq": [0, 1, 1, 1]}, r"moe_layer_freq must be 1, .*got \[0, 1, 1, 1\]"),
        ("deepseek_v3", {"index_topk": 64}, "index_topk is 64"),
        ("deepseek_v3", {"qk_head_dim": 64}, "qk_head_dim is 64, but qk_nope_head_dim and qk_rope_head_dim are 192"),
        ("deepseek_v3", {"num_key_value_heads": 2}, r"num_key_value_heads \(2\) must equal num_attention_heads \(4\)"),
        ("deepseek_v3", {"sliding_window": 128}, "sliding_window is 128"),
        ("deepseek_v3", {"hc_mult": 4}, "hc_mult is 4"),
        ("deepseek_v3", {"n_group": 3}, r"n_routed_experts \(16\) must be a multiple of n_group \(3\)"),
        ("deepseek_v3", {"layer_types": ["indexed_attention"] * 4}, "layer_types has 'indexed_attention'"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 4}, "layer_types has 'full_attention'"),
        ("deepseek_v32", {"mlp_layer_types": ["sparse", "dense"] * 2}, "mlp_layer_types must be 'dense' for the first"),
        ("deepseek_v32", {"mlp_layer_types": ["dense"] * 2}, "mlp_layer_types must be .* 4 in all"),
        (
            "deepseek_v32",
            {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2},
            "mlp_layer_types begins with 2 dense layers, but first_k_dense_replace is 1",
        ),
        ("deepseek_v32", {"q_lora_rank": None}, "index_topk needs q_lora_rank"),
        ("deepseek_v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave must be false"),
        # Heads of other tasks.
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "only causal language models are read"),
        ("llama", {"architectures": ["LlamaModel"]}, r"architectures is \['LlamaModel'\]"),
        ("llama", {"architectures": ["LlamaForCausalLMEagle3"]}, "only causal language models"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "architectures must be a list of strings or null"),
    ],
)
def test_what_changes_the_mathematics_and_is_not_supported_raises(model_type, changes, message):
    assert refused(tiny(model_type, **changes), message).startswith("config: ")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_same_things_turned_off_are_read(model_type):
    off = {
        "attn_logit_softcapping": None,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1,
        "attention_multiplier": None,
        "logits_scaling": 1.0,
        "clip_qkv": None,
        "alibi": False,
        "rotary_pct": 1.0,
        "position_embedding_type": "rope",
        "is_causal": True,
        "attention_chunk_size": None,
        "mlp_bias": False,
        "shared_expert_intermediate_size": 0,
        "attention_dropout": 0.0,
        "resid_pdrop": 0,
        "router_jitter_noise": 0.0,
        "per_layer_config": {},
        "pruned_heads": {},
        "is_encoder_decoder": False,
        "hidden_activation": "silu",
        "max_window_layers": 4,
        "layer_types": None,
        "head_dim": 16,
        "use_mup": False,
        "router_aux_loss_coef": 0.001,
        "moe_router_dtype": "fp32",
        "expert_parallel_size": 8,
        "vision_hidden_act": "gelu",
    }
    assert from_config(tiny(model_type, **off)) == from_config(tiny(model_type, head_dim=16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "48"}, "hidden_size must be a whole number from 1 to 2147483647, got '48'"),
        ({"hidden_size": 48.0}, "hidden_size must be a whole number .*got 48.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number from 1 to 10000, got True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number from 1 to 10000"),
        ({"vocab_size": -97}, "vocab_size must be a whole number .*got -97"),
        ({"vocab_size": 2**40}, "vocab_size must be a whole number"),
        ({"vocab_size": None}, "vocab_size must be a whole number .*got None"),
        ({"intermediate_size": [80]}, r"intermediate_size must be a whole number .*got \[80\]"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, r"hidden_size \(48\) must be a multiple of num_"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"head_dim": 7}, "must be even for rotary embeddings"),
        ({"head_dim": "12"}, "head_dim must be a whole number"),
        ({"max_position_embeddings": 512.5}, "max_position_embeddings must be a whole number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number, got '1e-5'"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps must be positive"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a number, got 1000"),
        ({"initializer_range": True}, "initializer_range must be a number, got True"),
        ({"rope_theta": 0}, "rope_theta must be positive"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        ({"attention_bias": 0}, "attention_bias must be true or false, got 0"),
        ({"bos_token_id": "1"}, "bos_token_id must be a token's id or null, got '1'"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id must be a list of whole numbers or null"),
        ({"eos_token_id": True}, "eos_token_id must be a token's id or null"),
        ({"pad_token_id": -2}, "pad_token_id must be a token's id or null"),
        ({"hidden_act": None}, "hidden_act must be 'silu'"),
        ({"layer_types": "full_attention"}, "layer_types must be a list of strings or null"),
        ({"dtype": "int8"}, "dtype must be a floating dtype such as 'bfloat16', got 'int8'"),
        ({"torch_dtype": 16}, "dtype must be a floating dtype"),
        ({"model_type": None}, "model_type None is not known; there are llama, mistral"),
        ({"model_type": ["llama"]}, "model_type .*is not known"),
        ({"model_type": "lama"}, "model_type 'lama' is not known; did you mean 'llama'. There are llama, mistral"),
        ({"model_type": "zamba"}, "model_type 'zamba' is not known; there are llama, .*, deepseek_v32, kimi_k2"),
    ],
)
def test_values_of_the_wrong_kind(changes, message):
    assert refused(tiny("llama") | changes, message).startswith("config: ")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_file_must_have_the_sizes(model_type):
    required = {"model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                "num_attention_heads"}  # fmt: skip
    file = tiny(model_type)
    required |= set(file) & {"n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"}
    for key in required:
        refused({k: v for k, v in file.items() if k != key}, f"^config: {key} is missing$")
    if experts := set(file) & {"num_experts", "num_local_experts"}:
        refused({k: v for k, v in file.items() if k not in experts}, f"^config: {min(experts)} is missing$")


def test_a_misspelt_key_is_not_a_missing_one():
    file = tiny("llama")
    file["num_key_value_head"] = file.pop("num_key_value_heads")
    refused(file, "num_key_value_head isn't known; did you mean num_key_value_heads, which the file doesn't have")


@pytest.mark.parametrize("model_type", ["llama", "smollm3", "glm4_moe", "gpt_oss", "deepseek_v32"])
def test_no_value_of_any_key_does_more_than_raise_one_line(model_type):
    """Every key of a file with all of them, with values of every kind: read or refused, never another error."""
    none = ("sliding_window", "layer_types", "mlp_layer_types", "rope_parameters", "dtype", "no_rope_layers",
            "mlp_only_layers", "topk_method", "architectures", "use_sliding_window", "text_config",
            "original_max_position_embeddings")  # fmt: skip
    file = tiny(model_type, swiglu_limit=7.0, n_group=1, first_k_dense_replace=1, rope_theta=1e4, eos_token_id=2,
                head_dim=16, num_mtp_layers=0, max_window_layers=0) | dict.fromkeys(none)  # fmt: skip
    if model_type == "gpt_oss":
        file["rope_parameters"] = {"rope_type": "default"}
    values = [None, True, False, 0, 1, -1, 2.5, -0.5, 10**12, 10**400, 1e308, "", "silu", [], [1, "a"], [None], {},
              {"a": {}}, {"rope_type": "yarn"}, {"rope_type": 3, "factor": []}, [0, 1] * 2, ["dense"] * 4]  # fmt: skip
    refusals = 0
    for key in file:
        for value in values:
            try:
                from_config(file | {key: value})
            except ValueError as error:
                refusals += 1
                assert str(error).startswith("config: ") and "\n" not in str(error) and len(str(error)) < 900
    assert refusals > 5 * len(file)


GOOD = json.dumps(tiny("llama"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "isn't JSON: Expecting value"),
        (GOOD.encode()[:-9], "isn't JSON"),
        (GOOD.encode() + b"}", "isn't JSON: Extra data"),
        (b"\x93NUMPY\x01\x00\xff\xfe", "isn't JSON"),
        (b"\x80\x04\x95\x10\x00", "isn't JSON"),
        (b"{'vocab_size': 97}", "isn't JSON"),
        (json.dumps([tiny("llama")]).encode(), "holds an object in braces at its top, this one holds a list"),
        (b'"llama"', "this one holds a string"),
        (b"null", "this one holds null"),
        (b"3", "this one holds a number or a flag"),
        (b"{}", "model_type is missing"),
        (GOOD.replace("97", "NaN").encode(), "vocab_size must be a number, got nan"),
        (GOOD.replace("97", "Infinity").encode(), "vocab_size must be a number, got inf"),
        (GOOD.replace("97", "1e999").encode(), "vocab_size must be a number, got inf"),
        (GOOD.replace("97", "9" * 5000).encode(), "integer|int"),
        (GOOD.replace("97", '97, "note": {"a": [NaN]}').encode(), "note must be a number, got nan"),
        (GOOD.replace("97", '97, "vocab_size": 98').encode(), "vocab_size is there twice, as 97 and as 98"),
        (b'{"a": ' * 100_000, "nested too deeply|isn't JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply|isn't JSON"),
        (b" " * ((1 << 26) + 1), "67108865 bytes are too many for a config.json"),
    ],
)
def test_damaged_files_are_named(tmp_path, data, message):
    path = tmp_path / "config.json"
    path.write_bytes(data)
    for source in (path, tmp_path):
        assert refused(source, message).startswith(f"{path}: ")


def test_paths_that_lead_nowhere(tmp_path):
    refused(tmp_path, "has no config.json in it; there is nothing$")
    for name in ("params.json", *(f"consolidated.{i:02d}.pth" for i in range(12))):
        (tmp_path / name).write_text("{}")
    text = refused(tmp_path, "has no config.json in it; there is consolidated.00.pth, .* and 5 more$")
    assert text.startswith(f"{tmp_path}: ")
    refused(tmp_path / "config.json", "config.json: can't be read: No such file")
    refused(str(tmp_path / "config.json"), "there is no file or folder .*config.json'; models on the Hub are")
    refused("meta-llama/Llama-3.1-8B", "no file or folder .*fetched by zoo.load. Without its weights, 'llama-3.1-8b'")
    refused("", "no model is called ''")
    (tmp_path / "config.json").mkdir()
    refused(tmp_path, "has no config.json in it")
    refused(tmp_path / "config.json", "has no config.json in it; there is nothing")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    refused(tmp_path / "link", "can't be read")
    if os.geteuid():
        (tmp_path / "secret").write_text(GOOD)
        (tmp_path / "secret").chmod(0)
        refused(tmp_path / "secret", "can't be read: Permission denied")


def test_dictionaries_that_are_no_json():
    refused(tiny("llama", note={1, 2}), "^config: holds what no config.json can: Object of type set")
    refused(tiny("llama", vocab_size=float("nan")), "^config: vocab_size must be a number, got nan")
    loop = tiny("llama")
    loop["loop"] = loop
    refused(loop, "^config: holds what no config.json can")
    assert from_config(tiny("llama", id2label={0: "a"})).extras["id2label"] == {"0": "a"}
