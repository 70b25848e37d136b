"""Inputs of experts on prompts, kept while the model reads them, and what each matrix of an expert then multiplies.
Nothing depends on the order in which inputs arrive.

Shapes: T tokens, k experts a token, H hidden, I expert width, R rows kept of an expert.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moelight.core.errors import CheckpointError
from moelight.core.paths import write_whole
from moelight.core.units import GiB
from moelight.models.moe import Routed
from moelight.weights.source import TensorInfo
from moelight.weights.stored_matrix import read_tensor

LEAST_ROWS = 8  # that say something of an expert
_MOST_ROWS = 1024
_MOST_BYTES = 4 * GiB  # of the file
_NONE = np.iinfo(np.int64).max
_WIDEST = 4096  # columns: their products take 64 MiB, a few times
_DTYPE = torch.bfloat16
_ROWS, _KEYS = "calibration.rows", "calibration.keys"


class InputRows:
    """Up to ``most`` different inputs [H] of each expert, in a file: those whose keys, which are sums of their bits in
    random proportion, are the least."""

    def __init__(self, directory: Path, layers: int, experts: int, hidden: int) -> None:
        self._path, self._keys_path, self._hidden = directory / _ROWS, directory / _KEYS, hidden
        self.row_bytes = hidden * _DTYPE.itemsize
        self.most = max(LEAST_ROWS, min(_MOST_ROWS, _MOST_BYTES // (layers * experts * self.row_bytes)))
        self.keys = np.full((layers, experts, self.most), _NONE, dtype=np.int64)
        draw = torch.Generator().manual_seed(0)
        self._weights = torch.randint(-(2**62), 2**62, (hidden,), generator=draw, dtype=torch.int64)

    def load(self) -> bool:
        """True if a run before this one has collected all rows."""
        with contextlib.suppress(OSError, ValueError, EOFError):
            found = np.load(io.BytesIO(self._keys_path.read_bytes()), allow_pickle=False)
            if found.shape == self.keys.shape and found.dtype == self.keys.dtype:
                self.keys = found
                return True
        return False

    def __enter__(self) -> InputRows:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def add(self, layer: int, routed: Routed) -> None:
        """Take the inputs of ``routed`` in ``layer``. Raises OSError if the disk is full."""
        x = routed.x.detach().to(device="cpu", dtype=_DTYPE).contiguous()
        keys = (x.view(torch.int16).long() * self._weights).sum(1).numpy()
        ids, rows = routed.ids.cpu().numpy(), x.view(torch.uint8).numpy()
        for expert in np.unique(ids).tolist():
            mine = (ids == expert).any(1).nonzero()[0]
            self._merge((layer, expert), keys[mine], rows, mine)

    def _merge(self, of: tuple[int, int], keys: np.ndarray, rows: np.ndarray, mine: np.ndarray) -> None:
        kept = self.keys[of]
        fresh, first = np.unique(keys, return_index=True)
        new = ~np.isin(fresh, kept)
        for key, row in zip(fresh[new].tolist(), mine[first[new]].tolist(), strict=True):
            slot = int(kept.argmax())
            if key >= kept[slot]:
                return  # keys ascend
            place = (of[0] * self.keys.shape[1] + of[1]) * self.most + slot
            if os.pwrite(self._file, rows[row].data, place * self.row_bytes) < self.row_bytes:
                raise OSError("a row was cut short")
            kept[slot] = key

    def finish(self) -> None:
        """All rows are there."""
        os.fsync(self._file)
        content = io.BytesIO()
        np.save(content, self.keys, allow_pickle=False)
        write_whole(self._keys_path, content.getvalue())

    def rows(self, layer: int, expert: int) -> Tensor:
        """The rows [R, H] of an expert, in the order of their keys."""
        keys = self.keys[layer, expert]
        first = (layer * self.keys.shape[1] + expert) * self.most
        data = os.pread(self._file, self.most * self.row_bytes, first * self.row_bytes)
        data += bytes(self.most * self.row_bytes - len(data))
        found = torch.frombuffer(bytearray(data), dtype=_DTYPE).view(self.most, self._hidden)
        order = np.argsort(keys, kind="stable")[: int((keys != _NONE).sum())]
        return found[torch.from_numpy(order)]


def remove_rows(directory: Path) -> None:
    """Remove what `InputRows` left in ``directory``."""
    for name in (_KEYS, _ROWS):
        (directory / name).unlink(missing_ok=True)


class ExpertInputs:
    """What the matrices of experts multiply. ``matrices``: gate, up and down of each layer and expert,
    where they are not rounded."""

    def __init__(self, rows: InputRows, matrices: Mapping[tuple[int, int], Mapping[str, TensorInfo]]) -> None:
        self._rows, self._matrices = rows, matrices

    @property
    def reached(self) -> int:
        """Experts with enough rows."""
        return int(((self._rows.keys != _NONE).sum(-1) >= LEAST_ROWS).sum())

    def of(self, expert: tuple[int, int], matrix: str) -> Tensor | None:
        """float32 [R, columns of ``matrix``]; None of an expert that few rows reached, and of wider matrices than the
        products of all columns with each other have room for."""
        rows = self._rows.rows(*expert)
        if len(rows) < LEAST_ROWS:
            return None
        x = rows.float()
        if matrix == "down":
            gate, up = (read_tensor(self._matrices[expert][name]).float() for name in ("gate", "up"))
            x = functional.silu(x @ gate.t()) * (x @ up.t())
        if not bool(torch.isfinite(x).all()):
            where = self._matrices[expert][matrix]
            raise CheckpointError(f"{where.file}: tensor {where.name!r}: its inputs on the prompts are not finite")
        return x if x.shape[1] <= _WIDEST else None
