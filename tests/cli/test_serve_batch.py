"""``moelight serve-batch``: the official client against the bundled model, and what is refused before the start."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from moelight.core.errors import ConfigError
from moelight.core.units import parse_bytes
from moelight.serve.jobs import Job, generate_command
from tests.cli.program import DEMO, PLANNED, Program, moelight_inside


@pytest.fixture
def client(tmp_path: Path) -> Iterator[openai.OpenAI]:
    """OpenAI's, of a server of the bundled model that ends in peace."""
    data = tmp_path / "data"
    words = ["serve-batch", "--model", DEMO, "--port", "0", "--data", data, *PLANNED]
    ours, theirs = os.pipe()
    process = Program("moelight.cli.main", *words, streams=(0, 1, theirs))
    os.close(theirs)
    with open(ours, encoding="utf-8") as message:
        url = message.readline().split("base URL ")[1].split(",")[0]
        token = (data / "token").read_text().strip()
        with openai.OpenAI(base_url=url, api_key=token, max_retries=0) as result:
            yield result
        process.send_signal(signal.SIGINT)
        assert message.read().splitlines()[-1] == "moelight serve-batch: stopped"
        assert process.wait() == 130


def request(name: str, **body: Any) -> bytes:
    body = {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": "add 1 and 2 ="}], **body}
    line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


@pytest.mark.thorough
def test_the_official_client_is_answered_by_the_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    sampled = request("b", logprobs=True, n=2, temperature=1.0, seed=3)
    lines = [request("a"), sampled, request("c", model="gpt-9"), b"{\n"]
    file = client.files.create(file=("a.jsonl", io.BytesIO(b"".join(lines))), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"of": "mine"}
    )
    while batch.status not in {"completed", "failed"}:
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch.errors
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 4, "completed": 2, "failed": 2}
    done = [json.loads(line) for line in client.files.content(str(batch.output_file_id)).iter_lines()]
    rows = {row["custom_id"]: row for row in done}
    for name, choices in (("a", 1), ("b", 2)):
        assert (rows[name]["error"], rows[name]["response"]["status_code"]) == (None, 200)
        answer = ChatCompletion.model_validate(rows[name]["response"]["body"], strict=True)
        assert len(answer.choices) == choices and answer.usage and answer.usage.completion_tokens > 0
        assert all((choice.logprobs is not None) == (name == "b") for choice in answer.choices)
    refused = [json.loads(line) for line in client.files.content(str(batch.error_file_id)).iter_lines()]
    assert [(row["custom_id"], row["response"]["status_code"]) for row in refused] == [("c", 404), (None, 400)]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model", "no/such/model"], "no such directory"),
        (["--host", "0.0.0.0"], "other machines could reach it; add --allow-remote"),
        (["--token-file", "@/none"], "no such file"),
        (["--data", "@/file"], "--data"),
        (["--host-memory", "much"], "--host-memory"),
        (["--max-file-size", "0.5x"], "--max-file-size"),
        (["--policy", "@/none.yaml"], "none.yaml"),
        ([*PLANNED, "--activations", "int8"], "--activations int8 contradict each other"),
        (["--activations", "int9"], "--activations 'int9' is not one of auto, int8 (did you mean 'int8'?)"),
        (["--expert-policy", "@/none.moe"], "none.moe"),
        (["--watch", "@/none"], "no such directory"),
        (["--watch", "@", "--port", "1"], "--port 1 contradict each other"),
        (["--watch", "@", "--max-file-size", "1KiB"], "--max-file-size 1KiB contradict each other"),
        (["--watch", "@", "--expire"], "--expire contradict each other"),
    ],
)
def test_refused_in_one_line(words: list[str], reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    inputs = [word.replace("@", str(tmp_path)) for word in words]
    http = [] if "--watch" in words else ["--data", tmp_path / "d", "--port", "0"]
    done = moelight_inside("serve-batch", "--model", "demo", *http, *inputs)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert reason in done.stderr


def test_a_taken_port_and_a_missing_extra_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = moelight_inside("serve-batch", "--model", "demo", "--data", tmp_path / "d", "--port", str(port))
    assert done.returncode == 2 and f"--port {port}: address already in use" in done.stderr
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = moelight_inside("serve-batch", "--model", "demo", "--data", tmp_path / "d")
    assert done.returncode == 2 and "pip install 'moelight[serve]'" in done.stderr


def test_options_of_a_job_are_handed_on() -> None:
    command = generate_command("m", ["--host-memory", "1GiB"], line_format="openai")
    words = list(command(Job(source=Path("in"), directory=Path("d"))))
    assert words[1:6] == ["-m", "moelight.cli.main", "generate", "in", "--model"]
    assert words[-4:] == ["--format", "openai", "--host-memory", "1GiB"]
    assert parse_bytes(words[-1], label="") == 1 << 30


def test_jobs_run_with_the_options_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handed_on: list[list[str]] = []

    def end(_model: str, options: list[str], **_: Any) -> None:
        handed_on.append(options)
        raise ConfigError("enough")

    monkeypatch.setattr("moelight.serve.jobs.generate_command", end)
    inputs = ["--max-tokens", "7", "--device", "cpu", "--kv-dtype", "int8", "--activations", "int8"]
    moelight_inside("serve-batch", "--model", "demo", "--watch", tmp_path, *inputs)
    assert handed_on == [inputs]
