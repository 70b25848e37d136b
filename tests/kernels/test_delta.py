"""The gated delta rule and its convolution: near the truth in every dtype and instruction set, and the same for a row
in any company, however its sequence is cut into calls."""

from __future__ import annotations

from itertools import accumulate, product

import pytest
import torch

from moelight.kernels import reference
from moelight.kernels.delta import cpu_causal_conv, cpu_delta_rule
from moelight.kernels.norm import cpu_rms_norm

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


def error(result, expected):
    return ((result.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def starts_of(counts):
    return torch.tensor([*accumulate(counts, initial=0)], dtype=torch.int32)


def conv_case(counts, channels, taps, dtype):
    rows = sum(counts)
    wide = torch.randn(rows, channels + 8).to(dtype)
    states = [torch.randn(taps - 1, channels).to(dtype) for _ in counts]
    return wide[:, 4 : 4 + channels], torch.randn(channels, taps).to(dtype), torch.randn(channels).to(dtype), states


def rule_case(counts, shape, dtype, *, channelwise=False):
    """q, k and v are views of one product, as a module's are."""
    rows, (key_heads, heads, key_dim, value_dim) = sum(counts), shape
    sizes = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
    parts = torch.randn(rows, sum(sizes)).to(dtype).split(sizes, dim=1)
    q, k, v = (x.unflatten(1, (-1, size)) for x, size in zip(parts, (key_dim, key_dim, value_dim), strict=True))
    decay = -torch.rand(rows, heads, key_dim if channelwise else 1)
    states = [torch.randn(heads, key_dim, value_dim) for _ in counts]
    return q, k, v, decay, torch.rand(rows, heads), states


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("silu", [False, True])
def test_convolution_is_near_the_truth(server, dtype, silu):
    for counts, channels, taps in [((1,), 1, 1), ((5, 1, 9), 40, 4), ((2, 0, 3), 300, 3), ((7,), 513, 2), ((0,), 8, 4)]:
        x, weight, bias, states = conv_case(counts, channels, taps, dtype)
        for added in (bias, None):
            selected, true = [state.clone() for state in states], [state.double() for state in states]
            result = cpu_causal_conv(x, weight, added, selected, starts_of(counts), silu=silu)
            bounds = starts_of(counts).tolist()
            wide = None if added is None else added.double()
            expected = reference.causal_conv(x.double(), weight.double(), wide, true, bounds, silu=silu)
            assert result.dtype == dtype
            assert error(result, expected) <= TOLERANCE[dtype]
            assert all(torch.equal(one.double(), other) for one, other in zip(selected, true, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channelwise", [False, True])
def test_rule_is_near_the_truth(server, dtype, channelwise):
    for counts, shape in [
        ((1,), (1, 1, 1, 1)),
        ((5, 1, 19), (2, 4, 8, 16)),
        ((3, 0, 2), (1, 3, 20, 67)),
        ((33,), (2, 2, 64, 64)),
        ((0,), (1, 1, 8, 8)),
    ]:
        *inputs, decay, beta, states = rule_case(counts, shape, dtype, channelwise=channelwise)
        selected, true = [state.clone() for state in states], [state.double() for state in states]
        result = cpu_delta_rule(*inputs, decay, beta, selected, starts_of(counts))
        exact = [item.double() for item in (*inputs, decay, beta)]
        expected = reference.delta_rule(*exact, true, starts_of(counts).tolist())
        assert result.dtype == dtype
        assert error(result, expected) <= TOLERANCE[dtype]
        assert all(error(one, other) <= 1e-5 for one, other in zip(selected, true, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_in_any_company_and_any_parts(isa, dtype):
    counts = (40, 1, 25, 3)
    x, weight, bias, before = conv_case(counts, 600, 4, dtype)
    *inputs, decay, beta, states = rule_case(counts, (2, 4, 32, 96), dtype)
    rows, bounds = (*inputs, decay, beta), starts_of(counts).tolist()
    past, retained = [state.clone() for state in before], [state.clone() for state in states]
    convolved = cpu_causal_conv(x, weight, bias, past, starts_of(counts), silu=True, threads=2)
    together = cpu_delta_rule(*rows, retained, starts_of(counts), threads=2)
    for number, cuts in ((0, (16, 17, 33)), (2, (1, 2, 24)), (3, (2,))):
        for first, last in zip((0, *cuts), (*cuts, counts[number]), strict=True):
            some, alone = slice(bounds[number] + first, bounds[number] + last), starts_of([last - first])
            conv = cpu_causal_conv(x[some], weight, bias, [before[number]], alone, silu=True, threads=1)
            rule = cpu_delta_rule(*(row[some] for row in rows), [states[number]], alone, threads=1)
            assert torch.equal(conv, convolved[some])
            assert torch.equal(rule, together[some])
        assert torch.equal(before[number], past[number])
        assert torch.equal(states[number], retained[number])


def test_what_is_not_a_number_stays_in_its_sequence(server):
    *inputs, decay, beta, states = rule_case((3, 3), (1, 2, 8, 8), torch.float32)
    inputs[2][1, 0, 5] = torch.nan
    result = cpu_delta_rule(*inputs, decay, beta, states, starts_of((3, 3)))
    assert result[1, 0].isnan().any()
    assert result[3:].isfinite().all()
    assert states[1].isfinite().all()


def test_a_decay_to_nothing_forgets(server):
    *inputs, decay, beta, states = rule_case((2,), (1, 1, 8, 8), torch.float32)
    decay[1] = -1e4
    (fresh,) = cpu_delta_rule(*(x[1:] for x in (*inputs, decay, beta)), [torch.zeros(1, 8, 8)], starts_of((1,)))
    result = cpu_delta_rule(*inputs, decay, beta, states, starts_of((2,)))
    assert torch.allclose(result[1], fresh)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gated_norm_is_near_the_truth(server, dtype):
    for shape in [(3, 48), (300, 64), (4, 6, 33), (0, 8)]:
        x, gate, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
        result = cpu_rms_norm(x, weight, 1e-6, gate=gate)
        expected = reference.rms_norm(x.double(), weight.double(), 1e-6, gate=gate.double())
        assert error(result, expected) <= TOLERANCE[dtype]
        if len(shape) == 2 and len(x) and server != "torch":
            assert torch.equal(cpu_rms_norm(x[1:2], weight, 1e-6, gate=gate[1:2]), result[1:2])


CONV = {
    "x": torch.zeros(3, 8),
    "weight": torch.zeros(8, 4),
    "bias": torch.zeros(8),
    "states": [torch.zeros(3, 8)],
    "starts": starts_of((3,)),
    "out": torch.zeros(3, 8),
}
RULE = {
    "q": torch.zeros(3, 2, 8),
    "k": torch.zeros(3, 2, 8),
    "v": torch.zeros(3, 4, 6),
    "decay": torch.zeros(3, 4, 1),
    "beta": torch.zeros(3, 4),
    "states": [torch.zeros(4, 8, 6)],
    "starts": starts_of((3,)),
    "out": torch.zeros(3, 4, 6),
}
WRONG = [
    torch.zeros(7),
    torch.zeros(3, 9),
    torch.zeros(4, 5, 7),
    torch.zeros(3, 2, 8, dtype=torch.float64),
    torch.zeros(3, 2, 8, dtype=torch.bfloat16),
    torch.zeros(3, 8, dtype=torch.bfloat16),
    torch.zeros(8, 2, 3).transpose(0, 2),
    torch.zeros(1, 8).expand(3, 8),
    torch.zeros(3, 2, 8, device="meta"),
    torch.tensor([0, 4], dtype=torch.int32),
    torch.tensor([0, 3, 2, 3], dtype=torch.int32),
]


@pytest.mark.parametrize("good", [CONV, RULE], ids=["convolution", "rule"])
def test_a_wrong_argument_is_named(checker, good):
    for name, wrong in product(good, WRONG):
        arguments = good | {name: [wrong] if name == "states" else wrong}
        with pytest.raises(ValueError, match=rf"^({'|'.join(good)}): "):
            cpu_causal_conv(**arguments, silu=True) if good is CONV else cpu_delta_rule(**arguments)


@pytest.mark.parametrize("good", [CONV, RULE], ids=["convolution", "rule"])
def test_each_sequence_has_a_state_of_its_own(checker, good):
    call = (lambda **item: cpu_causal_conv(**item, silu=True)) if good is CONV else cpu_delta_rule
    same = good["states"] * 2
    with pytest.raises(ValueError, match=r"^states: two sequences have the same one"):
        call(**good | {"states": same, "starts": starts_of((1, 2))})
    with pytest.raises(ValueError, match=r"^states: must be 2, one a sequence, are 1"):
        call(**good | {"starts": starts_of((1, 2))})


def test_heads_and_taps_out_of_bounds_are_named(checker):
    with pytest.raises(ValueError, match=r"^v: its heads must be a multiple of those of q"):
        cpu_delta_rule(**RULE | {"v": torch.zeros(3, 3, 6)})
    with pytest.raises(ValueError, match=r"^weight: must have 1 to 16 taps"):
        cpu_causal_conv(**CONV | {"weight": torch.zeros(8, 17)}, silu=True)
