"""Evidence of offload in compiled programs: of GPUs and TPUs from hand-cut texts, and from their compilers if here."""

import dataclasses
import importlib.metadata
import json
import re

import jax
import jax.numpy as jnp
import pytest

from overspill.policies.accelerators import target
from overspill.policies.ahead import compile_ahead
from overspill.policies.evidence import Evidence, HostBuffer, Transfer, read

HOST, DEVICE = "bf16[8,4,16]{2,1,0:S(5)}", "bf16[1,4,16]{2,1,0}"
STATE = f"(s32[], bf16[4,16]{{1,0}}, {HOST})"
FILL = '%{} = bf16[4,16]{{1,0}} fusion({}), kind=kLoop, calls=%fused_tanh, metadata={{op_name="jit(f)/jvp()/tanh"}}'
TANH = """%fused_tanh (p: bf16[4,16]) -> bf16[4,16] {
  %p.0 = bf16[4,16]{1,0} parameter(0)
  ROOT %tanh = bf16[4,16]{1,0} tanh(%p.0), metadata={op_name="jit(f)/jvp(stack)/while/body/block/tanh"}
}"""
STORE = f"""%store (p: bf16[8,4,16], q: bf16[1,4,16], i: s32[]) -> bf16[8,4,16] {{
  %p.1 = {HOST} parameter(0)
  %q.1 = {DEVICE} parameter(1)
  %i.1 = s32[] parameter(2)
  ROOT %dus = {HOST} dynamic-update-slice(%p.1, %q.1, %i.1)
}}"""
LOAD = f"""%load (p: bf16[8,4,16], i: s32[]) -> bf16[1,4,16] {{
  %p.2 = {HOST} parameter(0)
  %i.2 = s32[] parameter(1)
  ROOT %ds = {DEVICE} dynamic-slice(%p.2, %i.2), dynamic_slice_sizes={{1,4,16}}
}}"""
TRIPS = 'backend_config={"known_trip_count":{"n":"8"}}'
OUT = {
    "gpu": (f"%out = (({HOST}, {DEVICE}, s32[]), {HOST}, u32[]) fusion-start(%host, %piece, %i), calls=%store",
            f"%stored = {HOST} fusion-done(%out)"),
    "tpu": (f"%out = (({HOST}, {DEVICE}, s32[]), {HOST}, u32[]) dynamic-update-slice-start(%host, %piece, %i)",
            f"%stored = {HOST} dynamic-update-slice-done(%out)"),
    "wrapped": (f"%out = (({HOST}, {DEVICE}, s32[]), {HOST}, u32[]) async-start(%host, %piece, %i), calls=%store",
                f"%stored = {HOST} async-done(%out)"),
    "waits": (f"%stored = {HOST} dynamic-update-slice(%host, %piece, %i)",),
    "waits, fused": (f"%stored = {HOST} fusion(%host, %piece, %i), kind=kLoop, calls=%store",),
}  # fmt: skip
IN = {
    "gpu": (f"%in = (({HOST}, s32[]), {DEVICE}, u32[]) fusion-start(%host.2, %i.3), calls=%load",
            f"%loaded = {DEVICE} fusion-done(%in)"),
    "tpu": (f"%in = (({HOST}, s32[]), {DEVICE}, u32[]) dynamic-slice-start(%host.2, %i.3)",
            f"%loaded = {DEVICE} dynamic-slice-done(%in)"),
    "wrapped": (f"%in = (({HOST}, s32[]), {DEVICE}, u32[]) async-start(%host.2, %i.3), calls=%load",
                f"%loaded = {DEVICE} async-done(%in)"),
    "waits": (f"%loaded = {DEVICE} dynamic-slice(%host.2, %i.3), dynamic_slice_sizes={{1,4,16}}",),
    "waits, fused": (f"%loaded = {DEVICE} fusion(%host.2, %i.3), kind=kLoop, calls=%load",),
}  # fmt: skip


def computation(name, *lines, entry=False):
    body = "\n".join(f"  {line}" for line in lines)
    return f"{'ENTRY ' if entry else ''}%{name} (p: s32[]) -> s32[] {{\n{body}\n}}"


def module(*computations):
    return "\n\n".join(("HloModule jit_f, is_scheduled=true", *computations)) + "\n"


def between(pair, lines):
    """`lines` where something is started before and waited for after them; after something that isn't started."""
    return (*pair[:1], *lines, *pair[1:])


def training(way, lines=None, extra=()):
    """A scan of eight layers that puts what a layer computes on the host, and one that brings it back."""
    lines = (FILL.format("h.1", "%h"),) if lines is None else lines
    forward = computation(
        "forward", f"%c = {STATE} parameter(0)", "%i = s32[] get-tuple-element(%c), index=0",
        "%x = bf16[4,16]{1,0} get-tuple-element(%c), index=1", f"%host = {HOST} get-tuple-element(%c), index=2",
        FILL.format("h", "%x"), f"%piece = {DEVICE} bitcast(%h)", *between(OUT[way], lines),
        f"ROOT %t = {STATE} tuple(%i, %h, %stored)",
    )  # fmt: skip
    backward = computation(
        "backward", f"%c.2 = {STATE} parameter(0)", "%i.3 = s32[] get-tuple-element(%c.2), index=0",
        f"%host.2 = {HOST} get-tuple-element(%c.2), index=2", "%g = bf16[4,16]{1,0} get-tuple-element(%c.2), index=1",
        *between(IN[way], (FILL.format("g.1", "%g"),)), f"ROOT %t.2 = {STATE} tuple(%i.3, %g.1, %host.2)",
    )  # fmt: skip
    entry = computation(
        "main", "%x.9 = bf16[4,16]{1,0} parameter(0)", "%zero = s32[] constant(0)",
        f'%room = {HOST} custom-call(), custom_call_target="AllocateBuffer"', f"%a = {STATE} tuple(%zero, %x.9, %room)",
        f"%w = {STATE} while(%a), condition=%until, body=%forward, {TRIPS}",
        "%y = bf16[4,16]{1,0} get-tuple-element(%w), index=1", f"%kept = {HOST} get-tuple-element(%w), index=2",
        FILL.format("loss", "%y"), f"%b = {STATE} tuple(%zero, %loss, %kept)",
        f"%v = {STATE} while(%b), condition=%until, body=%backward, {TRIPS}", *extra,
        "ROOT %result = bf16[4,16]{1,0} get-tuple-element(%v), index=1", entry=True,
    )  # fmt: skip
    until = computation("until", f"%c.3 = {STATE} parameter(0)", "ROOT %more = pred[] constant(true)")
    return module(TANH, STORE, LOAD, until, forward, backward, entry)


@pytest.mark.parametrize("way", OUT)
def test_layers_that_are_scanned(way):
    found = read(training(way))
    piece, whole = 4 * 16 * 2, 8 * 4 * 16 * 2
    name = "jit(f)/jvp(stack)/while/body/block/tanh"
    assert found.host_buffers == (HostBuffer("bf16", (8, 4, 16), whole, 1, (name,), 1 + ("waits" in way)),)
    assert (found.host_buffer_bytes, found.host_peak_bytes, found.host_arguments) == (whole, whole, (0, 0))
    started = "waits" not in way
    assert {one.direction: one for one in found.transfers} == {
        "out": Transfer("out", "bf16", (1, 4, 16), piece, 8, True, started, int(started), int(started), name,
                        "out" if started else "stored"),
        "in": Transfer("in", "bf16", (1, 4, 16), piece, 8, True, started, int(started), int(started), name,
                       "in" if started else "loaded"),
    }  # fmt: skip
    assert (found.bytes_out, found.bytes_in, found.overlapped) == (whole, whole, float(started))
    assert found.host_compute == found.recomputed == ()


def test_how_long_an_array_is_away():
    """Offload saves nothing where an array goes out late or comes back early: then the device has it all the time."""
    text = training("gpu")
    assert [(one.away, one.late) for one in read(text).host_buffers] == [(1, 0)]
    work = "\n  ".join(FILL.format(f"more.{i}", "%h") for i in range(3))
    late = text.replace(f"  {OUT['gpu'][0]}", f"  {work}\n  {OUT['gpu'][0]}")
    assert [(one.away, one.late) for one in read(late).host_buffers] == [(1, 3)]
    back = text.replace(f"  {FILL.format('loss', '%y')}\n", "").replace("%loss, %kept", "%y, %kept")
    assert [(one.away, one.late) for one in read(back).host_buffers] == [(0, 0)]


def test_what_a_loop_is_given_is_called_as_the_loop():
    text = training("gpu").replace("bitcast(%h)", "bitcast(%x)").replace(
        "body=%forward,", 'body=%forward, metadata={op_name="jit(f)/jvp(stack)/while"},'
    )  # fmt: skip
    found = read(text)
    assert [one.op_names for one in found.host_buffers] == [("jit(f)/jvp(stack)/while",)]
    assert {one.op_name for one in found.transfers} == {"jit(f)/jvp(stack)/while"}


def test_what_counts_as_work_beside_a_transfer():
    lines = (
        "%one = s32[] fusion(%i), kind=kLoop, calls=%fused_index",  # an index
        "%moved = bf16[4,16]{0,1} copy(%h)",
        "%tuple = (s32[], bf16[4,16]{1,0}) tuple(%one, %moved)",
        '%mark = bf16[4,16]{1,0} custom-call(%h), custom_call_target="Sharding"',
        '%dot = (bf16[4,16]{1,0}, s8[64]{0}) custom-call(%h, %h), custom_call_target="__cublas$lt$matmul"',
        "%sum = f32[] reduce(%h, %zero), dimensions={0,1}, to_apply=%add",
    )
    found = read(training("gpu", lines))
    (out,) = [one for one in found.transfers if one.direction == "out"]
    assert (out.distance, out.work) == (6, 2)
    idle = read(training("gpu", lines[:4]))
    assert [one.work for one in idle.transfers if one.direction == "out"] == [0]
    assert idle.overlapped == 0.5


def test_what_is_waited_for_in_a_loops_next_turn():
    """A transfer that is started in one turn and waited for in the next."""
    start = f"(({HOST}, {DEVICE}, s32[]), {HOST}, u32[])"
    carry = f"(s32[], {start})"
    body = computation(
        "body", f"%c = {carry} parameter(0)", "%i = s32[] get-tuple-element(%c), index=0",
        f"%before = {start} get-tuple-element(%c), index=1", FILL.format("h", "%x"),
        f"%stored = {HOST} fusion-done(%before)", f"%piece = {DEVICE} bitcast(%h)",
        f"%out = {start} fusion-start(%stored, %piece, %i), calls=%store", FILL.format("late", "%h"),
        FILL.format("later", "%h"), f"ROOT %t = {carry} tuple(%i, %out)",
    )  # fmt: skip
    until = computation("until", f"%c.3 = {carry} parameter(0)", "ROOT %more = pred[] constant(true)")
    entry = computation(
        "main", "%i = s32[] parameter(0)", f'%room = {HOST} custom-call(), custom_call_target="AllocateBuffer"',
        f"%first = {start} fusion-start(%room, %p, %i), calls=%store", f"%a = {carry} tuple(%i, %first)",
        f"%w = {carry} while(%a), condition=%until, body=%body, {TRIPS}",
        f"%last = {start} get-tuple-element(%w), index=1", f"%end = {HOST} fusion-done(%last)",
        f"ROOT %x = {DEVICE} dynamic-slice(%end, %i)", entry=True,
    )  # fmt: skip
    found = read(module(TANH, STORE, until, body, entry))
    inner = next(one for one in found.transfers if one.name == "out")
    # Three are left of its turn, and four come first in the next.
    assert (inner.asynchronous, inner.times, inner.distance, inner.work) == (True, 8, 7, 3)
    assert found.host_buffer_bytes == 8 * 4 * 16 * 2


@pytest.mark.parametrize("mark", ["", ', frontend_attributes={_xla_compute_type="host"}'])
@pytest.mark.parametrize("way", OUT)
def test_what_is_written_in_no_loop(way, mark):
    """Also where the compiler calls it host compute: it moves, and computes nothing."""
    lines = ["%piece = bf16[1,4,16]{2,1,0} parameter(0)", "%i = s32[] constant(7)",
             f'%host = {HOST} custom-call(), custom_call_target="AllocateBuffer"', OUT[way][0] + mark, *OUT[way][1:],
             f"%host.2 = {HOST} bitcast(%stored)", "%i.3 = s32[] copy(%i)", *IN[way],
             "ROOT %r = bf16[1,4,16]{2,1,0} copy(%loaded)"]  # fmt: skip
    found = read(module(STORE, LOAD, computation("main", *lines, entry=True)))
    assert (found.host_buffer_bytes, found.host_peak_bytes) == (8 * 4 * 16 * 2, 8 * 4 * 16 * 2)
    assert found.bytes_out == found.bytes_in == 4 * 16 * 2
    assert found.overlapped == 0 and found.host_compute == ()


def copied(name, source, after=()):
    """Moves `source` as a whole: there, and back after `after`."""
    return (
        f"%{name}.s = (bf16[4,16]{{1,0:S(5)}}, bf16[4,16]{{1,0}}, u32[]) copy-start(%{source})",
        f"%{name}.h = bf16[4,16]{{1,0:S(5)}} copy-done(%{name}.s)", *after,
        f"%{name}.b = (bf16[4,16]{{1,0}}, bf16[4,16]{{1,0:S(5)}}, u32[]) copy-start(%{name}.h)",
        f"%{name} = bf16[4,16]{{1,0}} copy-done(%{name}.b)",
    )  # fmt: skip


def test_buffers_that_are_never_in_use_together():
    lines = ["%x = bf16[4,16]{1,0} parameter(0)", FILL.format("one", "%x")]
    lines += copied("first", "one", after=[FILL.format("two", "%one")])
    lines += [FILL.format("three", "%first"), *copied("second", "three")]
    lines += [*copied("outer", "two", after=copied("inner", "three")), "ROOT %r = bf16[4,16]{1,0} add(%outer, %inner)"]
    found = read(module(TANH, computation("main", *lines, entry=True)))
    size = 4 * 16 * 2
    assert found.host_buffer_bytes == 4 * size and found.host_peak_bytes == 2 * size
    # The same computation under the same name: alike, and one of them isn't away while anything is computed.
    assert [(buffer.count, buffer.away) for buffer in found.host_buffers] == [(4, 0)]
    out, back = found.transfers if found.transfers[0].direction == "out" else found.transfers[::-1]
    assert (out.count, out.times, out.total_bytes, back.count) == (4, 1, 4 * size, 4)


def test_arguments_and_results_are_no_buffers_of_the_program():
    shape = "f32[4,16]{1,0:S(5)}"
    lines = [
        f"%state = {shape} parameter(0)", f"%scale = {shape} parameter(1)",
        f"%s = (f32[4,16]{{1,0}}, {shape}, u32[]) copy-start(%state)", "%here = f32[4,16]{1,0} copy-done(%s)",
        "%next = f32[4,16]{1,0} add(%here, %here), metadata={op_name=\"jit(f)/optimizer/add\"}",
        f"%e = ({shape}, f32[4,16]{{1,0}}, u32[]) copy-start(%next)", f"%there = {shape} copy-done(%e)",
        f"ROOT %r = (f32[4,16]{{1,0}}, {shape}) tuple(%next, %there)",
    ]  # fmt: skip
    found = read(module(computation("main", *lines, entry=True)))
    assert found.host_arguments == (2, 2 * 256)
    assert found.host_buffers == () and found.host_peak_bytes == 0
    assert {(one.direction, one.op_name) for one in found.transfers} == {
        ("in", "argument"), ("out", "jit(f)/optimizer/add")
    }  # fmt: skip


HOST_LINE = "%double = bf16[8,4,16]{2,1,0:S(5)} fusion(%kept), kind=kLoop, calls=%fused"


@pytest.mark.parametrize(
    "line, names",
    [
        (HOST_LINE, ("double",)),
        (f'{HOST_LINE}, frontend_attributes={{_xla_compute_type="host"}}', ("double",)),
        ("%double = f32[4]{0} fusion(%kept), kind=kLoop, calls=%fused", ("double",)),
        (f"%double = {HOST} copy(%kept)", ("double",)),
        (f"%double = {HOST} add(%kept, %kept)", ("double",)),
        (f'%c = (({HOST}), f32[4]{{0}}, u32[]) custom-call-start(%kept), async_execution_thread="host", '
         'custom_call_target="HostExecute", called_computations={%fused}', ("c",)),
        ('%double = f32[4]{0} fusion(%y), kind=kLoop, calls=%fused, frontend_attributes={_xla_compute_type="host"}',
         ("double",)),
        ('%c = ((f32[4]{0}), f32[4]{0}, u32[]) custom-call-start(%y), async_execution_thread="host", '
         'custom_call_target="HostExecute", called_computations={%fused}', ("c",)),
        (f"%double = {HOST} dynamic-update-slice(%kept, %kept, %zero)", ("double",)),
        (f"%same = {HOST} bitcast(%kept)", ()),
    ],
)  # fmt: skip
def test_what_is_computed_on_the_host(line, names):
    fused = computation("fused", f"%p.5 = {HOST} parameter(0)", f"ROOT %d = {HOST} add(%p.5, %p.5)")
    text = training("gpu", extra=(line,)).replace("ENTRY", f"{fused}\n\nENTRY")
    found = read(text)
    assert found.host_compute == names
    assert found.bytes_out == 8 * 4 * 16 * 2


def test_what_xla_computes_again():
    lines = [
        "%fusion.3.remat = f32[8]{0} fusion(%y), kind=kLoop, calls=%fused_tanh",
        "%fusion.3.remat2.clone = f32[8]{0} fusion(%y), kind=kLoop, calls=%fused_tanh",
        "%copy.1.remat_uncompressed = f32[8]{0} copy(%y)",
        "%bitcast.remat.4 = f32[8]{0} bitcast(%y)",  # costs nothing
        'add.1 = f32[8]{0} add(%y, %y), metadata={op_name="jit(f)/checkpoint/rematted_computation/add"}',
    ]
    found = read(training("gpu", extra=lines))
    assert found.recomputed == ("fusion.3.remat", "fusion.3.remat2.clone", "copy.1.remat_uncompressed")
    many = [f"%fusion.{i}.remat = f32[8]{{0}} fusion(%y), kind=kLoop, calls=%fused_tanh" for i in range(1000)]
    found = read(training("gpu", extra=many))
    assert found.recomputed_count == 1000 and len(found.recomputed) == 200


def test_what_compilers_say_of_the_same_buffers():
    found = read(training("gpu"))
    assert [found.accounts_for(size, "cuda") for size in (1023, 1024, 1025)] == [False, True, False]
    assert [found.accounts_for(size, "tpu") for size in (1023, 1024, 2048, 20000)] == [False, True, True, False]
    donated = dataclasses.replace(found, host_arguments=(1, 100))
    assert [donated.accounts_for(size, "cuda") for size in (923, 924, 1025)] == [False, True, False]
    nothing = Evidence((), (), (0, 0), (), 0, (), 0, 0)
    assert nothing.accounts_for(0, "tpu") and not nothing.accounts_for(1, "tpu")


def test_json_and_back():
    found = read(training("tpu"))
    assert Evidence.from_json(json.loads(json.dumps(found.as_json()))) == found
    assert Evidence.from_json(found.as_json()) == found
    for wrong in ({}, {"transfers": 3}, found.as_json() | {"more": 1}, found.as_json() | {"transfers": [{}]}):
        with pytest.raises(ValueError, match="not what Evidence.as_json"):
            Evidence.from_json(wrong)


def test_hundreds_of_layers_are_a_few_lines():
    lines = ["%x = bf16[4,16]{1,0} parameter(0)"]
    for i in range(300):
        lines += [FILL.format(f"h{i}", "%x"), *copied(f"c{i}", f"h{i}", after=[FILL.format("a", "%x")] * (i % 7))]
    lines.append("ROOT %r = bf16[4,16]{1,0} add(%c0, %c1)")
    found = read(module(TANH, computation("main", *lines, entry=True)))
    assert sum(one.count for one in found.transfers) == 600
    assert len(json.dumps(found.as_json())) < 3000


def test_a_program_of_the_cpu_has_none():
    text = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((8, 8))).compile().as_text()
    assert read(text) == Evidence((), (), (0, 0), (), 0, (), 0, 0)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "no ENTRY computation"),
        (training("gpu").partition("ENTRY")[0], "no ENTRY computation"),
        (training("gpu")[:-60], "ends inside the computation 'main'"),
        (training("gpu").replace(", is_scheduled=true", ""), "no schedule"),
    ],
)
def test_what_is_no_compiled_program(text, words):
    with pytest.raises(ValueError, match=words):
        read(text)


def compiler(*names):
    """Skips where none of these packages is installed."""
    found = {one.metadata["Name"] for one in importlib.metadata.distributions()}
    return pytest.mark.skipif(not found & set(names), reason=f"needs {' or '.join(names)}: a compiler, no hardware")


TARGETS = [
    pytest.param("h200", marks=compiler("jax-cuda13-pjrt", "jax-cuda12-pjrt")),
    pytest.param("tpu-v5e", marks=compiler("libtpu")),
]
LAYERS, ROWS, WIDTH = 4, 64, 256


def layer(x, weight):
    x = jax.ad_checkpoint.checkpoint_name(x, "input")
    hidden = jax.ad_checkpoint.checkpoint_name(jnp.sin(x @ weight), "hidden")
    return jnp.tanh(hidden @ weight)


def scanned(x, weights, last):
    """A loss whose layers' inputs and hidden states wait on the host; one more layer is in no loop."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["input", "hidden"], offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip
    block = jax.checkpoint(layer, policy=policy)
    x = block(x, last)
    x, _ = jax.lax.scan(lambda c, w: (block(c, w), None), x, weights)
    return (x.astype(jnp.float32) ** 2).sum()


@pytest.mark.parametrize("name", TARGETS)
def test_a_real_program_is_what_its_compiler_says(name, tmp_path):
    array = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16)
    last = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
    text = tmp_path / "program"
    ahead = compile_ahead(scanned, array, weights, last, target=name, cache=False, text=text)
    found = read(text.read_text())
    assert found == ahead.evidence
    whole = 2 * (LAYERS + 1) * ROWS * WIDTH * 2
    assert found.host_buffer_bytes == found.bytes_out == found.bytes_in == whole
    assert found.host_peak_bytes == ahead.host["temp"]
    assert found.accounts_for(ahead.host["temp"], target(name).platform)
    # A layer at a time, in a loop or before it.
    assert sum(one.times * one.count for one in found.transfers) == 2 * 2 * (LAYERS + 1)
    assert all(one.asynchronous and one.known for one in found.transfers)
    names = " ".join(name for buffer in found.host_buffers for name in buffer.op_names)
    assert "/sin" in names and "/while/body" in names
    assert found.host_compute_count == found.recomputed_count == 0


@pytest.mark.parametrize("name", TARGETS)
def test_a_real_program_that_computes_on_the_host(name):
    def loss(x):
        y = jax.device_put(jnp.sin(jax.lax.stop_gradient(x)), jax.memory.Space.Host)
        return (x * jax.device_put(y * y, jax.memory.Space.Device)).sum()

    found = compile_ahead(loss, jax.ShapeDtypeStruct((512, 1024), jnp.float32), target=name, cache=False).evidence
    assert found.host_compute_count == len(found.host_compute) == 1
    assert found.bytes_out == found.bytes_in == 512 * 1024 * 4


@pytest.mark.parametrize("name", TARGETS[:1])
def test_a_real_program_that_xla_computes_a_part_of_again(name):
    def loss(x):
        y = x
        for _ in range(12):
            z = y @ x
            y = jnp.sin(z) * jax.nn.sigmoid(z * 2)
        return y.sum()

    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    assert compile_ahead(loss, x, target=name, cache=False, flags={}).evidence.recomputed_count == 0
    place = target(name)
    small = re.sub(r"device_memory_size: *\d+", "device_memory_size: 60000000", place.config)
    place = dataclasses.replace(place, config=small)
    # Without flags: those for a target may turn that pass off.
    found = compile_ahead(loss, x, target=place, cache=False, flags={}).evidence
    assert found.recomputed_count > 5
    assert all(".remat" in name for name in found.recomputed)
