"""What the planner's model says of published results, beside what was published.

    python benchmarks/published.py --json benchmarks/results/published.json

Nothing is compiled or measured, and nothing is fitted: hardware and shares of its rates are those of
`policies.hardwares()`, whatever comes out. Exits with 1 when placements don't come out in the published order.
"""

import argparse
import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp

from overspill import __version__, policies, zoo
from overspill.policies.activation import Placement, annotations
from overspill.policies.assembling import Assembly
from overspill.policies.costs import Cost
from overspill.policies.graphs import Work
from overspill.policies.planned import end
from overspill.policies.planner import Options, Planner
from overspill.policies.programs import Program
from overspill.policies.report import Table, format_bytes
from overspill.policies.solving import solve
from overspill.zoo.building import parameters
from overspill.zoo.meshes import abstract_mesh, layout_of

ASSUMPTIONS = """\
Of all runs:
- Published figures are throughput; Intel's could as well be time saved, 6.9 % less of which is 7.4 % more throughput.
- TFLOP/s count products as MaxText does: half of attention's squares, nothing computed again, no elementwise work.
- The state is a parameter and two moments in float32, with a copy of the parameters and gradients in bfloat16, all cut
  over all devices; weights are gathered for each layer and each pass, beside the computation. No tensor, sequence or
  pipeline parallelism, one micro-batch.
- Attention is a fused kernel: scores never reach device memory, what the causal mask hides isn't computed.
- Recomputing keeps the blocks' inputs on the device and nothing else. Logits are made in chunks.
- Rates, the link's measured ones among them, and the shares of peaks are those of `policies.hardware(...)`: products
  reach 0.75 of the peak, those of experts 0.6, attention 0.55, streams 0.8 of device memory's bandwidth, collectives
  0.75 of the interconnect's. Starting kernels takes no time, nor does unequal load of experts.
NVIDIA:
- DeepSeek-V3: sequences of 4096 tokens, as in its pretraining; 2 of them on each device are the global batch of 256, 8
  are 1024. Products in bfloat16: 908 TFLOP/s are 36 % of that peak. No multi-token prediction. The experts of a layer
  are spread over 32 devices of one rack, 8 on each, and the computation waits for tokens that are exchanged, in
  bfloat16. Which tensors went to the host isn't said: the planner chooses, and fills the memory that Overspill gives
  programs and its pinned pool. Without pipelining the same tensors go. All offloading is at a global batch of 1024.
  The latency hiding scheduler is taken to be on in all rows, though it may be what recompute hadn't.
- Llama-3.1-405B: one sequence of 8192 tokens on each device, its pretraining's length. 2669 TFLOP/s are above the peak
  in bfloat16, so products are in float8, attention's aside; weights are gathered in bfloat16 all the same. Query, key
  and value are kept after rotary embedding.
Intel: one sequence of 4096 tokens on each of 8 devices, bfloat16. This state and its gradients need more memory than
  an H200 has; what the run did instead (moments in bfloat16, say) changes its time little, and isn't modelled.
poolside: 8 devices with 8 sequences of 4096 tokens each, bfloat16, experts spread over all 8. Checkpointing is taken to
  be of whole blocks, and the MLP to be what experts compute inside: gate, up and their product."""
_STATE = 4 + 4 + 4  # bytes of a parameter: itself and two moments in float32
_PASSING = 2 + 2  # its copy that products are computed with, and its gradient
_SHORT = 64  # tokens


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run as its source describes it, and as is assumed where it doesn't.

    - `rows`, `length`: sequences of one device in a step, and their tokens.
    - `products`: the number format of products, where it isn't bfloat16.
    - `spread`: how many devices share the experts of a layer.
    """

    model: str
    hardware: str
    devices: int
    rows: int
    length: int
    products: str | None = None
    spread: int = 1

    def __str__(self) -> str:
        return f"{self.model}, {self.devices} x {self.hardware}, {self.rows} x {self.length} tokens a device"


class Prediction:
    """The planner's model of a run's step: what any placement gives.

    Every parameter is cut over all devices. Of the experts it reads those that one device has, with the rows that all
    devices together send them when they are equally loaded: as many as this device's own tokens make. (A step with an
    `expert` axis in its mesh has room for the worst case, which other frameworks don't.) What that leaves out is added:
    state and gradients of the other experts, the optimizer's way through them, and the exchange of tokens, for which
    the computation waits. Memory is that of the same tokens in short sequences: as with a fused kernel there are no
    scores to speak of.
    """

    def __init__(self, run: Run):
        self.run, whole = run, zoo.REGISTRY[run.model]
        if getattr(whole, "num_nextn_predict_layers", 0):
            whole = dataclasses.replace(whole, num_nextn_predict_layers=0)
        config = _experts_of_one(whole, run.spread)
        self.model = zoo.abstract(config, dtype=jnp.bfloat16)
        self.missing = (parameters(whole).total - parameters(self.model).total) / run.devices
        self.long, self.short = self._planner(run.length), self._planner(_SHORT)

    def _planner(self, length: int) -> Planner:
        run, optimizer, key = self.run, zoo.adamw(1e-4), jax.random.key(0)
        layout = layout_of(abstract_mesh(f"fsdp={run.devices}"), ())
        state = zoo.init_state(self.model, optimizer, key=key, master_dtype=jnp.float32, mesh=layout)
        step = zoo.make_train_step(self.model, optimizer, mesh=layout)
        rows = run.devices * run.rows * run.length // length
        ids, valid = (jax.ShapeDtypeStruct((rows, length), dtype) for dtype in (jnp.int32, jnp.bool_))
        options = Options(
            policies.hardware(run.hardware), dtype=run.products, fused_attention=True,
            reserved_bytes=self.missing * (_STATE + _PASSING),
        )  # fmt: skip
        planner = Planner(options, Program(step, (state, zoo.Batch(ids, ids, ids, ids, valid)), {}))
        planner.prices, old = dataclasses.replace(planner.prices, exchanging=run.spread), planner.assembly
        blocks = [_exchanging(block, run.spread) for block in old.blocks]
        planner.assembly = Assembly(old.program, blocks, planner.prices, old.pieces)
        return planner

    @functools.cached_property
    def problem(self):
        """What depends on placements: `policies.problem.Problem`."""
        found, groups = self.short.problem, self.long.assembly.groups
        assert [[item.path for item in group.items] for group in groups] == [
            [item.path for item in group.items] for group in found.groups
        ]
        more = self.short.prices.memory(3 * self.missing * _STATE)
        return dataclasses.replace(found, groups=groups, outside_seconds=found.outside_seconds + more)

    @functools.cached_property
    def flops(self) -> float:
        """Model FLOPs of a step on one device as MaxText counts them: half of attention, nothing computed again."""
        blocks = sum(
            block.times * (work.cost.matmul + work.cost.grouped + work.cost.attention / 2)
            for block in self.long.assembly.blocks
            for work in (*block.graph.forward, *block.graph.backward)
        )
        config = zoo.REGISTRY[self.run.model]
        return blocks + 6 * self.run.rows * self.run.length * config.hidden_size * config.vocab_size

    def preset(self, name: str, **others: str):
        """A preset as a decision; `others` by the names of activations. What can't wait there stays on the device."""
        rules = {row.path: row.placement for row in annotations(policies.place(self.model, name))}
        decision = []
        for group in self.problem.groups:
            ends = {end(path, group.stack): place for path, place in rules.items() if path.startswith(group.stack)}
            ends = {key: Placement(others.get(key.rpartition(".")[2], place)) for key, place in ends.items()}
            chosen = [(item.placements, ends[end(item.path, group.stack)]) for item in group.items]
            decision.append(tuple(place if place in every else Placement.DEVICE for every, place in chosen))
        return tuple(decision)

    def teraflops(self, decision, *, pipelined: bool = True, overlapped: bool = True) -> float:
        """TFLOP/s of a device; without `overlapped` nothing computes while weights are gathered."""
        problem = dataclasses.replace(self.problem, pipelined=pipelined)
        seconds = problem.evaluate(decision).seconds + (0.0 if overlapped else self._hidden_gathers)
        return self.flops / seconds / 1e12

    @property
    def _hidden_gathers(self) -> float:
        """Seconds of a step in which weights are gathered beside the computation."""
        seconds = 0.0
        for block in self.long.assembly.blocks:
            passes = block.graph.forward, block.graph.backward
            only = (tuple(Work(Cost(gathered=w.cost.gathered), 0.0) for w in works) for works in passes)
            rest = (
                tuple(dataclasses.replace(w, cost=dataclasses.replace(w.cost, gathered=0)) for w in works)
                for works in passes
            )
            both, gathers, computed = (sum(self.long.prices.passes(*p)) for p in (passes, only, rest))
            seconds += block.times * (gathers + computed - both)
        return seconds


def _experts_of_one(config, spread: int):
    """The configuration of a model that has as many experts as one device has of it."""
    if spread == 1:
        return config
    limits = {"n_routed_experts": config.n_routed_experts // spread}
    if getattr(config, "n_group", None):
        limits |= {"n_group": 1, "topk_group": 1}
    return dataclasses.replace(config, **limits)


def _exchanging(block, spread: int):
    """A block whose tokens go to their experts, and back, over `spread` devices."""
    graph = block.graph
    sizes = {node.name.rpartition(".")[2]: i for i, node in enumerate(graph.nodes) if node.name}
    if spread == 1 or "dispatched" not in sizes:
        return block
    size = graph.nodes[sizes["dispatched"]].bytes
    sent = Cost(exchanged=size * (spread - 1) / spread)
    # Tokens travel in what makes `dispatched`, results in what first reads `expert_output`.
    there = graph.nodes[sizes["dispatched"]].reads[-1]
    back = next(i for i, node in enumerate(graph.nodes) if sizes["expert_output"] in node.reads)
    nodes, forward = list(graph.nodes), list(graph.forward)
    for i in (there, back):
        forward[i] = dataclasses.replace(nodes[i].work, cost=nodes[i].work.cost + sent)
        nodes[i] = dataclasses.replace(nodes[i], work=forward[i])
    # The backward pass sends as much, each way once.
    both = dict(forward=tuple(forward), backward=(*graph.backward, Work(sent, 0.0), Work(sent, 0.0)))
    return dataclasses.replace(block, graph=dataclasses.replace(graph, nodes=tuple(nodes), **both))


@dataclasses.dataclass(frozen=True)
class Row:
    """A published number and the same one predicted. `published` is a range where it is two numbers."""

    source: str
    what: str
    unit: str
    published: float | tuple[float, float]
    predicted: float

    def cells(self) -> tuple[str, ...]:
        form = "{:+.1f} %" if self.unit == "%" else "{:,.0f} " + self.unit
        low, high = self.published if isinstance(self.published, tuple) else (self.published,) * 2
        said = form.format(low) if low == high else f"{low:+.0f} to {form.format(high)}"
        near = min(max(self.predicted, low), high)
        by = f"{self.predicted - near:+.1f} points" if self.unit == "%" else f"{self.predicted / near - 1:+.1%}"
        return self.source, self.what, said, form.format(self.predicted), by


def gain(after: float, before: float) -> float:
    """Per cent more throughput."""
    return 100 * (after / before - 1)


def deepseek():
    """Rows, what changes with other assumptions, published orders and whether they come out, and what was chosen."""
    run = Run("deepseek-v3", "gb200", 128, 2, 4096, spread=32)
    small, large = (Prediction(dataclasses.replace(run, rows=rows)) for rows in (2, 8))
    again, chosen, saved = small.preset("recompute_all"), solve(large.problem), large.preset("save_all")
    few, many = (Prediction(dataclasses.replace(run, rows=rows, length=2048)) for rows in (2, 8))
    other, before = solve(many.problem), few.teraflops(few.preset("recompute_all"))
    slow = small.teraflops(again)
    fast, waiting = large.teraflops(chosen), large.teraflops(chosen, pipelined=False)
    outcome, everything = (large.problem.evaluate(decision) for decision in (chosen, saved))
    name, unit = "NVIDIA, DeepSeek-V3", "TFLOP/s"
    rows = [
        Row(name, "recompute, global batch 256", unit, 578, slow),
        Row(name, "offload, not pipelined, 1024", unit, 542, waiting),
        Row(name, "offload, pipelined, 1024", unit, 908.2, fast),
        Row(name, "pipelined offload over recompute", "%", 57.0, gain(fast, slow)),
        Row(name, "pipelined offload over not pipelined", "%", 67.7, gain(fast, waiting)),
        Row(name, "device memory with offload", "GiB", 165.2, outcome.device_bytes / 2**30),
    ]
    variations = [
        (name, "recompute, weights gathered with nothing beside", unit, small.teraflops(again, overlapped=False)),
        (name, "not pipelined, weights gathered with nothing beside", unit,
         large.teraflops(chosen, pipelined=False, overlapped=False)),
        (name, "recompute, global batch 1024", unit, large.teraflops(large.preset("recompute_all"))),
        (name, "the planner's choice, global batch 256", unit, small.teraflops(solve(small.problem))),
        (name, "2048 tokens: pipelined offload over recompute", "%", gain(many.teraflops(other), before)),
        (name, "2048 tokens: pipelined offload over not pipelined", "%",
         gain(many.teraflops(other), many.teraflops(other, pipelined=False))),
    ]  # fmt: skip
    limit = large.problem.limits.device_bytes
    needs = f"{format_bytes(everything.device_bytes)} of {format_bytes(limit)}"
    orders = {
        f"{name}: pipelined offload > recompute": fast > slow,
        f"{name}: recompute > offload that isn't pipelined": slow > waiting,
        f"{name}: saving on the device at 1024 doesn't fit ({needs})": everything.device_bytes > limit,
        f"{name}: offload at 1024 fits ({format_bytes(outcome.device_bytes)})": large.problem.fits(outcome),
    }
    layers: dict[str, dict[str, int]] = {}
    for group, row in zip(large.problem.groups, chosen, strict=True):
        for item, place in zip(group.items, row, strict=True):
            counts = layers.setdefault(end(item.path, group.stack), {})
            counts[place.value] = counts.get(place.value, 0) + group.layers
    return rows, variations, orders, layers


def qkv(run: Run):
    """TFLOP/s of recomputing everything, and with query, key and value on the host."""
    prediction = Prediction(run)
    return tuple(prediction.teraflops(prediction.preset(name)) for name in ("recompute_all", "offload_qkv"))


def llama():
    """As `deepseek`, without a choice."""
    run = Run("llama-3.1-405b", "gb200", 128, 1, 8192, "float8")
    name, unit = "NVIDIA, Llama-3.1-405B", "TFLOP/s"
    before, after = qkv(run)
    rows = [
        Row(name, "recompute", unit, 2669, before),
        Row(name, "query, key and value offloaded", unit, 2746, after),
        Row(name, "query, key and value offloaded, gain", "%", 2.9, gain(after, before)),
    ]
    others = {
        "gain with 2 x 4096 tokens a device": dataclasses.replace(run, rows=2, length=4096),
        "gain with products in float4": dataclasses.replace(run, products="float4"),
    }
    variations = [(name, what, "%", gain(*qkv(other)[::-1])) for what, other in others.items()]
    few = 1 < gain(after, before) < 6
    return rows, variations, {f"{name}: offloading query, key and value gains a few per cent": few}, {}


def intel():
    """As `llama`."""
    run, name = Run("llama-3.3-70b", "h200", 8, 1, 4096), "Intel, Llama-3.3-70B"
    before, after = qkv(run)
    rows = [Row(name, "query, key and value offloaded, gain on H200", "%", 6.9, gain(after, before))]
    longer = qkv(dataclasses.replace(run, length=8192))
    variations = [(name, "gain with 8192 tokens a device", "%", gain(*longer[::-1]))]
    return rows, variations, {f"{name}: offloading query, key and value gains": after > before}, {}


def poolside():
    """As `llama`."""
    name = "poolside, Qwen3-30B-A3B"
    run = Run("qwen3-30b-a3b", "gb200", 8, 8, 4096, spread=8)
    near, whole = Prediction(run), Prediction(dataclasses.replace(run, spread=1))
    alone, moved, less = (
        whole.teraflops(whole.preset(preset, **others))
        for preset, others in (("recompute_all", {}), ("offload_mlp", {}), ("offload_mlp", {"hidden": "recompute"}))
    )
    before = near.teraflops(near.preset("recompute_all"))
    after = near.teraflops(near.preset("offload_mlp"))
    inputs = near.teraflops(near.preset("offload_mlp", hidden="recompute"))
    inside = dict(gate="recompute", up="recompute", hidden="recompute")
    kept, on_host = (near.teraflops(near.preset("save_all", **{k: to or v for k, v in inside.items()}))
                     for to in (None, "host"))  # fmt: skip
    rows = [Row(name, "gate, up and hidden offloaded, gain", "%", (6.0, 13.0), gain(after, before))]
    variations = [
        (name, "gate and up offloaded, hidden computed from them", "%", gain(inputs, before)),
        (name, "all but the experts' gate, up and hidden saved in both", "%", gain(on_host, kept)),
        (name, "all experts on each device: gate, up and hidden offloaded", "%", gain(moved, alone)),
        (name, "all experts on each device: gate and up offloaded", "%", gain(less, alone)),
    ]
    return rows, variations, {f"{name}: offloading the MLP gains": after > before}, {}


def predict():
    """All rows, variations and orders, and the placements that were chosen for DeepSeek-V3."""
    parts = [source() for source in (deepseek, llama, intel, poolside)]
    rows, variations = ([row for part in parts for row in part[i]] for i in (0, 1))
    orders = {text: bool(holds) for part in parts for text, holds in part[2].items()}
    return rows, variations, orders, parts[0][3]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    path = parser.parse_args().json
    rows, variations, orders, chosen = predict()
    print(Table(("source", "what", "published", "predicted", "predicted is off by"), [row.cells() for row in rows]))
    shown = [(name, what, f"{value:+.1f} %" if unit == "%" else f"{value:,.0f} {unit}")
             for name, what, unit, value in variations]  # fmt: skip
    print(Table(("source", "with another assumption", "predicted"), shown), ASSUMPTIONS, sep="\n\n")
    print("\nDeepSeek-V3 with offload, layers by where each activation waits:")
    for what, places in chosen.items():
        print(f"  {what}: {', '.join(f'{place} {n}' for place, n in places.items())}")
    for text, holds in orders.items():
        print(f"{'as published' if holds else 'NOT AS PUBLISHED'}: {text}")
    if path:
        result = {
            "overspill": __version__, "jax": jax.__version__, "rows": [dataclasses.asdict(row) for row in rows],
            "variations": [dict(zip(("source", "what", "unit", "predicted"), v, strict=True)) for v in variations],
            "orders": orders, "deepseek_placements": chosen,
        }  # fmt: skip
        rounded = json.loads(json.dumps(result), parse_float=lambda text: round(float(text), 2))
        path.write_text(json.dumps(rounded, indent=1) + "\n")
    return int(not all(orders.values()))


if __name__ == "__main__":
    raise SystemExit(main())
