"""The ledger: bytes and flops of everything that a pass stores, moves or computes, one function per quantity.

Token counts may be numbers or arrays. Symbols of MoE-Lightning (table 1): h1 hidden size, h2 expert width, n_e experts,
k of them per token, n_q and n_kv heads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from moelight.core.dtypes import FLOAT32, DType, dtype_named
from moelight.core.policy import Policy
from moelight.core.units import MiB, align_up
from moelight.profiles.model import AttentionSpec, ModelProfile, StoredTensor
from moelight.profiles.tensor_list import StackedTensor, dense_tensors, page_shapes

TENSOR_ALIGNMENT = 64
PAGE_ALIGNMENT = 4096
ROW_PADDING = 32
KV_SCALE_BYTES = 4  # float32, of the key or value of one head and token in a quantised cache
PART_BYTES = 32 * MiB  # 2.7 ms of the slowest shipped link (12.3 GB/s): the longest that a transfer waits behind a page
EXPERT_ROWS = 1024  # rows of one expert at a time: enough to make any processor compute-bound, not weight-bound
WHOLE_LAYERS_TOKENS = 64  # of a pass whose micro-batches go through layers in one task, on a CPU
# Seconds of an expert whose activation torch computes over those by our kernels (docs/log.md), and of a quantised one
# where Triton does not use the tensor units (compute capability 7.5).
TORCH_EXPERTS = 4.0
# On a GPU, rows of a product that take as long as unpacking a quantised matrix once, for a block of as many rows: about
# ten integer operations a number. Estimated; no card has measured it.
UNPACK_ROWS = 128.0
_ALL_MET = 1e3
_PRICED_GROUP = 256
_AFTER_ATTENTION = ("o", "router", "dense", "shared")


def page_elements(model: ModelProfile) -> int:
    """Numbers in one expert: 3 h1 h2."""
    return sum(rows * columns for rows, columns in page_shapes(model).values())


def page_dtype(model: ModelProfile, dtype: DType, name: str = "auto") -> DType:
    """The format of expert pages beside a computation in ``dtype``: the one called ``name``, else the stored one. A
    float called ``name`` is the computation's where experts are quantised, which stay as they are stored."""
    if name != "auto" and (model.stored is None or dtype_named(name).group):
        return dtype_named(name)
    return dtype.page_dtype if model.stored is None else model.stored.dtype


def kv_dtype(policy: Policy, dtype: DType) -> DType:
    """The format of the KV cache of ``policy`` (or of candidates) beside a computation in ``dtype``."""
    return dtype if policy.kv_dtype == "auto" else dtype_named(policy.kv_dtype)


def page_bytes(model: ModelProfile, dtype: DType) -> int:
    """Bytes of one expert: gate, up and down. W_i of the paper is n_e of them. Of a quantised model, in its stored
    format, those of the largest."""
    if model.stored is not None and dtype == model.stored.dtype:
        return model.stored.page_bytes
    return sum(dtype.bytes_for(rows * columns) for rows, columns in page_shapes(model).values())


def moved_page_bytes(model: ModelProfile, dtype: DType) -> int:
    """Bytes of one expert that are read, transferred or computed with: `page_bytes`, on average if pages differ."""
    if model.stored is not None and dtype == model.stored.dtype:
        return model.stored.mean_page_bytes
    return page_bytes(model, dtype)


def moved_bytes_by_layer(model: ModelProfile, dtype: DType) -> tuple[int, ...]:
    """`moved_page_bytes` of each layer; the average of all where experts of one layer differ."""
    stored = model.stored
    if stored is None or dtype != stored.dtype or sum(stored.pages) * model.experts.num_experts != stored.total_bytes:
        return (moved_page_bytes(model, dtype),) * model.num_layers
    return stored.pages


def page_slot_bytes(model: ModelProfile, dtype: DType) -> int:
    """Bytes of the slot of any expert page in an arena: whole memory pages, so that direct I/O can read into it."""
    return align_up(page_bytes(model, dtype), PAGE_ALIGNMENT)


def page_slots_by_layer(model: ModelProfile, dtype: DType) -> tuple[int, ...]:
    """Bytes of the slot of a page of each layer: `page_slot_bytes` of the layer's largest page; 0 without experts."""
    if model.stored is not None and dtype == model.stored.dtype:
        return tuple([align_up(size, PAGE_ALIGNMENT) for size in model.stored.pages])
    return tuple([page_slot_bytes(model, dtype) * has_experts for has_experts in model.moe_layers])


def mean_slot_bytes(model: ModelProfile, dtype: DType) -> float:
    """Bytes of the slot of a page on average."""
    return sum(page_slots_by_layer(model, dtype)) / max(model.num_moe_layers, 1)


def page_parts(size: int, max_bytes: int = PART_BYTES) -> tuple[range, ...]:
    """Byte ranges in which an expert page of ``size`` bytes crosses a link: as few of at most ``max_bytes`` bytes as
    possible, nearly equal; every part but the last ends on a multiple of `PAGE_ALIGNMENT`."""
    blocks, count = -(-size // PAGE_ALIGNMENT), -(-size // max_bytes)
    bounds = [min(size, blocks * part // count * PAGE_ALIGNMENT) for part in range(count + 1)]
    return tuple(range(first, last) for first, last in pairwise(bounds))


def repacked_page_bytes(model: ModelProfile, dtype: DType, ffn_device: str, *, discrete: bool) -> int:
    """Bytes of one expert, on average, that are turned into packed integers when it is read: none where a GPU computes
    all experts, or pages cross a link in parts."""
    if model.stored is None or dtype != model.stored.dtype or not repacks(ffn_device):
        return 0
    parts = page_parts(page_bytes(model, dtype)) if discrete and ffn_device != "cpu" else ()
    return model.stored.repacked_bytes if len(parts) < 2 else 0


def repacks(ffn_device: str) -> bool:
    """True if a CPU computes experts, whose kernels read packed integers faster than what is stored by columns."""
    return ffn_device != "gpu"


@lru_cache(maxsize=64)
def dense_bytes(model: ModelProfile, dtype: DType, *, as_stored: bool = False) -> int:
    """Bytes of all tensors outside the experts in memory, each aligned for vector loads. ``as_stored``: as
    `keeps_stored` says; else none is quantised there."""
    return sum(
        align_up(dense_tensor_bytes(model, tensor, dtype, as_stored=as_stored), TENSOR_ALIGNMENT)
        for tensor in dense_tensors(model)
    )


def dense_tensor_bytes(model: ModelProfile, tensor: StackedTensor, dtype: DType, *, as_stored: bool) -> int:
    """Bytes of one of them, without the alignment."""
    sizes = kept_parts(model, tensor) if as_stored else None
    return tensor.elements * (tensor.itemsize or dtype.itemsize) if sizes is None else sum(sizes)


def kept_parts(model: ModelProfile, tensor: StackedTensor) -> tuple[int, ...] | None:
    """Bytes in memory of each part of a tensor that is kept as stored; None of another."""
    sizes = [_kept_sizes(model).get((part.name, part.layer)) for part in tensor.parts]
    present = tuple(size for size in sizes if size is not None)
    return present if len(present) == len(sizes) else None


def keeps_stored(model: ModelProfile, dtype: DType, *, discrete: bool) -> bool:
    """True if the CPU multiplies by quantised matrices outside the experts as they are stored: beside no GPU
    (``discrete``), computing in ``dtype``."""
    return model.stored is not None and bool(model.stored.dense_stored) and not discrete and not dtype.pages


@lru_cache(maxsize=64)
def kept_dtype(model: ModelProfile, dtype: DType, *, head: bool) -> DType:
    """The matrices of all layers outside the experts (or the ``head``), of which some are kept as stored, as a number
    format for prices: `DType.bytes_for` their numbers are their bytes, nearly."""
    ends = ("embed",) if model.tie_embeddings else ("head",)
    size = elements = 0
    for tensor in dense_tensors(model):
        if tensor.name in ends if head else tensor.layer >= 0 and len(tensor.shape) > 1:
            size += dense_tensor_bytes(model, tensor, dtype, as_stored=True)
            elements += tensor.elements
    if not elements or size >= elements * dtype.itemsize:
        return dtype
    bits = 8 * size // elements
    rest = -(-(8 * size - bits * elements) * _PRICED_GROUP // (8 * elements))
    return DType(name="stored", bits=bits, group=_PRICED_GROUP, scale_bytes=rest)


def stored_bytes(model: ModelProfile, tensor: StackedTensor, dtype: DType) -> int:
    """Bytes of a tensor outside the experts in the checkpoint: in ``dtype`` or its own size unless it is quantised."""
    stored, itemsize = _stored_dense(model), tensor.itemsize or dtype.itemsize
    return sum(stored.get((part.name, part.layer), part.elements * itemsize) for part in tensor.parts)


def stored_page_bytes(model: ModelProfile, tensor: StoredTensor, dtype: DType) -> int:
    """Bytes of a matrix of a dense model's pages in the checkpoint: in ``dtype`` unless it is quantised."""
    return _stored_dense(model).get((tensor.name, tensor.layer), dtype.bytes_for(tensor.elements))


@lru_cache(maxsize=64)
def _kept_sizes(model: ModelProfile) -> dict[tuple[str, int], int]:
    return {(name, layer): size for name, layer, size in model.stored.dense_stored} if model.stored else {}


@lru_cache(maxsize=64)
def _stored_dense(model: ModelProfile) -> dict[tuple[str, int], int]:
    return {(name, layer): size for name, layer, size in model.stored.dense} if model.stored else {}


@lru_cache(maxsize=64)
def widest_matrix(model: ModelProfile) -> tuple[int, int]:
    """Rows of the widest matrix that multiplies every token of a layer, and the numbers of the largest one (a module
    graph multiplies by its whole head at once, too)."""
    if model.tensors:
        stored = (*model.tensors, *model.page_tensors)
        shapes = [tensor.shape for tensor in stored if tensor.layer >= 0 and len(tensor.shape) > 1]
        return max(shape[0] for shape in shapes), max(head_elements(model), *(math.prod(shape) for shape in shapes))
    width = max(model.experts.intermediate_size, model.dense_intermediate_size)
    spec, hidden = model.attention, model.hidden_size
    return 2 * width, max(2 * width * hidden, (spec.query_width + spec.cache_width) * hidden)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerElements:
    """Numbers in the matrices of one layer that multiply every token, per phase; routed experts excluded."""

    before_attention: int
    after_attention: int


@lru_cache(maxsize=64)
def layer_elements(model: ModelProfile) -> tuple[LayerElements, ...]:
    """`LayerElements` of each layer, in order."""
    if model.layers:
        return tuple(
            LayerElements(before_attention=layer.before, after_attention=layer.after) for layer in model.layers
        )
    before, after = [0] * model.num_layers, [0] * model.num_layers
    for tensor in dense_tensors(model):
        if tensor.layer >= 0 and len(tensor.shape) > 1:
            (after if tensor.name.startswith(_AFTER_ATTENTION) else before)[tensor.layer] += tensor.elements
    return tuple(
        LayerElements(before_attention=first, after_attention=second)
        for first, second in zip(before, after, strict=True)
    )


@lru_cache(maxsize=64)
def layer_kinds(model: ModelProfile) -> tuple[tuple[LayerElements, bool, int], ...]:
    """``(elements, has experts, number of layers)`` for each kind of layer."""
    kinds = Counter(zip(layer_elements(model), model.moe_layers, strict=True))
    return tuple((elements, moe, count) for (elements, moe), count in kinds.items())


def head_elements(model: ModelProfile) -> int:
    """Numbers in the matrix that turns hidden states into logits."""
    return model.vocab_size * model.hidden_size


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKind:
    """Attention over the paged cache that a number of ``layers`` share."""

    spec: AttentionSpec
    layers: int

    @property
    def limit(self) -> int | None:
        """The most positions that a token attends to in the layers that have a window or a chunk; None: all."""
        return self.spec.chunk if self.spec.window is None else self.spec.window

    @property
    def windowed(self) -> int:
        """The number of layers with a window or a chunk, which latent attention does not have."""
        if self.limit is None or self.spec.latent is not None:
            return 0
        return sum(self.spec.window_layers) if self.spec.window_layers else self.layers

    def seen(self, context: Any) -> Any:
        """Positions that a token after ``context`` tokens attends to, summed over the layers: all, a window, or at
        most a chunk."""
        window = context if self.limit is None else np.minimum(context, self.limit)
        return (self.layers - self.windowed) * context + self.windowed * window

    def seen_on_average(self, context: Any) -> Any:
        """Return the tokens seen in an average layer."""
        return self.seen(context) / self.layers


def attention_kinds(model: ModelProfile) -> tuple[AttentionKind, ...]:
    """Each kind of attention; layers without attention over the paged cache have none."""
    if model.layers:
        return _different_kinds(model)
    return (AttentionKind(spec=model.attention, layers=model.num_layers),)


@lru_cache(maxsize=64)
def _different_kinds(model: ModelProfile) -> tuple[AttentionKind, ...]:
    kinds = Counter(layer.attention for layer in model.layers if layer.attention.num_heads)
    return tuple(AttentionKind(spec=spec, layers=layers) for spec, layers in kinds.items())


@lru_cache(maxsize=64)
def layer_attention(model: ModelProfile) -> tuple[AttentionKind | None, ...]:
    """The kind of attention of each layer; None without any over the paged cache."""
    if not model.layers:
        return attention_kinds(model) * model.num_layers
    kinds = {kind.spec: kind for kind in attention_kinds(model)}
    return tuple(kinds.get(layer.attention) for layer in model.layers)


def attention_flops(spec: AttentionSpec, pairs: Any) -> Any:
    """Flops of one layer's scores and values over ``pairs`` of a query token and an attended position: 4 n_q d per pair
    (the paper counts the 2 n_q d of the scores alone). Absorbed latent attention: scores over the latent and rotary
    widths, values over the latent."""
    if spec.latent is not None:
        return 2.0 * pairs * spec.num_heads * (2 * spec.latent.kv_lora_rank + spec.latent.rope_head_dim)
    return 4.0 * pairs * spec.query_width


def seen_positions(model: ModelProfile, context: Any) -> Any:
    """Attended positions of a token after ``context`` tokens, summed over layers."""
    return sum(kind.seen(context) for kind in attention_kinds(model))


@lru_cache(maxsize=64)
def layer_states(model: ModelProfile) -> tuple[tuple[int, int], ...]:
    """Bytes of the state of one sequence beside the paged cache, and more for each of its tokens, of each layer."""
    states = tuple((layer.state_bytes, layer.state_token_bytes) for layer in model.layers)
    return states or ((0, 0),) * model.num_layers


def state_bytes(model: ModelProfile) -> tuple[int, int]:
    """`layer_states` over all layers."""
    return _sum_of_states(model) if model.layers else (0, 0)


@lru_cache(maxsize=64)
def _sum_of_states(model: ModelProfile) -> tuple[int, int]:
    per_sequence, of_token = zip(*layer_states(model), strict=True)
    return sum(per_sequence), sum(of_token)


def distinct_experts(model: ModelProfile, tokens: Any) -> Any:
    """Expected distinct experts of one layer (of a rank: of those that it has) to which ``tokens`` tokens are routed,
    under uniform routing."""
    return expected_distinct(model.routed_experts, model.router.top_k, tokens) / model.ranks


def expected_distinct(experts: int, top_k: int, tokens: Any) -> Any:
    """Expected distinct experts if each of ``tokens`` draws ``top_k`` of ``experts`` at random: E (1 - (1 - k/E)^t)."""
    missed = math.log1p(-top_k / experts) if top_k < experts else -_ALL_MET  # log of the share that a token misses
    return -experts * np.expm1(tokens * missed)


def kv_row_bytes(spec: AttentionSpec, dtype: DType) -> int:
    """Bytes of one token in the KV cache of a layer with ``spec``: keys and values, or the latent; quantised, with the
    scale of each head's key and value."""
    if dtype.group:
        scales = 1 if spec.latent is not None else 2 * spec.num_kv_heads
        return -(-spec.cache_width * dtype.bits // 8) + scales * KV_SCALE_BYTES
    return dtype.bytes_for(spec.cache_width)


def kv_crossing_dtype(attention: str, dtype: DType, kv_dtype: DType) -> DType:
    """The format in which new keys and values cross the link: that of the cache; beside ``attention`` on the CPU, which
    quantises them itself, that of the computation."""
    return kv_dtype if attention == "gpu" else dtype


def kv_layer_bytes(model: ModelProfile, dtype: DType, layer: int | None = None) -> int:
    """Bytes of one token in the KV cache of one layer (None: the widest)."""
    if layer is not None or not model.layers:
        return kv_row_bytes(model.attention_of(layer or 0), dtype)
    return max(kv_row_bytes(spec, dtype) for spec in _attention_specs(model))


def kv_token_bytes(model: ModelProfile, dtype: DType) -> int:
    """Bytes of one token in the KV cache over all layers."""
    return sum(kind.layers * kv_row_bytes(kind.spec, dtype) for kind in attention_kinds(model))


def windowed_token_bytes(model: ModelProfile, dtype: DType) -> int:
    """`kv_token_bytes` of the layers of which a token attends to the last positions only."""
    return sum(kind.windowed * kv_row_bytes(kind.spec, dtype) for kind in attention_kinds(model))


@lru_cache(maxsize=64)
def widest_window(model: ModelProfile) -> int | None:
    """The most positions that a token attends to in layers with a window; None unless some layers have one and others
    have none."""
    kinds = attention_kinds(model)
    windows = [kind.limit for kind in kinds if kind.limit is not None and kind.windowed]
    some = 0 < sum(kind.windowed for kind in kinds) < sum(kind.layers for kind in kinds)
    return max(windows) if some else None


def qkv_bytes(model: ModelProfile, dtype: DType, tokens: int, layer: int | None = None) -> int:
    """D1 (section 4.1): bytes of queries, keys and values of ``tokens`` tokens of one layer (None: of the widest),
    device to host."""
    if layer is None:
        return tokens * (attention_width(model) + cache_width(model)) * dtype.itemsize
    spec = model.attention_of(layer)
    return tokens * (spec.query_width + spec.cache_width) * dtype.itemsize


def hidden_bytes(model: ModelProfile, dtype: DType, tokens: int, layer: int | None = None) -> int:
    """D2 (section 4.1): bytes of the attention output of ``tokens`` tokens of one layer (None: of the widest), host to
    device."""
    width = attention_out_width(model) if layer is None else model.attention_of(layer).output_width
    return tokens * width * dtype.itemsize


def residual_bytes(model: ModelProfile, dtype: DType, tokens: int) -> int:
    """Bytes of the input of the experts for ``tokens`` tokens, and also of the output: hidden states, as a rule."""
    return tokens * model.expert_input * dtype.itemsize


def summed_bytes(model: ModelProfile, dtype: DType) -> int:
    """Bytes of a token's hidden states, float32 in mixed precision, which the ranks of ``model`` sum after the experts
    of a layer; 0 of one rank."""
    return residual_bytes(model, FLOAT32 if dtype.pages else dtype, 1) if model.ranks > 1 else 0


def sent_bytes(model: ModelProfile, dtype: DType, tokens: int) -> int:
    """Bytes that a rank sends in the sum of the hidden states of ``tokens``: over a ring, each term passes twice."""
    return 2 * (model.ranks - 1) * tokens * summed_bytes(model, dtype) // model.ranks


def gathered_bytes(model: ModelProfile, dtype: DType) -> tuple[int, int]:
    """Bytes of a token's attended heads, and of their projection, which ranks gather after attention."""
    if model.head_ranks == 1:
        return 0, 0
    return model.head_ranks * model.attention.output_width * dtype.itemsize, model.hidden_size * dtype.itemsize


def vocabulary_ranks(model: ModelProfile) -> int:
    """The number of ranks that compute a part of a token's logits each, which they gather; 1: each computes all."""
    return model.ranks if not model.tensors and model.vocab_size % model.ranks == 0 else 1


def routed_bytes(model: ModelProfile, dtype: DType, tokens: int) -> int:
    """Bytes that cross a link to the experts: hidden states, and the expert ids and weights of each token."""
    return residual_bytes(model, dtype, tokens) + tokens * routing_bytes(model)


def routing_bytes(model: ModelProfile) -> int:
    """Bytes of the routing of one token: an id (int32) and a weight (float32) per chosen expert."""
    return 8 * model.router.top_k


def attention_width(model: ModelProfile, layer: int | None = None) -> int:
    """Numbers in the queries of one token in one layer (None: the widest)."""
    if layer is not None or not model.layers:
        return model.attention_of(layer or 0).query_width
    return max(spec.query_width for spec in _attention_specs(model))


def attention_out_width(model: ModelProfile, layer: int | None = None) -> int:
    """Numbers in the attention output of one token in one layer (None: the widest)."""
    if layer is not None or not model.layers:
        return model.attention_of(layer or 0).output_width
    return max(spec.output_width for spec in _attention_specs(model))


def cache_width(model: ModelProfile, layer: int | None = None) -> int:
    """Numbers per token in the KV cache of one layer (None: the widest)."""
    if layer is not None or not model.layers:
        return model.attention_of(layer or 0).cache_width
    return max(spec.cache_width for spec in _attention_specs(model))


def widest_head(model: ModelProfile) -> int:
    """Width of a key of any layer."""
    return max(spec.head_dim for spec in _attention_specs(model))


def _attention_specs(model: ModelProfile) -> Iterable[AttentionSpec]:
    return [kind.spec for kind in attention_kinds(model)] or [model.attention]


# Times that host memory is touched for each byte of a page that is turned when it is read.
REPACKING_PASSES = 2


def staging_passes(*, from_disk: bool) -> int:
    """Times that host memory is touched per streamed byte: write and link's read, and a copy if not from disk."""
    return 2 if from_disk else 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWorkspace:
    """Sizes of the buffers that experts write. ``rows_bytes``: all routed rows ``[R, H]``. For at most `EXPERT_ROWS`
    rows of an expert, ``wide_bytes``: gate and up ``[rows, 2I]`` or the float32 activation (all experts in one launch:
    ``[R, I]``); ``narrow_bytes``: activation ``[rows, I]`` or output ``[rows, H]``."""

    rows_bytes: int
    wide_bytes: int
    narrow_bytes: int

    @property
    def bytes(self) -> int:
        return self.rows_bytes + self.wide_bytes + self.narrow_bytes


def expert_workspace(model: ModelProfile, tokens: Any, dtype: DType, *, grouped: bool) -> ExpertWorkspace:
    """The expert workspace for micro-batches of ``tokens``, all of which may be routed to one expert. ``grouped``:
    experts may run in one launch. The CPU's native kernel uses smaller buffers of its own, not ``wide_bytes`` and
    ``narrow_bytes``; the layers of a dense model none, since graphs allocate their own."""
    if model.dense:
        tokens = 0 * tokens
    routed, padded = tokens * model.router.top_k + ROW_PADDING, np.minimum(tokens, EXPERT_ROWS) + ROW_PADDING
    width = max(model.experts.intermediate_size, model.dense_intermediate_size)
    wide = padded * 2 * width
    if grouped:
        wide = np.maximum(wide, routed * model.experts.intermediate_size)
    counts = (routed * model.expert_input, wide, padded * max(width, model.expert_input))
    itemsizes = (dtype.residual_itemsize, dtype.itemsize, dtype.itemsize)
    sizes = [align_up(count * size, TENSOR_ALIGNMENT) for count, size in zip(counts, itemsizes, strict=True)]
    return ExpertWorkspace(rows_bytes=sizes[0], wide_bytes=sizes[1], narrow_bytes=sizes[2])
