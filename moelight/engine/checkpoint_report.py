"""Validation of a checkpoint from headers and small files alone: the families of its tensors, those that are not read,
what does not fit, and the texts around it (tokenizer, chat template, the tokens that end an answer).

The checks are those of a job, in its order, so the first refusal is the line with which a job ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from moelight.core.errors import CheckpointError, ConfigError, UserError
from moelight.core.request import SamplingParams
from moelight.engine.chat import TEMPLATE_DIRECTORY, TEMPLATE_FILE
from moelight.engine.model import LazyModel
from moelight.engine.special_tokens import CONFIG
from moelight.engine.tokenizer import TOKENIZER, Tokenizer
from moelight.formats.format import Format
from moelight.formats.registry import SUFFIXES
from moelight.models.checkpoints import open_model
from moelight.profiles.gguf import read_gguf
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.quantization import read_quantization
from moelight.weights.source import GGUF, IgnoredTensor
from moelight.weights.tensor_map import open_needed

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorFamily:
    """Tensors that differ in the numbers of their names alone, ``*`` in ``name``, and in the ``leaves`` that follow it.

    Attributes:
        count: of matrices and vectors, a quantised matrix with its scales as one.
        format: how they are stored: a dtype, or the name of a quantised format.
        nbytes: of all stored tensors.
        reason: why they are not read; empty if they are.
    """

    name: str
    leaves: tuple[str, ...]
    count: int
    format: str
    nbytes: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextReport:
    """The tokenizer and what surrounds it.

    Attributes:
        tokenizer: the file that it is read from.
        tokens: their number, added ones included.
        ends: ``(id, text)`` of the tokens that end an answer.
        roles: texts of special tokens by their role (``bos_token``, …).
        special: number of special tokens.
        template: the file of the chat template; empty without one.
        templates: their names.
        written: special tokens that occur in the template.
    """

    tokenizer: str
    tokens: int
    ends: tuple[tuple[int, str], ...]
    roles: Mapping[str, str]
    special: int
    template: str
    templates: tuple[str, ...]
    written: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReport:
    """The contents of a checkpoint, and whether it can be run.

    Attributes:
        refusals: one line each: what does not fit, and what to do; a job ends with the first.
        model_type: of its config; empty if that cannot be read.
        road: ``native``: moelight's own decoder; ``graph``: transformers' module graph; empty if it does not open.
        context: the most tokens of a sequence; 0 if unknown.
        files: that hold weights.
        families: of tensors that are read, and of those that are not; empty if headers are damaged.
        text: None if the tokenizer cannot be read.
    """

    name: str
    path: Path | None = None
    refusals: tuple[str, ...] = ()
    model_type: str = ""
    road: str = ""
    context: int = 0
    files: int = 0
    families: tuple[TensorFamily, ...] = ()
    text: TextReport | None = None

    @property
    def read(self) -> tuple[TensorFamily, ...]:
        return tuple(family for family in self.families if not family.reason)

    @property
    def ignored(self) -> tuple[TensorFamily, ...]:
        return tuple(family for family in self.families if family.reason)


@dataclass(slots=True)
class _Refusals:
    """The errors of checks that follow one another, as lines, each once."""

    lines: list[str] = field(default_factory=list)

    def of(self, check: Callable[[], _T]) -> _T | None:
        """The result of ``check``; None if it refuses, which is noted."""
        try:
            return check()
        except UserError as error:
            faults = error.faults if isinstance(error, CheckpointError) else ()
            self.lines += [line for line in (str(error), *faults[1:]) if line not in self.lines]
            return None


def check_checkpoint(model: LazyModel) -> CheckpointReport:
    """Check ``model`` as a job does before it loads weights; a fault does not end the check but becomes a refusal."""
    refusals = _Refusals()
    directory = refusals.of(lambda: model.directory)
    if directory is None:
        return CheckpointReport(name=model.name, refusals=tuple(refusals.lines))
    profile = refusals.of(lambda: model.profile)
    tokenizer = refusals.of(lambda: model.tokenizer)
    if profile is not None and tokenizer is not None:
        refusals.of(lambda: model.check(SamplingParams()))
    opened = refusals.of(lambda: open_model(model.name))
    try:
        pieces = tuple(_pieces(directory, () if opened is None else opened.ignored))
    except UserError:  # which is a refusal already
        pieces = ()
    return CheckpointReport(
        name=model.name,
        path=directory,
        refusals=tuple(refusals.lines),
        model_type=_model_type(directory) if profile is None else profile.model_type,
        road="" if opened is None else opened.source.road,
        context=0 if profile is None else profile.max_positions,
        files=len({piece.file for piece in pieces}),
        families=tuple(_families(pieces)),
        text=None if tokenizer is None else _text_report(directory, tokenizer),
    )


def _model_type(directory: Path) -> str:
    """The model type that a config names which is refused; empty if it names none."""
    try:
        named = HFConfig.from_file(directory / "config.json").find("model_type")
    except UserError:
        return ""
    return named if isinstance(named, str) else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredPiece:
    """A stored tensor, and the matrix or vector that it is or belongs to: ``module``, with ``suffix`` if it is no
    weight."""

    module: str
    suffix: str
    format: str
    nbytes: int
    file: Path
    reason: str = ""


def _pieces(directory: Path, ignored: Iterable[IgnoredTensor]) -> Iterator[_StoredPiece]:
    """Every stored tensor; raises as reading of headers does."""
    if directory.suffix == GGUF:
        for tensor in read_gguf(directory).tensors.values():
            module, suffix = _without_weight(tensor.name)
            yield _StoredPiece(module=module, suffix=suffix, format=tensor.type, nbytes=tensor.nbytes, file=tensor.file)
        return
    checkpoint = open_needed(directory)
    reasons = {tensor.info.name: tensor.reason for tensor in (*checkpoint.ignored, *ignored)}
    infos = {**checkpoint.tensors, **{tensor.info.name: tensor.info for tensor in checkpoint.ignored}}
    format_of = _formats(directory)
    for name, info in infos.items():
        module, suffix = _without_weight(name)
        stored = info.dtype
        if (matrix := _matrix_of(name, infos, format_of)) is not None:
            module, suffix, stored = matrix
        reason = reasons.get(name, "")
        yield _StoredPiece(
            module=module, suffix=suffix, format=stored, nbytes=info.nbytes, file=info.file, reason=reason
        )


def _formats(directory: Path) -> Callable[[str], Format | None]:
    """The format of each module by the config; none where that cannot be read."""
    try:
        quantization = read_quantization(HFConfig.from_file(directory / "config.json"))
    except (CheckpointError, ConfigError):
        return lambda _: None
    return (lambda _: None) if quantization is None else quantization.format_of


def _matrix_of(
    name: str, stored: Mapping[str, object], format_of: Callable[[str], Format | None]
) -> tuple[str, str, str] | None:
    """Module, suffix and format of the quantised matrix of which tensor ``name`` is a part, if it is of one."""
    for ending in sorted(SUFFIXES, key=len, reverse=True):
        module = name.removesuffix(ending)
        if module == name or (stored_format := format_of(module)) is None:
            continue
        if ending not in (*stored_format.names, *stored_format.beside):
            continue
        if stored_format.names[0] == ".weight" and not any(module + part in stored for part in stored_format.names[1:]):
            return None  # left as it was, as norms are
        return module, "", stored_format.name
    return None


def _without_weight(name: str) -> tuple[str, str]:
    """The module of a tensor, and the rest of its name if that is not ``weight``."""
    module, dot, last = name.rpartition(".")
    if not dot or last not in ("weight", "bias"):
        return name, ""
    return module, "" if last == "weight" else f".{last}"


def _families(pieces: Iterable[_StoredPiece]) -> Iterator[TensorFamily]:
    """``pieces`` by the names of their modules; those of one place, format and number together."""
    alike: dict[tuple[str, str, str], dict[str, int]] = {}
    for piece in pieces:
        sizes = alike.setdefault((_NUMBER.sub("*", piece.module) + piece.suffix, piece.format, piece.reason), {})
        sizes[piece.module] = sizes.get(piece.module, 0) + piece.nbytes
    places: dict[tuple[str, str, str, int, str], dict[str, int]] = {}
    for (name, stored, reason), sizes in alike.items():
        parent, _, leaf = name.rpartition(".") if not name.endswith(".bias") else _biased(name)
        kind = leaf.rpartition("_")[2] if "_" in leaf else ""  # ``proj`` of ``q_proj``
        leaves = places.setdefault((parent, stored, reason, len(sizes), kind), {})
        leaves[leaf] = leaves.get(leaf, 0) + sum(sizes.values())
    for (parent, stored, reason, count, _), leaves in places.items():
        yield TensorFamily(
            name=parent,
            leaves=tuple(leaves),
            count=count * len(leaves),
            format=stored,
            nbytes=sum(leaves.values()),
            reason=reason,
        )


def _biased(name: str) -> tuple[str, str, str]:
    parent, dot, leaf = name.removesuffix(".bias").rpartition(".")
    return parent, dot, f"{leaf}.bias"


def _text_report(directory: Path, tokenizer: Tokenizer) -> TextReport:
    template = tokenizer.template
    sources = {} if template is None else template.sources
    special = sorted(tokenizer.special_ids)
    written = (
        text for text in map(tokenizer.token_text, special) if any(text in source for source in sources.values())
    )
    return TextReport(
        tokenizer=_tokenizer_file(directory),
        tokens=tokenizer.vocab_size,
        ends=tuple((token, tokenizer.token_text(token)) for token in sorted(tokenizer.eos_token_ids)),
        roles=tokenizer.roles,
        special=len(special),
        template=_template_file(directory) if sources else "",
        templates=tuple(sorted(sources)),
        written=tuple(text for text in written if text),
    )


def _tokenizer_file(directory: Path) -> str:
    if directory.is_file():
        return directory.name
    return TOKENIZER if (directory / TOKENIZER).exists() else "a SentencePiece model"


def _template_file(directory: Path) -> str:
    """The file of the chat template, in the order in which `engine.chat` looks for it."""
    if directory.is_file():
        return directory.name
    if (directory / TEMPLATE_FILE).exists():
        return TEMPLATE_FILE
    return TEMPLATE_DIRECTORY if any((directory / TEMPLATE_DIRECTORY).glob("*.jinja")) else CONFIG
