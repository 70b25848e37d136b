"""Hours of jobs beside a second tenant: resident memory stays flat, and no row is lost or doubled.

steady    one `moelight generate` all the time, on a checkpoint of which half is read from the disk, by an expert policy
          whose rules switch it again and again; of its rows one in 25 has a long prompt and one in 9 is bad. SIGINT
          ends it: its rows have to be the first ones of its input, and bad rows alone are errors. Its resident memory
          in the last sixth of the time is held against that in the second sixth
disturbed meanwhile short jobs, which SIGKILL, SIGINT and full disks end at random moments, and which go on with another
          schedule, batch size, limit of memory, expert policy or drafts; in the end their rows have to equal those of
          an undisturbed job
tenant    takes and returns memory, and writes, reads and deletes files

What went wrong is listed under ``failures``, and is the exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from make_checkpoint import make_checkpoint, scaled_config

from moelight.core.units import GiB, MiB

LARGEST_GROWTH = 0.02  # of resident memory, from the second sixth to the last
ROWS = 80  # of a disturbed job
MODEL = {"layers": 10, "hidden": 256, "intermediate": 128, "experts": 64, "top_k": 4}
HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 1024}
CONTEXT = 1024
HALF = "176MiB"
_POLICY = """
policy restless {
  cache { capacity = 64  eviction = lru }
  prefetch { strategy = next_router  budget = 4 }
  adapt {
    when hit_rate < 0.97 for 200 accesses { eviction = lfu }
    when hit_rate < 0.98 for 300 accesses { capacity = 40 }
    when hit_rate < 0.98 for 500 accesses { prefetch_strategy = previous }
    when hit_rate < 0.97 for 700 accesses { eviction = reuse }
    when hit_rate < 0.98 for 900 accesses { capacity = 64 }
    when hit_rate < 0.98 for 1100 accesses { prefetch_strategy = next_router }
    when hit_rate < 0.97 for 1300 accesses { eviction = lru }
  }
}
"""
# None of these changes a row, so any of them may follow any other.
_SETTINGS: tuple[tuple[str, ...], ...] = (
    (),
    ("--schedule", "cgopipe", "--batch-size", "16"),
    ("--schedule", "module", "--batch-size", "32", "--micro-batch-size", "8"),
    ("--schedule", "serial", "--batch-size", "3"),
    ("--host-memory", HALF),
    ("--host-memory", HALF, "--batch-size", "4", "--expert-policy", "restless.moe"),
    ("--speculate", "ngram"),
    ("--no-adapt",),
)
_ORDERS: tuple[tuple[str, ...], ...] = ((), ("--order", "completion", "--error-file", "errors.jsonl"))
_WAYS = ("kill", "kill", "kill", "ctrl-c", "full")
_MOST_DISTURBANCES = 3
_SMALL_DISK = 16 * MiB
_WORDS = ("the", "a", "of", "to", "and", "in", "is", "it", "that", "was", "for", "on", "are", "as", "with", "his")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """``args.hours`` hours, and the undisturbed job before them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts this behind has jobs ignore it
    scratch = args.temporary
    model = scratch / "model"
    config = {**scaled_config("qwen3_moe", **MODEL, **HEADS), "max_position_embeddings": CONTEXT}
    make_checkpoint(model, config, dtype="float32")
    (scratch / "restless.moe").write_text(_POLICY)
    jobs = _Disturbed(scratch, model, random.Random(1))
    rows_per_s = jobs.run_reference()
    seconds = 3600.0 * args.hours
    write_rows(scratch / "steady.jsonl", int(1.3 * rows_per_s * seconds) + ROWS, seed=2)
    deadline, over, tenant = time.monotonic() + seconds, threading.Event(), _Tenant(scratch / "tenant")
    beside = [threading.Thread(target=work, args=(over,)) for work in (jobs.run, tenant.run)]
    for thread in beside:
        thread.start()
    try:
        steady, failures = _run_steady(scratch, model, deadline)
    finally:
        over.set()
        for thread in beside:
            thread.join()
    result = {
        "hours": args.hours,
        "steady": steady,
        "disturbed": jobs.counts(),
        "tenant": tenant.counts(),
        "failures": failures + jobs.failures + tenant.failures,
    }
    for name, figures in result.items():
        print(f"{name:10}", figures if not isinstance(figures, dict) else _told(figures))
    return result


def _told(figures: dict[str, Any]) -> str:
    return "  ".join(f"{key} {value}" for key, value in figures.items() if not isinstance(value, list))


def write_rows(path: Path, count: int, *, seed: int) -> None:
    """``count`` rows: short and long prompts, greedy and sampled, some with two answers, and those of `fault_of`."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for n in range(count):
            fault = fault_of(n)
            words = draw.randrange(100, 250) if n % 25 == 12 else draw.randrange(1, 30)
            row: dict[str, Any] = {
                "custom_id": f"row-{n}",
                "prompt": " ".join(draw.choices(_WORDS, k=words if fault != "too long" else 2 * CONTEXT)),
                "max_tokens": draw.choice((1, 4, 12, 24)) if fault != "max_tokens" else -1,
                "ignore_eos": True,
            }
            if n % 3 == 0:
                row.update(temperature=1.0, seed=n)
            if n % 40 == 7:
                row["n"] = 2
            if fault == "unknown field":
                row["promt"] = ""
            file.write("{broken\n" if fault == "broken" else json.dumps(row) + "\n")


def fault_of(n: int) -> str | None:
    """Why row ``n``, counted from 0, is an error row; None if it is served."""
    faults = {29: "broken", 31: "unknown field", 37: "max_tokens", 101: "too long"}
    return next((fault for every, fault in faults.items() if n % every == every // 2), None)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of an output file, of a line that is cut off none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def check_first_rows(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with ``rows``, which should be the first rows of the input, in its order."""
    seen = Counter(_number(row) for row in rows)
    failures = [f"steady: row {n} {count} times" for n, count in seen.items() if count > 1]
    failures += [f"steady: row {n} is lost" for n in range(len(rows)) if n not in seen]
    if not failures and [_number(row) for row in rows] != list(range(len(rows))):
        failures.append("steady: rows are not in the order of the input")
    wrong = [n for n, row in zip(map(_number, rows), rows, strict=True) if ("error" in row) != bool(fault_of(n))]
    return (failures + [f"steady: row {n}: an error or none, the other was due" for n in wrong])[:20]


def _number(row: dict[str, Any]) -> int:
    name = row.get("custom_id")
    return int(row["line"]) - 1 if name is None else int(name.removeprefix("row-"))


def _run_steady(scratch: Path, model: Path, deadline: float) -> tuple[dict[str, Any], list[str]]:
    options = ("--host-memory", HALF, "--batch-size", "8", "--expert-policy", "restless.moe")
    figures = ("--stats", "steady.stats.json", "--expert-stats", "steady.experts.json")
    began, seen = time.monotonic(), []
    with _generate(scratch, model, "steady.jsonl", scratch / "steady.out.jsonl", (*options, *figures)) as process:
        watched = psutil.Process(process.pid)
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(psutil.NoSuchProcess):
                seen.append((time.monotonic() - began, watched.memory_info().rss))
            time.sleep(0.5)
        seconds = time.monotonic() - began
        process.send_signal(signal.SIGINT)
        code = process.wait()
    rows = read_rows(scratch / "steady.out.jsonl")
    failures = [*check_first_rows(rows), *(["steady: no row"] if not rows else [])]
    if code not in (0, 1, 130):
        failures.append(f"steady: exit code {code}: {(scratch / 'steady.out.jsonl.stderr').read_text()[-500:]}")
    sixths = [[rss for at, rss in seen if seconds * k / 6 <= at < seconds * (k + 1) / 6] or [0] for k in range(6)]
    settled, last = statistics.median(sixths[1]), statistics.median(sixths[5])
    growth = last / settled - 1.0 if settled else 1.0
    if growth > LARGEST_GROWTH:
        failures.append(f"steady: resident memory grew by {growth:.1%}")
    experts, lanes = _json(scratch / "steady.experts.json"), _json(scratch / "steady.stats.json").get("lanes")
    return {
        "seconds": round(seconds),
        "rows": len(rows),
        "error_rows": sum("error" in row for row in rows),
        "exit_code": code,
        "policy_changes": experts.get("adaptations", {}).get("changes"),
        "disk_gib": round(lanes["disk"]["bytes"] / GiB, 1) if lanes else None,
        "growth": round(growth, 4),
        "largest_mib": round(max(rss for _, rss in seen) / MiB, 1),
        "sixths_mib": [round(statistics.median(part) / MiB, 1) for part in sixths],
    }, failures


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _generate(scratch: Path, model: Path, rows: str, output: Path, options: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "moelight.cli.main", "generate", rows, "-o", str(output), "-m", str(model)]
    with output.with_name(f"{output.name}.stderr").open("wb") as errors:
        return subprocess.Popen([*command, "--no-show", *options], cwd=scratch, stdout=errors, stderr=errors)


class _Disturbed:
    """Short jobs, one after the other, on a disk so small that it can be filled where one can be mounted."""

    def __init__(self, scratch: Path, model: Path, draw: random.Random) -> None:
        self.failures: list[str] = []
        self._scratch, self._model, self._draw = scratch, model, draw
        self._jobs, self._ends, self._limited = 0, Counter[str](), False
        self._expected: list[dict[str, Any]] = []
        self._latest_s = 0.0

    def run_reference(self) -> float:
        """The undisturbed job; returns its rows a second."""
        write_rows(self._scratch / "rows.jsonl", ROWS, seed=1)
        output, began = self._scratch / "reference.jsonl", time.monotonic()
        with _generate(self._scratch, self._model, "rows.jsonl", output, ()) as process:
            code = process.wait()
        self._latest_s = 1.2 * (time.monotonic() - began)
        self._expected = read_rows(output)
        if code != 1 or len(self._expected) != ROWS:
            raise SystemExit(f"the undisturbed job: exit code {code}: {output.with_name('reference.jsonl.stderr')}")
        return ROWS / (time.monotonic() - began)

    def run(self, over: threading.Event) -> None:
        """Jobs until ``over`` is set; the last one is finished."""
        with _small_disk(self._scratch / "small") as (folder, self._limited):
            ways = _WAYS if self._limited else tuple(way for way in _WAYS if way != "full")
            while not over.is_set() and not self.failures:
                self._run_job(folder, ways, over)

    def counts(self) -> dict[str, Any]:
        return {"jobs": self._jobs, "rows_of_a_job": ROWS, "small_disk": self._limited, **self._ends}

    def _run_job(self, folder: Path, ways: Sequence[str], over: threading.Event) -> None:
        order = self._draw.choice(_ORDERS)
        for _ in range(self._draw.randrange(_MOST_DISTURBANCES + 1)):
            if not over.is_set():
                self._end(self._draw.choice(ways), folder, order)
        code = self._start(folder, order).wait()
        rows = read_rows(folder / "out.jsonl") + read_rows(folder / "errors.jsonl")
        if order:
            rows.sort(key=_number)
        if code not in (0, 1) or _without_lines(rows) != _without_lines(self._expected):
            shutil.copytree(folder, self._scratch / "failed")
            self.failures.append(f"disturbed job {self._jobs}: exit code {code}, {len(rows)} rows, or other rows")
        self._jobs += 1
        for path in folder.iterdir():
            path.unlink()

    def _end(self, way: str, folder: Path, order: Sequence[str]) -> None:
        filler = folder / "filler"
        if way == "full":
            free = shutil.disk_usage(folder).free
            filler.write_bytes(bytes(max(0, free - self._draw.randrange(4096, 32768))))
        process = self._start(folder, order)
        try:
            code = process.wait(None if way == "full" else self._draw.uniform(0.2, self._latest_s))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL if way == "kill" else signal.SIGINT)
            code = process.wait()
        filler.unlink(missing_ok=True)
        expected = {"kill": -signal.SIGKILL, "ctrl-c": 130, "full": 74}[way]
        if code == expected:
            self._ends[way] += 1
        elif code in (0, 1):
            self._ends["done_before"] += 1
        elif code == -signal.SIGINT:
            self._ends["before_it_began"] += 1
        else:
            self.failures.append(f"disturbed job {self._jobs}: {way} ended with {code}")

    def _start(self, folder: Path, order: Sequence[str]) -> subprocess.Popen[bytes]:
        options = [str(folder / option) if option == "errors.jsonl" else option for option in order]
        settings = self._draw.choice(_SETTINGS)
        return _generate(
            self._scratch,
            self._model,
            "rows.jsonl",
            folder / "out.jsonl",
            ("--sync-interval", "0.2", *options, *settings),
        )


def _without_lines(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """In completion order rows have their line, too."""
    return [{key: value for key, value in row.items() if key != "line"} for row in rows]


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[tuple[Path, bool]]:
    """A file system of `_SMALL_DISK` bytes; a directory and False where none can be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_SMALL_DISK}", "none", folder]
    limited = os.geteuid() == 0 and subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        yield folder, limited
    finally:
        if limited:
            subprocess.run(["umount", folder], check=True)


class _Tenant:
    """Takes up to a quarter of the memory that is available, and up to 512 MiB of the disk, for seconds at a time."""

    def __init__(self, folder: Path) -> None:
        self.failures: list[str] = []
        self._folder = folder
        self._turns, self._memory, self._disk = 0, 0, 0

    def run(self, over: threading.Event) -> None:
        """Turns until ``over`` is set."""
        self._folder.mkdir()
        draw, file = random.Random(3), self._folder / "file"
        while not over.is_set():
            size = int(draw.uniform(0.05, 0.25) * min(psutil.virtual_memory().available, 16 * GiB))
            taken = np.ones(size, dtype=np.uint8)
            length = draw.randrange(16 * MiB, 512 * MiB, MiB)
            with file.open("wb", buffering=0) as written:
                for begin in range(0, length, 4 * MiB):
                    written.write(taken[: min(4 * MiB, length - begin)].data)
                os.fsync(written)
            if sum(len(part) for part in _parts(file)) != length:
                self.failures.append("tenant: its file is another length")
            over.wait(draw.uniform(0.0, 5.0))
            del taken
            file.unlink()
            self._turns, self._memory, self._disk = self._turns + 1, self._memory + size, self._disk + length
            over.wait(draw.uniform(0.0, 5.0))

    def counts(self) -> dict[str, Any]:
        return {
            "turns": self._turns,
            "memory_gib": round(self._memory / GiB, 1),
            "disk_gib": round(self._disk / GiB, 1),
        }


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while part := file.read(4 * MiB):
            yield part
