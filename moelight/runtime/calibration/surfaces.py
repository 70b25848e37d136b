"""Speeds of memory, and speeds that depend on the size of the work: products by rows and weights, attention by context.

Runs the kernels of a pass, in the units of `EFFICIENCY`, on operands from a pool far larger than any cache: a pass
finds no weight in a cache. Legend: R rows, H hidden, I intermediate, B sequences, L context, Hq query heads, Hkv
key/value heads, D head size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from math import prod
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from moelight.core.dtypes import BFLOAT16
from moelight.core.units import MiB, align_up
from moelight.hrm.cost_model import TOUCHED_AFTER, TOUCHED_BEFORE
from moelight.hrm.costs import ROW_PADDING, TENSOR_ALIGNMENT, ExpertWorkspace, expert_workspace
from moelight.kernels.attention import cpu_gqa_decode, cpu_kv_append
from moelight.kernels.norm import rms_norm
from moelight.kernels.prefill import prefill_attention
from moelight.kernels.products import Workspace, linear, padded_rows
from moelight.models.decoder import Decoder, rotation
from moelight.models.moe import Routed, moe_forward
from moelight.profiles.efficiency import Curve, Surface
from moelight.profiles.model import AttentionSpec, ExpertSpec, ModelProfile, RouterSpec
from moelight.profiles.names import MIXTRAL_STYLE
from moelight.runtime.calibration.effort import Shape
from moelight.runtime.calibration.timing import Measure, Measurement, Work, finisher, reading_of, repeated, sample
from moelight.runtime.microbatch import require
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
_SCALE = HEAD_DIM**-0.5

# Bytes that a norm and a residual sum read and write per 16-bit number: widen 2 + 4, square 4 + 4, mean 4, scale 4 + 4,
# round 4 + 2, weigh 2 + 2, add 4 + 2.
NORM_BYTES = 42
TOP_K = 2
MOST_EXPERTS = 8
ROUTINGS = 8  # drawn in advance, used in turn

# A surface's name, the bytes of its weights (0 where it has none), and rows, context, prompt tokens or bytes.
Point = tuple[str, int, float]
Points = Mapping[Point, Measure]


class Pool:
    """Initialized ``numbers`` [N] from which operands are cut."""

    def __init__(self, size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate about ``size`` bytes; raises RuntimeError if the device has too little free memory."""
        count = max(_ALIGNMENT, size // dtype.itemsize // _ALIGNMENT * _ALIGNMENT)
        self.numbers = torch.empty(count, dtype=dtype, device=device)
        self._reached = 0
        written = min(count, _SEED_NUMBERS)
        self.numbers[:written].normal_(std=0.02)
        while written < count:
            some = min(written, count - written)
            self.numbers[written : written + some] = self.numbers[:some]
            written += some

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    @property
    def dtype(self) -> torch.dtype:
        return self.numbers.dtype

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes

    def holds(self, *shapes: tuple[int, ...]) -> bool:
        """True if the pool holds at least `LEAST_TURNS` groups of tensors of ``shapes``."""
        return LEAST_TURNS * sum(map(prod, shapes)) <= self.numbers.numel()

    def groups(self, *shapes: tuple[int, ...]) -> Iterator[tuple[Tensor, ...]]:
        """Groups of neighbouring tensors of ``shapes`` without end; each begins where the pool's last group ended."""
        sizes = [prod(shape) for shape in shapes]
        while True:
            if self._reached + sum(sizes) > self.numbers.numel():
                self._reached = 0
            cuts = []
            for size, shape in zip(sizes, shapes, strict=True):
                cuts.append(self.numbers[self._reached : self._reached + size].view(shape))
                self._reached += size
            self._reached = align_up(self._reached, _ALIGNMENT)
            yield tuple(cuts)


def reads(pool: Pool) -> Measure:
    """bytes/s of reading the whole pool, once per call, with all threads."""
    words, finish = pool.numbers.view(torch.float32), finisher(pool.device)
    return lambda seconds: sample(words.sum, seconds=seconds, amount=pool.nbytes, finish=finish)


def copies(pool: Pool) -> Measure:
    """bytes/s of copying one half of the pool to the other; each byte counts once."""
    size, finish = pool.numbers.numel() // 2, finisher(pool.device)
    here, there = pool.numbers[:size], pool.numbers[size : 2 * size]
    return lambda seconds: sample(lambda: there.copy_(here), seconds=seconds, amount=here.nbytes, finish=finish)


def norms(pool: Pool, rows: int, hidden: int) -> Measure:
    """bytes/s of a norm and a residual sum over ``rows`` hidden states, as in a layer."""
    x = torch.randn(rows, hidden, device=pool.device).to(pool.dtype)
    weight, total = torch.ones(hidden, device=pool.device, dtype=pool.dtype), torch.zeros_like(x)
    amount, finish = NORM_BYTES * x.numel(), finisher(pool.device)
    return lambda seconds: sample(
        lambda: rms_norm(x, weight, 1e-5, add=total), seconds=seconds, amount=amount, finish=finish
    )


def linear_points(name: str, pool: Pool, shapes: Sequence[Shape], rows: Sequence[int]) -> Points:
    """flop/s of ``x [R, in]`` times weights ``[out, in]`` for each of ``shapes`` and ``rows``, operands from memory."""
    return {
        (name, _nbytes(pool, shape), count): _gauge(pool, partial(_linear, pool, shape, count))
        for count in rows
        for shape in shapes
        if pool.holds(shape)
    }


def expert_points(name: str, pool: Pool, shapes: Sequence[Shape], rows: Sequence[int]) -> Points:
    """flop/s of a layer's experts ``(H, I)``, with R rows per expert on average; 3 x H x I numbers each. Includes
    sorting, gathering, ragged rows and the weighted sum."""
    found = {}
    for count in rows:
        for shape in shapes:
            experts, tokens = _layer(pool, shape, count)
            if experts >= TOP_K:
                point = (name, _nbytes(pool, *_page(shape)), _mean_rows(experts, tokens))
                found[point] = _gauge(pool, partial(moe_work, pool, shape, experts, tokens))
    return found


def decode_points(name: str, pool: Pool, contexts: Sequence[int]) -> Points:
    """bytes/s of keys and values read by decoding, for each context (in whole blocks of `BLOCK` tokens) in the pool."""
    make = decode_work if pool.device.type == "cpu" else _decode_on_device
    fitting = [context for context in contexts if context * KV_NUMBERS <= pool.numbers.numel()]
    return {(name, 0, context): _gauge(pool, partial(make, pool, context)) for context in fitting}


def prefill_points(name: str, pool: Pool, prompts: Sequence[int]) -> Points:
    """flop/s of one prompt's attention over itself, for each length; 4 x D flop per head and attended pair."""
    return {(name, 0, tokens): _gauge(pool, partial(_prefill, pool, tokens)) for tokens in prompts}


def surface_of(name: str, readings: Mapping[Point, Measurement]) -> tuple[Surface, float]:
    """The surface ``name`` from its points among ``readings``, and the median of their spreads."""
    mine = {point: reading for point, reading in readings.items() if point[0] == name}
    sizes = sorted({size for _, size, _ in mine})
    curves = []
    for size in sizes:
        points = sorted((x, reading.rate) for (_, of, x), reading in mine.items() if of == size)
        curves.append(Curve(x=tuple(float(x) for x, _ in points), y=tuple(rate for _, rate in points)))
    surface = Surface(name=name, sizes=tuple(float(size) for size in sizes), curves=tuple(curves))
    return surface, median(reading.spread for reading in mine.values())


def layer_work(pool: Pool, shape: Shape, rows: int) -> tuple[Work, float]:
    """One layer of as many experts as the pool holds, each with about ``rows`` rows; and its flop."""
    experts, tokens = _layer(pool, shape, rows)
    return moe_work(pool, shape, experts, tokens)


def moe_work(pool: Pool, shape: Shape, experts: int, tokens: int) -> tuple[Work, float]:
    """One layer of ``experts`` experts over ``tokens`` tokens, routed at random; and its flop."""
    hidden, width = shape
    pages, routings = pool.groups(*(_page(shape) * experts)), cycle(_routings(pool, hidden, experts, tokens))
    space = _workspace(shape, tokens, pool, TOP_K)

    def work() -> Tensor:
        views = next(pages)
        return moe_forward(next(routings), list(zip(views[::2], views[1::2], strict=True)), space)

    return work, 6.0 * tokens * TOP_K * hidden * width


def _routings(pool: Pool, hidden: int, experts: int, tokens: int) -> list[Routed]:
    x = torch.randn(tokens, hidden, device=pool.device).to(pool.dtype)
    weights = torch.full((tokens, TOP_K), 1 / TOP_K, dtype=torch.float32, device=pool.device)
    drawn = torch.rand(ROUTINGS, tokens, experts, generator=torch.Generator().manual_seed(0))
    ids = drawn.topk(TOP_K).indices.sort().values.to(torch.int32).to(pool.device)
    return [Routed(x=x, weights=weights, ids=each) for each in ids]


def _layer(pool: Pool, shape: Shape, rows: int) -> tuple[int, int]:
    """Number of experts, of which the pool holds several sets, and of tokens that give each about ``rows`` rows."""
    experts = next((count for count in range(MOST_EXPERTS, 0, -1) if pool.holds(*(_page(shape) * count))), 0)
    return experts, 1 if rows == 1 else max(1, rows * experts // TOP_K)


def _mean_rows(experts: int, tokens: int) -> float:
    """The mean is over the experts with at least one of ``tokens``."""
    return float(tokens * TOP_K / (experts * (1 - (1 - TOP_K / experts) ** tokens)))


def decode_work(pool: Pool, context: int) -> tuple[Work, float]:
    """Decoding of one batch of sequences on the CPU, their blocks in order through the pool; and its bytes."""
    blocks_each = -(-context // BLOCK)
    unit = KV_HEADS * BLOCK * HEAD_DIM
    size = pool.numbers.numel() // 2 // unit * unit
    keys, values = (part.view(-1, KV_HEADS, BLOCK, HEAD_DIM) for part in pool.numbers[: 2 * size].view(2, size))
    batch = max(1, min(SEQUENCES, len(keys) // blocks_each))
    turns = max(1, len(keys) // (batch * blocks_each))
    tables = torch.arange(turns * batch * blocks_each, dtype=torch.int32).view(turns, batch, blocks_each)
    lengths = torch.full((batch,), context, dtype=torch.int32)
    queries = torch.randn(batch, Q_HEADS, HEAD_DIM).to(pool.dtype)
    out, turn = torch.empty_like(queries), cycle(range(turns))

    def work() -> None:
        cpu_gqa_decode(queries, keys, values, tables[next(turn)], lengths, _SCALE, out=out)

    return work, float(batch * context * KV_NUMBERS * pool.dtype.itemsize)


def _decode_on_device(pool: Pool, context: int) -> tuple[Work, float]:
    """Batches of contiguous sequences in torch's fused kernel; queries that share a head are rows of one product."""
    batch = max(1, min(SEQUENCES, pool.numbers.numel() // (context * KV_NUMBERS)))
    shape = (batch, KV_HEADS, context, HEAD_DIM)
    caches = pool.groups(shape, shape)
    queries = torch.randn(batch, KV_HEADS, Q_HEADS // KV_HEADS, HEAD_DIM, device=pool.device).to(pool.dtype)

    def work() -> Tensor:
        keys, values = next(caches)
        return functional.scaled_dot_product_attention(queries, keys, values, scale=_SCALE)

    return work, float(batch * context * KV_NUMBERS * pool.dtype.itemsize)


def _linear(pool: Pool, shape: Shape, rows: int) -> tuple[Work, float]:
    weights = pool.groups(shape)
    x = torch.randn(rows, shape[1], device=pool.device).to(pool.dtype)
    return lambda: linear(x, next(weights)[0]), 2.0 * rows * shape[0] * shape[1]


def _prefill(pool: Pool, tokens: int) -> tuple[Work, float]:
    q = torch.randn(tokens, Q_HEADS, HEAD_DIM, device=pool.device).to(pool.dtype)
    k, v = torch.randn(2, tokens, KV_HEADS, HEAD_DIM, device=pool.device).to(pool.dtype)
    return lambda: prefill_attention(q, k, v, _SCALE), 4.0 * HEAD_DIM * Q_HEADS * tokens * (tokens + 1) / 2


def _gauge(pool: Pool, make: Callable[[], tuple[Work, float]]) -> Measure:
    """``make`` creates the operands when the measurement runs; they are freed after it."""
    finish = finisher(pool.device)

    def read(seconds: float) -> Measurement:
        work, amount = make()
        return sample(work, seconds=seconds, amount=amount, finish=finish)

    return read


def _page(shape: Shape) -> tuple[Shape, Shape]:
    hidden, width = shape
    return (2 * width, hidden), (hidden, width)


def _nbytes(pool: Pool, *shapes: Shape) -> int:
    return sum(a * b for a, b in shapes) * pool.dtype.itemsize


def _workspace(shape: Shape, rows: int, pool: Pool, top_k: int = 1) -> Workspace:
    hidden, width = shape
    item, padded = pool.dtype.itemsize, padded_rows(rows)
    sizes = ExpertWorkspace(
        rows_bytes=align_up((rows * (top_k - 1) + padded + ROW_PADDING) * hidden * item, TENSOR_ALIGNMENT),
        wide_bytes=align_up(padded * 2 * width * item, TENSOR_ALIGNMENT),
        narrow_bytes=align_up(padded * max(hidden, width) * item, TENSOR_ALIGNMENT),
    )
    arena = torch.empty(sizes.bytes, dtype=torch.uint8, device=pool.device)
    space = Workspace(arena, sizes, hidden, pool.dtype)
    space.rows.normal_(std=0.02)
    return space


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
    router=RouterSpec(top_k=2, normalize=True, weights_in_model_dtype=False),
    experts=ExpertSpec(num_experts=8, intermediate_size=64),
    moe_layers=(True,),
    names=MIXTRAL_STYLE,
)


def elementwise_points(name: str, pool: Pool, tokens: Sequence[int]) -> Points:
    """bytes/s for each number of ``tokens`` of `HIDDEN` numbers, by the bytes that one layer phase touches."""
    make = _acts if pool.device.type == "cpu" else _norms
    return {(name, 0, _touched(count) / 2): partial(make, pool, count) for count in tokens}


def _touched(tokens: int) -> float:
    """Bytes that both phases of a layer touch, experts aside."""
    return float(tokens * HIDDEN * (TOUCHED_BEFORE + TOUCHED_AFTER))


def _norms(pool: Pool, tokens: int, seconds: float) -> Measurement:
    return norms(pool, tokens, HIDDEN)(seconds)


def layer_phases(pool: Pool) -> Measure:
    """Layer phases per second of almost empty work: calls, small tensors, thread wake-ups."""

    def read(seconds: float) -> Measurement:
        layer = _Layer(pool, _FEW_TOKENS)
        return reading_of(_in_turn(layer.decode, layer.products, seconds), ACTS)

    return read


def _acts(pool: Pool, tokens: int, seconds: float) -> Measurement:
    layer = _Layer(pool, tokens)
    return reading_of(_in_turn(layer.around_attention, layer.products, seconds), _touched(tokens))


def _in_turn(whole: Work, part: Work, seconds: float) -> list[float]:
    """Seconds of ``whole`` beyond its ``part``; both run in turn, so that a disturbance affects both."""
    whole()
    part()
    rest, began = list[float](), time.perf_counter()
    while not rest or time.perf_counter() - began < seconds:
        (whole_s,), (part_s,) = repeated(whole, 0.0), repeated(part, 0.0)
        rest.append(max(whole_s - part_s, _LEAST_SHARE * whole_s))
    return rest


class _Layer:
    def __init__(self, pool: Pool, tokens: int) -> None:
        spec, size = _MODEL.attention, expert_workspace(_MODEL, 1, BFLOAT16, grouped=False)
        self._weights = _weights(pool.dtype)
        embed = torch.empty(_MODEL.vocab_size, HIDDEN, dtype=pool.dtype)
        norm = self._weights.input_norm
        self._decoder = Decoder(
            _MODEL,
            ModelWeights(embed=embed, head=embed, final_norm=norm, layers=(self._weights,)),
            Workspace(torch.empty(size.bytes, dtype=torch.uint8), size, HIDDEN, pool.dtype),
        )
        self._hidden = torch.randn(tokens, HIDDEN).to(pool.dtype)
        self._attention = torch.zeros(tokens, spec.num_heads, spec.head_dim, dtype=pool.dtype)
        self._rope = rotation(spec, torch.arange(tokens), pool.dtype)
        self._caches = torch.zeros(2, min(tokens, _FEW_TOKENS), spec.num_kv_heads, _BLOCK, spec.head_dim)
        self._caches = self._caches.to(pool.dtype)
        self._slots = torch.arange(tokens) * _BLOCK
        self._tables = torch.arange(tokens, dtype=torch.int32).unsqueeze(1)
        self._lengths = torch.ones(tokens, dtype=torch.int32)

    def around_attention(self) -> None:
        self._decoder.pre_attention(0, self._hidden, self._rope)
        self._after()

    def decode(self) -> None:
        q, k, v = self._decoder.pre_attention(0, self._hidden, self._rope)
        keys, values = self._caches
        cpu_kv_append(keys, values, k, v, self._slots)
        scale = _MODEL.attention.head_dim**-0.5
        cpu_gqa_decode(q, keys, values, self._tables, self._lengths, scale, out=torch.empty_like(q))
        self._after()

    def products(self) -> None:
        """The products of all phases alone."""
        for weight in (self._weights.qkv, self._weights.o, require(self._weights.router)):
            linear(self._hidden, weight)

    def _after(self) -> None:
        """Output projection and routing of a zero attention output, so the hidden state never changes."""
        self._decoder.route(0, self._hidden, self._attention)


def _weights(dtype: torch.dtype) -> LayerWeights:
    spec, experts = _MODEL.attention, _MODEL.experts.num_experts
    qkv, o, router = (
        torch.randn(rows, HIDDEN).mul_(0.02).to(dtype) for rows in (spec.q_dim + 2 * spec.kv_dim, HIDDEN, experts)
    )
    ones = torch.ones(HIDDEN, dtype=dtype)
    return LayerWeights(input_norm=ones, qkv=qkv, o=o, post_norm=ones, router=router)
