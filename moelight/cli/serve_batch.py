"""``moelight serve-batch``: OpenAI's Files and Batches over HTTP, or a watched folder."""

from __future__ import annotations

import importlib.util
import signal
import sys
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moelight.cli import INTERRUPTED
from moelight.cli.options import flag, option, refuse_beside, with_options
from moelight.cli.tables import printable, say_missing_kernels
from moelight.core.errors import ConfigError
from moelight.core.request import MAX_RESAMPLINGS
from moelight.core.units import parse_bytes
from moelight.engine.options import EngineOptions

if TYPE_CHECKING:
    from moelight.serve.jobs import JobRunner

_HTTP = ("host", "port", "data", "token_file", "allow_remote", "max_file_size", "expire")
_HANDED_ON = ("max_tokens", "ignore_model", "strict", "resamplings", "policy", "expert_policy")
_NOT_SERVED = ("batch_size", "micro_batch_size", "schedule", "adapt", "cuda_graphs")
_NO_PROMPTS = Path("-")  # of a job that only checks its options
_MODULES = ("starlette", "uvicorn", "python_multipart")


@dataclass(frozen=True, kw_only=True)
class ServerArguments:
    """The options of ``moelight serve-batch``, as given."""

    model: str = option(
        "Model to serve: a directory, a Hugging Face hub id, or demo (bundled).", "--model", "-m", default=MISSING
    )
    host: str | None = option("Address to listen on; defaults to 127.0.0.1.")
    port: int | None = option("Port to listen on; defaults to 8000; 0 picks a free one.", min=0, max=65535)
    data: Path | None = option(
        "Directory for files and state; defaults to ~/.local/share/moelight/serve-batch.", metavar="DIR"
    )
    token_file: Path | None = option(
        "File with the bearer token that requests must send; created by default.", metavar="FILE"
    )
    allow_remote: bool = option("Allow --host to be an address that other machines can reach.", default=False)
    max_file_size: str | None = option("Maximum size of an uploaded file; defaults to 512MiB.", metavar="SIZE")
    expire: bool = option("Expire batches at the end of their completion window.", default=False)
    watch: Path | None = option(
        "Watch DIR and run every .jsonl file placed in it, instead of serving HTTP.", metavar="DIR"
    )
    max_tokens: int | None = option(
        "Maximum number of tokens to generate for requests that do not set it; by default the rest of the context.",
        min=1,
    )
    ignore_model: bool = option("Ignore the model field of the rows.", default=False)
    strict: bool = option("Reject JSON schemas that cannot be enforced, as for generate.", default=False)
    resamplings: int | None = option(
        "Maximum number of times to generate an invalid answer again.", min=0, max=MAX_RESAMPLINGS
    )
    policy: Path | None = option("Policy file to run, as written by optimize -o.", metavar="FILE.yaml")
    expert_policy: str | None = option("Expert policy for on-demand passes.", metavar="FILE.moe|static|default")


@with_options(without=_NOT_SERVED)
def serve_batch(arguments: ServerArguments, engine: EngineOptions) -> None:
    """Serve OpenAI's Files and Batches on this machine, or watch a folder.

    Each batch is a job of moelight generate in a process of its own, one after another. The base_url of the openai
    client and the path of the file with its api_key are printed on start.
    """
    from moelight.cli.generate import JobArguments, read_options
    from moelight.serve.jobs import JobRunner, generate_command

    handed_on = {name: value for name in _HANDED_ON if (value := getattr(arguments, name)) not in (None, False)}
    read_options(JobArguments(prompts=_NO_PROMPTS, model=arguments.model, **handed_on), engine, as_table=False)
    default = EngineOptions()
    names = (option.name for option in fields(engine) if option.metadata)
    handed_on |= {name: value for name in names if (value := getattr(engine, name)) != getattr(default, name)}
    options = [
        str(word)
        for name, value in handed_on.items()
        for word in ((flag(name),) if value is True else (flag(name), value))
    ]
    say_missing_kernels()
    _check_model(arguments.model)
    if arguments.watch is not None:
        refuse_beside(f"--watch {arguments.watch}", arguments, _HTTP, "a folder is watched without HTTP")
        _watch(arguments.watch, JobRunner(generate_command(arguments.model, options, line_format="auto"), say=_say))
        return
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serve-batch needs {' and '.join(missing)}: pip install 'moelight[serve]'")
    from moelight.serve.server import serve

    directory = Path(arguments.model).expanduser()
    chosen = {name: value for name in ("host", "port") if (value := getattr(arguments, name)) is not None}
    number = serve(
        JobRunner(generate_command(arguments.model, options, line_format="openai"), say=_say),
        model=directory.resolve().name if directory.is_dir() else arguments.model,  # the model name that rows may use
        data=Path.home() / ".local" / "share" / "moelight" / "serve-batch"
        if arguments.data is None
        else arguments.data,
        token_file=arguments.token_file,
        allow_remote=arguments.allow_remote,
        max_file_bytes=parse_bytes(arguments.max_file_size or "512MiB", label="--max-file-size"),
        expire=arguments.expire,
        **chosen,
    )
    _leave(number)


def _watch(folder: Path, runner: JobRunner) -> None:
    from moelight.serve.watch import Watcher, watch

    watcher = Watcher(folder, runner)
    _say(f"watching {folder}: drop .jsonl files there; answers come to {folder / 'done'}")
    _leave(watch(watcher, runner))


def _leave(number: int) -> None:
    if number == signal.SIGINT:
        raise typer.Exit(INTERRUPTED)


def _say(text: str) -> None:
    print(printable(f"moelight serve-batch: {text}"), file=sys.stderr, flush=True)


def _check_model(model: str) -> None:
    """Refuse a model that is neither a directory nor shaped like a hub id; the first job queries the hub."""
    from moelight.weights.source import local_model

    local_model(model)
