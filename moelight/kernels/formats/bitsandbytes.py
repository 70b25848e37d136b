"""Numbers of bitsandbytes' NF4 and FP4 (`moelight.formats.bitsandbytes`)."""

from __future__ import annotations

import torch
from torch import Tensor

from moelight.formats.bitsandbytes import CODE_VALUES, BitsAndBytesFormat
from moelight.kernels.formats.reference import Reference, Tensors, group_of


class BitsAndBytesReference(Reference):
    """Bytes [R, C / 2] of two codes each, the first in the upper bits, scales [R, G]."""

    def values(self, stored: BitsAndBytesFormat, tensors: Tensors, begin: int, end: int, columns: int) -> Tensor:
        pairs, scales = (tensors[name][begin:end] for name in stored.names)
        codes = torch.stack((pairs >> 4, pairs & 15), dim=-1).view(end - begin, columns)
        table = torch.tensor(CODE_VALUES[stored.code_type], device=pairs.device)
        return table[codes.int()] * scales.float()[:, group_of(stored, columns, pairs.device)]
