"""The GPU's kernels against float64: interpreted by Triton on the CPU, on a device where there is one, and their twins.

Without a device Triton must be told to interpret before it is first imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from moelight.kernels.gpu import serving, tiles
from moelight.kernels.gpu.grouped import ACTIVATIONS, expert_ffn
from moelight.kernels.gpu.pages import Pages
from moelight.kernels.gpu.routing import by_expert, combine, route
from moelight.models import moe
from moelight.profiles.model import RouterSpec

DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EVERY_DTYPE = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.items(), ids=str)
INTEGERS = {
    "int8 rows": (8, None),
    "int8 groups": (8, 32),
    "int8 small groups": (8, 48),
    "int4": (4, 32),
    "int4 128": (4, 128),
}
COUNTS = {
    "one token": (1,),
    "empty experts": (0, 3, 0, 0, 5, 1, 0),
    "one of many": (0, 0, 1, 0, 0),
    "ragged": (40, 0, 17, 70, 16),
}
EVERY_COUNT = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)


@pytest.fixture(params=["interpreted", "torch", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Where the tensors of a test lie; who serves them is certain."""
    if request.param == "torch":
        monkeypatch.setattr(serving, "available", lambda: False)
        yield torch.device("cpu")
        return
    if not serving.available():
        pytest.skip(serving.reason())
    if serving.interpreting() != (request.param == "interpreted"):
        pytest.skip(
            "triton was imported to interpret its kernels" if serving.interpreting() else "triton compiles here"
        )
    found = torch.device("cpu") if request.param == "interpreted" else torch.device("cuda", torch.cuda.current_device())
    assert serving.serves(found, torch.float16)[0]
    yield found


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Experts in float64, and the same as pages."""

    gate_up: list[Tensor]
    down: list[Tensor]
    pages: Pages
    biases: tuple[list[Tensor], list[Tensor]] | None = None

    def truth(self, x: Tensor, counts: tuple[int, ...], activation: str = "silu", clamp: float = 7.0) -> Tensor:
        out = torch.zeros(x.shape[0], self.pages.hidden, dtype=torch.float64)
        for e, (first, last) in enumerate(pairwise(accumulate(counts, initial=0))):
            wide = x[first:last].double().cpu() @ self.gate_up[e].t()
            if self.biases:
                wide = wide + self.biases[0][e]
            gate, up = wide.chunk(2, dim=-1)
            if activation == "swiglu_oai":
                gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
                active = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            elif activation == "gelu_tanh":
                active = functional.gelu(gate, approximate="tanh") * up
            else:
                active = functional.silu(gate) * up
            out[first:last] = active @ self.down[e].t()
            if self.biases:
                out[first:last] += self.biases[1][e]
        return out


def floats(
    experts: int, hidden: int, width: int, dtype: torch.dtype, device: torch.device, bias: bool = False
) -> Layer:
    gate_up = [torch.randn(2 * width, hidden).mul(hidden**-0.5).to(dtype) for _ in range(experts)]
    down = [torch.randn(hidden, width).mul(width**-0.5).to(dtype) for _ in range(experts)]
    biases = None
    if bias:
        biases = ([torch.randn(2 * width).to(dtype) for _ in gate_up], [torch.randn(hidden).to(dtype) for _ in gate_up])
    pages = Pages.of(
        [w.to(device) for w in gate_up],
        [w.to(device) for w in down],
        gate_up_bias=None if biases is None else [b.to(device) for b in biases[0]],
        down_bias=None if biases is None else [b.to(device) for b in biases[1]],
    )
    doubled = None if biases is None else ([b.double() for b in biases[0]], [b.double() for b in biases[1]])
    return Layer(gate_up=[w.double() for w in gate_up], down=[w.double() for w in down], pages=pages, biases=doubled)


def integers(
    experts: int, hidden: int, width: int, bits: int, group: int | None, device: torch.device, scales: torch.dtype
) -> Layer:
    """Numbers are drawn as integers, so that what they stand for does not hang on any code under test."""

    def draw(rows: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
        half = 1 << (bits - 1)
        whole = torch.randint(-half, half, (rows, inputs), dtype=torch.int16)
        shape = (rows,) if group is None else (rows, -(-inputs // group))
        scale = torch.rand(shape).add(0.5).mul(inputs**-0.5 / half * 2).to(scales)
        wide = scale.double()[:, None] if group is None else scale.double().repeat_interleave(group, 1)[:, :inputs]
        stored = whole.to(torch.int8)
        if bits == 4:
            stored = ((whole[:, ::2] + 8) | ((whole[:, 1::2] + 8) << 4)).to(torch.uint8)
        return whole.double() * wide, stored.to(device), scale.to(device)

    up = [draw(2 * width, hidden) for _ in range(experts)]
    down = [draw(hidden, width) for _ in range(experts)]
    pages = Pages.of(
        [stored for _, stored, _ in up],
        [stored for _, stored, _ in down],
        gate_up_scale=[scale for _, _, scale in up],
        down_scale=[scale for _, _, scale in down],
        group_size=group,
    )
    return Layer(gate_up=[dense for dense, _, _ in up], down=[dense for dense, _, _ in down], pages=pages)


def rows_of(counts: tuple[int, ...], hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.randn(sum(counts), hidden).to(dtype).to(device)
    return x, torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32, device=device)


def distance(found: Tensor, truth: Tensor) -> float:
    return float((found.double().cpu() - truth).abs().max() / truth.abs().max())


@EVERY_DTYPE
@EVERY_COUNT
@pytest.mark.parametrize(("hidden", "width"), [(64, 128), (80, 33), (17, 48)])
def test_experts(device, dtype, tolerance, counts, hidden, width):
    layer = floats(len(counts), hidden, width, dtype, device)
    x, offsets = rows_of(counts, hidden, dtype, device)
    found = expert_ffn(x, layer.pages, offsets)
    assert found.dtype == dtype
    assert distance(found, layer.truth(x, counts)) <= tolerance


@EVERY_DTYPE
@pytest.mark.parametrize("counts", [COUNTS["empty experts"], COUNTS["ragged"]], ids=["empty experts", "ragged"])
@pytest.mark.parametrize("form", INTEGERS)
@pytest.mark.parametrize(("hidden", "width"), [(128, 64), (80, 34)])
def test_experts_in_integers(device, dtype, tolerance, counts, form, hidden, width):
    layer = integers(len(counts), hidden, width, *INTEGERS[form], device, torch.float32)
    x, offsets = rows_of(counts, hidden, dtype, device)
    assert distance(expert_ffn(x, layer.pages, offsets), layer.truth(x, counts)) <= tolerance


@EVERY_DTYPE
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_biases(device, dtype, tolerance, activation):
    counts = COUNTS["empty experts"]
    layer = floats(len(counts), 48, 40, dtype, device, bias=True)
    x, offsets = rows_of(counts, 48, dtype, device)
    found = expert_ffn(x, layer.pages, offsets, activation=activation, clamp=0.7)
    assert distance(found, layer.truth(x, counts, activation, 0.7)) <= tolerance


@pytest.mark.parametrize("scales", DTYPES, ids=str)
def test_scales_of_any_dtype(device, scales):
    layer = integers(3, 64, 32, 4, 32, device, scales)
    x, offsets = rows_of((4, 0, 2), 64, torch.float32, device)
    assert distance(expert_ffn(x, layer.pages, offsets), layer.truth(x, (4, 0, 2))) <= 1e-5


def test_an_arena_is_a_list_of_pages_elsewhere(device):
    """Matrices in the order of a ring's slots, one expert elsewhere: bit for bit the same."""
    hidden, width, counts = 32, 24, (3, 2, 0, 4)
    layer = floats(4, hidden, width, torch.float16, device)
    x, offsets = rows_of(counts, hidden, torch.float16, device)
    whole, slot = expert_ffn(x, layer.pages, offsets), 3 * hidden * width + 8
    arena = torch.full((5 * slot,), 9.0, dtype=torch.float16, device=device)
    places = [3, 0, -1, 4]
    for e, place in enumerate(places):
        if place >= 0:
            arena[place * slot : place * slot + 2 * hidden * width] = layer.pages.parts["gate_up"][e].flatten()
            arena[place * slot + 2 * hidden * width : (place + 1) * slot - 8] = layer.pages.parts["down"][e].flatten()
    starts = [place * slot if place >= 0 else -1 for place in places]
    downs = [start + 2 * hidden * width if start >= 0 else -1 for start in starts]
    pages = Pages.in_arena(arena, torch.tensor(starts), downs, hidden=hidden, width=width)
    assert torch.equal(expert_ffn(x, pages, offsets), whole)


def test_rows_of_an_expert_that_is_elsewhere_are_zeros(device):
    layer = floats(3, 32, 16, torch.float32, device, bias=True)
    parts = {name: list(tensors) for name, tensors in layer.pages.parts.items() if tensors}
    for tensors in parts.values():
        tensors[1] = None
    x, offsets = rows_of((2, 3, 1), 32, torch.float32, device)
    found = expert_ffn(x, Pages.of(**parts), offsets)
    assert not found[2:5].any()
    assert torch.equal(found[[0, 1, 5]], expert_ffn(x, layer.pages, offsets)[[0, 1, 5]])


def test_in_place_strided_and_empty(device):
    layer = floats(2, 32, 16, torch.float32, device)
    x, offsets = rows_of((2, 3), 32, torch.float32, device)
    expected = expert_ffn(x, layer.pages, offsets)
    wide = torch.cat((x, -x), dim=1)
    assert torch.equal(expert_ffn(wide[:, :32], layer.pages, offsets), expected)
    assert expert_ffn(x, layer.pages, offsets, out=x) is x
    assert torch.equal(x, expected)
    assert expert_ffn(x[:0], layer.pages, torch.zeros_like(offsets)).shape == (0, 32)


@EVERY_DTYPE
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 4, 2), (13, 6, 2), (40, 5, 5)])
def test_a_layer_from_logits_to_sums(device, dtype, tolerance, tokens, experts, top_k):
    layer = floats(experts, 48, 40, dtype, device)
    x, logits = torch.randn(tokens, 48).to(dtype).to(device), torch.randn(tokens, experts).to(dtype).to(device)
    weights, ids = route(logits, top_k, normalize=True)
    source, places, offsets = by_expert(ids, experts)
    found = combine(expert_ffn(x, layer.pages, offsets, tokens=source), weights, places)
    truth = torch.zeros(tokens, 48, dtype=torch.float64)
    for e in range(experts):
        every = layer.truth(x, tuple(tokens if other == e else 0 for other in range(experts)))
        truth += every * (weights.double() * (ids == e)).sum(1, keepdim=True).cpu()
    assert found.dtype == dtype
    assert distance(found, truth) <= tolerance


@EVERY_DTYPE
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 1, 1), (7, 8, 2), (33, 60, 4), (5, 128, 8), (3, 5, 5)])
def test_route_is_the_models_own(device, dtype, tolerance, narrow, normalize, tokens, experts, top_k):
    logits = torch.randn(tokens, experts).mul(3).to(dtype)
    logits[0] = logits[0, 0]  # of equals the lowest id wins
    logits[-1, ::2] = logits[-1].max()
    spec = RouterSpec(top_k=top_k, normalize=normalize, weights_in_model_dtype=narrow)
    expected, expected_ids = moe.route(logits, spec)
    weights, ids = route(logits.to(device), top_k, normalize=normalize, weights_in_model_dtype=narrow)
    assert weights.dtype == torch.float32
    assert torch.equal(ids.cpu(), expected_ids)
    step = torch.finfo(dtype).eps if narrow else 0.0
    assert torch.allclose(weights.cpu(), expected, rtol=1e-6 + step, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*NaN.*:RuntimeWarning", "ignore:invalid value.*:RuntimeWarning")
def test_route_of_what_is_no_number(device):
    """Ids stay in range whatever the logits are."""
    logits = torch.randn(4, 6)
    logits[0, 3], logits[1, 2], logits[2] = float("nan"), float("inf"), float("-inf")
    expected, expected_ids = moe.route(logits, RouterSpec(top_k=2, normalize=False, weights_in_model_dtype=False))
    weights, ids = route(logits.to(device), 2, normalize=False)
    assert torch.equal(ids.cpu(), expected_ids)
    assert torch.allclose(weights.cpu(), expected, equal_nan=True)


def test_combine_sums_in_the_order_of_k(device):
    results, places = torch.randn(6, 1500, device=device), torch.tensor([[5, 0, 2], [1, 1, 4]], device=device)
    weights = torch.rand(2, 3, device=device)
    truth = (results.double()[places] * weights.double().unsqueeze(-1)).sum(1).cpu()
    assert distance(combine(results, weights, places), truth) <= 1e-6
    sums = torch.ones(2, 1500, device=device)
    assert combine(results, weights, places, out=sums, add=True) is sums
    assert distance(sums, truth + 1) <= 1e-6


def test_slots_stay_inside_whatever_the_offsets_are(device):
    """Offsets on a device are not checked: the map bounds them."""
    if not serving.available():
        pytest.skip("the twin has no map")
    from moelight.kernels.gpu import grouped_triton

    for offsets in ([0, 5, 3, 99, -4, 40], [-7, -3, 0, 0, 0, 0], [0, 2**31 - 1, 0, 0, 7, 7], [0, 20, 20, 36, 36, 40]):
        slots = torch.full((12, 3), 77, dtype=torch.int32, device=device)
        given = torch.tensor(offsets, dtype=torch.int32, device=device)
        grouped_triton.map_slots[(3,)](given, slots, 5, 40, 11, BM=16, PADDED=8, SLOTS=4)
        assert (slots[11] == 77).all()
        for expert, row, last in slots[:11].tolist():
            assert -1 <= expert < 5
            assert expert == -1 or 0 <= row < last <= 40
    assert [tuple(s) for s in slots[:5].tolist()] == [(0, 0, 20), (0, 16, 20), (2, 20, 36), (4, 36, 40), (-1, 0, 0)]


def arguments(device: torch.device) -> dict[str, Any]:
    layer = floats(3, 32, 16, torch.float32, device)
    x, offsets = rows_of((2, 3, 1), 32, torch.float32, device)
    return {"x": x, "pages": layer.pages, "offsets": offsets, "tokens": None, "out": None}


WRONG = {
    "x": [None, 3, lambda x: x.half(), lambda x: x[0], lambda x: x[:, :31], lambda x: x.t().contiguous().t(),
          lambda x: x[:1].expand(6, 32), lambda x: x.to("meta"), lambda x: x.to_sparse()],
    "pages": [None, [], "pages"],
    "offsets": [None, [0, 2, 5, 6], lambda o: o.long(), lambda o: o[:3], lambda o: o[None], lambda o: o + 1,
                lambda o: o.flip(0), lambda o: torch.stack((o, o), 1)[:, 0]],
    "tokens": [[0], lambda _: torch.arange(6, dtype=torch.int32), lambda _: torch.arange(6) + 1,
               lambda _: torch.arange(6)[:, None], lambda _: -torch.arange(6)],
    "out": [3, lambda _: torch.empty(6, 31), lambda _: torch.empty(6, 32, dtype=torch.float16),
            lambda _: torch.empty(32, 6).t()],
    "activation": [None, "relu", 3],
    "clamp": [None, 0, -1.0, float("nan"), "7"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "wrong"), [(name, w) for name, all_wrong in WRONG.items() for w in all_wrong])
def test_experts_name_the_wrong_argument(name, wrong):
    given = arguments(torch.device("cpu"))
    given[name] = wrong(given.get(name)) if callable(wrong) else wrong
    with pytest.raises(ValueError, match=rf"^{name}: "):
        expert_ffn(given.pop("x"), given.pop("pages"), given.pop("offsets"), **given)


def matrices(**change: Any) -> dict[str, Any]:
    gate_up, down = [torch.zeros(32, 64, dtype=torch.int8)] * 2, [torch.zeros(64, 16, dtype=torch.int8)] * 2
    return {"gate_up": gate_up, "down": down, "gate_up_scale": [torch.ones(32, 2)] * 2,
            "down_scale": [torch.ones(64, 1)] * 2, "group_size": 32} | change  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gate_up", {"gate_up": None}),
        ("gate_up", {"gate_up": [None, None]}),
        ("gate_up", {"gate_up": [torch.zeros(32, 64, dtype=torch.int8), 3]}),
        ("gate_up", {"gate_up": [torch.zeros(31, 64, dtype=torch.int8)] * 2}),
        ("gate_up", {"gate_up": [torch.zeros(32, 64, dtype=torch.int16)] * 2}),
        ("gate_up", {"gate_up": [torch.zeros(64, 32, dtype=torch.int8).t()] * 2}),
        ("gate_up", {"gate_up": [torch.zeros(1 + 32 * 64, dtype=torch.int8)[1:].view(32, 64)] * 2}),
        ("down", {"down": [torch.zeros(64, 16, dtype=torch.int8)]}),
        ("down", {"down": [torch.zeros(64, 16, dtype=torch.int8), None]}),
        ("down", {"down": [torch.zeros(64, 17, dtype=torch.int8)] * 2}),
        ("down", {"down": [torch.zeros(64, 16)] * 2}),
        ("gate_up_scale", {"gate_up_scale": None}),
        ("gate_up_scale", {"gate_up_scale": [torch.ones(32, 3)] * 2}),
        ("gate_up_scale", {"gate_up_scale": [torch.ones(32, 2, dtype=torch.int8)] * 2}),
        ("down_scale", {"down_scale": [torch.ones(64, 1), torch.ones(64, 1).half()]}),
        ("down_bias", {"gate_up_bias": [torch.zeros(32)] * 2}),
        ("group_size", {"group_size": 24}),
        ("group_size", {"group_size": 0}),
        ("group_size", {"gate_up": [torch.zeros(32, 64)] * 2}),
        ("group_size", {"gate_up": [torch.zeros(32, 32, dtype=torch.uint8)] * 2, "group_size": None}),
    ],
)
def test_pages_name_the_wrong_argument(name, change):
    Pages.of(**matrices())
    with pytest.raises(ValueError, match=rf"^{name}: "):
        Pages.of(**matrices(**change))


def test_an_arena_names_what_does_not_lie_in_it():
    sizes = {"hidden": 8, "width": 4}
    for offsets in ([0, 37], [0, -2], ["0", 0], torch.tensor([0.5, 0.0])):
        with pytest.raises(ValueError, match=r"^gate_up_offsets: "):
            Pages.in_arena(torch.zeros(100), offsets, [64, 64], **sizes)
    with pytest.raises(ValueError, match=r"^arena: "):
        Pages.in_arena(torch.zeros(10, 10), [0], [64], **sizes)


@pytest.mark.parametrize("card", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (13, 7)])
@pytest.mark.parametrize("mean_rows", [1, 16, 40, 1000])
@pytest.mark.parametrize("group", [0, 32, 48, 128])
def test_tiles_fit_the_card(card, mean_rows, group):
    for itemsize, kind in ((2, 1), (2, 2), (4, 2)):
        tile = tiles.choose(card, itemsize=itemsize, mean_rows=mean_rows, group=group, matrices=kind)
        assert tile.stages * (tile.rows + kind * tile.columns) * tile.depth * itemsize <= tiles.shared_bytes(card)
        assert group % tile.depth == 0
        other = tiles.choose(card, itemsize=itemsize, mean_rows=7, group=group, matrices=kind)
        assert other.depth == tile.depth


def test_which_card_is_served():
    assert serving.card_serves((7, 5), "float16", 4)[0]
    for card, dtype, rows in (((7, 5), "bfloat16", 4), ((7, 5), "float16", 100), ((7, 0), "float16", 1)):
        served, reason = serving.card_serves(card, dtype, rows)
        assert not served
        assert f"{card[0]}.{card[1]}" in reason
    assert serving.card_serves((9, 0), "bfloat16", 10**4)[0]


def test_imports_and_serves_without_triton():
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from moelight.kernels.gpu import grouped, pages, routing, serving\n"
        "assert not serving.available() and 'triton' in serving.reason(), serving.reason()\n"
        "found = routing.route(torch.randn(2, 4), 2, normalize=True)\n"
        "assert found[1].dtype == torch.int32"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
