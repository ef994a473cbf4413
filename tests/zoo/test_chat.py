import datetime
import enum
import json
import pathlib
import re

import numpy as np
import pytest

from overspill.zoo import chat
from overspill.zoo.chat import choose_template, read_templates, render

pytest.importorskip("jinja2")

# Templates of our own in the manner of well-known ones.
HEADERS = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|header|>\\n\\n" }}
{%- if tools is not none %}
    {{- "You may call:\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception("Only one call at a time!") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>' + message.role + '<|header|>\\n\\n' -}}
        {{- '{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' + call.arguments | tojson + '}<|eot|>' }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '<|header|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|header|>\\n\\n' }}
{%- endif %}
"""
CHATML = """\
{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
<|im_start|>system
You are a test.<|im_end|>
    {% endif %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}{{ '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
NAMESPACE = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% set ns = namespace(is_first=true, is_tool=false, system='', seen=[]) %}\
{%- for message in messages %}\
{%- if message['role'] == 'system' %}{%- set ns.system = ns.system + message['content'] %}{%- endif %}\
{%- endfor %}{{ bos_token }}{{ ns.system }}\
{%- for message in messages %}\
{%- if message['role'] == 'system' %}{%- continue %}{%- endif %}\
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{ '<|User|>' + message['content'] }}{%- endif %}\
{%- if message['role'] == 'assistant' %}\
{%- generation %}\
{% set content = message['content'].split('</think>')[-1] %}\
{{ '<|Assistant|>' + content + eos_token }}\
{%- endgeneration %}\
{%- endif %}\
{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}\
{%- if ns.is_first %}{{ '<|outputs|>' }}{%- set ns.is_first = false %}{%- endif %}\
{{ '<|output|>' + message['content'] }}{%- endif %}\
{%- if message.content == 'stop here' %}{% break %}{% endif %}\
{%- endfor -%}\
{%- if ns.is_tool %}{{ '<|outputs end|>' }}{% endif %}\
{% if add_generation_prompt and not ns.is_tool %}{{ '<|Assistant|>' }}{% if thinking is defined and thinking %}\
{{ '<think>\\n' }}{% endif %}{% endif %}"""
TEMPLATES = {"headers": HEADERS, "chatml": CHATML, "namespace": NAMESPACE}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

USER = {"role": "user", "content": "  What's 2 < 3 & \"4\"?\n"}
TALK = [
    {"role": "system", "content": " Be brief. "},
    USER,
    {"role": "assistant", "content": "<think>hm</think>Yes. 日本"},
    {"role": "user", "content": "And\n\nthen?"},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather", "description": "Tells <the> weather in 'Zürich'",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}  # fmt: skip
CALLS = [
    {"role": "user", "content": "How is the weather?"},
    {"role": "assistant", "content": None,
     "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich & <here>"}}}]},
    {"role": "tool", "content": "{\"sky\": \"clear\"}"},
]  # fmt: skip


def test_headers_style():
    assert render(HEADERS, TALK, **TOKENS) == (
        "<s><|start|>system<|header|>\n\nBe brief.<|eot|>"
        "<|start|>user<|header|>\n\nWhat's 2 < 3 & \"4\"?<|eot|>"
        "<|start|>assistant<|header|>\n\n<think>hm</think>Yes. 日本<|eot|>"
        "<|start|>user<|header|>\n\nAnd\n\nthen?<|eot|>"
        "<|start|>assistant<|header|>\n\n"
    )
    assert render(HEADERS, [USER], add_generation_prompt=False, **TOKENS) == (
        "<s><|start|>system<|header|>\n\n<|eot|><|start|>user<|header|>\n\nWhat's 2 < 3 & \"4\"?<|eot|>"
    )


def test_tools_are_json_as_the_model_knows_it():
    text = render(HEADERS, CALLS, tools=[WEATHER], **TOKENS)
    assert text == (
        "<s><|start|>system<|header|>\n\nYou may call:\n"
        + json.dumps(WEATHER, indent=4, ensure_ascii=False)
        + "\n\n<|eot|><|start|>user<|header|>\n\nHow is the weather?<|eot|>"
        '<|start|>assistant<|header|>\n\n{"name": "weather", "parameters": {"place": "Zürich & <here>"}}<|eot|>'
        '<|start|>tool<|header|>\n\n{"sky": "clear"}<|eot|>'
        "<|start|>assistant<|header|>\n\n"
    )


def test_chatml_style():
    assert render(CHATML, TALK[1:3], **TOKENS) == (
        "<|im_start|>system\nYou are a test.<|im_end|>\n"
        "<|im_start|>user\n  What's 2 < 3 & \"4\"?\n<|im_end|>\n"
        "<|im_start|>assistant\n<think>hm</think>Yes. 日本<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_namespace_style():
    assert render(NAMESPACE, TALK, **TOKENS) == (
        "<s> Be brief. <|User|>  What's 2 < 3 & \"4\"?\n<|Assistant|>Yes. 日本</s><|User|>And\n\nthen?<|Assistant|>"
    )
    tools = [{"role": "user", "content": "u"}, {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    assert render(NAMESPACE, tools, **TOKENS) == "<s><|User|>u<|outputs|><|output|>1<|output|>2<|outputs end|>"
    assert render(NAMESPACE, [USER], thinking=True, **TOKENS).endswith("<|Assistant|><think>\n")
    stop = [{"role": "user", "content": "stop here"}, USER]
    assert render(NAMESPACE, stop, add_generation_prompt=False, **TOKENS) == "<s><|User|>stop here"


# Small templates, each for one thing that transformers' Jinja has.
DETAILS = {
    "json": "{{ {'b': '<&>é', 'a': [1, 2.5, none, true]} | tojson }}|{{ [1, {'x': 2}] | tojson(indent=2) }}"
    "|{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}|{{ 'é' | tojson(ensure_ascii=true) }}",
    "undefined": "[{{ nothing }}{{ messages[0].nothing }}{{ pad_token }}{{ unk_token is defined }}]",
    "documents": "{{ documents is none }}{{ tools is none }}{{ documents is defined }}",
    "loops": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ loop.index }}{{ m.role }}"
    "{% endfor %}",
    "generation": "{% set x = 'a' %}{% generation %}{% set x = 'b' %}{{ x }}{% endgeneration %}{{ x }}"
    "{% for m in messages %}{% generation %}\n{{ loop.index }}{{ m.role }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(a=1, self='s') %}{% set ns.b = ns.a + 1 %}{{ ns.a }}{{ ns.b }}{{ ns.self }}"
    "{{ namespace({'c': 3}).c }}",
    "dict": "{{ dict(a=1, b=[2]) }}{{ dict([('x', 'y')]).items() | list }}",
    "blocks": "  {% if true %}  \n    a\n  {% endif %}\n\n{#- none -#}\n  b {{ '' }}\n",
    "macros": "{% macro m(x, n=2) %}{{ x * n }}{% endmacro %}{{ m('ab') }}{% set t %}x{{ m('y', n=3) }}{% endset %}"
    "{{ t }}",
    "filters": "{{ messages | map(attribute='role') | join(', ') }}{{ '%s-%d' | format('a', 3) }}{{ 'a,b'.split(',') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'x' ~ 1 }}{{ '{:>4}'.format('é') }}",
    "slices": "{{ messages[-1].content[::-1] }}{{ messages[1:] | length }}{{ 'role' in messages[0] }}",
    "tests": "{{ messages is iterable and messages is not mapping }}{{ messages[0].content is string }}"
    "{{ add_generation_prompt }}{{ custom.depth is number }}{{ custom.on is true }}{{ custom }}",
    "escapes": "{{ '\\n' }}{{ \"\\\"\" }}<b>&amp;{{ '<b>' }}{{ '<b>' | e }}",
}


@pytest.fixture(scope="module")
def reference():
    """transformers' rendering, with a tokenizer that has the tokens in `TOKENS`."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "u": 2}, unk_token="u"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **TOKENS)
    return lambda template, messages, **variables: theirs.apply_chat_template(
        messages, chat_template=template, tokenize=False, **variables
    )


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("name", [*TEMPLATES, *DETAILS])
def test_the_same_text_as_transformers(name, prompt, reference):
    template = (TEMPLATES | DETAILS)[name]
    custom = {"depth": np.float32(2.5), "on": np.bool_(True), "list": (1, "a")}
    for messages in (TALK, TALK[1:], [USER], CALLS):
        if name in ("chatml", "namespace", "slices", "tests") and messages is CALLS:
            continue
        for tools in (None, [WEATHER]):
            variables = {"add_generation_prompt": prompt, "tools": tools, "custom": custom}
            expected = reference(template, messages, **variables)
            assert render(template, messages, **variables, **TOKENS) == expected
    assert render(template, TALK, documents=[{"title": "t", "text": "x"}], custom=custom, **TOKENS) == reference(
        template, TALK, documents=[{"title": "t", "text": "x"}], add_generation_prompt=True, custom=custom
    )


def test_the_date_is_todays(reference):
    template = (
        "{{ strftime_now('%Y-%m-%d') }}{% if not date_string is defined %}{% set date_string = '26' %}{% endif %}"
        "{{ date_string }}"
    )
    before = datetime.date.today()
    text = render(template, [USER])
    assert text in (f"{before}26", f"{datetime.date.today()}26")
    assert render(template, [USER], date_string="x").endswith("x")
    assert reference(template, [USER]) in (f"{before}26", f"{datetime.date.today()}26")


def test_what_was_passed_is_not_changed():
    messages = [{"role": "user", "content": ["a", {"k": None}], "name": None}]
    template = "{% for m in messages %}{{ m }}{% endfor %}"
    assert render(template, messages) == "{'role': 'user', 'content': ['a', {'k': None}]}"
    assert messages == [{"role": "user", "content": ["a", {"k": None}], "name": None}]
    for attempt in ("{{ messages.append(1) }}", "{{ messages[0].update(a=1) }}", "{{ messages[0].content.pop() }}"):
        with pytest.raises(ValueError, match="does what it must not"):
            render(attempt, messages)


ATTACKS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ ''['__class__'] }}{{ (''|attr('__class__')).__mro__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'].sys }}",
    "{{ dict.__base__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ (''|attr('format'))('{0.__class__}') }}{{ ('{0.__class__.__base__.__subclasses__}'|attr('format'))(1) }}",
    "{{ ['{0.__class__.__base__}'] | map('format', 1) | first }}{{ ''.__class__() }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ namespace({'__call__': 1}) }}",
    "{% set f = ''.join %}{{ f.__self__.__class__ }}",
    "{% for i in range(999999999) %}x{% endfor %}",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_templates_stay_in_the_sandbox(attack):
    # Jinja gives something undefined for an attribute that is off limits: written out, that is nothing at all.
    try:
        assert render(attack, [USER]) == ""
    except ValueError as error:
        assert re.match("the chat template (does what it must not|fails on these messages): ", str(error))
        assert "\n" not in str(error) and "<class" not in str(error)


def test_no_object_gets_into_a_template(tmp_path):
    class Colour(enum.StrEnum):
        RED = "red"

    class Sneaky(str):
        def upper(self):
            raise AssertionError("called")

    sneaky = [{"role": Colour.RED, "content": Sneaky("a"), Sneaky("k"): np.int64(4)}]
    assert render("{{ messages[0].content.upper() }}{{ messages[0].role.name }}{{ messages[0] }}", sneaky) == (
        "A{'role': 'red', 'content': 'a', 'k': 4}"
    )
    kinds = {"ndarray": np.zeros(2), "function": open, "bytes": b"x", type(tmp_path).__name__: tmp_path}
    for kind, value in kinds.items():
        with pytest.raises(ValueError, match=rf"messages\[1\]\['content'\]\[0\] must be text.* not a {kind}"):
            render("x", [USER, {"role": "user", "content": [value]}])
        with pytest.raises(ValueError, match="custom must be text"):
            render("x", [USER], custom=value)
    with pytest.raises(ValueError, match=r"tools\[0\] must be text.* not a function: give its JSON schema"):
        render("x", [USER], tools=[print])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% if %}", "is no Jinja: line 1: Expected an expression"),
        ("a\n{% for x in y %}", "is no Jinja: line 2"),
        ("{{ x | nonesuch }}", "is no Jinja: line 1: No filter named 'nonesuch'"),
        ("{% generation %}", "is no Jinja"),
        ("{% include 'x' %}", "fails on these messages: TypeError: no loader"),
        ("{{ raise_exception('roles must\nalternate') }}", "refuses these messages: roles must alternate$"),
        ("{{ messages[0].a.b }}", "fails on these messages: UndefinedError: 'dict object' has no attribute 'a'"),
        ("{{ 'a' + 1 }}", "fails on these messages: TypeError"),
        ("{{ 1 // 0 }}", "fails on these messages: ZeroDivisionError"),
        ("{{ nothing() }}", "fails on these messages: UndefinedError: 'nothing' is undefined"),
        ("{{ messages | tojson(indent='x' * 3, separators=4) }}", "fails on these messages: TypeError"),
        ("{{ nothing | tojson }}", "fails on these messages: TypeError: .* not JSON serializable"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "fails on these messages: RecursionError"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "can't be compiled|is no Jinja|fails"),
    ],
)
def test_what_goes_wrong_is_one_line(template, said):
    with pytest.raises(ValueError, match=said) as error:
        render(template, [USER])
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("messages", ["hello", {}, USER, [], None, ["hello"], [[USER]], [3]])
def test_what_is_no_chat_is_refused(messages):
    with pytest.raises(ValueError, match=r"a chat is a list of messages|messages\[0\] must be a mapping"):
        render("x", messages)


def test_the_jinja_must_be_one_whose_sandbox_holds(monkeypatch):
    monkeypatch.setattr(chat.importlib.metadata, "version", lambda name: "3.1.5")
    chat._environment.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="needs jinja2 3.1.6 or newer.* this is 3.1.5: pip install"):
        render("never compiled before", [USER])


def folder(tmp_path, name="model", config=None, **files):
    made = tmp_path / name
    (made / "additional_chat_templates").mkdir(parents=True)
    for file, text in files.items():
        (made / file.replace("__", "/").replace("_dot_", ".")).write_text(text)
    return made, config or {}


def test_templates_come_from_the_file_that_counts(tmp_path):
    both = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    files = {"chat_template_dot_json": '{"chat_template": "j"}', "chat_template_dot_jinja": "f"}
    for i, (config, used, expected) in enumerate(
        [
            ({}, {}, {}),
            ({"chat_template": "c"}, {}, {"default": "c"}),
            ({"chat_template": None}, {}, {}),
            ({"chat_template": both}, {}, {"default": "d", "tool_use": "t"}),
            ({"chat_template": {"default": "d"}}, {}, {"default": "d"}),
            ({}, {"chat_template_dot_json": files["chat_template_dot_json"]}, {"default": "j"}),
            ({"chat_template": "c"}, {"chat_template_dot_json": files["chat_template_dot_json"]}, {"default": "c"}),
            ({"chat_template": "c"}, files, {"default": "f"}),
            ({}, files | {"additional_chat_templates__rag_dot_jinja": "r"}, {"default": "f", "rag": "r"}),
        ]
    ):
        assert read_templates(*folder(tmp_path, str(i), config, **used)) == expected


def test_the_right_template_is_chosen():
    both = {"default": "d", "tool_use": "t", "rag": "r"}
    assert choose_template(both, None, tools=False) == "d"
    assert choose_template(both, None, tools=True) == "t"
    assert choose_template({"default": "d"}, None, tools=True) == "d"
    assert choose_template(both, "rag", tools=True) == "r"
    assert choose_template(both, "{{ bos_token }}", tools=True) == "{{ bos_token }}"
    with pytest.raises(ValueError, match="none of the chat templates 'rag', 'x' is the default"):
        choose_template({"rag": "r", "x": "x"}, None, tools=False)
    with pytest.raises(ValueError, match="this model has no chat template"):
        choose_template({}, None, tools=False)


@pytest.fixture
def model(tmp_path):
    """A model folder whose tokenizer begins every text with <s>, and whose template writes it too."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    specials = ["<s>", "</s>", "<|User|>", "<|Assistant|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), special_tokens=specials, show_progress=False
    )
    made.train_from_iterator(["a b c"], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(tmp_path / "tokenizer.json"))
    config = {**TOKENS, "chat_template": NAMESPACE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_chat_begins_once(model):
    from overspill.zoo.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    ids = tokenizer.chat(TALK)
    assert ids.count(tokenizer.bos_id) == 1 and ids[0] == tokenizer.bos_id
    assert tokenizer.decode(ids, skip_special=False) == tokenizer.render_chat(TALK)
    assert tokenizer.encode("a")[0] == tokenizer.bos_id  # though a text by itself gets one
    # Without one in the template there is none: what was trained on is what the template says.
    plain = tokenizer.chat(TALK[1:2], chat_template="{{ messages[0].content }}")
    assert plain == tokenizer.encode(TALK[1]["content"], special=False)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(model))
    for messages in (TALK, [USER]):
        for prompt in (False, True):
            expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
            assert tokenizer.chat(messages, add_generation_prompt=prompt) == expected
    assert tokenizer.chat([USER], thinking=True) == theirs.apply_chat_template(
        [USER], add_generation_prompt=True, return_dict=False, thinking=True
    )


def test_special_tokens_reach_the_template(model):
    from overspill.zoo.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    text = tokenizer.render_chat([USER], chat_template="{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ x }}", x=3)
    assert text == "<s>|</s>||3"
    assert tokenizer.render_chat([USER], chat_template="{{ bos_token }}", bos_token="!") == "!"
    (model / "tokenizer_config.json").write_text(json.dumps(TOKENS))
    with pytest.raises(ValueError, match="this model has no chat template"):
        load_tokenizer(model).chat([USER])


def test_damaged_template_files_are_named(tmp_path):
    for name, content, said in (
        ("chat_template.jinja", b"\xff\xfe", "can't be read"),
        ("chat_template.json", b"[]", "holds a list"),
        ("chat_template.json", b'{"chat_template": 5}', "chat_template is neither"),
    ):
        made = pathlib.Path(tmp_path, re.sub(r"\W", "", said))
        made.mkdir()
        (made / name).write_bytes(content)
        with pytest.raises(ValueError, match=said) as error:
            read_templates(made, {})
        assert str(made / name) in str(error.value)
