"""Operations on tensors without data say where each number comes from, as the same operations on numbers do."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moelight.weights.boxes import NotMovedError, Tiled, TiledTensor, UnequalError
from moelight.weights.source import TensorInfo

Operation = Callable[[Tensor], Tensor]


def stored(name: str, shape: tuple[int, ...], dtype: str = "F32") -> TiledTensor:
    info = TensorInfo(name=name, file=Path("x"), dtype=dtype, shape=shape, offset=0, nbytes=0)
    return TiledTensor.over(Tiled.of(info), torch.float32)


def copied(boxes: Tiled, values: Tensor) -> Tensor:
    """The tensor that ``boxes`` describe, made of ``values``; each of its places is filled once."""
    made, times = torch.full(boxes.shape, -1.0), torch.zeros(boxes.shape)
    for box in boxes.boxes:
        position = tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))
        made[position] = values.reshape(-1).as_strided(box.shape, box.strides, box.offset)
        times[position] += 1
        assert box.offset + box.span <= values.numel()
    assert torch.equal(times, torch.ones(boxes.shape))
    return made


def divisors(count: int, draw: random.Random) -> list[int]:
    shape = []
    for _ in range(3):
        shape.append(draw.choice([index for index in range(1, count + 1) if count % index == 0]))
        count //= shape[-1]
    return [*shape, count]


def operation(tensor: Tensor, draw: random.Random) -> Operation:
    """One that can be done to ``tensor``."""
    dim, other = draw.randrange(tensor.dim()), draw.randrange(tensor.dim())
    index, shape = draw.randrange(tensor.shape[dim]), divisors(tensor.numel(), draw)
    order = draw.sample(range(tensor.dim()), tensor.dim())
    choices: list[Operation] = [
        lambda x: x.transpose(dim, other).contiguous(),
        lambda x: x.permute(order),
        lambda x: torch.chunk(x, 2, dim=dim)[-1],
        lambda x: torch.split(x, [index, x.shape[dim] - index], dim=dim)[1].clone(),
        lambda x: torch.cat([x, x], dim=dim),
        lambda x: torch.stack([x, x], dim=dim - tensor.dim()),
        lambda x: x.reshape(shape),
        lambda x: x.unsqueeze(dim),
        lambda x: x[tensor.shape[0] // 2 :],
    ]
    if tensor.dim() > 1:
        choices += [lambda x: torch.unbind(x, dim)[index], lambda x: x.select(dim, index), lambda x: x.squeeze(dim)]
    return draw.choice(choices)


@pytest.mark.parametrize("seed", range(100))
def test_boxes_go_where_numbers_go(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.choice([1, 2, 3, 4, 6]) for _ in range(draw.randrange(1, 4)))
    values = torch.arange(torch.Size(shape).numel()).float().view(shape)
    tensor, boxes = values, stored("a", shape)
    for _ in range(draw.randrange(1, 7)):
        if tensor.numel() <= 1000 and tensor.dim() <= 6:
            apply = operation(tensor, draw)
            tensor, boxes = apply(tensor), apply(boxes)
    assert boxes.shape == tensor.shape
    assert torch.equal(copied(boxes.tiled, values), tensor)


@pytest.mark.parametrize(
    "compute", [lambda x: x * 2, lambda x: x.sum(0), lambda x: x.to(torch.float16), lambda x: x[::2]]
)
def test_what_does_not_move_whole_runs_is_refused(compute: Operation) -> None:
    with pytest.raises(NotMovedError):
        compute(stored("a", (4, 4)))


def test_tensors_of_other_shapes_or_dtypes_are_named() -> None:
    for other in (stored("b", (2, 4)), stored("b", (2, 3), "BF16")):
        with pytest.raises(UnequalError) as caught:
            torch.stack([stored("a", (2, 3)), other])
        assert (caught.value.info.name, caught.value.first.name) == ("b", "a")


def test_numbers_moved_one_by_one_are_refused() -> None:
    with pytest.raises(NotMovedError, match="one by one"):
        stored("a", (2, 1 << 17)).transpose(0, 1).reshape(-1)
