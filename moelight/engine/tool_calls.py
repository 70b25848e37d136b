"""Tool calls in answers: one format for each family of models, read from a finished answer, and written as a grammar
where a request forces a call. The format is the one whose markers the chat template contains."""

# ruff: noqa: ARG002 (the formats share one interface)

from __future__ import annotations

import ast
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from moelight.core.errors import InputError
from moelight.core.request import ToolCall
from moelight.engine.grammars import JSON_WHITESPACE
from moelight.engine.reasoning import read_harmony

Literal = Callable[[str], str]  # a text as a term of a grammar, its special tokens by id
ReadCalls = tuple[str, list[ToolCall]]  # the content around the calls, and the calls
_DECODER = json.JSONDecoder()
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolRequest:
    """The tools of a request. ``choice``: ``auto``, ``required``, or the name of the tool that must be called;
    ``parallel``: several calls may be answered."""

    tools: Sequence[Mapping[str, Any]]
    choice: str = "auto"
    parallel: bool = True

    @property
    def forced(self) -> bool:
        return self.choice != "auto"

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The JSON schema of the arguments of each tool that may be called, by its name."""
        functions = [tool["function"] for tool in self.tools]
        named = self.choice if self.choice not in ("auto", "required") else None
        return {
            each["name"]: each.get("parameters") or _ANY_OBJECT
            for each in functions
            if named is None or each["name"] == named
        }


class ToolFormat(ABC):
    """The calls of one family. ``named_by``: texts of which a chat template of the family contains one; ``id_letters``:
    length of the ids that its template accepts."""

    named_by: ClassVar[tuple[str, ...]]
    id_letters: ClassVar[int] = 29

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> ReadCalls:
        """The content of ``text`` and its calls; a text with a malformed call is content as a whole."""
        try:
            content, calls = self._read(text, schemas)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return text, []
        return (content.strip(), calls) if calls else (text, [])

    @abstractmethod
    def _read(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> ReadCalls:
        """As `read`; raises ValueError for a malformed call."""

    @abstractmethod
    def grammar(self, request: ToolRequest, literal: Literal, template: str) -> str:
        """The Lark grammar of an answer that calls a tool of ``request`` and says nothing else."""


class HermesTools(ToolFormat):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5, Qwen3 and others."""

    named_by = ("<tool_call>",)

    def _read(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> ReadCalls:
        return _read_between(text, "<tool_call>", "</tool_call>", lambda at: _json_call(text, at))

    def grammar(self, request: ToolRequest, literal: Literal, template: str) -> str:
        return _grammar(request, literal, _json_rules, "<tool_call>\n", "\n</tool_call>", between="\n")


class QwenCoderTools(ToolFormat):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: Qwen3-Coder, Qwen3.5."""

    named_by = ("<function=",)

    def _read(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> ReadCalls:
        def call(at: int) -> tuple[ToolCall, int]:
            head = _match(r"\s*<function=([^>\n]+)>\s*", text, at)
            values, end = _fields(text, head.end(), r"<parameter=([^>\n]+)>\n?", r"\n?</parameter>\s*")
            return _typed_call(head[1], values, schemas), _match(r"</function>", text, end).end()

        return _read_between(text, "<tool_call>", "</tool_call>", call)

    def grammar(self, request: ToolRequest, literal: Literal, template: str) -> str:
        def rules(name: str, schema: Mapping[str, Any], rule: str) -> list[str]:
            fields = _field_rules(rule, schema, literal, "<parameter={}>\n", "\n</parameter>\n")
            head = literal(f"<function={name}>\n")
            return [f"{rule}: {head} {rule}_all {literal('</function>')}", *fields]

        return _grammar(request, literal, rules, "<tool_call>\n", "\n</tool_call>", between="\n")


class GLMTools(ToolFormat):
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``: GLM-4.5 and later."""

    named_by = ("<arg_key>",)

    def _read(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> ReadCalls:
        def call(at: int) -> tuple[ToolCall, int]:
            head = _match(r"\s*([^\s<]+)\s*", text, at)
            key = r"<arg_key>\s*([^<]*?)\s*</arg_key>\s*<arg_value>"
            values, end = _fields(text, head.end(), key, r"</arg_value>\s*")
            return _typed_call(head[1], values, schemas), end

        return _read_between(text, "<tool_call>", "</tool_call>", call)

    def grammar(self, request: ToolRequest, literal: Literal, template: str) -> str:
        def rules(name: str, schema: Mapping[str, Any], rule: str) -> list[str]:
            opening = "<arg_key>{}</arg_key>\n<arg_value>"
            fields = _field_rules(rule, schema, literal, opening, "</arg_value>\n")
            head = literal(f"{name}\n")
            return [f"{rule}: {head} {rule}_all", *fields]

        return _grammar(request, literal, rules, "<tool_call>", "</tool_call>", between="\n")


class LlamaTools(ToolFormat):
    """``{"name": ..., "parameters": {...}}``, several divided by semicolons, perhaps after ``<|python_tag|>``: Llama
    3.1 to 3.3."""

    named_by = ("<|python_tag|>", '"parameters": dictionary of argument name')

    def _read(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> ReadCalls:
        before, tag, rest = text.rpartition("<|python_tag|>")
        content, at, calls = before if tag else "", 0, []
        if not tag and not rest.lstrip().startswith("{"):
            return text, []
        while at < len(rest.rstrip()):
            call, at = _json_call(rest, at)
            calls.append(call)
            at = _match(r"\s*(?:;\s*|(?:<\|e[a-z]+_id\|>)?\s*$)", rest, at).end()
        return content, calls

    def grammar(self, request: ToolRequest, literal: Literal, template: str) -> str:
        def rules(name: str, schema: Mapping[str, Any], rule: str) -> list[str]:
            return _json_rules(name, schema, rule, arguments="parameters")

        return _grammar(request, literal, rules, "", "", between="; ")


class PythonicTools(ToolFormat):
    """``[NAME(KEY=VALUE, ...), ...]``: Llama 4, Llama 3.2 by its own prompt, LFM2 between markers."""

    named_by = ("<|python_start|>", "<|tool_call_start|>", "[func_name1(")

    _MARKS = re.compile(r"<\|(?:python|tool_call)_(?:start|end)\|>")
    _CONSTANTS: ClassVar[Mapping[str, Any]] = {"true": True, "false": False, "null": None}

    def _read(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> ReadCalls:
        parts = self._MARKS.split(text)
        content, listed = (parts[0], parts[1]) if len(parts) > 1 else ("", text)
        if not listed.strip().startswith("["):
            return text, []
        tree = ast.parse(listed.strip(), mode="eval").body
        if not isinstance(tree, ast.List):
            raise ValueError("no list of calls")
        return content + "".join(parts[2:]), [self._call(node) for node in tree.elts]

    def _call(self, node: ast.expr) -> ToolCall:
        if not isinstance(node, ast.Call) or node.args or not all(key.arg for key in node.keywords):
            raise ValueError("no call with named arguments")
        return _tool_call(ast.unparse(node.func), {str(key.arg): self._value(key.value) for key in node.keywords})

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name) and node.id in self._CONSTANTS:
            return self._CONSTANTS[node.id]
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            return {str(self._value(key)): self._value(value) for key, value in pairs if key is not None}
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(each) for each in node.elts]
        return ast.literal_eval(node)

    def grammar(self, request: ToolRequest, literal: Literal, template: str) -> str:
        def rules(name: str, schema: Mapping[str, Any], rule: str) -> list[str]:
            fields = _field_rules(rule, schema, literal, "{}=", "", between=", ", texts=False)
            return [f"{rule}: {literal(f'{name}(')} {rule}_all {literal(')')}", *fields]

        marked = "<|tool_call_start|>" in template
        begin, end = ("<|tool_call_start|>", "<|tool_call_end|>") if marked else ("", "")
        return _grammar(request, literal, rules, "", "", between=", ", around=(f"{begin}[", f"]{end}"))


class DeepSeekTools(ToolFormat):
    """Calls after ``<｜tool▁calls▁begin｜>``, their arguments in blocks of code (V3, R1) or bare (V3.1)."""

    named_by = ("<｜tool▁calls▁begin｜>",)

    def _read(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> ReadCalls:
        content, begin, calls = text.partition("<｜tool▁calls▁begin｜>")

        def call(at: int) -> tuple[ToolCall, int]:
            head = _match(r"(?:function<｜tool▁sep｜>([^\n]+)\n```json\s*|([^<\n]+)<｜tool▁sep｜>\s*)", calls, at)
            values, end = _json_at(calls, head.end())
            return _tool_call(head[1] or head[2], values), _match(r"\s*(?:```)?", calls, end).end()

        if not begin:
            return text, []
        rest, found = _read_between(calls, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", call)
        return content + rest.replace("<｜tool▁calls▁end｜>", ""), found

    def grammar(self, request: ToolRequest, literal: Literal, template: str) -> str:
        block = "```json" in template

        def rules(name: str, schema: Mapping[str, Any], rule: str) -> list[str]:
            head = f"function<｜tool▁sep｜>{name}\n```json\n" if block else f"{name}<｜tool▁sep｜>"
            tail = " " + literal("\n```") if block else ""
            return [f"{rule}: {literal(head)} {rule}_arguments{tail}", _json_rule(f"{rule}_arguments", schema)]

        around = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
        marks = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
        return _grammar(request, literal, rules, *marks, between="\n" if block else "", around=around)


class HarmonyTools(ToolFormat):
    """A message of the commentary channel to ``functions.NAME``: gpt-oss."""

    named_by = ("to=functions.", "<|channel|>commentary")

    def _read(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> ReadCalls:
        content, calls = [], []
        for message in read_harmony(text):
            if message.recipient is not None and message.recipient.startswith("functions."):
                calls.append(_tool_call(message.recipient.removeprefix("functions."), json.loads(message.content)))
            else:
                content.append(message.content)
        return "".join(content), calls

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> ReadCalls:
        content, calls = super().read(text, schemas)
        return ("".join(each.content for each in read_harmony(text)), []) if not calls else (content, calls)

    def grammar(self, request: ToolRequest, literal: Literal, template: str) -> str:
        def rules(name: str, schema: Mapping[str, Any], rule: str) -> list[str]:
            head = literal(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>")
            start = literal("<|start|>assistant")
            return [f"{rule}: ({start})? {head} {rule}_arguments", _json_rule(f"{rule}_arguments", schema)]

        single = ToolRequest(tools=request.tools, choice=request.choice, parallel=False)  # a call ends the answer
        return _grammar(single, literal, rules, "", "")


class MistralTools(ToolFormat):
    """``[TOOL_CALLS]NAME[ARGS]{...}``, or ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`` of older models."""

    named_by = ("[TOOL_CALLS]",)
    id_letters = 9

    def _read(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> ReadCalls:
        content, *parts = text.split("[TOOL_CALLS]")
        calls = []
        for part in parts:
            if part.lstrip().startswith("["):
                listed, end = _json_at(part, 0)
                calls += [_call_of(each) for each in listed]
            else:
                head = _match(r"\s*([^\[{]+?)\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?(?={|\s)", part, 0)
                values, end = _json_at(part, head.end())
                calls.append(_tool_call(head[1], values))
            _match(r"\s*(?:</s>)?\s*$", part, end)
        return content, calls

    def grammar(self, request: ToolRequest, literal: Literal, template: str) -> str:
        if "[ARGS]" not in template:
            return _grammar(request, literal, _json_rules, "", "", between=", ", around=("[TOOL_CALLS][", "]"))

        def rules(name: str, schema: Mapping[str, Any], rule: str) -> list[str]:
            return [f"{rule}: {literal(f'{name}[ARGS]')} {rule}_arguments", _json_rule(f"{rule}_arguments", schema)]

        return _grammar(request, literal, rules, "[TOOL_CALLS]", "")


class KimiTools(ToolFormat):
    """``<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>``: Kimi K2, whose ids
    these heads are."""

    named_by = ("<|tool_calls_section_begin|>",)

    def _read(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> ReadCalls:
        def call(at: int) -> tuple[ToolCall, int]:
            head = _match(r"\s*((?:functions\.)?([^\s:<]+):\d+)\s*<\|tool_call_argument_begin\|>", text, at)
            values, end = _json_at(text, head.end())
            return _tool_call(head[2], values, call_id=head[1]), end

        content, calls = _read_between(text, "<|tool_call_begin|>", "<|tool_call_end|>", call)
        return re.sub(r"<\|tool_calls_section_(?:begin|end)\|>", "", content), calls

    def grammar(self, request: ToolRequest, literal: Literal, template: str) -> str:
        def rules(name: str, schema: Mapping[str, Any], rule: str) -> list[str]:
            head, mark = literal(f"functions.{name}:"), literal("<|tool_call_argument_begin|>")
            arguments = _json_rule(f"{rule}_arguments", schema)
            return [f"{rule}: {head} {rule}_index {mark} {rule}_arguments", f"{rule}_index: /[0-9]/", arguments]

        around = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
        return _grammar(request, literal, rules, "<|tool_call_begin|>", "<|tool_call_end|>", around=around)


# By name, in the order in which a template is searched for them.
TOOL_FORMATS: dict[str, ToolFormat] = {
    "harmony": HarmonyTools(),
    "kimi": KimiTools(),
    "deepseek": DeepSeekTools(),
    "mistral": MistralTools(),
    "glm": GLMTools(),
    "qwen-coder": QwenCoderTools(),
    "hermes": HermesTools(),
    "pythonic": PythonicTools(),
    "llama": LlamaTools(),
}


def call_id(identity: str, letters: int) -> str:
    """An id of ``letters`` letters and digits, after ``call_`` where there is room for both."""
    digest = hashlib.blake2b(identity.encode()).hexdigest()
    return f"call_{digest[: letters - 5]}" if letters > 16 else digest[:letters]


NO_TOOL_FORMAT = (
    "tools: this model's chat template writes calls in no format that is read "
    f"({', '.join(TOOL_FORMATS)}); send tool_choice none to answer without tools"
)


def find_tool_format(sources: Iterable[str]) -> ToolFormat | None:
    """The format by whose markers a chat template among ``sources`` writes calls."""
    texts = list(sources)
    for form in TOOL_FORMATS.values():
        if any(mark in text for mark in form.named_by for text in texts):
            return form
    return None


def grammar_literal(special: Mapping[str, int]) -> Literal:
    """Writes a text as terms of a Lark grammar, given the ids of the ``special`` tokens by text."""
    by_length = sorted(special, key=len, reverse=True)
    pattern = re.compile("(" + "|".join(map(re.escape, by_length)) + ")") if special else None

    def literal(text: str) -> str:
        pieces = [text] if pattern is None else pattern.split(text)
        terms = [
            f"<[{special[each]}]>" if each in special else json.dumps(each, ensure_ascii=False)
            for each in pieces
            if each
        ]
        return " ".join(terms)

    return literal


def _match(pattern: str, text: str, at: int) -> re.Match[str]:
    found = re.compile(pattern).match(text, at)
    if found is None:
        raise ValueError(f"{pattern} does not match")
    return found


def _json_at(text: str, at: int) -> tuple[Any, int]:
    value, end = _DECODER.raw_decode(text, _match(r"\s*", text, at).end())
    return value, end


def _tool_call(name: str, arguments: object, call_id: str | None = None) -> ToolCall:
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not name or not isinstance(arguments, dict):
        raise ValueError("a call has a name and an object of arguments")
    return ToolCall(id=call_id, name=name.strip(), arguments=json.dumps(arguments, ensure_ascii=False))


def _call_of(value: object) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call has a name")
    return _tool_call(value["name"], value.get("arguments", value.get("parameters", {})))


def _json_call(text: str, at: int) -> tuple[ToolCall, int]:
    value, end = _json_at(text, at)
    return _call_of(value), end


def _read_between(text: str, begin: str, end: str, call: Callable[[int], tuple[ToolCall, int]]) -> ReadCalls:
    """The calls after each ``begin``, read by ``call`` from the position there; ``end``, or the end of the text, is
    behind each."""
    content, calls, at = [], [], 0
    while (start := text.find(begin, at)) >= 0:
        content.append(text[at:start])
        found, at = call(start + len(begin))
        calls.append(found)
        at = _match(rf"\s*(?:{re.escape(end)}|$)", text, at).end()
    return "".join([*content, text[at:]]).strip(), calls


def _fields(text: str, at: int, key: str, closing: str) -> tuple[dict[str, str], int]:
    """Fields by name, as texts, from position ``at`` on."""
    values: dict[str, str] = {}
    while head := re.compile(key).match(text, at):
        tail = re.compile(closing).search(text, head.end())
        if tail is None:
            raise ValueError("a field is not closed")
        values[head[1]] = text[head.end() : tail.start()]
        at = tail.end()
    return values, at


def _typed_call(name: str, values: Mapping[str, str], schemas: Mapping[str, Mapping[str, Any]]) -> ToolCall:
    """A call whose fields are texts: of each that is no string by the tool's schema, the JSON value."""
    properties = schemas.get(name.strip(), _ANY_OBJECT).get("properties") or {}
    return _tool_call(name, {key: _typed(value, properties.get(key)) for key, value in values.items()})


def _typed(text: str, schema: object) -> object:
    if isinstance(schema, dict) and _is_text(schema):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _is_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string"


def _json_rule(rule: str, schema: object) -> str:
    guided = {**schema, "x-guidance": JSON_WHITESPACE} if isinstance(schema, Mapping) else schema
    return f"{rule}: %json {json.dumps(guided, ensure_ascii=False)}"


def _json_rules(name: str, schema: Mapping[str, Any], rule: str, arguments: str = "arguments") -> list[str]:
    head = json.dumps(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{arguments}": ', ensure_ascii=False)
    return [f'{rule}: {head} {rule}_arguments "}}"', _json_rule(f"{rule}_arguments", schema)]


def _field_rules(
    rule: str,
    schema: Mapping[str, Any],
    literal: Literal,
    opening: str,
    closing: str,
    *,
    between: str = "",
    texts: bool = True,
) -> list[str]:
    """Rules of the fields of an object, in the order of its properties, ``opening`` with the name before each; with
    ``texts``, strings are written as they are. The rule of all fields is ``RULE_all``."""
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required = set(schema.get("required") or ())
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    lines: list[str] = []
    terms: list[tuple[str, bool]] = []
    for number, (name, described) in enumerate(properties.items()):
        field = f"{rule}_{number}"
        inner = {**described, **shared} if isinstance(described, dict) else described
        plain = texts and isinstance(described, dict) and _is_text(described) and described.keys() <= _PLAIN_TEXT
        if plain:
            lines.append(f"{field}: {literal(opening.format(name))} {field}_text")
            lines.append(f"{field}_text[suffix={json.dumps(closing)}]: /(?s:.*)/")
        else:
            value = _text_choice(described, literal) if texts and isinstance(described, dict) else None
            lines.append(f"{field}: {literal(opening.format(name))} {field}_value {literal(closing)}".rstrip())
            lines.append(f"{field}_value: {value}" if value else _json_rule(f"{field}_value", inner))
        terms.append((field, name in required))
    return [f"{rule}_all: {_sequence(terms, literal(between) if between else '')}", *lines]


# Keywords beside which a string may be any text.
_PLAIN_TEXT = {"type", "description", "title", "default", "examples"}


def _text_choice(schema: Mapping[str, Any], literal: Literal) -> str | None:
    """The strings of an enumeration as they are; None for any other schema."""
    values = schema.get("enum")
    if not _is_text(schema):
        return None
    if not isinstance(values, list) or not values or not all(isinstance(each, str) and each for each in values):
        raise InputError(
            "tools: a call of this model's format cannot be forced for a string with "
            f"{', '.join(sorted(schema.keys() - _PLAIN_TEXT))}; leave these keywords out",
            code="unsupported_parameter",
        )
    return "|".join(literal(each) for each in values)


def _sequence(terms: Sequence[tuple[str, bool]], between: str) -> str:
    """The fields in their order, those that are not required optional, with ``between`` between two."""
    if not between:
        return " ".join(field if needed else f"{field}?" for field, needed in terms) or '""'
    tails = ""
    options: list[str] = []
    for number in range(len(terms) - 1, -1, -1):
        field, needed = terms[number]
        options.insert(0, f"{field}{tails}")
        tails = f" ({between} {field}){'' if needed else '?'}{tails}"
    first_needed = next((number for number, (_, needed) in enumerate(terms) if needed), len(terms))
    heads = options[: first_needed + 1]
    return " | ".join(heads if first_needed < len(terms) else [*heads, '""'])


def _grammar(
    request: ToolRequest,
    literal: Literal,
    rules: Callable[[str, Mapping[str, Any], str], list[str]],
    begin: str,
    end: str,
    *,
    between: str = "",
    around: tuple[str, str] = ("", ""),
) -> str:
    """One call of a tool of ``request`` between ``begin`` and ``end``, or several with ``between`` between two."""
    schemas = request.schemas
    named = request.choice != "required"
    again = "" if named or not request.parallel else f" ({literal(between)} call)*".replace("( ", "(")
    lines = [
        f"start: {literal(around[0])} call{again} {literal(around[1])}",
        f"call: {literal(begin)} tool {literal(end)}",
        f"tool: {' | '.join(f'tool_{number}' for number in range(len(schemas)))}",
    ]
    for number, (name, schema) in enumerate(schemas.items()):
        lines += rules(name, schema, f"tool_{number}")
    return "\n".join(lines) + "\n"
