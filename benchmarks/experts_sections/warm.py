"""A saved profile: how many of the first tokens' experts are near at once; and what residency costs where all are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from experts_sections.value import NEW, QUARTER, model_of, workloads
from moelight import Engine, SamplingParams
from moelight.core.policy import Policy, Shares
from moelight.experts.options import ExpertOptions
from moelight.experts.policy import DEFAULT_POLICY, CacheRules, Capacity, ExpertPolicy

FIRST_TOKENS = 64


def first_hit_rate(model: Path, prompts: list[str], batch: int, experts: ExpertOptions) -> float:
    """Of the accesses up to the pass in which the 64th token comes."""
    policy = Policy(model=str(model), batch_size=batch, micro_batch_size=batch, kv_tokens=4096, weights=QUARTER)
    with Engine(policy, experts=experts) as engine:
        stream = engine.stream(prompts, SamplingParams(max_tokens=NEW))
        for _ in stream:
            if engine.stats.completion_tokens >= FIRST_TOKENS:
                break
        stats = engine.expert_stats
        stream.close()  # type: ignore[attr-defined]
    return float(stats["overall"]["hit_rate"]) if stats else 0.0


def run(args: Any) -> dict[str, Any]:
    """Cold against warm, learned on one half of the prompts and used on the other; and the cost where all fit."""
    result: dict[str, Any] = {"first_64_tokens": {}, "all_fit": {}}
    for model in args.models:
        folder = model_of(model, args.scratch)
        for work, prompts in workloads(2 * args.prompts).items():
            half = len(prompts) // 2
            profile = args.scratch / f"{model}-{work}.json"
            policy = Policy(model=str(folder), batch_size=2, micro_batch_size=2, kv_tokens=4096, weights=QUARTER)
            with Engine(policy, experts=ExpertOptions(record=True)) as engine:
                engine.generate(prompts[:half], SamplingParams(max_tokens=NEW))
                engine.save_expert_profile(profile)
            for batch in args.batches:
                rates = [
                    first_hit_rate(folder, prompts[half:], batch, item)
                    for item in (ExpertOptions(), ExpertOptions(profile=profile))
                ]
                result["first_64_tokens"][f"{model} {work} {batch}"] = {"cold": rates[0], "warm": rates[1]}
                cold, warm = (f"{rate:.3f}" for rate in rates)
                print(f"{model}, {work}, batch {batch}: first {FIRST_TOKENS} tokens' hits {cold} -> {warm}")
        result["all_fit"][model] = all_fit(folder, workloads(args.prompts)["mixed"], args.rounds)
    return result


def all_fit(model: Path, prompts: list[str], rounds: int) -> dict[str, float]:
    """Tokens a second where all experts are near, under policies, over those without any."""
    room = Capacity(value=100.0, unit="percent")
    policies: dict[str, ExpertOptions] = {"none": ExpertOptions(learn=False)}
    for eviction in ("lru", "lfu", "slru", "score", "frequency_threshold", "reuse"):
        cache = CacheRules(capacity=room, eviction=(eviction,))
        policies[eviction] = ExpertOptions(policy=ExpertPolicy(name=eviction, cache=cache))
    policies["default"] = ExpertOptions(
        policy=replace(DEFAULT_POLICY, cache=replace(DEFAULT_POLICY.cache, capacity=room))
    )
    seen: dict[str, list[float]] = {name: [] for name in policies}
    for _ in range(max(3, rounds)):
        for name, experts in policies.items():
            policy = Policy(
                model=str(model), batch_size=4, micro_batch_size=4, kv_tokens=4096, weights=Shares(host=1.0)
            )
            with Engine(policy, experts=experts) as engine:
                engine.generate(prompts, SamplingParams(max_tokens=NEW))
                seen[name].append(engine.stats.tokens_per_s)
    result = {name: median(item) for name, item in seen.items()}
    ratios = {name: item / result["none"] for name, item in result.items()}
    print(f"all experts near: {', '.join(f'{name} {ratio:.3f}' for name, ratio in ratios.items())}")
    return ratios
