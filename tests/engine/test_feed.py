"""Requests come as there is room for them: an endless source is served, and nothing is kept of what has ended."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from moelight.core.policy import Policy
from moelight.core.request import Request, SamplingParams
from moelight.engine.batcher import Batcher
from moelight.engine.call_constraints import CallConstraints
from moelight.engine.constraints import Constraints
from moelight.engine.engine import Engine
from moelight.engine.output_processor import OutputProcessor
from moelight.paging.kv import BlockPool
from tests.engine.test_invariance import DEVICES
from tests.engine.test_output_processor import Words
from tests.engines import Tiny


class Watched(Request):
    """A request that a weak reference can point at."""


class Source:
    """Requests without end, and how many of them were asked for."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.taken, self._fails_at = 0, fails_at

    def __iter__(self) -> Iterator[Request]:
        for index in count():
            if index == self._fails_at:
                raise OSError("the disk is gone")
            self.taken += 1
            yield Request(
                index=index,
                token_ids=(65 + index % 26,) * (1 + index % 7),
                sampling=SamplingParams(max_tokens=1 + index % 3, ignore_eos=True),
            )


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Path:
    return tiny("mixtral")


@pytest.mark.parametrize("devices", ["cpu", "gpu"])
def test_no_more_is_asked_for_than_rides_and_one_ahead(model: Path, devices: str) -> None:
    source, ended = Source(), 0
    with Engine(
        Policy(model=str(model), batch_size=4, **DEVICES[devices]), device="cpu" if devices == "cpu" else "twin"
    ) as engine:
        result = engine.run(source)
        assert source.taken == 0
        for _ in islice(result, 40):
            ended += 1
            assert source.taken <= ended + 3 * 4 + 1, "those of this pass and of two that follow it, and one"
        result.close()  # type: ignore[attr-defined]
        assert engine.stats.prompt_tokens < source.taken * 4
        assert engine._loaded.pool.free == engine._loaded.pool.blocks
        inputs = source.taken
        assert len(list(engine.run(islice(Source(), 3)))) == 3
        assert source.taken == inputs, "who was closed is not asked again"


@pytest.mark.parametrize("devices", ["cpu", "gpu"])
def test_what_the_source_raises_comes_out_and_the_engine_serves_on(model: Path, devices: str) -> None:
    with Engine(
        Policy(model=str(model), batch_size=4, **DEVICES[devices]), device="cpu" if devices == "cpu" else "twin"
    ) as engine:
        with pytest.raises(OSError, match="the disk is gone"):
            list(engine.run(Source(fails_at=9)))
        assert engine._loaded.pool.free == engine._loaded.pool.blocks
        assert len(list(engine.run(islice(Source(), 5)))) == 5


def test_prompt_tokens_are_those_of_who_was_admitted(model: Path) -> None:
    with Engine(Policy(model=str(model), batch_size=2), device="cpu") as engine:
        requests = list(islice(Source(), 9))
        assert len(list(engine.run(requests))) == 9
        assert engine.stats.prompt_tokens == sum(len(request.token_ids) for request in requests)


def test_five_thousand_requests_leave_nothing_behind() -> None:
    """At no time are more of them in memory than ride, and those that are about to."""
    made: weakref.WeakSet[Watched] = weakref.WeakSet()

    def source() -> Iterator[Watched]:
        for index in range(5_000):
            how = SamplingParams(max_tokens=1 + index % 2, stop=("zz",) if index % 3 else ())
            request = Watched(index=index, token_ids=(1,), sampling=how)
            made.add(request)
            yield request

    policy = Policy(model="m", batch_size=256, micro_batch_size=256, micro_batch_tokens=256)
    batcher, maximum, finished = Batcher(policy, BlockPool(300), discrete=False), 0, 0
    words: Any = Words()
    answers = OutputProcessor(source(), words, CallConstraints(Constraints(words, 10)), 1000)
    batcher.add(answers.sequences)
    while batcher.busy:
        loads = batcher.next_pass()
        batcher.launched(loads)
        tokens = [[0 for chunk in load.chunks if chunk.completes] for load in loads]
        finished += len(answers.collect(batcher, loads, tokens))
        maximum = max(maximum, len(made))
    assert finished == 5_000
    assert maximum <= 2 * 256 + 1
    assert not answers._states
    del loads
    assert not made
