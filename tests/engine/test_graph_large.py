"""Families that run as module graphs, at size: checkpoints of 0.9 GB with the switches of released ones, streamed in a
third of their bytes. What they give is what transformers gives in float32, however they are run, killed or scored; and
the memory is what was planned."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from moelight.core.dtypes import FLOAT32
from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.engine import loaded_model
from moelight.engine.engine import Engine
from moelight.experts.options import ExpertOptions
from moelight.hrm.costs import kv_token_bytes
from moelight.hrm.footprint import TRANSFORMERS_BYTES
from moelight.lang.files import load_expert_policy
from moelight.paging.kv import paged_cache
from tests.engine.graphs import ORDERS
from tests.large import LARGE, large_model, save_large

pytestmark = pytest.mark.large

LENGTHS = (9, 140, 17, 33)  # the second is longer than windows
NEW = 4
HOW = SamplingParams(max_tokens=NEW, ignore_eos=True)
SIZES: dict[str, Any] = {"batch_size": 6, "micro_batch_size": 3, "micro_batch_tokens": 64, "kv_tokens": 1024}
THIRD = Shares(host=1 / 3, disk=2 / 3)
BASE = """
import torch, moelight.engine.engine
from moelight.runtime.measure import peak_rss_bytes
torch.ones(8, 8) @ torch.ones(8, 8)
print(peak_rss_bytes())
"""
POLICIES = {
    "lru": "cache { capacity = 25% eviction = lru }",
    "lfu": "cache { capacity = 40% eviction = lfu frequency_decay = 0.9 }",
    "history": "cache { capacity = 25% eviction = slru } prefetch { strategy = history budget = 4 }",
    "layers": "cache { capacity = 30% eviction = reuse } per_layer { allocation = uniform min_capacity = 1 }",
}


@dataclass(frozen=True, kw_only=True)
class Large:
    """A checkpoint and what transformers makes of it in float32.

    Attributes:
        own_names: the same under the names of transformers' modules; None where hubs use these.
        tokens: greedy, after each prompt.
        logprobs: of each prompt and its tokens, float32 [n, V]: row t is what the model says of the token after t.
    """

    family: str
    directory: Path
    own_names: Path | None
    tokens: list[list[int]]
    logprobs: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.directory.glob("*.safetensors"))


@pytest.fixture(scope="module", params=LARGE)
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Large]:
    family, position = request.param, tmp_path_factory.mktemp(request.param)
    module = large_model(family)
    hub, original = save_large(module, position / "hub"), save_large(module, position / "own", hub_names=False)
    same = names_in(hub) == names_in(original)
    tokens, logprobs = [], []
    for prompt in prompts():
        ids = list(prompt)
        for _ in range(NEW):  # by whole passes: with its cache, transformers may round a router's near tie otherwise
            ids.append(int(module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        tokens.append(ids[len(prompt) :])
        logits = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        logprobs.append(logits.log_softmax(-1))
    del module
    yield Large(family=family, directory=hub, own_names=None if same else original, tokens=tokens, logprobs=logprobs)
    rmtree(position)


def names_in(directory: Path) -> set[str]:
    return set(json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"])


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, 250, (count,), generator=draw).tolist() for count in LENGTHS]


def served(directory: Path, device: str = "cpu", experts: ExpertOptions | None = None, **policy: Any) -> Any:
    with Engine(Policy(model=str(directory), **{**SIZES, **policy}), device=device, experts=experts) as engine:
        return [list(item.token_ids) for item in engine.generate(prompts(), HOW)]


def test_it_has_more_than_half_a_gigabyte(large: Large) -> None:
    assert large.nbytes > 5e8


def test_in_a_third_of_its_bytes_it_gives_the_tokens_of_transformers(large: Large, tmp_path: Path) -> None:
    """Beside what transformers keeps. The resident set stays within the plan: the budget, 5 % more, and what torch and
    the engine take before."""
    budget = third_of(large)
    stats = tmp_path / "stats.json"
    job = command(large, tmp_path, "--host-memory", str(budget), "--stats", str(stats))
    done = subprocess.run(job, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert tokens_of(tmp_path / "out.jsonl") == large.tokens
    figures = json.loads(stats.read_text())
    assert figures["lanes"]["disk"]["bytes"] > figures["passes"] * large.nbytes / 3
    base = int(subprocess.run([sys.executable, "-c", BASE], check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert figures["peak_rss_bytes"] <= 1.05 * budget + base


def third_of(large: Large) -> int:
    return large.nbytes // 3 + TRANSFORMERS_BYTES


def command(large: Large, folder: Path, *options: str) -> list[str]:
    """A job of the prompts in ``folder``, the same every time."""
    rows = ({"custom_id": str(n), "prompt_token_ids": prompt} for n, prompt in enumerate(prompts()))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [str(folder / "prompts.jsonl"), "-o", str(folder / "out.jsonl"), "--token-ids"]
    how = ["--max-tokens", str(NEW), "--ignore-eos", "--no-show", "--device", "cpu", "--model", str(large.directory)]
    return [sys.executable, "-m", "moelight.cli.main", "generate", *files, *how, *options]


def tokens_of(output: Path) -> list[list[int]]:
    return [json.loads(line)["token_ids"] for line in output.read_text().splitlines()]


def test_the_cache_keeps_latents(large: Large, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a DeepSeek-V2 shape at most a tenth of its keys and values, by the profile and in the pool."""
    if large.family != "deepseek_v2":
        pytest.skip("its attention has no latents")
    pools = []

    def recorded(arena: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        pools.append(arena.nbytes)
        return paged_cache(arena, *args, **kwargs)

    monkeypatch.setattr(loaded_model, "paged_cache", recorded)
    sizes = LARGE["deepseek_v2"]
    wide = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"] + sizes["v_head_dim"]
    expanded = sizes["num_hidden_layers"] * sizes["num_attention_heads"] * wide * FLOAT32.itemsize
    with Engine(Policy(model=str(large.directory), weights=THIRD, **SIZES), device="cpu") as engine:
        assert kv_token_bytes(engine.profile, FLOAT32) <= expanded / 10
    assert [nbytes / SIZES["kv_tokens"] <= expanded / 10 for nbytes in pools] == [True]


def test_names_of_the_hub_and_of_modules_are_the_same_model(large: Large) -> None:
    if large.own_names is None:
        pytest.skip("they are the same names")
    assert served(large.own_names, weights=THIRD) == large.tokens


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: f"{order[0]}-{order[2]}")
def test_every_order_gives_the_tokens_of_transformers(large: Large, order: tuple[str, str, str, Shares]) -> None:
    schedule, attention, experts, homes = order
    more = {"cpu_experts": 0.4} if experts == "split" else {}
    devices = {"attention_device": attention, "ffn_device": experts}
    homes = Shares(device=1 / 3, disk=2 / 3) if homes.disk else homes
    assert served(large.directory, "twin", schedule=schedule, weights=homes, **devices, **more) == large.tokens


def test_a_killed_job_goes_on(large: Large, tmp_path: Path) -> None:
    """SIGKILL after the first row, after the third, and at a write of the journal; the rows are those of one run."""
    budget = str(third_of(large))
    job = command(large, tmp_path, "--batch-size", "2", "--sync-interval", "0.05", "--host-memory", budget)
    for rows in (1, 3):
        with subprocess.Popen(job, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and rows_in(tmp_path / "out.jsonl") < rows:
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
    fault = {**os.environ, "MOELIGHT_FAULT": "mid_journal_write:2:kill"}
    assert subprocess.run(job, check=False, env=fault, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
    assert subprocess.run(job, check=False, stderr=subprocess.DEVNULL).returncode == 0
    assert tokens_of(tmp_path / "out.jsonl") == large.tokens


def rows_in(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


@pytest.mark.parametrize("name", POLICIES)
def test_every_expert_policy_gives_the_tokens_of_transformers(large: Large, name: str, tmp_path: Path) -> None:
    """In passes of so few tokens that experts are read on demand."""
    path = tmp_path / f"{name}.moe"
    path.write_text(f"policy {name} {{ {POLICIES[name]} }}")
    options = ExpertOptions(policy=load_expert_policy(path))
    sizes = {"batch_size": 2, "micro_batch_size": 2}
    assert served(large.directory, experts=options, weights=THIRD, **sizes) == large.tokens


def test_prompts_are_scored_as_transformers_scores_them(large: Large) -> None:
    how = SamplingParams(max_tokens=0, prompt_logprobs=0)
    full = [[*prompt, *new] for prompt, new in zip(prompts(), large.tokens, strict=True)]
    with Engine(Policy(model=str(large.directory), weights=THIRD, **SIZES), device="cpu") as engine:
        result = engine.generate(full, how)
    for ids, item, expected in zip(full, result, large.logprobs, strict=True):
        assert item.prompt_logprobs is not None
        got = [entry[token].logprob for entry, token in zip(item.prompt_logprobs[1:], ids[1:], strict=True) if entry]
        right = [float(expected[at, token]) for at, token in enumerate(ids[1:])]
        assert got == pytest.approx(right, rel=1e-4, abs=1e-5)
