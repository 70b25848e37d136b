"""The file types of llama.cpp as data: the ggml type of each tensor of a file that is called Q4_K_M.

The mixtures are those of ``llama_tensor_get_type`` (`src/llama-quant.cpp`) without an importance matrix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moelight.core.errors import ConfigError, did_you_mean
from moelight.profiles.gguf import GGML_TYPES

_BLOCK_OF = {name: block for name, block, _ in GGML_TYPES.values()}
_BYTES_OF = {name: nbytes for name, _, nbytes in GGML_TYPES.values()}
_LAYER = re.compile(r"blk\.(\d+)\.")
_EIGHT = 8  # experts, of models whose small attention matrices get more bits
_SHARED_KEYS = 4  # queries to a key from which on values get more bits
_EARLY = 4  # layers whose values have more bits in Q4_K_S
# What a type becomes whose blocks rows do not fill.
_SMALLER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_NOT_ROUNDED = ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d", "shortconv.conv.weight")

# By name of the file type: llama.cpp's name of its number, and the type of most tensors.
FILE_TYPES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "F32": ("ALL_F32", "F32"),
        "F16": ("MOSTLY_F16", "F16"),
        "BF16": ("MOSTLY_BF16", "BF16"),
        "Q4_0": ("MOSTLY_Q4_0", "Q4_0"),
        "Q4_1": ("MOSTLY_Q4_1", "Q4_1"),
        "Q5_0": ("MOSTLY_Q5_0", "Q5_0"),
        "Q5_1": ("MOSTLY_Q5_1", "Q5_1"),
        "Q8_0": ("MOSTLY_Q8_0", "Q8_0"),
        "Q2_K": ("MOSTLY_Q2_K", "Q2_K"),
        "Q3_K_S": ("MOSTLY_Q3_K_S", "Q3_K"),
        "Q3_K_M": ("MOSTLY_Q3_K_M", "Q3_K"),
        "Q3_K_L": ("MOSTLY_Q3_K_L", "Q3_K"),
        "Q4_K_S": ("MOSTLY_Q4_K_S", "Q4_K"),
        "Q4_K_M": ("MOSTLY_Q4_K_M", "Q4_K"),
        "Q5_K_S": ("MOSTLY_Q5_K_S", "Q5_K"),
        "Q5_K_M": ("MOSTLY_Q5_K_M", "Q5_K"),
        "Q6_K": ("MOSTLY_Q6_K", "Q6_K"),
        "MXFP4_MOE": ("MOSTLY_MXFP4_MOE", "MXFP4"),
    }
)
_CALIBRATED = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M", "IQ4_XS")


def file_type(name: str) -> str:
    """The name in `FILE_TYPES` of ``name`` in any case; raises ConfigError for another one."""
    upper = {"Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "Q3_K": "Q3_K_M"}.get(name.upper(), name.upper())
    if upper in FILE_TYPES:
        return upper
    reason = "is not written" if upper in _CALIBRATED else "is no file type that is written"
    raise ConfigError(f"--type {name!r} {reason}{did_you_mean(upper, FILE_TYPES)}; known: {', '.join(FILE_TYPES)}")


def tensor_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of ``shape`` in the ggml type ``kind``."""
    return math.prod(shape) // _BLOCK_OF[kind] * _BYTES_OF[kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """The types of the tensors of one model in one file type.

    Attributes:
        file_type: a key of `FILE_TYPES`.
        layers: their number.
        experts: of a layer; 0 of a dense model.
        queries_per_key: heads of queries that share one of keys.
        tied: the embedding is the head, too.
        large: llama.cpp takes the model for one of 70 billion parameters.
    """

    file_type: str
    layers: int
    experts: int
    queries_per_key: int
    tied: bool
    large: bool = False

    def type_of(self, tensor: str, shape: tuple[int, ...]) -> str:
        """The ggml type of ``tensor`` (its name in the file) of ``shape``."""
        default = FILE_TYPES[self.file_type][1]
        rounded = (
            math.prod(shape[:-1]) > 1 and tensor.endswith("weight") and not any(part in tensor for part in _NOT_ROUNDED)
        )
        if not rounded:
            return "F32"
        if default in ("F32", "F16", "BF16"):
            return default
        kind = self._mixed(tensor, default, shape)
        if shape[-1] % _BLOCK_OF[kind]:
            kind = _SMALLER.get(kind, "F16")
        return kind if shape[-1] % _BLOCK_OF[kind] == 0 else "F16"

    def _mixed(self, tensor: str, default: str, shape: tuple[int, ...]) -> str:
        match = _LAYER.match(tensor)
        layer, part = (int(match[1]), tensor[match.end() :]) if match else (-1, tensor)
        if part == "output.weight" or (self.tied and part == "token_embd.weight"):
            if self.file_type == "MXFP4_MOE" or shape[-1] % _BLOCK_OF[default]:
                return "Q8_0"
            return "Q6_K" if default != "Q8_0" else default
        if self.file_type == "MXFP4_MOE":
            return "MXFP4" if part.endswith("_exps.weight") else "Q8_0"
        if part in ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight"):
            return self._values(layer, default)
        if part == "attn_k.weight" and self.experts == _EIGHT:
            return "Q8_0"
        if part.startswith("ffn_down"):
            return self._down(layer, default)
        if part == "attn_output.weight":
            return self._output(default)
        return default

    def _values(self, layer: int, default: str) -> str:
        kind = default
        if self.file_type == "Q2_K":
            kind = "Q4_K" if self.queries_per_key >= _SHARED_KEYS else "Q3_K"
        elif self.file_type == "Q3_K_M":
            kind = "Q5_K" if layer < 2 else "Q4_K"
        elif self.file_type == "Q3_K_L" or (self.file_type == "Q4_K_S" and layer < _EARLY):
            kind = "Q5_K"
        elif self.file_type in ("Q4_K_M", "Q5_K_M") and self._more_bits(layer):
            kind = "Q6_K"
        if self.large and kind in ("Q3_K", "Q4_K"):
            kind = "Q5_K"
        return "Q8_0" if self.experts == _EIGHT else kind

    def _down(self, layer: int, default: str) -> str:
        if self.file_type == "Q2_K":
            return "Q3_K"
        if self.file_type == "Q3_K_M":
            return "Q5_K" if layer < self.layers // 16 else "Q4_K"
        if self.file_type == "Q3_K_L" or (self.file_type == "Q4_K_S" and layer < self.layers // 8):
            return "Q5_K"
        return "Q6_K" if self.file_type in ("Q4_K_M", "Q5_K_M") and self._more_bits(layer) else default

    def _output(self, default: str) -> str:
        if self.experts == _EIGHT:
            more = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M")
            return "Q5_K" if self.file_type in more else default
        return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(self.file_type, default)

    def _more_bits(self, layer: int) -> bool:
        eighth = self.layers // 8
        return layer < eighth or layer >= 7 * self.layers // 8 or (layer - eighth) % 3 == 2
