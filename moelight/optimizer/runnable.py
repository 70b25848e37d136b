"""The features that can be planned but not run: one list for plans, policy files and the engine. Depends only on
policies and models; the engine checks the devices of the machine."""

from __future__ import annotations

from moelight.core.dtypes import dtype_named
from moelight.core.policy import Policy
from moelight.profiles.model import ModelProfile, not_computed


def why_not(policy: Policy, model: ModelProfile) -> tuple[str, ...]:
    """The reasons why the engine refuses ``policy`` for ``model``, a clause each; empty if the policy runs."""
    missing = not_computed(model)
    of_model = (f"the engine does not compute {', '.join(missing)} ({model.model_type})",) if missing else ()
    return (*of_model, *policy_faults(policy))


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
