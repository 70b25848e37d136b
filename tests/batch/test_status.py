"""The status file: OpenAI's object at any moment, and never a job's end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from moelight.batch import status as status_module
from moelight.batch.options import JobOptions
from moelight.batch.progress import JobCounts, JobStart
from moelight.batch.status import LiveFile, StatusFile, file_watchers
from moelight.batch.time_left import TimeLeft
from moelight.core.errors import InputError
from moelight.core.schedule import Lane
from moelight.observe.stats import Binding

OPTIONS = JobOptions(prompts=Path("in.jsonl"), output=Path("out.jsonl"))


class Text(LiveFile):
    """A file of text, and how often it was asked for."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(path, label="status")
        self.current, self.asked = text, 0

    def text(self) -> str:
        self.asked += 1
        return self.current


def batch_of(path: Path) -> Any:
    """OpenAI's fields of the status file, read strictly: the client's own constructor takes anything."""
    from openai.types import Batch

    return Batch.model_validate({k: v for k, v in json.loads(path.read_text()).items() if k != "moelight"}, strict=True)


def test_it_is_openais_batch_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now, eta = tmp_path / "status.json", [1000.0], TimeLeft()
    monkeypatch.setattr(status_module.time, "time", lambda: now[0])
    status = StatusFile(path, OPTIONS, eta)
    batch = batch_of(path)
    assert (batch.status, batch.created_at, batch.in_progress_at) == ("validating", 1000, None)
    now[0] = 1010.0
    start = JobStart(input="in.jsonl", endpoint="/v1/completions", total=10, refused=2, predicted_s=77.0)
    eta.started(start)
    status.started(start)
    batch = batch_of(path)
    assert (batch.status, batch.in_progress_at, batch.endpoint) == ("in_progress", 1010, "/v1/completions")
    assert batch.request_counts is not None and batch.request_counts.failed == 2
    status.counts(JobCounts(total=10, completed=8, failed=2, state="finalizing", generation_tokens=50, running_s=2.0))
    status.tokens(50, 50, Binding(lane=Lane.DISK, share=0.9))
    status.ended("completed")
    batch = batch_of(path)
    assert batch.status == "completed" and batch.finalizing_at == batch.completed_at == 1010
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (10, 8)
    more = json.loads(path.read_text())["moelight"]
    assert (more["tokens_per_second"], more["eta_seconds"]) == (25.0, 0.0)
    assert more["binding"] == {"lane": "disk", "share": 0.9}


def test_what_failed_as_a_whole_says_why(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    status = StatusFile(path, OPTIONS, TimeLeft())
    status.failed("model_path", "no such model")
    status.ended("failed")
    batch = batch_of(path)
    assert batch.status == "failed" and batch.failed_at is not None
    assert batch.errors is not None and batch.errors.data is not None
    assert batch.errors.data[0].message == "no such model"


def test_at_most_once_a_second_and_always_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(status_module.time, "monotonic", lambda: now[0])
    snapshot = Text(tmp_path / "file", "first")
    snapshot.begin()
    for step in range(30):
        now[0] = step / 10
        snapshot.renew()
    assert snapshot.asked == 1 + 2
    snapshot.renew(now=True)
    assert snapshot.asked == 1 + 3
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_cannot_be_renewed_is_trouble_and_no_error(tmp_path: Path) -> None:
    home = tmp_path / "gone"
    home.mkdir()
    snapshot = Text(home / "status.json", "first")
    snapshot.begin()
    (home / "status.json").unlink()
    home.rmdir()
    snapshot.renew(now=True)
    assert "could not be renewed (no such file or directory)" in snapshot.trouble
    home.mkdir()
    snapshot.current = "third"
    snapshot.renew(now=True)
    assert (home / "status.json").read_text() == "third" and not snapshot.trouble


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_what_cannot_be_written_at_the_start_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "status.json", tmp_path, Path("/dev/full")):
        with pytest.raises(InputError, match=r"^status "):
            StatusFile(path, OPTIONS, TimeLeft())


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "status.json"
    link.symlink_to(tmp_path / "real" / "there.json")
    Text(link, "text").begin()
    assert link.is_symlink() and (tmp_path / "real" / "there.json").read_text() == "text"


def test_names_that_are_no_utf8_have_an_id(tmp_path: Path) -> None:
    odd = os.fsdecode(b"odd \xff")
    (tmp_path / odd).mkdir()
    status = tmp_path / odd / "status.json"
    for output in (None, tmp_path / odd / "out.jsonl"):
        options = JobOptions(prompts=tmp_path / odd / "p.jsonl", output=output, status=status)
        assert not any(watcher.trouble for watcher in file_watchers(options, TimeLeft()))
        result = json.loads(status.read_text())
        assert result["id"].startswith("batch_") and Path(result["input_file_id"]) == options.prompts
