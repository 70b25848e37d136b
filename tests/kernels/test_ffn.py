"""The face of experts: right for every stored weight, activation and odd shape, and the same in any company."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moelight.kernels import quantized
from moelight.kernels.activations import Activation, activation_of
from moelight.kernels.ffn import cpu_expert_ffn
from tests.fuzz import fuzz
from tests.kernels.paged import TOLERANCE, relative_error
from tests.kernels.stored import KINDS, LANES, generator, refused, serving, stored

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = (
    "silu",
    "gelu_tanh",
    "swiglu_oai",
    Activation("gelu"),
    Activation("relu2", shift=0.5),
    Activation(limit=0.5),
    Activation(limit=0.5, late=True),
)


@pytest.fixture(params=[*LANES, "torch"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(request.param, monkeypatch):
        yield request.param


@pytest.fixture(params=LANES or [pytest.param("none", marks=pytest.mark.skip(reason="the extension is not built"))])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(request.param, monkeypatch):
        yield request.param


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Tokens sorted by expert and the experts they go to."""

    x: Tensor
    counts: Sequence[int]
    up: Sequence[Tensor]
    down: Sequence[Tensor]
    up_bias: Sequence[Tensor] | None = None
    down_bias: Sequence[Tensor] | None = None

    @property
    def offsets(self) -> Tensor:
        return torch.tensor([0, *self.counts]).cumsum(0).int()

    def arguments(self) -> dict[str, Any]:
        """Those of the face; experts without tokens are None."""

        def present(tensors: Sequence[Tensor] | None) -> list[Tensor | None] | None:
            if tensors is None:
                return None
            return [tensor if count else None for tensor, count in zip(tensors, self.counts, strict=True)]

        return {
            "x": self.x,
            "gate_up": present(self.up),
            "down": present(self.down),
            "offsets": self.offsets,
            "gate_up_bias": present(self.up_bias),
            "down_bias": present(self.down_bias),
        }

    def truth(self, activation: str | Activation) -> Tensor:
        def wide(tensors: Sequence[Tensor] | None) -> list[Tensor] | None:
            return None if tensors is None else [tensor.double() for tensor in tensors]

        exact = replace(
            self,
            x=self.x.double(),
            up=[weight.double() for weight in self.up],
            down=[weight.double() for weight in self.down],
            up_bias=wide(self.up_bias),
            down_bias=wide(self.down_bias),
        )
        arguments = exact.arguments()
        arguments["offsets"] = arguments["offsets"].tolist()
        return quantized.expert_ffn(**arguments, activation=activation_of(activation))


def layer(
    counts: Sequence[int],
    hidden: int,
    inner: int,
    *,
    kind: str = "bfloat16",
    dtype: torch.dtype = torch.bfloat16,
    bias: torch.dtype | None = None,
) -> Layer:
    randn = generator(len(counts))
    experts = range(len(counts))
    return Layer(
        x=randn(sum(counts), hidden).to(dtype),
        counts=counts,
        up=[stored(kind, 2 * inner, hidden, seed=e) for e in experts],
        down=[stored(kind, hidden, inner, seed=99 + e) for e in experts],
        up_bias=None if bias is None else [randn(2 * inner).to(bias) for _ in experts],
        down_bias=None if bias is None else [randn(hidden).to(bias) for _ in experts],
    )


def check(call: Layer, activation: str | Activation = "silu", **rest: Any) -> None:
    result, expected = cpu_expert_ffn(**call.arguments(), activation=activation, **rest), call.truth(activation)
    assert result.dtype == call.x.dtype
    first = 0
    for count in call.counts:
        rows = slice(first, first + count)
        assert relative_error(result[rows], expected[rows]) <= TOLERANCE[call.x.dtype]
        first += count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_stored_form_and_size(server, kind, dtype):
    for sizes in ((64, 32), (34, 70), (256, 130), (2, 2)):
        check(layer([1, 0, 7, 30, 0], *sizes, kind=kind, dtype=dtype), threads=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations_and_biases(server, dtype, activation):
    for bias in (None, torch.float32, dtype):
        call = layer([3, 0, 20], 66, 48, dtype=dtype, bias=bias)
        check(replace(call, x=call.x * 3), activation)


def test_ragged_counts(server):
    for counts in [[], [0, 0, 0], [1], [513], [0, 700, 0, 400, 1], [1] * 40, [96, 97, 400], [16, 17, 0, 511, 2]]:
        check(layer(counts, 64, 32), threads=2)


def test_types_of_weights_may_differ(server):
    plain = layer([5, 6], 64, 96, kind="bfloat16")
    check(replace(plain, down=layer([5, 6], 64, 96, kind="float16").down))
    check(replace(plain, up=layer([5, 6], 64, 96, kind="float32").up))


def test_agrees_with_the_twin_in_use(server):
    call = layer([4, 0, 9], 64, 96, dtype=torch.float32, kind="float32")
    weights = call.up, call.down
    expected = quantized.expert_ffn(call.x, *weights, call.offsets.tolist())
    assert relative_error(cpu_expert_ffn(call.x, *weights, call.offsets), expected.double()) <= 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_may_be_x_and_rows_may_be_strided(server, dtype):
    call = layer([30, 0, 600, 5], 70, 40, dtype=dtype)
    expected = cpu_expert_ffn(**call.arguments())
    fused = torch.zeros(635, 80, dtype=dtype)
    rows = fused[:, 5:75]
    rows.copy_(call.x)
    assert cpu_expert_ffn(**(call.arguments() | {"x": rows}), out=rows) is rows
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5} if server == "torch" else {"rtol": 0.0, "atol": 0.0}
    )  # torch's order varies
    torch.testing.assert_close(rows, expected, **tolerance)
    assert not fused[:, :5].any()
    assert not fused[:, 75:].any()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_large_gates_saturate(server, activation):
    call = layer([8], 64, 64, dtype=torch.float32, kind="float32")
    for factor in (1e-6, 50.0, 1000.0):
        scaled = replace(call, x=call.x * factor)
        result = cpu_expert_ffn(**scaled.arguments(), activation=activation)
        assert relative_error(result, scaled.truth(activation)) <= 1e-5


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_poison_stays_where_it_is(server, activation):
    call = layer([10, 10], 64, 32)
    call.x[3, 5] = float("nan")
    result = cpu_expert_ffn(**call.arguments(), activation=activation).isfinite()
    expected = torch.ones(20, 64, dtype=torch.bool)
    expected[3] = False
    assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_the_same_in_any_company(lanes, kind, dtype):
    counts = [1, 200, 0, 7, 600]
    call = layer(counts, 96, 70, kind=kind, dtype=dtype)
    together = cpu_expert_ffn(**call.arguments(), threads=2)
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    source = torch.Generator().manual_seed(7)
    for many, threads in ((1, 1), (1, 2), (5, 3), (60, 1), (700, 2)):
        chosen = torch.randperm(len(owner), generator=source)[:many]
        chosen = chosen[owner[chosen].argsort(stable=True)]
        some = replace(call, x=call.x[chosen], counts=torch.bincount(owner[chosen], minlength=len(counts)).tolist())
        assert torch.equal(cpu_expert_ffn(**some.arguments(), threads=threads), together[chosen])


FORMS = (
    "transposed",
    "transposed, interleaved",
    "interleaved",
    "apart",
    "apart, down transposed",
    "gate_up transposed",
)
MIXES = pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((str(dtype).removeprefix("torch."), dtype) for dtype in DTYPES),
        ("bfloat16", DTYPES[0]),
        ("float32", DTYPES[1]),
    ],
    ids=str,
)


def transposed(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The same matrices, their columns contiguous and apart."""

    def turned(weight: Tensor) -> Tensor:
        rows, depth = weight.shape
        room = torch.full((depth, rows + 5), 99.0).to(weight.dtype)
        room[:, 2 : 2 + rows] = weight.t()
        return room[:, 2 : 2 + rows].t()

    return [None if weight is None else turned(weight) for weight in tensors]


def alternating(tensors: Sequence[Tensor | None] | None) -> list[Tensor | None] | None:
    """Rows of the second half between those of the first."""

    def mixed(both: Tensor) -> Tensor:
        return torch.stack(both.chunk(2), dim=1).flatten(0, 1)

    return None if tensors is None else [None if tensor is None else mixed(tensor) for tensor in tensors]


def in_form(call: Layer, form: str) -> dict[str, Any]:
    """The arguments of ``call``, its experts in another form."""
    inputs = call.arguments()
    if "interleaved" in form:
        inputs |= {name: alternating(inputs[name]) for name in ("gate_up", "gate_up_bias")} | {"interleaved": True}
    if form.startswith("apart"):
        for first, second in (("gate_up", "up"), ("gate_up_bias", "up_bias")):
            if (both := inputs[first]) is not None:
                halves = [(None, None) if item is None else item.chunk(2) for item in both]
                inputs[first], inputs[second] = ([pair[i] for pair in halves] for i in (0, 1))
    if form in {"transposed", "transposed, interleaved", "gate_up transposed"}:
        inputs["gate_up"] = transposed(inputs["gate_up"])
    if form in {"transposed", "transposed, interleaved", "apart, down transposed"}:
        inputs["down"] = transposed(inputs["down"])
    return inputs


@MIXES
@pytest.mark.parametrize("form", FORMS)
def test_every_form(server, form, kind, dtype):
    for number, sizes in enumerate(((64, 32), (34, 70), (200, 130), (3, 1))):
        call = layer([1, 0, 7, 30, 3], *sizes, kind=kind, dtype=dtype, bias=(None, dtype, torch.float32)[number % 3])
        result = cpu_expert_ffn(**in_form(call, form), activation="swiglu_oai", threads=2)
        assert relative_error(result, call.truth("swiglu_oai")) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("curve", ["relu2", "silu"])
def test_without_a_gate(server, curve, dtype):
    activation = Activation(curve, gated=False)
    for bias in (None, dtype):
        call = layer([2, 0, 40, 130], 66, 70, dtype=dtype, bias=bias)
        halves = replace(call, up=[weight[:70] for weight in call.up])
        if call.up_bias is not None:
            halves = replace(halves, up_bias=[bia[:70] for bia in call.up_bias])
        check(halves, activation)
        inputs = halves.arguments()
        result = cpu_expert_ffn(**(inputs | {"gate_up": transposed(inputs["gate_up"])}), activation=activation)
        assert relative_error(result, halves.truth(activation)) <= TOLERANCE[dtype]


@MIXES
@pytest.mark.parametrize("form", ["transposed", "transposed, interleaved", "apart, down transposed"])
def test_a_token_is_the_same_in_any_company_in_other_forms(lanes, form, kind, dtype):
    counts = [1, 100, 0, 7, 97, 3, 24, 25, 48, 13]
    call = layer(counts, 96, 330, kind=kind, dtype=dtype, bias=dtype)
    together = cpu_expert_ffn(**in_form(call, form), threads=2)
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    source = torch.Generator().manual_seed(7)
    for many, threads in ((1, 1), (5, 2), (20, 3), (60, 1), (250, 2)):
        chosen = torch.randperm(len(owner), generator=source)[:many]
        chosen = chosen[owner[chosen].argsort(stable=True)]
        some = replace(call, x=call.x[chosen], counts=torch.bincount(owner[chosen], minlength=len(counts)).tolist())
        assert torch.equal(cpu_expert_ffn(**in_form(some, form), threads=threads), together[chosen])


def test_other_forms_are_refused_where_they_are_none(checker):
    call = layer([2, 0, 3], 64, 32, kind="float32", dtype=torch.float32, bias=torch.float32)
    apart, turned = in_form(call, "apart"), in_form(call, "transposed")
    for wrong, name in (
        (apart | {"interleaved": True}, "interleaved"),
        (apart | {"activation": Activation(gated=False)}, "up"),
        (apart | {"up_bias": None}, "up_bias"),
        (call.arguments() | {"up_bias": call.arguments()["gate_up_bias"]}, "up_bias"),
        (apart | {"up": [*apart["up"][:-1], apart["up"][-1][:-1]]}, "up"),
        (turned | {"gate_up": [item if item is None else item[:, ::2] for item in turned["gate_up"]]}, "gate_up"),
    ):
        refused(cpu_expert_ffn, wrong, {name})


def arguments() -> dict[str, Any]:
    call = layer([2, 0, 3], 64, 32, dtype=torch.float32, bias=torch.float32)
    return call.arguments() | {"activation": "silu", "out": torch.zeros(5, 64), "threads": 2}


LISTS = ("gate_up", "down", "gate_up_bias", "down_bias")
ONE: dict[str, Callable[[Any], Any]] = {
    "missing": lambda _: None,
    "a number": lambda _: 3,
    "on meta": lambda t: t.to("meta"),
    "float64": lambda t: t.double(),
    "int16": lambda t: t.to(torch.int16),
    "a dimension more": lambda t: t.unsqueeze(0),
    "no dimension": lambda t: t.flatten()[0],
    "one row more": lambda t: torch.cat((t, t[:1])),
    "one row for all": lambda t: t[:1].expand(t.shape),
    "every other element": lambda t: torch.stack((t, t), dim=-1)[..., 0],
    "more columns": lambda t: torch.cat((t, t), dim=-1),
    "another dtype": lambda t: t.half(),
}
WHOLE: dict[str, Callable[[Any], Any]] = {
    "a tensor": lambda tensors: tensors[0],
    "a number": lambda _: 3,
    "one more": lambda tensors: [*tensors, None],
    "one less": lambda tensors: tensors[:-1],
    "empty": lambda _: [],
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("expert", [0, 2])
def test_a_wrong_tensor_of_a_list_is_named(checker, name, expert):
    for damage in ONE.values():
        wrong = arguments()
        wrong[name][expert] = damage(wrong[name][expert])
        kind = name.split("_")[-1]
        refused(cpu_expert_ffn, wrong, {name, name.removesuffix(f"_{kind}"), "down"})


@pytest.mark.parametrize("name", LISTS)
def test_a_wrong_list_is_named(checker, name):
    for damage in WHOLE.values():
        wrong = arguments()
        wrong[name] = damage(wrong[name])
        refused(cpu_expert_ffn, wrong, {name})


def test_other_wrong_arguments_are_named(checker):
    for name, value in [
        ("offsets", torch.tensor([0, 2, 2, 6], dtype=torch.int32)),
        ("offsets", torch.tensor([0, 2, 2, 4], dtype=torch.int32)),
        ("offsets", torch.tensor([1, 2, 2, 5], dtype=torch.int32)),
        ("offsets", torch.tensor([0, 3, 2, 5], dtype=torch.int32)),
        ("offsets", torch.tensor([0, -1, 2, 5], dtype=torch.int32)),
        ("offsets", torch.tensor([0, 2, 2, 5])),
        ("offsets", torch.zeros(0, dtype=torch.int32)),
        ("offsets", [0, 2, 2, 5]),
        ("offsets", torch.tensor([0, 9, 2, 9, 2, 9, 5, 9], dtype=torch.int32)[::2]),
        ("activation", "relu"),
        ("activation", 3),
        ("threads", 0),
        ("x", None),
        ("x", torch.zeros(5, 64).double()),
        ("x", torch.zeros(64, 5).t()),
        ("out", torch.zeros(5, 65)),
        ("out", torch.zeros(5, 64).half()),
    ]:
        refused(cpu_expert_ffn, arguments() | {name: value}, {name})


def test_offsets_for_another_number_of_experts(checker):
    refused(cpu_expert_ffn, arguments() | {"offsets": torch.tensor([0, 2, 5], dtype=torch.int32)}, {"gate_up"})


@fuzz(60)
@given(data=st.data())
def test_experts_are_refused_or_right(server, data):
    """Sizes that may not fit each other, and entries that may be missing."""
    size = st.sampled_from((4, 4, 4, 4, 5, 0))
    hidden, inner = data.draw(size, label="H"), data.draw(size, label="I")
    counts = data.draw(st.lists(st.integers(0, 3), max_size=4), label="counts")
    kind = data.draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)), label="kind")

    def tensors(*shape: int) -> list[Tensor | None]:
        made: list[Tensor | None] = []
        for count in counts:
            off = data.draw(st.sampled_from((0, 0, 0, 0, 0, 0, 0, 1)))
            made.append(torch.ones(shape[0] + off, *shape[1:]) if count or off else None)
        return made

    def stored_as(tensors: list[Tensor | None]) -> list[Tensor | None]:
        return [None if tensor is None else tensor.to(kind) for tensor in tensors]

    call: dict[str, Any] = {
        "x": torch.ones(sum(counts), hidden),
        "gate_up": stored_as(tensors(2 * inner, hidden)),
        "down": stored_as(tensors(hidden, inner)),
    }
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    try:
        result = cpu_expert_ffn(**call, offsets=offsets)
    except ValueError as refusal:
        assert str(refusal).split(":")[0] in call
        return
    expected = quantized.expert_ffn(**call, offsets=offsets.tolist())
    assert relative_error(result, expected.double()) <= 1e-5
