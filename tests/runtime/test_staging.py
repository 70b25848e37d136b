"""The memory beside the link: as large as the plan says, shares that do not overlap, arrivals that are copies."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from moelight.core.dtypes import BFLOAT16, FLOAT32, DType
from moelight.core.policy import Policy
from moelight.hrm import costs
from moelight.hrm.footprint import staging_token_bytes
from moelight.models.moe import Routed
from moelight.runtime.microbatch import StagingBuffers
from moelight.weights.torch_dtypes import to_torch
from tests.shapes import small_model, small_policy

MODEL = small_model()
TOKENS = 11
POLICIES = [
    replace(small_policy(MODEL, discrete=True), attention_device=attention, ffn_device=ffn)
    for attention, ffn in product(("cpu", "gpu"), ("cpu", "gpu", "split"))
    if (attention, ffn) != ("cpu", "cpu")
]


def shares(policy: Policy, dtype: DType) -> tuple[Tensor, list[StagingBuffers]]:
    """The arena of a pass of eleven tokens, and the shares of its micro-batches of 1, 7 and 3."""
    arena = torch.zeros(TOKENS * staging_token_bytes(MODEL, policy, dtype), dtype=torch.uint8)
    space = StagingBuffers.in_arena(arena, MODEL, policy, dtype, TOKENS)
    return arena, [space.share(row, tokens) for row, tokens in ((0, 1), (1, 7), (8, 3))]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.attention_device}-{policy.ffn_device}")
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_every_byte_of_the_arena_belongs_to_one_place_of_one_micro_batch(policy: Policy, dtype: DType) -> None:
    arena, cut = shares(policy, dtype)
    places = [
        position for share in cut for position in (share.down, share.up, share.routing, share.routed, share.experts)
    ]
    assert sum(position.numel() for position in places) == arena.numel()
    for position in places:
        position.add_(1)
    assert arena.eq(1).all()


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_what_crosses_fits_and_arrives_unchanged(dtype: DType) -> None:
    """Queries, keys and values side by side; what experts need, and what they give; each to the last byte."""
    kind = to_torch(dtype)
    policy = next(policy for policy in POLICIES if (policy.attention_device, policy.ffn_device) == ("cpu", "split"))
    _, (_, share, _) = shares(policy, dtype)
    q, k, v = (torch.randn(7, heads, 8).to(kind) for heads in (2, 1, 1))
    ids = torch.arange(7, dtype=torch.int32).unsqueeze(1)
    routed = Routed(x=torch.randn(7, 8).to(kind), weights=torch.randn(7, 1), ids=ids)
    share.attention_output(q.shape).fill_(9)
    share.experts_output(routed.x.shape, routed.x.dtype).fill_(8)
    landed, present = share.take(q, k, v), share.take_routed(routed)
    wanted = [q, k, v, routed.x, routed.weights, routed.ids]
    assert all(map(torch.equal, [*landed, present.x, present.weights, present.ids], wanted))
    assert share.attention_output(q.shape).eq(9).all()
    assert share.experts_output(routed.x.shape, routed.x.dtype).eq(8).all()
    q.zero_()
    assert landed[0].ne(0).any(), "what landed is a copy"
    assert share.routing.numel() + share.routed.numel() == costs.routed_bytes(MODEL, dtype, 7)


def test_keys_and_values_alone_cross_too() -> None:
    policy = next(policy for policy in POLICIES if (policy.attention_device, policy.ffn_device) == ("gpu", "gpu"))
    _, (_, share, _) = shares(policy, FLOAT32)
    q, k, v = (torch.randn(7, heads, 8) for heads in (2, 1, 1))
    landed = share.take(q[:0], k, v)
    assert landed[0].shape == (0, 2, 8)
    assert torch.equal(landed[1], k)
    assert torch.equal(landed[2], v)
    assert share.down.numel() == 7 * costs.kv_layer_bytes(MODEL, FLOAT32)
