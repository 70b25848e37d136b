"""The optimizer against exhaustive enumeration on small problems: as fast, as feasible, and its bound holds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moelight.core.dtypes import FLOAT32
from moelight.core.errors import BudgetError
from moelight.hrm.estimate import estimate
from moelight.hrm.footprint import footprint
from moelight.optimizer.bound import least_seconds
from moelight.optimizer.explain import infeasible_error
from moelight.optimizer.optimize import policy_of
from moelight.optimizer.problem import Problem
from moelight.optimizer.search import feasible, search
from tests.optimizer.drawn import TOKENS, drawn_problem
from tests.optimizer.exhaustive import every, least_seconds_of_all, settings_of
from tests.shapes import examples

MOST_POLICIES = 60_000


def with_tokens(problem: Problem, seed: int) -> Problem:
    """``problem`` with the size of prompt micro-batches fixed too, so that every policy can be enumerated."""
    tokens = random.Random(seed).choice(TOKENS[:8])
    return replace(problem, fixed={**problem.fixed, "micro_batch_tokens": tokens})


@examples(20)
@given(seed=st.integers(0, 1 << 30))
def test_the_optimizer_equals_enumeration(seed: int) -> None:
    problem = with_tokens(drawn_problem(seed), seed)
    assume(sum(len(every(problem, *variant).batch_size) for variant in settings_of(problem)) <= MOST_POLICIES)
    least, result = least_seconds_of_all(problem), search(problem)
    assert (result is None) == (least == float("inf")) == (not feasible(problem))
    if result is None:
        with pytest.raises(BudgetError):
            raise infeasible_error(problem)
        return
    policy = policy_of(problem, result)
    priced = estimate(problem.model, policy, problem.workload, problem.speeds, dtype=FLOAT32)
    took = problem.workload.num_requests * problem.workload.gen_len / priced.tokens_per_s
    assert took == pytest.approx(least, rel=1e-6)
    assert least_seconds(problem, took) <= least * (1 + 1e-9)
    taken = footprint(problem.model, policy, dtype=FLOAT32)
    assert all(
        taken.total(tier) <= problem.capacity_bytes[tier]
        for tier in ("device", "host")
        if tier in problem.capacity_bytes
    )


@pytest.mark.thorough
@examples(15)
@given(seed=st.integers(0, 1 << 30))
def test_no_enumerated_policy_beats_a_free_choice_or_its_bound(seed: int) -> None:
    """With every key open the optimizer has all that is enumerated to choose from, and more."""
    problem = drawn_problem(seed, most_requests=3)
    assume(sum(len(every(problem, *variant).batch_size) for variant in settings_of(problem)) <= MOST_POLICIES)
    least, result = least_seconds_of_all(problem), search(replace(problem, fixed={}))
    assert result is not None or least == float("inf")
    if result is not None:
        assert result.seconds <= least * 1.002
        assert least_seconds(replace(problem, fixed={}), result.seconds) <= min(least, result.seconds)


@examples(8)
@given(seed=st.integers(0, 1 << 30))
def test_the_figure_in_a_refusal_is_enough_and_no_more_than_enough(seed: int) -> None:
    """Of one tier, the other having plenty; a byte less is refused with the same figure."""
    problem = drawn_problem(seed)
    tier = "device" if problem.has_gpu and seed % 2 else "host"
    fixed = {"ffn_device": "gpu", "attention_device": "cpu"} if tier == "device" else {}
    problem = replace(
        problem,
        fixed={**problem.fixed, **fixed},
        capacity_bytes={**dict.fromkeys(problem.capacity_bytes, 1 << 50), tier: 1},
    )
    needed = infeasible_error(problem).needed_bytes
    assert infeasible_error(problem).tier == tier
    assert search(replace(problem, capacity_bytes={**problem.capacity_bytes, tier: needed})) is not None
    short = replace(problem, capacity_bytes={**problem.capacity_bytes, tier: needed - 1})
    assert search(short) is None
    assert (infeasible_error(short).tier, infeasible_error(short).needed_bytes) == (tier, needed)


def test_where_no_memory_alone_would_do_both_are_named() -> None:
    """And what is named is enough of the first, and no more than enough, where the second has plenty."""
    fixed = {"ffn_device": "gpu", "attention_device": "cpu"}
    problem = replace(drawn_problem(1, gpu=True), fixed=fixed, capacity_bytes={"device": 1, "host": 1, "disk": 1 << 50})
    error = infeasible_error(problem)
    assert error.tier == "device" and str(error).endswith("of host memory")
    for device, fits in ((error.needed_bytes, True), (error.needed_bytes - 1, False)):
        sizes = {**problem.capacity_bytes, "device": device, "host": 1 << 50}
        assert (search(replace(problem, capacity_bytes=sizes)) is not None) == fits


@examples(5)
@given(seed=st.integers(0, 1 << 30), more=st.floats(1, 3))
def test_more_memory_is_never_slower(seed: int, more: float) -> None:
    problem = with_tokens(drawn_problem(seed, most_requests=2), seed)
    before = search(problem)
    assume(before is not None)
    for tier, size in problem.capacity_bytes.items():
        grown = search(replace(problem, capacity_bytes={**problem.capacity_bytes, tier: int(size * more)}))
        assert grown is not None and before is not None
        assert grown.seconds <= before.seconds * (1 + 1e-9)
