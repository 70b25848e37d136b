"""Tool calls in answers: one format for each family of models, read from a finished answer, and written as a grammar
where a request forces a call. The format is the one whose markers the chat template contains."""

# ruff: noqa: ARG002 (the formats share one interface)

from __future__ import annotations

import ast
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeAlias

from moelight.core.request import ToolCall
from moelight.engine.call_grammar import CallGrammar
from moelight.engine.reasoning import read_harmony
from moelight.engine.tool_schemas import ArgumentFields, kind_of

ReadCalls: TypeAlias = tuple[str, list[ToolCall]]  # the content around the calls, and the calls
Arguments: TypeAlias = Mapping[str, ArgumentFields]  # of each tool by name


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


class ToolFormat(ABC):
    """The calls of one family. ``id_letters``: length of the ids that its template accepts."""

    id_letters: ClassVar[int] = 29

    def __init__(self, *named_by: str, also: str = "") -> None:
        """A chat template of the family contains one of ``named_by``, and ``also``."""
        self._named_by, self._also = named_by, also

    def writes(self, template: str) -> bool:
        """True if ``template`` shows that its model writes calls in this format."""
        return self._also in template and any(mark in template for mark in self._named_by)

    def read(self, text: str, arguments: Arguments) -> ReadCalls:
        """The content of ``text`` and its calls; a text with a malformed call is content as a whole. ``arguments``
        decide which fields of a call are texts where the format does not quote them."""
        try:
            content, calls = self._read(text, arguments)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return text, []
        return (content.strip(), calls) if calls else (text, [])

    @abstractmethod
    def _read(self, text: str, arguments: Arguments) -> ReadCalls:
        """As `read`; raises ValueError for a malformed call."""

    @abstractmethod
    def grammar(self, calls: CallGrammar) -> str:
        """The Lark grammar of an answer that is ``calls`` and says nothing else."""


class HermesTools(ToolFormat):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5, Qwen3, Granite 4 and others."""

    def _read(self, text: str, arguments: Arguments) -> ReadCalls:
        return _read_between(text, "<tool_call>", "</tool_call>", lambda at: _json_call(text, at))

    def grammar(self, calls: CallGrammar) -> str:
        return calls.write(calls.named_json, "<tool_call>\n", "\n</tool_call>", between="\n")


class QwenCoderTools(ToolFormat):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: Qwen3-Coder, Qwen3.5."""

    def _read(self, text: str, arguments: Arguments) -> ReadCalls:
        def call(at: int) -> tuple[ToolCall, int]:
            head = _match(r"\s*<function=([^>\n]+)>\s*", text, at)
            values, end = _fields(text, head.end(), r"<parameter=([^>\n]+)>\n?", r"\n?</parameter>\s*")
            return _typed_call(head[1], values, arguments), _match(r"</function>", text, end).end()

        return _read_between(text, "<tool_call>", "</tool_call>", call)

    def grammar(self, calls: CallGrammar) -> str:
        def rules(tool: str, rule: str) -> list[str]:
            fields = calls.fields(rule, tool, calls.text_field(tool, "<parameter={}>\n", "\n</parameter>\n"))
            head = calls.literal(f"<function={tool}>\n")
            return [f"{rule}: {head} {rule}_all {calls.literal('</function>')}", *fields]

        return calls.write(rules, "<tool_call>\n", "\n</tool_call>", between="\n")


class GLMTools(ToolFormat):
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``: GLM-4.5 and later."""

    def _read(self, text: str, arguments: Arguments) -> ReadCalls:
        def call(at: int) -> tuple[ToolCall, int]:
            head = _match(r"\s*([^\s<]+)\s*", text, at)
            key = r"<arg_key>\s*([^<]*?)\s*</arg_key>\s*<arg_value>"
            values, end = _fields(text, head.end(), key, r"</arg_value>\s*")
            return _typed_call(head[1], values, arguments), end

        return _read_between(text, "<tool_call>", "</tool_call>", call)

    def grammar(self, calls: CallGrammar) -> str:
        def rules(tool: str, rule: str) -> list[str]:
            opening = "<arg_key>{}</arg_key>\n<arg_value>"
            fields = calls.fields(rule, tool, calls.text_field(tool, opening, "</arg_value>\n"))
            head = calls.literal(f"{tool}\n")
            return [f"{rule}: {head} {rule}_all", *fields]

        return calls.write(rules, "<tool_call>", "</tool_call>", between="\n")


class LlamaTools(ToolFormat):
    """``{"name": ..., "parameters": {...}}``, several divided by semicolons, perhaps after ``<|python_tag|>``: Llama
    3.1 to 3.3."""

    def _read(self, text: str, arguments: Arguments) -> ReadCalls:
        before, tag, rest = text.rpartition("<|python_tag|>")
        content, at, calls = before if tag else "", 0, []
        if not tag and not rest.lstrip().startswith("{"):
            return text, []
        while at < len(rest.rstrip()):
            call, at = _json_call(rest, at)
            calls.append(call)
            at = _match(r"\s*(?:;\s*|(?:<\|e[a-z]+_id\|>)?\s*$)", rest, at).end()
        return content, calls

    def grammar(self, calls: CallGrammar) -> str:
        return calls.write(lambda tool, rule: calls.named_json(tool, rule, "parameters"), between="; ")


class PythonicTools(ToolFormat):
    """``[NAME(KEY=VALUE, ...), ...]``: Llama 4, Llama 3.2 by its own prompt; with ``marks`` LFM2."""

    _MARKS = re.compile(r"<\|(?:python|tool_call)_(?:start|end)\|>")
    _CONSTANTS: ClassVar[Mapping[str, Any]] = {"true": True, "false": False, "null": None}

    def __init__(self, *named_by: str, marks: tuple[str, str] = ("", "")) -> None:
        super().__init__(*named_by)
        self._marks = marks

    def _read(self, text: str, arguments: Arguments) -> ReadCalls:
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
            return [self._value(item) for item in node.elts]
        return ast.literal_eval(node)

    def grammar(self, calls: CallGrammar) -> str:
        def rules(tool: str, rule: str) -> list[str]:
            fields = calls.fields(rule, tool, calls.json_field(tool, "{}="), between=", ")
            return [f"{rule}: {calls.literal(f'{tool}(')} {rule}_all {calls.literal(')')}", *fields]

        begin, end = self._marks
        return calls.write(rules, between=", ", around=(f"{begin}[", f"]{end}"))


class DeepSeekTools(ToolFormat):
    """Calls after ``<｜tool▁calls▁begin｜>``, their arguments bare (V3.1), or in blocks of code (V3, R1) if ``also``
    names those."""

    def _read(self, text: str, arguments: Arguments) -> ReadCalls:
        content, begin, listed = text.partition("<｜tool▁calls▁begin｜>")

        def call(at: int) -> tuple[ToolCall, int]:
            head = _match(r"(?:function<｜tool▁sep｜>([^\n]+)\n```json\s*|([^<\n]+)<｜tool▁sep｜>\s*)", listed, at)
            values, end = _json_at(listed, head.end())
            return _tool_call(head[1] or head[2], values), _match(r"\s*(?:```)?", listed, end).end()

        if not begin:
            return text, []
        rest, calls = _read_between(listed, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", call)
        return content + rest.replace("<｜tool▁calls▁end｜>", ""), calls

    def grammar(self, calls: CallGrammar) -> str:
        block = bool(self._also)

        def rules(tool: str, rule: str) -> list[str]:
            head = f"function<｜tool▁sep｜>{tool}\n```json\n" if block else f"{tool}<｜tool▁sep｜>"
            tail = " " + calls.literal("\n```") if block else ""
            return [f"{rule}: {calls.literal(head)} {rule}_arguments{tail}", calls.json(f"{rule}_arguments", tool)]

        around = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
        marks = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
        return calls.write(rules, *marks, between="\n" if block else "", around=around)


class HarmonyTools(ToolFormat):
    """A message of the commentary channel to ``functions.NAME``: gpt-oss."""

    def _read(self, text: str, arguments: Arguments) -> ReadCalls:
        content, calls = [], []
        for message in read_harmony(text):
            if message.recipient is not None and message.recipient.startswith("functions."):
                calls.append(_tool_call(message.recipient.removeprefix("functions."), _DECODER.decode(message.content)))
            else:
                content.append(message.content)
        return "".join(content), calls

    def read(self, text: str, arguments: Arguments) -> ReadCalls:
        content, calls = super().read(text, arguments)
        return (content, calls) if calls else ("".join(message.content for message in read_harmony(text)), [])

    def grammar(self, calls: CallGrammar) -> str:
        def rules(tool: str, rule: str) -> list[str]:
            head = calls.literal(f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>")
            start = calls.literal("<|start|>assistant")
            return [f"{rule}: ({start})? {head} {rule}_arguments", calls.json(f"{rule}_arguments", tool)]

        return calls.write(rules, single=True)  # a call ends the answer


class MistralTools(ToolFormat):
    """``[TOOL_CALLS]NAME[ARGS]{...}`` if the template contains ``also``, or ``[TOOL_CALLS][{"name": ..., "arguments":
    {...}}, ...]`` of older models."""

    id_letters = 9

    def _read(self, text: str, arguments: Arguments) -> ReadCalls:
        content, *parts = text.split("[TOOL_CALLS]")
        calls = []
        for part in parts:
            if part.lstrip().startswith("["):
                listed, end = _json_at(part, 0)
                calls += [_call_of(value) for value in listed]
            else:
                head = _match(r"\s*([^\[{]+?)\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?(?={|\s)", part, 0)
                values, end = _json_at(part, head.end())
                calls.append(_tool_call(head[1], values))
            _match(r"\s*(?:</s>)?\s*$", part, end)
        return content, calls

    def grammar(self, calls: CallGrammar) -> str:
        if not self._also:
            return calls.write(calls.named_json, between=", ", around=("[TOOL_CALLS][", "]"))

        def rules(tool: str, rule: str) -> list[str]:
            return [
                f"{rule}: {calls.literal(f'{tool}[ARGS]')} {rule}_arguments",
                calls.json(f"{rule}_arguments", tool),
            ]

        return calls.write(rules, "[TOOL_CALLS]")


class KimiTools(ToolFormat):
    """``<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>``: Kimi K2, whose ids
    these heads are."""

    def _read(self, text: str, arguments: Arguments) -> ReadCalls:
        def call(at: int) -> tuple[ToolCall, int]:
            head = _match(r"\s*((?:functions\.)?([^\s:<]+):\d+)\s*<\|tool_call_argument_begin\|>", text, at)
            values, end = _json_at(text, head.end())
            return _tool_call(head[2], values, call_id=head[1]), end

        content, calls = _read_between(text, "<|tool_call_begin|>", "<|tool_call_end|>", call)
        return re.sub(r"<\|tool_calls_section_(?:begin|end)\|>", "", content), calls

    def grammar(self, calls: CallGrammar) -> str:
        def rules(tool: str, rule: str) -> list[str]:
            head, mark = calls.literal(f"functions.{tool}:"), calls.literal("<|tool_call_argument_begin|>")
            values = calls.json(f"{rule}_arguments", tool)
            return [f"{rule}: {head} {rule}_index {mark} {rule}_arguments", f"{rule}_index: /[0-9]/", values]

        around = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
        return calls.write(rules, "<|tool_call_begin|>", "<|tool_call_end|>", around=around)


# By name, in the order in which a template is searched for them.
TOOL_FORMATS: dict[str, ToolFormat] = {
    "harmony": HarmonyTools("to=functions.", "<|channel|>commentary"),
    "kimi": KimiTools("<|tool_calls_section_begin|>"),
    "deepseek": DeepSeekTools("<｜tool▁calls▁begin｜>", also="```json"),
    "deepseek-v3.1": DeepSeekTools("<｜tool▁calls▁begin｜>"),
    "mistral": MistralTools("[TOOL_CALLS]", also="[ARGS]"),
    "mistral-list": MistralTools("[TOOL_CALLS]"),
    "glm": GLMTools("<arg_key>"),
    "qwen-coder": QwenCoderTools("<function="),
    "hermes": HermesTools("<tool_call>"),
    "lfm": PythonicTools("<|tool_call_start|>", marks=("<|tool_call_start|>", "<|tool_call_end|>")),
    "pythonic": PythonicTools("<|python_start|>", "[func_name1("),
    "llama": LlamaTools("<|python_tag|>", '"parameters": dictionary of argument name'),
}


def call_id(identity: str, letters: int) -> str:
    """An id of ``letters`` letters and digits, after ``call_`` where there is room for both."""
    digest = hashlib.blake2b(identity.encode()).hexdigest()
    return f"call_{digest[: letters - 5]}" if letters > 16 else digest[:letters]


NO_TOOL_FORMAT = (
    "tools: this model's chat template writes calls in no format that is read "
    f"({', '.join(TOOL_FORMATS)}); send tool_choice none to answer without tools"
)


def find_tool_format(sources: Iterable[str]) -> str | None:
    """The name of the format by whose markers a chat template among ``sources`` writes calls."""
    texts = list(sources)
    for name, form in TOOL_FORMATS.items():
        if any(form.writes(text) for text in texts):
            return name
    return None


def _match(pattern: str, text: str, at: int) -> re.Match[str]:
    match = re.compile(pattern).match(text, at)
    if match is None:
        raise ValueError(f"{pattern} does not match")
    return match


def _json_at(text: str, at: int) -> tuple[Any, int]:
    value, end = _DECODER.raw_decode(text, _match(r"\s*", text, at).end())
    return value, end


def _tool_call(name: str, arguments: object, call_id: str | None = None) -> ToolCall:
    if isinstance(arguments, str):
        arguments = _DECODER.decode(arguments)
    if not name or not isinstance(arguments, dict):
        raise ValueError("a call has a name and an object of arguments")
    return ToolCall(id=call_id, name=name.strip(), arguments=json.dumps(arguments, ensure_ascii=False, allow_nan=False))


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
        value, at = call(start + len(begin))
        calls.append(value)
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


def _typed_call(name: str, values: Mapping[str, str], arguments: Arguments) -> ToolCall:
    """A call whose fields are texts: the JSON value of each that is no string by the tool's schema."""
    tool = arguments.get(name.strip())
    return _tool_call(name, {key: _typed(value, tool, key) for key, value in values.items()})


def _typed(text: str, tool: ArgumentFields | None, key: str) -> object:
    """The value of a field written as ``text``: a string where no other kind that the schema accepts fits it."""
    kinds = None if tool is None or key not in tool.fields else tool.kinds(tool.fields[key])
    if kinds == {"string"}:
        return text
    try:
        value = _DECODER.decode(text)
    except ValueError:
        return text
    return text if kinds is not None and "string" in kinds and kind_of(value) not in kinds else value
