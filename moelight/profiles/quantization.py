"""Parsing of the ``quantization_config`` of a config.json: the stored format of each module, and the bytes that follow.

The input is untrusted: names and patterns are bounded, and what is not known is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from moelight.core.dtypes import dtype_named
from moelight.core.errors import ConfigError
from moelight.core.units import align_up
from moelight.formats.compressed_tensors import METHOD as COMPRESSED_TENSORS
from moelight.formats.format import PAGE_ALIGNMENT, Format
from moelight.formats.methods import METHODS, method_of
from moelight.formats.registry import similar_format
from moelight.formats.rules import ModuleRule, Settings
from moelight.profiles.hf_config import QUANTISED_KEYS, HFConfig
from moelight.profiles.model import ModelProfile, StoredTensor
from moelight.profiles.stored import StoredWeights
from moelight.profiles.tensor_list import dense_tensors, page_shapes

_MOST_RULES = 1 << 12
_STACKING_VERSION = 5  # of transformers, from which on experts are one parameter of a layer
# Matrices that our own decoder multiplies as they are stored.
KEPT = ("embed", "qkv", "o", "dense_gate_up", "dense_down", "head")
# Parts of names that tools spell in two ways (those of Mixtral, which transformers 5 renamed).
_SPELLINGS = ((".block_sparse_moe.", ".mlp."), (".w1", ".gate_proj"), (".w3", ".up_proj"), (".w2", ".down_proj"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """The formats of a checkpoint's modules, by the first of ``rules`` that matches; without one, a module has the
    model's dtype. ``respelled``: parts of a module's name, and how rules may spell them."""

    rules: tuple[ModuleRule, ...]
    respelled: tuple[tuple[str, str], ...] = ()

    def format_of(self, module: str) -> Format | None:
        """The format of the matrix of ``module``, a name on disk without its last part (``.weight``); a rule may name
        it under another spelling."""
        names = [module]
        for part, other in self.respelled:
            names += [
                f"{name}.".replace(f"{part.rstrip('.')}.", f"{other.rstrip('.')}.")[:-1]
                for name in names
                if part in name
            ]
        return next((rule.stored for rule in self.rules if any(map(rule.pattern.fullmatch, names))), None)


Kept = tuple[Format, int]  # format and bytes of a matrix


def read_quantization(config: HFConfig) -> Quantization | None:
    """The quantisation that ``config`` states, or None.

    Raises ConfigError for a method, a format or a setting that is not known.
    """
    key = next((key for key in QUANTISED_KEYS if config.find(key) is not None), None)
    if key is None:
        return None
    values = config.find(key)
    method = method_of(values) if isinstance(values, dict) else None
    if key == "compression_config" and method is None:
        method = COMPRESSED_TENSORS
    if not isinstance(values, dict) or not isinstance(method, str) or method not in METHODS:
        hint = similar_format(method[:40], METHODS) if isinstance(method, str) else ""
        raise config.quantised_error(key, f"by none of the methods read ({', '.join(METHODS)}){hint}")
    if config.find("expert_dtype") is not None:  # DeepSeek-V4 says it outside
        values = {"expert_dtype": config.find("expert_dtype"), **values}
    try:
        settings = Settings(values, stacks_experts=_of_transformers_5(config))
        rules = tuple(METHODS[method](settings, _scale_dtype(config)))
        if len(rules) > _MOST_RULES:
            raise ValueError(f"has {len(rules):,} rules")
    except ValueError as error:
        raise config.quantised_error(key, f"and {error}") from None
    return Quantization(rules=rules, respelled=_respelled(rules))


def _of_transformers_5(config: HFConfig) -> bool:
    """True if version 5 of transformers saved ``config``, or a later one."""
    version = config.find("transformers_version")
    major = version.partition(".")[0] if isinstance(version, str) else ""
    return major.isascii() and major.isdecimal() and int(major[:4]) >= _STACKING_VERSION


def _respelled(rules: Iterable[ModuleRule]) -> tuple[tuple[str, str], ...]:
    """The `_SPELLINGS` that some rule uses: of a part, and of the other one."""
    text = "\n".join(rule.pattern.pattern for rule in rules)
    both = (*_SPELLINGS, *(pair[::-1] for pair in _SPELLINGS))
    return tuple((part, other) for part, other in both if other.strip(".") in text)


def with_stored(
    profile: ModelProfile,
    format_of: Callable[[str], Format | None],
    where: str,
    *,
    multiplied: Collection[str] = (),
) -> ModelProfile:
    """``profile`` with the bytes of a checkpoint whose modules are stored as ``format_of`` says; None: in the
    model's dtype. ``multiplied``: the names of the tensors of a module graph that are used for products alone. Raises
    ConfigError, naming the file ``where``, if a matrix cannot be."""
    counted = _Count(profile, format_of, where)
    if profile.dense:
        pages = [[size] for size in counted.layers()]
    else:
        pages = [counted.pages(layer) if moe else [] for layer, moe in enumerate(profile.moe_layers)]
    experts, reasons = tuple(counted.named), dict(counted.reasons)
    dense = tuple(
        (part.name, part.layer, size)
        for tensor in dense_tensors(profile)
        for part in tensor.parts
        if len(part.shape) == 2
        and (size := counted.matrix(_module(profile, part.name, part.layer), *part.shape)) is not None
    )
    dense += tuple(counted.of_layers)

    def kept_as(part: StoredTensor) -> Kept | None:
        if profile.tensors and part.name not in multiplied:
            return None
        stored = format_of(_module(profile, part.name, part.layer))
        try:
            return None if stored is None else (stored, stored.paged_bytes(*part.shape))
        except ConfigError:
            return None

    matrices = kept_matrices(profile, kept_as)
    name, of_experts = (", ".join(names) or profile.dtype for names in (counted.named, experts))
    stored = StoredWeights.of(name, of_experts, pages, _elements(profile), dense, matrices, reasons)
    repacked = -(-counted.repacked // max(sum(map(len, pages)), 1))
    stored = replace(stored, repacked_bytes=repacked, cpu_integers=counted.cpu_integers, cpu_only=counted.cpu_only)
    return replace(profile, stored=stored)


def cpu_integers_of(formats: Iterable[Format]) -> str | None:
    """The reason why int8 activations multiply some of ``formats`` on a CPU alone, or None."""
    reasons = (stored.gpu_int8_reason for stored in formats if stored.int8_reason is None)
    return next((reason for reason in reasons if reason is not None), None)


def kept_matrices(
    profile: ModelProfile, kept_as: Callable[[StoredTensor], Kept | None]
) -> tuple[tuple[str, int, int], ...]:
    """The matrices outside the experts that our own decoder multiplies as they are stored: name, layer and bytes in
    memory of each part. ``kept_as``: format and bytes of one; None: it is not quantised, or not kept."""
    matrices: list[tuple[str, int, int]] = []
    for tensor in dense_tensors(profile):
        parts = [kept_as(part) for part in tensor.parts if profile.tensors or tensor.name in KEPT]
        stored_parts = [entry for entry in parts if entry is not None and entry[0].is_quantised]
        if len(stored_parts) == len(tensor.parts) and _is_multiplied(
            tensor.name, [stored for stored, _ in stored_parts]
        ):
            for part, (_, size) in zip(tensor.parts, stored_parts, strict=True):
                matrices.append((part.name, part.layer, size))
    return tuple(matrices)


def _is_multiplied(name: str, formats: Sequence[Format]) -> bool:
    """Whether a tensor of parts in these formats is: embeddings are read row by row, gate and up share a format."""
    if name == "embed":
        return all(
            stored_format.rows_of_line(suffix) in (0, 1) for stored_format in formats for suffix in stored_format.names
        )
    return name != "dense_gate_up" or len(set(formats)) == 1


def with_pages(
    profile: ModelProfile, pages: Sequence[Sequence[int]], matrices: Sequence[tuple[str, int, int]], transposed: int
) -> ModelProfile:
    """Quantised ``profile`` with the bytes that pages were found to have, of each expert of each layer, and matrices
    that are ``matrices``. ``transposed``: bytes of an expert, on average, that are transposed when it is read."""
    stored = profile.stored
    assert stored is not None, "only quantised pages differ from what the profile says"
    weights = StoredWeights.of(stored.name, stored.dtype.name, pages, _elements(profile), stored.dense, matrices)
    weights = replace(
        weights,
        mixed=weights.mixed or stored.mixed,
        without_integers=stored.without_integers,
        cpu_integers=stored.cpu_integers,
        cpu_only=stored.cpu_only,
        exact=stored.exact,
        repacked_bytes=stored.repacked_bytes + transposed,
    )
    return replace(profile, stored=weights)


def _elements(profile: ModelProfile) -> int:
    return sum(rows * columns for rows, columns in page_shapes(profile).values())


class _Count:
    """Bytes of the matrices of a model; ``named``: the formats met, in order; ``reasons``: why each has no integers, or
    None; ``cpu_only``, ``cpu_integers``: those of experts in `StoredWeights`; ``of_layers``: name, layer and bytes of
    those in the pages of a dense model; ``repacked``: bytes of all experts that are turned into packed integers."""

    def __init__(self, profile: ModelProfile, format_of: Callable[[str], Format | None], where: str) -> None:
        self._profile, self._format_of, self._where = profile, format_of, where
        self._itemsize = dtype_named(profile.dtype).itemsize
        self.named: dict[str, None] = {}
        self.reasons: dict[str, str | None] = {}
        self.cpu_only: str | None = None
        self.cpu_integers: str | None = None
        self.of_layers: list[tuple[str, int, int]] = []
        self.repacked = 0

    def matrix(self, module: str, rows: int, columns: int, *, paged: bool = False) -> int | None:
        """Bytes of the matrix [rows, columns] of ``module``, in an expert's page if ``paged``; None in the model's
        dtype. Outside of experts tools leave a matrix plain whose size does not fit the format."""
        stored = self._format_of(module)
        if stored is None:
            self.reasons[self._profile.dtype] = self._profile.dtype
            return None
        try:
            size = stored.paged_bytes(rows, columns) if paged else stored.bytes_for(rows, columns)
        except ConfigError as error:
            if not paged or stored.plain_if_unfit:
                return None
            raise ConfigError(f"{self._where}: {module}: {error}; config and weights do not fit") from None
        self.reasons[stored.name] = stored.int8_reason
        self.named[stored.name] = None
        if paged:
            self.cpu_only = self.cpu_only or stored.cpu_reason
            self.cpu_integers = self.cpu_integers or cpu_integers_of([stored])
        if paged and stored.repacked_format(rows, columns) is not None:
            self.repacked += size
        return size

    def layers(self) -> list[int]:
        """Bytes of the page of each layer of a dense model."""
        sizes = [0] * self._profile.num_layers
        for tensor in self._profile.page_tensors:
            rows, columns = tensor.shape
            size = self.matrix(_module(self._profile, tensor.name, tensor.layer), rows, columns, paged=True)
            plain = align_up(rows * columns * self._itemsize, PAGE_ALIGNMENT)
            sizes[tensor.layer] += plain if size is None else size
            if size is not None:
                self.of_layers.append((tensor.name, tensor.layer, size))
        return sizes

    def pages(self, layer: int) -> list[int]:
        """Bytes of each expert of ``layer``."""
        count, shapes = self._profile.experts.num_experts, page_shapes(self._profile)
        modules = {expert_module(self._profile, layer, name, 1) for name in shapes}
        if modules == {expert_module(self._profile, layer, name, 0) for name in shapes}:  # a stack of all experts
            return [self._page(layer, 0)] * count
        return [self._page(layer, expert) for expert in range(count)]

    def _page(self, layer: int, expert: int) -> int:
        """Bytes of an expert of ``layer``."""
        spec, total = self._profile.experts, 0
        for name, shape in page_shapes(self._profile).items():
            rows, columns = shape[::-1] if spec.transposed else shape
            plain_bytes = rows * columns * self._itemsize
            module = expert_module(self._profile, layer, name, expert)
            quantised = None if name.endswith("_bias") else self.matrix(module, rows, columns, paged=True)
            if quantised is None and not name.endswith("_bias"):
                self.named[self._profile.dtype] = None
            total += align_up(plain_bytes, PAGE_ALIGNMENT) if quantised is None else quantised
        return total


def expert_module(profile: ModelProfile, layer: int, matrix: str, expert: int | None) -> str:
    """The module of a matrix of an expert, a name on disk; ``expert`` None: of the stack of all experts."""
    spellings = getattr(profile.names, matrix, ())
    infix = "{expert}." if expert is not None else ""
    name = spellings[0] if spellings else f"model.layers.{{layer}}.mlp.experts.{infix}{matrix}_proj"
    return str(name).format(layer=layer, expert=expert).removesuffix(".weight")


def _module(profile: ModelProfile, name: str, layer: int) -> str:
    spellings = getattr(profile.names, name, ())
    return (str(spellings[0]).format(layer=layer) if spellings else name).removesuffix(".weight")


def _scale_dtype(config: HFConfig) -> str:
    """The safetensors name of the model's dtype, which scales have by default."""
    return {"float16": "F16", "float32": "F32"}.get(config.dtype(default="bfloat16"), "BF16")
