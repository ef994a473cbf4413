import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill import zoo


@pytest.fixture(scope="module", params=["overspill-llama-tiny", "overspill-deepseek-tiny"])
def model(request):
    built = zoo.build(request.param, key=jax.random.key(3))
    # Sharper than fresh weights, so that the most probable token is clear.
    return jax.tree.map(lambda leaf: 3 * leaf if leaf.ndim > 1 else leaf, built)


def test_greedy_tokens_are_those_of_whole_forward_passes(model):
    prompt = jax.random.randint(jax.random.key(0), (2, 70), 0, 257)
    new = zoo.generate(model, prompt, max_new_tokens=4)
    whole = jnp.concatenate([prompt, new], axis=1)
    logits = model(whole)
    expected = jnp.argmax(logits[:, 69:-1], axis=-1)
    np.testing.assert_array_equal(new, expected)


def test_sampling_keeps_to_what_is_allowed(model):
    prompt = jnp.zeros((64, 1), jnp.int32)
    new = zoo.generate(model, prompt, max_new_tokens=2, temperature=50.0, allowed=5, key=jax.random.key(1))
    assert set(np.unique(new)) == set(range(5))
    top = zoo.generate(model, prompt, max_new_tokens=1, temperature=50.0, top_k=3, key=jax.random.key(2))
    best = np.argsort(-np.asarray(model(prompt[:1])[0, 0]))[:3]
    assert set(np.unique(top)) == set(best)
    again = zoo.generate(model, prompt, max_new_tokens=1, temperature=50.0, top_k=3, key=jax.random.key(2))
    np.testing.assert_array_equal(top, again)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": jnp.zeros((1, 0), jnp.int32)}, "must be integers"),
        ({"tokens": jnp.full((1, 2), 999)}, r"token ids must be in 0\.\.259, the prompt has 999\.\.999"),
        ({"max_new_tokens": 0}, "max_new_tokens must be 1 or more"),
        ({"temperature": 1.0}, "needs a key"),
        ({"temperature": -1.0}, "temperature must be 0 or more"),
        ({"top_k": 0}, "top_k must be in"),
        ({"allowed": 300}, "allowed must be in"),
    ],
)
def test_bad_arguments(model, change, message):
    arguments = {"tokens": jnp.zeros((1, 3), jnp.int32), "max_new_tokens": 2} | change
    with pytest.raises(ValueError, match=message):
        zoo.generate(model, arguments.pop("tokens"), **arguments)
