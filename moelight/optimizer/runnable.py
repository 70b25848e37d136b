"""The features of policies that can be planned but not run: one list for plans, policy files and the engine. Depends
only on policies and models; the engine checks the devices of the machine."""

from __future__ import annotations

from moelight.core.dtypes import DType, dtype_named
from moelight.core.policy import INT8, Policy
from moelight.hrm.costs import attention_kinds
from moelight.profiles.model import ModelProfile, not_computed


def why_not(policy: Policy, model: ModelProfile, dtype: DType) -> tuple[str, ...]:
    """The reasons why the engine refuses ``policy`` for ``model``, computed in ``dtype``, a clause each; empty if the
    policy runs. Only the native decoder computes in mixed precision."""
    graph = bool(model.layers) or bool(not_computed(model))
    faults = (*policy_faults(policy), *cache_faults(policy, model), *expert_faults(policy, model))
    if not (graph and dtype.pages and policy.weight_dtype in ("auto", dtype.name)):
        return faults
    narrow = f"{model.model_type} runs as its module graph, which is not computed in float16 on a GPU without bfloat16"
    return (narrow, *faults)


def policy_faults(policy: Policy) -> tuple[str, ...]:
    """The features of ``policy`` that the engine supports for no model, a clause each."""
    faults = []
    if policy.gpus > 1:
        faults.append(f"it is for {policy.gpus:,} GPUs, and the engine uses one (optimize --fix gpus=1 plans for it)")
    if policy.weight_dtype != "auto" and dtype_named(policy.weight_dtype).group:
        kind = policy.weight_dtype
        faults.append(
            f"experts in {kind} (weight_dtype) need a checkpoint that stores them so: moelight convert {policy.model} "
            f"OUT --experts {kind} makes one, and OUT runs as it is"
        )
    if policy.kv_dtype not in ("auto", INT8, policy.weight_dtype):
        faults.append(f"kv_dtype {policy.kv_dtype!r} must be int8 or the weights' dtype; or leave it at auto")
    return tuple(faults)


def cache_faults(policy: Policy, model: ModelProfile) -> tuple[str, ...]:
    """Why the cache of ``model`` is not kept in the format of ``policy``, a clause each: only keys and values of
    grouped-query attention are quantised."""
    if policy.kv_dtype != INT8 or quantises_cache(model):
        return ()
    clause = "caches latents, which are not quantised" if attention_kinds(model) else "has no paged cache to quantise"
    return (f"{model.model_type} {clause} (kv_dtype int8); leave kv_dtype at auto",)


def quantises_cache(model: ModelProfile) -> bool:
    """True if the cache of ``model`` can be int8: some layers have one, and none caches latents."""
    kinds = attention_kinds(model)
    return bool(kinds) and all(kind.spec.latent is None for kind in kinds)


def expert_faults(policy: Policy, model: ModelProfile) -> tuple[str, ...]:
    """The reasons why the experts of ``model`` are not computed as ``policy`` says, a clause each."""
    return (*device_faults(policy, model), *activation_faults(policy, model))


def device_faults(policy: Policy, model: ModelProfile) -> tuple[str, ...]:
    """The reason why the device of ``policy`` does not compute the experts of ``model``, if there is one."""
    if policy.ffn_device == "cpu" or not runs_on_cpu_alone(model):
        return ()
    assert model.stored is not None
    return (f"ffn_device {policy.ffn_device}: the experts are {model.stored.cpu_only}; use ffn_device cpu",)


def runs_on_cpu_alone(model: ModelProfile) -> bool:
    """True if no GPU computes the experts of ``model``, as their format has no unpacker there. Torch unpacks dense
    layers, and experts that it computes, on any device."""
    by_torch = model.dense or model.experts.by_torch
    return model.stored is not None and model.stored.cpu_only is not None and not by_torch


def activation_faults(policy: Policy, model: ModelProfile) -> tuple[str, ...]:
    """The reason why the experts of ``model``, or its layers, are not multiplied by the activations of ``policy``, if
    there is one."""
    if policy.activations != INT8:
        return ()
    if model.experts.by_torch:
        return (
            f"activations int8 are served for experts of the kernels, and torch computes those of {model.model_type}",
        )
    if model.stored is None:
        if model.dense:
            return (f"activations int8 need layers stored as integers, and those here are {model.dtype}",)
        return (
            f"activations int8 need experts stored as integers, and those here are {model.dtype} "
            "(moelight convert --experts int8 or int4 writes such a checkpoint)",
        )
    if (reason := model.stored.without_integers) is not None:
        return (f"activations int8: the {'layers' if model.dense else 'experts'} are {reason}",)
    if model.dense and policy.ffn_device != "cpu":
        return ("activations int8: a GPU computes the layers of a dense model with activations as they are",)
    if policy.ffn_device != "cpu" and model.stored.cpu_integers is not None:
        return (f"activations int8: the experts are {model.stored.cpu_integers}; use ffn_device cpu",)
    if policy.ffn_device != "cpu" and model.stored.mixed:
        return (
            "activations int8: experts of some layer are stored in several formats, so on a GPU torch computes them, "
            "with activations as they are",
        )
    return ()
