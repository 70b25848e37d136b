"""The features of policies that can be planned but not run: one list for plans, policy files and the engine. Depends
only on policies and models; the engine checks the devices of the machine."""

from __future__ import annotations

from moelight.core.dtypes import DType, dtype_named
from moelight.core.policy import INT8, Policy
from moelight.profiles.model import ModelProfile, not_computed


def why_not(policy: Policy, model: ModelProfile, dtype: DType) -> tuple[str, ...]:
    """The reasons why the engine refuses ``policy`` for ``model``, computed in ``dtype``, a clause each; empty if the
    policy runs. Only the native decoder computes in mixed precision."""
    graph = bool(model.layers) or bool(not_computed(model))
    if not (graph and dtype.pages and policy.weight_dtype in ("auto", dtype.name)):
        return (*policy_faults(policy), *activation_faults(policy, model))
    narrow = f"{model.model_type} runs as its module graph, which is not computed in float16 on a GPU without bfloat16"
    return (narrow, *policy_faults(policy), *activation_faults(policy, model))


def policy_faults(policy: Policy) -> tuple[str, ...]:
    """The features of ``policy`` that the engine supports for no model, a clause each."""
    found = []
    if policy.gpus > 1:
        found.append(f"it is for {policy.gpus:,} GPUs, and the engine uses one (optimize --fix gpus=1 plans for it)")
    if policy.weight_dtype != "auto" and dtype_named(policy.weight_dtype).group:
        found.append(f"the engine does not compute with {policy.weight_dtype} weights (weight_dtype)")
    if policy.kv_dtype not in ("auto", policy.weight_dtype):
        found.append(f"kv_dtype {policy.kv_dtype!r} must be the weights' dtype; leave it at auto")
    if policy.activations == INT8 and policy.ffn_device != "cpu":
        found.append(f"activations int8 are served on the CPU alone, and ffn_device is {policy.ffn_device!r}")
    return tuple(found)


def activation_faults(policy: Policy, model: ModelProfile) -> tuple[str, ...]:
    """The reason why the experts of ``model`` are not multiplied by the activations of ``policy``, if there is one."""
    if policy.activations != INT8:
        return ()
    if model.dense or model.experts.by_torch:
        what = "is dense" if model.dense else "has experts that torch computes"
        return (f"activations int8 are served for experts of the kernels, and {model.model_type} {what}",)
    if model.stored is None:
        return (
            f"activations int8 need experts stored as integers, and those here are {model.dtype} "
            "(moelight convert --experts int8 or int4 writes such a checkpoint)",
        )
    if (why := model.stored.without_integers) is not None:
        return (f"activations int8: the experts are {why}",)
    return ()
