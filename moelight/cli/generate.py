"""``moelight generate``: turn the options into one job, and run the job or, with --dry-run, plan it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moelight.cli.options import argument, flag, option, refuse_beside, with_options
from moelight.cli.tables import say_missing_kernels
from moelight.core.errors import ConfigError, InputError
from moelight.core.policy import Policy
from moelight.core.request import (
    DEFAULT_RESAMPLINGS,
    MAX_RESAMPLINGS,
    PROMPT_ONLY,
    PoolingParams,
    SamplingParams,
    StructuredOutputs,
)
from moelight.core.small_files import read_error_text, read_json
from moelight.engine.options import PLANNING, EngineOptions

if TYPE_CHECKING:
    from moelight.batch.options import JobOptions
    from moelight.integrations.ray.cluster import ClusterOptions

_ORDERS = ("input", "completion")


@dataclass(frozen=True, kw_only=True)
class JobArguments:
    """The options of ``moelight generate``, as given."""

    prompts: Path = argument(
        "PROMPTS", "Input file: JSON lines (OpenAI batch or simple), text, CSV or Parquet; - reads stdin."
    )
    model: str | None = option(
        "Model to run: a directory, a GGUF file, a Hugging Face hub id (owner/name, or owner/name:Q4_K_M of a GGUF), "
        "or demo (bundled); defaults to the model of --policy.",
        "--model",
        "-m",
    )
    output: Path | None = option("Output file; - writes to stdout.", "--output", "-o", metavar="OUT.jsonl")
    dry_run: bool = option("Read all prompts, print a summary and the plan, and exit without running.", default=False)
    as_json: bool = option("Print the result of --dry-run as one JSON object.", "--json", default=False)
    error_file: Path | None = option(
        "File for rows that failed; by default they are written to the output.", metavar="FILE.jsonl"
    )
    task: str = option(
        "What to do with a row: generate completions; score the log-likelihood of choices after the prompt; "
        "classify, which adds the label and probabilities; or embed, which returns the pooled hidden states of the "
        "prompt. Choices are those of the row, or of --choice.",
        metavar="generate|score|classify|embed",
        default="generate",
    )
    pooling: str | None = option(
        "Pooling of embeddings; by default the checkpoint's (sentence-transformers), else last.",
        metavar="last|mean|cls",
    )
    normalize: bool | None = option(
        "Divide embeddings by their L2 norm, or do not; by default as the checkpoint says (sentence-transformers)."
    )
    dimensions: int | None = option(
        "Number of leading dimensions of embeddings to keep (Matryoshka); by default all.", min=1, metavar="N"
    )
    format: str = option(
        "Input format: auto, openai, simple, text, csv or parquet; auto detects it from the file.", default="auto"
    )
    prompt_column: str | None = option("Column of a CSV or Parquet file that holds the prompts.", metavar="NAME")
    id_column: str | None = option("Column of a CSV or Parquet file that holds the custom ids.", metavar="NAME")
    ignore_model: bool = option("Ignore the model field of the rows.", default=False)
    chat_template: Path | None = option("Chat template to use instead of the checkpoint's.", metavar="FILE.jinja")
    thinking_token_budget: int | None = option(
        "Maximum number of reasoning tokens, after which the reasoning is closed.", min=0, metavar="N"
    )
    order: str = option("Order of the output rows: input or completion.", default="input")
    token_ids: bool = option("Include token_ids in every output row (simple format).", default=False)
    per_request_metrics: bool = option(
        "Include the time to the first token, per token and in the queue in every output row.", default=False
    )
    restart: bool = option("Discard the rows of an earlier run and start again.", default=False)
    allow_changed: bool = option("Resume even if the model, prompts or options have changed.", default=False)
    atomic: bool = option("Write the output file atomically, at the end of the job.", default=False)
    sync_interval: float = option(
        "Maximum interval in seconds between fsyncs of finished rows.", metavar="SECONDS", min=0.0, default=5.0
    )
    n: int = option("Number of completions to generate per prompt.", min=1, default=1)
    max_tokens: int | None = option(
        "Maximum number of tokens to generate per completion; by default the rest of the context.", min=1
    )
    min_tokens: int = option(
        "Minimum number of tokens to generate before EOS or a stop string may end the completion.", min=0, default=0
    )
    temperature: float = option("Sampling temperature; 0 means greedy sampling.", min=0.0, default=0.0)
    top_p: float = option("Cumulative probability of the top tokens to consider; in (0, 1].", default=1.0)
    top_k: int = option("Number of top tokens to consider; 0 or -1 considers all.", min=-1, default=0)
    min_p: float = option(
        "Minimum probability of a token to be considered, relative to the most likely token.", default=0.0
    )
    seed: int = option("Random seed for rows that do not set one.", min=0, default=0)
    stop: list[str] | None = option(
        "Stop generation at this string, which is not returned; may be repeated.", metavar="TEXT"
    )
    stop_token_id: list[int] | None = option("Stop generation at this token id; may be repeated.", metavar="ID")
    ignore_eos: bool = option("Ignore the EOS token and continue generating.", default=False)
    presence_penalty: float = option("Penalize tokens that appear in the generated text so far; -2 to 2.", default=0.0)
    frequency_penalty: float = option(
        "Penalize tokens by their frequency in the generated text so far; -2 to 2.", default=0.0
    )
    repetition_penalty: float = option(
        "Penalize tokens that appear in the prompt or the generated text; values above 1 penalize.", default=1.0
    )
    logprobs: int | None = option(
        "Number of log probabilities to return per output token; -1 returns the whole vocabulary.", min=-1, metavar="K"
    )
    prompt_logprobs: int | None = option(
        "Number of log probabilities to return per prompt token; -1 returns the whole vocabulary.", min=-1, metavar="K"
    )
    return_routed_experts: bool = option(
        "Return the experts that each token of the prompt and the completion was routed to, per layer.", default=False
    )
    json_schema: Path | None = option("Constrain completions to JSON that matches this schema.", metavar="FILE.json")
    regex: str | None = option("Constrain completions to this regular expression.", metavar="REGEX")
    choice: list[str] | None = option(
        "Constrain completions to one of these strings, or score them with --task; repeat the option for each.",
        metavar="TEXT",
    )
    strict: bool = option(
        "Reject JSON schemas, those of tools included, with keywords that can only be checked in finished answers.",
        "--strict/--no-strict",
        default=False,
    )
    resamplings: int = option(
        "Maximum number of times to generate an answer again that fails the validation of its schema.",
        min=0,
        max=MAX_RESAMPLINGS,
        default=DEFAULT_RESAMPLINGS,
    )
    policy: Path | None = option("Policy file to run, as written by optimize -o.", metavar="FILE.yaml")
    show: bool | None = option("Print a table of prompts and completions; on by default on a terminal.")
    status: Path | None = option(
        "File to keep updated with the job's status, as an OpenAI batch object.", metavar="FILE.json"
    )
    metrics: Path | None = option("File to keep updated with metrics in Prometheus text format.", metavar="FILE.prom")
    stats: Path | None = option("File to write the statistics of the run to.", metavar="FILE.json")
    trace: Path | None = option("File to write a Perfetto trace of the run to.", metavar="FILE.json")
    expert_policy: str | None = option(
        "Expert policy for caching and prefetching in on-demand passes; static keeps the plan's placement.",
        metavar="FILE.moe|static|default",
    )
    expert_profile: Path | None = option("Expert profile of an earlier run to start from.", metavar="FILE.json")
    save_expert_profile: Path | None = option("File to write the expert profile of this run to.", metavar="FILE.json")
    routing_trace: Path | None = option(
        "File to write the routing trace of the run to, for policy replay and policy tune.", metavar="FILE.jsonl"
    )
    expert_stats: Path | None = option(
        "File to write hits, misses, predictions and stalls per layer to.", metavar="FILE.json"
    )


@dataclass(frozen=True, kw_only=True)
class RayArguments:
    """The options of ``moelight generate`` on a Ray cluster."""

    ray: str | None = option(
        "Address of the Ray cluster to run on; local starts one on this machine.", metavar="local|ADDRESS"
    )
    ray_engines: int | None = option(
        "Maximum number of engines; by default one per GPU, or per node without a GPU.", min=1
    )
    ray_num_cpus: float | None = option("Number of CPUs reserved per engine.", min=0.01)
    ray_num_gpus: float | None = option("Number of GPUs reserved per engine.", min=0.0)
    ray_resource: list[str] | None = option(
        "Custom Ray resource reserved per engine; may be repeated.", metavar="NAME=AMOUNT"
    )
    ray_label: list[str] | None = option(
        "Label that a node must have to run an engine; may be repeated.", metavar="NAME=VALUE"
    )


@with_options()
def generate(arguments: JobArguments, engine: EngineOptions, cluster: RayArguments) -> None:
    """Answer every row of PROMPTS. Run again, the same command resumes where it was interrupted.

    A row is a line of an OpenAI batch file, or {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}, ...]}
    with an optional custom_id and its own sampling fields, or a line of text, or a row of a table. With --task score or
    classify, a row has choices.
    """
    from moelight.cli.job_display import forecast_and_report, run_and_report

    if arguments.as_json and not arguments.dry_run:
        raise ConfigError("--json goes with --dry-run; rows are JSON lines already")
    as_table = arguments.show if arguments.show is not None else arguments.output is None and sys.stdout.isatty()
    options = read_options(arguments, engine, as_table=as_table)
    nodes = read_cluster(cluster)
    say_missing_kernels()
    with _naming_schema(arguments.json_schema):
        if arguments.dry_run:
            code = forecast_and_report(options, as_json=arguments.as_json, nodes=nodes)
        else:
            code = run_and_report(options, as_table=as_table, nodes=nodes)
    if code:
        raise typer.Exit(code)


def read_options(arguments: JobArguments, engine: EngineOptions, *, as_table: bool) -> JobOptions:
    """Return the job of the options; without ``--output``, rows go to the table if ``as_table``, else to stdout."""
    from moelight.batch.options import Durability, JobOptions
    from moelight.batch.output import STANDARD_OUTPUT
    from moelight.batch.scoring import read_choices
    from moelight.batch.tasks import GENERATE, SCORING_TASKS, check_task
    from moelight.experts.options import ExpertOptions
    from moelight.lang.files import load_expert_policy
    from moelight.optimizer.fixed_values import check_activations, check_dtype
    from moelight.scheduler import SCHEDULES

    if engine.schedule is not None:
        SCHEDULES.get(engine.schedule)
    check_activations(engine.activations)
    check_dtype(engine.dtype)
    engine.draft_tokens()
    policy = None if arguments.policy is None else read_policy(arguments.policy, engine)
    check_task(arguments.task)
    generates, scores = arguments.task == GENERATE, arguments.task in SCORING_TASKS
    if not generates:
        _refuse_sampling(arguments)
    pooling = PoolingParams(
        pooling_type=arguments.pooling, normalize=arguments.normalize, dimensions=arguments.dimensions
    )
    if arguments.order not in _ORDERS:
        raise ConfigError(f"--order must be {' or '.join(_ORDERS)}, not {arguments.order!r}")
    static = arguments.expert_policy == "static"
    if static and arguments.expert_profile is not None:
        raise ConfigError(
            f"--expert-policy static and --expert-profile {arguments.expert_profile} contradict each other"
        )
    named = arguments.expert_policy not in (None, "static", "default")
    experts = ExpertOptions(
        policy=load_expert_policy(str(arguments.expert_policy)) if named else None,
        learn=not static,
        profile=arguments.expert_profile,
        trace=arguments.routing_trace,
    )
    options: dict[str, Any] = {
        **_fields_of(JobOptions, engine),
        **_fields_of(JobOptions, arguments),
        "policy": policy,
        "sampling": _sampling(arguments) if generates else PROMPT_ONLY,
        "pooling": pooling,
        "choices": read_choices(arguments.choice) if scores and arguments.choice else (),
        "durability": Durability(**_fields_of(Durability, arguments), sync_s=arguments.sync_interval),
        "experts": experts,
    }
    if arguments.model is None:
        options["model"] = "demo" if policy is None else policy.model
    if arguments.output is None and not as_table:
        options["output"] = STANDARD_OUTPUT
    return JobOptions(**options)


def _sampling(arguments: JobArguments) -> SamplingParams:
    return SamplingParams(
        **{
            **_fields_of(SamplingParams, arguments),
            "stop": tuple(arguments.stop or ()),
            "stop_token_ids": tuple(arguments.stop_token_id or ()),
            "structured_outputs": read_constraint(arguments),
        }
    )


def _refuse_sampling(arguments: JobArguments) -> None:
    """Raise ConfigError for an option of sampling, since nothing is generated."""
    from moelight.batch.tasks import SCORING_TASKS

    names = {*_fields_of(SamplingParams, arguments), "stop_token_id", "json_schema", "regex", "token_ids"} - {"seed"}
    names.add("per_request_metrics")
    if arguments.task not in SCORING_TASKS:
        names.add("choice")
    for item in fields(arguments):
        if item.name in names and getattr(arguments, item.name) != item.default:
            raise ConfigError(
                f"--task {arguments.task} and {flag(item.name)} contradict each other: nothing is generated"
            )


def read_cluster(arguments: RayArguments) -> ClusterOptions | None:
    """Return the cluster of the options; None without ``--ray``. Raise ConfigError where Ray is not installed."""
    if arguments.ray is None:
        for field in fields(arguments):
            if getattr(arguments, field.name) is not None:
                raise ConfigError(f"{flag(field.name)} goes with --ray local or --ray ADDRESS")
        return None
    from moelight.integrations.ray.cluster import ClusterOptions, require_ray

    require_ray()
    amounts: dict[str, float] = {}
    for name, value in _pairs("--ray-resource", arguments.ray_resource):
        try:
            amounts[name] = float(value)
        except ValueError:
            raise ConfigError(f"--ray-resource {name}={value}: the amount must be a number") from None
    return ClusterOptions(
        address=arguments.ray,
        engines=arguments.ray_engines,
        num_cpus=arguments.ray_num_cpus,
        num_gpus=arguments.ray_num_gpus,
        resources=amounts,
        labels=dict(_pairs("--ray-label", arguments.ray_label)),
    )


def _pairs(option: str, values: list[str] | None) -> list[tuple[str, str]]:
    for pair in values or ():
        if not all(pair.partition("=")):
            raise ConfigError(f"{option} {pair}: must be NAME=VALUE")
    return [(name, value) for name, _, value in (pair.partition("=") for pair in values or ())]


def _fields_of(kind: type[Any], arguments: object) -> dict[str, Any]:
    """Return the arguments that are fields of the dataclass ``kind``."""
    return {field.name: getattr(arguments, field.name) for field in fields(kind) if hasattr(arguments, field.name)}


def read_constraint(arguments: JobArguments) -> StructuredOutputs | None:
    """Return the constraint that every completion must match; None if no option gives one."""
    options = {"--json-schema": arguments.json_schema, "--regex": arguments.regex, "--choice": arguments.choice or None}
    names = [name for name, value in options.items() if value is not None]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} contradict each other: a completion matches one of them")
    if arguments.json_schema is None:
        return StructuredOutputs(regex=arguments.regex, choice=arguments.choice or None) if names else None
    try:
        return StructuredOutputs(
            json=read_json(arguments.json_schema), strict=arguments.strict, resamplings=arguments.resamplings
        )
    except (OSError, ValueError) as error:
        reason = read_error_text(error)
        raise ConfigError(f"--json-schema {arguments.json_schema}: cannot be read as JSON ({reason})") from None


@contextmanager
def _naming_schema(path: Path | None) -> Iterator[None]:
    """Name ``path``, the file of ``--json-schema``, in the refusal of its schema; refusals of rows are not raised."""
    try:
        yield
    except InputError as error:
        if path is None or error.code != "invalid_structured_output":
            raise
        text = str(error).removeprefix("structured_outputs: JSON Schema: ")
        raise InputError(f"--json-schema {path}: {text}", code=error.code) from None


def read_policy(path: Path, engine: EngineOptions) -> Policy:
    """Return the policy in ``path``; an option that constrains a plan, or a policy that the engine cannot run, is
    refused."""
    from moelight.optimizer.runnable import policy_faults
    from moelight.profiles.policy_files import load_policy

    planned = [name for name in PLANNING if name != "hw"]
    refuse_beside(f"--policy {path}", engine, planned, "the policy says how to run")
    policy = load_policy(path)
    if faults := policy_faults(policy):
        raise ConfigError(f"--policy {path} cannot be run: {'; '.join(faults)}")
    return policy
