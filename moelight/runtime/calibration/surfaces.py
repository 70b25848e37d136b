"""Speeds of memory, and speeds that depend on the size of the work: products by rows and weights, attention by context.

Runs the kernels of a pass, in the units of `EFFICIENCY`, on operands from a pool far larger than any cache: a pass
finds no weight in a cache. Legend: R rows, H hidden, I intermediate, B sequences, L context, Hq query heads, Hkv
key/value heads, D head size.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from statistics import median

import numpy as np
import torch
from torch import Tensor

from moelight.core.dtypes import BFLOAT16
from moelight.core.units import MiB, align_up
from moelight.hrm.cost_model import TOUCHED_AFTER, TOUCHED_BEFORE
from moelight.hrm.costs import expert_workspace
from moelight.kernels.attention import cpu_gqa_decode, cpu_kv_append, cpu_prefill_attention
from moelight.kernels.device import Device
from moelight.kernels.gpu.attention import Ints, RaggedBatch, prompt_form
from moelight.kernels.matrices import stack_of
from moelight.kernels.norm import rms_norm
from moelight.kernels.products import Workspace, linear
from moelight.models.decoder import NativeDecoder, rotation
from moelight.models.expert import Expert, LayerExperts
from moelight.models.moe import Experts, Routed, grouped_pages, moe_forward
from moelight.models.pages import PagedExperts
from moelight.profiles.efficiency import Curve, Surface
from moelight.profiles.model import AttentionSpec, ExpertSpec, ModelProfile, RouterSpec
from moelight.profiles.names import MIXTRAL_STYLE
from moelight.runtime.attention_ops import kernels_of
from moelight.runtime.calibration.effort import Effort, Shape
from moelight.runtime.calibration.timing import Measure, Measurement, Work, finisher, reading_of, repeated, sample
from moelight.weights.expert_pages import lay_out_pages
from moelight.weights.load import LayerWeights, ModelWeights

SHARE_OF_FREE = 4  # the pool takes at most this fraction of free memory: 1 / SHARE_OF_FREE
LEAST_TURNS = 3  # least number of operand groups that the pool must hold
_SEED_NUMBERS = 4 * MiB
_ALIGNMENT = 64
# The heads of Mixtral 8x7B: four queries of a sequence share keys and values.
Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
KV_NUMBERS = 2 * KV_HEADS * HEAD_DIM
BLOCK = 32
SEQUENCES = 64
PROMPT_TOKENS = 4096  # of the device's prompts at once
_SCALE = HEAD_DIM**-0.5

# Bytes that a norm and a residual sum read and write per 16-bit number: widen 2 + 4, square 4 + 4, mean 4, scale 4 + 4,
# round 4 + 2, weigh 2 + 2, add 4 + 2.
NORM_BYTES = 42
TOP_K = 2
MOST_EXPERTS = 8
ROUTINGS = 8  # drawn in advance, used in turn

# A layer whose experts are almost nothing, for the work around them.
HIDDEN = 2048
ACTS = 3  # layer phases: before attention, attention, after attention
_FEW_TOKENS = 16
_BLOCK = 16
_LEAST_SHARE = 0.05  # least share of the whole that remains once products are subtracted
_MODEL = ModelProfile(
    name="one layer",
    model_type="mixtral",
    num_layers=1,
    hidden_size=HIDDEN,
    vocab_size=64,
    max_positions=1 << 20,
    norm_eps=1e-5,
    tie_embeddings=True,
    dtype=BFLOAT16.name,
    attention=AttentionSpec(num_heads=16, num_kv_heads=4, head_dim=128),
    router=RouterSpec(top_k=TOP_K, normalize=True, weights_in_model_dtype=False),
    experts=ExpertSpec(num_experts=8, intermediate_size=64),
    moe_layers=(True,),
    names=MIXTRAL_STYLE,
)

LARGE = "large"
# A surface's name, the bytes of its weights (0 where it has none), and rows, context, prompt tokens or bytes.
Point = tuple[str, int, float]
Points = Mapping[Point, Measure]


class Pool:
    """Initialized ``buffer`` [N] of 16 bits, from which operands are cut."""

    def __init__(self, size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate about ``size`` bytes; raises RuntimeError if the device has too little free memory."""
        count = max(_ALIGNMENT, size // dtype.itemsize // _ALIGNMENT * _ALIGNMENT)
        self.buffer = torch.empty(count, dtype=dtype, device=device)
        self.device, self.dtype, self.nbytes = device, dtype, self.buffer.nbytes
        self._reached = 0
        seed, *others = self.buffer.split(_SEED_NUMBERS)
        seed.normal_(std=0.02)
        for part in others:
            part.copy_(seed[: len(part)])

    def holds(self, *shapes: tuple[int, ...]) -> bool:
        """True if the pool holds at least `LEAST_TURNS` groups of tensors of ``shapes``."""
        return LEAST_TURNS * sum(map(prod, shapes)) <= self.buffer.numel()

    def groups(self, *shapes: tuple[int, ...]) -> Iterator[tuple[Tensor, ...]]:
        """Groups of neighbouring tensors of ``shapes`` without end; each begins where the pool's last group ended."""
        sizes = [prod(shape) for shape in shapes]
        while True:
            if self._reached + sum(sizes) > self.buffer.numel():
                self._reached = 0
            cuts = self.buffer[self._reached : self._reached + sum(sizes)].split(sizes)
            self._reached = align_up(self._reached + sum(sizes), _ALIGNMENT)
            yield tuple(cut.view(shape) for cut, shape in zip(cuts, shapes, strict=True))

    def normal(self, *shape: int) -> Tensor:
        """A new tensor like ``buffer``, of normal deviates."""
        return torch.randn(shape, device=self.device).to(self.dtype)

    def measure(self, make: Callable[..., tuple[Work, float]], *arguments: object) -> Measure:
        """Measures the work and its amount that ``make`` creates with its operands, which are freed after it."""

        def measure(seconds: float) -> Measurement:
            work, amount = make(self, *arguments)
            return sample(work, seconds=seconds, amount=amount, finish=finisher(self.device))

        return measure


def read_work(pool: Pool) -> tuple[Work, float]:
    """Reading of the whole pool with all threads, and its bytes."""
    return pool.buffer.view(torch.float32).sum, pool.nbytes


def copy_work(pool: Pool) -> tuple[Work, float]:
    """Copy of one half of the pool to the other; each byte counts once."""
    here, target = pool.buffer.view(2, -1)
    return partial(target.copy_, here), here.nbytes


def norm_work(pool: Pool, rows: int, hidden: int) -> tuple[Work, float]:
    """A norm and a residual sum over ``rows`` hidden states, as in a layer, and the bytes that they touch."""
    x, weight = pool.normal(rows, hidden), torch.ones(hidden, device=pool.device, dtype=pool.dtype)
    return partial(rms_norm, x, weight, 1e-5, add=torch.zeros_like(x)), NORM_BYTES * x.numel()


def points(unit: str, pool: Pool, effort: Effort) -> Points:
    """All points of the surfaces of ``unit``, and `LARGE`, one compute-bound product, smallest work first: those whose
    operands the pool holds, in several groups where they are weights.

    ``linear``, ``experts`` (with sorting, gathering, ragged rows and the weighted sum) and ``prefill`` in flop/s;
    ``attention`` in bytes/s of keys and values; ``elementwise`` in bytes/s that one layer phase touches.
    """
    on_cpu, measures = unit == "cpu", dict[Point, Measure]()
    rows, (shape, tall) = (effort.rows, effort.large) if on_cpu else (effort.gpu_rows, effort.gpu_large)
    for context in effort.contexts:
        if context * KV_NUMBERS <= pool.buffer.numel():
            work = decode_work if on_cpu else device_decode_work
            measures[f"{unit}_attention", 0, context] = pool.measure(work, context)
    for tokens in effort.prompts:
        measures[f"{unit}_prefill", 0, tokens] = pool.measure(prefill_work if on_cpu else device_prefill_work, tokens)
    products = [(f"{unit}_linear", *sizes) for sizes in itertools.product(effort.linear, rows)]
    for name, weight, count in [*products, (LARGE, shape, tall)]:
        if pool.holds(weight):
            measures[name, _nbytes(pool, weight), count] = pool.measure(linear_work, weight, count)
    for page, count in itertools.product(effort.experts, rows):
        experts, tokens = _layer(pool, page, count)
        if experts >= TOP_K:
            # rows of an expert that some token meets
            mean_rows = tokens * TOP_K / (experts * (1 - (1 - TOP_K / experts) ** tokens))
            point = f"{unit}_experts", _nbytes(pool, *_page(page)), mean_rows
            measures[point] = pool.measure(moe_work, page, experts, tokens)
    for tokens in effort.touching:
        touch = partial(touches, pool, tokens) if on_cpu else pool.measure(norm_work, tokens, HIDDEN)
        measures[f"{unit}_elementwise", 0, _touched(tokens) / 2] = touch
    return dict(sorted(measures.items(), key=lambda item: item[0][2]))


def surface_of(name: str, readings: Mapping[Point, Measurement]) -> tuple[Surface, float]:
    """The surface ``name`` from its points among ``readings``, and the median of their spreads."""
    matching = {(size, x): reading for (of, size, x), reading in readings.items() if of == name}
    by_size: dict[float, dict[float, float]] = {}
    for size, x in sorted(matching):
        by_size.setdefault(float(size), {})[float(x)] = significant(matching[size, x].rate)
    curves = tuple(Curve(x=tuple(curve), y=tuple(curve.values())) for curve in by_size.values())
    spread = median(reading.spread for reading in matching.values())
    return Surface(name=name, sizes=tuple(by_size), curves=curves), spread


def significant(value: float, digits: int = 4) -> float:
    """``value`` to so many significant digits."""
    return float(f"{value:.{digits}g}")


def layer_work(pool: Pool, shape: Shape, rows: int) -> tuple[Work, float]:
    """One layer of as many experts as the pool holds, each with about ``rows`` rows; and its flop."""
    return moe_work(pool, shape, *_layer(pool, shape, rows))


def moe_work(pool: Pool, shape: Shape, experts: int, tokens: int) -> tuple[Work, float]:
    """One layer of ``experts`` experts over ``tokens`` tokens, routed at random; and its flop."""
    hidden, width = shape
    pages, routings = pool.groups(*(_page(shape) * experts)), itertools.cycle(_routings(pool, hidden, experts, tokens))
    spec = ExpertSpec(num_experts=experts, intermediate_size=width)
    space = _workspace(replace(_MODEL, hidden_size=hidden, experts=spec), tokens, pool)
    layers: dict[int, Experts] = {}  # by address: as at loading, a layer is prepared once

    def work() -> Tensor:
        views = next(pages)
        if (address := views[0].data_ptr()) not in layers:
            made = [Expert(gate_up=gate_up, down=down) for gate_up, down in zip(views[::2], views[1::2], strict=True)]
            layers[address] = grouped_pages(made, views[0].dtype) or LayerExperts(made)
        return moe_forward(next(routings), layers[address], space)

    return work, 6.0 * tokens * TOP_K * hidden * width


def _routings(pool: Pool, hidden: int, experts: int, tokens: int) -> list[Routed]:
    x = pool.normal(tokens, hidden)
    weights = torch.full((tokens, TOP_K), 1 / TOP_K, dtype=torch.float32, device=pool.device)
    drawn = torch.rand(ROUTINGS, tokens, experts, generator=torch.Generator().manual_seed(0))
    ids = drawn.topk(TOP_K).indices.sort().values.to(torch.int32).to(pool.device)
    return [Routed(x=x, weights=weights, ids=row_ids) for row_ids in ids]


def _layer(pool: Pool, shape: Shape, rows: int) -> tuple[int, int]:
    """Number of experts, of which the pool holds several sets, and of tokens that give each about ``rows`` rows."""
    experts = next((count for count in range(MOST_EXPERTS, 0, -1) if pool.holds(*(_page(shape) * count))), 0)
    return experts, 1 if rows == 1 else max(1, rows * experts // TOP_K)


def decode_work(pool: Pool, context: int) -> tuple[Work, float]:
    """Decoding of one batch of sequences on the CPU, their blocks in order through the pool; and its bytes."""
    blocks_each = -(-context // BLOCK)
    unit = KV_HEADS * BLOCK * HEAD_DIM
    size = pool.buffer.numel() // 2 // unit * unit
    keys, values = pool.buffer[: 2 * size].view(2, -1, KV_HEADS, BLOCK, HEAD_DIM)
    batch = max(1, min(SEQUENCES, len(keys) // blocks_each))
    turns = max(1, len(keys) // (batch * blocks_each))
    tables = torch.arange(turns * batch * blocks_each, dtype=torch.int32).view(turns, batch, blocks_each)
    lengths = torch.full((batch,), context, dtype=torch.int32)
    queries = pool.normal(batch, Q_HEADS, HEAD_DIM)
    out, turn = torch.empty_like(queries), itertools.cycle(tables)

    def work() -> None:
        cpu_gqa_decode(queries, keys, values, next(turn), lengths, _SCALE, out=out)

    return work, float(batch * context * KV_NUMBERS * pool.dtype.itemsize)


def device_decode_work(pool: Pool, context: int) -> tuple[Work, float]:
    """Decoding of one batch of sequences on the device, their blocks in order through the pool; and its bytes."""
    blocks_each = -(-context // BLOCK)
    cache = pool.buffer[: pool.buffer.numel() // KV_NUMBERS * KV_NUMBERS].view(-1, 2, KV_HEADS, HEAD_DIM)
    count = max(1, min(SEQUENCES, len(cache) // (blocks_each * BLOCK)))
    batches = [
        _ragged(pool, [1] * count, [context] * count, (first + np.arange(count * blocks_each)) * BLOCK)
        for first in range(0, max(1, len(cache) // BLOCK - count * blocks_each + 1), count * blocks_each)
    ]
    q, (k, v) = pool.normal(count, Q_HEADS, HEAD_DIM), pool.normal(2, count, KV_HEADS, HEAD_DIM)
    attend, turn = kernels_of(pool.device).attend, itertools.cycle(batches)

    def work() -> Tensor:
        return attend(q, k, v, next(turn), _SCALE, cache=cache)

    return work, float(count * context * KV_NUMBERS * pool.dtype.itemsize)


def linear_work(pool: Pool, shape: Shape, rows: int) -> tuple[Work, float]:
    """One product with the next weights of the pool; and its flop."""
    weights, x = pool.groups(shape), pool.normal(rows, shape[1])
    return lambda: linear(x, next(weights)[0]), 2.0 * rows * shape[0] * shape[1]


def prefill_work(pool: Pool, tokens: int) -> tuple[Work, float]:
    """Attention of one prompt over itself on the CPU; and its flop."""
    q, (k, v) = pool.normal(tokens, Q_HEADS, HEAD_DIM), pool.normal(2, tokens, KV_HEADS, HEAD_DIM)
    bounds = torch.tensor([0, tokens], dtype=torch.int32)
    return partial(cpu_prefill_attention, q, k, v, bounds, _SCALE), _prompt_flops(tokens)


def device_prefill_work(pool: Pool, tokens: int) -> tuple[Work, float]:
    """Attention of a micro-batch of prompts, each over itself, on the device; and its flop."""
    count = max(1, PROMPT_TOKENS // tokens)
    rows = count * tokens
    q, (k, v) = pool.normal(rows, Q_HEADS, HEAD_DIM), pool.normal(2, rows, KV_HEADS, HEAD_DIM)
    batch = _ragged(pool, [tokens] * count, [0] * count, (), decoding=0)
    return partial(kernels_of(pool.device).attend, q, k, v, batch, _SCALE), count * _prompt_flops(tokens)


def _prompt_flops(tokens: int) -> float:
    return 4.0 * HEAD_DIM * Q_HEADS * tokens * (tokens + 1) / 2


def _ragged(
    pool: Pool, counts: list[int], starts: list[int], entries: Ints, decoding: int | None = None
) -> RaggedBatch:
    form = prompt_form(pool.device, pool.dtype, Q_HEADS, KV_HEADS, HEAD_DIM)
    decoding = len(counts) if decoding is None else decoding
    batch = RaggedBatch(counts, starts, [0] * len(counts), entries, decoding=decoding, block_size=BLOCK, form=form)
    batch.land(batch.table.to(pool.device))
    return batch


def _page(shape: Shape) -> tuple[Shape, Shape]:
    hidden, width = shape
    return (2 * width, hidden), (hidden, width)


def _nbytes(pool: Pool, *shapes: Shape) -> int:
    return sum(map(prod, shapes)) * pool.dtype.itemsize


def _workspace(model: ModelProfile, tokens: int, pool: Pool) -> Workspace:
    sizes = expert_workspace(model, tokens, BFLOAT16, grouped=not Device(pool.device).host)
    arena = torch.zeros(sizes.bytes, dtype=torch.uint8, device=pool.device)
    return Workspace(arena, sizes, model.hidden_size, pool.dtype)


def layer_phases(pool: Pool, seconds: float) -> Measurement:
    """Layer phases per second of almost empty work: calls, small tensors, thread wake-ups."""
    layer = _Layer(pool, _FEW_TOKENS)
    return reading_of(_in_turn(layer.decode, layer.products, seconds), ACTS)


def touches(pool: Pool, tokens: int, seconds: float) -> Measurement:
    """bytes/s of both phases of a layer around attention, without their products."""
    layer = _Layer(pool, tokens)
    return reading_of(_in_turn(layer.around_attention, layer.products, seconds), _touched(tokens))


def _touched(tokens: int) -> float:
    """Bytes that both phases of a layer touch, experts aside."""
    return float(tokens * HIDDEN * (TOUCHED_BEFORE + TOUCHED_AFTER))


def _in_turn(full: Work, part: Work, seconds: float) -> list[float]:
    """Seconds of ``full`` beyond its ``part``; both run in turn, so that a disturbance affects both."""
    full()
    part()
    rest, began = list[float](), time.perf_counter()
    while not rest or time.perf_counter() - began < seconds:
        (whole_s,), (part_s,) = repeated(full, 0.0), repeated(part, 0.0)
        rest.append(max(whole_s - part_s, _LEAST_SHARE * whole_s))
    return rest


class _Layer:
    """The layer of `_MODEL` over ``tokens`` tokens."""

    def __init__(self, pool: Pool, tokens: int) -> None:
        spec, ones = _MODEL.attention, torch.ones(HIDDEN, dtype=pool.dtype)
        qkv, o, router = (
            pool.normal(rows, HIDDEN).mul_(0.02)
            for rows in (spec.q_dim + 2 * spec.kv_dim, HIDDEN, _MODEL.experts.num_experts)
        )
        self._products = (qkv, o, router)
        layer = LayerWeights(input_norm=ones, qkv=stack_of(qkv), o=stack_of(o), post_norm=ones, router=router)
        embed = stack_of(torch.empty(_MODEL.vocab_size, HIDDEN, dtype=pool.dtype))
        weights = ModelWeights(embed=embed, head=embed, final_norm=ones, layers=(layer,))
        self._decoder = NativeDecoder(
            _MODEL, weights, _workspace(_MODEL, 1, pool), paged=PagedExperts(lay_out_pages({}, {}))
        )
        self._hidden = pool.normal(tokens, HIDDEN)
        self._attention = torch.zeros(tokens, spec.num_heads, spec.head_dim, dtype=pool.dtype)
        self._rope = rotation(spec, torch.arange(tokens), pool.dtype)
        cache = (2, min(tokens, _FEW_TOKENS), spec.num_kv_heads, _BLOCK, spec.head_dim)
        self._caches = torch.zeros(cache, dtype=pool.dtype)
        self._slots = torch.arange(tokens) * _BLOCK
        self._tables = torch.arange(tokens, dtype=torch.int32).unsqueeze(1)
        self._lengths = torch.ones(tokens, dtype=torch.int32)

    def around_attention(self) -> None:
        self._decoder.pre_attention(0, self._hidden, self._rope)
        self._after()

    def decode(self) -> None:
        q, k, v = self._decoder.split_heads(self._decoder.pre_attention(0, self._hidden, self._rope))
        keys, values = self._caches
        cpu_kv_append(keys, values, k, v, self._slots)
        scale = _MODEL.attention.head_dim**-0.5
        cpu_gqa_decode(q, keys, values, self._tables, self._lengths, scale, out=torch.empty_like(q))
        self._after()

    def products(self) -> None:
        """The products of all phases alone."""
        for weight in self._products:
            linear(self._hidden, weight)

    def _after(self) -> None:
        """Output projection and routing of a zero attention output, so the hidden state never changes."""
        self._decoder.route(0, self._hidden, self._attention, self._rope)
