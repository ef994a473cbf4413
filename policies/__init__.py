"""Where activations wait for their backward pass: annotations, the policies that apply them, the proof."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accelerators import Target as Target, targets as targets
    from .activation import Activation as Activation, Placement as Placement, named as named
    from .ahead import Ahead as Ahead, CompileError as CompileError, compile_ahead as compile_ahead
    from .counted import Census as Census
    from .flags import Flags as Flags, xla_flags as xla_flags
    from .machines import Hardware as Hardware, hardware as hardware, hardwares as hardwares
    from .placing import place as place, presets as presets
    from .planned import Plan as Plan
    from .planner import plan as plan
    from .proof import OffloadNotApplied as OffloadNotApplied, Proof as Proof, examine as examine, prove as prove
    from .remat import checkpoint as checkpoint, policy as policy
    from .residuals import (
        PlacementNotApplied as PlacementNotApplied,
        activations as activations,
        census as census,
        check as check,
    )
    from .solving import Infeasible as Infeasible

# Loaded on first use, so that importing a single layer stays light.
_ROOMS = {
    "Activation": "activation",
    "Placement": "activation",
    "named": "activation",
    "place": "placing",
    "presets": "placing",
    "checkpoint": "remat",
    "policy": "remat",
    "Census": "counted",
    "PlacementNotApplied": "residuals",
    "activations": "residuals",
    "census": "residuals",
    "check": "residuals",
    "OffloadNotApplied": "proof",
    "Proof": "proof",
    "examine": "proof",
    "prove": "proof",
    "Ahead": "ahead",
    "CompileError": "ahead",
    "compile_ahead": "ahead",
    "Target": "accelerators",
    "targets": "accelerators",
    "Hardware": "machines",
    "hardware": "machines",
    "hardwares": "machines",
    "Plan": "planned",
    "plan": "planner",
    "Infeasible": "solving",
    "Flags": "flags",
    "xla_flags": "flags",
}

__all__ = list(_ROOMS)


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_ROOMS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_ROOMS)
