"""``moelight generate``: options in, one job run, rows or a table out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy
from moelight.core.request import SamplingParams
from moelight.core.units import parse_bytes

if TYPE_CHECKING:
    from moelight.experts.options import ExpertOptions

_Prompts = Annotated[Path, typer.Argument(metavar="PROMPTS.jsonl", help="One JSON object a line; - reads stdin.")]
_Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="A directory, a hub id, or demo, the bundled model; the policy's if it has one."
    ),
]
_Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="OUT.jsonl", help="Where the rows go; - is stdout.")
]
_MaxTokens = Annotated[int, typer.Option(min=1, help="The most tokens generated for a prompt.")]
_Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")]
_TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens of this total probability.")]
_TopK = Annotated[int, typer.Option(min=-1, help="Sample from this many of the likeliest tokens; 0: all.")]
_Seed = Annotated[int, typer.Option(min=0, help="For prompts that bring no seed of their own.")]
_Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be repeated.")]
_HostMemory = Annotated[str | None, typer.Option(metavar="SIZE", help="The most host memory, e.g. 3GiB.")]
_DeviceMemory = Annotated[str | None, typer.Option(metavar="SIZE", help="The most GPU memory, e.g. 10GiB.")]
_BatchSize = Annotated[int | None, typer.Option(min=1, help="Sequences in a pass; planned if not given.")]
_MicroBatchSize = Annotated[int | None, typer.Option(min=1, help="Sequences in a micro-batch; planned if not given.")]
_Schedule = Annotated[
    str | None,
    typer.Option(help="The order of work: cgopipe, fastdecode, flexgen-c, flexgen, flexgen-loop, serial or module."),
]
_Policy = Annotated[
    Path | None, typer.Option("--policy", metavar="FILE.yaml", help="Run this policy, as optimize -o writes it.")
]
_Hw = Annotated[str, typer.Option("--hw", metavar="NAME|FILE|auto", help="The machine to plan for; auto is this one.")]
_Device = Annotated[str, typer.Option(help="auto, cpu, cuda, xpu, or twin (a GPU played by the CPU).")]
_TokenIds = Annotated[bool, typer.Option("--token-ids", help="Add token_ids to every row.")]
_Stats = Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the run's figures here.")]
_Trace = Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write a Perfetto trace here.")]
_Show = Annotated[
    bool | None, typer.Option("--show/--no-show", help="Prompts beside completions; default on a terminal.")
]
_Adapt = Annotated[
    bool | None,
    typer.Option(
        "--adapt/--no-adapt",
        help="Change N, micro-batches, look-ahead and riding prompts between passes where that turns out to be faster; "
        "default unless a policy is given.",
    ),
]
_ExpertPolicy = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.moe|static|default",
        help="Which experts stay near and which are fetched ahead in small passes; static: those that the plan placed.",
    ),
]
_ExpertProfile = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Begin with what an earlier run learned of the experts.")
]
_SaveExpertProfile = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Write what this run learns of the experts.")
]
_RoutingTrace = Annotated[
    Path | None, typer.Option(metavar="FILE.jsonl", help="Write who was routed where, for policy replay and tune.")
]
_ExpertStats = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Write hits, misses, guesses and stalls, layer by layer.")
]
_PLANNED = ("--batch-size", "--micro-batch-size", "--schedule", "--host-memory", "--device-memory")


def generate(
    prompts: _Prompts,
    model: _Model = None,
    output: _Output = None,
    max_tokens: _MaxTokens = 256,
    temperature: _Temperature = 0.0,
    top_p: _TopP = 1.0,
    top_k: _TopK = 0,
    seed: _Seed = 0,
    stop: _Stop = None,
    host_memory: _HostMemory = None,
    device_memory: _DeviceMemory = None,
    batch_size: _BatchSize = None,
    micro_batch_size: _MicroBatchSize = None,
    schedule: _Schedule = None,
    policy: _Policy = None,
    hw: _Hw = "auto",
    device: _Device = "auto",
    token_ids: _TokenIds = False,
    stats: _Stats = None,
    trace: _Trace = None,
    show: _Show = None,
    adapt: _Adapt = None,
    expert_policy: _ExpertPolicy = None,
    expert_profile: _ExpertProfile = None,
    save_expert_profile: _SaveExpertProfile = None,
    routing_trace: _RoutingTrace = None,
    expert_stats: _ExpertStats = None,
) -> None:
    """Answer every prompt of PROMPTS.jsonl, in order.

    A line is {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}, ...]}, with an optional custom_id and
    its own max_tokens, temperature, top_p, top_k, seed, stop, ignore_eos.
    """
    from moelight.batch.job import JobOptions
    from moelight.batch.output import STANDARD_OUTPUT
    from moelight.cli.job_view import run_and_report
    from moelight.scheduler import SCHEDULES

    if schedule is not None:
        SCHEDULES.get(schedule)
    planned = (batch_size, micro_batch_size, schedule, host_memory, device_memory)
    chosen = None if policy is None else read_policy(policy, planned)
    as_table = show if show is not None else output is None and sys.stdout.isatty()
    options = JobOptions(
        prompts=prompts,
        model=model if model is not None else "demo" if chosen is None else chosen.model,
        policy=chosen,
        hw=hw,
        output=STANDARD_OUTPUT if output is None and not as_table else output,
        sampling=SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=tuple(stop or ())
        ),
        device=device,
        host_memory=None if host_memory is None else parse_bytes(host_memory, what="--host-memory"),
        device_memory=None if device_memory is None else parse_bytes(device_memory, what="--device-memory"),
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        schedule=schedule,
        token_ids=token_ids,
        stats=stats,
        trace=trace,
        adapt=adapt,
        experts=read_experts(expert_policy, expert_profile, routing_trace),
        expert_stats=expert_stats,
        save_expert_profile=save_expert_profile,
    )
    if run_and_report(options, as_table=as_table):
        raise typer.Exit(1)


def read_experts(policy: str | None, profile: Path | None, trace: Path | None) -> ExpertOptions:
    """What the options ask of the experts' residency.

    Raises:
        ConfigError: the file of the policy has errors, or a profile is given where nothing is learned.
    """
    from moelight.experts.options import ExpertOptions
    from moelight.lang.files import load_expert_policy

    if policy == "static" and profile is not None:
        raise ConfigError(f"--expert-policy static and --expert-profile {profile} contradict each other")
    found = None if policy in (None, "static", "default") else load_expert_policy(str(policy))
    return ExpertOptions(policy=found, learn=policy != "static", profile=profile, trace=trace)


def read_policy(path: Path, planned: Sequence[object]) -> Policy:
    """The policy in the file ``path``, beside which none of the options `_PLANNED` may be given.

    Raises:
        ConfigError: one of them is given, or the file is no policy.
    """
    from moelight.profiles.policy_files import load_policy

    for option, value in zip(_PLANNED, planned, strict=True):
        if value is not None:
            raise ConfigError(f"--policy {path} and {option} {value} contradict each other: the policy says how to run")
    return load_policy(path)
