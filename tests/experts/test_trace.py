"""Traces: what is written is read back, and what is no trace is refused with its line."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from moelight.core.errors import ConfigError
from moelight.experts import trace
from moelight.experts.trace import RoutingTrace, read_rows
from moelight.profiles.model import MOST_EXPERTS, MOST_LAYERS
from tests.experts.traces import write_trace


def test_written_rows_come_back(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    written = RoutingTrace(path)
    written.write(3, np.array([[5, 1], [1, 7]], np.int32), np.array([[0.75, 0.25], [0.66666, 1 / 3]], np.float32))
    written.write(0, np.zeros((0, 2), np.int64), np.zeros((0, 2)))
    written.write(1, [[2]], [[np.nan]])
    written.close()
    written.close()
    assert path.read_text().splitlines()[0] == '{"l": 3, "e": [5, 1, 1, 7], "s": [0.75, 0.25, 0.6667, 0.3333]}'
    for file in (path, tmp_path / "t.gz"):
        file.write_bytes(path.read_bytes() if file is path else gzip.compress(path.read_bytes()))
        rows = list(read_rows(file))
        assert [(row.line, row.layer, row.ids.tolist()) for row in rows] == [
            (1, 3, [5, 1, 1, 7]),
            (2, 0, []),
            (3, 1, [2]),
        ]
        assert rows[0].scores is not None and rows[0].scores.tolist() == [0.75, 0.25, 0.6667, 0.3333]
        assert rows[2].scores is None


def test_empty_lines_and_a_byte_order_mark_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"l":0,"e":[1],"s":null}\r\n\n  \n{"e":[2],"l":1}')
    assert [(row.line, row.layer) for row in read_rows(path)] == [(1, 0), (4, 1)]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"[]x", "is not JSON (Extra data, column 3)"),
        (b'"l"', "is not an object"),
        (b"[1, 2]", "is not an object"),
        (b'{"l":0}', "lacks key 'e' (expert ids)"),
        (b'{"e":[]}', "lacks key 'l' (layer)"),
        (b'{"l":0,"e":[1],"E":[1]}', "has an unknown key 'E'"),
        (b'{"l":0,"l":1,"e":[1]}', "has key 'l' twice"),
        (b'{"l":-1,"e":[1]}', f"key 'l': expected a layer from 0 to {MOST_LAYERS - 1}, not -1"),
        (b'{"l":true,"e":[1]}', "key 'l': expected a layer"),
        (b'{"l":1.0,"e":[1]}', "key 'l': expected a layer"),
        (b'{"l":0,"e":7}', "key 'e': expected a list of expert ids, not 7"),
        (b'{"l":0,"e":{"a":1}}', "key 'e'"),
        (b'{"l":0,"e":[[1]]}', f"key 'e': expected expert ids from 0 to {MOST_EXPERTS - 1}, not a list or an object"),
        (b'{"l":0,"e":[1e3]}', "key 'e'"),
        (b'{"l":0,"e":[1' + b"0" * 400 + b"]}", "key 'e': expected expert ids from 0 to 4095, not a number of many"),
        (b'{"l":0,"e":[1],"s":[0.5,0.5]}', "key 's': expected one score for each of the 1 ids, not 2"),
        (b'{"l":0,"e":[1],"s":0.5}', "key 's': expected one score for each of the 1 ids, not 0.5"),
        (b'{"l":0,"e":[1],"s":[NaN]}', "is not JSON"),
        (b'{"l":0,"e":[1],"s":[1e999]}', "key 's': expected finite numbers"),
        (b'{"l":0,"e":[1],"s":[true]}', "key 's': expected finite numbers, not true"),
        (b'{"l":' + b"1" * 5000 + b',"e":[]}', "is not JSON"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"l":0,"e":[1],"s":["\xff"]}', "is not UTF-8 (byte 22)"),
    ],
)
def test_hostile_lines_are_refused_with_their_number(tmp_path: Path, line: bytes, complaint: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"l":0,"e":[1]}\n' + line + b"\n")
    rows = read_rows(path)
    assert next(rows).layer == 0
    with pytest.raises(ConfigError) as refusal:
        next(rows)
    assert str(refusal.value).startswith(f"trace {path}:2: {complaint}")


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torn = tmp_path / "torn.gz"
    torn.write_bytes(gzip.compress(write_trace(tmp_path / "t", [(0, [1])] * 99).read_bytes())[:-20])
    for path, complaint in ((tmp_path, "directory"), (tmp_path / "none", "No such file"), (torn, "ended before")):
        with pytest.raises(ConfigError, match=f"trace .*: cannot be read .*{complaint}"):
            list(read_rows(path))
    monkeypatch.setattr(trace, "MOST_LINE_BYTES", 1 << 20)
    endless = tmp_path / "endless"
    endless.write_bytes(gzip.compress(b"[" * (8 << 20)))
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"endless:1: is longer than 1 MiB"):
        list(read_rows(endless))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "t.jsonl"):
        with pytest.raises(ConfigError, match=f"routing trace {path}: cannot be written"):
            RoutingTrace(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    full = RoutingTrace(Path("/dev/full"))
    full.write(0, [[1]], [[1.0]])
    with pytest.raises(ConfigError, match=r"/dev/full: cannot be written \(no space left on device\)"):
        full.close()
    monkeypatch.setattr(trace, "_BUFFER_BYTES", 16)
    full = RoutingTrace(Path("/dev/full"))
    with pytest.raises(ConfigError, match="no space left") as refusal:
        for _ in range(9):
            full.write(0, [[1]], [[1.0]])
    assert refusal.value.__suppress_context__
    full.close()
