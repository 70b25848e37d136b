"""The CUDA kernel of compute capability 7.5, played in host memory, against float64; compiled by NVRTC where it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moelight.kernels.activations import SILU, Activation, activation_of
from moelight.kernels.gpu import grouped, grouped_cuda, serving
from moelight.kernels.gpu.pages import ExpertTable, row_slots
from tests.kernels.gpu_layers import distance, floats, rows_of
from tests.kernels.turing import COMPILER, Player, build

CPU = torch.device("cpu")
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    if not serving.triton_available() or not serving.interpreting():
        pytest.skip(f"the slots are triton's: {serving.triton_reason()}, not interpreted")
    return build(tmp_path_factory.mktemp("turing"))


@pytest.fixture
def player(library, monkeypatch):
    monkeypatch.setattr(grouped_cuda, "SLOT_ROWS", 32)
    result = Player(library)
    monkeypatch.setattr(grouped_cuda, "call_of", result.call_of)
    monkeypatch.setattr(grouped_cuda, "launch", result.launch)
    return result


def ffn(
    x: Tensor,
    pages: ExpertTable,
    offsets: Tensor,
    *,
    activation: str | Activation = "silu",
    tokens: Tensor | None = None,
) -> Tensor:
    """`expert_ffn` of float16 rows with matrices of any dtype."""
    rows = x.shape[0] if tokens is None else len(tokens)
    active, out = (torch.full((rows, size), torch.nan, dtype=x.dtype) for size in (pages.width, pages.hidden))
    grouped._launch_cuda(x, pages, offsets, activation_of(activation), tokens, active, out)
    return out


@pytest.mark.parametrize(
    ("counts", "hidden", "width", "rows"),
    [
        ((200, 0, 33, 70, 5), 136, 16, 128),  # tiles of 128, 64 and 32
        ((3, 40), 40, 72, 128),
        ((1, 40), 17, 33, 32),  # no row begins at a multiple of 16 bytes
    ],
)
def test_rows_of_any_number(player, counts, hidden, width, rows):
    player.rows = rows
    layer = floats(len(counts), hidden, width, torch.float16, CPU)
    x, offsets = rows_of(counts, hidden, torch.float16, CPU)
    assert distance(ffn(x, layer.pages, offsets), layer.truth(x, counts)) <= TOLERANCE


def test_more_slots_than_a_band(player):
    """Over two blocks of columns, between experts with fewer."""
    counts = (5, 290, 33)
    layer = floats(3, 16, 72, torch.bfloat16, CPU)
    x, offsets = rows_of(counts, 16, torch.float16, CPU)
    assert distance(ffn(x, layer.pages, offsets), layer.truth(x, counts)) <= TOLERANCE


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", Activation("silu", 1.702, 0.7, 1.0)], ids=str)
def test_activations_and_biases_over_bfloat16(player, activation):
    counts = (40, 26)
    layer = floats(2, 48, 40, torch.bfloat16, CPU, bias=True)
    x, offsets = rows_of(counts, 48, torch.float16, CPU)
    result = ffn(x, layer.pages, offsets, activation=activation)
    assert distance(result, layer.truth(x, counts, activation)) <= TOLERANCE


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 40), (torch.float16, 33)], ids=str)
def test_factors_and_results_in_float32(player, dtype, size):
    """The activation times a power of two in float16, which the sums of ``down`` undo in float32 before the bias."""
    counts = (40, 26)
    layer = floats(2, size, size, dtype, CPU, bias=True)
    x, offsets = rows_of(counts, size, torch.float16, CPU)
    slots = row_slots(offsets, layer.pages, 66, 32)
    active, out = torch.empty(66, size, dtype=torch.float16), torch.empty(66, size)
    for part, source, into, factor in (("gate_up", x, active, 2**-4), ("down", active, out, 2**4)):
        call = player.call_of(layer.pages, part, source, into, slots, offsets, None, 32, SILU, factor)
        player.launch(*call)
    assert distance(out, layer.truth(x, counts)) <= TOLERANCE
    assert (out != out.half()).any()


def test_every_stored_number_is_exact(player):
    """One input of one is the matrix itself: all float16, and all bfloat16 within their range."""
    x, offsets = torch.eye(32, dtype=torch.float16), torch.tensor([0, 32], dtype=torch.int32)
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    bits = bits[bits.float().abs() <= 65504]
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    for values, player.rows in ((bits, 32), (halves[halves.isfinite()], 128)):
        down = torch.cat((values, values.new_zeros(-len(values) % 32))).view(-1, 32)
        pages = ExpertTable.of([down.new_zeros(64, len(down))], [down])
        out = product(player, x, pages, offsets)
        assert torch.equal(out, down.t().half())


def product(player: Player, x: Tensor, pages: ExpertTable, offsets: Tensor) -> Tensor:
    """x times the matrices ``down``."""
    out = torch.full((len(x), pages.hidden), torch.nan, dtype=torch.float16)
    slots = row_slots(offsets, pages, len(x), player.rows)
    call = player.call_of(pages, "down", x, out, slots, offsets, None, player.rows, SILU)
    player.launch(*call)
    return out


def test_a_row_depends_on_no_other(player):
    """The same bits from tiles of any height, at any place in a slot, gathered or not, strided or not."""
    player.rows = 128
    layer = floats(1, 40, 72, torch.float16, CPU)
    x = torch.randn(9, 40).half()
    result = []
    for before in (0, 3, 40, 100, 128):
        rows = torch.cat((torch.randn(before, 40).half(), x))
        result.append(ffn(rows, layer.pages, torch.tensor([0, before + 9], dtype=torch.int32))[before:])
    order = torch.arange(9).flip(0)
    wide = torch.cat((x, x), dim=1)[:, 40:]
    gathered = ffn(wide, layer.pages, torch.tensor([0, 9], dtype=torch.int32), tokens=order)
    assert all(torch.equal(item, result[0]) for item in (*result, gathered.flip(0)))


def test_rows_of_an_expert_elsewhere_are_zeros(player):
    player.rows = 128
    layer = floats(3, 48, 32, torch.float16, CPU, bias=True)
    parts = {name: list(tensors) for name, tensors in layer.pages.parts.items() if tensors}
    for tensors in parts.values():
        tensors[1] = None
    x, offsets = rows_of((20, 33, 1), 48, torch.float16, CPU)
    result = ffn(x, ExpertTable.of(**parts), offsets)
    assert not result[20:53].any()
    assert torch.equal(result[53:], ffn(x, layer.pages, offsets)[53:])


def test_the_check_of_a_card_is_exact(player):
    player.rows = 128
    assert grouped_cuda._is_right(CPU)


def test_nothing_outside_is_touched(player):
    """Whatever offsets and tokens are; and the player would notice."""
    layer = floats(3, 17, 33, torch.float16, CPU)
    x = torch.randn(40, 17).half()
    tokens = torch.randint(-100, 100, (40,))
    for offsets in ([0, 50, 3, 40], [-7, -3, 2**31 - 1, 0], [9, 20, 20, 36]):
        ffn(x, layer.pages, torch.tensor(offsets, dtype=torch.int32), tokens=tokens)
    offsets = torch.tensor([0, 40, 40, 40], dtype=torch.int32)
    out, active = torch.empty(40, 17, dtype=torch.float16), torch.empty(40, 33, dtype=torch.float16)
    slots = row_slots(offsets, layer.pages, 40, 32)
    call = player.call_of(layer.pages, "gate_up", x, active, slots, offsets, None, 32, SILU)
    player.spans[-1].bytes -= 2
    with pytest.raises(RuntimeError, match="a write outside"):
        player.launch(*call)
    call = player.call_of(layer.pages, "down", active, out, slots, offsets, None, 32, SILU)
    player.spans[0].bytes -= 1
    with pytest.raises(RuntimeError, match="a read outside"):
        player.launch(*call)
