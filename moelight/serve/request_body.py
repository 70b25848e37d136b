"""Reads request bodies, chunk by chunk and with a time limit, and the parameters of a page."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from moelight.serve.errors import ApiError

MOST_JSON_BYTES = 1 << 20
STALL_S = 30.0  # the longest wait for the next bytes of a body
# The place of a fault in msgspec's messages: "... field `name`" or "... at `$.name[...]`".
_PLACE = re.compile(r"(?:field `|at `\$\.)([^`.\[]+)")

_Asked = TypeVar("_Asked")


async def chunks(request: Request) -> AsyncIterator[bytes]:
    """The chunks of the body as they arrive.

    Raises:
        ApiError: no data arrived for too long (408), or the sender disconnected.
    """
    stream = request.stream()
    while True:
        try:
            yield await asyncio.wait_for(anext(stream), STALL_S)
        except StopAsyncIteration:
            return
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body stopped coming for {STALL_S:g} s", code="timeout") from None
        except ClientDisconnect:
            raise ApiError(400, "the sender went away") from None


def refuse_length(request: Request, most: int, *, around: int = 0) -> None:
    """Reject a body whose stated length exceeds ``most`` bytes plus ``around`` bytes of framing."""
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or int(length) > most + around:
        raise too_large(most)


def too_large(most: int) -> ApiError:
    """The error for a body of more than ``most`` bytes."""
    return ApiError(413, f"too large: at most {most} bytes are taken", code="too_large")


async def read_body(request: Request, kind: type[_Asked]) -> _Asked:
    """The JSON body as a ``kind``; other fields are rejected.

    Raises:
        ApiError: the body is too long, not JSON, or not a ``kind``.
    """
    refuse_length(request, MOST_JSON_BYTES)
    body = bytearray()
    async for chunk in chunks(request):
        body += chunk
        if len(body) > MOST_JSON_BYTES:
            raise too_large(MOST_JSON_BYTES)
    try:
        return msgspec.json.decode(bytes(body), type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        place = _PLACE.search(text)
        raise ApiError(400, text, param=place and place.group(1), code="invalid_request") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON ({error})", code="invalid_json") from None


def page_of(request: Request, *, limit: int, most: int) -> tuple[str | None, int]:
    """``after`` and ``limit`` of a request for a page; ``limit`` is the default, ``most`` the maximum."""
    given = request.query_params.get("limit", str(limit))
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:9]) <= most:
        raise ApiError(400, f"limit is a number from 1 to {most}", param="limit", code="invalid_request")
    return request.query_params.get("after"), int(given[:9])
