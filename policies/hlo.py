"""The text of a compiled program (HLO): its computations, their instructions in scheduled order, shapes and loops."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

HOST = 5  # the memory space of XLA that is the host's memory

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*)? ?\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_TUPLE_END = re.compile(r"\) ([a-z][\w\-]*)\(")
_ROLES = ("calls", "to_apply", "body", "condition", "branch_computations", "true_computation", "false_computation",
          "called_computations")  # fmt: skip
_CALLED = re.compile(r"\{([^}]*)\}|%?([\w.\-]+)")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_TILES = re.compile(r"T((?:\([\d,*]+\))+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_NUMBER = re.compile(r" s(?:32|64)\[\](?:\{\S*\})? constant\((\d+)\)")
_COUNTER = re.compile(r" s(?:32|64)\[\](?:\{\S*\})? get-tuple-element\(.*\bindex=(\d+)")
_INDEX = re.compile(r"\), index=(\d+)| parameter\((\d+)\)")
_OP_NAME = re.compile(r'\bop_name="([^"]*)"')

# Frequent operations that call nothing.
_LEAVES = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "copy", "broadcast", "convert", "add",
           "multiply", "subtract", "slice", "reshape", "transpose"}  # fmt: skip

Path = tuple[int, ...]  # where an array is in a tuple of tuples; empty for an array


class Array(NamedTuple):
    """The type of one array: what its elements are, and where and how it lies in memory."""

    dtype: str
    shape: tuple[int, ...]
    memory: int  # XLA's memory space: 0 for the device's main memory, `HOST` for the host's
    bytes: int  # as laid out: with what fills up a TPU's tiles


class Instruction(NamedTuple):
    """One instruction of a computation. What isn't needed of every instruction is read from its line when asked for."""

    name: str
    shape: str
    operation: str
    root: bool
    line: str

    @property
    def arrays(self) -> list[tuple[Path, Array]]:
        """The arrays of its result, each with its place in it."""
        return arrays(self.shape)

    @property
    def operands(self) -> list[str]:
        """The names of what it is given."""
        if self.operation in ("constant", "parameter"):
            return []
        rest = self.line.partition(f" {self.operation}(")[2]
        inside = rest[: rest.find(")")]
        if "(" not in inside and "{" not in inside and "[" not in inside:
            parts = _COMMENT.sub("", inside).split(",")
        else:  # types are written before the names
            parts = elements(f"({rest[: closing(f'({rest}') - 2]})")
        return [part.split()[-1].lstrip("%") for part in parts if part.strip()]

    @property
    def called(self) -> dict[str, list[str]]:
        """The computations that it calls, by what it calls them for."""
        found: dict[str, list[str]] = {}
        for role in _ROLES:
            text = f" {role}="
            # Finding a text is much faster than matching a pattern: most of a line is something else.
            if (at := self.line.find(text)) >= 0:
                several, one = _CALLED.match(self.line, at + len(text)).groups()
                found[role] = [name.strip().lstrip("%") for name in (several or one).split(",")]
        return found

    @property
    def op_name(self) -> str:
        """The operation in JAX that it comes from, as far as the compiler remembers: `jit(f)/jvp(stack)/while/...`."""
        found = _OP_NAME.search(self.line)
        return found[1] if found else ""

    @property
    def index(self) -> int:
        """Which element a `get-tuple-element` gives, or which parameter a `parameter` is."""
        return int(_INDEX.search(self.line)[1] or _INDEX.search(self.line)[2])


class Visit(NamedTuple):
    """A computation as one instruction calls it; the entry is called by none."""

    name: str
    runs: int  # how often it runs in one run of the program; loops of unknown length count as one turn
    known: bool  # whether the length of each loop around it is known
    caller: Instruction | None


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: `computations` by name, instructions in their text's order, which is the schedule's."""

    header: str
    entry: str
    computations: dict[str, list[Instruction]]
    _named: dict[str, dict[str, Instruction]] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def scheduled(self) -> bool:
        """Whether the order of the instructions is the one that they run in."""
        return "is_scheduled=true" in self.header

    def named(self, computation: str) -> dict[str, Instruction]:
        """The instructions of a computation by name; nothing where there is none of that name."""
        if computation not in self._named:
            self._named[computation] = {one.name: one for one in self.computations.get(computation, ())}
        return self._named[computation]

    def root(self, computation: str) -> Instruction | None:
        """The instruction whose result is the computation's."""
        return next((one for one in reversed(self.computations.get(computation, ())) if one.root), None)

    def parameter(self, computation: str, number: int) -> Instruction | None:
        """The parameter of that number."""
        text = f" parameter({number})"
        return next((one for one in self.computations.get(computation, ()) if text in one.line), None)

    def visits(self) -> Iterator[Visit]:
        """Each computation each time an instruction calls it, callers first.

        Branches of a conditional count as if each ran. What is started and waited for counts where it starts.
        """
        left = [Visit(self.entry, 1, True, None)]
        while left:
            visit = left.pop()
            yield visit
            inner: list[Visit] = []
            for one in self.computations.get(visit.name, ()):
                if one.operation == "while":
                    turns = self.turns(one, visit.name)
                    runs = visit.runs * (1 if turns is None else turns)
                    inner.append(Visit(one.called["body"][0], runs, visit.known and turns is not None, one))
                elif one.operation not in _LEAVES and not one.operation.endswith(("-done", "-update")):
                    for names in one.called.values():
                        inner.extend(Visit(name, visit.runs, visit.known, one) for name in names)
            left.extend(reversed(inner))

    def turns(self, loop: Instruction, around: str) -> int | None:
        """How often a loop's body runs: what the compiler found, or the bound of a loop that counts by ones.

        `around` is the name of the computation that the loop is in. None where the length is unknown.
        """
        known = _TRIPS.search(loop.line)
        if known:
            return int(known[1])
        condition = self.computations.get(loop.called["condition"][0], [])
        inner = [
            one
            for outer in condition
            for name in outer.called.get("calls", ())
            for one in self.computations.get(name, ())
        ]
        both = [*condition, *inner]
        bounds = [int(found[1]) for one in both if (found := _NUMBER.search(one.line))]
        counters = [int(found[1]) for one in condition if (found := _COUNTER.search(one.line))]
        if len(bounds) != 1 or len(counters) != 1 or not any("direction=LT" in one.line for one in both):
            return None
        # Where it begins: a number, perhaps copied, in the tuple that the loop is given.
        by_name = self.named(around)
        given = by_name.get(loop.operands[0])
        here = None if given is None or given.operation != "tuple" else by_name.get(given.operands[counters[0]])
        while here is not None and here.operation in ("copy", "bitcast"):
            here = by_name.get(here.operands[0])
        begin = None if here is None else _NUMBER.search(here.line)
        return None if begin is None else max(bounds[0] - int(begin[1]), 0)


def parse(text: str) -> Program:
    """The program that `text` is, which is what `jax.jit(f).lower(...).compile().as_text()` gives.

    Takes a time and memory in proportion to the text. Raises ValueError for text that is no compiled program's, or
    only its beginning.
    """
    header, entry, name, computations = "", "", "", {}
    for line in text.splitlines():
        first = line[:1]
        if first == "}":
            name = ""
        elif first not in (" ", "\t", ""):
            if not header and line.startswith("HloModule"):
                header = line
            elif line.endswith("{") and (found := _COMPUTATION.match(line)):
                name = found[2]
                computations[name] = []
                entry = name if found[1] else entry
        elif name and (found := _INSTRUCTION.match(line)):
            at = found.end()
            if line.startswith("(", at):
                end = _TUPLE_END.search(line, at)
                if end is None:
                    break  # the text ends inside this line
                shape, operation = line[at : end.start() + 1], end[1]
            else:
                space = line.find(" ", at)
                shape, operation = line[at:space], line[space + 1 : line.find("(", space)]
            computations[name].append(Instruction(found[2], shape, operation, found[1] is not None, line))
    if not entry:
        raise ValueError("this is no text of a compiled program: it has no ENTRY computation")
    if name:
        raise ValueError(f"this is only a part of a compiled program's text: it ends inside the computation {name!r}")
    return Program(header, entry, computations)


def closing(text: str) -> int:
    """How long the part of `text` is that its first bracket holds."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "({[") - (character in ")}]")
        if not depth:
            return i + 1
    return len(text)


def elements(text: str) -> list[str]:
    """What is between the commas of a text in brackets, brackets inside it left whole."""
    inner, parts, start, depth = _COMMENT.sub("", text[1:-1]), [], 0, 0
    for i, character in enumerate(inner):
        depth += (character in "({[") - (character in ")}]")
        if character == "," and not depth:
            parts.append(inner[start:i].strip())
            start = i + 1
    return [*parts, inner[start:].strip()]


@functools.lru_cache(1024)
def arrays(shape: str) -> list[tuple[Path, Array]]:
    """The arrays of a type's text, such as `(f32[4]{0}, (bf16[8,128]{1,0:T(8,128)(2,1)S(5)}))`, each with its place."""
    if not shape.startswith("("):
        found = _ARRAY.match(shape)
        return [((), array(*found.groups()))] if found else []
    return [((i, *path), leaf) for i, part in enumerate(elements(shape)) if part for path, leaf in arrays(part)]


def array(dtype: str, dims: str, layout: str | None = None) -> Array:
    """An array's type from its parts: `bf16`, `8,128` and `1,0:T(8,128)(2,1)S(5)`."""
    shape = tuple(int(n.lstrip("<=")) if n != "?" else 0 for n in dims.split(",") if n)
    order, _, rest = (layout or "").partition(":")
    space = re.search(r"S\((\d+)\)", rest)
    return Array(dtype, shape, int(space[1]) if space else 0, _laid_out(dtype, shape, order, rest))


def bits(dtype: str) -> int:
    """How wide an element is. Tokens and the like have none."""
    found = re.match(r"[a-z]+(\d+)", dtype)
    return 8 if dtype == "pred" else int(found[1]) if found else 0


def _laid_out(dtype: str, shape: tuple[int, ...], order: str, rest: str) -> int:
    sizes = list(shape)
    width = re.search(r"E\((\d+)\)", rest)
    tiles = _TILES.search(rest)
    if tiles:
        # From the slowest dimension in memory to the fastest; a tile splits the fastest ones.
        sizes = [shape[int(n)] for n in reversed(order.split(",")) if n]
        for text in re.findall(r"\(([^)]*)\)", tiles[1]):
            tile = text.split(",")
            while "*" in tile:  # this dimension becomes one with the next
                at = len(sizes) - len(tile) + tile.index("*")
                sizes[at : at + 2] = [math.prod(sizes[at : at + 2])]
                tile.remove("*")
            cut = [int(n) for n in tile]
            sizes = [1] * (len(cut) - len(sizes)) + sizes
            head, tail = sizes[: len(sizes) - len(cut)], sizes[len(sizes) - len(cut) :]
            sizes = [*head, *(-(-size // n) for size, n in zip(tail, cut, strict=True)), *cut]
    count = math.prod(sizes)
    if tail_padding := re.search(r"L\((\d+)\)", rest):
        count = -(-count // int(tail_padding[1])) * int(tail_padding[1])
    return -(-count * (int(width[1]) if width else bits(dtype)) // 8)
