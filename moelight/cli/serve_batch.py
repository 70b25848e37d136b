"""``moelight serve-batch``: OpenAI's Files and Batches over HTTP, or a watched folder."""

from __future__ import annotations

import importlib.util
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moelight.cli.options import flag, with_options
from moelight.cli.tables import printable
from moelight.core.errors import ConfigError
from moelight.core.units import parse_bytes

if TYPE_CHECKING:
    from moelight.serve.jobs import JobRunner

_HTTP = ("host", "port", "data", "token_file", "allow_remote", "max_file_size", "expire")
_HANDED_ON = ("max_tokens", "host_memory", "device_memory", "policy", "hw", "device", "expert_policy")
_MODULES = ("starlette", "uvicorn", "python_multipart")
_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class ServerArguments:
    """The options of ``moelight serve-batch``, as given."""

    model: Annotated[str, typer.Option("--model", "-m", help="A directory, a hub id, or demo, the bundled model.")]
    host: Annotated[str | None, typer.Option(help="The address to listen on; 127.0.0.1 if not given.")] = None
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="8000 if not given; 0: any that is free.")] = None
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="For files and state; ~/.local/share/moelight/serve-batch if not given."),
    ] = None
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Holds the token that requests bring; one is made if not given.")
    ] = None
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Let --host be an address that other machines reach.")
    ] = False
    max_file_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The largest file that is taken; 512MiB if not given.")
    ] = None
    expire: Annotated[
        bool, typer.Option("--expire", help="End a batch when its completion window is over, done or not.")
    ] = False
    watch: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Instead of HTTP: run each .jsonl file dropped in DIR.")
    ] = None
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="The most tokens generated where a request does not say.")
    ] = None
    host_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="The most host memory of a job.")] = None
    device_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="The most GPU memory of a job.")] = None
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="Run this policy, as optimize -o writes it.")
    ] = None
    hw: Annotated[str | None, typer.Option(metavar="NAME|FILE|auto", help="The machine to plan for.")] = None
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, xpu, or twin.")] = None
    expert_policy: Annotated[
        str | None,
        typer.Option(metavar="FILE.moe|static|default", help="Which experts are resident in on-demand passes."),
    ] = None


@with_options()
def serve_batch(given: ServerArguments) -> None:
    """Serve OpenAI's Files and Batches on this machine, or watch a folder.

    Each batch is a job of moelight generate in a process of its own, one after another. The base_url of the openai
    client and the path of the file with its api_key are printed on start.
    """
    from moelight.profiles.policy_files import load_policy
    from moelight.serve.jobs import JobRunner, generate_command

    for name in ("host_memory", "device_memory"):
        if (size := getattr(given, name)) is not None:
            parse_bytes(size, what=flag(name))
    if given.policy is not None:
        load_policy(given.policy)
    handed_on = [(flag(name), getattr(given, name)) for name in _HANDED_ON]
    options = [str(word) for option, value in handed_on if value is not None for word in (option, value)]
    _check_model(given.model)
    if given.watch is not None:
        for name in _HTTP:
            if getattr(given, name) not in (None, False):
                pair = f"--watch {given.watch} and {flag(name)}"
                raise ConfigError(f"{pair} contradict each other: a folder is watched without HTTP")
        _watch(given.watch, JobRunner(generate_command(given.model, options, line_format="auto"), say=_say))
        return
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serve-batch needs {' and '.join(missing)}: pip install 'moelight[serve]'")
    from moelight.serve.server import serve

    directory = Path(given.model).expanduser()
    number = serve(
        JobRunner(generate_command(given.model, options, line_format="openai"), say=_say),
        model=directory.resolve().name if directory.is_dir() else given.model,  # the model name that rows may use
        data=Path.home() / ".local" / "share" / "moelight" / "serve-batch" if given.data is None else given.data,
        host="127.0.0.1" if given.host is None else given.host,
        port=8000 if given.port is None else given.port,
        token_file=given.token_file,
        allow_remote=given.allow_remote,
        max_file_bytes=parse_bytes(given.max_file_size or "512MiB", what="--max-file-size"),
        expire=given.expire,
    )
    _leave(number)


def _watch(folder: Path, runner: JobRunner) -> None:
    from moelight.serve.watch import Watcher, watch

    watcher = Watcher(folder, runner)
    _say(f"watching {folder}: drop .jsonl files there; answers come to {folder / 'done'}")
    _leave(watch(watcher, runner))


def _leave(number: int) -> None:
    if number == signal.SIGINT:
        raise typer.Exit(_INTERRUPTED)


def _say(text: str) -> None:
    print(printable(f"moelight serve-batch: {text}"), file=sys.stderr, flush=True)


def _check_model(model: str) -> None:
    """Refuse a model that is neither a directory nor shaped like a hub id; the first job queries the hub."""
    from moelight.weights.source import DEMO

    path = Path(model).expanduser()
    if model != DEMO and not path.is_dir() and (path.exists() or model.count("/") != 1):
        raise ConfigError(f"--model {model}: no such directory, and a hub id has the form owner/name")
