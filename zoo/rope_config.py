"""The `rope_scaling` block of Hugging Face's config files, and the checks that reading any of their fields needs."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..layers.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryScaling,
    YarnScaling,
)

_SCALINGS: dict[str, type[RotaryScaling]] = {
    "default": RotaryScaling,
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
}
# What may be in a rope_scaling block beside the fields of its scaling.
_BESIDE = {"type", "rope_type", "rope_theta", "original_max_position_embeddings"}


def parse_rope_scaling(block: Mapping[str, Any] | RotaryScaling | None, max_positions: int) -> RotaryScaling:
    """The scaling that a `rope_scaling` block of a Hugging Face config asks for.

    Both spellings of the kind are read, `rope_type` and `type`. `max_positions` stands in for a missing
    `original_max_position_embeddings`, except for llama3, which needs its own.

    Raises ValueError for a kind that isn't known, a field that is missing and a field that the kind hasn't:
    scaling is never ignored.
    """
    if block is None:
        return RotaryScaling()
    if isinstance(block, RotaryScaling):
        return block
    if not isinstance(block, Mapping):
        raise ValueError(f"rope_scaling is a mapping such as {{'rope_type': 'llama3', ...}}, not {block!r}")
    kinds = {block[name] for name in ("rope_type", "type") if block.get(name) is not None}
    if len(kinds) != 1:
        raise ValueError(f"rope_scaling must name one kind in 'rope_type', got {dict(block)!r}")
    (kind,) = kinds
    if kind not in _SCALINGS:
        raise ValueError(f"rope_scaling kind {kind!r} is not known; there are {', '.join(_SCALINGS)}")
    scaling = _SCALINGS[kind]
    fields = {field.name: field for field in dataclasses.fields(scaling)}
    unknown = set(block) - set(fields) - _BESIDE
    if unknown:
        raise ValueError(f"rope_scaling of kind {kind!r} has no field {', '.join(sorted(map(repr, unknown)))}")
    values = {name: block[name] for name in fields if name in block}
    original = "original_max_position_embeddings"
    if kind in ("yarn", "longrope"):
        if values.get(original) is None:
            values[original] = max_positions
        values.setdefault("factor", None)
    for name in fields:
        if name not in values and fields[name].default is dataclasses.MISSING:
            raise ValueError(f"rope_scaling of kind {kind!r} needs {name!r}, got {dict(block)!r}")
    for name, value in values.items():
        if name.endswith("_factor") and isinstance(value, Sequence) and not isinstance(value, str):
            values[name] = tuple(number(f"rope_scaling {name}", v) for v in value)
        elif name == "truncate":
            if not isinstance(value, bool):
                raise ValueError(f"rope_scaling truncate must be true or false, got {value!r}")
        elif name == original:
            positive("rope_scaling", **{name: value})
        elif value is not None:
            values[name] = number(f"rope_scaling {name}", value)
        elif fields[name].default is not None and not (name == "factor" and kind in ("yarn", "longrope")):
            raise ValueError(f"rope_scaling of kind {kind!r} needs a number for {name!r}, not null")
    return scaling(**values)


def rope_scaling_dict(scaling: RotaryScaling) -> dict[str, Any] | None:
    """`scaling` as the `rope_scaling` block of a config file; None for the default. Undoes `parse_rope_scaling`."""
    kind = next(name for name, cls in _SCALINGS.items() if type(scaling) is cls)
    if kind == "default":
        return None
    values = {name: value for name, value in dataclasses.asdict(scaling).items() if value is not None}
    return {"rope_type": kind} | {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def number(name: str, value: Any) -> float:
    """`value` as a float; ValueError, naming it `name`, unless it is a finite number."""
    # The largest number first: a whole number may be too long for a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def positive(owner: str, **sizes: Any) -> None:
    """Raises ValueError unless every size is a positive whole number."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{owner}: {name} must be a positive whole number, got {size!r}")


def not_negative(owner: str, **sizes: Any) -> None:
    """Raises ValueError unless every size is a whole number, zero or more."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"{owner}: {name} must be a whole number, zero or more, got {size!r}")
