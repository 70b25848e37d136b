"""Whatever is wrong with an argument, the faces of attention say so by its name; nothing ever crashes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moelight.kernels import reference
from moelight.kernels.attention import cpu_gqa_decode, cpu_kv_append, cpu_mla_append, cpu_mla_decode
from tests.fuzz import fuzz
from tests.kernels.paged import paged

Arguments = dict[str, Any]

FUZZ = fuzz(60)


def decode_arguments() -> Arguments:
    call = paged([40, 20, 0], q_heads=4, kv_heads=2, head_dim=16)
    names = ("q", "k_cache", "v_cache", "block_tables", "seq_lens", "scale")
    return dict(zip(names, call.arguments, strict=True)) | {
        "window": None,
        "sinks": torch.randn(4),
        "softcap": 5.0,
        "k_new": torch.randn(3, 2, 16),
        "v_new": torch.randn(3, 2, 16),
        "out": torch.empty_like(call.q),
        "threads": 2,
    }


def append_arguments() -> Arguments:
    call = paged([20, 5], kv_heads=2, head_dim=16)
    new = torch.randn(3, 2, 16)
    return {
        "k_cache": call.k_cache,
        "v_cache": call.v_cache,
        "k_new": new,
        "v_new": -new,
        "slots": torch.tensor([0, 9, 3]),
        "threads": 2,
    }


def in_int8(arguments: Arguments) -> Arguments:
    small = dict(arguments)
    small["k_cache"], small["k_scale"] = reference.quantise(arguments["k_cache"])
    small["v_cache"], small["v_scale"] = reference.quantise(arguments["v_cache"])
    return small


def latent_arguments() -> Arguments:
    return {
        "q_nope_absorbed": torch.randn(3, 4, 16),
        "q_rope": torch.randn(3, 4, 8),
        "cache": torch.randn(12, 8, 24),
        "block_tables": torch.randperm(12)[:9].view(3, 3).int(),
        "seq_lens": torch.tensor([20, 5, 0], dtype=torch.int32),
        "scale": 0.2,
        "out": torch.empty(3, 4, 16),
        "threads": 2,
    }


def latent_append_arguments() -> Arguments:
    return {
        "cache": torch.randn(5, 8, 24),
        "new": torch.randn(3, 24),
        "slots": torch.tensor([0, 9, 3]),
        "threads": 2,
    }


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
WIDE: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "another last size": lambda t: torch.cat((t, t), dim=-1),
    "a last size of 4": lambda t: t[..., :4].contiguous(),
    "another second size": lambda t: torch.cat((t, t[:, :1]), dim=1),
    "half precision": lambda t: t.half(),
    "no second size": lambda t: t[:, :0],
}
SCALARS: dict[str, tuple[Any, ...]] = {
    "scale": (None, "1", float("nan"), float("inf"), 1j),
    "window": (0, -1, 1.5, "all"),
    "softcap": (0, -2.0, 1e-9, 1e9, float("nan"), float("inf"), "hot", 1j),
    "threads": (0, -3, 1.5, "two"),
}
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], Arguments]]] = {
    "decode": (cpu_gqa_decode, decode_arguments),
    "decode in int8": (cpu_gqa_decode, lambda: in_int8(decode_arguments())),
    "append": (cpu_kv_append, append_arguments),
    "append in int8": (cpu_kv_append, lambda: in_int8(append_arguments())),
    "latent decode": (cpu_mla_decode, latent_arguments),
    "latent append": (cpu_mla_append, latent_append_arguments),
}
# Another number of blocks, or of tokens in each, is no mistake in a cache that has no twin.
HARMLESS = {("out", "missing"), ("sinks", "missing"), ("cache", "one row more"), ("cache", "another second size")}


def damages(call: str, name: str, value: Any) -> dict[str, Callable[[Any], Any]]:
    """The ways in which the argument ``name`` of ``call``, which is ``value``, can be wrong."""
    kinds = ANY_TENSOR | (WIDE if isinstance(value, Tensor) and value.is_floating_point() else {})
    if name in SCALARS:
        kinds = {repr(wrong): lambda _, wrong=wrong: wrong for wrong in SCALARS[name]}
    elif value.dim() == 1:
        kinds = ANY_TENSOR
    return {kind: damage for kind, damage in kinds.items() if (name, kind) not in HARMLESS}


# A tensor is often only wrong beside another one: which of the two is named is a matter of order.
PARTNERS = {
    "q": {"q", "out", "seq_lens", "block_tables"},
    "k_cache": {"k_cache", "v_cache", "q", "k_new"},
    "block_tables": {"block_tables"},
    "seq_lens": {"seq_lens", "block_tables"},
    "slots": {"slots", "k_new", "new"},
    "k_new": {"k_new", "v_new"},
    "q_nope_absorbed": {"q_nope_absorbed", "q_rope", "cache"},
    "q_rope": {"q_rope", "cache"},
    "cache": {"cache", "q_nope_absorbed", "new"},
}


def refused(call: str, arguments: Arguments, name: str, damage: Callable[[Any], Any], label: str = "") -> None:
    try:
        CALLS[call][0](**arguments | {name: damage(arguments[name])})
    except ValueError as error:
        assert str(error).split(":")[0] in PARTNERS.get(name, {name}), f"{label}: {error}"
    else:
        pytest.fail(f"{call}: {name} {label} was not refused")


@pytest.mark.parametrize(("call", "name"), [(call, name) for call, (_, make) in CALLS.items() for name in make()])
def test_the_wrong_argument_is_named_and_nothing_is_written(checker, call, name):
    arguments = CALLS[call][1]()
    caches = {"k_cache", "v_cache", "k_scale", "v_scale", "cache"} & arguments.keys()
    before = {cache: arguments[cache].clone() for cache in caches}
    for label, damage in damages(call, name, arguments[name]).items():
        refused(call, arguments, name, damage, label)
        for cache in caches:
            assert torch.equal(arguments[cache], before[cache]), label


@pytest.mark.parametrize("call", ["decode", "append"])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_only_int8_caches_have_scales(checker, call, name):
    arguments = CALLS[call][1]()
    scales = torch.ones(arguments["k_cache"].shape[:3])
    refused(call, arguments | {name: None}, name, lambda _: scales)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("block_tables", entry((0, 0), -1)),
        ("block_tables", entry((0, 2), 1000)),
        ("block_tables", entry((1, 0), 2**31 - 1)),
        ("seq_lens", entry(0, 49)),
        ("seq_lens", entry(1, -1)),
        ("seq_lens", entry(2, 2**31 - 1)),
        ("slots", entry(0, -1)),
        ("slots", entry(1, 10**6)),
        ("slots", entry(2, -(2**63))),
        ("slots", entry(2, 2**63 - 1)),
    ],
)
def test_indices_out_of_range(checker, name, damage):
    for call, (_, make) in CALLS.items():
        arguments = make()
        if name in arguments:
            refused(call, arguments, name, damage)


@pytest.mark.parametrize("call", ["decode", "append"])
def test_only_some_block_sizes_are_served(checker, call):
    for size in [1, 8, 17, 24, 256]:
        shape = (4, 2, size, 16)
        arguments = CALLS[call][1]() | {"k_cache": torch.zeros(shape), "v_cache": torch.zeros(shape)}
        with pytest.raises(ValueError, match=r"^k_cache: block size"):
            CALLS[call][0](**arguments)


SIZES = st.integers(0, 3)
DTYPE = st.sampled_from((torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.int32, torch.int64))


@st.composite
def tensors(draw: st.DrawFn, like: Tensor) -> Tensor:
    """The right tensor, or one whose shape, dtype, strides or values are off."""
    if draw(st.integers(0, 3)):
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


def twin_of_decode(arguments: Arguments) -> Tensor:
    return reference.gqa_decode(**{name: value for name, value in arguments.items() if name not in {"out", "threads"}})


def twin_of_latent(arguments: Arguments) -> Tensor:
    return reference.mla_decode(**{name: value for name, value in arguments.items() if name not in {"out", "threads"}})


@FUZZ
@given(data=st.data())
@pytest.mark.parametrize("call", CALLS)
def test_refuses_or_is_right(server, call, data):
    face, make = CALLS[call]
    arguments = make()
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            arguments[name] = data.draw(tensors(value), label=name)
    if "window" in arguments:
        arguments["window"] = data.draw(st.sampled_from((None, 1, 4, 2**63, -1)), label="window")
    expected = {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    written = {"k_cache", "v_cache", "k_scale", "v_scale", "cache"} & arguments.keys()
    try:
        out = face(**arguments)
    except ValueError as refusal:
        assert str(refusal).split(":")[0] in arguments
    else:
        if call.startswith("append"):
            reference.kv_append(**{name: value for name, value in expected.items() if name != "threads"})
        elif call == "latent append":
            reference.mla_append(expected["cache"], expected["new"], expected["slots"])
        else:
            truth = twin_of_latent(expected) if call == "latent decode" else twin_of_decode(expected)
            # No weight is smaller than 2^-125, where torch's may be nothing.
            assert (out.double() - truth.double()).norm() <= 1e-2 * truth.double().norm() + 1e-20
    for name in written:
        assert torch.equal(arguments[name], expected[name])
