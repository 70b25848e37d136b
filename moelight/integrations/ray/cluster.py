"""The only module that imports ray: a cluster's nodes, the slots of engines on them, and the engines as actors.

A slot is where one engine may run: a GPU, or a node without one, or the part of a node that was asked for. Ray reserves
what a slot takes, as for any actor; labels and further resources restrict the nodes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moelight.core.errors import ConfigError
from moelight.integrations.ray.worker import EngineWorker, WorkerSetup

if TYPE_CHECKING:
    from types import ModuleType

LOCAL = "local"
INSTALL = "--ray: Ray is not installed: pip install 'moelight[ray]'"
_STORE_BYTES = 200 << 20  # of a cluster in this machine: rows and results pass through it, a few megabytes at a time
_CALLS = 4  # of an engine at a time: an exchange, a withdrawal, the end


def require_ray() -> ModuleType:
    """Ray, which is optional; raises ConfigError where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody asked for reports to its makers
    try:
        import ray
    except ImportError:
        raise ConfigError(INSTALL) from None
    return ray


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """Which cluster, and what each engine takes of it.

    Attributes:
        address: ``local``: one in this machine, which ends with the job; else as for ``ray.init``.
        engines: how many; None: as many as there are slots. A cluster that scales is asked for so many.
        num_cpus: of an engine; None: its node's, divided among the engines there.
        num_gpus: of an engine; None: one on a node that has any.
        resources: further resources of an engine, by name.
        labels: a node must have these labels.
    """

    address: str
    engines: int | None = None
    num_cpus: float | None = None
    num_gpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSlot:
    """Where one engine may run. ``cores``: first and count, by position, if engines share the host; ``memory_share``
    likewise."""

    name: str
    node: str
    num_cpus: float
    num_gpus: float
    cores: tuple[int, int] | None = None
    memory_share: float = 1.0


_GUESSES = re.compile(r"(?:There are some|Some) potential root causes")
_LONGEST_REASON = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorLost:
    """The reason why a call got no answer. ``died``: the process ended by itself and its node did not."""

    reason: str
    died: bool


class Cluster:
    """A connection to a cluster; a context that ends it, and a local cluster too."""

    def __init__(self, options: ClusterOptions, worker: type[EngineWorker] = EngineWorker) -> None:
        self.options = options
        self._ray, self._worker = require_ray(), worker
        self._asked = 0
        self._gauges: dict[str, Any] = {}

    def __enter__(self) -> Cluster:
        # Ray replaces the handlers of the process; a job ends by its own.
        before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._connect()
        except Exception as error:  # noqa: BLE001 (Ray raises plain ones)
            raise ConfigError(self._refusal(error)) from None
        finally:
            with contextlib.suppress(ValueError):  # not the main thread
                for number, handler in before.items():
                    signal.signal(number, handler)
        return self

    def _connect(self) -> None:
        options, quiet = self.options, {"logging_level": "ERROR", "log_to_driver": False}
        if options.address != LOCAL:
            self._ray.init(address=options.address, **quiet)
            return
        os.environ.setdefault("RAY_worker_niceness", "0")  # else an engine yields to whatever else runs here
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._ray.init(
            address=LOCAL,  # a new one, whatever runs here
            num_cpus=max(cores or 1, options.engines or 1),
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            **quiet,
        )

    def _refusal(self, error: Exception) -> str:
        reason = " ".join(str(error).split())[:300]
        if self.options.address != LOCAL:
            return f"--ray {self.options.address}: no cluster can be reached there ({reason})"
        if "timed out during startup" in reason:  # Ray has no option for it
            reason = "Ray gives its node 30 s to start, and other work has the cores of this machine"
        return f"--ray local: no cluster starts here ({reason}); try again, or `ray start --head` and --ray auto"

    def __exit__(self, *error: object) -> None:
        self._ray.shutdown()

    def slots(self) -> list[EngineSlot]:
        """The slots of the nodes that are alive; at most as many as engines were asked for."""
        options, nodes = self.options, [node for node in self._ray.nodes() if node["Alive"] and self._suits(node)]
        parts = [(node, *self._parts(node)) for node in nodes]
        hosts = Counter[str]()
        for node, count, _, _ in parts:
            hosts[node["NodeManagerAddress"]] += count
        names, first = Counter[str](), defaultdict[str, int](int)
        slots: list[EngineSlot] = []
        for node, count, cpus, gpus in parts:
            host = node["NodeManagerAddress"]
            for _ in range(count):
                shared = hosts[host] > 1
                name = f"{node['NodeManagerHostname']}:{names[host]}" if shared else node["NodeManagerHostname"]
                cores = (first[host], max(1, int(cpus))) if shared else None
                share = 1.0 / hosts[host]
                slots.append(
                    EngineSlot(
                        name=name,
                        node=node["NodeID"],
                        num_cpus=cpus,
                        num_gpus=gpus,
                        cores=cores,
                        memory_share=share,
                    )
                )
                names[host] += 1
                first[host] += max(1, int(cpus))
        return slots[: options.engines]

    def ask_for_more(self, num_slots: int) -> None:
        """Ask a cluster that scales for the engines that have no slot."""
        wanted = self.options.engines or 0
        if wanted <= num_slots or wanted == self._asked or self.options.address == LOCAL:
            return
        self._asked = wanted
        options = self.options
        bundle = {"CPU": options.num_cpus or 1, **({"GPU": options.num_gpus} if options.num_gpus else {})}
        from ray.autoscaler.sdk import request_resources

        more: dict[str, Any] = {"bundle_label_selectors": [dict(options.labels)] * wanted} if options.labels else {}
        request_resources(bundles=[{**bundle, **options.resources}] * wanted, **more)

    def start(self, slot: EngineSlot, setup: WorkerSetup) -> Any:
        """The engine of a slot: its process is started, nothing is loaded yet."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = self._ray.remote(self._worker).options(
            num_cpus=slot.num_cpus,
            num_gpus=slot.num_gpus,
            resources=dict(self.options.resources) or None,
            max_concurrency=_CALLS,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=slot.node, soft=False),
        )
        return actor.remote(setup, cores=slot.cores, memory_share=slot.memory_share)

    def stop(self, actor: Any) -> None:
        """End an engine at once."""
        with contextlib.suppress(Exception):
            self._ray.kill(actor, no_restart=True)

    def answers(self, calls: Sequence[Any], wait_s: float) -> Iterator[tuple[Any, Any]]:
        """The calls that are over, once there is one or ``wait_s`` have passed, and what they returned, or
        `ActorLost`."""
        if not calls:
            return
        ready, _ = self._ray.wait(list(calls), num_returns=1, timeout=wait_s)
        if ready:
            ready, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)
        for call in ready:
            yield call, self._answer(call)

    def is_alive(self, node: str) -> bool:
        """True if a node has not left the cluster."""
        return any(info["NodeID"] == node and info["Alive"] for info in self._ray.nodes())

    def show(self, figures: Mapping[str, Mapping[str, float]]) -> None:
        """Figures by name and engine, as metrics of Ray's dashboard and of its Prometheus endpoints."""
        from ray.util.metrics import Gauge

        for name, by_engine in figures.items():
            gauge = self._gauges.get(name)
            if gauge is None:
                gauge = self._gauges[name] = Gauge(f"moelight_{name}", tag_keys=("engine",))
            for engine, value in by_engine.items():
                gauge.set(value, tags={"engine": engine})

    def _answer(self, call: Any) -> Any:
        from ray import exceptions

        try:
            return self._ray.get(call)
        except exceptions.RayTaskError as error:
            return ActorLost(reason=" ".join(str(error.cause).split()), died=False)
        except exceptions.ActorUnavailableError as error:
            return ActorLost(reason=_short(error), died=False)
        except exceptions.RayActorError as error:
            return ActorLost(reason=_short(error), died=not getattr(error, "preempted", False))
        except exceptions.RayError as error:
            return ActorLost(reason=_short(error), died=False)

    def _suits(self, node: Mapping[str, Any]) -> bool:
        resources, labels = node["Resources"], node.get("Labels", {})
        enough = all(resources.get(name, 0) >= amount for name, amount in self.options.resources.items())
        return enough and all(labels.get(name) == value for name, value in self.options.labels.items())

    def _parts(self, node: Mapping[str, Any]) -> tuple[int, float, float]:
        """The slots of a node: their number, and the CPUs and GPUs of each."""
        options, resources = self.options, node["Resources"]
        cpus, gpus = float(resources.get("CPU", 0)), float(resources.get("GPU", 0))
        each_gpus = options.num_gpus if options.num_gpus is not None else float(gpus >= 1)
        if each_gpus:
            count = int(gpus // each_gpus)
        elif options.num_cpus:
            count = int(cpus // options.num_cpus)
        else:
            count = (options.engines or 1) if options.address == LOCAL else 1
        for name, amount in options.resources.items():
            count = min(count, int(resources.get(name, 0) // amount))
        each_cpus = options.num_cpus or (cpus // count if count else 0.0)
        count = min(count, int(cpus // each_cpus)) if each_cpus else 0
        return count, each_cpus, each_gpus


def _short(error: Exception) -> str:
    """The reason of a lost actor in one line, without guesses at root causes and advice."""
    text = " ".join(str(error).split())
    _, separator, reason = text.partition("The actor is dead because ")
    reason = _GUESSES.split(reason if separator else text)[0].strip()
    return textwrap.shorten(reason, _LONGEST_REASON, placeholder=" …").rstrip(".")
