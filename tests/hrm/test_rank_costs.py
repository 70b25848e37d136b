"""What ranks exchange, in the ledger: bytes of sums and gathers, and their seconds in the phases of a layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moelight.core.dtypes import BFLOAT16
from moelight.core.errors import ConfigError
from moelight.core.policy import Policy
from moelight.hrm import costs
from moelight.hrm.cost_model import CostModel
from moelight.hrm.estimate import cost_model_of
from moelight.hrm.machine_model import EXCHANGE_S, Speeds, speeds_of
from moelight.profiles.hardware import load_hardware_profile, part_of
from moelight.profiles.model import ModelProfile
from moelight.profiles.model_files import load_model_profile

MIXTRAL = load_model_profile("mixtral-8x7b")
SPEEDS = replace(speeds_of(load_hardware_profile("cpu-avx2")), exchange=2e9, exchange_s=1e-4)


def cost_of(model: ModelProfile, speeds: Speeds = SPEEDS) -> CostModel:
    return cost_model_of(model, Policy(model=model.name), speeds, BFLOAT16)


def test_a_rank_has_a_part_of_the_experts_and_heads() -> None:
    half = MIXTRAL.on_ranks(2)
    assert (half.experts.num_experts, half.attention.num_heads, half.attention.num_kv_heads) == (4, 16, 4)
    assert (half.ranks, half.head_ranks, half.routed_experts) == (2, 2, 8)
    with pytest.raises(ConfigError, match="--tp 3 does not divide the 8 experts of"):
        MIXTRAL.on_ranks(3)


def test_exchanges_take_the_time_of_their_bytes_and_of_their_overhead() -> None:
    half, tokens = MIXTRAL.on_ranks(2), 64
    slow, free = cost_of(half), cost_of(half, replace(SPEEDS, exchange=float("inf"), exchange_s=0.0))
    elements = costs.layer_elements(half)[0]
    state, logits = 2 * half.hidden_size, 4 * half.vocab_size
    assert slow.sum_s(tokens) == pytest.approx(1e-4 + tokens * state / 2e9)  # each rank sends and receives a half twice
    assert costs.sent_bytes(half, BFLOAT16, tokens) == tokens * state
    gathered = slow.after_s(elements, tokens, moe=True) - free.after_s(elements, tokens, moe=True)
    assert gathered == pytest.approx(2e-4 + 2 * tokens * state / 2 / 2e9)
    assert slow.head_s(tokens) - free.head_s(tokens) == pytest.approx(1e-4 + tokens * logits / 2 / 2e9)
    layers = half.num_layers
    every = layers * (slow.sum_s(tokens) + gathered) + 1e-4 + tokens * logits / 2 / 2e9
    assert slow.exchanges_s(tokens, tokens) == pytest.approx(every)


def test_one_rank_exchanges_nothing() -> None:
    free = replace(SPEEDS, exchange=float("inf"), exchange_s=0.0)
    assert cost_of(MIXTRAL).head_s(8) == cost_of(MIXTRAL, free).head_s(8)
    assert cost_of(MIXTRAL).sum_s(8) == cost_of(MIXTRAL).exchanges_s(8, 8) == 0


def test_cards_exchange_over_their_links_and_processors_as_their_profile_says() -> None:
    card = speeds_of(part_of(load_hardware_profile("2xt4"), 2))
    assert (card.exchange, card.exchange_s) == (min(card.h2d, card.d2h), EXCHANGE_S["gpu"])
    machine = load_hardware_profile("cpu-avx2")
    stated = replace(machine, measured=(("exchange", 3e9), ("exchange_latency", 5e-5)))
    assert (speeds_of(stated).exchange, speeds_of(stated).exchange_s) == (3e9, 5e-5)
