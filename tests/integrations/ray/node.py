"""A node of a cluster as a process, as `ray start --block`, without client server and monitors, and with patience: Ray
gives a node 30 s to start; it takes five on idle cores, and minutes on busy ones.

    python -m tests.integrations.ray.node head PORT FOLDER
    python -m tests.integrations.ray.node worker ADDRESS

Prints the address of the cluster, and stays.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

NODE = {
    "num_cpus": 1,
    "object_store_memory": 80 << 20,
    "include_log_monitor": False,
    "dashboard_agent_listen_port": 0,  # for its own one, which another cluster may have, Ray tries three seconds
}
HEAD = {"include_dashboard": False, "no_monitor": True}


@contextlib.contextmanager
def patience() -> Iterator[None]:
    """In this context, nodes that are started have minutes."""
    from ray._private import services

    get_node = services.get_node

    def get(*args: Any) -> Any:
        for _ in range(300):
            with contextlib.suppress(RuntimeError):
                return get_node(*args)
            time.sleep(0.5)
        return get_node(*args)

    services.get_node = get
    try:
        yield
    finally:
        services.get_node = get_node


def main(role: str, where: str, folder: str = "") -> None:
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    inputs: dict[str, Any] = {"gcs_address": where, "redis_address": where, "node_manager_port": 0}
    if role == "head":
        inputs = {**HEAD, "gcs_server_port": int(where), "temp_dir": folder}
    inputs |= {**NODE, "min_worker_port": 0, "max_worker_port": 0}
    with patience():
        node = Node(RayParams(**inputs), head=role == "head", shutdown_at_exit=False, spawn_reaper=True)
    print(node.gcs_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
