"""Random questions to the planner: machines from laptops to nodes of eight cards, some with parts that are orders of
magnitude apart; models of a few to hundreds of gigabytes; one request to hundreds of thousands."""

from __future__ import annotations

import random

import numpy as np

from moelight.core.dtypes import dtype_named
from moelight.core.units import GiB
from moelight.hrm import costs
from moelight.hrm.machine_model import speeds_of
from moelight.optimizer.optimize import capacities
from moelight.optimizer.problem import Problem
from moelight.profiles.efficiency import Curve, Surface
from moelight.profiles.hardware import HardwareProfile, Link, Processor, Tier
from moelight.profiles.model import AttentionSpec, ExpertSpec, LatentSpec, ModelProfile, RouterSpec
from moelight.profiles.names import MIXTRAL_STYLE
from moelight.profiles.workload import Workload


def question(seed: int) -> tuple[Problem, HardwareProfile]:
    """The same question for the same seed. Whether anything fits is left to chance; mostly something does."""
    draw = random.Random(seed)
    model, work = drawn_model(draw), drawn_workload(draw)
    bfloat16 = dtype_named("bfloat16")
    experts = costs.page_bytes(model, bfloat16) * model.num_moe_layers * model.experts.num_experts
    hardware = drawn_machine(draw, seed, experts, costs.dense_bytes(model, bfloat16))
    problem = Problem(
        name=model.name,
        model=model,
        speeds=speeds_of(hardware),
        workload=work,
        capacity_bytes=capacities(hardware, {}),
        dtype=bfloat16,
    )
    return problem, hardware


def drawn_workload(draw: random.Random) -> Workload:
    prompt = _whole(draw, 1, 6000)
    return Workload(
        num_requests=_whole(draw, 1, 300_000),
        prompt_len=prompt,
        max_prompt_len=prompt if draw.random() < 0.3 else min(prompt * draw.randint(1, 6), 16_000),
        gen_len=_whole(draw, 1, 1500),
    )


def drawn_model(draw: random.Random) -> ModelProfile:
    layers, heads, dim = _whole(draw, 2, 64), 1 << draw.randint(1, 6), draw.choice([64, 128])
    dense = tuple(index >= draw.choice([0, 0, 0, 1, 3]) for index in range(layers))
    moe = dense if any(dense) else (True,) * layers
    latent = LatentSpec(q_lora_rank=None, kv_lora_rank=512, nope_head_dim=dim, rope_head_dim=64, value_head_dim=dim)
    window = draw.choice([None, None, None, 128, 4096])
    experts = draw.choice([4, 8, 8, 16, 32, 64, 128, 256])
    return ModelProfile(
        name="drawn",
        model_type="mixtral",
        num_layers=layers,
        hidden_size=64 * _whole(draw, 4, 110),
        vocab_size=_whole(draw, 4000, 200_000),
        max_positions=1 << draw.randint(12, 18),
        norm_eps=1e-5,
        tie_embeddings=draw.random() < 0.2,
        dtype="bfloat16",
        attention=AttentionSpec(
            num_heads=heads,
            num_kv_heads=max(1, heads >> draw.randint(0, 4)),
            head_dim=dim,
            window=window,
            latent=latent if draw.random() < 0.15 else None,
        ),
        router=RouterSpec(
            top_k=min(experts, draw.choice([1, 2, 2, 4, 8])), normalize=True, weights_in_model_dtype=False
        ),
        experts=ExpertSpec(
            num_experts=experts,
            intermediate_size=64 * _whole(draw, 4, 256),
            shared_intermediate_size=draw.choice([0, 0, 1024]),
        ),
        moe_layers=moe,
        dense_intermediate_size=0 if all(moe) else 8192,
        names=MIXTRAL_STYLE,
    )


def drawn_machine(draw: random.Random, seed: int, experts_bytes: int, dense_bytes: int) -> HardwareProfile:
    """Memories of about a share of the model to several times as much; speeds of real parts, or of any."""
    gpu, odd = draw.random() < 0.8, draw.random() < 0.4

    def rate(low: float, high: float) -> float:
        spread = 30.0 if odd else 1.0
        return float(np.exp(draw.uniform(np.log(low / spread), np.log(high * spread))))

    def size(least: float, share: float) -> int:
        return int(least + experts_bytes * float(np.exp(draw.uniform(np.log(share), np.log(3.0)))))

    plenty = 1 << 50
    tiers = [
        Tier(name="host", capacity_bytes=size(4 * GiB, 0.02) + dense_bytes, bandwidth_bytes_per_s=rate(2e10, 8e11))
    ]
    disk = draw.choice([plenty, plenty, plenty, 0])
    tiers.append(Tier(name="disk", capacity_bytes=disk, bandwidth_bytes_per_s=rate(3e8, 1.5e10)))
    processors, links = [Processor(name="cpu", count=1, peak_flops=rate(1e11, 8e12))], []
    count = draw.choice([1, 1, 1, 2, 4, 8])
    if gpu:
        device = int((size(1 * GiB, 0.01) + dense_bytes) / count + GiB)
        tiers.append(Tier(name="device", capacity_bytes=device, bandwidth_bytes_per_s=rate(2e11, 5e12)))
        processors.append(Processor(name="gpu", count=count, peak_flops=rate(2e13, 1e15)))
        up = rate(6e9, 2e11)
        links = [Link(src="host", dst="device", bandwidth_bytes_per_s=up)]
        links.append(
            Link(src="device", dst="host", bandwidth_bytes_per_s=up if draw.random() < 0.7 else rate(6e9, 2e11))
        )
    measured: tuple[tuple[str, float], ...] = ()
    surfaces: tuple[Surface, ...] = ()
    if draw.random() < 0.3:
        shares = {"cpu_under_disk": draw.uniform(0.3, 1.0), "disk_under_cpu": draw.uniform(0.3, 1.0)}
        measured = (*shares.items(), ("cpu_task", rate(1e-6, 1e-4)), ("transfer", rate(1e-6, 5e-5)))
        surfaces = tuple(_surface(draw, f"cpu_{work}", rate(1e11, 5e12)) for work in ("linear", "experts"))
    return HardwareProfile(
        name=f"drawn-{seed}",
        tiers=tuple(tiers),
        links=tuple(links),
        processors=tuple(processors),
        measured=measured,
        efficiency=surfaces,
    )


def _surface(draw: random.Random, name: str, peak: float) -> Surface:
    """Rates that mostly rise with the rows, and now and then fall, as measured ones do."""
    x = (1.0, 4.0, 16.0, 64.0, 256.0)
    y = tuple(peak * min(1.0, 0.03 + rows / 100) * draw.uniform(0.8, 1.2) for rows in x)
    return Surface(name=name, sizes=(0.0,), curves=(Curve(x=x, y=y),))


def _whole(draw: random.Random, low: int, high: int) -> int:
    return round(float(np.exp(draw.uniform(np.log(low), np.log(high)))))
