"""A job of many short prompts: memory, what the journal costs, and how soon a killed one goes on.

memory    resident bytes of `moelight generate` while rows 20 % to 100 % are answered: flat if the ratio is 1
journal   the same job in this process: seconds inside the journal over all seconds, and all of it beside the same
          rows written to no file
roof      the engine alone on the same token ids: no files, no rows, no text in
resume    killed at 90 %, started again: seconds from the start of the process to the first new row in the output
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from moelight.batch import job
from moelight.batch.journal import Journal
from moelight.batch.options import JobOptions
from moelight.core.request import Request, SamplingParams
from moelight.engine.model import LazyModel
from moelight.engine.tokenizer import Tokenizer
from moelight.profiles.workload import Workload
from moelight.weights.source import resolve_model

_LOOK_EVERY_S = 0.05


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All four on the same rows."""
    prompts = args.temporary / "prompts.jsonl"
    write_prompts(prompts, args.rows, args.max_tokens)
    result: dict[str, Any] = {
        "rows": args.rows,
        "max_tokens": args.max_tokens,
        "memory": memory(prompts, args.temporary / "memory.jsonl", args),
        "journal": journal(prompts, args.temporary, args),
        "roof": roof(prompts, args),
        "resume": resume(prompts, args.temporary / "resume.jsonl", args),
    }
    result["roof_share"] = round(result["roof"]["seconds"] / result["journal"]["seconds"], 3)
    for name in ("memory", "journal", "roof", "resume"):
        print(f"{name:8}", "  ".join(f"{key} {value}" for key, value in result[name].items()))
    return result


def write_prompts(path: Path, rows: int, max_tokens: int) -> None:
    """OpenAI batch lines, as people bring them."""
    draw = random.Random(7)
    with path.open("w") as file:
        for n in range(rows):
            body = {
                "model": "demo",
                "prompt": f"add {draw.randrange(1000)} and {draw.randrange(1000)} =",
                "max_tokens": max_tokens,
            }
            line = {"custom_id": f"row-{n}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def memory(prompts: Path, out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Resident bytes over the rows that are done."""
    began = time.monotonic()
    seen: list[tuple[int, int]] = []
    with _generate(prompts, out, args) as process:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            with _Gone():
                seen.append((_size(out), watched.memory_info().rss))
            time.sleep(_LOOK_EVERY_S)
    seconds, total = time.monotonic() - began, _size(out)
    steady = [rss for size, rss in seen if 0.2 * total <= size and rss]
    return {
        "seconds": round(seconds, 2),
        "rows_per_s": round(args.rows / seconds),
        "rss_at_20_percent_mib": round(steady[0] / 2**20, 1),
        "rss_at_end_mib": round(steady[-1] / 2**20, 1),
        "ratio": round(steady[-1] / steady[0], 3),
    }


def journal(prompts: Path, scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds inside the journal, while a job runs here."""
    spent = 0.0
    original = {name: getattr(Journal, name) for name in ("put", "tick", "commit", "finish")}

    def timed(name: str) -> Any:
        def call(*inputs: Any, **named: Any) -> Any:
            nonlocal spent
            before = time.perf_counter()
            try:
                return original[name](*inputs, **named)
            finally:
                spent += time.perf_counter() - before

        return call

    def seconds(out: Path | None) -> float:
        before = time.perf_counter()
        job.run_job(JobOptions(prompts=prompts, model=args.model, output=out, ignore_model=True))
        return time.perf_counter() - before

    seconds(None)  # to load what is loaded once
    without = seconds(None)
    for name in original:
        setattr(Journal, name, timed(name))
    try:
        retained = seconds(scratch / "journal.jsonl")
    finally:
        for name, method in original.items():
            setattr(Journal, name, method)
    return {
        "seconds": round(retained, 2),
        "inside": round(spent, 3),
        "share": round(spent / retained, 4),
        "beside_no_file": round(retained / without, 3),
    }


def roof(prompts: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The engine on token ids that are there already."""
    tokenizer = Tokenizer.from_dir(resolve_model(args.model))
    with prompts.open() as file:
        ids = [tuple(tokenizer.encode(json.loads(line)["body"]["prompt"])) for line in file]
    lengths = [len(item) for item in ids]
    workload = Workload(
        num_requests=len(ids),
        prompt_len=-(-sum(lengths) // len(ids)),
        max_prompt_len=max(lengths),
        gen_len=args.max_tokens,
    )
    options = JobOptions(prompts=prompts, model=args.model)
    sampling = SamplingParams(max_tokens=args.max_tokens, seed=0)
    with LazyModel(options.model).plan(options, workload).load() as engine:
        before = time.perf_counter()
        requests = (Request(index=n, token_ids=item, sampling=sampling) for n, item in enumerate(ids))
        tokens = sum(completion.completion_tokens for completion in engine.run(requests))
        seconds = time.perf_counter() - before
    return {"seconds": round(seconds, 2), "tokens_per_s": round(tokens / seconds)}


def resume(prompts: Path, out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Kill at 90 % of the bytes that the undisturbed run wrote, and start again."""
    full = _size(out.with_name("memory.jsonl"))
    with _generate(prompts, out, args) as process:
        while process.poll() is None and _size(out) < 0.9 * full:
            time.sleep(_LOOK_EVERY_S)
        process.send_signal(signal.SIGKILL)
    retained = _size(out)
    began = time.monotonic()
    first = None
    lowest = retained
    with _generate(prompts, out, args) as process:
        while process.poll() is None:
            size = _size(out)
            lowest = min(lowest, size)  # rows after the last commit are cut off first
            if first is None and size > lowest:
                first = time.monotonic() - began
            time.sleep(0.01)
    with out.open() as file:
        rows = sum(1 for _ in file)
    return {"killed_at": round(retained / full, 3), "first_new_row_s": round(first or -1.0, 2), "rows": rows}


def _generate(prompts: Path, out: Path, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "moelight.cli.main", "generate", str(prompts), "-o", str(out), "-m", args.model]
    return subprocess.Popen([*command, "--ignore-model"], env=os.environ, stderr=subprocess.DEVNULL)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class _Gone:
    """The process may end while it is looked at."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: object) -> bool:
        return kind is psutil.NoSuchProcess
