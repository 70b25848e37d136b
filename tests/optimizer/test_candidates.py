"""Candidates: within bounds, each once, as fixed values say, and from every one a way to its neighbours."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.optimizer.candidates import around, first_sample, scattered
from moelight.optimizer.problem import Candidates, Problem, variants
from moelight.profiles.workload import Workload
from tests.optimizer.drawn import drawn_problem
from tests.shapes import examples

FIXES: list[dict[str, int | float]] = [
    {},
    {"batch_size": 9},
    {"micro_batch_size": 4},
    {"num_micro_batches": 3},
    {"num_micro_batches": 3, "micro_batch_size": 4},
    {"micro_batch_tokens": 48},
    {"batch_size": 9, "micro_batch_tokens": 5},
    {"kv_tokens": 300},
    {"prompt_micro_batches": 3},
]


def every_look(problem: Problem, seed: int) -> list[Candidates]:
    """The first look at some settings, and what is around one of it, in steps and at random."""
    result, every = [], list(variants(problem))
    for variant in random.Random(seed).sample(every, min(4, len(every))):
        look = first_sample(problem, variant)
        result.append(look)
        if len(look.computed):
            one = look.at(random.Random(seed).randrange(len(look.computed)))
            few = look.at(np.arange(min(3, len(look.computed))))
            result += [around(problem, one, step=step) for step in (1.0, 0.1, 0.0)]
            result += [around(problem, few, step=0.3), scattered(problem, few, np.random.default_rng(seed), 100)]
    return result


@pytest.mark.parametrize("fixes", FIXES)
@examples(12)
@given(seed=st.integers(0, 1 << 30))
def test_candidates_are_policies_and_have_what_is_fixed(fixes: dict[str, int | float], seed: int) -> None:
    problem = replace(drawn_problem(seed), fixed=fixes)
    work = Workload(num_requests=40, prompt_len=9, max_prompt_len=20, gen_len=6)
    problem = replace(problem, workload=work)
    for look in every_look(problem, seed):
        n, mu, t = look.batch_size, look.micro_batch_size, look.micro_batch_tokens
        assert len(n) and np.all((mu >= 1) & (mu <= n) & (t >= mu))
        assert np.all((n >= problem.sequences[0]) & (n <= problem.sequences[1]))
        assert np.all((look.computed >= 0) & (look.computed <= problem.pages))
        assert np.all(np.isnan(look.device_kv) | ((look.device_kv >= 0) & (look.device_kv <= 1)))
        assert np.all(look.prompt_micro_batches >= 1)
        values = {
            "batch_size": n,
            "micro_batch_size": mu,
            "num_micro_batches": -(-n // mu),
            "micro_batch_tokens": t,
            "kv_tokens": look.kv_tokens,
            "prompt_micro_batches": look.prompt_micro_batches,
        }
        for key, value in fixes.items():
            assert np.all(values[key] == value)


@examples(30)
@given(seed=st.integers(0, 1 << 30))
def test_few_requests_are_looked_at_whole(seed: int) -> None:
    problem = drawn_problem(seed, most_requests=8)
    requests = problem.workload.num_requests
    for variant in variants(problem):
        candidate = first_sample(problem, variant)
        cuts = set(
            zip(
                candidate.batch_size.tolist(),
                (-(-candidate.batch_size // candidate.micro_batch_size)).tolist(),
                strict=True,
            )
        )
        smallest = {(n, -(-n // -(-n // b))) for n in range(1, requests + 1) for b in range(1, n + 1)}
        assert cuts == smallest


@examples(30)
@given(seed=st.integers(0, 1 << 30))
def test_single_steps_lead_everywhere(seed: int) -> None:
    """Around a candidate are those with a sequence, a micro-batch, a wave, a page more or less."""
    problem = replace(
        drawn_problem(seed, gpu=True),
        workload=Workload(num_requests=100, prompt_len=9, max_prompt_len=20, gen_len=6),
    )
    for variant in variants(problem):
        look = first_sample(problem, variant)
        one = look.at(len(look.computed) // 2)
        resident = around(problem, one, step=0.0)
        n, mu = int(one.batch_size), int(one.micro_batch_size)
        result = set(zip(resident.batch_size.tolist(), resident.micro_batch_size.tolist(), strict=True))
        b = -(-n // mu)
        for other in (n - 1, n, n + 1):
            if 1 <= other <= 100:
                assert (other, -(-other // min(b, other))) in result
        for parts in (b - 1, b + 1):
            if 1 <= parts <= n:
                assert (n, -(-n // parts)) in result
        waves = -(-100 // n)
        for more in (waves - 1, waves + 1):
            if more >= 1:
                assert -(-100 // more) in resident.batch_size
        if variant.ffn_device == "split":
            pages = int(one.computed)
            resident_pages = {pages - 1, pages, pages + 1} & set(range(problem.pages + 1))
            assert resident_pages <= set(resident.computed.astype(int).tolist())
