"""Ranks: processes of one machine that compute a model together, and what they exchange.

Every rank runs the same passes over the same tokens. Rank 0 leads: it decides what a pass computes and samples its
tokens. Partial sums and parts of rows are exchanged by torch.distributed: gloo between processors, NCCL between GPUs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor, distributed

from moelight.core.errors import RankError
from moelight.kernels.device import Device

_LOOPBACK = {"linux": "lo", "darwin": "lo0"}
_MEETING, _CHECKED_S = timedelta(minutes=5), 0.05
PATIENCE = timedelta(days=365)  # a rank waits for the next pass as long as nothing is asked of it; an end is noticed


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process as ``rank`` of ``count``.

    ``messages``: the group of what `tell` and `hear` exchange; tensors are exchanged in the default one.
    """

    rank: int
    count: int
    messages: distributed.ProcessGroup

    @classmethod
    def join(
        cls,
        rank: int,
        count: int,
        device: torch.device,
        store: distributed.Store,
        check: Callable[[], None] = lambda: None,
    ) -> Ranks:
        """Wait for all ``count`` ranks, which meet in ``store``. ``check`` is called meanwhile; what it raises ends the
        wait. Raises RankError if they do not meet, or this process has joined already."""
        if distributed.is_initialized():
            raise RankError("this process is a rank already; close the engine that has ranks first")
        if Device(device).cuda:
            torch.cuda.set_device(device)
        store.set_timeout(_MEETING)
        meeting: Future[distributed.ProcessGroup] = Future()
        with _on_loopback():
            Thread(target=_meet, args=(meeting, rank, count, device, store), daemon=True).start()
            try:
                while not wait([meeting], timeout=_CHECKED_S).done:
                    check()
            except BaseException:
                store.set_timeout(timedelta(milliseconds=1))  # what the thread waits for does not come
                raise
            return cls(rank=rank, count=count, messages=meeting.result())

    def leave(self) -> None:
        """End the exchange; other ranks that wait for this one raise RankError."""
        if distributed.is_initialized():
            distributed.destroy_process_group()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def part(self, size: int) -> range:
        """The part of ``size``, which `count` divides, that this rank has."""
        width = size // self.count
        return range(self.rank * width, (self.rank + 1) * width)

    def sum_(self, partial: Tensor) -> None:
        """``partial`` becomes the sum of those of all ranks, the same bits on each."""
        with _reported(self.rank, self.count):
            distributed.all_reduce(partial)

    def join_columns(self, part: Tensor) -> Tensor:
        """part [T, C], the columns that this rank has -> [T, C x count], those of all ranks in order."""
        gathered = part.new_empty((self.count, *part.shape))
        with _reported(self.rank, self.count):
            distributed.all_gather(list(gathered.unbind()), part.contiguous())
        return gathered.transpose(0, 1).reshape(part.shape[0], -1)

    def share_(self, values: Tensor) -> None:
        """``values`` become those of rank 0."""
        with _reported(self.rank, self.count):
            distributed.broadcast(values, 0)

    def tell(self, message: bytes) -> None:
        """Send ``message`` from rank 0 to all others."""
        size = torch.tensor([len(message)])
        with _reported(self.rank, self.count):
            distributed.broadcast(size, 0, group=self.messages)
            distributed.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0, group=self.messages)

    def hear(self) -> bytes:
        """The next message of rank 0; waits for it."""
        size = torch.zeros(1, dtype=torch.int64)
        with _reported(self.rank, self.count):
            distributed.broadcast(size, 0, group=self.messages)
            message = torch.empty(int(size), dtype=torch.uint8)
            distributed.broadcast(message, 0, group=self.messages)
        return message.numpy().tobytes()


def meeting_file(path: Path, count: int) -> distributed.Store:
    """Where ``count`` ranks of one machine meet: at the file ``path``, which is not there yet."""
    return distributed.FileStore(str(path), count)


def _meet(
    meeting: Future[distributed.ProcessGroup], rank: int, count: int, device: torch.device, store: distributed.Store
) -> None:
    """Connect this process with the others; ``meeting`` gets the group of messages, or the RankError."""
    cuda = Device(device).cuda
    try:
        with _reported(rank, count):
            if cuda:
                torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=PATIENCE)
            meeting.set_result(distributed.new_group(backend="gloo", timeout=PATIENCE))
    except BaseException as error:  # noqa: BLE001 - raised by who reads the future
        meeting.set_exception(error)


@contextmanager
def _reported(rank: int, count: int) -> Iterator[None]:
    """A failed exchange as a RankError."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, RankError):
            raise
        lines = str(error).split("This is typically")[0].strip().splitlines() or [type(error).__name__]
        raise RankError(f"rank {rank} of {count} reaches another one no more: {lines[0][-200:]}") from None


@contextmanager
def _on_loopback() -> Iterator[None]:
    """While ranks meet, gloo listens on the loopback interface alone."""
    name, value = "GLOO_SOCKET_IFNAME", _LOOPBACK.get(sys.platform)
    if value is None or name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
