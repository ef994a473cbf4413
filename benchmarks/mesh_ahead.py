"""A training step compiled for devices that aren't there: what each would hold, and what they send each other.

    python benchmarks/mesh_ahead.py --target h200 --model llama-3.1-405b --layers 4 --mesh fsdp=16,tensor=8
    python benchmarks/mesh_ahead.py --target v5p --model deepseek-v3 --layers 4 --mesh fsdp=16,expert=32

Needs jax-cuda13-plugin, jax-cuda13-pjrt (`--no-deps` is enough) and nvidia-cuda-nvcc for GPUs, or jax[tpu] for TPUs:
packages, not hardware. Compares the compiler's argument bytes with those of the sharding rules, and looks for
all-gathers that yield all experts of a layer. Exits with 1 when either isn't as it should be.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {os.environ.get('XLA_FLAGS', '')}".strip()
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
if (found := importlib.util.find_spec("nvidia")) is not None:
    # ptxas comes with the wheel of nvcc.
    folders = [str(path) for root in found.submodule_search_locations for path in pathlib.Path(root).glob("cu*/bin")]
    os.environ["PATH"] = os.pathsep.join([*folders, os.environ["PATH"]])

import jax  # noqa: E402  after the environment
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

from overspill import zoo  # noqa: E402
from overspill.policies.report import format_bytes  # noqa: E402
from overspill.zoo.collectives import find_collectives  # noqa: E402
from overspill.zoo.inspecting import state_parts  # noqa: E402
from overspill.zoo.meshes import layout_of, parse_mesh  # noqa: E402
from overspill.zoo.run_options import parse_placements, parse_state_memory  # noqa: E402
from overspill.zoo.sharding import shards  # noqa: E402

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 } device_description_str: "NVIDIA H200"
"""


MEMORY = {"h200": 151397597184, "v5p": 95 * 2**30}  # XLA refuses what doesn't fit a TPU, not what doesn't fit a GPU


def devices(target, count):
    """`count` devices of a machine that isn't there."""
    if target == "h200":
        hosts, each = max(count // 8, 1), min(count, 8)
        topology = f"1x{hosts}x{each}"
        return topologies.get_topology_desc("h200", platform="cuda", topology=topology, target_config=H200).devices
    # Chips of v5p are in a torus; each is one device.
    side = {64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}[count]
    return topologies.get_topology_desc(platform="tpu", topology_name=f"v5p:{side}").devices


def shortened(name, layers):
    """The config of `name` with so many layers, the last ones of them with experts where it has experts."""
    config = zoo.from_config(name)
    if not layers:
        return config
    fewer = {"num_hidden_layers": layers}
    if getattr(config, "first_k_dense_replace", 0):
        fewer["first_k_dense_replace"] = min(config.first_k_dense_replace, max(layers // 4, 1))
    return dataclasses.replace(config, **fewer)


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
    parser.add_argument("--target", choices=("h200", "v5p"), default="h200")
    parser.add_argument("--model", default="llama-3.1-405b")
    parser.add_argument("--layers", type=int, default=4, help="0 for all of them")
    parser.add_argument("--mesh", default="fsdp=16,tensor=8")
    parser.add_argument("--rule", action="append", default=[])
    parser.add_argument("--batch-size", type=int, help="by default one row for each part of a batch")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--placements", "-p", action="append")
    parser.add_argument("--state-memory", action="append", default=[], help="such as 'optimizer.*=host'")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--text", type=pathlib.Path, help="write the compiled program here")
    options = parser.parse_args()

    sizes = parse_mesh(options.mesh)
    all_devices = np.array(devices(options.target, math.prod(sizes.values())))
    mesh = Mesh(all_devices.reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    layout = layout_of(mesh, options.rule)
    config = shortened(options.model, options.layers)
    model = parse_placements(zoo.abstract(config, dtype=jnp.bfloat16), tuple(options.placements or ("offload_all",)))
    optimizer = zoo.adamw(1e-3)
    plan = shards(model, layout)
    resident = parse_state_memory(tuple(options.state_memory))
    state = zoo.init_state(
        model, optimizer, key=jax.random.key(0), master_dtype=jnp.float32, mesh=layout, state_memory=resident
    )
    step = zoo.make_train_step(model, optimizer, mesh=layout)
    rows = options.batch_size or layout.size(layout.axes("batch"))
    shape = (rows, options.sequence_length)
    ids, flags = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.bool_))
    batch = zoo.Batch(ids, ids, ids, ids, flags)

    begin = time.perf_counter()
    lowered = step.lower(state, batch)
    lower_seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    compiled = lowered.compile()
    compile_seconds = time.perf_counter() - begin
    text = compiled.as_text()
    if options.text:
        options.text.write_text(text)
    found = find_collectives(text, layout)
    memory = compiled.memory_analysis()
    cuts = layout.size(layout.axes("batch")) * layout.size(layout.axes("sequence"))
    parts = state_parts(state, plan)
    on_host = sum(part.shard_bytes for part in parts if part.memory == "host")
    expected = sum(part.shard_bytes for part in parts if part.memory == "device")
    expected += math.prod(shape) // cuts * (4 * 4 + 1)
    full = whole_experts(plan, found)
    exchanged = len(found.of("all-to-all")) + len(found.of("ragged-all-to-all"))
    print(f"{options.model} with {config.num_hidden_layers} layers, {shape[0]} x {shape[1]} tokens, "
          f"{math.prod(sizes.values())} x {options.target} as {options.mesh}, JAX {jax.__version__}")  # fmt: skip
    print(f"lowered in {lower_seconds:.1f} s, compiled in {compile_seconds:.1f} s")
    print(f"arguments {memory.argument_size_in_bytes:,} bytes a device, by the rules {expected:,}")
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    if on_host:
        print(f"arguments on the host {memory.host_argument_size_in_bytes:,}, by the rules {on_host:,}")
    print(f"scratch {format_bytes(memory.temp_size_in_bytes)}, host {format_bytes(memory.host_temp_size_in_bytes)}; a "
          f"device needs {format_bytes(needed)} and has {format_bytes(MEMORY[options.target])}")  # fmt: skip
    print(found)
    print(f"all-gathers of all experts of a layer: {len(full)}; all-to-alls: {exchanged}")
    failed = bool(full) or bool(layout.axes("experts")) and not exchanged
    # Scalars and small arrays are padded to the hardware's tiles.
    padding = 2**-10 * expected if options.target == "v5p" else 0
    failed |= abs(memory.argument_size_in_bytes - expected) > padding
    if options.json:
        result = {
            "model": options.model, "layers": config.num_hidden_layers, "mesh": sizes, "target": options.target,
            "jax": jax.__version__, "batch": list(shape), "rules": {k: list(v) for k, v in layout.rules},
            "lower_seconds": round(lower_seconds, 1), "compile_seconds": round(compile_seconds, 1),
            "argument_bytes": memory.argument_size_in_bytes, "expected_argument_bytes": expected,
            "device_bytes": MEMORY[options.target], "temp_bytes": memory.temp_size_in_bytes,
            "host_temp_bytes": memory.host_temp_size_in_bytes,
            "full_expert_gathers": len(full), "exchanges": exchanged, "collectives": found.as_json(),
        }  # fmt: skip
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
