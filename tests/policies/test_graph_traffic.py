"""Memory traffic and number formats of a block's operations: what compilers compute on the way isn't written."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from overspill import policies, zoo
from overspill.policies.blocks import read_blocks
from overspill.policies.pricing import Prices
from overspill.policies.programs import Program


def block_of(rows, length):
    """The layer of a small Llama in bfloat16."""
    model = zoo.abstract(zoo.REGISTRY["overspill-llama-tiny"], dtype=jnp.bfloat16)
    optimizer = zoo.adamw(1e-3)
    state = zoo.init_state(model, optimizer, key=jax.random.key(0), master_dtype=jnp.float32)
    ids, valid = (jax.ShapeDtypeStruct((rows, length), dtype) for dtype in (jnp.int32, jnp.bool_))
    program = Program(zoo.make_train_step(model, optimizer), (state, zoo.Batch(ids, ids, ids, ids, valid)), {})
    (block,) = read_blocks(program, devices=1, platform="cuda")
    return block


@pytest.fixture(scope="module")
def blocks():
    return block_of(32, 32), block_of(1, 1024)


def test_only_attention_moves_scores(blocks):
    """The same tokens in longer sequences: masks and zeros as large as scores are computed where they are read."""
    for way in ("forward", "backward"):
        short, long = (
            sum(work.memory_bytes for work in getattr(block.graph, way) if not work.attention) for block in blocks
        )
        assert long == pytest.approx(short, rel=0.02)
        short, long = (
            sum(work.memory_bytes for work in getattr(block.graph, way) if work.attention) for block in blocks
        )
        assert long > 10 * short


def test_a_fused_kernel_rounds_what_the_program_keeps_wide(blocks):
    """The backward pass of attention multiplies gradients of scores in float32, and a fused kernel in bfloat16."""
    graph = blocks[1].graph
    prices = Prices(policies.hardware("gb200"), fused_attention=True)
    products = [[work for work in works if work.cost.attention] for works in (graph.forward, graph.backward)]
    assert {work.dtype for work in products[1]} == {"bfloat16", "float32"}
    once, twice = (sum(map(prices.operations, works)) for works in products)
    assert twice == pytest.approx(2 * once)
    as_written = dataclasses.replace(prices, fused_attention=False)
    once, twice = (sum(map(as_written.operations, works)) for works in products)
    assert twice > 2.5 * once
