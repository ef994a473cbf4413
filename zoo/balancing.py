"""Keeping experts equally loaded: what a training step does with the routers' selection biases."""

from collections.abc import Iterable
from typing import Any

from jaxtyping import Array

from ..layers.router import update_bias

_ROUTER_BIAS = ".router.bias.value"


def balanced(buffers: dict[str, Any], load: dict[str, Array], rate: float | int, mtp: bool) -> dict[str, Any]:
    """The buffers with each router's selection bias moved by the sign rule, from the load of its stack.

    A stack's biases are [layers, experts], segment after segment; its load is stacked over all its layers.
    """
    new = dict(buffers)
    left = {path for path in buffers if path.endswith(_ROUTER_BIAS)}
    for stack, loads in load.items():
        # In the order of their segments: as text, segment 10 would come before segment 2.
        paths = sorted((p for p in left if p.startswith(f"{stack}.")), key=natural)
        left -= set(paths)
        start = 0
        for path in paths:
            bias = buffers[path]
            layers = bias.shape[0] if bias.ndim == 2 else 1
            part = loads.reshape(-1, bias.shape[-1])[start : start + layers]
            start += layers
            new[path] = update_bias(bias, part.reshape(bias.shape), rate) if rate else bias
        counted = loads.size // loads.shape[-1]
        if paths and start != counted:
            raise ValueError(f"{stack!r} counts the load of {counted} layers but has {start} biases")
    left = {path for path in left if mtp or not path.startswith("mtp.")}
    if left:
        raise ValueError(f"no expert load was counted for the routers of {some(left)}: their biases would stand still")
    return new


def natural(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]


def some(paths: Iterable[str]) -> str:
    paths = sorted(paths, key=natural)
    return ", ".join(map(repr, paths[:3])) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
