"""Number formats by name: their sizes and their safetensors names. Torch dtypes are in ``weights.torch_dtypes``."""

from __future__ import annotations

from dataclasses import dataclass

from moelight.core.errors import ConfigError, did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class DType:
    """A number format of weights or of the KV cache.

    ``group`` numbers in a row share one scale of ``scale_bytes`` bytes (0: no scales). ``safetensors`` is the format's
    name in checkpoints, empty if they cannot hold it. ``pages``: of a format of computation, the name of that of the
    expert pages if it is another one of the same size (mixed precision: docs/concepts/tiers-and-pages.md).
    """

    name: str
    bits: int
    safetensors: str = ""
    group: int = 0
    scale_bytes: int = 0
    pages: str = ""

    @property
    def page_dtype(self) -> DType:
        """The format of expert pages beside a computation in this one."""
        return DTYPES[self.pages] if self.pages else self

    @property
    def residual_itemsize(self) -> int:
        """Bytes of a number of the residual stream and of an expert's output: float32 in mixed precision."""
        return FLOAT32.itemsize if self.pages else self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of one number, without scales; raises ConfigError if it is smaller than a byte (see `bytes_for`)."""
        if self.bits % 8:
            raise ConfigError(f"{self.name} has no whole number of bytes each")
        return self.bits // 8

    def bytes_for(self, elements: int) -> int:
        """Bytes of ``elements`` numbers and their scales."""
        scales = -(-elements // self.group) * self.scale_bytes if self.group else 0
        return -(-elements * self.bits // 8) + scales


FLOAT32 = DType(name="float32", bits=32, safetensors="F32")
BFLOAT16 = DType(name="bfloat16", bits=16, safetensors="BF16")
FLOAT16 = DType(name="float16", bits=16, safetensors="F16")
MIXED_FLOAT16 = DType(name="float16", bits=16, safetensors="F16", pages="bfloat16")
INT8 = DType(name="int8", bits=8, group=128, scale_bytes=2)
INT4 = DType(name="int4", bits=4, group=128, scale_bytes=2)

DTYPES = {dtype.name: dtype for dtype in (FLOAT32, BFLOAT16, FLOAT16, INT8, INT4)}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in DTYPES.values() if dtype.safetensors}


def computed_in(dtype: DType, stored: DType) -> DType:
    """``dtype`` as a format of computation for a checkpoint in ``stored``: float16 over bfloat16 is mixed precision."""
    return MIXED_FLOAT16 if (dtype, stored) == (FLOAT16, BFLOAT16) else dtype


def dtype_named(name: str) -> DType:
    """The format called ``name``; raises ConfigError if there is none."""
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not one of {', '.join(DTYPES)}{did_you_mean(name, DTYPES)}")
    return DTYPES[name]
