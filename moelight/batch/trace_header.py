"""The header of a trace: the policy of its run, and each lane's predicted busy time and bytes in a decode pass."""

from __future__ import annotations

from moelight import __version__
from moelight.core.schedule import Lane
from moelight.observe.number_format import rate_or_count
from moelight.observe.trace import LaneForecast, TraceHeader
from moelight.optimizer.plan import policy_as_dict
from moelight.optimizer.simulation import SimulationSetup


def trace_header(stage: SimulationSetup, schedule: str, *, source: str) -> TraceHeader:
    """The header of a trace whose passes are ``measured`` or ``simulated`` with ``schedule``."""
    estimate, work, crossed = stage.estimate_of(schedule), stage.workload, stage.lane_bytes(schedule)
    return TraceHeader(
        version=__version__,
        source=source,
        policy={**policy_as_dict(stage.policy), "schedule": schedule},
        hardware=stage.hardware.name,
        predicted={
            str(lane): LaneForecast(busy_s=estimate.lanes[lane.value], bytes=crossed.get(lane, 0))
            for lane in Lane
            if estimate.lanes.get(lane.value, 0.0) > 0
        },
        pass_s=estimate.pass_s,
        roofs=stage.roofs(),
        notes={
            "workload": f"{work.num_requests:,} prompts of {work.prompt_len:,} tokens, {work.gen_len:,} generated each",
            "predicted tokens/s": rate_or_count(estimate.tokens_per_s),
        },
    )
