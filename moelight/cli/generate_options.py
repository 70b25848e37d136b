"""Options of ``moelight generate`` as typer types, with their names and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    typer.Option(help="The order of work: cgopipe, fastdecode, flexgen-c, flexgen, flexgen-loop, serial or module."),
]
Policy = Annotated[
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
        help="Which experts stay near and which are fetched ahead in small passes; static: those that the plan placed.",
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
    typer.Option(metavar="FILE.jsonl", help="Write who was routed where, for policy replay and tune."),
]
ExpertStats = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Write hits, misses, guesses and stalls, layer by layer.")
]
