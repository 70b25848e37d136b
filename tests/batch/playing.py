"""A stand-in for the engine of a job, somebody who hears what the job tells, and files of prompts and rows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from moelight.batch.progress import Progress, ProgressFields
from moelight.core.errors import InputError
from moelight.core.policy import Adaptation, Policy
from moelight.core.request import Completion, Request
from moelight.core.schedule import Lane, Task, TaskKind
from moelight.core.timeline import Span, Timeline
from moelight.observe.stats import Binding, LaneStats, RunStats
from moelight.profiles.families import profile_from_dir
from moelight.profiles.workload import Workload

DEMO = Path(__file__).resolve().parents[2] / "moelight" / "demo"


class StandIn:
    """An engine that answers in a shuffled order; a prompt of 21 to 399 tokens is more than it can serve."""

    def __init__(self) -> None:
        self.plan: SimpleNamespace | None = SimpleNamespace(why="because the test says so")
        self.policy = Policy(model="demo", batch_size=2, micro_batch_size=2, kv_tokens=64)
        self.profile = profile_from_dir(DEMO)
        self.progress_tokens = 0
        self.timeline: Timeline | None = None
        self.binding: Binding | None = Binding(lane=Lane.CPU, share=0.5)
        self.requests: list[Request] = []
        self.workload: Workload | None = None
        self.fault: Exception | None = None
        self.fault_after = 0
        self.lost = 0
        self.closed = False
        self.expert_stats = None
        self.kv_usage = 0.5
        self.learned_len: int | None = None

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def check(self, request: Request) -> None:
        if 20 < len(request.token_ids) < 400:
            raise InputError("longer than 20 tokens", code="context_length_exceeded")

    def run(
        self, requests: Iterable[Request], *, on_pass: Callable[[], None], until: Callable[[], bool]
    ) -> Iterator[Completion]:
        self.requests = list(requests)
        order = list(self.requests)
        random.Random(5).shuffle(order)
        for answered, request in enumerate(order[self.lost :]):
            if self.fault is not None and answered == self.fault_after:
                raise self.fault
            task = Task(kind=TaskKind.SAMPLE, lane=Lane.CPU)
            self.timeline = Timeline(spans=(Span(task=task, start_s=1.0, end_s=2.0),))
            self.progress_tokens += 2
            on_pass()
            yield Completion(
                index=request.index,
                text=f"answer {request.index}",
                token_ids=(1, 2),
                finish_reason="stop",
                prompt_tokens=len(request.token_ids),
            )
            if until():
                return

    @property
    def adaptations(self) -> tuple[Adaptation, ...]:
        """One change after the third pass, another one after the sixth."""
        fields = {"before": {"batch_size": 2}, "now": {"batch_size": 4}, "predicted_gain": 0.1}
        made = [Adaptation(after_pass=at, reason=f"r{at}", **fields) for at in (3, 6)]  # type: ignore[arg-type]
        return tuple(change for change in made if self.progress_tokens >= 2 * change.after_pass)

    @property
    def stats(self) -> RunStats:
        return RunStats(
            wall_s=2.0,
            load_s=1.0,
            prompt_tokens=5,
            completion_tokens=self.progress_tokens,
            passes=3,
            peak_rss_bytes=7,
            lanes={Lane.CPU: LaneStats(busy_s=1.5, bytes=0, tasks=4)},
        )


class Heard(Progress):
    def __init__(self) -> None:
        self.why = ""
        self.told: list[tuple[int, int]] = []
        self.bound: list[Binding | None] = []
        self.rows: list[ProgressFields] = []
        self.changes: list[str] = []

    def adapted(self, reason: str) -> None:
        self.changes.append(reason)

    def planned(self, reason: str) -> None:
        self.why = reason

    def tokens(self, done: int, expected: int, binding: Binding | None = None) -> None:
        self.told.append((done, expected))
        self.bound.append(binding)

    def row(self, shown: ProgressFields) -> None:
        self.rows.append(shown)


def prompts(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
