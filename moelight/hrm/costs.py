"""The ledger: bytes of every thing a pass stores or moves, each written once. Floor 3 and above only ask."""

from __future__ import annotations

from dataclasses import dataclass

from moelight.core.dtypes import DType
from moelight.core.units import align_up
from moelight.profiles.model import ModelProfile
from moelight.profiles.stored import dense_tensors, page_shapes

TENSOR_ALIGNMENT = 64
PAGE_ALIGNMENT = 4096
ROW_PADDING = 32


def page_bytes(model: ModelProfile, dtype: DType) -> int:
    """Bytes of one expert: gate, up and down."""
    return sum(rows * columns for rows, columns in page_shapes(model).values()) * dtype.itemsize


def page_slot_bytes(model: ModelProfile, dtype: DType) -> int:
    """Bytes one page takes in an arena: whole memory pages, so that slots may be read into directly."""
    return align_up(page_bytes(model, dtype), PAGE_ALIGNMENT)


def dense_bytes(model: ModelProfile, dtype: DType) -> int:
    """Bytes of everything outside the experts, each tensor aligned for vector loads."""
    return sum(align_up(tensor.elements * dtype.itemsize, TENSOR_ALIGNMENT) for tensor in dense_tensors(model))


def kv_token_bytes(model: ModelProfile, dtype: DType) -> int:
    """Bytes of one token's keys and values over all layers."""
    return 2 * model.num_layers * model.attention.kv_dim * dtype.itemsize


def qkv_bytes(model: ModelProfile, dtype: DType, tokens: int) -> int:
    """D1 (section 4.1): queries, keys and values of ``tokens`` tokens of one layer, device to host."""
    return tokens * (model.attention.q_dim + 2 * model.attention.kv_dim) * dtype.itemsize


def kv_bytes(model: ModelProfile, dtype: DType, tokens: int) -> int:
    """Keys and values alone: what a prompt that attended on the device sends down."""
    return tokens * 2 * model.attention.kv_dim * dtype.itemsize


def hidden_bytes(model: ModelProfile, dtype: DType, tokens: int) -> int:
    """D2 (section 4.1): the attention output of ``tokens`` tokens of one layer, host to device."""
    return tokens * model.attention.q_dim * dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWorkspace:
    """The buffers experts write while they run: all routed rows ``[R, H]``; of one expert, gate and up ``[T, 2I]``
    (or its activation in float32); and its activation ``[T, I]`` or its output ``[T, H]``."""

    rows_bytes: int
    wide_bytes: int
    narrow_bytes: int

    @property
    def bytes(self) -> int:
        """All three."""
        return self.rows_bytes + self.wide_bytes + self.narrow_bytes


def expert_workspace(model: ModelProfile, tokens: int, dtype: DType) -> ExpertWorkspace:
    """For micro-batches of ``tokens``, all of which may meet in one expert; row counts may be rounded up."""
    padded = tokens + ROW_PADDING
    width = max(model.experts.intermediate_size, model.dense_intermediate_size)
    rows = (tokens * model.router.top_k + ROW_PADDING) * model.hidden_size * dtype.itemsize
    narrow = padded * max(width, model.hidden_size) * dtype.itemsize
    sizes = [align_up(size, TENSOR_ALIGNMENT) for size in (rows, padded * 2 * width * dtype.itemsize, narrow)]
    return ExpertWorkspace(rows_bytes=sizes[0], wide_bytes=sizes[1], narrow_bytes=sizes[2])
