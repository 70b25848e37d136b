"""The integer programme: for one candidate its homes are the best of all, with and without fixed shares."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moelight.hrm.estimate import job_s
from moelight.optimizer.milp import solve
from moelight.optimizer.problem import Candidates, Problem, make_candidates, variants
from tests.optimizer.drawn import drawn_problem
from tests.optimizer.exhaustive import Policies, every, fits, seconds
from tests.shapes import examples

MOST_POLICIES = 60_000


def one_candidate(seed: int) -> tuple[Problem, Candidates, Policies]:
    """A problem, sizes for one of its settings, and every way to place its pages and cache that fits."""
    draw, problem = random.Random(seed), drawn_problem(seed)
    variant = draw.choice(list(variants(problem)))
    some = every(problem, variant.attention_device, variant.ffn_device, variant.schedule)
    assume(len(some.batch_size) <= MOST_POLICIES)
    one = draw.randrange(len(some.batch_size))
    same = np.ones(len(some.batch_size), dtype=bool)
    for name in ("batch_size", "micro_batch_size", "micro_batch_tokens"):
        same &= getattr(some, name) == getattr(some, name)[one]
    sizes = (some.batch_size[one], some.micro_batch_size[one], some.micro_batch_tokens[one])
    candidate = make_candidates(problem, variant, *map(np.int64, sizes), np.int64(some.prompt_micro_batches))
    some = some.at(np.flatnonzero(same))
    return problem, candidate, some.at(np.flatnonzero(fits(problem, some)))


@examples(100)
@given(seed=st.integers(0, 1 << 30))
def test_the_programme_finds_the_best_homes(seed: int) -> None:
    problem, candidate, some = one_candidate(seed)
    result = solve(problem, candidate)
    assert (result is None) == (len(some.batch_size) == 0)
    if result is None:
        return
    assert result.seconds == pytest.approx(seconds(problem, some).min(), rel=1e-6)
    priced = job_s(candidate.cost_model, problem.workload, candidate, result.placed)
    assert result.seconds == pytest.approx(float(priced), rel=1e-6)
    assert all(count == round(count) for count in (result.placed.from_host, result.placed.from_disk))
    assert 0 <= result.placed.offloaded <= problem.pages


@examples(60)
@given(seed=st.integers(0, 1 << 30))
def test_fixed_shares_are_met_and_the_rest_is_the_best(seed: int) -> None:
    """The shares of one way to place everything, some of them fixed: the best of those that have them."""
    draw = random.Random(seed)
    problem, candidate, some = one_candidate(seed)
    assume(len(some.batch_size) > 0)
    one = draw.randrange(len(some.batch_size))
    on_host = some.resident if candidate.ffn_device == "cpu" else some.from_host + some.computed
    on_device = 0 * some.resident if candidate.ffn_device == "cpu" else some.resident
    counts = {"weights.device": on_device, "weights.host": on_host, "weights.disk": some.from_disk}
    if candidate.ffn_device == "split":
        counts["cpu_experts"] = some.computed
    keys = draw.sample(sorted(counts), draw.randint(1, len(counts)))
    fixed = {key: int(counts[key][one]) / problem.pages for key in keys}
    same = np.logical_and.reduce([counts[key] == counts[key][one] for key in keys])
    if candidate.attention_device == "gpu" and draw.random() < 0.5:
        cache = -(-some.kv_tokens // 32)
        fixed["kv.device"] = float(some.blocks[one] / cache[one])
        same &= some.blocks == some.blocks[one]
    result = solve(replace(problem, fixed=fixed), candidate)
    assert result is not None
    assert result.seconds == pytest.approx(seconds(problem, some.at(np.flatnonzero(same))).min(), rel=1e-6)
