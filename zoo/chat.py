"""Chat templates: messages to the text a model was trained on, by the Jinja template that comes with it.

A template is a program from whoever made the model, so it runs in jinja2's immutable sandbox and sees nothing but
plain data. What a sandbox doesn't bound is the time and the memory that it takes.
"""

import datetime
import functools
import importlib.metadata
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .hub import need, one_line, read_json

_DEFAULT = "default"
# Before, a template could get out of the sandbox.
_OLDEST_JINJA = (3, 1, 6)


def read_templates(folder: pathlib.Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a model folder by name: `"default"` and others such as `"tool_use"`. May be empty.

    Files of their own (chat_template.jinja, additional_chat_templates/NAME.jinja) come before what
    tokenizer_config.json holds, a text or a list of `{"name", "template"}`, and that before chat_template.json.
    Raises ValueError, naming the file, on anything else.
    """
    files = {_DEFAULT: folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    templates = {}
    for name, file in files.items():
        if file.is_file():
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{str(file)!r} can't be read: {one_line(error)}") from None
    source, value = folder / "tokenizer_config.json", tokenizer_config.get("chat_template")
    if not templates and value is None and (folder / "chat_template.json").is_file():
        source = folder / "chat_template.json"
        value = read_json(source).get("chat_template")
    return templates or _templates(value, source)


def _templates(value: Any, source: pathlib.Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {_DEFAULT: value}
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    if isinstance(value, dict) and all(isinstance(part, str) for item in value.items() for part in item):
        return value
    raise ValueError(f"{str(source)!r} is damaged: chat_template is neither a text nor a list of names and templates")


def choose_template(templates: Mapping[str, str], wanted: str | None, *, tools: bool) -> str:
    """The template to use: the one called `wanted`, or `wanted` itself, or the default one.

    With tools, one called `tool_use` is the default. Raises ValueError if there is none.
    """
    if wanted is not None:
        return templates.get(wanted, wanted)
    if tools and "tool_use" in templates:
        return templates["tool_use"]
    if _DEFAULT in templates:
        return templates[_DEFAULT]
    if templates:
        raise ValueError(f"none of the chat templates {', '.join(map(repr, templates))} is the default: name one")
    raise ValueError(
        "this model has no chat template: it isn't a chat model, or a chat_template.jinja is missing in its folder"
    )


def render(
    template: str,
    messages: Any,
    *,
    add_generation_prompt: bool = True,
    tools: Any = None,
    documents: Any = None,
    **variables: Any,
) -> str:
    """The text of a conversation.

    **Arguments:**

    - `template`: Jinja, as transformers understands it.
    - `messages`: a sequence of mappings, `{"role": ..., "content": ...}` each with what else the template knows
        (`tool_calls`, ...). Entries that are None count as absent.
    - `add_generation_prompt`: whether the text ends where the model's answer begins.
    - `tools`: JSON schemas of functions that the model may call.
    - `documents`: `{"title": ..., "text": ...}` each, for templates that know them.
    - `variables`: whatever else the template asks for; `bos_token`, `eos_token` and their like among them.

    Raises ValueError, in one line, for messages that aren't plain data, a template that isn't Jinja, that refuses
    these messages, fails on them, or asks for what a sandbox forbids.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(
            "a chat is a list of messages such as [{'role': 'user', 'content': 'Hello'}], "
            f"not {one_line(repr(messages), 80)}"
        )
    context: dict[str, Any] = {name: _plain(value, name) for name, value in variables.items()}
    for name, entries in (("messages", messages), ("tools", tools), ("documents", documents)):
        context[name] = None if entries is None else _entries(entries, name)
    # A template that is told `content` is None would write "None".
    context["messages"] = [{k: v for k, v in m.items() if v is not None} for m in context["messages"]]
    context["add_generation_prompt"] = add_generation_prompt
    compiled = _compile(template)
    try:
        return compiled.render(context)
    except Exception as error:  # whatever a program from elsewhere may do wrong
        jinja2 = need("jinja2", "a chat template")
        if isinstance(error, jinja2.exceptions.SecurityError):
            why = f"the chat template does what it must not: {one_line(error)}"
        elif isinstance(error, _Refusal):
            why = f"the chat template refuses these messages: {one_line(error)}"
        else:
            why = f"the chat template fails on these messages: {type(error).__name__}: {one_line(error)}"
        raise ValueError(why) from None


class _Refusal(Exception):
    """What a template raises by `raise_exception`."""


def _entries(entries: Any, name: str) -> list[dict[str, Any]]:
    plain = _plain(entries, name)
    if not isinstance(plain, list | tuple):
        raise ValueError(f"{name} must be a list of mappings, not {type(entries).__name__}")
    for i, entry in enumerate(plain):
        if not isinstance(entry, dict):
            raise ValueError(f"{name}[{i}] must be a mapping, not {type(entries[i]).__name__}")
    return list(plain)


def _plain(value: Any, where: str) -> Any:
    """`value` made anew of plain types: a template must get hold of no object with methods of its own."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    # Subclasses, such as those of Enum, lose what they are besides.
    for kind, plainly in ((str, str.__str__), (int, int.__int__), (float, float.__float__)):
        if isinstance(value, kind):
            return plainly(value)
    if isinstance(value, Mapping):
        return {_plain(k, where): _plain(v, f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(value, list | tuple):
        parts = [_plain(part, f"{where}[{i}]") for i, part in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    kind = "function: give its JSON schema" if callable(value) else type(value).__name__
    raise ValueError(f"{where} must be text, numbers, lists and mappings, not a {kind}")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter writes <, > and & as escapes, for HTML: models were trained on the characters themselves.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _raise_exception(message: Any) -> None:
    raise _Refusal(message)


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> Any:
    environment = _environment()
    try:
        return environment.from_string(template)
    except need("jinja2", "a chat template").exceptions.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is no Jinja: line {error.lineno}: {one_line(error.message)}") from None
    except (RecursionError, OverflowError, SyntaxError) as error:
        raise ValueError(f"the chat template can't be compiled: {type(error).__name__}: {one_line(error)}") from None


@functools.cache
def _environment() -> Any:
    """The Jinja that transformers offers to a template: its filters, globals and tags."""
    what = "a chat template"
    jinja2 = need("jinja2", what)
    version = importlib.metadata.version("jinja2")
    if tuple(int(n) for n in re.findall(r"\d+", version)[:3]) < _OLDEST_JINJA:
        oldest = ".".join(map(str, _OLDEST_JINJA))
        raise ModuleNotFoundError(
            f"{what} needs jinja2 {oldest} or newer, for its sandbox; this is {version}: pip install 'overspill[hub]'"
        )
    sandbox, ext = need("jinja2.sandbox", what), need("jinja2.ext", what)

    class Generation(ext.Extension):
        """`{% generation %}`, which marks the model's own words in training data, says nothing here."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # What is set inside doesn't leak out, as in transformers, where the block is a call.
            return jinja2.nodes.Scope(body, lineno=line)

    class Namespace(jinja2.utils.Namespace):
        """Takes no names with an underscore in front: by those Python finds its way to what is inside."""

        def __init__(*args: Any, **attributes: Any) -> None:
            self, *rest = args
            jinja2.utils.Namespace.__init__(self)
            for name, value in dict(*rest, **attributes).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace takes no name such as {name!r}")
            jinja2.utils.Namespace.__setitem__(self, name, value)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": Namespace,
        # A function instead of the class, which has attributes.
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
    }
    return environment
