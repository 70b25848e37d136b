"""What the contestants of `benchmarks/e2e.py` share: a process each, told by lines on stdin when to generate.

A contestant loads, generates once to warm up, says ``{"load_s": ...}``, and for every line on stdin generates once more
and says ``{"seconds": ..., "cores": ..., "ids": [[...]], ...}``. It ends when stdin does. What libraries print goes to
stderr.
Must import in environments without moelight.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Ids = list[list[int]]
Facts = dict[str, Any]
Generate = Callable[[], tuple[Ids, Facts]]  # the new ids of every prompt, and facts of that generation


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every contestant is to do: the same prompts, the same number of greedy tokens, on so many threads."""

    model: str
    mode: str
    threads: int
    new_tokens: int
    prompts: Ids


def serve(load: Callable[[Task], Generate]) -> None:
    """Loads, warms up, and answers lines on stdin until it ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    task = Task(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    began = time.perf_counter()
    generate = load(task)
    load_s = time.perf_counter() - began
    generate()
    print(json.dumps({"load_s": load_s}), file=out)
    for _ in sys.stdin:
        began, used = time.perf_counter(), time.process_time()
        ids, facts = generate()
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - used
        print(json.dumps({"seconds": wall_s, "cores": cpu_s / wall_s, "ids": ids, **facts}), file=out)
