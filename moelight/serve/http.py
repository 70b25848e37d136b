"""What all routes share: bounded bodies with a time limit, parameters of a page, and errors in OpenAI's format."""

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

_Asked = TypeVar("_Asked")
_Item = TypeVar("_Item")


class ApiError(HTTPException):
    """A rejected request, with the status, message and code of the response."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, detail=message)
        self.param, self.code = param, code


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return an error in OpenAI's format."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status, headers)


def on_refusal(request: Request, error: Exception) -> Response:
    """Return the response to an error that a route raised, or to a request without a route."""
    if isinstance(error, ApiError):
        return error_response(error.status_code, error.detail, param=error.param, code=error.code)
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"[:200]
    if error.status_code == 404:
        return error_response(404, f"there is no {where}", code="unknown_url")
    if error.status_code == 405:
        return error_response(405, f"{where} is not allowed", code="method_not_allowed", headers=error.headers)
    return error_response(error.status_code, error.detail, headers=error.headers)


def on_storage(request: Request, error: Exception) -> Response:  # noqa: ARG001 (the signature is Starlette's)
    """Return the response to a full disk (507) or another storage failure (500)."""
    full = isinstance(error, OSError) and error.errno in _FULL
    if full or (isinstance(error, sqlite3.OperationalError) and "full" in str(error)):
        return error_response(507, "the server's disk is full; nothing was kept", code="insufficient_storage")
    return error_response(500, "the server's storage failed; nothing was kept", code="storage_failed")


def on_fault(request: Request, error: Exception) -> Response:  # noqa: ARG001 (the signature is Starlette's)
    """Return the response to a bug in the server, without the stack trace, which is in the server's output."""
    return error_response(500, "internal error", code="internal_error")


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


async def read_body(request: Request, kind: type[_Asked]) -> _Asked:
    """Return the JSON body as a ``kind``; raises ApiError if it is too long, not JSON, or not a ``kind``."""
    body = b"".join([chunk async for chunk in chunks(request, MOST_JSON_BYTES)])
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        place = _PLACE.search(text)
        raise ApiError(400, text, param=place and place.group(1), code="invalid_request") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON ({error})", code="invalid_json") from None


def page_of(request: Request, *, limit: int, most: int) -> tuple[str | None, int]:
    """Return ``after`` and ``limit`` of a request for a page; ``limit`` is the default, ``most`` the maximum."""
    given = request.query_params.get("limit", str(limit))
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:9]) <= most:
        raise ApiError(400, f"limit is a number from 1 to {most}", param="limit", code="invalid_request")
    return request.query_params.get("after"), int(given[:9])


def page_response(
    request: Request, found: tuple[list[_Item], bool] | None, what: str, shown: Callable[[_Item], dict[str, Any]]
) -> JSONResponse:
    """Return the page ``found``: its items, and if more follow. None: no ``what`` has the id ``after``."""
    if found is None:
        after = request.query_params["after"]
        raise ApiError(400, f"there is no {what} {after[:80]!r}", param="after", code="invalid_request")
    objects = [shown(item) for item in found[0]]
    first, last = (objects[0]["id"], objects[-1]["id"]) if objects else (None, None)
    return JSONResponse({"object": "list", "data": objects, "first_id": first, "last_id": last, "has_more": found[1]})
