"""The metrics file, read by a parser that forgives nothing."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from moelight.batch.progress import JobCounts, JobStart
from moelight.batch.status import MetricsFile
from moelight.batch.time_left import TimeLeft
from moelight.core.request import Completion, RequestMetrics
from moelight.core.schedule import Lane
from moelight.observe.stats import LaneStats, RunStats

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-z_]+="(?:[^"\\\n]|\\\\|\\"|\\n)*",?)*)\} (\S+)')
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"(?:,|$)')
ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
Labels = tuple[tuple[str, str], ...]


def parse(text: str) -> dict[str, dict[Labels, float]]:
    """Samples by name and labels. Each family has HELP, TYPE and then all its samples; nothing comes twice."""
    assert text.endswith("\n") and "\n\n" not in text
    result: dict[str, dict[Labels, float]] = {}
    family = kind = ""
    families: set[str] = set()
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("# HELP "):
            family = line.split(" ", 3)[2]
            assert NAME.fullmatch(family) and family not in families
            families.add(family)
            hash_, type_, named, kind = next(lines).split(" ")
            assert (hash_, type_, named) == ("#", "TYPE", family) and kind in ("counter", "gauge", "histogram")
            assert (kind == "counter") == family.endswith("_total")
            continue
        match = SAMPLE.fullmatch(line)
        assert match is not None, line
        name, inside, value = match.groups()
        suffix = name.removeprefix(family)
        assert suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",)), line
        labels = tuple(
            sorted(
                (label, re.sub(r"\\.", lambda item: ESCAPES[item.group()], written))
                for label, written in LABEL.findall(inside)
            )
        )
        assert len(dict(labels)) == len(labels)
        samples = result.setdefault(name, {})
        assert labels not in samples
        samples[labels] = float(value)
        assert not math.isnan(samples[labels])
    return result


MODEL = 'a "quoted" \\ model\nname'
OF_MODEL = ("model_name", MODEL)


def test_a_job_is_told_in_vllms_names(tmp_path: Path) -> None:
    path, eta = tmp_path / "moelight.prom", TimeLeft()
    metrics = MetricsFile(path, MODEL, eta)
    assert parse(path.read_text())["vllm:num_requests_running"] == {(OF_MODEL,): 0}
    start = JobStart(input="in", total=9, refused=1, predicted_s=50.0)
    for item in (eta, metrics):
        item.started(start)
    for length, reason in ((1, "stop"), (3, "length"), (300_000, "length")):
        metrics.completion(
            Completion(
                index=0, text="", token_ids=(0,) * length, finish_reason=reason, prompt_tokens=64, cached_tokens=32
            ),
            room=3,
            latency_s=0.5,
        )
    lanes = {Lane.DISK: LaneStats(busy_s=1.5, bytes=1 << 40, tasks=1), Lane.CPU: LaneStats(busy_s=0.25)}
    stats = RunStats(
        wall_s=2.0, load_s=0.0, prompt_tokens=1, completion_tokens=1, passes=1, peak_rss_bytes=5, lanes=lanes
    )
    metrics.measured(stats, {"overall": {"hits": 7, "misses": 3}})
    metrics.counts(JobCounts(total=9, completed=3, failed=1, running=2, waiting=3, prompt_tokens=192, kv_usage=0.25))
    metrics.ended("completed")
    result = parse(path.read_text())
    alone = (OF_MODEL,)
    for name, value in (
        ("vllm:num_requests_running", 2),
        ("vllm:num_requests_waiting", 3),
        ("vllm:kv_cache_usage_perc", 0.25),
        ("vllm:prompt_tokens_total", 192),
        ("vllm:prefix_cache_queries_total", 192),
        ("vllm:prefix_cache_hits_total", 96),
        ("vllm:request_prompt_tokens_sum", 192),
        ("moelight_expert_cache_hits_total", 7),
        ("moelight_job_eta_seconds", 50),
    ):
        assert result[name][alone] == value, name
    assert result["vllm:request_success_total"][(("finished_reason", "length"), OF_MODEL)] == 2
    assert result["moelight_job_rows"][(OF_MODEL, ("state", "unfinished"))] == 5
    assert result["moelight_transfer_bytes_total"][(("lane", "disk"), OF_MODEL)] == 1 << 40
    assert result["moelight_lane_busy_seconds_total"][(("lane", "cpu"), OF_MODEL)] == 0.25


@pytest.mark.parametrize(
    "name",
    [
        "request_prompt_tokens",
        "request_generation_tokens",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "time_to_first_token_seconds",
        "request_time_per_output_token_seconds",
    ],
)
def test_buckets_hold_all_that_is_below_them(tmp_path: Path, name: str) -> None:
    path = tmp_path / "moelight.prom"
    metrics = MetricsFile(path, "m", TimeLeft())
    values = (1, 5, 6, 10_000, 200_000)
    for value in values:
        tokens = 2 if name == "request_time_per_output_token_seconds" else value
        first_s = 0.0 if name == "time_to_first_token_seconds" else 1.0
        ended = Completion(
            index=0,
            text="",
            token_ids=(0,) * tokens,
            finish_reason="stop",
            prompt_tokens=value,
            metrics=RequestMetrics(queue_s=value, first_token_s=first_s, generation_s=value),
        )
        metrics.completion(ended, room=1, latency_s=float(value))
    metrics.ended("completed")
    result = parse(path.read_text())
    buckets = {float(dict(labels)["le"]): count for labels, count in result[f"vllm:{name}_bucket"].items()}
    assert list(buckets) == sorted(buckets) and math.inf in buckets
    assert buckets == {bound: sum(value <= bound for value in values) for bound in buckets}
    assert result[f"vllm:{name}_count"][(("model_name", "m"),)] == 5
    assert result[f"vllm:{name}_sum"][(("model_name", "m"),)] == sum(values)
