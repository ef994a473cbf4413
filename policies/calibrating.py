"""Plans whose device memory is what the hardware's compiler says."""

import dataclasses
from typing import TYPE_CHECKING

from .accelerators import target as find_target
from .ahead import CompileError, require_compiler
from .machines import Hardware
from .planned import Plan
from .solving import Infeasible

if TYPE_CHECKING:
    from .planner import Planner

_ROUNDS = 5  # compilations of one plan after the other
_SPARE = 0.02  # of device memory: so much less is tried first where a compiler refuses
_WORTH = 0.005  # of a step's time: a plan that fits isn't exchanged for one that saves less


def installed(hardware: Hardware) -> bool:
    """Whether there is a compiler for the hardware here."""
    if hardware.target is None:
        return False
    try:
        require_compiler(hardware.target.platform)
    except ModuleNotFoundError:
        return False
    return True


def calibrated(planner: "Planner") -> Plan:
    """The planner's best plan, its device memory being what the hardware's compiler says.

    Raises Infeasible, ValueError for hardware that can't be compiled for, and as `policies.compile_ahead`.
    """
    target, reserved = find_target(planner.hardware.name), planner.options.reserved_bytes
    best, plan, tried, more = None, planner.plan(), set(), 0
    for _ in range(_ROUNDS):
        tried.add(plan.decision)
        compiled = planner.compiled(plan, target)
        if compiled.error is None:
            size = compiled.device_bytes + reserved
            more = size - planner.needed(plan.decision)
            found = dataclasses.replace(planner.known(plan.decision, size, plan.solve_seconds), calibrated=True)
            if planner.problem.fits(found.outcome) and (best is None or found.seconds < best.seconds):
                best = found
        following, short, share = None, None, _SPARE
        try:
            following = planner.planned(more)
            # A TPU's compiler says of what it refuses only that: more memory is left out until another is best.
            while compiled.error is not None and following.decision in tried:
                more += round(share * plan.device_bytes)
                following, share = planner.planned(more), 2 * share
        except Infeasible as error:
            following, short = None, error
        if best is None and (following is None or following.decision in tried):
            # What another plan was off by says little of the smallest.
            following = planner.smallest()
            if following.decision in tried and short is not None:
                raise short
        if following is None or following.decision in tried:
            break
        if best is not None and following.seconds > (1 - _WORTH) * best.seconds:
            break
        plan = following
    if best is None:
        raise CompileError(f"after {len(tried)} compilations nothing that fits {target.description} was found")
    return best
