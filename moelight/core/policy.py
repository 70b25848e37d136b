"""The policy: how one model is run on one machine, as plain numbers. The cost model predicts its cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moelight.core.dtypes import dtype_named
from moelight.core.errors import ConfigError, quoted

TIERS = ("device", "host", "disk")
PROCESSORS = ("cpu", "gpu")
FFN_DEVICES = ("cpu", "gpu", "split")
KV_BLOCK_SIZES = (16, 32, 64, 128)
ADMISSIONS = ("refill", "static")
HOST_PAGES = ("auto", "staged", "pinned")
RESIDENTS = ("auto", "static", "learned")
INT8 = "int8"
ACTIVATIONS = ("auto", INT8)
_WORDS = {
    "attention_device": PROCESSORS,
    "ffn_device": FFN_DEVICES,
    "admission": ADMISSIONS,
    "host_pages": HOST_PAGES,
    "residents": RESIDENTS,
    "activations": ACTIVATIONS,
}
MOST_LOOK_AHEAD = 8
PROMPT_MICRO_BATCHES = 8
# Upper limits of counts, far beyond any machine, so that products with a model's sizes stay finite.
MOST_COUNTS = {
    "batch_size": 1 << 30,
    "micro_batch_size": 1 << 30,
    "num_micro_batches": 1 << 30,
    "micro_batch_tokens": 1 << 30,
    "prompt_micro_batches": 1 << 16,
    "kv_tokens": 1 << 40,
    "look_ahead": MOST_LOOK_AHEAD,
    "ring_pages": 1 << 30,
    "gpus": 1 << 12,
}
FROM_ZERO = ("kv_tokens", "ring_pages")  # counts that may be 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Fractions of a quantity per tier; the three sum to 1.

    Attributes:
        device: the fraction in device memory.
        host: the fraction in host memory.
        disk: the fraction on disk.
    """

    device: float = 0.0
    host: float = 0.0
    disk: float = 0.0

    def __post_init__(self) -> None:
        if min(self.device, self.host, self.disk) < 0 or abs(self.device + self.host + self.disk - 1) > 1e-9:
            raise ConfigError(
                f"shares must be at least 0 and sum to 1, not device {self.device}, host {self.host}, disk {self.disk}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """N, μ, devices, placement and schedule (MoE-Lightning, table 1) for one model.

    Attributes:
        model: a directory or a hub id.
        batch_size: N, the most sequences running in one pass.
        micro_batch_size: μ, the most sequences in one micro-batch.
        micro_batch_tokens: the most tokens in one micro-batch; longer prompts are cut into chunks.
        prompt_micro_batches: a pass holds at most N + ``prompt_micro_batches`` x ``micro_batch_tokens`` tokens.
        kv_tokens: tokens the KV cache can hold (0: ``batch_size`` x 1024, or x the context length if that is shorter).
        attention_device: ``cpu`` or ``gpu``: the processor of decode attention.
        ffn_device: ``cpu``, ``gpu``, or ``split``: the CPU computes ``cpu_experts`` in host memory, the GPU the others.
        weights: r_w, shares of the *expert* weights per tier; all other weights are on the compute device.
        cpu_experts: the share of the expert weights that the CPU computes from host memory (``split`` only).
        kv: r_c, shares of the KV cache per tier.
        weight_dtype: number format of the weights; ``auto`` keeps the checkpoint's dtype. float16 over a bfloat16
            checkpoint, also ``auto`` on a GPU without bfloat16, is mixed precision.
        kv_dtype: number format of the KV cache; ``auto`` keeps the checkpoint's dtype.
        activations: what the experts' products multiply: ``auto`` (the activations as they are, and the numbers of the
            weights) or ``int8`` (activations rounded to int8, and the integers that the checkpoint stores).
        schedule: name of the schedule builder.
        kv_block_size: tokens in one block of the paged KV cache.
        look_ahead: micro-batches whose attention precedes the experts of an earlier one (algorithm 1), in schedules
            that use it.
        admission: ``refill`` (the place of a finished sequence is refilled in the next pass, and prompts join decode
            passes) or ``static`` (a batch is prefilled alone and ends together, as in the published systems).
        host_pages: transfer of expert pages from host memory: ``pinned`` (from their arena, which is locked),
            ``staged`` (copied into pinned memory first), or ``auto``: planned as staged, and pinned where the machine
            can lock the arena in place.
        residents: ``static`` (resident experts are fixed) or ``learned`` (on-demand passes evict them for experts that
            are routed to more often: any expert of a layer may be missing, so the ring holds a layer, and
            device-resident experts have copies in host memory); ``auto``: planned as static, and learned where memory
            allows.
        ring_pages: the most expert pages in the ring that streamed pages pass through, at least 2; 0: those of two
            layers. With fewer, a layer's experts run page by page as they arrive, for all micro-batches (schedule
            ``module``).
        gpus: GPUs that share each layer. The engine runs on one; more can be planned for, and the engine refuses them.

    Raises:
        ConfigError: a value is unknown, out of range, or contradicts another value.
    """

    model: str
    batch_size: int = 64
    micro_batch_size: int = 64
    micro_batch_tokens: int = 1024
    prompt_micro_batches: int = PROMPT_MICRO_BATCHES
    kv_tokens: int = 0
    attention_device: str = "cpu"
    ffn_device: str = "cpu"
    weights: Shares = Shares(host=1.0)
    cpu_experts: float = 0.0
    kv: Shares = Shares(host=1.0)
    weight_dtype: str = "auto"
    kv_dtype: str = "auto"
    activations: str = "auto"
    schedule: str = "cgopipe"
    kv_block_size: int = 32
    look_ahead: int = 2
    admission: str = "refill"
    host_pages: str = "auto"
    residents: str = "auto"
    ring_pages: int = 0
    gpus: int = 1

    def __post_init__(self) -> None:
        for name in MOST_COUNTS:
            check_count(name, getattr(self, name), least=0 if name in FROM_ZERO else 1)
        if self.ring_pages == 1:
            raise ConfigError(
                "ring_pages must be at least 2 (0: two layers): one page arrives while another is computed"
            )
        if self.micro_batch_tokens < self.micro_batch_size:
            raise ConfigError(
                f"micro_batch_tokens ({self.micro_batch_tokens}) must be at least micro_batch_size "
                f"({self.micro_batch_size}): a decoding sequence brings one token"
            )
        for name, allowed in _WORDS.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        if not 0 <= self.cpu_experts <= self.weights.host + 1e-9 or (self.cpu_experts and self.ffn_device != "split"):
            raise ConfigError(
                f"cpu_experts ({self.cpu_experts}) needs ffn_device split, and at most the share of weights on host"
            )
        for name in ("weight_dtype", "kv_dtype"):
            if getattr(self, name) != "auto":
                dtype_named(getattr(self, name))
        if self.kv_block_size not in KV_BLOCK_SIZES:
            raise ConfigError(f"kv_block_size must be one of {KV_BLOCK_SIZES}, not {self.kv_block_size}")

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a pass in which every sequence decodes."""
        return -(-self.batch_size // self.micro_batch_size)

    @property
    def discrete(self) -> bool:
        """True if a GPU takes part, so that a link joins two memories."""
        return self.ffn_device != "cpu" or self.attention_device == "gpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptation:
    """A change of policy after pass ``after_pass`` (from 1): the fields in ``before`` take the values in ``now``.
    ``reason`` is one sentence; ``predicted_gain`` is relative, in tokens per second (0: return to earlier values)."""

    after_pass: int
    before: Mapping[str, int]
    now: Mapping[str, int]
    reason: str
    predicted_gain: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "pass": self.after_pass,
            "from": dict(self.before),
            "to": dict(self.now),
            "reason": self.reason,
            "predicted_gain": self.predicted_gain,
        }


def check_count(name: str, count: int, *, least: int) -> None:
    """Raise ConfigError, which states the range, if the count ``name`` of a policy is out of range."""
    if not least <= count <= MOST_COUNTS[name]:
        raise ConfigError(f"{name} must be from {least} to {MOST_COUNTS[name]:,}, not {quoted(count)}")
