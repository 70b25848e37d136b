"""Copies of bytes: every alignment, length and number of threads; nothing beside the region changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelight.kernels.copies import copy_pages
from tests.fuzz import fuzz

MIB = 1 << 20
FUZZ = fuzz(60)
SOURCE = torch.randint(0, 256, (9 * MIB,), dtype=torch.uint8)


def check(length: int, to: int, start: int, threads: int) -> None:
    full = torch.full((to + length + 100,), 7, dtype=torch.uint8)
    copy_pages(full[to : to + length], SOURCE[start : start + length], threads=threads)
    assert torch.equal(full[to : to + length], SOURCE[start : start + length])
    assert (full[:to] == 7).all()
    assert (full[to + length :] == 7).all()


def test_lengths(server):
    for threads in [1, 2, 5]:
        for length in [0, 1, 63, 64, 65, MIB - 1, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 8 * MIB + 77]:
            check(length, 0, 0, threads)
            check(length, 3, 17, threads)


@FUZZ
@given(
    length=st.one_of(st.integers(0, 3000), st.integers(2 * MIB - 200, 2 * MIB + 600_000)),
    to=st.integers(0, 130),
    start=st.integers(0, 5000),
    threads=st.integers(1, 4),
)
def test_any_alignment(server, length, to, start, threads):
    check(length, to, start, threads)


def test_refusals(server):
    for name, wrong in [
        ("dst", None),
        ("dst", torch.zeros(64)),
        ("dst", torch.zeros(8, 8, dtype=torch.uint8)),
        ("dst", torch.zeros(128, dtype=torch.uint8)[::2]),
        ("dst", torch.zeros(64, dtype=torch.uint8, device="meta")),
        ("src", [1] * 64),
        ("src", torch.zeros(64, dtype=torch.int8)),
        ("src", torch.zeros(63, dtype=torch.uint8)),
        ("src", torch.zeros(1, dtype=torch.uint8).expand(64)),
        ("src", torch.zeros(64, dtype=torch.uint8).numpy()),
        ("threads", 0),
        ("threads", "all"),
    ]:
        arguments = {
            "dst": torch.zeros(64, dtype=torch.uint8),
            "src": torch.zeros(64, dtype=torch.uint8),
            "threads": 1,
            name: wrong,
        }
        with pytest.raises(ValueError, match=f"^{name}: "):
            copy_pages(arguments["dst"], arguments["src"], threads=arguments["threads"])


@pytest.mark.parametrize(("to", "start"), [(0, 0), (0, 1), (63, 0)])
def test_overlap_is_refused(server, to, start):
    full = torch.zeros(200, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"^src: overlaps"):
        copy_pages(full[to : to + 64], full[start : start + 64])
