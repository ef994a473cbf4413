import importlib.util
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import pytest

from overspill.policies.accelerators import Target, target, targets
from overspill.policies.flags import XLA, xla_flags

GPUS = [name for name in targets() if target(name).platform == "cuda"]
TPUS = [name for name in targets() if target(name).platform == "tpu"]


def test_every_target_is_described():
    assert {"h100", "h200", "b200", "b300", "gb200", "gb300"} < set(GPUS)
    assert {"tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-7x"} == set(TPUS)
    for name, line in targets().items():
        one = target(name)
        assert one.name == name and one.description in line and one.shape is None
        assert 2**33 < one.device_bytes < one.host_bytes
        assert (one.config is None) == (one.platform == "tpu")
    assert (target("h200").devices_per_host, target("gb200").devices_per_host) == (8, 4)
    assert target("tpu-v5p").generation == "v5p" and target("h200").generation == "h200"


def test_memory_as_measured():
    sizes = {"h100": 84929347584, "h200": 151397597184, "gb200": 197897748480}
    assert {name: target(name).device_bytes for name in sizes} == sizes
    # What libtpu's compiler named as what there is, in GiB; a little of it is its own.
    for name, size in {"tpu-v4": 30.75, "tpu-v5e": 15.75, "tpu-v5p": 95.74, "tpu-v6e": 31.25, "tpu-7x": 94.75}.items():
        assert size - 0.02 < target(name).device_bytes / 2**30 <= size + 0.01


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_is_described_to_the_compiler(name):
    one = target(name)
    fields = dict(re.findall(r"(\w+): ([\w.]+)", one.config))
    assert int(fields["device_memory_size"]) == one.device_bytes
    assert int(fields["core_count"]) > 100
    assert one.description in one.config
    assert one.config.count("{") == one.config.count("}")


def test_names_are_forgiving():
    assert target(" GB200 ").name == "gb200"
    assert target("TPU_v5p:4X4x8").name == "tpu-v5p:4x4x8"
    assert target("RTX_PRO_6000") == target("rtx-pro-6000")
    assert target(target("h200")) == target("h200")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("v5p", "tpu-v5p"),
        ("gb-200", "gb200"),
        ("tpu7x", "tpu-7x"),
        ("h20", "h200"),
        ("tpu-v5p-128", "tpu-v5p"),
        ("7x", "tpu-7x"),
    ],
)
def test_a_wrong_name_gives_near_ones(name, near):
    with pytest.raises(ValueError, match=rf"there is no target '{name}'; did you mean {near}.*Targets: .*gb300"):
        target(name)


@pytest.mark.parametrize("name", ["", "nonsense", ":2x2"])
def test_a_name_like_no_other(name):
    with pytest.raises(ValueError, match=rf"there is no target '{name}'\. Targets: "):
        target(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h200:8", "only TPUs have a shape; write h200"),
        ("tpu-v5p:8x8", "has 3 numbers, as 2x2x2"),
        ("tpu-v5e:2x2x2", "has 2 numbers, as 2x4"),
        ("tpu-v5p:", "has 3 numbers"),
        ("tpu-v5p:4x-4x4", "has 3 numbers"),
        ("tpu-v5p:3x4x4", "the first two numbers are even"),
        ("tpu-v5p:4x4x0", "the first two numbers are even"),
        ("tpu-v5e:32x8", "a whole pod of TPU v5e has 16x16 chips"),
    ],
)
def test_a_wrong_shape_says_why(name, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        target(name)
    assert repr(name) in str(raised.value)


@pytest.mark.parametrize(
    ("devices", "of_eight", "of_four"),
    [
        (1, "1x1x1", "1x1x1"), (2, "1x1x2", "1x1x2"), (6, "1x1x6", "1x2x3"), (8, "1x1x8", "1x2x4"),
        (12, "1x2x6", "1x3x4"), (17, "1x17x1", "1x17x1"), (72, "1x9x8", "1x18x4"), (128, "1x16x8", "1x32x4"),
    ],
)  # fmt: skip
def test_gpus_are_on_as_few_hosts_as_fit(devices, of_eight, of_four):
    assert target("h200").topology(devices) == of_eight
    assert target("gb200").topology(devices) == of_four


def test_tpus_are_as_even_as_they_can_be():
    assert target("tpu-v5p").topology(128) == "v5p:4x4x8"
    assert target("tpu-v5p").topology(512) == "v5p:8x8x8"
    assert target("tpu-v4").topology(192) == "v4:4x4x12"
    assert target("tpu-v6e").topology(256) == "v6e:16x16"
    assert target("tpu-v5e").topology(1) == "v5e:1x1"
    assert target("tpu-7x").topology(128) == "tpu7x:4x4x4"  # two devices a chip
    assert target("tpu-v5p:4x4x16").topology(256) == "v5p:4x4x16"


@pytest.mark.parametrize(
    ("name", "devices", "message"),
    [
        ("h200", 0, "0 devices: at least 1"),
        ("tpu-v5p", 24, r"no topology with 24 devices: 4, 8, 16, 32, 64, 128 are possible"),
        ("tpu-v5e", 512, r"no topology with 512 devices: 64, 128, 256 are possible"),
        ("tpu-7x", 1, r"no topology with 1 devices: 2, 8, 16 are possible"),
        ("tpu-v5p:4x4x4", 32, "tpu-v5p:4x4x4 has 64 devices, and 32 are asked for"),
    ],
)
def test_numbers_of_devices_that_cannot_be(name, devices, message):
    with pytest.raises(ValueError, match=message):
        target(name).topology(devices)
    with pytest.raises(ValueError, match=message):
        target(name).topology_arguments(devices)


@pytest.mark.parametrize("name", list(targets()))
def test_a_topology_has_the_devices_asked_for(name):
    one = target(name)
    found = 0
    for devices in range(1, 513):
        try:
            topology = one.topology(devices)
        except ValueError:
            assert one.platform == "tpu"
            continue
        found += 1
        numbers = [int(n) for n in topology.rpartition(":")[2].split("x")]
        assert math.prod(numbers) * (2 if name == "tpu-7x" else 1) == devices
        if one.platform == "tpu":  # the explicit shape is the same
            assert target(f"{name}:{topology.rpartition(':')[2]}").topology(devices) == topology
        else:
            assert numbers[2] <= one.devices_per_host
    assert found == 512 or 8 <= found < 20


def test_arguments_are_plain():
    for name in targets():
        given = target(name).topology_arguments(8)
        assert json.loads(json.dumps(given)) == given
    assert isinstance(target("h200"), Target)


COMPILE = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from overspill.policies.accelerators import target, targets
for name in targets():
    one = target(name)
    if one.platform != sys.argv[1]:
        continue
    for count in range(1, 513):
        try:
            arguments = one.topology_arguments(count)
        except ValueError:
            continue
        if one.platform == "cuda" and count not in (1, 2, 6, 12, 128):
            continue
        devices = topologies.get_topology_desc(**arguments).devices
        assert len(devices) == count, (name, count, len(devices))
        hosts = len({device.process_index for device in devices})
        assert hosts >= count / one.devices_per_host, (name, count, hosts)
    devices = topologies.get_topology_desc(**one.topology_arguments(8)).devices
    rows = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    f = jax.jit(lambda x: jax.nn.softmax(x @ x.T).sum(), in_shardings=rows)
    f.lower(jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16)).compile()
    print(name)
"""


def compiled(platform):
    """Compiles for every target of a platform, in a process with its flags; the names it did so for."""
    flags = xla_flags("h200" if platform == "cuda" else "tpu-v5p").environment({XLA: "--xla_gpu_autotune_level=0"})
    environment = dict(os.environ, JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", **flags)
    wheels = getattr(importlib.util.find_spec("nvidia"), "submodule_search_locations", ())  # ptxas is in one of them
    tools = [str(path) for wheel in wheels for path in pathlib.Path(wheel).glob("cu*/bin")]
    environment["PATH"] = os.pathsep.join([*tools, os.environ["PATH"]])
    done = subprocess.run([sys.executable, "-c", COMPILE, platform], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


@pytest.mark.skipif(
    not (importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13")),
    reason="needs the CUDA plugin of JAX",
)
def test_every_gpu_compiles():
    assert compiled("cuda") == GPUS


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_every_tpu_compiles():
    assert compiled("tpu") == TPUS
