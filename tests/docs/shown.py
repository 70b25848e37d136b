"""Runs what a document shows, in one process and a directory of its own, and compares, or brings it up to date:

python -m tests.docs.shown [FILE…]            # says what differs
python -m tests.docs.shown [FILE…] --update   # writes what came out into the documents
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from moelight.core.paths import CACHE_VARIABLE
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.model_files import model_config
from tests.cli.program import DEMO, ROOT, moelight_inside, write_prompts
from tests.docs.blocks import Shown, Step, steps_of

DOCUMENTS = [
    ROOT / "README.md",
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "log" not in (path.stem, path.parent.name)),
]
COLUMNS = "100"
# Commands that are not run, whole or by their beginning, and why.
NOT_RUN = {
    "moelight generate prompts.jsonl -o answers.jsonl --ray ": "needs a cluster: tests/integrations/ray",
    "moelight generate prompts.jsonl --model models/": "needs a GGUF file: tests/engine/test_gguf.py, make real",
    "moelight serve-batch ": "serves until it is ended: tests/serve",
    "moelight lm-eval ": "the harness's tasks come from the hub: tests/integrations/test_lm_eval.py",
    "moelight profile": "takes a minute: tests/cli/test_profile.py",
    "moelight policy tune trace.jsonl --model olmoe-1b-7b ": "replays a trace of that model, which is not kept",
    "moelight generate prompts.jsonl -o answers.jsonl --metrics ": "writes into a directory of the system",
}
# Checkpoints that a document makes by a command that takes long, and what stands for them here.
STAND_INS = {"/tmp/mixtral": "path/to/checkpoint"}
# What is run, and shows what came of other input or of another machine.
NOT_COMPARED = {
    "moelight doctor": "says what this machine is",
    "moelight generate prompts.jsonl --host-memory 120MiB --dry-run": "ten thousand lines, which are not kept",
    "moelight compare rounded prompts.jsonl --against path/to/checkpoint": "last bits of two prompts",
}
# Python that is not run: a part of it, and why.
NOT_RUN_PYTHON = {
    "attach(": "transformers' models: tests/integrations/test_transformers.py",
    "lm_eval": "the harness: tests/integrations/test_lm_eval.py",
    "import ray": "needs a cluster: tests/integrations/ray/test_cluster.py",
    "OpenAI(": "needs a server: tests/serve/test_client.py",
}
# What is measured or made anew in every run.
MEASURED = [
    (re.compile(r"solved in [\d.,]+ \w+"), "solved in …"),
    (re.compile(r"in [\d.,]+ m?s \([\d.,]+ tok/s\), load [\d.]+ s, peak memory [\d.]+\w+"), "in …"),
    (re.compile(r"; [\d.]+ s, [\d.]+ GB/s"), "; …"),
    (re.compile(r'"created": \d+'), '"created": …'),
    (re.compile(r'"(logprob|probability)": [-\d.e]+'), r'"\1": …'),
    (re.compile(r'"embedding": \[[-\d.e, ]+\]'), r'"embedding": …'),
]
# What is shortened where a document is brought up to date.
_LONG = re.compile(r"\b([0-9a-f]{4})[0-9a-f]{12,}\b|(?<=[_-])([0-9a-f]{4})[0-9a-f]{12,}\b")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """``first``: where in the document; ``now``: the lines that belong there."""

    document: Path
    first: int
    shown: Sequence[str]
    now: Sequence[str]

    def __str__(self) -> str:
        changes = difflib.unified_diff(self.shown, self.now, "shown", "found", lineterm="", n=0)
        return "\n".join([f"{relative(self.document)}:{self.first + 1}:", *changes])


def relative(document: Path) -> str:
    """What a person calls ``document``."""
    return str(document.relative_to(ROOT)) if document.is_relative_to(ROOT) else document.name


class FailedError(AssertionError):
    """What a document shows cannot be done."""


def play(document: Path) -> list[Difference]:
    """Do what ``document`` shows; what it shows otherwise than it is.

    Raises:
        FailedError: a command or a block of Python fails.
    """
    result, steps = list[Difference](), steps_of(document)
    names = _names() if any(step.python for step in steps) else {"close": lambda: None}
    try:
        for step in steps:
            actual = _done(step, names, f"{relative(document)}:{step.line + 1}")
            if actual is not None and step.shown is not None and not agrees(step.shown, actual):
                now = brought_up_to_date(step.shown, actual)
                result.append(Difference(document=document, first=step.shown.first, shown=step.shown.lines, now=now))
    finally:
        names["close"]()
    return result


@contextlib.contextmanager
def stage(cache: Path) -> Iterator[None]:
    """A directory with what documents speak of, as the current one; plans are kept in ``cache``."""
    before = Path.cwd()
    changed = {"COLUMNS": COLUMNS, CACHE_VARIABLE: str(cache), "HF_HUB_OFFLINE": "1"}
    machine = load_hardware_profile("cpu-amx")
    with tempfile.TemporaryDirectory() as made, mock.patch.dict(os.environ, changed):
        present = Path(made)
        (present / "path" / "to").mkdir(parents=True)
        shutil.copytree(DEMO, present / "path" / "to" / "checkpoint")
        (present / "examples").symlink_to(ROOT / "examples")
        policies = ROOT / "examples" / "policies"
        for name, policy in (("mine", "long_job"), ("other", "default"), ("small", "small")):
            shutil.copy(policies / f"{policy}.moe", present / f"{name}.moe")
        (present / "qwen").mkdir()
        (present / "qwen" / "config.json").write_text(json.dumps(model_config("qwen1.5-moe-a2.7b")))
        shutil.copy(DEMO / "tokenizer.json", present / "qwen")
        write_prompts(present / "prompts.jsonl", {"prompt": "add 17 and 25 ="}, {"prompt": "sort window ="})
        message = {"role": "user", "content": "add 17 and 25 ="}
        body = {"model": "demo", "messages": [message], "max_tokens": 20}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        write_prompts(present / "batch.jsonl", line)
        os.chdir(present)
        try:
            with mock.patch("moelight.runtime.machine_profile.machine_profile", return_value=machine):
                yield
        finally:
            os.chdir(before)


def _done(step: Step, names: dict[str, Any], where: str) -> list[str] | None:
    """What came of ``step``; None where that is not to be compared."""
    if step.python:
        if not any(part in step.python for part in NOT_RUN_PYTHON):
            _run_python(step.python, names, where)
        return None
    if step.file:
        path = Path(step.file)
        assert step.shown is not None
        if path.exists():
            return path.read_text(encoding="utf-8").splitlines()
        path.write_text("".join(f"{line}\n" for line in step.shown.lines), encoding="utf-8")
        return None
    if not is_run(step.command):
        return None
    refused = step.shown is not None and any("moelight: error: " in line for line in step.shown.lines)
    words = shlex.split(step.command, comments=True)[1:]
    done = moelight_inside(*(STAND_INS.get(word, word) for word in words))
    if (done.returncode == 2) != refused or done.returncode not in (0, 1, 2):
        raise FailedError(f"{where}: {step.command}: exit code {done.returncode}\n{done.stderr}")
    return None if step.command in NOT_COMPARED else (done.stdout + done.stderr).splitlines()


def is_run(command: str) -> bool:
    """Whether ``command`` is ours, whole, and in no list of those that are not run; with metavariables or brackets it
    is a synopsis."""
    synopsis = re.search(r"[\[…|&]|(?<![\w.-])[A-Z]+\b(?!\.|\w)", command)
    listed = any(command.startswith(item) for item in NOT_RUN)
    return command.startswith("moelight ") and synopsis is None and not listed


def _names() -> dict[str, Any]:
    """Names that blocks of Python use and do not make: prompts, an open engine, a batch of experts."""
    from moelight import Engine, Policy, SamplingParams
    from moelight.experts.cache import ExpertCache

    engine = Engine(Policy(model="demo", batch_size=4, micro_batch_size=4, micro_batch_tokens=64))
    return {
        "SamplingParams": SamplingParams,
        "ExpertCache": ExpertCache,
        "engine": engine,
        "close": engine.close,
        "prompts": ["add 17 and 25 =", "sort window ="],
        "params": SamplingParams(max_tokens=4),
        "layer": 0,
        "ids": np.array([[1, 2], [2, 3]]),
        "scores": np.array([[0.5, 0.5], [0.5, 0.5]]),
    }


def _run_python(text: str, names: dict[str, Any], where: str) -> None:
    original = {**names, "__name__": "shown"}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(text, where, "exec"), original)  # noqa: S102 (what a reader would run)
    except Exception as error:
        raise FailedError(f"{where}: {type(error).__name__}: {error}\n{text}") from error


def agrees(shown: Shown, actual: Sequence[str]) -> bool:
    """Whether ``actual`` is what is shown, measured figures and what is left out apart."""
    lines = [line.rstrip() for line in actual]
    pattern = [".*" if line.strip() == "…" else _pattern(line) for line in shown.lines]
    if shown.trimmed:
        rest = iter(lines)
        return all(any(re.fullmatch(item, _plain(line)) for line in rest) for item in pattern)
    full = "".join(r"(?:.*\n)*?" if line.strip() == "…" else f"{_pattern(line)}\n" for line in shown.lines)
    trailing = "".join(f"{_plain(line)}\n" for line in _without_ends(lines))
    return re.fullmatch(full, trailing) is not None


def _without_ends(lines: Sequence[str]) -> Sequence[str]:
    """Without empty lines at both ends."""
    full = [at for at, line in enumerate(lines) if line]
    return lines[full[0] : full[-1] + 1] if full else []


def _pattern(line: str) -> str:
    return ".*".join(re.escape(part) for part in _plain(line.rstrip()).split("…"))


def _plain(line: str) -> str:
    for pattern, words in MEASURED:
        line = pattern.sub(words, line)
    return line


def brought_up_to_date(shown: Shown, actual: Sequence[str]) -> list[str]:
    """What ``shown`` should be: each of its lines as it is now, by the actual line that is most like it, in order; all
    lines where all are shown. Lines that still agree stay as they are."""
    lines = [line.rstrip() for line in _without_ends([line.rstrip() for line in actual])]
    if not shown.trimmed and "…" not in (line.strip() for line in shown.lines):
        wanted: list[tuple[str, str | None]] = [
            (next((item for item in shown.lines if re.fullmatch(_pattern(item), _plain(line))), ""), line)
            for line in lines
        ]
    else:
        wanted = _aligned(shown.lines, lines)
    return [
        old if new is None or (old and re.fullmatch(_pattern(old), _plain(new))) else _shortened(new)
        for old, new in wanted
    ]


def _shortened(line: str) -> str:
    return _LONG.sub(lambda result: f"{result[1] or result[2]}…", _plain(line))


def _aligned(shown: Sequence[str], actual: Sequence[str]) -> list[tuple[str, str | None]]:
    """Each of ``shown`` with its line of ``actual``, in one order, alike as far as can be; those like nothing fall out,
    lines of ``…`` stay."""
    like = [[0.0 if old.strip() == "…" else _alike(old, new) for new in actual] for old in shown]
    best = [[0.0] * (len(actual) + 1) for _ in range(len(shown) + 1)]
    for row in reversed(range(len(shown))):
        for column in reversed(range(len(actual))):
            take = like[row][column] + best[row + 1][column + 1] if like[row][column] > 0.3 else 0.0
            best[row][column] = max(take, best[row + 1][column], best[row][column + 1])
    result, column = list[tuple[str, str | None]](), 0
    for row, old in enumerate(shown):
        if old.strip() == "…":
            result.append((old, None))
            continue
        while column < len(actual) and best[row][column] == best[row][column + 1] > best[row + 1][column]:
            column += 1
        if column < len(actual) and best[row][column] > best[row + 1][column]:
            result.append((old, actual[column]))
            column += 1
    return result


def _alike(one: str, other: str) -> float:
    if not one.strip() or not other.strip():
        return 0.31 if one.strip() == other.strip() else 0.0
    masked = (re.sub(r"[\d.,]+", "0", re.sub(r"[█▉▊▋▌▍▎▏▓▒░·]+", "█", line)) for line in (one, other))
    return difflib.SequenceMatcher(None, *masked, autojunk=False).ratio()


def write(differences: Sequence[Difference]) -> None:
    """Put what was found in its place, last block first."""
    by_document: Mapping[Path, list[Difference]] = {difference.document: [] for difference in differences}
    for difference in differences:
        by_document[difference.document].append(difference)
    for document, result in by_document.items():
        lines = document.read_text(encoding="utf-8").splitlines()
        for difference in sorted(result, key=lambda one: -one.first):
            lines[difference.first : difference.first + len(difference.shown)] = difference.now
        document.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Say what differs, or mend it."""
    named = [Path(item).resolve() for item in sys.argv[1:] if item != "--update"]
    differences = list[Difference]()
    with tempfile.TemporaryDirectory() as cache:
        for document in named or DOCUMENTS:
            with stage(Path(cache)):
                differences += play(document)
    print("\n".join(map(str, differences)))
    if "--update" in sys.argv[1:]:
        write(differences)
        return 0
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
