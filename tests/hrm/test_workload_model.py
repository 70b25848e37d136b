"""A job as kinds of passes: nothing is lost, nothing done twice, and bounds stay below."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.hrm.workload_model import KINDS, Passes, decode_pass, passes_of, static_passes_of
from moelight.profiles.workload import Workload
from tests.shapes import examples


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Workload, int, int]:
    prompt = draw(st.integers(1, 600))
    work = Workload(
        num_requests=draw(st.integers(1, 3000)),
        prompt_len=prompt,
        max_prompt_len=prompt + draw(st.integers(0, 100)),
        gen_len=draw(st.integers(1, 300)),
    )
    return work, draw(st.integers(1, work.num_requests)), draw(st.sampled_from([16, 64, 256, 1024, 4096]))


@pytest.mark.parametrize("kinds_of", [passes_of, static_passes_of])
@examples(300)
@given(job=jobs())
def test_every_prompt_comes_once_and_every_sequence_decodes_to_its_end(
    kinds_of: Callable[..., Passes], job: tuple[Workload, int, int]
) -> None:
    work, n, tokens = job
    kinds = kinds_of(work, n, tokens)
    assert len(kinds.count) == len(KINDS)
    assert np.all(kinds.count >= -1e-9) and np.all(kinds.decode_tokens >= -1e-9)
    assert np.sum(kinds.count * kinds.prompt_tokens) == pytest.approx(work.num_requests * work.prompt_len, rel=1e-6)
    decoded = np.sum(kinds.count * kinds.decode_tokens)
    assert decoded == pytest.approx(work.num_requests * (work.gen_len - 1), rel=1e-6, abs=1e-6)
    assert np.sum(kinds.count) >= work.gen_len * (1 - 1e-9)


@examples(100)
@given(job=jobs())
def test_no_pass_decodes_more_than_are_alive(job: tuple[Workload, int, int]) -> None:
    work, n, tokens = job
    kinds = passes_of(work, n, tokens)
    assert np.all(kinds.decode_tokens[kinds.count > 0] <= n * (1 + 1e-9))
    assert float(decode_pass(work, n).decode_tokens) == n


def test_a_single_wave_is_one_pass_of_prompts_and_the_rest_decode() -> None:
    kinds = passes_of(Workload(num_requests=8, prompt_len=16, max_prompt_len=16, gen_len=5), 8, 1024)
    held = {name: (float(c), float(d), float(p)) for name, c, d, p in zip(KINDS, *_columns(kinds), strict=True) if c}
    assert held == {"first prompts": (1.0, 0.0, 128.0), "decode": (4.0, 8.0, 0.0)}


def test_static_batches_prefill_alone_and_end_together() -> None:
    """Three batches of 8, and one of 2; 128 tokens of prompts need two passes of 8 + 8 x 8."""
    kinds = static_passes_of(Workload(num_requests=26, prompt_len=16, max_prompt_len=16, gen_len=5), 8, 64)
    held = {name: (float(c), float(d), float(p)) for name, c, d, p in zip(KINDS, *_columns(kinds), strict=True) if c}
    assert held == {
        "first prompts": (6.0, 0.0, 64.0),
        "decode": (12.0, 8.0, 0.0),
        "last prompts": (1.0, 0.0, 32.0),
        "last decode": (4.0, 2.0, 0.0),
    }


def _columns(kinds):  # type: ignore[no-untyped-def]
    return kinds.count, kinds.decode_tokens, kinds.prompt_tokens
