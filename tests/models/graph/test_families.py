"""Families of transformers as suspended graphs: logits and greedy tokens of transformers' eager forward."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from moelight.models.graph.self_test import TOLERANCE, self_test


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "gpt_oss", "llama"])
def test_a_suspended_graph_equals_transformers(model_type: str) -> None:
    from transformers import AutoConfig

    verdict = self_test(AutoConfig.for_model(model_type))
    assert verdict.differs is None
    assert verdict.error <= TOLERANCE
    assert verdict.greedy
