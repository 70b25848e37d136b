"""``moelight optimize``: the options that ask, the table and the JSON that answer, the policy file that is run."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moelight.cli import planning_options
from moelight.cli.plan_view import print_plan
from moelight.core.policy import Policy, Shares
from moelight.core.units import GiB
from moelight.hrm.estimate import Estimate
from moelight.optimizer.plan import Plan, TierUse, WhatIf
from moelight.profiles.hardware import HardwareProfile, load_hardware_profile
from moelight.profiles.policy_files import load_policy
from moelight.profiles.workload import Workload
from moelight.runtime import machine_profile
from tests.cli.program import DEMO, PLANNED, ROOT, moelight, read_rows
from tests.cli.program import moelight_inside as run

SMALL = ("--hw", "cpu-avx2", "--model", "demo", "--num-requests", "20", "--prompt-len", "12", "--gen-len", "8")
BESIDE_A_GPU = ("--hw", "t4", *SMALL[2:], "--device-memory", "1GiB", "--host-memory", "2GiB")
ONE_ORDER = ("--fix", "schedule=serial")  # of which there is less to search


def plan(*arguments: str | Path) -> dict[str, Any]:
    done = run("optimize", *arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_the_keys_of_the_json_are_an_interface() -> None:
    result = plan(*BESIDE_A_GPU)
    assert set(result) >= {"policy", "estimate", "memory", "why", "solve_s"}
    assert set(result["policy"]) >= {
        "batch_size",
        "micro_batch_size",
        "num_micro_batches",
        "attention_device",
        "ffn_device",
        "weights",
        "kv",
        "weight_dtype",
        "kv_dtype",
        "schedule",
    }
    assert set(result["policy"]["weights"]) == {"device", "host", "disk"}
    assert set(result["policy"]["kv"]) == {"device", "host"}
    for shares in ("weights", "kv"):
        assert sum(result["policy"][shares].values()) == pytest.approx(1)
    assert set(result["estimate"]) >= {
        "layer_s",
        "pass_s",
        "decode_tokens_per_s",
        "tokens_per_s",
        "lanes",
        "binding",
    }
    assert result["estimate"]["binding"] in result["estimate"]["lanes"]
    assert {"device", "host"} <= set(result["memory"])
    for use in result["memory"].values():
        assert set(use) == {"capacity_bytes", "total_bytes", "by_purpose"}
        assert sum(use["by_purpose"].values()) == use["total_bytes"] <= use["capacity_bytes"]
    assert result["memory"]["device"]["capacity_bytes"] == GiB


def test_the_workload_is_mtbench_unless_said_otherwise() -> None:
    base = ("--hw", "cpu-avx2", "--model", "demo", "--num-requests", "16", "--gen-len", "4", *ONE_ORDER)
    named = plan(*base, "--workload", "mtbench")["workload"]
    assert plan(*base)["workload"] == named == {**named, "prompt_len": 77, "max_prompt_len": 418, "num_requests": 16}
    other = plan(*base, "--workload", "synthetic-reasoning", "--prompt-len", "300")["workload"]
    assert other == {"num_requests": 16, "prompt_len": 300, "max_prompt_len": 300, "gen_len": 4}
    assert plan(*base, "--prompt-len", "8", "--max-prompt-len", "9")["workload"]["max_prompt_len"] == 9


def test_fixed_parts_are_kept() -> None:
    fixes = ("batch_size=6", "micro_batch_size=3", "attention=cpu", "ffn=gpu", "weights.device=0.5", "schedule=serial")
    policy = plan(*BESIDE_A_GPU, *(part for fix in fixes for part in ("--fix", fix)))["policy"]
    assert (policy["batch_size"], policy["micro_batch_size"], policy["num_micro_batches"]) == (6, 3, 2)
    assert (policy["attention_device"], policy["ffn_device"], policy["schedule"]) == ("cpu", "gpu", "serial")
    assert policy["weights"]["device"] == 0.5


def test_a_dtype_may_be_asked_for() -> None:
    question = (*SMALL, *ONE_ORDER)
    assert plan(*question)["policy"]["weight_dtype"] == "auto"
    assert plan(*question, "--weight-dtype", "int4")["policy"]["weight_dtype"] == "int4"
    assert plan(*question, "--kv-dtype", "choose")["policy"]["kv_dtype"] in (
        "auto",
        "int8",
        "int4",
        "bfloat16",
        "float16",
    )


def test_the_same_question_is_answered_from_the_cache(own_cache: Path) -> None:
    question = (*SMALL, *ONE_ORDER, "--fix", "batch_size=7")
    before = {path.name for path in (own_cache / "plans").glob("*")}
    unkept = plan(*question, "--no-cache")
    assert {path.name for path in (own_cache / "plans").glob("*")} == before
    first = plan(*question)
    assert len({path.name for path in (own_cache / "plans").glob("*")} - before) == 1
    assert plan(*question) == first
    for answer in (first, unkept):
        answer.pop("solve_s")
    assert first == unkept


def test_the_policy_file_holds_the_plan_and_can_be_run(tmp_path: Path) -> None:
    path, prompts = tmp_path / "policy.yaml", ROOT / "examples" / "prompts.jsonl"
    policy = plan(*SMALL, "--host-memory", "200MiB", "-o", path)["policy"]
    written = load_policy(path)
    assert (written.batch_size, written.model) == (policy["batch_size"], "demo")
    assert (written.weights.device, written.weights.host) == (policy["weights"]["device"], policy["weights"]["host"])
    text = path.read_text()
    for message in ("# demo on cpu-avx2: 20 prompts", "# Why: ", "tokens/s end to end", "# Memory: host "):
        assert message in text
    plain = run("generate", prompts, "--max-tokens", "4", *PLANNED)
    assert plain.returncode == 0, plain.stderr
    done = run("generate", prompts, "--max-tokens", "4", "--policy", path)
    assert done.returncode == 0
    assert "as the policy says: N = " in done.stderr and done.stderr.count("\n") == 2
    assert read_rows(done.stdout) == read_rows(plain.stdout)
    again = run("generate", prompts, "--max-tokens", "4", "--policy", path, "--model", ROOT / "moelight" / "demo")
    assert again.stdout == done.stdout


def test_the_policy_file_on_standard_output_is_all_there_is() -> None:
    done = run("optimize", *SMALL, "-o", "-")
    assert done.returncode == 0 and done.stdout.startswith("# demo on cpu-avx2") and "batch_size: " in done.stdout
    assert "what would help" not in done.stdout


def test_the_machine_at_hand_is_measured_with_the_models_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path | None] = []

    def measured(*, disk_dir: Path | None) -> HardwareProfile:
        asked.append(disk_dir)
        return dataclasses.replace(load_hardware_profile("cpu-avx2"), name="auto")

    monkeypatch.setattr(machine_profile, "machine_profile", measured)
    demo = ROOT / "moelight" / "demo"
    work = (*SMALL[4:], *ONE_ORDER)
    assert plan("--model", "demo", *work)["hardware"] == "auto"
    assert plan("--hw", "auto", "--model", demo, *work)["policy"]["model"] == str(demo)
    assert asked == [None, demo]


def test_ranks_are_planned_with_their_exchanges() -> None:
    """On two GPUs they gain, on the cores of one processor they do not."""
    work = ("--num-requests", "64", "--prompt-len", "12", "--gen-len", "8")
    cards = plan("--hw", "2xt4", "--model", "mixtral-8x7b", *work, "--tp", "auto", *ONE_ORDER)
    assert cards["ranks"] == 2 and cards["several"]["ranks"] == 2
    assert cards["estimate"]["tokens_per_s"] == cards["several"]["tokens_per_s"]
    assert 0 < cards["estimate"]["lanes"]["exchange"] < cards["several"]["exchange_s"] < cards["several"]["pass_s"]
    cores = plan(*SMALL, "--tp", "2", *ONE_ORDER)
    assert cores["ranks"] == 2 and cores["several"]["gain"] < 1
    assert cores["memory"]["host"]["capacity_bytes"] < plan(*SMALL, *ONE_ORDER)["memory"]["host"]["capacity_bytes"]
    shown = run("optimize", *SMALL, "--tp", "auto", *ONE_ORDER).stdout
    assert "one rank: there is one GPU or NUMA node" in shown


@pytest.mark.usefixtures("own_cache")
def test_one_process_is_chosen_where_ranks_do_not_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_options, "count_nodes", lambda _: 2)
    result = " ".join(run("optimize", *SMALL, "--tp", "auto", *ONE_ORDER).stdout.split())
    assert "one rank: several would not be faster" in result
    assert re.search(r"2 give [\d.,]+ tokens/s, 0\.\d\d x one process; they exchange for .* of a decode pass", result)


# What is wrong: the arguments, and words the line must hold.
REFUSED = {
    "no model": ("--hw t4", ["--model"]),
    "unknown machine": ("--hw l44 --model demo", ["l44", "'l4'"]),
    "no machine file": ("--hw ./none.yaml --model demo", ["none.yaml"]),
    "unknown model": ("--hw t4 --model mixtrall", ["mixtrall", "mixtral-8x7b"]),
    "unknown workload": ("--hw t4 --model demo --workload mtbunch", ["mtbunch", "mtbench"]),
    "unknown estimator": ("--hw t4 --model demo --estimator papper", ["papper", "'paper'"]),
    "unknown key": ("--hw t4 --model demo --fix attn=cpu", ["attn", "attention"]),
    "unknown schedule": ("--hw t4 --model demo --fix schedule=cgopip", ["cgopip", "'cgopipe'"]),
    "unknown dtype": ("--hw t4 --model demo --weight-dtype int5", ["int5", "int4"]),
    "two values": ("--hw t4 --model demo --fix ffn=gpu --fix ffn=cpu", ["ffn=gpu", "ffn=cpu"]),
    "shares above 1": (
        "--hw t4 --model demo --fix weights.device=0.7 --fix weights.host=0.6",
        ["weights.device=0.7", "weights.host=0.6"],
    ),
    "counts that disagree": (
        "--hw t4 --model demo --fix batch_size=9 --fix micro_batch_size=4 --fix num_micro_batches=2",
        ["batch_size=9", "micro_batch_size=4", "num_micro_batches=2"],
    ),
    "a GPU where there is none": ("--hw cpu-avx2 --model demo --fix attention=gpu", ["attention_device=gpu", "GPU"]),
    "a dtype twice": (
        "--hw t4 --model demo --weight-dtype int4 --fix weight_dtype=int8",
        ["--weight-dtype int4", "weight_dtype=int8"],
    ),
    "a prompt longer than the longest": (
        "--hw t4 --model demo --prompt-len 9 --max-prompt-len 8",
        ["--prompt-len 9", "--max-prompt-len 8"],
    ),
    "a longest prompt below the average": ("--hw t4 --model demo --max-prompt-len 8", ["--max-prompt-len 8", "77"]),
    "not a size": ("--hw t4 --model demo --host-memory lots", ["--host-memory", "lots"]),
    "not a size of disk": ("--hw t4 --model demo --disk much", ["--disk", "much"]),
    "device memory without a device": (
        "--hw cpu-avx2 --model demo --device-memory 1GiB",
        ["--device-memory", "cpu-avx2"],
    ),
    "too little memory": (
        "--hw cpu-avx2 --model mixtral --host-memory 4GiB --disk 0",
        ["--host-memory", "4.0GiB", "at least", "GiB more"],
    ),
    "too little memory for JSON": ("--hw cpu-avx2 --model mixtral --host-memory 4GiB --disk 0 --json", ["at least"]),
    "two things on stdout": ("--hw cpu-avx2 --model demo --json -o -", ["--json", "--output -"]),
    "ranks of machines": ("--hw t4,l4 --model demo --tp 2", ["--tp 2", "one machine"]),
    "no number of ranks": ("--hw cpu-avx2 --model demo --tp two", ["auto", "from 1 to 64", "two"]),
    "more ranks than GPUs": ("--hw t4 --model demo --tp 2", ["--tp 2", "t4", "one GPU"]),
    "ranks of several GPUs each": ("--hw 2xt4 --model demo --tp 2 --fix gpus=1", ["--tp 2", "gpus=1"]),
    "ranks in the paper": ("--hw 2xt4 --model demo --tp 2 --estimator paper", ["--tp 2", "--estimator"]),
    "an output of machines": ("--hw t4,l4 --model demo -o policy.yaml", ["--output policy.yaml", "one machine"]),
    "unknown machine of several": ("--hw t4,l44 --model demo", ["l44", "'l4'"]),
    "no price file": ("--hw all --model demo --prices ./none.yaml", ["none.yaml"]),
    "unknown prices": ("--hw all --model demo --prices exampels", ["exampels", "'examples'"]),
    "no number of machines": ("--hw all --model demo --nodes 1,0", ["--nodes 1,0", "1,024"]),
    "a plot of no kind": ("--hw all --model demo --plot prices.bmp", ["prices.bmp", ".png"]),
    "an output that cannot be": ("--hw cpu-avx2 --model demo -o /none/policy.yaml", ["/none"]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_in_one_clear_line(kind: str) -> None:
    arguments, words = REFUSED[kind]
    done = run("optimize", *arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("moelight: error: ") and done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


def test_a_whole_process_prints_the_table() -> None:
    done = moelight("optimize", *BESIDE_A_GPU)
    assert (done.returncode, done.stderr) == (0, "")
    for message in ("demo on t4", "tokens/s", "policy", "lanes in a decode pass", "binds", "memory", "why"):
        assert message in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


OFFERED = ("--hw", "cpu-avx2,2xt4,laptop-nvme", *SMALL[2:], "--host-memory", "2GiB", *ONE_ORDER)


@pytest.mark.thorough
def test_machines_beside_each_other(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    prices = tmp_path / "prices.yaml"
    prices.write_text("name: mine\ndate: 2026-12-01\ncurrency: EUR\nsetup: 60s\nhourly: {2xt4: 2, cpu-avx2: 1}\n")
    done = run("optimize", *OFFERED, "--fix", "ffn=gpu", "--prices", prices, "--nodes", "2,1", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert set(result) == {"model", "workload", "prices", "offers"}
    assert result["prices"]["hourly"] == {"2xt4": 2, "cpu-avx2": 1}
    able, unable = ([row for row in result["offers"] if row["runs"] is runs] for runs in (True, False))
    assert sorted((row["machine"], row["nodes"]) for row in able) == [("2xt4", 1), ("2xt4", 2)]
    for row in able:
        assert row["seconds"] == row["job_s"] + 60
        assert row["price"] == pytest.approx(row["nodes"] * 2 * row["seconds"] / 3600)
        assert row["price_per_million_tokens"] == pytest.approx(row["price"] / 160 * 1e6)
        assert row["tokens_per_s"] == pytest.approx(160 / row["job_s"])
    assert [row["machine"] for row in unable] == ["cpu-avx2", "laptop-nvme"]
    assert all("GPU" in row["reason"] for row in unable)


@pytest.mark.thorough
def test_offers_for_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "80")
    done = run("optimize", *OFFERED, "--allow", "int4", "--nodes", "1,16", "--plot", tmp_path / "prices.png")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80 and "…" not in done.stdout
    words = " ".join(done.stdout.split())
    for message in (
        "demo on machines to rent",
        "20 prompts of 12 tokens",
        "prices: examples of 2026-11-29, USD an hour",
        "16 × laptop-nvme as stored",
        "cpu-avx2 int4",
        "time and price include 10.0 min of setup",
        "Ray cluster",
        "int4: after moelight convert demo OUT --experts int4",
        "prices.png",
    ):
        assert message in words, message
    assert "● " in words and "–" in words  # laptops have no price
    assert (tmp_path / "prices.png").read_bytes().startswith(b"\x89PNG")


PLAN = Plan(
    policy=Policy(
        model="mix\x1b[31mtral",
        batch_size=4560,
        micro_batch_size=228,
        micro_batch_tokens=2048,
        ffn_device="split",
        weights=Shares(device=0.1, host=0.9),
        cpu_experts=0.25,
        weight_dtype="int4",
    ),
    hardware="t4",
    workload=Workload(num_requests=5120, prompt_len=77, max_prompt_len=418, gen_len=128),
    estimator="calibrated",
    estimate=Estimate(
        layer_s=0.2,
        pass_s=7.0,
        decode_tokens_per_s=640.0,
        tokens_per_s=512.3,
        lanes={"h2d": 6.9, "device": 4.2, "cpu": 3.5, "disk": 0.0},
        binding="h2d",
    ),
    memory=(
        TierUse(tier="device", capacity_bytes=15 * GiB, by_purpose=(("dense", 5 * GiB), ("ring", 10 * GiB))),
        TierUse(tier="host", capacity_bytes=178 * GiB, by_purpose=(("kv", 60 * GiB), ("pinned_ring", GiB))),
        TierUse(tier="disk", capacity_bytes=0, by_purpose=()),
    ),
    why="The link binds: 90 % of the experts cross it in every pass.",
    what_if=(WhatIf(change="twice the host memory", gain=0.382), WhatIf(change="twice the link", gain=0.04)),
    bound_tokens_per_s=540.0,
    solve_s=0.41,
)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_plan_fits_the_terminal_and_says_everything(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, markup=False)
    print_plan(console, PLAN, workload_name="mtbench")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text and "mix\\x1b[31mtral on t4" in text
    words = " ".join(text.split())
    for message in (
        "mtbench: 5,120 prompts of 77 tokens (at most 418), 128 generated each",
        "512.3 tokens/s end to end, 640.0 while decoding; a decode pass takes 7.00 s",
        "proven for the cost model over every key: no policy is more than 5.4 % faster",
        "4,560 sequences in 20 micro-batches of 228",
        "on both, 25 % of them by the CPU where they lie; weights 10 % device, 90 % host",
        "experts in int4, keys and values as the model has them",
        "6.90 s 99 % link up, binds",
        "15.0GiB of 15.0GiB, 100 %",
        "61.0GiB of 178.0GiB, 34 %",
        "■ pinned ring 1.0GiB",
        "+38 % twice the host memory",
        "+4.0 % twice the link",
        PLAN.why,
    ):
        assert message in words, message
    assert "disk" not in words


@pytest.mark.thorough
@pytest.mark.usefixtures("unproved")
def test_a_plan_uses_what_is_allowed_and_nothing_else() -> None:
    question = ("--hw", "t4", "--model", "mixtral", *ONE_ORDER)
    plain, cached, experts = (
        plan(*question, *allow) for allow in ((), ("--kv-dtype", "choose"), ("--allow", "int4, int8"))
    )
    formats = [(item["policy"]["weight_dtype"], item["policy"]["kv_dtype"]) for item in (plain, cached, experts)]
    assert formats == [("auto", "auto"), ("auto", "int8"), ("int4", "auto")]
    speeds = [item["estimate"]["tokens_per_s"] for item in (plain, cached, experts)]
    assert speeds[0] < min(speeds[1:])
    assert cached["policy"]["batch_size"] > plain["policy"]["batch_size"]
    assert (cached["runs"], experts["runs"]) == (True, False)
    assert "moelight convert mixtral OUT --experts int4" in experts["why_not"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--allow", "int5"), "--allow: 'int5' is not one of int8, int4 (did you mean 'int8'?)"),
        (("--allow", "int4,kv8"), "--allow kv8: a plan may use an int8 KV cache with --kv-dtype choose"),
        (("--allow", "int8", "--fix", "weight_dtype=int8"), "--allow int8 and --fix weight_dtype=int8 both say"),
    ],
)
def test_what_is_allowed_is_said_once(options: tuple[str, ...], message: str) -> None:
    done = run("optimize", "--hw", "t4", "--model", "mixtral", *options)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.thorough
@pytest.mark.usefixtures("unproved")
def test_the_measured_quality_is_beside_the_speed(tmp_path: Path) -> None:
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_bytes((DEMO / file).read_bytes())
    figure = {"value": 0.0123, "low": None, "high": None}
    retained = {"reference": "demo", "kv_dtype": "int8", "kl": figure, "top1": figure | {"value": 0.99}}
    (tmp_path / "quality.json").write_text(json.dumps(retained))
    question = ("--hw", "cpu-avx2", "--model", str(tmp_path))
    assert "quality" not in plan(*question)
    wanted = {"reference": "demo", "kl": 0.0123, "top1": 0.99}
    assert plan(*question, "--kv-dtype", "int8")["quality"] == wanted
    (tmp_path / "quality.json").write_text(json.dumps(retained | {"activations": "int8"}))
    assert "quality" not in plan(*question, "--kv-dtype", "int8")
    (tmp_path / "quality.json").write_text(json.dumps(retained | {"activations": "auto"}))
    done = run("optimize", *question, "--kv-dtype", "int8")
    assert "0.0123 nats a token of KL divergence" in " ".join(done.stdout.split())
    (tmp_path / "quality.json").write_text("{}")
    done = run("optimize", *question)
    assert done.returncode == 2 and "is not what `moelight compare -o` writes" in done.stderr
