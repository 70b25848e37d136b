"""What a run says of itself: tokens, passes, lanes, bytes; in the figures, the timelines and the ledger alike."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from moelight.core.dtypes import FLOAT32
from moelight.core.policy import Policy, Shares
from moelight.core.request import Request, SamplingParams
from moelight.core.schedule import Lane, TaskKind
from moelight.core.timeline import Timeline
from moelight.engine.engine import Engine
from moelight.engine.loaded_model import weight_dtype
from moelight.hrm import costs, schedule_time
from moelight.hrm.costs import page_bytes, qkv_bytes
from moelight.hrm.footprint import footprint
from moelight.hrm.placement import place_pages
from moelight.hrm.schedule_time import ON_DEMAND_SCHEDULES
from moelight.models.checkpoints import open_model
from moelight.paging.slots import SlotTable
from moelight.profiles.workload import Workload
from moelight.runtime.machine import device_peak, find_machine
from tests.cases import covering, thorough
from tests.engines import Tiny, least_memory

PROMPTS = [[65 + n] * (1 + 7 * n % 40) for n in range(11)]
HOW = SamplingParams(max_tokens=3, ignore_eos=True)
LANES = {"cpu": {Lane.DISK, Lane.CPU}, "twin": set(Lane) - {Lane.EXCHANGE}}


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Path:
    return tiny("mixtral", num_hidden_layers=4)


def requests() -> list[Request]:
    return [Request(index=index, token_ids=tuple(ids), sampling=HOW) for index, ids in enumerate(PROMPTS)]


def traced(engine: Engine, count: int = len(PROMPTS)) -> list[Timeline]:
    """The timelines of the passes that serve the first so many requests."""
    trace: list[Timeline] = []

    def on_pass() -> None:
        assert engine.timeline is not None and engine.binding is not None
        assert 0 < engine.binding.share <= 1
        trace.append(engine.timeline)

    assert len(list(engine.run(requests()[:count], on_pass=on_pass))) == count
    return trace


def found_traffic(timeline: Timeline, kind: TaskKind) -> int:
    return sum(span.found_bytes or 0 for span in timeline.spans if span.task.kind is kind)


def page_traffic(timeline: Timeline, kind: TaskKind) -> int:
    return sum(span.task.bytes for span in timeline.spans if span.task.kind is kind)


def test_the_figures_add_up(model: Path) -> None:
    calls: list[int] = []
    with Engine(Policy(model=str(model), batch_size=4, weights=Shares(disk=1.0)), device="cpu") as engine:
        result = engine.generate(PROMPTS, HOW)
        result += list(engine.run(requests(), on_pass=lambda: calls.append(engine.progress_tokens)))
        stats = engine.stats
    assert stats.completion_tokens == sum(completion.completion_tokens for completion in result) == 2 * 3 * len(PROMPTS)
    assert stats.prompt_tokens == sum(completion.prompt_tokens for completion in result)
    assert calls == sorted(calls)
    assert calls[-1] == stats.completion_tokens
    assert stats.passes == 2 * len(calls)
    assert stats.wall_s > 0
    assert stats.load_s > 0
    assert 0 < stats.python_s < stats.wall_s
    assert stats.tokens_per_s == pytest.approx(stats.completion_tokens / stats.wall_s)
    assert stats.peak_rss_bytes > 10 << 20
    for lane in stats.lanes.values():  # two runs, and the time between them is no lane's
        assert lane.busy_s + sum(lane.bubbles_s.values()) == pytest.approx(stats.wall_s)
    assert stats.binding is not None and "not recorded" not in stats.lanes[stats.binding.lane].bubbles_s
    assert list(stats.as_dict()) == [
        "wall_s",
        "load_s",
        "prompt_tokens",
        "completion_tokens",
        "tokens_per_s",
        "passes",
        "peak_rss_bytes",
        "device_peak_bytes",
        "lanes",
        "binding",
        "counts",
        "adaptations",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["cpu", "gpu"])
def test_a_real_device_takes_what_was_announced(tiny: Tiny, attention: str) -> None:
    """All arenas, at most the announced transients, and what the allocator and the products' library need for them."""
    policy = Policy(
        model=str(tiny("mixtral", num_hidden_layers=4)),
        batch_size=8,
        kv_tokens=1 << 16,
        attention_device=attention,
        ffn_device="gpu",
        weights=Shares(device=0.25, host=0.5, disk=0.25),
        kv=Shares(device=0.5, host=0.5) if attention == "gpu" else Shares(host=1.0),
    )
    with Engine(policy, device="auto") as engine:
        device = find_machine("auto").device
        before = int(torch.get_device_module(device).memory_allocated(device))
        dtype = weight_dtype(engine.policy, open_model(policy.model), find_machine("auto"))
        announced = footprint(engine.profile, engine.policy, dtype=dtype)
        bound = announced.total("device")
        assert before >= bound - announced.bytes_of("transient") - announced.bytes_of("device_runtime")
        engine.generate(PROMPTS, HOW)
        peak = device_peak(find_machine("auto"))
        assert before <= peak.allocated <= peak.reserved <= bound
        assert engine.stats.device_peak_bytes == peak.reserved


BY_LANES = [*product(LANES, ("auto", "inline", "threads"))]


@pytest.mark.parametrize(("device", "lanes"), thorough(BY_LANES, but=covering(BY_LANES)))
def test_every_lane_of_the_machine_has_its_figures(model: Path, device: str, lanes: str) -> None:
    policy = Policy(
        model=str(model),
        batch_size=4,
        ffn_device="cpu" if device == "cpu" else "gpu",
        weights=Shares(host=0.5, disk=0.5),
    )
    with Engine(policy, device=device, lanes=lanes) as engine:
        trace = traced(engine)
        stats = engine.stats
    assert set(stats.lanes) == LANES[device]
    assert set(stats.as_dict()["lanes"]) == {str(lane) for lane in LANES[device]}
    for lane, figures in stats.lanes.items():
        spans = [span for timeline in trace for span in timeline.spans if span.task.lane is lane]
        assert figures.tasks == len(spans) > 0
        assert figures.bytes == sum(span.bytes for span in spans)
        assert figures.busy_s == pytest.approx(sum(span.end_s - span.start_s for span in spans))
        assert figures.busy_s <= stats.wall_s + 0.01
    assert len(trace) == stats.passes
    assert engine.timeline is trace[-1]


@pytest.mark.parametrize(
    "schedule",
    thorough(["cgopipe", "serial", "fastdecode", "flexgen", "flexgen-loop", "module"], but=["cgopipe", "module"]),
)
def test_without_a_link_a_pass_reads_the_streamed_pages_once(model: Path, schedule: str) -> None:
    """However many micro-batches ride in it; and the whole run reads no page more."""
    policy = Policy(model=str(model), batch_size=6, weights=Shares(host=0.4, disk=0.6), schedule=schedule)
    for mu in (1, 6):
        with Engine(Policy(**{**_fields(policy), "micro_batch_size": mu}), device="cpu") as engine:
            trace = traced(engine)
            streamed = len(place_pages(engine.profile, policy).streamed) * page_bytes(engine.profile, FLOAT32)
            assert streamed > 0
            assert [page_traffic(timeline, TaskKind.READ_PAGE) for timeline in trace] == [streamed] * len(trace)
            assert engine.stats.lanes[Lane.DISK].bytes == streamed * len(trace)


@pytest.mark.parametrize(
    "schedule",
    thorough(
        ["cgopipe", "serial", "fastdecode", "flexgen-c", "flexgen-loop", "module"], but=["fastdecode", "flexgen-loop"]
    ),
)
def test_across_a_link_a_pass_sends_the_streamed_pages_once(model: Path, schedule: str) -> None:
    policy = Policy(
        model=str(model),
        batch_size=6,
        micro_batch_size=2,
        ffn_device="gpu",
        weights=Shares(device=0.25, host=0.5, disk=0.25),
        schedule=schedule,
    )
    with Engine(policy, device="twin") as engine:
        trace = traced(engine)
        placement, page = place_pages(engine.profile, policy), page_bytes(engine.profile, FLOAT32)
        lanes = engine.stats.lanes
    passes, streamed = len(trace), len(placement.streamed) * page
    assert [page_traffic(timeline, TaskKind.SEND_PAGE) for timeline in trace] == [streamed] * passes
    assert lanes[Lane.DISK].bytes == len(placement.on("disk")) * page * passes
    assert lanes[Lane.STAGE].bytes == len(placement.on("host")) * page * passes
    hidden = sum(page_traffic(timeline, TaskKind.LOAD_HIDDEN) for timeline in trace)
    assert lanes[Lane.H2D].bytes == streamed * passes + hidden


def test_queries_keys_and_values_of_every_token_cross_once_a_layer(model: Path) -> None:
    """Fresh prompts send keys and values only; all other tokens send queries too, and get their output back."""
    policy = Policy(model=str(model), batch_size=20, ffn_device="gpu", weights=Shares(device=1.0))
    with Engine(policy, device="twin") as engine:
        traced(engine)
        profile, lanes = engine.profile, engine.stats.lanes
    prompt, decode = sum(map(len, PROMPTS)), 2 * len(PROMPTS)
    q, kv, layers = profile.attention.q_dim * 4, 2 * profile.attention.kv_dim * 4, profile.num_layers
    assert lanes[Lane.D2H].bytes == layers * (decode * (q + kv) + prompt * kv)
    assert lanes[Lane.D2H].bytes == layers * (qkv_bytes(profile, FLOAT32, decode) + prompt * kv)
    assert lanes[Lane.H2D].bytes == layers * decode * q


@pytest.mark.parametrize(
    "schedule", thorough(["cgopipe", "flexgen", "flexgen-loop", "serial"], but=["flexgen", "serial"])
)
def test_keys_and_values_of_every_token_go_down_once_and_contexts_come_up(model: Path, schedule: str) -> None:
    """Where the device attends: of prompts that are not cut every decoded token brings all that came before it."""
    policy = Policy(
        model=str(model),
        batch_size=20,
        ffn_device="gpu",
        attention_device="gpu",
        weights=Shares(device=1.0),
        schedule=schedule,
    )
    with Engine(policy, device="twin") as engine:
        traced(engine)
        profile, lanes = engine.profile, engine.stats.lanes
    tokens = sum(map(len, PROMPTS)) + 2 * len(PROMPTS)
    context = sum(len(prompt) + step for prompt in PROMPTS for step in range(2))
    kv, layers = 2 * profile.attention.kv_dim * 4, profile.num_layers
    assert lanes[Lane.D2H].bytes == layers * tokens * kv
    assert lanes[Lane.H2D].bytes == layers * context * kv


def test_a_cache_on_the_device_leaves_the_link_to_the_pages(model: Path) -> None:
    devices = {"ffn_device": "gpu", "attention_device": "gpu", "kv": Shares(device=1.0)}
    with Engine(Policy(model=str(model), weights=Shares(device=1.0), **devices), device="twin") as engine:  # type: ignore[arg-type]
        traced(engine)
        lanes = engine.stats.lanes
    assert lanes[Lane.D2H].bytes == lanes[Lane.H2D].bytes == lanes[Lane.CPU].tasks == 0


@pytest.mark.parametrize("device", thorough(["cpu", "twin"], but=["twin"]))
def test_in_the_least_memory_every_pass_moves_what_the_plan_says(
    model: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is spared for small passes."""
    monkeypatch.setattr(schedule_time, "ROUTED_ONLY_SHARE", 1.1)
    monkeypatch.setattr(schedule_time, "MEASURED_SHARE", 1.1)
    work = Workload(num_requests=4, prompt_len=12, max_prompt_len=22, gen_len=3)
    how = {"schedule": "fastdecode"} if device == "twin" else {}  # all experts on the GPU, so that pages are streamed
    least = least_memory(model, device, work, **how)
    with Engine.from_pretrained(model, device=device, workload=work, **how, **least) as engine:  # type: ignore[arg-type]
        trace = traced(engine, 4)
        placement = place_pages(engine.profile, engine.policy)
        page = page_bytes(engine.profile, FLOAT32)
        assert engine.plan is not None
        assert {tier: engine.plan.use_of(tier.removesuffix("_memory")).total_bytes for tier in least} == least
    kind = TaskKind.READ_PAGE if device == "cpu" else TaskKind.SEND_PAGE
    assert placement.streamed
    assert {page_traffic(timeline, kind) for timeline in trace} == {len(placement.streamed) * page}


@pytest.mark.parametrize("schedule", ON_DEMAND_SCHEDULES)
@pytest.mark.parametrize("devices", thorough(["cpu", "twin"], but=["twin"]))
def test_a_token_alone_brings_its_own_experts(
    model: Path, devices: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of six a layer: what moves them does nothing for the others, on any lane."""
    monkeypatch.setattr(costs, "PART_BYTES", costs.PAGE_ALIGNMENT)
    monkeypatch.setattr(SlotTable, "find", lambda *_: None)  # nothing is found of what earlier passes left
    beside = {"ffn_device": "gpu", "weights": Shares(host=0.5, disk=0.5)} if devices == "twin" else {}
    sizes: dict[str, Any] = {"batch_size": 1, "micro_batch_size": 1, "weights": Shares(disk=1.0), **beside}
    with Engine(Policy(model=str(model), schedule=schedule, **sizes), device=devices) as engine:
        layers, size = engine.profile.num_layers, page_bytes(engine.profile, FLOAT32)
        trace = traced(engine, 1)
    for timeline in trace:  # of the first prompt, which has one token
        chosen = {kind: found_traffic(timeline, kind) for kind in (TaskKind.READ_EXPERTS, TaskKind.SEND_EXPERTS)}
        assert chosen[TaskKind.SEND_EXPERTS if devices == "twin" else TaskKind.READ_EXPERTS] == 3 * layers * size
        if devices == "twin":  # what is at home in host memory crosses from there
            assert 0 < chosen[TaskKind.READ_EXPERTS] < 3 * layers * size
        assert not any(span.task.page for span in timeline.spans)


def test_the_last_pass_fetches_nothing_for_another(model: Path) -> None:
    """One token each: one pass, and the stream is not read on for passes that never come."""
    with Engine(Policy(model=str(model), batch_size=20, weights=Shares(disk=1.0)), device="cpu") as engine:
        engine.generate(PROMPTS, SamplingParams(max_tokens=1, ignore_eos=True))
        assert engine.stats.passes == 1
        pages = len(place_pages(engine.profile, engine.policy).streamed)
        assert engine.stats.lanes[Lane.DISK].tasks == pages


def _fields(policy: Policy) -> dict[str, object]:
    return {name: getattr(policy, name) for name in Policy.__dataclass_fields__}
