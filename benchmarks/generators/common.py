"""What the contestants of `e2e.py` and `pipeline.py` share: a process each, told by lines on stdin when to generate.

A contestant loads, generates once for every batch size to warm up, and says ``{"load_s": ...}``. A line on stdin is a
number n: it generates for the first n prompts and says ``{"seconds": ..., "cores": ..., "ids": [[...]], ...}``. It ends
when stdin does. What libraries print goes to stderr.
Must import in environments without moelight.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Ids = list[list[int]]
Facts = dict[str, Any]
Generate = Callable[[int], tuple[Ids, Facts]]  # for so many prompts: their new ids, and facts of that generation


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every contestant is to do: the same prompts, so many greedy tokens for each, on so many threads.

    Attributes:
        mode: what follows the first dash of the contestant's name.
        new_tokens: one number for each prompt.
        batches: how many prompts there may be at a time.
        warm: whether it generates once for every batch size before it says that it is ready.
        group: a control group to enter before anything else (or once it has loaded, if that is said), or nothing.
        options: what only one contestant understands.
    """

    model: str
    mode: str
    threads: int
    new_tokens: list[int]
    prompts: Ids
    batches: list[int]
    warm: bool = True
    group: str = ""
    options: Facts = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its continuation, at most."""
        return max(len(ids) + new for ids, new in zip(self.prompts, self.new_tokens))  # noqa: B905 - Python 3.9 reads it


def serve(load: Callable[[Task], Generate], *, warms: bool = True, loads_outside: bool = False) -> None:
    """Loads (outside of its control group, if so), warms up unless nothing would stay warm, and answers lines on stdin
    until it ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    task = Task(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    if not loads_outside:
        _enter(task.group)
    began = time.perf_counter()
    generate = load(task)
    load_s = time.perf_counter() - began
    if loads_outside:
        _enter(task.group)
    for batch in task.batches if task.warm and warms else ():
        generate(batch)
    print(json.dumps({"load_s": load_s}), file=out)
    for line in sys.stdin:
        began, used = time.perf_counter(), _cpu_s()
        ids, facts = generate(int(line))
        wall_s, cpu_s = time.perf_counter() - began, _cpu_s() - used
        print(json.dumps({"seconds": wall_s, "cores": cpu_s / wall_s, "ids": ids, **facts}), file=out)


def _enter(group: str) -> None:
    if group:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))


def _cpu_s() -> float:
    """Seconds of processors that this process and its children that have ended took."""
    return sum(os.times()[:4])
