"""``moelight convert``: write a checkpoint again with rounded experts."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moelight.cli.options import argument, option, refuse_beside, with_options
from moelight.cli.tables import say_missing_kernels
from moelight.core.errors import ConfigError, did_you_mean
from moelight.core.units import GB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from moelight.convert.checkpoint import Converted

_DENSE = ("keep", "int8")
_COMPRESSED, _GGUF, _PLAIN = "compressed-tensors", "gguf", "safetensors"
_OF_CHECKPOINTS = (
    "experts",
    "group_size",
    "dense",
    "keep",
    "expert_profile",
    "calibrate",
    "host_memory",
    "shard_size",
)
_TARGETS = (_COMPRESSED, _GGUF, _PLAIN)
_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class ConvertArguments:
    """The options of ``moelight convert``, as given."""

    model: str = argument(
        "MODEL",
        "Model to convert: a directory, a Hugging Face hub id, or demo (bundled). GGUF files need --to gguf or "
        "safetensors, quantised checkpoints --to safetensors.",
    )
    output: Path = argument("OUT", "Directory to create for the converted checkpoint, or GGUF file (OUT.gguf).")
    to: str = option(
        "Format to write: compressed-tensors, gguf (a file that llama.cpp reads), or safetensors (of a GGUF file or a "
        "quantised checkpoint).",
        metavar="compressed-tensors|gguf|safetensors",
        default=_COMPRESSED,
    )
    file_type: str | None = option(
        "File type of a GGUF file, as llama.cpp calls it, or dtype of safetensors.", "--type", metavar="Q4_K_M|BF16|..."
    )
    experts: str | None = option("Format of the experts: int4, int8, mxfp4 or fp8; defaults to int4.", metavar="FORMAT")
    group_size: int | None = option(
        "Number of weights per scale: 32, 64 or 128; defaults to 128 for int4 and to a row for int8.", min=1
    )
    dense: str | None = option(
        "keep, or int8 to quantise attention projections, shared experts and dense layers too, one scale per row; "
        "defaults to keep.",
        metavar="keep|int8",
    )
    keep: str | None = option(
        "Percentage of the experts, the most frequently used, to leave unquantised.", metavar="PERCENT%"
    )
    expert_profile: Path | None = option(
        "Expert profile that ranks experts by use, as written by generate --save-expert-profile.", metavar="FILE.json"
    )
    calibrate: Path | None = option("Calibration prompts for int4 and int8 experts.", metavar="PROMPTS.jsonl")
    host_memory: int | None = option("Maximum host memory of the calibration run.", metavar="SIZE")
    shard_size: str | None = option("Maximum size of a checkpoint file; defaults to 4GiB.", metavar="SIZE")


@with_options()
def convert(arguments: ConvertArguments) -> None:
    """Write MODEL again with rounded experts, in a quarter to half of the bytes.

    Numbers are rounded to nearest, and written as compressed-tensors, which vLLM and transformers read; everything else
    is copied. With --to gguf all of the model, dense ones too, is written as one GGUF file with its tokenizer and chat
    template. Run again, the same command goes on where it was interrupted.
    """
    to = arguments.to
    if to not in _TARGETS:
        raise ConfigError(f"--to {to!r} is not one of {', '.join(_TARGETS)}{did_you_mean(to, _TARGETS)}")
    if to == _GGUF:
        _write_gguf(arguments)
        return
    if to == _PLAIN:
        _write_plain(arguments)
        return
    if arguments.file_type is not None:
        raise ConfigError("--type is the type of a GGUF file, or of plain safetensors; give --to gguf, too")
    _write_rounded(arguments)


def _write_rounded(arguments: ConvertArguments) -> None:
    """Write a checkpoint with rounded experts."""
    from moelight.convert.checkpoint import ConvertOptions, convert_checkpoint
    from moelight.engine.options import EngineOptions
    from moelight.formats.compressed_tensors import GROUPS, ROUNDED, Rounding
    from moelight.formats.registry import similar_format

    experts, dense, group_size = arguments.experts or "int4", arguments.dense or "keep", arguments.group_size
    if experts not in ROUNDED:
        raise ConfigError(f"--experts {experts!r} is not one of {', '.join(ROUNDED)}{similar_format(experts, ROUNDED)}")
    if dense not in _DENSE:
        raise ConfigError(f"--dense {dense!r} is not one of {', '.join(_DENSE)}{did_you_mean(dense, _DENSE)}")
    if group_size is not None and group_size not in GROUPS:
        raise ConfigError(f"--group-size {group_size} is not one of {', '.join(map(str, GROUPS))}")
    keep, host_memory, calibrate = arguments.keep, arguments.host_memory, arguments.calibrate
    _check_together(keep, arguments.expert_profile, host_memory, calibrate)
    say_missing_kernels()
    options = ConvertOptions(
        model=arguments.model,
        output=arguments.output,
        experts=Rounding.of(experts, group_size),
        dense=Rounding.of(dense) if dense != "keep" else None,
        shard_bytes=parse_bytes(arguments.shard_size or "4GiB", label="--shard-size"),
        keep=0.0 if keep is None else _share(keep),
        expert_profile=arguments.expert_profile,
        calibrate=calibrate,
        engine=EngineOptions(device="cpu", host_memory=host_memory),
    )
    converted = convert_checkpoint(options, lines := _ProgressLine(), _calibrating)
    for name in converted.left_out:
        print(f"not copied: {name}", file=sys.stderr)
    print(end_words(converted, arguments.output, time.monotonic() - lines.began))


def _write_gguf(arguments: ConvertArguments) -> None:
    """Write a GGUF file."""
    from moelight.convert.gguf_file import GGUFOptions, convert_to_gguf
    from moelight.convert.gguf_types import FILE_TYPES
    from moelight.convert.gguf_types import file_type as checked

    refuse_beside("--to gguf", arguments, _OF_CHECKPOINTS, "a GGUF file has a --type")
    if arguments.file_type is None:
        raise ConfigError(f"--to gguf needs a --type: {', '.join(FILE_TYPES)}")
    output = arguments.output
    options = GGUFOptions(model=arguments.model, output=output, file_type=checked(arguments.file_type))
    result = convert_to_gguf(options, lines := _ProgressLine())
    types = ", ".join(
        f"{name} {format_bytes(nbytes)}" for name, nbytes in sorted(result.types.items(), key=lambda item: -item[1])
    )
    before = f", {result.tensors_before} of {result.tensors} tensors were there" if result.tensors_before else ""
    seconds = time.monotonic() - lines.began
    print(f"{output}: {format_bytes(result.nbytes)} ({types}), {result.tensors} tensors; {seconds:.1f} s{before}")


def _write_plain(arguments: ConvertArguments) -> None:
    """Write plain safetensors."""
    from moelight.convert.plain import PlainOptions, convert_to_plain, plain_dtype

    others = [name for name in _OF_CHECKPOINTS if name != "shard_size"]
    refuse_beside("--to safetensors", arguments, others, "nothing is rounded but to --type")
    options = PlainOptions(
        model=arguments.model,
        output=arguments.output,
        dtype=plain_dtype(arguments.file_type),
        shard_bytes=parse_bytes(arguments.shard_size or "4GiB", label="--shard-size"),
    )
    result = convert_to_plain(options, lines := _ProgressLine())
    before = f", {result.files_before} of {result.files} files were there" if result.files_before else ""
    seconds = time.monotonic() - lines.began
    print(f"{arguments.output}: {format_bytes(result.nbytes)} in {options.dtype}; {seconds:.1f} s{before}")


def _check_together(
    keep: str | None, expert_profile: Path | None, host_memory: int | None, calibrate: Path | None
) -> None:
    """Raise ConfigError for an option without the one that it belongs to."""
    if (keep is None) != (expert_profile is None):
        raise ConfigError("--keep and --expert-profile belong together: how many experts stay, and which are busy")
    if host_memory is not None and calibrate is None:
        raise ConfigError("--host-memory is for the run over --calibrate PROMPTS.jsonl; give both, or neither")


def _calibrating(done: int, total: int) -> None:
    if done == total:
        print(f"{total:,} prompts read", file=sys.stderr)


def _share(text: str) -> float:
    """``10%`` -> 0.1."""
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not text.endswith("%") or not 0 < share < 1:
        raise ConfigError(f"--keep {text!r} is no share of the experts, such as 10%")
    return share


class _ProgressLine:
    """Progress on stderr: one line that changes on a terminal, else a line every few seconds."""

    def __init__(self) -> None:
        self.began = self._told = time.monotonic()
        self._live = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not done:
            self.began = self._told = now
            return
        if now - self._told < (0.2 if self._live else _EVERY_S) and not (self._live and done == total):
            return
        self._told = now
        speed = done / max(now - self.began, 1e-9)
        left = "" if done == total else f", {(total - done) / speed:,.0f} s left"
        line = f"{format_bytes(done)} of {format_bytes(total)}, {speed / GB:.2f} GB/s{left}"
        print(
            f"\r{line}\033[K" if self._live else line, end="" if self._live and done < total else "\n", file=sys.stderr
        )


def end_words(result: Converted, output: Path, seconds: float) -> str:
    """Return the last line: sizes, bits of a rounded number, time."""
    size = f"{format_bytes(result.source_bytes)} -> {format_bytes(result.bytes)}"
    speed = f", {result.read_bytes / seconds / GB:.2f} GB/s" if result.read_bytes else ""
    note = f", {result.kept_experts} experts kept" if result.kept_experts else ""
    if result.reached is not None:
        note += f", {result.reached} experts calibrated"
    before = f", {result.files_before} of {result.files} files were there" if result.files_before else ""
    return f"{output}: {size}, {result.bits:.2f} bits a number of what is rounded{note}; {seconds:.1f} s{speed}{before}"
