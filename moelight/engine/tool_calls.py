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
from moelight.engine.call_grammar import CallGrammar, FieldRules, json_rule, plain_text, pointer, sequence
from moelight.engine.json_schema import Schema
from moelight.engine.reasoning import read_harmony
from moelight.engine.tool_schemas import ArgumentFields, enumerated, kind_of

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
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5, Qwen3, Granite 4 and others; with
    another ``tag`` LongCat."""

    def __init__(self, *named_by: str, tag: str = "tool_call") -> None:
        super().__init__(*named_by)
        self._begin, self._end = f"<{tag}>", f"</{tag}>"

    def _read(self, text: str, arguments: Arguments) -> ReadCalls:
        return _read_between(text, self._begin, self._end, lambda at: _json_call(text, at))

    def grammar(self, calls: CallGrammar) -> str:
        return calls.write(calls.named_json, f"{self._begin}\n", f"\n{self._end}", between="\n")


class ListTools(ToolFormat):
    """A list ``[{"name": ..., "arguments": {...}}, ...]`` between ``marks``: Granite 3, Hunyuan, Jamba, Nemotron, and
    with other keys Command A; or, with ``lines``, one object a line: MiniMax-M1. Several marks may begin it."""

    def __init__(
        self, *named_by: str, also: str = "", marks: tuple[tuple[str, ...], str], lines: bool = False, ids: bool = False
    ) -> None:
        """``ids``: the objects have Cohere's keys, an index as id among them."""
        super().__init__(*named_by, also=also)
        (self._begins, self._end), self._lines, self._ids = marks, lines, ids

    def _read(self, text: str, arguments: Arguments) -> ReadCalls:
        begin = next((mark for mark in self._begins if mark in text), None)
        if begin is None:
            return text, []
        content, _, rest = text.partition(begin)
        calls, at, closing = [], 0, self._end or "<|/tool_call|>"
        while (tail := rest[at:].lstrip()) and not tail.startswith(closing):
            value, at = _json_at(rest, at)
            calls += [_call_of(item) for item in (value if isinstance(value, list) else [value])]
            if not self._lines:
                tail = rest[at:].lstrip()
                break
        return content + tail.removeprefix(closing), calls

    def grammar(self, calls: CallGrammar) -> str:
        begin = self._begins[0]
        if self._lines:
            return calls.write(calls.named_json, end="\n", around=(f"{begin}\n", self._end))
        rules = self._cohere(calls) if self._ids else calls.named_json
        return calls.write(rules, between=", ", around=(f"{begin}[", f"]{self._end}"))

    def _cohere(self, calls: CallGrammar) -> Callable[[str, str], list[str]]:
        def rules(tool: str, rule: str) -> list[str]:
            head, name = calls.literal('{"tool_call_id": "'), calls.literal(f'", "tool_name": {json.dumps(tool)}, ')
            key, values = calls.literal('"parameters": '), calls.json(f"{rule}_arguments", tool)
            return [f'{rule}: {head} {rule}_index {name} {key} {rule}_arguments "}}"', f"{rule}_index: /[0-9]/", values]

        return rules


class QwenCoderTools(ToolFormat):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: Qwen3-Coder, Qwen3.5,
    Nemotron 3, Step-3.5, MiMo-V2; with another ``tag`` Seed-OSS."""

    def __init__(self, *named_by: str, tag: str = "tool_call") -> None:
        super().__init__(*named_by)
        self._begin, self._end = f"<{tag}>", f"</{tag}>"

    def _read(self, text: str, arguments: Arguments) -> ReadCalls:
        def call(at: int) -> tuple[ToolCall, int]:
            head = _match(r"\s*<function=([^>\n]+)>\s*", text, at)
            values, end = _fields(text, head.end(), r"<parameter=([^>\n]+)>\n?", r"\n?</parameter>\s*")
            return _typed_call(head[1], values, arguments), _match(r"</function>", text, end).end()

        return _read_between(text, self._begin, self._end, call)

    def grammar(self, calls: CallGrammar) -> str:
        def rules(tool: str, rule: str) -> list[str]:
            fields = calls.fields(rule, tool, calls.text_field(tool, "<parameter={}>\n", "\n</parameter>\n"))
            head = calls.literal(f"<function={tool}>\n")
            return [f"{rule}: {head} {rule}_all {calls.literal('</function>')}", *fields]

        return calls.write(rules, f"{self._begin}\n", f"\n{self._end}", between="\n")


class GLMTools(ToolFormat):
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``: GLM-4.5 and later; with a
    ``prefix`` of the tags LongCat, with a ``suffix``, a mark behind the name and a block ``around`` all calls Hunyuan 3
    and 4. ``line``: what stands between two tags."""

    def __init__(
        self,
        *named_by: str,
        also: str = "",
        prefix: str = "",
        suffix: str = "",
        sep: str = "",
        line: str = "\n",
        around: str = "",
    ) -> None:
        super().__init__(*named_by, also=also)
        self._prefix, self._suffix, self._line = prefix, suffix, line
        self._sep = sep and f"<{sep}{suffix}>"
        self._around = (f"<{around}{suffix}>{line}", f"</{around}{suffix}>") if around else ("", "")

    def _tag(self, name: str) -> tuple[str, str]:
        name = f"{self._prefix}{name}{self._suffix}"
        return f"<{name}>", f"</{name}>"

    def _read(self, text: str, arguments: Arguments) -> ReadCalls:
        key, value = ([re.escape(mark) for mark in self._tag(name)] for name in ("arg_key", "arg_value"))

        def call(at: int) -> tuple[ToolCall, int]:
            head = _match(rf"\s*([^\s<]+)\s*(?:{re.escape(self._sep)})?\s*", text, at)
            opening = rf"{key[0]}\s*([^<]*?)\s*{key[1]}\s*{value[0]}"
            values, end = _fields(text, head.end(), opening, rf"{value[1]}\s*")
            return _typed_call(head[1], values, arguments), end

        content, calls = _read_between(text, *self._tag("tool_call"), call)
        for mark in self._around:
            content = content.replace(mark.strip(), "") if mark else content
        return content, calls

    def grammar(self, calls: CallGrammar) -> str:
        line, (key, value) = self._line, (self._tag(name) for name in ("arg_key", "arg_value"))

        def rules(tool: str, rule: str) -> list[str]:
            opening = f"{key[0]}{{}}{key[1]}{line}{value[0]}"
            fields = calls.fields(rule, tool, calls.text_field(tool, opening, f"{value[1]}{line}"))
            head = calls.literal(f"{tool}{self._sep}{line}")
            return [f"{rule}: {head} {rule}_all", *fields]

        begin, end = self._tag("tool_call")
        if self._around[0]:  # a lexeme for a line break would hide the one that ends the block
            return calls.write(rules, begin, f"{end}{line}", around=self._around)
        return calls.write(rules, begin, end, between=line)


class InvokeTools(ToolFormat):
    """``<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`` in a ``block``: MiniMax-M2; with a
    ``mark`` before the tags, and an attribute that tells strings from JSON, DeepSeek-V3.2 and V4."""

    def __init__(self, *named_by: str, also: str = "", block: str, mark: str = "") -> None:
        super().__init__(*named_by, also=also)
        self._begin, self._end, self._mark = f"<{mark}{block}>", f"</{mark}{block}>", mark

    def _read(self, text: str, arguments: Arguments) -> ReadCalls:
        content, block, rest = text.partition(self._begin)
        invoke = rf'\s*<{self._mark}invoke\s+name="([^"]+)"\s*>\s*'
        calls, at = [], 0
        if not block:
            return text, []
        while head := re.compile(invoke).match(rest, at):
            call, at = self._call(head[1], rest, head.end(), arguments)
            calls.append(call)
        at = _match(rf"\s*(?:{self._end}|$)", rest, at).end()
        return content + rest[at:], calls

    def _call(self, name: str, text: str, at: int, arguments: Arguments) -> tuple[ToolCall, int]:
        typed = r'(?:\s+string="(true|false)")?'
        opening = re.compile(rf'<{self._mark}parameter\s+name="([^"]+)"{typed}\s*>')
        closing = f"</{self._mark}parameter>"
        values: dict[str, object] = {}
        while head := opening.match(text, at):
            end = text.index(closing, head.end())
            value, tool = text[head.end() : end], arguments.get(name)
            values[head[1]] = value if head[2] == "true" else _typed(value, tool, head[1])
            at = _match(r"\s*", text, end + len(closing)).end()
        return _tool_call(name, values), _match(rf"</{self._mark}invoke>\s*", text, at).end()

    def grammar(self, calls: CallGrammar) -> str:
        closing = f"</{self._mark}parameter>\n"
        opening = f'<{self._mark}parameter name="{{}}"'

        def rules(tool: str, rule: str) -> list[str]:
            field = self._typed_field(calls, tool, opening, closing)
            fields = calls.fields(rule, tool, field if self._mark else calls.text_field(tool, f"{opening}>", closing))
            head = calls.literal(f'<{self._mark}invoke name="{tool}">\n')
            return [f"{rule}: {head} {rule}_all {calls.literal(f'</{self._mark}invoke>')}", *fields]

        return calls.write(rules, end="\n", around=(f"{self._begin}\n", self._end))

    def _typed_field(self, calls: CallGrammar, tool: str, opening: str, closing: str) -> FieldRules:
        """A string, or JSON of any other kind."""
        arguments = calls.arguments[tool]
        as_text = calls.text_field(tool, f'{opening} string="true">', closing)
        as_json = calls.json_field(tool, f'{opening} string="false">', closing)

        def field(rule: str, name: str, schema: Schema) -> list[str]:
            kinds, resolved = arguments.kinds(schema), arguments.resolve(schema)
            others = {"allOf": [schema, {"type": sorted(kinds - {"string"})}]}
            if kinds == {"string"}:
                return as_text(rule, name, schema)
            if "string" not in kinds:
                return as_json(rule, name, schema)
            values = enumerated(resolved) if isinstance(resolved, dict) else None
            strings = {"type": "string"} if values is None else {"enum": [v for v in values if isinstance(v, str)]}
            rules = [*as_text(f"{rule}_string", name, strings), *as_json(f"{rule}_other", name, others)]
            return [f"{rule}: {rule}_string | {rule}_other", *rules]

        return field


class SolarTools(ToolFormat):
    """``<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|>`` behind
    ``<|tool_calls|>``: Solar Open."""

    id_letters = 10

    def _read(self, text: str, arguments: Arguments) -> ReadCalls:
        def call(at: int) -> tuple[ToolCall, int]:
            head = _match(r"([^<]*)<\|tool_call:name\|>([^<]+)<\|tool_call:args\|>", text, at)
            values, end = _json_at(text, head.end())
            return _tool_call(head[2], values, call_id=head[1].strip() or None), end

        content, calls = _read_between(text, "<|tool_call:begin|>", "<|tool_call:end|>", call)
        marks = r"<\|(?:tool_calls|calls|content|flush|end)\|>|<\|begin\|>assistant"
        return re.sub(marks, "", content) if calls else text, calls

    def grammar(self, calls: CallGrammar) -> str:
        def rules(tool: str, rule: str) -> list[str]:
            head = calls.literal(f"<|tool_call:name|>{tool}<|tool_call:args|>")
            values = calls.json(f"{rule}_arguments", tool)
            return [f"{rule}: {rule}_id {head} {rule}_arguments", f"{rule}_id: /[a-z0-9]{{10}}/", values]

        return calls.write(rules, "<|tool_call:begin|>", "<|tool_call:end|>", around=("<|tool_calls|>", ""))


class GemmaTools(ToolFormat):
    """``<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>``: Gemma 4. Strings stand between two ``<|"|>``, keys as they
    are."""

    _QUOTE = '<|"|>'
    _KEY = re.compile(r'\s*(?:<\|"\|>([^<]*)<\|"\|>|([^:{}\[\],\s]+(?:\s+[^:{}\[\],\s]+)*))\s*:')

    def _read(self, text: str, arguments: Arguments) -> ReadCalls:
        def call(at: int) -> tuple[ToolCall, int]:
            head = _match(r"\s*call:([^\s{]+)\s*(?={)", text, at)
            values, end = self._value(text, head.end())
            return _tool_call(head[1], values), end

        return _read_between(text, "<|tool_call>", "<tool_call|>", call)

    def _value(self, text: str, at: int) -> tuple[Any, int]:
        at = _match(r"\s*", text, at).end()
        if text.startswith(self._QUOTE, at):
            end = text.index(self._QUOTE, at + len(self._QUOTE))
            return text[at + len(self._QUOTE) : end], end + len(self._QUOTE)
        if text[at : at + 1] == "{":
            return self._members(text, at + 1)
        if text[at : at + 1] == "[":
            items: list[Any] = []
            at = _match(r"\s*", text, at + 1).end()
            while not text.startswith("]", at):
                item, at = self._value(text, at)
                items.append(item)
                at = _match(r"\s*(?:,\s*|(?=\]))", text, at).end()
            return items, at + 1
        return _json_at(text, at)

    def _members(self, text: str, at: int) -> tuple[dict[str, Any], int]:
        values: dict[str, Any] = {}
        at = _match(r"\s*", text, at).end()
        while not text.startswith("}", at):
            key = self._KEY.match(text, at)
            if key is None:
                raise ValueError("no key")
            values[key[2] if key[1] is None else key[1]], at = self._value(text, key.end())
            at = _match(r"\s*(?:,\s*|(?=}))", text, at).end()
        return values, at + 1

    def grammar(self, calls: CallGrammar) -> str:
        def rules(tool: str, rule: str) -> list[str]:
            values = _GemmaValues(calls, tool, rule)
            return [
                f"{rule}: {calls.literal(f'call:{tool}')} {values.members(calls.arguments[tool], '#')}",
                *values.lines,
            ]

        return calls.write(rules, "<|tool_call>", "<tool_call|>")


class _GemmaValues:
    """The rules of values in Gemma's notation, each distinct schema once."""

    def __init__(self, calls: CallGrammar, tool: str, rule: str) -> None:
        self._calls, self._tool, self._rule = calls, tool, rule
        self._names: dict[str, str] = {}
        self.lines: list[str] = []

    def members(self, arguments: ArgumentFields, at: str) -> str:
        """The terms of an object."""
        literal = self._calls.literal
        terms = [
            (f"({literal(f'{name}:')} {self._value(arguments, schema, pointer(name, at))})", name in arguments.required)
            for name, schema in arguments.fields.items()
        ]
        self._calls.unenforced[self._tool] += [f"{at}: {name}" for name in arguments.alternatives]
        return f'"{{" ({sequence(terms, literal(","))}) "}}"'

    def _value(self, arguments: ArgumentFields, schema: Schema, at: str) -> str:
        """The name of the rule of a value."""
        resolved = arguments.resolve(schema)
        alone = arguments.standalone(resolved)
        key = json.dumps(alone, sort_keys=True)
        if key in self._names:
            return self._names[key]
        self._names[key] = name = f"{self._rule}_v{len(self._names)}"
        values = enumerated(resolved) if isinstance(resolved, dict) else None
        options = [self._calls.literal(self._constant(value)) for value in values or ()]
        if values is None:
            kinds = sorted(arguments.kinds(resolved))
            options += [self._of_kind(kind, f"{name}_{kind}", alone, at) for kind in kinds]
        self.lines.append(f"{name}: {' | '.join(options)}")
        return name

    def _of_kind(self, kind: str, name: str, schema: Schema, at: str) -> str:
        literal, keywords = self._calls.literal, schema if isinstance(schema, dict) else {}
        if kind == "string":
            self.lines += self._calls.text(name, self._tool, at, schema, GemmaTools._QUOTE)
            return f"{literal(GemmaTools._QUOTE)} {name}"
        if kind == "object":
            return self.members(ArgumentFields(keywords), at)
        if kind == "array":
            lost = [word for word in ("minItems", "maxItems", "prefixItems") if word in keywords]
            self._calls.unenforced[self._tool] += [f"{at}: {word}" for word in lost]
            item = self._value(ArgumentFields(keywords), keywords.get("items", {}), f"{at}/items")
            least = keywords.get("minItems", 0)
            return f'"[" ({item} ("," {item})*){"" if least else "?"} "]"'
        definitions = {"$defs": keywords["$defs"]} if "$defs" in keywords else {}
        asserted = {word: value for word, value in keywords.items() if word != "$defs"}
        self.lines.append(json_rule(name, {"allOf": [asserted, {"type": kind}], **definitions}))
        return name

    def _constant(self, value: object) -> str:
        """``value`` in Gemma's notation."""
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{self._constant(item)}' for key, item in value.items())}}}"
        if isinstance(value, list):
            return f"[{','.join(map(self._constant, value))}]"
        return f"{GemmaTools._QUOTE}{value}{GemmaTools._QUOTE}" if isinstance(value, str) else plain_text(value)


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
        if isinstance(node, ast.Dict) and None not in node.keys:
            pairs = zip(node.keys, node.values, strict=True)
            return {str(self._value(key)): self._value(value) for key, value in pairs if key is not None}
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(item) for item in node.elts]
        value = ast.literal_eval(node) if isinstance(node, ast.Constant | ast.UnaryOp) else node
        if value is not None and not isinstance(value, str | int | float):
            raise ValueError("no value of JSON")
        return value

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


# What shows that a template writes calls in a format that is not read, though it contains markers of another one.
_UNREAD = ("]<]minimax[>[",)  # MiniMax-M3, whose nested arguments are tags
# By name, in the order in which a template is searched for them.
TOOL_FORMATS: dict[str, ToolFormat] = {
    "harmony": HarmonyTools("to=functions.", "<|channel|>commentary"),
    "gemma": GemmaTools("<|tool_call>"),
    "solar": SolarTools("<|tool_call:begin|>"),
    "kimi": KimiTools("<|tool_calls_section_begin|>"),
    "deepseek-v3.2": InvokeTools("｜DSML｜", also="function_calls", block="function_calls", mark="｜DSML｜"),
    "deepseek-v4": InvokeTools("｜DSML｜", block="tool_calls", mark="｜DSML｜"),
    "deepseek": DeepSeekTools("<｜tool▁calls▁begin｜>", also="```json"),
    "deepseek-v3.1": DeepSeekTools("<｜tool▁calls▁begin｜>"),
    "mistral": MistralTools("[TOOL_CALLS]", also="[ARGS]"),
    "mistral-list": MistralTools("[TOOL_CALLS]"),
    "minimax-m2": InvokeTools("<minimax:tool_call>", block="minimax:tool_call"),
    "cohere": ListTools("<|START_ACTION|>", marks=(("<|START_ACTION|>",), "<|END_ACTION|>"), ids=True),
    "hunyuan-v3": GLMTools("<tool_sep>", sep="tool_sep", around="tool_calls"),
    "hunyuan-v3-opensource": GLMTools(
        "<tool_sep:opensource>", sep="tool_sep", suffix=":opensource", around="tool_calls"
    ),
    "hunyuan-v4": GLMTools("<arg_key:opensource>", suffix=":opensource", around="tool_calls", line=""),
    "longcat-fields": GLMTools("<longcat_arg_key>", prefix="longcat_"),
    "longcat": HermesTools("<longcat_tool_call>", tag="longcat_tool_call"),
    "glm-4.7": GLMTools("<arg_key>", also="</arg_key><arg_value>", line=""),
    "glm": GLMTools("<arg_key>"),
    "seed": QwenCoderTools("<seed:tool_call>", tag="seed:tool_call"),
    "qwen-coder": QwenCoderTools("<function="),
    "nemotron": ListTools("<TOOLCALL>", marks=(("<TOOLCALL>",), "</TOOLCALL>")),
    "minimax-m1": ListTools(
        "<tool_calls>", also="<beginning_of_sentence>", marks=(("<tool_calls>",), "</tool_calls>"), lines=True
    ),
    "tool-calls": ListTools("<tool_calls>", marks=(("<tool_calls>",), "</tool_calls>")),
    "hermes": HermesTools("<tool_call>"),
    "granite": ListTools(
        "<|tool_call|>", "available_tools<|end_of_role|>", marks=(("<|tool_call|>", "<tool_call>"), "")
    ),
    "lfm": PythonicTools("<|tool_call_start|>", marks=("<|tool_call_start|>", "<|tool_call_end|>")),
    "pythonic": PythonicTools("<|python_start|>", "[func_name1("),
    "llama": LlamaTools("<|python_tag|>", '"parameters": dictionary of argument name'),
}


def call_id(identity: str, letters: int) -> str:
    """An id of ``letters`` letters and digits, after ``call_`` where there is room for both."""
    digest = hashlib.blake2b(identity.encode()).hexdigest()
    return f"call_{digest[: letters - 5]}" if letters > 16 else digest[:letters]


NO_TOOL_FORMAT = (
    f"tools: this model's chat template writes calls in none of the {len(TOOL_FORMATS)} formats that are read (those "
    "of Hermes, Llama, DeepSeek, Gemma and others); send tool_choice none to answer without tools"
)


def find_tool_format(sources: Iterable[str]) -> str | None:
    """The name of the format by whose markers a chat template among ``sources`` writes calls."""
    texts = list(sources)
    if any(mark in text for mark in _UNREAD for text in texts):
        return None
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
    name = value.get("name", value.get("tool_name")) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str):
        raise ValueError("a call has a name")
    return _tool_call(name, value.get("arguments", value.get("parameters", {})))


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
