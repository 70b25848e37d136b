"""``moelight generate``: turns the options into one job and runs it (or plans it, with --dry-run)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy
from moelight.core.request import SamplingParams, StructuredOutputs
from moelight.core.small_files import read_error_text, read_json
from moelight.core.units import parse_bytes

if TYPE_CHECKING:
    from moelight.batch.options import Durability, JobOptions
    from moelight.experts.options import ExpertOptions


Prompts = Annotated[
    Path,
    typer.Argument(
        metavar="PROMPTS", help="JSON lines (OpenAI batch, or simple), text, CSV or Parquet; - reads stdin."
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="A directory, a hub id, or demo, the bundled model; the policy's if it has one."
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="OUT.jsonl", help="Where the rows go; - is stdout.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Read all prompts, say what they ask for and how it would be run, and stop.")
]
Json = Annotated[bool, typer.Option("--json", help="With --dry-run: one JSON object.")]

ErrorFile = Annotated[
    Path | None, typer.Option(metavar="FILE.jsonl", help="Rows that cannot be served go here, not to the output.")
]
Format = Annotated[
    str, typer.Option("--format", help="auto, openai, simple, text, csv or parquet; auto looks at the file.")
]
PromptColumn = Annotated[str | None, typer.Option(metavar="NAME", help="The column of a table with the prompts.")]
IdColumn = Annotated[str | None, typer.Option(metavar="NAME", help="The column of a table with the custom ids.")]
IgnoreModel = Annotated[bool, typer.Option("--ignore-model", help="Rows may name any model.")]
Order = Annotated[str, typer.Option(help="Rows leave in the order of the input, or of completion.")]
TokenIds = Annotated[bool, typer.Option("--token-ids", help="Add token_ids to every row (simple format).")]
Restart = Annotated[bool, typer.Option("--restart", help="Forget what an earlier run has done, and begin anew.")]
AllowChanged = Annotated[
    bool, typer.Option("--allow-changed", help="Keep what is done, though model, prompts or options differ now.")
]
Atomic = Annotated[bool, typer.Option("--atomic", help="The output appears whole at the end, or not at all.")]
SyncInterval = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.0, help="Rows are on the disk for good after this time.")
]
ChatTemplate = Annotated[
    Path | None, typer.Option(metavar="FILE.jinja", help="Use this chat template, not the checkpoint's.")
]

N = Annotated[int, typer.Option("--n", min=1, help="Completions for each prompt.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="The most tokens generated for a prompt.")]
MinTokens = Annotated[int, typer.Option(min=0, help="No end before this many tokens.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens of this total probability.")]
TopK = Annotated[int, typer.Option(min=-1, help="Sample from this many of the likeliest tokens; 0: all.")]
MinP = Annotated[
    float, typer.Option(help="Sample from tokens with at least this share of the likeliest one's probability.")
]
Seed = Annotated[int, typer.Option(min=0, help="For prompts that bring no seed of their own.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be repeated.")]
StopTokenId = Annotated[list[int] | None, typer.Option(metavar="ID", help="End at this token; may be repeated.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")]
PresencePenalty = Annotated[float, typer.Option(help="Against tokens that were generated, -2 to 2.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Against tokens by how often they were generated.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: against tokens of prompt and completion.")]
Logprobs = Annotated[
    int | None, typer.Option(min=-1, metavar="K", help="Log-probabilities of each token and the K likeliest.")
]
PromptLogprobs = Annotated[int | None, typer.Option(min=-1, metavar="K", help="The same of the prompt's tokens.")]
JsonSchema = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Completions are JSON that this schema describes.")
]
Regex = Annotated[str | None, typer.Option(metavar="REGEX", help="Completions match this regular expression.")]
Choice = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="Completions are one of these; repeat the option.")
]

HostMemory = Annotated[str | None, typer.Option(metavar="SIZE", help="The most host memory, e.g. 3GiB.")]
DeviceMemory = Annotated[str | None, typer.Option(metavar="SIZE", help="The most GPU memory, e.g. 10GiB.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Sequences in a pass; planned if not given.")]
MicroBatchSize = Annotated[int | None, typer.Option(min=1, help="Sequences in a micro-batch; planned if not given.")]
Schedule = Annotated[
    str | None,
    typer.Option(help="The schedule: cgopipe, fastdecode, flexgen-c, flexgen, flexgen-loop, serial or module."),
]
PolicyFile = Annotated[
    Path | None, typer.Option("--policy", metavar="FILE.yaml", help="Run this policy, as optimize -o writes it.")
]
Hw = Annotated[str, typer.Option("--hw", metavar="NAME|FILE|auto", help="The machine to plan for; auto is this one.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, xpu, or twin (a GPU played by the CPU).")]
Adapt = Annotated[
    bool | None,
    typer.Option(
        "--adapt/--no-adapt",
        help="Change N, micro-batches, look-ahead and riding prompts between passes where that turns out to be faster; "
        "default unless a policy is given.",
    ),
]

Show = Annotated[
    bool | None, typer.Option("--show/--no-show", help="Prompts beside completions; default on a terminal.")
]
Status = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Keep the job's state here, as OpenAI's batch object.")
]
Metrics = Annotated[Path | None, typer.Option(metavar="FILE.prom", help="Keep Prometheus text here.")]
Stats = Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the run's figures here.")]
Trace = Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write a Perfetto trace here.")]

ExpertPolicy = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.moe|static|default",
        help="Which experts stay resident and which are prefetched in on-demand passes; static: those of the plan.",
    ),
]
ExpertProfile = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Begin with what an earlier run learned of the experts.")
]
SaveExpertProfile = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Write what this run learns of the experts.")
]
RoutingTrace = Annotated[
    Path | None,
    typer.Option(metavar="FILE.jsonl", help="Write the routed experts of each pass, for policy replay and tune."),
]
ExpertStats = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Write hits, misses, predictions and stalls, layer by layer.")
]


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
    prompts: Prompts,
    model: Model = None,
    output: Output = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    error_file: ErrorFile = None,
    format: Format = "auto",  # noqa: A002 (the option's name)
    prompt_column: PromptColumn = None,
    id_column: IdColumn = None,
    ignore_model: IgnoreModel = False,
    chat_template: ChatTemplate = None,
    order: Order = "input",
    token_ids: TokenIds = False,
    restart: Restart = False,
    allow_changed: AllowChanged = False,
    atomic: Atomic = False,
    sync_interval: SyncInterval = 5.0,
    n: N = 1,
    max_tokens: MaxTokens = 256,
    min_tokens: MinTokens = 0,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    ignore_eos: IgnoreEos = False,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    logprobs: Logprobs = None,
    prompt_logprobs: PromptLogprobs = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    choice: Choice = None,
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    batch_size: BatchSize = None,
    micro_batch_size: MicroBatchSize = None,
    schedule: Schedule = None,
    policy: PolicyFile = None,
    hw: Hw = "auto",
    device: Device = "auto",
    adapt: Adapt = None,
    show: Show = None,
    status: Status = None,
    metrics: Metrics = None,
    stats: Stats = None,
    trace: Trace = None,
    expert_policy: ExpertPolicy = None,
    expert_profile: ExpertProfile = None,
    save_expert_profile: SaveExpertProfile = None,
    routing_trace: RoutingTrace = None,
    expert_stats: ExpertStats = None,
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
