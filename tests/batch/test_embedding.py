"""Rows whose answers are embeddings: those of transformers' hidden states, in every input format, and resumed."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from moelight.batch.embedding import embedding_base64, embedding_numbers
from moelight.batch.fields import RowContext
from moelight.batch.input import open_input
from moelight.batch.job import run_job
from moelight.batch.options import Durability, JobOptions
from moelight.batch.rows import Row
from moelight.batch.tasks import EMBED
from moelight.core.errors import InputError
from moelight.core.request import PROMPT_ONLY, Completion, PoolingParams
from tests.batch.playing import DEMO, StandIn, prompts, rows
from tests.cli.program import moelight_inside

ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": "add 17 and 25 =", "custom_id": "sum"},
    {"prompt": "upper lemon = "},
    {"messages": [{"role": "user", "content": "add 1 and 2 ="}]},
    {"prompt_token_ids": [0, 30, 31]},
)


def options(path: Path, out: Path, **values: Any) -> JobOptions:
    how: dict[str, Any] = {"task": EMBED, "sampling": PROMPT_ONLY, "dtype": "float32", "host_memory": 1 << 30}
    return JobOptions(**{"prompts": path, "output": out, **how, **values})


@torch.inference_mode()
def hidden_states(row: dict[str, Any]) -> np.ndarray:
    """As transformers computes them from the text of the prompt: float32 [T, H]."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModel.from_pretrained(DEMO, dtype=torch.float32)
    if "messages" in row:
        ids = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=False, return_dict=False)
    else:
        ids = row.get("prompt_token_ids") or tokenizer(row["prompt"])["input_ids"]
    return model(torch.tensor([ids])).last_hidden_state[0].numpy()


@pytest.mark.parametrize("pooling_type", ["last", "mean"])
def test_embeddings_are_those_of_transformers(pooling_type: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    pooling = PoolingParams(pooling_type=pooling_type)
    result = run_job(options(prompts(tmp_path, *ROWS), out, pooling=pooling))
    assert (result.completed, result.failed) == (len(ROWS), 0)
    answers = rows(out)
    assert [answer.get("custom_id") for answer in answers] == ["sum", None, None, None]
    for row, answer in zip(ROWS, answers, strict=True):
        hidden = hidden_states(row)
        expected = hidden[-1] if pooling_type == "last" else hidden.mean(0)
        assert np.abs(np.array(answer["embedding"]) - expected).max() < 1e-4 * np.abs(expected).max()
        assert answer["usage"] == {"prompt_tokens": len(hidden), "completion_tokens": 0}


def test_numbers_have_the_digits_of_float32() -> None:
    embedding = np.random.default_rng(3).normal(size=500).astype(np.float32)
    one = Completion(index=0, text="", token_ids=(), finish_reason="length", prompt_tokens=1, embedding=embedding)
    values = json.loads(json.dumps(embedding_numbers(one)))
    assert np.array_equal(np.array(values, dtype=np.float32), embedding)
    assert max(len(repr(number)) for number in values) <= len("-1.23456789e-05")
    assert np.array_equal(np.frombuffer(base64.b64decode(embedding_base64(one)), dtype="<f4"), embedding)


def test_rows_that_cannot_be_embedded(engine: StandIn, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    path = prompts(
        tmp_path,
        {"prompt": "a", "choices": ["x"]},
        {"prompt": "a", "temperature": 1.0},
        {"prompt_token_ids": []},
    )
    result = run_job(options(path, out))
    assert (result.completed, result.failed) == (0, 3)
    assert [row["error"]["message"] for row in rows(out)] == [
        "choices needs --task score or --task classify",
        "temperature cannot be used with --task embed: nothing is generated",
        "the prompt is empty: it holds no token",
    ]


@pytest.mark.parametrize(("name", "content"), [("rows.csv", "prompt,id\nis it?,7\n"), ("rows.txt", "is it?\n")])
def test_tables_and_texts_are_embedded(name: str, content: str, tmp_path: Path) -> None:
    path, pooling = tmp_path / name, PoolingParams(dimensions=3)
    path.write_text(content)
    with open_input(path, RowContext(task=EMBED, pooling=pooling)) as source:
        (row,) = source.rows()
    assert isinstance(row, Row) and row.prompts == ("is it?",)
    assert row.sampling is PROMPT_ONLY and row.pooling == pooling


def test_more_dimensions_than_the_model_has_are_refused_before_it_is_loaded(tmp_path: Path) -> None:
    how = options(prompts(tmp_path, *ROWS), tmp_path / "out.jsonl", pooling=PoolingParams(dimensions=1 << 20))
    with pytest.raises(InputError, match=r"dimensions must be at most [0-9]+, the model's hidden size, not 1048576"):
        run_job(how)


@pytest.mark.thorough
def test_a_resumed_job_has_its_pooling(tmp_path: Path) -> None:
    path, out = prompts(tmp_path, *ROWS), tmp_path / "out.jsonl"
    pooling = PoolingParams(dimensions=4)
    assert run_job(options(path, out, pooling=pooling)).completed == len(ROWS)
    assert run_job(options(path, out, pooling=pooling)).state == "done before"
    with pytest.raises(InputError, match="dimensions: was 4, is 5"):
        run_job(options(path, out, pooling=PoolingParams(dimensions=5)))
    with pytest.raises(InputError, match=r'task: was "embed", is (absent|null)'):
        run_job(JobOptions(prompts=path, output=out))
    restarted = options(path, out, pooling=PoolingParams(dimensions=5), durability=Durability(restart=True))
    assert run_job(restarted).completed == len(ROWS)
    assert {len(row["embedding"]) for row in rows(out)} == {5}


def test_the_command(tmp_path: Path) -> None:
    path = prompts(tmp_path, *ROWS)
    embed = ("generate", path, "--task", "embed")
    result = moelight_inside(*embed, "--pooling", "mean", "--normalize", "--dimensions", "5")
    embeddings = np.array([json.loads(line)["embedding"] for line in result.stdout.splitlines()])
    assert embeddings.shape == (len(ROWS), 5)
    assert np.allclose(np.linalg.norm(embeddings, axis=1), 1.0, atol=1e-6)
    assert f"{len(ROWS)} rows, " in result.stderr and "prompt tokens in" in result.stderr
    for words, message in (
        (("--temperature", "0.5"), "--task embed and --temperature contradict each other: nothing is generated"),
        (("--choice", "a"), "--task embed and --choice contradict each other: nothing is generated"),
        (("--pooling", "max"), "pooling_type must be last, mean or cls, not 'max'"),
    ):
        refused = moelight_inside(*embed, *words)
        assert refused.returncode == 2 and message in refused.stderr
    refused = moelight_inside("generate", path, "--normalize")
    assert refused.returncode == 2 and "--dimensions go with --task embed" in refused.stderr
    shown = moelight_inside(*embed, "--show")
    assert "dimensions" in shown.stdout + shown.stderr


@pytest.mark.thorough
def test_a_batch_of_embeddings_beside_completions(tmp_path: Path) -> None:
    """Each with its dimensions; one that the model does not have is an error row."""

    def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
        return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}

    path = prompts(
        tmp_path,
        line("texts", "/v1/embeddings", input=["add 17 and 25 =", "upper lemon = "], dimensions=3),
        line("ids", "/v1/embeddings", input=[0, 30, 31], encoding_format="base64"),
        line("answer", "/v1/completions", prompt="add 17 and 25 =", max_tokens=4),
        line("wide", "/v1/embeddings", input="a", dimensions=1 << 20),
        line("long", "/v1/embeddings", input="a " * 20_000),
    )
    out = tmp_path / "out.jsonl"
    result = run_job(JobOptions(prompts=path, output=out, dtype="float32", host_memory=1 << 30))
    assert (result.completed, result.failed) == (3, 2)
    texts, ids, answer, wide, long = (row["response"]["body"] for row in rows(out))
    for item, row in zip(texts["data"], ROWS, strict=False):
        assert np.allclose(item["embedding"], hidden_states(row)[-1, :3], atol=1e-4)
    (encoded,) = ids["data"]
    embedding = np.frombuffer(base64.b64decode(encoded["embedding"]), dtype="<f4")
    assert np.allclose(embedding, hidden_states(ROWS[3])[-1], atol=1e-4)
    assert texts["usage"]["total_tokens"] == sum(len(hidden_states(row)) for row in ROWS[:2])
    assert answer["choices"][0]["text"] and answer["usage"]["completion_tokens"] > 0
    assert wide["error"]["param"] == "dimensions" and "the model's hidden size" in wide["error"]["message"]
    assert long["error"]["code"] == "context_length_exceeded"
