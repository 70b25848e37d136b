"""README and docs do what they show: commands and blocks of Python run, and what is shown of them comes out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import Shown, steps_of
from tests.docs.shown import (
    DOCUMENTS,
    NOT_COMPARED,
    NOT_RUN,
    NOT_RUN_PYTHON,
    agrees,
    brought_up_to_date,
    is_run,
    play,
    relative,
    stage,
    write,
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


QUICK = ("README.md", "docs/start.md", "docs/concepts/kernels.md")


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(path, id=relative(path), marks=() if relative(path) in QUICK else pytest.mark.thorough)
        for path in DOCUMENTS
        if steps_of(path)
    ],
)
def test_what_is_shown_is_so(document: Path, cache: Path) -> None:
    with stage(cache):
        differences = play(document)
    hint = "\nmake shown writes what came out into the documents" if differences else ""
    assert not differences, "\n".join(map(str, differences)) + hint


def test_nothing_is_excused_that_is_not_there() -> None:
    steps = [step for path in DOCUMENTS for step in steps_of(path)]
    commands = {step.command for step in steps}
    for beginning in NOT_RUN:
        assert any(command.startswith(beginning) for command in commands), beginning
    assert set(NOT_COMPARED) <= commands
    for part in NOT_RUN_PYTHON:
        assert any(part in step.python for step in steps), part
    assert sum(is_run(command) for command in commands) > 25
    assert sum(step.shown is not None for step in steps if is_run(step.command)) >= 6


OUTPUT = ["plan on t4", "", "342.4 tokens/s; solved in 535 ms", "a  1", "b  2", "c  3", "the end"]


def shown(*lines: str, trimmed: bool = False) -> Shown:
    return Shown(first=0, lines=list(lines), trimmed=trimmed)


@pytest.mark.parametrize(
    ("block", "same"),
    [
        (shown(*OUTPUT), True),
        (shown("plan on t4", "", "342.4 tokens/s; solved in 2.1 s", *OUTPUT[3:]), True),
        (shown("plan on t4", "", "342.5 tokens/s; solved in 535 ms", *OUTPUT[3:]), False),
        (shown("plan on t4", "…", "the end"), True),
        (shown("plan on t4", "…", "b  2"), False),
        (shown("plan on …", "…", "the end"), True),
        (shown("plan on t4", "b  2", "the end"), False),
        (shown("plan on t4", "b  2", "the end", trimmed=True), True),
        (shown("b  2", "a  1", trimmed=True), False),
        (shown("b  3", trimmed=True), False),
    ],
)
def test_what_counts_as_the_same(block: Shown, same: bool) -> None:
    assert agrees(block, OUTPUT) is same


@pytest.mark.parametrize(
    ("block", "now"),
    [
        (
            shown("plan on t4", "", "9.9 tokens/s; solved in 2 s", "a  1"),
            [*OUTPUT[:2], "342.4 tokens/s; solved in …", *OUTPUT[3:]],
        ),
        (shown("plan on l4", "…", "b  9", "…"), ["plan on t4", "…", "b  2", "…"]),
        (shown("plan on l4", "c  9", "what is no more", trimmed=True), ["plan on t4", "c  3"]),
    ],
)
def test_a_document_is_brought_up_to_date(block: Shown, now: list[str]) -> None:
    assert brought_up_to_date(block, OUTPUT) == now
    assert agrees(Shown(first=0, lines=now, trimmed=block.trimmed), OUTPUT)


def test_a_document_that_is_wrong_is_found_and_mended(tmp_path: Path, cache: Path) -> None:
    document = tmp_path / "guide.md"
    text = """`mine.jsonl`, one object a line:

```json
{"prompt": "add 1 and 2 ="}
```

```
$ moelight policy check examples/policies/small.moe
all is ill
```

```
moelight generate mine.jsonl -o out.jsonl
```
```json
{"text": " 4"}
```
"""
    document.write_text(text, encoding="utf-8")
    with stage(cache):
        wrong = play(document)
    assert [item.first for item in wrong] == [8, 15]
    write(wrong)
    with stage(cache):
        assert play(document) == []
    assert "all is well" in document.read_text(encoding="utf-8")
