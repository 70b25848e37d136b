"""Every failure over HTTP in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

_FULL = (errno.ENOSPC, errno.EDQUOT)


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
    """The error as a response."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status, headers)


def on_refusal(request: Request, error: Exception) -> Response:
    """The response to an error that a route raised, or to a request without a route."""
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
    """The response to a full disk (507) or another storage failure (500)."""
    full = isinstance(error, OSError) and error.errno in _FULL
    if full or (isinstance(error, sqlite3.OperationalError) and "full" in str(error)):
        return error_response(507, "the server's disk is full; nothing was kept", code="insufficient_storage")
    return error_response(500, "the server's storage failed; nothing was kept", code="storage_failed")


def on_fault(request: Request, error: Exception) -> Response:  # noqa: ARG001 (the signature is Starlette's)
    """The response to a bug in the server: the stack trace is in the server's output, not in the response."""
    return error_response(500, "internal error", code="internal_error")
