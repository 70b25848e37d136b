"""Tile sizes of the grouped product and of attention, for a card's shared memory; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
# KiB of shared memory that a block may use, by compute capability; some is left for the compiler.
_SHARED = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
_SHARED_ELSEWHERE = 64
_SPARE = 4
_DEEPEST_BYTES = 128
INTEGER_STEP = 128  # inputs
_MOST_STAGES = 4
_BAND_ROWS = 1024
# Triton dropped Turing's tensor cores in 3.3 (triton-lang/triton#5066): below this its products do not use any.
UNITS_SINCE = (8, 0)
# From Blackwell on, 128 rows of products leave unpacked numbers too few registers.
_UNPACKED_BY_64_SINCE = (10, 0)
# From Hopper on, products read widened integers from shared memory, not from registers.
_WIDE_FROM_SHARED_SINCE = (9, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """``rows`` of x times ``columns`` of the output, ``depth`` inputs at a time, ``stages`` loads in flight.

    All slots of a ``band`` are computed before the next band. ``precision`` of products of float32, by Triton's names.
    ``fused``: products and sums of float32 are rounded once.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    band: int
    precision: str = "ieee"
    fused: bool = True


def shared_bytes(card: tuple[int, int]) -> int:
    """Bytes of shared memory that a block may use on ``card``; those of the smallest card if unknown."""
    return (_SHARED.get(card, _SHARED_ELSEWHERE) - _SPARE) * KIB


def choose(card: tuple[int, int], *, itemsize: int, mean_rows: float, matrices: int, unpacks: bool = False) -> Tile:
    """The tile of a product with numbers of ``itemsize`` bytes and ``mean_rows`` rows per expert.

    ``matrices``: 2 if gate and up are computed at once; ``unpacks``: the numbers of a quantised page are made in
    registers. The sums of a tile fit the registers (`tests/kernels/test_gpu_compiles.py`). The depth is independent of
    the row count, and so are the steps of a token's sums; the order inside a step is the card's.
    """
    units = card >= UNITS_SINCE
    depth = _DEEPEST_BYTES // itemsize if units else 32
    if not units:
        return Tile(rows=16, columns=32, depth=depth, warps=4, stages=1, band=_BAND_ROWS // 16)
    if itemsize == 4:
        return _single(card, depth, 32 if unpacks and mean_rows > 32 else mean_rows, matrices)
    max_rows = 64 if unpacks and card >= _UNPACKED_BY_64_SINCE else 128
    rows = next((size for size in (16, 32, 64) if mean_rows <= size <= max_rows), max_rows)
    columns = 128 if rows > 32 and matrices == 1 else 64
    stage = (rows + matrices * columns) * depth * itemsize
    stages = max(1, min(_MOST_STAGES, shared_bytes(card) // stage))
    warps = 8 if rows * columns * matrices >= max_rows * 128 else 4
    return Tile(rows=rows, columns=columns, depth=depth, warps=warps, stages=stages, band=_BAND_ROWS // rows)


def choose_integers(
    card: tuple[int, int], *, group: int, mean_rows: float, matrices: int, scattered: bool = False
) -> Tile:
    """The tile of a product of rows rounded to int8 in groups of ``group``, on a card with `UNITS_SINCE`; the rest as
    in `choose`. A step is `INTEGER_STEP` inputs, half as many where two matrices have smaller groups, or a block of
    256, ``depth`` at a time. ``scattered``: codes of a row are not neighbours, and loaded one by one."""
    block, small, older = group > INTEGER_STEP, group < INTEGER_STEP, card < _WIDE_FROM_SHARED_SINCE
    depth = INTEGER_STEP // 2 if block or (matrices == 2 and small) else INTEGER_STEP
    if block and older:
        depth //= 2
    max_rows = 64 if block or (matrices == 2 and small) else 128
    rows = next((size for size in (16, 32, 64) if mean_rows <= size <= max_rows), max_rows)
    # A block has two sums for each number.
    columns = 32 if matrices == 2 and (block or scattered or (small and older)) else 64
    # The loads of a whole block run ahead, not of ``depth`` of it.
    stage = (rows + matrices * columns) * (group if block else depth)
    stages = max(1, min(_MOST_STAGES, shared_bytes(card) // stage))
    warps = 8 if rows * columns * matrices >= 64 * 128 or (rows > 16 and block) else 4
    return Tile(
        rows=rows, columns=columns, depth=depth, warps=warps, stages=stages, band=_BAND_ROWS // rows, fused=False
    )


def _single(card: tuple[int, int], depth: int, mean_rows: float, matrices: int) -> Tile:
    """A tile of float32 on tensor units: the parts of both operands are in registers, so it is smaller."""
    rows, columns = next((size for size in (16, 32) if mean_rows <= size), 64), 32 if matrices == 2 else 64
    stages = max(1, min(_MOST_STAGES, shared_bytes(card) // ((rows + matrices * columns) * depth * 4)))
    return Tile(
        rows=rows, columns=columns, depth=depth, warps=4, stages=stages, band=_BAND_ROWS // rows, precision="tf32x3"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTile:
    """``rows`` queries times ``keys`` keys; products with keys go over ``depth`` numbers of the head at a time."""

    rows: int
    keys: int
    depth: int
    warps: int
    stages: int


def choose_attention(
    card: tuple[int, int], *, itemsize: int, head_dim: int, group: int, decodes: bool
) -> AttentionTile:
    """The tile of attention of heads of ``head_dim`` numbers of ``itemsize`` bytes, ``group`` of which share keys.

    It depends on nothing of a batch, so neither does a row's result.
    """
    least = max(16, 1 << (group - 1).bit_length())  # the queries of one token
    wide = 8 if head_dim > 128 else 4
    if card < UNITS_SINCE or itemsize == 4:
        return AttentionTile(rows=max(least, 16 if decodes else 32), keys=16, depth=32, warps=wide, stages=1)
    keys = 64 if head_dim <= 128 else 32
    stages = max(1, min(3, shared_bytes(card) // (2 * keys * head_dim * itemsize)))
    if decodes:
        return AttentionTile(rows=least, keys=keys, depth=head_dim, warps=wide if least <= 16 else 8, stages=stages)
    return AttentionTile(rows=max(least, 64), keys=keys, depth=head_dim, warps=8, stages=stages)


def launch_options(tile: Tile | AttentionTile) -> dict[str, int | bool]:
    """Triton's options of a program over ``tile``. Whether sums of products are fused is always said: by default Triton
    3.9 fuses and warns, 3.10 does not."""
    fused = isinstance(tile, AttentionTile) or tile.fused
    return {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": fused}
