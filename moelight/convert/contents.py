"""The contents of a checkpoint with rounded experts: its tensors, where their numbers come from, their places in
shards. Names, shapes and bytes only; `convert.checkpoint` reads, rounds and writes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from moelight.core.dtypes import BY_SAFETENSORS
from moelight.core.errors import CheckpointError, ConfigError
from moelight.formats.format import ITEM_BYTES, Format
from moelight.profiles.families import FAMILIES
from moelight.profiles.names import TensorNames
from moelight.weights.loose_experts import MATRICES_BY_SPELLING
from moelight.weights.source import Checkpoint
from moelight.weights.tensor_info import TensorInfo

_LENGTH_BYTES = 8
_WEIGHT = ".weight"
# Modules of single experts, in the spellings of hubs.
_EXPERT = re.compile(r"(?:.*\.)?experts\.\d+\.(?:gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_OF_EXPERTS = re.compile(r"(?:.*\.)?experts\..*")
EXPERTS_TARGET = r"re:.*\.experts\.\d+\..*"
# Matrices outside the experts that may be rounded: neither routers, which decide, nor embeddings and output.
_DENSE = ("q", "k", "v", "o", "qkv", "q_a", "q_b", "kv_a", "dense_gate", "dense_up", "dense_down")
_SHARED = ("shared_gate", "shared_up", "shared_down")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MOST_NUMBERS = 24  # of experts in a pattern, which readers may bound in length
Chosen = Set[tuple[int, int]]  # layers and experts of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Stored bytes ``source`` and what is made of them: tensors of ``stored``, or a copy under the name ``module``."""

    source: TensorInfo
    module: str
    stored: Format | None = None

    def outputs(self) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
        """``(suffix, dtype, shape, bytes)`` of each; raises ConfigError if the matrix has no such format."""
        if self.stored is None:
            yield "", self.source.dtype, self.source.shape, self.source.nbytes
            return
        for part in self.stored.tensors(*self.source.shape):
            yield part.suffix, part.dtypes[0], part.shape, part.nbytes


def safetensors_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The beginning of a file of ``tensors`` (name, dtype, shape), up to the first, whose place is a multiple of 8."""
    entries, begin = {}, 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


@dataclass(frozen=True)  # no slots: places are computed once
class Shard:
    """A file of ``pieces``; ``name`` is its own."""

    name: str
    pieces: tuple[Piece, ...]

    @cached_property
    def places(self) -> Mapping[str, tuple[int, int]]:
        """Offset in the file and bytes of each tensor."""
        start = len(self.header)
        return {name: (start + begin, end - begin) for name, (_, _, begin, end) in self._tensors.items()}

    @cached_property
    def header(self) -> bytes:
        """The beginning of the file, up to the first tensor, whose place is a multiple of 8."""
        return safetensors_header([(name, dtype, shape) for name, (dtype, shape, *_) in self._tensors.items()])

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(size for _, size in self.places.values())

    @cached_property
    def _tensors(self) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
        """Wider numbers first, so that each tensor begins at a multiple of its numbers' bytes."""
        tensors = [
            (piece.module + suffix, dtype, shape, size)
            for piece in self.pieces
            for suffix, dtype, shape, size in piece.outputs()
        ]
        placed, begin = {}, 0
        for name, dtype, shape, size in sorted(tensors, key=lambda entry: (-ITEM_BYTES.get(entry[1], 8), entry[0])):
            placed[name] = (dtype, shape, begin, begin + size)
            begin += size
        return placed


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionPlan:
    """All shards; the patterns of modules outside the experts that are rounded, and of those that stay as they are."""

    shards: tuple[Shard, ...]
    dense: tuple[str, ...]
    ignored: tuple[str, ...]

    def index(self) -> bytes:
        """The contents of the index file."""
        weight_map = {name: shard.name for shard in self.shards for name in shard.places}
        total = sum(size for shard in self.shards for _, size in shard.places.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        return (json.dumps(index, indent=2) + "\n").encode()

    @property
    def rounded_numbers(self) -> int:
        return sum(math.prod(piece.source.shape) for piece in self._rounded())

    @property
    def rounded_bytes(self) -> int:
        """Bytes that the rounded numbers take, scales included."""
        return sum(size for piece in self._rounded() for *_, size in piece.outputs())

    def _rounded(self) -> Iterator[Piece]:
        return (piece for shard in self.shards for piece in shard.pieces if piece.stored is not None)


def plan_conversion(
    checkpoint: Checkpoint,
    model_type: str,
    experts: Format,
    dense: Format | None,
    shard_bytes: int,
    keep: Chosen = frozenset(),
) -> ConversionPlan:
    """The shards of ``checkpoint`` with ``experts`` but those to ``keep``, and ``dense`` matrices (None: they stay)
    rounded, each of at most ``shard_bytes`` unless a single tensor is larger.

    Raises CheckpointError for experts that cannot be written as one module each, ConfigError for matrices that the
    format cannot hold or a family whose dense matrices are not known.
    """
    family = FAMILIES.get(model_type)
    if dense is not None and family is None:
        raise ConfigError(f"--dense: which matrices of {model_type} may be rounded is not known; leave the option out")
    sorting = _Sorting(checkpoint, None if family is None else family.names, model_type, experts, dense, keep)
    pieces = [piece for info in sorting.tensors for piece in sorting.pieces(info)]
    _check_pieces(pieces, checkpoint)
    rounded = {_pattern(piece.module) for piece in pieces if piece.stored is dense and dense is not None}
    kept_modules = {
        _pattern(piece.module.removesuffix(_WEIGHT))
        for piece in pieces
        if piece.stored is None and piece.module.endswith(_WEIGHT) and len(piece.source.shape) == 2
        if not _EXPERT.fullmatch(piece.module)
    }
    return ConversionPlan(
        shards=_shards(pieces, shard_bytes),
        dense=tuple(sorted(rounded)),
        ignored=(*sorted(kept_modules - rounded), *_patterns(keep)),
    )


def experts_of(pieces: Iterable[Piece]) -> dict[tuple[int, int], dict[str, TensorInfo]]:
    """Gate, up and down of the experts among ``pieces``, by layer and expert."""
    experts: dict[tuple[int, int], dict[str, TensorInfo]] = {}
    for piece in pieces:
        if (of := expert_of(piece)) is not None:
            experts.setdefault(of[0], {})[of[1]] = piece.source
    return experts


def expert_of(piece: Piece) -> tuple[tuple[int, int], str] | None:
    """Layer and expert, and ``gate``, ``up`` or ``down``, of a matrix of an expert."""
    name = piece.module if piece.stored is None else piece.module + _WEIGHT
    if not _EXPERT.fullmatch(name):
        return None
    return _numbers_of(name), MATRICES_BY_SPELLING[name.removesuffix(_WEIGHT).rpartition(".")[2]]


def _numbers_of(name: str) -> tuple[int, int]:
    """The layer and the number of an expert: the last two numbers of the ``name`` of a matrix."""
    layer, expert = (0, *map(int, _NUMBER.findall(name)))[-2:]
    return layer, expert


class _Sorting:
    """Sorts the tensors of a checkpoint, in their order on the disk, into what is rounded and what is copied."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: TensorNames | None,
        model_type: str,
        experts: Format,
        dense: Format | None,
        keep: Chosen,
    ) -> None:
        self._keep = keep
        self.tensors = sorted(checkpoint.tensors.values(), key=lambda info: (str(info.file), info.offset))
        self._names, self._model_type, self._experts, self._dense = names, model_type, experts, dense
        spelled: tuple[str, ...] = (
            ()
            if names is None
            else tuple(spelling for part in (*_DENSE, *_SHARED) for spelling in getattr(names, part))
        )
        self._dense_names = _matcher(spelled)
        self._fused = (
            {}
            if names is None
            else {
                ("gate", "up"): _matcher(names.fused_gate_up),
                ("down",): _matcher(names.fused_down),
            }
        )
        stacked = any(matcher.fullmatch(info.name) for matcher in self._fused.values() for info in self.tensors)
        # transformers renames routers when it stacks experts; names of a file are all of one kind.
        self._routers = _matcher(names.router[1:] if names is not None and stacked else ())

    def pieces(self, info: TensorInfo) -> Iterator[Piece]:
        if _EXPERT.fullmatch(info.name) and len(info.shape) == 2:
            yield self._expert(info, info.name)
            return
        for parts, matcher in self._fused.items():
            if (match := matcher.fullmatch(info.name)) and len(info.shape) == 3:
                yield from self._unstacked(info, parts, int(match["layer"]))
                return
        if len(info.shape) >= 2 and (_OF_EXPERTS.fullmatch(info.name) or len(info.shape) > 3):
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} {list(info.shape)} holds experts of {self._model_type} in a form "
                "that cannot be written as one module for each matrix; use a checkpoint with experts apart"
            )
        if self._dense is not None and len(info.shape) == 2 and self._dense_names.fullmatch(info.name):
            yield self._rounded(info, info.name, self._dense)
        elif self._names is not None and (match := self._routers.fullmatch(info.name)):
            yield Piece(source=info, module=self._names.router[0].format(layer=match["layer"]))
        else:
            yield Piece(source=info, module=info.name)

    def _unstacked(self, info: TensorInfo, parts: tuple[str, ...], layer: int) -> Iterator[Piece]:
        """The matrices of a stack [experts, rows of all ``parts``, columns]."""
        assert self._names is not None
        count, rows, columns = info.shape
        for expert in range(count):
            one = replace(info.part(expert, count), shape=(rows, columns))
            for number, part in enumerate(parts):
                name = getattr(self._names, part)[0].format(layer=layer, expert=expert)
                yield self._expert(one.part(number, len(parts)), name)

    def _expert(self, info: TensorInfo, name: str) -> Piece:
        """The matrix ``name`` of an expert."""
        if _numbers_of(name) in self._keep:
            return Piece(source=info, module=name)
        return self._rounded(info, name, self._experts)

    def _rounded(self, info: TensorInfo, name: str, stored: Format) -> Piece:
        if info.dtype not in BY_SAFETENSORS:
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} has dtype {info.dtype}, and only {', '.join(BY_SAFETENSORS)} is "
                "rounded; use the checkpoint that is not quantised"
            )
        piece = Piece(source=info, module=name.removesuffix(_WEIGHT), stored=stored)
        try:
            stored.tensors(*info.shape)
        except ConfigError as error:
            raise ConfigError(f"{info.file}: tensor {info.name!r} {list(info.shape)}: {error}") from None
        return piece


def _check_pieces(pieces: Iterable[Piece], checkpoint: Checkpoint) -> None:
    seen: dict[str, Piece] = {}
    for piece in pieces:
        if piece.module in seen:
            first = seen[piece.module].source
            raise CheckpointError(
                f"{piece.source.file}: tensor {piece.source.name!r} and tensor {first.name!r} (in {first.file.name}) "
                "are two spellings of the same weights; save the model again, with one of them"
            )
        seen[piece.module] = piece
    if not any(_EXPERT.fullmatch(name + _WEIGHT) for name in seen):
        raise CheckpointError(f"{checkpoint.listing}: no experts there, so there is nothing to round")


def _shards(pieces: Iterable[Piece], max_bytes: int) -> tuple[Shard, ...]:
    groups: list[list[Piece]] = [[]]
    filled = 0
    for piece in pieces:
        size = sum(nbytes for *_, nbytes in piece.outputs())
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(piece)
        filled += size
    count = len(groups)
    return tuple(
        Shard(f"model-{number:05}-of-{count:05}.safetensors", tuple(group)) for number, group in enumerate(groups, 1)
    )


def _matcher(spellings: Iterable[str]) -> re.Pattern[str]:
    """Names of the templates ``spellings``, with the group ``layer``; matches none without any."""
    escaped = (re.escape(spelling).replace(r"\{layer\}", r"\d+") for spelling in spellings)
    joined = "|".join(escaped)
    return re.compile(rf"(?=\D*(?P<layer>\d+)?)(?:{joined})" if joined else r"(?!)")


def _patterns(chosen: Chosen) -> Iterator[str]:
    """Return patterns that match the modules of the experts ``chosen``, under every name that a library gives their
    block."""
    for layer, pairs in groupby(sorted(chosen), key=lambda pair: pair[0]):
        expert_ids = [str(expert) for _, expert in pairs]
        for begin in range(0, len(expert_ids), _MOST_NUMBERS):
            some = "|".join(expert_ids[begin : begin + _MOST_NUMBERS])
            yield rf"re:.*\.{layer}\..*experts\.(?:{some})\."


def _pattern(module: str) -> str:
    """The target of ``module`` and of those that differ in the numbers of layers."""
    parts = [re.escape(part) for part in _NUMBER.split(module)]
    any_number = r"\d+".join(parts)
    return f"re:{any_number}$" if len(parts) > 1 else module
