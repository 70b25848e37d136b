"""Chat templates against transformers' apply_chat_template; refusals; what a hostile template may not do."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from moelight.core.errors import InputError
from moelight.engine.chat import ChatTemplate
from moelight.engine.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MIXTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
QWEN = """{%- set ns = namespace(multi=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi and message.role == "user" and not (message.content.startswith('<tool>')) %}
        {%- set ns.multi = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- if tools %}{{- tools | tojson }}{% endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and '</think>' in message.content %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- else %}
        {%- set content = message.content | trim %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
OLMO = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] }}
{% elif message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] }}
{% elif message['role'] == 'assistant' %}
{% generation %}{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endgeneration %}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
LOOPS = (
    "{% for message in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ message | tojson(indent=2) }}"
    "{% if message.role == 'system' %}{% continue %}{% endif %}{{ message.get('name', '') }}"
    "{{ unk_token }}\n{% endfor %}"
)
DATED = "{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}"
TEMPLATES = {"chatml": CHATML, "mixtral": MIXTRAL, "qwen": QWEN, "olmo": OLMO, "loops": LOOPS, "dated": DATED}

TALKS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "user", "content": "a < b && 'c' \"d\" é 世 <|im_end|>\n "}],
    [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>sum</think>\n4"},
        {"role": "user", "content": " 3+3? ", "name": "ann"},
    ],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ""}],
]


def save(directory: Path, template: object, *, in_file: bool = False) -> Path:
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Inner(models.BPE(vocab=alphabet, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    inner.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        "add_bos_token": True,
    }
    if in_file:
        (directory / "chat_template.jinja").write_text(str(template), encoding="utf-8")
    elif template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("in_file", [False, True])
def test_rendered_as_transformers_does(name: str, in_file: bool, tmp_path: Path) -> None:
    directory = save(tmp_path, TEMPLATES[name], in_file=in_file)
    ours, theirs = Tokenizer.from_dir(directory), AutoTokenizer.from_pretrained(directory)
    for talk in TALKS:
        if name == "mixtral" and talk[0]["role"] == "system":
            continue
        expected = theirs.apply_chat_template(talk, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert ours.render(talk) == expected, talk


def test_the_default_of_a_list_of_templates(tmp_path: Path) -> None:
    listed = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": CHATML}]
    ours = Tokenizer.from_dir(save(tmp_path, listed))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.render(TALKS[0]) == theirs.apply_chat_template(TALKS[0], add_generation_prompt=True, return_dict=False)


def test_the_file_comes_before_the_config(tmp_path: Path) -> None:
    save(tmp_path, "from the config")
    (tmp_path / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.decode(tokenizer.render(TALKS[0])) == "from the file"


@pytest.mark.parametrize("template", [None, [{"name": "tool_use", "template": "x"}], []])
def test_no_template_is_said(template: object, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refusal:
        Tokenizer.from_dir(save(tmp_path, template)).render(TALKS[0])
    assert refusal.value.code == "no_chat_template"


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "hello",
        [],
        {},
        ["hello"],
        [{}],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": 1, "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [{"role": "user", "content": "x"}, 3],
    ],
)
def test_what_is_no_conversation(messages: object) -> None:
    with pytest.raises(InputError, match="message"):
        ChatTemplate(CHATML, special_tokens={}).render(messages)


def test_keys_that_are_null_are_dropped() -> None:
    template = ChatTemplate("{{ messages[0] | tojson }}", special_tokens={})
    assert template.render([{"role": "user", "content": "x", "name": None}]) == '{"role": "user", "content": "x"}'


FAULTS = {
    "its own refusal": "{{ raise_exception('no\nsystem role') }}",
    "syntax": "{% for %}",
    "unknown filter": "{{ messages | nothing }}",
    "undefined attribute": "{{ messages.a.b }}",
    "type": "{{ messages + 1 }}",
    "division": "{{ 1 / 0 }}",
    "missing key": "{{ {}.pop('x') }}",
    "value": "{{ 'x'.index('y') }}",
    "endless": "{% for i in range(1000000000) %}x{% endfor %}",
    "recursion": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "unknown tag": "{% foo %}",
    "unclosed generation": "{% generation %}x",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_one_clear_line(kind: str) -> None:
    with pytest.raises(InputError) as refusal:
        ChatTemplate(FAULTS[kind], special_tokens={}).render(TALKS[0])
    assert refusal.value.code == "chat_template"
    assert "\n" not in str(refusal.value)


ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "by filter": "{{ '' | attr('__class__') }}",
    "by item": "{{ ''['__class__'] }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of a helper": "{{ strftime_now.__globals__['datetime'] }}",
    "globals of cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "self": "{{ self.__init__.__globals__ }}",
    "namespace": "{{ namespace.__init__.__globals__ }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format map": "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "format by reference": "{% set f = '{0.__class__}'.format %}{{ f('') }}",
    "format by filter": "{{ ['{0.__class__}'] | map('format', '') | list }}",
    "namespace attribute": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__ }}",
    "namespace at birth": "{{ namespace(__html__=raise_exception) }}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/passwd' %}",
    "change a message": "{{ messages.append({}) }}",
    "change a key": "{{ messages[0].update({'role': 'root'}) }}",
    "generator frame": "{{ (messages | map('upper')).gi_frame.f_back }}",
}


@pytest.mark.parametrize("kind", ESCAPES)
def test_a_template_cannot_leave_its_sandbox(kind: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    try:
        text = ChatTemplate(ESCAPES[kind], special_tokens={}).render(messages)
    except InputError:
        text = ""
    for secret in ("<class", "<module", "uid=", "root:", "frame", "function"):
        assert secret not in text
    assert messages == [{"role": "user", "content": "x"}]


def test_strftime_now_is_today() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}", special_tokens={}).render(TALKS[0])
    assert text == str(dt.datetime.now().year)


def test_jinja_and_tokenizers_are_not_needed_to_import() -> None:
    import subprocess
    import sys

    code = "import sys, moelight.engine.tokenizer; print(sorted({'jinja2', 'tokenizers', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
