"""Typed access to the fields of an HF ``config.json``, under the names of transformers 4 and 5.

Does not depend on model families.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from moelight.core.errors import CheckpointError, ConfigError, quoted
from moelight.core.small_files import read_error_text, read_object
from moelight.profiles.rope import ROPE_TYPES, RopeScaling, read_scaling, stretched_positions

_MOST = 1 << 24  # above every real size; a hostile config must not exhaust memory
_LEAST_NUMBER, _MOST_NUMBER = 1e-30, 1e30
QUANTISED_KEYS = ("quantization_config", "compression_config", "quantization")  # the last is of MLX
_LONGEST_NAME = 40
# Names by which repositories with code of their own call a family that they have in every key and tensor.
_SAME_FAMILY = {"kimi_k2": "deepseek_v3"}
_ROTARY = frozenset(("rope_parameters", "rope_scaling", "rope_theta"))
_ABSENT = object()


def with_family(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` of a config.json with the ``model_type`` of its family, and without the code that a repository names
    for it. transformers 5 does not read the base of rotary embeddings that DBRX's files have in ``attn_config``."""
    name, inner = str(values.get("model_type")), values.get("attn_config")
    if name == "dbrx" and isinstance(inner, dict) and "rope_theta" in inner and _ROTARY.isdisjoint(values):
        return {**values, "rope_parameters": {"rope_type": "default", "rope_theta": inner["rope_theta"]}}
    family = _SAME_FAMILY.get(name)
    if family is None:
        return values
    return {**{key: value for key, value in values.items() if key != "auto_map"}, "model_type": family}


class HFConfig:
    """Typed look-ups in one ``config.json``; every error names the path ``where`` and the file's own key.

    ``keys`` maps usual keys to those of this file: ``{"hidden_size": "d_model", "clip_qkv": "attn_config.clip_qkv"}``.
    """

    def __init__(self, values: Mapping[str, Any], *, where: str, keys: Mapping[str, str] | None = None) -> None:
        self.values = values
        self.where = where
        self._keys = dict(keys or {})

    def error(self, complaint: str) -> ConfigError:
        """A `ConfigError` with the file and ``complaint``."""
        return ConfigError(f"{self.where}: {complaint}")

    def with_keys(self, keys: Mapping[str, str]) -> HFConfig:
        """Return this config with another mapping of keys."""
        return HFConfig(self.values, where=self.where, keys=keys)

    @classmethod
    def from_file(cls, path: Path) -> HFConfig:
        """Read ``path``; raises CheckpointError if it is missing, unreadable or not a JSON object."""
        try:
            return cls(with_family(read_object(path)), where=str(path))
        except FileNotFoundError:
            raise CheckpointError(f"{path.parent}: no config.json there, so it is not a model directory") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON ({read_error_text(error)})") from None

    def find(self, *keys: str) -> Any:
        """The value under the first of ``keys`` that is present and not null, else None."""
        return next((value for key in keys if (value := self._value(key)) is not None), None)

    def has(self, key: str) -> bool:
        """True if ``key`` is present, even if null."""
        return self._value(key, _ABSENT) is not _ABSENT

    def integer(self, *keys: str, default: int | None = None, least: int = 1, maximum: int = _MOST) -> int:
        """An integer; ``default`` None means that the key is required.

        ``keys`` are spellings of one setting: those present must agree.
        """
        self._agree(*keys)
        wanted = f"an integer from {least} to {maximum}"
        return int(self._checked(keys, default, lambda value: type(value) is int and least <= value <= maximum, wanted))

    def integer_or_none(self, key: str, *, default: int | None, least: int = 1) -> int | None:
        """An integer of at least ``least``, or None if the value is null; ``default`` if absent."""
        if self.find(key) is None:
            return None if self.has(key) else default
        return self.integer(key, least=least)

    def number(self, key: str, *, default: float | None = None) -> float:
        """A number above 0, within the range of float32; ``default`` None means that the key is required."""
        wanted = f"a number above 0, from {_LEAST_NUMBER:g} to {_MOST_NUMBER:g}"

        def fits(value: Any) -> bool:
            return type(value) in (int, float) and bool(_LEAST_NUMBER <= value <= _MOST_NUMBER)

        return float(self._checked((key,), default, fits, wanted))

    def flag(self, key: str, *, default: bool) -> bool:
        return bool(self._checked((key,), default, lambda value: isinstance(value, bool), "true or false"))

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers; absent or null is empty."""

        def fits(value: object) -> bool:
            return isinstance(value, list) and all(type(item) is int for item in value)

        return tuple(self._checked((key,), [], fits, "a list of integers"))

    def words(self, key: str, allowed: Collection[str], *, count: int) -> tuple[str, ...]:
        """A list of ``count`` words out of ``allowed``; absent or null is empty."""

        def fits(value: object) -> bool:
            return isinstance(value, list) and len(value) == count and all(word in allowed for word in value)

        if self.find(key) is None:
            return ()
        return tuple(self._checked((key,), None, fits, f"a list of {count} of {', '.join(allowed)}"))

    def refuse_other(self, key: str, allowed: Collection[object]) -> None:
        """Check that ``key`` is absent or has one of the values ``allowed``."""
        if self.has(key) and (value := self._value(key)) not in allowed:
            listed = ", ".join(map(json.dumps, allowed))
            raise self.error(f"{self._name(key)} {json.dumps(value)} is not supported; known: {listed}")

    def refuse(self, keys: Collection[str], because: str) -> None:
        """Check that none of ``keys`` has a value."""
        for key in keys:
            if self.find(key) is not None:
                raise self.error(f"{key} is not supported: {because}")

    def quantised_error(self, key: str, but: str) -> ConfigError:
        """A `ConfigError` that refuses the quantised weights that ``key`` describes."""
        value = self.find(key)
        method = value.get("quant_method") if isinstance(value, dict) else None
        named = f" {method!r}" if isinstance(method, str) and len(method) <= _LONGEST_NAME else ""
        instead = "use the checkpoint that is not quantised"
        return self.error(f"{key} says that the weights are quantised{named}, {but}; {instead}")

    def refuse_two_names(self) -> None:
        """Check that no family-specific key contradicts its usual name."""
        for usual, actual in self._keys.items():
            if "." not in actual:
                self.with_keys({})._agree(usual, actual)

    def activation(self) -> str:
        """The experts' activation; only SiLU is supported."""
        value = self.find("hidden_act") or "silu"
        if value not in ("silu", "swish"):
            raise self.error(f"{self._name('hidden_act')} {quoted(value)} is not supported; known: silu")
        return "silu"

    def dtype(self, *, default: str) -> str:
        """The name in ``dtype``, else in ``torch_dtype``, as transformers reads them."""
        return str(self.find("dtype", "torch_dtype") or default).removeprefix("torch.")

    def rope(
        self, *, default: Mapping[str, Any], default_theta: float, max_positions: int
    ) -> tuple[str, float, RopeScaling | None]:
        """``(type, theta, scaling)``, scaling as of `read_scaling`; ``default`` is the object of a file without one.

        Transformers 4 writes ``rope_theta`` and the object ``rope_scaling``, 5 the object ``rope_parameters``. If both
        objects are present, transformers uses ``rope_scaling`` alone, unless that is empty, and the top-level
        ``rope_theta`` if ``rope_scaling`` has none.
        """
        key, scaling = self._scaling()
        if not key and self.find("rope_parameters") is None:
            scaling = HFConfig(default, where=self.where)
        kind = scaling.find("rope_type", "type") or "default"
        if kind not in ROPE_TYPES:
            raise self.error(f"{key}: rope_type {kind!r} is not supported; known: {', '.join(ROPE_TYPES)}")
        theta = self._holder("rope_theta").number("rope_theta", default=default_theta)
        if theta == 1 and kind == "yarn":
            raise self.error("rope_theta 1 gives all dimensions one frequency, and yarn needs several")
        constants = read_scaling(kind, scaling, max_positions=max_positions, original=self._original_positions())
        return kind, theta, constants

    def context(self, max_positions: int) -> int:
        """`stretched_positions` by the rotary parameters of this file."""
        original = self._original_positions()
        return stretched_positions(self._scaling()[1].values, max_positions=max_positions, original=original)

    def _original_positions(self) -> int | None:
        """``original_max_position_embeddings`` outside of the object with the rotary parameters."""
        return self.integer_or_none("original_max_position_embeddings", default=None)

    def rotary_share(self, *, default: float) -> float:
        """``partial_rotary_factor``: the fraction of a head that is rotated."""
        share = self._holder("partial_rotary_factor").number("partial_rotary_factor", default=default)
        if share > 1:
            raise self.error(f"partial_rotary_factor must be at most 1, not {share}")
        return share

    def _holder(self, key: str) -> HFConfig:
        """The object with the rotary parameters if it has ``key``, else the file."""
        _, scaling = self._scaling()
        return self if scaling.find(key) is None else scaling

    def _scaling(self) -> tuple[str, HFConfig]:
        """The object with the rotary parameters and its key; empty if the file has none."""
        key = next((key for key in ("rope_scaling", "rope_parameters") if self.find(key)), "")
        scaling = self.find(key) if key else {}
        if not isinstance(scaling, dict):
            raise self.error(f"{key} must be an object, not {scaling!r}")
        nested = next((name for name, value in scaling.items() if isinstance(value, dict)), None)
        if nested is not None:
            raise self.error(f"{key} with values of its own for {nested!r} is not supported")
        return key, HFConfig(scaling, where=self.where)

    def _agree(self, *keys: str) -> None:
        """Reject spellings of one setting with different values."""
        named = [(self._name(key), value) for key in keys if (value := self.find(key)) is not None]
        for name, value in named[1:]:
            if value != named[0][1]:
                both = f"{named[0][0]} {named[0][1]!r} and {name} {value!r}"
                raise self.error(f"{both} are two names of one thing and differ; remove the wrong one")

    def _name(self, key: str) -> str:
        return self._keys.get(key, key)

    def _value(self, key: str, absent: Any = None) -> Any:
        """The value at the dotted path that ``key`` maps to."""
        value: Any = self.values
        *outer, last = self._name(key).split(".")
        for name in outer:
            value = value.get(name)
            if value is None:
                return absent
            if not isinstance(value, dict):
                raise self.error(f"{name} must be an object, not {value!r}")
        return value.get(last, absent)

    def _checked(self, keys: tuple[str, ...], default: object, fits: Callable[[Any], bool], wanted: str) -> Any:
        value = default if (stated := self.find(*keys)) is None else stated
        if value is None:
            raise self.error(f"{self._name(keys[0])} is missing")
        if not fits(value):
            raise self.error(f"{self._name(keys[0])} must be {wanted}, not {quoted(value)}")
        return value
