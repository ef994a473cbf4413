"""The training step: a state of arrays, and one compiled program that moves it on."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from ..layers.embedding import check_tokens
from ..layers.loss import IGNORED
from ..policies.activation import Placement, map_activations, path_string
from ..policies.axes import Layout, use
from ..policies.remat import checkpoint as apply_annotations
from ..policies.spaces import typed
from .balancing import balanced, some
from .building import resegment
from .compiled import Program
from .data import Batch
from .memory import StateMemory, fetch, memory_of, put_back, settle
from .objective import Objective
from .optimizer import arrays_by_path, trainable
from .sharding import Rules, layout as make_layout
from .state import TrainState, float32, init_state as init_state


class Metrics(eqx.Module):
    """What a step measured, on the device: reading a value waits for the step."""

    loss: Float[Array, ""]  # mean cross-entropy of the next token, in nats
    mtp_loss: Float[Array, ""]  # mean over depths of multi-token prediction, not yet weighted
    balance_loss: Float[Array, ""]  # sum over MoE layers, not yet weighted
    grad_norm: Float[Array, ""]  # before clipping
    gradient_norms: Float[Array, " parameters"]  # of each parameter, in the order of `Step.parameters`
    tokens: Float[Array, ""]  # targets that counted
    expert_load: dict[str, Float[Array, "..."]]  # tokens for each expert, [layers, experts] or [experts], by stack
    skipped: Bool[Array, ""]  # whether this step changed nothing
    consecutive: Int[Array, ""]  # how many steps in a row did, up to this one


def make_train_step(
    model: eqx.Module,
    optimizer: optax.GradientTransformation,
    *,
    checkpoint: bool | Callable[..., Any] = True,
    mtp_weight: float | int = 0.3,
    balance_weight: float | int = 1e-4,
    bias_rate: float | int = 1e-3,
    clip_norm: float | int | None = 1.0,
    compute_dtype: Any = None,
    max_bad_steps: int = 10,
    accumulate: int = 1,
    mesh: Mesh | AbstractMesh | Layout | None = None,
    rules: Rules | None = None,
    state_memory: StateMemory | None = None,
) -> "Step":
    """The training step of `model`: `state, metrics = step(state, batch)`.

    The loss is the mean cross-entropy of the valid targets, plus `mtp_weight` times the mean over depths of
    multi-token prediction, plus `balance_weight` times the sum of the MoE layers' balance losses.

    **Arguments:**

    - `model`: its structure and annotations; its values are in the state. `model.losses(batch, mtp=, checkpoint=)`
        gives the parts of the loss.
    - `optimizer`: the one that `init_state` got. It sees float32.
    - `checkpoint`: True runs blocks as they are annotated, False keeps everything, and a function stands for
        `policies.checkpoint`.
    - `mtp_weight`: 0 leaves MTP modules out altogether.
    - `bias_rate`: by how much routers' selection biases move at each step; 0 freezes them.
    - `clip_norm`: the largest global norm of the gradients; None doesn't clip.
    - `compute_dtype`: parameters are cast to it inside the loss, except routers'. By default, the model's own
        dtypes. Gradients and updates are in the dtype of the state's parameters.
    - `max_bad_steps`: how many skipped steps in a row `train_loop` puts up with.
    - `accumulate`: into how many micro-batches a batch is split, one after the other. Loss and gradients are those
        of the whole batch, each token counting the same. Gradients add up in float32.
    - `mesh`, `rules`: the devices that share the step, and how (see `zoo.layout`). Without them it runs where the
        state lies.
    - `state_memory`: where the state's arrays live between steps, as for `init_state`: those on the host are
        brought to the device for the update, parameters of scanned stacks layer by layer when they are used.
        None leaves every array where it is.

    Raises ValueError for numbers out of range, and as `zoo.layout` does.
    """
    for name, value in (("mtp_weight", mtp_weight), ("balance_weight", balance_weight), ("bias_rate", bias_rate)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be 0 or more, got {value!r}")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be more than 0, or None not to clip, got {clip_norm!r}")
    if max_bad_steps < 1:
        raise ValueError(f"max_bad_steps must be at least 1, got {max_bad_steps!r}")
    if compute_dtype is not None and not jnp.issubdtype(compute_dtype, jnp.floating):
        raise ValueError(f"compute_dtype must be a floating dtype, got {compute_dtype!r}")
    wrap = apply_annotations if checkpoint is True else checkpoint or None
    clip = None if clip_norm is None else float(clip_norm)
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate must be a whole number of micro-batches, 1 or more, got {accumulate!r}")
    if mesh is None and rules is not None:
        raise ValueError("rules say how to cut over a mesh: give mesh too")
    place = None if mesh is None else make_layout(mesh, rules)
    skeleton = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x, model)
    objective = Objective(skeleton, float(mtp_weight), float(balance_weight), compute_dtype, wrap, accumulate)
    return Step(objective, optimizer, _Options(float(bias_rate), clip, max_bad_steps, place, state_memory or {}))


@dataclasses.dataclass(frozen=True)
class _Options:
    bias_rate: float
    clip_norm: float | None
    max_bad_steps: int
    layout: Layout | None
    state_memory: StateMemory


class Step:
    """A training step, compiled at its first call; made by `make_train_step`.

    - `model`: the annotated model without its values.
    - `parameters`: paths of the parameters, in the order of `Metrics.gradient_norms`.
    - `compilations`: how often the step was compiled: once, or a `RecompilationWarning` says what changed.
    - `trained(state)`: the model with the state's values, to be used, saved or sampled from.
    - `evaluate(state, batches)`: the mean cross-entropy over batches.
    - `raw(state, batch)`: the step as a plain function, to be traced; `trace` and `lower` do so.
    """

    def __init__(self, objective: Objective, optimizer: optax.GradientTransformation, options: _Options):
        self.model = objective.model
        parameters, rest = trainable(self.model)
        self.parameters = tuple(sorted(arrays_by_path(parameters)))
        self.max_bad_steps = options.max_bad_steps
        self._buffers = frozenset(arrays_by_path(rest))
        self._objective = objective
        self._optimizer = optimizer
        self._options = options
        self._memory: dict[Any, dict[str, Placement]] = {}  # by the structure of states, since globs take their time
        self._program = Program("training step", self.raw, donate=True, layout=options.layout)
        self._evaluation = Program("evaluation", self._evaluate, donate=False, layout=options.layout)

    def __repr__(self) -> str:
        return f"Step({type(self.model).__name__}, {len(self.parameters)} parameter arrays)"

    @property
    def annotated(self) -> Any:
        """The part of `model` that the step runs: without multi-token prediction where its weight is 0."""
        if self._objective.mtp_weight > 0 or not getattr(self.model, "mtp", ()):
            return self.model
        return eqx.tree_at(lambda model: model.mtp, self.model, ())

    @property
    def compilations(self) -> int:
        return self._program.compilations

    @property
    def rows_at_least(self) -> int:
        """The fewest sequences that can be cut into equal micro-batches and over the mesh."""
        place = self._options.layout
        return self.accumulate * (1 if place is None else place.size(place.axes("batch")))

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One step. `state` is donated: use the returned one. `batch` holds NumPy or JAX arrays.

        Nothing changes, except for the counters, if the loss or a gradient is not finite. Raises ValueError for a
        state of another model, and for ids outside the vocabulary in a batch that is still on the host (NumPy):
        looking at one that is on a device would stop the pipeline.
        """
        self._check(state)
        self._check_batch(batch, self._objective.accumulate)
        return self._program(self._settle(state), batch)

    def lower(self, state: TrainState, batch: Batch, *, platform: str | None = None) -> jax.stages.Lowered:
        """The step lowered for concrete or abstract arguments, for the devices that their shardings name.

        `platform` ("cuda", "tpu") lowers for devices of another kind, as many of them: then a mesh needs no devices.
        """
        return self._program.lower(*self.settled(state, batch), platform)

    def settled(self, state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
        """Abstract arguments with the shardings and memory kinds that the compiled step takes them in."""
        self._check(state)
        self._check_batch(batch, self._objective.accumulate)
        return self._program.settle(self._settle(state), batch)

    @property
    def accumulate(self) -> int:
        """Into how many micro-batches a batch is split."""
        return self._objective.accumulate

    def trace(self, state: TrainState, batch: Batch) -> Any:
        """The step's jaxpr."""
        state = self._settle(state)
        shardings = jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), state)
        return jax.make_jaxpr(lambda s, b: self.raw(jax.tree.map(typed, s, shardings), b))(state, batch)

    def differentiated(self, state: TrainState, batch: Batch) -> tuple[Callable[..., Array], dict, tuple]:
        """What the step differentiates, to be traced: a micro-batch's loss, the parameters, and what else it takes.

        `loss(parameters, rest)` is a number.
        """
        state, parts = self._settle(state), self._objective.accumulate
        shardings = jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), (state.params, state.buffers))
        rows = batch.tokens.shape[0]

        def micro(x: Any) -> Any:
            count = x.shape[0] // parts if x.shape[0] == rows else x.shape[0]
            return jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype)

        def loss(params: dict, rest: tuple) -> Array:
            buffers, part = rest
            params, buffers = jax.tree.map(typed, (params, buffers), shardings)
            return self._objective.loss(params, buffers, part)

        return functools.partial(self._over_mesh, loss), state.params, (state.buffers, jax.tree.map(micro, batch))

    def placed(self, placements: Mapping[str, Placement]) -> "Step":
        """The same step with activations placed elsewhere, by their paths."""
        model = map_activations(
            lambda path, node: dataclasses.replace(node, placement=placements.get(path, node.placement)), self.model
        )
        return Step(dataclasses.replace(self._objective, model=model), self._optimizer, self._options)

    def resegmented(self, boundaries: Sequence[int], state: TrainState) -> tuple["Step", TrainState]:
        """The same step, and a state that goes with it, with the model's layers cut into segments at `boundaries`."""
        model = resegment(self.model, boundaries)
        step = Step(dataclasses.replace(self._objective, model=model), self._optimizer, self._options)
        return step, resegment(state, boundaries, model=self.model)

    def _settle(self, state: TrainState) -> TrainState:
        rules = self._options.state_memory
        if not rules:
            return state
        structure = jax.tree.structure(state)
        if structure not in self._memory:
            self._memory[structure] = memory_of(state, rules)
        return settle(state, self._memory[structure])

    def _check(self, state: TrainState) -> None:
        for what, mine, theirs in (
            ("parameters", set(self.parameters), set(state.params)),
            ("buffers", self._buffers, set(state.buffers)),
        ):
            if mine != theirs:
                raise ValueError(f"the state is another model's: {what} differ in {some(mine ^ theirs)}")

    def _check_batch(self, batch: Batch, parts: int) -> None:
        """Raises ValueError for rows that can't be cut into equal parts, and for ids that aren't in the vocabulary."""
        place, (rows, length) = self._options.layout, batch.tokens.shape
        cuts = 1 if place is None else place.size(place.axes("batch"))
        if rows % (parts * cuts):
            over = f" over mesh axes {', '.join(map(repr, place.axes('batch')))}" if cuts > 1 else ""
            micro = f"{parts} micro-batches" if parts > 1 else ""
            pieces = " of ".join(filter(None, (micro, f"{cuts} equal parts" if cuts > 1 or not micro else "")))
            raise ValueError(
                f"a batch of {rows} rows can't be cut into {pieces}{over}: give a multiple of {parts * cuts}, "
                "filled up with rows of padding if need be (zoo.pad_batch)"
            )
        if place is not None and length % place.size(place.axes("sequence")):
            raise ValueError(
                f"rows of {length} tokens can't be cut into {place.size(place.axes('sequence'))} equal parts over mesh "
                f"axes {', '.join(map(repr, place.axes('sequence')))}"
            )
        vocab_size = getattr(getattr(self.model, "config", None), "vocab_size", None)
        for ids, ignored in ((batch.tokens, None), (batch.targets, IGNORED)):
            if vocab_size is not None and isinstance(ids, np.ndarray):
                check_tokens(ids, vocab_size, ignored=ignored)

    def trained(self, state: TrainState) -> Any:
        """The model with the values of `state`, in its own dtypes: to be used, saved or sampled from.

        The arrays may be those of the state, which the next step donates. Raises ValueError for a state of another
        model.
        """
        self._check(state)

        def fill(path: tuple, leaf: Any) -> Any:
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            where = path_string(path)
            value = state.buffers[where] if where in state.buffers else state.params[where]
            return fetch(value).astype(leaf.dtype)

        return jax.tree_util.tree_map_with_path(fill, self.model)

    def raw(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """The step as a plain function of arrays: forward, backward, update. Nothing is donated."""
        return self._over_mesh(self._run, state, batch, jax.tree.map(_spec, state))

    def _over_mesh(self, function: Callable[..., Any], first: Any, second: Any, *specs: Any) -> Any:
        place = self._options.layout
        with contextlib.ExitStack() as stack:
            stack.enter_context(use(place))
            if place is not None and AxisType.Explicit in place.mesh.axis_types:
                out = (*specs, PartitionSpec()) if specs else PartitionSpec()
                function = jax.sharding.auto_axes(function, out_sharding=out)
                if jax.sharding.get_abstract_mesh().empty:  # traced by `census`, say
                    stack.enter_context(jax.sharding.use_abstract_mesh(place.mesh.abstract_mesh))
            return function(first, second)

    def _run(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        options = self._options
        grads, sums = self._objective.gradients(state.params, state.buffers, batch)
        with jax.named_scope("optimizer"):
            grads = float32(grads)
            squares = jnp.stack([jnp.sum(jnp.square(grads[path])) for path in self.parameters])
            grad_norm = jnp.sqrt(jnp.sum(squares))
            finite = jnp.isfinite(sums.total) & jnp.isfinite(grad_norm)
            if options.clip_norm is not None:
                factor = options.clip_norm / jnp.maximum(grad_norm, options.clip_norm)
                grads = jax.tree.map(lambda g: g * factor, grads)
            old = fetch(state)
            wide = float32(old.params)
            updates, opt_state = self._optimizer.update(grads, old.opt_state, wide)
            params = jax.tree.map(lambda p, w, u: (w + u).astype(p.dtype), old.params, wide, updates)
            buffers = balanced(old.buffers, sums.load, options.bias_rate, self._objective.mtp_weight > 0)
            # All or nothing: a step that isn't finite leaves no trace but its count.
            params, buffers, opt_state = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old),
                (params, buffers, opt_state),
                (old.params, old.buffers, old.opt_state),
            )
            consecutive = jnp.where(finite, 0, old.consecutive + 1)
            bad_steps = old.bad_steps + ~finite
        new = TrainState(params, buffers, opt_state, old.step + 1, old.key, bad_steps, consecutive)
        return put_back(new, state), Metrics(
            sums.loss, sums.mtp_loss, sums.balance_loss, grad_norm, jnp.sqrt(squares), sums.count, sums.load, ~finite,
            consecutive,
        )  # fmt: skip

    def _evaluate(self, state: TrainState, batch: Batch) -> tuple[Array, Array]:
        def sums(state: TrainState, batch: Batch) -> tuple[Array, Array]:
            losses = self._objective.assemble(state.params, state.buffers).losses(batch, mtp=False, checkpoint=None)
            return losses.sum, losses.count

        return self._over_mesh(sums, state, batch)

    def evaluate(self, state: TrainState, batches: Iterable[Batch]) -> float:
        """The mean cross-entropy in nats over all valid targets of `batches`, each token counting the same.

        Multi-token prediction doesn't run. Raises ValueError if there is no valid target.
        """
        self._check(state)
        state = self._settle(state)
        # A few scalars a batch wait on the device, so that no batch waits for the one before.
        pairs = []
        for batch in batches:
            self._check_batch(batch, 1)
            pairs.append(self._evaluation(state, batch))
        sums = jax.device_get(pairs)
        total, count = (sum(float(pair[i]) for pair in sums) for i in range(2))
        if not count:
            raise ValueError("there is no valid target to evaluate on")
        return total / count

    def reason(self, metrics: Metrics) -> str:
        """Why a step was skipped, in words; empty if it wasn't."""
        if not bool(metrics.skipped):
            return ""
        for name in ("loss", "mtp_loss", "balance_loss"):
            value = float(getattr(metrics, name))
            if not np.isfinite(value):
                return f"the {name.replace('_', ' ')} is {value}"
        bad = ~np.isfinite(np.asarray(metrics.gradient_norms))
        names = {path for path, flag in zip(self.parameters, bad, strict=True) if flag}
        return f"not finite: the gradient of {some(names)}" if names else "the gradient norm overflows"


def _spec(leaf: Any) -> PartitionSpec:
    return getattr(jax.typeof(leaf).sharding, "spec", PartitionSpec())
