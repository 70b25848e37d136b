"""Answers that only the context limits: a plan for their expected length has room for the longest one, or says what it
takes."""

from __future__ import annotations

import pytest

from moelight.core.errors import BudgetError, ConfigError
from moelight.hrm.footprint import kv_buffer_tokens
from moelight.optimizer.optimize import make_plan
from moelight.optimizer.options import PlanOptions
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import MOST_TOKENS, Workload

OPEN = Workload(max_gen_len=MOST_TOKENS)


def test_the_buffer_of_a_micro_batch_holds_the_longest_sequence() -> None:
    """Where attention on the GPU is best, and would take smaller micro-batches for short answers."""
    model, hardware = load_model_profile("mixtral-8x7b"), load_hardware_profile("t4")
    policy = make_plan(
        hardware, model, OPEN, PlanOptions(limits={"host": 48 << 30}, cache=False), name="mixtral-8x7b"
    ).policy
    assert policy.attention_device == "gpu"
    assert kv_buffer_tokens(policy) >= model.max_positions
    assert policy.kv_tokens >= model.max_positions


def test_a_memory_too_small_for_the_longest_answer_alone_is_refused_with_its_size() -> None:
    model, hardware = load_model_profile("qwen3-30b-a3b"), load_hardware_profile("cpu-amx")
    with pytest.raises(
        BudgetError, match=r"may reach a length of 40,960 tokens, whose KV cache takes 3.8GiB: set max_"
    ):
        make_plan(hardware, model, OPEN, PlanOptions(limits={"host": 6 << 30}, cache=False), name="qwen3-30b-a3b")


def test_the_longest_answer_is_not_shorter_than_the_expected_one() -> None:
    with pytest.raises(ConfigError, match=r"gen_len \(256\) exceeds max_gen_len \(255\)"):
        Workload(max_gen_len=255)
    assert Workload(gen_len=7).longest_answer == 7
