"""``python -m moelight.engine.rank_process TASK``: a process that is one rank of an engine (`engine.ranks`)."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from moelight.engine.launched import END, Launch, LaunchedRanks


def become_rank() -> int:
    """Become the rank of the task; returns the exit code of `follow`."""
    task = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 is told, and ends the others
    if task["processors"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, task["processors"])  # before any library starts threads
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from moelight.engine.ranks import RankTask, follow

    return follow(RankTask(**task))


def follow_launch(launch: Launch) -> int:
    """Follow the engines of rank 0 until its command ends. Returns the exit code, as `ranks.follow`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun tells every process, and rank 0 ends the others
    from moelight.core.errors import RankError
    from moelight.engine.ranks import RankTask, bind, follow

    ranks, code = LaunchedRanks(launch), 0
    while not code:
        try:
            if (task := ranks.next_task()) == END:
                break
            endpoints = ranks.fetch(task["meeting"])
        except RankError:
            return 1  # rank 0 says so
        processors = task["shares"][launch.rank]
        bind(processors)
        code = follow(RankTask(launch.rank, launch.count, task["device"], endpoints.descriptors, processors))
    return code


def _end_with_parent() -> None:
    """End this process where the input that the parent holds has ended."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    os._exit(become_rank())  # lanes may be at work
