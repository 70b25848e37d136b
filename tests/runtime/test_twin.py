"""The emulated device's habits: how they are written, and that its lanes and its memory keep them."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from moelight.core.errors import BudgetError, ConfigError
from moelight.core.schedule import Lane, Schedule, Task, TaskKind
from moelight.hrm.footprint import ArenaSize, Footprint
from moelight.runtime.executor import Executor
from moelight.runtime.lanes import SKIPPED, LaneRunner, MovedBytes, Work
from moelight.runtime.machine import Machine, allocate_for, device_peak, find_machine, open_lanes
from moelight.runtime.twin import TwinHabits

CPU = torch.device("cpu")
KIB = 1 << 10


def test_habits_are_written_in_one_word() -> None:
    result = find_machine("twin:fp16,link=12GB/s,launch=5us,memory=16GiB")
    assert result.habits == TwinHabits(fp16=True, link_bytes_per_s=12e9, launch_s=5e-6, memory_bytes=16 << 30)
    assert (result.twin, result.bf16, result.device_memory_bytes()) == (True, False, 16 << 30)
    assert find_machine("twin:fp16") == Machine(device=CPU, discrete=True, twin=True, bf16=False)
    assert find_machine("twin:launch=1.5ms").habits.launch_s == pytest.approx(1.5e-3)
    with pytest.raises(ConfigError, match="--device-memory is needed for a twin"):
        find_machine("twin:fp16").device_memory_bytes()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1", "'1' is not one of fp16, link=RATE"),
        ("fp16,fp16", "'fp16' is not one of"),
        ("fp16=1", "'fp16=1' is not one of"),
        ("memory", "'memory' is not one of"),
        ("lunch=5us", "'lunch=5us' is not one of .*did you mean 'launch'"),
        ("fp16,", "'' is not one of"),
        ("link=fast", "link: 'fast' is not a size"),
        ("link=12GB/h", "'12GB/h' is not a rate, as in 12GB/s"),
        ("launch=5", "'5' is not a time, as in 5us"),
        ("launch=0us", "'0us' is not a time"),
        ("memory=lots", "memory: 'lots' is not a size"),
    ],
)
def test_a_habit_that_does_not_exist_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_machine(f"twin:{text}")


@pytest.mark.parametrize("kind", ["auto", "inline", "threads"])
def test_transfers_take_their_bytes_over_the_rate_and_every_launch_its_time(kind: str) -> None:
    """At least: what is found at run time counts, not what was announced; and of other lanes nothing is asked."""
    machine = find_machine("twin:link=10MB/s,launch=300us")
    executor = Executor(open_lanes(machine, kind), machine.habits.timed)
    tasks = (
        Task(kind=TaskKind.SEND_PAGE, lane=Lane.H2D, bytes=20_000),
        Task(kind=TaskKind.SEND_EXPERTS, lane=Lane.H2D, bytes=10_000_000),
        Task(kind=TaskKind.OFFLOAD_QKV, lane=Lane.D2H, bytes=5_000),
        Task(kind=TaskKind.SEND_AHEAD, lane=Lane.H2D, bytes=1 << 50),
        Task(kind=TaskKind.PRE_ATTENTION, lane=Lane.DEVICE),
        Task(kind=TaskKind.CPU_ATTENTION, lane=Lane.CPU),
    )

    outcomes = {TaskKind.SEND_EXPERTS: MovedBytes(40_000), TaskKind.SEND_AHEAD: SKIPPED}

    def perform(task: Task) -> Work:
        return lambda: outcomes.get(task.kind)

    timeline = executor.run(Schedule(builder="test", tasks=tasks), perform)
    executor.close()
    took = {span.task.kind: span.end_s - span.start_s for span in timeline.spans}
    least = {TaskKind.SEND_PAGE: 2.3e-3, TaskKind.SEND_EXPERTS: 4.3e-3, TaskKind.OFFLOAD_QKV: 0.8e-3}
    for task in (*tasks[:3], tasks[4]):
        assert took[task.kind] >= least.get(task.kind, 300e-6) - 1e-6
    assert timeline.spans[1].bytes == 40_000
    work = perform(tasks[5])
    assert machine.habits.timed(tasks[5], work) is work


def submitted(lane: LaneRunner, work: Callable[[], None]) -> None:
    lane.submit(work, ()).wait()


def test_tensors_of_its_lanes_take_memory_until_they_are_freed() -> None:
    """Views, results in place and what the host allocates take none."""
    machine = find_machine("twin:memory=64KiB")
    lanes = open_lanes(machine)
    memory, retained = machine.memory, list[torch.Tensor]()
    assert memory is not None
    outside = torch.zeros(1 << 20)

    def allocate() -> None:
        selected = torch.empty(8 * KIB, dtype=torch.uint8)
        retained.append(selected[:16].view(torch.float32).add_(outside[:4]))
        retained.append(selected + 1)

    submitted(lanes[Lane.DEVICE], allocate)
    assert memory.used == 16 * KIB
    submitted(lanes[Lane.CPU], lambda: retained.append(torch.empty(1 << 20)))
    assert (memory.used, device_peak(machine).reserved) == (16 * KIB, 16 * KIB)
    del retained[1]
    gc.collect()
    assert memory.used == 8 * KIB
    retained.clear()
    submitted(lanes[Lane.H2D], lambda: retained.append(torch.empty(60 * KIB, dtype=torch.uint8)))
    assert memory.used == 60 * KIB
    with pytest.raises(torch.OutOfMemoryError, match=r"twin out of memory: 8.0KiB more than 60.0KiB of 64.0KiB"):
        submitted(lanes[Lane.DEVICE], lambda: retained.append(torch.empty(8 * KIB, dtype=torch.uint8)))
    assert (memory.used, device_peak(machine).allocated) == (60 * KIB, 60 * KIB)
    for lane in lanes.values():
        lane.close()


def test_arenas_take_memory_too() -> None:
    machine = find_machine("twin:memory=64KiB")
    assert machine.memory is not None
    sizes = {"dense": ("device", 40 * KIB), "kv": ("host", 1 << 20), "transient": ("device", 40 * KIB)}
    announced = Footprint(arenas=tuple(ArenaSize(purpose=k, tier=tier, bytes=n) for k, (tier, n) in sizes.items()))
    arenas = allocate_for(machine, announced)
    assert (machine.memory.used, machine.device_memory_bytes()) == (40 * KIB, 24 * KIB)
    with pytest.raises(BudgetError, match=r"the machine has no 40.0KiB left on tier device for dense"):
        allocate_for(machine, announced)
    del arenas
    gc.collect()
    assert machine.memory.used == 0
