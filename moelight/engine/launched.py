"""Ranks that torchrun starts, a process of the same command for each, instead of rank 0::

    torchrun --nproc-per-node 2 -m moelight.cli.main generate prompts.jsonl -o answers.jsonl

Rank 0 does what the command says; the others follow its engine. They meet in torchrun's store.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moelight.core.errors import ConfigError, RankError

if TYPE_CHECKING:
    from torch.distributed import Store

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
END: dict[str, Any] = {}


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

    def announce(self, **task: Any) -> Store:
        """Tell the others of the next engine; returns where all meet."""
        store = self._next()
        store.set("task", json.dumps(task))
        return store

    def next_task(self) -> tuple[Store, dict[str, Any]]:
        """Where ranks of the next engine meet, and its task; waits for both. Raises RankError if rank 0 is lost."""
        store = self._next()
        try:
            return store, json.loads(store.get("task"))
        except RuntimeError as error:
            raise RankError(f"rank {self.launch.rank} waits for rank 0 no more: {error}") from None

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
