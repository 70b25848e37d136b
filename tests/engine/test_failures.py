"""When the disk or the machine fails: the error comes out as itself, the engine can be closed, nothing leaks."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from moelight.core.errors import BudgetError, CheckpointError, ConfigError, MoelightError
from moelight.core.policy import Policy, Shares
from moelight.core.request import Completion, SamplingParams
from moelight.engine.engine import Engine
from moelight.kernels.matrices import floats_of
from moelight.kernels.reads import ReadTicket
from moelight.models.decoder import NativeDecoder
from moelight.runtime.machine import LANE_KINDS
from moelight.weights.load import PageRead, PageReader
from tests.cases import thorough
from tests.engines import Tiny
from tests.process import descriptors

HOW = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPTS = [[65, 66, 67], [70, 71]]


def policy(model: Path, processor: str = "cpu") -> Policy:
    return Policy(model=str(model), batch_size=4, ffn_device=processor, weights=Shares(disk=1.0))


OTHERS: set[threading.Thread] = set()  # of engines that other tests of this process left behind


@pytest.fixture(autouse=True)
def _others() -> None:
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def moelight_threads() -> set[str]:
    return {thread.name for thread in set(threading.enumerate()) - OTHERS if thread.name.startswith("moelight-")}


def open_files() -> list[str]:
    return sorted(str(file) for file in descriptors().values() if file.suffix == ".safetensors")


@pytest.fixture
def model(tiny: Tiny, tmp_path: Path) -> Path:
    """A copy of its own, to be damaged."""
    return shutil.copytree(tiny("mixtral"), tmp_path / "model")


@pytest.mark.parametrize("lanes", thorough(LANE_KINDS, but=["auto"]))
@pytest.mark.parametrize("device", ["cpu", "twin"])
def test_a_file_that_ends_early_while_running(model: Path, device: str, lanes: str) -> None:
    engine = Engine(policy(model, "gpu" if device == "twin" else "cpu"), device=device, lanes=lanes)
    assert engine.generate(PROMPTS, HOW)
    os.truncate(model / "model.safetensors", 1000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .* ends early"):
        engine.generate(PROMPTS, HOW)
    with pytest.raises(MoelightError, match="open it anew"):
        engine.generate(PROMPTS, HOW)
    engine.close()
    assert not moelight_threads()
    assert not open_files()


@pytest.mark.parametrize("device", ["cpu", "twin"])
def test_a_disk_that_fails_while_running(model: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(policy(model, "gpu" if device == "twin" else "cpu"), device=device)

    wait = ReadTicket.wait

    def broken(self: ReadTicket) -> None:
        wait(self)
        raise OSError(errno.EIO, "Input/output error, at byte 4096", str(model / "model.safetensors"))

    monkeypatch.setattr(ReadTicket, "wait", broken)
    with pytest.raises(CheckpointError, match=r"tensor '.*' cannot be read \(Input/output error, at byte 4096\)"):
        engine.generate(PROMPTS, HOW)
    engine.close()
    assert not moelight_threads()


@pytest.mark.parametrize("lanes", LANE_KINDS)
def test_a_device_without_memory_left_says_what_to_lower(
    model: Path, lanes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a run; completions before it are kept."""
    calls, route = [0], NativeDecoder.post_attention

    def refused(self: NativeDecoder, *args: Any, **how: Any) -> None:
        calls[0] += 1
        if calls[0] == 20:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        route(self, *args, **how)

    monkeypatch.setattr(NativeDecoder, "post_attention", refused)
    done: list[Completion] = []
    engine = Engine(policy(model, "gpu"), device="twin", lanes=lanes)
    with pytest.raises(BudgetError, match=r"a pass needs more device memory than is left: .*; lower --device-memory"):
        done += engine.stream(PROMPTS * 4, HOW)
    assert engine.stats.passes >= 1
    with pytest.raises(MoelightError, match="open it anew"):
        engine.generate(PROMPTS, HOW)
    engine.close()
    assert not moelight_threads()


@pytest.mark.parametrize("device", ["cpu", "twin"])
def test_any_error_of_a_lane_comes_out_as_itself(model: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a run, after passes that went well."""
    calls, error = [0], OSError(errno.ENOMEM, "Cannot allocate memory")
    start = PageReader.start

    def sometimes(self: PageReader, *args: Any) -> PageRead | None:
        calls[0] += 1
        if calls[0] == 50:
            raise error
        return start(self, *args)

    monkeypatch.setattr(PageReader, "start", sometimes)
    engine = Engine(policy(model, "gpu" if device == "twin" else "cpu"), device=device)
    with pytest.raises(OSError, match="Cannot allocate memory") as caught:
        engine.generate(PROMPTS, HOW)
    assert caught.value is error
    assert engine.stats.passes >= 1
    engine.close()


def test_what_fails_to_open_leaves_nothing_behind(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, files = moelight_threads(), open_files()
    with pytest.raises(ConfigError, match="lanes 'many' is not one of"):
        Engine(policy(model), device="cpu", lanes="many")

    def refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("mmap.mmap", refuse)
        with pytest.raises(BudgetError, match="the machine has no"):
            Engine(policy(model, "gpu"), device="twin", lanes="threads")
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 8)
    with pytest.raises(CheckpointError):
        Engine(policy(model), device="cpu", lanes="threads")
    assert (moelight_threads(), open_files()) == (threads, files)


@pytest.mark.parametrize("device", ["cpu", "twin"])
def test_closing_frees_the_model(model: Path, device: str) -> None:
    with Engine(policy(model, "gpu" if device == "twin" else "cpu"), device=device) as engine:
        engine.generate(PROMPTS, HOW)
        passes = engine._passes
        assert passes is not None
        decoder = passes.model.operations.decoder
        assert isinstance(decoder, NativeDecoder)
        embed = weakref.ref(floats_of(decoder.weights.embed))
        runner = weakref.ref(passes)
        assert moelight_threads()
        assert open_files()
        del passes, decoder
    gc.collect()
    assert runner() is None
    assert embed() is None
    assert not moelight_threads()
    assert not open_files()
    assert engine.stats.passes > 0
