"""The GPU's kernels, and their twins, against float64: interpreted on the CPU, and on a device where there is one."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from moelight import kernels
from moelight.kernels import device as device_module
from moelight.kernels.activations import SILU, Activation
from moelight.kernels.gpu import routing, serving, tiles
from moelight.kernels.gpu.grouped import expert_ffn, expert_ffn_in_torch
from moelight.kernels.gpu.pages import ExpertTable
from moelight.kernels.gpu.routing import by_expert, combine, route
from moelight.models import moe
from moelight.profiles.model import RouterSpec
from tests.kernels.gpu_layers import distance, floats, in_form, rows_of

pytestmark = pytest.mark.usefixtures("checks_overflow")
DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EVERY_DTYPE = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.items(), ids=str)
COUNTS = {
    "one token": (1,),
    "empty experts": (0, 3, 0, 0, 5, 1, 0),
    "one of many": (0, 0, 1, 0, 0),
    "ragged": (40, 0, 17, 16),
}
# Hidden and width beside counts: whole steps of inputs, or what is left over, or no row on an even address.
SIZES = {"one token": (17, 48), "empty experts": (64, 128), "one of many": (80, 33), "ragged": (80, 33)}


@EVERY_DTYPE
@pytest.mark.parametrize("rows", COUNTS)
def test_experts(device, dtype, tolerance, rows):
    counts, (hidden, width) = COUNTS[rows], SIZES[rows]
    layer = floats(len(counts), hidden, width, dtype, device)
    x, offsets = rows_of(counts, hidden, dtype, device)
    result = expert_ffn(x, layer.pages, offsets)
    assert result.dtype == dtype
    assert distance(result, layer.truth(x, counts)) <= tolerance


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        ("silu", torch.float32),
        ("gelu_tanh", torch.float32),
        (Activation("silu", 1.702, 0.7, 1.0), torch.float32),
        (Activation("gelu"), torch.float32),
        (Activation("silu", limit=0.5, late=True), torch.float32),
        ("silu", torch.float16),
        (Activation("silu", 1.702, 0.7, 1.0), torch.bfloat16),
    ],
    ids=str,
)
def test_activations_and_biases(device, activation, dtype):
    counts = COUNTS["empty experts"]
    layer = floats(len(counts), 48, 40, dtype, device, bias=True)
    x, offsets = rows_of(counts, 48, dtype, device)
    result = expert_ffn(x, layer.pages, offsets, activation=activation)
    assert distance(result, layer.truth(x, counts, activation)) <= DTYPES[dtype]


@pytest.mark.parametrize(
    ("form", "dtype", "bias"),
    [
        ("transposed", torch.float32, False),
        ("interleaved", torch.float32, True),
        ("apart", torch.float32, True),
        ("interleaved", torch.bfloat16, True),
        ("apart", torch.float16, False),
    ],
    ids=str,
)
def test_every_form(device, form, dtype, bias):
    counts, by = COUNTS["empty experts"], Activation("silu", 1.702, 0.7, 1.0)
    layer = in_form(floats(len(counts), 40, 36, dtype, device, bias=bias), form, by, device)
    x, offsets = rows_of(counts, 40, dtype, device)
    assert distance(expert_ffn(x, layer.pages, offsets), layer.truth(x, counts)) <= DTYPES[dtype]
    by_torch = expert_ffn_in_torch(
        x, layer.pages, offsets, activation=by, tokens=None, out=torch.empty(x.shape, dtype=dtype, device=device)
    )
    assert distance(by_torch, layer.truth(x, counts)) <= DTYPES[dtype]


def test_without_a_gate(device):
    counts, by = COUNTS["ragged"], Activation("relu2", gated=False)
    full = floats(len(counts), 40, 36, torch.float32, device, bias=True)
    parts = {name: list(tensors) for name, tensors in full.pages.parts.items() if tensors}
    down = [torch.randn(40, 72, device=device) for _ in counts]
    pages = ExpertTable.of(**(parts | {"down": down}), activation=by)
    layer = replace(full, pages=pages, down=[item.double().cpu() for item in down])
    x, offsets = rows_of(counts, 40, torch.float32, device)
    assert distance(expert_ffn(x, pages, offsets), layer.truth(x, counts)) <= DTYPES[torch.float32]


def test_forms_that_the_table_cannot_hold(device):
    layer = in_form(floats(2, 32, 16, torch.float32, device), "apart", SILU, device)
    parts = {name: list(tensors) for name, tensors in layer.pages.parts.items() if tensors}
    for wrong in (
        {"up": [parts["up"][0], parts["up"][1].half()]},
        {"up": parts["up"][:1]},
        {"up": [parts["up"][0], None]},
    ):
        with pytest.raises(ValueError, match=r"^up: "):
            ExpertTable.of(**(parts | wrong))
    with pytest.raises(ValueError, match=r"^activation: "):
        x, offsets = rows_of((1, 1), 32, torch.float32, device)
        expert_ffn(x, layer.pages, offsets, activation=Activation(gated=False))


LOUD = pytest.mark.filterwarnings(
    "ignore:.* encountered in:RuntimeWarning"
)  # numpy, of what the interpreter makes infinite


@LOUD
def test_bfloat16_experts_of_float16_rows(device):
    """Activations beyond float16's range, and outputs beyond it; rows gathered, biased, and of an expert elsewhere."""
    counts, hidden, width = (0, 3, 0, 20, 1), 80, 33
    layer = floats(len(counts), hidden, width, torch.bfloat16, device, bias=True)
    x, offsets = rows_of(counts, hidden, torch.float16, device)
    result = expert_ffn(x, layer.pages, offsets)
    assert result.dtype == torch.float32
    assert distance(result, layer.truth(x, counts)) <= DTYPES[torch.float16]
    loud, tokens = x * 200, torch.arange(len(x), device=device).flip(0)
    truth = layer.truth(loud, counts)
    assert truth.abs().max() > 65504
    assert distance(expert_ffn(loud.flip(0), layer.pages, offsets, tokens=tokens), truth) <= DTYPES[torch.float16]


@LOUD
def test_weights_that_float16_does_not_hold(device):
    counts = (3, 0, 2)
    layer = floats(3, 48, 40, torch.bfloat16, device)
    for part, value in (("gate_up", 1e5), ("down", -2e6)):
        tensors, exact = layer.pages.parts[part], getattr(layer, part)
        tensors[2][1, 3], exact[2][1, 3] = value, torch.tensor(value).bfloat16().double()
    x, offsets = rows_of(counts, 48, torch.float16, device)
    result = expert_ffn(x, layer.pages, offsets, wide=True)
    assert distance(result, layer.truth(x, counts)) <= DTYPES[torch.float16]
    assert distance(result[:3], layer.truth(x, counts)[:3]) <= DTYPES[torch.float16]
    assert not expert_ffn(x, layer.pages, offsets)[3:].isfinite().all(), "and is not silent without"


def test_more_slots_than_a_band(device, monkeypatch):
    """Programs go over a band of slots for one block of columns, then the next; the last band is narrower."""
    monkeypatch.setattr(tiles, "_BAND_ROWS", 48)
    counts = (1, 2, 3, 1, 2, 3, 1, 2)
    layer = floats(len(counts), 16, 80, torch.float32, device)
    x, offsets = rows_of(counts, 16, torch.float32, device)
    assert distance(expert_ffn(x, layer.pages, offsets), layer.truth(x, counts)) <= 1e-5


def test_an_arena_is_a_list_of_pages_elsewhere(device):
    """Matrices in the order of a ring's slots, one expert elsewhere: bit for bit the same."""
    hidden, width, counts = 32, 24, (3, 2, 0, 4)
    layer = floats(4, hidden, width, torch.float16, device)
    x, offsets = rows_of(counts, hidden, torch.float16, device)
    full, slot = expert_ffn(x, layer.pages, offsets), 3 * hidden * width + 8
    arena = torch.full((5 * slot,), 9.0, dtype=torch.float16, device=device)
    places = [3, 0, -1, 4]
    for e, position in enumerate(places):
        if position >= 0:
            arena[position * slot : position * slot + 2 * hidden * width] = layer.pages.parts["gate_up"][e].flatten()
            arena[position * slot + 2 * hidden * width : (position + 1) * slot - 8] = layer.pages.parts["down"][
                e
            ].flatten()
    slots = [arena[position * slot : (position + 1) * slot - 8] if position >= 0 else None for position in places]
    gate_up = [slot if slot is None else slot[: 2 * hidden * width].view(2 * width, hidden) for slot in slots]
    down = [slot if slot is None else slot[2 * hidden * width :].view(hidden, width) for slot in slots]
    assert torch.equal(expert_ffn(x, ExpertTable.of(gate_up, down), offsets), full)


def test_the_page_of_an_expert_is_what_the_index_holds_when_the_kernels_run(device):
    """Bit for bit the experts in another order; any number that is no page is an expert elsewhere."""
    layer = floats(4, 32, 16, torch.float16, device)
    index = torch.zeros(5, dtype=torch.int32, device=device)
    chosen = layer.pages.chosen_by(index)
    assert (chosen.experts, chosen.pages) == (5, 4)
    x, offsets = rows_of((2, 3, 0, 1, 4), 32, torch.float16, device)
    index.copy_(torch.tensor([2, -1, 0, 4, 1]))
    result = expert_ffn(x, chosen, offsets)
    alone, others = rows_of((0, 4, 2, 0), 32, torch.float16, device)
    alone[:4], alone[4:] = x[6:], x[:2]
    expected = expert_ffn(alone, layer.pages, others)
    assert torch.equal(result, torch.cat((expected[4:], torch.zeros_like(result[:4]), expected[:4])))


def test_rows_of_an_expert_that_is_elsewhere_are_zeros(device):
    layer = floats(3, 32, 16, torch.float32, device, bias=True)
    parts = {name: list(tensors) for name, tensors in layer.pages.parts.items() if tensors}
    for tensors in parts.values():
        tensors[1] = None
    x, offsets = rows_of((2, 3, 1), 32, torch.float32, device)
    result = expert_ffn(x, ExpertTable.of(**parts), offsets)
    assert not result[2:5].any()
    assert torch.equal(result[[0, 1, 5]], expert_ffn(x, layer.pages, offsets)[[0, 1, 5]])


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
def test_a_layer_from_logits_to_sums(device, dtype, tolerance):
    tall = [(33, 2, 2)] if dtype.itemsize == 2 else []  # tiles of float32 have the same height for all
    for tokens, experts, top_k in [(1, 4, 2), (13, 6, 2), *tall]:
        layer = floats(experts, 48, 40, dtype, device)
        x, logits = torch.randn(tokens, 48).to(dtype).to(device), torch.randn(tokens, experts).to(dtype).to(device)
        weights, ids = route(logits, top_k, normalize=True)
        source, places, offsets = by_expert(ids, experts)
        result = combine(expert_ffn(x, layer.pages, offsets, tokens=source), weights, places)
        truth = torch.zeros(tokens, 48, dtype=torch.float64)
        for e in range(experts):
            every = layer.truth(x, tuple(tokens if other == e else 0 for other in range(experts)))
            truth += every * (weights.double() * (ids == e)).sum(1, keepdim=True).cpu()
        assert result.dtype == dtype
        assert distance(result, truth) <= tolerance


@EVERY_DTYPE
def test_route_is_the_models_own(device, dtype, tolerance):
    sizes = [(1, 1, 1), (7, 8, 2), (33, 60, 4), (5, 128, 8), (3, 5, 5)]
    for number, (narrow, (tokens, experts, top_k)) in enumerate(product((False, True), sizes)):
        normalize = number % 2 == 1  # of an odd number of sizes each meets both
        logits = torch.randn(tokens, experts).mul(3).to(dtype)
        logits[0] = logits[0, 0]  # of equals the lowest id wins
        logits[-1, ::2] = logits[-1].max()
        spec = RouterSpec(top_k=top_k, normalize=normalize, weights_in_model_dtype=narrow)
        expected, expected_ids = moe.route_tokens(logits, spec)
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
    expected, expected_ids = moe.route_tokens(
        logits, RouterSpec(top_k=2, normalize=False, weights_in_model_dtype=False)
    )
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


@EVERY_DTYPE
def test_a_sum_of_parts_is_that_of_the_whole(device, dtype, tolerance):
    """Bit for bit: parts continue the sum in float32, the last one rounds it, and what it is added to is rounded then,
    as on the CPU."""
    results, weights = torch.randn(7, 20, device=device).to(dtype), torch.rand(4, 3, device=device)
    places = torch.tensor([[0, 3, 6], [1, 2, 5], [4, 5, 6], [0, 1, 2]], device=device)
    residual, begun = torch.randn(4, 20, device=device).to(dtype), None
    sums = torch.full((4, 20), torch.nan, device=device)
    for first, last in ((0, 3), (3, 4)):
        begun = combine(results[first:last], weights, places, out=sums, first=first, begun=begun)
    result = combine(results[4:], weights, places, out=residual.clone(), add=True, first=4, begun=begun)
    full = combine(results, weights, places)
    assert torch.equal(result, residual + full)
    truth = (results.double()[places] * weights.double().unsqueeze(-1)).sum(1)
    assert distance(full, truth.cpu()) <= tolerance


def test_rows_are_sorted_by_expert_then_token(device, monkeypatch):
    """In steps of a few rows too; experts without rows have none."""
    monkeypatch.setattr(routing, "_SORT_ROWS", (16, 32))
    for tokens, top_k, experts, many in ((1, 1, 1, 99), (0, 2, 3, 99), (21, 3, 7, 99), (21, 3, 7, 0)):
        monkeypatch.setattr(routing, "_MANY_ROWS", many)
        ids = torch.rand(tokens, experts).topk(top_k).indices.sort().values.to(torch.int32)
        ids[ids == 4] = 5
        order = ids.flatten().sort(stable=True).indices
        result, places, offsets = by_expert(ids.to(device), experts)
        assert torch.equal(result.cpu(), order // top_k)
        assert torch.equal(places.cpu().flatten()[order], torch.arange(tokens * top_k))
        assert offsets.diff().tolist() == torch.bincount(ids.flatten().long(), minlength=experts).tolist()
        assert (offsets[0], offsets.dtype) == (0, torch.int32)


def test_slots_stay_inside_whatever_the_offsets_are(device):
    """Offsets and pages on a device are not checked: the map bounds them."""
    if not serving.triton_available():
        pytest.skip("the twin has no map")
    from moelight.kernels.gpu import grouped_triton

    for offsets in ([0, 5, 3, 99, -4, 40], [-7, -3, 0, 0, 0, 0], [0, 2**31 - 1, 0, 0, 7, 7], [0, 20, 20, 36, 36, 40]):
        slots = torch.full((12, 3), 77, dtype=torch.int32, device=device)
        inputs = torch.tensor(offsets, dtype=torch.int32, device=device)
        index = torch.tensor([3, -9, 8, 9, 2**31 - 1], dtype=torch.int32, device=device)
        grouped_triton.map_slots[(3,)](inputs, index, slots, 5, 9, 40, 11, BM=16, PADDED=8, SLOTS=4)
        assert (slots[11] == 77).all()
        for page, row, last in slots[:11].tolist():
            assert page in {-1, 3, 8, 9}, "9: the column without addresses"
            assert page == -1 or 0 <= row < last <= 40
    assert [tuple(s) for s in slots[:5].tolist()] == [(3, 0, 20), (3, 16, 20), (8, 20, 36), (9, 36, 40), (-1, 0, 0)]


def test_tiles_fit_the_card():
    cards = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (13, 7)]
    for card, mean_rows, itemsize, matrices in product(cards, [1, 16, 40, 1000], (2, 4), (1, 2)):
        tile = tiles.choose(card, itemsize=itemsize, mean_rows=mean_rows, matrices=matrices)
        used = tile.stages * (tile.rows + matrices * tile.columns) * tile.depth * itemsize
        assert used <= tiles.shared_bytes(card), (card, mean_rows, itemsize, matrices)
        other = tiles.choose(card, itemsize=itemsize, mean_rows=7, matrices=matrices)
        assert other.depth == tile.depth
        both = tiles.choose(card, itemsize=itemsize, mean_rows=mean_rows, matrices=3 - matrices)
        assert both.rows == tile.rows, "both products go by the same map"


def test_which_card_is_served():
    for card, dtype in (((7, 5), "bfloat16"), ((7, 0), "float16")):
        served, reason = serving.card_serves(card, dtype)
        assert not served
        assert f"{card[0]}.{card[1]}" in reason
    for card, dtype in (((7, 5), "float16"), ((7, 5), "float32"), ((9, 0), "bfloat16"), ((9, 0), "float32")):
        assert serving.card_serves(card, dtype)[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel may run here")
def test_triton_serves_a_card_where_the_cuda_kernel_fails(monkeypatch):
    """Many rows without Triton's tensor units; the fault is real: this torch, or this machine, has no CUDA."""
    for name, value in (("interpreting", False), ("triton_available", True), ("failure", None)):
        monkeypatch.setattr(serving, name, lambda *_, value=value: value)
    for module in (serving, device_module):
        monkeypatch.setattr(module, "compute_capability", lambda _: (7, 5))
    monkeypatch.setattr(serving, "reads_host", lambda *_: (False, "there is no card"))
    few, many = (
        item for item in serving.serving_on(torch.device("cuda", 0)) if item.operation.startswith("experts of")
    )
    assert (few.implementation, many.implementation) == ("triton", "triton")
    assert "the CUDA kernel does not run here" in many.reason
    for card, dtype, rows in (((8, 0), "float16", 100), ((7, 5), "float32", 100), ((7, 0), "float16", 100)):
        assert not serving.wants_cuda(card, dtype, rows)


def test_imports_and_serves_without_triton(monkeypatch):
    monkeypatch.setattr(kernels, "gpu", kernels.gpu)  # and the modules: what is imported below goes again
    for name in [name for name in sys.modules if name.startswith("moelight.kernels.gpu")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    anew = {name: importlib.import_module(f"moelight.kernels.gpu.{name}") for name in ("grouped", "routing", "serving")}
    assert anew["serving"] is not serving
    assert not anew["serving"].triton_available() and "triton" in anew["serving"].triton_reason()
    assert anew["routing"].route(torch.randn(2, 4), 2, normalize=True)[1].dtype == torch.int32


def test_a_run_on_the_cpu_does_not_import_triton(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(serving, "interpreting", serving.interpreting.__wrapped__)
    monkeypatch.setattr(serving, "_load", lambda: pytest.fail("triton was imported"))
    assert serving.serves(torch.device("cpu"), torch.float32) == (False, "the tensors are in CPU memory")
    assert not serving.refuse(torch.device("cpu"), RuntimeError())


def test_interpreted_in_a_process_of_its_own():
    """Where something imported Triton before it was told to interpret, the tests above that need it run here."""
    if not serving.triton_available():
        pytest.skip(serving.triton_reason())
    if serving.interpreting() or torch.cuda.is_available():
        pytest.skip("this process runs them")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "interpreted and not process", __file__],
        check=False,
        capture_output=True,
        text=True,
        env=environment | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).resolve().parents[2],
        timeout=3600,  # a hang, not a slow machine
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " passed" in ran.stdout
