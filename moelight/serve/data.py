"""The data directory: its lock, its contents, and the clean-up after a killed server.

::

    DATA/                   0700
      serve.lock            held by the one server that may use the directory
      state.db              files and batches (`store`)
      token                 if no token file is given
      files/FILE_ID         uploads
      batches/BATCH_ID/     a job's directory: output.jsonl, errors.jsonl, worker.log, and its resume state
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from moelight.core.errors import ConfigError
from moelight.serve.jobs import LOG, Job
from moelight.serve.store import OPEN, Store, StoredFile


class DataDirectory:
    """A data directory locked by this process; created if missing."""

    def __init__(self, root: Path) -> None:
        """Lock ``root`` for this process.

        Raises:
            ConfigError: the directory cannot be created or written, or another server uses it.
        """
        self.root = root.absolute()
        self.files, self.batches = self.root / "files", self.root / "batches"
        base = self.root / "state.db"
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = take_lock(self.root / "serve.lock", what=f"--data {root}")
            for own in (self.files, self.batches):
                own.mkdir(mode=0o700, exist_ok=True)
                own.chmod(0o700)
            os.close(os.open(base, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise ConfigError(f"--data {root}: cannot be used ({(error.strerror or str(error)).lower()})") from None
        self.store = Store(base)
        self._sweep()

    def close(self) -> None:
        self.store.close()
        os.close(self._lock)

    def path(self, file: StoredFile) -> Path:
        return self.root / file.path

    def job(self, batch_id: str, source: StoredFile) -> Job:
        return Job(source=self.path(source), directory=self.batches / batch_id)

    def relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def clear_job(self, batch_id: str) -> None:
        """Remove the files that an ended job no longer needs: all but kept files and the log."""
        directory = self.batches / batch_id
        kept = {self.path(file) for file in self.store.files()} | {directory / LOG}
        if directory.is_dir():
            for path in directory.iterdir():
                if path not in kept:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _sweep(self) -> None:
        """Remove unfinished uploads, files whose deletion was interrupted, and leftovers of ended jobs."""
        kept = {self.path(file) for file in self.store.files()}
        for path in self.files.iterdir():
            if path not in kept:
                path.unlink()
        for directory in filter(Path.is_dir, self.batches.iterdir()):
            batch = self.store.batch(directory.name)
            if batch is None:
                shutil.rmtree(directory)
            elif batch.status not in OPEN:
                self.clear_job(directory.name)


def take_lock(path: Path, *, what: str) -> int:
    """A descriptor that holds the lock until it is closed or the process ends.

    Raises:
        ConfigError: another process holds the lock.
    """
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise ConfigError(f"{what}: another moelight serve-batch works there; stop it, or name another") from None
    return held
