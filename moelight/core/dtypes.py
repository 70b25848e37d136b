"""Number formats by name: their size, and how safetensors spells them. Torch's own types live above the waterline."""

from __future__ import annotations

from dataclasses import dataclass

from moelight.core.errors import ConfigError, did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class DType:
    """A number format a weight or a KV cache may have."""

    name: str
    itemsize: int
    safetensors: str


FLOAT32 = DType(name="float32", itemsize=4, safetensors="F32")
BFLOAT16 = DType(name="bfloat16", itemsize=2, safetensors="BF16")
FLOAT16 = DType(name="float16", itemsize=2, safetensors="F16")

DTYPES = {dtype.name: dtype for dtype in (FLOAT32, BFLOAT16, FLOAT16)}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in DTYPES.values()}


def dtype_named(name: str) -> DType:
    """The format called ``name``.

    Raises:
        ConfigError: no such format.
    """
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not one of {', '.join(DTYPES)}{did_you_mean(name, DTYPES)}")
    return DTYPES[name]
