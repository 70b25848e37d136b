"""moelight on Ray clusters: a stage of Ray Data, `build_processor`, in the manner of Ray Data LLM's; and in `job`, what
``moelight generate --ray`` runs.

Columns in, after ``preprocess``: ``prompt``, ``messages`` or ``prompt_token_ids``, and, if rows differ,
``sampling_params``. Columns out, beside those of the input, for ``postprocess``: ``generated_text``,
``generated_texts`` (one of each sample), ``generated_tokens`` (ids), ``finish_reason``, ``num_input_tokens``,
``num_generated_tokens``, and ``__inference_error__``, which is empty unless the row could not be served; a result of
``postprocess`` without this column gets it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from moelight.core.errors import ConfigError, MoelightError, did_you_mean
from moelight.core.policy import Policy
from moelight.core.request import SamplingParams

if TYPE_CHECKING:
    from moelight.integrations.ray.worker import EngineWorker, WorkerSetup
    from moelight.profiles.workload import Workload

DataRow: TypeAlias = dict[str, Any]
_PROMPTS = ("prompt", "messages", "prompt_token_ids")
_SAMPLING = "sampling_params"
ERROR = "__inference_error__"
_RESOURCES = ("num_cpus", "num_gpus", "memory", "resources", "label_selector", "accelerator_type", "runtime_env")
_WAIT_S = 0.1


@dataclass(frozen=True, kw_only=True)
class DataProcessor:
    """A stage of Ray Data: called with a dataset, it returns the dataset with the columns of the answers.

    Attributes:
        engines: actors, each with an engine; None: one for each GPU, or node without one.
        rows_per_task: rows that cross to an engine in a task.
        tasks_per_engine: tasks that an engine is at: together they must fill its passes.
        ray_remote_args: what an engine takes, by the names of `map_batches` (``num_cpus``, ``num_gpus``,
            ``resources``, ``label_selector``).
    """

    setup: WorkerSetup
    preprocess: Callable[[DataRow], DataRow] | None = None
    postprocess: Callable[[DataRow], DataRow] | None = None
    engines: int | None = None
    rows_per_task: int = 64
    tasks_per_engine: int = 8
    ray_remote_args: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, dataset: Any) -> Any:
        from ray.data import ActorPoolStrategy

        remote = {**_takes(), **self.ray_remote_args}
        engines = self.engines or _slots(remote)
        if self.preprocess is not None:
            dataset = dataset.map(_Preprocess(self.preprocess))
        dataset = dataset.map_batches(
            EngineStage,
            fn_constructor_kwargs={"setup": self.setup, "share": 1.0 / engines if self._one_host() else 1.0},
            batch_size=self.rows_per_task,
            batch_format="numpy",
            compute=ActorPoolStrategy(
                size=engines,
                max_tasks_in_flight_per_actor=self.tasks_per_engine,
                max_concurrent_calls_per_actor=self.tasks_per_engine,
            ),
            **remote,
        )
        return dataset if self.postprocess is None else dataset.map(_Postprocess(self.postprocess))

    @staticmethod
    def _one_host() -> bool:
        import ray

        return len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}) == 1


def build_processor(
    policy: Policy | str | Path | None = None,
    *,
    model: str | None = None,
    sampling: SamplingParams | Mapping[str, Any] | None = None,
    preprocess: Callable[[DataRow], DataRow] | None = None,
    postprocess: Callable[[DataRow], DataRow] | None = None,
    workload: Workload | None = None,
    engines: int | None = None,
    rows_per_task: int = 64,
    tasks_per_engine: int = 8,
    ray_remote_args: Mapping[str, Any] | None = None,
    **plan: Any,
) -> DataProcessor:
    """Return a stage of Ray Data that answers the rows of a dataset.

    Args:
        policy: run this policy, a value or a file; None: each engine plans for its own node.
        model: a directory on every node, a hub id, or ``demo``; None: the policy's.
        sampling: of rows that bring no ``sampling_params``.
        preprocess: from a row of the dataset to a prompt; its columns are added to the row's.
        postprocess: from a row with its answer to a row of the result, which keeps the column of the error.
        workload: what to plan for; None: the default, with ``sampling``'s ``max_tokens``. Without any, answers are
            expected to have 256 tokens, and may fill the model's context.
        plan: options of the planner, as `EngineOptions` has them (``host_memory``, ``batch_size``, ...).

    Raises:
        ConfigError: Ray is not installed, or an option is unknown.
    """
    from moelight.integrations.ray.cluster import require_ray

    require_ray()
    for name in ray_remote_args or ():
        if name not in _RESOURCES:
            raise ConfigError(f"build_processor: ray_remote_args has {name!r}{did_you_mean(name, _RESOURCES)}")
    return DataProcessor(
        setup=_setup(policy, model, sampling, workload, plan),
        preprocess=preprocess,
        postprocess=postprocess,
        engines=engines,
        rows_per_task=rows_per_task,
        tasks_per_engine=tasks_per_engine,
        ray_remote_args=dict(ray_remote_args or {}),
    )


def _setup(
    policy: Policy | str | Path | None,
    model: str | None,
    sampling: SamplingParams | Mapping[str, Any] | None,
    workload: Workload | None,
    plan: Mapping[str, Any],
) -> WorkerSetup:
    from moelight.batch.options import JobOptions
    from moelight.engine.model import EngineOptions
    from moelight.integrations.ray.worker import WorkerSetup
    from moelight.profiles.policy_files import load_policy

    names = [field.name for field in fields(EngineOptions)]
    for name in plan:
        if name not in names:
            raise ConfigError(f"build_processor: unknown option {name!r}{did_you_mean(name, names)}")
    if policy is not None and not isinstance(policy, Policy):
        policy = load_policy(Path(policy))
    if not isinstance(sampling, SamplingParams):
        sampling = SamplingParams.from_dict(dict(sampling or {}))
    named = model or ("demo" if policy is None else policy.model)
    options = JobOptions(
        prompts=Path(), model=named, policy=policy, sampling=sampling, token_ids=True, ignore_model=True, **plan
    )
    return WorkerSetup(
        options=options,
        format="simple",
        facts={"model": {}, "numbers": {}, "prompts": {"digest": ""}},
        workload=workload or _workload(sampling),
    )


def _workload(sampling: SamplingParams) -> Workload:
    """The default workload, with the answers of ``sampling``."""
    from moelight.profiles.workload import MOST_TOKENS, Workload

    if sampling.max_tokens is None:
        return Workload(max_gen_len=MOST_TOKENS)
    return Workload(gen_len=max(1, sampling.max_tokens))


@dataclass(frozen=True)
class _Preprocess:
    """Adds the columns of ``make`` to a row."""

    make: Callable[[DataRow], DataRow]

    def __call__(self, row: DataRow) -> DataRow:
        return {**row, **self.make(row)}


@dataclass(frozen=True)
class _Postprocess:
    """A row of ``make`` with the error of its row, which ``make`` may leave out or replace."""

    make: Callable[[DataRow], DataRow]

    def __call__(self, row: DataRow) -> DataRow:
        return {ERROR: row[ERROR], **self.make(row)}


def _takes() -> dict[str, Any]:
    """Return the resources of a node that an engine reserves: a GPU, or all CPUs but one, which is for the other
    stages."""
    import ray

    if not ray.is_initialized():
        ray.init()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(node.get("GPU", 0) >= 1 for node in nodes):
        return {"num_gpus": 1}
    return {"num_cpus": max(1, int(min(node.get("CPU", 1) for node in nodes)) - 1)}


def _slots(remote: Mapping[str, Any]) -> int:
    """Engines that the cluster has room for now; a CPU is left for the other stages."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if remote.get("num_gpus"):
        return max(1, sum(int(node.get("GPU", 0) // remote["num_gpus"]) for node in nodes))
    cpus = remote.get("num_cpus", 1)
    count = sum(int(node.get("CPU", 0) // cpus) for node in nodes)
    return max(1, count - (count * cpus >= sum(node.get("CPU", 0) for node in nodes)))


class EngineStage:
    """An actor of the stage: one engine, and the rows of several tasks in its passes at a time."""

    def __init__(self, setup: WorkerSetup, share: float = 1.0, worker: type[EngineWorker] | None = None) -> None:
        from moelight.integrations.ray.worker import EngineWorker

        self._worker = (worker or EngineWorker)(setup, memory_share=share)
        loaded = self._worker.load()
        if isinstance(loaded, str):
            raise ConfigError(loaded)
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[DataRow]]] = {}
        self._fault: str | None = None
        threading.Thread(target=self._collect, name="moelight-results", daemon=True).start()

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        count = len(next(iter(batch.values()), ()))
        rows = [{name: _plain(values[at]) for name, values in batch.items()} for at in range(count)]
        answers = await asyncio.gather(*self._ask(rows))
        names = list(dict.fromkeys(name for answer in answers for name in answer))
        yield {**batch, **{name: [answer[name] for answer in answers] for name in names}}

    def _ask(self, rows: list[DataRow]) -> list[asyncio.Future[DataRow]]:
        """Put rows into the engine's queue."""
        from moelight.integrations.ray.leases import LeasedRow
        from moelight.integrations.ray.worker import entries_of

        loop, futures, leased = asyncio.get_running_loop(), [], []
        for row in rows:
            number = next(self._numbers)
            future: asyncio.Future[DataRow] = loop.create_future()
            self._waiting[number] = loop, future
            futures.append(future)
            line = json.dumps(_request(row)).encode("utf-8", "backslashreplace")
            leased.append(LeasedRow(number=number, line=number + 1, payload=line, tokens=0.0))
        if self._fault is not None:
            raise MoelightError(self._fault)
        self._worker.add(entries_of(leased))
        return futures

    def _collect(self) -> None:
        """Hand results to the tasks that wait for them, in a thread of its own."""
        from moelight.integrations.ray.worker import unpack_results

        while self._fault is None:
            report = self._worker.exchange((), _WAIT_S)
            for result in unpack_results(report):
                loop, future = self._waiting.pop(result.number)
                loop.call_soon_threadsafe(_resolve, future, _columns(json.loads(result.data)))
            if report.fault is not None:
                self._fault = report.fault[0]
        error = MoelightError(self._fault)
        for loop, future in list(self._waiting.values()):
            loop.call_soon_threadsafe(_fail, future, error)


def _resolve(future: asyncio.Future[DataRow], columns: DataRow) -> None:
    if not future.done():
        future.set_result(columns)


def _fail(future: asyncio.Future[DataRow], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _request(row: DataRow) -> DataRow:
    """The fields of a simple row; columns that are null are absent."""
    sampling = row.get(_SAMPLING) or {}
    prompt = {name: row[name] for name in _PROMPTS if row.get(name) is not None}
    return {**{name: value for name, value in sampling.items() if value is not None}, **prompt}


def _columns(answer: DataRow) -> DataRow:
    """The columns of an answer in the simple format."""
    error, usage = answer.get("error"), answer.get("usage", {})
    choices = answer.get("choices") or ([answer] if "text" in answer else [])
    first = choices[0] if choices else {}
    error = error or next((choice["error"] for choice in choices if "error" in choice), None)
    return {
        "generated_text": first.get("text", ""),
        "generated_texts": [choice["text"] for choice in choices],
        "generated_tokens": first.get("token_ids", []),
        "finish_reason": first.get("finish_reason", ""),
        "num_input_tokens": usage.get("prompt_tokens", 0),
        "num_generated_tokens": usage.get("completion_tokens", 0),
        ERROR: "" if error is None else f"{error['code']}: {error['message']}",
    }


def _plain(value: Any) -> Any:
    """A value of NumPy or Arrow as JSON has it; fields of structs that are null are absent."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value
