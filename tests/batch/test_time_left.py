"""The time left of simulated jobs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from moelight.batch.progress import JobCounts, JobStart
from moelight.batch.time_left import TimeLeft
from moelight.core.request import Completion

MAX_TOKENS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Seconds a pass, a prompt token, a generated token."""

    each_pass: float = 0.0
    prompt: float = 0.0
    generated: float = 0.0


def foretold(
    lengths: list[int], cost: Cost, *, places: int, prompt: int, start: JobStart | None = None
) -> list[tuple[float, float | None, float]]:
    """(share of the time gone, seconds foretold, seconds it then took) after each pass of a job whose answers would
    be ``lengths`` if nothing cut them."""
    eta = TimeLeft()
    if start is not None:
        eta.started(start)
    waiting, running, done = list(lengths), list[list[int]](), list[int]()
    elapsed, passes, prompted, generated, heard = 3.0, 0, 0, 0, list[tuple[float, float | None]]()
    while waiting or running:
        fresh = [[waiting.pop(0), 0] for _ in range(min(places - len(running), len(waiting)))]
        running += fresh
        elapsed += cost.each_pass + cost.prompt * prompt * len(fresh) + cost.generated * len(running)
        passes, prompted, generated = passes + 1, prompted + prompt * len(fresh), generated + len(running)
        for sequence in running:
            sequence[1] += 1
        for length, tokens in running:
            if tokens >= min(length, MAX_TOKENS):
                done.append(tokens)
                ended = Completion(
                    index=0, text="", token_ids=(0,) * tokens, finish_reason="stop", prompt_tokens=prompt
                )
                eta.completion(ended, room=MAX_TOKENS)
        running = [item for item in running if item[1] < min(item[0], MAX_TOKENS)]
        if passes % 4 and waiting:  # it is told a few times a second, not at every pass
            continue
        eta.counts(
            JobCounts(
                total=len(lengths),
                completed=len(done),
                running=len(running),
                waiting=len(waiting),
                prompt_tokens=prompted,
                expected_prompt_tokens=prompt * len(lengths),
                generation_tokens=generated,
                expected_tokens=sum(done) + (len(lengths) - len(done)) * MAX_TOKENS,
                passes=passes,
                elapsed_s=elapsed,
                running_s=elapsed - 3.0,
                state="in_progress",
            )
        )
        heard.append((elapsed, eta.remaining_s))
    return [((at - 3.0) / (elapsed - 3.0), left, elapsed - at) for at, left in heard]


def geometric(draw: random.Random) -> int:
    return 1 + int(draw.expovariate(1 / 60))


def uniform(draw: random.Random) -> int:
    return draw.randint(1, 150)


def two_kinds(draw: random.Random) -> int:
    return draw.choice((8, MAX_TOKENS))


def never(draw: random.Random) -> int:
    return 10 * MAX_TOKENS


@pytest.mark.parametrize(
    ("length", "cost"),
    [
        (geometric, Cost(generated=0.01)),
        (uniform, Cost(each_pass=0.5)),
        (two_kinds, Cost(each_pass=0.2, prompt=0.002, generated=0.004)),
        (never, Cost(each_pass=0.2, generated=0.004)),
    ],
)
def test_after_a_tenth_of_a_job_the_time_left_is_known(length: Callable[[random.Random], int], cost: Cost) -> None:
    draw = random.Random(0)
    told = foretold([length(draw) for _ in range(2000)], cost, places=64, prompt=40)
    errors = [abs((left or 0.0) - took) / took for share, left, took in told if 0.1 <= share <= 0.6]
    assert max(errors) < 0.2


def test_before_anything_is_measured_the_plan_speaks_and_then_the_run() -> None:
    plan = JobStart(
        input="in.jsonl",
        prompt_tokens=300 * 40,
        expected_tokens=300 * MAX_TOKENS,
        predicted_s=300.0,
        predicted_prompt_s=10.0,
    )
    eta = TimeLeft()
    assert eta.remaining_s is None
    eta.started(plan)
    assert eta.remaining_s == 300.0
    # The machine is three times slower than the plan: soon the plan is outvoted.
    told = foretold(
        [10 * MAX_TOKENS] * 300, Cost(generated=3 * 290 / (300 * MAX_TOKENS)), places=30, prompt=40, start=plan
    )
    first, later = told[0], next(item for item in told if item[0] > 0.1)
    assert first[1] is not None and 250 < first[1] < 900
    assert later[1] == pytest.approx(later[2], rel=0.2)


def test_prompts_that_are_only_scored_are_work_too() -> None:
    """100,000 prompt tokens, 1,000 a second, three times as slow as planned."""
    eta = TimeLeft()
    eta.started(JobStart(input="in.jsonl", prompt_tokens=100_000, predicted_s=33.0))
    for second in range(1, 21):
        eta.counts(
            JobCounts(
                total=1000,
                completed=10 * second,
                running=50,
                waiting=950 - 10 * second,
                prompt_tokens=1000 * second,
                expected_prompt_tokens=100_000,
                passes=second,
                elapsed_s=float(second),
                running_s=float(second),
                state="in_progress",
            )
        )
    assert eta.remaining_s == pytest.approx(80, rel=0.1)


def test_rows_of_an_earlier_run_are_no_speed() -> None:
    """Nine tenths were done before; this run does one row a second."""
    eta = TimeLeft()
    for second in range(1, 21):
        ended = Completion(index=0, text="", token_ids=(0,) * 10, finish_reason="length", prompt_tokens=5)
        eta.completion(ended, room=10)
        eta.counts(
            JobCounts(
                total=1000,
                completed=900 + second,
                resumed=900,
                running=1,
                waiting=99 - second,
                generation_tokens=10 * second,
                expected_tokens=1000,
                passes=10 * second,
                elapsed_s=float(second),
                running_s=float(second),
                state="in_progress",
            )
        )
    assert eta.remaining_s == pytest.approx(80, rel=0.1)
