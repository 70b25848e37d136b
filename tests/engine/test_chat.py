"""Chat templates against transformers' apply_chat_template; which template is taken; refusals."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from moelight.core.errors import CheckpointError, ConfigError, InputError
from moelight.engine.chat import ChatTemplate, Conversation, check_messages
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


@pytest.mark.parametrize("in_files", [False, True])
def test_named_templates_are_chosen_as_transformers_does(in_files: bool, tmp_path: Path) -> None:
    tool_use = "{{ tools | length }}" + CHATML
    if in_files:
        save(tmp_path, CHATML, in_file=True)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use, encoding="utf-8")
    else:
        save(tmp_path, [{"name": "tool_use", "template": tool_use}, {"name": "default", "template": CHATML}])
    ours, theirs = Tokenizer.from_dir(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        expected = theirs.apply_chat_template(TALKS[0], tools=tools, add_generation_prompt=True, return_dict=False)
        assert ours.render(Conversation(messages=TALKS[0], tools=tools)) == expected


def test_a_template_of_the_users_comes_before_the_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("{{ bos_token }}mine", encoding="utf-8")
    tokenizer = Tokenizer.from_dir(save(tmp_path, "theirs", in_file=True), tmp_path / "mine")
    assert tokenizer.render(TALKS[0]) == tokenizer.encode("<s>mine")
    with pytest.raises(ConfigError, match=r"chat template .*absent: cannot be read"):
        Tokenizer.from_dir(tmp_path, tmp_path / "absent")


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_of_a_megabyte_is_refused(where: str, tmp_path: Path) -> None:
    save(tmp_path, "x" * 1_000_000, in_file=where.endswith("jinja"))
    with pytest.raises(CheckpointError, match=rf"{where}: .*larger than 256\.0KiB"):
        Tokenizer.from_dir(tmp_path)


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
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": {"type": "text", "text": "x"}}],
        [{"role": "user", "content": "x"}, 3],
        [{"role": "assistant", "tool_calls": "x"}],
        [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    ],
)
def test_what_is_no_conversation(messages: object) -> None:
    with pytest.raises(InputError, match="message"):
        ChatTemplate(CHATML, special_tokens={}).render(messages)


def test_keys_that_are_null_are_dropped() -> None:
    template = ChatTemplate("{{ messages[0] | tojson }}", special_tokens={})
    assert template.render([{"role": "user", "content": "x", "name": None}]) == '{"role": "user", "content": "x"}'


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_what_is_no_text_is_refused_and_never_opened(kind: str, tmp_path: Path) -> None:
    part = {"type": kind, kind: {"url": f"file://{tmp_path}/absent"}, "text": "x"}
    with pytest.raises(InputError, match=f"message 1, part 2: '{kind}' is not served"):
        check_messages([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])


def test_text_parts_are_joined_unless_the_template_walks_them() -> None:
    talk = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    plain = "{{ messages[0]['content'] }}"
    walking = "{% for m in messages %}{% set c = m.content %}{% for p in c %}<{{ p.text }}>{% endfor %}{% endfor %}"
    words = "{% for word in messages[0].content.split() %}<{{ word }}>{% endfor %}"
    shown = [ChatTemplate(text, special_tokens={}).render(talk) for text in (plain, walking, words)]
    assert shown == ["a\nb", "<a><b>", "<a><b>"]
    assert Conversation(messages=talk).shown == "a\nb"


CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": '{"q": 1}'}}]},
]
CALLS = "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{{ m.role + ':' + m.content }}" + CALLS, "user:hiassistant:look"),
        ("{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}", "hilook"),
        ("{% if not m.content is string or m.content %}{{ m.content or '' }}" + CALLS + "{% endif %}", "hilook"),
        ("{% if m.content == '' %}{{ raise_exception('empty') }}{% endif %}{{ m.content or 'nothing' }}", "hinothing"),
    ],
)
def test_null_content_beside_calls_is_an_empty_text_or_none(body: str, expected: str) -> None:
    template = ChatTemplate("{% for m in messages %}" + body + "{% endfor %}", special_tokens={})
    assert template.render(CALLING) == expected
    absent = [CALLING[0], {key: value for key, value in CALLING[1].items() if value is not None}]
    assert template.render(absent) == expected
    assert template.render([CALLING[0], {"role": "assistant", "content": None, "reasoning": "r"}]) is not None


def test_tool_calls_reach_the_template_as_objects() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, 2]}'}}
    empty = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}}
    talk = [
        {"role": "assistant", "content": None, "tool_calls": [call, empty]},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "f"},
    ]
    template = ChatTemplate(
        "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{{ messages[0].content is defined }} {{ messages[1].tool_call_id }} {{ messages[1].name }}",
        special_tokens={},
    )
    assert template.render(talk) == '{"x": [1, 2]}{}True c1 f'
    assert call["function"]["arguments"] == '{"x": [1, 2]}'  # type: ignore[index]


@pytest.mark.parametrize("name", ["messages", "tools", "raise_exception", "add_generation_prompt", "range", "_x"])
def test_kwargs_do_not_shadow_what_the_template_has(name: str) -> None:
    conversation = Conversation(messages=TALKS[0], template_kwargs={name: 1})
    with pytest.raises(InputError, match=f"may not set '{name}'"):
        ChatTemplate(CHATML, special_tokens={}).render(conversation)


FAULTS = {
    "its own refusal": "{{ raise_exception('no\nsystem role') }}",
    "syntax": "{% for %}",
    "unknown filter": "{{ messages | nothing }}",
    "undefined attribute": "{{ messages.a.b }}",
    "type": "{{ messages + 1 }}",
    "division": "{{ 1 / 0 }}",
    "missing key": "{{ {}.pop('x') }}",
    "value": "{{ 'x'.index('y') }}",
    "unknown tag": "{% foo %}",
    "unclosed generation": "{% generation %}x",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_one_clear_line(kind: str) -> None:
    with pytest.raises(InputError) as refusal:
        ChatTemplate(FAULTS[kind], special_tokens={}).render(TALKS[0])
    assert refusal.value.code == "chat_template"
    assert "\n" not in str(refusal.value)


def test_strftime_now_is_today() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}", special_tokens={}).render(TALKS[0])
    assert text == str(dt.datetime.now().year)


def test_jinja_and_tokenizers_are_not_needed_to_import() -> None:
    import subprocess
    import sys

    code = "import sys, moelight.engine.tokenizer; print(sorted({'jinja2', 'tokenizers', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
