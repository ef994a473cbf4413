"""Compiling a training step for a GPU or TPU that isn't there, and what its compiler says of it."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from .accelerators import Target, target as find_target
from .ahead_compiler import SAYS_MEMORY, scratch
from .calls import is_step, prepare
from .evidence import Evidence
from .flags import FRACTION, Flags, xla_flags
from .report import Table, format_bytes

_PLUGINS = {"cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin"), "tpu": ("libtpu",)}
_EXTRAS = {"cuda": "gpu-compile", "tpu": "tpu-compile"}
# What XLA leaves of a device's memory to itself, where nothing says otherwise.
_FRACTION = {"cuda": 0.75, "tpu": 1.0}
_LINE = 600  # characters of what a compiler says
_START = "import sys; sys.path += sys.argv[2:]; from overspill.policies import ahead_compiler as c; c.main(sys.argv[1])"


class CompileError(RuntimeError):
    """A program couldn't be compiled for a target; the message has the compiler's reason."""


@dataclasses.dataclass(frozen=True)
class Ahead:
    """What the compiler of a target says of a program. Bytes are those of one device.

    - `platform`: `"cuda"` or `"tpu"`.
    - `device`, `host`: bytes by kind in device memory and in host memory for it: `"argument"` (state and batch),
      `"output"`, `"alias"` (outputs that take the place of donated arguments), `"temp"` (scratch, kept activations
      among it) and `"code"`.
    - `capacity`: bytes of device memory that a program can have on the target.
    - `error`: what the compiler said instead of compiling, for a TPU whose memory, or its host's, is too small.
    - `evidence`: the host buffers, transfers and inserted recomputation of the compiled program.
    - `flops`: as XLA counts them, each loop's body once; None where it doesn't (GPUs).
    - `compile_seconds`, `lower_seconds`, `compiler_memory`: what compiling took, in seconds and bytes of memory.
    - `flags`: the environment variables that the compiler was given.
    - `cached`: whether an earlier compilation of the same program was taken.
    """

    target: str
    platform: str
    description: str
    devices: int
    jax: str
    device: dict[str, int]
    host: dict[str, int]
    capacity: int
    error: str | None
    evidence: Evidence
    flops: float | None
    compile_seconds: float
    lower_seconds: float
    compiler_memory: int
    flags: dict[str, str]
    cached: bool = False

    @property
    def device_bytes(self) -> int:
        """Bytes that the program needs in device memory: arguments, scratch, code, and results beside them.

        By this figure a TPU's compiler decides whether a program fits, to the two decimals that it states. Of a program
        for the TPUs that are here, which `policies.prove` compiles in this process, it is an upper bound.
        """
        return _needed(self.device)

    @property
    def host_bytes(self) -> int:
        """Bytes that the program needs in host memory for one device."""
        return _needed(self.host)

    @property
    def fits(self) -> bool:
        """Whether the program has room: a TPU's compiler refuses one that has not, a GPU's never does."""
        return self.error is None and (self.platform == "tpu" or self.device_bytes <= self.capacity)

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        out = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        out["evidence"] = self.evidence.as_json()
        return out | {"device_bytes": self.device_bytes, "host_bytes": self.host_bytes, "fits": self.fits}

    def table(self) -> Table:
        """Bytes by kind, and whether they fit."""
        rows = [(kind, format_bytes(self.device[kind]), format_bytes(self.host[kind])) for kind in self.device]
        rows.append(("needed", format_bytes(self.device_bytes), format_bytes(self.host_bytes)))
        fits = f"a program can have {format_bytes(self.capacity)}: this one {'fits' if self.fits else 'does not fit'}"
        footer = f"{fits}; compiled in {self.compile_seconds:.0f} s with JAX {self.jax}"
        if self.error:
            footer += f"\n{self.error}"
        title = f"One of {self.devices:,} x {self.description}"
        return Table(("bytes", "device", "host"), rows, title=title, footer=footer)

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def compile_ahead(
    function: Callable[..., Any],
    /,
    *args: Any,
    target: str | Target,
    flags: Flags | Mapping[str, str] | None = None,
    cache: bool = True,
    text: str | os.PathLike | None = None,
    **kwargs: Any,
) -> Ahead:
    """The call `function(*args, **kwargs)`, compiled for `target`, which needn't be there.

    XLA's own compiler for the target runs in another process, so that neither its environment nor its end touches
    this one. It needs packages, no hardware: `pip install 'overspill[gpu-compile]'` for GPUs, `[tpu-compile]` for
    TPUs.

    **Arguments:**

    - `function`: a training step, made with `mesh=` for as many devices as wanted (`jax.sharding.AbstractMesh` has
        any number); or a loss or a layer, which is compiled with the backward pass of all its floating-point arrays.
    - `args`, `kwargs`: its arguments, concrete or abstract: only shapes, dtypes, shardings and memory kinds count.
    - `target`: a name of `policies.targets()`, such as `"gb200"` or `"tpu-v5p:8x8x8"`.
    - `flags`: what the compiler's environment is: by default `policies.xla_flags(target)` and beside them what
        `XLA_FLAGS` and `LIBTPU_INIT_ARGS` say here; a mapping of environment variables is taken as it is.
    - `cache`: whether to take the result of an earlier compilation of the same program for the same target by the
        same versions with the same flags. They are kept in `OVERSPILL_CACHE`, or else in the user's cache folder.
    - `text`: a file to write the compiled program to, as HLO text.

    Raises ModuleNotFoundError with what to install when the target's compiler is missing; ValueError for an unknown
    target, for a target that doesn't come in so many devices, and for arguments that don't fit the function;
    CompileError when the compiler fails for another reason than too little memory, which is no error.
    """
    given = {"flags": flags is not None, "cache": cache is not True, "text": text is not None, "target": True}
    check_options(function, [name for name, there in given.items() if there])
    place = find_target(target)
    plugin = require_compiler(place.platform)
    start = time.perf_counter()
    module = lower(function, args, kwargs, place.platform).compiler_ir("stablehlo")
    lower_seconds = time.perf_counter() - start
    devices = int(module.operation.attributes["mhlo.num_partitions"])
    if flags is None:
        flags = xla_flags(place)
    variables = dict(flags.environment() if isinstance(flags, Flags) else flags)
    fraction = _fraction(variables, place.platform)
    if place.platform == "cuda":
        # Nothing can be timed on a GPU that isn't there, and trying takes longer; memory is the same.
        variables["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {variables.get('XLA_FLAGS', '')}".strip()
    request = {"platform": place.platform, "devices": devices, "topology": place.topology_arguments(devices)}
    program = mlir.module_to_bytecode(module)
    identity = [_without_places(module), request, variables, plugin, jax.__version__]
    kept = _cache_file(json.dumps(identity, sort_keys=True)) if cache else None
    found = None if text is not None else _read(kept)
    if found is None:
        found = _compile(program, request, variables, place, text)
        _write(kept, found)
        cached = False
    else:
        cached = True
    return Ahead(
        target=place.name,
        platform=place.platform,
        description=place.description,
        devices=devices,
        jax=jax.__version__,
        device=found["device"],
        host=found["host"],
        capacity=int(place.device_bytes * fraction),
        error=found["error"],
        evidence=Evidence.from_json(found["evidence"]),
        flops=found["flops"],
        compile_seconds=found["compile_seconds"],
        lower_seconds=lower_seconds,
        compiler_memory=found["compiler_memory"],
        flags=variables,
        cached=cached,
    )


def check_options(function: Callable[..., Any], options: Iterable[str]) -> None:
    """Raises TypeError where an option for the compiler might be meant for the function, which has one of that name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    for name in options:
        if name in parameters:
            raise TypeError(
                f"{name}= is an option of compiling, and {function!r:.80} has a parameter of that name: fix the "
                f"function's own by a lambda or functools.partial around it, without {name}"
            )


def _fraction(variables: Mapping[str, str], platform: str) -> float:
    """The share of a device's memory that a program can have."""
    text = variables.get(FRACTION, str(_FRACTION[platform]))
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise ValueError(f"{FRACTION} is {text!r}: it is a share of the device's memory, more than 0 and at most 1")
    return share


def require_compiler(platform: str) -> str:
    """The package, with its version, that compiles for `platform`.

    Raises ModuleNotFoundError, saying what to install, when there is none, when it is another version than jaxlib, and
    when NVIDIA's assembler is missing.
    """
    extra = f"pip install 'overspill[{_EXTRAS[platform]}]'"
    for name in _PLUGINS[platform]:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        jaxlib = importlib.metadata.version("jaxlib")
        if platform == "cuda" and version != jaxlib:
            raise ModuleNotFoundError(
                f"{name} {version} can't compile for jaxlib {jaxlib}: pip install {name}=={jaxlib}"
            )
        if platform == "cuda" and shutil.which("ptxas", path=_path()) is None:
            raise ModuleNotFoundError(f"compiling for GPUs needs ptxas, of CUDA's toolkit or of a package: {extra}")
        return f"{name} {version}"
    what = {"cuda": "GPUs", "tpu": "TPUs"}[platform]
    raise ModuleNotFoundError(f"compiling for {what} needs their compiler, a package that needs no hardware: {extra}")


def _path() -> str:
    """Where programs are looked for: in NVIDIA's packages first, one of which has its assembler."""
    found = importlib.util.find_spec("nvidia")
    roots = [pathlib.Path(root) for root in (found.submodule_search_locations or ())] if found is not None else []
    folders = [str(path) for root in roots for path in (*root.glob("cu*/bin"), *root.glob("cuda_nvcc/bin"))]
    return os.pathsep.join([*folders, os.environ.get("PATH", "")])


def _needed(sizes: Mapping[str, int]) -> int:
    return sizes["argument"] + sizes["temp"] + sizes["code"] + sizes["output"] - sizes["alias"]


def lower(function: Any, args: tuple, kwargs: dict, platform: str | None = None) -> jax.stages.Lowered:
    """The call with both passes, lowered for the devices of its arguments, or for as many of another platform."""
    if is_step(function):
        return function.lower(*args, **kwargs, platform=platform)
    call = prepare(function, args, kwargs)
    mesh = next((s.mesh for s in call.shardings if isinstance(s, NamedSharding)), None)
    pairs = zip(call.inputs, call.shardings, strict=True)
    inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_beside(mesh, sharding)) for x, sharding in pairs]
    platforms = None if platform is None else (platform,)
    return jax.jit(call.function).trace(inputs).lower(lowering_platforms=platforms)


def _beside(mesh: Any, sharding: Any) -> Any:
    """Where an array on one device lies beside others that are cut over a mesh: whole on every device."""
    if mesh is None or isinstance(sharding, NamedSharding | None):
        return sharding
    return NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind)


def _without_places(module: Any) -> str:
    """The program's digest, whatever files and lines it comes from."""
    return hashlib.sha256(module.operation.get_asm(enable_debug_info=False).encode()).hexdigest()


def _compile(
    program: bytes, request: dict[str, Any], variables: Mapping[str, str], place: Target, text: str | os.PathLike | None
) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")} | dict(variables)
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "PATH": _path(),
        # Two processes would wait for one lock, and the cloud's metadata for an answer.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        **(SAYS_MEMORY if place.platform == "tpu" else {}),
    }
    with tempfile.TemporaryDirectory(prefix="overspill-") as folder:
        room = pathlib.Path(folder)
        (room / "program").write_bytes(program)
        (room / "request.json").write_text(json.dumps(request))
        # The same packages as here, wherever this interpreter has them from; but not what shadows Python's own.
        command = [sys.executable, "-P", "-c", _START, folder, *(path for path in sys.path if path)]
        with (room / "said").open("wb") as said:
            # It ends when its input does, and that is when this process does, in whatever way.
            process = subprocess.Popen(
                command, env=environment, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said
            )
            try:
                code = process.wait()
            finally:
                process.kill()
                process.wait()
                process.stdin.close()
        answer = room / "answer.json"
        found = json.loads(answer.read_text()) if answer.exists() else {}
        words = (room / "said").read_text(errors="replace")
        if code or "device" not in found:
            reason = found.get("failed") or _reason(code, words)
            raise CompileError(f"compiling for {place.description} failed: {reason}")
        if place.platform == "tpu" and found["error"] is None and (size := scratch(words)) is not None:
            found["device"]["temp"] = size
        if text is not None:
            pathlib.Path(text).write_bytes((room / "text").read_bytes() if (room / "text").exists() else b"")
        return found


def _reason(code: int, said: str) -> str:
    """The line in which a process that failed says why."""
    lines = [line.strip()[:_LINE] for line in said.splitlines() if line.strip()]
    if code < 0:
        # A failed check of XLA's: F, date, time, thread, file:line], message.
        fatal = [line for line in lines if line.startswith("F") and "] " in line]
        reason = fatal[-1].split("] ", 1)[1] if fatal else (lines[-1] if lines else "it said nothing")
        ended = f"the compiler was ended by signal {-code}"
        return f"{ended}{' (killed: too little memory?)' if code == -9 else ''}: {reason}"
    return lines[-1] if lines else f"the compiler ended with {code} and said nothing"


def _cache_file(identity: str) -> pathlib.Path | None:
    """Where the result for a program is kept; None where there is no folder for it."""
    rooms = ("ahead_compiler", "evidence", "hlo", "hlo_buffers", "hlo_moves")  # a new reader reads anew
    code = [pathlib.Path(__file__).with_name(f"{room}.py").read_bytes() for room in rooms]
    name = hashlib.sha256(identity.encode() + b"".join(code)).hexdigest()[:40]
    if folder := os.environ.get("OVERSPILL_CACHE"):
        return pathlib.Path(folder) / "ahead" / f"{name}.json"
    try:
        root = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    except RuntimeError:  # no home
        return None
    return root / "overspill" / "ahead" / f"{name}.json"


def _read(path: pathlib.Path | None) -> dict[str, Any] | None:
    """A kept result; None where there is none, or a damaged one."""
    if path is None:
        return None
    try:
        found = json.loads(path.read_text())
        Evidence.from_json(found["evidence"])
        wanted = {"argument", "output", "alias", "temp", "code"}
        sizes = [found[memory][kind] for memory in ("device", "host") for kind in wanted]
        numbers = [*sizes, found["compile_seconds"], found["compiler_memory"], found["flops"] or 0]
        whole = all(isinstance(n, int | float) for n in numbers) and isinstance(found["error"], str | None)
        return found if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(path: pathlib.Path | None, found: dict[str, Any]) -> None:
    """Keeps a result, whole or not at all. That it can't be kept is no reason to fail."""
    if path is None:
        return
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            part = pathlib.Path(file.name)
            json.dump(found, file)
        os.replace(part, path)
    except OSError:
        if part is not None:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
