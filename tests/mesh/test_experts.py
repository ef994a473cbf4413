"""A mixture of experts over a mesh, its tokens sent to where the experts are, against one device and NumPy."""

import contextlib
import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from overspill import policies
from overspill.layers import exchange
from overspill.layers.grid import Grid
from overspill.layers.moe import MoE
from overspill.layers.router import SigmoidRouter, SoftmaxRouter
from overspill.layers.stack import Stack
from overspill.policies import axes
from overspill.zoo.sharding import layout, shard

BATCH, SEQUENCE, FEATURES, EXPERTS, SIZE, TOP_K = 8, 12, 20, 16, 24, 3  # no two alike: shapes in a program tell
COPIED = {"batch": ("data",), "experts": ("expert",)}
TWISTED = {"batch": "data", "sequence": "expert", "experts": ("expert", "tensor"), "mlp": "tensor", "embed": "tensor"}
X, COTANGENT = np.random.default_rng(0).standard_normal((2, BATCH, SEQUENCE, FEATURES)).astype(np.float32)
MASK = np.random.default_rng(1).random((BATCH, SEQUENCE)) < 0.7
MASK[:2] = False  # all tokens of one device, and of two where there are eight


def make(kind, seed=0):
    """A layer whose every parameter is random, the selection bias too."""
    router_key, key, values = jax.random.split(jax.random.key(seed), 3)
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "key": router_key}
    if kind == "gpt-oss":
        layer = MoE(
            FEATURES, router=SoftmaxRouter(FEATURES, use_bias=True, **sizes), num_experts=EXPERTS, expert_size=SIZE,
            expert_bias=True, limit=1.0, key=key,
        )  # fmt: skip
    else:
        router = SigmoidRouter(FEATURES, groups=2, top_groups=2, scale=2.5, **sizes)
        layer = MoE(FEATURES, router=router, num_experts=EXPERTS, expert_size=SIZE, shared_size=8, key=key)
    leaves, structure = jax.tree.flatten(layer)
    keys = jax.random.split(values, len(leaves))
    return jax.tree.unflatten(
        structure, [0.7 * jax.random.normal(k, a.shape) for k, a in zip(keys, leaves, strict=True)]
    )


def close(a, b, tolerance=1e-6):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape and np.all(np.isfinite(a))
    assert np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(b), 1e-30), np.linalg.norm(a - b)


def all_close(a, b, tolerance=1e-6):
    for got, want in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        close(got, want, tolerance)


def compiled(layer, place, x, mask):
    """The program of `layer` with all its gradients, and its arguments."""
    parameters, rest = eqx.partition(layer, eqx.is_inexact_array)

    def loss(parameters, x):
        with axes.use(place):
            layer = eqx.combine(parameters, rest)
            y, stats = layer(x, token_mask=None if mask is None else jnp.asarray(mask))
            chosen = layer.router(x).indices
        return jnp.sum(y * COTANGENT) + 3 * stats.balance_loss, (y, stats.balance_loss, stats.load, chosen)

    function = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    return function.lower(parameters, x).compile(), (parameters, x)


@functools.cache
def expected(kind):
    program, arguments = compiled(make(kind), None, jnp.asarray(X), MASK if kind == "gpt-oss" else None)
    return program(*arguments)


def over(mesh):
    explicit = AxisType.Explicit in mesh.axis_types
    return jax.set_mesh(mesh) if explicit else contextlib.nullcontext()


def check_same_as_on_one_device(make_mesh, mesh, rules, kind, change=lambda layer: layer):
    """Holds a layer over a mesh, changed perhaps, against one device. Gives its compiled text and its layout."""
    # Half of them over each kind of axes.
    mesh = make_mesh(mesh, AxisType.Explicit if kind == "gpt-oss" else AxisType.Auto)
    place = layout(mesh, rules)
    x = jax.device_put(X, place.sharding("batch sequence _"))
    with over(mesh):
        program, arguments = compiled(change(shard(make(kind), place)), place, x, MASK if kind == "gpt-oss" else None)
        (_, (y, balance, load, chosen)), grads = program(*arguments)
    (_, (want_y, want_balance, want_load, want_chosen)), want_grads = expected(kind)
    np.testing.assert_array_equal(chosen, want_chosen)
    np.testing.assert_array_equal(load, want_load)
    assert load.dtype == jnp.float32 and load.sharding.is_fully_replicated
    close(balance, want_balance)
    close(y, want_y)
    all_close(grads, want_grads)
    experts = grads[0].experts
    for name, declared in experts.axes.items():
        grad = getattr(experts, name)
        assert grad is None or grad.sharding.is_equivalent_to(place.sharding(declared), grad.ndim)
    return program.as_text(), place


@pytest.mark.parametrize(
    "mesh, rules, kind",
    [
        ("expert=8", None, "deepseek"),
        ("data=2,expert=4", None, "gpt-oss"),
        ("fsdp=2,expert=2,tensor=2", None, "deepseek"),
        ("fsdp=2,expert=2,tensor=2", None, "gpt-oss"),
        ("sequence=2,expert=4", None, "gpt-oss"),
        ("tensor=8", None, "deepseek"),
        ("data=2,expert=4", COPIED, "gpt-oss"),
        ("data=2,expert=2,tensor=2", TWISTED, "gpt-oss"),
    ],
)
def test_same_as_on_one_device(make_mesh, mesh, rules, kind):
    text, place = check_same_as_on_one_device(make_mesh, mesh, rules, kind)
    check_collectives(text, place)


def check_collectives(text, place):
    grid = Grid(place)
    assert bool(re.search(r" all-to-all\(", text)) == bool(grid.traded)
    results = re.findall(r"= (.*) all-gather(?:-start)?\(", text)
    shapes = [tuple(map(int, dims.split(","))) for result in results for dims in re.findall(r"\[([\d,]+)\]", result)]
    for shape in shapes:
        assert not (grid.experts and len(shape) == 3 and shape[0] == EXPERTS), f"all experts are gathered: {shape}"
        routed = shape[:2] == (BATCH, SEQUENCE) and (len(shape) == 4 or shape[-1] in (EXPERTS, TOP_K))
        assert not routed, f"the scores of all tokens are gathered: {shape}"


LOADS = {"uneven": None, "the same experts for all": [5, 4, 12], "all on one device": [0, 1, 2], "one": [9]}


def routed(load):
    """The experts and weights of each token: as if a router had chosen them."""
    rng = np.random.default_rng(3)
    skewed = rng.gumbel(size=(BATCH, SEQUENCE, EXPERTS)) + np.linspace(0, 6, EXPERTS)
    skewed[..., 7] = -np.inf
    indices = np.argsort(-skewed, -1)[..., : 1 if load == "one" else TOP_K]
    if LOADS[load] is not None:
        indices = np.broadcast_to(LOADS[load], indices.shape)
    return indices.astype(np.int32), rng.standard_normal(indices.shape).astype(np.float32)


def by_hand(experts, x, indices, weights, mask, cotangent):
    """Value and gradients token by token in float64: of x, of the weights, of gate, up and down."""
    gate, up, down = (np.asarray(w, np.float64) for w in (experts.gate_weight, experts.up_weight, experts.down_weight))
    x, weights, cotangent = (a.astype(np.float64) for a in (x, weights, cotangent))
    y, dx, dw = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weights)
    d_gate, d_up, d_down = np.zeros_like(gate), np.zeros_like(up), np.zeros_like(down)
    for b, s, k in np.ndindex(indices.shape):
        if not mask[b, s]:
            continue
        e, v, w = indices[b, s, k], x[b, s], weights[b, s, k]
        g, u = gate[e] @ v, up[e] @ v
        sigmoid = 1 / (1 + np.exp(-g))
        out = down[e] @ (g * sigmoid * u)
        y[b, s] += w * out
        dw[b, s, k] = out @ cotangent[b, s]
        dh = w * down[e].T @ cotangent[b, s]
        dg, du = dh * u * sigmoid * (1 + g * (1 - sigmoid)), dh * g * sigmoid
        d_down[e] += w * np.outer(cotangent[b, s], g * sigmoid * u)
        d_gate[e], d_up[e] = d_gate[e] + np.outer(dg, v), d_up[e] + np.outer(du, v)
        dx[b, s] += gate[e].T @ dg + up[e].T @ du
    return y, (dx, dw, d_gate, d_up, d_down)


def ragged_all_to_all(x, out, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What `jax.lax.ragged_all_to_all` is documented to do, which no CPU has; NaN where sizes disagree."""
    every = [jax.lax.all_gather(a, axis_name) for a in (x, input_offsets, send_sizes, output_offsets)]
    me, row = jax.lax.axis_index(axis_name), jnp.arange(out.shape[0])
    for sender in range(recv_sizes.shape[0]):
        x, first, size, place = (a[sender] for a in every)
        first, size, place = first[me], size[me], place[me]
        agreed = jnp.where((size == recv_sizes[sender]) & (place + size <= out.shape[0]), 0, jnp.nan)
        rows = jnp.take(x, jnp.clip(first + row - place, 0, x.shape[0] - 1), axis=0) + agreed
        out = jnp.where(((row >= place) & (row < place + size))[:, None], rows, out)
    return out


def check_any_load(make_mesh, monkeypatch, mesh, rules, backend, through):
    """Holds `through(grid, experts, x, indices, weights, mask)`, a result and a load, against NumPy for every load."""
    if backend == "ragged":
        if rules is COPIED:
            pytest.skip("nothing travels")
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **others: default(*args))
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    place = layout(make_mesh(mesh), rules)
    grid = Grid(place)
    experts = make("deepseek").experts

    @jax.jit
    def run(experts, x, indices, weights, mask):
        def layer(x, weights, gate, up, down):
            e = eqx.tree_at(lambda e: (e.gate_weight, e.up_weight, e.down_weight), experts, (gate, up, down))
            with axes.use(place):
                return through(grid, e, x, indices, weights, mask)

        parameters = experts.gate_weight, experts.up_weight, experts.down_weight
        y, pull, load = jax.vjp(layer, x, weights, *parameters, has_aux=True)
        return y, pull(jnp.asarray(COTANGENT)), load

    for load in LOADS if backend == "padded" else ("uneven", "all on one device"):
        indices, weights = routed(load)
        y, grads, count = run(shard(experts, place), X, indices, weights, MASK)
        want, want_grads = by_hand(experts, X, indices, weights, MASK, COTANGENT)
        close(y, want)
        all_close(grads, want_grads)
        np.testing.assert_array_equal(count, np.bincount(indices[MASK].ravel(), minlength=EXPERTS))
        for grad in grads[2:]:
            assert np.all(np.asarray(grad)[np.asarray(count) == 0] == 0)


@pytest.mark.parametrize("backend", ["padded", "ragged"])
@pytest.mark.parametrize(
    "mesh, rules", [("expert=8", None), ("data=2,expert=4", None), ("data=2,expert=4", COPIED),
                    ("data=2,expert=2,tensor=2", TWISTED)],
)  # fmt: skip
def test_any_load_token_by_token(make_mesh, monkeypatch, mesh, rules, backend):
    def through(grid, experts, x, indices, weights, mask):
        plan = exchange.assign(grid, indices, EXPERTS, token_mask=mask)
        return exchange.combine(experts(exchange.dispatch(x, plan), plan.group_sizes, grid), weights, plan), plan.load

    check_any_load(make_mesh, monkeypatch, mesh, rules, backend, through)


def test_bfloat16_rounds_as_on_one_device(make_mesh):
    place, layer = layout(make_mesh("fsdp=2,expert=2,tensor=2")), make("deepseek").experts
    indices, weights = routed("uneven")
    narrow = jnp.asarray(X, jnp.bfloat16)

    def run(place, x):
        grid = Grid(place)

        @jax.jit
        def gradients(experts, x, weights):
            plan = exchange.assign(grid, jnp.asarray(indices), EXPERTS)

            def loss(experts, x, weights):
                with axes.use(place):
                    y = exchange.combine(experts(exchange.dispatch(x, plan), plan.group_sizes, grid), weights, plan)
                return jnp.sum(y.astype(jnp.float32) * COTANGENT), y

            return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(experts, x, weights)

        return gradients(shard(layer, place), x, weights)

    single = layout(jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,)))
    (got, y), (one, one_y), (want, want_y) = run(place, narrow), run(single, narrow), run(single, X)
    assert y.dtype == got[1].dtype == jnp.bfloat16 and got[0].gate_weight.dtype == jnp.float32
    for a, b, exact in zip(*map(jax.tree.leaves, ((got, y), (one, one_y), (want, want_y))), strict=True):
        a, b, exact = (np.asarray(leaf, np.float64) for leaf in (a, b, exact))
        assert np.linalg.norm(a - exact) <= 1.25 * np.linalg.norm(b - exact) <= 0.04 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    "kind, manual, laid_out",
    [
        (AxisType.Auto, ("data", "expert"), False),
        (AxisType.Explicit, ("data", "expert"), True),
        (AxisType.Auto, ("data",), True),  # tokens travel over the other axis
    ],
)
def test_inside_shard_map(make_mesh, kind, manual, laid_out):
    mesh = make_mesh("data=4,expert=2", kind)
    place = layout(mesh) if laid_out else None
    parameters, rest = eqx.partition(make("gpt-oss"), eqx.is_inexact_array)
    cut = PartitionSpec(manual)

    def local(parameters, x, mask, cotangent):
        def loss(parameters, x):
            with axes.use(place):
                y, stats = eqx.combine(parameters, rest)(x, token_mask=mask)
            return jax.lax.psum(jnp.sum(y * cotangent), cut[0]), (y, jax.lax.psum(stats.load, cut[0]))

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(parameters, x)

    out = ((PartitionSpec(), (cut, PartitionSpec())), (PartitionSpec(), cut))
    options = {"mesh": mesh, "out_specs": out, "axis_names": set(manual)}
    function = jax.jit(jax.shard_map(local, in_specs=(PartitionSpec(), cut, cut, cut), **options))
    arguments = jax.device_put((X, MASK, COTANGENT), NamedSharding(mesh, cut))
    (_, (y, load)), grads = function(jax.device_put(parameters, NamedSharding(mesh, PartitionSpec())), *arguments)

    def loss(parameters, x):
        y, stats = eqx.combine(parameters, rest)(x, token_mask=jnp.asarray(MASK))
        return jnp.sum(y * COTANGENT), (y, stats.load)

    want = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(parameters, jnp.asarray(X))
    all_close((grads, (y, load)), want)

    if "expert" in manual:
        specs = jax.tree.map(lambda leaf: PartitionSpec(), parameters)
        specs = eqx.tree_at(lambda p: p.experts.gate_weight, specs, PartitionSpec("expert"))
        parts = jax.device_put(parameters, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
        with pytest.raises(ValueError, match=f"this device has {EXPERTS // 2} of {EXPERTS} experts"):
            jax.shard_map(local, in_specs=(specs, cut, cut, cut), **options)(parts, *arguments)


def test_activations_wait_on_the_host(make_mesh):
    place = layout(make_mesh("data=2,expert=2,tensor=2"))
    layers = [make("gpt-oss", seed) for seed in range(2)]
    # Half of the weights, or the second layer would amplify how the first one rounds.
    block = jax.tree.map(lambda *leaves: jnp.stack(leaves) / 2, *layers)
    names = ("dispatched", "expert_output", "experts.gate", "experts.up", "experts.hidden")
    host = policies.place(Stack((block,), (2,)), {f"*.{name}": "host" for name in names})

    def run(stack, place, checkpoint, jaxpr=False):
        parameters, rest = eqx.partition(stack, eqx.is_inexact_array)

        def loss(parameters, x):
            with axes.use(place):
                y, stats = eqx.combine(parameters, rest)(x, checkpoint=checkpoint, token_mask=jnp.asarray(MASK))
            return jnp.sum(y * COTANGENT), stats.load

        function = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
        return function(parameters, X), str(jax.make_jaxpr(function)(parameters, X)) if jaxpr else None

    want, _ = run(host, None, None)
    got, jaxpr = run(shard(host, place), place, policies.checkpoint, jaxpr=True)
    np.testing.assert_array_equal(got[1], want[1])
    all_close(got, want)
    rows = BATCH * SEQUENCE * 2 * TOP_K  # of all devices: each has room for all choices of those it exchanges with
    for width in (FEATURES, SIZE):
        assert f"f32<host>[2,{rows},{width}]" in jaxpr


def test_ragged_where_the_backend_has_it(make_mesh):
    place = layout(make_mesh("data=2,expert=4"))
    parameters, rest = eqx.partition(shard(make("deepseek"), place), eqx.is_inexact_array)

    @jax.jit
    @jax.grad
    def gradient(parameters):
        with axes.use(place):
            return jnp.sum(eqx.combine(parameters, rest)(jnp.asarray(X))[0])

    traced = gradient.trace(parameters)
    for platform in ("cuda", "tpu", "cpu"):
        program = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("ragged_all_to_all" in program) == (platform != "cpu")


def test_what_cannot_be_cut(make_mesh):
    place = layout(make_mesh("data=2,expert=4"))
    router = SigmoidRouter(FEATURES, num_experts=6, top_k=2, key=jax.random.key(0))
    layer = MoE(FEATURES, router=router, num_experts=6, expert_size=4, key=jax.random.key(0))
    with axes.use(place), pytest.raises(ValueError, match="experts.gate_weight .*6 experts.* 4 equal parts .*'expert'"):
        layer(jnp.asarray(X))
    with axes.use(place), pytest.raises(ValueError, match="batch.*8 equal parts"):
        make("deepseek")(jnp.asarray(X)[:6])
