"""A recorder of graphs on the twin: it repeats recorded calls with the tensors that were recorded, as a card repeats
addresses. What was not declared as an input therefore keeps the value of the recording, and tokens go wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

_WAITS = ("aten::_local_scalar_dense", "aten::nonzero")
_RUN = interpreter.GridExecutor.__call__


class _Recording(TorchDispatchMode):
    """``steps`` repeat what was called; `undo` restores what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], object]] = []
        self._before: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, kwargs = function._schema, kwargs or {}
        if schema.name in _WAITS:
            raise RuntimeError("operation not permitted when stream is capturing")
        for argument, value in zip(schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.save(value)
        for name in kwargs:
            if name == "out":
                self.save(kwargs[name])
        result = function(*args, **kwargs)
        made = schema.returns and all(item.alias_info is None for item in schema.returns)
        if not schema.name.startswith("aten::empty"):
            self.steps.append(partial(_again, function, args, kwargs, result if made else None))
        return result

    def save(self, value: object) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)


def _again(function: Any, args: Any, kwargs: Any, made: Any) -> None:
    """``made``: the recorded results, which get the new ones; None if the function writes where it did."""
    results = function(*args, **kwargs)
    if made is not None:
        for old, new in zip(tree_leaves(made), tree_leaves(results), strict=True):
            old.copy_(new)


class TwinRecorder:
    """``replays`` counts the launches of what was recorded."""

    def __init__(self) -> None:
        self.recorded = self.replays = self.finished = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        recording = _Recording()

        def run_program(executor: Any, *args: Any, **kwargs: Any) -> None:
            recording.steps.append(partial(_RUN, executor, *args, **kwargs))
            with _disable_current_modes():
                recording.save(args)
                _RUN(executor, *args, **kwargs)

        try:
            # A card does not compute while it records; whatever lies in the places of inputs is computed with here.
            patched = mock.patch.object(interpreter.GridExecutor, "__call__", run_program)
            with patched, np.errstate(all="ignore"), recording:
                work()
        finally:
            recording.undo()
        self.recorded += 1
        return partial(self._replay, recording.steps)

    def _replay(self, steps: list[Callable[[], object]]) -> None:
        self.replays += 1
        for step in steps:
            step()

    def finish(self) -> None:
        self.finished += 1
