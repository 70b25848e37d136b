"""Routing traces as lines, files and rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moelight.experts.trace import TraceRow


def write_trace(path: Path, rows: Iterable[Any]) -> Path:
    """A file of ``rows``: (layer, ids), (layer, ids, scores), or a line as it is."""
    lines = (row if isinstance(row, str) else json.dumps(dict(zip("les", row, strict=False))) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def rows_of(batches: Iterable[tuple[int, Sequence[int]]]) -> list[TraceRow]:
    return [TraceRow(line=1, layer=layer, ids=np.array(ids, np.int64)) for layer, ids in batches]


def skewed(passes: int, *, layers: int, experts: int, top_k: int, tokens: int = 1, seed: int = 0) -> list[Any]:
    """Rows of ``passes`` in which each layer has favourites that change slowly."""
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.full(experts, 0.3), layers) + 1e-3
    result = []
    for _ in range(passes):
        for layer in range(layers):
            chances = weights[layer] / weights[layer].sum()
            ids = np.stack([rng.choice(experts, top_k, replace=False, p=chances) for _ in range(tokens)])
            result.append((layer, ids.ravel().tolist(), rng.random(tokens * top_k).round(3).tolist()))
    return result
