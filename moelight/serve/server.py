"""The HTTP server around the application and the worker: its socket, limits of connections, signals and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from moelight.core.errors import ConfigError
from moelight.serve.app import Api, make_app
from moelight.serve.auth import CONNECTION, make_token, read_token
from moelight.serve.http import ApiError
from moelight.serve.jobs import JobRunner, WorkThread, handled_signals
from moelight.serve.store import DataDirectory
from moelight.serve.worker import Worker

MOST_CONNECTIONS = 512
HEADERS_S = 10.0  # the longest a request line and its headers may take


class Connection(H11Protocol):
    """Connection that aborts itself if the headers of its next request are late.

    A new connection above the limit aborts the oldest of the least valuable ones.
    """

    authorized = False  # set by `Guard` when a request brought the token
    _late: asyncio.TimerHandle | None = None
    _since_s = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state = {CONNECTION: self}  # copied into each request
        self._since_s = self.loop.time()
        self._watch()
        # At most half of the process's file descriptors, since files need some, too.
        max_connections = min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        here = [
            connection
            for connection in self.connections
            if isinstance(connection, Connection) and not connection.transport.is_closing()
        ]
        if len(here) > max_connections:
            min(here, key=Connection._worth).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP in the format of every other rejection."""
        answer = ApiError(400, msg, code="invalid_http", headers={"Connection": "close"}).response()
        head = h11.Response(status_code=400, headers=answer.raw_headers)
        for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _worth(self) -> tuple[int, float]:
        """Sort key of eviction: connections that never sent the token first, then idle ones that did; oldest first."""
        return 0 if not self.authorized else 2 if self._busy else 1, self._since_s

    @property
    def _busy(self) -> bool:
        """True while a request is being answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _watch(self) -> None:
        if self._busy:
            self._stop()
        elif self._late is None:
            self._late = self.loop.call_later(HEADERS_S, self.transport.abort)

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


_UVICORN: dict[str, Any] = {
    "http": Connection,
    "ws": "none",
    "loop": "asyncio",
    "lifespan": "off",
    "log_level": "warning",
    "access_log": False,
    "proxy_headers": False,
    "server_header": False,
    "timeout_keep_alive": 5,
    "timeout_graceful_shutdown": 5,  # seconds for responses in progress when the server stops
}
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def serve(
    runner: JobRunner,
    *,
    model: str,
    data: Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_file: Path | None = None,
    allow_remote: bool = False,
    max_file_bytes: int = 512 << 20,
    expire: bool = False,
) -> int:
    """Serve with the options of ``moelight serve-batch`` until a signal arrives, and return its number.

    ``port`` 0 is any free port.
    """
    listening = listen(host, port, allow_remote=allow_remote)
    with contextlib.closing(listening), contextlib.closing(DataDirectory(data)) as directory:
        if token_file is None:
            token_file = directory.root / "token"
            make_token(token_file)
        worker = Worker(directory, runner, expire=expire)
        api = Api(directory, worker, model=model, max_file_bytes=max_file_bytes)
        hosts = None if allow_remote else _LOOPBACK_NAMES | {host}
        app = make_app(api, token=read_token(token_file), hosts=hosts)
        server = _Server(uvicorn.Config(app, **_UVICORN))
        waiting = len(directory.store.open_batches())
        runner.say(f"base URL {base_url(listening)}, token in {token_file}, files and state in {directory.root}")
        if waiting:
            runner.say(f"{waiting} batches go on")

        def leave() -> None:
            server.should_exit = True

        thread = WorkThread(worker.run, on_end=leave)
        thread.start()
        try:
            with handled_signals(server.handle_exit) as came:
                server.run(sockets=[listening])
        finally:
            runner.stop()
            thread.finish()
        left = len(directory.store.open_batches())
        runner.say("stopped" + (f"; {left} batches go on with the same command" if left else ""))
        return came[-1] if came else 0


def listen(host: str, port: int, *, allow_remote: bool) -> socket.socket:
    """Return a socket that listens on ``host`` and ``port``; other machines reach it only if ``allow_remote``."""
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host}: no such address ({error})") from None
    addresses = [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in resolved]
    if not allow_remote and not all(address.is_loopback for address in addresses):
        raise ConfigError(f"--host {host}: other machines could reach it; add --allow-remote if that is meant")
    family, *_, address = resolved[0]
    try:
        listening = socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise ConfigError(f"--host {host} --port {port}: {reason}; name another --port") from None
    # Accepted sockets inherit this option. asyncio omits it for sockets that were created without a protocol, and every
    # response then takes 40 ms: its body waits for the acknowledgement of its headers.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def base_url(listening: socket.socket) -> str:
    """Return the ``base_url`` for the ``openai`` client."""
    host, port, *_ = listening.getsockname()
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


class _Server(uvicorn.Server):
    """Leaves signals to the caller, which shuts down in order; uvicorn would raise them again."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
