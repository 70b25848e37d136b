"""Seconds of one steady pass under each roof: the link, the memory, the arithmetic. The largest binds.

A steady pass carries one decode token of every living sequence and the share of prompts that replaces those that end
(DESIGN 2.2): with generations of ``gen_len`` tokens, one sequence in ``gen_len`` is new in every pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from moelight.core.dtypes import DType
from moelight.core.policy import Policy
from moelight.hrm import costs
from moelight.hrm.placement import place
from moelight.profiles.model import ModelProfile
from moelight.profiles.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What a machine sustains: bytes per second from disk, over the link, from the compute unit's and the host's
    memory; flop per second of the compute unit. ``link`` does not matter on a machine without a GPU."""

    disk: float
    link: float
    near_memory: float
    host_memory: float
    flops: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Seconds per pass by roof, and end-to-end generated tokens per second."""

    roofs_s: dict[str, float]
    tokens_per_s: float

    @property
    def binding(self) -> str:
        """The roof that binds."""
        return max(self.roofs_s, key=self.roofs_s.__getitem__)


def flops_per_token(model: ModelProfile, dtype: DType) -> float:
    """Two per weight that a token meets: everything outside the experts, and ``top_k`` experts in each MoE layer."""
    item = dtype.itemsize
    dense = costs.dense_bytes(model, dtype) / item - model.vocab_size * model.hidden_size * (not model.tie_embeddings)
    experts = model.num_moe_layers * model.router.top_k * costs.page_bytes(model, dtype) / item
    return 2.0 * (dense + experts)


def estimate(model: ModelProfile, policy: Policy, workload: Workload, *, dtype: DType, rates: Rates) -> Estimate:
    """Roofs of a steady pass of ``policy``."""
    placement = place(model, policy)
    page = costs.page_bytes(model, dtype)
    context = workload.prompt_len + workload.gen_len / 2
    alive = min(policy.batch_size, workload.num_requests, policy.kv_tokens / (workload.prompt_len + workload.gen_len))
    alive = max(alive, 1.0)
    prompt_tokens = alive * workload.prompt_len / workload.gen_len
    sweeps = -(-alive // policy.micro_batch_size) + prompt_tokens / policy.micro_batch_tokens
    weights = costs.dense_bytes(model, dtype) + len(placement.homes) * page
    roofs = {
        "disk": len(placement.on("disk")) * page / rates.disk,
        "memory": sweeps * weights / rates.near_memory,
        "compute": (alive + prompt_tokens) * flops_per_token(model, dtype) / rates.flops,
        "attention": alive * context * costs.kv_token_bytes(model, dtype) / rates.host_memory,
    }
    if placement.near == "device":
        roofs["link"] = len(placement.streamed) * page / rates.link
        seconds = max(roofs.values())
    else:
        seconds = max(roofs["disk"], max(roofs["memory"], roofs["compute"]) + roofs["attention"])
    return Estimate(roofs_s=roofs, tokens_per_s=alive / seconds)
