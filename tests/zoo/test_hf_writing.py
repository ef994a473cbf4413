"""Config to config.json: read back the same by us, by readers of both forms, and by transformers."""

import dataclasses
import importlib.util
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from overspill.layers.rotary import RotaryScaling
from overspill.zoo.config import Config, LlamaConfig
from overspill.zoo.hf_config import from_config, to_hf
from overspill.zoo.model_types import MODEL_TYPES, model_type_of
from overspill.zoo.moe_config import DeepSeekConfig, MoEConfig
from overspill.zoo.registry import REGISTRY

_spec = importlib.util.spec_from_file_location("hf_files", pathlib.Path(__file__).with_name("hf_files.py"))
hf_files = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hf_files)
tiny = hf_files.tiny

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 256}  # fmt: skip
YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 128}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2, 3, 4, 5, 6, 7.5], "factor": 4.0,
        "original_max_position_embeddings": 128}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
# Each option of each class away from its default, in the form of one or the other version.
FILES = {
    "llama": tiny("llama", rope_theta=5e5, rope_scaling=LLAMA3, attention_bias=True, mlp_bias=True, head_dim=16,
                  tie_word_embeddings=True, eos_token_id=[2, 5], bos_token_id=None, pad_token_id=3),
    "llama, yarn": tiny("llama", rope_parameters=YARN | {"rope_theta": 9e3, "truncate": False, "attention_factor": 2}),
    "llama, longrope": tiny("llama", rope_scaling=LONG),
    "llama, dynamic": tiny("llama", rope_scaling={"type": "dynamic", "factor": 3.0}, initializer_range=0.1),
    "llama, linear": tiny("llama", rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 7e3}),
    "mistral": tiny("mistral", sliding_window=None, rope_theta=1e6, eos_token_id=None),
    "mistral, window": tiny("mistral", sliding_window=17, head_dim=20, rms_norm_eps=1e-5),
    "mixtral": tiny("mixtral", sliding_window=9, tie_word_embeddings=True),
    "qwen2": tiny("qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1, rope_theta=1e6),
    "qwen2, all": tiny("qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=0),
    "qwen2, full": tiny("qwen2", sliding_window=9, eos_token_id=7, tie_word_embeddings=True),
    "qwen3": tiny("qwen3", use_sliding_window=True, sliding_window=9, layer_types=[SLIDING, FULL] * 2,
                  attention_bias=True),
    "qwen3_moe": tiny("qwen3_moe", norm_topk_prob=True, mlp_only_layers=[0, 1], use_sliding_window=True,
                      sliding_window=9),
    "qwen3_moe, full": tiny("qwen3_moe", head_dim=20, attention_bias=True, rope_theta=1e6),
    "olmo2": tiny("olmo2", attention_bias=True, eos_token_id=5, pad_token_id=None, rope_theta=5e5),
    "smollm3": tiny("smollm3", no_rope_layers=[0, 1, 1, 0], use_sliding_window=True, sliding_window=9, mlp_bias=True,
                    attention_bias=True, tie_word_embeddings=False),
    "smollm3, rotated": tiny("smollm3", no_rope_layers=[1] * 4),
    "glm4_moe": tiny("glm4_moe", head_dim=16, attention_bias=True, use_qk_norm=True, partial_rotary_factor=0.25,
                     n_group=2, routed_scaling_factor=2.5, first_k_dense_replace=2, num_nextn_predict_layers=0,
                     n_shared_experts=2),
    "glm4_moe, defaults": tiny("glm4_moe", head_dim=16, norm_topk_prob=False, n_shared_experts=0),
    "gpt_oss": tiny("gpt_oss", swiglu_limit=2.5, swiglu_alpha=1.3, sliding_window=9, attention_bias=False,
                     rope_theta=1e4, layer_types=[FULL, SLIDING, FULL, FULL]),
    "gpt_oss, full": tiny("gpt_oss", layer_types=[FULL] * 4, rope_parameters={"rope_type": "default"}),
    "deepseek_v2": tiny("deepseek_v2", q_lora_rank=None, rope_scaling=YARN, attention_bias=True, n_shared_experts=1),
    "deepseek_v2, groups": tiny("deepseek_v2", topk_method="group_limited_greedy", n_group=4, topk_group=2,
                                routed_scaling_factor=16.0, kv_lora_rank=20, qk_nope_head_dim=10, v_head_dim=14),
    "deepseek_v3": tiny("deepseek_v3", rope_scaling=YARN, rope_theta=5e4, q_lora_rank=24, num_nextn_predict_layers=2,
                        n_group=4, topk_group=2, routed_scaling_factor=1.5, rms_norm_eps=1e-5,
                        tie_word_embeddings=True),
    "deepseek_v3, half": tiny("deepseek_v3", rope_interleave=False, norm_topk_prob=False, n_group=1, topk_group=1,
                              first_k_dense_replace=0, num_nextn_predict_layers=0, qk_rope_head_dim=16),
    "deepseek_v3, none shared": tiny("deepseek_v3", n_shared_experts=None),
    "deepseek_v32": tiny("deepseek_v32", index_topk=16, index_n_heads=4, index_head_dim=96, num_nextn_predict_layers=1),
}  # fmt: skip
CONFIGS = {name: from_config(file) for name, file in FILES.items()} | REGISTRY


def test_every_type_is_written():
    assert {config.model_type for config in CONFIGS.values()} - {None} == set(MODEL_TYPES)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_is_read_back(name):
    config = CONFIGS[name]
    text = json.dumps(to_hf(config, dtype="bfloat16"))
    back = from_config(json.loads(text))
    assert back == dataclasses.replace(config, model_type=model_type_of(config))
    assert back.extras["dtype"] == "bfloat16"
    again = to_hf(back)
    assert again == json.loads(text), "a second round changes nothing"
    assert again["architectures"] == [MODEL_TYPES[model_type_of(config)].architecture]


def as_version_4(file):
    """Rotary embeddings as transformers 4 reads them: keys at the top alone."""
    scaling = file["rope_scaling"] or {}
    kind = scaling.get("rope_type")
    assert kind == scaling.get("type")  # before 4.43 that name alone was read
    if kind == "longrope":  # looked for at the top
        assert file["original_max_position_embeddings"] == scaling["original_max_position_embeddings"]
    numbers = {key: value for key, value in scaling.items() if key not in ("rope_type", "type")}
    return kind, file["rope_theta"], file.get("partial_rotary_factor", 1.0), numbers


def as_version_5(file):
    """As transformers 5 reads them: rope_parameters alone."""
    block = dict(file["rope_parameters"])
    kind, theta = block.pop("rope_type"), block.pop("rope_theta")
    share = block.pop("partial_rotary_factor", 1.0)
    return None if kind == "default" else kind, theta, share, block


@pytest.mark.parametrize("name", CONFIGS)
def test_readers_of_both_forms_see_the_same_rotary_embedding(name):
    config, file = CONFIGS[name], to_hf(CONFIGS[name], dtype=jnp.float16)
    assert as_version_4(file) == as_version_5(file)
    kind, theta, share, numbers = as_version_4(file)
    assert (theta, share) == (config.rope_theta, getattr(config, "partial_rotary_factor", 1.0))
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(config.rope_scaling).items()}
    assert {"truncate": True} | numbers == {"truncate": True} | {k: v for k, v in fields.items() if v is not None}
    assert kind == type(config.rope_scaling).__name__.removesuffix("Scaling").lower().replace("rotary", "") or not kind
    assert (kind is None) == (config.rope_scaling == RotaryScaling())
    assert file["dtype"] == file["torch_dtype"] == "float16"
    # What other readers divide out of the hidden size where it isn't written.
    assert ("head_dim" in file) == isinstance(config, LlamaConfig)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", FILES)
def test_transformers_reads_the_same_from_the_original_and_from_ours(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    transformers.logging.set_verbosity_error()

    def read(file):
        (tmp_path / "config.json").write_text(json.dumps(file))
        return transformers.AutoConfig.from_pretrained(tmp_path)

    if name in ("deepseek_v3, none shared",):  # null isn't allowed by the class, zero is
        original = read(FILES[name] | {"n_shared_experts": 0})
    else:
        original = read(FILES[name] | {"torch_dtype": "bfloat16"})
    ours = read(to_hf(CONFIGS[name], dtype="bfloat16"))
    assert type(ours) is type(original) and str(ours.dtype) == "torch.bfloat16"
    ignored = {"dtype", "architectures", "rope_parameters", "max_window_layers", "original_max_position_embeddings"}
    theirs, written = original.to_dict(), ours.to_dict()
    if name == "gpt_oss, full":
        ignored.add("sliding_window")  # no layer has it
    for key in set(theirs) - ignored:
        if theirs[key] is None and key in ("head_dim", "n_group", "topk_group"):  # as the model has it, one group
            continue
        assert written[key] == theirs[key], key
    rope = [{k: v for k, v in c["rope_parameters"].items() if k != "type"} for c in (theirs, written)]
    assert rope[0] == rope[1]
    # What transformers saves, in the form of version 5, is read as the same again.
    original.save_pretrained(tmp_path / "saved")
    saved = from_config(tmp_path / "saved")
    assert saved == CONFIGS[name]
    ours.save_pretrained(tmp_path / "again")
    assert from_config(tmp_path / "again") == CONFIGS[name]


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ("llama-3-8b", {"qk_norm": "head"}, "'llama' can't hold this config: qk_norm='head' .*'qwen3' can$"),
        ("llama-3-8b", {"sliding_window": 16}, "this config: sliding_window=16 is .*'mistral' or 'smollm3' can"),
        ("llama-3-8b", {"no_rope_layers": (1, 0) * 16}, "this config: no_rope_layers=.*; model_type 'smollm3' can"),
        ("llama-3-8b", {"norm_placement": "after"}, "this config: norm_placement='after' is read as 'before'$"),
        ("llama-3-8b", {"norm_downcast_first": False}, "this config: norm_downcast_first=False"),
        ("llama-3-8b", {"attention_sinks": True}, "this config: attention_sinks=True is read as False$"),
        ("llama-3-8b", {"attention_output_bias": True}, "this config: attention_output_bias=True"),
        ("llama-3-8b", {"partial_rotary_factor": 0.5}, "this config: partial_rotary_factor is 0.5, but Llama"),
        ("llama-3-8b", {"hidden_size": 100}, "hidden_size=100 with num_attention_heads=32, which doesn't.*mistral"),
        ("mistral-7b-v0.1", {"attention_bias": True, "mlp_bias": True}, "this config: attention_bias=T.*, mlp_bias=T"),
        ("qwen2.5-7b", {"attention_bias": False}, "this config: attention_bias=False .*'llama'"),
        ("qwen3-8b", {"qk_norm": None}, "this config: qk_norm=None is read as 'head'; model_type 'llama'"),
        ("olmo-2-7b", {"norm_placement": "before"}, "this config: norm_placement='before'"),
        ("mixtral-8x7b", {"moe_intermediate_size": 8}, "this config: moe_intermediate_size=8 is read as 14336"),
        ("mixtral-8x7b", {"norm_topk_prob": False}, "this config: norm_topk_prob=False is read as True"),
        ("mixtral-8x7b", {"n_shared_experts": 1}, "this config: n_shared_experts=1"),
        ("mixtral-8x7b", {"num_nextn_predict_layers": 1}, "this config: num_nextn_predict_layers=1"),
        ("mixtral-8x7b", {"swiglu_limit": 7.0}, "this config: swiglu_limit=7.0"),
        ("qwen3-30b-a3b", {"routed_scaling_factor": 2.0, "norm_topk_prob": False}, "this config: routed_scaling_f"),
        ("gpt-oss-20b", {"swiglu_limit": None}, "this config: swiglu_limit must be a number, got None"),
        ("gpt-oss-20b", {"expert_bias": False}, "this config: expert_bias=False"),
        ("glm-4.5", {"sliding_window": 16}, "this config: sliding_window=16"),
        ("glm-4.5", {"qk_norm": "full"}, "this config: qk_norm='full' is read as 'head'"),
        ("deepseek-v2-lite", {"rope_interleave": False}, "this config: rope_interleave=False"),
        ("deepseek-v2-lite", {"norm_topk_prob": True}, "this config: norm_topk_prob must be false or null in Deeps"),
        ("deepseek-v2-lite", {"model_type": "deepseek_v3"}, 'scoring_func must be "sigmoid".* .deepseek_v2. can'),
        ("deepseek-v3.2", {"model_type": "deepseek_v3"}, "this config: index_n_heads=64 .* 'deepseek_v32' can"),
        ("deepseek-v3.2", {"rope_interleave": False}, "this config: rope_interleave=False"),
        ("llama-3-8b", {"extra": {"attn_logit_softcapping": 30.0}}, "this config: attn_logit_softcapping is 30.0"),
        ("llama-3-8b", {"extra": {"note": float("inf")}}, "this config: note must be a number"),
        ("llama-3-8b", {"model_type": "gpt2"}, "model_type 'gpt2' is not known; there are llama"),
        ("llama-3-8b", {"model_type": "mixtral"}, "model_type 'mixtral' goes with a MoEConfig, not a LlamaConfig"),
    ],
)  # fmt: skip
def test_what_a_class_cannot_say_raises_and_names_the_field(config, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        to_hf(dataclasses.replace(REGISTRY[config], **changes))
    assert "\n" not in str(caught.value)


def test_every_field_comes_through_or_is_refused():
    """One field after another changed: never is something else read back than was there."""
    values = {
        bool: [True, False], int: [1, 4, 64], float: [0.5], str: ["before", "after", "greedy", "softmax"],
    }  # fmt: skip
    tried = refused = 0
    for name in ("llama", "qwen3", "smollm3, rotated", "qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v3"):
        config = CONFIGS[name]
        for field in dataclasses.fields(config):
            if field.name in ("extra", "model_type", "num_hidden_layers"):
                continue
            old = getattr(config, field.name)
            for value in [None, *values.get(type(old), [1, True, "head", 0.5])]:
                if type(old) is int and isinstance(value, bool) or value == old:
                    continue
                try:
                    changed = dataclasses.replace(config, **{field.name: value})
                except Exception as error:  # no config, by our own checks or those of types
                    assert isinstance(error, ValueError | TypeError) or "type" in str(error).lower()
                    continue
                tried += 1
                try:
                    file = to_hf(changed)
                except ValueError as error:
                    refused += 1
                    assert "can't hold this config" in str(error)
                    continue
                assert from_config(json.loads(json.dumps(file))) == changed, (name, field.name, value)
    assert tried > 250 and refused > 80


def test_without_a_type_the_plainest_class_is_written():
    plain = {name: dataclasses.replace(REGISTRY[name], model_type=None) for name in
             ("llama-3-8b", "mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2")}  # fmt: skip
    types = [to_hf(config)["model_type"] for config in plain.values()]
    assert types == ["llama", "mixtral", "deepseek_v2", "deepseek_v3", "deepseek_v32"]
    assert model_type_of(dataclasses.replace(REGISTRY["kimi-k2"], model_type="kimi_k2")) == "deepseek_v3"
    qwen = dataclasses.replace(REGISTRY["qwen3-8b"], model_type=None)
    with pytest.raises(ValueError, match="'llama' can't hold this config: qk_norm='head' .*; model_type 'qwen3' can"):
        to_hf(qwen)


def test_what_is_no_longer_so_is_not_written():
    file = tiny("deepseek_v3", torch_dtype="bfloat16", quantization_config={"quant_method": "fp8"}, note=[1],
                auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, transformers_version="4.33.1",
                architectures=["SomebodysForCausalLM"], head_dim=64, ep_size=1) | {"model_type": "kimi_k2"}  # fmt: skip
    config = from_config(file)
    assert "quantization_config" in config.extras
    out = to_hf(config)
    assert not {"quantization_config", "auto_map", "head_dim"} & set(out)
    assert out["model_type"] == "deepseek_v3" and out["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (out["note"], out["ep_size"], out["transformers_version"]) == ([1], 1, "4.33.1")
    assert out["dtype"] == out["torch_dtype"] == "bfloat16" and to_hf(config, dtype=np.float32)["dtype"] == "float32"
    assert "dtype" not in to_hf(REGISTRY["llama-3-8b"])
    wrapped = from_config({"model_type": "kimi_k25", "text_config": file, "vision_config": {"x": 1}})
    assert to_hf(wrapped) == out
    # A key of ours goes before what stands in `extra`.
    odd = dataclasses.replace(REGISTRY["llama-3-8b"], extra={"hidden_size": 3, "note": 2})
    assert to_hf(odd)["hidden_size"] == 4096 and to_hf(odd)["note"] == 2


def test_configs_of_an_unknown_kind_are_not_written():
    with pytest.raises(ValueError, match="goes with a LlamaConfig, not a Config"):
        to_hf(Config(97, 48, 80, 4, 4, model_type="llama"))
    assert {kind.config for kind in MODEL_TYPES.values()} == {LlamaConfig, MoEConfig, DeepSeekConfig}
