"""Roofs of a steady pass: each rises and falls with what it is made of, and the largest binds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moelight.core.dtypes import FLOAT32
from moelight.core.policy import Policy
from moelight.hrm import costs
from moelight.hrm.estimate import Estimate, Rates, estimate, flops_per_token
from moelight.hrm.placement import place
from moelight.profiles.workload import Workload
from tests.shapes import small_model, small_policy

MODEL = small_model((True, True, True), experts=4)
WORK = Workload(num_requests=64, prompt_len=8, max_prompt_len=8, gen_len=8)
RATES = Rates(disk=1e6, link=1e7, near_memory=1e9, host_memory=1e8, flops=1e9)


def priced(policy: Policy, rates: Rates = RATES) -> Estimate:
    return estimate(MODEL, policy, WORK, dtype=FLOAT32, rates=rates)


def test_the_link_carries_every_streamed_page_once() -> None:
    policy = small_policy(MODEL, discrete=True, near=3, host=4)
    roofs, placement = priced(policy).roofs_s, place(MODEL, policy)
    page = costs.page_bytes(MODEL, FLOAT32)
    assert roofs["link"] == pytest.approx(9 * page / 1e7)
    assert roofs["disk"] == pytest.approx(5 * page / 1e6)
    assert len(placement.streamed) == 9


def test_without_a_link_there_is_no_such_roof() -> None:
    assert "link" not in priced(small_policy(MODEL, discrete=False, near=3)).roofs_s


def test_every_micro_batch_reads_the_weights_again() -> None:
    one = replace(small_policy(MODEL, discrete=True, near=12), micro_batch_size=8)
    four = replace(one, micro_batch_size=2)
    assert priced(four).roofs_s["memory"] > 2 * priced(one).roofs_s["memory"]
    assert priced(four).roofs_s["compute"] == priced(one).roofs_s["compute"]


@pytest.mark.parametrize("name", ["disk", "link", "flops"])
def test_the_binding_roof_is_the_slow_part(name: str) -> None:
    roof = "compute" if name == "flops" else name
    slow = priced(small_policy(MODEL, discrete=True, near=2, host=2), replace(RATES, **{name: 1.0}))
    assert slow.binding == roof
    faster = priced(small_policy(MODEL, discrete=True, near=2, host=2), replace(RATES, **{name: 2.0}))
    assert faster.tokens_per_s == pytest.approx(2 * slow.tokens_per_s)


@pytest.mark.parametrize("discrete", [True, False])
def test_a_page_more_in_near_memory_is_never_slower(discrete: bool) -> None:
    speeds = [priced(small_policy(MODEL, discrete=discrete, near=near)).tokens_per_s for near in range(13)]
    assert speeds == sorted(speeds)
    assert speeds[-1] > speeds[0]


def test_a_token_meets_its_own_experts_only() -> None:
    """Two flop per weight: three layers of one expert each, and everything dense except the unused embedding rows."""
    dense = costs.dense_bytes(MODEL, FLOAT32) / 4
    experts = 3 * costs.page_bytes(MODEL, FLOAT32) / 4
    assert flops_per_token(MODEL, FLOAT32) == pytest.approx(2 * (dense - 32 * 8 + experts))
    assert flops_per_token(small_model((True,) * 3, experts=9), FLOAT32) < 1.1 * flops_per_token(MODEL, FLOAT32)
