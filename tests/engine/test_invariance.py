"""The same tokens whatever the budget, the schedule, the lanes, the batch, the cuts and the order of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.dtypes import FLOAT32
from moelight.core.policy import ADMISSIONS, KV_BLOCK_SIZES, MOST_LOOK_AHEAD, Policy, Shares
from moelight.core.request import Completion, SamplingParams
from moelight.engine.engine import Engine
from moelight.hrm import costs, schedule_time
from moelight.hrm.costs import page_slot_bytes
from moelight.hrm.schedule_time import ON_DEMAND_SCHEDULES
from moelight.profiles.families import profile_from_dir
from moelight.profiles.tensor_list import pages
from moelight.profiles.workload import Workload
from moelight.runtime.machine import LANE_KINDS
from moelight.scheduler import SCHEDULES
from moelight.scheduler.layout import EXPERT_PLACES
from moelight.scheduler.requirements import misfit
from tests.cases import covering, thorough
from tests.engines import Tiny, all_pairs, in_turn, least_memory
from tests.shapes import examples

WORK = Workload(num_requests=12, prompt_len=20, max_prompt_len=130, gen_len=4)
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": 20},
    "qwen3_moe": {"num_hidden_layers": 4, "decoder_sparse_step": 1, "mlp_only_layers": [0], "tie": True},
    "olmoe": {},
}
Answers = list[tuple[int, tuple[int, ...], str]]

# Every choice of devices: with pages at home on every tier, some of them computed by the CPU where it may.
HERE = Shares(device=0.25, host=0.5, disk=0.25)
CACHE_ON_DEVICE = Shares(device=1.0)
CACHE_ON_BOTH = Shares(device=0.7, host=0.3)
DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {"weights": Shares(host=0.3, disk=0.7)},
    "gpu": {"ffn_device": "gpu", "weights": HERE},
    "gpu-pinned-homes": {"ffn_device": "gpu", "weights": HERE, "host_pages": "pinned"},
    "gpu-attention": {"attention_device": "gpu", "ffn_device": "gpu", "weights": HERE},
    "gpu-cache": {"attention_device": "gpu", "ffn_device": "gpu", "weights": HERE, "kv": CACHE_ON_DEVICE},
    "gpu-cache-both": {"attention_device": "gpu", "ffn_device": "gpu", "weights": HERE, "kv": CACHE_ON_BOTH},
    "split": {"ffn_device": "split", "weights": HERE, "cpu_experts": 0.3},
    "split-attention": {"attention_device": "gpu", "ffn_device": "split", "weights": HERE, "cpu_experts": 0.5},
    "cpu-experts": {"attention_device": "gpu", "ffn_device": "cpu", "weights": Shares(host=0.5, disk=0.5)},
    "cpu-experts-cache": {"attention_device": "gpu", "weights": Shares(host=1.0), "kv": CACHE_ON_DEVICE},
}


def fits(schedule: str, policy: Policy) -> bool:
    placed = {"attention": policy.attention_device, "experts": EXPERT_PLACES[policy.ffn_device]}
    return misfit(schedule, discrete=policy.discrete, **placed) is None


def served() -> list[tuple[str, str]]:
    """Every order of work on every choice of devices that it can serve."""
    made = {name: Policy(model="m", **chosen) for name, chosen in DEVICES.items()}
    return [(name, devices) for name in SCHEDULES.names() for devices, policy in made.items() if fits(name, policy)]


BY_LANES, BY_MODELS = in_turn(served(), LANE_KINDS), in_turn(served(), MODELS)
CACHES = all_pairs([0.0, 0.3, 0.5, 1.0], LANE_KINDS, MODELS)
CROSSING = [item for item in served() if DEVICES[item[1]].get("ffn_device")]
ON_DEMAND = [item for item in served() if item[0] in ON_DEMAND_SCHEDULES]


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """12 prompts of 1 to 130 tokens; answers of 1 to 4; two of three greedy, the others sampled with seeds."""
    random = Random(7)
    lengths = [1, 2, 32, 33, 130] + [random.randint(1, 8) for _ in range(7)]
    prompts = [[random.randrange(256) for _ in range(length)] for length in lengths]
    sampling = [
        SamplingParams(
            max_tokens=random.randint(1, 4),
            ignore_eos=random.random() < 0.5,
            temperature=0.8 if index % 3 == 0 else 0.0,
            top_p=0.9,
            seed=index,
        )
        for index in range(len(prompts))
    ]
    return prompts, sampling


PROMPTS, SAMPLING = requests()


def answers(completions: Sequence[Completion]) -> Answers:
    return [(completion.index, completion.token_ids, completion.finish_reason) for completion in completions]


@pytest.fixture(scope="session", params=MODELS)
def model(request: pytest.FixtureRequest, tiny: Tiny) -> Path:
    return tiny(request.param, **MODELS[request.param])


_TRUTH: dict[Path, Answers] = {}


def truth(model: Path) -> Answers:
    """Everything in memory, one task after another, one sequence per pass, prompts uncut."""
    if model not in _TRUTH:
        policy = Policy(model=str(model), batch_size=1, micro_batch_size=1, micro_batch_tokens=256, schedule="serial")
        with Engine(policy, device="cpu", lanes="inline") as engine:
            _TRUTH[model] = answers(engine.generate(PROMPTS, SAMPLING))
    return _TRUTH[model]


def run(policy: Policy, *, lanes: str = "auto") -> Answers:
    device = "twin" if policy.discrete else "cpu"
    with Engine(policy, device=device, lanes=lanes) as engine:
        return answers(engine.generate(PROMPTS, SAMPLING))


def test_answers_are_worth_comparing(model: Path) -> None:
    result = truth(model)
    assert len({tokens for _, tokens, _ in result}) > 9
    assert all(len(tokens) <= how.max_tokens for (_, tokens, _), how in zip(result, SAMPLING, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("device", "name"),
    [("cpu", "mixtral"), ("twin", "qwen3_moe"), ("twin", "olmoe")],
)
def test_every_budget_gives_the_same_tokens(tiny: Tiny, device: str, name: str) -> None:
    """From the least that is accepted to all resident, planned as a user would have it planned. All models on the CPU:
    ``test_bfloat16.py``; the least beside a device: ``test_small_ring.py``."""
    model = tiny(name, **MODELS[name])
    how = {"schedule": "fastdecode"} if device == "twin" else {}  # all experts on the GPU, so that pages are streamed
    least = least_memory(model, device, WORK, **how)
    profile, shares = profile_from_dir(model), set()
    for extra in (0, len(pages(profile)) // 2 * page_slot_bytes(profile, FLOAT32), 1 << 30):
        budgets = {tier: size + extra for tier, size in least.items()}
        with Engine.from_pretrained(model, device=device, workload=WORK, **how, **budgets) as engine:  # type: ignore[arg-type]
            shares.add(engine.policy.weights)
            assert answers(engine.generate(PROMPTS, SAMPLING)) == truth(model)
    disk = sorted(share.disk for share in shares)
    assert disk[0] == 0
    assert disk[-1] > 0.7


@pytest.mark.parametrize(("schedule", "devices", "lanes"), thorough(BY_LANES, but=covering(BY_LANES)))
def test_every_schedule_on_every_kind_of_lane_gives_the_same_tokens(
    tiny: Tiny, schedule: str, devices: str, lanes: str
) -> None:
    model = tiny("mixtral", **MODELS["mixtral"])
    policy = Policy(model=str(model), schedule=schedule, micro_batch_size=4, **DEVICES[devices])
    assert run(policy, lanes=lanes) == truth(model)


@pytest.mark.parametrize(("schedule", "devices", "name"), thorough(BY_MODELS, but=covering(BY_MODELS)[::2]))
def test_every_schedule_serves_every_model_with_cut_prompts(tiny: Tiny, schedule: str, devices: str, name: str) -> None:
    """Micro-batches of twenty tokens: prompts are cut, and their ends ride with decoding sequences."""
    model = tiny(name, **MODELS[name])
    policy = Policy(
        model=str(model),
        schedule=schedule,
        batch_size=9,
        micro_batch_size=4,
        micro_batch_tokens=20,
        kv_tokens=9 * 160,
        **DEVICES[devices],
    )
    assert run(policy) == truth(model)


@pytest.mark.parametrize(("schedule", "devices"), thorough(CROSSING[::3], but=CROSSING[::18]))
def test_pages_that_cross_in_parts_give_the_same_tokens(
    tiny: Tiny, schedule: str, devices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four to twenty-nine parts a page."""
    model = tiny("qwen3_moe", **MODELS["qwen3_moe"])
    monkeypatch.setattr(costs, "PART_BYTES", costs.PAGE_ALIGNMENT)
    policy = Policy(model=str(model), schedule=schedule, micro_batch_size=4, **DEVICES[devices])
    assert run(policy) == truth(model)


@pytest.mark.parametrize(("schedule", "devices"), thorough(ON_DEMAND[::3], but=ON_DEMAND[::18]))
def test_passes_of_routed_pages_give_the_same_tokens(
    tiny: Tiny, schedule: str, devices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pass that one micro-batch could carry brings only what somebody is routed to; larger ones between them
    bring everything, and hand on what they fetched."""
    model = tiny("olmoe", **MODELS["olmoe"])
    monkeypatch.setattr(schedule_time, "ROUTED_ONLY_SHARE", 0.0)
    sizes = {"micro_batch_size": 2, "micro_batch_tokens": 40, "batch_size": 5, "kv_tokens": 5 * 160}
    policy = Policy(model=str(model), schedule=schedule, **sizes, **DEVICES[devices])
    assert run(policy) == truth(model)


@pytest.mark.parametrize(
    ("n", "processor"),
    thorough([(1, "gpu"), (2, "cpu"), (7, "gpu"), (64, "cpu"), (64, "gpu")], but=[(1, "gpu"), (64, "cpu")]),
)
def test_any_number_of_sequences_gives_the_same_tokens(tiny: Tiny, n: int, processor: str) -> None:
    """Every request six times over, so that 64 of them can be alive at once."""
    model = tiny("mixtral", **MODELS["mixtral"])
    times = 6 if n == 64 else 1
    policy = Policy(model=str(model), batch_size=n, micro_batch_size=9, ffn_device=processor, weights=Shares(disk=1.0))
    with Engine(policy, device="twin" if processor == "gpu" else "cpu") as engine:
        result = engine.generate(PROMPTS * times, SAMPLING * times)
    wanted = truth(model)
    for start in range(0, len(result), len(wanted)):
        assert answers([replace(c, index=c.index - start) for c in result[start : start + len(wanted)]]) == wanted


CUT = list(zip(("cpu", "gpu-attention", "gpu-cache-both"), MODELS, strict=True))


@pytest.mark.parametrize(("devices", "name"), thorough(CUT, but=CUT[:1]))
def test_prompts_cut_over_micro_batches_and_passes_give_the_same_tokens(tiny: Tiny, devices: str, name: str) -> None:
    """Four tokens a micro-batch: a prompt of 130 is cut in 33 chunks, and takes several passes."""
    model = tiny(name, **MODELS[name])
    policy = Policy(model=str(model), batch_size=3, micro_batch_size=2, micro_batch_tokens=4, **DEVICES[devices])
    passes = 0
    with Engine(policy, device="twin" if policy.discrete else "cpu") as engine:
        assert answers(engine.generate(PROMPTS, SAMPLING)) == truth(model)
        passes = engine.stats.passes
    assert passes > sum(map(len, PROMPTS)) // (3 + 8 * 4)


@pytest.mark.parametrize(("host", "lanes", "name"), thorough(CACHES, but=covering(CACHES)))
def test_any_share_of_the_cache_on_the_device_gives_the_same_tokens(
    tiny: Tiny, host: float, lanes: str, name: str
) -> None:
    """Blocks of sixteen tokens, so that most sequences own some on both sides."""
    model = tiny(name, **MODELS[name])
    policy = Policy(
        model=str(model),
        batch_size=9,
        micro_batch_size=4,
        micro_batch_tokens=24,
        kv_tokens=9 * 160,
        kv_block_size=16,
        attention_device="gpu",
        ffn_device="gpu",
        weights=HERE,
        kv=Shares(device=1 - host, host=host),
    )
    assert run(policy, lanes=lanes) == truth(model)


def test_the_order_of_requests_does_not_matter(model: Path) -> None:
    order = list(range(len(PROMPTS)))
    Random(3).shuffle(order)
    policy = Policy(model=str(model), batch_size=6, micro_batch_size=4, weights=Shares(host=0.4, disk=0.6))
    with Engine(policy, device="cpu") as engine:
        shuffled = engine.generate([PROMPTS[at] for at in order], [SAMPLING[at] for at in order])
    back = {order[completion.index]: completion for completion in shuffled}
    assert answers([replace(back[at], index=at) for at in sorted(back)]) == truth(model)


@st.composite
def policies(draw: st.DrawFn, model: Path) -> Policy:
    """Any policy a user may write for this model, with room for its longest request."""
    total, mu, n = len(pages(profile_from_dir(model))), draw(st.integers(1, 12)), draw(st.integers(1, 48))
    schedule, devices = draw(st.sampled_from(served()))
    chosen = dict(DEVICES[devices])
    ffn = chosen.get("ffn_device", "cpu")
    device = draw(st.integers(0, total)) if ffn != "cpu" else 0
    host = draw(st.integers(0, total - device))
    chosen["weights"] = Shares(device=device / total, host=host / total, disk=(total - device - host) / total)
    if ffn == "split":
        chosen["cpu_experts"] = draw(st.integers(0, host)) / total
    if chosen.get("attention_device") == "gpu":
        cached = draw(st.sampled_from([0.0, 0.3, 0.5, 1.0]))
        chosen["kv"] = Shares(device=1 - cached, host=cached)
    least = 256 if chosen.get("attention_device") != "gpu" else max(256, 160 * n // mu)
    return Policy(
        model=str(model),
        batch_size=n,
        micro_batch_size=mu,
        micro_batch_tokens=draw(st.integers(mu, 80)),
        kv_tokens=draw(st.integers(least, least + 4000)),
        schedule=schedule,
        kv_block_size=draw(st.sampled_from(KV_BLOCK_SIZES)),
        look_ahead=draw(st.integers(1, MOST_LOOK_AHEAD)),
        admission=draw(st.sampled_from(ADMISSIONS)),
        **chosen,
    )


@examples(25)
@given(data=st.data())
def test_any_policy_gives_the_same_tokens(tiny: Tiny, data: st.DataObject) -> None:
    """Whether pages cross whole or in parts, and whichever passes bring routed pages only."""
    name = data.draw(st.sampled_from(sorted(MODELS)))
    model = tiny(name, **MODELS[name])
    policy, lanes = data.draw(policies(model)), data.draw(st.sampled_from(LANE_KINDS))
    wanted = truth(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "PART_BYTES", data.draw(st.sampled_from((1, 2, 4096))) * costs.PAGE_ALIGNMENT)
        patch.setattr(schedule_time, "ROUTED_ONLY_SHARE", data.draw(st.sampled_from((0.0, 0.03, 0.25))))
        assert run(policy, lanes=lanes) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("schedule", "devices", "name"), in_turn([item for item in served() if item[1] != "cpu"], MODELS)
)
def test_a_real_device_gives_the_same_tokens(tiny: Tiny, schedule: str, devices: str, name: str) -> None:
    """Streams and events of the accelerator that is here; prompts attend there, weights cross its link."""
    model = tiny(name, **MODELS[name])
    policy = Policy(model=str(model), micro_batch_size=5, schedule=schedule, **DEVICES[devices])
    with Engine(policy, device="auto") as engine:
        assert answers(engine.generate(PROMPTS, SAMPLING)) == truth(model)


def test_sampled_tokens_depend_on_the_seed_only(tiny: Tiny) -> None:
    """The same prompt under one seed says the same anywhere in any batch; other seeds, or none, say other things."""
    model = tiny("mixtral", **MODELS["mixtral"])
    how = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    prompt = list(b"once upon a time")
    seeds = [1, 2, 1, None, 3, None, 1]
    with Engine(Policy(model=str(model), batch_size=3, micro_batch_size=2), device="cpu") as engine:
        result = [c.token_ids for c in engine.generate([prompt] * 7, [replace(how, seed=seed) for seed in seeds])]
        alone = engine.generate([prompt], replace(how, seed=1))[0].token_ids
        again = engine.generate([prompt], how)[0].token_ids
    assert result[0] == result[2] == result[6] == alone
    assert len({result[0], result[1], result[3], result[4], result[5], again}) == 6
