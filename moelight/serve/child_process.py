"""Becomes the command it is given, once it is certain that no other process works there and that its parent lives.

``python -I -S tied.py PARENT LOCK COMMAND...``. The lock is held by the process itself until it is gone, so a batch has
one worker at most, whatever became of the server that began it. The kernel kills the process when its parent dies.
Standard library alone, and little of it: this runs before each job.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys

_SET_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG: kept over exec, forgotten by a fork


def run_child(parent: int, lock: str, command: list[str]) -> None:
    """Replace this process by ``command``, or leave with 1 where the parent is gone already."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    os.umask(0o077)
    held = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    os.set_inheritable(held, True)
    # A server begun in the background of a shell ignores the interrupt, and would hand that on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    run_child(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
