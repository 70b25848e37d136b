"""Tool calls of every format: read from answers in the form that the families publish, and forced by grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from moelight.core.errors import InputError
from moelight.core.request import INVALID, ToolRequest
from moelight.engine.call_constraints import CallConstraints
from moelight.engine.constraints import Constraints
from moelight.engine.tokenizer import Tokenizer
from moelight.engine.tool_calls import TOOL_FORMATS, call_id, find_tool_format
from moelight.engine.tool_schemas import ArgumentFields

ROOT = Path(__file__).parents[2]
SPECIAL = [
    *("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|call|>", "<|constrain|>", "<|python_tag|>"),
    *("[TOOL_CALLS]", "[ARGS]", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<|START_ACTION|>", "<|END_ACTION|>", "<|tool_call|>"),
    *("<|tool_calls|>", "<|tool_call:begin|>", "<|tool_call:end|>", "<|tool_call:name|>", "<|tool_call:args|>"),
    *("<tool_sep:opensource>", "<arg_key:opensource>", "</arg_key:opensource>", "<arg_value:opensource>"),
    *("</arg_value:opensource>", "<minimax:tool_call>", "</minimax:tool_call>"),
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
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {call}}}\n</tool_call>' for name, call in calls)


def fields(opening: str, closing: str, values: dict[str, Any]) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return "".join(f"{opening.format(key)}{text}{closing}" for key, text in texts.items())


def coder(values: dict[str, Any]) -> str:
    inner = fields("<parameter={}>\n", "\n</parameter>\n", values)
    return f"<tool_call>\n<function=get_weather>\n{inner}</function>\n</tool_call>"


def glm(values: dict[str, Any]) -> str:
    inner = fields("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", values)
    return f"<tool_call>get_weather\n{inner}</tool_call>"


def deepseek(*inputs: str, block: bool) -> str:
    head, tail, between = "get_weather<｜tool▁sep｜>", "", ""
    if block:
        head, tail, between = "function<｜tool▁sep｜>get_weather\n```json\n", "\n```", "\n"
    calls = [f"<｜tool▁call▁begin｜>{head}{item}{tail}<｜tool▁call▁end｜>" for item in inputs]
    return f"<｜tool▁calls▁begin｜>{between.join(calls)}<｜tool▁calls▁end｜>"


def kimi(*inputs: str) -> str:
    heads = [f"functions.get_weather:{number}<|tool_call_argument_begin|>{item}" for number, item in enumerate(inputs)]
    calls = "".join(f"<|tool_call_begin|>{head}<|tool_call_end|>" for head in heads)
    return f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"


def harmony(inputs: str) -> str:
    return f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{inputs}"


def listed(begin: str, end: str, *values: str) -> str:
    calls = ", ".join(f'{{"name": "get_weather", "arguments": {item}}}' for item in values)
    return f"{begin}[{calls}]{end}"


def hunyuan(suffix: str, sep: str, line: str, *calls: dict[str, Any]) -> str:
    key = f"<arg_key{suffix}>{{}}</arg_key{suffix}>{line}<arg_value{suffix}>"
    inner = [fields(key, f"</arg_value{suffix}>{line}", values) for values in calls]
    texts = [f"<tool_call{suffix}>get_weather{sep}{line}{item}</tool_call{suffix}>" for item in inner]
    return f"<tool_calls{suffix}>{line}{line.join(texts)}{line}</tool_calls{suffix}>"


def invoked(block: str, mark: str, *calls: dict[str, Any]) -> str:
    texts = ""
    for values in calls:
        inner = ""
        for key, value in values.items():
            typed = f' string="{str(isinstance(value, str)).lower()}"' if mark else ""
            text = value if isinstance(value, str) else json.dumps(value)
            inner += f'<{mark}parameter name="{key}"{typed}>{text}</{mark}parameter>\n'
        texts += f'<{mark}invoke name="get_weather">\n{inner}</{mark}invoke>\n'
    return f"<{mark}{block}>\n{texts}</{mark}{block}>"


def solar(*values: str) -> str:
    head = "<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>"
    return "<|tool_calls|>" + "".join(f"{head}{item}<|tool_call:end|>" for item in values)


def gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return json.dumps(value)


def gemma_calls(*calls: dict[str, Any]) -> str:
    return "".join(f"<|tool_call>call:get_weather{gemma(values)}<tool_call|>" for values in calls)


PYTHONIC = '[get_weather(city={}, days=3, unit="C", near={{"km": 1.5}}), get_weather(city="Paris")]'.format(
    json.dumps(LIMA["city"], ensure_ascii=False)
)
LISTED = ", ".join(f'{{"name": "get_weather", "arguments": {item}}}' for item in (lima, paris))
# Each format: what its template says, and answers with both calls.
ANSWERS: dict[str, tuple[str, str]] = {
    "hermes": ("<tool_call>", hermes(("get_weather", lima), ("get_weather", paris))),
    "qwen-coder": ("<tool_call> <function=", f"{coder(LIMA)}\n{coder(PARIS)}"),
    "glm": ("<tool_call> <arg_key>", f"{glm(LIMA)}\n{glm(PARIS)}"),
    "llama": (
        "<|python_tag|>",
        "; ".join(f'{{"name": "get_weather", "parameters": {values}}}' for values in (lima, paris)),
    ),
    "pythonic": ("[func_name1(", PYTHONIC),
    "lfm": ("<|tool_call_start|>", f"<|tool_call_start|>{PYTHONIC}<|tool_call_end|>"),
    "deepseek": ("<｜tool▁calls▁begin｜> ```json", deepseek(lima, paris, block=True)),
    "deepseek-v3.1": ("<｜tool▁calls▁begin｜>", deepseek(lima, paris, block=False)),
    "kimi": ("<|tool_calls_section_begin|>", kimi(lima, paris)),
    "mistral": ("[TOOL_CALLS] [ARGS]", f"[TOOL_CALLS]get_weather[ARGS]{lima}[TOOL_CALLS]get_weather[ARGS]{paris}"),
    "mistral-list": ("[TOOL_CALLS]", f"[TOOL_CALLS][{LISTED}]"),
    "harmony": ("to=functions.", harmony(lima)),
    "gemma": ("<|tool_call>", gemma_calls(LIMA, PARIS)),
    "solar": ("<|tool_call:begin|>", solar(lima, paris)),
    "deepseek-v3.2": ("<｜DSML｜function_calls>", invoked("function_calls", "｜DSML｜", LIMA, PARIS)),
    "deepseek-v4": ("<｜DSML｜tool_calls>", invoked("tool_calls", "｜DSML｜", LIMA, PARIS)),
    "minimax-m2": ("<minimax:tool_call>", invoked("minimax:tool_call", "", LIMA, PARIS)),
    "cohere": (
        "<|START_ACTION|>",
        "<|START_ACTION|>["
        + ", ".join(
            f'{{"tool_call_id": "{n}", "tool_name": "get_weather", "parameters": {values}}}'
            for n, values in enumerate((lima, paris))
        )
        + "]<|END_ACTION|>",
    ),
    "hunyuan-v3": ("<tool_sep> <arg_key>", hunyuan("", "<tool_sep>", "\n", LIMA, PARIS)),
    "hunyuan-v3-opensource": (
        "<tool_sep:opensource> <arg_key:opensource>",
        hunyuan(":opensource", "<tool_sep:opensource>", "\n", LIMA, PARIS),
    ),
    "hunyuan-v4": ("<arg_key:opensource>", hunyuan(":opensource", "", "", LIMA, PARIS)),
    "longcat-fields": (
        "<longcat_tool_call> <longcat_arg_key>",
        "\n".join(map(glm, (LIMA, PARIS)))
        .translate(str.maketrans({"<": "<longcat_"}))
        .replace("<longcat_/", "</longcat_")
        .replace("<longcat_b>", "<b>"),
    ),
    "longcat": (
        "<longcat_tool_call>",
        hermes(("get_weather", lima), ("get_weather", paris)).replace("tool_call>", "longcat_tool_call>"),
    ),
    "glm-4.7": (
        "<tool_call> <arg_key>{k}</arg_key><arg_value>",
        hunyuan("", "", "", LIMA, PARIS).replace("<tool_calls>", "").replace("</tool_calls>", ""),
    ),
    "seed": (
        "<seed:tool_call> <function=",
        f"{coder(LIMA)}\n{coder(PARIS)}".replace("tool_call>", "seed:tool_call>"),
    ),
    "nemotron": ("<TOOLCALL>", listed("<TOOLCALL>", "</TOOLCALL>", lima, paris)),
    "minimax-m1": (
        "<beginning_of_sentence> <tool_calls>",
        "<tool_calls>\n"
        + "".join(f'{{"name": "get_weather", "arguments": {values}}}\n' for values in (lima, paris))
        + "</tool_calls>",
    ),
    "tool-calls": ("<tool_calls>", listed("<tool_calls>", "</tool_calls>", lima, paris)),
    "granite": ("<|tool_call|>", listed("<|tool_call|>", "", lima, paris)),
}
TEXT_OR_CALL = ("llama", "pythonic", "lfm")  # no text stands beside calls


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


@pytest.fixture(scope="module")
def calls(words: Tokenizer) -> Iterator[CallConstraints]:
    constraints = Constraints(words, words.vocab_size)
    yield CallConstraints(constraints)
    constraints.close()


def tool(parameters: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "get_weather", "parameters": parameters, **more}}]


def accepts(calls: CallConstraints, answer: str, request: ToolRequest) -> bool:
    """True if ``answer`` is a whole answer of the grammar of a forced call."""
    words = calls.constraints.tokenizer
    (eos,) = words.eos_token_ids
    constraint = calls.constraints.open(calls.structure(request))
    for token in words.encode(answer):
        allowed = constraint.allowed()
        if allowed is None or not int(allowed[token // 32]) >> token % 32 & 1:
            return False
        constraint.go_on(token)
    if constraint.complete:
        return True
    allowed = constraint.allowed()
    return allowed is not None and bool(int(allowed[eos // 32]) >> eos % 32 & 1)


def test_the_documentation_names_every_format() -> None:
    page = (ROOT / "docs" / "guides" / "reasoning.md").read_text(encoding="utf-8")
    assert [name for name in TOOL_FORMATS if f"`{name}`" not in page] == []
    assert f"tool calls of {len(TOOL_FORMATS)} formats" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_format_is_here() -> None:
    assert ANSWERS.keys() == TOOL_FORMATS.keys()
    assert find_tool_format(["{{ messages }}", "<think></think>"]) is None
    assert find_tool_format(["{% set ns = ']<]minimax[>[' %}{{ ns }}<tool_call>"]) is None  # known not to be read


@pytest.mark.parametrize("name", ANSWERS)
def test_published_forms_are_read(name: str) -> None:
    template, text = ANSWERS[name]
    assert find_tool_format([template]) == name
    form, arguments = TOOL_FORMATS[name], {"get_weather": ArgumentFields(WEATHER), "now": ArgumentFields({})}
    content, calls = form.read(text, arguments)
    assert content == "" and [call.name for call in calls] == ["get_weather"] * len(calls)
    assert [json.loads(call.arguments) for call in calls] == ([LIMA] if name == "harmony" else [LIMA, PARIS])
    if name not in TEXT_OR_CALL:
        before = "I look: <|start|>assistant" if name == "harmony" else "I look: "
        content, again = form.read(before + text, arguments)
        assert content == "I look:" and again == calls
    for broken in (text[: text.index("Lima")], text.replace("get_weather", "", 1).replace("city", 'ci"ty', 1)):
        content, none = form.read(broken, arguments)
        assert none == [] and "city" in content.replace('ci"ty', "city")
    assert form.read("It rains <b>", arguments) == ("It rains <b>", [])


@pytest.mark.parametrize("value", ['b"a"', "1 + 2j", "-2j", "...", "{1}", "{[1]}", "1e999", "f(1)", "{**x}", "[b'a']"])
def test_values_of_python_that_json_has_not(value: str) -> None:
    text = f"[get_weather(city={value})]"
    assert TOOL_FORMATS["pythonic"].read(text, {}) == (text, [])
    text = "[get_weather(city=-1.5, near={'km': [None, true, False]}, day='a' 'b')]"
    _, (call,) = TOOL_FORMATS["pythonic"].read(text, {})
    assert json.loads(call.arguments) == {"city": -1.5, "near": {"km": [None, True, False]}, "day": "ab"}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_forced_call_keeps_to_the_format(calls: CallConstraints, name: str) -> None:
    text, alone = ANSWERS[name][1], name == "harmony"
    required = ToolRequest(tools=TOOLS, choice="required", format=name)
    assert calls.check(required) == ()
    assert accepts(calls, text, required)
    named = replace(required, choice="get_weather")
    assert accepts(calls, text, named) == accepts(calls, text, replace(required, parallel=False)) == alone
    assert not accepts(calls, text, replace(required, choice="now"))
    assert not accepts(calls, "It rains", required)
    assert not accepts(calls, text.replace(": 3" if ": 3" in text else "3", "x", 1), required)
    content, read = calls.read(named, text)
    assert content == "" and calls.error(named, read) is None
    strange = calls.error(replace(named, choice="now"), read)
    assert strange is not None and strange.path == "/tool_calls/0/function/name"


# The same schema for the walk of response formats: what is noted, refused, and checked afterwards.
LOOSE = {
    "$defs": {"place": {"type": "object", "properties": {"in": {"$ref": "#/$defs/place"}, "name": {"type": "string"}}}},
    "properties": {
        "at": {"$ref": "#/$defs/place"},
        "day": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "code": {"type": "string", "pattern": "^[A-Z]+$", "minLength": 2, "maxLength": 2},
        "kind": {"enum": ["a b", 1, None], "nullable": True},
        "same": {"$ref": "#"},
    },
    "required": ["code", "more"],
}
VALUES = {
    "at": {"in": {"name": "x"}, "name": "y"},
    "day": "Mo",
    "tags": ["u"],
    "code": "PE",
    "kind": "a b",
    "same": {"code": "PE", "more": 0},
    "more": [1],
}
WRITTEN = {  # by formats with fields: references, alternatives and fields without a schema of their own too
    "qwen-coder": "<tool_call>\n<function=get_weather>\n{}</function>\n</tool_call>".format(
        fields("<parameter={}>\n", "\n</parameter>\n", VALUES)
    ),
    "pythonic": f"[get_weather({', '.join(f'{key}={json.dumps(value)}' for key, value in VALUES.items())})]",
    "hermes": hermes(("get_weather", json.dumps(VALUES))),
    "gemma": gemma_calls(VALUES),
    "deepseek-v3.2": invoked("function_calls", "｜DSML｜", VALUES),
    "hunyuan-v4": hunyuan(":opensource", "", "", VALUES),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_schemas_are_walked_as_those_of_response_formats(calls: CallConstraints, name: str) -> None:
    request = ToolRequest(tools=tool(LOOSE), choice="required", format=name)
    assert "tool get_weather: #/properties/tags: uniqueItems is checked in finished calls" in calls.check(request)
    assert any(": nullable is" in note for note in calls.check(request))
    text = WRITTEN[name]
    assert accepts(calls, text, request)
    assert not accepts(calls, text.replace("PE", "PER"), request)  # lengths are enforced everywhere
    content, (call,) = calls.read(request, text)
    assert (content, json.loads(call.arguments)) == ("", VALUES)
    assert calls.error(request, [call]) is None
    wrong = replace(call, arguments=json.dumps({**VALUES, "tags": ["u", "u"]}))
    problem = calls.error(request, [call, wrong])
    assert problem is not None and problem.code == INVALID and problem.message.startswith("call of get_weather:")
    assert (problem.path, problem.schema_path) == (
        "/tool_calls/1/function/arguments/tags",
        "/properties/tags/uniqueItems",
    )


def test_objects_that_gemma_may_choose_from(calls: CallConstraints) -> None:
    values = {"first name": {"km": [1.5, "x", {"in": None}], "at": "y"}}
    schema = {"properties": {"first name": {"enum": [values["first name"], "C"]}}, "required": ["first name"]}
    request = ToolRequest(tools=tool(schema), choice="required", format="gemma")
    text = gemma_calls(values)
    assert accepts(calls, text, request)
    _, (call,) = calls.read(request, text)
    assert json.loads(call.arguments) == values
    assert calls.error(request, [call]) is None


def test_what_of_strings_a_format_without_quotes_cannot_enforce(calls: CallConstraints) -> None:
    noted = calls.check(ToolRequest(tools=tool(LOOSE), choice="required", format="glm"))
    assert "tool get_weather: #/properties/code: pattern is checked in finished calls" in noted
    noted = calls.check(ToolRequest(tools=tool(LOOSE), choice="required", format="hermes"))
    assert not any("pattern" in note for note in noted)


@pytest.mark.parametrize("choice", ["auto", "required", "get_weather"])
@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"properties": {"a": {"type": "string", "maxLenght": 3}}}, "unknown keyword 'maxLenght' (did you mean"),
        ({"properties": {"a": {"type": "string", "x-guidance": {}}}}, "x-guidance sets options of a library"),
        ({"$ref": "https://example.com/a.json"}, "points outside the document"),
        ({"type": "string"}, 'arguments are an object (write "type": "object")'),
        ({"properties": {"a": {"type": 7}}}, "7 is not valid"),
    ],
)
def test_schemas_that_are_refused(calls: CallConstraints, parameters: Any, reason: str, choice: str) -> None:
    request = ToolRequest(tools=tool(parameters), choice=choice, format="hermes")
    with pytest.raises(InputError) as refused:
        calls.check(request)
    assert reason in str(refused.value) and str(refused.value).startswith("tools: parameters of get_weather: ")


def test_strict_tools(calls: CallConstraints) -> None:
    unique = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
    request = ToolRequest(tools=tool(unique), choice="required", format="hermes")
    assert calls.check(request)
    for strict in (replace(request, strict=True), replace(request, tools=tool(unique, strict=True))):
        with pytest.raises(InputError, match="#/properties/a: uniqueItems cannot be enforced"):
            calls.check(strict)
    assert calls.check(replace(request, strict=True, tools=tool(unique, strict=False)))
    assert calls.check(replace(request, strict=True, tools=tool(WEATHER))) == ()


def test_ids() -> None:
    assert len(call_id("a", 9)) == 9 and call_id("a", 9).isalnum()
    assert call_id("a", 29).startswith("call_") and len(call_id("a", 29)) == 29 != call_id("b", 29)
    content, (call, _) = TOOL_FORMATS["kimi"].read(kimi(paris, paris), {})
    assert (content, call.id) == ("", "functions.get_weather:0")
