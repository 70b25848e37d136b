"""Real memory limits for benchmark processes, through the memory controller of control groups (version 1), where this
user may make groups; what a process takes before it does anything; and files put out of the page cache, so that a disk
is read and not a cache."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROLLER = Path("/sys/fs/cgroup/memory")
_BASE = """
import torch, moelight.engine.engine
from moelight.runtime.measure import peak_rss_bytes
torch.ones(8, 8) @ torch.ones(8, 8)
print(peak_rss_bytes())
"""


@contextmanager
def memory_limit(size: int) -> Iterator[Path | None]:
    """A new group whose processes together have ``size`` bytes, their page cache included; None where none can be made.
    A process enters by `enter`. All have to be gone when the block is left."""
    group = CONTROLLER / f"moelight-{uuid.uuid4().hex}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        (group / "memory.limit_in_bytes").write_text(str(size))
        yield group
    finally:
        group.rmdir()


def enter(group: Path) -> None:
    """Put this process into ``group``; what it allocates and reads from now on counts there."""
    (group / "cgroup.procs").write_text(str(os.getpid()))


def forget(model: Path) -> None:
    """Put the file ``model``, or the files of that directory, out of the page cache."""
    for path in model.iterdir() if model.is_dir() else (model,):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def measure_base() -> int:
    """Peak bytes of a process that imports torch and the engine and multiplies two small matrices."""
    done = subprocess.run([sys.executable, "-c", _BASE], check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout)
