"""The actor of the Ray Data stage, without Ray: columns in, columns out, several tasks in one pass."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

import numpy as np
import pytest

from moelight.core.errors import ConfigError, MoelightError
from moelight.integrations.ray import ERROR, EngineStage, _Postprocess, build_processor
from tests.integrations.ray.playing import EchoEngine, EchoWorker

if importlib.util.find_spec("ray") is None:  # which takes seconds to import
    pytest.skip("ray is not installed: pip install 'moelight[ray]'", allow_module_level=True)


def stage(**engine: Any) -> tuple[EngineStage, EchoEngine]:
    made = EchoEngine(**engine)

    class Worker(EchoWorker):
        @staticmethod
        def engine() -> EchoEngine:  # type: ignore[override]
            return made

    processor = build_processor(model="demo", sampling={"max_tokens": 4})
    return EngineStage(processor.setup, worker=Worker), made


async def answered(actor: EngineStage, *batches: dict[str, Any]) -> list[dict[str, Any]]:
    async def one(batch: dict[str, Any]) -> dict[str, Any]:
        (out,) = [item async for item in actor(batch)]
        return out

    return list(await asyncio.gather(*(one(batch) for batch in batches)))


def test_columns_are_added_and_errors_are_a_column() -> None:
    actor, _ = stage()
    batch = {
        "id": np.array([7, 8, 9]),
        "prompt": np.array(["one", "two words", ""], dtype=object),
        "sampling_params": np.array([{"max_tokens": 2, "seed": None}, {"max_tokens": -1}, None], dtype=object),
    }
    (out,) = asyncio.run(answered(actor, batch))
    assert list(out["id"]) == [7, 8, 9]
    assert [error.split(":")[0] for error in out[ERROR]] == ["", "invalid_request", "empty_prompt"]
    assert out["generated_text"][0]
    assert out["generated_text"][1:] == ["", ""]
    assert out["num_generated_tokens"] == [1, 0, 0]
    assert [len(item) for item in out["generated_tokens"]] == [1, 0, 0]


def test_messages_of_arrow_structs_are_conversations() -> None:
    actor, _ = stage()
    message = [{"role": "user", "content": "hello", "name": None}]
    (out,) = asyncio.run(answered(actor, {"messages": np.array([message, None], dtype=object)[:1]}))
    assert out[ERROR] == [""]


def test_tasks_share_the_passes_of_the_engine() -> None:
    actor, engine = stage(batch_size=64, pass_s=0.05)
    batches = [{"prompt": np.array(["word"] * 8, dtype=object)} for _ in range(8)]
    outs = asyncio.run(answered(actor, *batches))
    assert all(out["num_input_tokens"] == outs[0]["num_input_tokens"] for out in outs)
    assert max(engine.passes) > 8


def test_an_engine_that_fails_fails_its_tasks() -> None:
    def fail(request: Any) -> None:
        raise RuntimeError("no luck")

    actor, _ = stage(before=fail)
    with pytest.raises(MoelightError, match="no luck"):
        asyncio.run(answered(actor, {"prompt": np.array(["word"], dtype=object)}))


def test_a_result_keeps_the_error_of_its_row() -> None:
    """Also where it forgets the column, as the guide's does."""
    keep = _Postprocess(lambda row: {"answer": row["generated_text"]})
    assert keep({"generated_text": "", ERROR: "empty_prompt: no tokens"}) == {
        "answer": "",
        ERROR: "empty_prompt: no tokens",
    }
    original = _Postprocess(lambda row: {ERROR: row[ERROR].upper()})
    assert original({"generated_text": "", ERROR: "a"}) == {ERROR: "A"}


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ray_remote_args has 'num_cpu' \(did you mean 'num_cpus'\?\)"):
        build_processor(ray_remote_args={"num_cpu": 3})
    with pytest.raises(ConfigError, match=r"unknown option 'batchsize' \(did you mean 'batch_size'\?\)"):
        build_processor(batchsize=3)
