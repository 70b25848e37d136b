"""A connection of the HTTP server: limits on its idle time, and on the number of connections.

Depends on uvicorn's protocol and the guard's note of the token. Does not depend on routes. Connections that never sent
the token, whatever their number, do not keep out requests with the token.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from moelight.serve.auth import BROUGHT_TOKEN
from moelight.serve.errors import error_response

MOST_CONNECTIONS = 512
HEADERS_S = 10.0  # the longest a request line and its headers may take


class Connection(H11Protocol):
    """Closes itself when the headers of its next request are not complete in time; and, when the number of connections
    exceeds the limit, closes the oldest of the least valuable ones."""

    _late: asyncio.TimerHandle | None = None
    _known = False
    _since_s = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._since_s = self.loop.time()
        self._watch()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        self._note_token()  # of the previous request
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP in the format of every other rejection."""
        answer = error_response(400, msg, code="invalid_http", headers={"Connection": "close"})
        head = h11.Response(status_code=400, headers=answer.raw_headers)
        for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _make_room(self) -> None:
        if len(self.connections) <= _most():
            return
        here = [each for each in self.connections if isinstance(each, Connection) and not each.transport.is_closing()]
        if len(here) > _most():
            min(here, key=Connection._worth).transport.abort()

    def _worth(self) -> tuple[int, float]:
        """Sort key of eviction: connections that never sent the token first, then idle ones that did; oldest first."""
        self._note_token()
        return 0 if not self._known else 2 if self._busy else 1, self._since_s

    def _note_token(self) -> None:
        """Remember that the connection sent the token, since each request has a state of its own."""
        scope: Any = self.scope  # None before the first request
        if scope is not None and BROUGHT_TOKEN in scope["state"]:
            self._known = True

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


def _most() -> int:
    """The limit of connections: at most half of the process's file descriptors, since files need some, too."""
    return min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
