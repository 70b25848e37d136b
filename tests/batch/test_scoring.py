"""Rows of which nothing is generated: choices get the log-likelihoods that transformers gives them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moelight.batch.fields import RowContext
from moelight.batch.input import open_input
from moelight.batch.job import run_job
from moelight.batch.options import Durability, JobOptions
from moelight.batch.rows import BadRow, Row
from moelight.batch.scoring import encode_choices
from moelight.batch.tasks import CLASSIFY, SCORE
from moelight.core.errors import InputError
from moelight.core.request import PROMPT_ONLY
from tests.batch.playing import DEMO, StandIn, prompts, rows
from tests.cli.program import moelight_inside

ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": "add 17 and 25 =", "choices": [" 42", " 41", " 7"], "custom_id": "sum"},
    {"prompt": "upper lemon = ", "choices": ["LEMON", "lemon", "MELON", "a much longer answer"]},
    {"messages": [{"role": "user", "content": "add 1 and 2 ="}], "choices": ["3", " 3", "4"]},
    {"prompt_token_ids": [0, 30, 31], "choices": ["x", "yy"]},
    {"prompt": "sort window ="},
)
FALLBACK = (" dinoww", " window")


def choices_of(row: dict[str, Any]) -> list[str]:
    return row.get("choices", list(FALLBACK))


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("classified") / "out.jsonl"
    options = JobOptions(
        prompts=prompts(out.parent, *ROWS),
        output=out,
        task=CLASSIFY,
        choices=FALLBACK,
        sampling=PROMPT_ONLY,
        dtype="float32",
        host_memory=1 << 30,
    )
    result = run_job(options)
    assert (result.completed, result.failed) == (len(ROWS), 0)
    return rows(out)


@torch.inference_mode()
def likelihoods(row: dict[str, Any]) -> list[tuple[float, bool]]:
    """As transformers computes them from the text of the prompt and a choice."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    result = []
    for choice in choices_of(row):
        if "prompt" in row:
            context = tokenizer(row["prompt"].rstrip(" "))["input_ids"]
            ids = tokenizer(row["prompt"] + choice)["input_ids"]
        else:
            context = row.get("prompt_token_ids") or tokenizer.apply_chat_template(
                row["messages"], add_generation_prompt=True, return_dict=False
            )
            ids = [*context, *tokenizer(choice, add_special_tokens=False)["input_ids"]]
        assert ids[: len(context)] == context
        logits = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)[len(context) - 1 : -1]
        targets = torch.tensor(ids[len(context) :])
        logprobs = logits.gather(1, targets[:, None])
        result.append((logprobs.double().sum().item(), bool((logits.argmax(-1) == targets).all())))
    return result


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_log_likelihoods_are_those_of_transformers(number: int, scored: list[dict[str, Any]]) -> None:
    row, answer = ROWS[number], scored[number]
    expected = likelihoods(row)
    assert [score["choice"] for score in answer["scores"]] == choices_of(row)
    assert [score["logprob"] for score in answer["scores"]] == pytest.approx([value for value, _ in expected], abs=2e-3)
    assert [score["greedy"] for score in answer["scores"]] == [greedy for _, greedy in expected]


def test_the_label_is_the_likeliest_choice(scored: list[dict[str, Any]]) -> None:
    assert [answer.get("custom_id") for answer in scored] == ["sum", None, None, None, None]
    assert [answer["label"] for answer in scored[:2]] == [" 42", "LEMON"]
    for answer in scored:
        best = max(answer["scores"], key=lambda score: score["logprob"])
        assert answer["label"] == best["choice"]
        assert math.isclose(math.fsum(score["probability"] for score in answer["scores"]), 1.0)
        ratio = answer["scores"][1]["probability"] / answer["scores"][0]["probability"]
        assert math.log(ratio) == pytest.approx(answer["scores"][1]["logprob"] - answer["scores"][0]["logprob"])
        assert answer["usage"]["completion_tokens"] == 0 < answer["usage"]["prompt_tokens"]


class Letters:
    """A tokenizer of letters, in which ``=a`` is one token."""

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        assert max_tokens == 9
        ids = [ord(letter) for letter in text.replace("=a", "@")]
        return [0, *ids] if add_special_tokens else ids


def test_choices_that_merge_with_the_prompt_are_scored_from_one_token_on() -> None:
    """Where a choice changes the last token of the prompt, that token is scored for the others too."""
    tokenizer: Any = Letters()

    def encoded(prompt: str, *choices: str) -> list[tuple[str, int]]:
        how: dict[str, Any] = {"sampling": PROMPT_ONLY, "choices": choices}
        row = Row(number=0, line=1, custom_id=None, kind="prompt", prompts=(prompt,), **how)
        prompts = encode_choices(row, tokenizer, 9)
        return [("".join(map(chr, prompt.token_ids[1:])), prompt.scored_from) for prompt in prompts]

    assert encoded("x=", "b", "c") == [("x=b", 3), ("x=c", 3)]
    assert encoded("x=", "b", "a") == [("x=b", 2), ("x@", 2)]
    assert encoded("x  ", "b") == [("x  b", 2)]


def test_rows_that_cannot_be_scored(engine: StandIn, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    path = prompts(
        tmp_path,
        {"prompt": "a"},
        {"prompt": "a", "choices": []},
        {"prompt": "a", "choices": ["x", ""]},
        {"prompt": "a", "choices": "x"},
        {"prompt": "a", "choices": ["x", "y", "x"]},
        {"prompt": "a", "choices": ["x"], "temperature": 1.0},
        {"prompt": "a", "choices": ["x"], "max_tokens": 0},
    )
    result = run_job(JobOptions(prompts=path, output=out, task=SCORE, sampling=PROMPT_ONLY))
    assert (result.completed, result.failed) == (0, 7)
    assert [row["error"]["message"] for row in rows(out)] == [
        "choices is missing, and the job has no --choice",
        *["choices must be a list of 1 to 16,384 texts, none of them empty"] * 3,
        "choices holds 'x' twice",
        "temperature cannot be used with --task score: nothing is generated",
        "max_tokens cannot be used with --task score: nothing is generated",
    ]


def test_choices_need_a_task(tmp_path: Path) -> None:
    with open_input(prompts(tmp_path, {"prompt": "a", "choices": ["x"]})) as source:
        (row,) = source.rows()
    assert isinstance(row, BadRow) and row.param == "choices"
    assert row.message == "choices needs --task score or --task classify"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", 'prompt,choices,id\nis it?,"["" yes"", "" no""]",7\n'),
        ("rows.txt", "is it?\n"),
    ],
)
def test_tables_and_texts_have_choices(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with open_input(path, RowContext(task=SCORE, choices=(" yes", " no"))) as source:
        (row,) = source.rows()
    assert isinstance(row, Row) and row.choices == (" yes", " no")
    assert row.sampling is PROMPT_ONLY and row.prompts == ("is it?",)


def test_batch_lines_are_not_scored(tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    with pytest.raises(InputError, match="--task score reads prompts and messages, not OpenAI batch lines"):
        open_input(prompts(tmp_path, line), RowContext(task=SCORE))


@pytest.mark.thorough
def test_a_resumed_job_has_its_task(tmp_path: Path) -> None:
    path, out = prompts(tmp_path, *ROWS), tmp_path / "out.jsonl"
    how: dict[str, Any] = {"prompts": path, "output": out, "choices": FALLBACK, "sampling": PROMPT_ONLY}
    assert run_job(JobOptions(**how, task=SCORE)).completed == len(ROWS)
    assert run_job(JobOptions(**how, task=SCORE)).state == "done before"
    with pytest.raises(InputError, match='task: was "score", is "classify"'):
        run_job(JobOptions(**how, task=CLASSIFY))
    assert run_job(JobOptions(**how, task=CLASSIFY, durability=Durability(restart=True))).completed == len(ROWS)
    assert all("label" in row for row in rows(out))


def test_the_command(tmp_path: Path) -> None:
    path = prompts(tmp_path, ROWS[0], ROWS[-1])
    result = moelight_inside("generate", path, "--task", "classify", "--choice", " dinoww", "--choice", " window")
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["label"] for answer in answers] == [" 42", " dinoww"]
    assert "2 rows, " in result.stderr and "prompt tokens in" in result.stderr
    for words, message in (
        (("--temperature", "0.5"), "--task score and --temperature contradict each other: nothing is generated"),
        (("--regex", "a+"), "--task score and --regex contradict each other: nothing is generated"),
        (("--choice", "a", "--choice", "a"), "choices holds 'a' twice"),
    ):
        refused = moelight_inside("generate", path, "--task", "score", *words)
        assert refused.returncode == 2 and message in refused.stderr
    assert "did you mean 'score'?" in moelight_inside("generate", path, "--task", "scores").stderr
