"""Rows rounded to int8 by quantised experts in the GPU's kernels: the bits of `kernels.quantized`, in any company;
interpreted on the CPU, by torch, and on a device where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moelight.formats.format import Format
from moelight.formats.matrix import Matrix
from moelight.kernels import quantized
from moelight.kernels.activations import Activation
from moelight.kernels.gpu import serving, tiles
from moelight.kernels.gpu.grouped import expert_ffn
from moelight.kernels.gpu.integers import round_rows
from moelight.kernels.gpu.pages import ExpertTable
from moelight.kernels.quantized import round_tokens
from tests.cases import thorough
from tests.kernels.gpu_layers import distance, rows_of
from tests.kernels.quantized import FORMATS, int8, matrix, packed, step
from tests.kernels.test_gpu_quantized import BY_TRITON, moved

FORMS = {
    **{name: stored for name, stored in FORMATS.items() if stored.gpu_int8_reason is None},
    "int8 in groups": int8(group=96, zero_points=True),
    "packed int8 by rows": packed(bits=8, group=0),
}
# Its curve has no exponential function, of which processors have several.
SQUARED = Activation("relu2", gated=False)


def layer(
    stored: Format, hidden: int, inner: int, *, gated: bool, experts: int = 2
) -> tuple[list[Matrix[Tensor]], list[Matrix[Tensor]]]:
    """About so large, as the format allows."""
    unit = max(step(stored))
    hidden, inner = (-(-size // unit) * unit for size in (hidden, inner))
    up = [matrix(stored, (1 + gated) * inner, hidden, seed=e) for e in range(experts)]
    return up, [matrix(stored, hidden, inner, seed=20 + e) for e in range(experts)]


def table(up: list[Matrix[Tensor]], down: list[Matrix[Tensor]], device: torch.device, **options: Any) -> Any:
    inputs = ([None if item is None else moved(item, device) for item in side] for side in (up, down))
    return ExpertTable.of(*inputs, **{"activations": "int8", **options})


def truth(x: Tensor, pages: Any, offsets: Tensor) -> Tensor:
    """By the reference."""
    parts = {name: [moved(part, torch.device("cpu")) for part in pages.parts[name]] for name in ("gate_up", "down")}
    return quantized.expert_ffn(
        x.cpu(),
        parts["gate_up"],
        parts["down"],
        offsets.tolist(),
        activation=pages.activation,
        interleaved=pages.interleaved,
        activations=pages.activations,
    )


@BY_TRITON
@pytest.mark.usefixtures("checks_overflow")
@pytest.mark.parametrize("name", ["packed int4", "Q8_0", "Q4_K", "int8 in groups"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_rounded_as_tokens_are(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Bit for bit, those that are zero, nearly so, or not finite too; with the sums that products take."""
    stored, columns = FORMS[name], 512 if name == "Q4_K" else 300
    x = torch.randn(7, columns)
    x[0, :256], x[1, 40], x[2, 70], x[3], x[4, :32] = 1e-38, torch.inf, torch.nan, 0, 1e-33
    x = x.to(dtype)
    tokens = torch.tensor([6, 0, 1, 2, 3, 4, 5])
    result = round_rows(x.to(device), stored, tokens.to(device))
    values, scales = round_tokens(x[tokens], result.group)
    groups = scales.shape[1]
    all_numbers, all_scales = result.values.cpu().int(), result.scales.cpu().nan_to_num(-1.0)
    assert torch.equal(all_numbers[:, : groups * result.group].view(values.shape), values)
    assert torch.equal(all_scales[:, :groups], scales.nan_to_num(-1.0))
    assert not all_numbers[:, groups * result.group :].any() and not all_scales[:, groups:].any()
    if (sums := stored.token_sums) == "groups":
        assert torch.equal(result.sums.cpu()[:, :groups], values.sum(-1, dtype=torch.int32))
    elif sums == "parts":
        halves = result.sums.float().cpu().view(*scales.shape, 2, 8).sum(2)
        assert torch.equal(halves, values.view(*scales.shape, 8, 32).sum(-1).float())


@pytest.mark.parametrize("name", FORMS)
def test_products_are_those_of_whole_numbers(name: str, device: torch.device) -> None:
    """Bit for bit, whole steps and a last one beyond the columns."""
    pages = table(*layer(FORMS[name], 160, 40, gated=False), device, activation=SQUARED)
    x, offsets = rows_of((2, 3), pages.hidden, torch.float32, device)
    assert torch.equal(expert_ffn(x, pages, offsets).cpu(), truth(x, pages, offsets))


@pytest.mark.parametrize("name", thorough(["packed int4", "Q4_K"], but=["packed int4"]))
def test_rows_do_not_depend_on_their_company(name: str, device: torch.device) -> None:
    """Nor on the tile, nor on whether rows are gathered before or after they are rounded."""
    pages = table(*layer(FORMS[name], 128, 32, gated=False, experts=1), device, activation=SQUARED)
    x, offsets = rows_of((40,), pages.hidden, torch.bfloat16, device)
    together = expert_ffn(x, pages, offsets, mean_rows=64)
    some = torch.tensor([5, 39, 0], device=device)
    few = expert_ffn(x, pages, torch.tensor([0, 3], dtype=torch.int32, device=device), tokens=some, mean_rows=1)
    assert torch.equal(few, together[some])
    order = torch.arange(40, device=device).flip(0)
    assert torch.equal(expert_ffn(x, pages, offsets, tokens=order), together.flip(0))


@pytest.mark.usefixtures("checks_overflow")
@pytest.mark.parametrize("interleaved", [False, True])
def test_gated_experts_in_16_bits(interleaved: bool, device: torch.device) -> None:
    """Beside one that is elsewhere, with biases; near the product of rows that are not rounded."""
    up, down = layer(FORMS["mxfp4"], 64, 64, gated=True, experts=3)
    options: dict[str, Any] = {
        "interleaved": interleaved,
        "gate_up_bias": [torch.randn(item.rows).to(device) for item in up],
        "down_bias": [torch.randn(item.rows).to(device) for item in down],
        "activation": Activation("silu", 1.702, 7.0, 1.0),
    }
    for item in (up, down, options["gate_up_bias"], options["down_bias"]):
        item[1] = None  # type: ignore[call-overload]
    x, offsets = rows_of((3, 1, 2), up[0].columns, torch.bfloat16, device)
    result, exact = (
        expert_ffn(x, table(up, down, device, activations=how, **options), offsets) for how in ("int8", "auto")
    )
    assert not result[3].any()
    assert 0 < distance(result, exact.double().cpu()) < 0.05


def test_a_side_may_be_rounded_alone(device: torch.device) -> None:
    """And a row that is not finite spoils no other."""
    up, down = layer(FORMS["packed int4"], 128, 128, gated=True)
    pages = table(up, down, device, activations=("int8", "auto"))
    x, offsets = rows_of((1, 20), pages.hidden, torch.float32, device)
    x[2, 7] = torch.inf
    result, wanted = expert_ffn(x, pages, offsets).cpu(), truth(x, pages, offsets)
    assert result[2].isnan().all()
    finite = torch.arange(21) != 2
    assert distance(result[finite], wanted[finite].double()) < 1e-4
    other = [matrix(FORMATS["fp8 rows"], 128, 128, seed=e) for e in range(2)]
    pages = table(up, other, device, activations=("int8", "auto"))
    assert expert_ffn(x, pages, offsets)[finite.to(device)].isfinite().all()
    with pytest.raises(ValueError, match=r"^down: .*int8 activations"):
        table(up, other, device)
    with pytest.raises(ValueError, match="activations: must be auto or int8, is 'int4'"):
        table(up, down, device, activations="int4")


def test_cards_without_integer_units_unpack() -> None:
    assert serving.card_serves_integers((8, 0))[0] and serving.card_serves_integers((9, 0))[0]
    assert "registers" in serving.card_serves_integers((10, 0))[1] and not serving.card_serves_integers((12, 0))[0]
    served, reason = serving.card_serves_integers((7, 5))
    assert not served and "8.0" in reason


@pytest.mark.parametrize("card", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_tiles_fit_their_card(card: tuple[int, int]) -> None:
    for group in (32, 64, 128, 256):
        for mean_rows in (1, 20, 1000):
            for matrices in (1, 2):
                tile = tiles.choose_integers(card, group=group, mean_rows=mean_rows, matrices=matrices)
                stage = (tile.rows + matrices * tile.columns) * tile.depth
                assert tile.stages * stage <= tiles.shared_bytes(card)
                assert group % tile.depth == 0 or tile.depth % group == 0
                assert not tile.fused and not tiles.launch_options(tile)["enable_fp_fusion"]
