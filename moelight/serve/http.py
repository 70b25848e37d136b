"""What all routes share: bounded bodies with a time limit, look-ups and pages, and errors in OpenAI's format."""

from __future__ import annotations

import asyncio
import errno
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

MOST_JSON_BYTES = 1 << 20
STALL_S = 30.0  # the longest wait for the next bytes of a body
# The place of a fault in msgspec's messages: "... field `name`" or "... at `$.name[...]`".
_PLACE = re.compile(r"(?:field `|at `\$\.)([^`.\[]+)")
_FULL = (errno.ENOSPC, errno.EDQUOT)

_T = TypeVar("_T")


class ApiError(HTTPException):
    """A rejected request, with the status, message, code and headers of its response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, detail=message, headers=headers)
        self.param, self.code = param, code

    def response(self) -> JSONResponse:
        """The error in OpenAI's format."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return JSONResponse({"error": error}, self.status_code, self.headers)


def _on_refusal(request: Request, error: Exception) -> Response:
    """Answer an error that a route raised, or a request without a route."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"[:200]
    if not isinstance(error, ApiError):
        texts = {404: (f"there is no {where}", "unknown_url"), 405: (f"{where} is not allowed", "method_not_allowed")}
        text, code = texts.get(error.status_code, (error.detail, None))
        error = ApiError(error.status_code, text, code=code, headers=error.headers)
    return error.response()


def _on_storage(request: Request, error: Exception) -> Response:  # noqa: ARG001 (the signature is Starlette's)
    full = isinstance(error, OSError) and error.errno in _FULL
    if full or (isinstance(error, sqlite3.OperationalError) and "full" in str(error)):
        return ApiError(507, "the server's disk is full; nothing was kept", code="insufficient_storage").response()
    return ApiError(500, "the server's storage failed; nothing was kept", code="storage_failed").response()


def _on_bug(request: Request, error: Exception) -> Response:  # noqa: ARG001 (the signature is Starlette's)
    """The stack trace is in the server's output only."""
    return ApiError(500, "internal error", code="internal_error").response()


ON_ERROR = {
    HTTPException: _on_refusal,
    OSError: _on_storage,
    sqlite3.OperationalError: _on_storage,
    Exception: _on_bug,
}


async def chunks(request: Request, most: int, *, around: int = 0) -> AsyncIterator[bytes]:
    """Yield the body as it arrives, at most ``most`` bytes and ``around`` bytes of framing.

    Raises ApiError if the body is longer or says so (413), no data arrives in time (408), or the sender disconnects
    (400).
    """
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or int(length) > most + around:
        raise too_large(most)
    stream, taken = request.stream(), 0
    while True:
        try:
            chunk = await asyncio.wait_for(anext(stream), STALL_S)
        except StopAsyncIteration:
            return
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body stopped coming for {STALL_S:g} s", code="timeout") from None
        except ClientDisconnect:
            raise ApiError(400, "the sender went away") from None
        taken += len(chunk)
        if taken > most + around:
            raise too_large(most)
        yield chunk


def too_large(most: int) -> ApiError:
    """Return the error for a body of more than ``most`` bytes."""
    return ApiError(413, f"too large: at most {most} bytes are taken", code="too_large")


async def read_body(request: Request, kind: type[_T]) -> _T:
    """Return the JSON body as a ``kind``; raises ApiError if it is too long, not JSON, or not a ``kind``."""
    body = b"".join([chunk async for chunk in chunks(request, MOST_JSON_BYTES)])
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        raise ApiError(400, str(error), param=place and place.group(1), code="invalid_request") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON ({error})", code="invalid_json") from None


def found(request: Request, what: str, look_up: Callable[[str], _T | None]) -> _T:
    """Return the ``what`` that the path of the request names; raises ApiError (404) if there is none."""
    item_id = request.path_params[f"{what}_id"]
    item = look_up(item_id)
    if item is None:
        raise ApiError(404, f"there is no {what} {item_id[:80]!r}", param=f"{what}_id", code="not_found")
    return item


def page_response(
    request: Request,
    what: str,
    look_up: Callable[[str | None, int], tuple[list[_T], bool] | None],
    shown: Callable[[_T], dict[str, Any]],
    *,
    limit: int,
    most: int,
) -> JSONResponse:
    """Return the page of ``what`` that the request asks for: at most ``limit`` items, unless it gives another limit up
    to ``most``. ``look_up(after, limit)`` returns the items and if more follow; None if no item has the id ``after``.
    """
    given, after = request.query_params.get("limit", str(limit)), request.query_params.get("after")
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:9]) <= most:
        raise ApiError(400, f"limit is a number from 1 to {most}", param="limit", code="invalid_request")
    page = look_up(after, int(given[:9]))
    if page is None:
        raise ApiError(400, f"there is no {what} {str(after)[:80]!r}", param="after", code="invalid_request")
    objects = [shown(item) for item in page[0]]
    first, last = (objects[0]["id"], objects[-1]["id"]) if objects else (None, None)
    return JSONResponse({"object": "list", "data": objects, "first_id": first, "last_id": last, "has_more": page[1]})
