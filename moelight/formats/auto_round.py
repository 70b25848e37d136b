"""The rules of auto-round's own method, ``auto-round``, whose ``packing_format`` names the format of another tool.

Layouts and settings are those of auto-round 0.16: `auto_round/inference/convert_model.py` and its exporters. Rounded
activations (``act_bits``) are not computed: activations stay exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moelight.formats.awq import awq
from moelight.formats.format import Format
from moelight.formats.gptq import gptq
from moelight.formats.mxfp4 import MX_GROUP, mxfp4
from moelight.formats.nvfp4 import NV_GROUP, nvfp4
from moelight.formats.rules import NEVER, ROUTERS, ModuleRule, Settings, pattern_of

METHODS = ("auto-round", "intel/auto-round")  # of a ``quantization_config``
_GPTQ = ("auto_round:auto_gptq", "auto_round:gptq", "auto_round", "auto")
_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_COMPRESSED = ("auto_round:llm_compressor",)
_PLAIN_BITS = 16
_MODULE_NAME = re.compile(r"[\w.]+")


def auto_round_rules(settings: Settings, _: str) -> Iterable[ModuleRule]:
    """Yield the rules of a config: modules that ``extra_config`` names or matches, then all others."""
    if settings.values.get("rotation_config"):
        raise ValueError("rotations of weights and activations (rotation_config) are not computed")
    exceptions = settings.values.get("extra_config") or {}
    if not isinstance(exceptions, dict) or not all(isinstance(entry, dict) for entry in exceptions.values()):
        raise ValueError("extra_config there must be an object of objects")
    for named in (True, False):  # a name counts before the expressions that match it, too
        for key, entry in exceptions.items():
            if (_MODULE_NAME.fullmatch(key) is not None) is named:
                pattern = re.escape(key) if named else rf".*(?:{pattern_of(key).pattern}).*"
                yield ModuleRule(re.compile(pattern), _stored(settings.values, entry))
    yield from (ModuleRule(NEVER, None), ModuleRule(ROUTERS, None))
    yield ModuleRule(re.compile(r".*"), _stored(settings.values, {}))


def _stored(values: Mapping[str, Any], entry: Mapping[str, Any]) -> Format | None:
    """The format of modules with the settings ``values``, of which ``entry`` overrides some; None: they are plain."""
    settings = Settings({**values, **entry})
    bits = settings.integer("bits", 4, lambda bits: 1 <= bits <= 2 * _PLAIN_BITS, "from 1 to 32")
    if bits >= _PLAIN_BITS:
        return None
    packing = settings.only(("packing_format",), (*_GPTQ, *_AWQ, *_COMPRESSED))
    data_type = settings.values.get("data_type", "int")
    readers = _FLOATS if packing in _COMPRESSED else _INTEGERS
    if not isinstance(data_type, str) or (reader := readers.get(data_type)) is None:
        raise ValueError(f"of the data_type of {packing} only {', '.join(readers)} is read")
    return reader(settings, packing)


def _integers(settings: Settings, packing: str) -> Format:
    if packing in _AWQ:
        settings.integer("bits", 4, lambda bits: bits == 4, "4 where packing_format is auto_round:auto_awq")
        return awq(group=settings.group())
    bits = settings.integer("bits", 4, lambda bits: bits in (2, 4, 8), "2, 4 or 8")
    return gptq(bits=bits, group=settings.group(), in_order=True)


def _mxfp4(settings: Settings, _: str) -> Format:
    settings.integer("bits", 4, lambda bits: bits == 4, "4 where data_type is mx_fp")
    settings.integer("group_size", MX_GROUP, lambda size: size == MX_GROUP, f"{MX_GROUP} where data_type is mx_fp")
    return mxfp4((".weight_packed", ".weight_scale"))


def _nvfp4(settings: Settings, _: str) -> Format:
    settings.integer("bits", 4, lambda bits: bits == 4, "4 where data_type is nv_fp")
    settings.integer("group_size", NV_GROUP, lambda size: size == NV_GROUP, f"{NV_GROUP} where data_type is nv_fp")
    return nvfp4(divides=True)


_Reader = Callable[[Settings, str], Format]
_INTEGERS: Mapping[str, _Reader] = {"int": _integers}
_FLOATS: Mapping[str, _Reader] = {"mx_fp": _mxfp4, "nv_fp": _nvfp4}
