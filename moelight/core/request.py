"""What comes in and what goes out. Field names are vLLM's where vLLM has the field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from moelight.core.errors import InputError, did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    ``temperature`` 0 is greedy (the default: offline jobs should be repeatable). ``top_k`` 0 or -1 and
    ``top_p`` 1 mean no limit. ``seed`` alone decides a sampled completion, whatever shares its batch.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, least=1)
        _integer("top_k", self.top_k, least=-1)
        _number("temperature", self.temperature, low=0.0, high=math.inf)
        _number("top_p", self.top_p, low=0.0, high=1.0)
        if self.top_p == 0:
            raise InputError("top_p must be above 0 and at most 1, not 0")
        if self.seed is not None:
            _integer("seed", self.seed, least=0)
            if self.seed >= 1 << 64:
                raise InputError(f"seed must be below 2**64, not {self.seed}")
        object.__setattr__(self, "stop", _stops(self.stop))
        _flag("ignore_eos", self.ignore_eos)

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0.0

    @classmethod
    def from_dict(cls, given: dict[str, Any], *, base: SamplingParams | None = None) -> SamplingParams:
        """``base`` (or the defaults) changed by the fields in ``given``.

        Raises:
            InputError: an unknown field (with the nearest known one) or a value out of range.
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise InputError(f"unknown sampling field {name!r}{did_you_mean(name, known)}")
        start = base if base is not None else cls()
        values = {name: getattr(start, name) for name in known}
        return cls(**{**values, **{name: value for name, value in given.items() if value is not None}})


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt as token ids, numbered by its place in the input."""

    index: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The answer to one request. ``token_ids`` end before the closing eos."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int

    @property
    def completion_tokens(self) -> int:
        """Generated tokens, the closing eos not counted."""
        return len(self.token_ids)


def _stops(value: object) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, (tuple, list)) or not all(isinstance(stop, str) and stop for stop in given):
        raise InputError("stop must be a non-empty string or a list of them")
    return tuple(given)


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, not {value!r}")


def _integer(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be an integer of at least {least}, not {value!r}")


def _number(name: str, value: object, *, low: float, high: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= _as_float(value) <= high or _as_float(value) == math.inf:
        bound = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise InputError(f"{name} must be a finite number {bound}, not {value!r}")


def _as_float(value: object) -> float:
    """``value`` as a float; an integer beyond all floats is infinite."""
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf
