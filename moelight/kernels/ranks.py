"""Ranks: processes of one machine that compute a model together, and what they exchange.

Every rank runs the same passes over the same tokens. Rank 0 leads: it decides what a pass computes and samples its
tokens. Partial sums and parts of rows are exchanged through memory that all ranks map, between GPUs by NCCL. No thread
but the one that exchanges something waits for other ranks, and it waits in a system call: an interrupt ends the wait,
and so does the end of any rank.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain

import torch
from torch import Tensor, distributed

from moelight.core.errors import RankError
from moelight.core.units import MiB
from moelight.kernels.device import Device

CHUNK_BYTES = MiB  # of a rank's part that are exchanged at once
_LOOPBACK, _MEETING = "127.0.0.1", timedelta(minutes=5)
_HEAD_BYTES = 8  # the size of a message precedes it
_CHANNELS = 2  # of sums, and of all else
PATIENCE = timedelta(days=365)  # a rank waits for the next pass as long as nothing is asked of it; an end is noticed


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Open descriptors with which a process becomes ``rank`` of ``count``.

    Attributes:
        memory: chunks of each rank, which all map.
        messages: sockets to all other ranks; of those, one to rank 0.
        channels: by channel of `Ranks`, sockets to the ranks that are 1, 2, 4, ... ahead of this one, then from those
            that are as many behind.
    """

    rank: int
    count: int
    memory: int
    messages: tuple[int, ...]
    channels: tuple[tuple[int, ...], ...]

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.memory, *self.messages, *chain.from_iterable(self.channels))

    @classmethod
    def of(cls, rank: int, count: int, descriptors: Sequence[int]) -> Endpoints:
        """Those of which ``descriptors`` were handed to this process."""
        memory, *sockets = descriptors
        messages, size = count - 1 if rank == 0 else 1, 2 * len(_steps(count))
        channels = (tuple(sockets[first : first + size]) for first in range(messages, len(sockets), size))
        return cls(rank, count, memory, tuple(sockets[:messages]), tuple(channels))

    def close(self) -> None:
        """Close them, once another process has them."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def endpoints_of(count: int) -> list[Endpoints]:
    """Endpoints of ``count`` ranks, connected with each other."""
    messages = [list[int]() for _ in range(count)]
    for rank in range(1, count):
        _connect(messages[0], messages[rank])
    channels = [_channel(count) for _ in range(_CHANNELS)]
    memory = _shared_memory(_CHANNELS * 2 * count * CHUNK_BYTES)
    try:
        return [
            Endpoints(
                rank, count, os.dup(memory), tuple(messages[rank]), tuple(tuple(channel[rank]) for channel in channels)
            )
            for rank in range(count)
        ]
    finally:
        os.close(memory)


def _channel(count: int) -> list[list[int]]:
    """The sockets of a channel, by rank."""
    ahead, behind = [list[int]() for _ in range(count)], [list[int]() for _ in range(count)]
    for step in _steps(count):
        for rank in range(count):
            _connect(ahead[rank], behind[(rank + step) % count])
    return [[*first, *second] for first, second in zip(ahead, behind, strict=True)]


def _steps(count: int) -> list[int]:
    """1, 2, 4, ... below ``count``: after as many rounds every rank has heard of every other one."""
    return [1 << turn for turn in range((count - 1).bit_length())]


def _connect(first: list[int], second: list[int]) -> None:
    """Add the two ends of a new socket."""
    for ends, end in zip((first, second), socket.socketpair(), strict=True):
        ends.append(end.detach())


def _shared_memory(size: int) -> int:
    """A descriptor of ``size`` bytes without a name."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("moelight-ranks")
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.ftruncate(memory, size)
    return memory


class _Channel:
    """Exchanges one after another, by one thread at a time. ``chunks`` uint8 [2, count, CHUNK_BYTES]."""

    def __init__(self, rank: int, chunks: Tensor, sockets: Sequence[int]) -> None:
        self._rank, self._chunks, self._turn = rank, chunks, 0
        self.sockets = [_socket(descriptor) for descriptor in sockets]
        steps = len(sockets) // 2
        self._ahead, self._behind = self.sockets[:steps], self.sockets[steps:]

    def exchanged(self, part: Tensor) -> Iterator[tuple[int, Tensor]]:
        """part uint8 [B], as long on every rank -> by chunks the first byte, and the chunk of all ranks [count, b],
        which is there until the next one.

        A chunk is written where the one before the last was: every rank has read that, since it has been at the turn of
        the last one.
        """
        for first in range(0, part.numel(), CHUNK_BYTES):
            written = part[first : first + CHUNK_BYTES]
            chunk = self._chunks[self._turn % 2, :, : written.numel()]
            self._turn += 1
            chunk[self._rank] = written
            for ahead, behind in zip(self._ahead, self._behind, strict=True):
                ahead.sendall(b"\0")
                _receive(behind, 1)
            yield first, chunk


class Ranks:
    """This process as ``rank`` of ``count``. Sums, and all else that tensors are exchanged for, may be made at once by
    two threads; every rank makes those of either kind in the same order."""

    def __init__(self, endpoints: Endpoints) -> None:
        """``endpoints`` are this object's from now on."""
        self.rank, self.count = endpoints.rank, endpoints.count
        self._messages = [_socket(descriptor) for descriptor in endpoints.messages]
        memory = mmap.mmap(endpoints.memory, _CHANNELS * 2 * self.count * CHUNK_BYTES)
        os.close(endpoints.memory)
        chunks = torch.frombuffer(memory, dtype=torch.uint8).view(_CHANNELS, 2, self.count, CHUNK_BYTES)
        self._sums, self._parts = (
            _Channel(self.rank, *channel) for channel in zip(chunks, endpoints.channels, strict=True)
        )
        self._sums_of_cards: distributed.ProcessGroup | None = None
        self._torn = False

    def meet(self, device: torch.device) -> None:
        """Wait until every rank is here and has its ``device``. Raises RankError if one ends before."""
        with self._reported():
            if self.leads:
                for other in self._messages:
                    _receive(other, 1)
            else:
                self._messages[0].sendall(b"\0")
        if Device(device).cuda:
            self._join_cards(device)

    def _join_cards(self, device: torch.device) -> None:
        if distributed.is_initialized():
            raise RankError("this process is a rank of GPUs already; close the engine that has ranks first")
        torch.cuda.set_device(device)
        with self._reported():
            if self.leads:
                store = distributed.TCPStore(_LOOPBACK, 0, is_master=True, timeout=_MEETING, wait_for_workers=False)
                self.tell(str(store.port).encode())
            else:
                store = distributed.TCPStore(_LOOPBACK, int(self.hear()), timeout=_MEETING)
            distributed.init_process_group("nccl", store=store, rank=self.rank, world_size=self.count, timeout=PATIENCE)
            self._sums_of_cards = distributed.new_group(backend="nccl", timeout=PATIENCE)

    def leave(self) -> None:
        """End the exchange; other ranks that wait for this one raise RankError."""
        for end in chain(self._messages, self._sums.sockets, self._parts.sockets):
            with suppress(OSError):  # the other rank has left
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        if self._sums_of_cards is not None:
            distributed.destroy_process_group()
            self._sums_of_cards = None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def part(self, size: int) -> range:
        """The part of ``size``, which `count` divides, that this rank has."""
        width = size // self.count
        return range(self.rank * width, (self.rank + 1) * width)

    @torch.inference_mode()
    def sum_(self, partial: Tensor) -> None:
        """``partial``, contiguous, becomes the sum of those of all ranks in their order, in float32: the same bits on
        each."""
        with self._reported():
            if Device(partial.device).cuda:
                distributed.all_reduce(partial, group=self._sums_of_cards)
                return
            flat = partial.view(-1)
            for first, chunk in self._sums.exchanged(flat.view(torch.uint8)):
                terms, begin = chunk.view(partial.dtype).unbind(), first // partial.itemsize
                target = flat[begin : begin + len(terms[0])]
                if self.count == 2:
                    target += terms[1 - self.rank]
                    continue
                total = terms[0].float() + terms[1]
                for term in terms[2:]:
                    total += term
                target[:] = total

    def join_columns(self, part: Tensor) -> Tensor:
        """part [T, C], the columns that this rank has -> [T, C x count], those of all ranks in order."""
        gathered = part.new_empty((self.count, *part.shape))
        with self._reported(), torch.inference_mode():
            if Device(part.device).cuda:
                distributed.all_gather(list(gathered.unbind()), part.contiguous())
            else:
                flat = gathered.view(self.count, part.numel()).view(torch.uint8)
                for first, chunk in self._parts.exchanged(part.contiguous().view(-1).view(torch.uint8)):
                    flat[:, first : first + chunk.shape[1]] = chunk
        return gathered.transpose(0, 1).reshape(part.shape[0], self.count * part.shape[1])

    @torch.inference_mode()
    def share_(self, values: Tensor) -> None:
        """``values``, contiguous, become those of rank 0."""
        with self._reported():
            if Device(values.device).cuda:
                distributed.broadcast(values, 0)
                return
            flat = values.view(-1).view(torch.uint8)
            for first, chunk in self._parts.exchanged(flat):
                flat[first : first + chunk.shape[1]] = chunk[0]

    def tell(self, message: bytes) -> None:
        """Send ``message`` from rank 0 to all others."""
        if self._torn:
            raise RankError("an earlier message was interrupted")
        self._torn = True
        with self._reported():
            for other in self._messages:
                other.sendall(len(message).to_bytes(_HEAD_BYTES, "little") + message)
        self._torn = False

    def hear(self) -> bytes:
        """The next message of rank 0; waits for it."""
        with self._reported():
            size = int.from_bytes(_receive(self._messages[0], _HEAD_BYTES), "little")
            return bytes(_receive(self._messages[0], size))

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """A failed exchange as a RankError."""
        try:
            yield
        except (RuntimeError, ValueError, OSError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise RankError(
                f"rank {self.rank} of {self.count} reaches another one no more: {lines[0][-200:]}"
            ) from None


def _socket(descriptor: int) -> socket.socket:
    """One without a time limit, whatever the default of this process."""
    end = socket.socket(fileno=descriptor)
    end.settimeout(None)
    return end


def _receive(end: socket.socket, size: int) -> bytearray:
    """The next ``size`` bytes. Raises ConnectionError if the other rank has left before."""
    received = bytearray(size)
    view = memoryview(received)
    while view:
        if not (count := end.recv_into(view)):
            raise ConnectionError("its connection is closed")
        view = view[count:]
    return received
