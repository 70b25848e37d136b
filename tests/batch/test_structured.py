"""Structured answers of a job: refused and noted before the model is loaded, marked and counted after."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moelight.batch.job import forecast_job, run_job
from moelight.batch.options import DONE_BEFORE, JobOptions
from moelight.core.errors import InputError

PAIR = {"type": "array", "items": {"enum": [0, 1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
NEVER = {**PAIR, "items": {"const": 1}}  # what the grammar enforces of it is not enough


def row(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    outputs = {"json": schema, **({"strict": more.pop("strict")} if "strict" in more else {})}
    return {"prompt": "x", "max_tokens": 40, "structured_outputs": outputs, **more}


@pytest.fixture
def options(tmp_path: Path) -> JobOptions:
    rows = [
        row({"type": "string", "maxLength": 1, "format": "path"}, temperature=1.0),
        row(PAIR, max_tokens=3),
        row(NEVER),
        row({"type": "string", "maxLenght": 1}),
        row(PAIR, strict=True),
        row(NEVER, n=2, temperature=1.0),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JobOptions(prompts=path, output=tmp_path / "out.jsonl")


def test_schemas_are_compiled_before_anything_is_loaded(options: JobOptions) -> None:
    summary = forecast_job(options).summary
    assert (summary.served, summary.refused) == (4, 2)
    problem = summary.problems["invalid_structured_output"]
    assert (problem.count, problem.first_line) == (2, 4)
    assert "JSON Schema" in problem.message and "did you mean 'maxLength'?" in problem.message
    notes = {text: (note.count, note.first_line) for text, note in summary.notes.items()}
    assert notes == {
        "#: format 'path' is an annotation: ignored": (1, 1),
        "#: uniqueItems is checked in finished answers": (3, 2),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_answers_without_their_structure_are_marked_and_counted(options: JobOptions) -> None:
    result = run_job(options)
    assert (result.completed, result.failed) == (4, 2)
    assert (result.invalid, result.truncated) == (3, 1)
    assert options.output is not None
    lines = [json.loads(line) for line in options.output.read_text().splitlines()]
    assert "error" not in lines[0] and "attempts" not in lines[0]
    assert (lines[1]["finish_reason"], lines[1]["error"]["code"]) == ("length", "structured_output_truncated")
    assert (lines[2]["finish_reason"], lines[2]["attempts"], json.loads(lines[2]["text"])) == ("stop", 4, [1, 1])
    assert lines[2]["error"]["code"] == "structured_output_invalid"
    assert (lines[2]["error"]["path"], lines[2]["error"]["schema_path"]) == ("", "/uniqueItems")
    assert ["text" in line for line in lines[3:5]] == [False, False]
    assert [choice["error"]["code"] for choice in lines[5]["choices"]] == ["structured_output_invalid"] * 2
    again = run_job(options)
    assert (again.state, again.invalid, again.truncated) == (DONE_BEFORE, 3, 1)


def test_openai_rows_keep_the_answer_beside_the_error(tmp_path: Path) -> None:
    def line(name: str, strict: bool | None) -> str:
        described = {"name": "pair", "schema": NEVER, "strict": strict}
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {"type": "json_schema", "json_schema": described},
        }
        return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n"

    path, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    path.write_text(line("a", None) + line("b", True))
    run_job(JobOptions(prompts=path, output=output))
    served, refused = (json.loads(line) for line in output.read_text().splitlines())
    assert served["response"]["status_code"] == 200
    (choice,) = served["response"]["body"]["choices"]
    assert json.loads(choice["message"]["content"]) == [1, 1] and choice["finish_reason"] == "stop"
    assert served["error"]["code"] == choice["error"]["code"] == "structured_output_invalid"
    assert refused["response"]["status_code"] == 400 and "#: uniqueItems" in refused["error"]["message"]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_job_decides_where_a_row_does_not(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    more = row(NEVER, n=2)
    more["structured_outputs"] |= {"strict": False, "resamplings": 1}
    path.write_text(json.dumps(row(NEVER)) + "\n" + json.dumps(more))
    options = JobOptions(prompts=path, output=tmp_path / "out.jsonl", strict=True)
    assert forecast_job(options).summary.refused == 1
    options = replace(options, strict=False, resamplings=0)
    run_job(options)
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert "attempts" not in first and first["error"]["code"] == "structured_output_invalid"
    assert [choice["attempts"] for choice in second["choices"]] == [2, 2]
    for changed, fact in (
        (replace(options, resamplings=2), "rows.resamplings"),
        (replace(options, strict=True), "rows.strict"),
    ):
        with pytest.raises(InputError, match=fact):
            run_job(changed)
