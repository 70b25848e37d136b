"""The arithmetic of `benchmarks/pipeline.py` and `e2e.py`: lanes, ratios, bars, parsers. How fast anything is, is no
test."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.schedule import Lane, Task, TaskKind
from moelight.core.timeline import Span
from tests.benchmarks.scripts import BENCHMARKS, ran
from tests.shapes import examples

SHAPE = "--layers 2 --hidden 64 --intermediate 64 --experts 4 --heads 4 --kv-heads 2 --head-dim 16 --vocab 512"
OURS = "moelight"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the benchmarks by name, as the scripts do."""
    for position in (BENCHMARKS / "generators", BENCHMARKS):
        monkeypatch.syspath_prepend(str(position))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def span(lane: Lane, start: float, end: float, size: int = 0) -> Span:
    return Span(task=Task(kind=TaskKind.READ_PAGE, lane=lane, bytes=size), start_s=start, end_s=end)


def watched(module: Any, tokens: list[int]) -> Any:
    """Passes of one second each; in every one the disk works from 0.2 to 0.7 and from 0.5 to 1.0, 100 bytes each, and
    the CPU from 0 to 0.25."""
    result = module("runner.lanes").Watched(began=10.0)
    for number, count in enumerate(tokens):
        at = 10.0 + number
        spans = [
            span(Lane.DISK, at + 0.2, at + 0.7, 100),
            span(Lane.DISK, at + 0.5, at + 1.0, 100),
            span(Lane.CPU, at, at + 0.25),
        ]
        result.add(spans, count, at + 1.0)
    return result


def test_a_lane_is_busy_while_any_of_its_tasks_runs(module: Any) -> None:
    lanes = watched(module, [4, 4, 4]).figures(range(3))
    assert lanes["disk"]["busy_share"] == pytest.approx(0.8)
    assert lanes["disk"]["bytes_per_s"] == pytest.approx(200)
    assert lanes["disk"]["busy_bytes_per_s"] == pytest.approx(250)
    assert lanes["cpu"]["busy_share"] == pytest.approx(0.25)
    assert module("runner.lanes").binding(lanes) == "disk"


def test_a_read_that_began_in_an_earlier_pass_counts_in_part(module: Any) -> None:
    result = module("runner.lanes").Watched(began=0.0)
    result.add([], 1, 1.0)
    result.add([span(Lane.DISK, 0.5, 1.5, 100)], 1, 2.0)
    lanes = result.figures(range(1, 2))
    assert lanes["disk"]["busy_share"] == pytest.approx(0.5)
    assert lanes["disk"]["bytes"] == pytest.approx(50)
    assert result.seconds(range(1, 2)) == 1.0


@pytest.mark.parametrize(
    ("tokens", "steady"),
    [
        ([4, 4, 4, 4], range(1, 4)),
        ([2, 2, 4, 4, 4], range(3, 5)),  # prompts rode in the first three
        ([4, 4, 3, 4, 4, 4], range(4, 6)),
        ([4, 3, 2], range(0)),
        ([4], range(0)),
        ([], range(0)),
    ],
)
def test_steady_passes_decode_every_sequence_and_nothing_else(module: Any, tokens: list[int], steady: range) -> None:
    result = watched(module, tokens).steady(4)
    assert list(result) == list(steady)


def test_no_steady_passes_have_no_figures(module: Any) -> None:
    result = watched(module, [1, 2])
    assert result.figures(result.steady(4)) == {}
    assert result.seconds(result.steady(4)) == 0.0


@examples(100)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 10)), max_size=12))
def test_the_union_of_intervals_counts_every_second_once(pieces: list[tuple[int, int]]) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        covered = importlib.import_module("runner.lanes").covered
    finally:
        sys.path.remove(str(BENCHMARKS))
    seconds = {second for start, length in pieces for second in range(start, start + length)}
    assert covered((start, start + length) for start, length in pieces) == len(seconds)


def samples(module: Any, seconds: list[float], ids: list[list[int]]) -> Any:
    turns = [{"seconds": value, "cores": 2.0, "ids": ids} for value in seconds]
    return module("runner.contestants").Samples(load_s=1.0, peak_rss_bytes=7, turns={2: turns})


def test_ratios_are_taken_within_a_round(module: Any) -> None:
    ours = samples(module, [1.0, 10.0, 2.0], [[1, 2], [3, 4]])
    theirs = samples(module, [3.0, 20.0, 3.0], [[1, 2], [3, 5]])
    row = module("runner.contestants").figures(theirs, ours, 2, 64)
    assert row["ratios"] == [3.0, 2.0, 1.5]
    assert row["moelight_ratio"] == 2.0
    assert row["tokens_per_s"] == pytest.approx(64 / 3)
    assert (row["first_tokens_equal"], row["prompts_equal"]) == (2, 1)


def test_who_gives_no_tokens_is_not_compared(module: Any) -> None:
    ours = samples(module, [1.0], [[1, 2], [3, 4]])
    row = module("runner.contestants").figures(samples(module, [3.0], []), ours, 2, 64)
    assert row["first_tokens_equal"] is None
    assert row["prompts_equal"] is None


def test_peers_without_an_environment_or_a_file_say_so(module: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    places = module("runner.contestants").Places
    assert places().lacks(OURS, model) is None
    assert places().lacks("vllm-eager", model) == "no environment given"
    assert places().lacks("llamacpp", model) == "no environment given"
    here = places(vllm=Path("python"), llamacpp=tmp_path)
    assert here.lacks("vllm-compiled", model) is None
    assert "model-bf16.gguf" in here.lacks("llamacpp", model)
    (tmp_path / "model-bf16.gguf").touch()
    assert here.lacks("llamacpp", model) is None
    assert "model-Q4_K_M.gguf" in here.lacks("llamacpp-Q4_K_M", model)
    assert here.lacks("vllm-eager", tmp_path / "other.gguf") == "reads no GGUF files"
    assert here.options("llamacpp", tmp_path / "other.gguf")["gguf"] == str(tmp_path / "other.gguf")
    assert here.options("llamacpp", model)["bench"] == str(tmp_path / "llama-batched-bench")


def test_a_peer_that_takes_too_long_is_ended(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contestants = module("runner.contestants")
    monkeypatch.setattr(contestants, "GENERATORS", tmp_path)
    (tmp_path / "slow_generator.py").write_text("print('{\"load_s\": 0}', flush=True)\n__import__('time').sleep(60)\n")
    work = contestants.Work(model=tmp_path, prompts=[], new_tokens=[], batches=[1], threads=1)
    one = contestants.Contestant("slow", contestants.Places(), work, tmp_path)
    one.wait()
    with pytest.raises(contestants.EndedError, match=r"no end within 0\.05 s"):
        one.generate(1, most_s=0.05)
    one.close()


def test_what_llama_cpp_prints(module: Any) -> None:
    text = '\nsome heading\n{"pp": 128, "tg": 31, "pl": 16, "t_pp": 4.5, "t_tg": 1.5, "t": 6.0, "speed": 9.0}\n\nend\n'
    assert module("llamacpp_generator").figures(text) == {"seconds": 6.0, "first_s": 4.5, "decode_s": 1.5}


def test_a_peer_that_decoded_fewer_tokens_is_stretched(module: Any) -> None:
    rates = module("pipeline_sections.disk")._rates({"first_s": 10.0, "decode_s": 8.0}, 16, 11, 5)
    assert rates["step_s"] == 2.0
    assert rates["decode_tokens_per_s"] == 8.0
    assert rates["tokens_per_s"] == pytest.approx(16 * 11 / 30)


def row_of(order: str, batch: int, rate: float, ids: list[list[int]], **more: float) -> dict[str, Any]:
    disk = {"disk_busy_share": 0.9, "roof_share": 0.8, "decode_tokens_per_s": 2 * rate, **more}
    return {"order": order, "batch": batch, "tokens_per_s": rate, "ids": ids, **disk}


def test_orders_are_compared_at_one_batch_size_and_peers_at_their_best(module: Any) -> None:
    rows = [
        row_of("cgopipe", 64, 50.0, [[1]]),
        row_of("cgopipe", 256, 120.0, [[2]], roof_share=0.95),
        {"order": "flexgen", "batch": 256, "absent": "refused"},
        row_of("serial", 256, 100.0, [[2]]),
    ]
    peers = [
        {"peer": "llamacpp", "batch": 64, "tokens_per_s": 4.0, "decode_tokens_per_s": 8.0},
        {"peer": "llamacpp", "batch": 256, "tokens_per_s": 3.0, "decode_tokens_per_s": 12.0},
        {"peer": "accelerate", "absent": "no environment given"},
    ]
    bars = module("pipeline_sections.disk").bars
    assert bars(rows, peers) == {
        "disk_busy_share": 0.9,
        "roof_share": 0.95,
        "over serial": 1.2,
        "over llamacpp": 30.0,
        "over llamacpp, decoding": 20.0,
        "identical_tokens": True,
    }
    rows[-1]["ids"] = [[3]]
    assert bars(rows, peers)["identical_tokens"] is False
    assert bars([{"order": "cgopipe", "batch": 1, "absent": "refused"}], peers) == {} == bars([], peers)


def test_forms_are_compared_with_everybody_at_the_best_batch_size(module: Any) -> None:
    forms = [
        {"experts": "int4", **row_of("cgopipe", 64, 100.0, [[1]])},
        {"experts": "int4", **row_of("cgopipe", 256, 300.0, [[1]])},
        {"experts": "int4", "activations": "int8", **row_of("cgopipe", 64, 330.0, [[1]])},
        {"experts": "Q4_K_M", "absent": "no file"},
    ]
    rows = [row_of("cgopipe", 64, 50.0, [[1]]), row_of("cgopipe", 256, 75.0, [[1]])]
    peers = [{"peer": "llamacpp-Q4_K_M", "batch": 64, "tokens_per_s": 30.0}, {"peer": "accelerate", "absent": "none"}]
    result = module("pipeline_sections.disk").bars_of_forms(forms, rows, peers)
    assert result == {
        "int4 over moelight": 4.0,
        "int4 over llamacpp-Q4_K_M": 10.0,
        "int4, int8 activations over moelight": 4.4,
        "int4, int8 activations over llamacpp-Q4_K_M": 11.0,
    }


def test_a_direct_read_reads_everything_once(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    for path, size in zip(files, (3 * 8192 + 100, 4096), strict=True):
        path.write_bytes(b"x" * size)
    direct = module("runner.disk")
    ticks = iter([0.0, 2.0])
    monkeypatch.setattr(direct.time, "perf_counter", lambda: next(ticks))
    assert direct.direct_rate(files, threads=3, block=8192) == (3 * 8192 + 100 + 4096) / 2


def test_bars_of_resident_models(module: Any) -> None:
    def row(batch: int, **ratios: float) -> dict[str, Any]:
        return {"batch": batch, "contestants": {name: {"moelight_ratio": ratio} for name, ratio in ratios.items()}}

    table = [
        row(64, **{OURS: 1.0, "vllm-compiled": 1.29, "vllm-eager": 1.31, "openvino": 1.9, "llamacpp": 2.0}),
        row(16, **{"vllm-compiled": 1.2, "llamacpp": 0.5}),
        row(1, **{"vllm-compiled": 0.9}),
    ]
    result = module("pipeline_sections.resident").below(table)
    assert [(miss["batch"], miss["peer"], miss["bar"]) for miss in result] == [
        (64, "vllm-compiled", 1.3),
        (64, "openvino", 2.0),
        (1, "vllm-compiled", 1.0),
    ]


def test_growth_is_from_the_settled_state_to_the_end(module: Any) -> None:
    result = module("pipeline_sections.long").resident([[200, 1000], [300, 1300], [-1, 1100]], 1400, 2000)
    assert (result["growth_bytes"], result["share"]) == (100, 0.7)


@pytest.mark.thorough
def test_a_small_run_end_to_end(tmp_path: Path) -> None:
    """Without peers: refill, long, drafts and gains on a tiny model; figures are there, and those that must be equal
    are."""
    model = tmp_path / "model"
    ran("make_checkpoint", model, "--model", "mixtral-8x7b", *SHAPE.split())
    options = ["--models", model, "--scratch", tmp_path, "--sections", "refill", "long", "drafts", "gains"]
    options += ["--drafts-batches", "--drafts-tails", "--drafts-resident-batches", 2, "--drafts-prompt", 12]
    options += ["--drafts-new", 12, "--no-gains-disk", "--gains-batches", 2, "--gains-acceptances", 0.99, "--rounds", 1]
    options += ["--refill-requests", 6, "--refill-batch", 3, "--long-requests", 24, "--long-share", 400]
    sizes: dict[str, Any] = {
        "refill.ROOF_GIB": 0.01,
        "refill.PROMPTS": (8, 64),
        "refill.NEW": (2, 16),
        "long.SETTLED": 20,
    }
    sizes["long.measure_base"] = lambda: 0  # `test_memory.py` measures it
    result = ran("pipeline", *options, changes={f"pipeline_sections.{name}": size for name, size in sizes.items()})
    (row,) = result["refill"]["rows"]
    assert row["identical_tokens"]
    assert row["policy"]["static"]["admission"] == "static"
    assert {key: value for key, value in row["policy"]["static"].items() if key != "admission"} == {
        key: value for key, value in row["policy"]["refill"].items() if key != "admission"
    }
    assert {row["kind"] for row in result["drafts"]["rows"]} == {"copying", "prose"}
    assert result["drafts"]["bars"]["identical_tokens"]
    assert [row["num_speculative_tokens"] for row in result["gains"]["rows"]] == [1, 3]
    assert all(row["measured"] > 0 and row["predicted"] > 0 for row in result["gains"]["rows"])
    assert result["gains"]["rows"][1]["tokens_per_pass"] > 1.5
    completions = [count for count, _ in result["long"]["resident_bytes"]]
    assert completions == [20, -1]
    assert result["long"]["peak_rss_bytes"] >= result["long"]["settled_bytes"] > 0
