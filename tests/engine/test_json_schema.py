"""JSON schemas: what a grammar enforces of them, what validation does, what is refused; and answers that are generated
again because they fail validation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moelight.core.errors import InputError
from moelight.core.policy import Policy
from moelight.core.request import SamplingParams, StructuredOutputs
from moelight.engine.constraints import Constraints
from moelight.engine.engine import Engine
from moelight.engine.schema_relaxation import FORMATS
from moelight.engine.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[2] / "moelight" / "demo"


@pytest.fixture(scope="module")
def constraints() -> Iterator[Constraints]:
    made = Constraints(Tokenizer.from_dir(DEMO), 98)
    yield made
    made.close()


def verdict(constraints: Constraints, schema: Any, text: str) -> str:
    """``rejected`` by the constraint, ``invalid`` for the validator, or ``accepted``."""
    outputs = StructuredOutputs(json=json.dumps(schema))
    constraint = constraints.open(outputs)
    for token in Tokenizer.from_dir(DEMO).encode(text):
        mask = None if constraint.complete else constraint.allowed()
        if mask is None or not int(mask[token // 32]) >> token % 32 & 1:
            return "rejected"
        constraint.go_on(token)
    if not constraint.accepts:
        return "rejected"
    return "accepted" if constraints.mismatch(outputs, text) is None else "invalid"


KIND = {"type": "object", "required": ["kind"]}
A = {**KIND, "properties": {"kind": {"const": "a"}}}
B = {**KIND, "properties": {"kind": {"enum": ["b", "c"]}}}
SCORE = {"properties": {"score": {"type": "integer", "multipleOf": 5}}, "required": ["score"]}
CLOSED = {"type": "object", **SCORE, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "accepted", "rejected"),
    [
        (True, "1", "x"),
        ({"type": "array", "uniqueItems": False, "minItems": 0, "contains": {}, "minContains": 0}, "[1, 1]", "1"),
        ({"type": "string", "minLength": 2.0, "contentEncoding": "base64"}, '"ab"', '"a"'),
        ({"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": A, "B": B}}, '{"kind": "c"}', "{}"),
        ({"$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": "integer"}}}, "1", '"a"'),
        ({"$id": "http://a.b/c/d", "$ref": "e", "$defs": {"a": {"$id": "/c/e", "type": "integer"}}}, "1", '"a"'),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, '{"a": 1}', '{"b": 1}'),
        ({"not": {"type": ["string", "object"]}}, "1", '"a"'),
        ({"items": [{"type": "integer"}], "additionalItems": False}, "[1]", "[1, 2]"),
        ({"maximum": 3, "exclusiveMaximum": True}, "2", "3"),
        ({**CLOSED, "patternProperties": {"^score$": {"maximum": 10}}}, '{"score": 5}', '{"score": 15}'),
        ({**CLOSED, "patternProperties": {"^s": {"maximum": 10}}}, '{"score": 5, "so": 2}', '{"score": 15}'),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a", "maxLength": 1,
          "definitions": {"a": {"type": "string"}}}, '"abc"', "1"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, (dict, bool)) else "",
)  # fmt: skip
def test_the_grammar_enforces(constraints: Constraints, schema: Any, accepted: str, rejected: str) -> None:
    outputs = StructuredOutputs(json=json.dumps(schema), strict=True)
    assert not [note for note in constraints.check(outputs) if "checked" in note]
    assert verdict(constraints, schema, accepted) == "accepted"
    assert verdict(constraints, schema, rejected) == "rejected"


@pytest.mark.parametrize(
    ("schema", "unenforced", "accepted", "invalid"),
    [
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, ["#/properties/a: uniqueItems"],
         '{"a": [1]}', '{"a": [1, 1]}'),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}], "not": {"const": 9}}, ["#: oneOf", "#: not"], "1", "9"),
        ({"if": {"minimum": 3}, "then": {"multipleOf": 2}}, ["#: if"], "4", "5"),
        ({"pattern": "^(?=a)[a-z]", "minLength": 2}, ["#: pattern"], '"ab"', '"ba"'),
        ({"patternProperties": {"a": {"type": "integer"}, "b": {"minimum": 3}}, "additionalProperties": False,
          "minProperties": 1}, ["#: patternProperties"], '{"ab": 3}', '{"x": 3}'),
        ({"minProperties": 1, "properties": {"a": {}}}, ["#: minProperties"], '{"a": 1}', "{}"),
        ({"$defs": {"n": {"not": {"const": 1}}}, "allOf": [{"$ref": "#/$defs/n"}]}, ["#/$defs/n: not"], "2", "1"),
        ({"dependencies": {"a": ["b"]}}, ["#: dependencies"], '{"b": 1}', '{"a": 1}'),
        ({"minimum": 1e308}, ["#: minimum"], "1e309", "5"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)  # fmt: skip
def test_validation_checks_what_the_grammar_cannot_and_strict_refuses_that(
    constraints: Constraints, schema: Any, unenforced: list[str], accepted: str, invalid: str
) -> None:
    notes = constraints.check(StructuredOutputs(json=json.dumps(schema)))
    assert [note for note in notes if "checked" in note] == [
        f"{name} is checked in finished answers" for name in unenforced
    ]
    assert verdict(constraints, schema, accepted) == "accepted"
    assert verdict(constraints, schema, invalid) == "invalid"
    with pytest.raises(InputError) as refusal:
        constraints.check(StructuredOutputs(json=json.dumps(schema), strict=True))
    assert all(name in str(refusal.value) for name in unenforced) and "strict false" in str(refusal.value)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"minLenght": 2, "properties": {"a": {"maximun": 3}, "b": {"requried": []}}},
         ["#: unknown keyword 'minLenght' (did you mean 'minLength'?)", "#/properties/a: unknown keyword 'maximun'",
          "(did you mean 'required'?)"]),
        ({"items": {"x-guidance": {"lenient": True}}}, ["#/items: x-guidance"]),
        ({"$ref": "https://example.com/a.json"}, ["outside the document", "$defs"]),
        ({"divisibleBy": 3}, ["draft 3 (use multipleOf)"]),
        ({"properties": {"a": {"required": True}}}, ["#/properties/a/required: true is not of type"]),
        ({"type": "string", "minLength": 5, "maxLength": 2}, ["no value satisfies it", "minLength (5)"]),
        ({"$schema": "https://example.com/dialect"}, ["no dialect known here"]),
        (False, ["allows no value"]),
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
def test_refusals_name_every_path_and_what_to_do(constraints: Constraints, schema: Any, says: list[str]) -> None:
    with pytest.raises(InputError) as refusal:
        constraints.check(StructuredOutputs(json=json.dumps(schema)))
    assert "JSON Schema" in str(refusal.value)
    assert [text for text in says if text not in str(refusal.value)] == []


def test_what_asks_for_nothing_is_noted(constraints: Constraints) -> None:
    properties = {
        "a": {"type": "string", "format": "path", "nullable": True, "example": "x"},
        "minLenght": {"type": "integer", "format": "int32", "x-order": 1, "colour": 2},
    }
    notes = "\n".join(constraints.check(StructuredOutputs(json={"properties": properties}, strict=True)))
    assert "#/properties/a: format 'path' is an annotation" in notes
    assert "#/properties/a: nullable is OpenAPI's" in notes
    assert "#/properties/minLenght: unknown keyword 'colour'" in notes
    assert len(notes.splitlines()) == 4


def test_the_formats_that_a_grammar_enforces_are_those_of_llguidance(constraints: Constraints) -> None:
    for name in sorted(FORMATS):
        assert constraints.check(StructuredOutputs(json={"type": "string", "format": name})) == ()
        assert verdict(constraints, {"type": "string", "format": name}, '"?"') == "rejected"


@pytest.mark.parametrize(
    ("text", "path"),
    [('{"a": 1, "a": 2}', ""), ('{"a": 1, "b": "x"}', "/b"), ("[", ""), ("NaN", ""),
     ('"\\ud800"', ""), ("[" * 9999, "")],
    ids=["repeated name", "path", "cut", "no number", "surrogate", "deep"],
)  # fmt: skip
def test_a_mismatch_says_where(constraints: Constraints, text: str, path: str) -> None:
    schema = {"minProperties": 2, "additionalProperties": {"type": "integer"}}
    problem = constraints.mismatch(StructuredOutputs(json=schema), text)
    assert problem is not None
    assert (problem.code, problem.path) == ("structured_output_invalid", path)


def test_a_schema_that_cannot_be_validated_in_time_marks_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moelight.engine.grammars.TRIED_S", 0.3)
    hostile = Constraints(Tokenizer.from_dir(DEMO), 98)
    schema: Any = {"allOf": [{"not": {"const": number}} for number in range(2)]}
    for _ in range(12):  # every level is tried twice
        schema = {"anyOf": [{"allOf": [schema, {"not": {}}]}, {"allOf": [schema, {"not": {}}]}]}
    big = json.dumps([[0] * 300] * 300)
    problem = hostile.mismatch(StructuredOutputs(json={"items": {"items": schema}}), big)
    assert problem is not None and "cannot be validated" in problem.message
    assert hostile.mismatch(StructuredOutputs(json={"type": "integer"}), "1") is None
    hostile.close()


PAIR = {"type": "array", "items": {"enum": [0, 1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}


def test_an_answer_that_fails_validation_is_generated_again() -> None:
    """The attempts depend on the request alone: other requests and another batch size change nothing."""

    def params(seed: int, temperature: float) -> SamplingParams:
        outputs = StructuredOutputs(json=PAIR)
        return SamplingParams(max_tokens=30, temperature=temperature, seed=seed, structured_outputs=outputs)

    rows = [params(seed, temperature) for seed in range(4) for temperature in (0.0, 1.0)]
    with Engine(Policy(model="demo", batch_size=8), device="cpu") as engine:
        together = engine.generate(["pick two: "] * len(rows), rows)
    with Engine(Policy(model="demo", batch_size=2), device="cpu") as engine:
        alone = engine.generate(["pick two: "] * len(rows), rows)
        again = next(index for index, answer in enumerate(alone) if answer.attempts > 1)
        outputs = StructuredOutputs(json=PAIR, resamplings=0)
        (once,) = engine.generate("pick two: ", replace(rows[again], structured_outputs=outputs))
    for answer, same in zip(together, alone, strict=True):
        assert (answer.text, answer.attempts, answer.structure_error) == (
            same.text,
            same.attempts,
            same.structure_error,
        )
        valid = len(set(json.loads(answer.text))) == 2
        assert valid == (answer.structure_error is None)
        assert answer.attempts == 4 or valid
        assert answer.finish_reason == "stop"
        assert (answer.discarded_tokens > 0) == (answer.attempts > 1)
    assert any(answer.attempts > 1 and answer.structure_error is None for answer in together)
    failed = once.structure_error
    assert failed is not None and once.attempts == 1
    assert (failed.path, failed.schema_path) == ("", "/uniqueItems") and "non-unique" in failed.message


def test_an_answer_cut_before_its_structure_is_complete_is_marked() -> None:
    limited: dict[str, Any] = {"temperature": 1.0, "seed": 1}
    with Engine(Policy(model="demo", batch_size=4), device="cpu") as engine:
        answers = engine.generate(
            ["x"] * 4,
            [
                SamplingParams(max_tokens=3, structured_outputs=StructuredOutputs(json=PAIR), **limited),
                SamplingParams(max_tokens=3, structured_outputs=StructuredOutputs(regex="[a-z]{20}"), **limited),
                SamplingParams(max_tokens=3, structured_outputs=StructuredOutputs(regex="[a-z]+"), **limited),
                SamplingParams(max_tokens=30, stop=[","], structured_outputs=StructuredOutputs(json=PAIR), **limited),
            ],
        )
    codes = [answer.structure_error and answer.structure_error.code for answer in answers]
    assert codes == ["structured_output_truncated", "structured_output_truncated", None, "structured_output_truncated"]
    assert [answer.attempts for answer in answers] == [1] * 4
    assert "max_tokens" in str(answers[0].structure_error) and "stop text" in str(answers[3].structure_error)
