"""Kernels are launched before passes need them: the same programs, and where one fails torch computes."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moelight.core.errors import BudgetError
from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.engine.engine import Engine
from moelight.kernels.gpu import routing, serving, tiles
from moelight.models import decoder
from moelight.models.moe import table_of
from moelight.runtime import moe_ops, warm_up
from moelight.runtime.machine import Machine
from tests.engines import Tiny
from tests.shapes import examples
from tests.weights.quantised import METHODS, quantise

if not serving.triton_available():
    pytest.skip(serving.triton_reason(), allow_module_level=True)

Program = tuple[Any, ...]
HOW = SamplingParams(max_tokens=3, ignore_eos=True)
MOST_ROWS = 64


def program_of(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> Program:
    """What Triton compiles one program for: constants, types, and what it specialises on of the other arguments."""
    plain = set(kernel.kwargs.get("do_not_specialize") or ())

    def kind(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if isinstance(value, int) and name not in plain:
            return value == 1, value % 16 == 0
        return type(value)

    inputs = tuple(kind(name, value) for name, value in zip(kernel.arg_names, args, strict=False))
    return (kernel.fn.__name__, inputs, *sorted((name, str(value)) for name, value in constants.items()))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[Program]]]:
    """The twin takes a card's way through experts and routers; programs launched while it loads, and in passes."""
    from triton.runtime.interpreter import InterpretedFunction

    launched: dict[str, set[Program]] = {"loading": set(), "passes": set()}
    run, play = InterpretedFunction.run, warm_up._play
    loading = [False]

    def noted(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        launched["loading" if loading[0] else "passes"].add(program_of(self, args, constants))
        if self.fn.__name__ in {
            "route",
            "sort_rows",
        }:  # others take seconds; experts then add nothing
            run(self, *args, grid=grid, warmup=warmup, **constants)

    def played(*args: Any) -> None:
        loading[0] = True
        play(*args)
        loading[0] = False

    def route(logits: Tensor, spec: Any) -> tuple[Tensor, Tensor]:
        return routing.route(
            logits, spec.top_k, normalize=spec.normalize, weights_in_model_dtype=spec.weights_in_model_dtype
        )

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    monkeypatch.setattr(warm_up, "_play", played)
    monkeypatch.setattr(Machine, "compiles", property(lambda _: True))
    monkeypatch.setattr(decoder, "route_tokens", route)
    monkeypatch.setattr(moe_ops, "grouped_pages", lambda weights, _, by: table_of(weights, by))
    yield launched
    serving._refused.clear()


def policy_for(model: Path, **sizes: Any) -> Policy:
    return Policy(
        model=str(model),
        batch_size=4,
        micro_batch_size=2,
        micro_batch_tokens=MOST_ROWS,
        ffn_device="gpu",
        weights=Shares(device=0.5, host=0.5),
        residents="static",
        **sizes,
    )


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Path:
    return tiny("mixtral", num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=3, dtype="float16")


def test_passes_launch_the_programs_that_were_launched_while_loading(
    model: Path, card: dict[str, set[Program]]
) -> None:
    """Prompts of every size class of tiles, and decoding."""
    with Engine(policy_for(model), device="twin") as engine:
        assert card["loading"] and not card["passes"]
        done = engine.generate([[65] * MOST_ROWS, [66] * 30, [67, 68], [69] * 11], HOW)
        assert [item.completion_tokens for item in done] == [3] * 4
    assert card["passes"] == card["loading"]
    forms = [dict(program[2:])["HOW"] for program in card["loading"] if program[0] == "grouped"]
    assert {re.search(r"\brows=(\d+)", form).group(1) for form in forms} == {"16", "32", "64"}  # type: ignore[union-attr]


def test_every_format_of_a_model_is_warmed_up(tiny: Tiny, card: dict[str, set[Program]], tmp_path: Path) -> None:
    """The experts of the last layer are plain numbers."""
    sizes = {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 3, "hidden_size": 64}
    plain, method = tiny("mixtral", dtype="float16", head_dim=16, intermediate_size=64, **sizes), METHODS["fp8 blocks"]
    retained = {"modules_to_not_convert": ["layers.1.block_sparse_moe"]}
    quantised, _ = quantise(plain, tmp_path, replace(method, config=method.config | retained))
    with Engine(policy_for(quantised), device="twin") as engine:
        assert engine.generate([[65] * MOST_ROWS, [67, 68]], HOW)[0].completion_tokens == 3
    assert card["passes"] <= card["loading"]
    forms = {dict(program[2:])["FORM"] for program in card["passes"] if program[0] == "grouped"}
    assert {re.search(r"codes_type=triton\.language\.(\w+)", form).group(1) for form in forms} == {"float16", "uint8"}  # type: ignore[union-attr]


def test_where_a_kernel_fails_torch_computes_and_says_so(
    model: Path, card: dict[str, set[Program]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from moelight.kernels.gpu import grouped_triton

    monkeypatch.setattr(serving, "_refused", {})
    run = type(grouped_triton.grouped).run

    def broken(self: Any, *args: Any, **constants: Any) -> Any:
        if self is grouped_triton.grouped and constants["HOW"].rows == 32:
            raise RuntimeError("out of resource: shared memory\nmore of it")
        return run(self, *args, **constants)

    monkeypatch.setattr(type(grouped_triton.grouped), "run", broken)
    with caplog.at_level(logging.WARNING), Engine(policy_for(model), device="twin") as engine:
        card["loading"].clear()
        assert engine.generate([[65] * MOST_ROWS], HOW)[0].completion_tokens == 3
    assert not card["passes"]
    assert [record.getMessage() for record in caplog.records] == [
        "cpu: torch computes: a triton kernel failed: out of resource: shared memory"
    ]
    served, reason = serving.serves(torch.device("cpu"), torch.float16)
    assert (served, reason) == (False, "a triton kernel failed: out of resource: shared memory")


def test_an_error_that_is_not_a_kernels_is_raised(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton does not serve, and where memory ends; nothing is tried again then."""
    monkeypatch.setattr(Machine, "compiles", property(lambda _: True))
    monkeypatch.setattr(serving, "interpreting", lambda: False)
    begin = decoder.NativeDecoder.begin

    def failing(error: Exception) -> Callable[..., None]:
        def fail(self: decoder.NativeDecoder, token_ids: Tensor, *rest: Any) -> None:
            calls.append(len(token_ids))
            begin(self, token_ids, *rest)
            raise error

        return fail

    for error, seen in (
        (RuntimeError("a wire is loose"), pytest.raises(RuntimeError, match="a wire is loose")),
        (
            torch.OutOfMemoryError("no"),
            pytest.raises(BudgetError, match=r"more device memory than is left: .*; lower --"),
        ),
    ):
        calls: list[int] = []
        monkeypatch.setattr(decoder.NativeDecoder, "begin", failing(error))
        with seen:
            Engine(policy_for(model), device="twin")
        assert calls == [1]


@pytest.mark.parametrize(("schedule", "attention"), [("cgopipe", "cpu"), ("module", "gpu")])
def test_warming_up_changes_no_token(
    tiny: Tiny, schedule: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("qwen3_moe")  # dense layers too
    prompts = [[65] * 40, [66, 67], [68] * 9]
    result = []
    for compiles in (False, True):
        monkeypatch.setattr(Machine, "compiles", property(lambda _, result=compiles: result))
        policy = policy_for(model, schedule=schedule, attention_device=attention)
        with Engine(policy, device="twin") as engine:
            result.append([item.token_ids for item in engine.generate(prompts, HOW)])
    assert result[0] == result[1]


@examples(60)
@given(
    experts=st.integers(1, 256),
    top_k=st.integers(1, 16),
    max_tokens=st.integers(1, 4096),
    unpacks=st.booleans(),
    card=st.sampled_from([(7, 5), (8, 0), (8, 9), (9, 0), (10, 0)]),
)
def test_no_tile_is_chosen_between_doublings_only(
    experts: int, top_k: int, max_tokens: int, unpacks: bool, card: tuple[int, int]
) -> None:
    def chosen(tokens: int) -> tuple[tiles.Tile, ...]:
        rows = tokens * min(top_k, experts)
        mean = rows / min(rows, experts)
        return tuple(tiles.choose(card, itemsize=2, mean_rows=mean, matrices=n, unpacks=unpacks) for n in (1, 2))

    counts = list(warm_up.doublings(max_tokens))
    assert counts[0] == 1 and counts[-1] == max_tokens and len(counts) <= max_tokens.bit_length() + 1
    assert {chosen(tokens) for tokens in range(1, max_tokens + 1)} == {chosen(tokens) for tokens in counts}


@pytest.mark.gpu
def test_no_pass_compiles_on_a_real_device(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    compiled: list[str] = []

    def note(*, repr: str, **_: Any) -> None:  # noqa: A002 - triton's name
        compiled.append(repr)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    with Engine(policy_for(model), device="auto") as engine:
        compiled.clear()
        engine.generate([[65] * MOST_ROWS, [66] * 30, [67, 68], [69] * 11], HOW)
    assert compiled == []
