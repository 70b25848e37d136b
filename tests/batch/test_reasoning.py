"""Jobs of a model that thinks: real answers of the bundled model under a template that marks reasoning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai.types.chat import ChatCompletion

from moelight.batch.job import run_job
from moelight.batch.options import JobOptions
from moelight.batch.paths import journal_of
from moelight.batch.store import read_record
from moelight.core.errors import ConfigError
from moelight.core.request import SamplingParams
from tests.batch.playing import rows

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
# One state of the three for each value of `thinking`: the prompt opens the reasoning, closes it, or does neither.
TEMPLATE = (
    "{{ messages[-1].content.split('</think>')[-1] }} -> "
    "{%- if thinking == 'off' %}<think></think>{% elif thinking != 'own' %}<think>{% endif %}"
)
COUNT = 14  # twice all budgets of thoughts
LESS_THAN, MORE_LIKELY = 31, 100.0  # the bundled model's token "<"


def chat(number: int, **body: Any) -> str:
    asked = {
        "messages": [{"role": "user", "content": f"item {number}"}],
        "max_tokens": 120,
        "temperature": 1,
        "seed": number,
        **body,
    }
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": asked})


def answers(folder: Path, lines: list[str], **options: Any) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    template, prompts, output = folder / "think.jinja", folder / "rows.jsonl", folder / "out.jsonl"
    template.write_text(TEMPLATE)
    prompts.write_text("\n".join(lines))
    run_job(JobOptions(prompts=prompts, output=output, chat_template=template, **options))
    return [row["response"]["body"] if "response" in row else row for row in rows(output)]


def structured() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "item", "schema": SCHEMA}}


def test_rows_think_and_then_keep_to_the_schema(tmp_path: Path) -> None:
    original = {"thinking_token_budget": 5, "chat_template_kwargs": {"thinking": "own"}}
    lines = [chat(n, response_format=structured(), thinking_token_budget=n % 7 + 1) for n in range(COUNT)]
    lines += [
        chat(50, response_format=structured(), chat_template_kwargs={"thinking": "off"}),
        chat(51, response_format=structured(), logit_bias={LESS_THAN: -MORE_LIKELY}, **original),
        chat(52, response_format=structured(), logit_bias={LESS_THAN: MORE_LIKELY}, **original),
        chat(53, response_format=structured(), max_tokens=9),
    ]
    bodies = answers(tmp_path, lines)
    for number, body in enumerate(bodies[:-1]):
        (choice,), usage = body["choices"], body["usage"]
        message = choice["message"]
        jsonschema.validate(json.loads(message["content"]), SCHEMA)
        assert choice["finish_reason"] == "stop"
        thought = usage["completion_tokens_details"]["reasoning_tokens"]
        if number < COUNT:
            assert len(message["reasoning_content"]) <= number % 7 + 1 and thought == number % 7 + 1 + len("</think>")
        assert usage["completion_tokens"] > thought
    totals = read_record(journal_of(tmp_path / "out.jsonl")).totals
    details = [body["usage"]["completion_tokens_details"] for body in bodies]
    assert totals["reasoning_tokens"] == sum(detail["reasoning_tokens"] for detail in details) > 0
    assert all(ChatCompletion.model_validate(body).usage for body in bodies)
    off, own_way, opened, cut = (body["choices"][0]["message"] for body in bodies[COUNT:])
    assert off["reasoning_content"] is None and own_way["reasoning_content"] is None
    assert opened["reasoning_content"] == "<<<<<"
    assert cut["content"] is None and cut["reasoning_content"] and bodies[-1]["choices"][0]["finish_reason"] == "length"
    again = answers(tmp_path / "again", lines, batch_size=3)  # other rows beside each, and the same answers
    assert [body["choices"] for body in again] == [body["choices"] for body in bodies]


def test_stop_texts_and_samples(tmp_path: Path) -> None:
    bias = {"logit_bias": {LESS_THAN: MORE_LIKELY}, "max_tokens": 20}
    lines = [
        chat(0, stop="<<", thinking_token_budget=4, n=2, logprobs=True, **bias),
        chat(1, stop=["<<"], chat_template_kwargs={"thinking": "off"}, **bias),
        chat(2, stop=["<<"], chat_template_kwargs={"thinking": "own"}, thinking_token_budget=4, **bias),
        chat(3, thinking_token_budget=4, include_reasoning=False, **bias),
    ]
    thought, closed, original, silent = answers(tmp_path, lines)
    for choice in thought["choices"]:
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("<<<<", None)
        assert choice["finish_reason"] == "stop" and len(choice["logprobs"]["content"]) == 4 + len("</think><<")
    assert thought["usage"]["completion_tokens_details"]["reasoning_tokens"] == 24
    assert closed["choices"][0]["message"]["content"] == "" and closed["usage"]["completion_tokens"] == 2
    assert (
        original["choices"][0]["message"]["reasoning_content"] is None and original["usage"]["completion_tokens"] == 2
    )
    assert "reasoning_content" not in silent["choices"][0]["message"]


def test_off(tmp_path: Path) -> None:
    lines = [chat(0, response_format=structured()), json.dumps({"custom_id": "x"})]
    body = answers(tmp_path, lines, reasoning="off")[0]
    message = body["choices"][0]["message"]
    jsonschema.validate(json.loads(message["content"]), SCHEMA)
    assert "reasoning_content" not in message and "completion_tokens_details" not in body["usage"]


def test_simple_rows(tmp_path: Path) -> None:
    lines = [json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}), '{"prompt": "a"}']
    budget = SamplingParams(thinking_token_budget=0, seed=0, logit_bias={LESS_THAN: MORE_LIKELY})
    messages, prompt = answers(tmp_path, lines, sampling=budget)
    assert messages["reasoning_content"] == "" and len(messages["text"]) == 1
    assert "reasoning_content" not in prompt and len(prompt["text"]) == 16


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reasoning must be auto or off, not 'of'"):
        answers(tmp_path, [chat(0)], reasoning="of")
