"""Rows with tools: forced calls of the bundled model, and what cannot be asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai.types.chat import ChatCompletion

from moelight.batch.job import forecast_job, run_job
from moelight.batch.options import JobOptions
from tests.batch.playing import rows

# Names the format of Llama's calls, and opens the reasoning of a row that asks for it.
TEMPLATE = (
    "{{ messages[-1].content }}{# <|python_tag|> </think> #} -> {% if think %}<think>{% else %}</think>{% endif %}"
)
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": PLACE, "now": NOTHING}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}} for name, parameters in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "weather"}}


def answers(folder: Path, *bodies: dict[str, Any], template: bool = True) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    prompts, output, path = folder / "rows.jsonl", folder / "out.jsonl", folder / "tools.jinja"
    path.write_text(TEMPLATE)
    common = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "max_tokens": 120, "temperature": 1}
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": {**common, "seed": n, **body}}
        for n, body in enumerate(bodies)
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    run_job(JobOptions(prompts=prompts, output=output, chat_template=path if template else None))
    return [row["response"]["body"] for row in rows(output)]


def test_forced_calls(tmp_path: Path) -> None:
    think = {"chat_template_kwargs": {"think": True}, "thinking_token_budget": 3}
    asked = [
        {"tool_choice": "required", "n": 2},
        {"tool_choice": NAMED},
        {"tool_choice": "required", "parallel_tool_calls": False, **think},
        {"tool_choice": "auto", "max_tokens": 3, "ignore_eos": True},
        {"tool_choice": "none", "max_tokens": 3, "ignore_eos": True},
    ]
    bodies = answers(tmp_path, *asked)
    choices = [ChatCompletion.model_validate(body).choices for body in bodies]
    for choice in [item for several in choices[:3] for item in several]:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert choice.message.tool_calls
        for call in choice.message.tool_calls:
            assert call.type == "function" and len(call.id) == 29
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    (named,) = choices[1][0].message.tool_calls or ()
    assert named.type == "function" and named.function.name == "weather"
    assert len(bodies[2]["choices"][0]["message"]["reasoning_content"]) <= 3
    assert [len(choices[2][0].message.tool_calls or ())] == [1]
    for (choice,) in choices[3:]:
        assert choice.finish_reason == "length" and choice.message.content and not choice.message.tool_calls
    ids = [call.id for several in choices for item in several for call in item.message.tool_calls or ()]
    assert len(set(ids)) == len(ids)
    again = answers(tmp_path / "again", *asked)
    assert [body["choices"] for body in again] == [body["choices"] for body in bodies]


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    bodies = answers(
        tmp_path,
        {"tool_choice": "required", "tools": []},
        {"tool_choice": "any"},
        {"tool_choice": {"type": "function", "function": {"name": "rain"}}},
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
        {
            "tool_choice": "required",
            "tools": [{"function": {"name": "f", "parameters": {"type": 7}}}],
        },
    )
    assert [body["error"]["param"] for body in bodies] == [*["tool_choice"] * 4, *["tools"] * 3]
    assert bodies[2]["error"]["message"] == "tool_choice: no tool is named 'rain'"
    assert bodies[6]["error"]["code"] == "invalid_structured_output"
    (unread,) = answers(tmp_path / "own", {}, template=False)
    assert unread["error"]["code"] == "unsupported_parameter" and "none of the 29 formats" in unread["error"]["message"]


TWINS = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2, "uniqueItems": True}  # none is valid
NEVER = {"properties": {"a": TWINS}, "required": ["a"], "additionalProperties": False}
NEVER_VALID = [{"type": "function", "function": {"name": "twins", "parameters": NEVER}}]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_invalid_arguments_are_generated_again_and_marked(tmp_path: Path) -> None:
    answers(
        tmp_path, {"tool_choice": "required", "tools": NEVER_VALID, "parallel_tool_calls": False}, {"max_tokens": 3}
    )
    options = JobOptions(
        prompts=tmp_path / "rows.jsonl", output=tmp_path / "out.jsonl", chat_template=tmp_path / "tools.jinja"
    )
    line, other = rows(tmp_path / "out.jsonl")
    (choice,) = line["response"]["body"]["choices"]
    assert line["error"]["code"] == choice["error"]["code"] == "structured_output_invalid"
    assert choice["finish_reason"] == "tool_calls" and choice["attempts"] == 4
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": [1, 1]}
    assert choice["error"]["path"] == "/tool_calls/0/function/arguments/a"
    ChatCompletion.model_validate(line["response"]["body"])
    assert other["error"] is None
    assert run_job(options).invalid == 1  # of the job that is done
    summary = forecast_job(options).summary
    assert [note for note in summary.notes if "uniqueItems" in note] == [
        "tool twins: #/properties/a: uniqueItems is checked in finished calls"
    ]


def test_tool_schemas_are_compiled_before_anything_is_loaded(tmp_path: Path) -> None:
    misspelt = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"maxLenght": 1}}}}}
    strict = {"type": "function", "function": {"name": "twins", "parameters": NEVER, "strict": True}}
    bodies = [{"tools": [misspelt]}, {"tools": [strict]}, {"tools": NEVER_VALID}, {"tool_choice": "required"}]
    prompts, template = tmp_path / "rows.jsonl", tmp_path / "tools.jinja"
    template.write_text(TEMPLATE)
    messages = [{"role": "user", "content": "a"}]
    lines = [
        {"custom_id": str(n), "url": "/v1/chat/completions", "body": {"messages": messages, "tools": TOOLS, **body}}
        for n, body in enumerate(bodies)
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    summary = forecast_job(JobOptions(prompts=prompts, output=tmp_path / "out.jsonl", chat_template=template)).summary
    assert (summary.served, summary.refused) == (2, 2)
    assert "did you mean 'maxLength'?" in summary.problems["invalid_structured_output"].message
