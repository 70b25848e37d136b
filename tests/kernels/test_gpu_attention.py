"""Attention of ragged batches over new and cached tokens, in Triton and in torch, against float64 and the CPU's."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelight.kernels import reference
from moelight.kernels.attention import cpu_gqa_decode, cpu_kv_append, cpu_prefill_attention
from moelight.kernels.gpu import attention, serving, tiles
from moelight.kernels.gpu.attention import (
    PromptForm,
    RaggedBatch,
    append,
    attend,
    attend_in_torch,
    fetch,
    prompt_form,
    through_int8,
)
from tests.kernels.gpu_layers import distance
from tests.kernels.ragged import Ragged, Sequence, ragged
from tests.shapes import examples

TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
FORM = PromptForm(tile_tokens=32, most_tokens=1000)
MIXED = [
    Sequence(start=40, count=1, decodes=True),
    Sequence(start=0, count=1, decodes=True),
    Sequence(start=0, count=12),
    Sequence(start=21, count=3),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "all in the cache": {"tiers": "cache", "block_size": 32},
    "all in the buffer, groups of 3": {"tiers": "buffer", "heads": 6, "head_dim": 24},
    "a window, a cap far above": {"window": 20, "softcap": 1e6},
    "only itself": {"window": 1, "block_size": 64},
    "sinks and a cap": {"sinks": True, "softcap": 2.0},
    "int8, a window, sinks and a cap": {"int8": True, "window": 25, "sinks": True, "softcap": 4.0, "head_dim": 40},
}


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES.items(), ids=str)
def test_a_mixed_batch(device, dtype, tolerance):
    case = ragged(MIXED, dtype=dtype, device=device)
    result = case.call(attend)
    assert result.dtype == dtype and distance(result, case.truth()) <= tolerance


@pytest.mark.usefixtures("checks_overflow")
@pytest.mark.parametrize("options", OPTIONS)
def test_options(device, options):
    case = ragged(MIXED, device=device, **OPTIONS[options])
    assert distance(case.call(attend), case.truth()) <= TOLERANCES[torch.float32]


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy, of the interpreter
def test_a_value_that_is_no_number_reaches_its_token(device):
    """Whose key is infinite and weighs nothing, as `norm.finish_heads` leaves them; and the later tokens of its
    sequence that see it, but no other sequence."""
    case = ragged(MIXED, dtype=torch.float16, device=device, window=5)
    case.q[:, :, 0] = 1
    sound, rows = case.call(attend), [0, 5, 14]  # decodes, within a prompt, after cached tokens
    case.k[rows, :, 0], case.v[rows] = -torch.inf, torch.nan
    result = case.call(attend)
    assert result[[0, *range(5, 10), *range(14, 17)]].isnan().all()
    assert torch.equal(result[1], sound[1]) and sound.isfinite().all()


def test_heads_in_steps(device, monkeypatch):
    """Where no tensor units multiply, the product with the keys goes over a head in steps."""
    tile = tiles.choose_attention((7, 5), itemsize=2, head_dim=64, group=2, decodes=False)
    assert tile.depth < 64
    monkeypatch.setattr(tiles, "choose_attention", lambda *_, **__: tile)
    case = ragged(MIXED[1:], device=device, head_dim=40, int8=True)
    assert distance(case.call(attend), case.truth()) <= TOLERANCES[torch.float32]


def test_long_prompts_are_torchs_where_no_tensor_units_multiply(device, monkeypatch):
    """Fresh ones and those with a context; the others are Triton's."""
    apart = list[int]()
    inner = attention._attend_one
    monkeypatch.setattr(attention, "_attend_one", lambda q, *rest: apart.append(len(q)) or inner(q, *rest))
    form = replace(prompt_form(device, torch.float32, 4, 2, 16), most_tokens=11)
    case = ragged([*MIXED, Sequence(start=30, count=12)], device=device, form=form)
    assert distance(case.call(attend), case.truth()) <= TOLERANCES[torch.float32]
    assert case.batch.apart == (2, 4)
    assert [count for count in apart if count > 11] == [12, 12]
    assert serving.serves(device, torch.float32)[0] is (len(apart) == 2)


def test_int8_in_half_precision(device):
    case = ragged(MIXED, device=device, dtype=torch.float16, int8=True)
    assert distance(case.call(attend), case.truth()) <= TOLERANCES[torch.float16]


@st.composite
def cases(draw: st.DrawFn) -> Ragged:
    """Any batch, tiers, block size, heads and options."""
    sequence = st.builds(Sequence, start=st.integers(0, 70), count=st.integers(1, 40))
    decoding = st.builds(Sequence, start=st.integers(0, 70), count=st.just(1), decodes=st.just(True))
    kv_heads = draw(st.integers(1, 3))
    return ragged(
        draw(st.lists(st.one_of(sequence, decoding), min_size=1, max_size=4)),
        heads=kv_heads * draw(st.integers(1, 5)),
        kv_heads=kv_heads,
        head_dim=8 * draw(st.integers(1, 5)),
        block_size=draw(st.sampled_from((16, 32, 64, 128))),
        tiers=draw(st.sampled_from(("both", "cache", "buffer"))),
        int8=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 60)),
        sinks=draw(st.booleans()),
        softcap=draw(st.none() | st.floats(0.5, 50)),
        seed=draw(st.integers(0, 9)),
    )


@examples(60)
@given(case=cases())
def test_torch_on_any_batch(case: Ragged) -> None:
    assert distance(case.call(attend_in_torch), case.truth()) <= 1e-5


@examples(8)
@given(case=cases())
def test_triton_on_any_batch(case: Ragged) -> None:
    if not serving.interpreting():
        pytest.skip("triton does not interpret here")
    assert distance(case.call(attend), case.truth()) <= 1e-5


def test_a_row_depends_on_its_own_sequence_alone(device, request):
    """Neither other sequences nor the chunks of a prompt change a bit, with Triton; interpreted, products are numpy's,
    whose BLAS may round a row otherwise at another place of a block."""
    if "torch" in request.node.name:
        pytest.skip("torch chooses its own order of sums")
    heads = {"heads": 2, "kv_heads": 1, "device": device}
    form = prompt_form(device, torch.float32, 2, 1, 16)
    full = ragged([Sequence(start=0, count=75)], **heads)
    rows = full.call(attend)
    for cut in (1, 40):
        later = ragged([Sequence(start=cut, count=75 - cut), Sequence(start=3, count=5)], **heads)
        for name in ("q", "k", "v"):
            getattr(later, name)[: 75 - cut] = getattr(full, name)[cut:]
        later.rest["cache"] = torch.stack((full.k, full.v), 1)
        later.rest["buffer"] = None
        entries = [*range(0, cut, 16), 0]
        later.batch = RaggedBatch([75 - cut, 5], [cut, 3], [0, 0], entries, decoding=0, block_size=16, form=form)
        later.batch.land(later.batch.table.to(device))
        result = later.call(attend)[: 75 - cut]
        assert torch.equal(result, rows[cut:]) or (device.type == "cpu" and distance(result, rows[cut:]) <= 1e-6)


def test_as_the_kernels_of_the_cpu(device):
    """The same caches, laid out for each."""
    size, lengths, counts = 32, (40, 7), (6, 3)
    q, k, v = (torch.randn(2 + 9, heads, 16) for heads in (6, 2, 2))
    paged = torch.randn(2, 7, 2, size, 16)  # keys and values of blocks
    tables = torch.tensor([[5, 2], [0, 0], [3, 6], [1, 4]], dtype=torch.int32)
    slots = torch.stack(list(paged), 2).permute(0, 3, 2, 1, 4).reshape(7 * size, 2, 2, 16).contiguous()
    batch = RaggedBatch(
        [1, 1, *counts],
        [*lengths, 50, 33],
        [0] * 4,
        np.array([5, 2, 0, 3, 6, 1, 4]) * size,
        decoding=2,
        block_size=size,
        form=prompt_form(device, torch.float32, 6, 2, 16),
    )
    batch.land(batch.table.to(device))
    result = attend(*(item.to(device) for item in (q, k, v)), batch, 0.25, window=45, cache=slots.to(device)).cpu()
    after = [int(tables[s, length // size]) * size + length % size for s, length in enumerate(lengths)]
    prompts = (torch.tensor([0, 6, 9], dtype=torch.int32), 0.25)
    cache = (paged[0], paged[1], tables[2:], torch.tensor([50, 33], dtype=torch.int32))
    expected = cpu_prefill_attention(q[2:], k[2:], v[2:], *prompts, window=45, cache=cache)
    torch.testing.assert_close(result[2:], expected, rtol=1e-5, atol=1e-5)
    cpu_kv_append(paged[0], paged[1], k[:2], v[:2], torch.tensor(after))
    seen = torch.tensor(lengths, dtype=torch.int32) + 1
    expected = cpu_gqa_decode(q[:2], paged[0], paged[1], tables[:2], seen, 0.25, window=45)
    torch.testing.assert_close(result[:2], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("picked", [True, False], ids=["some rows", "all rows"])
def test_append(device, dtype, picked):
    both = torch.randn(6, 5, 24).to(dtype).to(device)
    k, v = both[:, :3], both[:, 2:]  # rows with gaps
    rows = torch.tensor([4, 0, 3]) if picked else torch.arange(6)
    slots = torch.tensor([7, 2, 9, 0, 5, 4])[: len(rows)]
    cache = torch.full((11, 2, 3, 24), 3.0, dtype=dtype, device=device)
    expected = cache.clone()
    append(k, v, cache, slots.to(device), rows=rows.to(device) if picked else None)
    expected[slots, 0], expected[slots, 1] = k[rows], v[rows]
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_append_in_int8_quantises_as_the_cpu(device, dtype):
    k, v = torch.randn(4, 3, 24).to(dtype), torch.randn(4, 3, 24).to(dtype)
    k[1, 2] = 0
    v[2, 0, 5] = float("inf")
    k[3, 1, 0] = float("nan")
    cache = torch.full((8, 2, 3, 24), 3, dtype=torch.int8, device=device)
    scales = torch.full((8, 2, 3), 3.0, device=device)
    slots = torch.tensor([6, 1, 3, 0])
    append(k.to(device), v.to(device), cache, slots.to(device), cache_scale=scales)
    for which, new in enumerate((k, v)):
        codes, factors = reference.quantise(new)
        torch.testing.assert_close(scales[slots, which].cpu(), factors, rtol=1e-6, atol=0, equal_nan=True)
        apart = (cache[slots, which].cpu().int() - codes.int()).abs()
        assert apart.max() <= 1 and apart.sum() <= 2  # a quotient on the border of two codes
    assert cache[[2, 4, 5, 7]].eq(3).all() and scales[[2, 4, 5, 7]].eq(3).all()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_new_rows_are_read_as_an_int8_cache_gives_them_back(device, dtype):
    """The codes and scales that `append` writes, multiplied and rounded: what later rows read from the cache."""
    both = torch.randn(6, 5, 24).to(dtype).to(device)
    k, v = both[:, :3], both[:, 2:]  # rows with gaps
    k[1, 2], v[2, 0, 5], k[3, 1, 0] = 0, float("inf"), float("nan")
    codes = torch.empty(6, 2, 3, 24, dtype=torch.int8, device=device)
    scales = torch.empty(6, 2, 3, device=device)
    append(k, v, codes, torch.arange(6, device=device), cache_scale=scales)
    for which, result in enumerate(through_int8(k, v)):
        wanted = reference.dequantise(codes[:, which], scales[:, which], dtype)
        torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)


def test_fetch_copies_pieces(device):
    if not serving.serves(device, torch.float16)[0]:
        pytest.skip("torch copies by runs")
    source, into = torch.randn(600, 2, 3, 24).half(), torch.zeros(80, 2, 3, 24, dtype=torch.half, device=device)
    source = source.pin_memory() if device.type == "cuda" else source
    assert serving.reads_host(source, device)[0]
    pieces = torch.tensor([[500 - 20 * i, 2 * i + 1, 1 + i % 2] for i in range(20)] + [[2, 45, 30]], dtype=torch.int32)
    fetch(source, into, pieces.to(device))
    expected = torch.zeros_like(into, device="cpu")
    for slot, position, count in pieces.tolist():
        expected[position : position + count] = source[slot : slot + count]
    assert torch.equal(into.cpu(), expected)


def test_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each form, whatever the number of sequences; new tokens are written by one."""
    if not serving.interpreting():
        pytest.skip("triton does not interpret here")
    from moelight.kernels.gpu import attention_triton

    launched = []
    for name in ("attend", "append", "fetch"):
        kernel = getattr(attention_triton, name)

        class Counted:
            def __init__(self, kernel: Any, name: str) -> None:
                self._kernel, self._name = kernel, name

            def __getitem__(self, grid: Any) -> Any:
                launched.append(self._name)
                return self._kernel[grid]

        monkeypatch.setattr(attention_triton, name, Counted(kernel, name))
    decoding, prompt = Sequence(start=5, count=1, decodes=True), Sequence(start=0, count=3)
    heads = {"heads": 2, "kv_heads": 1}
    case = ragged([decoding, prompt, decoding, prompt, Sequence(start=20, count=2)], **heads)
    case.call(attend)
    append(case.k, case.v, case.rest["cache"], torch.arange(len(case.k)))
    fetch(case.rest["cache"], case.rest["buffer"], torch.tensor([[0, 0, 1], [3, 1, 2]], dtype=torch.int32))
    assert launched == ["attend", "attend", "append", "fetch"]
    launched.clear()
    ragged([decoding, decoding], **heads).call(attend)
    ragged([prompt, prompt], **heads).call(attend)
    assert launched == ["attend", "attend"]


def test_torch_gathers_a_long_context_by_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = list[int]()
    inner = attention._with_context
    monkeypatch.setattr(attention, "GATHER_BYTES", 50 * 2 * 16 * 4 * 3)

    def watched(new: Any, *rest: Any) -> Any:
        gathered.append(new[0].shape[1])
        return inner(new, *rest)

    monkeypatch.setattr(attention, "_with_context", watched)
    case = ragged([Sequence(start=49, count=1, decodes=True), Sequence(start=300, count=2)], heads=6, kv_heads=3)
    assert distance(case.call(attend_in_torch), case.truth()) <= 1e-5
    assert gathered == [1] * 6


BATCH: dict[str, Any] = {"decoding": 1, "block_size": 16, "form": FORM}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"starts": [20]}, "starts: 1 and seen_from: 2 entries for 2 sequences"),
        ({"decoding": 2}, "decoding: must be a number of first sequences with one row each, is 2"),
        ({"seen_from": [21, 0]}, "seen_from: must be from 0 to starts, and counts at least 1"),
        ({"block_size": 20}, "block_size: must be one of (16, 32, 64, 128), is 20"),
        ({"entries": [0]}, "entries: must be 2, one a block with cached tokens that are seen"),
    ],
)
def test_a_wrong_batch_is_refused(changes: dict[str, Any], message: str) -> None:
    right = {"counts": [1, 3], "starts": [20, 0], "seen_from": [0, 0], "entries": [0, 16], **BATCH}
    RaggedBatch(**right)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        RaggedBatch(**{**right, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 4, 16)}, "k: must have shape [2, any, 16], has [4, 2, 16]"),
        ({"q": torch.zeros(4, 3, 16)}, "q: its 3 heads are no multiple of the 2 of keys and values"),
        ({"q": torch.zeros(4, 4, 12)}, "q: head size must be a multiple of 8 from 8 to 256, is 12"),
        ({"v": torch.zeros(4, 2, 16).half()}, "v: must be float32, is float16"),
        ({"k": torch.zeros(129)[1:].view(4, 2, 16)}, "k: its rows must begin at multiples of 16 bytes"),
        ({"sinks": torch.zeros(2)}, "sinks: must have shape [4], has [2]"),
        ({"cache": None}, "cache: must be given, the batch has cached tokens there"),
        ({"cache": torch.zeros(32, 2, 1, 16)}, "cache: must have shape [any, 2, 2, 16], has [32, 2, 1, 16]"),
        ({"cache": torch.zeros(19, 2, 2, 16)}, "cache: has 19 slots, the batch names slot 19"),
        ({"cache_scale": torch.ones(32, 2, 2)}, "cache: must be int8, is float32"),
        ({"cache": torch.zeros(32, 2, 2, 16, dtype=torch.int8)}, "cache: must be float32, is int8"),
        ({"batch": None}, "batch: must be a RaggedBatch of the 4 rows of q, its table on cpu"),
        ({"window": 0}, "window: must be a positive integer or None, is 0"),
        ({"out": torch.zeros(4, 16)}, "out: must have 3 dimensions, has shape [4, 16]"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    batch = RaggedBatch([1, 3], [20, 0], [0, 0], [0, 16], **BATCH)
    kv, cache = torch.zeros(4, 2, 16), torch.zeros(32, 2, 2, 16)
    right: dict[str, Any] = {"q": torch.zeros(4, 4, 16), "k": kv, "v": kv, "batch": batch, "scale": 1.0, "cache": cache}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        attend(**{**right, **changes})
