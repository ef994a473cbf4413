import importlib.util
import json
import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest

from overspill.zoo.data import Corpus, PackedDataset
from overspill.zoo.streaming import StopTexts, Streamer
from overspill.zoo.tokenizer import load_tokenizer

tokenizers = pytest.importorskip("tokenizers")

# What a cut in the wrong place would break: characters of one to four bytes, combining ones, spaces at all ends.
TEXTS = [
    "Hello, world", " two  spaces  ", "tab\there\nand a line\n\n", "naïve café: 5 €", "日本語のテキスト",
    "emoji 🙂\U0001f469\u200d\U0001f469\u200d\U0001f467🇯🇵 end",
    "ῥᾴδιον, ḗ e\u0301", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "x", " ", "é", "</s> spelled <s> out", "12345 + 67 = 0x1F", "don't can't I'll",
]  # fmt: skip
CORPUS = [text for text in TEXTS if "<" not in text] * 8 + ["the quick brown fox jumps over the lazy dog " * 4]


def byte_level(specials=("<s>", "</s>", "<pad>"), size=420):
    """As in Llama 3, GPT-2, Qwen: bytes shown as characters, merged."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=list(specials),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(CORPUS, trainer)
    return made


def sentencepiece(metaspace=True):
    """As in Llama 2, Mistral: spaces as ▁, one in front of the text, bytes for what has no token."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *sorted(set("".join(CORPUS[-1:]) + "HelWord, nas.") - {" "})]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("l", "l"), ("o", "r"), ("▁", "▁"), ("▁", "w"), ("▁w", "or")]
    pieces += [a + b for a, b in merges]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    if metaspace:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def unigram():
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def word_level():
    from tokenizers import models, pre_tokenizers

    words = ["[UNK]", "[PAD]", "[BOS]", "[EOS]", "a", "b", "cat", "dog"]
    made = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(words[:4])
    return made


KINDS = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece-normalizer": lambda: sentencepiece(metaspace=False),
    "unigram": unigram,
    "word-level": word_level,
}


def template(made, single, *tokens):
    from tokenizers import processors

    made.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(token, made.token_to_id(token)) for token in tokens]
    )
    return made


@pytest.fixture
def write(tmp_path):
    """A model folder with a tokenizer and files of JSON beside it."""

    def write(made, name="model", **files):
        folder = tmp_path / name
        folder.mkdir()
        made.save(str(folder / "tokenizer.json"))
        for file, content in files.items():
            (folder / f"{file}.json").write_text(json.dumps(content))
        return folder

    return write


@pytest.fixture
def agree():
    """Compares with transformers' own tokenizer of a folder, where it is installed; what is right is in the tests."""

    def agree(folder, texts, *, bos=None, eos=None, pad=None, size=None):
        if importlib.util.find_spec("transformers") is None:
            return
        from transformers import AutoTokenizer

        ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
        for text in texts:
            for special in (True, False):
                ids = ours.encode(text, special)
                assert ids == theirs.encode(text, add_special_tokens=special)
                assert ours.decode(ids, special) == theirs.decode(ids, skip_special_tokens=special)
        assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (bos, eos, pad)
        assert size is None or size == len(theirs)

    return agree


@pytest.mark.parametrize("kind", KINDS)
def test_texts_come_back(kind, write):
    made = KINDS[kind]()
    tokenizer = load_tokenizer(write(made))
    for text in TEXTS:
        ids = tokenizer.encode(text, special=False)
        assert ids == made.encode(text, add_special_tokens=False).ids == tokenizer.encode(text.encode(), special=False)
        whole = tokenizer.decode(np.array(ids, np.int64), skip_special=False)
        assert whole == made.decode(ids, skip_special_tokens=False)
        if kind == "byte-level":
            assert whole == text
            assert tokenizer.decode(ids) == text.replace("<s>", "").replace("</s>", "")
    assert tokenizer.vocab_size == max(made.get_vocab().values()) + 1
    assert "ids" in repr(tokenizer) and len(repr(tokenizer)) < 200


# What is put around a text: (tokenizer, its template, tokenizer_config.json, tokens before, tokens after).
AROUND = [
    (byte_level, None, {}, [], []),
    (byte_level, "<s> $A", {}, ["<s>"], []),
    (byte_level, "<s> $A </s>", {"tokenizer_class": "PreTrainedTokenizerFast"}, ["<s>"], ["</s>"]),
    # tokenizer.json decides, for all classes but one.
    (byte_level, "<s> $A", {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False}, ["<s>"], []),
    (byte_level, None, {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}, [], []),
    (sentencepiece, "<s> $A", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}, ["<s>"], []),
    (sentencepiece, "<s> $A </s>", {"tokenizer_class": "LlamaTokenizerFast"}, ["<s>"], ["</s>"]),
    (sentencepiece, None, {"tokenizer_class": "LlamaTokenizer"}, [], []),
    (word_level, "[BOS] $A [EOS]", {}, ["[BOS]"], ["[EOS]"]),
]


@pytest.mark.parametrize(("make", "single", "config", "before", "after"), AROUND)
def test_special_tokens_are_those_of_transformers(make, single, config, before, after, write, agree):
    made = make()
    tokens = ("[BOS]", "[EOS]") if make is word_level else ("<s>", "</s>")
    if single:
        template(made, single, *(token for token in tokens if token in single))
    config = {"bos_token": tokens[0], "eos_token": tokens[1], **config}
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    folder = write(made, tokenizer_config=config)
    tokenizer = load_tokenizer(folder)
    bos, eos = map(made.token_to_id, tokens)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (bos, (eos,))
    for text in [*TEXTS, ""]:
        bare = made.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, special=False) == bare
        ids = [[made.token_to_id(token) for token in part] for part in (before, after)]
        assert tokenizer.encode(text) == [*ids[0], *bare, *ids[1]]
    agree(folder, [*TEXTS, ""], bos=bos, eos=eos)


@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast"])
@pytest.mark.parametrize("single", [None, "<s> $A", "$A </s>", "<s> $A </s>"])
def test_a_llama_tokenizer_adds_what_its_config_says_once(name, single, write):
    made = byte_level()
    if single:
        template(made, single, *(token for token in ("<s>", "</s>") if token in single))
    config = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}}
    both = load_tokenizer(write(made, "both", tokenizer_config=config | {"add_bos_token": True, "add_eos_token": True}))
    bos, eos = made.token_to_id("<s>"), made.token_to_id("</s>")
    text = made.encode("cat", add_special_tokens=False).ids
    assert both.encode("cat") == [bos, *text, eos]
    assert both.encode("") == [bos, eos]
    assert both.encode("cat", special=False) == text
    begun = load_tokenizer(write(made, "begun", tokenizer_config=config | {"add_bos_token": True}))
    assert begun.encode("cat") == [bos, *text, *([eos] if single and "</s>" in single else [])]


def test_one_token_for_both_ends_is_put_where_it_is_missing(write):
    made = template(byte_level(("<end>",)), "$A <end>", "<end>")
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<end>", "eos_token": "<end>",
              "add_bos_token": True, "add_eos_token": True}  # fmt: skip
    tokenizer = load_tokenizer(write(made, tokenizer_config=config))
    (text,) = tokenizer.encode("x", special=False)
    assert tokenizer.encode("x") == [0, text, 0]


def test_no_text_is_cut_or_padded_as_the_file_says(write):
    made = byte_level()
    made.enable_truncation(4)
    made.enable_padding(length=16, pad_id=2, pad_token="<pad>")
    tokenizer = load_tokenizer(write(made))
    for text in ("x", CORPUS[-1]):
        assert tokenizer.encode(text) == byte_level().encode(text).ids


@pytest.mark.parametrize(
    ("files", "bos", "eos", "pad"),
    [
        ({}, None, (), None),
        ({"tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}}, 0, (1,), 2),
        ({"special_tokens_map": {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}}, 0, (1,), None),
        # The older file says nothing where the newer one lists the tokens; else it wins.
        ({"special_tokens_map": {"eos_token": "<s>"}, "tokenizer_config": {"eos_token": "</s>"}}, None, (0,), None),
        ({"special_tokens_map": {"eos_token": "<s>"},
          "tokenizer_config": {"eos_token": "</s>", "added_tokens_decoder": {}}}, None, (1,), None),
        ({"config": {"bos_token_id": 7, "eos_token_id": [8, 9], "pad_token_id": -1}}, 7, (8, 9), None),
        ({"config": {"eos_token_id": 8}, "generation_config": {"eos_token_id": [9, 10], "pad_token_id": 11}},
         None, (9, 10), 11),
        ({"config": {"eos_token_id": 8, "bos_token_id": 5}, "generation_config": {"max_length": 3}}, 5, (8,), None),
        ({"config": {"text_config": {"eos_token_id": [3, 8]}}, "generation_config": {"eos_token_id": None}},
         None, (3, 8), None),
        # A tokenizer trained for chat ends an answer by its own token, whatever the model's files still say.
        ({"config": {"eos_token_id": 8}, "tokenizer_config": {"eos_token": "</s>"}}, None, (8, 1), None),
        ({"generation_config": {"eos_token_id": [1, 8]}, "tokenizer_config": {"eos_token": "</s>"}},
         None, (1, 8), None),
        # null says that there is none.
        ({"config": {"bos_token_id": 8}, "tokenizer_config": {"bos_token": None}}, None, (), None),
    ],
)  # fmt: skip
def test_ids_come_from_the_file_that_knows(files, bos, eos, pad, write):
    tokenizer = load_tokenizer(write(byte_level(), **files))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (bos, eos, pad)


@pytest.mark.parametrize("legacy", [False, True])
def test_added_tokens_that_only_other_files_name(legacy, write, agree):
    made = byte_level()
    n = made.get_vocab_size()
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    if legacy:
        files = {"added_tokens": {"<call>": n + 1, "<end>": n}, "special_tokens_map": {"eos_token": "<end>"},
                 "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"}}  # fmt: skip
    else:
        added = {str(n + i): {"content": c, "special": i == 0, **flags} for i, c in enumerate(("<end>", "<call>"))}
        files = {"tokenizer_config": {"added_tokens_decoder": added, "eos_token": "<end>", "bos_token": "<s>",
                                      "tokenizer_class": "PreTrainedTokenizerFast"}}  # fmt: skip
    folder = write(made, **files)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == n + 2
    text = "a<end>b <call>c</s>"
    ids = tokenizer.encode(text)
    assert {n, n + 1} <= set(ids)
    assert tokenizer.eos_ids == (n,)
    assert tokenizer.decode(ids) == "ab <call>c"
    assert tokenizer.decode(ids, skip_special=False) == text
    agree(folder, [text], bos=None if legacy else 0, eos=n, size=n + 2)


def test_a_named_token_is_special_though_tokenizer_json_holds_it_for_a_word(write, agree):
    made = byte_level()
    made.add_tokens(["<|im_end|>", "<image>", "<more>"])
    config = {"eos_token": "<|im_end|>", "image_token": "<image>", "tokenizer_class": "PreTrainedTokenizerFast",
              "additional_special_tokens": ["<more>"], "pad_token": "<new pad>"}  # fmt: skip
    folder = write(made, tokenizer_config=config)
    tokenizer = load_tokenizer(folder)
    text = "a<image>b<|im_end|>c<more>"
    assert tokenizer.decode(tokenizer.encode(text)) == "abc<more>"
    assert tokenizer.pad_id == made.get_vocab_size() == tokenizer.vocab_size - 1
    agree(folder, [text], eos=made.token_to_id("<|im_end|>"), pad=made.get_vocab_size())


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_are_padded_at_one_side(side, write):
    files = {"tokenizer_config": {"pad_token": "<pad>", "bos_token": "<s>"}}
    tokenizer = load_tokenizer(write(template(byte_level(), "<s> $A", "<s>"), **files))
    texts = ["x", "the quick brown fox", tokenizer.encode("lazy dog")]
    tokens, mask = tokenizer.batch(texts, side=side)
    assert tokens.dtype == np.int32 and mask.dtype == bool and tokens.shape == mask.shape == (3, mask.sum(1).max())
    for text, row, real in zip(texts, tokens, mask, strict=True):
        assert row[real].tolist() == (tokenizer.encode(text) if isinstance(text, str) else text)
        assert (row[~real] == tokenizer.pad_id).all()
        where = np.flatnonzero(real)
        first = len(row) - len(where) if side == "left" else 0
        assert (where == np.arange(first, first + len(where))).all()
    assert (tokenizer.batch(["x"], side, special=False)[0] == tokenizer.encode("x", special=False)).all()
    with pytest.raises(ValueError, match="text 1 of the batch, '', has no tokens"):
        tokenizer.batch(["x", ""], special=False)
    with pytest.raises(ValueError, match="one or more texts"):
        tokenizer.batch([])
    with pytest.raises(ValueError, match="'left' or 'right'"):
        tokenizer.batch(["x"], "middle")


def test_padding_without_a_padding_token_is_some_token_that_exists(write):
    for i, (files, pad) in enumerate([({}, 0), ({"config": {"eos_token_id": [5, 6]}}, 5)]):
        tokens, mask = load_tokenizer(write(byte_level(), str(i), **files)).batch(["x", "yz!"])
        assert (tokens[~mask] == pad).all() and not mask.all()


def test_what_is_no_text_or_no_token_is_refused(write):
    tokenizer = load_tokenizer(write(byte_level()))
    for bad in ("\udcff", b"\xff\xfe"):
        with pytest.raises(ValueError, match="is no valid text"):
            tokenizer.encode(bad)
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=rf"token id {bad} is outside .* 0 to {tokenizer.vocab_size - 1}"):
            tokenizer.decode([3, bad])
        streamer = tokenizer.streamer()
        with pytest.raises(ValueError, match="is outside"):
            streamer.put(bad)
        assert streamer.put(tokenizer.encode("x")[0]) == "x"
    words = word_level()
    words.model.unk_token = "[GONE]"
    with pytest.raises(ValueError, match="'zebra' can't be encoded: .*Missing"):
        load_tokenizer(write(words, "words")).encode("zebra")


def test_text_becomes_training_data(write):
    tokenizer = load_tokenizer(write(byte_level()))
    documents = tuple(text.encode() for text in CORPUS)
    data = PackedDataset(Corpus("test", ("",) * len(documents), documents), 16, tokenizer=tokenizer, vocab_size=420)
    assert data.tokens == sum(len(tokenizer.encode(text)) for text in CORPUS)


def stream(tokenizer, ids, context=()):
    streamer = tokenizer.streamer(context)
    pieces = [streamer.put(i) for i in ids]
    return pieces, streamer.finish()


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_is_the_text(kind, write):
    tokenizer = load_tokenizer(write(KINDS[kind]()))
    rng = random.Random(0)
    for text in [*TEXTS, " ".join(rng.choices(TEXTS, k=80))]:
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids)
        for split in {0, 1, len(ids) // 2}:
            context = ids[:split]
            if tokenizer.decode(context).endswith("\ufffd"):
                continue  # no prompt ends in half a character
            pieces, rest = stream(tokenizer, ids[split:], context)
            assert "".join(pieces) == whole[len(tokenizer.decode(context)) :] and rest == ""
            assert all("\ufffd" not in piece for piece in pieces)
        # Text comes as soon as it is there, not at the end.
        if len(ids) > 20 and kind != "word-level":
            assert sum(map(bool, stream(tokenizer, ids)[0])) > len(ids) / 6


def test_words_keep_their_spaces_after_a_prompt(write):
    tokenizer = load_tokenizer(write(template(sentencepiece(), "<s> $A", "<s>")))
    prompt, more = tokenizer.encode("the fox"), tokenizer.encode("the world", special=False)
    assert "".join(stream(tokenizer, more, prompt)[0]) == " the world"
    assert "".join(stream(tokenizer, more, prompt[:1])[0]) == "the world"
    # A special token between two words doesn't swallow the space of the second.
    end = tokenizer.backend.token_to_id("</s>")
    ids = [*more, end, *more]
    assert "".join(stream(tokenizer, ids)[0]) == tokenizer.decode(ids) == "the world the world"


@pytest.mark.parametrize("kind", KINDS)
def test_any_ids_can_be_streamed(kind, write):
    tokenizer = load_tokenizer(write(KINDS[kind]()))
    rng = random.Random(1)
    for length in [5, 20, 60] * 20 + [2000]:
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(length)]
        if kind == "byte-level" and length == 20:  # nothing but bytes that continue a character
            ids = rng.choices([tokenizer.backend.token_to_id(c) for c in "¡¢£¤¥"], k=length)
        if kind.startswith("sentence"):  # no letters that are given as bytes
            ids = [i for i in ids if not 3 <= i < 3 + 128]
        pieces, rest = stream(tokenizer, ids)
        shown, whole = "".join(pieces) + rest, tokenizer.decode(ids)
        if kind.startswith("sentence"):
            # There, one bad byte changes how all the bytes before it show, which are out by then.
            assert [c for c in shown if c.isascii()] == [c for c in whole if c.isascii()]
        else:
            assert shown == whole


def test_a_long_stream_takes_no_longer_per_token(write):
    tokenizer = load_tokenizer(write(byte_level()))
    decoded = []
    streamer = Streamer(lambda ids: decoded.append(len(ids)) or tokenizer.decode(ids), tokenizer.encode("x" * 500))
    text = tokenizer.encode("the quick 日本 " * 200)
    "".join(streamer.put(i) for i in text)
    assert np.mean(decoded[10:]) < 10
    # Nor if none of it is text; and that too comes as it is made, with what follows it.
    garbage = [tokenizer.backend.token_to_id("¡")] * 2000
    shown = "".join(streamer.put(i) for i in garbage)
    assert max(decoded[10:]) <= 300 and len(shown) > 1900
    shown += "".join(streamer.put(i) for i in text) + streamer.finish()
    assert shown == "\ufffd" * 2000 + tokenizer.decode(text)


def test_half_a_character_at_the_end_is_shown_as_such(write):
    tokenizer = load_tokenizer(write(byte_level(size=259)))
    ids = tokenizer.encode("a€")
    assert len(ids) == 4
    assert stream(tokenizer, ids[:3]) == (["a", "", ""], "\ufffd")
    assert stream(tokenizer, ids) == (["a", "", "", "€"], "")


def test_stop_texts_are_found_across_pieces():
    rng = random.Random(2)
    for _ in range(500):
        text = "".join(rng.choices("ab\n", k=30))
        stops = ["".join(rng.choices("ab\n", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 3))]
        # The one that is complete first counts; of two that are complete at once, the longer.
        ends = [(end, -len(s)) for s in stops for end in range(len(text) + 1) if text[:end].endswith(s)]
        expected = text[: sum(min(ends))] if ends else text
        until, out, position = StopTexts(stops), "", 0
        while position < len(text) and not until.stopped:
            step = rng.randint(0, 4)
            out += until.put(text[position : position + step])
            position += step
            assert expected.startswith(out)
        assert out + until.finish() == expected
        assert until.stopped == any(s in text for s in stops)
    with pytest.raises(ValueError, match="empty"):
        StopTexts(["x", ""])
    # Nothing is held back that can't be the beginning of a stop.
    until = StopTexts(["\n\n"])
    assert [until.put(p) for p in ("a\n", "b", "\n", "\nc")] == ["a", "\nb", "", ""]


def test_a_saved_folder_works_by_itself(write, tmp_path, agree):
    made = template(byte_level(), "<s> $A", "<s>")
    folder = write(
        made, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"},
        special_tokens_map={"pad_token": "<pad>"}, generation_config={"eos_token_id": [1, 9]},
        config={"eos_token_id": 4}, added_tokens={"<x>": 420},
    )  # fmt: skip
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "loud.jinja").write_text("{{ messages[0].content | upper }}!")
    (folder / "model.safetensors").write_bytes(b"not the tokenizer's")
    tokenizer = load_tokenizer(folder)
    target = tmp_path / "new" / "saved"
    tokenizer.save(target)
    tokenizer.save(folder)  # onto itself: nothing to do
    names = {p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()}
    assert names == {
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "chat_template.jinja", "generation_config.json", "additional_chat_templates/loud.jinja",
    }  # fmt: skip
    for name in names:
        assert (target / name).read_bytes() == (folder / name).read_bytes()
    again = load_tokenizer(target)
    chat = [{"role": "user", "content": "hey"}]
    assert again.encode("hey") == tokenizer.encode("hey")
    agree(target, ["hey"], bos=0, eos=1, pad=2)
    assert again.chat(chat) == tokenizer.chat(chat) == again.encode("hey!", special=False)
    assert again.render_chat(chat, chat_template="loud") == "HEY!"
    assert (again.eos_ids, again.pad_id, again.vocab_size) == (tokenizer.eos_ids, tokenizer.pad_id, 421)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="can't be saved: .* is gone"):
        tokenizer.save(tmp_path / "more")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "has no tokenizer.json: copy it"),
        ({"tokenizer.model": b"\n\x0e"}, "has no tokenizer.json, only sentencepiece's tokenizer.model"),
        ({"qwen.tiktoken": b"IQ== 0"}, "only a tiktoken file"),
        ({"vocab.json": b"{}", "merges.txt": b""}, r"only vocab.json with merges.txt, .*\)\.save_pretrained\("),
    ],
)
def test_a_folder_without_tokenizer_json_says_what_to_do(files, said, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said) as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_damaged_files_are_named(write):
    folder = write(byte_level())
    whole = (folder / "tokenizer.json").read_bytes()
    damaged = [b"", whole[: len(whole) // 2], b"[]", b"{}", b'{"model": {"type": "BPE", "vocab": 3}}', b"\x00" * 100,
               whole.replace(b'"ByteLevel"', b'"NewFangled"'), whole.replace(b'"id": 0', b'"id": "a"')]  # fmt: skip
    for content in damaged:
        assert content != whole
        (folder / "tokenizer.json").write_bytes(content)
        with pytest.raises(ValueError, match="is damaged or too new") as error:
            load_tokenizer(folder)
        assert str(folder / "tokenizer.json") in str(error.value) and "\n" not in str(error.value)
    (folder / "tokenizer.json").write_bytes(whole)
    flags = {"content": "<x>", "special": True}
    for name, content, said in [
        ("tokenizer_config", "{", "no JSON"),
        ("tokenizer_config", "[" * 100_000, "no JSON"),
        ("tokenizer_config", "[1]", "holds a list"),
        ("tokenizer_config", {"eos_token": 5}, "5 is no special token"),
        ("tokenizer_config", {"eos_token": {"lstrip": True}}, "is no special token"),
        ("tokenizer_config", {"pad_token": ""}, "'' is no special token"),
        ("tokenizer_config", {"added_tokens_decoder": {"one": flags}}, "no added tokens"),
        ("tokenizer_config", {"added_tokens_decoder": {"420": 3}}, "no added tokens"),
        ("tokenizer_config", {"added_tokens_decoder": [3]}, "no added tokens"),
        ("tokenizer_config", {"added_tokens_decoder": {"420": {"content": ["x"]}}}, "no added tokens"),
        ("tokenizer_config", {"added_tokens_decoder": {"500": flags}}, "calls '<x>' token 500, .* it would be 420"),
        ("tokenizer_config", {"chat_template": 7}, "chat_template is neither"),
        ("tokenizer_config", {"chat_template": [{"name": "default"}]}, "chat_template is neither"),
        ("special_tokens_map", {"additional_special_tokens": [None, 4]}, "4 is no special token"),
        ("generation_config", {"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ("config", {"pad_token_id": [True]}, "pad_token_id is .True."),
    ]:
        path = folder / f"{name}.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(ValueError, match=said) as error:
            load_tokenizer(folder)
        assert str(path) in str(error.value) and "\n" not in str(error.value)
        path.unlink()
    load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<x>", "lstrip": "yes"}}))
    with pytest.raises(ValueError, match="'<x>', 'lstrip': 'yes'} is no special token: "):
        load_tokenizer(folder)


def test_without_the_library_one_line_says_how_to_get_it(write):
    code = (
        "import sys; sys.modules['tokenizers'] = sys.modules['jinja2'] = sys.modules['huggingface_hub'] = None\n"
        "import overspill.zoo.tokenizer, overspill.zoo.chat, overspill.zoo.hub, overspill.zoo.speaking\n"
        "from overspill.zoo.command import app\n"
        "for call in (lambda: overspill.zoo.tokenizer.load_tokenizer('.'),\n"
        "             lambda: overspill.zoo.hub.fetch('org/name'), lambda: overspill.zoo.chat.render('x', [{}])):\n"
        "    try: call()\n"
        "    except ModuleNotFoundError as error: print(error)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(out) == 3 and all(line.endswith("pip install 'overspill[hub]'") for line in out), out


def test_a_path_may_be_text_or_path(write):
    folder = write(byte_level())
    assert isinstance(folder, pathlib.Path)
    assert load_tokenizer(folder).encode("x") == load_tokenizer(str(folder)).encode("x")
