"""Packed integers (`moelight.formats.packed`)."""

from __future__ import annotations

import torch
from torch import Tensor

from moelight.formats.packed import PackedFormat
from moelight.kernels.formats.reference import Encoder, Tensors, group_of, nibbles, signed_codes, words


class PackedReference(Encoder):
    """Words [R, C / codes a word], scales [R, G], packed zero points [R / codes a word, G]."""

    code_dtype = torch.int32

    def values(self, stored: PackedFormat, tensors: Tensors, begin: int, end: int, columns: int) -> Tensor:
        weight, scale, zero = stored.names
        codes = words(tensors[weight][begin:end].unsqueeze(-1), stored.bits).flatten(1)[:, :columns]
        scales = tensors[scale].reshape(-1, stored.groups(columns))[begin:end].float()
        if stored.zero_points:
            first, last = begin // stored.per_word, -(-end // stored.per_word)
            zeros = words(tensors[zero][first:last].unsqueeze(1), stored.bits, dim=1).flatten(0, 1)
            zeros = zeros[begin - first * stored.per_word :][: end - begin].float()
        else:
            zeros = torch.full_like(scales, 1 << (stored.bits - 1))
        groups = group_of(stored, columns, scales.device)
        return (codes.float() - zeros[:, groups]) * scales[:, groups]

    def code_bytes(self, stored: PackedFormat, columns: int) -> int:
        """Codes fill words."""
        return -(-columns * stored.bits // 32) * 4

    def codes(self, stored: PackedFormat, quotients: Tensor) -> Tensor:
        codes = signed_codes(stored.bits, quotients).view(torch.uint8).add_(1 << (stored.bits - 1))  # modulo 256
        wide = self.code_bytes(stored, codes.shape[1]) * 8 // stored.bits
        if wide > codes.shape[1]:
            codes = torch.nn.functional.pad(codes, (0, wide - codes.shape[1]))
        return nibbles(codes) if stored.bits == 4 else codes
