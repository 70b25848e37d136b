"""What a job would be, on a screen and as values."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from moelight.batch.forecast import Forecast, predicted_prompt_s
from moelight.batch.summary import InputProblem, ScanSummary
from moelight.cli.job_display import print_forecast
from moelight.core.policy import Policy
from moelight.hrm.estimate import Estimate, Phase
from moelight.optimizer.plan import Plan, TierUse
from moelight.profiles.workload import Workload

SUMMARY = ScanSummary(
    rows=10_000,
    sequences=9_998,
    prompts=9_998,
    kinds={"/v1/chat/completions": 9_000, "/v1/completions": 999},
    problems={
        "bad_json": InputProblem(
            count=1,
            first_line=17,
            message="is no JSON: a comma or a quote is missing, and this is said at some length so that it wraps",
        ),
        "model_not_found": InputProblem(count=1, first_line=9_001, message="there is no model \x1b[31m'gpt-4'"),
    },
    histogram=[0, 0, 0, 0, 0, 120, 4_000, 5_000, 800, 70, 0, 8],
    prompt_tokens=1_234_567,
    max_prompt_len=4_012,
    generated_tokens=2_559_488,
    max_gen_len=256,
    samplings=3,
)
ESTIMATE = Estimate(
    layer_s=0.1,
    pass_s=3.0,
    decode_tokens_per_s=400.0,
    tokens_per_s=320.0,
    lanes={"disk": 2.9, "cpu": 1.0},
    binding="disk",
    phases=(
        Phase(
            name="first prompts",
            passes=4.0,
            decode_tokens=0,
            prompt_tokens=9e4,
            seconds=9.0,
            lanes={"cpu": 9, "disk": 3},
        ),
        Phase(
            name="decode",
            passes=2000.0,
            decode_tokens=1200,
            prompt_tokens=0,
            seconds=3.0,
            lanes={"disk": 2.9, "cpu": 1},
        ),
        Phase(name="overlap", passes=0.0, decode_tokens=0, prompt_tokens=0, seconds=3.0, lanes={"disk": 2.9}),
    ),
)
PLAN = Plan(
    policy=Policy(model="mixtral-8x7b"),
    hardware="auto",
    workload=Workload(),
    estimator="calibrated",
    estimate=ESTIMATE,
    memory=(
        TierUse(tier="host", capacity_bytes=64 << 30, by_purpose=(("weights", 40 << 30), ("kv", 10 << 30))),
        TierUse(tier="disk", capacity_bytes=500 << 30, by_purpose=(("weights", 60 << 30),)),
    ),
    why="mixtral-8x7b: the disk binds",
)
FORECAST = Forecast(
    input="prompts.jsonl",
    detected="OpenAI batch lines",
    model="mixtral-8x7b",
    summary=SUMMARY,
    plan=PLAN,
)


def drawn(forecast: Forecast, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    print_forecast(console, forecast)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("width", [80, 120])
def test_a_forecast_says_rows_problems_lengths_memory_and_time(width: int) -> None:
    text = drawn(FORECAST, width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    for message in (
        "10,000  rows",
        "9,000  /v1/chat/completions",
        "2  will be error rows",
        "9,001",
        "128 to 255",
        "1.23M prompt tokens",
        "at most 2.56M tokens to generate",
        "3 different sampling parameters",
        "50.0GiB of 64.0GiB, 78 %",
        "about 1 h 41 min by the profile of",
        "the disk lane",
    ):
        assert message in text or message in " ".join(text.split()), message
    assert "overlap" not in text


def test_what_the_plan_did_not_search_is_said() -> None:
    forecast = replace(FORECAST, plan=replace(PLAN, fixed=("batch_size", "schedule")))
    assert "given, not searched: batch_size, schedule" in " ".join(drawn(forecast, 80).split())
    assert forecast.as_dict()["given"] == forecast.given != ""
    assert "not searched" not in drawn(FORECAST, 80)


def test_as_values_it_is_json() -> None:
    values = json.loads(json.dumps(FORECAST.as_dict(), allow_nan=False))
    assert values["predicted_s"] == 6036.0
    assert predicted_prompt_s(PLAN) == 24.0
    assert [phase["name"] for phase in values["phases"]] == ["first prompts", "decode"]
    assert values["phases"][0]["binding"] == "cpu"
    assert values["summary"]["problems"]["bad_json"][:2] == [1, 17]
    assert values["plan"]["memory"]["host"]["by_purpose"]["kv"] == 10 << 30


def test_where_nothing_can_run_it_says_so() -> None:
    only_bad = ScanSummary(rows=1, problems={"bad_json": InputProblem(count=1, first_line=1, message="no JSON")})
    forecast = Forecast(input="in", detected="lines", model="m", summary=only_bad)
    assert "no row can be served" in drawn(forecast, 80)
    assert (forecast.as_dict()["plan"], forecast.as_dict()["given"]) == (None, "")
