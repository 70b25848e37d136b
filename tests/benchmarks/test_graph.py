"""The arithmetic of `benchmarks/graph.py`: bars, and the words of who cannot take part. How fast anything is, is no
test."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from tests.benchmarks.scripts import BENCHMARKS


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Any:
    for position in (BENCHMARKS / "generators", BENCHMARKS):
        monkeypatch.syspath_prepend(str(position))
    return importlib.import_module("graph")


def result(ratios: dict[int, dict[str, float]]) -> dict[str, Any]:
    rows = [
        {"batch": batch, "contestants": {name: {"moelight_ratio": ratio} for name, ratio in ratio.items()}}
        for batch, ratio in ratios.items()
    ]
    return {"model": "m", "batches": rows}


def test_a_graph_that_is_slower_than_its_bar_is_named(graph: Any) -> None:
    assert graph._slower(result({1: {"moelight-graph": 3.0}, 64: {"moelight-graph": 1.1}})) == []
    (miss,) = graph._slower(result({64: {"moelight-graph": 1.11}}))
    assert (miss["batch"], miss["bar"]) == (64, 1.10)


def test_the_best_form_of_a_library_counts(graph: Any) -> None:
    both = {"moelight": 1.0, "transformers-eager": 1.9, "transformers-grouped_mm": 1.2, "vllm-compiled": 0.5}
    (miss,) = graph._below_peers(result({16: both}))
    assert miss["ratio"] == 1.2
    assert graph._below_peers(result({16: both | {"transformers-grouped_mm": 1.3}})) == []
    assert graph._below_peers(result({16: {"moelight": 1.0}})) == []


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("Traceback\n  File x\nValueError: no such family\n\n", "ValueError: no such family"),
        ("torch.OutOfMemoryError: too much\nleaked 3 things", "torch.OutOfMemoryError: too much"),
        ("killed by someone\n", "killed by someone"),
        ("", "vllm ended with -9"),
    ],
)
def test_who_is_absent_says_why_in_a_line(graph: Any, log: str, words: str) -> None:
    contestants = importlib.import_module("runner.contestants")
    assert contestants.last_words(contestants.EndedError("vllm ended with -9", log)) == words
