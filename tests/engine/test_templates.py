"""Templates in the manner of the big families, each against transformers' apply_chat_template, text for text."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from moelight.core.errors import InputError
from moelight.engine.chat import ChatTemplate, Conversation, check_messages

# Calls within the assistant's turn, tools as JSON before the last question, roles by turns.
MIXTRAL = """{{- bos_token }}{%- set ns = namespace(index=0) %}
{%- set asked = messages | selectattr("role", "equalto", "user") | list %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- if tools is not none and message == asked[-1] %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() if key != "return" %}
                    {{- '"' + key + '": ' + (value | tojson) + ("" if loop.last else ", ") }}
                {%- endfor %}
                {{- "}}" + (", " if not loop.last else "") }}
            {%- endfor %}
            {{- "] [/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " ~ message["content"] ~ " [/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] " }}
        {%- for call in message.tool_calls %}{{- call.function | tojson }}{% endfor %}{{ eos_token }}
    {%- elif message.role == "assistant" %}{{- " " + message["content"] | trim + eos_token }}
    {%- elif message.role in ["tool", "tool_results"] %}
        {{- "[TOOL_RESULTS] " + {"content": message.content, "id": message.get("tool_call_id")} | tojson }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}{{- ns.index }}"""

# Thoughts are kept only after the last question; enable_thinking=false closes them at once.
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi and message.role == "user" and message.content is string
        and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thoughts = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not thoughts and '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thoughts.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif -%}
{% set ns = namespace(is_first=false, is_tool=false, system='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- set ns.system = ns.system + ('' if ns.is_first else '\\n\\n') + message['content'] %}{%- endif %}{%- endfor -%}
{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{ '<｜User｜>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined %}{{ '<｜Assistant｜>' }}
{%- for tool in message['tool_calls'] %}
{{- '<｜call｜>' + tool['type'] + '<｜sep｜>' + tool['function']['name'] + '\\n```json\\n'
 + tool['function']['arguments'] | tojson(indent=2) + '\\n```' }}{%- endfor %}{{ eos_token }}
{%- elif message['role'] == 'assistant' %}{% set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{ '<｜Assistant｜>' + content + eos_token }}{%- endif %}
{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{{ '<｜out｜>' + message['content'] }}{%- endif %}
{%- endfor -%}
{% if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

# Tools as TypeScript by recursive macros, today's date, reasoning_effort, thoughts in a channel of their own.
GPT_OSS = """{%- macro kind(spec, depth) -%}
    {%- if spec.type == "array" -%}{{ kind(spec["items"], depth) }}[]
    {%- elif spec.type == "object" -%}{{ "{\\n" }}
        {%- for name, inner in spec.properties.items() -%}
            {{- "  " * depth + name -}}{%- if name not in (spec.required or []) -%}?{%- endif -%}
            {{- ": " }}{{ kind(inner, depth + 1) }}{{ ",\\n" -}}
        {%- endfor -%}{{ "}" }}
    {%- elif spec.enum is defined and spec.enum -%}{{ '"' + spec.enum | join('" | "') + '"' }}
    {%- elif spec.type is iterable and spec.type is not string -%}{{ spec.type | join(" | ") }}
    {%- else -%}{{ spec.type }}{%- endif -%}
{%- endmacro -%}
{%- if not model_identity is defined %}{%- set model_identity = "You are a model." %}{%- endif %}
{{- "<|start|>system<|message|>" + model_identity + "\\nCurrent date: " + strftime_now("%Y-%m-%d") }}
{{- "\\nReasoning: " ~ (reasoning_effort if reasoning_effort is defined else "medium") }}{{- "<|end|>" }}
{%- if messages[0].role in ["system", "developer"] %}
    {%- set instructions, rest = messages[0].content, messages[1:] %}
{%- else %}{%- set instructions, rest = "", messages %}{%- endif %}
{%- if instructions or tools %}{{- "<|start|>developer<|message|>" + instructions }}
    {%- for tool in tools or [] %}
        {{- "\\ntype " + tool.function.name + " = (_: " }}{{ kind(tool.function.parameters, 1) }}{{ ") => any;" }}
    {%- endfor %}{{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in rest -%}
    {%- if message.role == "assistant" -%}
        {%- if message.thinking %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set call = message.tool_calls[0].function %}
            {{- "<|start|>assistant to=functions." ~ call.name ~ "<|message|>" ~ call.arguments | tojson ~ "<|call|>" }}
            {%- set last.name = call.name %}
        {%- else %}{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}{%- endif %}
    {%- elif message.role == "tool" -%}
        {%- if last.name is none %}{{- raise_exception("a tool's answer without a call") }}{%- endif %}
        {{- "<|start|>functions." + last.name + "<|message|>" + message.content | tojson + "<|end|>" }}
    {%- else -%}{{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""

LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string }}
{{- "\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- set first = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{{- first + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Content by parts through a macro, neighbours through the loop.
GLM = """[gMASK]<sop>{%- macro visible(content) -%}
{%- if content is string %}{{- content }}
{%- elif content is iterable and content is not mapping %}
{%- for item in content %}{%- if item is mapping and item.type == 'text' %}{{- item.text }}{%- endif %}{%- endfor %}
{%- else %}{{- content }}{%- endif %}{%- endmacro -%}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{% set ns.last = loop.index0 -%}{%- endif %}{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible(m.content) }}{{- '/nothink' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- elif m.role == 'assistant' -%}<|assistant|>{{ visible(m.content | default('')).strip() }}
{%- elif m.role == 'tool' -%}{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|observation|>' }}{% endif %}
{{- m.content }}{%- if loop.nextitem is defined and loop.nextitem.role == 'tool' %}+{% endif %}
{%- elif m.role == 'system' -%}<|system|>
{{ visible(m.content) }}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""

# The tags of jinja2's and transformers' extensions, filters by name, blocks, calls, string methods of many kinds.
TAGS = """{% macro turn(role) %}<{{ role | upper }}>{{ caller() }}</{{ role.title() }}>{% endmacro %}
{% for message in messages if message.role != 'tool' %}
  {% if message.role == 'system' %}{% continue %}{% endif %}
  {% if loop.index > 3 %}{% break %}{% endif %}
  {% call turn(message.role) %}{% generation %}{% set inner = message.content | default('none', true) %}
{{ inner | replace('a', 'A') | indent(2) }}{% endgeneration %}{{ inner is defined }}{% endcall %}
{% endfor %}
{% filter trim %}  {{ messages | map(attribute='role') | unique | sort | join('/') }} {% endfilter %}
{{ '%s-%05.2f' % (messages | length, 1.5) }} {{ '{:>6}|{x!r}'.format('ab', x=1) }} {{ "a,b".split(',')[1] ~ 1 ~ none }}
{{ messages | groupby('role') | map('first') | list | tojson }}
{{ [3, 1, 2] | sort(reverse=true) | batch(2, 0) | list }}
{{ dict(a=1, b=[1, 2.5]) | tojson(indent=1, sort_keys=true) }}
{{ messages[0] | tojson(separators=(',', ':'), ensure_ascii=true) }}
{% for key, value in messages[0] | items %}{{ key }}={{ value }};{% endfor %}
{{ 7 // 2 }} {{ 2 ** 5 }} {{ (1, 2) + (3,) }} {{ 'x' * 3 }}
{% set text %}{{ bos_token }}{{ eos_token }}{% endset %}
{{ text | length }} {{ text.center(20, '.') }} {{ cycler('a').next() }}"""

TEMPLATES = {"mixtral": MIXTRAL, "qwen": QWEN, "deepseek": DEEPSEEK, "gpt-oss": GPT_OSS, "llama": LLAMA}
TEMPLATES |= {"glm": GLM, "tags": TAGS}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'What it\'s like <there> & "then"',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "array", "items": {"type": ["integer", "null"]}},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                },
                "required": ["city"],
            },
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1]}}}
TALKS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " What's 2 < 3 && 世? \n"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\nsum\n</think>\n\n4 and a half", "reasoning": "by hand"},
        {"role": "user", "content": "3+3?"},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "reasoning_content": "I must ask.", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": 21}', "tool_call_id": "c1", "name": "weather"},
        {"role": "tool", "content": "again", "tool_call_id": "c1"},
        {"role": "assistant", "content": " Warm. "},
    ],
]
KWARGS: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False, "reasoning_effort": "high", "date_string": "1 May 2030", "eos_token": "<end>"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerFast:
    inner = Inner(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, **SPECIAL)


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_transformers(name: str, theirs: PreTrainedTokenizerFast) -> None:
    ours = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL)
    for talk, tools, kwargs, opened in itertools.product(TALKS, [None, TOOLS], KWARGS, [True, False]):
        expected = theirs.apply_chat_template(
            talk, tools=tools, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=opened, **kwargs
        )
        conversation = Conversation(
            messages=check_messages(talk), tools=tools, add_generation_prompt=opened, template_kwargs=kwargs
        )
        assert ours.render(conversation) == expected, (talk, tools, kwargs)


@pytest.mark.parametrize("name", ["qwen", "deepseek", "gpt-oss", "llama", "glm"])
@pytest.mark.parametrize("reply", ["The sum", "The sum ", "one\n\ntwo\n"])
def test_the_final_message_is_continued_as_transformers_does(
    name: str, reply: str, theirs: PreTrainedTokenizerFast
) -> None:
    contents: list[Any] = [reply, [{"type": "text", "text": "x"}, {"type": "text", "text": reply}]]
    for content in contents[: 2 if name == "glm" else 1]:
        talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": content}]
        expected = theirs.apply_chat_template(
            talk, chat_template=TEMPLATES[name], tokenize=False, continue_final_message=True
        )
        conversation = Conversation(messages=talk, add_generation_prompt=False, continue_final_message=True)
        assert ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL).render(conversation) == expected


@pytest.mark.parametrize(
    ("template", "last", "opened", "told"),
    [
        ("{{ messages[0].content }}", "x", True, "exclude each other"),
        ("{{ messages[0].content }}", "x", False, "does not write the final message"),
        ("{{ messages[1].content | upper }}", "x", False, "does not write the final message"),
        ("{{ messages }}", [], False, "no content"),
    ],
)
def test_what_cannot_be_continued(template: str, last: Any, opened: bool, told: str) -> None:
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": last}]
    conversation = Conversation(messages=talk, add_generation_prompt=opened, continue_final_message=True)
    with pytest.raises(InputError, match=told):
        ChatTemplate(template, special_tokens={}).render(conversation)


def test_a_long_conversation_is_within_the_budget(theirs: PreTrainedTokenizerFast) -> None:
    turns = [{"role": "user", "content": "why? " * 40}, {"role": "assistant", "content": "because. " * 40}] * 400
    for name in ("qwen", "glm"):
        expected = theirs.apply_chat_template(turns, tools=TOOLS, chat_template=TEMPLATES[name], tokenize=False)
        conversation = Conversation(messages=turns, tools=TOOLS, add_generation_prompt=False)
        assert ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL).render(conversation) == expected
