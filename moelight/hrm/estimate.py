"""Predicted seconds of a job and of its passes, by lane, for one policy or for arrays of candidates: the engine's
execution, priced by the ledger (``workload_model``, ``pass_cost``, ``schedule_time``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moelight.core.dtypes import DType, dtype_named
from moelight.core.policy import Policy
from moelight.hrm import costs
from moelight.hrm.cost_model import CostModel
from moelight.hrm.footprint import WHOLE_EXPERTS, prefill_tokens
from moelight.hrm.machine_model import Speeds
from moelight.hrm.pass_cost import PassCost, PlacementCounts, pass_cost, ring_of
from moelight.hrm.placement import Placement, place_pages
from moelight.hrm.schedule_time import MEASURED_SHARE, ROUTED_ONLY_SHARE, pass_s, routed_only
from moelight.hrm.workload_model import (
    KINDS,
    TOKEN_COUNTS,
    Passes,
    cached_sequences,
    decode_pass,
    passes_of,
    static_passes_of,
)
from moelight.profiles.model import ModelProfile
from moelight.profiles.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One kind of pass: number of passes, tokens per pass, seconds of one pass and of its work by lane."""

    name: str
    passes: float
    decode_tokens: float
    prompt_tokens: float
    seconds: float
    lanes: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The predicted performance of a policy.

    Attributes:
        layer_s: seconds of one layer in a pass in which every slot decodes.
        pass_s: seconds of one such pass.
        decode_tokens_per_s: tokens per second of such passes alone.
        tokens_per_s: generated tokens over the seconds of the whole job, prompts included.
        lanes: seconds of work by lane in one such pass.
        binding: the lane that is busiest over the whole job.
        phases: the kinds of passes of the job.
    """

    layer_s: float
    pass_s: float
    decode_tokens_per_s: float
    tokens_per_s: float
    lanes: Mapping[str, float]
    binding: str
    phases: tuple[Phase, ...] = field(default=())


def cost_model_of(model: ModelProfile, policy: Policy, speeds: Speeds, dtype: DType | None = None) -> CostModel:
    """The cost model of ``policy``; ``dtype``: the compute dtype, if not the model's own."""
    compute_dtype = dtype or dtype_named(model.dtype)
    return CostModel(
        model=model,
        speeds=speeds,
        dtype=compute_dtype,
        kv_dtype=costs.kv_dtype(policy, compute_dtype),
        page_dtype=costs.page_dtype(model, compute_dtype, policy.weight_dtype),
        activations=policy.activations,
        attention_device=policy.attention_device,
        ffn_device=policy.ffn_device,
        pinned_pages=policy.host_pages == "pinned",
    )


def placement_counts(placement: Placement, policy: Policy) -> PlacementCounts:
    """The page counts of a placement."""
    from_disk = list(placement.tiers.values()).count("disk")
    return PlacementCounts(
        from_host=len(placement.streamed) - from_disk,
        from_disk=from_disk,
        computed=len(placement.computed),
        device_kv=policy.kv.device,
    )


def estimate(
    model: ModelProfile, policy: Policy, workload: Workload, speeds: Speeds, *, dtype: DType | None = None
) -> Estimate:
    """The estimate of one resolved policy."""
    cost_model, placed = (
        cost_model_of(model, policy, speeds, dtype),
        placement_counts(place_pages(model, policy), policy),
    )
    kinds = kinds_of(model, workload, policy)
    phases = tuple(
        _phase(cost_model, workload, policy, placed, name, kinds.kind(index))
        for index, name in enumerate(KINDS)
        if kinds.count[index] > 0
    )
    running = decode_pass(workload, running_of(model, workload, policy))
    steady = _phase(cost_model, workload, policy, placed, "decode", running)
    total_s = sum(phase.passes * phase.seconds for phase in phases)
    busy = {lane: sum(phase.passes * phase.lanes[lane] for phase in phases) for lane in steady.lanes}
    return Estimate(
        layer_s=steady.seconds / model.num_layers,
        pass_s=steady.seconds,
        decode_tokens_per_s=steady.decode_tokens / steady.seconds,
        tokens_per_s=workload.num_requests * workload.gen_len / total_s,
        lanes=steady.lanes,
        binding=max(busy, key=busy.__getitem__),
        phases=phases,
    )


def running_of(model: ModelProfile, workload: Workload, sizes: Policy) -> Any:
    """Sequences that run at a time: at most N, all requests, and as many as the cache holds, but at least one."""
    held = cached_sequences(workload, sizes.kv_tokens, sizes.kv_block_size, model.max_positions)
    return np.minimum(np.minimum(sizes.batch_size, workload.num_requests), np.maximum(held, 1))


def _batches_of(workload: Workload, sizes: Policy, running: Any) -> Any:
    """Micro-batches of a pass in which all ``running`` sequences decode. For attention on a GPU their number does not
    fall if the cache holds fewer sequences, since `kv_buffer_tokens` are an even share at N sequences."""
    sequences = np.minimum(sizes.batch_size, workload.num_requests) if sizes.attention_device == "gpu" else running
    return np.ceil(sequences / sizes.micro_batch_size)


def kinds_of(model: ModelProfile, workload: Workload, sizes: Policy) -> Passes:
    """The kinds of passes that serve ``workload`` under a policy, or under many candidates."""
    of = static_passes_of if sizes.admission == "static" else passes_of
    return of(workload, running_of(model, workload, sizes), prefill_tokens(sizes))


def job_s(cost_model: CostModel, workload: Workload, sizes: Policy, placed: PlacementCounts) -> Any:
    """Seconds of the whole job for many candidates: ``sizes`` and ``placed`` hold numbers, or arrays of one length."""
    kinds = kinds_of(cost_model.model, workload, sizes)
    count = np.atleast_2d(kinds.count.T).T
    kind, candidate = np.nonzero(count)
    taken = {name: np.atleast_2d(getattr(kinds, name).T).T[kind, candidate] for name in TOKEN_COUNTS}
    some = replace(kinds, **taken)
    seconds = some.count * pass_s(sizes.schedule, cost_of(cost_model, workload, some, placed, sizes, of=candidate))
    total = np.bincount(candidate, weights=seconds, minlength=count.shape[1])
    return total.reshape(kinds.count.shape[1:])[()]


def cost_of(
    cost_model: CostModel,
    workload: Workload,
    kinds: Passes,
    placed: PlacementCounts,
    sizes: Policy,
    *,
    of: Any = None,
    streams: bool | None = None,
) -> PassCost:
    """The work of one pass of each of ``kinds`` under a policy; if no page moves, no lane waits for routers.

    Args:
        of: the candidate of each of ``kinds``, where ``sizes`` and ``placed`` hold arrays of candidates.
        streams: whether pages are assumed to move (then the result is affine in ``placed``); None: where ``placed`` has
            streamed pages.
    """
    model, running = cost_model.model, running_of(cost_model.model, workload, sizes)

    def selected(values: Any) -> Any:
        return values if of is None or np.ndim(values) == 0 else values[of]

    max_tokens, placed = selected(sizes.micro_batch_tokens), placed.map(selected)
    tokens = kinds.decode_tokens + kinds.prompt_tokens
    routed = routed_only(model, sizes.schedule, tokens, max_tokens, least=least_missed(sizes))
    moving = _streamed(placed) > 0 if streams is None else streams
    most_ring = _double_ring(model, placed) if streams is None else 2 * model.experts.num_experts
    routed = routed & (selected(ring_of(model, sizes.ring_pages)) >= most_ring)
    return pass_cost(
        cost_model,
        kinds,
        placed,
        running=selected(running).astype(float),
        batches=selected(_batches_of(workload, sizes, running)),
        prompt_tokens=max_tokens,
        grouped=sizes.schedule in WHOLE_EXPERTS,
        look_ahead=selected(sizes.look_ahead),
        routed_only=routed,
        apart=np.where(routed & moving, 1.0, 0.0),
        ring_pages=selected(sizes.ring_pages),
    )


def routed_passes(model: ModelProfile, policy: Policy, tokens: Any, placed: PlacementCounts) -> Any:
    """Whether passes of ``tokens`` under ``policy`` are on-demand passes."""
    routed = routed_only(model, policy.schedule, tokens, policy.micro_batch_tokens, least=least_missed(policy))
    double = ring_of(model, policy.ring_pages) >= _double_ring(model, placed)
    return routed & double & (_streamed(placed) > 0) & (not model.dense)


def _streamed(placed: PlacementCounts) -> Any:
    return np.asarray(placed.from_host + placed.from_disk)


def _double_ring(model: ModelProfile, placed: PlacementCounts) -> Any:
    """The streamed pages of two layers: behind a smaller ring every pass is a whole one (`Placement.small_ring`)."""
    return 2 * np.ceil(_streamed(placed) / max(model.num_moe_layers, 1))


def least_missed(policy: Policy) -> float:
    """The least share of unrouted pages from which on passes of ``policy`` transfer routed pages only. Where every pass
    measures it (learned residents, offloaded to disk alone) `MEASURED_SHARE`, else `ROUTED_ONLY_SHARE`."""
    return MEASURED_SHARE if policy.residents == "learned" and not policy.discrete else ROUTED_ONLY_SHARE


def flops_per_token(model: ModelProfile) -> float:
    """Flops of one token in all layers, two per weight, with ``top_k`` experts; attention and the head excluded."""
    layers = costs.layer_elements(model)
    dense = sum(layer.before_attention + layer.after_attention for layer in layers)
    return 2.0 * (dense + model.num_moe_layers * model.router.top_k / model.ranks * costs.page_elements(model))


def _phase(
    cost_model: CostModel, workload: Workload, policy: Policy, placed: PlacementCounts, name: str, kind: Passes
) -> Phase:
    cost = cost_of(cost_model, workload, kind, placed, policy)
    return Phase(
        name=name,
        passes=float(kind.count),
        decode_tokens=float(kind.decode_tokens),
        prompt_tokens=float(kind.prompt_tokens),
        seconds=float(pass_s(policy.schedule, cost)),
        lanes={lane: float(seconds) for lane, seconds in cost.lanes.items()},
    )
