"""Llama and DeepSeek with their training loss in float64 NumPy: what the compiled gradients must be."""

from typing import Any

import numpy as np

from ..layers.loss import IGNORED
from .data import Batch
from .optimizer import arrays_by_path
from .selftest_models import BALANCE_WEIGHT, MTP_WEIGHT, by_layer
from .selftest_tape import Node, concatenate, einsum, exp, gradients, log, sigmoid

Gradients = dict[tuple[str, int | None], np.ndarray]


class _Weights:
    """The arrays of a block, or of any other part of a model, under a prefix."""

    def __init__(self, nodes: dict[tuple[str, int | None], Node], prefix: str, layer: int | None):
        self._nodes, self._prefix, self._layer = nodes, prefix, layer

    def __getitem__(self, name: str) -> Node:
        return self._nodes[f"{self._prefix}.{name}", self._layer]

    def __contains__(self, name: str) -> bool:
        return (f"{self._prefix}.{name}", self._layer) in self._nodes

    def part(self, name: str) -> "_Weights":
        return _Weights(self._nodes, f"{self._prefix}.{name}", self._layer)


def reference(model: Any, batch: Batch) -> tuple[float, Gradients]:
    """The training loss of `model` on `batch`, and its gradient by name and layer, in float64.

    `model` is one of the self-test's: no scaling of rotary embeddings, no windows, sigmoid routers.
    """
    arrays = by_layer(arrays_by_path(model), model.stacks())
    nodes = {key: Node(value) for key, value in arrays.items()}
    run = _Run(model.config, nodes, batch)
    loss = run.loss(model)
    # What is no parameter, the routers' biases, takes part by choosing alone: no gradient reaches it.
    names = list(nodes)
    return float(loss.value), dict(zip(names, gradients(loss, nodes.values()), strict=True))


class _Run:
    """One forward pass."""

    def __init__(self, config: Any, nodes: dict[tuple[str, int | None], Node], batch: Batch):
        self.config, self.nodes = config, nodes
        self.tokens, self.targets = np.asarray(batch.tokens), np.asarray(batch.targets)
        self.segments, self.positions = np.asarray(batch.segment_ids), np.asarray(batch.positions)
        self.mask = np.asarray(batch.mask)
        self.balance: list[Node] = []

    def loss(self, model: Any) -> Node:
        config, embedding = self.config, self.nodes["embedding.weight", None]
        x = embedding[self.tokens]
        for name, stack in model.stacks().items():
            for layer in range(stack.start, stack.start + stack.num_layers):
                x = self.block(x, _Weights(self.nodes, name, layer), self.mask)
        states = _norm(x, self.nodes["norm.scale", None], config.rms_norm_eps)
        total = self.cross_entropy(states, self.targets, self.mask)
        depths = []
        for k, _ in enumerate(getattr(model, "mtp", ()), start=1):
            part = _Weights(self.nodes, f"mtp.{k - 1}", None)
            valid = self.mask & _ahead(self.mask, k, False) & (self.segments == _ahead(self.segments, k, -1))
            valid[:, -k:] = False
            joined = concatenate([
                _norm(embedding[_ahead(self.tokens, k, 0)], part["embedding_norm.scale"], config.rms_norm_eps),
                _norm(states, part["hidden_norm.scale"], config.rms_norm_eps),
            ])  # fmt: skip
            x = self.block(_linear(joined, part.part("projection")), part.part("block"), valid)
            states = _norm(x, part["norm.scale"], config.rms_norm_eps)
            depths.append(self.cross_entropy(states, _ahead(self.targets, k, IGNORED), valid))
        for depth in depths:
            total = total + depth * (MTP_WEIGHT / len(depths))
        for part in self.balance:
            total = total + part * BALANCE_WEIGHT
        return total

    def block(self, x: Node, w: _Weights, mask: np.ndarray) -> Node:
        eps = self.config.rms_norm_eps
        attention = self.latent_attention if "attention.kv_down.weight" in w else self.attention
        x = x + attention(_norm(x, w["attention_norm.scale"], eps), w.part("attention"), mask)
        normed = _norm(x, w["feed_forward_norm.scale"], eps)
        return x + (self.moe(normed, w.part("moe"), mask) if "moe.router.weight" in w else _mlp(normed, w.part("mlp")))

    def attention(self, x: Node, w: _Weights, mask: np.ndarray) -> Node:
        rows, length, size = *x.shape[:2], self.config.head_dim
        q, k, v = (_linear(x, w.part(f"{name}_projection")) for name in ("query", "key", "value"))
        q, k, v = (y.reshape(rows, length, -1, size) for y in (q, k, v))
        q, k = self.rotate(q, interleaved=False), self.rotate(k, interleaved=False)
        return _linear(self.attend(q, k, v, mask), w.part("output_projection"))

    def latent_attention(self, x: Node, w: _Weights, mask: np.ndarray) -> Node:
        c = self.config
        rows, length, heads, nope = *x.shape[:2], c.num_attention_heads, c.qk_nope_head_dim
        latent = _norm(_linear(x, w.part("query_down")), w["query_norm.scale"], 1e-6)
        q = _linear(latent, w.part("query_up")).reshape(rows, length, heads, -1)
        q = concatenate([q[..., :nope], self.rotate(q[..., nope:], interleaved=True)])
        latent = _linear(x, w.part("kv_down"))
        normed = _norm(latent[..., : c.kv_lora_rank], w["kv_norm.scale"], 1e-6)
        expanded = _linear(normed, w.part("kv_up")).reshape(rows, length, heads, -1)
        shared = self.rotate(latent[..., c.kv_lora_rank :].reshape(rows, length, 1, -1), interleaved=True)
        shared = shared * np.ones((heads, 1))
        k = concatenate([expanded[..., :nope], shared])
        return _linear(self.attend(q, k, expanded[..., nope:], mask), w.part("output_projection"))

    def rotate(self, x: Node, *, interleaved: bool) -> Node:
        half = x.shape[-1] // 2
        angles = self.positions[..., None, None] * float(self.config.rope_theta) ** (-np.arange(half) / half)
        cosine, sine = np.cos(angles), np.sin(angles)
        a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
        return concatenate([a * cosine - b * sine, a * sine + b * cosine])

    def attend(self, q: Node, k: Node, v: Node, mask: np.ndarray) -> Node:
        """The heads' outputs side by side, `[rows, length, heads * size]`."""
        rows, length, heads, size = q.shape
        where = np.arange(length)
        visible = (where[None] <= where[:, None])[None] & (self.segments[:, :, None] == self.segments[:, None])
        visible = (visible & mask[:, None])[:, None, None]
        q = q.reshape(rows, length, k.shape[2], -1, size)
        scores = einsum("bskgd,btkd->bkgst", q, k) * size**-0.5
        # What is subtracted before exponentials cancels, so it may as well be a constant.
        highest = np.where(visible, scores.value, -np.inf).max(-1, keepdims=True)
        weights = exp(scores * visible - np.where(np.isfinite(highest), highest, 0) * visible) * visible
        weights = weights / (weights.sum(-1) + ~visible.any(-1, keepdims=True))
        return einsum("bkgst,btkd->bskgd", weights, v).reshape(rows, length, -1)

    def moe(self, x: Node, w: _Weights, mask: np.ndarray) -> Node:
        c, rows, valid = self.config, x.shape[0], mask.reshape(-1)
        flat = x.reshape(-1, x.shape[-1])
        scores = sigmoid(einsum("nd,ed->ne", flat, w["router.weight"]))
        chosen = _choose(scores.value + w["router.bias.value"].value, c.num_experts_per_tok, c.n_group, c.topk_group)
        picked = scores * chosen
        weights = picked / picked.sum(-1) * (c.routed_scaling_factor * valid[:, None])
        gate, up = (einsum("nd,efd->nef", flat, w[f"experts.{name}_weight"]) for name in ("gate", "up"))
        outputs = einsum("nef,edf->ned", gate * sigmoid(gate) * up, w["experts.down_weight"])
        routed = einsum("ned,ne->nd", outputs, weights).reshape(*x.shape)
        # The balance loss counts the best scores without bias and groups.
        best = _choose(scores.value, c.num_experts_per_tok, 1, 1) & valid[:, None]
        tokens = np.maximum(mask.sum(1), 1)[:, None]
        load = best.reshape(rows, -1, c.n_routed_experts).sum(1) / tokens * (c.n_routed_experts / c.num_experts_per_tok)
        each = (load / tokens)[:, None] * mask[..., None] / max(mask.any(1).sum(), 1)
        share = (scores / scores.sum(-1)).reshape(*mask.shape, -1)
        self.balance.append((share * each).sum())
        return routed + _mlp(x, w.part("shared"))

    def cross_entropy(self, states: Node, targets: np.ndarray, mask: np.ndarray) -> Node:
        """The mean over the targets that count."""
        head = self.nodes.get(("head.weight", None), self.nodes["embedding.weight", None])
        wanted = (targets != IGNORED) & mask
        logits = einsum("nd,vd->nv", states[wanted], head)
        logits = logits - logits.value.max(-1, keepdims=True)
        hit = np.eye(logits.shape[-1])[targets[wanted]]
        return (log(exp(logits).sum(-1)) - (logits * hit).sum(-1)).sum() * (1 / max(wanted.sum(), 1))


def _norm(x: Node, scale: Node, eps: float) -> Node:
    return x * ((x * x).sum(-1) * (1 / x.shape[-1]) + eps) ** -0.5 * scale


def _linear(x: Node, w: _Weights) -> Node:
    flat = x.reshape(-1, x.shape[-1])
    y = einsum("nd,od->no", flat, w["weight"]).reshape(*x.shape[:-1], w["weight"].shape[0])
    return y + w["bias"] if "bias" in w else y


def _mlp(x: Node, w: _Weights) -> Node:
    gate = _linear(x, w.part("gate_projection"))
    return _linear(gate * sigmoid(gate) * _linear(x, w.part("up_projection")), w.part("down_projection"))


def _choose(scores: np.ndarray, top_k: int, groups: int, top_groups: int) -> np.ndarray:
    """Which experts each token goes to, as booleans like `scores`."""
    if groups > 1:
        split = scores.reshape(len(scores), groups, -1)
        rank = np.sort(split, -1)[..., -2:].sum(-1)
        kept = rank >= np.sort(rank, -1)[:, -top_groups, None]
        scores = np.where(kept[..., None], split, -np.inf).reshape(scores.shape)
    return scores >= np.sort(scores, -1)[:, -top_k, None]


def _ahead(x: np.ndarray, k: int, fill: Any) -> np.ndarray:
    out = np.full_like(x, fill)
    out[:, :-k] = x[:, k:]
    return out
