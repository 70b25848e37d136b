"""Runs the program as a user would: in a process of its own, or, where that is not the point, in this one."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from moelight.cli.main import main
from tests.cli import forked

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "moelight" / "demo"


# A process that has imported torch, which takes longer than most commands, and forks for each command.
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(["torch"])


def moelight(
    *arguments: str | Path,
    cwd: Path | None = None,
    env_extra: Mapping[str, str] | None = None,
    stdin: IO[str] | None = None,
    terminal: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """``moelight`` with ``arguments`` in a process of its own; ``env_extra`` adds to the environment.

    stdout and stderr are pipes, whose text is returned, or the descriptor of a ``terminal``.
    """
    # One thread: on a busy machine torch's threads spend their time waiting for each other.
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "100",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **(env_extra or {}),
    }
    with contextlib.ExitStack() as opened:
        given = opened.enter_context(open(os.devnull)) if stdin is None else stdin
        pipes = [os.pipe(), os.pipe()] if terminal is None else []
        written = [end for _, end in pipes] or [terminal, terminal]
        command = ([str(each) for each in arguments], str(cwd or Path.cwd()), environment)
        process = _FORKING.Process(target=forked.run, args=(*command, forked.Streams(given.fileno(), *written)))
        process.start()
        for _, end in pipes:
            os.close(end)
        with ThreadPoolExecutor(2) as readers:
            texts = list(readers.map(_read, [end for end, _ in pipes]))
        process.join(300)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(command[0], 300)
    said, complained = texts or ("", "")
    return subprocess.CompletedProcess(args=arguments, returncode=process.exitcode, stdout=said, stderr=complained)


def _read(end: int) -> str:
    with open(end, encoding="utf-8") as stream:
        return stream.read()


def moelight_inside(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The same without a new process, which would spend most of its time importing torch."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    said, complained = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(args=arguments, returncode=code, stdout=said, stderr=complained)


def write_prompts(path: Path, *lines: Any) -> Path:
    """A JSONL file of ``lines``; a string is written as it is."""
    texts = (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def read_rows(text: str) -> list[Any]:
    """The rows of JSONL output."""
    return [json.loads(line) for line in text.splitlines()]
