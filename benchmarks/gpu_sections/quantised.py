"""Quantised experts: a checkpoint rounded by `moelight convert`, streamed beside itself, and the kernels alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_sections.setting import FailedError, Setting, TimeOverError
from gpu_sections.shapes import MODELS, make_model, measured_row
from gpu_sections.shapes import lines as lines_of_shapes

KINDS = ("int4", "mxfp4", "fp8")
RUN = "cgopipe-streamed"


def run(setting: Setting) -> None:
    """The kernels first; then the last model, in 16 bits and rounded."""
    ended = setting.python(
        "gpu_sections.unpacking", "--device", setting.device, *(["--small"] if setting.small else [])
    )
    setting.keep(**json.loads(ended.check().out.splitlines()[-1]))
    model = make_model(setting, MODELS[-1])
    setting.add_row(**measured_row(setting, model, RUN))
    for kind in KINDS:
        try:
            setting.add_row(**measured_row(setting, rounded(setting, model, kind), RUN))
        except TimeOverError:
            raise
        except FailedError as error:
            setting.add_row(model=f"{model.name}-{kind}", run=RUN, unable=str(error))


def rounded(setting: Setting, model: Path, kind: str) -> Path:
    """``model`` with ``kind`` experts, made unless an earlier run did."""
    out = model.with_name(f"{model.name}-{kind}")
    if not (out / "config.json").exists():
        group = ["--group-size", "32"] if kind == "int4" else []
        setting.moelight("convert", model, out, "--experts", kind, *group).check()
    return out


def ratios(figures: dict[str, Any]) -> dict[str, dict[int, float]]:
    """Seconds in 16 bits over those of each format, by rows an expert."""
    rows = figures.get("products", [])
    plain = {row["rows"]: row["seconds"] for row in rows if row["format"] == "16 bits"}
    result: dict[str, dict[int, float]] = {}
    for row in rows:
        result.setdefault(row["format"], {})[row["rows"]] = plain[row["rows"]] / row["seconds"]
    return result


def lines(figures: dict[str, Any]) -> list[str]:
    """For the summary."""
    told = [f"experts by {figures['kernel']} ({figures['why']})"] if "kernel" in figures else []
    for form, by_rows in ratios(figures).items():
        speeds = ", ".join(f"{ratio:.2f} at {rows}" for rows, ratio in by_rows.items())
        told.append(f"{form}: rate over that of 16 bits by rows an expert: {speeds}")
    return told + lines_of_shapes(figures)
