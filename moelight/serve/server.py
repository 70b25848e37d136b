"""The HTTP server around the application and the worker: its socket, its signals, its end. Knows uvicorn."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from moelight.core.errors import ConfigError
from moelight.serve.app import make_app
from moelight.serve.auth import make_token, read_token
from moelight.serve.connections import Connection
from moelight.serve.data import DataDirectory
from moelight.serve.jobs import Command, Pace, WorkThread
from moelight.serve.worker import Worker

_CLOSE_S = 5  # for answers under way when the server stops
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """What ``moelight serve-batch`` asks for. ``port`` 0 is any that is free."""

    model: str
    data: Path
    host: str = "127.0.0.1"
    port: int = 8000
    token_file: Path | None = None
    allow_remote: bool = False
    max_file_bytes: int = 512 << 20
    expire: bool = False


def serve(options: ServerOptions, command: Command, *, say: Callable[[str], None], pace: Pace | None = None) -> int:
    """Serve until a signal comes, and return its number.

    Raises:
        ConfigError: the address, the token file or the data directory cannot be used.
    """
    listening = listen(options.host, options.port, allow_remote=options.allow_remote)
    with contextlib.closing(listening), contextlib.closing(DataDirectory(options.data)) as data:
        token_file = options.token_file
        if token_file is None:
            token_file = data.root / "token"
            make_token(token_file)
        token = read_token(token_file)
        worker = Worker(data, command, say=say, pace=pace, expire=options.expire)
        app = make_app(
            data,
            model=options.model,
            token=token,
            wake=worker.wake,
            waits=worker.waits,
            max_file_bytes=options.max_file_bytes,
            hosts=None if options.allow_remote else _LOOPBACK_NAMES | {options.host},
        )
        server = _Server(_configuration(app))
        waiting = len(data.store.open_batches())
        say(f"base URL {base_url(listening)}, token in {token_file}, files and state in {data.root}")
        if waiting:
            say(f"{waiting} batches go on")
        thread = WorkThread(worker.run, on_end=server.leave)
        thread.start()
        try:
            server.run(sockets=[listening])
        finally:
            worker.stop()
            thread.join()
        if not thread.sound:
            raise RuntimeError("the worker ended by a fault of its own")
        left = len(data.store.open_batches())
        say("stopped" + (f"; {left} batches go on with the same command" if left else ""))
        return server.signal


def listen(host: str, port: int, *, allow_remote: bool) -> socket.socket:
    """A socket that listens on ``host`` and ``port``.

    Raises:
        ConfigError: others could reach it and nobody asked for that, or it cannot be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host}: no such address ({error})") from None
    addresses = [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
    if not allow_remote and not all(address.is_loopback for address in addresses):
        raise ConfigError(f"--host {host}: other machines could reach it; add --allow-remote if that is meant")
    family, *_, address = found[0]
    try:
        listening = socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise ConfigError(f"--host {host} --port {port}: {reason}; name another --port") from None
    # Inherited by what is accepted. asyncio leaves it out for sockets that were made without naming their protocol, and
    # every answer then takes 40 ms: its body waits for the acknowledgement of its head.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def base_url(listening: socket.socket) -> str:
    """What the ``openai`` client takes as its ``base_url``."""
    host, port, *_ = listening.getsockname()
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def _configuration(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=_CLOSE_S,
    )


class _Server(uvicorn.Server):
    """Ends with a signal's number instead of the signal, so that what has to be done at the end is done."""

    signal = 0

    def leave(self) -> None:
        """Stop serving, from any thread."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._on_signal) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.handle_exit(number, frame)
