"""Checkpoints with rounded experts: what transformers loads, the bytes of the library's own compressor, kills."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_named_modules
from safetensors.torch import load_file, save_file
from torch import Tensor

from moelight.convert import checkpoint as convert_module
from moelight.convert.checkpoint import RECORD, ConvertOptions, convert_checkpoint
from moelight.core.errors import CheckpointError, ConfigError, InputError, StorageError, UserError
from moelight.engine.experts import facts_of
from moelight.experts.profile import ActivationProfile, save_profile
from moelight.formats.compressed_tensors import Rounding
from moelight.formats.format import SHAPE
from moelight.hrm.inventory import inventory
from moelight.models.checkpoints import open_model
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.quantization import Quantization, read_quantization
from moelight.weights.source import Checkpoint
from tests.cases import covering, thorough
from tests.cli.program import Program, moelight_inside
from tests.tiny import hf_model, save_tiny
from tests.weights.packers import unpacked

SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 64, "intermediate_size": 96},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "mlp_only_layers": [0]},
}
KINDS = {"int4": 32, "int8": 0, "mxfp4": 32, "fp8": 0}
_MATRICES = (".weight_packed", ".weight")


def options(model: Path, out: Path, kind: str = "int4", **inputs: Any) -> ConvertOptions:
    return ConvertOptions(model=str(model), output=out, experts=Rounding(kind, KINDS[kind]), **inputs)


def save(directory: Path, family: str = "mixtral", **inputs: Any) -> Path:
    return save_tiny(directory, family, **{**SIZES[family], **inputs})


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {name: item for file in directory.glob("*.safetensors") for name, item in load_file(file).items()}


def formats_of(directory: Path) -> Quantization:
    result = read_quantization(HFConfig.from_file(directory / "config.json"))
    assert result is not None
    return result


def restored(directory: Path) -> dict[str, Tensor]:
    """All tensors in float32, rounded ones unpacked by `kernels.quantized`."""
    tensors, formats, result = tensors_of(directory), formats_of(directory), {}
    for name, tensor in tensors.items():
        module = name.rpartition(".")[0]
        stored = formats.format_of(module)
        if stored is None:
            result[name] = tensor.float()
        elif name.endswith(_MATRICES):
            parts = {suffix: tensors[module + suffix] for suffix in stored.names if module + suffix in tensors}
            rows = len(parts[stored.names[1]])
            shape = tensors.get(f"{module}.weight_shape")
            width = tensor.shape[1] * (2 if tensor.dtype == torch.uint8 else 1)
            columns = width if shape is None else int(shape[1])
            result[f"{module}.weight"] = unpacked(stored, parts, (rows, columns))
    return result


def logits(model: Any) -> Tensor:
    tokens = torch.arange(40).view(2, 20) * 5
    with torch.no_grad():
        result: Tensor = model(tokens).logits
    return result


ROUNDED = [*product(SIZES, KINDS, [False, True], [False, True])]


@pytest.mark.parametrize(("family", "kind", "fused", "dense"), thorough(ROUNDED, but=covering(ROUNDED)))
def test_transformers_computes_with_the_rounded_numbers(
    family: str, kind: str, fused: bool, dense: bool, tmp_path: Path
) -> None:
    model = save(tmp_path / "model", family, fused=fused, sharded=fused)
    out = tmp_path / "out"
    done = convert_checkpoint(options(model, out, kind, dense=Rounding("int8", 0) if dense else None))
    assert done.bytes == sum(item.nbytes for item in tensors_of(out).values())
    plain = tmp_path / "plain"
    plain.mkdir()
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    save_file(restored(out), plain / "model.safetensors", metadata={"format": "pt"})
    loaded = hf_model(out, dtype=torch.float32)
    if kind == "mxfp4":  # the library's numbers are bfloat16, which holds them all
        for parameter in loaded.parameters():
            parameter.data = parameter.data.float() if parameter.is_floating_point() else parameter.data
    result, wanted = logits(loaded), logits(hf_model(plain, dtype=torch.float32))
    assert (result - wanted).abs().max() < 1e-3
    original = logits(hf_model(model))
    assert 1e-6 < (result - original).abs().max() < 0.6 * original.abs().max()


def profile_of(model: Path, busy: dict[tuple[int, int], int], out: Path) -> Path:
    """An expert profile of ``model``: tokens of the experts ``busy``, by rows of layers with experts."""
    opened = open_model(str(model))
    layers, experts = opened.profile.num_moe_layers, opened.profile.experts.num_experts
    facts = facts_of(opened.profile, opened.weight_map.dtype).facts
    profile = ActivationProfile(model=facts, num_layers=layers, num_experts=experts)
    for (layer, expert), count in busy.items():
        profile.record(layer, np.array([expert]), np.array([count]))
    save_profile(profile, out)
    return out


def rounded_by_the_library(directory: Path) -> set[str]:
    """The modules that compressed-tensors takes the config to mean, of those in ``directory``."""
    root = torch.nn.Module()
    for name in tensors_of(directory):
        *parents, module = name.split(".")[:-1]
        position = root
        for part in parents:
            if not hasattr(position, part):
                position.add_module(part, torch.nn.Module())
            position = getattr(position, part)
        position.add_module(module, torch.nn.Linear(1, 1))
    values = json.loads((directory / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(values)
    targets = [target for scheme in config.config_groups.values() for target in scheme.targets]
    return {name for name, _ in match_named_modules(root, targets, config.ignore)}


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("family", SIZES)
def test_the_busiest_experts_stay_as_they_are(family: str, fused: bool, tmp_path: Path) -> None:
    model, out = save(tmp_path / "model", family, fused=fused), tmp_path / "out"
    profile = profile_of(model, {(0, 1): 9, (0, 2): 1, (0, 4): 5}, tmp_path / "busy.json")
    opened = open_model(str(model)).profile
    layer, count = opened.moe_layers.index(True), opened.num_moe_layers * opened.experts.num_experts
    done = convert_checkpoint(options(model, out, keep=2 / count, expert_profile=profile))
    retained = {name for name in tensors_of(out) if ".experts." in name and name.endswith(".weight")}
    assert (
        done.kept_experts == 2
        and len(retained) == 6
        and done.bytes == sum(item.nbytes for item in tensors_of(out).values())
    )
    assert {name.split(".experts.")[1].split(".")[0] for name in retained} == {"1", "4"}
    assert all(f"layers.{layer}." in name for name in retained)
    result, inputs = tensors_of(out), tensors_of(save(tmp_path / "apart", family))
    assert all(torch.equal(result[name], inputs[name]) for name in retained)
    assert rounded_by_the_library(out) == {name.rpartition(".")[0] for name in result if name.endswith(".weight_scale")}
    with pytest.raises(
        RuntimeError, match="mismatched_sizes"
    ):  # it stacks experts of one format; nothing loads wrongly
        hf_model(out)
    counted, shapes = inventory(load_model_profile(str(out))), [name for name in result if name.endswith(SHAPE)]
    assert counted.total_bytes + 16 * len(shapes) == done.bytes
    other = save(tmp_path / "other", family, num_local_experts=5, num_experts=5)
    with pytest.raises(ConfigError, match="is of another model"):
        convert_checkpoint(options(other, tmp_path / "refused", keep=0.1, expert_profile=profile))
    with pytest.raises(InputError, match="other options"):
        convert_checkpoint(options(model, out))


BY_DTYPE = [*product(KINDS, ["bfloat16", "float16", "float32"])]


@pytest.mark.parametrize(("kind", "dtype"), thorough(BY_DTYPE, but=covering(BY_DTYPE)))
def test_bytes_are_those_of_the_librarys_compressor(kind: str, dtype: str, tmp_path: Path) -> None:
    model, out = save(tmp_path / "model", dtype=dtype), tmp_path / "out"
    convert_checkpoint(options(model, out, kind))
    inputs, result, formats = tensors_of(model), tensors_of(out), formats_of(out)
    config = QuantizationConfig.model_validate(json.loads((out / "config.json").read_text())["quantization_config"])
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    rounded = 0
    for name, tensor in inputs.items():
        module = name.removesuffix(".weight")
        stored = formats.format_of(module)
        if stored is None:
            assert torch.equal(result[name], tensor), name
            continue
        rounded += 1
        scale = result[f"{module}.weight_scale"]
        scale = torch.exp2(scale.float() - 127) if kind == "mxfp4" else scale.float()
        theirs = compressor.compress({"weight": tensor.float(), "weight_scale": scale}, scheme)
        code = "weight_packed" if "weight_packed" in theirs else "weight"
        assert torch.equal(result[f"{module}.{code}"].view(torch.uint8), theirs[code].view(torch.uint8)), name
        assert f"{module}.weight_shape" not in result or result[f"{module}.weight_shape"].tolist() == [*tensor.shape]
        largest = tensor.float().abs().amax(1)
        error = (unpacked(stored, _parts(result, module), tensor.shape) - tensor).abs()
        assert (error.amax(1) <= largest / {"int4": 13.5, "int8": 160, "mxfp4": 3.4, "fp8": 16}[kind]).all()
    assert rounded == 3 * 6 * 3


def _parts(tensors: dict[str, Tensor], module: str) -> dict[str, Tensor]:
    return {name.removeprefix(module): tensor for name, tensor in tensors.items() if name.startswith(f"{module}.")}


def test_groups_of_zeros_and_what_cannot_be_rounded(tmp_path: Path) -> None:
    model = save(tmp_path / "model")
    state = load_file(model / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    state[name][:3] = 0
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})
    for kind in KINDS:
        convert_checkpoint(options(model, tmp_path / kind, kind))
        assert (restored(tmp_path / kind)[name][:3] == 0).all()
    state[name][5, 7] = float("nan")
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name}.*not finite"):
        convert_checkpoint(options(model, tmp_path / "nan"))
    assert not (tmp_path / "nan" / "config.json").exists()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


class Killed(BaseException):
    """What nothing catches."""


def test_killed_anywhere_and_run_again_gives_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = save(tmp_path / "model", fused=True), {"shard_bytes": 40_000}
    convert_checkpoint(options(model, tmp_path / "whole", **inputs))
    wanted = contents(tmp_path / "whole")
    assert sum(name.endswith(".safetensors") for name in wanted) > 5
    out, write = tmp_path / "out", os.pwrite
    calls, last = 0, 10**9

    def counted(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > last:
            raise Killed
        return write(*arguments)

    monkeypatch.setattr(convert_module.os, "pwrite", counted)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)  # nobody tidies up after a kill
    kills = 0
    while True:
        calls, last = 0, random.randint(1, 20) if kills < 10 else 10**9
        try:
            convert_checkpoint(options(model, out, **inputs))
        except Killed:
            kills += 1
            assert not (out / "config.json").exists()
            continue
        break
    monkeypatch.undo()
    done = convert_checkpoint(options(model, out, **inputs))
    assert done.files_before == done.files and not done.read_bytes and kills == 10
    assert contents(out) == wanted


def test_a_directory_with_something_else_is_left_alone(tmp_path: Path) -> None:
    model, out = save(tmp_path / "model"), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    for where in (out, out / "notes.txt", model):
        with pytest.raises(UserError, match=r"something else|is a file"):
            convert_checkpoint(options(model, where))
    assert contents(out) == {"notes.txt": b"mine"}
    (out / "notes.txt").unlink()
    convert_checkpoint(options(model, out))
    with pytest.raises(InputError, match="other options"):
        convert_checkpoint(options(model, out, "int8"))
    with pytest.raises(CheckpointError, match="quantised already"):
        convert_checkpoint(options(out, tmp_path / "again"))


def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    model = save(tmp_path / "model", hidden_size=48)
    with pytest.raises(ConfigError, match=r"w1.weight' \[96, 48\]: int4 in groups of 32 needs a multiple of 32"):
        convert_checkpoint(options(model, tmp_path / "out"))
    state = load_file(model / "model.safetensors")
    state["model.layers.0.block_sparse_moe.experts.w9"] = torch.zeros(3, 4, 5)
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts.w9' \[3, 4, 5\] holds experts of mixtral in a form"):
        convert_checkpoint(options(model, tmp_path / "out", "int8"))
    with pytest.raises(ConfigError, match="leave the option out"):
        Rounding.of("mxfp4", 64)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = save(tmp_path / "model"), tmp_path / "out"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(StorageError, match=r"1000B free, and .* are to be written"):
        convert_checkpoint(options(model, out))
    monkeypatch.undo()

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(convert_module.os, "pwrite", full)
    with pytest.raises(StorageError, match=r"no space left on device\); run the command again to go on"):
        convert_checkpoint(options(model, out))
    monkeypatch.undo()
    assert sorted(contents(out)) == [RECORD]
    convert_checkpoint(options(model, out))
    assert Checkpoint.open(out).tensors


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_are_counted_from_the_config(kind: str, tmp_path: Path) -> None:
    model, out = save(tmp_path / "model", "qwen3_moe", dtype="bfloat16"), tmp_path / "out"
    done = convert_checkpoint(options(model, out, kind, dense=Rounding("int8", 0)))
    counted = inventory(load_model_profile(str(out)))  # of experts what their pages hold, so not the sizes beside them
    experts = sum(".experts." in name for name in Checkpoint.open(out).tensors if name.endswith(SHAPE))
    assert counted.total_bytes + 16 * experts == done.bytes
    inputs = {path.name: path.read_bytes() for path in model.iterdir() if path.name.startswith(("tok", "gen"))}
    assert inputs and contents(out).items() >= inputs.items()


def test_a_few_pieces_are_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(tmp_path / "model", fused=True, num_local_experts=32)
    read, store, live, max_live, lock = convert_module.read_tensor, convert_module._store, 0, 0, threading.Lock()

    def counted_read(info: Any) -> Tensor:
        nonlocal live, max_live
        with lock:
            live += 1
            max_live = max(max_live, live)
        return read(info)

    def counted_store(*arguments: Any) -> None:
        nonlocal live
        time.sleep(0.002)  # a slow disk
        store(*arguments)
        with lock:
            live -= 1

    monkeypatch.setattr(convert_module, "read_tensor", counted_read)
    monkeypatch.setattr(convert_module, "_store", counted_store)
    monkeypatch.setattr(convert_module, "_CHUNK", 5000)
    convert_checkpoint(options(model, tmp_path / "out"))
    assert live == 0 and max_live <= 6
    assert torch.equal(tensors_of(tmp_path / "out")["lm_head.weight"], tensors_of(model)["lm_head.weight"])


@pytest.mark.thorough
def test_ten_kills_at_random_moments(tmp_path: Path) -> None:
    model = save(tmp_path / "model", hidden_size=512, intermediate_size=1024, num_local_experts=24)
    out = tmp_path / "out"
    command = ("moelight", "convert", model, out, "--group-size", "32", "--shard-size", "2MiB")
    kills = 0
    while kills < 10:
        for left in out.glob(".*.partial"):
            left.unlink()
        program = Program(*command)
        while program.poll() is None and not any(out.glob(".*.partial")):
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.5))
        program.send_signal(signal.SIGKILL)
        kills += 1
        if program.wait() == 0:
            break
    assert Program(*command).wait() == 0
    convert_checkpoint(options(model, tmp_path / "whole", shard_bytes=2 << 20))
    assert {**contents(out), RECORD: b""} == {**contents(tmp_path / "whole"), RECORD: b""}


def test_the_command(tmp_path: Path) -> None:
    model = save(tmp_path / "model")
    done = moelight_inside("convert", model, tmp_path / "out", "--group-size", "32", "--dense", "int8")
    assert done.returncode == 0 and "bits a number of what is rounded" in done.stdout
    for arguments, message in (
        (("--experts", "int5"), "--experts 'int5' is not one of int4, int8, mxfp4, fp8"),
        (("--dense", "int4"), "--dense 'int4' is not one of keep, int8"),
        (("--group-size", "48"), "--group-size 48 is not one of 32, 64, 128"),
        (("--experts", "fp8", "--group-size", "32"), "fp8 has a scale for each row"),
        (("--keep", "10%"), "--keep and --expert-profile belong together"),
        (("--keep", "10", "--expert-profile", "x.json"), "--keep '10' is no share of the experts"),
        (("--keep", "10%", "--expert-profile", "x.json"), "x.json: cannot be read"),
    ):
        refused = moelight_inside("convert", model, tmp_path / "refused", *arguments)
        assert refused.returncode == 2 and message in refused.stderr
    assert not (tmp_path / "refused").exists()
