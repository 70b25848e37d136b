"""Machines that could be rented for a job, beside each other: the plan for every machine, number of them and form of
the experts, its time and price, and the offers that no other one beats in both.

Does not depend on where machines or prices come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from moelight.core.errors import UserError
from moelight.optimizer.allowed import AUTO
from moelight.optimizer.optimize import compute_dtype, make_plan
from moelight.optimizer.options import PlanOptions
from moelight.optimizer.plan import Plan, policy_as_dict
from moelight.optimizer.runnable import why_not
from moelight.profiles.hardware import HardwareProfile, part_of, with_gpus
from moelight.profiles.model import ModelProfile
from moelight.profiles.prices import Prices
from moelight.profiles.workload import Workload

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One answer to which machine to rent.

    Attributes:
        machine: the machine's name; ``nodes``: how many of them.
        weight_dtype: the form of the experts; ``auto`` is the checkpoint's.
        engines: on each machine: one for each GPU, with an equal part of the host, or one in all.
        plan: of one engine, for its equal share of the requests; None if the model cannot run there.
        tokens: generated tokens of the job.
        hourly: price of an hour of one machine; None if unknown.
        setup_s: seconds that each machine is paid for before the job begins.
        reason: why the model cannot run there; empty if it can.
        on_front: no other offer is at once as fast and as cheap, and better in one of the two.
    """

    machine: str
    nodes: int
    weight_dtype: str
    engines: int = 1
    plan: Plan | None = None
    tokens: int = 0
    hourly: float | None = None
    setup_s: float = 0.0
    reason: str = ""
    on_front: bool = False

    @property
    def label(self) -> str:
        """``t4``, ``4 × t4`` or ``4 × t4 int4``."""
        words = [] if self.nodes == 1 else [f"{self.nodes} ×"]
        return " ".join((*words, self.machine, *([] if self.weight_dtype == AUTO else [self.weight_dtype])))

    @property
    def seconds(self) -> float:
        """Seconds until the last answer, ``setup_s`` included; infinite if the model cannot run."""
        return math.inf if self.plan is None else self.setup_s + self.plan.predicted_s

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of the job itself, of all machines; 0 if the model cannot run."""
        return 0.0 if self.plan is None else self.tokens / self.plan.predicted_s

    @property
    def price(self) -> float | None:
        """Of the job: all machines until the last answer; None if unknown."""
        return None if self.plan is None or self.hourly is None else self.nodes * self.hourly * self.seconds / HOUR_S

    @property
    def price_per_million(self) -> float | None:
        """Of a million generated tokens."""
        return None if self.price is None else self.price / self.tokens * 1e6


Prepare = Callable[[HardwareProfile], PlanOptions]


def make_offers(
    machines: Iterable[HardwareProfile],
    model: ModelProfile,
    workload: Workload,
    prepare: Prepare,
    *,
    name: str,
    nodes: Sequence[int],
    prices: Prices,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[Offer, ...]:
    """Return the offers of all ``machines`` in all numbers ``nodes``, cheapest first, then those without a price by
    time, then those that cannot run.

    ``prepare`` returns the options for a machine, or raises ConfigError if they do not suit it, which is the reason of
    its offer; every dtype in ``weight_dtypes`` is an offer of its own. ``tell`` gets the name of each offer before it
    is planned.
    """

    def offers() -> Iterator[Offer]:
        for machine in machines:
            try:
                options = replace(prepare(machine), proof=False)
            except UserError as error:
                yield Offer(machine=machine.name, nodes=nodes[0], weight_dtype=AUTO, reason=str(error))
                continue
            for dtype in options.weight_dtypes:
                for count in nodes:
                    tell(machine.name if count == 1 else f"{count} × {machine.name}")
                    one = replace(options, weight_dtypes=(dtype,))
                    offer = _offer(machine, model, workload, one, name=name, nodes=count)
                    yield replace(offer, hourly=prices.of(machine.name), setup_s=prices.setup_s)

    return _with_front(_without_repeated_reasons(offers()))


def _offer(
    machine: HardwareProfile, model: ModelProfile, workload: Workload, options: PlanOptions, *, name: str, nodes: int
) -> Offer:
    """The offer with an engine for each GPU, or with a single engine, which has the memory of the host for itself: what
    is faster."""
    gpu = machine.processor("gpu")
    gpus = 1 if gpu is None or "gpus" in options.fix else gpu.count
    dtype = options.weight_dtypes[0]
    offer = Offer(
        machine=machine.name, nodes=nodes, weight_dtype=dtype, tokens=workload.num_requests * workload.gen_len
    )
    able, reason = list[Offer](), ""
    for engines in dict.fromkeys((gpus, 1)):
        hardware = part_of(machine, engines) if engines > 1 else with_gpus(machine, 1)
        share = math.ceil(workload.num_requests / (nodes * engines))
        limits = {tier: size if tier == "device" else size // engines for tier, size in options.limits.items()}
        part = replace(options, limits=limits)
        try:
            plan = make_plan(hardware, model, replace(workload, num_requests=share), part, name=name)
        except UserError as error:
            reason = str(error)
            continue
        faults = plan.why_not
        if dtype != AUTO:  # what remains once the checkpoint is converted
            converted = replace(plan.policy, weight_dtype=AUTO, activations=AUTO)
            faults = why_not(converted, model, compute_dtype(model, hardware))
        if faults:
            reason = "; ".join(faults)
        else:
            able.append(replace(offer, engines=engines, plan=plan))
    return min(able, key=lambda one: one.seconds, default=replace(offer, reason=reason))


def _without_repeated_reasons(offers: Iterable[Offer]) -> list[Offer]:
    """``offers``, of those with the same machine and reason the first alone."""
    result, seen = [], set[tuple[str, str]]()
    for offer in offers:
        if offer.plan is None:
            if (offer.machine, offer.reason) in seen:
                continue
            seen.add((offer.machine, offer.reason))
        result.append(offer)
    return result


def _with_front(offers: Iterable[Offer]) -> tuple[Offer, ...]:
    """``offers`` in order, those on the Pareto front of time and price marked."""
    ordered = sorted(offers, key=lambda offer: (math.inf if offer.price is None else offer.price, offer.seconds))
    result, fastest_s = [], math.inf
    for offer in ordered:
        on_front = offer.price is not None and offer.seconds < fastest_s
        if on_front:
            fastest_s = offer.seconds
        result.append(replace(offer, on_front=on_front))
    return tuple(result)


def offer_as_dict(offer: Offer) -> dict[str, Any]:
    """``offer`` as plain values, for ``--json``: seconds, tokens per second and prices, unrounded."""
    values: dict[str, Any] = {"machine": offer.machine, "nodes": offer.nodes, "weight_dtype": offer.weight_dtype}
    if offer.plan is None:
        return values | {"runs": False, "reason": offer.reason, "on_front": False}
    return values | {
        "runs": True,
        "engines": offer.engines,
        "tokens_per_s": offer.tokens_per_s,
        "job_s": offer.plan.predicted_s,
        "seconds": offer.seconds,
        "hourly": offer.hourly,
        "price": offer.price,
        "price_per_million_tokens": offer.price_per_million,
        "binding": offer.plan.estimate.binding,
        "on_front": offer.on_front,
        "policy": policy_as_dict(offer.plan.policy),
    }


def offers_as_dict(offers: Sequence[Offer], workload: Workload, prices: Prices) -> dict[str, Any]:
    """The comparison as plain values."""
    stated = {**asdict(prices), "hourly": dict(prices.hourly)}
    work = {name: value for name, value in asdict(workload).items() if value is not None}
    return {"workload": work, "prices": stated, "offers": [offer_as_dict(offer) for offer in offers]}
