"""Two models on the same prompts, against distributions that transformers computes."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moelight.convert import compare as compare_module
from moelight.convert.compare import CompareOptions, Comparison, Estimated, compare_models
from moelight.core.errors import ConfigError, InputError, StorageError
from moelight.engine.options import EngineOptions
from tests.cli.program import moelight_inside
from tests.tiny import hf_model, save_tiny

PROMPTS: tuple[list[int], ...] = tuple(
    [(7 * n + 3 * k * k) % 256 for k in range(length)] for n, length in enumerate((9, 33, 2, 21))
)


def perturbed(model: Path, out: Path, by: float) -> Path:
    out.mkdir()
    for path in model.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    torch.manual_seed(1)
    state = load_file(model / "model.safetensors")
    for name, tensor in state.items():
        if "experts" in name:
            tensor.add_(torch.randn(tensor.shape), alpha=by * float(tensor.std()))
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    reference = save_tiny(directory / "reference", "mixtral")
    return perturbed(reference, directory / "model", 0.1), reference


def line(tokens: list[int]) -> str:
    body = {"model": "any", "prompt": tokens}
    row = {"custom_id": str(len(tokens)), "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(row) + "\n"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(map(line, PROMPTS)))
    return path


def compare(model: Path, reference: Path, prompts: Path, **inputs: Any) -> Comparison:
    engine = EngineOptions(host_memory=200 << 20, batch_size=2, micro_batch_size=1)
    return compare_models(
        CompareOptions(model=str(model), reference=str(reference), prompts=prompts, engine=engine, **inputs)
    )


def theirs(model: Path) -> list[torch.Tensor]:
    loaded = hf_model(model)
    with torch.no_grad():
        return [loaded(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(1) for tokens in PROMPTS]


def test_figures_are_those_of_whole_distributions(pair: tuple[Path, Path], prompts: Path) -> None:
    result = compare(*pair, prompts)
    model, reference = (torch.cat(theirs(item)) for item in pair)
    targets = torch.cat([torch.tensor(tokens[1:]) for tokens in PROMPTS]).unsqueeze(1)
    assert (result.prompts, result.tokens) == (len(PROMPTS), len(targets))
    assert result.kept == result.vocabulary == model.shape[1] and result.mass == 1
    kl = (reference.exp() * (reference - model)).sum(1).mean().item()
    assert kl > 1e-3 and result.kl.value == pytest.approx(kl, rel=1e-3)
    assert result.top1.value == pytest.approx((model.argmax(1) == reference.argmax(1)).double().mean().item())
    losses = [-item.gather(1, targets).mean().item() for item in (model, reference)]
    assert torch.tensor(losses).exp().tolist() == pytest.approx(
        [result.perplexity.value, result.reference_perplexity.value], rel=1e-4
    )
    assert result.ratio.value == pytest.approx(result.perplexity.value / result.reference_perplexity.value)
    for figure in (result.kl, result.top1, result.perplexity, result.reference_perplexity, result.ratio):
        assert figure.low is not None and figure.high is not None
        assert figure.low <= figure.value <= figure.high


@pytest.mark.thorough
def test_a_model_is_not_far_from_itself(pair: tuple[Path, Path], prompts: Path) -> None:
    result = compare(pair[0], pair[0], prompts)
    assert abs(result.kl.value) < 1e-9 and result.top1 == Estimated(value=1.0, low=1.0, high=1.0)
    assert result.ratio.value == pytest.approx(1.0, abs=1e-9)


@pytest.mark.thorough
def test_the_likeliest_tokens_give_a_lower_bound(pair: tuple[Path, Path], prompts: Path) -> None:
    exact = compare(*pair, prompts)
    some = compare(*pair, prompts, space_bytes=exact.tokens * 8 * 100)
    assert some.kept == 100 and 0.5 < some.mass < 1
    assert 0.5 * exact.kl.value < some.kl.value < exact.kl.value
    assert (some.top1, some.perplexity) == (exact.top1, exact.perplexity)
    with pytest.raises(ConfigError, match="allow more"):
        compare(*pair, prompts, space_bytes=10_000)


def test_a_single_prompt_has_no_interval(pair: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("only this\n")
    result = compare(*pair, path)
    assert result.kl.low is None and result.kl.high is None and result.tokens == len("only this") - 1


def test_what_cannot_be_compared_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", "mixtral", vocab_size=311)
    path = tmp_path / "prompts.jsonl"
    path.write_text(line([1, 2, 3]) + line([5]))
    with pytest.raises(ConfigError, match="vocabulary of 311 tokens"):
        compare(other, pair[1], path)
    with pytest.raises(InputError, match="line 2: 1 tokens, and 2 to 512 can be compared"):
        compare(*pair, path)
    path.write_text('{"prompt": "a text"}\n{"prompt": 7}\n')
    with pytest.raises(InputError, match="line 2: "):
        compare(*pair, path)


def test_a_full_disk_is_one_line(pair: tuple[Path, Path], prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compare_module.os, "pwrite", full)
    with pytest.raises(StorageError, match=r"temporary files in .*no space left on device"):
        compare(*pair, prompts)


def test_the_command(pair: tuple[Path, Path], prompts: Path) -> None:
    inputs = ("compare", pair[0], prompts, "--against", pair[1], "--host-memory", "200MiB")
    shown, result = moelight_inside(*inputs), moelight_inside(*inputs, "--json")
    assert shown.returncode == 0 and "KL divergence, nats a token" in shown.stdout
    values = json.loads(result.stdout)
    assert values["exact"] and values["tokens"] == sum(len(tokens) - 1 for tokens in PROMPTS)
    assert 0 < values["kl"]["low"] < values["kl"]["value"] < values["kl"]["high"]
    refused = moelight_inside("compare", pair[0], prompts)
    assert refused.returncode == 2 and "give --against REFERENCE" in refused.stderr
