"""Plans on disk, keyed by a hash of all inputs. A file that cannot be read counts as a miss."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

from moelight import __version__
from moelight.core.errors import MoelightError
from moelight.core.paths import cache_directory, write_whole
from moelight.core.policy import Policy, Shares
from moelight.core.small_files import read_json
from moelight.hrm.estimate import Estimate, Phase
from moelight.optimizer.plan import Plan, TierUse, WhatIf
from moelight.profiles.workload import Workload

FORMAT = 3  # increment when formulas change, so that stored plans are not used


def key_of(*inputs: Any) -> str:
    """The key of a planning problem: equal for equal inputs; different inputs or program versions give other keys."""
    text = json.dumps([FORMAT, __version__, *map(_plain, inputs)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load(key: str) -> Plan | None:
    """The plan stored under ``key``; None if there is none or its file is invalid."""
    try:
        return _plan(read_json(_place(key)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MoelightError):
        return None


def store(key: str, plan: Plan) -> None:
    """Store ``plan`` without the machine's speeds; errors of the file system are ignored."""
    with contextlib.suppress(OSError):
        write_whole(_place(key), json.dumps(asdict(replace(plan, speeds=None))))


def _place(key: str) -> Path:
    return cache_directory("plans", f"{key}.json")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _plan(found: dict[str, Any]) -> Plan:
    policy, estimate = found["policy"], found["estimate"]
    weights, kv = Shares(**policy.pop("weights")), Shares(**policy.pop("kv"))
    phases = tuple(Phase(**phase) for phase in estimate.pop("phases"))
    memory = tuple(
        TierUse(
            tier=use["tier"],
            capacity_bytes=use["capacity_bytes"],
            by_purpose=tuple((purpose, size) for purpose, size in use["by_purpose"]),
        )
        for use in found["memory"]
    )
    return Plan(
        policy=Policy(**policy, weights=weights, kv=kv),
        hardware=found["hardware"],
        workload=Workload(**found["workload"]),
        estimator=found["estimator"],
        estimate=Estimate(**estimate, phases=phases),
        memory=memory,
        why=found["why"],
        what_if=tuple(WhatIf(**item) for item in found["what_if"]),
        bound_tokens_per_s=found["bound_tokens_per_s"],
        solve_s=found["solve_s"],
        fixed=tuple(found["fixed"]),
    )
