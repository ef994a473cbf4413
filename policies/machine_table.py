"""The entries of `policies.machines`: a number's source beside it, and what is uncertain said so."""

from typing import Any

from .accelerators import target
from .machines import Hardware

# Sources that more than one entry has.
_HGX = "NVIDIA HGX platform page (sparse figures there, halved here)"
_BLACKWELL = "NVIDIA Blackwell and Blackwell Ultra datasheet (GB200 NVL72, GB300 NVL72, HGX B200, HGX B300)"
_DGX = "NVIDIA DGX {} user guide (network)"
_PCIE = "PCI-SIG: 16 lanes of PCIe 4 carry 31.5 GB/s each way, of PCIe 5 63.0 GB/s"
_H800 = "nvbandwidth 0.2 on eight H800, PCIe 5: all to host, host to all, and the two of them at once"
_A100 = "nvbandwidth on A100, PCIe 4: NVIDIA/nvbandwidth issues 11 and 53"
_C2C = "NVLink-C2C: 900 GB/s both ways together for a superchip of one CPU and two GPUs (NVIDIA), a quarter each way"
_CLOUD = "Google Cloud TPU documentation, {} page"
_BOOK = "How To Scale Your Model (jax-ml.github.io/scaling-book), TPUs: PCIe 16 GB/s a chip, 32 GB/s from v6e on"

# Nominal: 16 and 32 GT/s a lane, 16 lanes, 128 of 130 bits.
_PCIE4, _PCIE5 = 31.5e9, 63.0e9

# Measured on all eight GPUs of a host at once, which is what training does; one GPU alone gets 55 GB/s either way, and
# 34 and 53 GB/s both ways at once. H100, H200, B200 and B300 have the same link, and are assumed to do as H800 does:
# B300 has PCIe 6 to its network cards, but its hosts' CPUs have PCIe 5.
_PCIE5_MEASURED = {
    "device_to_host": 44.8e9, "host_to_device": 55.2e9, "both_device_to_host": 24.1e9, "both_host_to_device": 32.8e9,
}  # fmt: skip
# One GPU at a time: two reports agree on 25 to 26 GB/s alone and on what is left while the other way runs.
_PCIE4_MEASURED = {
    "device_to_host": 25e9, "host_to_device": 25e9, "both_device_to_host": 24e9, "both_host_to_device": 12.5e9,
}  # fmt: skip
# Trays of four GPUs and two Grace CPUs, all four at once, with copy engines. One GPU alone gets 201 and 194 GB/s on
# GB200, 212 and 193 on GB300, and while the other way runs 164 and 172: Grace's memory is what limits all of these, so
# that both ways at once gain nothing over one. torchtitan pull request 3489 reports 350 GB/s on GB200, which is more
# than one GPU's share of the link; it is taken for both ways together.
_GB200_MEASURED = {
    "device_to_host": 182.1e9, "host_to_device": 168.5e9, "both_device_to_host": 81.6e9, "both_host_to_device": 82.5e9,
}  # fmt: skip
_GB300_MEASURED = {
    "device_to_host": 184.9e9, "host_to_device": 187.6e9, "both_device_to_host": 90.9e9, "both_host_to_device": 91.4e9,
}  # fmt: skip
_TRAY = "nvbandwidth on a tray of four {}, Oracle Cloud's quick start for BM.GPU.{}.4: all four GPUs at once"


def _teras(**peaks: int | float) -> dict[str, float]:
    return {dtype: rate * 1e12 for dtype, rate in peaks.items()}


def _known(name: str, **rest: Any) -> Hardware:
    """An entry for what can be compiled for: sizes are those of its target."""
    one = target(name)
    return Hardware(
        name=name,
        description=one.description,
        platform=one.platform,
        device_bytes=one.device_bytes,
        host_bytes=one.host_bytes,
        devices_per_host=one.devices_per_host,
        **rest,
    )


_NVLINK8 = {"link": "PCIe 5", "link_bandwidth": _PCIE5, "scale_up_devices": 8, **_PCIE5_MEASURED}
_NVL72 = {
    "link": "NVLink-C2C", "link_bandwidth": 225e9, "link_shared": 2, "scale_up": "NVLink 5",
    "scale_up_bandwidth": 900e9, "scale_up_devices": 72,
}  # fmt: skip
_HOPPER = _teras(float32=494.7, bfloat16=989.4, float16=989.4, float8=1978.9)


def _tpu(
    name: str,
    page: str,
    chip: dict[str, float],
    *,
    hbm: float,
    pcie: float,
    ici: float,
    dcn: float,
    pod: int,
    torus: int,
    note: str = "",
) -> Hardware:
    """A TPU by the numbers of one chip; a device may be half of one."""
    cores = target(name).devices_per_host // 4
    return _known(
        name,
        peaks={dtype: rate / cores for dtype, rate in chip.items()},
        hbm_bandwidth=hbm / cores,
        link="PCIe",
        link_bandwidth=pcie / cores,
        link_shared=cores,
        scale_up="ICI",
        scale_up_bandwidth=ici / cores,
        scale_up_devices=pod * cores,
        torus=torus,
        scale_out_bandwidth=dcn / cores,
        sources=(_CLOUD.format(page), _BOOK, *([note] if note else [])),
    )  # fmt: skip


# Products of float32 are one pass in bfloat16 by default, and there is none in float16.
_ENTRIES = (
    _known(
        "a100",
        peaks=_teras(float32=156, bfloat16=312, float16=312),
        hbm_bandwidth=2.039e12,
        link="PCIe 4",
        link_bandwidth=_PCIE4,
        **_PCIE4_MEASURED,
        scale_up="NVLink 3",
        scale_up_bandwidth=300e9,
        scale_up_devices=8,
        scale_out_bandwidth=25e9,  # 200 Gb/s a GPU, as in DGX A100
        sources=("NVIDIA A100 80GB datasheet and Ampere whitepaper (SXM)", _DGX.format("A100"), _PCIE, _A100),
    ),
    _known(
        "h100",
        peaks=_HOPPER,
        hbm_bandwidth=3.35e12,
        scale_up="NVLink 4",
        scale_up_bandwidth=450e9,
        scale_out_bandwidth=50e9,  # 400 Gb/s a GPU
        **_NVLINK8,
        sources=("NVIDIA H100 datasheet (SXM; sparse figures there, halved here)", _DGX.format("H100"), _PCIE, _H800),
    ),
    _known(
        "h200",
        peaks=_HOPPER,
        hbm_bandwidth=4.8e12,
        scale_up="NVLink 4",
        scale_up_bandwidth=450e9,
        scale_out_bandwidth=50e9,
        **_NVLINK8,
        sources=("NVIDIA H200 datasheet (SXM; sparse figures there, halved here)", _DGX.format("H200"), _PCIE, _H800),
    ),
    _known(
        "b200",
        peaks=_teras(float32=1125, bfloat16=2250, float16=2250, float8=4500, float4=9000),
        # The datasheet says 7.7, other pages up to 8; the bus and clock that the driver reports make it 7.67.
        hbm_bandwidth=7.67e12,
        scale_up="NVLink 5",
        scale_up_bandwidth=900e9,
        scale_out_bandwidth=50e9,
        **_NVLINK8,
        sources=(_HGX, _BLACKWELL, "pytorch/ao pull request 4002 (memory)", _DGX.format("B200"), _PCIE, _H800),
    ),
    _known(
        "b300",
        # Uncertain: 13.1, 13.5 and 14 PFLOP/s in float4 are published (105, 108 and 112 for eight).
        peaks=_teras(float32=1125, bfloat16=2250, float16=2250, float8=4500, float4=13500),
        hbm_bandwidth=7.7e12,  # uncertain: 7.7 in the datasheet, 8 elsewhere
        scale_up="NVLink 5",
        scale_up_bandwidth=900e9,
        scale_out_bandwidth=100e9,  # 800 Gb/s a GPU
        **_NVLINK8,
        sources=(_HGX, _BLACKWELL, _DGX.format("B300"), _PCIE, _H800),
    ),
    _known(
        "gb200",
        peaks=_teras(float32=1250, bfloat16=2500, float16=2500, float8=5000, float4=10000),
        hbm_bandwidth=8e12,
        scale_out_bandwidth=50e9,  # 400 Gb/s a GPU; some racks have twice that
        **_NVL72,
        **_GB200_MEASURED,
        sources=(_BLACKWELL, _C2C, _TRAY.format("GB200", "GB200"), _DGX.format("GB200")),
    ),
    _known(
        "gb300",
        peaks=_teras(float32=1250, bfloat16=2500, float16=2500, float8=5000, float4=15000),
        hbm_bandwidth=8e12,
        scale_out_bandwidth=100e9,  # 800 Gb/s a GPU
        **_NVL72,
        **_GB300_MEASURED,
        sources=(_BLACKWELL, _C2C, _TRAY.format("GB300", "GB300"), _DGX.format("GB300")),
    ),
    # A device is a package of two dies: 144 of these are in a rack of 72 packages, which is now sold as NVL72.
    Hardware(
        name="vera-rubin-nvl144",
        description="NVIDIA Vera Rubin NVL144 (sold as NVL72)",
        platform="cuda",
        # Dense; the 50 PFLOP/s in float4 are of inference, with compression of activations, and no peak of training.
        peaks=_teras(float32=2000, bfloat16=4000, float16=4000, float8=17500, float4=35000),
        device_bytes=288 * 10**9,
        hbm_bandwidth=22e12,  # 13 as first announced
        link="NVLink-C2C",
        link_bandwidth=450e9,  # 1.8 TB/s both ways together for one CPU and two GPUs; no one published a measurement
        link_shared=2,
        host_bytes=3 * 10**12,  # two CPUs of 1.5 TB in a tray
        devices_per_host=4,
        scale_up="NVLink 6",
        scale_up_bandwidth=1.8e12,
        scale_up_devices=72,
        scale_out_bandwidth=200e9,  # 1.6 Tb/s a GPU
        announced=True,
        sources=("NVIDIA Vera Rubin NVL72 product page: preliminary, subject to change",),
    ),
    # Tensor cores of GeForce run at half rate where they accumulate in float32, as training does: those rates. Sizes
    # are what the driver reports. Hosts are assumed: a workstation with room for four cards, 128 GB of memory for
    # each and one port of 10 Gb/s Ethernet.
    Hardware(
        name="rtx-4090",
        description="NVIDIA GeForce RTX 4090",
        platform="cuda",
        peaks=_teras(float32=82.6, bfloat16=165.2, float16=165.2, float8=330.3),
        device_bytes=24564 * 2**20,
        hbm_bandwidth=1.008e12,
        link="PCIe 4",
        link_bandwidth=_PCIE4,
        host_bytes=512 * 10**9,
        devices_per_host=4,
        scale_up="PCIe 4",
        scale_up_bandwidth=_PCIE4,
        scale_up_devices=4,
        scale_out_bandwidth=1.25e9 / 4,
        sources=("NVIDIA Ada GPU architecture whitepaper, appendix A", _PCIE),
    ),
    Hardware(
        name="rtx-5090",
        description="NVIDIA GeForce RTX 5090",
        platform="cuda",
        peaks=_teras(float32=104.8, bfloat16=209.5, float16=209.5, float8=419, float4=1676),
        device_bytes=32607 * 2**20,
        hbm_bandwidth=1.792e12,
        link="PCIe 5",
        link_bandwidth=_PCIE5,
        host_bytes=512 * 10**9,
        devices_per_host=4,
        scale_up="PCIe 5",
        scale_up_bandwidth=_PCIE5,
        scale_up_devices=4,
        scale_out_bandwidth=1.25e9 / 4,
        sources=("NVIDIA RTX Blackwell GPU architecture whitepaper, table 3", _PCIE),
    ),
    _known(
        "rtx-pro-6000",
        # Of the Workstation Edition; the Server Edition's are a few per cent less, the Max-Q's about an eighth.
        peaks=_teras(float32=251.9, bfloat16=503.8, float16=503.8, float8=1007.6, float4=2015.2),
        hbm_bandwidth=1.792e12,
        link="PCIe 5",
        link_bandwidth=_PCIE5,
        scale_up="PCIe 5",
        scale_up_bandwidth=_PCIE5,
        scale_up_devices=8,
        scale_out_bandwidth=25e9,  # uncertain: servers have between one and eight ports of 400 Gb/s
        sources=("NVIDIA RTX Blackwell PRO GPU architecture whitepaper, table 4", _PCIE),
    ),
    _tpu(
        "tpu-v4", "v4", _teras(float32=275, bfloat16=275), hbm=1.2e12, pcie=16e9,
        ici=300e9, dcn=6.25e9, pod=4096, torus=3,
        # The page has neither; the book has 45 GB/s a link one way, and 25 GB/s of network for a host of four chips.
        note="ICI: six links of 50 GB/s each way (arXiv:2304.01433)",
    ),
    _tpu(
        "tpu-v5e", "v5e", _teras(float32=197, bfloat16=197), hbm=0.819e12, pcie=16e9,
        ici=200e9, dcn=3.125e9, pod=256, torus=2,
    ),
    # float8 is read, and computed no faster than bfloat16: so on v5p and v6e.
    _tpu(
        "tpu-v5p", "v5p", _teras(float32=459, bfloat16=459, float8=459), hbm=2.765e12, pcie=16e9,
        ici=600e9, dcn=6.25e9, pod=8960, torus=3,
    ),
    _tpu(
        "tpu-v6e", "v6e", _teras(float32=918, bfloat16=918, float8=918), hbm=1.638e12, pcie=32e9,
        ici=400e9, dcn=12.5e9, pod=256, torus=2,
    ),
    _tpu(
        "tpu-7x", "TPU7x", _teras(float32=2307, bfloat16=2307, float8=4614), hbm=7.38e12, pcie=32e9,
        ici=600e9, dcn=12.5e9, pod=9216, torus=3,
        note="uncertain: no one published the link to the host; that of v6e is assumed for a chip",
    ),
)  # fmt: skip
ENTRIES = {entry.name: entry for entry in _ENTRIES}
