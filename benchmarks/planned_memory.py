"""Memory of plans as predicted beside what the hardware's compiler says of them.

    python benchmarks/planned_memory.py --json benchmarks/results/planned_memory.json

Each model is planned with less device memory than keeping everything takes, so that the planner has to choose, and the
plan is compiled. Ratios are predicted over compiled. Needs the extras gpu-compile and, for TPUs, tpu-compile; what
can't be compiled here is left out. A minute a case.
"""

import argparse
import json
import pathlib
from typing import Any

from overspill.policies.ahead import CompileError
from overspill.policies.report import Table, format_bytes
from overspill.zoo.planning import Options, prepare

# Between the least memory that a step was simulated with and the most, or the device's limit: how much there is.
CASES = (
    (Options("llama-3.1-8b", "h200"), 0.3),
    (Options("deepseek-v2-lite", "h200"), 0.3),
    (Options("llama-3.3-70b", "h200", devices=32), 0.5),
    (Options("mixtral-8x7b", "h200", devices=16), 0.3),
    (Options("qwen3-30b-a3b", "gb200", devices=16), 0.3),
    (Options("llama-3.1-8b", "gb200", devices=8, global_batch=16), 0.3),
    (Options("llama-3.2-3b", "gb200", devices=8, global_batch=32), 0.6),
    (Options("llama-3.1-405b", "gb200", devices=128), 0.2),
    (Options("llama-3.1-8b", "tpu-v5p", devices=8), 0.3),
    (Options("deepseek-v2-lite", "tpu-v5p", devices=8), 0.3),
)


def measure(options: Options, share: float) -> dict[str, Any]:
    """Predicted and compiled bytes of one device. Raises ModuleNotFoundError without the compiler, and CompileError."""
    planning = prepare(options)
    planner = planning.planner()
    sizes = [reference.footprint.device_bytes for reference in planner.references]
    most = min(max(sizes), planner.problem.limits.device_bytes)
    plan = planner.limited(device_bytes=min(sizes) + share * (most - min(sizes))).plan()
    proof = planning.verify(plan)
    compiled = proof.compiled
    return {
        "model": options.model,
        "hardware": options.hardware,
        "devices": planner.devices,
        "tokens": plan.tokens,
        "predicted_device_bytes": plan.device_bytes,
        "compiled_device_bytes": compiled.device_bytes,
        "predicted_host_bytes": plan.offloaded_bytes,
        "compiled_host_bytes": compiled.evidence.host_buffer_bytes,
        "refused": compiled.error,
        "faults": [str(fault) for fault in proof.faults],
        "jax": compiled.jax,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=pathlib.Path)
    path = parser.parse_args().json
    found = []
    for options, share in CASES:
        try:
            found.append(measure(options, share))
        except (ModuleNotFoundError, CompileError) as error:
            print(f"{options.model} on {options.hardware}: {error}")
            continue
        print(f"{options.model} on {options.hardware}: done", flush=True)
    rows = []
    for one in found:
        mine, theirs = one["predicted_device_bytes"], one["compiled_device_bytes"]
        equal = one["predicted_host_bytes"] == one["compiled_host_bytes"]
        where = f"{one['devices']} x {one['hardware']}"
        ratio = "refused" if one["refused"] else f"{mine / theirs:.3f}"
        sizes = map(format_bytes, (mine, theirs, one["compiled_host_bytes"]))
        predicted, compiled, host = sizes
        rows.append((one["model"], where, predicted, compiled, ratio, host, "yes" if equal else "no"))
    print(Table(("model", "on", "predicted", "compiled", "ratio", "on the host", "as predicted"), rows))
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
