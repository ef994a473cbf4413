"""Mixture of experts (DeepSeek-MoE): a router, routed experts, and a shared one that every token passes."""

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from ..policies.activation import Activation
from ..policies.axes import any_mesh
from . import exchange
from .experts import ROWS, Experts, assign, combine, dispatch, named
from .grid import Grid, grid_in_use
from .linear import check_input
from .mlp import MLP
from .rounds import Rounds, exchanged_in_rounds
from .router import Routing, SigmoidRouter, SoftmaxRouter

T = TypeVar("T")

_OF_ROWS, _OF_EXPERTS = ("dispatched", "expert_output"), ("gate", "up", "hidden")


class MoEStats(eqx.Module):
    """What training needs to know about a call of `MoE`. Stacked over layers it has a leading layer axis."""

    load: Float[Array, "*layers experts"]  # float32: how many tokens went to each expert; the sum is k * tokens
    balance_loss: Float[Array, "*layers"]  # float32, differentiable; not yet times its factor alpha


class MoE(eqx.Module):
    """`sum_e weight_e expert_e(x) + shared(x)` over the experts that the router chooses for each token.

    No token is dropped, whatever the load. The shared expert is one MLP of width `shared_size` (the size of
    an expert times the number of shared ones), not gated and not scaled.

    Activations, with `rows` = tokens * top_k: `dispatched` and `expert_output` [rows, hidden_size], the
    tokens sorted by expert and what the experts make of them before they are weighted. Those of the experts
    (`experts.gate`, `experts.up`, `experts.hidden`, [rows, expert_size]), of the shared MLP and of the router
    are in them.

    With a `Layout` in use the rows are where their experts are, and each device has room for as many as all tokens
    that can be sent to it may make: tokens * min(top_k, experts) of each device that it exchanges with, where `tokens`
    are those of one device and `experts` are its own. `in_rounds` makes it room for less.
    """

    router: SoftmaxRouter | SigmoidRouter
    experts: Experts
    shared: MLP | None
    dispatched: Activation | None
    expert_output: Activation | None
    rounds: Rounds

    def __init__(
        self,
        hidden_size: int,
        *,
        router: SoftmaxRouter | SigmoidRouter,
        num_experts: int,
        expert_size: int,
        shared_size: int | None = None,
        expert_bias: bool = False,
        limit: float | None = None,
        alpha: float = 1.702,
        std: float = 0.02,
        dtype: Any = jnp.float32,
        key: PRNGKeyArray,
    ):
        """`expert_bias`, `limit` and `alpha` are those of `Experts`.

        Raises ValueError when the sizes of `router` aren't these, or a size is not a positive integer.
        """
        if router.weight.shape != (num_experts, hidden_size):
            experts, features = router.weight.shape
            raise ValueError(
                f"MoE: the router is for {experts} experts and hidden size {features}, "
                f"not num_experts={num_experts} and hidden_size={hidden_size}"
            )
        experts_key, shared_key = jax.random.split(key)
        self.router = router
        self.experts = Experts(
            hidden_size,
            num_experts=num_experts,
            expert_size=expert_size,
            use_bias=expert_bias,
            limit=limit,
            alpha=alpha,
            std=std,
            dtype=dtype,
            key=experts_key,
        )
        self.shared = None
        if shared_size is not None:
            self.shared = MLP(hidden_size, shared_size, std=std, dtype=dtype, key=shared_key)
        self.rounds = Rounds()
        self.dispatched, self.expert_output = self.activations()

    @staticmethod
    def activations() -> tuple[Activation, Activation]:
        """What `dispatched` and `expert_output` are where they can be placed."""
        dispatched, output = (Activation(name, axes=ROWS + " embed") for name in ("dispatched", "expert_output"))
        return dispatched, output

    @jax.named_scope("moe")
    @any_mesh
    def __call__(
        self, x: Float[Array, "batch sequence features"], *, token_mask: Bool[Array, "batch sequence"] | None = None
    ) -> tuple[Float[Array, "batch sequence features"], MoEStats]:
        """The layer's output, of the shape and dtype of `x`, and its statistics.

        Tokens where `token_mask` is False go to no expert: their routed output is zero, and they count
        neither in the load nor in the balance loss. With a `Layout` in use the load is that of all devices; inside
        `jax.shard_map` both statistics are of what this device has.

        Raises ValueError unless `x` is floating `[batch, sequence, hidden_size]`, where weights or tokens can't be
        cut as the layout says, and inside a `jax.shard_map` that gives a device only some of the experts.
        """
        check_input("MoE", x, self.router.weight.shape[1], rank=3)
        routing = self.router(x)
        grid = grid_in_use()
        if self.experts.gate_weight.shape[0] != self.router.num_experts:
            raise ValueError(
                f"MoE: this device has {self.experts.gate_weight.shape[0]} of {self.router.num_experts} experts: "
                "inside jax.shard_map each needs all of them; to have tokens exchanged leave that axis of the mesh to "
                "a Layout in use"
            )
        if grid is None:
            y, load = self._routed(x, routing, token_mask)
        else:
            y, load = self._routed_over(grid, x, routing, token_mask)
        if self.shared is not None:
            y = y + self.shared(x)
        return y, MoEStats(load, self.router.balance_loss(routing, batch=x.shape[0], token_mask=token_mask))

    def _routed(self, x: Array, routing: Routing, token_mask: Array | None) -> tuple[Array, Array]:
        flat = "b s ... -> (b s) ..."
        valid = None if token_mask is None else rearrange(token_mask, flat)
        assignment = assign(rearrange(routing.indices, flat), self.router.num_experts, token_mask=valid)
        rows = named(self.dispatched, dispatch(rearrange(x, flat), assignment))
        rows = named(self.expert_output, self.experts(rows, assignment.group_sizes))
        y = rearrange(combine(rows, rearrange(routing.weights, flat), assignment), "(b s) d -> b s d", b=x.shape[0])
        return y, assignment.group_sizes.astype(jnp.float32)

    def _routed_over(self, grid: Grid, x: Array, routing: Routing, token_mask: Array | None) -> tuple[Array, Array]:
        for name, axes in self.experts.axes.items():
            if getattr(self.experts, name) is not None:
                grid.layout.check(axes, getattr(self.experts, name).shape, f"experts.{name} of MoE")
        if self.rounds.count > 1:
            return exchanged_in_rounds(
                grid, self.rounds.count, self.experts, x, routing.indices, routing.weights, token_mask=token_mask
            )
        plan = exchange.assign(grid, routing.indices, self.router.num_experts, token_mask=token_mask)
        rows = named(self.dispatched, exchange.dispatch(x, plan))
        rows = named(self.expert_output, self.experts(rows, plan.group_sizes, grid))
        return exchange.combine(rows, routing.weights, plan), plan.load


def in_rounds(tree: T, rounds: int) -> T:
    """`tree`, a model say, with each `MoE` in it exchanging tokens over a mesh in so many rounds.

    A device's tokens go to their experts in as many parts, one after the other: the buffers for rows that arrive, made
    for the case that all go to one device, are that much smaller. Results are the same but for the order in which
    gradients of weights are summed. All within a round is computed again in the backward pass, one round at a time, so
    the activations of rows and of experts can't be placed: they are None, and without a mesh, where all is computed
    at once, recomputed under a policy. With `rounds=1` they are there, waiting on the device where they weren't.

    Raises ValueError unless `rounds` is a positive integer.
    """
    given = Rounds(rounds)

    def fields(moe: MoE) -> tuple[Any, ...]:
        return (moe.rounds, *(getattr(moe, name) for name in _OF_ROWS), *(getattr(moe.experts, n) for n in _OF_EXPERTS))

    def give(node: Any) -> Any:
        if not isinstance(node, MoE):
            return node
        now, fresh = fields(node)[1:], (*node.activations(), *node.experts.activations())
        placed = [None if rounds > 1 else old or new for old, new in zip(now, fresh, strict=True)]
        is_field = lambda field: field is None or isinstance(field, (Activation, Rounds))
        return eqx.tree_at(fields, node, (given, *placed), is_leaf=is_field)

    return jax.tree.map(give, tree, is_leaf=lambda node: isinstance(node, MoE))
