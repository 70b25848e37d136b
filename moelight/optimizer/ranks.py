"""Plans of ranks, processes of one machine that compute a model together: of one of them, beside that of one process
alone, and what they exchange."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from moelight.core.dtypes import DType
from moelight.core.errors import BudgetError, ConfigError
from moelight.hrm.estimate import cost_model_of
from moelight.optimizer.optimize import compute_dtype, make_plan
from moelight.optimizer.options import ESTIMATORS, PlanOptions
from moelight.optimizer.plan import Plan
from moelight.profiles.hardware import HardwareProfile, part_of, with_gpus
from moelight.profiles.model import ModelProfile
from moelight.profiles.workload import Workload

AUTO = "auto"
MAX_RANKS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksGain:
    """What ``ranks`` processes give, each with a GPU or a share of the cores, beside one with one GPU or all cores.

    Attributes:
        tokens_per_s: generated tokens of the whole job over its seconds, of all ranks together.
        alone_tokens_per_s: the same of one process; None if the model does not fit.
        exchange_s: seconds of a decode pass in which a rank exchanges with the others; ``pass_s``: of that pass.
    """

    ranks: int
    tokens_per_s: float
    alone_tokens_per_s: float | None
    exchange_s: float
    pass_s: float

    @property
    def gain(self) -> float | None:
        """Tokens per second over those of one process."""
        return None if self.alone_tokens_per_s is None else self.tokens_per_s / self.alone_tokens_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksPlan:
    """``plan`` is that of one of ``ranks``; ``gain``: what several give, None if that was not asked or cannot be."""

    plan: Plan
    ranks: int
    gain: RanksGain | None

    def as_dict(self) -> dict[str, Any]:
        """``ranks`` and their gain as plain values."""
        gain = {} if self.gain is None else {"several": {**asdict(self.gain), "gain": self.gain.gain}}
        return {"ranks": self.ranks, **gain}


def parse_ranks(asked: str) -> int:
    """The number of ranks ``asked``. Raises ConfigError for what is no number from 1 to `MAX_RANKS`."""
    if not asked.isdecimal() or not 1 <= int(asked[:9]) <= MAX_RANKS:
        raise ConfigError(f"tp must be {AUTO} or a number of ranks from 1 to {MAX_RANKS}, not {asked!r}")
    return int(asked)


def plan_ranks(
    hardware: HardwareProfile,
    model: ModelProfile,
    workload: Workload,
    options: PlanOptions | None = None,
    *,
    name: str,
    asked: str,
    nodes: int = 1,
) -> RanksPlan:
    """The plan of one of the ranks that are ``asked`` for: a number, or ``auto``, one for each GPU, or without one for
    each of ``nodes`` NUMA nodes, unless one process is as fast. Limits in ``options`` are those of the machine.

    Raises ConfigError if the number does not divide the experts, for more ranks than GPUs, and for options that say
    nothing of ranks; BudgetError if nothing fits."""
    options, gpu = options or PlanOptions(), hardware.processor("gpu")
    count = (nodes if gpu is None else gpu.count) if asked == AUTO else parse_ranks(asked)
    if gpu is not None and count > gpu.count:
        present = "one GPU" if gpu.count == 1 else f"{gpu.count:,} GPUs"
        raise ConfigError(f"--tp {count}: the machine {hardware.name} has {present}; a rank needs one of its own")
    if "gpus" in options.fix:
        raise ConfigError(f"--tp {asked} and --fix gpus={options.fix['gpus']}: a rank has one GPU; leave gpus out")
    if options.estimator != ESTIMATORS[0]:
        raise ConfigError(f"--tp {asked}: the estimator {options.estimator} has no ranks; leave --estimator out")
    if count == 1:
        return RanksPlan(
            plan=make_plan(with_gpus(hardware, 1), model, workload, options, name=name), ranks=1, gain=None
        )
    limits = {tier: size if tier == "device" else size // count for tier, size in options.limits.items()}
    divided = replace(options, limits=limits)
    cards = hardware if gpu is None else with_gpus(hardware, count)
    part, share = part_of(cards, count), model.on_ranks(count)
    ranked = _planned(part, share, workload, divided, name)
    alone = _planned(with_gpus(hardware, 1), model, workload, options, name)
    if isinstance(ranked, BudgetError):
        if asked == AUTO and isinstance(alone, Plan):
            return RanksPlan(plan=alone, ranks=1, gain=None)
        raise BudgetError(f"one of {count} ranks: {ranked}", tier=ranked.tier, needed_bytes=ranked.needed_bytes)
    gain = RanksGain(
        ranks=count,
        tokens_per_s=ranked.estimate.tokens_per_s,
        alone_tokens_per_s=alone.estimate.tokens_per_s if isinstance(alone, Plan) else None,
        exchange_s=_exchange_s(ranked, share, compute_dtype(share, part)),
        pass_s=ranked.estimate.pass_s,
    )
    if asked == AUTO and isinstance(alone, Plan) and alone.estimate.tokens_per_s >= gain.tokens_per_s:
        return RanksPlan(plan=alone, ranks=1, gain=gain)
    return RanksPlan(plan=ranked, ranks=count, gain=gain)


def _exchange_s(plan: Plan, model: ModelProfile, dtype: DType) -> float:
    """Seconds of all exchanges of a decode pass of ``plan``, of one of the ranks of ``model``."""
    assert plan.speeds is not None
    running = min(plan.policy.batch_size, plan.workload.num_requests)
    count = -(-running // plan.policy.micro_batch_size)
    cost_model = cost_model_of(model, plan.policy, plan.speeds, dtype)
    return float(count * cost_model.exchanges_s(running / count, running / count))


def _planned(
    hardware: HardwareProfile, model: ModelProfile, workload: Workload, options: PlanOptions, name: str
) -> Plan | BudgetError:
    """The plan, or the reason why nothing fits."""
    try:
        return make_plan(hardware, model, workload, options, name=name)
    except BudgetError as error:
        return error
