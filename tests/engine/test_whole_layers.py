"""Layers in one call give the logits, keys and values of their phases, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.core.schedule import TaskKind
from moelight.engine.engine import Engine
from moelight.experts.options import ExpertOptions
from moelight.kernels import native
from moelight.kernels.gpu import serving
from moelight.models import decoder
from moelight.runtime.ops import Operations
from tests.engines import Tiny, all_pairs, forced

pytestmark = pytest.mark.skipif(not native.available(), reason="the extension alone has the call")
WIDTHS = {"hidden_size": 64, "num_attention_heads": 4}  # heads of 16: the cache pads none
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {**WIDTHS, "head_dim": 16, "sliding_window": 20},
    "qwen3_moe": {**WIDTHS, "head_dim": 16, "num_hidden_layers": 3, "decoder_sparse_step": 1},
    "olmoe": {**WIDTHS, "head_dim": 16, "clip_qkv": None},
}
CASES = all_pairs(SHAPES, ("bfloat16", "float32"), ("auto", "int8"), (1, 3, 64, 65), (1, 2))


def sequences(count: int) -> list[list[int]]:
    """Of 2 to 39 tokens."""
    random = Random(count)
    return [[random.randrange(256) for _ in range(random.randint(2, 39))] for _ in range(count)]


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton, which these tests interpret, leaves the CPU to the kernels, as without interpretation."""
    monkeypatch.setattr(serving, "serves", lambda *_: (False, "the tensors are in CPU memory"))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def logits_of(model: Path, batch: int, kv_dtype: str) -> list[Tensor]:
    """After a prompt of one token and after every later token, which decodes; of all sequences together."""
    inputs = sequences(batch)
    sizes: dict[str, Any] = {"batch_size": batch, "micro_batch_size": batch, "kv_tokens": 64 * batch}
    sizes |= {"kv_dtype": kv_dtype, "weights": Shares(host=1.0)}
    with forced(model, **sizes) as engine:
        return engine.logits(inputs, [1] * batch)


@pytest.mark.parametrize(("family", "dtype", "kv_dtype", "batch", "count"), CASES)
def test_logits_are_those_of_the_phases(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str, kv_dtype: str, batch: int, count: int
) -> None:
    model, calls = tiny(family, dtype=dtype, **SHAPES[family]), list[int]()
    torch.set_num_threads(count)
    full = decoder.decode_layers

    def counted(*inputs: Any, **more: Any) -> None:
        calls.append(len(inputs[0]))
        full(*inputs, **more)

    monkeypatch.setattr(decoder, "decode_layers", counted)
    result = logits_of(model, batch, kv_dtype)
    assert calls
    monkeypatch.setattr(Operations, "whole_layers", property(lambda _: False, lambda *_: None), raising=False)
    done = len(calls)
    expected = logits_of(model, batch, kv_dtype)
    assert len(calls) == done
    for selected, theirs in zip(result, expected, strict=True):
        assert torch.equal(selected, theirs)


def kinds_of(model: Path, experts: ExpertOptions | None = None, **options: Any) -> set[TaskKind]:
    in_place: dict[str, Any] = {"batch_size": 4, "kv_tokens": 512, "weights": Shares(host=1.0)}
    policy, result = Policy(model=str(model), **in_place, **options), set[TaskKind]()
    prompts: Sequence[Sequence[int]] = [[5, 6, 7]] * 3
    with Engine(policy, device="cpu", experts=experts) as engine:
        for _ in engine.stream(prompts, SamplingParams(max_tokens=3, ignore_eos=True)):
            assert engine.timeline is not None
            result |= {span.task.kind for span in engine.timeline.spans}
    return result


def test_a_decode_pass_is_one_task(tiny: Tiny) -> None:
    result = kinds_of(tiny("mixtral", **SHAPES["mixtral"]))
    assert result == {TaskKind.EMBED, TaskKind.LAYERS, TaskKind.SAMPLE}


def test_phases_stay_apart_where_routing_is_recorded(tiny: Tiny) -> None:
    assert TaskKind.LAYERS not in kinds_of(tiny("mixtral", **SHAPES["mixtral"]), ExpertOptions(record=True))
    assert TaskKind.LAYERS not in kinds_of(tiny("mixtral", **SHAPES["mixtral"]), schedule="module")
