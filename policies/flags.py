"""The settings with which XLA moves activations while it computes, for one kind of accelerator."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

from .accelerators import Target, target as _target
from .report import Table

XLA, LIBTPU = "XLA_FLAGS", "LIBTPU_INIT_ARGS"
POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
SHELLS = ("sh", "fish")
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Flag:
    """One setting: a flag of XLA or libtpu, or an environment variable of its own."""

    name: str
    value: str
    variable: str
    """The environment variable that holds it: `XLA_FLAGS`, `LIBTPU_INIT_ARGS`, or `name` itself."""
    reason: str
    versions: str
    """The JAX versions that know it."""


# All of them were tried with jaxlib 0.10.0, 0.10.1, 0.10.2, 0.11.1, 0.11.2, 0.12.0 and 0.12.0.1.
_CUDA = (
    Flag("xla_gpu_enable_latency_hiding_scheduler", "true", XLA,
         "schedules copies to and from host memory early, so that they run while the device computes", ">=0.10"),
    Flag("xla_gpu_enable_pipelined_host_offloading", "true", XLA,
         "moves the copies of a layer beside the computation of the next; takes one layer's buffers more", ">=0.10"),
    # Rather than xla_gpu_enable_host_memory_offloading, which makes that pass count right: with it the pass also moves
    # values to the host by itself, as if the link were as fast as device memory, and can end the compiler (0.10.2).
    Flag("xla_disable_hlo_passes", "rematerialization", XLA,
         "annotations alone say what is recomputed: XLA counts host buffers as device memory, and would make room for "
         "them", ">=0.10"),
    Flag("xla_gpu_memory_limit_slop_factor", "95", XLA,
         "percent of free device memory that the scheduler plans with", ">=0.10"),
    Flag("xla_gpu_experimental_parallel_collective_overlap_limit", "1", XLA,
         "with more collectives at once, what comes back from host memory can be corrupted", ">=0.10"),
    # The pipeliner works from the inner loop outwards: sums of experts' gradients that it takes out of a loop over
    # layers it takes out of the loop over micro-batches next, and what moves to the host goes along.
    Flag("xla_gpu_enable_pipelined_reduce_scatter", "false", XLA,
         "a loop over micro-batches would be taken apart: each layer's program four times, nearly twice the memory",
         ">=0.10"),
)  # fmt: skip
_SHARE = Flag(
    FRACTION, "0.92", FRACTION, "share of device memory that a process takes, 0.75 otherwise; the rest is the driver's "
    "and the collectives'", ">=0.10"
)  # fmt: skip
# And these with libtpu 0.0.40, 0.0.42.1, 0.0.46 and 0.0.50.1, which go with these versions of JAX.
_TPU = (
    Flag("xla_tpu_enable_all_experimental_scheduler_features", "true", LIBTPU,
         "the scheduler that weighs transfers against computation", ">=0.10"),
    Flag("xla_tpu_enable_scheduler_memory_pressure_tracking", "true", LIBTPU,
         "keeps transfers that are started early from filling the device", ">=0.10"),
    Flag("xla_tpu_scheduler_percent_shared_memory_limit", "100", LIBTPU,
         "percent of the device's memory that the scheduler plans with", ">=0.10"),
    Flag("xla_latency_hiding_scheduler_rerun", "2", LIBTPU,
         "schedules again with less memory, twice at most, where a schedule doesn't fit", ">=0.10"),
    Flag("xla_lhs_prioritize_async_depth_over_stall", "ENABLED", LIBTPU,
         "starts long transfers first, even where the device waits for a shorter one", ">=0.10"),
    Flag("xla_tpu_host_transfer_overlap_limit", "24", LIBTPU,
         "so many transfers to and from host memory at once", ">=0.10"),
    Flag("xla_max_concurrent_host_send_recv", "100", LIBTPU,
         "so many sends and receives with the host at once", ">=0.10"),
    Flag("xla_tpu_aggressive_opt_barrier_removal", "ENABLED", LIBTPU,
         "barriers of recomputation don't hold transfers back", ">=0.10"),
    Flag("xla_tpu_enable_ag_backward_pipelining", "true", LIBTPU,
         "gathers the weights of the next layer of the backward pass ahead, beside the transfers", ">=0.10"),
    Flag("xla_should_allow_loop_variant_parameter_in_chain", "ENABLED", LIBTPU,
         "lets that pipelining reach through values that change from layer to layer", ">=0.10"),
    Flag("xla_should_add_loop_invariant_op_in_chain", "ENABLED", LIBTPU,
         "and through those that don't", ">=0.10"),
)  # fmt: skip


class Flags(Sequence[Flag]):
    """The settings for one target, made by `xla_flags`: a sequence of `Flag`, printed as a table."""

    def __init__(self, target: Target, flags: Iterable[Flag], *, unknown: Iterable[Flag] = (), checked: str = ""):
        self.target = target
        self.unknown = tuple(unknown)
        """Those left out, because what is installed doesn't know them: it would end the process."""
        self.checked = checked
        """What the flags were checked with, such as `jaxlib 0.10.2`; empty where that isn't installed."""
        self._flags = tuple(flags)

    @overload
    def __getitem__(self, index: int) -> Flag: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Flag]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._flags[index]

    def __len__(self) -> int:
        return len(self._flags)

    def environment(self, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The environment variables to set, given those that `base` has.

        Flags that `base` sets, to whatever value, stay as they are, and so do all others that it has. Raises ValueError
        where its XLA_FLAGS names a file that can't be read.
        """
        found: dict[str, str] = {}
        for variable in dict.fromkeys(flag.variable for flag in self):
            mine = [flag for flag in self if flag.variable == variable]
            if mine[0].name == variable:
                found[variable] = base.get(variable) or mine[0].value
                continue
            text = _own_text(base, variable)
            own = _parse(text)
            # In front, because XLA reads no further than to the first word that is no flag.
            added = [f"--{flag.name}={flag.value}" for flag in mine if flag.name not in own]
            found[variable] = " ".join([*added, *([text] if text else [])])
        return found

    def kept(self, base: Mapping[str, str] = os.environ) -> tuple[tuple[Flag, str], ...]:
        """The flags that `base` sets to another value, which stays, with that value."""
        pairs = []
        for flag in self:
            if flag.name == flag.variable:
                value = base.get(flag.variable) or flag.value
            else:
                value = _parse(_own_text(base, flag.variable)).get(flag.name, flag.value)
            if value != flag.value:
                pairs.append((flag, value))
        return tuple(pairs)

    def exports(self, base: Mapping[str, str] = os.environ, *, shell: str = "sh") -> str:
        """The variables as lines for a shell, `sh` or `fish`, with the reasons in comments below.

        For `eval "$(overspill env --target gb200)"`. Raises ValueError as `environment` does, and for other shells.
        """
        if shell not in SHELLS:
            raise ValueError(f"shell {shell!r} is not one of {', '.join(SHELLS)}")
        variables = self.environment(base).items()
        if shell == "sh":
            lines = [f"export {name}={shlex.quote(value)};" for name, value in variables]
        else:
            lines = [f"set -gx {name} {_fish_quote(value)};" for name, value in variables]
        # Last, and every line ended above: `eval $(...)` without quotes makes one line of all.
        notes = [f"for {self.target.name}, {self.target.description}; {self._checked()}"]
        notes += [f"{flag.name}={flag.value}: {flag.reason} (JAX {flag.versions})" for flag in self]
        notes += [f"kept as it was: {flag.name}={value}, not {flag.value}" for flag, value in self.kept(base)]
        notes += [f"left out, unknown to {self.checked}: {flag.name}={flag.value}" for flag in self.unknown]
        return "\n".join([*lines, *("# " + " ".join(note.split()) for note in notes)]) + "\n"

    def apply(self) -> None:
        """Sets them in this process, for JAX to read when it starts its backends.

        Raises RuntimeError when it has started them already, for then nothing reads them any more: unless all of them
        were set by then.
        """
        new = {name: value for name, value in self.environment().items() if os.environ.get(name) != value}
        if not new:
            return
        if backends_started():
            raise RuntimeError(
                f"JAX's backends have started, and read {', '.join(new)} only then: apply the flags for "
                f"{self.target.name} before the first array or jax.devices(), or start the process with "
                f'eval "$(overspill env --target {self.target.name})"'
            )
        os.environ.update(new)

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values, with the environment that the present one would become."""
        return {
            "target": self.target.name,
            "checked": self.checked or None,
            "flags": [dataclasses.asdict(flag) for flag in self],
            "unknown": [dataclasses.asdict(flag) for flag in self.unknown],
            "kept": {flag.name: value for flag, value in self.kept()},
            "environment": self.environment(),
        }

    def _checked(self) -> str:
        if self.checked:
            return f"checked with {self.checked}"
        tool = "libtpu" if self.target.platform == "tpu" else "jaxlib"
        return f"not checked: there is no {tool} here to ask which flags it knows"

    def _table(self) -> Table:
        rows = [(flag.name, flag.value, flag.versions, flag.reason) for flag in self]
        rows += [(flag.name, "left out", flag.versions, f"unknown to {self.checked}") for flag in self.unknown]
        title = f"Flags for {self.target.name}, {self.target.description}"
        return Table(("flag", "value", "JAX", "why"), rows, title=title, footer=self._checked())

    def __rich__(self) -> Any:
        return self._table().__rich__()

    def __str__(self) -> str:
        return str(self._table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()


def xla_flags(target: str | Target, *, host_memory_gib: int | None = None) -> Flags:
    """The settings that a target needs for activations to move while it computes, each with its reason.

    `host_memory_gib` is how much host memory a process may pin for a GPU target. By default three quarters of what
    hosts of that kind commonly have, or of what this machine has where it has GPUs and less memory: as much as one
    process that drives all GPUs of its host can use. Where there is a process for each GPU, say its share.

    Flags that what is installed doesn't know are left out, and found in `unknown`; another process finds out, in less
    than a second, once for each process. JAX's backends aren't started. Raises ValueError for an unknown target and for
    less than one GiB.
    """
    chosen = _target(target)
    if chosen.platform == "tpu":
        if host_memory_gib is not None:
            raise ValueError(f"{chosen.name}: only CUDA has a limit for pinned host memory: leave out host_memory_gib")
        flags, variable = _TPU, LIBTPU
    else:
        flags, variable = _CUDA, XLA
    unknown, checked = _check(variable, tuple((flag.name, flag.value) for flag in flags))
    known = [flag for flag in flags if flag.name not in unknown]
    if chosen.platform == "cuda":
        known += [_SHARE, _pool(chosen, host_memory_gib)]
    return Flags(chosen, known, unknown=(flag for flag in flags if flag.name in unknown), checked=checked)


def _pool(target: Target, given: int | None) -> Flag:
    """The limit of pinned host memory."""
    if given is not None:
        if given < 1:
            raise ValueError(f"host_memory_gib is {given}: at least 1 GiB is needed")
        share = "as asked for"
        return Flag(POOL, str(given), POOL, f"GiB of pinned host memory a process, 64 otherwise; {share}", ">=0.10")
    here = _machine_bytes()
    if here is not None and here < target.host_bytes:
        size, whose = here, f"this machine's {here / _GIB:,.0f}"
    else:
        size, whose = target.host_bytes, f"the {target.host_bytes / _GIB:,.0f} that such hosts have"
    reason = f"GiB of pinned host memory a process, 64 otherwise; three quarters of {whose}"
    return Flag(POOL, str(max(1, size * 3 // 4 // _GIB)), POOL, reason, ">=0.10")


def _machine_bytes() -> int | None:
    """Memory of this machine, or of the container that this is; None without NVIDIA's driver."""
    if not pathlib.Path("/proc/driver/nvidia/version").exists():
        return None
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = pathlib.Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # or `max`
            sizes.append(int(text))
    return min(sizes)


def backends_started() -> bool:
    """Whether JAX has started its backends, without starting them."""
    import jax

    present = jax.config.jax_num_cpu_devices
    try:
        # JAX refuses any change of this once they run, and only then.
        jax.config.update("jax_num_cpu_devices", present + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", present)
    return False


def _own_text(base: Mapping[str, str], variable: str) -> str:
    """What the user has in a variable of flags; where it names a file, as XLA allows, what that holds."""
    text = base.get(variable, "").strip()
    if variable != XLA or not text or text.startswith("-"):
        return text
    try:
        return pathlib.Path(text).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{variable}={text!r} names a file of flags that can't be read: {error}") from None


# A flag and its value, in quotes or without; anything else ends what XLA reads.
_FLAG = re.compile(r"""\s*--?([-\w]*)(?:=(?:'([^']*)'?|"((?:\\.|[^"\\])*)"?)|(\S*))""", re.ASCII | re.DOTALL)


def _parse(text: str) -> dict[str, str]:
    """The flags in such a text, by name."""
    flags: dict[str, str] = {}
    at = 0
    while match := _FLAG.match(text, at):
        name, single, double, bare = match.groups()
        at = match.end()
        if bare is not None:
            value = bare.removeprefix("=") if bare else "true"
        else:
            value = single if single is not None else re.sub(r"\\(.)", r"\1", double)
        flags[name] = value
        if not bare and name.startswith("no"):  # libtpu's way to say false
            flags[name.removeprefix("no")] = "false"
    return flags


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


# A flag that no version knows: if it isn't refused, nothing was read.
_CANARY = "xla_overspill_no_such_flag"
_READ = {
    XLA: "from jaxlib import xla_client; xla_client.CompileOptions()",
    LIBTPU: (
        "import os; from jaxlib import xla_client\n"
        "path = os.environ.get('TPU_LIBRARY_PATH')\n"
        "if not path:\n"
        "    import libtpu; path = libtpu.get_library_path()\n"
        "xla_client.load_pjrt_plugin_dynamically('tpu', path); xla_client.initialize_pjrt_plugin('tpu')"
    ),
}
_REFUSED = re.compile(r"Unknown flags? in \w+:(.*)|[Uu]nknown command line flag '(\w+)'|for flag '?(\w+)")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a nightly build has a name of its own
        return ""


@functools.cache
def _check(variable: str, flags: tuple[tuple[str, str], ...]) -> tuple[frozenset[str], str]:
    """Which flags the installed library refuses, and which library that is; nothing and "" where none can be asked.

    It ends the process over the first unknown flag, so that another process asks it.
    """
    package = "libtpu" if variable == LIBTPU else "jaxlib"
    if importlib.util.find_spec(package) is None or not sys.executable:
        return frozenset(), ""
    refused: set[str] = set()
    while True:
        asked = [f"--{name}={value}" for name, value in (*flags, (_CANARY, "1")) if name not in refused]
        # No question to the cloud's metadata server, and no lock against a process that uses the TPU.
        quiet = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TF_CPP_MIN_LOG_LEVEL": "0"}
        environment = {**os.environ, XLA: "", LIBTPU: "", variable: " ".join(asked), **quiet}
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-c", _READ[variable]],
                env=environment, capture_output=True, text=True, errors="replace", timeout=60,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return frozenset(), ""
        found: set[str] = set()
        for several, one, other in _REFUSED.findall(done.stderr):
            found |= {one, other, *re.findall(r"--(\w+)", several)} - {""}
        known = {name for name, _ in flags}
        new = found & known - refused
        refused |= new
        if _CANARY in found:
            return frozenset(refused), f"{package} {_version(package)}".strip()
        if not new:  # refused for another reason, or nothing was read
            return frozenset(), ""
