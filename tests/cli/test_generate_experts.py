"""``moelight generate`` with experts that come and go: the same answers, and what was learned in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moelight.experts.trace import read_rows as read_trace
from tests.cli.program import moelight_inside, read_rows, write_prompts

MINE = """\
policy mine {
    cache { capacity = 3 eviction = lru }
    per_layer { allocation = uniform min_capacity = 1 }
}
"""
ALONE = ("--batch-size", "1")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "p.jsonl", {"prompt": "add 17 and 25 ="}, {"prompt": "upper lemon ="})


def test_what_is_learned_and_met_is_written(prompts: Path, tmp_path: Path) -> None:
    """Capacity is each layer's under ``per_layer``, for the plan as for the cache."""
    stats, profile, trace = (tmp_path / name for name in ("stats.json", "profile.json", "trace.jsonl"))
    (tmp_path / "mine.moe").write_text(MINE)
    selected = ("--expert-policy", tmp_path / "mine.moe", *ALONE)
    files = ("--expert-stats", stats, "--save-expert-profile", profile, "--routing-trace", trace)
    done = moelight_inside("generate", prompts, *selected, *files)
    assert done.returncode == 0, done.stderr
    assert [row["text"].strip() for row in read_rows(done.stdout)] == ["42", "LEMON"]
    result = json.loads(stats.read_text())
    assert result["policy"] == "mine"
    assert (result["cache"]["capacity"], result["cache"]["budgets"]) == (12, [3, 3, 3, 3])
    assert [item["layer"] for item in result["layers"]] == [0, 1, 2, 3]
    assert all(item["hits"] + item["misses"] == item["accesses"] > 0 for item in result["layers"])
    saved = json.loads(profile.read_text())
    traced = [len(row.ids) for row in read_trace(trace) if row.layer == 2]
    assert sum(saved["counts"][2]) == sum(traced) > 0
    again = moelight_inside("generate", prompts, *selected, "--expert-profile", profile, "--expert-stats", stats)
    assert again.stdout == done.stdout
    later = json.loads(stats.read_text())
    assert later["overall"]["accesses"] == result["overall"]["accesses"]
    assert later["overall"]["hits"] != result["overall"]["hits"]


def test_static_learns_nothing_and_answers_the_same(prompts: Path, tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    refused = moelight_inside("generate", prompts, *ALONE, "--host-memory", "1MiB")
    limits = (*ALONE, "--host-memory", refused.stderr.split("at least ")[1].split()[0])
    done = moelight_inside("generate", prompts, *limits, "--expert-policy", "static", "--expert-stats", stats)
    assert done.returncode == 0, done.stderr
    assert [row["text"].strip() for row in read_rows(done.stdout)] == ["42", "LEMON"]
    result = json.loads(stats.read_text())
    assert result["policy"] == "static"
    assert result["cache"]["evictions"] == result["cache"]["prefetched"] == 0
    assert result["overall"]["accesses"] > 0
