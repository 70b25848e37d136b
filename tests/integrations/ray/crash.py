"""Jobs on a Ray cluster whose parts are killed again and again: in the end the rows are those of one engine.

    python tests/integrations/ray/crash.py [--kills 40] [--jobs 10] [--seed 1] [--scratch DIR]

A cluster of two nodes of one core each in this machine, and the command line as users run it. What is killed, at random
moments, with SIGKILL:

    actor    an engine's process; at most two of a job: a row that was in three may become an error row
    raylet   a node, which another one replaces
    driver   the command, which is given again
    head     the whole cluster; it is started again, and the command given again if it ended

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
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

ROWS, PORT = 400, 6391
_KINDS = ("actor", "raylet", "driver", "head")
_ENVIRONMENT = {
    **os.environ,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "OMP_NUM_THREADS": "1",
}
_RAY = Path(sys.executable).with_name("ray")


class Nodes:
    """The processes of the cluster, which `ray start` keeps in the foreground."""

    def __init__(self, scratch: Path) -> None:
        self._log = (scratch / "ray.log").open("ab")
        self.head: subprocess.Popen[bytes] | None = None
        self.node: subprocess.Popen[bytes] | None = None

    def start(self, *, head: bool) -> None:
        where = [f"--port={PORT}", "--head", "--include-dashboard=false"] if head else [f"--address=127.0.0.1:{PORT}"]
        for _ in range(10):
            command = [str(_RAY), "start", *where, "--num-cpus=1", "--object-store-memory=80000000", "--block"]
            process = subprocess.Popen(
                command, env=_ENVIRONMENT, stdout=self._log, stderr=self._log, start_new_session=True
            )
            if self._is_up(process, head=head):
                break
            kill_tree(process)
        else:
            raise SystemExit("a node does not start; see ray.log")
        if head:
            self.head = process
        else:
            self.node = process

    def _is_up(self, process: subprocess.Popen[bytes], *, head: bool) -> bool:
        """True once the raylet of the process has workers' agents, as `ray status` counts nodes."""
        wanted = 1 if head else 2
        for _ in range(120):
            if process.poll() is not None:
                return False
            found = subprocess.run(
                [sys.executable, "-c", _COUNT], env=_ENVIRONMENT, capture_output=True, text=True, check=False
            )
            if found.stdout.strip().isdigit() and int(found.stdout) >= wanted:
                return True
            time.sleep(0.5)
        return False

    def stop(self) -> None:
        for process in (self.node, self.head):
            if process is not None:
                kill_tree(process)
        self.node = self.head = None


_COUNT = f"""
from ray._raylet import GcsClient
client = GcsClient(address="127.0.0.1:{PORT}")
print(sum(node.state == 0 for node in client.get_all_node_info(timeout=5).values()))
"""


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and all below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(process.pid)
        for each in [*found.children(recursive=True), found]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def engines(nodes: Nodes) -> list[psutil.Process]:
    found = []
    for node in (nodes.head, nodes.node):
        if node is not None and node.poll() is None:
            for each in psutil.Process(node.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if each.cmdline()[:1] and each.cmdline()[0].startswith("ray::EngineWorker"):
                        found.append(each)
    return found


def write_prompts(path: Path) -> None:
    draw = random.Random(3)
    with path.open("w") as file:
        for n in range(ROWS):
            row = {"custom_id": f"row-{n}", "prompt": f"add {draw.randrange(999)} =", "ignore_eos": True}
            row["max_tokens"] = draw.choice([20, 60, 120]) if n % 17 != 5 else -1
            if n % 3 == 0:
                row.update(temperature=1.0, seed=n)
            file.write("{broken\n" if n % 29 == 11 else json.dumps(row) + "\n")


def command(prompts: Path, output: Path, *, on_ray: bool) -> list[str]:
    given = [sys.executable, "-m", "moelight.cli.main", "generate", str(prompts), "-o", str(output), "--no-show"]
    ray = ["--ray", f"127.0.0.1:{PORT}"] if on_ray else []
    return [*given, "--batch-size", "2", "--sync-interval", "0.2", *ray]


def one_job(
    nodes: Nodes, prompts: Path, output: Path, kinds: list[str], draw: random.Random, log: Path
) -> Counter[str]:
    """Run the job with its disturbances, to the end."""
    kills: Counter[str] = Counter()
    errors = log.open("ab")
    driver: subprocess.Popen[bytes] | None = None
    deadline = time.monotonic() + 1800
    while True:
        if driver is None:
            driver = subprocess.Popen(
                command(prompts, output, on_ray=True), env=_ENVIRONMENT, stdout=errors, stderr=errors
            )
        if kinds:
            _wait_for_rows(nodes, driver, draw)
        if time.monotonic() > deadline:
            raise SystemExit("the job does not end")
        ended = driver.poll()
        if kinds and ended is None:
            kind = kinds.pop()
            if kill(nodes, driver, kind):
                kills[kind] += 1
            if kind in ("driver", "head"):
                if kind == "head":
                    nodes.stop()
                    try:
                        driver.wait(60)
                    except subprocess.TimeoutExpired:
                        driver.kill()
                    nodes.start(head=True)
                    nodes.start(head=False)
                driver.wait()
                driver = None
        elif ended is not None:
            if ended in (0, 1) and not _unfinished(output):
                return kills
            driver = None
        else:
            time.sleep(0.2)


def _unfinished(output: Path) -> bool:
    return not output.exists() or len(output.read_bytes().splitlines()) < ROWS


def _wait_for_rows(nodes: Nodes, driver: subprocess.Popen[bytes], draw: random.Random) -> None:
    """Until engines are there, and some time more; mostly while they answer."""
    end_s = time.monotonic() + 240
    while driver.poll() is None and not engines(nodes) and time.monotonic() < end_s:
        time.sleep(0.2)
    time.sleep(draw.uniform(0.0, 12.0))


def kill(nodes: Nodes, driver: subprocess.Popen[bytes], kind: str) -> bool:
    if kind == "driver":
        driver.kill()
    elif kind == "actor":
        found = engines(nodes)
        if not found:
            return False
        found[0].send_signal(signal.SIGKILL)
    elif kind == "raylet":
        assert nodes.node is not None
        kill_tree(nodes.node)
        nodes.start(head=False)
    return True


def main() -> None:
    args = _arguments()
    scratch = Path(tempfile.mkdtemp(dir=args.scratch, prefix="ray-crash-"))
    prompts, alone = scratch / "prompts.jsonl", scratch / "alone.jsonl"
    write_prompts(prompts)
    subprocess.run(command(prompts, alone, on_ray=False), env=_ENVIRONMENT, check=False, capture_output=True)
    expected = alone.read_bytes()
    nodes, kills, jobs = Nodes(scratch), Counter[str](), 0
    try:
        nodes.start(head=True)
        nodes.start(head=False)
        while kills.total() < args.kills:
            seed = args.seed * 1000 + jobs
            draw = random.Random(seed)
            many = -(-args.kills // args.jobs)
            kinds = [draw.choice(_KINDS) for _ in range(many)]
            while kinds.count("actor") > 2:
                kinds[kinds.index("actor")] = "driver"
            output = scratch / f"{seed}.jsonl"
            began_s = time.monotonic()
            done = one_job(nodes, prompts, output, kinds, draw, scratch / "driver.log")
            if output.read_bytes() != expected:
                raise SystemExit(f"seed {seed}: other rows; see {scratch}")
            kills += done
            jobs += 1
            print(f"{seed}: {dict(done)} in {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    finally:
        nodes.stop()
    shutil.rmtree(scratch)
    print(json.dumps({"jobs": jobs, "kills": kills.total(), "by": dict(kills), "all rows equal": True}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scratch", type=Path, help="a directory on a disk")
    return parser.parse_args()


if __name__ == "__main__":
    main()
