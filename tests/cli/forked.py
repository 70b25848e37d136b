"""What a process of ``program.moelight`` runs: the program, with arguments, environment and streams of its own.

Nothing of moelight is imported before the environment is set, as in a process that a shell starts.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from typing import Any


class Streams:
    """File descriptors of this process that become stdin, stdout and stderr of another."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __reduce__(self) -> tuple[Any, ...]:  # while a process starts, which takes them along
        return Received, tuple(DupFd(number) for number in self.numbers)


class Received:
    """The same at their destination."""

    def __init__(self, *handles: Any) -> None:
        self.numbers = [handle.detach() for handle in handles]


def run(arguments: Sequence[str], directory: str, environment: Mapping[str, str], streams: Received) -> None:
    """Run ``moelight`` and exit with its code."""
    for number, received in enumerate(streams.numbers):
        os.dup2(received, number)
        os.close(received)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = ["moelight", *arguments]
    runpy.run_module("moelight.cli.main", run_name="__main__", alter_sys=True)
