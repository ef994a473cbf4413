"""Llama and DeepSeek models made of annotated layers; training, data, checkpoints and the command line."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .building import (
        Parameters as Parameters,
        abstract as abstract,
        build as build,
        parameters as parameters,
        resegment as resegment,
    )
    from .checkpoint_io import CheckpointMismatch as CheckpointMismatch, restore as restore_state, save as save_state  # noqa: F401
    from .collectives import Collectives as Collectives, find_collectives as find_collectives
    from .compiled import RecompilationWarning as RecompilationWarning
    from .config import LlamaConfig as LlamaConfig
    from .data import (
        Batch as Batch,
        ByteTokenizer as ByteTokenizer,
        Corpus as Corpus,
        PackedDataset as PackedDataset,
        Position as Position,
        load_corpus as load_corpus,
        pad_batch as pad_batch,
    )
    from .deepseek import DeepSeek as DeepSeek
    from .generation import generate as generate, stream as stream
    from .hf_config import from_config as from_config, to_hf as to_hf
    from .llama import Llama as Llama
    from .loop import Record as Record, TrainingDiverged as TrainingDiverged, train as train_loop  # noqa: F401
    from .mixture import Mixture as Mixture
    from .moe_config import DeepSeekConfig as DeepSeekConfig, MoEConfig as MoEConfig
    from .optimizer import adamw as adamw, trainable as trainable, warmup_cosine as warmup_cosine
    from .pretrained import WeightMismatch as WeightMismatch, load as load, save as save
    from .registry import REGISTRY as REGISTRY
    from .sharding import (
        ShardingWarning as ShardingWarning,
        layout as layout,
        rules_for as rules_for,
        shard as shard,
        shards as shards,
    )
    from .state import TrainState as TrainState, init_state as init_state
    from .tokenizer import Tokenizer as Tokenizer, load_tokenizer as load_tokenizer
    from .train import (
        Metrics as Metrics,
        Step as Step,
        make_train_step as make_train_step,
    )

# Public name: the room it is in, and its name there where that differs. Loaded on first use.
_ROOMS = {
    "REGISTRY": "registry",
    "Batch": "data",
    "ByteTokenizer": "data",
    "CheckpointMismatch": "checkpoint_io",
    "Corpus": "data",
    "Collectives": "collectives",
    "DeepSeek": "deepseek",
    "DeepSeekConfig": "moe_config",
    "Llama": "llama",
    "LlamaConfig": "config",
    "Metrics": "train",
    "Mixture": "mixture",
    "MoEConfig": "moe_config",
    "PackedDataset": "data",
    "Parameters": "building",
    "Position": "data",
    "RecompilationWarning": "compiled",
    "Record": "loop",
    "ShardingWarning": "sharding",
    "Step": "train",
    "Tokenizer": "tokenizer",
    "TrainState": "state",
    "TrainingDiverged": "loop",
    "WeightMismatch": "pretrained",
    "abstract": "building",
    "adamw": "optimizer",
    "build": "building",
    "find_collectives": "collectives",
    "from_config": "hf_config",
    "generate": "generation",
    "init_state": "state",
    "layout": "sharding",
    "load": "pretrained",
    "load_corpus": "data",
    "load_tokenizer": "tokenizer",
    "make_train_step": "train",
    "pad_batch": "data",
    "parameters": "building",
    "resegment": "building",
    "restore_state": "checkpoint_io:restore",
    "rules_for": "sharding",
    "save": "pretrained",
    "save_state": "checkpoint_io:save",
    "shard": "sharding",
    "shards": "sharding",
    "stream": "generation",
    "to_hf": "hf_config",
    "train_loop": "loop:train",
    "trainable": "optimizer",
    "warmup_cosine": "optimizer",
}

__all__ = list(_ROOMS)


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room, _, inner = _ROOMS[name].partition(":")
    value = getattr(importlib.import_module(f".{room}", __name__), inner or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_ROOMS)
