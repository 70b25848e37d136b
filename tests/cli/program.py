"""Runs the program as a user would: in a process of its own, or, where that is not the point, in this one."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from moelight.cli.main import main
from tests.cli import forked

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "moelight" / "demo"
PLANNED = ("--policy", str(Path(__file__).with_name("planned.yaml")))


# A process that has imported what programs import, which takes longer than most of them, and forks for each.
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(
    ["torch", "highspy", "pydantic.type_adapter", "tokenizers", "httpx"]
    + [f"moelight.{name}" for name in ("cli.job_display", "engine.engine", "lang.files", "serve.server")]
)


class Program:
    """``python -m module`` with ``arguments`` in a process of its own, a session's first; ``env_extra`` adds to the
    environment. ``streams``: descriptors for stdin, stdout and stderr, None for one that is closed."""

    def __init__(
        self,
        module: str,
        *arguments: str | Path,
        cwd: Path | None = None,
        env_extra: Mapping[str, str] | None = None,
        streams: Sequence[int | None] = (0, 1, 2),
    ) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "100",
            "HF_HUB_OFFLINE": "1",
            **(env_extra or {}),
        }
        command = (module, [str(argument) for argument in arguments], str(cwd or Path.cwd()), environment)
        self._process = _FORKING.Process(target=forked.run, args=(*command, forked.Streams(*streams)), daemon=True)
        self._process.start()
        self.pid: int = self._process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        """The same once it has ended; raises TimeoutExpired where that takes longer."""
        self._process.join(timeout)
        if self.poll() is None:
            self._process.kill()
            raise subprocess.TimeoutExpired("a program", timeout)
        return int(self._process.exitcode)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and nobody has asked yet
            os.kill(self.pid, number)


def moelight(
    *arguments: str | Path,
    cwd: Path | None = None,
    env_extra: Mapping[str, str] | None = None,
    stdin: IO[str] | None = None,
    terminal: int | None = None,
    module: str = "moelight.cli.main",
) -> subprocess.CompletedProcess[str]:
    """``moelight`` with ``arguments``, or another ``module``, in a process of its own.

    stdout and stderr are pipes, whose text is returned, or the descriptor of a ``terminal``.
    """
    with contextlib.ExitStack() as opened:
        inputs = opened.enter_context(open(os.devnull)) if stdin is None else stdin
        pipes = [os.pipe(), os.pipe()] if terminal is None else []
        written = [end for _, end in pipes] or [terminal, terminal]
        program = Program(module, *arguments, cwd=cwd, env_extra=env_extra, streams=(inputs.fileno(), *written))
        for _, end in pipes:
            os.close(end)
        with ThreadPoolExecutor(2) as readers:
            texts = list(readers.map(_read, [end for end, _ in pipes]))
        code = program.wait()
    message, complained = texts or ("", "")
    return subprocess.CompletedProcess(args=arguments, returncode=code, stdout=message, stderr=complained)


def _read(end: int) -> str:
    with open(end, encoding="utf-8") as stream:
        return stream.read()


def moelight_inside(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The same without a new process, which would spend most of its time importing torch."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    message, complained = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(args=arguments, returncode=code, stdout=message, stderr=complained)


def forked_job(command: Sequence[str], *, stdin: int, stdout: IO[bytes], stderr: IO[bytes], **_: object) -> Program:
    """What `moelight.serve.jobs` may call instead of Popen: the same job without the process that guards it."""
    at = command.index("-m") + 1
    with open(os.devnull) as nothing:
        return Program(*command[at:], streams=(nothing.fileno(), stdout.fileno(), stderr.fileno()))


def write_prompts(path: Path, *lines: Any) -> Path:
    """A JSONL file of ``lines``; a string is written as it is."""
    texts = (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def read_rows(text: str) -> list[Any]:
    """The rows of JSONL output."""
    return [json.loads(line) for line in text.splitlines()]
