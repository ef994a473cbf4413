"""Annotated layers: PyTrees that compute, and that say where each of their activations waits."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import Attention as Attention, dot_product_attention as dot_product_attention
    from .block import Block as Block
    from .embedding import Embedding as Embedding, check_tokens as check_tokens
    from .grouped import grouped_matmul as grouped_matmul
    from .linear import Buffer as Buffer, Linear as Linear
    from .loss import cross_entropy as cross_entropy
    from .mask import attention_mask as attention_mask
    from .mla import MLA as MLA
    from .mlp import MLP as MLP
    from .moe import MoE as MoE, in_rounds as in_rounds
    from .norm import RMSNorm as RMSNorm
    from .rotary import (
        DynamicScaling as DynamicScaling,
        LinearScaling as LinearScaling,
        Llama3Scaling as Llama3Scaling,
        LongRopeScaling as LongRopeScaling,
        Rotary as Rotary,
        RotaryScaling as RotaryScaling,
        YarnScaling as YarnScaling,
    )
    from .router import SigmoidRouter as SigmoidRouter, SoftmaxRouter as SoftmaxRouter
    from .stack import Stack as Stack

# Loaded on first use: a script that wants one layer doesn't pay for the others.
_ROOMS = {
    "Attention": "attention",
    "Block": "block",
    "Buffer": "linear",
    "DynamicScaling": "rotary",
    "Embedding": "embedding",
    "Linear": "linear",
    "LinearScaling": "rotary",
    "Llama3Scaling": "rotary",
    "LongRopeScaling": "rotary",
    "MLA": "mla",
    "MLP": "mlp",
    "MoE": "moe",
    "RMSNorm": "norm",
    "Rotary": "rotary",
    "RotaryScaling": "rotary",
    "SigmoidRouter": "router",
    "SoftmaxRouter": "router",
    "Stack": "stack",
    "YarnScaling": "rotary",
    "attention_mask": "mask",
    "check_tokens": "embedding",
    "cross_entropy": "loss",
    "dot_product_attention": "attention",
    "grouped_matmul": "grouped",
    "in_rounds": "moe",
}

__all__ = list(_ROOMS)


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_ROOMS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_ROOMS)
