"""What a model is made of: frozen dataclasses with the field names of Hugging Face's config files."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..layers.rotary import Rotary, RotaryScaling
from .rope_config import number, parse_rope_scaling, positive

_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclasses.dataclass(frozen=True)
class Config:
    """What every model has. Configs are hashable and compare by value; `dataclasses.replace` edits them.

    `rope_scaling` may be given as the mapping of a config file and is kept as a `RotaryScaling`.
    `eos_token_id` may be one id, several or none. Whole numbers are taken where files write them for floats.
    `norm_downcast_first` is the order in which norms round (see `RMSNorm`), and `norm_placement` says whether
    they stand before attention and MLP or, as in OLMo-2, behind them.

    `model_type` is what Hugging Face calls the architecture; it decides the names of weights in files.
    `extra` is what a config file says beside, such as `architectures`: it changes nothing here, doesn't
    count in comparisons, and is written back by `save`. Read it as a dictionary from `extras`.
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
    norm_downcast_first: bool = True
    norm_placement: Literal["before", "after"] = "before"
    bos_token_id: int | None = None
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    model_type: str | None = None
    extra: Mapping[str, Any] | tuple[tuple[str, str], ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.num_key_value_heads is None:
            self._set("num_key_value_heads", self.num_attention_heads)
        positive(
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
        if self.norm_placement not in ("before", "after"):
            raise ValueError(f"{name}: norm_placement must be 'before' or 'after', got {self.norm_placement!r}")
        for field in ("initializer_range", "rms_norm_eps", "rope_theta"):
            value = number(f"{name}: {field}", getattr(self, field))
            if value <= 0:
                raise ValueError(f"{name}: {field} must be positive, got {value!r}")
            self._set(field, value)
        if isinstance(self.eos_token_id, Sequence):
            self._set("eos_token_id", tuple(self.eos_token_id))
        self._set("rope_scaling", parse_rope_scaling(self.rope_scaling, self.max_position_embeddings))
        if isinstance(self.extra, Mapping):
            # As text: a frozen dataclass is hashed, and these may hold lists and dictionaries.
            self._set("extra", tuple((key, json.dumps(value)) for key, value in self.extra.items()))

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)

    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer, None where a query sees all keys before it."""
        return (None,) * self.num_hidden_layers

    def rotates(self) -> tuple[bool, ...]:
        """For each layer whether queries and keys are rotated."""
        return (True,) * self.num_hidden_layers

    @property
    def extras(self) -> dict[str, Any]:
        """What the config file said beside the fields above."""
        return {key: json.loads(text) for key, text in self.extra}


@dataclasses.dataclass(frozen=True)
class LlamaConfig(Config):
    """A Llama-type decoder: grouped-query attention and SwiGLU (Touvron et al., 2023; Llama Team, 2024).

    `num_key_value_heads=None` means one for each query head, `head_dim=None` means
    `hidden_size / num_attention_heads`. `mlp_bias` is for all three projections of the MLP,
    `attention_bias` for the projections of attention; the output projection's may be set apart by
    `attention_output_bias`, and is in `output_bias`. The relatives of Llama differ in a few things:

    - `qk_norm`: `"head"` (Qwen3, GLM-4.5) or `"full"` (OLMo-2), see `Attention`.
    - `partial_rotary_factor`: the share of a head's features that are rotated (GLM-4.5: half).
    - `sliding_window`: a query sees its own key and this many less one before it, in the layers that
      `layer_types` calls `"sliding_attention"` and not in those called `"full_attention"`; in all layers
      without `layer_types`.
    - `no_rope_layers`: for each layer 1 where queries and keys are rotated and 0 where they aren't, as
      SmolLM3 writes it.
    - `attention_sinks`: a logit for each head that takes part in the softmax without a value (gpt-oss).

    Raises ValueError, naming the field, for sizes that don't divide and values that no released model has.
    """

    head_dim: int | None = dataclasses.field(default=None, kw_only=True)
    mlp_bias: bool = dataclasses.field(default=False, kw_only=True)
    attention_output_bias: bool | None = dataclasses.field(default=None, kw_only=True)
    qk_norm: Literal["head", "full"] | None = dataclasses.field(default=None, kw_only=True)
    partial_rotary_factor: float | int = dataclasses.field(default=1.0, kw_only=True)
    sliding_window: int | None = dataclasses.field(default=None, kw_only=True)
    layer_types: Sequence[str] | None = dataclasses.field(default=None, kw_only=True)
    no_rope_layers: Sequence[int] | None = dataclasses.field(default=None, kw_only=True)
    attention_sinks: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{name}: num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"{name}: hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                    f"({self.num_attention_heads}), or head_dim must be given"
                )
            self._set("head_dim", self.hidden_size // self.num_attention_heads)
        positive(name, head_dim=self.head_dim)
        if self.attention_output_bias == self.attention_bias:
            # So that `replace` changes both, and configs that mean the same are equal.
            self._set("attention_output_bias", None)
        if self.qk_norm not in (None, "head", "full"):
            raise ValueError(f"{name}: qk_norm must be None, 'head' or 'full', got {self.qk_norm!r}")
        self._check_layers(name)
        self._set("partial_rotary_factor", number(f"{name}: partial_rotary_factor", self.partial_rotary_factor))
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(
                f"{name}: partial_rotary_factor must be above 0 and at most 1, got {self.partial_rotary_factor}"
            )
        rotated = int(self.head_dim * self.partial_rotary_factor)
        if rotated < 2 or rotated % 2:
            raise ValueError(
                f"{name}: the rotated part of head_dim must be even for rotary embeddings, got {rotated} of "
                f"{self.head_dim} features (partial_rotary_factor {self.partial_rotary_factor})"
            )
        self.rotary()

    def _check_layers(self, name: str) -> None:
        if self.sliding_window is not None:
            positive(name, sliding_window=self.sliding_window)
        for field in ("layer_types", "no_rope_layers"):
            value = getattr(self, field)
            if value is None:
                continue
            self._set(field, tuple(value))
            if len(value) != self.num_hidden_layers:
                raise ValueError(
                    f"{name}: {field} must have an entry for each of the {self.num_hidden_layers} layers, "
                    f"got {len(value)}"
                )
        for kind in self.layer_types or ():
            if kind not in _LAYER_TYPES:
                raise ValueError(f"{name}: layer_types knows {' and '.join(map(repr, _LAYER_TYPES))}, got {kind!r}")
        if "sliding_attention" in (self.layer_types or ()) and self.sliding_window is None:
            raise ValueError(f"{name}: layer_types has 'sliding_attention', so sliding_window must be given")
        if wrong := [flag for flag in self.no_rope_layers or () if flag not in (0, 1)]:
            raise ValueError(f"{name}: no_rope_layers is made of 1 (rotated) and 0 (not), got {wrong[0]!r}")
        # One way to say each thing, so that configs that mean the same are equal.
        if len(kinds := set(self.layer_types or ())) == 1:
            self._set("layer_types", None)
            if kinds == {"full_attention"}:
                self._set("sliding_window", None)
        if self.no_rope_layers is not None:
            self._set("no_rope_layers", tuple(map(int, self.no_rope_layers)) if 0 in self.no_rope_layers else None)

    @property
    def output_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.attention_bias if self.attention_output_bias is None else self.attention_output_bias

    def rotary(self) -> Rotary:
        """The rotary embedding that all layers share."""
        dim = int(self.head_dim * self.partial_rotary_factor)
        return Rotary(dim, self.rope_theta, self.max_position_embeddings, self.rope_scaling)

    def windows(self) -> tuple[int | None, ...]:
        if self.layer_types is None:
            return (self.sliding_window,) * self.num_hidden_layers
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)

    def rotates(self) -> tuple[bool, ...]:
        return tuple(map(bool, self.no_rope_layers or (1,) * self.num_hidden_layers))
