"""CUDA graphs: the kernels of a task that repeats from pass to pass are recorded once, and launched together later.

It pays where a pass is bound by its launches: a few rows on resident weights (`Graphs.serves` has the rule). A graph
repeats addresses. Those of weights, arenas and tables of pages are in its key; a tensor that lies elsewhere in every
pass is copied to a fixed place before (`Graphs.run`), and what later tasks read is copied to one. Rows of a pass have
their own places, so the order of tasks that keeps arenas right (`executor._MEETS`, the schedule's dependencies) keeps
these right too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moelight.hrm.footprint import GRAPH_ROWS
from moelight.kernels.device import Device

MOST_GRAPHS = 512
_MOST_SEEN = 16 * MOST_GRAPHS
GRAPHS_PER_LAYER = 2  # of a micro-batch: up to attention, and after it
Compute = Callable[..., Sequence[Tensor]]

_log = logging.getLogger(__name__)


class Recorder(Protocol):
    """Records the launches of a stream."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run ``work`` without carrying out what it launches; return a function that launches all of it. Raises
        RuntimeError if something in it cannot be recorded; nothing was carried out then either."""
        ...

    def finish(self) -> None:
        """Wait until nothing recorded is running; what is recorded later shares nothing with it."""
        ...


class CudaRecorder:
    """Records the current stream of the calling thread; other threads go on launching and allocating."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # of the temporaries of all graphs, which never run at once

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with Device(self._device).context():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # the capture is invalid; it must end all the same
                    graph.capture_end()
                raise
            graph.capture_end()
        self._pool = self._pool or graph.pool()
        return graph.replay

    def finish(self) -> None:
        Device(self._device).current_stream().synchronize()
        self._pool = None  # it ends with the last graph that uses it


@dataclass(frozen=True, slots=True)
class _Graph:
    """``launch`` repeats the recorded work from ``inputs`` to ``outputs``; ``keeps`` holds what its addresses name."""

    launch: Callable[[], None]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    keeps: object


class Graphs:
    """The graphs of one engine's device lane, which alone calls `run`.

    A task is recorded when its key comes for the second time, so that the first has compiled and chosen its kernels.
    At `MOST_GRAPHS` all are dropped: their sizes are those of an earlier time. After a failure none are recorded.
    """

    def __init__(self, recorder: Recorder, *, rows: int, max_graphs: int = MOST_GRAPHS) -> None:
        """``rows``: the most rows of a pass that are served."""
        self._recorder, self._rows, self._most = recorder, min(rows, GRAPH_ROWS), max_graphs
        self._found: dict[Hashable, _Graph] = {}
        self._seen: set[Hashable] = set()
        self._places: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}
        self._failed = False

    def serves(self, *, rows: int, micro_batches: int, layers: int) -> bool:
        """True if graphs are used in a pass of so many ``rows``, which all decode, and of which the host reads no
        routing: at most `GRAPH_ROWS`, in few enough micro-batches that every task can have its graph."""
        graphs = GRAPHS_PER_LAYER * layers * micro_batches
        return not self._failed and rows <= self._rows and graphs <= self._most

    def placed(self, name: str, row: int, tensor: Tensor) -> Tensor:
        """``tensor`` [T, ...], copied to its place: the rows from ``row`` on of the tensor ``name``."""
        return self._place(name, row, tensor).copy_(tensor)

    def run(
        self, key: Hashable, compute: Compute, inputs: Sequence[Tensor], *, name: str, row: int, keeps: object = None
    ) -> Sequence[Tensor]:
        """``compute(*inputs)``, a function of its inputs and of addresses that ``key`` determines while ``keeps`` is
        kept. Inputs and outputs [T, ...] belong to the rows from ``row`` on of the pass; in a graph they have places
        there that all graphs called ``name`` share."""
        graph = self._found.get(key)
        if graph is None:
            if self._failed or key not in self._seen:
                if len(self._seen) >= _MOST_SEEN:
                    self._seen.clear()
                self._seen.add(key)
                return self._eager(compute, inputs, name, row)
            graph = self._record(key, compute, inputs, name, row, keeps)
            if graph is None:
                return compute(*inputs)
        for buffer, tensor in zip(graph.inputs, inputs, strict=True):
            buffer.copy_(tensor)
        graph.launch()
        return graph.outputs

    def _eager(self, compute: Compute, inputs: Sequence[Tensor], name: str, row: int) -> Sequence[Tensor]:
        """Makes the places, too: memory that is allocated during a recording belongs to the graphs."""
        outputs = compute(*inputs)
        for kind, tensors in (("input", inputs), ("output", outputs)):
            for index, tensor in enumerate(tensors):
                self._place(f"{name} {kind} {index}", row, tensor)
        return outputs

    def _record(
        self, key: Hashable, compute: Compute, inputs: Sequence[Tensor], name: str, row: int, keeps: object
    ) -> _Graph | None:
        if len(self._found) >= self._most:
            self.forget()
        places = [self._place(f"{name} input {index}", row, tensor) for index, tensor in enumerate(inputs)]
        outputs: list[Tensor] = []

        def work() -> None:
            for index, made in enumerate(compute(*places)):
                outputs.append(self._place(f"{name} output {index}", row, made).copy_(made))

        try:
            launch = self._recorder.record(work)
        except RuntimeError as error:
            self._failed = True
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            _log.warning("CUDA graphs are off from here on, recording one failed: %s", reason)
            return None
        self._found[key] = graph = _Graph(launch, places, outputs, keeps)
        return graph

    def forget(self) -> None:
        """Drop all graphs, once none is running; their keys need be seen anew."""
        self._recorder.finish()
        self._found, self._seen = {}, set()

    def _place(self, name: str, row: int, like: Tensor) -> Tensor:
        key = name, like.shape[1:], like.dtype
        if key not in self._places:
            self._places[key] = torch.empty((self._rows, *like.shape[1:]), dtype=like.dtype, device=like.device)
        return self._places[key][row : row + len(like)]


def graphs_of(device: torch.device, rows: int) -> Graphs | None:
    """Graphs for passes of at most ``rows`` rows on ``device``; None if it has none."""
    if not Device(device).nvidia:
        return None
    return Graphs(CudaRecorder(device), rows=rows)
