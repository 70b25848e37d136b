"""Rows with tools: forced calls of the bundled model, and what cannot be asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
from openai.types.chat import ChatCompletion

from moelight.batch.job import run_job
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
    for choice in [each for several in choices[:3] for each in several]:
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
    ids = [call.id for several in choices for each in several for call in each.message.tool_calls or ()]
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
    assert [body["error"]["param"] for body in bodies] == [*["tool_choice"] * 4, "tools", "tools", None]
    assert bodies[2]["error"]["message"] == "tool_choice: no tool is named 'rain'"
    assert bodies[6]["error"]["code"] == "invalid_structured_output"
    (unread,) = answers(tmp_path / "own", {}, template=False)
    assert unread["error"]["code"] == "unsupported_parameter" and "hermes" in unread["error"]["message"]
