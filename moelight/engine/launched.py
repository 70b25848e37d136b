"""Ranks that torchrun starts, a process of the same command for each, instead of rank 0::

    torchrun --nproc-per-node 2 -m moelight.cli.main generate prompts.jsonl -o answers.jsonl

Rank 0 does what the command says; the others follow its engine. In torchrun's store they learn where rank 0 hands them
their ends of the connections between ranks.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelight.core.errors import ConfigError, RankError

if TYPE_CHECKING:
    from torch.distributed import Store

    from moelight.kernels.ranks import Endpoints

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
END: dict[str, Any] = {}
_RANK_BYTES, _MOST_DESCRIPTORS = 4, 253  # as many are handed over at once


@dataclass(frozen=True, slots=True)
class Launch:
    """This process as ``rank`` of ``count`` that torchrun started."""

    rank: int
    count: int

    @classmethod
    def read(cls) -> Launch | None:
        """What torchrun's variables say; None without them, or of a single process. Raises ConfigError if ranks are on
        several machines, or a variable is no number."""
        if any(name not in os.environ for name in _VARIABLES):
            return None
        rank, count, here = (_number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        if here != count:
            raise ConfigError(
                f"torchrun: {here} of {count} ranks are on this machine; ranks are processes of one machine, so start "
                "them with --nnodes 1 (several machines are a Ray cluster)"
            )
        return None if count == 1 else cls(rank, count)


def leads_alone() -> bool:
    """Forget what torchrun's variables say, for a command whose work no ranks follow. False in a process other than
    rank 0, which has nothing to do."""
    if any(name not in os.environ for name in _VARIABLES):
        return True
    rank = {name: os.environ.pop(name) for name in _VARIABLES}["RANK"]
    return rank == "0"


def _number(name: str) -> int:
    value = os.environ.get(name, os.environ["WORLD_SIZE"])
    if not value.isdecimal():
        raise ConfigError(f"torchrun: the variable {name} must be a number, not {value!r}")
    return int(value)


class LaunchedRanks:
    """The processes that torchrun started, as one of them reaches the others."""

    def __init__(self, launch: Launch) -> None:
        from torch import distributed

        from moelight.kernels.ranks import PATIENCE

        self.launch, self._turn = launch, 0
        self._store, _, _ = next(iter(distributed.rendezvous("env://")))
        self._store.set_timeout(PATIENCE)

    def announce(self, **task: Any) -> None:
        """Tell the others of the next engine."""
        self._next().set("task", json.dumps(task))

    def hand_out(self, endpoints: Sequence[Endpoints], **task: Any) -> None:
        """Tell the others of the next engine, and give them their ``endpoints``, those of ranks 1 and further. Waits
        for all. Raises ConfigError if they cannot reach this process."""
        with tempfile.TemporaryDirectory(prefix="moelight-") as directory, socket.socket(socket.AF_UNIX) as listening:
            path = str(Path(directory) / "ranks")
            try:
                listening.bind(path)
            except OSError as error:  # the path of a socket is short
                raise ConfigError(f"torchrun: {path}: {error}; set TMPDIR to a shorter directory") from None
            listening.listen(len(endpoints))
            self.announce(meeting=path, **task)
            for _ in endpoints:
                other, _ = listening.accept()
                with other:
                    rank = int.from_bytes(other.recv(_RANK_BYTES), "little")
                    socket.send_fds(other, [b"\0"], endpoints[rank - 1].descriptors)

    def fetch(self, meeting: str) -> Endpoints:
        """The endpoints of this process, which rank 0 hands out. Raises RankError if rank 0 is lost."""
        from moelight.kernels.ranks import Endpoints

        rank, count = self.launch.rank, self.launch.count
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(meeting)
                connection.sendall(rank.to_bytes(_RANK_BYTES, "little"))
                _, descriptors, _, _ = socket.recv_fds(connection, 1, _MOST_DESCRIPTORS)
            return Endpoints.of(rank, count, descriptors)
        except (OSError, ValueError) as error:
            raise self._lost(error) from None

    def next_task(self) -> dict[str, Any]:
        """The task of the next engine; waits for it. Raises RankError if rank 0 is lost."""
        try:
            task: dict[str, Any] = json.loads(self._next().get("task"))
        except RuntimeError as error:
            raise self._lost(error) from None
        return task

    def _lost(self, error: Exception) -> RankError:
        return RankError(f"rank {self.launch.rank} waits for rank 0 no more: {error}")

    def _next(self) -> Store:
        from torch.distributed import PrefixStore

        self._turn += 1
        return PrefixStore(f"engine {self._turn}", self._store)


_led: LaunchedRanks | None = None


def led() -> LaunchedRanks | None:
    """The ranks that this process leads; None unless torchrun started them."""
    return _led


@contextmanager
def leading(launch: Launch | None) -> Iterator[None]:
    """Lead the ranks that torchrun started, and end them; does nothing without."""
    global _led  # noqa: PLW0603 - a process leads one launch
    if launch is None:
        yield
        return
    _led = LaunchedRanks(launch)
    try:
        yield
    finally:
        with suppress(RuntimeError):  # torchrun has ended
            _led.announce(**END)
        _led = None
