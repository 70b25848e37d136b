"""Seconds of a whole job and of its passes, by lane: what the engine really does, priced by the ledger.

Passes with prompts riding along and slots refilled (``job``), whole pages, both crossings, contention for host memory,
the cost of launching (``lanes``, ``acts``). Works on one policy or on arrays of candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moelight.core.dtypes import DType, dtype_named
from moelight.core.policy import Policy
from moelight.hrm import costs
from moelight.hrm.acts import Acts
from moelight.hrm.footprint import WHOLE_EXPERTS, Sizes, riding_tokens
from moelight.hrm.job import KINDS, Passes, decode_pass, passes_of, static_passes_of
from moelight.hrm.lanes import Homes, PassCost, pass_cost
from moelight.hrm.orders import MEASURED_SHARE, ROUTED_ONLY_SHARE, pass_s, routed_only
from moelight.hrm.placement import Placement, place
from moelight.hrm.speeds import Speeds
from moelight.profiles.model import ModelProfile
from moelight.profiles.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One kind of pass of a job: how many, what each carries, seconds of one, and of work on each lane."""

    name: str
    passes: float
    decode_tokens: float
    prompt_tokens: float
    seconds: float
    lanes: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a policy promises.

    Attributes:
        layer_s, pass_s: one layer, one pass in which every slot decodes.
        decode_tokens_per_s: of such passes alone.
        tokens_per_s: generated tokens over the whole time, prompts included.
        lanes: seconds of work per lane in one such pass.
        binding: the lane that is busiest over the whole job.
        phases: the kinds of passes the job consists of.
    """

    layer_s: float
    pass_s: float
    decode_tokens_per_s: float
    tokens_per_s: float
    lanes: Mapping[str, float]
    binding: str
    phases: tuple[Phase, ...] = field(default=())


def acts_of(model: ModelProfile, policy: Policy, speeds: Speeds, dtype: DType | None = None) -> Acts:
    """The acts of ``policy``; ``dtype`` is what units work in where it is not the model's own."""
    own = dtype or dtype_named(model.dtype)
    return Acts(
        model=model,
        speeds=speeds,
        dtype=own,
        kv_dtype=own if policy.kv_dtype == "auto" else dtype_named(policy.kv_dtype),
        page_dtype=own if policy.weight_dtype == "auto" else dtype_named(policy.weight_dtype),
        attention_device=policy.attention_device,
        ffn_device=policy.ffn_device,
        pinned_homes=policy.host_pages == "pinned",
    )


def homes_of(placement: Placement, policy: Policy) -> Homes:
    """The counts of a placement, page by page."""
    from_disk = sum(placement.homes[page] == "disk" for page in placement.streamed)
    return Homes(
        from_host=len(placement.streamed) - from_disk,
        from_disk=from_disk,
        computed=len(placement.computed),
        device_kv=policy.kv.device,
    )


def estimate(
    model: ModelProfile, policy: Policy, workload: Workload, speeds: Speeds, *, dtype: DType | None = None
) -> Estimate:
    """The estimate of one resolved policy."""
    acts, homes = acts_of(model, policy, speeds, dtype), homes_of(place(model, policy), policy)
    kinds_of = static_passes_of if policy.admission == "static" else passes_of
    kinds = kinds_of(workload, policy.batch_size, riding_tokens(policy))
    phases = tuple(
        _phase(acts, policy, homes, name, kinds.kind(index))
        for index, name in enumerate(KINDS)
        if kinds.count[index] > 0
    )
    steady = _phase(acts, policy, homes, "decode", decode_pass(workload, policy.batch_size))
    total_s = sum(phase.passes * phase.seconds for phase in phases)
    busy: dict[str, float] = {}
    for phase in phases:
        for lane, seconds in phase.lanes.items():
            busy[lane] = busy.get(lane, 0.0) + phase.passes * seconds
    return Estimate(
        layer_s=steady.seconds / model.num_layers,
        pass_s=steady.seconds,
        decode_tokens_per_s=steady.decode_tokens / steady.seconds,
        tokens_per_s=workload.num_requests * workload.gen_len / total_s,
        lanes=steady.lanes,
        binding=max(busy, key=busy.__getitem__),
        phases=phases,
    )


def job_s(acts: Acts, workload: Workload, order: str, sizes: Sizes, homes: Homes) -> Any:
    """Seconds of the whole job for many candidates at once; ``sizes`` and ``homes`` hold arrays."""
    kinds = passes_of(workload, sizes.batch_size, riding_tokens(sizes))
    return np.sum(kinds.count * pass_s(order, cost_of(acts, kinds, homes, sizes, order)), axis=0)


def cost_of(
    acts: Acts, kinds: Passes, homes: Homes, sizes: Sizes, order: str, *, least: float = ROUTED_ONLY_SHARE
) -> PassCost:
    """The work of one pass of each of ``kinds`` under a policy, or under many candidates; ``least`` as in
    `routed_only`."""
    alive = np.asarray(sizes.batch_size, dtype=float)
    tokens, most = kinds.decode_tokens + kinds.prompt_tokens, np.asarray(sizes.micro_batch_tokens, dtype=float)
    return pass_cost(
        acts,
        kinds,
        homes,
        alive=alive,
        batches=np.ceil(alive / sizes.micro_batch_size),
        prompt_tokens=most,
        whole=order in WHOLE_EXPERTS,
        look_ahead=sizes.look_ahead,
        routed_only=routed_only(acts.model, order, tokens, most, least=least),
    )


def least_missed(policy: Policy) -> float:
    """The share of pages that nobody is routed to from which on passes of ``policy`` bring only the others: where
    residents are learned beside a disk alone, every pass says how many there were."""
    return MEASURED_SHARE if policy.residents == "learned" and not policy.discrete else ROUTED_ONLY_SHARE


def flops_per_token(model: ModelProfile) -> float:
    """Two per weight that a token meets: all matrices of the layers outside the experts, and ``top_k`` experts in each
    MoE layer. The head, which only some tokens reach, is not counted, nor is attention."""
    layers = costs.layer_elements(model)
    dense = sum(layer.before_attention + layer.after_attention for layer in layers)
    return 2.0 * (dense + model.num_moe_layers * model.router.top_k * costs.page_elements(model))


def _phase(acts: Acts, policy: Policy, homes: Homes, name: str, kind: Passes) -> Phase:
    cost = cost_of(acts, kind, homes, policy, policy.schedule, least=least_missed(policy))
    return Phase(
        name=name,
        passes=float(kind.count),
        decode_tokens=float(kind.decode_tokens),
        prompt_tokens=float(kind.prompt_tokens),
        seconds=float(pass_s(policy.schedule, cost)),
        lanes={lane: float(seconds) for lane, seconds in cost.lanes.items()},
    )
