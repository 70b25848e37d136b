"""OpenAI's Files over HTTP, streamed to and from disk. File names of clients are never used as paths."""

from __future__ import annotations

import os
import secrets
from dataclasses import asdict
from functools import partial
from typing import Any, BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from moelight.core.errors import did_you_mean
from moelight.serve.http import ApiError, chunks, found, page_response, too_large
from moelight.serve.store import DataDirectory, StoredFile, private

MOST_PARTS = 16
MOST_FIELD_BYTES = 4096
_MOST_NAME = 255
_FORM_BYTES = 1 << 17  # boundaries, headers and fields around the file
_MOST_FILES = 10_000


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
                raise too_large(self._max_bytes)
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


def _file_object(file: StoredFile) -> dict[str, Any]:
    """Return ``file`` as OpenAI's object."""
    shown = asdict(file) | {"object": "file", "expires_at": None, "status": "processed", "status_details": None}
    del shown["path"]
    return shown


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

    def page(self, request: Request) -> Response:
        order = request.query_params.get("order", "desc")
        if order not in {"asc", "desc"}:
            raise ApiError(400, "order is asc or desc", param="order", code="invalid_request")
        purpose = request.query_params.get("purpose")
        look_up = partial(self._store.page, StoredFile, newest_first=order == "desc", purpose=purpose)
        return page_response(request, "file", look_up, _file_object, limit=_MOST_FILES, most=_MOST_FILES)

    def retrieve(self, request: Request) -> Response:
        return JSONResponse(_file_object(found(request, "file", self._store.file)))

    def content(self, request: Request) -> Response:
        file = found(request, "file", self._there)
        name, headers = f"{file.id}.jsonl", {"X-Content-Type-Options": "nosniff"}
        path = self._data.path(file)
        return FileResponse(path, media_type="application/octet-stream", filename=name, headers=headers)

    def delete(self, request: Request) -> Response:
        file = found(request, "file", self._store.file)
        user = self._store.drop_file(file.id)
        if user is not None:
            message = f"{file.id} is being read by {user}; cancel that first"
            raise ApiError(400, message, param="file_id", code="file_in_use")
        self._data.path(file).unlink(missing_ok=True)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    def _there(self, file_id: str) -> StoredFile | None:
        file = self._store.file(file_id)
        return file if file is not None and self._data.path(file).is_file() else None
