"""What every family of cases is told, and how an operation in this process becomes a contender."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from peers.common import UnableError, seconds

from kernel_cases.peers import Peer
from kernel_cases.turns import Timed, UnfitError


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Threads of every contender, bytes that its rotating sets take together, and the peers."""

    threads: int
    gib: float
    vllm: Peer
    ipex: Peer

    def shared_by(self, contenders: int) -> Setting:
        """With sets so small that those of ``contenders``, which a case holds together, take half of the memory."""
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return replace(self, gib=min(self.gib, memory / contenders / 2**31))


def here(operation: Callable[[], object]) -> Timed:
    """An operation of this process, done once to warm up."""
    try:
        operation()
    except (UnableError, NotImplementedError, RuntimeError) as reason:
        raise UnfitError(" ".join(str(reason).split())[:200]) from reason
    return lambda times: seconds(operation, times)
