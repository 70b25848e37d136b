"""Runs the program as a user would: in a process of its own, or, where that is not the point, in this one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from moelight.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "moelight" / "demo"


def moelight(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """``moelight`` with ``arguments``; stdout and stderr are pipes unless ``options`` say otherwise.

    ``env_extra`` adds to the environment.
    """
    extra = options.pop("env_extra", {})
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    # One thread: on a busy machine torch's threads spend their time waiting for each other.
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "100",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **extra,
    }
    return subprocess.run(
        [sys.executable, "-m", "moelight.cli.main", *map(str, arguments)],
        text=True,
        encoding="utf-8",
        timeout=300,
        env=environment,
        check=False,
        **{**settings, **options},
    )


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
