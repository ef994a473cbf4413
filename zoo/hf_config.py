"""Configs from Hugging Face's config.json files, of transformers 4 and of transformers 5, and back."""

import dataclasses
import difflib
import json
import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from .config import Config, LlamaConfig
from .hf_keys import Keys, find_file, parse_json, read_json, same, short
from .hf_rope import read_rope, write_rope
from .model_types import ALIASES, MODEL_TYPES, ModelType, model_type_of
from .registry_dense import DENSE
from .registry_moe import EXPERTS

# Of a file that was read, not written again: weights are written as plain numbers, the classes of transformers read
# the file without code beside it, and a text model has no wrapper.
_NOT_WRITTEN = {"quantization_config", "compression_config", "auto_map", "wrapper", "_name_or_path", "torch_dtype"}


def from_config(source: str | os.PathLike | Mapping[str, Any] | Config) -> Config:
    """The config of a model.

    **Arguments:**

    - `source`: a name in `registry.REGISTRY`, or the path of a config.json or of a folder with one in it, or what such
        a file holds as a dictionary, or a config, which is returned as it is. A name goes before a file of the same
        name: write `./name` for that.

    Files of transformers 4 and 5 are read, with every spelling that is about; what one leaves out has the value that
    the class of transformers gives it, but for the sizes of a model and of its experts, which a file must have. Of
    models that wrap a language model in `text_config` it is that model which is read. What a file says beside is kept
    in `extras`: `architectures`, `dtype`, `quantization_config` (weights are dequantised when they are loaded), keys
    that aren't known, and in `wrapper` what stands around a `text_config`.

    **Raises:**

    ValueError, naming the file and the key, for what isn't there, isn't JSON or isn't the right kind of value; for a
    `model_type` that isn't known and an architecture that is no causal language model; for two places in one file that
    contradict each other; and for everything that changes what is computed and isn't supported, dropout among it.
    Some examples: activations other than SiLU, soft-capped logits, multipliers, experts in every other layer, and
    `norm_topk_prob` in DeepSeek-V2, which DeepSeek's own code obeys and transformers ignores.
    """
    if isinstance(source, Config):
        return source
    if isinstance(source, Mapping):
        try:
            text = json.dumps(dict(source))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"config: holds what no config.json can: {error}") from None
        return _read(parse_json(text, "config"), "config")
    if isinstance(source, str):
        if source.lstrip().startswith("{"):
            raise ValueError("that is the text of a config.json: give its path, or what json.loads makes of it")
        named = DENSE.get(source) or EXPERTS.get(source)
        if named is not None:
            return named
        if not os.path.exists(os.path.expanduser(source)) or "\0" in source:
            raise ValueError(_no_such_name(source))
    elif not isinstance(source, os.PathLike):
        raise ValueError(f"a config is a registered name, a path, a dictionary or a config, not {short(source)}")
    path = find_file(source)
    return _read(read_json(path), str(path))


def _no_such_name(name: str) -> str:
    names = [*DENSE, *EXPERTS]
    near = difflib.get_close_matches(name.rpartition("/")[2].lower(), names, n=3, cutoff=0.5)
    if os.sep in name or name.endswith(".json"):
        hint = f" Without its weights, {' or '.join(map(repr, near))} is here by name." if near else ""
        return f"there is no file or folder {name!r}; models on the Hub are fetched by zoo.load.{hint}"
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(names)}"
    return f"no model is called {name!r}; {hint}"


def _read(values: dict[str, Any], where: str) -> Config:
    values, where, beside = _unwrapped(values, where)
    keys = Keys(values, where)
    name = keys.take("model_type")
    kind = MODEL_TYPES.get(ALIASES.get(name, name)) if isinstance(name, str) else None
    if kind is None:
        known = ", ".join([*MODEL_TYPES, *ALIASES])
        near = difflib.get_close_matches(str(name), [*MODEL_TYPES, *ALIASES], n=1, cutoff=0.7)
        hint = f"did you mean {near[0]!r}? There" if near else "there"
        raise keys.error(f"model_type {short(name)} is not known; {hint} are {known}")
    architectures = keys.texts("architectures") or []
    if architectures and not any(architecture.endswith("ForCausalLM") for architecture in architectures):
        raise keys.error(
            f"architectures is {architectures!r}; only causal language models are read, a {kind.architecture} here: "
            "a model without its head, or with that of another task, isn't one"
        )
    fields = {"model_type": ALIASES.get(name, name)} | _common(keys, kind)
    fields |= {flag: keys.flag(flag, default=default) for flag, default in kind.flags.items()}
    for key, allowed in kind.expected.items():
        keys.expect(key, *allowed, because=f"in {kind.architecture}")
    fields |= kind.fields
    fields |= kind.read(kind, keys, fields)
    extra = beside | ({"architectures": architectures} if architectures else {})
    dtype = _dtype(keys)
    extra |= {"dtype": dtype} if dtype is not None else {}
    extra |= keys.rest(ALIASES.get(name, name))
    try:
        return kind.config(**fields, extra=extra)
    except ValueError as error:
        raise keys.error(str(error).removeprefix(f"{kind.config.__name__}: ")) from None


def _common(keys: Keys, kind: ModelType) -> dict[str, Any]:
    """The fields that every class has, and those of the rotary embedding."""
    default = {"num_key_value_heads": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False} | dict(kind.defaults)
    fields: dict[str, Any] = {
        name: keys.integer(name)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    fields["num_key_value_heads"] = keys.integer(
        "num_key_value_heads", default=default["num_key_value_heads"], null=True
    )
    fields["max_position_embeddings"] = keys.integer(
        "max_position_embeddings", default=default["max_position_embeddings"]
    )
    activation = keys.take("hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        raise keys.error(f"hidden_act must be 'silu' (SwiGLU), got {short(activation)}")
    fields["initializer_range"] = keys.number("initializer_range", default=0.02)
    fields["rms_norm_eps"] = keys.number("rms_norm_eps", default=default["rms_norm_eps"])
    fields["tie_word_embeddings"] = keys.flag("tie_word_embeddings", default=default["tie_word_embeddings"])
    for name in ("bos_token_id", "pad_token_id"):
        fields[name] = keys.token_id(name, default.get(name))
    if isinstance(keys.values.get("eos_token_id"), list):
        fields["eos_token_id"] = keys.integers("eos_token_id")
    else:
        fields["eos_token_id"] = keys.token_id("eos_token_id", default.get("eos_token_id"))
    return fields | read_rope(
        keys, kind.rope_theta, fields["max_position_embeddings"], kind.rope_scaling, kind.partial_rotary_factor
    )


def _unwrapped(values: dict[str, Any], where: str) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """The language model's own keys, what to call their place, and what of the wrapper goes into `extra`."""
    text, name = values.get("text_config"), values.get("model_type")
    if not isinstance(text, dict) or (isinstance(name, str) and name in MODEL_TYPES):
        return values, where, {}
    wrapper = {key: value for key, value in values.items() if key != "text_config"}
    text = dict(text)
    if name == "kimi_k25":
        text.setdefault("model_type", "deepseek_v3")
    for key in ("vocab_size", "tie_word_embeddings"):
        if key in text and key in wrapper and not same(text[key], wrapper[key]):
            raise ValueError(f"{where}: {key} {wrapper[key]!r} and text_config.{key} {text[key]!r} differ")
    beside: dict[str, Any] = {"wrapper": wrapper}
    if "quantization_config" in wrapper and "quantization_config" not in text:
        beside["quantization_config"] = wrapper["quantization_config"]
    dtypes = () if {"dtype", "torch_dtype"} & set(text) else ("dtype", "torch_dtype")
    for key in ("tie_word_embeddings", *dtypes):
        if key in wrapper:
            text.setdefault(key, wrapper[key])
    Keys(wrapper, where).rest(str(name))
    return text, f"{where}: text_config", beside


def _dtype(keys: Keys) -> str | None:
    """The dtype of the file's weights; `dtype` goes before its older name where they differ."""
    old, new = keys.take("torch_dtype", default=None), keys.take("dtype", default=None)
    value = old if new is None else new
    if value in (None, "auto"):
        return None
    try:
        dtype = jnp.dtype(value.removeprefix("torch."))
        if jnp.issubdtype(dtype, jnp.floating):
            return dtype.name
    except (TypeError, AttributeError):
        pass
    raise keys.error(f"dtype must be a floating dtype such as 'bfloat16', got {short(value)}")


def to_hf(config: Config, *, dtype: Any = None) -> dict[str, Any]:
    """What a config.json for `config` holds: transformers 4 and 5 read the same model from it.

    **Arguments:**

    - `config`: any whose `model_type` has a class in transformers that can say all of it; without a `model_type` that
        is Llama, Mixtral, or the DeepSeek that its router and its indexer are of.
    - `dtype`: of the weights beside the file; by default that of the file that `config` was read from, if it was.

    What `config` was read with comes back from `extras`, but for what is no longer so: how weights were quantised, and
    names of code that the classes of transformers don't need.

    Raises ValueError, naming the field, when the class can't say it: `from_config` reads the result back, and it must
    be `config` again.
    """
    kind = model_type_of(config)
    out = _write(config, kind, dtype)
    if lost := _lost(config, kind, out):
        others = [
            name
            for name, other in MODEL_TYPES.items()
            if other.config is type(config) and name != kind and not _lost(config, name, _write(config, name, dtype))
        ]
        hint = f"; model_type {' or '.join(map(repr, others))} can" if others else ""
        raise ValueError(f"a config.json of model_type {kind!r} can't hold this config: {lost}{hint}")
    return out


def _write(config: Config, name: str, dtype: Any) -> dict[str, Any]:
    kind = MODEL_TYPES[name]
    same_name = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
                 "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", *kind.flags)  # fmt: skip
    out = {"architectures": [kind.architecture], "model_type": name}
    out |= {key: getattr(config, key) for key in same_name}
    if isinstance(config.eos_token_id, tuple):
        out["eos_token_id"] = list(config.eos_token_id)
    if isinstance(config, LlamaConfig):
        out["head_dim"] = config.head_dim
    out |= kind.write(config) | write_rope(config, kind.partial_rotary_factor) | {"attention_dropout": 0.0}
    extras = config.extras
    dtype = extras.get("dtype") if dtype is None else jnp.dtype(dtype).name
    if dtype is not None:
        out |= {"dtype": dtype, "torch_dtype": dtype}
    return out | {key: value for key, value in extras.items() if key not in out and key not in _NOT_WRITTEN}


def _lost(config: Config, name: str, out: dict[str, Any]) -> str:
    """What of `config` isn't read back from `out`, with what is read instead; empty where all is."""
    if MODEL_TYPES[name].hidden_size_divides and config.hidden_size % config.num_attention_heads:
        sizes = f"hidden_size={config.hidden_size} with num_attention_heads={config.num_attention_heads}"
        return f"{sizes}, which doesn't divide it"
    try:
        back = from_config(out)
    except ValueError as error:
        return str(error).removeprefix("config: ")
    fields = [field.name for field in dataclasses.fields(config) if field.compare and field.name != "model_type"]
    differ = [field for field in fields if getattr(back, field) != getattr(config, field)]
    return ", ".join(f"{field}={getattr(config, field)!r} is read as {getattr(back, field)!r}" for field in differ)
