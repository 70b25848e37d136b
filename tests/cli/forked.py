"""What a process of ``program.Program`` runs: a module, with arguments, environment and streams of its own."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from typing import Any

# Modules of these read the environment when they are imported: a fault to inject.
_READERS = ("moelight.batch", "moelight.cli", "moelight.serve")


class Streams:
    """File descriptors of this process that become stdin, stdout and stderr of another; None becomes a closed one."""

    def __init__(self, *values: int | None) -> None:
        self.descriptors = values

    def __reduce__(self) -> tuple[Any, ...]:  # while a process starts, which takes them along
        return Received, tuple(None if number is None else DupFd(number) for number in self.descriptors)


class Received:
    """The same at their destination."""

    def __init__(self, *handles: Any) -> None:
        self.descriptors = [None if handle is None else handle.detach() for handle in handles]


def run(
    module: str, arguments: Sequence[str], directory: str, environment: Mapping[str, str], streams: Received
) -> None:
    """``python -m module`` with ``arguments``; exit with its code."""
    os.setsid()
    for number, received in enumerate(streams.descriptors):
        if received is None:
            os.close(number)
        else:
            os.dup2(received, number)
            os.close(received)
    told = {"encoding": "utf-8", "closefd": False}
    ways: list[dict[str, Any]] = [{}, {"mode": "w"}, {"mode": "w", "errors": "backslashreplace", "buffering": 1}]
    sys.stdin, sys.stdout, sys.stderr = (
        None if received is None else os.fdopen(number, **told, **ways[number])
        for number, received in enumerate(streams.descriptors)
    )
    os.environ.clear()
    os.environ.update(environment)
    anew = (module, *_READERS) if "MOELIGHT_FAULT" in environment else (module,)
    for name in [name for name in sys.modules if name.startswith(anew)]:
        del sys.modules[name]
    os.chdir(directory)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit:
        try:
            sys.stderr.flush()
        except (AttributeError, OSError):  # a closed stream: the interpreter ignores it at exit too
            sys.stderr = None
        raise
