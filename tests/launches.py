"""Counts what a card would be given by the tasks of a pass on the twin: kernels, copies, and waits of the host.

The twin's device tasks are sent through a device's path: Triton's programs, interpreted, and torch's operators. An
operator counts as one kernel, a view and an allocation as none; an operator that is several kernels on a card (a sort)
counts as one all the same.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from triton.runtime import interpreter

from moelight.core.schedule import Lane, Task, TaskKind
from moelight.kernels import arguments, native
from moelight.kernels.gpu import routing
from moelight.models.moe import table_of
from moelight.runtime import moe_ops
from moelight.runtime.lanes import Outcome
from moelight.runtime.ops import Operations

# What comes up as a tensor of its own: on the twin it already lies where it is wanted, and nothing is copied.
BROUGHT = (TaskKind.LOAD_HIDDEN, TaskKind.LOAD_EXPERTS)
_ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::lift_fresh", "aten::set_")
_WAITS = {"aten::_local_scalar_dense": "item", "aten::nonzero": "nonzero"}


class Launches(TorchDispatchMode):
    """The launches, and the waits for the device, of one task, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, returns = function._schema.name, function._schema.returns
        view = any(item.alias_info is not None and not item.alias_info.is_write for item in returns)
        if wait := _WAITS.get(name):
            self.waits[wait] += 1
        result = function(*args, **(kwargs or {}))
        empty = isinstance(result, torch.Tensor) and not result.numel()
        if not (wait or view or empty or name.startswith(_ALLOCATIONS)):
            self.kernels[name.removeprefix("aten::")] += 1
        return result


Key = tuple[TaskKind, int, int]  # kind, layer, micro-batch


class Counted:
    """``passes``: the launches of every task of each pass."""

    def __init__(self) -> None:
        self.passes: list[dict[Key, Launches]] = []


def count_launches(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Count from now on, on engines with ``device="twin"`` and lanes of their own threads."""
    counted, bind, ran = Counted(), Operations.bind, interpreter.GridExecutor.__call__

    def run_program(self: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(mode := _get_current_dispatch_mode(), Launches):
            mode.kernels[self.fn.__name__] += 1
        with _disable_current_modes():
            ran(self, *args, **kwargs)

    def bound(self: Operations, *inputs: Any) -> Callable[[Task], Callable[[], Outcome]]:
        perform = bind(self, *inputs)
        tasks: dict[Key, Launches] = {}
        counted.passes.append(tasks)

        def wrap(task: Task) -> Callable[[], Outcome]:
            work = perform(task)
            if task.lane not in (Lane.DEVICE, Lane.H2D, Lane.D2H) or task.kind.moves_page:
                return work

            def run() -> Outcome:
                with (launches := Launches()):
                    outcome = work()
                if task.kind in BROUGHT and outcome is None:
                    launches.kernels["to"] += 1
                tasks[task.kind, task.layer, task.micro_batch] = launches
                return outcome

            return run

        return wrap

    def waiting(name: str) -> Callable[..., Any]:
        read = getattr(torch.Tensor, name)

        def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if isinstance(mode := _get_current_dispatch_mode(), Launches):
                mode.waits[name] += 1
            with _disable_current_modes():
                return read(self, *args, **kwargs)

        return noted

    for name in ("tolist", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, waiting(name))
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_program)
    monkeypatch.setattr(Operations, "bind", bound)
    monkeypatch.setattr(native, "on_cpu", lambda _: threading.current_thread().name != "moelight-device")
    monkeypatch.setattr(moe_ops, "grouped_pages", lambda weights, _, by: table_of(weights, by))
    for module in (arguments, routing):  # indices in a device's memory are not checked
        monkeypatch.setattr(module, "check_indices", lambda *_, **__: None)
    monkeypatch.setattr(arguments, "check_offsets", lambda *_: None)
    return counted
