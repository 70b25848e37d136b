"""What a first reading keeps of an input."""

from __future__ import annotations

import json

import msgspec

from moelight.batch.rows import BadRow
from moelight.batch.summary import OTHER, ScanSummary


def bad(line: int, code: str, kind: str = "") -> BadRow:
    return BadRow(number=line - 1, line=line, custom_id=None, kind=kind, code=code, message=f"{code} at {line}")


def test_rows_are_counted_and_come_back_from_json() -> None:
    found = ScanSummary()
    found.add("/v1/completions", [(1, 16), (1023, 16)])
    found.add("/v1/chat/completions", [(1024, 8)], samples=3)
    found.add("/v1/chat/completions", [(7, 8)])
    found.refuse(bad(4, "bad_json"))
    found.refuse(bad(5, "model_not_found", "/v1/chat/completions"))
    found.refuse(bad(9, "bad_json"))
    assert (found.rows, found.served, found.refused, found.prompts, found.sequences) == (6, 3, 3, 4, 6)
    assert found.kinds == {"/v1/completions": 1, "/v1/chat/completions": 3}
    assert found.endpoint == "/v1/chat/completions"
    assert (found.problems["bad_json"].count, found.problems["bad_json"].first_line) == (2, 4)
    assert found.histogram == [1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1]
    assert (found.prompt_tokens, found.max_prompt_len, found.generated_tokens, found.max_gen_len) == (
        2055,
        1024,
        64,
        16,
    )
    assert msgspec.convert(json.loads(json.dumps(found.as_dict())), ScanSummary) == found
    workload = found.workload()
    assert workload is not None
    assert (workload.num_requests, workload.prompt_len, workload.max_prompt_len, workload.gen_len) == (6, 514, 1024, 16)


def test_no_input_makes_it_grow() -> None:
    found = ScanSummary()
    for number in range(5000):
        found.add(f"/v{number}", [(1 << (number % 20), 1)])
        found.refuse(bad(number + 1, f"code{number}"))
    assert len(json.dumps(found.as_dict())) < 8000
    assert found.kinds[OTHER] == 5000 - 16
    assert found.problems[OTHER].count == 5000 - 32
    assert found.refused == 5000


def test_nothing_to_serve_is_no_workload() -> None:
    found = ScanSummary()
    found.refuse(bad(1, "bad_json"))
    assert found.workload() is None
