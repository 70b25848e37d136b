"""bfloat16 checkpoints on a device without bfloat16: pages keep their bytes, float16 computes, and what it cannot hold
is computed in a wider format or refused by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moelight.cli.main import main
from moelight.core.dtypes import MIXED_FLOAT16
from moelight.core.policy import Policy, Shares
from moelight.core.request import Completion, SamplingParams
from moelight.core.schedule import Page
from moelight.engine.engine import Engine
from moelight.hrm.footprint import footprint
from moelight.profiles.workload import Workload
from tests.cases import covering, thorough
from tests.engines import Tiny, forced, relative
from tests.tiny import FAMILIES

TWIN = "twin:fp16"
SEQUENCES = [[65 + (7 * row + at) % 60 for at in range(6 + row)] for row in range(4)]
STREAMED = Shares(host=0.5, disk=0.5)
ORDERS: dict[str, dict[str, Any]] = {
    "cgopipe": {"weights": STREAMED},
    "resident": {"weights": Shares(device=1.0)},
    "on demand": {"weights": Shares(device=0.6, host=0.2, disk=0.2), "residents": "learned", "batch_size": 1},
    "module": {"schedule": "module", "weights": STREAMED},
    "serial": {"schedule": "serial", "weights": Shares(device=0.3, disk=0.7)},
}
ON_DEVICE: dict[str, dict[str, Any]] = {
    "flexgen": {"schedule": "flexgen", "weights": STREAMED},
    "cache on the device": {"kv": Shares(device=1.0), "weights": STREAMED},
}
BESIDE: dict[str, dict[str, Any]] = {
    "split": {"ffn_device": "split", "cpu_experts": 0.5, "weights": Shares(host=1.0)},
    "split, by module": {"ffn_device": "split", "cpu_experts": 0.5, "weights": Shares(host=1.0), "micro_batch_size": 4},
}
State = dict[str, torch.Tensor]


def answers(model: Path, device: str = TWIN, **options: Any) -> list[Completion]:
    sizes = {"batch_size": 4, "micro_batch_size": 2, "kv_tokens": 512, "ffn_device": "gpu"}
    with Engine(Policy(model=str(model), **{**sizes, **options}), device=device) as engine:
        return engine.generate(SEQUENCES, SamplingParams(max_tokens=4, ignore_eos=True))


def logits(model: Path, device: str = TWIN, **options: Any) -> list[torch.Tensor]:
    """Of every position behind half a prompt."""
    with forced(model, device=device, batch_size=8, micro_batch_size=4, kv_tokens=1024, **options) as engine:
        return engine.logits(SEQUENCES, [len(item) // 2 for item in SEQUENCES])


def changed(tiny: Tiny, target: Path, change: Callable[[State], None], family: str = "mixtral") -> Path:
    """A bfloat16 checkpoint after ``change``."""
    target.mkdir()
    source = tiny(family, dtype="bfloat16")
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    state = {name: tensor.clone() for name, tensor in load_file(target / "model.safetensors").items()}
    change(state)
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return target


def assert_close_to_float32(model: Path, limit: float, **options: Any) -> None:
    truth = logits(model, "cpu", weight_dtype="float32")
    for result, wanted in zip(logits(model, **options), truth, strict=True):
        assert result.isfinite().all()
        assert relative(result, wanted) <= limit


@pytest.mark.parametrize("orders", [ORDERS, ON_DEVICE, BESIDE], ids=["attention on the host", "on the device", "split"])
@pytest.mark.parametrize("family", thorough(FAMILIES, but=["olmoe"]))
def test_every_order_gives_the_same_tokens(family: str, orders: dict[str, dict[str, Any]], tiny: Tiny) -> None:
    model = tiny(family, dtype="bfloat16")
    devices = {"attention_device": "gpu"} if orders is ON_DEVICE else {}
    result = {
        name: [answer.token_ids for answer in answers(model, **devices, **order)] for name, order in orders.items()
    }
    first, *others = result.values()
    assert all(other == first for other in others), result
    assert len(set(first)) == len(SEQUENCES)


@pytest.mark.parametrize("family", thorough(FAMILIES, but=["mixtral"]))
def test_it_is_finer_than_bfloat16(family: str, tiny: Tiny) -> None:
    """The median error of logits against float32, where routers choose all experts and so cannot differ."""
    model = tiny(family, dtype="bfloat16", num_experts_per_tok=6)
    truth = torch.cat(logits(model, "cpu", weight_dtype="float32"))
    errors = [(torch.cat(logits(model, device)) - truth).abs().median() for device in (TWIN, "twin")]
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_checkpoints_are_computed_as_before(dtype: str, tiny: Tiny) -> None:
    model = tiny("mixtral", dtype=dtype)
    assert all(map(torch.equal, logits(model, TWIN), logits(model, "twin")))


def test_pages_hold_the_bytes_of_the_file(tiny: Tiny) -> None:
    model = tiny("mixtral", dtype="bfloat16")
    state = load_file(model / "model.safetensors")
    with forced(model, device=TWIN, weights=Shares(device=0.5, host=0.5)) as engine:
        store = engine._passes.model.pages
        assert engine._passes.model.hidden.dtype == torch.float32
        for layer, expert in ((0, 0), (2, 5)):
            page, at = Page(layer=layer, expert=expert), store.table[layer, expert]
            held = (store.resident[at] if at >= 0 else store.offloaded[page]).page.view(torch.bfloat16)
            names = [f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w{part}.weight" for part in (1, 3, 2)]
            stored = torch.cat([state[name].flatten() for name in names])
            assert torch.equal(held[: len(stored)], stored)


@pytest.mark.parametrize("order", [{"weights": Shares(device=1.0)}, {"weights": Shares(disk=1.0)}], ids=str)
def test_weights_beyond_float16_are_named_and_computed(
    order: dict[str, Any], tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(state: State) -> None:
        state["model.layers.1.block_sparse_moe.experts.2.w1.weight"][7] = 1e5
        state["model.layers.0.self_attn.o_proj.weight"][3] = -1e5
        state["model.layers.2.post_attention_layernorm.weight"][5] = 7e4
        state["lm_head.weight"][::3] *= 1e6

    model = changed(tiny, tmp_path / "model", change)
    with caplog.at_level(logging.WARNING):
        assert_close_to_float32(model, 2e-2, **order)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    for name in ("lm_head.weight", "layers.0.self_attn.o_proj", "layers.2.post_attention_layernorm"):
        assert name in told[0]
    assert "layers.1.block_sparse_moe.experts.2.w1" in told[1]
    with forced(model, device=TWIN, **order) as engine:
        engine.logits(SEQUENCES, [len(item) for item in SEQUENCES])
        assert engine._passes.model.operations._moe_ops._wide_layers == {1}


def test_hidden_states_may_leave_the_range_of_float16(tiny: Tiny, tmp_path: Path) -> None:
    """In the embedding's sum with attention, and in the outputs of experts."""

    def change(state: State) -> None:
        state["model.embed_tokens.weight"][:, 3] = 6e4
        for expert in range(6):
            state[f"model.layers.0.block_sparse_moe.experts.{expert}.w2.weight"][9] *= 3e4

    model = changed(tiny, tmp_path / "model", change)
    for options in ({}, BESIDE["split"], {"attention_device": "gpu"}):
        assert_close_to_float32(model, 2e-2, **options)


MATRICES = [*product(("cpu", "gpu"), ("q_proj", "k_proj", "v_proj", "o_proj"))]


@pytest.mark.parametrize(("attention", "name"), thorough(MATRICES, but=covering(MATRICES)))
def test_activations_beyond_float16_are_errors_that_name_the_layer(
    name: str, attention: str, tiny: Tiny, tmp_path: Path
) -> None:
    """An infinite key alone would be lost in a softmax."""

    def change(state: State) -> None:
        state[f"model.layers.1.self_attn.{name}.weight"] *= 3e4

    model = changed(tiny, tmp_path / "model", change)
    for completion in answers(model, attention_device=attention):
        assert (completion.finish_reason, completion.error_code) == ("error", "not_finite")
        assert "first in layer 1;" in str(completion.stop_reason)
        assert "weight_dtype float32" in str(completion.stop_reason)
    sound = answers(model, attention_device=attention, weight_dtype="float32")
    assert {item.finish_reason for item in sound} == {"length"}


def prompt_logprobs(model: Path, device: str, **options: Any) -> torch.Tensor:
    policy = Policy(model=str(model), batch_size=4, micro_batch_size=2, kv_tokens=512, **options)
    with Engine(policy, device=device) as engine:
        result = engine.generate(SEQUENCES, SamplingParams(max_tokens=0, prompt_logprobs=0))
    rows = zip(SEQUENCES, result, strict=True)
    return torch.tensor(
        [item[at].logprob for ids, row in rows for at, item in zip(ids, row.prompt_logprobs or (), strict=True) if item]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["plain", "weights beyond float16", "hidden states beyond float16", "keys beyond"])
@pytest.mark.parametrize("order", [ORDERS["cgopipe"], ORDERS["module"], ON_DEVICE["flexgen"], BESIDE["split"]], ids=str)
def test_a_real_device_computes_in_mixed_precision(
    case: str, order: dict[str, Any], tiny: Tiny, tmp_path: Path
) -> None:
    """Any card can: the policy asks for float16, as a card without bfloat16 does by itself."""

    def change(state: State) -> None:
        if case == "weights beyond float16":
            state["model.layers.1.block_sparse_moe.experts.2.w1.weight"][7] = 1e5
            state["model.layers.0.self_attn.o_proj.weight"][3] = -1e5
        elif case == "hidden states beyond float16":
            state["model.embed_tokens.weight"][:, 3] = 6e4
        elif case == "keys beyond":
            state["model.layers.1.self_attn.k_proj.weight"] *= 3e4

    model = changed(tiny, tmp_path / "model", change)
    devices = {"ffn_device": "gpu", "attention_device": "gpu" if order in ON_DEVICE.values() else "cpu", **order}
    if case == "keys beyond":
        with Engine(Policy(model=str(model), weight_dtype="float16", **devices), device="auto") as engine:
            result = engine.generate(SEQUENCES, SamplingParams(max_tokens=2))
        assert all("first in layer 1;" in str(item.stop_reason) for item in result)
        return
    truth = prompt_logprobs(model, "cpu", weight_dtype="float32")
    torch.testing.assert_close(
        prompt_logprobs(model, "auto", weight_dtype="float16", **devices), truth, rtol=3e-2, atol=5e-2
    )


def test_a_job_on_a_float16_card_keeps_its_sound_rows(tiny: Tiny, tmp_path: Path) -> None:
    """The embedding of one letter makes a key of layer 0 overflow: its row is an error that says so."""

    def change(state: State) -> None:
        letter = ord("Z") - ord("!")  # the ids of printable bytes follow each other
        state["model.embed_tokens.weight"][letter] = 0
        state["model.embed_tokens.weight"][letter, 7] = 1
        state["model.layers.0.self_attn.k_proj.weight"][:, 7] = 3e4
        state["model.embed_tokens.weight"][[at for at in range(307) if at != letter], 7] = 0

    model = changed(tiny, tmp_path / "model", change)
    prompts, output, policy = (tmp_path / name for name in ("prompts.txt", "out.jsonl", "policy.yaml"))
    prompts.write_text("ABC\nAZ\nDEFG\n", encoding="utf-8")
    policy.write_text(f"model: {model}\nffn_device: gpu\nbatch_size: 4\n", encoding="utf-8")
    asked = ["generate", str(prompts), "--policy", str(policy), "--device", TWIN, "--max-tokens", "3"]
    assert main([*asked, "-o", str(output)]) == 1
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [(row.get("error") or {}).get("code") for row in rows] == [None, "not_finite", None]
    assert "first in layer 0;" in rows[1]["error"]["message"]


def test_it_is_planned_with_its_wider_hidden_states(tiny: Tiny) -> None:
    sizes = {"batch_size": 2, "micro_batch_size": 2, "schedule": "cgopipe"}
    work = Workload(num_requests=2, prompt_len=4, max_prompt_len=8, gen_len=3)
    limits = {"device_memory": "300MiB", "host_memory": "2GiB"}
    model = tiny("mixtral", dtype="bfloat16")
    with Engine.from_pretrained(model, device=TWIN, workload=work, **sizes, **limits) as engine:  # type: ignore[arg-type]
        planned = {name: size for name, size in engine.plan.use_of("device").by_purpose if name in ("hidden", "work")}
        asked = footprint(engine.profile, engine.plan.policy, dtype=MIXED_FLOAT16)
        assert planned == {name: asked.bytes_of(name) for name in planned}
        assert engine.generate([[65, 66]], SamplingParams(max_tokens=2))[0].finish_reason != "error"
