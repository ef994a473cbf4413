"""What a model is made of: frozen dataclasses with the field names of Hugging Face's config files."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..layers.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rotary,
    RotaryScaling,
    YarnScaling,
)

_SCALINGS: dict[str, type[RotaryScaling]] = {
    "default": RotaryScaling,
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
}
# What may be in a rope_scaling block beside the fields of its scaling.
_BESIDE = {"type", "rope_type", "rope_theta", "original_max_position_embeddings"}

# How tokens are scored -> how experts are picked from the scores.
_ROUTINGS = {"softmax": ("greedy", "group_limited_greedy"), "sigmoid": ("noaux_tc",)}


def parse_rope_scaling(block: Mapping[str, Any] | RotaryScaling | None, max_positions: int) -> RotaryScaling:
    """The scaling that a `rope_scaling` block of a Hugging Face config asks for.

    Both spellings of the kind are read, `rope_type` and `type`. `max_positions` stands in for a missing
    `original_max_position_embeddings`, except for llama3, which needs its own.

    Raises ValueError for a kind that isn't known, a field that is missing and a field that the kind hasn't:
    scaling is never ignored.
    """
    if block is None:
        return RotaryScaling()
    if isinstance(block, RotaryScaling):
        return block
    if not isinstance(block, Mapping):
        raise ValueError(f"rope_scaling is a mapping such as {{'rope_type': 'llama3', ...}}, not {block!r}")
    kinds = {block[name] for name in ("rope_type", "type") if block.get(name) is not None}
    if len(kinds) != 1:
        raise ValueError(f"rope_scaling must name one kind in 'rope_type', got {dict(block)!r}")
    (kind,) = kinds
    if kind not in _SCALINGS:
        raise ValueError(f"rope_scaling kind {kind!r} is not known; there are {', '.join(_SCALINGS)}")
    scaling = _SCALINGS[kind]
    fields = {field.name: field for field in dataclasses.fields(scaling)}
    unknown = set(block) - set(fields) - _BESIDE
    if unknown:
        raise ValueError(f"rope_scaling of kind {kind!r} has no field {', '.join(sorted(map(repr, unknown)))}")
    values = {name: block[name] for name in fields if name in block}
    original = "original_max_position_embeddings"
    if kind in ("yarn", "longrope"):
        if values.get(original) is None:
            values[original] = max_positions
        values.setdefault("factor", None)
    for name in fields:
        if name not in values and fields[name].default is dataclasses.MISSING:
            raise ValueError(f"rope_scaling of kind {kind!r} needs {name!r}, got {dict(block)!r}")
    for name, value in values.items():
        if name.endswith("_factor") and isinstance(value, Sequence) and not isinstance(value, str):
            values[name] = tuple(_number(f"rope_scaling {name}", v) for v in value)
        elif name == "truncate":
            if not isinstance(value, bool):
                raise ValueError(f"rope_scaling truncate must be true or false, got {value!r}")
        elif name == original:
            _positive("rope_scaling", **{name: value})
        elif value is not None:
            values[name] = _number(f"rope_scaling {name}", value)
        elif fields[name].default is not None and not (name == "factor" and kind in ("yarn", "longrope")):
            raise ValueError(f"rope_scaling of kind {kind!r} needs a number for {name!r}, not null")
    return scaling(**values)


def rope_scaling_dict(scaling: RotaryScaling) -> dict[str, Any] | None:
    """`scaling` as the `rope_scaling` block of a config file; None for the default. Undoes `parse_rope_scaling`."""
    kind = next(name for name, cls in _SCALINGS.items() if type(scaling) is cls)
    if kind == "default":
        return None
    values = {name: value for name, value in dataclasses.asdict(scaling).items() if value is not None}
    return {"rope_type": kind} | {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def _positive(owner: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{owner}: {name} must be a positive whole number, got {size!r}")


def _not_negative(owner: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"{owner}: {name} must be a whole number, zero or more, got {size!r}")


@dataclasses.dataclass(frozen=True)
class Config:
    """What every model has. Configs are hashable and compare by value; `dataclasses.replace` edits them.

    `rope_scaling` may be given as the mapping of a config file and is kept as a `RotaryScaling`.
    `eos_token_id` may be one id, several or none. Whole numbers are taken where files write them for floats.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    _: dataclasses.KW_ONLY
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float | int = 0.02
    rms_norm_eps: float | int = 1e-6
    rope_theta: float | int = 10000.0
    rope_scaling: RotaryScaling | Mapping[str, Any] | None = None
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.num_key_value_heads is None:
            self._set("num_key_value_heads", self.num_attention_heads)
        _positive(
            name,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            max_position_embeddings=self.max_position_embeddings,
        )
        if self.hidden_act != "silu":
            raise ValueError(f"{name}: hidden_act must be 'silu' (SwiGLU), got {self.hidden_act!r}")
        for field in ("initializer_range", "rms_norm_eps", "rope_theta"):
            value = _number(f"{name}: {field}", getattr(self, field))
            if value <= 0:
                raise ValueError(f"{name}: {field} must be positive, got {value!r}")
            self._set(field, value)
        if isinstance(self.eos_token_id, Sequence):
            self._set("eos_token_id", tuple(self.eos_token_id))
        self._set("rope_scaling", parse_rope_scaling(self.rope_scaling, self.max_position_embeddings))

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)


@dataclasses.dataclass(frozen=True)
class LlamaConfig(Config):
    """A Llama-type decoder: grouped-query attention and SwiGLU (Touvron et al., 2023; Llama Team, 2024).

    `num_key_value_heads=None` means one for each query head, `head_dim=None` means
    `hidden_size / num_attention_heads`. `attention_bias` is for all four projections of attention,
    `mlp_bias` for all three of the MLP.

    Raises ValueError, naming the field, for sizes that don't divide and values that no released model has.
    """

    head_dim: int | None = dataclasses.field(default=None, kw_only=True)
    mlp_bias: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"LlamaConfig: num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"LlamaConfig: hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                    f"({self.num_attention_heads}), or head_dim must be given"
                )
            self._set("head_dim", self.hidden_size // self.num_attention_heads)
        _positive("LlamaConfig", head_dim=self.head_dim)
        if self.head_dim % 2:
            raise ValueError(f"LlamaConfig: head_dim must be even for rotary embeddings, got {self.head_dim}")
        self.rotary()

    def rotary(self) -> Rotary:
        """The rotary embedding that all layers share."""
        return Rotary(self.head_dim, self.rope_theta, self.max_position_embeddings, self.rope_scaling)


@dataclasses.dataclass(frozen=True)
class DeepSeekConfig(Config):
    """A DeepSeek-type decoder: latent attention and mixture of experts (DeepSeek-AI, 2024: V2, V3).

    The first `first_k_dense_replace` layers have an MLP of `intermediate_size`, the others `n_routed_experts`
    experts of `moe_intermediate_size`, of which each token takes `num_experts_per_tok`, and shared experts
    that all tokens take (one MLP of `n_shared_experts` times that width). `scoring_func="softmax"` with
    `topk_method="greedy"` or `"group_limited_greedy"` is V2, `"sigmoid"` with `"noaux_tc"` is V3.
    `q_lora_rank=None` projects queries without a latent (V2-Lite). `num_nextn_predict_layers` is the number
    of multi-token-prediction modules.

    Raises ValueError, naming the field, for sizes that don't divide and combinations that no released model
    has, `norm_topk_prob` with softmax scores and a scaling factor among them: DeepSeek's own code then drops
    the factor, Hugging Face's drops the normalisation.
    """

    moe_intermediate_size: int = dataclasses.field(kw_only=True)
    kv_lora_rank: int = dataclasses.field(kw_only=True)
    q_lora_rank: int | None = dataclasses.field(kw_only=True)
    qk_nope_head_dim: int = dataclasses.field(kw_only=True)
    qk_rope_head_dim: int = dataclasses.field(kw_only=True)
    v_head_dim: int = dataclasses.field(kw_only=True)
    n_routed_experts: int = dataclasses.field(kw_only=True)
    num_experts_per_tok: int = dataclasses.field(kw_only=True)
    n_shared_experts: int | None = dataclasses.field(default=None, kw_only=True)
    n_group: int = dataclasses.field(default=1, kw_only=True)
    topk_group: int = dataclasses.field(default=1, kw_only=True)
    scoring_func: str = dataclasses.field(kw_only=True)
    topk_method: str = dataclasses.field(kw_only=True)
    norm_topk_prob: bool = dataclasses.field(default=False, kw_only=True)
    routed_scaling_factor: float | int = dataclasses.field(default=1.0, kw_only=True)
    first_k_dense_replace: int = dataclasses.field(default=0, kw_only=True)
    moe_layer_freq: int = dataclasses.field(default=1, kw_only=True)
    num_nextn_predict_layers: int = dataclasses.field(default=0, kw_only=True)
    rope_interleave: bool = dataclasses.field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        name = "DeepSeekConfig"
        _positive(
            name,
            moe_intermediate_size=self.moe_intermediate_size,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            n_routed_experts=self.n_routed_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            n_group=self.n_group,
            topk_group=self.topk_group,
        )
        if self.q_lora_rank is not None:
            _positive(name, q_lora_rank=self.q_lora_rank)
        _not_negative(
            name,
            first_k_dense_replace=self.first_k_dense_replace,
            num_nextn_predict_layers=self.num_nextn_predict_layers,
            n_shared_experts=self.n_shared_experts or 0,
        )
        self._set("routed_scaling_factor", _number(f"{name}: routed_scaling_factor", self.routed_scaling_factor))
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"{name}: num_key_value_heads ({self.num_key_value_heads}) must equal num_attention_heads "
                f"({self.num_attention_heads}): latent attention has no groups of heads"
            )
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"{name}: qk_rope_head_dim must be even for rotary embeddings, got {self.qk_rope_head_dim}"
            )
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise ValueError(
                f"{name}: first_k_dense_replace ({self.first_k_dense_replace}) must not exceed num_hidden_layers "
                f"({self.num_hidden_layers})"
            )
        if self.moe_layer_freq != 1:
            raise ValueError(
                f"{name}: moe_layer_freq must be 1, as in every released model, got {self.moe_layer_freq!r}"
            )
        self._check_routing(name)
        self.rotary()

    def _check_routing(self, name: str) -> None:
        if self.topk_method == "gready":  # how DeepSeek's first V2 files spell it
            self._set("topk_method", "greedy")
        if self.topk_method not in _ROUTINGS.get(self.scoring_func, ()):
            known = "; ".join(f"{score!r} with {' or '.join(map(repr, picks))}" for score, picks in _ROUTINGS.items())
            raise ValueError(
                f"{name}: scoring_func {self.scoring_func!r} with topk_method {self.topk_method!r} is no router that "
                f"is known; there are {known}"
            )
        experts, groups, kept = self.n_routed_experts, self.n_group, self.topk_group
        if self.num_experts_per_tok > experts:
            raise ValueError(
                f"{name}: num_experts_per_tok ({self.num_experts_per_tok}) must not exceed n_routed_experts ({experts})"
            )
        if self.topk_method == "greedy" and (groups, kept) != (1, 1):
            raise ValueError(
                f"{name}: topk_method 'greedy' knows no groups, got n_group {groups} and topk_group {kept}; "
                "use 'group_limited_greedy' or set both to 1"
            )
        if experts % groups:
            raise ValueError(f"{name}: n_routed_experts ({experts}) must be a multiple of n_group ({groups})")
        if kept > groups:
            raise ValueError(f"{name}: topk_group ({kept}) must not exceed n_group ({groups})")
        if self.num_experts_per_tok > kept * (experts // groups):
            raise ValueError(
                f"{name}: num_experts_per_tok ({self.num_experts_per_tok}) must not exceed the "
                f"{kept * (experts // groups)} experts of topk_group ({kept}) groups"
            )
        if self.scoring_func == "sigmoid" and groups > 1 and experts // groups < 2:
            raise ValueError(
                f"{name}: a group is scored by its two best experts, so n_routed_experts ({experts}) must be at least "
                f"twice n_group ({groups})"
            )
        if self.scoring_func == "softmax" and self.norm_topk_prob and self.routed_scaling_factor != 1:
            raise ValueError(
                f"{name}: norm_topk_prob with softmax scores and routed_scaling_factor {self.routed_scaling_factor} "
                "has no agreed meaning; set one of them to False or 1.0"
            )

    def rotary(self) -> Rotary:
        """The rotary embedding that all layers share."""
        return Rotary(
            self.qk_rope_head_dim,
            self.rope_theta,
            self.max_position_embeddings,
            self.rope_scaling,
            interleaved=self.rope_interleave,
        )
