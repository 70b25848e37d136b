"""The features of policies that can be planned but not run: one list for plans, policy files and the engine. Depends
only on policies; the engine checks the devices of the machine."""

from __future__ import annotations

from moelight.core.dtypes import dtype_named
from moelight.core.policy import Policy


def policy_faults(policy: Policy) -> tuple[str, ...]:
    """The features of ``policy`` that the engine supports for no model, a clause each."""
    found = []
    if policy.gpus > 1:
        found.append(f"it is for {policy.gpus:,} GPUs, and the engine uses one (optimize --fix gpus=1 plans for it)")
    if policy.weight_dtype != "auto" and dtype_named(policy.weight_dtype).group:
        found.append(f"the engine does not compute with {policy.weight_dtype} weights (weight_dtype)")
    if policy.kv_dtype not in ("auto", policy.weight_dtype):
        found.append(f"kv_dtype {policy.kv_dtype!r} must be the weights' dtype; leave it at auto")
    return tuple(found)
