"""What weights are called in Hugging Face's files: a table from our paths to their names that reads both ways.

A line of the table says where files hold an array of one layer, in which of several spellings, and how their tensor
lies to ours. A view of their tensor is our array: `load` copies from the view, `save` into it.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from .model import LanguageModel
from .model_types import model_type_of
from .optimizer import arrays_by_path


class Layout(NamedTuple):
    """How a tensor of files lies to our array of one layer.

    `parts` of our arrays share the tensor along the axis after the experts', one after the other or, when
    `interleaved`, in turn; this is number `part`. `transposed` tensors have the two axes of matrices exchanged.
    """

    parts: int = 1
    part: int = 0
    interleaved: bool = False
    transposed: bool = False

    def view(self, tensor: np.ndarray) -> np.ndarray:
        """The view of a tensor of files that is our array: writing to it writes to the tensor."""
        if self.transposed:
            tensor = tensor.swapaxes(-1, -2)
        if self.parts == 1:
            return tensor
        size = tensor.shape[1] // self.parts
        return tensor[:, self._part(slice(0, size), size)]

    def index(self, index: tuple[slice, ...], size: int) -> tuple[slice, ...]:
        """Where the block `index` of our array is in the tensor, before `transposed` exchanges the axes of the block.

        `index` has plain bounds for every axis; `size` is our array's along the axis that parts share.
        """
        if self.parts > 1:
            index = (index[0], self._part(index[1], size), *index[2:])
        return (*index[:-2], index[-1], index[-2]) if self.transposed else index

    def _part(self, rows: slice, size: int) -> slice:
        if self.interleaved:
            return slice(self.parts * rows.start + self.part, self.parts * (rows.stop - 1) + self.part + 1, self.parts)
        return slice(self.part * size + rows.start, self.part * size + rows.stop)

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in files of a tensor that our array of `shape` is a part of."""
        if self.parts > 1:
            shape = (shape[0], shape[1] * self.parts, *shape[2:])
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape


AS_IS = Layout()


class Source(NamedTuple):
    """A spelling of an array: a name below the layer's, with `{expert}` in it where each expert has a tensor.

    `packed` tensors are MXFP4: `NAME_blocks` and `NAME_scales`, and the layout is that of the numbers in them.
    """

    name: str
    layout: Layout = AS_IS
    packed: bool = False


Sources = tuple[Source, ...]


def _linear(table: Mapping[str, str]) -> dict[str, Sources]:
    """Lines for the weights and biases of projections: {our path: name}."""
    lines = [(f"{ours}.{leaf}", f"{name}.{leaf}") for ours, name in table.items() for leaf in ("weight", "bias")]
    return {ours: (Source(name),) for ours, name in lines}


def _scales(table: Mapping[str, str]) -> dict[str, Sources]:
    return {f"{ours}.scale": (Source(f"{name}.weight"),) for ours, name in table.items()}


def _mlp(ours: str, name: str) -> dict[str, Sources]:
    return _linear({f"{ours}.{part}_projection": f"{name}.{part}_proj" for part in ("gate", "up", "down")})


def _experts(name: str, gate: str, up: str, down: str) -> dict[str, Sources]:
    """One tensor for each expert and projection, or all of a layer's in two, as transformers 5 holds them."""
    fused = "mlp.experts.gate_up_proj"
    return {
        "moe.experts.gate_weight": (Source(f"{name}.{{expert}}.{gate}.weight"), Source(fused, Layout(2, 0))),
        "moe.experts.up_weight": (Source(f"{name}.{{expert}}.{up}.weight"), Source(fused, Layout(2, 1))),
        "moe.experts.down_weight": (Source(f"{name}.{{expert}}.{down}.weight"), Source("mlp.experts.down_proj")),
    }


_TOP: dict[str, Sources] = {
    "embedding.weight": (Source("model.embed_tokens.weight"),),
    "norm.scale": (Source("model.norm.weight"),),
    "head.weight": (Source("lm_head.weight"),),
}
_NORMS = _scales({"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"})
_NORMS_AFTER = _scales(
    {"attention_norm": "post_attention_layernorm", "feed_forward_norm": "post_feedforward_layernorm"}
)
_ATTENTION = (
    _linear({f"attention.{part}_projection": f"self_attn.{part[0]}_proj" for part in ("query", "key", "value")})
    | _linear({"attention.output_projection": "self_attn.o_proj"})
    | _scales({"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"})
    | {"attention.sinks": (Source("self_attn.sinks"),)}
)
_LATENT_ATTENTION = (
    _linear(
        {
            "attention.query_down": "self_attn.q_a_proj",
            "attention.query_up": "self_attn.q_b_proj",
            "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
            "attention.kv_up": "self_attn.kv_b_proj",
            "attention.output_projection": "self_attn.o_proj",
            "attention.indexer.query_up": "self_attn.indexer.wq_b",
            "attention.indexer.key_projection": "self_attn.indexer.wk",
            "attention.indexer.head_weights": "self_attn.indexer.weights_proj",
            "attention.indexer.key_norm": "self_attn.indexer.k_norm",
        }
    )
    | _scales({"attention.query_norm": "self_attn.q_a_layernorm", "attention.kv_norm": "self_attn.kv_a_layernorm"})
)
_ROUTER: dict[str, Sources] = {
    "moe.router.weight": (Source("mlp.gate.weight"),),
    "moe.router.bias.value": (Source("mlp.gate.e_score_correction_bias"),),
}
_MOE = (
    _ROUTER
    | _experts("mlp.experts", "gate_proj", "up_proj", "down_proj")
    | _mlp("moe.shared", "mlp.shared_experts")
)
_MIXTRAL_MOE = {
    "moe.router.weight": (Source("block_sparse_moe.gate.weight"), Source("mlp.gate.weight")),
} | _experts("block_sparse_moe.experts", "w1", "w3", "w2")
# Gate and up of gpt-oss lie in turn, and its matrices the other way round than everybody's; but not as MXFP4.
_GPT_OSS_MOE: dict[str, Sources] = {
    "moe.router.weight": (Source("mlp.router.weight"),),
    "moe.router.bias": (Source("mlp.router.bias"),),
    "moe.experts.down_weight": (
        Source("mlp.experts.down_proj", Layout(transposed=True)),
        Source("mlp.experts.down_proj", packed=True),
    ),
    "moe.experts.down_bias": (Source("mlp.experts.down_proj_bias"),),
}
for _part, _ours in enumerate(("gate", "up")):
    _GPT_OSS_MOE[f"moe.experts.{_ours}_weight"] = (
        Source("mlp.experts.gate_up_proj", Layout(2, _part, interleaved=True, transposed=True)),
        Source("mlp.experts.gate_up_proj", Layout(2, _part, interleaved=True), packed=True),
    )
    _GPT_OSS_MOE[f"moe.experts.{_ours}_bias"] = (
        Source("mlp.experts.gate_up_proj_bias", Layout(2, _part, interleaved=True)),
    )
_MTP = _scales(
    {"embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"}
) | _linear({"projection": "eh_proj"})

_LLAMA = _NORMS | _ATTENTION | _mlp("mlp", "mlp")
_DEEPSEEK = _NORMS | _LATENT_ATTENTION | _mlp("mlp", "mlp") | _MOE
# {model_type: {path in a block: its spellings, the one that is written first}}
LAYER_TABLES: dict[str, dict[str, Sources]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "smollm3": _LLAMA,
    "olmo2": _LLAMA | _NORMS_AFTER,
    "mixtral": _LLAMA | _MIXTRAL_MOE,
    "qwen3_moe": _LLAMA | _MOE,
    "glm4_moe": _LLAMA | _MOE,
    "gpt_oss": _LLAMA | _GPT_OSS_MOE,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
}


class Piece(NamedTuple):
    """A tensor of files, or a part of one, and the part of our array that it is.

    `name` is the tensor's, as transformers calls it in a causal language model; `leaf` the path of our array,
    `index` into its leading axes: of layers where it is stacked, then of experts where each has a tensor.
    """

    name: str
    leaf: str
    index: tuple[int, ...]
    layout: Layout
    packed: bool

    @property
    def place(self) -> str:
        """Which part of which array it is, as errors say it."""
        return self.leaf + (f"[{', '.join(map(str, self.index))}]" if self.index else "")


class Leaf(NamedTuple):
    """An array of a model, and how files may spell it; `layers` are its layers where it is stacked."""

    path: str
    array: Any
    sources: Sources
    prefix: str  # of the names, with `{layer}` in it where the leaf is stacked
    layers: range | None

    def pieces(self, source: Source) -> Iterator[Piece]:
        """The leaf's pieces as `source` spells them, in order."""
        axis = 0 if self.layers is None else 1
        experts = range(self.array.shape[axis]) if "{expert}" in source.name else None
        for i, layer in enumerate(self.layers or (None,)):
            prefix, index = (self.prefix, ()) if layer is None else (self.prefix.format(layer=layer), (i,))
            if experts is None:
                yield Piece(prefix + source.name, self.path, index, source.layout, source.packed)
                continue
            for expert in experts:
                name = prefix + source.name.format(expert=expert)
                yield Piece(name, self.path, (*index, expert), source.layout, source.packed)

    def piece_shape(self, piece: Piece) -> tuple[int, ...]:
        """The shape of the part of our array that `piece` is."""
        return tuple(self.array.shape[len(piece.index) :])


def leaves(model: LanguageModel) -> list[Leaf]:
    """Every array of `model`, concrete or abstract, with its spellings in files, in the tree's order.

    Layers are counted through all stacks whatever the segments; MTP modules come after the last layer, as in
    DeepSeek's files. Raises ValueError for an array that the table of the model's type doesn't know.
    """
    config = model.config
    kind = model_type_of(config)
    table = dict(LAYER_TABLES[kind])
    if getattr(config, "q_lora_rank", 0) is None:
        table |= _linear({"attention.query_up": "self_attn.q_proj"})
    segments = {
        f"{name}.segments.{i}.": range(start, start + length)
        for name, stack in model.stacks().items()
        for i, (start, length) in enumerate(zip((stack.start, *stack.boundaries), stack.lengths, strict=True))
    }
    found = []
    for path, array in arrays_by_path(model).items():
        sources, prefix, layers = _TOP.get(path), "", None
        if match := re.match(r"(\w+\.segments\.\d+\.)(.*)", path):
            sources, prefix, layers = table.get(match[2]), "model.layers.{layer}.", segments[match[1]]
        elif match := re.match(r"mtp\.(\d+)\.(block\.)?(.*)", path):
            sources = (table if match[2] else _MTP).get(match[3])
            prefix = f"model.layers.{config.num_hidden_layers + int(match[1])}."
        if sources is None:
            raise ValueError(f"files of model_type {kind!r} have no name for {path!r}")
        found.append(Leaf(path, array, sources, prefix, layers))
    return found


def names(model: LanguageModel) -> dict[str, str]:
    """{name in files: where it lies in `model`}, as `save` writes them: `path[layer in its segment, expert]`.

    A tensor that several arrays share names them all. Abstract models work too.
    """
    table: dict[str, list[str]] = {}
    for leaf in leaves(model):
        for piece in leaf.pieces(leaf.sources[0]):
            table.setdefault(piece.name, []).append(piece.place)
    return {name: " and ".join(places) for name, places in table.items()}
