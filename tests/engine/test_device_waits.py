"""Tasks of a device launch: none reads what the device computes, or copies to it from memory that is not page-locked,
because the thread that launches would stop until the device has caught up.

The twin's tensors are in host memory, where reading costs nothing, so what a card would wait for is found by the calls
and operators that read: inside of tasks, in all orders. The grouped kernels are interpreted where tokens are compared;
elsewhere they are launched and not run, so experts add nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.core.schedule import Lane, Task, TaskKind
from moelight.engine.engine import Engine
from moelight.engine.experts import ExpertOptions
from moelight.experts import predict
from moelight.experts.policy import CacheRules, Capacity, ExpertPolicy, PrefetchRules
from moelight.experts.trace import read_rows
from moelight.hrm import schedule_time
from moelight.hrm.schedule_time import ON_DEMAND_SCHEDULES
from moelight.kernels import arguments
from moelight.kernels.device import Device
from moelight.kernels.gpu import routing, serving
from moelight.kernels.products import Workspace
from moelight.models.moe import table_of
from moelight.runtime import moe_ops
from moelight.runtime.host_copy import HostCopy
from moelight.runtime.lanes import Outcome
from moelight.runtime.on_demand import PassPages
from moelight.runtime.ops import Operations
from moelight.scheduler import SCHEDULES
from tests.cases import thorough
from tests.engines import Tiny

READS = ("tolist", "numpy", "cpu", "__array__")
OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique", "_unique2", "lift_fresh")
STREAMS = (Lane.DEVICE, Lane.H2D, Lane.D2H)
PROMPTS = [[65, 3, 9], [70], [12, 44]]
HOW = SamplingParams(max_tokens=2, ignore_eos=True)
HOMES = {"resident": Shares(device=1.0), "streaming": Shares(device=0.2, host=0.4, disk=0.4)}
CASES = [(schedule, homes) for schedule in SCHEDULES.names() for homes in HOMES]
CASES += [(schedule, "on demand") for schedule in ON_DEMAND_SCHEDULES]
RUN = [("cgopipe", "on demand"), ("flexgen", "streaming"), ("module", "streaming"), ("module", "on demand")]


class Waits(TorchDispatchMode):
    """Notes, for each task of a stream that runs within it, what a card would make its thread wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocking: list[str] = []
        self.kinds: set[TaskKind] = set()
        self.launches, self.runs = 0, True  # kernels are launched; and run
        self._here = threading.local()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        masks = [item for item in args[1] or () if item is not None] if name.startswith("index") else ()
        if name in OPERATORS or any(isinstance(mask, Tensor) and mask.dtype == torch.bool for mask in masks):
            self.note(name)
        return function(*args, **(kwargs or {}))

    def note(self, label: str) -> None:
        if (task := getattr(self._here, "task", None)) is not None:
            self.blocking.append(f"{task.name} on {task.lane}: {label}")

    @contextmanager
    def inside(self, task: Task | None) -> Iterator[None]:
        outer, self._here.task = getattr(self._here, "task", None), task
        try:
            yield
        finally:
            self._here.task = outer

    def task(self) -> Task | None:
        return getattr(self._here, "task", None)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Watches the tasks of every engine of a test, whose experts run by the grouped kernels."""
    if not serving.triton_available() or not serving.interpreting():
        pytest.skip("triton does not interpret its kernels here")
    from triton.runtime import interpreter

    waits, bind = Waits(), Operations.bind

    def watched(self: Operations, pass_pages: PassPages, *calls: Any) -> Callable[[Task], Callable[[], Outcome]]:
        perform = bind(self, pass_pages, *calls)

        def wrap(task: Task) -> Callable[[], Outcome]:
            work = perform(task)

            def run() -> Outcome:
                waits.kinds.add(task.kind)
                with waits, waits.inside(task if task.lane in STREAMS else None):
                    return work()

            return run

        return wrap

    def noted(name: str) -> Callable[..., Any]:
        read = getattr(Tensor, name)

        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            waits.note(name)
            return read(self, *args, **kwargs)

        return call

    def unwatched(call: Callable[..., Any], *, but: Lane | None = None) -> Callable[..., Any]:
        def quiet(*args: Any, **kwargs: Any) -> Any:
            task = waits.task()
            if but is not None and task is not None and task.lane is but:
                waits.note(call.__qualname__)
            with waits.inside(None):
                return call(*args, **kwargs)

        return quiet

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        waits.launches += 1
        if waits.runs:
            with waits.inside(None):
                run_grid(self, *args, **kwargs)

    run_grid = interpreter.GridExecutor.__call__
    for name in READS:
        monkeypatch.setattr(Tensor, name, noted(name))
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    monkeypatch.setattr(Operations, "bind", watched)
    monkeypatch.setattr(HostCopy, "wait", unwatched(HostCopy.wait, but=Lane.DEVICE))  # threads that fetch may wait
    for method in ("landed", "pinned"):
        monkeypatch.setattr(Device, method, unwatched(getattr(Device, method)))
    monkeypatch.setattr(moe_ops, "grouped_pages", lambda weights, _, by: table_of(weights, by))
    # Arguments in host memory are checked; on a device nothing reads them.
    monkeypatch.setattr(arguments, "check_offsets", lambda *_: None)
    monkeypatch.setattr(arguments, "check_indices", lambda *_: None)
    monkeypatch.setattr(routing, "check_indices", lambda *_: None)
    return waits


def test_the_watch_sees_what_waits(waits: Waits) -> None:
    values = torch.arange(4)
    for read in (
        values.tolist,
        values.numpy,
        values.cpu,
        values[0].item,
        lambda: bool(values[1]),
        lambda: values[values > 1],
        values.nonzero,
        lambda: torch.tensor([1, 2]),
        HostCopy(values).wait,
    ):
        before = len(waits.blocking)
        with waits, waits.inside(Task(kind=TaskKind.ROUTE, lane=Lane.DEVICE)):
            read()
        assert len(waits.blocking) > before, read
    before = len(waits.blocking)
    with waits, waits.inside(Task(kind=TaskKind.ROUTE, lane=Lane.DEVICE)):
        values[values.flip(0)] += torch.where(values > 1, values, 2 * values)
    assert len(waits.blocking) == before


def tokens_of(policy: Policy, experts: ExpertOptions | None = None) -> list[tuple[int, ...]]:
    options = {} if experts is None else {"experts": experts}
    with Engine(policy, device="twin" if policy.discrete else "cpu", **options) as engine:  # type: ignore[arg-type]
        return [item.token_ids for item in engine.generate(PROMPTS, HOW)]


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Path:
    return tiny("mixtral", num_hidden_layers=2, num_local_experts=5, num_experts_per_tok=2, hidden_size=32)


@pytest.fixture(scope="module")
def truth(model: Path) -> list[tuple[int, ...]]:
    return tokens_of(Policy(model=str(model), batch_size=1, micro_batch_size=1, schedule="serial"))


def policy_of(model: Path, schedule: str, homes: str, **changes: Any) -> Policy:
    """Every pass is one of several micro-batches; without prompts of its own where they would attend on the device."""
    sizes = {"batch_size": 3, "micro_batch_size": 2, "micro_batch_tokens": 4, "kv_tokens": 600}
    attention = {"attention_device": "gpu"} if schedule.startswith("flexgen") and schedule != "flexgen-c" else {}
    weights = HOMES.get(homes, HOMES["streaming"])
    return Policy(
        model=str(model), schedule=schedule, ffn_device="gpu", weights=weights, **sizes, **attention, **changes
    )


@pytest.mark.parametrize(("schedule", "homes"), thorough(CASES, but=RUN))
def test_no_task_of_a_device_waits_for_it(
    model: Path, truth: list[tuple[int, ...]], waits: Waits, schedule: str, homes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ``module`` the rows of a pass take several parts."""
    monkeypatch.setattr(schedule_time, "ROUTED_ONLY_SHARE", 0.0 if homes == "on demand" else 1.0)
    monkeypatch.setattr(Workspace, "room_for", lambda *_: 8)
    waits.runs = (schedule, homes) in RUN
    assert (tokens_of(policy_of(model, schedule, homes)) == truth) == waits.runs
    assert not waits.blocking, "\n".join(sorted(set(waits.blocking)))
    assert waits.launches > 0
    assert (TaskKind.SEND_EXPERTS in waits.kinds) == (homes == "on demand")
    assert (TaskKind.SEND_PAGE in waits.kinds) == (homes != "resident"), "prompts fill a pass of all pages"


@pytest.mark.parametrize("schedule", ["cgopipe", "module"])
def test_nor_does_what_is_predicted_and_recorded(
    model: Path, waits: Waits, schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers of coming layers run ahead, residents change, and all routing is written to a trace."""
    monkeypatch.setattr(schedule_time, "ROUTED_ONLY_SHARE", 0.0)
    monkeypatch.setattr(predict, "SURE", 0.0)
    waits.runs = False
    asked = ExpertPolicy(
        name="mine",
        cache=CacheRules(capacity=Capacity(value=4)),
        prefetch=PrefetchRules(strategy="next_router", budget=3),
    )
    trace = tmp_path / "trace.jsonl"
    options = ExpertOptions(policy=asked, trace=trace, record=True)
    tokens_of(policy_of(model, schedule, "streaming", residents="learned"), options)
    assert not waits.blocking, "\n".join(sorted(set(waits.blocking)))
    assert {TaskKind.PREDICT_EXPERTS, TaskKind.SEND_AHEAD} <= waits.kinds
    computed = sum(map(len, PROMPTS)) + len(PROMPTS) * (HOW.max_tokens - 1)
    rows = list(read_rows(trace))
    assert [sum(len(row.ids) for row in rows if row.layer == layer) for layer in range(2)] == [2 * computed] * 2
