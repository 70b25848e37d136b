"""``moelight serve-batch``: OpenAI's Files and Batches over HTTP, or a watched folder."""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moelight.core.errors import ConfigError
from moelight.core.units import parse_bytes

if TYPE_CHECKING:
    from moelight.serve.jobs import Command

_HTTP = ("--host", "--port", "--data", "--token-file", "--allow-remote", "--max-file-size", "--expire")
_MODULES = ("starlette", "uvicorn", "python_multipart")
_INTERRUPTED = 130

_Model = Annotated[str, typer.Option("--model", "-m", help="A directory, a hub id, or demo, the bundled model.")]
_Host = Annotated[str | None, typer.Option(help="The address to listen on; 127.0.0.1 if not given.")]
_Port = Annotated[int | None, typer.Option(min=0, max=65535, help="8000 if not given; 0: any that is free.")]
_Data = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="For files and state; ~/.local/share/moelight/serve-batch if not given."),
]
_TokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Holds the token that requests bring; one is made if not given.")
]
_AllowRemote = Annotated[
    bool, typer.Option("--allow-remote", help="Let --host be an address that other machines reach.")
]
_MaxFileSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="The largest file that is taken; 512MiB if not given.")
]
_Expire = Annotated[bool, typer.Option("--expire", help="End a batch when its completion window is over, done or not.")]
_Folder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Instead of HTTP: run each .jsonl file dropped in DIR.")
]
_MaxTokens = Annotated[int | None, typer.Option(min=1, help="The most tokens generated where a request does not say.")]
_HostMemory = Annotated[str | None, typer.Option(metavar="SIZE", help="The most host memory of a job.")]
_DeviceMemory = Annotated[str | None, typer.Option(metavar="SIZE", help="The most GPU memory of a job.")]
_Policy = Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="Run this policy, as optimize -o writes it.")]
_Hw = Annotated[str | None, typer.Option("--hw", metavar="NAME|FILE|auto", help="The machine to plan for.")]
_Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, xpu, or twin.")]
_ExpertPolicy = Annotated[
    str | None, typer.Option(metavar="FILE.moe|static|default", help="Which experts stay resident in on-demand passes.")
]


def serve_batch(
    model: _Model,
    host: _Host = None,
    port: _Port = None,
    data: _Data = None,
    token_file: _TokenFile = None,
    allow_remote: _AllowRemote = False,
    max_file_size: _MaxFileSize = None,
    expire: _Expire = False,
    watch: _Folder = None,
    max_tokens: _MaxTokens = None,
    host_memory: _HostMemory = None,
    device_memory: _DeviceMemory = None,
    policy: _Policy = None,
    hw: _Hw = None,
    device: _Device = None,
    expert_policy: _ExpertPolicy = None,
) -> None:
    """Serve OpenAI's Files and Batches on this machine, or watch a folder.

    Each batch is a job of moelight generate in a process of its own, one after another. The openai client's base_url
    and the file with its api_key are printed on start.
    """
    from moelight.serve.jobs import generate_command

    handed_on = {
        "--max-tokens": max_tokens,
        "--host-memory": _size(host_memory, "--host-memory"),
        "--device-memory": _size(device_memory, "--device-memory"),
        "--policy": _readable(policy),
        "--hw": hw,
        "--device": device,
        "--expert-policy": expert_policy,
    }
    options = [str(word) for name, value in handed_on.items() if value is not None for word in (name, value)]
    _check_model(model)
    if watch is not None:
        chosen = (host, port, data, token_file, allow_remote or None, max_file_size, expire or None)
        _refuse_beside(watch, dict(zip(_HTTP, chosen, strict=True)))
        _watch(watch, generate_command(model, options, line_format="auto"))
        return
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serve-batch needs {' and '.join(missing)}: pip install 'moelight[serve]'")
    from moelight.serve.server import ServerOptions, serve

    directory = Path(model).expanduser()
    server = ServerOptions(
        model=directory.resolve().name if directory.is_dir() else model,  # the model name that rows may use
        data=data if data is not None else Path.home() / ".local" / "share" / "moelight" / "serve-batch",
        host=host if host is not None else "127.0.0.1",
        port=port if port is not None else 8000,
        token_file=token_file,
        allow_remote=allow_remote,
        max_file_bytes=parse_bytes(max_file_size or "512MiB", what="--max-file-size"),
        expire=expire,
    )
    _leave(serve(server, generate_command(model, options, line_format="openai"), say=_say))


def _refuse_beside(watch: Path, given: Mapping[str, object]) -> None:
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"--watch {watch} and {name} contradict each other: a folder is watched without HTTP")


def _watch(folder: Path, command: Command) -> None:
    from moelight.serve.watch import Watcher, watch

    watcher = Watcher(folder, command, say=_say)
    _say(f"watching {folder}: drop .jsonl files there; answers come to {folder / 'done'}")
    _leave(watch(watcher, say=_say))


def _leave(number: int) -> None:
    if number == signal.SIGINT:
        raise typer.Exit(_INTERRUPTED)


def _say(text: str) -> None:
    from moelight.cli.tables import printable

    print(printable(f"moelight serve-batch: {text}"), file=sys.stderr, flush=True)


def _size(text: str | None, what: str) -> str | None:
    """Return ``text`` unchanged after checking that it parses as a size."""
    if text is not None:
        parse_bytes(text, what=what)
    return text


def _readable(policy: Path | None) -> Path | None:
    if policy is not None:
        from moelight.profiles.policy_files import load_policy

        load_policy(policy)
    return policy


def _check_model(model: str) -> None:
    """Refuse a model that is neither a directory nor shaped like a hub id; the first job queries the hub.

    Raises:
        ConfigError: the model is refused.
    """
    from moelight.weights.source import DEMO

    path = Path(model).expanduser()
    if model != DEMO and not path.is_dir() and (path.exists() or model.count("/") != 1):
        raise ConfigError(f"--model {model}: no such directory, and a hub id has the form owner/name")
