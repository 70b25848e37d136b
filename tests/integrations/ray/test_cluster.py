"""Jobs and stages on a Ray cluster in this machine: the rows are those of one engine, whatever dies."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.jobs_sections.mixed_rows import write_mixed_rows
from moelight.batch.job import forecast_job, run_job
from moelight.batch.options import Durability, JobOptions
from moelight.core.errors import ConfigError
from moelight.core.request import PROMPT_ONLY, SamplingParams
from moelight.integrations.ray.cluster import ClusterOptions, _short
from moelight.integrations.ray.job import answer_on, plan_on
from moelight.integrations.ray.leases import LeaseSizes
from moelight.integrations.ray.worker import EngineReport, EngineWorker
from tests.batch import calling
from tests.batch.playing import Heard
from tests.integrations.ray.node import HEAD, NODE, patience
from tests.integrations.ray.test_job import PROMPT_TASKS, assert_rows_of_prompts, prompt_rows

if importlib.util.find_spec("ray") is None:  # which takes seconds to import
    pytest.skip("ray is not installed: pip install 'moelight[ray]'", allow_module_level=True)
pytestmark = [pytest.mark.filterwarnings("ignore")]  # Ray's own

SMALL = LeaseSizes(ahead_s=0.3, least_s=0.05)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A head of one core."""
    before = dict(os.environ)
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled", RAY_worker_niceness="0")
    handlers = {item: signal.getsignal(item) for item in (signal.SIGINT, signal.SIGTERM)}
    from ray.cluster_utils import Cluster

    with patience():
        made = Cluster(initialize_head=True, head_node_args={**NODE, **HEAD})
        try:
            yield made
        finally:
            made.shutdown()
            os.environ.clear()
            os.environ.update(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)


def job(path: Path, output: str, **options: Any) -> JobOptions:
    sampling = SamplingParams(max_tokens=16, seed=0)
    inputs = {"batch_size": 8, "sampling": sampling, **options}
    return JobOptions(prompts=path, output=path.with_name(output), **inputs)


def rows(path: Path, output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.with_name(output).read_text().splitlines()]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 rows, and ``alone.jsonl`` beside them, which one engine answered."""
    path = tmp_path_factory.mktemp("rows") / "prompts.jsonl"
    write_mixed_rows(path, 300, max_tokens=(1, 2, 8, 30))
    run_job(job(path, "alone.jsonl"))
    return path


def on(cluster: Any, **options: Any) -> ClusterOptions:
    return ClusterOptions(address=cluster.address, **options)


@pytest.mark.thorough
def test_two_engines_answer_as_one(cluster: Any, prompts: Path) -> None:
    options = job(prompts, "two.jsonl", status=prompts.with_name("status.json"), trace=prompts.with_name("run.json"))
    result = run_job(options, answer=answer_on(on(cluster, num_cpus=0.5), sizes=SMALL))
    assert result.state == "done"
    assert rows(prompts, "two.jsonl") == rows(prompts, "alone.jsonl")
    engines = json.loads(prompts.with_name("status.json").read_text())["moelight"]["engines"]
    assert len(engines) == 2
    assert sum(engine["rows"] for engine in engines) >= 285  # the others the driver refused
    assert all(engine["binding"]["lane"] == "cpu" for engine in engines if engine["rows"])
    traces = sorted(prompts.parent.glob("run.*.json"))
    assert len(traces) == 2
    assert any(json.loads(trace.read_text())["traceEvents"] for trace in traces)


@pytest.mark.thorough
def test_engines_with_drafts_answer_as_one_without(cluster: Any, prompts: Path) -> None:
    stats = prompts.with_name("drafts.json")
    options = job(prompts, "drafts.jsonl", speculate="ngram", stats=stats)
    run_job(options, answer=answer_on(on(cluster, num_cpus=0.5), sizes=SMALL))
    assert rows(prompts, "drafts.jsonl") == rows(prompts, "alone.jsonl")
    assert json.loads(stats.read_text())["counts"]["accepted_tokens"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize("task", PROMPT_TASKS)
def test_prompts_of_which_nothing_is_generated(task: str, cluster: Any, tmp_path: Path) -> None:
    path = prompt_rows(tmp_path / "prompts.csv")
    how = {"task": task, "sampling": PROMPT_ONLY, "dtype": "float32", **PROMPT_TASKS[task]}
    run_job(job(path, "alone.jsonl", **how))
    result = run_job(job(path, "two.jsonl", **how), answer=answer_on(on(cluster, num_cpus=0.5), sizes=SMALL))
    assert result.state == "done"
    assert_rows_of_prompts(rows(path, "two.jsonl"), rows(path, "alone.jsonl"))


@pytest.mark.thorough
def test_a_dry_run_says_what_each_node_would_do(cluster: Any, prompts: Path) -> None:
    forecast = forecast_job(job(prompts, "none.jsonl"), plan_engines=plan_on(on(cluster, num_cpus=0.5)))
    assert len(forecast.engines) == 2
    assert sum(engine.share for engine in forecast.engines) == pytest.approx(1.0)
    assert sum(engine.rows for engine in forecast.engines) == pytest.approx(forecast.summary.served, abs=1)
    assert all(engine.binding == "cpu" and engine.seconds and engine.why for engine in forecast.engines)
    assert not prompts.with_name("none.jsonl").exists()


@pytest.mark.thorough
def test_a_stage_of_ray_data_answers_as_one_engine(cluster: Any, prompts: Path) -> None:
    """Its errors are in a column, the columns of the input are kept, and the stages around it are the user's."""
    import ray

    from moelight.integrations.ray import ERROR, build_processor

    items = [{"question": f"add {n} and 3 =", "most": -1 if n % 10 == 5 else 1 + n % 7} for n in range(40)]
    lines = [{"prompt": item["question"], "max_tokens": item["most"], "ignore_eos": True} for item in items]
    path = prompts.with_name("stage.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_job(job(path, "stage.out.jsonl"))
    want = rows(path, "stage.out.jsonl")
    processor = build_processor(
        model="demo",
        batch_size=8,
        sampling={"ignore_eos": True, "seed": 0},
        preprocess=lambda row: {"prompt": row["question"], "sampling_params": {"max_tokens": row["most"]}},
        postprocess=lambda row: {**row, "length": len(row["generated_text"])},
        engines=1,
        rows_per_task=16,
        ray_remote_args={"num_cpus": 0.5},
    )
    node = cluster.add_node(**NODE)  # the stages around the engine take a core
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        result = processor(ray.data.from_items(items)).take_all()
    finally:
        ray.shutdown()
        cluster.remove_node(node)
    assert len(result) == len(items)
    by_question = {row["question"]: row for row in result}
    for item, answer in zip(items, want, strict=True):
        row = by_question[item["question"]]
        assert row["most"] == item["most"]
        if "error" in answer:
            assert row[ERROR].startswith(answer["error"]["code"])
            assert row["generated_text"] == ""
        else:
            assert row[ERROR] == ""
            assert row["generated_text"] == answer["text"]
            assert row["num_generated_tokens"] == len(row["generated_tokens"]) == answer["usage"]["completion_tokens"]
            assert row["length"] == len(answer["text"])


def test_the_reason_of_a_lost_engine_is_one_line_of_whole_words() -> None:
    text = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: Worker\nThe actor is dead because its "
        "worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a "
        "connection error code 2. End of file. There are some potential root causes. (1) The process is killed by "
        "SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called."
    )
    reason = _short(RuntimeError(text))
    assert reason.startswith("its worker process has died. Worker exit type: SYSTEM_ERROR")
    assert reason.endswith("End of file") and "\n" not in reason
    long = _short(RuntimeError(" ".join(["unavailable"] * 60)))
    assert long.endswith("unavailable …") and len(long) <= 300


@pytest.mark.thorough
def test_the_guides_stage_keeps_the_errors_of_its_rows(cluster: Any, tmp_path: Path) -> None:
    """Its lines are run as they stand, with two rows that cannot be served, and no argument is deprecated."""
    import ray
    from pyarrow import parquet, table
    from ray.util.annotations import RayDeprecationWarning

    guide = Path("docs/guides/ray.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "build_processor(" in block)
    for name in ("questions", "answers"):
        code = code.replace(f'"{name}/"', repr(str(tmp_path / name)))
    (tmp_path / "questions").mkdir()
    questions = [f"{n} + {n} =" for n in range(20)] + ["a" * 4000, "9" * 3000]
    parquet.write_table(table({"question": questions}), tmp_path / "questions" / "q.parquet")
    node = cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        with warnings.catch_warnings():
            warnings.simplefilter("error", category=RayDeprecationWarning)
            exec(code.replace("path/to/checkpoint", "demo"), {})  # noqa: S102 (the guide's own lines)
    finally:
        ray.shutdown()
        cluster.remove_node(node)
    answers = {row["question"]: row for row in parquet.read_table(tmp_path / "answers").to_pylist()}
    assert len(answers) == len(questions)
    for question in questions:
        failed = answers[question]["__inference_error__"]
        assert failed.startswith("context_length_exceeded") if len(question) > 100 else failed == ""


@pytest.mark.thorough
def test_what_no_node_has_is_one_clear_line(cluster: Any, prompts: Path) -> None:
    with pytest.raises(ConfigError, match="no node has what an engine takes"):
        forecast_job(job(prompts, "none.jsonl"), plan_engines=plan_on(on(cluster, labels={"zone": "a"})))


@pytest.mark.thorough
def test_an_engine_and_a_node_die(cluster: Any, prompts: Path) -> None:
    """The rows are still those of one engine, and the slot of the engine gets another one."""
    node = cluster.add_node(**NODE)
    before, happened = set(_engines()), []

    def disturb() -> None:
        first = _wait_for(lambda: set(_engines()) - before)
        time.sleep(1.0)
        os.kill(first.pop(), signal.SIGKILL)
        happened.append("engine")
        time.sleep(2.0)
        cluster.remove_node(node, allow_graceful=False)
        happened.append("node")

    thread = threading.Thread(target=disturb)
    thread.start()
    result = run_job(job(prompts, "disturbed.jsonl", batch_size=2), answer=answer_on(on(cluster), sizes=SMALL))
    thread.join()
    assert happened == ["engine", "node"]
    assert result.state == "done"
    assert rows(prompts, "disturbed.jsonl") == rows(prompts, "alone.jsonl")


@pytest.mark.thorough
def test_an_engine_dies_while_its_rows_reason_and_call_tools(cluster: Any, tmp_path: Path) -> None:
    path, template = tmp_path / "calls.jsonl", tmp_path / "calls.jinja"
    calling.write_lines(path, 70)
    template.write_text(calling.TEMPLATE)
    more = {"chat_template": template, "batch_size": 2, "durability": Durability(sync_s=0.1)}
    alone = run_job(job(path, "calls.alone.jsonl", **more))
    output, before, killed = path.with_name("calls.killed.jsonl"), set(_engines()), []

    def disturb() -> None:
        _wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") > 10)
        killed.extend(set(_engines()) - before)
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=disturb)
    thread.start()
    result = run_job(job(path, output.name, **more), answer=answer_on(on(cluster, num_cpus=0.5), sizes=SMALL))
    thread.join()
    assert killed and result.state == "done"
    assert calling.rows_of(output) == calling.rows_of(path.with_name("calls.alone.jsonl"))
    assert result.invalid == alone.invalid >= 70 // len(calling.KINDS)  # one of the kinds is never valid


@pytest.mark.thorough
def test_an_engine_out_of_memory_loses_its_unfinished_rows_alone(cluster: Any, prompts: Path, tmp_path: Path) -> None:
    """The kernel kills it, as it does where a control group has no memory left."""
    group = Path("/sys/fs/cgroup/memory") / f"moelight-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("nobody but root, with cgroups of version 1, may limit the memory of a process")
    before, heard, killed = set(_engines()), Heard(), []

    class Hungry(EngineWorker):
        def exchange(self, rows: Any, wait_s: float) -> EngineReport:
            if (tmp_path / str(os.getpid())).exists():
                bytearray(1 << 28)
            return super().exchange(rows, wait_s)

    def limit() -> None:
        _wait_for(lambda: prompts.with_name("memory.jsonl").exists())
        _wait_for(lambda: prompts.with_name("memory.jsonl").read_bytes().count(b"\n") > 5)
        engine = min(set(_engines("ray::Hungry")) - before)
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        (group / "cgroup.procs").write_text(str(engine))
        (tmp_path / str(engine)).touch()
        _wait_for(lambda: not psutil.pid_exists(engine))
        control = (group / "memory.oom_control").read_text().split()
        killed.append(int(control[control.index("oom_kill") + 1]))

    thread = threading.Thread(target=limit)
    thread.start()
    options = job(prompts, "memory.jsonl", batch_size=2, durability=Durability(sync_s=0.1))
    answer = answer_on(on(cluster, num_cpus=0.5), sizes=SMALL, worker=Hungry)
    result = run_job(options, answer=answer, progress=heard)
    thread.join()
    group.rmdir()
    assert killed == [1]
    assert result.state == "done"
    assert rows(prompts, "memory.jsonl") == rows(prompts, "alone.jsonl")
    assert sum("is lost" in line for line in heard.changes) == 1, heard.changes


@pytest.mark.thorough
def test_a_worker_with_a_full_disk_loses_nothing(cluster: Any, prompts: Path, tmp_path: Path) -> None:
    """Its trace does not fit on its disk: its rows are answered, and a line says why there is no trace of it."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "none", tmp_path], check=False).returncode:
        pytest.skip("nobody may mount here")
    original, heard = {"small": 1}, Heard()
    node = cluster.add_node(**NODE, env_vars={"TMPDIR": str(tmp_path)}, resources=original)
    try:
        options = job(prompts, "disk.jsonl", trace=prompts.with_name("disk.json"))
        result = run_job(options, answer=answer_on(on(cluster, resources=original), sizes=SMALL), progress=heard)
        assert not list(tmp_path.glob("moelight-*"))
    finally:
        cluster.remove_node(node)
        subprocess.run(["umount", tmp_path], check=True)
    assert result.state == "done"
    assert rows(prompts, "disk.jsonl") == rows(prompts, "alone.jsonl")
    assert not list(prompts.parent.glob("disk.*.json"))
    assert [line for line in heard.changes if "no space left on device" in line] == heard.changes != []


def _engines(name: str = "ray::EngineWorker") -> list[int]:
    """Processes that Ray named after the actor's class."""
    result = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        if (process.info["cmdline"] or [""])[0].startswith(name):
            result.append(process.info["pid"])
    return result


def _wait_for(label: Any) -> Any:
    for _ in range(600):
        if result := label():
            return result
        time.sleep(0.1)
    raise AssertionError("it did not happen")
