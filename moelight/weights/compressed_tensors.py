"""The rules of a compressed-tensors config, read and written by its own package (extra ``quant``, imported on first
use)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from moelight.core.errors import ConfigError
from moelight.profiles import stored as formats
from moelight.profiles.quantization import ModuleRule, pattern_of, read_compressed_tensors
from moelight.profiles.stored import PACKED, SCALED, StoredFormat

_INSTALL = "the package compressed-tensors, which does that, is not installed: pip install 'moelight[quant]'"
_BITS = (2, 4, 8)  # codes that do not cross words
_PACKED_NAMES = (".weight_packed", ".weight_scale", ".weight_zero_point")
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized")
_SCALES = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
# What `Rounding.kind` may be: the format on disk and the arguments of its weights. Libraries read 8-bit integers of
# experts that are packed, and E4M3 of experts beside activations that are rounded token by token.
_WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int"}),
    "int8": ("pack-quantized", {"num_bits": 8, "type": "int"}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float"}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float"}),
}
ROUNDED = tuple(_WRITTEN)
GROUPS = (32, 64, 128)
_DEFAULT_GROUPS = {"int4": 128, "mxfp4": formats.MX_GROUP}
# Classes of modules that targets name, and the names of such modules.
_CLASSES = {"Linear": r"(?!(?:.*\.)?(?:embed_tokens|wte)$).*", "Embedding": r"(?:.*\.)?(?:embed_tokens|wte)"}


def know_compressed_tensors() -> None:
    """Let the package say what a config of the method ``compressed-tensors`` means."""
    read_compressed_tensors(_rules)


class Rounding(NamedTuple):
    """How matrices are rounded: ``kind`` is one of `ROUNDED`, ``group`` columns share a scale; 0: all of a row."""

    kind: str
    group: int

    @classmethod
    def of(cls, kind: str, group: int | None = None) -> Rounding:
        """``group`` None: the usual one. Raises ConfigError for a group that the kind has not."""
        usual = _DEFAULT_GROUPS.get(kind, 0)
        fixed = {"mxfp4": "groups of 32", "fp8": "a scale for each row"}.get(kind)
        if fixed and group not in (None, usual):
            raise ConfigError(f"--group-size {group}: {kind} has {fixed}; leave the option out")
        return cls(kind, usual if group is None else group)

    def stored(self, scale: str) -> StoredFormat:
        """The format with scales of the safetensors dtype ``scale``."""
        found = _format(self.scheme([]), _WRITTEN[self.kind][0], scale)
        assert found is not None
        return found

    def scheme(self, targets: Sequence[str]) -> Any:
        """The ``QuantizationScheme`` of the modules ``targets``; raises ConfigError without the package."""
        try:
            from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        except ImportError:
            raise ConfigError(f"the checkpoint is written as compressed-tensors, and {_INSTALL}") from None
        stored_as, given = _WRITTEN[self.kind]
        by_group = {"strategy": "group", "group_size": self.group} if self.group else {"strategy": "channel"}
        tokens = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
        return QuantizationScheme(
            targets=list(targets),
            weights=QuantizationArgs(**given, **by_group, symmetric=True),
            input_activations=tokens if self.kind == "fp8" else None,
            format=stored_as,
        )


def rounding_config(groups: Sequence[tuple[Rounding, Sequence[str]]], ignored: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint whose modules are rounded, except those ``ignored``."""
    schemes = {f"group_{number}": how.scheme(targets) for number, (how, targets) in enumerate(groups)}
    from compressed_tensors.quantization import QuantizationConfig

    kinds = {_WRITTEN[how.kind][0] for how, _ in groups}
    config = QuantizationConfig(
        config_groups=schemes,
        format=kinds.pop() if len(kinds) == 1 else "mixed-precision",
        quantization_status="compressed",
        ignore=list(ignored),
    )
    found: dict[str, Any] = json.loads(json.dumps(config.model_dump(), default=str))
    return found


def _rules(values: Mapping[str, Any], scale: str) -> Iterator[ModuleRule]:
    """What the config ``values`` says; ``scale``: the safetensors dtype of scales that name none. ValueErrors say what
    is wrong."""
    try:
        from compressed_tensors.quantization import QuantizationConfig
    except ImportError:
        raise ValueError(_INSTALL) from None
    sparsity = values.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format") not in (None, "dense")):
        raise ValueError("sparse weights are not read")
    if values.get("transform_config"):
        raise ValueError("transforms of activations (transform_config) are not computed")
    try:
        config = QuantizationConfig.model_validate({"quant_method": "compressed-tensors", **values})
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
        raise ValueError(f"the package compressed-tensors refuses it ({_first_line(error)})") from None
    for name in config.ignore or ():
        yield ModuleRule(_pattern(name), None)
    exact, other = list[ModuleRule](), list[ModuleRule]()
    for scheme in config.config_groups.values():
        stored = _format(scheme, str(getattr(scheme, "format", None) or config.format), scale)
        for target in scheme.targets:
            (other if target in _CLASSES else exact).append(ModuleRule(_pattern(target), stored))
    yield from exact
    yield from other


def _pattern(name: str) -> re.Pattern[str]:
    """The modules that a target or an ignored ``name`` means: a class, an expression after ``re:``, or a name."""
    if name in _CLASSES:
        return re.compile(_CLASSES[name])
    if name.startswith("re:"):
        return re.compile(rf"(?:{pattern_of(name.removeprefix('re:')).pattern}).*")  # matched from the beginning
    return re.compile(re.escape(name))


def _format(scheme: Any, stored_as: str, scale: str) -> StoredFormat | None:
    """The format of the weights of a ``QuantizationScheme``; None if only activations are quantised."""
    args = scheme.weights
    if args is None:
        return None
    if stored_as == "mixed-precision" or stored_as not in _FORMATS:
        raise ValueError(f"the format {stored_as[:40]!r} is not read; known: {', '.join(_FORMATS)}")
    strategy = str(getattr(args.strategy, "value", args.strategy))
    floating = str(getattr(args.type, "value", args.type)) == "float"
    group = {"tensor": 0, "channel": 0, "group": args.group_size, "block": (args.block_structure or [0, 0])[-1]}
    if strategy not in group or not (group[strategy] or strategy in ("tensor", "channel")):
        raise ValueError(f"weights of the strategy {strategy} are not read")
    if stored_as == "mxfp4-pack-quantized":
        if not floating or args.num_bits != 4 or args.group_size != formats.MX_GROUP:
            raise ValueError("mxfp4-pack-quantized weights must be float, of 4 bits in groups of 32")
        return formats.mxfp4((".weight_packed", ".weight_scale"))
    rows = {"tensor": 0, "block": (args.block_structure or [0, 0])[0]}.get(strategy, 1)
    scale = _SCALES.get(str(args.scale_dtype), scale)
    packed = stored_as == "pack-quantized"
    if packed and (floating or args.num_bits not in _BITS or strategy in ("tensor", "block")):
        raise ValueError(f"packed codes of {args.num_bits} bits by {strategy} are not read; known: int 2, 4, 8 bits")
    if not packed and args.num_bits != 8:
        raise ValueError(f"{stored_as} weights of {args.num_bits} bits are not read")
    named = {"tensor": "per tensor", "channel": "per channel"}.get(strategy) or f"in groups of {group[strategy]}"
    named = f"in blocks of {rows}x{group[strategy]}" if strategy == "block" else named
    return StoredFormat(
        name=f"{'FP8' if floating else f'int{args.num_bits}'} {named}",
        kind=PACKED if packed else SCALED,
        bits=args.num_bits,
        codes="I32" if packed else "F8_E4M3" if floating else "I8",
        scale=scale,
        group=group[strategy],
        group_rows=rows,
        zero_points=not args.symmetric,
        names=_PACKED_NAMES if packed else (".weight", *_PACKED_NAMES[1:]),
    )


def _first_line(error: Exception) -> str:
    """What pydantic says first, without the value that it was given and its address on the web."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    shown = " ".join(lines[1:3]) if len(lines) > 1 else (lines or [type(error).__name__])[0]
    return re.sub(r"[^ -~]", "?", re.sub(r" \[type=.*", "", shown))[:120]
