"""Seconds of work that one pass puts on each lane; each is a lower bound on the pass. Does not depend on schedules.

Counts may be arrays over many candidates. Costs are affine in the placement of pages and cache blocks, so that the
optimizer can solve for the placement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moelight.hrm import costs
from moelight.hrm.cost_model import CostModel
from moelight.hrm.machine_model import Unit
from moelight.hrm.placement import turn_pages
from moelight.hrm.workload_model import Passes
from moelight.profiles.model import ModelProfile

NO_DISK_BYTES_PER_S = 1e-3  # without a disk a page takes practically for ever, and no page takes no time
ROUNDING = 1e-9  # of a quotient of whole numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementCounts:
    """Numbers of pages over all layers, and the share of the cache on the device. ``from_host`` and ``from_disk`` are
    streamed every pass; the CPU computes ``computed`` in place, beside a GPU; all other pages are resident."""

    from_host: Any = 0.0
    from_disk: Any = 0.0
    computed: Any = 0.0
    device_kv: Any = 0.0

    @property
    def offloaded(self) -> Any:
        """All pages but the resident ones."""
        return self.from_host + self.from_disk + self.computed

    def map(self, function: Callable[[Any], Any]) -> PlacementCounts:
        """The result of ``function`` for each count."""
        return PlacementCounts(
            from_host=function(self.from_host),
            from_disk=function(self.from_disk),
            computed=function(self.computed),
            device_kv=function(self.device_kv),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCost:
    """The work of one pass, in seconds.

    Attributes:
        lanes: work by lane; ``dram`` is host memory, which several lanes share, ``exchange`` the link to other ranks,
            over which ranks sum what experts have computed; without a device it blocks the CPU.
        count: micro-batches that decode.
        act: device work of one such micro-batch in all layers.
        attend: its attention in all layers.
        up: its transfers to the device in all layers.
        chain: latency of one micro-batch alone through all layers.
        waits: idle time of a lane at the ends of the pass; without a device, the slowdown that concurrent lanes cause.
        experts: device work of experts that run once over the whole pass.
        pages: time of the streamed pages on each lane that they cross.
        link_waits: idle time of the link until results of the CPU's experts are ready.
        link_reads: host memory time of streamed pages while they cross the link.
        look_ahead: as in `Policy`.
        apart: 1 if only routed pages move, so that links and compute alternate; else 0.
        share: the expected share of streamed pages that move.
        first: without a link, time of one micro-batch up to the end of attention.
        meanwhile: without a link, time of resident experts that run while routed pages are read.
        attended: work of the compute lane without the experts that run once over the whole pass.
        ahead: time on each lane of ``pages`` of those that can arrive before the experts of their layers run, as many
            as the ring holds.
        turn: work of the experts that run after the last page of each layer, where the ring is smaller than two layers.
    """

    lanes: dict[str, Any]
    count: Any
    act: Any
    attend: Any
    up: Any
    chain: Any
    waits: dict[str, Any]
    experts: Any
    pages: tuple[Any, ...]
    link_waits: Any = 0.0
    link_reads: Any = 0.0
    look_ahead: Any = 2
    apart: Any = 0.0
    share: Any = 1.0
    first: Any = 0.0
    meanwhile: Any = 0.0
    attended: Any = 0.0
    ahead: tuple[Any, ...] = ()
    turn: Any = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _MicroBatches:
    count: Any
    tokens: Any


def pass_cost(
    cost_model: CostModel,
    kind: Passes,
    placed: PlacementCounts,
    *,
    running: Any,
    batches: Any,
    prompt_tokens: Any,
    grouped: bool,
    look_ahead: Any = 2,
    routed_only: Any = False,
    apart: Any = None,
    ring_pages: Any = 0,
    least_ring: Any = None,
) -> PassCost:
    """The work of one pass of ``kind``.

    Args:
        running: N, the sequences that run at a time.
        batches: micro-batches of a pass in which all N decode.
        prompt_tokens: the most tokens in a micro-batch of prompts.
        grouped: experts run once over the whole pass, not once per micro-batch.
        look_ahead: as in `Policy`; without effect if there is no GPU.
        routed_only: pages without routed tokens do not move.
        apart: as in `PassCost`; by default equal to ``routed_only``.
        ring_pages: as in `Policy`; ``least_ring``: the ring whose last turn is counted, by default the same.
    """
    tokens = kind.decode_tokens + kind.prompt_tokens
    met = costs.distinct_experts(cost_model.model, tokens)
    share = np.where(routed_only, met / cost_model.model.experts.num_experts, 1.0)
    if cost_model.discrete:
        decode = _cut(kind.decode_tokens, np.maximum(1.0, batches * kind.decode_tokens / running))
        fresh = np.maximum(batches * kind.prompts / running, kind.prompt_tokens / prompt_tokens)
        prompts = _cut(kind.prompt_tokens, np.maximum(1.0, fresh))
        micro_batches: tuple[_MicroBatches, ...] = (decode, prompts)
        cost = _beside_a_gpu(cost_model, kind, placed, (decode, prompts), grouped, share)
        cost = replace(cost, chain=cost.chain + _sums_s(cost_model, decode.tokens))
    else:
        rows = kind.decode_tokens + kind.prompts
        fewest = np.maximum(np.maximum(1.0, batches * rows / running), tokens / prompt_tokens)
        together = _cut(tokens, np.ceil(fewest - ROUNDING))
        micro_batches = (together,)
        cost = _on_the_cpu(cost_model, kind, placed, together, grouped, share)
    apart = np.where(routed_only, 1.0, 0.0) if apart is None else apart
    ring = ring_of(cost_model.model, ring_pages)
    last = turn_pages(ring if least_ring is None else least_ring)
    return replace(
        cost,
        lanes=cost.lanes | _exchange_lane(cost_model, micro_batches),
        share=share,
        apart=apart,
        look_ahead=look_ahead,
        attended=cost.lanes.get("device", cost.lanes["cpu"]) - cost.experts,
        ahead=_ahead(cost_model, ring),
        turn=cost.experts * np.minimum(last / cost_model.model.experts.num_experts, 1.0),
    )


def ring_of(model: ModelProfile, ring_pages: Any) -> Any:
    """Pages that a ring of ``ring_pages`` (0: two layers) holds at most."""
    return np.where(np.asarray(ring_pages) > 0, ring_pages, 2 * model.experts.num_experts)


def _ahead(cost_model: CostModel, ring: Any) -> tuple[Any, ...]:
    """`PassCost.ahead` of a ring of ``ring`` pages: beside a link as many more have passed the lanes before it."""
    pages, speeds = ring * cost_model.model.num_moe_layers * cost_model.page_bytes(), cost_model.speeds
    disk = pages / (speeds.disk or NO_DISK_BYTES_PER_S)
    if not cost_model.discrete:
        return (disk,)
    if cost_model.ffn_device == "cpu":
        return (0.0 * disk, 0.0 * disk, disk)
    return pages / speeds.h2d, 2 * pages / speeds.stage, 2 * disk


def _on_the_cpu(
    cost_model: CostModel, kind: Passes, placed: PlacementCounts, batches: _MicroBatches, grouped: bool, share: Any
) -> PassCost:
    """The cost of a pass without a GPU. Page reads and compute slow each other while both run; the longer one finishes
    alone, so its time is its own work plus the slowdown by the other."""
    cpu, speeds, tokens = cost_model.expert_unit, cost_model.speeds, batches.tokens
    per_batch_s = 0.0 if grouped else _experts_s(cost_model, cpu, tokens, 1.0)
    act = phases_s(cost_model, tokens) + per_batch_s + _sums_s(cost_model, tokens)
    resident = 1.0 - placed.from_disk / (cost_model.model.num_moe_layers * cost_model.model.experts.num_experts)
    kinds = costs.layer_kinds(cost_model.model)
    before = sum(layers * cost_model.before_s(elements, tokens) for elements, _, layers in kinds)
    experts = _experts_s(cost_model, cpu, batches.count * tokens, 1.0) if grouped else np.zeros_like(act)
    attend = cost_model.states_s(kind.decode_tokens, kind.context, kind.prompt_tokens, kind.prompt_len)
    for alike in costs.attention_kinds(cost_model.model):
        decode = cost_model.decode_attention_s(cpu, kind.decode_tokens, kind.context, alike)
        prompt = cost_model.prefill_attention_s(cpu, kind.prompt_tokens, kind.prompt_len, alike)
        decode, prompt = np.where(kind.decode_tokens > 0, decode, 0.0), np.where(kind.prompt_tokens > 0, prompt, 0.0)
        attend = attend + alike.layers * (decode + prompt)
    attend_each = attend / np.maximum(batches.count, 1e-9)
    head = batches.count * cost_model.head_s((kind.decode_tokens + kind.prompts) / np.maximum(batches.count, 1e-9))
    busy = batches.count * act + experts + attend + head
    none = np.zeros_like(busy)
    reading = share * placed.from_disk * cost_model.page_bytes() / (speeds.disk or NO_DISK_BYTES_PER_S) + none
    return PassCost(
        lanes={
            "cpu": busy + share * placed.from_disk * cost_model.repacking_s(),
            "disk": reading,
        },
        count=batches.count,
        act=act,
        attend=attend_each,
        up=none,
        chain=none,
        waits={
            "cpu": reading * ((1.0 - speeds.under_disk) / speeds.disk_under_cpu),
            "disk": busy * ((1.0 - speeds.disk_under_cpu) / speeds.under_disk),
        },
        experts=experts,
        pages=(reading,),
        first=before + attend_each,
        meanwhile=batches.count * per_batch_s * resident,
    )


def _beside_a_gpu(
    cost_model: CostModel,
    kind: Passes,
    placed: PlacementCounts,
    batches: tuple[_MicroBatches, _MicroBatches],
    grouped: bool,
    share: Any,
) -> PassCost:
    """The cost of a pass beside a GPU, whose ``batches`` are those of decoding sequences and those of prompts."""
    decode, prompts = batches
    layers, speeds, unit = cost_model.model.num_layers, cost_model.speeds, cost_model.expert_unit
    on_cpu, attention_on_cpu = _computed_share(cost_model, placed), float(cost_model.attention_device == "cpu")
    per_batch = 0.0 if grouped else 1.0 - on_cpu
    act = phases_s(cost_model, decode.tokens) + _experts_s(cost_model, unit, decode.tokens, per_batch)
    act = act + cost_model.states_s(decode.tokens, kind.context, 0.0, 1.0)
    prompt_act = phases_s(cost_model, prompts.tokens) + _experts_s(cost_model, unit, prompts.tokens, per_batch)
    prompt_act = prompt_act + _where(prompts, _prompts_attend_s(cost_model, unit, prompts.tokens, kind.prompt_len))
    tokens = kind.decode_tokens + kind.prompt_tokens
    experts = _experts_s(cost_model, unit, tokens, 1.0 - on_cpu) if grouped else np.zeros_like(act)
    attend = _where(decode, _attend_s(cost_model, decode.tokens, kind.context))
    count = np.maximum(decode.count + prompts.count, 1.0)
    head = count * cost_model.head_s((kind.decode_tokens + kind.prompts) / count)
    device = decode.count * act + prompts.count * prompt_act + experts + head
    up_bytes, down_bytes, down_bytes_each, stored_bytes = _attention_bytes(cost_model, kind, placed, decode)
    crossings = sum(attention_kind.layers for attention_kind in costs.attention_kinds(cost_model.model))
    up = cost_model.up_s(up_bytes, crossings * decode.count)
    down = cost_model.down_s(down_bytes, crossings * (decode.count + prompts.count))
    each_up, each_down = up / np.maximum(decode.count, 1.0), cost_model.down_s(down_bytes_each, crossings)
    one_s, one_cross_s, one_met = _cpu_experts(cost_model, decode, on_cpu)
    prompt_s, prompt_cross_s, prompt_met = _cpu_experts(cost_model, prompts, on_cpu)
    experts_s = decode.count * one_s + prompts.count * prompt_s
    cross_s = decode.count * one_cross_s + prompts.count * prompt_cross_s
    pages_s, staged_bytes = _transfers(cost_model, placed)
    pages, page = tuple(share * seconds for seconds in pages_s), cost_model.page_bytes()
    read, met = _kv_read_bytes(cost_model, kind, attention_on_cpu), decode.count * one_met + prompts.count * prompt_met
    touched = read + up_bytes + down_bytes + met * page + share * staged_bytes
    host_s = speeds.cpu.touch_s(2 * stored_bytes) + share * placed.from_disk * cost_model.repacking_s()
    resident_s, offloaded_s = act + attend * (1.0 - attention_on_cpu), attend * attention_on_cpu + one_s
    chain = resident_s + offloaded_s + 2.0 * one_cross_s + _where(decode, each_up + each_down)
    return PassCost(
        lanes={
            "device": device + decode.count * attend * (1.0 - attention_on_cpu),
            "cpu": host_s + experts_s + decode.count * attend * attention_on_cpu,
            "h2d": pages[0] + up + cross_s,
            "d2h": down + cross_s,
            "stage": pages[1],
            "disk": pages[2],
            "dram": touched / speeds.dram,
        },
        count=decode.count,
        act=act,
        attend=attend,
        up=each_up,
        chain=chain,
        waits={"device": (chain - resident_s) / layers, "cpu": (chain - offloaded_s) / layers},
        experts=experts,
        pages=pages,
        link_waits=experts_s,
        link_reads=share * (placed.from_host + placed.from_disk) * page / speeds.dram,
    )


def _attention_bytes(
    cost_model: CostModel, kind: Passes, placed: PlacementCounts, decode: _MicroBatches
) -> tuple[Any, Any, Any, Any]:
    """Bytes that attention moves in one pass: up, down, down for one decoding micro-batch, into the host's cache."""
    attending, item = costs.attention_kinds(cost_model.model), cost_model.dtype.itemsize
    crossing = costs.kv_crossing_dtype(cost_model.attention_device, cost_model.dtype, cost_model.kv_dtype)
    new = costs.kv_token_bytes(cost_model.model, crossing)
    if cost_model.attention_device == "cpu":
        on_host, each_down = (
            1.0,
            new + item * sum(attention.layers * attention.spec.query_width for attention in attending),
        )
        up = item * sum(attention.layers * attention.spec.output_width for attention in attending) * kind.decode_tokens
    else:
        on_host, each_down = 1.0 - placed.device_kv, new
        up = _kv_read_bytes(cost_model, kind, on_host)
    down = (each_down * kind.decode_tokens + new * kind.prompt_tokens) * on_host
    stored = new * (kind.decode_tokens + kind.prompt_tokens) * on_host
    return up, down, each_down * decode.tokens * on_host, stored


def _kv_read_bytes(cost_model: CostModel, kind: Passes, share: Any = 1.0) -> Any:
    """Bytes of a ``share`` of the KV cache that one pass reads in all layers."""
    return sum(
        share * attention.layers * cost_model.kv_read_bytes(kind.decode_tokens, kind.context, attention)
        for attention in costs.attention_kinds(cost_model.model)
    )


def _cpu_experts(cost_model: CostModel, batches: _MicroBatches, share: Any) -> tuple[Any, Any, Any]:
    """A ``share`` of the experts that the CPU computes beside a GPU, for one micro-batch: CPU seconds, link seconds
    each way, and the experts whose weights are read from host memory."""
    if cost_model.ffn_device == "gpu":
        return 0.0, 0.0, 0.0
    model, cpu, layers = cost_model.model, cost_model.speeds.cpu, cost_model.model.num_moe_layers
    compute = _experts_s(cost_model, cpu, batches.tokens, share)
    compute = compute + layers * (cpu.task_s + cost_model.rounding_s(batches.tokens))
    cross = cost_model.up_s(layers * costs.residual_bytes(model, cost_model.dtype, 1) * batches.tokens, layers)
    met = layers * share * costs.distinct_experts(model, batches.tokens)
    return _where(batches, compute), _where(batches, cross), met


def _attend_s(cost_model: CostModel, tokens: Any, context: Any) -> Any:
    """Attention of ``tokens`` decoding sequences in all layers, where the policy says."""
    kinds = costs.attention_kinds(cost_model.model)
    unit = cost_model.speeds.cpu if cost_model.attention_device == "cpu" else cost_model.expert_unit
    return sum(kind.layers * cost_model.decode_attention_s(unit, tokens, context, kind) for kind in kinds)


def _prompts_attend_s(cost_model: CostModel, unit: Unit, tokens: Any, prompt_len: Any) -> Any:
    """Attention of ``tokens`` prompt tokens in all layers, states included."""
    kinds = costs.attention_kinds(cost_model.model)
    seconds = sum(kind.layers * cost_model.prefill_attention_s(unit, tokens, prompt_len, kind) for kind in kinds)
    return seconds + cost_model.states_s(0.0, 0.0, tokens, prompt_len)


def phases_s(cost_model: CostModel, tokens: Any) -> Any:
    """Seconds of both phases of one micro-batch of ``tokens`` in all layers, experts excluded."""
    total = 0.0
    for elements, moe, layers in costs.layer_kinds(cost_model.model):
        total = total + layers * (cost_model.before_s(elements, tokens) + cost_model.after_s(elements, tokens, moe=moe))
    return np.where(tokens > 0, total, 0.0)


def _sums_s(cost_model: CostModel, tokens: Any) -> Any:
    """Seconds in which ranks sum what the experts of all layers have computed for a micro-batch of ``tokens``."""
    return cost_model.model.num_moe_layers * cost_model.sum_s(tokens)


def _exchange_lane(cost_model: CostModel, batches: tuple[_MicroBatches, ...]) -> dict[str, Any]:
    """The lane of the link to other ranks, if there are any."""
    seconds = (part.count * _sums_s(cost_model, part.tokens) for part in batches)
    return {"exchange": sum(seconds)} if cost_model.model.ranks > 1 else {}


def _experts_s(cost_model: CostModel, unit: Unit, tokens: Any, share: Any) -> Any:
    return np.where(tokens > 0, cost_model.model.num_moe_layers * cost_model.experts_s(unit, tokens, share), 0.0)


def _transfers(cost_model: CostModel, placed: PlacementCounts) -> tuple[tuple[Any, Any, Any], Any]:
    """Seconds on the link, in the staging copy and on the disk for the pages of one pass, and the bytes of host memory
    that they touch."""
    page, speeds = cost_model.page_bytes(), cost_model.speeds
    disk = placed.from_disk * page / (speeds.disk or NO_DISK_BYTES_PER_S)
    repacking = placed.from_disk * costs.REPACKING_PASSES * cost_model.repacked_bytes()
    if cost_model.ffn_device == "cpu":
        return (0.0 * disk, 0.0 * disk, disk), placed.from_disk * page + repacking
    link = (placed.from_host + placed.from_disk) * page / speeds.h2d
    staged = 0.0 if cost_model.pinned_pages else 1.0
    touches = 1 if cost_model.pinned_pages else costs.staging_passes(from_disk=False)
    touched = touches * placed.from_host + costs.staging_passes(from_disk=True) * placed.from_disk
    return (link, staged * placed.from_host * page / speeds.stage, disk), touched * page + repacking


def _computed_share(cost_model: CostModel, placed: PlacementCounts) -> Any:
    if cost_model.ffn_device == "cpu":
        return 1.0
    return placed.computed / (cost_model.model.num_moe_layers * cost_model.model.experts.num_experts)


def _cut(tokens: Any, count: Any) -> _MicroBatches:
    some = tokens > 0
    return _MicroBatches(count=np.where(some, count, 0.0), tokens=np.where(some, tokens / count, 0.0))


def _where(batches: _MicroBatches, seconds: Any) -> Any:
    return np.where(batches.count > 0, seconds, 0.0)
