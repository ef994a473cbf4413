"""Whole models with a cache: generation token by token against reading everything anew for each token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill import zoo
from overspill.zoo.config import LlamaConfig
from overspill.zoo.moe_config import MoEConfig

_GQA = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-4, "rope_theta": 500.0, "max_position_embeddings": 96,
}  # fmt: skip
_EXPERTS = {
    "moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "scoring_func": "softmax",
    "topk_method": "greedy", "norm_topk_prob": True,
}  # fmt: skip
LENGTHS, NEW = (70, 41, 66), 5


@pytest.fixture(scope="module")
def caching(configs):
    glm = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_shared_experts": 1, "first_k_dense_replace": 1}
    return {
        "llama": (configs["llama"], {}),
        "llama in segments": (configs["llama"], {"segments": (1, 3)}),
        "llama without scan": (configs["llama"], {"scan": False}),
        "norms behind": (LlamaConfig(**_GQA, qk_norm="full", norm_placement="after", norm_downcast_first=False), {}),
        "no rotation": (LlamaConfig(**_GQA, no_rope_layers=(1, 1, 0, 1), sliding_window=9), {}),
        "longrope": (
            LlamaConfig(**_GQA, rope_scaling={"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.5, 2.0],
                        "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 80}), {},
        ),
        "gpt-oss": (
            MoEConfig(
                **_GQA, **_EXPERTS, attention_bias=True, attention_sinks=True, sliding_window=9, router_bias=True,
                layer_types=("sliding_attention", "full_attention") * 2, expert_bias=True, swiglu_limit=1.5,
                norm_downcast_first=False,
            ),
            {"segments": (1,)},
        ),
        "glm": (
            MoEConfig(**_GQA, **_EXPERTS | glm, attention_bias=True, attention_output_bias=False, qk_norm="head",
                      partial_rotary_factor=0.5, num_nextn_predict_layers=1), {},
        ),
        "deepseek-v3": (configs["deepseek-v3"], {"segments": (2,)}),
        "deepseek-v2-lite": (configs["deepseek-v2-lite"], {}),
        "sparse": (
            dataclasses.replace(configs["deepseek-v3"], index_n_heads=8, index_head_dim=12, index_topk=17), {},
        ),
    }  # fmt: skip


NAMES = [
    "llama", "llama in segments", "llama without scan", "norms behind", "no rotation", "longrope", "gpt-oss", "glm",
    "deepseek-v3", "deepseek-v2-lite", "sparse",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_cached_tokens_and_logits_are_those_of_whole_passes(caching, make, jit, normwise, name):
    """Rows of three lengths, padded on the left and on the right, against each row alone and without a cache."""
    config, options = caching[name]
    model = make(config, **options)
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 61, length) for length in LENGTHS]
    width, longest = max(LENGTHS), max(LENGTHS) + NEW
    left = np.stack([np.pad(row, (width - len(row), 0)) for row in rows])
    right = np.stack([np.pad(row, (0, width - len(row))) for row in rows])
    lengths = np.asarray(LENGTHS)[:, None]
    sides = {"left": (left, np.arange(width) >= width - lengths), "right": (right, np.arange(width) < lengths)}

    new = {side: np.asarray(zoo.generate(model, t, mask=m, max_new_tokens=NEW)) for side, (t, m) in sides.items()}
    np.testing.assert_array_equal(new["left"], new["right"])
    streamed = np.stack(list(zoo.stream(model, left, mask=sides["left"][1], max_new_tokens=NEW)), axis=1)
    np.testing.assert_array_equal(streamed, new["left"])

    forward = jit(lambda model, tokens, mask: model(tokens, mask=mask))
    cached = jit(lambda model, tokens, mask, cache: model(tokens, mask=mask, cache=cache))
    logits, cache = cached(model, left, sides["left"][1], model.init_cache(3, longest))
    for i in range(NEW):
        for r, row in enumerate(rows):
            whole = np.concatenate([row, new["left"][r, :i]])
            padded = np.pad(whole, (0, longest - len(whole)))[None]
            expected = forward(model, padded, np.arange(longest)[None] < len(whole))[0, len(whole) - 1]
            assert np.argmax(expected) == new["left"][r, i]
            if name != "longrope" or len(whole) <= 80:  # beyond, keys in the cache stay as they were rotated
                assert normwise(logits[r, -1], expected) < 1e-5
        if i < NEW - 1:
            logits, cache = cached(model, new["left"][:, i : i + 1], np.ones((3, 1), bool), cache)


def test_bytes_of_the_cache(caching, make):
    deepseek, llama = make(caching["deepseek-v3"][0]), make(caching["llama"][0])
    for model, numbers in ((deepseek, 4 * (6 + 8)), (llama, 4 * 2 * 2 * 8)):
        for dtype in (jnp.float32, jnp.bfloat16):
            arrays = jax.tree.leaves(model.init_cache(3, 50, dtype).arrays)
            assert sum(array.nbytes for array in arrays) == 3 * 50 * numbers * jnp.dtype(dtype).itemsize


def test_overflow_raises_where_it_is_known_and_is_no_number_elsewhere(caching, make, jit):
    model = make(caching["llama"][0])
    tokens = jnp.zeros((1, 6), jnp.int32)
    _, cache = model(tokens, cache=model.init_cache(1, 8))
    with pytest.raises(ValueError, match="3 tokens don't fit into the cache: its capacity is 8 slots, of which 6"):
        model(tokens[:, :3], cache=cache)
    step = jit(lambda model, tokens, cache: model(tokens, cache=cache)[0])
    assert np.isfinite(step(model, tokens[:, :2], cache)).all()
    assert np.isnan(step(model, tokens[:, :3], cache)).all()
    with pytest.raises(ValueError, match="neither segment_ids nor checkpoint"):
        model(tokens, segment_ids=tokens, cache=model.init_cache(1, 8))
    with pytest.raises(ValueError, match="capacity must be a positive integer"):
        model.init_cache(1, 0)


def test_rows_end_by_themselves(caching, make):
    model = make(caching["llama"][0])
    tokens = np.random.default_rng(2).integers(0, 61, (3, 20))
    free = np.asarray(zoo.generate(model, tokens, max_new_tokens=12))
    stops = [int(free[0, 2]), int(free[1, 5])]
    ended = np.asarray(zoo.generate(model, tokens, max_new_tokens=12, stop_ids=stops, pad_id=60))
    for row, expected in zip(ended, free, strict=True):
        ends = [i for i, token in enumerate(expected) if token in stops]
        length = ends[0] + 1 if ends else 12
        np.testing.assert_array_equal(row[:length], expected[:length])
        assert (row[length:] == 60).all()
    alone = np.asarray(zoo.generate(model, tokens[:1], max_new_tokens=12, stop_ids=stops[0]))
    assert (alone[0, 2:] == stops[0]).all()
    assert len(list(zoo.stream(model, tokens[:1], max_new_tokens=12, stop_ids=jnp.asarray(stops[:1])))) == 3


def test_a_row_draws_the_same_whatever_is_beside_it(caching, make):
    model = make(caching["llama"][0])
    tokens = np.random.default_rng(2).integers(0, 61, (3, 20))
    mask = np.arange(20)[None] < np.asarray([[20], [11], [16]])
    drawing = {"max_new_tokens": 8, "temperature": 1.3, "top_k": 30, "top_p": 0.95, "min_p": 0.01}
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(5), i))(jnp.arange(3))
    together = np.asarray(zoo.generate(model, tokens, mask=mask, key=jax.random.key(5), **drawing))
    for i in range(3):
        row = tokens[i : i + 1, mask[i]]
        np.testing.assert_array_equal(zoo.generate(model, row, key=keys[i : i + 1], **drawing)[0], together[i])
    other = np.asarray(zoo.generate(model, tokens, mask=mask, key=jax.random.key(6), **drawing))
    assert (other != together).any()


@pytest.mark.parametrize("heat", [1e38, 3e38])
def test_great_heat_draws_what_may_be_drawn(caching, make, heat):
    model = make(caching["llama"][0])
    drawing = {"max_new_tokens": 6, "temperature": heat, "key": jax.random.key(0)}
    tokens = np.random.default_rng(2).integers(0, 61, (8, 5))
    assert np.asarray(zoo.generate(model, tokens, allowed=20, **drawing)).max() < 20
    np.testing.assert_array_equal(
        zoo.generate(model, tokens, top_k=1, **drawing), zoo.generate(model, tokens, max_new_tokens=6)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": np.asarray([[1, 0, 1]], bool)}, "row 0 of mask has a hole"),
        ({"mask": np.zeros((1, 3), bool)}, "row 0 of the prompt has no real token"),
        ({"mask": np.ones((1, 3), int)}, "mask must be boolean"),
        ({"stop_ids": [61]}, r"stop ids must be in 0\.\.60, got 61"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"min_p": 1.5}, "min_p must be between 0 and 1"),
        ({"temperature": 1.0, "key": 0}, "key must be a key such as jax.random.key.0., got 0"),
        ({"temperature": 1.0, "key": jnp.zeros(3)}, "key must be a key such as jax.random.key.0., got an array"),
        ({"max_new_tokens": 2**31}, "max_new_tokens must be a whole number"),
        ({"max_new_tokens": True}, "max_new_tokens must be a whole number"),
    ],
)
def test_arguments_that_cannot_be(caching, make, change, message):
    model = make(caching["llama"][0])
    for call in (zoo.generate, zoo.stream):
        with pytest.raises(ValueError, match=f"{call.__name__}: .*{message}"):
            call(model, np.zeros((1, 3), int), **{"max_new_tokens": 2} | change)


def test_what_is_no_model(caching, make):
    model = zoo.abstract(caching["llama"][0])
    with pytest.raises(ValueError, match="an abstract model has no weights"):
        zoo.generate(model, [[1]], max_new_tokens=1)
    with pytest.raises(ValueError, match="a model is wanted, not a str; step.trained.state. gives"):
        zoo.generate("folder", [[1]], max_new_tokens=1)


def test_logits_that_are_no_numbers_are_said(caching, make):
    model = jax.tree.map(lambda leaf: leaf * jnp.nan, make(caching["llama"][0]))
    with pytest.raises(ValueError, match="logits for new token 0 are not finite in row 0"):
        zoo.generate(model, [[1, 2]], max_new_tokens=3)


def test_beyond_what_the_model_was_made_for_there_is_a_warning(caching, make):
    model = make(caching["llama"][0])
    with pytest.warns(UserWarning, match="90 tokens and 10 new ones may go beyond the 96 positions"):
        zoo.generate(model, np.zeros((1, 90), int), max_new_tokens=10)
