"""Tables turned in their own memory: matrices of GPTQ and AWQ are packed integers of the same numbers, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moelight.formats.awq import awq
from moelight.formats.format import ITEM_BYTES, Format, RepackTable
from moelight.formats.fp8 import fp8
from moelight.formats.gptq import gptq
from moelight.formats.matrix import Matrix
from moelight.formats.packed import PackedFormat
from moelight.kernels import native
from moelight.kernels.arguments import as_dlpack
from moelight.kernels.ffn import cpu_linear
from moelight.kernels.matrices import no_integers
from moelight.kernels.quantized import cpu_dequantize, dense_values
from moelight.kernels.reads import FileReader, ReadPart
from moelight.kernels.repack import repacked, turn
from tests.kernels.conftest import ISAS
from tests.kernels.quantized import garbage, matrix
from tests.kernels.stored import generator
from tests.weights.packers import pack_awq, pack_rows, same_bits

pytestmark = pytest.mark.skipif(not native.available(), reason="the extension is not built")
BYTES = {"bytes": 1, "halves": 2, "words": 4, "awq codes": 4}
SHAPES = [(1, 8), (8, 8), (16, 16), (7, 64), (24, 72), (41, 24), (60, 136), (96, 200), (128, 520)]
FORMS = {
    **{
        f"gptq int{bits} of {group or 'all'} from {bias}": gptq(bits=bits, group=group, in_order=True, zero_bias=bias)
        for bits in (2, 4, 8)
        for group in (0, 32, 64, 128)
        for bias in (0, 1)
    },
    "gptq without an order": gptq(bits=4, group=32, order=False),
    **{f"awq of {group or 'all'}": awq(group=group) for group in (0, 32, 64, 128)},
}
SIZES = [(8, 128), (16, 256), (72, 384), (136, 640), (264, 1152)]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    native.extension().set_isa(request.param)
    yield request.param
    native.extension().set_isa("auto")


def some_bytes(table: RepackTable, seed: int = 0) -> Tensor:
    size = table[1] * table[2] * BYTES[table[0]]
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def wanted(part: Tensor, table: RepackTable) -> Tensor:
    """What ``part`` becomes, by the places of codes."""
    cells, lines, width, *_ = table
    if cells == "bytes":
        return part.view(lines, width).t().flatten()
    if cells == "halves":
        return part.view(torch.int16).view(lines, width).t().contiguous().view(-1).view(torch.uint8)
    if cells == "words":
        return part.view(torch.int32).view(lines, width).t().contiguous().view(-1).view(torch.uint8)
    words = part.view(torch.int32).view(8 * lines, width // 8)
    codes = torch.stack([(words >> (4 * position)) & 15 for position in (0, 4, 1, 5, 2, 6, 3, 7)], dim=-1).flatten(1)
    return pack_rows(codes, 4).t().contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("cells", BYTES)
def test_tables_are_turned_in_any_room(cells: str, isa: str) -> None:
    """All at once, some lines at a time, line by line; with and without room for a mark of each cell."""
    for lines, width in SHAPES if cells == "awq codes" else (*SHAPES, (83, 33)):
        table = cells, lines, width, False, 0, 0
        before, line = some_bytes(table), width * BYTES[cells]
        for room in sorted({line, 2 * line, 3 * line + 5, lines * line // 2 + line, lines * line + 64, 1 << 20}):
            part = before.clone()
            native.extension().repack(as_dlpack("part", part), table, room)
            assert torch.equal(part, wanted(before, table)), (lines, width, room)


@pytest.mark.parametrize("name", FORMS)
def test_the_numbers_stay(name: str, isa: str) -> None:
    per = FORMS[name].per_word
    for rows, columns in SIZES:
        for make in (matrix, garbage):
            before = numbered(make(FORMS[name], -(-rows // per) * per, columns))
            values = cpu_dequantize(before, torch.float32)
            after = repacked(copied(before))
            assert after.stored.key == "packed" and not after.stored.order
            same_bits(cpu_dequantize(after, torch.float32), values)
            same_bits(dense_values(after, torch.float32), values)


def numbered(weight: Matrix[Tensor]) -> Matrix[Tensor]:
    """``weight``, whose columns say the groups that they are counted to."""
    if not weight.stored.order:
        return weight
    order = (torch.arange(weight.columns) // (weight.stored.group or weight.columns)).int()
    return replace(weight, tensors={**weight.tensors, ".g_idx": order})


def copied(weight: Matrix[Tensor]) -> Matrix[Tensor]:
    return replace(weight, tensors={suffix: part.clone() for suffix, part in weight.tensors.items()})


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16])
def test_scales_of_other_dtypes(scale: torch.dtype) -> None:
    for stored in (FORMS["gptq int4 of 32 from 1"], FORMS["awq of 32"]):
        before = matrix(stored, 72, 320)
        before = replace(before, tensors={**before.tensors, ".scales": before.tensors[".scales"].to(scale)})
        after = repacked(copied(before))
        assert after.stored.key == "packed"
        same_bits(dense_values(after, torch.float32), dense_values(before, torch.float32))


@pytest.mark.parametrize("name", ["gptq int4 of 64 from 1", "gptq int8 of 32 from 1", "awq of 128", "awq of all"])
def test_products_stay(name: str, isa: str) -> None:
    """With activations as they are and rounded to int8, of few and many tokens."""
    before = matrix(FORMS[name], 136, 640)
    after = repacked(copied(before))
    assert no_integers(before) is None is no_integers(after)
    for tokens in (1, 2, 4, 5, 17, 66):
        x = generator(tokens)(tokens, 640).bfloat16()
        for activations in ("auto", "int8"):
            result = cpu_linear(x, after, activations=activations)
            same_bits(result, cpu_linear(x, before, activations=activations))


def test_symmetric_zero_points_of_the_first_version() -> None:
    """Stored as seven, meant as eight."""
    stored, codes = FORMS["gptq int4 of 32 from 1"], torch.arange(64).view(1, 64).repeat(8, 1) % 16
    parts = {
        ".qweight": pack_rows(codes.t(), 4),
        ".qzeros": pack_rows(torch.full((8, 2), 7), 4).t().contiguous(),
        ".scales": torch.full((2, 8), 0.5).half(),
        ".g_idx": (torch.arange(64) // 32).int(),
    }
    result = repacked(Matrix(stored=stored, rows=8, columns=64, tensors=parts))
    assert result.stored.zero_bias == 0 and result.tensors[".qzeros"].flatten().tolist() == [-2004318072] * 2
    assert torch.equal(dense_values(result, torch.float32), (codes - 8) * 0.5)


def test_awq_to_the_nibble() -> None:
    codes = torch.arange(64).view(8, 8) % 16
    zeros = torch.arange(8).view(1, 8)
    parts = pack_awq(codes, zeros, torch.ones(1, 8).half())
    result = repacked(Matrix(stored=awq(group=8), rows=8, columns=8, tensors=parts))
    assert torch.equal(result.tensors[".qweight"].flatten(), pack_rows(codes.t(), 4).flatten())
    assert result.tensors[".qzeros"].flatten().tolist() == [0x76543210]


@pytest.mark.parametrize(
    ("stored", "rows", "columns"),
    [
        (gptq(bits=4, group=48, in_order=True), 16, 64),  # the last group is shorter
        (gptq(bits=4, group=32), 16, 64),  # no config says that they are in order
        (awq(group=0), 16, 36),  # rows of no whole words
        (gptq(bits=4, group=32, in_order=True), 1 << 19, 64),
        (fp8(block=(128, 128), scale="F32"), 128, 128),
        (PackedFormat(name="int4", bits=4, scale="F16", group=32), 16, 64),
    ],
)
def test_what_stays_as_it_is_stored(stored: Format, rows: int, columns: int) -> None:
    assert stored.repacked_format(rows, columns) is None


def test_columns_in_another_order_stay() -> None:
    for stored in (gptq(bits=4, group=32), FORMS["gptq int4 of 32 from 1"]):
        ordered, mixed = matrix(stored, 16, 128), matrix(stored, 16, 128, ordered=False)
        assert repacked(mixed) is mixed
        assert repacked(ordered).stored.key == "packed"


def test_tables_are_as_large_as_the_parts() -> None:
    for stored in FORMS.values():
        for part in stored.tensors(144, 640):
            table = stored.repack_table(part.suffix, part.shape, ITEM_BYTES[part.dtypes[0]])
            assert (table is None) == (part.suffix == ".g_idx")
            if table is not None:
                assert table[1] * table[2] * BYTES[table[0]] == part.nbytes


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (("bits", 8, 8, False, 0, 0), "cells 'bits' are not turned"),
        (("bytes", 16, 8, False, 4, 0), "words of codes"),
        (("words", 8, 9, False, 0, 0), "bytes must be 288"),
        (("words", 0, 8, False, 0, 0), "has a size"),
        (("words", 1 << 40, 1 << 40, False, 0, 0), "has a size"),
        (("words", 8, 8, False, 3, 0), "words of codes of 2, 4 and 8 bits"),
        (("halves", 16, 8, False, 4, 0), "words of codes"),
        (("words", 8, 8, True, 8, 0), "codes of 4 bits"),
        (("awq codes", 16, 4, False, 0, 0), "a multiple of 8 rows"),
    ],
)
def test_refusals(table: RepackTable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        turn(torch.zeros(256, dtype=torch.uint8), table)


def test_a_room_of_less_than_a_line_is_refused() -> None:
    with pytest.raises(ValueError, match="lines of 32 bytes are turned in no room of 31"):
        native.extension().repack(
            as_dlpack("part", torch.zeros(256, dtype=torch.uint8)), ("words", 8, 8, False, 0, 0), 31
        )


def test_what_is_read_is_turned_before_the_read_is_complete(tmp_path: Path) -> None:
    """In parts of a call that are larger than a chunk, at any byte of the file, beside parts that stay."""
    tables: list[RepackTable | None] = [("words", 96, 512, False, 0, 0), None, ("halves", 6, 88, False, 0, 0)]
    parts = [some_bytes(table or ("halves", 1, 333, False, 0, 0), seed) for seed, table in enumerate(tables)]
    path = tmp_path / "parts.bin"
    path.write_bytes(b"abc" + b"".join(part.numpy().tobytes() for part in parts))
    for direct in (True, False):
        with FileReader([path], chunk_bytes=8192, direct=direct) as reader:
            dests, reads, at = [torch.empty_like(part) for part in parts], [], 3
            for dest, table in zip(dests, tables, strict=True):
                reads.append(ReadPart(path, at, dest, table))
                at += dest.numel()
            reader.submit(reads).wait()
        for dest, part, table in zip(dests, parts, tables, strict=True):
            assert torch.equal(dest, part if table is None else wanted(part, table))


def test_a_read_that_fails_turns_nothing(tmp_path: Path) -> None:
    path, table = tmp_path / "short.bin", ("words", 8, 8, False, 0, 0)
    path.write_bytes(bytes(100))
    with FileReader([path]) as reader:
        dest = torch.arange(256, dtype=torch.uint8)
        with pytest.raises(OSError, match="ends early"):
            reader.submit([ReadPart(path, 0, dest, table)]).wait()
        with pytest.raises(ValueError, match="table: bytes must be 256"):
            reader.submit([ReadPart(path, 0, torch.empty(80, dtype=torch.uint8), table)])


def test_without_the_extension_no_codes_are_turned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, table = tmp_path / "whole.bin", ("words", 8, 8, False, 4, 1)
    path.write_bytes(bytes(256))
    weight = matrix(FORMS["awq of 32"], 16, 64)
    monkeypatch.setattr(native, "extension", lambda: None)
    assert repacked(weight) is weight
    with pytest.raises(RuntimeError, match="by the extension only"):
        turn(torch.zeros(256, dtype=torch.uint8), table)
    for cells in ("bytes", "halves", "words"):
        before = some_bytes(plain := (cells, 6, 11, False, 0, 0))
        turn(part := before.clone(), plain)
        assert torch.equal(part, wanted(before, plain))
    with FileReader([path]) as reader, pytest.raises(ValueError, match="table: must be None"):
        reader.submit([ReadPart(path, 0, torch.empty(256, dtype=torch.uint8), table)])
