"""A training step over meshes of fake devices against the same step on one device.

    python benchmarks/meshes.py [MODEL]

Eight CPU devices share one machine, so the work is the same and the ratio of step times is what cutting, exchanging
and gathering cost on top. Prints it, the ratio of compile times, and what one device holds: its part of the state,
and what it sends. The last line has the state in host memory, which on a CPU costs copies only.
"""

import statistics
import sys
import time

import jax
from jax.sharding import AxisType

jax.config.update("jax_num_cpu_devices", 8)

from overspill import zoo  # noqa: E402  after the devices
from overspill.policies.report import format_bytes  # noqa: E402
from overspill.zoo.collectives import find_collectives  # noqa: E402

BATCH, SEQUENCE, RUNS = 16, 256, 5
MESHES = ("data=8", "fsdp=8", "expert=8", "sequence=8", "tensor=2", "fsdp=2,expert=2,tensor=2")


def mesh_of(text):
    sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def main(name="overspill-deepseek-tiny"):
    optimizer = zoo.adamw(1e-3)
    batch = next(zoo.PackedDataset(zoo.load_corpus(), SEQUENCE).batches(BATCH))
    options = {"one device": {}, **{text: {"mesh": mesh_of(text)} for text in MESHES}}
    options["state on the host"] = {"state_memory": {"params.*": "host", "optimizer.*": "host"}}
    states, steps, compile_seconds, notes = {}, {}, {}, {}
    for key, chosen in options.items():
        model = zoo.build(name, key=jax.random.key(0))
        states[key] = zoo.init_state(model, optimizer, key=jax.random.key(1), **chosen)
        steps[key] = zoo.make_train_step(model, optimizer, **chosen)
        lowered = steps[key].lower(states[key], batch)
        start = time.perf_counter()
        compiled = lowered.compile()
        compile_seconds[key] = time.perf_counter() - start
        held = sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(states[key].params))
        notes[key] = f"{format_bytes(held):>12}"
        if "mesh" in chosen:
            found = find_collectives(compiled.as_text(), zoo.layout(chosen["mesh"]))
            notes[key] += f"{format_bytes(found.bytes):>14}"
    seconds = {key: [] for key in options}
    for run in range(RUNS + 1):
        for key in options:  # in turn, so that a drifting machine hits all alike
            start = time.perf_counter()
            states[key], metrics = steps[key](states[key], batch)
            jax.block_until_ready(metrics.loss)
            if run:
                seconds[key].append(time.perf_counter() - start)
    print(f"{name}, batch {BATCH} x {SEQUENCE}, JAX {jax.__version__} on {jax.devices()[0].device_kind}")
    print(f"{'':28}{'step':>8}{'compile':>10}{'parameters':>12}{'collectives':>14}")
    for key in options:
        ratio = statistics.median(a / b for a, b in zip(seconds[key], seconds["one device"], strict=True))
        print(f"{key:28}{ratio:8.2f}{compile_seconds[key] / compile_seconds['one device']:10.2f}{notes[key]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
