"""From work to seconds: a roofline for each operation, and what travels between devices."""

import dataclasses
from collections.abc import Iterable

from .graphs import Work
from .machines import Hardware


@dataclasses.dataclass(frozen=True)
class Prices:
    """What work costs on some hardware, in seconds of one device.

    - `devices`: of the mesh; `exchanging`: those that exchange tokens or sum parts of products, its innermost axis.
    - `dtype`: the number format that products run in, where that is another than the program's: float8 training.
    - `fused_attention`: counts attention as a fused kernel would run it: scores never leave the chip, and what a causal
      mask hides isn't computed. Otherwise as the program says.
    """

    hardware: Hardware
    devices: int = 1
    exchanging: int = 1
    dtype: str | None = None
    fused_attention: bool = False

    def compute(self, work: Work) -> int | float:
        """Of operations and device memory's traffic, whichever takes longer."""
        return max(self.operations(work), self.traffic(work))

    def operations(self, work: Work) -> int | float:
        """Of products. Those of experts and of attention reach less of the peak than others."""
        share, cost = self.hardware.efficiency, work.cost
        attention = cost.attention / 2 if self.fused_attention else cost.attention
        weighed = (
            cost.matmul / share.matmul
            + cost.grouped / share.grouped_matmul
            + attention / (share.attention if self.fused_attention else share.matmul)
        )
        if not weighed:
            return 0.0
        return weighed / self.hardware.peak(self._format(work))

    def _format(self, work: Work) -> str:
        # Softmax and its products stay in the program's format where the rest is quantised.
        if work.cost.attention:
            return work.narrowest if self.fused_attention else work.dtype
        return work.dtype if self.dtype is None else self.dtype

    def traffic(self, work: Work) -> int | float:
        """Of device memory: a stream at the share of its bandwidth that such operations reach."""
        if work.attention and self.fused_attention:
            return 0.0
        return self.memory(work.memory_bytes)

    def memory(self, size: int | float) -> int | float:
        """Of `size` bytes read or written in device memory."""
        return size / (self.hardware.hbm_bandwidth * self.hardware.efficiency.memory)

    def waiting(self, works: Iterable[Work]) -> int | float:
        """Of sums over devices and of tokens' ways to experts, for which the computation waits."""
        return self._travelling(sum(work.cost.reduced + work.cost.exchanged for work in works))

    def _travelling(self, size: int | float) -> int | float:
        near = self.exchanging <= self.hardware.scale_up_devices
        rate = self.hardware.scale_up_bandwidth if near else self.hardware.scale_out_bandwidth
        return size / (rate * self.hardware.efficiency.collectives)

    def gathering(self, size: int | float) -> int | float:
        """Of weights that are gathered, or whose gradients are scattered: `size` bytes for each device.

        Beyond the devices that are near, every node takes them in once, through the network of all its devices.
        """
        rate = self.hardware.scale_up_bandwidth
        if self.devices > self.hardware.scale_up_devices:
            rate = min(rate, self.hardware.scale_out_bandwidth * self.hardware.scale_up_devices)
        return size / (rate * self.hardware.efficiency.collectives)

    def passes(self, forward: tuple[Work, ...], backward: tuple[Work, ...]) -> tuple[float, float]:
        """Of one block's two passes. Weights are gathered beside the computation, and wait only where it is shorter."""
        weights = sum(work.cost.gathered for work in forward)
        explicit = sum(work.cost.gathered for work in backward)
        # The backward pass gathers the weights again, and scatters their gradients, which are as large.
        sizes = weights, max(explicit, 2 * weights)
        computed = [sum(map(self.compute, works)) for works in (forward, backward)]
        # Parts of products that one pass sums are what the other one has whole, and the other way round.
        summed = sum(work.cost.reduced for work in forward)
        own = sum(work.cost.reduced for work in backward)
        waits = [self.waiting(forward), self.waiting(backward)]
        waits[1] += self._travelling(max(summed - own, 0.0))
        first, second = (
            max(seconds, self.gathering(size)) + wait
            for seconds, size, wait in zip(computed, sizes, waits, strict=True)
        )
        return first, second
