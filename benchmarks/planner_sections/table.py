"""The last two columns of the table in docs/concepts/hrm.md: the published policies, priced by the calibrated estimator
and simulated.

Calibrated: what this engine would reach with the published N and μ on the shipped T4 or L4, its link as fast as the
published runs imply (`published.py`), one batch of N prompts, prompts riding along. Simulated: the published
system itself, as in docs/concepts/published.md.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

from moelight.core.policy import Policy, Shares
from moelight.hrm.estimate import estimate
from moelight.hrm.machine_model import speeds_of
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import Workload
from planner_sections import published

MACHINES = {"S1": "t4", "S2": "l4"}
HELM = (
    ("S1", "reasoning p", 256, 50, 36, 26),
    ("S2", "reasoning p", 256, 50, 100, 15),
    ("S1", "summarization p", 1984, 64, 4, 19),
    ("S2", "summarization p", 1984, 64, 8, 36),
)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One row of the table."""

    row: str
    prompt_len: int
    gen_len: int
    calibrated: float
    simulated: float | None


def run(_args: argparse.Namespace) -> dict[str, Any]:
    """One row of each published policy."""
    lines = [*_mtbench(), *_helm()]
    for line in lines:
        simulated = "" if line.simulated is None else f"{line.simulated:.1f}"
        print(f"| {line.row} | {line.prompt_len} | {line.gen_len} | … | {line.calibrated:.1f} | {simulated} |")
    return {"rows": [vars(line) for line in lines]}


def _mtbench() -> list[Line]:
    result = []
    simulated = {(row.setting, row.system, row.gen_len): row.predicted for row in published.rows()}
    for setting in MACHINES:
        for system, policies, length in (
            ("MoE-Lightning", published.PAPER_RAGGED, published.RAGGED),
            ("MoE-Lightning(p)", published.PAPER_PADDED, published.PADDED),
        ):
            for gen, (mu, count) in zip(published.GENERATED, policies[setting], strict=True):
                ragged = system == "MoE-Lightning"
                result.append(
                    Line(
                        row=f"{setting} MTBench" + ("" if ragged else " p"),
                        prompt_len=int(length),
                        gen_len=gen,
                        calibrated=calibrated(setting, int(length), gen, mu, count, ragged=ragged),
                        simulated=simulated[setting, system, gen],
                    )
                )
    return result


def _helm() -> list[Line]:
    return [
        Line(
            row=f"{setting} {name}",
            prompt_len=length,
            gen_len=gen,
            calibrated=calibrated(setting, length, gen, mu, count, ragged=False),
            simulated=None,
        )
        for setting, name, length, gen, mu, count in HELM
    ]


def calibrated(setting: str, prompt_len: int, gen_len: int, mu: int, count: int, *, ragged: bool) -> float:
    """Tokens per second of one batch of ``mu`` times ``count`` prompts; no experts resident, as in the runs."""
    link = published.SETTINGS[setting].pinned(ragged=ragged)
    speeds = replace(speeds_of(load_hardware_profile(MACHINES[setting])), h2d=link, d2h=link)
    n = mu * count
    policy = Policy(
        model="mixtral",
        batch_size=n,
        micro_batch_size=mu,
        micro_batch_tokens=max(4096, mu),
        kv_tokens=n * (prompt_len + gen_len),
        ffn_device="gpu",
        weights=Shares(host=1.0),
    )
    work = Workload(num_requests=n, prompt_len=prompt_len, max_prompt_len=prompt_len, gen_len=gen_len)
    return estimate(load_model_profile("mixtral"), policy, work, speeds).tokens_per_s
