"""Real memory limits for benchmark processes, through the memory controller of control groups (version 1), where this
user may make groups; and files put out of the page cache, so that a disk is read and not a cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

CONTROLLER = Path("/sys/fs/cgroup/memory")


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


def limited_job(
    model: Path, prompts: Path, position: Path, *, memory: int, planned: str, new_tokens: int
) -> dict[str, Any]:
    """One ``moelight generate`` on the CPU in a process of ``memory`` bytes, planned with ``planned`` of them, the
    files of ``model`` out of the page cache before; its outputs in ``position``. Ends the program if the job fails."""
    output, stats = position / "out.jsonl", position / "stats.json"
    for path in position.glob("out.jsonl*"):
        path.unlink()
    command = [sys.executable, "-m", "moelight.cli.main", "generate", str(prompts), "-m", str(model), "-o", str(output)]
    command += ["--host-memory", planned, "--max-tokens", str(new_tokens), "--ignore-eos", "--device", "cpu"]
    forget(model)
    with memory_limit(memory) as group:
        began = time.perf_counter()
        enters = None if group is None else partial(enter, group)
        full = [*command, "--stats", str(stats)]
        done = subprocess.run(full, check=False, stderr=subprocess.PIPE, text=True, preexec_fn=enters)
        wall_s = time.perf_counter() - began
        maximum = None if group is None else int((group / "memory.max_usage_in_bytes").read_text())
    if done.returncode:
        raise SystemExit(f"{model}: moelight ended with {done.returncode}\n{done.stderr[-2000:]}")
    print(done.stderr, file=sys.stderr)
    return {
        "memory": memory if maximum is not None else None,
        "rows": len(output.read_text(encoding="utf-8").splitlines()),
        "wall_s": wall_s,
        "peak_group_bytes": maximum,
        "stats": json.loads(stats.read_text()),
    }
