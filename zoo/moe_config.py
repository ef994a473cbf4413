"""Configs of models with a mixture of experts: those of DeepSeek, and those with grouped-query attention."""

import dataclasses

from ..layers.rotary import Rotary
from .config import Config, LlamaConfig
from .rope_config import not_negative, number, positive

# How tokens are scored -> how experts are picked from the scores.
_ROUTINGS = {"softmax": ("greedy", "group_limited_greedy"), "sigmoid": ("noaux_tc",)}


@dataclasses.dataclass(frozen=True)
class _Experts:
    """The fields of a mixture of experts, for the two configs below."""

    _: dataclasses.KW_ONLY
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int | None = None
    n_group: int = 1
    topk_group: int = 1
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool = False
    routed_scaling_factor: float | int = 1.0
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    num_nextn_predict_layers: int = 0
    router_bias: bool = False
    expert_bias: bool = False
    swiglu_limit: float | int | None = None
    swiglu_alpha: float | int = 1.702

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        positive(
            name,
            moe_intermediate_size=self.moe_intermediate_size,
            n_routed_experts=self.n_routed_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            n_group=self.n_group,
            topk_group=self.topk_group,
        )
        not_negative(
            name,
            first_k_dense_replace=self.first_k_dense_replace,
            num_nextn_predict_layers=self.num_nextn_predict_layers,
            n_shared_experts=self.n_shared_experts or 0,
        )
        self._set("n_shared_experts", self.n_shared_experts or None)
        self._set("routed_scaling_factor", number(f"{name}: routed_scaling_factor", self.routed_scaling_factor))
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise ValueError(
                f"{name}: first_k_dense_replace ({self.first_k_dense_replace}) must not exceed num_hidden_layers "
                f"({self.num_hidden_layers})"
            )
        if self.moe_layer_freq != 1:
            raise ValueError(
                f"{name}: moe_layer_freq must be 1, as in every released model, got {self.moe_layer_freq!r}"
            )
        self._set("swiglu_alpha", number(f"{name}: swiglu_alpha", self.swiglu_alpha))
        if self.swiglu_limit is not None:
            self._set("swiglu_limit", number(f"{name}: swiglu_limit", self.swiglu_limit))
            if self.swiglu_limit <= 0:
                raise ValueError(f"{name}: swiglu_limit must be positive or None, got {self.swiglu_limit}")
        self._check_routing(name)
        if self.router_bias and self.scoring_func != "softmax":
            raise ValueError(f"{name}: router_bias is for scoring_func 'softmax', got {self.scoring_func!r}")

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


@dataclasses.dataclass(frozen=True)
class MoEConfig(_Experts, LlamaConfig):
    """Grouped-query attention with a mixture of experts: Mixtral, Qwen3-MoE, GLM-4.5, gpt-oss.

    The fields of attention are those of `LlamaConfig`, those of the experts mean what they do in
    `DeepSeekConfig`. Beside these, all for gpt-oss: `router_bias` (a trained one, on the logits),
    `expert_bias` (on all projections of the experts), and `swiglu_limit` and `swiglu_alpha` (of its clipped
    activation, see `Experts`).

    Raises ValueError, naming the field, for sizes that don't divide and combinations that no released model has.
    """


@dataclasses.dataclass(frozen=True)
class DeepSeekConfig(_Experts, Config):
    """A DeepSeek-type decoder: latent attention and mixture of experts (DeepSeek-AI, 2024: V2, V3).

    The first `first_k_dense_replace` layers have an MLP of `intermediate_size`, the others `n_routed_experts`
    experts of `moe_intermediate_size`, of which each token takes `num_experts_per_tok`, and shared experts
    that all tokens take (one MLP of `n_shared_experts` times that width). `scoring_func="softmax"` with
    `topk_method="greedy"` or `"group_limited_greedy"` is V2, `"sigmoid"` with `"noaux_tc"` is V3.
    `q_lora_rank=None` projects queries without a latent (V2-Lite). `num_nextn_predict_layers` is the number
    of multi-token-prediction modules. `index_n_heads`, `index_head_dim` and `index_topk`, given together, are
    the sparse attention of V3.2 (see `Indexer`).

    Raises ValueError, naming the field, for sizes that don't divide and combinations that no released model
    has, `norm_topk_prob` with softmax scores and a scaling factor among them: DeepSeek's own code then drops
    the factor, Hugging Face's drops the normalisation.
    """

    kv_lora_rank: int = dataclasses.field(kw_only=True)
    q_lora_rank: int | None = dataclasses.field(kw_only=True)
    qk_nope_head_dim: int = dataclasses.field(kw_only=True)
    qk_rope_head_dim: int = dataclasses.field(kw_only=True)
    v_head_dim: int = dataclasses.field(kw_only=True)
    rope_interleave: bool = dataclasses.field(default=True, kw_only=True)
    index_n_heads: int | None = dataclasses.field(default=None, kw_only=True)
    index_head_dim: int | None = dataclasses.field(default=None, kw_only=True)
    index_topk: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        positive(
            name,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
        )
        if self.q_lora_rank is not None:
            positive(name, q_lora_rank=self.q_lora_rank)
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"{name}: num_key_value_heads ({self.num_key_value_heads}) must equal num_attention_heads "
                f"({self.num_attention_heads}): latent attention has no groups of heads"
            )
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"{name}: qk_rope_head_dim must be even for rotary embeddings, got {self.qk_rope_head_dim}"
            )
        self._check_index(name)
        self.rotary()

    def _check_index(self, name: str) -> None:
        sizes = {field: getattr(self, field) for field in ("index_n_heads", "index_head_dim", "index_topk")}
        if all(size is None for size in sizes.values()):
            return
        positive(name, **sizes)
        if self.q_lora_rank is None:
            raise ValueError(f"{name}: index_topk needs q_lora_rank: the indexer reads the latent of the queries")
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"{name}: index_head_dim ({self.index_head_dim}) must not be smaller than qk_rope_head_dim "
                f"({self.qk_rope_head_dim}), the part of it that is rotated"
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
