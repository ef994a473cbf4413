"""What generation is asked for at the edges: great heat, arguments of other kinds, what is no model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill import zoo


@pytest.mark.parametrize("heat", [1e38, 3e38])
def test_great_heat_draws_what_may_be_drawn(configs, make, heat):
    model = make(configs["llama"])
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
def test_arguments_that_cannot_be(configs, make, change, message):
    model = make(configs["llama"])
    for call in (zoo.generate, zoo.stream):
        with pytest.raises(ValueError, match=f"{call.__name__}: .*{message}"):
            call(model, np.zeros((1, 3), int), **{"max_new_tokens": 2} | change)


def test_what_is_no_model(configs, make):
    model = zoo.abstract(configs["llama"])
    with pytest.raises(ValueError, match="an abstract model has no weights"):
        zoo.generate(model, [[1]], max_new_tokens=1)
    with pytest.raises(ValueError, match="a model is wanted, not a str; step.trained.state. gives"):
        zoo.generate("folder", [[1]], max_new_tokens=1)
