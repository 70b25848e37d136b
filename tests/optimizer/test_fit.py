"""The plan: what fits, what is refused and with which figure, and that memory is never wasted."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.dtypes import FLOAT32
from moelight.core.errors import BudgetError, ConfigError
from moelight.core.units import MiB, parse_bytes
from moelight.hrm.costs import page_slot_bytes
from moelight.hrm.estimate import Rates
from moelight.hrm.placement import place
from moelight.optimizer.plan import Budgets, Plan, Wishes, fit
from moelight.profiles.model import ModelProfile
from moelight.profiles.stored import pages
from moelight.profiles.workload import Workload
from tests.shapes import examples, models, small_model

WORK = Workload(num_requests=40, prompt_len=8, max_prompt_len=24, gen_len=8)
RATES = Rates(disk=1e6, link=1e7, near_memory=1e9, host_memory=1e8, flops=1e9)
PLENTY = 1 << 40


def plan(
    model: ModelProfile, *, host: int, device: int | None = None, wishes: Wishes | None = None, work: Workload = WORK
) -> Plan:
    budgets = Budgets(host=host, device=device)
    return fit("m", model, work, budgets, dtype=FLOAT32, rates=RATES, wishes=wishes or Wishes())


def least(model: ModelProfile, tier: str, **given: int) -> int:
    """The bytes that a refusal of almost nothing names."""
    with pytest.raises(BudgetError) as caught:
        plan(model, **{"host": PLENTY, **given, tier: 1})
    assert caught.value.tier == tier
    return caught.value.needed_bytes


@pytest.mark.parametrize("device", [None, PLENTY])
@examples(25)
@given(model=models())
def test_the_figure_in_a_refusal_is_enough_and_no_more_than_enough(device: int | None, model: ModelProfile) -> None:
    tier = "host" if device is None else "device"
    needed = least(model, tier, **({} if device is None else {"device": 1}))
    given_back = {"host": PLENTY, "device": device, tier: needed}
    fitted = plan(model, **given_back)  # type: ignore[arg-type]
    assert fitted.footprint.total(tier) <= needed
    for short in (needed - 1, needed - page_slot_bytes(model, FLOAT32)):
        with pytest.raises(BudgetError) as caught:
            plan(model, **{**given_back, tier: short})  # type: ignore[arg-type]
        assert (caught.value.tier, caught.value.needed_bytes) == (tier, needed)
        assert f"--{tier}-memory" in str(caught.value)


@examples(25)
@given(model=models())
def test_beside_a_link_host_memory_is_refused_with_its_own_figure(model: ModelProfile) -> None:
    device = least(model, "device")
    host = least(model, "host", device=device)
    assert plan(model, host=host, device=device).footprint.total("host") <= host
    with pytest.raises(BudgetError) as caught:
        plan(model, host=host - 1, device=device)
    assert caught.value.needed_bytes == host


def test_a_lack_of_both_is_mended_in_two_steps() -> None:
    model, given = small_model(), {"host": 1, "device": 1}
    for _ in range(2):
        with pytest.raises(BudgetError) as caught:
            plan(model, **given)
        given[caught.value.tier] = caught.value.needed_bytes
    assert plan(model, **given).policy.batch_size >= 1


def test_the_text_of_a_refusal_can_be_typed_back() -> None:
    model = small_model()
    with pytest.raises(BudgetError) as caught:
        plan(model, host=1 * MiB)
    match = re.search(r"at least (\S+) is needed", str(caught.value))
    assert match
    assert "1.0MiB is too small for small" in str(caught.value)
    typed = parse_bytes(match.group(1))
    assert caught.value.needed_bytes <= typed < caught.value.needed_bytes + MiB
    assert plan(model, host=typed)


@pytest.mark.parametrize("device", [None, PLENTY])
@examples(20)
@given(model=models())
def test_all_experts_stay_where_they_fit(device: int | None, model: ModelProfile) -> None:
    fitted = plan(model, host=PLENTY, device=device)
    assert not place(model, fitted.policy).streamed
    assert "all experts stay" in fitted.why
    assert fitted.footprint.bytes_of("ring") == 0


@pytest.mark.parametrize("tier", ["near", "host beside a link"])
@examples(20)
@given(model=models(), share=st.floats(0, 1), more=st.integers(0, 20))
def test_more_memory_is_never_slower_and_never_exceeded(
    tier: str, model: ModelProfile, share: float, more: int
) -> None:
    """From the least that will do to more than everything, in steps of about a page."""
    slot, total = page_slot_bytes(model, FLOAT32), len(pages(model))
    if tier == "near":
        low = least(model, "host")
        wishes = {"host": low + int(share * total * slot)}
        grown = {"host": wishes["host"] + more * slot // 3}
    else:
        device = least(model, "device")
        low = least(model, "host", device=device)
        wishes = {"device": device, "host": low + int(share * total * slot)}
        grown = {"device": device + more * slot // 3, "host": wishes["host"] + more * slot // 3}
    before, after = plan(model, **wishes), plan(model, **grown)
    assert after.estimate.tokens_per_s >= before.estimate.tokens_per_s
    for fitted, budget in ((before, wishes), (after, grown)):
        assert all(fitted.footprint.total(name) <= size for name, size in budget.items())


@pytest.mark.parametrize("discrete", [False, True])
@examples(25)
@given(layers=st.integers(3, 5), experts=st.integers(3, 6), share=st.floats(0, 0.6), host_pages=st.integers(0, 9))
def test_memory_that_could_hold_a_page_more_is_not_left_empty(
    discrete: bool, layers: int, experts: int, share: float, host_pages: int
) -> None:
    """Another resident page, and the ring it then needs, would not have fitted; nor, where pages come from disk,
    another page in host memory."""
    model = small_model((True,) * layers, experts=experts)
    slot, total = page_slot_bytes(model, FLOAT32), layers * experts
    tier = "device" if discrete else "host"
    budgets = {tier: least(model, tier, **({"device": 1} if discrete else {})) + int(share * total * slot)}
    if discrete:
        budgets["host"] = least(model, "host", **budgets) + host_pages * slot
    fitted = plan(model, **budgets, wishes=Wishes(batch_size=1))
    placement, taken = place(model, fitted.policy), fitted.footprint
    resident = len(placement.resident) + 1
    if resident <= total:
        ring = 2 * -(-(total - resident) // layers)
        fixed = taken.total(tier) - taken.bytes_of("ring") - taken.bytes_of("experts")
        assert fixed + (resident + ring) * slot > budgets[tier]
    if discrete and placement.on("disk"):
        assert taken.total("host") + slot > budgets["host"]


def test_beside_a_link_every_tier_is_used_in_turn() -> None:
    model = small_model((True, True, True), experts=6)
    slot = page_slot_bytes(model, FLOAT32)
    device = least(model, "device") + 2 * slot
    host = least(model, "host", device=device)
    homes = [
        [
            len(place(model, plan(model, host=size, device=device, wishes=Wishes(batch_size=1)).policy).on(tier))
            for tier in ("device", "host", "disk")
        ]
        for size in (host, host + 3 * slot, PLENTY)
    ]
    assert all(sum(counts) == 18 and counts[0] for counts in homes)
    assert homes[0][1] == 0
    assert 0 < homes[1][1] < homes[1][2]
    assert homes[2][2] == 0


@pytest.mark.parametrize("device", [None, PLENTY])
@pytest.mark.parametrize(("n", "mu"), [(1, 1), (5, None), (None, 3), (7, 2), (3, 50), (300, 2000)])
def test_what_the_user_fixed_is_kept(device: int | None, n: int | None, mu: int | None) -> None:
    policy = plan(small_model(), host=PLENTY, device=device, wishes=Wishes(batch_size=n, micro_batch_size=mu)).policy
    assert n is None or policy.batch_size == n
    assert mu is None or policy.micro_batch_size == mu
    assert policy.micro_batch_tokens >= policy.micro_batch_size


@pytest.mark.parametrize("wishes", [Wishes(batch_size=0), Wishes(micro_batch_size=0), Wishes(batch_size=-1)])
def test_an_impossible_wish_is_refused_rather_than_replaced(wishes: Wishes) -> None:
    with pytest.raises(ConfigError, match=r"batch_size must be at least 1"):
        plan(small_model(), host=PLENTY, wishes=wishes)


def test_no_more_sequences_than_requests_and_room_for_the_longest() -> None:
    fitted = plan(small_model(), host=PLENTY, work=Workload(num_requests=3, prompt_len=4, max_prompt_len=40, gen_len=4))
    assert fitted.policy.batch_size == 3
    assert fitted.policy.kv_tokens >= 44


def test_the_cache_is_planned_within_the_models_context() -> None:
    """Answers end at the context, so room beyond it would only be paid for."""
    model = small_model()
    work = Workload(num_requests=4, prompt_len=1000, max_prompt_len=5000, gen_len=1000)
    policy = plan(model, host=PLENTY, work=work, wishes=Wishes(batch_size=4)).policy
    assert 4 * model.max_positions <= policy.kv_tokens <= 4 * (model.max_positions + 32)


def test_the_reason_names_what_binds() -> None:
    fitted = plan(small_model(), host=PLENTY)
    assert fitted.why.startswith("small: N = 40 in micro-batches of 40; all experts stay in host memory")
    assert fitted.why.endswith(f"{fitted.estimate.binding} binds")
