"""Bytes that a policy takes on each tier, by purpose, before anything is loaded; ``paging`` and ``runtime`` allocate
these.

Six purposes only bound what others allocate: ``transient`` and ``host_transient`` (temporaries of kernels during one
task), ``states`` (what mixers keep of each sequence beside the paged cache), ``runtime`` (torch's product kernels,
tokenizer, threads: docs/log.md), ``transformers`` (its modules, where one of its graphs runs) and ``device_runtime``
(torch's allocator and cuBLAS). Parameters called ``sizes`` are
policies whose counts may be arrays, of many candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moelight.core.dtypes import DType
from moelight.core.policy import INT8, Policy
from moelight.core.schedule import Page
from moelight.core.units import MiB, align_up
from moelight.hrm import costs
from moelight.hrm.placement import Placement, place_pages
from moelight.profiles.model import ModelProfile

HEAD_CHUNK_BYTES = 32 * MiB
LOGITS_BYTES = 64 * MiB
SLAB_BYTES = 8 * MiB
CHUNK_ROWS = 256
RUNTIME_BYTES = 64 * MiB
# What a process that runs a module graph keeps beyond one with torch and the engine before it loads weights: 137 MiB
# of resident memory for gpt-oss with transformers 5.23 (docs/log.md).
TRANSFORMERS_BYTES = 140 * MiB
# Torch's allocator grows one segment of small and one of large requests for every stream that allocates, in steps of 2
# and 20 MiB (c10/cuda/CUDACachingAllocator.cpp, "Expandable Segments"): so much of each may be unused. Four streams
# allocate: the default one, which has the arenas, and those of the lanes device, h2d and d2h.
ALLOCATING_STREAMS = 4
SEGMENT_STEPS_BYTES = (2 + 20) * MiB
# cuBLAS gets one workspace for each thread and stream that multiplies, here the device lane's: 8.1 MiB before Hopper,
# 32 MiB from it on; cuBLASLt 1 MiB (aten/src/ATen/cuda/CublasHandlePool.cpp; CUBLAS_WORKSPACE_CONFIG=:4096:8, which
# makes sums repeatable, is 32 MiB on every card). One figure for all of them, since profiles do not name the class of a
# card: 24 MiB too much before Hopper, 0.2 % of a T4.
PRODUCT_WORKSPACE_BYTES = (32 + 1) * MiB
# Outside of the allocator lie the driver's context, loaded kernels (Triton's, cuBLAS's) and their local memory: they
# are no part of a device's free memory, of which `auto` takes 90 %, and come on top of a limit that the user gives.
DEVICE_RUNTIME_BYTES = ALLOCATING_STREAMS * SEGMENT_STEPS_BYTES + PRODUCT_WORKSPACE_BYTES
# Page reads in flight at a time, and the most bytes of one: 97 % of a disk's bandwidth, and 90 % with half as many
# (docs/log.md). Each may need a buffer.
READ_DEPTH = 8
READ_CHUNK_BYTES = 2 * MiB
READER_BYTES = READ_DEPTH * (READ_CHUNK_BYTES + 4096)
KV_BUFFERS = 2
KV_ALIGNMENT = 16  # bytes, of a buffer, as kernels need it
# Float32 temporaries of a number that torch quantises or widens: the number, its quotient and the code times its scale.
QUANTISING_BYTES = 12
DEQUANTISED_ROWS = 256  # of a quantised matrix that become numbers at a time
GATHER_BYTES = 8 * MiB
GRAPH_COPIES = 4  # of the rows of the widest matrix that a module graph holds at once: input, gate, up, product
GRAPH_ROWS = 128  # the most rows of a pass that is launched from CUDA graphs (`runtime.graphs`)
WHOLE_EXPERTS = ("module",)  # schedules in which experts run once over the whole pass


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaSize:
    """Size of one named region: ``purpose`` on ``tier``. ``slots``: of one that holds expert pages, the bytes of its
    slots, in order."""

    purpose: str
    tier: str
    bytes: int
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """All memory regions of a run."""

    arenas: tuple[ArenaSize, ...]

    def total(self, tier: str) -> int:
        return sum(arena.bytes for arena in self.arenas if arena.tier == tier)

    def bytes_of(self, purpose: str) -> int:
        return sum(arena.bytes for arena in self.arenas if arena.purpose == purpose)

    @property
    def slots(self) -> dict[str, tuple[int, ...]]:
        """The bytes of the slots of every region that holds expert pages."""
        return {arena.purpose: arena.slots for arena in self.arenas if arena.slots}


def footprint(model: ModelProfile, policy: Policy, *, dtype: DType, page_dtype: DType | None = None) -> Footprint:
    """All regions of ``policy``, which is resolved (``kv_tokens`` above 0); ``page_dtype``: of experts, if they are not
    in their stored format, else in that of ``dtype``."""
    placement = place_pages(model, policy)
    fixed = {key: int(size) for key, size in fixed_bytes(model, policy, dtype=dtype).items()}
    device_blocks = kv_device_blocks(policy)
    kv_block = kv_block_bytes(model, policy, dtype)
    fixed["kv", "host"] = (int(kv_blocks(policy)) - device_blocks) * kv_block
    if device_blocks:
        fixed["device_kv", "device"] = device_blocks * kv_block
    slots = page_slot_sizes(placement, costs.page_slots_by_layer(model, page_dtype or costs.page_dtype(model, dtype)))
    fixed |= {key: sum(sizes) for key, sizes in slots.items()}
    ordered = sorted(fixed.items(), key=lambda item: _ORDER.index(item[0][0]))
    return Footprint(
        arenas=tuple(
            ArenaSize(purpose=purpose, tier=tier, bytes=size, slots=slots.get((purpose, tier), ()))
            for (purpose, tier), size in ordered
        )
    )


_ORDER = (
    "dense",
    "experts",
    "ring",
    "hidden",
    "work",
    "mixture",
    "transient",
    "states",
    "device_kv",
    "kv_buffer",
    "device_runtime",
    "kv",
    "window_kv",
    "runtime",
    "transformers",
    "host_experts",
    "pinned_ring",
    "crossing",
    "host_work",
    "host_transient",
)


def fixed_bytes(model: ModelProfile, sizes: Policy, *, dtype: DType) -> dict[tuple[str, str], Any]:
    """Bytes by (purpose, tier) of every region that does not depend on the placement of pages and cache blocks."""
    fast_tier, tokens, hidden = "device" if sizes.discrete else "host", pass_tokens(sizes), model.hidden_size
    needed = {
        ("dense", fast_tier): costs.dense_bytes(
            model, dtype, as_stored=costs.keeps_stored(model, dtype, discrete=sizes.discrete)
        ),
        ("hidden", fast_tier): tokens * hidden * dtype.residual_itemsize,  # the residual stream
        ("work", fast_tier): work_bytes(model, sizes, dtype, grouped=sizes.discrete),
        ("transient", fast_tier): transient_bytes(model, sizes, dtype),
        ("runtime", "host"): RUNTIME_BYTES + READER_BYTES,
    }
    if model.layers:
        needed["transformers", "host"] = TRANSFORMERS_BYTES
    unit_bytes, of_token = costs.state_bytes(model)
    if unit_bytes or of_token:
        needed["states", fast_tier] = sizes.batch_size * unit_bytes + sizes.kv_tokens * of_token
    if window_of(model, sizes) is not None:
        block_bytes = sizes.kv_block_size * costs.windowed_token_bytes(model, costs.kv_dtype(sizes, dtype))
        needed["window_kv", "host"] = window_blocks(model, sizes) * block_bytes
    if sizes.schedule in WHOLE_EXPERTS and not model.dense:
        # Experts that run once over a pass: normed hidden states, float32 sums, expert ids and weights.
        needed["mixture", fast_tier] = tokens * (model.expert_input * (dtype.itemsize + 4) + costs.routing_bytes(model))
    if sizes.discrete:
        needed["device_runtime", "device"] = DEVICE_RUNTIME_BYTES
        needed["crossing", "host"] = tokens * staging_token_bytes(model, sizes, dtype)
    if sizes.attention_device == "gpu":
        unit_bytes = costs.kv_layer_bytes(model, costs.kv_dtype(sizes, dtype))
        needed["kv_buffer", "device"] = KV_BUFFERS * align_up(kv_buffer_tokens(sizes) * unit_bytes, KV_ALIGNMENT)
    if sizes.discrete and sizes.ffn_device != "gpu":
        needed["host_work", "host"] = work_bytes(model, sizes, dtype.page_dtype, grouped=False)
        needed["host_transient", "host"] = host_transient_bytes(model, sizes, dtype)
    return needed


def page_slots(placement: Placement) -> tuple[tuple[str, str, int], ...]:
    """``(purpose, tier, slots)`` of every region that holds pages."""
    fast_tier = placement.fast_tier
    slots = [("experts", fast_tier, len(placement.resident)), ("ring", fast_tier, ring_slots(placement))]
    if fast_tier == "device":
        slots.append(("host_experts", "host", len(offloaded_pages(placement))))
        slots.append(("pinned_ring", "host", pinned_slots(placement)))
    return tuple(slots)


def page_slot_sizes(placement: Placement, by_layer: Sequence[int]) -> dict[tuple[str, str], tuple[int, ...]]:
    """The bytes of the slots of every region that holds pages, by (purpose, tier), where a page of each layer takes
    ``by_layer``. A page that stays has a slot of its layer's size; those through which pages of all layers pass have
    the largest."""
    staying = {"experts": placement.resident, "host_experts": offloaded_pages(placement)}
    return {
        (purpose, tier): tuple([by_layer[page.layer] for page in staying[purpose]])
        if purpose in staying
        else (max(by_layer),) * count
        for purpose, tier, count in page_slots(placement)
    }


def offloaded_pages(placement: Placement) -> tuple[Page, ...]:
    """Pages held by host memory across the link, in order: the pages placed there, then copies of resident pages."""
    return (*placement.on("host"), *(placement.resident if placement.host_copies else ()))


def ring_slots(placement: Placement) -> int:
    """Ring slots on the fast tier: streamed pages of two layers, or as few as the policy says; with learned residents
    at least one whole layer."""
    double = 2 * placement.most_streamed_per_layer
    if placement.small_ring:
        return placement.ring_pages
    return max(double, placement.most_per_layer) if placement.learned and double else double


def pinned_slots(placement: Placement) -> int:
    """Slots of the pinned ring between an offloaded tier and the link: the streamed pages of one layer, or two if some
    are on disk, but no more than those of the ring; 0 if every page crosses directly; at least one whole layer if
    evicted pages are read from disk."""
    from_disk = any(placement.tiers[page] == "disk" for page in placement.streamed)
    if placement.pinned_pages and not from_disk:
        return 0
    max_slots = min(placement.most_streamed_per_layer * (2 if from_disk else 1), ring_slots(placement))
    back = placement.learned and from_disk and not placement.host_copies
    return max(max_slots, placement.most_per_layer) if back else max_slots


def pass_tokens(sizes: Policy) -> Any:
    """The most tokens of one pass: every sequence decoding, plus prefill tokens."""
    return sizes.batch_size + prefill_tokens(sizes)


def prefill_tokens(sizes: Policy) -> Any:
    """The most prefill tokens that join a pass in which every sequence decodes."""
    return sizes.prompt_micro_batches * sizes.micro_batch_tokens


def sample_rows(model: ModelProfile) -> int:
    """Rows of float32 logits that are in memory at once."""
    return max(1, LOGITS_BYTES // (4 * model.vocab_size))


def kv_blocks(sizes: Policy) -> Any:
    """Number of blocks of the paged KV cache."""
    return -(-sizes.kv_tokens // sizes.kv_block_size)


def kv_device_blocks(policy: Policy) -> int:
    """Number of cache blocks in device memory."""
    return round(policy.kv.device * int(kv_blocks(policy)))


def kv_block_bytes(model: ModelProfile, sizes: Policy, dtype: DType) -> int:
    """Bytes of one cache block over all layers but those with `window_blocks`, beside a computation in ``dtype``."""
    kv_dtype = costs.kv_dtype(sizes, dtype)
    windowed = 0 if window_of(model, sizes) is None else costs.windowed_token_bytes(model, kv_dtype)
    return sizes.kv_block_size * (costs.kv_token_bytes(model, kv_dtype) - windowed)


def window_of(model: ModelProfile, sizes: Policy) -> int | None:
    """The most positions that a token attends to in layers whose cache has blocks of its own, of which a sequence holds
    those that its tokens still see; None without such layers. Only the CPU attends to them, and only where no sequence
    is computed anew because of its length."""
    return costs.widest_window(model) if sizes.attention_device == "cpu" and model.by_length is None else None


def window_sequence_blocks(window: int, block_size: int) -> int:
    """The most blocks that a decoding sequence holds in layers with a window: those of the ``window`` - 1 positions
    before its newest token, and of at most a block of new ones, wherever they begin."""
    return -(-(window - 1) // block_size) + 2


def window_blocks(model: ModelProfile, sizes: Policy) -> Any:
    """Number of blocks of the cache of layers with a window: those of N decoding sequences and the prompts of a pass,
    but no more than of other layers."""
    window = window_of(model, sizes)
    if window is None:
        return 0
    prompts = -(-pass_tokens(sizes) // sizes.kv_block_size)
    return np.minimum(
        sizes.batch_size * window_sequence_blocks(window, sizes.kv_block_size) + prompts, kv_blocks(sizes)
    )


def kv_buffer_tokens(sizes: Policy) -> Any:
    """Cached tokens of one micro-batch that fit one of the device's two buffers: an even share and a quarter more."""
    share = -(-5 * sizes.kv_tokens * sizes.micro_batch_size // (4 * sizes.batch_size))
    return np.minimum(share, sizes.kv_tokens)


def staging_token_bytes(model: ModelProfile, sizes: Policy, dtype: DType) -> int:
    """Pinned bytes for the transfers of one token in one layer, device to host and back."""
    if sizes.attention_device == "cpu":
        attention = costs.qkv_bytes(model, dtype, 1) + costs.hidden_bytes(model, dtype, 1)
    else:
        attention = costs.kv_layer_bytes(model, costs.kv_dtype(sizes, dtype))
    if sizes.ffn_device == "gpu":
        return attention
    return attention + costs.routed_bytes(model, dtype, 1) + costs.residual_bytes(model, dtype, 1)


def work_bytes(model: ModelProfile, sizes: Policy, dtype: DType, *, grouped: bool) -> Any:
    """Bytes of the buffers that experts write."""
    return costs.expert_workspace(model, sizes.micro_batch_tokens, dtype, grouped=grouped).bytes


def transient_bytes(model: ModelProfile, sizes: Policy, dtype: DType) -> Any:
    """Upper bound of the bytes that passes allocate and free: what micro-batches hold between phases, plus the largest
    phase: attention (a later chunk of a prompt gathers its context head by head), routing and combining, or the head,
    with the weights and rows that a product copies; in a module graph also the rows of its widest matrix."""
    tokens, item = sizes.micro_batch_tokens, dtype.itemsize
    hidden, (rows_of_widest, largest) = model.hidden_size, costs.widest_matrix(model)
    norm = tokens * hidden * (8 + 2 * item)
    context, head_dim = np.minimum(sizes.kv_tokens, model.max_positions), costs.widest_head(model)
    chunk = np.where(context <= tokens, 0, context * (2 * head_dim * item + CHUNK_ROWS * 5))
    projected = 2 * (costs.attention_width(model) + costs.attention_out_width(model) + costs.cache_width(model))
    attention = norm + tokens * projected * item + chunk
    experts = norm + tokens * (hidden * (8 + 2 * item) + 12 * model.experts.num_experts)
    rows = np.minimum(sizes.micro_batch_size, sample_rows(model))
    head = min(model.vocab_size * hidden * item, HEAD_CHUNK_BYTES) + 2 * rows * model.vocab_size * 4
    cost_model = np.maximum(np.maximum(attention, experts), head)
    if model.layers:
        cost_model = np.maximum(cost_model, norm + tokens * GRAPH_COPIES * rows_of_widest * item)
    more = graph_bytes(model, sizes, dtype) if sizes.discrete else 0
    if sizes.activations == INT8 and sizes.ffn_device != "cpu":
        more = more + _rounded_bytes(model, sizes)
    if model.stored is not None and (model.stored.mixed or model.experts.by_torch) and sizes.discrete:
        more = more + _dequantised_bytes(model, item)
    return in_flight_bytes(model, sizes, dtype) + cost_model + _product_bytes(model, tokens, largest * item) + more


def _dequantised_bytes(model: ModelProfile, itemsize: int) -> int:
    """Bytes of an expert's largest matrix as numbers of ``itemsize`` bytes, and of what some rows of it become on the
    way: what torch multiplies by on a GPU where no kernel of ours computes the experts."""
    largest = 2 * model.experts.intermediate_size * model.expert_input
    widest = max(model.experts.intermediate_size, model.expert_input)
    return largest * itemsize + DEQUANTISED_ROWS * widest * 16


def _rounded_bytes(model: ModelProfile, sizes: Policy) -> Any:
    """Bytes of the rows that a GPU rounds to int8 for the experts: their inputs, and routed activations; for each 32
    numbers at most a scale and a sum of 4 bytes."""
    routed = sizes.micro_batch_tokens * model.router.top_k + costs.ROW_PADDING
    grouped = sizes.schedule in WHOLE_EXPERTS
    inputs = np.minimum(pass_tokens(sizes), routed) if grouped else sizes.micro_batch_tokens
    padding = 127  # numbers behind the last column
    elements = inputs * (model.expert_input + padding) + routed * (model.experts.intermediate_size + padding)
    return elements + elements // 4


def graph_bytes(model: ModelProfile, sizes: Policy, dtype: DType) -> Any:
    """Bytes that CUDA graphs hold: places of rotations, queries, keys, values and attention outputs, and the
    temporaries of one task: as much again, normed rows, projections, router logits, and rows by expert."""
    rows, width = np.minimum(pass_tokens(sizes), GRAPH_ROWS), costs.attention_width(model) + costs.cache_width(model)
    per_row = 2 * (width + costs.attention_out_width(model)) + 2 * costs.widest_head(model) + 4 * model.hidden_size
    return rows * (per_row * dtype.itemsize + 4 * model.experts.num_experts + 40 * model.router.top_k)


def host_transient_bytes(model: ModelProfile, sizes: Policy, dtype: DType) -> Any:
    """The bound of `transient_bytes` for experts that the CPU computes beside a GPU."""
    tokens, hidden, spec = sizes.micro_batch_tokens, model.hidden_size, model.experts
    ends = tokens * (hidden * (8 + 2 * dtype.itemsize) + 12 * spec.num_experts)
    return ends + _product_bytes(model, tokens, 2 * spec.intermediate_size * hidden * dtype.itemsize)


def _product_bytes(model: ModelProfile, tokens: Any, largest: int) -> Any:
    """Bytes that a product on the CPU copies: slabs of widened weights and rows; the ``largest`` matrix, repacked."""
    width = max(model.experts.intermediate_size, model.dense_intermediate_size)
    slab = tokens * model.hidden_size * 4 + 2 * SLAB_BYTES
    slab = slab + tokens * 4 * (SLAB_BYTES // 4 // min(model.hidden_size, width))
    return np.minimum(slab, 2 * largest) + largest


def in_flight_bytes(model: ModelProfile, sizes: Policy, dtype: DType) -> Any:
    """Bytes that micro-batches hold between phases: rotations, queries, keys, values, attention outputs (of all
    micro-batches if streams may still read them, else of three), and inputs and outputs of the CPU's experts. With the
    cache on both tiers also the new keys and values of either tier and the piece of a context that torch gathers; with
    a quantised cache those that a micro-batch quantises, in float32 and as the cache gives them back. A
    dense layer's page computes what the next one attends with, so all micro-batches hold that, and their residuals."""
    in_flight = pass_tokens(sizes) if sizes.discrete or model.dense else 3 * sizes.micro_batch_tokens
    per_token = costs.attention_width(model) + costs.attention_out_width(model) + costs.cache_width(model)
    if model.dense:
        per_token += model.hidden_size
    if sizes.discrete and sizes.ffn_device != "gpu":
        per_token += 2 * model.hidden_size
    rotations = pass_tokens(sizes) * 2 * costs.widest_head(model) * dtype.itemsize
    prefetched = in_flight * per_token * dtype.itemsize + rotations
    cached, quantised = costs.cache_width(model) * dtype.itemsize, costs.kv_dtype(sizes, dtype).group > 0
    if sizes.attention_device == "gpu":
        context = kv_buffer_tokens(sizes) * (cached + quantised * QUANTISING_BYTES * costs.cache_width(model))
        prefetched = prefetched + np.minimum(GATHER_BYTES, context)
        prefetched = prefetched + 2 * sizes.micro_batch_tokens * cached
    if quantised:
        widened = cached + QUANTISING_BYTES * costs.cache_width(model)
        prefetched = prefetched + sizes.micro_batch_tokens * widened
    return prefetched
