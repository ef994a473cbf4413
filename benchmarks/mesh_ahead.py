"""A training step compiled for devices that aren't there: what each would hold, and what they send each other.

    python benchmarks/mesh_ahead.py --target h200 --model llama-3.1-405b --layers 4 --mesh fsdp=16,tensor=8
    python benchmarks/mesh_ahead.py --target tpu-v5p --model deepseek-v3 --layers 4 --mesh fsdp=16,expert=32

Needs packages, not hardware: `pip install 'overspill[gpu-compile]'` or `[tpu-compile]`. Compares the compiler's
argument bytes with those of the sharding rules, and looks for all-gathers that yield all experts of a layer. Exits with
1 when either isn't as it should be. `overspill prove` proves what waits on the host.
"""

import argparse
import collections
import json
import math
import pathlib
import tempfile

from overspill.policies.ahead import compile_ahead
from overspill.policies.report import format_bytes
from overspill.zoo.collectives import find_collectives
from overspill.zoo.inspecting import state_parts
from overspill.zoo.proving import Options, prepare
from overspill.zoo.sharding import shards


def whole_experts(plan, found):
    """All-gathers that yield a layer's weight of all experts: the whole of it, or each device's part of every one."""
    experts, full = set(plan.layout.axes("experts")), []
    rows = [row for row in plan.rows if ".experts." in row.path and len(row.shape) >= 3]
    whole = {math.prod(row.shape[-3:]) for row in rows}
    parts = {row.shape[-3] * math.prod(row.shard[-2:]) for row in rows}
    for entry in found.of("all-gather"):
        sizes = whole | (parts if experts & set(entry.axes or experts) else set())
        # In whatever shape: no other array of these programs is such a multiple.
        if any(math.prod(shape) % size == 0 for _, shape in entry.shapes for size in sizes):
            full.append(entry)
    return full


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h200", help="as for `overspill prove`")
    parser.add_argument("--model", default="llama-3.1-405b")
    parser.add_argument("--layers", type=int, default=4, help="0 for all of them")
    parser.add_argument("--mesh", default="fsdp=16,tensor=8")
    parser.add_argument("--rule", action="append", default=[])
    parser.add_argument("--batch-size", type=int, help="by default one row for each part of a batch")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--placements", "-p", action="append", help="a preset or GLOB=PLACEMENT; later ones win")
    parser.add_argument("--state-memory", action="append", default=[], help="such as 'optimizer.*=host'")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--text", type=pathlib.Path, help="write the compiled program here")
    options = parser.parse_args()

    family = prepare(Options(
        model=options.model, target=options.target, mesh=options.mesh, rules=tuple(options.rule),
        batch_size=options.batch_size, sequence_length=options.sequence_length,
        placements=(",".join(options.placements or ["offload_all"]),), state_memory=tuple(options.state_memory),
        layers=options.layers or None,
    ))  # fmt: skip
    (model,), state, layout = family.models.values(), family.state(), family.layout
    with tempfile.TemporaryDirectory() as folder:
        text = options.text or pathlib.Path(folder, "text")
        compiled = compile_ahead(family.step(model), state, family.batch(), target=family.place, text=text)
        print(*family.head(), compiled, sep="\n")
        if compiled.error is not None:
            return 1
        found = find_collectives(text.read_text(), layout)
    plan = shards(model, layout)
    by_rules = collections.Counter()
    for part in state_parts(state, plan):
        by_rules[part.memory] += part.shard_bytes
    cuts = layout.size(layout.axes("batch")) * layout.size(layout.axes("sequence"))
    by_rules["device"] += family.batch_size * family.sequence_length // cuts * (4 * 4 + 1)
    full = whole_experts(plan, found)
    exchanged = len(found.of("all-to-all")) + len(found.of("ragged-all-to-all"))
    print(f"lowered in {compiled.lower_seconds:.1f} s, by a compiler of {format_bytes(compiled.compiler_memory)}")
    print(found)
    print(f"all-gathers of all experts of a layer: {len(full)}; all-to-alls: {exchanged}")
    failed = bool(full) or bool(layout.axes("experts")) and not exchanged
    for memory, sizes in (("device", compiled.device), ("host", compiled.host)):
        print(f"arguments on the {memory} {sizes['argument']:,} bytes, by the rules {by_rules[memory]:,}")
        # Scalars and small arrays are padded to a TPU's tiles.
        padding = 2**-10 * by_rules[memory] if family.place.platform == "tpu" else 0
        failed |= abs(sizes["argument"] - by_rules[memory]) > padding
    if options.json:
        result = {
            "model": options.model, "layers": family.config.num_hidden_layers, "mesh": dict(layout.mesh.shape),
            "target": compiled.target, "jax": compiled.jax, "batch": [family.batch_size, family.sequence_length],
            "rules": {k: list(v) for k, v in layout.rules}, "lower_seconds": round(compiled.lower_seconds, 1),
            "compile_seconds": round(compiled.compile_seconds, 1), "argument_bytes": compiled.device["argument"],
            "expected_argument_bytes": by_rules["device"], "device_bytes": family.place.device_bytes,
            "temp_bytes": compiled.device["temp"], "host_temp_bytes": compiled.host["temp"],
            "full_expert_gathers": len(full), "exchanges": exchanged, "collectives": found.as_json(),
        }  # fmt: skip
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
