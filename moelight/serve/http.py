"""Reading of requests and writing of responses: bounded bodies with a time limit, JSON or forms, look-ups, pages, and
errors in OpenAI's format."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, BinaryIO, TypeVar

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from moelight.core.errors import did_you_mean

MOST_JSON_BYTES = 1 << 20
MOST_PARTS = 16
MOST_FIELD_BYTES = 4096
_MOST_NAME = 255
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
        served = "only batches are served: upload a file with POST /v1/files, and run it with POST /v1/batches"
        texts = {
            404: (f"there is no {where}; {served}", "unknown_url"),
            405: (f"{where} is not allowed", "method_not_allowed"),
        }
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


async def chunks(request: Request, max_bytes: int, *, around: int = 0) -> AsyncIterator[bytes]:
    """Yield the body as it arrives, at most ``max_bytes`` bytes and ``around`` bytes of framing.

    Raises ApiError if the body is longer or says so (413), no data arrives in time (408), or the sender disconnects
    (400).
    """
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or int(length) > max_bytes + around:
        raise _too_large(max_bytes)
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
        if taken > max_bytes + around:
            raise _too_large(max_bytes)
        yield chunk


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"too large: at most {max_bytes} bytes are taken", code="too_large")


async def read_body(request: Request, kind: type[_T]) -> _T:
    """Return the JSON body as a ``kind``; raises ApiError if it is too long, not JSON, or not a ``kind``."""
    body = b"".join([chunk async for chunk in chunks(request, MOST_JSON_BYTES)])
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        match = _PLACE.search(str(error))
        raise ApiError(400, str(error), param=match and match.group(1), code="invalid_request") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON ({error})", code="invalid_json") from None


def _broken(message: str) -> ApiError:
    return ApiError(400, message, param="file", code="invalid_form")


class Upload:
    """Parser of a form, which writes the contents of the part ``file`` to ``out``.

    ``fields`` are the other parts, and for ``file`` the name of the file. Every method raises ApiError for a malformed
    or too long form, and OSError where the disk is full or fails.
    """

    def __init__(self, out: BinaryIO, *, content_type: str, max_bytes: int) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise _broken("send multipart/form-data with a boundary")
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_header_field": self._header_name,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_end,
                    "on_part_data": self._data,
                },
            )
        except FormParserError as error:
            raise _broken(str(error)) from None
        self.fields: dict[str, str] = {}
        self.bytes = 0
        self._out, self._max_bytes = out, max_bytes
        self._name, self._value, self._disposition = bytearray(), bytearray(), b""
        self._field = ""

    def write(self, data: bytes) -> None:
        """Parse the next bytes of the form."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _broken(f"the form is broken ({error})") from None

    def finish(self) -> None:
        """Check the form, and flush the complete file to disk."""
        if self._parser.state != MultipartState.END:
            raise _broken("the form ends before its last boundary")
        if "file" not in self.fields:
            raise _broken("the form has no part 'file' with a filename")
        self._out.flush()
        os.fsync(self._out.fileno())
        for name in self.fields:
            if name.startswith("expires_after"):
                message = "files do not expire here: leave expires_after out, and delete the file when it is done with"
                raise ApiError(400, message, param="expires_after", code="unsupported")
            if name not in ("purpose", "file"):
                hint = did_you_mean(name, ["purpose", "file"])
                raise ApiError(400, f"unknown field {name[:80]!r}{hint}", param=name[:80], code="unknown_field")
        if self.fields.get("purpose") != "batch":
            message = "purpose is batch: files are for no other here"
            raise ApiError(400, message, param="purpose", code="invalid_purpose")
        if not self.bytes:
            raise ApiError(400, "the file is empty", param="file", code="empty_file")

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._name.clear()
        self._value.clear()

    def _headers_end(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise _broken("a part of the form has no name")
        name = options[b"name"].decode("utf-8", "replace")
        if name in self.fields:
            raise _broken(f"the form has two parts {name[:80]!r}")
        if name == "file" and b"filename" not in options:
            raise _broken("the part 'file' has no filename")
        if len(self.fields) == MOST_PARTS:
            raise _broken(f"the form has more than {MOST_PARTS} parts")
        self.fields[name] = _shown_name(options[b"filename"]) if name == "file" else ""
        self._field, self._disposition = name, b""

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field == "file":
            self.bytes += end - start
            if self.bytes > self._max_bytes:
                raise _too_large(self._max_bytes)
            self._out.write(memoryview(data)[start:end])
            return
        value = self.fields[self._field] + data[start:end].decode("utf-8", "replace")
        if len(value) > MOST_FIELD_BYTES:
            raise _broken(f"the part {self._field[:80]!r} is longer than {MOST_FIELD_BYTES} bytes")
        self.fields[self._field] = value


def _shown_name(name: bytes) -> str:
    """Return the last component of a file name, printable, for display; it is never used as a path."""
    last = name.decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in last)[:_MOST_NAME] or "upload"


def find_or_404(request: Request, kind: str, look_up: Callable[[str], _T | None]) -> _T:
    """Return the ``kind`` that the path of the request names; raises ApiError (404) if there is none."""
    item_id = request.path_params[f"{kind}_id"]
    item = look_up(item_id)
    if item is None:
        raise ApiError(404, f"there is no {kind} {item_id[:80]!r}", param=f"{kind}_id", code="not_found")
    return item


def page_response(
    request: Request,
    kind: str,
    look_up: Callable[[str | None, int], tuple[list[_T], bool] | None],
    shown: Callable[[_T], dict[str, Any]],
    *,
    limit: int,
    max_limit: int,
) -> JSONResponse:
    """Return the page of ``kind`` that the request asks for: at most ``limit`` items, unless it gives another limit up
    to ``max_limit``. ``look_up(after, limit)`` returns the items and if more follow; None if no item has the id
    ``after``.
    """
    requested, after = request.query_params.get("limit", str(limit)), request.query_params.get("after")
    if not requested.isascii() or not requested.isdigit() or not 1 <= int(requested[:9]) <= max_limit:
        raise ApiError(400, f"limit is a number from 1 to {max_limit}", param="limit", code="invalid_request")
    page = look_up(after, int(requested[:9]))
    if page is None:
        raise ApiError(400, f"there is no {kind} {str(after)[:80]!r}", param="after", code="invalid_request")
    objects = [shown(item) for item in page[0]]
    first, last = (objects[0]["id"], objects[-1]["id"]) if objects else (None, None)
    return JSONResponse({"object": "list", "data": objects, "first_id": first, "last_id": last, "has_more": page[1]})
