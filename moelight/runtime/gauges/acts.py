"""What one act of a micro-batch takes on the CPU beside its arithmetic: calls, small tensors, bookkeeping.

Knows the acts of a decoder layer, on a model so small that its products are all but free; those are measured apart and
taken off.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from moelight.core.dtypes import FLOAT32
from moelight.hrm.costs import expert_workspace
from moelight.kernels.attention import cpu_gqa_decode, cpu_kv_append
from moelight.kernels.products import Workspace, feed_forward, linear
from moelight.models.decoder import Decoder
from moelight.models.rope import rotation
from moelight.profiles.model import AttentionSpec, ExpertSpec, ModelProfile, RouterSpec
from moelight.profiles.names import MIXTRAL_STYLE
from moelight.runtime.gauges.timing import Gauge, Reading, Work
from moelight.runtime.lanes import InlineLane
from moelight.weights.load import LayerWeights, ModelWeights

ACTS = 3  # before attention, attention, after it
TOKENS = 4
_FAST = 10
_BLOCK = 16
_DTYPE = torch.float32
_MODEL = ModelProfile(
    name="small",
    model_type="mixtral",
    num_layers=1,
    hidden_size=64,
    vocab_size=64,
    max_positions=64,
    norm_eps=1e-5,
    tie_embeddings=True,
    dtype="float32",
    attention=AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16),
    router=RouterSpec(top_k=2, normalize=True, weights_in_model_dtype=False),
    experts=ExpertSpec(num_experts=2, intermediate_size=64),
    moe_layers=(True,),
    names=MIXTRAL_STYLE,
)


def acts() -> Gauge:
    """Acts per second of a layer whose products cost nothing."""
    layer, products = _layer(), _products()

    def read(seconds: float) -> Reading:
        return _beside(*_timed_in_turn(layer, products, seconds))

    return read


def _timed_in_turn(layer: Work, products: Work, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds of single calls, one of each in turn, so that whatever disturbs one disturbs the other."""
    layer()
    products()
    whole, part, began = list[float](), list[float](), time.perf_counter()
    while not whole or time.perf_counter() - began < seconds:
        for work, found in ((layer, whole), (products, part)):
            start = time.perf_counter()
            work()
            found.append(time.perf_counter() - start)
    return whole, part


def _beside(whole: list[float], part: list[float]) -> Reading:
    """From a fast tenth of each: single calls are so short that a thread's waiting for its turn would drown them.

    Where the parts seem to take longer than the whole, nothing can be taken off, and the reading is a poor one.
    """
    fast, middle = np.percentile(whole, (_FAST, 50))
    rest = fast - np.percentile(part, _FAST)
    each = (rest if rest > 0 else middle) / ACTS
    low, high = np.percentile(whole, (25, 75))
    return Reading(rate=1 / max(each, 1e-9), spread=float((high - low) / middle))


def _layer() -> Work:
    """One micro-batch of decoding sequences through one layer, each act by way of a lane."""
    spec, lane = _MODEL.attention, InlineLane()
    decoder = Decoder(_MODEL, _weights(), _space())
    hidden = torch.randn(TOKENS, _MODEL.hidden_size)
    rope = rotation(spec, torch.arange(TOKENS), _DTYPE)
    cache = torch.zeros(2, TOKENS, spec.num_kv_heads, _BLOCK, spec.head_dim)
    tables = torch.arange(TOKENS, dtype=torch.int32).unsqueeze(1)
    lengths, slots = torch.ones(TOKENS, dtype=torch.int32), torch.arange(TOKENS) * _BLOCK
    experts = [_expert() for _ in range(_MODEL.experts.num_experts)]
    passing: list[torch.Tensor] = []

    def before() -> None:
        passing[:] = decoder.pre_attention(0, hidden, rope)

    def attend() -> None:
        q, k, v = passing
        cpu_kv_append(cache[0], cache[1], k, v, slots)
        out = torch.empty_like(q)
        cpu_gqa_decode(q, cache[0], cache[1], tables, lengths, spec.head_dim**-0.5, out=out)
        passing[:] = [out]

    def after() -> None:
        decoder.post_attention(0, hidden, passing[0], experts)

    def layer() -> None:
        ticket = lane.submit(before, ())
        ticket = lane.submit(attend, (ticket,))
        lane.submit(after, (ticket,))

    return layer


def _products() -> Work:
    """The products of such a layer alone."""
    layer, space, experts = _weights().layers[0], _space(), [_expert() for _ in range(_MODEL.experts.num_experts)]
    hidden = torch.randn(TOKENS, _MODEL.hidden_size)
    rows = space.rows[:TOKENS]
    rows.normal_()

    def multiply() -> None:
        linear(hidden, layer.qkv)
        linear(hidden, layer.o)
        if layer.router is not None:
            linear(hidden, layer.router)
        for gate_up, down in experts:
            feed_forward(rows, gate_up, down, space)

    return multiply


def _weights() -> ModelWeights:
    hidden, spec = _MODEL.hidden_size, _MODEL.attention
    layer = LayerWeights(
        input_norm=torch.ones(hidden),
        qkv=torch.randn(spec.q_dim + 2 * spec.kv_dim, hidden) * 0.1,
        o=torch.zeros(hidden, spec.q_dim),  # and so is `down`: nothing grows, however often the layer runs
        post_norm=torch.ones(hidden),
        router=torch.randn(_MODEL.experts.num_experts, hidden),
    )
    embed = torch.randn(_MODEL.vocab_size, hidden)
    return ModelWeights(embed=embed, head=embed, final_norm=torch.ones(hidden), layers=(layer,))


def _expert() -> tuple[torch.Tensor, torch.Tensor]:
    hidden, width = _MODEL.hidden_size, _MODEL.experts.intermediate_size
    return torch.randn(2 * width, hidden) * 0.1, torch.zeros(hidden, width)


def _space() -> Workspace:
    sizes = expert_workspace(_MODEL, TOKENS, FLOAT32)
    return Workspace(torch.zeros(sizes.bytes, dtype=torch.uint8), sizes, _MODEL.hidden_size, _DTYPE)
