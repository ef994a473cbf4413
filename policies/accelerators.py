"""Accelerators that programs are compiled for, at hand or not: what a compiler has to know of them."""

import dataclasses
import difflib
import itertools
import math
import re
from typing import Any, NamedTuple

_GIB = 2**30
# So many numbers of devices to either side are named where one can't be.
_NEAR = 3


class _Gpu(NamedTuple):
    """A GPU as its driver describes it to XLA."""

    description: str
    cores: int
    capability: tuple[int, int]
    memory: int  # bytes that the driver reports
    bandwidth: int  # bytes a second
    cache: int  # bytes of L2
    clock: float  # GHz
    per_host: int
    host_memory: int  # bytes of the host that they are commonly built into
    fpus: int = 128  # of one core
    threads: int = 2048  # of one core
    shared: int = 233472  # bytes of shared memory of one core
    block_shared: int = 232448  # of these, what one block can ask for


# Memory of h100, h200 and gb200 as measured on the devices. All else, and the memory of the others, are the values that
# XLA's own descriptions of these GPUs hold (openxla/xla, xla/backends/gpu/target_config/specs). Hosts: HGX and DGX
# boards with eight GPUs and 2 TB, and the trays of NVL72 racks with four GPUs and two Grace CPUs of 480 GB.
_GPUS = {
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", 108, (8, 0), 85100068864, 2039040000000, 41943040, 1.41, 8, 2 * 10**12,
                 fpus=64, shared=167936, block_shared=166912),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", 132, (9, 0), 84929347584, 3352320000000, 52428800, 1.98, 8, 2 * 10**12),
    "h200": _Gpu("NVIDIA H200", 132, (9, 0), 151397597184, 4800000000000, 52428800, 1.98, 8, 2 * 10**12),
    "b200": _Gpu("NVIDIA B200", 148, (10, 0), 191514411008, 7672320000000, 132644864, 1.965, 8, 2 * 10**12),
    "b300": _Gpu("NVIDIA B300", 158, (10, 3), 297021865984, 7936000000000, 135528448, 1.965, 8, 2 * 10**12),
    "gb200": _Gpu("NVIDIA GB200", 152, (10, 0), 197897748480, 7928064000000, 135528448, 2.062, 4, 960 * 10**9),
    "gb300": _Gpu("NVIDIA GB300", 152, (10, 3), 297021079552, 7928064000000, 135528448, 2.07, 4, 960 * 10**9),
    "rtx-pro-6000": _Gpu("NVIDIA RTX PRO 6000 Blackwell", 188, (12, 0), 103079215104, 1792000000000, 134217728, 2.6, 8,
                         2 * 10**12, threads=1536, shared=131072, block_shared=101376),
}  # fmt: skip


class _Tpu(NamedTuple):
    """A generation of TPUs, as libtpu names and arranges it."""

    description: str
    generation: str
    memory: int  # bytes of one device that the compiler lets a program have
    dimensions: int  # of the torus or grid of chips
    largest: tuple[int, ...]  # the chips of a whole pod
    host_memory: int
    cores: int = 1  # devices of one chip
    kind: str = "default"  # how libtpu joins the cores of a chip: megacore makes one device of two


# Memory is what libtpu's compiler grants, found by compiling programs of all sizes; a part of it is the compiler's own.
# Hosts have four chips (v5e and v6e also come with one or eight) and the memory of Google Cloud's machine types.
_TPUS = {
    "tpu-v4": _Tpu("TPU v4", "v4", 31484 * 2**20, 3, (16, 16, 16), 407 * 10**9, kind="megacore"),
    "tpu-v5e": _Tpu("TPU v5e", "v5e", 16125 * 2**20, 2, (16, 16), 188 * 10**9),
    "tpu-v5p": _Tpu("TPU v5p", "v5p", 98040 * 2**20, 3, (16, 20, 28), 448 * 10**9, kind="megacore"),
    "tpu-v6e": _Tpu("TPU v6e", "v6e", 31995 * 2**20, 2, (16, 16), 720 * 10**9),
    "tpu-7x": _Tpu("TPU 7x", "tpu7x", 97019 * 2**20, 3, (16, 24, 24), 960 * 10**9, cores=2),
}
# Up to a cube of 64 chips, one for each number; from there on whole cubes.
_SMALL = {
    2: {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)},
    3: {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)},
}


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _default_shape(tpu: _Tpu, chips: int) -> tuple[int, ...] | None:
    """How so many chips are arranged where nothing else is said, as evenly as they can be; None if they can't."""
    if chips in _SMALL[tpu.dimensions]:
        return _SMALL[tpu.dimensions][chips]
    if tpu.dimensions == 2 or chips % 64:
        return None
    cubes = chips // 64
    found = [
        (a, b, cubes // (a * b))
        for a in range(1, math.isqrt(cubes) + 1)
        for b in range(a, cubes + 1)
        if cubes % (a * b) == 0 and cubes // (a * b) >= b
    ]
    found = [shape for shape in found if all(4 * n <= most for n, most in zip(shape, tpu.largest, strict=True))]
    return tuple(4 * n for n in min(found, key=sum)) if found else None


def _counts(tpu: _Tpu) -> list[int]:
    """The numbers of devices that have a topology."""
    chips = [*_SMALL[tpu.dimensions], *(range(64, math.prod(tpu.largest) + 1, 64) if tpu.dimensions == 3 else ())]
    return [count * tpu.cores for count in chips if _default_shape(tpu, count)]


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of accelerator to compile for. Made by `target`."""

    name: str
    """As `target` takes it: `h200`, `tpu-v5p`, `tpu-v5p:8x8x8`."""
    platform: str
    """What JAX lowers for: `cuda` or `tpu`."""
    description: str
    device_bytes: int
    """Memory of one device: all of it on GPUs, what the compiler grants a program on TPUs."""
    devices_per_host: int
    host_bytes: int
    """Memory of the hosts that these devices commonly have, for all devices of a host together."""
    shape: str | None
    """Chips of a TPU topology along each dimension, where the name gives them."""
    generation: str
    """`v5p`; for GPUs their name."""
    config: str | None
    """XLA's description of a GPU, the text form of its GpuTargetConfigProto; None for TPUs."""
    capability: tuple[int, int] | None = None
    """A GPU's compute capability; None for TPUs."""

    def topology(self, devices: int) -> str:
        """`devices` of these as JAX writes a topology: slices, hosts and GPUs as in `1x16x8`, or `v5p:4x4x8`.

        GPUs are on as few hosts as have the same number of them each. Raises ValueError for numbers of TPUs that have
        no topology, with the nearest ones that have, and for any other number than that of this target's shape.
        """
        if devices < 1:
            raise ValueError(f"{self.name}: {devices} devices: at least 1 is needed")
        if self.platform == "cuda":
            each = max(n for n in range(1, self.devices_per_host + 1) if devices % n == 0)
            return f"1x{devices // each}x{each}"
        tpu = _TPUS[self.name.partition(":")[0]]
        if self.shape is not None:
            have = math.prod(map(int, self.shape.split("x"))) * tpu.cores
            if have != devices:
                raise ValueError(f"{self.name} has {have} devices, and {devices} are asked for")
            return f"{tpu.generation}:{self.shape}"
        shape = None if devices % tpu.cores else _default_shape(tpu, devices // tpu.cores)
        if shape is None:
            counts = _counts(tpu)
            near = [*[n for n in counts if n < devices][-_NEAR:], *[n for n in counts if n > devices][:_NEAR]]
            raise ValueError(
                f"{self.name} has no topology with {devices} devices: {', '.join(map(str, near))} are possible"
            )
        return f"{tpu.generation}:{_text(shape)}"

    def topology_arguments(self, devices: int) -> dict[str, Any]:
        """The keyword arguments of `jax.experimental.topologies.get_topology_desc` for `devices` of these.

        They can be written as JSON. Raises ValueError as `topology` does.
        """
        topology = self.topology(devices)
        if self.platform == "cuda":
            return {
                "platform": "cuda",
                "topology_name": self.name,
                "topology": topology,
                "target_config": self.config,
            }
        tpu = _TPUS[self.name.partition(":")[0]]
        shape = [*map(int, topology.partition(":")[2].split("x")), 1][:3]
        # A host has 2 x 2 chips, or is all there is.
        host = shape if math.prod(shape) < 4 else [2, 2, 1]
        return {
            "platform": "tpu",
            "topology_name": topology,
            "chips_per_host_bounds": host,
            "chip_config_name": tpu.kind,
        }


def _gpu_config(gpu: _Gpu) -> str:
    """The text form of XLA's GpuTargetConfigProto."""
    # From Hopper on, kernels use instructions that only this very architecture has.
    extension = "ACCELERATED_FEATURES" if gpu.capability in ((9, 0), (10, 0), (10, 3)) else "NONE"
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": gpu.shared,
        "threads_per_core_limit": gpu.threads,
        "core_count": gpu.cores,
        "fpus_per_core": gpu.fpus,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": gpu.bandwidth,
        "l2_cache_size": gpu.cache,
        "clock_rate_ghz": gpu.clock,
        "device_memory_size": gpu.memory,
        "shared_memory_per_block_optin": gpu.block_shared,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    major, minor = gpu.capability
    fields = "".join(f"  {name}: {value}\n" for name, value in info.items())
    capability = f"major: {major} minor: {minor} feature_extension: {extension}"
    return (
        f"gpu_device_info {{\n{fields}  cuda_compute_capability {{ {capability} }}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 patch: 0 }\n"
        "runtime_version { major: 13 minor: 0 patch: 0 }\n"
        f'device_description_str: "{gpu.description}"\n'
    )


def _parse_shape(name: str, tpu: _Tpu, text: str) -> str:
    """The chips of a TPU topology along each dimension, checked. Raises ValueError."""
    example = _text(_SMALL[tpu.dimensions][8])
    if not re.fullmatch(r"\d{1,3}(x\d{1,3})*", text) or text.count("x") != tpu.dimensions - 1:
        raise ValueError(f"target {name!r}: the shape of {tpu.description} has {tpu.dimensions} numbers, as {example}")
    shape = tuple(map(int, text.split("x")))
    # Hosts of 2 x 2 chips tile it, or it is a part of one.
    whole = all(n and n % 2 == 0 for n in shape[:2])
    if not (whole or (0 not in shape and math.prod(shape) <= 2)) or 0 in shape:
        raise ValueError(f"target {name!r}: hosts have 2x2 chips, so the first two numbers are even, as in {example}")
    if any(n > most for n, most in zip(sorted(shape), tpu.largest, strict=True)):
        raise ValueError(f"target {name!r}: a whole pod of {tpu.description} has {_text(tpu.largest)} chips")
    return _text(shape)


def target(name: str | Target) -> Target:
    """The target called `name`: `h200`, `gb200`, `tpu-v5p`, or `tpu-v5p:4x4x8` with the shape of its topology.

    Without a shape a TPU target takes the most even one for the number of devices that a program has. Raises ValueError
    for other names, with those that are near and all there are.
    """
    if isinstance(name, Target):
        return name
    if not isinstance(name, str):
        raise ValueError(f"a target is a name such as 'h200', not {name!r}; there are {', '.join((*_GPUS, *_TPUS))}")
    wanted = name.strip().lower().replace("_", "-")
    base, given, shape = wanted.partition(":")
    if base in _GPUS:
        if given:
            raise ValueError(f"target {name!r}: only TPUs have a shape; write {base}")
        gpu = _GPUS[base]
        return Target(
            name=base,
            platform="cuda",
            description=gpu.description,
            device_bytes=gpu.memory,
            devices_per_host=gpu.per_host,
            host_bytes=gpu.host_memory,
            shape=None,
            generation=base,
            config=_gpu_config(gpu),
            capability=gpu.capability,
        )
    if base in _TPUS:
        tpu = _TPUS[base]
        checked = _parse_shape(name, tpu, shape) if given else None
        return Target(
            name=f"{base}:{checked}" if checked else base,
            platform="tpu",
            description=tpu.description,
            device_bytes=tpu.memory,
            devices_per_host=4 * tpu.cores,
            host_bytes=tpu.host_memory,
            shape=checked,
            generation=tpu.generation,
            config=None,
        )
    known = [*_GPUS, *_TPUS]
    # `v5p`, `tpu7x` and `GB-200` are near by their letters and digits alone.
    bare = {re.sub(r"[^a-z0-9]", "", one): one for one in known}
    letters = re.sub(r"[^a-z0-9]", "", base)
    near = [one for one in bare if letters and letters in one] or difflib.get_close_matches(letters, bare, n=2)
    hint = f"; did you mean {' or '.join(bare[one] for one in near)}?" if near else "."
    raise ValueError(
        f"there is no target {name!r}{hint} Targets: {', '.join(known)}; those of TPUs also with a shape, "
        "such as tpu-v5p:4x4x8"
    )


def targets() -> dict[str, str]:
    """What can be compiled for: each target's name, and a line about it."""
    lines = {}
    for name in itertools.chain(_GPUS, _TPUS):
        one = target(name)
        size = f"{one.device_bytes / _GIB:.1f} GiB a device, {one.devices_per_host} devices a host"
        lines[name] = f"{one.description}, {size}"
    return lines
