"""The application: routes of files, batches, the model and the health check, behind the guard."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moelight.serve.auth import Guard
from moelight.serve.batches import BatchRoutes
from moelight.serve.data import DataDirectory
from moelight.serve.errors import ApiError, on_fault, on_refusal, on_storage
from moelight.serve.files import FileRoutes
from moelight.serve.store import BatchFailure

MOST_REQUESTS = 64  # at once


def make_app(
    data: DataDirectory,
    *,
    model: str,
    token: str,
    wake: Callable[[], None],
    max_file_bytes: int,
    hosts: Collection[str] | None,
    waits: Callable[[str], BatchFailure | None] = lambda _: None,
) -> Starlette:
    """The application over ``data``.

    ``wake`` is called when a batch is created or to be cancelled; ``hosts``: see `Guard`; ``waits`` returns the reason
    why a batch is blocked, or None.
    """
    files = FileRoutes(data, max_bytes=max_file_bytes)
    batches = BatchRoutes(data.store, model=model, wake=wake, waits=waits)
    guard = Middleware(Guard, token=token, hosts=hosts, most_requests=MOST_REQUESTS)
    app = Starlette(
        routes=[*files.routes(), *batches.routes(), *_model_routes(model), Route("/health", _health, methods=["GET"])],
        middleware=[guard],
        exception_handlers={
            HTTPException: on_refusal,
            OSError: on_storage,
            sqlite3.OperationalError: on_storage,
            Exception: on_fault,
        },
    )
    app.router.redirect_slashes = False
    return app


def _model_routes(model: str) -> list[Route]:
    described = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "moelight"}

    def page(request: Request) -> Response:  # noqa: ARG001 (the signature is Starlette's)
        return JSONResponse({"object": "list", "data": [described]})

    def retrieve(request: Request) -> Response:
        asked = request.path_params["model"]
        if asked != model:
            raise ApiError(404, f"there is no model {asked[:80]!r}; {model} is", param="model", code="model_not_found")
        return JSONResponse(described)

    return [Route("/v1/models", page, methods=["GET"]), Route("/v1/models/{model:path}", retrieve, methods=["GET"])]


async def _health(request: Request) -> Response:  # noqa: ARG001 (the signature is Starlette's)
    return JSONResponse({"status": "ok"})
