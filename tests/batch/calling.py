"""Batch lines whose answers reason, call tools, and are generated again; and their answers without the seconds at which
they were written, for comparing runs that were ended with one that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Names the format of Llama's calls, and opens the reasoning of a row that asks for it.
TEMPLATE = (
    "{{ messages[-1].content }}{# <|python_tag|> </think> #} -> {% if think %}<think>{% else %}</think>{% endif %}"
)
UNIQUE = {"type": "array", "items": {"enum": [0, 1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
NEVER = {**UNIQUE, "items": {"const": 1}}


def tool(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    parameters = {"properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("pair", UNIQUE), tool("text", {"type": "string", "maxLength": 5})]
THINK = {"chat_template_kwargs": {"think": True}, "thinking_token_budget": 4}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pair", "schema": UNIQUE}}
KINDS: list[dict[str, Any]] = [
    {"tools": TOOLS, "tool_choice": "required", **THINK},
    {"tools": [tool("never", NEVER)], "tool_choice": "required", "parallel_tool_calls": False},
    {"response_format": FORMAT, **THINK},
    {"max_tokens": 20, "ignore_eos": True, **THINK},
    {"tools": TOOLS, "max_tokens": 9, "ignore_eos": True},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "pair"}}, "n": 2},
    {"tools": [tool("wrong", {"maxLenght": 1})]},
]


def write_lines(path: Path, count: int) -> None:
    lines = []
    for number in range(count):
        messages = [{"role": "user", "content": f"row {number}"}]
        body = {"messages": messages, "max_tokens": 120, "temperature": 1, "seed": number, **KINDS[number % len(KINDS)]}
        lines.append({"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    """A line of an OpenAI batch without the time at which it was written; other rows as they are."""
    body = row.get("response", {}).get("body", {})
    if "created" not in body:
        return row
    return {**row, "response": {**row["response"], "body": {**body, "created": 0}}}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [timeless(json.loads(line)) for line in path.read_text().splitlines()]
