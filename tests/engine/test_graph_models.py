"""Families without a decoder of their own, through the whole engine: tokens of transformers' greedy search in float32,
in every order, with experts in memory and streamed, and on the twin of a GPU."""

from __future__ import annotations

import shutil
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from safetensors.torch import load_file, save_file

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy, Shares
from moelight.engine.engine import Engine
from moelight.engine.experts import ExpertOptions
from moelight.experts import predict
from moelight.experts.policy import CacheRules, Capacity, ExpertPolicy, PrefetchRules
from moelight.kernels.gpu import serving
from moelight.models.checkpoints import open_model
from moelight.models.graph import self_test
from moelight.models.graph.model import GraphModel
from moelight.models.graph.self_test import Verdict
from moelight.models.moe import table_of
from moelight.runtime import moe_ops
from tests.cases import exhaustive, thorough
from tests.engine.graphs import HOW, ORDERS_BY_NAME, SIZES, STREAMED, prompts, tokens

FAMILIES = {  # what each has that others have not
    "qwen2_moe": "a shared expert",
    "gpt_oss": "sinks, windows, biased and interleaved experts",
    "deepseek_v2": "latent attention, a dense layer",
    "dbrx": "stacked rows of experts",
    "qwen3_next": "recurrent layers",
    "llama4_text": "attention in chunks",
    "minimax": "a cache class of its own",
    "deepseek_v32": "opaque attention",
}


@pytest.mark.parametrize("family", thorough(FAMILIES, but=["gpt_oss", "qwen3_next", "deepseek_v32"]))
def test_a_family_gives_the_tokens_of_transformers(family: str, checkpoints: Any) -> None:
    """Experts come from disk in every pass."""
    directory, expected = checkpoints(family)
    assert tokens(directory, weights=STREAMED) == expected


ORDERED = ("gpt_oss", "deepseek_v2", "qwen3_next")


@pytest.mark.parametrize(
    ("family", "order"), thorough(product(ORDERED, ORDERS_BY_NAME), but=[*zip(cycle(ORDERED), ORDERS_BY_NAME)][1::3])
)
def test_every_order_gives_the_same_tokens(family: str, order: str, checkpoints: Any) -> None:
    directory, expected = checkpoints(family)
    schedule, attention, experts, homes = ORDERS_BY_NAME[order]
    more = {"cpu_experts": 0.4} if experts == "split" else {}
    devices = {"attention_device": attention, "ffn_device": experts}
    assert tokens(directory, "twin", schedule=schedule, weights=homes, **devices, **more) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("family", exhaustive(["gpt_oss", "dbrx", "llama4_text"], but=["dbrx"]))
def test_the_grouped_kernels_compute_pages_of_other_forms(
    family: str, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin takes a card's way through experts, Triton's kernels interpreted."""
    if not serving.triton_available() or not serving.interpreting():
        pytest.skip(f"triton does not interpret: {serving.triton_reason()}")
    directory, expected = checkpoints(family)
    tables = []

    def table(weights: Any, _: torch.dtype, activations: Any) -> Any:
        tables.append(table_of(weights, activations))
        return tables[-1]

    monkeypatch.setattr(moe_ops, "grouped_pages", table)
    homes = Shares(device=0.5, host=0.5)
    assert tokens(directory, "twin", attention_device="cpu", ffn_device="gpu", weights=homes) == expected
    assert None not in tables and tables


def test_a_recurrent_model_shares_no_prefix(checkpoints: Any) -> None:
    """The state after a prefix belongs to the sequence that computed it."""
    directory, _ = checkpoints("qwen3_next")
    same = [prompts()[1]] * 3
    with Engine(Policy(model=str(directory), **SIZES), device="cpu") as engine:
        result = engine.generate(same, HOW)
    assert {item.cached_tokens for item in result} == {0}
    assert len({tuple(item.token_ids) for item in result}) == 1


@pytest.mark.thorough
def test_routers_of_a_graph_predict(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are the same, and pages were fetched ahead; where routers cannot be asked, that is refused."""
    monkeypatch.setattr(predict, "SURE", 0.0)
    cache = CacheRules(capacity=Capacity(value=4))
    asked = ExpertPolicy(name="mine", cache=cache, prefetch=PrefetchRules(strategy="next_router", budget=3))
    directory, expected = checkpoints("qwen2_moe")
    policy = Policy(model=str(directory), weights=STREAMED, residents="learned", **SIZES)
    with Engine(policy, device="cpu", experts=ExpertOptions(policy=asked)) as engine:
        assert [list(item.token_ids) for item in engine.generate(prompts(), HOW)] == expected
        assert engine._passes is not None
        assert engine._passes.stalls["ahead_pages"] > 0
    monkeypatch.setattr(GraphModel, "_routes_first", lambda self: False)
    with pytest.raises(ConfigError, match="routers of qwen2_moe cannot be asked before their layer"):
        Engine(policy, device="cpu", experts=ExpertOptions(policy=asked))


def test_a_bfloat16_graph_on_a_float16_card_is_refused_or_computed_in_float32(checkpoints: Any, tmp_path: Path) -> None:
    directory, _ = checkpoints("qwen2_moe")
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    state = {name: item.bfloat16() for name, item in load_file(directory / "model.safetensors").items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="does not compute a bfloat16 checkpoint in float16; run a policy with"):
        tokens(tmp_path, "twin:fp16", ffn_device="gpu")
    wide = {"ffn_device": "gpu", "weight_dtype": "float32"}
    assert tokens(tmp_path, "twin:fp16", **wide) == tokens(tmp_path, weight_dtype="float32")


def test_a_family_that_fails_its_self_test_is_refused(
    checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the operation that differs; what has agreed is not tested again by the same versions."""
    directory, _ = checkpoints("qwen2_moe")
    monkeypatch.setenv("MOELIGHT_CACHE", str(tmp_path))
    asked = []

    def differs(config: Any) -> Verdict:
        asked.append(config.model_type)
        return Verdict(error=0.5, greedy=False, differs="experts of layer 1")

    monkeypatch.setattr(self_test, "self_test", differs)
    with pytest.raises(ConfigError, match=r"qwen2_moe differs from transformers \S+ in experts of layer 1"):
        open_model(str(directory))
    monkeypatch.undo()
    monkeypatch.setenv("MOELIGHT_CACHE", str(tmp_path))
    open_model(str(directory))
    monkeypatch.setattr(self_test, "self_test", differs)
    open_model(str(directory))
    assert asked == ["qwen2_moe"]
