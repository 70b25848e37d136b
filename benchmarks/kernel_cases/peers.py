"""Contenders that live in other environments: a child process each, which does what one line tells it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from runner.threads import bound, unbind

from kernel_cases.turns import Timed, UnfitError

SCRIPTS = Path(__file__).resolve().parents[1] / "peers"


class Peer:
    """A child that is started when first needed, and again if a case kills it. Idle, it sleeps on its stdin."""

    def __init__(self, name: str, python: Path | None, threads: int) -> None:
        self.name, self.python, self.threads = name, python, threads
        self.title = f"{name}: no environment given"
        self._child: subprocess.Popen[str] | None = None

    def timed(self, operation: str, case: dict[str, Any]) -> Timed:
        """Operands made in the child, its result checked there. Raises `UnfitError` with its reason."""
        answer = self._ask({"do": "prepare", "op": operation, "case": case})
        if "unable" in answer:
            raise UnfitError(answer["unable"])
        return lambda times: float(self._ask({"do": "run", "times": times})["seconds"])

    def drop(self) -> None:
        """Its operands are freed."""
        if self._child is not None:
            self._ask({"do": "drop"})

    def cpu_seconds(self) -> float:
        """What the child has used of the processors so far."""
        if self._child is None or not Path("/proc/self/stat").exists():
            return 0.0
        fields = Path(f"/proc/{self._child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Its process ends."""
        if self._child is not None:
            with contextlib.suppress(BrokenPipeError):
                self._child.communicate()
            self._child = None

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        if self.python is None:
            raise UnfitError("absent: no environment given")
        if self._child is None:
            self._start(self.python)
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps(order) + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise UnfitError(f"its process ended with {self._ended(child)}")
        return dict(json.loads(answer))

    def _start(self, python: Path) -> None:
        script = SCRIPTS / f"{self.name}_ops.py"
        environment = {**os.environ, **bound(), "OMP_NUM_THREADS": str(self.threads)}
        environment.pop("PYTHONPATH", None)
        stubs = python.parents[1] / "stubs"  # where a build for GPUs needs libraries that are not there
        if stubs.is_dir():
            environment["LD_LIBRARY_PATH"] = str(stubs)
        self._child = subprocess.Popen(
            [python, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            preexec_fn=unbind,  # noqa: PLW1509 - it calls the system once and takes no lock
        )
        assert self._child.stdout is not None
        hello = self._child.stdout.readline()
        if not hello:
            code = self._ended(self._child)
            self.title = f"{self.name}: {script.name} does not start in {python} (ended with {code})"
            raise UnfitError(f"absent: its process ended with {code}")
        self.title = json.loads(hello)["name"]

    def _ended(self, child: subprocess.Popen[str]) -> int:
        """The exit code of the child, which is gone."""
        self._child = None
        with contextlib.suppress(BrokenPipeError), child:
            pass
        return child.returncode
