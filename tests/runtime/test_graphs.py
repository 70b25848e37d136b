"""Graphs: recorded at the second sight, replayed with new inputs, dropped when there are too many, off after a failure.

On the twin a recorder repeats recorded calls with recorded tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moelight.runtime.graphs import GRAPHS_PER_LAYER, CudaRecorder, Graphs
from tests.graphs import TwinRecorder

ROWS = 8


class Layer:
    """Adds an input to a state of fixed place, and returns a product: what a task of a pass does."""

    def __init__(self, device: str = "cpu") -> None:
        self.state, self.calls = torch.zeros(ROWS, 3, device=device), 0

    def run(self, graphs: Graphs, inputs: Tensor, row: int = 0, *, key: object = "k") -> Tensor:
        state = self.state[row : row + len(inputs)]

        def compute(inputs: Tensor) -> Sequence[Tensor]:
            self.calls += 1
            state.add_(inputs)
            return (state * 2,)

        (result,) = graphs.run((key, row, len(inputs)), compute, (inputs,), name="layer", row=row)
        return result


def test_a_task_is_recorded_at_the_second_sight_and_then_replayed() -> None:
    recorder, layer = TwinRecorder(), Layer()
    graphs, expected = Graphs(recorder, rows=ROWS), torch.zeros(2, 3)
    for sight in range(1, 6):
        inputs = torch.randn(2, 3)
        expected += inputs
        assert torch.equal(layer.run(graphs, inputs), expected * 2)
        assert torch.equal(layer.state[:2], expected)
        assert (layer.calls, recorder.replays) == (min(sight, 2), max(0, sight - 1))


@pytest.mark.gpu
def test_a_card_repeats_what_it_recorded() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device, layer = torch.device("cuda", torch.cuda.current_device()), Layer("cuda")
    graphs, expected = Graphs(CudaRecorder(device), rows=ROWS), torch.zeros(2, 3)
    torch.cuda.synchronize()
    with torch.Stream(device=device) as stream:
        for sight in range(1, 6):
            inputs = torch.randn(2, 3)
            expected += inputs
            result = layer.run(graphs, inputs.to(device))
            stream.synchronize()
            assert torch.equal(result.cpu(), expected * 2)
            assert layer.calls == min(sight, 2)


def test_other_rows_have_other_graphs_and_places() -> None:
    recorder, layer = TwinRecorder(), Layer()
    graphs, inputs = Graphs(recorder, rows=ROWS), torch.ones(3, 3)
    for _ in range(3):
        first, second = layer.run(graphs, inputs), layer.run(graphs, inputs * 2, 3)
    assert first.eq(6).all() and second.eq(12).all()
    assert recorder.recorded == 2
    layer.run(graphs, inputs[:1])  # fewer rows are another task
    assert recorder.recorded == 2


def test_a_failure_is_told_once_and_ends_recording(caplog: pytest.LogCaptureFixture) -> None:
    recorder, layer = TwinRecorder(), Layer()
    graphs = Graphs(recorder, rows=ROWS)
    assert graphs.serves(rows=1, micro_batches=1, layers=1)

    def waits(inputs: Tensor) -> Sequence[Tensor]:
        layer.state[:1] += inputs
        return (inputs * inputs.sum().item(),)

    with caplog.at_level(logging.WARNING):
        for sight in range(1, 4):
            (result,) = graphs.run("waits", waits, (torch.ones(1, 3),), name="layer", row=0)
            assert result.eq(3).all()
            assert layer.state[0].eq(sight).all(), "a failed recording left something behind"
            layer.run(graphs, torch.zeros(1, 3))
    assert [record.getMessage() for record in caplog.records] == [
        "CUDA graphs are off from here on, recording one failed: operation not permitted when stream is capturing"
    ]
    assert recorder.recorded == recorder.replays == 0
    assert not graphs.serves(rows=1, micro_batches=1, layers=1)


def test_too_many_graphs_are_dropped_when_none_runs() -> None:
    recorder, layer = TwinRecorder(), Layer()
    graphs, inputs = Graphs(recorder, rows=ROWS, max_graphs=2), torch.ones(1, 3)
    for key in "aabbcc":
        layer.run(graphs, inputs, key=key)
    assert (recorder.recorded, recorder.finished) == (3, 1)
    before = recorder.replays
    layer.run(graphs, inputs, key="c")
    assert recorder.replays == before + 1
    layer.run(graphs, inputs, key="a")  # forgotten
    assert recorder.replays == before + 1
    assert layer.state[0].eq(8).all()


def test_a_pass_is_served_where_every_task_can_have_its_graph() -> None:
    graphs = Graphs(TwinRecorder(), rows=ROWS, max_graphs=GRAPHS_PER_LAYER * 4 * 3)
    assert graphs.serves(rows=ROWS, micro_batches=3, layers=4)
    assert not graphs.serves(rows=ROWS + 1, micro_batches=3, layers=4)
    assert not graphs.serves(rows=ROWS, micro_batches=4, layers=4)
