"""A job on a cluster of threads: the rows are those of one engine, whatever happens to the engines."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from moelight.batch.job import Interrupt, JobAnswers, JobRun, run_job
from moelight.batch.options import Durability, JobOptions, JobResult
from moelight.core.errors import ConfigError
from moelight.core.request import PROMPT_ONLY, PoolingParams, Request, SamplingParams
from moelight.integrations.ray import job as cluster_job
from moelight.integrations.ray.job import ClusterJob
from moelight.integrations.ray.leases import LeaseSizes
from moelight.integrations.ray.worker import EngineWorker
from moelight.observe.stats import RunStats
from tests.batch.playing import Heard
from tests.cases import thorough
from tests.integrations.ray.playing import EchoEngine, EchoWorker, PlayedCluster

SIZES = LeaseSizes(ahead_s=1.0, least_s=0.1, slack=2.0, late_s=0.5)


def worker(**engine: Any) -> type[EngineWorker]:
    class Worker(EchoWorker):
        made: ClassVar[list[EchoEngine]] = []

        @staticmethod
        def engine() -> EchoEngine:  # type: ignore[override]
            Worker.made.append(EchoEngine(**engine))
            return Worker.made[-1]

    return Worker


def prompts(tmp_path: Path, count: int = 200) -> Path:
    """Rows that can be served, unreadable ones, wrong ones and repeated ones."""
    path = tmp_path / "prompts.jsonl"
    with path.open("w") as file:
        for n in range(count):
            row: dict[str, Any] = {"custom_id": f"row-{n if n % 50 != 49 else 3}", "prompt": "a" * (1 + n % 7)}
            if n % 17 == 5:
                row["max_tokens"] = -1
            if n % 40 == 7:
                row["n"] = 1
            file.write("{broken\n" if n % 29 == 11 else json.dumps(row) + "\n")
    return path


def run(
    cluster: PlayedCluster, path: Path, *, sizes: LeaseSizes = SIZES, heard: Heard | None = None, **options: Any
) -> JobResult:
    def answer(job: JobRun) -> JobAnswers:
        with Interrupt(job.told.interrupting) as interrupt:
            cluster.interrupt = interrupt  # type: ignore[attr-defined]
            return ClusterJob(job, cluster, sizes, shown=heard is not None).run(interrupt)  # type: ignore[arg-type]

    inputs = {"output": path.with_name("out.jsonl"), "sampling": SamplingParams(max_tokens=4, seed=0), **options}
    try:
        return run_job(JobOptions(prompts=path, **inputs), answer=answer, progress=heard)
    finally:
        cluster.close()


def rows(path: Path, name: str = "out.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.with_name(name).read_text().splitlines()]


@pytest.fixture
def expected(tmp_path: Path) -> Callable[[Path], list[dict[str, Any]]]:
    def of(path: Path) -> list[dict[str, Any]]:
        alone = path.with_name("alone")
        alone.mkdir()
        copy = alone / path.name
        copy.write_bytes(path.read_bytes())
        run(PlayedCluster(worker()), copy)
        return rows(copy)

    return of


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_SLOTS_EVERY_S", 0.05), ("_TOLD_EVERY_S", 0.05), ("_NO_SLOT_S", 0.2)):
        monkeypatch.setattr(cluster_job, name, value)


def test_rows_are_those_of_one_engine_in_order_with_their_errors(tmp_path: Path, expected: Any) -> None:
    path = prompts(tmp_path)
    result = run(PlayedCluster(worker(batch_size=4), worker(batch_size=16), worker()), path)
    assert rows(path) == expected(path)
    assert result.state == "done"
    assert result.total == 200
    assert result.failed == sum("error" in row for row in rows(path)) > 20
    assert result.first_error is not None
    assert result.first_error.line == 6  # the first of the input, whichever was known first


PROMPT_TASKS: dict[str, dict[str, Any]] = {
    "classify": {"choices": (" yes", " no")},
    "embed": {"pooling": PoolingParams(pooling_type="mean", normalize=True, dimensions=6)},
}


def prompt_rows(path: Path) -> Path:
    """A table, which the driver reads, with a prompt that is refused."""
    lines = [f"{n},{'add ' * (1 + n % 5)}{n} =" for n in range(12)]
    path.write_text("id,prompt\n" + "\n".join([*lines, "13,"]) + "\n")
    return path


def figures(row: dict[str, Any]) -> list[float]:
    return row.get("embedding", [score["logprob"] for score in row.get("scores", ())])


def assert_rows_of_prompts(result: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Equal but for the last bits of numbers, which depend on how passes were packed."""
    assert [sorted(row) for row in result] == [sorted(row) for row in expected]
    for row, other in zip(result, expected, strict=True):
        assert (row["custom_id"], row.get("label"), row.get("error")) == (
            other["custom_id"],
            other.get("label"),
            other.get("error"),
        )
        assert figures(row) == pytest.approx(figures(other), abs=1e-3)
    assert sum("error" in row for row in result) == 1


@pytest.mark.parametrize("task", thorough(PROMPT_TASKS, but=["embed"]))
def test_prompts_of_which_nothing_is_generated(task: str, tmp_path: Path) -> None:
    """By workers with the bundled model, in threads."""
    path = prompt_rows(tmp_path / "prompts.csv")
    how = {"task": task, "sampling": PROMPT_ONLY, "dtype": "float32", "host_memory": 1 << 28, **PROMPT_TASKS[task]}
    run_job(JobOptions(prompts=path, output=path.with_name("alone.jsonl"), **how))
    result = run(PlayedCluster(EngineWorker, EngineWorker), path, heard=Heard(), **how)
    assert (result.completed, result.failed, result.generates) == (12, 1, False)
    assert_rows_of_prompts(rows(path), rows(path, "alone.jsonl"))


def test_a_pass_is_refilled_while_it_runs(tmp_path: Path) -> None:
    """Every pass but the last ones is full: an engine is never drained between two leases."""
    path = tmp_path / "prompts.txt"
    path.write_text("word\n" * 400)
    kind = worker(batch_size=8, pass_s=0.01)
    run(PlayedCluster(kind), path, sizes=LeaseSizes(ahead_s=0.5, least_s=0.05))
    passes = kind.made[0].passes  # type: ignore[attr-defined]
    assert sum(passes) == 400
    assert set(passes[:-5]) == {8}


def test_a_slow_engine_gets_less(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("word\n" * 600)
    fast, slow = worker(batch_size=8, pass_s=0.01), worker(batch_size=8, pass_s=0.1)
    run(PlayedCluster(fast, slow), path, sizes=LeaseSizes(ahead_s=0.3, least_s=0.05))
    done = [sum(kind.made[0].passes) for kind in (fast, slow)]  # type: ignore[attr-defined]
    assert sum(done) == 600
    assert done[0] > 3 * done[1] > 0


@pytest.mark.parametrize("kills", [1, 2])  # three may be deaths of one row
def test_killed_engines_lose_nothing(tmp_path: Path, expected: Any, kills: int) -> None:
    path = prompts(tmp_path)
    cluster = PlayedCluster(worker(batch_size=4, pass_s=0.01), worker(batch_size=4, pass_s=0.01))
    ticks, left = Counter[str](), kills

    def kill(cluster: PlayedCluster) -> None:
        nonlocal left
        ticks["all"] += 1
        if left and ticks["all"] % 15 == 10:
            left -= 1
            cluster.actors[-1][1].kill()

    cluster.every = kill
    assert run(cluster, path).state == "done"
    assert rows(path) == expected(path)
    assert left == 0


class _Halfway(EchoEngine):
    """Counts tokens of the sequences of its pass, as an engine does while they run."""

    running = 0

    def run(self, requests: Any, **hooks: Any) -> Any:
        for completion in super().run(requests, **hooks):
            self.running = 3
            yield completion
            self.running = 0

    @property
    def stats(self) -> RunStats:
        return replace(super().stats, completion_tokens=super().stats.completion_tokens + self.running)


def test_tokens_are_counted_once_also_after_a_death(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("word\n" * 200)

    class Worker(EchoWorker):
        @staticmethod
        def engine() -> EchoEngine:  # type: ignore[override]
            return _Halfway(batch_size=4, pass_s=0.01)

    cluster, ticks = PlayedCluster(Worker, Worker), Counter[str]()

    def kill(cluster: PlayedCluster) -> None:
        ticks["all"] += 1
        if ticks["all"] in (10, 25, 40):
            cluster.actors[-1][1].kill()

    cluster.every = kill
    heard = Heard()
    result = run(cluster, path, heard=heard)
    assert any("killed" in change for change in heard.changes)
    # 200 rows of at most 4 tokens, of which each gives one: the total shrinks to 200, and is never above 800.
    assert all(0 <= done <= expected <= 800 for done, expected in heard.told), heard.told
    assert [done for done, _ in heard.told] == sorted(done for done, _ in heard.told)
    assert result.stats is not None and result.stats.completion_tokens == 200


def test_a_row_that_ends_its_engine_becomes_an_error_row(tmp_path: Path, expected: Any) -> None:
    path = prompts(tmp_path, count=100)
    want = expected(path)
    lines = path.read_text().splitlines()
    lines[30] = json.dumps({"custom_id": "poison", "prompt": "b" * 33})
    path.write_text("\n".join(lines) + "\n")
    cluster = PlayedCluster()

    def die(request: Request) -> None:
        if len(request.token_ids) == len(poison):
            for _, actor in cluster.actors:
                if actor.worker._loop is not None and threading.current_thread() is actor.worker._loop._thread:
                    actor.kill()
            raise RuntimeError("killed")

    from moelight.engine.model import LazyModel

    poison = LazyModel("demo").encode("b" * 33)
    cluster.workers = {f"n{at}": worker(batch_size=16, before=die) for at in range(2)}
    result = run(cluster, path)
    outcome = rows(path)
    assert outcome[30]["error"]["code"] == "row_crashed"
    assert outcome[30]["custom_id"] == "poison"
    assert "3 engines died" in outcome[30]["error"]["message"]
    assert outcome[:30] + outcome[31:] == want[:30] + want[31:]
    assert result.state == "done"


def test_a_node_that_joins_takes_part_and_one_that_leaves_does_not(tmp_path: Path, expected: Any) -> None:
    path = prompts(tmp_path)
    cluster = PlayedCluster(worker(batch_size=4, pass_s=0.02))
    late = worker(batch_size=4, pass_s=0.001)
    ticks = Counter[str]()

    def change(cluster: PlayedCluster) -> None:
        ticks["all"] += 1
        if ticks["all"] == 10:
            cluster.workers["late"] = late
        if ticks["all"] == 40:
            cluster.dead_nodes.add("n0")
            cluster.actors[0][1].kill()

    cluster.every = change
    run(cluster, path, sizes=LeaseSizes(ahead_s=0.05, least_s=0.01))
    assert rows(path) == expected(path)
    assert sum(late.made[0].passes) > 0  # type: ignore[attr-defined]


def test_an_interrupted_job_goes_on(tmp_path: Path, expected: Any) -> None:
    path = prompts(tmp_path)
    cluster = PlayedCluster(worker(batch_size=4, pass_s=0.02))

    def ask(cluster: PlayedCluster) -> None:
        if sum(len(kind.made[0].passes) for kind in cluster.workers.values() if kind.made) > 5:  # type: ignore[attr-defined]
            cluster.interrupt.asked = True  # type: ignore[attr-defined]

    cluster.every = ask
    first = run(cluster, path)
    assert first.state == "interrupted"
    assert 0 < first.completed < 160
    second = run(PlayedCluster(worker()), path)
    assert second.state == "done"
    assert second.completed + second.failed == 200
    assert rows(path) == expected(path)


def test_engines_that_cannot_run_are_one_clear_line(tmp_path: Path) -> None:
    class Refusing(EchoWorker):
        def load(self) -> str:  # type: ignore[override]
            return "demo: 3 GiB are needed"

    with pytest.raises(ConfigError, match=r"no engine can run; n0: demo: 3 GiB are needed \(and 1 more\)"):
        run(PlayedCluster(Refusing, Refusing), prompts(tmp_path))
    with pytest.raises(ConfigError, match="no node has what an engine takes"):
        run(PlayedCluster(), prompts(tmp_path))


def test_an_engine_that_fails_again_and_again_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_job, "_LONGEST_WAIT_S", 0.01)

    def fail(request: Request) -> None:
        raise RuntimeError("no luck")

    with pytest.raises(ConfigError, match="ended 5 times without a result; the last: RuntimeError: no luck"):
        run(PlayedCluster(worker(before=fail)), prompts(tmp_path))


def test_status_and_rows_tell_of_every_engine(tmp_path: Path) -> None:
    path, heard = prompts(tmp_path), Heard()
    cluster = PlayedCluster(worker(pass_s=0.02), worker(pass_s=0.02))
    run(cluster, path, heard=heard, status=tmp_path / "status.json", metrics=tmp_path / "metrics.prom")
    status = json.loads((tmp_path / "status.json").read_text())
    engines = status["moelight"]["engines"]
    assert {engine["name"] for engine in engines} == {"n0", "n1"}
    assert sum(engine["rows"] for engine in engines) == status["request_counts"]["completed"] + sum(
        "error" in row and row["error"]["code"] != "duplicate_custom_id" for row in rows(path)
    )
    assert sorted(shown.number for shown in heard.rows) == list(range(200))
    assert set(cluster.shown["tokens_per_s"]) == {"n0", "n1"}
    assert 'moelight_engine_rows{engine="n0"' in (tmp_path / "metrics.prom").read_text()


@pytest.mark.parametrize("order", ["input", "completion"])
def test_tables_are_leased_as_rows(tmp_path: Path, order: Any) -> None:
    path = tmp_path / "table.csv"
    path.write_text("id,prompt,max_tokens\n" + "".join(f'{n},"word {n}",{1 + n % 3}\n' for n in range(50)) + "x,y\n")
    run(PlayedCluster(worker(), worker()), path, durability=Durability(order=order))
    result = rows(path)
    assert sorted(row.get("custom_id", "x") for row in result) == sorted([*map(str, range(50)), "x"])
    assert sum("error" in row for row in result) == 1
