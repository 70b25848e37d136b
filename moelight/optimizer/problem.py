"""One optimization problem and its search space: devices, schedules, dtypes and sizes. Costs are in ``hrm``, the search
is in ``search``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from moelight.core.dtypes import DType
from moelight.core.errors import ConfigError
from moelight.core.policy import (
    ADMISSIONS,
    FFN_DEVICES,
    INT8,
    KV_BLOCK_SIZES,
    MOST_COUNTS,
    MOST_LOOK_AHEAD,
    PROCESSORS,
    Policy,
)
from moelight.hrm.cost_model import CostModel
from moelight.hrm.estimate import cost_model_of
from moelight.hrm.footprint import WHOLE_EXPERTS
from moelight.hrm.machine_model import Speeds
from moelight.hrm.workload_model import cache_tokens, cached_sequences
from moelight.optimizer.runnable import runs_on_cpu_alone
from moelight.profiles.model import ModelProfile
from moelight.profiles.workload import Workload
from moelight.scheduler.layout import EXPERT_PLACES
from moelight.scheduler.requirements import misfit

Fixed = str | int | float

# Schedules that may be the fastest. cgopipe takes no longer than any other with the same pages
# (tests/hrm/test_estimate.py), but its on-demand passes wait for the routers; of the schedules without that wait,
# flexgen and flexgen-c are the fastest. serial overlaps nothing, which pays where reading and computing slow each other
# by more than overlapping saves.
SEARCHED_SCHEDULES = ("cgopipe", "module", "flexgen", "flexgen-c", "serial")
LEAST_TOKENS = 1  # of a prompt micro-batch
KV_BLOCK_SIZE = KV_BLOCK_SIZES[0]  # smaller blocks lose less of the cache to blocks that are not full
_DEVICE_KEYS = (
    "schedule",
    "attention_device",
    "ffn_device",
    "weights.device",
    "kv.device",
    "kv.host",
    "cpu_experts",
    "activations",
    "ring_pages",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A model and a workload to plan for a machine.

    Attributes:
        name: the model's name in the policy.
        capacity_bytes: usable bytes by tier; no ``device`` without a GPU, ``disk`` 0 if nothing may be streamed.
        dtype: the dtype of computation.
        schedules: those that may be chosen, unless one is fixed.
        fixed: values by key of the policy.
        needs_gpu: True if a policy that leaves the GPU idle cannot be chosen.
        small_rings: whether a ring may hold fewer pages than two layers stream; None: on a machine without a GPU. A
            GPU computes few experts at a time slowly, so beside one only memory that is too small asks for them.
    """

    name: str
    model: ModelProfile
    speeds: Speeds
    workload: Workload
    capacity_bytes: Mapping[str, int]
    dtype: DType
    weight_dtypes: tuple[str, ...] = ("auto",)
    kv_dtypes: tuple[str, ...] = ("auto",)
    schedules: tuple[str, ...] = SEARCHED_SCHEDULES
    fixed: Mapping[str, Fixed] = field(default_factory=dict)
    needs_gpu: bool = False
    small_rings: bool | None = None

    @property
    def rounds_on_gpu(self) -> bool:
        """True if the GPU multiplies activations rounded to int8 by the experts' integers."""
        gpu, stored = self.speeds.gpu, self.model.stored
        if stored is not None and (stored.mixed or stored.cpu_integers is not None):
            return False
        return gpu is not None and gpu.unpacks and not self.model.dense

    @property
    def has_gpu(self) -> bool:
        return "device" in self.capacity_bytes

    @property
    def pages(self) -> int:
        """Expert pages of all layers."""
        return self.model.num_moe_layers * self.model.experts.num_experts

    def share(self, key: str) -> float | None:
        return None if key not in self.fixed else float(self.fixed[key])

    def fixed_pages(self, key: str) -> int | None:
        """The pages of a fixed share."""
        return None if key not in self.fixed else round(float(self.fixed[key]) * self.pages)

    def rings(self, variant: Policy) -> tuple[int, int]:
        """The least and the most pages of the ring of a variant; the most hold two layers, whichever pages stream."""
        fixed = self.count("ring_pages")
        if fixed:
            return min(fixed, self.two_layers), min(fixed, self.two_layers)
        small = not self.has_gpu if self.small_rings is None else self.small_rings
        open_here = small and variant.schedule in WHOLE_EXPERTS and variant.residents != "learned"
        return (2 if open_here and fixed is None else self.two_layers), self.two_layers

    @property
    def two_layers(self) -> int:
        """Pages of two layers: no ring holds more."""
        return 2 * self.model.experts.num_experts

    def count(self, key: str) -> int | None:
        return None if key not in self.fixed else int(self.fixed[key])

    @property
    def block_size(self) -> int:
        return self.count("kv_block_size") or KV_BLOCK_SIZE

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts: the most that a pass can use."""
        return self.workload.num_requests * self.workload.prompt_len

    @property
    def device_kv(self) -> float | None:
        """The share of the cache on the device for attention on a GPU, if fixed."""
        device, host = self.share("kv.device"), self.share("kv.host")
        return device if device is not None else None if host is None else 1.0 - host

    @property
    def sequences(self) -> tuple[int, int]:
        """The least and the most N: up to all requests (more if a fixed micro-batch requires it), as many as a fixed
        cache holds; the most is below the least if that cache holds too few."""
        fixed, number, size = (self.count(key) for key in ("batch_size", "num_micro_batches", "micro_batch_size"))
        if fixed is not None:
            least = maximum = fixed
        else:
            least = size or number or 1 if number is None or size is None else (number - 1) * size + 1
            maximum = max(least, min(self.workload.num_requests, MOST_COUNTS["batch_size"]))
            maximum = maximum if number is None or size is None else min(maximum, number * size)
        tokens = self.count("kv_tokens")
        if tokens is None:
            return least, maximum
        held = int(cached_sequences(self.workload, tokens, self.block_size, self.model.max_positions))
        return least, min(maximum, held)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates(Policy):
    """Many policies of one variant, priced by ``cost_model``: the counts of a policy and a requested placement are
    arrays of one shape, or numbers.

    Attributes:
        computed: pages that the CPU computes beside a GPU; raised if the others do not fit through the ring.
        device_kv: the share of the cache on the device; NaN: all that the pages leave free.
        resident: with ``device_kv`` NaN, the most pages resident on the device.
        spilled: the least pages streamed from disk, even if host memory could hold them: this saves copies.
        ring_pages: the most pages of the ring, `Problem.rings`.
    """

    cost_model: CostModel
    batch_size: Any = 1
    micro_batch_size: Any = 1
    micro_batch_tokens: Any = 1
    prompt_micro_batches: Any = 1
    kv_tokens: Any = 1
    computed: Any = 0.0
    device_kv: Any = np.nan
    resident: Any = np.inf
    spilled: Any = 0.0
    ring_pages: Any = 0

    def __post_init__(self) -> None:
        """Arrays are not checked; a policy made of one candidate is."""

    @property
    def variant(self) -> tuple[str, ...]:
        """Return the properties that all candidates share, by the keys of `variants`."""
        return tuple(getattr(self, name) for name in _CHOICES)

    def at(self, index: Any) -> Candidates:
        columns = np.broadcast_arrays(*(getattr(self, name) for name in ARRAYS))
        some: dict[str, Any] = {name: column[index] for name, column in zip(ARRAYS, columns, strict=True)}
        return replace(self, **some)


COUNTS = ("batch_size", "micro_batch_size", "micro_batch_tokens", "prompt_micro_batches", "kv_tokens")
ARRAYS = (*COUNTS, "computed", "device_kv", "resident", "spilled", "ring_pages")


def joined(*parts: Candidates) -> Candidates:
    """The candidates of all ``parts``, which are arrays of one variant."""
    columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
    return replace(parts[0], **columns)


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "attention_device": PROCESSORS,
    "ffn_device": FFN_DEVICES,
    "schedule": SEARCHED_SCHEDULES,
    "weight_dtype": ("auto",),
    "kv_dtype": ("auto",),
    "activations": ("auto",),
    "admission": ADMISSIONS,
    "residents": ("auto", "learned"),
}


def variants(problem: Problem) -> Iterator[Candidates]:
    """Yield every allowed combination of devices, schedule, admission and dtypes, without sizes; ConfigError if the
    fixed values contradict each other. Unless fixed, host pages are pinned (less time, less memory); learned residents
    are variants of their own where they change which pages passes transfer (`hrm.estimate.least_missed`)."""
    fixed, any_variant = problem.fixed, False
    requested = {"schedule": problem.schedules, "weight_dtype": problem.weight_dtypes, "kv_dtype": problem.kv_dtypes}
    if problem.model.dense:
        requested["residents"] = ("auto",)  # no pass leaves a page out
    if runs_on_cpu_alone(problem.model):
        requested["ffn_device"] = ("cpu",)
    choices = {
        key: (str(fixed[key]),) if key in fixed else requested.get(key, words) for key, words in _CHOICES.items()
    }
    for values in product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        attention, ffn = chosen["attention_device"], chosen["ffn_device"]
        gpu = attention == "gpu" or ffn != "cpu"
        if gpu and chosen["residents"] == "learned" and "residents" not in fixed:
            continue
        if (gpu and not problem.has_gpu) or (problem.needs_gpu and not gpu) or _contradicts(problem, attention, ffn):
            continue
        two_layers = (problem.count("ring_pages") or problem.two_layers) >= problem.two_layers
        if not two_layers and (chosen["schedule"] not in WHOLE_EXPERTS or chosen["residents"] == "learned"):
            continue
        if misfit(chosen["schedule"], discrete=gpu, attention=attention, experts=EXPERT_PLACES[ffn]) is not None:
            continue
        any_variant = True
        same: dict[str, Any] = {
            **chosen,
            "model": problem.name,
            "kv_block_size": problem.block_size,
            "look_ahead": problem.count("look_ahead") or MOST_LOOK_AHEAD,
            "host_pages": fixed.get("host_pages", "pinned" if ffn != "cpu" else "auto"),
        }
        cost_model = cost_model_of(problem.model, Policy(**same), problem.speeds, problem.dtype)
        yield Candidates(**same, cost_model=cost_model)
    if not any_variant:
        named = " and ".join(f"--fix {key}={value}" for key, value in fixed.items() if key in _DEVICE_KEYS)
        raise ConfigError(f"{named} contradict each other: no devices and schedule here have them all")


def _contradicts(problem: Problem, attention: str, ffn: str) -> bool:
    """True if fixed shares contradict the devices: device memory holds pages and cache only for work on the GPU. Beside
    a GPU, a dense layer, projections and all, runs there."""
    return bool(
        (ffn != "cpu" and problem.fixed.get("activations") == INT8 and not problem.rounds_on_gpu)
        or (ffn == "cpu" and problem.share("weights.device"))
        or (attention == "cpu" and (problem.share("kv.device") or (problem.share("kv.host") or 1.0) < 1.0))
        or (ffn != "split" and problem.share("cpu_experts"))
        or (problem.model.dense and (attention == "gpu" or ffn != "cpu") and ffn != "gpu")
    )


def make_candidates(
    problem: Problem, variant: Candidates, n: Any, mu: Any, tokens: Any, prompt_micro_batches: Any, **requested: Any
) -> Candidates:
    """Candidates of ``variant`` from N, μ, the most ``tokens`` of a prompt micro-batch and their number in a pass, with
    the fields of a ``requested`` placement."""
    return replace(
        variant,
        batch_size=n,
        micro_batch_size=mu,
        micro_batch_tokens=tokens,
        prompt_micro_batches=prompt_micro_batches,
        kv_tokens=kv_tokens(problem, n),
        **requested,
    )


def kv_tokens(problem: Problem, batch_size: Any) -> Any:
    """Tokens of the cache: the fixed value, or else the need of N sequences of the workload."""
    fixed = problem.count("kv_tokens")
    if fixed is not None:
        return np.full_like(batch_size, fixed)
    return cache_tokens(problem.workload, batch_size, problem.block_size, problem.model.max_positions)
