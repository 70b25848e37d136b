"""An install without the compiled extension gives the same numbers: every family, and every format of stored weights.

Compared in float32, in which the torch kernels' order of sums does not choose another token.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from moelight.core.policy import Policy, Shares
from moelight.engine.engine import Engine
from moelight.kernels import native
from tests.cases import thorough
from tests.engine.graphs import HOW, SIZES, STREAMED, prompts
from tests.engine.graphs import greedy as graph_greedy
from tests.engine.test_dense_models import FAMILIES as DENSE
from tests.engine.test_gguf import OF_FEW_BITS
from tests.engine.test_graph_models import FAMILIES as GRAPHS
from tests.engine.test_quantised import BUT_ATTENTION, SHAPE, but_attention
from tests.engines import Tiny
from tests.tiny import FAMILIES as NATIVE
from tests.tiny import hf_model, save_byte_tokenizer
from tests.weights.gguf_files import CONFIGS, save_numbers, write_gguf
from tests.weights.quantised import METHODS, quantise, quantise_stacks

pytestmark = pytest.mark.usefixtures("without_extension")
RESIDENT = Shares(host=1.0)
FEW = replace(HOW, max_tokens=3)
OF_EACH = [*zip(CONFIGS, ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "MXFP4"), strict=True)]


def test_the_extension_is_hidden() -> None:
    assert not native.available() and native.isa() is None


def tokens(directory: Path, **policy: Any) -> list[list[int]]:
    """Of the longest prompts, few of each: matrices of numbers are made anew in every pass."""
    with Engine(Policy(model=str(directory), **SIZES, **policy), device="cpu") as engine:
        return [list(completion.token_ids) for completion in engine.generate(prompts()[:2], FEW)]


def first(expected: list[list[int]]) -> list[list[int]]:
    return [ids[: FEW.max_tokens] for ids in expected[:2]]


@torch.no_grad()
def greedy(directory: Path) -> list[list[int]]:
    """What transformers generates from the prompts of `tokens`."""
    model = hf_model(directory)
    return first([graph_greedy(model, prompt) for prompt in prompts()[:2]])


@pytest.mark.parametrize("family", thorough(NATIVE, but=["mixtral"]))
def test_a_native_family_gives_the_tokens_of_transformers(family: str, tiny: Tiny) -> None:
    directory = tiny(family)
    assert tokens(directory, weights=STREAMED) == greedy(directory)


@pytest.mark.parametrize("family", thorough((*GRAPHS, *DENSE), but=("qwen3_next",)))
def test_a_module_graph_gives_the_tokens_of_transformers(family: str, checkpoints: Any) -> None:
    directory, expected = checkpoints(family)
    assert tokens(directory, weights=STREAMED) == first(expected)


@pytest.mark.parametrize("name", thorough(METHODS, but=("gptq int4 ordered",)))
def test_a_quantised_checkpoint_gives_the_tokens_of_its_numbers(name: str, tiny: Tiny, tmp_path: Path) -> None:
    quantised, values = quantise(tiny("mixtral", intermediate_size=96, **SHAPE), tmp_path, METHODS[name])
    assert tokens(quantised, weights=STREAMED) == tokens(values, weights=RESIDENT)


@pytest.mark.parametrize("name", thorough(BUT_ATTENTION, but=["int4"]))
def test_a_graph_runs_from_quantised_pages(name: str, checkpoints: Any, tmp_path: Path) -> None:
    quantised, values = quantise(checkpoints("deepseek_v2")[0], tmp_path, but_attention(name))
    assert tokens(quantised, weights=STREAMED) == tokens(values, weights=RESIDENT)


def test_stacks_of_gpt_oss_run_as_they_are_released(checkpoints: Any, tmp_path: Path) -> None:
    quantised, values = quantise_stacks(checkpoints("gpt_oss")[0], tmp_path)
    assert tokens(quantised, weights=STREAMED) == tokens(values, weights=RESIDENT)


@pytest.mark.parametrize(
    ("architecture", "experts"),
    thorough([*OF_EACH, ("gpt-oss", "Q8_0")], but=[*OF_EACH[::4]]),
)
def test_a_gguf_file_gives_the_tokens_of_its_numbers(architecture: str, experts: str, tmp_path: Path) -> None:
    path, values = tmp_path / "tiny.gguf", tmp_path / "numbers"
    write_gguf(path, architecture, experts=experts, vocab=True)
    save_numbers(values, architecture, experts=experts, dtype=torch.float32)
    save_byte_tokenizer(values)
    assert tokens(path, weights=STREAMED, weight_dtype="float32") == tokens(values, weights=RESIDENT)


def test_types_of_few_bits_give_the_tokens_of_their_numbers(tmp_path: Path) -> None:
    path, values = tmp_path / "tiny.gguf", tmp_path / "numbers"
    write_gguf(path, "qwen3moe", vocab=True, **OF_FEW_BITS)
    save_numbers(values, "qwen3moe", dtype=torch.float32, **OF_FEW_BITS)
    save_byte_tokenizer(values)
    assert tokens(path, weights=STREAMED, weight_dtype="float32") == tokens(values, weights=RESIDENT)
