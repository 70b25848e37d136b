"""One connection of the HTTP server: how long it may be silent, and who has to go when there are too many.

Knows uvicorn's protocol and what the guard noted. Refuses to know routes. A connection that never brought the token is
worth nothing: however many there are, and whatever they wait for, they keep no request with the token out.
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
    """Closes itself when its next request does not come whole, up to its headers, in time; and, when it is one too
    many, the oldest of those that nobody misses."""

    _late: asyncio.TimerHandle | None = None
    _known = False
    _since_s = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._since_s = self.loop.time()
        self._watch()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        self._note_token()  # of the request before this one
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told so as every other refusal is."""
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
        """The least goes first: one that never brought the token, then one that brought it and asks for nothing."""
        self._note_token()
        return 0 if not self._known else 2 if self._busy else 1, self._since_s

    def _note_token(self) -> None:
        """A connection stays known, although each request has a state of its own."""
        scope: Any = self.scope  # None before the first
        if scope is not None and BROUGHT_TOKEN in scope["state"]:
            self._known = True

    @property
    def _busy(self) -> bool:
        """A request is being answered."""
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
    """Half of the descriptors that the process may have, at most: there are files, too."""
    return min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
