import dataclasses
import logging
import pathlib
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from overspill import zoo
from overspill.zoo import pretrained
from overspill.zoo.optimizer import arrays_by_path
from overspill.zoo.pretrained import WeightMismatch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from weight_files import FAMILIES, assert_same, quantise_float8, random_like, random_model, tensors_of, write_folder

LLAMA, TIED, V3 = "llama_mlp_bias", "llama_llama3", "deepseek_v3_mtp"
MIXTURES = ["mixtral", "qwen3_moe_dense_prefix", "glm4_moe", "gpt_oss", "deepseek_v2", V3, "deepseek_v32"]


def folder_of(path, family, model=None, *, change=None, config=None, shards=1):
    """A folder of `family` with the weights of `model`, after `change` has had its way with the tensors."""
    tensors = tensors_of(random_model(family) if model is None else model)
    if change is not None:
        change(tensors)
    return write_folder(path / "model", FAMILIES[family] | (config or {}), tensors, shards)


@pytest.mark.parametrize("family, dtype", [
    *((family, "float32") for family in (LLAMA, TIED, *MIXTURES)), (LLAMA, "float16"), (TIED, "bfloat16"),
    ("gpt_oss", "bfloat16"), (V3, "bfloat16"),
])  # fmt: skip
def test_every_array_is_the_one_that_was_written(tmp_path, family, dtype):
    model = random_model(family, dtype=dtype)
    assert_same(zoo.load(folder_of(tmp_path, family, model, shards=3)), model)


@pytest.mark.parametrize("options", [{"segments": (1,)}, {"segments": (2,), "scan": False}, {"scan": False}], ids=str)
@pytest.mark.parametrize("family", [LLAMA, V3])
def test_segments_and_loops_hold_the_same_layers(tmp_path, family, options):
    model = random_model(family)
    loaded = zoo.load(folder_of(tmp_path, family, model), **options)
    like = zoo.abstract(zoo.from_config(FAMILIES[family]), **options)
    assert jax.tree.structure(loaded) == jax.tree.structure(like)
    assert_same(loaded, model)


def test_placements_are_those_of_build(tmp_path):
    folder = folder_of(tmp_path, LLAMA)
    loaded = zoo.load(folder, placements={"*.attention.query": "host"})
    like = zoo.abstract(zoo.from_config(folder), placements={"*.attention.query": "host"})
    assert jax.tree.structure(loaded) == jax.tree.structure(like) != jax.tree.structure(zoo.load(folder))
    with pytest.raises(ValueError, match="no_such"):
        zoo.load(folder, placements={"no_such": "host"})
    with pytest.raises(ValueError, match="segments"):
        zoo.load(folder, segments=(9,))


def test_every_tensor_ends_in_its_own_place(tmp_path):
    # A constant for each tensor, so that nothing is filled by another's neighbour or made anew.
    tensors = tensors_of(random_model(V3))
    numbers = {name: i + 1 for i, name in enumerate(tensors)}
    tensors = {name: np.full(array.shape, numbers[name], np.float32) for name, array in tensors.items()}
    model = zoo.load(write_folder(tmp_path, FAMILIES[V3], tensors, shards=2))
    for name, array in tensors_of(model).items():
        assert (array == numbers[name]).all(), name


@pytest.mark.parametrize("family", ["deepseek_v2", "qwen3_moe_dense_prefix", "glm4_moe", "mixtral"])
def test_fused_experts_are_the_same_experts(tmp_path, family):
    module, names = ("block_sparse_moe", "w1 w3 w2") if family == "mixtral" else ("mlp", "gate_proj up_proj down_proj")
    gate, up, down = names.split()

    def fuse(tensors):
        for prefix in sorted({name.split(f"{module}.experts.")[0] for name in tensors if f"{module}.experts." in name}):
            count = sum(name.startswith(f"{prefix}{module}.experts.") for name in tensors) // 3
            take = lambda part: np.stack(
                [tensors.pop(f"{prefix}{module}.experts.{e}.{part}.weight") for e in range(count)]
            )
            tensors[f"{prefix}mlp.experts.gate_up_proj"] = np.concatenate([take(gate), take(up)], axis=1)
            tensors[f"{prefix}mlp.experts.down_proj"] = take(down)
            if family == "mixtral":
                tensors[f"{prefix}mlp.gate.weight"] = tensors.pop(f"{prefix}block_sparse_moe.gate.weight")

    model = random_model(family)
    assert_same(zoo.load(folder_of(tmp_path, family, model, change=fuse)), model)


@pytest.mark.parametrize("prefix, head", [
    ("", "lm_head."), ("model.language_model.", "lm_head."), ("language_model.model.", "language_model.lm_head."),
    ("language_model.", "lm_head."), ("model.", "lm_head."),
])  # fmt: skip
@pytest.mark.parametrize("wrapped", [True, False])
def test_prefixes_of_wrappers(tmp_path, prefix, head, wrapped):
    model = random_model(LLAMA)
    tensors = {}
    for name, array in tensors_of(model).items():
        name = name.replace("model.", prefix, 1) if name.startswith("model.") else name.replace("lm_head.", head)
        tensors[name] = array
    config = FAMILIES[LLAMA]
    tower = {"vision_tower.layers.0.mlp.weight": np.ones(3, np.int32), "multi_modal_projector.weight": np.ones(2, "f4")}
    if wrapped:
        config = {"architectures": ["SomeVisionForCausalLM"], "model_type": "some_vision", "text_config": config}
        tensors |= tower
    assert_same(zoo.load(write_folder(tmp_path / "a", config, tensors)), model)
    if not wrapped and prefix:
        with pytest.raises(WeightMismatch, match=r"unexpected \(2\)(.|\n)*vision_tower.layers.0.mlp.weight"):
            zoo.load(write_folder(tmp_path / "b", config, tensors | tower))


def test_leftover_tables_are_left_out(tmp_path):
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32) for i in range(3)}
    model = random_model(LLAMA)
    assert_same(zoo.load(folder_of(tmp_path, LLAMA, model, change=lambda tensors: tensors.update(tables))), model)


class TestTiedHeads:
    def test_one_array(self, tmp_path):
        model = random_model(TIED)
        loaded = zoo.load(folder_of(tmp_path, TIED, model))
        assert loaded.head is None
        assert_same(loaded, model)

    def test_an_equal_copy_is_fine_and_another_is_not(self, tmp_path):
        model = random_model(TIED)

        def repeat(tensors):
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

        def change(tensors):
            repeat(tensors)
            tensors["lm_head.weight"][7, 3] += 1

        assert_same(zoo.load(folder_of(tmp_path / "equal", TIED, model, change=repeat)), model)
        with pytest.raises(WeightMismatch, match="lm_head.weight .*differs from model.embed_tokens.weight"):
            zoo.load(folder_of(tmp_path / "other", TIED, model, change=change))

    def test_a_copy_of_another_shape_is_not(self, tmp_path):
        shorter = lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"][:-1]})
        with pytest.raises(WeightMismatch, match="lm_head.weight .*must equal model.embed_tokens.weight"):
            zoo.load(folder_of(tmp_path, TIED, change=shorter))

    def test_a_head_of_its_own_must_be_there(self, tmp_path):
        with pytest.raises(WeightMismatch, match=r"missing \(1\):\n.*lm_head.weight, for head.weight \[97, 48\]"):
            zoo.load(folder_of(tmp_path, LLAMA, change=lambda tensors: tensors.pop("lm_head.weight")))


class TestMultiTokenPrediction:
    def copies(self, tensors):
        tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].copy()

    def test_copies_of_embedding_and_head(self, tmp_path):
        model = random_model(V3)
        assert_same(zoo.load(folder_of(tmp_path, V3, model, change=self.copies)), model)

    @pytest.mark.parametrize("which", ["embed_tokens", "shared_head.head"])
    def test_copies_that_differ_are_told_and_not_used(self, tmp_path, which):
        def change(tensors):
            self.copies(tensors)
            tensors[f"model.layers.3.{which}.weight"][0, 0] += 1

        model = random_model(V3)
        with pytest.warns(UserWarning, match=f"layers.3.{which}.weight differs"):
            assert_same(zoo.load(folder_of(tmp_path, V3, model, change=change)), model)

    def test_modules_that_the_config_does_not_have_are_left_out(self, tmp_path):
        model = random_model("deepseek_v3")
        extra = {n: a for n, a in tensors_of(random_model(V3)).items() if n.startswith("model.layers.3.")}
        folder = folder_of(tmp_path, "deepseek_v3", model, change=lambda tensors: tensors.update(extra))
        with pytest.warns(UserWarning, match=rf"layer 3 \({len(extra)} tensors\).*left out") as told:
            assert_same(zoo.load(folder), model)
        assert len(told) == 1

    def test_a_second_module_is_left_out(self, tmp_path):
        def again(tensors):
            tensors |= {
                n.replace("layers.3.", "layers.4."): a for n, a in tensors.items() if n.startswith("model.layers.3.")
            }

        model = random_model(V3)
        with pytest.warns(UserWarning, match="layer 4 .*left out"):
            assert_same(zoo.load(folder_of(tmp_path, V3, model, change=again)), model)

    def drop(self, tensors):
        for name in [name for name in tensors if name.startswith("model.layers.3.")]:
            del tensors[name]

    @pytest.mark.parametrize("said", [{}, {"num_nextn_predict_layers": None}])
    def test_modules_that_the_files_do_not_have(self, tmp_path, said):
        # transformers writes the number and drops the weights; without the number, one is its default.
        config = {key: value for key, value in (FAMILIES[V3] | said).items() if value is not None}
        model = random_model(V3)
        tensors = tensors_of(model)
        self.drop(tensors)
        with pytest.warns(UserWarning, match="num_nextn_predict_layers is 1, but the files have no"):
            loaded = zoo.load(write_folder(tmp_path, config, tensors))
        assert loaded.mtp == () and loaded.config.num_nextn_predict_layers == 0
        assert_same(loaded, random_model("deepseek_v3"))

    def test_half_a_module_is_an_error(self, tmp_path):
        with pytest.raises(WeightMismatch, match=r"missing \(1\):\n.*layers.3.eh_proj.weight, for mtp.0.projection.w"):
            zoo.load(folder_of(tmp_path, V3, change=lambda tensors: tensors.pop("model.layers.3.eh_proj.weight")))

    def test_layers_too_many_are_no_prediction_modules(self, tmp_path):
        def deeper(tensors):
            tensors |= {n.replace("layers.2.", "layers.3."): a for n, a in tensors.items() if ".layers.2." in n}

        for family in (LLAMA, "deepseek_v3"):
            with pytest.raises(WeightMismatch, match=r"unexpected(.|\n)*model.layers.3.input_layernorm.weight"):
                zoo.load(folder_of(tmp_path / family, family, change=deeper))


class TestDtypes:
    @pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "float64"])
    @pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
    def test_casts_round_once(self, tmp_path, stored, wanted):
        kind = np.dtype(getattr(ml_dtypes, stored, stored))
        rng = np.random.default_rng(0)

        def change(tensors):
            for name, array in tensors.items():
                tensors[name] = rng.normal(size=array.shape).astype(kind)

        held = {}
        folder = folder_of(tmp_path, LLAMA, change=lambda tensors: (change(tensors), held.update(tensors)))
        model = zoo.load(folder, dtype=wanted)
        for name, array in tensors_of(model).items():
            assert array.dtype == wanted
            np.testing.assert_array_equal(array, held[name].astype(getattr(ml_dtypes, wanted, wanted)), err_msg=name)

    def test_by_default_the_files_own(self, tmp_path):
        def change(tensors):
            for name, array in tensors.items():
                if not name.endswith("norm.weight") and "mlp.gate." not in name:
                    tensors[name] = array.astype(ml_dtypes.bfloat16)

        model = zoo.load(folder_of(tmp_path, V3, change=change))
        dtypes = {path: str(array.dtype) for path, array in arrays_by_path(model).items()}
        assert {path for path, dtype in dtypes.items() if dtype == "float32"} == {p for p in dtypes if "router" in p}
        assert set(dtypes.values()) == {"float32", "bfloat16"}

    def test_routers_stay_float32(self, tmp_path):
        model = random_model(V3)
        loaded = zoo.load(folder_of(tmp_path, V3, model), dtype=jnp.float16)
        ours, theirs = arrays_by_path(loaded), arrays_by_path(model)
        for path, array in ours.items():
            assert array.dtype == ("float32" if "router" in path else "float16"), path
            if "router" in path:
                np.testing.assert_array_equal(array, theirs[path])

    @pytest.mark.parametrize("dtype", [jnp.int32, jnp.float8_e4m3fn, jnp.float64, bool], ids=str)
    def test_others_are_refused(self, tmp_path, dtype):
        with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
            zoo.load(folder_of(tmp_path, LLAMA), dtype=dtype)


def wide(**changes):
    """A V3-shaped config with matrices of several blocks, the last of which are cut short."""
    return FAMILIES["deepseek_v3"] | {
        "hidden_size": 200, "num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 130, "kv_lora_rank": 140, "intermediate_size": 256,
    } | changes  # fmt: skip


def float8_tensors(config, block=(128, 128), suffix="weight_scale_inv", scale_dtype=np.float32):
    """(tensors of a checkpoint quantised as DeepSeek's are, what they mean by name in float64)."""
    drawn = random_like(zoo.abstract(zoo.from_config(config)))
    tensors, meant = {}, {}
    for seed, (name, array) in enumerate(tensors_of(drawn).items()):
        if array.ndim == 2 and ".layers." in name and not name.endswith("mlp.gate.weight"):
            tensors[name], scale, meant[name] = quantise_float8(array, block, seed, scale_dtype)
            tensors[name.removesuffix("weight") + suffix] = scale
        else:
            tensors[name] = array if "mlp.gate." in name else array.astype(ml_dtypes.bfloat16)
            meant[name] = tensors[name].astype(np.float64)
    return tensors, meant


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


class TestFloat8:
    @pytest.mark.parametrize("suffix, block, scale_dtype, shards", [
        ("weight_scale_inv", (128, 128), np.float32, 5), ("weight_scale", (128, 128), np.float32, 1),
        ("scale", (32, 64), ml_dtypes.bfloat16, 2), ("weight_scale_inv", (128, 128), ml_dtypes.float8_e8m0fnu, 7),
    ])  # fmt: skip
    def test_blocks_with_scales(self, tmp_path, suffix, block, scale_dtype, shards):
        config = wide(quantization_config=FP8 | {"weight_block_size": list(block)})
        tensors, meant = float8_tensors(config, block, suffix, scale_dtype)
        folder = write_folder(tmp_path, config, tensors, shards)
        found = tensors_of(zoo.load(folder))
        exact = tensors_of(zoo.load(folder, dtype=jnp.float32))
        assert set(found) == set(meant)
        for name, values in meant.items():
            wanted = values.astype(np.float32)
            np.testing.assert_array_equal(exact[name], wanted, err_msg=name)
            kept = "mlp.gate." in name
            assert found[name].dtype == (np.float32 if kept else ml_dtypes.bfloat16)
            np.testing.assert_array_equal(found[name], wanted.astype(found[name].dtype), err_msg=name)

    def test_blocks_are_128_unless_the_config_says_otherwise(self, tmp_path):
        tensors, meant = float8_tensors(wide())
        for i, config in enumerate((wide(), wide(quantization_config={"quant_method": "fp8"}))):
            name = "model.layers.1.self_attn.o_proj.weight"
            model = zoo.load(write_folder(tmp_path / str(i), config, tensors), dtype=jnp.float32)
            np.testing.assert_array_equal(tensors_of(model)[name], meant[name].astype(np.float32))

    def test_the_config_of_the_model_is_not_quantised(self, tmp_path):
        config = wide(quantization_config=FP8)
        model = zoo.load(write_folder(tmp_path, config, float8_tensors(config)[0]))
        assert "quantization_config" not in model.config.extras

    @pytest.mark.parametrize("shape", ["matrix", "row", "scalar"])
    def test_without_blocks(self, tmp_path, shape):
        config = wide(quantization_config=FP8 | {"weight_block_size": None})
        tensors, _ = float8_tensors(config)
        rng = np.random.default_rng(1)
        names = [name for name, array in tensors.items() if array.dtype == ml_dtypes.float8_e4m3fn]
        for name in names:
            form = {"matrix": (1,), "scalar": (), "row": (len(tensors[name]), 1)}[shape]
            scale = np.asarray(rng.uniform(0.1, 1, form), np.float32)
            tensors[f"{name}_scale_inv"] = scale
            tensors[f"{name.removesuffix('weight')}activation_scale"] = np.ones((), np.float32)
        found = tensors_of(zoo.load(write_folder(tmp_path, config, tensors), dtype=jnp.float32))
        for name in names:
            wanted = tensors[name].astype(np.float64) * tensors[f"{name}_scale_inv"].astype(np.float64)
            np.testing.assert_array_equal(found[name], wanted.astype(np.float32))

    def test_fused_experts(self, tmp_path):
        # The halves of 130 rows don't begin where blocks do.
        config = wide()
        tensors, _ = float8_tensors(config)
        prefix = "model.layers.1.mlp.experts."
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]
        meant = {}
        for name, shape in (("gate_up_proj", (4, 260, 200)), ("down_proj", (4, 200, 130))):
            parts = [quantise_float8(np.empty(shape[1:]), seed=i) for i in range(4)]
            tensors[prefix + name] = np.stack([weight for weight, _, _ in parts])
            tensors[f"{prefix}{name}_scale_inv"] = np.stack([scale for _, scale, _ in parts])
            meant[name] = np.stack([values for _, _, values in parts]).astype(np.float32)
        experts = zoo.load(write_folder(tmp_path, config, tensors), dtype=jnp.float32).moe_layers.layer(1).moe.experts
        np.testing.assert_array_equal(experts.gate_weight, meant["gate_up_proj"][:, :130])
        np.testing.assert_array_equal(experts.up_weight, meant["gate_up_proj"][:, 130:])
        np.testing.assert_array_equal(experts.down_weight, meant["down_proj"])

    @pytest.mark.parametrize("change, message", [
        (lambda t, n: t.pop(f"{n}_scale_inv"), r"missing \(1\)(.|\n)*scale_inv, the scales of"),
        (lambda t, n: t.update({f"{n}_scale_inv": t[f"{n}_scale_inv"][:-1]}), r"scale_inv F32\[1, 2\], the scales of .*"
         r"F8_E4M3\[200, 130\]: \[2, 2\], one for each block of 128 x 128, is wanted"),
        (lambda t, n: t.update({f"{n}_scale_inv": np.ones(1, np.float32)}), r"scale_inv F32\[1\].*\[2, 2\]"),
        (lambda t, n: t.update({f"{n}_scale_inv": t[f"{n}_scale_inv"].astype(np.int32)}), r"scale_inv I32\[2, 2\]"),
        (lambda t, n: t[f"{n}_scale_inv"].__setitem__((1, 1), np.nan), "aren't all finite"),
        (lambda t, n: t[f"{n}_scale_inv"].__setitem__((0, 1), -np.inf), "aren't all finite"),
        (lambda t, n: t.update({n.removesuffix("weight") + "scale": t[f"{n}_scale_inv"]}), "has scales twice"),
        (lambda t, n: t.update({n: t[n].astype(np.float32)}), r"unexpected \(1\)(.|\n)*scale_inv"),
    ])  # fmt: skip
    def test_damage(self, tmp_path, change, message):
        config = wide(quantization_config=FP8)
        tensors, _ = float8_tensors(config)
        change(tensors, "model.layers.1.mlp.experts.2.down_proj.weight")
        with pytest.raises(WeightMismatch, match=message):
            zoo.load(write_folder(tmp_path, config, tensors))


def mxfp4(shape, seed):
    """(blocks, scales, values) of MXFP4 numbers in `shape`, decoded one at a time."""
    rng = np.random.default_rng(seed)
    groups = (*shape[:-1], shape[-1] // 32)
    blocks, scales = rng.integers(0, 256, (*groups, 16), np.uint8), rng.integers(118, 130, groups, np.uint8)
    values = np.empty(shape)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table += [-x for x in table]
    for place in np.ndindex(shape):
        *lead, column = place
        byte = int(blocks[(*lead, column // 32, column % 32 // 2)])
        digit = byte >> 4 if column % 2 else byte & 15
        values[place] = table[digit] * 2.0 ** (int(scales[(*lead, column // 32)]) - 127)
    return blocks, scales, values


def gpt_oss_mxfp4():
    """(config, tensors, what gate, up and down of layer 0 are)."""
    config = FAMILIES["gpt_oss"] | {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_local_experts": 3,
        "layer_types": ["sliding_attention", "full_attention"], "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    plain = tensors_of(random_like(zoo.abstract(zoo.from_config(config))))
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in plain.items()}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        for i, (name, shape) in enumerate((("gate_up_proj", (3, 192, 64)), ("down_proj", (3, 64, 96)))):
            del tensors[prefix + name]
            blocks, scales, values = mxfp4(shape, 10 * layer + i)
            tensors[f"{prefix}{name}_blocks"], tensors[f"{prefix}{name}_scales"] = blocks, scales
            if layer == 0:
                meant = values if i == 0 else (meant[:, 0::2], meant[:, 1::2], values)
    return config, tensors, meant


class TestMXFP4:
    def test_gate_and_up_in_turn(self, tmp_path):
        config, tensors, (gate, up, down) = gpt_oss_mxfp4()
        model = zoo.load(write_folder(tmp_path, config, tensors, shards=3))
        experts = model.moe_layers.layer(0).moe.experts
        assert experts.gate_weight.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(experts.gate_weight, np.float64), gate)
        np.testing.assert_array_equal(np.asarray(experts.up_weight, np.float64), up)
        np.testing.assert_array_equal(np.asarray(experts.down_weight, np.float64), down)

    @pytest.mark.parametrize("change, message", [
        (lambda t, n: t.pop(f"{n}_scales"), r"missing \(1\)(.|\n)*gate_up_proj_scales"),
        (lambda t, n: t.pop(f"{n}_blocks"), r"missing \(1\)(.|\n)*gate_up_proj_blocks"),
        (lambda t, n: t.update({f"{n}_blocks": t[f"{n}_blocks"][..., :8]}), r"U8\[3, 192, 2, 16\] is wanted"),
        (lambda t, n: t.update({f"{n}_scales": t[f"{n}_scales"][:, :-1]}), r"U8\[3, 192, 2\] is wanted"),
        (lambda t, n: t.update({f"{n}_scales": t[f"{n}_scales"].astype(np.float32)}), "in MXFP4"),
        (lambda t, n: t.update({n: np.zeros((3, 64, 192), np.float32)}), "is there twice"),
    ])  # fmt: skip
    def test_damage(self, tmp_path, change, message):
        config, tensors, _ = gpt_oss_mxfp4()
        change(tensors, "model.layers.1.mlp.experts.gate_up_proj")
        with pytest.raises(WeightMismatch, match=message):
            zoo.load(write_folder(tmp_path, config, tensors))


def test_names_on_the_hub_are_fetched(tmp_path, monkeypatch):
    model = random_model(LLAMA)
    folder, asked = folder_of(tmp_path, LLAMA, model), []

    def fetch(name, *, revision=None):
        asked.append((name, revision))
        return folder

    monkeypatch.setattr(pretrained, "fetch", fetch)
    assert_same(zoo.load("org/name", revision="abc"), model)
    assert asked == [("org/name", "abc")]


def test_a_snapshot_of_the_hubs_cache(tmp_path):
    # Its files are links to where their contents are kept.
    model = random_model(LLAMA)
    folder = folder_of(tmp_path, LLAMA, model, shards=2)
    cache = tmp_path / "models--org--name"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "abc").mkdir(parents=True)
    for i, path in enumerate(sorted(folder.iterdir())):
        path.rename(cache / "blobs" / str(i))
        (cache / "snapshots" / "abc" / path.name).symlink_to(f"../../blobs/{i}")
    assert_same(zoo.load(cache / "snapshots" / "abc"), model)


def test_another_config(tmp_path):
    model = random_model(LLAMA)
    folder = folder_of(tmp_path, LLAMA, model)
    changed = dataclasses.replace(model.config, rope_theta=7.0)
    assert zoo.load(folder, config=changed).config == changed
    assert zoo.load(folder, config=FAMILIES[LLAMA] | {"rope_theta": 7.0}).config == changed
    with pytest.raises(WeightMismatch, match=r"missing \(12\)(.|\n)*model.layers.3.input_layernorm.weight"):
        zoo.load(folder, config=dataclasses.replace(model.config, num_hidden_layers=4))


def test_what_was_loaded_is_logged(tmp_path, caplog):
    folder = folder_of(tmp_path, LLAMA)
    with caplog.at_level(logging.INFO, "overspill"):
        model = zoo.load(folder)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "overspill.zoo.pretrained"]
    assert str(folder) in line and f"{len(jax.tree.leaves(model))} arrays (float32)" in line


@pytest.mark.parametrize("settings, named", [
    ({"quant_method": "awq", "bits": 4}, "'awq'"), ({"quant_method": "gptq"}, "'gptq'"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, r"'compressed-tensors' \(pack-quantized\)"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"'modelopt' \(NVFP4\)"),
    ({"load_in_4bit": True}, "'bitsandbytes'"), ({"quant_method": "fp8", "weight_block_size": [128]}, r"\[128\]"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"\[0, 128\]"), ({}, "quant_method None"),
])  # fmt: skip
@pytest.mark.parametrize("nested", [True, False])
def test_other_quantisations_are_refused_by_name(tmp_path, settings, named, nested):
    config = FAMILIES[LLAMA] | {"quantization_config": settings}
    if nested:
        config = {"model_type": "some_vision", "text_config": config}
    folder = write_folder(tmp_path, config, tensors_of(random_model(LLAMA)))
    with pytest.raises(ValueError, match=named) as error:
        zoo.load(folder)
    assert "isn't read" in str(error.value) and not isinstance(error.value, WeightMismatch)
