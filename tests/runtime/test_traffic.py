"""What a task of a link says it moves is what it moves, counted where torch copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.core.schedule import Lane, Schedule, Task, TaskKind
from moelight.engine.engine import Engine
from moelight.engine.pass_runner import ScheduleCache
from moelight.hrm import schedule_time
from moelight.runtime import ops
from moelight.runtime.lanes import SKIPPED, MovedBytes, Outcome
from moelight.runtime.on_demand import PassPages
from moelight.runtime.ops import Operations
from moelight.scheduler.layout import Layout, PassShape
from tests.cases import thorough
from tests.scheduler.validate import validate
from tests.tiny import save_tiny

HERE = Shares(device=0.25, host=0.5, disk=0.25)
DEVICES: dict[str, dict[str, Any]] = {
    "host attention": {"ffn_device": "gpu", "weights": HERE},
    "pinned homes": {"ffn_device": "gpu", "weights": HERE, "host_pages": "pinned"},
    "device attention": {"ffn_device": "gpu", "weights": HERE, "attention_device": "gpu"},
    "cache on the device": {"weights": HERE, "ffn_device": "gpu", "attention_device": "gpu", "kv": Shares(device=1.0)},
    "cache on both": {
        "weights": HERE,
        "ffn_device": "gpu",
        "attention_device": "gpu",
        "kv": Shares(device=0.6, host=0.4),
        "kv_block_size": 16,
    },
    "experts on both": {"ffn_device": "split", "weights": HERE, "cpu_experts": 0.4},
    "experts on the host": {"ffn_device": "cpu", "attention_device": "gpu", "weights": Shares(host=1.0)},
}
# What comes up as a tensor of its own: on the twin it already lies where it is wanted, and nothing is copied.
BROUGHT = {TaskKind.LOAD_HIDDEN: "attn", TaskKind.LOAD_EXPERTS: "experts"}


class Copies(TorchDispatchMode):
    """Counts the bytes that ``copy_`` writes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default:
            self.bytes += args[0].numel() * args[0].element_size()
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("traffic"), "mixtral", sliding_window=20)


def open_policy(model: Path, devices: str, **changes: Any) -> Policy:
    """Prompts of up to 36 tokens are cut in chunks of twelve."""
    sizes = {"batch_size": 6, "micro_batch_size": 3, "micro_batch_tokens": 12, "kv_tokens": 600}
    return Policy(model=str(model), **sizes, **DEVICES[devices], **changes)


def generate(policy: Policy) -> None:
    prompts = [[65 + n] * (1 + 7 * n % 40) for n in range(9)]
    with Engine(policy, device="twin", lanes="inline") as engine:
        engine.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True))


RUN = [*((devices, "cgopipe") for devices in DEVICES), ("cache on both", "serial"), ("experts on both", "serial")]


@pytest.mark.parametrize(("devices", "schedule"), thorough(RUN, but=RUN[::2]))
def test_every_pass_of_an_engine_is_valid(
    model: Path, devices: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine says of its micro-batches is what builder, validator and ledger take it for."""
    seen: list[PassShape] = []
    use = ScheduleCache.use

    def validating(self: ScheduleCache, layout: Layout) -> None:
        use(self, layout)
        find = self.find

        def validated(shape: PassShape) -> Schedule:
            schedule = find(shape)
            validate(schedule, layout, shape)
            seen.append(shape)
            return schedule

        self.find = validated

    monkeypatch.setattr(ScheduleCache, "use", validating)
    generate(open_policy(model, devices, schedule=schedule))
    micro_batches = [batch for shape in seen for batch in shape.micro_batches]
    crosses = devices in ("device attention", "cache on both", "experts on the host")
    assert any(batch.context for batch in micro_batches) == crosses
    assert any(batch.continues for batch in micro_batches) == crosses
    stayed = sum(batch.device_context for batch in micro_batches), sum(batch.device_tokens for batch in micro_batches)
    assert all(stayed) == any(stayed) == (devices == "cache on both")
    if devices == "cache on both":
        new, seen = sum(batch.tokens for batch in micro_batches), sum(batch.context for batch in micro_batches)
        assert stayed[0] / seen == pytest.approx(0.6, abs=0.15)
        assert stayed[1] / new == pytest.approx(0.6, abs=0.15)


@pytest.mark.parametrize("devices", thorough(DEVICES, but=[*DEVICES][1::2]))
def test_every_task_of_a_link_moves_what_it_says(model: Path, devices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of small passes, which are all that one micro-batch could carry."""
    monkeypatch.setattr(schedule_time, "ROUTED_ONLY_SHARE", 0.0)
    moved: dict[TaskKind, int] = {}
    bind = Operations.bind

    def counted(self: Operations, pass_pages: PassPages, *calls: Any) -> Callable[[Task], Callable[[], Outcome]]:
        perform = bind(self, pass_pages, *calls)

        def wrap(task: Task) -> Callable[[], Outcome]:
            work = perform(task)

            def run() -> Outcome:
                with Copies() as copies:
                    outcome = work()
                if task.lane not in (Lane.H2D, Lane.D2H, Lane.STAGE):
                    return outcome
                if task.kind in BROUGHT and outcome is None:
                    tensor = getattr(pass_pages.micro_batches[task.micro_batch], BROUGHT[task.kind])
                    copies.bytes = tensor.numel() * tensor.element_size()
                says = outcome.bytes if isinstance(outcome, MovedBytes) else 0 if outcome is SKIPPED else task.bytes
                assert copies.bytes == says, f"{task.name} says {says} and moves {copies.bytes}"
                moved[task.kind] = moved.get(task.kind, 0) + copies.bytes
                return outcome

            return run

        return wrap

    monkeypatch.setattr(Operations, "bind", counted)
    monkeypatch.setattr(ops, "copy_pages", lambda dst, src: (dst.copy_(src), None)[1])
    generate(open_policy(model, devices))
    crossing = {kind for kind in moved if not kind.moves_page}
    down_and_up = {TaskKind.OFFLOAD_QKV, TaskKind.LOAD_HIDDEN, TaskKind.OFFLOAD_KV}
    experts = {TaskKind.OFFLOAD_HIDDEN, TaskKind.LOAD_EXPERTS}
    assert (
        crossing
        == {
            "host attention": down_and_up,
            "pinned homes": down_and_up,
            "device attention": {TaskKind.OFFLOAD_KV, TaskKind.LOAD_KV},
            "cache on the device": set(),
            "cache on both": {TaskKind.OFFLOAD_KV, TaskKind.LOAD_KV},
            "experts on both": down_and_up | experts,
            "experts on the host": {TaskKind.OFFLOAD_KV, TaskKind.LOAD_KV} | experts,
        }[devices]
    )
    assert all(moved.values())
    assert (TaskKind.SEND_EXPERTS in moved) == (devices != "experts on the host")
    assert (TaskKind.STAGE_PAGE in moved) == (devices not in ("pinned homes", "experts on the host"))
