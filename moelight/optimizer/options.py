"""The options of a plan, once for `optimize`, `make_plan` and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moelight.core.errors import ConfigError, did_you_mean
from moelight.optimizer.problem import Fixed

ESTIMATORS = ("calibrated", "paper")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """The keywords of `optimize`. Raises ConfigError for an unknown estimator.

    Attributes:
        estimator: ``calibrated``, the cost of the engine's own passes, or ``paper``, the published formulas.
        limits: usable bytes by tier (``device`` of one GPU, ``host``, ``disk``; 0: none), where not the whole tier.
        fix: parts of the policy, by the keys of ``--fix`` (``{"attention": "cpu", "weights.device": 0.1}``).
        weight_dtypes: allowed dtypes of the experts; ``auto`` is the model's own.
        kv_dtypes: allowed dtypes of the KV cache; ``auto`` is the model's own.
        cache: whether a stored plan of equal inputs may be returned.
        proof: whether what-ifs and the bound are computed; a plan without them is not stored.
    """

    estimator: str = ESTIMATORS[0]
    limits: Mapping[str, int] = field(default_factory=dict)
    fix: Mapping[str, Fixed] = field(default_factory=dict)
    weight_dtypes: tuple[str, ...] = ("auto",)
    kv_dtypes: tuple[str, ...] = ("auto",)
    cache: bool = True
    proof: bool = True

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise ConfigError(
                f"unknown estimator {self.estimator!r}{did_you_mean(self.estimator, ESTIMATORS)}; known: "
                f"{', '.join(ESTIMATORS)}"
            )
