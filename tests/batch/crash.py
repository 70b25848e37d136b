"""Jobs that are killed again and again: in the end the output is that of an undisturbed run, row for row.

    python -m tests.batch.crash [--kills 60] [--seed 1] [--scratch DIR]

Each job (rows in order, in completion order with an error file, atomic, gzipped, with drafts, of rows that reason, call
tools and are generated again) is ended at random moments, started again with the same command, and compared when it is
done. How it is ended:

    time     SIGKILL at any moment, loading and finishing included
    fault    SIGKILL at a point of the journal's or the outputs' writing, between write and fsync too
    torn     half of a write reaches the file, then SIGKILL
    power    SIGKILL, and of what was never synchronised only a part is there: files cut anywhere beyond the last
             commit of the journal
    full     a file system without space (a small tmpfs where mounting is allowed, else the error alone)
    eio      a write or an fsync fails
    ctrl-c   SIGINT: exit code 130

A failure prints the seed of its episode and leaves the files where they are.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelight.batch.faults import POINTS
from moelight.batch.store import read_record
from tests.batch.calling import TEMPLATE, timeless, write_lines

ROWS, CALLS = 240, 70
TEMPLATE_FILE = "calls.jinja"
_MOST_KILLS_OF_A_JOB = 4
_FAULTS = {
    "fault": (POINTS, "kill"),
    "torn": (tuple(point for point in POINTS if point.startswith("mid_")), "kill"),
    "full": (("before_write", "mid_write", "before_journal_write"), "ENOSPC"),
    "eio": (("after_write", "before_fsync_rows", "mid_journal_write"), "EIO"),
}
_WAYS = ("time", "time", "fault", "fault", "torn", "power", "power", "full", "eio", "ctrl-c")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One way to ask for the job."""

    name: str
    options: tuple[str, ...]
    output: str = "out.jsonl"
    errors: str | None = None
    prompts: str = "prompts.jsonl"


SHAPES = (
    Shape(name="input", options=()),
    Shape(name="completion", options=("--order", "completion", "--error-file", "errors.jsonl"), errors="errors.jsonl"),
    Shape(name="atomic", options=("--atomic", "--error-file", "errors.jsonl"), errors="errors.jsonl"),
    Shape(name="gzip", options=("--order", "completion"), output="out.jsonl.gz"),
    Shape(name="drafts", options=("--speculate", "ngram")),
    Shape(name="draft-model", options=("--speculate", "model", "--draft-model", "demo")),
    Shape(name="calls", options=("--chat-template", TEMPLATE_FILE), prompts="calls.jsonl"),
)


def write_prompts(path: Path) -> None:
    """Rows of all lengths, some that cannot be served, some sampled."""
    draw = random.Random(3)
    with path.open("w") as file:
        for n in range(ROWS):
            line: dict[str, Any] = {
                "custom_id": f"row-{n}",
                "prompt": f"add {draw.randrange(999)} and {draw.randrange(99)} =",
            }
            line["max_tokens"] = draw.choice([1, 2, 8, 30])
            line["ignore_eos"] = True
            if n % 3 == 0:
                line.update(temperature=1.0, seed=n)
            if n % 17 == 5:
                line["max_tokens"] = -1
            if n % 40 == 7:
                line["n"] = 2
            file.write("{broken\n" if n % 29 == 11 else json.dumps(line) + "\n")


def command(prompts: Path, folder: Path, shape: Shape) -> list[str]:
    """The same every time."""
    options = [str(folder / option) if option.endswith(".jsonl") else option for option in shape.options]
    options = [str(prompts.with_name(option)) if option == TEMPLATE_FILE else option for option in options]
    return [
        *(sys.executable, "-m", "moelight.cli.main", "generate", str(prompts.with_name(shape.prompts))),
        *("-o", str(folder / shape.output)),
        *("--batch-size", "4", "--sync-interval", "0.05", "--no-show", *options),
    ]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, without the seconds at which they were made."""
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
    return [timeless(json.loads(line)) for line in lines]


def result_of(folder: Path, shape: Shape) -> list[list[dict[str, Any]]]:
    """What the job left, in a form that two runs have in common: the order of completion is anybody's."""
    files = [rows_of(folder / name) for name in (shape.output, shape.errors) if name is not None]
    if "completion" in shape.options:
        files = [sorted(rows, key=lambda row: json.dumps(row, sort_keys=True)) for rows in files]
    return files


class Machine:
    """Runs one job in one folder, and ends it in every way there is."""

    def __init__(self, prompts: Path, folder: Path, shape: Shape, seconds: float, draw: random.Random) -> None:
        self.prompts, self.folder, self.shape, self.seconds, self.draw = prompts, folder, shape, seconds, draw

    def run(self, *, fault: str | None = None, after_s: float | None = None, sends: int = signal.SIGKILL) -> int:
        """The exit code. ``sends`` comes after ``after_s``; ``fault`` is for the seam in `moelight.batch.faults`."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("MOELIGHT_FAULT", None)
        if fault is not None:
            environment["MOELIGHT_FAULT"] = fault
        errors = (self.folder.parent / f"{self.folder.name}.stderr").open("ab")
        with (
            errors,
            subprocess.Popen(
                command(self.prompts, self.folder, self.shape), env=environment, stdout=errors, stderr=errors
            ) as process,
        ):
            try:
                return process.wait(after_s)
            except subprocess.TimeoutExpired:
                process.send_signal(sends)
                return process.wait()

    def disturb(self, way: str) -> bool:
        """End the job in this way; False if it was done before that."""
        some_time_s = self.draw.uniform(0.2, self.seconds)
        count = self.draw.choice([1, 1, 2, 3, 5, 8])
        if way in _FAULTS:
            points, action = _FAULTS[way]
            code = self.run(fault=f"{self.draw.choice(points)}:{count}:{action}")
            return code == (-signal.SIGKILL if action == "kill" else 74)
        if way == "ctrl-c":
            return self.run(after_s=some_time_s, sends=signal.SIGINT) == 130
        killed = self.run(after_s=some_time_s) == -signal.SIGKILL
        if killed and way == "power":
            self.lose_what_was_not_synchronised()
        return killed

    def lose_what_was_not_synchronised(self) -> None:
        """Output files keep any part of what came after the last commit of the journal."""
        hidden = "--atomic" in self.shape.options
        named = {"output": self.shape.output, "errors": self.shape.errors}
        ends = {"output": 0, "errors": 0, **self.committed_ends()}
        for name, end in ends.items():
            path = self.folder / (f".{named[name]}.partial" if hidden else str(named[name]))
            if path.exists() and path.stat().st_size > end:
                os.truncate(path, self.draw.randrange(end, path.stat().st_size + 1))

    def committed_ends(self) -> dict[str, int]:
        """The lengths of the files in the journal, read from a copy: the next start finds SQLite's files as they are
        now, those of a commit that was cut off included."""
        with tempfile.TemporaryDirectory() as name:
            for path in self.folder.glob("*.journal*"):
                shutil.copy(path, name)
            journal = Path(name) / f"{self.shape.output}.journal"
            try:
                record = read_record(journal)
            except FileNotFoundError:
                record = None
        return {} if record is None else record.ends


def fill_a_small_disk(prompts: Path, scratch: Path, shape: Shape, expected: list[list[dict[str, Any]]]) -> bool:
    """The job on a tmpfs with room for a part of its rows, then with room for all. False where nobody may mount."""
    folder = scratch / f"small-{shape.name}"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        return False
    try:
        machine = Machine(prompts, folder, shape, 0.0, random.Random(0))
        if (code := machine.run()) != 74:
            raise SystemExit(f"a full disk ended with {code}, not 74")
        subprocess.run(["mount", "-o", "remount,size=4m", folder], check=True)
        if (code := machine.run()) != 1 or result_of(folder, shape) != expected:
            raise SystemExit(f"after a full disk: exit code {code}, or other rows ({shape.name})")
    finally:
        subprocess.run(["umount", folder], check=True)
    return True


def main() -> None:
    args = _arguments()
    scratch = Path(tempfile.mkdtemp(dir=args.scratch, prefix="crash-"))
    prompts = scratch / "prompts.jsonl"
    write_prompts(prompts)
    write_lines(scratch / "calls.jsonl", CALLS)
    (scratch / TEMPLATE_FILE).write_text(TEMPLATE)
    expected: dict[str, list[list[dict[str, Any]]]] = {}
    seconds = 0.0
    for shape in SHAPES:
        folder = scratch / f"whole-{shape.name}"
        folder.mkdir()
        began = time.monotonic()
        if (code := Machine(prompts, folder, shape, 0.0, random.Random(0)).run()) != 1:
            raise SystemExit(f"undisturbed, {shape.name} ended with {code}")
        seconds = max(seconds, time.monotonic() - began)
        expected[shape.name] = result_of(folder, shape)
    if expected["drafts"] != expected["input"]:
        raise SystemExit(f"other rows with drafts; see {scratch}")
    kills: Counter[str] = Counter()
    for shape in SHAPES[:3]:  # gzipped, all rows have room
        kills["tmpfs"] += fill_a_small_disk(prompts, scratch, shape, expected[shape.name])
    episode = 0
    while kills.total() < args.kills:
        shape = SHAPES[episode % len(SHAPES)]
        seed = args.seed * 1000 + episode
        folder = scratch / f"{seed}-{shape.name}"
        folder.mkdir()
        machine = Machine(prompts, folder, shape, seconds, random.Random(seed))
        for _ in range(_MOST_KILLS_OF_A_JOB):
            way = machine.draw.choice(_WAYS)
            kills[way] += machine.disturb(way)
        code = machine.run()
        if code not in (0, 1) or result_of(folder, shape) != expected[shape.name]:
            raise SystemExit(f"seed {seed} ({shape.name}): exit code {code}, or other rows; see {folder}")
        shutil.rmtree(folder)
        episode += 1
    shutil.rmtree(scratch)
    print(json.dumps({"jobs": episode, "kills": kills.total(), "by": dict(kills), "all rows equal": True}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scratch", type=Path, help="a directory on a disk")
    return parser.parse_args()


if __name__ == "__main__":
    main()
