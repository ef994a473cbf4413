"""Text as training data: bytes as tokens, documents packed into sequences, batches in a reproducible order."""

import dataclasses
import functools
import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from ..layers.embedding import check_tokens
from ..layers.loss import IGNORED

# Folders of the standard library that hold no prose of a program: tests, bundled wheels, tables.
_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "ensurepip",
    "encodings", "pydoc_data", "lib-dynload", "__pycache__",
}  # fmt: skip
_STDLIB_BYTES = 6_000_000


class Batch(NamedTuple):
    """A batch of packed sequences; every field is `[batch, sequence]`.

    Targets are shifted already: `targets[b, s]` is the token after `tokens[b, s]` in the same document.
    """

    tokens: Any  # int32; 0 on padding
    targets: Any  # int32; -100 after the last token of a document and on padding
    segment_ids: Any  # int32; positions see each other only within one value
    positions: Any  # int32; from 0 in each segment
    mask: Any  # bool; False on padding


def pad_batch(batch: Batch, rows: int) -> Batch:
    """`batch` filled up to `rows` rows with padding, which counts nowhere: for a last batch of fewer rows.

    Raises ValueError if it has more.
    """
    have, length = batch.tokens.shape
    if have > rows:
        raise ValueError(f"a batch of {have} rows can't be filled up to {rows}")
    real = np.ones((have, length), bool) if batch.mask is None else batch.mask

    def fill(x: Any, value: Any) -> Any:
        if x is None or x.shape[0] != have:
            return x
        xp = np if isinstance(x, np.ndarray) else jnp
        return xp.concatenate([x, xp.full((rows - have, *x.shape[1:]), value, x.dtype)])

    values = Batch(0, IGNORED, 0, 0, False)
    return Batch(*(fill(x, value) for x, value in zip(batch._replace(mask=real), values, strict=True)))


class Position(NamedTuple):
    """Where a stream of batches stands: `index` rows of `epoch` have been given out."""

    epoch: int = 0
    index: int = 0


@runtime_checkable
class Tokenizer(Protocol):
    """What `PackedDataset` asks of a tokenizer: ids from 0 to `vocab_size - 1`, end-of-document included."""

    vocab_size: int

    def encode(self, text: str | bytes) -> np.ndarray: ...


class ByteTokenizer:
    """One token for each byte, 0 to 255, and four more: a document's begin and end, padding, and one in reserve."""

    vocab_size = 260
    begin = 256
    end = 257
    padding = 258

    def encode(self, text: str | bytes, *, begin: bool = False, end: bool = False) -> np.ndarray:
        """The UTF-8 bytes of `text` as int32 `[length]`, with the tokens around them that are asked for."""
        data = text.encode() if isinstance(text, str) else bytes(text)
        ids = np.frombuffer(data, np.uint8).astype(np.int32)
        return np.concatenate([[self.begin] * begin, ids, [self.end] * end]).astype(np.int32)

    def decode(self, ids: Any) -> str:
        """The text of integer `ids`; tokens that are no bytes say nothing, and broken UTF-8 becomes U+FFFD.

        Raises ValueError for an id outside the vocabulary.
        """
        ids = np.asarray(ids).reshape(-1)
        check_tokens(ids, self.vocab_size)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")

    def __repr__(self) -> str:
        return "ByteTokenizer()"


@dataclasses.dataclass(frozen=True, repr=False)
class Corpus:
    """Documents as bytes, in a fixed order.

    - `source`: what they were read from, in words.
    - `skipped`: how many files were left out because they hold no text.
    - `capped`: whether documents were left out because `max_bytes` was reached.
    """

    source: str
    names: tuple[str, ...]
    documents: tuple[bytes, ...]
    skipped: int = 0
    capped: bool = False

    @functools.cached_property
    def size(self) -> int:
        """Bytes of text."""
        return sum(map(len, self.documents))

    def __repr__(self) -> str:
        return f"Corpus({self.source}: {len(self.documents):,} documents, {self.size:,} bytes)"

    def split(self, fraction: float = 0.05, *, seed: int = 0) -> "tuple[Corpus, Corpus]":
        """`(train, validation)`: whole documents, drawn by `seed`, of about `fraction` of the bytes for validation.

        A corpus of one document is cut near its end instead, after a line if there is one. Raises ValueError for a
        fraction outside (0, 1) or a corpus too small to cut.
        """
        if not 0 < fraction < 1:
            raise ValueError(f"validation fraction must be between 0 and 1, got {fraction!r}")
        if len(self.documents) == 1:
            return self._cut(fraction)
        wanted, taken, size = fraction * self.size, set(), 0
        for i in np.random.default_rng([seed, 1]).permutation(len(self.documents)):
            # One long document must not swallow the training data.
            if size < wanted and size + len(self.documents[i]) <= max(2 * wanted, size + 1):
                taken.add(int(i))
                size += len(self.documents[i])
        if not taken:
            taken.add(min(range(len(self.documents)), key=lambda i: len(self.documents[i])))
        kept = [i for i in range(len(self.documents)) if i not in taken]
        return self._part("training part", kept), self._part("validation part", sorted(taken))

    def _part(self, what: str, indices: Sequence[int]) -> "Corpus":
        names, documents = ([texts[i] for i in indices] for texts in (self.names, self.documents))
        return Corpus(f"{what} of {self.source}", tuple(names), tuple(documents), self.skipped, self.capped)

    def _cut(self, fraction: float) -> "tuple[Corpus, Corpus]":
        text = self.documents[0]
        at = round(len(text) * (1 - fraction))
        at = text.rfind(b"\n", len(text) // 2, at) + 1 or at
        if not 0 < at < len(text):
            raise ValueError(f"{self.source}: {len(text)} bytes are too few to set some aside for validation")
        parts = []
        for what, part in (("training part", text[:at]), ("validation part", text[at:])):
            parts.append(Corpus(f"{what} of {self.source}", self.names, (part,), self.skipped, self.capped))
        return parts[0], parts[1]


def load_corpus(path: str | os.PathLike | None = None, *, max_bytes: int | None = None) -> Corpus:
    """The text at `path`, a file or a folder, or the Python standard library's own source if it is None.

    Each file is a document. A folder is read with its subfolders in the order of the relative paths; hidden and
    empty files and those with a NUL byte, which are no text, are left out. Whole documents are left out once
    `max_bytes` is reached (6 MB for the standard library, by default; no limit for `path`). Which of the standard
    library's files come first is decided by a hash of their names, so that a limit leaves a mixture.

    Raises ValueError, naming the path, if there is nothing to read.
    """
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, got {max_bytes!r}")
    if path is None:
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        files = [f for f in _walk(root, _SKIPPED_FOLDERS) if f.suffix == ".py"]
        files.sort(key=lambda f: hashlib.sha256(f.relative_to(root).as_posix().encode()).digest())
        return _read("Python standard library", root, files, max_bytes or _STDLIB_BYTES, "pass a path to your text")
    root = pathlib.Path(path)
    if root.is_dir():
        try:
            files = sorted(_walk(root, {"__pycache__"}), key=lambda f: f.relative_to(root).as_posix())
        except OSError as error:
            raise ValueError(f"data folder {str(path)!r} can't be read: {error.strerror}") from None
        return _read(str(path), root, files, max_bytes, "a folder of text files is needed")
    if not root.exists():
        raise ValueError(f"data path {str(path)!r} doesn't exist: give a text file or a folder of text files")
    return _read(str(path), root.parent, [root], max_bytes, "a text file is needed")


def _walk(root: pathlib.Path, skipped: set[str]) -> Iterator[pathlib.Path]:
    def fail(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith((".", "config-")))
        yield from (pathlib.Path(folder, f) for f in files if not f.startswith("."))


def _read(source: str, root: pathlib.Path, files: list[pathlib.Path], max_bytes: int | None, hint: str) -> Corpus:
    names: list[str] = []
    documents: list[bytes] = []
    skipped, size, capped = 0, 0, False
    for file in files:
        if not file.is_file():  # a socket or a dangling link
            skipped += 1
            continue
        try:
            text = file.read_bytes()
        except OSError as error:
            raise ValueError(f"data file {str(file)!r} can't be read: {error.strerror}") from None
        if not text.strip() or b"\0" in text:
            skipped += 1
            continue
        if max_bytes is not None and size + len(text) > max_bytes:
            capped = True
            if documents:
                continue
            text = text[:max_bytes]
        names.append(file.relative_to(root).as_posix())
        documents.append(text)
        size += len(text)
    if not documents:
        raise ValueError(f"data {source!r} holds no text ({len(files)} files looked at): {hint}")
    return Corpus(source, tuple(names), tuple(documents), skipped, capped)


class PackedDataset:
    """Documents laid end to end and cut into rows of `sequence_length` tokens.

    Every pair of neighbouring tokens of a document is a target exactly once. A document that a row's end cuts goes
    on in the next row as a segment of its own; the last row is padded.
    """

    def __init__(
        self,
        corpus: Corpus,
        sequence_length: int,
        *,
        tokenizer: Tokenizer | None = None,
        vocab_size: int | None = None,
        padded: bool = False,
    ):
        """**Arguments:**

        - `tokenizer`: bytes to ids; `ByteTokenizer` by default, with the begin and end of each document marked.
        - `vocab_size`: of the model that will read it.
        - `padded`: take a corpus shorter than one sequence (a small validation set) and pad it.

        Raises ValueError for a sequence longer than the corpus and for ids outside the model's vocabulary.
        """
        if isinstance(sequence_length, bool) or not isinstance(sequence_length, int) or sequence_length < 1:
            raise ValueError(f"sequence_length must be a positive integer, got {sequence_length!r}")
        if tokenizer is None:
            byte_tokenizer = ByteTokenizer()
            encoded = [byte_tokenizer.encode(text, begin=True, end=True) for text in corpus.documents]
        else:
            encoded = [np.asarray(tokenizer.encode(text)) for text in corpus.documents]
        stream = np.concatenate(encoded)
        if vocab_size is not None:
            check_tokens(stream, vocab_size)
        if len(stream) < sequence_length and not padded:
            raise ValueError(
                f"sequence length {sequence_length:,} is longer than the corpus ({len(stream):,} tokens in "
                f"{corpus.source}): take a shorter sequence or more text"
            )
        self.source = corpus.source
        self.sequence_length = sequence_length
        self.tokens = len(stream)
        rows = -(-len(stream) // sequence_length)
        padding = rows * sequence_length + 1 - len(stream)
        # One more element than the rows hold: the last position looks one token ahead.
        self._stream = np.pad(stream.astype(np.int32), (0, padding))
        lengths = [len(ids) for ids in encoded]
        self._document = np.pad(np.repeat(np.arange(len(lengths)), lengths), (0, padding), constant_values=-1)

    def __len__(self) -> int:
        """The number of rows."""
        return (len(self._stream) - 1) // self.sequence_length

    def __repr__(self) -> str:
        return f"PackedDataset({self.source}: {len(self):,} rows of {self.sequence_length:,} tokens)"

    def rows(self, indices: Any) -> Batch:
        """The given rows as NumPy arrays `[rows, sequence]`; index -1 stands for a row of padding."""
        indices = np.asarray(indices, np.int64)
        columns = np.arange(self.sequence_length)
        flat = np.maximum(indices, 0)[:, None] * self.sequence_length + columns
        document = np.where(indices[:, None] < 0, -1, self._document[flat])
        mask = document >= 0
        tokens = np.where(mask, self._stream[flat], 0)
        targets = np.where(mask & (self._document[flat + 1] == document), self._stream[flat + 1], IGNORED)
        starts = np.ones(document.shape, bool)
        starts[:, 1:] = document[:, 1:] != document[:, :-1]
        segment_ids = np.cumsum(starts, axis=1) - 1
        positions = columns - np.maximum.accumulate(np.where(starts, columns, 0), axis=1)
        integers = (a.astype(np.int32) for a in (tokens, targets, segment_ids, positions))
        return Batch(*integers, mask)

    def batches(self, batch_size: int, *, seed: int = 0, position: Position = Position()) -> "Batches":
        """Shuffled batches without end, from `position` on."""
        return Batches(self, batch_size, seed=seed, position=position)

    def once(
        self, batch_size: int, *, max_batches: int | None = None, last: Literal["pad", "drop"] = "pad"
    ) -> Iterator[Batch]:
        """Every row once, in order: for validation.

        A last batch of fewer rows is filled up with rows of padding, or with `last="drop"` left out.
        """
        _check_batch_size(batch_size)
        if last not in ("pad", "drop"):
            raise ValueError(f"the last batch can be 'pad', filled up, or 'drop', left out, not {last!r}")
        count = -(-len(self) // batch_size) if last == "pad" else len(self) // batch_size
        for start in range(0, min(count, max_batches or count) * batch_size, batch_size):
            indices = np.arange(start, start + batch_size)
            yield self.rows(np.where(indices < len(self), indices, -1))


def _check_batch_size(batch_size: int) -> None:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be a positive integer, got {batch_size!r}")


class Batches:
    """An endless iterator over shuffled batches of NumPy arrays, which can be resumed.

    Each epoch gives every row once, in an order that depends on `seed` and the epoch alone; a batch may begin in
    one epoch and end in the next. `position` is where the next batch starts: an iterator made with the same
    dataset, seed and position goes on exactly there.
    """

    def __init__(self, dataset: PackedDataset, batch_size: int, *, seed: int = 0, position: Position = Position()):
        _check_batch_size(batch_size)
        epoch, index = position
        if epoch < 0 or not 0 <= index < len(dataset):
            raise ValueError(
                f"data position (epoch {epoch}, row {index}) doesn't exist: this data has {len(dataset)} rows"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.position = Position(int(epoch), int(index))
        self._order = (-1, np.empty(0, np.int64))

    def __repr__(self) -> str:
        epoch, index = self.position
        return f"Batches({self.batch_size} of {self.dataset}; next: epoch {epoch}, row {index})"

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        epoch, index = self.position
        parts: list[np.ndarray] = []
        missing = self.batch_size
        while missing:
            part = self._order_of(epoch)[index : index + missing]
            parts.append(part)
            missing -= len(part)
            index += len(part)
            if index == len(self.dataset):
                epoch, index = epoch + 1, 0
        batch = self.dataset.rows(np.concatenate(parts))
        self.position = Position(epoch, index)
        return batch

    def _order_of(self, epoch: int) -> np.ndarray:
        # Kept for the length of the epoch: making it again for each batch would cost more than the batch.
        if self._order[0] != epoch:
            order = np.random.default_rng([self.seed, 0, epoch]).permutation(len(self.dataset))
            self._order = (epoch, order)
        return self._order[1]
