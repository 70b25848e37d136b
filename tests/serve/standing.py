"""A server whose jobs are stand-ins, in a process of its own, and the official client for it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from moelight.serve.jobs import Command, Job, JobRunner, Pace
from tests.cli.program import ROOT, Program

STAND_IN = Path(__file__).with_name("stand_in.py")
PACE = Pace(poll_s=0.02, grace_s=0.5, retry_s=0.05)
MAX_FILE_BYTES = 200_000
SLOW_SENDER_S = 0.7  # how long the server waits for one


def stand_in(job: Job) -> list[str]:
    paths = (job.source, job.output, job.errors, job.status)
    return [sys.executable, "-I", "-S", str(STAND_IN), *map(str, paths)]


def line(name: str, wish: str | None = None, url: str = "/v1/chat/completions") -> dict[str, Any]:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
    return {"custom_id": name, "method": "POST", "url": url, "body": body if wish is None else {**body, "user": wish}}


def lines(count: int, wish: str | None = None, url: str = "/v1/chat/completions") -> bytes:
    return b"".join(json.dumps(line(f"r{n}", wish, url)).encode() + b"\n" for n in range(count))


class Standing:
    """The server's process; ``client`` is OpenAI's, ``http`` speaks plainly, with the token."""

    def __init__(self, data: Path, slow_s: float = SLOW_SENDER_S) -> None:
        import openai

        self.data = data
        ours, theirs = os.pipe()
        self.process = Program("tests.serve.standing", data, str(slow_s), cwd=ROOT, streams=(0, 1, theirs))
        os.close(theirs)
        self.output = os.fdopen(ours, encoding="utf-8")
        self.greeting = self.output.readline()
        self.url = self.greeting.split("base URL ")[1].split(",")[0]
        self.token = (data / "token").read_text().strip()
        self.client = openai.OpenAI(base_url=self.url, api_key=self.token, max_retries=0, timeout=200)
        self.http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.token}"}, timeout=200)

    def upload(self, data: bytes, name: str = "in.jsonl") -> Any:
        return self.client.files.create(file=(name, io.BytesIO(data)), purpose="batch")

    def begin(self, data: bytes, **more: Any) -> Any:
        asked: dict[str, Any] = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **more}
        return self.client.batches.create(input_file_id=self.upload(data).id, **asked)

    def until(self, batch: Any, holds: Callable[[Any], bool]) -> Any:
        return until(lambda: self.client.batches.retrieve(batch.id), holds)

    def finished(self, batch: Any) -> Any:
        return self.until(batch, lambda now: now.status in {"completed", "failed", "cancelled", "expired"})

    def rows(self, file_id: str) -> list[Any]:
        return [json.loads(line) for line in self.client.files.content(file_id).text.splitlines()]

    def end(self, number: int = signal.SIGINT) -> int:
        """Send the signal, and return the exit code."""
        self.process.send_signal(number)
        code = self.process.wait()
        for item in (self.output, self.client, self.http):
            item.close()
        return code


def until(ask: Callable[[], Any], holds: Callable[[Any], bool], within_s: float = 300.0) -> Any:
    deadline = time.monotonic() + within_s
    while not holds(result := ask()):
        assert time.monotonic() < deadline, result
        time.sleep(0.02)
    return result


@contextlib.contextmanager
def standing(data: Path, slow_s: float = SLOW_SENDER_S) -> Iterator[Standing]:
    server = Standing(data, slow_s)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


def serve_standing(data: Path, command: Command = stand_in, *, slow_s: float = SLOW_SENDER_S) -> int:
    from moelight.serve import auth, http, server

    server.HEADERS_S, http.STALL_S, auth.LINGER_S = slow_s, slow_s, 0.3 * slow_s
    runner = JobRunner(command, say=lambda text: print(text, file=sys.stderr, flush=True), pace=PACE)
    return server.serve(runner, model="org/demo", data=data, port=0, max_file_bytes=MAX_FILE_BYTES)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell has it for a program in the background
    sys.exit(128 + serve_standing(Path(sys.argv[1]), slow_s=float(sys.argv[2])))
