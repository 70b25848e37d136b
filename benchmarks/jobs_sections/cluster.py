"""Jobs on a Ray cluster in this machine: what the driver bears, and what a cluster costs beside one engine.

driver      one engine that returns every row at once: rows a second through the driver and its journal, its memory, and
            the seconds from the start of a half-done job of as many rows to its first new row
throughput  5,000 mixed rows by one engine on all cores, and by two and three that share them, in turns: rows equal,
            tokens per second
simulator   engines whose passes sleep, one, two and three: measured efficiency beside the simulated one
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")

from runner.run import in_rounds

from jobs_sections.mixed_rows import write_mixed_rows
from moelight.batch.job import run_job
from moelight.batch.options import JobOptions
from moelight.batch.progress import JobCounts, Progress
from moelight.core.request import Completion, SamplingParams
from moelight.integrations.ray.cluster import ClusterOptions
from moelight.integrations.ray.job import answer_on
from moelight.integrations.ray.simulation import ClusterSimulation, SimulatedCluster
from moelight.integrations.ray.worker import (
    EngineFigures,
    EnginePlan,
    EngineReport,
    EngineWorker,
    Entry,
    RowResult,
    pack_results,
)

PARTS = ("driver", "throughput", "simulator")
ANSWER = b'{"text": "echo", "finish_reason": "stop", "usage": {"prompt_tokens": 4, "completion_tokens": 1}}\n'


class ReturningWorker(EngineWorker):
    """Returns every row at once, with the same answer."""

    def load(self) -> EnginePlan:
        return EnginePlan(
            node="here",
            pid=os.getpid(),
            summary="it returns what it is given",
            batch_rows=8192,
            tokens_per_s=1e6,
            binding="cpu",
            device="cpu",
            kv_dtype="auto",
        )

    def exchange(self, rows: Sequence[Entry], wait_s: float) -> EngineReport:
        totals = {"prompt_tokens": 4, "completion_tokens": 1, "room": 1}
        figures = [("stop", 0, 4, 1, 0, 1, 0.0)]
        result = [RowResult(row[0], ANSWER, False, totals, None, figures) for row in rows]  # type: ignore[arg-type]
        if not result:
            time.sleep(min(wait_s, 0.01))
        return EngineReport(
            results=pack_results(result), count=len(result), queued=0, running=0, figures=EngineFigures()
        )

    def end(self, timeout_s: float) -> tuple[EngineReport, bytes]:  # noqa: ARG002
        return self.exchange(pack_results(()), 0.0), b""


def rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class Watch(Progress):
    """Memory of the driver by the rows that are done, and an end at ``stop_at`` rows."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.memory: list[tuple[int, int]] = []
        self.first_s = self.first_row_s = 0.0
        self._stop_at = stop_at

    def planned(self, reason: str) -> None:  # noqa: ARG002
        self.first_s = time.monotonic()
        self.memory.append((0, rss_bytes()))

    def completion(self, completion: Completion, *, room: int, latency_s: float | None = None) -> None:  # noqa: ARG002
        self.first_row_s = self.first_row_s or time.monotonic()

    def counts(self, counts: JobCounts) -> None:
        self.memory.append((counts.done, rss_bytes()))
        if self._stop_at is not None and counts.done >= self._stop_at:
            self._stop_at = None
            os.kill(os.getpid(), signal.SIGTERM)


def driver(scratch: Path, count: int) -> dict[str, Any]:
    prompts = scratch / "many.jsonl"
    with prompts.open("w") as file:
        file.writelines(
            f'{{"custom_id": "row-{n}", "prompt": "add {n % 97} =", "max_tokens": 1}}\n' for n in range(count)
        )
    options = JobOptions(prompts=prompts, output=scratch / "many.out.jsonl", sampling=SamplingParams(max_tokens=1))
    answer = answer_on(ClusterOptions(address="local", engines=1), worker=ReturningWorker)
    first, began_s = Watch(stop_at=count // 2), time.monotonic()
    half = run_job(options, answer=answer, progress=first)
    scan_s = first.first_s - began_s
    assert half.stats is not None
    assert half.state == "interrupted"
    half_s = half.stats.wall_s
    second, again_s = Watch(), time.monotonic()
    full = run_job(options, answer=answer, progress=second)
    assert full.state == "done"
    assert full.completed == count
    assert sum(1 for _ in options.output.open("rb")) == count  # type: ignore[union-attr]
    assert full.stats is not None
    rows_per_s = [half.completed / half_s, (count - half.completed) / full.stats.wall_s]
    memory = [bytes_ for done, bytes_ in first.memory + second.memory if done]
    return {
        "rows": count,
        "rows_per_s": round(min(rows_per_s)),
        "rows_per_s_of_both_halves": [round(item) for item in rows_per_s],
        "start_and_scan_s": round(scan_s, 1),
        "resume_s": round(second.first_row_s - again_s, 1),
        "resume_s_to_the_engine": round(second.first_s - again_s, 1),
        "memory_MiB": {"first": memory[0] >> 20, "most": max(memory) >> 20},
    }


def throughput(scratch: Path, count: int, *, model: str, rounds: int, engines: Sequence[int]) -> dict[str, Any]:
    prompts = scratch / "mixed.jsonl"
    write_mixed_rows(prompts, count, max_tokens=(1, 8, 30, 60))

    def once(engines: int) -> tuple[float, bytes]:
        output = scratch / f"mixed.{engines}.jsonl"
        for path in scratch.glob(f"mixed.{engines}.*"):
            path.unlink()
        options = JobOptions(
            prompts=prompts,
            output=output,
            model=model,
            batch_size=64,
            sampling=SamplingParams(max_tokens=16, seed=0),
        )
        answer = answer_on(ClusterOptions(address="local", engines=engines)) if engines else None
        result = run_job(options, answer=answer)
        assert result.stats is not None
        assert result.state == "done"
        return result.stats.tokens_per_s, output.read_bytes()

    speeds: dict[int, list[float]] = {item: [] for item in (0, *engines)}
    rows: dict[int, bytes] = {}
    for _, order in in_rounds(speeds, rounds):
        for item in order:
            speed, rows[item] = once(item)
            speeds[item].append(speed)
    alone = statistics.median(speeds[0])
    return {
        "rows": count,
        "model": Path(model).name,
        "equal": all(rows[engine] == rows[0] for engine in engines),
        "tokens_per_s_alone": [round(speed) for speed in speeds[0]],
        **{
            f"{engine}_engines": {
                "tokens_per_s": [round(speed) for speed in speeds[engine]],
                "share_of_alone": round(statistics.median(speeds[engine]) / alone, 3),
            }
            for engine in engines
        },
    }


class SleepingWorker(EngineWorker):
    """Answers as an engine whose passes take a twentieth of a second whatever is in them, and rows ten passes: engines
    have a rate of their own, whatever cores there are. All begin at ``begin_s`` of the machine's clock."""

    BATCH, PASS_S, PASSES = 32, 0.05, 10
    begin_s = 0.0

    def load(self) -> EnginePlan:
        import threading

        time.sleep(max(0.0, self.begin_s - time.monotonic()))

        self._done: list[int] = []
        self._running: dict[int, int] = {}
        self._ending = False
        threading.Thread(target=self._passes, daemon=True).start()
        return EnginePlan(
            node="here",
            pid=os.getpid(),
            summary="it sleeps",
            batch_rows=self.BATCH,
            tokens_per_s=self.BATCH * 10 / (self.PASS_S * self.PASSES),
            binding="cpu",
            device="cpu",
            kv_dtype="auto",
        )

    def _passes(self) -> None:
        draw = random.Random(os.getpid())
        next_s = time.monotonic()
        while not self._ending:
            while len(self._running) < self.BATCH and (entry := self._queue.next(block=False)) is not None:
                length = 0.5 + 0.5 * draw.expovariate(1.0)
                self._running[entry[0]] = max(1, round(self.PASSES * length))
            next_s = max(next_s + self.PASS_S, time.monotonic())
            time.sleep(max(0.0, next_s - time.monotonic()))
            for number in list(self._running):
                self._running[number] -= 1
                if not self._running[number]:
                    del self._running[number]
                    totals = {"prompt_tokens": 0, "completion_tokens": 10, "room": 10}
                    self._queue.put(RowResult(number, ANSWER, False, totals))
            self._queue.flush()

    def exchange(self, rows: Sequence[Entry], wait_s: float) -> EngineReport:
        self._queue.add(rows)
        result = self._queue.results(wait_s, over=lambda: False)
        return EngineReport(
            results=pack_results(result),
            count=len(result),
            queued=len(self._queue),
            running=len(self._running),
            figures=EngineFigures(),
        )

    def end(self, timeout_s: float) -> tuple[EngineReport, bytes]:  # noqa: ARG002
        self._ending = True
        return self.exchange(pack_results(()), 0.0), b""


def simulator(scratch: Path, count: int = 2000) -> dict[str, Any]:
    prompts = scratch / "sleep.txt"
    prompts.write_text("word\n" * count)
    kind, outcome = SleepingWorker, {}
    for engines in (1, 2, 3):
        output = scratch / f"sleep.{engines}.jsonl"
        options = JobOptions(prompts=prompts, output=output, sampling=SamplingParams(max_tokens=10, seed=0))
        answer = answer_on(ClusterOptions(address="local", engines=engines), worker=kind)
        kind.begin_s = time.monotonic() + 12.0  # all engines are there by then
        result = run_job(options, answer=answer)
        assert result.state == "done"
        assert result.stats is not None
        ideal_s = count * kind.PASSES * kind.PASS_S / kind.BATCH / engines
        simulated = ClusterSimulation(
            SimulatedCluster(
                nodes=engines,
                rows=count,
                batch_rows=kind.BATCH,
                row_s=kind.PASSES * kind.PASS_S,
                row_tokens=10.0,
                jitter=0.0,
            )
        ).run()
        measured = ideal_s / result.stats.wall_s
        outcome[engines] = {
            "measured": round(measured, 4),
            "simulated": round(simulated.efficiency, 4),
            "off_by": round(simulated.efficiency / measured - 1, 4),
        }
    return {f"{engines}_engines": item for engines, item in outcome.items()}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All three. Workers are sent by value: their processes need not find this module."""
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    scratch, result = args.temporary, {}
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "driver": lambda: driver(scratch, args.driver_rows),
        "throughput": lambda: throughput(
            scratch, args.mixed_rows, model=args.model, rounds=args.rounds, engines=args.engines
        ),
        "simulator": lambda: simulator(scratch),
    }
    for name in args.cluster:
        result[name] = sections[name]()
        print(f"{name}: {result[name]}", flush=True)
    return result
