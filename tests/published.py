"""The machines that MoE-Lightning's artifact plans for, in its own figures: GB there is 2^30."""

from __future__ import annotations

from moelight.core.units import GiB
from moelight.profiles.hardware import HardwareProfile, Link, Processor, Tier

README_HOST_BYTES = 197880360960


def machine(
    *,
    name: str = "published",
    device_bytes: int,
    device_bandwidth: float,
    gpu_flops: float,
    cpu_flops: float,
    host_bytes: int = README_HOST_BYTES,
    host_bandwidth: float = 76 * GiB,
    link: float = 16 * GiB,
    gpus: int = 1,
    disk_bytes: int = 0,
) -> HardwareProfile:
    """A GPU of one kind beside a host; a disk where it has bytes."""
    tiers = [
        Tier(name="device", capacity_bytes=device_bytes, bandwidth_bytes_per_s=device_bandwidth),
        Tier(name="host", capacity_bytes=host_bytes, bandwidth_bytes_per_s=host_bandwidth),
    ]
    if disk_bytes:
        tiers.append(Tier(name="disk", capacity_bytes=disk_bytes, bandwidth_bytes_per_s=6.8e9))
    return HardwareProfile(
        name=name,
        tiers=tuple(tiers),
        links=(
            Link(src="host", dst="device", bandwidth_bytes_per_s=link),
            Link(src="device", dst="host", bandwidth_bytes_per_s=link),
        ),
        processors=(
            Processor(name="gpu", count=gpus, peak_flops=gpu_flops),
            Processor(name="cpu", count=1, peak_flops=cpu_flops),
        ),
    )


def l4(host_bytes: int = README_HOST_BYTES) -> HardwareProfile:
    """Setting S2."""
    return machine(
        name="l4",
        device_bytes=24 * GiB,
        device_bandwidth=285 * GiB,
        gpu_flops=104e12,
        cpu_flops=1.6e12,
        host_bytes=host_bytes,
    )


def t4(*, gpus: int = 1, host_bytes: int = README_HOST_BYTES) -> HardwareProfile:
    """Setting S1, and with more GPUs the host of S6 to S9."""
    return machine(
        name="t4",
        device_bytes=15 * GiB,
        device_bandwidth=300 * GiB,
        gpu_flops=65e12,
        cpu_flops=0.8e12,
        host_bytes=host_bytes,
        gpus=gpus,
    )
