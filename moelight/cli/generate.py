"""``moelight generate``: turns the options into one job and runs it (or plans it, with --dry-run)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moelight.cli import generate_options as opt
from moelight.core.errors import ConfigError
from moelight.core.policy import Policy
from moelight.core.request import SamplingParams, StructuredOutputs
from moelight.core.small_files import read_error_text, read_json
from moelight.core.units import parse_bytes

if TYPE_CHECKING:
    from moelight.batch.options import Durability, JobOptions
    from moelight.experts.options import ExpertOptions

_PLANNED = ("--batch-size", "--micro-batch-size", "--schedule", "--host-memory", "--device-memory")
_ORDERS = ("input", "completion")
_SAMPLING = (
    *("n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "prompt_logprobs"),
)
_AS_THEY_ARE = (
    *("prompts", "error_file", "format", "prompt_column", "id_column", "ignore_model", "chat_template", "token_ids"),
    *("hw", "device", "batch_size", "micro_batch_size", "schedule", "adapt"),
    *("stats", "trace", "status", "metrics", "expert_stats", "save_expert_profile"),
)


def generate(
    context: typer.Context,
    prompts: opt.Prompts,
    model: opt.Model = None,
    output: opt.Output = None,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
    error_file: opt.ErrorFile = None,
    format: opt.Format = "auto",  # noqa: A002 (the option's name)
    prompt_column: opt.PromptColumn = None,
    id_column: opt.IdColumn = None,
    ignore_model: opt.IgnoreModel = False,
    chat_template: opt.ChatTemplate = None,
    order: opt.Order = "input",
    token_ids: opt.TokenIds = False,
    restart: opt.Restart = False,
    allow_changed: opt.AllowChanged = False,
    atomic: opt.Atomic = False,
    sync_interval: opt.SyncInterval = 5.0,
    n: opt.N = 1,
    max_tokens: opt.MaxTokens = 256,
    min_tokens: opt.MinTokens = 0,
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = 1.0,
    top_k: opt.TopK = 0,
    min_p: opt.MinP = 0.0,
    seed: opt.Seed = 0,
    stop: opt.Stop = None,
    stop_token_id: opt.StopTokenId = None,
    ignore_eos: opt.IgnoreEos = False,
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    logprobs: opt.Logprobs = None,
    prompt_logprobs: opt.PromptLogprobs = None,
    json_schema: opt.JsonSchema = None,
    regex: opt.Regex = None,
    choice: opt.Choice = None,
    host_memory: opt.HostMemory = None,
    device_memory: opt.DeviceMemory = None,
    batch_size: opt.BatchSize = None,
    micro_batch_size: opt.MicroBatchSize = None,
    schedule: opt.Schedule = None,
    policy: opt.Policy = None,
    hw: opt.Hw = "auto",
    device: opt.Device = "auto",
    adapt: opt.Adapt = None,
    show: opt.Show = None,
    status: opt.Status = None,
    metrics: opt.Metrics = None,
    stats: opt.Stats = None,
    trace: opt.Trace = None,
    expert_policy: opt.ExpertPolicy = None,
    expert_profile: opt.ExpertProfile = None,
    save_expert_profile: opt.SaveExpertProfile = None,
    routing_trace: opt.RoutingTrace = None,
    expert_stats: opt.ExpertStats = None,
) -> None:
    """Answer every row of PROMPTS. Run again, the same command goes on where it was interrupted.

    A row is a line of an OpenAI batch file, or {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}, ...]}
    with an optional custom_id and its own sampling fields, or a line of text, or a row of a table.
    """
    from moelight.cli.job_display import forecast_and_report, run_and_report

    if as_json and not dry_run:
        raise ConfigError("--json goes with --dry-run; rows are JSON lines already")
    as_table = show if show is not None else output is None and sys.stdout.isatty()
    options = read_options(context.params, as_table=as_table)
    code = forecast_and_report(options, as_json=as_json) if dry_run else run_and_report(options, as_table=as_table)
    if code:
        raise typer.Exit(code)


def read_options(given: Mapping[str, Any], *, as_table: bool) -> JobOptions:
    """Return the job that the command's parameters ``given`` describe.

    Without ``--output``, rows go to standard output, or only to the table if ``as_table``.

    Raises:
        ConfigError, InputError: a value is invalid, or two values contradict each other.
    """
    from moelight.batch.options import JobOptions
    from moelight.batch.output import STANDARD_OUTPUT
    from moelight.scheduler import SCHEDULES

    if given["schedule"] is not None:
        SCHEDULES.get(given["schedule"])
    planned = [given[option.removeprefix("--").replace("-", "_")] for option in _PLANNED]
    policy = None if given["policy"] is None else read_policy_option(given["policy"], planned, model=given["model"])
    model, output = given["model"], given["output"]
    sizes: dict[str, Any] = {
        name: None if given[name] is None else parse_bytes(given[name], what=f"--{name.replace('_', '-')}")
        for name in ("host_memory", "device_memory")
    }
    return JobOptions(
        **{name: given[name] for name in _AS_THEY_ARE},
        **sizes,
        model=model if model is not None else "demo" if policy is None else policy.model,
        policy=policy,
        output=STANDARD_OUTPUT if output is None and not as_table else output,
        sampling=read_sampling(given),
        durability=read_durability(given),
        experts=read_experts(given["expert_policy"], given["expert_profile"], given["routing_trace"]),
    )


def read_sampling(given: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters for rows that do not set their own."""
    return SamplingParams(
        **{name: given[name] for name in _SAMPLING},
        stop=tuple(given["stop"] or ()),
        stop_token_ids=tuple(given["stop_token_id"] or ()),
        structured_outputs=read_constraint(given["json_schema"], given["regex"], given["choice"]),
    )


def read_durability(given: Mapping[str, Any]) -> Durability:
    """Return the options for order, resumption and durability of the output.

    Raises:
        ConfigError: ``--order`` is unknown.
    """
    from moelight.batch.options import Durability

    if given["order"] not in _ORDERS:
        raise ConfigError(f"--order must be {' or '.join(_ORDERS)}, not {given['order']!r}")
    names = ("order", "atomic", "restart", "allow_changed")
    return Durability(**{name: given[name] for name in names}, sync_s=given["sync_interval"])


def read_constraint(schema: Path | None, regex: str | None, choice: Sequence[str] | None) -> StructuredOutputs | None:
    """Return the constraint that every completion must match; None if there is none.

    Raises:
        ConfigError: the schema cannot be read, or more than one of the three is given.
    """
    given = {"--json-schema": schema, "--regex": regex, "--choice": choice or None}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} contradict each other: a completion matches one of them")
    if schema is None:
        return StructuredOutputs(regex=regex, choice=choice or None) if names else None
    try:
        return StructuredOutputs(json=read_json(schema))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--json-schema {schema}: cannot be read as JSON ({read_error_text(error)})") from None


def read_experts(policy: str | None, profile: Path | None, trace: Path | None) -> ExpertOptions:
    """Return the options of expert residency.

    Raises:
        ConfigError: the policy file has errors, or a profile is given although ``static`` learns nothing.
    """
    from moelight.experts.options import ExpertOptions
    from moelight.lang.files import load_expert_policy

    if policy == "static" and profile is not None:
        raise ConfigError(f"--expert-policy static and --expert-profile {profile} contradict each other")
    found = None if policy in (None, "static", "default") else load_expert_policy(str(policy))
    return ExpertOptions(policy=found, learn=policy != "static", profile=profile, trace=trace)


def read_policy_option(path: Path, planned: Sequence[object], *, model: str | None) -> Policy:
    """Return the policy in the file ``path``. It runs ``model`` or, if ``model`` is None, the model that it names.

    ``planned`` holds the values of the options `_PLANNED`, which conflict with a policy.

    Raises:
        ConfigError: one of these options is given, the file is no policy, or the engine cannot run the policy.
    """
    from moelight.optimizer.runnable import policy_faults, why_not
    from moelight.profiles.files import profile_names
    from moelight.profiles.model_files import ALIASES, load_model_profile
    from moelight.profiles.policy_files import load_policy

    for option, value in zip(_PLANNED, planned, strict=True):
        if value is not None:
            raise ConfigError(f"--policy {path} and {option} {value} contradict each other: the policy says how to run")
    policy = load_policy(path)
    faults = policy_faults(policy)
    if model is None and policy.model in (*profile_names("model"), *ALIASES) and not Path(policy.model).is_dir():
        faults = why_not(policy, load_model_profile(policy.model))
    if faults:
        raise ConfigError(f"--policy {path} cannot be run: {'; '.join(faults)}")
    return policy
