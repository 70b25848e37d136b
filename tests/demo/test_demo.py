"""The bundled model does its tasks: held-out problems, through the program, resident and streamed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.cases import thorough
from tests.cli.program import DEMO, moelight_inside

HELDOUT = Path(__file__).with_name("heldout.jsonl")
LEAST_SHARE = 0.95


def _problems() -> list[dict[str, str]]:
    return [json.loads(line) for line in HELDOUT.read_text().splitlines()]


def _answers(tmp_path: Path, problems: list[dict[str, str]], *options: str) -> dict[str, str]:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    asked = ({key: problem[key] for key in ("custom_id", "prompt")} for problem in problems)
    prompts.write_text("".join(json.dumps(line) + "\n" for line in asked))
    done = moelight_inside("generate", prompts, "-o", out, "--max-tokens", "16", "--device", "cpu", *options)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return {row["custom_id"]: row["text"] for row in rows}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is answered where everything is resident."""
    return _answers(tmp_path_factory.mktemp("resident"), _problems())


def test_held_out_problems_are_solved(answers: dict[str, str]) -> None:
    problems = _problems()
    assert len(problems) >= 400
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for problem in problems:
        task = problem["prompt"].split()[0]
        asked[task] += 1
        right[task] += answers[problem["custom_id"]] == problem["answer"]
    assert right.total() >= LEAST_SHARE * asked.total()
    assert all(right[task] >= 0.9 * asked[task] for task in asked), dict(right)


@pytest.mark.parametrize("schedule", thorough(["cgopipe", "serial"], but=["serial"]))
def test_a_small_budget_and_another_order_give_the_same_answers(
    tmp_path: Path, answers: dict[str, str], schedule: str
) -> None:
    """Every fourth of them."""
    streamed = _answers(
        tmp_path, _problems()[::4], "--host-memory", "86MiB", "--batch-size", "24", "--schedule", schedule
    )
    assert streamed == {name: answers[name] for name in streamed}
    assert len(streamed) >= 100


def test_the_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in DEMO.iterdir() if file.is_file()) <= 6e6


@pytest.mark.thorough
def test_keys_and_values_in_int8_give_the_same_answers(tmp_path: Path, answers: dict[str, str]) -> None:
    assert _answers(tmp_path, _problems(), "--kv-dtype", "int8") == answers
