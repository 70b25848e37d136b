"""Streams one uploaded file out of ``multipart/form-data``. The only module that imports ``python-multipart``.

Does not depend on HTTP or on where the file is stored.
"""

from __future__ import annotations

import os
from pathlib import Path

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

MOST_PARTS = 16
MOST_FIELD_BYTES = 4096
_MOST_NAME = 255


class FormError(ValueError):
    """The form is malformed, or has parts that no upload has. The message is for the sender."""


class TooLargeError(ValueError):
    """The file is larger than allowed."""


class Upload:
    """A form with one part ``file``, whose bytes are written to ``path``; the other parts are ``fields``.

    A context manager: the file is removed on exit unless `keep` was called.
    """

    def __init__(self, path: Path, *, content_type: str, max_bytes: int) -> None:
        """Start the form.

        Raises:
            FormError: ``content_type`` is not that of a form, or has no boundary.
            OSError: the file cannot be created.
        """
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise FormError("send multipart/form-data with a boundary")
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
            raise FormError(str(error)) from None
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.bytes = 0
        self._path, self._max_bytes, self._kept, self._complete, self._parts = path, max_bytes, False, False, 0
        self._name, self._value, self._disposition = bytearray(), bytearray(), b""
        self._field: str | None = None
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")

    def write(self, data: bytes) -> None:
        """Parse the next bytes of the form.

        Raises:
            FormError: the form is malformed.
            TooLargeError: the file is larger than allowed.
            OSError: the disk is full, or fails otherwise.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise FormError(f"the form is broken ({error})") from None

    def finish(self) -> None:
        """Flush the complete file to disk.

        Raises:
            FormError: the form ends early, or contains no file.
            OSError: as in `write`.
        """
        if not self._complete:
            raise FormError("the form ends before its last boundary")
        if self.filename is None:
            raise FormError("the form has no part 'file' with a filename")
        self._file.flush()
        os.fsync(self._file.fileno())

    def keep(self) -> None:
        """Keep the file on exit: ownership passes to the caller."""
        self._kept = True

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()
        finally:
            if not self._kept:
                self._path.unlink(missing_ok=True)

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise FormError(f"the form has more than {MOST_PARTS} parts")
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
            raise FormError("a part of the form has no name")
        name = options[b"name"].decode("utf-8", "replace")
        if name == "file":
            if self.filename is not None:
                raise FormError("the form has two parts 'file'")
            if b"filename" not in options:
                raise FormError("the part 'file' has no filename")
            self.filename = text_of(options[b"filename"])
            return
        if name in self.fields:
            raise FormError(f"the form has two parts {name[:80]!r}")
        self._field = name
        self.fields[name] = ""

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self.bytes += end - start
            if self.bytes > self._max_bytes:
                raise TooLargeError
            self._file.write(memoryview(data)[start:end])
            return
        value = self.fields[self._field] + data[start:end].decode("utf-8", "replace")
        if len(value) > MOST_FIELD_BYTES:
            raise FormError(f"the part {self._field[:80]!r} is longer than {MOST_FIELD_BYTES} bytes")
        self.fields[self._field] = value

    def _end(self) -> None:
        self._complete = True


def text_of(name: bytes) -> str:
    """A file name as text for display, never a path: its last component, printable."""
    last = name.decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in last)[:_MOST_NAME] or "upload"
