"""OpenAI's Files over HTTP: uploads streamed to disk, downloads streamed from disk. File names are never used as
paths."""

from __future__ import annotations

import secrets
import time
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from moelight.core.errors import did_you_mean
from moelight.serve.data import DataDirectory
from moelight.serve.errors import ApiError
from moelight.serve.multipart import FormError, TooLargeError, Upload
from moelight.serve.request_body import chunks, page_of, refuse_length, too_large
from moelight.serve.store import StoredFile

_FORM_BYTES = 1 << 17  # boundaries, headers and fields around the file
_MOST_FILES = 10_000


def file_object(file: StoredFile) -> dict[str, Any]:
    """The file as OpenAI's object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def page_object(objects: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    """A page of files or batches."""
    first, last = (objects[0]["id"], objects[-1]["id"]) if objects else (None, None)
    return {"object": "list", "data": objects, "first_id": first, "last_id": last, "has_more": more}


class FileRoutes:
    """The routes below ``/v1/files``."""

    def __init__(self, data: DataDirectory, *, max_bytes: int) -> None:
        self._data, self._store, self._max_bytes = data, data.store, max_bytes

    def routes(self) -> list[Route]:
        return [
            Route("/v1/files", self.create, methods=["POST"]),
            Route("/v1/files", self.page, methods=["GET"]),
            Route("/v1/files/{file_id}", self.retrieve, methods=["GET"]),
            Route("/v1/files/{file_id}", self.delete, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", self.content, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        refuse_length(request, self._max_bytes, around=_FORM_BYTES)
        file_id = f"file-{secrets.token_hex(16)}"
        path = self._data.files / file_id
        taken = 0
        try:
            kind = request.headers.get("content-type", "")
            with Upload(path, content_type=kind, max_bytes=self._max_bytes) as upload:
                async for chunk in chunks(request):
                    taken += len(chunk)
                    if taken > self._max_bytes + _FORM_BYTES:
                        raise TooLargeError
                    await run_in_threadpool(upload.write, chunk)
                await run_in_threadpool(upload.finish)
                _check_fields(upload)
                file = StoredFile(
                    id=file_id,
                    path=self._data.relative(path),
                    filename=str(upload.filename),
                    purpose="batch",
                    bytes=upload.bytes,
                    created_at=int(time.time()),
                )
                await run_in_threadpool(self._store.add_file, file)
                upload.keep()
        except FormError as error:
            raise ApiError(400, str(error), param="file", code="invalid_form") from None
        except TooLargeError:
            raise too_large(self._max_bytes) from None
        return JSONResponse(file_object(file))

    def page(self, request: Request) -> Response:
        after, limit = page_of(request, limit=_MOST_FILES, most=_MOST_FILES)
        order = request.query_params.get("order", "desc")
        if order not in {"asc", "desc"}:
            raise ApiError(400, "order is asc or desc", param="order", code="invalid_request")
        purpose = request.query_params.get("purpose")
        found = self._store.page_of_files(after=after, limit=limit, newest_first=order == "desc", purpose=purpose)
        if found is None:
            raise ApiError(400, f"there is no file {str(after)[:80]!r}", param="after", code="invalid_request")
        return JSONResponse(page_object([file_object(file) for file in found[0]], found[1]))

    def retrieve(self, request: Request) -> Response:
        return JSONResponse(file_object(self._find(request)))

    def content(self, request: Request) -> Response:
        file = self._find(request)
        path = self._data.path(file)
        if not path.is_file():
            raise _no_file(file.id)
        headers = {"X-Content-Type-Options": "nosniff"}
        return FileResponse(path, media_type="application/octet-stream", filename=f"{file.id}.jsonl", headers=headers)

    def delete(self, request: Request) -> Response:
        file = self._find(request)
        user = self._store.drop_file(file.id)
        if user is not None:
            message = f"{file.id} is being read by {user}; cancel that first"
            raise ApiError(400, message, param="file_id", code="file_in_use")
        self._data.path(file).unlink(missing_ok=True)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    def _find(self, request: Request) -> StoredFile:
        file_id = request.path_params["file_id"]
        file = self._store.file(file_id)
        if file is None:
            raise _no_file(file_id)
        return file


def _no_file(file_id: str) -> ApiError:
    return ApiError(404, f"there is no file {file_id[:80]!r}", param="file_id", code="not_found")


def _check_fields(upload: Upload) -> None:
    for name in upload.fields:
        if name.startswith("expires_after"):
            message = "files do not expire here: leave expires_after out, and delete the file when it is done with"
            raise ApiError(400, message, param="expires_after", code="unsupported")
        if name != "purpose":
            hint = did_you_mean(name, ["purpose", "file"])
            raise ApiError(400, f"unknown field {name[:80]!r}{hint}", param=name[:80], code="unknown_field")
    if upload.fields.get("purpose") != "batch":
        raise ApiError(400, "purpose is batch: files are for no other here", param="purpose", code="invalid_purpose")
    if not upload.bytes:
        raise ApiError(400, "the file is empty", param="file", code="empty_file")
