"""The first reading of an input: sums, and rows that repeat a custom_id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moelight.batch.fields import RowContext
from moelight.batch.input import open_input
from moelight.batch.progress import Progress
from moelight.batch.rows import Row
from moelight.batch.scan import Scan, encode_row, scan
from moelight.batch.scoring import EncodedPrompt
from moelight.core.errors import InputError
from moelight.core.request import SamplingParams

CONTEXT, SIXTEEN = 100, SamplingParams()


def letters(row: Row) -> list[EncodedPrompt]:
    if not all(row.prompts):
        raise InputError("empty", code="empty_prompt")
    return [EncodedPrompt(tuple(map(ord, prompt))) for prompt in row.prompts if isinstance(prompt, str)]


def scanned(tmp_path: Path, *lines: object, context: int = CONTEXT, defaults: SamplingParams = SIXTEEN) -> Scan:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    with open_input(path, RowContext(defaults=defaults)) as source:
        return scan(source, letters, Progress(), context=context)


def completions(custom_id: str, *prompts: str, **body: object) -> dict[str, Any]:
    body = {"prompt": list(prompts), "max_tokens": 5, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def test_sums_of_what_can_be_served(tmp_path: Path) -> None:
    result = scanned(
        tmp_path,
        completions("a", "xyz", "x" * 95, n=2),
        completions("b", "x" * 100),
        completions("c", "", "x"),
        "{",
    )
    summary = result.summary
    assert (summary.rows, summary.served, summary.prompts, summary.sequences) == (4, 1, 2, 4)
    assert (summary.prompt_tokens, summary.max_prompt_len) == (98, 95)
    assert (summary.generated_tokens, summary.max_gen_len) == (2 * (5 + 5), 5)
    assert {code: problem.first_line for code, problem in summary.problems.items()} == {
        "context_length_exceeded": 2,
        "empty_prompt": 3,
        "invalid_json": 4,
    }
    assert msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(result))), Scan) == result


def test_a_limit_beyond_the_context_is_refused_and_a_default_is_cut(tmp_path: Path) -> None:
    """A row's own ``max_tokens`` counts; the job's default is for rows of any length."""
    asked = completions("b", "x" * 98, max_tokens=None)
    summary = scanned(tmp_path, completions("a", "x" * 98), asked).summary
    (problem,) = summary.problems.values()
    assert problem.message.endswith("exceed the model's context of 100; set max_tokens to at most 2")
    assert (summary.served, summary.generated_tokens, summary.defaulted) == (1, 2, 1)
    assert summary.limits_text == "1 row sets no max_tokens and may have 16 (--max-tokens)"


def test_rows_without_a_limit_are_planned_for_an_expected_length(tmp_path: Path) -> None:
    """They may have the rest of the context, for which the plan must have room. Completions have 16 tokens, as at
    OpenAI and in vLLM, unless they ask for no limit."""
    absent = completions("b", "x" * 10, n=2)
    del absent["body"]["max_tokens"]
    lines = (completions("a", "xyz", n=2, max_tokens=None), absent, completions("c", "x", max_tokens=300))
    summary = scanned(tmp_path, *lines, context=1000, defaults=SamplingParams(max_tokens=None)).summary
    assert (summary.unlimited, summary.unlimited_sequences, summary.longest_answer) == (1, 2, 997)
    assert (summary.defaulted, summary.default_limit) == (1, 16)
    assert summary.generated_tokens == 2 * 256 + 2 * 16 + 300
    work = summary.workload()
    assert work is not None and (work.gen_len, work.max_gen_len) == (300, 997)
    assert summary.limits_text == (
        "1 row sets no max_tokens and may have 16 (--max-tokens); no max_tokens in 1 of 3 rows: rest of the context "
        "(1,000 tokens); planned for an expected 256"
    )
    simple = [{"prompt": "xyz", "min_tokens": 20}, {"prompt": "x" * 990}]
    result = scanned(tmp_path, *simple, context=1000, defaults=SamplingParams(max_tokens=None)).summary
    assert result.limits_text == "no max_tokens: rest of the context (1,000 tokens); planned for an expected 256"
    assert result.generated_tokens == 256 + 10
    limited = scanned(tmp_path, *simple, context=1000, defaults=SamplingParams(max_tokens=60)).summary
    assert (limited.unlimited, limited.limits_text) == (0, "")


def test_a_row_that_repeats_an_id_is_none_that_is_served(tmp_path: Path) -> None:
    once = scanned(tmp_path, completions("a", "xyz"), completions("b", "x"))
    result = scanned(
        tmp_path,
        completions("a", "xyz"),
        completions("b", "x"),
        completions("a", "uv", "w", n=3),
        completions("a", "x"),
    )
    assert result.repeated == {2, 3}
    assert result.summary.problems["duplicate_custom_id"].count == 2
    assert result.summary.problems["duplicate_custom_id"].first_line == 3
    assert (result.summary.rows, result.summary.served) == (4, 2)
    for name in ("sequences", "prompts", "prompt_tokens", "generated_tokens", "histogram"):
        assert getattr(result.summary, name) == getattr(once.summary, name)


def test_a_row_that_is_refused_and_repeats_an_id_is_one_problem(tmp_path: Path) -> None:
    result = scanned(tmp_path, completions("a", "x"), completions("b", wish=1), completions("b", "", ""))
    assert result.repeated == {2}
    assert (result.summary.served, result.summary.refused) == (1, 2)


def test_rows_without_an_id_repeat_none(tmp_path: Path) -> None:
    assert scanned(tmp_path, {"prompt": "a"}, {"prompt": "a"}).repeated == frozenset()


def test_the_context_holds_a_prompt_and_a_token() -> None:
    def fits(tokens: int, **sampling: int) -> bool:
        row = Row(number=0, line=1, custom_id=None, kind="", sampling=SamplingParams(**sampling))
        return len(encode_row(row, lambda _: [EncodedPrompt((0,) * tokens)], CONTEXT)) == 1

    scored = {"max_tokens": 0, "prompt_logprobs": 0}
    assert fits(CONTEXT - 1) and fits(CONTEXT + 1, **scored)
    with pytest.raises(InputError, match="102 tokens"):
        fits(CONTEXT + 2, **scored)
    with pytest.raises(InputError, match="100 tokens, the model's context is 100"):
        fits(CONTEXT)


def test_a_prompt_that_is_only_scored_may_fill_the_context(tmp_path: Path) -> None:
    scored = {"max_tokens": 0, "prompt_logprobs": 0}
    result = scanned(tmp_path, {"prompt": "x" * 101, **scored}, {"prompt": "x" * 102, **scored}, {"prompt": "x" * 100})
    assert (result.summary.served, result.summary.generated_tokens) == (1, 0)


def test_sampling_parameters_are_counted_up_to_a_bound(tmp_path: Path) -> None:
    few = scanned(tmp_path, *({"prompt": "a", "seed": number % 3} for number in range(30)))
    assert few.summary.samplings == 3
    assert scanned(tmp_path, *({"prompt": "a", "seed": number} for number in range(5000))).summary.samplings == 4096
