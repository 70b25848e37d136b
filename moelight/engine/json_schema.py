"""JSON Schema documents: where their schemas are, what their references point to, and which keywords they hold that the
specification, or this product, does not take. Pure Python; compiling and validating are elsewhere."""

from __future__ import annotations

import difflib
import json
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any] | bool

MAX_DEPTH = 400  # nested schemas; Python's own recursion limit is a thousand frames

_DIALECTS = {
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}
_DRAFT_NAMES = {4: "draft 4", 6: "draft 6", 7: "draft 7", 2019: "draft 2019-09", 2020: "draft 2020-12"}
_METASCHEMAS = ("http://json-schema.org/draft-", "https://json-schema.org/draft/")
# Keywords whose value is a schema, a list of schemas, an object of schemas, or one of these and something else.
_ONE = frozenset({
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "items", "prefixItems"})
_MAPS = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"})
_ASSERTIONS = frozenset({
    "$ref", "type", "enum", "const", "minimum", "maximum", "multipleOf", "minLength", "maxLength", "pattern", "format",
    "minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties", "required", "exclusiveMinimum",
    "exclusiveMaximum", "minContains", "maxContains", "dependentRequired", "$dynamicRef", "$recursiveRef",
})  # fmt: skip
_MEANT = sorted(_ONE | _LISTS | _MAPS | _ASSERTIONS)  # keywords whose misspelling would change what is asked for
_SILENT = frozenset({
    "$anchor", "$comment", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "$vocabulary", "id",
    "contentEncoding", "contentMediaType", "default", "deprecated", "description", "examples", "readOnly", "title",
    "writeOnly",
    # OpenAPI's annotations
    "discriminator", "example", "externalDocs", "xml",
})  # fmt: skip
# The first draft with a keyword, where that is not draft 4, and the last one.
_SINCE = {
    "const": 6, "contains": 6, "propertyNames": 6, "if": 7, "then": 7, "else": 7, "$recursiveRef": 2019,
    "dependentRequired": 2019, "dependentSchemas": 2019, "maxContains": 2019, "minContains": 2019,
    "unevaluatedItems": 2019, "unevaluatedProperties": 2019, "contentSchema": 2019, "prefixItems": 2020,
    "$dynamicRef": 2020,
}  # fmt: skip
_UNTIL = {"additionalItems": 2019, "$recursiveRef": 2019}
_DRAFT_3 = {"divisibleBy": "multipleOf", "disallow": "not", "extends": "allOf"}
_SWITCH = "x-guidance"


class SchemaError(Exception):
    """A document that cannot be used; the message says where and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """Where a schema is: its JSON pointer (``#/properties/a``) and the base URI of its references."""

    pointer: str
    base: str


class SchemaDocument:
    """A parsed schema: ``root``, its ``draft``, and the `locate`d schemas in it.

    Attributes:
        problems: reasons why it must be refused, each with its path.
        notes: keywords that ask for nothing, each with its path.
    """

    def __init__(self, text: str) -> None:
        """Raises SchemaError for a text that is no JSON, or whose root is no schema."""
        self.root = _parsed(text)
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.declared = isinstance(self.root, dict) and "$schema" in self.root
        self.draft = self._draft()
        self._locations: dict[int, Location] = {}
        self._resources: dict[str, dict[str, Any]] = {}
        self._anchors: dict[tuple[str, str], dict[str, Any]] = {}
        self._dynamic: dict[str, list[dict[str, Any]]] = {}
        self._references: list[tuple[dict[str, Any], str]] = []
        self.targets: set[int] = set()  # by `id`: the schemas that references point to
        if isinstance(self.root, dict):
            self._resources[""] = self.root
            self._index(self.root, "#", "", 0)
        position = 0
        while position < len(self._references):  # a target in an unknown keyword may hold further references
            node, keyword = self._references[position]
            target = self.resolve(node, keyword)
            if isinstance(target, dict):
                self.targets.add(id(target))
            elif target is None and keyword == "$ref" and not node[keyword].startswith(_METASCHEMAS):
                self.problems.append(
                    f"{self.locate(node).pointer}: $ref {node[keyword]!r} points outside the document, and nothing is "
                    "fetched (put its schema under $defs)"
                )
            position += 1

    @property
    def text(self) -> str:
        """The document for a validator: as it was written, but for draft 4's boolean bounds if it names no draft."""
        return json.dumps(self.root)

    @property
    def draft_name(self) -> str:
        return _DRAFT_NAMES[self.draft]

    def locate(self, node: dict[str, Any]) -> Location:
        return self._locations[id(node)]

    def keywords(self, node: dict[str, Any]) -> dict[str, Any]:
        """The keywords of ``node`` that its draft knows; up to draft 7 nothing stands beside ``$ref``."""
        if self.draft <= 7 and isinstance(node.get("$ref"), str):
            return {"$ref": node["$ref"]}
        return {name: value for name, value in node.items() if self._is_of_draft(name)}

    def resolve(self, node: dict[str, Any], keyword: str) -> Schema | None:
        """Resolve the reference ``keyword`` of ``node``; return None if the target is not a single schema of this
        document."""
        location, reference = self.locate(node), node[keyword]
        if keyword == "$recursiveRef":
            return None if self._recursive else self._resources.get(location.base)
        uri, fragment = urllib.parse.urldefrag(_joined(location.base, reference))
        resource = self._resources.get(uri)
        if resource is None:
            return None
        if not fragment:
            return resource
        if fragment.startswith("/"):
            return self._pointed(resource, fragment, uri)
        target = self._anchors.get((uri, fragment))
        if keyword == "$dynamicRef" and len(self._dynamic.get(fragment, ())) > 1 and target is not None:
            return None  # which of them is meant depends on the instance's path through the schemas
        return target

    def _draft(self) -> int:
        if not isinstance(self.root, dict):
            return 2020
        dialect = self.root.get("$schema")
        if dialect is None:  # a list as ``items`` is what drafts up to 2019-09 call ``prefixItems``
            return 2019 if _number_bounds(self.root) else 2020
        draft = _DIALECTS.get(str(dialect).rstrip("#"))
        if draft is None:
            dialects = ", ".join(_DIALECTS)
            self.problems.append(f"#: $schema {dialect!r} is no dialect known here (known: {dialects}; leave it out)")
        return draft or 2020

    def _index(self, node: dict[str, Any], pointer: str, base: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise SchemaError(f"{pointer[:80]}…: schemas are nested more than {MAX_DEPTH} deep")
        base = self._identify(node, base)
        self._locations[id(node)] = Location(pointer=pointer, base=base)
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(node.get(keyword), str):
                self._references.append((node, keyword))
        for keyword, value in node.items():
            self._check(keyword, value, pointer)
        for keyword, key, child in children(node):
            path = f"{pointer}/{keyword}" + ("" if key is None else f"/{escaped(key)}")
            if isinstance(child, dict) and id(child) not in self._locations:
                self._index(child, path, base, depth + 1)

    def _identify(self, node: dict[str, Any], base: str) -> str:
        """Register what ``node`` is called; returns the base URI of what is in it."""
        name = node.get("id" if self.draft == 4 else "$id")
        if isinstance(name, str) and not (self.draft <= 7 and "$ref" in node):
            uri, fragment = urllib.parse.urldefrag(_joined(base, name))
            if fragment and self.draft <= 7:
                self._anchors[uri or base, fragment] = node
            if not name.startswith("#"):
                base = uri
                self._resources[base] = node
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := node.get(keyword), str):
                self._anchors[base, anchor] = node
        if isinstance(anchor := node.get("$dynamicAnchor"), str):
            self._dynamic.setdefault(anchor, []).append(node)
        return base

    def _check(self, keyword: str, value: object, pointer: str) -> None:
        if keyword == _SWITCH:
            self.problems.append(f"{pointer}: {_SWITCH} sets options of a library and is no part of a schema")
        elif keyword in _DRAFT_3:
            self.problems.append(f"{pointer}: {keyword} is a keyword of draft 3 (use {_DRAFT_3[keyword]})")
        elif keyword == "nullable":
            if value:
                self.notes.append(
                    f"{pointer}: nullable is OpenAPI's and asks for nothing in JSON Schema (add 'null' to type)"
                )
        elif keyword in _SILENT or keyword.startswith("x-"):
            pass
        elif keyword not in _MEANT:
            if near := _misspelt(keyword):
                self.problems.append(f"{pointer}: unknown keyword {keyword!r} (did you mean {near!r}?)")
            else:
                self.notes.append(f"{pointer}: unknown keyword {keyword!r}")
        elif not self._is_of_draft(keyword):
            self.notes.append(f"{pointer}: {keyword} is no keyword of {self.draft_name}")

    def _is_of_draft(self, keyword: str) -> bool:
        return _SINCE.get(keyword, 0) <= self.draft <= _UNTIL.get(keyword, 2020)

    def _pointed(self, resource: dict[str, Any], fragment: str, base: str) -> Schema | None:
        """The schema at a JSON pointer, which is indexed if no keyword leads there."""
        node: Any = resource
        pointer = self.locate(resource).pointer
        for part in urllib.parse.unquote(fragment).split("/")[1:]:
            if isinstance(node, dict) and (location := self._locations.get(id(node))) is not None:
                base = location.base
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            elif isinstance(node, dict) and key in node:
                node = node[key]
            else:
                return None
            pointer += f"/{part}"
        if isinstance(node, dict) and id(node) not in self._locations:
            self._index(node, pointer, base, 1)
        return node if isinstance(node, (dict, bool)) else None

    @property
    def _recursive(self) -> bool:
        return any('"$recursiveAnchor"' in json.dumps(resource) for resource in self._resources.values())


def children(node: dict[str, Any]) -> Iterator[tuple[str, str | int | None, Schema]]:
    """The schemas directly in ``node``: their keyword, and their key or index in its value."""
    for keyword, value in node.items():
        if keyword in _ONE and isinstance(value, (dict, bool)):
            yield keyword, None, value
        elif keyword in _LISTS and isinstance(value, list):
            yield from ((keyword, index, child) for index, child in enumerate(value) if isinstance(child, (dict, bool)))
        elif keyword in _MAPS and isinstance(value, dict):
            yield from ((keyword, key, child) for key, child in value.items() if isinstance(child, (dict, bool)))


def _parsed(text: str) -> Schema:
    def refuse(name: str) -> None:
        raise SchemaError(f"{name} is no number of JSON")

    try:
        text.encode()
        root = json.loads(text, parse_constant=refuse, parse_float=_number)
    except UnicodeEncodeError:
        raise SchemaError("it holds half of a surrogate pair") from None
    except json.JSONDecodeError as error:
        raise SchemaError(f"it is not JSON ({error})") from None
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None
    if not isinstance(root, (dict, bool)):
        raise SchemaError("a schema is an object, true or false")
    if root is False:
        raise SchemaError("the schema false allows no value")
    return root


def _number(text: str) -> float | int:
    """A number of JSON; 2.0 is the integer 2."""
    value = float(text)
    if value in (float("inf"), -float("inf")):
        raise SchemaError(f"the number {text[:40]} is out of range")
    return int(value) if value.is_integer() and abs(value) < 1 << 53 else value


def _number_bounds(root: dict[str, Any]) -> bool:
    """Turn draft 4's ``exclusiveMaximum: true`` beside ``maximum`` into the number that later drafts have. Returns true
    if ``items`` is a list somewhere, and nowhere ``prefixItems``."""
    lists, prefixes, left = False, False, [root]
    while left:
        node = left.pop()
        for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(node.get(exclusive), bool) and node.pop(exclusive) and bound in node:
                node[exclusive] = node.pop(bound)
        lists, prefixes = lists or isinstance(node.get("items"), list), prefixes or "prefixItems" in node
        left += [child for _, _, child in children(node) if isinstance(child, dict)]
    return lists and not prefixes


def _joined(base: str, reference: str) -> str:
    """``reference`` resolved against ``base`` (RFC 3986), whatever the scheme."""
    if reference.startswith("#"):
        return urllib.parse.urldefrag(base)[0] + reference
    scheme = urllib.parse.urlsplit(base).scheme
    if not scheme or scheme in urllib.parse.uses_relative or urllib.parse.urlsplit(reference).scheme:
        return urllib.parse.urljoin(base, reference)
    return scheme + urllib.parse.urljoin("http" + base[len(scheme) :], reference)[len("http") :]


def _misspelt(keyword: str) -> str | None:
    """The keyword of which ``keyword`` is a misspelling, if it is one."""
    by_case = {meant.lower(): meant for meant in _MEANT}
    if keyword.lower() in by_case:
        return by_case[keyword.lower()]
    near = difflib.get_close_matches(keyword, [meant for meant in _MEANT if len(meant) > 3], n=1, cutoff=0.84)
    return near[0] if near else None


def escaped(key: str | int) -> str:
    """``key`` as a part of a JSON pointer."""
    return str(key).replace("~", "~0").replace("/", "~1")
