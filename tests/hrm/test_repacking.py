"""Pages whose matrices are turned as they are read: priced where they stream to a CPU, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moelight.core.policy import Policy, Shares
from moelight.core.schedule import Lane, Task, TaskKind
from moelight.formats.awq import awq
from moelight.formats.format import Format
from moelight.formats.fp8 import fp8
from moelight.formats.ggml import ggml_format
from moelight.formats.gptq import gptq
from moelight.hrm import costs
from moelight.hrm.cost_model import CostModel
from moelight.hrm.estimate import cost_model_of, cost_of
from moelight.hrm.machine_model import speeds_of
from moelight.hrm.pass_cost import PassCost, PlacementCounts
from moelight.hrm.placement import place_pages
from moelight.hrm.task_cost import MicroBatchLoad, PassCosts
from moelight.hrm.workload_model import decode_pass
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.model import ModelProfile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.quantization import with_stored
from moelight.profiles.workload import Workload

MIXTRAL = load_model_profile("mixtral")
SPEEDS = {name: speeds_of(load_hardware_profile(name)) for name in ("cpu-amx", "t4")}
WORK = Workload(num_requests=400, prompt_len=64, max_prompt_len=64, gen_len=64)
PLAIN = Policy(
    model="m",
    batch_size=4,
    micro_batch_size=4,
    micro_batch_tokens=64,
    kv_tokens=4 * 160,
    ffn_device="cpu",
    attention_device="cpu",
    weights=Shares(host=0.5, disk=0.5),
)
BY_COLUMNS = gptq(bits=4, group=128, in_order=True)
ORDERED = gptq(bits=4, group=128)


def profile(stored: Format) -> ModelProfile:
    return with_stored(MIXTRAL, lambda module: stored if "experts" in module else None, "config.json")


def models(stored: Format, machine: str = "cpu-amx", **policy: object) -> CostModel:
    return cost_model_of(profile(stored), replace(PLAIN, **policy), SPEEDS[machine])  # type: ignore[arg-type]


def cost(stored: Format, pages: float) -> PassCost:
    placed = PlacementCounts(from_disk=pages)
    return cost_of(models(stored), WORK, decode_pass(WORK, 4), placed, PLAIN)


@pytest.mark.parametrize("stored", [BY_COLUMNS, awq(group=64), gptq(bits=8, group=0, in_order=True)])
def test_all_of_a_page_is_turned(stored: Format) -> None:
    result = profile(stored).stored
    assert result is not None and result.repacked_bytes == result.mean_page_bytes


@pytest.mark.parametrize("stored", [ORDERED, fp8(block=(128, 128), scale="F32"), ggml_format("Q4_K")])
def test_nothing_is_turned_of_other_formats(stored: Format) -> None:
    result = profile(stored).stored
    assert result is not None and result.repacked_bytes == 0


def test_turning_takes_the_cpu_and_no_byte() -> None:
    """The columns of `ORDERED` may be in any order, so its pages, of the same bytes, stay as they are."""
    for pages in (0.0, 40.0):
        turned, stays = cost(BY_COLUMNS, pages), cost(ORDERED, pages)
        more = pages * float(turned.share * models(BY_COLUMNS).repacking_s())
        assert float(turned.lanes["cpu"] - stays.lanes["cpu"]) == pytest.approx(more, rel=1e-9, abs=1e-12)
        assert float(turned.lanes["disk"]) == float(stays.lanes["disk"])
    assert models(BY_COLUMNS).repacking_s() > 0.0 == models(ORDERED).repacking_s()


def test_a_gpu_takes_pages_as_they_are_stored() -> None:
    """Pages of Mixtral 8x7B cross a link in parts, so they stay also where the CPU computes some of them."""
    beside = {"machine": "t4", "attention_device": "cpu", "schedule": "cgopipe"}
    assert models(BY_COLUMNS, ffn_device="gpu", **beside).repacked_bytes() == 0
    assert models(BY_COLUMNS, ffn_device="split", **beside).repacked_bytes() == 0
    on_cpu = {"machine": "t4", "attention_device": "gpu", "schedule": "serial"}
    assert models(BY_COLUMNS, ffn_device="cpu", **on_cpu).repacked_bytes() > 0


def test_the_virtual_clock_counts_the_memory_that_is_touched() -> None:
    cost_model = models(BY_COLUMNS)
    prices = PassCosts(
        cost_model, place_pages(cost_model.model, PLAIN), [MicroBatchLoad(decode_tokens=4.0, context=64.0)]
    )
    page = cost_model.page_bytes()
    result = prices(Task(kind=TaskKind.READ_PAGE, lane=Lane.DISK, layer=1, micro_batch=-1, bytes=page))
    assert result.dram_bytes == (1 + costs.REPACKING_PASSES) * page
