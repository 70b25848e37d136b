"""Bounded reads of small regular files, through any links: no path can block the reader or exhaust memory.

Readers raise OSError for a file that cannot be read or is larger, ValueError for wrong contents or a null character.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moelight.core.units import MiB, format_bytes

MOST_JSON_BYTES = 16 * MiB  # configs of checkpoints take some kilobytes, with all added tokens a megabyte
_CHUNK_BYTES = MiB
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_regular(path: str | os.PathLike[str]) -> int:
    """A read-only descriptor of the regular file ``path``; never blocks. Its OSError has the reason in ``strerror``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "a directory, not a file", os.fspath(path))
    raise OSError(errno.EINVAL, f"{_KINDS.get(stat.S_IFMT(mode), 'a special file')}, not a file", os.fspath(path))


def read_bytes(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """The contents of the regular file ``path``, at most ``max_bytes`` bytes."""
    chunks, left = [], max_bytes + 1
    with open(open_regular(path), "rb", buffering=0) as file:
        while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
            chunks.append(chunk)
            left -= len(chunk)
    if not left:
        raise OSError(errno.EFBIG, f"larger than {format_bytes(max_bytes)}", os.fspath(path))
    return b"".join(chunks)


def read_text(path: str | os.PathLike[str], *, max_bytes: int) -> str:
    """The contents of the regular file ``path`` decoded as UTF-8, line breaks unchanged."""
    return read_bytes(path, max_bytes=max_bytes).decode("utf-8")


def parse_json(text: str, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The JSON value in ``text``, else a ValueError of one line; ``pairs`` builds objects from their members and raises
    no ValueError."""
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError("its values nest too deep") from None
    except ValueError:  # from int(), the only other source
        raise ValueError(f"an integer of more than {sys.get_int_max_str_digits()} digits") from None


def read_json(path: str | os.PathLike[str], *, max_bytes: int = MOST_JSON_BYTES) -> Any:
    """The JSON value in the regular file ``path``."""
    return parse_json(read_text(path, max_bytes=max_bytes))


def read_error_text(error: Exception) -> str:
    """The reason of an ``error`` of these functions, without the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def read_object(path: Path, *, max_bytes: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in the regular file ``path``."""
    content = read_json(path, max_bytes=max_bytes)
    if not isinstance(content, dict):
        raise ValueError("must hold a JSON object")
    return content
