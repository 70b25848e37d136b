"""A checkpoint written again with rounded experts: reading, rounding and writing side by side, file by file.

A directory without ``config.json`` loads nowhere: it is written last, the index before it. A file of tensors has its
name once it is whole. Killed at any moment and run again, the job goes on behind the last whole file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moelight.batch.output import refused_write
from moelight.convert.compare import CompareOptions, read_prompts, score_all
from moelight.convert.contents import (
    EXPERTS_TARGET,
    Chosen,
    ConversionPlan,
    Piece,
    Shard,
    expert_of,
    experts_of,
    plan_conversion,
)
from moelight.convert.rounding import round_matrix
from moelight.core.errors import CheckpointError, ConfigError, InputError, StorageError
from moelight.core.paths import write_whole
from moelight.core.small_files import read_bytes, read_error_text, read_object
from moelight.core.units import GiB, MiB, format_bytes
from moelight.engine.experts import facts_of
from moelight.engine.options import EngineOptions
from moelight.experts.options import ExpertOptions
from moelight.experts.profile import load_profile
from moelight.formats.compressed_tensors import Rounding, rounding_config
from moelight.models.checkpoints import open_model
from moelight.models.moe import Routed
from moelight.profiles.hf_config import QUANTISED_KEYS
from moelight.weights.source import INDEX, Checkpoint, resolve_model
from moelight.weights.stored_matrix import read_tensor
from moelight.weights.tensor_info import TensorInfo

RECORD = "conversion.json"
SHARD_BYTES = 4 * GiB
_CONFIG = "config.json"
_SUBDIRECTORY = "additional_chat_templates"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_MOST_SMALL = 256 * MiB
_MOST_PROMPTS = GiB  # bytes
_CHUNK = 16 * MiB
_ROUNDERS = 2  # threads
_AHEAD = 2  # pieces read, and pieces to be written, besides those being rounded
_DTYPES = {"float16": "F16", "float32": "F32"}
LEAST_ROWS = 8  # that say something of an expert
_MOST_ROWS = 1024
_MOST_BYTES = 4 * GiB  # of the file
_NONE = np.iinfo(np.int64).max
_WIDEST = 4096  # columns: their products take 64 MiB, a few times
_DTYPE = torch.bfloat16
_ROWS, _KEYS = "calibration.rows", "calibration.keys"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions:
    """The options of a conversion: ``dense`` None leaves the matrices outside the experts as they are, and so the share
    ``keep`` of all experts, those that are busiest in ``expert_profile``. ``calibrate``: prompts on which the model,
    under the options ``engine``, shows which numbers of experts matter."""

    model: str
    output: Path
    experts: Rounding
    dense: Rounding | None = None
    shard_bytes: int = SHARD_BYTES
    keep: float = 0.0
    expert_profile: Path | None = None
    calibrate: Path | None = None
    engine: EngineOptions = field(default_factory=lambda: EngineOptions(device="cpu"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """The result of a conversion: bytes of tensors before and after, bits of a rounded number with its scales, bytes
    that this run read, files that were whole before, names of files that were not copied, experts that were kept, and
    those that enough prompts reached (None: nothing was calibrated in this run)."""

    source_bytes: int
    bytes: int
    bits: float
    read_bytes: int
    files: int
    files_before: int
    left_out: tuple[str, ...]
    kept_experts: int
    reached: int | None


class WrittenFile(Protocol):
    """A file of tensors: its beginning and its size."""

    @property
    def header(self) -> bytes: ...

    @property
    def nbytes(self) -> int: ...


Progress = Callable[[int, int], None]  # bytes read, of bytes to read; or prompts


def convert_checkpoint(
    options: ConvertOptions,
    progress: Progress = lambda _done, _total: None,
    calibrating: Progress = lambda _done, _total: None,
) -> Converted:
    """Write ``options.output``, or what is missing of it. Raises UserErrors of one line; a StorageError if the disk is
    full, after which the command goes on where it ended."""
    directory, out = resolve_model(options.model), options.output
    checkpoint = Checkpoint.open(directory)
    config = _read_config(directory)
    kept_experts = busiest(options)
    plan = _plan(checkpoint, config, options, kept_experts)
    config["quantization_config"] = rounding_config(
        [(options.experts, [EXPERTS_TARGET])] + ([(options.dense, plan.dense)] if options.dense else []), plan.ignored
    )
    _check_calibration(options)
    reached = None
    with claimed_directory(out, _record(checkpoint, options, kept_experts)):
        missing = [shard for shard in plan.shards if not is_complete(out / shard.name, shard)]
        check_space(out, missing)
        total = sum(piece.source.nbytes for shard in missing for piece in shard.pieces)
        with calibrated(options, plan, calibrating) if missing else nullcontext() as inputs:
            reached = None if inputs is None else inputs.reached
            progress(0, total)
            with _Pipeline(lambda done: progress(done, total), inputs) as pipeline:
                for shard in missing:
                    pipeline.write(out / shard.name, shard)
        remove_rows(out)
        left_out = copy_small_files(directory, out)
        write_small(out / INDEX, plan.index())
        write_small(out / _CONFIG, (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())
    return Converted(
        source_bytes=sum(info.nbytes for info in checkpoint.tensors.values()),
        bytes=sum(size for shard in plan.shards for _, size in shard.places.values()),
        bits=8 * plan.rounded_bytes / plan.rounded_numbers,
        read_bytes=total,
        files=len(plan.shards),
        files_before=len(plan.shards) - len(missing),
        left_out=tuple(left_out),
        kept_experts=len(kept_experts),
        reached=reached,
    )


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / _CONFIG
    try:
        config = read_object(path)
    except FileNotFoundError:
        raise CheckpointError(f"{directory}: no config.json there, so it is not a model directory") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({read_error_text(error)})") from None
    if any(config.get(key) is not None for key in QUANTISED_KEYS):
        raise CheckpointError(f"{path}: the model is quantised already; convert the checkpoint that it was made of")
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{path}: model_type is missing; fetch the file again")
    return config


def busiest(options: ConvertOptions) -> Chosen:
    """The experts to keep: the share of all that most tokens were routed to. Raises ConfigError for a profile of
    another model."""
    if options.expert_profile is None:
        return frozenset()
    opened = open_model(options.model)
    model, facts = opened.profile, facts_of(opened.profile, opened.weight_map.dtype)
    layers = [layer for layer, moe in enumerate(model.moe_layers) if moe]
    profile = load_profile(
        options.expert_profile, model=facts.facts, num_layers=len(layers), num_experts=facts.num_experts
    )
    num_kept = round(options.keep * profile.counts.size)
    order = np.argsort(-profile.counts, axis=None, kind="stable")[:num_kept]
    chosen = [divmod(int(index), facts.num_experts) for index in order if profile.counts.flat[index] > 0]
    return frozenset((layers[row], expert) for row, expert in chosen)


def _check_calibration(options: ConvertOptions) -> None:
    """Raise ConfigError if the experts cannot be calibrated."""
    if options.calibrate is None:
        return
    kind = options.experts.kind
    if kind not in ("int4", "int8"):
        raise ConfigError(f"--calibrate: scales of {kind} are not chosen; give int4 or int8, or no prompts")
    opened = open_model(options.model)
    if opened.source.road != "native":
        raise ConfigError(
            f"--calibrate: {opened.profile.model_type} is a module graph of transformers, whose experts have any form; "
            "leave the option out"
        )


@contextlib.contextmanager
def calibrated(options: ConvertOptions, plan: ConversionPlan, progress: Progress) -> Iterator[ExpertInputs | None]:
    """Return the inputs that the calibration prompts give to the experts of ``plan``; inputs that an earlier run has
    collected are reused."""
    if options.calibrate is None:
        yield None
        return
    model = open_model(options.model).profile
    rows = InputRows(options.output, model.num_layers, model.experts.num_experts, model.hidden_size)
    loaded = rows.load()
    try:
        with rows:
            if not loaded:
                name, path = options.model, options.calibrate
                prompts = read_prompts(CompareOptions(model=name, reference=name, prompts=path), model.max_positions)
                engine = replace(options.engine, experts=ExpertOptions(inputs=rows.add))
                score_all(name, prompts, lambda *_: None, engine, progress)
                rows.finish()
            yield ExpertInputs(rows, experts_of(piece for shard in plan.shards for piece in shard.pieces))
    except OSError as error:
        raise refused_write(error, str(options.output), note="; run the command again") from None


def _plan(
    checkpoint: Checkpoint, config: dict[str, Any], options: ConvertOptions, kept_experts: Chosen
) -> ConversionPlan:
    scale = _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), "BF16")
    dense = None if options.dense is None else options.dense.stored(scale)
    experts, shard_bytes = options.experts.stored(scale), options.shard_bytes
    return plan_conversion(checkpoint, config["model_type"], experts, dense, shard_bytes, kept_experts)


def _record(checkpoint: Checkpoint, options: ConvertOptions, kept_experts: Chosen) -> dict[str, Any]:
    """The settings of a conversion; a run resumes only if they are equal."""
    files = sorted({info.file for info in checkpoint.tensors.values()} | {checkpoint.directory / _CONFIG})
    stats = {file.name: file.stat() for file in files}
    return {
        "experts": list(options.experts),
        "dense": None if options.dense is None else list(options.dense),
        "shard_bytes": options.shard_bytes,
        "kept": [list(pair) for pair in sorted(kept_experts)],
        "calibrate": None if options.calibrate is None else _digest(options.calibrate),
        "source": {name: [status.st_size, status.st_mtime_ns] for name, status in stats.items()},
    }


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(read_bytes(path, max_bytes=_MOST_PROMPTS)).hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({read_error_text(error)})") from None


@contextlib.contextmanager
def claimed_directory(out: Path, record: Mapping[str, Any]) -> Iterator[None]:
    """Make ``out`` a directory of this conversion alone; InputError if it holds something else, or another process
    works there."""
    path = out / RECORD
    try:
        if out.exists() and not out.is_dir():
            raise InputError(f"{out}: is a file; give a directory that does not exist, or is empty", code="output_path")
        if not path.exists():
            if out.exists() and any(not _is_partial(entry) for entry in out.iterdir()):
                raise InputError(
                    f"{out}: holds something else; give a directory that does not exist, or is empty",
                    code="output_path",
                )
            write_whole(path, json.dumps(record, indent=2) + "\n")
        if read_object(path) != record:
            raise InputError(
                f"{out}: holds a conversion of another checkpoint or with other options (see {RECORD} there); give "
                "another directory, or remove that one",
                code="output_path",
            )
        lock = os.open(path, os.O_RDONLY)
    except (OSError, ValueError) as error:
        raise refused_write(error, str(out)) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{out}: another conversion writes there; wait for it", code="output_path") from None
        for entry in out.iterdir():
            if _is_partial(entry):
                entry.unlink()
        yield
    finally:
        os.close(lock)


def _is_partial(path: Path) -> bool:
    """True for what a killed run leaves: names with a leading dot of files that appear whole."""
    return path.name.startswith(".") and path.is_file()


def is_complete(path: Path, shard: WrittenFile) -> bool:
    """Whether ``path`` is the file of ``shard``, by its size and its beginning."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size == shard.nbytes and file.read(len(shard.header)) == shard.header
    except FileNotFoundError:
        return False
    except OSError as error:
        raise refused_write(error, str(path)) from None


def check_space(out: Path, missing: Sequence[WrittenFile]) -> None:
    """Raise StorageError if the files ``missing`` do not fit the disk of ``out``."""
    needed, free = sum(shard.nbytes for shard in missing), shutil.disk_usage(out).free
    if needed > free:
        raise StorageError(
            f"{out}: the disk has {format_bytes(free)} free, and {format_bytes(needed, round_up=True)} are to be "
            "written; make room, or give a directory on another disk",
            code="output_path",
        )


def write_small(path: Path, content: bytes) -> None:
    """Write ``content`` atomically; raises StorageError."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise refused_write(error, str(path)) from None


def copy_small_files(directory: Path, out: Path) -> list[str]:
    """Copy everything beside the weights; the names of what is too large for that, or no file."""
    left_out = []
    places = sorted(directory.iterdir()) + sorted((directory / _SUBDIRECTORY).glob("*.jinja"))
    for path in places:
        name = str(path.relative_to(directory))
        written = name in (INDEX, _CONFIG, RECORD) or path.suffix in _WEIGHTS or name.startswith(".")
        if written or name == _SUBDIRECTORY:
            continue
        if not path.is_file() or path.stat().st_size > _MOST_SMALL:
            left_out.append(name)
            continue
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({read_error_text(error)})") from None
        write_small(out / name, content)
    return left_out


class _Pipeline:
    """Pieces on their way from file to file: read by one thread, rounded by two, written by one, a few at a time."""

    def __init__(self, progress: Callable[[int], None], inputs: ExpertInputs | None) -> None:
        self._progress, self._done, self._inputs = progress, 0, inputs
        self._threads = torch.get_num_threads()
        self._reader = ThreadPoolExecutor(1)
        self._rounders = ThreadPoolExecutor(_ROUNDERS, initializer=lambda: torch.set_num_threads(1))
        self._writer = ThreadPoolExecutor(1)

    def __enter__(self) -> _Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in (self._reader, self._rounders, self._writer):
            pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads)

    def write(self, path: Path, shard: Shard) -> None:
        """Write ``shard`` as ``path``, which appears once it is whole and on the disk."""
        partial = path.with_name(f".{path.name}.partial")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
            try:
                _write_at(descriptor, memoryview(shard.header), 0)
                self._run(shard, descriptor)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            partial.replace(path)
        except OSError as error:
            raise refused_write(error, str(path), note="; run the command again to go on") from None
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()

    def _run(self, shard: Shard, descriptor: int) -> None:
        """All pieces of ``shard``, in order; at most a few are in memory. Errors of any thread are raised here."""
        rounding: deque[tuple[Piece, int, Future[dict[str, Tensor]]]] = deque()
        writing: deque[tuple[int, Future[None]]] = deque()

        def forward() -> None:
            piece, offset, made = rounding.popleft()
            stored = self._writer.submit(_store, shard, piece, offset, made.result(), descriptor)
            writing.append((piece.source.nbytes, stored))
            while len(writing) > _AHEAD:
                finish()

        def finish() -> None:
            size, written = writing.popleft()
            written.result()
            self._done += size
            self._progress(self._done)

        for piece, offset in _chunks(shard.pieces):
            read = self._reader.submit(read_tensor, piece.source)
            rounding.append((piece, offset, self._rounders.submit(_make, piece, read, self._inputs)))
            if len(rounding) > _AHEAD:
                forward()
        while rounding:
            forward()
        while writing:
            finish()


def _chunks(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, int]]:
    """The ``pieces``, large copies in parts, with the place of each part in its tensor."""
    for piece in pieces:
        if piece.stored is not None:
            yield piece, 0
            continue
        for begin in range(0, piece.source.nbytes, _CHUNK):
            size = min(_CHUNK, piece.source.nbytes - begin)
            yield replace(piece, source=_bytes_of(piece.source, begin, size)), begin


def _bytes_of(info: TensorInfo, begin: int, size: int) -> TensorInfo:
    return replace(info, dtype="U8", shape=(size,), offset=info.offset + begin, nbytes=size)


def _make(piece: Piece, read: Future[Tensor], inputs: ExpertInputs | None) -> dict[str, Tensor]:
    """The tensors of ``piece`` by suffix."""
    values = read.result()
    if piece.stored is None:
        return {"": values}
    try:
        if inputs is None or (of := expert_of(piece)) is None:
            return round_matrix(piece.stored, values)
        return round_matrix(piece.stored, values, inputs.of(*of))
    except ValueError as error:
        info = piece.source
        raise CheckpointError(f"{info.file}: tensor {info.name!r} {error}, so it cannot be rounded") from None


def _store(shard: Shard, piece: Piece, offset: int, tensors: dict[str, Tensor], descriptor: int) -> None:
    for suffix, tensor in tensors.items():
        start, _ = shard.places[piece.module + suffix]
        _write_at(descriptor, tensor.contiguous().view(torch.uint8).numpy().data.cast("B"), start + offset)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


# Inputs of experts on prompts, and what each matrix of an expert then multiplies; nothing depends on the order in which
# inputs arrive. Shapes: T tokens, k experts a token, H hidden, I expert width, R rows kept of an expert.


class InputRows:
    """Up to ``max_rows`` different inputs [H] of each expert, in a file: those whose keys, which are sums of their bits
    in random proportion, are the least."""

    def __init__(self, directory: Path, layers: int, experts: int, hidden: int) -> None:
        self._path, self._keys_path, self._hidden = directory / _ROWS, directory / _KEYS, hidden
        self.row_bytes = hidden * _DTYPE.itemsize
        self.max_rows = max(LEAST_ROWS, min(_MOST_ROWS, _MOST_BYTES // (layers * experts * self.row_bytes)))
        self.keys = np.full((layers, experts, self.max_rows), _NONE, dtype=np.int64)
        draw = torch.Generator().manual_seed(0)
        self._weights = torch.randint(-(2**62), 2**62, (hidden,), generator=draw, dtype=torch.int64)

    def load(self) -> bool:
        """True if a run before this one has collected all rows."""
        with contextlib.suppress(OSError):
            data = self._keys_path.read_bytes()
            if len(data) == self.keys.nbytes:
                self.keys.reshape(-1)[:] = np.frombuffer(data, dtype=np.int64)
                return True
        return False

    def __enter__(self) -> InputRows:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def add(self, layer: int, routed: Routed) -> None:
        """Take the inputs of ``routed`` in ``layer``. Raises OSError if the disk is full."""
        x = routed.x.detach().to(device="cpu", dtype=_DTYPE).contiguous()
        keys = (x.view(torch.int16).long() * self._weights).sum(1).numpy()
        ids, rows = routed.ids.cpu().numpy(), x.view(torch.uint8).numpy()
        for expert in np.unique(ids).tolist():
            matching = (ids == expert).any(1).nonzero()[0]
            self._merge((layer, expert), keys[matching], rows, matching)

    def _merge(self, of: tuple[int, int], keys: np.ndarray, rows: np.ndarray, routed: np.ndarray) -> None:
        stored_keys = self.keys[of]
        fresh, first = np.unique(keys, return_index=True)
        new = ~np.isin(fresh, stored_keys)
        for key, row in zip(fresh[new].tolist(), routed[first[new]].tolist(), strict=True):
            slot = int(stored_keys.argmax())
            if key >= stored_keys[slot]:
                return  # keys ascend
            offset = (of[0] * self.keys.shape[1] + of[1]) * self.max_rows + slot
            if os.pwrite(self._file, rows[row].data, offset * self.row_bytes) < self.row_bytes:
                raise OSError("a row was cut short")
            stored_keys[slot] = key

    def finish(self) -> None:
        """All rows are there."""
        os.fsync(self._file)
        write_whole(self._keys_path, self.keys.tobytes())

    def rows(self, layer: int, expert: int) -> Tensor:
        """The rows [R, H] of an expert, in the order of their keys."""
        keys = self.keys[layer, expert]
        first = (layer * self.keys.shape[1] + expert) * self.max_rows
        data = os.pread(self._file, self.max_rows * self.row_bytes, first * self.row_bytes)
        data += bytes(self.max_rows * self.row_bytes - len(data))
        inputs = torch.frombuffer(bytearray(data), dtype=_DTYPE).view(self.max_rows, self._hidden)
        order = np.argsort(keys, kind="stable")[: int((keys != _NONE).sum())]
        return inputs[torch.from_numpy(order)]


def remove_rows(directory: Path) -> None:
    """Remove what `InputRows` left in ``directory``."""
    for name in (_KEYS, _ROWS):
        (directory / name).unlink(missing_ok=True)


class ExpertInputs:
    """Reservoirs of the inputs of expert matrices. ``matrices``: gate, up and down of each layer and expert, where they
    are not rounded."""

    def __init__(self, rows: InputRows, matrices: Mapping[tuple[int, int], Mapping[str, TensorInfo]]) -> None:
        self._rows, self._matrices = rows, matrices

    @property
    def reached(self) -> int:
        """Experts with enough rows."""
        return int(((self._rows.keys != _NONE).sum(-1) >= LEAST_ROWS).sum())

    def of(self, expert: tuple[int, int], matrix: str) -> Tensor | None:
        """float32 [R, columns of ``matrix``]; None of an expert that few rows reached, and of wider matrices than the
        products of all columns with each other have room for."""
        rows = self._rows.rows(*expert)
        if len(rows) < LEAST_ROWS:
            return None
        x = rows.float()
        if matrix == "down":
            gate, up = (read_tensor(self._matrices[expert][name]).float() for name in ("gate", "up"))
            x = functional.silu(x @ gate.t()) * (x @ up.t())
        if not bool(torch.isfinite(x).all()):
            where = self._matrices[expert][matrix]
            raise CheckpointError(f"{where.file}: tensor {where.name!r}: its inputs on the prompts are not finite")
        return x if x.shape[1] <= _WIDEST else None
