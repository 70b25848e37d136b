"""The part of a JSON schema that a grammar can enforce: a schema for llguidance that accepts whatever the original one
accepts. What it leaves out is listed, since only the finished answer can be checked for it.

::

    text ─► SchemaDocument ─► relaxed schema ─► compiles? ─► EnforcedSchema
                                   ▲               │ no: without one keyword after another
                                   └───────────────┘
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from moelight.engine.json_schema import Schema, SchemaDocument, SchemaError

Keyword: TypeAlias = tuple[str, str]  # the pointer of a schema, and a keyword in it
UNSATISFIABLE = "Unsatisfiable schema"  # llguidance's word

# The formats that llguidance enforces; any other is an annotation.
FORMATS = frozenset({
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
})  # fmt: skip
_COPIED = ("type", "enum", "const", "required", "minItems", "maxItems")
# Keywords that llguidance enforces in some schemas, in the order in which they are given up.
_OPTIONAL = (
    "oneOf", "patternProperties", "minProperties", "maxProperties", "multipleOf", "pattern", "minLength", "maxLength",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
)  # fmt: skip
_APPLICATORS = (
    "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies",
)  # fmt: skip
_TYPES = ("null", "boolean", "object", "array", "number", "string")
_MAX_TRIALS = 64


class PatternLogic(Protocol):
    """Questions about regular expressions, which llguidance answers."""

    def matches(self, pattern: str, name: str) -> bool: ...

    def exhausted(self, pattern: str, names: Collection[str]) -> bool:
        """True if ``pattern`` matches no other property name than ``names``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnforcedSchema:
    """``text``: the schema that a grammar enforces. ``unenforced``: keywords that only validation checks, as
    ``#/properties/a: not``; ``notes``: what asks for nothing."""

    text: str
    unenforced: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def enforced(document: SchemaDocument, compiles: Callable[[str], str | None], patterns: PatternLogic) -> EnforcedSchema:
    """The part of ``document`` that can be enforced. ``compiles`` returns why a schema does not. Raises SchemaError if
    nothing can be generated."""
    result = _Relaxation(document, patterns)
    if (reason := compiles(result.text)) is not None:
        result = _search(document, compiles, patterns, result, reason)
    notes = (*document.notes, *result.notes)
    return EnforcedSchema(text=result.text, unenforced=tuple(dict.fromkeys(result.unenforced)), notes=notes)


def _search(
    document: SchemaDocument,
    compiles: Callable[[str], str | None],
    patterns: PatternLogic,
    first: _Relaxation,
    reason: str,
) -> _Relaxation:
    """The relaxation that leaves out as little as makes it compile: every keyword that may be left out is, then each is
    put back that does no harm, kinds of keywords before single ones."""
    formats = {item for item in first.optional if item[1] == "format"}

    def relaxed(left_out: Iterable[Keyword]) -> tuple[_Relaxation, bool]:
        tried = _Relaxation(document, patterns, frozenset(left_out))
        failure = compiles(tried.text)
        if failure is not None and failure.startswith(UNSATISFIABLE) and not formats <= tried.left_out:
            tried = _Relaxation(document, patterns, tried.left_out | formats)  # annotations contradict nothing
            failure = compiles(tried.text)
        if failure is not None and failure.startswith(UNSATISFIABLE):
            raise SchemaError(f"no value satisfies it ({failure})")
        return tried, failure is None

    if reason.startswith(UNSATISFIABLE):
        tried, works = relaxed(())
        if works:
            return tried
    best, works = relaxed(first.optional)
    if not works:
        raise SchemaError(reason)
    trials = 0
    kinds = [{item for item in first.optional if item[1] == kind} for kind in (*reversed(_OPTIONAL), "format")]
    for group in (*kinds, *({item} for kind in kinds for item in sorted(kind))):
        if trials < _MAX_TRIALS and group and group <= best.left_out:
            tried, works = relaxed(best.left_out - group)
            trials += 1
            best = tried if works else best
    return best


@dataclass(slots=True)
class _Relaxation:
    """One relaxed schema of ``document``, without the keywords ``left_out``; `optional` could be left out too."""

    document: SchemaDocument
    patterns: PatternLogic
    left_out: frozenset[Keyword] = frozenset()
    optional: list[Keyword] = field(default_factory=list)
    unenforced: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    text: str = ""
    _names: dict[int, str] = field(default_factory=dict)
    _waiting: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        root = self.document.root
        result = self._written(root) if isinstance(root, dict) else {}
        definitions = {}
        while self._waiting:
            node = self._waiting.pop()
            definitions[self._names[id(node)]] = self._written(node)
        if definitions:
            result["$defs"] = definitions
        self.text = json.dumps(result)

    def _schema(self, node: Schema) -> Schema:
        """``node``, or a reference to where it is written if others refer to it too."""
        if not isinstance(node, dict):
            return {} if node else False
        return self._reference(node) if id(node) in self.document.targets else self._written(node)

    def _reference(self, node: dict[str, Any]) -> dict[str, Any]:
        if node is self.document.root:
            return {"$ref": "#"}
        if id(node) not in self._names:
            self._names[id(node)] = f"s{len(self._names)}"
            self._waiting.append(node)
        return {"$ref": f"#/$defs/{self._names[id(node)]}"}

    def _written(self, node: dict[str, Any]) -> dict[str, Any]:
        keywords, pointer = self.document.keywords(node), self.document.locate(node).pointer
        result = {name: keywords[name] for name in _COPIED if name in keywords}
        parts: list[Schema] = []  # of an allOf
        for name in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(keywords.get(name), str):
                self._follow(node, name, pointer, parts)
        for name in ("pattern", "minLength", "maxLength", "multipleOf"):
            self._optional(keywords, pointer, name, result)
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            self._optional(keywords, pointer, name, result)
        self._format(keywords, pointer, result)
        self._arrays(keywords, pointer, result)
        self._properties(keywords, pointer, result)
        self._property_counts(keywords, pointer, result)
        parts += [self._schema(child) for child in keywords.get("allOf", ())]
        for name in ("anyOf", "oneOf"):
            if name in keywords:
                self._alternatives(name, keywords[name], pointer, parts)
        self._negations(keywords, pointer, parts)
        if len(parts) == 1 and isinstance(parts[0], dict) and not parts[0].keys() & result.keys():
            return {**result, **parts[0]}
        return {**result, "allOf": parts} if parts else result

    def _follow(self, node: dict[str, Any], name: str, pointer: str, parts: list[Schema]) -> None:
        target = self.document.resolve(node, name)
        if target is None:
            self._drop(pointer, name)
        else:
            parts.append(self._reference(target) if isinstance(target, dict) else self._schema(target))

    def _optional(self, keywords: dict[str, Any], pointer: str, name: str, result: dict[str, Any]) -> None:
        asks = name in keywords and (keywords[name] != 0 or not name.startswith("min") or name == "minimum")
        if asks and self._keeps(pointer, name):
            result[name] = keywords[name]

    def _keeps(self, pointer: str, name: str) -> bool:
        self.optional.append((pointer, name))
        if (pointer, name) in self.left_out:
            self._drop(pointer, name)
            return False
        return True

    def _drop(self, pointer: str, name: str) -> None:
        self.unenforced.append(f"{pointer}: {name}")

    def _format(self, keywords: dict[str, Any], pointer: str, result: dict[str, Any]) -> None:
        if not isinstance(name := keywords.get("format"), str):
            return
        if name in FORMATS:
            self.optional.append((pointer, "format"))
        if name in FORMATS and (pointer, "format") not in self.left_out:
            result["format"] = name
        else:
            self.notes.append(f"{pointer}: format {name!r} is an annotation")

    def _arrays(self, keywords: dict[str, Any], pointer: str, result: dict[str, Any]) -> None:
        items, prefix = keywords.get("items"), keywords.get("prefixItems")
        if isinstance(items, list):
            prefix = items
            items = keywords.get("additionalItems")
        if "unevaluatedItems" in keywords and items is None:
            if keywords["unevaluatedItems"] in (True, {}):
                pass
            elif "contains" in keywords or any(name in keywords for name in _APPLICATORS):
                self._drop(pointer, "unevaluatedItems")
            else:  # nothing but `prefixItems` evaluates an item
                items = keywords["unevaluatedItems"]
        if prefix:
            result["prefixItems"] = [self._schema(child) for child in prefix]
        if items is not None:
            result["items"] = self._schema(items)
        if keywords.get("uniqueItems") and keywords.get("maxItems", 2) > 1:
            self._drop(pointer, "uniqueItems")
        least = keywords.get("minContains", 1)
        if "contains" in keywords and (least or "maxContains" in keywords):
            self._drop(pointer, "contains")
            result["minItems"] = max(keywords.get("minItems", 0), least)
        if not result.get("minItems", 1):
            del result["minItems"]

    def _properties(self, keywords: dict[str, Any], pointer: str, result: dict[str, Any]) -> None:
        properties = {name: self._schema(child) for name, child in keywords.get("properties", {}).items()}
        others = keywords.get("additionalProperties")
        if "unevaluatedProperties" in keywords and others is None:
            if keywords["unevaluatedProperties"] in (True, {}):
                pass
            elif any(name in keywords for name in _APPLICATORS):
                self._drop(pointer, "unevaluatedProperties")
            else:  # nothing but `properties` and `patternProperties` evaluates a property
                others = keywords["unevaluatedProperties"]
        if by_pattern := keywords.get("patternProperties"):
            if self._keeps(pointer, "patternProperties"):
                left = self._by_pattern(by_pattern, properties)
                if left:
                    result["patternProperties"] = left
            else:
                others = None  # without the patterns it would apply to more properties
        if properties:
            result["properties"] = properties
        if others is not None:
            result["additionalProperties"] = self._schema(others)

    def _property_counts(self, keywords: dict[str, Any], pointer: str, result: dict[str, Any]) -> None:
        if keywords.get("minProperties", 0) > len(set(keywords.get("required", ()))):
            self._optional(keywords, pointer, "minProperties", result)
        closed = result.get("additionalProperties") is False and "patternProperties" not in result
        if not (closed and len(result.get("properties", ())) <= keywords.get("maxProperties", 0)):
            self._optional(keywords, pointer, "maxProperties", result)
        if keywords.get("propertyNames", True) not in (True, {}):
            self._drop(pointer, "propertyNames")
        for name in ("dependentRequired", "dependentSchemas", "dependencies"):
            if any(value not in ([], True, {}) for value in keywords.get(name, {}).values()):
                self._drop(pointer, name)

    def _by_pattern(self, by_pattern: dict[str, Schema], properties: dict[str, Schema]) -> dict[str, Schema]:
        """The patterns that can match another name than ``properties``; llguidance offers further properties for any
        pattern, and finds no name for them. The schemas of others are added to the properties that they match."""
        left = {}
        for pattern, child in by_pattern.items():
            if properties and self.patterns.exhausted(pattern, properties):
                matched = [name for name in properties if self.patterns.matches(pattern, name)]
                properties |= {name: {"allOf": [properties[name], self._schema(child)]} for name in matched}
            else:
                left[pattern] = self._schema(child)
        return left

    def _alternatives(self, name: str, branches: list[Schema], pointer: str, parts: list[Schema]) -> None:
        """One schema is enough where no value satisfies two of them."""
        result = [self._schema(child) for child in branches if child is not False]
        overlaps = name == "oneOf" and len(branches) > 1 and not _disjoint(self.document, branches)
        parts.append({"oneOf" if overlaps and self._keeps(pointer, name) else "anyOf": result})

    def _negations(self, keywords: dict[str, Any], pointer: str, parts: list[Schema]) -> None:
        if "not" in keywords:
            negated = keywords["not"]
            if negated in (True, {}):
                parts.append(False)
            elif isinstance(negated, dict) and negated.keys() == {"type"} and "integer" not in _types(negated):
                parts.append({"type": [kind for kind in _TYPES if kind not in _types(negated)]})
            elif negated is not False:
                self._drop(pointer, "not")
        if "if" in keywords and any(keywords.get(name, True) not in (True, {}) for name in ("then", "else")):
            self._drop(pointer, "if")


def _disjoint(document: SchemaDocument, branches: list[Schema]) -> bool:
    """True if provably no value satisfies two of ``branches``: their types differ, or their constants, or those of a
    property that all require."""
    nodes = [_resolved(document, branch) for branch in branches]
    return all(_differ(document, left, right) for index, left in enumerate(nodes) for right in nodes[index + 1 :])


def _differ(document: SchemaDocument, left: dict[str, Any], right: dict[str, Any], depth: int = 2) -> bool:
    if not _kinds(left) & _kinds(right):
        return True
    constants = _constants(left), _constants(right)
    if constants[0] is not None and constants[1] is not None and not constants[0] & constants[1]:
        return True
    if not depth or _kinds(left) & _kinds(right) != {"object"}:
        return False
    shared = set(left.get("required", ())) & set(right.get("required", ()))
    members = left.get("properties", {}), right.get("properties", {})
    pairs = [[member[name] for member in members] for name in sorted(shared) if all(name in m for m in members)]
    return any(
        _differ(document, _resolved(document, first), _resolved(document, second), depth - 1) for first, second in pairs
    )


def _resolved(document: SchemaDocument, node: Schema) -> dict[str, Any]:
    """The keywords of ``node``, behind a chain of references."""
    for _ in range(8):
        if not isinstance(node, dict):
            break
        keywords = document.keywords(node)
        if set(keywords) != {"$ref"}:
            return keywords
        target = document.resolve(node, "$ref")
        node = {} if target is None else target
    return {}


def _types(node: dict[str, Any]) -> list[str]:
    declared = node.get("type", [*_TYPES])
    return [declared] if isinstance(declared, str) else declared


def _kinds(node: dict[str, Any]) -> set[str]:
    """The types of value that ``node`` may accept; integers are numbers."""
    return {"number" if kind == "integer" else kind for kind in _types(node)}


def _constants(node: dict[str, Any]) -> set[str] | None:
    """The values of ``node``, as JSON, if it names them."""
    values = [node["const"]] if "const" in node else node.get("enum")
    return None if values is None else {json.dumps(_comparable(value), sort_keys=True) for value in values}


def _comparable(value: Any) -> Any:
    """``value`` with its whole numbers as integers: 1.0 equals 1."""
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    if isinstance(value, dict):
        return {name: _comparable(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
