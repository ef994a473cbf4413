"""What `overspill env` prints: the environment in which a target moves activations while it computes."""

import json
import sys

from ..policies.flags import SHELLS, Flags, xla_flags


def prepare(target: str, *, shell: str = "sh", host_memory_gib: int | None = None) -> Flags:
    """The settings for `target`, everything asked for checked. Raises ValueError."""
    if shell not in SHELLS:
        raise ValueError(f"shell {shell!r} is not one of {', '.join(SHELLS)}")
    return xla_flags(target, host_memory_gib=host_memory_gib)


def text(flags: Flags, *, shell: str = "sh", as_json: bool = False) -> str:
    """What goes to the standard output: lines for a shell, or JSON. Raises ValueError for a broken environment."""
    return json.dumps(flags.as_json(), indent=1) + "\n" if as_json else flags.exports(shell=shell)


def remarks(flags: Flags, *, shell: str = "sh", as_json: bool = False) -> list[str]:
    """What whoever asked should see even where the output goes into `eval`."""
    lines = [f"left out {flag.name}={flag.value}: {flags.checked} doesn't know it" for flag in flags.unknown]
    lines += [f"kept {flag.name}={value}: yours, not {flag.value} ({flag.reason})" for flag, value in flags.kept()]
    if sys.stdout.isatty() and not as_json:
        command = f"overspill env --target {flags.target.name}"
        set_them = f"{command} --shell fish | source" if shell == "fish" else f'eval "$({command})"'
        lines.append(f"to set them: {set_them}")
    return lines
