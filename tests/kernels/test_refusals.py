"""Whatever is wrong with an argument, the faces of attention say so by its name; nothing ever crashes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moelight.kernels import reference
from moelight.kernels.attention import cpu_gqa_decode, cpu_kv_append
from tests.kernels.paged import paged, relative_error

Arguments = dict[str, Any]
Damage = tuple[str, Callable[[Any], Any]]

FUZZ = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def decode_arguments() -> Arguments:
    call = paged([20, 5, 0], q_heads=4, kv_heads=2, head_dim=16, block_size=8)
    names = ("q", "k_cache", "v_cache", "block_tables", "seq_lens", "scale")
    return dict(zip(names, call.arguments, strict=True)) | {
        "window": None,
        "out": torch.empty_like(call.q),
        "threads": 2,
    }


def append_arguments() -> Arguments:
    call = paged([20, 5], kv_heads=2, head_dim=16, block_size=8)
    new = torch.randn(3, 2, 16)
    return {
        "k_cache": call.k_cache,
        "v_cache": call.v_cache,
        "k_new": new,
        "v_new": -new,
        "slots": torch.tensor([0, 9, 3]),
        "threads": 2,
    }


def decode(arguments: Arguments) -> Tensor:
    rest = dict(arguments)
    positional = [rest.pop(name) for name in ("q", "k_cache", "v_cache", "block_tables", "seq_lens", "scale")]
    return cpu_gqa_decode(*positional, **rest)


def append(arguments: Arguments) -> None:
    rest = dict(arguments)
    positional = [rest.pop(name) for name in ("k_cache", "v_cache", "k_new", "v_new", "slots")]
    cpu_kv_append(*positional, **rest)


def entry(index: Any, value: int) -> Callable[[Tensor], Tensor]:
    def damage(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[index] = value
        return tensor

    return damage


ANY_TENSOR: dict[str, Callable[[Any], Any]] = {
    "missing": lambda _: None,
    "a list": lambda t: t.tolist(),
    "a number": lambda _: 3,
    "numpy": lambda t: t.numpy(),
    "on meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "float64": lambda t: t.double(),
    "int16": lambda t: t.to(torch.int16),
    "complex": lambda t: t.to(torch.complex64),
    "bool": lambda t: t.bool(),
    "a dimension more": lambda t: t.unsqueeze(0),
    "no dimension": lambda t: t.flatten()[0],
    "one row more": lambda t: torch.cat((t, t[:1])),
    "every other element": lambda t: torch.stack((t, t), dim=-1)[..., 0],
    "one row for all": lambda t: t[:1].expand(t.shape),
}
CACHE_TOO = {"one row more"}
WIDE: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "another head size": lambda t: torch.cat((t, t), dim=-1),
    "a head size of 12": lambda t: t[..., :12].contiguous(),
    "another head count": lambda t: torch.cat((t, t[:, :1]), dim=1),
    "half precision": lambda t: t.half(),
    "no heads": lambda t: t[:, :0],
}
SCALARS: dict[str, tuple[Any, ...]] = {
    "scale": (None, "1", float("nan"), float("inf"), 1j),
    "window": (0, -1, 1.5, "all"),
    "threads": (0, -3, 1.5, "two"),
}
TENSORS = {
    "decode": ("q", "k_cache", "v_cache", "block_tables", "seq_lens", "out"),
    "append": ("k_cache", "v_cache", "k_new", "v_new", "slots"),
}


def damages(call: str) -> list[Any]:
    found = [
        pytest.param(name, damage, id=f"{name}-{what}")
        for name in TENSORS[call]
        for what, damage in ANY_TENSOR.items()
        if not (name == "out" and what == "missing")
    ]
    found += [
        pytest.param(name, damage, id=f"{name}-{what}")
        for name in TENSORS[call]
        if name not in {"block_tables", "seq_lens", "slots"}
        for what, damage in WIDE.items()
    ]
    found += [
        pytest.param(name, lambda _, value=value: value, id=f"{name}-{value!r}")
        for name, values in SCALARS.items()
        if call == "decode" or name == "threads"
        for value in values
    ]
    return found


INDICES = [
    ("decode", "block_tables", entry((0, 0), -1)),
    ("decode", "block_tables", entry((0, 2), 1000)),
    ("decode", "block_tables", entry((1, 0), 2**31 - 1)),
    ("decode", "seq_lens", entry(0, 25)),
    ("decode", "seq_lens", entry(1, -1)),
    ("decode", "seq_lens", entry(2, 2**31 - 1)),
    ("append", "slots", entry(0, -1)),
    ("append", "slots", entry(1, 10**6)),
    ("append", "slots", entry(2, -(2**63))),
    ("append", "slots", entry(2, 2**63 - 1)),
]


# A tensor is often only wrong beside another one: which of the two is named is a matter of order.
PARTNERS = {
    "q": {"q", "out", "seq_lens", "block_tables"},
    "out": {"out"},
    "k_cache": {"k_cache", "v_cache", "q", "k_new"},
    "v_cache": {"v_cache"},
    "block_tables": {"block_tables"},
    "seq_lens": {"seq_lens", "block_tables"},
    "slots": {"slots", "k_new"},
}


@pytest.mark.parametrize(("name", "damage"), damages("decode"))
def test_decode_names_the_wrong_argument(server, name, damage):
    refused(decode, decode_arguments(), name, damage)


@pytest.mark.parametrize(("name", "damage"), damages("append"))
def test_append_names_the_wrong_argument(server, name, damage):
    arguments = append_arguments()
    before = arguments["k_cache"].clone()
    refused(append, arguments, name, damage)
    assert torch.equal(arguments["k_cache"], before)


@pytest.mark.parametrize(("call", "name", "damage"), INDICES)
def test_indices_out_of_range(server, call, name, damage):
    face, arguments = (decode, decode_arguments()) if call == "decode" else (append, append_arguments())
    refused(face, arguments, name, damage)


def refused(face: Callable[[Arguments], Any], arguments: Arguments, name: str, damage: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"^\w+: ") as refusal:
        face(arguments | {name: damage(arguments[name])})
    assert str(refusal.value).split(":")[0] in PARTNERS.get(name, {name})


SIZES = st.integers(0, 3)
DTYPE = st.sampled_from((torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64))


@st.composite
def tensors(draw: st.DrawFn, like: Tensor) -> Tensor:
    """The right tensor, or one whose shape, dtype, strides or values are off."""
    if draw(st.booleans()):
        return like
    shape = [draw(st.sampled_from((size, size, size, 0, 1, size + 1))) for size in like.shape]
    if draw(st.integers(0, 9)) == 0:
        shape = [draw(SIZES) for _ in range(draw(st.integers(0, 5)))]
    dtype = draw(DTYPE) if draw(st.integers(0, 3)) == 0 else like.dtype
    tensor = torch.full(shape, draw(st.sampled_from((0, 0, 1, -1, 7, 2**31 - 1)))).to(dtype)
    if tensor.ndim > 1 and draw(st.integers(0, 3)) == 0:
        first = draw(st.integers(0, tensor.ndim - 1))
        tensor = tensor.transpose(first, draw(st.integers(0, tensor.ndim - 1)))
    return tensor


@FUZZ
@given(data=st.data())
def test_decode_refuses_or_is_right(server, data):
    arguments = decode_arguments()
    for name in TENSORS["decode"]:
        arguments[name] = data.draw(tensors(arguments[name]), label=name)
    arguments["window"] = data.draw(st.sampled_from((None, 1, 4, 2**63, -1)), label="window")
    try:
        out = decode(arguments)
    except ValueError as refusal:
        assert str(refusal).split(":")[0] in arguments
        return
    del arguments["out"], arguments["threads"]
    expected = reference.gqa_decode(**arguments)
    assert relative_error(out, expected.double()) <= 1e-2


@FUZZ
@given(data=st.data())
def test_append_refuses_or_is_right(server, data):
    arguments = append_arguments()
    for name in TENSORS["append"]:
        arguments[name] = data.draw(tensors(arguments[name]), label=name)
    expected = {name: tensor.clone() for name, tensor in arguments.items() if name != "threads"}
    try:
        append(arguments)
    except ValueError as refusal:
        assert str(refusal).split(":")[0] in arguments
    else:
        reference.kv_append(**expected)
    assert torch.equal(arguments["k_cache"], expected["k_cache"])
    assert torch.equal(arguments["v_cache"], expected["v_cache"])
