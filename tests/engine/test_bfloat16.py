"""bfloat16 on the CPU, through native kernels: a request's greedy tokens depend on nothing around it, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.engine.engine import Engine
from moelight.kernels import native
from moelight.profiles.workload import Workload
from tests.cases import covering, thorough
from tests.engines import Tiny, all_pairs, least_memory

pytestmark = pytest.mark.skipif(not native.available(), reason="torch's products depend on the number of rows")

WORK = Workload(num_requests=24, prompt_len=20, max_prompt_len=129, gen_len=5)
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 96, "intermediate_size": 200, "sliding_window": 40},
    "qwen3_moe": {"num_hidden_layers": 3, "hidden_size": 128, "moe_intermediate_size": 200},
    "olmoe": {},
}
CUTS = all_pairs([7, 50], [16, 128], SHAPES)
Ids = list[tuple[int, ...]]


def ragged() -> list[list[int]]:
    random = Random(11)
    lengths = [1, 2, 15, 16, 17, 32, 33, 65, 129] + [random.randint(1, 20) for _ in range(15)]
    return [[random.randrange(256) for _ in range(length)] for length in lengths]


PROMPTS = ragged()
HOW = [SamplingParams(max_tokens=2 + at % 4, ignore_eos=True) for at in range(len(PROMPTS))]


@pytest.fixture(scope="module", params=thorough(SHAPES, but=["mixtral"]))
def model(request: pytest.FixtureRequest, tiny: Tiny) -> Path:
    return tiny(request.param, dtype="bfloat16", **SHAPES[request.param])


@pytest.fixture(scope="module")
def one_by_one(model: Path) -> Ids:
    with Engine(policy(model, batch_size=1, micro_batch_size=1, schedule="serial"), device="cpu") as engine:
        return [ids(engine, [prompt], [how])[0] for prompt, how in zip(PROMPTS, HOW, strict=True)]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def policy(model: Path, **options: Any) -> Policy:
    return Policy(model=str(model), kv_tokens=24 * 160, **options)


def ids(engine: Engine, prompts: list[list[int]], how: list[SamplingParams]) -> Ids:
    return [completion.token_ids for completion in engine.generate(prompts, how)]


def test_the_answers_differ_from_each_other(one_by_one: Ids) -> None:
    assert len(set(one_by_one)) > 18


@pytest.mark.parametrize(
    ("model", "threads_used"),
    thorough(product(SHAPES, (1, 2)), but=[("mixtral", 1), ("qwen3_moe", 2)]),
    indirect=["model"],
)
def test_together(model: Path, one_by_one: Ids, threads_used: int) -> None:
    torch.set_num_threads(threads_used)
    with Engine(policy(model, batch_size=64, micro_batch_size=64, micro_batch_tokens=4096), device="cpu") as engine:
        assert ids(engine, PROMPTS, HOW) == one_by_one


def test_shuffled(model: Path, one_by_one: Ids) -> None:
    order = list(range(len(PROMPTS)))
    Random(5).shuffle(order)
    with Engine(policy(model, batch_size=13, micro_batch_size=5), device="cpu") as engine:
        result = ids(engine, [PROMPTS[at] for at in order], [HOW[at] for at in order])
    assert result == [one_by_one[at] for at in order]


@pytest.mark.parametrize(("tokens", "block_size", "model"), thorough(CUTS, but=covering(CUTS)[:1]), indirect=["model"])
def test_prompts_cut_anywhere(model: Path, one_by_one: Ids, tokens: int, block_size: int) -> None:
    cut = policy(model, batch_size=9, micro_batch_size=4, micro_batch_tokens=tokens, kv_block_size=block_size)
    with Engine(cut, device="cpu") as engine:
        assert ids(engine, PROMPTS, HOW) == one_by_one


@pytest.mark.parametrize("model", thorough(SHAPES, but=[]), indirect=True)
def test_under_two_budgets(model: Path, one_by_one: Ids) -> None:
    least = least_memory(model, "cpu", WORK)
    policies = set()
    for extra in (0, 1 << 30):
        budgets = {tier: size + extra for tier, size in least.items()}
        with Engine.from_pretrained(model, device="cpu", workload=WORK, **budgets) as engine:  # type: ignore[arg-type]
            policies.add(engine.policy)
            assert ids(engine, PROMPTS[::2], HOW[::2]) == one_by_one[::2]
    assert len(policies) == 2


@pytest.mark.parametrize(
    ("schedule", "model"),
    thorough(zip(("cgopipe", "serial", "module"), SHAPES, strict=True), but=[("module", "olmoe")]),
    indirect=["model"],
)
def test_after_a_stop_in_the_middle(model: Path, one_by_one: Ids, schedule: str) -> None:
    """What a second process, with another policy, makes of the requests that the first one left."""
    first = policy(model, batch_size=5, micro_batch_size=2, weights=Shares(host=0.3, disk=0.7))
    with Engine(first, device="cpu") as engine:
        done = ids(engine, PROMPTS[:9], HOW[:9])
    second = policy(model, batch_size=13, micro_batch_size=13, schedule=schedule)
    with Engine(second, device="cpu") as engine:
        assert done + ids(engine, PROMPTS[9:], HOW[9:]) == one_by_one
