"""Files that a job writes: checked to be writable before any work, and replaced atomically."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from moelight.core.errors import InputError, StorageError

STANDARD_OUTPUT = Path("-")
_OF_THE_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
_STREAMS = ("/dev/std", "/dev/fd/", "/proc/")


def writes_directly(path: Path) -> bool:
    """True for standard output, pipes and devices, which a finished file cannot replace."""
    if path == STANDARD_OUTPUT or str(path).startswith(_STREAMS):
        return True
    mode = mode_of(path)
    return mode is not None and not stat.S_ISREG(mode)


def mode_of(path: Path) -> int | None:
    """The mode of the file at ``path``, links followed; None if there is none or the name is invalid."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return None


def check_writable(path: Path, *, label: str) -> None:
    """Raise InputError if ``path`` cannot be written; leaves no file behind."""
    with clear(path, label):
        with contextlib.suppress(FileNotFoundError):
            os.lstat(path)
        if path.is_dir():
            raise InputError(f"{label} {path}: cannot be written, it is a directory", code="output_path")
        if writes_directly(path):
            return
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        partial = partial_of(path)
        os.close(create_partial(partial))
        partial.unlink()


@contextlib.contextmanager
def stream_file(path: Path, *, label: str) -> Iterator[Callable[[bytes], None]]:
    """Yield a function that writes bytes to ``path`` at once, from its beginning; ``-`` is standard output."""
    with clear(path, label):
        file: BinaryIO = sys.stdout.buffer if path == STANDARD_OUTPUT else path.open("wb")

    def write(data: bytes) -> None:
        with clear(path, label):
            file.write(data)
            file.flush()

    try:
        yield write
    finally:
        if path != STANDARD_OUTPUT:
            # After a failed write, closing fails again, and the first failure is the one to report.
            with contextlib.suppress(OSError):
                file.close()


@contextlib.contextmanager
def whole_file(path: Path, *, label: str) -> Iterator[Callable[[bytes], None]]:
    """Yield a function that appends bytes to the new contents of ``path``, which appear once the block ends without
    error.

    Pipes, devices and ``-`` (standard output) are written directly. After an InputError (disk full, directory removed)
    an earlier file is unchanged.
    """
    if writes_directly(path):
        with stream_file(path, label=label) as write:
            yield write
        return
    partial = partial_of(path)
    with clear(path, label):
        file = os.fdopen(create_partial(partial), "wb")

    def append(data: bytes) -> None:
        with clear(path, label):
            file.write(data)

    try:
        yield append
        with clear(path, label):
            file.flush()
            os.fsync(file.fileno())
            if path.exists():
                shutil.copymode(path, partial)
            partial.replace(target(path))
    finally:
        with contextlib.suppress(OSError):
            file.close()
        partial.unlink(missing_ok=True)


def target(path: Path) -> Path:
    """``path`` with links resolved, so that a replaced file keeps the links to it."""
    return Path(os.path.realpath(path))


def partial_of(path: Path) -> Path:
    """The sibling of ``path`` that replaces it when it is written."""
    final = target(path)
    return final.with_name(f".{final.name[:50]}.{os.getpid()}.partial")


def create_partial(partial: Path) -> int:
    """Open ``partial`` for writing from its beginning; follows no symlink."""
    return os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)


@contextlib.contextmanager
def clear(path: Path, label: str) -> Iterator[None]:
    """Raise file system errors as one-line InputErrors. A BrokenPipeError passes: nothing reads the output any more."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = isinstance(error, FileNotFoundError)
        reason = f"there is no directory {path.parent}" if missing else f"{path.parent} is not a directory"
        raise InputError(f"{label} {path}: cannot be written, {reason}", code="output_path") from None
    except (OSError, ValueError) as error:
        raise refused_write(error, f"{label} {path}") from None


def refused_write(error: OSError | ValueError, label: str, *, note: str = "") -> InputError:
    """The error of a write to ``label`` that the system refused, a `StorageError` if the disk is full or fails;
    ``note`` ends the message."""
    number, reason = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
    kind = StorageError if number in _OF_THE_DISK else InputError
    return kind(f"{label}: cannot be written ({(reason or str(error)).lower()}){note}", code="output_path")
