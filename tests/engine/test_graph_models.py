"""Families without a decoder of their own, through the whole engine: tokens of transformers' greedy search in float32,
in every order, with experts in memory and streamed, and on the twin of a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from safetensors.torch import load_file, save_file

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.engine.checkpoints import open_model
from moelight.engine.engine import Engine
from moelight.models.graph import self_test
from moelight.models.graph.self_test import Verdict, tiny
from tests.models.graph.released import RELEASED
from tests.tiny import save_byte_tokenizer

VOCABULARY = 320
LENGTHS = (9, 30, 5, 17, 11)
NEW = 6
HOW = SamplingParams(max_tokens=NEW, ignore_eos=True)
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
SIZES: dict[str, Any] = {"batch_size": 4, "micro_batch_size": 2, "micro_batch_tokens": 16, "kv_tokens": 512}
STREAMED = Shares(disk=1.0)
ORDERS = (  # schedule, attention, experts, homes
    ("cgopipe", "cpu", "gpu", STREAMED),
    ("cgopipe", "cpu", "split", Shares(device=0.3, host=0.7)),
    ("module", "cpu", "gpu", STREAMED),
    ("flexgen", "gpu", "gpu", STREAMED),
    ("flexgen-c", "cpu", "gpu", STREAMED),
    ("fastdecode", "cpu", "gpu", STREAMED),
    ("serial", "cpu", "gpu", Shares(device=1.0)),
)


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, 250, (count,), generator=draw).tolist() for count in LENGTHS]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny checkpoint of a family, saved by transformers, and its greedy tokens; each made once."""
    known: dict[str, tuple[Path, list[list[int]]]] = {}

    def find(family: str) -> tuple[Path, list[list[int]]]:
        if family not in known:
            known[family] = made(tmp_path_factory.mktemp(family), family)
        return known[family]

    return find


def made(directory: Path, family: str) -> tuple[Path, list[list[int]]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = tiny(AutoConfig.for_model(family, **RELEASED.get(family, {})))
    config.vocab_size = VOCABULARY
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.15)
        module.save_pretrained(directory)
        expected = [greedy(module, each) for each in prompts()]
    save_byte_tokenizer(directory)
    return directory, expected


def greedy(module: torch.nn.Module, prompt: list[int]) -> list[int]:
    """By whole passes, without a cache."""
    ids = list(prompt)
    for _ in range(NEW):
        ids.append(int(module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def tokens(directory: Path, device: str = "cpu", **policy: Any) -> list[list[int]]:
    with Engine(Policy(model=str(directory), **{**SIZES, **policy}), device=device) as engine:
        return [list(each.token_ids) for each in engine.generate(prompts(), HOW)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_tokens_of_transformers(family: str, checkpoints: Any) -> None:
    """Experts come from disk in every pass."""
    directory, expected = checkpoints(family)
    assert tokens(directory, weights=STREAMED) == expected


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: f"{order[0]}-{order[2]}")
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v2", "qwen3_next"])
def test_every_order_gives_the_same_tokens(family: str, order: tuple[str, str, str, Shares], checkpoints: Any) -> None:
    directory, expected = checkpoints(family)
    schedule, attention, experts, homes = order
    more = {"cpu_experts": 0.4} if experts == "split" else {}
    devices = {"attention_device": attention, "ffn_device": experts}
    assert tokens(directory, "twin", schedule=schedule, weights=homes, **devices, **more) == expected


def test_a_recurrent_model_shares_no_prefix(checkpoints: Any) -> None:
    """The state after a prefix belongs to the sequence that computed it."""
    directory, _ = checkpoints("qwen3_next")
    same = [prompts()[1]] * 3
    with Engine(Policy(model=str(directory), **SIZES), device="cpu") as engine:
        found = engine.generate(same, HOW)
    assert {each.cached_tokens for each in found} == {0}
    assert len({tuple(each.token_ids) for each in found}) == 1


def test_a_bfloat16_graph_on_a_float16_card_is_refused_or_computed_in_float32(checkpoints: Any, tmp_path: Path) -> None:
    directory, _ = checkpoints("qwen2_moe")
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    state = {name: each.bfloat16() for name, each in load_file(directory / "model.safetensors").items()}
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
