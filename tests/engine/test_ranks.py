"""Several ranks give the tokens of one, whatever holds the pages; a rank that ends, ends the run with one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from moelight.cli import INTERRUPTED
from moelight.cli.main import main
from moelight.core.errors import ConfigError, MoelightError, RankError
from moelight.core.policy import Policy, Shares
from moelight.core.request import PROMPT_ONLY, PoolingParams, SamplingParams
from moelight.engine.engine import Engine
from moelight.engine.ranks import core_shares, count_ranks
from moelight.experts.options import ExpertOptions
from moelight.models.checkpoints import open_model
from moelight.weights.shard import shard
from tests.cases import thorough
from tests.engine.graphs import HOW, ORDERS_BY_NAME, SIZES, STREAMED, made, prompts
from tests.engines import Tiny
from tests.process import holds_at_last
from tests.weights.gguf_files import write_gguf
from tests.weights.quantised import METHODS, quantise

RESIDENT = Shares(host=1.0)
HALF = Shares(host=0.5, disk=0.5)
ORDERS = ["cgopipe-split", "cgopipe-gpu", "module-gpu", "flexgen-gpu"]
FAMILIES = ["qwen2_moe", "gpt_oss", "deepseek_v3", "jamba"]
ON_DEMAND: dict[str, dict[str, Any]] = {
    "from disk": {"weights": Shares(disk=1.0)},
    "some resident": {"weights": HALF},
    "to a device": {"ffn_device": "gpu", "weights": Shares(device=0.3, host=0.3, disk=0.4)},
    "some on the cpu": {"ffn_device": "split", "weights": Shares(device=0.3, host=0.4, disk=0.3), "cpu_experts": 0.2},
}


def answers(model: Path, tp: int, *, device: str = "cpu", how: SamplingParams = HOW, **policy: Any) -> list[list[int]]:
    values = {"weight_dtype": "float32", "weights": RESIDENT, **SIZES, **policy}
    with Engine(Policy(model=str(model), **values), device=device, tp=str(tp)) as engine:
        return [list(item.token_ids or ()) for item in engine.generate(prompts(), how)]


@pytest.fixture(scope="module")
def mixtral(tiny: Tiny) -> Path:
    return tiny("mixtral", num_local_experts=4, num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.parametrize(
    "weights", thorough([RESIDENT, HALF, Shares(disk=1.0)], but=[HALF]), ids=["resident", "half", "streamed"]
)
def test_two_ranks_give_what_one_gives(mixtral: Path, weights: Shares) -> None:
    """Tokens, samples, scores, embeddings, and experts by their numbers in the model."""
    opened = shard(open_model(str(mixtral)), 0, 2)
    assert (opened.profile.attention.num_heads, opened.profile.head_ranks) == (2, 2)
    how = [SamplingParams(temperature=1.0, seed=index, max_tokens=6, ignore_eos=True, logprobs=2) for index in range(5)]
    results = []
    for tp in ("1", "2"):
        policy = Policy(model=str(mixtral), weight_dtype="float32", **{"weights": weights, **SIZES})
        with Engine(policy, device="cpu", tp=tp) as engine:
            greedy = engine.generate(prompts(), replace(HOW, return_routed_experts=True))
            sampled = engine.generate(prompts(), how)
            scored = engine.generate(prompts(), PROMPT_ONLY)
            vectors = engine.embed(prompts(), PoolingParams(pooling_type="mean"))
        tokens = [item.token_ids for item in (*greedy, *sampled)], [item.prompt_tokens for item in scored]
        results.append(((*tokens, [item.routed_experts.tolist() for item in greedy]), vectors))
    (one, expected), (two, vectors) = results
    assert one == two
    assert max(max(map(max, layer)) for row in one[-1] for layer in row) > 1
    assert vectors == pytest.approx(expected, abs=1e-5)


@pytest.mark.thorough
def test_four_ranks_share_heads_that_they_cannot_divide(mixtral: Path) -> None:
    """Two key heads: every rank attends with all heads, and has one expert."""
    opened = shard(open_model(str(mixtral)), 3, 4)
    assert (opened.profile.experts.num_experts, opened.profile.head_ranks) == (1, 1)
    assert answers(mixtral, 4) == answers(mixtral, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("order", ORDERS)
def test_each_rank_streams_its_pages_to_a_device_of_its_own(mixtral: Path, order: str) -> None:
    schedule, attention, experts, homes = ORDERS_BY_NAME[order]
    kv = {"kv": Shares(device=0.5, host=0.5)} if attention == "gpu" else {}
    if experts == "split":
        kv["cpu_experts"] = 0.35
    orders: dict[str, Any] = {"schedule": schedule, "attention_device": attention, "ffn_device": experts, **kv}
    assert answers(mixtral, 2, device="twin", weights=homes, **orders) == answers(mixtral, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("places", ON_DEMAND)
def test_each_rank_fetches_the_routed_ones_of_its_experts(tiny: Tiny, places: str) -> None:
    """Passes of so few tokens are on-demand ones by the measured share, or as a cache would have it (``plain``)."""
    model = tiny("mixtral", num_local_experts=8, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2)
    sizes: dict[str, Any] = {"batch_size": 2, "micro_batch_size": 1, "micro_batch_tokens": 4, "kv_tokens": 256}
    policy = Policy(model=str(model), weight_dtype="float32", **sizes, **ON_DEMAND[places])
    results = []
    for tp in ("1", "2"):
        device = "twin" if policy.discrete else "cpu"
        with Engine(policy, device=device, tp=tp, experts=ExpertOptions(plain=places == "from disk")) as engine:
            results.append([item.token_ids for item in engine.generate(prompts(), HOW)])
            assert engine._passes is not None and engine._passes.stalls["pages"] > 0
    assert results[0] == results[1]


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_module_graphs_divide_their_experts(family: str, checkpoints: Any) -> None:
    model, expected = checkpoints(family)
    assert answers(model, 2, weights=STREAMED) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["gptq int4", "nvfp4", "awq", "mlx int4", "nf4"])
def test_stored_formats_are_divided_as_they_are(tiny: Tiny, method: str, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape["intermediate_size"] = 64
    quantised, _ = quantise(tiny("mixtral", num_local_experts=4, **shape), tmp_path, METHODS[method])
    assert answers(quantised, 2, weights=HALF) == answers(quantised, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ["llama", "qwen3moe", "deepseek2", "gpt-oss"])
def test_gguf_files_are_divided_as_they_are(architecture: str, tmp_path: Path) -> None:
    """By our own decoder, whose heads lie otherwise in files of llama, or by module graphs."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, architecture, experts="MXFP4" if architecture == "gpt-oss" else "Q4_0", vocab=True)
    assert answers(path, 2, weights=HALF) == answers(path, 1)


def test_a_rank_that_is_killed_ends_the_run_and_the_cores_are_free_again(mixtral: Path) -> None:
    before, started = os.sched_getaffinity(0), set(psutil.Process().children())
    policy = Policy(model=str(mixtral), weight_dtype="float32", **SIZES)
    with Engine(policy, device="cpu", tp="2") as engine:
        engine.generate(prompts(), HOW)
        (other,) = set(psutil.Process().children()) - started
        os.kill(other.pid, signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 1 of 2 ended by signal 9; .*finished rows are kept"):
            engine.generate(prompts(), HOW)
    assert not psutil.pid_exists(other.pid) or other.status() == psutil.STATUS_ZOMBIE
    assert os.sched_getaffinity(0) == before
    assert answers(mixtral, 2) == answers(mixtral, 1)


@pytest.mark.thorough
def test_other_ranks_end_with_the_process_of_the_engine(mixtral: Path) -> None:
    program = (
        "import sys, time, psutil\n"
        "from moelight.core.policy import Policy\n"
        "from moelight.engine.engine import Engine\n"
        "engine = Engine(Policy(model=sys.argv[1]), device='cpu', tp='2')\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(mixtral)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        other = psutil.Process(int(process.stdout.readline()))
        process.kill()
        psutil.wait_procs([other], timeout=60)
        assert not other.is_running() or other.status() == psutil.STATUS_ZOMBIE


@pytest.mark.thorough
def test_a_program_whose_rank_was_killed_ends_with_its_traceback(mixtral: Path) -> None:
    """Though nothing closes the engine: no thread is left that could abort the end of the interpreter."""
    program = (
        "import sys, psutil\n"
        "from moelight.core.policy import Policy\n"
        "from moelight.core.request import SamplingParams\n"
        "from moelight.engine.engine import Engine\n"
        "engine = Engine(Policy(model=sys.argv[1]), device='cpu', tp='2')\n"
        "(other,) = psutil.Process().children()\n"
        "other.kill()\n"
        "engine.generate([[1, 2]], SamplingParams(max_tokens=4))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(mixtral)], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("moelight.core.errors.RankError: rank 1 of 2 ended by signal 9; ")


@pytest.mark.thorough
def test_an_interrupt_ends_the_wait_for_other_ranks(mixtral: Path, tmp_path: Path) -> None:
    """The other rank is one that never comes."""
    program = (
        "import signal, subprocess, sys\n"
        "from moelight.cli.main import main\n"
        "from moelight.engine import ranks\n"
        "def start(task):\n"
        "    waiting = [sys.executable, '-c', 'input()']\n"
        "    return subprocess.Popen(waiting, stdin=subprocess.PIPE, pass_fds=task.descriptors)\n"
        "ranks._start = start\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    (tmp_path / "in.jsonl").write_text('{"prompt": "row"}\n')
    job = ["generate", str(tmp_path / "in.jsonl"), "--model", str(mixtral), "--host-memory", "1GiB", "--tp", "2"]
    command = [sys.executable, "-c", program, *job, "-o", str(tmp_path / "out.jsonl")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        started = psutil.Process(process.pid).children
        assert holds_at_last(lambda: bool(started()) or process.poll() is not None, 120.0)
        (other,) = started()
        process.send_signal(signal.SIGINT)
        _, messages = process.communicate()
    assert process.returncode == INTERRUPTED and "Traceback" not in messages
    assert holds_at_last(lambda: not other.is_running() or other.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.thorough
def test_ranks_run_where_the_system_binds_no_process_to_cores(
    mixtral: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answers(mixtral, 1)
    monkeypatch.delattr(os, "sched_setaffinity")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert core_shares(2) == [[], []] and answers(mixtral, 2) == expected
    assert "this system binds no process to cores: 2 ranks share all of them" in caplog.text


@pytest.mark.thorough
def test_a_job_of_two_ranks(mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": f"row {n}"}) + "\n" for n in range(6)))
    monkeypatch.chdir(tmp_path)
    files = []
    for tp in ("1", "2"):
        name = f"out{tp}.jsonl"
        options = ["--model", str(mixtral), "--max-tokens", "4", "--dtype", "float32", "--host-memory", "1GiB"]
        assert main(["generate", "in.jsonl", *options, "--tp", tp, "-o", name]) == 0
        rows = [json.loads(line) for line in Path(name).read_text().splitlines()]
        files.append([row["text"] for row in rows])
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("family", "tp", "message"),
    [
        ("mixtral", 3, r"--tp 3 does not divide the 4 experts of .*; choose of 2, 4"),
        ("qwen3", 2, r"--tp 2: .* has no experts to divide among ranks; leave --tp out"),
    ],
)
def test_what_cannot_be_divided_is_refused(tiny: Tiny, family: str, tp: int, message: str, tmp_path: Path) -> None:
    model = tiny("mixtral", num_local_experts=4) if family == "mixtral" else made(tmp_path / family, family)[0]
    with pytest.raises(ConfigError, match=message):
        shard(open_model(str(model)), 0, tp)


def test_ranks_are_counted_and_cores_divided() -> None:
    assert count_ranks("auto", "twin") == 1 and count_ranks(2, "cpu") == 2
    for asked in ("0", "two", "65"):
        with pytest.raises(ConfigError, match="tp must be auto or a number of ranks from 1 to 64"):
            count_ranks(asked, "cpu")
    shares = core_shares(1)
    assert shares == [sorted(shares[0])] and set(shares[0]) <= os.sched_getaffinity(0)


def test_expert_policies_are_refused(mixtral: Path) -> None:
    policy = Policy(model=str(mixtral), **SIZES)
    with pytest.raises(MoelightError, match="--tp: expert policies, traces and profiles"):
        Engine(policy, device="cpu", tp="2", experts=ExpertOptions(record=True))
