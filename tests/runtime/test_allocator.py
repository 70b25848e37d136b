"""The device's allocator, played: limits are shares of what is there, peaks are its own, a twin has none."""

from __future__ import annotations

import pytest
import torch

from moelight.kernels import device as device_module
from moelight.kernels.device import Device, DevicePeak
from moelight.runtime.machine import Machine, device_peak, find_machine

CUDA = torch.device("cuda", 0)


class Played:
    """A device of 16 GiB."""

    def __init__(self) -> None:
        self.share = 1.0
        self.watched = 0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 10 << 30, 16 << 30

    def set_per_process_memory_fraction(self, share: float, device: torch.device) -> None:
        assert 0 <= share <= 1 and isinstance(share, float)
        self.share = share

    def init(self) -> None: ...

    def empty_cache(self) -> None:
        self.watched += 1

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.watched += 1

    def max_memory_allocated(self, device: torch.device) -> int:
        return 3

    def max_memory_reserved(self, device: torch.device) -> int:
        return 5


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    module = Played()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_a_limit_is_a_share_of_the_whole_device(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[str] = []
    monkeypatch.setattr(device_module, "_change_settings", changed.append)
    Device(CUDA).limit_memory(4 << 30)
    assert played.share == 0.25
    assert changed == ["expandable_segments:True"]
    Device(CUDA).limit_memory(1 << 50)
    assert played.share == 1.0
    Device(torch.device("xpu", 0)).limit_memory(8 << 30)
    assert played.share == 0.5
    assert len(changed) == 2, "segments that grow are CUDA's"
    Device(CUDA).limit_memory(None)
    assert played.share == 1.0


def test_peaks_are_the_devices_own(played: Played) -> None:
    Device(CUDA).watch_memory()
    assert played.watched == 2
    assert device_peak(Machine(device=CUDA, discrete=True)) == DevicePeak(allocated=3, reserved=5)


def test_a_twin_has_no_memory_of_its_own(played: Played) -> None:
    Device(torch.device("cpu")).limit_memory(1)
    Device(torch.device("cpu")).watch_memory()
    assert device_peak(find_machine("twin")) == DevicePeak()
    assert (played.share, played.watched) == (1.0, 0)


@pytest.mark.gpu
def test_a_real_device_takes_no_more_than_its_limit() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    device = torch.device(device.type, 0)
    held = int(torch.get_device_module(device).memory_reserved(device))
    Device(device).watch_memory()
    Device(device).limit_memory(held + (256 << 20))
    try:
        retained = torch.empty(100 << 20, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(400 << 20, dtype=torch.uint8, device=device)
        peak = device_peak(Machine(device=device, discrete=True))
        assert retained.numel() <= peak.allocated <= peak.reserved <= held + (256 << 20)
    finally:
        Device(device).limit_memory(None)
