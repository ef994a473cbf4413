"""Llama and its relatives: grouped-query attention and SwiGLU in every layer."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from ..layers.block import Block
from ..layers.embedding import Embedding
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..layers.rotary import Rotary
from ..layers.stack import Stack
from . import parts
from .config import LlamaConfig
from .model import LanguageModel, check_boundaries


class Llama(LanguageModel):
    """A Llama-type decoder (Touvron et al., 2023; Llama Team, 2024), after transformers' `LlamaForCausalLM`.

    `model(tokens)` gives logits, `model.hidden(tokens)` the states before the head. `head` is None where
    the embedding serves as the head too.
    """

    embedding: Embedding
    layers: Stack
    norm: RMSNorm
    head: Linear | None
    rotary: Rotary
    config: LlamaConfig = eqx.field(static=True)

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: Any = jnp.float32,
        segments: Sequence[int] = (),
        scan: bool = True,
        key: PRNGKeyArray,
    ):
        """Weights N(0, initializer_range^2), norms one, biases zero; drawn in float32, stored as `dtype`.

        `segments` are the layers that begin a new segment of the stack and `scan=False` runs layers in a
        loop: neither changes the weights. Raises ValueError on boundaries that are no inner layers.
        """
        check_boundaries(segments, config.num_hidden_layers)
        embedding_key, layers_key, head_key = jax.random.split(key, 3)
        options = {"std": config.initializer_range, "dtype": dtype}

        def make_block(key: PRNGKeyArray) -> Block:
            attention_key, mlp_key = jax.random.split(key)
            return parts.block(
                config, parts.attention(config, dtype, attention_key), parts.mlp(config, dtype, mlp_key), dtype
            )

        self.embedding = Embedding(config.vocab_size, config.hidden_size, key=embedding_key, **options)
        self.layers = Stack.build(
            make_block, config.num_hidden_layers, boundaries=segments, scan=scan, key=layers_key
        )
        self.norm = parts.norm(config, dtype)
        self.head = None
        if not config.tie_word_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, axes="vocab embed", key=head_key, **options)
        self.rotary = config.rotary()
        self.config = config

    def stacks(self) -> dict[str, Stack]:
        return {"layers": self.layers}
