"""The application: OpenAI's Files, Batches and Models, and the health check, behind the guard.

Files are streamed to and from disk; file names of clients are never used as paths.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from moelight.batch.openai_answers import ENDPOINTS
from moelight.serve.auth import Guard
from moelight.serve.http import ON_ERROR, ApiError, Upload, chunks, find_or_404, page_response, read_body
from moelight.serve.store import OPEN, Batch, DataDirectory, StoredFile, private
from moelight.serve.worker import Worker

_HOUR_S = 3600
_FORM_BYTES = 1 << 17  # boundaries, headers and fields around the file
_MOST_FILES, _MOST_BATCHES = 10_000, 100  # of a page
_Key = Annotated[str, msgspec.Meta(max_length=64)]
_Value = Annotated[str, msgspec.Meta(max_length=512)]


class _BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: str
    completion_window: Annotated[str, msgspec.Meta(pattern="^[1-9][0-9]{0,3}h$")]
    metadata: Annotated[dict[_Key, _Value], msgspec.Meta(max_length=16)] | None = None
    output_expires_after: Any = None


class Api:
    """The routes over ``data``, whose batches ``worker`` runs."""

    def __init__(self, data: DataDirectory, worker: Worker, *, model: str, max_file_bytes: int) -> None:
        self._data, self._store, self._worker, self._max_bytes = data, data.store, worker, max_file_bytes
        self._model = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "moelight"}

    def routes(self) -> list[Route]:
        endpoints = {
            ("POST", "/v1/files"): self.create_file,
            ("GET", "/v1/files"): self.files,
            ("GET", "/v1/files/{file_id}"): self.file,
            ("DELETE", "/v1/files/{file_id}"): self.delete_file,
            ("GET", "/v1/files/{file_id}/content"): self.content,
            ("POST", "/v1/batches"): self.create_batch,
            ("GET", "/v1/batches"): self.batches,
            ("GET", "/v1/batches/{batch_id}"): self.batch,
            ("POST", "/v1/batches/{batch_id}/cancel"): self.cancel,
            ("GET", "/v1/models"): self.models,
            ("GET", "/v1/models/{model:path}"): self.model,
            ("GET", "/health"): self.health,
        }
        return [Route(path, endpoint, methods=[method]) for (method, path), endpoint in endpoints.items()]

    async def create_file(self, request: Request) -> Response:
        file_id = f"file-{secrets.token_hex(16)}"
        path, kind = self._data.files / file_id, request.headers.get("content-type", "")
        try:
            with open(path, "xb", opener=private) as out:
                upload = Upload(out, content_type=kind, max_bytes=self._max_bytes)
                async for chunk in chunks(request, self._max_bytes, around=_FORM_BYTES):
                    await run_in_threadpool(upload.write, chunk)
                await run_in_threadpool(upload.finish)
            file = self._data.stored(path, file_id, filename=upload.fields["file"], purpose="batch")
            await run_in_threadpool(self._store.add_file, file)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return JSONResponse(_file_object(file))

    def files(self, request: Request) -> Response:
        order = request.query_params.get("order", "desc")
        if order not in {"asc", "desc"}:
            raise ApiError(400, "order is asc or desc", param="order", code="invalid_request")
        purpose = request.query_params.get("purpose")
        look_up = partial(self._store.page, StoredFile, newest_first=order == "desc", purpose=purpose)
        return page_response(request, "file", look_up, _file_object, limit=_MOST_FILES, max_limit=_MOST_FILES)

    def file(self, request: Request) -> Response:
        return JSONResponse(_file_object(find_or_404(request, "file", self._store.file)))

    def content(self, request: Request) -> Response:
        def look_up(file_id: str) -> StoredFile | None:
            file = self._store.file(file_id)
            return file if file is not None and self._data.path(file).is_file() else None

        file = find_or_404(request, "file", look_up)
        name, headers = f"{file.id}.jsonl", {"X-Content-Type-Options": "nosniff"}
        path = self._data.path(file)
        return FileResponse(path, media_type="application/octet-stream", filename=name, headers=headers)

    def delete_file(self, request: Request) -> Response:
        file = find_or_404(request, "file", self._store.file)
        user = self._store.drop_file(file.id)
        if user is not None:
            message = f"{file.id} is being read by {user}; cancel that first"
            raise ApiError(400, message, param="file_id", code="file_in_use")
        self._data.path(file).unlink(missing_ok=True)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    async def create_batch(self, request: Request) -> Response:
        asked = await read_body(request, _BatchBody)
        if asked.endpoint not in ENDPOINTS:
            message = f"endpoint {asked.endpoint[:80]!r} is not served; {', '.join(ENDPOINTS)} are"
            raise ApiError(400, message, param="endpoint", code="invalid_endpoint")
        if asked.output_expires_after is not None:
            message = "files do not expire here: leave output_expires_after out, and delete the output when it is read"
            raise ApiError(400, message, param="output_expires_after", code="unsupported")
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
        self._worker.wake()
        return JSONResponse(self._batch_object(batch))

    def batches(self, request: Request) -> Response:
        look_up = partial(self._store.page, Batch)
        return page_response(request, "batch", look_up, self._batch_object, limit=20, max_limit=_MOST_BATCHES)

    def batch(self, request: Request) -> Response:
        return JSONResponse(self._batch_object(find_or_404(request, "batch", self._store.batch)))

    def cancel(self, request: Request) -> Response:
        cancelled = self._store.cancel(request.path_params["batch_id"])
        batch = find_or_404(request, "batch", self._store.batch)
        if not cancelled and batch.status not in {"cancelling", "cancelled"}:
            message = f"{batch.id} is {batch.status} and cannot be cancelled any more"
            raise ApiError(400, message, param="batch_id", code="batch_not_cancellable")
        self._worker.wake()
        return JSONResponse(self._batch_object(batch))

    def models(self, request: Request) -> Response:  # noqa: ARG002 (the signature is Starlette's)
        return JSONResponse({"object": "list", "data": [self._model]})

    def model(self, request: Request) -> Response:
        asked, model = request.path_params["model"], self._model["id"]
        if asked != model:
            raise ApiError(404, f"there is no model {asked[:80]!r}; {model} is", param="model", code="model_not_found")
        return JSONResponse(self._model)

    async def health(self, request: Request) -> Response:  # noqa: ARG002 (the signature is Starlette's)
        return JSONResponse({"status": "ok"})

    def _batch_object(self, batch: Batch) -> dict[str, Any]:
        """Return ``batch`` as OpenAI's object; while an open batch is blocked, the reason is among its errors."""
        blocked = self._worker.blocked(batch.id)
        if blocked is not None and batch.status in OPEN:
            batch = replace(batch, errors=(*batch.errors, blocked))
        shown = asdict(batch)
        counts, errors = shown.pop("counts"), shown.pop("errors")
        errors = {"object": "list", "data": errors} if errors else None
        return {**shown, "object": "batch", "model": self._model["id"], "errors": errors, "request_counts": counts}


def _file_object(file: StoredFile) -> dict[str, Any]:
    shown = asdict(file) | {"object": "file", "expires_at": None, "status": "processed", "status_details": None}
    del shown["path"]
    return shown


def make_app(api: Api, *, token: str, hosts: Collection[str] | None) -> Starlette:
    """Return the application; ``token`` and ``hosts``: see `Guard`."""
    guard = Middleware(Guard, token=token, hosts=hosts)
    app = Starlette(routes=api.routes(), middleware=[guard], exception_handlers=ON_ERROR)
    app.router.redirect_slashes = False
    return app
