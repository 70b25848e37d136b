"""The functions of each stored format in the Triton programs, by `Format.unpacker`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from moelight.kernels.gpu import integers_triton, quantized_triton


@dataclass(frozen=True, kw_only=True, slots=True)
class Unpacker:
    """Triton functions of a format; None for those that its programs do not call.

    Attributes:
        unpack: a tile of values (`quantized_triton`).
        decode: the values of 8-bit codes, or of a tile of blocks, with a codebook or without.
        codes, zeros: codes and zero points in words; of blocks of 256 the codes.
        place: where scales are stored.
        integers, scale, zeros_at: the integers of a group, their scale, what is to be taken off (`integers_triton`).
        steps: of blocks of 256, what multiplies the codes of each part.
    """

    unpack: Any
    decode: Any = None
    codes: Any = None
    zeros: Any = None
    place: Any = quantized_triton.place_by_row
    integers: Any = None
    scale: Any = integers_triton.own_scale
    zeros_at: Any = integers_triton.word_zeros_at
    steps: Any = None

    @property
    def cache_key(self) -> str:
        """Return the key of the functions: Triton's keys of their sources."""
        functions = ((field.name, getattr(self, field.name)) for field in fields(self))
        return " ".join(f"{name}={getattr(function, 'cache_key', function)}" for name, function in functions)


_BYTES = Unpacker(
    unpack=quantized_triton.byte_tile,
    decode=quantized_triton.signed,
    place=quantized_triton.place_in_grid,
    integers=integers_triton.byte_integers,
    zeros_at=integers_triton.byte_zeros_at,
)
_WORDS = Unpacker(
    unpack=quantized_triton.word_tile,
    codes=quantized_triton.packed_codes,
    zeros=quantized_triton.packed_zeros,
    integers=integers_triton.packed_integers,
)
_BLOCKS = Unpacker(unpack=quantized_triton.block_tile, scale=integers_triton.first_half)
_POINTS = Unpacker(unpack=quantized_triton.point_tile)
_K_BLOCKS = replace(
    _BLOCKS, decode=quantized_triton.k_minima, codes=quantized_triton.q4_k_codes, steps=integers_triton.k_steps
)

UNPACKERS: Mapping[str, Unpacker] = {
    "plain": Unpacker(unpack=quantized_triton.plain_tile),
    "fp8": replace(_BYTES, decode=quantized_triton.e4m3, integers=None),
    "int8": _BYTES,
    "packed": _WORDS,
    "gptq": replace(
        _WORDS,
        codes=quantized_triton.gptq_codes,
        zeros=quantized_triton.gptq_zeros,
        place=quantized_triton.place_by_column,
        integers=integers_triton.word_integers,
    ),
    "awq": replace(
        _WORDS,
        codes=quantized_triton.awq_codes,
        zeros=quantized_triton.awq_zeros,
        place=quantized_triton.place_by_column,
        integers=integers_triton.word_integers,
    ),
    "mxfp4": Unpacker(
        unpack=quantized_triton.mxfp4_tile, integers=integers_triton.mxfp4_integers, scale=integers_triton.mxfp4_scale
    ),
    "nvfp4": Unpacker(unpack=quantized_triton.nvfp4_tile, decode=quantized_triton.scale_times),
    "nvfp4 divided": Unpacker(unpack=quantized_triton.nvfp4_tile, decode=quantized_triton.scale_over),
    "mlx": Unpacker(unpack=quantized_triton.mlx_tile, codes=quantized_triton.packed_codes),
    "nf4": Unpacker(unpack=quantized_triton.nibble_tile, decode=quantized_triton.nf4),
    "fp4": Unpacker(unpack=quantized_triton.nibble_tile, decode=quantized_triton.fp4),
    "Q4_0": replace(_BLOCKS, decode=quantized_triton.q4_0, integers=integers_triton.q4_0_integers),
    "Q4_1": replace(_BLOCKS, decode=quantized_triton.q4_1, integers=integers_triton.q4_1_integers),
    "Q5_0": replace(_BLOCKS, decode=quantized_triton.q5_0, integers=integers_triton.q5_0_integers),
    "Q5_1": replace(_BLOCKS, decode=quantized_triton.q5_1, integers=integers_triton.q5_1_integers),
    "Q8_0": replace(_BLOCKS, decode=quantized_triton.q8_0, integers=integers_triton.q8_0_integers),
    "Q2_K": replace(_BLOCKS, decode=quantized_triton.q2_k),
    "Q3_K": replace(_BLOCKS, decode=quantized_triton.q3_k),
    "Q4_K": _K_BLOCKS,
    "Q5_K": replace(_K_BLOCKS, codes=quantized_triton.q5_k_codes),
    "Q6_K": replace(
        _BLOCKS,
        decode=quantized_triton.q6_k,
        codes=quantized_triton.q6_k_codes,
        scale=integers_triton.last_half,
        steps=integers_triton.q6_k_whole_steps,
    ),
    "IQ4_NL": replace(_BLOCKS, decode=quantized_triton.iq4_nl),
    "IQ4_XS": replace(_BLOCKS, decode=quantized_triton.iq4_xs),
    "MXFP4": replace(
        _BLOCKS,
        decode=quantized_triton.mxfp4_block,
        integers=integers_triton.mxfp4_block_integers,
        scale=integers_triton.mxfp4_block_scale,
    ),
    "TQ1_0": replace(_BLOCKS, decode=quantized_triton.tq1_0),
    "TQ2_0": replace(_BLOCKS, decode=quantized_triton.tq2_0),
    "IQ2_XXS": replace(_POINTS, decode=quantized_triton.iq2_xxs),
    "IQ2_XS": replace(_POINTS, decode=quantized_triton.iq2_xs),
    "IQ2_S": replace(_POINTS, decode=quantized_triton.iq2_s),
    "IQ3_XXS": replace(_POINTS, decode=quantized_triton.iq3_xxs),
    "IQ3_S": replace(_POINTS, decode=quantized_triton.iq3_s),
    "IQ1_S": replace(_POINTS, decode=quantized_triton.iq1_s),
    "IQ1_M": replace(_POINTS, decode=quantized_triton.iq1_m),
}
