"""A KV cache of int8 codes: the same tokens in every order, size and device; twice the blocks in the same memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moelight.batch.job import run_job
from moelight.batch.journal import open_outputs
from moelight.batch.options import DONE_BEFORE, JobOptions
from moelight.batch.paths import Outputs
from moelight.core.dtypes import BFLOAT16
from moelight.core.errors import ConfigError, InputError
from moelight.core.policy import Policy, Shares
from moelight.core.request import Completion, SamplingParams
from moelight.engine.engine import Engine
from moelight.hrm.footprint import footprint, kv_block_bytes
from tests.cases import thorough
from tests.engine.graphs import ORDERS as GRAPH_ORDERS
from tests.engine.graphs import tokens as graph_tokens
from tests.engines import Tiny, forced

SHAPE: dict[str, Any] = {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
# Prompts of one token, of parts of blocks and of several, two of which share three blocks of 16 tokens.
SHARED = [65 + (5 * at) % 60 for at in range(50)]
OTHERS = [[66 + (7 * row + at) % 60 for at in range(9 + 13 * row)] for row in range(3)]
SEQUENCES = [[70], SHARED, [*SHARED[:49], 99], *OTHERS]
STREAMED = Shares(host=0.5, disk=0.5)
ON_CPU: dict[str, dict[str, Any]] = {
    "resident": {"weights": Shares(host=1.0)},
    "streamed, prompts in parts": {"weights": STREAMED, "micro_batch_tokens": 7, "micro_batch_size": 2},
    "sequences one by one": {"weights": STREAMED, "batch_size": 1, "micro_batch_size": 1, "kv_block_size": 16},
    "serial": {"weights": STREAMED, "schedule": "serial", "micro_batch_size": 3},
}
BESIDE: dict[str, dict[str, Any]] = {
    "cgopipe": {"weights": STREAMED},
    "cgopipe, prompts in parts": {"weights": STREAMED, "micro_batch_tokens": 7, "micro_batch_size": 2},
    "flexgen": {"schedule": "flexgen", "attention_device": "gpu", "weights": STREAMED},
    "flexgen, prompts in parts": {
        "schedule": "flexgen",
        "attention_device": "gpu",
        "weights": STREAMED,
        "micro_batch_tokens": 7,
        "micro_batch_size": 2,
        "kv": Shares(device=0.4, host=0.6),
    },
    "cache on the device": {"attention_device": "gpu", "kv": Shares(device=1.0), "weights": Shares(device=1.0)},
}


def answers(model: Path, device: str = "cpu", **options: Any) -> list[Completion]:
    sizes = {"batch_size": 6, "micro_batch_size": 6, "kv_tokens": 1024, "weight_dtype": "float32", "kv_dtype": "int8"}
    sizes["ffn_device"] = "cpu" if device == "cpu" else "gpu"
    with Engine(Policy(model=str(model), **{**sizes, **options}), device=device) as engine:
        return engine.generate(SEQUENCES, SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0))


@pytest.fixture(scope="module")
def mixtral(tiny: Tiny) -> Path:
    return tiny("mixtral", **SHAPE)


def scores(result: list[Completion]) -> torch.Tensor:
    return torch.tensor([item.cumulative_logprob or 0.0 for item in result])


def test_every_order_and_cut_gives_the_same_tokens_and_scores(mixtral: Path) -> None:
    """What a prompt's rows see of each other is what the cache keeps, so its parts do not matter. On the CPU all bits
    are equal; torch's products of the emulated device differ in their last ones, which may round to the next code."""
    first, *others = (answers(mixtral, **order) for order in ON_CPU.values())
    assert len({item.token_ids for item in first}) > 2
    for other in others:
        assert [item.token_ids for item in other] == [item.token_ids for item in first]
        assert torch.equal(scores(other), scores(first))
    for order in BESIDE.values():
        other = answers(mixtral, "twin", **order)
        assert [item.token_ids for item in other] == [item.token_ids for item in first]
        torch.testing.assert_close(scores(other), scores(first), rtol=0, atol=0.02)


def test_prompts_read_the_blocks_of_a_common_prefix(mixtral: Path) -> None:
    result = answers(mixtral, batch_size=1, micro_batch_size=1, kv_block_size=16)
    assert [item.cached_tokens for item in result[:3]] == [0, 0, 48]


@pytest.mark.parametrize("device", thorough(["cpu", "twin", "twin:fp16"], but=["cpu", "twin:fp16"]))
def test_logits_are_near_those_of_a_cache_that_is_not_quantised(device: str, tiny: Tiny) -> None:
    """Of a checkpoint in bfloat16, behind prompts and behind every later token; and not equal to them."""
    model = tiny("mixtral", dtype="bfloat16", num_experts_per_tok=6, **SHAPE)  # all experts: routers cannot differ
    lens = [len(item) // 2 or 1 for item in SEQUENCES]
    result: dict[str, torch.Tensor] = {}
    for kv_dtype in ("auto", "int8"):
        sizes = {"batch_size": 6, "micro_batch_size": 3, "kv_tokens": 1024, "kv_dtype": kv_dtype}
        with forced(model, device=device, **sizes) as engine:
            result[kv_dtype] = torch.cat(engine.logits(SEQUENCES, lens)).float()
    distance = (result["int8"] - result["auto"]).abs().mean() / result["auto"].abs().mean()
    assert 0 < float(distance) < 0.05


def test_the_same_memory_holds_nearly_twice_the_blocks(tiny: Tiny) -> None:
    """Heads of 64: 68 bytes of a key or value instead of 128."""
    model, budget = tiny("mixtral", dtype="bfloat16", **SHAPE), 1 << 20
    blocks = {}
    for kv_dtype in ("auto", "int8"):
        one = Policy(model=str(model), batch_size=1, micro_batch_size=1, kv_tokens=64, kv_block_size=64)
        with Engine(replace(one, kv_dtype=kv_dtype), device="cpu") as engine:
            item = kv_block_bytes(engine.profile, engine.policy, BFLOAT16)
        tokens = budget // item * 64
        with Engine(replace(one, kv_dtype=kv_dtype, kv_tokens=tokens), device="cpu") as engine:
            announced = footprint(engine.profile, engine.policy, dtype=BFLOAT16).bytes_of("kv")
            assert announced <= budget
            blocks[kv_dtype] = engine._passes.model.pool.blocks
    assert blocks["int8"] >= 1.8 * blocks["auto"]


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["gpt_oss", "qwen2_moe"])
def test_module_graphs_run_over_it(family: str, checkpoints: Any) -> None:
    """gpt_oss: sinks, and windows in every other layer."""
    model = checkpoints(family)[0]
    wanted = graph_tokens(model, kv_dtype="int8")
    assert graph_tokens(model, kv_dtype="int8", micro_batch_tokens=5, weights=Shares(host=1.0)) == wanted
    for schedule, attention, experts, homes in GRAPH_ORDERS[2:4]:
        how = {"schedule": schedule, "attention_device": attention, "ffn_device": experts, "weights": homes}
        assert graph_tokens(model, "twin", kv_dtype="int8", **how) == wanted


def test_latents_are_refused_by_name(checkpoints: Any) -> None:
    model = checkpoints("deepseek_v2")[0]
    with pytest.raises(ConfigError, match="deepseek_v2 caches latents, which are not quantised"):
        graph_tokens(model, kv_dtype="int8")
    with pytest.raises(ConfigError, match="--kv-dtype int8: deepseek_v2 caches latents"):
        Engine.from_pretrained(str(model), device="cpu", kv_dtype="int8")
    with Engine.from_pretrained(str(model), device="cpu", kv_dtype="choose") as engine:
        assert engine.policy.kv_dtype == "auto"


def job(folder: Path, **options: Any) -> JobOptions:
    prompts = folder / "prompts.txt"
    prompts.write_text("add 12 and 7 =\nreverse abcde =\n")
    return JobOptions(prompts=prompts, output=folder / "out.jsonl", device="cpu", **options)


@pytest.mark.thorough
def test_a_job_is_not_continued_in_another_format(tmp_path: Path) -> None:
    assert run_job(job(tmp_path, kv_dtype="int8")).completed == 2
    with pytest.raises(InputError, match=r'numbers\.kv_dtype: was "int8", is "auto"'):
        run_job(job(tmp_path))
    assert run_job(job(tmp_path, kv_dtype="int8")).state == DONE_BEFORE


def test_a_job_keeps_the_format_that_its_first_run_chose(tmp_path: Path) -> None:
    outputs = Outputs(rows=tmp_path / "out.jsonl", errors=None, order="input", atomic=False, sync_s=0.0)
    facts = {"numbers": {"kv_dtype": "choose"}}
    with open_outputs(outputs, facts) as ledger:
        assert ledger.chosen is None
        ledger.note_chosen({"kv_dtype": "int8"})
        ledger.put(0, b"{}\n")
    with open_outputs(outputs, facts) as ledger:
        assert ledger.chosen == {"kv_dtype": "int8"}
    with open_outputs(outputs, {"numbers": {"kv_dtype": "auto"}}, allow_changed=True) as ledger:
        assert ledger.chosen is None
