"""The space that is searched: settings that can be, contradictions by name, sizes that follow from what is fixed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.errors import ConfigError
from moelight.optimizer.problem import Problem, kv_tokens, make_candidates, variants
from moelight.profiles.workload import Workload
from tests.optimizer.drawn import drawn_problem
from tests.shapes import examples

PLAIN = drawn_problem(1, gpu=True)


def fixed(**values: object) -> Problem:
    return replace(PLAIN, fixed={key.replace("__", "."): value for key, value in values.items()})  # type: ignore[misc]


def devices(problem: Problem) -> set[tuple[str, str]]:
    return {(variant.attention_device, variant.ffn_device) for variant in variants(problem)}


def test_without_a_gpu_everything_is_on_the_cpu() -> None:
    assert devices(drawn_problem(1, gpu=False)) == {("cpu", "cpu")}
    assert len(devices(PLAIN)) == 6


@pytest.mark.parametrize(
    ("values", "left"),
    [
        ({"attention_device": "gpu"}, {("gpu", "cpu"), ("gpu", "gpu"), ("gpu", "split")}),
        ({"ffn_device": "split"}, {("cpu", "split"), ("gpu", "split")}),
        ({"cpu_experts": 0.5}, {("cpu", "split"), ("gpu", "split")}),
        ({"weights__device": 0.5, "attention_device": "cpu"}, {("cpu", "gpu"), ("cpu", "split")}),
        ({"kv__device": 0.5}, {("gpu", "cpu"), ("gpu", "gpu"), ("gpu", "split")}),
        ({"kv__host": 0.5}, {("gpu", "cpu"), ("gpu", "gpu"), ("gpu", "split")}),
        ({"schedule": "flexgen"}, {("cpu", "cpu"), ("gpu", "gpu")}),
    ],
)
def test_what_is_fixed_leaves_the_devices_that_can_have_it(values: dict[str, object], left: set[object]) -> None:
    assert devices(fixed(**values)) == left


def test_what_cannot_go_together_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--fix attention_device=cpu and --fix kv\.device=0\.5 contradict"):
        list(variants(fixed(attention_device="cpu", kv__device=0.5)))


@pytest.mark.parametrize(
    ("values", "range_"),
    [
        ({}, (1, 40)),
        ({"batch_size": 7}, (7, 7)),
        ({"batch_size": 70}, (70, 70)),
        ({"micro_batch_size": 8}, (8, 40)),
        ({"micro_batch_size": 50}, (50, 50)),
        ({"num_micro_batches": 3}, (3, 40)),
        ({"num_micro_batches": 3, "micro_batch_size": 5}, (11, 15)),
        ({"num_micro_batches": 9, "micro_batch_size": 5}, (41, 41)),
    ],
)
def test_sequences_that_a_fixed_cut_allows(values: dict[str, object], range_: tuple[int, int]) -> None:
    work = Workload(num_requests=40, prompt_len=4, max_prompt_len=4, gen_len=4)
    assert replace(fixed(**values), workload=work).sequences == range_


@examples(100)
@given(seed=st.integers(0, 1 << 30), block=st.sampled_from([16, 32, 64, 128]))
def test_the_cache_holds_n_sequences_of_average_length_in_whole_blocks_and_the_longest_one(
    seed: int, block: int
) -> None:
    problem = replace(drawn_problem(seed, most_requests=50), fixed={"kv_block_size": block})
    work, context = problem.workload, problem.model.max_positions
    sizes = np.arange(1, work.num_requests + 1)
    tokens = kv_tokens(problem, sizes)
    average = min(work.prompt_len + work.gen_len, context)
    assert np.all(tokens // block >= sizes * -(-average // block))
    assert np.all(tokens >= min(work.max_prompt_len + work.gen_len, context))
    assert np.all(np.diff(tokens) > 0)


def test_candidates_have_the_face_of_a_policy() -> None:
    variant = next(s for s in variants(PLAIN) if s.ffn_device == "gpu")
    some = make_candidates(PLAIN, variant, np.array([4, 3]), np.array([2, 1]), np.array([16, 32]), np.array([1, 8]))
    assert (some.attention_device, some.ffn_device, some.schedule, some.discrete) == (
        "cpu",
        "gpu",
        variant.schedule,
        True,
    )
    one = some.at(1)
    assert (int(one.batch_size), int(one.micro_batch_size), int(one.micro_batch_tokens)) == (3, 1, 32)
    assert int(one.kv_tokens) == int(kv_tokens(PLAIN, np.int64(3)))
