"""Generation against its bound, reading what a step needs once, and against recomputing everything for each token.

    python benchmarks/generate.py [DTYPE]

A step reads the weights (of experts those that are chosen, on average) and the cache. The bound is the time in which
the machine sums as many bytes. Prints tokens per second of all rows together, the bound's share of the time, how many
times faster than a pass over the whole sequence for each token, and the time to the first token. Everything takes
turns, so that a drifting machine hits all alike.
"""

import statistics
import sys
import time

import jax
import jax.numpy as jnp

from overspill import zoo

PROMPT, NEW, RUNS = 64, 64, 5
MODELS = {
    "Llama, 110M": zoo.LlamaConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, tie_word_embeddings=True,
    ),
    "MLA with experts, 150M": zoo.DeepSeekConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1536, moe_intermediate_size=384, num_hidden_layers=9,
        num_attention_heads=8, q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32,
        v_head_dim=64, n_routed_experts=24, num_experts_per_tok=4, n_shared_experts=1, scoring_func="sigmoid",
        topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=2.5, first_k_dense_replace=1,
        tie_word_embeddings=True,
    ),
}  # fmt: skip


def seconds(function):
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def needed_bytes(model, batch):
    """Of weights and cache, for one step in the middle of the new tokens."""
    cache = jax.eval_shape(lambda: model.init_cache(batch, PROMPT + NEW // 2))
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((model, cache.arrays)))
    experts = getattr(model.config, "n_routed_experts", None)
    if experts:
        stacked = jax.tree.leaves([segment.moe.experts for segment in model.moe_layers.segments])
        asleep = (1 - model.config.num_experts_per_tok / experts) ** batch
        total -= asleep * sum(leaf.size * leaf.dtype.itemsize for leaf in stacked)
    return total


def measure(model, batch):
    prompt = jax.random.randint(jax.random.key(0), (batch, PROMPT), 0, model.config.vocab_size)
    whole = jnp.pad(prompt, ((0, 0), (0, NEW // 2)))
    block = jnp.ones((64, 2**20))
    add = jax.jit(jnp.sum)

    @jax.jit
    def recompute(model, tokens):
        return jnp.argmax(model.logits(model.hidden(tokens)[0][:, -1]), axis=-1)

    turns = {
        "first": lambda: zoo.generate(model, prompt, max_new_tokens=1),
        "all": lambda: zoo.generate(model, prompt, max_new_tokens=NEW),
        "whole": lambda: recompute(model, whole),
        "sum": lambda: add(block),
    }
    times = {name: [] for name in turns}
    for run in range(RUNS + 1):
        for name, turn in turns.items():
            elapsed = seconds(turn)
            if run:
                times[name].append(elapsed)
    first, every, whole, summing = times.values()
    step = [(b - a) / (NEW - 1) for a, b in zip(first, every, strict=True)]
    bound = [needed_bytes(model, batch) / block.nbytes * t for t in summing]
    median = statistics.median
    return (
        batch / median(step),
        median(b / s for b, s in zip(bound, step, strict=True)),
        median(w / s for w, s in zip(whole, step, strict=True)),
        median(first),
    )


def main(dtype="float32"):
    print(f"{dtype}, prompt {PROMPT}, {NEW} new tokens, JAX {jax.__version__} on {jax.devices()[0].device_kind}")
    print(f"{'':26}{'batch':>6}{'tokens/s':>10}{'of bound':>10}{'recomputing':>13}{'first token ms':>16}")
    for name, config in MODELS.items():
        model = zoo.build(config, key=jax.random.key(1), dtype=dtype)
        for batch in (1, 8):
            rate, share, times, first = measure(model, batch)
            print(f"{name:26}{batch:6}{rate:10.1f}{share:10.2f}{times:12.1f}x{first * 1e3:16.0f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
