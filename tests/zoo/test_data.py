import numpy as np
import pytest

from overspill.zoo.data import Batches, ByteTokenizer, Corpus, PackedDataset, Position, load_corpus


def corpus_of(*texts):
    return Corpus("test", tuple(f"{i}.txt" for i in range(len(texts))), tuple(t.encode() for t in texts))


def alphabet(*lengths):
    """Documents whose every byte tells its document and its place."""
    return corpus_of(*("".join(chr(33 + (7 * d + i) % 90) for i in range(n)) for d, n in enumerate(lengths)))


def test_tokenizer_round_trip():
    tokenizer = ByteTokenizer()
    text = "Größe = 3 µm\n\x7f"
    ids = tokenizer.encode(text, end=True)
    assert ids.dtype == np.int32 and ids[-1] == 257 and len(ids) == len(text.encode()) + 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(b"\xff\x00", begin=True).tolist() == [256, 255, 0]
    assert tokenizer.encode("").dtype == np.int32
    with pytest.raises(ValueError, match="token id 260 .* 0 to 259"):
        tokenizer.decode([65, 260])


def test_rows_against_a_walk_through_the_documents():
    corpus, length = alphabet(5, 1, 30, 7, 12), 9
    dataset = PackedDataset(corpus, length)
    flat = [(d, i, t) for d, text in enumerate(corpus.documents) for i, t in enumerate([256, *text, 257])]
    assert dataset.tokens == len(flat) == 65 and len(dataset) == 8
    batch = dataset.rows(range(len(dataset)))
    assert [a.shape for a in batch] == [(8, 9)] * 5
    assert [a.dtype for a in batch] == [np.int32] * 4 + [bool]
    for row in range(8):
        segment, position, before = -1, 0, None
        for column in range(length):
            k = row * length + column
            got = [a[row, column].item() for a in batch]
            document, place, token = flat[k] if k < len(flat) else (None, None, 0)
            last = document is None or place == len(corpus.documents[document]) + 1
            if column == 0 or document != before:
                segment, position, before = segment + 1, 0, document
            expected = [token, -100 if last else flat[k + 1][2], segment, position, document is not None]
            assert got == expected, (row, column)
            position += 1


def test_every_pair_of_neighbours_is_a_target_once():
    corpus = alphabet(50, 3, 41, 1, 64)
    batch = PackedDataset(corpus, 16).rows(range(len(PackedDataset(corpus, 16))))
    valid = batch.targets != -100
    assert valid.sum() == corpus.size + 5  # each byte and each document's end is predicted once
    assert not valid[~batch.mask].any()
    pairs = sorted(zip(batch.tokens[valid].tolist(), batch.targets[valid].tolist(), strict=True))
    expected = sorted((a, b) for text in corpus.documents for a, b in zip([256, *text], [*text, 257], strict=True))
    assert pairs == expected


def test_padding_rows():
    batch = PackedDataset(alphabet(20), 7).rows([1, -1])
    assert not batch.mask[1].any() and (batch.targets[1] == -100).all() and (batch.tokens[1] == 0).all()
    assert batch.mask[0].all()


def test_validation_gives_each_row_once():
    dataset = PackedDataset(alphabet(20, 15, 31), 8)
    batches = list(dataset.once(4))
    assert len(dataset) == 9 and len(batches) == 3
    assert {b.tokens.shape for b in batches} == {(4, 8)}
    tokens = np.concatenate([b.tokens for b in batches])
    np.testing.assert_array_equal(tokens[:9], dataset.rows(range(9)).tokens)
    assert not np.concatenate([b.mask for b in batches])[9:].any()
    assert len(list(dataset.once(4, max_batches=2))) == 2


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_an_epoch_gives_every_row_once_in_another_order():
    dataset = PackedDataset(alphabet(70, 33), 8)
    rows = len(dataset)  # 14
    batches = dataset.batches(rows, seed=3)
    first, second = next(batches), next(batches)
    assert batches.position == Position(2, 0)
    in_order = dataset.rows(range(rows)).tokens.tolist()
    assert sorted(first.tokens.tolist()) == sorted(second.tokens.tolist()) == sorted(in_order)
    assert first.tokens.tolist() != in_order and first.tokens.tolist() != second.tokens.tolist()
    assert equal(first, next(dataset.batches(rows, seed=3)))
    assert not equal(first, next(dataset.batches(rows, seed=4)))


@pytest.mark.parametrize("batch_size", [5, 7, 33])  # 14 rows: across the end of an epoch, exactly at it, beyond two
def test_resume_goes_on_exactly_where_it_stopped(batch_size):
    dataset = PackedDataset(alphabet(70, 33), 8)
    whole = dataset.batches(batch_size, seed=1)
    for _ in range(8):
        resumed = Batches(dataset, batch_size, seed=1, position=whole.position)
        index = whole.position.epoch * 14 + whole.position.index
        assert equal(next(whole), next(resumed))
        assert whole.position == resumed.position
        assert whole.position.epoch * 14 + whole.position.index == index + batch_size
    with pytest.raises(ValueError, match="epoch 0, row 14"):
        Batches(dataset, 2, position=Position(0, 14))


def test_split_by_document():
    corpus = alphabet(*range(20, 60))
    train, validation = corpus.split(0.1, seed=2)
    assert {*train.names} | {*validation.names} == {*corpus.names}
    assert not {*train.names} & {*validation.names}
    assert 0.05 < validation.size / corpus.size < 0.2
    again = corpus.split(0.1, seed=2)
    assert again == (train, validation) and corpus.split(0.1, seed=3) != again
    # A long document never becomes the validation set while short ones are there.
    for seed in range(6):
        assert alphabet(1000, 30, 40).split(0.05, seed=seed)[1].size < 100


def test_one_document_is_cut_after_a_line():
    train, validation = corpus_of("line\n" * 100).split(0.1)
    assert train.documents[0] + validation.documents[0] == b"line\n" * 100
    assert validation.documents[0] == b"line\n" * (validation.size // 5) and 0 < validation.size < 100
    train, validation = corpus_of("x" * 40).split(0.1)
    assert (train.size, validation.size) == (36, 4)
    with pytest.raises(ValueError, match="too few"):
        corpus_of("x").split()
    with pytest.raises(ValueError, match=r"fraction .* 1\.5"):
        corpus_of("x" * 40).split(1.5)


def test_standard_library_corpus():
    corpus = load_corpus()
    assert corpus == load_corpus() and 1_000_000 < corpus.size <= 6_000_000
    assert all(name.endswith(".py") for name in corpus.names)
    assert not any({"test", "site-packages", "idlelib"} & set(name.split("/")) for name in corpus.names)
    assert len({name[0] for name in corpus.names}) > 10  # not only the first letters
    small = load_corpus(max_bytes=200_000)
    assert small.capped and small.size <= 200_000
    assert "documents" in repr(corpus) and len(repr(corpus)) < 200


def test_files_and_folders(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("two")
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "image.bin").write_bytes(b"\x00\x01")
    (tmp_path / ".hidden").write_text("no")
    corpus = load_corpus(tmp_path)
    assert (corpus.names, corpus.documents, corpus.skipped) == (("a.md", "b/two.txt"), (b"one", b"two"), 2)
    assert load_corpus(str(tmp_path / "b" / "two.txt")).documents == (b"two",)
    assert load_corpus(tmp_path / "a.md", max_bytes=2).documents == (b"on",)


def test_nothing_to_read(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="nowhere' doesn't exist"):
        load_corpus(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no text"):
        load_corpus(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="empty.txt' holds no text"):
        load_corpus(tmp_path / "empty.txt")
    (tmp_path / "closed.txt").write_text("text")

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(ValueError, match="closed.txt' can't be read: Permission denied"):
        load_corpus(tmp_path / "closed.txt")


def test_checks_before_training():
    corpus = alphabet(20)
    with pytest.raises(ValueError, match="sequence length 23 is longer than the corpus .22 tokens"):
        PackedDataset(corpus, 23)
    assert len(PackedDataset(corpus, 23, padded=True)) == 1
    with pytest.raises(ValueError, match="token id 256 .* 0 to 255"):
        PackedDataset(corpus, 4, vocab_size=256)
    with pytest.raises(ValueError, match="sequence_length .* got 0"):
        PackedDataset(corpus, 0)
    with pytest.raises(ValueError, match="batch_size .* got 0"):
        PackedDataset(corpus, 4).batches(0)


def test_another_tokenizer():
    class Words:
        vocab_size = 100

        def encode(self, text):
            return np.array([len(word) for word in text.split()])

    dataset = PackedDataset(corpus_of("a bb ccc", "dddd e"), 5, tokenizer=Words())
    batch = dataset.rows([0])
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 1]]
    assert batch.targets.tolist() == [[2, 3, -100, 1, -100]]
