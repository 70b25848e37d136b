"""Jobs on a Ray cluster whose parts are killed again and again: in the end the rows are those of one engine.

    python tests/integrations/ray/crash.py [--kills 40] [--jobs 10] [--first 0] [--seed 1] [--out FILE.json]

A cluster of two nodes of one core each in this machine, and the command line as users run it. What is killed, at random
moments, with SIGKILL:

    actor    an engine's process; at most two of a job: a row that was in three becomes an error row
    raylet   a node, which another one replaces
    driver   the command, which is given again
    head     the whole cluster; it is started again, and the command given again once it has ended

In the second half of the jobs, a row kills every engine that begins it, and no other engine is killed by itself: that
row becomes an error row with the third death, and no other one does.

A failure prints the seed of its job and leaves the files where they are. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from moelight.batch.store import read_record

ROWS, POISON = 300, 150
KINDS = ("actor", "raylet", "driver", "head")
MOST_DEATHS = 3
_ROOT = Path(__file__).resolve().parents[3]
_START_S, _MOST_S, _LONGEST_S = 180.0, 8.0, 1800.0  # of a node; until a kill; of a job
_ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "MOELIGHT_FAULT"},
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
}


class Nodes:
    """The cluster: two processes, with all that Ray starts below them. Engines have the fault ``fault``."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))  # a short path, as sockets need
        with socket.socket() as free:
            free.bind(("", 0))
            self._port = str(free.getsockname()[1])
        self.address = ""
        self.fault: str | None = None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start what is not there, or has ended by itself."""
        while missing := [role for role in ("head", "worker") if not self._is_up(role)]:
            self.stop(*(("worker", "head") if missing[0] == "head" else missing))
            for role in ("head", "worker"):
                if role not in self._processes and not self._started(role):
                    break

    def stop(self, *roles: str) -> None:
        """SIGKILL to a node, then to its workers, as far as they are still there."""
        for role in roles or ("worker", "head"):
            if (process := self._processes.pop(role, None)) is not None:
                kill_tree(process)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def engines(self) -> list[psutil.Process]:
        """The processes that Ray has named after the class of the actors."""
        result = []
        for process in self._processes.values():
            with contextlib.suppress(psutil.Error):
                for item in psutil.Process(process.pid).children(recursive=True):
                    if item.cmdline()[:1] and item.cmdline()[0].startswith("ray::EngineWorker"):
                        result.append(item)
        return result

    def _is_up(self, role: str) -> bool:
        return role in self._processes and self._processes[role].poll() is None

    def _started(self, role: str) -> bool:
        where = (self._port, str(self._folder)) if role == "head" else (self.address,)
        command = [sys.executable, "-m", "tests.integrations.ray.node", role, *where]
        environment = {**_ENVIRONMENT, **({"MOELIGHT_FAULT": self.fault} if self.fault else {})}
        told = self._scratch / f"{role}.address"
        with (self._scratch / "nodes.log").open("ab") as log, told.open("wb") as output:
            process = subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=output, stderr=log)
        self._processes[role] = process
        end_s = time.monotonic() + _START_S
        while not (address := told.read_text().strip()):
            if process.poll() is not None or time.monotonic() > end_s:
                self.stop(role)
                return False
            time.sleep(0.2)
        self.address = address
        return True


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and all below it, from above."""
    with contextlib.suppress(psutil.NoSuchProcess):
        result = psutil.Process(process.pid)
        for item in [result, *result.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                item.kill()
    process.wait()


def write_prompts(path: Path) -> None:
    draw = random.Random(3)
    with path.open("w") as file:
        for n in range(ROWS):
            row = {"custom_id": f"row-{n}", "prompt": f"add {draw.randrange(999)} =", "ignore_eos": True}
            row["max_tokens"] = draw.choice([20, 40, 80]) if n % 17 != 5 else -1
            if n % 3 == 0:
                row.update(temperature=1.0, seed=n)
            file.write("{broken\n" if n % 29 == 11 else json.dumps(row) + "\n")


def command(prompts: Path, output: Path, *options: str) -> list[str]:
    inputs = [sys.executable, "-m", "moelight.cli.main", "generate", str(prompts), "-o", str(output), "--no-show"]
    return [*inputs, "--batch-size", "2", "--sync-interval", "0.2", *options]


class Job:
    """One job, which is ended in every way there is until it is done."""

    def __init__(self, nodes: Nodes, prompts: Path, output: Path, draw: random.Random) -> None:
        self._nodes, self._draw, self._output = nodes, draw, output
        self._command = command(prompts, output, "--ray", nodes.address)
        self.log = output.with_suffix(".stderr")
        self._driver = self._start()
        self.starts = 1

    def run(self, kinds: list[str]) -> Counter[str]:
        """Kill ``kinds``, one after another, and return what was killed before the job was done."""
        kills, end_s = Counter[str](), time.monotonic() + _LONGEST_S
        left = list(kinds)
        while not self._done():
            if time.monotonic() > end_s:
                raise SystemExit(f"the job does not end; see {self.log}")
            self._nodes.start()
            if self._driver.poll() is not None:
                self._driver = self._start()
                self.starts += 1
            if left and self._wait(end_s):
                kills[left[0]] += self._kill(left[0])
                left = left[1:]
            time.sleep(0.2)
        return kills

    def deaths(self) -> int:
        """Engines that the driver saw die by themselves."""
        return self.log.read_text().count("is lost")

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**_ENVIRONMENT, "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}  # of a head that is lost
        with self.log.open("ab") as log:
            return subprocess.Popen(self._command, env=environment, stdout=log, stderr=log)

    def _done(self) -> bool:
        if self._driver.poll() is None or not self._output.exists():
            return False
        record = read_record(self._output.with_name(f"{self._output.name}.journal"))
        return record is not None and record.stage == "complete"

    def _wait(self, end_s: float) -> bool:
        """Until some moment, mostly one while engines are there; False if the driver ended before."""
        while_answering = self._draw.random() < 0.75
        until_s = time.monotonic() + self._draw.uniform(0.0, _MOST_S)
        while time.monotonic() < end_s and self._driver.poll() is None:
            if while_answering and self._nodes.engines():
                while_answering = False
                until_s = time.monotonic() + self._draw.uniform(0.0, _MOST_S)
            if not while_answering and time.monotonic() >= until_s:
                return True
            time.sleep(0.1)
        return False

    def _kill(self, kind: str) -> bool:
        if kind == "actor":
            result = self._nodes.engines()
            with contextlib.suppress(psutil.NoSuchProcess):
                if result:
                    self._draw.choice(result).send_signal(signal.SIGKILL)
            return bool(result)
        if kind == "driver":
            self._driver.kill()
            self._driver.wait()
        elif kind == "raylet":
            self._nodes.stop("worker")
        else:
            self._nodes.stop()
            self._driver.wait(180)
        return True


def check(job: Job, output: Path, alone: list[bytes], *, poisoned: bool) -> None:
    """The rows are those of one engine, but for the poisoned one."""
    result, want = output.read_bytes().splitlines(), list(alone)
    if poisoned and len(result) == ROWS:
        error = json.loads(result[POISON]).get("error", {})
        if error.get("code") != "row_crashed":
            raise SystemExit(f"the poisoned row was answered with {result[POISON]!r}")
        want[POISON] = result[POISON]
    if result != want:
        at = next((n for n, (one, other) in enumerate(zip(result, want, strict=False)) if one != other), len(result))
        raise SystemExit(f"{len(result)} rows, other ones from row {at}; see {job.log}")


def main() -> None:
    args = _arguments()
    scratch = Path(tempfile.mkdtemp(dir=args.scratch, prefix="ray-crash-"))
    prompts, output = scratch / "prompts.jsonl", scratch / "alone.jsonl"
    write_prompts(prompts)
    subprocess.run(command(prompts, output), env=_ENVIRONMENT, check=False, capture_output=True)
    alone = output.read_bytes().splitlines()
    nodes, kills, jobs = Nodes(scratch), Counter[str](), args.first
    many = -(-args.kills // args.jobs)
    began_s = time.monotonic()
    try:
        while jobs < args.jobs or kills.total() < args.kills - many * args.first:
            poisoned = jobs >= (args.jobs + 1) // 2
            if poisoned and nodes.fault is None:
                nodes.stop()
                nodes.fault = f"row_{POISON}:1:kill"
            nodes.start()
            seed = args.seed * 1000 + jobs
            draw, output = random.Random(seed), scratch / f"{seed}.jsonl"
            kinds = [draw.choice(KINDS[poisoned:]) for _ in range(many)]
            while kinds.count("actor") > MOST_DEATHS - 1:
                kinds[kinds.index("actor")] = draw.choice(KINDS[1:])
            job_s = time.monotonic()
            print(f"seed {seed}: {kinds}", file=sys.stderr, flush=True)
            job = Job(nodes, prompts, output, draw)
            done = job.run(kinds)
            check(job, output, alone, poisoned=poisoned)
            kills += done
            jobs += 1
            label = f"{dict(done)}, {job.starts} starts, {job.deaths()} engines lost"
            print(f"seed {seed}: {label}, {time.monotonic() - job_s:.0f} s", file=sys.stderr, flush=True)
    finally:
        nodes.close()
    shutil.rmtree(scratch)
    result = {
        "jobs": jobs - args.first,
        "poisoned_jobs": jobs - max(args.first, (args.jobs + 1) // 2),
        "kills": kills.total(),
        "by": dict(kills),
        "all rows equal": True,
        "seed": args.seed,
        "seconds": round(time.monotonic() - began_s),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="begin with this job; after a failure")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scratch", type=Path, help="a directory on a disk")
    parser.add_argument("--out", type=Path, help="write the figures there too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
