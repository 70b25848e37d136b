"""The roofs: reading reads every byte, products are counted right, wrong arguments are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moelight.kernels import native
from moelight.kernels.arguments import as_dlpack

MIB = 1 << 20

pytestmark = pytest.mark.skipif(not native.available(), reason="the extension is not built")


def read(data: torch.Tensor, threads: int) -> int:
    extension = native.extension()
    assert extension is not None
    return int(extension.read_peak(as_dlpack("bytes", data), threads))


def test_every_byte_is_read() -> None:
    for threads in [1, 2, 5]:
        for size in [0, 1, 63, 64, 1000, 4 * MIB - 1, 4 * MIB, 9 * MIB + 77]:
            data = torch.randint(0, 256, (size,), dtype=torch.uint8)
            words = np.zeros(-(-size // 8), np.uint64)
            words.view(np.uint8)[:size] = data.numpy()
            assert read(data, threads) == int(np.bitwise_xor.reduce(words))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("threads", [1, 2])
def test_products_are_counted(dtype: str, threads: int) -> None:
    extension = native.extension()
    assert extension is not None
    try:
        for isa in extension.isa_available():
            extension.set_isa(isa)
            once, twice = (extension.product_peak(dtype, rounds, threads) for rounds in (64, 128))
            assert twice == 2 * once > 0
            assert once % threads == 0
    finally:
        extension.set_isa("auto")


def test_refusals() -> None:
    extension = native.extension()
    assert extension is not None
    with pytest.raises(ValueError, match="bytes: must be uint8"):
        extension.read_peak(as_dlpack("bytes", torch.zeros(8)), 1)
    with pytest.raises(ValueError, match="bytes: must be contiguous"):
        extension.read_peak(as_dlpack("bytes", torch.zeros(16, dtype=torch.uint8)[::2]), 1)
    with pytest.raises(ValueError, match="threads: must be at least 1"):
        extension.read_peak(as_dlpack("bytes", torch.zeros(8, dtype=torch.uint8)), 0)
    with pytest.raises(ValueError, match="dtype: must be float32, bfloat16 or int8"):
        extension.product_peak("int4", 1, 1)
    with pytest.raises(ValueError, match="rounds: must be at least 1"):
        extension.product_peak("float32", 0, 1)
