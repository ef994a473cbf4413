"""From a program's blocks to a planner's groups: what each activation weighs, and what computing it again takes."""

import functools
from collections.abc import Iterator, Sequence

from .activation import Placement
from .blocks import Block
from .costs import Cost
from .graphs import Work
from .planned import end
from .pricing import Prices
from .problem import Decision, Group, Item, Unit, recomputed
from .programs import Program
from .spaces import HOST_MEMORY


class Assembly:
    """A program's blocks as groups of layers, priced.

    - `pieces`: into how many groups each stack may be cut; as it is cut now for None.
    """

    def __init__(self, program: Program, blocks: Sequence[Block], prices: Prices, pieces: int | None):
        self.program, self.blocks, self.prices, self.pieces = program, blocks, prices, pieces

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """In the order of the forward pass."""
        groups: list[Group] = []
        done: set[str] = set()
        for block in self.blocks:
            stack = next((s for s in self.program.stacks if block.prefix.startswith(f"{s.path}.segments.")), None)
            if stack is None:
                groups.append(self._group(block, block.prefix or "the layer", block.prefix, block.times, block.prefix))
            elif stack.path not in done:
                done.add(stack.path)
                for i, (first, count) in enumerate(stack.pieces(self.pieces)):
                    name = stack.label(first, count)
                    groups.append(self._group(block, name, stack.path, count, f"{stack.path}.segments.{i}"))
        return tuple(groups)

    def _group(self, block: Block, name: str, stack: str, layers: int, prefix: str) -> Group:
        """The group of a block's layers, its activations called as they will be in a segment of its own."""
        nodes, useful = block.graph.nodes, _useful(block)
        items: list[Item] = []
        index: dict[str, int] = {}
        for node in nodes:
            if node.name is None or node.name in index or node.name not in useful:
                continue
            index[node.name] = len(items)
            # A layer may call one activation on several values.
            size = self.program.sizes.get(node.name, 0) // block.times or node.bytes
            every = list(Placement)
            if not self.program.rows[node.name].activation.recomputable:
                every.remove(Placement.RECOMPUTE)
            if layers == 1 or not block.looped:
                # Outside of loops XLA brings what went to the host back at once: moving it frees nothing.
                every.remove(Placement.HOST)
            path = prefix + node.name.removeprefix(block.prefix) if block.prefix else node.name
            # Copied into the stack of all layers, and out of it; outside of loops it stays where it was made.
            kept = 2 * self.prices.memory(size) if block.looped else 0.0
            items.append(Item(path, size, tuple(every), kept, kept))
        units = tuple(Unit(self._again(node.work), node.reads, node.wanted, index.get(node.name)) for node in nodes)
        forward, backward = self.prices.passes(block.graph.forward, block.graph.backward)
        fetched = self._fetched(stack)
        return Group(name, stack, layers, tuple(items), units, forward, backward, 0, fetched, fetched)

    def _again(self, work: Work) -> int | float:
        """What one node takes again. Weights are gathered in the backward pass in any case."""
        return self.prices.compute(work) + self.prices.waiting([work])

    def _fetched(self, stack: str) -> int:
        """Bytes of a layer's parameters that live on the host, which each pass brings in."""
        found = next((s for s in self.program.stacks if s.path == stack), None)
        if found is None or not self.program.is_step:
            return 0
        return round(self.program.parameters_in(HOST_MEMORY, f"{stack}.") / found.num_layers)

    def unneeded(self) -> dict[str, Placement]:
        """Activations that the backward pass needs in no case: they are kept nowhere."""
        needed = {name for block in self.blocks for name in _useful(block)}
        return {
            path: Placement.RECOMPUTE if row.activation.recomputable else row.placement
            for path, row in self.program.rows.items() if path not in needed
        }  # fmt: skip

    def placements(self, decision: Decision) -> dict[str, Placement]:
        """A decision for the segments that the program has now: each as the first group of its stack."""
        first: dict[str, dict[str, Placement]] = {}
        for group, row in zip(self.groups, decision, strict=True):
            ends = {end(item.path, group.stack): place for item, place in zip(group.items, row, strict=True)}
            first.setdefault(group.stack, ends)
        out = self.unneeded()
        for path in self.program.rows:
            for stack, ends in first.items():
                if (path.startswith(f"{stack}.") or not stack) and end(path, stack) in ends:
                    out[path] = ends[end(path, stack)]
        return out

    def _with_blocks(self) -> Iterator[tuple[int, Block, Group]]:
        for i, group in enumerate(self.groups):
            yield i, next(b for b in self.blocks if _within(b.prefix, group.stack)), group

    def outside(self, whole: Cost, decision: Decision) -> Cost:
        """Products of a step in no block, such as the head's, where `whole` is the step under `decision`."""
        blocks = Cost()
        for i, block, group in self._with_blocks():
            layer = sum((work.cost for work in (*block.graph.forward, *block.graph.backward)), Cost())
            again = sum((block.graph.nodes[u].work.cost for u in recomputed(group, decision[i])), Cost())
            blocks += (layer + again) * (group.layers * self.program.micro_batches)
        kinds = ("matmul", "attention", "grouped")
        return Cost(**{kind: max(getattr(whole, kind) - getattr(blocks, kind), 0.0) for kind in kinds})

    def outside_seconds(self, products: Cost) -> int | float:
        """Of what is in no block: products, and the optimizer's pass over the state."""
        seconds = self.prices.operations(Work(products, 0.0, self.format))
        held = self.program.bytes_in(HOST_MEMORY)
        # It reads and writes every array of the state, and reads as much of gradients again. What lives on the host
        # comes and goes for it, both ways at once, while nothing else is left to compute.
        out, back = self.prices.hardware.rates(both=True)
        moved = max(held / out, held / back)
        return seconds + moved + self.prices.memory(3 * (self.program.bytes_in("device") + held))

    @property
    def flops(self) -> int | float:
        """Products of all blocks in a step on one device, nothing computed again."""
        return self.program.micro_batches * sum(
            group.layers * sum(products(work.cost) for work in (*block.graph.forward, *block.graph.backward))
            for _, block, group in self._with_blocks()
        )

    @property
    def forward_flops(self) -> float:
        """Products of all blocks in the forward pass of a micro-batch, on one device."""
        return float(
            sum(
                group.layers * sum(products(work.cost) for work in block.graph.forward)
                for _, block, group in self._with_blocks()
            )
        )

    @functools.cached_property
    def format(self) -> str:
        """The number format of most of the products."""
        sizes: dict[str, float] = {}
        for block in self.blocks:
            for work in block.graph.forward:
                sizes[work.dtype] = sizes.get(work.dtype, 0.0) + products(work.cost)
        return max(sizes, key=sizes.__getitem__, default="float32")


def products(cost: Cost) -> int | float:
    """Floating-point operations of products of all kinds."""
    return cost.matmul + cost.attention + cost.grouped


def _within(prefix: str, stack: str) -> bool:
    return prefix == stack or prefix.startswith(f"{stack}.segments.")


def _useful(block: Block) -> set[str]:
    """The activations that the backward pass reads, or computes others again from."""
    nodes = block.graph.nodes
    reached = {i for i, node in enumerate(nodes) if node.wanted}
    for i in range(len(nodes) - 1, -1, -1):
        if i in reached:
            reached.update(nodes[i].reads)
    return {nodes[i].name for i in reached if nodes[i].name is not None}
