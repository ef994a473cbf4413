"""Generated tokens against passes over the whole sequence; what steers them, and what is refused."""

import importlib.util
import pathlib
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill import zoo
from overspill.zoo import generation
from overspill.zoo.config import LlamaConfig

_spec = importlib.util.spec_from_file_location("small_models", pathlib.Path(__file__).with_name("small_models.py"))
small_models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(small_models)

LENGTHS, NEW = (11, 16, 3), 12
SHORT = small_models.GQA | {"max_position_embeddings": 16}
CONFIGS = small_models.CONFIGS | {
    "dynamic": LlamaConfig(**SHORT, rope_scaling={"rope_type": "dynamic", "factor": 3.0}),
    "longrope": LlamaConfig(
        **small_models.GQA,
        rope_scaling={
            "rope_type": "longrope", "factor": 4.0, "short_factor": [1.0, 1.1, 1.3, 1.5],
            "long_factor": [1.0, 2.0, 4.0, 8.0], "original_max_position_embeddings": 16,
        },
    ),
}  # fmt: skip
LAYOUTS = {"olmo2": {"scan": False}, "glm": {"segments": (2,)}}


@pytest.fixture(scope="module", autouse=True)
def compiled_faster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(generation._OPTIONS, "cpu", {"xla_backend_optimization_level": 0})
        generation._compiled.cache_clear()
        yield
    generation._compiled.cache_clear()


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(4)
    return [rng.integers(0, 61, length) for length in LENGTHS]


def padded(prompts, side, filler=0):
    """Prompts in one array, and its mask. What stands in place of padding is arbitrary, ids that don't exist too."""
    width = max(map(len, prompts))
    tokens, mask = np.full((len(prompts), width), filler), np.zeros((len(prompts), width), bool)
    for row, prompt in enumerate(prompts):
        place = slice(width - len(prompt), None) if side == "left" else slice(len(prompt))
        tokens[row, place], mask[row, place] = prompt, True
    return {"tokens": tokens, "mask": mask}


def call(function, model, *, tokens, **options):
    return function(model, tokens, **options)


@pytest.fixture(scope="module")
def llama(make):
    return make(CONFIGS["llama"])


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_tokens_with_any_padding(family, make, prompts, jit):
    """Each is the best that one pass over everything before it gives, and a row's don't depend on the others."""
    model = make(CONFIGS[family], **LAYOUTS.get(family, {}))
    new = np.asarray(call(zoo.generate, model, max_new_tokens=NEW, **padded(prompts, "left")))
    assert new.shape == (len(prompts), NEW) and new.dtype == np.int32
    right = call(zoo.generate, model, max_new_tokens=NEW, **padded(prompts, "right", filler=-100))
    np.testing.assert_array_equal(right, new)
    for row, prompt in enumerate(prompts):
        alone = zoo.generate(model, np.tile(prompt, (len(prompts), 1)), max_new_tokens=NEW)
        np.testing.assert_array_equal(alone, np.tile(new[row], (len(prompts), 1)))
    if family in ("dynamic", "longrope"):
        return  # a pass over everything would turn the keys of earlier tokens anew
    whole = jit(lambda model, tokens: model(tokens))
    sequences = [np.concatenate([prompt, tokens]) for prompt, tokens in zip(prompts, new, strict=True)]
    logits = np.asarray(whole(model, jnp.asarray(padded(sequences, "right")["tokens"], jnp.int32)))
    for row, length in enumerate(LENGTHS):
        np.testing.assert_array_equal(np.argmax(logits[row, length - 1 : length + NEW - 1], axis=-1), new[row])
    assert len(np.unique(new)) > 3


def test_recomputing_from_the_front_for_each_token(llama, prompts, jit):
    whole = jit(lambda model, tokens: model(tokens))
    sequence = list(prompts[2])
    for _ in range(6):
        row = jnp.asarray([sequence + [0] * (16 - len(sequence))], jnp.int32)
        sequence.append(int(np.argmax(whole(llama, row)[0, len(sequence) - 1])))
    new = zoo.generate(llama, [prompts[2].tolist()], max_new_tokens=6)
    assert new[0].tolist() == sequence[3:]


def test_a_stream_gives_the_same_tokens(llama, prompts):
    asked = padded(prompts, "right")
    for options in (
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_new_tokens": NEW},
        {"max_new_tokens": NEW, "temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "key": jax.random.key(2)},
    ):
        new = np.asarray(call(zoo.generate, llama, **asked, **options))
        parts = list(call(zoo.stream, llama, **asked, **options))
        assert all(part.shape == (3,) and part.dtype == np.int32 and part.flags.writeable for part in parts)
        np.testing.assert_array_equal(np.stack(parts, axis=1), new)


def test_stop_ids_end_a_row(llama, prompts):
    asked = padded(prompts, "left") | {"max_new_tokens": NEW}
    free = np.asarray(call(zoo.generate, llama, **asked))

    def expected(stops, pad=None):
        out = free.copy()
        for row in out:
            for place in np.flatnonzero(np.isin(row, stops))[:1]:
                row[place + 1 :] = row[place] if pad is None else pad
        return out

    first, second = int(free[0, 2]), int(free[1, 5])
    for stops, pad in (((first,), None), ((first, second), None), ((second, first), 7), ((60, first, 0), 60)):
        new = np.asarray(call(zoo.generate, llama, **asked, stop_ids=stops, pad_id=pad))
        np.testing.assert_array_equal(new, expected(stops, pad))
    # One number, an array, or nothing at all, as configs have it.
    np.testing.assert_array_equal(call(zoo.generate, llama, **asked, stop_ids=first), expected((first,)))
    np.testing.assert_array_equal(call(zoo.generate, llama, **asked, stop_ids=np.array([first])), expected((first,)))
    np.testing.assert_array_equal(call(zoo.generate, llama, **asked, stop_ids=None), free)
    # A stream ends with the last row, and gives what generate gives until then.
    stops = [int(free[0, 2]), int(free[1, 5]), int(free[2, 4])]
    ends = [int(np.flatnonzero(np.isin(row, stops))[0]) for row in free]
    parts = np.stack(list(call(zoo.stream, llama, **asked, stop_ids=stops)), axis=1)
    assert parts.shape[1] == max(ends) + 1 < NEW
    whole = np.asarray(call(zoo.generate, llama, **asked, stop_ids=stops))
    np.testing.assert_array_equal(parts, whole[:, : parts.shape[1]])
    np.testing.assert_array_equal(whole, expected(stops))


def test_a_stream_is_as_long_as_its_longest_row(llama, prompts):
    asked = padded(prompts, "left") | {"max_new_tokens": NEW}
    first = [int(token) for token in next(call(zoo.stream, llama, **asked))]
    assert len(list(call(zoo.stream, llama, **asked, stop_ids=first))) == 1
    stream = call(zoo.stream, llama, **asked)
    next(stream), next(stream), next(stream)
    stream.close()


def test_draws_are_a_rows_own(llama, prompts):
    """They depend on the key, the row and the token's place, not on neighbours, padding or batch."""
    key = jax.random.key(11)
    options = {"max_new_tokens": NEW, "temperature": 2.0}
    new = np.asarray(call(zoo.generate, llama, **padded(prompts, "left"), **options, key=key))
    again = call(zoo.generate, llama, **padded(prompts, "right"), **options, key=key)
    np.testing.assert_array_equal(again, new)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(3))
    np.testing.assert_array_equal(call(zoo.generate, llama, **padded(prompts, "left"), **options, key=keys), new)
    turned = [prompts[2], prompts[0], prompts[1]]
    got = call(zoo.generate, llama, **padded(turned, "left"), **options, key=keys[jnp.array([2, 0, 1])])
    np.testing.assert_array_equal(got, new[[2, 0, 1]])
    same = np.asarray(zoo.generate(llama, np.tile(prompts[0], (3, 1)), **options, key=key))
    assert len({tuple(row) for row in same}) == 3
    old = jax.random.PRNGKey(11)  # keys of the old kind
    np.testing.assert_array_equal(call(zoo.generate, llama, **padded(prompts, "left"), **options, key=old), new)
    shorter = call(zoo.generate, llama, **padded(prompts, "left"), **options | {"max_new_tokens": 5}, key=key)
    np.testing.assert_array_equal(shorter, new[:, :5])
    other = call(zoo.generate, llama, **padded(prompts, "left"), **options, key=jax.random.key(12))
    assert np.mean(np.asarray(other) == new) < 0.3


def test_only_allowed_tokens(llama, prompts):
    asked = padded(prompts, "left") | {"max_new_tokens": NEW}
    for options in ({}, {"temperature": 50.0, "key": jax.random.key(0)}):
        new = np.asarray(call(zoo.generate, llama, **asked, **options, allowed=5))
        assert set(np.unique(new)) <= set(range(5))
    assert len(np.unique(new)) == 5
    best = np.asarray(call(zoo.generate, llama, **asked))[:, 0]
    top = call(zoo.generate, llama, **asked, temperature=9.0, top_k=1, key=jax.random.key(1))
    np.testing.assert_array_equal(np.asarray(top)[:, 0], best)


def test_logits_that_are_no_numbers(make, prompts):
    """A weight that is NaN, and a number that grows beyond its dtype: said, and in which row."""
    model = make(CONFIGS["llama"])
    token = int(prompts[1][-1])
    assert token not in prompts[0] and token not in prompts[2]
    broken = eqx.tree_at(lambda m: m.embedding.weight, model, model.embedding.weight.at[token].set(jnp.nan))
    asked = padded(prompts, "left") | {"max_new_tokens": 4}
    message = "the model's logits for new token 0 are not finite in row 1: its weights hold NaN"
    with pytest.raises(ValueError, match=f"generate: {message}"):
        call(zoo.generate, broken, **asked)
    with pytest.raises(ValueError, match=f"stream: {message}"):
        next(call(zoo.stream, broken, **asked))
    # Of the second token on: its embedding is looked up first then.
    first = np.asarray(call(zoo.generate, model, **asked))[0, 0]
    assert not any(first in prompt for prompt in prompts)
    late = eqx.tree_at(lambda m: m.embedding.weight, model, model.embedding.weight.at[first].set(jnp.inf))
    with pytest.raises(ValueError, match=r"generate: the model's logits for new token 1 are not finite in row 0"):
        call(zoo.generate, late, **asked)
    stream = call(zoo.stream, late, **asked)
    assert next(stream)[0] == first
    with pytest.raises(ValueError, match="new token 1 are not finite in row 0"):
        next(stream)
    # What can't be chosen may be anything.
    head = eqx.tree_at(lambda m: m.head.weight, model, model.head.weight.at[60].set(jnp.nan))
    new = call(zoo.generate, head, **asked, allowed=60)
    np.testing.assert_array_equal(new, call(zoo.generate, model, **asked, allowed=60))


def test_beyond_the_models_positions(make, prompts):
    """A warning, and tokens all the same; none where rotation is made for it."""
    model = make(LlamaConfig(**SHORT))
    with pytest.warns(UserWarning, match=r"generate: 16 tokens and 3 new ones may go beyond the 16 positions"):
        new = call(zoo.generate, model, **padded(prompts, "left"), max_new_tokens=3)
    assert new.shape == (3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(zoo.generate, model, tokens=[[1, 2]] * 3, max_new_tokens=14)
        call(zoo.generate, make(CONFIGS["dynamic"]), **padded(prompts, "left"), max_new_tokens=NEW)


HOLE = np.array([[True, False, True], [True, True, True]])


@pytest.mark.parametrize("function", [zoo.generate, zoo.stream], ids=["generate", "stream"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros((1, 0), int)}, r"the prompt must be integers \[batch, length >= 1\], got int64\[1, 0\]"),
        ({"tokens": np.zeros(3, int)}, r"the prompt must be integers \[batch, length >= 1\], got int64\[3\]"),
        ({"tokens": np.zeros((2, 3))}, "the prompt must be integers .* got float64"),
        ({"tokens": np.full((1, 2), 999)}, r"token ids must be in 0\.\.60, the prompt has 999\.\.999"),
        ({"tokens": [[3, -1]]}, r"token ids must be in 0\.\.60, the prompt has -1\.\.3"),
        ({"mask": np.ones((2, 3), int)}, r"mask must be boolean, True at real tokens, \[2, 3\] like the prompt, got i"),
        ({"mask": np.ones((2, 4), bool)}, r"mask must be boolean, True at real tokens, .* got bool\[2, 4\]"),
        ({"mask": HOLE}, "row 0 of mask has a hole"),
        ({"mask": ~HOLE}, "row 1 of the prompt has no real token"),
        ({"max_new_tokens": 0}, "max_new_tokens must be 1 or more, got 0"),
        ({"max_new_tokens": True}, "max_new_tokens must be a whole number, got True"),
        ({"temperature": 1.0}, "needs a key"),
        ({"temperature": -1.0}, "temperature must be 0 or more"),
        ({"temperature": float("nan")}, "temperature must be 0 or more, and finite, got nan"),
        ({"temperature": float("inf")}, "temperature must be 0 or more, and finite, got inf"),
        ({"temperature": True}, "temperature must be a number, got True"),
        ({"top_k": 0}, r"top_k must be in 1\.\.61, got 0"),
        ({"top_k": 62}, r"top_k must be in 1\.\.61, got 62"),
        ({"top_k": True}, "top_k must be a whole number, got True"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.01}, "top_p must be above 0 and at most 1, got 1.01"),
        ({"min_p": -0.1}, "min_p must be between 0 and 1, got -0.1"),
        ({"min_p": float("nan")}, "min_p must be between 0 and 1, got nan"),
        ({"allowed": 300}, r"allowed must be in 1\.\.61, got 300"),
        ({"stop_ids": (3, 61)}, r"stop ids must be in 0\.\.60, got 61"),
        ({"stop_ids": 2.0}, "a stop id must be a whole number, got 2.0"),
        ({"pad_id": -1}, "pad_id must be a token id, 0 or more, got -1"),
        ({"key": "keys"}, r"key must be one key, or an array of 2 keys like the rows, got \[3\]"),
        ({"key": 5}, r"key must be a key such as jax.random.key\(0\), got 5"),
    ],
)
def test_bad_arguments(llama, function, change, message):
    arguments = {"tokens": np.ones((2, 3), int), "max_new_tokens": 2} | change
    if change.get("key") == "keys":
        arguments["key"] = jax.random.split(jax.random.key(0), 3)
    with pytest.raises(ValueError, match=f"^{function.__name__}: .*{message}"):
        call(function, llama, **arguments)
