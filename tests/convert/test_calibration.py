"""Rounding by what prompts show: which inputs are kept, what they change, kills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moelight.convert import checkpoint as convert_module
from moelight.convert.checkpoint import LEAST_ROWS, RECORD, ConvertOptions, InputRows, convert_checkpoint
from moelight.convert.compare import CompareOptions, compare_models
from moelight.convert.rounding import round_matrix
from moelight.core.errors import ConfigError, InputError
from moelight.engine.options import EngineOptions
from moelight.formats.compressed_tensors import Rounding
from moelight.models.moe import Routed
from tests.cli.program import moelight_inside
from tests.tiny import save_tiny
from tests.weights.packers import unpacked

HIDDEN = 64


def routed(x: Tensor, ids: Tensor) -> Routed:
    return Routed(x=x, weights=torch.ones(ids.shape), ids=ids.int())


def kept_inputs(directory: Path, x: Tensor, ids: Tensor, order: Tensor, parts: int) -> dict[int, Tensor]:
    """The rows of each of three experts of layer 1, whose inputs arrive in ``order`` and ``parts``."""
    directory.mkdir()
    rows = InputRows(directory, 2, 3, HIDDEN)
    rows.max_rows, rows.keys = 10, rows.keys[:, :, :10].copy()
    with rows:
        for part in order.chunk(parts):
            rows.add(1, routed(x[part], ids[part]))
        rows.finish()
        result = {expert: rows.rows(1, expert) for expert in range(3)}
        assert not len(rows.rows(0, 1))
        again = InputRows(directory, 2, 3, HIDDEN)
        assert not again.load()  # of another number of rows
    return result


def test_the_same_inputs_are_kept_in_whatever_order_they_arrive(tmp_path: Path) -> None:
    x = torch.randn(50, HIDDEN).bfloat16()
    x[1] = x[0]
    ids = torch.cat([torch.zeros(50, 1, dtype=torch.int64), torch.randint(1, 3, (50, 1))], dim=1)
    ids[5:, 1] = 1
    first = kept_inputs(tmp_path / "first", x, ids, torch.arange(50), 1)
    other = kept_inputs(tmp_path / "other", x, ids, torch.randperm(50), 7)
    for expert, rows in first.items():
        assert torch.equal(rows, other[expert])
        selected = x[(ids == expert).any(1)].unique(dim=0)
        assert len(rows) == min(10, len(selected))
        assert all((selected == row).all(1).any() for row in rows)


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("group", [32, 128])
def test_products_with_the_inputs_are_nearer(kind: str, group: int) -> None:
    stored = Rounding(kind, group).stored("BF16")
    mixed = torch.randn(256, 256) * torch.logspace(-1, 1, 256)
    weight, inputs = torch.randn(48, 256), torch.randn(96, 256) @ mixed
    arguments = weight.clone()

    def error(parts: dict[str, Tensor]) -> float:
        values = unpacked(stored, parts, weight.shape)
        return float((inputs @ (values - weight).t()).norm())

    plain, calibrated = round_matrix(stored, weight), round_matrix(stored, weight, inputs)
    assert torch.equal(weight, arguments) and error(calibrated) < 0.7 * error(plain)
    for name, part in round_matrix(stored, weight, inputs).items():
        assert torch.equal(part, calibrated[name])


def lines(path: Path, prompts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != RECORD}


def options(model: Path | str, out: Path, group: int = 32, **inputs: Any) -> ConvertOptions:
    return ConvertOptions(model=str(model), output=out, experts=Rounding("int4", group), **inputs)


@pytest.mark.thorough
def test_killed_while_it_rounds_the_model_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny(tmp_path / "model", "mixtral", hidden_size=64, intermediate_size=96)
    prompts = lines(tmp_path / "prompts.jsonl", [f"the prompt of number {n * n}" for n in range(9)])
    inputs = {"calibrate": prompts, "engine": EngineOptions(device="cpu", host_memory=200 << 20), "shard_bytes": 40_000}
    done = convert_checkpoint(options(model, tmp_path / "whole", **inputs))
    assert done.reached
    convert_checkpoint(options(model, tmp_path / "plain", shard_bytes=40_000))
    wanted = contents(tmp_path / "whole")
    assert wanted.keys() == contents(tmp_path / "plain").keys() and wanted != contents(tmp_path / "plain")

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "_store", fail)
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(options(model, tmp_path / "out", **inputs))
    monkeypatch.setattr(convert_module, "score_all", fail)
    convert_checkpoint(options(model, tmp_path / "out", **inputs))
    assert contents(tmp_path / "out") == wanted
    with pytest.raises(InputError, match="other options"):
        convert_checkpoint(options(model, tmp_path / "out", shard_bytes=40_000))


def test_an_expert_that_few_rows_reach_is_rounded_to_nearest(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "mixtral", hidden_size=64, intermediate_size=96)
    prompts = lines(tmp_path / "prompts.jsonl", ["abc"])
    done = convert_checkpoint(options(model, tmp_path / "out", calibrate=prompts))
    assert len("abc") < LEAST_ROWS and done.reached == 0
    convert_checkpoint(options(model, tmp_path / "plain"))
    assert contents(tmp_path / "out") == contents(tmp_path / "plain")


def sums(values: range) -> list[str]:
    return [f"add {n} and {m} = {n + m}" for n in values for m in (n % 7 * 31, 403 - n)]


@pytest.mark.thorough
def test_the_bundled_model_stays_nearer_to_itself(tmp_path: Path) -> None:
    """On prompts of its own kind that it was not calibrated on."""
    seen = lines(tmp_path / "seen.jsonl", sums(range(1, 400, 3)))
    others = lines(tmp_path / "others.jsonl", sums(range(2, 400, 12)))
    divergence = []
    for name, prompts in (("plain", None), ("calibrated", seen)):
        convert_checkpoint(options("demo", tmp_path / name, calibrate=prompts))
        of = CompareOptions(model=str(tmp_path / name), reference="demo", prompts=others)
        divergence.append(compare_models(of).kl.value)
    assert divergence[1] < 0.8 * divergence[0]


def test_what_cannot_be_calibrated_is_refused(tmp_path: Path) -> None:
    prompts = lines(tmp_path / "prompts.jsonl", ["abc"])
    with pytest.raises(ConfigError, match="scales of mxfp4 are not chosen"):
        inputs = ConvertOptions(model="demo", output=tmp_path / "o", experts=Rounding("mxfp4", 32), calibrate=prompts)
        convert_checkpoint(inputs)
    for arguments, message in (
        (("--calibrate", "none.jsonl"), "none.jsonl: cannot be read"),
        (("--host-memory", "1GiB"), "--host-memory is for the run over --calibrate"),
    ):
        refused = moelight_inside("convert", "demo", tmp_path / "refused", *arguments)
        assert refused.returncode == 2 and message in refused.stderr
    assert not (tmp_path / "refused").exists()
