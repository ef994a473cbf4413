"""Rotary embeddings in config.json: as transformers 4 writes them, as transformers 5 does, and as both read them."""

from collections.abc import Mapping
from typing import Any

from ..layers.rotary import RotaryScaling
from .config import Config, LlamaConfig
from .hf_keys import Keys, same, short
from .rope_config import parse_rope_scaling, rope_scaling_dict

_ORIGINAL = "original_max_position_embeddings"
_PARTIAL = "partial_rotary_factor"


def read_rope(
    keys: Keys, theta: float, max_positions: int, default: Mapping[str, Any] | None = None, partial: float = 1.0
) -> dict[str, Any]:
    """The config fields `rope_theta`, `rope_scaling` and `partial_rotary_factor` that a file asks for.

    Files of transformers 4 have `rope_theta` and `rope_scaling` at the top, those of transformers 5
    `rope_parameters` with both in it, or one such block for each type of layer. What is said in several places
    must agree. `theta`, `default` (a block) and `partial` are the class's, for what is said nowhere.

    Raises ValueError for contradictions, layers of several kinds, and what `parse_rope_scaling` refuses.
    """
    silent = "rope_scaling" in keys.values and keys.values["rope_scaling"] is None
    blocks = {}
    for name in ("rope_scaling", "rope_parameters"):
        block = keys.take(name, default=None)
        if block is None or block == {}:
            continue
        if not isinstance(block, dict):
            raise keys.error(f"{name} must be an object such as {{'rope_type': 'linear', ...}}, got {short(block)}")
        blocks[name] = _one_for_all_layers(keys, name, block)
    said = {f"{name}.rope_theta": block["rope_theta"] for name, block in blocks.items() if "rope_theta" in block}
    top = keys.take("rope_theta", default=None)
    if top is not None or ("rope_theta" in keys.values and not said):
        said = {"rope_theta": top} | said
    theta = _agreed(keys, "rope_theta", said, theta)
    said = {_PARTIAL: keys.take(_PARTIAL)} if _PARTIAL in keys.values else {}
    said |= {f"{name}.{_PARTIAL}": block[_PARTIAL] for name, block in blocks.items() if _PARTIAL in block}
    partial = _agreed(keys, _PARTIAL, said, partial)
    if not blocks and default is not None:
        if silent:
            raise keys.error(
                "rope_scaling is null, which transformers 4 takes for no scaling and transformers 5 for this class's "
                f"own; write {{'rope_type': 'default'}} or {dict(default)!r}"
            )
        blocks["rope_scaling"] = dict(default)
    scalings = {name: _parse(keys, name, block, max_positions) for name, block in blocks.items()}
    found = list(scalings.values()) or [RotaryScaling()]
    if found[0] != found[-1]:
        raise keys.error(f"rope_scaling and rope_parameters differ: {found[0]} and {found[-1]}")
    return {"rope_theta": theta, "rope_scaling": found[0], _PARTIAL: partial}


def _one_for_all_layers(keys: Keys, name: str, block: dict[str, Any]) -> dict[str, Any]:
    """`block`, or the one that all types of layers share where there is one for each."""
    nested = {kind: inner for kind, inner in block.items() if isinstance(inner, dict) or kind.endswith("_attention")}
    if not nested:
        return block
    if len(nested) < len(block):
        raise keys.error(f"{name} mixes blocks of types of layers ({', '.join(nested)}) with its own: {short(block)}")
    first, *others = nested
    if not isinstance(nested[first], dict):
        raise keys.error(f"{name}.{first} must be an object, got {short(nested[first])}")
    for other in others:
        if nested[other] != nested[first]:
            raise keys.error(
                f"{name} differs between {first} and {other}, and all layers share one rotary embedding here: "
                f"{short(nested[first])} and {short(nested[other])}"
            )
    return nested[first]


def _agreed(keys: Keys, name: str, said: dict[str, Any], default: float) -> float:
    values = {place: Keys({name: value}, keys.where).number(name) for place, value in said.items()}
    if len(set(values.values())) > 1:
        raise keys.error(" and ".join(f"{place} {value!r}" for place, value in values.items()) + " differ")
    return next(iter(values.values()), default)


def _parse(keys: Keys, name: str, block: dict[str, Any], max_positions: int) -> RotaryScaling:
    kinds = [block[spelling] for spelling in ("rope_type", "type") if block.get(spelling) is not None]
    if any(not isinstance(kind, str) for kind in kinds):
        raise keys.error(f"{name}: rope_type must be a string, got {short(kinds)}")
    # In transformers 5, a block without a kind is one that only says rope_theta.
    block = block if kinds else block | {"rope_type": "default"}
    # A null is a field that isn't given, except for the one flag: transformers takes that for false.
    fields = {
        key: value
        for key, value in block.items()
        if key not in ("rope_theta", _PARTIAL) and (value is not None or key == "truncate")
    }
    if set(kinds) & {"yarn", "longrope"}:
        fields.setdefault("factor", None)
    if fields.get(_ORIGINAL) is not None:
        Keys(fields, f"{keys.where}: {name}").integer(_ORIGINAL)
    outside = keys.values.get(_ORIGINAL)
    if outside is not None and set(kinds) & {"yarn", "longrope", "llama3"}:
        keys.integer(_ORIGINAL, default=None)
        if not same(fields.setdefault(_ORIGINAL, outside), outside):
            raise keys.error(f"{_ORIGINAL} {outside!r} and {name}.{_ORIGINAL} {fields[_ORIGINAL]!r} differ")
    try:
        return parse_rope_scaling(fields, max_positions)
    except ValueError as error:
        raise keys.error(str(error).replace("rope_scaling", name)) from None


def write_rope(config: Config, default_factor: float) -> dict[str, Any]:
    """The keys of `config`'s rotary embedding, for readers of both forms.

    `default_factor` is the partial_rotary_factor of a class whose file doesn't say any.
    """
    block = rope_scaling_dict(config.rope_scaling)
    if block is not None and block.get("truncate") is True:
        del block["truncate"]  # younger than the rest, and true is what it stands for
    parameters = {"rope_type": "default", **(block or {}), "rope_theta": config.rope_theta}
    out: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_scaling": None}
    if block is not None:
        # Before transformers 4.43 the kind was called "type".
        out["rope_scaling"] = {"type": block["rope_type"]} | block
        if block["rope_type"] == "longrope":
            # Where transformers 4 looks for it.
            out[_ORIGINAL] = block[_ORIGINAL]
    if isinstance(config, LlamaConfig) and {config.partial_rotary_factor, default_factor} != {1.0}:
        out[_PARTIAL] = parameters[_PARTIAL] = config.partial_rotary_factor
    return out | {"rope_parameters": parameters}
