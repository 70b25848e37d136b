"""Branch and bound: no policy of a box is faster than the box's bound, whatever the order, curves and fixed values."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moelight.hrm.machine_model import at_best
from moelight.hrm.schedule_time import SCHEDULE_TERMS
from moelight.optimizer import bound
from moelight.optimizer.problem import Candidates, Problem, variants
from moelight.optimizer.search import search
from moelight.profiles.workload import Workload
from tests.optimizer.drawn import drawn_problem
from tests.optimizer.exhaustive import Policies, every, fits, seconds
from tests.shapes import examples

MOST_POLICIES = 60_000


def those_that_fit(problem: Problem, variant: Candidates) -> Policies:
    some = every(problem, variant.attention_device, variant.ffn_device, variant.schedule)
    assume(len(some.batch_size) <= MOST_POLICIES)
    some = some.at(np.flatnonzero(fits(problem, some)))
    assume(len(some.batch_size) > 0)
    return some


@examples(100)
@given(seed=st.integers(0, 1 << 30))
def test_no_policy_of_a_box_is_faster_than_its_bound(seed: int) -> None:
    """Boxes of all shapes, each around a policy that fits, in every order of work."""
    draw, problem = random.Random(seed), replace(drawn_problem(seed), schedules=tuple(SCHEDULE_TERMS))
    variant = draw.choice(list(variants(problem)))
    some = those_that_fit(problem, variant)
    if variant.schedule != "module":  # cgopipe's boxes hold every other order
        variant = replace(variant, schedule="cgopipe")
    took, share = seconds(problem, some), some.blocks / -(-some.kv_tokens // 32)
    parts = -(-some.batch_size // some.micro_batch_size)
    variant = replace(variant, cost_model=replace(variant.cost_model, speeds=at_best(variant.cost_model.speeds)))
    for _ in range(12):
        inside, sides = box_around(draw, problem, some, parts, share)
        box = bound._trimmed(problem, bound._Boxes(**{side: np.array([float(v)]) for side, v in sides.items()}))
        assert len(box) == 1
        assert bound._bound_s(problem, variant, box)[0] <= took[inside].min() * (1 + 1e-9)


def box_around(draw: random.Random, problem: Problem, some: Policies, parts, share):  # type: ignore[no-untyped-def]
    """Sides of a box around one of ``some``, and which of them are inside."""
    one = draw.randrange(len(some.batch_size))

    def side(value: int, low: int, high: int) -> tuple[int, int]:
        reach = draw.choice([0, 0, 1, 2, high])
        return max(low, value - draw.randint(0, reach)), min(high, value + draw.randint(0, reach))

    requests = problem.workload.num_requests
    n0, n1 = side(int(some.batch_size[one]), 1, requests)
    b0, b1 = side(int(parts[one]), 1, requests)
    c0, c1 = side(int(some.computed[one]), 0, problem.pages) if some.ffn_device == "split" else (0, 0)
    reach = draw.choice([0.0, 0.0, 0.2, 1.0]) if some.attention_device == "gpu" else 0.0
    k0, k1 = max(0.0, share[one] - reach * draw.random()), min(1.0, share[one] + reach * draw.random())
    t, prompt_batches = int(some.micro_batch_tokens[one]), int(some.prompt_micro_batches)
    t0, t1 = side(t, 1, 1 << 14)
    r0, r1 = t0 * prompt_batches, t1 * prompt_batches
    if draw.random() < 0.5:
        r0, r1 = max(t0, r0 // 2), 2 * r1
    inside = (some.batch_size >= n0) & (some.batch_size <= n1) & (parts >= b0) & (parts <= b1)
    prefill = some.micro_batch_tokens * prompt_batches
    inside &= (some.micro_batch_tokens >= t0) & (some.micro_batch_tokens <= t1) & (prefill >= r0) & (prefill <= r1)
    inside &= (some.computed >= c0) & (some.computed <= c1)
    inside &= (share >= k0 - 1e-9) & (share <= k1 + 1e-9)
    smallest, largest = problem.rings(some)  # type: ignore[arg-type]
    g0, g1 = side(int(some.ring_pages[one]), smallest, largest)
    inside &= (some.ring_pages >= g0) & (some.ring_pages <= g1)
    sizes = {"n0": n0, "n1": n1, "b0": b0, "b1": b1, "t0": t0, "t1": t1, "r0": r0, "r1": r1}
    return inside, {
        **sizes,
        "c0": c0,
        "c1": c1,
        "k0": k0,
        "k1": k1,
        "g0": g0,
        "g1": g1,
        "least_s": 0,
        "side": 0,
        "length": 0,
    }


@examples(40)
@given(seed=st.integers(0, 1 << 30))
def test_the_boxes_of_a_setting_hold_every_candidate(seed: int) -> None:
    problem = drawn_problem(seed, most_requests=60)
    for variant in variants(problem):
        boxes = bound._all(problem, variant)
        n = random.Random(seed).randint(1, problem.workload.num_requests)
        for b in {1, n // 2 + 1, n}:
            holds = (boxes.n0 <= n) & (boxes.n1 >= n) & (boxes.b0 <= b) & (boxes.b1 >= b)
            assert holds.any()


@examples(40)
@given(seed=st.integers(0, 1 << 30))
def test_cutting_a_box_loses_no_candidate(seed: int) -> None:
    problem = drawn_problem(seed, most_requests=200)
    variant = random.Random(seed).choice(list(variants(problem)))
    boxes = bound._all(problem, variant)
    lengths = bound._lengths(problem, boxes)
    boxes = replace(boxes, side=np.argmax(lengths, axis=0)).at(np.flatnonzero(np.max(lengths, axis=0) > 0))
    halves = bound._halves(problem, boxes)
    for index in range(len(boxes)):
        for n in np.unique(np.linspace(boxes.n0[index], boxes.n1[index], 5).astype(int)):
            b = min(int(boxes.b1[index]), int(n))
            assert b < boxes.b0[index] or np.any(
                (halves.n0 <= n) & (halves.n1 >= n) & (halves.b0 <= b) & (halves.b1 >= b)
            )


@pytest.mark.parametrize("requests", [7, 90])
def test_the_bound_is_within_its_gap_where_boxes_suffice(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything in host memory, which is all that is slow: nothing is left to chance."""
    monkeypatch.setattr(bound, "MOST_BOXES", {False: 90_000})
    problem = drawn_problem(4, gpu=False)
    work = Workload(num_requests=requests, prompt_len=4, max_prompt_len=4, gen_len=8)
    fixed = {**problem.fixed, "micro_batch_tokens": 512}
    problem = replace(problem, workload=work, capacity_bytes={"host": 1 << 40, "disk": 0}, fixed=fixed)
    match = search(problem)
    assert match is not None
    least = bound.least_seconds(problem, match.seconds)
    assert least <= match.seconds
    assert least >= match.seconds * (1 - 5 * bound.GAP)
