"""What a first reading keeps of an input."""

from __future__ import annotations

import json

import msgspec

from moelight.batch.rows import BadRow
from moelight.batch.summary import OTHER, ScanSummary


def bad(line: int, code: str, kind: str = "") -> BadRow:
    return BadRow(number=line - 1, line=line, custom_id=None, kind=kind, code=code, message=f"{code} at {line}")


def test_rows_are_counted_and_come_back_from_json() -> None:
    result = ScanSummary()
    result.add("/v1/completions", [(1, 16), (1023, 16)])
    result.add("/v1/chat/completions", [(1024, 8)], samples=3)
    result.add("/v1/chat/completions", [(7, 8)])
    result.refuse(bad(4, "bad_json"))
    result.refuse(bad(5, "model_not_found", "/v1/chat/completions"))
    result.refuse(bad(9, "bad_json"))
    assert (result.rows, result.served, result.refused, result.prompts, result.sequences) == (6, 3, 3, 4, 6)
    assert result.kinds == {"/v1/completions": 1, "/v1/chat/completions": 3}
    assert result.endpoint == "/v1/chat/completions"
    assert (result.problems["bad_json"].count, result.problems["bad_json"].first_line) == (2, 4)
    assert result.histogram == [1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1]
    assert (result.prompt_tokens, result.max_prompt_len, result.generated_tokens, result.max_gen_len) == (
        2055,
        1024,
        64,
        16,
    )
    assert msgspec.convert(json.loads(json.dumps(result.as_dict())), ScanSummary) == result
    workload = result.workload()
    assert workload is not None
    assert (workload.num_requests, workload.prompt_len, workload.max_prompt_len, workload.gen_len) == (6, 514, 1024, 16)


def test_no_input_makes_it_grow() -> None:
    result = ScanSummary()
    for number in range(5000):
        result.add(f"/v{number}", [(1 << (number % 20), 1)])
        result.refuse(bad(number + 1, f"code{number}"))
    assert len(json.dumps(result.as_dict())) < 8000
    assert result.kinds[OTHER] == 5000 - 16
    assert result.problems[OTHER].count == 5000 - 32
    assert result.refused == 5000


def test_nothing_to_serve_is_no_workload() -> None:
    result = ScanSummary()
    result.refuse(bad(1, "bad_json"))
    assert result.workload() is None
