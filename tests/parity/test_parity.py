"""Every family side by side with transformers, in both directions; skipped without torch.

`OVERSPILL_PARITY=1` makes torch's absence a failure.
"""

import os
import pathlib
import sys
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from overspill import zoo
from overspill.zoo.optimizer import arrays_by_path

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "reference"))
import golden_files
import jax_side
import tensors
from families import FAMILIES, reference_config

try:
    import torch
    import torch_side
except ImportError:
    if os.environ.get("OVERSPILL_PARITY") == "1":
        raise
    pytest.skip("comparing with transformers needs the parity extra: torch isn't there", allow_module_level=True)

torch.set_num_threads(1)
torch_side.quiet()
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
MIXTURES = {name for name, config in FAMILIES.items() if any(key in config for key in _EXPERTS)}


class Sides:
    """A family's folder, and what either side makes of it. For transformers the folder may need another config."""

    def __init__(self, family, folder):
        self.family, self.ours, self.theirs = family, folder / "ours", folder / "theirs"
        self.shapes = torch_side.shapes(family)
        self.tokens = tensors.tokens(family)
        tensors.write_folder(self.ours, family, self.shapes)
        tensors.write_folder(self.theirs, family, self.shapes, reference_config(family))
        self.reference = torch_side.reference(family, self.theirs)
        self.model = zoo.load(self.ours)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return Sides(request.param, tmp_path_factory.mktemp(request.param))


def normwise(actual, expected):
    difference = np.asarray(actual, np.float64) - np.asarray(expected, np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def near(actual, expected, bound):
    return normwise(actual, expected) < bound and np.abs(actual - expected).max() < bound * np.abs(expected).max()


def test_logits_loss_gradients_and_tokens_are_equal(family):
    ours, theirs = jax_side.values(family.model, family.tokens), family.reference
    assert near(ours["logits"], theirs["logits"], 2e-5)
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-5)
    if "mtp_loss" in theirs:
        assert near(ours["mtp_states"], theirs["mtp_states"], 2e-5)
        np.testing.assert_allclose(ours["mtp_loss"], theirs["mtp_loss"], rtol=1e-5)
    norms = {name: np.linalg.norm(gradient) for name, gradient in theirs["gradients"].items()}
    nothing = golden_files.NOTHING * np.linalg.norm(list(norms.values()))
    for name, expected in theirs["gradients"].items():
        actual = ours["gradients"].get(name)
        if norms[name] < nothing:  # a buffer, a choice, or what the softmax cancels
            assert actual is None or np.linalg.norm(actual) < nothing, name
        else:
            assert normwise(actual, expected) < 1e-4, name
    made = zoo.generate(family.model, jnp.asarray(family.tokens), max_new_tokens=tensors.NEW_TOKENS)
    np.testing.assert_array_equal(made, theirs["greedy"])


def test_bfloat16_is_no_worse_than_theirs(family):
    exact = family.reference["logits"]
    half = zoo.load(family.ours, dtype=jnp.bfloat16)
    ours = golden_files.errors(jax_side.logits(half, family.tokens), exact)
    theirs = golden_files.errors(family.reference["bfloat16_logits"], exact)
    # With experts, rounding sends a few tokens elsewhere, others on either side, and these are most of the whole.
    compared = slice(1, 2) if family.family in MIXTURES else slice(0, 2)
    assert (ours[compared] < 1.5 * theirs[compared]).all(), (ours, theirs)


def test_transformers_loads_what_is_saved(family, tmp_path):
    zoo.save(family.model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name in jax_side.on_disk(family.model):  # MTP's too, which the class below doesn't read
        np.testing.assert_array_equal(
            saved[name], tensors.weight(name, family.shapes[name], family.family), err_msg=name
        )
    again = torch_side.load(tmp_path)
    assert near(torch_side.logits(again, family.tokens), family.reference["logits"], 1e-5)


def test_what_transformers_saves_is_loaded(family, tmp_path):
    expected = arrays_by_path(family.model)
    # With the experts of a layer apart, as on the Hub, and in one tensor, as in memory: without experts it's the same.
    for original in (True, False)[: 1 + (family.family in MIXTURES)]:
        torch_side.load(family.theirs).save_pretrained(tmp_path / str(original), save_original_format=original)
        with warnings.catch_warnings():
            # Transformers leaves MTP out, and has its number in the config.
            warnings.filterwarnings("ignore", "num_nextn_predict_layers is 1, but the files have no multi-token")
            loaded = arrays_by_path(zoo.load(tmp_path / str(original)))
        assert set(loaded) == {path for path in expected if not path.startswith("mtp.")}
        for path, array in loaded.items():
            np.testing.assert_array_equal(array, expected[path], err_msg=path)


def test_padded_rows_continue_as_they_do_alone(family):
    """Rows of 72 and 50 tokens in one batch, padded on the left."""
    short = family.tokens[1:, 22:]
    padded = family.tokens.copy()
    padded[1, :22] = 0
    mask = np.ones(padded.shape, bool)
    mask[1, :22] = False
    made = zoo.generate(family.model, jnp.asarray(padded), mask=jnp.asarray(mask), max_new_tokens=tensors.NEW_TOKENS)
    np.testing.assert_array_equal(made[0], family.reference["greedy"][0])
    np.testing.assert_array_equal(made[1], torch_side.greedy(torch_side.load(family.theirs), short)[0])


def test_golden_files_are_up_to_date(family):
    stored, fresh = golden_files.load(family.family), golden_files.summary(family.shapes, family.reference)
    assert stored["tensors"] == family.shapes
    assert stored["gradients"] == sorted(family.reference["gradients"])
    np.testing.assert_allclose(fresh["loss"], stored["loss"], rtol=1e-6)
    np.testing.assert_array_equal(fresh["greedy"], stored["greedy"])
    for name in ("logits", "mtp_states"):
        if name in stored:
            assert golden_files.state_error(name, family.reference[name], stored) < 5e-6
    errors = golden_files.gradient_errors(family.reference["gradients"], stored)
    assert {name: error for name, error in errors.items() if not error < 2e-5} == {}
