"""Speed of a decoder layer outside its products and experts: norms, rotations, residual sums and routing in bytes/s, by
the bytes that one layer phase touches, and the fixed time of a layer phase.

On a CPU the layer phases run as in a pass, in turn with their products, whose time is subtracted; on a GPU, where
launches are a figure of their own, norms and sums are measured alone. Does not depend on experts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from moelight.core.dtypes import BFLOAT16
from moelight.hrm.cost_model import TOUCHED_AFTER, TOUCHED_BEFORE
from moelight.hrm.costs import expert_workspace
from moelight.kernels.attention import cpu_gqa_decode, cpu_kv_append
from moelight.kernels.products import Workspace, linear
from moelight.models.decoder import Decoder
from moelight.models.rope import rotation
from moelight.profiles.model import AttentionSpec, ExpertSpec, ModelProfile, RouterSpec
from moelight.profiles.names import MIXTRAL_STYLE
from moelight.runtime.calibration.memory import norms
from moelight.runtime.calibration.pool import Pool
from moelight.runtime.calibration.surfaces import Points
from moelight.runtime.calibration.timing import Measure, Measurement, Work, reading_of
from moelight.runtime.microbatch import require
from moelight.weights.load import LayerWeights, ModelWeights

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


def cost_model(pool: Pool) -> Measure:
    """Layer phases per second where next to nothing is touched: calls, small tensors, thread wake-ups."""

    def read(seconds: float) -> Measurement:
        layer = _Layer(pool, _FEW_TOKENS)
        return reading_of(_in_turn(layer.decode, layer.products, seconds), ACTS)

    return read


def _acts(pool: Pool, tokens: int, seconds: float) -> Measurement:
    layer = _Layer(pool, tokens)
    return reading_of(_in_turn(layer.around_attention, layer.products, seconds), _touched(tokens))


def _in_turn(whole: Work, part: Work, seconds: float) -> list[float]:
    """Seconds that ``whole`` takes beyond its ``part``; both run in turn, so that a disturbance affects both."""
    whole()
    part()
    rest, began = list[float](), time.perf_counter()
    while not rest or time.perf_counter() - began < seconds:
        whole_s, part_s = _timed(whole), _timed(part)
        rest.append(max(whole_s - part_s, _LEAST_SHARE * whole_s))
    return rest


def _timed(work: Work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class _Layer:
    """One layer for ``tokens`` sequences, each with one block of the cache."""

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
        """The phases before and after attention."""
        self._decoder.pre_attention(0, self._hidden, self._rope)
        self._after()

    def decode(self) -> None:
        """All three phases."""
        q, k, v = self._decoder.pre_attention(0, self._hidden, self._rope)
        keys, values = self._caches
        cpu_kv_append(keys, values, k, v, self._slots)
        scale = _MODEL.attention.head_dim**-0.5
        cpu_gqa_decode(q, keys, values, self._tables, self._lengths, scale, out=torch.empty_like(q))
        self._after()

    def products(self) -> None:
        """The products of these phases alone."""
        for weight in (self._weights.qkv, self._weights.o, require(self._weights.router)):
            linear(self._hidden, weight)

    def _after(self) -> None:
        """Output projection and routing; the attention output is zero, so the hidden state never changes."""
        self._decoder.route(0, self._hidden, self._attention)


def _weights(dtype: torch.dtype) -> LayerWeights:
    spec, experts = _MODEL.attention, _MODEL.experts.num_experts
    qkv, o, router = (
        torch.randn(rows, HIDDEN).mul_(0.02).to(dtype) for rows in (spec.q_dim + 2 * spec.kv_dim, HIDDEN, experts)
    )
    ones = torch.ones(HIDDEN, dtype=dtype)
    return LayerWeights(input_norm=ones, qkv=qkv, o=o, post_norm=ones, router=router)
