"""What ranks exchange: sums, columns and messages, of all sizes; and the end of one, which all others notice."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from moelight.core.errors import RankError
from moelight.kernels.ranks import CHUNK_BYTES, Endpoints, Ranks, endpoints_of


def on_all(count: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What ``work`` returns on each of ``count`` ranks, threads of this process."""
    ranks = [Ranks(endpoints) for endpoints in endpoints_of(count)]
    try:
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(work, ranks))
    finally:
        for rank in ranks:
            rank.leave()


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_sum_has_the_same_bits_on_every_rank(count: int, dtype: torch.dtype) -> None:
    """Of several chunks, too, the last of them smaller; in the order of the ranks, and rounded once."""
    rows = 3 * CHUNK_BYTES // 2 // dtype.itemsize + 5
    terms = [torch.randn(rows, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(count)]
    expected = terms[0].float().clone()
    for term in terms[1:]:
        expected += term

    def work(ranks: Ranks) -> torch.Tensor:
        partial = terms[ranks.rank].clone()
        ranks.sum_(partial)
        return partial

    for total in on_all(count, work):
        assert torch.equal(total, expected.to(dtype))


def test_columns_are_joined_in_the_order_of_ranks_and_values_are_those_of_rank_0() -> None:
    def work(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        part = torch.arange(6.0).view(2, 3) + 10.0 * ranks.rank
        values = torch.tensor([ranks.rank, 7 + ranks.rank])
        ranks.share_(values)
        return ranks.join_columns(part), values, ranks.join_columns(part[:0])

    for joined, values, none in on_all(2, work):
        assert joined.tolist() == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]
        assert values.tolist() == [0, 7] and none.shape == (0, 6)


def test_tensors_of_inference_may_be_summed_outside_of_it() -> None:
    """Module graphs run in `torch.inference_mode`; what they leave is summed between their runs."""

    def work(ranks: Ranks) -> torch.Tensor:
        with torch.inference_mode():
            partial = torch.ones(4)
        ranks.sum_(partial)
        ranks.join_columns(partial.view(1, 4)).add_(1)  # a tensor like others
        return partial

    assert [total.tolist() for total in on_all(2, work)] == [[2.0] * 4] * 2


def test_messages_arrive_in_order() -> None:
    texts = [b"", b"first", b"x" * (CHUNK_BYTES + 1)]

    def work(ranks: Ranks) -> list[bytes]:
        ranks.meet(torch.device("cpu"))
        if ranks.leads:
            for text in texts:
                ranks.tell(text)
            return texts
        return [ranks.hear() for _ in texts]

    assert on_all(3, work) == [texts] * 3


@pytest.mark.parametrize("exchange", ["sum_", "hear", "meet"])
def test_a_rank_that_leaves_ends_the_wait_of_the_others(exchange: str) -> None:
    def work(ranks: Ranks) -> str:
        if ranks.rank == (1 if exchange == "meet" else 0):
            ranks.leave()
            return ""
        with pytest.raises(RankError, match="reaches another one no more") as lost:
            if exchange == "sum_":
                ranks.sum_(torch.ones(2))
            elif exchange == "hear":
                ranks.hear()
            else:
                ranks.meet(torch.device("cpu"))
        return str(lost.value)

    assert sum(map(bool, on_all(2, work))) == 1


def test_a_message_after_an_interrupted_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = endpoints_of(2)
    ranks = Ranks(first)

    class Interrupting:
        def sendall(self, _: bytes) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(ranks, "_messages", [Interrupting()])
    with pytest.raises(KeyboardInterrupt):
        ranks.tell(b"load")
    with pytest.raises(RankError, match="an earlier message was interrupted"):
        ranks.tell(b"close")
    monkeypatch.undo()
    ranks.leave()
    second.close()


def test_endpoints_are_told_by_their_descriptors() -> None:
    for count in (2, 3, 8):
        endpoints = endpoints_of(count)
        for ends in endpoints:
            assert Endpoints.of(ends.rank, count, ends.descriptors) == ends
            assert not any(os.get_inheritable(descriptor) for descriptor in ends.descriptors)
            ends.close()


def test_memory_without_a_name_where_the_system_has_none_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert [total.tolist() for total in on_all(2, summed)] == [[3.0], [3.0]]


def summed(ranks: Ranks) -> torch.Tensor:
    partial = torch.tensor([1.0 + ranks.rank])
    ranks.sum_(partial)
    return partial
