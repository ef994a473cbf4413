"""Models over a mesh: built, loaded and saved part by part, the same bit for bit as on one device."""

import collections
import pathlib
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from overspill import zoo
from overspill.zoo.weight_reading import Reader

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "zoo"))
from weight_files import FAMILIES, quantise_float8, random_like, tensors_of, write_folder

SIZES = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
}  # fmt: skip
DENSE = zoo.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True, attention_bias=True)
MIXTURE = zoo.DeepSeekConfig(
    **SIZES, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=12, n_shared_experts=1, first_k_dense_replace=1,
    num_nextn_predict_layers=1, scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True,
)  # fmt: skip
MESH = "expert=2,fsdp=2,tensor=2"


def assert_equal(actual, expected):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def assert_placed(model, like):
    assert jax.tree.structure(model) == jax.tree.structure(like)
    for array, leaf in zip(jax.tree.leaves(model), jax.tree.leaves(like), strict=True):
        assert array.committed and array.sharding == leaf.sharding
        assert all(s.data.shape == leaf.sharding.shard_shape(leaf.shape) for s in array.addressable_shards)


class TestBuild:
    @pytest.mark.parametrize("config, kind, options", [
        (DENSE, AxisType.Auto, {}), (DENSE, AxisType.Explicit, {"segments": (1,), "dtype": jnp.bfloat16}),
        (MIXTURE, AxisType.Explicit, {}), (MIXTURE, AxisType.Auto, {"scan": False, "dtype": jnp.bfloat16}),
    ])  # fmt: skip
    def test_the_weights_of_one_device(self, make_mesh, config, kind, options):
        mesh, key = make_mesh(MESH, kind), jax.random.key(7)
        model = zoo.build(config, key=key, mesh=mesh, **options)
        assert_placed(model, zoo.abstract(config, mesh=mesh, **options))
        assert_equal(model, zoo.build(config, key=key, **options))

    def test_a_compiled_draw_is_the_same(self):
        def arrays(key):
            return jax.tree.leaves(zoo.build(DENSE, key=key))

        key = jax.random.key(3)
        assert_equal(jax.jit(arrays)(key), arrays(key))

    def test_large_arrays_are_drawn_by_programs_of_their_own(self, make_mesh, monkeypatch):
        monkeypatch.setattr("overspill.zoo.building._FEW", 500)
        with jax.set_mesh(make_mesh(MESH, AxisType.Explicit)):
            model = zoo.build(DENSE, mesh=make_mesh("fsdp=8"), placements="offload_all")
        assert_equal(model, zoo.build(DENSE, placements="offload_all"))

    def test_rules(self, make_mesh):
        mesh = make_mesh("a=2,b=4")
        model = zoo.abstract(DENSE, mesh=mesh, rules={"mlp": "b", "layers": "a"})
        assert model.layers.segments[0].mlp.gate_projection.weight.sharding.spec == PartitionSpec("a", "b", None)
        assert_placed(zoo.build(DENSE, mesh=mesh, rules={"mlp": "b", "layers": "a"}), model)

    @pytest.mark.parametrize("make", [zoo.build, zoo.abstract])
    def test_errors(self, make, make_mesh):
        with pytest.raises(ValueError, match="'layers.segments.0.attention.key_projection.*2 kv_heads.*'tensor'"):
            make(DENSE, mesh=make_mesh("tensor=4"))
        with pytest.raises(ValueError, match="rules say .* need mesh="):
            make(DENSE, rules={"mlp": "tensor"})
        with pytest.raises(ValueError, match="'a' is no preset"):
            make(DENSE, mesh=make_mesh("a=2"))


@pytest.fixture
def asked(monkeypatch):
    """Shapes that are asked of `Reader.read`, by path."""
    found, read = collections.defaultdict(list), Reader.read

    def count(self, path, shape, dtype, index=None):
        out = read(self, path, shape, dtype, index)
        found[path].append(out.shape)
        return out

    monkeypatch.setattr(Reader, "read", count)
    return found


def check_load(folder, mesh, rules, asked, **options):
    """Loaded over the mesh as on one device, each element read once and nothing larger than a part."""
    plain = zoo.load(folder, **options)
    asked.clear()
    model = zoo.load(folder, mesh=mesh, rules=rules, **options)
    like = zoo.shard(plain, mesh, rules)
    assert_placed(model, like)
    assert_equal(model, plain)
    plan = zoo.shards(plain, mesh, rules)
    for row in plan.rows:
        assert set(asked[row.path]) == {row.shard}, row.path
        assert len(asked[row.path]) * np.prod(row.shard) == np.prod(row.shape), row.path
    return model


class TestLoad:
    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    @pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["tied", "experts and prediction"])
    def test_each_part_is_read_once(self, tmp_path, make_mesh, config, kind, asked):
        folder = zoo.save(random_like(zoo.abstract(config)), tmp_path / "model")
        model = check_load(folder, make_mesh(MESH, kind), None, asked, dtype=jnp.bfloat16, segments=(2,))
        assert max(map(len, asked.values())) > 1
        assert model.embedding.weight.dtype == jnp.bfloat16

    def test_layers_may_be_cut(self, tmp_path, make_mesh, asked):
        folder = zoo.save(random_like(zoo.abstract(DENSE)), tmp_path / "model")
        check_load(folder, make_mesh("a=2,b=4"), {"layers": "a", "heads": "b", "embed": ("b", "a")}, asked)

    @pytest.mark.parametrize("fused", [False, True])
    def test_float8_with_blocks_that_lie_across_the_cuts(self, tmp_path, make_mesh, fused, asked):
        config = FAMILIES["deepseek_v3"] | {
            "hidden_size": 40, "num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
            "num_experts_per_tok": 2, "moe_intermediate_size": 26, "kv_lora_rank": 28, "intermediate_size": 52,
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 8]},
        }  # fmt: skip
        tensors = tensors_of(random_like(zoo.abstract(zoo.from_config(config))))
        prefix = "model.layers.1.mlp.experts."
        if fused:
            for name in [name for name in tensors if name.startswith(prefix)]:
                del tensors[name]
            for name, shape in (("gate_up_proj", (52, 40)), ("down_proj", (40, 26))):
                parts = [quantise_float8(np.empty(shape), (16, 8), seed) for seed in range(4)]
                tensors[prefix + name] = np.stack([weight for weight, _, _ in parts])
                tensors[f"{prefix}{name}_scale_inv"] = np.stack([scale for _, scale, _ in parts])
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name], scale, _ = quantise_float8(tensors[name], (16, 8))
            tensors[f"{name}_scale_inv"] = scale
        folder = write_folder(tmp_path, config, tensors)
        check_load(folder, make_mesh("a=4,b=2"), {"embed": "a", "mlp": "b"}, asked)

    def test_mxfp4_with_blocks_that_lie_across_the_cuts(self, tmp_path, make_mesh, asked):
        config = FAMILIES["gpt_oss"] | {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_local_experts": 4,
            "layer_types": ["sliding_attention", "full_attention"], "quantization_config": {"quant_method": "mxfp4"},
        }  # fmt: skip
        plain, rng = tensors_of(random_like(zoo.abstract(zoo.from_config(config)))), np.random.default_rng(0)
        tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in plain.items()}
        for layer in range(2):
            for name, groups in (("gate_up_proj", (4, 192, 2)), ("down_proj", (4, 64, 3))):
                place = f"model.layers.{layer}.mlp.experts.{name}"
                del tensors[place]
                tensors[f"{place}_blocks"] = rng.integers(0, 256, (*groups, 16), np.uint8)
                tensors[f"{place}_scales"] = rng.integers(118, 130, groups, np.uint8)
        folder = write_folder(tmp_path, config, tensors)
        check_load(folder, make_mesh("a=4,b=2"), {"embed": "a", "mlp": "b"}, asked)

    def test_what_devices_share_is_nobody_elses_to_change(self, tmp_path, make_mesh):
        folder = zoo.save(random_like(zoo.abstract(DENSE)), tmp_path / "model")
        model = zoo.load(folder, mesh=make_mesh("data=8"))
        before = np.array(model.embedding.weight)
        kept = [shard.data for shard in model.embedding.weight.addressable_shards[1:]]
        jax.jit(lambda x: x.at[:].add(1), donate_argnums=0)(model.embedding.weight.addressable_shards[0].data)
        assert all((np.asarray(data) == before).all() for data in kept)

    def test_errors_come_before_any_weight_is_read(self, tmp_path, make_mesh, asked):
        folder = zoo.save(random_like(zoo.abstract(DENSE)), tmp_path / "model")
        with pytest.raises(ValueError, match="'layers.segments.0.attention.key_projection.weight'.*2 kv_heads"):
            zoo.load(folder, mesh=make_mesh("tensor=4"))
        with pytest.raises(ValueError, match="rules say .* need mesh="):
            zoo.load(folder, rules={"mlp": "tensor"})
        assert not asked


@pytest.mark.parametrize("config, kind", [(DENSE, AxisType.Auto), (MIXTURE, AxisType.Explicit)])
def test_files_are_those_of_one_device(tmp_path, make_mesh, config, kind):
    model = random_like(zoo.abstract(config, segments=(2,), dtype=jnp.bfloat16))
    # Layers: 4, or 1 and 3.
    rules = {"layers": "a", "mlp": "b", "embed": ("a", "b")} if config is DENSE else {"experts": "b", "embed": "a"}
    over = zoo.shard(zoo.resegment(model, ()), make_mesh("a=2,b=4", kind), rules)
    folders = [zoo.save(m, tmp_path / str(i), max_shard_bytes=9000) for i, m in enumerate((model, over))]
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
    assert files[0] == files[1] and len(files[0]) > 3


@pytest.mark.parametrize("config, kind", [(DENSE, AxisType.Explicit), (MIXTURE, AxisType.Auto)])
def test_generated_tokens_are_those_of_one_device(make_mesh, config, kind):
    model = random_like(zoo.abstract(config))
    tokens = np.random.default_rng(0).integers(0, 48, (3, 5))
    mesh = make_mesh(MESH, kind)
    over = zoo.shard(model, mesh)
    options = {"max_new_tokens": 4, "temperature": 0.5, "key": jax.random.key(0)}
    wanted = np.asarray(zoo.generate(model, tokens, **options))
    np.testing.assert_array_equal(zoo.generate(over, tokens, **options), wanted)
    if config is MIXTURE:
        return
    with jax.set_mesh(mesh):
        streamed = list(zoo.stream(over, tokens, **options))
    np.testing.assert_array_equal(np.stack(streamed, 1), wanted)
