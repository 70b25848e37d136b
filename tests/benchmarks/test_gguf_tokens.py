"""What `benchmarks/quality.py --sections tokens` compares: trained models in whole blocks are the same models."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.benchmarks.scripts import BENCHMARKS


def test_zeros_around_matrices_change_no_logit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    source = BENCHMARKS.parent / "moelight" / "demo"
    importlib.import_module("experts_sections.padded").pad_to_blocks(source, tmp_path / "blocks")
    ids = torch.arange(3, 43).view(2, 20)
    wanted, result = (
        AutoModelForCausalLM.from_pretrained(position, dtype=torch.float32)(input_ids=ids).logits
        for position in (source, tmp_path / "blocks")
    )
    assert result.shape[-1] == wanted.shape[-1] + 1
    torch.testing.assert_close(result[..., :-1], wanted, atol=1e-3, rtol=1e-3)
    assert torch.equal(result[..., -1], result[..., 2])
    matrices = [
        parameter
        for parameter in AutoModelForCausalLM.from_pretrained(tmp_path / "blocks").parameters()
        if parameter.ndim > 1
    ]
    assert all(matrix.shape[-1] % 256 == 0 for matrix in matrices)
