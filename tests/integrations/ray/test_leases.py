"""Who holds which rows: shares, tails, thefts, lateness, and rows that end their engines. On a clock of the test's."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from moelight.integrations.ray.leases import MOST_DEATHS, LeaseBook, LeasedRow, LeaseSizes

SIZES = LeaseSizes(ahead_s=4.0, least_s=0.5, slack=4.0, late_s=60.0)


def book(count: int, *, row_tokens: float = 10.0, sizes: LeaseSizes = SIZES) -> LeaseBook:
    rows = (LeasedRow(number=n, line=n + 1, payload=b"", tokens=row_tokens) for n in range(count))
    return LeaseBook(rows, count=count, row_tokens=row_tokens, sizes=sizes)


def test_an_engine_holds_a_pass_and_some_seconds_ahead() -> None:
    rows = book(100_000)
    rows.join("a", batch_rows=64, tokens_per_s=200.0)
    inputs = rows.lease("a", 0.0)
    assert len(inputs) == 64 + 4.0 * 200 / 10
    rows.measure("a", tokens_per_s=200.0, queued=80)
    assert not rows.lease("a", 1.0)  # it has what it should
    for row in inputs[:10]:
        rows.returned("a", row.number)
    assert len(rows.lease("a", 2.0)) == 10
    rows.join("b", batch_rows=64, tokens_per_s=1.0)
    assert len(rows.lease("b", 2.0)) == 2 * 64


def test_small_jobs_are_shared_by_speed_and_do_not_fill_one_pass() -> None:
    rows = book(400)
    rows.join("fast", batch_rows=4096, tokens_per_s=300.0)
    rows.join("slow", batch_rows=4096, tokens_per_s=100.0)
    assert len(rows.lease("fast", 0.0)) == 300
    assert len(rows.lease("slow", 0.0)) == 100


def test_measured_speeds_replace_planned_ones_and_correct_the_others() -> None:
    rows = book(10_000)
    rows.join("a", batch_rows=8, tokens_per_s=1000.0)
    rows.join("b", batch_rows=8, tokens_per_s=1000.0)
    rows.measure("a", tokens_per_s=100.0, queued=0)
    assert rows.share("a") == rows.share("b") == 0.5  # b's plan was made by the same planner
    rows.measure("b", tokens_per_s=300.0, queued=0)
    assert rows.share("b") == 0.75


def test_leases_shrink_towards_the_end() -> None:
    rows = book(1000)
    for name in ("a", "b"):
        rows.join(name, batch_rows=4, tokens_per_s=1000.0)
    sizes = []
    while inputs := rows.lease("a", 0.0):
        sizes.append(len(inputs))
        for row in inputs:
            rows.returned("a", row.number)
        rows.measure("a", tokens_per_s=0.0, queued=0)
    assert sizes[0] > 300
    assert sizes[-1] == 1
    assert sizes == sorted(sizes, reverse=True)


def test_an_idle_engine_gets_half_of_what_another_has_not_begun() -> None:
    rows = book(1000, sizes=LeaseSizes(ahead_s=1000.0))
    rows.join("a", batch_rows=8, tokens_per_s=100.0)
    assert len(rows.lease("a", 0.0)) == 1000
    rows.join("b", batch_rows=8, tokens_per_s=100.0)
    assert rows.lease("b", 0.0) == []
    victim = rows.victim("b")
    assert victim is not None
    assert victim[0] == "a"
    assert victim[1] == pytest.approx(5000.0)
    rows.give_back("a", list(range(500, 1000)))
    assert len(rows.lease("b", 0.0)) == 500
    assert rows.victim("b") is None


def test_a_late_lease_is_given_to_another_engine_and_the_first_result_counts() -> None:
    rows = book(3)
    rows.join("a", batch_rows=8, tokens_per_s=10.0)
    rows.join("b", batch_rows=8, tokens_per_s=1000.0)
    held = rows.lease("a", 0.0)
    assert [row.number for row in rows.lease("b", 0.0)] == [1, 2]
    for number in (1, 2):
        assert rows.returned("b", number) is not None
    assert rows.late(60.0) == 0
    assert rows.late(1000.0) == len(held) == 1
    assert rows.late(2000.0) == 0  # once
    for name in ("a", "b"):
        rows.measure(name, tokens_per_s=0.0, queued=0)
    assert not rows.lease("a", 1000.0)
    assert [row.number for row in rows.lease("b", 1000.0)] == [0]
    assert rows.returned("b", 0) is not None
    assert rows.returned("a", 0) is None
    assert rows.finished


def test_a_silent_engine_is_late_at_once() -> None:
    rows = book(10)
    rows.join("a", batch_rows=10, tokens_per_s=10.0)
    rows.lease("a", 0.0)
    assert rows.late(1.0) == 0
    assert rows.late(1.0, silent=frozenset({"a"})) == 10


def test_rows_of_an_engine_that_leaves_are_leased_to_others_without_a_strike() -> None:
    rows = book(10)
    rows.join("a", batch_rows=10, tokens_per_s=10.0)
    assert len(rows.lease("a", 0.0)) == 10
    assert rows.leave("a", died=False) == []
    rows.join("b", batch_rows=10, tokens_per_s=10.0)
    inputs = rows.lease("b", 0.0)
    assert sorted(row.number for row in inputs) == list(range(10))
    assert not any(row.deaths for row in inputs)


@pytest.mark.parametrize("engines", [1, 2, 5])
@pytest.mark.parametrize("poison", [{0}, {17}, {3, 40, 41}])
def test_a_row_that_ends_its_engine_is_alone_at_its_third_death(engines: int, poison: set[int]) -> None:
    """And no other row is condemned; passes beside it hold other rows."""
    rows = book(500, sizes=LeaseSizes(ahead_s=0.2))
    draw, deaths, born = random.Random(1), Counter[int](), 0
    condemned: list[int] = []
    done: set[int] = set()
    live: dict[str, list[int]] = {}
    while not rows.finished:
        while len(live) < engines:
            name, born = f"e{born}", born + 1
            rows.join(name, batch_rows=64, tokens_per_s=100.0)
            live[name] = []
        for name in list(live):
            live[name] += [row.number for row in rows.lease(name, 0.0)]
            held = live[name]
            result = poison & set(held[:64])
            if result:
                for number in result:
                    deaths[number] += 1
                condemned += [row.number for row in rows.leave(name, died=True)]
                del live[name]
                continue
            for number in draw.sample(held[:64], min(len(held[:64]), 20)):
                held.remove(number)
                assert rows.returned(name, number) is not None
                assert number not in done
                done.add(number)
            rows.measure(name, tokens_per_s=100.0, queued=max(0, len(held) - 64))
    assert set(condemned) == poison
    assert done == set(range(500)) - poison
    assert max(deaths.values()) <= MOST_DEATHS


def test_every_row_is_done_once_whatever_engines_do() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        rows, done, born, clock = book(300, sizes=LeaseSizes(late_s=1.0, slack=1.0)), set[int](), 0, 0.0
        live: dict[str, list[int]] = {}
        while not rows.finished:
            clock += draw.random()
            if len(live) < 4 and (not live or draw.random() < 0.3):
                name, born = f"e{born}", born + 1
                rows.join(name, batch_rows=draw.choice([1, 8, 64]), tokens_per_s=draw.choice([10.0, 1000.0]))
                live[name] = []
            name = draw.choice(list(live))
            held = live[name]
            held += [row.number for row in rows.lease(name, clock)]
            choice = draw.random()
            if choice < 0.05 and born < 40:
                assert rows.leave(name, died=False) == []
                del live[name]
            elif choice < 0.15:
                back, live[name] = held[-5:], held[:-5]
                rows.give_back(name, back)
            elif choice < 0.2:
                rows.late(clock, silent=frozenset({name}))
            else:
                count = draw.randrange(40)
                for number in held[:count]:
                    if rows.returned(name, number) is not None:
                        assert number not in done
                        done.add(number)
                del held[:count]
                rows.measure(name, tokens_per_s=draw.random() * 100, queued=len(held))
        assert done == set(range(300))
        assert rows.unfinished == 0
