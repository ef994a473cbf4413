"""The blocks of a program: what `policies.checkpoint` wraps, how often each runs, and the graph of both passes."""

import dataclasses
import os.path
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .costs import expert_fill
from .graphs import Graph, graph
from .jaxprs import Program as Traced, has_backward, is_inexact, names_in, subjaxprs
from .programs import Program

_CHECKPOINTS = {"checkpoint", "remat", "remat2"}


@dataclasses.dataclass(frozen=True)
class Block:
    """A region of a program that is computed again from its inputs and from what is kept of it.

    - `prefix`: what the paths of its activations have in common, such as `moe_layers.segments.0`.
    - `times`: how often the program runs it: once for each layer of a stack.
    - `looped`: whether a loop does.
    - `names`: of its activations.
    """

    prefix: str
    times: int
    looped: bool
    names: tuple[str, ...]
    graph: Graph


@dataclasses.dataclass(frozen=True)
class Region:
    """A block as it stands in a program: its jaxpr, and which of its inputs a gradient passes through."""

    jaxpr: Any
    times: int
    active: tuple[bool, ...]
    looped: bool

    @property
    def shapes(self) -> list[str]:
        return [str(v.aval) for v in self.jaxpr.invars]


def read_blocks(program: Program, *, devices: int, platform: str) -> list[Block]:
    """The blocks of a training step, a loss or a layer, in the order in which they run.

    What runs under `policies.checkpoint` is a block. Raises ValueError for a function that holds its own backward pass,
    no activation, or no checkpoint around any.
    """
    closed, active = program.forward
    if has_backward(closed.jaxpr):
        raise ValueError(
            "a plan is made for a step of zoo.make_train_step, a loss or a layer: this function differentiates "
            "something itself. Give what it differentiates"
        )
    if not (names := names_in(closed.jaxpr)):
        raise ValueError("no Activation is in reach: pass the annotated module as an argument of the function")
    regions = list(_regions(closed.jaxpr, active, 1))
    if not regions:
        raise ValueError(
            f"{sorted(names)[0]!r} and others run outside of policies.checkpoint, where placements change nothing: "
            "call policies.checkpoint(layer) in place of the layer"
        )
    fill = expert_fill(closed.jaxpr)
    found: dict[tuple[str, ...], Block] = {}
    shapes: dict[tuple[str, ...], list[str]] = {}
    for region in regions:
        names = tuple(sorted(names_in(region.jaxpr)))
        if unknown := sorted(set(names) - set(program.rows)):
            raise ValueError(f"no Activation {unknown[0]!r} is in reach: pass the annotated module as an argument")
        if hidden := sorted(_hidden(region.jaxpr)):
            raise ValueError(
                f"{hidden[0]!r} is computed in a loop, a branch or a checkpoint inside of what policies.checkpoint "
                "wraps: wrap what runs in each round of the loop instead"
            )
        if shapes.setdefault(names, region.shapes) != region.shapes:
            raise ValueError(f"{names[0]!r} and others are called on arrays of different sizes: plan these calls apart")
        if names in found:  # one module, called several times: it has one placement
            found[names] = dataclasses.replace(found[names], times=found[names].times + region.times)
            continue
        both = graph(_both(region), devices, platform, fill)
        found[names] = Block(_prefix(names), region.times, region.looped, names, both)
    return list(found.values())


def _regions(jaxpr: Any, active: Sequence[bool], times: int, looped: bool = False) -> Iterator[Region]:
    """The regions of a jaxpr whose inputs are `active` or not, at any depth."""
    env = dict(zip(jaxpr.invars, active, strict=True))
    for eqn in jaxpr.eqns:
        inputs = [not hasattr(v, "val") and env.get(v, False) for v in eqn.invars]
        out = any(inputs)
        env |= {v: out and is_inexact(v.aval) for v in eqn.outvars if hasattr(v.aval, "dtype")}
        subs = list(subjaxprs(eqn))
        if eqn.primitive.name in _CHECKPOINTS and names_in(subs[0]):
            yield Region(subs[0], times, tuple(inputs), looped)
            continue
        if eqn.primitive.name == "scan":
            inputs = _carried(eqn, subs[0], inputs)
        times_here = times * int(eqn.params["length"]) if eqn.primitive.name == "scan" else times
        for sub in subs:
            if len(sub.invars) <= len(inputs) and names_in(sub):
                inside = looped or eqn.primitive.name in ("scan", "while")
                yield from _regions(sub, inputs[len(inputs) - len(sub.invars) :], times_here, inside)


def _hidden(jaxpr: Any) -> set[str]:
    """Names in a region that are given within loops, branches or checkpoints of its own."""
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        within = eqn.primitive.name in {"scan", "while", "cond", *_CHECKPOINTS}
        for sub in subjaxprs(eqn):
            found |= names_in(sub) if within else _hidden(sub)
    return found


def _carried(eqn: Any, body: Any, inputs: list[bool]) -> list[bool]:
    """A loop's inputs, its carry being active once anything in it is."""
    carry = [len(o.aval.shape) == len(b.aval.shape) for o, b in zip(eqn.outvars, body.outvars, strict=True)]
    whole = [len(o.aval.shape) == len(b.aval.shape) for o, b in zip(eqn.invars, body.invars, strict=True)]
    first = sum(whole) - sum(carry)
    anything = any(inputs)
    return [
        (active or (anything and first <= i < first + sum(carry))) and is_inexact(v.aval)
        for i, (active, v) in enumerate(zip(inputs, body.invars, strict=True))
    ]


def _both(region: Region) -> Traced:
    """Both passes of a region, traced without a policy."""
    run = jaxpr_as_fun(ClosedJaxpr(region.jaxpr, []))
    inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in region.jaxpr.invars]
    moving = [i for i, active in enumerate(region.active) if active]
    outputs = [v.aval for v in region.jaxpr.outvars if is_inexact(v.aval)]

    def both(inputs: list[Any], cotangents: list[Any]) -> Any:
        def of_moving(values: list[Any]) -> list[Any]:
            full = list(inputs)
            for i, value in zip(moving, values, strict=True):
                full[i] = value
            return [x for x in run(*full) if jnp.issubdtype(x.dtype, jnp.inexact)]

        out, pullback = jax.vjp(of_moving, [inputs[i] for i in moving])
        return out, pullback(cotangents)

    closed = jax.make_jaxpr(both)(inputs, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in outputs])
    labels = [*(f"input {i}" for i in range(len(inputs))), *[None] * len(outputs)]
    return Traced(closed, labels)


def _prefix(names: Sequence[str]) -> str:
    """The path that all `names` begin with, in whole parts."""
    parts = os.path.commonprefix([name.split(".")[:-1] for name in names])
    return ".".join(parts)
