"""Loading a model against reading the same bytes and copying them once, and the host memory that it takes.

    python benchmarks/load.py [GIGABYTES]

Makes a Llama-shaped folder of that size (2 by default), sharded, in bfloat16, and one of half the size with float8
weights, which has as many parameters. What is read is in the system's cache. The bound maps the files and copies them
to new memory as they are; for float8 that is half of what the model takes, so its model's bytes are counted too. Runs
alternate, so that a drifting machine hits both alike. Peak memory is that of a process which does nothing else (Linux).
"""

import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import ml_dtypes
import numpy as np

from overspill import zoo
from overspill.zoo.exporting import Output
from overspill.zoo.model_folder import write_json, write_weights
from overspill.zoo.weights import leaves

RUNS = 9
BLOCK = 128
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048,
    "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4, "rope_theta": 10000.0,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
PEAK = """
import re, sys
from overspill import zoo
def high():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
zoo.abstract(zoo.from_config(sys.argv[1]))
before = high()
model = zoo.load(sys.argv[1])
print(high() - before)
"""


def make_folder(folder, gigabytes, float8):
    """Writes a folder with random weights that take `gigabytes` in bfloat16; returns their bytes in files."""
    layer = 2 * CONFIG["hidden_size"] * (3 * CONFIG["intermediate_size"] + 2.25 * CONFIG["hidden_size"])
    layers = max(1, round((gigabytes * 1e9 - 4 * CONFIG["vocab_size"] * CONFIG["hidden_size"]) / layer))
    settings = CONFIG | {"num_hidden_layers": layers}
    if float8:
        settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    folder.mkdir()
    write_json(folder / "config.json", settings)
    rng = np.random.default_rng(0)

    def output(name, dtype, shape, make):
        return Output(name, np.dtype(dtype), tuple(shape), lambda: make(shape).astype(dtype, copy=False))

    outputs = []
    for leaf in leaves(zoo.abstract(zoo.from_config(settings))):
        for piece in leaf.pieces(leaf.sources[0]):
            shape = leaf.piece_shape(piece)
            if float8 and len(shape) == 2 and leaf.layers:
                bits = lambda shape: rng.integers(0, 127, shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
                outputs.append(output(piece.name, ml_dtypes.float8_e4m3fn, shape, bits))
                grid = [math.ceil(n / BLOCK) for n in shape]
                outputs.append(output(f"{piece.name}_scale_inv", np.float32, grid, np.ones))
            else:
                draw = lambda shape: rng.integers(-99, 99, shape, np.int8)
                outputs.append(output(piece.name, ml_dtypes.bfloat16, shape, draw))
    size = sum(o.nbytes for o in outputs)
    write_weights(folder, outputs, size // 3)
    return size


def copy_once(folder):
    """Every byte of the weights read and copied once."""
    return [np.array(np.memmap(path, np.uint8, "r")) for path in sorted(folder.glob("*.safetensors"))]


def load(folder):
    return jax.block_until_ready(zoo.load(folder))


def timed(function, folder):
    start = time.perf_counter()
    result = function(folder)
    taken = time.perf_counter() - start
    del result  # giving memory back isn't counted
    return taken


def main(gigabytes="2"):
    print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}, NumPy {np.__version__}")
    with tempfile.TemporaryDirectory() as place:
        for kind, float8 in (("bfloat16", False), ("float8", True)):
            folder = pathlib.Path(place) / kind
            size = make_folder(folder, float(gigabytes), float8)
            copy_once(folder)
            first = timed(load, folder)
            runs = [(timed(copy_once, folder), timed(load, folder)) for _ in range(RUNS)]
            bound, ours = (statistics.median(times) for times in zip(*runs, strict=True))
            ratio = statistics.median(a / b for a, b in runs)
            best = min(a for a, _ in runs) / min(b for _, b in runs)
            model = sum(leaf.nbytes for leaf in jax.tree.leaves(load(folder)))
            print(f"{kind}: {size / 1e9:.2f} GB in files, {model / 1e9:.2f} GB in memory")
            rates = [size / seconds / 1e9 for seconds in (bound, ours)]
            print(f"  GB of files a second: read and copied once {rates[0]:.2f}, loaded {rates[1]:.2f}")
            print(f"  rate of load / rate of the bound: median {ratio:.2f}, best against best {best:.2f}")
            if float8:
                print(f"  the same, counting the model's bytes: median {ratio * model / size:.2f}")
            print(f"  the process's first load: {first / ours:.2f} of a later one's time")
            if sys.platform == "linux":
                done = subprocess.run(
                    [sys.executable, "-c", PEAK, folder], capture_output=True, text=True, check=True
                )
                print(f"  peak host memory / model size: {int(done.stdout) / model:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
