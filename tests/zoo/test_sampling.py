"""The tokens that may be drawn and how often they are, against brute force in float64 and against transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from overspill.zoo.sampling import Sampler, choose, kept

VOCAB = 23


def logits_of_kinds(rows=40, vocab=VOCAB):
    """Random rows; rows with many ties, of few levels; one with everything equal; one with impossible tokens."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(rows, vocab)) * 2
    x[rows // 2 :] = np.round(x[rows // 2 :])
    x[3] = 0.0
    x[4] = np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
    x[5] = np.log(np.arange(1, vocab + 1))
    x[6:9, ::3] = -np.inf
    x[9] = np.arange(vocab) * -30.0
    return x.astype(np.float32)


def brute_force(row, top_k=None, top_p=None, min_p=None, slack=1e-6):
    """The ids that stay, one filter after the other; of equal tokens top_p keeps those of lower ids first."""
    ids = np.flatnonzero(np.isfinite(row))
    if top_k is not None:
        lowest = np.sort(row[ids])[::-1][: min(top_k, len(ids))][-1]
        ids = ids[row[ids] >= lowest]
    if top_p not in (None, 1.0):
        p = np.exp(row[ids].astype(np.float64) - row[ids].max())
        p /= p.sum()
        best_first = sorted(range(len(ids)), key=lambda i: (-p[i], ids[i]))
        size = next(n for n in range(1, len(ids) + 1) if n == len(ids) or p[best_first[:n]].sum() > top_p - slack)
        ids = np.sort(ids[best_first[:size]])
    if min_p is not None:
        p = np.exp(row[ids].astype(np.float64) - row[ids].max())
        ids = ids[p >= min_p - 1e-9]
    return set(ids.tolist())


CASES = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": VOCAB},
    {"top_p": 0.05},
    {"top_p": 0.5},
    {"top_p": 0.93},
    {"top_p": 1.0},
    {"min_p": 0.03},
    {"min_p": 0.6},
    {"min_p": 1.0},
    {"top_k": 7, "top_p": 0.8},
    {"top_k": 9, "min_p": 0.07},
    {"top_p": 0.7, "min_p": 0.21},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.11},
]


run = jax.jit(kept)


def kept_sets(logits, **limits):
    mask = np.asarray(run(jnp.asarray(logits), Sampler.of(logits.shape[1], temperature=1.0, **limits)))
    return [set(np.flatnonzero(row & np.isfinite(x)).tolist()) for row, x in zip(mask, logits, strict=True)]


@pytest.mark.parametrize("limits", CASES, ids=str)
def test_kept_tokens_are_those_of_brute_force(limits):
    logits = logits_of_kinds()
    assert kept_sets(logits, **limits) == [brute_force(row, **limits) for row in logits]


@pytest.mark.parametrize("limits", CASES, ids=str)
def test_kept_tokens_are_those_of_transformers(limits):
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = logits_of_kinds()
    warpers = {
        "top_k": process.TopKLogitsWarper, "top_p": process.TopPLogitsWarper, "min_p": process.MinPLogitsWarper
    }  # fmt: skip
    scores = torch.tensor(logits)
    for name, warper in warpers.items():
        if name in limits and limits[name] != 1.0:
            scores = warper(limits[name])(None, scores)
    ours = kept_sets(logits, **{name: value for name, value in limits.items() if value != 1.0})
    # Which ones of equal tokens are dropped is up to the order in which torch happens to sort them.
    for row, theirs, mine in zip(logits, torch.isfinite(scores).numpy(), ours, strict=True):
        np.testing.assert_array_equal(np.sort(row[sorted(mine)]), np.sort(row[theirs]))


def test_random_limits():
    """All in one program: limits are numbers like any other."""
    logits, rng, before = logits_of_kinds(), np.random.default_rng(8), run._cache_size()
    for _ in range(150):
        limits = {
            "top_k": int(rng.integers(1, VOCAB + 1)),
            "top_p": float(rng.choice([rng.random(), 1 - rng.random() / 50, 1e-9, 1.0])),
            "min_p": float(rng.choice([rng.random(), rng.random() / 100, 0.0])),
        }
        limits = {name: limit if rng.random() < 0.6 else None for name, limit in limits.items()}
        for row, mine in zip(logits, kept_sets(logits, **limits), strict=True):
            # Sums of float32 may fall on either side of a limit that they all but meet.
            assert mine in (brute_force(row, **limits), brute_force(row, **limits, slack=-1e-6)), limits
    assert run._cache_size() <= max(before, 1)


@pytest.mark.parametrize("limits", [
    {"temperature": 1.0}, {"temperature": 0.6, "top_k": 5}, {"temperature": 2.5, "top_p": 0.8},
    {"temperature": 1.7, "min_p": 0.2}, {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
], ids=str)  # fmt: skip
def test_tokens_are_as_frequent_as_they_are_probable(limits):
    """Limits come after the temperature, and what is left shares all of the probability."""
    rows = 30_000
    logits = np.random.default_rng(3).normal(size=12).astype(np.float32) * 1.5
    sampler = Sampler.of(12, **limits)
    tokens = np.asarray(
        jax.jit(choose)(jnp.tile(logits, (rows, 1)), sampler, jax.random.split(jax.random.key(4), rows))
    )
    heated = logits.astype(np.float64) / limits["temperature"]
    ids = sorted(brute_force(heated, **{name: limit for name, limit in limits.items() if name != "temperature"}))
    probabilities = np.exp(heated[ids]) / np.exp(heated[ids]).sum()
    assert set(tokens.tolist()) == set(ids)
    counts = np.bincount(tokens, minlength=12)[ids]
    assert len(ids) == 1 or scipy.stats.chisquare(counts, rows * probabilities).pvalue > 1e-3


def test_next_to_no_temperature_and_none():
    """Ties at temperature 0 go to the lowest id; next to 0 they are all that is drawn; nothing is ever no number."""
    logits = jnp.asarray([[0.0, 5.0, 5.0, -jnp.inf], [1e30, -1e30, 1e30, 0.0], [-jnp.inf, -jnp.inf, -3.0, -jnp.inf]])
    keys = jax.random.split(jax.random.key(0), 3)
    greedy = choose(logits, Sampler.of(4), keys)
    assert greedy.dtype == jnp.int32
    np.testing.assert_array_equal(greedy, [1, 0, 2])
    for heat in (1e-60, 1e-45, 1e-38, 1e-9):
        drawn = np.asarray(choose(logits, Sampler.of(4, temperature=heat), keys))
        assert drawn[0] in (1, 2) and drawn[1] in (0, 2) and drawn[2] == 2
    for limits in ({"top_k": 1}, {"top_p": 1e-12}, {"min_p": 1.0}):
        drawn = np.asarray(choose(logits, Sampler.of(4, temperature=5.0, **limits), keys))
        assert drawn[0] in (1, 2) and drawn[1] in (0, 2) and drawn[2] == 2


def test_limits_that_take_nothing_away_change_no_draw():
    logits = jnp.asarray(logits_of_kinds())
    keys = jax.random.split(jax.random.key(5), len(logits))
    free = choose(logits, Sampler.of(VOCAB, temperature=1.4), keys)
    for limits in ({"top_k": VOCAB}, {"top_p": 1.0}, {"min_p": 0.0}, {"top_k": VOCAB, "top_p": 1, "min_p": 1e-30}):
        np.testing.assert_array_equal(choose(logits, Sampler.of(VOCAB, temperature=1.4, **limits), keys), free)
