"""Collectives, from programs whose collectives are known and from text of forms that CPUs don't write."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

from overspill.zoo.collectives import Collective, find_collectives
from overspill.zoo.sharding import layout

MESH = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"))


def compiled(function, mesh, specs, *shapes):
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    return jax.jit(function).lower(*args).compile()


def local(function, mesh, spec, shape, out=None):
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=out or spec, check_vma=False)
    return compiled(mapped, mesh, (spec,), shape)


def module(*lines, extra=""):
    """The text of a program around instructions of its entry computation."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule jit_f, num_partitions=8\n\n{extra}\nENTRY %main (p: f32[4]) -> f32[4] {{\n{body}\n}}\n"


def gather(groups):
    return f"%a = f32[8]{{0}} all-gather(%p), channel_id=1, replica_groups={groups}, dimensions={{0}}"


def one(text, mesh=MESH):
    found = find_collectives(text, mesh)
    assert len(found) == 1
    return found.entries[0]


@pytest.mark.parametrize(
    "function, kind, axes, shape, group",
    [
        (lambda x: jax.lax.all_gather(x, "fsdp", tiled=True), "all-gather", ("fsdp",), (4, 16), 2),
        (lambda x: jax.lax.psum(x, ("data", "tensor")), "all-reduce", ("data", "tensor"), (2, 16), 4),
        (lambda x: jax.lax.psum(x, ("data", "fsdp", "tensor")), "all-reduce", ("data", "fsdp", "tensor"), (2, 16), 8),
        (lambda x: jax.lax.psum_scatter(x, "tensor", tiled=True), "reduce-scatter", ("tensor",), (1, 16), 2),
        (lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]), "collective-permute", ("data",), (2, 16), 2),
    ],
)
def test_kinds_axes_and_bytes(make_mesh, function, kind, axes, shape, group):
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    entry = one(local(function, mesh, P(("data", "fsdp", "tensor")), (16, 16), P()), mesh)
    assert (entry.kind, entry.axes, entry.group) == (kind, axes, group)
    assert entry.shapes == (("f32", shape),)
    assert entry.bytes == 4 * np.prod(shape)
    assert (entry.runs, entry.known) == (1, True)


def test_all_to_all(make_mesh):
    """On CPUs its result is a tuple of one array for each device."""
    mesh = make_mesh("expert=4,data=2")
    function = lambda x: jax.lax.all_to_all(x, "expert", 0, 0, tiled=True)
    found = find_collectives(local(function, mesh, P(("expert", "data")), (32, 8)), layout(mesh))
    assert [(e.kind, e.axes, e.bytes, e.group) for e in found] == [("all-to-all", ("expert",), 4 * 4 * 8, 4)]
    assert "all_to_all" in found.entries[0].source


def test_loops_multiply(make_mesh):
    mesh = make_mesh("data=8")

    def function(x):
        inner = lambda _, x: jax.lax.psum(jnp.sin(x), "data")
        outer = lambda x, _: (jax.lax.fori_loop(0, 5, inner, x) + jax.lax.pmax(x, "data"), None)
        return jax.lax.scan(outer, x, None, length=3)[0]

    found = find_collectives(local(function, mesh, P(), (2, 16)), mesh)
    assert sorted(entry.runs for entry in found) == [3, 15]
    assert (found.runs, found.known) == (18, True)
    assert found.bytes == 18 * 2 * 16 * 4


def test_loops_of_unknown_length(make_mesh):
    mesh = make_mesh("data=8")

    def function(x):
        return jax.lax.while_loop(lambda x: jnp.all(x < 100), lambda x: jax.lax.psum(x, "data"), x)

    found = find_collectives(local(function, mesh, P(), (4,)), mesh)
    assert [(entry.kind, entry.runs, entry.known) for entry in found] == [("all-reduce", 1, False)]
    assert not found.known and "at least 1" in str(found)


def test_partitioned_matmul(make_mesh):
    """What JAX's partitioner puts in: features cut over an axis are summed over it."""
    mesh = make_mesh("data=4,tensor=2")
    program = compiled(lambda x, w: x @ w, mesh, (P("data", "tensor"), P("tensor")), (8, 6), (6, 10))
    found = find_collectives(program, mesh)
    assert [(e.kind, e.axes, e.bytes) for e in found] == [("all-reduce", ("tensor",), 2 * 10 * 4)]


def test_nothing_is_sent(make_mesh):
    mesh = make_mesh("data=8")
    found = find_collectives(compiled(jnp.sin, mesh, (P("data"),), (8,)), mesh)
    assert (len(found), found.bytes, found.known) == (0, 0, True)
    assert "nothing" in str(found)


@pytest.mark.parametrize(
    "groups, axes, group",
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",), 2),
        ("{{7,6},{5,4},{3,2},{1,0}}", ("tensor",), 2),
        ("[4,2]<=[8]", ("tensor",), 2),
        ("[2,4]<=[4,2]T(1,0)", ("data", "fsdp"), 4),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",), 2),
        ("[1,8]<=[8]", ("data", "fsdp", "tensor"), 8),
        ("[8,1]<=[8]", (), 1),
        ("{}", ("data", "fsdp", "tensor"), 8),
        ("mesh['a'=2,'b'=4] {'a'}", ("data",), 2),
        ("mesh['a'=2,'b'=4] {'b'}", ("fsdp", "tensor"), 4),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", ("tensor",), 2),
        ("mesh['a'=2,'b'=4] {'a','b':(1)2}", ("data", "fsdp"), 4),
        ("mesh['a'=8] {'a':(2)2}", ("fsdp",), 2),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ("data", "tensor"), 4),
        ("mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'b'}", ("tensor",), 2),
        ("mesh['b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'c'}", ("data", "fsdp"), 4),
        ("{{0,3},{1,2},{4,7},{5,6}}", None, 2),
        ("{{0,1},{2,3}}", None, 2),
    ],
)
def test_groups_of_every_form(groups, axes, group):
    entry = one(module(gather(groups)))
    assert (entry.axes, entry.group) == (axes, group)


def test_groups_that_are_no_axes_say_so():
    text = module(gather("{{0,3},{1,2},{4,7},{5,6}}"))
    assert "axes unknown, groups of 2" in str(find_collectives(text, MESH))
    assert one(text, None).axes is None


def test_permutation_along_several_axes():
    line = "%c = f32[4]{0} collective-permute(%p), channel_id=1, source_target_pairs={{0,1},{1,3},{3,2},{2,0}}"
    assert one(module(line)).axes == ("fsdp", "tensor")


def test_axes_of_one_device_are_never_named():
    mesh = AbstractMesh((1, 8), ("data", "fsdp"))
    assert one(module(gather("[1,8]<=[8]")), mesh).axes == ("fsdp",)


@pytest.mark.parametrize(
    "line, kind, bytes",
    [
        ("%s = (f32[4]{0}, f32[8]{0}) all-gather-start(%p), replica_groups=[4,2]<=[8]", "all-gather", 32),
        ("%s = ((f32[4]{0}, bf16[2]{0}), (f32[8]{0}, bf16[4]{0})) all-gather-start(%p, %q), replica_groups=[4,2]<=[8]",
         "all-gather", 40),
        ("%s = f32[8]{0} all-reduce-start(%p), replica_groups=[4,2]<=[8], to_apply=%add", "all-reduce", 32),
        ("%s = (f32[8]{0}, /*index=1*/bf16[8]{0}) all-reduce-start(%p, %q), replica_groups=[4,2]<=[8]", "all-reduce",
         48),
        ("%s = ((f32[8]{0}), f32[4]{0}) reduce-scatter-start(%p), replica_groups=[4,2]<=[8]", "reduce-scatter", 16),
        ("%s = (f32[8]{0}, f32[8]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), "
         "source_target_pairs={{0,1},{1,0}}", "collective-permute", 32),
        ("%s = bf16[6,2]{1,0:T(8,128)(2,1)} ragged-all-to-all(%p, %o, %a, %b, %c, %d), replica_groups=[4,2]<=[8]",
         "ragged-all-to-all", 24),
        ("%s = pred[3]{0} all-gather(%p), replica_groups=[4,2]<=[8]", "all-gather", 3),
        ("%s = f8e4m3fn[8]{0} all-gather(%p), replica_groups=[4,2]<=[8]", "all-gather", 8),
        ("%s = s4[7]{0} all-gather(%p), replica_groups=[4,2]<=[8]", "all-gather", 4),
    ],
)  # fmt: skip
def test_results_of_started_operations_and_narrow_dtypes(line, kind, bytes):
    done = f"%d = f32[8]{{0}} {kind}-done(%s)"
    entry = one(module(line, done))
    assert (entry.kind, entry.bytes) == (kind, bytes)


ASYNC = """%inner (p: f32[4]) -> f32[8] {
  %p = f32[4]{0} parameter(0)
  ROOT %a = f32[8]{0} all-gather(%p), replica_groups=[4,2]<=[8], dimensions={0}
}
"""


def test_what_is_waited_for_counts_once():
    start = "%s = ((f32[4]), f32[8], u32[]) async-start(%p), calls=%inner"
    done = "%d = f32[8]{0} async-done(%s), calls=%inner"
    assert one(module(start, done, extra=ASYNC)).bytes == 32


def test_reduce_scatter_of_a_tpu():
    fused = """%all-reduce-scatter.3 (input: bf16[8,4]) -> bf16[8,2] {
  %a = bf16[8,4]{1,0:T(8,128)(2,1)} all-reduce(%input), replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %d = bf16[8,2]{1,0:T(8,128)(2,1)} dynamic-slice(%a, %z, %i), dynamic_slice_sizes={8,2}
}
"""
    line = "%f = bf16[8,2]{1,0:T(8,128)(2,1)} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.3"
    entry = one(module(line, extra=fused))
    assert (entry.kind, entry.axes, entry.bytes) == ("reduce-scatter", ("tensor",), 32)


LOOP = """%fused (a: s32[], b: s32[]) -> pred[] {
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

%until (c: (f32[8], s32[])) -> pred[] {
  %n = s32[] constant(6)
  %c = (f32[8]{0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=1
  ROOT %f = pred[] fusion(%i, %n), kind=kLoop, calls=%fused
}

%again (c: (f32[8], s32[])) -> (f32[8], s32[]) {
  %a = f32[8]{0} all-gather(%p), replica_groups=[4,2]<=[8], dimensions={0}
  ROOT %t = (f32[8]{0}, s32[]) tuple(%a, %i)
}
"""
WHILE = "%w = (f32[8]{0}, s32[]) while(%t), condition=%until, body=%again"
BEGIN = "%z = s32[]{:T(128)} constant(0)", "%y = s32[] copy(%z)", "%t = (f32[8]{0}, s32[]) tuple(%p, /*index=1*/%y)"


@pytest.mark.parametrize(
    "old, new, runs, known",
    [
        ("", "", 6, True),
        ("constant(0)", "constant(2)", 4, True),
        ("s32[] constant(6)", "s32[]{:T(128)} constant(60)", 60, True),
        ("direction=LT", "direction=GT", 1, False),
        ("constant(0)", "parameter(1)", 1, False),
        ("tuple(%p, /*index=1*/%y)", "parameter(1)", 1, False),
    ],
)
def test_loops_are_counted_by_their_condition(old, new, runs, known):
    """Where the compiler doesn't say how often they turn, as on TPUs."""
    entry = one(module(*BEGIN, WHILE, extra=LOOP).replace(old, new))
    assert (entry.runs, entry.known) == (runs, known)


def test_what_the_compiler_found_comes_first():
    line = f'{WHILE}, backend_config={{"known_trip_count":{{"n":"9"}},"known_init_step":{{"init":"0","step":"1"}}}}'
    assert one(module(*BEGIN, line, extra=LOOP)).runs == 9


def test_branches_count_as_if_each_ran():
    line = "%c = f32[8]{0} conditional(%i, %p, %p), branch_computations={%inner, %inner}"
    assert find_collectives(module(line, extra=ASYNC), MESH).runs == 2


def test_sums_and_selection():
    reduce = "%r = f32[8]{0} all-reduce(%p), replica_groups=[4,2]<=[8], to_apply=%add"
    found = find_collectives(module(gather("[4,2]<=[8]"), gather("[1,8]<=[8]").replace("%a", "%b"), reduce), MESH)
    assert len(found.of("all-gather")) == 2
    assert len(found.of("all-gather", "tensor")) == 1
    assert len(found.of("all-gather", "tensor", "data", "fsdp")) == 1
    assert list(found.grouped()) == [
        ("all-gather", ("tensor",)), ("all-gather", ("data", "fsdp", "tensor")), ("all-reduce", ("tensor",))
    ]  # fmt: skip
    assert found.bytes == 3 * 32
    assert isinstance(found.entries[0], Collective)
    assert found.as_json()[0]["shapes"] == ["f32[8]"]
    for text in ("data*fsdp*tensor", "all-reduce", "3 in one run", "96 B"):
        assert text in str(found)
    with pytest.raises(ValueError, match="'gather' is not one of"):
        found.of("gather")


def test_text_of_something_else_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        find_collectives("module @jit_f { }", MESH)
