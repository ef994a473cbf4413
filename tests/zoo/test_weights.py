import dataclasses
import pathlib
import sys

import jax
import numpy as np
import pytest

from overspill import zoo
from overspill.zoo import weights
from overspill.zoo.model_types import MODEL_TYPES
from overspill.zoo.optimizer import arrays_by_path
from overspill.zoo.weights import Layout, leaves, names

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from weight_files import FAMILIES, random_model, tensors_of

# One of each kind of names.
KINDS = [
    "llama_mlp_bias", "llama_llama3", "mistral", "qwen2", "qwen3_window", "olmo2_grouped", "smollm3", "mixtral",
    "qwen3_moe_dense_prefix", "glm4_moe", "gpt_oss", "deepseek_v2_lite", "deepseek_v2", "deepseek_v3_mtp",
    "deepseek_v3_half_split", "deepseek_v32",
]  # fmt: skip


@pytest.mark.parametrize("family", KINDS)
def test_every_array_has_the_name_and_layout_of_transformers(family):
    model = random_model(family)
    written = {}
    for leaf in leaves(model):
        for piece in leaf.pieces(leaf.sources[0]):
            shape = piece.layout.tensor_shape(leaf.piece_shape(piece))
            tensor = written.setdefault(piece.name, np.full(shape, np.nan, np.float32))
            view = piece.layout.view(tensor)
            assert np.isnan(view).all(), f"{piece.name} is filled twice"
            view[...] = np.asarray(leaf.array)[piece.index]
    expected = tensors_of(model)
    assert set(written) == set(expected) == set(names(model))
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor, expected[name], err_msg=name)


def test_tables_cover_every_architecture():
    assert set(weights.LAYER_TABLES) == set(MODEL_TYPES)
    kinds = {zoo.from_config(FAMILIES[family]).model_type for family in KINDS}
    assert kinds == set(MODEL_TYPES)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_of_layers_whatever_the_segments(family):
    config = zoo.from_config(FAMILIES[family])
    models = [zoo.abstract(config, **options) for options in ({}, {"segments": (1,)}, {"scan": False})]
    tables = [names(model) for model in models]
    assert tables[0].keys() == tables[1].keys() == tables[2].keys()
    assert sum(leaf.array.size for leaf in leaves(models[1])) == sum(
        array.size for array in arrays_by_path(models[0]).values()
    )


@pytest.mark.parametrize("name", zoo.REGISTRY)
def test_real_models_have_names_for_all_their_parameters(name):
    model = zoo.abstract(name)
    total = 0
    for leaf in leaves(model):
        pieces = list(leaf.pieces(leaf.sources[0]))
        assert len({(piece.name, piece.layout) for piece in pieces}) == len(pieces)
        total += len(pieces) * int(np.prod(leaf.piece_shape(pieces[0])))
    assert total == sum(array.size for array in arrays_by_path(model).values())


def test_names_say_where():
    model = zoo.abstract(zoo.from_config(FAMILIES["deepseek_v3_mtp"]), segments=(2,))
    table = names(model)
    assert table["lm_head.weight"] == "head.weight"
    assert table["model.layers.0.mlp.gate_proj.weight"] == "dense_layers.segments.0.mlp.gate_projection.weight[0]"
    assert table["model.layers.2.mlp.experts.5.up_proj.weight"] == "moe_layers.segments.1.moe.experts.up_weight[0, 5]"
    assert table["model.layers.3.eh_proj.weight"] == "mtp.0.projection.weight"
    assert table["model.layers.3.mlp.gate.e_score_correction_bias"] == "mtp.0.block.moe.router.bias.value"
    both = names(zoo.abstract(zoo.from_config(FAMILIES["gpt_oss"])))["model.layers.1.mlp.experts.gate_up_proj"]
    assert both == "moe_layers.segments.0.moe.experts.gate_weight[1] and moe_layers.segments.0.moe.experts.up_weight[1]"


@pytest.mark.parametrize("missing", ["attention.key_norm.scale", "moe.experts.down_weight", "moe.router.bias.value"])
def test_an_array_without_a_name_is_an_error(missing, monkeypatch):
    table = {path: sources for path, sources in weights.LAYER_TABLES["glm4_moe"].items() if path != missing}
    monkeypatch.setitem(weights.LAYER_TABLES, "glm4_moe", table)
    with pytest.raises(ValueError, match=rf"'glm4_moe' have no name for '(moe|dense)_layers.segments.0.{missing}'"):
        leaves(zoo.abstract(zoo.from_config(FAMILIES["glm4_moe"])))


def test_names_without_a_model_type_are_the_plainest():
    for family, kind in (("llama", "llama"), ("mixtral", "mixtral"), ("deepseek_v2", "deepseek_v2"),
                         ("deepseek_v3_mtp", "deepseek_v3")):  # fmt: skip
        config = zoo.from_config(FAMILIES[family])
        nameless = dataclasses.replace(config, model_type=None)
        assert config.model_type == kind
        assert names(zoo.abstract(nameless)) == names(zoo.abstract(config))


@pytest.mark.parametrize("layout", [
    Layout(), Layout(transposed=True), Layout(2, 0), Layout(2, 1), Layout(2, 1, transposed=True),
    Layout(2, 0, interleaved=True), Layout(2, 1, interleaved=True), Layout(2, 1, interleaved=True, transposed=True),
    Layout(3, 2, interleaved=True),
], ids=str)  # fmt: skip
def test_a_block_of_ours_is_found_in_the_tensor(layout):
    rng = np.random.default_rng(0)
    shape = (3, 5, 7)
    tensor = rng.normal(size=layout.tensor_shape(shape))
    ours = layout.view(tensor)
    assert ours.shape == shape
    assert tensor.size == ours.size * layout.parts
    for _ in range(30):
        bounds = [sorted(rng.choice(n + 1, 2, replace=False)) for n in shape]
        index = tuple(slice(int(a), int(b)) for a, b in bounds)
        block = tensor[layout.index(index, shape[1])]
        np.testing.assert_array_equal(block.swapaxes(1, 2) if layout.transposed else block, ours[index])


def test_abstract_models_allocate_nothing():
    assert all(isinstance(leaf.array, jax.ShapeDtypeStruct) for leaf in leaves(zoo.abstract("llama-2-70b")))
