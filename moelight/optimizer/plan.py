"""The result of the optimizer, a plan, and plans on disk, keyed by a hash of all inputs."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moelight import __version__
from moelight.core.errors import MoelightError
from moelight.core.paths import cache_directory, write_whole
from moelight.core.policy import Policy
from moelight.core.small_files import read_json
from moelight.hrm.estimate import Estimate
from moelight.hrm.machine_model import Speeds
from moelight.profiles.workload import Workload

_FORMAT = 6  # increment when formulas change, so that stored plans are not used


@dataclass(frozen=True, kw_only=True, slots=True)
class TierUse:
    """The bytes that a plan uses of one tier.

    Attributes:
        tier: ``device``, ``host`` or ``disk``.
        capacity_bytes: the size of the whole tier, all GPUs together, or the user's limit.
        by_purpose: pairs of a purpose and its bytes; ``system``: left to the system.
    """

    tier: str
    capacity_bytes: int
    by_purpose: tuple[tuple[str, int], ...]

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.by_purpose)


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """The predicted gain of one change of the machine.

    Attributes:
        change: the change in words, such as ``twice the host memory``.
        gain: the relative gain in tokens per second; 0.5 is half as many again.
    """

    change: str
    gain: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The best policy found for one machine, model and workload.

    Attributes:
        policy: the best policy found.
        hardware: the machine's name.
        workload: the workload for which the policy was chosen.
        estimator: ``calibrated`` or ``paper``.
        estimate: the predicted performance of the policy.
        memory: the use of every tier of the machine.
        why: a one-sentence explanation.
        what_if: the changes of the machine that gain most, best first.
        bound_tokens_per_s: proven upper bound: no policy is faster by the same estimate, for any values of the keys
            that are not fixed; 0 if not computed.
        solve_s: seconds that the original solution took.
        speeds: the machine's speeds in the estimate; None for plans of the paper estimator.
        fixed: keys of the policy that the user fixed.
        why_not: the features of the policy that the engine does not support; empty if the plan runs.
    """

    policy: Policy
    hardware: str
    workload: Workload
    estimator: str
    estimate: Estimate
    memory: tuple[TierUse, ...]
    why: str
    what_if: tuple[WhatIf, ...] = ()
    bound_tokens_per_s: float = 0.0
    solve_s: float = 0.0
    speeds: Speeds | None = None
    fixed: tuple[str, ...] = ()
    why_not: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """True if the engine can run the plan on such a machine."""
        return not self.why_not

    @property
    def predicted_s(self) -> float:
        """Seconds of the whole workload, if every answer has ``workload.gen_len`` tokens."""
        return sum(phase.passes * phase.seconds for phase in self.estimate.phases)

    def use_of(self, tier: str) -> TierUse:
        """The use of ``tier``, of capacity 0 if the machine has no such tier."""
        return next(
            (use for use in self.memory if use.tier == tier), TierUse(tier=tier, capacity_bytes=0, by_purpose=())
        )


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """``plan`` as plain values, for ``--json``: bytes, seconds and tokens per second, unrounded."""
    estimate = plan.estimate
    return {
        "policy": policy_as_dict(plan.policy),
        "estimate": {
            "layer_s": estimate.layer_s,
            "pass_s": estimate.pass_s,
            "decode_tokens_per_s": estimate.decode_tokens_per_s,
            "tokens_per_s": estimate.tokens_per_s,
            "bound_tokens_per_s": plan.bound_tokens_per_s,
            "lanes": dict(estimate.lanes),
            "binding": estimate.binding,
        },
        "memory": {
            use.tier: {
                "capacity_bytes": use.capacity_bytes,
                "total_bytes": use.total_bytes,
                "by_purpose": dict(use.by_purpose),
            }
            for use in plan.memory
        },
        "why": plan.why,
        "runs": plan.runs,
        "why_not": list(plan.why_not),
        "what_if": [asdict(change) for change in plan.what_if],
        "solve_s": plan.solve_s,
        "estimator": plan.estimator,
        "hardware": plan.hardware,
        "workload": {name: value for name, value in asdict(plan.workload).items() if value is not None},
    }


_SIZES = ("batch_size", "micro_batch_size", "num_micro_batches", "micro_batch_tokens", "kv_tokens", "kv_block_size")
_DEVICES = ("attention_device", "ffn_device", "weights", "cpu_experts", "kv", "weight_dtype", "kv_dtype")
_ORDER = ("activations", "schedule", "prompt_micro_batches", "look_ahead")
_REST = ("admission", "host_pages", "residents", "ring_pages", "gpus")


def policy_as_dict(policy: Policy) -> dict[str, Any]:
    """``policy`` as plain values, shares unrounded; ``num_micro_batches`` follows from N and μ."""
    values = {**asdict(policy), "num_micro_batches": policy.num_micro_batches}
    values["kv"].pop("disk")
    return {name: values[name] for name in ("model", *_SIZES, *_DEVICES, *_ORDER, *_REST)}


def key_of(*inputs: Any) -> str:
    """The key of a planning problem; other inputs or program versions give another key."""
    text = json.dumps([_FORMAT, __version__, *inputs], sort_keys=True, default=asdict)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def stored_plan(key: str) -> Plan | None:
    """The plan stored under ``key``; None if there is none or its file is invalid."""
    import msgspec

    try:
        return msgspec.convert(read_json(_file_of(key)), Plan)
    except (OSError, ValueError, TypeError, MoelightError, msgspec.ValidationError):
        return None


def store_plan(key: str, plan: Plan) -> None:
    """Store ``plan`` without the machine's speeds; errors of the file system are ignored."""
    with contextlib.suppress(OSError):
        write_whole(_file_of(key), json.dumps(asdict(replace(plan, speeds=None))))


def _file_of(key: str) -> Path:
    return cache_directory("plans", f"{key}.json")
