"""Authentication: the token, and the guard that rejects a request before its route or body is read."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moelight.core.errors import ConfigError
from moelight.core.small_files import open_regular
from moelight.serve.http import ApiError
from moelight.serve.store import private

LEAST_TOKEN = 16  # characters
LINGER_S = 10.0
MOST_REQUESTS = 64  # at once
CONNECTION = "connection"  # key in the state of a request; its value is `authorized` once a request brought the token
OPEN_PATHS = frozenset({"/health"})
_MOST_TOKEN_BYTES = 4096


def read_token(path: Path) -> str:
    """Return the token in the file ``path``, which must be accessible to its owner only."""
    try:
        with open(open_regular(path), "rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise ConfigError(f"token file {path}: others may read or change it; run chmod 600 {path}")
            text = file.read(_MOST_TOKEN_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise ConfigError(f"token file {path}: {(error.strerror or str(error)).lower()}") from None
    if len(text) < LEAST_TOKEN or not all("!" <= character <= "~" for character in text):
        raise ConfigError(f"token file {path}: a token is one line of {LEAST_TOKEN} or more letters, digits and signs")
    return text


def make_token(path: Path) -> None:
    """Write a new token to ``path``, readable by its owner only, unless the file exists."""
    partial = path.with_name(f"{path.name}.partial")
    if path.exists():
        return
    partial.unlink(missing_ok=True)
    try:
        with open(partial, "x", opener=private) as file:
            file.write(secrets.token_urlsafe(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except OSError as error:
        raise ConfigError(f"token file {path}: cannot be written ({(error.strerror or str(error)).lower()})") from None


class Guard:
    """Middleware that accepts requests with the token, up to `MOST_REQUESTS` at a time.

    ``hosts``: host names under which the server may be addressed, None for any. Other names hint at DNS rebinding.
    """

    def __init__(self, app: ASGIApp, *, token: str, hosts: Collection[str] | None) -> None:
        self._app, self._hosts = app, hosts
        self._expected = f"Bearer {token}".encode("latin-1")
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _DrainedBody(receive, send, headers := Headers(scope=scope))
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None or scope["path"] in OPEN_PATHS:  # not counted: they cannot make the server busy
            await (refusal.response() if refusal else self._app)(scope, body.receive, body.send)
            return
        if CONNECTION in scope.get("state", {}):
            scope["state"][CONNECTION].authorized = True
        self._running += 1
        try:
            await self._app(scope, body.receive, body.send)
        finally:
            self._running -= 1

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if self._hosts is not None and _host_name(headers) not in self._hosts:
            return ApiError(403, "this server is not called by that name", param="Host", code="invalid_host")
        if path in OPEN_PATHS:
            return None
        header = headers.get("authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(header, self._expected):
            message = "wrong token" if header else "no token: send Authorization: Bearer TOKEN"
            return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if self._running >= MOST_REQUESTS:
            return ApiError(503, "too many requests at once", code="server_busy", headers={"Retry-After": "1"})
        return None


class _DrainedBody:
    """Discards the rest of a request's body, for `LINGER_S` at most, when the response is ready earlier.

    Closing at once would reset the connection, and the sender would see the reset instead of the response.
    """

    def __init__(self, receive: Receive, send: Send, headers: Headers) -> None:
        self._receive, self._send = receive, send
        self._open = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._open = False
        return message

    async def send(self, message: Message) -> None:
        if self._open and message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        elif self._open and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._drain(), LINGER_S)
            self._open = False
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def _drain(self) -> None:
        while self._open:
            await self.receive()


def _host_name(headers: Headers) -> str | None:
    try:
        return urlsplit(f"//{headers.get('host', '')}").hostname
    except ValueError:
        return None
