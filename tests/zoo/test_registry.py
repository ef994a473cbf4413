"""The registered models: their sizes to the last digit, and what else must be right in them."""

import dataclasses

import pytest

from overspill.layers.rotary import Llama3Scaling, RotaryScaling, YarnScaling
from overspill.zoo.building import parameters
from overspill.zoo.config import LlamaConfig
from overspill.zoo.hf_config import from_config, to_hf
from overspill.zoo.moe_config import DeepSeekConfig, MoEConfig
from overspill.zoo.registry import REGISTRY

# Total, active, and one module of multi-token prediction, where these differ and are.
COUNTS = {
    "llama-2-7b": (6_738_415_616,),
    "llama-2-13b": (13_015_864_320,),
    "llama-2-70b": (68_976_648_192,),
    "llama-3-8b": (8_030_261_248,),
    "llama-3-70b": (70_553_706_496,),
    "llama-3.1-8b": (8_030_261_248,),
    "llama-3.1-70b": (70_553_706_496,),
    "llama-3.1-405b": (405_853_388_800,),
    "llama-3.2-1b": (1_235_814_400,),
    "llama-3.2-3b": (3_212_749_824,),
    "llama-3.3-70b": (70_553_706_496,),
    "tinyllama-1.1b": (1_100_048_384,),
    "smollm2-135m": (134_515_008,),
    "smollm2-360m": (361_821_120,),
    "smollm2-1.7b": (1_711_376_384,),
    "smollm3-3b": (3_075_098_624,),
    "mistral-7b-v0.1": (7_241_732_096,),
    "mistral-7b-v0.2": (7_241_732_096,),
    "mistral-7b-v0.3": (7_248_023_552,),
    "qwen2.5-0.5b": (494_032_768,),
    "qwen2.5-1.5b": (1_543_714_304,),
    "qwen2.5-3b": (3_085_938_688,),
    "qwen2.5-7b": (7_615_616_512,),
    "qwen2.5-14b": (14_770_033_664,),
    "qwen2.5-32b": (32_763_876_352,),
    "qwen2.5-72b": (72_706_203_648,),
    "qwen3-0.6b": (596_049_920,),
    "qwen3-1.7b": (1_720_574_976,),
    "qwen3-4b": (4_022_468_096,),
    "qwen3-8b": (8_190_735_360,),
    "qwen3-14b": (14_768_307_200,),
    "qwen3-32b": (32_762_123_264,),
    "olmo-2-1b": (1_484_916_736,),
    "olmo-2-7b": (7_298_617_344,),
    "olmo-2-13b": (13_716_198_400,),
    "olmo-2-32b": (32_234_279_936,),
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248),
    "mixtral-8x22b": (140_620_634_112, 39_152_031_744),
    "mixtral-8x22b-instruct": (140_630_071_296, 39_161_468_928),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),
    "glm-4.5": (352_797_829_024, 33_632_266_144, 3_988_069_792),
    "glm-4.5-air": (106_852_251_264, 13_424_129_664, 2_375_059_584),
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704),
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912),
    "deepseek-v2-lite": (15_706_484_224, 2_661_150_208, 593_242_624),
    "deepseek-v2": (235_741_434_880, 21_375_800_320, 4_024_560_640),
    "deepseek-v3": (671_026_419_200, 37_552_297_472, 11_610_068_224),
    "deepseek-r1": (671_026_419_200, 37_552_297_472, 11_610_068_224),
    "deepseek-v3.1": (671_026_419_200, 37_552_297_472, 11_610_068_224),
    # V3 and an indexer of 13,959,424 in each of 61 layers.
    "deepseek-v3.2": (671_877_944_064, 38_403_822_336, 11_624_027_648),
    "moonlight-16b-a3b": (15_960_110_208, 2_914_776_192, 593_242_688),
    "kimi-k2": (1_026_408_232_448, 32_861_500_928, 17_162_147_200),
    "overspill-llama-tiny": (1_510_016,),
    "overspill-deepseek-tiny": (1_762_904, 878_168, 534_264),
}


def by_formula(config):
    """Total, active, and one module of multi-token prediction, worked out from the config alone."""
    width, heads = config.hidden_size, config.num_attention_heads
    if isinstance(config, DeepSeekConfig):
        rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
        query = heads * (config.qk_nope_head_dim + rope)
        inner = config.q_lora_rank
        attention = width * query if inner is None else width * inner + inner + inner * query
        attention += width * (rank + rope) + rank + rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
        attention += heads * config.v_head_dim * width
        if config.index_topk:
            size = config.index_head_dim
            attention += inner * config.index_n_heads * size + width * size + 2 * size + width * config.index_n_heads
    else:
        query, key = heads * config.head_dim, config.num_key_value_heads * config.head_dim
        attention = 2 * width * query + 2 * width * key
        attention += (query + 2 * key) * config.attention_bias + width * config.output_bias
        attention += {None: 0, "head": 2 * config.head_dim, "full": query + key}[config.qk_norm]
        attention += heads * config.attention_sinks
    block = attention + 2 * width
    dense = 3 * width * config.intermediate_size
    embeddings = config.vocab_size * width * (1 if config.tie_word_embeddings else 2) + width
    layers = config.num_hidden_layers
    if not hasattr(config, "n_routed_experts"):
        total = embeddings + layers * (block + dense)
        return total, total, 0
    expert = 3 * width * config.moe_intermediate_size
    shared = expert * (config.n_shared_experts or 0)
    expert += (2 * config.moe_intermediate_size + width) * config.expert_bias
    count, chosen = config.n_routed_experts, config.num_experts_per_tok
    router = count * width + count * (config.scoring_func == "sigmoid" or config.router_bias)
    first = config.first_k_dense_replace
    always = embeddings + layers * block + first * dense + (layers - first) * (router + shared)
    module = block + router + shared + count * expert + 2 * width * width + 3 * width
    return always + (layers - first) * count * expert, always + (layers - first) * chosen * expert, module


def published(name):
    total, active, module = (*COUNTS[name], None, None)[:3]
    return total, active or total, module


def test_every_registered_model_has_a_count():
    assert set(COUNTS) == set(REGISTRY)
    assert list(REGISTRY)[-2:] == ["overspill-llama-tiny", "overspill-deepseek-tiny"]
    assert all(name == name.lower() for name in REGISTRY)


@pytest.mark.parametrize("name", COUNTS)
def test_counts_by_formula(name):
    total, active, module = published(name)
    assert by_formula(REGISTRY[name])[:2] == (total, active)
    if module is not None:
        assert by_formula(REGISTRY[name])[2] == module


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_the_models_that_are_built(name):
    total, active, module = published(name)
    config = REGISTRY[name]
    depths = getattr(config, "num_nextn_predict_layers", 0)
    assert parameters(name) == (total, active, depths * (module or 0))
    if module:
        two = parameters(dataclasses.replace(config, num_nextn_predict_layers=2))
        assert two == (total, active, 2 * module)


@pytest.mark.parametrize("name", [name for name in REGISTRY if not name.startswith("overspill")])
def test_registered_models_are_what_a_file_of_theirs_would_say(name):
    config = REGISTRY[name]
    assert from_config(to_hf(config)) == config and config.model_type is not None
    assert from_config(name) is config and hash(config) == hash(dataclasses.replace(config))


def test_names_of_one_model_and_its_likes():
    def differ(a, b):
        a, b = REGISTRY[a], REGISTRY[b]
        return {field.name for field in dataclasses.fields(a) if getattr(a, field.name) != getattr(b, field.name)}

    assert differ("deepseek-v3", "deepseek-r1") == differ("deepseek-v3", "deepseek-v3.1") == set()
    indexer = {"index_n_heads", "index_head_dim", "index_topk", "model_type"}
    assert differ("deepseek-v3", "deepseek-v3.2") == indexer
    assert differ("llama-3.1-70b", "llama-3.3-70b") == {"eos_token_id"}
    assert differ("llama-3-70b", "llama-3.1-70b") == {"rope_scaling", "max_position_embeddings"}
    assert differ("mistral-7b-v0.1", "mistral-7b-v0.2") == {"rope_theta", "sliding_window"}
    assert differ("mistral-7b-v0.2", "mistral-7b-v0.3") == {"vocab_size"}
    assert differ("mixtral-8x22b", "mixtral-8x22b-instruct") == {"vocab_size"}
    assert differ("gpt-oss-20b", "gpt-oss-120b") == {"num_hidden_layers", "layer_types", "n_routed_experts"}


def test_what_is_special_about_each():
    types = {name: config.model_type for name, config in REGISTRY.items()}
    kinds = {LlamaConfig: set(), MoEConfig: set(), DeepSeekConfig: set()}
    for config in REGISTRY.values():
        kinds[type(config)].add(config.model_type)
    assert kinds == {
        LlamaConfig: {"llama", "smollm3", "mistral", "qwen2", "qwen3", "olmo2", None},
        MoEConfig: {"mixtral", "qwen3_moe", "glm4_moe", "gpt_oss"},
        DeepSeekConfig: {"deepseek_v2", "deepseek_v3", "deepseek_v32", None},
    }
    tied = {name for name, config in REGISTRY.items() if config.tie_word_embeddings}
    assert tied == {"llama-3.2-1b", "llama-3.2-3b", "smollm2-135m", "smollm2-360m", "smollm2-1.7b", "smollm3-3b",
                    "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b",
                    "overspill-llama-tiny"}  # fmt: skip
    scalings = {name: type(config.rope_scaling) for name, config in REGISTRY.items()}
    for name, scaling in scalings.items():
        if name.startswith(("llama-3.1", "llama-3.2", "llama-3.3")):
            assert scaling is Llama3Scaling
            assert REGISTRY[name].rope_scaling.factor == (32.0 if "3.2" in name else 8.0)
        elif name.startswith(("deepseek", "kimi", "gpt-oss")):
            assert scaling is YarnScaling
        else:
            assert scaling is RotaryScaling
    # Heads whose width isn't the hidden size over their number.
    own = {name for name, c in REGISTRY.items() if hasattr(c, "head_dim") and c.head_dim * c.num_attention_heads
           != c.hidden_size}  # fmt: skip
    assert own == {"qwen3-0.6b", "qwen3-4b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b", "glm-4.5", "glm-4.5-air",
                   "gpt-oss-20b", "gpt-oss-120b"}  # fmt: skip
    windows = {name for name, config in REGISTRY.items() if set(config.windows()) != {None}}
    assert windows == {"mistral-7b-v0.1", "gpt-oss-20b", "gpt-oss-120b"}
    assert REGISTRY["gpt-oss-20b"].windows()[:3] == (128, None, 128)
    unrotated = {name: config.rotates().count(False) for name, config in REGISTRY.items() if not all(config.rotates())}
    assert unrotated == {"smollm3-3b": 9}
    assert {types[name] for name, config in REGISTRY.items() if not config.norm_downcast_first} == {"olmo2", "gpt_oss"}
    assert REGISTRY["glm-4.5"].rotary().dim == 64
    v3, k2, lite = (REGISTRY[n].rotary() for n in ("deepseek-v3", "kimi-k2", "deepseek-v2-lite"))
    assert v3.scaling.correction_range(1e4, 64) == (10, 23) and k2.scaling.correction_range(5e4, 64) == (19, 20)
    for rotary, scale in ((v3, 0.135234), (lite, 0.114721), (k2, 0.130861)):
        assert round(192**-0.5 * rotary.softmax_scale_factor, 6) == scale
        assert rotary.interleaved and rotary.scaling.attention_scale(rotary.max_positions) == 1.0
    oss = REGISTRY["gpt-oss-20b"].rotary()
    low, high = oss.scaling.correction_range(150000.0, 64)
    assert (round(low, 4), round(high, 4)) == (8.0928, 17.3980)
    assert round(oss.scaling.attention_scale(oss.max_positions), 5) == 1.34657


# What the sizes don't show: base of the rotary embedding, epsilon, length, first and last token.
OTHER_VALUES = {
    "llama-2": (1e4, 1e-5, 4096, 1, 2),
    "llama-3-": (5e5, 1e-5, 8192, 128000, 128001),
    "llama-3.1": (5e5, 1e-5, 131072, 128000, 128001),
    "llama-3.2": (5e5, 1e-5, 131072, 128000, 128001),
    "llama-3.3": (5e5, 1e-5, 131072, 128000, (128001, 128008, 128009)),
    "tinyllama": (1e4, 1e-5, 2048, 1, 2),
    "smollm2-135m": (1e5, 1e-5, 8192, 0, 0),
    "smollm2-360m": (1e5, 1e-5, 8192, 0, 0),
    "smollm2-1.7b": (1.3e5, 1e-5, 8192, 0, 0),
    "smollm3": (5e6, 1e-6, 65536, 128000, 128012),
    "mistral-7b-v0.1": (1e4, 1e-5, 32768, 1, 2),
    "mistral-7b-v0.2": (1e6, 1e-5, 32768, 1, 2),
    "mistral-7b-v0.3": (1e6, 1e-5, 32768, 1, 2),
    "qwen2.5-0.5b": (1e6, 1e-6, 32768, 151643, 151643),
    "qwen2.5-1.5b": (1e6, 1e-6, 131072, 151643, 151643),
    "qwen2.5-3b": (1e6, 1e-6, 32768, 151643, 151643),
    "qwen2.5-7b": (1e6, 1e-6, 131072, 151643, 151643),
    "qwen2.5-14b": (1e6, 1e-5, 131072, 151643, 151643),
    "qwen2.5-32b": (1e6, 1e-5, 131072, 151643, 151643),
    "qwen2.5-72b": (1e6, 1e-5, 131072, 151643, 151643),
    "qwen3": (1e6, 1e-6, 40960, 151643, 151645),
    "olmo-2": (5e5, 1e-6, 4096, None, 100257),
    "mixtral-8x7b": (1e6, 1e-5, 32768, 1, 2),
    "mixtral-8x22b": (1e6, 1e-5, 65536, 1, 2),
    "glm-4.5": (1e6, 1e-5, 131072, None, (151329, 151336, 151338)),
    "gpt-oss": (1.5e5, 1e-5, 131072, None, 200002),
    "deepseek-v2": (1e4, 1e-6, 163840, 100000, 100001),
    "deepseek-v3": (1e4, 1e-6, 163840, 0, 1),
    "deepseek-r1": (1e4, 1e-6, 163840, 0, 1),
    "moonlight": (5e4, 1e-5, 8192, 163584, 163585),
    "kimi-k2": (5e4, 1e-6, 131072, 163584, 163585),
    "overspill": (1e4, 1e-6, 2048, None, 256),
}
# Groups and how many are kept, whether weights are normalised, their factor, dense layers, modules.
ROUTING = {
    "mixtral": (1, 1, True, 1.0, 0, 0),
    "qwen3-": (1, 1, True, 1.0, 0, 0),
    "glm-4.5": (1, 1, True, 2.5, 3, 1),
    "glm-4.5-air": (1, 1, True, 1.0, 1, 1),
    "gpt-oss": (1, 1, True, 1.0, 0, 0),
    "deepseek-v2": (8, 3, False, 16.0, 1, 0),
    "deepseek-v2-lite": (1, 1, False, 1.0, 1, 0),
    "deepseek-v3": (8, 4, True, 2.5, 3, 1),
    "deepseek-r1": (8, 4, True, 2.5, 3, 1),
    "moonlight": (1, 1, True, 2.446, 1, 0),
    "kimi-k2": (1, 1, True, 2.827, 1, 0),
    "overspill": (2, 1, True, 2.5, 1, 1),
}


@pytest.mark.parametrize("name", REGISTRY)
def test_what_the_sizes_do_not_show(name):
    def row(table):
        return table[max((start for start in table if name.startswith(start)), key=len)]

    c = REGISTRY[name]
    assert (c.rope_theta, c.rms_norm_eps, c.max_position_embeddings, c.bos_token_id, c.eos_token_id) == row(
        OTHER_VALUES
    )
    assert c.initializer_range == (1 / 24 if name == "smollm2-135m" else 0.02)
    if hasattr(c, "n_routed_experts"):
        found = (c.n_group, c.topk_group, c.norm_topk_prob, c.routed_scaling_factor)
        assert (*found, c.first_k_dense_replace, c.num_nextn_predict_layers) == row(ROUTING)
        grouped = "group_limited_greedy" if c.n_group > 1 else "greedy"
        assert c.topk_method == (grouped if c.scoring_func == "softmax" else "noaux_tc")


def test_the_registry_finds_models_and_near_names():
    config = from_config("llama-3.2-1b")
    assert config.head_dim == 64 and config.tie_word_embeddings and from_config(config) is config
    with pytest.raises(ValueError, match="no model is called 'Llama-3.2-1'; did you mean 'llama-3.2-1b'"):
        from_config("Llama-3.2-1")
    with pytest.raises(ValueError, match="no model is called 'zebra'; there are llama-2-7b, "):
        from_config("zebra")
