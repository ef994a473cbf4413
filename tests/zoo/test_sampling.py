"""The tokens that may be drawn and how often they are, against brute force in float64 and against transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill.zoo.sampling import Sampler, kept

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


def brute_force(row, top_k=None, top_p=None, min_p=None):
    """The ids that stay, one filter after the other; of equal tokens top_p keeps those of lower ids first."""
    ids = np.flatnonzero(np.isfinite(row))
    if top_k is not None:
        lowest = np.sort(row[ids])[::-1][: min(top_k, len(ids))][-1]
        ids = ids[row[ids] >= lowest]
    if top_p not in (None, 1.0):
        p = np.exp(row[ids].astype(np.float64) - row[ids].max())
        p /= p.sum()
        best_first = sorted(range(len(ids)), key=lambda i: (-p[i], ids[i]))
        size = next(n for n in range(1, len(ids) + 1) if n == len(ids) or p[best_first[:n]].sum() > top_p - 1e-6)
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


def kept_sets(logits, **limits):
    mask = np.asarray(jax.jit(kept)(jnp.asarray(logits), Sampler.of(logits.shape[1], temperature=1.0, **limits)))
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
