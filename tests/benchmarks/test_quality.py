"""The KL divergence of `benchmarks/quality.py` end to end on a tiny random model: what each comparison is of."""

from __future__ import annotations

from pathlib import Path

import pytest

from moelight.kernels import native
from tests.benchmarks.scripts import ran

SHAPE = "--layers 2 --hidden 64 --intermediate 64 --experts 4 --heads 4 --kv-heads 2 --head-dim 16 --vocab 512"


@pytest.mark.thorough
@pytest.mark.skipif(not native.available(), reason="the extension is not built")
def test_activations_cost_beside_weights_and_alone(tmp_path: Path) -> None:
    model = tmp_path / "model"
    ran("make_checkpoint", model, "--model", "mixtral-8x7b", *SHAPE.split())
    few = ["--random-prompts", 4, "--random-len", 8, "--llamacpp", tmp_path, "--llamacpp-source", tmp_path]
    rows = ran("quality", "--sections", "kl", "--models", model, "--forms", "int8", "--scratch", tmp_path, *few)["kl"][
        "rows"
    ]
    assert [(row["form"], row["of"], row["tokens"]) for row in rows] == [
        ("int8", "weights", 28),
        ("int8", "both", 28),
        ("int8", "activations", 28),
    ]
    weights, both, activations = (row["kl"] for row in rows)
    assert both > weights > 0 and activations > 0
