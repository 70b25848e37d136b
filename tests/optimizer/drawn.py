"""Small problems drawn at random: models of a few pages on machines whose parts are about as fast as each other, or
orders of magnitude apart, with memory from too little to plenty."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from moelight.core.dtypes import FLOAT32
from moelight.hrm import costs
from moelight.hrm.footprint import fixed_bytes, kv_block_bytes, kv_blocks
from moelight.hrm.machine_model import Speeds, Unit
from moelight.optimizer.problem import Fixed, Problem, make_candidates, variants
from moelight.profiles.efficiency import Curve, Surface
from moelight.profiles.model import AttentionSpec, ExpertSpec, LatentSpec, ModelProfile
from moelight.profiles.workload import Workload
from tests.shapes import small_model

PLENTY = 1 << 40
TOKENS = tuple(1 << power for power in range(4, 14))
# What leaves N, μ, devices, order and homes open, as `exhaustive.every` enumerates them.
USUAL: dict[str, Fixed] = {
    "prompt_micro_batches": 8,
    "kv_block_size": 32,
    "look_ahead": 2,
    "host_pages": "staged",
    "admission": "refill",
    "residents": "static",
}


def drawn_problem(seed: int, *, most_requests: int = 4, gpu: bool | None = None) -> Problem:
    """The same problem for the same seed, with what is `USUAL` fixed."""
    draw = random.Random(seed)
    model, prompt = drawn_model(draw), draw.randint(1, 40)
    gpu = draw.random() < 0.85 if gpu is None else gpu
    work = Workload(
        num_requests=draw.randint(1, most_requests),
        prompt_len=prompt,
        max_prompt_len=prompt + draw.randint(0, 20),
        gen_len=draw.randint(1, 24),
    )
    speeds = balanced_speeds(draw, model, work, gpu=gpu) if draw.random() < 0.6 else scattered_speeds(draw, gpu=gpu)
    tiers = ("device", "host", "disk") if gpu else ("host", "disk")
    problem = Problem(
        name="m",
        model=model,
        speeds=speeds,
        workload=work,
        capacity_bytes=dict.fromkeys(tiers, 0),
        dtype=FLOAT32,
        fixed=USUAL,
    )
    return replace(problem, capacity_bytes=drawn_capacities(draw, problem))


def drawn_model(draw: random.Random) -> ModelProfile:
    """One to three layers with experts, sometimes a dense one, latent attention, a window or shared experts."""
    layers = [True] * draw.randint(1, 3)
    experts = draw.randint(1, 2) if len(layers) > 2 else draw.randint(2, 4)
    if draw.random() < 0.3:
        layers.insert(draw.randint(0, len(layers)), False)
    model = small_model(layers, experts=experts)
    shared = draw.choice([0, 0, 16])
    return replace(
        model,
        hidden_size=draw.choice([8, 32, 64]),
        attention=draw.choice([model.attention, replace(model.attention, window=16), latent_attention()]),
        experts=ExpertSpec(
            num_experts=experts, intermediate_size=draw.choice([12, 64, 96]), shared_intermediate_size=shared
        ),
        router=replace(model.router, top_k=draw.randint(1, min(2, experts))),
    )


def latent_attention() -> AttentionSpec:
    latent = LatentSpec(q_lora_rank=None, kv_lora_rank=8, nope_head_dim=4, rope_head_dim=4, value_head_dim=4)
    return AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=8, latent=latent)


def scattered_speeds(draw: random.Random, *, gpu: bool) -> Speeds:
    """Every rate within four or five decades."""

    def rate(low: float, high: float) -> float:
        return float(10 ** draw.uniform(low, high))

    def unit() -> Unit:
        return Unit(
            flops=rate(7, 11),
            memory=rate(6, 10),
            elementwise=rate(7, 11),
            task_s=draw.choice([0.0, rate(-7, -3)]),
            launch_s=draw.choice([0.0, rate(-7, -4)]),
            prefill_flops=rate(7, 11),
            linear=draw.choice([None, None, drawn_surface(draw, "linear", rate(7, 11))]),
            experts=draw.choice([None, None, drawn_surface(draw, "experts", rate(7, 11))]),
        )

    return Speeds(
        cpu=unit(),
        gpu=unit() if gpu else None,
        dram=rate(6, 10),
        disk=rate(5, 10),
        h2d=rate(5, 10),
        d2h=rate(5, 10),
        stage=rate(5, 10),
        transfer_s=draw.choice([0.0, rate(-7, -4)]),
        under_disk=draw.choice([1.0, draw.uniform(0.1, 1)]),
    )


def balanced_speeds(draw: random.Random, model: ModelProfile, work: Workload, *, gpu: bool) -> Speeds:
    """Every part of the machine needs about as long as the others for what a pass may ask of it."""
    spread, requests = draw.choice([0.3, 1.0, 2.0]), work.num_requests
    weights = float(costs.page_bytes(model, FLOAT32) * model.num_moe_layers * model.experts.num_experts)
    flops = 2.0 * requests * model.num_moe_layers * model.router.top_k * costs.page_elements(model)
    cache = float(requests * (work.prompt_len + work.gen_len) * costs.kv_token_bytes(model, FLOAT32))
    item = costs.qkv_bytes(model, FLOAT32, 1) + costs.hidden_bytes(model, FLOAT32, 1)
    crossing = float(requests * model.num_layers * item)

    def about(size: float, decades: float = 0.0) -> float:
        return float(size * 10 ** draw.uniform(decades - spread, decades + spread))

    def unit(decades: float) -> Unit:
        return Unit(
            flops=about(flops, decades),
            memory=about(weights + cache, decades),
            elementwise=about(80.0 * requests * model.hidden_size * model.num_layers, decades),
            task_s=draw.choice([0.0, about(1e-3)]),
            launch_s=draw.choice([0.0, about(5e-4)]),
            prefill_flops=about(flops, decades),
        )

    return Speeds(
        cpu=unit(0.0),
        gpu=unit(draw.choice([0.0, 1.0])) if gpu else None,
        dram=about(3 * (weights + cache), 0.5),
        disk=about(weights),
        h2d=about(weights + crossing),
        d2h=about(crossing),
        stage=about(weights),
        transfer_s=draw.choice([0.0, about(1e-3)]),
        under_disk=draw.choice([1.0, draw.uniform(0.1, 1)]),
    )


def drawn_surface(draw: random.Random, name: str, peak: float) -> Surface:
    """Speeds that mostly rise with the rows, and now and then fall, as measured ones do."""
    x = (1.0, 4.0, 16.0, 64.0)
    return Surface(
        name=f"cpu_{name}",
        sizes=(0.0,),
        curves=(Curve(x=x, y=tuple(peak * (0.1 + 0.9 * rows / 64) * draw.uniform(0.7, 1.3) for rows in x)),),
    )


def drawn_capacities(draw: random.Random, problem: Problem) -> dict[str, int]:
    """About what some candidate needs with none to all of its pages and cache; or far too little; or plenty."""
    variant = draw.choice(list(variants(problem)))
    n = draw.randint(1, problem.workload.num_requests)
    mu = draw.randint(1, n)
    tokens = max(draw.choice(TOKENS[:5]), mu)
    candidate = make_candidates(problem, variant, np.int64(n), np.int64(mu), np.int64(tokens), np.int64(8))
    needed = dict.fromkeys(problem.capacity_bytes, 0)
    for (_, tier), size in fixed_bytes(problem.model, candidate, dtype=FLOAT32).items():
        needed[tier] += int(size)
    cache = int(kv_blocks(candidate)) * kv_block_bytes(problem.model, candidate, FLOAT32)
    pages = problem.pages * costs.page_slot_bytes(problem.model, FLOAT32)
    result = {}
    for tier in needed:
        about = int(needed[tier] + draw.uniform(-0.1, 1.3) * pages + draw.uniform(-0.1, 1.2) * cache)
        result[tier] = draw.choices([max(about, 0), PLENTY, int(0.7 * needed[tier])], [0.86, 0.12, 0.02])[0]
    return {**result, "disk": draw.choice([0, PLENTY, PLENTY, int(draw.random() * pages)])}
