"""Faults of the tensors of a checkpoint, each reported in one line: the cause and what to do. Headers are checked
before (`source`), so every file that is listed is complete here: a tensor that is missing was named otherwise, or
config.json describes another model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moelight.core.errors import CheckpointError
from moelight.formats.registry import SUFFIXES
from moelight.weights.source import Checkpoint
from moelight.weights.tensor_info import TensorInfo

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_PREFIX_PARTS = 3  # ``model.layers.3``: two names that share them are of one layer


@dataclass(frozen=True, kw_only=True, slots=True)
class _Missing:
    name: str
    shape: tuple[int, ...]
    text: str


class Faults:
    """The faults of one checkpoint, in the order in which they were noticed.

    ``described``: what config.json says of the model, for people, beginning with ``model_type``; ``layers`` and
    ``experts``: how many it says there are.
    """

    def __init__(self, checkpoint: Checkpoint, described: str, *, layers: int, experts: int) -> None:
        self._checkpoint, self._described = checkpoint, described
        self._layers, self._experts = layers, experts
        self._noticed: list[str | _Missing] = []
        self._left: list[TensorInfo] = []

    def add(self, text: str) -> None:
        self._noticed.append(text)

    def twice(self, first: TensorInfo, second: TensorInfo) -> None:
        """Both hold the same weights."""
        self.add(
            f"{first.file}: tensor {first.name!r} and tensor {second.name!r} (in {second.file.name}) are two spellings "
            "of the same weights; save the model again, with one of them"
        )

    def missing(self, name: str, shape: Sequence[int], reason: str = "") -> None:
        """Tensor ``name`` is not among those of the checkpoint; ``reason``: the keys of config.json that ask for it."""
        shown = f" {list(shape)}" if shape else ""
        text = (
            f"{self._checkpoint.listing}: tensor {name!r}{shown} is missing, but config.json asks for it "
            f"({f'{reason}, ' if reason else ''}{self._described}); {self._missing_cure(name)}"
        )
        self._noticed.append(_Missing(name=name, shape=tuple(shape), text=text))

    def left_over(self, info: TensorInfo) -> None:
        """Record a tensor that is no parameter of the model."""
        self._left.append(info)

    def raise_first(self) -> None:
        """Raise CheckpointError for what explains most, with the number of the others; pass if there is nothing."""
        texts = [fault.text if isinstance(fault, _Missing) else fault for fault in self._noticed]
        texts += [self._left_text(info) for info in self._left[: 0 if texts else 1]]
        if not texts:
            return
        absent = [fault for fault in self._noticed if isinstance(fault, _Missing)]
        first = (absent and self._left and self._otherwise_named(absent)) or texts[0]
        more = len(self._noticed) + len(self._left) - 1
        line = first + (f" (and {more} more fault{'s' if more > 1 else ''})" if more else "")
        others = [text for text in (*texts, *map(self._left_text, self._left)) if text != first]
        raise CheckpointError(line, faults=(first, *dict.fromkeys(others)))

    def _otherwise_named(self, absent: Sequence[_Missing]) -> str:
        """The line if tensors that are missing seem to be there under other names; empty if none does."""
        for one in absent:
            module = one.name.removesuffix(".weight")
            if part := next((info for info in self._left if _is_part_of(info.name, module)), None):
                return (
                    f"{part.file}: tensor {part.name!r} belongs to a quantised matrix, and config.json does not say "
                    f"how {module!r} is quantised; take config.json from where the weights are from"
                )
        for one in absent:
            if other := _likest(one, self._left):
                return (
                    f"{other.file}: tensor {other.name!r} {list(other.shape)} has a name that is not read for "
                    f"{self._described}, while {one.name!r} {list(one.shape)} is missing: the weights seem to be there "
                    "under other names; save the model again with transformers' save_pretrained, or rename them"
                )
        return ""

    def _missing_cure(self, name: str) -> str:
        layers = _numbers(_LAYER, self._checkpoint.tensors)
        number = _LAYER.search(name)
        if number and layers and int(number[1]) > max(layers):
            return f"the files are complete and hold layers 0 to {max(layers)}: correct num_hidden_layers"
        expert, experts = _EXPERT.search(name), _numbers(_EXPERT, self._checkpoint.tensors)
        if expert and experts and int(expert[1]) > max(experts):
            return f"the files are complete and hold experts 0 to {max(experts)}: correct the number of experts"
        return "the files that are listed are complete: correct config.json, or use the weights that belong to it"

    def _left_text(self, info: TensorInfo) -> str:
        layer, expert = _LAYER.search(info.name), _EXPERT.search(info.name)
        cure = "correct config.json, or remove the tensor"
        if layer and int(layer[1]) >= self._layers:
            cure = f"layers there are 0 to {self._layers - 1}: correct num_hidden_layers"
        elif expert and self._experts and int(expert[1]) >= self._experts:
            cure = f"experts there are 0 to {self._experts - 1}: correct the number of experts"
        elif any(info.name.endswith(suffix) for suffix in SUFFIXES if suffix != ".weight"):
            cure = "it belongs to a quantised matrix that config.json does not describe: correct quantization_config"
        return (
            f"{info.file}: tensor {info.name!r} {list(info.shape)} has no place in the model config.json describes "
            f"({self._described}); {cure}"
        )


def _numbers(pattern: re.Pattern[str], names: Iterable[str]) -> set[int]:
    return {int(match[1]) for name in names if (match := pattern.search(name))}


def _is_part_of(name: str, module: str) -> bool:
    """True if ``name`` is a part of the matrix of ``module`` as a quantised one has it."""
    return any(name == module + suffix for suffix in SUFFIXES if suffix != ".weight")


def _likest(absent: _Missing, left: Sequence[TensorInfo]) -> TensorInfo | None:
    """The first of ``left`` that may be ``absent``: of its shape in the same layer, else any matrix of the layer."""
    layer = absent.name.split(".")[:_PREFIX_PARTS]
    near = [info for info in left if info.name.split(".")[:_PREFIX_PARTS] == layer]
    same = [info for info in near or left if info.shape == absent.shape]
    return next(iter(same or near), None)
