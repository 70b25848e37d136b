"""``moelight generate`` from end to end on the bundled model."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moelight import __version__
from moelight.cli.generate import JobArguments, read_options
from moelight.core.schedule import Lane
from moelight.engine.options import EngineOptions
from tests.cli.program import PLANNED, ROOT, moelight, read_rows, write_prompts
from tests.cli.program import moelight_inside as run

EXAMPLES = ROOT / "examples" / "prompts.jsonl"
ADD = {"prompt": "add 17 and 25 ="}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On a busy machine torch's threads spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    done = moelight("generate", EXAMPLES, "--token-ids")
    assert done.returncode == 0
    assert "16 rows, 256 prompt tokens" in done.stderr and "; demo: N = " in done.stderr
    assert done.stderr.count("\n") == 2
    return read_rows(done.stdout)


def asked() -> list[dict[str, Any]]:
    return read_rows(EXAMPLES.read_text())


def test_rows_answer_the_lines_in_order(plain: list[dict[str, Any]]) -> None:
    assert [row["custom_id"] for row in plain] == [line["custom_id"] for line in asked()]
    for row in plain:
        assert list(row) == ["custom_id", "text", "finish_reason", "usage", "token_ids"]
        assert row["finish_reason"] == "stop"
        assert row["usage"]["completion_tokens"] == len(row["token_ids"]) > 0
        assert row["usage"]["prompt_tokens"] > 0
    assert plain[0]["text"].strip() == "42"


def test_the_output_file_holds_the_same(plain: list[dict[str, Any]], tmp_path: Path) -> None:
    out, stats, trace = tmp_path / "out.jsonl", tmp_path / "stats.json", tmp_path / "trace.json"
    done = moelight(
        "generate", EXAMPLES, "-o", out, "--token-ids", "--stats", stats, "--trace", trace, "--schedule", "serial"
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "16 rows, 256 prompt tokens" in done.stderr and "; demo: N = " in done.stderr
    assert done.stderr.count("\n") == 2
    assert read_rows(out.read_text()) == plain
    check_stats(json.loads(stats.read_text()), plain)
    check_trace(json.loads(trace.read_text()), json.loads(stats.read_text()))
    check_prediction(json.loads(trace.read_text())["otherData"])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "out.jsonl",
        "out.jsonl.journal",
        "stats.json",
        "trace.json",
    ]


def check_stats(stats: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    assert set(stats) == {
        "wall_s",
        "load_s",
        "prompt_tokens",
        "completion_tokens",
        "tokens_per_s",
        "passes",
        "peak_rss_bytes",
        "device_peak_bytes",
        "lanes",
        "binding",
        "counts",
        "adaptations",
    }
    assert stats["completion_tokens"] == sum(row["usage"]["completion_tokens"] for row in rows)
    assert stats["prompt_tokens"] == sum(row["usage"]["prompt_tokens"] for row in rows)
    assert stats["tokens_per_s"] == pytest.approx(stats["completion_tokens"] / stats["wall_s"])
    assert stats["passes"] >= max(row["usage"]["completion_tokens"] for row in rows)
    assert stats["wall_s"] > 0 and stats["load_s"] > 0 and stats["peak_rss_bytes"] > 1 << 20
    assert set(stats["lanes"]) <= {str(lane) for lane in Lane}
    for lane in stats["lanes"].values():
        assert set(lane) == {"busy_s", "busy_share", "bytes", "bytes_per_s", "tasks"}
        assert 0 <= lane["busy_s"] <= stats["wall_s"]
    binding = stats["binding"]
    assert sum(binding["bubbles_s"].values()) == pytest.approx(binding["idle_share"] * stats["wall_s"])


def check_trace(trace: dict[str, Any], stats: dict[str, Any]) -> None:
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(bars) == sum(lane["tasks"] for lane in stats["lanes"].values())
    assert {bar["args"]["pass"] for bar in bars} == set(range(stats["passes"]))
    rows = {event["tid"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert {bar["tid"] for bar in bars} == rows


def check_prediction(data: dict[str, Any]) -> None:
    assert data["moelight"] == __version__ and data["source"] == "measured"
    assert data["policy"]["model"] == "demo" and data["policy"]["schedule"] == "serial"
    assert set(data["predicted"]) <= {str(lane) for lane in Lane} and data["predicted"]["cpu"]["busy_s"] > 0
    assert data["pass_s"] >= max(lane["busy_s"] for lane in data["predicted"].values()) * 0.999
    assert all(rate > 0 for rate in data["roofs"].values())


def test_the_same_tokens_from_a_crowded_machine(plain: list[dict[str, Any]]) -> None:
    done = run("generate", EXAMPLES, "--token-ids", "--batch-size", "3", "--micro-batch-size", "2")
    assert read_rows(done.stdout) == plain


@pytest.mark.thorough
def test_the_same_tokens_under_the_least_memory(plain: list[dict[str, Any]]) -> None:
    refused = run("generate", EXAMPLES, "--host-memory", "1MiB", "--batch-size", "4")
    assert refused.returncode == 2
    least = refused.stderr.split("at least ")[1].split()[0]
    done = run("generate", EXAMPLES, "--token-ids", "--host-memory", least, "--batch-size", "4")
    assert done.returncode == 0, done.stderr
    assert read_rows(done.stdout) == plain


def test_sampling_follows_the_seed_alone(tmp_path: Path) -> None:
    free = {"prompt": "sort window =", "temperature": 2.0, "max_tokens": 12, "ignore_eos": True}
    path = write_prompts(tmp_path / "p.jsonl", {**free, "seed": 7}, free, ADD, {**free, "seed": 7})
    alone = write_prompts(tmp_path / "alone.jsonl", {**free, "seed": 7})
    first, default, _, last = read_rows(run("generate", path, *PLANNED).stdout)
    assert first == last != default
    assert read_rows(run("generate", alone, *PLANNED).stdout) == [first]
    again, other, *_ = read_rows(run("generate", path, "--seed", "1", "--batch-size", "2").stdout)
    assert again == first and other != default


def test_stop_strings_and_limits(tmp_path: Path) -> None:
    path = write_prompts(
        tmp_path / "p.jsonl",
        {"prompt": "upper lemon ="},
        {"prompt": "upper lemon =", "stop": "MO"},
        {"prompt": "upper lemon =", "stop": ["zz", "N"]},
        {"prompt": "upper lemon =", "max_tokens": 2},
        {"prompt": "upper lemon =", "ignore_eos": True, "max_tokens": 20},
    )
    full, cut, late, short, on = read_rows(run("generate", path, *PLANNED, "--stop", "Q").stdout)
    assert full["text"].strip() == "LEMON"
    assert (cut["text"].strip(), cut["finish_reason"]) == ("LE", "stop")
    assert (late["text"].strip(), late["finish_reason"]) == ("LEMO", "stop")
    assert (short["usage"]["completion_tokens"], short["finish_reason"]) == (2, "length")
    assert full["text"].startswith(short["text"])
    assert (on["usage"]["completion_tokens"], on["finish_reason"]) == (20, "length")
    for_all = read_rows(run("generate", path, *PLANNED, "--stop", "MO", "--stop", "L").stdout)
    assert [row["text"].strip() for row in for_all[:2]] == ["", "LE"]


def test_bad_lines_are_rows_and_the_exit_code_is_1(tmp_path: Path) -> None:
    path = write_prompts(
        tmp_path / "p.jsonl",
        ADD,
        "{",
        {"custom_id": "long", "prompt": "add " * 400},
        {"custom_id": "limit", "prompt": "add 17 and 25 =", "max_tokens": 10_000},
        {"custom_id": "strange", "prompt": "Ω 世 🦊"},
    )
    done = run("generate", path, *PLANNED)
    assert done.returncode == 1
    good, torn, long, limit, strange = read_rows(done.stdout)
    assert good["text"] and "text" in strange
    assert limit["error"]["code"] == "context_length_exceeded" and "max_tokens" in limit["error"]["message"]
    assert (torn["line"], torn["error"]["code"]) == (2, "invalid_json")
    assert (long["line"], long["custom_id"], long["error"]["code"]) == (3, "long", "context_length_exceeded")
    assert "3 of 5 lines" in done.stderr and "line 2" in done.stderr


def test_prompts_from_standard_input(tmp_path: Path) -> None:
    with write_prompts(tmp_path / "p.jsonl", ADD).open() as stdin:
        done = moelight("generate", "-", *PLANNED, stdin=stdin)
    assert read_rows(done.stdout)[0]["text"].strip() == "42"


def test_a_table_when_asked_for(tmp_path: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "upper lemon ="}]}
    path = write_prompts(tmp_path / "p.jsonl", ADD, talk, {"prompt": ""})
    out = tmp_path / "out.jsonl"
    done = run("generate", path, "--show", "-o", out, *PLANNED)
    assert done.returncode == 1
    for shown in ("prompt", "completion", "add 17 and 25 =", "42", "upper lemon =", "LEMON", "error: "):
        assert shown in done.stdout
    assert len(read_rows(out.read_text())) == 3


def test_rows_on_stdout_stay_rows_beside_a_table(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "p.jsonl", ADD)
    done = run("generate", path, "--show", "-o", "-", *PLANNED)
    assert read_rows(done.stdout)[0]["text"].strip() == "42"
    assert "completion" in done.stderr


def test_on_a_terminal_a_bar_a_reason_and_a_table(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "p.jsonl", ADD)
    shown = on_a_terminal("generate", path)
    for message in ("N = 1", "tokens", "tok/s", "completion", "42"):
        assert message in shown
    assert '{"text"' not in shown


def test_no_show_on_a_terminal_is_rows_without_a_bar(tmp_path: Path) -> None:
    shown = on_a_terminal("generate", write_prompts(tmp_path / "p.jsonl", ADD), "--no-show", *PLANNED)
    assert read_rows(shown)[0]["text"].strip() == "42"


def on_a_terminal(*arguments: str | Path) -> str:
    """Everything a terminal of 100 columns receives. It is read all the while: one holds little, and then nobody can
    write to it."""
    ours, theirs = pty.openpty()
    received = bytearray()

    def drain() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while piece := os.read(ours, 65536):
                received.extend(piece)

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        done = moelight(*arguments, terminal=theirs)
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    assert done.returncode == 0
    return received.decode()


def test_a_device_whose_memory_ends_keeps_the_rows_before(tmp_path: Path) -> None:
    """One line, exit code 2; with more memory the same command goes on where it stopped."""
    policy, prompts, out = tmp_path / "policy.yaml", tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    policy.write_text("model: demo\nbatch_size: 1\nmicro_batch_tokens: 128\nffn_device: gpu\nweights: {device: 1.0}\n")
    short, long = [{"prompt": "add 1 and 2 ="}] * 3, [{"prompt": "add 17 and 25 = " * 8}]

    def peak(lines: list[dict[str, Any]]) -> int:
        write_prompts(prompts, *lines)
        stats = tmp_path / "stats.json"
        done = generate("twin:memory=1GiB", tmp_path / f"{len(lines)}.jsonl", "--stats", stats)
        assert done.returncode == 0, done.stderr
        return int(json.loads(stats.read_text())["device_peak_bytes"])

    def generate(device: str, into: Path, *more: str | Path) -> Any:
        return run("generate", prompts, "-o", into, "--max-tokens", "2", "--policy", policy, "--device", device, *more)

    fits, exceeds = peak(short), peak(long)
    assert fits < exceeds
    write_prompts(prompts, *short, *long)
    done = generate(f"twin:memory={(fits + exceeds) // 2}", out)
    assert done.returncode == 2
    assert "moelight: error: twin: a pass needs more device memory than is left" in done.stderr
    assert "lower --device-memory" in done.stderr.splitlines()[-1]
    assert len(read_rows(out.read_text())) == 3
    done = generate("twin", out)
    assert (done.returncode, len(read_rows(out.read_text()))) == (0, 4), done.stderr


def test_how_schemas_are_handled_where_a_row_does_not_say(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2, "uniqueItems": true}')
    arguments = JobArguments(prompts=tmp_path / "x.jsonl", json_schema=schema, strict=True, resamplings=0)
    options = read_options(arguments, EngineOptions(), as_table=False)
    outputs = options.sampling.structured_outputs
    assert outputs is not None and (outputs.strict, outputs.resamplings) == (True, 0)
    assert (options.strict, options.resamplings) == (True, 0)
