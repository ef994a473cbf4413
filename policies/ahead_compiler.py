"""The process that compiles for hardware that isn't there.

Reads `request.json` and the StableHLO in `program` of a folder, and writes `answer.json` and the compiled program's
`text` beside them. The environment is the caller's to set, since XLA reads its flags when it is loaded.
"""

import json
import math
import os
import pathlib
import re
import resource
import shutil
import sys
import threading
import time
from typing import Any

from .evidence import Evidence, read

_KINDS = ("argument", "output", "alias", "temp")
# With these a TPU's compiler says on its standard error how it counts a program's memory, and writes no files.
SAYS_MEMORY = {"TPU_MIN_LOG_LEVEL": "0", "TPU_STDERR_LOG_LEVEL": "0", "TPU_LOG_DIR": "disabled"}
_LINE = 400  # characters of an error: it may go on with a dump of the program
# What a program takes of the device's memory, a line each until the next memory's.
_REQUIREMENT = re.compile(r"^Program hbm requirement .*\n(?: +.*\n)*", re.MULTILINE)
_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main(folder: str) -> None:
    """Compiles what is in `folder`, and ends without a trace when the standard input does."""
    room = pathlib.Path(folder)
    threading.Thread(target=_follow, args=(room,), daemon=True).start()
    request = json.loads((room / "request.json").read_text())
    devices = _devices(request)
    start = time.perf_counter()
    answer: dict[str, Any] = {"error": None, "flops": None}
    try:
        executable = _compile((room / "program").read_bytes(), devices)
    except Exception as error:
        if (sizes := _refused(str(error))) is None:
            failed = f"{type(error).__name__}: {error}"
            _write(room, {"failed": failed if len(failed) <= _LINE else f"{failed[:_LINE]}..."})
            sys.exit(1)
        answer |= sizes | {"compile_seconds": time.perf_counter() - start}
        text = ""
    else:
        answer["flops"] = _flops(executable)
        text = "\n".join(module.to_string() for module in executable.hlo_modules())
        answer["compile_seconds"] = time.perf_counter() - start
        answer |= describe(executable.get_compiled_memory_stats(), text)
    (room / "text").write_text(text)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer["compiler_memory"] = peak * (1 if sys.platform == "darwin" else 1024)
    _write(room, answer)


def _write(room: pathlib.Path, answer: dict[str, Any]) -> None:
    part = room / "answer.part"
    part.write_text(json.dumps(answer))
    part.rename(room / "answer.json")


def _follow(room: pathlib.Path) -> None:
    """Waits for the end of whoever asked, who may be killed, and leaves nothing behind then."""
    os.read(0, 1)
    shutil.rmtree(room, ignore_errors=True)
    os._exit(1)


def describe(stats: Any, text: str) -> dict[str, Any]:
    """The sizes of a compiled program on one device, by kind and memory, and the evidence in its text."""
    device = {kind: getattr(stats, f"{kind}_size_in_bytes") for kind in _KINDS}
    host = {kind: getattr(stats, f"host_{kind}_size_in_bytes") for kind in _KINDS}
    device["code"], host["code"] = stats.generated_code_size_in_bytes, stats.host_generated_code_size_in_bytes
    return {"device": device, "host": host, "evidence": read(text).as_json()}


def scratch(said: str) -> int | None:
    """Bytes of scratch by what a TPU's compiler said: its heap, and what kernels take beside it; None if it didn't.

    They and the program's code are what it adds to the arguments to see whether a program fits. Its memory analysis has
    other figures: `temp_size_in_bytes` counts the heap's gaps twice, and `peak_memory_in_bytes` not at all.
    """
    found = _REQUIREMENT.search(said)
    sizes = re.findall(r"^ +(?:scoped|HLO temp) +([\d.]+)([BKMGT])", found[0], re.MULTILINE) if found else []
    return sum(int(float(size) * _UNITS[unit]) for size, unit in sizes) if found else None


def _devices(request: dict[str, Any]) -> list[Any]:
    """Devices of the target, described."""
    from jax.experimental import topologies

    if request["platform"] == "cuda":
        _discover()
    found = topologies.get_topology_desc(**request["topology"])
    devices = list(found.devices)
    if len(devices) != request["devices"]:
        raise ValueError(f"the topology has {len(devices)} devices, and the program is for {request['devices']}")
    return devices


def _discover() -> None:
    """Older versions of JAX load the plugins of platforms that they may not use only when told to."""
    import jax._src.xla_bridge as bridge

    getattr(bridge, "discover_pjrt_plugins", lambda: None)()


def _compile(program: bytes, devices: list[Any]) -> Any:
    import numpy as np
    from jax.extend.backend import get_compile_options
    from jax.extend.mlir import ir
    from jax.interpreters import mlir
    from jaxlib import xla_client

    with mlir.make_ir_context():
        module = ir.Module.parse(program)
    assignment = np.array([[device.id for device in devices]])
    options = get_compile_options(num_replicas=1, num_partitions=len(devices), device_assignment=assignment)
    options.executable_build_options.use_spmd_partitioning = True
    options.executable_build_options.use_shardy_partitioner = True
    return devices[0].client.compile(module, xla_client.DeviceList(tuple(devices)), options)


def _flops(executable: Any) -> float | None:
    try:
        found = executable.cost_analysis()
    except Exception:  # not implemented for GPUs that aren't there
        return None
    found = found[0] if isinstance(found, list) else found
    return None if not found or not math.isfinite(found.get("flops", math.nan)) else float(found["flops"])


def _refused(message: str) -> dict[str, Any] | None:
    """The sizes in a TPU compiler's refusal of a program that doesn't fit the device or the host; None for others."""
    line = next((line for line in message.splitlines() if "RESOURCE_EXHAUSTED" in line), "").strip()
    used = re.search(r"[Uu]sed ([\d.]+)([BKMGT]?) of|\(([\d.]+)([BKMGT]?)\)", line)
    host = "memory space host" in line
    if used is None or not (host or "hbm" in line.lower()):
        return None
    size, unit = (one or other for one, other in zip(used.groups()[:2], used.groups()[2:], strict=True))
    none = dict.fromkeys((*_KINDS, "code"), 0)
    nothing = Evidence((), (), (0, 0), (), 0, (), 0, 0).as_json()
    full = none | {"temp": int(float(size) * _UNITS[unit])}
    sizes = {"device": none if host else full, "host": full if host else none}
    return sizes | {"evidence": nothing, "error": line if len(line) <= _LINE else f"{line[:_LINE]}..."}

