"""The options of ``moelight generate`` as typer types: what each is called and what its help says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_OUTPUT, _SAMPLING, _RUN = "Rows and files", "Sampling, where a row does not say otherwise", "How it is run"
_WATCH, _EXPERTS = "Watching", "Experts"


def _option(panel: str, *names: str, **how: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **how)


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
    Path | None, _option(_OUTPUT, metavar="FILE.jsonl", help="Rows that cannot be served go here, not to the output.")
]
Format = Annotated[
    str, _option(_OUTPUT, "--format", help="auto, openai, simple, text, csv or parquet; auto looks at the file.")
]
PromptColumn = Annotated[str | None, _option(_OUTPUT, metavar="NAME", help="The column of a table with the prompts.")]
IdColumn = Annotated[str | None, _option(_OUTPUT, metavar="NAME", help="The column of a table with the custom ids.")]
IgnoreModel = Annotated[bool, _option(_OUTPUT, "--ignore-model", help="Rows may name any model.")]
Order = Annotated[str, _option(_OUTPUT, help="Rows leave in the order of the input, or of completion.")]
TokenIds = Annotated[bool, _option(_OUTPUT, "--token-ids", help="Add token_ids to every row (simple format).")]
Restart = Annotated[bool, _option(_OUTPUT, "--restart", help="Forget what an earlier run has done, and begin anew.")]
AllowChanged = Annotated[
    bool, _option(_OUTPUT, "--allow-changed", help="Keep what is done, though model, prompts or options differ now.")
]
Atomic = Annotated[bool, _option(_OUTPUT, "--atomic", help="The output appears whole at the end, or not at all.")]
SyncInterval = Annotated[
    float, _option(_OUTPUT, metavar="SECONDS", min=0.0, help="Rows are on the disk for good after this time.")
]
ChatTemplate = Annotated[
    Path | None, _option(_OUTPUT, metavar="FILE.jinja", help="Use this chat template, not the checkpoint's.")
]

N = Annotated[int, _option(_SAMPLING, "--n", min=1, help="Completions for each prompt.")]
MaxTokens = Annotated[int, _option(_SAMPLING, min=1, help="The most tokens generated for a prompt.")]
MinTokens = Annotated[int, _option(_SAMPLING, min=0, help="No end before this many tokens.")]
Temperature = Annotated[float, _option(_SAMPLING, min=0.0, help="0 takes the likeliest token each time.")]
TopP = Annotated[float, _option(_SAMPLING, help="Sample from the likeliest tokens of this total probability.")]
TopK = Annotated[int, _option(_SAMPLING, min=-1, help="Sample from this many of the likeliest tokens; 0: all.")]
MinP = Annotated[
    float, _option(_SAMPLING, help="Sample from tokens with at least this share of the likeliest one's probability.")
]
Seed = Annotated[int, _option(_SAMPLING, min=0, help="For prompts that bring no seed of their own.")]
Stop = Annotated[list[str] | None, _option(_SAMPLING, metavar="TEXT", help="End before this text; may be repeated.")]
StopTokenId = Annotated[list[int] | None, _option(_SAMPLING, metavar="ID", help="End at this token; may be repeated.")]
IgnoreEos = Annotated[bool, _option(_SAMPLING, "--ignore-eos", help="Go on after the end-of-sequence token.")]
PresencePenalty = Annotated[float, _option(_SAMPLING, help="Against tokens that were generated, -2 to 2.")]
FrequencyPenalty = Annotated[float, _option(_SAMPLING, help="Against tokens by how often they were generated.")]
RepetitionPenalty = Annotated[float, _option(_SAMPLING, help="Above 1: against tokens of prompt and completion.")]
Logprobs = Annotated[
    int | None, _option(_SAMPLING, min=-1, metavar="K", help="Log-probabilities of each token and the K likeliest.")
]
PromptLogprobs = Annotated[int | None, _option(_SAMPLING, min=-1, metavar="K", help="The same of the prompt's tokens.")]
JsonSchema = Annotated[
    Path | None, _option(_SAMPLING, metavar="FILE.json", help="Completions are JSON that this schema describes.")
]
Regex = Annotated[str | None, _option(_SAMPLING, metavar="REGEX", help="Completions match this regular expression.")]
Choice = Annotated[
    list[str] | None, _option(_SAMPLING, metavar="TEXT", help="Completions are one of these; repeat the option.")
]

HostMemory = Annotated[str | None, _option(_RUN, metavar="SIZE", help="The most host memory, e.g. 3GiB.")]
DeviceMemory = Annotated[str | None, _option(_RUN, metavar="SIZE", help="The most GPU memory, e.g. 10GiB.")]
BatchSize = Annotated[int | None, _option(_RUN, min=1, help="Sequences in a pass; planned if not given.")]
MicroBatchSize = Annotated[int | None, _option(_RUN, min=1, help="Sequences in a micro-batch; planned if not given.")]
Schedule = Annotated[
    str | None,
    _option(_RUN, help="The order of work: cgopipe, fastdecode, flexgen-c, flexgen, flexgen-loop, serial or module."),
]
Policy = Annotated[
    Path | None, _option(_RUN, "--policy", metavar="FILE.yaml", help="Run this policy, as optimize -o writes it.")
]
Hw = Annotated[str, _option(_RUN, "--hw", metavar="NAME|FILE|auto", help="The machine to plan for; auto is this one.")]
Device = Annotated[str, _option(_RUN, help="auto, cpu, cuda, xpu, or twin (a GPU played by the CPU).")]
Adapt = Annotated[
    bool | None,
    _option(
        _RUN,
        "--adapt/--no-adapt",
        help="Change N, micro-batches, look-ahead and riding prompts between passes where that turns out to be faster; "
        "default unless a policy is given.",
    ),
]

Show = Annotated[
    bool | None, _option(_WATCH, "--show/--no-show", help="Prompts beside completions; default on a terminal.")
]
Status = Annotated[
    Path | None, _option(_WATCH, metavar="FILE.json", help="Keep the job's state here, as OpenAI's batch object.")
]
Metrics = Annotated[Path | None, _option(_WATCH, metavar="FILE.prom", help="Keep Prometheus text here.")]
Stats = Annotated[Path | None, _option(_WATCH, metavar="FILE.json", help="Write the run's figures here.")]
Trace = Annotated[Path | None, _option(_WATCH, metavar="FILE.json", help="Write a Perfetto trace here.")]

ExpertPolicy = Annotated[
    str | None,
    _option(
        _EXPERTS,
        metavar="FILE.moe|static|default",
        help="Which experts stay near and which are fetched ahead in small passes; static: those that the plan placed.",
    ),
]
ExpertProfile = Annotated[
    Path | None, _option(_EXPERTS, metavar="FILE.json", help="Begin with what an earlier run learned of the experts.")
]
SaveExpertProfile = Annotated[
    Path | None, _option(_EXPERTS, metavar="FILE.json", help="Write what this run learns of the experts.")
]
RoutingTrace = Annotated[
    Path | None,
    _option(_EXPERTS, metavar="FILE.jsonl", help="Write who was routed where, for policy replay and tune."),
]
ExpertStats = Annotated[
    Path | None, _option(_EXPERTS, metavar="FILE.json", help="Write hits, misses, guesses and stalls, layer by layer.")
]
