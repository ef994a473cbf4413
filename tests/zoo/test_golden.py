"""Every family against values that transformers computed: config.json and weights as files, no torch."""

import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from overspill import zoo

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "reference"))
import golden_files
import jax_side
import tensors
from families import FAMILIES

# Compiling takes nearly all of the time. Where a family differs from another one in its rotary table, in numbers or in
# what its file looks like, its logits say all; tests/parity compares everything of every family.
LOGITS_ALONE = {
    "llama_linear",
    "llama_yarn",
    "llama_yarn_explicit",
    "llama_longrope_short",
    "llama_longrope_long",
    "qwen2",
    "mixtral_window",
    "qwen3_moe_dense_prefix",
    "glm4_moe_air",
    "gpt_oss_short_context",
    "deepseek_v3",  # with MTP it has all of its gradients
    "deepseek_v3_moonlight",
    "deepseek_v3_negative_bias",
    "kimi_k2",
    "deepseek_v32_all_keys",
}
# Families of whose caches each has something of its own.
CONTINUED = {
    "llama_dynamic",
    "qwen2_window",
    "olmo2",
    "smollm3_window",
    "glm4_moe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3_half_split",
    "deepseek_v32",
}


@pytest.fixture
def loaded(request, tmp_path):
    """A family's name, golden values and model, from its folder."""
    golden = golden_files.load(request.param)
    tensors.write_folder(tmp_path, request.param, golden["tensors"])
    return request.param, golden, zoo.load(tmp_path)


@pytest.mark.parametrize("loaded", FAMILIES, indirect=True)
def test_a_folder_becomes_the_model_of_transformers(loaded):
    family, golden, model = loaded
    arrays = jax_side.on_disk(model)
    copies = ("embed_tokens.weight", "shared_head.head.weight")  # MTP's, of what it shares
    assert {n for n in golden["tensors"] if not (n.endswith(copies) and n.startswith("model.layers."))} == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, tensors.weight(name, golden["tensors"][name], family), err_msg=name)

    tokens = tensors.tokens(family)
    if family in LOGITS_ALONE:
        assert golden_files.state_error("logits", jax_side.logits(model, tokens), golden) < 2e-5
        return
    values = jax_side.values(model, tokens)
    assert golden_files.state_error("logits", values["logits"], golden) < 2e-5
    np.testing.assert_allclose(values["loss"], golden["loss"], rtol=1e-5)
    if "mtp_loss" in golden:
        assert golden_files.state_error("mtp_states", values["mtp_states"], golden) < 2e-5
        np.testing.assert_allclose(values["mtp_loss"], golden["mtp_loss"], rtol=1e-5)
    errors = golden_files.gradient_errors(values["gradients"], golden)
    assert {name: error for name, error in errors.items() if not error < 1e-4} == {}


@pytest.mark.parametrize("loaded", [name for name in FAMILIES if name in CONTINUED], indirect=True)
def test_greedy_tokens_are_those_of_transformers(loaded):
    family, golden, model = loaded
    made = zoo.generate(model, jnp.asarray(tensors.tokens(family)), max_new_tokens=tensors.NEW_TOKENS)
    np.testing.assert_array_equal(made, golden["greedy"])


def test_every_family_has_a_golden_file_and_all_stay_small():
    files = list(golden_files.FOLDER.iterdir())
    assert {path.name for path in files} == {f"{name}.npz" for name in FAMILIES}
    assert sum(path.stat().st_size for path in files) < 600_000
    assert LOGITS_ALONE | CONTINUED <= set(FAMILIES)
