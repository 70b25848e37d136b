"""The profile of this machine, cached under its fingerprint, with capacities read at every call. Never imports torch
where no accelerator can be present."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from moelight.core.errors import ConfigError
from moelight.core.paths import cache_directory
from moelight.kernels import native, variants
from moelight.profiles.hardware import WORK, HardwareProfile, read_hardware_profile
from moelight.profiles.hardware_text import write_hardware_profile
from moelight.runtime.measure import available_bytes, processor_name

if TYPE_CHECKING:
    from moelight.runtime.machine import Machine

Say = Callable[[str], None]
T = TypeVar("T")
AUTO = "auto"
BUSY = "busy_elsewhere"
MEASURING_S = 300  # timeout of a measurement
TRY_AGAIN_S = 600  # age from which a disturbed measurement is repeated
COMMENTS = (
    "Measured by moelight profile. Speeds by rows, context or prompt tokens, where products also by bytes of weights. "
    "spread: the width of the middle half of the samples, as a share of their median.",
)
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_CPU_FIGURES = ("host_copy", "cpu_task")
_GPU_FIGURES = ("host_to_device_under_attention", "gpu_launch", "transfer")

# Device files under /dev of the drivers of NVIDIA, AMD, WSL and Intel.
_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dxg", "dri/renderD*")


def to_stderr(line: str) -> None:
    """Print ``line`` for the user."""
    print(f"moelight: {line}", file=sys.stderr, flush=True)


def machine_profile(device: str = AUTO, *, disk_dir: Path | None = None, say: Say = to_stderr) -> HardwareProfile:
    """The cached profile of this machine with current capacities, or a new measurement of about ten seconds; raises
    ConfigError if there is no such device or the measurement fails.

    Args:
        device: ``auto``, ``cpu``, ``cuda`` or ``xpu``, as in `find_machine`.
        disk_dir: a directory on the disk that holds the models; None: the current directory.
        say: receives a line when something is measured, and when a cached file is unusable.
    """
    directory = disk_dir or Path.cwd()
    path = kept_path(device)
    stored = _kept(path, say)
    missing = stored is not None and _missing(stored, device)
    if stored is None or missing or _worth_another_try(stored, path):
        measured = _measured_apart(device, directory, say)
        if stored is not None and missing:
            stored = _joined(stored, measured)
        elif stored is None or _disturbance(measured) < _disturbance(stored):
            stored = measured
        try:
            write_hardware_profile(stored, path, comments=COMMENTS)
        except ConfigError as error:
            say(f"warning: {error}; the next run measures again")
    if busy := _disturbance(stored):
        say(
            f"warning: other programs kept {busy:.1f} processors busy while this machine was measured, so estimates "
            "may be too low; when it is quiet, run moelight profile"
        )
    return _now(stored, device, directory)


def kept_profile(device: str = AUTO, *, say: Say = to_stderr) -> HardwareProfile | None:
    """The cached profile of this machine, if there is one; measures nothing."""
    stored = _kept(kept_path(device), say)
    return None if stored is None or _missing(stored, device) else stored


def use_kept_kernels() -> None:
    """Use the forms of kernels that were the fastest when this machine was measured; else those in force stay."""
    if (stored := kept_profile()) is not None:
        variants.choose(dict(stored.kernels))


def kept_path(device: str = AUTO) -> Path:
    """``hardware/FINGERPRINT.yaml`` in moelight's cache directory."""
    return cache_directory("hardware", f"{fingerprint(device)}.yaml")


def _kept(path: Path, say: Say) -> HardwareProfile | None:
    """None if the file does not exist or cannot be read."""
    try:
        return read_hardware_profile(path) if path.exists() else None
    except (ConfigError, OSError) as error:
        say(f"warning: {error}; measuring anew")
        return None


def _missing(profile: HardwareProfile, device: str) -> bool:
    """True if figures of such a machine are missing, for example in a file of an older release."""
    gpu = accelerator_name(device) is not None
    surfaces = [f"{unit}_{work}" for unit in ("cpu", "gpu")[: 1 + gpu] for work in WORK]
    figures = (*_CPU_FIGURES, *_GPU_FIGURES) if gpu else _CPU_FIGURES
    complete = all(map(profile.surface, surfaces)) and all(map(profile.figure, figures))
    return not complete or (profile.tier("device") is not None) != gpu


def _worth_another_try(stored: HardwareProfile, path: Path) -> bool:
    """True if ``stored`` was measured beside other work, more than `TRY_AGAIN_S` ago."""
    try:
        return _disturbance(stored) > 0 and time.time() - path.stat().st_mtime > TRY_AGAIN_S
    except OSError:
        return True


def _disturbance(profile: HardwareProfile) -> float:
    return profile.figure(BUSY) or 0.0


def _joined(stored: HardwareProfile, measured: HardwareProfile) -> HardwareProfile:
    """``stored``, completed by the figures that only ``measured`` has."""
    spread = dict(measured.spread) | dict(stored.spread)
    joined = replace(
        stored,
        tiers=_merged(stored.tiers, measured.tiers, "name"),
        links=_merged(stored.links, measured.links, "src"),
        processors=_merged(stored.processors, measured.processors, "name"),
        measured=tuple((dict(measured.measured) | dict(stored.measured)).items()),
        efficiency=_merged(stored.efficiency, measured.efficiency, "name"),
        kernels=stored.kernels or measured.kernels,
    )
    return replace(joined, spread=tuple((key, spread[key]) for key in joined.figure_keys() if key in spread))


def _merged(items: tuple[T, ...], others: tuple[T, ...], name: str) -> tuple[T, ...]:
    have = {getattr(item, name) for item in items}
    return (*items, *(item for item in others if getattr(item, name) not in have))


def _now(profile: HardwareProfile, device: str, directory: Path) -> HardwareProfile:
    free = {"host": available_bytes(), "disk": shutil.disk_usage(directory).free}
    if profile.tier("device") is not None:
        from moelight.runtime.machine import find_machine

        free["device"] = find_machine(device).device_memory_bytes()
    tiers = tuple(replace(tier, capacity_bytes=max(1, free[tier.name])) for tier in profile.tiers)
    return replace(profile, name=AUTO, tiers=tiers)


def _measured_apart(device: str, directory: Path, say: Say) -> HardwareProfile:
    """The memory of the measurement ends with its subprocess."""
    say("measuring this machine, which takes about ten seconds and is done once (moelight profile does it finely)")
    python_path = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_PACKAGE_ROOT), *([python_path] if python_path else [])]),
    }
    with tempfile.TemporaryDirectory(prefix="moelight-") as scratch:
        file = Path(scratch) / "measured.yaml"
        command = [sys.executable, "-m", "moelight.runtime.calibration.machine", device, str(directory), str(file)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=MEASURING_S, check=False
            )
            if not done.returncode:
                return read_hardware_profile(file)
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = str(error)
    raise ConfigError(f"this machine could not be measured ({reason}); name a machine with --hw, for example --hw t4")


def may_have_accelerator() -> bool:
    """On Linux, True only if a driver has created a device file."""
    return not sys.platform.startswith("linux") or any(
        True for pattern in _DEVICE_FILES for _ in Path("/dev").glob(pattern)
    )


def accelerator_name(device: str) -> str | None:
    """The name of the accelerator ``device``, which is the one that the engine uses; None for a CPU. Raises ConfigError
    if it is absent or emulated."""
    if device == "cpu" or (device == "auto" and not may_have_accelerator()):
        return None

    from moelight.kernels.device import Device
    from moelight.runtime.machine import find_machine

    machine = find_machine(device)
    if machine.twin:
        raise ConfigError(f"--device {device}: a twin has no speed of its own; name cpu, cuda or xpu")
    if not machine.discrete:
        return None
    return str(Device(machine.device).properties.name)


def fingerprint(device: str) -> str:
    """Short hash of the hardware and of the versions of torch, moelight and its native kernels."""
    facts = (
        processor_name(),
        usable_threads(),
        _openmp_threads(),
        accelerator_name(device) or "",
        device.partition(":")[2] or "0",
        _version("torch"),
        _version("moelight"),
        native.reason(),
    )
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:16]


def describe(machine: Machine) -> str:
    """One clause for the notes of a profile."""
    import torch

    gpu = accelerator_name(str(machine.device))
    parts = [processor_name(), f"{torch.get_num_threads()} threads"]
    parts += [gpu] if gpu else []
    return ", ".join([*parts, f"torch {_version('torch')}", f"moelight {_version('moelight')}"])


def usable_threads() -> int:
    """Hardware threads that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _openmp_threads() -> int:
    """Threads of OpenMP's outermost level: those of OMP_NUM_THREADS, else all usable ones."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else usable_threads()


@cache  # reading the metadata takes longer than opening a small model
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
