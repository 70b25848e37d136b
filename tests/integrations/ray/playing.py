"""A cluster of threads, whose engines answer without a model, die when they are told to, and are as slow as wanted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from moelight.core.policy import Policy
from moelight.core.request import Completion, Request
from moelight.engine.model import LazyModel, PlannedModel
from moelight.integrations.ray.cluster import ActorLost, EngineSlot
from moelight.integrations.ray.worker import EnginePlan, EngineWorker, WorkerSetup
from moelight.observe.stats import RunStats


class Killed(BaseException):
    """The process of an engine is gone."""


class EchoEngine:
    """Answers ``batch_size`` requests a pass with their first token; a pass takes ``pass_s``."""

    def __init__(self, *, batch_size: int = 8, pass_s: float = 0.0, before: Callable[[Request], None] | None = None):
        self.policy = Policy(model="demo", batch_size=batch_size, micro_batch_size=batch_size, kv_tokens=1 << 20)
        self.pass_s, self._before = pass_s, before
        self.timeline, self.binding, self.kv_usage = None, None, 0.0
        self.adaptations: tuple[Any, ...] = ()
        self.passes: list[int] = []  # sequences in each
        self._began_s = time.monotonic()
        self._prompt_tokens = self._tokens = 0

    def __enter__(self) -> EchoEngine:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def check(self, request: Request) -> None:
        pass

    def run(
        self, requests: Iterable[Request | None], *, on_pass: Callable[[], None], until: Callable[[], bool]
    ) -> Iterator[Completion]:
        source = iter(requests)
        while True:
            batch: list[Request] = []
            while len(batch) < self.policy.batch_size and (request := next(source, None)) is not None:
                batch.append(request)
            if not batch:
                return
            for item in batch:
                if self._before is not None:
                    self._before(item)
            if self.pass_s:
                time.sleep(self.pass_s)
            self.passes.append(len(batch))
            on_pass()
            for item in batch:
                self._tokens += 1
                self._prompt_tokens += len(item.token_ids)
                yield Completion(
                    index=item.index,
                    text=f"{len(item.token_ids)}",
                    token_ids=item.token_ids[:1],
                    finish_reason="stop",
                    prompt_tokens=len(item.token_ids),
                )
            if until():
                return

    @property
    def stats(self) -> RunStats:
        return RunStats(
            wall_s=time.monotonic() - self._began_s,
            load_s=0.0,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._tokens,
            passes=len(self.passes),
            peak_rss_bytes=1,
            lanes={},
        )


class EchoWorker(EngineWorker):
    """An engine worker whose engine is an `EchoEngine`, made by ``engine``."""

    engine: Callable[[], EchoEngine] = EchoEngine

    def _planned(self) -> tuple[LazyModel, PlannedModel]:
        engine = type(self).engine()
        planned: Any = SimpleNamespace(
            plan=None, why="it echoes", policy=engine.policy, workload=self._setup.workload, load=lambda: engine
        )
        return LazyModel(self._setup.options.model), planned

    def _said(self, planned: PlannedModel) -> EnginePlan:
        engine: Any = planned.load()
        rate = engine.policy.batch_size / engine.pass_s if engine.pass_s else 1000.0
        return replace(super()._said(planned), tokens_per_s=rate)


class PlayedActor:
    """An engine whose calls run in threads; after `kill`, they all fail."""

    def __init__(self, worker: EngineWorker) -> None:
        self.worker = worker
        self.killed = threading.Event()
        self._calls: list[Future[Any]] = []
        self._pool = ThreadPoolExecutor(8)

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Future[Any]:
            future: Future[Any] = Future()
            if self.killed.is_set():
                future.set_exception(Killed())
                return future
            self._calls.append(future)

            def call() -> None:
                try:
                    result = getattr(self.worker, name)(*args)
                    if not future.done():
                        future.set_result(result)
                except BaseException as error:  # noqa: BLE001 (as Ray passes it on)
                    if not future.done():
                        future.set_exception(error)

            self._pool.submit(call)
            return future

        return SimpleNamespace(remote=remote)

    def kill(self) -> None:
        """As SIGKILL does: no call returns."""
        self.killed.set()
        self.worker._queue.close()
        for call in self._calls:
            if not call.done():
                call.set_exception(Killed())


class PlayedCluster:
    """Has the slots of ``workers``; a test adds, removes and kills."""

    def __init__(self, *workers: type[EngineWorker]) -> None:
        self.options = SimpleNamespace(address="local", engines=None)
        self.workers = {f"n{at}": worker for at, worker in enumerate(workers)}
        self.actors: list[tuple[str, PlayedActor]] = []
        self.dead_nodes: set[str] = set()
        self.shown: dict[str, Any] = {}
        self.every: Callable[[PlayedCluster], None] = lambda cluster: None

    def slots(self) -> list[EngineSlot]:
        return [
            EngineSlot(name=name, node=name, num_cpus=1, num_gpus=0)
            for name in self.workers
            if name not in self.dead_nodes
        ]

    def ask_for_more(self, result: int) -> None:
        pass

    def start(self, slot: EngineSlot, setup: WorkerSetup) -> PlayedActor:
        actor = PlayedActor(self.workers[slot.name](setup))
        self.actors.append((slot.name, actor))
        return actor

    def stop(self, actor: PlayedActor) -> None:
        actor.kill()

    def answers(self, calls: list[Future[Any]], wait_s: float) -> Iterator[tuple[Any, Any]]:
        self.every(self)
        for call in wait(calls, timeout=min(wait_s, 0.02), return_when=FIRST_COMPLETED).done:
            try:
                yield call, call.result()
            except Killed:
                yield call, ActorLost(reason="killed", died=True)

    def is_alive(self, node: str) -> bool:
        return node not in self.dead_nodes

    def show(self, figures: Any) -> None:
        self.shown = figures

    def close(self) -> None:
        for _, actor in self.actors:
            actor.kill()
