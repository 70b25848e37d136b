"""One stored matrix of a checkpoint: its tensors, found and checked, and their bytes, read into memory. Every fault is
a CheckpointError that names tensor and file. `kernels.quantized` gives the values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from moelight.core.errors import CheckpointError, ConfigError
from moelight.core.small_files import open_regular, read_error_text
from moelight.core.units import align_up
from moelight.formats.format import PAGE_ALIGNMENT, SHAPE, Format, TensorSpec
from moelight.formats.ggml import ggml_format
from moelight.formats.matrix import Matrix
from moelight.formats.registry import SUFFIXES
from moelight.profiles.gguf import GGMLTensor
from moelight.profiles.gguf_models import GGUFModel
from moelight.weights.tensor_info import TRANSPOSED, StoredMatrix, TensorInfo

TORCH = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.int32,
    "I64": torch.int64,
}
# Of the functions of values that some converters store in their place (float32).
INVERSES: Mapping[str, Callable[[Tensor, StoredMatrix], Tensor]] = {
    "plus_one": lambda stored, _: stored - 1,
    "negated_exp": lambda stored, _: torch.log(-stored),
    # Columns are heads, stored in rounds of one head of each group; the heads of a group follow one another.
    "heads_in_rounds": lambda stored, matrix: (
        stored.unflatten(1, (*matrix.rounds, -1)).transpose(1, 2).reshape(stored.shape)
    ),
    # Of modules that have a row for each input: all numbers at once, column by column.
    TRANSPOSED: lambda stored, _: stored.T.reshape(stored.shape),
}


def read_matrix(matrix: StoredMatrix, into: Tensor | None = None) -> Matrix[Tensor]:
    """``matrix`` in memory, as stored, without what repeats its shape; checks the values that say where others are.
    ``into``: uint8 [`kept_bytes`], in which its tensors are to lie."""
    tensors, at = {}, 0
    for suffix, info in matrix.tensors.items():
        room = None
        if into is not None and suffix != SHAPE:
            room, at = into[at : at + info.nbytes], at + align_up(info.nbytes, PAGE_ALIGNMENT)
        tensors[suffix] = read_tensor(info, room)
    shape = tensors.pop(SHAPE, None)
    if shape is not None and shape.tolist() != list(matrix.shape):
        raise matrix.error(SHAPE, f"says {shape.tolist()}, and the matrix is {list(matrix.shape)}")
    if matrix.stored.order:
        suffix = matrix.stored.names[3]
        check_group_order(matrix.tensors[suffix], tensors[suffix], matrix.stored.groups(matrix.columns))
    return Matrix(stored=matrix.stored, rows=matrix.rows, columns=matrix.columns, tensors=tensors)


def check_group_order(info: TensorInfo, order: Tensor, groups: int) -> None:
    """Raise CheckpointError if ``order``, the group of each column, which was read from ``info``, names one that is not
    among ``groups``."""
    least, maximum = map(int, order.aminmax())
    if least < 0 or maximum >= groups:
        wrong = least if least < 0 else maximum
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r} puts a column into group {wrong}, and there are {groups}; "
            "fetch the checkpoint again"
        )


def find_matrix(
    tensors: Mapping[str, TensorInfo],
    module: str,
    stored: Format,
    rows: int,
    columns: int,
    *,
    listing: str,
    expert: tuple[int, int] | None = None,
) -> StoredMatrix:
    """The matrix of ``module`` among ``tensors``, which the file ``listing`` lists. ``expert``: the number of an expert
    and of all experts, whose matrices are stacked."""
    try:
        wanted = stored.tensors(rows, columns)
    except ConfigError as error:
        raise CheckpointError(f"{listing}: tensor {module!r}: {error}; config.json does not fit the weights") from None
    extra = [suffix for suffix in SUFFIXES if suffix not in {part.suffix for part in wanted}]
    for suffix in extra:
        if module + suffix in tensors:
            raise CheckpointError(
                f"{tensors[module + suffix].file}: tensor {module + suffix!r} has no place in {stored.name}, which "
                "config.json says of it; correct quantization_config"
            )
    places = {part.suffix: _place(tensors, module, part, stored, listing, expert) for part in wanted}
    alike = [places[suffix] for suffix in stored.of_one_dtype]
    for info in alike[1:]:
        if info.dtype != alike[0].dtype:
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} has dtype {info.dtype}, and {alike[0].name!r} {alike[0].dtype}; "
                "save the model again with both in one dtype"
            )
    return StoredMatrix(module=module, stored=stored, rows=rows, columns=columns, tensors=places)


def gguf_expert_matrix(model: GGUFModel, layer: int, name: str, expert: int) -> StoredMatrix:
    """The gate, up or down of an expert of a GGUF model; the first two may be one tensor, gate rows before up rows."""
    tensor = model.tensors.get((name, layer))
    if tensor is not None:
        return ggml_matrix(tensor, expert=expert)
    both = ggml_matrix(model.tensors["gate_up", layer], expert=expert)
    half = both.rows // 2
    return both.rows_of(*((0, half) if name == "gate" else (half, both.rows)))


def ggml_matrix(tensor: GGMLTensor, *, expert: int | None = None, columns: int | None = None) -> StoredMatrix:
    """A matrix of a GGUF file: ``tensor`` [rows, columns], number ``expert`` of a stack of them, or all numbers of a
    tensor in rows of ``columns``. Raises CheckpointError for a type that is not read, or not in such rows."""
    *stack, rows, last = (1, *tensor.shape) if len(tensor.shape) == 1 else tensor.shape
    if columns is not None:
        stack, rows, last = [], math.prod(tensor.shape) // columns, columns
    try:
        stored = ggml_format(tensor.type)
        part = stored.tensors(rows, last)[0]
    except ConfigError as error:
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r}: {error}") from None
    info = TensorInfo(
        name=tensor.name,
        file=tensor.file,
        dtype=part.dtypes[0],
        shape=(math.prod(stack) * rows, *part.shape[1:]),
        offset=tensor.offset,
        nbytes=tensor.nbytes,
    )
    if expert is not None:
        info = info.part(expert, math.prod(stack))
    return StoredMatrix(module=tensor.name, stored=stored, rows=rows, columns=last, tensors={".weight": info})


def _place(
    tensors: Mapping[str, TensorInfo],
    module: str,
    part: TensorSpec,
    stored: Format,
    listing: str,
    expert: tuple[int, int] | None,
) -> TensorInfo:
    name, shown = module + part.suffix, stored.name
    if name not in tensors:
        present = next((suffix for suffix in SUFFIXES if module + suffix in tensors), None)
        but = f", though {module + present!r} is there" if present else ""
        raise CheckpointError(
            f"{listing}: tensor {name!r} {list(part.shape)} is missing{but}; config.json says that it is "
            f"stored as {shown}: correct quantization_config, or take config.json from where the weights are from"
        )
    info = tensors[name]
    if info.dtype not in part.dtypes:
        raise CheckpointError(
            f"{info.file}: tensor {name!r} has dtype {info.dtype}, and {shown}, which config.json says of it, has "
            f"{' or '.join(part.dtypes)} there; correct quantization_config"
        )
    if expert is not None:
        index, count = expert
        if not info.shape or info.shape[0] != count:
            raise CheckpointError(
                f"{info.file}: tensor {name!r} has shape {list(info.shape)}, and there are {count} experts; "
                "correct config.json"
            )
        info = info.part(index, count)
    if not stored.accepts(info.shape, part.shape):
        raise CheckpointError(
            f"{info.file}: tensor {name!r} has shape {list(info.shape)}, and {shown}, which config.json says of it, "
            f"asks for {list(part.shape)}; correct quantization_config"
        )
    # Codes of two values are bytes, which some files call signed.
    return replace(info, shape=part.shape, dtype="U8" if info.dtype == "I8" and "U8" in part.dtypes else info.dtype)


def read_tensor(info: TensorInfo, into: Tensor | None = None) -> Tensor:
    """The tensor at ``info`` [its shape], in the memory of ``into`` (uint8, 1-D, CPU) if that is given."""
    if info.derived is not None:
        raw = derived_bytes(info, read_tensor)
        raw = raw if into is None else into.copy_(raw)
        return raw.view(TORCH[info.dtype]).view(info.shape)
    raw = torch.empty(info.nbytes, dtype=torch.uint8) if into is None else into
    try:
        with open(open_regular(info.file), "rb", buffering=0) as file:
            file.seek(info.offset)
            view, done = raw.numpy().data, 0
            while done < info.nbytes and (count := file.readinto(view[done:])):
                done += count
    except OSError as error:
        raise CheckpointError(f"{info.file}: cannot be read ({read_error_text(error)})") from None
    if done < info.nbytes:
        raise CheckpointError(f"{info.file}: cut short inside tensor {info.name!r}; fetch the file again")
    return raw.view(TORCH[info.dtype]).view(info.shape)


def derived_bytes(info: TensorInfo, read: Callable[[TensorInfo], Tensor]) -> Tensor:
    """The bytes (uint8, 1-D) at ``info``, whose numbers are computed from tensors that ``read`` gives."""
    derivation = info.derived
    assert derivation is not None, "numbers that are stored are read"
    values = read(derivation.stored).flatten()
    if derivation.table is not None and derivation.scales is not None:
        scales = read(derivation.scales).flatten().repeat_interleave(derivation.block)[: len(values)]
        values = read(derivation.table).flatten()[values.int()] * scales + derivation.offset
    values = (values.float() * derivation.factor).repeat_interleave(derivation.repeats)
    return values.view(torch.uint8)[info.offset : info.offset + info.nbytes]
