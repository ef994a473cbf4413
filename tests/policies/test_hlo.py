"""Texts of compiled programs: types and how they lie in memory, operands, loops, and what is no such text."""

import jax
import jax.numpy as jnp
import pytest

from overspill.policies import hlo

MODULE = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

FileNames
1 "step.py"

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%until (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[], f32[8]{0}) parameter(0)
  %n = s32[] constant(6)
  %i = s32[] get-tuple-element(%c), index=0
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%again (c.1: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c.1 = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%c.1), index=1, metadata={op_name="jit(f)/while/body/mul" stack_frame_id=3}
  %r = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %t.1 = (s32[], /*index=1*/f32[8]{0}) tuple(%i.1, /*index=1*/%r)
}

ENTRY %main.9 (x.2: f32[8]) -> f32[8] {
  %x.2 = f32[8]{0} parameter(0)
  %z = s32[] constant(2)
  %t = (s32[], f32[8]{0}) tuple(%z, %x.2)
  %w = (s32[], f32[8]{0}) while(%t), condition=%until, body=%again
  ROOT %y = f32[8]{0} get-tuple-element(%w), index=1
}
"""


@pytest.mark.parametrize(
    "text, shape, memory, size",
    [
        ("f32[]", (), 0, 4),
        ("bf16[8,1,256,352]{3,2,1,0:S(5)}", (8, 1, 256, 352), 5, 8 * 256 * 352 * 2),
        ("pred[3]{0}", (3,), 0, 3),
        ("s4[7]{0:E(4)}", (7,), 0, 4),
        ("f8e4m3fn[8]{0}", (8,), 0, 8),
        ("bf16[<=8,4]{1,0}", (8, 4), 0, 64),
        ("token[]", (), 0, 0),
        # What a TPU's compiler says it takes for each of these.
        ("f32[]{:T(128)}", (), 0, 512),
        ("s32[5]{0:T(128)S(5)}", (5,), 5, 512),
        ("bf16[8,1,256,128]{2,3,1,0:T(8,128)(2,1)S(5)}", (8, 1, 256, 128), 5, 8 * 256 * 128 * 2),
        ("bf16[1,256,4,48]{1,3,2,0:T(8,128)(2,1)S(5)}", (1, 256, 4, 48), 5, 256 * 4 * 48 * 2),
        ("bf16[8,3,100,352]{3,2,1,0:T(8,128)(2,1)S(5)}", (8, 3, 100, 352), 5, 8 * 3 * 104 * 384 * 2),
        ("f32[3,1,256,8]{2,3,1,0:T(8,128)S(5)}", (3, 1, 256, 8), 5, 3 * 256 * 8 * 4),
        ("f32[3,5]{1,0:T(4,128)}", (3, 5), 0, 4 * 128 * 4),
        ("f32[1000,1000]{1,0:T(1)L(1024)}", (1000, 1000), 0, 977 * 1024 * 4),
        ("f32[4,3,5]{2,1,0:T(*,8)}", (4, 3, 5), 0, 4 * 16 * 4),
    ],
)
def test_types(text, shape, memory, size):
    ((path, leaf),) = hlo.arrays(text)
    assert path == ()
    assert (leaf.shape, leaf.memory, leaf.bytes) == (shape, memory, size)


def test_types_of_tuples():
    text = "((bf16[8,4]{1,0:S(5)}, s32[], /*index=2*/s32[]), f32[2]{0}, u32[]{:S(2)})"
    assert [(path, leaf.dtype, leaf.memory) for path, leaf in hlo.arrays(text)] == [
        ((0, 0), "bf16", 5), ((0, 1), "s32", 0), ((0, 2), "s32", 0), ((1,), "f32", 0), ((2,), "u32", 2)
    ]  # fmt: skip
    assert hlo.arrays("()") == []


def test_what_is_read_of_a_program():
    program = hlo.parse(MODULE)
    assert program.scheduled and program.entry == "main.9"
    assert list(program.computations) == ["add", "until", "again", "main.9"]
    assert [one.operation for one in program.computations["main.9"]] == [
        "parameter", "constant", "tuple", "while", "get-tuple-element"
    ]  # fmt: skip
    assert program.root("again").operands == ["i.1", "r"]
    assert program.parameter("add", 1).name == "b"
    assert program.named("again")["x"].op_name == "jit(f)/while/body/mul"
    assert program.named("again")["x"].index == 1
    assert program.named("main.9")["w"].called == {"condition": ["until"], "body": ["again"]}


def test_operands_with_types_before_them():
    line = "  %typed = f32[4]{0} add(f32[4]{0} %a, (f32[4]{0}, s32[]) %b), metadata={}"
    text = MODULE.replace("  %z = ", f"{line}\n  %z = ")
    assert hlo.parse(text).named("main.9")["typed"].operands == ["a", "b"]


def test_how_often_computations_run():
    program = hlo.parse(MODULE)
    assert [(visit.name, visit.runs, visit.known) for visit in program.visits()] == [
        ("main.9", 1, True), ("again", 4, True), ("add", 4, True)
    ]  # fmt: skip
    unknown = hlo.parse(MODULE.replace("direction=LT", "direction=NE"))
    assert [(visit.name, visit.runs, visit.known) for visit in unknown.visits()][1] == ("again", 1, False)


def test_real_programs_of_the_cpu():
    def step(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c) @ c, c), x, None, length=5)

    program = hlo.parse(jax.jit(step).lower(jnp.ones((8, 8))).compile().as_text())
    assert program.scheduled
    runs = {visit.caller.operation: visit.runs for visit in program.visits() if visit.caller}
    assert runs["while"] == 5


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "no ENTRY computation"),
        ("module @jit_f { }", "no ENTRY computation"),
        (MODULE[: MODULE.index("ENTRY")], "no ENTRY computation"),
        (MODULE[: MODULE.index("ROOT %y")], "ends inside the computation 'main.9'"),
        (MODULE[: MODULE.index("f32[8]{0}) while(")], "ends inside the computation 'main.9'"),
    ],
)
def test_what_is_no_whole_program(text, words):
    with pytest.raises(ValueError, match=words):
        hlo.parse(text)
