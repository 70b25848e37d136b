"""Logits that are not finite end their own sequence as an error, and are logged once; nothing else is touched."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moelight.cli.main import main
from moelight.core.policy import Policy
from moelight.core.request import Completion, SamplingParams
from moelight.engine.engine import Engine
from tests.cases import covering, thorough
from tests.engines import Tiny, all_pairs
from tests.tiny import FAMILIES

ILL = 300  # a token that the damaged embedding spoils, and no answer holds
SOUND = [[65, 66, 67], [70, 71], [80] * 9]
SICK = [[65, ILL, 67], [ILL, 70], [80] * 9 + [ILL, 81]]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 5, "top_p": 0.9, "top_k": 20},
    "scored": {"logprobs": 3},
    "penalised": {"repetition_penalty": 1.2, "presence_penalty": 0.5},
    "biased": {"logit_bias": {66: 5.0}, "min_tokens": 2},
    "structured": {"structured_outputs": {"regex": "[a-z]{4,9}"}},
    "prompt scored": {"prompt_logprobs": 0},
    "only scored": {"prompt_logprobs": 0, "max_tokens": 0},
}


def damaged(source: Path, target: Path, name: str, value: float, row: int | None = None) -> Path:
    """A copy whose tensor ``name``, or its ``row``, holds ``value``."""
    shutil.copytree(source, target)
    path = target / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    tensors[name][slice(None) if row is None else row] = value
    save_file(tensors, path, metadata={"format": "pt"})
    return target


def serve(model: Path, prompts: list[list[int]], device: str = "cpu", **how: Any) -> list[Completion]:
    policy = Policy(model=str(model), batch_size=8, ffn_device="cpu" if device == "cpu" else "gpu")
    with Engine(policy, device=device) as engine:
        return engine.generate(prompts, SamplingParams(**{"max_tokens": 5, **how}))


def assert_not_finite(completion: Completion) -> None:
    assert (completion.finish_reason, completion.error_code) == ("error", "not_finite")
    assert str(completion.stop_reason).startswith("the model's logits are not finite")
    assert completion.token_ids == ()


@pytest.mark.parametrize(
    ("name", "value", "family"),
    all_pairs(
        ["lm_head.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight"],
        [math.nan, math.inf, -math.inf],
        FAMILIES,
    ),
)
def test_spoiled_weights_answer_nothing(name: str, value: float, family: str, tiny: Tiny, tmp_path: Path) -> None:
    for completion in serve(damaged(tiny(family), tmp_path / "model", name, value), SOUND):
        assert_not_finite(completion)


MET = all_pairs([math.nan, math.inf], WAYS, ["cpu", "twin"])


@pytest.mark.parametrize(("value", "way", "device"), thorough(MET, but=covering(MET)))
def test_only_the_rows_that_meet_the_damage_are_errors(
    value: float, way: str, device: str, tiny: Tiny, tmp_path: Path
) -> None:
    model = damaged(tiny("mixtral"), tmp_path / "model", "model.embed_tokens.weight", value, row=ILL)
    result = serve(model, [*SOUND, *SICK], device, **WAYS[way])
    wanted = serve(tiny("mixtral"), SOUND, device, **WAYS[way])
    assert [item.token_ids for item in result[:3]] == [item.token_ids for item in wanted]
    assert [item.prompt_logprobs for item in result[:3]] == [item.prompt_logprobs for item in wanted]
    for completion in result[3:]:
        assert_not_finite(completion)


def test_a_sequence_that_meets_the_damage_later_keeps_what_it_had(tiny: Tiny, tmp_path: Path) -> None:
    """The second token of the sound model's answer is spoiled: it is generated, and nothing can follow it."""
    sound = serve(tiny("mixtral"), SOUND[:1], ignore_eos=True)[0].token_ids
    ill = next(position for position, token in enumerate(sound) if token not in SOUND[0])
    for device in ("cpu", "twin"):
        model = damaged(tiny("mixtral"), tmp_path / device, "model.embed_tokens.weight", math.nan, row=sound[ill])
        (result,) = serve(model, SOUND[:1], device, ignore_eos=True)
        assert (result.finish_reason, result.error_code) == ("error", "not_finite")
        assert result.token_ids == sound[: ill + 1]


def test_activations_beyond_float16_are_errors_too(tiny: Tiny, tmp_path: Path) -> None:
    model = damaged(tiny("mixtral", dtype="float16"), tmp_path / "model", "lm_head.weight", 60000.0)
    assert torch.isfinite(load_file(model / "model.safetensors")["lm_head.weight"]).all()
    assert {item.error_code for item in serve(model, SOUND)} == {"not_finite"}


def test_it_is_logged_once(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = damaged(tiny("mixtral"), tmp_path / "model", "lm_head.weight", math.nan)
    with caplog.at_level(logging.WARNING):
        serve(model, SOUND * 5)
    assert [record.getMessage()[:36] for record in caplog.records] == ["the model's logits are not finite: i"]


@pytest.mark.parametrize("openai", thorough([False, True], but=[True]))
def test_a_job_writes_error_rows_and_says_so(openai: bool, tiny: Tiny, tmp_path: Path) -> None:
    model = damaged(tiny("mixtral"), tmp_path / "model", "model.embed_tokens.weight", math.nan, row=56)
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    texts = ["ABC", "FG", chr(33 + 56)]  # the ids of printable bytes follow each other
    if openai:
        rows = [
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": "model", "prompt": text, "max_tokens": 3},
            }
            for number, text in enumerate(texts)
        ]
    else:
        rows = [{"prompt": text, "max_tokens": 3} for text in texts]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert main(["generate", str(prompts), "--model", str(model), "--device", "cpu", "-o", str(output)]) == 1
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    codes = [(line.get("error") or {}).get("code") for line in lines]
    assert sorted(codes, key=str) == [None, None, "not_finite"]
