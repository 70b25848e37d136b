"""Replaces itself by a command: ``python -I -S child_process.py PARENT LOCK COMMAND...``.

The process holds the lock until it ends, so a batch has at most one worker, even if the server that started it was
killed; the kernel kills the process when its parent dies. Imports little, since it runs before each job.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys

_SET_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG: kept over exec, cleared by a fork


def run_child(parent: int, lock: str, command: list[str]) -> None:
    """Replace this process by ``command`` once ``lock`` is free; exit with 1 if ``parent`` is gone."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    os.umask(0o077)
    held = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    os.set_inheritable(held, True)
    # A server started in the background of a shell ignores SIGINT, and its children would inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    run_child(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
