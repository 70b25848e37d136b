"""The numbers of stored formats equal those of the libraries that define them, to the bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor

from moelight.formats.awq import awq
from moelight.formats.format import Format
from moelight.formats.ggml import GGML_FORMATS
from moelight.formats.gptq import gptq
from moelight.kernels.formats.table import reference_of
from tests.weights.packers import BIT_COUNTS, pack_gptq, same_bits, unpacked

GGML = sorted(name for name, stored in GGML_FORMATS.items() if stored.key == "ggml")


def in_blocks(stored: Format, parts: dict[str, Tensor], rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """All numbers, put together from blocks of a size that ends inside words and groups."""
    return unpacked(stored, parts, (rows, columns), max_rows=13, dtype=dtype)


def values(stored: Format, parts: dict[str, Tensor], begin: int, end: int, columns: int) -> Tensor:
    return reference_of(stored).values(stored, parts, begin, end, columns)


@pytest.mark.parametrize("name", GGML)
def test_ggml_blocks_are_those_of_the_gguf_package(name: str) -> None:
    stored, kind = GGML_FORMATS[name], gguf.GGMLQuantizationType[name]
    assert gguf.GGML_QUANT_SIZES[kind] == (stored.block, stored.block_bytes)
    rows, columns = 40, 512
    random = np.random.default_rng(5)
    raw = random.integers(0, 256, (rows, columns // stored.block * stored.block_bytes), dtype=np.uint8)
    try:
        written = quantize(random.standard_normal((rows, columns)).astype(np.float32), kind)
        raw[: rows // 2] = written[: rows // 2]  # the other half: any bytes, with scales of any size
    except NotImplementedError:
        pass
    with np.errstate(all="ignore"):
        wanted = torch.from_numpy(dequantize(raw, kind).reshape(rows, columns))
    parts = {".weight": torch.from_numpy(raw)}
    assert stored.bytes_for(rows, columns) == raw.nbytes
    same_bits(in_blocks(stored, parts, rows, columns, torch.float32), wanted)


@pytest.mark.parametrize("bits", BIT_COUNTS)
@pytest.mark.parametrize(("group", "ordered"), [(32, False), (32, True), (0, False)])
def test_gptq_numbers(bits: int, group: int, ordered: bool) -> None:
    """scales x (codes - zeros), in the float16 of GPTQModel's ``dequantize_weight``."""
    rows, columns = 48, 96
    torch.manual_seed(bits)
    groups = columns // group if group else 1
    codes = torch.randint(0, 1 << bits, (rows, columns))
    zeros = torch.randint(0, 1 << bits, (groups, rows))
    scales = torch.rand(groups, rows).half() * 0.1
    order = torch.arange(columns) // (group or columns)
    order = order[torch.randperm(columns)] if ordered else order
    for bias in (0, 1):  # of the second and of the first version of the format
        stored = gptq(bits=bits, group=group, zero_bias=bias)
        parts = pack_gptq(codes, zeros, scales, order, bits, bias)
        assert {part.suffix: part.shape for part in stored.tensors(rows, columns)} == {
            suffix: tuple(part.shape) for suffix, part in parts.items()
        }
        assert stored.bytes_for(rows, columns) == sum(part.nbytes for part in parts.values())
        wanted = (scales[order] * (codes.t() - zeros[order])).t()
        assert wanted.dtype == torch.float16
        same_bits(in_blocks(stored, parts, rows, columns, torch.float16), wanted.contiguous())


def test_gptq_without_an_order_counts_groups() -> None:
    stored = gptq(bits=4, group=32, order=False)
    codes, zeros, scales = torch.randint(0, 16, (8, 64)), torch.full((2, 8), 8), torch.rand(2, 8).half()
    parts = pack_gptq(codes, zeros, scales, torch.arange(64) // 32, 4, 1)
    order = torch.arange(64) // 32
    assert torch.equal(values(stored, parts, 0, 8, 64), (scales.float()[order] * (codes.t() - 8)).t())


def test_words_of_gptq_and_awq_to_the_nibble() -> None:
    """AutoGPTQ's ``QuantLinear.pack`` puts eight inputs of an output into a word, the first one lowest; AutoAWQ's
    ``WQLinear_GEMM`` eight outputs of an input in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    inputs = torch.tensor([[0x76543210] * 8], dtype=torch.int32)  # [inputs / 8, outputs]
    ones = torch.ones(1, 8, dtype=torch.float16)
    zeros = torch.tensor([[0x0]], dtype=torch.int32)
    stored = gptq(bits=4, group=8, order=False)
    parts = {".qweight": inputs, ".scales": ones, ".qzeros": zeros}
    assert values(stored, parts, 2, 3, 8).tolist() == [[-1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]  # zeros are 0 + 1
    parts[".qzeros"] = torch.tensor([[-1]], dtype=torch.int32)  # 15 + 1 is 0 again
    assert values(stored, parts, 2, 3, 8).tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]
    outputs = torch.tensor([[0x75316420]] * 8, dtype=torch.int32)  # [inputs, outputs / 8]
    parts = {".qweight": outputs, ".scales": ones, ".qzeros": zeros}
    assert torch.equal(values(awq(group=8), parts, 0, 8, 8)[:, 3], torch.arange(8.0))
