import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from overspill import policies
from overspill.policies import Activation, PlacementNotApplied, census, check, checkpoint, place
from overspill.policies.activation import annotations
from overspill.policies.report import Table, format_bytes

LAYERS, ROWS, SIZE = 3, 4, 8
ONE = ROWS * SIZE * 4  # bytes of one activation of one layer in float32


def loss(model, x, checkpoint=policies.checkpoint):
    return jnp.sum(model(x, checkpoint) ** 2)


def sgd(model, x):
    value, grads = jax.value_and_grad(loss)(model, x)
    grads = jax.tree.map(lambda g: g / (1 + value), grads)  # work after the backward pass is no backward pass
    return jax.tree.map(lambda p, g: p - 0.1 * g, model, grads), value


def accumulated(model, x):
    """A step whose two passes lie inside one scan over micro-batches."""

    def micro(total, x):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(model, x)), None

    return jax.lax.scan(micro, jax.tree.map(jnp.zeros_like, model), jnp.stack([x, x]))[0]


FORMS = {
    "loss": loss,
    "step": sgd,
    "jitted step": jax.jit(sgd),
    "filter_jit": eqx.filter_jit(sgd),
    "micro": accumulated,
}


def summary(found):
    return {
        e.label: (e.memory.value, e.shape, e.layers, e.bytes) for e in found.entries if e.kind == "named"
    }


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_bytes_names_and_memory(tower, x, form, scan):
    model = place(tower(LAYERS, scan=scan), {"*": "recompute", "*.block_input": "host", "*.hidden": "device"})
    found = check(FORMS[form], model, x)
    assert summary(found) == {
        "cells.block_input": ("host", (ROWS, SIZE), LAYERS, LAYERS * ONE),
        "cells.hidden": ("device", (ROWS, SIZE), LAYERS, LAYERS * ONE),
    }
    assert found.host_bytes == LAYERS * ONE
    assert found.bytes("named", memory="device") == LAYERS * ONE
    assert found.bytes("unnamed") == ONE  # the model's output, which the square keeps
    assert found.unnamed_share == pytest.approx(1 / (2 * LAYERS + 1))
    assert found.statuses["cells.projected"] == "recomputed"
    assert found.statuses["cells.output"] == "not needed"
    weights = [e for e in found.entries if e.kind == "argument"]
    assert {e.label.split(".")[-1] for e in weights} == {"first", "second"}
    assert sum(e.bytes for e in weights) == 2 * LAYERS * SIZE * SIZE * 4
    assert [e.label.split(" ")[0] for e in found.entries if e.kind == "constant"] == ["cos"]


@pytest.mark.parametrize("name", ["block_input", "projected", "hidden"])
def test_every_needed_name_counts(tower, x, name):
    model = place(tower(LAYERS), "recompute_all")
    base = census(loss, model, x)
    moved = census(loss, place(model, {f"*.{name}": "host"}), x)
    assert moved.host_bytes - base.host_bytes == LAYERS * ONE
    assert moved.statuses[f"cells.{name}"] == "host"


def test_agrees_with_what_vjp_returns(tower, x):
    """The values that cross between the passes are those that JAX's own pullback holds."""
    for preset in ("save_all", "offload_all", "recompute_all"):
        model = place(tower(LAYERS), preset)
        residuals = jax.make_jaxpr(lambda m, x: jax.vjp(loss, m, x)[1])(model, x).out_avals
        found = census(loss, model, x)
        on_host = sum(a.size * 4 for a in residuals if a.memory_space == jax.memory.Space.Host)
        assert found.host_bytes == on_host
        assert sum(e.bytes for e in found.entries) == sum(a.size * a.dtype.itemsize for a in residuals)


def test_no_policy_keeps_unnamed_values(tower, x):
    found = census(lambda m, x: loss(m, x, None), tower(LAYERS), x)
    assert found.unnamed_share > 0.5
    assert found.host_bytes == 0


def test_half_precision_parameters_are_casts(tower, x):
    def half(model, x):
        return loss(jax.tree.map(lambda p: p.astype(jnp.bfloat16), model), x.astype(jnp.bfloat16))

    found = census(half, place(tower(LAYERS), "save_all"), x)
    casts = {e.label: (e.dtype, e.bytes) for e in found.entries if e.kind == "cast"}
    assert casts == {
        "0.cells.first": ("bfloat16", LAYERS * SIZE * SIZE * 2),
        "0.cells.second": ("bfloat16", LAYERS * SIZE * SIZE * 2),
    }


def test_single_layer_and_abstract_arguments(make_cell):
    cell = jax.eval_shape(lambda: make_cell(jax.random.key(0)))
    x = jax.ShapeDtypeStruct((ROWS, SIZE), jnp.float32)
    found = check(checkpoint(place(cell, {"*": "host"})), x, 1.0)
    assert {e.label for e in found.entries if e.kind == "named"} == {"block_input", "projected", "hidden"}
    assert found.host_bytes == 3 * ONE


def test_two_annotated_arguments_do_not_collide(make_cell, x):
    a = place(make_cell(jax.random.key(0)), {"*": "host"})
    b = place(make_cell(jax.random.key(1)), "save_all")
    found = check(lambda a, b, x: checkpoint(b)(checkpoint(a)(x, 1.0), 1.0).sum(), a, b, x)
    assert found.statuses["0.hidden"] == "host" and found.statuses["1.hidden"] == "device"


def test_second_name_of_one_value_is_told_apart(tower, x):
    model = place(tower(fault="alias"), {"*": "host"})
    found = check(loss, model, x)
    assert found.statuses["cells.hidden"] == "same value as cells.again"
    assert found.statuses["cells.again"] == "host"
    assert found.host_bytes == 3 * LAYERS * ONE  # block input, projected, and the value with two names once


def test_untagged_name_raises(tower, x):
    with pytest.raises(PlacementNotApplied, match=r"'cells\.projected' is annotated 'host', but the program never"):
        check(loss, place(tower(fault="untagged"), {"*": "host"}), x)


@pytest.mark.parametrize("scan", [True, False])
def test_raw_value_beside_its_name_raises(tower, x, scan):
    model = place(tower(fault="raw", scan=scan), {"*": "recompute", "*.block_input": "host"})
    assert census(loss, model, x).raw == ("cells.block_input",)
    with pytest.raises(PlacementNotApplied, match=r"'cells\.block_input' is named, but the value before"):
        check(loss, model, x)


def test_policy_not_applied_raises(tower, x):
    with pytest.raises(PlacementNotApplied, match="'cells.block_input' is annotated 'host'.*no policy is applied"):
        check(lambda m, x: loss(m, x, None), place(tower(), "offload_all"), x)


def test_foreign_policy_is_found_out(tower, x):
    def wrapped(cell):
        keep_all = jax.checkpoint_policies.save_only_these_names("cells.block_input", "cells.projected")
        return lambda x, table: jax.checkpoint(lambda c, x: c(x, table), policy=keep_all)(cell, x)

    with pytest.raises(PlacementNotApplied, match=r"'cells\.hidden' is annotated 'host' but waits as 'recompute'"):
        check(lambda m, x: loss(m, x, wrapped), place(tower(), {"*.hidden": "host"}), x)


def test_annotations_out_of_reach_raise(tower, x):
    model = tower()
    with pytest.raises(PlacementNotApplied, match="no Activation is in reach"):
        check(lambda x: loss(model, x), x)


def test_nothing_to_differentiate_raises():
    with pytest.raises(TypeError, match="floating-point"):
        census(lambda i: i + 1, jnp.arange(3))


def test_nothing_is_computed(tower):
    huge = jax.eval_shape(lambda: tower(4))
    x = jax.ShapeDtypeStruct((1 << 40, SIZE), jnp.float32)
    found = census(loss, place(huge, "offload_all"), x)
    assert found.host_bytes == 3 * 4 * (1 << 40) * SIZE * 4


def test_tables(tower, x):
    model = place(tower(), "offload_all")
    found = census(loss, model, x)
    text = str(found)
    assert "cells.block_input" in text and "not needed" in text and format_bytes(found.host_bytes) in text
    assert "float32[4,8]" in text
    assert "<td>cells.hidden</td>" in found._repr_html_()
    rows = policies.activations(model, found).rows
    assert [r[0] for r in rows] == [path for path, _ in annotations(model)]
    assert len(str(policies.activations(model)).splitlines()) >= len(rows) + 2


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (10 * 2**30, "10.0 GiB"), (2**50, "1024 TiB")]
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


def test_paths_under_one_index_share_a_heading(make_cell):
    text = str(policies.activations([make_cell(jax.random.key(0)), {"a": make_cell(jax.random.key(1))}]))
    lines = [line.split() for line in text.splitlines()]
    assert ["0"] in lines and ["1"] in lines
    assert ["block_input", "device"] in lines and ["a.hidden", "device"] in lines


def test_what_belongs_under_no_heading_is_set_apart(make_cell, x):
    model = [place(make_cell(jax.random.key(0)), "save_all")]
    lines = str(census(lambda m, x: checkpoint(m[0])(x, 1.0).sum() ** 2, model, x)).splitlines()
    lines = [line.strip() for line in lines]
    (hidden,) = (i for i, line in enumerate(lines) if line.startswith("hidden"))
    assert lines.index("0") < hidden < lines.index("elsewhere")


def test_brackets_are_text():
    assert "[bold]x[/]" in str(Table(["a"], [["[bold]x[/]"]]))


class OneHot(eqx.Module):
    weight: jax.Array
    hidden: Activation

    def __call__(self, tokens):
        return self.hidden(jax.nn.one_hot(tokens, 8)) @ self.weight


def test_a_name_on_a_value_made_of_integers_counts():
    layer = OneHot(jnp.eye(8), Activation("hidden", "host"))
    assert check(checkpoint(layer), jnp.arange(4)).host_bytes == 4 * 8 * 4
    with pytest.raises(PlacementNotApplied, match="'hidden' is annotated 'host' but waits as 'device'"):
        check(layer, jnp.arange(4))


class Choice(eqx.Module):
    weight: jax.Array
    hidden: Activation

    def __call__(self, x, chosen):
        return jax.lax.cond(chosen, lambda x: jnp.sin(self.hidden(jnp.sin(x @ self.weight))), lambda x: x, x)


@pytest.mark.parametrize("placement", ["host", "device", "recompute"])
def test_a_name_within_a_cond(x, placement):
    layer = Choice(jnp.eye(SIZE), Activation("hidden", placement))
    found = check(checkpoint(layer), x, jnp.array(True))
    assert found.statuses == {"hidden": placement.replace("recompute", "recomputed")}
    assert found.host_bytes == (ONE if placement == "host" else 0)


def test_a_parameter_joined_with_an_activation_is_an_activation(x):
    def joined(parameter, x):
        return jnp.sin(jnp.concatenate([parameter, jnp.cos(x)])).sum()

    (kept,) = (e for e in census(joined, jnp.ones((1, SIZE)), x).entries if e.shape == (ROWS + 1, SIZE))
    assert kept.kind == "unnamed"


def test_raw_argument_of_a_layer_alone_raises(make_cell, x):
    layer = place(make_cell(jax.random.key(0), fault="raw"), {"*": "recompute", "block_input": "host"})
    with pytest.raises(PlacementNotApplied, match="'block_input' is named, but the value before"):
        check(checkpoint(layer), x, 1.0)


def test_a_module_under_filter_jit(cell, x):
    layer = place(cell, {"*": "host"})
    assert check(eqx.filter_jit(checkpoint(layer)), x, 1.0).statuses["hidden"] == "host"


def test_a_field_called_module_and_a_keyword_called_function(cell, x):
    class Holder(eqx.Module):
        module: eqx.Module

        def __call__(self, x, function):
            return function(self.module(x, 1.0))

    found = check(checkpoint(Holder(place(cell, {"*": "host"}))), x, function=jnp.sin)
    assert found.statuses["module.hidden"] == "host"
