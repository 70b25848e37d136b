"""OpenAI batch lines: what each field becomes, and answers that OpenAI's own types read."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moelight.batch.fields import RowContext
from moelight.batch.input import open_input
from moelight.batch.model_names import ModelNames
from moelight.batch.openai import OpenAIReader
from moelight.batch.openai_answers import OpenAIFormat
from moelight.batch.rows import AnswerHeader, BadRow, Row, to_json_line
from moelight.batch.source import open_input_source
from moelight.core.request import (
    PROMPT_ONLY,
    Completion,
    Logprob,
    PoolingParams,
    SamplingParams,
    StructuredOutputs,
)
from tests.hostile.batch_lines import BAD, CHAT, COMPLETIONS, GOOD, chat, completion

SERVED = AnswerHeader(model="org/model", created=1700000000, job="input-1")


class Letters:
    """A vocabulary of bytes: token 300 begins every prompt, the others are bytes."""

    def encode(self, text: str) -> list[int]:
        return [300, *text.encode()]

    def token_bytes(self, token: int) -> bytes:
        return b"<s>" if token == 300 else bytes([token])


def read(line: dict[str, Any], **options: Any) -> Row | BadRow:
    reading = RowContext(**{"models": ModelNames.of("org/model"), "vocabulary": Letters(), **options})
    with_source = open_input_source(Path(__file__))
    with_source.close()
    return OpenAIReader(reading, with_source).read(json.dumps(line).encode(), 3, 7)


def row(line: dict[str, Any], **options: Any) -> Row:
    result = read(line, **options)
    assert isinstance(result, Row), result
    return result


def bad(line: dict[str, Any], **options: Any) -> BadRow:
    result = read(line, **options)
    assert isinstance(result, BadRow), result
    return result


def test_a_chat_line() -> None:
    line = chat("a", max_tokens=5, temperature=0.5, stop="x", logit_bias={"7": 1.5}, user="someone", model="model")
    result = row(line)
    assert (result.number, result.line, result.custom_id, result.kind, result.prompts) == (3, 7, "a", CHAT, ())
    assert result.conversation is not None
    assert result.conversation.messages == line["body"]["messages"] and result.conversation.add_generation_prompt
    assert result.sampling == SamplingParams(max_tokens=5, temperature=0.5, stop=("x",), logit_bias={7: 1.5})
    assert result.shown == "What follows a?"


def test_every_sampling_field_arrives() -> None:
    inputs = {
        "n": 2, "max_tokens": 9, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 4,
        "stop": ["a"], "stop_token_ids": [1], "ignore_eos": True, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "repetition_penalty": 1.1, "logit_bias": {"3": 1.0}, "prompt_logprobs": 1, "skip_special_tokens": False,
        "include_stop_str_in_output": True, "structured_outputs": {"regex": "a+"},
    }  # fmt: skip
    for line in (chat("a", **inputs), completion("a", **inputs)):
        assert row(line).sampling == SamplingParams.from_dict(inputs)


def test_defaults_hold_where_a_body_is_silent() -> None:
    base = SamplingParams(max_tokens=99, temperature=0.7, seed=4)
    assert row(chat("a", max_tokens=None), defaults=base).sampling is base
    assert row(chat("a", max_tokens=None, max_completion_tokens=3), defaults=base).sampling == SamplingParams(
        max_tokens=3, temperature=0.7, seed=4
    )


def test_what_a_chat_template_gets() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = row(chat("a", tools=tools, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low"))
    assert asked.conversation is not None
    assert asked.conversation.tools == tools
    assert asked.conversation.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    without = row(chat("a", tools=tools, tool_choice="none")).conversation
    assert without is not None and without.tools is None
    going_on = row(chat("a", continue_final_message=True)).conversation
    assert going_on is not None
    assert (going_on.continue_final_message, going_on.add_generation_prompt) == (True, False)
    assert bad(chat("a", continue_final_message=True, add_generation_prompt=True)).param == "continue_final_message"


@pytest.mark.parametrize(
    ("body_fields", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}},
            StructuredOutputs(json={"type": "object"}),
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=["a", "b"])),
        ({"guided_json": {"type": "array"}}, StructuredOutputs(json={"type": "array"})),
        ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"guided_choice": ["a"]}, StructuredOutputs(choice=["a"])),
    ],
)
def test_what_an_answer_must_match(body_fields: dict[str, Any], constraint: StructuredOutputs | None) -> None:
    assert row(chat("a", **body_fields)).sampling.structured_outputs == constraint


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_prompts_of_a_completion(prompt: Any, prompts: tuple[Any, ...]) -> None:
    result = row(completion("a", prompt=prompt))
    assert result.prompts == prompts and result.kind == COMPLETIONS and result.conversation is None


def test_log_probabilities_are_asked_for_by_two_names() -> None:
    assert row(chat("a", logprobs=True)).sampling.logprobs == 0
    assert row(chat("a", logprobs=True, top_logprobs=5)).sampling.logprobs == 5
    assert row(chat("a", logprobs=False, top_logprobs=0)).sampling.logprobs is None
    assert row(completion("a", logprobs=3)).sampling.logprobs == 3
    scored = row(completion("a", echo=True, max_tokens=0, logprobs=1)).sampling
    assert (scored.max_tokens, scored.logprobs, scored.prompt_logprobs) == (0, 1, 1)
    assert row(completion("a", echo=True)).sampling.prompt_logprobs is None
    assert bad(completion("a", max_tokens=0)).param == "max_tokens"


@pytest.mark.parametrize("name", ["org/model", "model", "org/model/", None])
def test_the_model_may_be_called_by_its_names(name: str | None) -> None:
    row(chat("a", model=name))


def test_another_model_is_not_found_unless_models_are_ignored(tmp_path: Path) -> None:
    result = bad(chat("a", model="other"))
    assert (result.code, result.status, result.param, result.kind) == ("model_not_found", 404, "model", CHAT)
    assert "'other'" in result.message
    row(chat("a", model="other"), models=ModelNames.of("org/model", ignore=True))
    cached = tmp_path / "models--org--name" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    names = ModelNames.of(cached)
    for known_names in (str(cached), f"{cached}/", "abc", "org/name", "name"):
        row(chat("a", model=known_names), models=names)


@pytest.mark.parametrize(
    ("line", "param", "says"),
    [
        (chat("a", max_tokens="two"), "max_tokens", "max_tokens must be int, got str"),
        (chat("a", stop=["x", 1]), "stop[1]", "must be str, got int"),
        (chat("a", temperature=2, top_p=7), "top_p", "top_p must be a finite number"),
        (chat("a", temperature=2.5), "temperature", "between 0 and 2"),
        (chat("a", max_tokens=None, max_completion_tokens=0), "max_completion_tokens", "at least 1"),
        (chat("a", max_token=2), "max_token", "did you mean 'max_tokens'?"),
        (chat("a", stream=True), "stream", "a batch is not streamed"),
        (chat("a", messages=[]), "messages", "messages must be"),
        (chat("a", add_special_tokens=True), "add_special_tokens", "the chat template writes them"),
        ({**chat("a"), "url": "/v1/responses"}, "url", f"{COMPLETIONS} and /v1/embeddings are served"),
        ({**chat("a"), "boddy": {}}, "boddy", "did you mean 'body'?"),
    ],
)
def test_the_field_at_fault_is_named(line: dict[str, Any], param: str, says: str) -> None:
    result = bad(line)
    assert result.param == param and says in result.message and result.custom_id == "a"


def test_what_is_known_and_not_served_may_stand_there_switched_off() -> None:
    row(chat("a", functions=[], stream=False, audio=None, use_beam_search=False, add_special_tokens=False))
    row(completion("a", suffix="", best_of=1, add_special_tokens=True))


# Answers


def likely(*tokens: int) -> dict[int, Logprob]:
    """The given tokens as the likeliest of one place, in that order."""
    return {
        token: Logprob(
            logprob=-0.5 * rank, rank=rank, decoded_token=Letters().token_bytes(token).decode("utf-8", "replace")
        )
        for rank, token in enumerate(tokens, start=1)
    }


def answered(text: str = "Hi", *, index: int = 0, sample: int = 0, **more: Any) -> Completion:
    ids = tuple(text.encode())
    inputs = {"finish_reason": "stop", "prompt_tokens": 4, "cached_tokens": 1 if sample == 0 else 4, **more}
    return Completion(index=index, text=text, token_ids=ids, sample=sample, **inputs)


def answer(line: dict[str, Any], completions: Sequence[Completion]) -> dict[str, Any]:
    """The output line, read back from its bytes."""
    result = OpenAIFormat(vocabulary=Letters()).answer(row(line), completions, SERVED)
    back: dict[str, Any] = json.loads(to_json_line(result), parse_constant=pytest.fail)
    return back


def check_types(line: dict[str, Any]) -> None:
    """Held strictly against the types of the official client, and nothing in it is unknown to them."""
    types = pytest.importorskip("openai.types", reason="the official client's types")
    of = {"chat.completion": types.chat.ChatCompletion, "text_completion": types.Completion}
    assert list(line) == ["id", "custom_id", "response", "error"] and line["error"] is None
    assert line["id"].startswith("batch_req_") and line["response"]["status_code"] == 200
    body = line["response"]["body"]
    parsed = of[body["object"]].model_validate(body, strict=True)
    assert parsed.to_dict(exclude_unset=True) == body
    for part in (parsed, parsed.usage, *parsed.choices):
        assert not part.model_extra


def test_a_chat_answer() -> None:
    line = answer(chat("a"), [answered()])
    check_types(line)
    body = line["response"]["body"]
    assert line["custom_id"] == "a" and body["model"] == "org/model" and body["created"] == 1700000000
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_a_chat_answer_with_log_probabilities() -> None:
    inputs = answered("Hi", logprobs=(likely(72, 1, 2), likely(3, 4, 105)))
    line = answer(chat("a", logprobs=True, top_logprobs=2), [inputs])
    check_types(line)
    first, second = line["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("H", [72], -0.5)
    assert [top["bytes"] for top in first["top_logprobs"]] == [[72], [1]]
    assert second["logprob"] == -1.5 and [top["bytes"] for top in second["top_logprobs"]] == [[3], [4]]
    line = answer(chat("a", logprobs=True), [inputs])
    check_types(line)
    assert line["response"]["body"]["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    line = answer(chat("a", logprobs=True), [answered("", finish_reason="length", logprobs=())])
    assert line["response"]["body"]["choices"][0]["logprobs"]["content"] == []


def test_samples_and_prompts_are_choices_and_prompts_count_once() -> None:
    line = answer(chat("a", n=2), [answered("x"), answered("yz", sample=1)])
    check_types(line)
    assert [choice["message"]["content"] for choice in line["response"]["body"]["choices"]] == ["x", "yz"]
    assert line["response"]["body"]["usage"]["prompt_tokens"] == 4
    both = [answered(text, index=i, sample=s) for i, s, text in [(0, 0, "a"), (0, 1, "b"), (1, 0, "c"), (1, 1, "d")]]
    line = answer(completion("a", n=2, prompt=["p", "q"], echo=True), both)
    check_types(line)
    body = line["response"]["body"]
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "pa"),
        (1, "pb"),
        (2, "qc"),
        (3, "qd"),
    ]
    assert body["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 4,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_the_log_probabilities_of_a_completion() -> None:
    inputs = answered("aé", logprobs=(likely(97, 98), likely(1, 2, 0xC3), likely(0xA9)))
    line = answer(completion("a", logprobs=1), [inputs])
    check_types(line)
    lists = line["response"]["body"]["choices"][0]["logprobs"]
    assert lists["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"] and lists["text_offset"] == [0, 1, 11]
    assert lists["token_logprobs"] == [-0.5, -1.5, -0.5]
    assert lists["top_logprobs"][1] == {"\x01": -0.5, "\x02": -1.0, "bytes:\\xc3": -1.5}
    assert list(lists["top_logprobs"][0]) == ["a", "b"]


@pytest.mark.parametrize("prompt", ["pq", [300, 112, 113]])
def test_a_prompt_that_is_scored_and_echoed(prompt: Any) -> None:
    inputs = answered(
        "", finish_reason="length", logprobs=(), prompt_logprobs=(None, likely(112, 1), likely(1, 113))
    )  # fmt: skip
    line = answer(completion("a", prompt=prompt, echo=True, max_tokens=0, logprobs=1), [inputs])
    choice = line["response"]["body"]["choices"][0]
    assert choice["text"] == ("pq" if prompt == "pq" else "<s>pq")
    assert choice["logprobs"] == {
        "tokens": ["<s>", "p", "q"],
        "token_logprobs": [None, -0.5, -1.0],
        "top_logprobs": [None, {"p": -0.5, "\x01": -1.0}, {"\x01": -0.5, "q": -1.0}],
        "text_offset": [0, 3, 4],
    }


def test_log_probabilities_of_the_prompt_have_vllms_shape_and_minus_infinity_is_a_number() -> None:
    never = {7: Logprob(logprob=-math.inf, rank=9, decoded_token="\x07")}
    for line in (chat("a", prompt_logprobs=0), completion("a", prompt_logprobs=0)):
        body = answer(line, [answered(prompt_logprobs=(None, never))])["response"]["body"]
        holder = body if line["url"] == CHAT else body["choices"][0]
        assert holder["prompt_logprobs"] == [
            None,
            {"7": {"logprob": -9999.0, "rank": 9, "decoded_token": "\x07"}},
        ]


def test_ids_are_the_jobs_and_the_rows() -> None:
    asked, inputs = row(chat("a")), [answered()]
    wanted = OpenAIFormat()
    lines = [
        wanted.answer(asked, inputs, AnswerHeader(model="m", created=at, job=job)) for at, job in [(1, "x"), (2, "x")]
    ]
    ids = [(line["id"], line["response"]["request_id"], line["response"]["body"]["id"]) for line in lines]
    assert ids[0] == ids[1] and len(set(ids[0])) == 3
    other = wanted.answer(asked, inputs, AnswerHeader(model="m", created=1, job="y"))
    assert other["id"] != ids[0][0]


def test_a_refusal_says_so_in_both_places() -> None:
    types = pytest.importorskip("openai.types.shared", reason="the official client's types")
    line = OpenAIFormat().refuse(bad(chat("a", model="other")), SERVED)
    assert list(line) == ["id", "custom_id", "response", "error"]
    assert line["response"]["status_code"] == 404 and set(line["error"]) == {"code", "message", "error"}
    told = types.ErrorObject.model_validate(line["response"]["body"]["error"], strict=True)
    assert (told.code, told.param, told.type) == ("model_not_found", "model", "invalid_request_error")
    assert told.message == line["error"]["message"]
    nameless = OpenAIFormat().refuse(bad({"url": CHAT, "body": {}}), SERVED)
    assert nameless["custom_id"] is None and nameless["line"] == 7
    message = "line 7: custom_id is missing"
    inner = {"message": message, "type": "invalid_request_error", "param": "custom_id", "code": 400}
    assert nameless["error"] == {"code": "missing_required_parameter", "message": message, "error": inner}


def test_numbers_as_texts_are_numbers() -> None:
    """As for vLLM, whose clients send what they read from tables."""
    sampling = row(chat("a", max_tokens="6", temperature="0.5", seed=7.0, ignore_eos="true", stop="5")).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (6, 0.5, 7)
    assert sampling.ignore_eos is True and sampling.stop == ("5",)
    assert bad(completion("a", temperature="nan")).param == "temperature"


def test_good_and_bad_kinds_without_a_tokenizer(tmp_path: Path) -> None:
    """What needs no tokenizer is read without one; errors keep their codes."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([make("a") for make in GOOD.values()] + [make("b") for make, _ in BAD.values()]))
    with open_input(path, RowContext(models=ModelNames.of("org/model"))) as result:
        rows = list(result.rows())
    assert all(isinstance(row, Row) for row in rows[: len(GOOD)])
    assert [row.code for row in rows[len(GOOD) :] if isinstance(row, BadRow)] == [code for _, code in BAD.values()]


def embedding(**body: Any) -> dict[str, Any]:
    return {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"model": "org/model", **body}}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1, 2], [3]], ((1, 2), (3,)))],
)
def test_inputs_of_embeddings(prompt: Any, prompts: tuple[Any, ...]) -> None:
    job = PoolingParams(pooling_type="mean", dimensions=9)
    result = row(embedding(input=prompt, dimensions=4, user="someone"), pooling=job)
    assert (result.kind, result.prompts, result.sampling) == ("/v1/embeddings", prompts, PROMPT_ONLY)
    assert result.pooling == PoolingParams(pooling_type="mean", dimensions=4)
    assert row(embedding(input=prompt, normalize=True), pooling=job).pooling == PoolingParams(
        pooling_type="mean", normalize=True, dimensions=9
    )


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "input is missing"),
        ({"input": []}, "input", "input must be a string, a list of strings, a list of token ids"),
        ({"input": ["a", [1]]}, "input", "input must be a string"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "must be float or base64, not 'hex'"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions must be an integer of at least 1, not 0"),
        ({"input": "a", "dimensions": "many"}, "dimensions", "dimensions must be `?int"),
        ({"input": "a", "dimension": 3}, "dimension", "did you mean 'dimensions'"),
        ({"input": "a", "temperature": 0}, "temperature", "unknown field 'temperature'"),
        ({"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "prompts are not cut"),
        ({"input": "a", "add_special_tokens": False}, "add_special_tokens", "the tokenizer puts them"),
        ({"input": "a", "model": "gpt-4o"}, "model", "is not the loaded one"),
    ],
)
def test_embeddings_that_cannot_be_served(body: dict[str, Any], param: str, says: str) -> None:
    result = bad(embedding(**body))
    assert (result.kind, result.custom_id, result.param) == ("/v1/embeddings", "e", param)
    assert re.search(says, result.message), result.message


def test_a_list_of_embeddings() -> None:
    from openai.types import CreateEmbeddingResponse

    vectors = np.random.default_rng(1).normal(size=(2, 5)).astype(np.float32)
    completions = [
        Completion(index=n, text="", token_ids=(), finish_reason="length", prompt_tokens=3 + n, embedding=vectors[n])
        for n in range(2)
    ]
    written = OpenAIFormat()
    line = json.loads(to_json_line(written.answer(row(embedding(input=["a", "b"])), completions, SERVED)))
    body = line["response"]["body"]
    answer = CreateEmbeddingResponse.model_validate(body, strict=True)
    assert (line["custom_id"], line["error"], answer.object, answer.model) == ("e", None, "list", "org/model")
    assert np.array_equal(np.array([item.embedding for item in answer.data], dtype=np.float32), vectors)
    assert [item.index for item in answer.data] == [0, 1]
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (7, 7)
    encoded = row(embedding(input=["a", "b"], encoding_format="base64"))
    data = written.answer(encoded, completions, SERVED)["response"]["body"]["data"]
    raw = b"".join(base64.b64decode(item["embedding"]) for item in data)
    assert np.array_equal(np.frombuffer(raw, dtype="<f4").reshape(2, 5), vectors)
