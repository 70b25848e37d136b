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
from moelight.core.request import DEFAULT_RESAMPLINGS, MAX_RESAMPLINGS, SamplingParams, StructuredOutputs
from moelight.core.small_files import read_error_text, read_json
from moelight.core.units import parse_bytes

if TYPE_CHECKING:
    from moelight.batch.options import JobOptions
    from moelight.integrations.ray.cluster import ClusterOptions

_PLANNED = (
    "batch_size",
    "micro_batch_size",
    "schedule",
    "dtype",
    "kv_dtype",
    "allow",
    "activations",
    "host_memory",
    "device_memory",
)
_ORDERS = ("input", "completion")


@dataclass(frozen=True, kw_only=True)
class JobArguments:
    """The options of ``moelight generate``, as given."""

    prompts: Path = argument("PROMPTS", "JSON lines (OpenAI batch, or simple), text, CSV or Parquet; - reads stdin.")
    model: str | None = option(
        "A directory, a hub id, or demo, the bundled model; the policy's if it has one.", "--model", "-m"
    )
    output: Path | None = option("Where the rows go; - is stdout.", "--output", "-o", metavar="OUT.jsonl")
    dry_run: bool = option("Read all prompts, say what they ask for and how it would be run, and stop.", default=False)
    as_json: bool = option("With --dry-run: one JSON object.", "--json", default=False)
    error_file: Path | None = option("Rows that cannot be served go here, not to the output.", metavar="FILE.jsonl")
    format: str = option("auto, openai, simple, text, csv or parquet; auto looks at the file.", default="auto")
    prompt_column: str | None = option("The column of a table with the prompts.", metavar="NAME")
    id_column: str | None = option("The column of a table with the custom ids.", metavar="NAME")
    ignore_model: bool = option("Rows may name any model.", default=False)
    chat_template: Path | None = option("Use this chat template, not the checkpoint's.", metavar="FILE.jinja")
    reasoning: str = option(
        "auto: split the reasoning of models that think from their answers; stop texts and constraints apply behind "
        "it. off: leave answers whole.",
        metavar="auto|off",
        default="auto",
    )
    thinking_token_budget: int | None = option(
        "The most tokens of reasoning, after which it is closed.", min=0, metavar="N"
    )
    order: str = option("Write rows in the order of the input, or of completion.", default="input")
    token_ids: bool = option("Add token_ids to every row (simple format).", default=False)
    restart: bool = option("Discard the rows of an earlier run, and start anew.", default=False)
    allow_changed: bool = option("Keep what is done, though model, prompts or options differ now.", default=False)
    atomic: bool = option("The output appears whole at the end, or not at all.", default=False)
    sync_interval: float = option(
        "Rows are on the disk for good after this time.", metavar="SECONDS", min=0.0, default=5.0
    )
    n: int = option("Completions for each prompt.", min=1, default=1)
    max_tokens: int = option("The most tokens generated for a prompt.", min=1, default=256)
    min_tokens: int = option("No end before this many tokens.", min=0, default=0)
    temperature: float = option("0 takes the likeliest token each time.", min=0.0, default=0.0)
    top_p: float = option("Sample from the likeliest tokens of this total probability.", default=1.0)
    top_k: int = option("Sample from this many of the likeliest tokens; 0: all.", min=-1, default=0)
    min_p: float = option(
        "Sample from tokens with at least this share of the likeliest one's probability.", default=0.0
    )
    seed: int = option("For prompts that bring no seed of their own.", min=0, default=0)
    stop: list[str] | None = option("End before this text; may be repeated.", metavar="TEXT")
    stop_token_id: list[int] | None = option("End at this token; may be repeated.", metavar="ID")
    ignore_eos: bool = option("Go on after the end-of-sequence token.", default=False)
    presence_penalty: float = option("Against tokens that were generated, -2 to 2.", default=0.0)
    frequency_penalty: float = option("Against tokens by how often they were generated.", default=0.0)
    repetition_penalty: float = option("Above 1: against tokens of prompt and completion.", default=1.0)
    logprobs: int | None = option("Log-probabilities of each token and the K likeliest.", min=-1, metavar="K")
    prompt_logprobs: int | None = option("The same of the prompt's tokens.", min=-1, metavar="K")
    json_schema: Path | None = option("Completions are JSON that this schema describes.", metavar="FILE.json")
    regex: str | None = option("Completions match this regular expression.", metavar="REGEX")
    choice: list[str] | None = option("Completions are one of these; repeat the option.", metavar="TEXT")
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
    host_memory: str | None = option("The most host memory, e.g. 3GiB.", metavar="SIZE")
    device_memory: str | None = option("The most GPU memory, e.g. 10GiB.", metavar="SIZE")
    batch_size: int | None = option("Sequences in a pass; planned if not given.", min=1)
    micro_batch_size: int | None = option("Sequences in a micro-batch; planned if not given.", min=1)
    schedule: str | None = option(
        "The schedule: cgopipe, fastdecode, flexgen-c, flexgen, flexgen-loop, serial or module."
    )
    dtype: str = option(
        "Of computation, and of weights that are not quantised; auto is the checkpoint's.",
        metavar="auto|bfloat16|float16|float32",
        default="auto",
    )
    kv_dtype: str = option(
        "Of keys and values: auto (as computed), int8, or choose, the faster one.",
        metavar="auto|choose|int8",
        default="auto",
    )
    allow: str | None = option("kv8 is --kv-dtype choose; experts are run as they are stored.", metavar="kv8")
    activations: str | None = option(
        "auto, or int8: experts stored as integers are multiplied by activations rounded to int8.", metavar="auto|int8"
    )
    policy: Path | None = option("Run this policy, as optimize -o writes it.", metavar="FILE.yaml")
    hw: str = option("The machine to plan for; auto is this one.", metavar="NAME|FILE|auto", default="auto")
    device: str = option(
        "auto, cpu, cuda, xpu, a card as in cuda:1, or twin (a GPU emulated by the CPU).", default="auto"
    )
    adapt: bool | None = option(
        "Change N, micro-batches, look-ahead and riding prompts between passes where that turns out to be faster; "
        "default unless a policy is given."
    )
    cuda_graphs: bool = option(
        "Launch small passes that repeat from CUDA graphs.", "--cuda-graphs/--no-cuda-graphs", default=True
    )
    show: bool | None = option("Prompts beside completions; default on a terminal.")
    status: Path | None = option("Keep the job's state here, as OpenAI's batch object.", metavar="FILE.json")
    metrics: Path | None = option("Keep Prometheus text here.", metavar="FILE.prom")
    stats: Path | None = option("Write the run's figures here.", metavar="FILE.json")
    trace: Path | None = option("Write a Perfetto trace here.", metavar="FILE.json")
    expert_policy: str | None = option(
        "Which experts are resident and which are prefetched in on-demand passes; static: those of the plan.",
        metavar="FILE.moe|static|default",
    )
    expert_profile: Path | None = option("Begin with what an earlier run learned of the experts.", metavar="FILE.json")
    save_expert_profile: Path | None = option("Write what this run learns of the experts.", metavar="FILE.json")
    routing_trace: Path | None = option(
        "Write the routed experts of each pass, for policy replay and tune.", metavar="FILE.jsonl"
    )
    expert_stats: Path | None = option(
        "Write hits, misses, predictions and stalls, layer by layer.", metavar="FILE.json"
    )


@dataclass(frozen=True, kw_only=True)
class RayArguments:
    """The options of ``moelight generate`` on a Ray cluster."""

    ray: str | None = option(
        "Run on the nodes of a Ray cluster: local starts one in this machine.", metavar="local|ADDRESS"
    )
    ray_engines: int | None = option("Engines; one for each GPU, or node without one, if not given.", min=1)
    ray_num_cpus: float | None = option("CPUs that each engine takes.", min=0.01)
    ray_num_gpus: float | None = option("GPUs that each engine takes.", min=0.0)
    ray_resource: list[str] | None = option("What else each takes; may be repeated.", metavar="NAME=AMOUNT")
    ray_label: list[str] | None = option("Nodes must have this label; may be repeated.", metavar="NAME=VALUE")


@with_options()
def generate(given: JobArguments, cluster: RayArguments) -> None:
    """Answer every row of PROMPTS. Run again, the same command resumes where it was interrupted.

    A row is a line of an OpenAI batch file, or {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}, ...]}
    with an optional custom_id and its own sampling fields, or a line of text, or a row of a table.
    """
    from moelight.cli.job_display import forecast_and_report, run_and_report

    if given.as_json and not given.dry_run:
        raise ConfigError("--json goes with --dry-run; rows are JSON lines already")
    as_table = given.show if given.show is not None else given.output is None and sys.stdout.isatty()
    options = read_options(given, as_table=as_table)
    nodes = read_cluster(cluster)
    say_missing_kernels()
    with _naming_schema(given.json_schema):
        if given.dry_run:
            code = forecast_and_report(options, as_json=given.as_json, nodes=nodes)
        else:
            code = run_and_report(options, as_table=as_table, nodes=nodes)
    if code:
        raise typer.Exit(code)


def read_options(given: JobArguments, *, as_table: bool) -> JobOptions:
    """Return the job of the options; without ``--output``, rows go to the table if ``as_table``, else to stdout."""
    from moelight.batch.options import Durability, JobOptions
    from moelight.batch.output import STANDARD_OUTPUT
    from moelight.experts.options import ExpertOptions
    from moelight.lang.files import load_expert_policy
    from moelight.optimizer.fixed_values import check_activations, check_dtype
    from moelight.scheduler import SCHEDULES

    if given.schedule is not None:
        SCHEDULES.get(given.schedule)
    check_activations(given.activations)
    check_dtype(given.dtype)
    policy = None if given.policy is None else read_policy(given.policy, given)
    sampling = {
        **_fields_of(SamplingParams, given),
        "stop": tuple(given.stop or ()),
        "stop_token_ids": tuple(given.stop_token_id or ()),
        "structured_outputs": read_constraint(given),
    }
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
        "kv_dtype": read_kv_dtype(given),
        "sampling": SamplingParams(**sampling),
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


def read_cluster(given: RayArguments) -> ClusterOptions | None:
    """Return the cluster of the options; None without ``--ray``. Raise ConfigError where Ray is not installed."""
    if given.ray is None:
        for each in fields(given):
            if getattr(given, each.name) is not None:
                raise ConfigError(f"{flag(each.name)} goes with --ray local or --ray ADDRESS")
        return None
    from moelight.integrations.ray.cluster import ClusterOptions, require_ray

    require_ray()
    amounts: dict[str, float] = {}
    for name, value in _pairs("--ray-resource", given.ray_resource):
        try:
            amounts[name] = float(value)
        except ValueError:
            raise ConfigError(f"--ray-resource {name}={value}: the amount must be a number") from None
    return ClusterOptions(
        address=given.ray,
        engines=given.ray_engines,
        num_cpus=given.ray_num_cpus,
        num_gpus=given.ray_num_gpus,
        resources=amounts,
        labels=dict(_pairs("--ray-label", given.ray_label)),
    )


def _pairs(option: str, given: list[str] | None) -> list[tuple[str, str]]:
    for each in given or ():
        if not all(each.partition("=")):
            raise ConfigError(f"{option} {each}: must be NAME=VALUE")
    return [(name, value) for name, _, value in (each.partition("=") for each in given or ())]


def read_kv_dtype(given: JobArguments) -> str:
    """Return the format of keys and values; refuse ``--allow`` of experts, which are run as they are stored."""
    from moelight.optimizer.allowed import AUTO, CHOOSE, KV8, WEIGHTS, parse_allowed

    allowed = parse_allowed(given.allow)
    for name in WEIGHTS:
        if name in allowed:
            raise ConfigError(
                f"--allow {name}: generate runs experts as they are stored; moelight convert {given.model or 'MODEL'} "
                f"OUT --experts {name} makes a checkpoint that stores them so"
            )
    if KV8 not in allowed:
        return given.kv_dtype
    if given.kv_dtype != AUTO:
        raise ConfigError(f"--allow {KV8} and --kv-dtype {given.kv_dtype} both say what the plan may use; drop one")
    return CHOOSE


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
        return StructuredOutputs(json=read_json(given.json_schema), strict=given.strict, resamplings=given.resamplings)
    except (OSError, ValueError) as error:
        reason = read_error_text(error)
        raise ConfigError(f"--json-schema {given.json_schema}: cannot be read as JSON ({reason})") from None


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


def read_policy(path: Path, given: JobArguments) -> Policy:
    """Return the policy in ``path``; an option of `_PLANNED` or a policy that the engine cannot run is refused."""
    from moelight.optimizer.runnable import policy_faults
    from moelight.profiles.policy_files import load_policy

    refuse_beside(f"--policy {path}", given, _PLANNED, "the policy says how to run")
    policy = load_policy(path)
    if faults := policy_faults(policy):
        raise ConfigError(f"--policy {path} cannot be run: {'; '.join(faults)}")
    return policy
