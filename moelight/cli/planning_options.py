"""Options that the planning commands share: machine, model, workload, limits and fixed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moelight.cli.options import flag, option, refuse_beside
from moelight.core.errors import ConfigError, did_you_mean
from moelight.core.units import format_bytes, parse_bytes
from moelight.observe.number_format import rate_or_count, seconds_text, share_text

if TYPE_CHECKING:
    from moelight.core.policy import Policy
    from moelight.optimizer.options import PlanOptions
    from moelight.optimizer.plan import Plan
    from moelight.optimizer.ranks import RanksPlan
    from moelight.optimizer.simulation import DraftGain
    from moelight.profiles.hardware import HardwareProfile
    from moelight.profiles.model import ModelProfile
    from moelight.profiles.workload import Workload

AUTO = "auto"
CHOOSE = "choose"
DEFAULT_WORKLOAD = "mtbench"
DEMO = "demo"
LIMITS = {"device": "device_memory", "host": "host_memory", "disk": "disk"}  # options by tier
FIGURES = ("prompt_len", "max_prompt_len", "gen_len", "num_requests")
DTYPE_KEYS = ("weight_dtype", "kv_dtype")
FORMATS = (*DTYPE_KEYS, "allow")
CONSTRAINTS = ("fix", *LIMITS.values(), *FORMATS, "no_cache")  # options that conflict with --policy

Hw = Annotated[
    str, typer.Option("--hw", metavar="NAME|FILE|auto", help="Hardware profile; auto measures this machine.")
]
Model = Annotated[
    str, typer.Option("--model", "-m", metavar="NAME|DIR", help="Known model, or directory of a config.json.")
]
OptionalModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME|DIR",
        help="Known model, or directory of a config.json; defaults to the policy's.",
    ),
]
PolicyFile = Annotated[
    Path | None, typer.Option("--policy", metavar="FILE.yaml", help="Policy file to use instead of planning.")
]
Acceptance = Annotated[
    float | None,
    typer.Option(
        "--acceptance",
        metavar="SHARE",
        min=0.0,
        max=1.0,
        help="Fraction of draft tokens that are accepted; adds the best number of drafts and their gain.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningOptions:
    """The options of a planning command; a command may leave some out."""

    hw: Hw = AUTO
    workload: str | None = option("Workload profile; defaults to mtbench.", metavar="NAME")
    prompt_len: int | None = option("Average number of tokens per prompt.", min=1)
    max_prompt_len: int | None = option("Number of tokens of the longest prompt.", min=1)
    gen_len: int | None = option("Number of tokens to generate per prompt.", min=1)
    num_requests: int | None = option("Number of prompts.", min=1)
    estimator: str = option("Cost model: calibrated, or paper for the published formulas.", default="calibrated")
    device_memory: str | None = option("Maximum memory per GPU, e.g. 10GiB.", metavar="SIZE")
    host_memory: str | None = option("Maximum host memory, e.g. 64GiB.", metavar="SIZE")
    disk: str | None = option("Maximum disk space; 0 disables offloading to disk.", metavar="SIZE")
    fix: list[str] | None = option(
        "Fix a field of the policy, e.g. attention=cpu; may be repeated.", metavar="KEY=VALUE"
    )
    weight_dtype: str = option(
        "Data type of the experts: auto (the checkpoint's), choose, or a fixed one.",
        metavar="auto|choose|NAME",
        default=AUTO,
    )
    kv_dtype: str = option(
        "Data type of the KV cache: auto, choose or a fixed one; the engine runs auto and int8.",
        metavar="auto|choose|NAME",
        default=AUTO,
    )
    allow: str | None = option(
        "Data types of experts that the plan may use, separated by commas.",
        metavar="int8,int4",
    )
    no_cache: bool = option("Do not read or write the plan cache.", default=False)


def draft_text(gain: DraftGain) -> str:
    """Return one line about the drafts of decode passes."""
    if not gain.num_speculative_tokens:
        return f"drafts, {share_text(gain.acceptance)} of them accepted: none pay in decode passes"
    return (
        f"drafts, {share_text(gain.acceptance)} of them accepted: {gain.num_speculative_tokens} for each sequence give "
        f"{gain.gain:.2f} x the tokens of decode passes, {rate_or_count(gain.decode_tokens_per_s)} tokens/s"
    )


def ranks_text(ranks: RanksPlan) -> str:
    """Return one line about the ranks of the plan, and one about what several give."""
    if (gain := ranks.gain) is None:
        return "one rank: there is one GPU or NUMA node, or several ranks do not fit the memory"
    first = "one rank: several would not be faster" if ranks.ranks == 1 else f"the plan of one of {ranks.ranks}"
    beside = "of a model that does not fit one process" if gain.gain is None else f"{gain.gain:.2f} x one process"
    exchange = f"{seconds_text(gain.exchange_s)} of a decode pass, {share_text(gain.exchange_s / gain.pass_s)}"
    rate = rate_or_count(gain.tokens_per_s)
    return f"{first}\n{gain.ranks} give {rate} tokens/s, {beside}; they exchange for {exchange}"


def count_nodes(hw: str) -> int:
    """Return the number of NUMA nodes of the machine ``hw``; 1 of others than this one, whose profiles say nothing."""
    if hw != AUTO:
        return 1
    from moelight.runtime.topology import read_topology

    return max(1, len({core.node for core in read_topology().cores}))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedJob:
    """A model and a workload, with their names, and the options of their plans; `on` adds a machine."""

    model: ModelProfile
    name: str
    workload: Workload
    workload_name: str
    options: PlanOptions

    def on(self, hardware: HardwareProfile) -> Question:
        """Return the question for ``hardware``; raises ConfigError for options that do not suit it."""
        from moelight.optimizer.fixed_values import check_fixes

        limits = self.options.limits
        for tier in ("device", "disk"):
            if limits.get(tier) and hardware.tier(tier) is None:  # its bandwidth is unknown
                raise ConfigError(
                    f"{flag(LIMITS[tier])} {format_bytes(limits[tier])}: the machine {hardware.name} has no tier "
                    f"{tier!r}; describe it in a machine file (tiers.{tier}) and name that with --hw"
                )
        check_fixes(self.options.fix, has_gpu=hardware.tier("device") is not None)
        return Question(**{name: getattr(self, name) for name in PlannedJob.__dataclass_fields__}, hardware=hardware)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question(PlannedJob):
    """One planning problem: a job and a machine."""

    hardware: HardwareProfile

    def plan(self) -> Plan:
        """Return the best plan; raises BudgetError if no policy fits the memory."""
        from moelight.optimizer.optimize import make_plan

        return make_plan(self.hardware, self.model, self.workload, self.options, name=self.name)

    def plan_ranks(self, asked: str, *, nodes: int) -> RanksPlan:
        """Return the plan of one of the ranks ``asked`` for, as `optimizer.ranks.plan_ranks`."""
        from moelight.optimizer.ranks import plan_ranks

        job = (self.hardware, self.model, self.workload, self.options)
        return plan_ranks(*job, name=self.name, asked=asked, nodes=nodes)


def read_question(model: str, asked: PlanningOptions) -> Question:
    """Return the question that the options describe; they are validated before a machine is measured."""
    return read_job(model, asked).on(load_machine(asked.hw, model))


def read_job(model: str, asked: PlanningOptions) -> PlannedJob:
    """Return what the options, all but that of the machine, describe."""
    from moelight.optimizer.allowed import allowed_caches, allowed_weights, parse_allowed
    from moelight.optimizer.fixed_values import parse_fixes
    from moelight.optimizer.options import ESTIMATORS, PlanOptions

    if asked.estimator not in ESTIMATORS:
        hint = did_you_mean(asked.estimator, ESTIMATORS)
        raise ConfigError(f"--estimator {asked.estimator!r} is not one of {', '.join(ESTIMATORS)}{hint}")
    workload, workload_name = _workload(asked)
    fixes = parse_fixes(asked.fix or ())
    limits = {}
    for tier, name in LIMITS.items():
        size = getattr(asked, name)
        if size is not None:
            limits[tier] = 0 if tier == "disk" and size.strip() == "0" else parse_bytes(size, label=flag(name))
    allowed = parse_allowed(asked.allow)
    dtypes = {key: _dtypes(getattr(asked, key), key, fixes) for key in DTYPE_KEYS}
    if allowed and (asked.weight_dtype != AUTO or "weight_dtype" in fixes):
        setting = f"--weight-dtype {asked.weight_dtype}"
        if asked.weight_dtype == AUTO:
            setting = f"--fix weight_dtype={fixes['weight_dtype']}"
        raise ConfigError(f"--allow {allowed[0]} and {setting} both say what the plan may use; drop one")
    profile = load_model(model)
    dtypes["weight_dtype"] += allowed_weights(allowed, profile)[1:]
    if asked.kv_dtype == CHOOSE:
        dtypes["kv_dtype"] = allowed_caches(profile)
    return PlannedJob(
        model=profile,
        name=model,
        workload=workload,
        workload_name=workload_name,
        options=PlanOptions(
            estimator=asked.estimator,
            limits=limits,
            fix=fixes,
            weight_dtypes=dtypes["weight_dtype"],
            kv_dtypes=dtypes["kv_dtype"],
            cache=not asked.no_cache,
        ),
    )


def read_question_or_policy(
    policy: Path | None, model: str | None, asked: PlanningOptions
) -> tuple[Question, Policy | None]:
    """Return the question, about ``model`` or else the policy's model, and the policy of the file if one is given.

    Options that constrain the planner (`CONSTRAINTS`) are refused beside a policy.
    """
    if policy is None:
        if model is None:
            raise ConfigError("which model? give --model NAME|DIR, or a --policy FILE.yaml that names one")
        return read_question(model, asked), None
    from moelight.profiles.policy_files import load_policy
    from moelight.scheduler.requirements import check_policy

    refuse_beside(f"--policy {policy}", asked, CONSTRAINTS, "the policy says how to run")
    chosen = load_policy(policy)
    chosen = chosen if model is None else replace(chosen, model=model)
    question = read_question(chosen.model, asked)
    if chosen.discrete and question.hardware.tier("device") is None:
        raise ConfigError(f"{policy}: the policy needs a GPU, and the machine {question.hardware.name} has none")
    check_policy(chosen)
    return question, chosen


def load_machine(hw: str, model: str) -> HardwareProfile:
    """Return the profile of the machine or file ``hw``; ``auto``: this machine, with the disk of ``model``."""
    if hw == AUTO:
        from moelight.runtime.machine_profile import machine_profile

        path = Path(model)
        return machine_profile(disk_dir=path if path.is_dir() else None)
    from moelight.profiles.hardware import load_hardware_profile

    return load_hardware_profile(hw)


def load_model(model: str) -> ModelProfile:
    """Return the profile of a known model, of a directory's ``config.json``, or of ``demo``, the bundled model."""
    from moelight.models.profiles import profile_of_checkpoint
    from moelight.profiles.model_files import load_model_profile

    if model == DEMO:
        from moelight.weights.source import resolve_model

        return load_model_profile(str(resolve_model(DEMO)))
    return load_model_profile(model, profile_of_checkpoint)


def _workload(asked: PlanningOptions) -> tuple[Workload, str]:
    """Return the workload with the given figures, and its name, empty if all figures are given.

    A longer average raises the longest prompt, too.
    """
    from moelight.profiles.workload import load_workload

    name = asked.workload or DEFAULT_WORKLOAD
    work = load_workload(name)
    figures = {figure: value for figure in FIGURES if (value := getattr(asked, figure)) is not None}
    average = figures.get("prompt_len", work.prompt_len)
    longest = figures.get("max_prompt_len", max(average, work.max_prompt_len))
    if average > longest:
        shown = f"--prompt-len {average}" if "prompt_len" in figures else f"the average of {name}, {average}"
        raise ConfigError(f"--max-prompt-len {longest} is less than {shown}; give a --prompt-len that is not above it")
    shown = "" if len(figures) == len(FIGURES) else f"{name}, changed" if figures else name
    return replace(work, **{**figures, "max_prompt_len": longest}), shown


def _dtypes(value: str, key: str, fixes: Mapping[str, object]) -> tuple[str, ...]:
    """Return the dtypes that the planner may choose: the model's own, any, or one."""
    from moelight.core.dtypes import DTYPES
    from moelight.optimizer.allowed import CACHES

    if value != AUTO and key in fixes:
        raise ConfigError(f"{flag(key)} {value} and --fix {key}={fixes[key]} say the same thing twice; drop one")
    if value == CHOOSE:
        return CACHES if key == "kv_dtype" else (AUTO, *DTYPES)
    if value != AUTO and value not in DTYPES:
        choices = (AUTO, CHOOSE, *DTYPES)
        raise ConfigError(f"{flag(key)} {value!r} is not one of {', '.join(choices)}{did_you_mean(value, choices)}")
    return (value,)
