"""A model's own tokenizer: `tokenizer.json` and the files beside it, read by the `tokenizers` library."""

import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .chat import choose_template, read_templates, render
from .hub import fetch, model_ids, need, one_line, read_optional
from .streaming import Streamer

# What a model folder holds of its tokenizer, in the order of how much depends on it.
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
         "chat_template.jinja", "chat_template.json", "generation_config.json")  # fmt: skip
_TEMPLATE_FOLDER = "additional_chat_templates"
# Vocabularies of other libraries, which say what the tokens are and not all of how text is cut into them.
_OTHERS = {
    "tokenizer.model": "sentencepiece's tokenizer.model",
    "spiece.model": "sentencepiece's spiece.model",
    "tekken.json": "Mistral's tekken.json",
    "vocab.json": "vocab.json with merges.txt",
    "*.tiktoken": "a tiktoken file",
    "tiktoken.model": "a tiktoken file",
}
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


class Tokenizer:
    """Text to token ids and back, in the way of one model; `load_tokenizer` makes it.

    - `backend`: the `tokenizers.Tokenizer` inside, which neither cuts nor pads.
    - `vocab_size`: the highest id that stands for something, plus one. A model's own is often larger: `generate`
        takes this one as `allowed`.
    - `special_tokens`: what the model folder calls its special tokens, such as `{"bos_token": "<s>"}`.
    - `bos_id`, `pad_id`: int, or None where the model has none.
    - `eos_ids`: every id that ends a text, to give to `generate` as `stop_ids`.
    - `chat_templates`: Jinja by name.
    """

    def __init__(
        self,
        backend: Any,
        *,
        folder: pathlib.Path,
        special_tokens: Mapping[str, str],
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        pad_id: int | None = None,
        begin: Sequence[int] = (),
        end: Sequence[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ):
        self.backend = backend
        self.folder = folder
        self.special_tokens = dict(special_tokens)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_id, self.eos_ids, self.pad_id = bos_id, tuple(eos_ids), pad_id
        self.chat_templates = dict(chat_templates or {})
        # What `encode` adds that the backend doesn't add by itself.
        self._begin, self._end = list(begin), list(end)

    def encode(self, text: str | bytes, special: bool = True) -> list[int]:
        """The ids of a text, with the special tokens that the model expects around it unless `special` is False.

        Special tokens that are spelled out in the text become such tokens either way. Bytes are taken for UTF-8.
        Raises ValueError for what is no text.
        """
        if not isinstance(text, str | bytes):
            raise ValueError(f"encode takes one text, and batch a list of them; got {one_line(repr(text), 80)}")
        try:
            text = text.decode() if isinstance(text, bytes) else text
            text.encode()  # half of a surrogate pair is in a string, but not in any text
        except UnicodeError:
            raise ValueError(f"{one_line(repr(text), 80)} is no valid text") from None
        try:
            ids = self.backend.encode(text, add_special_tokens=special).ids
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(f"{one_line(repr(text), 80)} can't be encoded: {one_line(error)}") from None
        return [*self._begin, *ids, *self._end] if special else ids

    def decode(self, ids: Any, skip_special: bool = True) -> str:
        """The text of a sequence of ids, without special tokens unless `skip_special` is False.

        Bytes that are no UTF-8 show as U+FFFD. Raises ValueError for an id outside the vocabulary, and for more than
        one row of ids.
        """
        ids = list(ids)
        if any(np.ndim(i) for i in ids):
            raise ValueError("decode takes one row of ids, got several: decode them row by row")
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} is outside the tokenizer's vocabulary, 0 to {self.vocab_size - 1}")
        return self.backend.decode(ids, skip_special_tokens=skip_special)

    def streamer(self, context: Any = (), *, skip_special: bool = True) -> Streamer:
        """Text from ids that come one by one, after those of `context` (see `streaming.Streamer`).

        `put(id)` gives the text that the id completes, `finish()` what is left at the end.
        """
        return Streamer(lambda ids: self.decode(ids, skip_special=skip_special), context)

    def batch(self, texts: Any, side: str = "left", *, special: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """A sequence of texts, or of ids as `encode` and `chat` give them, as one padded batch.

        Gives `(tokens, mask)`: int32 and bool, `[batch, length]` with the length of the longest; the mask is True at
        real tokens. Padding is `pad_id`, or an end-of-text id or 0 in models that have none: the mask hides it.

        Raises ValueError for no texts, one of no tokens, or another `side` than "left" and "right".
        """
        if side not in ("left", "right"):
            raise ValueError(f"side must be 'left' or 'right', where the padding goes, not {side!r}")
        if isinstance(texts, str | bytes) or not len(texts):
            raise ValueError(f"batch takes a list of one or more texts, got {one_line(repr(texts), 80)}")
        rows = [self.encode(t, special) if isinstance(t, str | bytes) else [int(i) for i in t] for t in texts]
        for i, row in enumerate(rows):
            if not row:
                raise ValueError(f"text {i} of the batch, {one_line(repr(texts[i]), 80)}, has no tokens")
        pad = next((i for i in (self.pad_id, *self.eos_ids) if i is not None), 0)
        shape = len(rows), max(map(len, rows))
        tokens, mask = np.full(shape, pad, np.int32), np.zeros(shape, bool)
        for i, row in enumerate(rows):
            where = slice(shape[1] - len(row), None) if side == "left" else slice(len(row))
            tokens[i, where], mask[i, where] = row, True
        return tokens, mask

    def render_chat(
        self,
        messages: Any,
        *,
        add_generation_prompt: bool = True,
        tools: Any = None,
        documents: Any = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation by the model's chat template; see `chat.render` for arguments and errors.

        `chat_template` is the name of one of `chat_templates`, or Jinja to use instead.
        """
        template = choose_template(self.chat_templates, chat_template, tools=tools is not None)
        named = {name: self.special_tokens[name] for name in _TEMPLATE_TOKENS if name in self.special_tokens}
        return render(
            template, messages, add_generation_prompt=add_generation_prompt, tools=tools, documents=documents,
            **(named | variables),
        )  # fmt: skip

    def chat(
        self, messages: Any, *, add_generation_prompt: bool = True, tools: Any = None, **variables: Any
    ) -> list[int]:
        """The ids of a conversation: `render_chat`, encoded.

        A template writes all special tokens itself, so no others are added: there is one beginning, not two.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables)
        return self.encode(text, special=False)

    def save(self, folder: str | os.PathLike) -> None:
        """Copies the files that the tokenizer came from into a model folder, each whole or not at all.

        Raises ValueError if they are gone, OSError if the folder can't be written to.
        """
        target = pathlib.Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        if not (self.folder / FILES[0]).is_file():
            raise ValueError(f"the tokenizer can't be saved: {str(self.folder / FILES[0])!r}, its source, is gone")
        templates = sorted(self.folder.glob(f"{_TEMPLATE_FOLDER}/*.jinja"))
        names = [*FILES, *(f"{_TEMPLATE_FOLDER}/{file.name}" for file in templates)]
        for name in names:
            source, to = self.folder / name, target / name
            if not source.is_file() or (to.exists() and to.samefile(source)):
                continue
            to.parent.mkdir(exist_ok=True)
            partial = to.with_name(f".{to.name}.partial")
            shutil.copyfile(source, partial)
            os.replace(partial, to)

    def __repr__(self) -> str:
        chat = "chat templates " + ", ".join(self.chat_templates) if self.chat_templates else "no chat template"
        return (
            f"Tokenizer({type(self.backend.model).__name__}, {self.vocab_size:,} ids, bos_id {self.bos_id}, "
            f"eos_ids {self.eos_ids}, pad_id {self.pad_id}, {chat})"
        )


def load_tokenizer(folder_or_name: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a model folder, or of a model on the Hugging Face Hub (`hub.fetch`).

    Reads tokenizer.json and, where there are any, tokenizer_config.json, special_tokens_map.json,
    added_tokens.json, chat templates, and the ids in generation_config.json and config.json. Special tokens are as
    in transformers: tokenizer.json says which are put around a text. For the class LlamaTokenizer, whose
    tokenizer.json sometimes doesn't, `add_bos_token` and `add_eos_token` in tokenizer_config.json count too.

    Raises ValueError, naming the file, for a folder without tokenizer.json and for damaged files;
    ModuleNotFoundError without the `tokenizers` library.
    """
    library = need("tokenizers", "a tokenizer")
    folder = fetch(folder_or_name, weights=False)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(_without_json(folder))
    try:
        backend = library.Tokenizer.from_file(str(path))
    except BaseException as error:
        # The library's own panics are no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{str(path)!r} is damaged or too new for tokenizers {library.__version__}: "
                         f"{one_line(error)}") from None  # fmt: skip
    # Some files carry the length of their training batches: no text may be cut to that.
    backend.no_truncation()
    backend.no_padding()
    config = read_optional(folder, "tokenizer_config.json")
    names, more = _special_tokens(folder, config)
    llama = str(config.get("tokenizer_class", "")).removesuffix("Fast") == "LlamaTokenizer"
    for name, text in (_LLAMA_TOKENS if llama else {}).items():
        if name not in names and backend.token_to_id(text) is not None:
            names[name] = text
    special = [(token, True) for token in names.values()] + [(token, False) for token in more]
    _add_tokens(library, backend, folder, config, [(t, named) for t, named in special if t is not None])
    texts = {name: _content(token) for name, token in names.items() if token is not None}
    ids = {name: backend.token_to_id(text) for name, text in texts.items()}
    bos, eos, pad = (ids.get(name) for name in ("bos_token", "eos_token", "pad_token"))
    if bos is None and "bos_token" not in names:
        bos = next(iter(model_ids(folder, "bos_token_id")), None)
    if pad is None:
        pad = next(iter(model_ids(folder, "pad_token_id")), None)
    begin = end = ()
    if llama:
        around = _added_around(backend)
        if config.get("add_bos_token") is True and bos is not None and bos not in around[0]:
            begin = (bos,)
        if config.get("add_eos_token") is True and eos is not None and eos not in around[1]:
            end = (eos,)
    return Tokenizer(
        backend,
        folder=folder,
        special_tokens=texts,
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys((*model_ids(folder, "eos_token_id"), *(() if eos is None else (eos,))))),
        pad_id=pad,
        begin=begin,
        end=end,
        chat_templates=read_templates(folder, config),
    )


def _without_json(folder: pathlib.Path) -> str:
    held = [what for pattern, what in _OTHERS.items() if any(folder.glob(pattern))]
    only = f", only {held[0]}, which isn't read" if held else ""
    return (
        f"{str(folder)!r} has no tokenizer.json{only}: copy it from where the model came from, or make it with "
        f"transformers: AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )


def _content(token: Any) -> str:
    return token if isinstance(token, str) else token["content"]


def _special_tokens(folder: pathlib.Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """(special tokens by name, None for one that is said to be absent; more without names), as texts or mappings."""
    names: dict[str, Any] = {}
    more: list[Any] = []
    sources = [("tokenizer_config.json", config)]
    # Since tokenizer_config.json lists the added tokens, the older file has nothing to say.
    if "added_tokens_decoder" not in config:
        sources.append(("special_tokens_map.json", read_optional(folder, "special_tokens_map.json")))
    for file, settings in sources:
        for key, value in settings.items():
            if key in ("additional_special_tokens", "extra_special_tokens") and value:
                more += value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            elif key in _TEMPLATE_TOKENS or (key.endswith("_token") and isinstance(value, str | dict)):
                names[key] = value
        for token in (*names.values(), *more):
            text = token.get("content") if isinstance(token, dict) else token
            if not isinstance(text, str | None) or (isinstance(token, dict) and text is None) or text == "":
                raise ValueError(f"{str(folder / file)!r} is damaged: {one_line(repr(token), 80)} is no special token")
    return names, more


def _add_tokens(
    library: Any, backend: Any, folder: pathlib.Path, config: Mapping[str, Any], special: list[tuple[Any, bool]]
) -> None:
    """Adds what tokenizer.json lacks of the tokens that the files beside it list.

    `special` are those that must be special, each with whether it has a name, such as `eos_token`; one that hasn't
    and is there already stays as it is.
    """
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    file, decoder = "tokenizer_config.json", config.get("added_tokens_decoder")
    if decoder is None:
        file = "added_tokens.json"
        older = {text: i for text, i in read_optional(folder, file).items() if text not in known}
        contents = [_content(token) for token, _ in special]
        decoder = {i: {"content": text, "special": text in contents} for text, i in older.items()}
    try:
        listed = sorted((int(i), dict(token)) for i, token in decoder.items())
        wanted = [(i, library.AddedToken(t["content"], **{f: t[f] for f in flags if f in t})) for i, t in listed]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{str(folder / file)!r} is damaged: no added tokens ({one_line(error)})") from None
    for i, token in wanted:
        if token.content in known and repr(known[token.content]) == repr(token):
            continue
        backend.add_tokens([token])
        if token.content not in known and backend.token_to_id(token.content) != i:
            raise ValueError(
                f"{str(folder / file)!r} calls {token.content!r} token {i}, but by tokenizer.json it would be "
                f"{backend.token_to_id(token.content)}: one of them is of another model"
            )
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for token, named in special:
        if _content(token) in known and (known[_content(token)].special or not named):
            continue
        settings = {f: token[f] for f in flags[:-1] if isinstance(token, dict) and f in token}
        try:
            added = library.AddedToken(_content(token), **{"normalized": False, **settings}, special=True)
        except TypeError as error:
            shown = one_line(repr(token), 80)
            raise ValueError(f"{str(folder)!r}: {shown} is no special token: {one_line(error)}") from None
        backend.add_tokens([added])


def _added_around(backend: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the backend itself puts before and after a text."""
    for probe in ("a", "0", *sorted(backend.get_vocab(with_added_tokens=True), key=len)[:64]):
        bare = backend.encode(probe, add_special_tokens=False).ids
        if bare:
            whole = backend.encode(probe, add_special_tokens=True)
            first = next((i for i, added in enumerate(whole.special_tokens_mask) if not added), 0)
            return whole.ids[:first], whole.ids[first + len(bare) :]
    return [], []
