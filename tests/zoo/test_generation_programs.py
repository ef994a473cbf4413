"""What generation is compiled to: how often, and that no step copies the cache, the weights or unused experts."""

import dataclasses
import importlib.util
import pathlib
import re

import jax
import numpy as np
import pytest

from overspill import zoo
from overspill.zoo import generation
from overspill.zoo.config import LlamaConfig
from overspill.zoo.moe_config import MoEConfig
from overspill.zoo.prompts import request

_spec = importlib.util.spec_from_file_location("small_models", pathlib.Path(__file__).with_name("small_models.py"))
small_models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(small_models)
CONFIGS = small_models.CONFIGS


@pytest.fixture
def programs():
    generation._compiled.cache_clear()
    yield generation._compiled("cpu")
    generation._compiled.cache_clear()


def compiled(model, programs, *, batch=2, new=100, which="step"):
    """A compiled program, and its cache: that of `batch` prompts of one token."""
    asked = request("generate", model, np.ones((batch, 1), int), None, new, {}, (), None, None, None)
    cache, rows = programs.prefill.eval_shape(model, asked.tokens, asked.mask, asked.controls, capacity=asked.capacity)
    arguments = (model, cache, rows, asked.controls, *([np.int32(new)] if which == "rest" else []))
    return getattr(programs, which).lower(*arguments).compile(), cache


def elements(shape):
    return int(np.prod([int(n) for n in shape.split(",") if n]))


def bytes_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("which", ["step", "rest"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "one kv head, tied", "gpt-oss", "deepseek-v2-lite", "deepseek-v3.2"])
def test_no_step_copies_the_cache(family, dtype, which, make, programs):
    config = CONFIGS[family]
    layers = {} if getattr(config, "layer_types", None) is None else {"layer_types": config.layer_types * 3}
    config = dataclasses.replace(config, num_hidden_layers=9, max_position_embeddings=2048, **layers)
    program, cache = compiled(make(config, dtype=np.dtype(dtype)), programs, new=900, which=which)
    smallest = min(leaf.size for leaf in jax.tree.leaves(cache.arrays) if leaf.shape[0] > 1)
    writes = 0
    for name, shape, operation in re.findall(r"(%\S+) = \w+\[([\d,]*)\]\S* ([\w-]+)\(", program.as_text()):
        if elements(shape) < smallest:
            continue
        in_place = "dynamic-update-slice" in name.replace("_", "-")
        writes += in_place
        assert in_place or operation in ("parameter", "get-tuple-element", "bitcast"), (name, shape, operation)
    assert writes
    memory = program.memory_analysis()
    size = bytes_of(cache.arrays)
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_step_copies_the_weights(dtype, make, programs):
    """Of the stack; a layer at a time is what a scan on CPU takes out of it."""
    config = LlamaConfig(
        vocab_size=300, hidden_size=96, intermediate_size=256, num_hidden_layers=12, num_attention_heads=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = make(config, dtype=np.dtype(dtype))
    program, _ = compiled(model, programs, batch=1)
    # At most a float32 copy of a layer.
    assert program.memory_analysis().temp_size_in_bytes < 2 / 12 * 1.2 * bytes_of(model)
    assert "sort(" not in program.as_text()


def test_no_step_copies_experts_that_nobody_goes_to(make, programs):
    config = MoEConfig(
        **small_models.GQA | {"hidden_size": 64, "max_position_embeddings": 128},
        **small_models.EXPERTS | {"n_routed_experts": 64, "moe_intermediate_size": 48},
    )  # fmt: skip
    model = make(config)
    program, _ = compiled(model, programs, batch=2)
    of_a_layer = bytes_of(model.moe_layers.segments[0].moe.experts) / config.num_hidden_layers
    assert program.memory_analysis().temp_size_in_bytes < of_a_layer / 2


def test_one_compilation(make, programs):
    """Prompts of other lengths, padding, and whatever steers the choice ask for no other program."""
    # Of a size that no other test has: JAX counts the programs of one function together.
    model = make(dataclasses.replace(CONFIGS["llama"], intermediate_size=28))
    before = [program._cache_size() for program in programs]

    def more():
        return [program._cache_size() - held for program, held in zip(programs, before, strict=True)]

    rng = np.random.default_rng(0)
    asked = [
        {"tokens": rng.integers(0, 61, (2, 3))},
        {"tokens": rng.integers(0, 61, (2, 16)), "max_new_tokens": 40},
        {"tokens": rng.integers(0, 61, (2, 9)), "mask": np.tril(np.ones((2, 9), bool), 5), "max_new_tokens": 1},
        {"tokens": [[1, 2], [3, 4]], "temperature": 0.7, "key": jax.random.key(1)},
        {"tokens": [[1, 2], [3, 4]], "temperature": 3, "top_k": 3, "key": jax.random.split(jax.random.key(1), 2)},
        {"tokens": [[1, 2], [3, 4]], "temperature": 1.0, "top_p": 0.5, "min_p": 0.1, "key": jax.random.PRNGKey(1)},
        {"tokens": [[1, 2], [3, 4]], "stop_ids": 5},
        {"tokens": [[1, 2], [3, 4]], "stop_ids": (5, 6, 7), "pad_id": 3, "allowed": 50},
    ]
    for arguments in asked:
        arguments = {"max_new_tokens": 20} | arguments
        zoo.generate(model, arguments.pop("tokens"), **arguments)
    assert more() == [1, 0, 1]
    for arguments in asked[1:]:
        arguments = {"max_new_tokens": 6} | arguments
        list(zoo.stream(model, arguments.pop("tokens"), **arguments))
    assert more() == [1, 1, 1]
    # A prompt of another size is read by another program and continued by the same one.
    zoo.generate(model, rng.integers(0, 61, (2, 30)), max_new_tokens=20)
    assert more() == [2, 1, 1]
    zoo.generate(model, rng.integers(0, 61, (1, 3)), max_new_tokens=20)
    assert more() == [3, 1, 2]


def test_a_streams_next_step_begins_before_the_last_one_is_read(make, programs, monkeypatch):
    model, calls = make(CONFIGS["llama"]), []

    def step(model, cache, rows, controls):
        out = programs.step(model, cache, rows, controls)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache.arrays))  # it became the new one
        calls.append(out)
        return out

    monkeypatch.setattr(generation, "_compiled", lambda platform: programs._replace(step=step))
    begun = [len(calls) for _ in zoo.stream(model, [[1, 2, 3]], max_new_tokens=6)]
    assert begun == [0, 2, 3, 4, 5, 5]
