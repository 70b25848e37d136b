"""The rules of torchao's method as transformers 5 saves it: int8, E4M3 and integers of fewer bits in a byte each, in
the tensors of torchao's subclasses (version 2 of its configs). Experts, which transformers keeps in stacks, and routers
stay plain.

Rounded activations (the dynamic configs) are not computed: activations stay exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moelight.formats.format import Format, per_group
from moelight.formats.fp8 import FP8Format
from moelight.formats.int8 import Int8Format
from moelight.formats.rules import EXPERTS, MAX_GROUP, NEVER, ROUTERS, TORCHAO_NAMES, ModuleRule, Settings, within

METHOD = "torchao"  # of a ``quantization_config``
_VERSION = 2


def torchao_rules(settings: Settings, scale: str) -> Iterable[ModuleRule]:
    """Yield the rules of a config of transformers."""
    types = settings.values.get("quant_type")
    if not isinstance(types, dict) or set(types) != {"default"} or not isinstance(types["default"], dict):
        raise ValueError("quant_type there must be an object with one config under default")
    stored = _stored(types["default"], scale)
    yield from (ModuleRule(within(re.escape(name)), None) for name in settings.words("modules_to_not_convert"))
    if not settings.only(("include_input_output_embeddings",), (False, True)):
        yield ModuleRule(NEVER, None)
    yield from (ModuleRule(ROUTERS, None), ModuleRule(EXPERTS, None))
    yield ModuleRule(re.compile(r".*"), stored)


def _stored(config: Mapping[str, Any], scale: str) -> Format:
    """The format of the weights under one of torchao's configs."""
    kind, values = config.get("_type"), config.get("_data")
    if not isinstance(kind, str) or kind not in _READERS or not isinstance(values, dict):
        shown = re.sub(r"[^\w]", "?", kind[:60]) if isinstance(kind, str) else "no name"
        raise ValueError(f"the config {shown} of torchao is not read; known: {', '.join(_READERS)}")
    if config.get("_version") != _VERSION:
        raise ValueError(f"configs of torchao are read in version {_VERSION} only")
    return _READERS[kind](Settings(values), scale)


def _granularity(settings: Settings) -> tuple[str, Mapping[str, Any]]:
    """The name of the granularity of the weights, of one or of a pair with that of activations, and its values."""
    value = settings.values.get("granularity")
    value = value[-1] if isinstance(value, list) and value else value
    name, values = (value.get("_type"), value.get("_data")) if isinstance(value, dict) else ("PerRow", {})
    return str(name), values if isinstance(values, dict) else {}


def _by_rows(settings: Settings) -> None:
    if _granularity(settings)[0] != "PerRow":
        raise ValueError("of granularity only PerRow is read")


def _int8(settings: Settings, _: str) -> Format:
    _by_rows(settings)
    return Int8Format(name="torchao int8 per channel", scale="F32", zero_points=True, names=TORCHAO_NAMES)


def _fp8(settings: Settings, _: str) -> Format:
    _by_rows(settings)
    weight = settings.values.get("weight_dtype")
    if weight is not None and (not isinstance(weight, dict) or weight.get("_data") != "float8_e4m3fn"):
        raise ValueError("of weight_dtype only float8_e4m3fn is read")
    return FP8Format(name="torchao FP8 per channel", scale="F32", names=TORCHAO_NAMES)


def _integers(settings: Settings, scale: str) -> Format:
    """Integers of up to 8 bits, of each a byte."""
    packing = settings.values.get("intx_packing_format")
    if not isinstance(packing, dict) or packing.get("_data") != "UNPACKED_TO_INT8":
        raise ValueError("of intx_packing_format only UNPACKED_TO_INT8 is read")
    weight = settings.values.get("weight_dtype")
    bits = re.fullmatch(r"int([1-8])", str(weight.get("_data") if isinstance(weight, dict) else ""))
    if bits is None:
        raise ValueError("of weight_dtype only int1 to int8 is read")
    name, values = _granularity(settings)
    group = 0
    if name == "PerGroup":
        group = Settings(values).integer("group_size", 0, lambda size: 1 <= size <= MAX_GROUP, "a size")
    elif name != "PerAxis" or values.get("axis") != 0:
        raise ValueError("of granularity only PerGroup and PerAxis 0 are read")
    shown = f"torchao int{bits[1]}{' in bytes' if bits[1] != '8' else ''}{per_group(group)}"
    return Int8Format(name=shown, scale=scale, group=group, zero_points=True, names=TORCHAO_NAMES)


_Reader = Callable[[Settings, str], Format]
_READERS: Mapping[str, _Reader] = {
    **dict.fromkeys(("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"), _int8),
    **dict.fromkeys(("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"), _fp8),
    "IntxWeightOnlyConfig": _integers,
}
