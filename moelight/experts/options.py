"""What a user may want of the residency of experts, beyond the plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moelight.experts.policy import ExpertPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertOptions:
    """What the user wants of the experts' residency.

    Attributes:
        policy: which experts stay; None: the default policy.
        learn: False: those stay that the plan placed near, and nothing is fetched ahead.
        profile: a file of counts to begin with, which must be of this model; wins over the policy's own.
        record: count who is chosen in every pass, also where nobody needs to know.
        trace: a file that gets a row for each choice.
        plain: as a system does that has a cache and nothing else, to measure against: every pass that one micro-batch
            could carry goes through the cache, prompts too, and nothing of the ring is found again.
    """

    policy: ExpertPolicy | None = None
    learn: bool = True
    profile: Path | None = None
    record: bool = False
    trace: Path | None = None
    plain: bool = False

    @property
    def watches(self) -> bool:
        """Whether choices must be looked at that no pass depends on."""
        return self.record or self.trace is not None
