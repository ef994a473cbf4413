"""A training step under every preset against the same step without any policy.

    python benchmarks/placements.py [MODEL]

Prints step time and compile time as multiples of no policy's, XLA's scratch memory, and the bytes that the census
finds on the device and on the host. On a CPU offloaded values stay where they are, so only recomputation shows.
"""

import statistics
import sys
import time

import jax

from overspill import policies, zoo

BATCH, SEQUENCE, RUNS = 4, 256, 7


def main(name="overspill-deepseek-tiny"):
    model = zoo.build(name, key=jax.random.key(0))
    optimizer = zoo.adamw(1e-3)
    batch = next(zoo.PackedDataset(zoo.load_corpus(), SEQUENCE).batches(BATCH))
    variants = {"no policy": zoo.make_train_step(model, optimizer, checkpoint=False)}
    for preset in policies.presets():
        try:
            variants[preset] = zoo.make_train_step(policies.place(model, preset), optimizer)
        except ValueError as error:
            print(f"left out: {error}")
    state = zoo.init_state(model, optimizer, key=jax.random.key(1))
    compiled, compile_seconds = {}, {}
    for key, step in variants.items():
        lowered = step.lower(state, batch)
        start = time.perf_counter()
        compiled[key] = lowered.compile()
        compile_seconds[key] = time.perf_counter() - start
    seconds = {key: [] for key in variants}
    for run in range(RUNS + 1):
        for key in variants:  # in turn, so that a drifting machine hits all alike
            fresh = zoo.init_state(model, optimizer, key=jax.random.key(1))
            jax.block_until_ready(jax.tree.leaves(fresh.params))
            start = time.perf_counter()
            jax.block_until_ready(variants[key](fresh, batch)[1].loss)
            if run:
                seconds[key].append(time.perf_counter() - start)
    print(f"{name}, batch {BATCH} x {SEQUENCE}, JAX {jax.__version__} on {jax.devices()[0].device_kind}")
    print(f"{'':22}{'step':>8}{'compile':>10}{'scratch MiB':>14}{'kept MiB':>12}{'on host MiB':>14}")
    for key, step in variants.items():
        ratio = statistics.median(a / b for a, b in zip(seconds[key], seconds["no policy"], strict=True))
        kept = policies.census(step, state, batch)
        scratch = compiled[key].memory_analysis().temp_size_in_bytes
        print(
            f"{key:22}{ratio:8.2f}{compile_seconds[key] / compile_seconds['no policy']:10.2f}{scratch / 2**20:14.1f}"
            f"{kept.device_bytes / 2**20:12.1f}{kept.host_bytes / 2**20:14.1f}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
