"""Grouped matmul against a batched matmul of the same FLOPs, which is the bound for evenly loaded experts.

    python benchmarks/experts.py

Prints, for each case, the time of `grouped_matmul` as a multiple of the batched matmul's, forward and forward with
backward, and XLA's scratch memory of both. Runs alternate, so that a drifting machine hits both alike.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from overspill.layers import grouped_matmul

CASES = {  # experts, rows, in, out, share of the rows that the first expert gets
    "16 experts, even": (16, 4096, 512, 256, 1 / 16),
    "16 experts, one takes half": (16, 4096, 512, 256, 1 / 2),
    "64 experts, even": (64, 8192, 512, 256, 1 / 64),
}


def seconds(function, *arguments):
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


def compare(ours, theirs, our_arguments, their_arguments, runs=15):
    """Median of the paired ratios of run times, and the scratch bytes of both programs."""
    compiled = [jax.jit(f).lower(*a).compile() for f, a in ((ours, our_arguments), (theirs, their_arguments))]
    for program, arguments in zip(compiled, (our_arguments, their_arguments), strict=True):
        seconds(program, *arguments)
    ratios = [seconds(compiled[0], *our_arguments) / seconds(compiled[1], *their_arguments) for _ in range(runs)]
    return statistics.median(ratios), [program.memory_analysis().temp_size_in_bytes for program in compiled]


def main():
    print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}; times are multiples of a batched matmul's")
    print(f"{'case':30}{'forward':>10}{'with backward':>16}{'scratch MiB (batched)':>26}")
    for name, (experts, rows, features, out, share) in CASES.items():
        x = jax.random.normal(jax.random.key(0), (rows, features))
        weight = jax.random.normal(jax.random.key(1), (experts, out, features))
        rest = (rows - int(rows * share)) // (experts - 1)
        sizes = np.full(experts, rest, np.int32)
        sizes[0] = rows - rest * (experts - 1)
        batched = x.reshape(experts, rows // experts, features)

        def product(x, weight):
            return jnp.einsum("emd,efd->emf", x, weight)

        def grouped(x, weight, sizes):
            return grouped_matmul(x, weight, sizes)

        forward, _ = compare(grouped, product, (x, weight, jnp.asarray(sizes)), (batched, weight))
        both, scratch = compare(
            jax.grad(lambda x, w, s: jnp.sum(jnp.sin(grouped(x, w, s))), (0, 1)),
            jax.grad(lambda x, w: jnp.sum(jnp.sin(product(x, w))), (0, 1)),
            (x, weight, jnp.asarray(sizes)),
            (batched, weight),
        )
        memory = f"{scratch[0] / 2**20:.1f} ({scratch[1] / 2**20:.1f})"
        print(f"{name:30}{forward:10.2f}{both:16.2f}{memory:>26}")


if __name__ == "__main__":
    main()
