"""The application: routes of batches, the model and the health check beside those of files, behind the guard."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moelight.serve.auth import Guard
from moelight.serve.files import FileRoutes
from moelight.serve.http import ON_ERROR, ApiError, found, page_response, read_body
from moelight.serve.store import OPEN, Batch, BatchFailure, DataDirectory, Store
from moelight.serve.worker import ENDPOINTS

MOST_REQUESTS = 64  # at once
_HOUR_S = 3600
_Key = Annotated[str, msgspec.Meta(max_length=64)]
_Value = Annotated[str, msgspec.Meta(max_length=512)]


class _BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: str
    completion_window: Annotated[str, msgspec.Meta(pattern="^[1-9][0-9]{0,3}h$")]
    metadata: Annotated[dict[_Key, _Value], msgspec.Meta(max_length=16)] | None = None
    output_expires_after: Literal[None] = None


class BatchRoutes:
    """The routes below ``/v1/batches``."""

    def __init__(
        self, store: Store, *, model: str, wake: Callable[[], None], waits: Callable[[str], BatchFailure | None]
    ) -> None:
        self._store, self._model, self._wake, self._waits = store, model, wake, waits

    def routes(self) -> list[Route]:
        return [
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches", self.page, methods=["GET"]),
            Route("/v1/batches/{batch_id}", self.retrieve, methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        asked = await read_body(request, _BatchBody)
        if asked.endpoint not in ENDPOINTS:
            message = f"endpoint {asked.endpoint[:80]!r} is not served; {' and '.join(ENDPOINTS)} are"
            raise ApiError(400, message, param="endpoint", code="invalid_endpoint")
        now = int(time.time())
        batch = Batch(
            id=f"batch_{secrets.token_hex(16)}",
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            created_at=now,
            expires_at=now + int(asked.completion_window[:-1]) * _HOUR_S,
            metadata=asked.metadata,
        )
        if not await run_in_threadpool(self._store.add_batch, batch):
            message = f"there is no file {asked.input_file_id[:80]!r}; upload one with purpose batch"
            raise ApiError(400, message, param="input_file_id", code="invalid_input_file")
        self._wake()
        return JSONResponse(self._object(batch))

    def page(self, request: Request) -> Response:
        return page_response(request, "batch", partial(self._store.page, Batch), self._object, limit=20, most=100)

    def retrieve(self, request: Request) -> Response:
        return JSONResponse(self._object(found(request, "batch", self._store.batch)))

    def cancel(self, request: Request) -> Response:
        cancelled = self._store.cancel(request.path_params["batch_id"])
        batch = found(request, "batch", self._store.batch)
        if not cancelled and batch.status not in {"cancelling", "cancelled"}:
            message = f"{batch.id} is {batch.status} and cannot be cancelled any more"
            raise ApiError(400, message, param="batch_id", code="batch_not_cancellable")
        self._wake()
        return JSONResponse(self._object(batch))

    def _object(self, batch: Batch) -> dict[str, Any]:
        """Return ``batch`` as OpenAI's object; while an open batch is blocked, the reason is among its errors."""
        waits = self._waits(batch.id)
        if waits is not None and batch.status in OPEN:
            batch = replace(batch, errors=(*batch.errors, waits))
        shown = asdict(batch)
        counts, errors = shown.pop("counts"), shown.pop("errors")
        errors = {"object": "list", "data": errors} if errors else None
        return {**shown, "object": "batch", "model": self._model, "errors": errors, "request_counts": counts}


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
    """Return the application over ``data``.

    ``wake`` is called when a batch is created or is to be cancelled; ``waits`` returns the reason why a batch is
    blocked, or None; ``hosts``: see `Guard`.
    """
    files = FileRoutes(data, max_bytes=max_file_bytes)
    batches = BatchRoutes(data.store, model=model, wake=wake, waits=waits)
    guard = Middleware(Guard, token=token, hosts=hosts, most_requests=MOST_REQUESTS)
    app = Starlette(
        routes=[*files.routes(), *batches.routes(), *_model_routes(model), Route("/health", _health, methods=["GET"])],
        middleware=[guard],
        exception_handlers=ON_ERROR,
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
