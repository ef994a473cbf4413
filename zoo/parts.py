"""The layers that a config asks for."""

from typing import Any

from jaxtyping import PRNGKeyArray

from ..layers.attention import Attention
from ..layers.block import Block
from ..layers.mla import MLA
from ..layers.mlp import MLP
from ..layers.moe import MoE
from ..layers.norm import RMSNorm
from ..layers.router import SigmoidRouter, SoftmaxRouter
from .config import Config, LlamaConfig
from .moe_config import DeepSeekConfig, MoEConfig


def norm(config: Config, dtype: Any) -> RMSNorm:
    """A norm over the hidden size."""
    return RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype, downcast_first=config.norm_downcast_first)


def attention(config: LlamaConfig | DeepSeekConfig, dtype: Any, key: PRNGKeyArray) -> Attention | MLA:
    """Latent attention for a `DeepSeekConfig`, attention with grouped queries for the others."""
    if isinstance(config, DeepSeekConfig):
        return MLA(
            config.hidden_size,
            num_heads=config.num_attention_heads,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            bias=config.attention_bias,
            index_n_heads=config.index_n_heads,
            index_head_dim=config.index_head_dim,
            index_topk=config.index_topk,
            softmax_scale_factor=config.rotary().softmax_scale_factor,
            std=config.initializer_range,
            dtype=dtype,
            key=key,
        )
    return Attention(
        config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        qkv_bias=config.attention_bias,
        output_bias=config.output_bias,
        qk_norm=config.qk_norm,
        norm_eps=config.rms_norm_eps,
        sinks=config.attention_sinks,
        std=config.initializer_range,
        dtype=dtype,
        key=key,
    )


def router(config: MoEConfig | DeepSeekConfig, key: PRNGKeyArray) -> SoftmaxRouter | SigmoidRouter:
    """The router of `scoring_func` and `topk_method`; float32 whatever the dtype of the rest."""
    options = {
        "num_experts": config.n_routed_experts,
        "top_k": config.num_experts_per_tok,
        "groups": config.n_group,
        "top_groups": config.topk_group,
        "normalize": config.norm_topk_prob,
        "scale": config.routed_scaling_factor,
        "std": config.initializer_range,
        "key": key,
    }
    if config.scoring_func == "sigmoid":
        return SigmoidRouter(config.hidden_size, **options)
    return SoftmaxRouter(
        config.hidden_size, method=config.topk_method, use_bias=config.router_bias, **options
    )


def mlp(config: Config, dtype: Any, key: PRNGKeyArray) -> MLP:
    """The MLP of layers without experts."""
    return MLP(
        config.hidden_size,
        config.intermediate_size,
        bias=getattr(config, "mlp_bias", False),
        std=config.initializer_range,
        dtype=dtype,
        key=key,
    )


def moe(config: MoEConfig | DeepSeekConfig, dtype: Any, key: PRNGKeyArray, router_key: PRNGKeyArray) -> MoE:
    """The router and the experts of layers that have them."""
    return MoE(
        config.hidden_size,
        router=router(config, router_key),
        num_experts=config.n_routed_experts,
        expert_size=config.moe_intermediate_size,
        # The shared experts are stored, and run, as one wide MLP.
        shared_size=config.moe_intermediate_size * config.n_shared_experts if config.n_shared_experts else None,
        expert_bias=config.expert_bias,
        limit=config.swiglu_limit,
        alpha=config.swiglu_alpha,
        std=config.initializer_range,
        dtype=dtype,
        key=key,
    )


def block(config: Config, attention: Attention | MLA, feed_forward: MLP | MoE, dtype: Any) -> Block:
    """A block with norms as `config` has them."""
    return Block(
        attention,
        feed_forward,
        config.hidden_size,
        norm_eps=config.rms_norm_eps,
        norm_placement=config.norm_placement,
        norm_downcast_first=config.norm_downcast_first,
        dtype=dtype,
    )
