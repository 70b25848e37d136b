"""The application: routes of batches, the model and the health check beside those of files, behind the guard."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, fields
from typing import Annotated, Any, Literal

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moelight.serve.auth import Guard
from moelight.serve.files import FileRoutes
from moelight.serve.http import ApiError, on_fault, on_refusal, on_storage, page_of, page_response, read_body
from moelight.serve.store import OPEN, Batch, BatchFailure, DataDirectory, Store
from moelight.serve.worker import ENDPOINTS

MOST_REQUESTS = 64  # at once
_HOUR_S = 3600
_SAME = tuple(field.name for field in fields(Batch) if field.name not in {"errors", "counts"})
_Key = Annotated[str, msgspec.Meta(max_length=64)]
_Value = Annotated[str, msgspec.Meta(max_length=512)]


class _BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: str
    completion_window: Annotated[str, msgspec.Meta(pattern="^[1-9][0-9]{0,3}h$")]
    metadata: Annotated[dict[_Key, _Value], msgspec.Meta(max_length=16)] | None = None
    output_expires_after: Literal[None] = None


def _batch_object(batch: Batch, model: str, waits: BatchFailure | None) -> dict[str, Any]:
    """Return ``batch`` as OpenAI's object; while an open batch is blocked, ``waits`` is among its errors."""
    told = batch.errors if waits is None or batch.status not in OPEN else (*batch.errors, waits)
    return {
        **{name: getattr(batch, name) for name in _SAME},
        "object": "batch",
        "model": model,
        "errors": {"object": "list", "data": [asdict(fault) for fault in told]} if told else None,
        "request_counts": asdict(batch.counts),
    }


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
        after, limit = page_of(request, limit=20, most=100)
        return page_response(request, self._store.page_of_batches(after=after, limit=limit), "batch", self._object)

    def retrieve(self, request: Request) -> Response:
        return JSONResponse(self._object(self._find(request)))

    def cancel(self, request: Request) -> Response:
        batch = self._find(request)
        if not self._store.cancel(batch.id):
            batch = self._find(request)
            if batch.status not in {"cancelling", "cancelled"}:
                message = f"{batch.id} is {batch.status} and cannot be cancelled any more"
                raise ApiError(400, message, param="batch_id", code="batch_not_cancellable")
        self._wake()
        return JSONResponse(self._object(self._find(request)))

    def _find(self, request: Request) -> Batch:
        batch_id = request.path_params["batch_id"]
        batch = self._store.batch(batch_id)
        if batch is None:
            raise ApiError(404, f"there is no batch {batch_id[:80]!r}", param="batch_id", code="not_found")
        return batch

    def _object(self, batch: Batch) -> dict[str, Any]:
        return _batch_object(batch, self._model, self._waits(batch.id))


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
