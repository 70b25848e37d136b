"""Limits of a measurement: its time, memory, disk space and resolution. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass

from moelight.core.units import GiB, MiB

Shape = tuple[int, int]


# Between 8 and 12 rows, and between 60 and 64, products take another form on a CPU (`kernels.products`).
_ROWS = (1, 2, 4, 8, 12, 16, 32, 48, 60, 64, 128, 256, 512)


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Limits of a measurement in seconds and bytes; by default those of a fine one, of about a minute.

    Weights have 0.5, 4.5, 22 and 224 MiB in 16 bits, and experts 2.25, 21 and 216 MiB: from those of many small experts
    to those of Mixtral 8x7B.

    Attributes:
        quiet_rounds: undisturbed rounds after which measuring ends, within ``host_s`` (host and disk) or ``device_s``.
        figure_s: time of one figure per round, as ``point_s`` and ``gpu_point_s`` of one point of a surface.
        exchanges: whether exchanges with another process are measured.
        linear: shapes [out, in]; ``experts`` are (hidden, intermediate).
        touching: token counts for which norms and sums are measured.
        large: weights and rows of a compute-bound product, as ``gpu_large``.
    """

    pool_bytes: int = 2 * GiB
    link_bytes: int = 256 * MiB
    disk_bytes: int = 1 * GiB
    quiet_rounds: int = 3
    host_s: float = 75.0
    device_s: float = 25.0
    figure_s: float = 0.3
    point_s: float = 0.1
    gpu_point_s: float = 0.04
    disk_write_s: float = 5.0
    exchanges: bool = True
    rows: tuple[int, ...] = _ROWS
    gpu_rows: tuple[int, ...] = (*_ROWS, 1024, 2048, 4096)
    linear: tuple[Shape, ...] = ((512, 512), (1536, 1536), (4096, 2816), (14336, 8192))
    experts: tuple[Shape, ...] = ((1024, 384), (1024, 3584), (4096, 9216))
    contexts: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096)
    prompts: tuple[int, ...] = (16, 64, 128, 256, 512, 1024, 2048)
    touching: tuple[int, ...] = (256, 1024, 8192)
    large: tuple[Shape, int] = ((4096, 4096), 1024)
    gpu_large: tuple[Shape, int] = ((8192, 8192), 8192)


FULL = Effort()
QUICK = Effort(
    pool_bytes=1 * GiB,
    link_bytes=128 * MiB,
    disk_bytes=256 * MiB,
    host_s=9.0,
    device_s=5.0,
    figure_s=0.1,
    point_s=0.03,
    gpu_point_s=0.02,
    disk_write_s=1.5,
    rows=(1, 4, 12, 32, 60, 64, 256),
    gpu_rows=(1, 16, 64, 256, 1024, 4096),
    linear=((512, 512), (4096, 2816)),
    experts=((1024, 384), (1024, 3584)),
    contexts=(64, 512, 2048),
    prompts=(32, 256, 1024),
    touching=(256, 4096),
    large=((4096, 4096), 512),
)
