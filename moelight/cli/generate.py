"""``moelight generate``: turn the options into one job, and run the job or, with --dry-run, plan it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moelight.cli.options import flag, with_options
from moelight.core.errors import ConfigError
from moelight.core.policy import Policy
from moelight.core.request import SamplingParams, StructuredOutputs
from moelight.core.small_files import read_error_text, read_json
from moelight.core.units import parse_bytes

if TYPE_CHECKING:
    from moelight.batch.options import JobOptions

_PLANNED = ("batch_size", "micro_batch_size", "schedule", "host_memory", "device_memory")
_ORDERS = ("input", "completion")


@dataclass(frozen=True, kw_only=True)
class JobArguments:
    """The options of ``moelight generate``, as given."""

    prompts: Annotated[
        Path,
        typer.Argument(
            metavar="PROMPTS", help="JSON lines (OpenAI batch, or simple), text, CSV or Parquet; - reads stdin."
        ),
    ]
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="A directory, a hub id, or demo, the bundled model; the policy's if it has one."
        ),
    ] = None
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT.jsonl", help="Where the rows go; - is stdout.")
    ] = None
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Read all prompts, say what they ask for and how it would be run, and stop."),
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: one JSON object.")] = False
    error_file: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Rows that cannot be served go here, not to the output.")
    ] = None
    format: Annotated[str, typer.Option(help="auto, openai, simple, text, csv or parquet; auto looks at the file.")] = (
        "auto"
    )
    prompt_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="The column of a table with the prompts.")
    ] = None
    id_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="The column of a table with the custom ids.")
    ] = None
    ignore_model: Annotated[bool, typer.Option("--ignore-model", help="Rows may name any model.")] = False
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE.jinja", help="Use this chat template, not the checkpoint's.")
    ] = None
    order: Annotated[str, typer.Option(help="Write rows in the order of the input, or of completion.")] = "input"
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Add token_ids to every row (simple format).")] = False
    restart: Annotated[bool, typer.Option("--restart", help="Discard the rows of an earlier run, and start anew.")] = (
        False
    )
    allow_changed: Annotated[
        bool, typer.Option("--allow-changed", help="Keep what is done, though model, prompts or options differ now.")
    ] = False
    atomic: Annotated[bool, typer.Option("--atomic", help="The output appears whole at the end, or not at all.")] = (
        False
    )
    sync_interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="Rows are on the disk for good after this time.")
    ] = 5.0
    n: Annotated[int, typer.Option(min=1, help="Completions for each prompt.")] = 1
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens generated for a prompt.")] = 256
    min_tokens: Annotated[int, typer.Option(min=0, help="No end before this many tokens.")] = 0
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.0
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this total probability.")] = 1.0
    top_k: Annotated[int, typer.Option(min=-1, help="Sample from this many of the likeliest tokens; 0: all.")] = 0
    min_p: Annotated[
        float, typer.Option(help="Sample from tokens with at least this share of the likeliest one's probability.")
    ] = 0.0
    seed: Annotated[int, typer.Option(min=0, help="For prompts that bring no seed of their own.")] = 0
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be repeated.")] = (
        None
    )
    stop_token_id: Annotated[
        list[int] | None, typer.Option(metavar="ID", help="End at this token; may be repeated.")
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")] = False
    presence_penalty: Annotated[float, typer.Option(help="Against tokens that were generated, -2 to 2.")] = 0.0
    frequency_penalty: Annotated[float, typer.Option(help="Against tokens by how often they were generated.")] = 0.0
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: against tokens of prompt and completion.")] = 1.0
    logprobs: Annotated[
        int | None, typer.Option(min=-1, metavar="K", help="Log-probabilities of each token and the K likeliest.")
    ] = None
    prompt_logprobs: Annotated[
        int | None, typer.Option(min=-1, metavar="K", help="The same of the prompt's tokens.")
    ] = None
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Completions are JSON that this schema describes.")
    ] = None
    regex: Annotated[str | None, typer.Option(metavar="REGEX", help="Completions match this regular expression.")] = (
        None
    )
    choice: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Completions are one of these; repeat the option.")
    ] = None
    host_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="The most host memory, e.g. 3GiB.")] = None
    device_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="The most GPU memory, e.g. 10GiB.")] = None
    batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences in a pass; planned if not given.")] = None
    micro_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences in a micro-batch; planned if not given.")
    ] = None
    schedule: Annotated[
        str | None,
        typer.Option(help="The schedule: cgopipe, fastdecode, flexgen-c, flexgen, flexgen-loop, serial or module."),
    ] = None
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="Run this policy, as optimize -o writes it.")
    ] = None
    hw: Annotated[str, typer.Option(metavar="NAME|FILE|auto", help="The machine to plan for; auto is this one.")] = (
        "auto"
    )
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, xpu, or twin (a GPU emulated by the CPU).")] = "auto"
    adapt: Annotated[
        bool | None,
        typer.Option(
            "--adapt/--no-adapt",
            help="Change N, micro-batches, look-ahead and riding prompts between passes where that turns out to be "
            "faster; default unless a policy is given.",
        ),
    ] = None
    show: Annotated[
        bool | None, typer.Option("--show/--no-show", help="Prompts beside completions; default on a terminal.")
    ] = None
    status: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Keep the job's state here, as OpenAI's batch object.")
    ] = None
    metrics: Annotated[Path | None, typer.Option(metavar="FILE.prom", help="Keep Prometheus text here.")] = None
    stats: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the run's figures here.")] = None
    trace: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write a Perfetto trace here.")] = None
    expert_policy: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.moe|static|default",
            help="Which experts are resident and which are prefetched in on-demand passes; static: those of the plan.",
        ),
    ] = None
    expert_profile: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Begin with what an earlier run learned of the experts.")
    ] = None
    save_expert_profile: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write what this run learns of the experts.")
    ] = None
    routing_trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Write the routed experts of each pass, for policy replay and tune."),
    ] = None
    expert_stats: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write hits, misses, predictions and stalls, layer by layer."),
    ] = None


@with_options()
def generate(given: JobArguments) -> None:
    """Answer every row of PROMPTS. Run again, the same command resumes where it was interrupted.

    A row is a line of an OpenAI batch file, or {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}, ...]}
    with an optional custom_id and its own sampling fields, or a line of text, or a row of a table.
    """
    from moelight.cli.job_display import forecast_and_report, run_and_report

    if given.as_json and not given.dry_run:
        raise ConfigError("--json goes with --dry-run; rows are JSON lines already")
    as_table = given.show if given.show is not None else given.output is None and sys.stdout.isatty()
    options = read_options(given, as_table=as_table)
    if given.dry_run:
        code = forecast_and_report(options, as_json=given.as_json)
    else:
        code = run_and_report(options, as_table=as_table)
    if code:
        raise typer.Exit(code)


def read_options(given: JobArguments, *, as_table: bool) -> JobOptions:
    """Return the job of the options; without ``--output``, rows go to the table if ``as_table``, else to stdout."""
    from moelight.batch.options import Durability, JobOptions
    from moelight.batch.output import STANDARD_OUTPUT
    from moelight.experts.options import ExpertOptions
    from moelight.lang.files import load_expert_policy
    from moelight.scheduler import SCHEDULES

    if given.schedule is not None:
        SCHEDULES.get(given.schedule)
    policy = None if given.policy is None else read_policy(given.policy, given)
    sampling = SamplingParams(
        **{
            **_fields_of(SamplingParams, given),
            "stop": tuple(given.stop or ()),
            "stop_token_ids": tuple(given.stop_token_id or ()),
            "structured_outputs": read_constraint(given),
        }
    )
    if given.order not in _ORDERS:
        raise ConfigError(f"--order must be {' or '.join(_ORDERS)}, not {given.order!r}")
    static = given.expert_policy == "static"
    if static and given.expert_profile is not None:
        raise ConfigError(f"--expert-policy static and --expert-profile {given.expert_profile} contradict each other")
    named = given.expert_policy not in (None, "static", "default")
    experts = ExpertOptions(
        policy=load_expert_policy(str(given.expert_policy)) if named else None,
        learn=not static,
        profile=given.expert_profile,
        trace=given.routing_trace,
    )
    options: dict[str, Any] = {
        **_fields_of(JobOptions, given),
        "policy": policy,
        "sampling": sampling,
        "durability": Durability(**_fields_of(Durability, given), sync_s=given.sync_interval),
        "experts": experts,
    }
    for name in ("host_memory", "device_memory"):
        if options[name] is not None:
            options[name] = parse_bytes(options[name], what=flag(name))
    if given.model is None:
        options["model"] = "demo" if policy is None else policy.model
    if given.output is None and not as_table:
        options["output"] = STANDARD_OUTPUT
    return JobOptions(**options)


def _fields_of(kind: type[Any], given: JobArguments) -> dict[str, Any]:
    """Return the arguments that are fields of the dataclass ``kind``."""
    return {each.name: getattr(given, each.name) for each in fields(kind) if hasattr(given, each.name)}


def read_constraint(given: JobArguments) -> StructuredOutputs | None:
    """Return the constraint that every completion must match; None if no option gives one."""
    options = {"--json-schema": given.json_schema, "--regex": given.regex, "--choice": given.choice or None}
    names = [name for name, value in options.items() if value is not None]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} contradict each other: a completion matches one of them")
    if given.json_schema is None:
        return StructuredOutputs(regex=given.regex, choice=given.choice or None) if names else None
    try:
        return StructuredOutputs(json=read_json(given.json_schema))
    except (OSError, ValueError) as error:
        reason = read_error_text(error)
        raise ConfigError(f"--json-schema {given.json_schema}: cannot be read as JSON ({reason})") from None


def read_policy(path: Path, given: JobArguments) -> Policy:
    """Return the policy in ``path``; an option of `_PLANNED` or a policy that the engine cannot run is refused."""
    from moelight.optimizer.runnable import policy_faults, why_not
    from moelight.profiles.files import profile_names
    from moelight.profiles.model_files import ALIASES, load_model_profile
    from moelight.profiles.policy_files import load_policy

    for name in _PLANNED:
        value = getattr(given, name)
        if value is not None:
            pair = f"--policy {path} and {flag(name)} {value}"
            raise ConfigError(f"{pair} contradict each other: the policy says how to run")
    policy = load_policy(path)
    faults = policy_faults(policy)
    known = policy.model in (*profile_names("model"), *ALIASES) and not Path(policy.model).is_dir()
    if given.model is None and known:
        faults = why_not(policy, load_model_profile(policy.model))
    if faults:
        raise ConfigError(f"--policy {path} cannot be run: {'; '.join(faults)}")
    return policy
