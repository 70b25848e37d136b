"""Homes in closed form: what is said to fit does, no memory that could hold a page more is left empty."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.planner_sections.random_questions import question
from moelight.core.dtypes import FLOAT32
from moelight.core.policy import Policy, Shares
from moelight.hrm import costs
from moelight.hrm.footprint import footprint
from moelight.hrm.pass_cost import PlacementCounts
from moelight.optimizer.candidates import first_sample
from moelight.optimizer.placement import fill, free_memory
from moelight.optimizer.problem import Candidates, Problem, variants
from tests.optimizer.drawn import drawn_problem
from tests.optimizer.exhaustive import every, fits
from tests.shapes import examples, with_pages


def policy_at(problem: Problem, candidates: Candidates, placed: PlacementCounts, index: int) -> Policy:
    """One candidate with its homes, as a policy."""
    pages = problem.pages
    disk, resident = placed.from_disk[index] / pages, (pages - placed.offloaded[index]) / pages
    device = 0.0 if candidates.ffn_device == "cpu" else resident
    cache = placed.device_kv[index]
    return Policy(
        model="m",
        batch_size=int(candidates.batch_size[index]),
        micro_batch_size=int(candidates.micro_batch_size[index]),
        micro_batch_tokens=int(candidates.micro_batch_tokens[index]),
        prompt_micro_batches=int(candidates.prompt_micro_batches[index]),
        kv_tokens=int(candidates.kv_tokens[index]),
        attention_device=candidates.attention_device,
        ffn_device=candidates.ffn_device,
        weights=Shares(device=device, host=max(0.0, 1.0 - device - disk), disk=disk),
        cpu_experts=placed.computed[index] / pages,
        kv=Shares(device=cache, host=1.0 - cache),
        schedule=candidates.schedule,
        kv_block_size=candidates.kv_block_size,
        host_pages="pinned" if candidates.cost_model.pinned_pages else "staged",
        ring_pages=int(candidates.ring_pages[index]),
    )


@examples(150)
@given(seed=st.integers(0, 1 << 30))
def test_what_is_said_to_fit_does(seed: int) -> None:
    """Against the footprint itself, for candidates of every variant, whatever is requested, homes pinned or not, and
    whether or not layers have pages of different sizes."""
    draw, problem = random.Random(seed), drawn_problem(seed, most_requests=12)
    if draw.random() < 0.5:
        sizes = [costs.page_bytes(problem.model, FLOAT32) * draw.randint(1, 3) for _ in problem.model.moe_layers]
        problem = replace(problem, model=with_pages(problem.model, sizes))
    problem = problem if draw.random() < 0.5 else replace(problem, fixed={})
    every = list(variants(problem))
    for variant in draw.sample(every, min(5, len(every))):
        look = first_sample(problem, variant)
        index = np.array([draw.randrange(len(look.computed)) for _ in range(6)])
        some = look.at(index)
        spilled = np.array([draw.choice([0.0, draw.randint(0, problem.pages)]) for _ in index])
        maximum = np.array([draw.choice([np.inf, draw.randint(0, problem.pages)]) for _ in index])
        some = replace(some, resident=maximum, spilled=spilled)
        placed, feasible = fill(problem, some)
        for fitting in np.flatnonzero(feasible):
            policy = policy_at(problem, some, placed, int(fitting))
            taken = footprint(problem.model, policy, dtype=FLOAT32)
            for tier in ("device", "host"):
                assert taken.total(tier) <= problem.capacity_bytes.get(tier, 0)


@examples(60)
@given(seed=st.integers(0, 1 << 30))
def test_what_fits_is_found_and_no_page_more_would_stay(seed: int) -> None:
    """With the pages for the CPU and the blocks on the device given, against every way to place the others."""
    draw, problem = random.Random(seed), drawn_problem(seed, most_requests=2)
    variant = draw.choice(list(variants(problem)))
    some = every(problem, variant.attention_device, variant.ffn_device, variant.schedule)
    assume(len(some.batch_size) <= 40_000)
    fitting = fits(problem, some)
    one = draw.choice(np.flatnonzero(fitting).tolist() or [0])
    same = fitting & (some.computed == some.computed[one]) & (some.blocks == some.blocks[one])
    for name in ("batch_size", "micro_batch_size", "micro_batch_tokens"):
        same &= getattr(some, name) == getattr(some, name)[one]
    candidate = replace(
        variant,
        batch_size=some.batch_size[[one]],
        micro_batch_size=some.micro_batch_size[[one]],
        micro_batch_tokens=some.micro_batch_tokens[[one]],
        prompt_micro_batches=np.array([some.prompt_micro_batches]),
        kv_tokens=some.kv_tokens[[one]],
        kv_block_size=32,
        look_ahead=some.look_ahead,
        computed=some.computed[[one]],
        device_kv=some.blocks[[one]] / -(-some.kv_tokens[[one]] // 32),
    )
    placed, feasible = fill(problem, candidate)
    assert bool(feasible[0]) == bool(same.any())
    if same.any():
        resident = problem.pages - placed.offloaded[0]
        assert resident == some.resident[same].max()
        assert placed.from_disk[0] == some.from_disk[same & (some.resident == resident)].min()


@examples(60)
@given(seed=st.integers(0, 1 << 30))
def test_memory_that_could_hold_a_page_more_is_not_left_empty(seed: int) -> None:
    """Another resident page, and the ring it then needs, would not have fitted."""
    problem = drawn_problem(seed, most_requests=12)
    for variant in variants(problem):
        look = first_sample(problem, variant)
        (placed, feasible), free = fill(problem, look), free_memory(problem, look)
        open_here = feasible & np.isnan(look.device_kv)
        near_device = variant.ffn_device != "cpu"
        cache = np.round(placed.device_kv * free.kv_blocks) if near_device else free.kv_blocks
        cache = cache if near_device else free.kv_blocks - np.round(placed.device_kv * free.kv_blocks)
        left = free.device if near_device else free.host
        more = problem.pages - placed.offloaded + 1
        streamed = free.pages - placed.computed - more
        slots = more + 2 * np.ceil(streamed / free.layers)
        bare = 0 if near_device else cache  # cache gives way to pages on the device, never in host memory
        fits_more = (streamed >= 0) & (slots * free.slot_bytes + bare * free.kv_block_bytes <= left)
        must = np.maximum(free.kv_blocks - np.floor(free.host / free.kv_block_bytes), 0) if near_device else 0
        assert not np.any(open_here & fits_more & (must == 0) & (placed.computed == 0))


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_without_a_gpu_there_is_no_cache_beside_it(share: float) -> None:
    problem = drawn_problem(3, gpu=False)
    (variant, *_) = variants(problem)
    look = first_sample(problem, variant)
    placed, _ = fill(problem, replace(look, device_kv=np.full_like(look.device_kv, share)))
    assert np.all(placed.device_kv == 0)


@examples(60)
@given(seed=st.integers(0, 1 << 30))
def test_the_cpu_computes_no_page_more_than_it_must(seed: int) -> None:
    """Where it is asked for none: with one fewer, no number of pages that stay leaves a ring for the others."""
    problem = replace(drawn_problem(seed, gpu=True), fixed={"attention_device": "cpu"})
    for variant in variants(problem):
        if variant.ffn_device != "split":
            continue
        look = first_sample(problem, variant)
        some = look.at(np.arange(8))
        free, none = free_memory(problem, some), np.zeros(8)
        some = replace(some, computed=none, device_kv=none, resident=none + np.inf, spilled=none)
        placed, _ = fill(problem, some)
        slots = np.floor(np.maximum(free.device, 0) / free.slot_bytes)
        for least, space in zip(placed.computed, slots, strict=True):
            others = free.pages - int(least) + 1
            rings = {stays: 2 * -(-(others - stays) // free.layers) for stays in range(others + 1)}
            assert least == 0 or all(stays + ring > space for stays, ring in rings.items())


@pytest.mark.parametrize("seed", [111, 118, 124])
def test_a_free_share_of_the_cache_fits_where_any_share_does(seed: int) -> None:
    """Pages take device memory first, unless the cache then leaves host memory no room for the pinned ring."""
    problem, _ = question(seed)
    for variant in variants(problem):
        if variant.attention_device == "cpu" or variant.ffn_device == "cpu" or variant.schedule != "cgopipe":
            continue
        look = first_sample(problem, variant)
        some = look.at(np.arange(400))
        _, free = fill(problem, replace(some, device_kv=np.full(400, np.nan)))
        for share in np.linspace(0.0, 1.0, 101):
            _, feasible = fill(problem, replace(some, device_kv=np.full(400, share)))
            assert not np.any(feasible & ~free)


def test_an_odd_slot_beside_the_ring_spares_the_cpu_a_page() -> None:
    """Of 27 slots, 26 are a ring for 13 pages of each of five layers; a page more stays in the last one."""
    problem, _ = question(203388)
    (variant, *_) = (variant for variant in variants(problem) if variant.ffn_device == "split")
    some = first_sample(problem, variant).at(np.zeros(60, dtype=np.int64))
    spared = np.arange(60.0) * free_memory(problem, some).slot_bytes
    free = replace(free_memory(problem, some), device=spared, host=np.full(60, 1e15))
    placed, feasible = fill(problem, some, free=free)
    assert feasible[27]
    assert problem.pages - placed.computed[27] == 5 * 13 + 1
    capped = replace(some, resident=np.zeros(60), device_kv=np.zeros(60))
    placed, feasible = fill(problem, capped, free=free)
    assert feasible[27]
    assert problem.pages - placed.computed[27] == 5 * 13
