"""Grammars of forced tool calls, in Lark: the markers of a format around arguments that keep to the schema of their
tool. What a grammar cannot enforce of a schema is listed, since only the finished call can be checked for it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from moelight.core.request import ToolRequest
from moelight.engine.grammars import JSON_WHITESPACE
from moelight.engine.json_schema import Schema, escaped
from moelight.engine.tool_schemas import ArgumentFields, enumerated

Literal: TypeAlias = Callable[[str], str]  # a text as terms of a grammar, its special tokens by id
# The rules of one field: from the name of its rule, the name of the field and its schema.
FieldRules: TypeAlias = Callable[[str, str, Schema], list[str]]
_MAX_BOUND = 1000  # repetitions in a regular expression
_LENGTHS = ("minLength", "maxLength")


def grammar_literal(special: Mapping[str, int]) -> Literal:
    """Writes a text as terms of a Lark grammar; ``special``: the ids of special tokens by their texts."""
    by_length = sorted(special, key=len, reverse=True)
    pattern = re.compile("(" + "|".join(map(re.escape, by_length)) + ")") if special else None

    def literal(text: str) -> str:
        pieces = [text] if pattern is None else pattern.split(text)
        terms = [
            f"<[{special[piece]}]>" if piece in special else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        ]
        return " ".join(terms)

    return literal


class CallGrammar:
    """Writes the grammar of an answer that calls a tool of ``request``. ``unenforced``: keywords of each tool's schema
    that the grammar written so far leaves out."""

    def __init__(self, request: ToolRequest, arguments: Mapping[str, ArgumentFields], literal: Literal) -> None:
        self.arguments, self.literal = arguments, literal
        self.unenforced: dict[str, list[str]] = {name: [] for name in arguments}
        self._several = request.choice == "required" and request.parallel

    def write(
        self,
        rules: Callable[[str, str], list[str]],
        begin: str = "",
        end: str = "",
        *,
        between: str = "",
        around: tuple[str, str] = ("", ""),
        single: bool = False,
    ) -> str:
        """One call between ``begin`` and ``end``, or several with ``between`` between two unless the request, or
        ``single``, allows one only. ``rules`` returns the rules of a call, from its tool and the name of the first."""
        literal = self.literal
        again = f" ({literal(between)} call)*".replace("( ", "(") if self._several and not single else ""
        lines = [
            f"start: {literal(around[0])} call{again} {literal(around[1])}",
            f"call: {literal(begin)} tool {literal(end)}",
            f"tool: {' | '.join(f'tool_{number}' for number in range(len(self.arguments)))}",
        ]
        for number, name in enumerate(self.arguments):
            lines += rules(name, f"tool_{number}")
        return "\n".join(lines) + "\n"

    def json(self, rule: str, tool: str) -> str:
        """The rule of all arguments as a JSON object."""
        return json_rule(rule, self.arguments[tool].root)

    def named_json(self, tool: str, rule: str, key: str = "arguments") -> list[str]:
        """The rules of ``{"name": ..., "arguments": {...}}``."""
        head = json.dumps(f'{{"name": {json.dumps(tool, ensure_ascii=False)}, "{key}": ', ensure_ascii=False)
        return [f'{rule}: {head} {rule}_arguments "}}"', self.json(f"{rule}_arguments", tool)]

    def fields(self, rule: str, tool: str, field: FieldRules, *, between: str = "") -> list[str]:
        """The rules of the fields of a call, in the order of its properties; that of all fields is ``RULE_all``."""
        arguments = self.arguments[tool]
        self.unenforced[tool] += [f"#: {name}" for name in arguments.alternatives]
        terms, lines = [], []
        for number, (name, schema) in enumerate(arguments.fields.items()):
            lines += field(f"{rule}_{number}", name, schema)
            terms.append((f"{rule}_{number}", name in arguments.required))
        return [f"{rule}_all: {sequence(terms, self.literal(between) if between else '')}", *lines]

    def json_field(self, tool: str, opening: str, closing: str = "") -> FieldRules:
        """The rules of a field whose value is JSON between ``opening``, with its name, and ``closing``."""

        def field(rule: str, name: str, schema: Schema) -> list[str]:
            head = self.literal(opening.format(name))
            value = json_rule(f"{rule}_value", self.arguments[tool].standalone(schema))
            return [f"{rule}: {head} {rule}_value {self.literal(closing)}".rstrip(), value]

        return field

    def text_field(self, tool: str, opening: str, closing: str) -> FieldRules:
        """As `json_field`, but strings are written as they are."""
        arguments, as_json = self.arguments[tool], self.json_field(tool, opening, closing)

        def field(rule: str, name: str, schema: Schema) -> list[str]:
            resolved = arguments.resolve(schema)
            values = enumerated(resolved) if isinstance(resolved, dict) else None
            head = self.literal(opening.format(name))
            if values is not None:
                choices = " | ".join(self.literal(plain_text(value)) or '""' for value in values)
                return [f"{rule}: {head} ({choices}) {self.literal(closing)}".rstrip()]
            if "string" not in arguments.kinds(schema):
                return as_json(rule, name, schema)
            return [f"{rule}: {head} {rule}_text", *self.text(f"{rule}_text", tool, pointer(name), resolved, closing)]

        return field

    def text(self, rule: str, tool: str, at: str, schema: Schema, closing: str) -> list[str]:
        """The rule of a string as it is, followed by ``closing``, which the string does not contain; ``at``: the
        pointer of its ``schema``."""
        keywords = dict(schema) if isinstance(schema, dict) else {}
        low, high = 0, None
        if keywords.get("type") == "string":
            low, high = (keywords.pop(name, default) for name, default in zip(_LENGTHS, (0, None), strict=True))
        if low > _MAX_BOUND or (high or 0) > _MAX_BOUND:
            keywords |= {name: bound for name, bound in zip(_LENGTHS, (low, high), strict=True) if bound}
            low, high = 0, None
        self.unenforced[tool] += [f"{at}: {name}" for name in keywords if name not in ("type", "$defs")]
        letters = "*" if not low and high is None else f"{{{low},{'' if high is None else high}}}"
        first, *rest = re.split(r" (?=<\[)", self.literal(closing), maxsplit=1)
        if first.startswith("<["):
            return [f"{rule}: /(?s:.){letters}/ {self.literal(closing)}"]
        if not rest:  # no special token ends the text: it ends where `closing` first comes
            return [f"{rule}[suffix={json.dumps(closing)}]: /(?s:.){letters}/"]
        before = re.escape(json.loads(first)).replace("/", r"\/")
        return [f"{rule}: /(?s:.){letters}{before}/ {rest[0]}"]


def json_rule(rule: str, schema: Schema) -> str:
    """The rule of a JSON value of ``schema``."""
    guided: dict[str, Any] = {**(schema if isinstance(schema, dict) else {}), "x-guidance": JSON_WHITESPACE}
    return f"{rule}: %json {json.dumps(guided, ensure_ascii=False)}"


def sequence(terms: Sequence[tuple[str, bool]], between: str) -> str:
    """The terms in their order, each with True if it is required, with ``between`` between two."""
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


def pointer(field: str, within: str = "#") -> str:
    """The pointer of the schema of ``field``."""
    return f"{within}/properties/{escaped(field)}"


def plain_text(value: object) -> str:
    """A string as it is, another value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
