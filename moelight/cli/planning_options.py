"""Options that the planning commands share: machine, model, workload, limits and fixed values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moelight.core.errors import ConfigError, did_you_mean
from moelight.core.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from moelight.core.policy import Policy
    from moelight.optimizer.fixed_values import Fixed
    from moelight.optimizer.plan import Plan
    from moelight.profiles.hardware import HardwareProfile
    from moelight.profiles.model import ModelProfile
    from moelight.profiles.workload import Workload

AUTO = "auto"
CHOOSE = "choose"
DEFAULT_WORKLOAD = "mtbench"
DEMO = "demo"
ESTIMATORS = ("calibrated", "paper")
PLANNING = (
    "fix",
    "device_memory",
    "host_memory",
    "disk",
    "weight_dtype",
    "kv_dtype",
    "no_cache",
)  # options that conflict with --policy

Hw = Annotated[str, typer.Option("--hw", metavar="NAME|FILE|auto", help="The machine; auto measures this one.")]
Model = Annotated[
    str, typer.Option("--model", "-m", metavar="NAME|DIR", help="A known model, or a config.json's place.")
]
OptionalModel = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME|DIR", help="A known model, or a config.json's place; or the policy's."),
]
PolicyFile = Annotated[
    Path | None, typer.Option("--policy", metavar="FILE.yaml", help="Take this policy, and plan nothing.")
]
WorkloadName = Annotated[str | None, typer.Option("--workload", metavar="NAME", help="The work; mtbench if not given.")]
PromptLen = Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt on average.")]
MaxPromptLen = Annotated[int | None, typer.Option(min=1, help="Tokens of the longest prompt.")]
GenLen = Annotated[int | None, typer.Option(min=1, help="Tokens generated for a prompt.")]
NumRequests = Annotated[int | None, typer.Option(min=1, help="Prompts in all.")]
Estimator = Annotated[str, typer.Option(help="calibrated, or paper: the published formulas.")]
DeviceMemory = Annotated[str | None, typer.Option(metavar="SIZE", help="The most memory of one GPU, e.g. 10GiB.")]
HostMemory = Annotated[str | None, typer.Option(metavar="SIZE", help="The most host memory, e.g. 64GiB.")]
Disk = Annotated[str | None, typer.Option("--disk", metavar="SIZE", help="The most disk; 0: nothing on disk.")]
Fix = Annotated[
    list[str] | None, typer.Option("--fix", metavar="KEY=VALUE", help="Part of the policy, e.g. attention=cpu; repeat.")
]
WeightDtype = Annotated[
    str, typer.Option(metavar="auto|choose|NAME", help="Of the experts: the model's, free, or fixed.")
]
KvDtype = Annotated[str, typer.Option(metavar="auto|choose|NAME", help="Of keys and values: likewise.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Solve anew, and keep nothing.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A planning problem: one machine, model and workload, by name and as profiles, with its constraints.

    ``limits`` are bytes by tier (0: the tier is unused), ``fixes`` the policy keys with a fixed value.
    """

    hardware: HardwareProfile
    model: ModelProfile
    name: str
    workload: Workload
    workload_name: str
    estimator: str
    limits: Mapping[str, int]
    fixes: Mapping[str, Fixed]
    weight_dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    cache: bool

    def plan(self) -> Plan:
        """Return the best plan.

        Raises:
            BudgetError: no policy fits the memory.
            ConfigError: unknown estimator, or fixed values that contradict each other.
        """
        from moelight.optimizer.optimize import make_plan

        return make_plan(
            self.hardware,
            self.model,
            self.workload,
            name=self.name,
            estimator=self.estimator,
            limits=self.limits,
            fix=self.fixes,
            weight_dtypes=self.weight_dtypes,
            kv_dtypes=self.kv_dtypes,
            cache=self.cache,
        )


def read_question(
    *,
    hw: str,
    model: str,
    workload: str | None = None,
    prompt_len: int | None = None,
    max_prompt_len: int | None = None,
    gen_len: int | None = None,
    num_requests: int | None = None,
    estimator: str = ESTIMATORS[0],
    device_memory: str | None = None,
    host_memory: str | None = None,
    disk: str | None = None,
    fix: Sequence[str] | None = None,
    weight_dtype: str = AUTO,
    kv_dtype: str = AUTO,
    no_cache: bool = False,
) -> Question:
    """Return the question that the options describe. Options are validated before a machine is measured.

    Raises:
        ConfigError: an unknown name (the error suggests the nearest), an invalid value, or options that conflict.
    """
    from moelight.optimizer.fixed_values import check_fixes, parse_fixes

    if estimator not in ESTIMATORS:
        raise ConfigError(
            f"--estimator {estimator!r} is not one of {', '.join(ESTIMATORS)}{did_you_mean(estimator, ESTIMATORS)}"
        )
    work = _workload(
        workload, prompt_len=prompt_len, max_prompt_len=max_prompt_len, gen_len=gen_len, num_requests=num_requests
    )
    fixes = parse_fixes(fix or ())
    limits = _limits(device_memory=device_memory, host_memory=host_memory, disk=disk)
    weight_dtypes = _dtypes(weight_dtype, "--weight-dtype", fixes, "weight_dtype")
    kv_dtypes = _dtypes(kv_dtype, "--kv-dtype", fixes, "kv_dtype")
    profile = load_model(model)
    hardware = load_machine(hw, model)
    _check_limits(limits, hardware)
    check_fixes(fixes, has_gpu=hardware.tier("device") is not None)
    return Question(
        hardware=hardware,
        model=profile,
        name=model,
        workload=work,
        workload_name=_workload_name(workload, prompt_len, max_prompt_len, gen_len, num_requests),
        estimator=estimator,
        limits=limits,
        fixes=fixes,
        weight_dtypes=weight_dtypes,
        kv_dtypes=kv_dtypes,
        cache=not no_cache,
    )


def read_question_or_policy(
    policy: Path | None, *, model: str | None, **options: Any
) -> tuple[Question, Policy | None]:
    """Return the question, and the policy of the file ``policy`` if one is given (else None).

    The question is about ``model`` or, if ``model`` is None, the model that the policy names.

    Raises:
        ConfigError: as for `read_question`; or the file is no policy for the machine, or an option constrains the
            planner although a policy is given.
    """
    if policy is None:
        if model is None:
            raise ConfigError("which model? give --model NAME|DIR, or a --policy FILE.yaml that names one")
        return read_question(model=model, **options), None
    from moelight.profiles.policy_files import load_policy
    from moelight.scheduler.requirements import check_policy

    for option in PLANNING:
        if options.get(option) not in (None, AUTO, False):
            shown = "--" + option.replace("_", "-")
            raise ConfigError(f"--policy {policy} and {shown} contradict each other: the policy says how to run")
    chosen = load_policy(policy)
    chosen = chosen if model is None else replace(chosen, model=model)
    question = read_question(model=chosen.model, **options)
    if chosen.discrete and question.hardware.tier("device") is None:
        raise ConfigError(f"{policy}: the policy needs a GPU, and the machine {question.hardware.name} has none")
    check_policy(chosen)
    return question, chosen


def load_machine(hw: str, model: str) -> HardwareProfile:
    """Return the hardware profile named ``hw`` or stored in the file ``hw``.

    ``auto`` is the measured profile of this machine, with the disk that holds ``model`` if ``model`` is a directory.

    Raises:
        ConfigError: no such machine (the error suggests the nearest), or the file is invalid.
    """
    if hw == AUTO:
        from moelight.runtime.machine_profile import machine_profile

        place = Path(model)
        return machine_profile(disk_dir=place if place.is_dir() else None)
    from moelight.profiles.hardware import load_hardware_profile

    return load_hardware_profile(hw)


def load_model(model: str) -> ModelProfile:
    """Return the profile of the model named ``model``, or of the directory's ``config.json``; ``demo`` is bundled.

    Raises:
        ConfigError, CheckpointError: no such model (the error suggests the nearest), or its config is invalid.
    """
    from moelight.profiles.model_files import load_model_profile

    if model == DEMO:
        from moelight.weights.source import resolve_model

        return load_model_profile(str(resolve_model(DEMO)))
    return load_model_profile(model)


def _workload(
    name: str | None,
    *,
    prompt_len: int | None,
    max_prompt_len: int | None,
    gen_len: int | None,
    num_requests: int | None,
) -> Workload:
    """Return the named workload with the given figures replaced. A longer average raises the longest prompt, too."""
    from moelight.profiles.workload import load_workload

    work = load_workload(name or DEFAULT_WORKLOAD)
    average = work.prompt_len if prompt_len is None else prompt_len
    longest = max(average, work.max_prompt_len) if max_prompt_len is None else max_prompt_len
    if average > longest:
        shown = (
            f"--prompt-len {average}"
            if prompt_len is not None
            else f"the average of {name or DEFAULT_WORKLOAD}, {average}"
        )
        raise ConfigError(f"--max-prompt-len {longest} is less than {shown}; give a --prompt-len that is not above it")
    return replace(
        work,
        prompt_len=average,
        max_prompt_len=longest,
        gen_len=work.gen_len if gen_len is None else gen_len,
        num_requests=work.num_requests if num_requests is None else num_requests,
    )


def _workload_name(name: str | None, *figures: int | None) -> str:
    """Return the display name of the workload; empty if every figure was given."""
    if all(figure is not None for figure in figures):
        return ""
    changed = any(figure is not None for figure in figures)
    return f"{name or DEFAULT_WORKLOAD}, changed" if changed else name or DEFAULT_WORKLOAD


def _limits(*, device_memory: str | None, host_memory: str | None, disk: str | None) -> dict[str, int]:
    limits = {}
    if device_memory is not None:
        limits["device"] = parse_bytes(device_memory, what="--device-memory")
    if host_memory is not None:
        limits["host"] = parse_bytes(host_memory, what="--host-memory")
    if disk is not None:
        limits["disk"] = 0 if disk.strip() == "0" else parse_bytes(disk, what="--disk")
    return limits


def _check_limits(limits: Mapping[str, int], hardware: HardwareProfile) -> None:
    """Refuse a limit for a tier that the machine lacks: its bandwidth is unknown.

    Raises:
        ConfigError: the machine has no such tier.
    """
    options = {"device": "--device-memory", "disk": "--disk"}
    for tier, option in options.items():
        if limits.get(tier) and hardware.tier(tier) is None:
            raise ConfigError(
                f"{option} {format_bytes(limits[tier])}: the machine {hardware.name} has no tier {tier!r}; "
                f"describe it in a machine file (tiers.{tier}) and name that with --hw"
            )


def _dtypes(given: str, option: str, fixes: Mapping[str, Fixed], key: str) -> tuple[str, ...]:
    """Return the dtypes that the planner may choose: the model's own, any, or one."""
    from moelight.core.dtypes import DTYPES

    if given != AUTO and key in fixes:
        raise ConfigError(f"{option} {given} and --fix {key}={fixes[key]} say the same thing twice; drop one")
    if given == CHOOSE:
        return (AUTO, *DTYPES)
    if given != AUTO and given not in DTYPES:
        known = (AUTO, CHOOSE, *DTYPES)
        raise ConfigError(f"{option} {given!r} is not one of {', '.join(known)}{did_you_mean(given, known)}")
    return (given,)
