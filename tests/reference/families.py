"""All families by name: a name is a config.json, and `tensors.py` gives every name its weights."""

import dense
import mixtures

FAMILIES = dense.FAMILIES | mixtures.FAMILIES
# Where a family's selection bias lies; elsewhere it is around zero.
ROUTER_BIAS = {"deepseek_v3_negative_bias": -5.0}
# Chosen so that no choice of an expert, a key or a token is so close that rounding could turn it.
SEEDS = {
    "llama_llama3": 2,
    "llama_head_dim": 1,
    "qwen2": 1,
    "qwen3_window": 2,
    "olmo2_grouped": 23,
    "mixtral": 1,
    "qwen3_moe_dense_prefix": 1,
    "glm4_moe": 4,
}


def reference_config(name):
    """The config that transformers reads: it has no class for kimi_k2, whose model is DeepSeek-V3's."""
    config = dict(FAMILIES[name])
    if config["model_type"] == "kimi_k2":
        config["model_type"] = "deepseek_v3"
        del config["auto_map"]
    return config
