"""A run on a twin with habits: the same tokens, on a link of a given rate; and a system that locks no memory for it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from moelight.core.dtypes import FLOAT32
from moelight.core.errors import BudgetError, ConfigError
from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.core.schedule import Lane
from moelight.core.timeline import Span
from moelight.engine import loaded_model, planning
from moelight.engine.engine import Engine, requests_from
from moelight.hrm.footprint import DEVICE_RUNTIME_BYTES, footprint
from moelight.paging.arena import PinningError
from moelight.runtime.machine import allocate_for
from tests.engines import Tiny

HOW = SamplingParams(max_tokens=4, ignore_eos=True)
PROMPTS = [[65, 66, 67], [70, 71], [72] * 20]
RATE = 40e6


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Path:
    return tiny("mixtral")


def policy(model: Path, **changes: Any) -> Policy:
    shares = Shares(device=0.25, host=0.5, disk=0.25)
    return Policy(model=str(model), batch_size=4, micro_batch_size=2, ffn_device="gpu", weights=shares, **changes)


def served(model: Path, device: str, **changes: Any) -> tuple[list[tuple[int, ...]], list[Span], Engine]:
    spans: list[Span] = []
    with Engine(policy(model, **changes), device=device) as engine:

        def on_pass() -> None:
            assert engine.timeline is not None
            spans.extend(engine.timeline.spans)

        requests = requests_from(PROMPTS, HOW, engine.tokenizer)
        done = sorted(engine.run(requests, on_pass=on_pass), key=lambda item: item.index)
    return [tuple(item.token_ids or ()) for item in done], spans, engine


def test_habits_cost_time_and_change_no_token(model: Path) -> None:
    plain, _, engine = served(model, "twin")
    assert engine.stats.counts["device_waits"] > 0
    tokens, spans, slowed = served(model, "twin:link=40MB/s,launch=50us,memory=1GiB")
    assert tokens == plain
    assert slowed.stats.counts["device_waits"] == engine.stats.counts["device_waits"]
    assert 0 < slowed.stats.device_peak_bytes < 1 << 30 and engine.stats.device_peak_bytes == 0
    crossing = [span for span in spans if span.task.lane in (Lane.H2D, Lane.D2H)]
    assert sum(span.bytes for span in crossing) > 0
    for span in crossing:
        assert span.end_s - span.start_s >= span.bytes / RATE + 50e-6 - 1e-6
    for lane in (Lane.H2D, Lane.D2H):
        assert 0 < slowed.stats.lanes[lane].bytes_per_s <= RATE
    assert all(span.end_s - span.start_s >= 49e-6 for span in spans if span.task.lane is Lane.DEVICE)


def test_a_twin_with_memory_is_planned_for_like_a_card(model: Path) -> None:
    """90 % of it, or less that is asked for; what tensors take stays below what is announced."""
    sizes: dict[str, Any] = {"host_memory": "300MiB", "batch_size": 4, "micro_batch_size": 4, "schedule": "cgopipe"}
    with Engine.from_pretrained(model, device="twin:memory=300MiB", **sizes) as engine:
        assert engine.plan is not None
        use = engine.plan.use_of("device")
        assert use.capacity_bytes == int(0.9 * (300 << 20))
        assert dict(use.by_purpose)["device_runtime"] == DEVICE_RUNTIME_BYTES
        assert engine.generate(PROMPTS, HOW)
        announced = footprint(engine.profile, engine.policy, dtype=FLOAT32)
        assert 0 < engine.stats.device_peak_bytes <= announced.total("device") - DEVICE_RUNTIME_BYTES
    with pytest.raises(ConfigError, match=r"--device-memory 301.0MiB: 300.0MiB is free on the device; lower it"):
        Engine.from_pretrained(model, device="twin:memory=300MiB", device_memory="301MiB", **sizes)


class Refusing:
    """A system that locks no memory for expert pages, or none for ``purpose``; the rest is allocated as ever."""

    def __init__(self, purpose: str = "host_experts") -> None:
        self.purpose, self.asked = purpose, list[bool]()

    def __call__(self, *args: Any, pinned_pages: bool, **rest: Any) -> dict[str, Tensor]:
        self.asked.append(pinned_pages)
        if pinned_pages or self.purpose != "host_experts":
            raise PinningError(self.purpose, 64 << 20, locked=1 << 20, code=2)
        return allocate_for(*args, pinned_pages=pinned_pages, **rest)


def test_pages_that_cannot_be_locked_are_staged(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _, _ = served(model, "twin", host_pages="staged")
    refusing = Refusing()
    monkeypatch.setattr(loaded_model, "allocate_for", refusing)
    with caplog.at_level(logging.WARNING):
        tokens, spans, engine = served(model, "twin", host_pages="pinned")
    assert (tokens, engine.policy.host_pages, refusing.asked) == (plain, "staged", [True, False])
    assert any(span.task.lane is Lane.STAGE for span in spans)
    (record,) = caplog.records
    assert record.getMessage() == engine.host_pages_reason
    assert engine.host_pages_reason.startswith(
        "expert pages in host memory are staged: the system refuses to page-lock 64.0MiB of host memory for "
        "host_experts (cudaHostRegister: error 2 after 1.0MiB)"
    )


def test_what_cannot_be_staged_either_is_refused_in_one_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where host memory does not hold the staging ring, and where it is another region that must be locked."""
    with monkeypatch.context() as patch:
        patch.setattr(loaded_model, "allocate_for", Refusing())
        patch.setattr(planning, "memory_limit_bytes", lambda: 1 << 20)
        with pytest.raises(
            BudgetError, match=r"refuses to page-lock .* --fix host_pages=staged` plans for less"
        ) as caught:
            Engine(policy(model, host_pages="pinned"), device="twin")
        assert caught.value.tier == "host" and "\n" not in str(caught.value)
    monkeypatch.setattr(loaded_model, "allocate_for", Refusing("crossing"))
    with pytest.raises(PinningError, match=r"refuses to page-lock 64\.0MiB of host memory for crossing"):
        Engine(policy(model), device="twin")
