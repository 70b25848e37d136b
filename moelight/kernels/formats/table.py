"""The reference kernels of each row of `moelight.formats.registry.FORMATS`, by its key."""

from __future__ import annotations

from collections.abc import Mapping

from moelight.formats.format import Format
from moelight.kernels.formats.awq import AWQReference
from moelight.kernels.formats.bitsandbytes import BitsAndBytesReference
from moelight.kernels.formats.ggml import GGMLReference
from moelight.kernels.formats.gptq import GPTQReference
from moelight.kernels.formats.mlx import MLXReference
from moelight.kernels.formats.mxfp4 import MXFP4Reference
from moelight.kernels.formats.nvfp4 import NVFP4Reference
from moelight.kernels.formats.packed import PackedReference
from moelight.kernels.formats.plain import PlainReference
from moelight.kernels.formats.reference import Encoder, Reference
from moelight.kernels.formats.scaled import FP8Reference, Int8Reference

_REFERENCES: Mapping[str, Reference] = {
    "plain": PlainReference(),
    "fp8": FP8Reference(),
    "int8": Int8Reference(),
    "packed": PackedReference(),
    "gptq": GPTQReference(),
    "awq": AWQReference(),
    "mxfp4": MXFP4Reference(),
    "nvfp4": NVFP4Reference(),
    "mlx": MLXReference(),
    "bitsandbytes": BitsAndBytesReference(),
    "ggml": GGMLReference(),
}


def reference_of(stored: Format) -> Reference:
    """The reference kernels of ``stored``."""
    return _REFERENCES[stored.key]


def encoder_of(stored: Format) -> Encoder:
    """The functions that round values to ``stored``."""
    encoder = reference_of(stored)
    if not isinstance(encoder, Encoder):
        raise NotImplementedError(f"nothing is rounded to {stored.name}")
    return encoder
