"""Meshes written as text: `data=2,fsdp=2`, and rules such as `kv_heads=`."""

import math
import re
from collections.abc import Iterable

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from ..policies.axes import Layout
from .sharding import layout, rules_for

# So many fake devices take JAX a second and half a GiB; more are no mesh to look at.
MOST_CPU_DEVICES = 4096


def parse_mesh(text: str) -> dict[str, int]:
    """Axes and their sizes from `data=2,fsdp=2`, in that order. Raises ValueError for anything else."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, found, size = (piece.strip() for piece in part.partition("="))
        if not found or not re.fullmatch(r"[A-Za-z_]\w*", name) or not re.fullmatch(r"\d{1,9}", size) or not int(size):
            raise ValueError(f"mesh {text!r}: write axes and how many devices each has, such as data=2,fsdp=4")
        if name in sizes:
            raise ValueError(f"mesh {text!r} has axis {name!r} twice")
        sizes[name] = int(size)
    return sizes


def parse_rules(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Rules from `embed=fsdp+tensor` and `kv_heads=` texts; nothing after `=` keeps a dimension whole.

    Raises ValueError for other texts, and for one logical axis twice.
    """
    rules: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, found, axes = (piece.strip() for piece in text.partition("="))
        if not found or not name:
            raise ValueError(
                f"rule {text!r}: write a logical axis and what it is cut over, such as embed=fsdp+tensor, or kv_heads= "
                "to keep it whole"
            )
        if name in rules:
            raise ValueError(f"there are two rules for {name!r}")
        rules[name] = tuple(axis.strip() for axis in re.split(r"[+,]", axes) if axis.strip())
    return rules


def as_option(message: str) -> str:
    """An error of a layout with the rule that it proposes as an option of the command line."""
    return re.sub(r"the rule \{'(\S+)': \(\)\}", r"--rule \1=", message)


def make_mesh(text: str, kind: AxisType = AxisType.Auto) -> Mesh:
    """The mesh that `text` describes, over the first devices of JAX's default backend.

    Raises ValueError when the text is malformed or there are too few devices.
    """
    sizes = parse_mesh(text)
    count, devices = math.prod(sizes.values()), jax.devices()
    if count > len(devices):
        cpu = devices[0].platform == "cpu"
        raise ValueError(
            f"mesh {text} needs {count} devices, and there {'is 1' if len(devices) == 1 else f'are {len(devices)}'}"
            + (f": ask for {count} fake ones with --cpu-devices {count}" if cpu else "")
        )
    kinds = (kind,) * len(sizes)
    if devices[0].platform == "cpu":  # all alike, so that their order says nothing
        return Mesh(np.array(devices[:count]).reshape(*sizes.values()), tuple(sizes), axis_types=kinds)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices[:count])


def abstract_mesh(text: str, kind: AxisType = AxisType.Auto) -> AbstractMesh:
    """The mesh that `text` describes, without devices: any number of them."""
    sizes = parse_mesh(text)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def layout_of(mesh: Mesh | AbstractMesh, rules: Iterable[str] = ()) -> Layout:
    """The layout of presets by the names of `mesh`'s axes, changed by `parse_rules` texts.

    An axis that is no preset needs a rule that names it. Raises ValueError for one without, and as `layout` does.
    """
    changed = parse_rules(rules)
    named = {axis for axes in changed.values() for axis in axes}
    return layout(mesh, rules_for(mesh, others=named) | changed)


def use_cpu_devices(count: int) -> None:
    """Lets JAX have `count` CPU devices, which it must not have begun to use.

    Raises ValueError when JAX runs with fewer already, and for more than `MOST_CPU_DEVICES`.
    """
    if not 1 <= count <= MOST_CPU_DEVICES:
        raise ValueError(f"{count:,} CPU devices: from 1 to {MOST_CPU_DEVICES:,} can be")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        have = len(jax.devices("cpu"))
        if have < count:
            raise ValueError(f"JAX runs with {have} CPU devices already, and can't have {count} any more") from None


def use_cpu_only() -> None:
    """Keeps JAX from looking for accelerators, if it hasn't begun to."""
    jax.config.update("jax_platforms", "cpu")
