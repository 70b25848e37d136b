"""Layers in one call, or one in a call on each side of attention, give what their kernels give one after the other, to
the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moelight.formats.ggml import GGML_FORMATS
from moelight.kernels import native
from moelight.kernels.activations import SILU, Activation
from moelight.kernels.attention import cpu_gqa_decode
from moelight.kernels.ffn import cpu_expert_ffn, cpu_linear
from moelight.kernels.layer import BoundExperts, DecoderLayer, LayerProduct, PagedCache, decode_layers
from moelight.kernels.norm import cpu_rms_norm, cpu_rotate
from moelight.kernels.routing import cpu_gather_rows, cpu_route, cpu_scatter_sum, cpu_sort_by_expert
from tests.kernels.quantized import matrix

pytestmark = pytest.mark.skipif(not native.available(), reason="the extension alone has it")
HIDDEN, WIDTH, EXPERTS, QUERIES, KEYS, SIZE, EPS = 96, 64, 5, 4, 2, 16, 1e-5
ROUTER = {"top_k": 2, "normalize": True, "round_weights": True}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, std: float = 0.1) -> Tensor:
    return (torch.randn(shape) * std).to(dtype)


def weights(dtype: torch.dtype, *, full: bool, norms_all: bool = False) -> dict[str, Tensor]:
    rows = (QUERIES + 2 * KEYS) * SIZE
    result = {
        "input_norm": random(HIDDEN, dtype=dtype, std=1.0),
        "qkv": random(rows, HIDDEN, dtype=dtype),
        "o": random(HIDDEN, QUERIES * SIZE, dtype=dtype),
        "post_norm": random(HIDDEN, dtype=dtype, std=1.0),
        "router": random(EXPERTS, HIDDEN, dtype=dtype),
    }
    if full:
        result |= {"qkv_bias": random(rows, dtype=dtype), "o_bias": random(HIDDEN, dtype=dtype)}
        sizes = {"q_norm": SIZE * QUERIES, "k_norm": SIZE * KEYS} if norms_all else {"q_norm": SIZE, "k_norm": SIZE}
        result |= {name: random(size, dtype=dtype, std=1.0) for name, size in sizes.items()}
    return result


def experts(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    gate_up = [random(2 * WIDTH, HIDDEN, dtype=dtype) for _ in range(EXPERTS)]
    return gate_up, [random(HIDDEN, WIDTH, dtype=dtype) for _ in range(EXPERTS)]


def layer_of(inputs: dict[str, Tensor], **changes: Any) -> DecoderLayer:
    names = {**inputs, "eps": EPS, "head_dim": SIZE, "dtype": inputs["qkv"].dtype, **ROUTER, **changes}
    for name in ("qkv", "o"):
        names[name] = LayerProduct(weights=(names[name],), biases=(names.pop(f"{name}_bias", None),))
    return DecoderLayer(**names)


def angles(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    half = torch.rand(tokens, SIZE // 2)
    full = torch.cat((half, half), dim=1)
    return full.cos().to(dtype), full.sin().to(dtype)


def before_by_kernels(inputs: dict[str, Tensor], hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = cpu_rms_norm(hidden, inputs["input_norm"], EPS)
    heads = cpu_linear(x, inputs["qkv"], inputs.get("qkv_bias")).unflatten(1, (-1, SIZE))
    if "q_norm" in inputs:
        q, k = heads[:, :QUERIES], heads[:, QUERIES : QUERIES + KEYS]
        if len(inputs["q_norm"]) > SIZE:
            q, k = q.flatten(1), k.flatten(1)  # views: the rows of a product
        cpu_rms_norm(q, inputs["q_norm"], EPS, out=q)
        cpu_rms_norm(k, inputs["k_norm"], EPS, out=k)
    turned = heads[:, : QUERIES + KEYS]
    cpu_rotate(turned, cos, sin, out=turned)
    return heads


def after_by_kernels(
    inputs: dict[str, Tensor], hidden: Tensor, attention: Tensor, gate_up: Any, down: Any, **how: Any
) -> None:
    projected = cpu_linear(attention, inputs["o"], inputs.get("o_bias"))
    x = cpu_rms_norm(hidden, inputs["post_norm"], EPS, add=projected)
    shares, ids = cpu_route(cpu_linear(x, inputs["router"]), 2, normalize=True, round_weights=True)
    by_expert = cpu_sort_by_expert(ids, EXPERTS)
    rows = cpu_expert_ffn(cpu_gather_rows(x, by_expert.token), gate_up, down, by_expert.offsets, **how)
    cpu_scatter_sum(rows, by_expert.position, shares, hidden, residual=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 5, 33])
@pytest.mark.parametrize("full", [False, True])
def test_equals_its_kernels(dtype: torch.dtype, tokens: int, full: bool) -> None:
    torch.manual_seed(tokens)
    inputs, (gate_up, down) = weights(dtype, full=full), experts(dtype)
    layer, bound = layer_of(inputs), BoundExperts(HIDDEN, gate_up, down, activation=SILU)
    hidden, attention = random(tokens, HIDDEN, dtype=dtype), random(tokens, QUERIES * SIZE, dtype=dtype)
    turns = angles(tokens, dtype)
    for threads in (1, 3):
        assert torch.equal(
            layer.before_attention(hidden, *turns, threads=threads), before_by_kernels(inputs, hidden, *turns)
        )
        result, wanted = hidden.clone(), hidden.clone()
        layer.after_attention(result, attention, bound, threads=threads)
        after_by_kernels(inputs, wanted, attention, gate_up, down)
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 64])
def test_whole_layers_equal_their_kernels(dtype: torch.dtype, int8: bool, tokens: int) -> None:
    """Three layers, of which each has norms of another kind; sequences end within and at the end of a block."""
    torch.manual_seed(tokens)
    norms: list[dict[str, bool]] = [{"full": False}, {"full": True}, {"full": True, "norms_all": True}]
    inputs, shape = [weights(dtype, **norm) for norm in norms], (3 * tokens, KEYS, 16, SIZE)
    every, hidden, turns = [experts(dtype) for _ in inputs], random(tokens, HIDDEN, dtype=dtype), angles(tokens, dtype)
    caches: list[dict[str, Tensor]] = []
    for _ in inputs:
        if int8:
            codes = {name: torch.randint(-127, 128, shape, dtype=torch.int8) for name in ("k_cache", "v_cache")}
            caches.append(codes | {name: torch.rand(shape[:3]) / 127 for name in ("k_scale", "v_scale")})
        else:
            caches.append({name: random(*shape, dtype=dtype, std=1.0) for name in ("k_cache", "v_cache")})
    tables = torch.randperm(3 * tokens, dtype=torch.int32).view(tokens, 3)
    lens, how = torch.randint(1, 49, (tokens,), dtype=torch.int32), {"window": 20}
    lens[0] = 48
    for threads in (1, 2):
        selected = [{name: item.clone() for name, item in cache.items()} for cache in caches]
        theirs = [{name: item.clone() for name, item in cache.items()} for cache in caches]
        result, wanted = hidden.clone(), hidden.clone()
        layers, bound = (
            [layer_of(item) for item in inputs],
            [PagedCache(**item, scale=0.25, **how) for item in selected],
        )
        of_layers = [BoundExperts(HIDDEN, *item, activation=SILU) for item in every]
        decode_layers(layers, result, [turns], bound, tables, lens, of_layers, threads=threads)
        for layer, cache, (gate_up, down) in zip(inputs, theirs, every, strict=True):
            heads = before_by_kernels(layer, wanted, *turns)
            q, k, v = heads.split((QUERIES, KEYS, KEYS), dim=1)
            paged = {"block_tables": tables, "seq_lens": lens, "scale": 0.25, "k_new": k, "v_new": v, **how}
            attention = cpu_gqa_decode(q, **cache, **paged)
            after_by_kernels(layer, wanted, attention.flatten(1), gate_up, down)
        assert torch.equal(result, wanted)
        for one, other in zip(selected, theirs, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


def once(x: Tensor, weight: Tensor) -> Tensor:
    """The norm in float32, rounded once."""
    return cpu_rms_norm(x.float(), weight, EPS).to(x.dtype)


def product_by_kernels(projection: LayerProduct, x: Tensor) -> Tensor:
    by = projection.activations or ("auto",) * len(projection.weights)
    biases = projection.biases or (None,) * len(projection.weights)
    rows = x.float() if projection.wide else x
    parts = zip(projection.weights, biases, by, strict=True)
    return torch.cat([cpu_linear(rows, weight, bias, activations=form) for weight, bias, form in parts], 1).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_dense_layers_equal_their_kernels(dtype: torch.dtype, wide: bool, tokens: int) -> None:
    """Two layers with angles of their own, of stored matrices in two formats: the first with biases, the second with
    norms of its results that are rounded once."""
    torch.manual_seed(tokens)
    q, kv = QUERIES * SIZE, KEYS * SIZE
    stored = [
        matrix(GGML_FORMATS[kind], rows, columns, rows)
        for kind, rows, columns in (
            *(("Q8_0", rows, HIDDEN) for rows in (q, kv)),
            ("Q5_1", kv, HIDDEN),
            ("Q4_1", HIDDEN, q),
            *[("Q4_0", WIDTH, HIDDEN)] * 2,
            ("Q8_0", HIDDEN, WIDTH),
        )
    ]
    by = ("int8", "int8", "auto")
    biases = [random(rows, dtype=dtype) for rows in (q, kv, kv)]
    norms = [1 + random(HIDDEN, dtype=torch.float32) for _ in range(4)]
    plain = LayerProduct(weights=stored[:3], biases=biases, activations=by, wide=wide)
    out = LayerProduct(weights=stored[3:4], activations=("int8",), wide=False)
    again = LayerProduct(weights=stored[:3], activations=by, wide=wide)
    usual: dict[str, Any] = {"dtype": dtype, "eps": EPS, "head_dim": SIZE, "o": out, "wide_block": wide}
    first, second = (norm.to(dtype) for norm in norms[:2])
    heads = [1 + random(SIZE, dtype=torch.float32) for _ in range(2)]
    layers = [
        DecoderLayer(**usual, qkv=plain, input_norm=first, post_norm=second),
        DecoderLayer(
            **usual,
            qkv=again,
            input_norm=norms[0],
            post_norm=norms[1],
            attention_norm=norms[2],
            block_norm=norms[3],
            q_norm=heads[0],
            k_norm=heads[1],
        ),
    ]
    gate, up, down = stored[4:]
    form: dict[str, Any] = {"up": [up], "activation": Activation("gelu_tanh"), "activations": ("int8", "auto")}
    block = BoundExperts(HIDDEN, [gate], [down], **form)
    cache = [random(tokens, KEYS, 16, SIZE, dtype=dtype, std=1.0) for _ in range(4)]
    tables, lens = torch.arange(tokens, dtype=torch.int32).view(-1, 1), torch.randint(1, 17, (tokens,)).int()
    hidden, angles_of = random(tokens, HIDDEN, dtype=dtype, std=1.0), [angles(tokens, dtype) for _ in range(2)]
    for threads in (1, 2):
        theirs, result, wanted = [part.clone() for part in cache], hidden.clone(), hidden.clone()
        paged = [PagedCache(*(part.clone() for part in cache[at : at + 2]), 0.25) for at in (0, 2)]
        more: dict[str, Any] = {"turns": (1, 0), "threads": threads}
        decode_layers(layers, result, angles_of, paged, tables, lens, [block, block], **more)
        for number, (cos, sin) in enumerate(reversed(angles_of)):
            x = once(wanted, norms[0]) if number else cpu_rms_norm(wanted, first, EPS)
            qkv = product_by_kernels((plain, again)[number], x).unflatten(1, (-1, SIZE))
            if number:
                for rows, weight in zip(qkv.split((QUERIES, KEYS, KEYS), 1), heads, strict=False):
                    rows.copy_(once(rows, weight))
            cpu_rotate(qkv[:, : QUERIES + KEYS], cos, sin, out=qkv[:, : QUERIES + KEYS])
            queries, keys, values = qkv.split((QUERIES, KEYS, KEYS), dim=1)
            pair = {"k_cache": theirs[2 * number], "v_cache": theirs[2 * number + 1], "k_new": keys, "v_new": values}
            attention = cpu_gqa_decode(queries, block_tables=tables, seq_lens=lens, scale=0.25, **pair)
            mixed = product_by_kernels(out, attention.flatten(1))
            wanted += once(mixed, norms[2]) if number else mixed
            x = once(wanted, norms[1]) if number else cpu_rms_norm(wanted, second, EPS)
            offsets = torch.tensor((0, tokens), dtype=torch.int32)
            rows = cpu_expert_ffn(x.float() if wide else x, [gate], [down], offsets, **form).to(dtype)
            wanted += once(rows, norms[3]) if number else rows
        assert torch.equal(result, wanted)


def test_a_dense_layer_has_one_expert() -> None:
    inputs, hidden = weights(torch.bfloat16, full=False), random(1, HIDDEN)
    layer = layer_of(inputs, router=None)
    cache = PagedCache(*(random(1, KEYS, 16, SIZE) for _ in range(2)), 0.25)
    rest = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="experts: must be one, are 5"):
        bound = BoundExperts(HIDDEN, *experts(torch.bfloat16), activation=SILU)
        decode_layers([layer], hidden, [angles(1, torch.bfloat16)], [cache], *rest, [bound])
    with pytest.raises(ValueError, match="turns: must be 1 places in angles, of which there are 1"):
        decode_layers([layer], hidden, [angles(1, torch.bfloat16)], [cache], *rest, [bound], turns=[1])


def test_experts_in_other_forms() -> None:
    torch.manual_seed(0)
    inputs, (gate_up, down) = weights(torch.bfloat16, full=False), experts(torch.bfloat16)
    layer, attention = layer_of(inputs), random(7, QUERIES * SIZE)
    form = {"activation": Activation("gelu_tanh"), "interleaved": True}
    form["gate_up_bias"] = [random(2 * WIDTH) for _ in range(EXPERTS)]
    result = random(7, HIDDEN)
    wanted = result.clone()
    layer.after_attention(result, attention, BoundExperts(HIDDEN, gate_up, down, **form))
    after_by_kernels(inputs, wanted, attention, gate_up, down, **form)
    assert torch.equal(result, wanted)


def test_an_expert_elsewhere_that_a_token_needs_is_named() -> None:
    inputs, (gate_up, down) = weights(torch.bfloat16, full=False), experts(torch.bfloat16)
    bound = BoundExperts(HIDDEN, [None, *gate_up[1:]], [None, *down[1:]], activation=SILU)
    with pytest.raises(IndexError, match="experts: 0 has tokens and None"):
        layer_of(inputs, top_k=EXPERTS).after_attention(random(1, HIDDEN), random(1, QUERIES * SIZE), bound)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": random(64, HIDDEN)}, "qkv: must have the rows of queries, keys and values, has 64"),
        ({"o": random(HIDDEN - 1, QUERIES * SIZE)}, "o: must have as many rows as there are hidden numbers"),
        ({"router": random(EXPERTS, HIDDEN, dtype=torch.float32)}, "router: must have the dtype of the layer"),
        ({"post_norm": random(HIDDEN + 1)}, "post_norm: size must be 96"),
        ({"q_norm": random(SIZE)}, "k_norm: must come with q_norm"),
        ({"head_dim": 7}, "head_dim: must be even, is 7"),
        ({"top_k": 6}, "top_k: must be from 1 to the number of experts, is 6"),
    ],
)
def test_wrong_weights_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_of(weights(torch.bfloat16, full=False), **changes)


def test_wrong_activations_are_named() -> None:
    inputs = weights(torch.bfloat16, full=False)
    layer, bound = layer_of(inputs), BoundExperts(HIDDEN, *experts(torch.bfloat16), activation=SILU)
    hidden, attention = random(2, HIDDEN), random(2, QUERIES * SIZE)
    cos, sin = angles(2, torch.bfloat16)
    with pytest.raises(ValueError, match="hidden: columns must be 96"):
        layer.before_attention(hidden[:, 1:], cos, sin)
    with pytest.raises(ValueError, match="sin: tokens must be 2"):
        layer.before_attention(hidden, cos, sin[:1])
    with pytest.raises(ValueError, match="attention: must have the dtype of the layer"):
        layer.after_attention(hidden, attention.float(), bound)
    fewer = BoundExperts(HIDDEN, *(expert[1:] for expert in experts(torch.bfloat16)), activation=SILU)
    with pytest.raises(ValueError, match="experts: must be as many as the router has, are 4"):
        layer.after_attention(hidden, attention, fewer)


def test_wrong_sequences_and_caches_are_named_before_anything_is_computed() -> None:
    layer = layer_of(weights(torch.bfloat16, full=False))
    bound = BoundExperts(HIDDEN, *experts(torch.bfloat16), activation=SILU)
    hidden, turns = random(2, HIDDEN), angles(2, torch.bfloat16)
    before, tables, lens = hidden.clone(), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)

    def cache(heads: int = KEYS, dtype: torch.dtype = torch.bfloat16) -> PagedCache:
        return PagedCache(*(random(4, heads, 16, SIZE, dtype=dtype) for _ in range(2)), 0.25)

    def refused(message: str, *caches: PagedCache, lens: Tensor = lens, tables: Tensor = tables) -> None:
        with pytest.raises(ValueError, match=message):
            decode_layers([layer] * len(caches), hidden, [turns], caches, tables, lens, [bound] * len(caches))

    refused("cache: must have the heads of the layer", cache(), cache(heads=KEYS + 1))
    refused("cache: must have the dtype of the layer", cache(), cache(dtype=torch.float32))
    refused("seq_lens: entry 1 is 17, the block table holds 0 to 16", cache(), lens=torch.tensor([1, 17]).int())
    refused(r"block_tables: entry \[0, 0\] is 4, the cache has 4 blocks", cache(), tables=tables + 4)
    refused("seq_lens: batch must be 2", cache(), lens=lens[:1])
    with pytest.raises(ValueError, match="layers: are 1, with 0 caches and 1 groups of experts"):
        decode_layers([layer], hidden, [turns], [], tables, lens, [bound])
    assert torch.equal(hidden, before)
