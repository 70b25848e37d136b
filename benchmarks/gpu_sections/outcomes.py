"""A plugin for pytest: outcomes on the disk as they come, so that a crash or the end of the time loses none of them.

    pytest -p gpu_sections.outcomes --outcomes FILE.jsonl [--shard 0/4] [--turns 20] [--jitter SEED]

A test that FILE has already is left out. A test after which the device is lost ends the session: what follows needs a
process of its own. ``--jitter`` puts sleeps of random length before and behind the work of every lane, on the host and,
on CUDA, on the stream.
"""

from __future__ import annotations

import json
import random
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LOST = ("illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address")
_MOST_CHARACTERS = 600
_LONGEST_SLEEP_S, _LONGEST_SPIN_CYCLES = 3e-4, 400_000
_STEPS = "outcomes_turn"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True)
    parser.addoption("--shard", default="0/1", help="which share of the tests, of how many")
    parser.addoption("--turns", type=int, default=1, help="every test so often")
    parser.addoption("--jitter", type=int, help="the seed of random sleeps around the work of lanes")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes(config), "moelight-outcomes")
    if config.getoption("jitter") is not None:
        add_jitter(config.getoption("jitter"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    turns = metafunc.config.getoption("turns")
    if turns > 1:
        metafunc.fixturenames.append(_STEPS)
        metafunc.parametrize(_STEPS, range(turns), indirect=True)


@pytest.fixture
def outcomes_turn(request: pytest.FixtureRequest) -> int:
    return int(request.param)


class Outcomes:
    """Writes a line when a test begins and one when it has ended."""

    def __init__(self, config: pytest.Config) -> None:
        self._path: Path = config.getoption("outcomes")
        selected, of = config.getoption("shard").split("/")
        self._mine, self._of = int(selected), int(of)
        self._session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known_names = set(read_outcomes(self._path))
        items[:] = [item for item in items if item.nodeid not in known_names and self._is_mine(item.nodeid)]
        items.sort(key=_turn)

    def _is_mine(self, test: str) -> bool:
        return zlib.crc32(test.encode()) % self._of == self._mine

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self._mine == 0:
            self._write(test=report.nodeid, outcome="failed", said=_end_of(report.longreprtext))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(test=nodeid, outcome="begun")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        message = _end_of(report.longreprtext) if report.failed else _reason(report) if report.skipped else ""
        self._write(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 3), said=message)
        if report.failed and any(words in report.longreprtext for words in LOST) and self._session is not None:
            self._session.shouldstop = "the device is lost"

    def _write(self, **line: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _turn(item: pytest.Item) -> int:
    """Every test once, then every test again."""
    called = getattr(item, "callspec", None)
    return int(called.params.get(_STEPS, 0)) if called is not None else 0


def read_outcomes(path: Path) -> dict[str, dict[str, Any]]:
    """The last line of every test in ``path``: one whose outcome is ``begun`` never ended. A failure stays one."""
    result: dict[str, dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        line = json.loads(text)
        if result.get(line["test"], {}).get("outcome") != "failed":
            result[line["test"]] = line
    return result


def _end_of(text: str) -> str:
    """The line with the error, and the last of the report."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return " | ".join(dict.fromkeys([*errors[:2], *lines[-1:]]))[:_MOST_CHARACTERS]


def _reason(report: pytest.TestReport) -> str:
    return str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)[:_MOST_CHARACTERS]


def add_jitter(seed: int) -> None:
    """From now on tasks of all lanes of this process sleep at random before and behind their work."""
    import torch

    from moelight.runtime.lanes import HostTicket, StreamTicket

    draw = random.Random(seed)

    def pause(*, stream: bool) -> None:
        kind = draw.random()
        if kind < 0.15:
            time.sleep(draw.random() * _LONGEST_SLEEP_S)
        elif kind < 0.5 and stream and torch.cuda.is_available():
            torch.cuda._sleep(int(draw.random() * _LONGEST_SPIN_CYCLES))

    def around(method: Callable[..., Any], *, stream: bool) -> Callable[..., Any]:
        def jittered(self: Any, work: Callable[[], Any], *rest: Any) -> Any:
            def slowly() -> Any:
                pause(stream=stream)
                outcome = work()
                pause(stream=stream)
                return outcome

            return method(self, slowly, *rest)

        return jittered

    StreamTicket.launch = around(StreamTicket.launch, stream=True)  # type: ignore[method-assign]
    HostTicket.carry_out = around(HostTicket.carry_out, stream=False)  # type: ignore[method-assign]
