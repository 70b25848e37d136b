"""Validates finished answers against their JSON schemas, with jsonschema-rs. Runs in a `ConfinedProcess`: schemas and
answers are untrusted, and a regular expression or a chain of references may take any time. Nothing is fetched; formats
are annotations, as in the specification."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, TypedDict

import jsonschema_rs

from moelight.engine.json_schema import SchemaDocument, SchemaError, escaped

_CACHED = 64  # validators
_MAX_MESSAGE = 200  # characters
_VALIDATORS = {2019: jsonschema_rs.Draft201909Validator, 2020: jsonschema_rs.Draft202012Validator}


class Mismatch(TypedDict):
    """A validation error of an answer, with ``path`` and ``schema_path`` as JSON pointers."""

    message: str
    path: str
    schema_path: str


def check_schema(document: SchemaDocument) -> None:
    """Raise SchemaError, with the path, if ``document`` is no valid schema of its draft."""
    try:
        _validator(document)
    except jsonschema_rs.ValidationError as error:
        raise SchemaError(f"{_pointer(error.instance_path, '#')}: {_short(error.message)}") from None
    except ValueError as error:
        raise SchemaError(_short(str(error))) from None


def mismatch(schema: str, answer: str) -> Mismatch | None:
    """Why ``answer`` is no JSON text of a value that ``schema`` accepts; None if it is one."""
    try:
        value = json.loads(answer, parse_constant=_refuse)
        error = next(_cached(schema).iter_errors(value), None)
    except json.JSONDecodeError as problem:
        return {"message": f"the answer is not JSON ({problem})", "path": "", "schema_path": ""}
    except RecursionError:
        return {"message": "the answer is nested too deeply to be parsed", "path": "", "schema_path": ""}
    except ValueError as problem:  # half of a surrogate pair, or an integer of thousands of digits
        return {"message": f"the answer cannot be parsed ({_short(str(problem))})", "path": "", "schema_path": ""}
    if error is None:
        return None
    return {
        "message": _short(error.message),
        "path": _pointer(error.instance_path),
        "schema_path": _pointer(error.schema_path),
    }


@lru_cache(_CACHED)
def _cached(schema: str) -> Any:
    return _validator(SchemaDocument(schema))


def _validator(document: SchemaDocument) -> Any:
    if document.declared:
        return jsonschema_rs.validator_for(json.loads(document.text), offline=True)
    return _VALIDATORS[document.draft](json.loads(document.text), offline=True)


def _refuse(name: str) -> None:
    raise json.JSONDecodeError(f"{name} is no number of JSON", name, 0)


def _pointer(path: list[str | int], root: str = "") -> str:
    return root + "".join(f"/{escaped(part)}" for part in path)


def _short(message: str) -> str:
    line = " ".join(message[: 2 * _MAX_MESSAGE].split())
    return line if len(line) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]}…"
