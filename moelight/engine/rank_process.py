"""``python -m moelight.engine.rank_process TASK``: a process that is one rank of an engine (`engine.ranks`)."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading


def follow() -> int:
    """Become the rank of the task and do what rank 0 tells it. Returns the exit code: 0 once rank 0 has closed, 1 if it
    was lost, 2 for what a user can mend."""
    task = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 is told, and ends the others
    if task["processors"]:
        os.sched_setaffinity(0, task["processors"])  # before any library starts threads
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from moelight.core.errors import RankError, UserError
    from moelight.engine.ranks import Follower, RankTask

    try:
        Follower(RankTask(**task)).run()
    except RankError:
        return 1  # rank 0 says so
    except UserError as error:
        print(f"rank {task['rank']}: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _end_with_parent() -> None:
    """End this process where the input that the parent holds has ended."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    os._exit(follow())  # gloo's threads do not end with the interpreter
