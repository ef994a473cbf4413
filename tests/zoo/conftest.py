"""Small models of both families with every parameter randomised, and what to compare them with."""

import dataclasses
import functools
import importlib.util
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill.layers.linear import is_buffer
from overspill.zoo.building import abstract
from overspill.zoo.config import LlamaConfig
from overspill.zoo.data import Batch
from overspill.zoo.moe_config import DeepSeekConfig

LLAMA = LlamaConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-4,
    rope_theta=500.0,
    max_position_embeddings=96,
    rope_scaling={
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
)
DEEPSEEK = DeepSeekConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=20,
    moe_intermediate_size=12,
    num_hidden_layers=4,
    num_attention_heads=3,
    rms_norm_eps=1e-4,
    rope_theta=500.0,
    max_position_embeddings=320,
    rope_scaling={
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 40,
        "beta_fast": 16,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
    q_lora_rank=10,
    kv_lora_rank=6,
    qk_nope_head_dim=5,
    qk_rope_head_dim=8,
    v_head_dim=7,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=2,
    n_group=4,
    topk_group=2,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    first_k_dense_replace=1,
    num_nextn_predict_layers=1,
)
V2 = {
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 0,
}
CONFIGS = {
    "llama": LLAMA,
    "llama-tied-biased": dataclasses.replace(LLAMA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "deepseek-v3": DEEPSEEK,
    "deepseek-v3-two-depths": dataclasses.replace(DEEPSEEK, num_nextn_predict_layers=2),
    "deepseek-v2": dataclasses.replace(DEEPSEEK, **V2),
    "deepseek-v2-lite": dataclasses.replace(
        DEEPSEEK, **V2 | {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "q_lora_rank": None}
    ),
}


def randomised(model, seed=7):
    """The abstract `model` with random arrays, so that nothing hides behind initial ones or zeros."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(model)
    rng = np.random.default_rng(seed)
    drawn = []
    for path, leaf in flat:
        name = jax.tree_util.keystr(path)
        value = rng.normal(size=leaf.shape)
        if name.endswith(".scale"):
            value = 1 + 0.3 * value
        elif name.endswith("bias.value"):
            value = 0.3 * value - 0.8  # the scores that selection looks at are then of either sign
        elif name.endswith("bias"):
            value = 0.3 * value
        elif "embedding" not in name:
            value = value / leaf.shape[-1] ** 0.5
        drawn.append(jnp.asarray(value, leaf.dtype))
    return jax.tree.unflatten(treedef, drawn)


@pytest.fixture(scope="session")
def configs():
    return CONFIGS


@pytest.fixture(scope="session")
def make():
    """A model from a config or a name in `CONFIGS`, randomised. Drawing its initial weights would only cost time."""

    def make(config, seed=7, **options):
        return randomised(abstract(CONFIGS[config] if isinstance(config, str) else config, **options), seed)

    return make


@pytest.fixture(scope="session")
def numpy_models():
    spec = importlib.util.spec_from_file_location(
        "overspill_numpy_models", pathlib.Path(__file__).with_name("numpy_models.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def packed():
    """Two rows of 70 tokens: three documents and padding on the right; one document, padded on the left."""
    rng = np.random.default_rng(3)
    batch, length = 2, 70
    tokens = rng.integers(0, 61, (batch, length))
    segments = np.zeros((batch, length), int)
    segments[0, 30:], segments[0, 48:] = 1, 2
    mask = np.ones((batch, length), bool)
    mask[0, 66:] = False
    mask[1, :5] = False
    positions = np.tile(np.arange(length), (batch, 1))
    positions[0, 30:48], positions[0, 48:] = np.arange(18), np.arange(22)
    targets = np.full((batch, length), -100)
    same = (segments[:, :-1] == segments[:, 1:]) & mask[:, :-1] & mask[:, 1:]
    targets[:, :-1] = np.where(same, tokens[:, 1:], -100)
    ints = (jnp.asarray(a, jnp.int32) for a in (tokens, targets, segments, positions))
    return Batch(*ints, jnp.asarray(mask))


@pytest.fixture(scope="session")
def jit():
    """`jax.jit` for programs that run once or twice: half of their compile time goes into optimising."""
    return functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture(scope="session")
def normwise():
    def normwise(actual, expected):
        actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
        size = np.linalg.norm(expected)
        return float(np.linalg.norm(actual - expected) / size) if size else float(np.linalg.norm(actual))

    return normwise


@pytest.fixture(scope="session")
def trainable():
    """(parameters, the rest) of a model."""

    def trainable(model):
        wanted = jax.tree.map(lambda node: not is_buffer(node), model, is_leaf=is_buffer)
        return eqx.partition(model, wanted)

    return trainable
