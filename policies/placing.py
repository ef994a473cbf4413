"""Editing annotations: rules from globs to placements, and the presets that people start from."""

import dataclasses
import difflib
import fnmatch
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from jaxtyping import PyTree

from .activation import Activation, Annotation, Placement, annotations, map_activations

T = TypeVar("T")
Rules = Mapping[str, Placement | str]


def _matches(path: str, glob: str) -> bool:
    # With a leading dot `*.attention.query` also fits a block on its own, where the path is `attention.query`.
    return path == glob or fnmatch.fnmatchcase(path, glob) or fnmatch.fnmatchcase(f".{path}", glob)


def _near(glob: str, paths: list[str]) -> list[str]:
    """The globs over `paths` that read most like `glob`."""
    forms = {f"*.{'.'.join(parts[-n:])}" for path in paths for parts in [path.split(".")] for n in (1, 2, 3)}
    forms.update(paths)
    return difflib.get_close_matches(glob, sorted(forms), n=3, cutoff=0.5)


def _resolve(rows: list[Annotation], rules: Mapping[str, Any]) -> dict[str, Placement]:
    placements: dict[str, Placement] = {}
    paths = [row.path for row in rows]
    for glob, value in rules.items():
        if not isinstance(glob, str):
            raise ValueError(f"placement rules map globs over activation paths to placements, not {glob!r}")
        placement = Placement.parse(value)
        matched = [path for path in paths if _matches(path, glob)]
        if not matched:
            near = _near(glob, paths)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(paths[:8])}"
            raise ValueError(f"placement rule {glob!r} matches no activation; {hint}")
        placements.update(dict.fromkeys(matched, placement))
    return placements


def place(tree: T, rules: Any) -> T:
    """`tree` with its activations placed by `rules`; no array and nothing but annotations changes.

    **Arguments:**

    - `tree`: any PyTree that holds `Activation`s: a model, a block, a single layer.
    - `rules`: one of
        - a mapping from globs over activation paths to placements (`Placement` or its spelling), such as
          `{"*.attention.query": "host", "*.mlp.*": "recompute"}`. Later rules win over earlier ones;
        - the name of a preset (see `presets`);
        - a function from the tree to such a mapping, such as a `Plan` of `policies.plan`.

    **Returns:** a tree of the same type and with the very same leaves.

    Raises ValueError when a glob matches nothing (near matches are listed), a placement or preset isn't
    known, a preset doesn't fit the tree, or an activation that is always kept, such as a block's input,
    would be recomputed.
    """
    rows = annotations(tree)
    if not rows:
        raise ValueError(f"{type(tree).__name__} holds no Activation, so there is nothing to place")
    if isinstance(rules, str):
        if rules not in _PRESETS:
            near = difflib.get_close_matches(rules, _PRESETS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"no preset is called {rules!r}; {hint}There are {', '.join(_PRESETS)}")
        rules = _PRESETS[rules].rules(tree)
    elif not isinstance(rules, Mapping):
        if not callable(rules):
            raise ValueError(f"placements are rules, a preset's name or a function to rules, not {rules!r}")
        rules = rules(tree)
    placements = _resolve(rows, rules)

    def edit(path: str, node: Activation) -> Activation:
        placement = placements.get(path, node.placement)
        if placement is Placement.RECOMPUTE and not node.recomputable:
            raise ValueError(
                f"{path!r} can't be recomputed: it is what a block is recomputed from, so it is kept anyhow. "
                f"Place it on the device or the host, e.g. by a last rule {{'*.{node.name}': 'device'}}"
            )
        return dataclasses.replace(node, placement=placement)

    return map_activations(edit, tree)


class Preset(NamedTuple):
    """A named way to place a model's activations: a function from the tree to rules, and what it is for."""

    rules: Callable[[PyTree], Rules]
    summary: str


def _everything(placement: Placement) -> Callable[[PyTree], Rules]:
    def rules(tree: PyTree) -> Rules:
        keep = Placement.DEVICE if placement is Placement.RECOMPUTE else placement
        return {row.path: placement if row.activation.recomputable else keep for row in annotations(tree)}

    return rules


def _offload(preset: str, fits: str, *names: str) -> Callable[[PyTree], Rules]:
    """Rules that offload the activations called `names` and recompute the rest from the blocks' inputs."""

    def rules(tree: PyTree) -> Rules:
        rows = annotations(tree)
        found = {row.activation.name for row in rows}
        if not found.intersection(names):
            raise ValueError(
                f"preset {preset!r} doesn't fit {type(tree).__name__}: it offloads {', '.join(names)}, "
                f"which only {fits} have"
            )
        out = dict(_everything(Placement.RECOMPUTE)(tree))
        out.update({row.path: Placement.HOST for row in rows if row.activation.name in names})
        return out

    return rules


_PRESETS: dict[str, Preset] = {
    "save_all": Preset(_everything(Placement.DEVICE), "every annotated activation stays on the device"),
    "recompute_all": Preset(
        _everything(Placement.RECOMPUTE), "only the blocks' inputs are kept, on the device; the rest is recomputed"
    ),
    "offload_qkv": Preset(
        _offload("offload_qkv", "models with attention layers (Llama, DeepSeek)", "query", "key", "value"),
        "query, key and value wait on the host (the Llama 3.1 405B recipe); the rest is recomputed",
    ),
    "offload_block_inputs": Preset(
        _offload("offload_block_inputs", "models made of blocks (Llama, DeepSeek)", "block_input"),
        "the blocks' inputs wait on the host; everything else is recomputed from them",
    ),
    "offload_mlp": Preset(
        _offload("offload_mlp", "models with MLP or MoE layers (Llama, DeepSeek)", "gate", "up", "hidden"),
        "what the MLPs and the experts compute inside waits on the host; the rest is recomputed",
    ),
    "offload_latents": Preset(
        _offload("offload_latents", "models with latent attention (MLA: DeepSeek)", "query_latent", "kv_latent"),
        "MLA's small latents wait on the host; queries, keys and values are recomputed from them",
    ),
    "offload_all": Preset(_everything(Placement.HOST), "every annotated activation waits on the host"),
}


def presets() -> dict[str, str]:
    """The presets that `place` knows, each with one line about what it does."""
    return {name: preset.summary for name, preset in _PRESETS.items()}
