"""What the classes of transformers read from config.json beside the common keys, each in its own way.

A reader takes the keys it knows, gets the fields of our config found so far, and returns more of them. Defaults are
those of transformers 5.24, which those of transformers 4 agree with.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from .config import Config
from .hf_keys import Keys, short

Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ModelType:
    """What a `model_type` stands for.

    `architecture` is the class of transformers, `config` ours. `read`, one of the functions below, finds the fields
    that only some classes have, and `write` gives their keys. `flags` are keys that are true or false, and fields by
    the same names, with the class's defaults; `fields` are those of our config that the class settles by itself.
    `hidden_size_divides` where the class wants that by the number of heads, whatever head_dim is.
    `defaults` are of other keys, `expected` lists what keys of other classes may say here, because it is so anyhow.
    """

    architecture: str
    config: type[Config]
    read: Callable[..., Fields]
    write: Callable[[Any], dict[str, Any]]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flags: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    expected: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    hidden_size_divides: bool = False
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    partial_rotary_factor: float = 1.0


Reader = Callable[[ModelType, Keys, Fields], Fields]

_NAMES = {"attention": "full_attention", "deepseek_sparse_attention": "indexed_attention"}  # older spellings


def layer_types(keys: Keys) -> list[str] | None:
    """The types of all layers by their present names, None where the file doesn't list them."""
    kinds = keys.texts("layer_types")
    return None if kinds is None else [_NAMES.get(kind, kind) for kind in kinds]


def _all_layers(kind: ModelType, keys: Keys, does: str) -> None:
    """For classes that don't look at layer_types: these may only say what the class does."""
    if others := set(layer_types(keys) or ()) - {does}:
        raise keys.error(f"layer_types has {min(others)!r}, but all layers of this {kind.architecture} are {does!r}")


def no_window(kind: ModelType, keys: Keys, fields: Fields) -> Fields:
    """All keys are seen, whatever the file says."""
    if keys.values.get("sliding_window") and keys.values.get("use_sliding_window") is not False:
        raise keys.error(
            f"sliding_window is {short(keys.values['sliding_window'])}, and {kind.architecture} has none: write null"
        )
    keys.take("sliding_window", default=None)
    keys.take("use_sliding_window", default=None)
    _all_layers(kind, keys, "full_attention")
    return {"sliding_window": None}


def one_window(kind: ModelType, keys: Keys, fields: Fields) -> Fields:
    """Mistral and Mixtral: a window in all layers or in none."""
    window = keys.integer("sliding_window", default=kind.defaults.get("sliding_window"), null=True)
    if window is not None:
        keys.expect("use_sliding_window", True, because=f"beside sliding_window {window} in {kind.architecture}")
    keys.take("use_sliding_window", default=None)
    _all_layers(kind, keys, "full_attention" if window is None else "sliding_attention")
    return {"sliding_window": window}


def _window_in_use(keys: Keys, default: int | None) -> int | None:
    # A window that isn't in use may have any value.
    if not keys.flag("use_sliding_window", default=False):
        keys.take("sliding_window", default=None)
        return None
    return keys.integer("sliding_window", default=default, null=True)


def upper_windows(kind: ModelType, keys: Keys, fields: Fields) -> Fields:
    """Qwen2 and Qwen3: a window, if a flag says so, in the layers from max_window_layers on or by layer_types."""
    window = _window_in_use(keys, 4096)
    first = keys.integer("max_window_layers", default=28, least=0)
    kinds = layer_types(keys)
    if kinds is None:
        layers = range(fields["num_hidden_layers"])
        kinds = ["sliding_attention" if window and layer >= first else "full_attention" for layer in layers]
    return {"sliding_window": window, "layer_types": kinds}


def flagged_window(kind: ModelType, keys: Keys, fields: Fields) -> Fields:
    """Qwen3-MoE: a window, if a flag says so, in all layers."""
    window = _window_in_use(keys, 4096)
    if window and keys.values.get("max_window_layers"):
        raise keys.error(
            f"max_window_layers is {short(keys.values['max_window_layers'])} and use_sliding_window true: versions of "
            "transformers disagree about which layers have the window then; max_window_layers 0 means all"
        )
    _all_layers(kind, keys, "sliding_attention" if window else "full_attention")
    return {"sliding_window": window}


def listed_windows(kind: ModelType, keys: Keys, fields: Fields) -> Fields:
    """gpt-oss: by layer_types; without these every other layer, the first one too."""
    window = keys.integer("sliding_window", default=128, null=True)
    layers = range(fields["num_hidden_layers"])
    default = ["full_attention" if layer % 2 else "sliding_attention" for layer in layers]
    return {"sliding_window": window, "layer_types": layer_types(keys) or default}


def unrotated_layers(kind: ModelType, keys: Keys, fields: Fields) -> Fields:
    """SmolLM3: some layers without rotary embeddings, and a window in these unless layer_types says otherwise."""
    count = fields["num_hidden_layers"]
    interval = keys.integer("no_rope_layer_interval", default=4)
    rotated = keys.integers("no_rope_layers", default=None)
    if rotated is None:
        rotated = [int((layer + 1) % interval != 0) for layer in range(count)]
    if len(rotated) < count:
        raise keys.error(f"no_rope_layers must have an entry for each of the {count} layers, got {len(rotated)}")
    rotated = rotated[:count]  # the class allows a longer list, and doesn't look at its end
    window = _window_in_use(keys, None)
    default = ["sliding_attention" if window and not flag else "full_attention" for flag in rotated]
    return {"no_rope_layers": rotated, "sliding_window": window, "layer_types": layer_types(keys) or default}


def grouped_query(windows: Reader, *others: Reader) -> Reader:
    """A reader of what decoders with grouped-query attention have, then of windows, then what `others` do."""

    def read(kind: ModelType, keys: Keys, fields: Fields) -> Fields:
        found = {"head_dim": keys.integer("head_dim", default=kind.defaults.get("head_dim"), null=True)}
        if kind.partial_rotary_factor == 1 != fields["partial_rotary_factor"]:
            raise keys.error(
                f"partial_rotary_factor is {fields['partial_rotary_factor']}, but {kind.architecture} rotates heads "
                "as a whole"
            )
        for reader in (windows, *others):
            found |= reader(kind, keys, fields)
        return found

    return read


def _experts(keys: Keys, count: str = "n_routed_experts", moe_intermediate_size: int | None = None) -> Fields:
    """The sizes of a mixture; `count` is what files of the class call the number of experts."""
    names = dict.fromkeys((count, "n_routed_experts", "num_local_experts", "num_experts"))
    return {
        "n_routed_experts": keys.integer(*names),
        "num_experts_per_tok": keys.integer("num_experts_per_tok", "experts_per_token"),
        "moe_intermediate_size": moe_intermediate_size or keys.integer("moe_intermediate_size"),
    }


def mixtral_experts(kind: ModelType, keys: Keys, fields: Fields) -> Fields:
    """Mixtral: experts in all layers, of intermediate_size."""
    return _experts(keys, "num_local_experts", fields["intermediate_size"])


def gpt_oss_experts(kind: ModelType, keys: Keys, fields: Fields) -> Fields:
    """gpt-oss: as Mixtral, and the numbers of the clipped activation."""
    clipped = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
    return _experts(keys, "num_local_experts", fields["intermediate_size"]) | {
        name: keys.number(name, default=value) for name, value in clipped.items()
    }


def qwen_experts(kind: ModelType, keys: Keys, fields: Fields) -> Fields:
    """Qwen3-MoE: experts in all layers but mlp_only_layers, which must be the first ones."""
    step = keys.integer("decoder_sparse_step", default=1)
    if step != 1:
        raise keys.error(f"decoder_sparse_step must be 1 (experts in every layer after the dense ones), got {step}")
    dense = sorted(set(keys.integers("mlp_only_layers", default=None) or ()))
    if dense != list(range(len(dense))):
        raise keys.error(f"mlp_only_layers must be the first layers or none, got {short(dense)}")
    return _experts(keys, "num_experts") | {"first_k_dense_replace": min(len(dense), fields["num_hidden_layers"])}


def glm_experts(kind: ModelType, keys: Keys, fields: Fields) -> Fields:
    """GLM-4.5: DeepSeek-V3's experts, and a norm of queries and keys where a flag says so."""
    qk_norm = "head" if keys.flag("use_qk_norm", default=False) else None
    return _deepseek_experts(kind, keys, fields) | {"qk_norm": qk_norm}


def _deepseek_experts(kind: ModelType, keys: Keys, fields: Fields) -> Fields:
    default = kind.defaults
    found = _experts(keys) | {
        "n_shared_experts": keys.integer("n_shared_experts", default=default["n_shared_experts"], least=0, null=True),
        "n_group": keys.integer("n_group", default=default["n_group"], null=True) or 1,
        "topk_group": keys.integer("topk_group", default=default["topk_group"], null=True) or 1,
        "routed_scaling_factor": keys.number("routed_scaling_factor", default=default["routed_scaling_factor"]),
        "num_nextn_predict_layers": keys.integer(
            "num_nextn_predict_layers", "num_mtp_layers", default=default["num_nextn_predict_layers"], least=0
        ),
    }
    count = fields["num_hidden_layers"]
    # May be more than there are layers: then none has experts.
    dense = min(keys.integer("first_k_dense_replace", default=default["first_k_dense_replace"], least=0), count)
    kinds = keys.texts("mlp_layer_types")
    if kinds is not None:
        first = kinds.index("sparse") if "sparse" in kinds else len(kinds)
        if kinds != ["dense"] * first + ["sparse"] * (count - first):
            raise keys.error(f"mlp_layer_types must be 'dense' for the first layers, then 'sparse', {count} in all")
        if "first_k_dense_replace" in keys.values and dense != first:
            raise keys.error(f"mlp_layer_types begins with {first} dense layers, but first_k_dense_replace is {dense}")
        dense = first
    return found | {"first_k_dense_replace": dense}


def latent(*others: Reader) -> Reader:
    """A reader of what decoders with latent attention have, of DeepSeek's experts, then of what `others` know."""

    def read(kind: ModelType, keys: Keys, fields: Fields) -> Fields:
        if fields.pop("partial_rotary_factor") != 1:
            raise keys.error(f"partial_rotary_factor must be 1 in {kind.architecture}, whose heads have a part for it")
        found = {
            "kv_lora_rank": keys.integer("kv_lora_rank", default=512),
            "q_lora_rank": keys.integer("q_lora_rank", default=1536, null=True),
            "qk_nope_head_dim": keys.integer("qk_nope_head_dim", default=128),
            "qk_rope_head_dim": keys.integer("qk_rope_head_dim", default=64),
            "v_head_dim": keys.integer("v_head_dim", default=128),
        }
        # Transformers 5 writes qk_rope_head_dim here: what its rotary embedding reads, not the width of a head.
        keys.take("head_dim", default=None)
        width = found["qk_nope_head_dim"] + found["qk_rope_head_dim"]
        if keys.integer("qk_head_dim", default=width) != width:
            raise keys.error(f"qk_head_dim is {keys.values['qk_head_dim']}, but qk_nope_head_dim and "
                             f"qk_rope_head_dim are {width} together")  # fmt: skip
        if keys.take("moe_layer_freq", default=1) != 1:
            raise keys.error(f"moe_layer_freq must be 1, as in every released model, got "
                             f"{short(keys.values['moe_layer_freq'])}")  # fmt: skip
        found |= _deepseek_experts(kind, keys, fields)
        for reader in others:
            found |= reader(kind, keys, found)
        return found

    return read


def dense_attention(kind: ModelType, keys: Keys, fields: Fields) -> Fields:
    """DeepSeek-V3: a query sees all keys."""
    _all_layers(kind, keys, "full_attention")
    return {}


def sparse_attention(kind: ModelType, keys: Keys, fields: Fields) -> Fields:
    """DeepSeek-V3.2: a query sees the keys that an indexer picks."""
    _all_layers(kind, keys, "indexed_attention")
    defaults = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    return {name: keys.integer(name, default=default) for name, default in defaults.items()}


def softmax_router(kind: ModelType, keys: Keys, fields: Fields) -> Fields:
    """DeepSeek-V2: one of two ways to pick experts. The plain one doesn't look at the groups."""
    method = keys.take("topk_method", default="greedy")
    if method not in ("greedy", "gready", "group_limited_greedy"):
        raise keys.error(
            f"topk_method must be 'greedy' or 'group_limited_greedy' in {kind.architecture}, got {short(method)}"
        )
    groups = {} if method == "group_limited_greedy" else {"n_group": 1, "topk_group": 1}
    return {"topk_method": method} | groups
