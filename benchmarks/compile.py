"""Compile time of a training step of 60 layers against one of 6, for every preset.

    python benchmarks/compile.py

The layers of a stack are one scan, so that the ratio should stay near 1 whatever the depth.
"""

import dataclasses
import statistics
import time

import jax

from overspill import policies, zoo

RUNS = 3


def seconds(config, preset):
    """Processor seconds to compile one training step, traced and lowered anew, so that no cache answers."""
    optimizer = zoo.adamw(1e-3)
    model = zoo.abstract(config, placements=preset)
    state = zoo.init_state(model, optimizer, key=jax.random.key(0))
    batch = next(zoo.PackedDataset(zoo.load_corpus(max_bytes=100_000), 64).batches(2))
    jax.clear_caches()
    lowered = zoo.make_train_step(model, optimizer).lower(state, batch)
    start = time.process_time()
    lowered.compile()
    return time.process_time() - start


def main():
    tiny = zoo.REGISTRY["overspill-deepseek-tiny"]
    shallow, deep = (dataclasses.replace(tiny, num_hidden_layers=n) for n in (6, 60))
    seconds(shallow, "save_all")  # what only the first compilation does
    print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}")
    for preset in policies.presets():
        ratios = [seconds(deep, preset) / seconds(shallow, preset) for _ in range(RUNS)]
        print(f"{preset:22} 60 layers / 6 layers: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
