"""DeepSeek and its relatives: latent attention, mixture of experts, multi-token prediction."""

from .mixture import Mixture


class DeepSeek(Mixture):
    """A DeepSeek-type decoder (DeepSeek-AI, 2024: V2 and V3), after transformers' `DeepseekV3ForCausalLM`.

    Everything is in `Mixture`; its `DeepSeekConfig` asks for latent attention. V2, V3, R1, V3.2 with its sparse
    attention, Moonlight and Kimi-K2 are this class.
    """
