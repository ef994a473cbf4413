"""The training step: a state of arrays, and one compiled program that moves it on."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Sharding
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from ..layers.embedding import check_tokens
from ..layers.loss import IGNORED
from ..layers.router import update_bias
from ..policies.activation import named, path_string
from ..policies.remat import checkpoint as apply_annotations
from .compiled import Program, commit, default_sharding, replicated
from .data import Batch
from .optimizer import arrays_by_path, trainable

_ROUTER_BIAS = ".router.bias.value"


class TrainState(eqx.Module):
    """All that changes in training, and nothing else: arrays only, by path, without the model's structure.

    Annotations belong to the step, so placements can change from one step to the next, or on resuming, without
    touching the state.
    """

    params: dict[str, Any]  # by path in the model; master weights, if there are any
    buffers: dict[str, Any]  # what isn't trained by gradient: the routers' selection biases
    opt_state: PyTree
    step: Any  # int32 []: batches seen
    key: Any  # typed PRNG key []: of the run; a step's own is `fold_in(key, step)`
    bad_steps: Any  # int32 []: steps skipped because something wasn't finite
    consecutive: Any  # int32 []: how many of these were the last ones


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


def _float32(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def init_state(
    model: eqx.Module,
    optimizer: optax.GradientTransformation,
    *,
    key: PRNGKeyArray,
    master_dtype: Any = None,
    sharding: Sharding | None = None,
) -> TrainState:
    """The state that training `model` starts from: copies of its arrays, committed with their memory kinds.

    **Arguments:**

    - `model`: an abstract one gives an abstract state, for ahead-of-time compilation.
    - `master_dtype`: parameters of narrower dtypes are kept in this one (`jnp.float32` for a bfloat16 model); the
        step computes in the model's dtypes all the same. Without it small updates of bfloat16 weights get lost.
    - `sharding`: where arrays go that aren't committed yet. By default the default device.

    The optimizer's state is made for float32 parameters whatever their dtype, so that its moments are float32.
    """
    parameters, rest = trainable(model)
    params, buffers = commit((arrays_by_path(parameters), arrays_by_path(rest)), sharding)

    def widened(leaf: Any) -> Any:
        return leaf.dtype if master_dtype is None else jnp.promote_types(leaf.dtype, master_dtype)

    def make(params: dict[str, Any], buffers: dict[str, Any], key: PRNGKeyArray) -> TrainState:
        params = {path: jnp.array(leaf, widened(leaf), copy=True) for path, leaf in params.items()}
        zeros = [jnp.zeros((), jnp.int32) for _ in range(3)]
        # Copies: a donated state must not take the caller's model with it.
        return TrainState(params, jax.tree.map(jnp.copy, buffers), optimizer.init(_float32(params)), zeros[0],
                          jax.random.clone(key), *zeros[1:])  # fmt: skip

    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in [*params.values(), *buffers.values()]):
        return make(params, buffers, key)  # inside `jax.eval_shape`, where nothing lies anywhere
    abstract = jax.eval_shape(make, params, buffers, key)

    def place(path: tuple, leaf: Any) -> Sharding:
        # An optimizer's moments lie where their parameter lies.
        for entry in path:
            like = {**params, **buffers}.get(getattr(entry, "key", None))
            if like is not None and like.shape == leaf.shape:
                return like.sharding
        return scalar

    first = next(iter(params.values()), None)
    scalar = replicated(first.sharding) if first is not None else sharding or default_sharding()
    shardings = jax.tree_util.tree_map_with_path(place, abstract)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in [*params.values(), *buffers.values()]):
        return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)
    return jax.jit(make, out_shardings=shardings)(params, buffers, key)


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

    Raises ValueError for numbers out of range.
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
    weights = float(mtp_weight), float(balance_weight), float(bias_rate)
    options = _Options(*weights, clip, compute_dtype, max_bad_steps, wrap)
    return Step(model, optimizer, options)


@dataclasses.dataclass(frozen=True)
class _Options:
    mtp_weight: float
    balance_weight: float
    bias_rate: float
    clip_norm: float | None
    compute_dtype: Any
    max_bad_steps: int
    checkpoint: Callable[..., Any] | None


class Step:
    """A training step, compiled at its first call; made by `make_train_step`.

    - `model`: the annotated model without its values.
    - `parameters`: paths of the parameters, in the order of `Metrics.gradient_norms`.
    - `compilations`: how often the step was compiled: once, or a `RecompilationWarning` says what changed.
    - `trained(state)`: the model with the state's values, to be used, saved or sampled from.
    - `evaluate(state, batches)`: the mean cross-entropy over batches.
    - `raw(state, batch)`: the step as a plain function, to be traced; `trace` and `lower` do so.
    """

    def __init__(self, model: eqx.Module, optimizer: optax.GradientTransformation, options: _Options):
        self.model = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x, model
        )
        parameters, rest = trainable(self.model)
        self.parameters = tuple(sorted(arrays_by_path(parameters)))
        self.max_bad_steps = options.max_bad_steps
        self._buffers = frozenset(arrays_by_path(rest))
        self._optimizer = optimizer
        self._options = options
        self._program = Program("training step", self.raw, donate=True)
        self._evaluation = Program("evaluation", self._sums, donate=False)

    def __repr__(self) -> str:
        return f"Step({type(self.model).__name__}, {len(self.parameters)} parameter arrays)"

    @property
    def annotated(self) -> Any:
        """The part of `model` that the step runs: without multi-token prediction where its weight is 0."""
        if self._options.mtp_weight > 0 or not getattr(self.model, "mtp", ()):
            return self.model
        return eqx.tree_at(lambda model: model.mtp, self.model, ())

    @property
    def compilations(self) -> int:
        return self._program.compilations

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One step. `state` is donated: use the returned one. `batch` holds NumPy or JAX arrays.

        Nothing changes, except for the counters, if the loss or a gradient is not finite. Raises ValueError for a
        state of another model, and for ids outside the vocabulary in a batch that is still on the host (NumPy):
        looking at one that is on a device would stop the pipeline.
        """
        self._check(state)
        self._check_ids(batch)
        return self._program(state, batch)

    def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """The step lowered for concrete or abstract arguments, for the devices that their shardings name."""
        self._check(state)
        return self._program.lower(*self._program.settle(state, batch))

    def trace(self, state: TrainState, batch: Batch) -> Any:
        """The step's jaxpr."""
        return jax.make_jaxpr(self.raw)(state, batch)

    def _check(self, state: TrainState) -> None:
        for what, mine, theirs in (
            ("parameters", set(self.parameters), set(state.params)),
            ("buffers", self._buffers, set(state.buffers)),
        ):
            if mine != theirs:
                raise ValueError(f"the state is another model's: {what} differ in {_some(mine ^ theirs)}")

    def _check_ids(self, batch: Batch) -> None:
        vocab_size = getattr(getattr(self.model, "config", None), "vocab_size", None)
        for ids, ignored in ((batch.tokens, None), (batch.targets, IGNORED)):
            if vocab_size is not None and isinstance(ids, np.ndarray):
                check_tokens(ids, vocab_size, ignored=ignored)

    def _assemble(self, params: dict[str, Any], buffers: dict[str, Any]) -> Any:
        """The model with the state's values, in the dtypes that it computes in."""

        def fill(path: tuple, leaf: Any) -> Any:
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            where = path_string(path)
            if where in buffers:
                return buffers[where]
            # Routing decisions hang on small differences between logits.
            keep = self._options.compute_dtype is None or "router" in where.split(".")
            return params[where].astype(leaf.dtype if keep else self._options.compute_dtype)

        return named(jax.tree_util.tree_map_with_path(fill, self.model))

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
            return value.astype(leaf.dtype)

        return jax.tree_util.tree_map_with_path(fill, self.model)

    def _loss(self, params: dict, buffers: dict, batch: Batch) -> tuple[Array, tuple]:
        options = self._options
        model = self._assemble(params, buffers)
        losses = model.losses(batch, mtp=options.mtp_weight > 0, checkpoint=options.checkpoint)
        loss = losses.sum / jnp.maximum(losses.count, 1)
        depths = losses.mtp_sum.shape[0]
        mtp_loss = jnp.sum(losses.mtp_sum / jnp.maximum(losses.mtp_count, 1)) / max(depths, 1)
        balance_loss = sum((jnp.sum(s.balance_loss) for s in losses.stats.values()), jnp.zeros((), jnp.float32))
        load = {name: jax.lax.stop_gradient(s.load) for name, s in losses.stats.items()}
        total = loss + options.mtp_weight * mtp_loss + options.balance_weight * balance_loss
        return total, (loss, mtp_loss, balance_loss, losses.count, load)

    def raw(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """The step as a plain function of arrays: forward, backward, update. Nothing is donated."""
        options = self._options
        value_and_grad = jax.value_and_grad(self._loss, has_aux=True)
        (total, (loss, mtp_loss, balance_loss, count, load)), grads = value_and_grad(state.params, state.buffers, batch)
        with jax.named_scope("optimizer"):
            grads = _float32(grads)
            squares = jnp.stack([jnp.sum(jnp.square(grads[path])) for path in self.parameters])
            grad_norm = jnp.sqrt(jnp.sum(squares))
            finite = jnp.isfinite(total) & jnp.isfinite(grad_norm)
            if options.clip_norm is not None:
                factor = options.clip_norm / jnp.maximum(grad_norm, options.clip_norm)
                grads = jax.tree.map(lambda g: g * factor, grads)
            wide = _float32(state.params)
            updates, opt_state = self._optimizer.update(grads, state.opt_state, wide)
            params = jax.tree.map(lambda p, w, u: (w + u).astype(p.dtype), state.params, wide, updates)
            buffers = _balanced(state.buffers, load, options.bias_rate, options.mtp_weight > 0)
            # All or nothing: a step that isn't finite leaves no trace but its count.
            params, buffers, opt_state = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old),
                (params, buffers, opt_state),
                (state.params, state.buffers, state.opt_state),
            )
            consecutive = jnp.where(finite, 0, state.consecutive + 1)
            bad_steps = state.bad_steps + ~finite
        new = TrainState(params, buffers, opt_state, state.step + 1, state.key, bad_steps, consecutive)
        return new, Metrics(
            loss, mtp_loss, balance_loss, grad_norm, jnp.sqrt(squares), count, load, ~finite, consecutive
        )

    def _sums(self, state: TrainState, batch: Batch) -> tuple[Array, Array]:
        losses = self._assemble(state.params, state.buffers).losses(batch, mtp=False, checkpoint=None)
        return losses.sum, losses.count

    def evaluate(self, state: TrainState, batches: Iterable[Batch]) -> float:
        """The mean cross-entropy in nats over all valid targets of `batches`, each token counting the same.

        Multi-token prediction doesn't run. Raises ValueError if there is no valid target.
        """
        self._check(state)
        # A few scalars a batch wait on the device, so that no batch waits for the one before.
        sums = jax.device_get([self._evaluation(state, batch) for batch in batches])
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
        return f"not finite: the gradient of {_some(names)}" if names else "the gradient norm overflows"


def _balanced(buffers: dict[str, Any], load: dict[str, Array], rate: float | int, mtp: bool) -> dict[str, Any]:
    """The buffers with each router's selection bias moved by the sign rule, from the load of its stack.

    A stack's biases are [layers, experts], segment after segment; its load is stacked over all its layers.
    """
    new = dict(buffers)
    left = {path for path in buffers if path.endswith(_ROUTER_BIAS)}
    for stack, loads in load.items():
        # In the order of their segments: as text, segment 10 would come before segment 2.
        paths = sorted((p for p in left if p.startswith(f"{stack}.")), key=_natural)
        left -= set(paths)
        start = 0
        for path in paths:
            bias = buffers[path]
            layers = bias.shape[0] if bias.ndim == 2 else 1
            part = loads.reshape(-1, bias.shape[-1])[start : start + layers]
            start += layers
            new[path] = update_bias(bias, part.reshape(bias.shape), rate) if rate else bias
        counted = loads.size // loads.shape[-1]
        if paths and start != counted:
            raise ValueError(f"{stack!r} counts the load of {counted} layers but has {start} biases")
    left = {path for path in left if mtp or not path.startswith("mtp.")}
    if left:
        raise ValueError(f"no expert load was counted for the routers of {_some(left)}: their biases would stand still")
    return new


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]


def _some(paths: Iterable[str]) -> str:
    paths = sorted(paths, key=_natural)
    return ", ".join(map(repr, paths[:3])) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
