"""A change of policy in the middle of a run, and why: what the log, the figures and the progress line say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptation:
    """From the pass after ``after_pass`` on (counted from 1) the fields in ``before`` have the values in ``now``.

    ``reason`` is one sentence with figures; ``predicted_gain`` the share by which tokens per second were to grow, 0 for
    a return to what was there before.
    """

    after_pass: int
    before: Mapping[str, int]
    now: Mapping[str, int]
    reason: str
    predicted_gain: float

    def as_dict(self) -> dict[str, Any]:
        """The object in ``adaptations`` of the figures."""
        return {
            "pass": self.after_pass,
            "from": dict(self.before),
            "to": dict(self.now),
            "reason": self.reason,
            "predicted_gain": self.predicted_gain,
        }
