"""Reads a raw HF ``config.json`` field by field, under every name both transformers generations use.

Knows JSON and types; refuses to know families. Every complaint names the file and the key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moelight.core.errors import CheckpointError, ConfigError

_MOST = 1 << 24  # no size in any config is larger; a hostile one must not exhaust memory
_DTYPE_KEYS = ("dtype", "torch_dtype")


class HFConfig:
    """Typed look-ups in one ``config.json``; ``where`` is the path that complaints name."""

    def __init__(self, values: Mapping[str, Any], *, where: str) -> None:
        self.values = values
        self.where = where

    @classmethod
    def from_file(cls, path: Path) -> HFConfig:
        """Read ``path``.

        Raises:
            CheckpointError: missing, unreadable, not JSON, or not an object.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path.parent}: no config.json there, so it is not a model directory") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: must hold a JSON object")
        return cls(values, where=str(path))

    def find(self, *keys: str) -> Any:
        """The value under the first of ``keys`` that is present and not null, else None."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), None)

    def integer(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least ``least``; ``default`` None means the key is required."""
        value = self.find(*keys)
        if value is None:
            value = self._default(keys, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
            raise ConfigError(f"{self.where}: {keys[0]} must be an integer from {least} to {_MOST}, not {value!r}")
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.find(*keys)
        if value is None:
            value = self._default(keys, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigError(f"{self.where}: {keys[0]} must be a number above 0, not {value!r}")
        return float(value)

    def flag(self, *keys: str, default: bool) -> bool:
        """True or false."""
        value = self.find(*keys)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {keys[0]} must be true or false, not {value!r}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers; absent or null is empty."""
        value = self.find(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise ConfigError(f"{self.where}: {key} must be a list of integers, not {value!r}")
        return tuple(value)

    def activation(self) -> str:
        """The experts' activation; only SiLU is known to these families."""
        value = self.find("hidden_act") or "silu"
        if value not in ("silu", "swish"):
            raise ConfigError(f"{self.where}: hidden_act {value!r} is not supported; known: silu")
        return "silu"

    def dtype(self) -> str:
        """The name in ``dtype`` or ``torch_dtype``; float32 where there is none."""
        value = self.find(*_DTYPE_KEYS) or "float32"
        return str(value).removeprefix("torch.")

    def rope(self, *, default_theta: float) -> tuple[float, float]:
        """``(theta, factor)``: the base, and the linear stretch of positions (1 where there is none).

        Transformers 5 writes ``rope_parameters``, 4 writes ``rope_theta`` and ``rope_scaling``.
        """
        scaling = self.find("rope_parameters", "rope_scaling") or {}
        if not isinstance(scaling, dict):
            raise ConfigError(f"{self.where}: rope_parameters must be an object, not {scaling!r}")
        nested = HFConfig({**self.values, **scaling}, where=self.where)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ("default", "linear"):
            raise ConfigError(f"{self.where}: rope_type {kind!r} is not supported; known: default, linear")
        factor = nested.number("factor", default=1.0) if kind == "linear" else 1.0
        return nested.number("rope_theta", default=default_theta), factor

    def _default(self, keys: tuple[str, ...], default: float | None) -> float:
        if default is None:
            raise ConfigError(f"{self.where}: {keys[0]} is missing")
        return default
