"""Two ranks with an emulated link each beside one process with one link, where the link binds: measured, and as the
simulator has it. All experts are in host memory and cross in every pass; links are slow enough that the cores of a rank
compute meanwhile."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.core.units import parse_bytes
from moelight.engine.engine import Engine, requests_from
from moelight.models.checkpoints import open_model
from moelight.optimizer.simulation import SimulationSetup
from moelight.profiles.hardware import HardwareProfile, load_hardware_profile, part_of, with_gpus
from moelight.profiles.workload import Workload
from pipeline_sections.setting import Setting

RANKS, BATCH, PROMPT = 2, 16, 8
CARDS = "2xt4"  # whose links are slowed


def run(setting: Setting) -> dict[str, Any]:
    """Every resident model, with one link and with two in turns."""
    rate, new = parse_bytes(setting.options["links_rate"], label="--links-rate"), setting.options["links_new"]
    rows = []
    for model in setting.models:
        turns = [[_pass_s(model, rate, new, ranks) for ranks in (1, RANKS)] for _ in range(setting.rounds)]
        alone, several = _simulated_s(model, rate, 1), _simulated_s(model, rate, RANKS)
        rows.append(
            {
                "model": model.name,
                "link_bytes_per_s": rate,
                "ranks": RANKS,
                "pass_s": [statistics.median(seconds) for seconds in zip(*turns, strict=True)],
                "gain": statistics.median(one / two for one, two in turns),
                "simulated_gain": alone / several,
            }
        )
        print(
            f"links: {model.name}, {RANKS} links of {rate / 1e6:.0f} MB/s: {rows[-1]['gain']:.3f} x one, simulated "
            f"{rows[-1]['simulated_gain']:.3f} x"
        )
    return {"rows": rows}


def _policy(model: Path) -> Policy:
    sizes = {"batch_size": BATCH, "micro_batch_size": BATCH // 2, "micro_batch_tokens": BATCH * PROMPT}
    return Policy(
        model=str(model),
        ffn_device="gpu",
        weights=Shares(host=1.0),
        residents="static",
        kv_tokens=BATCH * 128,
        **sizes,
    )


def _pass_s(model: Path, rate: int, new: int, ranks: int) -> float:
    """Median seconds of a decode pass."""
    with Engine(_policy(model), device=f"twin:link={rate}/s", tp=str(ranks)) as engine:
        how = SamplingParams(max_tokens=new, ignore_eos=True)
        ends = list[float]()
        prompts = [[3 + index] * PROMPT for index in range(BATCH)]
        for _ in engine.run(requests_from(prompts, how, engine.tokenizer), on_pass=lambda: ends.append(_end_s(engine))):
            pass
    return statistics.median(later - earlier for earlier, later in pairwise(ends))


def _end_s(engine: Engine) -> float:
    assert engine.timeline is not None
    return engine.timeline.end_s


def _simulated_s(model: Path, rate: int, ranks: int) -> float:
    """Seconds of a steady decode pass on cards with such links."""
    profile = open_model(str(model)).profile
    machine = part_of(with_gpus(_cards(rate), ranks), ranks)
    work = Workload(num_requests=BATCH, prompt_len=PROMPT, max_prompt_len=PROMPT, gen_len=8)
    share = profile if ranks == 1 else profile.on_ranks(ranks)
    return SimulationSetup(_policy(model), share, machine, work).simulated_run("cgopipe").steady.seconds


def _cards(rate: int) -> HardwareProfile:
    """`CARDS` with links that reach ``rate``."""
    cards = load_hardware_profile(CARDS)
    links = tuple(replace(link, bandwidth_bytes_per_s=float(rate)) for link in cards.links)
    return replace(cards, links=links, measured=(*cards.measured, ("transfer", 15e-6)))
