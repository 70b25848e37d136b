"""Which page each expert has, on the device: copied where it changed, to addresses that never do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moelight.kernels.activations import SILU
from moelight.kernels.device import Device
from moelight.kernels.gpu.pages import ExpertTable
from moelight.runtime.moe_ops import LayerPages


def test_an_index_is_copied_once_for_a_pass_or_for_a_layer_of_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []

    def counted(device: Device, values: np.ndarray) -> torch.Tensor:
        copies.append(values.size)
        return torch.from_numpy(values)

    monkeypatch.setattr(Device, "pinned", counted)
    table = ExpertTable.of([torch.zeros(8, 4)] * 7, [torch.zeros(4, 4)] * 7)
    pages, full = LayerPages([table] * 3, [SILU] * 3, experts=5), np.arange(15, dtype=np.int32).reshape(3, 5) % 7
    result = [pages.of_pass(layer, (0, 0), lambda: full) for layer in range(3)]
    assert [item.index.tolist() for item in result] == full.tolist()
    assert all(item.table is table.table and item.index.data_ptr() % 16 == 0 for item in result)
    assert copies == [24], "rows are padded to 16 bytes"
    chosen = np.array([-1, 6, -1, -1, 0], dtype=np.int32)
    for _ in range(2):
        assert pages.of_layer(1, chosen) is result[1]
    assert result[1].index.tolist() == chosen.tolist()
    assert copies == [24, 8]
    for key, values in (((0, 0), full), ((3, 0), full[::-1]), ((3, 0), None)):  # equal keys: not asked for again
        again = [pages.of_pass(layer, key, lambda values=values: values) for layer in range(3)]  # type: ignore[misc]
        assert again == result
        if values is not None:
            assert [item.index.tolist() for item in again] == values.tolist()
    assert copies == [24, 8, 24, 24]
