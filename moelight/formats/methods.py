"""All methods of a ``quantization_config``: those of the formats' rows, and those of tools that write several formats
of other rows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moelight.formats import auto_round, compressed_tensors, torchao
from moelight.formats.registry import FORMATS
from moelight.formats.rules import MethodReader

METHODS: Mapping[str, MethodReader] = MappingProxyType(
    {
        **{method: reader for row in FORMATS.values() for method, reader in row.methods.items()},
        compressed_tensors.METHOD: compressed_tensors.rules_of,
        torchao.METHOD: torchao.torchao_rules,
        **dict.fromkeys(auto_round.METHODS, auto_round.auto_round_rules),
    }
)


def method_of(values: Mapping[str, Any]) -> object:
    """The method of the config ``values``: as it says, or that of the row which recognises a config without one."""
    if (method := values.get("quant_method")) is not None:
        return method
    return next((next(iter(row.methods)) for row in FORMATS.values() if row.recognises(values)), None)
