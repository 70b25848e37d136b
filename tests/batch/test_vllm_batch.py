"""A batch of 45 lines as vLLM's users send them, on a random model with a context of 512: what each line becomes here.
``benchmarks/vllm_batch.py`` sets vLLM's own runner beside it; the guide to batch files says what differs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moelight.batch.job import run_job
from moelight.batch.options import JobOptions

ROOT = Path(__file__).resolve().parents[2]
BATCH = Path(__file__).parent / "data" / "vllm_batch.jsonl"
SIZES = "--model qwen3-30b-a3b --layers 2 --hidden 128 --intermediate 64 --experts 8 --top-k 2 --heads 4 --kv-heads 2"
# Of each line: finish reason and tokens, or the code of its error; 12 is blank.
EXPECTED: dict[int, tuple[str, int] | str] = {
    **dict.fromkeys((1, 3, 4, 5, 6, 7, 15, 22, 27, 44), ("length", 8)),
    2: ("length", 6),
    8: ("length", 495),  # no max_tokens: the rest of the context
    9: "invalid_request",
    10: "invalid_url",
    11: "duplicate_custom_id",
    13: "invalid_json",
    14: "missing_required_parameter",
    16: "invalid_method",
    17: "unsupported_parameter",
    18: ("length", 16),
    19: "context_length_exceeded",
    20: "context_length_exceeded",
    21: "invalid_request",
    23: ("stop", 11),
    24: ("length", 40),
    25: ("length", 20),
    26: ("stop", 7),
    **dict.fromkeys((28, 29), "unsupported_parameter"),
    30: ("length", 6),
    31: "unknown_field",
    32: ("stop", 11),
    33: ("embeddings", 1),
    34: ("length", 6),
    35: ("length", 12),
    36: ("length", 6),
    37: "invalid_request",
    38: "model_not_found",
    39: "invalid_request",
    40: "invalid_request",
    41: ("stop", 2),
    42: "unknown_field",
    43: ("length", 2),
    45: ("length", 10),
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The output by line number."""
    folder = tmp_path_factory.mktemp("batch")
    model, output = folder / "tiny", folder / "out.jsonl"
    command = f"benchmarks/make_checkpoint.py {model} {SIZES} --head-dim 32 --vocab 2048 --dtype float32"
    subprocess.run([sys.executable, *command.split()], cwd=ROOT, check=True, capture_output=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    run_job(JobOptions(prompts=BATCH, model=str(model), output=output, device="cpu"))
    values = [number for number, line in enumerate(BATCH.read_text().split("\n"), start=1) if line.strip()]
    rows = map(json.loads, output.read_text().splitlines())
    return dict(zip(values, rows, strict=True))


def outcome(row: dict[str, Any]) -> tuple[str, int] | str:
    body = row["response"]["body"]
    if "error" in body:
        assert row["error"]["code"] == body["error"]["code"]
        assert row["error"]["error"]["code"] == row["response"]["status_code"] in (400, 404)
        return str(body["error"]["code"])
    if body["object"] == "list":
        return "embeddings", len(body["data"])
    cut = body["choices"][0]["finish_reason"] == "length" and row["custom_id"] == "json-schema-unserved"
    assert row["response"]["status_code"] == 200
    assert (row["error"] or {}).get("code") == ("structured_output_truncated" if cut else None)
    return str(body["choices"][0]["finish_reason"]), int(body["usage"]["completion_tokens"])


@pytest.mark.thorough
def test_every_line_becomes_what_is_expected(lines: dict[int, dict[str, Any]]) -> None:
    assert {number: outcome(row) for number, row in lines.items()} == EXPECTED


def test_what_vllm_writes_too(lines: dict[int, dict[str, Any]]) -> None:
    def text(number: int) -> str:
        return str(lines[number]["response"]["body"]["choices"][0]["message"]["content"])

    assert text(30) == text(1)[: len(text(30))], "numbers as texts are numbers"
    assert not text(43).endswith("\ufffd"), "a character that the limit cuts is left out"
    assert lines[19]["error"]["message"].endswith("set max_tokens to at most 495")
    content = lines[22]["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert not any("\ufffd" in token["token"] for token in content)
    assert bytes(byte for token in content for byte in token["bytes"]).decode(errors="replace") == text(22)
