"""Finds the weights of a graph model in its checkpoint, in any spelling that transformers loads, and reads all but the
expert pages into an arena.

transformers' table of conversions (names, merges, splits, transpositions) is run on tensors without data (`boxes`), so
that every parameter is a list of places in stored tensors, and every expert page some runs of stored numbers, which it
keeps as they are. transformers loads nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from moelight.core.dtypes import BY_SAFETENSORS, FLOAT32, DType
from moelight.core.errors import CheckpointError, ConfigError
from moelight.core.schedule import Page
from moelight.core.units import align_up
from moelight.formats.registry import SUFFIXES
from moelight.hrm.costs import TENSOR_ALIGNMENT
from moelight.kernels.stored_weight import StoredWeight, as_parameter
from moelight.models.graph.families import ExpertForm
from moelight.profiles.quantization import Kept
from moelight.weights.boxes import Box, NotMovedError, Tiled, TiledTensor, UnequalError
from moelight.weights.expert_pages import ExpertPages, lay_out_pages
from moelight.weights.faults import Faults
from moelight.weights.ignored import COMPUTED, NOT_READ, OTHER_PART, PREDICTION, IgnoreRule, set_aside
from moelight.weights.load import BOUNCE_BYTES, TensorReader, check_bytes, check_tie, read_stack, values_between
from moelight.weights.loose_experts import LooseExperts, layer_of, loose_experts
from moelight.weights.page_layout import Places, ScatteredError, in_a_row, lay_out, piece_names
from moelight.weights.source import Checkpoint, IgnoredTensor
from moelight.weights.tensor_info import StoredMatrix, TensorInfo
from moelight.weights.tensor_map import open_needed, plain_matrices
from moelight.weights.torch_dtypes import from_torch, to_torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FLOATING = {name: to_torch(dtype) for name, dtype in BY_SAFETENSORS.items()}
_WHOLE = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_STORED = _FLOATING | _WHOLE
_NUMBER = re.compile(r"\d+$")


class Model(Protocol):
    """The part of `GraphModel` that weight mapping uses."""

    module: nn.Module
    moe_layers: tuple[bool, ...]
    experts: tuple[nn.Module, ...]
    forms: tuple[ExpertForm, ...]
    pages: tuple[tuple[str, ...], ...]
    multiplied: frozenset[str]


def paged(model: Model) -> Iterator[tuple[int, ExpertForm, dict[str, str]]]:
    """Each layer of ``model`` with experts: its number, the form of its experts, and by the names of their parameters
    in the form those in ``model.module``."""
    paths = {part: path for path, part in model.module.named_modules()}
    layers = [layer for layer, follow in enumerate(model.moe_layers) if follow]
    for layer, part, form in zip(layers, model.experts, model.forms, strict=True):
        yield layer, form, {name: f"{paths[part]}.{name}" for name in form.names()}


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseTensor:
    """A parameter or persistent buffer of the module outside experts.

    Attributes:
        names: in the module; several if it is tied.
        shape: of the parameter.
        dtype: that it keeps whatever the computation's is; None: the computation's.
        wide: float32 in a computation in float16.
        boxes: the stored numbers that tile it.
        spare: the same numbers, stored once more under a tied name.
        stack: the stored matrices, below one another, by which the CPU can multiply without unpacking them; empty if
            there are none.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    wide: bool
    boxes: tuple[Box, ...]
    spare: TensorInfo | None = None
    stack: tuple[StoredMatrix, ...] = ()

    def dtype_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the tensor where ``dtype`` is computed in."""
        return self.dtype or (torch.float32 if self.wide and dtype == torch.float16 else dtype)

    def nbytes(self, dtype: torch.dtype, *, as_stored: bool = False) -> int:
        """Bytes in a computation in ``dtype``; ``as_stored``: of the stack, if there is one."""
        if as_stored and self.stack:
            return sum(matrix.kept_bytes for matrix in self.stack)
        return torch.Size(self.shape).numel() * self.dtype_in(dtype).itemsize


def in_pages(model: Model) -> set[str]:
    """The names of the parameters of ``model.module`` that pages hold."""
    of_experts = (paths.values() for _, _, paths in paged(model))
    return {name for names in (*of_experts, *model.pages) for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphWeightMap:
    """The places of all weights of a graph model.

    Attributes:
        dtype: of pages of floats, and of most other tensors.
        dense: all tensors outside expert pages, in the order of the module; each at a multiple of 64 bytes of
            the arena.
        experts: the pages of experts; of a dense model, those of layers.
        initial: persistent buffers that the checkpoint may lack and does, which the family's initialisation computes.
        ignored: stored tensors that are not read.
    """

    dtype: DType
    dense: tuple[DenseTensor, ...]
    experts: ExpertPages
    initial: tuple[str, ...]
    ignored: tuple[IgnoredTensor, ...] = ()

    def kept_as(self, name: str) -> Kept | None:
        """The format and bytes of the matrices that stay as they are stored in place of tensor ``name``, outside pages;
        None if none do."""
        stack = next((tensor.stack for tensor in self.dense if tensor.names[0] == name), ())
        return (stack[0].stored, sum(matrix.kept_bytes for matrix in stack)) if stack else None

    def dense_bytes(self, dtype: torch.dtype, *, as_stored: bool = False) -> int:
        """Bytes of the arena in a computation in ``dtype``."""
        return sum(align_up(tensor.nbytes(dtype, as_stored=as_stored), TENSOR_ALIGNMENT) for tensor in self.dense)


def locate_weights(directory: Path, model: Model) -> GraphWeightMap:
    """Find every weight of ``model`` in the checkpoint of ``directory``: under the names of transformers 4 or 5, with
    experts loose or fused. The page of a dense model's layer is expert 0.

    Raises:
        CheckpointError: for the first fault (missing, stored twice, left over, mis-shaped, of an unsupported or another
            dtype, experts in pieces), with the number of the others.
    """
    return weights_in(matrices_of(directory, model), model)


def matrices_of(directory: Path, model: Model) -> Checkpoint:
    """The checkpoint in ``directory`` as one of plain matrices, without what ``model`` does not read."""
    module: Any = model.module
    state = module.state_dict()
    rename, _ = renamer(module, state)

    def is_needed(name: str) -> bool:
        parts = (name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix))
        spelled = (name, *(spelling for part in parts for spelling in (part, f"{part}.weight")))
        return any(rename(spelling)[0] in state for spelling in spelled)

    patterns = not_read(module)
    rules = (IgnoreRule(re.compile(f".*(?:{pattern.removeprefix('^')}).*"), reason) for pattern, reason in patterns)
    checkpoint = set_aside(open_needed(directory, is_needed), rules, is_needed)
    return plain_matrices(checkpoint, from_torch(module.dtype).name)


def weights_in(checkpoint: Checkpoint, model: Model) -> GraphWeightMap:
    """`locate_weights` in a ``checkpoint`` of plain matrices."""
    conversion = _Conversion(checkpoint, model.module)
    return _Audit(checkpoint, model, conversion).weight_map()


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredValues:
    """The stored numbers of a model by parameter.

    Attributes:
        parameters: outside experts, by a name in the module; of tied ones the first that is stored.
        experts: of each layer by its number in the names of parameters, the matrices and biases of each expert
            (``gate``, ``up``, ``down``, ``gate_bias``, ...), upright.
        stacks: the parameters of experts; none of those that are stored one by one.
    """

    parameters: Mapping[str, Tiled]
    experts: Mapping[int, Sequence[Mapping[str, Tiled]]]
    stacks: Mapping[str, Tiled]

    @property
    def files(self) -> set[Path]:
        """The files that hold them."""
        experts = (tensor for rows in self.experts.values() for row in rows for tensor in row.values())
        tensors = (*self.parameters.values(), *experts)
        return {box.info.file for tensor in tensors for box in tensor.boxes}


def stored_values(checkpoint: Checkpoint, model: Model) -> StoredValues:
    """The numbers of all parameters of ``model`` in a ``checkpoint`` of plain matrices; raises as `locate_weights`."""
    conversion = _Conversion(checkpoint, model.module)
    audit = _Audit(checkpoint, model, conversion)
    audit.weight_map()
    experts = {}
    for _, form, paths in paged(model):
        rows = audit.experts_of(form, paths)
        assert rows is not None, "the audit has raised"
        experts[int(layer_of(next(iter(paths.values()))).rpartition(".")[2])] = rows
    of_experts = {path for _, _, paths in paged(model) for path in paths.values()}
    state = model.module.state_dict(keep_vars=True)
    seen: set[int] = set()
    parameters = {}
    for name, tensor in conversion.tensors.items():
        if name not in of_experts and id(state[name]) not in seen:
            seen.add(id(state[name]))
            parameters[name] = tensor
    stacks = {name: conversion.tensors[name] for name in of_experts if name in conversion.tensors}
    return StoredValues(parameters=parameters, experts=experts, stacks=stacks)


def stored_numbers(reader: TensorReader, tensor: Tiled) -> Tensor:
    """The numbers of ``tensor`` in float32."""
    result = torch.empty(tensor.shape)
    for box in tensor.boxes:
        _read(reader, box, result, torch.float32)
    return result


@dataclass(slots=True)
class _Sources:
    """The stored tensors of one group of parameters: alone under ``None``, or by the pattern of a conversion."""

    by_pattern: dict[str | None, list[TensorInfo]] = field(default_factory=dict)

    def infos(self) -> list[TensorInfo]:
        return [info for infos in self.by_pattern.values() for info in infos]


class _Conversion:
    """The stored tensors assigned to parameters by transformers' rules, and put through its operations.

    Attributes:
        tensors: by the parameter's name, all that were found.
        sources: the stored tensors of each, for messages.
        left: stored tensors that no rule assigns, with the names that the rules give them.
        faults: what is wrong.
    """

    def __init__(self, checkpoint: Checkpoint, module: nn.Module) -> None:
        self.tensors: dict[str, Tiled] = {}
        self.sources: dict[str, list[TensorInfo]] = {}
        self.left: list[tuple[str, TensorInfo]] = []
        config: Any = module.config
        layers = config.get_text_config().num_hidden_layers
        described = f"{config.model_type}, num_hidden_layers {layers}"
        self.faults = Faults(checkpoint, described, layers=layers, experts=0)
        self._checkpoint, self._module = checkpoint, module
        self._state = module.state_dict()
        groups, converters = self._assigned()
        for target, group in groups.items():
            self._convert(target, group, converters)

    def _assigned(self) -> tuple[dict[str, _Sources], dict[str, Any]]:
        """Sources by the first parameter of each group, and the conversion of each pattern."""
        from transformers.core_model_loading import WeightConverter, dot_natural_key

        rename, transforms = renamer(self._module, self._state)
        groups: dict[str, _Sources] = {}
        for name in sorted(self._checkpoint.tensors, key=dot_natural_key):
            target, pattern = rename(name)
            info = self._checkpoint.tensors[name]
            if target in self._state:
                groups.setdefault(target, _Sources()).by_pattern.setdefault(pattern, []).append(info)
            else:
                self.left.append((target, info))
        converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        return groups, {pattern: converter for converter in converters for pattern in converter.source_patterns}

    def _convert(self, target: str, group: _Sources, converters: Mapping[str, Any]) -> None:
        infos = group.infos()
        self.sources[target] = infos
        if any(info.dtype not in _STORED for info in infos):
            return  # the audit names it
        patterns = [pattern for pattern in group.by_pattern if pattern is not None]
        if twice := _stored_twice(group):
            self.faults.twice(*twice)
        elif not patterns:
            self.tensors[target] = Tiled.of(infos[0])
        elif absent := self._absent(target, group, converters[patterns[0]]):
            self.missing(absent)
        else:
            self._apply(target, group, converters[patterns[0]])

    def _absent(self, target: str, group: _Sources, converter: Any) -> str:
        """The name of a tensor that is missing among those to be put together; empty if none is."""
        for pattern in converter.source_patterns:
            if pattern not in group.by_pattern:
                stem = target.partition(converter.target_patterns[0])[0]
                return stem.rstrip(".") + "." + pattern.replace("*", "0").replace("\\", "").lstrip(".")
            if "*" in pattern and (gap := _gap([info.name for info in group.by_pattern[pattern]])):
                return gap
        return ""

    def _apply(self, target: str, group: _Sources, converter: Any) -> None:
        """Run the operations of ``converter`` on the tensors of ``group``."""
        converter = deepcopy(converter)
        for pattern, infos in group.by_pattern.items():
            for info in infos:
                tensor = TiledTensor.over(Tiled.of(info), _STORED[info.dtype])
                converter.add_tensor(target, info.name, pattern, tensor)
        first = group.infos()[0]
        try:
            converted = converter.convert(target, model=self._module, config=self._module.config)
        except UnequalError as error:
            self.faults.add(
                f"{error.info.file}: tensor {error.info.name!r} ({error.info.dtype} {list(error.info.shape)}) "
                f"differs from tensor {error.first.name!r} ({error.first.dtype} {list(error.first.shape)}), with which "
                f"it makes {target!r}; save the model again, with all of them in one dtype and shape"
            )
        except NotMovedError as error:
            self.faults.add(
                f"{first.file}: tensor {first.name!r} becomes {target!r} by {error}, which moelight does not do; "
                "save the model with transformers 5 and save_original_format=False"
            )
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, ValueError) as error:
            self.faults.add(
                f"{first.file}: tensor {first.name!r} {list(first.shape)} cannot be made {target!r} "
                f"({str(error).splitlines()[0]}); check config.json"
            )
        else:
            for name, tensor in converted.items():
                if name not in self._state:
                    self.left.append((name, first))
                    continue
                self.tensors[name] = (tensor[0] if isinstance(tensor, list) else tensor).tiled
                self.sources[name] = group.infos()

    def missing(self, name: str) -> None:
        """A fault: tensor ``name`` is missing."""
        self.faults.missing(name, tuple(self._state[name].shape) if name in self._state else ())


def renamer(module: nn.Module, state: dict[str, Any]) -> tuple[Any, Sequence[Any]]:
    """transformers' rules for ``module``, whose parameters are ``state``: a function from a stored name to the name of
    a parameter and the pattern of the conversion that makes it, or None; and all rules."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    model: PreTrainedModel = module  # type: ignore[assignment]
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]

    def rename(name: str) -> tuple[str, str | None]:
        renamed = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if renamed[0] not in state and name in state:
            return rename_source_key(name, [], [], model.base_model_prefix, state)
        return renamed

    return rename, transforms


def _stored_twice(group: _Sources) -> tuple[TensorInfo, TensorInfo] | None:
    """Two tensors of ``group`` that say the same."""
    plain = group.by_pattern.get(None, [])
    loose = [info for pattern, infos in group.by_pattern.items() if pattern is not None for info in infos]
    if plain and loose:
        return plain[0], loose[0]
    for pattern, infos in group.by_pattern.items():
        if len(infos) > 1 and (pattern is None or "*" not in pattern):
            return infos[0], infos[1]
    return None


def _gap(names: Sequence[str]) -> str:
    """The first name missing in ``names``, which are numbered from 0 on in one place; empty if there is none."""
    parts = [name.split(".") for name in names]
    first, last = parts[0], parts[-1]
    position = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), None)
    if position is None:
        return ""
    for index, part in enumerate(parts):
        wanted = [*first[:position], _NUMBER.sub(str(index), first[position]), *first[position + 1 :]]
        if part != wanted:
            return ".".join(wanted)
    return ""


class _Audit:
    """Checks what `_Conversion` found against the module, and divides it into pages and the rest."""

    def __init__(self, checkpoint: Checkpoint, model: Model, conversion: _Conversion) -> None:
        self._checkpoint, self._model, self._conversion = checkpoint, model, conversion
        self._module: Any = model.module
        self._faults = conversion.faults
        self._state = model.module.state_dict(keep_vars=True)
        self._paged = list(paged(model))
        self._of_pages = in_pages(model)
        self._loose: dict[str, LooseExperts] = {}  # by layer

    def weight_map(self) -> GraphWeightMap:
        """The map; raises CheckpointError for the first fault."""
        self._claim_loose_experts()
        ignored = self._left_over()
        dtype = self._dtype()
        dense, initial = self._dense(dtype)
        places: dict[int, Places] = {}
        pages: dict[Page, tuple[TensorInfo, ...]] = {}
        layers = [self._tensors_of_layer(names, dtype) for names in self._model.pages]
        of_layers = [run for tensors in layers for tensor in tensors for run in _runs_of(tensor)]
        keeps = _is_quantised(of_layers) and all(_can_be_kept(run) for run in of_layers)
        for layer, form, paths in self._paged:
            rows = self.experts_of(form, paths)
            if rows and (laid_out := self._laid_out(rows)):
                places[layer] = laid_out[0]
                pages.update({Page(layer=layer, expert=expert): runs for expert, runs in enumerate(laid_out[1])})
        for layer, tensors in enumerate(layers):
            places[layer], pages[Page(layer=layer, expert=0)] = _page_of_layer(tensors, keeps=keeps)
        self._faults.raise_first()
        return GraphWeightMap(
            dtype=dtype,
            dense=dense,
            experts=lay_out_pages(pages, places, dense=bool(layers), unpacks=bool(layers) and not keeps),
            initial=initial,
            ignored=ignored,
        )

    def _claim_loose_experts(self) -> None:
        """Take experts that are stored one by one where a stack is missing."""
        loose = loose_experts(self._conversion.left)
        for _, _, paths in self._paged:
            layer = layer_of(next(iter(paths.values())))
            if layer not in loose or any(path in self._conversion.sources for path in paths.values()):
                continue
            self._loose[layer] = loose[layer]
            infos = list(loose[layer].values())
            self._conversion.sources.update(dict.fromkeys(paths.values(), infos))
            claimed = {info.name for info in infos}
            self._conversion.left = [entry for entry in self._conversion.left if entry[1].name not in claimed]

    def _experts_one_by_one(
        self, form: ExpertForm, paths: Mapping[str, str], loose: LooseExperts
    ) -> list[dict[str, Tiled]] | None:
        """The matrices of each expert; None, and faults, if one is missing or of another shape, or an expert is one too
        many."""
        shapes = form.shapes({name: tuple(self._state[path].shape) for name, path in paths.items()})
        first, complete = next(iter(loose.values())), True
        for expert in range(form.count):
            for name, shape in shapes.items():
                info = loose.get((expert, name))
                if info is None:
                    where = f"{layer_of(next(iter(paths.values())))}: the {name} of expert {expert}"
                    self._faults.add(
                        f"{first.file}: {where} is missing, though tensor {first.name!r} is there; the experts are not "
                        "all in the files: save the model again"
                    )
                elif info.shape != shape:
                    self._faults.add(
                        f"{info.file}: tensor {info.name!r} has shape {list(info.shape)}, but config.json asks for "
                        f"{list(shape)}"
                    )
                complete &= info is not None and info.shape == shape
        for (expert, name), info in loose.items():
            if expert >= form.count or name not in shapes:
                self._faults.left_over(info)
        if not complete:
            return None
        return [{name: Tiled.of(loose[expert, name]) for name in shapes} for expert in range(form.count)]

    def _dtype(self) -> DType:
        """The dtype of pages; faults for tensors of another one."""
        used = {info.name: (info, target) for target, infos in self._conversion.sources.items() for info in infos}
        of_pages = Counter(info.dtype for info, target in used.values() if target in self._of_pages)
        common = (of_pages or Counter(info.dtype for info, _ in used.values())).most_common(1)
        name = common[0][0] if common and common[0][0] in BY_SAFETENSORS else FLOAT32.safetensors
        for info, target in used.values():
            stored = f"{info.file}: tensor {info.name!r} has dtype {info.dtype}"
            floating = self._state[target].is_floating_point()
            if info.dtype not in (_FLOATING if floating else _WHOLE):
                supported = ", ".join(_FLOATING if floating else _WHOLE)
                self._faults.add(f"{stored}; supported: {supported}")
            elif floating and info.dtype != name and target in self._of_pages:
                self._faults.add(f"{stored}, others of its kind {name}; save the model again with them in one dtype")
        return BY_SAFETENSORS[name]

    def _left_over(self) -> tuple[IgnoredTensor, ...]:
        """The tensors that are not read; faults for others without a parameter."""
        patterns = tuple(not_read(self._module))
        ignored, left = list(self._checkpoint.ignored), []
        for name, info in self._conversion.left:
            if reason := next((reason for pattern, reason in patterns if re.search(pattern, name)), None):
                ignored.append(IgnoredTensor(info=info, reason=reason))
            else:
                left.append(info)
        directory = self._checkpoint.directory
        elsewhere = _of_other_parts(directory, left) if left and directory.is_dir() else set()
        for info in left:
            if info.name in elsewhere:
                ignored.append(IgnoredTensor(info=info, reason=OTHER_PART))
            else:
                self._faults.left_over(info)
        return tuple(ignored)

    def _dense(self, dtype: DType) -> tuple[tuple[DenseTensor, ...], tuple[str, ...]]:
        """Every tensor outside pages, and the names of those that are to be initialised."""
        tied: dict[int, list[str]] = {}
        for name, tensor in self._state.items():
            if name not in self._of_pages:
                tied.setdefault(id(tensor), []).append(name)
        absent = list(self._module._keys_to_ignore_on_load_missing or ())
        dense, initial = [], []
        for names in tied.values():
            if any(name in self._conversion.sources for name in names):
                if tensor := self._dense_tensor(names, dtype):
                    dense.append(tensor)
            elif not isinstance(self._state[names[0]], nn.Parameter) and any(
                re.search(pattern, names[0]) for pattern in absent
            ):
                initial.append(names[0])
                dense.append(self._described(names, dtype, ()))
            else:
                self._conversion.missing(names[0])
        return tuple(dense), tuple(initial)

    def _dense_tensor(self, names: Sequence[str], dtype: DType) -> DenseTensor | None:
        stored = [name for name in names if name in self._conversion.tensors]
        shape = tuple(self._state[names[0]].shape)
        if not stored or not all(self._shaped(name, [shape]) for name in stored):
            return None
        tensor = self._described(names, dtype, self._conversion.tensors[stored[0]].boxes)
        if len(stored) == 1:
            return tensor
        first, spare = (self._conversion.sources[name] for name in stored[:2])
        if len(first) > 1 or len(spare) > 1 or first[0].dtype != spare[0].dtype or len(stored) > 2:
            self._faults.add(f"{first[0].file}: tensors {', '.join(map(repr, stored))} are tied, but all are stored")
            return None
        return replace(tensor, spare=spare[0], stack=())

    def _described(self, names: Sequence[str], dtype: DType, boxes: tuple[Box, ...]) -> DenseTensor:
        tensor: Tensor = self._state[names[0]]
        strict, wide = (
            any(re.search(pattern.replace("*", ".*"), names[0]) for pattern in patterns or ())
            for patterns in (self._module._keep_in_fp32_modules_strict, self._module._keep_in_fp32_modules)
        )
        keeps = not isinstance(tensor, nn.Parameter) and any(box.info.dtype == "F32" for box in boxes)
        stored_dtype: torch.dtype | None = None
        if not tensor.is_floating_point() or tensor.dtype != self._module.dtype:
            stored_dtype = tensor.dtype
        elif strict or (keeps and dtype is not FLOAT32):
            stored_dtype = torch.float32
        described = DenseTensor(
            names=tuple(names), shape=tuple(tensor.shape), dtype=stored_dtype, wide=wide, boxes=boxes
        )
        return replace(described, stack=self._stack(described, dtype))

    def _stack(self, tensor: DenseTensor, dtype: DType) -> tuple[StoredMatrix, ...]:
        """The matrices of ``tensor`` as `DenseTensor.stack`: of linear layers, and of embeddings whose rows are stored
        by themselves."""
        if not (tensor.boxes and self._model.multiplied.issuperset(tensor.names)) or _not_of_a_page(tensor, dtype):
            return ()
        runs = _runs_of(tensor)
        if not _is_quantised(runs) or not all(run.matrices and _can_be_kept(run) for run in runs):
            return ()
        stack = tuple(run.stored() for run in runs)
        modules = (self._module.get_submodule(name.rpartition(".")[0]) for name in tensor.names)
        if any(isinstance(module, nn.Embedding) for module in modules) and not _is_by_rows(stack):
            return ()
        return stack

    def _tensors_of_layer(self, names: Sequence[str], dtype: DType) -> list[DenseTensor]:
        """The matrices ``names`` of a layer's page, in the order of the files."""
        tensors: list[DenseTensor] = []
        for name in names:
            if name not in self._conversion.sources:
                self._conversion.missing(name)
            elif tensor := self._dense_tensor([name], dtype):
                if fault := _not_of_a_page(tensor, dtype):
                    self._faults.add(fault)
                else:
                    tensors.append(tensor)
        return sorted(tensors, key=_file_position)

    def _shaped(self, name: str, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether tensor ``name`` has one of ``shapes``; records a fault otherwise."""
        shape = self._conversion.tensors[name].shape
        if shape in shapes:
            return True
        infos = self._conversion.sources[name]
        subject = f"tensor {infos[0].name!r} has shape {list(infos[0].shape)}"
        if len(infos) > 1:
            subject = f"tensors {infos[0].name!r} … {infos[-1].name!r} make {name!r} {list(shape)}"
        elif shape != infos[0].shape:
            subject = f"tensor {infos[0].name!r} {list(infos[0].shape)} makes {name!r} {list(shape)}"
        self._faults.add(f"{infos[0].file}: {subject}, but config.json asks for {list(shapes[0])}")
        return False

    def experts_of(self, form: ExpertForm, paths: Mapping[str, str]) -> list[dict[str, Tiled]] | None:
        """The matrices of each expert by their names in `Places`, cut from the parameters ``paths`` of the module
        or stored one by one; None, and faults, if they are not as they should."""
        if loose := self._loose.get(layer_of(next(iter(paths.values())))):
            return self._experts_one_by_one(form, paths, loose)
        stacks: dict[str, list[Tiled]] = {}
        for name, path in paths.items():
            shape = tuple(self._state[path].shape)
            if path not in self._conversion.tensors:
                if path not in self._conversion.sources:
                    self._conversion.missing(path)
                continue
            stacked = shape[0] % form.count == 0 and len(shape) == 2 and name not in _biases(form)
            # Experts from the count on have no page, so they need not be stored.
            if self._shaped(path, [shape] if stacked else [shape, (form.count, *shape[1:])]):
                tensor = self._conversion.tensors[path]
                if stacked:
                    tensor = tensor.view((form.count, shape[0] // form.count, *shape[1:]))
                stacks[name] = tensor.unbind(0)
        if len(stacks) < len(paths):
            return None
        per_expert = ({name: tensor[expert] for name, tensor in stacks.items()} for expert in range(form.count))
        return [_matrices(form, tensors) for tensors in per_expert]

    def _laid_out(self, experts: Sequence[dict[str, Tiled]]) -> tuple[Places, list[tuple[TensorInfo, ...]]] | None:
        """The places in the pages of ``experts``, given the matrices of each, and the stored runs of each page; None,
        and a fault, if there are none or they differ."""
        layout: Places | None = None
        last_key: tuple[Any, ...] = ()
        runs: tuple[tuple[int, int, int], ...] = ()  # position of the tensor, first number from its first box on, count
        pages = []
        for expert, tensors in enumerate(experts):
            boxes = [(path, box) for path, tensor in tensors.items() for box in tensor.boxes]
            first: dict[str, Box] = {}
            for _, box in boxes:
                first.setdefault(box.info.name, box)
            order, bases = {name: index for index, name in enumerate(first)}, list(first.values())
            places = [(order[box.info.name], box.offset - first[box.info.name].offset) for _, box in boxes]
            key = tuple((path, box.start, box.shape, box.strides) for path, box in boxes), tuple(places)
            if key != last_key:
                try:
                    laid_out = lay_out(tensors)
                except ScatteredError as error:
                    self._faults.add(_not_a_page(error.info, f"the bytes of expert {expert} are not together"))
                    return None
                if layout not in (None, laid_out[0]):
                    self._faults.add(_not_a_page(bases[0].info, f"expert {expert} lies otherwise than those before"))
                    return None
                layout, last_key = laid_out[0], key
                runs = tuple(
                    (order[run.info.name], run.begin - first[run.info.name].offset, run.count) for run in laid_out[1]
                )
            pages.append(tuple(_run_of(bases[index], begin, count) for index, begin, count in runs))
        return (layout, pages) if layout else None


def _matrices(form: ExpertForm, tensors: Mapping[str, Tiled]) -> dict[str, Tiled]:
    """The matrices of one expert by their names in `Places`, of its ``tensors`` by the names in ``form``."""
    names = ("gate", "up") if form.gated else ("up",)
    inward = [_upright(tensors[matrix.name], matrix.transposed) for matrix in form.inward]
    matrices = dict(zip(names, _gate_and_up(inward, form), strict=True))
    matrices["down"] = _upright(tensors[form.outward.name], form.outward.transposed)
    if biases := [tensors[matrix.bias] for matrix in form.inward if matrix.bias is not None]:
        matrices |= {f"{name}_bias": bias for name, bias in zip(names, _gate_and_up(biases, form), strict=True)}
    if form.outward.bias is not None:
        matrices["down_bias"] = tensors[form.outward.bias]
    return matrices


def _upright(tensor: Tiled, transposed: bool) -> Tiled:
    return tensor.permute((1, 0)) if transposed else tensor


def _gate_and_up(inward: Sequence[Tiled], form: ExpertForm) -> Sequence[Tiled]:
    """The gate and up: given as two, or one after the other in one, or interleaved in one."""
    if len(inward) == 1 + form.gated:
        return inward
    both = inward[0]
    width = both.shape[0] // 2
    if form.interleaved:
        halves = both.view((width, 2, *both.shape[1:])).unbind(1)
        return [half.apart() for half in halves]
    return both.split(0, (width, width))


def _file_position(tensor: DenseTensor) -> tuple[str, int]:
    info = tensor.boxes[0].info
    first = next(iter(info.matrices[0].tensors.values())) if info.matrices else info
    return str(first.file), first.offset


def _page_of_layer(tensors: Sequence[DenseTensor], *, keeps: bool) -> tuple[Places, tuple[TensorInfo, ...]]:
    """The places of ``tensors`` in the page of a layer, and the runs of stored numbers that make it. ``keeps``: each of
    the stored matrices that make a tensor has a place of its own."""
    runs = [_runs_of(tensor) for tensor in tensors]
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor, some in zip(tensors, runs, strict=True):
        name, columns = tensor.names[0], tensor.shape[1]
        if keeps:
            rows = (box.shape[0] for box in tensor.boxes)
            shapes |= zip(piece_names(name, len(some)), ((count, columns) for count in rows), strict=True)
        else:
            shapes[name] = tensor.shape
    return in_a_row(shapes), tuple(run for some in runs for run in some)


def _runs_of(tensor: DenseTensor) -> list[TensorInfo]:
    """The stored numbers of each box of ``tensor``, which is in order."""
    return [_run_of(box, 0, torch.Size(box.shape).numel()) for box in tensor.boxes]


def _is_quantised(runs: Iterable[TensorInfo]) -> bool:
    return any(matrix.stored.is_quantised for run in runs for matrix in run.matrices)


def _is_by_rows(stack: Sequence[StoredMatrix]) -> bool:
    """Whether ``stack`` is one matrix, of which each row can be read by itself."""
    steps = (matrix.stored.rows_of_line(suffix) for matrix in stack for suffix in matrix.stored.names)
    return len(stack) == 1 and all(step in (0, 1) for step in steps)


def _can_be_kept(run: TensorInfo) -> bool:
    """Whether the numbers of ``run`` are rows of a stored matrix, and its values themselves."""
    if any(matrix.stored_as or matrix.stack > 1 for matrix in run.matrices):
        return False
    try:
        run.stored()
    except CheckpointError:
        return False
    return True


def _not_of_a_page(tensor: DenseTensor, dtype: DType) -> str:
    """A fault, if ``tensor`` cannot be read into a page as it is stored; else empty."""
    info, row = tensor.boxes[0].info, 0
    for box in tensor.boxes:
        if not box.in_order or box.start != (row, 0) or box.shape[1] != tensor.shape[1]:
            return _not_a_page(info, f"the rows of {tensor.names[0]!r} are not together")
        row += box.shape[0]
    if tensor.dtype is not None or tensor.wide:
        return _not_a_page(info, f"{tensor.names[0]!r} is kept in another dtype than {dtype.name}")
    return ""


def _not_a_page(info: TensorInfo, reason: str) -> str:
    return f"{info.file}: tensor {info.name!r}: {reason}, so they are no page; save the model again with transformers 5"


def _run_of(base: Box, begin: int, count: int) -> TensorInfo:
    """``count`` stored numbers of the tensor of ``base``, from number ``begin`` after the first of ``base`` on."""
    info, size = base.info, _STORED[base.info.dtype].itemsize
    if count * size == info.nbytes:
        return info
    return replace(info, shape=(count,), offset=info.offset + (base.offset + begin) * size, nbytes=count * size)


def _biases(form: ExpertForm) -> set[str | None]:
    return {matrix.bias for matrix in (*form.inward, form.outward)}


def not_read(module: Any) -> Iterator[tuple[str, str]]:
    """Patterns of names that the module has no parameter for, with the reason: those that its family lists, and buffers
    that old checkpoints hold and the module computes."""
    for pattern in module._keys_to_ignore_on_load_unexpected or ():
        yield pattern, PREDICTION if "mtp" in pattern or "layers" in pattern else NOT_READ
    buffers = [name for name, _ in module.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        yield r"rotary_emb\.inv_freq$", COMPUTED
    if any(name.endswith("position_ids") for name in buffers):
        yield r"(?:^|\.)position_ids$", COMPUTED


def _of_other_parts(directory: Path, left: Iterable[TensorInfo]) -> set[str]:
    """The names of those tensors of ``left`` that belong to other parts (vision, audio) of the composite model that
    config.json of ``directory`` describes."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    full_class = getattr(transformers, (config.architectures or [""])[0], None)
    if not config.sub_configs or full_class is None:
        return set()
    with torch.device("meta"):
        module = full_class(config)
    state = module.state_dict()
    rename, _ = renamer(module, state)
    return {info.name for info in left if rename(info.name)[0] in state}


def fill_weights(
    model: Model,
    weight_map: GraphWeightMap,
    arena: Tensor,
    dtype: torch.dtype,
    *,
    as_stored: bool = False,
    activations: str = "auto",
) -> None:
    """Read all weights outside expert pages: the module's parameters and buffers become views of ``arena`` (uint8, at
    least ``weight_map.dense_bytes``, contiguous, any device), computed buffers are on its device, and the experts'
    matrices stay on the meta device. ``as_stored``: matrices by which the CPU can multiply so stay as they are stored,
    and their products take ``activations``. Raises CheckpointError for an unreadable file, for tied weights that are
    stored twice and differ, and for numbers that float16 does not hold."""
    check_bytes(arena, weight_map.dense_bytes(dtype, as_stored=as_stored), "the arena")
    module: Any = model.module
    _compute_buffers(module, dtype, arena.device)
    unpacked: list[tuple[DenseTensor, Tensor]] = []
    used = 0
    for tensor in weight_map.dense:
        nbytes, kind = tensor.nbytes(dtype, as_stored=as_stored), tensor.dtype_in(dtype)
        room = arena[used : used + nbytes]
        used += align_up(nbytes, TENSOR_ALIGNMENT)
        if as_stored and tensor.stack:
            stack = read_stack(tensor.stack, room.split([matrix.kept_bytes for matrix in tensor.stack]))
            _place(module, tensor.names, StoredWeight.of(stack, kind, activations))
            continue
        unpacked.append((tensor, room.view(kind).view(tensor.shape)))
        _place(module, tensor.names, unpacked[-1][1])
    for name in weight_map.initial:
        part = module.get_submodule(name.rpartition(".")[0])
        with torch.no_grad():
            module._init_weights(part)
    files = (box.info.file for tensor in weight_map.dense for box in tensor.boxes)
    spares = (tensor.spare.file for tensor in weight_map.dense if tensor.spare)
    with TensorReader((*files, *spares), weight_map.dtype) as reader:
        for tensor, view in unpacked:
            for box in tensor.boxes:
                _read(reader, box, view, to_torch(weight_map.dtype))
            if view.dtype == torch.float16 and bool(view.isinf().any()):
                info = tensor.boxes[0].info
                raise CheckpointError(
                    f"{info.file}: tensor {info.name!r} has numbers that float16 does not hold; compute in float32 or "
                    "bfloat16"
                )
            if tensor.spare is not None:
                check_tie(reader, tensor.boxes[0].info, tensor.spare)
    _check_filled(module, in_pages(model))


def _read(reader: TensorReader, box: Box, target: Tensor, common: torch.dtype) -> None:
    """Fill the place of ``box`` in ``target``; ``common`` is the dtype that ``reader`` converts."""
    part = target[tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))]
    stored, count = _STORED[box.info.dtype], part.numel()
    size = stored.itemsize
    if box.info.matrices:
        part.copy_(values_between(box.info, box.offset, box.span, part.dtype).as_strided(box.shape, box.strides))
        return
    if box.in_order and part.is_contiguous():
        piece = _run_of(box, 0, count)
        if stored == common:
            reader.read(piece, part)
            return
        flat = part.view(-1)
        for begin in range(0, count, BOUNCE_BYTES // size):
            chunk = torch.empty(min(BOUNCE_BYTES // size, count - begin), dtype=stored)
            reader.fill(piece, begin * size, chunk.view(torch.uint8))
            flat[begin : begin + chunk.numel()].copy_(chunk)
        return
    span = torch.empty(box.span, dtype=stored)
    reader.fill(box.info, box.offset * size, span.view(torch.uint8))
    part.copy_(span.as_strided(box.shape, box.strides))


def _place(module: nn.Module, names: Sequence[str], view: Tensor) -> None:
    """Make ``view`` the parameter or buffer called ``names``."""
    parameter = as_parameter(view)
    for name in names:
        path, _, key = name.rpartition(".")
        owner = module.get_submodule(path)
        if key in owner._parameters:
            owner._parameters[key] = parameter  # type: ignore[assignment]
        else:
            owner._buffers[key] = view


def _compute_buffers(module: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Compute the buffers that checkpoints do not hold by the family's own initialisation, those of the module's own
    dtype in ``dtype``, and move them to ``device``. Raises ConfigError for one that is not computed."""
    from transformers import PreTrainedModel

    module_dtype, owner = module.dtype, {}
    for model in module.modules():
        if isinstance(model, PreTrainedModel):
            owner.update(dict.fromkeys(model.modules(), model))  # the innermost last
    for part, model in owner.items():
        held = {name: part._buffers.get(name) for name in part._non_persistent_buffers_set}
        fresh = {name: _unwritten(buffer, module_dtype, dtype) for name, buffer in held.items() if buffer is not None}
        if not fresh:
            continue
        part._buffers.update(fresh)
        with torch.no_grad():
            model._init_weights(part)
            if any(buffer is not None and _is_unwritten(buffer) for buffer in map(part._buffers.get, fresh)):
                model._init_weights(model)  # some compute the buffers of their parts
        for name in fresh:
            current = part._buffers[name]
            if not isinstance(current, Tensor) or _is_unwritten(current):
                raise ConfigError(
                    f"{module.config.model_type}: buffer {name!r} of {type(part).__name__} is neither stored nor "
                    "computed by its initialisation"
                )
            part._buffers[name] = current.to(device)


def _unwritten(buffer: Tensor, module_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Memory for ``buffer`` on the CPU, of numbers that no family computes."""
    if not buffer.is_floating_point():
        least = False if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).min
        return torch.full(buffer.shape, least, dtype=buffer.dtype)
    kind = dtype if buffer.dtype == module_dtype != torch.float32 else buffer.dtype
    return torch.full(buffer.shape, torch.nan, dtype=kind)


def _is_unwritten(buffer: Tensor) -> bool:
    if buffer.is_floating_point():
        return bool(buffer.isnan().any())
    return buffer.dtype != torch.bool and bool((buffer == torch.iinfo(buffer.dtype).min).any())


def _check_filled(module: Any, of_pages: set[str]) -> None:
    """Raise ConfigError if a tensor other than those ``of_pages`` has no numbers: how it is computed is not known."""
    for path, part in module.named_modules():
        for name, tensor in {**part._parameters, **part._buffers, **vars(part)}.items():
            full_name = f"{path}.{name}".lstrip(".")
            if isinstance(tensor, Tensor) and tensor.is_meta and full_name not in of_pages:
                raise ConfigError(f"{module.config.model_type}: {full_name} is not in the checkpoint")
