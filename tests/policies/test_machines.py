import dataclasses
import json
import math
import pickle
import re

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from overspill.policies.accelerators import target, targets
from overspill.policies.machines import DTYPES, Efficiency, Hardware, hardware, hardwares

NAMES = list(hardwares())
PEAKS = {  # TFLOP/s, dense, by the vendors' pages: float32 by default, bfloat16, float8, float4
    "a100": (156, 312, None, None),
    "h100": (989 / 2, 1979 / 2, 3958 / 2, None),
    "h200": (989 / 2, 1979 / 2, 3958 / 2, None),
    "b200": (18e3 / 16, 36e3 / 16, 72e3 / 16, 72e3 / 8),  # HGX: eight GPUs, sparse but for float4
    "b300": (18e3 / 16, 36e3 / 16, 72e3 / 16, 108e3 / 8),
    "gb200": (180e3 / 144, 360e3 / 144, 720e3 / 144, 720e3 / 72),  # racks of 72, sparse but for float4
    "gb300": (180e3 / 144, 360e3 / 144, 720e3 / 144, 1080e3 / 72),
    "vera-rubin-nvl144": (144e3 / 72, 288e3 / 72, 1260e3 / 72, 2520e3 / 72),
    "rtx-4090": (165.2 / 2, 330.4 / 2, 660.6 / 2, None),
    "rtx-5090": (209.5 / 2, 419 / 2, 838 / 2, 3352 / 2),
    "rtx-pro-6000": (503.8 / 2, 1007.6 / 2, 2015.2 / 2, 4030 / 2),
    "tpu-v4": (275, 275, None, None),
    "tpu-v5e": (197, 197, None, None),
    "tpu-v5p": (459, 459, 459, None),
    "tpu-v6e": (918, 918, 918, None),
    "tpu-7x": (2307 / 2, 2307 / 2, 4614 / 2, None),  # half a chip
}
# TB/s of memory; GB/s each way of the link to the host, the near network and the far one; devices that are near.
RATES = {
    "a100": (2.04, 31.5, 300, 25, 8), "h100": (3.35, 63, 450, 50, 8),
    "h200": (4.8, 63, 450, 50, 8), "b200": (7.7, 63, 900, 50, 8),
    "b300": (7.7, 63, 900, 100, 8), "gb200": (8, 225, 900, 50, 72),
    "gb300": (8, 225, 900, 100, 72), "vera-rubin-nvl144": (22, 450, 1800, 200, 72),
    "rtx-4090": (1.008, 31.5, 31.5, 0.3125, 4), "rtx-5090": (1.792, 63, 63, 0.3125, 4),
    "rtx-pro-6000": (1.792, 63, 63, 25, 8), "tpu-v4": (1.2, 16, 300, 6.25, 4096),
    "tpu-v5e": (0.819, 16, 200, 3.125, 256), "tpu-v5p": (2.765, 16, 600, 6.25, 8960),
    "tpu-v6e": (1.638, 32, 400, 12.5, 256), "tpu-7x": (3.69, 16, 300, 6.25, 18432),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_peaks_are_dense(name):
    one = hardware(name)
    found = dict(one.peaks)
    expected = {
        dtype: tera * 1e12
        for dtype, tera in zip(("float32", "bfloat16", "float8", "float4"), PEAKS[name], strict=True)
        if tera is not None
    }
    if one.platform == "cuda":  # two dtypes of 16 bits, alike; TPUs have but one
        expected["float16"] = expected["bfloat16"]
    assert found == pytest.approx(expected, rel=1e-3)
    if one.platform == "cuda":
        assert found["bfloat16"] == pytest.approx(2 * found["float32"], rel=5e-3)
    if "float8" in found and name not in ("tpu-v5p", "tpu-v6e"):
        ratio = 4.375 if one.announced else 2
        assert found["float8"] == pytest.approx(ratio * found["bfloat16"], rel=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_rates(name):
    one = hardware(name)
    found = (
        one.hbm_bandwidth / 1e12, one.link_bandwidth / 1e9, one.scale_up_bandwidth / 1e9,
        one.scale_out_bandwidth / 1e9, one.scale_up_devices,
    )  # fmt: skip
    assert found == pytest.approx(RATES[name], rel=5e-3)
    # What is farther is slower.
    assert one.hbm_bandwidth > one.scale_up_bandwidth >= one.scale_out_bandwidth
    for alone, both in zip(one.rates(), one.rates(both=True), strict=True):
        assert 0.3 * one.link_bandwidth < both <= alone < 0.9 * one.link_bandwidth
    assert one.torus == {"tpu-v5e": 2, "tpu-v6e": 2}.get(name, 3 if one.platform == "tpu" else 0)


def test_relations():
    h100, h200, b200, b300, gb200, gb300 = map(hardware, ("h100", "h200", "b200", "b300", "gb200", "gb300"))
    assert h100.peaks == h200.peaks and h100.rates() == h200.rates()
    assert h200.hbm_bandwidth > 1.4 * h100.hbm_bandwidth
    assert dict(b300.peaks) == {**dict(b200.peaks), "float4": 1.5 * b200.peak("float4")}
    assert dict(gb300.peaks) == {**dict(gb200.peaks), "float4": 1.5 * gb200.peak("float4")}
    assert gb200.peak("bfloat16") == pytest.approx(b200.peak("bfloat16") / 0.9)
    # NVLink-C2C is worth four times PCIe 5, but two GPUs share one CPU's memory: both ways at once gain nothing.
    for one in (gb200, gb300):
        assert min(one.rates()) > 3 * max(h200.rates())
        assert sum(one.rates(both=True)) == pytest.approx(sum(one.rates()) / 2, rel=0.1)
        assert one.link_bandwidth * one.link_shared == 450e9
    assert [name for name in NAMES if hardware(name).announced] == ["vera-rubin-nvl144"]


def test_names_and_sizes_are_those_of_targets():
    assert set(NAMES) >= set(targets()) and set(NAMES) == set(PEAKS)
    for name in NAMES:
        one = hardware(name)
        assert one.name == name and one.sources
        if name not in targets():
            assert one.target is None
            continue
        other = target(name)
        assert one.target == other
        for field in ("description", "platform", "device_bytes", "host_bytes", "devices_per_host"):
            assert getattr(one, field) == getattr(other, field), field
        assert one.host_bytes_per_device * one.devices_per_host == other.host_bytes
        if other.config:  # what the drivers say of the memory
            bandwidth = int(re.search(r"memory_bandwidth: (\d+)", other.config)[1])
            assert one.hbm_bandwidth == pytest.approx(bandwidth, rel=0.04)


def test_names_are_forgiving():
    assert hardware(" GB200 ") is hardware("gb200")
    assert hardware("RTX_5090").name == "rtx-5090"
    assert hardware(hardware("h200")) is hardware("h200")
    pod = hardware("TPU_v5p:4X4x8")
    assert pod.name == "tpu-v5p:4x4x8" and pod.scale_up_devices == 128 and pod.target == target("tpu-v5p:4x4x8")
    assert dataclasses.replace(pod, name="tpu-v5p", scale_up_devices=8960) == hardware("tpu-v5p")
    assert hardware("tpu-7x:4x4x4").scale_up_devices == 128  # two devices a chip


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("5090", "there is no hardware '5090'; did you mean rtx-5090? Hardware: a100, "),
        ("v5p", "did you mean tpu-v5p?"),
        ("vera-rubin-nvl72", "did you mean vera-rubin-nvl144?"),
        ("nonsense", "there is no hardware 'nonsense'. Hardware: a100, "),
        (":2x2", "there is no hardware ':2x2'. Hardware: "),
        ("h200:8", "only TPUs have a shape; write h200"),
        ("rtx-5090:8", "only TPUs have a shape; write rtx-5090"),
        ("tpu-v5p:3x4x4", "the first two numbers are even"),
        ("tpu-v5e:", "has 2 numbers"),
    ],
)
def test_wrong_names(name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        hardware(name)


def test_names_that_are_none():
    for wrong in (200, None):
        with pytest.raises((ValueError, TypeCheckError)):  # of hints in tests, and else of the function itself
            hardware(wrong)


def test_lines_and_tables():
    for name, line in hardwares().items():
        assert hardware(name).description in line and "TFLOP/s in bfloat16" in line
        assert ("as announced" in line) == (name == "vera-rubin-nvl144")
    text = str(hardware("gb300").table())
    for part in ("2,500.0 TFLOP/s", "185 GB/s", "90.9 GB/s", "225 GB/s", "8 TB/s", "72 devices", "measured", "Oracle"):
        assert part in text, part
    assert "assumed share" not in text
    text = str(hardware("vera-rubin-nvl144").table())
    assert "announced, dense" in text and "nominal" not in text and text.count("assumed share") == 4


def test_peak_takes_names_and_dtypes():
    one = hardware("b200")
    for dtype in ("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"), np.dtype(jnp.bfloat16)):
        assert one.peak(dtype) == 2.25e15
    for dtype in ("float8", "float8_e4m3fn", jnp.float8_e5m2, jnp.dtype("float8_e4m3fn")):
        assert one.peak(dtype) == 4.5e15
    assert one.peak("float4_e2m1fn") == one.peak("float4") == 9e15
    assert one.peak(np.float32) == 1.125e15


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("h200", "float4", "h200 has no peak for float4: there are float32, bfloat16, float16, float8"),
        ("a100", jnp.float8_e4m3fn, "a100 has no peak for float8_e4m3fn: there are float32, bfloat16, float16"),
        ("tpu-v5e", "float16", "there are float32, bfloat16"),
        ("h200", np.int8, "no peak for int8"), ("h200", "float80", "no peak for float80"),
        ("h200", "", "no peak for :"), ("h200", 3, "no peak for 3"),
    ],
)  # fmt: skip
def test_a_dtype_without_a_peak(name, dtype, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        hardware(name).peak(dtype)


def test_rates_that_no_one_measured_are_shares():
    one = hardware("tpu-v6e")
    assert one.rates() == pytest.approx((0.8 * 32e9,) * 2)
    assert one.rates(both=True) == pytest.approx((0.4 * 32e9,) * 2)
    half = dataclasses.replace(one, efficiency=Efficiency(link=0.5, link_both=0.6))
    assert half.rates() == half.rates(both=True) == (16e9, 16e9)  # both at once are no faster than one alone
    known = dataclasses.replace(half, device_to_host=20e9, both_host_to_device=1e9)
    assert known.rates() == (20e9, 16e9) and known.rates(both=True) == (pytest.approx(19.2e9), 1e9)


def test_pinned_memory():
    one = hardware("h200")
    assert one.pinned_bytes_per_device() == 8 * 2**30  # 64 GiB, one process for eight
    assert one.pinned_bytes_per_device(processes_per_host=8) == 64 * 2**30
    assert one.pinned_bytes_per_device(1396) == 1396 * 2**30 / 8
    assert hardware("gb200").pinned_bytes_per_device(670) == 670 * 2**30 / 4
    assert hardware("tpu-v5p").pinned_bytes_per_device() == math.inf
    for wrong in (0, -1, math.nan, True):
        with pytest.raises(ValueError, match="h200: limit_gib is"):
            one.pinned_bytes_per_device(wrong)
    with pytest.raises(ValueError, match="processes_per_host is 0"):
        hardware("tpu-v5p").pinned_bytes_per_device(processes_per_host=0)


def test_entries_are_values():
    one = hardware("gb200")
    assert pickle.loads(pickle.dumps(one)) == one and hash(one) == hash(dataclasses.replace(one))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.link_bandwidth = 1.0
    slow = dataclasses.replace(one, peaks={"bfloat16": 1e15}, host_bytes=10**12)
    assert slow.peak("bfloat16") == 1e15 and slow.host_bytes_per_device == 10**12 / 4
    assert json.loads(json.dumps(dataclasses.asdict(one)))["scale_up_devices"] == 72


RATE_FIELDS = ("hbm_bandwidth", "link_bandwidth", "scale_up_bandwidth", "scale_out_bandwidth", "device_to_host")
WHOLE_FIELDS = ("device_bytes", "host_bytes", "devices_per_host", "scale_up_devices", "link_shared")


@pytest.mark.parametrize("name", [*RATE_FIELDS, *WHOLE_FIELDS])
def test_numbers_that_cannot_be(name):
    one, whole = hardware("h200"), name in WHOLE_FIELDS
    for wrong in (0, -1, True, *(() if whole else (-0.5, math.nan, math.inf))):
        with pytest.raises(ValueError, match=re.escape(f"h200: {name} is {wrong!r}, and should be a positive")):
            dataclasses.replace(one, **{name: wrong})
    for wrong in ("5", 1 + 0j, *((1.5, None) if whole else ())):  # of another type: refused by hints, in tests
        with pytest.raises((ValueError, TypeCheckError)):
            dataclasses.replace(one, **{name: wrong})
    for right in (5, np.float64(2.5)) if not whole else (5,):
        assert getattr(dataclasses.replace(one, **{name: right}), name) == right


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"both_host_to_device": math.inf}, "both_host_to_device is inf"),
        ({"peaks": {}}, "peaks has no dtype"),
        ({"peaks": {"int8": 1.0}}, f"peaks has 'int8', and dtypes are {', '.join(DTYPES)}"),
        ({"peaks": {"bfloat16": 0.0}}, "peaks['bfloat16'] is 0.0"),
        ({"platform": "gpu"}, "platform is 'gpu', and should be cuda or tpu"),
        ({"torus": 4}, "torus is 4"),
        ({"name": ""}, "hardware has a name, not ''"),
    ],
)
def test_entries_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(hardware("h200"), **changes)


def test_efficiency():
    assert all(0.3 < share <= 1 for share in dataclasses.astuple(Efficiency()))
    assert Efficiency(matmul=1.1).matmul == 1.1
    for field in dataclasses.fields(Efficiency):
        for wrong in (0, -0.1, 1.3, math.nan, math.inf, True):
            with pytest.raises(ValueError, match=rf"efficiency: {field.name} is {wrong!r}, and "):
                Efficiency(**{field.name: wrong})


def result(kind="NVIDIA H200", *, out=51e9, back=54e9, both=(33e9, 44e9), matmul=("bfloat16", 7e14)):
    """What the self-test writes, in the parts that are read and some that aren't."""
    values = dict(zip(("device_to_host", "host_to_device"), (out, back), strict=True))
    values |= dict(zip(("both_device_to_host", "both_host_to_device"), both, strict=True))
    keyed = {f"{way}_bytes_per_second": rate for way, rate in values.items()}
    found = {"verdict": "passed", "jax": "0.10.2", "platform": "gpu", "device_kind": kind, "devices": 8}
    found["links"] = keyed | {"sizes": [{"size_bytes": 2**30, **keyed}]}
    if matmul is not None:
        found["matmul"] = dict(zip(("dtype", "flops_per_second"), matmul, strict=True)) | {"size": 8192}
    return found


def test_measurements_take_their_place(tmp_path):
    path = tmp_path / "selftest.json"
    path.write_text(json.dumps(result()))
    one = hardware("h200")
    found = one.measured(path)
    assert found.rates() == (51e9, 54e9) and found.rates(both=True) == (33e9, 44e9)
    assert found.efficiency == Efficiency(matmul=7e14 / one.peak("bfloat16"))
    note = (
        "measured on NVIDIA H200 by overspill selftest, JAX 0.10.2: device_to_host, host_to_device, "
        "both_device_to_host, both_host_to_device, matrix products"
    )
    assert found.sources == (*one.sources, note) and note in str(found.table())
    same = ("sources", "efficiency", "device_to_host", "host_to_device", "both_device_to_host", "both_host_to_device")
    assert dataclasses.replace(found, **{name: getattr(one, name) for name in same}) == one  # nothing else
    assert found == one.measured(str(path)) == one.measured(result())


def test_parts_of_measurements():
    one = hardware("h200")
    alone = result(matmul=None)
    assert one.measured(alone).efficiency == one.efficiency
    del alone["links"]["device_to_host_bytes_per_second"]
    assert one.measured(alone).rates() == (one.rates()[0], 54e9)
    products = result(matmul=("float32", 4e14))
    del products["links"]
    found = one.measured(products)
    assert found.rates() == one.rates() and found.efficiency.matmul == pytest.approx(4e14 / 494.7e12)


def test_a_shared_link_is_not_one_devices_own():
    # One GPU copies alone in the self-test, and may have more than what is left when its neighbour copies too.
    found = hardware("gb200").measured(result("NVIDIA GB200", out=350e9, back=200e9, both=(160e9, 165e9)))
    assert found.rates() == (225e9, 200e9) and found.rates(both=True) == (160e9, 165e9)


@pytest.mark.parametrize(
    ("name", "kind", "same"),
    [
        ("h200", "NVIDIA H200", True), ("h200", "NVIDIA GH200 480GB", False), ("h200", "NVIDIA GB200", False),
        ("h200", "NVIDIA H100 80GB HBM3", False), ("h100", "NVIDIA H100 80GB HBM3", True), ("h200", "cpu", False),
        ("b200", "NVIDIA GB200", False), ("gb200", "NVIDIA GB200", True), ("gb200", "NVIDIA B200", False),
        ("a100", "NVIDIA A100-SXM4-80GB", True), ("rtx-5090", "NVIDIA GeForce RTX 5090", True),
        ("rtx-5090", "NVIDIA GeForce RTX 5090 Laptop GPU", False),
        ("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", True),
        ("tpu-v5e", "TPU v5 lite", True), ("tpu-v5p", "TPU v5 lite", False), ("tpu-v5p", "TPU v5", True),
        ("tpu-v5p:4x4x8", "TPU v5p", True), ("tpu-v5p", "TPU v5e", False), ("tpu-v6e", "TPU v6 lite", True),
        ("tpu-v4", "TPU v4", True), ("tpu-7x", "TPU7x", True),
    ],
)  # fmt: skip
def test_only_of_the_same_device(name, kind, same):
    one = hardware(name)
    assert one.is_kind(kind) == same
    rate = one.link_bandwidth / 2
    data = result(kind, out=rate, back=rate, both=(rate, rate), matmul=None)
    if not same:
        with pytest.raises(ValueError, match=re.escape(f"measurements: measured on {kind}, which is no {name}; force")):
            one.measured(data)
    assert one.measured(data, force=not same).rates() == (rate, rate)


@pytest.mark.parametrize("wrong", [0, -1e9, math.nan, math.inf, "51e9", None, True, 51.0, 70e9])
@pytest.mark.parametrize("way", ["device_to_host", "host_to_device", "both_device_to_host", "both_host_to_device"])
def test_link_rates_that_cannot_be(way, wrong):
    data = result()
    data["links"][f"{way}_bytes_per_second"] = wrong
    with pytest.raises(ValueError, match=rf"^measurements: links\.{way}_bytes_per_second is .*(positive|63 GB/s)"):
        hardware("h200").measured(data)


@pytest.mark.parametrize(
    ("matmul", "message"),
    [
        ({"dtype": "bfloat16", "flops_per_second": 700.0}, "is 700, which can't be of a device with a peak of 989.4"),
        ({"dtype": "bfloat16", "flops_per_second": 2e15}, "is 2e+15, which can't be"),
        ({"dtype": "bfloat16", "flops_per_second": math.nan}, "matmul.flops_per_second is nan"),
        ({"dtype": "bfloat16"}, "matmul.flops_per_second is None"),
        ({"dtype": "float64", "flops_per_second": 6e13}, "matmul.dtype: h200 has no peak for float64"),
        ({"flops_per_second": 7e14}, "matmul.dtype is None, and should be a dtype's name"),
        ([7e14], "matmul is [700000000000000.0], and should be an object"),
    ],
)
def test_matmul_rates_that_cannot_be(matmul, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        hardware("h200").measured(result() | {"matmul": matmul})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[1]", "no object: not what overspill selftest --json writes"),
        ("[" * 100_000, "no JSON"),
        ('{"links": {}}', "no device_kind: not what overspill selftest --json writes"),
        ('{"device_kind": "NVIDIA H200"}', "no rate of links and none of matmul: overspill selftest --only links"),
        ('{"device_kind": "NVIDIA H200", "links": {"sizes": []}}', "no rate of links and none of matmul"),
        ('{"device_kind": "NVIDIA H200", "links": [1]}', "links is [1], and should be an object"),
    ],
)
def test_files_that_are_none(tmp_path, text, message):
    path = tmp_path / "selftest.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        hardware("h200").measured(path)


def test_files_that_cannot_be_read(tmp_path):
    one = hardware("h200")
    for path in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(ValueError, match=re.escape(f"{path}: can't be read: ")):
            one.measured(path)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="no JSON"):
        one.measured(binary)
    for wrong in (None, 3, ["selftest.json"]):
        with pytest.raises((ValueError, TypeCheckError)):
            one.measured(wrong)


def test_what_the_selftest_writes_is_read():
    from overspill.zoo.selftest_links import Rates, largest_rates

    rates = [Rates(2**24, 40e9, 41e9, 20e9, 21e9), Rates(2**30, 50e9, 49e9, 30e9, 31e9)]
    data = {"device_kind": "NVIDIA H200", "links": largest_rates(rates)}
    found = hardware("h200").measured(data)
    assert isinstance(found, Hardware) and found.rates() == (50e9, 49e9) and found.rates(both=True) == (30e9, 31e9)
