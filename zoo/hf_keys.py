"""The keys of a config.json, taken one by one: each checked, and none left over that changes the mathematics."""

import difflib
import json
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

_MAX = 2**31 - 1  # of whole numbers: sizes and ids are 32 bits in every framework
_MAX_LAYERS = 10_000
_MAX_BYTES = 1 << 26
_REQUIRED: Any = object()

# Left-over keys that speak of the mathematics by their names, as whole words between underscores: what a model
# with one of them computes isn't known here unless the value says that the thing is off.
_SUSPICIOUS = re.compile(
    r"(^|_)("
    r"multipliers?|softcap\w*|soft_cap\w*|logits?_scal\w*|logits?_cap\w*|clip_\w+|\w+_clip|alibi|"
    r"dropout|pdrop|layerdrop|m?rope|rotary|nope|yarn|ntk|logn|position_embedding_type|"
    r"sliding|window_size|\w+_window|chunk_size|swa|sinks?|causal|bidirectional|layers?_types?|layers?_pattern|"
    r"blocks?_types?|override_pattern|block_configs|per_layer|kv_shar\w+|shared_kv|cla|mlp_only_layers|"
    r"bias|biases|qk_norm|qkv_norm|qk_layernorm|use_layernorm|norm_type|pre_norm|post_norm|post_layernorm|"
    r"sandwich\w*|unit_offset|zero_centered|parallel_attn|parallel_residual|residual_scal\w+|depth_scal\w+|"
    r"scale_depth|scale_emb\w*|\w*embedding_scale|embed_scale|normali[sz]e_embeddings?|attn_scale|"
    r"attention_scale|softmax_scale|scalar|temperature_tuning|mup\w*|hidden_act\w*|activation\w*|act_fn|swiglu\w*|"
    r"experts?|moe|router|routed\w*|gating|gated|output_gate|topk_\w+|scoring_func|score_func\w*|n_group|sparse|"
    r"first_k_dense_replace|mtp|nextn|lora|linear_attn|linear_attention|mamba|ssm|cross_attention|hc_mult|"
    r"is_encoder_decoder|hyper_connections?|altup|laurel|index_topk|index_n_heads|index_head_dim|use_mla|"
    r"v_head_dim|qk_head_dim|pruned_heads|engram"
    r")(_|$)"
)
# ... but not when they speak of a loss, of how something is computed, of tokens, or of another tower.
_BESIDE_THE_POINT = re.compile(
    r"^(vision|image|video|audio|speech|mm|projector)_|_tokens?(_|$)|_token_ids?$|(tensor|expert|pipeline)_parallel|"
    r"(^|_)(loss|coeff?|implementation|kernel|backend|fused|dtype|ep_size|output_router_logits|"
    r"max_window_layers|context_window|chunk_size_feed_forward|classifier_dropout)(_|$)"
)
# A factor is off at one, a number of groups at one too, most other things at nothing.
_FACTOR = re.compile(r"multiplier|scal(e|ing)|(^|_)(factor|freq|step|pct|percent)(_|$)")
_COUNT = re.compile(r"(^|_)(n_group|topk_group)(_|$)")
# Off at none of the usual values: softmax is scaled by the value itself.
_NEVER_ONE = re.compile(r"^attention_multiplier$|scalar|attn_scale|attention_scale|softmax_scale|scale_depth")
# What every model here does, whatever its class.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope", "rotary"),
    "use_rope": (True,),
    "is_causal": (True,),
    "causal": (True,),
    "use_causal_mask": (True,),
    "pre_norm": (True,),
    "norm_type": ("rmsnorm", "rms_norm", "rms"),
    "hidden_activation": ("silu", "swish"),
    "activation_function": ("silu", "swish"),
}


class Keys:
    """The keys of one config.json. Each is taken once, under any of its names; `rest` looks at what is left.

    Every error is a ValueError that begins with `where`, the file's name, and names the key and its value.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = dict(values)
        self.where = where
        self._left = dict(values)
        self._fine: set[str] = set()
        self._absent: set[str] = set()

    def error(self, message: str) -> ValueError:
        """An error that begins with the file's name."""
        return ValueError(f"{self.where}: {message}")

    def take(self, *names: str, default: Any = _REQUIRED) -> Any:
        """The value of a key that goes by any of `names`; several in one file must agree."""
        found = {name: self._left.pop(name) for name in names if name in self._left}
        if not found:
            self._absent.update(names)
            if default is _REQUIRED:
                raise self.error(f"{names[0]} is missing")
            return default
        # A null beside a value under another name says nothing.
        values = [value for value in found.values() if value is not None] or [None]
        if any(not same(values[0], value) for value in values[1:]):
            said = " and ".join(f"{name} {value!r}" for name, value in found.items())
            raise self.error(f"{said} are two names of one thing and differ")
        return values[0]

    def integer(self, *names: str, default: Any = _REQUIRED, least: int = 1, null: bool = False) -> Any:
        """A whole number, at least `least`; null too where `null`."""
        value = self.take(*names, default=default)
        if value is None and (null or default is None):
            return None
        most = _MAX_LAYERS if names[0] == "num_hidden_layers" else _MAX
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(f"{names[0]} must be a whole number from {least} to {most}, got {short(value)}")
        return value

    def number(self, *names: str, default: Any = _REQUIRED) -> float:
        """A finite number."""
        value = self.take(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
            raise self.error(f"{names[0]} must be a number, got {short(value)}")
        return float(value)

    def flag(self, *names: str, default: Any = _REQUIRED) -> bool:
        """True or false; null stands for false where that is the default."""
        value = self.take(*names, default=default)
        if value is None and default is False:
            return False
        if not isinstance(value, bool):
            raise self.error(f"{names[0]} must be true or false, got {short(value)}")
        return value

    def token_id(self, name: str, default: int | None) -> int | None:
        """One token's id, or none; -1, which some files write for none, is none."""
        value = self.take(name, default=default)
        if value is None or (value == -1 and not isinstance(value, bool)):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX:
            raise self.error(f"{name} must be a token's id or null, got {short(value)}")
        return value

    def integers(self, name: str, default: Any = _REQUIRED) -> list[int] | None:
        """A list of whole numbers, zero or more, or null."""
        value = self.take(name, default=default)
        if value is None:
            return None
        if not isinstance(value, list) or any(
            isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= _MAX for item in value
        ):
            raise self.error(f"{name} must be a list of whole numbers or null, got {short(value)}")
        return value

    def texts(self, name: str) -> list[str] | None:
        """A list of strings, or null, which a missing key is too."""
        value = self.take(name, default=None)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise self.error(f"{name} must be a list of strings or null, got {short(value)}")
        return value

    def expect(self, name: str, *allowed: Any, because: str) -> None:
        """Checks a key that may only say what is so anyhow; `rest` keeps it."""
        if name in self._left and not any(same(self._left[name], good) for good in allowed):
            good = " or ".join(json.dumps(good) for good in allowed)
            raise self.error(f"{name} must be {good} {because}, got {short(self._left[name])}")
        self._fine.add(name)

    def rest(self, model_type: str) -> dict[str, Any]:
        """What wasn't taken, in the file's order. Raises for what may change the mathematics."""
        for key, value in self._left.items():
            if key in self._fine:
                continue
            if near := difflib.get_close_matches(key, self._absent, n=1, cutoff=0.94):
                raise self.error(f"{key} isn't known; did you mean {near[0]}, which the file doesn't have?")
            if key in _NEUTRAL:
                fine = value is None or any(same(value, good) for good in _NEUTRAL[key])
            else:
                fine = not _SUSPICIOUS.search(key) or _BESIDE_THE_POINT.search(key) or _off(key, value)
            if not fine:
                why = f"{key} is {short(value)}, which isn't supported in {model_type} models"
                if "drop" in key:
                    raise self.error(f"{why}: set it to 0, which changes nothing outside of training")
                raise self.error(f"{why}. Take it out of the file only if it changes nothing that is computed")
        return dict(self._left)


def same(a: Any, b: Any) -> bool:
    """Whether two values of a config.json say the same; true isn't 1."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def short(value: Any) -> str:
    """`value` as errors show it."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else f"{str(value)[:20]}..."
    return text if len(text) <= 120 else text[:117] + "..."


def _off(key: str, value: Any) -> bool:
    if value is None or value is False or value in ("", "none", "default") or value in ([], {}):
        return True
    if isinstance(value, bool) or not isinstance(value, int | float) or _NEVER_ONE.search(key):
        return False
    if _COUNT.search(key):
        return value in (0, 1)
    return value == (1 if _FACTOR.search(key) else 0)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in the JSON file at `path`. Raises ValueError, naming file and place, for anything else."""
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ValueError(f"{path}: {size} bytes are too many for a config.json")
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: can't be read: {error.strerror or error}") from None
    return parse_json(data, str(path))


def parse_json(data: bytes | str, where: str) -> dict[str, Any]:
    """The object that a JSON text holds, with no key twice and no number that isn't finite."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in items:
            if key in out and not same(out[key], value):
                raise ValueError(f"{key} is there twice, as {short(out[key])} and as {short(value)}")
            out[key] = value
        return out

    try:
        values = json.loads(data, object_pairs_hook=pairs)
        if not isinstance(values, dict):
            kind = {list: "a list", str: "a string", type(None): "null"}.get(type(values), "a number or a flag")
            raise ValueError(f"a config.json holds an object in braces at its top, this one holds {kind}")
        for key, value in values.items():
            _check_finite(value, key)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: isn't JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{where}: is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return values


def _check_finite(value: Any, name: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be a number, got {value!r}")
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_finite(child, name)


def find_file(source: str | os.PathLike) -> pathlib.Path:
    """The config.json that a path to one, or to a folder with one, means."""
    path = pathlib.Path(source).expanduser()
    try:
        if not path.is_dir():
            return path
        if (path / "config.json").is_file():
            return path / "config.json"
        there = sorted(child.name for child in path.iterdir())
    except OSError as error:
        raise ValueError(f"{path}: can't be read: {error.strerror or error}") from None
    more = f" and {len(there) - 8} more" if len(there) > 8 else ""
    raise ValueError(f"{path}: has no config.json in it; there is {', '.join(there[:8]) or 'nothing'}{more}")
