"""Pretrained models: from a folder of Hugging Face's files to a model, and back."""

import dataclasses
import logging
import os
import pathlib
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from ..policies.activation import path_string
from ..policies.axes import Layout
from ..policies.report import format_bytes
from .building import abstract, check_devices, over
from .config import Config
from .exporting import check_arrays, outputs
from .hf_config import from_config, to_hf
from .hub import fetch, read_optional
from .mesh_arrays import from_blocks
from .model import LanguageModel
from .model_folder import check_tokenizer, new_folder, resolve_target, write_config, write_tokenizer, write_weights
from .sharding import Rules
from .weight_plan import (
    Equal,
    Planner,
    Problems,
    WeightMismatch as WeightMismatch,
    canonical_names,
    mtp_layers,
    stored_dtype,
)
from .weight_reading import Files, Reader
from .weights import Leaf, leaves

logger = logging.getLogger(__name__)

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_BLOCK = (128, 128)
# What config files say about how their weights are stored: no longer true of a model that has been loaded.
_STORAGE = ("quantization_config", "compression_config")


def load(
    source: str | os.PathLike,
    *,
    dtype: Any = None,
    placements: Mapping[str, Any] | str | None = None,
    segments: Sequence[int] = (),
    scan: bool = True,
    config: Any = None,
    revision: str | None = None,
    mesh: Mesh | AbstractMesh | Layout | None = None,
    rules: Rules | None = None,
) -> Any:
    """The model in a folder of `config.json` and safetensors files, as Hugging Face's libraries write them.

    Weights are read once and in place: on a CPU the peak of host memory is the model's size and one tensor of the
    files, elsewhere one array of the model. Over a mesh, the part of an array that a device holds is read by itself,
    once for all that hold it: the peak is the parts of this process's CPUs, elsewhere one part. Float8 with block
    scales (DeepSeek-V3) and MXFP4 (gpt-oss) are turned into `dtype`. Experts may have a tensor each or be fused; the
    names may have the prefixes of multimodal wrappers, whose other towers are left out when the config has a
    `text_config`.

    **Arguments:**

    - `source`: a folder, or a name on the Hugging Face Hub such as `"org/name"`.
    - `dtype`: of the parameters: float32, bfloat16 or float16. By default the one that most of them have in the
        files, and bfloat16 where they are quantised. Routers stay float32.
    - `placements`, `segments`, `scan`: as in `build`.
    - `config`: instead of what config.json says: a config, or what `from_config` takes.
    - `revision`: a branch, tag or commit on the Hub.
    - `mesh`, `rules`: the devices that the model is cut over, and how, as for `shard`.

    Warns of multi-token-prediction modules that only one of config and files has: then there are none.

    Raises WeightMismatch (a ValueError) that lists everything that is wrong with the weights: tensors that are
    missing, unexpected or don't fit, with their names, ours and the shapes, and files that are damaged. Raises
    ValueError for a folder without config or weights, weights that are pickled, a quantisation that isn't read, and
    arguments that `build` refuses: before any weight is read.
    """
    start = time.perf_counter()
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"a model is loaded from a folder or by a name on the Hub, not from a {type(source).__name__}")
    check_devices(mesh)
    folder = fetch(source, revision=revision)
    _check_dtype(dtype)
    said = read_optional(folder, "config.json")
    block = float8_block(said, folder)
    if not isinstance(config, Config):
        config = from_config(folder if config is None else config)
    multimodal = isinstance(said.get("text_config"), dict)
    options = {"segments": segments, "scan": scan, "placements": placements}
    problems = Problems(str(folder))
    with Files(folder, problems) as files:
        canonical = canonical_names([*files.tensors, *files.lost], multimodal)
        tensors = {ours: files.tensors[name] for ours, name in canonical.items() if name in files.tensors}
        lost = {ours for ours, name in canonical.items() if name in files.lost}
        config = _with_depths(config, canonical)
        config = dataclasses.replace(config, extra={k: v for k, v in config.extras.items() if k not in _STORAGE})
        # In bfloat16, to see what stays float32.
        skeleton = over(abstract(config, dtype=jnp.bfloat16, **options), mesh, rules)
        found = leaves(skeleton)
        plan = Planner(tensors, lost, block, problems).plan(
            found,
            tied=skeleton.head is None,
            num_layers=config.num_hidden_layers,
            depths=getattr(config, "num_nextn_predict_layers", 0),
            multimodal=multimodal,
        )
        problems.check()
        kept = _kept(found)
        chosen = jnp.dtype(stored_dtype(plan, kept) if dtype is None else dtype)
        with Reader(files, plan, block, problems) as reader:
            dtypes = {leaf.path: jnp.dtype(jnp.float32) if leaf.path in kept else chosen for leaf in found}
            arrays = {leaf.path: _read(reader, leaf, dtypes[leaf.path]) for leaf in found}
            _compare_copies(reader, plan.equal, problems)
        problems.check()
    model = jax.tree_util.tree_map_with_path(lambda path, leaf: arrays.pop(path_string(path)), skeleton)
    _report(model, found, folder, time.perf_counter() - start)
    return model


def save(
    model: Any,
    folder: str | os.PathLike,
    *,
    dtype: Any = None,
    tokenizer: Any = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> pathlib.Path:
    """Writes `model` as Hugging Face's libraries do: config.json and safetensors files under transformers' names.

    The folder appears whole or not at all, once everything is on the disk. Tensors are fetched one at a time, or one
    layer of a stacked array, from whatever memory they are in. Multi-token prediction goes behind the last layer, as
    in DeepSeek's files, without the copies of embedding and head that it shares; transformers doesn't load it.

    **Arguments:**

    - `folder`: a new or an empty one; with `overwrite`, also a model's, which the new one takes the place of:
        nothing that was in it stays.
    - `dtype`: of the parameters in the files: float32, bfloat16 or float16. By default what they have. What stays
        float32 in a model whatever its dtype, such as routers, does so here.
    - `tokenizer`: what has a `save(folder)`, as `zoo.load_tokenizer` gives, or a folder with a tokenizer's files.
        They bring `generation_config.json` along, with the ids that end a text.
    - `max_shard_bytes`: files grow up to this size, beyond it only for a single tensor.

    **Returns:** the folder's path. Raises ValueError, and leaves nothing behind, if the folder is taken, for a config
    that no config.json can express, and, naming the array, for one that is abstract, deleted, not finite or not as the
    config has it.
    """
    _check_dtype(dtype)
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be a positive whole number, got {max_shard_bytes!r}")
    if not isinstance(model, LanguageModel):
        raise ValueError(
            f"a model is saved, not a {type(model).__name__}; step.trained(state) gives a training state's model"
        )
    check_tokenizer(tokenizer)
    target = resolve_target(folder, overwrite)
    boundaries = sorted(b for stack in model.stacks().values() for b in stack.boundaries)
    skeleton = abstract(model.config, dtype=jnp.bfloat16, segments=boundaries)
    check_arrays(model, skeleton)
    written = list(outputs(model, dtype, _kept(leaves(skeleton))))
    config = to_hf(model.config, dtype=model.embedding.weight.dtype if dtype is None else dtype)
    with new_folder(target) as partial:
        write_weights(partial, written, max_shard_bytes)
        write_tokenizer(partial, tokenizer)
        write_config(partial, config)
    logger.info("%s: %d tensors, %s", target, len(written), format_bytes(sum(output.nbytes for output in written)))
    return target


def _check_dtype(dtype: Any) -> None:
    try:
        known = dtype is None or jnp.dtype(dtype) in map(jnp.dtype, _DTYPES)
    except TypeError:
        known = False
    if not known:
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}")


def _kept(found: Sequence[Leaf]) -> set[str]:
    """Paths of the arrays that are float32 in a model of bfloat16."""
    return {leaf.path for leaf in found if leaf.array.dtype == jnp.float32}


def _read(reader: Reader, leaf: Leaf, dtype: Any) -> jax.Array:
    """The array of `leaf`, where that is to lie, in `dtype`."""
    shape = leaf.array.shape
    if leaf.array.sharding is not None:
        return from_blocks(shape, leaf.array.sharding, lambda index: reader.read(leaf.path, shape, dtype, index))
    return _adopt(reader.read(leaf.path, shape, dtype))


def _adopt(memory: np.ndarray) -> jax.Array:
    # Nobody else has the memory and nobody writes to it again, so on a CPU it is the array's from now on. (Donating
    # such an array is safe: XLA then makes a copy.) Elsewhere it is let go of before the next one is read.
    return jax.device_put(memory, may_alias=True).block_until_ready()


def float8_block(said: Mapping[str, Any], folder: str | os.PathLike) -> tuple[int, int] | None:
    """Rows and columns that share a scale in float8 weights, from a config.json; None where it isn't blocks that do.

    Raises ValueError for a quantisation that isn't read.
    """
    places = [said, text] if isinstance(text := said.get("text_config"), dict) else [said]
    settings = next((place[key] for place in places for key in _STORAGE if isinstance(place.get(key), dict)), None)
    if settings is None:
        return _BLOCK
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    if method not in ("fp8", "mxfp4"):
        detail = next((f" ({settings[key]})" for key in ("quant_algo", "format") if settings.get(key)), "")
        raise ValueError(
            f"the weights in {str(folder)!r} are quantised with quant_method {method!r}{detail}, which isn't read; "
            "'fp8' with block scales and gpt-oss's 'mxfp4' are: take the unquantised model, or dequantise it first"
        )
    block = settings.get("weight_block_size", _BLOCK)
    if block is None:  # a scale for each matrix or row
        return None
    sizes = tuple(block) if isinstance(block, list | tuple) else ()
    if len(sizes) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
        raise ValueError(
            f"the float8 weights in {str(folder)!r} have weight_block_size {block!r}, which isn't read: two positive "
            "sizes, such as [128, 128], are"
        )
    return sizes


def _with_depths(config: Config, names: Mapping[str, str]) -> Config:
    """`config` with as many multi-token-prediction modules as the files have, where one of both has none."""
    wanted = getattr(config, "num_nextn_predict_layers", None)
    if wanted is None:
        return config
    there = mtp_layers(names, config.num_hidden_layers)
    extra = [layer for layer in there if layer >= config.num_hidden_layers + wanted]
    if extra:
        what = f"layers {extra[0]} to {extra[-1]}" if len(extra) > 1 else f"layer {extra[0]}"
        count = sum(name.startswith(tuple(f"model.layers.{layer}." for layer in extra)) for name in names)
        warnings.warn(
            f"the files have multi-token prediction in {what} ({count} tensors), beyond num_nextn_predict_layers "
            f"({wanted}): it is left out",
            stacklevel=3,
        )
    if wanted and not there:
        warnings.warn(
            f"num_nextn_predict_layers is {wanted}, but the files have no multi-token prediction behind layer "
            f"{config.num_hidden_layers - 1}: the model is loaded without",
            stacklevel=3,
        )
        return dataclasses.replace(config, num_nextn_predict_layers=0)
    return config


def _compare_copies(reader: Reader, pairs: Sequence[Equal], problems: Problems) -> None:
    for pair in pairs:
        if reader.equal(pair):
            continue
        if pair.matters:
            problems.add(
                "contradictory",
                f"{pair.copy} differs from {pair.original}, but the config ties head and embedding "
                "(tie_word_embeddings)",
            )
        else:
            warnings.warn(
                f"{pair.copy.name} differs from {pair.original.name}: multi-token prediction uses the model's own",
                stacklevel=3,
            )


def _report(model: LanguageModel, found: Sequence[Leaf], folder: pathlib.Path, seconds: float) -> None:
    """Logs what came of it, from the arrays themselves, after a last look at them."""
    arrays = jax.tree.leaves(model)
    assert [a.shape for a in arrays] == [leaf.array.shape for leaf in found]
    size = sum(array.nbytes for array in arrays)
    dtypes = ", ".join(sorted({str(array.dtype) for array in arrays}))
    logger.info(
        "%s: %d arrays (%s), %s, loaded in %.2f s", folder, len(arrays), dtypes, format_bytes(size), seconds
    )
