"""The status file: OpenAI's object at any moment, and never a job's end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from moelight.batch.options import JobOptions
from moelight.batch.progress import JobCounts, JobStart
from moelight.batch.status import BatchFacts, LiveFile, StatusFile, file_watchers, without_extra
from moelight.batch.time_left import TimeLeft
from moelight.core.errors import InputError
from moelight.core.schedule import Lane
from moelight.observe.stats import Binding

FACTS = BatchFacts(id="batch_1", input_file="in.jsonl", output_file="out.jsonl", model="demo")


def test_it_is_openais_batch_at_every_step(tmp_path: Path) -> None:
    from openai.types import Batch

    path, now, eta = tmp_path / "status.json", [1000.0], TimeLeft()
    status = StatusFile(path, FACTS, eta, clock=lambda: now[0])

    def read() -> Batch:
        # Strict: the client's own constructor takes anything.
        return Batch.model_validate(without_extra(json.loads(path.read_text())), strict=True)

    batch = read()
    assert (batch.status, batch.created_at, batch.in_progress_at) == ("validating", 1000, None)
    now[0] = 1010.0
    start = JobStart(input="in.jsonl", endpoint="/v1/completions", total=10, refused=2, predicted_s=77.0)
    eta.started(start)
    status.started(start)
    batch = read()
    assert (batch.status, batch.in_progress_at, batch.endpoint) == ("in_progress", 1010, "/v1/completions")
    assert batch.request_counts is not None and batch.request_counts.failed == 2
    status.counts(JobCounts(total=10, completed=8, failed=2, state="finalizing", generation_tokens=50, running_s=2.0))
    status.tokens(50, 50, Binding(lane=Lane.DISK, share=0.9))
    status.ended("completed")
    batch = read()
    assert batch.status == "completed" and batch.finalizing_at == batch.completed_at == 1010
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (10, 8)
    more = json.loads(path.read_text())["moelight"]
    assert (more["tokens_per_second"], more["eta_seconds"]) == (25.0, 0.0)
    assert more["binding"] == {"lane": "disk", "share": 0.9}


def test_what_failed_as_a_whole_says_why(tmp_path: Path) -> None:
    from openai.types import Batch

    path = tmp_path / "status.json"
    status = StatusFile(path, FACTS, TimeLeft())
    status.failed("model_path", "no such model")
    status.ended("failed")
    batch = Batch.model_validate(without_extra(json.loads(path.read_text())), strict=True)
    assert batch.status == "failed" and batch.failed_at is not None
    assert batch.errors is not None and batch.errors.data is not None
    assert batch.errors.data[0].message == "no such model"


def test_at_most_once_a_second_and_always_at_the_end(tmp_path: Path) -> None:
    now, asked = [0.0], list[int]()
    snapshot = LiveFile(tmp_path / "file", what="status", clock=lambda: now[0])

    def text() -> str:
        asked.append(1)
        return "x"

    snapshot.begin("first")
    for step in range(30):
        now[0] = step / 10
        snapshot.renew(text)
    assert len(asked) == 2
    snapshot.renew(text, now=True)
    assert len(asked) == 3
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_file_that_cannot_be_renewed_is_trouble_and_no_error(tmp_path: Path) -> None:
    home = tmp_path / "gone"
    home.mkdir()
    snapshot = LiveFile(home / "status.json", what="status")
    snapshot.begin("first")
    (home / "status.json").unlink()
    home.rmdir()
    snapshot.renew(lambda: "second", now=True)
    assert "could not be renewed (no such file or directory)" in snapshot.trouble
    home.mkdir()
    snapshot.renew(lambda: "third", now=True)
    assert (home / "status.json").read_text() == "third" and not snapshot.trouble


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_what_cannot_be_written_at_the_start_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "status.json", tmp_path, Path("/dev/full")):
        with pytest.raises(InputError, match=r"^status "):
            StatusFile(path, FACTS, TimeLeft())


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "status.json"
    link.symlink_to(tmp_path / "real" / "there.json")
    LiveFile(link, what="status").begin("text")
    assert link.is_symlink() and (tmp_path / "real" / "there.json").read_text() == "text"


def test_names_that_are_no_utf8_have_an_id(tmp_path: Path) -> None:
    odd = os.fsdecode(b"odd \xff")
    (tmp_path / odd).mkdir()
    status = tmp_path / odd / "status.json"
    for output in (None, tmp_path / odd / "out.jsonl"):
        options = JobOptions(prompts=tmp_path / odd / "p.jsonl", output=output, status=status)
        assert not any(each.trouble for each in file_watchers(options, TimeLeft()))
        found = json.loads(status.read_text())
        assert found["id"].startswith("batch_") and Path(found["input_file_id"]) == options.prompts
