"""Whatever is wrong with an argument, prefill attention says so by its name; nothing ever crashes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moelight.kernels import native
from moelight.kernels.attention import cpu_prefill_attention
from tests.fuzz import fuzz
from tests.kernels.packed import prompts
from tests.kernels.paged import relative_error

FUZZ = fuzz(60)


def entry(index: Any, value: int) -> Any:
    def damage(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[index] = value
        return tensor

    return damage


NAMES = ("q", "k", "v", "cu_seqlens", "k_cache", "v_cache", "block_tables", "context_lens", "sinks", "out")
ANY = {
    "missing": lambda _: None,
    "a list": lambda t: t.tolist(),
    "a number": lambda _: 3,
    "numpy": lambda t: t.numpy(),
    "on meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "float64": lambda t: t.double(),
    "int16": lambda t: t.to(torch.int16),
    "complex": lambda t: t.to(torch.complex64),
    "a dimension more": lambda t: t.unsqueeze(0),
    "no dimension": lambda t: t.flatten()[0],
    "a row less": lambda t: t[:-1],
    "every other element": lambda t: torch.stack((t, t), dim=-1)[..., 0],
}
HEADS = {
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "another head size": lambda t: torch.cat((t, t), dim=-1),
    "a head size of 12": lambda t: t[..., :12].contiguous(),
    "one head more": lambda t: torch.cat((t, t[:, :1]), dim=1),
    "half precision": lambda t: t.half(),
    "no heads": lambda t: t[:, :0],
    "one row for all": lambda t: t[:1].expand(t.shape),
}
INDICES = [
    ("cu_seqlens", entry(0, 1)),
    ("cu_seqlens", entry(1, 26)),
    ("cu_seqlens", entry(1, -1)),
    ("cu_seqlens", entry(2, 24)),
    ("cu_seqlens", entry(2, 2**31 - 1)),
    ("block_tables", entry((0, 0), -1)),
    ("block_tables", entry((0, 2), 1000)),
    ("context_lens", entry(0, 25)),
    ("context_lens", entry(1, -1)),
    ("window", lambda _: 0),
    ("window", lambda _: 1.5),
    ("softcap", lambda _: 0.0),
    ("softcap", lambda _: float("nan")),
    ("softcap", lambda _: "50"),
    ("scale", lambda _: float("inf")),
    ("threads", lambda _: -1),
]
HARMLESS = {("sinks", "missing"), ("sinks", "float64"), ("sinks", "every other element"), ("out", "missing")}
DAMAGES = [
    *((name, damage) for name in NAMES for label, damage in ANY.items() if (name, label) not in HARMLESS),
    *((name, damage) for name in ("q", "k", "v", "k_cache", "v_cache", "out") for damage in HEADS.values()),
    *INDICES,
]


def arguments() -> dict[str, Any]:
    call = prompts([20, 5], [20, 3], head_dim=16, block_size=8)
    names = ("k_cache", "v_cache", "block_tables", "context_lens")
    result = dict(zip(names, call.options["cache"], strict=True))
    result |= {"q": call.q, "k": call.k, "v": call.v, "cu_seqlens": call.cu_seqlens, "scale": 0.25}
    return result | {
        "sinks": torch.randn(4),
        "out": torch.empty_like(call.q),
        "window": 40,
        "softcap": 9.0,
        "threads": 2,
    }


def attend(given_arguments: dict[str, Any]) -> Tensor:
    rest = dict(given_arguments)
    cache = tuple(rest.pop(name) for name in ("k_cache", "v_cache", "block_tables", "context_lens"))
    return cpu_prefill_attention(**rest, cache=cache)


# A tensor is often only wrong beside another one: which of the two is named is a matter of order.
PARTNERS = {
    "q": {"q", "k", "v", "out", "cu_seqlens"},
    "k": {"k", "v", "q", "k_cache"},
    "k_cache": {"k_cache", "v_cache", "block_tables", "context_lens"},
    "v_cache": {"v_cache"},
    "cu_seqlens": {"cu_seqlens", "block_tables"},
}


@pytest.mark.parametrize("name", sorted({name for name, _ in DAMAGES}))
def test_the_wrong_argument_is_named(checker, name):
    right = arguments()
    for number, damage in enumerate(damage for damaged, damage in DAMAGES if damaged == name):
        with pytest.raises(ValueError, match=r"^\w+: ") as refusal:
            attend(right | {name: damage(right[name])})
        assert str(refusal.value).split(":")[0] in PARTNERS.get(name, {name}), number


@pytest.mark.parametrize("cache", [(), (1, 2, 3), 5, "four"])
def test_a_cache_is_four_tensors(checker, cache):
    call = prompts([3])
    with pytest.raises(ValueError, match=r"^(cache|k_cache): "):
        replace(call, options={"cache": cache}).run()


@FUZZ
@given(data=st.data())
def test_refuses_or_is_right(server, data):
    given_arguments = arguments()
    for name in NAMES:
        like = given_arguments[name]
        if data.draw(st.integers(0, 3), label=f"damage {name}") > 0:
            continue
        shape = [data.draw(st.sampled_from((n, n, n, 0, 1, n + 1))) for n in like.shape]
        dtype = data.draw(st.sampled_from((like.dtype, like.dtype, torch.bfloat16, torch.int64)))
        filling = data.draw(st.sampled_from((0, 0, 1, -1, 7, 2**31 - 1)))
        given_arguments[name] = torch.full(shape, filling).to(dtype)
        if len(shape) > 1 and data.draw(st.integers(0, 3)) == 0:
            given_arguments[name] = given_arguments[name].transpose(0, -1)
    given_arguments["window"] = data.draw(st.sampled_from((None, 1, 4, 2**63, -1)), label="window")
    try:
        result = attend(given_arguments)
    except ValueError as refusal:
        assert str(refusal).split(":")[0] in given_arguments
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "extension", lambda: None)
        expected = attend(given_arguments | {"out": None})
    assert result.isnan().equal(expected.isnan())
    assert relative_error(result.nan_to_num(), expected.double().nan_to_num()) <= 1e-2
