"""The rules of a compressed-tensors config, read and written by its own package (extra ``quant``).

The package imports transformers and accelerate: 9 s and 300 MiB. So it works in a child process that ends, and what it
said of a config is kept in the cache directory, by the config and the package's version.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from moelight.core.confined import ConfinedProcess, EndedError
from moelight.core.errors import ConfigError
from moelight.core.paths import cache_directory, write_whole
from moelight.core.small_files import read_object
from moelight.core.units import GiB
from moelight.formats.format import Format
from moelight.formats.mxfp4 import MX_GROUP
from moelight.formats.registry import SCHEMES
from moelight.formats.rules import ModuleRule, Scheme, Settings, pattern_of

_PACKAGE = "compressed-tensors"
_MODULE = "compressed_tensors.quantization"
_MOST_CPU_S = 60.0  # of a config, beside the package's import
_MOST_BYTES = GiB  # of address space
_INSTALL = "the package compressed-tensors, which does that, is not installed: pip install 'moelight[quant]'"
METHOD = _PACKAGE  # of a ``quantization_config``
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
_DEFAULT_GROUPS = {"int4": 128, "mxfp4": MX_GROUP}
# Classes of modules that targets name, and the names of such modules.
_CLASSES = {"Linear": r"(?!(?:.*\.)?(?:embed_tokens|wte)$).*", "Embedding": r"(?:.*\.)?(?:embed_tokens|wte)"}


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

    def stored(self, scale: str) -> Format:
        """The format with scales of the safetensors dtype ``scale``."""
        stored_format = _format(self.scheme([]), _WRITTEN[self.kind][0], scale)
        assert stored_format is not None
        return stored_format

    def scheme(self, targets: Sequence[str]) -> dict[str, Any]:
        """The entry of ``config_groups`` for the modules ``targets``."""
        stored_as, settings = _WRITTEN[self.kind]
        by_group = {"strategy": "group", "group_size": self.group} if self.group else {"strategy": "channel"}
        tokens = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
        return {
            "targets": list(targets),
            "weights": {**settings, **by_group, "symmetric": True},
            "input_activations": tokens if self.kind == "fp8" else None,
            "format": stored_as,
        }


def rounding_config(groups: Sequence[tuple[Rounding, Sequence[str]]], ignored: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint whose modules are rounded, except those ``ignored``. Raises
    ConfigError without the package."""
    kinds = {_WRITTEN[how.kind][0] for how, _ in groups}
    config = {
        "config_groups": {f"group_{number}": how.scheme(targets) for number, (how, targets) in enumerate(groups)},
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": list(ignored),
    }
    try:
        return _completed(config)
    except ValueError as error:
        raise ConfigError(f"the checkpoint is written as compressed-tensors, and {error}") from None


def _completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The config ``values`` as the package understands it, with all its defaults. ValueErrors say what is wrong."""
    values = {"quant_method": _PACKAGE, **values}
    if _MODULE in sys.modules:
        return _answered(complete(values))
    try:
        version = metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        raise ValueError(_INSTALL) from None
    path = _place(values, version)
    with contextlib.suppress(OSError, ValueError):
        return read_object(path)
    child = ConfinedProcess(f"{__name__}:completer", cpu_s=_MOST_CPU_S, memory_bytes=_MOST_BYTES)
    try:
        completed = _answered(child.ask(values))
    except EndedError as error:
        raise ValueError(f"the package compressed-tensors does not survive it ({error})") from None
    except OSError:
        raise ValueError(f"the package compressed-tensors {version} cannot be imported; install it again") from None
    finally:
        child.close()
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps(completed))
    return completed


def _place(values: Mapping[str, Any], version: str) -> Path:
    """Return the path of the cached answer to ``values``."""
    key = hashlib.sha256(json.dumps([version, values], sort_keys=True).encode("utf-8", "surrogatepass"))
    return cache_directory(_PACKAGE, f"{key.hexdigest()[:32]}.json")


def _answered(answer: list[Any]) -> dict[str, Any]:
    """The completed config of an answer of `complete`."""
    completed, reason = answer
    if completed is None:
        raise ValueError(f"the package compressed-tensors refuses it ({reason})")
    result: dict[str, Any] = completed
    return result


def completer(_setup: object) -> Callable[[Mapping[str, Any]], list[Any]]:
    """`complete`, in a process where the package is imported."""
    import compressed_tensors.quantization  # noqa: F401 (before the process is confined)

    return complete


def complete(values: Mapping[str, Any]) -> list[Any]:
    """``[the completed config, None]``, or ``[None, why]`` if the package refuses ``values``; imports it."""
    from compressed_tensors.quantization import QuantizationConfig

    try:
        config = QuantizationConfig.model_validate(values)
        return [json.loads(json.dumps(config.model_dump(), default=str)), None]
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, RecursionError) as error:
        return [None, _first_line(error)]


def rules_of(settings: Settings, scale: str) -> Iterator[ModuleRule]:
    """The rules of a config of the method `METHOD`; ``scale``: the safetensors dtype of scales that name none.
    ValueErrors say what is wrong."""
    values = settings.values
    sparsity = values.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format") not in (None, "dense")):
        raise ValueError("sparse weights are not read")
    if values.get("transform_config"):
        raise ValueError("transforms of activations (transform_config) are not computed")
    config = _completed(values)
    for name in config["ignore"] or ():
        yield ModuleRule(_pattern(name), None)
    exact, other = list[ModuleRule](), list[ModuleRule]()
    for scheme in config["config_groups"].values():
        stored = _format(scheme, str(scheme.get("format") or config["format"]), scale)
        for target in scheme["targets"]:
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


def _format(scheme: Mapping[str, Any], stored_as: str, scale: str) -> Format | None:
    """The format of the weights of an entry of ``config_groups``; None if only activations are quantised."""
    args = scheme["weights"]
    if args is None:
        return None
    floating = args["type"] == "float"
    if (reader := SCHEMES.get((stored_as, floating))) is None:
        names = ", ".join(dict.fromkeys(name for name, _ in SCHEMES))
        raise ValueError(f"the format {stored_as[:40]!r} is not read; known: {names}")
    strategy, block = args["strategy"], args.get("block_structure") or [0, 0]
    group = {"tensor": 0, "channel": 0, **dict.fromkeys(("group", "tensor_group"), args.get("group_size"))}
    group["block"] = block[-1]
    if strategy not in group or not (group[strategy] or strategy in ("tensor", "channel")):
        raise ValueError(f"weights of the strategy {strategy} are not read")
    return reader(
        Scheme(
            stored_as=stored_as,
            floating=floating,
            bits=args["num_bits"],
            strategy=strategy,
            group=group[strategy],
            group_rows={"tensor": 0, "block": block[0]}.get(strategy, 1),
            symmetric=args["symmetric"],
            scale=_SCALES.get(str(args.get("scale_dtype")), scale),
        )
    )


def _first_line(error: Exception) -> str:
    """Return the first line of pydantic's message, without the input value and the URL."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    shown = " ".join(lines[1:3]) if len(lines) > 1 else (lines or [type(error).__name__])[0]
    return re.sub(r"[^ -~]", "?", re.sub(r" \[type=.*", "", shown))[:120]
