"""Folders of weights made by hand, for the tests of loading and saving: nothing here uses the code under test."""

import json
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from overspill import zoo

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "reference"))
from families import FAMILIES  # noqa: F401, E402

TAGS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "uint8": "U8", "int32": "I32",
}  # fmt: skip


def write_raw(path, tensors, header=None):
    """A safetensors file of {name: (tag, shape, bytes)}; `header` may change the header's entries first."""
    entries, position = {}, 0
    for name, (tag, shape, data) in tensors.items():
        entries[name] = {"dtype": tag, "shape": list(shape), "data_offsets": [position, position + len(data)]}
        position += len(data)
    if header is not None:
        header(entries)
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def raw(array):
    return TAGS[array.dtype.name], array.shape, np.ascontiguousarray(array).tobytes()


def write_folder(folder, config, tensors, shards=1):
    """A model's folder: `config`, and NumPy arrays dealt out to `shards` files in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_raw(folder / "model.safetensors", {name: raw(array) for name, array in tensors.items()})
        return folder
    where = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        mine = {name: raw(tensors[name]) for name in list(tensors)[i::shards]}
        write_raw(folder / file, mine)
        where |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def read_folder(folder):
    """{name: array} of all safetensors files in a folder, read by hand."""
    kinds = {tag: np.dtype(getattr(ml_dtypes, name, name)) for name, tag in TAGS.items()}
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                start, end = (8 + size + offset for offset in entry["data_offsets"])
                assert name not in found, f"{name} is written twice"
                found[name] = np.frombuffer(data[start:end], kinds[entry["dtype"]]).reshape(entry["shape"])
    return found


def random_like(model, seed=0):
    """The abstract `model` with random numbers everywhere."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), model)


def random_model(family, *, dtype=jnp.float32, seed=0, **options):
    return random_like(zoo.abstract(zoo.from_config(FAMILIES[family]), dtype=dtype, **options), seed)


def _attention(block, prefix, out):
    attention = block.attention
    if hasattr(attention, "kv_down"):
        pairs = {"kv_a_proj_with_mqa": attention.kv_down, "kv_b_proj": attention.kv_up}
        norms = {"kv_a_layernorm": attention.kv_norm}
        if attention.query_down is None:
            pairs["q_proj"] = attention.query_up
        else:
            pairs |= {"q_a_proj": attention.query_down, "q_b_proj": attention.query_up}
            norms["q_a_layernorm"] = attention.query_norm
        if getattr(attention, "indexer", None) is not None:
            indexer = attention.indexer
            pairs |= {"indexer.wq_b": indexer.query_up, "indexer.wk": indexer.key_projection}
            pairs |= {"indexer.weights_proj": indexer.head_weights, "indexer.k_norm": indexer.key_norm}
    else:
        pairs = {"q_proj": attention.query_projection, "k_proj": attention.key_projection}
        pairs["v_proj"] = attention.value_projection
        norms = {"q_norm": attention.query_norm, "k_norm": attention.key_norm}
        if getattr(attention, "sinks", None) is not None:
            out[f"{prefix}self_attn.sinks"] = attention.sinks
    pairs["o_proj"] = attention.output_projection
    _linear(pairs, f"{prefix}self_attn.", out)
    for name, norm in norms.items():
        if norm is not None:
            out[f"{prefix}self_attn.{name}.weight"] = norm.scale


def _linear(pairs, prefix, out):
    for name, layer in pairs.items():
        out[f"{prefix}{name}.weight"] = layer.weight
        if layer.bias is not None:
            out[f"{prefix}{name}.bias"] = layer.bias


def _mlp(mlp, prefix, out):
    pairs = {"gate_proj": mlp.gate_projection, "up_proj": mlp.up_projection, "down_proj": mlp.down_projection}
    _linear(pairs, prefix, out)


def _moe(moe, kind, prefix, out):
    experts, router = moe.experts, moe.router
    if kind == "gpt_oss":
        out[f"{prefix}mlp.router.weight"], out[f"{prefix}mlp.router.bias"] = router.weight, router.bias
        gate, up = experts.gate_weight, experts.up_weight
        both = np.empty((len(gate), gate.shape[2], 2 * gate.shape[1]), gate.dtype)
        biases = np.empty((len(gate), 2 * gate.shape[1]), gate.dtype)
        for i in range(gate.shape[1]):
            both[:, :, 2 * i], both[:, :, 2 * i + 1] = gate[:, i], up[:, i]
            biases[:, 2 * i], biases[:, 2 * i + 1] = experts.gate_bias[:, i], experts.up_bias[:, i]
        out[f"{prefix}mlp.experts.gate_up_proj"], out[f"{prefix}mlp.experts.gate_up_proj_bias"] = both, biases
        out[f"{prefix}mlp.experts.down_proj"] = experts.down_weight.transpose(0, 2, 1)
        out[f"{prefix}mlp.experts.down_proj_bias"] = experts.down_bias
        return
    module, names = ("block_sparse_moe", ("w1", "w3", "w2")) if kind == "mixtral" else ("mlp", None)
    out[f"{prefix}{module}.gate.weight"] = router.weight
    if getattr(router, "bias", None) is not None:
        out[f"{prefix}{module}.gate.e_score_correction_bias"] = router.bias.value
    for e in range(len(experts.gate_weight)):
        weights = (experts.gate_weight[e], experts.up_weight[e], experts.down_weight[e])
        for name, weight in zip(names or ("gate_proj", "up_proj", "down_proj"), weights, strict=True):
            out[f"{prefix}{module}.experts.{e}.{name}.weight"] = weight
    if moe.shared is not None:
        _mlp(moe.shared, f"{prefix}mlp.shared_experts.", out)


def _block(block, kind, prefix, out):
    after = kind == "olmo2"
    first, second = ("post_attention", "post_feedforward") if after else ("input", "post_attention")
    out[f"{prefix}{first}_layernorm.weight"] = block.attention_norm.scale
    out[f"{prefix}{second}_layernorm.weight"] = block.feed_forward_norm.scale
    _attention(block, prefix, out)
    if getattr(block, "moe", None) is not None:
        _moe(block.moe, kind, prefix, out)
    else:
        _mlp(block.mlp, f"{prefix}mlp.", out)


def tensors_of(model):
    """{Hugging Face's name: array} of a model, with names and layouts as they were read in transformers' sources."""
    kind = model.config.model_type
    model = jax.tree.map(np.asarray, model)
    out = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.norm.scale}
    if model.head is not None:
        out["lm_head.weight"] = model.head.weight
    for stack in model.stacks().values():
        for i, block in enumerate(stack):
            _block(block, kind, f"model.layers.{stack.start + i}.", out)
    for k, module in enumerate(getattr(model, "mtp", ())):
        prefix = f"model.layers.{model.config.num_hidden_layers + k}."
        out[f"{prefix}enorm.weight"] = module.embedding_norm.scale
        out[f"{prefix}hnorm.weight"] = module.hidden_norm.scale
        out[f"{prefix}eh_proj.weight"] = module.projection.weight
        out[f"{prefix}shared_head.norm.weight"] = module.norm.scale
        _block(module.block, kind, prefix, out)
    return out


def assert_same(actual, expected):
    """Two models with the same arrays, bit for bit, whatever their segments."""
    ours, theirs = (zoo.resegment(jax.tree.map(np.asarray, model), ()) for model in (actual, expected))
    pairs = zip(*(jax.tree_util.tree_leaves_with_path(model) for model in (ours, theirs)), strict=True)
    for (path, a), (other, b) in pairs:
        assert path == other
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def quantise_float8(array, block=(128, 128), seed=0, scale_dtype=np.float32):
    """(float8 weight, scales, what they mean in float64) in the shape of `array`, from random bytes."""
    rng = np.random.default_rng(seed)
    weight = rng.integers(0, 0x7F, array.shape, np.uint8) | (rng.integers(0, 2, array.shape, np.uint8) << 7)
    weight = weight.view(ml_dtypes.float8_e4m3fn)
    grid = tuple(math.ceil(n / b) for n, b in zip(array.shape, block, strict=True))
    if scale_dtype == ml_dtypes.float8_e8m0fnu:
        scale = rng.integers(110, 125, grid, np.uint8).view(scale_dtype)
    else:
        scale = np.exp(rng.normal(size=grid) - 5).astype(scale_dtype)
    rows, columns = (np.arange(n) // b for n, b in zip(array.shape, block, strict=True))
    values = weight.astype(np.float64) * scale.astype(np.float64)[rows[:, None], columns]
    return weight, scale, values
