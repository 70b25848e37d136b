"""The runs that `hrm_error.py` predicts and measures, in two sets that share no model, and the models' shapes.

`fit` are the runs whose errors shaped the ledger; `held-out` are those that only ever judge it. Nobody looks into a
held-out run to change the estimate: one that was looked into is replaced by another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from make_checkpoint import make_checkpoint, make_shape, scaled_config


@dataclass(frozen=True, kw_only=True)
class Run:
    """One setting: which model, N and μ, how much host memory, and the work."""

    model: str
    batch_size: int
    micro_batch_size: int | None = None
    host_memory: str = "12GiB"
    requests: int = 64
    prompt_len: int = 128
    gen_len: int = 32
    schedule: str = "cgopipe"

    @property
    def label(self) -> str:
        """One line of the table."""
        mu = self.micro_batch_size or self.batch_size
        return (
            f"{self.model:8s} N {self.batch_size:3d} mu {mu:3d} {self.host_memory:>7s} "
            f"{self.requests:3d} x {self.prompt_len:4d} + {self.gen_len:3d} {self.schedule}"
        )


FIT = (
    Run(model="mixtral", batch_size=64),
    Run(model="mixtral", batch_size=16, requests=32),
    Run(model="mixtral", batch_size=4, requests=8),
    Run(model="mixtral", batch_size=1, requests=3),
    Run(model="mixtral", batch_size=64, micro_batch_size=16),
    Run(model="mixtral", batch_size=128, requests=128, prompt_len=32, gen_len=64),
    Run(model="mixtral", batch_size=32, requests=32, prompt_len=512, gen_len=16),
    Run(model="mixtral", batch_size=64, host_memory="1GiB"),
    Run(model="mixtral", batch_size=32, requests=32, host_memory="1400MiB"),
    Run(model="mixtral", batch_size=64, host_memory="1GiB", schedule="serial"),
    Run(model="qwen", batch_size=64),
    Run(model="qwen", batch_size=16, requests=32),
    Run(model="qwen", batch_size=4, requests=8),
    Run(model="qwen", batch_size=64, micro_batch_size=32, host_memory="1GiB"),
    Run(model="olmoe", batch_size=64, prompt_len=256),
    Run(model="olmoe", batch_size=8, requests=16, gen_len=64),
    Run(model="olmoe", batch_size=20, requests=20, prompt_len=66, gen_len=24, schedule="module"),
    Run(model="mixtral", batch_size=24, host_memory="1GiB", requests=24, prompt_len=22, gen_len=12, schedule="serial"),
)
HELD_OUT = (
    Run(model="wide", batch_size=24, requests=24, prompt_len=56, gen_len=20),
    Run(model="wide", batch_size=6, requests=12, prompt_len=40, gen_len=24),
    Run(model="wide", batch_size=2, requests=4, prompt_len=180, gen_len=20),
    Run(model="wide", batch_size=48, micro_batch_size=12, requests=48, prompt_len=20, gen_len=16),
    Run(model="wide", batch_size=20, host_memory="640MiB", requests=20, prompt_len=10, gen_len=20),
    Run(model="wide", batch_size=8, host_memory="592MiB", requests=16, prompt_len=20, gen_len=14),
    Run(model="fine", batch_size=40, requests=40, prompt_len=48, gen_len=20),
    Run(model="fine", batch_size=12, requests=24, prompt_len=56, gen_len=20),
    Run(model="fine", batch_size=2, requests=4, prompt_len=48, gen_len=40),
    Run(model="fine", batch_size=48, micro_batch_size=24, host_memory="448MiB", requests=48, prompt_len=12, gen_len=16),
    Run(model="fine", batch_size=5, host_memory="464MiB", requests=10, prompt_len=28, gen_len=18),
    Run(model="half", batch_size=20, requests=20, prompt_len=64, gen_len=24, schedule="module"),
    Run(model="half", batch_size=3, requests=6, prompt_len=240, gen_len=12),
    Run(model="half", batch_size=32, host_memory="640MiB", requests=64, prompt_len=8, gen_len=12, schedule="module"),
    Run(model="deep", batch_size=32, requests=32, prompt_len=48, gen_len=28),
    Run(model="deep", batch_size=96, requests=96, prompt_len=16, gen_len=24),
    Run(model="deep", batch_size=24, host_memory="320MiB", requests=24, prompt_len=20, gen_len=16, schedule="serial"),
    Run(model="deep", batch_size=10, host_memory="288MiB", requests=20, prompt_len=16, gen_len=16),
)
SETS: Mapping[str, Sequence[Run]] = {"fit": FIT, "held-out": HELD_OUT}

_SIZES = ("layers", "hidden", "intermediate", "experts", "top_k", "heads", "kv_heads", "head_dim", "vocab")
# Held out: 0.3 to 0.5 billion parameters, of other widths, depths, heads and numbers of experts than those of `fit`.
_MODELS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "qwen": ("qwen3-30b-a3b", (12, 1024, 384, 64, 8, 16, 4, 64, 8192)),
    "olmoe": ("olmoe-1b-7b", (8, 1024, 512, 64, 8, 16, 16, 64, 8192)),
    "wide": ("mixtral-8x7b", (4, 1536, 2048, 8, 2, 12, 3, 128, 12000)),
    "fine": ("qwen3-30b-a3b", (6, 768, 256, 96, 6, 12, 2, 96, 10000)),
    "half": ("olmoe-1b-7b", (5, 1280, 640, 32, 4, 10, 10, 128, 6000)),
    "deep": ("mixtral-8x7b", (16, 512, 1536, 8, 2, 8, 2, 64, 4000)),
}


def checkpoint(name: str, scratch: Path) -> Path:
    """The checkpoint of model ``name`` in ``scratch``, made unless it is there."""
    if name == "mixtral":
        return make_shape("mixtral-0p9b", scratch)
    out = scratch / name
    if not (out / "config.json").exists():
        make_checkpoint(out, config_of(name))
    return out


def config_of(name: str) -> dict[str, object]:
    """The raw config of one of the models that are made here."""
    model, sizes = _MODELS[name]
    return scaled_config(model, **dict(zip(_SIZES, sizes, strict=True)))
