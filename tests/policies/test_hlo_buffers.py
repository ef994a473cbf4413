"""How much host memory buffers take together, against what a GPU's compiler has said of the same ones."""

import numpy as np
import pytest

from overspill.policies import hlo
from overspill.policies.hlo_buffers import Buffers

# Beginnings and ends, as their order, of 24 arrays of one size: one is brought back as the next goes out. No more than
# 16 are on the host at a time, but where XLA puts them they take the room of 17.
STAGGERED = [
    (0, 47), (1, 45), (2, 44), (3, 46), (4, 41), (5, 40), (6, 43), (7, 42), (8, 39), (9, 38), (10, 35), (11, 34),
    (12, 18), (13, 16), (14, 22), (15, 20), (17, 26), (19, 24), (21, 30), (23, 28), (25, 33), (27, 32), (29, 37),
    (31, 36),
]  # fmt: skip


def heap(spans, sizes):
    """The heap of a program whose host arrays, of so many bytes, come and go at these places."""
    last = max(end for _, end in spans)
    lines = {at: [] for at in range(last + 1)}
    for i, ((begin, end), size) in enumerate(zip(spans, sizes, strict=True)):
        lines[begin].append(f'%b{i} = s8[{size}]{{0:S(5)}} custom-call(), custom_call_target="AllocateBuffer"')
        lines[end].append(f"%use{i} = s8[1]{{0}} slice(%b{i}), slice={{[0:1]}}")
    body = "\n".join(f"  {line}" for at in range(last + 1) for line in lines[at])
    text = f"HloModule jit_f, is_scheduled=true\n\nENTRY %main (x: s8[1]) -> s8[1] {{\n{body}\n}}\n"
    program = hlo.parse(text)
    buffers = Buffers(program, [program.entry])
    assert sorted(one.array.bytes for one in buffers.found) == sorted(sizes)
    return buffers.heap


def test_what_the_compiler_says():
    assert heap(STAGGERED, [360448] * 24) == 6127616


@pytest.mark.parametrize(
    "spans, sizes, total",
    [
        ([(0, 1)], [7], 7),
        ([(0, 3), (1, 2)], [7, 5], 12),
        ([(0, 1), (2, 3)], [7, 5], 7),
        ([(0, 1), (2, 3)], [5, 7], 7),
        # The gap that the first leaves holds the two that come after it.
        ([(0, 2), (1, 7), (3, 6), (4, 5)], [9, 4, 5, 3], 13),
        # The largest first takes less, or the longest first does.
        ([(0, 4), (1, 2), (3, 6), (5, 7)], [6, 5, 6, 7], 13),
        ([(0, 2), (1, 4), (3, 7), (5, 6)], [5, 4, 5, 7], 12),
        # Two that are never there together share what is above the rest.
        ([(0, 3), (1, 9), (2, 4), (5, 7), (6, 8)], [6, 5, 2, 2, 6], 13),
    ],
)
def test_arrays_that_are_never_in_use_together_share(spans, sizes, total):
    assert heap(spans, sizes) == total


def test_never_less_than_at_one_time_and_never_more_than_all():
    random = np.random.default_rng(0)
    for _ in range(20):
        order = random.permutation(40).reshape(20, 2)
        spans = [tuple(sorted(pair)) for pair in order.tolist()]
        sizes = random.integers(1, 50, 20).tolist()
        alive = max(sum(n for (a, b), n in zip(spans, sizes, strict=True) if a <= at < b) for at in range(40))
        assert alive <= heap(spans, sizes) <= sum(sizes)


def test_nothing_takes_nothing():
    text = "HloModule f, is_scheduled=true\n\nENTRY %main (x: s8[1]) -> s8[1] {\n  %x = s8[1] parameter(0)\n}\n"
    program = hlo.parse(text)
    assert Buffers(program, ["main"]).heap == 0
