"""Drafts by look-up: they follow the longest match, the latest one, in bounded memory; and only those that pay ride."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.dtypes import BFLOAT16
from moelight.core.policy import Policy, Shares
from moelight.core.request import Request, SamplingParams
from moelight.engine import drafts
from moelight.engine.batcher import MicroBatchPlan, RunningSequence, SequenceChunk
from moelight.engine.draft_prices import DraftPrices
from moelight.engine.drafts import JOB, LEAST_MATCH, LONGEST_MATCH, ORDER, PIECE, RESUMED, Draft, NgramDrafts
from moelight.engine.planning import hardware_for
from moelight.engine.speculation import Speculation
from moelight.hrm.machine_model import slowed, speeds_of
from moelight.hrm.workload_model import Passes
from moelight.optimizer.pass_prices import Passed, PassPrices, passes_that_ran
from moelight.profiles.model_files import load_model_profile
from tests.shapes import examples


def sequence(prompt: Sequence[int], generated: Sequence[int] = (), *, index: int = 0) -> RunningSequence:
    request = Request(index=index, token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=500))
    made = RunningSequence(request=request, seed=0, max_tokens=500, chosen=len(generated))
    made.generated.extend(generated)
    return made


def longest(tokens: Sequence[int]) -> int:
    """The length of the longest earlier occurrence of the last tokens, by comparison with every place."""
    best = 0
    for end in range(1, len(tokens)):
        match = 0
        while match < end and tokens[end - 1 - match] == tokens[-1 - match]:
            match += 1
        best = max(best, match)
    return min(best, LONGEST_MATCH)


@examples(300)
@given(tokens=st.lists(st.integers(0, 3), min_size=2, max_size=60), cut=st.integers(1, 59), count=st.integers(1, 9))
def test_a_draft_follows_the_longest_match(tokens: list[int], cut: int, count: int) -> None:
    """Whether the sequence grows token by token, or is seen once."""
    cut = min(cut, len(tokens) - 1)
    growing, source = sequence(tokens[:cut]), NgramDrafts()
    for at in range(cut, len(tokens)):
        growing.generated.append(tokens[at])
        draft = source.draft(growing, count)
        seen = tokens[: at + 1]
        if draft.match == 1:  # a repetition that goes on after other tokens
            assert longest(seen) < RESUMED
        else:
            assert draft.match == (longest(seen) if longest(seen) >= LEAST_MATCH else 0)
        if draft.match > 1:
            assert 1 <= len(draft.token_ids) <= count
            text, follows = [*seen[-draft.match :], *draft.token_ids], range(len(seen))
            assert any(seen[begin : begin + len(text)] == text for begin in follows)


def test_of_equal_matches_the_latest_counts() -> None:
    assert NgramDrafts().draft(sequence([1, 2, 3, 1, 2, 4, 5, 1], [2]), 2) == Draft((4, 5), 2)


@pytest.mark.parametrize(
    ("others", "follows"),
    [
        ([99], [11, 12]),  # in place of 10
        ([99, 98], [12, 13]),
        ([99, 12], [13, 14]),  # in place of 10 and 11
        ([99, 10], [11, 12]),  # inserted
        ([13], [14, 15]),  # 10 to 12 are left out
        (list(range(90, 100)), []),
    ],
)
@pytest.mark.parametrize("count", [2, 12])
def test_an_interrupted_repetition_goes_on(others: list[int], follows: list[int], count: int) -> None:
    """Whether drafts are accepted two at a time, or all at once."""
    source, prompt = NgramDrafts(), list(range(40))
    growing = sequence(prompt)
    for begin, end in ((0, 2), *((at, min(at + count, 10)) for at in range(2, 10, count))):
        growing.generated += range(begin, end)
        source.draft(growing, count)
    for other in others:
        growing.generated.append(other)
        draft = source.draft(growing, 2)
    assert list(draft.token_ids) == follows
    if follows:
        growing.generated += [*follows, follows[-1] + 1]
        assert source.draft(growing, 2).token_ids[0] == follows[-1] + 2


def test_answers_of_a_job_are_found_by_others() -> None:
    source, answer = NgramDrafts(), list(range(100, 130))
    first = sequence([1, 2], answer)
    source.draft(first, 4)
    other = sequence([7, 8], answer[:ORDER])
    assert source.draft(other, 4) == Draft((), 0), "a short answer is stored when it ends"
    source.end(first)
    assert source.draft(other, 4) == Draft((103, 104, 105, 106), ORDER, JOB)
    assert source.draft(sequence([7], answer[-4:]), 4) == Draft((), 0), "nothing followed"
    assert source.draft(sequence([100, 101, 102, 55, 101], [102]), 2) == Draft((55, 101), 2)


def test_growing_answers_are_found_too() -> None:
    source, answer = NgramDrafts(), [3 * token for token in range(PIECE + 5)]
    source.draft(sequence([1], answer), 1)
    assert source.draft(sequence([2], answer[9:15]), 3).token_ids == tuple(answer[15:18])


@pytest.mark.parametrize("answers", [1, 40])
def test_stored_tokens_are_bounded_and_the_oldest_are_forgotten(answers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "STORED_TOKENS", 256)
    monkeypatch.setattr(drafts, "ENTRIES", 1 << 12)
    source = NgramDrafts()
    for number in range(answers):
        done = sequence([1], [1000 * number + token for token in range(50)])
        source.draft(done, 1)
        source.end(done)
    last = 1000 * (answers - 1)
    assert source.draft(sequence([2], [last + 5, last + 6, last + 7]), 2).token_ids == (last + 8, last + 9)
    oldest = source.draft(sequence([2], [5, 6, 7]), 2).token_ids
    assert oldest == ((8, 9) if answers == 1 else ())


class FixedDrafts:
    """The same draft for every sequence; ``match`` by index of the request."""

    def __init__(self, match: int = 8, length: int = 4) -> None:
        self.match, self.length, self.asked = match, length, 0

    def draft(self, owner: RunningSequence, count: int) -> Draft:
        self.asked += 1
        return Draft(tuple(range(min(count, self.length))), self.match)

    def end(self, owner: RunningSequence) -> None: ...

    def clear(self) -> None: ...


class StatedPrices:
    """Passes take ``base_s`` seconds, and ``draft_s`` more for every draft beyond ``free``."""

    affordable = True

    def __init__(self, *, base_s: float = 1.0, draft_s: float = 0.0, free: int = 0) -> None:
        self._base_s, self._draft_s, self._free = base_s, draft_s, free

    def seconds(self, policy: Policy, sequences: int, context: float, prompt_tokens: int, rows: Any) -> Any:
        return self._base_s + self._draft_s * np.maximum(rows - self._free, 0)

    def observe(self, run: Passed, *, drafts: bool, policy: Policy) -> None: ...

    def forget(self) -> None: ...


POLICY = Policy(model="m")


def everything(owner: RunningSequence, tokens: Sequence[int], count: int) -> Sequence[int]:
    return tokens


def proposed(
    speculation: Speculation, sequences: int = 10, *, room: int = 20_000, limit: int = 8, policy: Policy = POLICY
) -> list[int]:
    """The lengths of the drafts, once the first passes were measured."""
    for _ in range(2):
        speculation.after([], [], 1.0, {}, POLICY)
    some = [(sequence([1], [2], index=index), limit) for index in range(sequences)]
    return [len(draft) for draft in speculation.propose(policy, everything, some, room, 0).values()]


def test_drafts_that_cost_nothing_are_all_verified() -> None:
    assert proposed(Speculation(FixedDrafts(), 4, StatedPrices())) == [4] * 10  # type: ignore[arg-type]


def test_drafts_that_cost_as_much_as_tokens_are_not_verified() -> None:
    speculation = Speculation(FixedDrafts(), 4, StatedPrices(base_s=1.0, draft_s=0.1))  # type: ignore[arg-type]
    assert proposed(speculation) == []


def test_what_is_most_likely_goes_first() -> None:
    """Ten rows are free: those are the first tokens of all drafts."""
    speculation = Speculation(FixedDrafts(), 4, StatedPrices(draft_s=1.0, free=10))  # type: ignore[arg-type]
    assert proposed(speculation) == [1] * 10
    assert sorted(proposed(Speculation(FixedDrafts(), 4), room=15)) == [1] * 5 + [2] * 5


def test_limits_hold() -> None:
    assert proposed(Speculation(FixedDrafts(), 4), limit=2) == [2] * 10
    assert proposed(Speculation(FixedDrafts(), 3)) == [3] * 10
    assert proposed(Speculation(FixedDrafts(), 3), limit=0) == []
    assert sum(proposed(Speculation(FixedDrafts(), 3), room=7)) == 7


def play(speculation: Speculation, *, accepted: int) -> int:
    """One pass of ten sequences, of whose drafts so many tokens are accepted; returns the tokens verified."""
    some = [(sequence([1], [2], index=index), 8) for index in range(10)]
    drafted = speculation.propose(POLICY, everything, some, 1000, 0) if speculation.active else {}
    chunks, tokens = [], list[int]()
    for owner, _ in some:
        draft = tuple(drafted.get(owner, ()))
        chunks.append(SequenceChunk(sequence=owner, start=1, count=1 + len(draft), newest=(2, *draft)))
        tokens += [token if at < accepted else -5 for at, token in enumerate((*draft, 99))]
    plan = MicroBatchPlan(chunks=tuple(chunks), prefill_only=False)
    speculation.after([plan], [tokens], 1.0, {}, POLICY)
    return sum(len(draft) for draft in drafted.values())


def test_rejected_drafts_are_given_up_where_they_cost_and_tried_again_in_pauses() -> None:
    source = FixedDrafts(match=4)
    speculation = Speculation(source, 4, StatedPrices(base_s=1.0, draft_s=0.06))  # type: ignore[arg-type]
    verified = [play(speculation, accepted=0) for _ in range(300)]
    assert verified[:3] == [0, 0, 10], "the first passes are measured without drafts"
    assert sum(verified[100:]) == 0
    assert source.asked < 10 * 60
    assert speculation.accepted == 0


def test_rejected_drafts_are_given_up_where_they_seem_free() -> None:
    """The seconds of single passes vary by more than a few expected tokens are worth."""
    speculation = Speculation(FixedDrafts(match=4), 4, StatedPrices())  # type: ignore[arg-type]
    verified = [play(speculation, accepted=0) for _ in range(300)]
    assert verified[2] == 40 and sum(verified[100:]) == 0


def test_accepted_drafts_grow() -> None:
    speculation = Speculation(FixedDrafts(match=4), 4, StatedPrices(base_s=1.0, draft_s=0.06))  # type: ignore[arg-type]
    verified = [play(speculation, accepted=4) for _ in range(40)]
    assert (verified[2], verified[-1]) == (10, 40)
    assert speculation.counts["drafted_tokens"] == speculation.counts["accepted_tokens"] == sum(verified)


MIXTRAL = load_model_profile("mixtral")
CPU = speeds_of(hardware_for("cpu-amx", discrete=False))
ON_DISK = Policy(
    model="m", batch_size=64, micro_batch_size=64, micro_batch_tokens=1024, kv_tokens=64 * 512, weights=Shares(disk=1.0)
)
RESIDENT = Policy(
    model="m", batch_size=64, micro_batch_size=64, micro_batch_tokens=1024, kv_tokens=64 * 512, weights=Shares(host=1.0)
)


@pytest.mark.parametrize("policy", [ON_DISK, RESIDENT], ids=["disk", "resident"])
@pytest.mark.parametrize(("cpu", "disk"), [(1.0, 1.0), (2.5, 1.0), (0.7, 1.6)])
@pytest.mark.parametrize("longer", [1.0, 1.15])
def test_the_gain_of_drafts_is_predicted(policy: Policy, cpu: float, disk: float, longer: float) -> None:
    """From the passes of a job on a machine other than the planned one, where passes with drafts take ``longer`` than
    their work explains: gains within a tenth, for any acceptance."""
    true = PassPrices(MIXTRAL, policy, slowed(CPU, {"cpu": cpu, "disk": disk}), BFLOAT16)
    prices = DraftPrices(PassPrices(MIXTRAL, policy, CPU, BFLOAT16))

    def passed(rows: int, sequences: int) -> Passed:
        sizes: dict[str, Any] = {"decode_tokens": rows, "sequences": sequences, "context": 300.0}
        made = Passed(**sizes, prompt_tokens=0, prompt_len=1.0, seconds=0.0, busy_s={})
        passes, owners = passes_that_ran([made]), np.array([float(sequences)])
        seconds = float(true.seconds(policy, passes, {}, owners)[0]) * (longer if rows > sequences else 1.0)
        busy_s = true.lanes(policy, passes, {}, owners)
        return replace(made, seconds=seconds, busy_s=busy_s)

    for number in range(64):
        rows = 64 * (1 + number % 4)
        prices.observe(passed(rows, 64), drafts=rows > 64, policy=policy)
    for count in (1, 2, 4, 6):
        plain, drafted = prices.seconds(policy, 64, 300.0, 0, np.array([0, 64 * count]))
        truth = passed(64, 64).seconds / passed(64 * (count + 1), 64).seconds
        assert plain / drafted == pytest.approx(truth, rel=0.1)


def test_passes_with_drafts_that_take_long_are_given_up_at_once() -> None:
    """Of what the ledger does not know, too: a few passes are enough."""
    prices = DraftPrices(PassPrices(MIXTRAL, ON_DISK, CPU, BFLOAT16))
    drafts = np.array([0, 64])
    before = prices.seconds(ON_DISK, 64, 300.0, 0, drafts)
    for number in range(12):
        rows = 128 if number % 2 else 64
        run = Passed(
            decode_tokens=rows,
            context=300.0,
            prompt_tokens=0,
            prompt_len=1.0,
            seconds=before[0] * (3.0 if rows > 64 else 1.0),
            busy_s={},
            sequences=64,
        )
        prices.observe(run, drafts=rows > 64, policy=ON_DISK)
    plain, drafted = prices.seconds(ON_DISK, 64, 300.0, 0, drafts)
    assert drafted / plain == pytest.approx(3.0, rel=0.05)
    for _ in range(60):
        prices.forget()
    plain, drafted = prices.seconds(ON_DISK, 64, 300.0, 0, drafts)
    assert drafted / plain == pytest.approx(before[1] / before[0], rel=0.05), "but not for ever"


def test_the_ledger_prefers_drafts_where_a_disk_binds_and_none_where_compute_does() -> None:
    sizes = {"batch_size": 4096, "micro_batch_size": 4096, "micro_batch_tokens": 1 << 15, "kv_tokens": 4096 * 512}
    for policy, some in ((ON_DISK, True), (replace(RESIDENT, **sizes), False)):
        prices = DraftPrices(PassPrices(MIXTRAL, policy, CPU, BFLOAT16))
        assert bool(proposed(Speculation(FixedDrafts(match=2), 4, prices), policy.batch_size, policy=policy)) is some


def test_passes_of_drafts_are_priced_as_they_are_packed() -> None:
    """Rows of few sequences fill micro-batches by tokens, not by sequences."""
    prices, sizes = PassPrices(MIXTRAL, RESIDENT, CPU, BFLOAT16), {"count": np.ones(1), "context": 300.0}
    passes = Passes(decode_tokens=np.array([256.0]), prompt_tokens=np.zeros(1), prompt_len=1.0, **sizes)
    few, many = (float(prices.seconds(RESIDENT, passes, {}, np.array([owners]))[0]) for owners in (64.0, 256.0))
    assert few < many
