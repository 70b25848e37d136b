"""OpenAI's Files over HTTP, streamed to and from disk. File names of clients are never used as paths."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from moelight.core.errors import did_you_mean
from moelight.serve.http import ApiError, chunks, page_of, page_response, too_large
from moelight.serve.store import DataDirectory, StoredFile

MOST_PARTS = 16
MOST_FIELD_BYTES = 4096
_MOST_NAME = 255
_FORM_BYTES = 1 << 17  # boundaries, headers and fields around the file
_MOST_FILES = 10_000


def _broken(message: str) -> ApiError:
    return ApiError(400, message, param="file", code="invalid_form")


class Upload:
    """A form with one part ``file``, whose bytes are written to ``path``; the other parts are ``fields``.

    A context manager: the file is removed on exit unless ``kept``. Every method raises ApiError for a malformed or too
    long form, and OSError where the disk is full or fails.
    """

    def __init__(self, path: Path, *, content_type: str, max_bytes: int) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise _broken("send multipart/form-data with a boundary")
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._header_name,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_end,
                    "on_part_data": self._data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _broken(str(error)) from None
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.bytes = 0
        self.kept = False
        self._path, self._max_bytes, self._complete, self._parts = path, max_bytes, False, 0
        self._name, self._value, self._disposition = bytearray(), bytearray(), b""
        self._field: str | None = None
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")

    def write(self, data: bytes) -> None:
        """Parse the next bytes of the form."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _broken(f"the form is broken ({error})") from None

    def finish(self) -> None:
        """Flush the complete file to disk."""
        if not self._complete:
            raise _broken("the form ends before its last boundary")
        if self.filename is None:
            raise _broken("the form has no part 'file' with a filename")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()
        finally:
            if not self.kept:
                self._path.unlink(missing_ok=True)

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise _broken(f"the form has more than {MOST_PARTS} parts")
        self._field, self._disposition = None, b""

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
        if name in self.fields or (name == "file" and self.filename is not None):
            raise _broken(f"the form has two parts {name[:80]!r}")
        if name != "file":
            self._field = name
            self.fields[name] = ""
        elif b"filename" in options:
            self.filename = _shown_name(options[b"filename"])
        else:
            raise _broken("the part 'file' has no filename")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self.bytes += end - start
            if self.bytes > self._max_bytes:
                raise too_large(self._max_bytes)
            self._file.write(memoryview(data)[start:end])
            return
        value = self.fields[self._field] + data[start:end].decode("utf-8", "replace")
        if len(value) > MOST_FIELD_BYTES:
            raise _broken(f"the part {self._field[:80]!r} is longer than {MOST_FIELD_BYTES} bytes")
        self.fields[self._field] = value

    def _end(self) -> None:
        self._complete = True


def _shown_name(name: bytes) -> str:
    """Return the last component of a file name, printable, for display; it is never used as a path."""
    last = name.decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in last)[:_MOST_NAME] or "upload"


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


def file_object(file: StoredFile) -> dict[str, Any]:
    """Return ``file`` as OpenAI's object."""
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
        file_id = f"file-{secrets.token_hex(16)}"
        path = self._data.files / file_id
        kind = request.headers.get("content-type", "")
        with Upload(path, content_type=kind, max_bytes=self._max_bytes) as upload:
            async for chunk in chunks(request, self._max_bytes, around=_FORM_BYTES):
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
            upload.kept = True
        return JSONResponse(file_object(file))

    def page(self, request: Request) -> Response:
        after, limit = page_of(request, limit=_MOST_FILES, most=_MOST_FILES)
        order = request.query_params.get("order", "desc")
        if order not in {"asc", "desc"}:
            raise ApiError(400, "order is asc or desc", param="order", code="invalid_request")
        purpose = request.query_params.get("purpose")
        found = self._store.page_of_files(after=after, limit=limit, newest_first=order == "desc", purpose=purpose)
        return page_response(request, found, "file", file_object)

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
