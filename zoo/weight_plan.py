"""Which tensor of a folder fills which part of a model, and everything that stands in the way of it."""

import collections
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from .weights import Layout, Leaf, Piece

# Tags of safetensors files, and what NumPy's extension calls them where it isn't the same.
PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
FLOAT8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
# Values of one block of MXFP4: 32, two in a byte.
MXFP4_VALUES, _MXFP4_BYTES = 32, 16
# How files call the scales of a float8 tensor. DeepSeek's say "inv", and it is a factor nevertheless.
_SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale")
# Scales of the activations that a float8 weight was meant to be multiplied with as float8: no use here.
_ACTIVATION_SCALES = ("activation_scale", "input_scale")
# Where wrappers, of multimodal models mostly, put a decoder's body: the plain form first.
_BODIES = (
    "model.", "model.language_model.", "language_model.model.", "model.language_model.model.", "language_model.", ""
)  # fmt: skip
_EMBEDDING, _HEAD = "model.embed_tokens.", "lm_head."
# Tables that old files keep though they follow from the config.
_LEFTOVER = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_MTP_MARKS = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
_LISTED = 20
_HEADINGS = {
    "damaged": "damaged",
    "missing": "missing",
    "unexpected": "unexpected",
    "wrong": "of a shape or dtype that doesn't fit",
    "contradictory": "contradictory",
}


class WeightMismatch(ValueError):
    """The weights in a folder can't become the model that is wanted; the message lists all that is wrong.

    `problems` holds the same in full: lines by kind (`damaged`, `missing`, `unexpected`, `wrong`, `contradictory`).
    """

    def __init__(self, where: str, problems: Mapping[str, list[str]]):
        self.problems = {kind: lines for kind, lines in problems.items() if lines}
        text = [f"the weights in {where!r} don't fit:"]
        for kind, heading in _HEADINGS.items():
            lines = self.problems.get(kind, [])
            if lines:
                text.append(f"  {heading} ({len(lines)}):")
                text += [f"    {line}" for line in lines[:_LISTED]]
            if len(lines) > _LISTED:
                text.append(f"    ... and {len(lines) - _LISTED} more")
        super().__init__("\n".join(text))


class Problems:
    """What is wrong with a folder, collected until there is nothing more to be found."""

    def __init__(self, where: str):
        self.where = where
        self._lines: dict[str, dict[str, None]] = {kind: {} for kind in _HEADINGS}

    def add(self, kind: str, line: str) -> None:
        """Notes something that is wrong, once."""
        self._lines[kind][line] = None

    def check(self) -> None:
        """Raises WeightMismatch if there are any."""
        if any(self._lines.values()):
            raise WeightMismatch(self.where, {kind: list(lines) for kind, lines in self._lines.items()})


class Tensor(NamedTuple):
    """A tensor in a file: what its file calls it, the file's name, its safetensors dtype and its shape."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


class Fill(NamedTuple):
    """What fills the part `index` of an array, of `shape`: the view `layout` of a tensor, and the scales of that.

    With scales, a tensor of bytes is MXFP4 and another one float8, in blocks of the given size.
    """

    index: tuple[int, ...]
    shape: tuple[int, ...]
    layout: Layout
    tensor: Tensor
    scale: Tensor | None = None


class Equal(NamedTuple):
    """Two tensors that hold the same if all is well; where they don't and it matters, the model can't be loaded."""

    copy: Tensor
    original: Tensor
    matters: bool


class Plan(NamedTuple):
    fills: dict[str, list[Fill]]  # by the path of the array
    equal: list[Equal]


def canonical_names(names: Collection[str], multimodal: bool) -> dict[str, str]:
    """{name as transformers' plain decoders have it: name in the files}; other towers' names stay as they are.

    `multimodal` says that there are other towers: what lies outside the decoder is then left out.
    """

    def score(body: str) -> tuple[bool, int]:
        layers = f"{body}layers."
        return f"{body}embed_tokens.weight" in names, sum(name.startswith(layers) for name in names)

    # The first of the best: an empty prefix, which fits every name, is the last resort.
    body = max(_BODIES, key=score)
    heads = (_HEAD, body.removesuffix("model.") + _HEAD, body + _HEAD)
    table: dict[str, str] = {}
    for name in names:
        head = next((head for head in heads if name.startswith(head)), None)
        if head is not None:
            plain = _HEAD + name[len(head) :]
        elif name.startswith(body):
            plain = "model." + name[len(body) :]
        elif multimodal:
            continue
        else:
            plain = name
        table[name if plain in table else plain] = name
    return table


def is_leftover(name: str) -> bool:
    """Whether a tensor is a table that follows from the config, which old files hold too."""
    return _LEFTOVER.search(name) is not None


def mtp_layers(names: Iterable[str], num_layers: int) -> list[int]:
    """Indices of the layers behind the last that are modules for multi-token prediction."""
    found = set()
    for name in names:
        match = re.match(r"model\.layers\.(\d+)\.(.+)", name)
        if match and int(match[1]) >= num_layers and match[2] in _MTP_MARKS:
            found.add(int(match[1]))
    return sorted(found)


class Planner:
    """Finds the tensors of a model's arrays among those of a folder.

    **Arguments:**

    - `tensors`: the folder's, by canonical name.
    - `lost`: canonical names of tensors in files that are damaged as a whole, which have been reported already.
    - `block`: rows and columns that share a scale in float8 matrices.
    - `problems`: where everything that is wrong goes.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], lost: Collection[str], block: tuple[int, int] | None, problems: Problems
    ):
        self.tensors, self.lost, self.block, self.problems = tensors, lost, block, problems
        self.used: set[str] = set()
        self._told: set[str] = set()

    def plan(self, leaves: Iterable[Leaf], *, tied: bool, num_layers: int, depths: int, multimodal: bool) -> Plan:
        """What fills `leaves`, which are all arrays of a model; whatever is left of the folder is a problem.

        `tied` heads may be in the files once more; `depths` multi-token prediction modules, behind `num_layers`
        layers, may have copies of embedding and head. Modules after these are left out.
        """
        fills = {leaf.path: self._leaf(leaf) for leaf in leaves}
        equal = self._copies(tied, num_layers, depths)
        self._leftovers(num_layers, num_layers + depths, multimodal)
        return Plan(fills, equal)

    def _has(self, piece: Piece) -> bool:
        names = (f"{piece.name}_blocks", f"{piece.name}_scales") if piece.packed else (piece.name,)
        return any(name in self.tensors or name in self.lost for name in names)

    def _leaf(self, leaf: Leaf) -> list[Fill]:
        spellings = [list(leaf.pieces(source)) for source in leaf.sources]
        present = [pieces for pieces in spellings if any(map(self._has, pieces))]
        for pieces in present[1:]:
            first, other = (next(filter(self._has, pieces)).name for pieces in (present[0], pieces))
            self.problems.add("contradictory", f"{leaf.path} is there twice: as {first} and as {other}")
            self.used.update(name for piece in pieces for name in (piece.name, f"{piece.name}_blocks"))
            self.used.update(f"{piece.name}_scales" for piece in pieces)
        fills = (self._fill(leaf, piece) for piece in (present or spellings)[0])
        return [fill for fill in fills if fill is not None]

    def _take(self, name: str, what: str) -> Tensor | None:
        tensor = self.tensors.get(name)
        if tensor is not None:
            self.used.add(name)
        elif name not in self.lost:
            if name == f"{_HEAD}weight":
                what += " (or is it the embedding? Then tie_word_embeddings must be true)"
            self._tell("missing", name, f"{name}, {what}")
        return tensor

    def _tell(self, kind: str, name: str, line: str) -> None:
        # Several arrays may want one tensor; it is counted once.
        if name not in self._told:
            self.problems.add(kind, line)
        self._told.add(name)

    def _fill(self, leaf: Leaf, piece: Piece) -> Fill | None:
        shape = leaf.piece_shape(piece)
        there = piece.layout.tensor_shape(shape)
        wanted = f"for {piece.place} {list(shape)}"
        if piece.packed:
            return self._packed(piece, shape, there, wanted)
        tensor = self._take(piece.name, wanted)
        if tensor is None:
            return None
        if tensor.dtype not in PLAIN and tensor.dtype not in FLOAT8:
            known = ", ".join((*PLAIN, *FLOAT8))
            self._tell("wrong", tensor.name, f"{tensor}, {wanted}: its dtype is none of {known}")
            return None
        if tensor.shape != there:
            self._tell("wrong", tensor.name, f"{tensor}, {wanted}: {list(there)} is wanted")
            return None
        if tensor.dtype in PLAIN:
            return Fill(piece.index, shape, piece.layout, tensor)
        scale = self._scale(piece.name, tensor, wanted)
        return None if scale is None else Fill(piece.index, shape, piece.layout, tensor, scale)

    def _scale(self, name: str, tensor: Tensor, wanted: str) -> Tensor | None:
        stem = name.removesuffix("weight")
        if stem.endswith("."):
            names = [stem + scale for scale in _SCALE_NAMES]
            self.used.update(stem + scale for scale in _ACTIVATION_SCALES)
        else:  # the experts of a layer in one tensor
            names = [f"{name}_scale_inv", f"{name}_scale"]
        there = [scale for scale in names if scale in self.tensors]
        for other in there[1:]:
            self.problems.add("contradictory", f"{tensor} has scales twice: {there[0]} and {other}")
            self.used.add(other)
        scale = self._take(there[0] if there else names[0], f"the scales of {tensor}, {wanted}")
        if scale is None:
            return None
        if len(tensor.shape) < 2:
            self._tell("wrong", tensor.name, f"{tensor}, {wanted}: only matrices are read as float8")
            return None
        *lead, rows, columns = tensor.shape
        if self.block is None:
            alone = [] if lead else [(), (1,), (1, 1)]
            what, fitting = "matrix or row", [*alone, *([tuple(lead)] if lead else []), (*lead, rows), (*lead, rows, 1)]
        else:
            what = f"block of {self.block[0]} x {self.block[1]}"
            fitting = [(*lead, -(-rows // self.block[0]), -(-columns // self.block[1]))]
        if scale.shape not in fitting or scale.dtype not in _SCALES:
            grid = " or ".join(str(list(shape)) for shape in dict.fromkeys(fitting))
            self._tell("wrong", scale.name, f"{scale}, the scales of {tensor}: {grid}, one for each {what}, is wanted")
            return None
        return scale

    def _packed(self, piece: Piece, shape: tuple[int, ...], there: tuple[int, ...], wanted: str) -> Fill | None:
        blocks = self._take(f"{piece.name}_blocks", wanted)
        scales = self._take(f"{piece.name}_scales", wanted)
        if blocks is None or scales is None:
            return None
        groups = (*there[:-1], -(-there[-1] // MXFP4_VALUES))
        fits = True
        for tensor, want in ((blocks, (*groups, _MXFP4_BYTES)), (scales, groups)):
            if tensor.shape != want or tensor.dtype != "U8":
                self._tell("wrong", tensor.name, f"{tensor}, {wanted} in MXFP4: U8{list(want)} is wanted")
                fits = False
        if there[-1] % MXFP4_VALUES:
            self._tell("wrong", blocks.name, f"{blocks}, {wanted}: rows aren't made of blocks of {MXFP4_VALUES}")
            fits = False
        return Fill(piece.index, shape, piece.layout, blocks, scales) if fits else None

    def _copies(self, tied: bool, num_layers: int, depths: int) -> list[Equal]:
        embedding, head = f"{_EMBEDDING}weight", f"{_HEAD}weight"
        copies = [(head, embedding, True)] if tied else []
        for layer in range(num_layers, num_layers + depths):
            # A model has one embedding and one head. A module's own would be those of another training stage.
            copies.append((f"model.layers.{layer}.embed_tokens.weight", embedding, False))
            copies.append((f"model.layers.{layer}.shared_head.head.weight", embedding if tied else head, False))
        found = []
        for name, original, matters in copies:
            if name not in self.tensors:
                continue
            self.used.add(name)
            if original not in self.tensors:  # reported already
                continue
            pair = Equal(self.tensors[name], self.tensors[original], matters)
            odd = [t for t in pair[:2] if t.dtype not in PLAIN]
            if not odd and pair.copy.shape == pair.original.shape:
                found.append(pair)
            elif matters:
                self.problems.add("wrong", f"{pair.copy}, which must equal {pair.original}: the model's head is tied")
            else:
                found.append(pair)
        return found

    def _leftovers(self, num_layers: int, end: int, multimodal: bool) -> None:
        skipped = tuple(f"model.layers.{layer}." for layer in mtp_layers(self.tensors, num_layers) if layer >= end)
        for name, tensor in self.tensors.items():
            if name in self.used or name.startswith(skipped) or is_leftover(name):
                continue
            if multimodal and not name.startswith(("model.layers.", "model.norm.", _EMBEDDING, _HEAD)):
                continue
            self.problems.add("unexpected", f"{tensor} in {tensor.file}")


def stored_dtype(plan: Plan, kept: Collection[str]) -> Any:
    """The name of the dtype that most of the parameters have in files, those in `kept` apart; quantised: bfloat16."""
    sizes: collections.Counter[str] = collections.Counter()
    for path, fills in plan.fills.items():
        if path not in kept:
            for fill in fills:
                size = 1
                for n in fill.shape:
                    size *= n
                sizes[PLAIN.get(fill.tensor.dtype, "bfloat16")] += size
    name = max(sizes, key=sizes.__getitem__, default="float32")
    # JAX has none by default, and no model is trained in it.
    return "float32" if name == "float64" else name
