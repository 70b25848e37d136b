"""What a format is stands in its row: nothing else in the package asks for a format's name."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from moelight.formats.format import FLOATS, ITEM_BYTES, Format
from moelight.formats.ggml import GGML_FORMATS
from moelight.formats.methods import METHODS
from moelight.formats.registry import FORMATS, SCHEMES, SUFFIXES
from moelight.kernels.formats.table import reference_of
from tests.kernels.quantized import FORMATS as EXAMPLES
from tests.kernels.quantized import step
from tests.test_layers import PACKAGE, modules

ASKED = {"key", "name", "kind", "unpacker", "variant", "native_name"}


def _texts(node: ast.expr) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


NAMES = {*FORMATS, *GGML_FORMATS, "scaled"} - set(FLOATS)


def comparisons(source: str) -> int:
    """Comparisons of an attribute that names a format with such a name."""
    if not any(f'"{name}"' in source for name in NAMES):
        return 0
    return sum(
        1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Compare)
        and any(isinstance(side, ast.Attribute) and side.attr in ASKED for side in (node.left, *node.comparators))
        and NAMES & {text for side in (node.left, *node.comparators) for text in _texts(side)}
    )


def test_nothing_else_compares_with_a_formats_name() -> None:
    counted = {
        path.relative_to(PACKAGE).as_posix(): comparisons(path.read_text(encoding="utf-8"))
        for path in modules()
        if path.relative_to(PACKAGE).parts[0] != "formats"
    }
    assert {name: count for name, count in counted.items() if count} == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('stored.key == "awq"', 1),
        ('form.name in ("Q4_K", "Q5_K")', 1),
        ('"gptq" != matrix.stored.kind', 1),
        ('stored.name == "BF16"', 0),
        ('method == "gptq"', 0),
        ("stored.is_quantised", 0),
    ],
)
def test_comparisons_with_names_are_counted(source: str, count: int) -> None:
    assert comparisons(source) == count


def test_rows_agree_with_their_formats() -> None:
    examples = {stored.key for stored in (*EXAMPLES.values(), *GGML_FORMATS.values())}
    assert examples == FORMATS.keys()
    for key, row in FORMATS.items():
        assert row.format.key == key
        assert set(row.suffixes) <= set(SUFFIXES)
    assert {"gptq", "awq", "fp8", "fbgemm_fp8", "mxfp4"} <= METHODS.keys()
    assert len({name for name, _ in SCHEMES}) == 6


@pytest.mark.parametrize("name", sorted({**EXAMPLES, **GGML_FORMATS}))
def test_a_format_answers_all_that_it_is_asked(name: str) -> None:
    stored = {**GGML_FORMATS, **EXAMPLES}[name]
    rows, columns = (2 * size * max(1, 64 // size) for size in step(stored))
    tensors = stored.tensors(rows, columns)
    assert {tensor.suffix for tensor in tensors} <= set(FORMATS[stored.key].suffixes)
    assert all(dtype in ITEM_BYTES for tensor in tensors for dtype in tensor.dtypes)
    assert all(stored.accepts(tensor.shape, tensor.shape) for tensor in tensors)
    assert stored.size_of(tensors[0].shape) == (rows, columns) or stored.key in ("ggml", "packed")
    assert stored.bytes_for(rows, columns) <= stored.paged_bytes(rows, columns) + 16
    assert reference_of(stored) is not None
    _check_turns(stored, rows, columns)


def _check_turns(stored: Format, rows: int, columns: int) -> None:
    """A format that is repacked keeps its bytes, and its transpose is its own inverse."""
    repacked = stored.repacked_format(rows, columns)
    if repacked is not None:
        ordered = sum(tensor.nbytes for tensor in stored.tensors(rows, columns) if tensor.suffix == ".g_idx")
        assert not repacked.transposed and repacked.repacked_format(rows, columns) is None
        assert repacked.paged_bytes(rows, columns) == stored.paged_bytes(rows, columns) - ordered
    if (transposed := stored.transposed_format()) is not None:
        assert transposed.transposed_format() == stored
        assert transposed.bytes_for(columns, rows) == stored.bytes_for(rows, columns)
    assert stored.int8_reason is None or stored.name in stored.int8_reason
