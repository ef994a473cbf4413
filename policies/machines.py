"""Accelerators as a planner counts them: what they compute, hold and move in a second, and whose numbers these are."""

import dataclasses
import difflib
import json
import math
import numbers
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from .accelerators import Target, target as _target, targets as _targets
from .report import Table, format_bytes

DTYPES = ("float32", "bfloat16", "float16", "float8", "float4")
DEFAULT_POOL_GIB = 64
"""What XLA pins for a process with GPUs unless XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says otherwise."""
# Nominal peaks assume a clock that devices may exceed, so that a measured share can be above 1; not by more than this.
_MOST_SHARE = 1.25
# Less of what is nominal than this is no slow device but a wrong unit.
_LEAST_SHARE = 1e-3


def _positive(owner: str, name: str, value: Any, *, whole: bool = False) -> None:
    """Raises ValueError for what isn't a positive, finite number."""
    kinds = numbers.Integral if whole else numbers.Real
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or value <= 0:
        what = "a positive whole number" if whole else "a positive, finite number"
        raise ValueError(f"{owner}: {name} is {value!r}, and should be {what}")


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """What share of a nominal rate each kind of work reaches: assumptions, none of them fitted to a result.

    They are what well-made kernels are commonly reported to reach on large shapes. A measured device overrides them:
    `Hardware.measured`, or `dataclasses.replace`. Raises ValueError for shares outside of (0, 1.25].
    """

    # Large bfloat16 products: cuBLAS reaches 0.70 to 0.80 on H100 and B200, TPUs somewhat more.
    matmul: int | float = 0.75
    """Of the peak, in dense products."""
    # Experts get few and unequal rows, and tiles at their edges are partly empty.
    grouped_matmul: int | float = 0.6
    """Of the peak, in products of experts with the rows they got."""
    # FlashAttention-3 (arXiv:2407.08608) on H100: up to 0.75 forward and 0.55 to 0.60 backward, causal masks less.
    attention: int | float = 0.55
    """Of the peak, in fused attention, both passes."""
    # Streaming kernels reach 0.85 to 0.93; norms and activations with their reductions somewhat less.
    memory: int | float = 0.8
    """Of device memory's bandwidth, in what is limited by it: norms, activations, residual additions."""
    # NCCL's bus bandwidth of large messages: 0.80 of NVLink 4, 0.75 to 1 of NVLink 5, 0.7 in all-to-alls.
    collectives: int | float = 0.75
    """Of the interconnect's bandwidth."""
    # Where a link was measured: 0.71 to 0.88 of PCIe 5, 0.75 to 0.84 of NVLink-C2C.
    link: int | float = 0.8
    """Of the nominal bandwidth of the link to the host, for links that no one measured."""
    # The same links: 0.38 to 0.52 and 0.36 to 0.41. Host memory, or what leads to it, is what both ways share.
    link_both: int | float = 0.4
    """Of the same, each way, while both ways run and all devices of the host copy."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            share = getattr(self, field.name)
            _positive("efficiency", field.name, share)
            if share > _MOST_SHARE:
                raise ValueError(f"efficiency: {field.name} is {share!r}, and a share is at most {_MOST_SHARE}")


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of accelerator with its host and its network; made by `hardware`, changed by `dataclasses.replace`.

    Rates are in bytes or floating-point operations a second, sizes in bytes. All are of one device, as JAX counts
    devices: a GPU's package; a TPU's chip, or half of one on 7x. Raises ValueError for numbers that can't be.

    - `peaks`: dense operations a second by dtype, nominal, never with sparsity; a mapping becomes pairs. `float32` is
      what products of that dtype run at with JAX's default precision: TF32 on GPUs, one pass in bfloat16 on TPUs.
    - `device_bytes`: as the driver or compiler grants it (`accelerators.Target`).
    - `hbm_bandwidth`: of device memory, nominal.
    - `link`, `link_bandwidth`: what joins device and host, and its nominal bandwidth each way: a device's own share
      where `link_shared` devices have one link.
    - `device_to_host`, `host_to_device`: one way alone; `both_...` each while the other runs. Measured while all
      devices of a host copy, as they do in training; None where no one measured it: see `rates`.
    - `host_bytes`, `devices_per_host`: the host's memory, for all of its devices together.
    - `scale_up`: the network within which devices are near: `scale_up_devices` of them. `scale_up_bandwidth` is
      nominal, each way, over all of a device's links together.
    - `torus`: that network's dimensions, each with a link either way; 0 where a switch gives any pair all bandwidth.
    - `scale_out_bandwidth`: of the network beyond, nominal, each way.
    - `announced`: whether the numbers are a vendor's announcement.
    """

    name: str
    description: str
    platform: str
    peaks: Mapping[str, int | float] | tuple[tuple[str, int | float], ...]
    device_bytes: int
    hbm_bandwidth: int | float
    link: str
    link_bandwidth: int | float
    host_bytes: int
    devices_per_host: int
    scale_up: str
    scale_up_bandwidth: int | float
    scale_up_devices: int
    scale_out_bandwidth: int | float
    device_to_host: int | float | None = None
    host_to_device: int | float | None = None
    both_device_to_host: int | float | None = None
    both_host_to_device: int | float | None = None
    link_shared: int = 1
    torus: int = 0
    efficiency: Efficiency = Efficiency()
    sources: tuple[str, ...] = ()
    announced: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"hardware has a name, not {self.name!r}")
        if self.platform not in ("cuda", "tpu"):
            raise ValueError(f"{self.name}: platform is {self.platform!r}, and should be cuda or tpu")
        if not isinstance(self.efficiency, Efficiency):
            raise ValueError(f"{self.name}: efficiency is {self.efficiency!r}, and should be an Efficiency")
        # As pairs it can be hashed and pickled.
        pairs = self.peaks.items() if isinstance(self.peaks, Mapping) else self.peaks
        object.__setattr__(self, "peaks", tuple((dtype, rate) for dtype, rate in pairs))
        object.__setattr__(self, "sources", tuple(self.sources))
        if not self.peaks:
            raise ValueError(f"{self.name}: peaks has no dtype")
        for dtype, rate in self.peaks:
            if dtype not in DTYPES:
                raise ValueError(f"{self.name}: peaks has {dtype!r}, and dtypes are {', '.join(DTYPES)}")
            _positive(self.name, f"peaks[{dtype!r}]", rate)
        for name in ("hbm_bandwidth", "link_bandwidth", "scale_up_bandwidth", "scale_out_bandwidth"):
            _positive(self.name, name, getattr(self, name))
        for name in ("device_bytes", "host_bytes", "devices_per_host", "scale_up_devices", "link_shared"):
            _positive(self.name, name, getattr(self, name), whole=True)
        for name in _WAYS:
            if getattr(self, name) is not None:
                _positive(self.name, name, getattr(self, name))
        if self.torus not in (0, 1, 2, 3):
            raise ValueError(f"{self.name}: torus is {self.torus!r}, and has 0 to 3 dimensions")

    @property
    def target(self) -> Target | None:
        """What programs are compiled for ahead of time for this; None where there is no such target."""
        try:
            return _target(self.name)
        except ValueError:
            return None

    @property
    def host_bytes_per_device(self) -> float:
        """One device's share of its host's memory."""
        return self.host_bytes / self.devices_per_host

    def pinned_bytes_per_device(self, limit_gib: int | float | None = None, *, processes_per_host: int = 1) -> float:
        """One device's share of the pool of pinned memory, which is one for each process.

        `limit_gib` is what XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB is set to, 64 by default as XLA's own; see `xla_flags` for
        what to set it to. Infinite for TPUs, which have no pool. Raises ValueError for what can't be.
        """
        _positive(self.name, "processes_per_host", processes_per_host, whole=True)
        if limit_gib is not None:
            _positive(self.name, "limit_gib", limit_gib)
        if self.platform != "cuda":
            return math.inf
        limit = DEFAULT_POOL_GIB if limit_gib is None else limit_gib
        return limit * 2**30 * processes_per_host / self.devices_per_host

    def peak(self, dtype: Any) -> float:
        """Dense operations a second in `dtype`: a name or a dtype, `float8_e4m3fn` as well as `float8`.

        Raises ValueError for one that has no peak here, with those that have.
        """
        try:
            name = dtype if isinstance(dtype, str) else _dtype_name(dtype)
        except TypeError:
            name = repr(dtype)
        for known, rate in self.peaks:
            # The many kinds of float8 and float4 run alike.
            if name == known or (known in ("float8", "float4") and name.startswith(f"{known}_")):
                return rate
        has = ", ".join(known for known, _ in self.peaks)
        raise ValueError(f"{self.name} has no peak for {name}: there are {has}")

    def rates(self, *, both: bool = False) -> tuple[float, float]:
        """Bytes a second from the device to the host, and from the host to the device.

        One way alone, or with `both` each while the other runs. Where they weren't measured, the share of the nominal
        bandwidth that `efficiency` assumes.
        """
        ways = (self.device_to_host, self.host_to_device)
        alone = tuple(self.link_bandwidth * self.efficiency.link if way is None else way for way in ways)
        if not both:
            return alone
        ways = (self.both_device_to_host, self.both_host_to_device)
        found = (self.link_bandwidth * self.efficiency.link_both if way is None else way for way in ways)
        return tuple(min(one, other) for one, other in zip(found, alone, strict=True))

    def is_kind(self, device_kind: str) -> bool:
        """Whether this is what JAX calls `device_kind`: `NVIDIA H200`, `TPU v5p`."""
        kind = " ".join(re.findall(r"[a-z0-9]+", device_kind.lower()))
        base = self.name.partition(":")[0]
        names = _KINDS.get(base, (base.replace("-", " "),))
        # As words: an H200 is no GH200, and no card of a laptop is its namesake.
        return any(re.search(rf"(?<![a-z0-9]){name}(?![a-z0-9])(?! laptop)", kind) for name in names)

    def measured(self, source: str | os.PathLike | Mapping[str, Any], *, force: bool = False) -> "Hardware":
        """This, with what `overspill selftest --json FILE` measured on such a device: the file, or the object in it.

        The link's rates take the place of those here, but for more than a device's own share of a link that others
        use too: the self-test copies on one device, while its neighbours are idle. So where they share their host's
        memory as well, as on GB200, it finds more than each gets in training. The rate of matrix products becomes
        `efficiency.matmul`, its share of the peak in the dtype it was measured in: nothing else follows from it.
        `sources` says so. Raises ValueError for what can't be read, isn't such a file, holds numbers that can't be, or
        is of another kind of device; the last is allowed with `force`.
        """
        what, data = _read(source)
        kind = data.get("device_kind")
        if not isinstance(kind, str):
            raise ValueError(f"{what}: no device_kind: not what overspill selftest --json writes")
        if not force and not self.is_kind(kind):
            raise ValueError(f"{what}: measured on {kind}, which is no {self.name}; force=True takes it all the same")
        links, matmul = (data.get(part) for part in ("links", "matmul"))
        for part, value in (("links", links), ("matmul", matmul)):
            if value is not None and not isinstance(value, Mapping):
                raise ValueError(f"{what}: {part} is {value!r}, and should be an object")
        changes: dict[str, Any] = {}
        for way in _WAYS:
            key = f"{way}_bytes_per_second"
            if links is not None and key in links:
                most = self.link_bandwidth * self.link_shared
                rate = _bounded(what, f"links.{key}", links[key], most * 1.05, f"{_rate(most)} of {self.link} each way")
                changes[way] = min(rate, self.link_bandwidth) if self.link_shared > 1 else rate
        if matmul is not None:
            dtype = matmul.get("dtype")
            if not isinstance(dtype, str):
                raise ValueError(f"{what}: matmul.dtype is {dtype!r}, and should be a dtype's name")
            try:
                peak = self.peak(dtype)
            except ValueError as error:
                raise ValueError(f"{what}: matmul.dtype: {error}") from None
            flops, nominal = matmul.get("flops_per_second"), f"a peak of {_flops(peak)} in {dtype}"
            rate = _bounded(what, "matmul.flops_per_second", flops, peak * _MOST_SHARE, nominal)
            changes["efficiency"] = dataclasses.replace(self.efficiency, matmul=rate / peak)
        if not changes:
            hint = "overspill selftest --only links --json FILE measures them"
            raise ValueError(f"{what}: no rate of links and none of matmul: {hint}")
        names = ", ".join("matrix products" if name == "efficiency" else name for name in changes)
        note = f"measured on {kind} by overspill selftest, JAX {data.get('jax', 'of unknown version')}: {names}"
        return dataclasses.replace(self, **changes, sources=(*self.sources, note))

    def table(self) -> Table:
        """Every number, with what kind of number it is."""
        nominal, granted = ("announced", "announced") if self.announced else ("nominal", "as granted")
        rows = [(f"peak, {dtype}", _flops(rate), f"{nominal}, dense") for dtype, rate in self.peaks]
        rows += [
            ("device memory", format_bytes(self.device_bytes), granted),
            ("its bandwidth", _rate(self.hbm_bandwidth), nominal),
            (f"{self.link}, each way", _rate(self.link_bandwidth), nominal),
        ]
        for both in (False, True):
            values = zip(_WAYS[2:] if both else _WAYS[:2], self.rates(both=both), strict=True)
            for (way, rate), text in zip(values, ("to the host", "to the device"), strict=True):
                kind = "assumed share" if getattr(self, way) is None else "measured"
                rows.append((f"{text}{', both at once' if both else ''}", _rate(rate), kind))
        rows += [
            ("host memory a device", format_bytes(self.host_bytes_per_device), f"{self.devices_per_host} share a host"),
            (
                f"{self.scale_up}, each way",
                _rate(self.scale_up_bandwidth),
                f"{nominal}, {self.scale_up_devices} devices",
            ),
            ("network, each way", _rate(self.scale_out_bandwidth), nominal),
        ]
        rows += [(f"share: {f.name}", f"{getattr(self.efficiency, f.name):.2f}", "") for f in _SHARES]
        title = f"{self.name}: {self.description}"
        return Table(("of one device", "value", "which is"), rows, title=title, footer="\n".join(self.sources))


def _dtype_name(dtype: Any) -> str:
    import numpy as np  # loading it takes as long as all else that a command starts with

    return np.dtype(dtype).name


_WAYS = ("device_to_host", "host_to_device", "both_device_to_host", "both_host_to_device")
_SHARES = dataclasses.fields(Efficiency)
# What JAX calls them, where that isn't their name here.
_KINDS = {
    "tpu-v5e": ("tpu v5e", "tpu v5 lite"),
    "tpu-v5p": ("tpu v5p", "tpu v5(?! lite)"),
    "tpu-v6e": ("tpu v6e", "tpu v6 lite"),
    "tpu-7x": ("tpu7x", "tpu 7x", "tpu v7x", "tpu7"),
    # Not known for certain.
    "vera-rubin-nvl144": ("rubin", "vr200"),
}


def _rate(value: float) -> str:
    return f"{value / 1e12:.3g} TB/s" if value >= 1e12 else f"{value / 1e9:.3g} GB/s"


def _flops(value: float) -> str:
    return f"{value / 1e12:,.1f} TFLOP/s"


def _read(source: Any) -> tuple[str, Mapping[str, Any]]:
    """What errors call it, and the object that a file or a mapping holds."""
    if isinstance(source, Mapping):
        return "measurements", source
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"measurements are a file or its object, not {source!r}")
    try:
        data = json.loads(pathlib.Path(source).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{source}: can't be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # what is no text and what is no JSON
        raise ValueError(f"{source}: no JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{source}: no object: not what overspill selftest --json writes")
    return str(source), data


def _bounded(what: str, name: str, value: Any, most: float, nominal: str) -> float:
    """A measured number, checked against what is nominal."""
    _positive(what, name, value)
    if not most * _LEAST_SHARE <= value <= most:
        raise ValueError(f"{what}: {name} is {value:g}, which can't be of a device with {nominal}")
    return float(value)


def hardware(name: str | Hardware) -> Hardware:
    """The entry called `name`, as `accelerators.target` reads names: `gb200`, `RTX_5090`, `tpu-v5p:4x4x8`.

    With a shape `scale_up_devices` are those of it. Raises ValueError for other names, with those that are near and all
    there are.
    """
    from .machine_table import ENTRIES

    if isinstance(name, Hardware):
        return name
    known = ", ".join(ENTRIES)
    if not isinstance(name, str):
        raise ValueError(f"hardware is a name such as 'h200', not {name!r}; there are {known}")
    base, given, _ = name.strip().lower().replace("_", "-").partition(":")
    if base in ENTRIES:
        entry = ENTRIES[base]
        if not given:
            return entry
        if base not in _targets():
            raise ValueError(f"hardware {name!r}: only TPUs have a shape; write {base}")
        chosen = _target(name)
        chips = math.prod(map(int, chosen.shape.split("x")))
        # Hosts have four chips.
        return dataclasses.replace(entry, name=chosen.name, scale_up_devices=chips * chosen.devices_per_host // 4)
    bare = {re.sub(r"[^a-z0-9]", "", one): one for one in ENTRIES}
    letters = re.sub(r"[^a-z0-9]", "", base)
    near = [one for one in bare if letters and letters in one] or difflib.get_close_matches(letters, bare, n=2)
    hint = f"; did you mean {' or '.join(bare[one] for one in near)}?" if near else "."
    raise ValueError(f"there is no hardware {name!r}{hint} Hardware: {known}")


def hardwares() -> dict[str, str]:
    """Each entry's name, and a line about it."""
    from .machine_table import ENTRIES

    lines = {}
    for name, one in ENTRIES.items():
        out, back = one.rates()
        link = f"{_rate(out)} to the host and {_rate(back)} back"
        note = " (as announced)" if one.announced else ""
        lines[name] = f"{one.description}: {_flops(one.peak('bfloat16'))} in bfloat16, {link}{note}"
    return lines
