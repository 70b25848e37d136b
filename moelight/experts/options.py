"""User options for the residency of experts, beyond the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelight.experts.policy import ExpertPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertOptions:
    """User options for the residency of experts.

    Attributes:
        policy: the expert policy; None: the default policy.
        learn: False: the experts that the plan placed in the fast tier remain resident, and no page is prefetched.
        profile: file of counts to start from, recorded on this model; overrides the profile of the policy.
        record: count the routed experts of every pass, including passes that do not need the counts.
        trace: file that receives one row per routing decision.
        inputs: called with a layer and what its router sent to the experts (`models.moe.Routed`), on the CPU.
        plain: baseline of a system with a cache and nothing else: every pass that fits one micro-batch goes through the
            cache, prompts too, and pages in the ring are not reused.
    """

    policy: ExpertPolicy | None = None
    learn: bool = True
    profile: Path | None = None
    record: bool = False
    trace: Path | None = None
    plain: bool = False
    inputs: Callable[[int, Any], None] | None = None

    @property
    def watches(self) -> bool:
        """True if routing must be recorded even where no pass depends on it."""
        return self.record or self.trace is not None or self.inputs is not None
