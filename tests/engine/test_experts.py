"""Experts that come and go: the same tokens whoever is near, on every kind of machine; and what is told of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.dtypes import FLOAT32
from moelight.core.errors import ConfigError
from moelight.core.policy import Policy, Shares
from moelight.core.request import Request, SamplingParams
from moelight.core.schedule import TaskKind
from moelight.engine.engine import Engine
from moelight.engine.experts import ExpertOptions, resident_share
from moelight.experts import predict
from moelight.experts.policy import (
    ALLOCATIONS,
    EVICTIONS,
    FALLBACK,
    MODES,
    STRATEGIES,
    Action,
    AdaptRule,
    CacheRules,
    Capacity,
    ExpertPolicy,
    MonitorRules,
    PerLayerRules,
    PrefetchRules,
    ScheduleRules,
)
from moelight.experts.trace import read_rows
from moelight.hrm import schedule_time
from moelight.hrm.placement import place_pages, with_residents
from moelight.hrm.schedule_time import ON_DEMAND_SCHEDULES
from moelight.runtime.machine import LANE_KINDS
from moelight.runtime.microbatch import require
from moelight.scheduler.layout import EXPERT_PLACES
from moelight.scheduler.requirements import misfit
from tests.cases import covering, thorough
from tests.engines import Tiny, all_pairs, in_turn
from tests.shapes import examples, small_model, small_policy

# Eight experts top-2, so that passes of up to four tokens are small; layers without experts in one of them.
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_hidden_layers": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0, 2],
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
}
MOE_LAYERS = {"mixtral": (0, 1, 2), "qwen3_moe": (1, 3)}
DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {"weights": Shares(disk=1.0)},
    "gpu, disk": {"ffn_device": "gpu", "weights": Shares(disk=1.0)},
    "gpu, host": {"ffn_device": "gpu", "weights": Shares(host=1.0)},
    "gpu, pinned": {"ffn_device": "gpu", "weights": Shares(host=0.6, disk=0.4), "host_pages": "pinned"},
    "split, host": {"ffn_device": "split", "weights": Shares(host=1.0)},
    "split, both": {"ffn_device": "split", "weights": Shares(host=0.7, disk=0.3), "cpu_experts": 0.2},
}
RANDOM = Random(5)
PROMPTS = [[RANDOM.randrange(256) for _ in range(length)] for length in (3, 1, 5, 2, 30, 1, 9, 4)]
HOW = [SamplingParams(max_tokens=RANDOM.randint(3, 6), ignore_eos=True) for _ in PROMPTS]
ONE = Request(index=0, token_ids=(65,), sampling=SamplingParams(max_tokens=6, ignore_eos=True))
Tokens = list[tuple[int, ...]]


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def tokens_of(engine: Engine) -> Tokens:
    return [item.token_ids for item in engine.generate(PROMPTS, HOW)]


_TRUTH: dict[Path, Tokens] = {}


def truth(model: Path) -> Tokens:
    """Everything in memory, one task after another, one sequence per pass."""
    if model not in _TRUTH:
        plain = Policy(model=str(model), batch_size=1, micro_batch_size=1, micro_batch_tokens=256, schedule="serial")
        with Engine(plain, device="cpu", lanes="inline") as engine:
            assert not engine._passes or engine._passes.model.pager is None
            _TRUTH[model] = tokens_of(engine)
    return _TRUTH[model]


def here(model: Path, devices: str = "cpu", **changes: Any) -> Policy:
    sizes = {"batch_size": 3, "micro_batch_size": 2, "micro_batch_tokens": 8, "kv_tokens": 600, "residents": "learned"}
    return Policy(model=str(model), **{**sizes, **DEVICES[devices], **changes})


def experts(capacity: int = 6, *, strategy: str = "none", **blocks: Any) -> ExpertPolicy:
    cache = {"capacity": Capacity(value=capacity), **blocks.pop("cache", {})}
    prefetch = PrefetchRules(strategy=strategy, budget=3)
    return ExpertPolicy(name="mine", cache=CacheRules(**cache), **{"prefetch": prefetch, **blocks})


def opened(policy: Policy, asked: ExpertPolicy, *, lanes: str = "inline", **options: Any) -> Engine:
    device = "twin" if policy.discrete else "cpu"
    engine = Engine(policy, device=device, lanes=lanes, experts=ExpertOptions(policy=asked, **options))
    assert engine.policy.residents == "learned"
    return engine


def held(engine: Engine) -> int:
    assert engine._experts is not None
    return len(engine._experts.residency.residency.cache._leases)


BY_EVICTION = [((item,),) for item in EVICTIONS] + [(FALLBACK,), (("slru", "score"),)]


@pytest.mark.parametrize("eviction", thorough(BY_EVICTION, but=[BY_EVICTION[0], *BY_EVICTION[-2:]]), ids="|".join)
def test_every_eviction(tiny: Tiny, eviction: tuple[str, ...]) -> None:
    """Small passes exchange residents between whole ones; at the end nobody but the last layer's choice is held."""
    model = tiny("mixtral", **MODELS["mixtral"])
    asked = experts(cache={"eviction": eviction, "freq_threshold": 0.0})
    with opened(here(model), asked) as engine:
        before = engine._experts.residency.pages()  # type: ignore[union-attr]
        assert tokens_of(engine) == truth(model)
        assert engine._experts.residency.pages() != before  # type: ignore[union-attr]
        assert held(engine) <= 8
        result = engine.expert_stats
    assert result is not None
    assert result["cache"]["eviction"] == " | ".join(eviction)
    assert result["cache"]["evictions"] > 0


@pytest.mark.parametrize(
    ("family", "strategy"),
    thorough(
        [*(("mixtral", item) for item in STRATEGIES), ("qwen3_moe", "next_router"), ("qwen3_moe", "lookahead")],
        but=[("mixtral", "history"), ("mixtral", "next_router"), ("qwen3_moe", "lookahead")],
    ),
)
def test_every_predictor(family: str, tiny: Tiny, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All guesses are acted on."""
    monkeypatch.setattr(predict, "SURE", 0.0)
    model = tiny(family, **MODELS[family])
    with opened(here(model), experts(strategy=strategy), lanes="auto") as engine:
        assert tokens_of(engine) == truth(model)
        stalls = engine._passes.stalls if engine._passes else {}
    if family == "mixtral" or strategy == "none":  # the ring holds all that the other one misses
        assert bool(stalls["ahead_pages"]) == (strategy != "none")
    assert stalls["ahead_useful"] <= stalls["ahead_pages"]


BY_LANES = in_turn([(item,) for item in DEVICES], LANE_KINDS)


@pytest.mark.parametrize(("devices", "lanes"), thorough(BY_LANES, but=BY_LANES[::2]))
def test_every_machine(tiny: Tiny, devices: str, lanes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of the missing experts the CPU computes is decided anew in each layer."""
    monkeypatch.setattr(predict, "SURE", 0.0)
    model = tiny("mixtral", **MODELS["mixtral"])
    asked = experts(strategy="next_router", schedule=ScheduleRules(mode="hybrid", offload_threshold_ms=1e-6))
    with opened(here(model, devices), asked, lanes=lanes) as engine:
        assert tokens_of(engine) == truth(model)
        assert tokens_of(engine) == truth(model)


BY_MODE = all_pairs(MODELS, ["split, host", "split, both"], MODES)


@pytest.mark.parametrize(("family", "devices", "mode"), thorough(BY_MODE, but=covering(BY_MODE)))
def test_every_mode(family: str, tiny: Tiny, devices: str, mode: str) -> None:
    """Of what is missing the CPU computes nothing, everything that lies in its memory, or what is sooner there."""
    model, computed = tiny(family, **MODELS[family]), 0
    asked = experts(4, schedule=ScheduleRules(mode=mode, offload_threshold_ms=1e-6))

    def on_pass() -> None:
        nonlocal computed
        kinds = [span.task.kind for span in require(engine.timeline).spans]
        if TaskKind.ROUTE in kinds and TaskKind.SEND_PAGE not in kinds:
            computed += kinds.count(TaskKind.CPU_EXPERTS)

    with opened(here(model, devices, batch_size=1, micro_batch_size=1), asked) as engine:
        list(engine.run([ONE], on_pass=on_pass))
        assert tokens_of(engine) == truth(model)
    assert computed > 0 or mode != "cpu_fallback"
    assert computed == 0 or mode != "gpu_only"


BLOCKS: dict[str, dict[str, Any]] = {
    "ttl": {"cache": {"ttl": 5}},
    "pressure": {
        "cache": {"memory_threshold": 0.8, "memory_headroom": 0.5, "memory_budget_gb": 5, "expert_size_gb": 1}
    },
    "warm_pin": {"cache": {"warm_pin": 9}},
    "pins": {"cache": {"pin": (0, 5), "eviction": FALLBACK}},
    "uniform": {"per_layer": PerLayerRules(allocation="uniform", min_capacity=1)},
    "entropy": {"per_layer": PerLayerRules(min_capacity=1, rebalance_interval=9, entropy_window=6)},
    "adapt": {
        "monitor": MonitorRules(window=8, log_interval=4),
        "adapt": tuple(
            AdaptRule(metric="hit_rate", op=op, threshold=0.5, cooldown=7, action=action)
            for op, action in (
                ("<", Action(kind="set", name="eviction", value=("score", "lru"))),
                ("<", Action(kind="set", name="prefetch_strategy", value="next_router")),
                (">=", Action(kind="set", name="capacity", value=Capacity(value=3))),
                ("<", Action(kind="trigger", name="memory_pressure")),
                (">=", Action(kind="set", name="schedule_mode", value="cpu_fallback")),
            )
        ),
    },
}


@pytest.mark.parametrize(("block", "devices"), in_turn([(item,) for item in BLOCKS], ["split, both", "cpu"]))
def test_every_block(tiny: Tiny, block: str, devices: str) -> None:
    model = tiny("qwen3_moe", **MODELS["qwen3_moe"])
    with opened(here(model, devices), experts(**BLOCKS[block]), lanes="auto") as engine:
        assert tokens_of(engine) == truth(model)
        result = engine.expert_stats
    assert result is not None
    assert result["sizing"]["slots"] == result["sizing"]["budget_slots"] == (12 if "per_layer" in BLOCKS[block] else 6)
    assert result["sizing"]["status"] in ("OK", "BELOW_RECOMMENDED")
    if block == "adapt":
        assert result["adaptations"]
    if block == "warm_pin":
        assert result["pinned"]
        assert {item["layer"] for item in result["pinned"]} <= set(MOE_LAYERS["qwen3_moe"])


@st.composite
def asked_policies(draw: st.DrawFn, total: int, layers: int) -> ExpertPolicy:
    """Any policy with room for one expert up to nearly all."""
    capacity = draw(st.integers(1, total - 1))
    cache: dict[str, Any] = {
        "eviction": draw(st.sampled_from([*((item,) for item in EVICTIONS), FALLBACK, ("slru", "lfu")])),
        "ttl": draw(st.sampled_from([None, None, 3, 11])),
        "pin": draw(st.sampled_from([(), (), (1,), (0, 3)])),
        "warm_pin": draw(st.sampled_from([None, 5])),
    }
    if draw(st.booleans()):
        cache |= {"memory_threshold": 0.9, "memory_budget_gb": capacity, "expert_size_gb": 1}
    blocks: dict[str, Any] = {"schedule": ScheduleRules(mode=draw(st.sampled_from(MODES)), offload_threshold_ms=1e-6)}
    if capacity >= 2 * layers and draw(st.booleans()):
        allocation = draw(st.sampled_from(ALLOCATIONS))
        blocks["per_layer"] = PerLayerRules(
            allocation=allocation, min_capacity=1, rebalance_interval=7, entropy_window=5
        )
        blocks["per_layer"] = replace(blocks["per_layer"], total_budget=capacity)
    elif draw(st.booleans()):
        blocks |= BLOCKS["adapt"]
    return experts(capacity, strategy=draw(st.sampled_from(STRATEGIES)), cache=cache, **blocks)


@examples(25)
@given(data=st.data())
def test_any_policy_of_experts_gives_the_same_tokens(tiny: Tiny, data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(sorted(MODELS)))
    model, layers = tiny(family, **MODELS[family]), len(MOE_LAYERS[family])
    asked = data.draw(asked_policies(8 * layers, layers))
    devices, schedule = data.draw(st.sampled_from(sorted(DEVICES))), data.draw(st.sampled_from(ON_DEMAND_SCHEDULES))
    n = data.draw(st.integers(1, 4))
    tokens = data.draw(st.sampled_from([4, 8, 40]))
    policy = here(
        model, devices, batch_size=n, micro_batch_size=data.draw(st.integers(1, n)), micro_batch_tokens=tokens
    )
    placed = {"attention": policy.attention_device, "experts": EXPERT_PLACES[policy.ffn_device]}
    if misfit(schedule, discrete=policy.discrete, **placed) is None:
        policy = replace(policy, schedule=schedule)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "SURE", data.draw(st.sampled_from([0.0, predict.SURE])))
        patch.setattr(schedule_time, "ROUTED_ONLY_SHARE", data.draw(st.sampled_from([0.0, 0.25])))
        with opened(policy, asked, lanes=data.draw(st.sampled_from(LANE_KINDS))) as engine:
            assert tokens_of(engine) == truth(model)


@pytest.mark.parametrize(
    ("capacity", "per_layer", "share"),
    [
        (Capacity(value=6), None, 6 / 24),
        (Capacity(value=6), PerLayerRules(), 18 / 24),
        (Capacity(value=6), PerLayerRules(total_budget=7), 7 / 24),
        (Capacity(value=30, unit="percent"), None, 7 / 24),
        (Capacity(value=30, unit="percent"), PerLayerRules(), 6 / 24),
    ],
)
def test_a_policy_has_the_room_that_its_cache_has(
    capacity: Capacity, per_layer: PerLayerRules | None, share: float
) -> None:
    """Under ``per_layer`` a capacity is each layer's, unless a budget is named."""
    model = small_model((True, False, True, True), experts=8)
    asked = ExpertPolicy(name="mine", cache=CacheRules(capacity=capacity), per_layer=per_layer)
    result = with_residents(small_policy(model, discrete=False, resident=1), resident_share(asked, model, FLOAT32))
    assert result.weights.host == pytest.approx(share)
    assert len(place_pages(model, result).resident) == round(24 * share)


@pytest.fixture
def traced(tiny: Tiny, tmp_path: Path) -> tuple[Path, Path]:
    """A profile of a run."""
    model, saved = tiny("qwen3_moe", **MODELS["qwen3_moe"]), tmp_path / "profile.json"
    with opened(here(model), experts(strategy="affinity")) as engine:
        assert tokens_of(engine) == truth(model)
        engine.save_expert_profile(saved)
    return model, saved


def test_a_profile_changes_who_is_near_first_and_no_token(traced: tuple[Path, Path]) -> None:
    model, saved = traced
    counts = json.loads(saved.read_text())
    assert counts
    with opened(here(model), experts(strategy="affinity"), profile=saved) as engine:
        first = engine._experts.residency.pages()  # type: ignore[union-attr]
        assert tokens_of(engine) == truth(model)
    with opened(here(model), experts(strategy="affinity")) as engine:
        assert engine._experts.residency.pages() != first  # type: ignore[union-attr]
    in_policy = experts(cache={"profile": str(saved)})
    with opened(here(model), in_policy) as engine:
        assert engine._experts.residency.pages() == first  # type: ignore[union-attr]


def test_a_profile_of_another_model_is_refused(traced: tuple[Path, Path], tiny: Tiny) -> None:
    other = tiny("mixtral", **MODELS["mixtral"])
    with pytest.raises(ConfigError, match=r"profile\.json"):
        opened(here(other), experts(), profile=traced[1])


@pytest.mark.parametrize("learn", [True, False])
def test_stats_count_every_choice_and_say_which_layers_had_none(tiny: Tiny, learn: bool) -> None:
    model = tiny("qwen3_moe", **MODELS["qwen3_moe"])
    options = ExpertOptions(policy=experts(), learn=learn, record=True)
    with Engine(here(model), device="cpu", experts=options) as engine:
        before = engine.expert_stats
        assert before is not None
        assert [item["layer"] for item in before["layers"]] == [1, 3]
        assert all(item["accesses"] == 0 and item["hit_rate"] is None for item in before["layers"])
        assert tokens_of(engine) == truth(model)
        after, counted = engine.expert_stats, engine._experts.residency.profile()  # type: ignore[union-attr]
        assert engine.policy.residents == ("learned" if learn else "static")
    assert after is not None
    json.dumps(after)
    assert all(item["accesses"] > 0 for item in after["layers"])
    tokens = sum(len(prompt) + how.max_tokens - 1 for prompt, how in zip(PROMPTS, HOW, strict=True))
    assert counted.counts.sum(axis=1).tolist() == pytest.approx([2 * tokens] * 2, rel=0.2)


@pytest.mark.parametrize("devices", ["cpu", "gpu, host"])
def test_a_routing_trace_has_every_choice_and_changes_no_token(tiny: Tiny, devices: str, tmp_path: Path) -> None:
    model, path = tiny("qwen3_moe", **MODELS["qwen3_moe"]), tmp_path / "trace.jsonl"
    with opened(here(model, devices), experts(), record=True, trace=path) as engine:
        assert tokens_of(engine) == truth(model)
        counts = engine._experts.residency.profile().counts  # type: ignore[union-attr]
    result = {1: [0] * 8, 3: [0] * 8}
    for row in read_rows(path):
        for expert in row.ids.tolist():
            result[row.layer][expert] += 1
    assert [result[1], result[3]] == counts.round().astype(int).tolist()
    assert sum(result[1]) == sum(result[3]) >= 2 * sum(map(len, PROMPTS))


def test_where_all_are_near_nothing_is_small_and_nobody_counts(tiny: Tiny) -> None:
    model = tiny("mixtral", **MODELS["mixtral"])
    asked = ExpertOptions(policy=experts(24))
    with Engine(here(model), device="cpu", experts=asked) as engine:
        assert engine.policy.residents == "static"
        assert engine.expert_stats is None
        kinds: set[TaskKind] = set()
        list(engine.run([ONE], on_pass=lambda: kinds.update(s.task.kind for s in require(engine.timeline).spans)))
        assert tokens_of(engine) == truth(model)
        with pytest.raises(ConfigError, match="record"):
            engine.save_expert_profile(Path("nowhere.json"))
    assert kinds == {
        TaskKind.EMBED,
        TaskKind.PRE_ATTENTION,
        TaskKind.CPU_ATTENTION,
        TaskKind.POST_ATTENTION,
        TaskKind.SAMPLE,
    }
