"""Rows to pipes and standard output: in order, from a file without a name where too many wait, never resumed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from moelight.batch import journal
from moelight.batch.journal import Journal, StreamRows, open_outputs
from moelight.batch.paths import Outputs
from moelight.core.errors import InputError, MoelightError


def row(number: int) -> bytes:
    return b"row %d\n" % number


@pytest.mark.parametrize("order", ["input", "completion"])
def test_standard_output(
    order: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_HELD_BYTES", 30)
    values = [*range(19, 0, -1), 0, *range(39, 20, -1), 20]
    with open_outputs(Outputs(rows=Path("-"), order=order), {}) as rows:  # type: ignore[arg-type]
        assert isinstance(rows, StreamRows)
        for number in values:
            assert not rows.done(number)
            rows.put(number, row(number), totals={"tokens": 2})
            rows.tick()
        with pytest.raises(MoelightError, match="row 40 was never answered"):
            rows.finish(41)
        rows.finish(40)
        assert (rows.completed, rows.failed, rows.totals) == (40, 0, {"tokens": 80})
    message = capfdbinary.readouterr().out
    assert message == b"".join(map(row, sorted(values) if order == "input" else values))


def test_a_pipe_with_a_file_of_errors(tmp_path: Path) -> None:
    pipe, errors = tmp_path / "pipe", tmp_path / "errors"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    with open_outputs(Outputs(rows=pipe, errors=errors), {}) as rows:
        for number in (2, 1, 0):
            rows.put(number, row(number), failed=number == 1)
        rows.finish(3)
    reader.join()
    assert received == [row(0) + row(2)]
    assert errors.read_bytes() == row(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["errors", "pipe"]


def test_a_closed_pipe_is_not_dressed_up(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with open_outputs(Outputs(rows=pipe), {}) as rows:
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            rows.put(0, row(0))


def test_files_have_a_journal_and_kinds_do_not_mix(tmp_path: Path) -> None:
    with open_outputs(Outputs(rows=tmp_path / "out"), {}) as rows:
        assert isinstance(rows, Journal)
    with pytest.raises(InputError, match="error file /dev/null: is a pipe or device"):
        open_outputs(Outputs(rows=tmp_path / "out", errors=Path("/dev/null")), {})
    with pytest.raises(InputError, match="--atomic needs a file"):
        open_outputs(Outputs(rows=Path("/dev/null"), atomic=True), {})
    with open_outputs(Outputs(rows=Path("/dev/full")), {}) as rows, pytest.raises(InputError, match="no space left"):
        rows.put(0, row(0))
