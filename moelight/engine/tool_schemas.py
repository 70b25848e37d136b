"""The arguments of tools as JSON schemas: which fields a call has, and which kinds of values each takes. Works on
schemas that `schema_relaxation` has written, whose references are ``#`` and ``#/$defs/NAME``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from moelight.core.errors import InputError
from moelight.engine.json_schema import Schema, children

KINDS = frozenset({"null", "boolean", "object", "array", "number", "string"})
_ROOT = "arguments"  # the name under which a schema of a field refers to that of all arguments
_MAX_REFERENCES = 16


def arguments_schema(name: str, parameters: Mapping[str, Any] | None) -> str:
    """The JSON schema of the arguments of tool ``name``, which are an object; raises InputError if ``parameters`` allow
    none."""
    schema = dict(parameters or {})
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise InputError(
            f"tools: parameters of {name}: type is {json.dumps(kinds)[:40]}, and arguments are an object (write "
            '"type": "object")',
            code="invalid_structured_output",
        )
    try:
        return json.dumps({**schema, "type": "object"})
    except RecursionError:
        raise InputError(
            f"tools: parameters of {name}: they are nested too deeply", code="invalid_structured_output"
        ) from None


class ArgumentFields:
    """The schema of a tool's arguments, and their ``fields``: a schema for each name. ``required`` fields are part of
    every call. Of alternatives (``anyOf``) a field may have the schema of any."""

    def __init__(self, schema: Schema) -> None:
        self.root: dict[str, Any] = schema if isinstance(schema, dict) else {}
        fields, required = self._members(self.root)
        others = self.root.get("additionalProperties", {})
        self.fields = {name: schema for name, schema in fields.items() if schema is not False}
        self.fields |= {name: others for name in sorted(required - fields.keys()) if others is not False}
        self.required = frozenset(required)

    @cached_property
    def alternatives(self) -> tuple[str, ...]:
        """Keywords between whose schemas the fields of a call do not choose together."""
        return tuple(name for name in ("anyOf", "oneOf") if len(self.root.get(name, ())) > 1)

    def resolve(self, schema: Schema) -> Schema:
        """``schema``, or what it refers to if it is a reference alone."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
                break
            schema = self._target(schema["$ref"])
        return schema

    def standalone(self, schema: Schema) -> Schema:
        """``schema`` with everything that it refers to."""
        if not isinstance(schema, dict) or not _refers(schema):
            return schema
        definitions: dict[str, Schema] = self.root.get("$defs", {})
        if not any(_refers(child, "#") for child in (schema, *definitions.values())):
            return {**schema, "$defs": definitions}
        arguments = {name: value for name, value in self.root.items() if name != "$defs"}
        renamed = {name: _renamed(child) if isinstance(child, dict) else child for name, child in definitions.items()}
        return {**_renamed(schema), "$defs": {**renamed, _ROOT: _renamed(arguments)}}

    def kinds(self, schema: Schema, depth: int = 0) -> frozenset[str]:
        """The kinds of JSON values that ``schema`` may accept; integers are numbers."""
        if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
            return KINDS if schema else frozenset()
        kinds = KINDS
        if "type" in schema:
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            kinds &= {"number" if name == "integer" else name for name in names}
        if "$ref" in schema:
            kinds &= self.kinds(self._target(schema["$ref"]), depth + 1)
        if (values := enumerated(schema)) is not None:
            kinds &= {kind_of(value) for value in values}
        for part in schema.get("allOf", ()):
            kinds &= self.kinds(part, depth + 1)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                kinds &= frozenset().union(*(self.kinds(branch, depth + 1) for branch in schema[name]))
        return kinds

    def _target(self, reference: str) -> Schema:
        if reference == "#":
            return self.root
        target: Schema = self.root.get("$defs", {}).get(reference.removeprefix("#/$defs/"), {})
        return target

    def _members(self, schema: Schema, depth: int = 0) -> tuple[dict[str, Schema], set[str]]:
        """The properties of an object that ``schema`` describes, and those that it must have."""
        if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
            return {}, set()
        fields: dict[str, list[Schema]] = {name: [child] for name, child in schema.get("properties", {}).items()}
        required = set(schema.get("required", ()))
        parts = [self._target(schema["$ref"])] if "$ref" in schema and schema["$ref"] != "#" else []
        for part in (*parts, *schema.get("allOf", ())):
            inner, needed = self._members(part, depth + 1)
            required |= needed
            for name, child in inner.items():
                fields.setdefault(name, []).append(child)
        for keyword in ("anyOf", "oneOf"):
            branches = [self._members(branch, depth + 1) for branch in schema.get(keyword, ())]
            if branches:
                required |= set.intersection(*(needed for _, needed in branches))
            for name in dict.fromkeys(name for inner, _ in branches for name in inner):
                choices = [inner[name] for inner, _ in branches if inner.get(name, False) is not False]
                fields.setdefault(name, []).append(_one_of(choices, "anyOf") if choices else False)
        return {name: _one_of(schemas, "allOf") for name, schemas in fields.items()}, required


def enumerated(schema: Mapping[str, Any]) -> list[Any] | None:
    """The only values of ``schema``, if it names them."""
    values: list[Any] | None = [schema["const"]] if "const" in schema else schema.get("enum")
    return values


def kind_of(value: object) -> str:
    """The kind of a JSON value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, (dict, list, str)):
        return {dict: "object", list: "array", str: "string"}[type(value)]
    return "number"


def _one_of(schemas: Iterable[Schema], keyword: str) -> Schema:
    distinct: list[Schema] = []
    for schema in schemas:
        if schema not in distinct:
            distinct.append(schema)
    if keyword == "allOf" and False in distinct:
        return False
    return distinct[0] if len(distinct) == 1 else {keyword: distinct}


def _refers(schema: Schema, target: str | None = None) -> bool:
    """True if a reference, to ``target`` or to anything, is in ``schema``."""
    if not isinstance(schema, dict):
        return False
    here = "$ref" in schema and target in (None, schema["$ref"])
    return here or any(_refers(child, target) for _, _, child in children(schema))


def _renamed(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` with references to the whole document named `_ROOT`."""
    result = dict(schema)
    for keyword, key, child in children(schema):
        if not isinstance(child, dict):
            continue
        if key is None:
            result[keyword] = _renamed(child)
        else:
            if result[keyword] is schema[keyword]:
                result[keyword] = schema[keyword].copy()
            result[keyword][key] = _renamed(child)
    if result.get("$ref") == "#":
        result["$ref"] = f"#/$defs/{_ROOT}"
    return result
