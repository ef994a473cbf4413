"""Routers: which experts a token goes to and with what weight, after DeepSeek-V2 and DeepSeek-V3."""

import functools
import math
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ..policies.activation import Activation
from ..policies.axes import any_mesh, gather
from .grid import grid_in_use
from .linear import Buffer, check_input, check_sizes, normal

# Keeps a sum of weights that are all zero from dividing by it.
_TINY = 1e-20


class Routing(eqx.Module):
    """The choice for each token. Choices are ordered from the best score down, ties to the lower index."""

    indices: Int[Array, "*tokens top_k"]  # int32
    weights: Float[Array, "*tokens top_k"]  # float32: what the expert's output is multiplied by
    scores: Float[Array, "*tokens experts"]  # float32: softmax or sigmoid of the logits, without any bias


class SoftmaxRouter(eqx.Module):
    """The router of DeepSeek-V2: softmax over all experts, then the best `top_k`.

    With method `group_limited_greedy` only experts of the `top_groups` groups with the best maximum can be
    chosen. The weights are the experts' probabilities, divided by their sum if `normalize`, and in any
    case times `scale`. With `use_bias` the logits have a trained bias (gpt-oss).

    (DeepSeek's own code leaves the scale out when it normalizes and transformers never normalizes; all
    released DeepSeek models say `normalize=False`, where the three agree.)

    `weight` is [num_experts, hidden_size] and float32; all of it is computed in float32.
    """

    weight: Float[Array, "experts features"]
    bias: Float[Array, " experts"] | None
    axes: ClassVar[dict[str, str]] = {"weight": "_ embed", "bias": "_"}
    logits: Activation
    num_experts: int = eqx.field(static=True)
    top_k: int = eqx.field(static=True)
    groups: int = eqx.field(static=True)
    top_groups: int = eqx.field(static=True)
    method: str = eqx.field(static=True)
    normalize: bool = eqx.field(static=True)
    scale: float = eqx.field(static=True)

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        top_k: int,
        groups: int = 1,
        top_groups: int = 1,
        method: str = "greedy",
        normalize: bool = False,
        scale: float = 1.0,
        use_bias: bool = False,
        std: float = 0.02,
        key: PRNGKeyArray,
    ):
        """Raises ValueError on an unknown `method`, on `groups` with a method that has none, and when
        `top_k` experts can't be chosen from the groups."""
        methods = ("greedy", "group_limited_greedy")
        if method not in methods:
            raise ValueError(f"method {method!r} of a softmax router is not one of {', '.join(map(repr, methods))}")
        if method == "greedy" and (groups, top_groups) != (1, 1):
            raise ValueError(
                f"groups={groups}, top_groups={top_groups} with method 'greedy', which knows no groups: "
                "leave them at 1, or say method='group_limited_greedy'"
            )
        check_sizes("SoftmaxRouter", hidden_size=hidden_size, num_experts=num_experts, top_k=top_k, groups=groups)
        _check_groups(num_experts, top_k, groups, top_groups)
        self.weight = normal(key, (num_experts, hidden_size), std, jnp.float32)
        self.bias = jnp.zeros(num_experts, jnp.float32) if use_bias else None
        self.logits = Activation("router_logits", axes="batch sequence _")
        self.num_experts, self.top_k = num_experts, top_k
        self.groups, self.top_groups = groups, top_groups
        self.method, self.normalize, self.scale = method, bool(normalize), float(scale)

    @jax.named_scope("softmax_router")
    @any_mesh
    def __call__(self, x: Float[Array, "*tokens features"]) -> Routing:
        """Routes each token of `x`, of any floating dtype.

        `x` is `[batch, sequence, hidden_size]`, or has other axes before the last. Raises ValueError unless it is
        floating and `hidden_size` wide.
        """
        check_input("SoftmaxRouter", x, self.weight.shape[1])
        logits = _logits(x, gather(self.weight, self.axes["weight"]))
        if self.bias is not None:
            logits = logits + self.bias.astype(jnp.float32)
        scores = jax.nn.softmax(self.logits(logits), axis=-1)
        indices = _by_token(self._choose, lax.stop_gradient(scores))
        weights = _weights(scores, indices, self.normalize, self.scale)
        return Routing(indices, weights, scores)

    def _choose(self, choice: Array) -> Array:
        if self.method == "group_limited_greedy":
            best = jnp.max(_split(choice, self.groups), axis=-1)
            choice = _keep_groups(choice, best, self.top_groups)
        return lax.top_k(choice, self.top_k)[1]

    def balance_loss(
        self, routing: Routing, *, batch: int, token_mask: Bool[Array, "*tokens"] | None = None
    ) -> Float[Array, ""]:
        """`balance_loss` with the load counted over the experts that were chosen, as DeepSeek-V2 does."""
        return balance_loss(routing, batch=batch, token_mask=token_mask)


class SigmoidRouter(eqx.Module):
    """The router of DeepSeek-V3: sigmoid scores, and a bias that balances the load by selection alone.

    A group's score is the sum of its two best biased scores; experts outside the `top_groups` best groups
    can't be chosen, and of the rest the `top_k` best biased scores are. The weights are the unbiased
    scores, divided by their sum if `normalize`, and in any case times `scale`.

    `weight` is [num_experts, hidden_size] and `bias` holds [num_experts], both float32; all of it is
    computed in float32. The bias gets no gradient: `update_bias` moves it.
    """

    weight: Float[Array, "experts features"]
    bias: Buffer
    axes: ClassVar[dict[str, str]] = {"weight": "_ embed"}
    logits: Activation
    num_experts: int = eqx.field(static=True)
    top_k: int = eqx.field(static=True)
    groups: int = eqx.field(static=True)
    top_groups: int = eqx.field(static=True)
    normalize: bool = eqx.field(static=True)
    scale: float = eqx.field(static=True)

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        top_k: int,
        groups: int = 1,
        top_groups: int = 1,
        normalize: bool = True,
        scale: float = 1.0,
        std: float = 0.02,
        key: PRNGKeyArray,
    ):
        """Raises ValueError when `top_k` experts can't be chosen from the groups, or when there are groups
        of fewer than the two experts that make a group's score."""
        check_sizes("SigmoidRouter", hidden_size=hidden_size, num_experts=num_experts, top_k=top_k, groups=groups)
        _check_groups(num_experts, top_k, groups, top_groups)
        if groups > 1 and num_experts // groups < 2:
            raise ValueError(
                f"num_experts={num_experts} in groups={groups} leaves one expert in a group: "
                "a group's score is the sum of its two best"
            )
        self.weight = normal(key, (num_experts, hidden_size), std, jnp.float32)
        self.bias = Buffer(jnp.zeros(num_experts, jnp.float32))
        self.logits = Activation("router_logits", axes="batch sequence _")
        self.num_experts, self.top_k = num_experts, top_k
        self.groups, self.top_groups = groups, top_groups
        self.normalize, self.scale = bool(normalize), float(scale)

    @jax.named_scope("sigmoid_router")
    @any_mesh
    def __call__(self, x: Float[Array, "*tokens features"]) -> Routing:
        """Routes each token of `x`, of any floating dtype.

        `x` is `[batch, sequence, hidden_size]`, or has other axes before the last. Raises ValueError unless it is
        floating and `hidden_size` wide.
        """
        check_input("SigmoidRouter", x, self.weight.shape[1])
        scores = jax.nn.sigmoid(self.logits(_logits(x, gather(self.weight, self.axes["weight"]))))
        indices = _by_token(self._choose, lax.stop_gradient(scores + self.bias.value.astype(jnp.float32)))
        # Gathered from the unbiased scores: taking the bias off the biased ones again would lose small scores.
        weights = _weights(scores, indices, self.normalize, self.scale)
        return Routing(indices, weights, scores)

    def _choose(self, choice: Array) -> Array:
        if self.groups > 1:
            best = jnp.sum(lax.top_k(_split(choice, self.groups), 2)[0], axis=-1)
            choice = _keep_groups(choice, best, self.top_groups)
        return lax.top_k(choice, self.top_k)[1]

    def balance_loss(
        self, routing: Routing, *, batch: int, token_mask: Bool[Array, "*tokens"] | None = None
    ) -> Float[Array, ""]:
        """`balance_loss` with the load counted over the best scores without bias and groups, as in equation
        18 of the DeepSeek-V3 report."""
        best = lambda scores: lax.top_k(scores, self.top_k)[1]
        indices = _by_token(best, lax.stop_gradient(routing.scores))
        return balance_loss(Routing(indices, routing.weights, routing.scores), batch=batch, token_mask=token_mask)


def balance_loss(
    routing: Routing, *, batch: int, token_mask: Bool[Array, "*tokens"] | None = None
) -> Float[Array, ""]:
    """The sequence-wise balance loss without its factor alpha; 1 when load and scores are uniform.

    In each sequence of T tokens, `f_e = E / (k T) * (times e was chosen)` and `P_e` is the mean over tokens
    of the score's share in the token's sum of scores; the loss is the mean over sequences of
    `sum_e f_e P_e`. Gradients flow through `P` only. Masked tokens count nowhere, sequences without any
    other token aren't part of the mean, and with none at all the loss is 0.

    **Arguments:**

    - `routing`: of tokens `[batch, sequence]`, or of `batch * sequence` tokens, sequence by sequence.
    - `batch`: the number of sequences.
    - `token_mask`: True for tokens that count.

    Source: DeepSeek-V3 technical report, equations 17 to 20; `seq_aux` in DeepSeek-V2.
    """
    num_experts, shape = routing.scores.shape[-1], routing.scores.shape[:-1]
    tokens = math.prod(shape)
    if batch < 1 or tokens % batch:
        raise ValueError(f"batch={batch} does not divide the {tokens} tokens of the routing")
    valid = jnp.ones(shape, bool) if token_mask is None else token_mask
    top_k = routing.indices.shape[-1]
    length = jnp.sum(valid.reshape(batch, -1), axis=1, dtype=jnp.float32)
    per_token = 1 / jnp.maximum(length, 1)[:, None]
    chosen = _one_hot(routing.indices, num_experts) & valid[..., None, None]
    count = jnp.sum(chosen.reshape(batch, -1, num_experts), axis=1, dtype=jnp.float32)
    load = count * per_token * (num_experts / top_k)
    # Masked before the division, so that nothing a masked token holds reaches a gradient.
    scores = jnp.where(valid[..., None], routing.scores, 1)
    share = jnp.where(valid[..., None], _shares(scores), 0).reshape(batch, -1, num_experts)
    mean_share = jnp.sum(share, axis=1) * per_token
    sequences = jnp.sum(length > 0, dtype=jnp.float32)
    return jnp.sum(lax.stop_gradient(load) * mean_share) / jnp.maximum(sequences, 1)


def expert_load(routing: Routing, token_mask: Bool[Array, "*tokens"] | None = None) -> Float[Array, " experts"]:
    """How many tokens chose each expert, float32. Masked tokens, where `token_mask` is False, don't count."""
    chosen = _one_hot(routing.indices, routing.scores.shape[-1])
    if token_mask is not None:
        chosen &= token_mask[..., None, None]
    return jnp.sum(chosen, axis=tuple(range(chosen.ndim - 1)), dtype=jnp.float32)


def update_bias(
    bias: Float[Array, "*layers experts"], load: Float[Array, "*layers experts"], rate: float | Float[Array, ""]
) -> Float[Array, "*layers experts"]:
    """The selection bias after a step: up by `rate` for experts below the mean load, down for those above.

    `load` is the whole batch's, summed over microbatches and devices: the sign of a part isn't the sign of
    the sum. Source: DeepSeek-V3 technical report, section 2.1.2.
    """
    mean = jnp.mean(load, axis=-1, keepdims=True)
    return lax.stop_gradient(bias + rate * jnp.sign(mean - load)).astype(bias.dtype)


def _check_groups(num_experts: int, top_k: int, groups: int, top_groups: int) -> None:
    if num_experts % groups:
        raise ValueError(f"num_experts={num_experts} can't be split into groups={groups} groups of one size")
    if not 1 <= top_groups <= groups:
        raise ValueError(f"top_groups={top_groups} is not between 1 and groups={groups}")
    available = num_experts // groups * top_groups
    if top_k > available:
        raise ValueError(
            f"top_k={top_k} is more than {available}, the experts in top_groups={top_groups} "
            f"of groups={groups} groups of num_experts={num_experts}"
        )


def _logits(x: Array, weight: Array) -> Array:
    # A lower precision on accelerators would route differently, and that costs accuracy.
    return jnp.einsum(
        "...d,ed->...e", x.astype(jnp.float32), weight.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )


def _by_token(choose: Callable[[Array], Array], scores: Array) -> Array:
    # Each device for its own tokens: for top_k the partitioner would gather the scores of all.
    grid = grid_in_use()
    if grid is None or scores.ndim != 3:
        return choose(scores)
    return grid.map(choose, grid.tokens, grid.tokens)(scores)


def _split(scores: Array, groups: int) -> Array:
    return scores.reshape(*scores.shape[:-1], groups, -1)


def _keep_groups(choice: Array, group_scores: Array, top_groups: int) -> Array:
    # Minus infinity and not zero: biased scores can be negative, and a probability can be zero.
    kept = _one_hot(lax.top_k(group_scores, top_groups)[1], group_scores.shape[-1]).any(axis=-2)
    return jnp.where(kept[..., None], _split(choice, group_scores.shape[-1]), -jnp.inf).reshape(choice.shape)


def _weights(scores: Array, indices: Array, normalize: bool, scale: float) -> Array:
    weights = _take(scores.shape[-1], scores, indices)
    if normalize:
        weights = _shares(weights)
    return weights * scale


def _shares(x: Array) -> Array:
    total = jnp.sum(x, axis=-1, keepdims=True)
    # The derivative of a division squares the divisor, and the square of such a sum is zero.
    total = jnp.where(total > 1e-15, total, lax.stop_gradient(total))
    return x / (total + _TINY)


def _one_hot(indices: Array, size: int) -> Array:
    return indices[..., None] == jnp.arange(size, dtype=indices.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take(num_experts, scores, indices):
    return jnp.take_along_axis(scores, indices, axis=-1)


def _take_forward(num_experts, scores, indices):
    return _take(num_experts, scores, indices), indices


def _take_backward(num_experts, indices, grad):
    # A comparison and a sum, where the transpose of the gather would be a scatter-add.
    return jnp.sum(jnp.where(_one_hot(indices, num_experts), grad[..., None], 0), axis=-2), None


_take.defvjp(_take_forward, _take_backward)
