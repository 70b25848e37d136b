"""All layers of a dense module graph in one call give the logits of their phases, to the bit, and serve every pass that
decodes; short prompts are two calls a layer, and what no call computes runs in phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from moelight.core.policy import Shares
from moelight.kernels import native
from moelight.kernels.layer import DecoderLayer
from moelight.models.graph import decoder
from moelight.models.graph.layers import UsualLayer
from moelight.runtime.ops import Operations
from tests.cases import thorough
from tests.engine.gguf_architectures import save_checkpoint
from tests.engine.test_gguf_architectures import write_file
from tests.engines import all_pairs, forced

pytestmark = pytest.mark.skipif(not native.available(), reason="the extension alone has the call")
FAMILIES = {  # what each has that others have not
    "llama": "nothing",
    "qwen2": "biases of queries, keys and values",
    "qwen3": "norms of heads",
    "gemma2": "norms behind that are rounded once, windows in every other layer, soft caps",
    "gemma3": "two rotary embeddings, norms of heads that are rounded once",
}
STORED = (("plain", "auto"), ("Q8_0", "auto"), ("Q8_0", "int8"), ("Q4_1", "int8"), ("Q4_1", "auto"))
CASES = [(*case[:2], *case[2], case[3]) for case in all_pairs(FAMILIES, ("float32", "bfloat16"), STORED, (1, 5))]
QUICK = [("gemma3", "bfloat16", "Q4_1", "auto", 5)]
CALLS = {"gemma2": 4, "gemma3": 2}  # of a pass: layers with a window have another block table
Write = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Writes a tiny model of an architecture, as transformers saves it or with matrices in a type of GGUF."""
    root = tmp_path_factory.mktemp("dense")

    def written(name: str, kind: str) -> Path:
        directory, path = root / name, root / f"{name}-{kind}.gguf"
        if not directory.exists():
            directory.mkdir()
            save_checkpoint(name, directory)
        if kind == "plain":
            return directory
        if not path.exists():
            write_file(name, directory, path, rounds=kind)
        return path

    return written


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of layers of every call."""
    made: list[int] = []
    together = decoder.decode_layers

    def counted(*inputs: Any, **more: Any) -> None:
        made.append(len(inputs[0]))
        together(*inputs, **more)

    monkeypatch.setattr(decoder, "decode_layers", counted)
    return made


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def sequences(count: int) -> list[list[int]]:
    random = Random(count)
    return [[random.randrange(200) for _ in range(random.randint(9, 20))] for _ in range(count)]


def logits_of(model: Path, batch: int, **policy: Any) -> list[Tensor]:
    """After a prompt of two tokens and after every later one, which decodes."""
    sizes: dict[str, Any] = {"batch_size": batch, "micro_batch_size": batch, "kv_tokens": 64 * batch}
    with forced(model, **sizes, **{"weights": Shares(host=1.0), **policy}) as engine:
        return engine.logits(sequences(batch), [2] * batch)


@pytest.mark.parametrize(("name", "dtype", "kind", "activations", "batch"), thorough(CASES, but=QUICK))
def test_logits_are_those_of_the_phases(
    name: str,
    dtype: str,
    kind: str,
    activations: str,
    batch: int,
    write: Write,
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, how = write(name, kind), {"weight_dtype": dtype, "activations": activations}
    result = logits_of(model, batch, **how)
    passes = (max(map(len, sequences(batch))) - 2) * CALLS.get(name, 1)
    assert len(calls) == passes
    monkeypatch.setattr(Operations, "whole_layers", property(lambda _: False, lambda *_: None), raising=False)
    expected = logits_of(model, batch, **how)
    assert len(calls) == passes
    for ours, theirs in zip(result, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_layers_of_a_short_prompt_are_two_calls_each(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[int] = []
    original = DecoderLayer.after_attention
    monkeypatch.setattr(
        DecoderLayer,
        "after_attention",
        lambda layer, hidden, *rest: tokens.append(len(hidden)) or original(layer, hidden, *rest),
    )
    model, prompts = write("gemma3", "Q4_1"), sequences(2)
    with forced(model, batch_size=2, micro_batch_size=2, kv_tokens=64, weight_dtype="float32") as engine:
        result = engine.logits(prompts, [len(ids) for ids in prompts])
        assert set(tokens) == {sum(map(len, prompts))}
    monkeypatch.setattr(Operations, "whole_layers", property(lambda _: False, lambda *_: None), raising=False)
    with forced(model, batch_size=2, micro_batch_size=2, kv_tokens=64, weight_dtype="float32") as engine:
        expected = engine.logits(prompts, [len(ids) for ids in prompts])
    assert all(map(torch.equal, result, expected))


def test_layers_are_bound_once(write: Write, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[object] = []
    original = UsualLayer.bound
    monkeypatch.setattr(UsualLayer, "bound", lambda *inputs: bound.append(inputs) or original(*inputs))
    logits_of(write("llama", "Q4_1"), 5, weight_dtype="float32")
    assert len(calls) > 1
    assert len(bound) == calls[0]


@pytest.mark.parametrize("name", thorough(("phi3", "glm4"), but=("phi3",)))  # joined matrices; turns a half
def test_another_form_runs_in_phases(name: str, write: Write, calls: list[int]) -> None:
    logits_of(write(name, "plain"), 1, weight_dtype="float32")
    assert calls == []


def test_pages_that_are_read_in_every_pass_run_in_phases(write: Write, calls: list[int]) -> None:
    expected = logits_of(write("llama", "Q8_0"), 1, weight_dtype="float32")
    (done,) = {len(calls)}
    result = logits_of(write("llama", "Q8_0"), 1, weight_dtype="float32", weights=Shares(disk=1.0))
    assert len(calls) == done > 0
    assert torch.equal(result[0], expected[0])
