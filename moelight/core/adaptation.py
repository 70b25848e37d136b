"""A change of policy during a run, as reported in the log, the metrics and the progress line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptation:
    """A change of policy after pass ``after_pass`` (from 1): the fields in ``before`` take the values in ``now``.
    ``reason`` is one sentence; ``predicted_gain`` is relative, in tokens per second (0: return to earlier values)."""

    after_pass: int
    before: Mapping[str, int]
    now: Mapping[str, int]
    reason: str
    predicted_gain: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "pass": self.after_pass,
            "from": dict(self.before),
            "to": dict(self.now),
            "reason": self.reason,
            "predicted_gain": self.predicted_gain,
        }
