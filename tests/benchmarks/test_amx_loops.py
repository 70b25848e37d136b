"""Loops with products of tiles are found in assembly, with what they do."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.benchmarks.scripts import BENCHMARKS

ASSEMBLY = """
_Z5tilesv:
	tilezero	%tmm0
.L2:
	tileloadd	(%rax,%rbx,1), %tmm4
	tileloadd	(%rcx,%rbx,1), %tmm6
	tdpbf16ps	%tmm6, %tmm4, %tmm0
	testq	%rsi, %rsi
	je	.L2
	movl	$32, %edx
.L3:
	prefetcht1	(%rsi)
	subq	$1, %rdx
	jne	.L3
	jmp	.L2
	tilestored	%tmm0, (%r8,%rax,1)
_Z5plainv:
.L4:
	vmovups	%zmm0, 64(%rsp)
	jne	.L4
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("amx_loops")


def test_an_inner_loop_counts_as_often_as_it_runs(script: Any) -> None:
    (loop,) = script.loops(ASSEMBLY.splitlines())
    assert loop.function == "tiles"
    counts = [loop.count(pattern) for pattern in ("tdp", "tileload", "tilestore", "prefetch")]
    assert counts == [1, 2, 0, 32]
