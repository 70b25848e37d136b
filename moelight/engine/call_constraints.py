"""The calls of tools that an answer may contain: their schemas compiled before the answer begins, the grammar of a
forced call, the calls read from a finished answer, and their arguments validated."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from moelight.core.errors import InputError
from moelight.core.request import INVALID, StructuredOutputs, StructureError, ToolCall, ToolRequest
from moelight.engine.call_grammar import CallGrammar, grammar_literal
from moelight.engine.constraints import Constraints
from moelight.engine.tool_calls import TOOL_FORMATS
from moelight.engine.tool_schemas import ArgumentFields, arguments_schema

_CACHED = 256  # schemas
_CODE = "invalid_structured_output"


@dataclass(frozen=True, kw_only=True, slots=True)
class _ToolSchema:
    fields: ArgumentFields
    unenforced: tuple[str, ...]
    notes: tuple[str, ...]
    reason: str | None  # why it cannot be used


class CallConstraints:
    """Checks, grammars and validation of calls, by the ``constraints`` of one checkpoint."""

    def __init__(self, constraints: Constraints) -> None:
        self.constraints = constraints
        self._schemas = lru_cache(_CACHED)(self._read_schema)

    def check(self, tools: ToolRequest) -> tuple[str, ...]:
        """Return warnings about the schemas of ``tools``. Raises InputError if one cannot be used, if one that is
        strict cannot be enforced, or if there is no grammar of a forced call."""
        unenforced = {name: list(schema.unenforced) for name, schema in self._tools(tools).items()}
        if tools.forced:
            writer, grammar = self._grammar(tools)
            for name, keywords in writer.unenforced.items():
                unenforced[name] = list(dict.fromkeys([*unenforced[name], *keywords]))
            self._refuse_unenforced(tools, unenforced)
            if (reason := self.constraints.compile("lark", grammar).reason) is not None:
                raise InputError(f"tools: a call of them: {reason}", code=_CODE)
        else:
            self._refuse_unenforced(tools, unenforced)
        checked = [
            f"tool {name}: {word} is checked in finished calls" for name in unenforced for word in unenforced[name]
        ]
        ignored = [f"tool {name}: {note}: ignored" for name, tool in self._tools(tools).items() for note in tool.notes]
        return (*checked, *ignored)

    def structure(self, tools: ToolRequest) -> StructuredOutputs:
        """The structure of an answer that is a forced call."""
        return StructuredOutputs(grammar=self._grammar(tools)[1])

    def read(self, tools: ToolRequest, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """The content of the answer ``text`` and its calls."""
        arguments = {name: schema.fields for name, schema in self._tools(tools).items()}
        content, calls = TOOL_FORMATS[tools.format].read(text, arguments)
        return content, tuple(calls if tools.parallel else calls[:1])

    def error(self, tools: ToolRequest, calls: Sequence[ToolCall]) -> StructureError | None:
        """Return the error of the first invalid call of ``calls``; None if all are valid."""
        functions = tools.callable
        for number, call in enumerate(calls):
            path = f"/tool_calls/{number}/function"
            if call.name not in functions:
                message = f"no tool is named {call.name[:60]!r}"
                return StructureError(code=INVALID, message=message, path=f"{path}/name")
            schema = arguments_schema(call.name, functions[call.name].get("parameters"))
            problem = self.constraints.mismatch(StructuredOutputs(json=schema), call.arguments)
            if problem is not None:
                return StructureError(
                    code=INVALID,
                    message=f"call of {call.name}: {problem.message}",
                    path=f"{path}/arguments{problem.path}",
                    schema_path=problem.schema_path,
                )
        return None

    def _tools(self, tools: ToolRequest) -> dict[str, _ToolSchema]:
        schemas = {}
        for name, function in tools.callable.items():
            schemas[name] = schema = self._schemas(arguments_schema(name, function.get("parameters")))
            if schema.reason is not None:
                raise InputError(f"tools: parameters of {name}: {schema.reason}", code=_CODE)
        return schemas

    def _read_schema(self, text: str) -> _ToolSchema:
        structure = self.constraints.compile("json", text)
        enforced = structure.enforced
        return _ToolSchema(
            fields=ArgumentFields({} if structure.reason is not None else json.loads(enforced.text)),
            unenforced=enforced.unenforced,
            notes=enforced.notes,
            reason=structure.reason,
        )

    def _grammar(self, tools: ToolRequest) -> tuple[CallGrammar, str]:
        fields = {name: schema.fields for name, schema in self._tools(tools).items()}
        writer = CallGrammar(tools, fields, self._literal)
        return writer, TOOL_FORMATS[tools.format].grammar(writer)

    def _refuse_unenforced(self, tools: ToolRequest, unenforced: Mapping[str, Sequence[str]]) -> None:
        for name, keywords in unenforced.items():
            strict: Any = tools.callable[name].get("strict")
            if keywords and (tools.strict if strict is None else strict):
                raise InputError(
                    f"tools: parameters of {name}: {'; '.join(keywords)} cannot be enforced while a call is generated, "
                    "and strict is true (with strict false finished calls are validated)",
                    code=_CODE,
                )

    @cached_property
    def _literal(self) -> Callable[[str], str]:
        tokenizer = self.constraints.tokenizer
        return grammar_literal({tokenizer.token_text(token): token for token in tokenizer.special_ids})
