"""Small files, read whole and within a limit: whatever a path names, an answer comes soon and takes little memory.

A regular file only, at the end of any links: a FIFO would wait for its writer, a device never ends. The question is
asked of the open descriptor, so that nothing can take the file's place in between, and the limit holds for what is
read, since some files say a size of 0 and others grow. Refuses to know what files mean, and how to tell a user.
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

MOST_JSON_BYTES = 16 * MiB  # configs of checkpoints have some kilobytes, those with all added tokens a megabyte
_CHUNK_BYTES = MiB
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor of the regular file ``path``, to read. Never waits.

    Raises:
        OSError: there is none, it cannot be opened, or it is no regular file; ``strerror`` says so in words.
        ValueError: no path at all (a null character).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "a directory, not a file", os.fspath(path))
    raise OSError(errno.EINVAL, f"{_KINDS.get(stat.S_IFMT(mode), 'a special file')}, not a file", os.fspath(path))


def read_bytes(path: str | os.PathLike[str], *, most: int) -> bytes:
    """All of the regular file ``path``, which has ``most`` bytes or fewer.

    Raises:
        OSError: as `open_regular`, it cannot be read, or is larger.
        ValueError: as `open_regular`.
    """
    descriptor = open_regular(path)
    try:
        chunks, left = [], most + 1
        while left and (chunk := os.read(descriptor, min(left, _CHUNK_BYTES))):
            chunks.append(chunk)
            left -= len(chunk)
    finally:
        os.close(descriptor)
    if not left:
        raise OSError(errno.EFBIG, f"larger than {format_bytes(most)}", os.fspath(path))
    return b"".join(chunks)


def read_text(path: str | os.PathLike[str], *, most: int) -> str:
    """The same as text in UTF-8, with line breaks as they are.

    Raises:
        OSError: as `read_bytes`.
        ValueError: as `open_regular`, or not UTF-8.
    """
    return read_bytes(path, most=most).decode("utf-8")


def parse_json(text: str, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value that ``text`` writes; ``pairs`` makes objects of their members, and raises no ValueError.

    Raises:
        ValueError: not JSON, nested too deep, or an integer too long to be converted; one line says which.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError("its values nest too deep") from None
    except ValueError:  # of Python's int, the only other one
        raise ValueError(f"an integer of more than {sys.get_int_max_str_digits()} digits") from None


def read_json(path: str | os.PathLike[str], *, most: int = MOST_JSON_BYTES) -> Any:
    """The value that the regular file ``path`` writes.

    Raises:
        OSError: as `read_bytes`.
        ValueError: as `read_text` and `parse_json`.
    """
    return parse_json(read_text(path, most=most))


def read_error_text(error: Exception) -> str:
    """What ``error``, of one of these functions, says went wrong, without the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def read_object(path: Path, *, most: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in the regular file ``path``.

    Raises:
        OSError: as `read_bytes`.
        ValueError: as `read_json`, or another value than an object.
    """
    found = read_json(path, most=most)
    if not isinstance(found, dict):
        raise ValueError("must hold a JSON object")
    return found
