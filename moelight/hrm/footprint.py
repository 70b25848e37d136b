"""How many bytes a policy takes on each tier, by purpose, before anything is loaded.

What is announced here is what ``memory`` allocates. Two purposes are bounds on what others allocate: ``transient``,
what kernels take for the time of one task, and ``runtime``, what torch's product kernels, the tokenizer and threads
keep (measured: docs/log.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from moelight.core.dtypes import DType
from moelight.core.policy import Policy
from moelight.core.units import MiB
from moelight.hrm import costs
from moelight.hrm.placement import Placement, near_tier, place
from moelight.profiles.model import ModelProfile

PINNED_SLOTS = 4
HEAD_CHUNK_BYTES = 32 * MiB
LOGITS_BYTES = 64 * MiB
SLAB_BYTES = 8 * MiB
CHUNK_ROWS = 256
RUNTIME_BYTES = 64 * MiB


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaSize:
    """One named region: ``purpose`` on ``tier``."""

    purpose: str
    tier: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Every region of a run."""

    arenas: tuple[ArenaSize, ...]

    def total(self, tier: str) -> int:
        """Bytes on ``tier``."""
        return sum(arena.bytes for arena in self.arenas if arena.tier == tier)

    def bytes_of(self, purpose: str) -> int:
        """Bytes of ``purpose`` over all tiers."""
        return sum(arena.bytes for arena in self.arenas if arena.purpose == purpose)


def footprint(model: ModelProfile, policy: Policy, *, dtype: DType, kv_dtype: DType) -> Footprint:
    """All regions of ``policy`` on ``model``, resolved policies only (``kv_tokens`` above 0)."""
    placement = place(model, policy)
    near, discrete = near_tier(policy), policy.ffn_device == "gpu"
    slot = costs.page_slot_bytes(model, dtype)
    arenas = [
        ArenaSize(purpose="dense", tier=near, bytes=costs.dense_bytes(model, dtype)),
        ArenaSize(purpose="experts", tier=near, bytes=len(placement.resident) * slot),
        ArenaSize(purpose="ring", tier=near, bytes=ring_slots(placement) * slot),
        ArenaSize(purpose="hidden", tier=near, bytes=hidden_arena_bytes(model, policy, dtype)),
        ArenaSize(purpose="work", tier=near, bytes=work_bytes(model, policy, dtype)),
        ArenaSize(purpose="transient", tier=near, bytes=transient_bytes(model, policy, dtype)),
        ArenaSize(purpose="kv", tier="host", bytes=kv_blocks(policy) * kv_block_bytes(model, policy, kv_dtype)),
        ArenaSize(purpose="runtime", tier="host", bytes=RUNTIME_BYTES),
    ]
    if discrete:
        crossing = costs.qkv_bytes(model, dtype, 1) + costs.hidden_bytes(model, dtype, 1)
        arenas += [
            ArenaSize(purpose="host_experts", tier="host", bytes=len(placement.on("host")) * slot),
            ArenaSize(purpose="pinned_ring", tier="host", bytes=pinned_slots(placement) * slot),
            ArenaSize(purpose="crossing", tier="host", bytes=pass_tokens(policy) * crossing),
        ]
    return Footprint(arenas=tuple(arenas))


def ring_slots(placement: Placement) -> int:
    """Slots beside the compute unit: this layer's streamed pages and the next one's (the double buffer)."""
    return 2 * placement.most_streamed_per_layer


def pinned_slots(placement: Placement) -> int:
    """Slots of the pinned ring between a far home and the link."""
    return min(PINNED_SLOTS, ring_slots(placement))


def pass_tokens(policy: Policy) -> int:
    """The most tokens one pass carries: every sequence decoding, and eight micro-batches of prompts riding along."""
    return policy.batch_size + 8 * policy.micro_batch_tokens


def sample_rows(model: ModelProfile) -> int:
    """Rows of float32 logits that are in memory at once."""
    return max(1, LOGITS_BYTES // (4 * model.vocab_size))


def kv_blocks(policy: Policy) -> int:
    """Blocks of the paged KV cache."""
    return -(-policy.kv_tokens // policy.kv_block_size)


def kv_block_bytes(model: ModelProfile, policy: Policy, kv_dtype: DType) -> int:
    """Bytes of one block over all layers."""
    return policy.kv_block_size * costs.kv_token_bytes(model, kv_dtype)


def hidden_arena_bytes(model: ModelProfile, policy: Policy, dtype: DType) -> int:
    """The residual stream of every token in a pass."""
    return pass_tokens(policy) * model.hidden_size * dtype.itemsize


def work_bytes(model: ModelProfile, policy: Policy, dtype: DType) -> int:
    """The buffers experts write while they run."""
    return costs.expert_workspace(model, policy.micro_batch_tokens, dtype).bytes


def transient_bytes(model: ModelProfile, policy: Policy, dtype: DType) -> int:
    """Bound on what passes take from the allocator and give back.

    What micro-batches carry between their acts, and the largest of the acts themselves: attention (a later chunk of a
    prompt gathers its context head by head), the ends of the experts, or the head; with the weights and rows that a
    product copies for itself.
    """
    tokens, item = policy.micro_batch_tokens, dtype.itemsize
    spec, hidden = model.attention, model.hidden_size
    width = max(model.experts.intermediate_size, model.dense_intermediate_size)
    norm = tokens * hidden * (8 + 2 * item)
    context = min(policy.kv_tokens, model.max_positions)
    chunk = 0 if context <= tokens else context * (2 * spec.head_dim * item + CHUNK_ROWS * 5)
    attention = norm + tokens * (4 * spec.q_dim + 4 * spec.kv_dim) * item + chunk
    experts = norm + tokens * (hidden * (8 + 2 * item) + 12 * model.experts.num_experts)
    rows = min(policy.micro_batch_size, sample_rows(model))
    head = min(model.vocab_size * hidden * item, HEAD_CHUNK_BYTES) + 2 * rows * model.vocab_size * 4
    slab = tokens * hidden * 4 + 2 * SLAB_BYTES + tokens * 4 * (SLAB_BYTES // 4 // min(hidden, width))
    repacked = max(2 * width * hidden, (spec.q_dim + 2 * spec.kv_dim) * hidden) * item
    return _carried_bytes(model, policy, dtype) + max(attention, experts, head) + min(slab, 2 * repacked) + repacked


def _carried_bytes(model: ModelProfile, policy: Policy, dtype: DType) -> int:
    """Rotations of every token; queries, keys, values and attention outputs of the micro-batches in flight (all of
    them where streams may still read them, three where one thread computes)."""
    spec = model.attention
    in_flight = pass_tokens(policy) if policy.ffn_device == "gpu" else 3 * policy.micro_batch_tokens
    each = (2 * spec.q_dim + 2 * spec.kv_dim) * dtype.itemsize
    return in_flight * each + pass_tokens(policy) * 2 * spec.head_dim * dtype.itemsize
