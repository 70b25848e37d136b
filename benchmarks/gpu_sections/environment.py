"""What the machine is: card, driver, link, processors, memory, libraries, and what `moelight doctor` says of them."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from typing import Any

from gpu_sections.setting import ROOT, FailedError, Setting

_FIELDS = (
    "name",
    "driver_version",
    "memory.total",
    "memory.free",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
    "ecc.mode.current",
    "persistence_mode",
)
_LIBRARIES = ("torch", "triton", "transformers", "accelerate", "numpy", "nanobind", "pytest")


def run(setting: Setting) -> None:
    """Every fact by itself: one that cannot be had hides no other."""
    setting.keep(
        python=platform.python_version(),
        platform=platform.platform(),
        commit=_said("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        libraries={name: _version(name) for name in _LIBRARIES},
        cards=cards(),
    )
    details = _said("nvidia-smi", "-q", "-d", "MEMORY,UTILIZATION,CLOCK,POWER,ECC,PERFORMANCE")
    setting.log(f"$ nvidia-smi -q\n{details}" if details else "nvidia-smi: not there")
    seen = setting.python("gpu_sections.environment", limit_s=60)
    setting.keep(torch=json.loads(seen.out.splitlines()[-1]) if seen.code == 0 else {"unable": seen.why})
    doctor = setting.moelight("doctor", "--json", limit_s=60).check()
    setting.keep(doctor=json.loads(doctor.out))
    if not setting.twin and not setting.figures["doctor"]["torch"]["devices"]:
        raise FailedError("torch sees no card: everything that follows needs one")


def cards() -> list[dict[str, str]]:
    """What ``nvidia-smi`` says of every card; none where it is absent."""
    message = _said("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    return [
        dict(zip(_FIELDS, (value.strip() for value in line.split(",")), strict=False)) for line in message.splitlines()
    ]


def card_name(device: str) -> str:
    """The name of the card, for the report's own name: ``twin``, or what ``nvidia-smi`` calls the one of ``device``."""
    if device.startswith("twin"):
        return "twin"
    result, index = cards(), device.partition(":")[2]
    number = int(index) if index.isdecimal() else 0
    return result[number]["name"] if number < len(result) else device


def lines(figures: dict[str, Any]) -> list[str]:
    """For the summary."""
    cards, doctor = figures.get("cards", []), figures.get("doctor", {})
    told = [
        f"{card['name']}, {card['memory.total']} MiB, driver {card['driver_version']}; link generation "
        f"{card['pcie.link.gen.current']} of {card['pcie.link.gen.max']} (an idle link may be slower), "
        f"{card['pcie.link.width.current']} of {card['pcie.link.width.max']} lanes"
        for card in cards
    ]
    libraries = [f"{name} {version}" for name, version in figures.get("libraries", {}).items() if version]
    told.append(f"Python {figures.get('python')}, {', '.join(libraries)}; CUDA {figures.get('torch', {}).get('cuda')}")
    if doctor:
        processor, memory = doctor["processor"], doctor["memory"]
        told.append(
            f"{processor['name']}, {processor['cores']} cores, {processor['usable']} threads; "
            f"{memory['physical_bytes'] / 2**30:.0f} GiB, {memory['available_bytes'] / 2**30:.0f} free"
        )
        told += [f"extension: {doctor['extension']['reason']}"]
        told += [
            f"{row['operation']}: {row['implementation']} ({row['reason']})"
            for row in doctor["kernels"]
            if "GPU" in row["operation"] or "device" in row["operation"]
        ]
    return told


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _said(*command: str) -> str:
    """What a program prints; nothing where it is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> None:
    """Print what torch sees, as JSON."""
    import torch

    result: dict[str, Any] = {"cuda": torch.version.cuda, "hip": torch.version.hip, "cards": []}
    for number in range(torch.cuda.device_count()):
        item = torch.cuda.get_device_properties(number)
        result["cards"].append(
            {
                "name": item.name,
                "capability": f"{item.major}.{item.minor}",
                "bytes": item.total_memory,
                "multiprocessors": item.multi_processor_count,
            }
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
