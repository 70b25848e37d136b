"""Machines beside each other: what is planned for them, what they cost, and which of them no other one beats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moelight.core.errors import BudgetError, ConfigError
from moelight.core.policy import Policy
from moelight.hrm.estimate import Estimate, Phase
from moelight.optimizer import offers as offers_module
from moelight.optimizer.offers import Offer, make_offers, offers_as_dict
from moelight.optimizer.options import PlanOptions
from moelight.optimizer.plan import Plan
from moelight.profiles.hardware import HardwareProfile, load_hardware_profile, part_of
from moelight.profiles.model import ModelProfile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.prices import Prices
from moelight.profiles.workload import Workload

WORK = Workload(num_requests=100, prompt_len=10, max_prompt_len=10, gen_len=36)
PRICES = Prices(
    name="mine",
    date="2026-12-01",
    currency="EUR",
    source="",
    setup_s=0.0,
    hourly=(("t4", 1.0), ("4xt4", 3.0), ("l4", 8.0)),
)


class Planner:
    """Plans of which every request takes ``row_s`` seconds, half of that with experts in int4; remembers what it was
    asked."""

    def __init__(self, row_s: dict[str, float], *, gigabytes: float = 0.0) -> None:
        self.row_s, self.bytes = row_s, gigabytes * 1e9
        self.asked: list[tuple[HardwareProfile, Workload, PlanOptions]] = []

    def __call__(
        self, hardware: HardwareProfile, model: ModelProfile, workload: Workload, options: PlanOptions, *, name: str
    ) -> Plan:
        self.asked.append((hardware, workload, options))
        host = hardware.tier("host")
        assert host is not None
        if host.capacity_bytes < self.bytes:
            raise BudgetError("too small", tier="host", needed_bytes=int(self.bytes))
        dtype = options.weight_dtypes[0]
        seconds = self.row_s[hardware.name] * workload.num_requests / (1 if dtype == "auto" else 2)
        estimate = Estimate(
            layer_s=0.0,
            pass_s=1.0,
            decode_tokens_per_s=1.0,
            tokens_per_s=1.0,
            lanes={"cpu": 1.0},
            binding="cpu",
            phases=(
                Phase(name="all", passes=1, decode_tokens=1, prompt_tokens=0, seconds=seconds, lanes={"cpu": 1.0}),
            ),
        )
        policy = Policy(model=name, weight_dtype=dtype)
        return Plan(
            policy=policy, hardware=hardware.name, workload=workload, estimator="", estimate=estimate, memory=(), why=""
        )


def planned(
    planner: Planner, monkeypatch: pytest.MonkeyPatch, *names: str, nodes: tuple[int, ...] = (1,), **options: object
) -> tuple[Offer, ...]:
    monkeypatch.setattr(offers_module, "make_plan", planner)
    chosen = PlanOptions(**options)  # type: ignore[arg-type]
    return make_offers(
        [load_hardware_profile(name) for name in names],
        load_model_profile("mixtral-8x7b"),
        WORK,
        lambda _: chosen,
        name="mixtral",
        nodes=nodes,
        prices=PRICES,
    )


def labels(offers: tuple[Offer, ...], *, front: bool = False) -> list[str]:
    return [offer.label for offer in offers if offer.on_front or not front]


def test_every_machine_number_and_form_is_an_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner({"t4": 36.0, "l4": 18.0})
    offers = planned(planner, monkeypatch, "t4", "l4", nodes=(1, 2), weight_dtypes=("auto", "int4"))
    assert sorted(labels(offers)) == [
        "2 × l4",
        "2 × l4 int4",
        "2 × t4",
        "2 × t4 int4",
        "l4",
        "l4 int4",
        "t4",
        "t4 int4",
    ]
    assert {work.num_requests for _, work, _ in planner.asked} == {100, 50}
    assert {options.weight_dtypes for *_, options in planner.asked} == {("auto",), ("int4",)}
    by_name = {offer.label: offer for offer in offers}
    assert [by_name[name].seconds for name in ("t4", "2 × t4", "2 × t4 int4")] == [3600, 1800, 900]
    assert [by_name[name].price for name in ("t4", "2 × t4", "2 × t4 int4")] == [1.0, 1.0, 0.5]
    assert by_name["t4"].tokens_per_s == 1.0
    assert by_name["t4"].price_per_million == pytest.approx(1e6 / 3600)


def test_the_front_holds_what_no_other_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner({"t4": 36.0, "l4": 18.0, "h100": 1.0})
    offers = planned(planner, monkeypatch, "h100", "l4", "t4", nodes=(1, 2))
    assert labels(offers) == ["2 × t4", "t4", "2 × l4", "l4", "2 × h100", "h100"]  # those without a price last
    assert labels(offers, front=True) == ["2 × t4", "2 × l4"]


def test_setup_is_paid_for_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.PRICES", replace(PRICES, setup_s=3600.0))
    one, two = planned(Planner({"t4": 36.0}), monkeypatch, "t4", nodes=(1, 2))
    assert (one.seconds, one.price, one.tokens_per_s) == (7200, 2.0, 1.0)
    assert (two.nodes, two.seconds, two.price) == (2, 5400, 3.0)


def test_a_machine_of_several_gpus_has_an_engine_for_each_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (offer,) = planned(Planner({"4xt4": 36.0}), monkeypatch, "4xt4")
    assert (offer.engines, offer.seconds) == (4, 900)
    planner = Planner({"4xt4": 36.0}, gigabytes=200)  # of 416
    (offer,) = planned(planner, monkeypatch, "4xt4", limits={"disk": 1 << 40, "device": 1 << 33})
    assert (offer.engines, offer.seconds, offer.reason) == (1, 3600, "")
    assert [(work.num_requests, options.limits["disk"] >> 38) for _, work, options in planner.asked] == [
        (25, 1),
        (100, 4),
    ]
    assert {options.limits["device"] for *_, options in planner.asked} == {1 << 33}
    for hardware, *_ in planner.asked:
        gpu = hardware.processor("gpu")
        assert gpu is not None and gpu.count == 1


def test_a_machine_that_cannot_run_it_says_why_once(monkeypatch: pytest.MonkeyPatch) -> None:
    offers = planned(Planner({"t4": 36.0}, gigabytes=600), monkeypatch, "t4", "cpu-amx", nodes=(1, 2, 4))
    assert [(offer.label, offer.reason, offer.plan) for offer in offers if offer.machine == "t4"] == [
        ("t4", "too small", None)
    ]


def test_options_that_do_not_suit_a_machine_are_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers_module, "make_plan", Planner({"t4": 36.0}))

    def prepare(machine: HardwareProfile) -> PlanOptions:
        if machine.name != "t4":
            raise ConfigError("there is no GPU")
        return PlanOptions()

    machines = [load_hardware_profile(name) for name in ("cpu-avx2", "t4")]
    model = load_model_profile("mixtral-8x7b")
    offers = make_offers(machines, model, WORK, prepare, name="mixtral", nodes=(1,), prices=PRICES)
    assert [(offer.label, offer.reason) for offer in offers] == [("t4", ""), ("cpu-avx2", "there is no GPU")]
    rows = offers_as_dict(offers, WORK, PRICES)["offers"]
    assert rows[1] == {
        "machine": "cpu-avx2",
        "nodes": 1,
        "weight_dtype": "auto",
        "runs": False,
        "reason": "there is no GPU",
        "on_front": False,
    }
    assert rows[0]["runs"] and rows[0]["price"] == 1.0 and rows[0]["policy"]["model"] == "mixtral"


def test_parts_of_a_machine_share_host_and_disk() -> None:
    machine = load_hardware_profile("4xt4")
    part = part_of(machine, 4)
    gpu, cpu = part.processor("gpu"), part.processor("cpu")
    assert gpu is not None and cpu is not None and gpu.count == 1
    for name in ("host", "disk"):
        one, all_of_it = part.tier(name), machine.tier(name)
        assert one is not None and all_of_it is not None
        assert one.capacity_bytes == all_of_it.capacity_bytes // 4
        assert one.bandwidth_bytes_per_s == all_of_it.bandwidth_bytes_per_s / 4
    assert (part.tier("device"), part.links) == (machine.tier("device"), machine.links)
    before = machine.processor("cpu")
    assert before is not None and cpu.peak_flops == before.peak_flops / 4
