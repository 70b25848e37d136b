"""Reads weights from disk into the caller's memory: the dense part into its arena, expert pages into given slots.
Allocates only one bounce buffer per thread.

Mixed precision (float16 over a bfloat16 checkpoint): dense tensors are rounded in the arena, pages keep their bytes.
Numbers that float16 does not hold are noticed on the way: such a dense tensor remains bfloat16, such pages are listed.

Shapes: H hidden, Q query width, K key width, V vocabulary, E experts, I expert width, F dense feed-forward width.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch

from moelight.core.dtypes import BY_SAFETENSORS, DType, computed_in
from moelight.core.errors import CheckpointError
from moelight.core.schedule import Page
from moelight.core.small_files import open_regular, read_error_text
from moelight.core.units import MiB, align_up
from moelight.formats.format import PAGE_ALIGNMENT, RepackTable
from moelight.hrm.costs import TENSOR_ALIGNMENT, dense_bytes, kept_parts
from moelight.kernels import native
from moelight.kernels.device import Device, on_host
from moelight.kernels.matrices import Stack, stack_of
from moelight.kernels.quantized import cpu_dequantize, row_blocks
from moelight.kernels.repack import RowOrder, in_group_order, repacked, turn
from moelight.profiles.gguf_config import hf_rows
from moelight.profiles.model import ModelProfile
from moelight.profiles.quantization import KEPT
from moelight.profiles.tensor_list import dense_tensors
from moelight.weights.expert_pages import ExpertPages
from moelight.weights.stored_matrix import INVERSES, TORCH, check_group_order, derived_bytes, read_matrix
from moelight.weights.tensor_info import StoredMatrix, TensorInfo
from moelight.weights.tensor_map import WeightMap
from moelight.weights.torch_dtypes import from_torch, to_torch

BOUNCE_BYTES = 4 * MiB
# Magnitudes as the bits of bfloat16: those of normal float16 numbers are from LEAST to below BEYOND (2^-14 and 2^16).
LEAST, BEYOND = 0x3880, 0x4780
_MAGNITUDE = 0x7FFF
_SCANNED = 1 << 15  # numbers at a time, in a core's cache; torch starts no threads for so few
_log = logging.getLogger(__name__)
_Reader = TypeVar("_Reader", bound="TensorReader")


class TensorReader:
    """Reads tensors stored as ``stored`` from ``files``, each opened once. Thread-safe. Raises CheckpointError for a
    damaged file."""

    def __init__(self, files: Iterable[Path], stored: DType) -> None:
        self._stored = to_torch(stored)
        self._descriptors: dict[Path, int] = {}
        self._local = threading.local()
        try:
            for file in dict.fromkeys(files):
                self._descriptors[file] = _open(file)
        except CheckpointError:
            self.close()
            raise

    def __enter__(self: _Reader) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read(self, info: TensorInfo, dest: torch.Tensor, stored: torch.dtype | None = None) -> None:
        """Fill ``dest`` (contiguous, as many numbers as ``info``, any device), rounding to its dtype; no GIL held.
        ``stored``: the dtype of this tensor, if it is another one."""
        stored = stored or self._stored
        if dest.numel() * stored.itemsize != info.nbytes or not dest.is_contiguous():
            raise ValueError(f"{info.name}: {info.nbytes} bytes of {stored} do not fill {tuple(dest.shape)}")
        if dest.dtype == stored and on_host(dest):
            self.fill(info, 0, dest.reshape(-1).view(torch.uint8))
            return
        bounce = self._bounce(dest.device)
        flat = dest.view(-1)
        for begin in range(0, info.nbytes, bounce.numel()):
            chunk = bounce[: info.nbytes - begin]
            self.fill(info, begin, chunk)
            values = chunk.view(stored)
            first = begin // stored.itemsize
            flat[first : first + values.numel()].copy_(values)

    def tensor(self, info: TensorInfo) -> torch.Tensor:
        """The tensor at ``info`` [its shape]."""
        raw = torch.empty(info.nbytes, dtype=torch.uint8)
        self.fill(info, 0, raw)
        return raw.view(TORCH[info.dtype]).view(info.shape)

    def _bounce(self, device: torch.device) -> torch.Tensor:
        """The calling thread's bounce buffer for ``device``; page-locked if an accelerator reads it."""
        buffers: dict[bool, torch.Tensor] = self._local.__dict__.setdefault("buffers", {})
        kind = Device(device)
        if kind.host not in buffers:
            buffers[kind.host] = kind.host_memory((BOUNCE_BYTES,), torch.uint8)
        return buffers[kind.host]

    def fill(self, info: TensorInfo, begin: int, dest: torch.Tensor) -> None:
        """Read ``info`` from byte ``begin`` on into ``dest`` (uint8, 1-D, CPU) until ``dest`` is full."""
        view = dest.numpy().data
        descriptor, offset = self._descriptors[info.file], info.offset + begin
        while view:
            try:
                count = os.preadv(descriptor, [view], offset)
            except OSError as error:
                raise _unreadable(info, f" at byte {offset}", error) from None
            if count == 0:
                raise CheckpointError(
                    f"{info.file}: tensor {info.name!r} ends early, at byte {offset}: the file was changed after it "
                    "was opened; fetch it again"
                )
            view, offset = view[count:], offset + count


def _unreadable(info: TensorInfo, where: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: tensor {info.name!r} cannot be read{where} ({error.strerror}); "
        "check the disk or fetch the file again"
    )


def _open(file: Path) -> int:
    try:
        descriptor = open_regular(file)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be opened ({read_error_text(error)})") from None
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return descriptor


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One decoder layer without its experts; ``router`` is None in a dense layer, ``dense_*`` in a sparse one.

    ``input_norm``, ``post_norm`` [H]; ``qkv`` [Q+2K, H], ``qkv_bias`` [Q+2K]; ``q_norm``, ``k_norm`` [D] or [Q], [K];
    ``o`` [H, Q], ``o_bias`` [H]; ``router`` [E, H]; ``dense_gate_up`` [2F, H] (gate rows first), ``dense_down`` [H, F].
    """

    input_norm: torch.Tensor
    qkv: Stack
    o: Stack
    post_norm: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    router: torch.Tensor | None = None
    dense_gate_up: Stack | None = None
    dense_down: Stack | None = None

    @property
    def types(self) -> tuple[object, ...]:
        """The format of each stack of matrices, and the dtype of each other tensor; None for one that it has not."""
        stacks = self.qkv, self.o, self.dense_gate_up, self.dense_down
        norms, others = (self.input_norm, self.post_norm, self.q_norm, self.k_norm), (self.qkv_bias, self.o_bias)
        formats = (None if stack is None else stack[0].stored for stack in stacks)
        return *formats, *(None if tensor is None else tensor.dtype for tensor in (*norms, *others, self.router))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """All weights except experts: ``embed`` [V, H], ``head`` [V, H] (``embed`` itself if tied), ``final_norm`` [H]."""

    embed: Stack
    head: Stack
    final_norm: torch.Tensor
    layers: tuple[LayerWeights, ...]


def load_dense(
    weight_map: WeightMap,
    model: ModelProfile,
    arena: torch.Tensor,
    dtype: torch.dtype,
    *,
    as_stored: bool = False,
) -> ModelWeights:
    """Read all weights except experts as ``dtype``; the result holds views of ``arena`` (uint8, at least `dense_bytes`,
    contiguous, any device). In mixed precision a tensor that float16 does not hold is bfloat16, and named in the log.
    ``as_stored``: quantised matrices stay as stored (`keeps_stored`). Raises CheckpointError for an unreadable file, or
    tied embeddings stored twice that differ.
    """
    check_bytes(arena, dense_bytes(model, from_torch(dtype), as_stored=as_stored), "the arena")
    mixed = bool(computed_in(from_torch(dtype), weight_map.dtype).pages)
    read_as, wide = to_torch(weight_map.dtype) if mixed else dtype, list[str]()
    outside: dict[str, Any] = {}
    layers: list[dict[str, Any]] = [{} for _ in range(model.num_layers)]
    spare, used = weight_map.spare_head, 0
    infos = [*weight_map.parts.values(), *([spare] if spare else [])]
    with TensorReader((info.file for info in infos), weight_map.dtype) as reader:
        for tensor in dense_tensors(model):
            into = outside if tensor.layer < 0 else layers[tensor.layer]
            if as_stored and (sizes := kept_parts(model, tensor)) is not None:
                matrices = [weight_map.parts[part].stored() for part in tensor.parts]
                into[tensor.name] = read_stack(matrices, arena[used : used + sum(sizes)].split(sizes))
                used += align_up(sum(sizes), TENSOR_ALIGNMENT)
                continue
            nbytes = tensor.elements * dtype.itemsize
            view = arena[used : used + nbytes].view(read_as).view(tensor.shape)
            for part, rows in zip(tensor.parts, view.split([part.shape[0] for part in tensor.parts]), strict=True):
                read_tensor_into(reader, weight_map.parts[part], rows)
            if mixed and (view := _rounded(view)).dtype != dtype:
                wide.append(weight_map.parts[tensor.parts[0]].name)
            into[tensor.name] = stack_of(view) if tensor.name in KEPT else view
            used += align_up(nbytes, TENSOR_ALIGNMENT)
        if spare is not None:
            check_tie(reader, infos[0], spare)
    if wide:
        _log.warning("%s: beyond the range of float16, computed in float32", ", ".join(map(repr, wide)))
    outside.setdefault("head", outside["embed"])
    return ModelWeights(**outside, layers=tuple(LayerWeights(**layer) for layer in layers))


def read_stack(matrices: Sequence[StoredMatrix], rooms: Sequence[torch.Tensor]) -> Stack:
    """``matrices`` as stored, or repacked, each in its room (uint8, its `kept_bytes`)."""
    stack = []
    for matrix, room in zip(matrices, rooms, strict=True):
        held = read_matrix(matrix, room)
        if matrix.heads:
            for part in held.tensors.values():
                part.copy_(part[hf_rows(matrix.rows, matrix.heads)])
        stack.append(repacked(held))
    return tuple(stack)


def read_tensor_into(reader: TensorReader, info: TensorInfo, dest: torch.Tensor) -> None:
    """As `TensorReader.read`, of a quantised matrix too, whose numbers are rounded to the dtype of ``dest``."""
    if not info.matrices:
        reader.read(info, dest, to_torch(BY_SAFETENSORS[info.dtype]))
        return
    matrix = info.stored()
    dequantised(matrix, dest.view(matrix.rows, matrix.columns))


def values_between(info: TensorInfo, begin: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """``count`` numbers [count] of ``info`` from number ``begin`` on, row by row, as ``dtype``."""
    matrix = info.matrices[0]
    line = matrix.columns
    first, last = begin // line, (begin + count - 1) // line + 1
    if matrix.indivisible:
        first, last = 0, matrix.rows
    matrix = matrix.rows_of(first, last)
    rows = dequantised(matrix, torch.empty((matrix.rows, line), dtype=dtype))
    return rows.view(-1)[begin - first * line :][:count]


def dequantised(matrix: StoredMatrix, out: torch.Tensor) -> torch.Tensor:
    """The numbers of ``matrix`` in ``out`` (its shape, any device)."""
    held = read_matrix(matrix)
    if matrix.stored_as:
        return out.copy_(INVERSES[matrix.stored_as](cpu_dequantize(held, torch.float32), matrix))
    if matrix.heads:
        return out.copy_(cpu_dequantize(held, out.dtype)[hf_rows(matrix.rows, matrix.heads)])
    if on_host(out):
        return cpu_dequantize(held, out.dtype, out=out)
    for begin, values in row_blocks(held):
        out[begin : begin + len(values)].copy_(values)
    return out


def _rounded(stored: torch.Tensor) -> torch.Tensor:
    """bfloat16 ``stored`` (contiguous) rounded to float16 in its own memory; as it is if float16 does not hold it."""
    if exceeds_float16(stored):
        return stored
    result = stored.view(torch.float16)
    pieces = BOUNCE_BYTES // result.itemsize
    for source, into in zip(stored.view(-1).split(pieces), result.view(-1).split(pieces), strict=True):
        into.copy_(source.to(torch.float16))
    return result


def exceeds_float16(values: torch.Tensor) -> bool:
    """True if float16 does not hold bfloat16 ``values`` (contiguous, any device): the largest magnitude is above
    65,504, infinite or no number, or below 2^-14, where float16 has fewer bits than bfloat16."""
    bits = values.view(-1).view(torch.int16)
    pieces = bits.split(_SCANNED if on_host(bits) else BOUNCE_BYTES)
    maxima = [piece.bitwise_and(_MAGNITUDE).amax() for piece in pieces if piece.numel()]
    largest = int(torch.stack(maxima).amax()) if maxima else 0
    return largest >= BEYOND or 0 < largest < LEAST


def check_tie(reader: TensorReader, embed: TensorInfo, spare: TensorInfo) -> None:
    """Raise CheckpointError if tied embeddings are stored twice and differ: it is ambiguous which of them to use."""
    if spare.dtype != embed.dtype:
        raise CheckpointError(
            f"{spare.file}: tensor {spare.name!r} is {spare.dtype} and {embed.name!r} {embed.dtype}, although "
            "config.json says tie_word_embeddings; remove one of the two"
        )
    halves = torch.empty((2, BOUNCE_BYTES // 2), dtype=torch.uint8)
    for begin in range(0, spare.nbytes, halves.shape[1]):
        first, second = halves[:, : spare.nbytes - begin]
        reader.fill(embed, begin, first)
        reader.fill(spare, begin, second)
        if not torch.equal(first, second):
            raise CheckpointError(
                f"{spare.file}: tensor {spare.name!r} differs from {embed.name!r}, although config.json says "
                "tie_word_embeddings; set that to false, or remove the tensor"
            )


class PageRead(Protocol):
    """A read of a page in flight."""

    def wait(self) -> None:
        """Block until the page has been read; raise the error if the read failed."""
        ...

    def done(self) -> bool:
        """True if `wait` returns at once."""
        ...


Submit = Callable[[Sequence[tuple[Path, int, torch.Tensor, RepackTable | None]]], PageRead]


class _PartRead(NamedTuple):
    """``piece`` into ``dest``; ``table``: how it is turned there."""

    piece: TensorInfo
    dest: torch.Tensor
    table: RepackTable | RowOrder | None


class PageReader(TensorReader):
    """Reads expert pages from disk, as ``dtype``. Thread-safe; `close` after use.

    ``submit`` starts reads of (file, offset, destination, table) that bypass the page cache, for pages that need no
    dtype conversion; what has a table is turned as it says before the read is complete. Without it, and for other
    pages, reads are sequential and go through the page cache.

    Attributes:
        wide_layers: layers with an expert that float16 does not hold, complete for pages whose reads have ended; empty
            unless ``mixed`` (bfloat16 pages are computed in float16). A page is examined at its first read.

    ``in_order``: columns of quantised matrices must be in the order of their groups.
    """

    def __init__(
        self,
        weight_map: WeightMap,
        dtype: torch.dtype,
        submit: Submit | None = None,
        *,
        mixed: bool = False,
        in_order: bool = False,
    ) -> None:
        super().__init__(page_files(weight_map), weight_map.dtype)
        self._experts = weight_map.experts.read_as(from_torch(dtype).safetensors)
        self._tables, self.page_bytes = self._experts.tables(), self._experts.nbytes
        self._dtype, self._alignment = dtype, 1
        if self._experts.dtype is None:
            self._stored, self._dtype, self._alignment = torch.uint8, torch.uint8, PAGE_ALIGNMENT
        pieces = (info for infos in self._experts.pieces.values() for info in infos)
        dequantises = self._experts.dtype is not None and any(info.matrices for info in pieces)
        self._submit = submit if self._stored == self._dtype and not dequantises else None
        self.wide_layers: set[int] = set()
        self._in_order = in_order
        self._mixed, self._examined = mixed, set[tuple[Page, int, int]]()

    def start(self, page: Page, dest: torch.Tensor, begin: int = 0) -> PageRead | None:
        """Start to fill ``dest`` (uint8, contiguous, whole numbers of ``dtype``) with the bytes of ``page`` (gate, up,
        down) from ``begin`` on. Of a page that is turned on arrival, a part, or what goes to another device, is cut
        from the whole page. Returns None if the read is complete on return; raises CheckpointError here or in
        `PageRead.wait`."""
        check_bytes(dest, 1, "the slot")
        values = dest[: self.page_bytes - begin].view(self._dtype)
        first, size = begin // self._dtype.itemsize, self._stored.itemsize
        tables, nbytes = self._tables[self._experts.layout_ids[page]], self._experts.bytes_of(page)
        if tables and (begin or len(values) < nbytes or not on_host(dest)):
            page_in_host = torch.empty(nbytes, dtype=torch.uint8)
            if (reading := self.start(page, page_in_host)) is not None:
                reading.wait()
            cut = page_in_host[begin : begin + len(values)]
            values[: len(cut)].copy_(cut)
            return None
        reads = [
            _PartRead(piece, values[start - first : start - first + piece.nbytes // size], tables.get(start))
            for piece, start in self._pieces(page, first, values.numel())
        ]
        examine = partial(self._examine, (page, begin, values.numel()), reads)
        for part in reads:
            if part.piece.derived is not None:
                part.dest.copy_(derived_bytes(part.piece, self.tensor))
        stored = [part for part in reads if part.piece.derived is None]
        if stored and self._submit is not None and on_host(dest) and (native.available() or not tables):
            unsorted = [part for part in stored if isinstance(part.table, RowOrder)]
            parts = [
                (
                    part.piece.file,
                    part.piece.offset,
                    part.dest.view(torch.uint8),
                    None if isinstance(part.table, RowOrder) else part.table,
                )
                for part in stored
            ]
            return _DirectPageRead(self._submit(parts), [part.piece for part in stored], unsorted, examine)
        for part in stored:
            if part.piece.matrices:
                count = part.dest.numel()
                part.dest.copy_(values_between(part.piece, part.piece.offset // size, count, part.dest.dtype))
                continue
            self.read(part.piece, part.dest)
            if part.table is not None:
                turn(part.dest, part.table)
        examine()
        return None

    def _examine(self, part: tuple[Page, int, int], reads: Sequence[_PartRead]) -> None:
        """Notice numbers that float16 does not hold in what was read, unless ``part`` was examined before."""
        if not (self._mixed or self._experts.orders) or part in self._examined:
            return
        _check_orders(self._experts, reads, in_order=self._in_order)
        if self._mixed and self._experts.dtype is not None:
            self._notice_wide(part[0].layer, reads)
        self._examined.add(part)

    def _notice_wide(self, layer: int, reads: Sequence[_PartRead]) -> None:
        for piece, values, *_ in reads:
            if exceeds_float16(values):
                if not self.wide_layers:
                    told = (
                        "%s: tensor %r: beyond the range of float16; the experts of such layers are computed in float32"
                    )
                    _log.warning(told, piece.file, piece.name)
                self.wide_layers.add(layer)

    def _pieces(self, page: Page, begin: int, count: int) -> Iterator[tuple[TensorInfo, int]]:
        """The locations of ``count`` numbers of a page from number ``begin`` on, and the number at which each starts; a
        layer's page may be shorter than others."""
        size, start = self._stored.itemsize, 0
        for info in self._experts.pieces[page]:
            length = info.nbytes // size
            first, last = max(begin - start, 0), min(begin + count - start, length)
            if first < last:
                piece = replace(info, offset=info.offset + first * size, nbytes=(last - first) * size)
                yield piece, start + first
            start = align_up(start + length, self._alignment)


def _check_orders(pages: ExpertPages, reads: Iterable[_PartRead], *, in_order: bool) -> None:
    """Raise CheckpointError if a tensor that says the group of each column names one that is not there; if they have to
    be ``in_order``, one before that of the column to its left; or if one does not count groups as repacked pages need
    it."""
    for piece, values, _ in reads:
        if (expected := pages.orders.get(piece.name)) is not None:
            order_of = values.view(torch.int32)
            check_group_order(piece, order_of, expected.groups)
            if in_order and (order_of.diff() < 0).any():
                raise CheckpointError(
                    f"{piece.file}: tensor {piece.name!r}: columns are not in the order of their groups, as "
                    "activations int8 need them; leave activations at auto"
                )
            counted = expected.counted if pages.is_repacked else None
            if counted is not None and not in_group_order(order_of, counted):
                raise CheckpointError(
                    f"{piece.file}: tensor {piece.name!r}: columns are not in the order of their groups, although "
                    "config.json says desc_act false; set that to true, or fetch the checkpoint again"
                )


class _DirectPageRead:
    """``unsorted``: the parts whose rows are put in order once all has been read, by the first that waits."""

    def __init__(
        self,
        reading: PageRead,
        pieces: Sequence[TensorInfo],
        unsorted: Sequence[_PartRead],
        examine: Callable[[], None],
    ) -> None:
        self._reading, self._pieces, self._examine = reading, pieces, examine
        self._unsorted, self._lock = list(unsorted), threading.Lock()
        self.done = reading.done

    def wait(self) -> None:
        try:
            self._reading.wait()
        except OSError as error:
            piece = next(
                (candidate for candidate in self._pieces if str(candidate.file) == str(error.filename)), self._pieces[0]
            )
            raise _unreadable(piece, "", error) from None
        with self._lock:
            while self._unsorted:
                part = self._unsorted.pop()
                turn(part.dest.view(torch.uint8), cast("RowOrder", part.table))
        self._examine()


def page_files(weight_map: WeightMap) -> tuple[Path, ...]:
    """The files that hold expert pages."""
    pieces = (info for infos in weight_map.experts.pieces.values() for info in infos)
    return tuple(dict.fromkeys(file for info in pieces for file in info.files))


def check_bytes(memory: torch.Tensor, needed: int, label: str) -> None:
    """Raise ValueError unless ``memory`` is contiguous uint8 of at least ``needed`` bytes."""
    if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous() or memory.numel() < needed:
        raise ValueError(
            f"{label} must be contiguous uint8 of at least {needed} bytes, not {memory.dtype} {tuple(memory.shape)}"
        )
