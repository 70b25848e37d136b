"""Tool calls of every format: read from answers in the form that the families publish, and forced by grammars."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from moelight.core.errors import InputError
from moelight.core.request import StructuredOutputs
from moelight.engine.constraints import Constraints
from moelight.engine.tokenizer import Tokenizer
from moelight.engine.tool_calls import TOOL_FORMATS, ToolRequest, call_id, find_tool_format, grammar_literal

SPECIAL = [
    *("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|call|>", "<|constrain|>", "<|python_tag|>"),
    *("[TOOL_CALLS]", "[ARGS]", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|tool_call_start|>", "<|tool_call_end|>"),
]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "near": {"type": "object", "properties": {"km": {"type": "number"}}, "required": ["km"]},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
LIMA = {"city": 'Lima "é世" <b>\\n', "days": 3, "unit": "C", "near": {"km": 1.5}}
PARIS = {"city": "Paris"}
lima, paris = json.dumps(LIMA, ensure_ascii=False), json.dumps(PARIS)


def hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in calls)


def fields(opening: str, closing: str, values: dict[str, Any]) -> str:
    texts = {key: each if isinstance(each, str) else json.dumps(each) for key, each in values.items()}
    return "".join(f"{opening.format(key)}{text}{closing}" for key, text in texts.items())


def coder(values: dict[str, Any]) -> str:
    inner = fields("<parameter={}>\n", "\n</parameter>\n", values)
    return f"<tool_call>\n<function=get_weather>\n{inner}</function>\n</tool_call>"


def glm(values: dict[str, Any]) -> str:
    inner = fields("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", values)
    return f"<tool_call>get_weather\n{inner}</tool_call>"


def deepseek(*given: str, block: bool) -> str:
    head, tail, between = "get_weather<｜tool▁sep｜>", "", ""
    if block:
        head, tail, between = "function<｜tool▁sep｜>get_weather\n```json\n", "\n```", "\n"
    calls = [f"<｜tool▁call▁begin｜>{head}{each}{tail}<｜tool▁call▁end｜>" for each in given]
    return f"<｜tool▁calls▁begin｜>{between.join(calls)}<｜tool▁calls▁end｜>"


def kimi(*given: str) -> str:
    heads = [f"functions.get_weather:{number}<|tool_call_argument_begin|>{each}" for number, each in enumerate(given)]
    calls = "".join(f"<|tool_call_begin|>{each}<|tool_call_end|>" for each in heads)
    return f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"


def harmony(given: str) -> str:
    return f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{given}"


PYTHONIC = '[get_weather(city={}, days=3, unit="C", near={{"km": 1.5}}), get_weather(city="Paris")]'.format(
    json.dumps(LIMA["city"], ensure_ascii=False)
)
LISTED = ", ".join(f'{{"name": "get_weather", "arguments": {each}}}' for each in (lima, paris))
# Each format: what its template says, and answers with both calls.
ANSWERS: dict[str, list[tuple[str, str]]] = {
    "hermes": [("<tool_call>", hermes(("get_weather", lima), ("get_weather", paris)))],
    "qwen-coder": [("<tool_call> <function=", f"{coder(LIMA)}\n{coder(PARIS)}")],
    "glm": [("<tool_call> <arg_key>", f"{glm(LIMA)}\n{glm(PARIS)}")],
    "llama": [
        ("<|python_tag|>", "; ".join(f'{{"name": "get_weather", "parameters": {each}}}' for each in (lima, paris))),
    ],
    "pythonic": [
        ("[func_name1(", PYTHONIC),
        ("<|tool_call_start|>", f"<|tool_call_start|>{PYTHONIC}<|tool_call_end|>"),
    ],
    "deepseek": [
        ("<｜tool▁calls▁begin｜> ```json", deepseek(lima, paris, block=True)),
        ("<｜tool▁calls▁begin｜>", deepseek(lima, paris, block=False)),
    ],
    "kimi": [("<|tool_calls_section_begin|>", kimi(lima, paris))],
    "mistral": [
        ("[TOOL_CALLS]", f"[TOOL_CALLS][{LISTED}]"),
        ("[TOOL_CALLS] [ARGS]", f"[TOOL_CALLS]get_weather[ARGS]{lima}[TOOL_CALLS]get_weather[ARGS]{paris}"),
    ],
    "harmony": [("to=functions.", harmony(lima))],
}  # fmt: skip
CASES = [(name, template, text) for name, answers in ANSWERS.items() for template, text in answers]


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Inner(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in dict.fromkeys(SPECIAL)])
    inner.add_special_tokens([AddedToken("<eos>", special=True)])
    ends = frozenset({inner.token_to_id("<eos>")})
    return Tokenizer(inner, template=None, eos_token_ids=ends, named={})


def test_every_format_is_here() -> None:
    assert ANSWERS.keys() == TOOL_FORMATS.keys()
    assert find_tool_format(["{{ messages }}", "<think></think>"]) is None


@pytest.mark.parametrize(("name", "template", "text"), CASES)
def test_published_forms_are_read(name: str, template: str, text: str) -> None:
    form = find_tool_format([template])
    assert form is TOOL_FORMATS[name]
    schemas = ToolRequest(tools=TOOLS).schemas
    content, calls = form.read(text, schemas)
    assert content == "" and [call.name for call in calls] == ["get_weather"] * len(calls)
    assert [json.loads(call.arguments) for call in calls] == ([LIMA] if name == "harmony" else [LIMA, PARIS])
    if name not in ("llama", "pythonic"):  # whose answers are a call or text
        before = "I look: <|start|>assistant" if name == "harmony" else "I look: "
        content, again = form.read(before + text, schemas)
        assert content == "I look:" and again == calls
    for broken in (text[: text.index("Lima")], text.replace("get_weather", "", 1).replace("city", 'ci"ty', 1)):
        content, none = form.read(broken, schemas)
        assert none == [] and "city" in content.replace('ci"ty', "city")
    assert form.read("It rains <b>", schemas) == ("It rains <b>", [])


@pytest.mark.parametrize(("name", "template", "text"), CASES)
def test_a_forced_call_keeps_to_the_format(words: Tokenizer, name: str, template: str, text: str) -> None:
    literal = grammar_literal({words.token_text(token): token for token in words.special_ids})
    (eos,) = words.eos_token_ids
    constraints, form = Constraints(words, words.vocab_size), TOOL_FORMATS[name]

    def accepts(answer: str, **how: Any) -> bool:
        grammar = form.grammar(ToolRequest(tools=TOOLS, **how), literal, template)
        constraint = constraints.open(StructuredOutputs(grammar=grammar))
        for token in words.encode(answer):
            allowed = constraint.allowed()
            if allowed is None or not int(allowed[token // 32]) >> token % 32 & 1:
                return False
            constraint.go_on(token)
        if constraint.complete:
            return True
        allowed = constraint.allowed()
        return allowed is not None and bool(int(allowed[eos // 32]) >> eos % 32 & 1)

    try:
        assert accepts(text, choice="required")
        assert accepts(text, choice="get_weather") == (name == "harmony")  # exactly one call
        assert accepts(text, choice="required", parallel=False) == (name == "harmony")
        assert not accepts(text, choice="now")
        assert not accepts("It rains", choice="required")
        assert not accepts(text.replace(": 3" if ": 3" in text else "3", "x", 1), choice="required")
    finally:
        constraints.close()


def test_ids() -> None:
    assert len(call_id("a", 9)) == 9 and call_id("a", 9).isalnum()
    assert call_id("a", 29).startswith("call_") and len(call_id("a", 29)) == 29 != call_id("b", 29)
    content, (call, _) = TOOL_FORMATS["kimi"].read(kimi(paris, paris), {})
    assert (content, call.id) == ("", "functions.get_weather:0")


def test_a_text_that_no_grammar_can_bound() -> None:
    schema = {"properties": {"city": {"type": "string", "maxLength": 3}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(InputError, match="maxLength"):
        TOOL_FORMATS["glm"].grammar(ToolRequest(tools=tools, choice="f"), grammar_literal({}), "")
