"""One question to the optimizer, and the space it searches: which devices, orders and dtypes, and which sizes.

Refuses to know what anything costs (``hrm``) and how the best is found (``search``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from moelight.core.dtypes import DType, dtype_named
from moelight.core.errors import ConfigError
from moelight.core.policy import FFN_DEVICES, PROCESSORS, PROMPT_MICRO_BATCHES
from moelight.hrm.acts import Acts
from moelight.hrm.orders import LOOK_AHEAD
from moelight.hrm.speeds import Speeds
from moelight.profiles.model import ModelProfile
from moelight.profiles.workload import Workload
from moelight.scheduler.layout import EXPERT_HOMES
from moelight.scheduler.needs import misfit

Fixed = str | int | float

# In any device setting these two are never slower than the other orders (tests/hrm/test_estimate.py), so only they are
# searched unless another is fixed.
SEARCHED_ORDERS = ("cgopipe", "module")
PROMPT_MICRO_BATCH_TOKENS = tuple(1 << power for power in range(4, 14))
KV_BLOCK_SIZE = 32
_DEVICE_KEYS = (
    "schedule",
    "attention_device",
    "ffn_device",
    "weights.device",
    "kv.device",
    "kv.host",
    "cpu_experts",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What is to be run on what.

    Attributes:
        name: what the policy will call the model.
        capacity_bytes: what may be used of each tier; no ``device`` without a GPU, ``disk`` 0 where nothing may be
            streamed from it.
        dtype: what the compute unit works in; ``weight_dtypes`` and ``kv_dtypes`` are allowed for experts and cache.
        fixed: values by key of the policy.
        programme: whether the integer programme places pages; without it, nearest tiers are filled first, which is the
            same wherever neither the CPU's share of experts nor the cache's place is open and no copy binds.
    """

    name: str
    model: ModelProfile
    speeds: Speeds
    workload: Workload
    capacity_bytes: Mapping[str, int]
    dtype: DType
    weight_dtypes: tuple[str, ...] = ("auto",)
    kv_dtypes: tuple[str, ...] = ("auto",)
    orders: tuple[str, ...] = SEARCHED_ORDERS
    fixed: Mapping[str, Fixed] = field(default_factory=dict)
    programme: bool = True

    @property
    def has_gpu(self) -> bool:
        """Whether there is device memory."""
        return "device" in self.capacity_bytes

    @property
    def pages(self) -> int:
        """Experts of all layers."""
        return self.model.num_moe_layers * self.model.experts.num_experts

    def share(self, key: str) -> float | None:
        """The fixed share under ``key``, if any."""
        return None if key not in self.fixed else float(self.fixed[key])

    def count(self, key: str) -> int | None:
        """The fixed whole number under ``key``, if any."""
        return None if key not in self.fixed else int(self.fixed[key])

    @property
    def block_size(self) -> int:
        """Tokens in a block of the cache."""
        return self.count("kv_block_size") or KV_BLOCK_SIZE

    @property
    def device_kv(self) -> float | None:
        """The share of the cache on the device where a GPU attends, if it is fixed."""
        device, host = self.share("kv.device"), self.share("kv.host")
        return device if device is not None else None if host is None else 1.0 - host

    @property
    def sequences(self) -> tuple[int, int]:
        """The least and the most N: not more than there are requests, unless a fixed micro-batch asks for it."""
        fixed, number, size = (self.count(key) for key in ("batch_size", "num_micro_batches", "micro_batch_size"))
        if fixed is not None:
            return fixed, fixed
        least = size or number or 1 if number is None or size is None else (number - 1) * size + 1
        most = max(least, self.workload.num_requests)
        return least, most if number is None or size is None else min(most, number * size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The discrete part of a policy: devices, order, dtypes. It is priced by its ``acts``."""

    acts: Acts
    order: str
    weight_dtype: str
    kv_dtype: str

    @property
    def attention_device(self) -> str:
        """Where decoding sequences attend."""
        return self.acts.attention_device

    @property
    def ffn_device(self) -> str:
        """Where experts run."""
        return self.acts.ffn_device


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """Candidates of one setting as arrays of one shape: N, μ, and the most tokens of a prompt micro-batch. They have
    the face of a policy, as far as memory and time ask for it."""

    setting: Setting
    batch_size: Any
    micro_batch_size: Any
    micro_batch_tokens: Any
    kv_tokens: Any
    kv_block_size: int
    prompt_micro_batches: int = PROMPT_MICRO_BATCHES
    look_ahead: int = LOOK_AHEAD

    @property
    def attention_device(self) -> str:
        """Where decoding sequences attend."""
        return self.setting.attention_device

    @property
    def ffn_device(self) -> str:
        """Where experts run."""
        return self.setting.ffn_device

    @property
    def schedule(self) -> str:
        """The order of work."""
        return self.setting.order

    @property
    def discrete(self) -> bool:
        """Whether a GPU takes part."""
        return self.setting.acts.discrete

    def at(self, index: Any) -> Cells:
        """The candidates that ``index`` picks."""
        arrays = (self.batch_size, self.micro_batch_size, self.micro_batch_tokens, self.kv_tokens)
        n, mu, tokens, kv = (np.asarray(array)[index] for array in arrays)
        return replace(self, batch_size=n, micro_batch_size=mu, micro_batch_tokens=tokens, kv_tokens=kv)


def settings(problem: Problem) -> Iterator[Setting]:
    """Every allowed combination of devices, order and dtypes.

    Raises:
        ConfigError: the fixed ones cannot go together; names them.
    """
    fixed, found = problem.fixed, 0
    orders = (str(fixed["schedule"]),) if "schedule" in fixed else problem.orders
    attentions = (str(fixed["attention_device"]),) if "attention_device" in fixed else PROCESSORS
    ffns = (str(fixed["ffn_device"]),) if "ffn_device" in fixed else FFN_DEVICES
    weights = (str(fixed["weight_dtype"]),) if "weight_dtype" in fixed else problem.weight_dtypes
    caches = (str(fixed["kv_dtype"]),) if "kv_dtype" in fixed else problem.kv_dtypes
    for attention, ffn, order, weight, cache in product(attentions, ffns, orders, weights, caches):
        gpu = attention == "gpu" or ffn != "cpu"
        if (gpu and not problem.has_gpu) or _contradicts(problem, attention, ffn):
            continue
        if misfit(order, discrete=gpu, attention=attention, experts=EXPERT_HOMES[ffn]) is not None:
            continue
        found += 1
        acts = Acts(
            model=problem.model,
            speeds=problem.speeds,
            dtype=problem.dtype,
            kv_dtype=problem.dtype if cache == "auto" else dtype_named(cache),
            page_dtype=problem.dtype if weight == "auto" else dtype_named(weight),
            attention_device=attention,
            ffn_device=ffn,
            pinned_homes=fixed.get("host_pages") == "pinned",
        )
        yield Setting(acts=acts, order=order, weight_dtype=weight, kv_dtype=cache)
    if not found:
        named = " and ".join(f"--fix {key}={value}" for key, value in fixed.items() if key in _DEVICE_KEYS)
        raise ConfigError(f"{named} contradict each other: no devices and order of work here have them all")


def _contradicts(problem: Problem, attention: str, ffn: str) -> bool:
    """Device memory holds pages for a GPU's experts and a cache for its attention, and for nothing else."""
    return bool(
        (ffn == "cpu" and problem.share("weights.device"))
        or (attention == "cpu" and (problem.share("kv.device") or (problem.share("kv.host") or 1.0) < 1.0))
        or (ffn != "split" and problem.share("cpu_experts"))
    )


def cells(problem: Problem, setting: Setting, batch_size: Any, micro_batch_size: Any, prompt_tokens: Any) -> Cells:
    """Candidates from arrays of N, μ and the most tokens of a prompt micro-batch."""
    return Cells(
        setting=setting,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        micro_batch_tokens=prompt_tokens,
        kv_tokens=kv_tokens(problem, batch_size),
        kv_block_size=problem.block_size,
        prompt_micro_batches=problem.count("prompt_micro_batches") or PROMPT_MICRO_BATCHES,
        look_ahead=problem.count("look_ahead") or LOOK_AHEAD,
    )


def kv_tokens(problem: Problem, batch_size: Any) -> Any:
    """Room in the cache for N sequences of the workload's average length, each with a block not quite full, and for the
    longest one at least."""
    fixed = problem.count("kv_tokens")
    if fixed is not None:
        return np.full_like(batch_size, fixed)
    work, context = problem.workload, problem.model.max_positions
    average = min(work.prompt_len + work.gen_len, context)
    longest = min(work.max_prompt_len + work.gen_len, context)
    return np.maximum(batch_size * average, longest) + problem.block_size * batch_size
