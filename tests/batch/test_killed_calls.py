"""A job whose rows reason, call tools and are generated again is killed and goes on, with drafts and without: its
output is that of a run that nobody disturbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.batch.calling import TEMPLATE, rows_of, write_lines


@pytest.mark.thorough
def test_the_output_is_that_of_an_unbroken_run(tmp_path: Path) -> None:
    prompts, template = tmp_path / "rows.jsonl", tmp_path / "calls.jinja"
    write_lines(prompts, 42)
    template.write_text(TEMPLATE)

    def run(output: str, fault: str = "", speculate: str = "off") -> int:
        command = [sys.executable, "-m", "moelight.cli.main", "generate", str(prompts), "-o", str(tmp_path / output)]
        options = ["--chat-template", str(template), "--batch-size", "3", "--sync-interval", "0.05", "--no-show"]
        options += ["--speculate", speculate]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MOELIGHT_FAULT": fault}
        if not fault:
            del environment["MOELIGHT_FAULT"]
        return subprocess.run([*command, *options], env=environment, check=False, capture_output=True).returncode

    assert run("whole.jsonl") == 1  # error rows
    faults = {"before_write:6": "ngram", "mid_write:3": "off", "before_journal_write:5": "auto"}
    kills = [run("killed.jsonl", f"{fault}:kill", speculate) for fault, speculate in faults.items()]
    assert kills == [-signal.SIGKILL] * 3
    assert run("killed.jsonl", speculate="ngram") == 1
    full = rows_of(tmp_path / "whole.jsonl")
    assert rows_of(tmp_path / "killed.jsonl") == full
    choices = [choice for row in full for choice in row["response"]["body"].get("choices", ())]
    assert any(choice.get("attempts", 1) > 1 and "error" not in choice for choice in choices)
    assert any(choice.get("error", {}).get("code") == "structured_output_invalid" for choice in choices)
    assert any(choice["finish_reason"] == "tool_calls" for choice in choices)
    assert any(choice["message"].get("reasoning_content") for choice in choices)
