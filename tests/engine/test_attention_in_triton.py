"""The engine with Triton's attention, interpreted: the tokens of the CPU's, and few launches."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from moelight import Engine, Policy, SamplingParams
from moelight.core.policy import Shares
from moelight.core.request import Request
from moelight.core.schedule import TaskKind
from moelight.kernels.gpu import attention, serving
from moelight.runtime import attention_ops
from moelight.runtime.microbatch import require
from tests.cases import thorough
from tests.engines import Tiny
from tests.kernels import gpu_layers  # noqa: F401  tells Triton to interpret


@pytest.mark.parametrize("kv_dtype", thorough(["auto", "int8"], but=["int8"]))
def test_the_same_tokens_by_few_launches(kv_dtype: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of the cache in both memories; codes and scales of an int8 cache cross, each fetched by a launch."""
    if not serving.interpreting():
        pytest.skip("triton does not interpret here")
    called = Counter[str]()

    def counted(name: str) -> Any:
        function = getattr(attention, name)

        def call(*args: Any, **rest: Any) -> Any:
            called[name] += 1
            return function(*args, **rest)

        monkeypatch.setattr(attention, name, call)
        return call

    names = ("attend", "append", "through_int8")
    kernels = attention_ops.AttentionKernels(**{name: counted(name) for name in names}, fetches=serving.reads_host)
    counted("fetch")
    model, random = str(tiny("mixtral")), Random(3)
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    requests = [
        Request(index=index, token_ids=tuple(random.randrange(256) for _ in range(length)), sampling=sampling)
        for index, length in enumerate((33, 1))
    ]
    sizes: dict[str, Any] = {"model": model, "batch_size": 2, "micro_batch_size": 2, "kv_dtype": kv_dtype}
    with Engine(Policy(**sizes), device="cpu") as engine:
        expected = {completion.index: completion.token_ids for completion in engine.run(requests)}
    monkeypatch.setattr(attention_ops, "kernels_of", lambda _: kernels)
    monkeypatch.setattr(attention_ops, "MOST_COPIES", 0)
    ran, kv = Counter[Any](), Shares(device=0.5, host=0.5)
    policy = Policy(**sizes, attention_device="gpu", ffn_device="gpu", schedule="flexgen", kv=kv)
    with Engine(policy, device="twin", lanes="inline") as engine:  # the interpreter knows one thread
        completions = engine.run(
            requests, on_pass=lambda: ran.update(s.task.kind for s in require(engine.timeline).spans)
        )
        assert {completion.index: completion.token_ids for completion in completions} == expected
    assert called["attend"] == ran[TaskKind.ATTENTION] > 0
    quantised = kv_dtype == "int8"
    assert 0 < called["fetch"] <= (1 + quantised) * ran[TaskKind.LOAD_KV]  # none if no cached token is in host memory
    assert 0 < called["append"] <= ran[TaskKind.ATTENTION] + quantised * ran[TaskKind.OFFLOAD_KV]
    assert called["through_int8"] == quantised * ran[TaskKind.ATTENTION]
